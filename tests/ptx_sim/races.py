"""Happens-before race detection: at every access, `Races` knows what must have come before it.

The rules (README, "Races", has them with their sources):

- A write excludes all accesses that it is not ordered with; reads exclude writes; atomics exclude both, not each other.
- Generic writes before an access of the async proxy need a proxy fence on the path, also before an overwrite; generic
  reads before an overwrite by the async proxy need order only.
- Tensor memory that another warp or the tensor core used needs tcgen05.fence on both sides of the thread
  synchronisation. Of the tensor core's own operations only pipelined pairs are in order (`WarpClock.pipeline`).

Two accesses are reported once per pair of instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import clocks
from .clocks import AFTER, BEFORE, ORDER, PROXY, Pipelined, WarpClock, actor_of, late
from .history import Cells, Conflict, Space
from .machine import Cta, Split
from .matrix_operands import Descriptor, touched
from .memory import OFFSET_MASK, RANK_SHIFT
from .ops_tcgen05 import Shape, fragment, segments
from .order import GENERIC_ENGINES, TMEM_LANES, WORD, ClusterState, Order, Race, RaceFound, Work
from .parser import Instr

TENSOR_STREAMS = (clocks.TMEM_LOAD, clocks.TMEM_STORE, clocks.TENSOR)


@dataclass(frozen=True)
class Semantics:
    """What an access instruction does besides accessing."""

    strong: bool
    acquire: bool
    release: bool


_WEAK = Semantics(False, False, False)


def semantics(instr: Instr) -> Semantics:
    """Memory ordering qualifiers (PTX ISA, Release and Acquire Patterns): atom and red are relaxed without one."""
    base = instr.base
    words = set(instr.parts)
    if base in ("atom", "red"):
        return Semantics(True, bool(words & {"acquire", "acq_rel"}), bool(words & {"release", "acq_rel"}))
    if base in ("ld", "st") and words & {"relaxed", "acquire", "release", "volatile", "mmio"}:
        return Semantics(True, "acquire" in words, "release" in words)
    return _WEAK


@lru_cache(maxsize=4096)
def _operand_cells(desc: Descriptor, rows: int, k: int, k_major: bool, shift: int) -> np.ndarray:
    """Cells of a matrix operand in its CTA's shared memory, [chunks, cells per 16 bytes]."""
    return (np.unique(touched(desc, rows, k, k_major)).astype(np.int64)[:, None] >> shift) + np.arange(16 >> shift)


@lru_cache(maxsize=4096)
def _tmem_cells(lane: int, lanes: int, column: int, columns: int) -> np.ndarray:
    across = np.arange(lane // 16, -(-(lane + lanes) // 16))
    return ((column + np.arange(columns))[:, None] * TMEM_LANES + across).reshape(-1)


class Races(Order):
    """Tracks launches, one after the other; see `Order` for the arguments."""

    def _forget(self) -> None:
        super()._forget()
        self._semantics: dict[int, Semantics] = {}

    # Reports ---------------------------------------------------------------------------------------------------------

    def _conflict(self, state: ClusterState, found: Conflict, what: str, epoch: object, index: int, where: str) -> None:
        """Report an access (`what` by the actor of `epoch`) that collides with an earlier one."""
        earlier = found.earlier
        site = earlier >> clocks.SITE_SHIFT
        actor = actor_of(earlier)
        cluster = earlier >> clocks.CLUSTER_SHIFT & clocks.CLUSTER
        later_epoch = epoch if isinstance(epoch, int) else int(epoch[0, 0])
        later = actor_of(later_epoch)
        if actor == state.clocks.previous:
            missing = "griddepcontrol.wait"
        elif cluster != state.clocks.number:
            known = self.foreign.get(state.clocks.number, {}).get(cluster)
            if known is not None and known[actor] >= earlier & clocks.CLOCK:
                return
            missing = "nothing orders two clusters but a flag with release and acquire"
        else:
            missing = self._missing(state, found.missing, actor, earlier & clocks.CLOCK, later)
        owner = self._names.get(cluster, state.clocks)
        kind = "proxy" if found.missing == PROXY else "order"
        self._report(
            kind,
            site,
            index,
            f"{kind} race at {where}\n"
            f"  {found.earlier_kind} by {owner.name(actor)}\n{self._at(site, actor, state)}"
            f"  {what} by {state.clocks.name(later)}\n    at {self._where(index)}\n"
            f"  missing: {missing}",
        )

    def _at(self, site: int, actor: int, state: ClusterState) -> str:
        return "" if actor == state.clocks.previous else f"    at {self._where(site)}\n"

    def _missing(self, state: ClusterState, row: int, actor: int, clock: int, later: int) -> str:
        """The edge that would order the pair, in words."""
        if row == PROXY:
            return "they are ordered, but no fence.proxy.async (of a tensor map: fence.proxy.tensormap) lies between"
        per_warp, first = clocks.PER_WARP, state.clocks.first_barrier
        if actor >= first:
            return f"no wait on phase {clock - 1} of the mbarrier that the copy signals lies between"
        if actor < first and later < first and actor // per_warp == later // per_warp and actor % per_warp < 32:
            return "no bar.warp.sync between the lanes"
        part = actor % per_warp
        return {
            clocks.COPY: "no cp.async.wait_group, or wait on the mbarrier of cp.async.mbarrier.arrive, lies between",
            clocks.BULK_READ: "no cp.async.bulk.wait_group(.read) after a commit_group lies between",
            clocks.BULK_WRITE: "no cp.async.bulk.wait_group (without .read) after a commit_group lies between",
            clocks.TMEM_LOAD: "no tcgen05.wait::ld and synchronisation lie between",
            clocks.TMEM_STORE: "no tcgen05.wait::st and synchronisation lie between",
            clocks.TENSOR: "no tcgen05.commit and wait on its mbarrier lie between",
            clocks.WGMMA: "no wgmma.wait_group after a commit_group lies between",
        }.get(part, "no chain of arrivals (release) and waits (acquire) leads from the first to the second")

    # Accesses --------------------------------------------------------------------------------------------------------

    def access(
        self, split: Split, mask: np.ndarray, index: int, space: str, address: np.ndarray, size: int, kind: str
    ) -> None:
        if space == "local":
            return
        state, warp = self._of(split)
        if len(address) < 32:
            lanes = np.arange(len(address))
        else:
            lanes = np.arange(32) if mask is clocks.FULL else np.flatnonzero(mask)
            address = address[lanes] if len(lanes) < 32 else address
        if (op := self.machine.current) is not None:
            work = self.work[op]
            epoch = warp.epoch(index, work.stream, work.clock)
            for part, rows in self._places(state, space, address, size):
                cells = part.cells_of(address[rows], size)
                self._touch(state, part, cells, kind, epoch, work.known, False, None, index, space)
            return
        how = self._semantics.get(index)
        if how is None:
            how = self._semantics[index] = semantics(self.machine.program.code[index])
        if how.strong:
            kind = {"read": "atomic read", "write": "atomic"}.get(kind, kind)
            self._flags(state, warp, mask, how, space, address, kind)
        epochs, own = warp.epochs(index, lanes), warp.ids[lanes][:, None]
        for part, rows in self._places(state, space, address, size):
            cells = part.cells_of(address[rows], size)
            for group in warp.groups:
                mine = slice(None)
                if len(warp.groups) > 1:
                    mine = group.mask[lanes[rows]]
                    if not mine.any():
                        continue
                mine_epochs, mine_ids = epochs[rows][mine], own[rows][mine]
                self._touch(state, part, cells[mine], kind, mine_epochs, group.known, False, mine_ids, index, space)

    def _places(
        self, state: ClusterState, space: str, address: np.ndarray, size: int
    ) -> list[tuple[Space, slice | np.ndarray]]:
        """The memories that the addresses lie in, and which of the addresses do."""
        low, high = int(address.min()), int(address.max())
        if space != "global":
            if low >> RANK_SHIFT == high >> RANK_SHIFT:
                return [(state.shared[low >> RANK_SHIFT], slice(None))]
            ranks = address >> address.dtype.type(RANK_SHIFT)
            return [(state.shared[rank], ranks == rank) for rank in np.unique(ranks).tolist()]
        memory = self.machine.memory
        item = memory.find(low, high + size)
        if item is not None:
            return [(self._global_space(item), slice(None))]
        items = [memory.find(value, value + size) for value in address.tolist()]
        return [
            (self._global_space(item), np.array([other is item for other in items]))
            for item in {id(item): item for item in items if item is not None}.values()
        ]

    def _global_space(self, item: object) -> Space:
        space = self.spaces.get(item.floor)
        if space is None or space.size < item.end - item.floor:
            space = self.spaces[item.floor] = Space(item.name, -(-(item.end - item.floor) // 16) * 16, WORD, item.floor)
            space.shared_by_clusters = len(self._names) > 1 or len(self.clusters) > 1
            for address, size in self.previous:
                if item.base <= address and address + size <= item.end:
                    actor = next(iter(self._names.values())).previous
                    space.last[space.range_of(address - item.floor, size)] = actor << clocks.CLOCK_BITS | 1
        return space

    def _touch(
        self,
        state: ClusterState,
        part: Space,
        cells: Cells,
        kind: str,
        epoch: object,
        known: np.ndarray,
        proxied: bool,
        own: object,
        index: int,
        space: str,
    ) -> None:
        actor = actor_of(epoch if isinstance(epoch, int) else int(epoch[0, 0]))
        if kind == "write":
            found = part.write(cells, epoch, known, proxied, own)
        elif kind == "read":
            found = part.read(cells, epoch, int(state.clocks.slots[actor]), known, proxied, own)
        elif kind == "atomic read":
            found = part.read(cells, epoch, int(state.clocks.slots[actor]), known, proxied, own, atomic=True)
        else:
            found = part.atomic(cells, epoch, int(state.clocks.slots[actor]), known, proxied, own)
        if space != "global":
            self._visit(state, part, actor, epoch, index)
        for conflict in found:
            precise, where = self._precise(epoch, conflict, cells), self._address(state, part, conflict, space)
            self._conflict(state, conflict, kind, precise, index, where)

    @staticmethod
    def _precise(epoch: object, found: Conflict, cells: Cells) -> object:
        """The epoch of the lane that touched the cell."""
        if isinstance(epoch, int):
            return epoch
        rows = np.flatnonzero((cells == found.cell).any(1))
        return epoch[int(rows[0]) :] if len(rows) else epoch

    def _visit(self, state: ClusterState, part: Space, actor: int, epoch: object, index: int) -> None:
        """Remember accesses from outside a CTA to its memory, and those of its own engines."""
        rank = part.base >> RANK_SHIFT
        first = state.clocks.first_barrier
        if actor < first:
            warp = state.clocks.order[actor // clocks.PER_WARP].warp
            if warp.cta.rank == rank and actor % clocks.PER_WARP < 32:
                return
        clock = (epoch if isinstance(epoch, int) else int(epoch[0, 0])) & clocks.CLOCK
        self._guest(state, rank, actor, clock, index, "an access to its shared memory")

    def _address(self, state: ClusterState, part: Space, found: Conflict, space: str) -> str:
        if space == "tmem":
            column, lanes = divmod(found.cell, TMEM_LANES)
            return f"{part.name}, column {column}, lanes {16 * lanes} to {16 * lanes + 15}"
        offset = found.cell << part.shift
        if space == "global":
            return self.machine.memory.describe(part.base + offset)
        return state.clocks.cluster.shared.describe(part.base | offset)

    # Flags: release and acquire through memory -----------------------------------------------------------------------

    def _flags(
        self,
        state: ClusterState,
        warp: WarpClock,
        mask: np.ndarray,
        how: Semantics,
        space: str,
        address: np.ndarray,
        kind: str,
    ) -> None:
        writes, reads = kind == "atomic", True
        publish = None
        if writes and how.release:
            publish = state.clocks.fresh(3)
            warp.release(mask, publish)
        elif writes and warp.fence_release is not None:
            publish = warp.fence_release
        if publish is None and not self.flags:
            return
        for where in set(address.tolist()):
            key = (state.clocks.number if space != "global" else 0, where)
            seen = self.flags.get(key)
            if reads and seen is not None:
                for number, known in seen.items():
                    self._learn_flag(state, warp, mask, how, number, known)
            if publish is not None:
                entry = self.flags.setdefault(key, {})
                mine = entry.setdefault(state.clocks.number, state.clocks.fresh(3))
                np.maximum(mine, publish, out=mine)
                for number, known in self.foreign.get(state.clocks.number, {}).items():
                    other = entry.setdefault(number, np.zeros((3, len(known)), np.int32))
                    np.maximum(other[ORDER], known, out=other[ORDER])

    def _learn_flag(
        self, state: ClusterState, warp: WarpClock, mask: np.ndarray, how: Semantics, number: int, known: np.ndarray
    ) -> None:
        if number == state.clocks.number:
            if how.acquire:
                warp.acquire(mask, known)
            elif warp.fence_acquire is None:
                warp.fence_acquire = known.copy()
            else:
                np.maximum(warp.fence_acquire, known, out=warp.fence_acquire)
            return
        # Knowledge of other clusters is kept per cluster: whoever of it waits for the flag stands for all.
        mine = self.foreign.setdefault(state.clocks.number, {}) if how.acquire else warp.fence_foreign
        row = mine.setdefault(number, np.zeros(known.shape[1], np.int32))
        np.maximum(row, known[ORDER], out=row)

    # Copy engines ----------------------------------------------------------------------------------------------------

    def bulk(self, split: Split, index: int, space: str, address: int, size: int, kind: str) -> None:
        state, warp = self._of(split)
        work = self.work[self.machine.current]
        if not work.stream:
            work.waiting.append((space, address, size, kind))
            return
        stream = clocks.BULK_READ if kind == "read" else clocks.BULK_WRITE
        self._range(state, work, space, address, size, kind, warp.epoch(index, stream, work.clock), index)

    def tensor_map(self, split: Split, index: int, address: int) -> None:
        """A tensor map that this launch wrote needs order and a tensormap proxy fence (PTX ISA, fence)."""
        state, warp = self._of(split)
        item = self.machine.memory.find(address, address + 128)
        part = self.spaces.get(item.floor) if item is not None else None
        if part is None:
            return
        offset = address - item.floor
        epoch = int(warp.epochs(index, np.array([0]))[0, 0])
        known = warp.snapshot(split.mask)
        known[PROXY] = np.minimum(known[ORDER], state.maps[ORDER])
        cells = part.range_of(offset, 128)
        self._touch(state, part, cells, "read", epoch, known, True, None, index, "global")

    def _flush(self, state: ClusterState, work: Work, epoch: int, index: int) -> None:
        for space, address, size, kind in work.waiting:
            self._range(state, work, space, address, size, kind, epoch, index)
        work.waiting.clear()

    def _range(
        self, state: ClusterState, work: Work, space: str, address: int, size: int, kind: str, epoch: int, index: int
    ) -> None:
        if space == "global":
            item = self.machine.memory.find(address, address + size)
            if item is None:
                return
            part, offset = self._global_space(item), address - item.floor
        else:
            part, offset = state.shared[address >> RANK_SHIFT], address & OFFSET_MASK
        kind = "atomic" if kind == "reduce" else kind
        cells, same = part.range_of(offset, size), None
        if work.stream == clocks.BULK_READ and kind == "write":
            # Shipped kernels let all lanes of a warp issue the same store: the same epoch writes the same data.
            if part.last[cells.start] == epoch and (part.last[cells] == epoch).all():
                return
            same = epoch
        proxied = self.machine.current.engine not in GENERIC_ENGINES
        self._touch(state, part, cells, kind, epoch, work.known, proxied, same, index, space)

    # Matrix products -------------------------------------------------------------------------------------------------

    def _operand(
        self,
        state: ClusterState,
        work: Work,
        cta: Cta,
        desc: Descriptor,
        rows: int,
        k: int,
        k_major: bool,
        epoch: int,
        index: int,
    ) -> None:
        part = state.shared[cta.rank]
        cells = _operand_cells(desc, rows, k, k_major, part.shift)
        self._touch(state, part, cells, "read", epoch, work.known, True, None, index, "shared")

    def mma(
        self,
        split: Split,
        index: int,
        cta: Cta,
        shape: Shape,
        target: int,
        a: Descriptor | int,
        b: Descriptor,
        accumulate: bool,
    ) -> None:
        state, warp = self._of(split)
        work = self.work[self.machine.current]
        epoch = warp.epoch(index, work.stream, work.clock)
        instr = self.machine.program.code[index]
        pair, ws = instr.has("cta_group::2"), instr.has("ws")
        ctas = 2 if pair else 1
        parts = segments(shape.m, shape.n, pair, ws, target >> 16)
        own = warp.pipeline(work.clock, (target, shape.m, shape.n, pair, ws))
        self._operand(state, work, cta, b, shape.n // ctas, 16, shape.b_k_major, epoch, index)
        if isinstance(a, Descriptor):
            self._operand(state, work, cta, a, shape.m // ctas, 16, shape.a_k_major, epoch, index)
        for first_lane, _, count, _, width in parts:
            if not isinstance(a, Descriptor):
                self._tensor(state, warp, cta, first_lane, count, a & 0xFFFF, 8, "read", epoch, work.known, index, own)
            column = target & 0xFFFF
            self._tensor(state, warp, cta, first_lane, count, column, width, "write", epoch, work.known, index, own)

    def cp(self, split: Split, index: int, cta: Cta, source: Descriptor, rows: int, width: int, target: int) -> None:
        state, warp = self._of(split)
        work = self.work[self.machine.current]
        epoch = warp.epoch(index, work.stream, work.clock)
        self._operand(state, work, cta, source, rows, width // 2, True, epoch, index)
        lanes = 128 if any(p.startswith("warpx") for p in self.machine.program.code[index].parts) else rows
        first, column = 0 if lanes == 128 else target >> 16, target & 0xFFFF
        own = warp.pipeline(work.clock, None)
        self._tensor(state, warp, cta, first, lanes, column, width // 4, "write", epoch, work.known, index, own)

    def wgmma(
        self, split: Split, index: int, a: Descriptor | None, b: Descriptor, n: int, a_k_major: bool, b_k_major: bool
    ) -> None:
        state, warp = self._of(split)
        work = self.work[self.machine.current]
        epoch = self._leader(state, warp).epoch(index, clocks.WGMMA, work.clock)
        self._operand(state, work, split.cta, b, n, 16, b_k_major, epoch, index)
        if a is not None:
            self._operand(state, work, split.cta, a, 64, 16, a_k_major, epoch, index)

    # Tensor memory ---------------------------------------------------------------------------------------------------

    def _tensor(
        self,
        state: ClusterState,
        warp: WarpClock,
        cta: Cta,
        lane: int,
        lanes: int,
        column: int,
        columns: int,
        kind: str,
        epoch: int,
        known: np.ndarray,
        index: int,
        own: Pipelined | None = None,
    ) -> None:
        part = state.tmem[cta.rank]
        cells = _tmem_cells(lane, lanes, column, columns)
        self._tensor_fences(state, warp, part, cells, kind, epoch, known, index, own)
        self._touch(state, part, cells, kind, epoch, known, False, own, index, "tmem")

    def _tensor_fences(
        self,
        state: ClusterState,
        warp: WarpClock,
        part: Space,
        cells: np.ndarray,
        kind: str,
        epoch: int,
        known: np.ndarray,
        index: int,
        own: Pipelined | None,
    ) -> None:
        """Ordered tensor-memory accesses need fences, too (PTX ISA, tcgen05.fence).

        Between a warp's own loads and stores `tcgen05.wait` is enough.
        """
        seen = [("write", part.last[cells])]
        if kind == "write":
            mask = part.reads.mask[cells]
            union = int(np.bitwise_or.reduce(mask))
            for slot, epochs in part.reads.epochs.items():
                if union >> slot & 1:
                    seen.append(("read", np.where(mask >> np.uint64(slot) & np.uint64(1), epochs[cells], 0)))
        for what, epochs in seen:
            bad = late(epochs, known[AFTER]) & ~late(epochs, known[ORDER])
            if not bad.any():
                continue
            actors = epochs >> clocks.CLOCK_BITS & clocks.ACTOR
            streams = actors % clocks.PER_WARP
            bad &= np.isin(streams, TENSOR_STREAMS) & (
                (actors // clocks.PER_WARP != warp.base // clocks.PER_WARP) | (streams == clocks.TENSOR)
            )
            if own is not None:
                bad &= ~own.after(epochs)
            if not bad.any():
                continue
            at = int(bad.argmax())
            earlier = int(epochs[at])
            unfenced = known[BEFORE, actor_of(earlier)] < earlier & clocks.CLOCK
            side = "before_thread_sync behind the first" if unfenced else "after_thread_sync before the second"
            site = earlier >> clocks.SITE_SHIFT
            where = self._address(state, part, Conflict(AFTER, earlier, what, int(cells[at])), "tmem")
            self._report(
                "tensor fence",
                site,
                index,
                f"unfenced use of {where}\n"
                f"  {what} by {state.clocks.name(actor_of(earlier))}\n    at {self._where(site)}\n"
                f"  {kind} by {state.clocks.name(actor_of(epoch))}\n    at {self._where(index)}\n"
                f"  missing: they are ordered, but there is no tcgen05.fence::{side}",
            )

    def tmem(self, split: Split, index: int, shape: str, lane: int, column: int, count: int, kind: str) -> None:
        state, warp = self._of(split)
        stream = clocks.TMEM_LOAD if kind == "read" else clocks.TMEM_STORE
        warp.count[stream] += 1
        epoch = warp.epoch(index, stream, warp.count[stream])
        lanes, width = (
            (32, count) if shape == "32x32b" else (32 if shape == "16x32bx2" else 16, fragment(shape, count)[2])
        )
        whole = split.warp.live
        known = (
            warp.groups[0].known
            if len(warp.groups) == 1
            else np.minimum.reduce([g.known for g in warp.groups if (g.mask & whole).any()])
        )
        known = known.copy()
        warp.add_waited(known)
        self._tensor(state, warp, split.cta, lane, lanes, column, width, kind, epoch, known, index)

    def tmem_alloc(self, split: Split, mask: np.ndarray, index: int, target: int, first: int, count: int) -> None:
        state, warp = self._of(split)
        lane = mask.argmax()
        epoch = int(warp.epochs(index, np.array([lane]))[0, 0])
        known = warp.snapshot(mask)
        part = state.tmem[split.cta.rank]
        part.write(_tmem_cells(0, 128, first, count), epoch, known, False, None)
        alone = np.arange(32) == lane
        self.access(split, alone, index, "shared", np.full(32, target), 4, "write")

    def tmem_dealloc(self, split: Split, mask: np.ndarray, index: int, first: int, count: int) -> None:
        state, warp = self._of(split)
        part = state.tmem[split.cta.rank]
        epoch = int(warp.epochs(index, np.array([mask.argmax()]))[0, 0])
        cells = _tmem_cells(0, 128, first, count)
        self._touch(state, part, cells, "write", epoch, warp.snapshot(mask), False, None, index, "tmem")
        part.forget(cells)


__all__ = ["Race", "RaceFound", "Races"]
