"""Compiling and keeping the SM100 kernels: one per `Plan`, in memory and on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from . import backward, cache, forward
from .backward_plan import BackwardPlan
from .plan import Plan


def example_arguments(plan: Plan) -> tuple:
    """Arguments of the right types for a compilation; see `__call__` of `Forward` and `Backward`."""
    module = backward if isinstance(plan, BackwardPlan) else forward
    pointers, sizes = tuple(Int64(0) for _ in module.POINTERS), tuple(Int32(1) for _ in module.SIZES)
    strides = tuple(Int64(8) for _ in module.STRIDES)
    scales = tuple(Float32(1.0) for _ in module.SCALES)
    return pointers, sizes, strides, scales, Int32(1), cuda.CUstream(0)


def compile_plan(plan: Plan) -> Any:
    """The forward or backward of a plan, compiled anew."""
    function = backward.Backward(plan) if isinstance(plan, BackwardPlan) else forward.Forward(plan)
    return cute.compile(function, *example_arguments(plan), options=_options(plan))


def _options(plan: Plan) -> str:
    return f"--enable-tvm-ffi --gpu-arch {plan.arch}"


@functools.cache
def kernel(plan: Plan) -> Callable[..., Any]:
    """The compiled kernel of a plan: from memory, from disk, or compiled now."""
    name = cache.key(f"{plan} {_options(plan)}")
    found = cache.load(name)
    if found is None:
        found = compile_plan(plan)
        cache.store(name, found)
    return found
