"""Sizes of the SM90 kernels: tile shapes, shared-memory carve-up, register split; checked before compiling."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP = 128
THREADS = 3 * WARPGROUP
ROWS = 64  # rows of a tile, tokens x padded heads: one wgmma M
BLOCK_K = 64  # slots of a block
D_V = 512
HALF = D_V // 2
CHUNK = 64  # dkv columns of one product and its adds in the backward
# Registers a thread holds after the split. The pool is what the launch gave: 168 a thread, not the whole register file;
# two matrix warpgroups and a copy warpgroup that ask for more than 3 x 168 wait for ever.
LAUNCH_REGISTERS = 168
MATRIX_REGISTERS = 208
PRODUCER_REGISTERS = 88
# Of the backward: the scores' warpgroup, the stream of dkv, the copies.
SCORE_REGISTERS = 224
STREAM_REGISTERS = 120
COPY_REGISTERS = 160
for _split in (2 * MATRIX_REGISTERS + PRODUCER_REGISTERS, SCORE_REGISTERS + STREAM_REGISTERS + COPY_REGISTERS):
    if _split > 3 * LAUNCH_REGISTERS:
        raise ValueError(f"a register split of {_split} exceeds the launch's pool of {3 * LAUNCH_REGISTERS}")
ITEM = 2  # bytes of bf16 and fp16
SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA may use on SM90 (227 KB)
BARRIER_BYTES = 256
LINE = 128  # bytes of a line of the caches
L2_BYTES = 50 << 20  # of an H100 and an H200: past it adds to dkv slow down by half unless CTAs add to the same rows

# Threads of the CTAs that make union lists, on a multiprocessor: 48 registers each. (1536 of 40, which spill more:
# 28.5 us for 8 tokens a tile, 4096 tokens, K 2048 of 8192 rows, 48: 26.4; 16,384 tokens, K 640 of 20,480 rows, 8, 4
# and 2 tokens: 35, 47 and 52, 48: 34, 47 and 54.)
LIST_THREADS = 1280
FACTOR_COLUMNS = 2 * ROWS  # of a slot: dS and P of the rows of its tile
PRODUCT_ROWS, PRODUCT_STAGES = 2 * ROWS, 4  # rows of kv of a CTA that multiplies factors, and tiles in its ring
MOST_TILES = 512  # tiles whose factors are multiplied at a time
ADDS, TERMS, FACTORS = "adds", "terms", "factors"


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for. B, S, S_kv, K, heads, strides, scale and flags are run-time values.

    With `tokens` above 1 a tile's rows are that many neighbouring tokens, each with its heads padded to
    `ROWS / tokens`, over the union of the tokens' rows of kv (`unions.py`), which is int32. What a backward does with
    dkv: `ADDS` adds it, `TERMS` stores what each slot adds (`ordered.py`), `FACTORS` stores P and dS (`products.py`).
    """

    D: int
    dtype: str
    index_dtype: str
    tokens: int = 1
    dkv: str = ADDS

    @property
    def forward_smem(self) -> dict[str, int]:
        """Shared memory of the forward by use. P of a block lies in the tail columns of its KV buffer, if any."""
        parts = {
            f"q [{ROWS} x {self.D}]": ROWS * self.D * ITEM,
            f"kv 2 x [{BLOCK_K} x {self.D}]": 2 * BLOCK_K * self.D * ITEM,
            "slot validity or bits, row max, row sum, sinks": 2 * BLOCK_K * 4 + 6 * ROWS * 4,
            "barriers": BARRIER_BYTES,
        }
        if self.D == D_V:
            parts[f"p 2 x [{ROWS} x {BLOCK_K}]"] = 2 * ROWS * BLOCK_K * ITEM
        return parts

    @property
    def backward_smem(self) -> dict[str, int]:
        """Shared memory of the backward by use. P lies where dout has no tail, if q has one."""
        parts = {
            f"q over dout [{2 * ROWS} x {self.D}]": 2 * ROWS * self.D * ITEM,
            f"kv [{BLOCK_K} x {self.D}]": BLOCK_K * self.D * ITEM,
            f"dS [{BLOCK_K} x {ROWS}]": BLOCK_K * ROWS * ITEM,
            "slot rows and bits, row statistics": 5 * BLOCK_K * 4 + 3 * ROWS * 4,
            "barriers": BARRIER_BYTES,
        }
        if self.D == D_V:
            parts[f"p [{BLOCK_K} x {ROWS}]"] = BLOCK_K * ROWS * ITEM
        return parts

    @property
    def pair_smem(self) -> dict[str, int]:
        """Shared memory of a CTA of a pair by use. P lies where the peer's scores came."""
        columns = self.D // 2
        return {
            f"q and dout [{2 * ROWS} x {columns}], [{2 * ROWS} x {HALF}]": 2 * ROWS * (columns + HALF) * ITEM,
            f"kv [{BLOCK_K} x {columns}]": BLOCK_K * columns * ITEM,
            f"scores of the peer 2 x [{BLOCK_K} x {ROWS}]": 2 * BLOCK_K * ROWS * 4,
            f"dS 2 x [{BLOCK_K} x {ROWS}]": 2 * BLOCK_K * ROWS * ITEM,
            "slot rows, row statistics": 6 * BLOCK_K * 4 + 3 * ROWS * 4,
            "barriers": BARRIER_BYTES,
        }


@dataclass(frozen=True)
class TermPlan:
    """What the kernel that numbers the rows of dkv's terms is compiled for."""

    index_dtype: str


@dataclass(frozen=True)
class SumPlan:
    """What the kernel that adds the terms in order is compiled for."""

    D: int


@dataclass(frozen=True)
class PlacePlan:
    """The kernel that says where a tile has each row of kv is one for all."""


@dataclass(frozen=True)
class RepeatPlan:
    """What the kernel that adds the repeats of rows is compiled for."""

    D: int
    dtype: str
    tokens: int
