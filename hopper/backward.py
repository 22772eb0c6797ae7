"""Backward of sparse MLA: one CTA per (token, group, tile of 64 heads), or per tile of several tokens with few heads.

    p_hat = exp(s - lse)   p = w p_hat   dP = dout v   dS = p_hat (w dP + (dlse - w Delta))
    dq = sm_scale sum dS k               dkv[row] += sm_scale dS q, and p dout on the first 512 columns

`q`, `dout`, `kv`, `indices` and the per-row `stats` of `preprocess.py` -> `dq [B, S, H, D]` and adds into fp32
`dkv [B, S_kv, G, D]`. Scores are kept transposed (slots x heads), so that P and dS are the left operands of dkv as they
stand. dq stays in registers; dkv leaves in 64-column chunks, as vector adds of whole 128-byte lines. With several
tokens a tile's slots are the union of their rows, as in `forward.py`, and a row of kv is added to once for all of them.

Pipeline of one block of 64 slots, time down (one KV buffer: it is free once dq has read it, and the next gather runs
under the dkv chunks and their adds, the longest part):

    copy warpgroup                  matrix warpgroups 0 and 1 (w: heads 32 w, columns 256 w)
    gather columns 0..511           wait kv_ready
    kv_ready                        S^T = K Q^T, dP^T = V dO^T for 32 heads
    wait stage_done                 wait tail_ready; S^T += tail
    gather the tail, tail_ready     P, dS to shared memory, ds_ready
    wait ds_ready                   dq += dS K   (256 columns)     frees kv_free
    dq tail += dS K tail            (tail, every other block)      wait stage_free
    frees stage_free                for 64 columns at a time:
    wait kv_free                      acc = dS^T Q
    gather columns 0..511 (next)      acc = sm_scale acc + P^T dO  frees ds_free (last chunk)
                                      adds, turned in the tail columns of the KV buffer
    wait stage_done                 frees stage_done

dS is rounded unscaled, as the precision clause has it, and its product scaled before P^T dO is added: rounding
sm_scale dS instead missed the per-row limit at large scores.

An `ordered` kernel (`ordered.py`) does the same for a part of each list, of which its `Indices` are a view from slot
`slot_0` on. The terms of slot k of CTA x are stored in row `x part_slots + k` of `dKV`; dq may start from the sums that
the part before has left in `Sums`, in fp32 and unscaled, and leave its own there.
"""

import tilelang.language as T  # noqa: I001
from tvm.tirx import PrimFunc

from .plan import (
    BLOCK_K, CHUNK, D_V, HALF, MATRIX_REGISTERS,
    PRODUCER_REGISTERS, ROWS, THREADS, WARPGROUP, Plan,
)  # fmt: skip
from .ptx import LEAVE, ROW_ADD
from .tile import (
    PASSES, STEP, VECTOR, exists, if_exists, leave_unless_chosen, load_bits, load_rows,
    selects, store_rows,
)  # fmt: skip

HEADS_WG = ROWS // 2  # heads whose scores one matrix warpgroup computes
CHUNKS = HALF // CHUNK  # dkv chunks of a matrix warpgroup, the tail not counted
STAGE = 2 * WARPGROUP // 32 * 256  # fp32 words in which the matrix warps turn their adds, 1 KB a warp


def build(plan: Plan) -> PrimFunc:
    """The backward for `plan`; shapes, strides, scale and flags are run-time values.

    Annotations of a TileLang kernel are evaluated, so this file must not postpone them (no `from __future__`).
    """
    D = plan.D
    TAIL = D - D_V
    TOKENS = plan.tokens
    ORDERED = plan.ordered
    ADD_ROWS = f"sparse_mla::add_rows<{'true' if ORDERED else 'false'}>"
    dtype, idx_t = plan.dtype, plan.index_dtype
    fp32, i64 = "float32", "int64"
    STAGE_0 = D_V if TAIL else 0

    B, S, S_kv, H, G, K = (T.dynamic(n, i64) for n in ("B", "S", "S_kv", "H", "G", "K"))
    # Elements of dkv or its terms, and of the sums of dq between parts.
    N, M = T.dynamic("N", i64), T.dynamic("M", i64)
    # Tiles of this launch along the sequence, each with a gather list of up to K slots.
    L = T.dynamic("L", i64)
    qb, qs, qh = (T.dynamic(n, i64) for n in ("q_b", "q_s", "q_h"))
    ob, os_, oh = (T.dynamic(n, i64) for n in ("do_b", "do_s", "do_h"))
    kb, ks, kg = (T.dynamic(n, i64) for n in ("kv_b", "kv_s", "kv_g"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    mb, ms, mg, mk = (T.dynamic(n, i64) for n in ("m_b", "m_s", "m_g", "m_k"))
    tb, ts, tg, pb, ps = (T.dynamic(n, i64) for n in ("t_b", "t_s", "t_g", "p_b", "p_s"))

    @T.macro
    def gather(KV, KV_s, rows, kv_base, r0, c0, first, last):
        # Columns [first, last) of the 64 rows of a block; an invalid slot is filled with zeros and not read.
        for r in T.unroll(PASSES):
            for u in T.unroll((last - first) // STEP):
                T.ptx_cp_async(
                    T.access_ptr(KV_s[r * 16 + r0, first + u * STEP + c0], "w", VECTOR),
                    T.access_ptr(KV[0, T.max(rows[r], 0), 0, kv_base + first + u * STEP + c0], "r", VECTOR),
                    VECTOR,
                    predicate=rows[r] >= 0,
                )

    @T.macro
    def say_rows(slot_row, rows, lane, r0):
        if lane % 8 == 0:
            for r in T.unroll(PASSES):
                slot_row[r * 16 + r0] = rows[r]

    @T.macro
    def add(acc, stage, dKV, column, row_stride, my_rows):
        T.call_extern(
            "handle", ADD_ROWS, acc.data, T.access_ptr(stage[0, STAGE_0], "r", 1), dKV.data, column, row_stride,
            my_rows[0], my_rows[1], my_rows[2], my_rows[3],
        )  # fmt: skip

    @T.macro
    def start_dq(dq, Sums, starts, cta, column, columns):
        if ORDERED and starts == 0:
            for h, d in T.Parallel(ROWS, columns):
                dq[h, d] = Sums[(cta * ROWS + h) * D + column + d]
        else:
            T.fill(dq, 0)

    @T.macro
    def leave_dq(dq, Sums, cta, column, columns):
        for h, d in T.Parallel(ROWS, columns):
            Sums[(cta * ROWS + h) * D + column + d] = dq[h, d]

    @T.macro
    def matrix_warpgroup(
        w, tx, cta, blocks, b, t, head_0, heads, left, Q_s, dO_s, KV_s, P_s, dS_s, stats, slot_row, slot_bits, stage,
        dQ, dKV, Sums, starts, ends, my_rows, my_slot, dkv_base, row_stride, scale_log2, sm_scale, q_ready,
        stats_ready, kv_ready, tail_ready, rows_ready, kv_free, stage_free, stage_done, ds_ready, ds_free,
    ):  # fmt: skip
        s = T.alloc_fragment([BLOCK_K, HEADS_WG], fp32)
        dp = T.alloc_fragment([BLOCK_K, HEADS_WG], fp32)
        dq = T.alloc_fragment([ROWS, HALF], fp32)
        acc = T.alloc_fragment([BLOCK_K, CHUNK], fp32)
        H0, H1 = w * HEADS_WG, (w + 1) * HEADS_WG
        C0, C1 = w * HALF, (w + 1) * HALF
        start_dq(dq, Sums, starts, cta, C0, HALF)
        T.barrier_wait(stats_ready, 0)
        T.barrier_wait(q_ready, 0)
        for i in T.serial(blocks):
            T.barrier_wait(kv_ready, i & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(KV_s[:, :D_V], Q_s[H0:H1, :D_V], s, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(KV_s[:, :D_V], dO_s[H0:H1, :], dp, transpose_B=True, clear_accum=True)
            if TAIL:
                T.barrier_wait(tail_ready, i & 1)
                T.fence_proxy_async()
                T.wgmma_gemm(KV_s[:, D_V:D], Q_s[H0:H1, D_V:D], s, transpose_B=True)
            T.barrier_wait(rows_ready, i & 1)
            for n in T.unroll(4):
                my_rows[n] = slot_row[my_slot + 4 * n]
                if ORDERED:
                    my_rows[n] = T.if_then_else(my_rows[n] >= 0, i * BLOCK_K + my_slot + 4 * n, -1)
            T.wait_wgmma(0)
            for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                s[k, h] = T.if_then_else(
                    slot_row[k] >= 0 if TOKENS == 1 else selects(slot_bits[0, k], H0 + h, TOKENS),
                    T.exp2(s[k, h] * scale_log2 - stats[0, H0 + h]),
                    T.float32(0),
                )
            for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                dp[k, h] = s[k, h] * (stats[1, H0 + h] * dp[k, h] + stats[2, H0 + h])
            for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                s[k, h] *= stats[1, H0 + h]
            T.barrier_wait(ds_free, (i & 1) ^ 1)
            T.copy(s, P_s[:, H0:H1])
            T.copy(dp, dS_s[:, H0:H1])
            T.fence_proxy_async()
            T.barrier_arrive(ds_ready)
            T.barrier_wait(ds_ready, i & 1)

            T.wgmma_gemm(dS_s, KV_s[:, C0:C1], dq, transpose_A=True)
            T.wait_wgmma(0)
            T.barrier_arrive(kv_free)
            if TAIL:
                T.barrier_wait(stage_free, i & 1)
                # The two matrix warpgroups take turns with the tail.
                if i % 2 == w:
                    T.wgmma_gemm(dS_s, Q_s[:, D_V:D], acc, clear_accum=True)
                    T.wait_wgmma(0)
                    for k, d in T.Parallel(BLOCK_K, CHUNK):
                        acc[k, d] *= sm_scale
                    add(acc, stage, dKV, dkv_base + D_V, row_stride, my_rows)
            for c in T.serial(CHUNKS):
                T.wgmma_gemm(dS_s, Q_s[:, C0 + c * CHUNK : C0 + (c + 1) * CHUNK], acc, clear_accum=True)
                T.wait_wgmma(0)
                for k, d in T.Parallel(BLOCK_K, CHUNK):
                    acc[k, d] *= sm_scale
                T.wgmma_gemm(P_s, dO_s[:, C0 + c * CHUNK : C0 + (c + 1) * CHUNK], acc)
                T.wait_wgmma(0)
                if c == CHUNKS - 1:
                    T.barrier_arrive(ds_free)
                add(acc, stage, dKV, dkv_base + C0 + c * CHUNK, row_stride, my_rows)
            if TAIL:
                T.barrier_arrive(stage_done)
        if ORDERED and ends == 0:
            leave_dq(dq, Sums, cta, C0, HALF)
        else:
            for h, d in T.Parallel(ROWS, HALF):
                dq[h, d] *= sm_scale
            T.copy(dq, KV_s[:, C0:C1])
            store_rows(dQ, KV_s, b, t, head_0, heads, TOKENS, left, tx - w * WARPGROUP, C0, C1)

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
        Stats: T.Tensor((4, B, S, H), fp32),
        dQ: T.Tensor((B, S, H, D), dtype),
        dKV: T.Tensor((N,), fp32),
        Sums: T.Tensor((M,), fp32),
        scale_log2: T.float32,
        sm_scale: T.float32,
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
    ):
        with T.Kernel(T.cast(B * L * G * T.cast(tiles_per_group, i64), "int32"), threads=THREADS) as bx:
            T.import_source(LEAVE + ROW_ADD)
            Q_s = T.alloc_shared([ROWS, D], dtype)
            dO_s = T.alloc_shared([ROWS, D_V], dtype)
            KV_s = T.alloc_shared([BLOCK_K, D], dtype)
            P_s = T.alloc_shared([BLOCK_K, ROWS], dtype)
            dS_s = T.alloc_shared([BLOCK_K, ROWS], dtype)
            stats = T.alloc_shared([3, ROWS], fp32, scope="shared")
            slot_row = T.alloc_shared([BLOCK_K], "int32", scope="shared")
            # Who selected a slot, bit t for token t.
            slot_bits = T.alloc_shared([1, BLOCK_K if TOKENS > 1 else 1], "int32", scope="shared")
            if TAIL:  # noqa: SIM108
                # The tail columns of the KV block are dead once scores and dq have read them.
                stage = KV_s
            else:
                stage = T.alloc_shared([1, STAGE], fp32)

            q_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            stats_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            kv_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            tail_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            rows_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            kv_free = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            stage_free = T.alloc_barrier(arrive_count=WARPGROUP)
            stage_done = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            ds_ready = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            ds_free = T.alloc_barrier(arrive_count=THREADS)

            leave_unless_chosen(Chosen, wanted)
            tx = T.get_thread_binding()
            cta = T.cast(bx, i64)
            tile = T.alloc_var("int32")
            g = T.alloc_var(i64)
            ti = T.alloc_var(i64)
            t = T.alloc_var(i64)
            b = T.alloc_var(i64)
            head_0 = T.alloc_var(i64)
            heads = T.alloc_var("int32")
            tile = T.truncmod(bx, tiles_per_group)
            ti = T.cast(T.truncdiv(bx, tiles_per_group), i64)
            g = T.truncmod(ti, G)
            ti = T.truncdiv(ti, G)
            b = T.truncdiv(ti, L)
            ti = T.truncmod(ti, L)
            t = (tile_0 + ti) * TOKENS
            head_0 = g * heads_per_group + tile * ROWS
            heads = T.min(heads_per_group - tile * ROWS, ROWS)
            left = T.alloc_var("int32")
            left = T.cast(T.min(S - t, T.cast(TOKENS, i64)), "int32")
            length = T.alloc_var("int32")
            length = T.cast(K, "int32")
            if has_length != 0:
                length = T.max(0, T.min(T.max(Lengths[b, ti, g], 0) - slot_0, T.cast(K, "int32")))
            blocks = T.alloc_var("int32")
            blocks = T.ceildiv(length, BLOCK_K)

            # Does: loads q, dout; gathers KV; dq of the tail. Produces: kv_ready, tail_ready, rows_ready, stage_free.
            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                dq_t = T.alloc_fragment([ROWS, 64], fp32)
                lane = tx - 2 * WARPGROUP
                r0 = lane // 8
                c0 = lane % 8 * 8
                kv_base = T.alloc_var(i64)
                kv_base = b * kb + g * kg
                limit = T.alloc_var(i64)
                limit = S_kv
                if causal != 0:
                    if has_positions != 0:  # noqa: SIM108
                        limit = T.min(S_kv, QPositions[b, t] + 1)
                    else:
                        limit = T.min(S_kv, t + S_kv - S + 1)

                load_rows(Q, Q_s, b, t, head_0, heads, TOKENS, left, r0, c0, D)
                load_rows(dO, dO_s, b, t, head_0, heads, TOKENS, left, r0, c0, D_V)
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.fence_proxy_async()
                T.barrier_arrive(q_ready)
                if lane < ROWS:
                    token, head = if_exists(lane, TOKENS, heads, left)
                    for v in T.unroll(3):
                        stats[v, lane] = T.if_then_else(
                            exists(lane, TOKENS, heads, left),
                            Stats[v, b, t + token, head_0 + head],
                            T.if_then_else(v == 0, T.infinity(fp32), T.float32(0)),
                        )
                T.barrier_arrive(stats_ready)

                idx = T.alloc_local([4], idx_t)
                rows = T.alloc_local([4], "int32")
                for r in T.unroll(4):
                    idx[r] = -1
                    if r * 16 + r0 < length:
                        idx[r] = Indices[b, ti, g, r * 16 + r0]
                if TAIL:
                    start_dq(dq_t, Sums, starts, cta, D_V, TAIL)

                # Iteration i finishes block i - 1 and gathers block i.
                for i in T.serial(blocks + 1):
                    if i > 0:
                        T.barrier_wait(ds_ready, (i - 1) & 1)
                        T.fence_proxy_async()
                        if TAIL:
                            T.wgmma_gemm(dS_s, KV_s[:, D_V:D], dq_t, transpose_A=True)
                            T.wait_wgmma(0)
                        T.barrier_arrive(stage_free)
                        T.barrier_arrive(ds_free)
                    if i < blocks:
                        for r in T.unroll(4):
                            rows[r] = T.if_then_else(
                                (T.cast(idx[r], i64) >= 0) & (T.cast(idx[r], i64) < limit), T.cast(idx[r], "int32"), -1
                            )
                            idx[r] = -1
                            if (i + 1) * BLOCK_K + r * 16 + r0 < length:
                                idx[r] = Indices[b, ti, g, (i + 1) * BLOCK_K + r * 16 + r0]
                        T.barrier_wait(kv_free, (i & 1) ^ 1)
                        if TOKENS > 1:
                            say_rows(slot_row, rows, lane, r0)
                            load_bits(Bits, slot_bits, 0, b, ti, g, i * BLOCK_K, lane, length)
                            T.cp_async_barrier_noinc(rows_ready)
                        gather(KV, KV_s, rows, kv_base, r0, c0, 0, D_V)
                        T.cp_async_barrier_noinc(kv_ready)
                        if TOKENS == 1:
                            say_rows(slot_row, rows, lane, r0)
                            T.barrier_arrive(rows_ready)
                        if TAIL:
                            T.barrier_wait(stage_done, (i & 1) ^ 1)
                            gather(KV, KV_s, rows, kv_base, r0, c0, D_V, D)
                            T.cp_async_barrier_noinc(tail_ready)

                if TAIL:
                    if blocks > 0:
                        T.barrier_wait(stage_done, (blocks - 1) & 1)
                    if ORDERED and ends == 0:
                        leave_dq(dq_t, Sums, cta, D_V, TAIL)
                    else:
                        for h, d in T.Parallel(ROWS, TAIL):
                            dq_t[h, d] *= sm_scale
                        T.copy(dq_t, KV_s[:, D_V:D])
                        store_rows(dQ, KV_s, b, t, head_0, heads, TOKENS, left, lane, D_V, D)

            else:
                T.set_max_nreg(MATRIX_REGISTERS, 1)
                my_slot = T.alloc_var("int32")
                my_slot = tx % WARPGROUP // 32 * 16 + tx % 32 // 8
                my_rows = T.alloc_local([4], "int32")
                row_stride = T.alloc_var("int32")
                row_stride = T.cast(D if ORDERED else G * D, "int32")
                dkv_base = T.alloc_var(i64)
                dkv_base = cta * part_slots * D if ORDERED else (b * S_kv * G + g) * D
                if tx < WARPGROUP:
                    matrix_warpgroup(
                        0, tx, cta, blocks, b, t, head_0, heads, left, Q_s, dO_s, KV_s, P_s, dS_s, stats, slot_row,
                        slot_bits, stage, dQ, dKV, Sums, starts, ends, my_rows, my_slot, dkv_base, row_stride,
                        scale_log2, sm_scale, q_ready, stats_ready, kv_ready, tail_ready, rows_ready, kv_free,
                        stage_free, stage_done, ds_ready, ds_free,
                    )  # fmt: skip
                else:
                    matrix_warpgroup(
                        1, tx, cta, blocks, b, t, head_0, heads, left, Q_s, dO_s, KV_s, P_s, dS_s, stats, slot_row,
                        slot_bits, stage, dQ, dKV, Sums, starts, ends, my_rows, my_slot, dkv_base, row_stride,
                        scale_log2, sm_scale, q_ready, stats_ready, kv_ready, tail_ready, rows_ready, kv_free,
                        stage_free, stage_done, ds_ready, ds_free,
                    )  # fmt: skip

    return sparse_mla_bwd
