"""Branches, exits, barriers, warp-wide operations (PTX ISA 9.7.12, 9.7.13)."""

from __future__ import annotations

import numpy as np

from .machine import ALL_BYTES, FULL, LANES, Cta, NamedBarrier, Split, Waitable, lanes_text
from .memory import SimError
from .parser import Imm, Instr, Pair, PtxError, Sink
from .progress import gather
from .translate import VIEWS, Emit, op


@op("bra")
def bra(emit: Emit, instr: Instr) -> None:
    """A branch ends its block. Uniform outcomes return the target; others split the warp."""
    program = emit.program
    target = program.label(instr.operands[0].name)
    if instr.guard is None:
        emit.line(f"return {target}")
        return
    block = next(b for b in program.blocks if b.last - 1 == instr.index)
    fall = block.targets[-1]
    register, negated = instr.guard
    predicate = emit.src(register, "pred")
    taken, fallen = (fall, target) if negated else (target, fall)
    if emit.full:
        emit.line(f"t = {predicate}.tobytes()")
        emit.line(f"if t == ALL: return {taken}")
        emit.line(f"if t == NONE: return {fallen}")
        emit.line(f"return S.diverge({predicate}, {taken}, {fallen}, {block.rpc})")
    else:
        emit.line(f"b = {predicate} & M")
        emit.line("t = b.tobytes()")
        emit.line(f"if t == NONE: return {fallen}")
        emit.line(f"if t == S.bits: return {taken}")
        emit.line(f"return S.diverge(b, {taken}, {fallen}, {block.rpc})")


def _exit(split: Split, mask: np.ndarray) -> None:
    split.exit_lanes(mask.copy())


@op("ret", "exit")
def leave(emit: Emit, instr: Instr) -> None:
    bound = emit.bind(_exit)
    if instr.guard is None:
        emit.line(f"{bound}(S, M)")
        emit.line("return -2")
        return
    register, negated = instr.guard
    predicate = emit.src(register, "pred")
    emit.line(f"b = {'~' if negated else ''}{predicate} & M")
    following = next(b for b in emit.program.blocks if b.last - 1 == instr.index).targets[0]
    emit.line("if b.any():")
    emit.line(f"    S.pc = {following}")
    emit.line("    whole = b.tobytes() == S.bits")
    emit.line(f"    {bound}(S, b)")
    emit.line("    if whole: return -2")
    emit.line(f"    S.pc = {following}")
    emit.line("    S.machine.ready.append(S)")
    emit.line("    return -2")


@op("trap", "brkpt")
def trap(emit: Emit, instr: Instr) -> None:
    if instr.guard is not None:
        register, negated = instr.guard
        emit.line(f"if ({'~' if negated else ''}{emit.src(register, 'pred')} & M).any(): {emit.bind(_trap)}(S)")
        return
    emit.line(f"{emit.bind(_trap)}(S)")


def _trap(split: Split) -> None:
    raise SimError("trap executed")


@op("nop", "warpsync_hint")
def no_effect(emit: Emit, instr: Instr) -> None:
    """Nothing that changes results."""


def _griddepcontrol(split: Split, mask: np.ndarray, index: int, action: str) -> None:
    """Programmatic launch order does not change results of a single launch; the observer sees it."""
    if split.machine.observer is not None:
        split.machine.observer.griddepcontrol(split, mask, index, action)


@op("griddepcontrol")
def griddepcontrol(emit: Emit, instr: Instr) -> None:
    emit.call(_griddepcontrol, repr(instr.parts[1]))


# Register budgets -----------------------------------------------------------------------------------------------------

REGISTER_FILE = 65536


class Registers(Waitable):
    """The registers of a CTA (PTX ISA 9.7.19.5, setmaxnreg): an increase waits until others have given theirs back.

    What a kernel starts with is the assembler's choice; here it is the most that its launch allows, so that only
    budgets which can never fit are reported.
    """

    def __init__(self, cta: Cta, most: int) -> None:
        super().__init__()
        each = min(REGISTER_FILE // (32 * len(cta.warps)) // 8 * 8, most)
        self.cta = cta
        self.pool = 32 * each * len(cta.warps)
        self.held = [each] * len(cta.warps)
        # Per warp: the budgets that it has set, which the four warps of a warpgroup must share.
        self.history: list[list[int]] = [[] for _ in cta.warps]

    def check(self) -> None:
        """At the end of a CTA: every warp of a warpgroup has executed the same setmaxnreg instructions."""
        for first in range(0, len(self.history), 4):
            group = self.history[first : first + 4]
            if any(history != group[0] for history in group):
                self.cta.machine.finding(
                    f"setmaxnreg by part of a warpgroup: warps {first} to {first + len(group) - 1} set {group}", None
                )

    def used(self) -> int:
        return sum(32 * held for held, warp in zip(self.held, self.cta.warps, strict=True) if warp.live.any())

    def describe(self) -> str:
        held = ", ".join(f"warp {w} {n}" for w, n in enumerate(self.held))
        return f"registers of CTA {self.cta.ctaid}: {self.pool} in all; held per thread: {held}"


def _set_registers(split: Split, mask: np.ndarray, index: int, count: int, increase: bool) -> bool:
    cta, warp = split.cta, split.warp
    if mask.tobytes() != warp.live.tobytes():
        raise SimError(f"setmaxnreg executed by {lanes_text(mask)} only")
    if not 24 <= count <= 256 or count % 8:
        raise SimError(f"setmaxnreg to {count}: a multiple of 8 from 24 to 256")
    if cta.registers is None:
        cta.registers = Registers(cta, split.machine.program.kernel.attributes.get("maxnreg", [256])[0])
    registers = cta.registers
    if increase and registers.used() + 32 * (count - registers.held[warp.index]) > registers.pool:
        return split.park(registers, f"(setmaxnreg to {count})")
    registers.held[warp.index] = count
    registers.history[warp.index].append(count)
    if not increase:
        split.machine.wake(registers)
    return False


@op("setmaxnreg", blocking=True)
def setmaxnreg(emit: Emit, instr: Instr) -> None:
    emit.blocking(_set_registers, str(instr.operands[0].value), str(instr.has("inc")))


def _nanosleep(split: Split, mask: np.ndarray, index: int) -> None:
    return


@op("nanosleep")
def nanosleep(emit: Emit, instr: Instr) -> None:
    emit.call(_nanosleep)


@op("activemask")
def activemask(emit: Emit, instr: Instr) -> None:
    emit.put(instr.operands[0], "u32", f"{emit.bind(bits_of)}(S.mask)")


def bits_of(mask: np.ndarray) -> np.uint32:
    return np.packbits(mask, bitorder="little").view(np.uint32)[0]


NAMED_BARRIERS = 16

# Named barriers -------------------------------------------------------------------------------------------------------


def barrier_sync(
    split: Split,
    mask: np.ndarray,
    index: int,
    number: np.ndarray,
    count: np.ndarray | None,
    aligned: bool,
    wait: bool,
    votes: np.ndarray | None = None,
) -> bool:
    """bar.sync and bar.arrive. Returns True while the split must wait."""
    together = mask.tobytes() == split.warp.live.tobytes()
    if aligned and split.warp.relaxed and split.state is None and not together and mask.tobytes() == split.bits:
        return gather(split, split.warp.rendezvous.setdefault(("aligned", index), Rendezvous()))
    if split.state is not None:
        barrier, generation = split.state
        if barrier.generation == generation:
            return split.park(barrier)
        split.state = None
        if split.machine.observer is not None:
            split.machine.observer.barrier_done(split, mask, index, barrier)
        return False
    if not mask.any():
        return False
    lane = int(mask.argmax())
    if (number[mask] != number[lane]).any() or (count is not None and (count[mask] != count[lane]).any()):
        raise SimError("lanes that run together name different barriers or thread counts: not modelled")
    if int(number[lane]) >= NAMED_BARRIERS:
        raise SimError(f"named barrier {int(number[lane])}: a CTA has barriers 0 to {NAMED_BARRIERS - 1}")
    barrier: NamedBarrier = split.cta.barrier(int(number[lane]))
    if aligned and not together:
        raise SimError(
            f".aligned barrier {barrier.index} executed by {lanes_text(mask)} of {int(split.warp.live.sum())} lanes"
        )
    # A warp counts as 32 threads whatever lanes have exited; diverged lanes count one by one, the first arrival of
    # the warp also for its exited lanes.
    threads = 32 if together else int(mask.sum())
    wanted = 0 if count is None else int(count[lane])
    if wanted % 32 or (count is not None and not wanted):
        raise SimError(f"barrier {barrier.index}: thread count {wanted} is no multiple of the warp size above 0")
    positive = 0 if votes is None else int((votes & mask).sum())
    observer = split.machine.observer
    if observer is not None:
        observer.barrier(split, mask, index, barrier, wait)
    split.machine.progress += 1
    generation = barrier.arrive(split, threads, wanted, positive)
    if wait and barrier.generation == generation:
        split.state = (barrier, generation)
        return split.park(barrier)
    if wait and observer is not None:
        observer.barrier_done(split, mask, index, barrier)
    return False


def _barrier_operands(emit: Emit, operands: list) -> tuple[str, str]:
    number = emit.src(operands[0], "u32")
    count = emit.src(operands[1], "u32") if len(operands) > 1 else "None"
    return number, count


@op("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync", blocking=True)
def bar_sync(emit: Emit, instr: Instr) -> None:
    number, count = _barrier_operands(emit, instr.operands)
    aligned = instr.base == "bar" or instr.has("aligned")
    if not aligned and instr.guard is not None:
        # Lanes whose guard is false go on by themselves.
        number_of = emit.program.block_of[instr.index]
        emit.line(f"if {emit.mask}.any() and {emit.mask}.tobytes() != S.bits:")
        emit.line(f"    return S.diverge({emit.mask}, {number_of}, {number_of + 1}, {number_of + 1})")
    emit.blocking(barrier_sync, number, count, str(aligned), "True")


@op("bar.arrive", "barrier.arrive", "barrier.cta.arrive", "bar.cta.arrive")
def bar_arrive(emit: Emit, instr: Instr) -> None:
    number, count = _barrier_operands(emit, instr.operands)
    aligned = instr.base == "bar" or instr.has("aligned")
    emit.call(barrier_sync, number, count, str(aligned), "False")


@op("bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red", blocking=True)
def bar_red(emit: Emit, instr: Instr) -> None:
    target, number, *rest = instr.operands
    count = "None"
    if len(rest) == 2:
        count = emit.src(rest.pop(0), "u32")
    votes = emit.temp(emit.src(rest[0], "pred"))
    name = emit.src(number, "u32")
    aligned = instr.base == "bar" or instr.has("aligned")
    if not aligned and instr.guard is not None:
        raise PtxError(f"{instr.op} with a guard is not modelled")
    emit.blocking(barrier_sync, name, count, str(aligned), "True", votes)
    result = emit.temp(f"S.cta.barrier(int({name}[{emit.mask}][0])).result")
    if instr.has("popc"):
        emit.put(target, "u32", f"np_u32({result}[0])")
    elif instr.has("and"):
        emit.put(target, "pred", f"{result}[0] == {result}[1]")
    else:
        emit.put(target, "pred", f"{result}[0] > 0")


# Cluster barrier ------------------------------------------------------------------------------------------------------


def cluster_arrive(split: Split, mask: np.ndarray, index: int, relaxed: bool) -> None:
    warp = split.warp
    warp.cluster_lanes = warp.cluster_lanes | mask
    observer = split.machine.observer
    if observer is not None:
        observer.cluster_arrive(split, mask, index, relaxed)
    if (warp.cluster_lanes & warp.live).tobytes() == warp.live.tobytes():
        warp.cluster_lanes = np.zeros(32, bool)
        warp.cluster_arrivals += 1
        split.machine.progress += 1
        split.cta.cluster.barrier.check()


def cluster_wait(split: Split, mask: np.ndarray, index: int) -> bool:
    if not mask.any():
        return False
    barrier = split.cta.cluster.barrier
    warp = split.warp
    if split.state is None:
        # Lanes that diverged wait for the same phase; the warp's count moves on once.
        split.state = warp.cluster_waits + 1
    if barrier.phase < split.state:
        if warp.cluster_arrivals < split.state:
            raise SimError("barrier.cluster.wait without a preceding arrive of this warp")
        return split.park(barrier)
    if mask.tobytes() == warp.live.tobytes() or LANES[mask][-1] == LANES[warp.live][-1]:
        warp.cluster_waits = split.state
    split.state = None
    if split.machine.observer is not None:
        split.machine.observer.cluster_wait(split, mask, index, barrier)
    return False


@op("barrier.cluster.arrive")
def barrier_cluster_arrive(emit: Emit, instr: Instr) -> None:
    emit.call(cluster_arrive, str(instr.has("relaxed")))


@op("barrier.cluster.wait", blocking=True)
def barrier_cluster_wait(emit: Emit, instr: Instr) -> None:
    emit.blocking(cluster_wait)


# Warp-wide operations -------------------------------------------------------------------------------------------------


class Rendezvous:
    """Lanes of a diverged warp that wait for each other at a .sync instruction."""

    def __init__(self) -> None:
        self.waiters: list[Split] = []
        self.arrived = np.zeros(32, bool)

    def describe(self) -> str:
        return f"the other lanes of its .sync member mask; arrived: {lanes_text(self.arrived)}"


_ALL_MEMBERS = np.full(32, 0xFFFFFFFF, np.uint32).tobytes()


def converge(split: Split, mask: np.ndarray, index: int, members: np.ndarray) -> np.ndarray | None:
    """The lanes that take part in a .sync operation together, or None while some have yet to arrive.

    The last split to arrive runs the operation for all of them (registers are shared by the splits of a warp); the
    others find their result ready.
    """
    if mask is FULL and members.tobytes() == _ALL_MEMBERS:
        return mask
    if not mask.any():
        return mask
    chosen = members[mask]
    outside = mask & ((members >> LANES) & np.uint32(1) == 0)
    if outside.any():
        raise SimError(
            f"{lanes_text(outside)} not in the member mask 0x{int(members[int(outside.argmax())]):08x} of the .sync "
            "instruction executed: undefined behaviour"
        )
    if (chosen != chosen[0]).any():
        raise SimError(
            "lanes that run together give different member masks to one .sync instruction: not modelled (branch "
            "before it, so that each group executes it by itself)"
        )
    if mask is FULL:
        return mask
    wanted = _mask_of(int(chosen[0])) & split.warp.live
    if (mask & wanted).tobytes() == wanted.tobytes():
        return mask
    # Lanes that already wait at the meeting point of a branch around this instruction cannot come. PTX leaves that
    # undefined; hardware goes on with the lanes that are there, and shipped kernels rely on it.
    running = np.zeros(32, bool)
    for other in split.warp.splits:
        running |= other.mask
    if not (wanted & running & ~mask).any():
        split.machine.finding("a .sync member mask names lanes that branched around the instruction", index)
        split.state = None
        return mask
    wanted &= running
    key = index
    if split.state == "released":
        split.state = None
        return np.zeros(32, bool)
    meeting = split.warp.rendezvous.get(key)
    if meeting is None:
        meeting = split.warp.rendezvous[key] = Rendezvous()
    meeting.arrived |= mask
    if (meeting.arrived & wanted).tobytes() == wanted.tobytes():
        del split.warp.rendezvous[key]
        for other in meeting.waiters:
            other.state = "released"
        split.machine.wake(meeting)
        return meeting.arrived
    split.park(meeting)
    return None


_MASKS: dict[int, np.ndarray] = {}


def _mask_of(bits: int) -> np.ndarray:
    bits &= 0xFFFFFFFF
    found = _MASKS.get(bits)
    if found is None:
        found = _MASKS[bits] = ((bits >> LANES.astype(np.int64)) & 1).astype(bool)
    return found


def _everyone(members: object) -> bool:
    return isinstance(members, Imm) and members.value & 0xFFFFFFFF == 0xFFFFFFFF


def _sync_lanes(emit: Emit, members: object) -> None:
    """Emit the rendezvous of a .sync operation and narrow the mask of what follows to the lanes it gathered."""
    if emit.full and emit.instr.guard is None and _everyone(members):
        return
    joined = emit.value(converge, emit.src(members, "u32"))
    emit.line(f"if {joined} is None: return -1")
    emit.where = joined


def _shuffle(
    split: Split, mask: np.ndarray, index: int, source: np.ndarray, lane: np.ndarray, clamp: np.ndarray, mode: str
) -> tuple[np.ndarray, np.ndarray]:
    """shfl.sync (PTX ISA 9.7.9.6): `clamp` packs the segment mask and the clamp value."""
    limit = clamp & np.uint32(31)
    segment = (clamp >> np.uint32(8)) & np.uint32(31)
    offset = lane & np.uint32(31)
    highest = (LANES & segment) | (limit & ~segment)
    lowest = LANES & segment
    if mode == "up":
        chosen = LANES.astype(np.int64) - offset
        valid = chosen >= highest
    elif mode == "down":
        chosen = LANES.astype(np.int64) + offset
        valid = chosen <= highest
    elif mode == "bfly":
        chosen = (LANES ^ offset).astype(np.int64)
        valid = chosen <= highest
    else:
        chosen = (lowest | (offset & ~segment)).astype(np.int64)
        valid = chosen <= highest
    chosen = np.where(valid, chosen, LANES)
    if mask is not FULL:
        read = chosen[mask]
        if not mask[read].all():
            split.machine.finding("shfl reads a lane that does not take part", index)
    return source[chosen], valid


def _shuffle_zero(split: Split, mask: np.ndarray, index: int, source: np.ndarray) -> np.ndarray:
    return source[0]


@op("shfl.sync", blocking=True)
def shfl(emit: Emit, instr: Instr) -> None:
    target, source, lane, clamp, members = instr.operands
    mode = instr.parts[2]
    if (
        mode == "idx"
        and emit.full
        and instr.guard is None
        and _everyone(members)
        and isinstance(lane, Imm)
        and isinstance(clamp, Imm)
        and clamp.value == 31
        and not isinstance(target, Pair)
    ):
        # Broadcast of one lane, the form that makes warp-uniform values.
        emit.put(target, "u32", f"{emit.src(source, 'u32')}[{lane.value & 31}]")
        return
    _sync_lanes(emit, members)
    both = emit.value(_shuffle, emit.src(source, "u32"), emit.src(lane, "u32"), emit.src(clamp, "u32"), repr(mode))
    if isinstance(target, Pair):
        emit.put(target.first, "u32", f"{both}[0]")
        emit.put(target.second, "pred", f"{both}[1]")
    else:
        emit.put(target, "u32", f"{both}[0]")


@op("vote.sync", "vote", blocking=True)
def vote(emit: Emit, instr: Instr) -> None:
    target, source = instr.operands[:2]
    if len(instr.operands) > 2:
        _sync_lanes(emit, instr.operands[2])
    predicate = emit.temp(f"{emit.src(source, 'pred')} & {emit.mask}")
    if instr.has("ballot"):
        emit.put(target, "u32", f"{emit.bind(bits_of)}({predicate})")
    elif instr.has("any"):
        emit.put(target, "pred", f"{predicate}.any()")
    elif instr.has("all"):
        emit.put(target, "pred", f"({predicate} == {emit.mask}).all()")
    else:
        emit.put(target, "pred", f"({predicate} == {emit.mask}).all() or not {predicate}.any()")


_REDUX = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _redux(
    split: Split, mask: np.ndarray, index: int, source: np.ndarray, name: str, absolute: bool, nan: bool
) -> np.ndarray:
    values = source[mask]
    if not len(values):
        return np.zeros((), source.dtype)
    if absolute:
        values = np.abs(values)
    function = _REDUX[name]
    if values.dtype.kind == "f" and not nan:
        function = np.fmin if name == "min" else np.fmax
    return function.reduce(values).astype(source.dtype)


@op("redux.sync", blocking=True)
def redux(emit: Emit, instr: Instr) -> None:
    target, source, members = instr.operands
    kind = instr.type
    _sync_lanes(emit, members)
    emit.put(
        target,
        kind,
        emit.value(_redux, emit.src(source, kind), repr(instr.parts[2]), str(instr.has("abs")), str(instr.has("NaN"))),
    )


def _elect(split: Split, mask: np.ndarray, index: int) -> np.ndarray:
    out = np.zeros(32, bool)
    out[int(mask.argmax())] = True
    return out


@op("elect.sync", blocking=True)
def elect(emit: Emit, instr: Instr) -> None:
    """The leader is the lowest member lane; which one it is, PTX leaves open."""
    target, members = instr.operands
    _sync_lanes(emit, members)
    leader = emit.value(_elect)
    pair = target if isinstance(target, Pair) else Pair(Sink(), target)
    emit.put(pair.first, "u32", f"np_u32({leader}.argmax())")
    emit.put(pair.second, "pred", leader)


@op("bar.warp.sync", blocking=True)
def warp_sync(emit: Emit, instr: Instr) -> None:
    _sync_lanes(emit, instr.operands[0])
    emit.call(_warp_sync)


def _warp_sync(split: Split, mask: np.ndarray, index: int) -> None:
    if split.machine.observer is not None:
        split.machine.observer.warp_sync(split, mask, index)


def _match(split: Split, mask: np.ndarray, index: int, source: np.ndarray) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    for lane in np.flatnonzero(mask):
        out[lane] = bits_of((source == source[lane]) & mask)
    return out


@op("match.sync", "match.any.sync", blocking=True)
def match(emit: Emit, instr: Instr) -> None:
    if instr.has("all"):
        raise PtxError("match.all is not modelled")
    target, source, members = instr.operands
    _sync_lanes(emit, members)
    emit.put(target, "u32", emit.value(_match, emit.src(source, instr.type)))


__all__ = ["ALL_BYTES", "VIEWS"]
