"""The tables of the project's pages, each made from result rows alone: `bench.pages` puts them between markers.

Times of the V4 contract are in us, the others in ms. TFLOP/s count every slot by the conventions of `harness`; TB/s of
the V4 contract count gathered kv once per token, q and out. A figure without rows is a dash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .implementations import BOTH, BWD, FWD
from .report import Row, read_jsonl
from .suites import LAYERS, MODEL_TOKENS, PADDED, PLANNED, SINGLE, TEXT, V4_MODELS, V4_TOKENS

RESULTS = Path(__file__).parent / "results"
PAGES = RESULTS / "pages.jsonl"  # what `bench.pages --measure` wrote
H200, GB200 = "H200", "GB200"
NAMES = {
    "glm5": "GLM-5", "v32": "DeepSeek-V3.2", "v4-flash": "DeepSeek-V4-Flash", "v4-pro": "DeepSeek-V4-Pro",
    "v4-h128": "V4, 128 heads", "glm5.3-flash": "GLM-5.3-Flash", "v4.1-flash": "DeepSeek-V4.1-Flash",
    "glm5.3-flash-tail": "GLM-5.3-Flash, D 576 with a zero tail", "glm5.3-flash-2112": "GLM-5.3-Flash, K 2112",
    "v4-flash-ratio0": "V4, window only", "v4-flash-ratio128": "V4, ratio 128",
}  # fmt: skip
DASH = "-"


@dataclass(frozen=True)
class Results:
    """Every committed row that a table or picture is made from."""

    measured: Sequence[Row]
    published: Sequence[Row]
    predicted: Sequence[Row]  # this package's SM100 kernels, forward and backward
    known: Sequence[Row]  # calls measured or published, beside predicted
    peers: Sequence[Row]
    kernels: Sequence[Row]  # floors and variants of the Hopper kernels
    groups: Sequence[Row]  # token groups beside peers: `bench.groups`

    def ms(self, which: str, impl: str = "ours", chip: str = H200, **facts: Any) -> float | None:
        """Median of one measured pass."""
        row = self.row(which, impl, chip, **facts)
        return row["ms"] if row else None

    def row(self, which: str, impl: str = "ours", chip: str = H200, **facts: Any) -> Row | None:
        """The row of one measured pass."""
        for row in self.measured:
            passed = (row.get("impl"), row.get("pass")) == (impl, which) and row["ms"] and row["ok"]
            if passed and chip in row["device"] and _has(row, facts):
                return row
        return None

    def predicted_ms(self, which: str, **facts: Any) -> float | None:
        """The predicted time of this package's SM100 kernels."""
        kernels = f"project sm100 {'forward' if which == FWD else 'backward'}"
        found = (row["predicted_ms"] for row in self.predicted if row["kernels"] == kernels and _has(row, facts))
        return next(found, None)

    def published_row(self, chip: str, **facts: Any) -> Row:
        """What others published; an empty row where they did not."""
        return next((row for row in self.published if row["chip"] == chip and _has(row, facts)), {})


def load() -> Results:
    """The committed rows."""
    measured = read_jsonl(PAGES) if PAGES.exists() else []
    groups = read_jsonl(RESULTS / "groups.jsonl")
    return Results(
        measured,
        read_jsonl(RESULTS / "published.jsonl"),
        read_jsonl(RESULTS / "sm100_predicted.jsonl", RESULTS / "sm100_predicted_backward.jsonl"),
        read_jsonl(RESULTS / "predicted.jsonl"),
        [*measured, *groups, *read_jsonl(RESULTS / "h200.jsonl")],
        read_jsonl(RESULTS / "hopper_h200.jsonl"),
        groups,
    )


def _has(row: Row, facts: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in facts.items())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


def number(value: float | None, text: str = "{:.2f}") -> str:
    """A figure, or a dash for none."""
    return DASH if value is None else text.format(value)


def milliseconds(value: float | None) -> str:
    """Three significant digits, as far as there are any before the point."""
    return number(value, "{:.2f}" if (value or 0) < 10 else "{:.1f}" if (value or 0) < 100 else "{:.0f}")


# -- the V4 contract -----------------------------------------------------------------------------------------------

V4_HEAD = (
    "T",
    "heads, K",
    "where",
    "fwd us",
    "fwd TFLOP/s",
    "fwd TB/s",
    "bwd us",
    "bwd TFLOP/s",
    "fwd + bwd us",
    "peak MB",
)


@dataclass(frozen=True)
class V4Figures:
    """One line of the V4 table: times in ms, memory in MB."""

    T: int
    heads: int
    K: int
    where: str
    fwd: float | None
    bwd: float | None
    both: float | None
    peak: float | None = None
    form: str = ""

    def cells(self) -> list[str]:
        """The line."""
        D, slots = 512, self.T * self.K
        flops, size = 4.0 * slots * self.heads * D, 2 * D * (slots + 2 * self.T * self.heads)
        rates = [None if ms is None else work / ms / 1e9 for work, ms in
                 ((flops, self.fwd), (size, self.fwd), (2.5 * flops, self.bwd))]  # fmt: skip
        us = [number(None if ms is None else 1e3 * ms, "{:.0f}") for ms in (self.fwd, self.bwd, self.both)]
        return [
            str(self.T), f"{self.heads}, {self.K}{self.form}", self.where, us[0], number(rates[0], "{:.0f}"),
            number(rates[1]), us[1], number(rates[2], "{:.0f}"), us[2], number(self.peak, "{:.0f}"),
        ]  # fmt: skip


def v4_figures(r: Results, tokens: Iterable[int] = V4_TOKENS) -> list[V4Figures]:
    """Measured, predicted and published lines of the V4 contract."""
    lines = []
    for T in tokens:
        for model, heads, K in zip(V4_MODELS, (64, 128, 128), (640, 640, 1152), strict=True):
            facts = {"T": T, "H": heads, "K": K, "D": 512}
            for impl, form, there in _v4_forms(heads):
                for chip in (H200, GB200):
                    lines += _v4_measured(r, chip, impl, form, {**facts, "suite": "v4", "model": model})
                if impl == "ours":
                    sizes = {"tokens": T, "heads": heads, "K": K, "D": 512}
                    fwd, bwd = r.predicted_ms(FWD, **sizes), r.predicted_ms(BWD, **sizes)
                    if fwd and bwd:
                        lines.append(V4Figures(T, heads, K, "GB200, predicted", fwd, bwd, fwd + bwd))
                row = r.published_row(GB200, form=there, **facts)
                if row:
                    fwd, bwd = row["fwd_ms"], row["bwd_ms"]
                    lines.append(V4Figures(T, heads, K, "GB200, published", fwd, bwd, fwd + bwd, row["peak_mb"], form))
    return lines


def _v4_forms(heads: int) -> list[tuple[str, str, str]]:
    """`(implementation, how it is called here, how it is called where it was published)`."""
    if heads == 128:
        return [("ours", "", "128 heads")]
    return [
        ("ours", "", "64 heads padded in the kernel"),
        (PADDED, ", padded to 128 in memory", "64 heads padded to 128 in global memory"),
    ]


def _v4_measured(r: Results, chip: str, impl: str, form: str, facts: dict[str, Any]) -> list[V4Figures]:
    rows = [r.row(which, impl, chip, **facts) for which in (FWD, BWD, BOTH)]
    if None in rows:
        return []
    fwd, bwd, both = rows
    assert fwd and bwd and both
    peak = both["input_mb"] + both["peak_mb"]
    where = f"{chip}, measured"
    return [V4Figures(facts["T"], facts["H"], facts["K"], where, fwd["ms"], bwd["ms"], both["ms"], peak, form)]


def v4(r: Results) -> str:
    return markdown(V4_HEAD, [line.cells() for line in v4_figures(r)])


def v4_short(r: Results) -> str:
    return markdown(V4_HEAD, [line.cells() for line in v4_figures(r, V4_TOKENS[:1])])


# -- layers on text rows -------------------------------------------------------------------------------------------


def layers(r: Results) -> str:
    """A layer of each model."""
    lines = []
    for model, tp in LAYERS:
        fwd, bwd = (r.row(which, suite="layers", model=model, tp=tp) for which in (FWD, BWD))
        if not fwd or not bwd:
            continue
        name = NAMES[model] + (f", tensor parallel {tp}" if tp > 1 else "")
        times = [f"{milliseconds(row['ms'])} ({row['tflops']:.0f})" for row in (fwd, bwd)]
        lines.append(
            [name, *(str(fwd[key]) for key in ("S_kv", "H", "D", "K")), *times,
             f"{fwd['peak_mb']:.0f} / {bwd['peak_mb']:.0f}"]
        )  # fmt: skip
    head = ("layer", "S_kv", "heads", "D", "K", "forward ms (TFLOP/s)", "backward ms (TFLOP/s)", "extra MB, fwd / bwd")
    return markdown(head, lines)


BY_HEADS = {"T": TEXT[0], "S_kv": TEXT[1], "rows": "text", "D": 576, "K": 2048}


def by_heads(r: Results) -> Results:
    """Rows of text by head count: the suite's, or where it was not measured those of `bench.groups` and of layers."""
    suite = [row for row in r.measured if row["suite"] == "heads"]
    rows = suite or [*r.groups, *(row for row in r.measured if row["suite"] == "layers")]
    return replace(r, measured=[row for row in rows if _has(row, BY_HEADS)])


def groups(r: Results) -> str:
    """Few heads: tokens alone, in groups, and with a plan."""
    r, lines = by_heads(r), []
    for heads in (8, 16, 32):
        cells = [milliseconds(r.ms(which, impl, H=heads)) for which in (FWD, BWD) for impl in (SINGLE, "ours", PLANNED)]
        row = r.row(FWD, H=heads)
        tokens = 64 // heads
        union = number(row["union"][str(tokens)]) if row else DASH
        lines.append([str(heads), str(tokens), union, *cells])
    how = ("token by token", "grouped", "with a plan")
    head = ("heads", "tokens a tile", "union / K", *(f"{which}, {h}" for which in ("forward", "backward") for h in how))
    return markdown(head, lines)


def grouped(r: Results) -> str:
    """Token groups on text rows beside the peers, interleaved."""
    times: dict[tuple, dict[tuple[str, str], Row]] = {}
    for row in r.groups:
        if row["rows"] == "text" and H200 in row["device"]:
            size = (NAMES[row["model"]], row["T"], row["S_kv"], row["H"], row["tokens_per_tile"])
            times.setdefault(size, {})[row["pass"], row["impl"]] = row
    lines = []
    for (name, T, S_kv, count, tokens), found in times.items():
        union = found[FWD, "ours"]["union"][str(tokens)]
        columns = [
            (which, impl) for which, peer in ((FWD, "flash_mla"), (BWD, "cudnn")) for impl in (SINGLE, "ours", peer)
        ]
        cells = [milliseconds(found[key]["ms"] if key in found else None) for key in columns]
        lines.append([name, f"{T} x {S_kv}", str(count), str(tokens), number(union), *cells])
    head = ("layer", "queries x rows", "heads", "tokens a tile", "union / K", "forward alone", "grouped", "FlashMLA",
            "backward alone", "grouped", "cuDNN")  # fmt: skip
    return markdown(head, lines)


def group_gains(r: Results) -> str:
    """What groups gain over token by token and cost, as ranges over 8, 16 and 32 heads."""
    found: dict[tuple, dict[str, list[float]]] = {}
    for row in r.groups:
        if H200 in row["device"]:
            by = found.setdefault((NAMES[row["model"]], f"{row['T']} x {row['S_kv']}", row["rows"]), {})
            if row["impl"] == "ours" and row["gain"]:
                by.setdefault(f"{row['pass']} gain", []).append(row["gain"])
                by.setdefault(f"{row['pass']} share", []).append(100 * row["share"])
            elif row.get("of_forward") is not None:
                by.setdefault(row["impl"], []).append(100 * row["of_forward"])
    columns = [(f"{which} {what}", text) for which in (FWD, BWD) for what, text in (("gain", ".2f"), ("share", ".0f"))]
    columns += [("decision", ".1f"), ("lists", ".1f")]
    lines = [
        [*names, *(f"{min(by[key]):{text}} to {max(by[key]):{text}}" if key in by else DASH for key, text in columns)]
        for names, by in found.items()
    ]
    head = ("layer", "queries x rows", "rows", "forward: gain", "% of the implied", "backward: gain",
            "% of the implied", "deciding, % of a forward", "lists, %")  # fmt: skip
    return markdown(head, lines)


# -- models --------------------------------------------------------------------------------------------------------


def _pair(r: Results, **facts: Any) -> str:
    times = [r.ms(which, suite="models", **facts) for which in (FWD, BWD)]
    return " + ".join(milliseconds(ms) for ms in times) if None not in times else DASH


def models(r: Results) -> str:
    """GLM-5, GLM-5.3-Flash and V4.1 at every length and degree of tensor parallelism."""
    lines = []
    for model in ("glm5", "glm5.3-flash", "v4.1-flash"):
        for T in MODEL_TOKENS:
            facts = {"model": model, "T": T}
            cells = [_pair(r, tp=tp, rows="random", **facts) for tp in (1, 2, 4, 8)]
            published = [milliseconds(r.published_row(H200, tp=tp, **facts).get("both_ms")) for tp in (1, 8)]
            shared = _pair(r, tp=8, rows="pool2", **facts)
            lines.append([NAMES[model], f"{T // 1024}k", *cells, shared, *published])
    head = (
        "layer",
        "tokens",
        "TP 1",
        "TP 2",
        "TP 4",
        "TP 8",
        "TP 8, shared rows",
        "published, TP 1",
        "published, TP 8",
    )
    return markdown(head, lines)


def other_forms(r: Results) -> str:
    """Further forms of these layers at 16k tokens."""
    names = ("glm5.3-flash", "glm5.3-flash-tail", "glm5.3-flash-2112", "v4-flash-ratio0", "v4-flash-ratio128")
    lines = [
        [NAMES[name], *(_pair(r, model=name, T=16384, tp=tp, rows="random") for tp in (1, 8))] for name in names
    ]  # fmt: skip
    return markdown(("layer, 16k tokens", "TP 1: forward + backward ms", "TP 8"), lines)


# -- peers ---------------------------------------------------------------------------------------------------------

PEER_NAMES = {
    "flash_mla": "FlashMLA", "cudnn": "cuDNN frontend", "tilelang_example": "TileLang example",
    "tilelang_example_128": "TileLang example, 128 threads", "miles_v4": "miles",
    "tilelang_example_own_barriers": "TileLang example, barriers apart",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A peer and this package on the same inputs, interleaved in one process."""

    peer: str
    which: str
    heads: int
    D: int
    K: int
    T: int
    S_kv: int
    rows: str
    theirs: float
    ours: float

    @property
    def ratio(self) -> float:
        """Above 1 this package is faster."""
        return self.theirs / self.ours


def comparisons(r: Results) -> list[Comparison]:
    """The newest of each."""
    runs: dict[tuple, dict[str, Row]] = {}
    for row in r.peers:
        if row.get("ms") and not row.get("invalid") and H200 in row["device"]:
            key = (row["run"], row["pass"], *(row[name] for name in ("H", "D", "K", "T", "S_kv", "rows")))
            runs.setdefault(key, {})[row["impl"]] = row
    found: dict[tuple, tuple[str, Comparison]] = {}
    for (run, *rest), by_name in runs.items():
        for peer in PEER_NAMES:
            if peer in by_name and "ours" in by_name and run > found.get((peer, *rest), ("", None))[0]:
                which, heads, D, K, T, S_kv, rows = rest
                theirs, ours = by_name[peer]["ms"], by_name["ours"]["ms"]
                found[(peer, *rest)] = run, Comparison(peer, which, heads, D, K, T, S_kv, rows, theirs, ours)
    return sorted((c for _, c in found.values()), key=lambda c: (c.which != FWD, c.peer, c.D, c.K, c.T, c.heads))


def peers(r: Results) -> str:
    """Ours against peers."""
    lines = [
        [PEER_NAMES[c.peer], "forward" if c.which == FWD else "backward", str(c.heads), f"{c.D}, {c.K}",
         f"{c.T} x {c.S_kv}", c.rows, milliseconds(c.theirs), milliseconds(c.ours), number(c.ratio)]
        for c in comparisons(r)
    ]  # fmt: skip
    head = ("peer", "pass", "heads", "D, K", "queries x rows", "rows", "its ms", "ours", "its over ours")
    return markdown(head, lines)


DETERMINISTIC = "ours:deterministic"
SHORT_PEERS, SHORT_HEADS, SHORT_WIDTH = ("flash_mla", "cudnn"), (8, 16, 32, 64, 128), (576, 2048)


def deterministic(r: Results) -> str:
    """The deterministic backward beside the default one, from the newest run that measured both."""
    runs: dict[tuple, dict[str, float]] = {}
    facts = {"pass": BWD, "D": SHORT_WIDTH[0], "K": SHORT_WIDTH[1], "rows": "random"}
    for row in r.peers:
        if _has(row, facts) and row["ms"] and not row.get("invalid") and H200 in row["device"]:
            runs.setdefault((row["H"], row["T"], row["S_kv"], row["run"]), {})[row["impl"]] = row["ms"]
    newest: dict[tuple[int, int, int], dict[str, float]] = {}
    for (H, T, S_kv, _), by_name in sorted(runs.items()):
        if {"ours", DETERMINISTIC} <= by_name.keys():
            newest[H, T, S_kv] = by_name
    lines = [
        [str(H), f"{T} x {S_kv}", milliseconds(ms["ours"]), milliseconds(ms[DETERMINISTIC]),
         number(ms[DETERMINISTIC] / ms["ours"])]
        for (H, T, S_kv), ms in newest.items()
    ]  # fmt: skip
    return markdown(("heads", "queries x rows", "default", "deterministic", "ratio"), lines)


def peers_short(r: Results) -> str:
    """Two peers' times over ours by head count, D 576 and K 2048."""
    lines: dict[tuple, dict[int, float]] = {}
    for c in sorted(comparisons(r), key=lambda c: (c.which != FWD, c.peer, c.T, c.S_kv)):
        if c.peer in SHORT_PEERS and (c.D, c.K) == SHORT_WIDTH:
            which = "forward" if c.which == FWD else "backward"
            lines.setdefault((PEER_NAMES[c.peer], which, f"{c.T} x {c.S_kv}", c.rows), {})[c.heads] = c.ratio
    head = ("peer", "pass", "queries x rows", "rows", *(f"{heads} heads" for heads in SHORT_HEADS))
    return markdown(head, ([*facts, *(number(by.get(heads)) for heads in SHORT_HEADS)] for facts, by in lines.items()))


# -- predictions ---------------------------------------------------------------------------------------------------


def _predicted(r: Results, which: str) -> str:
    kernels = f"project sm100 {'forward' if which == FWD else 'backward'}"
    lines = []
    for row in r.predicted:
        if row["kernels"] != kernels:
            continue
        facts = {"H": row["heads"], "D": row["D"], "K": row["K"], "T": row["tokens"], "rows": "random"}
        here = [r.ms(which, chip=chip, suite=suite, **facts) for chip in (GB200, H200) for suite in ("v4", "models")]
        gb200, h200 = here[0] or here[1], here[2] or here[3]
        known = ", ".join(f"{p['ms']:.3f} ({p['source'].partition(',')[0]})" for p in row["published"])
        wheel = number((row["wheel"] or {}).get("predicted_ms"), "{:.3f}")
        ours = f"{row['predicted_ms']:.3f} ({row['tflops']})"
        lines.append([row["layer"], *(str(row[key]) for key in ("tokens", "heads", "D", "K")), ours, row["limiter"],
                      number(gb200, "{:.3f}"), number(h200, "{:.3f}"), wheel, known or DASH])  # fmt: skip
    head = ("layer", "tokens", "heads", "D", "K", "GB200, predicted ms (TFLOP/s)", "its limiter", "GB200, measured",
            "H200, measured", "cudnn-frontend's, predicted", "published")  # fmt: skip
    return markdown(head, lines)


def predicted_forward(r: Results) -> str:
    return _predicted(r, FWD)


def predicted_backward(r: Results) -> str:
    return _predicted(r, BWD)


def predicted_known(r: Results) -> str:
    """Per kernels, how far predictions are from what is known; a deviation is that of a ratio from 1."""
    found: dict[tuple[str, str, bool, str], list[Row]] = {}
    for row in r.known:
        source = "published" if row["source"].startswith("published") else "measured"
        found.setdefault((row["kernels"], row["chip"], row["used_for_fit"], source), []).append(row)
    lines = []
    for (kernels, chip, fit, source), rows in found.items():
        ratios = [row["ratio"] for row in rows]
        heads = ", ".join(map(str, sorted({row["heads"] for row in rows})))
        deviation = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
        lines.append([f"{kernels}{' (fit)' if fit else ''}", heads, f"{chip}, {source}", str(len(rows)),
                      f"{min(ratios):.2f} to {max(ratios):.2f}", f"{100 * deviation:.0f} %"])  # fmt: skip
    return markdown(("kernels", "heads", "times", "rows", "predicted / known", "mean deviation"), lines)


def predicted_groups(r: Results) -> str:
    """Predicted token groups that fill tiles of 64 rows."""
    lines = []
    for row in read_jsonl(RESULTS / "sm100_predicted_groups.jsonl"):
        if row["rows_of_a_tile"] != 64 or row["heads"] * row["tokens_per_tile"] != 64:
            continue
        cells = [NAMES[row["layer"]], *(str(row[key]) for key in ("heads", "tokens_per_tile")), number(row["implied"])]
        for which in ("forward", "backward"):
            found = row[which]
            cells += [f"{found['single_ms']:.3f}", f"{found['grouped_ms']:.3f} ({found['gain']:.2f})"]
        lines.append(cells)
    head = ("layer", "heads", "tokens a tile", "gain that the union implies", "forward alone", "grouped",
            "backward alone", "grouped")  # fmt: skip
    return markdown(head, lines)


def measured_in(r: Results) -> str:
    """What the figures were measured with, and how long it took."""
    parts = [row for row in r.measured if "seconds" in row]
    versions: dict[str, str] = next((row["versions"] for row in r.measured if row.get("versions")), {})
    known = ("python", "torch", "cuda", "tilelang", "cute_sparse_mla", "commit")
    what = ", ".join(f"{name} {versions[name]}" for name in known if name in versions)
    times = ", ".join(f"{row['suite']} {row['seconds']:.0f}" for row in parts)
    device = next((row["device"] for row in r.measured), "none")
    return f"Measured on one {device} ({what}); seconds, verification included: {times}."


# Packages that a user installs or has beside this one, and what needs them.
PACKAGES = {
    "python": "everything",
    "torch": "everything",
    "tilelang": "Hopper kernels",
    "nvidia-cutlass-dsl": "Blackwell kernels",
    "apache-tvm-ffi": "either kernels",
    "nvidia-cudnn-frontend": '`backend="cudnn"`',
    "flash_mla": '`backend="flash_mla"`',
    "quack-kernels": "nothing, installs beside",
    "triton": "nothing, installs beside",
}


def versions(r: Results) -> str:
    """The ranges that an installation accepts, and the versions that the committed rows were made with."""
    project = (RESULTS.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project, _, _ = project.partition("[tool.")
    # The extras for users stand before those for tests, which pin more.
    ranges = dict(reversed(re.findall(r'"([\w-]+)([<>=][^"]*)"', project)))
    ranges["python"] = re.findall(r'requires-python = "(.*)"', project)[0]
    seen: dict[tuple[str, bool], set[str]] = {}
    for row in read_jsonl(*(RESULTS / f"{name}.jsonl" for name in ("install_matrix", "fuzz", "h200", "parallel"))):
        found = row["versions"] if row.get("ok", True) and isinstance(row.get("versions"), dict) else {}
        for name, version in found.items():
            # Peers name themselves.
            name, version = version.split() if name == "impl" and " " in version else (name, version)
            seen.setdefault((name, H200 in row.get("device", "")), set()).add(version)
    lines = []
    for name, purpose in PACKAGES.items():
        cells = [", ".join(sorted(seen.get((name, gpu), {DASH}))) for gpu in (True, False)]
        lines.append([name, purpose, ranges.get(name, DASH).replace(",", ", "), *cells])
    return markdown(("package", "needed for", "accepted", "on an H200", "on CPUs (tests, simulator, installs)"), lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "v4": v4, "v4-4096": v4_short, "layers": layers, "groups": groups, "grouped": grouped, "group-gains": group_gains,
    "models": models, "other-forms": other_forms, "peers": peers, "peers-short": peers_short,
    "deterministic": deterministic, "predicted-forward": predicted_forward,
    "predicted-backward": predicted_backward, "predicted-groups": predicted_groups,
    "predicted-known": predicted_known,
    "measured-in": measured_in, "versions": versions,
}  # fmt: skip
