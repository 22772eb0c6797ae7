"""The SM100 backward in the simulator: head counts, the contract's clauses, groups of tokens, races, known bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cute_sparse_mla.sm100 import launch
from cute_sparse_mla.sm100.backward_plan import BackwardPlan

from bench.cases import CONTRACT_CASES, Case
from cute_sparse_mla import UnsupportedError
from cute_sparse_mla.precision import Inputs, Judge, compare_rows
from cute_sparse_mla.problem import Problem

from .ptx_sim import capture_cute
from .ptx_sim.policies import Delay, Priorities
from .ptx_sim.project_sm100 import simulated
from .ptx_sim.races import Races
from .sm100 import call_backward, judge_backward, sentinel_case

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 simulator: {REASON}")
# Each clause once, with dlse: beside the plain ones only what reads dlse would differ.
CASES = [case for case in CONTRACT_CASES if case.dlse and case.name not in ("all_empty+dlse", "one_slot+dlse")]


# Of the sweep of `make sentinel-sim`.
@pytest.mark.parametrize(("heads", "D", "K", "sink", "causal"), (
    (1, 512, 100, None, True), (8, 576, 192, "random", False), (24, 576, 1, "random", True),
    (64, 512, 192, None, False), (64, 576, 64, "random", True), (100, 512, 64, "random", False),
    (100, 576, 100, None, True),
))  # fmt: skip
def test_head_count_with_sentinels(heads: int, D: int, K: int, sink: str | None, causal: bool) -> None:
    judge_backward(sentinel_case(heads, D, K, sink, causal).but(dlse=True).inputs(seed=heads))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case) -> None:
    judge_backward(case.but(D=576, d_v=512).inputs(seed=3))


@pytest.mark.parametrize("tokens", (2, 8, 16))
def test_grouped_tokens(tokens: int) -> None:
    case = Case(S=5, S_kv=60, H=4 if tokens > 8 else 8, K=33, causal=True, invalid="shuffled", sink="random", dlse=True)
    judge_backward(case.inputs(), tokens_per_tile=tokens)


def test_a_pair_of_ctas_with_grouped_tokens() -> None:
    judge_backward(Case(S=3, S_kv=90, H=48, K=70, D=512, invalid="shuffled").inputs(), tokens_per_tile=2)


@pytest.mark.parametrize("heads", (24, 72))
def test_padding_inside_equals_zero_heads_in_memory(heads: int) -> None:
    """The same kernel fed zero heads up to its tile: dq and dkv bit for bit; torch sums d_sink."""
    inputs = sentinel_case(heads, 576, 64, "random", True).inputs(seed=heads)
    out, lse = Judge(inputs).budget_forward()
    dq, dkv, d_sink, _ = call_backward(inputs, out, lse)
    padding = (0, 0, 0, -heads % 64)
    wide_out, wide_dout, wide_q = (torch.nn.functional.pad(t, padding) for t in (out, inputs.dout, inputs.q))
    wide = replace(
        inputs, q=wide_q, dout=wide_dout, attn_sink=torch.nn.functional.pad(inputs.attn_sink, (0, -heads % 64))
    )
    wide_dq, wide_dkv, wide_d_sink, _ = call_backward(wide, wide_out, torch.nn.functional.pad(lse, (0, -heads % 64)))
    assert torch.equal(dq, wide_dq[:, :, :heads]) and not wide_dq[:, :, heads:].any()
    assert torch.equal(dkv, wide_dkv)
    torch.testing.assert_close(d_sink, wide_d_sink[:heads], rtol=1e-5, atol=1e-5)


def test_strided_tensors_are_read_in_place() -> None:
    inputs = Case(B=2, S=3, S_kv=40, H=12, G=2, K=66, D=512, invalid="shuffled", positions="random").inputs(seed=6)
    wide = torch.full((2, 2, 80, 512), torch.nan, dtype=torch.bfloat16)
    wide[:, :, ::2] = inputs.kv.transpose(1, 2)
    judge_backward(
        replace(
            inputs,
            q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2),
            dout=torch.cat((inputs.dout, inputs.dout), dim=-1)[..., :512],
            kv=wide[:, :, ::2].transpose(1, 2),
            indices=inputs.indices.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        )
    )


def test_dkv_is_rounded_or_added_to() -> None:
    inputs = sentinel_case(8, 512, 100, "random", False).inputs(seed=2)
    judged = Judge(inputs)
    out, lse = judged.budget_forward()
    dq, dkv, d_sink, _ = call_backward(inputs, out, lse)
    assert dkv.dtype == torch.bfloat16
    assert all(check.ok for check in judged.gradient_checks(out, lse, dq, dkv, d_sink))
    again = dkv.float()
    call_backward(inputs, out, lse, dkv=again)
    exact, granted = (judged.gradients(out, lse, rule).dkv * 2 for rule in judged.rules)
    assert compare_rows("dkv", again, exact, granted).ok


@pytest.mark.parametrize("way", ("rounded", "added", "deterministic"))
@pytest.mark.parametrize("above", (85, 88, 89))
def test_gradients_below_the_normal_range(above: int, way: str) -> None:
    """Sinks that leave next to nothing of out: w is 1e-37 to 1e-39, and adds in global memory flush subnormals."""
    heads = 72 if way == "deterministic" else 5
    case = Case(S=2, S_kv=150, H=heads, K=128, sink=above + 5.3, invalid="shuffled", share=0.1)  # lse is about 5.3
    inputs = case.inputs(seed=1)
    judged = Judge(inputs)
    out, lse = judged.budget_forward()
    given = torch.zeros(inputs.kv.shape) if way == "added" else None
    dq, dkv, d_sink, _ = call_backward(inputs, out, lse, dkv=given, deterministic=way == "deterministic")
    checks = judged.gradient_checks(out, lse, dq, dkv, d_sink)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    assert float(dkv.abs().max()) > 0


@pytest.mark.parametrize("deterministic", (False, True))
def test_positions_at_the_ends_of_int64(deterministic: bool) -> None:
    inputs = Case(S=3, S_kv=50, H=5, K=40, D=512, causal=True, positions="random").inputs(seed=1)
    assert inputs.q_positions is not None
    inputs.q_positions[0] = torch.tensor((2**63 - 1, 2**62, -(2**63)))
    judged = Judge(inputs)
    out, lse = judged.budget_forward()
    dq, dkv, d_sink, _ = call_backward(inputs, out, lse, deterministic=deterministic)
    checks = judged.gradient_checks(out, lse, dq, dkv, d_sink)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


def test_a_scale_that_the_unit_would_make_subnormal() -> None:
    inputs = Case(S=2, S_kv=50, H=5, K=40, D=512, sm_scale=1e-37, sink="random").inputs(seed=1)
    judged = Judge(inputs)
    out, lse = judged.budget_forward()
    checks = judged.gradient_checks(out, lse, *call_backward(inputs, out, lse)[:3])
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


def test_sums_are_read_where_they_are() -> None:
    sums = torch.randn(1, 8, 1, 576)
    assert launch.columns_of(sums).data_ptr() == sums.data_ptr()


def test_too_many_slots_are_refused_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Case(S=16, S_kv=64, H=4, K=7500, D=512).inputs(seed=2)
    out, lse = torch.zeros(inputs.dout.shape).bfloat16(), torch.zeros(inputs.dout.shape[:-1])
    monkeypatch.setattr(launch, "_build", lambda: pytest.fail("compiled"))
    with pytest.raises(UnsupportedError, match="slots of a tile"):
        call_backward(inputs, out, lse, deterministic=True, tokens_per_tile=16)


def test_ordered_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Case(S=3, S_kv=50, H=5, K=40, D=512).inputs(seed=2)
    out, lse = Judge(inputs).budget_forward()
    whole = call_backward(inputs, out, lse, deterministic=True)[1]
    monkeypatch.setattr(launch, "ROWS_AT_A_TIME", 16)
    assert torch.equal(call_backward(inputs, out, lse, deterministic=True)[1], whole)


def test_late_asynchronous_work_changes_nothing() -> None:
    """One tile and no row twice: every element of dkv has one addition a block, so bits are comparable."""
    inputs = Case(S=1, S_kv=200, H=16, K=192, invalid="shuffled", dlse=True).inputs(seed=9)
    out, lse = Judge(inputs).budget_forward()
    prompt, late = (call_backward(inputs, out, lse, **options) for options in ({}, {"policy": Delay(seed=16)}))
    assert torch.equal(prompt[0], late[0]) and torch.equal(prompt[1], late[1])


@pytest.mark.parametrize(("heads", "D", "deterministic"), (
    (24, 576, False), (100, 512, False), (100, 576, False), (72, 576, True),
))  # fmt: skip
def test_no_races(heads: int, D: int, deterministic: bool) -> None:
    inputs = sentinel_case(heads, D, 192, "random", True).but(S=2).inputs(seed=1)
    out, lse = Judge(inputs).budget_forward()
    observer = Races()
    call_backward(inputs, out, lse, deterministic=deterministic, observer=observer)
    assert not observer.races, observer.races[:3]


# -- fixed order ---------------------------------------------------------------------------------------------------

DETERMINISTIC = (
    (Case(S=5, S_kv=30, H=16, K=70, D=512, invalid="shuffled", sink="random", dlse=True), 1),
    (Case(S=4, S_kv=30, H=72, K=70, D=576, invalid="shuffled", causal=True, index_dtype=torch.int64), 1),
    (Case(B=2, S=3, S_kv=30, H=8, G=2, K=40, D=576, length="random", causal=True, positions="random"), 1),
    (Case(S=5, S_kv=60, H=8, K=33, D=512, causal=True, invalid="shuffled"), 2),
)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace of few tiles: several parts of a call, the last one smaller."""
    monkeypatch.setattr(launch, "WORKSPACE", 2 * 90 * (4 * 576 + launch.SORT_BYTES))


@pytest.mark.parametrize(("case", "tokens"), DETERMINISTIC, ids=lambda value: str(value)[:60])
def test_deterministic(case: Case, tokens: int, small_parts: None) -> None:
    judge_backward(case.inputs(seed=4), tokens_per_tile=tokens, deterministic=True)


def test_deterministic_sums_do_not_depend_on_schedules_or_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten adversarial schedules of two CTAs that add to the same rows: bit for bit; plain additions are not."""
    inputs = Case(S=4, S_kv=20, H=16, K=70, invalid="shuffled", sink="random", dlse=True).inputs(seed=4)
    out, lse = Judge(inputs).budget_forward()

    def gradients(seed: int, deterministic: bool) -> tuple[torch.Tensor, ...]:
        how = dict(ctas=2, resident=2, policy=Delay(seed), order=Priorities(seed), deterministic=deterministic)
        dq, dkv, d_sink, _ = call_backward(inputs, out, lse, dkv=torch.zeros(inputs.kv.shape), **how)
        return dq, dkv, d_sink

    first, *others = (gradients(seed, True) for seed in range(10))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    one, two = (gradients(seed, False)[1] for seed in range(2))
    assert not torch.equal(one, two)
    monkeypatch.setattr(launch, "WORKSPACE", 80 * (4 * 576 + launch.SORT_BYTES))
    assert torch.equal(gradients(0, True)[1], first[1])


# -- known bugs of such kernels ------------------------------------------------------------------------------------


@pytest.fixture
def without_the_wait_for_p(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel whose softmax warps write P and dS without waiting for the products that read the block before."""
    capture_cute.prepare()
    from cute_sparse_mla.sm100 import build, ptx
    from cute_sparse_mla.sm100.backward import Backward

    class Hasty(Backward):
        def softmax(self, at, n, by, smem, bar, *rest):  # type: ignore[no-untyped-def]
            super().softmax(at, n, by, smem, {**bar, "p_free": None}, *rest)

    wait = ptx.wait
    monkeypatch.setattr(ptx, "wait", lambda barrier, parity: None if barrier is None else wait(barrier, parity))
    monkeypatch.setitem(build.KERNELS, BackwardPlan, (build.backward, Hasty))
    build.kernel.cache_clear()
    yield
    build.kernel.cache_clear()


@pytest.mark.parametrize("heads", (64, 128))
def test_overwriting_operands_of_the_later_columns_is_reported(heads: int, without_the_wait_for_p: None) -> None:
    """What is written in shared memory during a block's dkv products must leave the operands of all columns alone."""
    inputs = sentinel_case(heads, 512, 192, None, False).but(S=1).inputs(seed=1)
    out, lse = Judge(inputs).budget_forward()
    observer = Races()
    call_backward(inputs, out, lse, observer=observer)
    assert observer.races


def row_values(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    with simulated(strict=True):
        problem = Problem(1, 2, 40, inputs.q.shape[-2], 1, 20, 512, 512, out.dtype, torch.int32)
        return launch.row_stats(problem, out, inputs.dout, lse, inputs.dlse, inputs.attn_sink, "sm_100a")


@pytest.mark.parametrize("heads", (1, 24, 100))
def test_row_values_of_odd_head_counts(heads: int) -> None:
    """Delta, w and the sink's gradient of 24 heads and 2 tokens, among others, with strange sinks and an empty row."""
    inputs = Case(S=2, S_kv=40, H=heads, K=20, D=512, sink="random", dlse=True, invalid="one_row").inputs(seed=heads)
    inputs.attn_sink[: heads // 2 : 2] = torch.tensor((-torch.inf, torch.inf, 1e4, -1e4)).repeat(25)[
        : -(-(heads // 2) // 2)
    ]
    out, lse = Judge(inputs).budget_forward()
    dlse = inputs.dlse
    stats = row_values(inputs, out, lse)
    delta = (out.double() * inputs.dout.double()).sum(-1)
    gap = lse.double() - inputs.attn_sink.double()
    w, rest = torch.sigmoid(gap), torch.sigmoid(-gap)
    empty = lse == -torch.inf
    expected = torch.stack((lse.double() / torch.log(torch.tensor(2.0).double()), w, dlse - w * delta, rest * delta))
    expected = torch.where(empty, torch.tensor([torch.inf, 0, 0, 0]).view(4, 1, 1, 1), expected)
    torch.testing.assert_close(stats.double(), expected, rtol=1e-5, atol=1e-4)


def test_the_gradient_of_the_sink_reads_no_padding() -> None:
    """Per-row tensors of 24 heads inside wider ones of NaN: heads past the real ones are not looked at."""
    inputs = sentinel_case(24, 512, 64, "random", False).but(dlse=True, S=2).inputs(seed=24)
    judged = Judge(inputs)
    out, lse = judged.budget_forward()

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*tensor.shape[:-1], 64), torch.nan)
        wide[..., :24] = tensor
        return wide[..., :24]

    wide = replace(inputs, dlse=widened(inputs.dlse), attn_sink=widened(inputs.attn_sink))
    dq, dkv, d_sink, _ = call_backward(wide, out, widened(lse), strict=True)
    checks = judged.gradient_checks(out, lse, dq, dkv, d_sink)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", (512, 576))
def test_workspace_is_bounded_at_any_length(D: int) -> None:
    """What a deterministic backward holds beside fp32 dkv and per-row values, for any number of slots."""
    for slots in (1, 64, 640, 2048, 2112, 16384, 65536, 10**5):
        tiles = launch.terms_at_a_time(slots, D, 148)
        rows = 16 * (launch.ROWS_AT_A_TIME + 1)
        assert 0 < tiles * slots * (4 * D + launch.SORT_BYTES) <= launch.WORKSPACE <= 256e6 - rows
    assert launch.terms_at_a_time(640, 512, 148) == 148 and launch.terms_at_a_time(2048, 576, 148) == 51


def test_peak_memory_of_a_published_size() -> None:
    """Bytes of all tensors of a backward of DeepSeek-V4's contract, 4096 tokens and 64 heads: published 2114 MB."""
    T, H, D, K = 4096, 64, 512, 640
    S_kv = T + T // 4
    rows, kv = T * H * D * 2, S_kv * D
    inputs = 3 * rows + kv * 2 + T * K * 4 + 2 * T * H * 4  # q, out, dout, kv, indices, lse and dlse
    outputs = rows + kv * 2
    workspace = kv * 4 + 4 * T * H * 4  # the sums of dkv; the per-row values
    assert inputs + outputs + workspace + launch.WORKSPACE < 2114e6
