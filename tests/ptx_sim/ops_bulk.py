"""Bulk and tensor copies (PTX ISA 9.7.9.25.4 and 9.7.9.27), their groups, st.async and cluster launch control."""

from __future__ import annotations

import numpy as np

from . import tensormap
from .access import add_flushed, describe, must_be_written, must_live, shared_of, wrote
from .machine import AsyncOp, Split
from .memory import OFFSET_MASK, RANK_SHIFT, SimError
from .ops_float import float_to_half, half_to_float
from .ops_mbarrier import barrier_address, find
from .ops_memory import address_of, vector_length
from .parser import SIZES, Addr, Instr, PtxError, Reg, Vec
from .translate import VIEWS, Emit, op

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, most: np.where(old >= most, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - old.dtype.type(1)),
}


def lanes_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def _shared(address: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return shared_of(address, mask, "shared operand")


def reduce_into(target: np.ndarray, data: np.ndarray, name: str, kind: str) -> None:
    """target = target op data, both byte arrays of elements of `kind`; fp32 adds flush (PTX ISA, cp.reduce)."""
    if kind == "tf32" or (kind in ("f16", "bf16", "f32", "f64") and name not in ("add", "min", "max")):
        raise SimError(f"there is no {name} reduction of {kind} elements")
    if kind in ("f16", "bf16"):
        a, b = (half_to_float(x.view(np.uint16).copy(), kind) for x in (target, data))
        both = {"add": np.add, "min": np.fmin, "max": np.fmax}[name](a, b)
        target.view(np.uint16)[:] = float_to_half(both, kind).view(np.uint16)
        return
    view = VIEWS[kind if kind in VIEWS else f"u{kind[1:]}"]
    dtype = {"u": "u", "s": "i", "f": "f"}[view[0]] + str(int(view[1:]) // 8)
    cells = target.view(dtype)
    cells[:] = (add_flushed if (name, kind) == ("add", "f32") else REDUCTIONS[name])(cells, data.view(dtype))


def observe(split: Split, index: int, space: str, address: int, size: int, kind: str) -> None:
    """A copy engine touches a contiguous range: keep the marks of shared memory and tell the observer."""
    if space == "shared":
        must_live(split, address, index)
    if space == "shared" and kind != "read":
        split.cta.cluster.shared.check(address, size, kind)
        wrote(split, index, address, size)
    if split.machine.observer is not None:
        split.machine.observer.bulk(split, index, space, address, size, kind)


def complete(split: Split, index: int, address: int, size: int) -> None:
    """Complete bytes on the barrier at a shared address."""
    barrier = find(split, address)
    if split.machine.observer is not None:
        split.machine.observer.mbarrier_complete(split, index, barrier, size)
    barrier.complete(size)


# Plain bulk copies ----------------------------------------------------------------------------------------------------


def _check_bulk(split: Split, size: int, *ends: tuple[str, int]) -> None:
    """Sizes and both addresses, given as (space, address), are multiples of 16 bytes."""
    if size % 16:
        raise SimError(f"bulk copy of {size} bytes: sizes are multiples of 16")
    for space, address in ends:
        if address % 16:
            raise SimError(f"bulk copy of {size} bytes misaligned, to 16 bytes: {describe(split, space, address)}")


def bulk_load(
    split: Split,
    mask: np.ndarray,
    index: int,
    target: np.ndarray,
    source: np.ndarray,
    size: np.ndarray,
    barrier: np.ndarray,
    cta_mask: np.ndarray | None,
    from_shared: bool,
) -> None:
    """Global or own shared memory to shared memory, completing bytes on an mbarrier."""
    target, barrier = _shared(target, mask), _shared(barrier, mask)
    source = _shared(source, mask) if from_shared else source
    cluster = split.cta.cluster
    for lane in lanes_of(mask):
        count, where, origin, bar = int(size[lane]), int(target[lane]), int(source[lane]), int(barrier[lane])
        _check_bulk(split, count, ("shared", where), ("shared" if from_shared else "global", origin))
        ranks = None if cta_mask is None else [r for r in range(16) if int(cta_mask[lane]) >> r & 1]
        if ranks is None and where >> RANK_SHIFT != bar >> RANK_SHIFT:
            raise SimError("bulk copy to one CTA that signals an mbarrier of another")

        def run(
            count: int = count, where: int = where, origin: int = origin, bar: int = bar, ranks: list | None = ranks
        ) -> None:
            memory = cluster.shared if from_shared else split.machine.memory
            observe(split, index, "shared" if from_shared else "global", origin, count, "read")
            data = memory.bytes_at(origin, count).copy()
            if from_shared:
                must_be_written(split, index, origin, count, "bulk copy")
            spots = (
                [(where, bar)]
                if ranks is None
                else [
                    ((r << RANK_SHIFT) | (where & OFFSET_MASK), (r << RANK_SHIFT) | (bar & OFFSET_MASK)) for r in ranks
                ]
            )
            for spot, signal in spots:
                observe(split, index, "shared", spot, count, "write")
                cluster.shared.bytes_at(spot, count)[:] = data
                complete(split, index, signal, count)

        split.machine.submit(AsyncOp("bulk", run, split, index, mask))


def bulk_store(
    split: Split,
    mask: np.ndarray,
    index: int,
    target: np.ndarray,
    source: np.ndarray,
    size: np.ndarray,
    reduction: str | None,
    kind: str,
) -> None:
    """Shared to global memory, optionally reducing."""
    source = _shared(source, mask)
    for lane in lanes_of(mask):
        count, where, origin = int(size[lane]), int(target[lane]), int(source[lane])
        _check_bulk(split, count, ("global", where), ("shared", origin))

        def run(count: int = count, where: int = where, origin: int = origin) -> None:
            observe(split, index, "shared", origin, count, "read")
            data = split.cta.cluster.shared.bytes_at(origin, count).copy()
            must_be_written(split, index, origin, count, "bulk store")
            out = split.machine.memory.bytes_at(where, count)
            observe(split, index, "global", where, count, "reduce" if reduction else "write")
            if reduction:
                reduce_into(out, data, reduction, kind)
            else:
                out[:] = data

        split.machine.submit(AsyncOp("bulk store", run, split, index, mask))


def bulk_reduce_shared(
    split: Split,
    mask: np.ndarray,
    index: int,
    target: np.ndarray,
    source: np.ndarray,
    size: np.ndarray,
    barrier: np.ndarray,
    reduction: str,
    kind: str,
) -> None:
    """cp.reduce.async.bulk to another CTA's shared memory."""
    target, source, barrier = (_shared(x, mask) for x in (target, source, barrier))
    shared = split.cta.cluster.shared
    for lane in lanes_of(mask):
        count, where, origin, bar = int(size[lane]), int(target[lane]), int(source[lane]), int(barrier[lane])
        _check_bulk(split, count, ("shared", where), ("shared", origin))

        def run(count: int = count, where: int = where, origin: int = origin, bar: int = bar) -> None:
            observe(split, index, "shared", origin, count, "read")
            data = shared.bytes_at(origin, count).copy()
            must_be_written(split, index, origin, count, "bulk reduction")
            must_be_written(split, index, where, count, "bulk reduction")
            observe(split, index, "shared", where, count, "reduce")
            reduce_into(shared.bytes_at(where, count), data, reduction, kind)
            complete(split, index, bar, count)

        split.machine.submit(AsyncOp("bulk", run, split, index, mask))


@op("cp.async.bulk", "cp.reduce.async.bulk")
def cp_bulk(emit: Emit, instr: Instr) -> None:
    spaces = [p for p in instr.parts if p in ("global", "shared::cta", "shared::cluster")]
    reduction = next((p for p in instr.parts if p in REDUCTIONS), None)
    kind = instr.type if reduction else "b8"
    target_space, source_space = spaces[0], spaces[1]
    target, source, size, *rest = instr.operands
    to = address_of(emit, target, target_space)
    origin = address_of(emit, source, source_space)
    count = emit.src(size, "u32")
    if target_space == "global":
        emit.call(bulk_store, to, origin, count, repr(reduction), repr(kind))
        return
    barrier = barrier_address(emit, rest[0], instr)
    if reduction:
        emit.call(bulk_reduce_shared, to, origin, count, barrier, repr(reduction), repr(kind))
        return
    cta_mask = emit.src(rest[1], "u16") if instr.has("multicast::cluster") else "None"
    emit.call(bulk_load, to, origin, count, barrier, cta_mask, str(source_space != "global"))


# Groups ---------------------------------------------------------------------------------------------------------------


def _group(split: Split, mask: np.ndarray, index: int, action: str, count: int, read: bool) -> None:
    if split.machine.policy is not None:
        split.machine.policy.group(split, "bulk", action, count)
    if split.machine.observer is not None:
        split.machine.observer.bulk_group(split, mask, index, action, count, read)


@op("cp.async.bulk.commit_group")
def bulk_commit(emit: Emit, instr: Instr) -> None:
    emit.call(_group, repr("commit"), "0", "False")


@op("cp.async.bulk.wait_group")
def bulk_wait(emit: Emit, instr: Instr) -> None:
    emit.call(_group, repr("wait"), str(instr.operands[0].value), str(instr.has("read")))


# Tensor copies --------------------------------------------------------------------------------------------------------


def read_map(split: Split, index: int, address: int) -> tensormap.TensorMap:
    """Decode the descriptor at a generic address."""
    if address % 64:
        raise SimError(f"tensor map misaligned, to 64 bytes: {split.machine.memory.describe(address)}")
    if split.machine.observer is not None:
        split.machine.observer.tensor_map(split, index, address)
    data = split.machine.memory.bytes_at(address, 128).tobytes()
    cache = split.machine.program.__dict__.setdefault("map_cache", {})
    found = cache.get(data[:64])
    if found is None:
        found = cache[data[:64]] = tensormap.decode(data)
    return found


def _signed(value: np.ndarray, lane: int) -> int:
    return int(value.view(np.int32)[lane])


def rows_of(tmap: tensormap.TensorMap, mode: str, coordinate: tuple) -> tensormap.Rows:
    if mode == "tile":
        if len(coordinate) != tmap.rank:
            raise SimError(f"{len(coordinate)} coordinates for a tensor map of rank {tmap.rank}")
        return tensormap.tile_rows(tmap, coordinate)
    return tensormap.gather_rows(tmap, coordinate[0], coordinate[1:])


def _check_tile(split: Split, tmap: tensormap.TensorMap, where: int) -> None:
    # Swizzled boxes repeat every 8 rows of the span; PTX asks for 128-byte alignment of the shared address.
    if where % 128:
        raise SimError(f"tensor copy misaligned, to 128 bytes: {split.cta.cluster.shared.describe(where)}")
    if tmap.swizzle and tmap.box[0] * tmap.element_bytes > tmap.swizzle:
        raise SimError(f"box rows of {tmap.box[0] * tmap.element_bytes} bytes exceed the {tmap.swizzle}-byte swizzle")


def _form(action: str, mode: str, tmap: tensormap.TensorMap, multicast: bool) -> str:
    return (
        f"tensor {action} {mode} {tmap.element} rank {tmap.rank} row {tmap.box[0] * tmap.element_bytes} B swizzle "
        f"{tmap.swizzle}{' multicast' if multicast else ''}"
    )


def tensor_load(
    split: Split,
    mask: np.ndarray,
    index: int,
    target: np.ndarray,
    descriptor: np.ndarray,
    barrier: np.ndarray,
    cta_mask: np.ndarray | None,
    mode: str,
    pair: bool,
    *coordinates: np.ndarray,
) -> None:
    """TMA load: one box (or four gathered rows) into shared memory of one or several CTAs."""
    target, barrier = _shared(target, mask), _shared(barrier, mask)
    cluster = split.cta.cluster
    for lane in lanes_of(mask):
        tmap = read_map(split, index, int(descriptor[lane]))
        coordinate = tuple(_signed(c, lane) for c in coordinates)
        where, bar = int(target[lane]), int(barrier[lane])
        _check_tile(split, tmap, where)
        split.machine.report.forms.add(_form("load", mode, tmap, cta_mask is not None))
        spots = [(where, bar)]
        if cta_mask is not None:
            spots = []
            for rank in range(16):
                if int(cta_mask[lane]) >> rank & 1:
                    # With .cta_group::2 the signal goes to the CTA of the destination's pair that has the parity of
                    # the barrier operand's CTA; otherwise to the destination CTA itself.
                    signal = (rank & ~1) | (bar >> RANK_SHIFT & 1) if pair else rank
                    spots.append(
                        ((rank << RANK_SHIFT) | (where & OFFSET_MASK), (signal << RANK_SHIFT) | (bar & OFFSET_MASK))
                    )
        elif not pair and where >> RANK_SHIFT != bar >> RANK_SHIFT:
            raise SimError("tensor load signals a barrier of another CTA without .cta_group::2")

        def run(tmap: tensormap.TensorMap = tmap, coordinate: tuple = coordinate, spots: list = spots) -> None:
            rows = rows_of(tmap, mode, coordinate)
            if split.machine.observer is not None:
                for offset, size in rows.existing(tmap.element_bytes):
                    observe(split, index, "global", tmap.address + offset, size, "read")
            data = tensormap.load_tile(tmap, split.machine.memory, rows)
            for spot, signal in spots:
                cluster.shared.check(spot, data.size, "tensor load")
                observe(split, index, "shared", spot, data.size, "write")
                scatter_chunks(cluster.shared, tmap, spot, data)
                complete(split, index, signal, data.size)

        split.machine.submit(AsyncOp("tensor load", run, split, index, mask))


def scatter_chunks(shared: object, tmap: tensormap.TensorMap, base: int, data: np.ndarray) -> None:
    starts = tensormap.shared_offsets(tmap, len(data), base)
    width = data.shape[1] // starts.shape[1]
    if width == 16:
        shared.views[16][starts >> 4] = data.view(np.uint32).reshape(*starts.shape, 4)
    else:
        shared.views[1][base : base + data.size] = data.reshape(-1)


def _report_unwritten_box(
    split: Split, index: int, tmap: tensormap.TensorMap, origin: int, rows: tensormap.Rows
) -> None:
    """What of a box that is stored was never written; rows and columns outside the tensor do not count."""
    shared = split.cta.cluster.shared
    marks = gather_chunks(shared.marks, tmap, origin, len(rows.offsets))[rows.valid]
    first, end = (n * tmap.element_bytes for n in (rows.first, rows.first + rows.count))
    missing = int((marks[:, first:end] == 0).sum())
    if missing:
        split.machine.finding(
            f"tensor store of uninitialised shared memory: {missing} bytes of the box at {shared.describe(origin)} by "
            f"{split.warp.name}",
            index,
        )


def gather_chunks(views: dict, tmap: tensormap.TensorMap, base: int, rows: int) -> np.ndarray:
    """The rows of a box in shared memory (or their marks), without the swizzle."""
    width = tmap.box[0] * tmap.element_bytes
    starts = tensormap.shared_offsets(tmap, rows, base)
    if width % 16 == 0:
        return views[16][starts >> 4].reshape(rows, -1).view(np.uint8)
    return views[1][base : base + rows * width].reshape(rows, width).copy()


def tensor_store(
    split: Split,
    mask: np.ndarray,
    index: int,
    descriptor: np.ndarray,
    source: np.ndarray,
    mode: str,
    reduction: str | None,
    *coordinates: np.ndarray,
) -> None:
    """TMA store or reduction: rows and elements outside the tensor are dropped."""
    source = _shared(source, mask)
    shared = split.cta.cluster.shared
    for lane in lanes_of(mask):
        tmap = read_map(split, index, int(descriptor[lane]))
        coordinate = tuple(_signed(c, lane) for c in coordinates)
        origin = int(source[lane])
        _check_tile(split, tmap, origin)
        split.machine.report.forms.add(_form(f"reduce {reduction}" if reduction else "store", mode, tmap, False))

        def run(tmap: tensormap.TensorMap = tmap, coordinate: tuple = coordinate, origin: int = origin) -> None:
            rows = rows_of(tmap, mode, coordinate)
            count, first = len(rows.offsets), rows.first * tmap.element_bytes
            size = count * tmap.box[0] * tmap.element_bytes
            shared.check(origin, size, "tensor store")
            observe(split, index, "shared", origin, size, "read")
            data = gather_chunks(shared.views, tmap, origin, count)[rows.valid]
            if not shared.marks[1][origin : origin + size].all():
                _report_unwritten_box(split, index, tmap, origin, rows)
            if (
                split.machine.observer is None
                and not reduction
                and tensormap.store_rows(tmap, split.machine.memory, rows, data)
            ):
                return
            for (offset, length), row in zip(rows.existing(tmap.element_bytes), data, strict=False):
                piece = row[first : first + length]
                observe(split, index, "global", tmap.address + offset, length, "reduce" if reduction else "write")
                out = split.machine.memory.bytes_at(tmap.address + offset, length)
                if reduction:
                    reduce_into(out, np.ascontiguousarray(piece), reduction, tmap.element)
                else:
                    out[:] = piece

        split.machine.submit(AsyncOp("tensor store", run, split, index, mask))


@op("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def cp_tensor(emit: Emit, instr: Instr) -> None:
    mode = next((p for p in instr.parts if p in ("tile", "tile::gather4", "tile::scatter4")), "tile")
    if any(p.startswith("im2col") for p in instr.parts):
        raise PtxError("im2col tensor copies are not modelled")
    spaces = [p for p in instr.parts if p in ("global", "shared::cta", "shared::cluster")]
    if spaces[0] == "global":
        tmap, source = instr.operands[:2]
        coordinates = [emit.src(c, "u32") for c in tmap.coords]
        reduction = next((p for p in instr.parts if p in REDUCTIONS), None)
        emit.call(
            tensor_store,
            emit.address(Addr(tmap.base, tmap.offset), "u64"),
            address_of(emit, source, "shared::cta"),
            repr(mode),
            repr(reduction),
            *coordinates,
        )
        return
    target, tmap, barrier, *rest = instr.operands
    coordinates = [emit.src(c, "u32") for c in tmap.coords]
    cta_mask = emit.src(rest[0], "u16") if instr.has("multicast::cluster") else "None"
    emit.call(
        tensor_load,
        address_of(emit, target, spaces[0]),
        emit.address(Addr(tmap.base, tmap.offset), "u64"),
        barrier_address(emit, barrier, instr),
        cta_mask,
        repr(mode),
        str(instr.has("cta_group::2")),
        *coordinates,
    )


# st.async, red.async --------------------------------------------------------------------------------------------------


def _store_async(
    split: Split,
    mask: np.ndarray,
    index: int,
    target: np.ndarray,
    barrier: np.ndarray,
    rows: np.ndarray,
    reduction: str | None,
    kind: str,
) -> None:
    """Write each lane's bytes to (remote) shared memory and complete them on the barrier there."""
    cells = np.ascontiguousarray(rows).reshape(32, -1).view(np.uint8).copy()
    target, barrier, mask = _shared(target, mask).copy(), _shared(barrier, mask).copy(), mask.copy()

    def run() -> None:
        shared = split.cta.cluster.shared
        for lane in lanes_of(mask):
            where = int(target[lane])
            out = shared.bytes_at(where, cells.shape[1])
            if reduction:
                must_be_written(split, index, where, cells.shape[1], "red.async")
            observe(split, index, "shared", where, cells.shape[1], "write")
            if reduction:
                reduce_into(out, cells[lane], reduction, kind)
            else:
                out[:] = cells[lane]
            complete(split, index, int(barrier[lane]), cells.shape[1])

    split.machine.submit(AsyncOp("st.async", run, split, index, mask))


@op("st.async", "red.async")
def store_async(emit: Emit, instr: Instr) -> None:
    target, source, barrier = instr.operands[:3]
    kind = instr.type
    items = source.items if isinstance(source, Vec) else (source,)
    bits = f"b{8 * SIZES[kind]}"
    names = [emit.src(item, bits) for item in items]
    rows = names[0] if vector_length(instr) == 1 else emit.temp(f"np.stack(({', '.join(names)}), 1)")
    reduction = next((p for p in instr.parts if p in REDUCTIONS), None)
    emit.call(
        _store_async,
        address_of(emit, target, "shared::cluster"),
        barrier_address(emit, barrier, instr),
        rows,
        repr(reduction),
        repr(kind),
    )


# Cluster launch control -----------------------------------------------------------------------------------------------


def _try_cancel(
    split: Split, mask: np.ndarray, index: int, target: np.ndarray, barrier: np.ndarray, multicast: bool
) -> None:
    """Take the next cluster of the grid that has not started (PTX ISA 9.7.13.16).

    The 16-byte response is opaque; here word 0 is 1 on success and words 1 to 3 are the first CTA's coordinates.
    """
    lane = int(mask.argmax())
    if not mask[lane]:
        return
    cluster, machine = split.cta.cluster, split.machine
    where, bar = int(_shared(target, mask)[lane]), int(_shared(barrier, mask)[lane])

    def run() -> None:
        first = machine.pending.popleft() if machine.pending else None
        words = np.array([1, *first] if first else [0, 0, 0, 0], np.uint32).view(np.uint8)
        ranks = range(cluster.shared.ranks) if multicast else [where >> RANK_SHIFT]
        for rank in ranks:
            spot = (rank << RANK_SHIFT) | (where & OFFSET_MASK)
            observe(split, index, "shared", spot, 16, "write")
            cluster.shared.bytes_at(spot, 16)[:] = words
            wrote(split, index, spot, 16)
            complete(split, index, (rank << RANK_SHIFT) | (bar & OFFSET_MASK), 16)

    machine.submit(AsyncOp("cluster launch control", run, split, index, mask))


@op("clusterlaunchcontrol.try_cancel")
def clc_cancel(emit: Emit, instr: Instr) -> None:
    target, barrier = instr.operands
    emit.call(
        _try_cancel,
        address_of(emit, target, "shared::cta"),
        barrier_address(emit, barrier, instr),
        str(instr.has("multicast::cluster::all")),
    )


@op("clusterlaunchcontrol.query_cancel")
def clc_query(emit: Emit, instr: Instr) -> None:
    target, response = instr.operands
    low, high = f"{emit.name(response)}[0]", f"{emit.name(response)}[1]"
    if instr.has("is_canceled"):
        emit.put(target, "pred", f"({low} & np_u64(1)) == 1")
        return
    words = [
        f"({low} >> np_u64(32)).astype(np_u32)",
        f"{high}.astype(np_u32)",
        f"({high} >> np_u64(32)).astype(np_u32)",
    ]
    axis = next((p[-1] for p in instr.parts if p.startswith("get_first_ctaid::")), None)
    if axis:
        emit.put(target, "u32", words["xyz".index(axis)])
        return
    for item, word in zip(target.items, [*words, "np.zeros(32, np_u32)"], strict=False):
        emit.put(item, "u32", word)


__all__ = ["Reg"]
