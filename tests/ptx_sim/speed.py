"""How long the simulator takes: CPU time per warp instruction of every foreign launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import foreign_dsa as dsa
from .machine import Report

LIMIT = 6.0


def kernels() -> Iterator[tuple[str, Callable[[], dsa.Result]]]:
    for heads, dim in dsa.FORWARD:
        yield f"SM100 forward H{heads} D{dim}", lambda h=heads, d=dim: dsa.forward(dsa.problem(h, d, 256))
    for heads, dim in ((64, 512), (64, 576)):
        yield f"SM100 backward H{heads} D{dim}", lambda h=heads, d=dim: dsa.backward(dsa.problem(h, d, 256))
    for heads in dsa.PAIR:
        yield f"SM100 backward pair H{heads} D576", lambda h=heads: dsa.backward_pair(dsa.problem(h, 576, 128))
    for heads, dim in dsa.HOPPER:
        yield f"SM90 backward H{heads} D{dim}", lambda h=heads, d=dim: dsa.backward_sm90(dsa.problem(h, d, 128))


def table(repeats: int = 3, only: str = "") -> tuple[list[str], float]:
    """Rows of text, and the most microseconds that any launch takes; the best of `repeats` warm runs counts."""
    rows, most = [], 0.0
    for name, run in kernels():
        if only not in name:
            continue
        run()
        runs: list[list[Report]] = [run().reports for _ in range(repeats)]
        for number, reports in enumerate(zip(*runs, strict=True)):
            best = min(reports, key=lambda r: r.cpu_seconds)
            each = best.microseconds_per_instruction
            most = max(most, each)
            rows.append(
                f"{each:6.2f} us  {best.warp_instructions:8d}  {best.cpu_seconds:6.2f} s  {name} launch {number}"
            )
    return rows, most
