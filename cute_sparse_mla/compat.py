"""Drop-ins: the call forms of other implementations of sparse MLA, computed by this package.

Each function has its namesake's arguments, states where that one's conventions differ from the contract's (`api`), and
converts exactly: what is converted is a sign of infinity, a base of logarithms (one fp32 product) or a mask.
All take `backend=` and `config=` as `api.fwd` does, and raise what it raises: wrong arguments by their own names and
before anything is computed. Invalid slots are never read, whichever filler marks them, and shapes that the namesake
refuses (any K, 1 to 128 heads per group, strides between rows, int64 indices) work.

Layouts are the contract's, since nothing is silently copied, where some namesakes copy (miles calls `.contiguous()` on
q and kv, cuDNN's wrapper stages strided inputs): rows of `q`, `kv`, `out` and `dout` whose last dimension is not
contiguous or that do not start on 16 bytes are refused, so are an expanded `q` or `kv` (stride 0) and a `kv` whose
strides are not multiples of the smallest (a dense copy is the caller's to make). Other tensors have any strides.

    flash_mla_sparse_fwd               FlashMLA (deepseek-ai/FlashMLA, flash_mla)
    sparse_attention                   miles (radixark/miles, miles.kernels.attention.dsa)
    sparse_mla_fwd_interface,
    sparse_mla_bwd                     the TileLang example (tile-ai/tilelang, examples/deepseek_v32)
    sparse_attention_backward_wrapper  the cuDNN frontend (cudnn.DSA, 1.32)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from . import api, autograd, validation
from .config import SparseAttentionConfig
from .errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from .scales import LOG2_E

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _named(**theirs: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Wrong arguments by the namesake's names: `ours="theirs"` where they differ."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            try:
                return function(*args, **keywords)
            except ArgumentError as error:
                if error.argument not in theirs:
                    raise
                raise type(error)(theirs[error.argument], error.rule, error.got) from None

        return call

    return decorate


def _shapes(**named: tuple[Tensor | None, str]) -> None:
    """Check tensors against the letters of their axes, each of the same size throughout; `None` is left out."""
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in named.items():
        if tensor is None:
            continue
        axes, shape = letters.split(), tensor.shape
        if len(shape) != len(axes) or any(sizes.get(axis, n) != n for axis, n in zip(axes, shape, strict=True)):
            known = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)
            rule = f"shape must be [{', '.join(axes)}]" + (f" with {known}" if known else "")
            raise ArgumentValueError(name, rule, list(shape))
        sizes.update(zip(axes, shape, strict=True))


def _like(name: str, tensor: Tensor, like: Tensor, *dtypes: torch.dtype) -> None:
    """Refuse a tensor of another device than `like`, or of none of these dtypes."""
    if tensor.dtype not in dtypes:
        raise ArgumentTypeError(name, f"must be {' or '.join(map(str, dtypes))}", tensor.dtype)
    if tensor.device != like.device:
        raise ArgumentValueError(name, f"must be on {like.device}", tensor.device)


def _only(argument: str, value: Any, allowed: int, why: str) -> None:
    """Options of a namesake that exist in one setting only, a bool or an int."""
    check: Callable[[str, Any], int] = validation.flag if isinstance(allowed, bool) else validation.integer
    # Compared by value: under torch.compile a number may be a symbol.
    if check(argument, value) != allowed:
        raise ArgumentValueError(argument, f"must be {allowed}: {why}", value)


def _integers(**named: Any) -> None:
    for name, value in named.items():
        validation.integer(name, value)


def _one_of(argument: str, value: Any, *allowed: str) -> None:
    """An option by name; any name where none is listed."""
    if not isinstance(value, str):
        raise ArgumentTypeError(argument, "must be a str", type(value).__name__)
    if allowed and value not in allowed:
        raise ArgumentValueError(argument, f"must be one of {', '.join(allowed)}", repr(value))


def _required_scale(sm_scale: Any) -> None:
    if sm_scale is None:
        raise ArgumentTypeError("sm_scale", f"{validation.SCALE_RULE}; it has no default here", None)


# -- FlashMLA ------------------------------------------------------------------------------------------------------


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, indexer_topk: int = 0, *, backend: str | None = None,
    config: SparseAttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashMLA's sparse prefill: `(out, max_logits, lse)`. Not differentiable, as there.

    Conventions: packed, one document per call, no causal bound; a slot is invalid at an index below 0 or of `s_kv` and
    above; `sm_scale` is required, `None` is refused; `max_logits` and `lse` are of `sm_scale q k`, natural logarithm,
    without the sink; in a row without a valid slot `lse` is **+inf** (the contract: -inf), `max_logits` -inf, `out` 0.

    Args:
        q: `[s_q, h_q, D]`, kv: `[s_kv, h_kv, D]`, rows contiguous and on 16 bytes, else refused; indices: `[s_q, h_kv,
            topk]`; attn_sink: `[h_q]` fp32, in the units of `max_logits`; topk_length: `[s_q]` int32.
        indexer_topk: must be 0 (newer versions return a second lse over the first slots of a row for another).

    Returns:
        out `[s_q, h_q, d_v]` as q, max_logits and lse `[s_q, h_q]` fp32. The kernels do not give `max_logits`: it costs
        a second pass over all scores in plain torch, fp32 products of the gathered rows in bounded chunks, which takes
        many times the kernel's time. Callers who ignore it should call `fwd`.

    Raises: as `fwd`.
    """
    _only("indexer_topk", indexer_topk, 0, "the second lse is not made; fwd with indices[..., :n] gives it")
    _integers(d_v=d_v)
    _required_scale(sm_scale)
    validation.tensors(
        ("attn_sink", "topk_length"), q=q, kv=kv, indices=indices, attn_sink=attn_sink, topk_length=topk_length
    )
    _shapes(
        q=(q, "s_q h_q D"), kv=(kv, "s_kv h_kv D"), indices=(indices, "s_q h_kv topk"),
        attn_sink=(attn_sink, "h_q"), topk_length=(topk_length, "s_q"),
    )  # fmt: skip
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

    Conventions: batched; -1 is the filler and there is no causal bound; `sm_scale` is required, `None` is refused;
    `d_v` defaults to the **whole row** (`q.shape[-1]`; `fwd` takes 512 at D 576), so callers with a rope tail must pass
    it; the sink is a natural-log logit in the units of `sm_scale q k`. There the lse stays inside, so nothing else is
    converted. A row without a valid slot gives 0 and no gradient.

    Args:
        q: `[B, S, H, D]`, kv: `[B, S_kv, G, D]`, rows contiguous and on 16 bytes, neither expanded, else refused
            (miles makes both contiguous); indices: `[B, S, G, topk]`, attn_sink: `[H]` fp32 or `None`.
        forward_backend: which forward miles takes, without effect here; `config.fwd_backend` is ours. Where a version
            of miles has it in the place of `config`, a str is taken for it.

    Returns: out `[B, S, H, d_v]` as q.

    Raises: as `fwd`.
    """
    _required_scale(sm_scale)
    if forward_backend is not None:
        _one_of("forward_backend", forward_backend)
    validation.tensors(("attn_sink",), q=q, kv=kv, indices=indices, attn_sink=attn_sink)
    _shapes(q=(q, "B S H D"), kv=(kv, "B S_kv G D"), indices=(indices, "B S G topk"), attn_sink=(attn_sink, "H"))
    out = api.sparse_mla(
        q, kv, indices, sm_scale=sm_scale, d_v=q.shape[-1] if d_v is None else d_v, attn_sink=attn_sink,
        config=None if isinstance(config, str) else config, backend=backend,
    )  # fmt: skip
    return cast(Tensor, out)


# -- the TileLang example ------------------------------------------------------------------------------------------


def _token_numbers(q: Tensor) -> Tensor:
    """`[B, S]`: the example bounds row t by t, also where there are more rows of kv than tokens."""
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
        q: `[B, S, H, D]`, kv: `[B, S_kv, G, D]`, rows contiguous and on 16 bytes, else refused (there both must be
            contiguous as a whole); indices: `[B, S, G, topk]`; sm_scale: default `D ** -0.5`.
        return_p_sum: must be `False`, as there.
        block_I, num_stages, threads: tuning of the example's kernel, without effect here; `config` is ours.

    Returns: out `[B, S, H, d_v]` as q, lse `[B, S, H]` fp32.

    Raises: as `fwd`.
    """
    _only("return_p_sum", return_p_sum, False, "the forward has no sums to return")
    _integers(d_v=d_v, block_I=block_I, num_stages=num_stages, threads=threads)
    validation.tensors(q=q, kv=kv, indices=indices)
    _shapes(q=(q, "B S H D"), kv=(kv, "B S_kv G D"), indices=(indices, "B S G topk"))
    options: dict[str, Any] = dict(sm_scale=sm_scale, d_v=d_v, causal=True, backend=backend, config=config)
    api.check_fwd(q, kv, indices, **options)
    out, lse = api.fwd(q, kv, indices, q_positions=_token_numbers(q), **options)
    return out, lse * LOG2_E


@_named(out="o", dout="do", dlse="delta")
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, o: Tensor, do: Tensor, indices: Tensor, lse: Tensor, sm_scale: float | None = None,
    is_casual: bool = True, return_kernel: bool = False, delta: Tensor | None = None, *, backend: str | None = None,
    config: SparseAttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The backward of the TileLang example (`sparse_mla_bwd.py`): `(dq, dkv)`, in the dtypes of q and kv.

    Conventions: as `sparse_mla_fwd_interface`, whose base-2 `lse` it takes.

    Args:
        q, kv, indices: as there. o, do: `[B, S, H, d_v]` as q, rows contiguous and on 16 bytes, else refused; lse:
            `[B, S, H]` fp32, base 2, any strides.
        is_casual: must be `True`, return_kernel: must be `False`, as there.
        delta: `[B, S, H]` fp32, optional, in place of `sum(do * o)`. It costs an elementwise pass over `o` and `do`
            here: what it differs by enters as the gradient of lse, `dlse = sum(do * o) - delta`, which is the same
            `dS = p (dP - delta)`.

    Raises: as `bwd`.
    """
    _only("is_casual", is_casual, True, "the example is always causal")
    _only("return_kernel", return_kernel, False, "there is no kernel object to return")
    validation.tensors(("delta",), q=q, kv=kv, o=o, do=do, indices=indices, lse=lse, delta=delta)
    _shapes(
        q=(q, "B S H D"), kv=(kv, "B S_kv G D"), o=(o, "B S H d_v"), do=(do, "B S H d_v"),
        indices=(indices, "B S G topk"), lse=(lse, "B S H"), delta=(delta, "B S H"),
    )  # fmt: skip
    options: dict[str, Any] = dict(sm_scale=sm_scale, causal=True, backend=backend, config=config)
    api.check_bwd(q, kv, o, do, indices, lse, dlse=delta, **options)
    dlse = None if delta is None else (do.float() * o.float()).sum(-1) - delta
    dq, dkv, _ = api.bwd(q, kv, o, do, indices, lse / LOG2_E, dlse=dlse, q_positions=_token_numbers(q), **options)
    return dq, dkv


# -- the cuDNN frontend --------------------------------------------------------------------------------------------


class NamedGradients(dict):
    """Gradients by name (`["dq"]`), by number (`[0]`), and unpacked like a tuple, in the order they were given."""

    def __iter__(self) -> Any:
        return iter(self.values())

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


# So that torch.export takes a graph that returns it.
torch.utils._pytree.register_pytree_node(
    NamedGradients,
    lambda named: (list(named.values()), list(named.keys())),
    lambda gradients, names: NamedGradients(zip(names, gradients, strict=True)),
    serialized_type_name=f"{__name__}.NamedGradients",
    flatten_with_keys_fn=lambda named: (
        [(torch.utils._pytree.MappingKey(name), gradient) for name, gradient in named.items()],
        list(named.keys()),
    ),
)


def _is_current(stream: Any, device: torch.device) -> bool:
    """Whether a stream, given as a number or what int() takes, is torch's current one of a device."""
    takes = not isinstance(stream, (str, bytes, bool, Real, Tensor)) or type(stream) is int
    try:
        number = int(stream) if takes else None
    except (TypeError, ValueError):
        number = None
    if number is None:
        rule = "must be None, an int or a stream that int() takes"
        raise ArgumentTypeError("stream", rule, type(stream).__name__)
    return number == (torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@_named(indices="topk_idxs", sm_scale="softmax_scale")
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
        q: `[T, H, D]`, kv: `[T_kv, D]`, out, dout: `[T, H, d_v]`, rows contiguous and on 16 bytes, else refused
            (cuDNN's wrapper stages what is strided); lse: `[T, H]` fp32, attn_sink: `[H]` fp32, topk_idxs: `[T, K]`,
            topk_length: `[T]` int32; softmax_scale: default `D ** -0.5`.
        dq, dkv: optional destinations of q's and kv's shapes, any strides whose elements do not overlap; dkv may also
            be fp32. Filled by a copy. One that requires a gradient is taken under `torch.no_grad()` only.
        deterministic: bitwise equal results from run to run.
        stream: `None` or torch's current stream, as an int or what int() takes; that is where the work goes.
        block_tile, workspace, q_cluster_mode: of cuDNN's kernels, without effect here.

    Raises: as `bwd`.
    """
    validation.tensors(
        ("topk_length", "dq", "dkv", "workspace"), q=q, kv=kv, out=out, dout=dout, lse=lse, attn_sink=attn_sink,
        topk_idxs=topk_idxs, topk_length=topk_length, dq=dq, dkv=dkv, workspace=workspace,
    )  # fmt: skip
    _integers(block_tile=block_tile)
    _one_of("q_cluster_mode", q_cluster_mode, "off", "adaptive_pair")
    if stream is not None and not _is_current(stream, q.device):
        rule = "must be None or torch's current stream: make it the current one with torch.cuda.stream"
        raise ArgumentValueError("stream", rule, stream)
    _shapes(
        q=(q, "T H D"), kv=(kv, "T_kv D"), out=(out, "T H d_v"), dout=(dout, "T H d_v"), lse=(lse, "T H"),
        attn_sink=(attn_sink, "H"), topk_idxs=(topk_idxs, "T K"), topk_length=(topk_length, "T"),
        dq=(dq, "T H D"), dkv=(dkv, "T_kv D"),
    )  # fmt: skip
    # Here with the strides as they came; what is traced has no address.
    if not torch.compiler.is_compiling():
        validation.layout("kv", kv)
    rows = (q, kv.unsqueeze(1), out, dout, topk_idxs)
    options: dict[str, Any] = dict(
        deterministic=deterministic, sm_scale=softmax_scale, topk_length=topk_length, attn_sink=attn_sink,
        backend=backend, config=config,
    )  # fmt: skip
    api.check_bwd(*rows, lse, **options)
    for name, given, like, dtypes in (("dq", dq, q, ()), ("dkv", dkv, kv, (torch.float32,))):
        if given is None:
            continue
        _like(name, given, like, like.dtype, *dtypes)
        validation.destination(name, given)
    new_dq, new_dkv, d_sink = api.bwd(
        *rows, lse.masked_fill(lse == math.inf, -math.inf), dkv_dtype=None if dkv is None else dkv.dtype, **options
    )
    new_dkv = new_dkv.squeeze(1)
    return NamedGradients(
        dq=new_dq if dq is None else dq.copy_(new_dq),
        dkv=new_dkv if dkv is None else dkv.copy_(new_dkv),
        d_sink=d_sink,
    )
