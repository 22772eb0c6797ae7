"""The torch custom ops: `cute_sparse_mla::fwd` (differentiable), `::bwd`, `::bwd_add`, `::max_scores`, and those that
make gather lists, `::plan` and `::lists`.

Saved for the backward: `q`, `kv`, `indices`, the optional tensors, `out` and `lse`, and the gather lists of token
groups; no copy, nothing of size S*H*K.
Scalars arrive normalised by `api`; tensors are checked here, on real tensors and on fake ones alike, so a compiled
graph gets the same errors as an eager call. The scale is `sm_scale`, or in a traced graph where it may change from call
to call the 0-dim CPU tensor `traced_scale`; neither is `D ** -0.5`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch, env, validation
from .config import SparseAttentionConfig, decode
from .errors import SparseMLAError, UnsupportedError
from .problem import Problem
from .validation import BackwardCall

_LIB = "cute_sparse_mla"


def _check_backward(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, dlse: Tensor | None,
    dkv: Tensor | None, dkv_dtype: torch.dtype | None, causal: bool,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
) -> BackwardCall:  # fmt: skip
    return validation.backward(
        q, kv, out, dout, indices, lse, dlse=dlse, dkv=dkv, dkv_dtype=dkv_dtype, causal=causal,
        q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink,
    )  # fmt: skip


@torch.library.custom_op(f"{_LIB}::fwd", mutates_args=())
def fwd_op(
    q: Tensor, kv: Tensor, indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None,
    attn_sink: Tensor | None, sm_scale: float | None, traced_scale: Tensor | None, d_v: int, causal: bool, config: str,
    backend: str, plan_rows: Tensor | None = None, plan_bits: Tensor | None = None,
    plan_lengths: Tensor | None = None, plan_chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, lse)`; see `api.fwd`."""
    call = validation.forward(
        q, kv, indices, d_v=d_v, causal=causal, q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink
    )
    scale = validation.scale_of(sm_scale, traced_scale, q.shape[-1])
    lists = _lists(call.problem, plan_rows, plan_bits, plan_lengths, plan_chosen)
    return dispatch.forward(call, scale, backend, config, lists)


@fwd_op.register_fake
def _(
    q: Tensor, kv: Tensor, indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None,
    attn_sink: Tensor | None, sm_scale: float | None, traced_scale: Tensor | None, d_v: int, causal: bool, config: str,
    backend: str, plan_rows: Tensor | None = None, plan_bits: Tensor | None = None,
    plan_lengths: Tensor | None = None, plan_chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    validation.forward(
        q, kv, indices, d_v=d_v, causal=causal, q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink
    )
    return q.new_empty((*q.shape[:-1], d_v)), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(f"{_LIB}::bwd", mutates_args=())
def bwd_op(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, dlse: Tensor | None,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
    sm_scale: float | None, traced_scale: Tensor | None, causal: bool, deterministic: bool,
    dkv_dtype: torch.dtype | None, config: str, backend: str, plan_rows: Tensor | None = None,
    plan_bits: Tensor | None = None, plan_lengths: Tensor | None = None, plan_chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`(dq, dkv, d_sink)`; `d_sink` has no element without a sink. See `api.bwd`."""
    call = _check_backward(
        q, kv, out, dout, indices, lse, dlse, None, dkv_dtype, causal, q_positions, topk_length, attn_sink
    )
    scale = validation.scale_of(sm_scale, traced_scale, q.shape[-1])
    lists = _lists(call.problem, plan_rows, plan_bits, plan_lengths, plan_chosen)
    dq, dkv, d_sink = dispatch.backward(call, scale, deterministic, backend, config, lists)
    return dq, dkv, _d_sink_output(q, d_sink)


@bwd_op.register_fake
def _(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, dlse: Tensor | None,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
    sm_scale: float | None, traced_scale: Tensor | None, causal: bool, deterministic: bool,
    dkv_dtype: torch.dtype | None, config: str, backend: str, plan_rows: Tensor | None = None,
    plan_bits: Tensor | None = None, plan_lengths: Tensor | None = None, plan_chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _check_backward(
        q, kv, out, dout, indices, lse, dlse, None, dkv_dtype, causal, q_positions, topk_length, attn_sink
    )
    return q.new_empty(q.shape), kv.new_empty(kv.shape, dtype=call.dkv_dtype), _fake_d_sink(q, attn_sink)


@torch.library.custom_op(f"{_LIB}::bwd_add", mutates_args=("dkv",))
def bwd_add_op(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, dlse: Tensor | None, dkv: Tensor,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
    sm_scale: float | None, traced_scale: Tensor | None, causal: bool, deterministic: bool,
    dkv_dtype: torch.dtype | None, config: str, backend: str, plan_rows: Tensor | None = None,
    plan_bits: Tensor | None = None, plan_lengths: Tensor | None = None, plan_chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(dq, d_sink)`; the gradient of kv is added into the fp32 buffer `dkv`. See `api.bwd`."""
    call = _check_backward(
        q, kv, out, dout, indices, lse, dlse, dkv, dkv_dtype, causal, q_positions, topk_length, attn_sink
    )
    scale = validation.scale_of(sm_scale, traced_scale, q.shape[-1])
    lists = _lists(call.problem, plan_rows, plan_bits, plan_lengths, plan_chosen)
    dq, _, d_sink = dispatch.backward(call, scale, deterministic, backend, config, lists)
    return dq, _d_sink_output(q, d_sink)


@bwd_add_op.register_fake
def _(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, dlse: Tensor | None, dkv: Tensor,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
    sm_scale: float | None, traced_scale: Tensor | None, causal: bool, deterministic: bool,
    dkv_dtype: torch.dtype | None, config: str, backend: str, plan_rows: Tensor | None = None,
    plan_bits: Tensor | None = None, plan_lengths: Tensor | None = None, plan_chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_backward(q, kv, out, dout, indices, lse, dlse, dkv, dkv_dtype, causal, q_positions, topk_length, attn_sink)
    return q.new_empty(q.shape), _fake_d_sink(q, attn_sink)


@torch.library.custom_op(f"{_LIB}::max_scores", mutates_args=())
def max_scores_op(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, sm_scale: float | None,
    traced_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """The largest score of each row, fp32 `[..., H]`, -inf for a row without a valid slot; not differentiable."""
    call = validation.forward(
        q, kv, indices, d_v=1, causal=False, q_positions=None, topk_length=topk_length, attn_sink=None
    )
    return dispatch.max_scores(call, validation.scale_of(sm_scale, traced_scale, q.shape[-1]))


@max_scores_op.register_fake
def _(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, sm_scale: float | None,
    traced_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(f"{_LIB}::plan", mutates_args=())
def plan_op(
    indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None, kv_shape: list[int],
    heads_per_group: int, causal: bool, tokens: int, decide: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(rows, bits, lengths)` of the gather lists for `tokens` tokens a tile, and `chosen [1]`; see `groups.Lists`."""
    call = validation.lists(
        indices, tuple(kv_shape), heads_per_group, causal=causal, q_positions=q_positions, topk_length=topk_length
    )
    return dispatch.make_lists(call, tokens, decide, backend)


@plan_op.register_fake
def _(
    indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None, kv_shape: list[int],
    heads_per_group: int, causal: bool, tokens: int, decide: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = validation.lists(
        indices, tuple(kv_shape), heads_per_group, causal=causal, q_positions=q_positions, topk_length=topk_length
    )
    B, S, G, K = call.indices.shape
    shape = (B, -(-S // tokens), G)
    rows, bits = (indices.new_empty((*shape, tokens * K), dtype=torch.int32) for _ in range(2))
    return rows, bits, indices.new_empty(shape, dtype=torch.int32), indices.new_empty(1, dtype=torch.int32)


@torch.library.custom_op(f"{_LIB}::lists", mutates_args=())
def lists_op(
    indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None, kv_shape: list[int],
    heads_per_group: int, causal: bool, config: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `plan`, for as many tokens a tile as the kernels of such a call try; empty tensors where that is one.

    Rows, bits and lengths come flat, one element beyond the lengths: a graph for all numbers of tokens may not ask
    whether there is a single tile, and the strides of a tensor with an axis of tiles depend on it.
    """
    problem = (indices, q_positions, topk_length, kv_shape, heads_per_group, causal)
    tokens, decide = group_size(*problem, decode(config), backend)
    if tokens == 1:
        return _no_lists(indices)
    rows, bits, lengths, chosen = plan_op(*problem, tokens, decide, backend)
    # Lists are made with room for one length more.
    return rows.view(-1), bits.view(-1), lengths.as_strided((lengths.numel() + 1,), (1,)), chosen


@lists_op.register_fake
def _(
    indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None, kv_shape: list[int],
    heads_per_group: int, causal: bool, config: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # What the op asks of a device holds for a fake one, too.
    tokens, _ = group_size(
        indices, q_positions, topk_length, kv_shape, heads_per_group, causal, decode(config), backend
    )
    if tokens == 1:
        return _no_lists(indices)
    call = validation.lists(
        indices, tuple(kv_shape), heads_per_group, causal=causal, q_positions=q_positions, topk_length=topk_length
    )
    B, S, G, K = call.indices.shape
    lists = B * -(-S // tokens) * G
    rows, bits, lengths, chosen = (
        indices.new_empty(size, dtype=torch.int32) for size in (*[lists * tokens * K] * 2, lists + 1, 1)
    )
    return rows, bits, lengths, chosen


def _no_lists(indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, bits, lengths, chosen = (indices.new_empty(0, dtype=torch.int32) for _ in range(4))
    return rows, bits, lengths, chosen


def group_size(
    indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None, kv_shape: Sequence[int],
    heads_per_group: int, causal: bool, config: SparseAttentionConfig, backend: str,
) -> tuple[int, bool]:  # fmt: skip
    """Tokens of a tile, and whether the device decides; 1 for a wrong call, which says itself what is wrong."""
    try:
        call = validation.lists(
            indices, tuple(kv_shape), heads_per_group, causal=causal, q_positions=q_positions, topk_length=topk_length
        )
        device = indices.device
        return dispatch.grouping(call.problem, device.type, env.capability(device), backend, config)
    except SparseMLAError:
        return 1, False


def _lists(problem: Problem, *lists: Tensor | None) -> tuple[Tensor, ...] | None:
    """The lists that an op was given, with their axes; see `lists_op`."""
    given = tuple(tensor for tensor in lists if tensor is not None)
    # Empty ones are those of `lists_op` where nothing is grouped.
    if not given or not given[0].numel():
        return None
    rows, bits, lengths, *chosen = given
    if rows.dim() == 1:
        shape = (problem.B, -1, problem.G)
        lengths = lengths[:-1].view(shape)
        rows, bits = (tensor.view(*lengths.shape, -1) for tensor in (rows, bits))
    return rows, bits, lengths, *chosen


def _d_sink_output(q: Tensor, d_sink: Tensor | None) -> Tensor:
    # An op cannot return None; an empty tensor stands for it.
    return q.new_empty(0, dtype=torch.float32) if d_sink is None else d_sink


def _fake_d_sink(q: Tensor, attn_sink: Tensor | None) -> Tensor:
    return q.new_empty(0 if attn_sink is None else q.shape[-2], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    tensors, lists = inputs[:6], inputs[12:]
    ctx.sm_scale, traced_scale, _, ctx.causal, ctx.config, ctx.backend = inputs[6:12]
    ctx.save_for_backward(*tensors, traced_scale, *output, *lists)
    ctx.set_materialize_grads(False)


def readable_gradient(dout: Tensor | None, out: Tensor, backend: str | None) -> Tensor:
    """The gradient of `out` as autograd hands it over, laid out as this backend's `bwd` reads it; zeros for `None`."""
    if dout is None:
        return torch.zeros_like(out)
    if validation.rows_readable(dout) and (dout.is_contiguous() or not dispatch.reads_dense(backend)):
        return dout
    # Autograd hands over expanded or strided gradients (out.sum() does); only this tensor is ever made dense.
    # A clone: `contiguous()` hands back a contiguous tensor that starts on an odd address.
    return dout.clone(memory_format=torch.contiguous_format)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    q, kv, indices, q_positions, topk_length, attn_sink, traced_scale, out, lse, *lists = ctx.saved_tensors
    dq, dkv, d_sink = bwd_op(
        q, kv, out, readable_gradient(dout, out, ctx.backend), indices, lse, dlse, q_positions, topk_length, attn_sink,
        ctx.sm_scale, traced_scale, ctx.causal, torch.are_deterministic_algorithms_enabled(), None, ctx.config,
        ctx.backend, *lists,
    )  # fmt: skip
    return dq, dkv, None, None, None, None if attn_sink is None else d_sink, *[None] * 10


fwd_op.register_autograd(_backward, setup_context=_setup_context)


# -- second derivatives --------------------------------------------------------------------------------------------


def _refuse_second(ctx: Any, *gradients: Tensor | None) -> tuple:
    raise UnsupportedError("second derivatives of sparse_mla are not supported: its gradients are differentiated again")


# Sets nothing up: all that it does is refuse.
bwd_op.register_autograd(_refuse_second, setup_context=lambda ctx, inputs, output: None)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    backward = staticmethod(_refuse_second)


def first_order(gradient: Tensor, *sources: Tensor | None) -> Tensor:
    """A gradient tied to what it was computed from: a second derivative is refused by name, not taken for zero.

    For the backward of an `autograd.Function`; costs nothing unless autograd was asked for `create_graph`.
    """
    return _FirstOrder.apply(gradient, *sources) if torch.is_grad_enabled() else gradient
