"""Vector clocks of a cluster: who is an actor, what each lane knows of the others, how knowledge travels.

An *actor* is a lane or an asynchronous stream: the cp.async, bulk copies, tensor-memory loads and stores and
tensor-core work of a warp, the wgmma of a warpgroup, the copies that signal one mbarrier. An *epoch* is an actor, its
clock and the instruction, packed into an int64; the memory history stores epochs (FastTrack, Flanagan and Freund 2009).

Knowledge is an array [rows, actors]: the clock up to which everything that an actor did is

    ORDER   ordered before the holder
    PROXY   also visible to the async proxy: a proxy fence lies on the path (PTX ISA, Causality Order)
    BEFORE  also behind a tcgen05.fence::before_thread_sync, or a commit, which implies it
    AFTER   and a tcgen05.fence::after_thread_sync of the holder followed (never handed on)

Lanes of a warp that know the same share one array; they part when only some of them wait or fence, and meet again at
bar.warp.sync and at barriers. A lane's own actions are in its epochs, not in its array, until it hands them on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .machine import ALL_BYTES, FULL, Cluster, Warp

ORDER, PROXY, BEFORE, AFTER = range(4)
CLOCK_BITS, ACTOR_BITS, CLUSTER_BITS = 20, 13, 13
CLOCK, ACTOR, CLUSTER = (1 << CLOCK_BITS) - 1, (1 << ACTOR_BITS) - 1, (1 << CLUSTER_BITS) - 1
CLUSTER_SHIFT = CLOCK_BITS + ACTOR_BITS
SITE_SHIFT = CLUSTER_SHIFT + CLUSTER_BITS
BARRIERS = 128

# Streams of each warp, after its 32 lanes.
STREAMS = (
    "cp.async",
    "bulk copy (reads)",
    "bulk copy (writes)",
    "tensor-memory load",
    "tensor-memory store",
    "tensor core",
    "mbarrier.init",
    "wgmma",
)
COPY, BULK_READ, BULK_WRITE, TMEM_LOAD, TMEM_STORE, TENSOR, INIT, WGMMA = range(32, 32 + len(STREAMS))
PER_WARP = 32 + len(STREAMS)
TMEM_STREAMS = slice(TMEM_LOAD, TMEM_STORE + 1)


def actor_of(epoch: int) -> int:
    return epoch >> CLOCK_BITS & ACTOR


def late(epochs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which epochs a row of knowledge does not cover."""
    return known.take(epochs >> CLOCK_BITS & ACTOR) < (epochs & CLOCK)


@dataclass(slots=True, eq=False)
class Group:
    """Lanes of one warp with equal knowledge."""

    mask: np.ndarray
    known: np.ndarray


@dataclass(frozen=True, slots=True)
class Pipelined:
    """One tensor-core operation: `actor`, `clock`, and the number of its pipeline, -1 for a copy."""

    actor: int
    clock: int
    number: int
    numbers: np.ndarray

    def after(self, epochs: np.ndarray) -> np.ndarray:
        """Which epochs are its own, or of operations that the hardware ends before it."""
        mine = (epochs >> CLOCK_BITS & ACTOR) == self.actor
        clock = np.where(mine, epochs & CLOCK, 0)
        numbers = self.numbers[clock]
        pipelined = (numbers == self.number) | (numbers == -1) if self.number > 0 else np.zeros_like(mine)
        return mine & (pipelined | (clock == self.clock))


class WarpClock:
    """The lanes of one warp: their clock, their knowledge, and the counters of the warp's streams."""

    def __init__(self, space: ClusterClocks, warp: Warp, number: int) -> None:
        self.space = space
        self.warp = warp
        self.base = number * PER_WARP
        self.lanes = slice(self.base, self.base + 32)
        self.own = slice(self.base, self.base + PER_WARP)
        self.ids = np.arange(self.base, self.base + 32)
        self.clock = 1
        self.groups = [Group(FULL, space.fresh(4))]
        # Clock up to which a lane's own accesses are behind its own proxy fence.
        self.fenced = np.zeros(32, np.int32)
        # Issued operations per stream; of copy and bulk streams the batches or groups that were closed.
        self.count = [0] * PER_WARP
        self.copy_groups: list[int] = []
        self.bulk_groups = 0
        self.wgmma_groups = 0
        # What the lanes waited for of their own tensor-memory loads and stores [3 rows, stream]. A wait covers those of
        # its lane, and a load is the work of all 32: only all lanes together hand it on.
        self.waited = np.zeros((3, 2), np.int32)
        # Per tensor-core operation, by its clock, the pipeline it belongs to: see `pipeline`.
        self.pipelines = np.zeros(256, np.int32)
        self.accumulators: dict[tuple, int] = {}
        # What a fence before a relaxed store or arrival hands on, and what relaxed loads saw before a fence.
        self.fence_release: np.ndarray | None = None
        self.fence_acquire: np.ndarray | None = None
        self.fence_foreign: dict[int, np.ndarray] = {}

    def part(self, mask: np.ndarray) -> list[Group]:
        """The groups of exactly the lanes in `mask`, split off where others share their knowledge."""
        groups = self.groups
        if len(groups) == 1 and mask.tobytes() == ALL_BYTES:
            return groups
        found, rest = [], []
        for group in groups:
            both = group.mask & mask
            if not both.any():
                rest.append(group)
            elif (other := group.mask & ~mask).any():
                rest.append(Group(other, group.known))
                found.append(Group(both, group.known.copy()))
            else:
                found.append(group)
        self.groups = rest + found
        return found

    def holding(self, mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(lanes, knowledge) pairs for the lanes in `mask`, for looking only."""
        groups = self.groups
        if len(groups) == 1:
            return [(mask, groups[0].known)]
        return [(both, group.known) for group in groups if (both := group.mask & mask).any()]

    def acquire(self, mask: np.ndarray, source: np.ndarray) -> None:
        for group in self.part(mask):
            np.maximum(group.known[: len(source)], source, out=group.known[: len(source)])

    def release(self, mask: np.ndarray, target: np.ndarray) -> None:
        """Add what the lanes know and did to `target` [3 or 4 rows]."""
        rows = len(target)
        for lanes, known in self.holding(mask):
            np.maximum(target, known[:rows], out=target)
            mine = target[:, self.lanes]
            np.maximum(mine[ORDER], self.clock, out=mine[ORDER], where=lanes)
            np.maximum(mine[PROXY], self.fenced, out=mine[PROXY], where=lanes)
        if self.whole(mask):
            self.add_waited(target)
        self.tick()

    def whole(self, mask: np.ndarray) -> bool:
        """Whether these are all lanes that have not exited."""
        return mask.tobytes() == ALL_BYTES or bool((mask | ~self.warp.live).all())

    def add_waited(self, target: np.ndarray) -> None:
        rows = min(len(target), 3)
        mine = target[:rows, self.own][:, TMEM_STREAMS]
        np.maximum(mine, self.waited[:rows], out=mine)

    def wait_tensor(self, stream: int) -> None:
        """All lanes have waited for their own tensor-memory loads or stores."""
        self.waited[:BEFORE, stream - TMEM_LOAD] = self.count[stream]

    def fence_before(self, mask: np.ndarray) -> None:
        """tcgen05.fence::before_thread_sync"""
        for group in self.part(mask):
            np.maximum(group.known[BEFORE, self.own], group.known[ORDER, self.own], out=group.known[BEFORE, self.own])
        if self.whole(mask):
            self.waited[BEFORE] = self.waited[ORDER]

    def everything(self) -> np.ndarray:
        """What any lane knows, all rows."""
        known = np.maximum.reduce([group.known for group in self.groups])
        self.add_waited(known)
        return known

    def pipeline(self, clock: int, accumulator: tuple | None) -> Pipelined:
        """Note what tensor-core operation `clock` is: a copy (None) or a product of an accumulator and shape.

        Returns which earlier ones of this warp end before it starts: of all pairs, PTX orders products of the same
        accumulator and shape, and a copy and a product behind it (PTX ISA, Pipelined tcgen05 Instructions).
        """
        if clock >= len(self.pipelines):
            self.pipelines = np.concatenate([self.pipelines, np.zeros_like(self.pipelines)])
        number = -1
        if accumulator is not None:
            number = self.accumulators.setdefault(accumulator, len(self.accumulators) + 1)
        self.pipelines[clock] = number
        return Pipelined(self.base + TENSOR, clock, number, self.pipelines)

    def snapshot(self, mask: np.ndarray) -> np.ndarray:
        """What an operation issued by these lanes starts with: all four rows."""
        out = self.space.fresh(4)
        self.release(mask, out)
        return out

    def tick(self) -> None:
        self.clock += 1
        if self.clock >= CLOCK:
            raise OverflowError("more clock ticks of a warp than an epoch holds")

    def meet(self, mask: np.ndarray) -> None:
        """The lanes synchronise with each other (bar.warp.sync)."""
        merged = self.space.fresh(4)
        self.release(mask, merged)
        self.join(mask, merged)

    def join(self, mask: np.ndarray, known: np.ndarray) -> None:
        """All lanes in `mask` continue with the same knowledge."""
        found = self.part(mask)
        if len(found) == 1:
            np.maximum(found[0].known[: len(known)], known, out=found[0].known[: len(known)])
            return
        merged = found[0].known
        for group in found[1:]:
            np.maximum(merged, group.known, out=merged)
        np.maximum(merged[: len(known)], known, out=merged[: len(known)])
        self.groups = [g for g in self.groups if all(g is not f for f in found)]
        self.groups.append(Group(np.logical_or.reduce([g.mask for g in found]), merged))

    def learn(self, mask: np.ndarray, stream: int, clock: int, rows: slice = slice(0, 2)) -> None:
        """The lanes have waited for their own stream up to `clock`."""
        for group in self.part(mask):
            column = group.known[rows, self.base + stream]
            np.maximum(column, clock, out=column)

    def proxy_fence(self, mask: np.ndarray) -> None:
        self.fenced[mask] = self.clock
        self.tick()
        for group in self.part(mask):
            np.maximum(group.known[PROXY], group.known[ORDER], out=group.known[PROXY])

    def epochs(self, index: int, lanes: np.ndarray) -> np.ndarray:
        """Epochs of an access now, one per lane number given: [lanes, 1]."""
        head = self.space.head(index) | self.clock
        return (head | (self.ids[lanes] << CLOCK_BITS))[:, None]

    def epoch(self, index: int, stream: int, clock: int) -> int:
        return self.space.head(index) | (self.base + stream) << CLOCK_BITS | clock


class ClusterClocks:
    """Actors of one cluster, and its warps by object."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.number = (cluster.index + 1) & CLUSTER
        self.warps: dict[int, WarpClock] = {}
        warps = [warp for cta in cluster.ctas for warp in cta.warps]
        self.first_barrier = len(warps) * PER_WARP
        # The launch before this one, for programmatic dependent launches.
        self.previous = self.first_barrier + BARRIERS
        self.actors = self.previous + 1
        if self.actors > ACTOR:
            raise OverflowError(f"{self.actors} actors in a cluster of {len(warps)} warps; an epoch holds {ACTOR}")
        self.order = [WarpClock(self, warp, n) for n, warp in enumerate(warps)]
        self.warps = {id(warp): clock for warp, clock in zip(warps, self.order, strict=True)}
        self.barriers: list = []
        # Memory slots of readers (see history.py) by actor.
        self.slots = np.zeros(self.actors, np.int64)
        for n in range(len(warps)):
            own = self.slots[n * PER_WARP : (n + 1) * PER_WARP]
            own[:] = n % 40
            own[[BULK_READ, BULK_WRITE]] = 40 + n % 8
            own[[TENSOR, WGMMA]] = 48 + n % 8
        self.slots[self.first_barrier :] = 56 + np.arange(BARRIERS + 1) % 8

    def head(self, index: int) -> int:
        return index << SITE_SHIFT | self.number << CLUSTER_SHIFT

    def fresh(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.actors), np.int32)

    def add_barrier(self, barrier: object) -> int:
        """An actor for the copies that signal this mbarrier."""
        self.barriers.append(barrier)
        if len(self.barriers) > BARRIERS:
            raise OverflowError(f"more than {BARRIERS} mbarriers in a cluster")
        return self.first_barrier + len(self.barriers) - 1

    def name(self, actor: int) -> str:
        """An actor in words."""
        if actor == self.previous:
            return "the launch before this one"
        if actor >= self.first_barrier:
            number = actor - self.first_barrier
            where = self.cluster.shared.describe(self.barriers[number].address) if number < len(self.barriers) else "?"
            return f"copy that signals the mbarrier at {where}"
        clock, part = self.order[actor // PER_WARP], actor % PER_WARP
        if part < 32:
            return f"{clock.warp.name} lane {part}"
        return f"{STREAMS[part - 32]} of {clock.warp.name}"
