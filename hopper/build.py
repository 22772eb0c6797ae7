"""Compiling and keeping the TileLang kernels: one per `Plan` and kind, in memory here and on disk by TileLang."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tilelang

from ..union_lists import UnionPlan
from . import backward, backward_pair, cache, forward, ordered, postprocess, products, unions
from .plan import PlacePlan, Plan, RepeatPlan, SumPlan, TermPlan

TARGET = {"kind": "cuda", "arch": "sm_90a"}
BUILDERS = {
    "forward": forward.build,
    "backward": backward.build,
    "backward_pair": backward_pair.build,
    "postprocess": postprocess.build,
    "term_rows": ordered.build_term_rows,
    "ordered_sums": ordered.build_sums,
    "places": products.build_places,
    "products": products.build_products,
    "repeats": products.build_repeats,
    "unions": unions.build,
    "union_samples": unions.build_samples,
}
_KEY = tilelang.PassConfigKey
PASS_CONFIGS = {
    _KEY.TL_ENABLE_FAST_MATH: True,
    # The kernels guard every access themselves: heads, slots, lengths.
    _KEY.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    # The roles are written out by hand; the automatic pass must not move them.
    _KEY.TL_DISABLE_WARP_SPECIALIZED: True,
    # The check does not see what device code of `ptx.py` writes.
    _KEY.TL_DISABLE_BUFFER_INIT_CHECK: True,
}
# ptxas's level of the use of registers, by kind and D, where its own (5) is not the fastest on an H200 (backward, 64
# heads and K 640, 128 and 1152, 8 and 640: 0.996, 0.983, 0.987 of its time; at D 576 1.05, 1.01 with 8 heads).
REGISTER_LEVEL = {("backward", 512): 3}


def pass_configs(kind: str, plan: Any) -> dict[Any, Any]:
    """TileLang's options for a kernel."""
    level = REGISTER_LEVEL.get((kind, getattr(plan, "D", None)))
    return PASS_CONFIGS if level is None else {**PASS_CONFIGS, _KEY.TL_PTXAS_REGISTER_USAGE_LEVEL: level}


@functools.cache
def kernel(kind: str, plan: Plan | UnionPlan | TermPlan | SumPlan | PlacePlan | RepeatPlan) -> Callable[..., Any]:
    """The compiled kernel of this kind (a name of `BUILDERS`)."""
    compiled = cache.kept_or_not(
        lambda: tilelang.compile(BUILDERS[kind](plan), target=TARGET, pass_configs=pass_configs(kind, plan))
    )

    def first_call(*arguments: Any) -> None:
        # From here on a call goes straight to the host function: TileLang's adapter looks for outputs to allocate.
        compiled.torch_function = compiled.adapter.get_exportable_executable()["main"]
        compiled.torch_function(*arguments)

    compiled.torch_function = first_call
    return compiled
