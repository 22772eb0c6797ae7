"""The backend's entry points: what runs on SM100, and the launches of one forward and one backward.

Tensors arrive checked and in batched form: `q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import env, union_lists
from ..config import SparseAttentionConfig
from ..errors import UnsupportedError
from ..problem import Problem
from ..scales import LOG2_E, gradient_unit, score_scale
from ..union_lists import (
    SAMPLES,
    TOKENS_PER_TILE,
    GroupCosts,
    UnionPlan,
    room_for_lengths,
    sample_plan_of,
    sample_step,
    union_plan_of,
    union_plans,
)  # fmt: skip
from .backward_plan import (
    CHUNK,
    KV_STAGES,
    ROWS_PER_WARP,
    STATS_WARPS,
    SUM_WARPS,
    BackwardPlan,
    RowPlan,
    SumPlan,
)  # fmt: skip
from .heads import ROWS_PER_CTA, Rows, rows_for
from .list_plan import ListPlan, SamplePlan
from .plan import BLOCK_K, D_V, SLOTS, SMEM_LIMIT, THREADS, Plan

if TYPE_CHECKING:
    from types import ModuleType

# Releases that the tests ran with; others are refused by name.
DSL_PACKAGE, DSL_VERSIONS = "nvidia-cutlass-dsl", ("4.8.1",)
SLOTS_AT = 4  # where a call's sizes have the slots of a tile
ROW_LIMIT = 2**31 - 1  # a tensor map's coordinate
# Bytes that a deterministic backward may hold beside fp32 dkv and per-row values: a part of the terms of dkv, and for
# each of its slots row numbers and their sorted order while torch sorts them.
WORKSPACE, SORT_BYTES = 240 * 2**20, 64
ROWS_AT_A_TIME = 2**18  # rows of dkv whose places among the sorted terms are found at a time, 16 bytes each
DEFAULT_MULTIPROCESSORS = 148
# The decision about token groups: predicted (bench/results/sm100_predicted_groups.jsonl), but for what lists cost for
# each row of kv, which is an H200's.
COSTS = GroupCosts(slot={1 << 31: 1.0}, lists=0.037, lists_per_row=0.03 / 131_072, exit=0.013)
# What runs a compiled kernel: called with it, its arguments, and the tensors that it touches by name.
Executor = Callable[[Callable[..., Any], tuple, dict[str, Tensor]], None]


def run_on_device(kernel: Callable[..., Any], arguments: tuple, tensors: dict[str, Tensor]) -> None:
    """Launch on the current stream of the tensors' device."""
    kernel(*arguments, torch.cuda.current_stream(next(iter(tensors.values())).device).cuda_stream)


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


def _tokens(problem: Problem, config: SparseAttentionConfig) -> int:
    """Tokens of a tile: as the config has it, else what is tried."""
    return config.tokens_per_tile or group_size(problem)


def _rows(problem: Problem, tokens: int) -> Rows:
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


def plan_of(problem: Problem, tokens: int, device: torch.device | None = None) -> Plan:
    """The compile-time part of a problem, for so many tokens a tile."""
    rows = _rows(problem, tokens)
    # A grouped call reads its union lists, which are int32.
    index_dtype = problem.index_dtype if rows.tokens == 1 else torch.int32
    names = (str(dtype).split(".")[1] for dtype in (problem.dtype, index_dtype))
    return Plan(problem.D, *names, rows, _architecture(device))


def backward_plan_of(
    problem: Problem, tokens: int, device: torch.device | None = None, ordered: bool = False
) -> BackwardPlan:
    """The same for the backward; `ordered`, for a deterministic one."""
    plan = plan_of(problem, tokens, device)
    return BackwardPlan(plan.D, plan.dtype, plan.index_dtype, plan.rows, plan.arch, ordered)


def smem_bytes(problem: Problem, config: SparseAttentionConfig) -> dict[str, int]:
    """Shared memory of the two main kernels, in bytes."""
    tokens = _tokens(problem, config)
    plans = {"forward": plan_of(problem, tokens), "backward": backward_plan_of(problem, tokens)}
    return {name: plan.smem_bytes for name, plan in plans.items()}


def check(problem: Problem, config: SparseAttentionConfig) -> None:
    """Refuse what these kernels cannot run, before anything is compiled."""
    _check_dsl()
    tokens = _tokens(problem, config)
    forward, backward = plan_of(problem, tokens), backward_plan_of(problem, tokens)
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
    if config.bwd_cluster == 2:
        raise UnsupportedError(
            "bwd_cluster = 2 is for the sm90 backward; above 64 rows a tile of the sm100 kernels always has two CTAs: "
            "leave it at None"
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
    arch = _architecture(device)
    plans: list[Plan | RowPlan | SumPlan | ListPlan] = []
    for tokens in {config.tokens_per_tile} if config.tokens_per_tile else {1, group_size(problem)}:
        plans.append(plan_of(problem, tokens, device))
        if tokens > 1:
            plans += [list_plan_of(plan, arch) for plan in union_plans(tokens, problem.index_dtype)]
            if config.tokens_per_tile is None:
                plans.append(list_plan_of(sample_plan_of(problem, tokens), arch, SamplePlan))
        if backward:
            plan = backward_plan_of(problem, tokens, device, torch.are_deterministic_algorithms_enabled())
            plans += [plan, RowPlan(plan.dtype, plan.arch)]
            if plan.ordered:
                plans.append(SumPlan(plan.D, plan.arch))
    for kernel in plans:
        _build().kernel(kernel)


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


def list_plan_of(plan: UnionPlan, arch: str, kind: type[ListPlan] = ListPlan) -> ListPlan:
    """The plan of a kernel of the union lists for one architecture."""
    return kind(plan.tokens, plan.index_dtype, plan.size, plan.width, plan.threads, arch)


def make_lists(
    problem: Problem, tokens: int, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None,
    decide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(rows, bits, lengths)` of the union lists, as `unions.py` has them, and `chosen [1]`: whether they were made.

    With `decide` the device looks at a sample of tiles, and makes no lists where they would not pay.
    """
    B, S, G, K = indices.shape
    device, tiles = indices.device, -(-S // tokens)
    shape, arch = (B, tiles, G), _architecture(device)
    rows, bits = (torch.empty((*shape, tokens * K), dtype=torch.int32, device=device) for _ in range(2))
    samples = min(SAMPLES, B * tiles * G)
    tensors = {
        "indices": indices,
        "lengths": _scalar(device, 0, torch.int32) if topk_length is None else topk_length,
        "positions": _scalar(device, 0, torch.int64) if q_positions is None else q_positions.to(torch.int64),
        "samples": torch.empty((samples, 2), dtype=torch.int32, device=device),
        "rows": rows,
        "bits": bits,
        "counts": room_for_lengths(shape, device),
        "chosen": torch.empty(1, dtype=torch.int32, device=device),
    }
    strides = (
        *indices.stride(),
        *((0, 0) if topk_length is None else topk_length.stride()),
        *((0, 0) if q_positions is None else tensors["positions"].stride()),
    )
    flags = (int(problem.causal), int(topk_length is not None), int(q_positions is not None))

    def launch(plan: ListPlan, ctas: int, sampled: int, per_mille: int, step: int) -> None:
        sizes = (B, S, problem.S_kv, G, K, tiles, sampled, per_mille, step, *flags)
        executor(_build().kernel(plan), (_pointers(tensors), sizes, strides, ctas), tensors)

    if decide:
        small = list_plan_of(sample_plan_of(problem, tokens), arch, SamplePlan)
        launch(small, samples, samples, 0, sample_step(problem, small))
    per_mille = COSTS.per_mille(problem, tokens, multiprocessors(device)) if decide else 0
    plan = list_plan_of(union_plan_of(problem, tokens), arch)
    launch(plan, B * tiles * G, samples if decide else 0, per_mille, 0)
    return rows, bits, tensors["counts"], tensors["chosen"]


def group_size(problem: Problem) -> int:
    """Tokens of a tile that are tried where the config does not say: as many as fill the rows of one CTA."""
    return union_lists.group_size(problem, ROWS_PER_CTA)


class _Gather(NamedTuple):
    """What a kernel gathers: the indices, or the lists of tiles of several tokens; it runs if `chosen [1]` is `wanted`.

    A negative `wanted`: always.
    """

    tokens: int
    lists: tuple[Tensor, ...] | None
    chosen: Tensor
    wanted: int


def _gathers(
    problem: Problem, config: SparseAttentionConfig, indices: Tensor, topk_length: Tensor | None,
    q_positions: Tensor | None, lists: tuple[Tensor, ...] | None, deterministic: bool = False,
) -> Iterator[_Gather]:  # fmt: skip
    """What runs: one kernel, or two of which the device chooses. A plan's lists are taken, others made.

    Where nobody asked for groups, a deterministic call has none.
    """
    tokens = _tokens(problem, config)
    decide = config.tokens_per_tile is None if lists is None else len(lists) == 4
    chosen = _scalar(indices.device, 1, torch.int32)
    if tokens == 1 or (decide and deterministic):
        yield _Gather(1, None, chosen, -1)
        return
    made = lists or make_lists(problem, tokens, indices, topk_length, q_positions, decide)
    if not decide:
        yield _Gather(tokens, made, chosen, -1)
        return
    yield _Gather(tokens, made, made[3], 1)
    yield _Gather(1, None, made[3], 0)


class _Call(NamedTuple):
    """What both kernels are told about one call, in the order of their arguments."""

    tensors: dict[str, Tensor]  # kv, indices, bits, lengths, positions, chosen
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # kv_row to p_s
    tiles: int
    causal: bool  # whether the kernel has to look at positions


def _call(
    problem: Problem, gather: _Gather, kv: Tensor, indices: Tensor, topk_length: Tensor | None,
    q_positions: Tensor | None,
) -> _Call:  # fmt: skip
    B, S, device = problem.B, problem.S, kv.device
    causal, slots = problem.causal, problem.K
    bits = _scalar(device, 0, torch.int32)
    lengths = None if topk_length is None else topk_length[:, :, None].expand(B, S, problem.G)
    if gather.lists is not None:
        indices, bits, lengths, *_ = gather.lists
        causal, slots, q_positions = False, indices.shape[-1], None
    positions = None if q_positions is None else q_positions.to(torch.int64)
    tensors = {
        "kv": kv,
        "indices": indices,
        "bits": bits,
        "lengths": _scalar(device, 0, torch.int32) if lengths is None else lengths,
        "positions": _scalar(device, 0, torch.int64) if positions is None else positions,
        "chosen": gather.chosen,
    }
    unit, kv_rows, (row_b, row_s, row_g) = _kv_rows(kv)
    tiles = -(-S // gather.tokens)
    sizes = (
        B, S, problem.S_kv, problem.G, slots, problem.heads_per_group, tiles, kv_rows, row_b, row_s, row_g,
        int(causal), int(lengths is not None), int(positions is not None), gather.wanted,
    )  # fmt: skip
    strides = (
        unit, *indices.stride(),
        *((0, 0, 0) if lengths is None else lengths.stride()),
        *((0, 0) if positions is None else positions.stride()),
    )  # fmt: skip
    return _Call(tensors, sizes, strides, B * tiles * problem.G, causal)


def _launch(
    kernel: Callable[..., Any], call: _Call, rows: Rows, tensors: dict[str, Tensor], strides: tuple, scales: tuple,
    tiles: int,
) -> None:  # fmt: skip
    """`tensors` and `strides` in the kernel's order."""
    ctas = min(tiles, _concurrent(rows, tensors["q"].device)) * rows.ctas
    executor(kernel, (_pointers(tensors), call.sizes, strides, scales, ctas), tensors)


def _concurrent(rows: Rows, device: torch.device) -> int:
    """Tiles that the device works on at a time."""
    return max(1, multiprocessors(device) // rows.ctas)


def _pointers(tensors: dict[str, Tensor]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors.values())


def _row_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(_stride(tensor, axis, tensor.shape[-1]) for axis in range(3))


def fwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float,
    topk_length: Tensor | None, q_positions: Tensor | None, attn_sink: Tensor | None,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, S, H, 512], lse [B, S, H])`: one launch, after those of the lists of token groups if no plan has them.

    Two where the device decides about groups; one of them ends at once.
    """
    B, S, H, device = problem.B, problem.S, problem.H, q.device
    out = torch.empty((B, S, H, problem.d_v), dtype=q.dtype, device=device)
    lse = torch.empty((B, S, H), dtype=torch.float32, device=device)
    # A sink of -inf is no sink.
    sink = _scalar(device, float("-inf"), torch.float32) if attn_sink is None else attn_sink
    scales = (score_scale(sm_scale) * LOG2_E,)
    for gather in _gathers(problem, config, indices, topk_length, q_positions, lists):
        plan = plan_of(problem, gather.tokens, device)
        call = _call(problem, gather, kv, indices, topk_length, q_positions)
        tensors = {"q": q, **call.tensors, "sink": sink, "out": out, "lse": lse}
        strides = (*_row_strides(q), *call.strides, 0 if attn_sink is None else attn_sink.stride(0))
        _launch(_build().kernel(plan), call, plan.rows, tensors, strides, scales, call.tiles)
    return out, lse


def columns_of(workspace: Tensor) -> Tensor:
    """The sums of dkv, a view `[..., D / 32, 4, 8]` in the order of columns; the workspace `[..., D]` has d, d + 8,
    d + 16, d + 24 of each 32 side by side (see `Backward.add_chunk`).
    """
    return workspace.unflatten(-1, (-1, 8, 4)).transpose(-1, -2)


def row_stats(
    problem: Problem, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, attn_sink: Tensor | None, arch: str,
    unit: float = 1.0,
) -> Tensor:  # fmt: skip
    """`stats [4, B, S, H]`, fp32, of `preprocess.py`."""
    B, S, H = lse.shape
    stats = torch.empty((4, B, S, H), dtype=torch.float32, device=out.device)
    kernel = _build().kernel(RowPlan(str(problem.dtype).split(".")[1], arch))
    tensors = {
        "out": out,
        "dout": dout,
        "lse": lse,
        "dlse": _scalar(out.device, 0.0, torch.float32) if dlse is None else dlse,
        "sink": _scalar(out.device, float("-inf"), torch.float32) if attn_sink is None else attn_sink,
        "stats": stats,
    }
    strides = (
        *out.stride()[:3], *dout.stride()[:3], *lse.stride(),
        *((0, 0, 0) if dlse is None else dlse.stride()),
        0 if attn_sink is None else attn_sink.stride(0),
    )  # fmt: skip
    ctas = -(-lse.numel() // (STATS_WARPS * ROWS_PER_WARP))
    executor(kernel, (_pointers(tensors), (B, S, H), strides, (unit**0.5,), ctas), tensors)
    return stats


def terms_at_a_time(slots: int, D: int, concurrent: int) -> int:
    """Tiles of so many slots whose terms of dkv `WORKSPACE` holds: whole rounds of the device where they fit."""
    tiles = WORKSPACE // (slots * (4 * D + SORT_BYTES))
    if tiles == 0:
        most = WORKSPACE // (4 * D + SORT_BYTES)
        raise UnsupportedError(
            f"deterministic=True on sm100 takes up to {most} slots of a tile at D = {D}, not {slots}; "
            "backend='reference' takes any number"
        )
    return tiles // concurrent * concurrent or tiles


def _ordered_sums(
    problem: Problem, plan: BackwardPlan, call: _Call, tensors: dict[str, Tensor], strides: tuple, scales: tuple
) -> None:
    """The backward in parts of some tiles: the terms of dkv are stored, sorted by row and added in order of slots."""
    sums, device = tensors["dkv"], tensors["q"].device
    rows, slots = sums.numel() // plan.D, call.sizes[SLOTS_AT]
    tiles = min(call.tiles, terms_at_a_time(slots, plan.D, _concurrent(plan.rows, device)))
    terms = torch.empty((tiles * slots, plan.D), dtype=torch.float32, device=device)
    kernel, add = (_build().kernel(p) for p in (plan, SumPlan(plan.D, plan.arch)))
    for first in range(0, call.tiles, tiles):
        end = min(first + tiles, call.tiles)
        part = call._replace(sizes=(*call.sizes, first, end))
        _launch(kernel, part, plan.rows, {**tensors, "dkv": terms}, strides, scales, end - first)
        targets, order = _term_rows(problem, call, first, end).sort(stable=True)
        for row in range(0, rows, ROWS_AT_A_TIME):
            part_rows = min(rows - row, ROWS_AT_A_TIME)
            starts = torch.searchsorted(targets, torch.arange(row, row + part_rows + 1, device=device))
            touched = {"terms": terms, "order": order, "starts": starts, "sums": sums.view(rows, plan.D)[row:]}
            executor(add, (_pointers(touched), (part_rows,), -(-part_rows // SUM_WARPS)), touched)


def _term_rows(problem: Problem, call: _Call, first: int, end: int) -> Tensor:
    """The row of `sums` that each slot of the tiles `[first, end)` adds to; past the last row for an invalid slot."""
    indices, device = call.tensors["indices"], call.tensors["indices"].device
    _, tiles, groups, slots = indices.shape
    tile = torch.arange(first, end, device=device)
    b, s, g = tile // groups // tiles, tile // groups % tiles, tile % groups
    rows = indices[b, s, g].long()
    limit = torch.full_like(tile, problem.S_kv)
    if call.causal:
        positions = call.tensors["positions"]
        at = s + problem.S_kv - problem.S if positions.dim() < 2 else positions[b, s]
        limit = torch.minimum(limit - 1, at) + 1  # at may be the largest int64
    valid = (rows >= 0) & (rows < limit[:, None])
    if call.tensors["lengths"].dim() > 1:
        valid &= torch.arange(slots, device=device) < call.tensors["lengths"][b, s, g][:, None]
    row = (b[:, None] * problem.S_kv + rows) * groups + g[:, None]
    return torch.where(valid, row, problem.B * problem.S_kv * groups).flatten()


def bwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor,
    lse: Tensor, *, sm_scale: float, dlse: Tensor | None, topk_length: Tensor | None, q_positions: Tensor | None,
    attn_sink: Tensor | None, dkv: Tensor | None, dkv_dtype: torch.dtype | None, deterministic: bool,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dkv, d_sink)`: per-row values, the main kernel, and dkv in the order of columns and the dtype wanted.

    Workspace: fp32 dkv (4 bytes per element of kv) and 16 bytes per (token, head).
    Deterministic: each row of dkv is the sum of its terms in order of tokens and slots. They pass through at most
    `WORKSPACE` bytes (252 MB), so tiles run in parts, of 51 tokens at K 2048 and D 576: each term is written and read
    again, and where a part has fewer tiles than the device has multiprocessors, some of those idle.
    """
    B, S, H, device = problem.B, problem.S, problem.H, q.device
    if deterministic:  # refused before anything is compiled
        tokens = config.tokens_per_tile or 1 if lists is None else _tokens(problem, config)
        terms_at_a_time(tokens * problem.K, problem.D, 1)
    unit = gradient_unit(q.dtype, sm_scale, attn_sink is not None)
    stats = row_stats(problem, out, dout, lse, dlse, attn_sink, _architecture(device), unit)
    dq = torch.empty((B, S, H, problem.D), dtype=q.dtype, device=device)
    # Adding -0.0 changes nothing, not even the sign of a zero.
    acc = torch.full(kv.shape, 0.0 if dkv is None else -0.0, dtype=torch.float32, device=device)
    scales = (score_scale(sm_scale) * LOG2_E, float(sm_scale), float(sm_scale) / unit)
    for gather in _gathers(problem, config, indices, topk_length, q_positions, lists, deterministic):
        plan = backward_plan_of(problem, gather.tokens, device, deterministic)
        call = _call(problem, gather, kv, indices, topk_length, q_positions)
        tensors = {"q": q, **call.tensors, "dout": dout, "stats": stats, "dq": dq, "dkv": acc}
        strides = (*_row_strides(q), *call.strides, *_row_strides(dout))
        if deterministic:
            _ordered_sums(problem, plan, call, tensors, strides, scales)
        else:
            whole = call._replace(sizes=(*call.sizes, 0, call.tiles))
            _launch(_build().kernel(plan), whole, plan.rows, tensors, strides, scales, call.tiles)
    d_sink = None if attn_sink is None else -stats[3].sum(dim=(0, 1))
    sums = columns_of(acc)
    if dkv is None:
        dkv = torch.empty(kv.shape, dtype=dkv_dtype or kv.dtype, device=device)
        torch.mul(sums, 1 / unit, out=dkv.unflatten(-1, sums.shape[-3:]))
    else:
        dkv.unflatten(-1, sums.shape[-3:]).add_(sums, alpha=1 / unit)
    return dq, dkv, d_sink
