"""The backward of more than 64 heads a group in the simulator: pairs of CTAs that halve the columns of a tile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs

from .ptx_sim import coverage, project_hopper
from .ptx_sim.policies import Delay, Priorities
from .ptx_sim.races import Races
from .simulated_judge import judge_gradients
from .test_ptx_sim_hopper import LIST

REASON = project_hopper.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"Hopper kernels: {REASON}")
if REASON is None:
    project_hopper.capture_tilelang.prepare()

KERNEL = "sparse_mla_bwd_pair_kernel"
BASE = Case(S=2, S_kv=150, H=128, K=150)
CASES = (
    BASE.but(name="plain"),
    BASE.but(name="heads_72", H=72, D=512, invalid="shuffled", sink="random", dlse=True, length="random"),
    BASE.but(name="heads_65", H=65, K=65, causal=True, duplicates=True, sink="random"),
    BASE.but(name="groups", B=2, G=2, H=144, K=70, index_dtype=torch.int64, positions="random", invalid="out_of_range"),
    BASE.but(name="fp16", H=100, D=512, K=100, dtype=torch.float16, packed=True, dlse=True, causal=True),
    BASE.but(name="fp16_tail", H=80, K=64, dtype=torch.float16, sink="random", invalid="odd"),
    BASE.but(name="empty_rows", S=4, K=70, length="zero", sink="random", dlse=True),
    BASE.but(name="all_empty", K=70, invalid="all", sink="random"),
    BASE.but(name="few_valid_slots", D=512, S_kv=90, K=200, invalid="head", share=0.97),
    BASE.but(name="sink_plus_inf", H=96, D=512, K=40, sink=math.inf, dlse=True),
    BASE.but(name="large_scores", H=66, K=128, q_scale=64.0),
)


def judged(inputs: Inputs, **options: object) -> project_hopper.capture_tilelang.Recorder:
    given = {**inputs.options, "backend": "sm90", "config": SparseAttentionConfig(tokens_per_tile=1)}
    with project_hopper.simulated(**options) as recorder:

        def backward(i: Inputs, out: Tensor, lse: Tensor, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=dkv, **given)

        judge_gradients(inputs, backward)
    assert not [f for report in recorder.reports for f in report.findings]
    return recorder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case) -> None:
    observer = Races()
    recorder = judged(case.inputs(seed=len(case.name)), observer=observer)
    assert not observer.races, observer.races[0].text
    [launch] = [entry for entry in recorder.launches if entry.kernel == KERNEL]
    assert launch.cluster == (2, 1, 1) and launch.grid == (2 * case.B * case.S * case.G, 1, 1)
    # Every form is witnessed by a foreign kernel or by an H200, and stands in the generated list.
    used = {form for report in recorder.reports for form in coverage.executed_forms(report)}
    assert not used - set(coverage.witnesses())
    listed = LIST.read_text(encoding="utf-8")
    assert not [form for form in used if f"| `{form}` |" not in listed]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("D", (512, 576))
def test_schedules(D: int, seed: int) -> None:
    """Copies, products and what is sent held back at random, warps in any order."""
    case = BASE.but(S=2, H=96, D=D, K=200, sink="random", length="random", invalid="shuffled")
    judged(case.inputs(seed=D), policy=Delay(seed), order=Priorities(seed))


def test_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dkv exceeds the L2: lists of the rows, made for a few tokens at a time."""
    observer = Races()
    from cute_sparse_mla.hopper import launch

    case = BASE.but(S=5, H=72, K=70, causal=True, invalid="shuffled", duplicates=True)
    monkeypatch.setattr(launch, "L2_BYTES", 0)
    monkeypatch.setattr(launch, "SORT_BYTES", 4 * 3 * case.K)
    recorder = judged(case.inputs(seed=2), observer=observer)
    assert not observer.races, observer.races[0].text
    assert [entry.grid[0] for entry in recorder.launches if entry.kernel == KERNEL] == [6, 4]


@pytest.mark.parametrize(
    "case",
    (BASE.but(S=3), BASE.but(S=4, H=72, D=512, K=130, length="zero", sink="random", dlse=True, invalid="shuffled")),
    ids=("plain", "empty_rows"),
)
def test_a_pair_goes_over_tiles(case: Case) -> None:
    """On a GPU of two multiprocessors one pair has all tiles."""
    observer = Races()
    with project_hopper.going_over_tiles(2):
        recorder = judged(case.inputs(seed=case.S), observer=observer)
    assert not observer.races, observer.races[0].text
    assert [entry.grid[0] for entry in recorder.launches if entry.kernel == KERNEL] == [2]
