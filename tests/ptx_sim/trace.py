"""Record what the warps and engines of a launch did: the input of counters, the timed replay and the timeline.

A trace is a happens-before graph without times. Per warp it holds a stream of code ranges (compressed: indices into
the kernel's code), waits, signals and hand-overs to asynchronous engines; per asynchronous operation its bytes, its
matrix work and the signals that it gives when it completes. A signal's key is a barrier and the phase (generation)
that the contribution counted for; a phase ends when all its recorded contributions have been made. In a correct
program that assignment does not depend on timing, so a replay may order the contributions of a phase as it likes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .launch import Launch
from .machine import BLOCKED, AsyncOp, Machine, Split, Warp
from .memory import RANK_SHIFT
from .observer import Observer
from .ops_matrix import warpgroup
from .parser import Instr

# Kinds of stream items. RUN: first and last instruction, and the operations issued inside as (instruction, number);
# SIGNAL: key; WAIT: key, instruction; PART: one warp's part of a wgmma, as (CTA, warpgroup, number in it); DRAIN:
# operation numbers, whether their source reads suffice, instruction.
RUN, SIGNAL, WAIT, PART, DRAIN = range(5)
# Executions of an instruction whose addresses are looked at for bank conflicts and sectors.
SAMPLES = 16
BANKS, SECTOR = 32, 32
BULK_STORES = ("bulk store", "tensor store")
LANE_EXCHANGE = ("shfl", "vote", "redux", "match")


@dataclass
class Op:
    """One asynchronous operation. `flop` is per CTA of `ctas`; bytes are those that really move."""

    engine: str
    index: int
    cta: int
    warp: int
    ctas: tuple = ()
    shape: tuple = ()
    flop: int = 0
    operand_bytes: int = 0
    global_read: int = 0
    global_write: int = 0
    global_reduce: int = 0
    shared_read: int = 0
    shared_write: Counter = field(default_factory=Counter)
    pieces: int = 0
    signals: list = field(default_factory=list)


@dataclass
class WarpTrace:
    cta: int
    index: int
    stream: list = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"CTA {self.cta} warp {self.index}"


@dataclass
class Trace:
    """Clusters run one after the other by the recorded machine; `ctas_per_cluster` says which CTAs belong together."""

    launch: Launch
    code: list[Instr]
    target: str
    ctas_per_cluster: int
    warps: list[WarpTrace] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    # Contributions that end a phase, by signal key.
    expected: Counter = field(default_factory=Counter)
    # Executions per instruction: warp instructions, and active lanes of memory accesses.
    executed: Counter = field(default_factory=Counter)
    # Per instruction, over its sampled executions: [executions, shared-memory wavefronts, global 32-byte sectors,
    # sectors that the CTA had loaded before].
    accesses: dict[int, list[int]] = field(default_factory=dict)
    # Bytes of generic accesses by (path, kind).
    traffic: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)

    def wavefronts(self, index: int) -> float:
        """Shared-memory passes of one execution, bank conflicts included."""
        count, waves, _, _ = self.accesses.get(index, (0, 0, 0, 0))
        return waves / count if count else 1.0

    def sectors(self, index: int) -> float:
        count, _, sectors, _ = self.accesses.get(index, (0, 0, 0, 0))
        return sectors / count if count else 0.0

    def hits(self, index: int) -> float:
        """The share of a load's sectors that the CTA had loaded before, so that L1 has them."""
        _, _, sectors, known = self.accesses.get(index, (0, 0, 0, 0))
        return known / sectors if sectors else 0.0

    def where(self, index: int) -> str:
        instr = self.code[index]
        return f"PTX line {instr.line}: {instr.text[:100]}"


def bank_passes(address: np.ndarray, size: int) -> int:
    """Passes of a shared-memory access: 128 bytes of distinct words each, one word per bank and pass.

    Lanes are served in groups whose accesses are 128 bytes: a quarter warp for 16 bytes, a half for 8.
    """
    words = max(size // 4, 1)
    passes = 0
    for group in np.split(address, max(len(address) * words // BANKS, 1)):
        cells = np.unique((group[:, None] // 4 + np.arange(words)[None, :]).reshape(-1))
        passes += int(np.bincount((cells % BANKS).astype(np.int64), minlength=BANKS).max())
    return passes


class Tracer(Observer):
    """Builds a Trace while a machine runs. The machine runs clusters one at a time."""

    def __init__(self, trace: Trace, program: object) -> None:
        self.trace = trace
        self.program = program
        self._warps: dict[Warp, WarpTrace] = {}
        self._ctas: dict[object, int] = {}
        self._barriers: dict[object, int] = {}
        self._numbers: dict[AsyncOp, int] = {}
        self._groups: dict[tuple, list] = {}
        self._matrix: dict[tuple, list[int]] = {}
        self._parts: dict[Warp, int] = {}
        # What each operation touched, by its number.
        self._touched: dict[int, tuple] = {}
        self._ranges: list[tuple] = []
        self._cursor = 0
        self._issues: list[tuple[int, int]] = []
        self._resume: dict[Split, int] = {}
        self._sectors: set[tuple[int, int]] = set()
        self._wgmma = {i for i, instr in enumerate(program.code) if instr.op.startswith("wgmma.mma_async")}
        # Blocks that only begin because the simulator gathers a warp's lanes there; an assembler schedules across.
        labels = set(program.kernel.labels.values())
        self._exchanges = {
            i for i, instr in enumerate(program.code) if instr.op.startswith(LANE_EXCHANGE) and i not in labels
        }

    # Code ---------------------------------------------------------------------------------------------------------

    def bind(self, warp: Warp) -> None:
        """Stands in for Program.bind: block functions report what they execute."""
        type(self.program).bind(self.program, warp)
        for name in ("full", "masked"):
            functions = getattr(warp, name)
            if functions and not hasattr(functions[0], "traced"):
                setattr(warp, name, [self._traced(f, b) for f, b in zip(functions, self.program.blocks, strict=True)])

    def _traced(self, function: object, block: object) -> object:
        def run(split: Split, mask: np.ndarray) -> int:
            self._cursor = self._resume.pop(split, block.first)
            warp = self.warp(split)
            result = function(split, mask)
            if result != BLOCKED:
                self._code(warp, split, block.last)
            elif self._cursor != block.first:
                self._resume[split] = self._cursor
            return result

        run.traced = True
        return run

    def _code(self, warp: WarpTrace, split: Split, last: int) -> None:
        """Append the instructions from the cursor to `last`, cut after each wgmma."""
        first, self._cursor = self._cursor, max(last, self._cursor)
        for index in range(first, last):
            self.trace.executed[index] += 1
            if index in self._wgmma:
                self._run(warp, first, index + 1)
                number = self._parts.get(split.warp, 0)
                self._parts[split.warp] = number + 1
                warp.stream.append((PART, (warp.cta, warp.index // 4, number)))
                first = index + 1
        self._run(warp, first, last)

    def _run(self, warp: WarpTrace, first: int, last: int) -> None:
        if first < last or self._issues:
            before = warp.stream[-1] if warp.stream else None
            issues = tuple(self._issues)
            if first in self._exchanges and before is not None and before[0] == RUN and before[2] == first:
                warp.stream[-1] = (RUN, before[1], last, before[3] + issues)
            else:
                warp.stream.append((RUN, first, last, issues))
            self._issues = []

    def cta(self, cta: object) -> int:
        return self._ctas.setdefault(cta, len(self._ctas))

    def warp(self, split: Split) -> WarpTrace:
        found = self._warps.get(split.warp)
        if found is None:
            found = self._warps[split.warp] = WarpTrace(self.cta(split.cta), split.warp.index)
            self.trace.warps.append(found)
        return found

    def _event(self, split: Split, index: int, item: tuple) -> None:
        warp = self.warp(split)
        if index >= self._cursor:
            self._code(warp, split, index + 1)
        warp.stream.append(item)

    def _current(self, split: Split) -> Op | None:
        op = split.machine.current
        return None if op is None else self.trace.ops[self._numbers[op]]

    # Order --------------------------------------------------------------------------------------------------------

    def _barrier_key(self, barrier: object, phase: int) -> tuple:
        return ("mbarrier", self._barriers.setdefault(barrier, len(self._barriers)), phase)

    def _contribute(self, split: Split, index: int, key: tuple) -> None:
        self.trace.expected[key] += 1
        op = self._current(split)
        if op is None:
            self._event(split, index, (SIGNAL, key))
        else:
            op.signals.append(key)

    def mbarrier_arrive(self, split: Split, mask: np.ndarray, index: int, barrier: object) -> None:
        self._contribute(split, index, self._barrier_key(barrier, barrier.phase + 1))

    def mbarrier_complete(self, split: Split, index: int, barrier: object, size: int) -> None:
        self._contribute(split, index, self._barrier_key(barrier, barrier.phase + 1))

    def commit(self, split: Split, index: int, barrier: object) -> None:
        self._contribute(split, index, self._barrier_key(barrier, barrier.phase + 1))

    def mbarrier_wait(self, split: Split, mask: np.ndarray, index: int, barrier: object) -> None:
        self._event(split, index, (WAIT, self._barrier_key(barrier, barrier.phase), index))
        self.trace.waits[index] += 1

    def barrier(self, split: Split, mask: np.ndarray, index: int, barrier: object, wait: bool) -> None:
        self._contribute(split, index, ("bar", self.cta(split.cta), barrier.index, barrier.generation + 1))

    def barrier_done(self, split: Split, mask: np.ndarray, index: int, barrier: object) -> None:
        key = ("bar", self.cta(split.cta), barrier.index, barrier.generation)
        self._event(split, index, (WAIT, key, index))
        self.trace.waits[index] += 1

    def cluster_arrive(self, split: Split, mask: np.ndarray, index: int, relaxed: bool) -> None:
        self._contribute(split, index, ("cluster", split.cta.cluster.index, split.warp.cluster_arrivals + 1))

    def cluster_wait(self, split: Split, mask: np.ndarray, index: int, barrier: object) -> None:
        self._event(split, index, (WAIT, ("cluster", split.cta.cluster.index, split.warp.cluster_waits), index))
        self.trace.waits[index] += 1

    def _drain(self, split: Split, index: int, numbers: list[int], read: bool) -> None:
        if numbers:
            self._event(split, index, (DRAIN, tuple(numbers), read, index))
            self.trace.waits[index] += 1

    def _group(self, split: Split, index: int, kind: str, action: str, count: int, read: bool) -> None:
        groups = self._groups.setdefault((kind, split.warp), [[]])
        if action.startswith("commit"):
            groups.append([])
            return
        if action == "wait_all":
            groups.append([])
            count = 0
        keep = max(len(groups) - 1 - count, 0)
        self._drain(split, index, [n for group in groups[:keep] for n in group], read)
        if not read:
            del groups[:keep]

    def bulk_group(self, split: Split, mask: np.ndarray, index: int, action: str, count: int, read: bool) -> None:
        self._group(split, index, "bulk", action, count, read)

    def cp_async_group(self, split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
        self._group(split, index, "cp.async", action, count, False)

    def wgmma_sync(self, split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
        if action != "wait_group":
            return
        commits = warpgroup(split).warps[split.warp.index % 4][1]
        if len(commits) > count:
            last = commits[len(commits) - count - 1]
            numbers = self._matrix.get((self.cta(split.cta), split.warp.index // 4), [])
            # In-order completion: the last of them stands for all.
            self._drain(split, index, numbers[max(last - 1, 0) : last], False)

    # Asynchronous operations --------------------------------------------------------------------------------------

    def issue(self, op: AsyncOp) -> None:
        number = len(self.trace.ops)
        self._numbers[op] = number
        cta = self.cta(op.split.cta)
        self.trace.ops.append(Op(op.engine, op.index, cta, op.split.warp.index, (cta,)))
        if op.engine == "wgmma":
            self._matrix.setdefault((cta, op.split.warp.index // 4), []).append(number)
            return
        self._issues.append((op.index, number))
        if op.engine == "cp.async" or op.engine in BULK_STORES:
            kind = "cp.async" if op.engine == "cp.async" else "bulk"
            self._groups.setdefault((kind, op.split.warp), [[]])[-1].append(number)

    def mma(
        self,
        split: Split,
        index: int,
        cta: object,
        shape: object,
        target: int,
        a: object,
        b: object,
        accumulate: bool,
    ) -> None:
        op = self._current(split)
        parts = self.program.code[index].parts
        pair, ws = "cta_group::2" in parts, "ws" in parts
        ctas = 2 if pair else 1
        op.shape = ("tcgen05", pair, ws, shape.m, shape.n)
        op.flop = 2 * shape.m * shape.n * 16 // ctas
        in_tmem = isinstance(a, int)
        op.operand_bytes = 32 * (shape.n // ctas) + (0 if in_tmem else 32 * shape.m // ctas)
        number = self.cta(cta)
        op.ctas = (number,) if not op.ctas or not pair else tuple(sorted({*op.ctas, number}))

    def cp(self, split: Split, index: int, cta: object, source: object, rows: int, width: int, target: int) -> None:
        op = self._current(split)
        op.shape = ("tcgen05.cp",)
        op.operand_bytes += rows * width

    def wgmma(self, split: Split, index: int, a: object, b: object, n: int, a_k_major: bool, b_k_major: bool) -> None:
        op = self._current(split)
        op.shape = ("wgmma", a is None, n)
        op.flop = 2 * 64 * n * 16
        op.operand_bytes = 32 * n + (0 if a is None else 32 * 64)

    def begin(self, op: AsyncOp) -> None:
        self._ranges = []

    def end(self, op: AsyncOp) -> None:
        self._touched[self._numbers[op]] = tuple(self._ranges)

    def finish(self) -> None:
        """Lanes of one instruction that store the same bytes are one operation of the uniform datapath: keep one."""
        dropped: set[int] = set()
        for warp in self.trace.warps:
            for at, item in enumerate(warp.stream):
                if item[0] == RUN and len(item[3]) > 1:
                    kept = self._distinct(item[3])
                    dropped.update(number for _, number in set(item[3]) - set(kept))
                    warp.stream[at] = (*item[:3], kept)
        for warp in self.trace.warps:
            for at, item in enumerate(warp.stream):
                if item[0] == DRAIN and dropped.intersection(item[1]):
                    warp.stream[at] = (DRAIN, tuple(n for n in item[1] if n not in dropped), *item[2:])
        for number in dropped:
            op = self.trace.ops[number]
            self.trace.ops[number] = Op(op.engine, op.index, op.cta, op.warp)

    def _distinct(self, issues: tuple) -> tuple:
        """Issued operations without stores that repeat the one before."""
        kept, last = [], None
        for index, number in issues:
            store = self.trace.ops[number].engine in BULK_STORES
            key = (index, self._touched.get(number)) if store else None
            if key is None or key != last:
                kept.append((index, number))
            last = key
        return tuple(kept)

    def bulk(self, split: Split, index: int, space: str, address: int, size: int, kind: str) -> None:
        op = self._current(split)
        self._ranges.append((space, address, size))
        if space == "global":
            name = {"read": "global_read", "write": "global_write", "reduce": "global_reduce"}[kind]
            setattr(op, name, getattr(op, name) + size)
            op.pieces += 1
        elif kind == "read":
            op.shared_read += size
        else:
            op.shared_write[self._rank(split, address)] += size

    def _rank(self, split: Split, address: int) -> int:
        return self.cta(split.cta.cluster.ctas[address >> RANK_SHIFT])

    # Memory -------------------------------------------------------------------------------------------------------

    def access(
        self, split: Split, mask: np.ndarray, index: int, space: str, address: np.ndarray, size: int, kind: str
    ) -> None:
        lanes = len(address) if len(address) < 32 else int(mask.sum())
        op = self._current(split)
        if op is not None:
            if space == "global":
                op.global_read += lanes * size
            else:
                op.shared_write[op.cta] += lanes * size
            return
        path = "shared" if space.startswith("shared") else space
        if path == "shared" and int(address[0]) >> RANK_SHIFT != split.cta.rank:
            path = "distributed shared"
        self.trace.traffic[path, kind] += lanes * size
        stats = self.trace.accesses.setdefault(index, [0, 0, 0, 0])
        if stats[0] >= SAMPLES:
            return
        active = address if len(address) < 32 else address[mask]
        stats[0] += 1
        if space == "global":
            cta = self.cta(split.cta)
            sectors = {(cta, sector) for sector in np.unique(active // SECTOR).tolist()}
            stats[2] += len(sectors)
            if kind == "read":
                stats[3] += len(sectors & self._sectors)
                self._sectors |= sectors
        elif path != "local":
            padded = address[: 8 * (len(address) // 8)] if len(address) >= 8 else address
            stats[1] += bank_passes(padded, size)

    def tmem(self, split: Split, index: int, shape: str, lane: int, column: int, count: int, kind: str) -> None:
        registers = {"16x128b": 2, "16x256b": 4}.get(shape, 1) * count
        self.trace.traffic["tensor memory", kind] += 128 * registers


def record(launch: Launch, clusters: int | None = None, **options: object) -> Trace:
    """Run a launch (only its first clusters, if a number is given) and return its trace. Tensors are written.

    Options are those of `Machine`.
    """
    memory = launch.memory()
    program = launch.program(memory)
    x, y, z = launch.cluster
    trace = Trace(launch, program.code, program.module.target, x * y * z)
    tracer = Tracer(trace, program)
    program.bind = tracer.bind
    machine = Machine(program, launch, memory, observer=tracer, **options)
    while clusters is not None and len(machine.pending) > clusters:
        machine.pending.pop()
    machine.run()
    tracer.finish()
    return trace
