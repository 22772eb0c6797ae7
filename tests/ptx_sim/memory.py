"""Address spaces: global allocations, the shared memory of a cluster, per-thread local memory.

Addresses are what the PTX sees. Global addresses are the host's own (launch arguments are CPU tensors). Generic
addresses of shared and local memory lie in two windows far above any host address. A shared address is
(CTA rank << 24) | offset, as on hardware: UMMA and TMA code masks rank bits in and out.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from dataclasses import dataclass

import numpy as np

from .parser import PtxError

SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 2 << 60
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
# One word that is a NaN as fp32, as bf16 pair and as fp16 pair.
POISON = 0x7FF77FF7
POISON_HALF = 0x7FF7
SHARED_RESERVED = 1024


class SimError(PtxError):
    """A defect of the simulated program: the message names the access, the buffer and the PTX line."""


@dataclass(slots=True)
class Allocation:
    """A named range of global memory. `views` start at the 16-byte boundary at or below `base`."""

    name: str
    base: int
    size: int
    owner: object
    floor: int
    views: dict
    poisoned: bool = False

    @property
    def end(self) -> int:
        return self.base + self.size


def _views(raw: np.ndarray) -> dict[int, np.ndarray]:
    """Views of a byte array by element size; 16 bytes are rows of four words."""
    return {
        1: raw,
        2: raw.view(np.uint16),
        4: raw.view(np.uint32),
        8: raw.view(np.uint64),
        16: raw.view(np.uint32).reshape(-1, 4),
    }


class GlobalMemory:
    """Allocations by address. Anything outside them is an error that names the nearest one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._items: list[Allocation] = []
        self._last: Allocation | None = None

    def add(self, name: str, base: int, size: int, owner: object = None) -> Allocation:
        floor = base & ~15
        span = -(-(base + size - floor) // 16) * 16
        raw = np.frombuffer((ctypes.c_uint8 * max(span, 16)).from_address(floor), np.uint8)
        raw.flags.writeable = True
        item = Allocation(name, base, size, owner, floor, _views(raw))
        at = bisect.bisect_left(self._starts, base)
        if at < len(self._starts) and self._starts[at] == base:
            # The same storage under two names: keep the longer range.
            if self._items[at].size >= size:
                return self._items[at]
            self._items[at] = item
            return item
        self._starts.insert(at, base)
        self._items.insert(at, item)
        return item

    def add_array(self, name: str, array: np.ndarray) -> Allocation:
        return self.add(name, array.ctypes.data, array.nbytes, array)

    def find(self, low: int, high: int) -> Allocation | None:
        """The allocation that holds bytes low to high - 1, or None."""
        last = self._last
        if last is not None and last.base <= low and high <= last.base + last.size:
            return last
        at = bisect.bisect_right(self._starts, low) - 1
        # Overlapping ranges (a tensor and a view of it) are rare; look back a little.
        for i in range(at, max(at - 8, -1), -1):
            item = self._items[i]
            if item.base <= low and high <= item.base + item.size:
                self._last = item
                return item
        return None

    def describe(self, address: int) -> str:
        """Where an address lies, for messages."""
        if not self._items:
            return f"0x{address:x} (no allocation)"
        item = min(
            self._items,
            key=lambda a: 0 if a.base <= address < a.end else min(abs(address - a.base), abs(address - a.end + 1)),
        )
        if address < item.base:
            return f"0x{address:x}, {item.base - address} bytes before {item.name} ({item.size} bytes)"
        if address >= item.end:
            return f"0x{address:x}, {address - item.end} bytes past the end of {item.name} ({item.size} bytes)"
        return f"0x{address:x}, byte {address - item.base} of {item.name} ({item.size} bytes)"

    def allocations(self) -> list[Allocation]:
        return list(self._items)

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """A writable byte view of [address, address + size), which must lie in one allocation."""
        item = self.find(address, address + size)
        if item is None:
            raise SimError(f"global access of {size} bytes out of range: {self.describe(address)}")
        start = address - item.floor
        return item.views[1][start : start + size]


class SharedMemory:
    """The shared memory of all CTAs of a cluster in one array, indexed by shared address.

    Each CTA owns a 16 MiB slot of which only the first `size` bytes exist; the rest is never touched, so that
    the array costs no memory. Fresh memory holds POISON. `marks` has the same views of one byte per byte: 255 where
    something was written. A half that was never written holds POISON_HALF, so readers look there first and at the
    marks only to confirm; `odd` says that single bytes were stored, after which only the marks can tell.
    """

    def __init__(self, ranks: int, size: int) -> None:
        self.ranks = ranks
        self.size = size
        # Anonymous pages: untouched parts of the slots cost nothing.
        self.views, self.marks = (_views(np.frombuffer(mmap.mmap(-1, ranks << RANK_SHIFT), np.uint8)) for _ in "ab")
        self.variables: list[tuple[int, int, str]] = []
        # Live mbarriers by address, and the offsets [low, high) that they span in any CTA.
        self.barriers: dict = {}
        # Ranks of CTAs that have ended: their shared memory is gone for the others.
        self.exited: set[int] = set()
        self.poison()

    def poison(self) -> None:
        self.barriers = {}
        self.exited = set()
        self.barrier_span = (1 << RANK_SHIFT, 0)
        self.odd = False
        for rank in range(self.ranks):
            start = rank << RANK_SHIFT
            self.views[4][start >> 2 : (start + self.size) >> 2] = POISON
            self.marks[1][start : start + self.size] = 0

    def add_barrier(self, address: int, barrier: object) -> None:
        self.barriers[address] = barrier
        low, high = self.barrier_span
        offset = address & OFFSET_MASK
        self.barrier_span = (min(low, offset), max(high, offset + 8))

    def check(self, address: int, size: int, what: str = "access") -> None:
        offset = address & OFFSET_MASK
        if address < 0 or (address >> RANK_SHIFT) >= self.ranks or offset + size > self.size or offset < 0:
            raise SimError(f"shared memory {what} of {size} bytes out of range: {self.describe(address)}")

    def describe(self, address: int) -> str:
        offset = address & OFFSET_MASK
        text = f"shared address 0x{address:x} (CTA rank {address >> RANK_SHIFT}, offset {offset} of {self.size})"
        for start, size, name in self.variables:
            if start <= offset < start + size:
                return f"{text}, byte {offset - start} of {name}"
        return text

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        self.check(address, size)
        return self.views[1][address : address + size]
