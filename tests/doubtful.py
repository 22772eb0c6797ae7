"""Wrong arguments in bulk: every argument of a call replaced by values of other kinds, shapes, dtypes and layouts.

Whatever comes, the call gives a result or refuses by an error of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_sparse_mla import ArgumentError, SparseMLAError

KINDS: tuple[Any, ...] = (
    None, "s", "0", b"x", 0.5, float("nan"), -1, 0, 2**40, 2**70, True, 1j, (), [], {}, object(), Fraction(1, 3),
    np.float32(0.5), np.int64(0), np.zeros(2), torch.tensor(1.0), torch.tensor(0), torch.ones(2), torch.float32,
    torch.device("cpu"),
)  # fmt: skip


def values(value: Any) -> list[Any]:
    """What stands in for `value`; some argument takes a few of them."""
    if not isinstance(value, Tensor):
        return list(KINDS)
    axes = range(value.dim())
    cuts = [value.narrow(axis, 0, n) for axis in axes for n in (0, value.shape[axis] - 1)]
    dtypes = [value.to(dtype) for dtype in (torch.float64, torch.int16, torch.bool, torch.complex64)]
    expanded = [value.narrow(axis, 0, 1).expand(value.shape) for axis in axes]
    negated = [torch._neg_view(value)] if value.is_floating_point() else []
    other = [value.flatten()[0], value[None], value[..., None], value.to("meta"), value.to_sparse()]
    return [*KINDS, *cuts, *dtypes, *expanded, *negated, *other]


def refusals(call: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, int]:
    """How often each argument was refused by its own name. Refusals name an argument of this call, always."""
    call(**arguments)
    refused = dict.fromkeys(arguments, 0)
    for name, value in arguments.items():
        for other in values(value):
            try:
                call(**{**arguments, name: other})
            except ArgumentError as error:
                assert error.argument in arguments, (name, error)
                refused[name] += error.argument == name
            except SparseMLAError:
                continue
    return refused
