"""`backend="fastest"`: the measured table of who is fastest, by (architecture, D, heads) and pass.

The table is `data/fastest.json`, written by `python -m bench.fastest` from result rows of the benchmark and from
nothing else: each entry holds the shapes that were measured with a peer in the same process, with every figure. Where
nothing was measured there is no entry, and the package's own kernels run.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .problem import Problem

TABLE = Path(__file__).parent / "data" / "fastest.json"


@dataclass(frozen=True)
class Candidate:
    """A backend and why it stands where it does in the ranking."""

    backend: str
    figure: str


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    """The entries: `architecture`, `D`, `heads`, `pass`, and `shapes` with `ms` by backend."""
    return tuple(json.loads(TABLE.read_text(encoding="utf-8")))


def ranking(architecture: str, problem: Problem, which: str) -> list[Candidate]:
    """Backends measured at this architecture, D and head count, fastest first; empty where nothing was measured.

    Args:
        architecture: the device's own backend, which every entry has figures of.
        which: `forward` or `backward`.

    Ranked by the geometric mean, over the entry's shapes, of a backend's time over the own kernels'.
    """
    for entry in table():
        if (entry["architecture"], entry["D"], entry["heads"], entry["pass"]) == (
            architecture, problem.D, problem.heads_per_group, which,
        ):  # fmt: skip
            return ranked(entry)
    return []


def ranked(entry: dict[str, Any]) -> list[Candidate]:
    """An entry's backends, fastest first."""
    own, shapes = entry["architecture"], entry["shapes"]
    ratios: dict[str, list[float]] = {}
    for shape in shapes:
        for name, ms in shape["ms"].items():
            ratios.setdefault(name, []).append(ms / shape["ms"][own])
    means = {name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in ratios.items()}

    def figure(name: str) -> str:
        first = next(shape for shape in shapes if name in shape["ms"])
        text = f"{first['ms'][name]} ms at {first['T']} x {first['S_kv']} tokens, K {first['K']}"
        mean = f"{means[name]:.2f} times the {own} kernels' time over {len(ratios[name])} shapes"
        return f"{text}; {mean}" if name != own else text

    return [Candidate(name, figure(name)) for name in sorted(means, key=means.__getitem__)]
