"""Backward of sparse MLA for 65 to 128 heads: a tile per (token, group) and pair of CTAs, which split the columns.

The same sums as `backward.py`. CTA r of a cluster has columns 256 r .. 256 r + 255 of V, and of a tail of 64 its 32, of
all 128 heads of the tile: of q, dout, kv, dq and dkv. So each gathers half of kv's bytes, and adds half of dkv, summed
over 128 heads within a product. Scores are sums over columns: CTA r owns heads 64 r .. 64 r + 63, to whose scores the
peer sends its part, and sends their P and dS back.

Pipeline of one block of 64 slots, time down; there is one KV buffer.

    copy warpgroup                scores' warpgroup                      stream of dkv
    gather columns 0 .. 127       wait kv_ready[n]
    gather the rest               [S^T dP^T] of the peer's heads
                                  wait e_free, send them
                                  [S^T dP^T] of the own heads
                                  wait e_full, add what came, p_room
                                  P, dS; wait ds_free
                                  dS to shared memory and to the peer    wait ds_ready (of both halves)
    wait ds_ready                 dq of the own heads, columns 0 .. 127  dq tail, tail_free; tail of dS^T Q
    dq of columns 128 .. 255      wait p_room, P in place of what came,  wait p_ready, P to registers, frees E
    wait kv_free, gather 0 .. 127   and to the peer                      64 columns at a time:
    frees dS                      wait ds_ready, dq of the peer's heads    half of the rows added, half kept
    wait tail_free, gather rest     frees kv and the peer's dS             acc = dS^T Q under the adds of those
                                                                           sm_scale acc + P^T dO
                                                                         frees dS of both with the last dS^T Q

E, where the peer's scores come, is read by the thread that they were sent to. P of both halves then lies there until
the stream has it in registers: E of the next block may come (`e_free`) when the receiver's stream has P, and its copy
of its own P, which reads E, is done. What the CTAs send is counted in bytes; arrivals at the peer are bare, without a
scope: a release at cluster scope is a MEMBAR of the GPU, which waits for all adds under way. dq of the tail, used once
a block, lies in local memory beside: its registers are what chunks of 64 columns need.

A pair goes over tiles as CTAs do in `backward.py`: dq leaves through the columns of KV that it is made of, block 0 of
the next tile is gathered, row values are made, and q and dout come by panels as the stream frees them.
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import (
    BLOCK_K,
    COPY_REGISTERS,
    D_V,
    HALF,
    ITEM,
    ROWS,
    SCORE_REGISTERS,
    STREAM_REGISTERS,
    THREADS,
    WARPGROUP,
    Plan,
)
from .ptx import DKV_STREAM, ELEMENT, GATHER, LEAVE, OPERAND, PRODUCTS, ROUNDED, ROW_DOT, SUBNORMAL, WGMMA_TYPE
from .ptx_pair import PAIR
from .row_stats import load_values, say_stats
from .tile import PASSES, STEP, VECTOR, begin, ctas_of, exists, find_round, find_rows, find_tile, limit_at

# Named barriers of the warpgroups of copies and scores. TileLang counts its own from 3 on and knows of no others.
COPIES, SCORES = 13, 14
PANEL = 64  # columns of an operand tile in shared memory


def build(plan: Plan) -> PrimFunc:
    """The backward for `plan`; shapes, strides, scale and flags are run-time values.

    Annotations of a TileLang kernel are evaluated, so this file must not postpone them (no `from __future__`).
    """
    D = plan.D
    TAIL = D - D_V
    HALF_TAIL = TAIL // 2
    dtype, idx_t = plan.dtype, plan.index_dtype
    INDEX, INDEX_BYTES = ("int", 4) if idx_t == "int32" else ("long long", 8)
    DTYPE, ELEM = WGMMA_TYPE[dtype], ELEMENT[dtype]
    fp32, i64 = "float32", "int64"
    # Shared memory, in bytes: q over dout of each half of the heads in panels of 64 columns, kv, what the peer sends of
    # scores, in whose place P comes, dS of both halves, the tails of q and of kv.
    HEADS_AT, OF_HALF, OF_PANEL = 0, HALF // PANEL * 2 * ROWS * PANEL * ITEM, 2 * ROWS * PANEL * ITEM
    OPERAND_BYTES = BLOCK_K * ROWS * ITEM
    KV_AT = HEADS_AT + 2 * OF_HALF
    E_BYTES = 2 * BLOCK_K * ROWS * 4
    E_AT = KV_AT + HALF // PANEL * OPERAND_BYTES
    DS_AT = E_AT + E_BYTES
    Q_TAIL_AT = DS_AT + 2 * OPERAND_BYTES
    KV_TAIL_AT = Q_TAIL_AT + 2 * ROWS * HALF_TAIL * ITEM
    BYTES = KV_TAIL_AT + BLOCK_K * HALF_TAIL * ITEM

    B, S, S_kv, H, G, K = (T.dynamic(n, i64) for n in ("B", "S", "S_kv", "H", "G", "K"))
    N, M = T.dynamic("N", i64), T.dynamic("M", i64)
    R = T.dynamic("R", i64)
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

    def call(name, *arguments):
        return T.call_extern("handle", f"sparse_mla::{name}", *arguments)

    def place(X, at):
        # With "w" TileLang would put barriers around.
        return T.access_ptr(X[at], "r", 1)

    def bar(barrier, n=0):
        return T.address_of(barrier[n])

    def length_of(Lengths, at, K, has_length):
        b, ti, g = (T.cast(at[n], i64) for n in (3, 2, 1))
        whole = T.cast(K, "int32")
        return T.if_then_else(has_length != 0, T.max(0, T.min(Lengths[b, ti, g], whole)), whole)

    def extent(at, tile_0, heads_per_group):
        # Batch entry, token, first head, and how many heads there are.
        b, ti, g = (T.cast(at[n], i64) for n in (3, 2, 1))
        return b, tile_0 + ti, g * heads_per_group, heads_per_group

    @T.macro
    def load_entries(found, Indices, b, ti, g, i, r0, length):
        call(
            f"load_slots<{INDEX}, {PASSES}>", found.data, T.address_of(Indices[b, ti, g, 0]), ik * INDEX_BYTES,
            i * BLOCK_K + r0, length,
        )  # fmt: skip

    @T.macro
    def gather_left(X, rows, KV, b, g, column):
        call(
            "gather_block<false>", place(X, KV_AT), place(X, KV_AT), rows.data, T.address_of(KV[b, 0, g, column]),
            ks * ITEM, 0, 0,
        )  # fmt: skip

    @T.macro
    def gather_right(X, rows, KV, b, g, column, tail_further):
        call(
            f"gather_block<{'true' if TAIL else 'false'}>", place(X, KV_AT + 2 * OPERAND_BYTES),
            place(X, KV_TAIL_AT if TAIL else 0), rows.data, T.address_of(KV[b, 0, g, column]), ks * ITEM, 2 * PANEL,
            tail_further,
        )  # fmt: skip

    @T.macro
    def load_panel(n, half, X, Q, b, t, head_0, heads, r0, column, at, there, first):
        # 64 columns of the rows of a half of q, or of dout from row `first` on.
        find_rows(at, there, Q, b, t, head_0 + half * ROWS, T.min(heads - half * ROWS, ROWS), 1, 1, r0, column)
        call(
            "load_panel", place(X, HEADS_AT + half * OF_HALF + n * OF_PANEL + first * PANEL * ITEM), at.data,
            there.data, n * PANEL,
        )  # fmt: skip

    @T.macro
    def say_slots(step, slot_row, slot_to, rows, goal, r0):
        call("spread", goal.data, rows.data)
        call(
            "say_slots", rows.data, goal.data, T.access_ptr(slot_row[step & 1, r0], "r", 1),
            T.access_ptr(slot_to[step & 3, r0], "r", 1),
        )  # fmt: skip

    @T.macro
    def scores(X, c, half):
        # Of the heads of a half, of the columns of the second group.
        call(
            f"part_of_scores<{DTYPE}, false>", c.data, place(X, KV_AT + 2 * OPERAND_BYTES),
            place(X, HEADS_AT + half * OF_HALF + 2 * OF_PANEL),
        )  # fmt: skip
        call(
            f"last_of_scores<{DTYPE}, {'true' if TAIL else 'false'}>", c.data, place(X, KV_TAIL_AT if TAIL else KV_AT),
            place(X, Q_TAIL_AT + half * (ROWS * HALF_TAIL * ITEM)),
        )  # fmt: skip

    @T.macro
    def send_operand(X, at, rank, peer, ready, tx):
        # The own half of dS or P to the peer, whose half is to come.
        if tx == 0:
            call("copy_to_peer", place(X, at + rank * OPERAND_BYTES), OPERAND_BYTES, bar(ready), peer)
        call("expect", bar(ready), OPERAND_BYTES)

    @T.macro
    def add_dq(X, dq, half, panel):
        call(
            f"add_dq<{DTYPE}>", dq.data, place(X, DS_AT + half * OPERAND_BYTES),
            place(X, KV_AT + panel * OPERAND_BYTES),
        )  # fmt: skip

    @T.macro
    def add(valid, columns, half, pairs, to, slot_to, step, my_slot, row_bytes):
        # Half of the rows of an accumulator, of the second half what was kept.
        call(
            f"add_rows<{valid}, {columns}, {2 if half else 4}>", pairs.data, to,
            T.access_ptr(slot_to[step & 3, my_slot + 8 * half], "r", 1), row_bytes,
        )  # fmt: skip

    @T.macro
    def begin_chunk(X, acc, at_q):
        call(f"dS_q<{DTYPE}>", acc.data, place(X, DS_AT), place(X, at_q))

    @T.macro
    def finish_chunk(X, acc, p, at_q, sm_scale):
        call("finish<32>", acc.data)
        call("scale_by", acc.data, sm_scale, 32)
        call(f"add_P_dO<{DTYPE}>", acc.data, p.data, place(X, at_q + ROWS * PANEL * ITEM))
        call("finish<32>", acc.data)

    @T.macro
    def chunks(
        valid, X, acc, acc_t, kept, p, to, to_tail, slot_to, step, my_slot, row_bytes, sm_scale, ds_free, peer,
        heads_free, last,
    ):  # fmt: skip
        # The columns of V. Each chunk is begun under the adds of half of the rows of the one before, the first under
        # those of the tail.
        if TAIL:
            call("keep<32>", acc_t.data, kept.data)
            add(valid, 32, 0, acc_t, to[0] + to_tail, slot_to, step, my_slot, row_bytes)
            begin_chunk(X, acc, HEADS_AT)
            add(valid, 32, 1, kept, to[0] + to_tail, slot_to, step, my_slot, row_bytes)
            finish_chunk(X, acc, p, HEADS_AT, sm_scale)
        for m in T.serial(HALF // PANEL - 1):
            n = m + 1
            at_q = HEADS_AT + n * OF_PANEL
            call(f"keep<{PANEL}>", acc.data, kept.data)
            add(valid, PANEL, 0, acc, to[0], slot_to, step, my_slot, row_bytes)
            begin_chunk(X, acc, at_q)
            add(valid, PANEL, 1, kept, to[0], slot_to, step, my_slot, row_bytes)
            call("finish<32>", acc.data)
            if n == HALF // PANEL - 1:
                call("arrive_here", bar(ds_free))
                call("arrive_there", bar(ds_free), peer)
            # With the last one q and dout come free, as they are filled again: panels but the last.
            call("arrive_if_here", T.cast(last, "int32"), bar(heads_free, n - 1))
            finish_chunk(X, acc, p, at_q, sm_scale)
            to[0] += PANEL * 4
        call("arrive_if_here", T.cast(last, "int32"), bar(heads_free, HALF // PANEL - 1))
        call(f"keep<{PANEL}>", acc.data, kept.data)
        add(valid, PANEL, 0, acc, to[0], slot_to, step, my_slot, row_bytes)
        add(valid, PANEL, 1, kept, to[0], slot_to, step, my_slot, row_bytes)
        to[0] -= (HALF - PANEL) * 4

    @T.macro
    def leave(X, dQ, dq, half, panel, b, t, head_0, heads, rank, dq_scale, barrier):
        call(
            f"leave_rows<{ELEM}>", dq.data, dq_scale, place(X, KV_AT + panel * OPERAND_BYTES),
            T.call_extern(
                i64, "sparse_mla::kept",
                T.address_of(dQ[b, t, T.min(head_0 + half * ROWS, H - 1), rank * HALF + panel * PANEL]),
            ), T.cast(D * ITEM, i64), T.cast(heads - half * ROWS, "int32"), barrier,
        )  # fmt: skip

    @T.macro
    def leave_empty(dQ, SinkShares, has_sink, b, t, head_0, heads, lane):
        # Of a tile without slots dq and shares are 0: each CTA does so for its heads.
        if (has_sink != 0) & (lane < ROWS) & (lane < heads):
            SinkShares[(b * S + t) * H + head_0 + lane] = 0
        for r, u in T.grid(PASSES, D // STEP):
            row, column = r * 16 + lane // 8, u * STEP + lane % 8 * VECTOR
            if exists(row, 1, heads, 1):
                for v in T.vectorized(VECTOR):
                    dQ[b, t, head_0 + row, column + v] = T.cast(0, dtype)

    @T.prim_func
    def sparse_mla_bwd_pair(
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
        dKV: T.Tensor((N,), fp32),
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
        tiles = T.cast(B * L * G, "int32")
        with T.Kernel(2 * ctas_of(tiles, ctas, rounds), threads=THREADS, cluster_dims=2) as bx:
            T.import_source(GATHER + LEAVE + SUBNORMAL + OPERAND + ROUNDED + ROW_DOT + PRODUCTS + DKV_STREAM + PAIR)
            X = T.alloc_shared([BYTES], "uint8")
            stats = T.alloc_shared([3, ROWS], fp32, scope="shared")
            slot_row = T.alloc_shared([2, BLOCK_K], "int32", scope="shared")
            # The stream reads it up to the last adds, behind which the next block but one may have begun.
            slot_to = T.alloc_shared([4, BLOCK_K], "int32", scope="shared")

            kv_ready = T.alloc_barrier(arrive_count=[WARPGROUP] * 2)
            stats_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            # Of warps.
            heads_free = T.alloc_barrier(arrive_count=[4] * 4)
            kv_free = T.alloc_barrier(arrive_count=4)
            tail_free = T.alloc_barrier(arrive_count=4)
            e_full = T.alloc_cluster_barrier(arrive_count=1)
            e_free = T.alloc_cluster_barrier(arrive_count=8)
            p_room = T.alloc_cluster_barrier(arrive_count=4)
            ds_ready = T.alloc_cluster_barrier(arrive_count=1)
            p_ready = T.alloc_cluster_barrier(arrive_count=1)
            # Copies and stream of both, and the peer's scores.
            ds_free = T.alloc_cluster_barrier(arrive_count=20)

            begin(Chosen, wanted, 1, bx == 2 * ctas_of(tiles, ctas, rounds) - 1)
            tx = T.get_thread_binding()
            rank = T.alloc_var("int32")
            rank = T.cast(bx, "int32") % 2
            peer = T.alloc_var("int32")
            peer = rank ^ 1
            at = T.alloc_local([4], "int32")
            length = T.alloc_var("int32")
            blocks = T.alloc_var("int32")
            # Blocks before the present one, and tiles with slots before the present one, of all of the pair's tiles.
            step = T.alloc_var("int32")
            tiles_before = T.alloc_var("int32")
            step = 0
            tiles_before = 0
            # First tile of this pair, and how many it has.
            round_of = T.alloc_local([2], "int32")
            find_round(round_of, T.cast(bx, "int32") // 2, tiles, ctas, rounds)
            start, mine = round_of[0], round_of[1]

            # Does: loads q, dout; gathers KV; row values; dq of columns 128..255. Consumes: kv_free, tail_free,
            # ds_ready. Produces: kv_ready, stats_ready, ds_free.
            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(COPY_REGISTERS, 0)
                lane = tx - 2 * WARPGROUP
                r0 = lane // 8
                c0 = lane % 8 * 8
                limit = T.alloc_var(i64)
                found = T.alloc_local([PASSES], idx_t)
                rows = T.alloc_local([PASSES], "int32")
                goal = T.alloc_local([PASSES], "int32")
                do_at = T.alloc_local([PASSES], i64)
                there = T.alloc_local([PASSES], "int32")
                q_at = T.alloc_local([PASSES], i64)
                sums = T.alloc_local([PASSES], fp32)
                of_row = T.alloc_local([3], fp32)
                dq_0 = T.alloc_local([64], fp32)
                dq_1 = T.alloc_local([64], fp32)
                # From a row's first own column of V to its own tail, in bytes.
                tail_further = (D_V + rank * (HALF_TAIL - HALF)) * ITEM
                for w in T.serial(mine):
                    find_tile(at, start + w * ctas, B, G, L, 1)
                    ti, g = T.cast(at[2], i64), T.cast(at[1], i64)
                    b, t, head_0, heads = extent(at, tile_0, heads_per_group)
                    own_0, own = T.cast(rank * ROWS, i64) + head_0, T.min(heads - rank * ROWS, ROWS)
                    length = length_of(Lengths, at, K, has_length)
                    blocks = T.ceildiv(length, BLOCK_K)
                    if blocks == 0:
                        leave_empty(dQ, SinkShares, has_sink, b, t, own_0, own, lane)
                    else:
                        limit = S_kv
                        if causal != 0:
                            if has_positions != 0:
                                limit = limit_at(QPositions[b, t], S_kv)
                            else:
                                limit = T.min(S_kv, t + S_kv - S + 1)
                        for r in T.unroll(PASSES):
                            goal[r] = -1
                        load_entries(found, Indices, b, ti, g, 0, r0, length)
                        find_rows(q_at, there, Out, b, t, own_0, own, 1, 1, r0, c0)
                        find_rows(do_at, there, dO, b, t, own_0, own, 1, 1, r0, c0)
                        load_values(of_row, Lse, dLse, Sink, b, t, own_0, own, 1, 1, lane)
                        # Block 0, into what has left of the tile before.
                        call(f"find_rows<{INDEX}>", rows.data, found.data, limit)
                        load_entries(found, Indices, b, ti, g, 1, r0, length)
                        T.barrier_wait(kv_free, (step & 1) ^ 1)
                        gather_left(X, rows, KV, b, g, c0 + rank * HALF)
                        call(
                            f"look_ahead<{INDEX}>", goal.data, rows.data, T.address_of(Indices[b, ti, g, 0]),
                            ik * INDEX_BYTES, r0, length, limit,
                        )  # fmt: skip
                        say_slots(step, slot_row, slot_to, rows, goal, r0)
                        if TAIL:
                            T.barrier_wait(tail_free, (step & 1) ^ 1)
                        gather_right(X, rows, KV, b, g, c0 + rank * HALF, tail_further)
                        # Row values while the stream ends the tile before.
                        call(f"dot_rows<{ELEM}>", sums.data, q_at.data, do_at.data, there.data)
                        say_stats(
                            sums, of_row, SinkShares, stats, b, t, own_0, own, 1, 1, lane, root_unit, has_sink,
                            stats_ready, S, H,
                        )  # fmt: skip
                        # q and dout, panels of both halves as they come free.
                        for n in T.unroll(HALF // PANEL):
                            T.barrier_wait(heads_free[n], (tiles_before & 1) ^ 1)
                            for h in T.unroll(2):
                                load_panel(n, h, X, Q, b, t, head_0, heads, r0, c0 + rank * HALF, q_at, there, 0)
                                if TAIL and n == 0:
                                    call(
                                        "load_tail", place(X, Q_TAIL_AT + h * ROWS * HALF_TAIL * ITEM), q_at.data,
                                        there.data, tail_further,
                                    )  # fmt: skip
                                load_panel(n, h, X, dO, b, t, head_0, heads, r0, c0 + rank * HALF, q_at, there, ROWS)
                            if n % 2 == 1:
                                T.cp_async_barrier_noinc(kv_ready[n // 2])
                        call("zero<64>", dq_0.data)
                        call("zero<64>", dq_1.data)
                        # Iteration i finishes block i and gathers the next.
                        for i in T.serial(blocks):
                            call("wait_for_peer", bar(ds_ready), step & 1)
                            call("begin_products")
                            add_dq(X, dq_0, 0, 2)
                            add_dq(X, dq_1, 1, 2)
                            call(f"find_rows<{INDEX}>", rows.data, found.data, limit)
                            if i + 1 < blocks:
                                call("load_goals", goal.data, T.access_ptr(slot_to[step & 3, r0], "r", 1))
                                say_slots(step + 1, slot_row, slot_to, rows, goal, r0)
                                T.barrier_wait(kv_free, step & 1)
                                gather_left(X, rows, KV, b, g, c0 + rank * HALF)
                                T.cp_async_barrier_noinc(kv_ready[0])
                            call("finish<64>", dq_0.data)
                            call("finish<64>", dq_1.data)
                            call("arrive_here", bar(ds_free))
                            call("arrive_there", bar(ds_free), peer)
                            if i + 1 < blocks:
                                if TAIL:
                                    T.barrier_wait(tail_free, step & 1)
                                gather_right(X, rows, KV, b, g, c0 + rank * HALF, tail_further)
                                T.cp_async_barrier_noinc(kv_ready[1])
                            load_entries(found, Indices, b, ti, g, i + 2, r0, length)
                            step += 1
                        find_tile(at, T.call_extern("int32", "sparse_mla::opaque", start + w * ctas), B, G, L, 1)
                        b_c, t_c, head_c, heads_c = extent(at, tile_0, heads_per_group)
                        leave(X, dQ, dq_0, 0, 2, b_c, t_c, head_c, heads_c, rank, dq_scale, COPIES)
                        leave(X, dQ, dq_1, 1, 2, b_c, t_c, head_c, heads_c, rank, dq_scale, COPIES)
                        call("sync_warpgroup", COPIES)
                        tiles_before += 1

            # Does: scores, P, dS; dq of columns 0..127. Produces: ds_ready, p_ready, kv_free, e_full, p_room.
            # Consumes: kv_ready, stats_ready, ds_free, e_free.
            elif tx < WARPGROUP:
                T.set_max_nreg(SCORE_REGISTERS, 1)
                c = T.alloc_local([64], fp32)
                dq_mine = T.alloc_local([64], fp32)
                dq_theirs = T.alloc_local([64], fp32)
                p = T.alloc_local([16], "uint32")
                ds = T.alloc_local([16], "uint32")
                for w in T.serial(mine):
                    find_tile(at, start + w * ctas, B, G, L, 1)
                    blocks = T.ceildiv(length_of(Lengths, at, K, has_length), BLOCK_K)
                    call("zero<64>", dq_mine.data)
                    call("zero<64>", dq_theirs.data)
                    for i in T.serial(blocks):
                        call("expect", bar(e_full), E_BYTES)
                        T.barrier_wait(kv_ready[0], step & 1)
                        T.fence_proxy_async()
                        call(
                            f"part_of_scores<{DTYPE}, true>", c.data, place(X, KV_AT),
                            place(X, HEADS_AT + peer * OF_HALF),
                        )  # fmt: skip
                        T.barrier_wait(kv_ready[1], step & 1)
                        T.fence_proxy_async()
                        scores(X, c, peer)
                        call("finish<64>", c.data)
                        call("wait_for_peer", bar(e_free), (step & 1) ^ 1)
                        call("send", c.data, place(X, E_AT), bar(e_full), peer)
                        call(
                            f"part_of_scores<{DTYPE}, true>", c.data, place(X, KV_AT),
                            place(X, HEADS_AT + rank * OF_HALF),
                        )  # fmt: skip
                        scores(X, c, rank)
                        if i == 0:
                            T.barrier_wait(stats_ready, tiles_before & 1)
                        call("finish<64>", c.data)
                        call("wait_for_peer", bar(e_full), step & 1)
                        call("add_received", c.data, place(X, E_AT))
                        # What the peer wrote here as a thread does, its copy of P will write.
                        call("proxy_fence")
                        call("arrive_there", bar(p_room), peer)
                        call(
                            f"softmax<{ELEM}>", c.data, p.data, ds.data, T.access_ptr(stats[0, 0], "r", 1),
                            T.access_ptr(slot_row[step & 1, 0], "r", 1), scale_log2,
                        )  # fmt: skip
                        call("wait_for_peer", bar(ds_free), (step & 1) ^ 1)
                        call("put_operand", ds.data, place(X, DS_AT + rank * OPERAND_BYTES))
                        call("proxy_fence")
                        call("sync_warpgroup", SCORES)
                        send_operand(X, DS_AT, rank, peer, ds_ready, tx)
                        add_dq(X, dq_mine, rank, 0)
                        call("give", p.data, place(X, E_AT + rank * OPERAND_BYTES))
                        call("proxy_fence")
                        call("sync_warpgroup", SCORES)
                        call("wait_for_peer", bar(p_room), step & 1)
                        send_operand(X, E_AT, rank, peer, p_ready, tx)
                        call("wait_for_peer", bar(ds_ready), step & 1)
                        add_dq(X, dq_theirs, peer, 0)
                        call("finish<64>", dq_mine.data)
                        call("finish<64>", dq_theirs.data)
                        if i + 1 < blocks:
                            call("arrive_here", bar(kv_free))
                        call("arrive_there", bar(ds_free), peer)
                        step += 1
                    if blocks > 0:
                        find_tile(at, T.call_extern("int32", "sparse_mla::opaque", start + w * ctas), B, G, L, 1)
                        b_s, t_s, head_s, heads_s = extent(at, tile_0, heads_per_group)
                        leave(X, dQ, dq_mine, rank, 0, b_s, t_s, head_s, heads_s, rank, dq_scale, SCORES)
                        leave(X, dQ, dq_theirs, peer, 0, b_s, t_s, head_s, heads_s, rank, dq_scale, SCORES)
                        call("arrive_here", bar(kv_free))
                        tiles_before += 1

            # Does: dkv; dq of the tail. Produces: ds_free, tail_free, e_free. Consumes: ds_ready, p_ready.
            else:
                T.set_max_nreg(STREAM_REGISTERS, 0)
                lane_b = tx - WARPGROUP
                my_slot = T.alloc_var("int32")
                my_slot = lane_b // 32 * 16 + lane_b % 32 // 8 * 2
                row_bytes = T.alloc_var("int32")
                row_bytes = T.cast(G * D * 4, "int32")
                to = T.alloc_local([1], i64)
                p = T.alloc_local([32], "uint32")
                acc = T.alloc_local([32], fp32)
                kept = T.alloc_local([16], fp32)
                acc_t = T.alloc_local([16], fp32)
                dq_t = T.alloc_local([32], fp32)
                away = T.alloc_local([8], "float32x4")
                for w in T.serial(mine):
                    find_tile(at, start + w * ctas, B, G, L, 1)
                    blocks = T.ceildiv(length_of(Lengths, at, K, has_length), BLOCK_K)
                    call("zero<32>", dq_t.data)
                    call("put_away", dq_t.data, away.data)
                    row_0 = (T.cast(at[3], i64) * S_kv * G + T.cast(at[1], i64)) * D
                    to[0] = T.call_extern(i64, "sparse_mla::line", dKV.data, row_0 + T.cast(rank * HALF, i64))
                    to_tail = T.cast((D_V + rank * (HALF_TAIL - HALF)) * 4, i64)
                    for i in T.serial(blocks):
                        if TAIL:
                            call("take_back", dq_t.data, away.data)
                        call("wait_for_peer", bar(ds_ready), step & 1)
                        if TAIL:
                            call(
                                f"tail_products<{DTYPE}>", acc_t.data, dq_t.data, place(X, DS_AT), place(X, Q_TAIL_AT),
                                place(X, KV_TAIL_AT),
                            )  # fmt: skip
                            call("finish<16>", acc_t.data)
                            call("finish<32>", dq_t.data)
                            call("put_away", dq_t.data, away.data)
                            call("arrive_here", bar(tail_free))
                            call("scale_by", acc_t.data, sm_scale, 16)
                        else:
                            begin_chunk(X, acc, HEADS_AT)
                        call("wait_for_peer", bar(p_ready), step & 1)
                        call("take", p.data, place(X, E_AT))
                        call("take", T.access_ptr(p[16], "r", 1), place(X, E_AT + OPERAND_BYTES))
                        call("arrive_there", bar(e_free), peer)
                        # What came shows that the peer's copy of its own P, from where the next is sent to, is done.
                        call("arrive_here", bar(e_free))
                        if not TAIL:
                            finish_chunk(X, acc, p, HEADS_AT, sm_scale)
                        # ptxas makes a branch of every predicated add: they are for tiles with hardly a valid slot.
                        if (
                            T.call_extern("int32", "sparse_mla::all_valid", T.access_ptr(slot_to[step & 3, 0], "r", 1))
                            != 0
                        ):
                            chunks(
                                "true", X, acc, acc_t, kept, p, to, to_tail, slot_to, step, my_slot, row_bytes,
                                sm_scale, ds_free, peer, heads_free, i + 1 == blocks,
                            )  # fmt: skip
                        else:
                            chunks(
                                "false", X, acc, acc_t, kept, p, to, to_tail, slot_to, step, my_slot, row_bytes,
                                sm_scale, ds_free, peer, heads_free, i + 1 == blocks,
                            )  # fmt: skip
                        step += 1
                    if TAIL and blocks > 0:
                        find_tile(at, T.call_extern("int32", "sparse_mla::opaque", start + w * ctas), B, G, L, 1)
                        b_b, t_b, head_b, heads_b = extent(at, tile_0, heads_per_group)
                        call("take_back", dq_t.data, away.data)
                        for h in T.unroll(2):
                            call(
                                f"leave_tail<{ELEM}>", T.access_ptr(dq_t[16 * h], "r", 1), dq_scale,
                                T.call_extern(
                                    i64, "sparse_mla::kept",
                                    T.address_of(dQ[b_b, t_b, T.min(head_b + h * ROWS, H - 1), D_V + rank * HALF_TAIL]),
                                ), T.cast(D * ITEM, i64), T.cast(heads_b - h * ROWS, "int32"),
                            )  # fmt: skip
            T.cluster_sync()

    return sparse_mla_bwd_pair
