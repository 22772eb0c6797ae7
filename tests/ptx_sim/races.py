"""Happens-before race detection: `Races` is an observer that knows, at every access, what must have come before it.

The rules, and where they come from (README, "Races", has the list with sources):

- Knowledge travels along arrivals and waits (mbarrier, named and cluster barriers, bar.warp.sync), commits, groups,
  fences with relaxed or acquire and release accesses. Anything else is no order, whatever a schedule happened to do.
- A write excludes all accesses that it is not ordered with; reads exclude writes; atomics exclude both, not each other.
- Generic writes before an access of the async proxy need a proxy fence on the path, also before an overwrite; generic
  reads before an overwrite by the async proxy need order only.
- Asynchronous operations begin with what their issuing lanes know and end at what signals them, and nowhere else.
- Tensor memory that another warp or engine used needs tcgen05.fence on both sides of the thread synchronisation.

Two accesses are reported once per pair of instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import clocks
from .clocks import AFTER, BEFORE, ORDER, PROXY, ClusterClocks, WarpClock, actor_of, late
from .history import Cells, Conflict, Space
from .machine import ALL_BYTES, AsyncOp, Cluster, ClusterBarrier, Cta, Machine, NamedBarrier, Split, Warp
from .matrix_operands import Descriptor, touched
from .memory import OFFSET_MASK, RANK_SHIFT
from .observer import Observer
from .ops_mbarrier import Mbarrier
from .ops_tcgen05 import Shape, fragment, segments
from .parser import Instr

WORD = 2  # log2 of the bytes of a cell
TMEM_COLUMNS, TMEM_LANES = 512, 8  # cells of 16 lanes of one column
BULK_ENGINES = ("bulk store", "tensor store")
COPY_ENGINES = ("bulk", "tensor load", "st.async", "cluster launch control")
TENSOR_STREAMS = (clocks.TMEM_LOAD, clocks.TMEM_STORE, clocks.TENSOR)


class RaceFound(Exception):
    """Raised at the first report when `Races(stop=True)`."""


@dataclass(frozen=True)
class Race:
    """One report. `kind` is order, proxy, tensor fence, exit, overrun, init or registers."""

    kind: str
    first: int
    second: int
    text: str


@dataclass(frozen=True)
class Semantics:
    """What an access instruction does besides accessing."""

    strong: bool
    acquire: bool
    release: bool


_WEAK = Semantics(False, False, False)


def semantics(instr: Instr) -> Semantics:
    """Memory ordering qualifiers (PTX ISA 8.7, 9.7.9.8 to 9.7.13.6): atom and red are relaxed without one."""
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


class BarrierClock:
    """Knowledge at one mbarrier: of the running phase, and of all completed ones."""

    def __init__(self, space: ClusterClocks, barrier: Mbarrier, actor: int) -> None:
        self.actor = actor
        self.phase = barrier.phase
        self.gathering = space.fresh(3)
        self.known = space.fresh(3)
        # The init: stream and clock of the initialising warp, and its instruction.
        self.init = (0, 0)
        self.site = 0
        # Waits that passed in the running phase, (actor, clock, instruction): it must not end without them.
        self.waits: list[tuple[int, int, int]] = []


class Meeting:
    """Knowledge at a named or cluster barrier, per generation."""

    def __init__(self) -> None:
        self.known: dict[int, np.ndarray] = {}

    def at(self, space: ClusterClocks, generation: int) -> np.ndarray:
        found = self.known.get(generation)
        if found is None:
            found = self.known[generation] = space.fresh(3)
            self.known.pop(generation - 8, None)
        return found


@dataclass(slots=True, eq=False)
class Work:
    """An asynchronous operation in flight: what it knows, and under which stream and clock its accesses count."""

    known: np.ndarray
    stream: int
    clock: int
    # Accesses whose stream is the mbarrier that the operation will signal: (space, address, size, kind).
    waiting: list


class ClusterState:
    """Everything that is tracked for one running cluster."""

    def __init__(self, machine: Machine, cluster: Cluster) -> None:
        self.clocks = ClusterClocks(cluster)
        size = cluster.shared.size
        self.shared = [Space(f"shared memory of rank {cta.rank}", size, WORD) for cta in cluster.ctas]
        self.tmem = [Space(f"tensor memory of rank {cta.rank}", TMEM_COLUMNS * TMEM_LANES, 0) for cta in cluster.ctas]
        self.barriers: dict[Mbarrier, BarrierClock] = {}
        self.meetings: dict[tuple[int, int], Meeting] = {}
        self.left: dict[Split, int] = {}
        self.cluster_meeting = Meeting()
        self.wgmma_parts: dict[tuple, list[np.ndarray]] = {}
        self.latest_wgmma: tuple = ()
        # Per CTA what its warps knew when they ended, and who must be known there: actor -> (clock, instruction, what).
        # What lies before some fence.proxy.tensormap.
        self.maps = self.clocks.fresh(3)
        self.exit = [self.clocks.fresh(3) for _ in cluster.ctas]
        self.guests: list[dict[int, tuple[int, int, str]]] = [{} for _ in cluster.ctas]


class Races(Observer):
    """Tracks one launch (one `Machine` run). `races` are the reports, at most `limit`.

    `stop` raises RaceFound at the first; `ignore` are kinds that are not reported.
    """

    def __init__(
        self, stop: bool = False, limit: int = 50, ignore: tuple = (), allow: object = None, previous: tuple = ()
    ) -> None:
        # (address, bytes) that the launch before this one writes, if this one may start before that has ended
        # (programmatic dependent launch): griddepcontrol.wait orders them.
        self.previous = previous
        self.stop = stop
        self.limit = limit
        self.ignore = ignore
        # allow(race, machine) -> whether a known, documented exception covers it.
        self.allow = allow
        self.allowed: list[Race] = []
        self.races: list[Race] = []
        self.machine: Machine | None = None
        self.clusters: dict[int, ClusterState] = {}
        self.work: dict[AsyncOp, Work] = {}
        self.spaces: dict[int, Space] = {}
        self.flags: dict[tuple, np.ndarray] = {}
        self.foreign: dict[int, dict[int, np.ndarray]] = {}
        # Synchronisation instructions that took effect.
        self.executed: set[int] = set()
        self._seen: set = set()
        self._semantics: dict[int, Semantics] = {}
        self._names: dict[int, ClusterState] = {}

    # Reports ---------------------------------------------------------------------------------------------------------

    def _report(self, kind: str, first: int, second: int, text: str) -> None:
        if kind in self.ignore or (kind, first, second) in self._seen or len(self.races) >= self.limit:
            return
        self._seen.add((kind, first, second))
        race = Race(kind, first, second, text)
        if self.allow is not None and self.allow(race, self.machine):
            self.allowed.append(race)
            return
        self.races.append(race)
        if self.stop:
            raise RaceFound(text)

    def _where(self, index: int) -> str:
        return self.machine.program.where(index)

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
        owner = self._names.get(cluster, state)
        kind = "proxy" if found.missing == PROXY else "order"
        self._report(
            kind,
            site,
            index,
            f"{kind} race at {where}\n"
            f"  {found.earlier_kind} by {owner.clocks.name(actor)}\n{self._at(site, actor, state)}"
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

    # Lifetimes -------------------------------------------------------------------------------------------------------

    def cluster_start(self, cluster: Cluster) -> None:
        self.machine = cluster.machine
        state = self.clusters[id(cluster)] = ClusterState(cluster.machine, cluster)
        self._names[state.clocks.number] = state
        for space in self.spaces.values():
            space.shared_by_clusters = True

    def warp_end(self, warp: Warp) -> None:
        state = self._state(warp)
        clock = state.clocks.warps[id(warp)]
        clock.release(clocks.FULL, state.exit[warp.cta.rank])

    def cluster_end(self, cluster: Cluster) -> None:
        """A CTA must not end before all that uses its memory, or has yet to signal its barriers."""
        state = self.clusters[id(cluster)]
        for cta in cluster.ctas:
            known = state.exit[cta.rank][ORDER]
            for actor, (clock, site, what) in state.guests[cta.rank].items():
                if known[actor] < clock:
                    self._report(
                        "exit",
                        site,
                        site,
                        f"CTA {cta.ctaid} (rank {cta.rank}) may exit before {what} by {state.clocks.name(actor)}\n"
                        f"    at {self._where(site)}\n"
                        "  missing: nothing that its warps waited for comes after that",
                    )
        del self.clusters[id(cluster)]

    def _guest(self, state: ClusterState, rank: int, actor: int, clock: int, index: int, what: str) -> None:
        state.guests[rank][actor] = (clock, index, what)

    def _state(self, warp: Warp) -> ClusterState:
        return self.clusters[id(warp.cta.cluster)]

    def _of(self, split: Split) -> tuple[ClusterState, WarpClock]:
        state = self.clusters[id(split.cta.cluster)]
        return state, state.clocks.warps[id(split.warp)]

    # Accesses --------------------------------------------------------------------------------------------------------

    def access(
        self, split: Split, mask: np.ndarray, index: int, space: str, address: np.ndarray, size: int, kind: str
    ) -> None:
        if space == "local":
            return
        state, warp = self._of(split)
        op = self.machine.current
        if len(address) < 32:
            lanes = np.arange(len(address))
        else:
            lanes = np.arange(32) if mask is clocks.FULL else np.flatnonzero(mask)
            address = address[lanes] if len(lanes) < 32 else address
        if op is not None:
            work = self.work[op]
            epoch = warp.epoch(index, work.stream, work.clock)
            for part, offsets in self._places(state, space, address, size):
                cells = part.cells_of(offsets, size)
                self._touch(state, part, cells, kind, epoch, work.known, False, None, index, offsets, space)
            return
        how = self._semantics.get(index)
        if how is None:
            how = self._semantics[index] = semantics(self.machine.program.code[index])
        if how.strong:
            kind = {"read": "atomic read", "write": "atomic"}.get(kind, kind)
            self._flags(state, warp, mask, how, space, address, kind)
        epochs = warp.epochs(index, lanes)
        own = warp.ids[lanes][:, None]
        places = self._places(state, space, address, size)
        groups = warp.groups
        for part, offsets in places:
            if len(places) > 1:
                chosen = np.isin(address, offsets + self._base_of(part))
            cells = part.cells_of(offsets, size)
            if len(groups) == 1 and len(places) == 1:
                self._touch(state, part, cells, kind, epochs, groups[0].known, False, own, index, offsets, space)
                continue
            for group in groups:
                at = group.mask[lanes]
                if len(places) > 1:
                    at = at & chosen
                if not at.any():
                    continue
                some = at if len(places) == 1 else at[chosen]
                self._touch(
                    state, part, cells[some], kind, epochs[at], group.known, False, own[at], index, offsets[some], space
                )

    def _base_of(self, part: Space) -> int:
        return getattr(part, "base", 0)

    def _places(
        self, state: ClusterState, space: str, address: np.ndarray, size: int
    ) -> list[tuple[Space, np.ndarray]]:
        """The memories that the addresses lie in, with byte offsets in each."""
        low, high = int(address.min()), int(address.max())
        if space == "global":
            return self._global_places(address, low, high, size)
        if low >> RANK_SHIFT == high >> RANK_SHIFT:
            return [(self._shared_space(state, low >> RANK_SHIFT), address & address.dtype.type(OFFSET_MASK))]
        return [
            (self._shared_space(state, rank), address[address >> RANK_SHIFT == rank] & address.dtype.type(OFFSET_MASK))
            for rank in np.unique(address >> RANK_SHIFT).tolist()
        ]

    def _shared_space(self, state: ClusterState, rank: int) -> Space:
        space = state.shared[rank]
        space.base = rank << RANK_SHIFT
        return space

    def _global_places(self, address: np.ndarray, low: int, high: int, size: int) -> list[tuple[Space, np.ndarray]]:
        memory = self.machine.memory
        item = memory.find(low, high + size)
        if item is not None:
            return [(self._global_space(item), address - np.uint64(item.floor))]
        found: dict[int, list] = {}
        for value in address.tolist():
            item = memory.find(value, value + size)
            if item is not None:
                found.setdefault(id(item), [item, []])[1].append(value)
        return [
            (self._global_space(item), np.array(values, np.uint64) - np.uint64(item.floor))
            for item, values in found.values()
        ]

    def _global_space(self, item: object) -> Space:
        space = self.spaces.get(item.floor)
        if space is None or space.bytes < item.end - item.floor:
            space = self.spaces[item.floor] = Space(item.name, -(-(item.end - item.floor) // 16) * 16, WORD)
            space.bytes = item.end - item.floor
            space.base = item.floor
            space.shared_by_clusters = len(self._names) > 1 or len(self.clusters) > 1
            for address, size in self.previous:
                if item.base <= address and address + size <= item.end:
                    actor = next(iter(self._names.values())).clocks.previous
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
        offsets: object,
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
        if found is not None:
            self._conflict(
                state, found, kind, self._precise(epoch, found, cells), index, self._address(part, found, space)
            )

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

    def _address(self, part: Space, found: Conflict, space: str) -> str:
        if space == "tmem":
            column, lanes = divmod(found.cell, TMEM_LANES)
            return f"{part.name}, column {column}, lanes {16 * lanes} to {16 * lanes + 15}"
        offset = found.cell << part.shift
        if space == "global":
            return self.machine.memory.describe(part.base + offset)
        cluster = next(iter(self.clusters.values())).clocks.cluster
        return cluster.shared.describe(part.base | offset)

    def griddepcontrol(self, split: Split, mask: np.ndarray, index: int, action: str) -> None:
        self.executed.add(index)
        if action == "wait":
            state, warp = self._of(split)
            for group in warp.part(mask):
                group.known[:2, state.clocks.previous] = 1

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

    def fence(self, split: Split, mask: np.ndarray, index: int, kind: str) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        if kind.startswith("proxy.async"):
            warp.proxy_fence(mask)
        elif kind.startswith("mbarrier_init"):
            for group in warp.part(mask):
                at = warp.base + clocks.INIT
                group.known[PROXY, at] = group.known[ORDER, at]
        elif kind == "tcgen05.wait::ld":
            warp.learn(mask, clocks.TMEM_LOAD, warp.count[clocks.TMEM_LOAD])
        elif kind == "tcgen05.wait::st":
            warp.learn(mask, clocks.TMEM_STORE, warp.count[clocks.TMEM_STORE])
        elif kind == "tcgen05.fence::before_thread_sync":
            for group in warp.part(mask):
                np.maximum(
                    group.known[BEFORE, warp.own], group.known[ORDER, warp.own], out=group.known[BEFORE, warp.own]
                )
        elif kind == "tcgen05.fence::after_thread_sync":
            for group in warp.part(mask):
                np.maximum(group.known[AFTER], group.known[BEFORE], out=group.known[AFTER])
        elif kind.startswith("proxy.tensormap"):
            warp.release(mask, state.maps)
        elif not kind.startswith("proxy"):
            if warp.fence_acquire is not None:
                warp.acquire(mask, warp.fence_acquire)
            mine = self.foreign.setdefault(state.clocks.number, {})
            for number, known in warp.fence_foreign.items():
                row = mine.setdefault(number, known.copy())
                np.maximum(row, known, out=row)
            warp.fence_release = state.clocks.fresh(3)
            warp.release(mask, warp.fence_release)

    # Thread barriers -------------------------------------------------------------------------------------------------

    def warp_sync(self, split: Split, mask: np.ndarray, index: int) -> None:
        self.executed.add(index)
        self._of(split)[1].meet(mask)

    def _meeting(self, state: ClusterState, split: Split, barrier: NamedBarrier) -> Meeting:
        return state.meetings.setdefault((split.cta.rank, barrier.index), Meeting())

    def barrier(self, split: Split, mask: np.ndarray, index: int, barrier: NamedBarrier, wait: bool) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        warp.release(mask, self._meeting(state, split, barrier).at(state.clocks, barrier.generation))
        if wait:
            state.left[split] = barrier.generation

    def barrier_done(self, split: Split, mask: np.ndarray, index: int, barrier: NamedBarrier) -> None:
        state, warp = self._of(split)
        generation = state.left.pop(split)
        warp.join(mask, self._meeting(state, split, barrier).at(state.clocks, generation))

    def cluster_arrive(self, split: Split, mask: np.ndarray, index: int, relaxed: bool) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        target = state.cluster_meeting.at(state.clocks, split.warp.cluster_arrivals + 1)
        if not relaxed:
            warp.release(mask, target)
            return
        # A relaxed arrival hands on what an earlier fence released, and initialised mbarriers behind their fence.
        if warp.fence_release is not None:
            np.maximum(target, warp.fence_release, out=target)
        inits = slice(clocks.INIT, state.clocks.first_barrier, clocks.PER_WARP)
        for _, known in warp.holding(mask):
            np.maximum(target[:2, inits], known[PROXY, inits], out=target[:2, inits])

    def cluster_wait(self, split: Split, mask: np.ndarray, index: int, barrier: ClusterBarrier) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        warp.join(mask, state.cluster_meeting.at(state.clocks, max(split.warp.cluster_waits, 1)))

    # mbarriers -------------------------------------------------------------------------------------------------------

    def _barrier(self, state: ClusterState, barrier: Mbarrier) -> BarrierClock:
        """The clock of a barrier, brought up to its present phase."""
        clock = state.barriers[barrier]
        if clock.phase != barrier.phase:
            for actor, tick, site in clock.waits:
                if clock.gathering[ORDER, actor] < tick:
                    self._report(
                        "overrun",
                        site,
                        clock.site,
                        f"phase overrun of the mbarrier at {barrier.cluster.shared.describe(barrier.address)}: phase "
                        f"{clock.phase} can complete before {state.clocks.name(actor)} has seen phase "
                        f"{clock.phase - 1}\n    at {self._where(site)}\n"
                        "  missing: no arrival of that phase comes after the wait",
                    )
            clock.waits = []
            clock.phase = barrier.phase
            np.maximum(clock.known, clock.gathering, out=clock.known)
            clock.known[:, clock.actor] = barrier.phase
            clock.gathering[:] = 0
        return clock

    def mbarrier_init(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        state, warp = self._of(split)
        clock = state.barriers[barrier] = BarrierClock(state.clocks, barrier, state.clocks.add_barrier(barrier))
        warp.count[clocks.INIT] += 1
        warp.learn(mask, clocks.INIT, warp.count[clocks.INIT], slice(0, 1))
        clock.init = (warp.base + clocks.INIT, warp.count[clocks.INIT])
        clock.site = index

    def _initialised(
        self, state: ClusterState, clock: BarrierClock, barrier: Mbarrier, known: np.ndarray, row: int, index: int
    ) -> None:
        actor, count = clock.init
        if known[row, actor] < count:
            missing = (
                "no fence.mbarrier_init or fence.proxy.async behind mbarrier.init" if row == PROXY else "no barrier"
            )
            self._report(
                "init",
                clock.site,
                index,
                f"the mbarrier at {barrier.cluster.shared.describe(barrier.address)} may be used before it is initialised"
                "\n"
                f"    at {self._where(clock.site)}\n  used\n    at {self._where(index)}\n  missing: {missing} between",
            )

    def mbarrier_arrive(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        clock = self._barrier(state, barrier)
        op = self.machine.current
        if op is not None:
            # cp.async.mbarrier.arrive: the arrival tells of the copies before it and of what came before those.
            work = self.work[op]
            self._initialised(state, clock, barrier, work.known, ORDER, index)
            np.maximum(clock.gathering, work.known[:3], out=clock.gathering)
            at = clock.gathering[ORDER]
            at[warp.base + work.stream] = max(at[warp.base + work.stream], work.clock)
            return
        for lanes, known in warp.holding(mask):
            self._initialised(state, clock, barrier, known, ORDER, index)
            rank = barrier.address >> RANK_SHIFT
            if rank != split.cta.rank:
                actor = warp.base + int(lanes.argmax())
                self._guest(state, rank, actor, warp.clock, index, "an arrival at its mbarrier")
        if "relaxed" not in self.machine.program.code[index].parts:
            warp.release(mask, clock.gathering)

    def mbarrier_complete(self, split: Split, index: int, barrier: Mbarrier, size: int) -> None:
        state, _ = self._of(split)
        clock = self._barrier(state, barrier)
        work = self.work[self.machine.current]
        self._initialised(state, clock, barrier, work.known, PROXY, index)
        epoch = state.clocks.head(index) | clock.actor << clocks.CLOCK_BITS | barrier.phase + 1
        self._flush(state, work, epoch, index)
        self._guest(
            state,
            barrier.address >> RANK_SHIFT,
            clock.actor,
            barrier.phase + 1,
            index,
            "a copy that signals its mbarrier",
        )
        np.maximum(clock.gathering, work.known[:3], out=clock.gathering)

    def mbarrier_wait(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        clock = self._barrier(state, barrier)
        for _, known in warp.holding(mask):
            self._initialised(state, clock, barrier, known, ORDER, index)
        warp.count[clocks.WAIT] += 1
        warp.learn(mask, clocks.WAIT, warp.count[clocks.WAIT], slice(0, 1))
        clock.waits.append((warp.base + clocks.WAIT, warp.count[clocks.WAIT], index))
        if "relaxed" not in self.machine.program.code[index].parts:
            warp.acquire(mask, clock.known)

    def commit(self, split: Split, index: int, barrier: Mbarrier) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        clock = self._barrier(state, barrier)
        work = self.work[self.machine.current]
        self._initialised(state, clock, barrier, work.known, PROXY, index)
        np.maximum(clock.gathering, work.known[:3], out=clock.gathering)
        clock.gathering[:, warp.base + clocks.TENSOR] = work.clock
        rank = barrier.address >> RANK_SHIFT
        if rank != split.cta.rank:
            self._guest(state, rank, warp.base + clocks.TENSOR, work.clock, index, "a commit on its mbarrier")

    # Groups ----------------------------------------------------------------------------------------------------------

    def bulk_group(self, split: Split, mask: np.ndarray, index: int, action: str, count: int, read: bool) -> None:
        if not mask.any():
            return
        self.executed.add(index)
        _, warp = self._of(split)
        if action == "commit":
            warp.bulk_groups += 1
            return
        done = warp.bulk_groups - count
        warp.learn(mask, clocks.BULK_READ, done)
        if not read:
            warp.learn(mask, clocks.BULK_WRITE, done)

    def cp_async_group(self, split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
        if not mask.any():
            return
        self.executed.add(index)
        _, warp = self._of(split)
        if action == "commit_group":
            warp.count[clocks.COPY] += 1
            warp.copy_groups.append(warp.count[clocks.COPY])
        elif action == "wait_all":
            warp.count[clocks.COPY] += 1
            warp.learn(mask, clocks.COPY, warp.count[clocks.COPY], slice(0, 1))
        elif len(warp.copy_groups) > count:
            warp.learn(mask, clocks.COPY, warp.copy_groups[-1 - count], slice(0, 1))

    def wgmma_sync(self, split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
        self.executed.add(index)
        if action == "fence":
            return
        state, warp = self._of(split)
        if action == "commit_group":
            warp.wgmma_groups += 1
        elif warp.wgmma_groups > count:
            leader = self._leader(state, warp)
            done = warp.wgmma_groups - count
            for group in warp.part(mask):
                column = group.known[:2, leader.base + clocks.WGMMA]
                np.maximum(column, done, out=column)

    @staticmethod
    def _leader(state: ClusterState, warp: WarpClock) -> WarpClock:
        """The first warp of the warpgroup: its wgmma stream is the warpgroup's."""
        return state.clocks.warps[id(warp.warp.cta.warps[warp.warp.index & ~3])]

    def wgmma_issue(self, split: Split, index: int, number: int) -> None:
        state, warp = self._of(split)
        key = (split.cta.rank, split.warp.index // 4, number)
        state.wgmma_parts.setdefault(key, []).append(warp.snapshot(split.warp.live))
        state.latest_wgmma = key

    # Asynchronous operations -----------------------------------------------------------------------------------------

    def issue(self, op: AsyncOp) -> None:
        state, warp = self._of(op.split)
        stream = clock = 0
        if op.engine == "tcgen05":
            known = warp.snapshot(op.mask)
            stream = clocks.TENSOR
            warp.count[stream] += 1
            clock = warp.count[stream]
            # The tensor core works in the order of issue.
            known[:, warp.base + stream] = clock - 1
        elif op.engine == "wgmma":
            parts = state.wgmma_parts.pop(state.latest_wgmma)
            known = np.minimum.reduce(parts)
            stream, clock = clocks.WGMMA, warp.wgmma_groups + 1
        elif op.engine == "cp.async":
            arrival = self.machine.program.code[op.index].has("mbarrier")
            known = warp.snapshot(op.mask, own=not arrival)
            stream, clock = clocks.COPY, warp.count[clocks.COPY] + 1
            if arrival:
                warp.count[clocks.COPY] += 1
        else:
            known = warp.snapshot(op.mask)
            if op.engine in BULK_ENGINES:
                stream, clock = clocks.BULK_READ, warp.bulk_groups + 1
        self.work[op] = Work(known, stream, clock, [])

    def end(self, op: AsyncOp) -> None:
        del self.work[op]

    def bulk(self, split: Split, index: int, space: str, address: int, size: int, kind: str) -> None:
        state, warp = self._of(split)
        work = self.work[self.machine.current]
        if not work.stream:
            work.waiting.append((space, address, size, kind))
            return
        stream = clocks.BULK_READ if kind == "read" else clocks.BULK_WRITE
        self._range(state, work, space, address, size, kind, warp.epoch(index, stream, work.clock), index)

    def tensor_map(self, split: Split, index: int, address: int) -> None:
        """A tensor map that this launch wrote needs order and a tensormap proxy fence (PTX ISA 9.7.13.5)."""
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
        self._touch(state, part, cells, "read", epoch, known, True, None, index, offset, "global")

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
            part, offset = self._shared_space(state, address >> RANK_SHIFT), address & OFFSET_MASK
        kind = "atomic" if kind == "reduce" else kind
        # Shipped kernels let all lanes of a warp issue the same store: the same epoch writes the same data.
        same = epoch if work.stream == clocks.BULK_READ and kind == "write" else None
        self._touch(state, part, part.range_of(offset, size), kind, epoch, work.known, True, same, index, offset, space)

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
        part = self._shared_space(state, cta.rank)
        cells = _operand_cells(desc, rows, k, k_major, part.shift)
        self._touch(state, part, cells, "read", epoch, work.known, True, None, index, None, "shared")

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
        self._operand(state, work, cta, b, shape.n // ctas, 16, shape.b_k_major, epoch, index)
        if isinstance(a, Descriptor):
            self._operand(state, work, cta, a, shape.m // ctas, 16, shape.a_k_major, epoch, index)
        for first_lane, _, count, _, width in parts:
            if not isinstance(a, Descriptor):
                self._tensor(state, warp, cta, first_lane, count, a & 0xFFFF, 8, "read", epoch, work.known, index)
            self._tensor(state, warp, cta, first_lane, count, target & 0xFFFF, width, "write", epoch, work.known, index)

    def cp(self, split: Split, index: int, cta: Cta, source: Descriptor, rows: int, width: int, target: int) -> None:
        state, warp = self._of(split)
        work = self.work[self.machine.current]
        epoch = warp.epoch(index, work.stream, work.clock)
        self._operand(state, work, cta, source, rows, width // 2, True, epoch, index)
        lanes = 128 if any(p.startswith("warpx") for p in self.machine.program.code[index].parts) else rows
        first = 0 if lanes == 128 else target >> 16
        self._tensor(state, warp, cta, first, lanes, target & 0xFFFF, width // 4, "write", epoch, work.known, index)

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
        own: int | None = None,
    ) -> None:
        part = state.tmem[cta.rank]
        part.base = cta.rank << RANK_SHIFT
        cells = _tmem_cells(lane, lanes, column, columns)
        self._tensor_fences(state, warp, part, cells, kind, epoch, known, index)
        self._touch(state, part, cells, kind, epoch, known, False, own, index, None, "tmem")

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
    ) -> None:
        """Ordered tensor-memory accesses of other warps and engines also need the tcgen05 fences (PTX ISA 9.7.16.6)."""
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
            bad &= np.isin(actors % clocks.PER_WARP, TENSOR_STREAMS) & (
                actors // clocks.PER_WARP != warp.base // clocks.PER_WARP
            )
            if not bad.any():
                continue
            at = int(bad.argmax())
            earlier = int(epochs[at])
            unfenced = known[BEFORE, actor_of(earlier)] < earlier & clocks.CLOCK
            side = "before_thread_sync behind the first" if unfenced else "after_thread_sync before the second"
            site = earlier >> clocks.SITE_SHIFT
            where = self._address(part, Conflict(AFTER, earlier, what, int(cells[at])), "tmem")
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
        self._tensor(state, warp, split.cta, lane, lanes, column, width, kind, epoch, known, index, warp.base + stream)

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
        part.base = split.cta.base
        epoch = int(warp.epochs(index, np.array([mask.argmax()]))[0, 0])
        cells = _tmem_cells(0, 128, first, count)
        self._touch(state, part, cells, "write", epoch, warp.snapshot(mask), False, None, index, None, "tmem")
        part.forget(cells)


__all__ = ["ALL_BYTES", "Race", "RaceFound", "Races"]
