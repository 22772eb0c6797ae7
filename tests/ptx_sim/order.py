"""The order of events: what every lane, stream and barrier of a running cluster knows of the others.

Knowledge travels along arrivals and waits (mbarrier, named and cluster barriers, bar.warp.sync), commits, groups,
fences, and relaxed or acquire and release accesses. Anything else is no order, whatever a schedule happened to do.
Asynchronous operations begin with what their issuing lanes know and end at what signals them, and nowhere else.

`Order` also reports misuse that needs no memory access: mbarriers used before they are initialised, phases that can
pass a waiter by, CTAs that may end too early. `Races` in races.py adds the accesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import clocks
from .clocks import AFTER, BEFORE, ORDER, PROXY, ClusterClocks, WarpClock
from .history import Space
from .machine import AsyncOp, Cluster, ClusterBarrier, Machine, NamedBarrier, Split, Warp
from .memory import RANK_SHIFT
from .observer import Observer
from .ops_mbarrier import Mbarrier
from .registers import Misuse

WORD = 2  # log2 of the bytes of a cell
TMEM_COLUMNS, TMEM_LANES = 512, 8  # cells of 16 lanes of one column
BULK_ENGINES = ("bulk store", "tensor store")
GENERIC_ENGINES = ("st.async",)  # what signals an mbarrier and is no operation of the async proxy


class RaceFound(Exception):
    """Raised at the first report when `Races(stop=True)`."""


@dataclass(frozen=True)
class Race:
    """One report. `kind` is order, proxy, tensor fence, tensor memory, exit, overrun, init or registers."""

    kind: str
    first: int
    second: int
    text: str


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
        # Whether something of the running phase was written in the generic proxy, by st.async.
        self.generic = False


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

    def __init__(self, cluster: Cluster) -> None:
        self.clocks = ClusterClocks(cluster)
        size = cluster.shared.size
        cells = TMEM_COLUMNS * TMEM_LANES
        self.shared = [Space(f"shared memory of rank {cta.rank}", size, WORD, cta.base) for cta in cluster.ctas]
        self.tmem = [Space(f"tensor memory of rank {cta.rank}", cells, 0, cta.base) for cta in cluster.ctas]
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


class Order(Observer):
    """Tracks launches, one after the other. `races` are the reports, at most `limit`; `stop` raises RaceFound."""

    def __init__(
        self,
        stop: bool = False,
        limit: int = 50,
        allow: Callable[[Race, Machine], bool] | None = None,
        previous: tuple = (),
    ) -> None:
        # (address, bytes) that the launch before this one writes, if this one may start before that has ended
        # (programmatic dependent launch): griddepcontrol.wait orders them.
        self.previous = previous
        self.stop = stop
        self.limit = limit
        # Whether a documented exception covers a report.
        self.allow = allow
        self.allowed: list[Race] = []
        self.races: list[Race] = []
        self.machine: Machine | None = None
        self._forget()

    def _forget(self) -> None:
        """A launch begins: all that came before is ordered before it (stream order)."""
        self.clusters: dict[int, ClusterState] = {}
        self.work: dict[AsyncOp, Work] = {}
        self.spaces: dict[int, Space] = {}
        # Per flag (cluster or 0 for global memory, address) what its writers released, by cluster.
        self.flags: dict[tuple, dict[int, np.ndarray]] = {}
        self.foreign: dict[int, dict[int, np.ndarray]] = {}
        # Synchronisation instructions that took effect.
        self.executed: set[int] = set()
        self._seen: set = set()
        self._names: dict[int, ClusterClocks] = {}

    # Reports ---------------------------------------------------------------------------------------------------------

    def _report(self, kind: str, first: int, second: int, text: str) -> None:
        if (kind, first, second) in self._seen or len(self.races) >= self.limit:
            return
        self._seen.add((kind, first, second))
        race = Race(kind, first, second, text)
        if self.allow is not None and self.allow(race, self.machine):
            self.allowed.append(race)
            return
        self.races.append(race)
        if self.stop:
            raise RaceFound(text)

    def registers(self, misuses: list[Misuse]) -> None:
        """Add what the register rules (`registers.py`) found."""
        for misuse in misuses:
            self._report("registers", misuse.first, misuse.second, misuse.text)

    def _where(self, index: int) -> str:
        return self.machine.program.where(index)

    # Lifetimes -------------------------------------------------------------------------------------------------------

    def cluster_start(self, cluster: Cluster) -> None:
        if self.machine is not cluster.machine:
            self.machine = cluster.machine
            self._forget()
            self._one_group()
        state = self.clusters[id(cluster)] = ClusterState(cluster)
        self._names[state.clocks.number] = state.clocks
        for space in self.spaces.values():
            space.shared_by_clusters = True

    def _one_group(self) -> None:
        """All tcgen05 instructions of a kernel belong to one .cta_group (PTX ISA, tcgen05 CTA pair)."""
        groups: dict[str, int] = {}
        for instr in self.machine.program.code:
            if instr.base == "tcgen05":
                groups |= {part: instr.index for part in instr.parts if part.startswith("cta_group::")}
        if len(groups) > 1:
            one, two = groups.values()
            self._report(
                "tensor memory",
                one,
                two,
                "tcgen05 instructions of two CTA groups in one kernel\n"
                f"    at {self._where(one)}\n    at {self._where(two)}",
            )

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
        # Reports still name its actors, but nobody asks what they know.
        for clock in state.clocks.order:
            clock.groups = []

    def _guest(self, state: ClusterState, rank: int, actor: int, clock: int, index: int, what: str) -> None:
        state.guests[rank][actor] = (clock, index, what)

    def _state(self, warp: Warp) -> ClusterState:
        return self.clusters[id(warp.cta.cluster)]

    def _of(self, split: Split) -> tuple[ClusterState, WarpClock]:
        state = self.clusters[id(split.cta.cluster)]
        return state, state.clocks.warps[id(split.warp)]

    def griddepcontrol(self, split: Split, mask: np.ndarray, index: int, action: str) -> None:
        self.executed.add(index)
        if action == "wait":
            state, warp = self._of(split)
            for group in warp.part(mask):
                group.known[:2, state.clocks.previous] = 1

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
            warp.wait_tensor(clocks.TMEM_LOAD)
        elif kind == "tcgen05.wait::st":
            warp.wait_tensor(clocks.TMEM_STORE)
        elif kind == "tcgen05.fence::before_thread_sync":
            warp.fence_before(mask)
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
            clock.known[[ORDER, BEFORE] if clock.generic else slice(None), clock.actor] = barrier.phase
            clock.gathering[:] = 0
            clock.generic = False
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
            where = barrier.cluster.shared.describe(barrier.address)
            missing = (
                "no fence.mbarrier_init or fence.proxy.async behind mbarrier.init" if row == PROXY else "no barrier"
            )
            self._report(
                "init",
                clock.site,
                index,
                f"the mbarrier at {where} may be used before it is initialised\n"
                f"    at {self._where(clock.site)}\n  used\n    at {self._where(index)}\n  missing: {missing} between",
            )

    def mbarrier_arrive(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        clock = self._barrier(state, barrier)
        op = self.machine.current
        if op is not None:
            # cp.async.mbarrier.arrive: the arrival tells of the copies before it and of what its lanes did before. The
            # wheel's 64-head forward for D 576 fills rows of invalid slots with stores and has no other arrival.
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
        clock.generic |= self.machine.current.engine in GENERIC_ENGINES

    def mbarrier_wait(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        self.executed.add(index)
        state, warp = self._of(split)
        clock = self._barrier(state, barrier)
        for _, known in warp.holding(mask):
            self._initialised(state, clock, barrier, known, ORDER, index)
        clock.waits.append((warp.base + int(mask.argmax()), warp.clock, index))
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

    def _flush(self, state: ClusterState, work: Work, epoch: int, index: int) -> None:
        """The accesses of an operation that has found the mbarrier it signals count under `epoch`."""

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
        elif op.engine == "wgmma":
            parts = state.wgmma_parts.pop(state.latest_wgmma)
            known = np.minimum.reduce(parts)
            stream, clock = clocks.WGMMA, warp.wgmma_groups + 1
        elif op.engine == "cp.async":
            arrival = self.machine.program.code[op.index].has("mbarrier")
            known = warp.snapshot(op.mask)
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
