"""fp32 dkv to the output dtype, at memory speed: `dkv[i] = round(acc[i])` over a flat buffer."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import Plan

BLOCK_THREADS = 256
VECTOR = 8  # elements a thread moves; rows of D elements are multiples of it


def build(plan: Plan) -> PrimFunc:
    """`Out[n]` (bf16 or fp16) from `Acc[n]` (fp32); n is a multiple of 8."""
    n = T.dynamic("n", "int64")

    @T.prim_func
    def sparse_mla_bwd_postprocess(Acc: T.Tensor((n,), "float32"), Out: T.Tensor((n,), plan.dtype)):
        with T.Kernel(T.cast(T.ceildiv(n, BLOCK_THREADS * VECTOR), "int32"), threads=BLOCK_THREADS) as bx:
            tx = T.get_thread_binding()
            if (T.cast(bx, "int64") * BLOCK_THREADS + tx) * VECTOR < n:
                for v in T.vectorized(VECTOR):
                    Out[(T.cast(bx, "int64") * BLOCK_THREADS + tx) * VECTOR + v] = T.cast(
                        Acc[(T.cast(bx, "int64") * BLOCK_THREADS + tx) * VECTOR + v], plan.dtype
                    )

    return sparse_mla_bwd_postprocess
