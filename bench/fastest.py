"""Writes the table of `backend="fastest"` from benchmark rows: `python -m bench.fastest [RESULTS ...] [--out FILE]`.

A shape enters when one run measured the package's own kernels and at least one external backend on it, nobody missing
the verification; of several such runs the last counts. Nothing else is written, and nothing is filled in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cute_sparse_mla import arguments, fastest
from cute_sparse_mla.dispatch import EXTERNAL_BACKENDS
from cute_sparse_mla.problem import BACKWARD, FORWARD

from .implementations import BWD, FWD
from .report import read_jsonl

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results" / "h200.jsonl"
PASSES = {FWD: FORWARD, BWD: BACKWARD}
SHAPE = ("model", "T", "S_kv", "K", "rows")


def _runs(rows: Iterable[Row]) -> dict[tuple, dict[str, Row]]:
    """Rows of one run, shape and pass, by implementation, in the order of the files."""
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        wanted = row["impl"] == "ours" or any(row["impl"] == b.name for b in EXTERNAL_BACKENDS)
        if wanted and row["pass"] in PASSES and row["ms"] and row["ok"] and not row.get("invalid"):
            key = (row["run"], row["D"], row["H"], row["pass"], *(row[name] for name in SHAPE))
            groups.setdefault(key, {})[row["impl"]] = row
    return groups


def entries(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The table's entries, sorted."""
    found: dict[tuple, dict[tuple, dict[str, Any]]] = {}
    for (run, D, heads, which, *shape), by_name in _runs(rows).items():
        if "ours" not in by_name or len(by_name) < 2:
            continue
        own = by_name["ours"]
        architecture = own["config"]["backend"]
        ms = {architecture if name == "ours" else name: row["ms"] for name, row in by_name.items()}
        entry = dict(zip(SHAPE, shape, strict=True)) | {"run": run, "device": own["device"], "ms": ms}
        found.setdefault((architecture, D, heads, PASSES[which]), {})[tuple(shape)] = entry
    return [
        dict(zip(("architecture", "D", "heads", "pass"), key, strict=True)) | {"shapes": list(shapes.values())}
        for key, shapes in sorted(found.items())
    ]


def text(table: Sequence[dict[str, Any]]) -> str:
    """The table as the file holds it: an entry a line."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in table) + "\n]\n" if table else "[]\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.fastest", description="Writes the table of backend='fastest'.")
    parser.add_argument(
        "results",
        nargs="*",
        type=arguments.input_file,
        default=[RESULTS],
        help="files of benchmark rows (default: the committed ones)",
    )
    parser.add_argument(
        "--out", type=arguments.output_file, default=fastest.TABLE, help="the table (default: the package's)"
    )
    args = parser.parse_args(argv)
    table = entries(read_jsonl(*args.results))
    args.out.write_text(text(table), encoding="utf-8")
    for entry in table:
        ranked = fastest.ranked(entry)
        first = f"{entry['architecture']}, D {entry['D']}, {entry['heads']} heads, {entry['pass']}: {ranked[0].backend}"
        print(f"{first} ({'; '.join(f'{c.backend}: {c.figure}' for c in ranked)})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
