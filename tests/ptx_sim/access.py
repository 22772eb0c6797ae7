"""Loads, stores and atomics of one warp on any state space, with range, alignment and poison checks.

Every access of the generic proxy passes through `load`, `store` or `atomic`, so that an observer sees all of them.
"""

from __future__ import annotations

import numpy as np

from .machine import FULL, LANES, Split, lanes_text
from .memory import LOCAL_WINDOW, OFFSET_MASK, POISON_HALF, RANK_SHIFT, SHARED_WINDOW, SimError
from .ops_int import flush

SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
# The mark of a written element of each size.
WRITTEN = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: 0xFFFFFFFFFFFFFFFF, 16: 0xFFFFFFFF}
_SHARED64, _LOCAL64 = np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW)


def _active(mask: np.ndarray, address: np.ndarray) -> np.ndarray | None:
    """Addresses with inactive lanes pointed at an active one; None when no lane is active."""
    if mask is FULL:
        return address
    lane = int(mask.argmax())
    if not mask[lane]:
        return None
    return np.where(mask, address, address[lane])


def shared_index(
    split: Split, address: np.ndarray, size: int, what: str, cluster: bool, store_at: int | None = None
) -> np.ndarray:
    """Element index of shared addresses in the view of `size`-byte elements; a store gives its instruction index."""
    shared = split.cta.cluster.shared
    low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
    rank = low >> RANK_SHIFT
    if rank == high >> RANK_SHIFT:
        if (high & OFFSET_MASK) + size > shared.size or rank >= shared.ranks:
            raise SimError(f"{what} of {size} bytes out of range: {shared.describe(high)}")
        if rank != split.cta.rank:
            if not cluster:
                raise SimError(f"{what} through shared::cta of another CTA's memory: {shared.describe(high)}")
            must_live(split, high, store_at)
    else:
        for item in address.tolist():
            shared.check(item, size, what)
            must_live(split, item, store_at)
            if not cluster and item >> RANK_SHIFT != split.cta.rank:
                raise SimError(f"{what} through shared::cta of another CTA's memory: {shared.describe(item)}")
    if int(np.bitwise_or.reduce(address)) & (size - 1):
        bad = next(a for a in address.tolist() if a & (size - 1))
        raise SimError(f"{what} of {size} bytes misaligned: {shared.describe(bad)}")
    if store_at is not None:
        first, end = shared.barrier_span
        across = rank != high >> RANK_SHIFT
        if first < end and (across or (low & OFFSET_MASK < end and high & OFFSET_MASK >= first - 15)):
            hit = shared.barriers.keys() & {(a + i) & ~7 for a in address.tolist() for i in range(0, size, 8)}
            for at in hit:
                _over_barrier(split, store_at, at)
    return address >> address.dtype.type(SHIFTS[size])


def must_live(split: Split, address: int, index: int | None = None) -> None:
    """Shared memory of a CTA that has ended is out of reach; work still under way when a whole cluster ends is not."""
    cluster = split.cta.cluster
    rank = address >> RANK_SHIFT
    if rank in cluster.shared.exited and rank != split.cta.rank and cluster.live:
        split.machine.finding(
            f"access to shared memory of a CTA that has exited: {cluster.shared.describe(address)} by "
            f"{split.warp.name}; a cluster barrier before the exit is missing",
            index,
        )


def must_align(split: Split, mask: np.ndarray, index: int, address: np.ndarray, size: int, space: str) -> None:
    """Accesses that are done in pieces: the whole is aligned to its size all the same."""
    bad = mask & (address & address.dtype.type(size - 1) != 0)
    if bad.any():
        where = int(address[int(bad.argmax())])
        space = space if space != "generic" else "global"
        raise SimError(f"{space} access of {size} bytes misaligned: {describe(split, space, where)}, {lanes_text(bad)}")


def _over_barrier(split: Split, index: int, address: int) -> None:
    barrier = split.cta.cluster.shared.barriers[address]
    split.machine.finding(f"write over a live mbarrier: by {split.warp.name}; {barrier.describe()}", index)


def wrote(split: Split, index: int, address: int, size: int) -> None:
    """Bookkeeping of a contiguous write to shared memory: its marks, and whether it hit a live mbarrier."""
    shared = split.cta.cluster.shared
    shared.marks[1][address : address + size] = 0xFF
    first, end = shared.barrier_span
    offset = address & OFFSET_MASK
    if offset < end and offset + size > first:
        for at in shared.barriers:
            if address < at + 8 and at < address + size:
                _over_barrier(split, index, at)


def must_be_written(split: Split, index: int, address: int, size: int, what: str) -> None:
    """Report a contiguous read of shared memory that nobody wrote."""
    shared = split.cta.cluster.shared
    marks = shared.marks[1][address : address + size]
    if not marks.all():
        missing = np.flatnonzero(marks == 0)
        split.machine.finding(
            f"{what} of uninitialised shared memory: {len(missing)} of {size} bytes, first at "
            f"{shared.describe(address + int(missing[0]))} by {split.warp.name}",
            index,
        )


def global_index(split: Split, address: np.ndarray, size: int, what: str) -> tuple[dict, np.ndarray]:
    """(views of the allocation, element index) of global addresses that lie in one allocation."""
    memory = split.machine.memory
    low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
    if int(np.bitwise_or.reduce(address)) & (size - 1):
        bad = next(a for a in address.tolist() if a & (size - 1))
        raise SimError(f"global {what} of {size} bytes misaligned: {memory.describe(bad)}")
    item = memory.find(low, high + size)
    if item is None:
        return {}, address
    return item.views, (address - np.uint64(item.floor)) >> np.uint64(SHIFTS[size])


def _global_each(split: Split, address: np.ndarray, size: int, what: str) -> list[np.ndarray]:
    """Per-lane byte views for accesses that touch several allocations."""
    memory = split.machine.memory
    views = []
    for item in address.tolist():
        found = memory.find(item, item + size)
        if found is None:
            raise SimError(f"global {what} of {size} bytes out of range: {memory.describe(item)}")
        start = item - found.floor
        views.append(found.views[1][start : start + size])
    return views


def _raw(rows: np.ndarray, size: int) -> np.ndarray:
    return rows.view(np.uint32).reshape(32, 4) if size == 16 else rows.view(f"u{size}").reshape(32)


def describe(split: Split, space: str, address: int) -> str:
    """Where an address of a state space lies, for messages."""
    if space == "global":
        return split.machine.memory.describe(address)
    if space == "local":
        return f"byte {address} of local memory"
    return split.cta.cluster.shared.describe(address)


def spaces_of(address: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Masks of the lanes whose generic addresses lie in one state space; inactive lanes repeat an active address."""
    window = address >> np.uint64(60)
    if int(np.bitwise_or.reduce(window ^ window[0])) == 0:
        return [mask]
    return [mask & (window == value) for value in np.unique(window)]


def shared_of(address: np.ndarray, mask: np.ndarray, what: str) -> np.ndarray:
    """Shared addresses from generic (64-bit) or shared (32-bit) ones; active lanes elsewhere are an error."""
    if address.dtype != np.uint64:
        return address
    outside = mask & (address >> np.uint64(60) != np.uint64(1))
    if outside.any():
        bad = int(address[int(outside.argmax())])
        raise SimError(f"{what}: the generic address of {lanes_text(outside)} is not in shared memory (0x{bad:x})")
    return (address - _SHARED64).astype(np.uint32)


def resolve(address: np.ndarray, mask: np.ndarray) -> tuple[str, np.ndarray]:
    """The state space of a generic address (PTX ISA 5.1.4, generic addressing) and the address within it."""
    first = int(address[int(mask.argmax())])
    if first < SHARED_WINDOW:
        return "global", address
    if first < LOCAL_WINDOW:
        return "shared", (address - _SHARED64).astype(np.uint32)
    return "local", address - _LOCAL64


def load(split: Split, mask: np.ndarray, index: int, address: np.ndarray, size: int, space: str) -> np.ndarray:
    """`size` bytes per lane: an array of 32 unsigned values, or [32, 4] words for 16 bytes."""
    address = _active(mask, address)
    if address is None:
        return np.zeros((32, 4), np.uint32) if size == 16 else np.zeros(32, f"u{size}")
    cluster = space != "shared::cta"
    if space == "generic":
        groups = spaces_of(address, mask)
        if len(groups) > 1:
            out = np.zeros((32, 4), np.uint32) if size == 16 else np.zeros(32, f"u{size}")
            for lanes in groups:
                out[lanes] = load(split, lanes, index, address, size, space)[lanes]
            return out
        space, address = resolve(address, mask)
    observer = split.machine.observer
    if observer is not None:
        observer.access(split, mask, index, space, address, size, "read")
    if space == "global":
        views, at = global_index(split, address, size, "load")
        if not views:
            return _raw(np.stack(_global_each(split, address, size, "load")).reshape(-1).copy(), size)
        return views[size][at]
    if space == "local":
        cells, marks, at = _local(split, address, size, "load")
        _report_unwritten(split, mask, index, "local", address, marks[at], size)
        return cells[at]
    at = shared_index(split, address, size, "shared load", cluster)
    shared = split.cta.cluster.shared
    out = shared.views[size][at]
    if size == 1 or shared.odd or (out.view(np.uint16) == POISON_HALF).any():
        _report_unwritten(split, mask, index, "shared", address, shared.marks[size][at], size)
    return out


def _report_unwritten(
    split: Split, mask: np.ndarray, index: int, space: str, address: np.ndarray, marks: np.ndarray, size: int
) -> None:
    lanes = (marks != WRITTEN[size]).reshape(32, -1).any(1) & mask
    if lanes.any():
        text = describe(split, space, int(address[int(lanes.argmax())]))
        split.machine.finding(
            f"load of uninitialised {space} memory: {size} bytes at {text} by {split.warp.name}, {lanes_text(lanes)}",
            index,
        )


def _local(split: Split, address: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cells, marks, element index) of local addresses, which every lane has for itself."""
    local = split.warp.local
    low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
    if local is None or low < 0 or high + size > local.shape[1]:
        held = 0 if local is None else local.shape[1]
        raise SimError(f"local {what} of {size} bytes out of range: byte {high} of {held} that a lane has")
    if int(np.bitwise_or.reduce(address)) & (size - 1):
        raise SimError(f"local {what} of {size} bytes misaligned")
    flat = (address.astype(np.int64) + LANES.astype(np.int64) * local.shape[1]) >> SHIFTS[size]
    both = (view.reshape(-1) for view in (local, split.warp.local_marks))
    cells, marks = (v.view(np.uint32).reshape(-1, 4) if size == 16 else v.view(f"u{size}") for v in both)
    return cells, marks, flat


def store(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, size: int, space: str, data: np.ndarray
) -> None:
    """Write `data` ([32] values or [32, 4] words) of active lanes; of equal addresses the highest lane wins."""
    address = _active(mask, address)
    if address is None:
        return
    cluster = space != "shared::cta"
    if space == "generic":
        groups = spaces_of(address, mask)
        if len(groups) > 1:
            for lanes in groups:
                store(split, lanes, index, address, size, space, data)
            return
        space, address = resolve(address, mask)
    observer = split.machine.observer
    if observer is not None:
        observer.access(split, mask, index, space, address, size, "write")
    if space == "global":
        views, at = global_index(split, address, size, "store")
        if not views:
            rows = np.ascontiguousarray(data).reshape(32, -1).view(np.uint8)
            for lane, view in enumerate(_global_each(split, address, size, "store")):
                if mask[lane]:
                    view[:] = rows[lane]
            return
        target = views[size]
        marks = None
    elif space == "local":
        target, marks, at = _local(split, address, size, "store")
    else:
        shared = split.cta.cluster.shared
        at = shared_index(split, address, size, "shared store", cluster, index)
        target, marks = shared.views[size], shared.marks[size]
        shared.odd |= size == 1
    if mask is not FULL:
        at, data = at[mask], data[mask]
    target[at] = data
    if marks is not None:
        marks[at] = WRITTEN[size]


def add_flushed(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    """fp32 adds in global memory: subnormal operands and results are zero of their sign (PTX ISA, atom, red)."""
    return flush(flush(old) + flush(value))


ATOMICS = {
    "add": lambda old, value: old + value,
    "add.flushed": add_flushed,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: old * 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


def _cells(split: Split, mask: np.ndarray, index: int, address: np.ndarray, size: int, space: str) -> list:
    """A one-element byte view per active lane (None for the others)."""
    safe = _active(mask, address)
    if safe is None:
        return [None] * 32
    if space == "generic":
        groups = spaces_of(safe, mask)
        if len(groups) > 1:
            parts = [_cells(split, lanes, index, address, size, space) for lanes in groups]
            return [next((cell for cell in cells if cell is not None), None) for cells in zip(*parts, strict=True)]
        space, safe = resolve(safe, mask)
    if int(np.bitwise_or.reduce(safe)) & (size - 1):
        bad = next(a for a in safe.tolist() if a & (size - 1))
        raise SimError(f"{space.split(':')[0]} atomic of {size} bytes misaligned: {describe(split, space, bad)}")
    observer = split.machine.observer
    if observer is not None:
        observer.access(split, mask, index, space, safe, size, "atomic")
    if space == "global":
        cells = _global_each(split, safe, size, "atomic")
    elif space == "local":
        raise SimError("atomic on local memory: atomics reach global and shared memory only")
    else:
        shared = split.cta.cluster.shared
        cells = [shared.bytes_at(item, size) for item in safe.tolist()]
        for item in set(safe.tolist()):
            must_live(split, item, index)
        for item in set(safe.tolist()):
            must_be_written(split, index, item, size, "atomic")
            wrote(split, index, item, size)
    return [cell if on else None for cell, on in zip(cells, mask.tolist(), strict=True)]


def _distinct(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, size: int, space: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """(view, element index) of active lanes when they all reach different elements of one global allocation."""
    if space == "generic" and not int(np.bitwise_or.reduce(address[mask])) >> 60:
        space = "global"
    at = address if mask is FULL else address[mask]
    if space != "global" or len(set(at.tolist())) < len(at) or not len(at):
        return None
    views, cells = global_index(split, at, size, "atomic")
    if not views:
        return None
    observer = split.machine.observer
    if observer is not None:
        observer.access(split, mask, index, space, _active(mask, address), size, "atomic")
    return views[size], cells


# Atomics whose lanes may be done at once where they do not meet; the results are those of one lane after the other.
AT_ONCE = {"add": np.add, "add.flushed": add_flushed, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def atomic(
    split: Split,
    mask: np.ndarray,
    index: int,
    address: np.ndarray,
    dtype: str,
    space: str,
    name: str,
    *sources: np.ndarray,
) -> np.ndarray:
    """atom/red on scalars, one lane after the other; returns the old values."""
    kind = np.dtype(dtype)
    old = np.zeros(32, kind)
    found = _distinct(split, mask, index, address, kind.itemsize, space) if name in AT_ONCE else None
    if found is not None:
        view, at = found[0].view(kind), found[1]
        old[mask] = view[at]
        fresh = AT_ONCE[name](old[mask], sources[0][mask])
        view[at] = fresh
        split.machine.progress += int((fresh != old[mask]).sum())
        return old
    for lane, cell in enumerate(_cells(split, mask, index, address, kind.itemsize, space)):
        if cell is None:
            continue
        view = cell.view(kind)
        current = view[0].copy()
        old[lane] = current
        if name == "cas":
            if current == sources[0][lane]:
                view[0] = sources[1][lane]
        else:
            view[0] = ATOMICS[name](current, sources[0][lane])
        if view[0] != current:
            # A spin on an unchanged lock is no progress.
            split.machine.progress += 1
    return old


def reduce_vector(
    split: Split,
    mask: np.ndarray,
    index: int,
    address: np.ndarray,
    dtype: str,
    space: str,
    name: str,
    *sources: np.ndarray,
) -> np.ndarray:
    """red.vN and atom.vN: element-wise reduction of N consecutive values per lane; returns old values [32, N]."""
    kind = np.dtype(dtype)
    size = kind.itemsize * len(sources)
    old = np.zeros((32, len(sources)), kind)
    found = _distinct(split, mask, index, address, size, space) if name in AT_ONCE else None
    if found is not None:
        view, at = found[0].view(kind).reshape(-1, len(sources)), found[1]
        old[mask] = view[at]
        view[at] = AT_ONCE[name](old[mask], np.stack(sources, 1)[mask])
        return old
    for lane, cell in enumerate(_cells(split, mask, index, address, size, space)):
        if cell is None:
            continue
        view = cell.view(kind)
        old[lane] = view
        values = np.array([s[lane] for s in sources], kind)
        view[:] = (AT_ONCE | {"min": np.minimum, "max": np.maximum})[name](view, values)
    return old


def reduce_half(
    split: Split,
    mask: np.ndarray,
    index: int,
    address: np.ndarray,
    kind: str,
    space: str,
    name: str,
    *sources: np.ndarray,
) -> np.ndarray:
    """Atomics on f16/bf16, scalar or packed: fp32 arithmetic, one rounding per element. Returns old values."""
    from .ops_float import float_to_half, half_to_float

    width = sources[0].dtype.itemsize
    old = np.zeros(32, sources[0].dtype)
    for lane, cell in enumerate(_cells(split, mask, index, address, width * len(sources), space)):
        if cell is None:
            continue
        view = cell.view(f"u{width}")
        old[lane] = view[0]
        for i, source in enumerate(sources):
            a = half_to_float(view[i : i + 1].copy(), kind)
            b = half_to_float(source[lane : lane + 1].copy(), kind)
            both = {"add": np.add, "min": np.fmin, "max": np.fmax}[name](a, b)
            view[i : i + 1] = float_to_half(both, kind).view(f"u{width}")
    return old
