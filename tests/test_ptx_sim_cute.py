"""The guide's path: a small CuTe DSL kernel of one's own, compiled and run in the simulator."""

from __future__ import annotations

import pytest
import torch

from .ptx_sim import capture_cute
from .ptx_sim.memory import SimError

REASON = capture_cute.available()
if REASON is not None:
    pytest.skip(f"CuTe DSL capture: {REASON}", allow_module_level=True)
capture_cute.prepare()

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402


# CuTe DSL reads annotations as types, so they stay off these two.
@cute.kernel
def double_kernel(source, target):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    target[block, thread] = source[block, thread].to(cutlass.Float32) * 2.0


@cute.jit
def double(source, target):
    double_kernel(source, target).launch(grid=(16, 1, 1), block=(64, 1, 1))


@pytest.fixture(scope="module")
def compiled() -> object:
    x, y = torch.zeros(16, 64).bfloat16(), torch.zeros(16, 64)
    return cute.compile(
        double,
        from_dlpack(capture_cute.CudaView(x)),
        from_dlpack(capture_cute.CudaView(y)),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )


def test_a_kernel_of_ones_own(compiled: object) -> None:
    x, y = torch.randn(16, 64).bfloat16(), torch.empty(16, 64)
    recorder = capture_cute.Recorder(run=True)
    recorder.call(compiled, {"x": x, "y": y}, x, y)
    assert torch.equal(y, 2 * x.float())
    assert recorder.launches[0].grid == (16, 1, 1)
    assert recorder.reports[0].warp_instructions > 0


def test_a_tensor_that_was_not_named_is_out_of_range(compiled: object) -> None:
    x, y = torch.randn(16, 64).bfloat16(), torch.empty(16, 64)
    recorder = capture_cute.Recorder(run=True)
    with pytest.raises(SimError, match=r"global store of \d+ bytes out of range"):
        recorder.call(compiled, {"x": x}, x, y)


@cute.kernel
def print_kernel(source):
    thread, _, _ = cute.arch.thread_idx()
    if thread < 2:
        cute.printf("thread {} has {}", thread, source[thread])


@cute.jit
def print_some(source):
    print_kernel(source).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_kernels_may_print() -> None:
    x = torch.arange(32.0)
    function = cute.compile(
        print_some, from_dlpack(capture_cute.CudaView(x)), options="--enable-tvm-ffi --gpu-arch sm_100a"
    )
    recorder = capture_cute.Recorder(run=True)
    recorder.call(function, {"x": x}, x)
    assert [line.strip() for line in recorder.reports[0].printed] == [
        "thread 0 has 0.000000",
        "thread 1 has 1.000000",
    ]
