"""Compiling and keeping the SM100 kernels: one per `Plan`, in memory and on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from . import cache
from .forward import POINTERS, SIZES, STRIDES, Forward
from .plan import Plan


def example_arguments() -> tuple:
    """Arguments of the right types for a compilation; see `Forward.__call__`."""
    pointers, sizes = tuple(Int64(0) for _ in POINTERS), tuple(Int32(1) for _ in SIZES)
    return pointers, sizes, tuple(Int64(8) for _ in STRIDES), Float32(1.0), Int32(1), cuda.CUstream(0)


def compile_plan(plan: Plan) -> Any:
    """The forward of a plan, compiled anew."""
    return cute.compile(Forward(plan), *example_arguments(), options=_options(plan))


def _options(plan: Plan) -> str:
    return f"--enable-tvm-ffi --gpu-arch {plan.arch}"


@functools.cache
def kernel(plan: Plan) -> Callable[..., Any]:
    """The compiled forward of a plan: from memory, from disk, or compiled now."""
    name = cache.key(f"{plan} {_options(plan)}")
    found = cache.load(name)
    if found is None:
        found = compile_plan(plan)
        cache.store(name, found)
    return found
