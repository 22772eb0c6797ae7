"""fp32 dkv to the output dtype, at memory speed: `dkv[i] = round(factor acc[i])` over a flat buffer."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import Plan
from .ptx import SUBNORMAL

BLOCK_THREADS = 256
VECTOR = 8  # elements a thread moves; rows of D elements are multiples of it


def build(plan: Plan) -> PrimFunc:
    """`Out[n]` (bf16 or fp16) from `Acc[n]` (fp32); n is a multiple of 8."""
    n = T.dynamic("n", "int64")

    @T.prim_func
    def sparse_mla_bwd_postprocess(Acc: T.Tensor((n,), "float32"), Out: T.Tensor((n,), plan.dtype), factor: T.float32):
        with T.Kernel(T.cast(T.ceildiv(n, BLOCK_THREADS * VECTOR), "int32"), threads=BLOCK_THREADS) as bx:
            T.import_source(SUBNORMAL)
            tx = T.get_thread_binding()
            if (T.cast(bx, "int64") * BLOCK_THREADS + tx) * VECTOR < n:
                values = T.alloc_local([VECTOR], "float32")
                for v in T.vectorized(VECTOR):
                    values[v] = Acc[(T.cast(bx, "int64") * BLOCK_THREADS + tx) * VECTOR + v]
                for v in T.unroll(VECTOR):
                    values[v] = T.call_extern("float32", "sparse_mla::product", values[v], factor)
                for v in T.vectorized(VECTOR):
                    Out[(T.cast(bx, "int64") * BLOCK_THREADS + tx) * VECTOR + v] = T.cast(values[v], plan.dtype)

    return sparse_mla_bwd_postprocess
