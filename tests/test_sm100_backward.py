"""The SM100 backward in the simulator: head counts, the contract's clauses, groups of tokens, races, known bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cute_sparse_mla.sm100 import launch, preprocess

from bench.cases import CONTRACT_CASES, Case
from cute_sparse_mla.precision import Judge, compare_rows

from .ptx_sim import capture_cute
from .ptx_sim.policies import Delay
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


@pytest.mark.parametrize("tokens", (2, 8))
def test_grouped_tokens(tokens: int) -> None:
    case = Case(S=5, S_kv=60, H=8, K=33, causal=True, invalid="shuffled", sink="random", dlse=True)
    judge_backward(case.inputs(), tokens_per_tile=tokens)


def test_a_tile_of_two_parts_with_grouped_tokens() -> None:
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


def test_late_asynchronous_work_changes_nothing() -> None:
    """One tile and no row twice: every element of dkv has one addition a block, so bits are comparable."""
    inputs = Case(S=1, S_kv=200, H=16, K=192, invalid="shuffled", dlse=True).inputs(seed=9)
    out, lse = Judge(inputs).budget_forward()
    prompt, late = (call_backward(inputs, out, lse, **options) for options in ({}, {"policy": Delay(seed=16)}))
    assert torch.equal(prompt[0], late[0]) and torch.equal(prompt[1], late[1])


def test_no_races() -> None:
    inputs = sentinel_case(24, 576, 192, "random", True).but(S=2).inputs(seed=1)
    out, lse = Judge(inputs).budget_forward()
    observer = Races()
    call_backward(inputs, out, lse, observer=observer)
    assert not observer.races, observer.races[:3]


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
    monkeypatch.setattr(build.backward, "Backward", Hasty)
    build.kernel.cache_clear()
    yield
    build.kernel.cache_clear()


def test_overwriting_operands_of_the_later_columns_is_reported(without_the_wait_for_p: None) -> None:
    """What is written in shared memory during a block's dkv products must leave the operands of all columns alone."""
    inputs = sentinel_case(64, 512, 192, None, False).but(S=1).inputs(seed=1)
    out, lse = Judge(inputs).budget_forward()
    observer = Races()
    call_backward(inputs, out, lse, observer=observer)
    assert observer.races


@pytest.mark.parametrize("heads", (24, 100))
def test_row_values_of_odd_head_counts(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta, w and the sink's gradient of 24 heads and 2 tokens, in steps of one token too."""
    inputs = Case(S=2, S_kv=40, H=heads, K=20, D=512, sink="random", dlse=True, invalid="one_row").inputs(seed=heads)
    out, lse = Judge(inputs).budget_forward()
    dlse = inputs.dlse
    stats = preprocess.row_stats(out, inputs.dout, lse, dlse, inputs.attn_sink)
    monkeypatch.setattr(preprocess, "WORKSPACE", 1)
    assert torch.equal(stats, preprocess.row_stats(out, inputs.dout, lse, dlse, inputs.attn_sink))
    delta = (out.double() * inputs.dout.double()).sum(-1)
    w = torch.sigmoid(lse.double() - inputs.attn_sink.double())
    empty = lse == -torch.inf
    expected = torch.stack((lse.double() / torch.log(torch.tensor(2.0).double()), w, dlse - w * delta, (1 - w) * delta))
    expected = torch.where(empty, torch.tensor([torch.inf, 0, 0, 0]).view(4, 1, 1, 1), expected)
    torch.testing.assert_close(stats.double(), expected, rtol=1e-5, atol=1e-4)


def test_workspace_is_bounded_at_any_length() -> None:
    assert preprocess.WORKSPACE <= 256 * 2**20
    assert launch.bwd.__doc__ is not None and "16 bytes per (token, head)" in launch.bwd.__doc__
