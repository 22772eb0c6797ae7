"""Compiling the SM100 kernels: one per `Plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from .forward import POINTERS, SIZES, STRIDES, Forward
from .plan import Plan


def example_arguments() -> tuple:
    """Arguments of the right types for a compilation; see `Forward.__call__`."""
    pointers, sizes = tuple(Int64(0) for _ in POINTERS), tuple(Int32(1) for _ in SIZES)
    return pointers, sizes, tuple(Int64(8) for _ in STRIDES), Float32(1.0), Int32(1), cuda.CUstream(0)


def compile_options(plan: Plan) -> str:
    """Options of the DSL's compiler."""
    return f"--enable-tvm-ffi --gpu-arch {plan.arch}"


@functools.cache
def kernel(plan: Plan) -> Callable[..., Any]:
    """The compiled forward of a plan."""
    return cute.compile(Forward(plan), *example_arguments(), options=compile_options(plan))
