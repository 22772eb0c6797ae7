"""Head padding inside the SM90 kernels, forward and backward: every head count beside every kind of row bound.

A kernel that pads heads to its tile must neither read nor write the next token's or group's rows; sentinels stand in
half of the slots and must be neither read nor written.
"""

from __future__ import annotations

import pytest
import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.precision import Judge, run

HEADS = (1, 8, 16, 24, 48, 64, 72, 96, 100, 120, 128)
LENGTHS = ((1024, 1024), (255, 1025))
PROBED_HEADS = (1, 8, 16, 24, 48, 64, 72, 96, 100, 120)
TILE = 64


@pytest.mark.sm90
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda pair: f"{pair[0]}x{pair[1]}")
@pytest.mark.parametrize("sink", (None, "random"), ids=("no_sink", "sink"))
@pytest.mark.parametrize("causal", (False, True), ids=("all", "causal"))
@pytest.mark.parametrize("heads", HEADS)
def test_head_count_with_sentinels(heads: int, causal: bool, sink: str | None, lengths: tuple[int, int]) -> None:
    S, S_kv = lengths
    case = Case(S=S, S_kv=S_kv, H=heads, K=192, causal=causal, sink=sink, invalid="shuffled", D=512 if sink else 576)
    judge = Judge(case.inputs(seed=heads, device="cuda"))
    assert int((judge.inputs.indices == -1).sum()) > 0, "the case must contain sentinels"
    checks = judge.checks(run(judge.inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, backend="sm90"))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


@pytest.mark.sm90
@pytest.mark.parametrize("heads", PROBED_HEADS)
def test_padding_inside_equals_zero_heads_in_memory(heads: int) -> None:
    """The same kernel fed zero heads up to its tile: out, lse and dq bit for bit; dkv up to the order of its sums."""
    padded = -(-heads // TILE) * TILE
    given = Case(S=96, S_kv=512, H=heads, K=192, invalid="shuffled", causal=True).inputs(seed=heads, device="cuda")

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        zeros = tensor.new_zeros((*tensor.shape[:2], padded - heads, *tensor.shape[3:]))
        return torch.cat((tensor, zeros), dim=2)

    options = dict(causal=True, backend="sm90", config=cute_sparse_mla.SparseAttentionConfig(tokens_per_tile=1))
    out, lse = cute_sparse_mla.fwd(given.q, given.kv, given.indices, **options)
    dq, dkv, _ = cute_sparse_mla.bwd(
        given.q, given.kv, out, given.dout, given.indices, lse, dkv_dtype=torch.float32, **options
    )
    wide_q, wide_dout = pad(given.q), pad(given.dout)
    wide_out, wide_lse = cute_sparse_mla.fwd(wide_q, given.kv, given.indices, **options)
    wide_dq, wide_dkv, _ = cute_sparse_mla.bwd(
        wide_q, given.kv, wide_out, wide_dout, given.indices, wide_lse, dkv_dtype=torch.float32, **options
    )
    assert torch.equal(out, wide_out[:, :, :heads])
    assert torch.equal(lse, wide_lse[:, :, :heads])
    assert torch.equal(dq, wide_dq[:, :, :heads])
    torch.testing.assert_close(dkv, wide_dkv, rtol=1e-5, atol=1e-5 * float(dkv.abs().max()))
