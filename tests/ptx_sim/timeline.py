"""A picture of one steady-state step: what each warp role and engine does when, as plain SVG.

Warps that wait at the same instructions are one role; its first warp stands for all. Times are predicted clocks.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from .costs import kind_of
from .rates import Chip
from .replay import Memory, Replay, Result
from .trace import RUN, WAIT, Trace, WarpTrace

WIDTH, LABEL, ROW, TOP = 1500, 330, 24, 46
COLOURS = {"run": "#3b76b8", "wait": "#e7c9a9", "engine": "#4d9a5b"}
ENGINES = ("tensor core", "gather", "additions", "stores")
# Classes that name a role, most telling first, and what the role is called.
ROLES = {
    "matrix issue": "matrix products",
    "copy issue": "copies",
    "reduction": "fp32 additions",
    "special": "softmax",
    "tensor memory": "accumulators",
    "global memory": "global memory",
    "shared memory": "shared memory",
}


def roles(trace: Trace, cta: int = 0) -> list[tuple[str, list[WarpTrace]]]:
    """(name, warps) of the warps of a CTA that wait at the same sites, in warp order."""
    groups: dict[frozenset, list[WarpTrace]] = {}
    for warp in trace.warps:
        if warp.cta == cta:
            sites = frozenset(item[2] for item in warp.stream if item[0] == WAIT)
            groups.setdefault(sites, []).append(warp)
    found = []
    for warps in groups.values():
        kinds: Counter = Counter()
        for item in warps[0].stream:
            if item[0] == RUN:
                kinds.update(kind_of(trace.code[i]) for i in range(item[1], item[2]))
        # Set-up touches everything once; what a role does, it does all the time.
        least = 0.03 * (kinds.total() - kinds["move"])
        doing = [name for kind, name in ROLES.items() if kinds[kind] > least]
        numbers = [w.index for w in warps]
        span = f"warps {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"warp {numbers[0]}"
        found.append((f"{span}: {', '.join(doing[:2]) or 'set-up'}", warps))
    return found


def steady_window(result: Result, steps: int = 1) -> tuple[float, float]:
    """Start and end of `steps` middle repetitions of the wait that costs most of those that return often enough."""
    times: dict[tuple[str, int], list[float]] = {}
    for warp, index, end in result.marks:
        times.setdefault((warp, index), []).append(end)
    often = {site: ends for site, ends in times.items() if len(ends) >= steps + 3}
    if not often:
        return 0.0, result.clocks
    site = max(often, key=lambda s: (result.waits[s], s))
    ends = often[site]
    middle = min(len(ends) // 2, len(ends) - 1 - steps)
    return ends[middle], ends[middle + steps]


def _merged(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start - out[-1][1] <= gap:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


class _Picture:
    def __init__(self, first: float, last: float) -> None:
        self.first, self.last = first, last
        self.parts: list[str] = []
        self.rows = 0

    def x(self, time: float) -> float:
        return LABEL + (WIDTH - LABEL - 30) * (time - self.first) / (self.last - self.first)

    def bars(self, spans: list[tuple[float, float]], colour: str, height: float, title: str) -> None:
        pixel = (self.last - self.first) / (WIDTH - LABEL)
        for start, end in _merged(spans, pixel / 2):
            start, end = max(start, self.first), min(end, self.last)
            if end > start:
                y = TOP + self.rows * ROW + (ROW - height) / 2
                self.parts.append(
                    f'<rect x="{self.x(start):.1f}" y="{y:.1f}" width="{max(self.x(end) - self.x(start), 0.6):.1f}" '
                    f'height="{height:.0f}" fill="{colour}"><title>{escape(title)} {start - self.first:.0f} to '
                    f"{end - self.first:.0f}</title></rect>"
                )

    def row(self, label: str, share: float) -> None:
        y = TOP + self.rows * ROW + 16
        self.parts.append(f'<text x="6" y="{y}">{escape(label[:46])}</text>')
        self.parts.append(f'<text x="{LABEL - 8}" y="{y}" text-anchor="end">{100 * share:.0f} %</text>')
        self.rows += 1

    def text(self, title: str) -> str:
        height = TOP + self.rows * ROW + 30
        length = self.last - self.first
        marks = []
        for i in range(11):
            x, y = self.x(self.first + i * length / 10), TOP + self.rows * ROW
            marks.append(f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{y}" stroke="#ddd"/>')
            marks.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{i * length / 10:.0f}</text>')
        legend = (
            f'<text x="{LABEL}" y="36"><tspan fill="{COLOURS["run"]}">issues</tspan> '
            f'<tspan fill="#b8843f">waits</tspan> <tspan fill="{COLOURS["engine"]}">engine works</tspan>; '
            "blank: stalls on operands or pipes; clocks</text>"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                f'font-family="sans-serif" font-size="12">',
                f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
                f'<text x="6" y="18" font-size="14">{escape(title)}</text>',
                legend,
                *marks,
                *self.parts,
                "</svg>\n",
            ]
        )


def picture(trace: Trace, chip: Chip, memory: Memory, steps: int = 1) -> str:
    """SVG of `steps` steady-state steps of the first CTA."""
    result = Replay(trace, chip, memory, spans=True).run()
    first, last = steady_window(result, steps)
    lanes: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for lane, label, start, end in result.spans:
        if end > first and start < last:
            lanes.setdefault((lane, label), []).append((start, end))
    drawing = _Picture(first, last)

    def share(spans: list[tuple[float, float]]) -> float:
        inside = [(max(s, first), min(e, last)) for s, e in _merged(spans, 0.0)]
        return sum(max(e - s, 0.0) for s, e in inside) / (last - first)

    for name, warps in roles(trace):
        runs, waits = (lanes.get((warps[0].name, label), []) for label in ("", "wait"))
        if not runs and not waits:
            continue
        drawing.bars(waits, COLOURS["wait"], 8, f"{name}: waits")
        drawing.bars(runs, COLOURS["run"], 16, f"{name}: issues")
        drawing.row(name, share(runs))
    for cta in range(trace.ctas_per_cluster):
        for engine in ENGINES:
            spans = lanes.get((f"CTA {cta} {engine}", ""), [])
            if spans:
                drawing.bars(spans, COLOURS["engine"], 16, engine)
                drawing.row(f"{engine} of CTA {cta}" if trace.ctas_per_cluster > 1 else engine, share(spans))
    return drawing.text(
        f"predicted, {chip.name}: {trace.launch.kernel[:90]}, {steps} steady-state step, {last - first:.0f} clocks"
    )
