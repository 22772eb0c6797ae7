"""The SM100 backward's spec sheet, beside the forward's in `plan.py`: same roles, other areas and barriers.

    up to 64 query rows: one CTA, alone          128 rows: a pair of CTAs, each with half of the columns of d

One CTA: q and dout lie interleaved, span by span of 64 columns: read K-major, the 64 rows of a q span followed by those
of the dout span are one operand of 128 rows, so one product gives S in lanes 0 to 63 and dP in lanes 64 to 127. dq
takes all lanes as O does in the forward: columns of d in two halves of the lanes.

A pair: each CTA has all 128 rows, and the left or the right half of the columns of q, dout, K and V; the even one has
the tail. So each gathers half of the bytes, adds half of dkv, and the sum over 128 heads is made by the matrix unit. S
and dP are partial sums: of 32 of the 64 keys each CTA gives its part to the other, of the other 32 it gets the rest and
makes P and dS, which both need; with a tail S first, in the room of P, and then dP in that of dS. All products are of
one CTA.

Read MN-major, two spans of q (or dout) are 128 columns of d, the lanes of q^T dS (dout^T P), whose 64 columns are the
keys; the two parts of dkv^T meet in registers, on their way from tensor memory to global memory: no staging. Nothing is
ever written over an operand that a product may still read, but P and dS, behind `p_free`. What threads and CTAs tell
each other about S and dP uses the space of P and dS, before they are written; a pair without a tail has room of its own
for it.
"""

from __future__ import annotations  # noqa: I001

from dataclasses import dataclass
from functools import cached_property

from .plan import (
    BLOCK_K, D_V, HALF, ITEM, PIECE, ROLE, ROW_STAGES, SMEM_LIMIT, SPAN, TMEM_COLUMNS, TMEM_LANES, WARP,
    Area, Barrier, Plan, PlanError, check_areas, lay_out,
)  # fmt: skip

CHUNK = TMEM_LANES  # columns of d of a dkv product
KV_STAGES = 1


@dataclass(frozen=True)
class BackwardPlan(Plan):
    """What a backward is compiled for; `rows` as in the forward.

    `ordered`: dkv's terms are stored one by one, for a sum in fixed order, instead of added.
    """

    ordered: bool = False

    @property
    def columns(self) -> int:
        """Columns of d, without the tail, that a CTA has."""
        return D_V // self.ctas

    @property
    def spans(self) -> int:
        return self.columns // SPAN

    @property
    def chunks(self) -> int:
        return self.columns // CHUNK

    @property
    def shared_sums(self) -> bool:
        """Tensor memory is short: dout^T P lies where dP was, so the next dP waits until it has been read.

        dq 256 + tail 64 + S 64 + dP 64 + q^T dS 64 columns are all 512 of the even CTA.
        """
        return self.pair and bool(self.tail)

    @property
    def p_dout(self) -> str:
        """Where in tensor memory dout^T P is."""
        return "dp" if self.shared_sums else "p_dout"

    @property
    def reads_ahead(self) -> bool:
        """dout^T P of all keys is read before any is added, to make room for dP; not where that would spill."""
        return self.shared_sums and not self.ordered

    @property
    def own_exchange(self) -> bool:
        """Partial sums have a place of their own: they need not wait for the products of the block before."""
        return self.pair and not self.tail

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        both = (
            Barrier("halves_ready", ("softmax",)),  # by the other CTA
            *(() if self.own_exchange else (Barrier("halves_taken", ("softmax",), pair=True),)),
        )
        shared = (Barrier("dp_ready", ("mma",)), Barrier("dp_free", ("epilogue",)))
        return (
            Barrier("q_full", ("gather",), self.chunks),
            Barrier("q_free", ("mma",), self.chunks),
            Barrier("kv_full", ("gather",)),
            Barrier("kv_free", ("mma",)),
            Barrier("rows_ready", ("index",), ROW_STAGES),
            Barrier("rows_free", ("epilogue",), ROW_STAGES),
            Barrier("s_ready", ("mma",)),
            *(both if self.pair else ()),
            *(shared if self.shared_sums else ()),
            Barrier("p_ready", ("softmax",), pair=True),
            Barrier("p_free", ("mma",), pair=True),
            Barrier("dkv_ready", ("mma",)),
            Barrier("dkv_free", ("epilogue",)),
            Barrier("dq_ready", ("mma",)),
        )

    @cached_property
    def smem(self) -> dict[str, Area]:
        """Shared memory, in bytes; operands of the tensor core start on 1024."""
        tail_spans = self.tail // SPAN
        # A span of q or dout: 128 rows of a pair; alone, 64 of q and 64 of dout.
        heads = {"q": (self.spans + tail_spans) * 2 * PIECE, "dout": self.spans * 2 * PIECE}
        if not self.pair:
            heads = {"q": (2 * self.spans + tail_spans) * PIECE}
        sizes = {
            **heads,
            "kv": KV_STAGES * (self.spans + tail_spans) * PIECE,
            "p": self.ctas * PIECE,
            "ds": self.ctas * PIECE,
            **({"exchange": self.exchange_bytes} if self.own_exchange else {}),
            "row_numbers": ROW_STAGES * BLOCK_K * 4,
            "slot_masks": ROW_STAGES * self.rows.tokens * BLOCK_K // 8,
            "barriers": 8 * sum(b.stages for b in self.barriers),
            "tmem_address": 16,
        }
        return lay_out(sizes, alignment=16)

    @property
    def exchange_bytes(self) -> int:
        """Of each softmax thread 16 fp32 of S or dP; of a pair of both."""
        return ROLE["softmax"].warps * WARP * 16 * 4 * self.ctas

    @cached_property
    def tmem(self) -> dict[str, Area]:
        """Tensor memory, in 32-bit columns of all 128 lanes."""
        if self.pair:
            scores = {"dq_tail": self.tail, "s": BLOCK_K, "dp": BLOCK_K}
        else:
            scores = {"dq_tail": self.tail // 2, "s": BLOCK_K, "s_tail": self.tail // 2}
        return lay_out({"dq": HALF, **scores, "ds_q": BLOCK_K, **({} if self.shared_sums else {"p_dout": BLOCK_K})})

    def check(self) -> None:
        """Raise `PlanError` unless the hardware holds it."""
        if self.D not in (D_V, D_V + SPAN) or self.ctas not in (1, 2):
            raise PlanError(f"no backward plan for D {self.D} with {self.rows}")
        check_areas("shared memory", tuple(self.smem.values()), SMEM_LIMIT)
        check_areas("tensor memory", tuple(self.tmem.values()), TMEM_COLUMNS)
        for name in ("q", "kv", "p", "ds"):
            if self.smem[name].start % 1024:
                raise PlanError(f"shared memory: {name} starts at {self.smem[name].start}, no multiple of 1024")
        if ITEM * BLOCK_K * BLOCK_K != PIECE:
            raise PlanError(f"P and dS of {BLOCK_K} keys do not fill a piece of {PIECE} bytes")
        if not self.own_exchange and self.smem["p"].size + self.smem["ds"].size < self.exchange_bytes:
            raise PlanError(f"P and dS have no room for {self.exchange_bytes} bytes of partial sums")


STATS_WARPS, ROWS_PER_WARP = 8, 4  # of the kernel in `preprocess.py`
SUM_WARPS = 4  # of the kernel in `ordered.py`; a row each


@dataclass(frozen=True)
class RowPlan:
    """What the preprocess is compiled for."""

    dtype: str
    arch: str = "sm_100a"


@dataclass(frozen=True)
class SumPlan:
    """What the ordered sum is compiled for."""

    D: int
    arch: str = "sm_100a"
