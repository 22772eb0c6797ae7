"""Sums of products as an H200's tensor core makes them, bit for bit; `test_tensor_core.py` has its recorded results.

A product of depth 16 adds 16 exact products and the accumulator at once: each is cut off, toward zero, two bits below
the last bit of an fp32 number with the largest exponent among them (of a product: the sum of its factors' exponents),
and the sum is cut off to fp32. So every step may lose up to 5 units in the last place of the largest partial sum,
always toward zero, where round to nearest would lose half a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEPTH = 16
FRACTION_BITS = 23 + 2
FP32_BITS = 24


def step(accumulator: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`accumulator [...]` plus the sum of `a b`, both `[..., 16]`, of bf16 or fp16 values; all in float64."""
    terms = torch.cat((a * b, accumulator[..., None]), dim=-1)
    exponents = torch.cat(
        (torch.frexp(a).exponent + torch.frexp(b).exponent - 1, torch.frexp(accumulator).exponent[..., None]), dim=-1
    )
    largest = exponents.masked_fill(terms == 0, -2000).amax(dim=-1, keepdim=True) - 1
    cut = torch.trunc(torch.ldexp(terms, FRACTION_BITS - largest))
    total = torch.ldexp(cut.sum(dim=-1), largest[..., 0] - FRACTION_BITS)
    mantissa, exponent = torch.frexp(total)
    return torch.ldexp(torch.trunc(mantissa * 2.0**FP32_BITS), exponent - FP32_BITS)


def products(a: Tensor, b: Tensor, columns: list[int]) -> Tensor:
    """Sums `[...]` of `a b` over the last dimension, in one accumulator, from steps that begin at `columns`."""
    a, b = torch.broadcast_tensors(a.double(), b.double())
    total = torch.zeros(a.shape[:-1], dtype=torch.float64, device=a.device)
    for first in columns:
        total = step(total, a[..., first : first + DEPTH], b[..., first : first + DEPTH])
    return total
