"""Backward of sparse MLA: a tile per (token, group, 64 heads), or of several tokens with few heads.

    p_hat = exp(s - lse)   p = w p_hat   dP = dout v   dS = p_hat (w dP + (dlse - w Delta))
    dq = sm_scale sum dS k               dkv[row] += sm_scale dS q, and p dout on the first 512 columns

`q`, `dout`, `kv`, `indices`, and `out`, `lse`, `dlse`, `sink`, of which `row_stats.py` makes what a row's scores need
-> `dq [B, S, H, D]` and adds into fp32 `dkv [B, S_kv, G, D]`. Scores are kept transposed (slots x heads), so that P and
dS are the left operands of dkv as they stand. dq stays in registers; dkv leaves in 64-column chunks, as vector adds of
whole 128-byte lines, to which the lanes of a warp deal an accumulator by shuffles. The term of an invalid slot is zero
and is added to a row that is valid elsewhere in the list (`ptx.DKV_STREAM`), so that adds need no predicate. With
several tokens a tile's slots are the union of their rows, as in `forward.py`, and a row of kv is added to once for all.

Pipeline of one block of 64 slots, time down. The adds set the time, so one warpgroup streams dkv and does little else;
the others run ahead of it. There is one KV buffer: it comes free and is refilled in four groups of columns. What slows
the stream beside the gather and the scores is shared memory's port, so q and dout lie below each other and KV is read
once for both, and no accumulator passes through shared memory.

    copy warpgroup                scores' warpgroup               stream of dkv
    gather group n, kv_ready[n]   wait kv_ready[n]
      (n = 0, 1, 2, 3)            [S^T dP^T] += K_n [Q_n dO_n]^T
                                  P, dS; wait ds_free
                                  dS to shared memory, ds_ready
    wait ds_ready                 P handed over, p_ready          wait ds_ready; acc = dS^T Q under the last adds
    wait kv_free[0], gather 0     dq += dS K_0, frees kv_free[0]    of the block before
    wait kv_free[1], gather 1                                     wait p_ready, P to registers
    dq += dS K_2, K_3             dq += dS K_1, frees kv_free[1]  for 64 columns at a time, the tail first:
    frees ds_free, gather 2       wait kv_ready[n] ...              half of the rows kept, half dealt and added
    wait tail_free, gather 3                                        next acc = dS^T Q under the adds of those kept
                                                                    (first chunk: dq tail += dS K tail, tail_free)
                                                                    acc = sm_scale acc + P^T dO
                                                                  frees ds_free (last dS, and P)

CTAs go over tiles as the forward's do (`tile.ctas_of`). Under the adds of a tile's last block dq leaves through the
columns of KV that it is made of, block 0 of the next tile is gathered, and its q and dout come group by group of
columns, in the order in which the stream and then the scores of the next tile go through them; the copy warpgroup, with
nothing else to do, makes the rows' values from its dout and from out. A CTA of its own has nine thousand clocks of this
before its first adds. The stream's loop is a chain of instructions that sets the time where the L2 does not: no branch
around a product, no address of a barrier made anew (a fifth more instructions cost 10 to 18 %).

    copy warpgroup                scores' warpgroup               stream, last block
    dq leaves                     dq 0, 1 leave, each frees       ...
    list, rows                      its kv_free                   q, dout n not used any more: heads_free[n]
    wait heads_free[0], q, dout 0                                   (n = 0, 1, 2, 3)
    wait kv_free[0], [1],                                         adds of the last chunk
      gather 0, 1, 2, 3           wait kv_ready[n],               dq tail leaves through the place of P
    wait heads_free[n], q, dout n   [S^T dP^T] += K_n ...         frees ds_free
    dout out, stats_ready         wait stats_ready; P, dS         wait ds_ready ...

dS is rounded unscaled, as the precision clause has it, and its product scaled before P^T dO is added: rounding
sm_scale dS instead missed the per-row limit at large scores. P, dS and what is summed of them carry the unit of
`row_stats.py`, which dq loses with `dq_scale` = sm_scale / unit.

A kernel that stores `TERMS` (`ordered.py`) or `FACTORS` (`products.py`) does the same for a part of each list, of which
its `Indices` are a view from slot `slot_0` on; dq may start from the sums that the part before has left in `Sums`, in
fp32 and unscaled, and leave its own there. What slot k of tile x adds, or P and dS of its 64 rows, are stored
in row `x part_slots + k` of `dKV`.
"""

import tilelang.language as T  # noqa: I001
from tilelang.layout import Fragment, make_wgmma_swizzled_layout
from tvm.tirx import PrimFunc

from .plan import (
    ADDS, BLOCK_K, CHUNK, COPY_REGISTERS, D_V, FACTOR_COLUMNS, FACTORS, HALF, ITEM, ROWS,
    SCORE_REGISTERS, STREAM_REGISTERS, TERMS, THREADS, WARPGROUP, Plan,
)  # fmt: skip
from .ptx import DKV_STREAM, ELEMENT, GATHER, LEAVE, OPERAND, PRODUCTS, ROUNDED, ROW_DOT, SUBNORMAL, WGMMA_TYPE
from .row_stats import AHEAD, add_dots, load_out, load_values, product, say_stats
from .tile import (
    PASSES, STEP, VECTOR, begin, ctas_of, exists, find_round, find_rows, find_tile, head_of, limit_at, load_bits,
    selects, store_rows, token_of,
)  # fmt: skip

# Named barriers at the end, of the warpgroups of copies, scores and stream. TileLang counts its own from 3 on and knows
# of no others.
LEAVES = (13, 14, 15)


def build(plan: Plan) -> PrimFunc:
    """The backward for `plan`; shapes, strides, scale and flags are run-time values.

    Annotations of a TileLang kernel are evaluated, so this file must not postpone them (no `from __future__`).
    """
    D = plan.D
    TAIL = D - D_V
    TOKENS = plan.tokens
    ORDERED, FACTORED, IN_PARTS = plan.dkv == TERMS, plan.dkv == FACTORS, plan.dkv != ADDS
    STORE = "true" if ORDERED else "false"
    # Lists of several tokens have no invalid slot but at their end.
    LOOKS_AHEAD = TOKENS == 1 and not IN_PARTS
    dtype, idx_t = plan.dtype, plan.index_dtype
    INDEX, INDEX_BYTES = ("int", 4) if idx_t == "int32" else ("long long", 8)
    fp32, i64 = "float32", "int64"
    SPLIT = HALF + 128
    DTYPE = WGMMA_TYPE[dtype]
    # Where P begins in shared memory: with a tail, where dout has none.
    P_ROW, P_COLUMN = (ROWS, D_V) if TAIL else (0, 0)
    # Columns that are gathered together, and of KV and of q and dout come free together.
    GROUPS = ((0, 128), (128, HALF), (HALF, SPLIT), (SPLIT, D))
    # Of this kernel alone ptxas copies ten accumulators where they are kept as they stand: 2.90 ms at 8 heads, 2.86
    # with them exchanged first, which costs the others 1 %.
    EXCHANGED = "true" if TAIL and TOKENS == 8 else "false"
    # Columns whose terms of dkv a block begins with: those of the tail have no P^T dO.
    FIRST = D_V if TAIL else 0
    # Of the products of scores: the first, more, the last, which may have a tail of S^T.
    PARTS = ("Part::first", "Part::more", "Part::more", "Part::last_with_tail" if TAIL else "Part::last")

    def accumulator(columns, first=0):
        # By threads from `first` on; those of another warpgroup TileLang would take for idle.
        return Fragment(
            [64, columns],
            forward_fn=lambda r, c: (
                first + r // 16 * 32 + r % 8 * 4 + c % 8 // 2, c // 8 * 4 + r % 16 // 8 * 2 + c % 2,
            ),
        )  # fmt: skip

    B, S, S_kv, H, G, K = (T.dynamic(n, i64) for n in ("B", "S", "S_kv", "H", "G", "K"))
    # Elements of dkv, its terms or factors, and of the sums of dq between parts.
    N, M = T.dynamic("N", i64), T.dynamic("M", i64)
    R = T.dynamic("R", i64)  # (token, head) pairs of `SinkShares`
    # Tiles of this launch along the sequence, each with a gather list of up to K slots.
    L = T.dynamic("L", i64)
    qb, qs, qh = (T.dynamic(n, i64) for n in ("q_b", "q_s", "q_h"))
    ob, os_, oh = (T.dynamic(n, i64) for n in ("do_b", "do_s", "do_h"))
    kb, ks, kg = (T.dynamic(n, i64) for n in ("kv_b", "kv_s", "kv_g"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    mb, ms, mg, mk = (T.dynamic(n, i64) for n in ("m_b", "m_s", "m_g", "m_k"))
    tb, ts, tg, pb, ps, sh = (T.dynamic(n, i64) for n in ("t_b", "t_s", "t_g", "p_b", "p_s", "sink_h"))
    ub, us, uh = (T.dynamic(n, i64) for n in ("out_b", "out_s", "out_h"))
    lb, ls, lh = (T.dynamic(n, i64) for n in ("lse_b", "lse_s", "lse_h"))
    eb, es, eh = (T.dynamic(n, i64) for n in ("dlse_b", "dlse_s", "dlse_h"))

    def tile_of(n, tiles):
        # Long lists come late in a text.
        return tiles - 1 - n if TOKENS > 1 and not IN_PARTS else n

    def extent(at, tile_0, heads_per_group):
        # Batch entry, tile along the sequence, group, first token and head, and how many heads and tokens there are.
        b, ti, g = (T.cast(at[n], i64) for n in (3, 2, 1))
        t = (tile_0 + ti) * TOKENS
        heads, head_0 = heads_per_group - at[0] * ROWS, g * heads_per_group + at[0] * ROWS
        return b, ti, g, t, head_0, T.min(heads, ROWS), T.cast(T.min(S - t, T.cast(TOKENS, i64)), "int32")

    def length_of(Lengths, at, slot_0):
        # Of a tile's list, or of its part from `slot_0` on.
        b, ti, g = (T.cast(at[n], i64) for n in (3, 2, 1))
        return T.max(0, T.min(T.max(Lengths[b, ti, g], 0) - slot_0, T.cast(K, "int32")))

    @T.macro
    def load_slots(found, Indices, b, ti, g, slot, length):
        # Entries of a thread's four slots of a block.
        T.call_extern(
            "handle", f"sparse_mla::load_slots<{INDEX}, {PASSES}>", found.data, T.address_of(Indices[b, ti, g, 0]),
            ik * INDEX_BYTES, slot, length,
        )  # fmt: skip

    @T.macro
    def next_rows(KV, Indices, b, ti, g, i, r0, c0, length, limit, found, rows, source, ok):
        # Rows of block i from the entries read before, and the entries of block i + 1.
        T.call_extern(
            "handle", f"sparse_mla::place_rows<{INDEX}, {PASSES}>", source.data, ok.data, found.data,
            T.address_of(KV[b, 0, g, c0]), ks * ITEM, limit,
        )  # fmt: skip
        for r in T.unroll(PASSES):
            rows[r] = T.if_then_else(ok[r] != 0, T.cast(found[r], "int32"), -1)
        load_slots(found, Indices, b, ti, g, (i + 1) * BLOCK_K + r0, length)

    @T.macro
    def gather(n, KV_s, r0, c0, source, ok):
        # A group of columns of the 64 rows of a block; an invalid slot is filled with zeros and not read.
        first, last = GROUPS[n]
        T.call_extern(
            "handle", f"sparse_mla::gather_rows<{(last - first) // STEP}>",
            T.access_ptr(KV_s[r0, first + c0], "r", 1), source.data, ok.data, 0, first,
        )  # fmt: skip

    @T.macro
    def load_heads(n, QdO_s, r0, c0, q_at, do_at, there, heads_free, tiles_before):
        # A group of columns of q and dout; rows that do not exist become zero.
        first, last = GROUPS[n]
        T.barrier_wait(heads_free[n], (tiles_before & 1) ^ 1)
        if n == 0:
            # While the first entries of the list are under way.
            T.call_extern(
                "handle", f"sparse_mla::gather_rows_in_turn<{last // STEP}, {2 * ROWS}>",
                T.access_ptr(QdO_s[r0, c0], "r", 1), q_at.data, there.data,
            )  # fmt: skip
            T.call_extern(
                "handle", f"sparse_mla::gather_rows_in_turn<{last // STEP}, {2 * ROWS}>",
                T.access_ptr(QdO_s[ROWS + r0, c0], "r", 1), do_at.data, there.data,
            )  # fmt: skip
        else:
            T.call_extern(
                "handle", f"sparse_mla::gather_rows<{(last - first) // STEP}, {2 * ROWS}>",
                T.access_ptr(QdO_s[r0, first + c0], "r", 1), q_at.data, there.data, 0, first,
            )  # fmt: skip
            T.call_extern(
                "handle", f"sparse_mla::gather_rows<{(min(last, D_V) - first) // STEP}, {2 * ROWS}>",
                T.access_ptr(QdO_s[ROWS + r0, first + c0], "r", 1), do_at.data, there.data, 0, first,
            )  # fmt: skip

    @T.macro
    def say_slots(i, step, slot_row, slot_to, rows, goal, r0):
        # The row of kv that a slot is, negative if it is invalid, and the row that its term goes to. They are there
        # when the copies of the next group of columns are, whose arrival at `kv_ready` comes behind them.
        if ORDERED:
            for r in T.unroll(PASSES):
                goal[r] = i * BLOCK_K + r * 16 + r0
        elif not IN_PARTS:
            T.call_extern("handle", "sparse_mla::spread", goal.data, rows.data)
        T.call_extern(
            "handle", "sparse_mla::say_slots", rows.data, goal.data, T.access_ptr(slot_row[step & 1, r0], "r", 1),
            T.access_ptr(slot_to[step & 1, r0], "r", 1),
        )  # fmt: skip

    @T.macro
    def gather_first(i, KV_s, Bits, slot_bits, b, ti, g, lane, length, r0, c0, source, ok, kv_ready):
        # The first group of columns of block i, and who selected its slots.
        if TOKENS > 1:
            load_bits(Bits, slot_bits, 0, b, ti, g, i * BLOCK_K, lane, length)
        gather(0, KV_s, r0, c0, source, ok)
        T.cp_async_barrier_noinc(kv_ready[0])

    @T.macro
    def scores(n, step, KV_s, QdO_s, s, dp, kv_ready):
        first = GROUPS[n][0]
        T.barrier_wait(kv_ready[n], step & 1)
        T.fence_proxy_async()
        T.call_extern(
            "handle", f"sparse_mla::scores<{DTYPE}, sparse_mla::{PARTS[n]}>",
            s.data, dp.data, T.access_ptr(KV_s[0, first], "r", 1), T.access_ptr(QdO_s[0, first], "r", 1),
        )  # fmt: skip

    @T.macro
    def add_dq(dq, dS_s, KV_s, first):
        # 128 columns. T.wgmma_gemm would have an arrival before it, for which the first of the scores' does.
        T.call_extern(
            "handle", f"sparse_mla::add_dq<{DTYPE}>", dq.data, T.access_ptr(dS_s[0, 0], "r", 1),
            T.access_ptr(KV_s[0, first], "r", 1),
        )  # fmt: skip

    def corner(X_s, thread, row=0, first=0):
        # What `store_operand` wants. What is written so, TileLang puts no barriers around.
        return T.access_ptr(X_s[row + thread // 32 * 16 + thread % 16, first + thread % 32 // 16 * 8], "r", 1)

    def place_of(P_s):
        # Where P is handed over: with a tail, where dout has none.
        return T.access_ptr(P_s[P_ROW, P_COLUMN] if TAIL else P_s[0], "r", 1)

    @T.macro
    def keep(acc, kept):
        T.call_extern("handle", f"sparse_mla::keep<{CHUNK}, {EXCHANGED}>", acc.data, kept.data)

    @T.macro
    def add(half, valid, pairs, to, rows, row_bytes):
        # Half of the rows of an accumulator, of the second half what was kept.
        T.call_extern(
            "handle",
            f"sparse_mla::add<{STORE}, {valid}, {2 if half else 4}, {CHUNK}, {EXCHANGED if half else 'false'}>",
            pairs.data, to[0], rows[2 * half], rows[2 * half + 1], row_bytes,
        )  # fmt: skip

    @T.macro
    def scale(acc, sm_scale):
        for k, d in T.Parallel(BLOCK_K, CHUNK):
            acc[k, d] *= sm_scale

    @T.macro
    def begin_chunk(acc, dS_s, QdO_s, none):
        T.call_extern(
            "handle", f"sparse_mla::begin_chunk<{DTYPE}>", acc.data, T.access_ptr(dS_s[0, 0], "r", 1),
            T.access_ptr(QdO_s[0, FIRST], "r", 1), none,
        )  # fmt: skip

    @T.macro
    def chunk(
        start, first, frees, freed, valid, acc, kept, p, dq_t, dS_s, QdO_s, KV_s, to, further, rows, row_bytes, sm_scale
    ):  # fmt: skip
        # Adds of a chunk of columns, those of its second half while the chunk of columns from `start` is computed; its
        # adds go `further` on.
        keep(acc, kept)
        add(0, valid, acc, to, rows, row_bytes)
        if first:
            T.call_extern(
                "handle", f"sparse_mla::begin_chunk_and_add_dq<{DTYPE}>", acc.data, dq_t.data,
                T.access_ptr(dS_s[0, 0], "r", 1), T.access_ptr(QdO_s[0, start], "r", 1),
                T.access_ptr(KV_s[0, D_V], "r", 1),
            )  # fmt: skip
        else:
            T.wgmma_gemm(dS_s, QdO_s[:ROWS, start : start + CHUNK], acc, clear_accum=True)
        add(1, valid, kept, to, rows, row_bytes)
        T.wait_wgmma(0)
        if first:
            T.barrier_arrive(freed)
        else:
            T.call_extern("handle", "sparse_mla::arrive_if", T.cast(frees, "int32"), freed)
        scale(acc, sm_scale)
        T.wgmma_gemm(p, QdO_s[ROWS:, start : start + CHUNK], acc)
        T.wait_wgmma(0)
        to[0] += further * 4

    @T.macro
    def stream(
        valid, i, step, blocks, acc, kept, p, dq_t, dS_s, QdO_s, KV_s, to, rows, row_bytes, sm_scale, ds_ready, ds_free,
        tail_free, heads_free,
    ):  # fmt: skip
        # All chunks of a block. With the last one q and dout come free, as they are filled again.
        if TAIL:
            chunk(
                0, True, True, tail_free, valid, acc, kept, p, dq_t, dS_s, QdO_s, KV_s, to, -D_V, rows, row_bytes,
                sm_scale,
            )  # fmt: skip
        for c in T.serial(D_V // CHUNK - 1):
            chunk(
                (c + 1) * CHUNK, False, (c == D_V // CHUNK - 2) & (i + 1 < blocks), ds_free, valid,
                acc, kept, p, dq_t, dS_s, QdO_s, KV_s, to, CHUNK, rows, row_bytes, sm_scale,
            )  # fmt: skip
            T.call_extern(
                "handle", "sparse_mla::arrive_if", T.cast((i + 1 == blocks) & (c % 2 == 0), "int32"),
                heads_free + T.cast(c * 4, "uint32"),
            )  # fmt: skip
        keep(acc, kept)
        add(0, valid, acc, to, rows, row_bytes)
        # The next block's first.
        if i + 1 < blocks:
            T.barrier_wait(ds_ready, (step + 1) & 1)
        begin_chunk(acc, dS_s, QdO_s, i + 1 == blocks)
        add(1, valid, kept, to, rows, row_bytes)
        T.wait_wgmma(0)
        scale(acc, sm_scale)
        to[0] += (FIRST - D_V + CHUNK) * 4

    @T.macro
    def store_factor(X_s, x_row, x_column, dKV, row_0, lane, first):
        # The [64 x 64] operand of a block: columns from `first` of its slots' rows.
        for r in T.unroll(PASSES):
            row, column = r * 16 + lane // 8, lane % 8 * VECTOR
            for v in T.vectorized(VECTOR):
                dKV[(row_0 + row) * FACTOR_COLUMNS + first + column + v] = X_s[x_row + row, x_column + column + v]

    @T.macro
    def store_factors(
        blocks, step, row_0, lane, dKV, dS_s, P_s, KV_s, dq_t, ds_ready, p_ready, ds_free, tail_free, heads_free
    ):  # fmt: skip
        for i in T.serial(blocks):
            T.barrier_wait(ds_ready, (step + i) & 1)
            if TAIL:
                T.wgmma_gemm(dS_s, KV_s[:, D_V:D], dq_t, transpose_A=True)
            store_factor(dS_s, 0, 0, dKV, row_0 + i * BLOCK_K, lane, 0)
            if TAIL:
                T.wait_wgmma(0)
                T.barrier_arrive(tail_free)
            T.barrier_wait(p_ready, (step + i) & 1)
            if i + 1 == blocks:
                for n in T.unroll(4):
                    T.barrier_arrive(heads_free[n])
            store_factor(P_s, P_ROW, P_COLUMN, dKV, row_0 + i * BLOCK_K, lane, ROWS)
            if i + 1 < blocks if TAIL else True:
                T.barrier_arrive(ds_free)

    @T.macro
    def start_dq(dq, Sums, starts, x, first, last):
        if IN_PARTS and starts == 0:
            for h, d in T.Parallel(ROWS, last - first):
                dq[h, d] = Sums[(x * ROWS + h) * D + first + d]
        else:
            T.fill(dq, 0)

    @T.macro
    def leave_dq(
        dq, X_s, x_row, dQ, Sums, ends, x, b, t, head_0, heads, left, lane, dq_scale, first, last, barrier
    ):  # fmt: skip
        # Columns [first, last) of the tile, through the same columns of shared memory from row `x_row` on; a named
        # barrier a warpgroup.
        if IN_PARTS and ends == 0:
            for h, d in T.Parallel(ROWS, last - first):
                Sums[(x * ROWS + h) * D + first + d] = dq[h, d]
        else:
            T.call_extern(
                "handle", f"sparse_mla::store_scaled<{ELEMENT[dtype]}, {(last - first) // 64}>", dq.data, dq_scale,
                corner(X_s, lane, x_row, first),
            )  # fmt: skip
            T.sync_threads(barrier, WARPGROUP)
            store_rows(dQ, X_s, b, t, head_0, heads, TOKENS, left, lane, first, last, x_row=x_row)

    @T.macro
    def leave_empty(
        dQ, Sums, SinkShares, starts, ends, has_sink, x, b, t, head_0, heads, left, lane, dq_scale
    ):  # fmt: skip
        # Of a tile without slots: dq and shares are 0, or of a part without slots what the sums say.
        if (has_sink & starts != 0) & (lane < ROWS) & exists(lane, TOKENS, heads, left):
            SinkShares[(b * S + t + token_of(lane, TOKENS)) * H + head_0 + head_of(lane, TOKENS)] = 0
        values = T.alloc_local([VECTOR], fp32)
        for r, u in T.grid(PASSES, D // STEP):
            row, column = r * 16 + lane // 8, u * STEP + lane % 8 * VECTOR
            for v in T.vectorized(VECTOR):
                values[v] = 0
            if IN_PARTS and starts == 0:
                for v in T.unroll(VECTOR):
                    values[v] = product(Sums[(x * ROWS + row) * D + column + v], dq_scale)
            if IN_PARTS and ends == 0:
                if starts != 0:
                    for v in T.vectorized(VECTOR):
                        Sums[(x * ROWS + row) * D + column + v] = 0
            elif exists(row, TOKENS, heads, left):
                for v in T.vectorized(VECTOR):
                    dQ[b, t + token_of(row, TOKENS), head_0 + head_of(row, TOKENS), column + v] = T.cast(
                        values[v], dtype
                    )

    @T.prim_func
    def sparse_mla_bwd(
        Q: T.StridedTensor((B, S, H, D), (qb, qs, qh, 1), dtype),
        KV: T.StridedTensor((B, S_kv, G, D), (kb, ks, kg, 1), dtype),
        dO: T.StridedTensor((B, S, H, D_V), (ob, os_, oh, 1), dtype),
        Indices: T.StridedTensor((B, L, G, K), (ib, is_, ig, ik), idx_t),
        Bits: T.StridedTensor((B, L, G, K), (mb, ms, mg, mk), "int32"),
        Lengths: T.StridedTensor((B, L, G), (tb, ts, tg), "int32"),
        Chosen: T.Tensor((1,), "int32"),
        QPositions: T.StridedTensor((B, S), (pb, ps), i64),
        Out: T.StridedTensor((B, S, H, D_V), (ub, us, uh, 1), dtype),
        Lse: T.StridedTensor((B, S, H), (lb, ls, lh), fp32),
        dLse: T.StridedTensor((B, S, H), (eb, es, eh), fp32),
        Sink: T.StridedTensor((H,), (sh,), fp32),
        SinkShares: T.Tensor((R,), fp32),
        dQ: T.Tensor((B, S, H, D), dtype),
        dKV: T.Tensor((N,), dtype if FACTORED else fp32),
        Sums: T.Tensor((M,), fp32),
        scale_log2: T.float32,
        sm_scale: T.float32,
        dq_scale: T.float32,
        root_unit: T.float32,
        heads_per_group: T.int32,
        tiles_per_group: T.int32,
        wanted: T.int32,
        tile_0: T.int32,
        slot_0: T.int32,
        part_slots: T.int32,
        starts: T.int32,
        ends: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
        has_sink: T.int32,
        ctas: T.int32,
        rounds: T.int32,
    ):
        tiles = T.cast(B * L * G * T.cast(tiles_per_group, i64), "int32")
        with T.Kernel(ctas_of(tiles, ctas, rounds), threads=THREADS) as bx:
            T.import_source(GATHER + LEAVE + SUBNORMAL + OPERAND + ROUNDED + ROW_DOT + PRODUCTS + DKV_STREAM)
            # q, and below it dout, so that one product takes kv to both.
            QdO_s = T.alloc_shared([2 * ROWS, D], dtype)
            if FACTORED:
                # As elsewhere follows from the products of dkv.
                T.annotate_layout({QdO_s: make_wgmma_swizzled_layout(QdO_s)})
            KV_s = T.alloc_shared([BLOCK_K, D], dtype)
            dS_s = T.alloc_shared([BLOCK_K, ROWS], dtype)
            # P by lanes, or in rows.
            if TAIL:
                P_s = QdO_s
            elif FACTORED:
                P_s = T.alloc_shared([BLOCK_K, ROWS], dtype)
            else:
                P_s = T.alloc_shared([BLOCK_K * ROWS], dtype, scope="shared")
            stats = T.alloc_shared([3, ROWS], fp32, scope="shared")
            slot_row = T.alloc_shared([2, BLOCK_K], "int32", scope="shared")
            slot_to = T.alloc_shared([2, BLOCK_K], "int32", scope="shared")
            # Who selected a slot, bit t for token t.
            slot_bits = T.alloc_shared([1, BLOCK_K if TOKENS > 1 else 1], "int32", scope="shared")

            kv_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * 4)
            heads_free = T.alloc_barrier(arrive_count=[WARPGROUP] * 4)
            stats_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            kv_free = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            if TAIL:  # noqa: SIM108
                tail_free = T.alloc_barrier(arrive_count=WARPGROUP)
            else:
                tail_free = kv_free
            ds_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            p_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            ds_free = T.alloc_barrier(arrive_count=2 * WARPGROUP)

            begin(Chosen, wanted, TOKENS, bx == ctas_of(tiles, ctas, rounds) - 1)
            tx = T.get_thread_binding()
            at = T.alloc_local([4], "int32")
            length = T.alloc_var("int32")
            blocks = T.alloc_var("int32")
            # Blocks before the present one, and tiles with slots before the present one, of all of the CTA's tiles.
            step = T.alloc_var("int32")
            tiles_before = T.alloc_var("int32")
            step = 0
            tiles_before = 0
            # First tile of this CTA, and how many it has.
            round_of = T.alloc_local([2], "int32")
            find_round(round_of, bx, tiles, ctas, rounds)
            start, mine = round_of[0], round_of[1]

            # Does: loads q, dout; gathers KV; row values; dq of columns 256..511. Consumes: heads_free, kv_free,
            # tail_free, ds_ready. Produces: kv_ready, stats_ready, ds_free.
            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(COPY_REGISTERS, 0)
                lane = tx - 2 * WARPGROUP
                r0 = lane // 8
                c0 = lane % 8 * 8
                limit = T.alloc_var(i64)
                found = T.alloc_local([PASSES], idx_t)
                rows = T.alloc_local([PASSES], "int32")
                ok = T.alloc_local([PASSES], "int32")
                # Rows that terms went to, or might have gone to.
                goal = T.alloc_local([PASSES], "int32")
                source = T.alloc_local([PASSES], i64)
                there = T.alloc_local([PASSES], "int32")
                q_at = T.alloc_local([PASSES], i64)
                do_at = T.alloc_local([PASSES], i64)
                out_at = T.alloc_local([PASSES], i64)
                values = T.alloc_local([AHEAD, 32], "int32")
                sums = T.alloc_local([PASSES], fp32)
                of_row = T.alloc_local([3], fp32)
                dq_r = T.alloc_fragment([ROWS, HALF], fp32)
                for w in T.serial(mine):
                    find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                    b, ti, g, t, head_0, heads, left = extent(at, tile_0, heads_per_group)
                    x = T.cast(start + w * ctas, i64)
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        length = length_of(Lengths, at, slot_0)
                    blocks = T.ceildiv(length, BLOCK_K)
                    if blocks == 0:
                        leave_empty(
                            dQ, Sums, SinkShares, starts, ends, has_sink, x, b, t, head_0, heads, left, lane, dq_scale
                        )
                    else:
                        limit = S_kv
                        if causal != 0:
                            if has_positions != 0:
                                limit = limit_at(QPositions[b, t], S_kv)
                            else:
                                limit = T.min(S_kv, t + S_kv - S + 1)
                        for r in T.unroll(PASSES):
                            goal[r] = -1
                        load_slots(found, Indices, b, ti, g, r0, length)
                        # Block 0, and q and dout as they come free: the first columns while the stream has several
                        # chunks left of the tile before, the last ones while it has one.
                        find_rows(q_at, there, Q, b, t, head_0, heads, TOKENS, left, r0, c0)
                        find_rows(do_at, there, dO, b, t, head_0, heads, TOKENS, left, r0, c0)
                        load_heads(0, QdO_s, r0, c0, q_at, do_at, there, heads_free, tiles_before)
                        next_rows(KV, Indices, b, ti, g, 0, r0, c0, length, limit, found, rows, source, ok)
                        T.barrier_wait(kv_free[0], (step & 1) ^ 1)
                        gather_first(0, KV_s, Bits, slot_bits, b, ti, g, lane, length, r0, c0, source, ok, kv_ready)
                        if LOOKS_AHEAD:
                            T.call_extern(
                                "handle", f"sparse_mla::look_ahead<{INDEX}>", goal.data, rows.data,
                                T.address_of(Indices[b, ti, g, 0]), ik * INDEX_BYTES, r0, length, limit,
                            )  # fmt: skip
                        say_slots(0, step, slot_row, slot_to, rows, goal, r0)
                        T.barrier_wait(kv_free[1], (step & 1) ^ 1)
                        gather(1, KV_s, r0, c0, source, ok)
                        gather(2, KV_s, r0, c0, source, ok)
                        # Its tail has been free since before `heads_free[0]`.
                        gather(3, KV_s, r0, c0, source, ok)
                        # While they come, out.
                        find_rows(out_at, there, Out, b, t, head_0, heads, TOKENS, left, r0, c0)
                        load_values(of_row, Lse, dLse, Sink, b, t, head_0, heads, TOKENS, left, lane)
                        load_out(0, values, out_at, there)
                        load_out(1, values, out_at, there)
                        load_out(2, values, out_at, there)
                        load_heads(1, QdO_s, r0, c0, q_at, do_at, there, heads_free, tiles_before)
                        T.cp_async_barrier_noinc(kv_ready[1])
                        load_heads(2, QdO_s, r0, c0, q_at, do_at, there, heads_free, tiles_before)
                        T.cp_async_barrier_noinc(kv_ready[2])
                        for r in T.unroll(PASSES):
                            sums[r] = 0
                        T.barrier_wait(kv_ready[0], step & 1)
                        add_dots(0, sums, values, QdO_s, r0, c0, dtype)
                        load_out(3, values, out_at, there)
                        load_heads(3, QdO_s, r0, c0, q_at, do_at, there, heads_free, tiles_before)
                        T.cp_async_barrier_noinc(kv_ready[3])
                        for n in T.unroll(1, 4):
                            T.barrier_wait(kv_ready[n], step & 1)
                            add_dots(n, sums, values, QdO_s, r0, c0, dtype)
                        say_stats(
                            sums, of_row, SinkShares, stats, b, t, head_0, heads, TOKENS, left, lane, root_unit,
                            has_sink & starts, stats_ready, S, H,
                        )  # fmt: skip

                        start_dq(dq_r, Sums, starts, x, HALF, D_V)
                        # Iteration i finishes block i and gathers the next.
                        for i in T.serial(blocks):
                            T.barrier_wait(ds_ready, step & 1)
                            next_rows(KV, Indices, b, ti, g, i + 1, r0, c0, length, limit, found, rows, source, ok)
                            if i < blocks - 1:
                                T.barrier_wait(kv_free[0], step & 1)
                                gather_first(
                                    i + 1, KV_s, Bits, slot_bits, b, ti, g, lane, length, r0, c0, source, ok, kv_ready
                                )
                                say_slots(i + 1, step + 1, slot_row, slot_to, rows, goal, r0)
                                T.barrier_wait(kv_free[1], step & 1)
                                gather(1, KV_s, r0, c0, source, ok)
                                T.cp_async_barrier_noinc(kv_ready[1])
                            # Behind those of the scores' warpgroup: the stream's products wait for less.
                            T.wgmma_gemm(dS_s, KV_s[:, HALF:D_V], dq_r, transpose_A=True)
                            T.wait_wgmma(0)
                            T.barrier_arrive(ds_free)
                            if i < blocks - 1:
                                gather(2, KV_s, r0, c0, source, ok)
                                T.cp_async_barrier_noinc(kv_ready[2])
                                if TAIL:
                                    T.barrier_wait(tail_free, step & 1)
                                gather(3, KV_s, r0, c0, source, ok)
                                T.cp_async_barrier_noinc(kv_ready[3])
                            step += 1
                        leave_dq(
                            dq_r, KV_s, 0, dQ, Sums, ends, x, b, t, head_0, heads, left, lane, dq_scale, HALF, D_V,
                            LEAVES[0],
                        )  # fmt: skip
                        T.sync_threads(LEAVES[0], WARPGROUP)
                        tiles_before += 1

            # Does: scores, P, dS; dq of columns 0..255. Produces: ds_ready, p_ready, kv_free.
            # Consumes: kv_ready, stats_ready, ds_free.
            elif tx < WARPGROUP:
                T.set_max_nreg(SCORE_REGISTERS, 1)
                s = T.alloc_fragment([BLOCK_K, ROWS], fp32)
                dp = T.alloc_fragment([BLOCK_K, ROWS], fp32)
                T.annotate_layout({s: accumulator(ROWS), dp: accumulator(ROWS)})
                p = T.alloc_fragment([BLOCK_K, ROWS], dtype)
                ds = T.alloc_fragment([BLOCK_K, ROWS], dtype)
                dq_0 = T.alloc_fragment([ROWS, 128], fp32)
                dq_1 = T.alloc_fragment([ROWS, 128], fp32)
                T.annotate_layout({dq_0: accumulator(128), dq_1: accumulator(128)})
                for w in T.serial(mine):
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                        length = length_of(Lengths, at, slot_0)
                    blocks = T.ceildiv(length, BLOCK_K)
                    if blocks > 0:
                        x = T.cast(start + w * ctas, i64)
                        start_dq(dq_0, Sums, starts, x, 0, 128)
                        start_dq(dq_1, Sums, starts, x, 128, HALF)
                        for i in T.serial(blocks):
                            scores(0, step, KV_s, QdO_s, s, dp, kv_ready)
                            scores(1, step, KV_s, QdO_s, s, dp, kv_ready)
                            scores(2, step, KV_s, QdO_s, s, dp, kv_ready)
                            scores(3, step, KV_s, QdO_s, s, dp, kv_ready)
                            T.barrier_wait(stats_ready, tiles_before & 1)
                            T.wait_wgmma(0)
                            for k, h in T.Parallel(BLOCK_K, ROWS):
                                s[k, h] = T.Select(
                                    slot_row[step & 1, k] >= 0 if TOKENS == 1 else selects(slot_bits[0, k], h, TOKENS),
                                    T.exp2(s[k, h] * scale_log2 - stats[0, h]),
                                    T.float32(0),
                                )
                            for k, h in T.Parallel(BLOCK_K, ROWS):
                                ds[k, h] = s[k, h] * (stats[1, h] * dp[k, h] + stats[2, h])
                            for k, h in T.Parallel(BLOCK_K, ROWS):
                                s[k, h] *= stats[1, h]
                            if not FACTORED:
                                for k, h in T.Parallel(BLOCK_K, ROWS):
                                    p[k, h] = s[k, h]
                            T.barrier_wait(ds_free, (step & 1) ^ 1)
                            T.call_extern(
                                "handle", "sparse_mla::store_operand", ds.data,
                                corner(dS_s, tx),
                            )  # fmt: skip
                            T.fence_proxy_async()
                            T.barrier_arrive(ds_ready)
                            T.barrier_wait(ds_ready, step & 1)
                            if FACTORED:
                                for k, h in T.Parallel(BLOCK_K, ROWS):
                                    P_s[P_ROW + k, P_COLUMN + h] = s[k, h]
                            else:
                                T.call_extern("handle", "sparse_mla::give", p.data, place_of(P_s))
                            T.barrier_arrive(p_ready)
                            add_dq(dq_0, dS_s, KV_s, 0)
                            add_dq(dq_1, dS_s, KV_s, 128)
                            T.wait_wgmma(1)
                            if i + 1 < blocks:
                                T.barrier_arrive(kv_free[0])
                            T.wait_wgmma(0)
                            if i + 1 < blocks:
                                T.barrier_arrive(kv_free[1])
                            step += 1

                        find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                        b, ti, g, t, head_0, heads, left = extent(at, tile_0, heads_per_group)
                        leave_dq(
                            dq_0, KV_s, 0, dQ, Sums, ends, x, b, t, head_0, heads, left, tx, dq_scale, 0, 128,
                            LEAVES[1],
                        )  # fmt: skip
                        T.barrier_arrive(kv_free[0])
                        leave_dq(
                            dq_1, KV_s, 0, dQ, Sums, ends, x, b, t, head_0, heads, left, tx, dq_scale, 128, HALF,
                            LEAVES[1],
                        )  # fmt: skip
                        T.barrier_arrive(kv_free[1])
                        tiles_before += 1

            # Does: stores dS and P; dq of the tail. Produces: ds_free, tail_free, heads_free.
            # Consumes: ds_ready, p_ready.
            elif FACTORED:
                T.set_max_nreg(STREAM_REGISTERS, 0)
                lane_f = tx - WARPGROUP
                dq_f = dS_s
                if TAIL:
                    dq_f = T.alloc_fragment([ROWS, TAIL], fp32)
                for w in T.serial(mine):
                    find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                    b, ti, g, t, head_0, heads, left = extent(at, tile_0, heads_per_group)
                    x = T.cast(start + w * ctas, i64)
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        length = length_of(Lengths, at, slot_0)
                    blocks = T.ceildiv(length, BLOCK_K)
                    if TAIL:
                        start_dq(dq_f, Sums, starts, x, D_V, D)
                    store_factors(
                        blocks, step, x * part_slots, lane_f, dKV, dS_s, P_s, KV_s, dq_f, ds_ready, p_ready, ds_free,
                        tail_free, heads_free,
                    )  # fmt: skip
                    step += blocks
                    if TAIL and blocks > 0:
                        # Through the place of P, which other warps may still read.
                        T.sync_threads(LEAVES[2], WARPGROUP)
                        leave_dq(
                            dq_f, QdO_s, ROWS, dQ, Sums, ends, x, b, t, head_0, heads, left, lane_f, dq_scale, D_V, D,
                            LEAVES[2],
                        )  # fmt: skip
                        T.barrier_arrive(ds_free)

            # Does: dkv; dq of the tail. Produces: ds_free, tail_free, heads_free. Consumes: ds_ready, p_ready.
            else:
                T.set_max_nreg(STREAM_REGISTERS, 0)
                lane_b = tx - WARPGROUP
                my_slot = T.alloc_var("int32")
                my_slot = lane_b // 32 * 16 + lane_b % 32 // 8 * 2
                my_rows = T.alloc_local([4], "int32")
                row_bytes = T.alloc_var("int32")
                row_bytes = T.cast((D if ORDERED else G * D) * 4, "int32")
                # Where this lane adds: bytes of the first row of kv, or of terms, in the columns of a chunk.
                to = T.alloc_local([1], i64)
                p_b = T.alloc_fragment([BLOCK_K, ROWS], dtype)
                acc = T.alloc_fragment([BLOCK_K, CHUNK], fp32)
                if TAIL:
                    dq_t = T.alloc_fragment([ROWS, TAIL], fp32)
                    T.annotate_layout({dq_t: accumulator(TAIL, WARPGROUP)})
                else:
                    dq_t = acc
                kept = T.alloc_local([16], fp32)
                heads_free_at = T.alloc_var("uint32")
                ds_free_at = T.alloc_var("uint32")
                ds_free_at = T.call_extern("uint32", "sparse_mla::kept_shared", T.address_of(ds_free[0]))
                heads_free_at = T.call_extern("uint32", "sparse_mla::kept_shared", T.address_of(heads_free[0]))
                for w in T.serial(mine):
                    find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        length = length_of(Lengths, at, slot_0)
                    blocks = T.ceildiv(length, BLOCK_K)
                    if blocks > 0:
                        x = T.cast(start + w * ctas, i64)
                        row_0 = (x * part_slots if ORDERED else T.cast(at[3], i64) * S_kv * G + T.cast(at[1], i64)) * D
                        to[0] = T.call_extern(i64, "sparse_mla::line", dKV.data, row_0 + T.cast(FIRST, i64))
                        if TAIL:
                            start_dq(dq_t, Sums, starts, x, D_V, D)
                        T.barrier_wait(ds_ready, step & 1)
                        begin_chunk(acc, dS_s, QdO_s, False)
                        T.wait_wgmma(0)
                        scale(acc, sm_scale)
                        for i in T.serial(blocks):
                            for n in T.unroll(4):
                                my_rows[n] = slot_to[step & 1, my_slot + n // 2 * 8 + n % 2]
                            T.barrier_wait(p_ready, step & 1)
                            T.call_extern("handle", "sparse_mla::take", p_b.data, place_of(P_s))
                            if not TAIL:
                                T.wgmma_gemm(p_b, QdO_s[ROWS:, FIRST : FIRST + CHUNK], acc)
                                T.wait_wgmma(0)
                            # ptxas makes a branch of every predicated add: they are for tiles with hardly a valid slot.
                            if (
                                T.call_extern(
                                    "int32", "sparse_mla::all_valid", T.access_ptr(slot_to[step & 1, 0], "r", 1)
                                )
                                != 0
                            ):
                                stream(
                                    "true", i, step, blocks, acc, kept, p_b, dq_t, dS_s, QdO_s, KV_s, to, my_rows,
                                    row_bytes, sm_scale, ds_ready, ds_free_at, tail_free, heads_free_at,
                                )  # fmt: skip
                            else:
                                stream(
                                    "false", i, step, blocks, acc, kept, p_b, dq_t, dS_s, QdO_s, KV_s, to, my_rows,
                                    row_bytes, sm_scale, ds_ready, ds_free_at, tail_free, heads_free_at,
                                )  # fmt: skip
                            step += 1
                        if TAIL:
                            # Through the place of P, which is given for the next tile when dS is free.
                            T.sync_warp()
                            find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                            b, ti, g, t, head_0, heads, left = extent(at, tile_0, heads_per_group)
                            leave_dq(
                                dq_t, QdO_s, ROWS, dQ, Sums, ends, x, b, t, head_0, heads, left, lane_b, dq_scale,
                                D_V, D, LEAVES[2],
                            )  # fmt: skip
                        T.barrier_arrive(ds_free)

    return sparse_mla_bwd
