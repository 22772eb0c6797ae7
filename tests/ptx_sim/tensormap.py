"""Tensor maps: the 128-byte descriptors that TMA instructions read, and the copies that they describe.

The bit layout is the one that CuTe DSL's host code writes inline (checked against its output; NVIDIA documents none).
Words are 64 bits: w0 address; w1 flags | stride0 / 16 << 32; w2 stride1 / 16 | stride2 / 16 << 32; w3 stride3 / 16 and
at bits 32 to 47 the high four bits of each stride; w4 to w6 dims - 1, 32 bits each; w6[63:56] box0 - 1; w7 the other
box dims - 1, one byte each. Flags: [6:4] rank - 1, [10:7] element type, [12:11] interleave, [15:13] swizzle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from .memory import GlobalMemory, SimError

# Element type code -> (bytes, name). The order follows CUtensorMapDataType with FLOAT32_FTZ before FLOAT64.
ELEMENTS = {0: (1, "u8"), 1: (2, "u16"), 2: (4, "u32"), 3: (4, "s32"), 4: (8, "u64"), 5: (8, "s64"), 6: (2, "f16"),
            7: (4, "f32"), 8: (4, "f32"), 9: (8, "f64"), 10: (2, "bf16"), 11: (4, "tf32"), 12: (4, "tf32")}
CODES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10,
         "tf32": 11}
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
    interleave: int = 0

    @property
    def rank(self) -> int:
        return len(self.dims)

    def offset(self, coordinate: tuple) -> int:
        return coordinate[0] * self.element_bytes + sum(c * s for c, s in zip(coordinate[1:], self.strides,
                                                                                strict=True))


def decode(data: bytes) -> TensorMap:
    words = struct.unpack("<8Q", data[:64])
    flags = words[1] & 0xFFFFFFFF
    rank = (flags >> 4 & 7) + 1
    code = flags >> 7 & 15
    if code not in ELEMENTS or rank > 5:
        raise SimError(f"malformed tensor map: rank {rank}, element type code {code}")
    size, name = ELEMENTS[code]
    low = (words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF)
    high = words[3] >> 32
    strides = tuple((low[i] | (high >> (4 * i) & 15) << 32) * 16 for i in range(rank - 1))
    dims = (words[4] & 0xFFFFFFFF, words[4] >> 32, words[5] & 0xFFFFFFFF, words[5] >> 32, words[6] & 0xFFFFFFFF)
    box = (words[6] >> 56, *(words[7] >> (8 * i) & 255 for i in range(4)))
    return TensorMap(words[0], name, size, tuple(d + 1 for d in dims[:rank]), strides,
                     tuple(b + 1 for b in box[:rank]), SWIZZLES[flags >> 13 & 7], flags >> 11 & 3)


def encode(address: int, element: str, dims: tuple, strides: tuple, box: tuple, swizzle: int) -> bytes:
    """The same layout from the arguments of cuTensorMapEncodeTiled (strides in bytes, without dim 0)."""
    rank = len(dims)
    spans = {span: code for code, span in SWIZZLES.items()}
    flags = (rank - 1) << 4 | CODES[element] << 7 | spans[swizzle] << 13
    scaled = [s // 16 for s in strides] + [0] * (5 - rank)
    size = [d - 1 for d in dims] + [0] * (5 - rank)
    extent = [b - 1 for b in box] + [0] * (5 - rank)
    high = sum((s >> 32 & 15) << (4 * i) for i, s in enumerate(scaled))
    low = [s & 0xFFFFFFFF for s in scaled]
    words = (address, flags | low[0] << 32, low[1] | low[2] << 32, low[3] | high << 32, size[0] | size[1] << 32,
             size[2] | size[3] << 32, size[4] | extent[0] << 56, sum(extent[i + 1] << (8 * i) for i in range(4)))
    return struct.pack("<8Q", *words) + bytes(64)


def swizzle_offsets(addresses: np.ndarray, span: int) -> np.ndarray:
    """XOR the 16-byte chunk bits with address bits 7 and up (PTX ISA 5.5.7): 1, 2 or 3 bits for 32, 64, 128 bytes."""
    if not span:
        return addresses
    mask = {32: 0x10, 64: 0x30, 128: 0x70}[span]
    return addresses ^ ((addresses >> 3) & mask)


def tile_rows(tmap: TensorMap, coordinate: tuple) -> list[tuple[int, int, int]]:
    """A box at `coordinate`: per row of dim 0, (global byte offset or -1 when out of range, first, count of elements).

    `first` counts the elements before dim 0's start, which are out of range and read as zeros.
    """
    start, width = coordinate[0], tmap.box[0]
    first = min(max(0, -start), width)
    count = max(0, min(width, tmap.dims[0] - start) - first)
    rows: list[tuple[int, int, int]] = []

    def walk(dim: int, base: int, inside: bool) -> None:
        if dim == 0:
            rows.append((base + (start + first) * tmap.element_bytes if inside and count else -1, first, count))
            return
        for i in range(tmap.box[dim]):
            at = coordinate[dim] + i
            walk(dim - 1, base + at * tmap.strides[dim - 1], inside and 0 <= at < tmap.dims[dim])

    walk(tmap.rank - 1, 0, True)
    return rows


def gather_rows(tmap: TensorMap, column: int, indices: tuple) -> list[tuple[int, int, int]]:
    """tile::gather4 and scatter4 (PTX ISA 5.5.3.2): four rows of a 2-D tensor at one column."""
    if tmap.rank != 2 or tmap.box[1] != 1:
        raise SimError(f"tile::gather4 needs a 2-D tensor map with box rows 1, got {tmap}")
    rows = []
    for row in indices:
        row = row - (1 << 32) if row >= 1 << 31 else row
        rows += tile_rows(tmap, (column, row))
    return rows


def load_tile(tmap: TensorMap, memory: GlobalMemory, rows: list) -> np.ndarray:
    """Fetch rows into a dense [rows, box0 bytes] byte array, zeros where out of range."""
    width = tmap.box[0] * tmap.element_bytes
    out = np.zeros((len(rows), width), np.uint8)
    for i, (offset, first, count) in enumerate(rows):
        if offset >= 0:
            at = first * tmap.element_bytes
            size = count * tmap.element_bytes
            out[i, at:at + size] = memory.bytes_at(tmap.address + offset, size)
    return out


def shared_offsets(tmap: TensorMap, rows: int, base: int) -> np.ndarray:
    """Shared addresses of a box's bytes: [rows, box0 bytes / 16 or fewer] start addresses of its chunks."""
    width = tmap.box[0] * tmap.element_bytes
    chunk = 16 if width % 16 == 0 else width
    starts = base + np.arange(rows)[:, None] * width + np.arange(0, width, chunk)[None, :]
    return swizzle_offsets(starts, tmap.swizzle)
