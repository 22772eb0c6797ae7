"""What the external backends share: rows of indices in a peer's form, and the limits that peers have in common."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import SparseAttentionConfig
from ..indices import pad_slots
from ..problem import MaybeTensor, Problem
from ..validation import Call

INT32_SPAN = 2**31


def common_refusal(problem: Problem, config: SparseAttentionConfig, dtypes: tuple[torch.dtype, ...], peer: str) -> str:
    """Why no peer of this kind runs the problem, or an empty string."""
    if problem.G != 1:
        return f"{peer} takes one kv group, not {problem.G}"
    if problem.B > 1:
        return f"{peer} takes packed calls or B = 1, not B = {problem.B}: pack the batch, or call once per entry"
    if problem.dtype not in dtypes:
        return f"{peer} takes {' and '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {problem.dtype}"
    for name in config.tuning():
        value = getattr(config, name)
        if value is not None and (name, value) != ("tokens_per_tile", 1):
            return f"{peer} chooses its own configuration: config.{name} must be None, not {value}"
    return ""


def span(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def peer_rows(call: Call, multiple: int) -> Tensor:
    """`indices` of a packed call as int32 `[T, K']`, every invalid slot failing `0 <= index < S_kv`.

    The caller's own tensor when it is int32, dense in its last dimension, of a multiple of `multiple` slots, and no
    bound (causal, lengths) is left to apply; otherwise a rewritten copy, padded with -1.
    """
    problem, rows = call.problem, call.indices[0, :, 0]
    keep: Tensor | None = None
    if problem.causal:
        first = problem.S_kv - problem.S
        bounds = torch.arange(first, problem.S_kv, device=rows.device)[None] if call.q_positions is None else None
        bounds = call.q_positions if bounds is None else bounds
        assert bounds is not None
        keep = rows <= bounds[0, :, None]
    if call.topk_length is not None:
        within = torch.arange(problem.K, device=rows.device) < call.topk_length[0, :, None]
        keep = within if keep is None else keep & within
    if rows.dtype != torch.int32:
        # Before narrowing, so that nothing wraps into range.
        in_range = (rows >= 0) & (rows < problem.S_kv)
        keep = in_range if keep is None else keep & in_range
    if keep is not None:
        rows = rows.masked_fill(~keep, -1).to(torch.int32)
    if problem.K % multiple:
        rows = pad_slots(rows, multiple)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def padded_heads(tensor: MaybeTensor, extra: int, axis: int) -> MaybeTensor:
    """A tensor with `extra` zero heads behind those of `axis`: itself when there are none to add."""
    return tensor if tensor is None or extra == 0 else pad(tensor, (0, 0) * (tensor.dim() - 1 - axis) + (0, extra))
