"""What the kernels of the union lists (`unions.py`) are compiled for, and their shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..union_lists import UnionPlan
from .plan import SMEM_LIMIT, WARP, Area, lay_out


@dataclass(frozen=True)
class ListPlan(UnionPlan):
    """The lists of tiles of `tokens` tokens; `size` bytes of bits."""

    arch: str = "sm_100a"

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def fields(self) -> int:
        """Rows of kv in a word of bits."""
        return 32 // self.width

    @property
    def alone(self) -> bool:
        """Whether a multiprocessor holds no second CTA."""
        return 2 * self.smem_bytes > SMEM_LIMIT

    @cached_property
    def smem(self) -> dict[str, Area]:
        """Shared memory, in bytes."""
        words = {"next_row": 1, "repeats": 1, "counts": self.warps, "lengths": self.tokens, "limits": self.tokens}
        return lay_out({"bits": self.size, **{name: 4 * count for name, count in words.items()}}, alignment=4)

    @property
    def smem_bytes(self) -> int:
        return max(area.end for area in self.smem.values())


@dataclass(frozen=True)
class SamplePlan(ListPlan):
    """The look at a sample of tiles."""
