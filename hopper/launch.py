"""The backend's entry points: what runs on SM90, and the launches of one forward and one backward.

Tensors arrive checked and in batched form: `q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import env
from ..config import SparseAttentionConfig
from ..errors import UnsupportedError
from ..problem import Problem
from .plan import (
    BLOCK_K,
    CHUNK,
    HALF,
    L2_BYTES,
    LOG2_E,
    ROWS,
    SMEM_LIMIT,
    THREADS,
    TOKENS_PER_TILE,
    UNION_SIZES,
    Plan,
    UnionPlan,
)  # fmt: skip

if TYPE_CHECKING:
    from types import ModuleType

# Versions that the tests ran with; others are refused by name.
TILELANG_VERSIONS = ("0.1.15",)
# Below this the scaled scores of a zero scale would be 0 * -inf for invalid slots.
SMALLEST_SCALE = 1e-30
# What these kernels are built for; a config may only repeat it.
BUILT_FOR = {
    "fwd_threads": THREADS,
    "fwd_stages": 2,
    "fwd_block_k": BLOCK_K,
    "bwd_threads": THREADS,
    "bwd_stages": 1,
    "bwd_block_k": BLOCK_K,
    "bwd_split_store": HALF // CHUNK,
}


def plan_of(problem: Problem, tokens: int = 1, lists: bool = False) -> Plan:
    """The compile-time part of a problem whose kernel reads the indices or, with `lists`, int32 lists of them."""
    index_dtype = torch.int32 if lists else problem.index_dtype
    return Plan(problem.D, _name(problem.dtype), _name(index_dtype), tokens)


def sorts_rows(problem: Problem) -> bool:
    """Whether the backward takes each token's rows in rising order: CTAs then add to the same part of dkv at a time."""
    return problem.S_kv * problem.G * problem.D * 4 > L2_BYTES


def union_plan_of(problem: Problem, tokens: int) -> UnionPlan:
    """The same for the kernel that makes union lists."""
    plans = [UnionPlan(tokens, _name(problem.index_dtype), size) for size in UNION_SIZES]
    return next((plan for plan in plans if problem.S_kv <= plan.span), plans[-1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]


def smem_bytes(problem: Problem, config: SparseAttentionConfig) -> dict[str, int]:
    """Shared memory of the two main kernels, in bytes."""
    plan = plan_of(problem)
    return {"forward": sum(plan.forward_smem.values()), "backward": sum(plan.backward_smem.values())}


def check(problem: Problem, config: SparseAttentionConfig) -> None:
    """Refuse what these kernels cannot run, before anything is compiled."""
    _check_tilelang()
    for name, built in BUILT_FOR.items():
        wished = getattr(config, name)
        if wished not in (None, built):
            raise UnsupportedError(
                f"the sm90 kernels are built with {name} = {built}, not {wished}{_why(name, wished, problem)}"
            )
    tokens, heads = config.tokens_per_tile or 1, problem.heads_per_group
    if tokens not in TOKENS_PER_TILE:
        raise UnsupportedError(f"the sm90 kernels take tokens_per_tile in {TOKENS_PER_TILE}, not {tokens}")
    if tokens > 1 and tokens * heads > ROWS:
        most = next(t for t in reversed(TOKENS_PER_TILE) if t == 1 or t * heads <= ROWS)
        raise UnsupportedError(
            f"tokens_per_tile = {tokens} with {heads} heads per group needs more than the {ROWS} rows of a tile; "
            f"{most} fits"
        )


def _why(name: str, wished: int, problem: Problem) -> str:
    plan = plan_of(problem)
    if name in ("fwd_stages", "fwd_block_k"):
        parts, grow = plan.forward_smem, f"kv 2 x [{BLOCK_K} x {plan.D}]"
    elif name in ("bwd_stages", "bwd_block_k"):
        parts, grow = plan.backward_smem, f"kv [{BLOCK_K} x {plan.D}]"
    else:
        return ""
    built = BUILT_FOR[name]
    needed = sum(parts.values()) - parts[grow] + parts[grow] * wished // built
    sums = " + ".join(f"{size} ({use})" for use, size in parts.items())
    return f" (shared memory: {sums}; {name} = {wished} would need {needed} of {SMEM_LIMIT} bytes)"


@functools.cache
def _check_tilelang() -> None:
    env.require_release("sm90", "tilelang", TILELANG_VERSIONS, "hopper")


def _build() -> ModuleType:
    _check_tilelang()
    from . import build

    return build


def warmup(problem: Problem, config: SparseAttentionConfig, backward: bool) -> None:
    """Compile the kernels of such a problem."""
    tokens, build = config.tokens_per_tile or 1, _build()
    build.kernel("forward", plan_of(problem, tokens, tokens > 1))
    if backward:
        for kind in ("preprocess", "postprocess"):
            build.kernel(kind, plan_of(problem))
        # Single tokens: from the indices, and from lists where dkv is large.
        for lists in (False, True) if tokens == 1 else (True,):
            build.kernel("backward", plan_of(problem, tokens, lists))
    for size in UNION_SIZES if tokens > 1 or backward else ():
        build.kernel("unions", UnionPlan(tokens, _name(problem.index_dtype), size))


@functools.cache
def _scalar(device: torch.device, value: float, dtype: torch.dtype) -> Tensor:
    # Stands in for an optional tensor: expanded with stride 0, read by nobody or as a neutral value.
    return torch.full((1,), value, dtype=dtype, device=device)


def _slots(
    problem: Problem, q_positions: Tensor | None, topk_length: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Lengths and positions, or stand-ins, and the flags `(causal, has_length, has_positions)`."""
    shape = (problem.B, problem.S)
    flags = (int(problem.causal), int(topk_length is not None), int(q_positions is not None))
    lengths = _scalar(device, 0, torch.int32).expand(shape) if topk_length is None else topk_length
    positions = _scalar(device, 0, torch.int64).expand(shape) if q_positions is None else q_positions.to(torch.int64)
    return lengths, positions, flags


def _sink(problem: Problem, attn_sink: Tensor | None, device: torch.device) -> Tensor:
    # A sink of -inf is no sink.
    return _scalar(device, float("-inf"), torch.float32).expand(problem.H) if attn_sink is None else attn_sink


def _tiles(problem: Problem) -> int:
    return -(-problem.heads_per_group // ROWS)


def make_lists(
    problem: Problem, tokens: int, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(rows, bits, lengths)` of the union lists, as `unions.py` has them."""
    B, S, G, K = indices.shape
    L, device = -(-S // tokens), indices.device
    lengths, positions, flags = _slots(problem, q_positions, topk_length, device)
    rows = torch.empty((B, L, G, tokens * K), dtype=torch.int32, device=device)
    # Lists of single tokens have no bits.
    bits = torch.empty_like(rows) if tokens > 1 else _scalar(device, 0, torch.int32).expand(rows.shape)
    counts = torch.empty((B, L, G), dtype=torch.int32, device=device)
    _build().kernel("unions", union_plan_of(problem, tokens))(
        indices, lengths, positions, rows, bits, counts, problem.S_kv, *flags
    )
    return rows, bits, counts


class Gather(NamedTuple):
    """What a kernel gathers, in the order of its arguments.

    `slots`, `bits [B, L, G, C]`: rows of kv, and for tiles of several tokens who selected them; `lengths [B, L, G]`;
    `positions [B, S]`; the flags `(causal, has_length, has_positions)`.
    """

    slots: Tensor
    bits: Tensor
    lengths: Tensor
    positions: Tensor
    flags: tuple[int, int, int]


def _gather(
    problem: Problem, tokens: int, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None,
    lists: tuple[Tensor, ...] | None, in_order: bool = False,
) -> Gather:  # fmt: skip
    """From a plan's lists, or else from the indices; `in_order` wants lists for single tokens too."""
    lengths, positions, flags = _slots(problem, q_positions, topk_length, indices.device)
    if tokens > 1 or in_order:
        rows, bits, counts = lists or make_lists(problem, tokens, indices, topk_length, q_positions)
        return Gather(rows, bits, counts, positions, (0, 1, 0))
    nobody = _scalar(indices.device, 0, torch.int32).expand(indices.shape)
    return Gather(indices, nobody, lengths[:, :, None].expand(indices.shape[:3]), positions, flags)


def fwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float,
    topk_length: Tensor | None, q_positions: Tensor | None, attn_sink: Tensor | None,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, S, H, 512], lse [B, S, H])`: one launch, after that of the union lists where no plan has them."""
    B, S, H, tokens = problem.B, problem.S, problem.H, config.tokens_per_tile or 1
    out = torch.empty((B, S, H, problem.d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, S, H), dtype=torch.float32, device=q.device)
    *gather, flags = _gather(problem, tokens, indices, topk_length, q_positions, lists)
    scale_log2 = max(float(sm_scale), SMALLEST_SCALE) * LOG2_E
    _build().kernel("forward", plan_of(problem, tokens, tokens > 1))(
        q, kv, *gather, _sink(problem, attn_sink, q.device), out, lse,
        scale_log2, problem.heads_per_group, _tiles(problem), *flags,
    )  # fmt: skip
    return out, lse


def bwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor,
    lse: Tensor, *, sm_scale: float, dlse: Tensor | None, topk_length: Tensor | None, q_positions: Tensor | None,
    attn_sink: Tensor | None, dkv: Tensor | None, dkv_dtype: torch.dtype | None, deterministic: bool,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dkv, d_sink)`: per-row values, the main kernel, and the rounding of dkv unless fp32 is wanted.

    Workspace: fp32 dkv (4 bytes per element of kv) and 16 bytes per (token, head).
    """
    if deterministic:
        raise UnsupportedError(
            "the sm90 backward adds dkv in no fixed order: deterministic=True is not supported; "
            "backend='reference' is deterministic"
        )
    B, S, H = problem.B, problem.S, problem.H
    tokens, build, device = config.tokens_per_tile or 1, _build(), q.device
    in_order = tokens == 1 and sorts_rows(problem)
    *gather, flags = _gather(problem, tokens, indices, topk_length, q_positions, lists, in_order)
    stats = torch.empty((4, B, S, H), dtype=torch.float32, device=device)
    if dlse is None:
        dlse = _scalar(device, 0.0, torch.float32).expand(B, S, H)
    build.kernel("preprocess", plan_of(problem))(out, dout, lse, dlse, _sink(problem, attn_sink, device), stats)
    dq = torch.empty((B, S, H, problem.D), dtype=q.dtype, device=device)
    acc = torch.zeros(kv.shape, dtype=torch.float32, device=device) if dkv is None else dkv
    scale_log2 = max(float(sm_scale), SMALLEST_SCALE) * LOG2_E
    build.kernel("backward", plan_of(problem, tokens, tokens > 1 or in_order))(
        q, kv, dout, *gather, stats, dq, acc,
        scale_log2, float(sm_scale), problem.heads_per_group, _tiles(problem), *flags,
    )  # fmt: skip
    d_sink = None if attn_sink is None else -stats[3].sum(dim=(0, 1))
    if dkv is None and dkv_dtype in (None, kv.dtype):
        rounded = torch.empty(kv.shape, dtype=kv.dtype, device=device)
        build.kernel("postprocess", plan_of(problem))(acc.view(-1), rounded.view(-1))
        return dq, rounded, d_sink
    return dq, acc, d_sink
