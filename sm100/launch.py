"""The backend's entry points: what runs on SM100, and the launches of one forward and one backward.

Tensors arrive checked and in batched form: `q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import env
from ..config import SparseAttentionConfig
from ..errors import UnsupportedError
from ..problem import Problem
from . import preprocess, unions
from .backward_plan import CHUNK, KV_STAGES, BackwardPlan
from .heads import ROWS_PER_CTA, Rows, rows_for
from .plan import BLOCK_K, D_V, LOG2_E, SLOTS, SMEM_LIMIT, THREADS, Plan

if TYPE_CHECKING:
    from types import ModuleType

# Releases that the tests ran with; others are refused by name.
DSL_PACKAGE, DSL_VERSIONS = "nvidia-cutlass-dsl", ("4.8.1",)
TOKENS_PER_TILE = (1, 2, 8)
# Below this the scaled scores of a zero scale would be 0 * -inf for invalid slots.
SMALLEST_SCALE = 1e-30
ROW_LIMIT = 2**31 - 1  # a tensor map's coordinate
DEFAULT_MULTIPROCESSORS = 148
# What runs a compiled kernel: called with it, its arguments, and the tensors that it touches by name.
Executor = Callable[[Callable[..., Any], tuple, dict[str, Tensor]], None]


def run_on_device(kernel: Callable[..., Any], arguments: tuple, tensors: dict[str, Tensor]) -> None:
    """Launch on the current stream of the tensors' device."""
    kernel(*arguments, torch.cuda.current_stream(tensors["q"].device).cuda_stream)


executor: Executor = run_on_device


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors that persistent tiles are spread over."""
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _architecture(device: torch.device | None) -> str:
    if device is None or device.type != "cuda":
        return "sm_100a"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def _rows(problem: Problem, config: SparseAttentionConfig) -> Rows:
    tokens = config.tokens_per_tile or 1
    if tokens not in TOKENS_PER_TILE:
        raise UnsupportedError(f"the sm100 kernels take tokens_per_tile in {TOKENS_PER_TILE}, not {tokens}")
    rows = rows_for(problem.heads_per_group, tokens)
    if rows is None:
        most = next(t for t in reversed(TOKENS_PER_TILE) if rows_for(problem.heads_per_group, t))
        raise UnsupportedError(
            f"tokens_per_tile = {tokens} with {problem.heads_per_group} heads per group needs more than the "
            f"{2 * ROWS_PER_CTA} rows of a tile; {most} fits"
        )
    return rows


def plan_of(problem: Problem, config: SparseAttentionConfig, device: torch.device | None = None) -> Plan:
    """The compile-time part of a problem."""
    rows = _rows(problem, config)
    # A grouped call reads its union lists, which are int32.
    index_dtype = problem.index_dtype if rows.tokens == 1 else torch.int32
    names = (str(dtype).split(".")[1] for dtype in (problem.dtype, index_dtype))
    return Plan(problem.D, *names, rows, _architecture(device))


def backward_plan_of(
    problem: Problem, config: SparseAttentionConfig, device: torch.device | None = None
) -> BackwardPlan:
    """The same for the backward."""
    plan = plan_of(problem, config, device)
    return BackwardPlan(plan.D, plan.dtype, plan.index_dtype, plan.rows, plan.arch)


def smem_bytes(problem: Problem, config: SparseAttentionConfig) -> dict[str, int]:
    """Shared memory of the two main kernels, in bytes."""
    plans = {"forward": plan_of(problem, config), "backward": backward_plan_of(problem, config)}
    return {name: plan.smem_bytes for name, plan in plans.items()}


def check(problem: Problem, config: SparseAttentionConfig) -> None:
    """Refuse what these kernels cannot run, before anything is compiled."""
    _check_dsl()
    forward, backward = plan_of(problem, config), backward_plan_of(problem, config)
    built = {
        "fwd_threads": THREADS, "fwd_stages": SLOTS, "fwd_block_k": BLOCK_K,
        "bwd_threads": THREADS, "bwd_stages": KV_STAGES, "bwd_block_k": BLOCK_K, "bwd_split_store": D_V // CHUNK,
    }  # fmt: skip
    for name, value in built.items():
        wished = getattr(config, name)
        if wished not in (None, value):
            plan = backward if name.startswith("bwd") else forward
            sums = " + ".join(f"{area.size} ({use})" for use, area in plan.smem.items())
            raise UnsupportedError(
                f"the sm100 kernels are built with {name} = {value}, not {wished} "
                f"(shared memory of {SMEM_LIMIT} bytes: {sums})"
            )


@functools.cache
def _check_dsl() -> None:
    env.require_release("sm100", DSL_PACKAGE, DSL_VERSIONS, "blackwell")


def _build() -> ModuleType:
    _check_dsl()
    from . import build

    return build


def warmup(problem: Problem, config: SparseAttentionConfig, backward: bool) -> None:
    """Compile the kernels of such a problem."""
    device = torch.device("cuda") if torch.cuda.is_available() else None
    for plan_for in (plan_of, *((backward_plan_of,) if backward else ())):
        _build().kernel(plan_for(problem, config, device))


@functools.cache
def _scalar(device: torch.device, value: float, dtype: torch.dtype) -> Tensor:
    # Stands in for an optional tensor: read with stride 0, or by nobody.
    return torch.full((1,), value, dtype=dtype, device=device)


def _stride(tensor: Tensor, axis: int, other: int) -> int:
    # The stride of an axis of one element means nothing, and a tensor map takes no zero.
    return tensor.stride(axis) if tensor.shape[axis] > 1 else other


def _kv_rows(kv: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """`kv [B, S_kv, G, D]` as rows of one stride: that stride, their number, and rows per step of B, S_kv and G."""
    steps = {axis: kv.stride(axis) for axis in range(3) if kv.shape[axis] > 1}
    unit = min(steps.values(), default=kv.shape[-1])
    rows = 1 + sum((kv.shape[axis] - 1) * step // unit for axis, step in steps.items())
    if rows > ROW_LIMIT:
        raise UnsupportedError(f"kv spans {rows} rows; the sm100 kernels take up to {ROW_LIMIT}")
    return unit, rows, tuple(steps.get(axis, 0) // unit for axis in range(3))


def _valid(problem: Problem, indices: Tensor, lengths: Tensor | None, positions: Tensor | None) -> Tensor:
    """Which slots of `indices` count: the contract's rule, for union lists."""
    valid = (indices >= 0) & (indices < problem.S_kv)
    if lengths is not None:
        valid &= torch.arange(problem.K, device=indices.device) < lengths[:, :, None, None]
    if problem.causal:
        if positions is None:
            positions = torch.arange(problem.S, device=indices.device).expand(problem.B, -1) + problem.S_kv - problem.S
        valid &= indices <= positions[:, :, None, None]
    return valid


def make_lists(
    problem: Problem, tokens: int, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None,
    decide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(rows, bits, lengths)` of the union lists, as `unions.py` has them, and `chosen [1]`, 1: nothing is decided."""
    lists = unions.build(indices, _valid(problem, indices, topk_length, q_positions), tokens)
    return *lists, torch.ones(1, dtype=torch.int32, device=indices.device)


def group_size(problem: Problem) -> int:
    """Tokens of a tile that are tried where the config does not say."""
    return 1


class _Call(NamedTuple):
    """What both kernels are told about one call, in the order of their arguments."""

    tensors: dict[str, Tensor]  # kv, indices, bits, lengths, positions
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # kv_row to p_s
    tiles: int


def _call(
    problem: Problem, rows: Rows, kv: Tensor, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None,
    lists: tuple[Tensor, ...] | None,
) -> _Call:  # fmt: skip
    B, S, device = problem.B, problem.S, kv.device
    causal, slots = problem.causal, problem.K
    bits = _scalar(device, 0, torch.int32)
    lengths = None if topk_length is None else topk_length[:, :, None].expand(B, S, problem.G)
    if rows.tokens > 1:
        indices, bits, lengths, *_ = lists or make_lists(problem, rows.tokens, indices, topk_length, q_positions)
        causal, slots, q_positions = False, indices.shape[-1], None
    positions = None if q_positions is None else q_positions.to(torch.int64)
    tensors = {
        "kv": kv,
        "indices": indices,
        "bits": bits,
        "lengths": _scalar(device, 0, torch.int32) if lengths is None else lengths,
        "positions": _scalar(device, 0, torch.int64) if positions is None else positions,
    }
    unit, kv_rows, (row_b, row_s, row_g) = _kv_rows(kv)
    tiles = -(-S // rows.tokens)
    sizes = (
        B, S, problem.S_kv, problem.G, slots, problem.heads_per_group, tiles, kv_rows, row_b, row_s, row_g,
        int(causal), int(lengths is not None), int(positions is not None),
    )  # fmt: skip
    strides = (
        unit, *indices.stride(),
        *((0, 0, 0) if lengths is None else lengths.stride()),
        *((0, 0) if positions is None else positions.stride()),
    )  # fmt: skip
    return _Call(tensors, sizes, strides, B * tiles * problem.G)


def _launch(
    kernel: Callable[..., Any], call: _Call, rows: Rows, tensors: dict[str, Tensor], strides: tuple, scales: tuple
) -> None:
    """`tensors` and `strides` in the kernel's order."""
    pointers = tuple(t.data_ptr() for t in tensors.values())
    tiles = min(call.tiles, max(1, multiprocessors(tensors["q"].device) // rows.ctas))
    executor(kernel, (pointers, call.sizes, strides, *scales, tiles * rows.ctas), tensors)


def _row_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(_stride(tensor, axis, tensor.shape[-1]) for axis in range(3))


def fwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float,
    topk_length: Tensor | None, q_positions: Tensor | None, attn_sink: Tensor | None,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, S, H, 512], lse [B, S, H])`, one launch."""
    B, S, H, device = problem.B, problem.S, problem.H, q.device
    plan = plan_of(problem, config, device)
    kernel = _build().kernel(plan)
    out = torch.empty((B, S, H, problem.d_v), dtype=q.dtype, device=device)
    lse = torch.empty((B, S, H), dtype=torch.float32, device=device)
    call = _call(problem, plan.rows, kv, indices, topk_length, q_positions, lists)
    # A sink of -inf is no sink.
    sink = _scalar(device, float("-inf"), torch.float32) if attn_sink is None else attn_sink
    tensors = {"q": q, **call.tensors, "sink": sink, "out": out, "lse": lse}
    strides = (*_row_strides(q), *call.strides, 0 if attn_sink is None else attn_sink.stride(0))
    _launch(kernel, call, plan.rows, tensors, strides, (max(float(sm_scale), SMALLEST_SCALE) * LOG2_E,))
    return out, lse


def bwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor,
    lse: Tensor, *, sm_scale: float, dlse: Tensor | None, topk_length: Tensor | None, q_positions: Tensor | None,
    attn_sink: Tensor | None, dkv: Tensor | None, dkv_dtype: torch.dtype | None, deterministic: bool,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dkv, d_sink)`: per-row values in torch, the main kernel, and the rounding of dkv unless fp32 is wanted.

    Workspace: fp32 dkv (4 bytes per element of kv), 16 bytes per (token, head), and `preprocess.WORKSPACE`.
    """
    if deterministic:
        raise UnsupportedError(
            "the sm100 backward adds dkv in no fixed order: deterministic=True is not supported; "
            "backend='reference' is deterministic"
        )
    B, S, H, device = problem.B, problem.S, problem.H, q.device
    plan = backward_plan_of(problem, config, device)
    kernel = _build().kernel(plan)
    stats = preprocess.row_stats(out, dout, lse, dlse, attn_sink)
    dq = torch.empty((B, S, H, problem.D), dtype=q.dtype, device=device)
    acc = torch.zeros(kv.shape, dtype=torch.float32, device=device) if dkv is None else dkv
    call = _call(problem, plan.rows, kv, indices, topk_length, q_positions, lists)
    tensors = {"q": q, **call.tensors, "dout": dout, "stats": stats, "dq": dq, "dkv": acc}
    strides = (*_row_strides(q), *call.strides, *_row_strides(dout))
    scales = (max(float(sm_scale), SMALLEST_SCALE) * LOG2_E, float(sm_scale))
    _launch(kernel, call, plan.rows, tensors, strides, scales)
    d_sink = None if attn_sink is None else -stats[3].sum(dim=(0, 1))
    if dkv is None and dkv_dtype in (None, kv.dtype):
        return dq, acc.to(kv.dtype), d_sink
    return dq, acc, d_sink
