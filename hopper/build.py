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


@functools.cache
def kernel(kind: str, plan: Plan | UnionPlan | TermPlan | SumPlan | PlacePlan | RepeatPlan) -> Callable[..., Any]:
    """The compiled kernel of this kind (a name of `BUILDERS`)."""
    compiled = cache.kept_or_not(
        lambda: tilelang.compile(BUILDERS[kind](plan), target=TARGET, pass_configs=PASS_CONFIGS)
    )

    def first_call(*arguments: Any) -> None:
        # From here on a call goes straight to the host function: TileLang's adapter looks for outputs to allocate.
        compiled.torch_function = compiled.adapter.get_exportable_executable()["main"]
        compiled.torch_function(*arguments)

    compiled.torch_function = first_call
    return compiled
