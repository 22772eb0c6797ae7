"""Scales that every kernel is given, and the unit that gradients of calls with a sink carry inside a backward."""

from __future__ import annotations

import math

import torch

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# Scores of invalid slots are -inf before they are scaled: a scale of 0 would make them NaN.
SMALLEST_SCALE = 1e-30
# Power of 4: fp32 adds in global memory flush what is below 1.2e-38, bf16 results reach down to 1e-40. It takes as much
# from the top: beyond 2e31 they overflow.
UNIT = 2.0**24


def score_scale(sm_scale: float) -> float:
    """What kernels scale scores by: `sm_scale`, but never 0."""
    return max(float(sm_scale), SMALLEST_SCALE)


def gradient_unit(dtype: torch.dtype, sm_scale: float, has_sink: bool) -> float:
    """`UNIT` for bf16 with a sink, else 1: P in that unit does not fit fp16, and `sm_scale / unit` must be normal."""
    if not has_sink or dtype != torch.bfloat16:
        return 1.0
    return 1.0 if 0 < float(sm_scale) < UNIT * torch.finfo(torch.float32).tiny else UNIT
