"""Context parallelism on `torch.distributed`: every rank has its part of the tokens, kv is gathered from all of them.

`TokenSplit` says which tokens a rank has; `sparse_mla`, `fwd` and `bwd` are the calls of the package on a rank's part:

    split = parallel.TokenSplit(tokens=T, kind="zigzag", group=group)    # T tokens of all ranks together
    hidden = split.split(hidden)                                         # this rank's part, [split.count, ...]
    kv = parallel.gather_kv(project_kv(hidden), split)                   # starts; what follows runs meanwhile
    q, rows = project_q(hidden), select_rows(hidden)
    out = parallel.sparse_mla(q, kv, rows, split=split, causal=True)     # waits

`indices` are rows of the whole kv, in the order of the tokens, whatever the split; build them for the rank's tokens
with `q_positions=split.positions()`. Tokens are independent of each other, so with `tokens_per_tile=1` a rank's `out`
is that of the one-process call bit for bit. A sparse row may need any row of kv, and partial results merged by their
lse would be rounded twice; so the gather overlaps with the work between `gather_kv` and the call, not with the call
itself. The backward gathers kv again instead of keeping it (memory stays O(part)), sums dkv over the ranks in fp32 by
a reduce-scatter, and lets it run while autograd works on what was computed between `gather_kv` and the call.

Every call is collective: each rank of the group makes it, in the same order, one whose part is empty too, and runs its
backward. Gradients of replicated tensors (`attn_sink`, like any parameter) are the rank's part of the sum.

Sources: all-gathered KV with zig-zag parts as in Llama 3's training; gradients scattered as in FSDP and Megatron-LM.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# A custom op imports this at its first call. Once there is a process group, its functions' default arguments would hold
# it for good: destroy_process_group would leave gloo's threads running, and one that frees a tensor while the
# interpreter goes down aborts the process.
import torch.distributed.nn.functional
from torch import Tensor

from . import api, dispatch, env, validation
from .autograd import first_order, readable_gradient
from .errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from .problem import KERNEL_DTYPES

SPLITS = ("contiguous", "zigzag", "round_robin")
# What gloo and NCCL both take.
_MOVED = (
    *KERNEL_DTYPES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool
)  # fmt: skip

# torch renamed both in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -- processes -----------------------------------------------------------------------------------------------------


# What torchrun sets.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """The group of torchrun's processes, or without torchrun of this one alone, for the time of a `with` block.

    A group that there is already is used, and left as it is.

    Args:
        device: any CUDA device, for NCCL, where each rank takes the GPU of its local rank; any other, for gloo.

    Yields: the rank's device.

    Raises: ValueError if this machine has no GPU for the rank; UnsupportedError if some of torchrun's variables are
    missing.
    """
    device, own = validation.place(device), not dist.is_initialized()
    if device.type == "cuda":
        if own:
            local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            env.require_device(local)
            torch.cuda.set_device(local)
        device = torch.device("cuda", torch.cuda.current_device())
    if own:
        backend = "nccl" if device.type == "cuda" else "gloo"
        missing = [name for name in _LAUNCHED if name not in os.environ]
        if missing[:2] == list(_LAUNCHED[:2]):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        elif missing:
            raise UnsupportedError(f"run under torchrun, or without RANK and WORLD_SIZE: {missing[0]} is not set")
        else:
            dist.init_process_group(backend)
    try:
        yield device
        if own:
            dist.barrier()  # a rank that leaves early breaks the others' connections
    finally:
        if own:
            dist.destroy_process_group()


# -- which tokens a rank has ---------------------------------------------------------------------------------------


def _part_ranges(tokens: int, kind: str, ranks: int, rank: int) -> list[range]:
    """The tokens of one rank in their order."""
    if kind == "round_robin":
        return [range(min(rank, tokens), tokens, ranks)]
    blocks, own = (ranks, (rank,)) if kind == "contiguous" else (2 * ranks, (rank, 2 * ranks - 1 - rank))
    size, longer = divmod(tokens, blocks)
    # The first blocks take the tokens that are left over.
    return [range(b * size + min(b, longer), (b + 1) * size + min(b + 1, longer)) for b in own]


@dataclass(frozen=True)
class TokenSplit:
    """How the tokens of a batch entry, or of packed documents, are divided among the ranks of a process group.

    Args:
        tokens: of all ranks together, `>= 0`; any number (parts then differ by a token or two, and may be empty).
        kind: `"contiguous"` blocks; `"zigzag"`, where rank r of R has blocks r and 2R-1-r of 2R, which evens out causal
            work (rows near the start have fewer slots); `"round_robin"`, where it has tokens r, r+R, r+2R, ...
        group: of `torch.distributed`; `None` is the default group.

    Raises: TypeError, ValueError; `UnsupportedError` without an initialised process group.
    """

    tokens: int
    kind: str = "zigzag"
    group: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", validation.at_least("tokens", self.tokens, 0))
        if not isinstance(self.kind, str) or self.kind not in SPLITS:
            raise ArgumentValueError("kind", f"must be one of {', '.join(SPLITS)}", repr(self.kind))
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError("no process group: call torch.distributed.init_process_group first")
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise ArgumentTypeError("group", "must be a process group that holds this rank", repr(self.group))
        if self.group is dist.group.WORLD:
            # One name for the default group: splits are compared.
            object.__setattr__(self, "group", None)

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """Tokens of this rank."""
        return self._count(self.rank)

    def _count(self, rank: int) -> int:
        return sum(map(len, _part_ranges(self.tokens, self.kind, self.ranks, rank)))

    @property
    def _longest(self) -> int:
        return max(self._count(rank) for rank in range(self.ranks))

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Numbers of this rank's tokens among all, `[count]` int64, rising: `q_positions` of a causal call."""
        device = None if device is None else validation.place(device)
        ranges = _part_ranges(self.tokens, self.kind, self.ranks, self.rank)
        return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])

    def split(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of `x`, whose axis `dim` holds all tokens; differentiable, a copy, no communication."""
        self._check("x", x, dim, self.tokens, "the tokens of all ranks")
        return x.index_select(dim, self.positions(x.device))

    def unsplit(self, x: Tensor, dim: int = 0) -> Tensor:
        """All ranks' parts of `x` along `dim`, in the order of the tokens, on every rank. Not differentiable."""
        self._check("x", x, dim, self.count, f"the tokens of rank {self.rank} of {self.ranks}")
        validation.dtype_of("x", x.dtype, _MOVED)
        with torch.no_grad():
            return _Gather(x, dim, self).wait()

    def _slots(self, device: torch.device) -> Tensor | None:
        """Where each token stands among the gathered parts, each padded to the longest: `[tokens]`; `None` if in order.

        Computed on the device: a copy from the host would synchronise.
        """
        ranks, longest = self.ranks, self._longest
        if ranks == 1 or (self.kind == "contiguous" and self.tokens == ranks * longest):
            return None
        token = torch.arange(self.tokens, device=device)
        if self.kind == "round_robin":
            return token % ranks * longest + token // ranks
        blocks = ranks if self.kind == "contiguous" else 2 * ranks
        size, longer = divmod(self.tokens, blocks)
        # The first blocks have a token more.
        rest = token - longer * (size + 1)
        block = torch.where(rest < 0, token // (size + 1), longer + rest // max(size, 1))
        inside = token - block * size - block.clamp(max=longer)
        if self.kind == "contiguous":
            return block * longest + inside
        owner = torch.minimum(block, blocks - 1 - block)
        return owner * longest + inside + torch.where(block == owner, 0, size + (owner < longer))

    def _check(self, name: str, x: Tensor, dim: int, expected: int, whose: str) -> None:
        validation.tensors((), **{name: x})
        validation.integer("dim", dim)
        if not -x.dim() <= dim < x.dim():
            raise ArgumentValueError("dim", f"must be an axis of {name}, whose shape is {list(x.shape)}", dim)
        if x.shape[dim] != expected:
            rule = f"axis {dim} must have {expected} entries, {whose} ({self.kind} split of {self.tokens})"
            raise ArgumentValueError(name, rule, list(x.shape))


# -- the two collectives -------------------------------------------------------------------------------------------


class _Gather:
    """A running all-gather of the ranks' parts of `x` along `dim`."""

    def __init__(self, x: Tensor, dim: int, split: TokenSplit) -> None:
        self._dim, self._split = dim, split
        rows, longest = x.detach().movedim(dim, 0), split._longest
        # Collectives take parts of one size.
        part = rows.new_zeros((longest, *rows.shape[1:])) if len(rows) < longest else rows.contiguous()
        if part.shape != rows.shape:
            part[: len(rows)] = rows
        self._result = rows.new_empty((split.ranks * longest, *rows.shape[1:]))
        # Held until the end of the transfer.
        self._part: Tensor | None = part
        self._work = _all_gather(self._result, part, group=split.group, async_op=True) if part.numel() else None
        self._done = False

    def wait(self) -> Tensor:
        """The whole, in the order of the tokens."""
        if not self._done:
            if self._work is not None:
                self._work.wait()
            split, rows = self._split, self._result
            slots = split._slots(rows.device)
            rows = rows if slots is None else rows.index_select(0, slots)
            self._result, self._part, self._work, self._done = rows.movedim(0, self._dim), None, None, True
        return self._result


class _ReduceScatter:
    """A running sum over the ranks of `x`, which holds all tokens along `dim`; every rank gets its part."""

    def __init__(self, x: Tensor, dim: int, split: TokenSplit) -> None:
        self._dim, self._split = dim, split
        rows, longest = x.movedim(dim, 0), split._longest
        slots = split._slots(x.device)
        if slots is not None:
            rows = rows.new_zeros((split.ranks * longest, *rows.shape[1:])).index_copy_(0, slots, rows)
        self._rows = rows.contiguous()
        self._result = rows.new_empty((longest, *rows.shape[1:]))
        self._work = (
            _reduce_scatter(self._result, self._rows, group=split.group, async_op=True) if rows.numel() else None
        )

    def wait(self, dtype: torch.dtype) -> Tensor:
        """This rank's part of the sum."""
        if self._work is not None:
            self._work.wait()
        part = self._result[: self._split.count].movedim(0, self._dim).to(dtype)
        return part.clone(memory_format=torch.contiguous_format) if part._is_view() else part


def _is_split(split: Any) -> None:
    if not isinstance(split, TokenSplit):
        raise ArgumentTypeError("split", "must be a TokenSplit", type(split).__name__)


class GatheredKV:
    """The kv of all ranks on its way; `sparse_mla`, `fwd` and `bwd` take it in place of the rank's own `kv`."""

    def __init__(self, kv: Tensor, split: TokenSplit) -> None:
        _is_split(split)
        validation.tensors(kv=kv)
        validation.refuse_forward_mode(kv)
        validation.refuse_function_transforms(kv)
        validation.dtype_of("kv", kv.dtype, KERNEL_DTYPES)
        if kv.dim() not in (3, 4):
            raise ArgumentValueError("kv", "must be [B, S_kv, G, D] or [T_kv, G, D] of this rank", list(kv.shape))
        self.part, self.split, self.dim = kv, split, kv.dim() - 3
        split._check("kv", kv, self.dim, split.count, f"the tokens of rank {split.rank} of {split.ranks}")
        self._gather = _Gather(kv, self.dim, split)
        # Made here, so that autograd comes to it after all that is recorded before the call.
        self._way_back: tuple[Tensor, _Sum] | None = _way_back(kv)

    def wait(self) -> Tensor:
        """The whole kv in the order of the tokens, outside of autograd."""
        return self._gather.wait()

    def way_back(self) -> tuple[Tensor, _Sum]:
        """The graph's way back to the rank's kv, one for each call; see `_Sum`."""
        way, self._way_back = self._way_back or _way_back(self.part), None
        return way


def gather_kv(kv: Tensor, split: TokenSplit) -> GatheredKV:
    """Start to gather kv from all ranks; it runs until a call needs it.

    Args:
        kv: this rank's part, `[B, S_part, G, D]` or `[T_part, G, D]`; not to be changed before the call.
        split: how the tokens are divided.

    Returns: what the calls take as `kv`.

    Raises: TypeError, ValueError, as the calls of the package.
    """
    return GatheredKV(kv, split)


def scatter_sum(dkv: Tensor, split: TokenSplit) -> Tensor:
    """This rank's part of the sum of the ranks' `dkv`, each of the whole kv: `[B, S_kv, G, D]` or `[T_kv, G, D]`.

    Not differentiable: the result has no graph, as that of `bwd` and of `unsplit`.
    What `bwd` does with the kernels' fp32 dkv; for callers of `cute_sparse_mla.bwd` with a buffer of their own. `split`
    says how the tokens are divided; the result is `[B, S_part, G, D]` or `[T_part, G, D]`, in dkv's dtype.

    Raises: TypeError, ValueError, as the calls of the package.
    """
    _is_split(split)
    validation.tensors(dkv=dkv)
    validation.dtype_of("dkv", dkv.dtype, (*KERNEL_DTYPES, torch.float32, torch.float64))
    if dkv.dim() not in (3, 4):
        raise ArgumentValueError("dkv", "must be [B, S_kv, G, D] or [T_kv, G, D] of all ranks", list(dkv.shape))
    split._check("dkv", dkv, dkv.dim() - 3, split.tokens, "the tokens of all ranks")
    with torch.no_grad():
        return _ReduceScatter(dkv, dkv.dim() - 3, split).wait(dkv.dtype)


# -- calls ---------------------------------------------------------------------------------------------------------


def _gathered(kv: Tensor | GatheredKV, split: TokenSplit) -> GatheredKV:
    if not isinstance(kv, GatheredKV):
        return GatheredKV(kv, split)
    if kv.split != split:
        raise ArgumentValueError("split", f"must be that of gather_kv, {kv.split}", split)
    return kv


# The keywords that the calls here hand on.
_FORWARD, _BACKWARD = (frozenset(inspect.signature(call).parameters) for call in (api.fwd, api.bwd))


def _with_positions(
    q: Tensor, split: TokenSplit, options: dict[str, Any], known: frozenset[str] = _FORWARD
) -> dict[str, Any]:
    """The options with the tokens' own numbers as causal bounds, unless the caller gives others."""
    for name, value in options.items():
        # Said before the other ranks wait for this one in a collective.
        if name not in known:
            raise ArgumentTypeError(name, "is no argument of this call", type(value).__name__)
    _is_split(split)
    validation.tensors(q=q)
    if options.get("q_positions") is not None or not options.get("causal"):
        return options
    if q.dim() not in (3, 4):
        raise ArgumentValueError("q", "must be [B, S, H, D] or [T, H, D]", list(q.shape))
    split._check("q", q, q.dim() - 3, split.count, f"the tokens of rank {split.rank}; else give q_positions")
    return options | dict(q_positions=split.positions(q.device).expand(q.shape[:-2]))


def fwd(
    q: Tensor, kv: Tensor | GatheredKV, indices: Tensor, *, split: TokenSplit, **options: Any
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of this rank's queries over the kv of all ranks. Not differentiable; `sparse_mla` is.

    Args:
        q, indices: this rank's queries and their rows of the whole kv, otherwise as in `cute_sparse_mla.fwd`. Their
            tokens may differ from kv's (compressed kv) where `q_positions` says how, or without `causal`.
        kv: this rank's part, or what `gather_kv` made of it.
        split: of kv's tokens.
        options: as in `cute_sparse_mla.fwd`. With `causal=True`, `q_positions` is `split.positions()` by default.

    Raises: as `cute_sparse_mla.fwd`, on a rank of its own where only its arguments are wrong.
    """
    options = _with_positions(q, split, options)
    return api.fwd(q, _gathered(kv, split).wait(), indices, **options)


def _bwd(q: Tensor, kv: GatheredKV, *rest: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(dq, dkv, d_sink)` of this rank's queries; dkv is that of the whole kv, fp32."""
    return api.bwd(q, kv.wait(), *rest, dkv_dtype=torch.float32, **options)  # type: ignore[misc]


def bwd(
    q: Tensor, kv: Tensor | GatheredKV, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, *, split: TokenSplit,
    dkv_dtype: torch.dtype | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dkv, d_sink)` for `out, lse = fwd(q, kv, indices, split=split, ...)` with the same keywords.

    Args:
        q, kv, out, dout, indices, lse: this rank's.
        dkv_dtype: of the result, kv's (default) or `torch.float32`; the sums over the ranks are fp32 always.
        options: as in `cute_sparse_mla.bwd`, but for `dkv`.

    Returns: `dq` of this rank's queries, `dkv` of this rank's part with the terms of all ranks' queries, and `d_sink`,
    the terms of this rank's queries only.

    Raises: as `cute_sparse_mla.bwd`.
    """
    if "dkv" in options:
        raise ArgumentTypeError("dkv", "is not taken here: add the result", type(options["dkv"]).__name__)
    options = _with_positions(q, split, options, _BACKWARD)
    gathered = _gathered(kv, split)
    own = gathered.part.dtype
    if dkv_dtype is not None:
        validation.dtype_of("dkv_dtype", dkv_dtype, (own, torch.float32))
    dq, dkv, d_sink = _bwd(q, gathered, out, dout, indices, lse, **options)
    return dq, _ReduceScatter(dkv, gathered.dim, split).wait(dkv_dtype or own), d_sink


def sparse_mla(
    q: Tensor, kv: Tensor | GatheredKV, indices: Tensor, *, split: TokenSplit, return_lse: bool = False,
    attn_sink: Tensor | None = None, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Differentiable: `out`, or `(out, lse)` with `return_lse=True`. Arguments as in `fwd`.

    Gradients flow to `q`, `kv` (the rank's part, with the terms of all ranks' queries) and `attn_sink` (the rank's
    part of the sum). Saved for the backward: the inputs, `out` and `lse`, not the gathered kv. The gradient of `out`
    is made contiguous when autograd hands over an expanded or unaligned one.
    """
    validation.flag("return_lse", return_lse)
    validation.tensors(("attn_sink",), q=q, attn_sink=attn_sink)
    validation.refuse_forward_mode(q, attn_sink)
    validation.refuse_function_transforms(q, attn_sink)
    options = _with_positions(q, split, options)
    gathered = _gathered(kv, split)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, gathered.part, attn_sink)):
        dispatch.require_backward(options.get("backend") or "")
    anchor, dkv = gathered.way_back()
    tensors = (indices, options.pop("q_positions", None), options.pop("topk_length", None))
    out, lse = _Attention.apply(q, anchor, attn_sink, *tensors, gathered, dkv, options)
    return (out, lse) if return_lse else out


# -- autograd ------------------------------------------------------------------------------------------------------


class _Sum:
    """Carries a dkv whose sum over the ranks is still running from the attention's backward to that of the gather.

    An anchor, a scalar whose value and gradient mean nothing, ties the two together in the graph.
    """

    def __init__(self) -> None:
        self.running: _ReduceScatter | None = None


def _way_back(kv: Tensor) -> tuple[Tensor, _Sum]:
    dkv = _Sum()
    return _Anchor.apply(kv, dkv), dkv


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, dkv: _Sum) -> Tensor:
        ctx.dkv, ctx.dtype = dkv, kv.dtype
        return kv.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, anchored: Tensor) -> tuple[Tensor, None]:
        running, ctx.dkv.running = ctx.dkv.running, None
        return first_order(running.wait(ctx.dtype), anchored), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, anchor: Tensor, attn_sink: Tensor | None, indices: Tensor, q_positions: Tensor | None,
        topk_length: Tensor | None, kv: GatheredKV, dkv: _Sum, options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = api.fwd(
            q, kv.wait(), indices, q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink, **options
        )
        # Detached, kv still tells when it was changed in place.
        ctx.save_for_backward(q, kv.part.detach(), indices, q_positions, topk_length, attn_sink, out, lse, anchor)
        ctx.split, ctx.dkv = kv.split, dkv
        ctx.options = {name: value for name, value in options.items() if name != "d_v"}
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        q, kv, indices, q_positions, topk_length, attn_sink, out, lse, anchor = ctx.saved_tensors
        with torch.no_grad():
            gathered = GatheredKV(kv, ctx.split)
            dq, dkv, d_sink = _bwd(
                q, gathered, out, readable_gradient(dout, out, ctx.options.get("backend")), indices, lse, dlse=dlse,
                q_positions=q_positions, topk_length=topk_length, attn_sink=attn_sink,
                deterministic=torch.are_deterministic_algorithms_enabled(), **ctx.options,
            )  # fmt: skip
            if ctx.needs_input_grad[1]:
                ctx.dkv.running = _ReduceScatter(dkv, gathered.dim, ctx.split)
        sources = (q, anchor, attn_sink, dout, dlse)
        dq, anchored = first_order(dq, *sources), first_order(lse.new_zeros(()), *sources)
        return dq, anchored, None if d_sink is None else first_order(d_sink, *sources), *[None] * 6
