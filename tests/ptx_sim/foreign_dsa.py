"""The DSA sparse-attention kernels for SM100 of the PyPI wheel `nvidia-cudnn-frontend`, run in the simulator.

They are known to work on hardware and were written by others, so they witness the simulator's semantics. Each
function builds inputs, compiles the wheel's kernel with CuTe DSL, runs its real host code with the recording runtime
and executes every launch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from . import capture_cute
from .capture_cute import CudaView, Recorder

WHEEL = "nvidia-cudnn-frontend"
FORWARD = ((64, 512), (64, 576), (128, 512))
BACKWARD = ((64, 512, False), (64, 576, False), (64, 512, True), (16, 576, False), (32, 576, False), (128, 512, False))
PAIR = (96, 128)
HOPPER = ((64, 576), (64, 512), (128, 512))


def unavailable() -> str | None:
    """Why the wheel's kernels cannot run here, or None."""
    reason = capture_cute.available()
    if reason is None and find_spec("cudnn") is None:
        reason = f"{WHEEL} is not installed"
    return reason


@dataclass
class Problem:
    """Inputs of one sparse attention call in the wheel's layout; `valid` marks the slots that count."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    sink: torch.Tensor
    dout: torch.Tensor
    scale: float

    @property
    def valid(self) -> torch.Tensor:
        slots = torch.arange(self.indices.shape[1])
        return (self.indices >= 0) & (self.indices < len(self.kv)) & (slots < self.lengths[:, None])


def problem(
    heads: int,
    dim: int,
    slots: int,
    tokens: int = 2,
    rows: int = 256,
    seed: int = 0,
    ragged: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """Random inputs; `ragged` adds invalid indices at head, middle and tail, repeats and short rows."""
    gen = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, rows, (tokens, slots), dtype=torch.int32, generator=gen)
    lengths = torch.full((tokens,), slots, dtype=torch.int32)
    if ragged:
        indices[:, ::7] = -1
        indices[:, 1:9] = indices[:, 10:11]
        indices[0, slots // 2 : slots // 2 + 70] = -1
        lengths[-1] = slots // 3
    return Problem(
        torch.randn(tokens, heads, dim, generator=gen).to(dtype),
        torch.randn(rows, dim, generator=gen).to(dtype),
        indices,
        lengths,
        torch.randn(heads, generator=gen),
        torch.randn(tokens, heads, 512, generator=gen).to(dtype),
        dim**-0.5,
    )


@dataclass
class Result:
    tensors: dict
    launches: list = field(default_factory=list)
    reports: list = field(default_factory=list)


def growing(p: Problem) -> Problem:
    """Scores grow along the row, so that running maxima move and accumulators are rescaled."""
    p.kv.mul_(torch.linspace(0.3, 6, len(p.kv))[:, None].to(p.kv.dtype))
    p.indices.copy_(torch.where(p.indices < 0, p.indices, p.indices.sort(1).values))
    return p


def oracle(p: Problem, out: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """float64 forward and gradients on the inputs as rounded, by the project's contract (lse without the sink)."""
    q, kv, sink = (x.double().requires_grad_() for x in (p.q, p.kv, p.sink))
    gathered = kv[p.indices.clamp(0, len(p.kv) - 1).long()]
    scores = torch.einsum("thd,tkd->thk", q, gathered) * p.scale
    scores = scores.masked_fill(~p.valid[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse[..., None]).exp() * torch.sigmoid(lse - sink)[..., None]
    o = torch.einsum("thk,tkd->thd", weights, gathered[..., :512])
    o.backward(p.dout.double())
    return {
        "out": o.detach(),
        "lse": lse.detach(),
        "max": scores.detach().amax(-1),
        "dq": q.grad,
        "dkv": kv.grad,
        "d_sink": sink.grad,
    }


@functools.cache
def _compiled_forward(heads: int, dim: int, dtype: torch.dtype) -> object:
    capture_cute.prepare()
    import cuda.bindings.driver as cuda
    import cutlass
    from cudnn.deepseek_sparse_attention.sparse_attention_forward._interface_sm100 import _kernel_variant, _make_kernel
    from cudnn.deepseek_sparse_attention.utils.tensor_conversion import to_cute_tensor
    from cutlass import cute

    p = problem(heads, dim, 128, dtype=dtype)
    out, stats = torch.empty(2, heads, 512, dtype=dtype), torch.empty(2, heads)
    kernel = _make_kernel(_kernel_variant(heads, dim), dim, 0)
    tensors = [to_cute_tensor(CudaView(x), divisibility=x.shape[-1]) for x in (p.q, p.kv)]
    tensors.append(to_cute_tensor(CudaView(p.indices), assumed_align=4))
    tensors.append(to_cute_tensor(CudaView(out), divisibility=512))
    tensors += [to_cute_tensor(CudaView(x), assumed_align=4) for x in (stats, stats)]
    tensors.append(None)
    tensors += [to_cute_tensor(CudaView(x), assumed_align=4) for x in (p.sink, p.lengths)]
    return cute.compile(
        kernel,
        *tensors,
        cutlass.Float32(1.0),
        cuda.CUstream(0),
        options="--enable-tvm-ffi --gpu-arch sm_100a --opt-level 2",
    )


def forward(p: Problem, run: bool = True, **options: object) -> Result:
    """The forward kernel for p's heads and head dim. Outputs start as NaN."""
    tokens, heads, dim = p.q.shape
    function = _compiled_forward(heads, dim, p.q.dtype)
    tensors = {
        "q": p.q,
        "kv": p.kv,
        "indices": p.indices,
        "out": torch.full((tokens, heads, 512), math.nan, dtype=p.q.dtype),
        "max": torch.full((tokens, heads), math.nan),
        "lse": torch.full((tokens, heads), math.nan),
        "sink": p.sink,
        "lengths": p.lengths,
    }
    recorder = Recorder(run=run)
    recorder.options = options
    t = tensors
    launches = recorder.call(
        function,
        tensors,
        t["q"],
        t["kv"],
        t["indices"],
        t["out"],
        t["max"],
        t["lse"],
        None,
        t["sink"],
        t["lengths"],
        p.scale,
        0,
    )
    return Result(tensors, launches, recorder.reports)


@functools.cache
def _compiled_backward(heads: int, dim: int, slots: int, deterministic: bool, dtype: torch.dtype) -> tuple:
    capture_cute.prepare()
    import cuda.bindings.driver as cuda
    import cutlass
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100 as interface
    from cudnn.deepseek_sparse_attention.utils.tensor_conversion import to_cute_tensor
    from cutlass import cute

    backend, tile = interface._select_sm100_backend(
        heads, dim, head_dim_v=512, dtype=dtype, max_topk=slots, device_capability=(10, 0), deterministic=deterministic
    )
    kernel_class = interface._get_sm100_kernel_class(backend, deterministic, 2, 256, dim, heads)
    element = interface.torch2cute_dtype_map[dtype]
    kernel = kernel_class(element_dtype=element, head_dim=dim, head_dim_v=512, block_tile=tile, max_topk=slots)
    p = problem(heads, dim, slots, dtype=dtype)

    def convert(x: torch.Tensor, **how: object) -> object:
        return to_cute_tensor(CudaView(x), **how)

    indices = convert(p.indices)
    if backend in interface._STATIC_TOPK_STRIDE_BACKENDS:
        indices = cute.runtime.make_fake_compact_tensor(
            cutlass.Int32, (cute.sym_int(), slots), stride_order=(1, 0), assumed_align=16
        )
    work = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    function = cute.compile(
        kernel,
        (2, 256, dim, (heads, 1)),
        convert(p.q, divisibility=dim),
        convert(p.kv, divisibility=dim),
        convert(p.dout, divisibility=512),
        convert(p.dout, divisibility=512),
        convert(torch.zeros(2, heads), assumed_align=8),
        convert(p.sink),
        indices,
        convert(p.lengths),
        convert(p.q, divisibility=dim),
        convert(p.kv, divisibility=dim),
        convert(p.sink),
        convert(work, fully_dynamic=True),
        convert(work, fully_dynamic=True),
        1.0,
        cuda.CUstream(0),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )
    return function, backend, interface


def backward(p: Problem, deterministic: bool = False, run: bool = True, **options: object) -> Result:
    """The backward chain for p, from the oracle's rounded out and lse. Outputs and workspaces start as NaN."""
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100_common as common

    tokens, heads, dim = p.q.shape
    function, backend, _ = _compiled_backward(heads, dim, p.indices.shape[1], deterministic, p.q.dtype)
    shapes = common._workspace_shapes_sm100(tokens, len(p.kv), dim, heads, deterministic, backend)
    truth = oracle(p)
    lse = truth["lse"].float().contiguous()
    tensors = {
        "q": p.q,
        "kv": p.kv,
        "out": truth["out"].to(p.q.dtype),
        "dout": p.dout,
        "lse": lse,
        "sink": p.sink,
        "indices": p.indices,
        "lengths": p.lengths,
        "dq": torch.full_like(p.q, math.nan),
        "dkv": torch.full_like(p.kv, math.nan),
        "d_sink": torch.zeros(heads),
        "workspace lse": torch.full(tuple(shapes[0]), 255, dtype=torch.uint8),
        "workspace dkv": torch.full(tuple(shapes[1]), 255, dtype=torch.uint8),
    }
    recorder = Recorder(run=run)
    recorder.options = options
    launches = recorder.call(function, tensors, (tokens, len(p.kv), dim, (heads, 1)), *tensors.values(), p.scale, 0)
    return Result(tensors, launches, recorder.reports)


@functools.cache
def _compiled_backward_pair(heads: int, slots: int, split: bool) -> tuple:
    """The two-CTA backward for D 576 and 96 or 128 heads, from metadata as the wheel's plans compile it."""
    capture_cute.prepare()
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm100_d576 as interface

    real = interface.compile_options
    interface.compile_options = lambda: "--enable-tvm-ffi --gpu-arch sm_100a"
    try:
        return interface._compile_d576_2cta((10, 0), slots, True, False, split, num_heads=heads), interface
    finally:
        interface.compile_options = real


def backward_pair(p: Problem, splits: int = 1, run: bool = True, **options: object) -> Result:
    """The D 576 backward whose tiles belong to CTA pairs; `splits` spreads a token's slots over several pairs."""
    tokens, heads, _ = p.q.shape
    function, interface = _compiled_backward_pair(heads, p.indices.shape[1], splits > 1)
    sizes = interface._workspace_sizes(tokens, len(p.kv), False, heads)
    truth = oracle(p)
    tensors = {
        "q": p.q,
        "kv": p.kv,
        "out": truth["out"].bfloat16(),
        "dout": p.dout,
        "lse": truth["lse"].float().contiguous(),
        "sink": p.sink,
        "indices": p.indices,
        "lengths": p.lengths,
        "dq": torch.full_like(p.q, math.nan),
        "dkv": torch.full_like(p.kv, math.nan),
        "d_sink": torch.full((heads,), math.nan),
        "workspace lse": torch.full((sizes[0],), 255, dtype=torch.uint8),
        "workspace dkv": torch.full((sizes[1],), 255, dtype=torch.uint8),
    }
    recorder = Recorder(run=run)
    recorder.options = options
    launches = recorder.call(
        function, tensors, (tokens, len(p.kv), 576, (heads, 1)), *tensors.values(), p.scale, splits, 0
    )
    return Result(tensors, launches, recorder.reports)


@functools.cache
def _compiled_backward_sm90(heads: int, dim: int, slots: int, dtype: torch.dtype) -> tuple:
    """The Hopper backward of the same wheel: preprocess, main kernel, postprocess."""
    capture_cute.prepare()
    import cuda.bindings.driver as cuda
    import cutlass
    from cudnn.deepseek_sparse_attention.sparse_attention_backward import _interface_sm90 as interface
    from cudnn.deepseek_sparse_attention.utils.tensor_conversion import to_cute_tensor
    from cutlass import cute

    p = problem(heads, dim, slots, dtype=dtype)
    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    stream, options = cuda.CUstream(0), "--enable-tvm-ffi --gpu-arch sm_90a"
    t = _sm90_tensors(p, interface)

    def convert(*names: str) -> list:
        return [to_cute_tensor(CudaView(t[n]), **({"assumed_align": 4} if n == "lse" else {})) for n in names]

    m, n = interface._M_BLOCK_SIZE, interface._N_BLOCK_SIZE
    pre = interface._FlashAttentionDSABackwardPreprocessSm90(element, 512, 90, m, num_threads=256)
    main = interface.FlashAttentionDSABackwardSm90(
        element,
        dim,
        512,
        heads,
        tile_m=m,
        tile_n=n,
        KV_stage=1,
        PdS_stage=1,
        SdP_swapAB=False,
        dKV_swapAB=False,
        dQ_swapAB=False,
        num_threads=256,
        have_topk_length=True,
        max_topk=slots,
    )
    chunk = 64 if dim == 576 else 128
    post = interface._FlashAttentionDSABackwardPostprocessSm90(
        element, hdim_chunk=chunk, tile_n=n, head_dim=dim, num_threads=chunk, N_hdim_chunks=dim // chunk
    )
    with capture_cute.architecture("sm_90a"):
        return (
            cute.compile(
                pre,
                *convert("out", "dout", "delta", "lse", "lse_log2", "sink", "d_sink"),
                None,
                None,
                None,
                stream,
                options=options,
            ),
            cute.compile(
                main,
                *convert("q", "kv", "dout", "lse_log2", "delta", "dq", "dkv_sum", "indices", "lengths"),
                1.0,
                stream,
                options=options,
            ),
            cute.compile(post, *convert("dkv_sum", "dkv"), len(p.kv), stream, options=options),
            interface,
        )


def _sm90_tensors(p: Problem, interface: object) -> dict[str, torch.Tensor]:
    """The wheel's batch-of-one views and fp32 scratch."""
    tokens, heads, dim = p.q.shape
    truth = oracle(p)
    rounded_q, rounded_kv, rounded_dim = interface._workspace_extents(tokens, len(p.kv), dim)
    return {
        "q": p.q[None],
        "kv": p.kv[None, :, None],
        "out": truth["out"].to(p.q.dtype)[None],
        "dout": p.dout[None],
        "lse": truth["lse"].float()[None].contiguous(),
        "sink": p.sink,
        "indices": p.indices[None],
        "lengths": p.lengths[None],
        "delta": torch.full((1, rounded_q, heads), math.nan),
        "lse_log2": torch.full((1, rounded_q, heads), math.nan),
        "dkv_sum": torch.zeros(1, 1, rounded_kv * rounded_dim),
        "d_sink": torch.zeros(heads),
        "dq": torch.full_like(p.q, math.nan)[None],
        "dkv": torch.full_like(p.kv, math.nan)[None, :, None],
    }


def backward_sm90(p: Problem, run: bool = True, **options: object) -> Result:
    """The Hopper backward chain: three compiled functions, one after the other."""
    _, heads, dim = p.q.shape
    pre, main, post, interface = _compiled_backward_sm90(heads, dim, p.indices.shape[1], p.q.dtype)
    t = _sm90_tensors(p, interface)
    recorder = Recorder(run=run)
    recorder.options = options

    def pick(*names: str) -> list:
        return [t[n] for n in names]

    recorder.call(pre, t, *pick("out", "dout", "delta", "lse", "lse_log2", "sink", "d_sink"), None, None, None, 0)
    recorder.call(
        main, t, *pick("q", "kv", "dout", "lse_log2", "delta", "dq", "dkv_sum", "indices", "lengths"), p.scale, 0
    )
    recorder.call(post, t, *pick("dkv_sum", "dkv"), len(p.kv), 0)
    return Result(t | {"dq": t["dq"][0], "dkv": t["dkv"][0, :, 0]}, recorder.launches, recorder.reports)


def all_kernels() -> dict[str, list]:
    """Every launch of the wheel's kernels that the tests run, on small inputs, chained as the wheel chains them."""
    found = {}
    for heads, dim in FORWARD:
        p = problem(heads, dim, 128, ragged=True)
        found[f"{WHEEL} DSA forward SM100 H{heads} D{dim}"] = forward(p).launches
    found[f"{WHEEL} DSA forward SM100 H64 D512 growing scores"] = forward(growing(problem(64, 512, 384))).launches
    for heads, dim in ((64, 576), (128, 512)):
        p = problem(heads, dim, 128, dtype=torch.float16)
        found[f"{WHEEL} DSA forward SM100 H{heads} D{dim} fp16"] = forward(p).launches
    found[f"{WHEEL} DSA backward SM100 H64 D576 fp16"] = backward(problem(64, 576, 128, dtype=torch.float16)).launches
    p = problem(64, 512, 128, dtype=torch.float16)
    found[f"{WHEEL} DSA backward SM90 H64 D512 fp16"] = backward_sm90(p).launches
    for heads, dim, deterministic in BACKWARD:
        p = problem(heads, dim, 128)
        name = f"{WHEEL} DSA backward SM100 H{heads} D{dim}{' deterministic' if deterministic else ''}"
        found[name] = backward(p, deterministic).launches
    for heads in PAIR:
        found[f"{WHEEL} DSA backward SM100 H{heads} D576 pair"] = backward_pair(problem(heads, 576, 128)).launches
    for heads, dim in HOPPER:
        found[f"{WHEEL} DSA backward SM90 H{heads} D{dim}"] = backward_sm90(problem(heads, dim, 128)).launches
    return found


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN when any value is not finite."""
    return ((value.double() - truth).norm() / truth.norm()).item()
