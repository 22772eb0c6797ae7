"""Compiling and keeping the SM100 kernels: one per `Plan`, in memory and on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from . import backward, cache, forward, ordered, preprocess, unions
from .backward_plan import BackwardPlan, RowPlan, SumPlan
from .list_plan import ListPlan, SamplePlan
from .plan import Plan

AnyPlan = Plan | RowPlan | SumPlan | ListPlan
# Kind of plan -> the module with the names of the arguments, and the kernel.
KERNELS: dict[type, tuple[Any, type]] = {
    Plan: (forward, forward.Forward),
    BackwardPlan: (backward, backward.Backward),
    RowPlan: (preprocess, preprocess.Preprocess),
    SumPlan: (ordered, ordered.OrderedSum),
    ListPlan: (unions, unions.Unions),
    SamplePlan: (unions, unions.Samples),
}


def example_arguments(plan: AnyPlan) -> tuple:
    """Arguments for a compilation: what every kernel's `__call__` takes, lists without a name left out.

    Their types are those of the entry point.
    """
    module, _ = KERNELS[type(plan)]
    values = {"POINTERS": Int64(0), "SIZES": Int32(1), "STRIDES": Int64(8), "SCALES": Float32(1.0)}
    lists = (tuple(value for _ in getattr(module, name, ())) for name, value in values.items())
    return *filter(None, lists), Int32(1), cuda.CUstream(0)


def compile_plan(plan: AnyPlan) -> Any:
    """The kernel of a plan, compiled anew."""
    _, kind = KERNELS[type(plan)]
    return cute.compile(kind(plan), *example_arguments(plan), options=_options(plan))


def _options(plan: AnyPlan) -> str:
    return f"--enable-tvm-ffi --gpu-arch {plan.arch}"


@functools.cache
def kernel(plan: AnyPlan) -> Callable[..., Any]:
    """The compiled kernel of a plan: from memory, from disk, or compiled now."""
    name = cache.key(f"{plan} {_options(plan)}")
    found = cache.load(name)
    if found is None:
        found = compile_plan(plan)
        cache.store(name, found)
    return found
