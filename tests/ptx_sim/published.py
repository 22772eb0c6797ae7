"""Times that others published, which predictions stand beside: from `bench/results/published.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = Path(__file__).resolve().parents[2] / "bench" / "results" / "published.jsonl"
WHEEL = "cudnn-frontend's 64-head kernels"
CONTRACT = "DeepSeek-V4 contract, CUDA-graph medians"
# Tiles of 128 rows: 64 heads fill half of one.
FORMS = ("64 heads padded in the kernel", "128 heads")
PASSES = {"forward": "fwd_ms", "backward": "bwd_ms"}


def _rows(source: str) -> Iterator[dict[str, Any]]:
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["source"] == source:
            yield row


def wheel_times() -> dict[tuple[str, int, int, int], tuple[tuple[int, float], ...]]:
    """(kernels, heads, D, K) -> (tokens = rows, ms) of the wheel's kernels on GB200."""
    found: dict[tuple[str, int, int, int], tuple[tuple[int, float], ...]] = {}
    for which, field in PASSES.items():
        for row in _rows(WHEEL):
            if field in row:
                key = (f"cudnn sm100 {which}", row["H"], row["D"], row["K"])
                found[key] = (*found.get(key, ()), (row["T"], row[field]))
    return found


def contract_times(which: str, tokens: tuple[int, ...]) -> dict[tuple[int, int], tuple[float, ...]]:
    """(heads, K) -> ms at `tokens`, D 512, of the DeepSeek-V4 contract on GB200; `which` is forward or backward."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for row in _rows(CONTRACT):
        if row["form"] in FORMS and PASSES[which] in row:
            found.setdefault((row["H"], row["K"]), {})[row["T"]] = row[PASSES[which]]
    return {key: tuple(times[T] for T in tokens) for key, times in found.items()}
