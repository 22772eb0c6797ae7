"""Machine state and the execution loop: clusters, CTAs, warps, splits, the scheduler and the deadlock report.

A warp's 32 lanes run as one or more *splits*: a split is a set of lanes with one program counter. A divergent branch
replaces a split by two that meet again at the branch's immediate post-dominator (independent thread scheduling: both
make progress, whatever the other waits for). Everything that can wait is a blocking instruction at the head of a
basic block; a blocked split is parked on the object it waits for and re-runs that block when woken.

Asynchronous engines (tensor core, bulk copies, cp.async) hand their work to `Machine.submit`, which runs it at issue.
A policy object may replace that, to delay work or to attach clocks: nothing else in the simulator assumes when an
`AsyncOp` runs.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import progress
from .memory import POISON, RANK_SHIFT, SHARED_RESERVED, SHARED_WINDOW, GlobalMemory, SharedMemory, SimError
from .parser import PtxError

if TYPE_CHECKING:
    from .ops_control import Registers

FULL = np.ones(32, bool)
FULL.flags.writeable = False
ALL_BYTES = FULL.tobytes()
NONE_BYTES = bytes(32)
LANES = np.arange(32, dtype=np.uint32)
# Results of a block function other than the next block.
BLOCKED, GONE, YIELD = -1, -2, -3


def lanes_text(mask: np.ndarray) -> str:
    """Lanes in words, for messages: "all lanes", "lane 3", "lanes 0-15, 31"."""
    lanes = np.flatnonzero(mask).tolist()
    if len(lanes) == 32:
        return "all lanes"
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
    return f"lane{'' if len(lanes) == 1 else 's'} {text}"


class Deadlock(SimError):
    """No split can run. The message lists every waiting split and what it waits for."""


@dataclass(slots=True, eq=False)
class AsyncOp:
    """Work of an asynchronous engine: `run` has the memory effects, then the completion (barrier, group)."""

    engine: str
    run: Callable[[], None]
    split: Split
    index: int
    # The lanes that issued it.
    mask: np.ndarray


class Waitable:
    """Base of whatever a split can be parked on."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[Split] = []

    def describe(self) -> str:
        return type(self).__name__


class Join:
    """The meeting point of the splits of one divergent branch; once `open`, lanes pass it without waiting."""

    __slots__ = ("arrived", "expected", "open", "parent")

    def __init__(self, parent: Split, expected: np.ndarray) -> None:
        self.parent = parent
        self.expected = expected
        self.arrived = np.zeros(32, bool)
        self.open = False


class Split:
    """A set of lanes of one warp that run together."""

    __slots__ = (
        "bits",
        "cta",
        "full",
        "join",
        "machine",
        "mask",
        "note",
        "pc",
        "rpc",
        "spin",
        "spinning",
        "spun",
        "state",
        "timeout",
        "wait",
        "warp",
    )

    def __init__(self, warp: Warp, mask: np.ndarray, pc: int, rpc: int, join: Join | None) -> None:
        self.warp = warp
        self.cta = warp.cta
        self.machine = warp.cta.machine
        self.pc = pc
        self.rpc = rpc
        self.join = join
        # What a blocking instruction has already done for this visit (an arrival made, a phase to wait for).
        self.state: object = None
        self.wait: Waitable | None = None
        self.note = ""
        self.timeout = False
        # Set by progress.Spins: states seen, whether it spins now, and whether it ever did (it then gets short slices).
        self.spin: tuple | None = None
        self.spinning = self.spun = False
        self.set_mask(mask)

    def set_mask(self, mask: np.ndarray) -> None:
        self.mask = mask
        self.bits = mask.tobytes()
        self.full = self.bits == ALL_BYTES

    def park(self, on: Waitable, note: str = "") -> bool:
        """Wait for `on`; returns True, the 'blocked' answer of blocking instructions."""
        self.wait = on
        self.note = note
        on.waiters.append(self)
        return True

    def diverge(self, taken: np.ndarray, target: int, fall: int, rpc: int) -> int:
        """Split at a branch: lanes `taken` go to `target`, the rest to `fall`; they meet again at `rpc`."""
        warp = self.warp
        other = self.mask & ~taken
        warp.splits.remove(self)
        if rpc == self.rpc and self.join is not None:
            # A loop that some lanes leave: they wait where the others will come too.
            join = self.join
        else:
            join = Join(self, self.mask.copy())
            self.pc = rpc
        for mask, pc in ((taken.copy(), target), (other, fall)):
            if pc == rpc and not join.open:
                join.arrived |= mask
                continue
            child = Split(warp, mask, pc, rpc, join)
            child.spun = self.spun
            warp.splits.append(child)
            self.machine.ready.append(child)
        return GONE

    def arrive_join(self) -> Split | None:
        """This split reached its meeting point; returns the parent when all its lanes are there."""
        join = self.join
        if join.open:
            join.expected = join.expected & ~self.mask
            self.rpc, self.join = join.parent.rpc, join.parent.join
            return self
        join.arrived |= self.mask
        self.warp.splits.remove(self)
        return self._complete(join)

    def _complete(self, join: Join) -> Split | None:
        if (join.arrived & join.expected).tobytes() != join.expected.tobytes():
            return None
        parent = join.parent
        if not join.expected.any():
            return None
        parent.set_mask(join.expected)
        if parent.bits == self.warp.live.tobytes():
            self.warp.relaxed = None
        self.warp.splits.append(parent)
        return parent

    def exit_lanes(self, mask: np.ndarray) -> None:
        """Lanes end: no meeting point waits for them any more."""
        warp = self.warp
        warp.live = warp.live & ~mask
        join = self.join
        while join is not None:
            join.expected = join.expected & ~mask
            join = join.parent.join
        rest = self.mask & ~mask
        if rest.any():
            self.set_mask(rest)
        else:
            warp.splits.remove(self)
            join = self.join
            while join is not None:
                if join.expected.any():
                    woken = self._complete(join)
                    if woken is not None:
                        self.machine.ready.append(woken)
                    break
                join = join.parent.join
        if not warp.live.any():
            self.cta.warp_done(warp)


class Warp:
    """32 lanes: their registers live in `namespace`, the globals of the translated block functions."""

    __slots__ = (
        "cluster_arrivals",
        "cluster_lanes",
        "cluster_waits",
        "cta",
        "engine",
        "full",
        "groups",
        "index",
        "live",
        "local",
        "local_marks",
        "masked",
        "namespace",
        "relaxed",
        "rendezvous",
        "splits",
    )

    def __init__(self, cta: Cta, index: int, lanes: int) -> None:
        self.cta = cta
        self.index = index
        self.live = lanes > LANES
        self.splits: list[Split] = []
        # State of engines that track work per warp: cp.async and bulk groups, wgmma groups, by name.
        self.engine: dict = {}
        self.groups: dict = {}
        self.rendezvous: dict = {}
        # While lanes go on that were let go from a meeting point: the deadlock report of that moment.
        self.relaxed: str | None = None
        self.local = self.local_marks = None
        self.cluster_arrivals = 0
        self.cluster_waits = 0
        self.cluster_lanes = np.zeros(32, bool)

    @property
    def name(self) -> str:
        return f"CTA {self.cta.ctaid} (rank {self.cta.rank}) warp {self.index}"


class NamedBarrier(Waitable):
    """bar.sync / barrier (PTX ISA 9.7.13.1). `expected` is 0 for 'all threads of the CTA'."""

    __slots__ = ("arrived", "expected", "generation", "index", "names", "result", "votes")

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.arrived = 0
        self.expected = 0
        self.generation = 0
        self.names: list[str] = []
        self.votes: list[int] = [0, 0]
        self.result = [0, 0]

    def arrive(self, split: Split, threads: int, count: int, votes: int = 0) -> int:
        """Add arrivals; returns the generation whose end the caller may wait for."""
        if self.arrived and count != self.expected:
            raise SimError(
                f"named barrier {self.index}: {threads} threads ask for a count of {count or 'all'}, "
                f"earlier arrivals for {self.expected or 'all'} ({', '.join(self.names)})"
            )
        self.expected = count
        self.arrived += threads
        self.votes[0] += votes
        self.votes[1] += threads
        self.names.append(f"warp {split.warp.index}")
        generation = self.generation
        self.release_if_complete(split.cta)
        return generation

    def release_if_complete(self, cta: Cta) -> None:
        total = self.expected or 32 * cta.live_warps
        if self.arrived > total:
            raise SimError(
                f"named barrier {self.index}: {self.arrived} arrivals for a count of {total} ({', '.join(self.names)})"
            )
        if self.arrived and self.arrived == total:
            self.generation += 1
            self.arrived = 0
            self.names = []
            self.result, self.votes = self.votes, [0, 0]
            cta.machine.wake(self)

    def describe(self) -> str:
        return (
            f"named barrier {self.index}: {self.arrived} of {self.expected or 'all'} threads arrived "
            f"({', '.join(self.names)})"
        )


class ClusterBarrier(Waitable):
    """barrier.cluster (PTX ISA 9.7.13.4): phase n completes when every live warp has arrived n times.

    Arrivals may run ahead: shipped kernels arrive twice before they wait.
    """

    __slots__ = ("cluster", "phase")

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.phase = 0
        self.cluster = cluster

    def check(self) -> None:
        live = [w.cluster_arrivals for cta in self.cluster.ctas for w in cta.warps if w.live.any()]
        if live and min(live) > self.phase:
            self.phase = min(live)
            self.cluster.machine.wake(self)

    def describe(self) -> str:
        late = [
            w.name for cta in self.cluster.ctas for w in cta.warps if w.live.any() and w.cluster_arrivals <= self.phase
        ]
        return f"cluster barrier phase {self.phase + 1}; not arrived: {', '.join(late)}"


class TensorMemory(Waitable):
    """What tcgen05.alloc waits for: columns that a CTA gives back."""

    __slots__ = ("cta",)

    def __init__(self, cta: Cta) -> None:
        super().__init__()
        self.cta = cta

    def describe(self) -> str:
        return f"tensor memory of CTA {self.cta.ctaid}: {int((self.cta.tmem_owner == 0).sum())} columns are free"


class Cta:
    """One thread block with its named barriers and tensor memory."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster = cluster
        self.machine = cluster.machine
        self.rank = rank
        self.ctaid = ctaid
        self.base = rank << RANK_SHIFT
        self.barriers: dict[int, NamedBarrier] = {}
        self.warps: list[Warp] = []
        self.live_warps = 0
        # Tensor memory, indexed [column, lane] so that one register's 32 lanes are contiguous.
        self.tmem = np.full((512, 128), POISON, np.uint32)
        self.tmem_owner = np.zeros(512, np.int32)
        # First column -> columns of each allocation.
        self.tmem_sizes: dict[int, int] = {}
        self.tmem_permit = True
        self.tmem_wait = TensorMemory(self)
        # Made by the first setmaxnreg (ops_control.Registers).
        self.registers: Registers | None = None

    def barrier(self, index: int) -> NamedBarrier:
        found = self.barriers.get(index)
        if found is None:
            found = self.barriers[index] = NamedBarrier(index)
        return found

    def warp_done(self, warp: Warp) -> None:
        self.live_warps -= 1
        if self.machine.observer is not None:
            self.machine.observer.warp_end(warp)
        # An exited warp holds up no barrier that counts all threads of the CTA or cluster.
        self.cluster.barrier.check()
        for barrier in self.barriers.values():
            barrier.release_if_complete(self)
        if self.live_warps == 0 and self.tmem_owner.any():
            self.machine.finding("tensor memory not deallocated at exit", None)
        if self.registers is not None:
            self.machine.wake(self.registers)
        if self.live_warps == 0:
            self.cluster.shared.exited.add(self.rank)
            if self.registers is not None:
                self.registers.check()
            for barrier in self.barriers.values():
                if barrier.arrived:
                    self.machine.finding(
                        f"incomplete at the exit of CTA {self.ctaid}: {barrier.describe()}", None, barrier.index
                    )
            self.cluster.cta_done()


class Cluster:
    """The CTAs that run together, with their shared memory and mbarriers."""

    def __init__(self, machine: Machine, index: int, ctaids: list) -> None:
        self.machine = machine
        self.index = index
        self.shared = machine.shared_memory(len(ctaids))
        self.mbarriers = self.shared.barriers
        self.barrier = ClusterBarrier(self)
        self.ctas = [Cta(self, rank, ctaid) for rank, ctaid in enumerate(ctaids)]
        self.live = len(self.ctas)

    def cta_done(self) -> None:
        self.live -= 1
        if self.live == 0:
            self.machine.cluster_done(self)


@dataclass
class Report:
    """What a run did: dynamic counts and anything suspicious that did not stop it."""

    warp_instructions: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    findings: list = field(default_factory=list)
    visits: list = field(default_factory=list)
    # Forms that only show at run time: matrix shapes and layouts, tensor-map boxes.
    forms: set = field(default_factory=set)
    opcodes: set = field(default_factory=set)
    # What printf wrote, a string per lane and call.
    printed: list = field(default_factory=list)

    @property
    def microseconds_per_instruction(self) -> float:
        """Of CPU time: wall time also counts whatever else the machine does."""
        return 1e6 * self.cpu_seconds / max(self.warp_instructions, 1)


class Findings(SimError):
    """A run with findings under `strict`; `report` is the run's report."""

    def __init__(self, report: Report) -> None:
        super().__init__("\n".join(report.findings))
        self.report = report


class Machine:
    """Runs one launch of a translated program.

    `resident`: clusters that run at the same time; CTAs that wait for each other need all of theirs. `policy`: when
    asynchronous work completes (policies.py; at issue without one). `observer`: told of everything (observer.py).
    `limit`: time slices without progress before a livelock is reported. `strict`: findings raise at the end.
    """

    def __init__(
        self,
        program,
        launch,
        memory: GlobalMemory,
        resident: int = 1,
        observer: object = None,
        policy: object = None,
        order: object = None,
        limit: int = 3000,
        strict: bool = False,
    ) -> None:
        self.program = program
        self.launch = launch
        self.memory = memory
        self.observer = observer
        self.policy = policy
        self.order = order
        self.resident = resident
        self.limit = limit
        self.strict = strict
        self.shared_size = SHARED_RESERVED + program.static_shared + launch.shared_bytes
        self.shared_size = -(-self.shared_size // 1024) * 1024 if launch.shared_bytes == 0 else self.shared_size
        self.ready: deque[Split] = deque()
        self.running: list[Cluster] = []
        self.report = Report(visits=[0] * len(program.blocks))
        self._seen: set = set()
        self._shared_pool: list[SharedMemory] = []
        self.progress = 0
        # The asynchronous operation that runs now, if any.
        self.current: AsyncOp | None = None
        self.clock = 0
        self.spins = progress.Spins(self)
        self._slice_mark = -1
        self.slices = 0
        self.ticks = 0
        # Kernel parameters hold tensor maps, which are aligned to 64 bytes.
        data = np.frombuffer(launch.params + bytes(16 + -len(launch.params) % 16), np.uint8)
        room = np.empty(len(data) + 128, np.uint8)
        self.params = room[-room.ctypes.data % 128 :][: len(data)]
        self.params[:] = data
        memory.add_array("kernel parameters", self.params)
        gx, gy, gz = launch.grid
        cx, cy, cz = launch.cluster
        self.pending = deque((x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx))
        self.cluster_count = 0

    def shared_memory(self, ranks: int) -> SharedMemory:
        """Shared memory for a cluster, freshly poisoned."""
        if self._shared_pool:
            shared = self._shared_pool.pop()
            shared.poison()
            return shared
        shared = SharedMemory(ranks, self.shared_size)
        shared.variables = self.program.shared_variables
        return shared

    def finding(self, text: str, index: int | None, key: object = None) -> None:
        """Record something suspicious once per instruction and kind (the text up to its colon, or `key`)."""
        key = (key or text.split(":")[0], index)
        if key not in self._seen:
            self._seen.add(key)
            self.report.findings.append(text if index is None else f"{text}\n  at {self.program.where(index)}")

    def submit(self, op: AsyncOp) -> None:
        """Hand work to an asynchronous engine: by default it completes at once."""
        if self.observer is not None:
            self.observer.issue(op)
        if self.policy is None:
            self.execute(op)
        else:
            self.policy.submit(self, op)

    def execute(self, op: AsyncOp) -> None:
        """Run an operation; until it ends, accesses are its own."""
        outer, self.current = self.current, op
        if self.observer is None:
            op.run()
        else:
            self.observer.begin(op)
            op.run()
            self.observer.end(op)
        self.current = outer

    def tick(self) -> int:
        """A clock that advances with every read, for %clock and %globaltimer."""
        self.ticks += 32
        return self.ticks

    def wake(self, what: Waitable) -> None:
        self.progress += 1
        if what.waiters:
            waiters, what.waiters = what.waiters, []
            for split in waiters:
                split.wait = None
                self.ready.append(split)

    def launch_cluster(self, first: tuple[int, int, int]) -> None:
        cx, cy, cz = self.launch.cluster
        ctaids = [(first[0] + x, first[1] + y, first[2] + z) for z in range(cz) for y in range(cy) for x in range(cx)]
        cluster = Cluster(self, self.cluster_count, ctaids)
        self.cluster_count += 1
        bx, by, bz = self.launch.block
        threads = bx * by * bz
        for cta in cluster.ctas:
            for index in range(-(-threads // 32)):
                warp = Warp(cta, index, min(32, threads - 32 * index))
                self.program.bind(warp)
                cta.warps.append(warp)
                split = Split(warp, warp.live.copy(), 0, -1, None)
                warp.splits.append(split)
                self.ready.append(split)
            cta.live_warps = len(cta.warps)
        self.running.append(cluster)
        if self.observer is not None:
            self.observer.cluster_start(cluster)

    def cluster_done(self, cluster: Cluster) -> None:
        if self.policy is not None:
            # Work that nobody waited for still completes before the memory is given back.
            self.policy.flush()
        for barrier in cluster.mbarriers.values():
            if barrier.tx:
                self.finding(f"bytes pending at the exit of the cluster: {barrier.describe()}", None, barrier.address)
        if self.observer is not None:
            self.observer.cluster_end(cluster)
        self.running.remove(cluster)
        self._shared_pool.append(cluster.shared)
        for cta in cluster.ctas:
            for warp in cta.warps:
                self.program.release(warp)

    def run(self) -> Report:
        start, cpu = time.perf_counter(), time.process_time()
        with np.errstate(all="ignore"):
            self._run()
        self.report.seconds = time.perf_counter() - start
        self.report.cpu_seconds = time.process_time() - cpu
        sizes = self.program.block_sizes
        self.report.opcodes = self.program.executed_opcodes(self.report.visits)
        self.report.warp_instructions = sum(n * size for n, size in zip(self.report.visits, sizes, strict=True))
        if self.strict and self.report.findings:
            raise Findings(self.report)
        return self.report

    def _run(self) -> None:
        ready = self.ready
        while True:
            while self.pending and len(self.running) < self.resident:
                self.launch_cluster(self.pending.popleft())
            if not ready:
                if self.policy is not None and self.policy.advance(self):
                    continue
                if not self.running and not self.pending:
                    return
                self._stuck("deadlock: nothing can run")
                continue
            before = self.slices
            self.run_split(ready.popleft() if self.order is None else self.order.choose(ready))
            if self.slices == before:
                self.spins.epoch += 1

    def _stuck(self, why: str) -> None:
        """Nothing can change: let timed waits time out, then lanes go from their meeting points; else a deadlock."""
        if (self.policy is not None and self.policy.advance(self)) or (
            not self.spins.out_of_turns() and self._time_out()
        ):
            return
        report = f"{why}\n{self.deadlock_report()}"
        if not progress.let_lanes_go(self.running, report):
            raise self.deadlock(report)

    def deadlock(self, report: str, error: object = "") -> Deadlock:
        """The report of the moment when lanes were first let go, if they were: what came later follows from that."""
        warps = (warp for cluster in self.running for cta in cluster.ctas for warp in cta.warps)
        first = next((warp.relaxed for warp in warps if warp.relaxed), report)
        return Deadlock(f"{first}\nLanes that waited at a meeting point went on, and then: {error}" if error else first)

    def _time_out(self) -> bool:
        found = False
        for cluster in self.running:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    for split in warp.splits:
                        if split.wait is not None and split.timeout:
                            split.wait.waiters.remove(split)
                            split.wait = None
                            split.state = "timed out"
                            self.ready.append(split)
                            found = True
        return found

    def run_split(self, split: Split) -> None:
        """Run a split until it blocks, ends, meets another or has used its time slice."""
        warp = split.warp
        visits = self.report.visits
        while split.pc == split.rpc:
            split = split.arrive_join()
            if split is None:
                return
        functions = warp.full if split.full else warp.masked
        pc, rpc, mask = split.pc, split.rpc, split.mask
        budget = 8 if split.spun else 500
        try:
            while True:
                following = functions[pc](split, mask)
                if following >= 0:
                    visits[pc] += 1
                    pc = following
                    if pc == rpc:
                        split.pc = pc
                        split = split.arrive_join()
                        if split is None:
                            return
                        while split.pc == split.rpc:
                            split = split.arrive_join()
                            if split is None:
                                return
                        functions = warp.full if split.full else warp.masked
                        pc, rpc, mask = split.pc, split.rpc, split.mask
                    budget -= 1
                    if budget < 0:
                        split.pc = pc
                        self._slice(split)
                        return
                elif following == GONE:
                    visits[pc] += 1
                    return
                elif following == BLOCKED:
                    split.pc = pc
                    return
                else:
                    split.pc = pc
                    self.ready.append(split)
                    return
        except Deadlock:
            raise
        except (
            PtxError,
            IndexError,
            KeyError,
            ValueError,
            TypeError,
            ZeroDivisionError,
            OverflowError,
            AttributeError,
            NameError,
        ) as error:
            found = self.locate(error, split, pc)
            raise (self.deadlock("", found) if split.warp.relaxed else found) from error

    def _slice(self, split: Split) -> None:
        """A split has used its slice. Spinning, or too many slices without any barrier or atomic, is a livelock."""
        self.slices += 1
        self.ready.append(split)
        self.clock = self.clock + 1 if self._slice_mark == self.progress else 0
        self._slice_mark = self.progress
        where = self.program.where_block(split.pc)
        if self.clock > self.limit:
            raise self.deadlock(
                f"livelock: {self.limit} time slices without progress: {split.warp.name} runs at {where}\n"
                f"{self.deadlock_report()}"
            )
        if self.clock and self.spins.slice(split):
            self._stuck(f"livelock: {split.warp.name} spins at {where} and nothing can end that")

    def locate(self, error: BaseException, split: Split, pc: int) -> SimError:
        """Attach the PTX line to an error, from the line of generated code that raised it."""
        index = None
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == self.program.filename:
                index = self.program.line_map.get(frame.lineno)
        if index is None:
            index = self.program.blocks[pc].first
        kind = "" if isinstance(error, PtxError) else f"{type(error).__name__}: "
        return SimError(
            f"{kind}{error}\n  at {self.program.where(index)}\n  in {split.warp.name}, {lanes_text(split.mask)}"
        )

    def deadlock_report(self) -> str:
        lines = []
        for cluster in self.running:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    for split in warp.splits:
                        waits = split.wait.describe() if split.wait is not None else "its turn (it can run)"
                        lanes = "" if split.full else f" {lanes_text(split.mask)}"
                        lines.append(
                            f"  {warp.name}{lanes} waits for {waits} {split.note}\n"
                            f"    at {self.program.where_block(split.pc)}"
                        )
        if self.pending:
            lines.append(
                f"  {len(self.pending)} clusters of the grid have not started, since {self.resident} at a time are "
                "resident: where CTAs wait for each other, set the option `resident` (of Machine, Launch.run, a "
                "Recorder's `options`, `run --resident`)"
            )
        return "\n".join(lines)


def shared_generic(address: int) -> int:
    return SHARED_WINDOW + address
