"""The config table, measured again: `bench --tune`.

For every class of the table (D, heads, K, rows of kv) one shape is run, on random rows and where the text is long
enough on text rows, with the table's own config and with each config that differs from it in one field and that the
kernels take; a value that they do not honour is so never tried. A config counts by the sum of forward and backward,
verified, as a geometric mean over the kinds of rows; it would replace the table's where it is faster by `LEAST_GAIN`
and on no kind of rows slower by that.

The rows are kept (`--out`), and `--write-table` makes `data/configs.json` of them, which `config.py` reads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_sparse_mla import config as config_table
from cute_sparse_mla.config import ANY, THREAD_COUNTS, SparseAttentionConfig
from cute_sparse_mla.problem import KERNEL_DIMS, MAX_HEADS_PER_GROUP, Problem

from . import report
from .harness import Run, Settings, run_shape
from .implementations import BWD, FWD, Ours
from .report import Row
from .shapes import BenchShape, plain_shape, unsupported_rows

# Classes, each with the number that stands for it.
HEADS = {(1, 8): 8, (9, 16): 16, (17, 32): 32, (33, 64): 64, (65, MAX_HEADS_PER_GROUP): 128}
SLOTS = {(1, 1024): 640, (1025, ANY[1]): 2048}
LENGTHS = {(1, 16_384): 8192, (16_385, ANY[1]): 65_536}
TOKENS = 4096
# One field at a time.
VALUES = {
    "fwd_threads": THREAD_COUNTS, "fwd_stages": (1, 2, 3, 4, 5), "fwd_block_k": (32, 64, 128),
    "bwd_threads": THREAD_COUNTS, "bwd_stages": (1, 2, 3), "bwd_block_k": (32, 64, 128),
    "bwd_split_store": (1, 2, 4, 8), "tokens_per_tile": (1, 2, 4, 8, 16),
}  # fmt: skip
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class TableClass:
    """Where a row of the table holds, and the shape that is measured for it."""

    D: int
    heads: tuple[int, int]
    K: tuple[int, int]
    S_kv: tuple[int, int]
    shape: BenchShape


def _within(classes: Iterable[tuple[int, int]], value: int) -> tuple[int, int]:
    return next(bounds for bounds in classes if bounds[0] <= value <= bounds[1])


def classes(shapes: Sequence[BenchShape] = ()) -> list[TableClass]:
    """The classes of these shapes, or all of them."""
    if not shapes:
        shapes = [
            plain_shape(f"{TOKENS},{S_kv},{H},{D},{K}")
            for D, _ in KERNEL_DIMS
            for H in HEADS.values()
            for K in SLOTS.values()
            for S_kv in LENGTHS.values()
        ]
    return [TableClass(s.D, _within(HEADS, s.H), _within(SLOTS, s.K), _within(LENGTHS, s.S_kv), s) for s in shapes]


def candidates(problem: Problem, device: torch.device) -> list[Ours]:
    """The table's own choice, as `ours`, and what differs from it in one field and is taken."""
    chosen = Ours().explained(problem, device).config or SparseAttentionConfig()
    found = [Ours()]
    for name, values in VALUES.items():
        for value in values:
            if value != getattr(chosen, name):
                ours = Ours(f"{name}={value}")
                if not ours.unsupported_pass(problem, FWD, device):
                    found.append(ours)
    return found


def _sums(rows: Iterable[Row]) -> dict[str, float]:
    """Forward and backward of each implementation that was right in both."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row["ms"] and row["ok"]:
            sums.setdefault(row["impl"], []).append(row["ms"])
    return {name: sum(ms) for name, ms in sums.items() if len(ms) == 2}


def verdict(what: TableClass, table: str, by_rows: dict[str, list[Row]], run: Run) -> Row:
    """A row of kind `tune`: every config's times, the best config, and whether it would replace the table's."""
    sums = {kind: _sums(rows) for kind, rows in by_rows.items()}
    names = set.intersection(*(set(ms) for ms in sums.values())) if sums else set()
    ratios = {name: [ms[name] / ms["ours"] for ms in sums.values()] for name in names if "ours" in names}
    means = {name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in ratios.items()}
    fit = {n: mean for n, mean in means.items() if max(ratios[n]) < 1 + LEAST_GAIN and mean < 1 - LEAST_GAIN}
    best = min(fit, key=fit.__getitem__, default="ours")
    times = {
        kind: {f"{row['impl']} {row['pass']}": row["ms"] for row in rows if row["ms"]} for kind, rows in by_rows.items()
    }
    shape = what.shape
    return {
        "kind": "tune", "run": run.id, "D": what.D, "heads": what.heads, "K": what.K, "S_kv": what.S_kv,
        "shape": f"{shape.T} x {shape.S_kv}, H {shape.H}, D {shape.D}, K {shape.K}", "table": table,
        "ms": times, "best": best.partition(":")[2], "changes": best != "ours",
        "of_table": {name.partition(":")[2]: round(mean, 3) for name, mean in sorted(means.items()) if name != "ours"},
        "device": run.device_name, "versions": run.versions,
    }  # fmt: skip


def measure(what: TableClass, settings: Settings, run: Run, indexer: Any) -> Row:
    """Run a class: on random rows, and on text rows where there are some."""
    problem = what.shape.problem()
    tried = candidates(problem, settings.device)
    kinds = [replace(what.shape, rows=kind) for kind in ("random", "text")]
    by_rows = {
        shape.rows: run_shape(shape, tried, replace(settings, passes=(FWD, BWD)), run, indexer)
        for shape in kinds
        if not unsupported_rows(shape, indexer)
    }
    return verdict(what, str(tried[0].explained(problem, settings.device).config), by_rows, run)


def describe(row: Row) -> str:
    """A verdict for people."""
    lines = [f"{row['shape']}: " + ("the table stays" if not row["changes"] else f"would change to {row['best']}")]
    for kind, ms in row["ms"].items():
        lines.append(f"  {kind:7s}" + ", ".join(f"{name} {value:g}" for name, value in ms.items()))
    if row["of_table"]:
        lines.append("  of the table's time: " + ", ".join(f"{n} {mean:g}" for n, mean in row["of_table"].items()))
    return "\n".join(lines)


# -- the table's file ----------------------------------------------------------------------------------------------


def figure(row: Row, name: str) -> str:
    """The measurement that a row of the table carries."""
    parts = []
    for kind, ms in row["ms"].items():
        if f"{name} {FWD}" in ms:
            parts.append(f"{kind} rows {ms[f'{name} {FWD}']:g} / {ms[f'{name} {BWD}']:g}")
    return f"{row['device']}, {row['shape']}: forward / backward ms on {', '.join(parts)}"


def entries(rows: Iterable[Row], architecture: str) -> Iterator[dict[str, Any]]:
    """What `data/configs.json` holds: a row for each class that was measured, with the better config."""
    for row in rows:
        name = f"ours:{row['best']}" if row["changes"] else "ours"
        changed = dict(part.split("=") for part in row["best"].split(",")) if row["changes"] else {}
        yield {
            "architecture": architecture, "D": row["D"], "heads": row["heads"], "K": row["K"], "S_kv": row["S_kv"],
            "changes": {key: int(value) for key, value in changed.items()}, "figure": figure(row, name),
        }  # fmt: skip


def write_table(rows: Sequence[Row], architecture: str) -> None:
    """Replace the measured rows of an architecture."""
    kept = [entry for entry in config_table.measured_entries() if entry["architecture"] != architecture]
    lines = [json.dumps(entry) for entry in (*kept, *entries(rows, architecture))]
    config_table.MEASURED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main(args: argparse.Namespace, shapes: Sequence[BenchShape], settings: Settings, run: Run, indexer: Any) -> int:
    """Measure all classes, print what would change, keep the rows. Exit code 1 where the table's own config fails."""
    rows = []
    for what in classes(shapes):
        row = measure(what, settings, run, indexer)
        rows.append(row)
        if args.out:
            report.append_jsonl(args.out, [row])
        print(describe(row), flush=True)
    print(f"{sum(row['changes'] for row in rows)} of {len(rows)} rows of the table would change")
    if args.write_table:
        problem = classes(shapes)[0].shape.problem()
        write_table(rows, str(Ours().explained(problem, settings.device).backend))
    return int(any(not all(f"ours {which}" in ms for which in (FWD, BWD)) for row in rows for ms in row["ms"].values()))
