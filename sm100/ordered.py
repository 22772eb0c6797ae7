"""Sums of dkv in fixed order: every row of the sums gets its terms one after the other, in order of their numbers.

    sums[r] += terms[order[starts[r]]] + ... + terms[order[starts[r + 1] - 1]]      left to right, in fp32

`terms [N, D]`, `order` and `starts [rows + 1]` int64, `sums [rows, D]` fp32. One warp a row; a row without terms is
neither read nor written.
"""

import cutlass
from cutlass import Int32, Int64, cute

from . import ptx
from .backward_plan import SUM_WARPS, SumPlan
from .forward import _global, _named
from .plan import WARP

POINTERS = ("terms", "order", "starts", "sums")
SIZES = ("rows",)
QUAD = 4  # columns of one load


class OrderedSum:
    """The kernel of one plan."""

    def __init__(self, plan: SumPlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(self, pointers, sizes, ctas, stream):
        self.kernel(pointers, sizes).launch(grid=(ctas, 1, 1), block=(SUM_WARPS * WARP, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, pointers, sizes):
        at, n = _named(POINTERS, pointers), _named(SIZES, sizes)
        block, _, _ = cute.arch.block_idx()
        row = block * SUM_WARPS + cute.arch.warp_idx()
        if row < n["rows"]:
            starts = _global(at["starts"], Int64)
            first, end = Int32(starts[row]), Int32(starts[row + 1])
            if first < end:
                self.add(at, row, first, end)

    @cute.jit
    def add(self, at, row, first, end):
        """Lane l has columns 4 l to 4 l + 3 of each 128."""
        lane = cute.arch.lane_idx()
        D = self.plan.D
        columns = [Int32(start) + lane * QUAD for start in range(0, D, WARP * QUAD)]
        here = at["sums"] + Int64(row) * (D * 4)
        # The last columns of 576 are those of half a warp; the others repeat a load of theirs and do not store.
        columns = [column if column < D else column - WARP * QUAD for column in columns]
        sums = [x for column in columns for x in ptx.load_quad(here + column * 4)]
        order = _global(at["order"], Int64)
        for i in cutlass.range(first, end, unroll=4):
            term = at["terms"] + order[i] * (D * 4)
            found = [x for column in columns for x in ptx.load_quad(term + column * 4)]
            sums = [x + y for x, y in zip(sums, found, strict=True)]
        for i in cutlass.range_constexpr(len(columns)):
            mine = Int32(i * WARP * QUAD) + lane * QUAD < D
            ptx.store_quad(here + columns[i] * 4, sums[QUAD * i : QUAD * i + QUAD], mine)
