"""Per-row values of the backward, one warp per (token, head).

    Delta = sum_d dout out            w = sigmoid(lse - sink)   (1 without a sink, 0 for an empty row)
    stats [4, B, S, H] = { lse in base 2 (+inf for an empty row, so that p_hat = 0), u w, u (dlse - w Delta),
                           (1 - w) Delta }

The main kernel then needs one exponential per score: `p_hat = exp2(s - stats0)`, `u p = stats1 p_hat`,
`u dS = p_hat (stats1 dP + stats2)`; `d_sink = -sum_t stats3`. The unit u is a power of 4 (`launch.UNIT`, or 1) that
keeps gradients of rows whose sink leaves next to nothing (w about 1e-37) in fp32's normal range until they are rounded.
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import D_V, LOG2_E, Plan
from .ptx import SUBNORMAL, VECTOR_DOT

WARP = 32
WARPS = 8
VECTOR = 8  # elements of a 16-byte load
DOT = {"bfloat16": "sparse_mla::dot8_bf16", "float16": "sparse_mla::dot8_fp16"}


def build(plan: Plan) -> PrimFunc:
    """`stats` from `out`, `dout [B, S, H, 512]`, `lse`, `dlse [B, S, H]`, `sink [H]`."""
    dtype, fp32 = plan.dtype, "float32"
    B, S, H = (T.dynamic(n, "int64") for n in ("B", "S", "H"))
    ob, os_, oh = (T.dynamic(n, "int64") for n in ("out_b", "out_s", "out_h"))
    gb, gs, gh = (T.dynamic(n, "int64") for n in ("dout_b", "dout_s", "dout_h"))
    lb, ls, lh = (T.dynamic(n, "int64") for n in ("lse_b", "lse_s", "lse_h"))
    db, ds, dh = (T.dynamic(n, "int64") for n in ("dlse_b", "dlse_s", "dlse_h"))
    sink_h = T.dynamic("sink_h", "int64")

    def product(a, b):
        return T.call_extern(fp32, "sparse_mla::product", a, b)

    @T.prim_func
    def sparse_mla_bwd_preprocess(
        Out: T.StridedTensor((B, S, H, D_V), (ob, os_, oh, 1), dtype),
        dO: T.StridedTensor((B, S, H, D_V), (gb, gs, gh, 1), dtype),
        Lse: T.StridedTensor((B, S, H), (lb, ls, lh), fp32),
        dLse: T.StridedTensor((B, S, H), (db, ds, dh), fp32),
        Sink: T.StridedTensor((H,), (sink_h,), fp32),
        Stats: T.Tensor((4, B, S, H), fp32),
        root_unit: T.float32,
    ):
        with T.Kernel(T.cast(T.ceildiv(B * S * H, WARPS), "int32"), threads=WARPS * WARP) as bx:
            T.import_source(SUBNORMAL + VECTOR_DOT)
            tx = T.get_thread_binding()
            lane = tx % WARP
            row = T.alloc_var("int64")
            h = T.alloc_var("int64")
            t = T.alloc_var("int64")
            b = T.alloc_var("int64")
            row = T.cast(bx, "int64") * WARPS + tx // WARP
            if row < B * S * H:
                h = T.truncmod(row, H)
                t = T.truncdiv(row, H)
                b = T.truncdiv(t, S)
                t = T.truncmod(t, S)
                partial = T.alloc_var(fp32)
                partial = T.float32(0)
                for j in T.unroll(D_V // (WARP * VECTOR)):
                    partial = T.call_extern(
                        fp32,
                        DOT[dtype],
                        partial,
                        T.access_ptr(Out[b, t, h, j * WARP * VECTOR + lane * VECTOR], "r", VECTOR),
                        T.access_ptr(dO[b, t, h, j * WARP * VECTOR + lane * VECTOR], "r", VECTOR),
                    )
                delta = T.alloc_var(fp32)
                delta = T.call_extern(fp32, "sparse_mla::warp_sum", partial)
                if lane == 0:
                    lse = T.alloc_var(fp32)
                    gap = T.alloc_var(fp32)
                    up = T.alloc_var(fp32)
                    down = T.alloc_var(fp32)
                    share = T.alloc_var(fp32)
                    lse = Lse[b, t, h]
                    gap = lse - Sink[h]
                    # sigmoid(+-gap) from the roots of exp(min(+-gap, 0)), of which one is 1: the power itself may lie
                    # below fp32's normal range, where it is flushed to 0, while its product with Delta does not.
                    up = T.exp2(T.min(gap, 0.0) * T.float32(0.5 * LOG2_E))
                    down = T.exp2(T.max(gap, 0.0) * T.float32(-0.5 * LOG2_E))
                    share = 1.0 / (1.0 + up * down * (up * down))
                    if lse == -T.infinity(fp32):
                        Stats[0, b, t, h] = T.infinity(fp32)
                        Stats[1, b, t, h] = 0.0
                        Stats[2, b, t, h] = 0.0
                        Stats[3, b, t, h] = 0.0
                    else:
                        Stats[0, b, t, h] = lse * LOG2_E
                        Stats[3, b, t, h] = product(product(share * down, delta), down)
                        up *= root_unit
                        Stats[1, b, t, h] = share * up * up
                        Stats[2, b, t, h] = dLse[b, t, h] * (root_unit * root_unit) - share * up * delta * up

    return sparse_mla_bwd_preprocess
