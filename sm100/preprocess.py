"""Per-row values of the backward, in plain torch, a bounded number of tokens at a time.

    Delta = sum_d dout out            w = sigmoid(lse - sink)   (1 without a sink, 0 for an empty row)
    stats [4, B, S, H] = { lse in base 2 (+inf for an empty row, so that p_hat = 0), w, dlse - w Delta, (1 - w) Delta }

The main kernel needs one exponential per score: `p_hat = exp2(s - stats0)`, `P = stats1 p_hat`,
`dS = p_hat (stats1 dP + stats2)`; `d_sink = -sum_t stats3`, over the real heads, the only ones there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import LOG2_E

WORKSPACE = 64 * 2**20  # bytes of fp32 copies of out and dout at a time


def row_stats(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor | None) -> Tensor:
    """`stats [4, B, S, H]` fp32 from `out`, `dout [B, S, H, 512]`, `lse`, `dlse [B, S, H]`, `sink [H]`."""
    B, S, H, d_v = out.shape
    stats = torch.empty((4, B, S, H), dtype=torch.float32, device=out.device)
    tokens = max(1, WORKSPACE // (2 * 4 * max(1, H * d_v)))
    for b in range(B):
        for first in range(0, S, tokens):
            span = slice(first, first + tokens)
            torch.sum(out[b, span].float().mul_(dout[b, span]), dim=-1, out=stats[3, b, span])
    delta = stats[3]
    gap = lse - float("-inf") if sink is None else lse - sink
    empty = lse == float("-inf")
    stats[0] = (lse * LOG2_E).masked_fill_(empty, float("inf"))
    stats[1] = torch.sigmoid(gap).masked_fill_(empty, 0.0)
    offset = -stats[1] * delta
    stats[2] = (offset if dlse is None else offset + dlse).masked_fill_(empty, 0.0)
    delta *= torch.sigmoid(-gap).masked_fill_(empty, 0.0)
    delta.masked_fill_(empty, 0.0)
    return stats
