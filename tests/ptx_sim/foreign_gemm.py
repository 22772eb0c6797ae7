"""The dense GEMM with a SwiGLU epilogue of the wheel `nvidia-cudnn-frontend`, run as `foreign_dsa.py` runs its kernels.

It has tiles of 128 rows and 64 columns a CTA, with either operand major, which the DSA kernels lack.
"""

from __future__ import annotations

import itertools
import math

import torch

from . import capture_cute
from .capture_cute import CudaView, Recorder
from .foreign_dsa import WHEEL, Result

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = tuple(itertools.product(DTYPES, "KM", "KN"))  # dtype, contiguous axis of a and of b
TILE = (128, 64)
M, N, K = 256, 256, 128  # eight tiles, two of the 128-byte spans of K


def product(dtype: str, a_major: str, b_major: str) -> Result:
    """`a [M, K]`, `b [N, K]` -> tensor `ab = a b^T` [M, N]; the batch of one comes last, c takes the SwiGLU."""
    capture_cute.prepare()
    import cuda.bindings.driver as cuda
    import cutlass
    from cudnn.gemm.cutedsl.dense.swiglu.dense_gemm_persistent_swiglu import PersistentDenseGemmKernel
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    gen, kind = torch.Generator().manual_seed(1), DTYPES[dtype]

    def operand(rows: int, k_major: bool) -> torch.Tensor:
        x = torch.randn(rows, K, generator=gen).to(kind)
        return (x if k_major else x.t().contiguous().t())[..., None]

    t = {
        "a": operand(M, a_major == "K"),
        "b": operand(N, b_major == "K"),
        "ab": torch.full((M, N, 1), math.nan, dtype=kind),
        "c": torch.full((M, N // 2, 1), math.nan, dtype=kind),
    }
    views = [from_dlpack(CudaView(x)).mark_layout_dynamic(leading_dim=int(x.stride(0) != 1)) for x in t.values()]
    function = cute.compile(
        PersistentDenseGemmKernel(cutlass.Float32, False, TILE, (1, 1)),
        *views,
        cutlass.Float32(1.0),
        4,  # clusters at a time: two tiles each
        cuda.CUstream(0),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )
    recorder = Recorder(run=True)
    launches = recorder.call(function, t, *t.values(), 1.0, 0)
    return Result(t, launches, recorder.reports)


def all_kernels() -> dict[str, list]:
    """Every launch of these kernels that the tests run."""
    return {f"{WHEEL} GEMM SM100 {d} {a}-major {b}-major": product(d, a, b).launches for d, a, b in CASES}
