"""How the kernels that make gather lists of token groups are sized, and when groups pay: the same on both backends.

Such a kernel (`hopper/unions.py`, `sm100/unions.py`) keeps a bit for every row of kv and token of a tile in shared
memory, for as many rows at a time as `UnionPlan.span` says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .problem import Problem

TOKENS_PER_TILE = (1, 2, 4, 8, 16)
# Bytes of shared memory for the bits of union lists, and threads: several CTAs a multiprocessor, or all that fits. (256
# threads beside 512 on an H200, while each entry waited for what its bit had been: 34 to 37 us for 8 tokens, K 2048 of
# 8192 rows, 58 to 68 for 2.)
UNION_SIZES = {32_768: 256, 196_608: 1024}
Sizes = tuple[tuple[int, int], ...]
# Bits of a row where all rows of kv fit the smallest, and a token selects one of `FEW` or more: fewer atomics of a warp
# then meet in a word. Else one for each token. (2 tokens, 16 beside 2 bits, 512 threads, as above: K 2048 of 8192 rows
# 68 to 121 us, K 640 of 10240 rows 56 to 47.)
UNION_WIDTH, FEW = 16, 8
# A sample is 32 tiles and 2**-2 of the rows of kv, fewer where kv is long; its few CTAs have more threads.
SAMPLES, SAMPLE_STEP, SAMPLE_THREADS = 32, 2, 512


@dataclass(frozen=True)
class UnionPlan:
    """What the kernel of the union lists is compiled for: as many rows of kv at a time as have their bits in `size`.

    A row has `width` bits, at least one for every token of a tile.
    """

    tokens: int
    index_dtype: str
    size: int
    width: int
    threads: int

    @property
    def words(self) -> int:
        return self.size // 4

    @property
    def span(self) -> int:
        """Rows of kv at a time."""
        return self.size * 8 // self.width


def union_plans(tokens: int, index_dtype: torch.dtype, smaller: Sizes = ()) -> list[UnionPlan]:
    """What the kernel that makes union lists is compiled for, by rising numbers of rows of kv.

    `smaller`: sizes below those of `UNION_SIZES` that a backend has, too.
    """
    return list(_union_plans(tokens, _name(index_dtype), smaller, tuple(UNION_SIZES.items())))


@functools.cache
def _union_plans(tokens: int, name: str, smaller: Sizes, sizes: Sizes) -> tuple[UnionPlan, ...]:
    least, threads = min(sizes)
    return (
        UnionPlan(tokens, name, least, UNION_WIDTH, threads),
        *(UnionPlan(tokens, name, size, tokens, threads) for size, threads in smaller if size < least),
        *(
            UnionPlan(tokens, name, size, tokens, threads)
            for size, threads in sizes
            if tokens < UNION_WIDTH or size > least
        ),
    )


def union_plan_of(problem: Problem, tokens: int, smaller: Sizes = ()) -> UnionPlan:
    """The one for a problem."""
    plans = union_plans(tokens, problem.index_dtype, smaller)
    if problem.S_kv > FEW * problem.K:
        plans = [plan for plan in plans if plan.width == tokens]
    return next((plan for plan in plans if problem.S_kv <= plan.span), plans[-1])


def sample_plan_of(problem: Problem, tokens: int) -> UnionPlan:
    """The same for the kernel that looks at a sample."""
    return UnionPlan(tokens, _name(problem.index_dtype), min(UNION_SIZES), tokens, SAMPLE_THREADS)


def sample_step(problem: Problem, plan: UnionPlan) -> int:
    """A sample looks at one of `2**step` rows of kv: few, and as many as fit."""
    return max(SAMPLE_STEP, (-(-problem.S_kv // plan.span) - 1).bit_length())


def group_size(problem: Problem, rows: int) -> int:
    """Most tokens whose heads fill a tile of so many rows: what is tried where the config does not say."""
    return max((t for t in TOKENS_PER_TILE if t * problem.heads_per_group <= rows), default=1)


def room_for_lengths(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Lengths `[B, L, G]` of lists, to be filled, in memory for one more: see `autograd.lists_op`."""
    B, L, G = shape
    return torch.empty(B * L * G + 1, dtype=torch.int32, device=device)[:-1].view(shape)


@dataclass(frozen=True)
class GroupCosts:
    """What groups cost on one architecture.

    `slot`: a slot of a tile of several tokens beside one of a single token, up to so many rows of kv (masks cost,
    rising rows save as kv leaves the L2, while tiles go through them together), and in calls of more than `together`
    waves of single tokens at least `apart`. As shares of an ungrouped forward, `lists`: lists of 8 tokens a tile,
    `lists_per_row`: of any, per row of kv, `exit`: the kernel that leaves at once.
    """

    slot: dict[int, float]
    lists: float
    lists_per_row: float
    exit: float
    together: int = 1 << 31
    apart: float = 0.0

    def per_mille(self, problem: Problem, tokens: int, units: int, gain: float = 1.0) -> int:
        """How many slots the union may have, for 1000 of the tokens' own, so that grouping pays.

        Invalid ones are among the tokens' own, not in a union: a tile of one token goes through them all. `units` tiles
        run at a time; the grouped time may be `gain` times the other.
        """
        single = problem.B * problem.S * problem.G
        waves, grouped_waves = -(-single // units), -(-single // (tokens * units))
        # Few tokens a tile make more lists: twice the cost at 2 tokens.
        lists = self.lists * (2 / 3 + 8 / (3 * tokens)) + self.lists_per_row * problem.S_kv + self.exit
        slot = next(cost for rows, cost in self.slot.items() if problem.S_kv <= rows)
        slot = max(slot, self.apart if waves > self.together else 0.0)
        return int(1000 * gain * max(0.0, 1 - lists) * waves / (grouped_waves * tokens * slot))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]
