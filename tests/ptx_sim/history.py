"""Who touched memory last: per cell the epoch of the last write, of the reads since, and of the atomics since.

Reads are kept in up to 64 slots, one per warp or stream; a slot's array exists once somebody reads through it. A slot
that is shared (clusters of more than 40 warps) or read by several lanes of a warp keeps the newest epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .clocks import ACTOR, CLOCK_BITS, CLUSTER, CLUSTER_SHIFT, ORDER, PROXY, Pipelined, late

Cells = np.ndarray | slice
_BITS = [np.uint64(1) << np.uint64(slot) for slot in range(64)]
_NONE = np.uint64(0)


def _foreign(epochs: np.ndarray, own: object) -> np.ndarray:
    """Which epochs are neither of the actors `own` nor, if it is a whole epoch, that one, nor pipelined before it."""
    if isinstance(own, Pipelined):
        return ~own.after(epochs)
    if isinstance(own, int) and own > ACTOR:
        return epochs != own
    return (epochs >> CLOCK_BITS & ACTOR) != own


@dataclass(frozen=True, slots=True)
class Conflict:
    """An earlier access that the later one is not ordered after, or not as its proxy needs."""

    missing: int
    earlier: int
    earlier_kind: str
    cell: int


class Marks:
    """Accesses that do not exclude each other (reads, or atomics): a bit per slot and cell, an epoch array per slot."""

    def __init__(self, size: int) -> None:
        self.mask = np.zeros(size, np.uint64)
        self.epochs: dict[int, np.ndarray] = {}

    def add(self, cells: Cells, slot: int, epoch: object) -> None:
        array = self.epochs.get(slot)
        if array is None:
            array = self.epochs[slot] = np.zeros(len(self.mask), np.int64)
        array[cells] = epoch
        self.mask[cells] |= _BITS[slot]

    def repeat(self, times: int) -> None:
        self.mask = np.repeat(self.mask, times)
        self.epochs = {slot: np.repeat(array, times) for slot, array in self.epochs.items()}


class Space:
    """The history of one memory: shared memory of a CTA, tensor memory of a CTA, or a global allocation.

    `base` is the address of its first byte, `shift` the log2 of the bytes per cell; `refine` makes cells smaller when
    an access is smaller than one.
    """

    def __init__(self, name: str, size: int, shift: int, base: int = 0) -> None:
        self.name = name
        self.size = size
        self.base = base
        self.shift = shift
        cells = -(-size >> shift)
        self.last = np.zeros(cells, np.int64)
        self.reads = Marks(cells)
        self.atomics: Marks | None = None
        self.shared_by_clusters = False

    def refine(self, shift: int) -> None:
        times = 1 << self.shift - shift
        self.shift = shift
        self.last = np.repeat(self.last, times)
        self.reads.repeat(times)
        if self.atomics is not None:
            self.atomics.repeat(times)

    def forget(self, cells: Cells) -> None:
        self.last[cells] = 0
        self.reads.mask[cells] = 0
        if self.atomics is not None:
            self.atomics.mask[cells] = 0

    def cells_of(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Cell numbers [accesses, cells per access] of accesses of `size` bytes."""
        if size & (1 << self.shift) - 1:
            self.refine((size & -size).bit_length() - 1)
        first = (addresses.astype(np.int64) - self.base) >> self.shift
        count = size >> self.shift
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def range_of(self, offset: int, size: int) -> slice:
        low = offset | size
        if low & (1 << self.shift) - 1:
            self.refine((low & -low).bit_length() - 1)
        return slice(offset >> self.shift, offset + size >> self.shift)

    # The three kinds of access; each returns what it collides with. `known` is what the accessor knows (rows as in
    # clocks.py); `proxied` says that it works in the async proxy; `own` are actors whose own earlier accesses are in
    # program order (per access), one whole epoch, or a pipelined operation.

    def read(
        self,
        cells: Cells,
        epoch: object,
        slot: int,
        known: np.ndarray,
        proxied: bool,
        own: object,
        atomic: bool = False,
    ) -> list[Conflict]:
        found = self._after_last(cells, known, proxied, own, epoch)
        if self.atomics is not None and not atomic:
            found += self._after_marks(self.atomics, "atomic", cells, known, own, epoch)
        (self._atomics() if atomic else self.reads).add(cells, slot, epoch)
        return found

    def write(self, cells: Cells, epoch: object, known: np.ndarray, proxied: bool, own: object) -> list[Conflict]:
        found = self._after_last(cells, known, proxied, own, epoch)
        found += self._after_marks(self.reads, "read", cells, known, own, epoch)
        if self.atomics is not None:
            found += self._after_marks(self.atomics, "atomic", cells, known, own, epoch)
            self.atomics.mask[cells] = _NONE
        self.last[cells] = epoch
        self.reads.mask[cells] = _NONE
        return found

    def atomic(
        self, cells: Cells, epoch: object, slot: int, known: np.ndarray, proxied: bool, own: object
    ) -> list[Conflict]:
        found = self._after_last(cells, known, proxied, own, epoch)
        found += self._after_marks(self.reads, "read", cells, known, own, epoch)
        self._atomics().add(cells, slot, epoch)
        return found

    def _atomics(self) -> Marks:
        if self.atomics is None:
            self.atomics = Marks(len(self.last))
        return self.atomics

    def _after_last(self, cells: Cells, known: np.ndarray, proxied: bool, own: object, epoch: object) -> list[Conflict]:
        epochs = self.last[cells]
        if not epochs.any():
            return []
        found = []
        unordered = self._uncovered(epochs, known[ORDER], own, epoch)
        if unordered is not None:
            found.append(self._conflict(ORDER, epochs, unordered, "write", cells))
        if proxied and (unseen := self._uncovered(epochs, known[PROXY], own, epoch)) is not None:
            if unordered is not None:
                unseen &= ~unordered
            if unseen.any():
                found.append(self._conflict(PROXY, epochs, unseen, "write", cells))
        return found

    def _after_marks(
        self, marks: Marks, kind: str, cells: Cells, known: np.ndarray, own: object, epoch: object
    ) -> list[Conflict]:
        mask = marks.mask[cells]
        union = int(np.bitwise_or.reduce(mask, axis=None))
        found = []
        while union:
            slot = union.bit_length() - 1
            union ^= 1 << slot
            epochs = np.where(mask & _BITS[slot], marks.epochs[slot][cells], 0)
            unordered = self._uncovered(epochs, known[ORDER], own, epoch)
            if unordered is not None:
                found.append(self._conflict(ORDER, epochs, unordered, kind, cells))
        return found

    def _uncovered(self, epochs: np.ndarray, row: np.ndarray, own: object, epoch: object) -> np.ndarray | None:
        bad = late(epochs, row)
        if self.shared_by_clusters:
            # Actor numbers of another cluster mean others: without a flag between them nothing orders clusters.
            mine = (epoch if isinstance(epoch, int) else int(epoch[0, 0])) >> CLUSTER_SHIFT & CLUSTER
            numbers = epochs >> CLUSTER_SHIFT & CLUSTER
            other = (numbers != mine) & (numbers != 0)
            bad |= other
            if bad.any() and own is not None:
                bad &= _foreign(epochs, own) | other
            return bad if bad.any() else None
        if not bad.any():
            return None
        if own is not None:
            bad &= _foreign(epochs, own)
            if not bad.any():
                return None
        return bad

    def _conflict(self, missing: int, epochs: np.ndarray, bad: np.ndarray, kind: str, cells: Cells) -> Conflict:
        at = int(bad.argmax())
        if isinstance(cells, slice):
            cell = cells.start + at
        else:
            cell = int(np.broadcast_to(cells, epochs.shape).reshape(-1)[at])
        return Conflict(missing, int(epochs.reshape(-1)[at]), kind, cell)
