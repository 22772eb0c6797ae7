"""Backward of sparse MLA on SM90: one CTA per (token, head tile of 64)."""

import tilelang.language as T

from .plan import BLOCK_K, CHUNK, D_V, HALF, ROWS, WARPGROUP, Plan
from .ptx import ROW_ADD


HEADS_WG = ROWS // 2


def build(plan: Plan):
    D = plan.D
    TAIL = D - D_V
    dtype, idx_t = plan.dtype, plan.index_dtype
    fp32, i64 = "float32", "int64"

    B = T.dynamic("B", "int64")
    S = T.dynamic("S", "int64")
    S_kv = T.dynamic("S_kv", "int64")
    H = T.dynamic("H", "int64")
    G = T.dynamic("G", "int64")
    K = T.dynamic("K", "int64")
    qb, qs, qh = (T.dynamic(n, "int64") for n in ("q_b", "q_s", "q_h"))
    ob, os_, oh = (T.dynamic(n, "int64") for n in ("do_b", "do_s", "do_h"))
    kb, ks, kg = (T.dynamic(n, "int64") for n in ("kv_b", "kv_s", "kv_g"))
    ib, is_, ig, ik = (T.dynamic(n, "int64") for n in ("i_b", "i_s", "i_g", "i_k"))
    tb, ts, pb, ps = (T.dynamic(n, "int64") for n in ("t_b", "t_s", "p_b", "p_s"))

    @T.prim_func
    def sparse_mla_bwd(
        Q: T.StridedTensor((B, S, H, D), (qb, qs, qh, 1), dtype),
        KV: T.StridedTensor((B, S_kv, G, D), (kb, ks, kg, 1), dtype),
        dO: T.StridedTensor((B, S, H, D_V), (ob, os_, oh, 1), dtype),
        Indices: T.StridedTensor((B, S, G, K), (ib, is_, ig, ik), idx_t),
        TopkLength: T.StridedTensor((B, S), (tb, ts), "int32"),
        QPositions: T.StridedTensor((B, S), (pb, ps), "int64"),
        Stats: T.Tensor((4, B, S, H), fp32),
        dQ: T.Tensor((B, S, H, D), dtype),
        dKV: T.Tensor((B, S_kv, G, D), fp32),
        scale_log2: T.float32,
        sm_scale: T.float32,
        heads_per_group: T.int32,
        tiles_per_group: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
    ):
        with T.Kernel(T.cast(B * S * G * T.cast(tiles_per_group, i64), "int32"), threads=3 * WARPGROUP) as bx:
            T.import_source(ROW_ADD)
            Q_s = T.alloc_shared([ROWS, D], dtype)
            dO_s = T.alloc_shared([ROWS, D_V], dtype)
            KV_s = T.alloc_shared([BLOCK_K, D], dtype)
            P_s = T.alloc_shared([BLOCK_K, ROWS], dtype)
            dS_s = T.alloc_shared([BLOCK_K, ROWS], dtype)
            stats = T.alloc_shared([3, ROWS], fp32, scope="shared")
            slot_row = T.alloc_shared([BLOCK_K], "int32", scope="shared")

            q_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            stats_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            kv_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            rows_ready = T.alloc_barrier(arrive_count=WARPGROUP)
            kv_free = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            ds_ready = T.alloc_barrier(arrive_count=2 * WARPGROUP)
            ds_free = T.alloc_barrier(arrive_count=3 * WARPGROUP)

            tx = T.get_thread_binding()
            tile = T.alloc_var("int32")
            g = T.alloc_var("int64")
            t = T.alloc_var("int64")
            b = T.alloc_var("int64")
            head_0 = T.alloc_var("int64")
            heads = T.alloc_var("int32")
            tile = T.truncmod(bx, tiles_per_group)
            t = T.cast(T.truncdiv(bx, tiles_per_group), i64)
            g = T.truncmod(t, G)
            t = T.truncdiv(t, G)
            b = T.truncdiv(t, S)
            t = T.truncmod(t, S)
            head_0 = g * heads_per_group + tile * ROWS
            heads = T.min(heads_per_group - tile * ROWS, ROWS)

            length = T.alloc_var("int32")
            length = T.cast(K, "int32")
            if has_length != 0:
                length = T.max(0, T.min(TopkLength[b, t], T.cast(K, "int32")))
            blocks = T.alloc_var("int32")
            blocks = T.ceildiv(length, BLOCK_K)
            dkv_base = T.alloc_var("int64")
            dkv_base = (b * S_kv * G + g) * D
            # This lane's row of an accumulator after the pair swap, and its first column.
            my_slot = T.alloc_var("int32")
            my_slot = tx % WARPGROUP // 32 * 16 + tx % 2 * 8 + tx % 32 // 4
            my_col = T.alloc_var("int32")
            my_col = tx % 4 // 2 * 4
            my_row = T.alloc_var("int32")
            my_offset = T.alloc_var("int64")

            if tx >= 2 * WARPGROUP:
                T.set_max_nreg(96, 0)
                dq_t = T.alloc_fragment([ROWS, 64], fp32)
                lane = tx - 2 * WARPGROUP
                r0 = lane // 8
                c0 = lane % 8 * 8
                kv_base = T.alloc_var("int64")
                kv_base = b * kb + g * kg
                limit = T.alloc_var("int64")
                limit = S_kv
                if causal != 0:
                    if has_positions != 0:
                        limit = T.min(S_kv, QPositions[b, t] + 1)
                    else:
                        limit = T.min(S_kv, t + S_kv - S + 1)

                for r in T.unroll(4):
                    for u in T.unroll(D // 64):
                        T.ptx_cp_async(
                            T.access_ptr(Q_s[r * 16 + r0, u * 64 + c0], "w", 8),
                            T.access_ptr(
                                Q[b, t, head_0 + T.if_then_else(r * 16 + r0 < heads, r * 16 + r0, 0), u * 64 + c0], "r", 8
                            ),
                            8,
                            predicate=r * 16 + r0 < heads,
                        )
                    for u in T.unroll(D_V // 64):
                        T.ptx_cp_async(
                            T.access_ptr(dO_s[r * 16 + r0, u * 64 + c0], "w", 8),
                            T.access_ptr(
                                dO[b, t, head_0 + T.if_then_else(r * 16 + r0 < heads, r * 16 + r0, 0), u * 64 + c0], "r", 8
                            ),
                            8,
                            predicate=r * 16 + r0 < heads,
                        )
                T.cp_async_barrier_noinc(q_ready)
                if lane < ROWS:
                    for v in T.unroll(3):
                        stats[v, lane] = T.if_then_else(
                            lane < heads,
                            Stats[v, b, t, head_0 + T.if_then_else(lane < heads, lane, 0)],
                            T.infinity(fp32) if v == 0 else T.float32(0),
                        )
                T.barrier_arrive(stats_ready)

                idx = T.alloc_local([4], idx_t)
                rows = T.alloc_local([4], "int32")
                for j in T.unroll(4):
                    idx[j] = -1
                    if j * 16 + r0 < length:
                        idx[j] = Indices[b, t, g, j * 16 + r0]
                if TAIL:
                    T.fill(dq_t, 0)
                if blocks > 0:
                    for r in T.unroll(4):
                        rows[r] = T.if_then_else(
                            (T.cast(idx[r], i64) >= 0) & (T.cast(idx[r], i64) < limit), T.cast(idx[r], "int32"), -1
                        )
                        idx[r] = -1
                        if 1 * BLOCK_K + r * 16 + r0 < length:
                            idx[r] = Indices[b, t, g, 1 * BLOCK_K + r * 16 + r0]
                    for r in T.unroll(4):
                        for u in T.unroll(D // 64):
                            T.ptx_cp_async(
                                T.access_ptr(KV_s[r * 16 + r0, u * 64 + c0], "w", 8),
                                T.access_ptr(KV[0, T.max(rows[r], 0), 0, kv_base + u * 64 + c0], "r", 8),
                                8,
                                predicate=rows[r] >= 0,
                            )
                    T.cp_async_barrier_noinc(kv_ready)
                    if lane % 8 == 0:
                        for r in T.unroll(4):
                            slot_row[r * 16 + r0] = rows[r]
                    T.barrier_arrive(rows_ready)
                for i in T.serial(blocks):
                    T.barrier_wait(ds_ready, i & 1)
                    if TAIL:
                        T.wgmma_gemm(dS_s, KV_s[:, D_V:D], dq_t, transpose_A=True)
                        T.wait_wgmma(0)
                    T.barrier_arrive(ds_free)
                    if i + 1 < blocks:
                        T.barrier_wait(kv_free, i & 1)
                        for r in T.unroll(4):
                            rows[r] = T.if_then_else(
                                (T.cast(idx[r], i64) >= 0) & (T.cast(idx[r], i64) < limit), T.cast(idx[r], "int32"), -1
                            )
                            idx[r] = -1
                            if (i + 2) * BLOCK_K + r * 16 + r0 < length:
                                idx[r] = Indices[b, t, g, (i + 2) * BLOCK_K + r * 16 + r0]
                        for r in T.unroll(4):
                            for u in T.unroll(D // 64):
                                T.ptx_cp_async(
                                    T.access_ptr(KV_s[r * 16 + r0, u * 64 + c0], "w", 8),
                                    T.access_ptr(KV[0, T.max(rows[r], 0), 0, kv_base + u * 64 + c0], "r", 8),
                                    8,
                                    predicate=rows[r] >= 0,
                                )
                        T.cp_async_barrier_noinc(kv_ready)
                        if lane % 8 == 0:
                            for r in T.unroll(4):
                                slot_row[r * 16 + r0] = rows[r]
                        T.barrier_arrive(rows_ready)

                if TAIL:
                    T.copy(dq_t, KV_s[:, D_V:D])
                    for h, d in T.Parallel(ROWS, 64):
                        if h < heads:
                            dQ[b, t, head_0 + h, D_V + d] = KV_s[h, D_V + d]

            elif tx < WARPGROUP:
                T.set_max_nreg(208, 1)
                s_0 = T.alloc_fragment([BLOCK_K, HEADS_WG], fp32)
                dp_0 = T.alloc_fragment([BLOCK_K, HEADS_WG], fp32)
                dq_0 = T.alloc_fragment([ROWS, HALF], fp32)
                dkv_0 = T.alloc_fragment([BLOCK_K, CHUNK], fp32)
                T.fill(dq_0, 0)
                T.barrier_wait(stats_ready, 0)
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(kv_ready, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(
                        KV_s, Q_s[0 * HEADS_WG : (0 + 1) * HEADS_WG, :], s_0, transpose_B=True, clear_accum=True
                    )
                    T.wgmma_gemm(
                        KV_s[:, :D_V], dO_s[0 * HEADS_WG : (0 + 1) * HEADS_WG, :], dp_0, transpose_B=True, clear_accum=True
                    )
                    T.barrier_wait(rows_ready, i & 1)
                    my_row = slot_row[my_slot]
                    my_offset = dkv_base + T.cast(my_row, i64) * (G * D) + 0 * HALF + my_col
                    T.wait_wgmma(0)
                    for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                        s_0[k, h] = T.if_then_else(
                            slot_row[k] >= 0, T.exp2(s_0[k, h] * scale_log2 - stats[0, 0 * HEADS_WG + h]), T.float32(0)
                        )
                    for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                        dp_0[k, h] = (
                            s_0[k, h] * sm_scale * (stats[1, 0 * HEADS_WG + h] * dp_0[k, h] + stats[2, 0 * HEADS_WG + h])
                        )
                    for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                        s_0[k, h] *= stats[1, 0 * HEADS_WG + h]
                    T.barrier_wait(ds_free, (i & 1) ^ 1)
                    T.copy(s_0, P_s[:, 0 * HEADS_WG : (0 + 1) * HEADS_WG])
                    T.copy(dp_0, dS_s[:, 0 * HEADS_WG : (0 + 1) * HEADS_WG])
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(dS_s, KV_s[:, 0 * HALF : (0 + 1) * HALF], dq_0, transpose_A=True)
                    T.wgmma_gemm(P_s, dO_s[:, 0 : 0 + CHUNK], dkv_0, clear_accum=True)
                    T.wgmma_gemm(dS_s, Q_s[:, 0 : 0 + CHUNK], dkv_0)
                    T.wait_wgmma(2)
                    T.barrier_arrive(kv_free)
                    T.wait_wgmma(0)
                    T.call_extern("handle", "sparse_mla::add_rows_64", dkv_0.data, dKV.data, my_offset, my_row >= 0)
                    for c in T.unroll(1, HALF // CHUNK - 1):
                        T.wgmma_gemm(
                            P_s, dO_s[:, 0 * HALF + c * CHUNK : 0 * HALF + (c + 1) * CHUNK], dkv_0, clear_accum=True
                        )
                        T.wgmma_gemm(dS_s, Q_s[:, 0 * HALF + c * CHUNK : 0 * HALF + (c + 1) * CHUNK], dkv_0)
                        T.wait_wgmma(0)
                        T.call_extern(
                            "handle", "sparse_mla::add_rows_64", dkv_0.data, dKV.data, my_offset + c * CHUNK, my_row >= 0
                        )
                    T.wgmma_gemm(P_s, dO_s[:, (0 + 1) * HALF - CHUNK : (0 + 1) * HALF], dkv_0, clear_accum=True)
                    T.wgmma_gemm(dS_s, Q_s[:, (0 + 1) * HALF - CHUNK : (0 + 1) * HALF], dkv_0)
                    T.wait_wgmma(0)
                    T.call_extern(
                        "handle", "sparse_mla::add_rows_64", dkv_0.data, dKV.data, my_offset + (HALF - CHUNK), my_row >= 0
                    )
                    if TAIL:
                        if i % 2 == 0:
                            T.wgmma_gemm(dS_s, Q_s[:, D_V:D], dkv_0, clear_accum=True)
                            T.wait_wgmma(0)
                            T.call_extern(
                                "handle", "sparse_mla::add_rows_64", dkv_0.data, dKV.data, my_offset + (D_V - 0 * HALF), my_row >= 0
                            )
                    T.barrier_arrive(ds_free)
                T.wait_wgmma(0)
                T.copy(dq_0, KV_s[:, 0 * HALF : (0 + 1) * HALF])
                for h, d in T.Parallel(ROWS, HALF):
                    if h < heads:
                        dQ[b, t, head_0 + h, 0 * HALF + d] = KV_s[h, 0 * HALF + d]
            else:
                T.set_max_nreg(208, 1)
                s_1 = T.alloc_fragment([BLOCK_K, HEADS_WG], fp32)
                dp_1 = T.alloc_fragment([BLOCK_K, HEADS_WG], fp32)
                dq_1 = T.alloc_fragment([ROWS, HALF], fp32)
                dkv_1 = T.alloc_fragment([BLOCK_K, CHUNK], fp32)
                T.fill(dq_1, 0)
                T.barrier_wait(stats_ready, 0)
                T.barrier_wait(q_ready, 0)
                for i in T.serial(blocks):
                    T.barrier_wait(kv_ready, i & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(
                        KV_s, Q_s[1 * HEADS_WG : (1 + 1) * HEADS_WG, :], s_1, transpose_B=True, clear_accum=True
                    )
                    T.wgmma_gemm(
                        KV_s[:, :D_V], dO_s[1 * HEADS_WG : (1 + 1) * HEADS_WG, :], dp_1, transpose_B=True, clear_accum=True
                    )
                    T.barrier_wait(rows_ready, i & 1)
                    my_row = slot_row[my_slot]
                    my_offset = dkv_base + T.cast(my_row, i64) * (G * D) + 1 * HALF + my_col
                    T.wait_wgmma(0)
                    for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                        s_1[k, h] = T.if_then_else(
                            slot_row[k] >= 0, T.exp2(s_1[k, h] * scale_log2 - stats[0, 1 * HEADS_WG + h]), T.float32(0)
                        )
                    for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                        dp_1[k, h] = (
                            s_1[k, h] * sm_scale * (stats[1, 1 * HEADS_WG + h] * dp_1[k, h] + stats[2, 1 * HEADS_WG + h])
                        )
                    for k, h in T.Parallel(BLOCK_K, HEADS_WG):
                        s_1[k, h] *= stats[1, 1 * HEADS_WG + h]
                    T.barrier_wait(ds_free, (i & 1) ^ 1)
                    T.copy(s_1, P_s[:, 1 * HEADS_WG : (1 + 1) * HEADS_WG])
                    T.copy(dp_1, dS_s[:, 1 * HEADS_WG : (1 + 1) * HEADS_WG])
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(dS_s, KV_s[:, 1 * HALF : (1 + 1) * HALF], dq_1, transpose_A=True)
                    T.wgmma_gemm(P_s, dO_s[:, 256 : 256 + CHUNK], dkv_1, clear_accum=True)
                    T.wgmma_gemm(dS_s, Q_s[:, 256 : 256 + CHUNK], dkv_1)
                    T.wait_wgmma(2)
                    T.barrier_arrive(kv_free)
                    T.wait_wgmma(0)
                    T.call_extern("handle", "sparse_mla::add_rows_64", dkv_1.data, dKV.data, my_offset, my_row >= 0)
                    for c in T.unroll(1, HALF // CHUNK - 1):
                        T.wgmma_gemm(
                            P_s, dO_s[:, 1 * HALF + c * CHUNK : 1 * HALF + (c + 1) * CHUNK], dkv_1, clear_accum=True
                        )
                        T.wgmma_gemm(dS_s, Q_s[:, 1 * HALF + c * CHUNK : 1 * HALF + (c + 1) * CHUNK], dkv_1)
                        T.wait_wgmma(0)
                        T.call_extern(
                            "handle", "sparse_mla::add_rows_64", dkv_1.data, dKV.data, my_offset + c * CHUNK, my_row >= 0
                        )
                    T.wgmma_gemm(P_s, dO_s[:, (1 + 1) * HALF - CHUNK : (1 + 1) * HALF], dkv_1, clear_accum=True)
                    T.wgmma_gemm(dS_s, Q_s[:, (1 + 1) * HALF - CHUNK : (1 + 1) * HALF], dkv_1)
                    T.wait_wgmma(0)
                    T.call_extern(
                        "handle", "sparse_mla::add_rows_64", dkv_1.data, dKV.data, my_offset + (HALF - CHUNK), my_row >= 0
                    )
                    if TAIL:
                        if i % 2 == 1:
                            T.wgmma_gemm(dS_s, Q_s[:, D_V:D], dkv_1, clear_accum=True)
                            T.wait_wgmma(0)
                            T.call_extern(
                                "handle", "sparse_mla::add_rows_64", dkv_1.data, dKV.data, my_offset + (D_V - 1 * HALF), my_row >= 0
                            )
                    T.barrier_arrive(ds_free)
                T.wait_wgmma(0)
                T.copy(dq_1, KV_s[:, 1 * HALF : (1 + 1) * HALF])
                for h, d in T.Parallel(ROWS, HALF):
                    if h < heads:
                        dQ[b, t, head_0 + h, 1 * HALF + d] = KV_s[h, 1 * HALF + d]

    return sparse_mla_bwd
