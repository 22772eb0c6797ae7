"""Matrix operands in shared memory: canonical layouts of UMMA and WGMMA descriptors.

Both architectures address 16-byte chunks the same way (PTX ISA 9.7.16.4.1 and 9.7.15.5.1; in units of 16 bytes, with
T = 8 sixteen-bit elements per chunk and W = 1, 2, 4, 8 chunks per swizzle span):

    K-major   no swizzle  row (8, m): (1, SBO)      chunk k: LBO
              swizzled    row (8, m): (W, SBO)      chunk k: 1
    MN-major  no swizzle  chunk (1, m): (1, SBO)    k (8, g): (1, LBO)
              swizzled    chunk (W, m): (1, LBO)    k (8, g): (W, SBO)

The swizzle XORs address bits 4 to 6 with bits 7 to 9 of the absolute shared address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .memory import POISON_HALF, SharedMemory, SimError
from .tensormap import swizzle_offsets

_POISON16 = np.uint16(POISON_HALF)


@dataclass(frozen=True)
class Descriptor:
    """A decoded matrix descriptor; addresses and strides in bytes, `span` is the swizzle span (0 for none)."""

    start: int
    leading: int
    stride: int
    span: int


def decode_umma(value: int) -> Descriptor:
    """SM100: start/16 [13:0], LBO/16 [29:16], SBO/16 [45:32], version [48:46] = 1, layout type [63:61]."""
    layout = value >> 61 & 7
    spans = {0: 0, 2: 128, 4: 64, 6: 32}
    if layout not in spans:
        raise SimError(f"matrix descriptor 0x{value:016x}: layout type {layout} is not modelled")
    if value >> 46 & 7 != 1:
        raise SimError(f"matrix descriptor 0x{value:016x}: version bits are {value >> 46 & 7}, SM100 wants 1")
    if value >> 49 & 7:
        raise SimError(f"matrix descriptor 0x{value:016x}: base offset {value >> 49 & 7} is not modelled")
    if value >> 52 & 1:
        raise SimError(f"matrix descriptor 0x{value:016x}: absolute leading-dimension mode is not modelled")
    return Descriptor((value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, spans[layout])


def decode_wgmma(value: int) -> Descriptor:
    """SM90: start/16 [13:0], LBO/16 [29:16], SBO/16 [45:32], base offset [51:49], swizzle [63:62]."""
    spans = {0: 0, 1: 128, 2: 64, 3: 32}
    if value >> 49 & 7:
        raise SimError(f"matrix descriptor 0x{value:016x}: base offset {value >> 49 & 7} is not modelled")
    return Descriptor(
        (value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, spans[value >> 62 & 3]
    )


@lru_cache(maxsize=4096)
def chunk_offsets(rows: int, chunks: int, span: int, leading: int, stride: int, k_major: bool) -> np.ndarray:
    """Byte offsets before swizzling: [rows, chunks of K] K-major, [K, chunks of MN] MN-major.

    `rows` counts MN rows of a K-major tile, or K rows of an MN-major one; `chunks` counts 16-byte chunks of the other.
    """
    width = max(span, 16) // 16
    row, chunk = np.arange(rows)[:, None], np.arange(chunks)[None, :]
    if k_major:
        along = chunk * (16 if span else leading)
        return (row % 8) * (width * 16) + (row // 8) * stride + along
    if span:
        return (row % 8) * (width * 16) + (row // 8) * stride + (chunk % width) * 16 + (chunk // width) * leading
    return (row % 8) * 16 + (row // 8) * leading + chunk * stride


@lru_cache(maxsize=8192)
def tile_chunks(desc: Descriptor, rows: int, k: int, k_major: bool) -> tuple[np.ndarray, int]:
    """(chunk indices, end of the last chunk) of a tile, as offsets in a CTA's shared memory. Read only."""
    if k_major:
        offsets = chunk_offsets(rows, k // 8, desc.span, desc.leading, desc.stride, True)
    else:
        offsets = chunk_offsets(k, -(-rows // 8), desc.span, desc.leading, desc.stride, False)
    address = swizzle_offsets(desc.start + offsets, desc.span)
    chunks = address >> 4
    chunks.flags.writeable = False
    return chunks, int(address.max()) + 16


def read_tile(
    shared: SharedMemory, base: int, desc: Descriptor, rows: int, k: int, k_major: bool, marks: bool = False
) -> np.ndarray:
    """A [rows, k] tile of 16-bit elements of the CTA whose slot starts at `base`, or of their marks."""
    chunks, end = tile_chunks(desc, rows, k, k_major)
    if end > shared.size:
        raise SimError(f"matrix operand out of shared memory: {shared.describe(base + end - 16)}, {desc}")
    slot = (shared.marks if marks else shared.views)[16][base >> 4 :]
    cells = slot[chunks].view(np.uint16).reshape(chunks.shape[0], -1)
    return cells if k_major else cells[:, :rows].T


def touched(desc: Descriptor, rows: int, k: int, k_major: bool) -> np.ndarray:
    """Chunk addresses (CTA offsets) of a tile, for observers."""
    return tile_chunks(desc, rows, k, k_major)[0].reshape(-1) << 4


def to_float(bits: np.ndarray, bf16: bool) -> np.ndarray:
    if bf16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def unwritten(shared: SharedMemory, bits: np.ndarray, *tile: object) -> bool:
    """Whether a tile read with `read_tile(shared, *tile)` has halves that nobody wrote."""
    if not shared.odd and not (bits == _POISON16).any():
        return False
    return bool((read_tile(shared, *tile, marks=True) != 0xFFFF).any())
