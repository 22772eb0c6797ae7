"""The frozen facts of one call: everything that a kernel or a table may be chosen by, and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

# A function of this type returns None exactly where it is given None.
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

# Head classes that kernels are compiled for, per group; real head counts are padded up inside the kernels.
HEAD_CLASSES = (16, 32, 64, 128)
MAX_HEADS_PER_GROUP = HEAD_CLASSES[-1]
# The passes of a call.
FORWARD, BACKWARD = "forward", "backward"
# (D, d_v) that the GPU kernels take; the reference takes any 1 <= d_v <= D.
KERNEL_DIMS = ((512, 512), (576, 512))
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def default_scale(D: int) -> float:
    """`D ** -0.5`, the scale used when the caller gives none."""
    return float(D) ** -0.5


def default_d_v(D: int) -> int | None:
    """Width of V when the caller gives none: 512 at the kernels' D, otherwise unknown."""
    return next((d_v for kernel_D, d_v in KERNEL_DIMS if kernel_D == D), None)


@dataclass(frozen=True)
class Problem:
    """Shapes, dtypes and options of one call, in batched form (a packed call has `B == 1`).

    `q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]`, `out [B, S, H, d_v]`; `H = G * heads_per_group`.
    """

    B: int
    S: int
    S_kv: int
    H: int
    G: int
    K: int
    D: int
    d_v: int
    dtype: torch.dtype
    index_dtype: torch.dtype
    causal: bool = False
    has_sink: bool = False
    has_topk_length: bool = False
    has_q_positions: bool = False
    packed: bool = False

    @property
    def heads_per_group(self) -> int:
        return self.H // self.G

    @property
    def head_class(self) -> int:
        """Smallest compiled head count that holds a group's heads."""
        return next(c for c in HEAD_CLASSES if c >= self.heads_per_group)

    @property
    def is_empty(self) -> bool:
        """No query token or no slot at all: the result is known without a kernel."""
        return 0 in (self.B, self.S, self.S_kv, self.K)

    @property
    def forward_flops(self) -> int:
        """`2 T H K (D + d_v)`, invalid slots counted."""
        return 2 * self.B * self.S * self.H * self.K * (self.D + self.d_v)

    @property
    def backward_flops(self) -> int:
        """`2 T H K (3 D + 2 d_v)`, invalid slots counted."""
        return 2 * self.B * self.S * self.H * self.K * (3 * self.D + 2 * self.d_v)

    @property
    def gather_bytes(self) -> int:
        """Bytes of KV rows that one pass over all slots reads, once per (token, group, slot)."""
        return self.B * self.S * self.G * self.K * self.D * self.dtype.itemsize

    @property
    def add_bytes(self) -> int:
        """Bytes of fp32 adds into dkv of one backward, once per (token, group, slot)."""
        return self.B * self.S * self.G * self.K * self.D * 4
