"""Judging calls that run in the simulator: rows that no index names are NaN in kv and canaries in dkv."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cute_sparse_mla.precision import Inputs, Judge, compare_rows

# (inputs, out, lse, dkv) -> (dq, dkv, d_sink)
Backward = Callable[[Inputs, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def late_weight(heads: int, D: int, tokens: int = 1) -> Inputs:
    """One of 192 slots has nearly all the weight, and the 100 before it are 2^6 and more below.

    Its P is exactly 1 only under its own maximum; rounded under one that lags behind, it costs out up to 0.3 %.
    """
    K = 192
    kv = torch.zeros(1, K, 1, D)
    # The first number of a row is its score: one early slot lies 6 to 8 powers of 2 below the late one. The late row's
    # other numbers are 1, so that out is its weight.
    kv[..., 0] = -8
    kv[0, 3, 0, 0], kv[0, 100, 0, 0], kv[0, 100, 0, 1:] = 1, 2, 1
    q = torch.zeros(1, tokens, heads, D)
    q[..., 0] = torch.linspace(6, 8, tokens * heads).view(tokens, heads) * math.log(2)
    indices = torch.arange(K, dtype=torch.int32).expand(1, tokens, 1, K)
    return Inputs(q.bfloat16(), kv.bfloat16(), indices, torch.ones(1, tokens, heads, 512).bfloat16(), 512, 1.0)


def poisoned(inputs: Inputs) -> Inputs:
    """The same call, with NaN in every row of kv that no index names: those may not be read."""
    kv, indices = inputs.kv, inputs.indices
    packed = kv.dim() == 3
    kv, indices = (kv[None], indices[None]) if packed else (kv, indices)
    named = torch.zeros(kv.shape[:3], dtype=torch.bool)
    for b, g in ((b, g) for b in range(kv.shape[0]) for g in range(kv.shape[2])):
        rows = indices[b] if indices.dim() == 3 else indices[b, :, g]
        rows = rows[(rows >= 0) & (rows < kv.shape[1])].long()
        named[b, rows.unique(), g] = True
    kv = kv.masked_fill(~named[..., None], torch.nan)
    return replace(inputs, kv=kv[0] if packed else kv)


def judge_gradients(inputs: Inputs, backward: Backward) -> None:
    """Fails unless all gradients, and ranges of columns apart, are within the precision clause, and no canary moved.

    dkv starts as -0.0 between guard rows of -0.0: what nothing is added to, +0.0 included, keeps its sign.
    """
    judged, sent = Judge(inputs), poisoned(inputs)
    out, lse = judged.budget_forward()
    room = torch.full((3, *inputs.kv.shape), -0.0)
    dq, dkv, d_sink = backward(sent, out, lse, room[1])
    assert torch.signbit(room[0]).all() and torch.signbit(room[2]).all(), "a guard row was added to"
    unnamed = sent.kv.isnan().any(dim=-1)
    assert torch.signbit(dkv[unnamed]).all(), "a row that no slot names was added to"
    checks = judged.gradient_checks(out, lse, d_sink=d_sink)
    exact, granted = (judged.gradients(out, lse, rule) for rule in judged.rules)
    for name, got in (("dq", dq), ("dkv", dkv)):
        for first, last in ((0, 256), (256, 512), (512, got.shape[-1]), (0, got.shape[-1])):
            if first < last:
                parts = (t[..., first:last] for t in (got, getattr(exact, name), getattr(granted, name)))
                checks.append(compare_rows(f"{name} {first}", *parts))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
