"""`ours:fixed_shapes`: the Hopper kernels compiled anew for each set of shapes and strides, to price dynamic ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

Extents = tuple[tuple[str, int], ...]


def _dynamic_build(kind: str, plan: Any) -> tuple[Any, dict[str, Any]]:
    """A builder's function, and its shape and stride variables by the names that it gave them.

    A variable is known by itself: TileLang may rename one that the builder also calls otherwise.
    """
    import tilelang
    from cute_sparse_mla.hopper import build

    variables: dict[str, Any] = {}
    dynamic = tilelang.language.dynamic

    def noted(name: str, dtype: str = "int32") -> Any:
        variables[name] = dynamic(name, dtype)
        return variables[name]

    with patch.object(tilelang.language, "dynamic", noted):
        return build.BUILDERS[kind](plan), variables


def _extents(function: Any, variables: dict[str, Any], args: tuple[Any, ...]) -> Extents:
    """Value of every shape and stride variable of a TileLang function, from the tensors it is called with."""
    found: dict[str, int] = {}
    for parameter, value in zip(function.params, args, strict=True):
        if isinstance(value, Tensor):
            buffer = function.buffer_map[parameter]
            pairs = (*zip(buffer.shape, value.shape, strict=True), *zip(buffer.strides, value.stride(), strict=False))
            for extent, number in pairs:
                found |= {name: number for name, variable in variables.items() if variable.same_as(extent)}
    return tuple(sorted(found.items()))


@functools.cache
def _compiled(kind: str, plan: Any, extents: Extents) -> Callable[..., Any]:
    import tilelang
    from cute_sparse_mla.hopper import build

    # The builders name each shape and stride by `T.dynamic`; here the name gives its number.
    with patch.object(tilelang.language, "dynamic", lambda name, dtype=None: dict(extents)[name]):
        function = build.BUILDERS[kind](plan)
    return tilelang.compile(function, target=build.TARGET, pass_configs=build.pass_configs(kind, plan))


@functools.cache
def _kernel(kind: str, plan: Any) -> Callable[..., Any]:
    general, variables = _dynamic_build(kind, plan)
    return lambda *args: _compiled(kind, plan, _extents(general, variables, args))(*args)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Within it, calls of `cute_sparse_mla` on SM90 run kernels whose shapes and strides are compile-time constants."""
    from cute_sparse_mla.hopper import build

    with patch.object(build, "kernel", _kernel):
        yield
