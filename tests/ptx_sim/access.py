"""Loads, stores and atomics of one warp on any state space, with range, alignment and poison checks.

Every access of the generic proxy passes through `load`, `store` or `atomic`, so that an observer sees all of them.
"""

from __future__ import annotations

import numpy as np

from .machine import FULL, LANES, Split
from .memory import LOCAL_WINDOW, OFFSET_MASK, POISON, RANK_SHIFT, SHARED_WINDOW, SimError

SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_SHARED64, _LOCAL64 = np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW)


def _active(mask: np.ndarray, address: np.ndarray) -> np.ndarray | None:
    """Addresses with inactive lanes pointed at an active one; None when no lane is active."""
    if mask is FULL:
        return address
    lane = int(mask.argmax())
    if not mask[lane]:
        return None
    return np.where(mask, address, address[lane])


def shared_index(split: Split, address: np.ndarray, size: int, what: str, cluster: bool) -> np.ndarray:
    """Element index of shared addresses in the view of `size`-byte elements."""
    shared = split.cta.cluster.shared
    low, high = int(address.min()), int(address.max())
    rank = low >> RANK_SHIFT
    if rank == high >> RANK_SHIFT:
        if (high & OFFSET_MASK) + size > shared.size or rank >= shared.ranks:
            raise SimError(f"{what} of {size} bytes out of range: {shared.describe(high)}")
        if rank != split.cta.rank and not cluster:
            raise SimError(f"{what} through shared::cta of another CTA's memory: {shared.describe(high)}")
    else:
        for item in address.tolist():
            shared.check(item, size, what)
    if int(np.bitwise_or.reduce(address)) & (size - 1):
        bad = next(a for a in address.tolist() if a & (size - 1))
        raise SimError(f"{what} of {size} bytes misaligned: {shared.describe(bad)}")
    return address >> address.dtype.type(SHIFTS[size])


def global_index(split: Split, address: np.ndarray, size: int, what: str) -> tuple[dict, np.ndarray]:
    """(views of the allocation, element index) of global addresses that lie in one allocation."""
    memory = split.machine.memory
    low, high = int(address.min()), int(address.max())
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
        return _local(split, address, size, "load")[0][_local(split, address, size, "load")[1]]
    at = shared_index(split, address, size, "shared load", cluster)
    out = split.cta.cluster.shared.views[size][at]
    if size >= 4:
        stale = (out if size != 8 else out.view(np.uint32)) == POISON
        if stale.any():
            _report_poison(split, mask, index, address, stale, size)
    return out


def _report_poison(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, stale: np.ndarray, size: int
) -> None:
    lanes = stale.reshape(32, -1).any(1) & mask
    if lanes.any():
        bad = int(address[int(lanes.argmax())])
        text = split.cta.cluster.shared.describe(bad)
        split.machine.finding(
            f"load of uninitialised shared memory: {size} bytes at {text} by {split.warp.name}", index
        )


def _local(split: Split, address: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    local = split.warp.local
    low, high = int(address.min()), int(address.max())
    if local is None or low < 0 or high + size > local.shape[1]:
        raise SimError(f"local {what} of {size} bytes out of range at {high}")
    flat = (address.astype(np.int64) + LANES.astype(np.int64) * local.shape[1]) >> SHIFTS[size]
    view = local.reshape(-1)
    return (view.view(np.uint32).reshape(-1, 4) if size == 16 else view.view(f"u{size}")), flat


def store(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, size: int, space: str, data: np.ndarray
) -> None:
    """Write `data` ([32] values or [32, 4] words) of active lanes; of equal addresses the highest lane wins."""
    address = _active(mask, address)
    if address is None:
        return
    cluster = space != "shared::cta"
    if space == "generic":
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
    elif space == "local":
        target, at = _local(split, address, size, "store")
    else:
        at = shared_index(split, address, size, "shared store", cluster)
        target = split.cta.cluster.shared.views[size]
    if mask is FULL:
        target[at] = data
    else:
        target[at[mask]] = data[mask]


ATOMICS = {
    "add": lambda old, value: old + value,
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
        space, safe = resolve(safe, mask)
    if int(np.bitwise_or.reduce(safe)) & (size - 1):
        bad = next(a for a in safe.tolist() if a & (size - 1))
        raise SimError(f"{space.split(':')[0]} atomic of {size} bytes misaligned: {describe(split, space, bad)}")
    observer = split.machine.observer
    if observer is not None:
        observer.access(split, mask, index, space, safe, size, "atomic")
    if space == "global":
        cells = _global_each(split, safe, size, "atomic")
    else:
        shared = split.cta.cluster.shared
        cells = [shared.bytes_at(item, size) for item in safe.tolist()]
    return [cell if on else None for cell, on in zip(cells, mask.tolist(), strict=True)]


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
    for lane, cell in enumerate(_cells(split, mask, index, address, size, space)):
        if cell is None:
            continue
        view = cell.view(kind)
        old[lane] = view
        values = np.array([s[lane] for s in sources], kind)
        if name == "add":
            view += values
        else:
            view[:] = {"min": np.minimum, "max": np.maximum}[name](view, values)
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
