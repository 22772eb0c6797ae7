"""mbarrier objects and their instructions (PTX ISA 9.7.13.15).

State lives beside shared memory, by shared address: the phase, the arrivals still pending and the transaction count.
A phase ends when both counts are zero; the pending count then starts again at the expected one.
"""

from __future__ import annotations

import numpy as np

from .access import must_live, shared_of
from .machine import FULL, AsyncOp, Split, Waitable
from .memory import SimError
from .ops_memory import address_of, space_of
from .parser import Addr, Imm, Instr, Reg, Sink
from .translate import Emit, op

MAX_COUNT = (1 << 20) - 1


class Mbarrier(Waitable):
    __slots__ = ("address", "cluster", "expected", "log", "pending", "phase", "tx")

    def __init__(self, cluster: object, address: int, count: int) -> None:
        super().__init__()
        self.cluster = cluster
        self.address = address
        self.expected = count
        self.pending = count
        self.tx = 0
        self.phase = 0

    def describe(self) -> str:
        return (
            f"mbarrier at {self.cluster.shared.describe(self.address)}: phase {self.phase}, {self.pending} of "
            f"{self.expected} arrivals and {self.tx} bytes pending"
        )

    def settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.cluster.machine.wake(self)

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise SimError(f"{count} arrivals at an mbarrier that expects {self.pending} more: {self.describe()}")
        self.pending -= count
        self.cluster.machine.progress += 1
        self.settle()

    def _check_tx(self) -> None:
        if abs(self.tx) > MAX_COUNT:
            raise SimError(f"the transaction count exceeds {MAX_COUNT} bytes: {self.describe()}")

    def expect(self, size: int) -> None:
        self.tx += size
        self._check_tx()

    def complete(self, size: int) -> None:
        self.tx -= size
        self._check_tx()
        self.cluster.machine.progress += 1
        self.settle()


def find(split: Split, address: int) -> Mbarrier:
    cluster = split.cta.cluster
    found = cluster.mbarriers.get(address)
    must_live(split, address)
    if found is None:
        raise SimError(f"no mbarrier was initialised at {cluster.shared.describe(address)}")
    return found


def _each(split: Split, mask: np.ndarray, address: np.ndarray) -> list[tuple[int, int, int]]:
    """(address, first lane, lanes) of the distinct barriers among active lanes."""
    address = shared_of(address, mask, "mbarrier")
    if mask is FULL:
        lane, count = 0, 32
    else:
        lanes = np.flatnonzero(mask)
        if not len(lanes):
            return []
        lane, count = int(lanes[0]), len(lanes)
        if count == 1:
            return [(int(address[lane]), lane, 1)]
    active = address[mask]
    first = int(active[0])
    if (active == first).all():
        return [(first, lane, count)]
    out = []
    for value in np.unique(active).tolist():
        same = np.flatnonzero((address == value) & mask)
        out.append((value, int(same[0]), len(same)))
    return out


def _lanes_at(mask: np.ndarray, address: np.ndarray, where: int) -> np.ndarray:
    """The active lanes that name the barrier at `where`, by its shared or generic address."""
    return mask & ((address & address.dtype.type(0xFFFFFFFF)) == where)


def _init(split: Split, mask: np.ndarray, index: int, address: np.ndarray, count: np.ndarray) -> None:
    cluster = split.cta.cluster
    for where, lane, _ in _each(split, mask, address):
        cluster.shared.check(where, 8, "mbarrier.init")
        if where % 8:
            raise SimError(f"mbarrier at {cluster.shared.describe(where)} is not 8-byte aligned")
        value = int(count[lane])
        others = count[mask & (address == address[lane])]
        if (others != value).any():
            raise SimError(f"mbarrier.init of one mbarrier with different counts: {sorted(set(others.tolist()))}")
        if not 1 <= value <= MAX_COUNT:
            raise SimError(f"mbarrier.init with count {value}")
        old = cluster.mbarriers.get(where)
        if old is not None and old.waiters:
            raise SimError(f"mbarrier.init while threads wait on it: {old.describe()}")
        if old is not None:
            split.machine.finding(
                f"mbarrier.init over a live mbarrier without mbarrier.inval: by {split.warp.name}; {old.describe()}",
                index,
            )
        cluster.shared.add_barrier(where, Mbarrier(cluster, where, value))
        cluster.shared.bytes_at(where, 8)[:] = 0
        cluster.shared.marks[1][where : where + 8] = 0xFF
        if split.machine.observer is not None:
            lanes = _lanes_at(mask, address, where)
            split.machine.observer.mbarrier_init(split, lanes, index, cluster.mbarriers[where])


def _invalidate(split: Split, mask: np.ndarray, index: int, address: np.ndarray) -> None:
    for where, _, _ in _each(split, mask, address):
        find(split, where)
        del split.cta.cluster.mbarriers[where]


def arrive(
    split: Split,
    mask: np.ndarray,
    index: int,
    address: np.ndarray,
    count: np.ndarray | None,
    tx: np.ndarray | None,
    drop: bool = False,
    complete: bool = True,
) -> np.ndarray:
    """Returns the state token of each lane: the number of the phase arrived at; `complete` False is .noComplete."""
    token = np.zeros(32, np.uint64)
    for where, lane, lanes in _each(split, mask, address):
        barrier = find(split, where)
        token[:] = barrier.phase
        observer = split.machine.observer
        if observer is not None:
            observer.mbarrier_arrive(split, _lanes_at(mask, address, where), index, barrier)
        if tx is not None:
            size = _total(address, mask, tx, lane, lanes)
            if observer is not None:
                observer.mbarrier_expect(split, _lanes_at(mask, address, where), index, barrier, size)
            barrier.expect(size)
        arrivals = lanes if count is None else _total(address, mask, count, lane, lanes)
        if count is not None and not count[mask].all():
            raise SimError(f"mbarrier arrival with a count of 0: {barrier.describe()}")
        if drop:
            barrier.expected -= arrivals
        if not complete and arrivals == barrier.pending:
            raise SimError(f"a .noComplete arrival that completes the phase: {barrier.describe()}")
        barrier.arrive(arrivals)
    return token


def _total(address: np.ndarray, mask: np.ndarray, values: np.ndarray, lane: int, lanes: int) -> int:
    """The sum of a per-lane operand over the active lanes that name the barrier of `lane`."""
    return int(values[lane]) if lanes == 1 else int(values[mask & (address == address[lane])].sum(dtype=np.uint64))


def _expect(split: Split, mask: np.ndarray, index: int, address: np.ndarray, tx: np.ndarray) -> None:
    for where, lane, lanes in _each(split, mask, address):
        barrier, size = find(split, where), _total(address, mask, tx, lane, lanes)
        if split.machine.observer is not None:
            split.machine.observer.mbarrier_expect(split, _lanes_at(mask, address, where), index, barrier, size)
        barrier.expect(size)


def _complete(split: Split, mask: np.ndarray, index: int, address: np.ndarray, tx: np.ndarray) -> None:
    for where, lane, lanes in _each(split, mask, address):
        find(split, where).complete(_total(address, mask, tx, lane, lanes))


def try_wait(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, phase: np.ndarray, parity: bool
) -> np.ndarray | None:
    """The predicate of try_wait and test_wait, or None when the split was parked.

    A try_wait may suspend the thread and may also return false. Here it suspends until the phase ends; only when
    nothing else can run does it return false, which lets programs that merely peek go on.
    """
    result = np.zeros(32, bool)
    state = split.state
    for where, lane, lanes in _each(split, mask, address):
        barrier = find(split, where)
        want = int(phase[lane])
        if state is not None and state != "timed out" and state[0] is barrier:
            done = barrier.phase > state[1]
        elif parity:
            done = (barrier.phase & 1) != (want & 1)
        else:
            done = barrier.phase > want
        if not done and state != "timed out":
            split.state = (barrier, barrier.phase)
            split.timeout = True
            split.park(barrier, f"(parity {want & 1})" if parity else "")
            return None
        if done:
            result |= True if lanes == int(mask.sum()) else (address == where)
            if split.machine.observer is not None:
                split.machine.observer.mbarrier_wait(split, _lanes_at(mask, address, where), index, barrier)
    split.state = None
    split.timeout = False
    return result


@op("mbarrier.init")
def mbarrier_init(emit: Emit, instr: Instr) -> None:
    emit.call(_init, barrier_address(emit, instr.operands[0], instr), emit.src(instr.operands[1], "u32"))


def barrier_address(emit: Emit, operand: Addr, instr: Instr) -> str:
    """Barriers are named by shared addresses; without a state space the address is generic."""
    space = space_of(instr)
    if isinstance(operand.base, Reg) and emit.width(operand.base) == 32:
        return emit.address(operand, "u32")
    return address_of(emit, operand, space if space.startswith("shared") else "generic")


@op("mbarrier.inval")
def mbarrier_inval(emit: Emit, instr: Instr) -> None:
    emit.call(_invalidate, barrier_address(emit, instr.operands[0], instr))


@op("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(emit: Emit, instr: Instr) -> None:
    operands = list(instr.operands)
    target = Sink() if isinstance(operands[0], Addr) else operands.pop(0)
    address = barrier_address(emit, operands.pop(0), instr)
    count, tx = "None", "None"
    if instr.has("expect_tx"):
        tx = emit.src(operands[0], "u32")
    elif operands:
        count = emit.src(operands[0], "u32")
    drop = str(instr.parts[1] == "arrive_drop")
    token = emit.value(arrive, address, count, tx, drop, str(not instr.has("noComplete")))
    emit.put(target, "u64", token)


@op("mbarrier.expect_tx")
def mbarrier_expect(emit: Emit, instr: Instr) -> None:
    emit.call(_expect, barrier_address(emit, instr.operands[0], instr), emit.src(instr.operands[1], "u32"))


@op("mbarrier.complete_tx")
def mbarrier_complete(emit: Emit, instr: Instr) -> None:
    emit.call(_complete, barrier_address(emit, instr.operands[0], instr), emit.src(instr.operands[1], "u32"))


@op("mbarrier.try_wait", "mbarrier.test_wait", blocking=True)
def mbarrier_wait(emit: Emit, instr: Instr) -> None:
    target, address, phase = instr.operands[:3]
    parity = instr.has("parity")
    where = barrier_address(emit, address, instr)
    result = emit.value(try_wait, where, emit.src(phase, "u32" if parity else "u64"), str(parity))
    emit.line(f"if {result} is None: return -1")
    emit.put(target, "pred", result)


def _pending(split: Split, mask: np.ndarray, index: int, token: np.ndarray) -> np.ndarray:
    raise SimError("mbarrier.pending_count of an opaque token is not modelled")


@op("mbarrier.pending_count")
def mbarrier_pending(emit: Emit, instr: Instr) -> None:
    emit.put(instr.operands[0], "u32", emit.value(_pending, emit.src(instr.operands[1], "u64")))


def _async_arrive(split: Split, mask: np.ndarray, index: int, address: np.ndarray, noinc: bool) -> None:
    """cp.async.mbarrier.arrive: an arrival per lane once its earlier cp.async are done (PTX ISA 9.7.9.25.2)."""
    pairs = _each(split, mask, address)
    for where, _, lanes in pairs:
        barrier = find(split, where)
        if not noinc:
            barrier.pending += lanes

    def run() -> None:
        for where, _, lanes in pairs:
            barrier = find(split, where)
            if split.machine.observer is not None:
                split.machine.observer.mbarrier_arrive(split, _lanes_at(mask, address, where), index, barrier)
            barrier.arrive(lanes)

    split.machine.submit(AsyncOp("cp.async", run, split, index, mask))


@op("cp.async.mbarrier.arrive")
def cp_async_arrive(emit: Emit, instr: Instr) -> None:
    emit.call(_async_arrive, barrier_address(emit, instr.operands[0], instr), str(instr.has("noinc")))


def _mapa(split: Split, mask: np.ndarray, index: int, address: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """A rank outside the cluster is no error by itself: shipped kernels map every lane and use two."""
    from .memory import OFFSET_MASK, RANK_SHIFT

    keep = address & address.dtype.type(
        ~(0xFFFFFFFF & ~OFFSET_MASK) & (0xFFFFFFFF if address.itemsize == 4 else 0xFFFFFFFFFFFFFFFF)
    )
    return keep | (rank.astype(address.dtype) << address.dtype.type(RANK_SHIFT))


@op("mapa")
def mapa(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    target, address, rank = instr.operands
    emit.put(target, kind, emit.value(_mapa, emit.src(address, kind), emit.src(rank, "u32")))


@op("getctarank")
def getctarank(emit: Emit, instr: Instr) -> None:
    from .memory import RANK_SHIFT

    kind = instr.type
    target, address = instr.operands
    emit.put(target, "u32", f"(({emit.src(address, kind)} >> np_{kind}({RANK_SHIFT})) & np_{kind}(255)).astype(np_u32)")


__all__ = ["Imm", "Mbarrier", "arrive", "find"]
