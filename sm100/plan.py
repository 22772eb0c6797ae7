"""The SM100 forward's spec sheet: roles, tensor memory, shared memory and barriers, as data that is checked.

    one CTA = 64 query rows; a tile is one CTA, or a pair of CTAs for 128 rows

Up to 64 rows take one CTA: its weight-stationary M 64 products use all 128 lanes of tensor memory, where 64 rows over a
pair would fill half of them. 128 rows take a pair, which halves the gathered bytes of each CTA.

Every byte of a gathered row is read once and used as K and as V. The first 512 columns are cut in halves, left and
right; a pair keeps one half in each CTA, a single CTA keeps both. Q K^T of the left half goes to lanes 0 to 63 of
tensor memory and of the right half to lanes 64 to 127 (Q lies in tensor memory, so each half of the lanes has its own
columns of Q); their sum is the score. P V gives columns of the left and right half in the same way. The 64 tail
columns of D 576 are cut by keys: a product of its own, whose lanes 0 to 63 get the first 32 keys and 64 to 127 the
others; a pair keeps the tail of 32 keys in each CTA. So the scores of a row are summed by the two threads of that row,
in lanes r and r + 64, which own 32 keys each. (K split by columns instead of keys, and Q in tensor memory for it, as
in the forward kernels of FlashMLA and of cudnn-frontend's DSA.)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from .heads import ROWS_PER_CTA, Rows

WARP = 32
BLOCK_K = 64  # keys of a block
D_V = 512
HALF = D_V // 2
ITEM = 2  # bytes of bf16 and fp16
SPAN = 64  # columns of a 128-byte swizzle span
PIECE = BLOCK_K * SPAN * ITEM  # 64 rows of one span: 8 KB
PIECES = 4  # of a KV slot
SLOT = PIECES * PIECE
SLOTS = 5  # of the KV ring: what shared memory holds
TAIL_STAGES = 2  # blocks whose tail is there: free again once their scores are done
ROW_STAGES = 4  # blocks of resolved rows and masks
OUT_PIECES = 2  # one 64-column piece of each half of the lanes leaves together
THREADS_LIMIT, REGISTER_FILE = 1024, 65_536
SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA may use (227 KB)
TMEM_COLUMNS, TMEM_LANES = 512, 128
# Running maximum before the first valid slot, in powers of two: below every score, and finite.
FLOOR = -1e30
# O is rescaled only when a maximum grows by more than 2**8: P then stays below 256, exact enough in 16 bits.
RESCALE_AT = 8.0


class PlanError(ValueError):
    """A plan that the hardware cannot hold; the message has the arithmetic."""


@dataclass(frozen=True)
class Role:
    """Warps `[first, first + warps)` of every CTA."""

    name: str
    first: int
    warps: int
    does: str


ROLES = (
    Role("softmax", 0, 8, "scores to P, running maximum and sum; rescales O when a maximum grows much"),
    Role("epilogue", 8, 4, "O / l to out, lse"),
    Role("mma", 12, 1, "all tensor-core work (of a pair: the even CTA's)"),
    Role("index", 13, 1, "indices to row numbers and slot masks"),
    Role("gather", 14, 2, "rows of KV by TMA gather4; q"),
)
ROLE = {role.name: role for role in ROLES}
WARPS = sum(role.warps for role in ROLES)
THREADS = WARPS * WARP
REGISTERS = REGISTER_FILE // THREADS


@dataclass(frozen=True)
class Barrier:
    """An mbarrier per stage. Each warp of the roles in `by` arrives once; a commit of the mma role arrives once.

    `pair`: warps of both CTAs arrive, on the even CTA's barrier.
    """

    name: str
    by: tuple[str, ...]
    stages: int = 1
    pair: bool = False

    def arrivals(self, ctas: int) -> int:
        """Arrivals that complete a phase."""
        return sum(ROLE[name].warps for name in self.by) * (ctas if self.pair else 1)


@dataclass(frozen=True)
class Area:
    """A range of shared memory (bytes) or of tensor memory (columns)."""

    name: str
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def lay_out(sizes: dict[str, int], alignment: int = 1) -> dict[str, Area]:
    """Areas one behind the other, each start a multiple of `alignment`."""
    areas, at = {}, 0
    for name, size in sizes.items():
        areas[name] = Area(name, at, size)
        at += -(-size // alignment) * alignment
    return areas


def check_areas(what: str, areas: tuple[Area, ...], limit: int) -> None:
    """No overlap, nothing past the limit."""
    ordered = sorted(areas, key=lambda a: a.start)
    for left, right in itertools.pairwise(ordered):
        if left.end > right.start:
            raise PlanError(f"{what}: {left.name} ends at {left.end}, past the start {right.start} of {right.name}")
    if ordered[0].start < 0 or ordered[-1].end > limit:
        sums = " + ".join(f"{a.size} ({a.name})" for a in ordered)
        raise PlanError(f"{what}: {sums} end at {ordered[-1].end}; there are {limit}")


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for. B, S, S_kv, K, heads, strides, scale, sinks and flags are run-time values."""

    D: int
    dtype: str
    index_dtype: str
    rows: Rows
    arch: str = "sm_100a"

    @property
    def ctas(self) -> int:
        """CTAs of a tile, which are a cluster."""
        return self.rows.ctas

    @property
    def pair(self) -> bool:
        return self.ctas == 2

    @property
    def tail(self) -> int:
        """Columns of K past those of V."""
        return self.D - D_V

    @property
    def q_slots(self) -> int:
        """Slots of the KV ring through which q passes on its way to tensor memory; the last has the tail, twice."""
        return 3 if self.tail else 2

    @property
    def p_buffers(self) -> int:
        """Of a pair, P of a block may be ready before the product before it is done."""
        return 2 if self.pair else 1

    @property
    def tail_keys(self) -> int:
        """Keys of a block whose tail this CTA holds."""
        return (BLOCK_K // self.ctas) if self.tail else 0

    @property
    def tails_wait(self) -> bool:
        """Whether a free slot does not say that its tail is free, as it does where slots hold no more blocks."""
        return bool(self.tail) and SLOTS // self.slots_per_block > TAIL_STAGES

    @property
    def slots_per_block(self) -> int:
        """A pair keeps 64 keys of one half of the columns in a slot, a single CTA of both in two."""
        return 1 if self.pair else 2

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        return (
            Barrier("slot_full", ("gather",), SLOTS),
            Barrier("slot_free", ("mma",), SLOTS),
            *((Barrier("tail_free", ("mma",), TAIL_STAGES),) if self.tails_wait else ()),
            Barrier("rows_ready", ("index",), ROW_STAGES),
            Barrier("rows_free", ("gather", "softmax"), ROW_STAGES),
            Barrier("s_ready", ("mma",)),
            Barrier("s_free", ("softmax",), pair=True),
            Barrier("p_ready", ("softmax",), self.p_buffers, pair=True),
            Barrier("pv_done", ("mma",), self.p_buffers),
            Barrier("o_ready", ("mma",)),
            Barrier("o_free", ("epilogue",), pair=True),
            Barrier("stats_ready", ("softmax",)),
            Barrier("stats_free", ("epilogue",)),
        )

    @cached_property
    def smem(self) -> dict[str, Area]:
        """Shared memory, in bytes; operands of the tensor core start on 1024."""
        tokens = self.rows.tokens
        sizes = {
            "slots": SLOTS * SLOT,
            "tails": TAIL_STAGES * self.tail_keys * SPAN * ITEM,
            "p": self.p_buffers * ROWS_PER_CTA * BLOCK_K * ITEM,
            "out": OUT_PIECES * PIECE,
            "exchange": ROLE["softmax"].warps * WARP * 16 * 4,
            "row_max": 2 * 4 * ROWS_PER_CTA * 4,
            "row_numbers": ROW_STAGES * BLOCK_K * 4,
            "slot_masks": ROW_STAGES * tokens * BLOCK_K // 8,
            "sums": 4 * ROWS_PER_CTA * 4,
            "maxima": ROWS_PER_CTA * 4,
            "barriers": 8 * sum(b.stages for b in self.barriers),
            "tmem_address": 16,
        }
        return lay_out(sizes, alignment=16)

    @property
    def smem_bytes(self) -> int:
        return max(area.end for area in self.smem.values())

    @cached_property
    def tmem(self) -> dict[str, Area]:
        """Tensor memory, in 32-bit columns of all 128 lanes."""
        # A column holds two elements of q, or one of O and S, for each half of the lanes; q's tail is in both halves.
        sizes = {"o": HALF, "q": HALF // 2, "q_tail": self.tail // 2, "s": BLOCK_K, "s_tail": self.tail // 2}
        return lay_out(sizes)

    def barrier_offset(self, name: str) -> int:
        """Byte offset of a barrier's first stage in shared memory."""
        at = self.smem["barriers"].start
        for barrier in self.barriers:
            if barrier.name == name:
                return at
            at += 8 * barrier.stages
        raise KeyError(name)

    def check(self) -> None:
        """Raise `PlanError` unless the hardware holds it."""
        if self.D not in (D_V, D_V + SPAN) or self.rows.ctas not in (1, 2):
            raise PlanError(f"no plan for D {self.D} with {self.rows}")
        firsts = [role.first for role in ROLES]
        if firsts != [sum(r.warps for r in ROLES[:i]) for i in range(len(ROLES))]:
            raise PlanError(f"roles do not follow each other: first warps {firsts}")
        if any(ROLE[name].first % 4 for name in ("softmax", "epilogue")):
            raise PlanError("a warp reaches the 32 lanes of tensor memory of its number modulo 4")
        if THREADS > THREADS_LIMIT or REGISTERS * THREADS > REGISTER_FILE:
            raise PlanError(f"{THREADS} threads of {REGISTERS} registers exceed {THREADS_LIMIT} or {REGISTER_FILE}")
        check_areas("shared memory", tuple(self.smem.values()), SMEM_LIMIT)
        check_areas("tensor memory", tuple(self.tmem.values()), TMEM_COLUMNS)
        for name in ("slots", "tails", "p", "out"):
            if self.smem[name].start % 1024:
                raise PlanError(f"shared memory: {name} starts at {self.smem[name].start}, no multiple of 1024")

    def draw(self) -> str:
        """The plan as text: roles, tensor memory, shared memory, barriers."""
        lines = [f"{self.ctas} CTA(s) of {THREADS} threads, {REGISTERS} registers each, arch {self.arch}", "warps"]
        lines += [f"  {r.first:3d} to {r.first + r.warps - 1:3d}  {r.name:10s} {r.does}" for r in ROLES]
        lines += ["tensor memory, columns", *_bars(self.tmem, TMEM_COLUMNS)]
        lines += ["shared memory, bytes", *_bars(self.smem, SMEM_LIMIT), "barriers: stages x arrivals"]
        for b in self.barriers:
            both = ", of both CTAs" if b.pair and self.pair else ""
            lines.append(f"  {b.name:12s} {b.stages} x {b.arrivals(self.ctas):2d}  {' and '.join(b.by)}{both}")
        return "\n".join(lines)


def _bars(areas: dict[str, Area], limit: int) -> list[str]:
    width = 60
    lines = []
    for area in areas.values():
        first, last = area.start * width // limit, max(area.end * width // limit, area.start * width // limit + 1)
        bar = " " * first + "#" * (last - first)
        lines.append(f"  |{bar:{width}s}| {area.start:6d} + {area.size:6d}  {area.name}")
    return lines
