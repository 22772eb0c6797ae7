"""Forward of sparse MLA: a tile per (token, group, 64 heads), or of several tokens with few heads.

    s = sm_scale q k     lse = ln sum exp(s)     out = sigmoid(lse - sink) sum exp(s - lse) v     over the valid slots

`q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]` -> `out [B, S, H, 512]`, `lse [B, S, H]`. Online softmax
over pairs of 64-slot blocks (Milakov and Gimelshein 2018); two warpgroups own half of the output columns each, as in
FlashMLA's prefill. Any head count up to 64 fills the tile with zero rows: the gather is the same, and it sets the time.
So few heads leave room for several tokens: the rows of a tile are then `Plan.tokens` tokens times their padded heads,
`indices` the union lists of `unions.py [B, L, G, C]`, and `bits` beside them says which tokens selected a slot.

Pipeline of one pair of blocks, time down (L, R: columns 0..255 and 256..D of a KV buffer; the P of a block is handed
over in the tail columns of its own buffer, where there is a tail):

    copy warpgroup            matrix warpgroup 0 (out L)        matrix warpgroup 1 (out R)
    gather L of block 0       (S0 = Q K0^T is there)            wait R, L of block 1
    gather R of block 0       row max m0            -- m0 -->   S1 = Q K1^T begins; O_R rescaled to m0
    gather R of block 1       P0 = exp(S0 - m0)     -- P0 -->   O_R += P0 V0_R begins
    gather L of block 1       O_L += P0 V0_L                    S1 is there: m1 = max(m0, row max S1)
    wait left_free[0]         frees left_free[0]    <-- m1 --   P1 = exp(S1 - m1)
      (next pair) ...         O_L rescaled to m1    <-- P1 --   frees right_free[0]; O_R rescaled to m1
    wait right_free[1]        O_L += P1 V1_L                    O_R += P1 V1_R
                              S0 of the next pair               frees right_free[1]
                              frees left_free[1]

The first `ctas` CTAs go over up to `rounds` tiles each, `bx`, `bx + ctas`, ...; where lists differ in length, the tiles
that are left have a CTA each, which goes to the SM that is free first. At the end of a tile the copy warpgroup runs
ahead: q of the next one follows the last scores, block 0 the last products but one, while out leaves through block 1's
buffer. For the tile `ahead` further along the sequence, about the next one of this SM, it asks q and list into the L2
before the last pair. q comes in two halves, since the scores of L need its first alone.

The copy warpgroup fills the four half buffers in the order in which they come free. Validity is decided once a slot: an
invalid slot is filled with zeros without a read, and its scores become -inf after the product; with several tokens, so
do those of rows whose token did not select the slot. A row's m lags behind what a block finds while P of every slot is
at most a quarter of the sum before it (and 256), so that most blocks leave O as it is; P of a slot that has most of the
weight is 1, which rounding leaves alone. Tiles of several tokens start from the last, whose lists are the longest in a
text. A product's scores start from nothing: a product that adds to values from registers would wait for them, and ptxas
makes that wait one for all products in flight.
"""

import tilelang.language as T  # noqa: I001
from tilelang.layout import make_wgmma_swizzled_layout
from tvm.tirx import PrimFunc

from ..scales import LN_2
from .plan import (
    BLOCK_K, D_V, HALF, ITEM, LINE, MATRIX_REGISTERS, PRODUCER_REGISTERS,
    ROWS, THREADS, WARPGROUP, Plan,
)  # fmt: skip
from .ptx import (
    ELEMENT, GATHER, LEAVE, OPERAND, PART_OF_SCORES, ROUNDED, ROW_SCALE, SUBNORMAL, VALID, WGMMA_TYPE,
)  # fmt: skip
from .tile import (
    PASSES, STEP, begin, ctas_of, exists, find_round, find_tile, head_of, if_exists, limit_at, load_bits, store_rows,
    token_of,
)  # fmt: skip

# Running maximum before the first valid slot: below every score, and finite, so that differences are never NaN.
FLOOR = -1e38
# Named barriers at the end of a tile, of the matrix warpgroups. TileLang counts from 3 on and knows of no others.
LEAVES = (14, 15)


def build(plan: Plan) -> PrimFunc:
    """The forward for `plan`; shapes, strides, scale and flags are run-time values.

    Annotations of a TileLang kernel are evaluated, so this file must not postpone them (no `from __future__`).
    """
    D = plan.D
    TAIL = D - D_V
    P_LO = D_V if TAIL else 0  # first column of P in its buffer
    TOKENS = plan.tokens
    dtype, idx_t = plan.dtype, plan.index_dtype
    INDEX, INDEX_BYTES = ("int", 4) if idx_t == "int32" else ("long long", 8)
    fp32, i64 = "float32", "int64"

    B, S, S_kv, H, G, K = (T.dynamic(n, i64) for n in ("B", "S", "S_kv", "H", "G", "K"))
    # Tiles along the sequence, each with a gather list of up to K slots.
    L = S if TOKENS == 1 else T.dynamic("L", i64)
    qb, qs, qh = (T.dynamic(n, "int64") for n in ("q_b", "q_s", "q_h"))
    kb, ks, kg = (T.dynamic(n, "int64") for n in ("kv_b", "kv_s", "kv_g"))
    ib, is_, ig, ik = (T.dynamic(n, "int64") for n in ("i_b", "i_s", "i_g", "i_k"))
    mb, ms, mg, mk = (T.dynamic(n, "int64") for n in ("m_b", "m_s", "m_g", "m_k"))
    tb, ts, tg, pb, ps, sh = (T.dynamic(n, "int64") for n in ("t_b", "t_s", "t_g", "p_b", "p_s", "sink_h"))

    def tile_of(n, tiles):
        return n if TOKENS == 1 else tiles - 1 - n

    def extent(at, heads_per_group):
        # Batch entry, tile along the sequence, group, first token and head, and how many heads and tokens there are.
        b, ti, g = (T.cast(at[n], i64) for n in (3, 2, 1))
        heads, left = heads_per_group - at[0] * ROWS, S - ti * TOKENS
        head_0 = g * heads_per_group + at[0] * ROWS
        return b, ti, g, ti * TOKENS, head_0, T.min(heads, ROWS), T.cast(T.min(left, T.cast(TOKENS, i64)), "int32")

    def length_of(Lengths, at):
        b, ti, g = (T.cast(at[n], i64) for n in (3, 2, 1))
        return T.max(0, T.min(Lengths[b, ti, g], T.cast(K, "int32")))

    def pairs_of(length):
        # A list without slots has a pair too, of none but invalid ones.
        return T.max(1, T.ceildiv(length, 2 * BLOCK_K))

    @T.macro
    def load_slots(found, Indices, b, ti, g, slot, length):
        # Entries of a thread's eight slots of a pair.
        T.call_extern(
            "handle", f"sparse_mla::load_slots<{INDEX}>", found.data, T.address_of(Indices[b, ti, g, 0]),
            ik * INDEX_BYTES, slot, length,
        )  # fmt: skip

    @T.macro
    def gather(KV_s, block, rows, ok, r0, c0, first, last):
        # Columns [first, last) of the 64 rows of a block; an invalid slot is filled with zeros and not read.
        T.call_extern(
            "handle", f"sparse_mla::gather_rows<{(last - first) // STEP}>",
            T.address_of(KV_s[block, r0, first + c0]), rows.data, ok.data, block, first,
        )  # fmt: skip

    @T.macro
    def gather_q(Q_s, rows, ok, r0, c0, first, last, in_turn=False):
        # Columns [first, last) of q; rows that do not exist become zero.
        if in_turn:
            T.call_extern(
                "handle", f"sparse_mla::gather_rows_in_turn<{(last - first) // STEP}, {ROWS}>",
                T.address_of(Q_s[r0, first + c0]), rows.data, ok.data, first,
            )  # fmt: skip
        else:
            T.call_extern(
                "handle", f"sparse_mla::gather_rows<{(last - first) // STEP}>",
                T.address_of(Q_s[r0, first + c0]), rows.data, ok.data, 0, first,
            )  # fmt: skip

    @T.macro
    def ask_for_tile(q_rows, Indices, b, ti, g, t, lane, length, ahead):
        # q and list of tile ti, `ahead` tiles further on, into the L2; of a list as much as 128 threads ask for.
        if (ahead != 0) & (t >= 0) & (t + TOKENS <= S):
            T.call_extern("handle", f"sparse_mla::ask_for_rows<{D * ITEM}>", q_rows.data, ahead * TOKENS * qs * ITEM)
            entry = lane * (LINE // INDEX_BYTES)
            if entry < length:
                T.call_extern("handle", "sparse_mla::ask_for", T.address_of(Indices[b, ti, g, entry]))

    @T.macro
    def say_valid(slots, ready, block, ok):
        T.call_extern("handle", "sparse_mla::say_valid", ok.data, T.address_of(slots[0, 0]), block)
        T.barrier_arrive(ready[block])

    @T.macro
    def load_valid(valid, slots, block):
        if TOKENS == 1:
            T.call_extern("handle", "sparse_mla::load_valid", valid.data, T.access_ptr(slots[0, 0], "r", 1), block)

    @T.macro
    def mask(s, valid, slots, block):
        # -inf where the slot is invalid, or where the row's token did not select it.
        if TOKENS == 1:
            T.call_extern("handle", "sparse_mla::mask", s.data, valid.data)
        else:
            T.call_extern(
                "handle", f"sparse_mla::mask_tokens<{TOKENS}>", s.data, T.access_ptr(slots[block, 0], "r", BLOCK_K)
            )

    def row_of_max(maxima, thread):
        row = thread // 32 * 16 + thread % 32 // 4
        return T.call_extern("uint32", "sparse_mla::kept_shared", T.address_of(maxima[row]))

    def corner_of_p(P_s, block, thread):
        row, column = thread // 32 * 16 + thread % 16, P_LO + thread % 32 // 16 * 8
        return T.call_extern("uint32", "sparse_mla::kept_shared", T.address_of(P_s[block, row, column]))

    @T.macro
    def hand_over(p, p_at, ready):
        # P of a block to the other warpgroup. With a tail it overwrites what the product of its scores has read: one of
        # all four warps, complete for all when it is for one. (So one thread frees a buffer in CUTLASS's pipelines.)
        T.call_extern("handle", "sparse_mla::store_operand", p.data, p_at)
        T.fence_proxy_async()
        T.barrier_arrive(ready)

    # A row's maximum grows where a block exceeds `bound`, which is there before the block's scores are: it follows from
    # the warpgroup's own sum, a part of the row's.
    @T.macro
    def find_reach(reach, sums, maxima, scale_log2):
        T.call_extern("handle", "sparse_mla::find_reach", reach.data, sums.data, maxima.data, scale_log2)

    @T.macro
    def bound_by(bound, reach, maxima, scale_log2):
        T.call_extern("handle", "sparse_mla::bound_by", bound.data, reach.data, maxima.data, scale_log2)

    @T.macro
    def add_sums(p, sums, scale):
        # sums = scale sums + the row sums of p, each lane over the columns it holds.
        T.call_extern("handle", "sparse_mla::add_sums", p.data, sums.data, scale.data)

    @T.macro
    def weigh(total, other, lse, maxima, mine, others, sink, sinks, sums_ready, scale_log2, phase):
        # lse, and instead of the sums of exponentials sigmoid(lse - sink) / their sum over both warpgroups.
        T.call_extern("handle", "sparse_mla::quad_sums", total.data)
        T.copy(total, mine)
        T.copy(sinks[phase, :], sink)
        T.barrier_arrive(sums_ready)
        T.barrier_wait(sums_ready, phase)
        T.copy(others, other)
        for h in T.Parallel(ROWS):
            total[h] += other[h]
        for h in T.Parallel(ROWS):
            lse[h] = T.if_then_else(total[h] > 0, (T.log2(total[h]) + maxima[h] * scale_log2) * LN_2, -T.infinity(fp32))
        for h in T.Parallel(ROWS):
            total[h] = T.if_then_else(
                total[h] > 0, T.call_extern(fp32, "sparse_mla::weight_over", total[h], lse[h] - sink[h]), 0.0
            )

    # Part of a block's scores: one group of products, and one arrival before it, where the warpgroup has touched the
    # scores since another product's.
    @T.macro
    def add_scores(s, Q_s, KV_s, block, first, last, begins=False, arrives=False, commits=False):
        flags = ", ".join(str(flag).lower() for flag in (begins, arrives, commits))
        T.call_extern(
            "handle", f"sparse_mla::part_of_scores<{WGMMA_TYPE[dtype]}, {last - first}, {flags}>", s.data,
            T.access_ptr(Q_s[0, first], "r", 1), T.access_ptr(KV_s[block, 0, first], "r", 1),
        )  # fmt: skip

    @T.macro
    def leave(o, weights, KV_s, Out, b, t, head_0, heads, left, lane, first, barrier):
        # Half of the columns of out, from `first` on, by way of block 1's buffer.
        corner = T.access_ptr(KV_s[1, lane // 32 * 16 + lane % 16, first + lane % 32 // 16 * 8], "r", 1)
        T.call_extern(
            "handle", f"sparse_mla::store_weighted<{ELEMENT[dtype]}, {HALF // STEP}>", o.data, weights.data, corner
        )
        T.sync_threads(barrier, WARPGROUP)
        store_rows(Out, KV_s, b, t, head_0, heads, TOKENS, left, lane, first, first + HALF, (1,))

    @T.macro
    def rescale(o, scale):
        T.call_extern("handle", "sparse_mla::rescale", o.data, scale.data)

    @T.prim_func
    def sparse_mla_fwd(
        Q: T.StridedTensor((B, S, H, D), (qb, qs, qh, 1), dtype),
        KV: T.StridedTensor((B, S_kv, G, D), (kb, ks, kg, 1), dtype),
        Indices: T.StridedTensor((B, L, G, K), (ib, is_, ig, ik), idx_t),
        Bits: T.StridedTensor((B, L, G, K), (mb, ms, mg, mk), "int32"),
        Lengths: T.StridedTensor((B, L, G), (tb, ts, tg), "int32"),
        Chosen: T.Tensor((1,), "int32"),
        QPositions: T.StridedTensor((B, S), (pb, ps), "int64"),
        Sink: T.StridedTensor((H,), (sh,), fp32),
        Out: T.Tensor((B, S, H, D_V), dtype),
        Lse: T.Tensor((B, S, H), fp32),
        scale_log2: T.float32,
        heads_per_group: T.int32,
        tiles_per_group: T.int32,
        wanted: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
        ctas: T.int32,
        rounds: T.int32,
        ahead: T.int32,
    ):
        tiles = T.cast(B * L * G * T.cast(tiles_per_group, i64), "int32")
        with T.Kernel(ctas_of(tiles, ctas, rounds), threads=THREADS) as bx:
            T.import_source(GATHER + LEAVE + OPERAND + SUBNORMAL + ROUNDED + ROW_SCALE + VALID + PART_OF_SCORES)
            Q_s = T.alloc_shared([ROWS, D], dtype)
            T.annotate_layout({Q_s: make_wgmma_swizzled_layout(Q_s)})
            KV_s = T.alloc_shared([2, BLOCK_K, D], dtype)
            # Which slots are valid, 16 a word (ptx.VALID), or of each slot who selected it, bit t for token t.
            slots = T.alloc_shared([2, 4 if TOKENS == 1 else BLOCK_K], "int32", scope="shared")
            max_0 = T.alloc_shared([ROWS], fp32, scope="shared")
            max_1 = T.alloc_shared([ROWS], fp32, scope="shared")
            sum_0 = T.alloc_shared([ROWS], fp32, scope="shared")
            sum_1 = T.alloc_shared([ROWS], fp32, scope="shared")
            sinks = T.alloc_shared([2, ROWS], fp32, scope="shared")
            if TAIL:  # noqa: SIM108
                P_s = KV_s
            else:
                P_s = T.alloc_shared([2, BLOCK_K, BLOCK_K], dtype)

            q_free = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            left_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            right_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            slots_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            left_free = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            right_free = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            max_0_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            max_1_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            p_0_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            p_1_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            sums_ready = T.alloc_barrier(arrive_count=2 * WARPGROUP)

            begin(Chosen, wanted, TOKENS, bx == ctas_of(tiles, ctas, rounds) - 1)
            tx = T.get_thread_binding()
            at = T.alloc_local([4], "int32")
            length = T.alloc_var("int32")
            pairs = T.alloc_var("int32")
            # Pairs before the present one, of all of the CTA's tiles.
            step = T.alloc_var("int32")
            step = 0
            # First tile of this CTA, and how many it has.
            round_of = T.alloc_local([2], "int32")
            find_round(round_of, bx, tiles, ctas, rounds)
            start, mine = round_of[0], round_of[1]

            # Does: loads q, gathers KV. Produces: left_ready, right_ready, slots_ready. Consumes: left_, right_free.
            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                lane = tx - 2 * WARPGROUP
                r0 = lane // 8
                c0 = lane % 8 * 8
                limit = T.alloc_var("int64")
                found = T.alloc_local([8], idx_t)
                rows = T.alloc_local([8], "int64")
                ok = T.alloc_local([8], "int32")
                q_rows = T.alloc_local([4], "int64")
                q_ok = T.alloc_local([4], "int32")
                for w in T.serial(mine):
                    find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                    b, ti, g, t, head_0, heads, left = extent(at, heads_per_group)
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        length = length_of(Lengths, at)
                    pairs = pairs_of(length)
                    limit = S_kv
                    if causal != 0:
                        if has_positions != 0:
                            limit = limit_at(QPositions[b, t], S_kv)
                        else:
                            limit = T.min(S_kv, t + S_kv - S + 1)

                    load_slots(found, Indices, b, ti, g, r0, length)
                    for j in T.unroll(PASSES):
                        token, head = if_exists(j * 16 + r0, TOKENS, heads, left)
                        q_ok[j] = T.cast(exists(j * 16 + r0, TOKENS, heads, left), "int32")
                        q_rows[j] = T.call_extern(
                            "int64", "sparse_mla::kept", T.address_of(Q[b, t + token, head_0 + head, c0])
                        )
                    # No barrier of its own says that q is there: those of the buffers gathered behind it do.
                    T.barrier_wait(q_free, (w & 1) ^ 1)
                    gather_q(Q_s, q_rows, q_ok, r0, c0, 0, HALF)
                    # A read of the sinks from global memory would stand in the way of the last step.
                    if lane < ROWS:
                        T.ptx_cp_async(
                            T.access_ptr(sinks[w & 1, lane], "w", 1),
                            T.access_ptr(Sink[head_0 + if_exists(lane, TOKENS, heads, left)[1]], "r", 1),
                            1,
                        )

                    for i in T.serial(pairs):
                        T.call_extern(
                            "handle", f"sparse_mla::place_rows<{INDEX}>", rows.data, ok.data, found.data,
                            T.address_of(KV[b, 0, g, c0]), ks * ITEM, limit,
                        )  # fmt: skip
                        load_slots(found, Indices, b, ti, g, (i + 1) * 2 * BLOCK_K + r0, length)
                        if i + 1 == pairs:
                            ask_for_tile(q_rows, Indices, b, ti + ahead, g, t + ahead * TOKENS, lane, length, ahead)

                        T.barrier_wait(left_free[0], (step & 1) ^ 1)
                        if TOKENS > 1:
                            load_bits(Bits, slots, 0, b, ti, g, 2 * i * BLOCK_K, lane, length)
                            T.cp_async_barrier_noinc(slots_ready[0])
                        gather(KV_s, 0, rows, ok, r0, c0, 0, HALF)
                        T.cp_async_barrier_noinc(left_ready[0])
                        if i == 0:
                            # The scores begin with L: what R needs comes after it.
                            gather_q(Q_s, q_rows, q_ok, r0, c0, HALF, D, in_turn=True)

                        T.barrier_wait(right_free[0], (step & 1) ^ 1)
                        gather(KV_s, 0, rows, ok, r0, c0, HALF, D)
                        T.cp_async_barrier_noinc(right_ready[0])
                        # The words come behind the copies, which last longer. Before them the copies' barriers would
                        # tell of the words too, and without a wait for them alone ptxas reads them too early.
                        if TOKENS == 1:
                            say_valid(slots, slots_ready, 0, ok)

                        T.barrier_wait(right_free[1], (step & 1) ^ 1)
                        if TOKENS > 1:
                            load_bits(Bits, slots, 1, b, ti, g, (2 * i + 1) * BLOCK_K, lane, length)
                            T.cp_async_barrier_noinc(slots_ready[1])
                        gather(KV_s, 1, rows, ok, r0, c0, HALF, D_V)
                        T.cp_async_barrier_noinc(right_ready[1])

                        T.barrier_wait(left_free[1], (step & 1) ^ 1)
                        gather(KV_s, 1, rows, ok, r0, c0, 0, HALF)
                        if TAIL:
                            gather(KV_s, 1, rows, ok, r0, c0, D_V, D)
                        T.cp_async_barrier_noinc(left_ready[1])
                        if TOKENS == 1:
                            say_valid(slots, slots_ready, 1, ok)
                        step += 1

            # Does: even blocks' scores, out columns 0..255, lse. Produces: max_0, P0. Consumes: max_1, P1.
            elif tx < WARPGROUP:
                T.set_max_nreg(MATRIX_REGISTERS, 1)
                o_l = T.alloc_fragment([ROWS, HALF], fp32)
                s_0 = T.alloc_fragment([ROWS, BLOCK_K], fp32)
                p_0 = T.alloc_fragment([ROWS, BLOCK_K], dtype)
                m_prev_0 = T.alloc_fragment([ROWS], fp32)
                m_0 = T.alloc_fragment([ROWS], fp32)
                m_both_0 = T.alloc_fragment([ROWS], fp32)
                scale_0 = T.alloc_fragment([ROWS], fp32)
                l_0 = T.alloc_fragment([ROWS], fp32)
                l_i_0 = T.alloc_fragment([ROWS], fp32)
                sink_0 = T.alloc_fragment([ROWS], fp32)
                reach_0 = T.alloc_local([2], fp32)
                bound_0 = T.alloc_fragment([ROWS], fp32)
                valid_0 = T.alloc_local([4], "int32")
                max_0_at = T.alloc_var("uint32")
                p_0_at = T.alloc_var("uint32")
                max_0_at = row_of_max(max_0, tx)
                p_0_at = corner_of_p(P_s, 0, tx)
                for w in T.serial(mine):
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                        length = length_of(Lengths, at)
                    pairs = pairs_of(length)
                    T.fill(o_l, 0)
                    T.fill(l_0, 0)
                    T.fill(m_both_0, FLOOR)
                    T.fill(bound_0, FLOOR)

                    # Always so. Unconditional, its descriptors are kept for the other product of scores, and spilled.
                    if ctas > 0:
                        T.barrier_wait(left_ready[0], step & 1)
                        T.fence_proxy_async()
                        add_scores(s_0, Q_s, KV_s, 0, 0, HALF, begins=True, arrives=True)
                        T.barrier_wait(right_ready[0], step & 1)
                        T.fence_proxy_async()
                        add_scores(s_0, Q_s, KV_s, 0, HALF, D, commits=True)
                        T.barrier_wait(slots_ready[0], step & 1)
                        load_valid(valid_0, slots, 0)
                        T.wait_wgmma(0)

                    for i in T.serial(pairs):
                        mask(s_0, valid_0, slots, 0)
                        T.copy(m_both_0, m_prev_0)
                        T.reduce_max(s_0, m_0, dim=1, clear=True)
                        for h in T.Parallel(ROWS):
                            m_0[h] = T.if_then_else(m_0[h] > bound_0[h], m_0[h], m_prev_0[h])
                        T.call_extern("handle", "sparse_mla::say_rows", m_0.data, max_0_at)
                        T.barrier_arrive(max_0_ready)
                        for h in T.Parallel(ROWS):
                            scale_0[h] = T.exp2((m_prev_0[h] - m_0[h]) * scale_log2)
                        for h, k in T.Parallel(ROWS, BLOCK_K):
                            s_0[h, k] = T.exp2(s_0[h, k] * scale_log2 - m_0[h] * scale_log2)
                        T.copy(s_0, p_0)
                        hand_over(p_0, p_0_at, p_0_ready)
                        rescale(o_l, scale_0)
                        T.wgmma_gemm(p_0, KV_s[0, :, :HALF], o_l)
                        add_sums(s_0, l_0, scale_0)
                        find_reach(reach_0, l_0, m_0, scale_log2)
                        T.barrier_wait(max_1_ready, step & 1)
                        T.copy(max_1, m_both_0)
                        bound_by(bound_0, reach_0, m_both_0, scale_log2)
                        for h in T.Parallel(ROWS):
                            scale_0[h] = T.exp2((m_0[h] - m_both_0[h]) * scale_log2)
                        for h in T.Parallel(ROWS):
                            l_0[h] *= scale_0[h]
                        T.wait_wgmma(0)
                        T.barrier_arrive(left_free[0])
                        if i + 1 == pairs:
                            T.barrier_arrive(q_free)
                        rescale(o_l, scale_0)
                        T.barrier_wait(p_1_ready, step & 1)
                        T.wgmma_gemm(P_s[1, :, P_LO : P_LO + BLOCK_K], KV_s[1, :, :HALF], o_l)
                        if i + 1 < pairs:
                            # The next pair's scores follow at once: their product needs nothing of this pair. L is a
                            # group of its own, so that the product before can be waited for.
                            T.barrier_wait(left_ready[0], (step + 1) & 1)
                            T.fence_proxy_async()
                            add_scores(s_0, Q_s, KV_s, 0, 0, HALF, begins=True, commits=True)
                            T.wait_wgmma(1)
                            T.barrier_arrive(left_free[1])
                            T.barrier_wait(right_ready[0], (step + 1) & 1)
                            T.fence_proxy_async()
                            add_scores(s_0, Q_s, KV_s, 0, HALF, D, commits=True)
                            T.barrier_wait(slots_ready[0], (step + 1) & 1)
                            load_valid(valid_0, slots, 0)
                            T.wait_wgmma(0)
                        else:
                            weigh(l_0, l_i_0, m_0, m_both_0, sum_0, sum_1, sink_0, sinks, sums_ready, scale_log2, w & 1)
                            T.wait_wgmma(0)
                        step += 1

                    find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                    b, ti, g, t, head_0, heads, left = extent(at, heads_per_group)
                    for h in T.Parallel(ROWS):
                        if exists(h, TOKENS, heads, left):
                            Lse[b, t + token_of(h, TOKENS), head_0 + head_of(h, TOKENS)] = m_0[h]
                    leave(o_l, l_0, KV_s, Out, b, t, head_0, heads, left, tx, 0, LEAVES[0])
                    T.barrier_arrive(left_free[1])

            # Does: odd blocks' scores, out columns 256..511. Produces: max_1, P1. Consumes: max_0, P0.
            else:
                T.set_max_nreg(MATRIX_REGISTERS, 1)
                o_r = T.alloc_fragment([ROWS, HALF], fp32)
                s_1 = T.alloc_fragment([ROWS, BLOCK_K], fp32)
                p_1 = T.alloc_fragment([ROWS, BLOCK_K], dtype)
                m_prev_1 = T.alloc_fragment([ROWS], fp32)
                m_1 = T.alloc_fragment([ROWS], fp32)
                m_both_1 = T.alloc_fragment([ROWS], fp32)
                scale_1 = T.alloc_fragment([ROWS], fp32)
                l_1 = T.alloc_fragment([ROWS], fp32)
                l_i_1 = T.alloc_fragment([ROWS], fp32)
                sink_1 = T.alloc_fragment([ROWS], fp32)
                reach_1 = T.alloc_local([2], fp32)
                bound_1 = T.alloc_fragment([ROWS], fp32)
                valid_1 = T.alloc_local([4], "int32")
                max_1_at = T.alloc_var("uint32")
                p_1_at = T.alloc_var("uint32")
                max_1_at = row_of_max(max_1, tx - WARPGROUP)
                p_1_at = corner_of_p(P_s, 1, tx - WARPGROUP)
                for w in T.serial(mine):
                    length = T.cast(K, "int32")
                    if has_length != 0:
                        find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                        length = length_of(Lengths, at)
                    pairs = pairs_of(length)
                    T.fill(o_r, 0)
                    T.fill(l_1, 0)
                    T.fill(m_both_1, FLOOR)
                    for n in T.unroll(2):
                        reach_1[n] = FLOOR

                    for i in T.serial(pairs):
                        T.barrier_wait(right_ready[1], step & 1)
                        T.fence_proxy_async()
                        add_scores(s_1, Q_s, KV_s, 1, HALF, D_V, begins=True, arrives=True)
                        T.barrier_wait(left_ready[1], step & 1)
                        T.fence_proxy_async()
                        add_scores(s_1, Q_s, KV_s, 1, 0, HALF, commits=not TAIL)
                        if TAIL:
                            add_scores(s_1, Q_s, KV_s, 1, D_V, D, commits=True)
                        T.barrier_wait(slots_ready[1], step & 1)
                        load_valid(valid_1, slots, 1)
                        # Block 0 comes first in both warpgroups, so that its buffers are free again while block 1 is
                        # under way; here it is taken up beside the product of block 1's scores.
                        T.barrier_wait(max_0_ready, step & 1)
                        T.copy(m_both_1, m_prev_1)
                        T.copy(max_0, m_both_1)
                        bound_by(bound_1, reach_1, m_both_1, scale_log2)
                        for h in T.Parallel(ROWS):
                            scale_1[h] = T.exp2((m_prev_1[h] - m_both_1[h]) * scale_log2)
                        rescale(o_r, scale_1)
                        for h in T.Parallel(ROWS):
                            l_1[h] *= scale_1[h]
                        T.barrier_wait(p_0_ready, step & 1)
                        T.wgmma_gemm(P_s[0, :, P_LO : P_LO + BLOCK_K], KV_s[0, :, HALF:D_V], o_r)
                        T.wait_wgmma(1)
                        mask(s_1, valid_1, slots, 1)
                        T.reduce_max(s_1, m_1, dim=1, clear=True)
                        T.copy(m_both_1, m_prev_1)
                        for h in T.Parallel(ROWS):
                            m_both_1[h] = T.if_then_else(m_1[h] > bound_1[h], m_1[h], m_both_1[h])
                        T.call_extern("handle", "sparse_mla::say_rows", m_both_1.data, max_1_at)
                        T.barrier_arrive(max_1_ready)
                        for h in T.Parallel(ROWS):
                            scale_1[h] = T.exp2((m_prev_1[h] - m_both_1[h]) * scale_log2)
                        for h, k in T.Parallel(ROWS, BLOCK_K):
                            s_1[h, k] = T.exp2(s_1[h, k] * scale_log2 - m_both_1[h] * scale_log2)
                        T.copy(s_1, p_1)
                        hand_over(p_1, p_1_at, p_1_ready)
                        T.wait_wgmma(0)
                        T.barrier_arrive(right_free[0])
                        if i + 1 == pairs:
                            T.barrier_arrive(q_free)
                        rescale(o_r, scale_1)
                        T.wgmma_gemm(p_1, KV_s[1, :, HALF:D_V], o_r)
                        add_sums(s_1, l_1, scale_1)
                        find_reach(reach_1, l_1, m_both_1, scale_log2)
                        if i + 1 == pairs:
                            weigh(l_1, l_i_1, m_1, m_both_1, sum_1, sum_0, sink_1, sinks, sums_ready, scale_log2, w & 1)
                        T.wait_wgmma(0)
                        if i + 1 < pairs:
                            T.barrier_arrive(right_free[1])
                        step += 1

                    find_tile(at, tile_of(start + w * ctas, tiles), B, G, L, tiles_per_group)
                    b, ti, g, t, head_0, heads, left = extent(at, heads_per_group)
                    leave(o_r, l_1, KV_s, Out, b, t, head_0, heads, left, tx - WARPGROUP, HALF, LEAVES[1])
                    T.barrier_arrive(right_free[1])

    return sparse_mla_fwd
