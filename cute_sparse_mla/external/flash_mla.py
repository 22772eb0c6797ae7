"""FlashMLA's sparse prefill (deepseek-ai/FlashMLA, package `flash_mla`) as a forward.

Its call: `flash_mla_sparse_fwd(q [T, h, D], kv [S_kv, 1, D], indices [T, 1, K], sm_scale, d_v, attn_sink, topk_length)
-> (out, max_logits, lse)`, bf16, h 64 or 128, K a multiple of 128, int32 rows, natural-log lse without the sink, +inf
in a row without a valid slot, no causal bound. Converted here: heads padded with zeros to 64 or 128 (a copy of `q`, and
of the results without them), rows by `peer_rows` (lengths and causal bounds become -1: a NaN row behind a length could
reach the results), and the sign of the infinity.
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from ..config import SparseAttentionConfig
from ..errors import MissingDependencyError
from ..problem import BACKWARD, Problem
from ..scales import score_scale
from ..validation import Call
from .arguments import INT32_SPAN, common_refusal, padded_heads, peer_rows

HEADS, SLOTS = (64, 128), 128
NAME = "FlashMLA"


def refusal(
    problem: Problem, config: SparseAttentionConfig, which: str, capability: tuple[int, int], deterministic: bool,
    call: Call | None,
) -> str:  # fmt: skip
    """Why this pass of the call cannot run, or an empty string. `call=None` asks about the problem alone."""
    if which == BACKWARD:
        return f"{NAME} has no sparse backward; backend='cudnn' or None has one, with config.fwd_backend='flash_mla'"
    if problem.S * (problem.K + SLOTS) >= INT32_SPAN:
        return f"{NAME} counts slots in 32 bits: T * K = {problem.S * problem.K}"
    if call is not None and max(*call.q.stride()[1:], *call.kv.stride()[1:]) >= INT32_SPAN:
        return f"{NAME} takes strides below 2**31 elements"
    return common_refusal(problem, config, (torch.bfloat16,), NAME)


def fwd(call: Call, sm_scale: float) -> tuple[Tensor, Tensor]:
    """`(out [1, T, H, 512], lse [1, T, H])` of a call that `refusal` lets through."""
    function = getattr(importlib.import_module("flash_mla"), "flash_mla_sparse_fwd", None)
    if function is None:
        raise MissingDependencyError(
            "the installed package flash_mla has no flash_mla_sparse_fwd; "
            "pip install --upgrade git+https://github.com/deepseek-ai/FlashMLA brings it"
        )
    heads = call.problem.H
    extra = next(h for h in HEADS if h >= heads) - heads
    out, _, lse = function(
        padded_heads(call.q[0], extra, 1), call.kv[0], peer_rows(call, SLOTS).unsqueeze(1),
        score_scale(sm_scale), d_v=call.problem.d_v, attn_sink=padded_heads(_sink(call), extra, 0),
        topk_length=None,
    )  # fmt: skip
    if extra:
        out, lse = out[:, :heads].contiguous(), lse[:, :heads].contiguous()
    return out.unsqueeze(0), lse.masked_fill_(lse == math.inf, -math.inf).unsqueeze(0)


def _sink(call: Call) -> Tensor | None:
    return None if call.attn_sink is None else call.attn_sink.contiguous()
