"""Cases of the union lists of token groups, and what a list of each must hold: for both backends' kernels."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from bench.cases import Case
from cute_sparse_mla import validation

EVERYTHING = Case(
    B=2, S=19, S_kv=300, H=8, G=2, K=70, invalid="out_of_range", length="random", causal=True, duplicates=True,
    index_dtype=torch.int64, sink="random", dlse=True,
)  # fmt: skip
LISTS = (
    (EVERYTHING, 8),
    (Case(S=5, S_kv=700, H=4, K=33, positions="random", duplicates=True, invalid="one_row"), 2),
    (Case(S=33, S_kv=900, H=4, K=130, duplicates=True, length="zero", packed=True), 16),
    (Case(S=9, S_kv=40, H=4, K=600, invalid="shuffled"), 4),
)
SMALL_SIZES = {16: 64, 128: 128}  # bytes for bits and threads: many ranges, some without a selected row


def checked(case: Case, seed: int = 0) -> validation.Call:
    """The batched call of a case; every list of rows holds a far-off one, so that ranges between them are empty."""
    inputs = case.inputs(seed)
    return validation.forward(
        inputs.q, inputs.kv, inputs.indices, d_v=512, causal=inputs.causal, q_positions=inputs.q_positions,
        topk_length=inputs.topk_length, attn_sink=inputs.attn_sink,
    )  # fmt: skip


def slots_of(call: validation.Call, b: int, t: int) -> int:
    """Slots of a token's list, invalid ones too; none past the end of the sequence."""
    K = call.problem.K
    if t >= call.problem.S:
        return 0
    return K if call.topk_length is None else min(K, max(0, int(call.topk_length[b, t])))


def selected(call: validation.Call, b: int, t: int, g: int) -> Counter:
    """How often a token selects each row, by the contract's rule."""
    problem = call.problem
    if t >= problem.S:
        return Counter()
    limit = problem.S_kv
    if problem.causal:
        position = t + problem.S_kv - problem.S if call.q_positions is None else int(call.q_positions[b, t])
        limit = min(limit, position + 1)
    return Counter(row for row in call.indices[b, t, g, : slots_of(call, b, t)].tolist() if 0 <= row < limit)


def judge_lists(call: validation.Call, tokens: int, rows: Tensor, bits: Tensor, lengths: Tensor) -> None:
    """Fails unless every tile's list has its tokens' rows: distinct ones in rising order, then repeats one by one,
    by row and token.
    """
    B, S, G, K = call.indices.shape
    assert lengths.shape == (B, -(-S // tokens), G) and rows.shape == (*lengths.shape, tokens * K)
    for b, tile, g in ((b, tile, g) for b in range(B) for tile in range(lengths.shape[1]) for g in range(G)):
        count = int(lengths[b, tile, g])
        slots = list(zip(rows[b, tile, g, :count].tolist(), bits[b, tile, g, :count].tolist(), strict=True))
        wanted = [selected(call, b, tile * tokens + j, g) for j in range(tokens)]
        for j, want in enumerate(wanted):
            assert Counter(row for row, bit in slots if bit >> j & 1) == want
        distinct = set().union(*wanted)
        assert [row for row, _ in slots[: len(distinct)]] == sorted(distinct)
        repeats = slots[len(distinct) :]
        assert repeats == sorted(repeats)
        assert count == len(distinct) + sum(want.total() - len(want) for want in wanted)
        assert all(bit in (1 << j for j in range(tokens)) for _, bit in repeats)
