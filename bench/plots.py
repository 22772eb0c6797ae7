"""The pictures of the project's pages, from the same rows as `tables`: SVG text by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from cute_sparse_mla.charts import PALETTE, Axis, Line, picture
from cute_sparse_mla.problem import Problem

from .harness import work
from .implementations import BWD, FWD
from .shapes import ALL_MODELS, POOLS, model_shape
from .suites import HEADS, MODEL_TOKENS, PLANNED, SINGLE, TEXT, V4_TOKENS
from .tables import H200, NAMES, PEER_NAMES, Results, by_heads, comparisons, v4_figures

Points = list[tuple[float, float]]
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
WAYS = {"ours": "ours, decided on the device", SINGLE: "token by token", PLANNED: "with a plan"}


def _points(pairs: Iterable[tuple[float, float | None]]) -> Points:
    return [(x, y) for x, y in pairs if y is not None]


def _both(r: Results, **facts: Any) -> float | None:
    times = [r.ms(which, **facts) for which in (FWD, BWD)]
    return None if None in times else sum(ms for ms in times if ms is not None)


def v4(r: Results) -> str:
    """The V4 contract: time and forward TFLOP/s against tokens."""
    times, rates = [], []
    figures = v4_figures(r)
    styles = {"H200, measured": {}, "GB200, measured": {}, "GB200, predicted": {"dashed": True},
              "GB200, published": {"dots": True, "faint": True}}  # fmt: skip
    configs = list(dict.fromkeys((f.heads, f.K, f.form) for f in figures if not f.form))
    for colour, config in zip(PALETTE, configs, strict=False):
        for where, style in styles.items():
            lines = [f for f in figures if (f.heads, f.K, f.form) == config and f.where == where]
            label = f"H {config[0]}, K {config[1]}: {where}" if lines else ""
            both = _points((f.T, f.both) for f in lines)
            speed = _points((f.T, 4 * f.T * f.K * f.heads * 512 / f.fwd / 1e9 if f.fwd else None) for f in lines)
            times.append(Line(both, label, colour, **style))
            rates.append(Line(speed, label, colour, **style))
    tokens = Axis("tokens", log=True, ticks=V4_TOKENS)
    return picture(
        ("DeepSeek-V4 contract: forward + backward", times, tokens, Axis("ms", log=True)),
        ("DeepSeek-V4 contract: forward", rates, tokens, Axis("TFLOP/s", low=0)),
    )


def tokens(r: Results) -> str:
    """Models: time and TFLOP/s of forward and backward against tokens."""
    times, rates = [], []
    for model, colour in zip(("glm5", "glm5.3-flash", "v4.1-flash"), PALETTE, strict=False):
        for tp, rows, dashed, faint in (
            (1, "random", False, False),
            (8, "random", True, False),
            (8, "pool2", True, True),
        ):
            facts = {"suite": "models", "model": model, "tp": tp, "rows": rows}
            found = _points((T, _both(r, T=T, **facts)) for T in MODEL_TOKENS)
            label = f"{NAMES[model]}, TP {tp}" + (", shared rows" if rows != "random" else "")
            times.append(Line(found, label, colour, dashed=dashed, faint=faint, dots=faint))
            rates.append(Line([(T, _flops(model, int(T), tp) / ms / 1e9) for T, ms in found], label, colour,
                              dashed=dashed, faint=faint, dots=faint))  # fmt: skip
    axis = Axis("tokens (queries = rows of kv)", log=True, ticks=MODEL_TOKENS)
    return picture(
        ("H200: forward + backward of a layer", times, axis, Axis("ms", log=True)),
        ("H200: forward + backward of a layer", rates, axis, Axis("TFLOP/s", low=0)),
    )


def _flops(model: str, T: int, tp: int) -> int:
    problem = model_shape(ALL_MODELS[model], T, T, tp).problem()
    return work(problem, FWD)[0] + work(problem, BWD)[0]


def heads(r: Results) -> str:
    """Time against heads, forward and backward, and their TFLOP/s."""
    panels = []
    axis = Axis("heads", low=0, ticks=(1, 16, 32, 48, 64, 96, 128))
    for which, name in ((FWD, "forward"), (BWD, "backward")):
        lines, rates = [], []
        for (impl, label), colour in zip(WAYS.items(), PALETTE, strict=False):
            rows = [by_heads(r).row(which, impl, H=count) for count in HEADS]
            known = [row for row in rows if row]
            lines.append(Line([(row["H"], row["ms"]) for row in known], label, colour, dots=True))
            rates.append(Line([(row["H"], row["tflops"]) for row in known], label, colour, dots=True))
        title = f"H200, {name}: D 576, K 2048, {TEXT[0]} x {TEXT[1]} text rows"
        panels += [(title, lines, axis, Axis("ms", low=0)), (title, rates, axis, Axis("TFLOP/s", low=0))]
    return picture(*panels)


def overlap(r: Results) -> str:
    """Time and TFLOP/s against what neighbouring tokens share."""
    panels = []
    for which, name in ((FWD, "forward"), (BWD, "backward")):
        lines, rates = [], []
        for count, colour in zip((8, 16, 32), PALETTE, strict=False):
            for impl, dashed in (("ours", False), (SINGLE, True)):
                rows = [r.row(which, impl, suite="overlap", H=count, rows=kind) for kind in (*POOLS, "random")]
                known = sorted((row["union"][str(64 // count)], row["ms"], row["tflops"]) for row in rows if row)
                label = f"{count} heads, {64 // count} tokens" if impl == "ours" else f"{count} heads, token by token"
                lines.append(Line([(x, ms) for x, ms, _ in known], label, colour, dashed, dots=not dashed))
                rates.append(Line([(x, rate) for x, _, rate in known], label, colour, dashed, dots=not dashed))
        axis = Axis("union of the tokens' rows / K", low=1)
        title = f"H200, {name}: D 576, K 2048, {TEXT[0]} x {TEXT[1]}"
        panels += [(title, lines, axis, Axis("ms", low=0)), (title, rates, axis, Axis("TFLOP/s", low=0))]
    return picture(*panels)


# -- roofline ------------------------------------------------------------------------------------------------------

GATHER, ADDS = "gather of kv rows, cp.async, two blocks deep", "fp32 adds of rows, red.global.add.v4.f32, 4 warps"
ADDS_AND_GATHER = "adds and gather together, 4 warps"


def floor_ms(r: Results, what: str, S_kv: int) -> float | None:
    """A measured floor of 4096 tokens, K 2048, D 576."""
    return next((f["ms"] for f in r.kernels if f["kind"] == "floor" and (f["what"], f["S_kv"]) == (what, S_kv)), None)


def matrix_rate(r: Results) -> float | None:
    """TFLOP/s of a large bf16 matrix product."""
    return next((row["tflops"] for row in r.measured if row["suite"] == "floors" and H200 in row["device"]), None)


def roofline(r: Results) -> str:
    """TFLOP/s against heads (FLOP per gathered or added byte grow with them), under the measured floors."""
    panels = []
    matrix = matrix_rate(r)
    for which, floors in ((FWD, (GATHER,)), (BWD, (ADDS, ADDS_AND_GATHER))):
        per_head = work(_layer(1), which)[0]
        lines = [Line([(1, matrix), (128, matrix)], "bf16 matrix product", "#7f7f7f")] if matrix else []
        for what, dashed in zip(floors, (False, True), strict=False):
            ms = floor_ms(r, what, 8192)
            if ms:
                roof = [(count, count * per_head / ms / 1e9) for count in HEADS]
                under = [(x, min(y, matrix or y)) for x, y in roof]
                lines.append(Line(under, f"{what.partition(',')[0]} of single tokens", "#2ca02c", dashed))
        for (impl, label), colour in zip(WAYS.items(), PALETTE[:2], strict=False):
            rows = [by_heads(r).row(which, impl, H=count) for count in HEADS]
            lines.append(Line([(row["H"], row["tflops"]) for row in rows if row], label, colour, dots=True))
        intensity = per_head / work(_layer(1), which)[1]
        name = "forward" if which == FWD else "backward"
        bytes_ = "gather" if which == FWD else "gather and adds"
        axis = Axis(f"heads ({intensity:.2f} FLOP a byte of {bytes_} each)", log=True, ticks=POWERS)
        panels.append((f"H200, {name}: D 576, K 2048, 8192 rows", lines, axis, Axis("TFLOP/s", log=True)))
    return picture(*panels)


def _layer(count: int) -> Problem:
    model = ALL_MODELS["glm5"]
    return model_shape(model, *TEXT, tp=model.heads // count).problem()


# -- peers ---------------------------------------------------------------------------------------------------------


def peers(r: Results) -> str:
    """The peers' time over ours, interleaved in one process, against heads."""
    panels = []
    for which, name in ((FWD, "forward"), (BWD, "backward")):
        found = [c for c in comparisons(r) if c.which == which]
        kinds = dict.fromkeys((c.peer, c.D, c.K, c.rows) for c in found)
        lines = [Line([(1, 1), (128, 1)], "", "#7f7f7f")]
        for (peer, D, K, rows), colour in zip(kinds, PALETTE * 2, strict=False):
            ratios: dict[float, list[float]] = {}
            for c in found:
                if (c.peer, c.D, c.K, c.rows) == (peer, D, K, rows):
                    ratios.setdefault(c.heads, []).append(c.ratio)
            # Several lengths have the same heads: a dot each, and the line through their geometric means.
            means = [(count, math.prod(values) ** (1 / len(values))) for count, values in sorted(ratios.items())]
            lines.append(Line(means, f"{PEER_NAMES[peer]}, {D}, {K}, {rows}", colour))
            lines += [Line([(count, one)], "", colour, dots=True) for count, values in ratios.items() for one in values]
        axis = Axis("heads", log=True, ticks=POWERS)
        panels.append((f"H200, {name}: time of a peer over ours (D, K, rows)", lines, axis, Axis("ratio", log=True)))
    return picture(*panels)


PICTURES: dict[str, Callable[[Results], str]] = {
    "v4": v4, "tokens": tokens, "heads": heads, "overlap": overlap, "roofline": roofline, "peers": peers,
}  # fmt: skip
