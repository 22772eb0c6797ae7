"""The backend's entry points: what runs on SM90, and the launches of one forward and one backward.

Tensors arrive checked and in batched form: `q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
    union_plans,
)  # fmt: skip
from . import cache
from .plan import (
    BLOCK_K,
    CHUNK,
    D_V,
    FACTOR_COLUMNS,
    FACTORS,
    ITEM,
    L2_BYTES,
    LIST_THREADS,
    MOST_TILES,
    ROWS,
    SMEM_LIMIT,
    TERMS,
    THREADS,
    PlacePlan,
    Plan,
    RepeatPlan,
    SumPlan,
    TermPlan,
)  # fmt: skip

if TYPE_CHECKING:
    from types import ModuleType

Purpose = Literal["forward", "backward", "both"]  # passes that gather lists are made for

# Versions that the tests ran with; others are refused by name.
TILELANG_VERSIONS = ("0.1.15",)
# The decision about token groups, measured on an H200 (kind groups in bench/results/hopper_h200.jsonl), before lists
# became a seventh to a third cheaper, far rows' by 43 %: it has asked a little more of groups than they cost since.
COSTS = GroupCosts(
    slot={16_384: 1.13, 65_536: 1.03, 1 << 31: 0.92}, lists=0.02, lists_per_row=0.03 / 131_072, exit=0.015,
    together=256, apart=1.07,
)  # fmt: skip
# Where dkv exceeds the L2 a backward gains more than the forward, and beyond `FAR_GAINS` times the L2 much more (random
# rows, 2 tokens a tile, 16,384 over 131,072: 39.0 -> 27.8 ms at 0.99 of the slots). So lists for both may cost the
# forward some of its time, and those for a backward alone may be longer than a forward could bear.
NEAR_MAY_LOSE, FAR_GAINS, BOTH_MAY_LOSE, BACKWARD_MAY_LOSE = 1.05, 4, 1.15, 1.3
# Shared memory of the CTAs of a multiprocessor that make lists.
EARLY_BYTES = 196_608
# Bytes and threads of the list builder's CTAs by tokens of a tile, beside `union_lists.UNION_SIZES`: two tokens make
# many short lists. (16,384 tokens, K 640 of 20,480 rows, while each entry waited for what its bit had been: 72 us, with
# 256 threads 92; 8 tokens 77 and 66, 4 as long.)
SMALLER_LISTS: dict[int, union_lists.Sizes] = {2: ((8_192, 128),)}
# Share of the tiles of different length that CTAs go over, one after the other. (Grouped forward, 16,384 tokens, K 640,
# 32 heads: 1674 us where each tile has its own CTA, 1634 with half, 1602 with three quarters, 1593 so; 8 heads 505,
# 495, 487, 489.)
STAYING = 0.9
# Waves of CTAs in a launch of a backward in order whose dkv exceeds the L2: `NEAR_WAVES` up to `FAR` times, beyond that
# `FAR_WAVES`; groups of tokens, which add to fewer rows, count half of it. (D 576, K 2048, ms, all tiles in one launch
# or of 2, 4, 8, 16, 32 waves. 64 heads, 32,768 tokens over as many rows 64.1; -, 56.6, 55.2, 56.0, 60.2, 4096 tokens
# 9.0; -, 7.8, 7.7; over 65,536 rows 13.2; 9.5, 9.8, 11.1, 65,536 tokens 163.7; 115.8, 121.3, 119.8, 129.1. 16 heads, 4
# tokens a tile, 65,536 tokens 139.7; 93.7, 89.4, 92.5, 96.5, 111.1, 32,768 over as many 40.1; -, 41.3, 40.5, 39.7.)
# Where a wave adds to a row once, fewer tiles a launch cost time: K 640 over 65,536 rows 4 %.
FAR, LEAST_ADDS, NEAR_WAVES, FAR_WAVES = 2, 2.0, 8, 2
SORT_BYTES = 64 << 20  # scratch for rows in rising order
# Bytes of a deterministic backward beside fp32 dkv and per-row values, those of a term while torch sorts (two sorts at
# a time), and multiprocessors that the main kernel leaves to the sort.
WORKSPACE, TERM_SORT_BYTES, SORT_UNITS = 240 << 20, 64, 4
# Rows of kv, for one slot that a list is thought to have, up to which products take less time than ordered sums: of
# single tokens and of groups. (H200, 64 heads: 13.7 against 15.9 ms at 4 rows a slot, 75 against 66 at 8; 8 heads 3.5
# against 8.3 at 2, 9.5 against 15.0 at 8.)
PRODUCTS_PAY = (6, 8)
# What these kernels are built for; a config may only repeat it.
BUILT_FOR = {
    "fwd_threads": THREADS,
    "fwd_stages": 2,
    "fwd_block_k": BLOCK_K,
    "bwd_threads": THREADS,
    "bwd_stages": 1,
    "bwd_block_k": BLOCK_K,
    "bwd_split_store": D_V // CHUNK,
}


def plan_of(problem: Problem, tokens: int = 1, lists: bool = False) -> Plan:
    """The compile-time part of a problem whose kernel reads the indices or, with `lists`, int32 lists of them."""
    return _plan(problem.D, problem.dtype, torch.int32 if lists else problem.index_dtype, tokens)


@functools.cache
def _plan(D: int, dtype: torch.dtype, index_dtype: torch.dtype, tokens: int) -> Plan:
    return Plan(D, _name(dtype), _name(index_dtype), tokens)


def pairs(config: SparseAttentionConfig) -> bool:
    """Whether pairs of CTAs have a tile of the backward (`backward_pair.py`)."""
    return config.bwd_cluster == 2


def _backward(config: SparseAttentionConfig) -> str:
    """The kind of kernel that adds to dkv."""
    return "backward_pair" if pairs(config) else "backward"


def sorts_rows(problem: Problem) -> bool:
    """Whether the backward takes each token's rows in rising order: CTAs then add to the same part of dkv at a time."""
    return dkv_bytes(problem) > L2_BYTES


def dkv_bytes(problem: Problem) -> int:
    """Of fp32 dkv of one batch entry."""
    return problem.S_kv * problem.G * problem.D * 4


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]


def smem_bytes(problem: Problem, config: SparseAttentionConfig) -> dict[str, int]:
    """Shared memory of the two main kernels, in bytes."""
    plan = plan_of(problem)
    return {"forward": sum(plan.forward_smem.values()), "backward": sum(_backward_smem(plan, config).values())}


def _backward_smem(plan: Plan, config: SparseAttentionConfig) -> dict[str, int]:
    """By use, of the kernel that adds to dkv."""
    return plan.pair_smem if pairs(config) else plan.backward_smem


def check(problem: Problem, config: SparseAttentionConfig) -> None:
    """Refuse what these kernels cannot run, before anything is compiled."""
    _check_tilelang()
    for name, built in BUILT_FOR.items():
        wished = getattr(config, name)
        if wished not in (None, built):
            raise UnsupportedError(
                f"the sm90 kernels are built with {name} = {built}, not {wished}{_why(name, wished, problem, config)}"
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
    if pairs(config) and heads <= ROWS:
        raise UnsupportedError(
            f"bwd_cluster = 2 is for more than {ROWS} heads per group, which one CTA has no room for, not {heads}; "
            "leave it at None"
        )


def _why(name: str, wished: int, problem: Problem, config: SparseAttentionConfig) -> str:
    plan = plan_of(problem)
    if name in ("fwd_stages", "fwd_block_k"):
        parts = plan.forward_smem
    elif name in ("bwd_stages", "bwd_block_k"):
        parts = _backward_smem(plan, config)
    else:
        return ""
    built, grow = BUILT_FOR[name], next(use for use in parts if use.startswith("kv "))
    needed = sum(parts.values()) - parts[grow] + parts[grow] * wished // built
    sums = " + ".join(f"{size} ({use})" for use, size in parts.items())
    return f" (shared memory: {sums}; {name} = {wished} would need {needed} of {SMEM_LIMIT} bytes)"


@functools.cache
def _check_tilelang() -> None:
    env.require_release("sm90", "tilelang", TILELANG_VERSIONS, "hopper")


def _build() -> ModuleType:
    _check_tilelang()
    cache.prepare()
    from . import build

    return build


def warmup(problem: Problem, config: SparseAttentionConfig, backward: bool) -> None:
    """Compile the kernels of such a problem."""
    build, wished = _build(), config.tokens_per_tile
    for tokens in {wished} if wished else {1, group_size(problem)}:
        build.kernel("forward", plan_of(problem, tokens, tokens > 1))
        if backward:
            # Single tokens: from the indices, and from lists where dkv is large.
            for listed in (False, True) if tokens == 1 else (True,):
                build.kernel(_backward(config), plan_of(problem, tokens, listed))
        lists = union_plans(tokens, problem.index_dtype, SMALLER_LISTS.get(tokens, ()))
        for plan in lists if tokens > 1 or backward else ():
            build.kernel("unions", plan)
        if tokens > 1 and wished is None:
            build.kernel("union_samples", sample_plan_of(problem, tokens))
    if backward:
        build.kernel("postprocess", plan_of(problem))
    if backward and torch.are_deterministic_algorithms_enabled():
        tokens = wished or group_size(problem)
        _ordered_kernels(problem, tokens)
        if _tiles(problem) == 1:
            _product_kernels(problem, tokens)


@functools.cache
def _scalar(device: torch.device, value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


@functools.lru_cache(maxsize=1024)
def _stand_in(device: torch.device, value: float, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Stands in for an optional tensor: expanded with stride 0, read by nobody or as a neutral value."""
    return _scalar(device, value, dtype).expand(shape)


def _slots(
    problem: Problem, q_positions: Tensor | None, topk_length: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Lengths and positions, or stand-ins, and the flags `(causal, has_length, has_positions)`."""
    shape = (problem.B, problem.S)
    flags = (int(problem.causal), int(topk_length is not None), int(q_positions is not None))
    lengths = _stand_in(device, 0, torch.int32, shape) if topk_length is None else topk_length
    positions = _stand_in(device, 0, torch.int64, shape) if q_positions is None else q_positions.to(torch.int64)
    return lengths, positions, flags


def _sink(problem: Problem, attn_sink: Tensor | None, device: torch.device) -> Tensor:
    # A sink of -inf is no sink.
    return _stand_in(device, float("-inf"), torch.float32, (problem.H,)) if attn_sink is None else attn_sink


def _tiles(problem: Problem) -> int:
    return -(-problem.heads_per_group // ROWS)


def group_size(problem: Problem) -> int:
    """Most tokens whose heads fill a tile: what is tried where the config does not say."""
    return union_lists.group_size(problem, ROWS)


def per_mille(problem: Problem, tokens: int, device: torch.device, purpose: Purpose = "both") -> int:
    """How many slots the union may have, for 1000 of the tokens' own, so that grouping pays."""
    gain = 1.0
    if purpose != "forward" and dkv_bytes(problem) > FAR_GAINS * L2_BYTES:
        gain = BACKWARD_MAY_LOSE if purpose == "backward" else BOTH_MAY_LOSE
    elif purpose != "forward" and sorts_rows(problem):
        gain = NEAR_MAY_LOSE
    return COSTS.per_mille(problem, tokens, env.multiprocessors(device), gain)


def _tiles_at_once(problem: Problem, tokens: int, device: torch.device) -> int:
    """Tiles along the sequence of a backward's launch that takes rows in order.

    Its CTAs start at the first row together and drift apart. Where dkv is larger than the L2, and the CTAs of a wave
    add to most rows more than once, launches of few waves keep them together.
    """
    a_tile, units = problem.B * problem.G * _tiles(problem), env.multiprocessors(device)
    adds = units * tokens * problem.K / (problem.S_kv * problem.B * problem.G)
    room = min(tokens, 2) * L2_BYTES
    if dkv_bytes(problem) <= room or adds < LEAST_ADDS:
        return problem.S
    waves = FAR_WAVES if dkv_bytes(problem) > FAR * room else NEAR_WAVES // min(tokens, 2)
    return max(1, waves * units // a_tile)


def _union_plan_of(problem: Problem, tokens: int) -> UnionPlan:
    return union_lists.union_plan_of(problem, tokens, SMALLER_LISTS.get(tokens, ()))


def _early(plan: UnionPlan) -> int:
    """CTAs of a multiprocessor that begin their lists before the device has decided about them: those it holds."""
    return max(1, min(EARLY_BYTES // plan.size, LIST_THREADS // plan.threads))


def make_lists(
    problem: Problem, tokens: int, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None,
    decide: bool = False, purpose: Purpose = "both",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(rows, bits, lengths)` of the union lists, as `unions.py` has them, and `chosen [1]`: whether they were made.

    With `decide` the device looks at a sample of tiles, and makes no lists where they would not pay for the passes that
    they are made for.
    """
    B, S, G, _ = indices.shape
    L, device, plan = -(-S // tokens), indices.device, _union_plan_of(problem, tokens)
    samples = torch.empty((min(SAMPLES, B * L * G), 2), dtype=torch.int32, device=device)
    if decide:
        small = sample_plan_of(problem, tokens)
        step = sample_step(problem, small)
        lengths, positions, flags = _slots(problem, q_positions, topk_length, device)
        _build().kernel("union_samples", small)(indices, lengths, positions, samples, L, step, problem.S_kv, *flags)
    return _lists(
        problem, plan, range(L), indices, topk_length, q_positions, samples=samples,
        sampled=len(samples) if decide else 0, most=per_mille(problem, tokens, device, purpose) if decide else 0,
    )  # fmt: skip


def _lists(
    problem: Problem, plan: UnionPlan, tiles: range, indices: Tensor, topk_length: Tensor | None,
    q_positions: Tensor | None, *, samples: Tensor, sampled: int = 0, most: int = 0, gate: Tensor | None = None,
    wanted: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The lists of some tiles, if `gate` is `wanted`, and `sampled` samples find at most `most` slots for 1000."""
    B, _, G, K = indices.shape
    device, tokens = indices.device, plan.tokens
    lengths, positions, flags = _slots(problem, q_positions, topk_length, device)
    rows = torch.empty((B, len(tiles), G, tokens * K), dtype=torch.int32, device=device)
    # Lists of single tokens have no bits.
    bits = torch.empty_like(rows) if tokens > 1 else _stand_in(device, 0, torch.int32, rows.shape)
    counts = room_for_lengths((B, len(tiles), G), device)
    chosen = torch.empty(1, dtype=torch.int32, device=device)
    _build().kernel("unions", plan)(
        indices, lengths, positions, samples, rows, bits, counts, chosen, chosen if gate is None else gate, wanted,
        tiles.start, sampled, most, env.multiprocessors(device) * _early(plan), problem.S_kv,
        *flags,
    )  # fmt: skip
    return rows, bits, counts, chosen


class Gather(NamedTuple):
    """What a kernel gathers for the tiles from `tile_0`, and when it runs.

    `slots`, `bits [B, L, G, C]`: rows of kv, and for tiles of several tokens who selected them; `lengths [B, L, G]`;
    the kernel runs if `chosen [1]` is `wanted`, or `wanted` negative; `flags`: causal, has_length, has_positions.
    """

    tokens: int
    slots: Tensor
    bits: Tensor
    lengths: Tensor
    positions: Tensor
    chosen: Tensor
    wanted: int
    flags: tuple[int, int, int]
    tile_0: int = 0

    def plan(self, problem: Problem) -> Plan:
        """The compile-time part of its kernel."""
        return _plan(problem.D, problem.dtype, self.slots.dtype, self.tokens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the kernels' arguments."""
        return self.slots, self.bits, self.lengths, self.chosen, self.positions


def _gathers(
    problem: Problem, config: SparseAttentionConfig, indices: Tensor, topk_length: Tensor | None,
    q_positions: Tensor | None, lists: tuple[Tensor, ...] | None, in_order: bool = False,
) -> Iterator[Gather]:  # fmt: skip
    """What runs: one kernel, or two of which the device chooses. A plan's lists are taken, others made.

    `in_order` wants lists for single tokens too, made for as many tokens at a time as `SORT_BYTES` hold, and maybe a
    kernel for a few tiles at a time.
    """
    device, bounds = indices.device, (topk_length, q_positions)
    lengths, positions, flags = _slots(problem, q_positions, topk_length, device)
    tokens = config.tokens_per_tile or group_size(problem)
    decide = config.tokens_per_tile is None if lists is None else len(lists) == 4
    chosen, wanted = _scalar(device, 1, torch.int32), -1
    if tokens > 1:
        made = lists or make_lists(problem, tokens, indices, *bounds, decide, "backward" if in_order else "forward")
        chosen, wanted = (made[3], 1) if decide else (chosen, -1)
        step = _tiles_at_once(problem, tokens, device) if in_order else made[0].shape[1]
        yield from _launches(step, tokens, made, positions, chosen, wanted, 0)
        if not decide:
            return
        wanted = 0
    if not in_order:
        nobody = _stand_in(device, 0, torch.int32, indices.shape)
        shape = indices.shape[:3]
        lengths = _stand_in(device, 0, torch.int32, shape) if topk_length is None else lengths[:, :, None].expand(shape)
        yield Gather(1, indices, nobody, lengths, positions, chosen, wanted, flags)
        return
    B, S, G, K = indices.shape
    step = _tiles_at_once(problem, 1, device)
    listed = max(1, SORT_BYTES // (4 * B * G * K))
    nothing = torch.empty((1, 2), dtype=torch.int32, device=device)
    for first in range(0, S, listed):
        tiles = range(first, min(first + listed, S))
        made = _lists(
            problem, _union_plan_of(problem, 1), tiles, indices, *bounds, samples=nothing, gate=chosen, wanted=wanted
        )
        yield from _launches(step, 1, made, positions, chosen, wanted, first)
        del made


def _launches(
    step: int, tokens: int, made: Sequence[Tensor], positions: Tensor, chosen: Tensor, wanted: int, tile_0: int
) -> Iterator[Gather]:
    """The lists `made` for the tiles from `tile_0`, so many tiles a launch."""
    for first in range(0, made[0].shape[1], step):
        some = (part[:, first : first + step] for part in made[:3])
        yield Gather(tokens, *some, positions, chosen, wanted, (0, 1, 0), tile_0 + first)


def _rounds(
    problem: Problem, gather: Gather, units: int, whole: bool, tiles_per_group: int | None = None
) -> tuple[int, int]:
    """CTAs or pairs of CTAs that go over tiles, and how many each, where `units` multiprocessors or pairs have one.

    A CTA of every SM goes over lists of one length, in a backward (`whole`) over as many as all have; where lengths
    differ it does so for most of them. Each of the rest has a CTA of its own, which goes to the SM that is free first.
    """
    tiles = problem.B * gather.slots.shape[1] * problem.G * (tiles_per_group or _tiles(problem))
    has_length, rounds = gather.flags[1], tiles // units
    if has_length:
        rounds = int(STAYING * rounds)
    elif not whole:
        rounds = -(-tiles // units)
    return units, max(1, rounds)


def _ahead(problem: Problem, gather: Gather, units: int) -> int:
    """How far further on in the sequence the next tile of an SM is."""
    ahead = max(1, units // (problem.G * _tiles(problem)))
    return ahead if gather.tokens == 1 else -ahead


def fwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float,
    topk_length: Tensor | None, q_positions: Tensor | None, attn_sink: Tensor | None,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out [B, S, H, 512], lse [B, S, H])`: one launch, after that of the union lists where no plan has them."""
    B, S, H = problem.B, problem.S, problem.H
    out = torch.empty((B, S, H, problem.d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, S, H), dtype=torch.float32, device=q.device)
    scale_log2 = score_scale(sm_scale) * LOG2_E
    units = env.multiprocessors(q.device)
    for gather in _gathers(problem, config, indices, topk_length, q_positions, lists):
        _build().kernel("forward", gather.plan(problem))(
            q, kv, *gather.tensors, _sink(problem, attn_sink, q.device), out, lse,
            scale_log2, problem.heads_per_group, _tiles(problem), gather.wanted, *gather.flags,
            *_rounds(problem, gather, units, False), _ahead(problem, gather, units),
        )  # fmt: skip
    return out, lse


class Parts(NamedTuple):
    """How a deterministic backward goes through a call: some tiles at a time, and parts of their lists.

    `tiles` of each batch entry; `slots` of a part; `parts` of a list, of which `sorted` are sorted at a time.
    """

    tiles: int
    slots: int
    parts: int
    sorted: int


def parts_of(problem: Problem, tokens: int, multiprocessors: int) -> Parts:
    """Terms, sums of dq, lists and what torch sorts, within `WORKSPACE`: full waves, long parts."""
    terms, state = BLOCK_K * 4 * problem.D, ROWS * 4 * problem.D  # bytes of a CTA: of a block, and of dq
    to_sort = BLOCK_K * TERM_SORT_BYTES
    blocks, a_tile = -(-tokens * problem.K // BLOCK_K), problem.B * problem.G * _tiles(problem)
    lists = 2 * 8 * BLOCK_K * blocks if tokens > 1 else 0  # rows and bits, of two groups
    # CTAs at a time: those of a wave, fewer where lists are very long, more where whole lists fit.
    wave, whole = max(1, multiprocessors - SORT_UNITS), WORKSPACE // (blocks * (terms + to_sort) + lists)
    most = WORKSPACE // (terms + to_sort + lists + state)
    if a_tile > most:
        raise UnsupportedError(
            f"deterministic=True on sm90 takes up to {most} (batch entry, group, 64 heads) with "
            f"{tokens * problem.K} slots at D = {problem.D}, not {a_tile}; pass fewer batch entries at a time"
        )
    L = -(-problem.S // tokens)
    groups = -(-L // max(1, max(whole // wave * wave, min(wave, most)) // a_tile))
    tiles = -(-L // groups)
    ctas = tiles * a_tile
    left = WORKSPACE // ctas - lists - (0 if ctas <= whole else state)
    # All parts of a list are sorted together where that takes no more than an eighth.
    kept = min(blocks, WORKSPACE // (8 * ctas * to_sort)) * to_sort
    slots = -(-blocks // -(-blocks // max(1, (left - kept) // terms)))
    parts = -(-blocks // slots)
    return Parts(tiles, slots * BLOCK_K, parts, max(1, min(parts, (left - slots * terms) // (slots * to_sort))))


def _ordered_kernels(problem: Problem, tokens: int) -> tuple[Callable[..., Any], ...]:
    """The main kernel, the one that numbers the rows of its terms, and the one that adds them."""
    plan = dataclasses.replace(plan_of(problem, tokens, tokens > 1), dkv=TERMS)
    plans = {"backward": plan, "term_rows": TermPlan(plan.index_dtype), "ordered_sums": SumPlan(plan.D)}
    return tuple(_build().kernel(kind, plan) for kind, plan in plans.items())


class Pieces(NamedTuple):
    """How a deterministic backward by products goes through a call: tiles of each batch entry, slots at a time."""

    tiles: int
    slots: int


def pieces_of(problem: Problem, tokens: int, multiprocessors: int) -> Pieces | None:
    """Factors, places, sums of dq and lists within `WORKSPACE`; `None` where ordered sums are to be preferred."""
    # Neighbours in text share so much: 1.96 K rows for 8 tokens, 1.63 K for 4, 1.30 K for 2.
    union = problem.K * (1 + (tokens.bit_length() - 1) / 3)
    if _tiles(problem) > 1 or problem.S_kv > PRODUCTS_PAY[tokens > 1] * union:
        return None
    factors, state = BLOCK_K * FACTOR_COLUMNS * ITEM, ROWS * 4 * problem.D  # bytes of a CTA: of a block, and of dq
    blocks, a_tile = -(-tokens * problem.K // BLOCK_K), problem.B * problem.G
    fixed = 2 * 8 * tokens * problem.K + 4 * (problem.S_kv + 1)  # lists of two groups; places, distinct rows
    wave, whole = max(1, multiprocessors), WORKSPACE // (blocks * factors + fixed)
    most = WORKSPACE // (factors + state + fixed)
    if a_tile > most:
        return None
    L = -(-problem.S // tokens)
    # CTAs at a time: those of a wave, more where whole lists fit.
    groups = -(-L // min(MOST_TILES, max(1, max(whole // wave * wave, min(wave, most)) // a_tile)))
    tiles = -(-L // groups)
    ctas = tiles * a_tile
    if ctas <= whole:
        return Pieces(tiles, blocks * BLOCK_K)
    return Pieces(tiles, (WORKSPACE // ctas - fixed - state) // factors * BLOCK_K)


def _product_kernels(problem: Problem, tokens: int) -> tuple[Callable[..., Any], ...]:
    """The main kernel, the one that says where rows are, the one that multiplies, and the one for repeats."""
    plan = dataclasses.replace(plan_of(problem, tokens, lists=True), dkv=FACTORS)
    plans = {
        "backward": plan, "places": PlacePlan(), "products": plan,
        "repeats": RepeatPlan(plan.D, plan.dtype, plan.tokens),
    }  # fmt: skip
    return tuple(_build().kernel(kind, plan) for kind, plan in plans.items())


def _by_products(
    problem: Problem, tokens: int, pieces: Pieces, q: Tensor, kv: Tensor, dout: Tensor, indices: Tensor,
    of_rows: tuple[Tensor, ...], has_sink: int, dq: Tensor, dkv: Tensor, scales: tuple[float, ...],
    topk_length: Tensor | None, q_positions: Tensor | None, lists: tuple[Tensor, ...] | None,
) -> None:  # fmt: skip
    """dq, and dkv by products in fixed order (`products.py`), for some tiles and slots at a time."""
    device, heads, capacity = q.device, problem.heads_per_group, tokens * problem.K
    units = env.multiprocessors(device)
    ctas = problem.B * pieces.tiles * problem.G
    factors = torch.empty(ctas * pieces.slots * FACTOR_COLUMNS, dtype=q.dtype, device=device)
    sums = _scalar(device, 0.0, torch.float32)
    if pieces.slots < capacity:
        sums = torch.empty(ctas * ROWS * problem.D, dtype=torch.float32, device=device)
    room = torch.empty(ctas * (problem.S_kv + 1), dtype=torch.int32, device=device)
    backward, find, multiply, repeat = _product_kernels(problem, tokens)
    gathers = _gathers_in_order(problem, tokens, pieces.tiles, indices, topk_length, q_positions, lists, listed=True)
    for gather in gathers:
        tiles = gather.slots.shape[:3]
        places = room[: tiles.numel() * problem.S_kv].view(*tiles, problem.S_kv)
        distinct = room[ctas * problem.S_kv :][: tiles.numel()].view(tiles)
        for first in range(0, capacity, pieces.slots):
            taken = slice(first, first + pieces.slots)
            of_part = (gather.slots[..., taken], gather.bits[..., taken], *gather.tensors[2:])
            where = (gather.tile_0, first, pieces.slots)
            backward(
                q, kv, dout, *of_part, *of_rows, dq, factors, sums, *scales, heads, 1, -1, *where, int(first == 0),
                int(taken.stop >= capacity), *gather.flags, has_sink, *_rounds(problem, gather, units, True),
            )  # fmt: skip
            find(gather.slots, gather.lengths, places, distinct, first, pieces.slots)
            multiply(q, dout, factors, places, dkv, scales[1], heads, gather.tile_0, pieces.slots)
            repeat(q, dout, gather.slots, gather.bits, gather.lengths, distinct, factors, dkv, scales[1], heads, *where)


class _Beside:
    """A second stream beside the current one, for work that may overlap; on a CPU all is one order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _second_stream(device) if device.type == "cuda" else None

    def done(self) -> torch.cuda.Event | None:
        """What the current stream, the second one inside `running`, has been given so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.stream else None

    def running(self) -> AbstractContextManager:
        """Inside, the second stream is the current one."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """The current stream waits."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _gathers_in_order(
    problem: Problem, tokens: int, tiles: int, indices: Tensor, topk_length: Tensor | None, q_positions: Tensor | None,
    lists: tuple[Tensor, ...] | None, listed: bool = False,
) -> Iterator[Gather]:  # fmt: skip
    """What is gathered for so many tiles at a time; `lists` are those of all tiles, else made as they are needed.

    Single tokens have lists only if they are to be `listed`: rows in order, none of them invalid.
    """
    device = indices.device
    lengths, positions, flags = _slots(problem, q_positions, topk_length, device)
    always, nobody = (_scalar(device, value, torch.int32) for value in (1, 0))
    samples = torch.empty((1, 2), dtype=torch.int32, device=device)
    L = -(-problem.S // tokens)
    for first in range(0, L, tiles):
        some = slice(first, min(first + tiles, L))
        if tokens == 1 and not listed:
            rows = indices[:, some]
            bounds = lengths[:, some, None].expand(rows.shape[:3])
            yield Gather(1, rows, nobody.expand(rows.shape), bounds, positions, always, -1, flags, first)
            continue
        made = [part[:, some] for part in lists or ()] or _lists(
            problem, _union_plan_of(problem, tokens), range(some.start, some.stop), indices, topk_length, q_positions,
            samples=samples,
        )  # fmt: skip
        yield Gather(tokens, *made[:3], positions, always, -1, (0, 1, 0), first)


class _Sorter:
    """Sorts the terms of the coming step by row of dkv, on a second stream, while the present step runs.

    `order` and `starts` are two steps' worth, made on the current stream, which reads what the second has written.
    """

    def __init__(self, problem: Problem, number: Callable[..., Any], parts: Parts, ctas: int, device: torch.device):
        self.problem, self.number, self.parts = problem, number, parts
        self.rows = problem.B * problem.S_kv * problem.G
        self.bounds = torch.arange(parts.sorted * (self.rows + 1), dtype=torch.int32, device=device)
        most = parts.sorted * ctas * parts.slots
        self.order = [torch.empty(most, dtype=torch.int64, device=device) for _ in range(2)]
        self.starts = [torch.empty_like(self.bounds) for _ in range(2)]
        self.beside = _Beside(device)

    def start(self, step: int, gather: Gather, first: int, count: int) -> torch.cuda.Event | None:
        """Number the rows of some parts' terms and sort them, once the current stream is where it is now."""
        read, slots = self.beside.done(), self.parts.slots
        B, L, G, _ = gather.slots.shape
        size = count * B * L * G * _tiles(self.problem) * slots
        with self.beside.running():
            self.beside.wait(read)
            row_of = torch.empty(size, dtype=torch.int32, device=gather.slots.device)
            self.number(
                gather.slots, gather.lengths, gather.positions, row_of, self.problem.S_kv, gather.tile_0,
                _tiles(self.problem), first * slots, slots, *gather.flags,
            )  # fmt: skip
            in_order = torch.empty_like(row_of)
            torch.sort(row_of, stable=True, out=(in_order, self.order[step % 2][:size]))
            torch.searchsorted(in_order, self.bounds, out_int32=True, out=self.starts[step % 2])
            return self.beside.done()


def _in_order(
    problem: Problem, tokens: int, q: Tensor, kv: Tensor, dout: Tensor, indices: Tensor,
    of_rows: tuple[Tensor, ...], has_sink: int, dq: Tensor, dkv: Tensor, scales: tuple[float, ...],
    topk_length: Tensor | None, q_positions: Tensor | None, lists: tuple[Tensor, ...] | None,
) -> None:  # fmt: skip
    """dq, and the terms of dkv added in order (`ordered.py`), part by part."""
    device, D = q.device, problem.D
    parts = parts_of(problem, tokens, env.multiprocessors(device))
    units = max(1, env.multiprocessors(device) - SORT_UNITS)
    ctas = problem.B * parts.tiles * problem.G * _tiles(problem)
    terms = torch.empty((ctas * parts.slots, D), dtype=torch.float32, device=device)
    sums = _scalar(device, 0.0, torch.float32)
    if parts.parts > 1:
        sums = torch.empty(ctas * ROWS * D, dtype=torch.float32, device=device)
    backward, number, add = _ordered_kernels(problem, tokens)
    sorter = _Sorter(problem, number, parts, ctas, device)
    steps = (
        (gather, first, min(parts.sorted, parts.parts - first))
        for gather in _gathers_in_order(problem, tokens, parts.tiles, indices, topk_length, q_positions, lists)
        for first in range(0, parts.parts, parts.sorted)
    )
    coming = next(steps)
    in_order = sorter.start(0, *coming)
    for step in itertools.count():
        (gather, first, count), mine = coming, in_order
        following = next(steps, None)
        if following is not None:
            coming, in_order = following, sorter.start(step + 1, *following)
        for part in range(first, first + count):
            taken = slice(part * parts.slots, (part + 1) * parts.slots)
            slots, bits = gather.slots[..., taken], gather.bits[..., taken]
            backward(
                q, kv, dout, slots, bits, *gather.tensors[2:], *of_rows, dq, terms.view(-1), sums,
                *scales, problem.heads_per_group, _tiles(problem), -1, gather.tile_0, taken.start, parts.slots,
                int(part == 0), int(part == parts.parts - 1), *gather.flags, has_sink,
                *_rounds(problem, gather, units, True),
            )  # fmt: skip
            sorter.beside.wait(mine)
            of_part = slots.shape[0] * slots.shape[1] * slots.shape[2] * _tiles(problem) * parts.slots
            add(
                terms, sorter.order[step % 2], sorter.starts[step % 2], dkv.view(-1, D),
                (part - first) * (sorter.rows + 1), (part - first) * of_part,
            )  # fmt: skip
        if following is None:
            return


def bwd(
    problem: Problem, config: SparseAttentionConfig, q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor,
    lse: Tensor, *, sm_scale: float, dlse: Tensor | None, topk_length: Tensor | None, q_positions: Tensor | None,
    attn_sink: Tensor | None, dkv: Tensor | None, dkv_dtype: torch.dtype | None, deterministic: bool,
    lists: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`(dq, dkv, d_sink)`: the main kernel, and the rounding of dkv unless fp32 is wanted.

    Workspace: fp32 dkv (4 bytes per element of kv), with a sink 4 bytes per (token, head), where dkv exceeds the L2
    `SORT_BYTES`, and for token groups without a plan 8 bytes per slot of `indices`.
    Deterministic: token groups fill a tile unless the config or a plan has other ones. Either P and dS pass through at
    most `WORKSPACE` bytes in pieces (`Pieces`) and are multiplied tile by tile; or, above 64 heads and where kv is long
    beside a list, the terms of dkv do in parts (`Parts`), which are added part by part, in order of tiles, head tiles
    and slots; beside that 12 bytes per row of kv and part of a list.
    """
    if deterministic and pairs(config):
        raise UnsupportedError("bwd_cluster = 2 adds in no fixed order: leave it at None with deterministic=True")
    B, S, H = problem.B, problem.S, problem.H
    build, device = _build(), q.device
    units = env.multiprocessors(device)
    nothing = _scalar(device, 0.0, torch.float32)
    if dlse is None:
        dlse = _stand_in(device, 0.0, torch.float32, (B, S, H))
    # A caller's buffer takes plain sums.
    unit = gradient_unit(q.dtype, sm_scale, attn_sink is not None and dkv is None)
    has_sink = int(attn_sink is not None)
    sink_shares = torch.empty(B * S * H, dtype=torch.float32, device=device) if has_sink else nothing
    of_rows = (out, lse, dlse, _sink(problem, attn_sink, device), sink_shares)
    dq = torch.empty((B, S, H, problem.D), dtype=q.dtype, device=device)
    acc = torch.zeros(kv.shape, dtype=torch.float32, device=device) if dkv is None else dkv
    scale_log2 = score_scale(sm_scale) * LOG2_E
    scales = (scale_log2, float(sm_scale), float(sm_scale) / unit, unit**0.5)
    if deterministic:
        tokens = config.tokens_per_tile or group_size(problem)
        if lists is not None and len(lists) == 4:
            # Made only where the device found that they pay; a deterministic call always groups.
            lists = None
        arguments = (q, kv, dout, indices, of_rows, has_sink, dq, acc, scales, topk_length, q_positions, lists)
        pieces = pieces_of(problem, tokens, units)
        if pieces is None:
            _in_order(problem, tokens, *arguments)
        else:
            _by_products(problem, tokens, pieces, *arguments)
    else:
        # A pair of CTAs has all heads of a group.
        tiles, ctas = (1, 2) if pairs(config) else (_tiles(problem), 1)
        for gather in _gathers(problem, config, indices, topk_length, q_positions, lists, sorts_rows(problem)):
            build.kernel(_backward(config), gather.plan(problem))(
                q, kv, dout, *gather.tensors, *of_rows, dq, acc.view(-1), nothing,
                *scales, problem.heads_per_group, tiles, gather.wanted, gather.tile_0, 0, 0, 1, 1,
                *gather.flags, has_sink, *_rounds(problem, gather, max(1, units // ctas), True, tiles),
            )  # fmt: skip
    d_sink = -sink_shares.view(-1, H).sum(dim=0) if has_sink else None
    if dkv is None and dkv_dtype in (None, kv.dtype):
        rounded = torch.empty(kv.shape, dtype=kv.dtype, device=device)
        build.kernel("postprocess", plan_of(problem))(acc.view(-1), rounded.view(-1), 1 / unit)
        return dq, rounded, d_sink
    return dq, acc if unit == 1 else acc.mul_(1 / unit), d_sink
