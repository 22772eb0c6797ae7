"""Tensor maps: the 128-byte descriptors that TMA instructions read, and the copies that they describe.

The bit layout is the one that CuTe DSL's host code writes inline (checked against its output; NVIDIA documents none).
Words are 64 bits: w0 address; w1 flags | stride0 / 16 << 32; w2 stride1 / 16 | stride2 / 16 << 32; w3 stride3 / 16 and
at bits 32 to 47 the high four bits of each stride; w4 to w6 dims - 1, 32 bits each; w6[63:56] box0 - 1; w7 the other
box dims - 1, one byte each. Flags: [6:4] rank - 1, [10:7] element type, [12:11] interleave, [15:13] swizzle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .memory import GlobalMemory, SimError

# Element type code -> (bytes, name). The order follows CUtensorMapDataType with FLOAT32_FTZ before FLOAT64.
ELEMENTS = {
    0: (1, "u8"),
    1: (2, "u16"),
    2: (4, "u32"),
    3: (4, "s32"),
    4: (8, "u64"),
    5: (8, "s64"),
    6: (2, "f16"),
    7: (4, "f32"),
    8: (4, "f32"),
    9: (8, "f64"),
    10: (2, "bf16"),
    11: (4, "tf32"),
    12: (4, "tf32"),
}
CODES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "s64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 9,
    "bf16": 10,
    "tf32": 11,
}
# Swizzle code -> bytes of the swizzle span; the 16-byte chunk index is XORed with address bits 7 to 9.
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class TensorMap:
    address: int
    element: str
    element_bytes: int
    dims: tuple
    strides: tuple  # bytes, of dims 1 and up
    box: tuple
    swizzle: int

    @property
    def rank(self) -> int:
        return len(self.dims)

    def offset(self, coordinate: tuple) -> int:
        return coordinate[0] * self.element_bytes + sum(
            c * s for c, s in zip(coordinate[1:], self.strides, strict=True)
        )


def decode(data: bytes) -> TensorMap:
    words = struct.unpack("<8Q", data[:64])
    flags = words[1] & 0xFFFFFFFF
    rank = (flags >> 4 & 7) + 1
    code = flags >> 7 & 15
    if code not in ELEMENTS or rank > 5:
        raise SimError(f"malformed tensor map: rank {rank}, element type code {code}")
    if flags >> 11 & 3 or flags >> 13 & 7 not in SWIZZLES:
        raise SimError(f"tensor map: interleave {flags >> 11 & 3}, swizzle {flags >> 13 & 7} are not modelled")
    size, name = ELEMENTS[code]
    low = (words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF)
    high = words[3] >> 32
    strides = tuple((low[i] | (high >> (4 * i) & 15) << 32) * 16 for i in range(rank - 1))
    dims = (words[4] & 0xFFFFFFFF, words[4] >> 32, words[5] & 0xFFFFFFFF, words[5] >> 32, words[6] & 0xFFFFFFFF)
    box = (words[6] >> 56, *(words[7] >> (8 * i) & 255 for i in range(4)))
    if words[0] % 16 or (box[0] + 1) * size % 16:
        raise SimError(
            f"malformed tensor map: address 0x{words[0]:x} and box rows of {(box[0] + 1) * size} bytes must be "
            "multiples of 16"
        )
    return TensorMap(
        words[0],
        name,
        size,
        tuple(d + 1 for d in dims[:rank]),
        strides,
        tuple(b + 1 for b in box[:rank]),
        SWIZZLES[flags >> 13 & 7],
    )


def encode(address: int, element: str, dims: tuple, strides: tuple, box: tuple, swizzle: int) -> bytes:
    """The same layout from the arguments of cuTensorMapEncodeTiled (strides in bytes, without dim 0)."""
    rank = len(dims)
    if any(s % 16 or not 0 <= s < 1 << 40 for s in strides) or any(not 1 <= b <= 256 for b in box):
        raise SimError(f"tensor map with strides {strides} and box {box}: strides are multiples of 16, boxes up to 256")
    spans = {span: code for code, span in SWIZZLES.items()}
    flags = (rank - 1) << 4 | CODES[element] << 7 | spans[swizzle] << 13
    scaled = [s // 16 for s in strides] + [0] * (5 - rank)
    size = [d - 1 for d in dims] + [0] * (5 - rank)
    extent = [b - 1 for b in box] + [0] * (5 - rank)
    high = sum((s >> 32 & 15) << (4 * i) for i, s in enumerate(scaled))
    low = [s & 0xFFFFFFFF for s in scaled]
    words = (
        address,
        flags | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | high << 32,
        size[0] | size[1] << 32,
        size[2] | size[3] << 32,
        size[4] | extent[0] << 56,
        sum(extent[i + 1] << (8 * i) for i in range(4)),
    )
    return struct.pack("<8Q", *words) + bytes(64)


def swizzle_offsets(addresses: np.ndarray, span: int) -> np.ndarray:
    """XOR the 16-byte chunk bits with address bits 7 and up (PTX ISA 5.5.7): 1, 2 or 3 bits for 32, 64, 128 bytes."""
    if not span:
        return addresses
    mask = {32: 0x10, 64: 0x30, 128: 0x70}[span]
    return addresses ^ ((addresses >> 3) & mask)


@dataclass(slots=True)
class Rows:
    """The rows of a box: byte offsets of their first element inside the tensor, which rows are inside it at all.

    `first` counts the elements before dim 0's start, which read as zeros; `count` those that follow and exist.
    """

    offsets: np.ndarray
    valid: np.ndarray
    first: int
    count: int

    def existing(self, element_bytes: int) -> list[tuple[int, int]]:
        """(byte offset, bytes) of the rows that exist."""
        size = self.count * element_bytes
        return [(offset, size) for offset in self.offsets[self.valid].tolist()] if size else []


def _columns(tmap: TensorMap, start: int) -> tuple[int, int]:
    width = tmap.box[0]
    first = min(max(0, -start), width)
    return first, max(0, min(width, tmap.dims[0] - start) - first)


def tile_rows(tmap: TensorMap, coordinate: tuple) -> Rows:
    """A box at `coordinate`; rows in the order of shared memory, dim 1 fastest."""
    first, count = _columns(tmap, coordinate[0])
    offsets = np.array([(coordinate[0] + first) * tmap.element_bytes], np.int64)
    valid = np.ones(1, bool)
    for dim in range(1, tmap.rank):
        at = coordinate[dim] + np.arange(tmap.box[dim])
        inside = (at >= 0) & (at < tmap.dims[dim])
        offsets = (at[:, None] * tmap.strides[dim - 1] + offsets[None, :]).reshape(-1)
        valid = (inside[:, None] & valid[None, :]).reshape(-1)
    return Rows(offsets, valid, first, count)


def gather_rows(tmap: TensorMap, column: int, indices: tuple) -> Rows:
    """tile::gather4 and scatter4 (PTX ISA 5.5.3.2): four rows of a 2-D tensor at one column."""
    if tmap.rank != 2 or tmap.box[1] != 1:
        raise SimError(f"tile::gather4 needs a 2-D tensor map with box rows 1, got {tmap}")
    first, count = _columns(tmap, column)
    at = np.array(indices, np.int64)
    offsets = at * tmap.strides[0] + (column + first) * tmap.element_bytes
    return Rows(offsets, (at >= 0) & (at < tmap.dims[1]), first, count)


@lru_cache(maxsize=256)
def _chunks(width: int) -> np.ndarray:
    return np.arange(0, width, 16)[None, :]


def load_tile(tmap: TensorMap, memory: GlobalMemory, rows: Rows) -> np.ndarray:
    """Fetch rows into a dense [rows, box0 bytes] byte array, zeros where out of range."""
    width = tmap.box[0] * tmap.element_bytes
    size = rows.count * tmap.element_bytes
    if size == 0 or not rows.valid.any():
        return np.zeros((len(rows.offsets), width), np.uint8)
    offsets = rows.offsets + tmap.address
    if not rows.valid.all():
        offsets = np.where(rows.valid, offsets, offsets[int(rows.valid.argmax())])
    low, high = int(offsets.min()), int(offsets.max()) + size
    item = memory.find(low, high)
    if item is not None and size == width and width % 16 == 0 and not low & 15:
        cells = item.views[16][(offsets[:, None] - item.floor + _chunks(width)) >> 4]
        out = cells.reshape(len(offsets), -1).view(np.uint8)
    else:
        out = np.zeros((len(offsets), width), np.uint8)
        at = rows.first * tmap.element_bytes
        for i, offset in enumerate(offsets.tolist()):
            out[i, at : at + size] = memory.bytes_at(offset, size)
    if not rows.valid.all():
        out[~rows.valid] = 0
    return out


def store_rows(tmap: TensorMap, memory: GlobalMemory, rows: Rows, data: np.ndarray) -> bool:
    """Write the existing rows at once when they are whole chunks of one allocation; False when they are not."""
    width = tmap.box[0] * tmap.element_bytes
    size = rows.count * tmap.element_bytes
    if not len(data) or not size:
        return True
    offsets = rows.offsets[rows.valid] + tmap.address
    low, high = int(offsets.min()), int(offsets.max()) + size
    item = memory.find(low, high)
    if item is None or size != width or width % 16 or low & 15:
        return False
    at = (offsets[:, None] - item.floor + _chunks(width)) >> 4
    item.views[16][at] = data.view(np.uint32).reshape(*at.shape, 4)
    return True


@lru_cache(maxsize=1024)
def _swizzled(width: int, rows: int, span: int, phase: int) -> np.ndarray:
    chunk = 16 if width % 16 == 0 else width
    starts = phase + np.arange(rows)[:, None] * width + np.arange(0, width, chunk)[None, :]
    return swizzle_offsets(starts, span)


def shared_offsets(tmap: TensorMap, rows: int, base: int) -> np.ndarray:
    """Shared addresses of a box: [rows, chunks of 16 bytes (or one chunk of an odd width)]."""
    phase = base & 1023
    return _swizzled(tmap.box[0] * tmap.element_bytes, rows, tmap.swizzle, phase) + (base - phase)
