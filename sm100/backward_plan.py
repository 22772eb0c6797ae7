"""The SM100 backward's spec sheet, beside the forward's in `plan.py`: same roles, other areas and barriers.

    one CTA = 64 query rows, alone; a tile of 128 rows is two CTAs that know nothing of each other

q and dout lie interleaved, span by span of 64 columns: read K-major, the 64 rows of a q span followed by those of the
dout span are one operand of 128 rows, so one product gives S in lanes 0 to 63 and dP in lanes 64 to 127. Read MN-major,
two q spans (or two dout spans) are 128 columns of d, the lanes of dkv^T = q^T dS (dout^T P), whose 64 columns are the
keys. dq takes all lanes as O does in the forward: columns of d in two halves of the lanes.

dkv has no staging: it goes from tensor memory through registers to global memory, a lane a column of d, so that a
warp's adds are whole lines. Nothing is ever written over an operand that a product may still read, but P and dS, behind
`p_free`; the exchange of S and dP uses their space, before they are written.
"""

from __future__ import annotations  # noqa: I001

from dataclasses import dataclass
from functools import cached_property

from .plan import (
    BLOCK_K, D_V, HALF, ITEM, PIECE, ROW_STAGES, SMEM_LIMIT, SPAN, TMEM_COLUMNS, TMEM_LANES,
    Area, Barrier, Plan, PlanError, check_areas, lay_out,
)  # fmt: skip

CHUNK = TMEM_LANES  # columns of d of a dkv product
CHUNKS = D_V // CHUNK
SPANS = D_V // SPAN
KV_STAGES = 1
DKV_STAGES = 2  # of dkv products in tensor memory: one is added while the next is made


@dataclass(frozen=True)
class BackwardPlan(Plan):
    """What a backward is compiled for; `rows` as in the forward, 64 rows of it a CTA."""

    @property
    def ctas(self) -> int:
        """CTAs that work together: each works alone."""
        return 1

    @property
    def parts(self) -> int:
        """CTAs that a tile is cut into."""
        return self.rows.ctas

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        return (
            Barrier("q_full", ("gather",), CHUNKS),
            Barrier("q_free", ("mma",), CHUNKS),
            Barrier("kv_full", ("gather",)),
            Barrier("kv_free", ("mma",)),
            Barrier("rows_ready", ("index",), ROW_STAGES),
            Barrier("rows_free", ("gather", "softmax", "epilogue"), ROW_STAGES),
            Barrier("s_ready", ("mma",)),
            Barrier("s_free", ("softmax",)),
            Barrier("p_ready", ("softmax",)),
            Barrier("p_free", ("mma",)),
            Barrier("dkv_ready", ("mma",), DKV_STAGES),
            Barrier("dkv_free", ("epilogue",), DKV_STAGES),
            Barrier("dq_ready", ("mma",)),
            Barrier("dq_free", ("softmax",)),
        )

    @cached_property
    def smem(self) -> dict[str, Area]:
        """Shared memory, in bytes; operands of the tensor core start on 1024."""
        tail_spans = self.tail // SPAN
        sizes = {
            "q_dout": (2 * SPANS + tail_spans) * PIECE,
            "kv": KV_STAGES * (SPANS + tail_spans) * PIECE,
            "p": PIECE,
            "ds": PIECE,
            "row_numbers": ROW_STAGES * BLOCK_K * 4,
            "slot_masks": ROW_STAGES * self.rows.tokens * BLOCK_K // 8,
            "barriers": 8 * sum(b.stages for b in self.barriers),
            "tmem_address": 16,
        }
        return lay_out(sizes, alignment=16)

    @cached_property
    def tmem(self) -> dict[str, Area]:
        """Tensor memory, in 32-bit columns of all 128 lanes."""
        sizes = {
            "dq": HALF, "dq_tail": self.tail // 2, "s": BLOCK_K, "s_tail": self.tail // 2,
            "dkv": DKV_STAGES * BLOCK_K,
        }  # fmt: skip
        return lay_out(sizes)

    def check(self) -> None:
        """Raise `PlanError` unless the hardware holds it."""
        if self.D not in (D_V, D_V + SPAN) or self.parts not in (1, 2):
            raise PlanError(f"no backward plan for D {self.D} with {self.rows}")
        check_areas("shared memory", tuple(self.smem.values()), SMEM_LIMIT)
        check_areas("tensor memory", tuple(self.tmem.values()), TMEM_COLUMNS)
        for name in ("q_dout", "kv", "p", "ds"):
            if self.smem[name].start % 1024:
                raise PlanError(f"shared memory: {name} starts at {self.smem[name].start}, no multiple of 1024")
        if ITEM * BLOCK_K * BLOCK_K != PIECE:
            raise PlanError(f"P and dS of {BLOCK_K} keys do not fill a piece of {PIECE} bytes")
