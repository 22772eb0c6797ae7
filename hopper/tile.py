"""Which tiles a CTA has, what their rows stand for, and the copies that forward and backward share.

Copies: 8 threads a row, 16 bytes a thread and step.
"""

from typing import Any

import tilelang.language as T

from .plan import BLOCK_K, ITEM, ROWS, WARPGROUP

VECTOR = 8  # elements of a 16-byte copy
STEP = 64  # columns that the 8 threads of a row copy at a time
PASSES = 4  # of 16 rows: 128 threads cover 64 rows


def token_of(row: Any, tokens: int) -> Any:
    """Token that a row of a tile of so many tokens belongs to, counted from the tile's first."""
    return 0 if tokens == 1 else row // (ROWS // tokens)


def head_of(row: Any, tokens: int) -> Any:
    """Head of a row, counted from the tile's first."""
    return row if tokens == 1 else row % (ROWS // tokens)


def exists(row: Any, tokens: int, heads: Any, left: Any) -> Any:
    """Whether a row stands for one of the tile's `heads` heads and one of the `left` tokens to the sequence's end."""
    if tokens == 1:
        return row < heads
    return (head_of(row, tokens) < heads) & (token_of(row, tokens) < left)


def if_exists(row: Any, tokens: int, heads: Any, left: Any) -> tuple[Any, Any]:
    """Token and head of a row, those of row 0 where it does not exist: an address that may be formed."""
    there = exists(row, tokens, heads, left)
    token = 0 if tokens == 1 else T.if_then_else(there, token_of(row, tokens), 0)
    return token, T.if_then_else(there, head_of(row, tokens), 0)


def limit_at(position: Any, S_kv: Any) -> Any:
    """First row that a token at this position may not select; a position may be the largest int64.

    `min(S_kv - 1, position) + 1` would be simplified to a sum that overflows.
    """
    return T.if_then_else(position < S_kv, position + 1, S_kv)


def selects(bits: Any, row: Any, tokens: int) -> Any:
    """Whether the token of a row selected the slot with these bits."""
    return (bits >> token_of(row, tokens)) & 1 != 0


def ctas_of(tiles: Any, ctas: Any, rounds: Any) -> Any:
    """CTAs of a launch: the first `ctas` go over up to `rounds` tiles each, and each tile that is left has its own."""
    return T.min(tiles, ctas) + T.max(0, tiles - ctas * rounds)


@T.macro
def find_round(round_of, bx, tiles, ctas, rounds):
    """`round_of [2]`: the first tile of CTA `bx`, and how many it has, each `ctas` further on than the one before."""
    round_of[0] = bx
    round_of[1] = T.min(rounds, T.ceildiv(tiles - bx, ctas))
    if bx >= ctas:
        round_of[0] = bx + ctas * (rounds - 1)
        round_of[1] = 1


@T.macro
def leave_unless_chosen(Chosen, wanted):
    """End the CTA where the decision on the device is another than `wanted`; a negative one is always met."""
    if wanted >= 0:
        T.call_extern("handle", "sparse_mla::leave_unless", Chosen[0] == wanted)


@T.macro
def begin(Chosen, wanted, tokens, last):
    """End the CTA where the device has decided otherwise, as `leave_unless_chosen`.

    The kernel for single tokens begins beside that for several, which comes before it: CTAs that leave do so while the
    other runs. Those that stay wait for all before them, and so does the last one, so that what comes next has both
    behind it.
    """
    if tokens > 1:
        T.pdl_trigger()
        leave_unless_chosen(Chosen, wanted)
    else:
        stays = T.alloc_var("int32")
        stays = 1
        if wanted >= 0:
            stays = T.cast(Chosen[0] == wanted, "int32")
        if (stays != 0) | last:
            T.pdl_sync()
        T.call_extern("handle", "sparse_mla::leave_unless", stays != 0)


@T.macro
def load_bits(Bits, slot_bits, stage, b, ti, g, first, lane, length):
    """Bits of the 64 slots from `first` of a tile's list, by `cp.async`; 0 at `length` and beyond, unread."""
    if lane < BLOCK_K:
        slot = first + lane
        T.ptx_cp_async(
            T.access_ptr(slot_bits[stage, lane], "w", 1),
            T.access_ptr(Bits[b, ti, g, T.if_then_else(slot < length, slot, 0)], "r", 1),
            1,
            predicate=slot < length,
        )


@T.macro
def find_tile(place, number, B, G, L, tiles_per_group):
    """`place [4]`: tile of heads, group, tile along the sequence and batch entry of a tile of `B L G tiles_per_group`.

    A division costs a hundred clocks before the first copy: those by 1 are left out.
    """
    place[0] = 0
    place[1] = 0
    place[2] = number
    place[3] = 0
    if tiles_per_group != 1:
        place[0] = T.truncmod(place[2], tiles_per_group)
        place[2] = T.truncdiv(place[2], tiles_per_group)
    if G != 1:
        place[1] = T.truncmod(place[2], T.cast(G, "int32"))
        place[2] = T.truncdiv(place[2], T.cast(G, "int32"))
    if B != 1:
        place[3] = T.truncdiv(place[2], T.cast(L, "int32"))
        place[2] = T.truncmod(place[2], T.cast(L, "int32"))


@T.macro
def find_rows(at, there, X, b, t, head_0, heads, tokens, left, r0, c0):
    """Addresses of a thread's rows of the tile whose first token is t, and which exist; of row 0 for what does not."""
    first = T.alloc_var("int64")
    first = T.call_extern("int64", "sparse_mla::kept", T.address_of(X[b, t, head_0, c0]))
    for r in T.unroll(PASSES):
        token, head = if_exists(r * 16 + r0, tokens, heads, left)
        there[r] = T.cast(exists(r * 16 + r0, tokens, heads, left), "int32")
        at[r] = first + (token * X.strides[1] + head * X.strides[2]) * ITEM


@T.macro
def store_rows(X, X_s, b, t, head_0, heads, tokens, left, lane, first, last, buffer=(), x_row=0):
    """Columns `[first, last)` of the rows that exist, by a warpgroup, from row `x_row` of shared memory behind indices
    `buffer` on.
    """
    threads_a_row = (last - first) // VECTOR
    for r in T.unroll(ROWS * threads_a_row // WARPGROUP):
        row = r * (WARPGROUP // threads_a_row) + lane // threads_a_row
        column = first + lane % threads_a_row * VECTOR
        if exists(row, tokens, heads, left):
            for v in T.vectorized(VECTOR):
                X[b, t + token_of(row, tokens), head_0 + head_of(row, tokens), column + v] = X_s[
                    (*buffer, x_row + row, column + v)
                ]
