"""Gather lists of tiles of several tokens: the union of the tokens' rows, exact in multiplicity.

Plain torch, for correctness: it sorts, and holds a few int64 values per slot while it runs. No host synchronisation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Union(NamedTuple):
    """`rows [B, tiles, G, T * K]` int32, of which the first `lengths [B, tiles, G]` count; `bits`, int32: whose."""

    rows: Tensor
    bits: Tensor
    lengths: Tensor


def build(indices: Tensor, valid: Tensor, tokens: int) -> Union:
    """Union lists of `indices [B, S, G, K]`, of which the slots of `valid` count, for tiles of `tokens` tokens.

    The n-th occurrence of a row in one token shares a slot with the n-th occurrence of it in the others, so a repeated
    index keeps counting once for each slot it stands in. Ascending rows; bit t of `bits` is token t of the tile.
    """
    B, S, G, K = indices.shape
    tiles = -(-S // tokens)
    none = torch.iinfo(torch.int64).max
    # Tokens past the end of the sequence select nothing. (`pad` would take its value through a float.)
    rows = torch.full((B, tiles * tokens, G, K), none, dtype=torch.int64, device=indices.device)
    rows[:, :S] = torch.where(valid, indices.long(), none)
    rows = rows.view(B, tiles, tokens, G, K).transpose(2, 3)
    # Occurrence number of a row within its token: position minus the first position of its run once sorted.
    rows = rows.sort(dim=-1).values
    place = torch.arange(K, device=rows.device).expand_as(rows)
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[..., 1:] = rows[..., 1:] != rows[..., :-1]
    occurrence = place - torch.where(starts, place, 0).cummax(dim=-1).values
    key = torch.where(rows == none, none, rows * K + occurrence).reshape(B, tiles, G, tokens * K)
    token = torch.arange(tokens, device=rows.device)[:, None].expand(tokens, K).reshape(-1)
    key, order = key.sort(dim=-1, stable=True)
    fresh = torch.ones_like(key, dtype=torch.bool)
    fresh[..., 1:] = key[..., 1:] != key[..., :-1]
    fresh &= key != none
    slot = fresh.long().cumsum(dim=-1) - 1
    real = key != none
    slot = torch.where(real, slot, tokens * K)  # a slot past the end takes what does not count
    merged = torch.zeros(B, tiles, G, tokens * K + 1, dtype=torch.int64, device=rows.device)
    bits = torch.where(real, torch.bitwise_left_shift(torch.ones_like(key), token[order]), 0)
    merged.scatter_add_(-1, slot, bits)
    union = torch.full_like(merged, -1)
    union.scatter_(-1, slot, torch.div(key, K, rounding_mode="floor"))
    lengths = fresh.sum(dim=-1).to(torch.int32)
    return Union(union[..., :-1].to(torch.int32).contiguous(), merged[..., :-1].to(torch.int32).contiguous(), lengths)
