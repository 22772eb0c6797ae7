"""Result rows as JSON lines and as a short table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = "ours"


def read_jsonl(*files: Path) -> list[Row]:
    """The rows of files of JSON lines."""
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]


def append_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file of JSON lines, which is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Each implementation's median over ours (the first of our variants), for rows of one shape and pass."""
    ours = next((row["ms"] for row in rows if row["impl"].partition(":")[0] == OURS and row["ms"]), None)
    return {row["impl"]: row["ms"] / ours for row in rows if row["ms"]} if ours else {}


def _status(row: Row) -> str:
    if row["ok"] is None:
        return "unjudged"
    worst = max((v for v in row["of_limit"].values() if isinstance(v, float)), default=0.0)
    return f"ok ({worst:.2f} of limit)" if row["ok"] else "MISS"


def table(rows: Sequence[Row]) -> str:
    """Rows of one shape for people; `x ours` is the other's median over ours."""
    width = max((len(row["impl"]) for row in rows), default=4)
    lines = [
        f"  {'pass':8s}{'impl':{width}s} {'ms':>10s} {'p10..p90':>19s} {'TFLOP/s':>9s} {'TB/s':>7s} {'MB':>8s} "
        f"{'x ours':>7s}  verified"
    ]
    for which in dict.fromkeys(row["pass"] for row in rows):
        group = [row for row in rows if row["pass"] == which]
        relative = ratios(group)
        for row in group:
            head = f"  {which:8s}{row['impl']:{width}s}"
            if row["ms"] is None:
                lines.append(f"{head} {row['note']}")
                continue
            spread = f"{row['p10']:.4g}..{row['p90']:.4g}"
            peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
            ratio = f"{relative[row['impl']]:.2f}" if row["impl"] in relative else ""
            lines.append(
                f"{head} {row['ms']:10.4g} {spread:>19s} {row['tflops']:9.4g} {row['tbps']:7.3g} {peak:>8s} {ratio:>7s}"
                f"  {_status(row)}"
            )
    notes = dict.fromkeys(f"  {row['impl']}: {row['note']}" for row in rows if row["note"] and row["ms"] is not None)
    return "\n".join([*lines, *notes])
