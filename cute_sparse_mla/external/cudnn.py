"""The sparse attention of the cuDNN frontend (`nvidia-cudnn-frontend`, namespace `cudnn.DSA`).

Its backward (SM90, SM100): `sparse_attention_backward_wrapper(q [T, h, D], kv [S_kv, D], out, dout, lse [T, h],
attn_sink [h], topk_idxs [T, K], softmax_scale, topk_length) -> {dq, dkv, d_sink}`, 2 heads and more, int32 rows, a sink
required (-inf is none), contiguous tensors, dkv in kv's dtype, no gradient through lse. Its forward (SM100 only) takes
64 heads, or 128 at D 512, gives a natural-log lse without the sink, and +inf in a row without a valid slot.
Converted here: rows by `peer_rows`, for the forward heads padded with zeros (a copy of `q`), and the sign of the
infinity. The package makes dense copies of strided tensors silently: those are refused.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..config import SparseAttentionConfig
from ..errors import MissingDependencyError
from ..problem import FORWARD, KERNEL_DTYPES, Problem
from ..scales import score_scale
from ..validation import BackwardCall, Call
from .arguments import INT32_SPAN, common_refusal, padded_heads, peer_rows, span

NAME = "cuDNN"
FORWARD_HEADS = {512: (64, 128), 576: (64,)}
DETERMINISTIC_HEADS = (16, 32, 64, 96, 128)


def _forward_refusal(problem: Problem, capability: tuple[int, int]) -> str:
    if capability[0] != 10:
        return f"{NAME}'s sparse forward runs on compute capability 10.x only; config.fwd_backend names another forward"
    most = FORWARD_HEADS[problem.D][-1]
    return f"{NAME}'s sparse forward takes at most {most} heads at D {problem.D}" if most < problem.H else ""


def _backward_refusal(problem: Problem, capability: tuple[int, int], deterministic: bool, call: Call | None) -> str:
    if problem.H < 2:
        return f"{NAME}'s sparse backward takes 2 heads and more"
    if deterministic and (capability[0] != 10 or problem.H not in DETERMINISTIC_HEADS):
        return f"{NAME} is deterministic on compute capability 10.x with {DETERMINISTIC_HEADS} heads only"
    if not isinstance(call, BackwardCall):
        return ""
    if call.dlse is not None:
        return f"{NAME} has no gradient through lse (dlse)"
    if call.dkv is not None or call.dkv_dtype != problem.dtype:
        return f"{NAME} rounds dkv to {problem.dtype}: dkv= and dkv_dtype=torch.float32 need another backend"
    return ""


def refusal(
    problem: Problem, config: SparseAttentionConfig, which: str, capability: tuple[int, int], deterministic: bool,
    call: Call | None,
) -> str:  # fmt: skip
    """Why this pass of the call cannot run, or an empty string. `call=None` asks about the problem alone."""
    reason = common_refusal(problem, config, KERNEL_DTYPES, NAME)
    if not reason:
        forward = which == FORWARD
        reason = (
            _forward_refusal(problem, capability)
            if forward
            else _backward_refusal(problem, capability, deterministic, call)
        )
    if reason or call is None:
        return reason
    tensors = {"q": call.q, "kv": call.kv}
    tensors |= {"out": call.out, "dout": call.dout} if isinstance(call, BackwardCall) else {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            return f"{NAME} takes dense tensors; {name} has strides {tensor.stride()}"
        if span(tensor) >= INT32_SPAN:
            return f"{NAME} is not known to address 2**31 elements and more; {name} has {tensor.numel()}"
    return ""


def _dsa() -> Any:
    module = importlib.import_module("cudnn")
    if not hasattr(module, "DSA"):
        raise MissingDependencyError(
            "module cudnn has no DSA namespace, which nvidia-cudnn-frontend has from 1.32 on: "
            + env.install_command("cudnn")
        )
    return module.DSA


def fwd(call: Call, sm_scale: float) -> tuple[Tensor, Tensor]:
    """`(out [1, T, H, 512], lse [1, T, H])` of a call that `refusal` lets through."""
    problem = call.problem
    extra = next(h for h in FORWARD_HEADS[problem.D] if h >= problem.H) - problem.H
    sink = None if call.attn_sink is None else padded_heads(call.attn_sink.contiguous(), extra, 0)
    done = _dsa().sparse_attention_forward_wrapper(
        padded_heads(call.q[0], extra, 1), call.kv[0, :, 0], peer_rows(call, 1), attn_sink=sink, topk_length=None,
        softmax_scale=score_scale(sm_scale),
    )  # fmt: skip
    out, lse = done["out"], done["lse"]
    if extra:
        out, lse = out[:, : problem.H].contiguous(), lse[:, : problem.H].contiguous()
    return out.unsqueeze(0), lse.masked_fill_(lse == math.inf, -math.inf).unsqueeze(0)


def bwd(call: BackwardCall, sm_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(dq [1, T, H, D], dkv [1, S_kv, 1, D], d_sink [H])` of a call that `refusal` lets through."""
    no_sink = call.attn_sink is None
    sink = call.q.new_full((call.problem.H,), -math.inf, dtype=torch.float32) if no_sink else call.attn_sink
    assert sink is not None
    done = _dsa().sparse_attention_backward_wrapper(
        call.q[0], call.kv[0, :, 0], call.out[0], call.dout[0], call.lse[0].contiguous(), sink.contiguous(),
        peer_rows(call, 1), softmax_scale=score_scale(sm_scale), topk_length=None, deterministic=deterministic,
    )  # fmt: skip
    if sm_scale == 0:
        done["dq"].zero_()
    return done["dq"].unsqueeze(0), done["dkv"][None, :, None], None if no_sink else done["d_sink"]
