"""Every form of the SM100 kernels beside its witness: `python -m tests.sm100_coverage` rewrites the list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from bench.cases import Case

from . import sm100
from .ptx_sim import coverage

FORWARD, BACKWARD = "sm100 forward", "sm100 backward"
LISTS = ("sm100 union samples", "sm100 union lists")
LIST = Path(__file__).parent / "ptx_sim" / "coverage_sm100.md"
# Scores so large that the forward's running maximum moves and out is rescaled.
BASE = Case(
    S=4, S_kv=200, K=130, H=24, q_scale=4.0, invalid="shuffled", sink="random", dlse=True, causal=True, length="random"
)  # fmt: skip
CASES = (
    *(
        (BASE.but(H=H, D=D, dtype=dtype), 1)
        for dtype in (torch.bfloat16, torch.float16) for D in (512, 576) for H in (24, 100)
    ),
    (BASE.but(H=8, D=576, duplicates=True), 8),
    (BASE.but(H=16, D=512), 8),
    (BASE.but(H=16, D=576, index_dtype=torch.int64), None),
    (BASE.but(H=8, D=512, index_dtype=torch.int64), 1),
)  # fmt: skip


def forms(case: Case, tokens_per_tile: int | None) -> Iterator[tuple[str, list[str]]]:
    """`(kernel, forms)` of the forward and of the backward of a case; `None`: the device decides about groups."""
    inputs = case.inputs(seed=1)
    lists = LISTS if tokens_per_tile is None else LISTS[1:] if tokens_per_tile > 1 else ()
    out, lse, reports = sm100.call(inputs, tokens_per_tile=tokens_per_tile)
    runs = [((*lists, FORWARD), reports)]
    for deterministic in (False, True):
        *_, reports = sm100.call_backward(
            inputs, out, lse, tokens_per_tile=tokens_per_tile, deterministic=deterministic
        )
        # Where the device may decide, a deterministic call has no groups.
        made = () if deterministic and tokens_per_tile is None else lists
        runs.append((("sm100 row values", *made, BACKWARD, *(["sm100 ordered sum"] * deterministic)), reports))
    for names, reports in runs:
        # One kernel of two that are launched leaves at once: the same forms.
        for name, report in zip(names, reports, strict=False):
            yield name, coverage.executed_forms(report)


def main() -> None:
    """Run the cases and write the list."""
    found: dict[str, list[str]] = {}
    for case, tokens_per_tile in CASES:
        for name, used in forms(case, tokens_per_tile):
            known = found.setdefault(name, [])
            known += [form for form in used if form not in known]
    LIST.write_text(coverage.table(found) + "\n", encoding="utf-8")
    print(LIST.read_text(encoding="utf-8").splitlines()[0])


if __name__ == "__main__":
    main()
