"""`bwd_cluster=2` on SM90, in the simulator: pairs of CTAs that halve the columns of a tile of the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import UnsupportedError
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
CONFIG = SparseAttentionConfig(bwd_cluster=2)
# Forms that no kernel by others has and no H200 has judged yet.
NOT_JUDGED = {
    "add.u64", "barrier.cluster.arrive.aligned", "barrier.cluster.wait.aligned", "ld.local.v4.b32", "setp.eq.b16",
    "st.b32", "st.local.v4.b32", "st.v4.b32", "wgmma n128 f16 A swizzle 128, B swizzle 128, majors KK",
    "wgmma n128 f16 A swizzle 128, B swizzle 128, majors MNMN", "wgmma n64 f16 A registers, B swizzle 128, majors KMN",
    "wgmma n64 f16 A swizzle 128, B swizzle 128, majors KMN", "xor.b16",
}  # fmt: skip
LONG = Case(
    S=3, S_kv=160, H=100, K=150, length="random", invalid="shuffled", sink="random", dlse=True, duplicates=True
)  # fmt: skip
GROUPS = Case(
    S=1, S_kv=90, G=2, H=144, D=512, K=70, dtype=torch.float16, index_dtype=torch.int64, positions="random",
    invalid="out_of_range",
)  # fmt: skip


def judged(inputs: Inputs, **options: object) -> project_hopper.capture_tilelang.Recorder:
    given = {**inputs.options, "backend": "sm90", "config": CONFIG}
    with project_hopper.simulated(**options) as recorder:

        def backward(i: Inputs, out: Tensor, lse: Tensor, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=dkv, **given)

        judge_gradients(inputs, backward)
    assert not [f for report in recorder.reports for f in report.findings]
    return recorder


def uneven() -> Inputs:
    """Lists of several blocks, of none, and of one."""
    inputs = LONG.inputs(seed=7)
    assert inputs.topk_length is not None
    inputs.topk_length.view(-1)[:] = torch.tensor((150, 0, 60))
    return inputs


@pytest.mark.parametrize("multiprocessors", (132, 2))
def test_lists_of_different_length(multiprocessors: int) -> None:
    """Each tile has a pair of its own, or one pair has all."""
    observer = Races()
    with project_hopper.going_over_tiles(multiprocessors):
        recorder = judged(uneven(), observer=observer)
    assert not observer.races, observer.races[0].text
    [launch] = [entry for entry in recorder.launches if entry.kernel == KERNEL]
    assert launch.cluster == (2, 1, 1) and launch.grid == (6 if multiprocessors > 2 else 2, 1, 1)
    forms_are_listed(recorder)


def forms_are_listed(recorder: project_hopper.capture_tilelang.Recorder) -> None:
    used = {form for report in recorder.reports for form in coverage.executed_forms(report)}
    assert used - set(coverage.witnesses()) <= NOT_JUDGED
    listed = LIST.read_text(encoding="utf-8")
    assert not [form for form in used if f"| `{form}` |" not in listed]


def test_what_is_judged_is_not_called_unjudged() -> None:
    assert not NOT_JUDGED & set(coverage.witnesses())


def test_groups_of_heads() -> None:
    observer = Races()
    recorder = judged(GROUPS.inputs(seed=3), observer=observer)
    assert not observer.races, observer.races[0].text
    forms_are_listed(recorder)


def test_schedules() -> None:
    """Copies, products and what is sent held back at random, warps in any order."""
    judged(uneven(), policy=Delay(1), order=Priorities(1))


def test_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dkv exceeds the L2: lists of the rows, made for a few tokens at a time."""
    from cute_sparse_mla.hopper import launch

    case = Case(S=3, S_kv=90, H=72, K=40, causal=True, invalid="shuffled", duplicates=True)
    monkeypatch.setattr(launch, "L2_BYTES", 0)
    monkeypatch.setattr(launch, "SORT_BYTES", 4 * 2 * case.K)
    recorder = judged(case.inputs(seed=2))
    assert [entry.grid[0] for entry in recorder.launches if entry.kernel == KERNEL] == [4, 2]


def test_a_deterministic_backward_is_refused() -> None:
    i = GROUPS.inputs()
    options = {**i.options, "backend": "sm90", "config": CONFIG}
    with project_hopper.simulated() as recorder, pytest.raises(UnsupportedError, match="bwd_cluster = 2 adds in no"):
        lse = i.q[..., 0].float()
        cute_sparse_mla.bwd(i.q, i.kv, i.dout, i.dout, i.indices, lse, deterministic=True, **options)
    assert not recorder.launches


def test_explain_says_that_it_is_slower() -> None:
    i = GROUPS.inputs()
    answers = [
        cute_sparse_mla.explain(i.q, i.kv, i.indices, capability=(9, 0), config=config, causal=True, d_v=512)
        for config in (CONFIG, None)
    ]
    assert [("slower than the default" in str(answer)) for answer in answers] == [True, False]
