"""The SM100 forward in the simulator: the contract's clauses, head counts, strides, offsets, groups of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.cases import CONTRACT_CASES, Case

from .ptx_sim import capture_cute
from .ptx_sim.policies import Delay
from .ptx_sim.races import Races
from .simulated_judge import late_weight
from .sm100 import call, judge, sentinel_case

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 simulator: {REASON}")
PROBED_HEADS = (1, 24, 72, 120)
FORWARD_CASES = [case for case in CONTRACT_CASES if not case.dlse]


# Of the sweep of `make sentinel-sim`.
@pytest.mark.parametrize(("heads", "D", "K", "sink", "causal"), (
    (1, 512, 100, None, True), (8, 576, 64, "random", False), (16, 512, 1, "random", True), (24, 576, 128, None, False),
    (48, 512, 192, "random", True), (64, 576, 192, None, True), (72, 512, 64, None, False), (96, 576, 100, None, True),
    (100, 512, 128, "random", False), (120, 576, 1, None, False), (128, 512, 640, None, True),
))  # fmt: skip
def test_head_count_with_sentinels(heads: int, D: int, K: int, sink: str | None, causal: bool) -> None:
    judge(sentinel_case(heads, D, K, sink, causal).inputs(seed=heads))


@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case.name)
def test_contract(case: Case) -> None:
    judge(case.but(D=576 if case.K % 2 else 512, d_v=512).inputs(seed=3))


@pytest.mark.parametrize("tokens", (2, 8))
@pytest.mark.parametrize("case", FORWARD_CASES[::4], ids=lambda case: case.name)
def test_contract_with_grouped_tokens(case: Case, tokens: int) -> None:
    judge(case.but(D=576, d_v=512).inputs(seed=4), tokens_per_tile=tokens)


@pytest.mark.parametrize(("heads", "tokens"), ((16, 8), (64, 2), (5, 8), (33, 2), (3, 16), (12, 4)))
def test_pairs_and_odd_heads_with_grouped_tokens(heads: int, tokens: int) -> None:
    judge(Case(S=19, S_kv=90, H=heads, K=33, causal=True, invalid="shuffled").inputs(), tokens_per_tile=tokens)


@pytest.mark.parametrize(
    ("case", "tokens"), [(Case(S=5, S_kv=90, H=31, K=70, invalid="shuffled"), 2), (Case(S=3, S_kv=9, H=1, K=2), 8)]
)
def test_a_last_tile_reads_for_its_own_tokens_only(case: Case, tokens: int) -> None:
    """Nothing is gathered for the tokens that a partial tile lacks, row 0 of kv (NaN here) not either."""
    i = case.inputs(seed=23)
    i.indices[i.indices == 0] = 1
    judge(i, tokens_per_tile=tokens)


@pytest.mark.parametrize("heads", PROBED_HEADS)
def test_padding_inside_equals_zero_heads_in_memory(heads: int) -> None:
    """The same kernel fed zero heads up to its tile: out and lse bit for bit."""
    inputs = sentinel_case(heads, 576, 128, None, True).inputs(seed=heads)
    padding = (0, 0, 0, -heads % 64)
    out, lse, _ = call(inputs)
    wide_out, wide_lse, _ = call(replace(inputs, q=torch.nn.functional.pad(inputs.q, padding)))
    assert torch.equal(out, wide_out[:, :, :heads])
    assert torch.equal(lse, wide_lse[:, :, :heads])


@pytest.mark.parametrize("heads", (64, 128))
def test_growing_scores_rescale_what_was_summed(heads: int) -> None:
    """Later blocks' scores are far above earlier ones', some rows begin with a block of invalid slots."""
    inputs = Case(S=3, S_kv=256, H=heads, K=256, D=512, q_scale=8.0).inputs(seed=5)
    indices = torch.arange(256, dtype=torch.int32).expand(1, 3, 1, 256).clone()
    indices[:, 1, :, :70] = -1
    kv = inputs.kv * torch.linspace(0.1, 3.0, 256)[None, :, None, None]
    judge(replace(inputs, kv=kv.bfloat16(), indices=indices))


@pytest.mark.parametrize(("heads", "tokens"), ((64, 1), (128, 1), (8, 8), (16, 8)))
@pytest.mark.parametrize("D", (512, 576))
def test_a_slot_that_comes_late_with_all_the_weight(heads: int, tokens: int, D: int) -> None:
    observer = Races()
    judge(late_weight(heads, D, tokens), tokens_per_tile=tokens, observer=observer)
    assert not observer.races, observer.races[0].text


def test_strided_tensors_are_read_in_place() -> None:
    """Heads before tokens in q, groups before tokens in kv, every second row, a transposed index tensor."""
    plain = Case(
        B=2, S=3, S_kv=70, H=12, G=2, K=66, causal=True, invalid="shuffled", length="random", positions="random"
    )
    inputs = plain.inputs(seed=6)
    wide = torch.full((2, 2, 140, 576), torch.nan, dtype=torch.bfloat16)
    wide[:, :, ::2] = inputs.kv.transpose(1, 2)
    strided = replace(
        inputs,
        q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2),
        kv=wide[:, :, ::2].transpose(1, 2),
        indices=inputs.indices.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        topk_length=torch.stack((inputs.topk_length,) * 2, dim=-1)[..., 0],
    )
    judge(strided)


def test_offsets_past_32_bits() -> None:
    """A token of q further than 2**31 elements from the first; its memory is never touched but for the tokens."""
    inputs = Case(S=3, S_kv=20, H=8, K=20, D=512).inputs(seed=7)
    step = 2**30 + 64
    q = torch.empty(2 * step + 8 * 512, dtype=torch.bfloat16).as_strided((1, 3, 8, 512), (8 * 512, step, 512, 1))
    q.copy_(inputs.q)
    judge(replace(inputs, q=q))


@pytest.mark.parametrize("heads", (16, 128))
def test_late_asynchronous_work_changes_nothing(heads: int) -> None:
    inputs = sentinel_case(heads, 576, 192, "random", True).inputs(seed=9)
    out, lse, _ = call(inputs)
    late_out, late_lse, _ = call(inputs, policy=Delay(seed=heads))
    assert torch.equal(out, late_out) and torch.equal(lse, late_lse)


@pytest.mark.parametrize(("heads", "tokens"), ((64, 1), (128, 1), (8, 8)))
def test_no_races(heads: int, tokens: int) -> None:
    """Growing scores, so that O is rescaled, over three tiles of a cluster."""
    case = Case(S=3 * tokens, S_kv=200, H=heads, K=130, invalid="shuffled", sink="random", q_scale=8.0)
    observer = Races()
    call(case.inputs(seed=10), tokens_per_tile=tokens, observer=observer)
    assert not observer.races, observer.races[0].text


def test_a_query_does_not_depend_on_the_others() -> None:
    inputs = sentinel_case(72, 576, 100, "random", False).inputs(seed=8)
    out, lse, _ = call(inputs)
    alone = replace(inputs, q=inputs.q[:, 2:3], indices=inputs.indices[:, 2:3])
    out_alone, lse_alone, _ = call(alone, clusters=2)
    assert torch.equal(out[:, 2:3], out_alone) and torch.equal(lse[:, 2:3], lse_alone)
