"""Timed replay of a trace: a discrete-event simulation of warps and engines on the rates of one chip.

Warps issue their recorded instructions in order, each when its operands are ready and a slot of its quarter SM and its
pipe are free. Waits end when the recorded contributions of their phase have been made, in whatever order the replay
makes them. Engines (tensor core, copy engine, the paths to and from L2) are first-come first-served servers; shared
memory is one port for warps, copies and matrix operands. The time of a run is therefore its longest path under
contention: exposed waits count. All results are predictions.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field

from .costs import Cost, costs_of
from .rates import Chip
from .schedule import order
from .trace import BULK_STORES, DRAIN, PART, RUN, SIGNAL, WAIT, Op, Trace

# A warp gives up its turn after this many issue slots, or when it must wait longer than this.
TURN_SLOTS, TURN_CLOCKS = 8, 6


@dataclass
class Memory:
    """Bytes per clock and SM of the shared paths, for the problem at hand."""

    read: float
    reduce: float
    write: float


@dataclass
class Result:
    """Clocks of a replay. `busy` is per resource; `waits` is per (warp, instruction); `spans` is for pictures."""

    clocks: float = 0.0
    busy: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    # (warp, instruction, when it went on) of every wait.
    marks: list[tuple[str, int, float]] = field(default_factory=list)


class _Quarter:
    """One of four schedulers of an SM with its pipes."""

    __slots__ = ("next", "pipes", "tmem_read", "tmem_write")

    def __init__(self) -> None:
        self.next = 0.0
        self.pipes: dict[str, float] = {}
        self.tmem_read = 0.0
        self.tmem_write = 0.0


class _Sm:
    __slots__ = (
        "copy",
        "engine_read",
        "port",
        "quarters",
        "reduce",
        "remote",
        "tensor",
        "warp_port",
        "warp_read",
        "write",
    )

    def __init__(self) -> None:
        self.quarters = [_Quarter() for _ in range(4)]
        self.port = self.warp_port = self.copy = self.reduce = self.write = self.remote = 0.0
        self.engine_read = self.warp_read = 0.0
        self.tensor = _Tensor()


class _Tensor:
    __slots__ = ("busy", "queue")

    def __init__(self) -> None:
        self.queue: deque = deque()
        self.busy = False


class _Warp:
    __slots__ = (
        "at", "copy", "cta", "name", "pos", "quarter", "ready", "remote", "since", "sm", "stream", "time", "tmem",
    )  # fmt: skip

    def __init__(self, name: str, cta: int, stream: list, sm: _Sm, quarter: _Quarter, registers: int) -> None:
        self.name, self.cta, self.stream, self.sm, self.quarter = name, cta, stream, sm, quarter
        self.pos = 0
        self.at = 0
        self.ready = [0.0] * registers
        self.time = 0.0
        self.tmem = 0.0
        self.copy = 0.0
        # When the warp's stores to another CTA are there: it does not signal before.
        self.remote = 0.0
        self.since = -1.0


class Replay:
    """Replays the clusters of `trace` on SMs of their own; `copies` puts that many of each on the same SMs."""

    def __init__(self, trace: Trace, chip: Chip, memory: Memory, copies: int = 1, spans: bool = False) -> None:
        self.trace = trace
        self.chip = chip
        self.memory = memory
        self.keep_spans = spans
        self.costs, registers = costs_of(trace.code, chip)
        self.schedules: dict[tuple, list[Cost]] = {}
        self.result = Result()
        self.events: list[tuple] = []
        self.sequence = 0
        self.done: dict[tuple, float] = {}
        self.left: Counter = Counter()
        self.latest: dict[tuple, float] = {}
        self.sleepers: dict[tuple, list[_Warp]] = {}
        self.op_done: dict[tuple, float] = {}
        self.op_read: dict[tuple, float] = {}
        self.parts: Counter = Counter()
        self.last_copy: dict[tuple, float] = {}
        ctas = 1 + max((w.cta for w in trace.warps), default=0)
        sms = [_Sm() for _ in range(ctas)]
        self.sms = sms
        self._number_matrix()
        self.warps: list[tuple[int, _Warp]] = []
        for copy in range(copies):
            for w in trace.warps:
                sm = sms[w.cta]
                quarter = sm.quarters[w.index % 4]
                warp = _Warp(w.name, w.cta, w.stream, sm, quarter, registers)
                self.warps.append((copy, warp))
                self._at(0.0, self._turn, copy, warp)

    def _number_matrix(self) -> None:
        """Operation number of each wgmma by (CTA, warpgroup, number in it)."""
        self.matrix: dict[tuple, int] = {}
        counts: Counter = Counter()
        for number, op in enumerate(self.trace.ops):
            if op.engine == "wgmma":
                group = (op.cta, op.warp // 4)
                self.matrix[(*group, counts[group])] = number
                counts[group] += 1

    def run(self) -> Result:
        while self.events:
            time, _, action, *arguments = heapq.heappop(self.events)
            action(time, *arguments)
        stuck = [w.name for _, w in self.warps if w.pos < len(w.stream)]
        if stuck:
            raise RuntimeError(f"the replay does not end: {', '.join(stuck[:8])} wait for phases that never complete")
        return self.result

    def _at(self, time: float, action: object, *arguments: object) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, action, *arguments))

    def _span(self, lane: str, label: str, start: float, end: float) -> None:
        if self.keep_spans and end > start:
            self.result.spans.append((lane, label, start, end))

    def _finish(self, time: float) -> None:
        self.result.clocks = max(self.result.clocks, time)

    # Warps --------------------------------------------------------------------------------------------------------

    def _turn(self, now: float, copy: int, warp: _Warp) -> None:
        """Issue from one warp until its turn ends, it must wait, or its stream ends."""
        start = time = max(now, warp.quarter.next)
        issued = 0.0
        stream = warp.stream
        while warp.pos < len(stream):
            item = stream[warp.pos]
            kind = item[0]
            if kind == RUN:
                time, issued, resume = self._code(copy, warp, item, time, issued)
                if resume is not None:
                    self._yield(copy, warp, start, time, issued, resume)
                    return
                warp.at = 0
                warp.pos += 1
            elif kind == WAIT:
                key = (copy, *item[1])
                # Nothing need happen for a phase that nothing contributes to: that before a barrier's first one.
                end = self.done.get(key) if item[1] in self.trace.expected else 0.0
                latency = self.chip["wake"] if item[1][0] == "mbarrier" else self.chip["barrier"]
                if end is None:
                    self._sleep(key, copy, warp, start, time, issued)
                    return
                warp.pos += 1
                time = self._waited(warp, item[2], time, end + latency)
            elif kind == DRAIN:
                table = self.op_read if item[2] else self.op_done
                missing = next(((copy, n) for n in item[1] if (copy, n) not in table), None)
                if missing is not None:
                    self._sleep(("op", item[2], *missing), copy, warp, start, time, issued)
                    return
                warp.pos += 1
                time = self._waited(warp, item[3], time, max(table[copy, n] for n in item[1]))
            else:
                warp.pos += 1
                if kind == SIGNAL:
                    self._signal(copy, item[1], max(time, warp.remote))
                elif kind == PART:
                    self._part(copy, item[1], time)
            if time > start + issued + TURN_CLOCKS and warp.pos < len(stream):
                self._yield(copy, warp, start, time, issued, time)
                return
        self._yield(copy, warp, start, time, issued, None)
        self._finish(time)

    def _code(
        self, copy: int, warp: _Warp, item: tuple, time: float, issued: float
    ) -> tuple[float, float, float | None]:
        """Issue a code range from where the warp stands: (time, slots issued in this turn, when to go on or None)."""
        run = self.schedules.get(item[1:3])
        if run is None:
            run = self.schedules[item[1:3]] = order(self.costs[item[1] : item[2]])
        pipes, ready = warp.quarter.pipes, warp.ready
        for place in range(warp.at, len(run)):
            cost = run[place]
            need = time
            for register in cost.sources:
                if ready[register] > need:
                    need = ready[register]
            if cost.pipe:
                need = max(need, pipes.get(cost.pipe, 0.0))
            elif cost.action:
                need = max(need, self._hold(cost, warp, need))
            if need > time + TURN_CLOCKS or issued >= TURN_SLOTS:
                warp.at = place
                return time, issued, need
            time = need
            if cost.pipe:
                pipes[cost.pipe] = time + cost.occupancy
                self.result.busy[cost.pipe] += cost.occupancy
            result = self._memory(cost, warp, time) if cost.action else time + cost.latency
            if cost.issues:
                for number in (n for i, n in item[3] if i == cost.index):
                    self._at(time, self._issue, copy, number)
            for register in cost.targets:
                ready[register] = result
            time += cost.slots
            issued += cost.slots
        return time, issued, None

    def _yield(self, copy: int, warp: _Warp, start: float, time: float, issued: float, resume: float | None) -> None:
        quarter = warp.quarter
        quarter.next = max(quarter.next, start) + issued
        self.result.busy["issue"] += issued
        if issued:
            self._span(warp.name, "", start, time)
        if resume is not None:
            self._at(resume, self._turn, copy, warp)

    def _sleep(self, key: tuple, copy: int, warp: _Warp, start: float, time: float, issued: float) -> None:
        warp.since = time
        self._yield(copy, warp, start, time, issued, None)
        self.sleepers.setdefault(key, []).append(warp)

    def _wake(self, key: tuple, copy: int, time: float) -> None:
        for warp in self.sleepers.pop(key, ()):
            self._at(max(time, warp.since), self._turn, copy, warp)

    def _waited(self, warp: _Warp, index: int, time: float, end: float) -> float:
        since = warp.since if warp.since >= 0 else time
        warp.since = -1.0
        end = max(end, time)
        if self.keep_spans:
            self.result.marks.append((warp.name, index, end))
        if end > since:
            self.result.waits[warp.name, index] += end - since
            self._span(warp.name, "wait", since, end)
        return end

    def _signal(self, copy: int, key: tuple, time: float) -> None:
        full = (copy, *key)
        if full not in self.left:
            self.left[full] = self.trace.expected[key]
        self.left[full] -= 1
        self.latest[full] = max(self.latest.get(full, 0.0), time)
        if self.left[full] == 0:
            self.done[full] = self.latest[full]
            self._wake(full, copy, self.latest[full])

    # What instructions do beside issuing --------------------------------------------------------------------------

    def _hold(self, cost: Cost, warp: _Warp, time: float) -> float:
        """When an instruction can issue, as far as its memory path decides."""
        sm, action, turn = warp.sm, cost.action, self.chip["port_turn"]
        if action == "reduce":
            return sm.reduce - self.chip["reduce_queue"]
        if action == "shared":
            return sm.warp_port - turn
        if action == "remote store":
            return sm.remote - self.chip["reduce_queue"]
        if action == "tmem wait":
            return warp.tmem
        if action == "tmem ld":
            return warp.quarter.tmem_read - turn
        if action == "tmem st":
            return warp.quarter.tmem_write - turn
        return time

    def _port(self, sm: _Sm, time: float, clocks: float) -> float:
        """Book the shared-memory port for a copy or matrix operands; returns when they are through."""
        sm.port = max(sm.port, time) + clocks
        self.result.busy["shared memory"] += clocks
        return sm.port

    def _arrive(self, now: float, sm: _Sm, size: float) -> None:
        """Copied bytes reach shared memory."""
        self._port(sm, now, size / self.chip["shared"])

    def _memory(self, cost: Cost, warp: _Warp, time: float) -> float:
        """Effects of a memory instruction issued now; returns when its result is there."""
        sm, chip, action, busy = warp.sm, self.chip, cost.action, self.result.busy
        turn = chip["port_turn"]
        if action == "shared":
            waves = self.trace.wavefronts(cost.index)
            sm.warp_port = max(sm.warp_port, time) + waves
            end = max(sm.warp_port, min(self._port(sm, time, waves), time + turn))
            return end + chip.latency["shared"]
        if action == "remote store":
            waves = self.trace.wavefronts(cost.index)
            sm.remote = max(sm.remote, time) + waves * chip["shared"] / chip["remote_bytes"]
            for other in self.sms:
                if other is not sm:
                    self._at(sm.remote, self._arrive, other, waves * chip["shared"] / (len(self.sms) - 1))
            warp.remote = sm.remote + chip["remote"]
            return sm.remote
        if action in ("load", "store", "reduce"):
            size = 32 * self.trace.sectors(cost.index)
            if action == "load":
                hits = self.trace.hits(cost.index)
                end = self._read(sm, time, size * (1 - hits), False)
                return end + chip["l1_latency"] * hits + chip["l2_latency"] * (1 - hits)
            if action == "store":
                return self._path(sm, "write", time, size)
            end = self._path(sm, "reduce", time, size)
            self._span(f"CTA {warp.cta} additions", "", end - size / self.memory.reduce, end)
            return end
        if action == "tmem ld":
            clocks = 128 * cost.size / chip["tmem_read"]
            warp.quarter.tmem_read = max(warp.quarter.tmem_read, time) + clocks
            busy["tensor memory"] += clocks
            warp.tmem = max(warp.tmem, warp.quarter.tmem_read + chip["tmem_latency"])
            return warp.quarter.tmem_read + chip["tmem_latency"]
        if action == "tmem st":
            clocks = 128 * cost.size / chip["tmem_write"]
            warp.quarter.tmem_write = max(warp.quarter.tmem_write, time) + clocks
            busy["tensor memory"] += clocks
            warp.tmem = max(warp.tmem, warp.quarter.tmem_write + chip["tmem_latency"])
        if action == "proxy fence":
            return time + chip["proxy_fence"]
        return time

    def _read(self, sm: _Sm, time: float, size: float, engine: bool) -> float:
        """Book bytes from L2 for the copy engine or for warps; while both have some on the way, they take turns."""
        clocks = size / self.memory.read
        self.result.busy["L2 read"] += clocks
        mine, other = (sm.engine_read, sm.warp_read) if engine else (sm.warp_read, sm.engine_read)
        start = max(mine, time)
        shared = min(max(other - start, 0.0), clocks)
        end = start + clocks + shared
        if engine:
            sm.engine_read, sm.warp_read = end, max(sm.warp_read, min(sm.warp_read, end) + shared)
        else:
            sm.warp_read, sm.engine_read = end, max(sm.engine_read, min(sm.engine_read, end) + shared)
        return end

    def _path(self, sm: _Sm, path: str, time: float, size: float) -> float:
        """Book bytes on the way between an SM and L2; returns when they are through."""
        clocks = size / getattr(self.memory, path)
        end = max(getattr(sm, path), time) + clocks
        setattr(sm, path, end)
        self.result.busy[f"L2 {path}"] += clocks
        return end

    # Engines ------------------------------------------------------------------------------------------------------

    def _part(self, copy: int, key: tuple, time: float) -> None:
        """One warp has issued its part of a wgmma; the fourth one starts it."""
        self.parts[copy, key] += 1
        if self.parts[copy, key] == 4:
            self._at(time, self._issue, copy, self.matrix[key])

    def _issue(self, now: float, copy: int, number: int) -> None:
        op = self.trace.ops[number]
        if op.engine in ("tcgen05", "wgmma"):
            tensor = self.sms[op.ctas[0]].tensor
            tensor.queue.append((copy, number))
            if not tensor.busy:
                self._matrix_next(now, tensor)
            return
        end, read = self._copy(now, copy, op)
        self.op_read[copy, number] = read
        self._wake(("op", True, copy, number), copy, read)
        self._complete(end, copy, number)

    def _complete(self, time: float, copy: int, number: int) -> None:
        self.op_done[copy, number] = time
        self._finish(time)
        for key in self.trace.ops[number].signals:
            self._signal(copy, key, time)
        self._wake(("op", False, copy, number), copy, time)

    def _matrix_next(self, now: float, tensor: _Tensor) -> None:
        """Start the head of a tensor core's queue."""
        while tensor.queue:
            copy, number = tensor.queue.popleft()
            op = self.trace.ops[number]
            if not op.shape:
                self._at(now + self.chip["commit"], self._complete, copy, number)
                continue
            clocks = op.flop / self._matrix_rate(op)
            operands = op.operand_bytes / self.chip["shared"]
            end = now + clocks
            for cta in op.ctas:
                end = max(end, self._port(self.sms[cta], now, operands))
            self.result.busy["tensor core"] += clocks
            self._span(f"CTA {op.cta} tensor core", "", now, end)
            tensor.busy = True
            self._at(end + self.chip["matrix_latency"], self._complete, copy, number)
            self._at(end, self._matrix_end, tensor)
            return

    def _matrix_end(self, now: float, tensor: _Tensor) -> None:
        tensor.busy = False
        self._matrix_next(now, tensor)

    def _matrix_rate(self, op: Op) -> float:
        full = self.chip["matrix"]
        if op.shape[0] == "tcgen05":
            _, pair, ws, m, _ = op.shape
            if ws:
                return full * self.chip["matrix_ws"]
            if m == 64 and not pair:
                return full * self.chip["matrix_half_rows"]
        return full

    def _copy(self, now: float, copy: int, op: Op) -> tuple[float, float]:
        """Book a copy; returns when it completes and when its source has been read."""
        sm, chip = self.sms[op.cta], self.chip
        lane = f"CTA {op.cta}"
        if op.engine == "cp.async":
            end = self._read(sm, now, op.global_read, False)
            self._at(end, self._arrive, sm, sum(op.shared_write.values()))
            key = (copy, op.cta, op.warp)
            done = max(end + (chip["l2_latency"] if op.global_read else 0), self.last_copy.get(key, 0.0))
            self.last_copy[key] = done
            self._span(f"{lane} gather", "", end - op.global_read / self.memory.read, end)
            return done, done
        if op.engine == "st.async":
            size = sum(op.shared_write.values())
            sm.remote = max(sm.remote, now) + size / chip["remote_bytes"]
            self.result.busy["distributed shared memory"] += size / chip["remote_bytes"]
            return sm.remote + chip["remote"], sm.remote
        requests = chip["tma_instruction"] + op.pieces * chip["tma_request"]
        start = max(sm.copy, now)
        sm.copy = start + requests
        self.result.busy["copy engine"] += requests
        if op.engine in BULK_STORES:
            read = max(self._port(sm, now, op.shared_read / chip["shared"]), sm.copy)
            end = max(self._path(sm, "write", read, op.global_write), self._path(sm, "reduce", read, op.global_reduce))
            size = op.global_write / self.memory.write + op.global_reduce / self.memory.reduce
            self._span(f"{lane} stores", "", end - size, end)
            return end + chip["l2_latency"], read
        end = self._read(sm, start, op.global_read, True)
        self._span(f"{lane} gather", "", end - op.global_read / self.memory.read, end)
        latency = chip["tma_latency"]
        if not op.global_read and op.shared_read:
            sm.remote = max(sm.remote, start) + op.shared_read / chip["remote_bytes"]
            end, latency = sm.remote, chip["remote"]
        for cta, size in op.shared_write.items():
            self._at(end, self._arrive, self.sms[cta], size)
        return max(end, sm.copy) + latency, end


def replay(trace: Trace, chip: Chip, memory: Memory, copies: int = 1, spans: bool = False) -> Result:
    """Predicted clocks of the trace's clusters, each on SMs of its own."""
    return Replay(trace, chip, memory, copies, spans).run()
