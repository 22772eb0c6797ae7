"""The contract as plain Python loops in float64: one token, one head, one slot at a time, no shared code.

Written from the contract's sentences, not from `reference.py`, so that the two can disagree. Slow on purpose: for cases
of a few tokens. Tensors come in batched form; everything returned is float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Gradients(NamedTuple):
    """`touched [B, S_kv, G]` says which kv rows a valid slot selects."""

    dq: Tensor
    dkv: Tensor
    d_sink: Tensor | None
    touched: Tensor


def valid_rows(
    indices: Tensor, b: int, t: int, g: int, *, S: int, S_kv: int, causal: bool, q_positions: Tensor | None,
    topk_length: Tensor | None,
) -> list[int]:  # fmt: skip
    """Rows of kv in the valid slots of one query's row, in slot order, repeats included."""
    bound = None
    if causal:
        bound = t + S_kv - S if q_positions is None else int(q_positions[b, t])
    rows = []
    for slot in range(indices.shape[3]):
        index = int(indices[b, t, g, slot])
        if not 0 <= index < S_kv:
            continue
        if topk_length is not None and slot >= int(topk_length[b, t]):
            continue
        if bound is not None and index > bound:
            continue
        rows.append(index)
    return rows


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _sink_weight(lse: float, sink: float | None) -> float:
    """`sigmoid(lse - sink)` of a row that is not empty."""
    if sink is None or sink == -math.inf:
        return 1.0
    if sink == math.inf:
        return 0.0
    x = lse - sink
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def forward(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float, d_v: int, causal: bool = False,
    q_positions: Tensor | None = None, topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)`."""
    B, S, H, _ = q.shape
    S_kv, G = kv.shape[1], kv.shape[2]
    out = torch.zeros(B, S, H, d_v, dtype=torch.float64)
    lse = torch.full((B, S, H), -math.inf, dtype=torch.float64)
    options = dict(S=S, S_kv=S_kv, causal=causal, q_positions=q_positions, topk_length=topk_length)
    for b in range(B):
        for t in range(S):
            for h in range(H):
                g = h // (H // G)
                rows = valid_rows(indices, b, t, g, **options)
                if not rows:
                    continue
                query = q[b, t, h].tolist()
                keys = [kv[b, row, g].tolist() for row in rows]
                scores = [sm_scale * _dot(query, key) for key in keys]
                top = max(scores)
                row_lse = top + math.log(math.fsum(math.exp(s - top) for s in scores))
                w = _sink_weight(row_lse, None if attn_sink is None else float(attn_sink[h]))
                lse[b, t, h] = row_lse
                for column in range(d_v):
                    total = math.fsum(math.exp(s - row_lse) * key[column] for s, key in zip(scores, keys, strict=True))
                    out[b, t, h, column] = w * total
    return out, lse


def backward(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, *, sm_scale: float,
    dlse: Tensor | None = None, causal: bool = False, q_positions: Tensor | None = None,
    topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients from `out` and `lse` as passed."""
    B, S, H, D = q.shape
    S_kv, G, d_v = kv.shape[1], kv.shape[2], out.shape[-1]
    dq = torch.zeros(B, S, H, D, dtype=torch.float64)
    dkv = torch.zeros(B, S_kv, G, D, dtype=torch.float64)
    touched = torch.zeros(B, S_kv, G, dtype=torch.bool)
    d_sink = None if attn_sink is None else torch.zeros(H, dtype=torch.float64)
    options = dict(S=S, S_kv=S_kv, causal=causal, q_positions=q_positions, topk_length=topk_length)
    for b in range(B):
        for t in range(S):
            for h in range(H):
                g = h // (H // G)
                rows = valid_rows(indices, b, t, g, **options)
                if not rows:
                    continue
                query, grad_out = q[b, t, h].double(), dout[b, t, h].double()
                row_lse = float(lse[b, t, h])
                sink = None if attn_sink is None else float(attn_sink[h])
                w = _sink_weight(row_lse, sink)
                delta = float((grad_out * out[b, t, h].double()).sum())
                through_lse = 0.0 if dlse is None else float(dlse[b, t, h])
                for row in rows:
                    key = kv[b, row, g].double()
                    p_hat = math.exp(sm_scale * float((query * key).sum()) - row_lse)
                    dP = float((grad_out * key[:d_v]).sum())
                    dS = p_hat * (w * (dP - delta) + through_lse)
                    dq[b, t, h] += sm_scale * dS * key
                    dkv[b, row, g] += sm_scale * dS * query
                    dkv[b, row, g, :d_v] += w * p_hat * grad_out
                    touched[b, row, g] = True
                if d_sink is not None and math.isfinite(sink):
                    d_sink[h] -= (1 - w) * delta
    return Gradients(dq, dkv, d_sink, touched)
