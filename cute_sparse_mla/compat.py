"""Drop-ins: the call forms of other implementations of sparse MLA, computed by this package.

Each function takes what its namesake takes, states where that one's conventions differ from the contract's (`api`), and
converts exactly: what is converted is a sign of infinity, a base of logarithms (one fp32 product), a mask or a layout.
All take `backend=` and `config=` as `api.fwd` does, and raise what it raises. Invalid slots are never read, whichever
filler marks them, and shapes that the namesake refuses (any K, 1 to 128 heads per group, strides, int64 indices) work.

    flash_mla_sparse_fwd               FlashMLA (deepseek-ai/FlashMLA, flash_mla)
    sparse_attention                   miles (radixark/miles, miles.kernels.attention.dsa)
    sparse_mla_fwd_interface,
    sparse_mla_bwd                     the TileLang example (tile-ai/tilelang, examples/deepseek_v32)
    sparse_attention_backward_wrapper  the cuDNN frontend (cudnn.DSA, 1.32)
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from . import api, autograd, validation
from .config import SparseAttentionConfig
from .errors import ArgumentTypeError, ArgumentValueError

LOG2_E = math.log2(math.e)


def _like(name: str, tensor: Tensor, like: Tensor, *dtypes: torch.dtype) -> None:
    """Refuse a tensor of another shape or device than `like`, or of none of these dtypes."""
    if tensor.shape != like.shape:
        raise ArgumentValueError(name, f"shape must be {list(like.shape)}", list(tensor.shape))
    if tensor.dtype not in dtypes:
        raise ArgumentTypeError(name, f"must be {' or '.join(map(str, dtypes))}", tensor.dtype)
    if tensor.device != like.device:
        raise ArgumentValueError(name, f"must be on {like.device}", tensor.device)


def _only(argument: str, value: Any, allowed: Any, why: str) -> None:
    """Options of a namesake that exist in one setting only."""
    # Compared by value: under torch.compile a number may be a symbol.
    if isinstance(value, Tensor) or value != allowed:
        raise ArgumentValueError(argument, f"must be {allowed}: {why}", value)


# -- FlashMLA ------------------------------------------------------------------------------------------------------


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, indexer_topk: int = 0, *, backend: str | None = None,
    config: SparseAttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashMLA's sparse prefill: `(out, max_logits, lse)`. Not differentiable, as there.

    Conventions: packed, one document per call, no causal bound; a slot is invalid at an index below 0 or of `s_kv` and
    above; `sm_scale` is required; `max_logits` and `lse` are of `sm_scale q k`, natural logarithm, without the sink; in
    a row without a valid slot `lse` is **+inf** (the contract: -inf), `max_logits` -inf and `out` 0.

    Args:
        q: `[s_q, h_q, D]`, kv: `[s_kv, h_kv, D]`, indices: `[s_q, h_kv, topk]`; attn_sink: `[h_q]` fp32, in the units
            of `max_logits`; topk_length: `[s_q]` int32.
        indexer_topk: must be 0 (newer versions return a second lse over the first slots of a row for another).

    Returns:
        out `[s_q, h_q, d_v]` as q, max_logits and lse `[s_q, h_q]` fp32. The kernels do not give `max_logits`: it costs
        a second pass over all scores in plain torch, fp32 products of the gathered rows in bounded chunks, which takes
        many times the kernel's time. Callers who ignore it should call `fwd`.

    Raises: as `fwd`.
    """
    _only("indexer_topk", indexer_topk, 0, "the second lse is not made; fwd with indices[..., :n] gives it")
    out, lse = api.fwd(
        q, kv, indices, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length, backend=backend,
        config=config,
    )  # fmt: skip
    with torch.no_grad():
        max_logits = autograd.max_scores_op(q, kv, indices, topk_length, *validation.scale(sm_scale))
        return out, max_logits, lse.masked_fill(lse == -math.inf, math.inf)


# -- miles ---------------------------------------------------------------------------------------------------------


def sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int | None = None, attn_sink: Tensor | None = None,
    config: SparseAttentionConfig | str | None = None, *, forward_backend: str | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """The sparse attention of miles: `out`, differentiable in `q`, `kv` and `attn_sink`.

    Conventions: batched; -1 is the filler and there is no causal bound; `d_v` defaults to the **whole row**
    (`q.shape[-1]`; `fwd` takes 512 at D 576), so callers with a rope tail must pass it; the sink is a natural-log logit
    in the units of `sm_scale q k`. There the lse stays inside, so nothing else is converted. A row without a valid slot
    gives 0 and no gradient.

    Args:
        q: `[B, S, H, D]`, kv: `[B, S_kv, G, D]`, indices: `[B, S, G, topk]`, attn_sink: `[H]` fp32 or `None`.
        forward_backend: which forward miles takes, without effect here; `config.fwd_backend` is ours. Where a version
            of miles has it in the place of `config`, a str is taken for it.

    Returns: out `[B, S, H, d_v]` as q.

    Raises: as `fwd`.
    """
    validation.tensors(q=q)
    out = api.sparse_mla(
        q, kv, indices, sm_scale=sm_scale, d_v=q.shape[-1] if d_v is None else d_v, attn_sink=attn_sink,
        config=None if isinstance(config, str) else config, backend=backend,
    )  # fmt: skip
    return cast(Tensor, out)


# -- the TileLang example ------------------------------------------------------------------------------------------


def _token_numbers(q: Tensor) -> Tensor:
    """`[B, S]`: the example bounds row t by t, also where there are more rows of kv than tokens."""
    validation.tensors(q=q)
    if q.dim() != 4:
        raise ArgumentValueError("q", "must be [B, S, H, D]", f"shape {list(q.shape)}")
    return torch.arange(q.shape[1], device=q.device).expand(q.shape[0], -1)


def sparse_mla_fwd_interface(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float | None = None, return_p_sum: bool = False, d_v: int = 512,
    block_I: int = 64, num_stages: int = 2, threads: int = 256, *, backend: str | None = None,
    config: SparseAttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The forward of the TileLang example (`sparse_mla_fwd.py`): `(out, lse)`. Not differentiable, as there.

    Conventions: batched; always causal by the **token number** (`index <= t`, whatever `S_kv`; the contract's default
    bound is `t + S_kv - S`); `lse` is a **base-2** logarithm, of `sm_scale q k log2(e)`; no sink. There a filler must
    fail `index <= t`, as `S_kv` does, since -1 is read; here -1 is invalid too. A row without a valid slot gives
    `out = 0` and `lse = -inf` (there NaN and -inf).

    Args:
        q: `[B, S, H, D]`, kv: `[B, S_kv, G, D]`, indices: `[B, S, G, topk]`; sm_scale: default `D ** -0.5`.
        return_p_sum: must be `False`, as there.
        block_I, num_stages, threads: tuning of the example's kernel, without effect here; `config` is ours.

    Returns: out `[B, S, H, d_v]` as q, lse `[B, S, H]` fp32.

    Raises: as `fwd`.
    """
    _only("return_p_sum", return_p_sum, False, "the forward has no sums to return")
    out, lse = api.fwd(
        q, kv, indices, sm_scale=sm_scale, d_v=d_v, causal=True, q_positions=_token_numbers(q), backend=backend,
        config=config,
    )  # fmt: skip
    return out, lse * LOG2_E


def sparse_mla_bwd(
    q: Tensor, kv: Tensor, o: Tensor, do: Tensor, indices: Tensor, lse: Tensor, sm_scale: float | None = None,
    is_casual: bool = True, return_kernel: bool = False, delta: Tensor | None = None, *, backend: str | None = None,
    config: SparseAttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The backward of the TileLang example (`sparse_mla_bwd.py`): `(dq, dkv)`, in the dtypes of q and kv.

    Conventions: as `sparse_mla_fwd_interface`, whose base-2 `lse` it takes.

    Args:
        o, do: `[B, S, H, d_v]` as q; lse: `[B, S, H]` fp32, base 2.
        is_casual: must be `True`, return_kernel: must be `False`, as there.
        delta: `[B, S, H]` fp32, optional, in place of `sum(do * o)`. It costs an elementwise pass over `o` and `do`
            here: what it differs by enters as the gradient of lse, `dlse = sum(do * o) - delta`, which is the same
            `dS = p (dP - delta)`.

    Raises: as `bwd`.
    """
    _only("is_casual", is_casual, True, "the example is always causal")
    _only("return_kernel", return_kernel, False, "there is no kernel object to return")
    validation.tensors(("delta",), o=o, do=do, lse=lse, delta=delta)
    _like("do", do, o, o.dtype)
    for name, values in (("lse", lse), ("delta", delta)):
        if values is not None:
            _like(name, values, o[..., 0], torch.float32)
    dlse = None if delta is None else (do.float() * o.float()).sum(-1) - delta
    dq, dkv, _ = api.bwd(
        q, kv, o, do, indices, lse / LOG2_E, dlse=dlse, sm_scale=sm_scale, causal=True, q_positions=_token_numbers(q),
        backend=backend, config=config,
    )  # fmt: skip
    return dq, dkv


# -- the cuDNN frontend --------------------------------------------------------------------------------------------


class NamedGradients(dict):
    """Gradients by name (`["dq"]`), by number (`[0]`), and unpacked like a tuple, in the order they were given."""

    def __iter__(self) -> Any:
        return iter(self.values())

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def sparse_attention_backward_wrapper(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, attn_sink: Tensor, topk_idxs: Tensor,
    softmax_scale: float | None = None, topk_length: Tensor | None = None, dq: Tensor | None = None,
    dkv: Tensor | None = None, block_tile: int = 64, deterministic: bool = False, stream: Any = None,
    workspace: Tensor | None = None, q_cluster_mode: str = "off", *, backend: str | None = None,
    config: SparseAttentionConfig | None = None,
) -> NamedGradients:  # fmt: skip
    """The backward of `cudnn.DSA`: `{"dq", "dkv", "d_sink"}`, also unpacked in that order.

    Conventions: packed, one group without an axis of its own, no causal bound; `lse` is the natural logarithm without
    the sink, as the contract's, and may be +inf as well as -inf in a row without a valid slot; the sink is required,
    -inf is none; the given `dq` and `dkv` are **overwritten** (the contract's `dkv=` is added into).

    Args:
        q: `[T, H, D]`, kv: `[T_kv, D]`, out, dout: `[T, H, d_v]`, lse: `[T, H]` fp32, attn_sink: `[H]` fp32,
            topk_idxs: `[T, K]`, topk_length: `[T]` int32; softmax_scale: default `D ** -0.5`.
        dq, dkv: optional destinations of q's and kv's shapes, any strides; dkv may also be fp32. Filled by a copy.
        deterministic: bitwise equal results from run to run.
        stream: `None` or torch's current stream, as an int or what int() takes; that is where the work goes.
        block_tile, workspace, q_cluster_mode: of cuDNN's kernels, without effect here.

    Raises: as `bwd`.
    """
    validation.tensors(("dq", "dkv"), q=q, kv=kv, lse=lse, attn_sink=attn_sink, dq=dq, dkv=dkv)
    current = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    if stream is not None and int(stream) != current:
        rule = "must be None or torch's current stream: make it the current one with torch.cuda.stream"
        raise ArgumentValueError("stream", rule, stream)
    if kv.dim() != 2:
        raise ArgumentValueError("kv", "must be [T_kv, D]", f"shape {list(kv.shape)}")
    _like("lse", lse, q[..., 0], torch.float32)
    for name, given, like, dtypes in (("dq", dq, q, ()), ("dkv", dkv, kv, (torch.float32,))):
        if given is None:
            continue
        _like(name, given, like, like.dtype, *dtypes)
        expanded = any(n > 1 and s == 0 for n, s in zip(given.shape, given.stride(), strict=True))
        if expanded or (given.requires_grad and given.is_leaf):
            rule = "must be writable: no expanded dimension, no leaf that requires a gradient"
            raise ArgumentValueError(name, rule, f"strides {given.stride()}, requires_grad {given.requires_grad}")
    new_dq, new_dkv, d_sink = api.bwd(
        q, kv.unsqueeze(1), out, dout, topk_idxs, lse.masked_fill(lse == math.inf, -math.inf),
        deterministic=deterministic, dkv_dtype=None if dkv is None else dkv.dtype, sm_scale=softmax_scale,
        topk_length=topk_length, attn_sink=attn_sink, backend=backend, config=config,
    )  # fmt: skip
    new_dkv = new_dkv.squeeze(1)
    return NamedGradients(
        dq=new_dq if dq is None else dq.copy_(new_dq),
        dkv=new_dkv if dkv is None else dkv.copy_(new_dkv),
        d_sink=d_sink,
    )
