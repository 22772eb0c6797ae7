"""Per-row values of the backward, made by the warpgroup that copies dout while the tile's first scores are made.

    Delta = sum_d dout out            w = sigmoid(lse - sink)   (1 without a sink, 0 for an empty row)
    stats [3, rows of the tile] = { lse in base 2 (+inf for an empty row, so that p_hat = 0), u w, u (dlse - w Delta) }
    SinkShares [B S H] = (1 - w) Delta

The rest then needs one exponential per score: `p_hat = exp2(s - stats0)`, `u p = stats1 p_hat`,
`u dS = p_hat (stats1 dP + stats2)`; `d_sink = -sum_t SinkShares`. The unit u is a power of 4 (`scales.UNIT`, or 1) that
keeps gradients of rows whose sink leaves next to nothing (w about 1e-37) in fp32's normal range until they are rounded.
"""

import tilelang.language as T

from ..scales import LOG2_E
from .plan import ROWS
from .ptx import ELEMENT
from .tile import PASSES, exists, if_exists

COLUMNS = 128  # that arrive together
AHEAD = 3  # groups of columns of out on their way at a time


def product(a, b):
    """In fp32, results below the normal range included."""
    return T.call_extern("float32", "sparse_mla::product", a, b)


@T.macro
def load_out(n, values, at, there):
    """A thread's part of a group of columns of out into registers."""
    T.call_extern(
        "handle", "sparse_mla::load_rows", T.access_ptr(values[n % AHEAD, 0], "w", 32), at.data, there.data,
        n * COLUMNS,
    )  # fmt: skip


@T.macro
def add_dots(n, sums, values, QdO_s, r0, c0, dtype):
    """Their products with dout."""
    T.call_extern(
        "handle", f"sparse_mla::add_dots<{ELEMENT[dtype]}>", sums.data, T.access_ptr(values[n % AHEAD, 0], "r", 32),
        T.access_ptr(QdO_s[ROWS + r0, n * COLUMNS + c0], "r", 1),
    )  # fmt: skip


@T.macro
def load_values(of_row, Lse, dLse, Sink, b, t, head_0, heads, tokens, left, lane):
    """`of_row [3]`: lse, dlse and the gap from the sink to lse of a thread's row, `row_of(lane)`."""
    token, head = if_exists(row_of(lane), tokens, heads, left)
    of_row[0] = Lse[b, t + token, head_0 + head]
    of_row[1] = dLse[b, t + token, head_0 + head]
    of_row[2] = of_row[0] - Sink[head_0 + head]


def row_of(lane):
    """Row of the tile whose values a thread makes: of 8 that share four rows, four have one each."""
    return lane % PASSES * 16 + lane // 8


@T.macro
def say_stats(
    sums, of_row, SinkShares, stats, b, t, head_0, heads, tokens, left, lane, root_unit, wants_shares, stats_ready, S, H
):  # fmt: skip
    """`stats` of the tile whose first token is t, and if wanted its part of `SinkShares`; 8 threads a row."""
    row = row_of(lane)
    token, head = if_exists(row, tokens, heads, left)
    lse, dlse, gap = of_row[0], of_row[1], of_row[2]
    delta = T.alloc_var("float32")
    delta = T.call_extern("float32", "sparse_mla::row_sum", sums.data)
    # sigmoid(+-gap) from the roots of exp(min(+-gap, 0)), of which one is 1: the power itself may lie below fp32's
    # normal range, where it is flushed to 0, while its product with Delta does not.
    up = T.alloc_var("float32")
    down = T.alloc_var("float32")
    share = T.alloc_var("float32")
    up = T.exp2(T.min(gap, 0.0) * T.float32(0.5 * LOG2_E))
    down = T.exp2(T.max(gap, 0.0) * T.float32(-0.5 * LOG2_E))
    share = 1.0 / (1.0 + up * down * (up * down))
    if lane % 8 < PASSES:
        full = exists(row, tokens, heads, left) & (lse != -T.infinity("float32"))
        if (wants_shares != 0) & exists(row, tokens, heads, left):
            SinkShares[((b * S + t + token) * H) + head_0 + head] = T.if_then_else(
                full, product(product(share * down, delta), down), T.float32(0)
            )
        up *= root_unit
        # An assignment would get proxy fences before this warpgroup's products, in its loop too.
        T.call_extern(
            "handle", "sparse_mla::store_stats", T.access_ptr(stats[0, row], "r", 1),
            T.if_then_else(full, lse * LOG2_E, T.infinity("float32")),
            T.if_then_else(full, share * up * up, T.float32(0)),
            T.if_then_else(full, dlse * (root_unit * root_unit) - share * up * delta * up, T.float32(0)),
        )  # fmt: skip
    T.barrier_arrive(stats_ready)
