"""The front-end: `fwd`, `bwd`, `sparse_mla`, `explain`, `warmup`. Their docstrings are the contract.

Tensors, batched / packed (`T` tokens of any number of documents):

    q            [B, S, H, D]      / [T, H, D]       bf16 or fp16; H = G * heads_per_group, 1..128 heads per group
    kv           [B, S_kv, G, D]   / [T_kv, G, D]    as q; K is the whole row, V its first d_v columns
    indices      [B, S, G, K]      / [T, G, K]       int32 or int64 rows of kv; the G axis may be left out when G == 1
    topk_length  [B, S]            / [T]             int32, optional: only the first n slots of a row count
    q_positions  [B, S]            / [T]             int32 or int64, optional, in kv rows, for causal=True
    attn_sink    [H]                                 fp32, optional logit in the units of scores * sm_scale
    out          [B, S, H, d_v]    / [T, H, d_v]     as q
    lse          [B, S, H]         / [T, H]          fp32, natural log of the sum over valid slots, without the sink

A slot is valid when `0 <= index < S_kv`, its position in the row is below `topk_length`, and, with `causal=True`,
`index <= q_positions[t]` (default `t + S_kv - S`, one document per batch entry). Invalid slots are never read and never
written. A repeated index counts once for each slot it stands in. A row without a valid slot gives `out = 0`,
`lse = -inf` and no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import autograd, dispatch, env, groups, validation
from . import config as config_table
from .config import SparseAttentionConfig
from .errors import ArgumentTypeError, ArgumentValueError, SparseMLAError, UnsupportedError
from .groups import TokenPlan
from .problem import BACKWARD, MAX_HEADS_PER_GROUP, Problem

_OPTIONAL = ("q_positions", "topk_length", "attn_sink", "dlse", "dkv")


def _forward_arguments(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: Any, d_v: Any, causal: Any, q_positions: Any,
    topk_length: Any, attn_sink: Any, config: Any, backend: Any, plan: Any,
) -> tuple:  # fmt: skip
    """The custom op's arguments from the caller's: types checked, scalars normalised."""
    validation.tensors(
        _OPTIONAL, q=q, kv=kv, indices=indices, q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink
    )
    validation.refuse_forward_mode(q, kv, attn_sink)
    D = validation.row_width(q)
    return (
        q, kv, indices, q_positions, topk_length, attn_sink, *validation.scale(sm_scale),
        validation.value_width(d_v, D), validation.flag("causal", causal), validation.encoded_config(config),
        _checked_name(backend), *groups.check(plan, q, kv, indices, causal, q_positions, topk_length, config),
    )  # fmt: skip


def _checked_name(backend: Any) -> str:
    name = validation.backend_name(backend)
    dispatch.check_name("backend", name)
    return name


def fwd(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float | None = None, d_v: int | None = None,
    causal: bool = False, q_positions: Tensor | None = None, topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None, config: SparseAttentionConfig | None = None, backend: str | None = None,
    plan: TokenPlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sparse MLA forward: `(out, lse)`. Not differentiable; `sparse_mla` is.

    `out = w softmax(sm_scale q k) v` over the valid slots of each row, `w = sigmoid(lse - attn_sink)` (1 without one).

    Args:
        q, kv, indices, topk_length, q_positions, attn_sink: see the module's table. Rows of `q` and `kv` are read in
            place: last dimension contiguous, rows on 16 bytes, other strides free (not 0).
        sm_scale: finite number >= 0 (Python or numpy scalar, or a 0-dim CPU tensor), default `D ** -0.5`. Models
            trained with another scale must pass it (the GLM-5 family `256 ** -0.5`). A CUDA tensor is refused: reading
            it would synchronise. In a compiled graph with dynamic shapes its value may change without recompiling; but
            with inductor's CUDA graphs torch fixes Python floats itself, and a tensor stays outside of the CUDA graph.
        d_v: width of V; default 512 at D 512 and 576, otherwise required.
        causal: bound every row by `q_positions` (default `t + S_kv - S`; it may be negative).
        config: tuning choices; fields left at `None` come from the measured table. `tokens_per_tile=1` makes a query's
            result independent of the other queries in the call, bitwise.
        backend: `None` picks by device: compute capability 9.x `"sm90"`, 10.0 and 10.3 `"sm100"`, a CPU `"reference"`,
            any other GPU the reference with one warning. A named backend is used or refused, never replaced: these, or
            another package where it is installed, `"flash_mla"` (forward only) and `"cudnn"` (backward; forward on
            10.x), whose limits and copies are stated in `external`. `"fastest"` takes per pass the fastest that was
            measured at this architecture, D and head count, is installed and takes the call; `explain` says which.
            `config.fwd_backend` names another for the forward alone.
        plan: what `cute_sparse_mla.plan` made for these indices and options: gather lists of several neighbouring
            tokens, so that a row of kv that they share is read once. Otherwise made inside, if the config asks for it.

    Returns:
        `out` in q's dtype and `lse` in fp32, new contiguous tensors on q's device, on torch's current stream.

    Raises:
        TypeError, ValueError: a wrong argument (`ArgumentError` names it, the rule and what came).
        UnsupportedError, MissingDependencyError: the device or installation cannot run it.

    Source: DeepSeek-V3.2 (sparse attention over latent KV), FlashAttention-2 (online softmax).
    """
    arguments = _forward_arguments(
        q, kv, indices, sm_scale, d_v, causal, q_positions, topk_length, attn_sink, config, backend, plan
    )
    with torch.no_grad():
        return autograd.fwd_op(*arguments)


def bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, *, dlse: Tensor | None = None,
    deterministic: bool = False, dkv: Tensor | None = None, dkv_dtype: torch.dtype | None = None,
    sm_scale: float | None = None, causal: bool = False, q_positions: Tensor | None = None,
    topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
    config: SparseAttentionConfig | None = None, backend: str | None = None, plan: TokenPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Sparse MLA backward: `(dq, dkv, d_sink)` for `out, lse = fwd(q, kv, indices, ...)` with the same keywords.

    With `p_hat = exp(s - lse)`, `w = sigmoid(lse - attn_sink)`, `Delta = sum(dout * out)`:
    `dS = p_hat (w (dout v - Delta) + dlse)`, `dq = sm_scale dS k`, `dkv = sm_scale dS q` plus `w p_hat dout` on the
    first `d_v` columns, `d_sink = -sum_t (1 - w) Delta`.

    Args:
        out, dout: `[..., H, d_v]` in q's dtype, rows as `q`'s, but they may be expanded over leading axes; `d_v` is
            taken from `out`.
        lse, dlse: fp32 `[..., H]`, any strides. `dlse` of a row without a valid slot is ignored, NaN included.
        deterministic: bitwise equal results from run to run on one kind of GPU. Each row of dkv is then a sum in fixed
            order, whose terms or factors pass through up to 252 MB of memory: slower. On Hopper tokens of few heads
            are then always grouped, unless `config` says otherwise.
        dkv: optional fp32 buffer of kv's shape, contiguous; the gradient is added into it and it is returned. On a GPU
            but Blackwell terms below 1.2e-38, as of sinks 85 above lse, are lost: adds in global memory flush them.
        dkv_dtype: dtype of the returned dkv: kv's (default) or `torch.float32`. Sums are fp32 always.
        others: as in `fwd`.

    Returns:
        `dq` as q, `dkv` as kv (or fp32), `d_sink [H]` fp32, `None` without a sink.

    Raises: as `fwd`.
    """
    options = _backward_options(
        q, kv, out, dout, indices, lse, dlse, deterministic, dkv, dkv_dtype, sm_scale, causal, q_positions,
        topk_length, attn_sink, config, backend, plan,
    )  # fmt: skip
    with torch.no_grad():
        if dkv is None:
            dq, dkv, d_sink = autograd.bwd_op(q, kv, out, dout, indices, lse, dlse, *options)
        else:
            dq, d_sink = autograd.bwd_add_op(q, kv, out, dout, indices, lse, dlse, dkv, *options)
    return dq, dkv, None if attn_sink is None else d_sink


def _backward_options(
    q: Tensor, kv: Tensor, out: Any, dout: Any, indices: Tensor, lse: Any, dlse: Any, deterministic: Any, dkv: Any,
    dkv_dtype: Any, sm_scale: Any, causal: Any, q_positions: Any, topk_length: Any, attn_sink: Any, config: Any,
    backend: Any, plan: Any,
) -> tuple:  # fmt: skip
    """The custom ops' arguments behind the tensors of both passes: types checked, scalars normalised."""
    arguments = _forward_arguments(
        q, kv, indices, sm_scale, 1, causal, q_positions, topk_length, attn_sink, config, backend, plan
    )
    validation.tensors(_OPTIONAL, out=out, dout=dout, lse=lse, dlse=dlse, dkv=dkv)
    validation.refuse_forward_mode(out, dout, lse, dlse, dkv)
    if dkv is not None:
        validation.updatable("dkv", dkv)
    validation.flag("deterministic", deterministic)
    if dkv_dtype is not None and not isinstance(dkv_dtype, torch.dtype):
        raise ArgumentTypeError("dkv_dtype", "must be a torch.dtype or None", type(dkv_dtype).__name__)
    scale, traced_scale, _, causal, config_text, name, *lists = arguments[6:]
    return (
        q_positions, topk_length, attn_sink, scale, traced_scale, causal, deterministic, dkv_dtype, config_text, name,
        *lists,
    )  # fmt: skip


def check_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: Any = None, d_v: Any = None, causal: Any = False,
    config: Any = None, backend: Any = None,
) -> None:  # fmt: skip
    """Check a call of `fwd`, for callers that compute some of its arguments only when the others are right.

    Arguments as in `fwd`; those that are missing here are checked by `fwd` itself.

    Returns: nothing.

    Raises: TypeError, ValueError, as `fwd` does for wrong arguments.
    """
    arguments = _forward_arguments(q, kv, indices, sm_scale, d_v, causal, None, None, None, config, backend, None)
    # What is traced does not run before the op has checked it.
    if not torch.compiler.is_compiling():
        validation.forward(
            q, kv, indices, d_v=arguments[8], causal=causal, q_positions=None, topk_length=None, attn_sink=None
        )


def check_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, *, dlse: Any = None,
    deterministic: Any = False, sm_scale: Any = None, causal: Any = False, topk_length: Any = None,
    attn_sink: Any = None, config: Any = None, backend: Any = None,
) -> None:  # fmt: skip
    """Check a call of `bwd`, for callers that compute some of its arguments only when the others are right.

    Arguments as in `bwd`; those that are missing here are checked by `bwd` itself.

    Returns: nothing.

    Raises: TypeError, ValueError, as `bwd` does for wrong arguments.
    """
    _backward_options(
        q, kv, out, dout, indices, lse, dlse, deterministic, None, None, sm_scale, causal, None, topk_length,
        attn_sink, config, backend, None,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        validation.backward(
            q, kv, out, dout, indices, lse, dlse=dlse, dkv=None, dkv_dtype=None, causal=causal, q_positions=None,
            topk_length=topk_length, attn_sink=attn_sink,
        )  # fmt: skip


def sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, *, return_lse: bool = False, sm_scale: float | None = None,
    d_v: int | None = None, causal: bool = False, q_positions: Tensor | None = None,
    topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
    config: SparseAttentionConfig | None = None, backend: str | None = None, plan: TokenPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Differentiable sparse MLA: `out`, or `(out, lse)` with `return_lse=True`. Arguments as in `fwd`.

    Gradients flow to `q`, `kv` and `attn_sink`, through `out` and through `lse`. Saved for the backward: the inputs,
    `out` and `lse`. The gradient of `out` is made contiguous when autograd hands over an expanded or unaligned one;
    no other tensor is ever copied. `torch.use_deterministic_algorithms(True)` selects the deterministic backward.
    """
    arguments = _forward_arguments(
        q, kv, indices, sm_scale, d_v, causal, q_positions, topk_length, attn_sink, config, backend, plan
    )
    validation.flag("return_lse", return_lse)
    validation.refuse_function_transforms(q, kv, attn_sink)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, kv, attn_sink)):
        dispatch.require_backward(arguments[11])
    if plan is None:
        # Made here rather than inside the op, so that autograd keeps it for the backward.
        made = groups.lists_for(q, kv, indices, causal, q_positions, topk_length, attn_sink, config, arguments[11])
        arguments = (*arguments[:12], *made)
    out, lse = autograd.fwd_op(*arguments)
    return (out, lse) if return_lse else out


# -- asking without running ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Whether a call can run, with what, and why. `str()` is for people.

    `backward` is empty where the backward runs as the forward does, else its backend and reason, or why it cannot run.
    """

    ok: bool
    reason: str
    problem: Problem | None = None
    backend: str | None = None
    config: SparseAttentionConfig | None = None
    table_row: str = ""
    groups: str = ""
    warning: str = ""
    error: SparseMLAError | None = None
    backward: str = ""

    def __str__(self) -> str:
        if not self.ok:
            return f"cannot run: {self.reason}"
        lines = [f"backend   {self.backend} ({self.reason})", f"config    {self.config}", f"table     {self.table_row}"]
        more = {"backward": self.backward, "groups": self.groups, "warning": self.warning}
        return "\n".join(lines + [f"{name:<9} {text}" for name, text in more.items() if text])


def explain(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float | None = None, d_v: int | None = None,
    causal: bool = False, q_positions: Tensor | None = None, topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None, config: SparseAttentionConfig | None = None, backend: str | None = None,
    plan: TokenPlan | None = None, capability: tuple[int, int] | None = None,
) -> Explanation:  # fmt: skip
    """Can this call run here, with which kernel and config, and why; nothing is run, compiled or read.

    Arguments as in `fwd`. `capability=(major, minor)` asks on behalf of a CUDA device of that compute capability, with
    tensors anywhere; without it, `meta` tensors (which cost no memory) ask on behalf of this machine's default device.

    Returns: an `Explanation`. Wrong arguments are reported in it, not raised.
    """
    try:
        arguments = _forward_arguments(
            q, kv, indices, sm_scale, d_v, causal, q_positions, topk_length, attn_sink, config, backend, plan
        )
        *tensors, _, _, width, causal, config_text, name = arguments[:12]
        q, kv, indices, q_positions, topk_length, attn_sink = tensors
        call = validation.forward(
            q, kv, indices, d_v=width, causal=causal,
            q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink,
        )  # fmt: skip
        device = _default_device() if q.device.type == "meta" else q.device
        device_type = device.type if capability is None else "cuda"
        found = env.capability(device) if capability is None else validation.capability(capability)
        wished = config_table.decode(config_text)
        if plan is not None:
            wished = dispatch.planned(wished, plan.tokens_per_tile, device_type, found, name)
        asked = functools.partial(dispatch.choose, call.problem, device_type, found, name, wished, call=call)
        choice = asked()
        backward = _explained_backward(asked, choice)
    except SparseMLAError as error:
        return Explanation(False, str(error), error=error)
    row = f"{choice.row.reason} (measured: {choice.row.figure})"
    groups = dispatch.describe_groups(choice, call.problem)
    return Explanation(
        True, choice.reason, call.problem, choice.backend, choice.config, row, groups, choice.warning, backward=backward
    )


def _explained_backward(asked: Callable[..., dispatch.Choice], forward: dispatch.Choice) -> str:
    try:
        choice = asked(which=BACKWARD)
    except UnsupportedError as error:
        return f"cannot run: {error}"
    if choice.config.bwd_cluster == 2 and choice.backend == "sm90":
        return "sm90, a pair of CTAs a tile as config.bwd_cluster = 2 asks: measured slower than the default"
    same = (choice.backend, choice.reason) == (forward.backend, forward.reason)
    return "" if same else f"{choice.backend} ({choice.reason})"


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def warmup(
    heads_per_group: int, D: int, *, d_v: int | None = None, dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32, causal: bool | Sequence[bool] = (False, True), backward: bool = True,
    config: SparseAttentionConfig | None = None, backend: str | None = None, device: torch.device | str | None = None,
) -> list[dispatch.Choice]:  # fmt: skip
    """Compile the kernels that calls of this kind use, so that the first call does not wait. No data is needed.

    Args:
        heads_per_group, D, d_v, dtype, index_dtype: as the tensors of the calls to come; lengths, strides, K, scale,
            sink and head counts of the same class (16, 32, 64, 128) need no kernel of their own.
        causal: which flavours to compile.
        backward: also the backward's kernels.
        device: default the current CUDA device, or the CPU where there is none (the reference compiles nothing).

    Returns: one `Choice` (backend, config, reason) per flavour.

    Raises: as `fwd`.
    """
    heads = validation.count("heads_per_group", heads_per_group, MAX_HEADS_PER_GROUP, str(MAX_HEADS_PER_GROUP))
    D = validation.count("D", D, 1 << 16, str(1 << 16))
    validation.dtype_of("dtype", dtype, validation.KERNEL_DTYPES)
    validation.dtype_of("index_dtype", index_dtype, validation.INDEX_DTYPES)
    width = validation.value_width(d_v, D)
    wished = config_table.decode(validation.encoded_config(config))
    name = _checked_name(backend)
    validation.flag("backward", backward)
    where = _default_device() if device is None else validation.place(device)
    env.require_device(where)
    flavours = tuple(causal) if isinstance(causal, (list, tuple)) else (causal,)
    if not flavours:
        raise ArgumentValueError("causal", "must be a bool or a sequence with at least one", repr(causal))
    choices: list[dispatch.Choice] = []
    for flavour in flavours:
        validation.flag("causal", flavour)
        problem = Problem(1, 1, 1, heads, 1, 1, D, width, dtype, index_dtype, flavour)
        choices.append(dispatch.warmup(problem, where.type, env.capability(where), name, wished, backward))
    return choices
