"""Per-row values of the backward: four rows a warp, a row being one head of one token.

    Delta = sum_d dout out            w = sigmoid(lse - sink)   (1 without a sink, 0 for an empty row)
    stats [4, B, S, H] = { lse in base 2 (+inf for an empty row, so that p_hat = 0), u w, u (dlse - w Delta),
                           (1 - w) Delta }

The main kernel needs one exponential per score: `p_hat = exp2(s - stats0)`, `u P = stats1 p_hat`,
`u dS = p_hat (stats1 dP + stats2)`; `d_sink = -sum_t stats3`. The unit u is a power of 4 (`scales.UNIT`, or 1) that
keeps gradients of rows whose sink leaves next to nothing (w about 1e-37) in fp32's normal range until they are rounded.
Rows are numbered through all tokens and real heads, the only ones there are: no tile of heads or tokens, nothing
padded, no buffer that is read past its end.
"""

import cutlass
from cutlass import Float32, Int64, cute

from ..scales import LOG2_E
from . import ptx
from .backward_plan import ROWS_PER_WARP, STATS_WARPS, RowPlan
from .forward import DTYPES, _global, _named
from .plan import D_V, ITEM, WARP

POINTERS = ("out", "dout", "lse", "dlse", "sink", "stats")
SIZES = ("B", "S", "H")
# Of a tensor that is left out, a scalar with strides 0 stands in.
STRIDES = (
    "o_b", "o_s", "o_h", "do_b", "do_s", "do_h", "l_b", "l_s", "l_h", "dl_b", "dl_s", "dl_h", "sink_h",
)  # fmt: skip
SCALES = ("root_unit",)
VECTOR = 8  # columns of one load


class Preprocess:
    """The kernel of one plan."""

    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.dtype = DTYPES[plan.dtype]

    @cute.jit
    def __call__(self, pointers, sizes, strides, scales, ctas, stream):
        self.kernel(pointers, sizes, strides, scales[0]).launch(
            grid=(ctas, 1, 1), block=(STATS_WARPS * WARP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, pointers, sizes, strides, root_unit):
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        rows = n["B"] * n["S"] * n["H"]
        first = (block * STATS_WARPS + cute.arch.warp_idx()) * ROWS_PER_WARP
        deltas = []
        for i in cutlass.range_constexpr(ROWS_PER_WARP):
            # Rows past the end repeat the last one, and are not stored.
            b, s, h = self.place(cutlass.min(first + i, rows - 1), n)
            ours = at["out"] + (b * by["o_b"] + s * by["o_s"] + h * by["o_h"]) * ITEM
            other = at["dout"] + (b * by["do_b"] + s * by["do_s"] + h * by["do_h"]) * ITEM
            part = Float32(0.0)
            for start in cutlass.range_constexpr(0, D_V, WARP * VECTOR):
                column = Int64((start + lane * VECTOR) * ITEM)
                pairs = zip(*(ptx.load_halves(x + column, VECTOR, self.dtype) for x in (ours, other)), strict=True)
                for x, y in pairs:
                    part += x * y
            deltas.append(part)
        for step in cutlass.range_constexpr(5):
            deltas = [x + cute.arch.shuffle_sync_bfly(x, offset=16 >> step) for x in deltas]
        self.finish(at, n, by, lane, first, rows, deltas, root_unit)

    @cute.jit
    def finish(self, at, n, by, lane, first, rows, deltas, root_unit):
        """Lane i stores the values of row `first + i`."""
        delta = deltas[0]
        for i in cutlass.range_constexpr(1, ROWS_PER_WARP):
            delta = deltas[i] if lane == i else delta
        row = first + lane
        if (lane < ROWS_PER_WARP) & (row < rows):
            b, s, h = self.place(row, n)
            lse = _global(at["lse"], Float32)[b * by["l_b"] + s * by["l_s"] + h * by["l_h"]]
            dlse = _global(at["dlse"], Float32)[b * by["dl_b"] + s * by["dl_s"] + h * by["dl_h"]]
            gap = lse - _global(at["sink"], Float32)[h * by["sink_h"]]
            # sigmoid(gap) and sigmoid(-gap), from the root of a power that is never above 1: the power itself may lie
            # below fp32's normal range, where the exponential gives 0, while its product with Delta does not.
            root = cute.math.exp2((gap if gap < 0.0 else -gap) * (0.5 * LOG2_E), fastmath=True)
            larger = Float32(1.0) / (1.0 + root * root)
            up, down = Float32(1.0), root
            if gap < 0.0:
                up, down = root, Float32(1.0)
            rest_delta = larger * down * delta * down
            up *= root_unit
            w, w_delta = larger * up * up, larger * up * delta * up
            values = [lse * LOG2_E, w, dlse * (root_unit * root_unit) - w_delta, rest_delta]
            if lse == -Float32.inf:
                values = [Float32.inf, Float32(0.0), Float32(0.0), Float32(0.0)]
            stats = _global(at["stats"], Float32)
            for plane in cutlass.range_constexpr(4):
                stats[Int64(rows) * plane + row] = values[plane]

    def place(self, row, n):
        """(batch, token, head) of a row; they fit: out of 2**31 rows would fill 2 TB."""
        token = row // n["H"]
        return Int64(token // n["S"]), Int64(token % n["S"]), Int64(row % n["H"])
