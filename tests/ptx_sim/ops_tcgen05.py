"""Tensor memory and the fifth-generation tensor core (PTX ISA 9.7.16).

Tensor memory is 128 lanes by 512 columns of 32 bits per CTA, addressed as lane << 16 | column. Accumulator layouts
(PTX ISA 9.7.16.10.5), rows of the CTA's share of D and its columns:

    A, D   M 256 of a pair, M 128: lane = row
    B, E   M 128 of a pair, M 64 .ws: lanes 0-63 hold columns 0 to N/2 - 1, lanes 64-127 the others
    F      M 64: rows 16 w to 16 w + 15 in lanes 32 w (+16 if the address says so)
    G      M 32 .ws: 32-lane slab w holds the w-th quarter of the columns

An A operand in tensor memory stands in the lanes of the rows that it produces, so B, E and G read a copy per slab:
kernels that put different data there get a different product per column range ("dual GEMM").
"""

from __future__ import annotations

import itertools

import numpy as np

from .access import must_live, wrote
from .machine import AsyncOp, Cta, Split, lanes_text
from .matrix_operands import Descriptor, decode_umma, read_tile, to_float, unwritten
from .memory import OFFSET_MASK, POISON, RANK_SHIFT, SimError
from .ops_mbarrier import find
from .ops_memory import address_of
from .parser import Addr, Imm, Instr, PtxError, Vec
from .translate import Emit, op

COLUMNS, LANES128 = 512, 128


def one_lane(mask: np.ndarray, what: str) -> int:
    """The issuing lane of a single-thread instruction, -1 for none."""
    lanes = np.flatnonzero(mask)
    if len(lanes) > 1:
        raise SimError(f"{what} is issued by {len(lanes)} lanes; it must be issued by one")
    return int(lanes[0]) if len(lanes) else -1


def _columns(cta: Cta, first: int, count: int, what: str) -> None:
    if first + count > COLUMNS:
        raise SimError(
            f"{what}: columns {first} to {first + count - 1} of CTA {cta.ctaid} exceed the {COLUMNS} of tensor memory"
        )
    owner = cta.tmem_owner
    if not owner[first : first + count].all():
        last = first + count - 1
        edges = np.flatnonzero(np.diff(owner, prepend=0, append=0)).tolist()
        held = ", ".join(f"{a}-{b - 1}" for a, b in itertools.pairwise(edges) if owner[a]) or "none"
        raise SimError(f"{what}: columns {first} to {last} of CTA {cta.ctaid} are not all allocated; those are: {held}")


# Allocation -----------------------------------------------------------------------------------------------------------


def _alloc(split: Split, mask: np.ndarray, index: int, target: np.ndarray, count: np.ndarray) -> bool:
    """Allocate a power of two of columns, first fit; waits while there is no room."""
    if not mask.any():
        return False
    _require_warp(split, mask, index)
    lane = int(mask.argmax())
    cta, wanted = split.cta, int(count[lane])
    if wanted < 32 or wanted > 512 or wanted & (wanted - 1):
        raise SimError(f"tcgen05.alloc of {wanted} columns")
    if not cta.tmem_permit:
        raise SimError("tcgen05.alloc after relinquish_alloc_permit")
    for first in range(0, COLUMNS, max(wanted, 32)):
        if not cta.tmem_owner[first : first + wanted].any():
            cta.tmem_owner[first : first + wanted] = index + 1
            cta.tmem_sizes[first] = wanted
            where = int(target[lane])
            if split.machine.observer is not None:
                split.machine.observer.tmem_alloc(split, mask, index, where, first, wanted)
            cta.cluster.shared.bytes_at(where, 4).view(np.uint32)[0] = first
            wrote(split, index, where, 4)
            return False
    split.note = f"({wanted} free columns)"
    return split.park(cta.tmem_wait)


def _dealloc(split: Split, mask: np.ndarray, index: int, address: np.ndarray, count: np.ndarray) -> None:
    if not mask.any():
        return
    _require_warp(split, mask, index)
    lane = int(mask.argmax())
    first, wanted = int(address[lane]) & 0xFFFF, int(count[lane])
    owner = split.cta.tmem_owner
    _columns(split.cta, first, wanted, "tcgen05.dealloc")
    held = split.cta.tmem_sizes.pop(first, None)
    if held != wanted:
        raise SimError(
            f"tcgen05.dealloc of {wanted} columns at {first}: "
            + (f"the allocation there has {held}" if held else "no allocation starts there")
        )
    if split.machine.observer is not None:
        split.machine.observer.tmem_dealloc(split, mask, index, first, wanted)
    owner[first : first + wanted] = 0
    split.cta.tmem[first : first + wanted] = POISON
    split.machine.wake(split.cta.tmem_wait)


def _relinquish(split: Split, mask: np.ndarray, index: int) -> None:
    split.cta.tmem_permit = False


@op("tcgen05.alloc", blocking=True)
def alloc(emit: Emit, instr: Instr) -> None:
    emit.blocking(_alloc, address_of(emit, instr.operands[0], "shared::cta"), emit.src(instr.operands[1], "u32"))


@op("tcgen05.dealloc")
def dealloc(emit: Emit, instr: Instr) -> None:
    emit.call(_dealloc, emit.src(instr.operands[0], "u32"), emit.src(instr.operands[1], "u32"))


@op("tcgen05.relinquish_alloc_permit")
def relinquish(emit: Emit, instr: Instr) -> None:
    emit.call(_relinquish)


# Loads and stores -----------------------------------------------------------------------------------------------------


def _fragment(shape: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane offset, column offset) arrays [registers, 32] of a tcgen05.ld/st shape (PTX ISA 9.7.16.8, figures)."""
    thread = np.arange(32)[None, :]
    if shape == "32x32b":
        reg = np.arange(count)[:, None]
        return thread + 0 * reg, reg + 0 * thread
    if shape == "16x64b":
        reg = np.arange(count)[:, None]
        return (thread >> 2) + 8 * (thread >> 1 & 1) + 0 * reg, 2 * reg + (thread & 1)
    if shape == "16x128b":
        reg = np.arange(2 * count)[:, None]
        return (thread >> 2) + 8 * (reg & 1), 4 * (reg >> 1) + (thread & 3)
    if shape == "16x256b":
        reg = np.arange(4 * count)[:, None]
        return (thread >> 2) + 8 * (reg >> 1 & 1), 8 * (reg >> 2) + 2 * (thread & 3) + (reg & 1)
    if shape == "16x32bx2":
        reg = np.arange(count)[:, None]
        return (thread & 15) + 0 * reg, reg + 0 * thread
    raise PtxError(f"tcgen05 shape {shape} is not modelled")


_FRAGMENTS: dict[tuple, tuple] = {}


def fragment(shape: str, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    key = (shape, count)
    if key not in _FRAGMENTS:
        lanes, columns = _fragment(shape, count)
        _FRAGMENTS[key] = (lanes, columns, int(columns.max()) + 1)
    return _FRAGMENTS[key]


def _place(split: Split, address: np.ndarray, shape: str, what: str) -> tuple[int, int]:
    """(lane, column) of a warp's access; a warp reaches the 32 lanes of its position in the warpgroup.

    Shipped kernels (the 64-head DSA forward) also leave the lane field at 0 in every warp: the hardware then takes
    the warp's own window. Any other foreign window is an error.
    """
    value = int(address[0])
    if (address != address[0]).any():
        raise SimError(f"{what}: the address differs between lanes")
    lane, column = value >> 16, value & 0xFFFF
    window = 32 * (split.warp.index % 4)
    if lane < 32:
        lane += window
    if lane & ~31 != window or (shape == "32x32b" and lane & 31) or lane & 15:
        raise SimError(
            f"{what}: lane {lane} is not accessible to warp {split.warp.index}, whose lanes are "
            f"{window} to {window + 31}"
        )
    return lane, column


def _load(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, shape: str, count: int, pack: bool, half: int
) -> np.ndarray:
    """Register rows [registers, 32]."""
    lane, column = _place(split, address, shape, "tcgen05.ld")
    cta = split.cta
    if split.machine.observer is not None:
        split.machine.observer.tmem(split, index, shape, lane, column, count, "read")
    times = 2 if pack else 1
    if shape == "32x32b":
        _columns(cta, column, count * times, "tcgen05.ld")
        rows = cta.tmem[column : column + count * times, lane : lane + 32]
    else:
        lanes, columns, width = fragment(shape, count * times)
        _columns(cta, column, width, "tcgen05.ld")
        if shape == "16x32bx2":
            _columns(cta, column + half, width, "tcgen05.ld")
            columns = columns + half * (np.arange(32)[None, :] >> 4)
        rows = cta.tmem[column + columns, lane + lanes]
    if (rows == POISON).any():
        split.machine.finding(
            f"tcgen05.ld of uninitialised tensor memory: lanes from {lane}, columns from {column} by {split.warp.name}",
            index,
        )
    if pack:
        return (rows[0::2] & np.uint32(0xFFFF)) | (rows[1::2] << np.uint32(16))
    return rows


def _store(
    split: Split,
    mask: np.ndarray,
    index: int,
    address: np.ndarray,
    shape: str,
    count: int,
    unpack: bool,
    half: int,
    rows: np.ndarray,
) -> None:
    lane, column = _place(split, address, shape, "tcgen05.st")
    cta = split.cta
    if split.machine.observer is not None:
        split.machine.observer.tmem(split, index, shape, lane, column, count, "write")
    if unpack:
        wide = np.empty((2 * len(rows), 32), np.uint32)
        wide[0::2], wide[1::2] = rows & np.uint32(0xFFFF), rows >> np.uint32(16)
        rows, count = wide, 2 * count
    if shape == "32x32b":
        _columns(cta, column, count, "tcgen05.st")
        cta.tmem[column : column + count, lane : lane + 32] = rows
        return
    lanes, columns, width = fragment(shape, count)
    _columns(cta, column, width, "tcgen05.st")
    if shape == "16x32bx2":
        columns = columns + half * (np.arange(32)[None, :] >> 4)
    cta.tmem[column + columns, lane + lanes] = rows


def _shape_of(instr: Instr) -> tuple[str, int]:
    shape = next(p for p in instr.parts if p in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"))
    return shape, int(next(p for p in instr.parts if p[0] == "x" and p[1:].isdigit())[1:])


def _whole_warp(emit: Emit) -> None:
    """.sync.aligned: emitted without a mask; a partial one is an error at run time."""
    if emit.where is not None:
        emit.call(_require_warp)


def _require_warp(split: Split, mask: np.ndarray, index: int) -> None:
    if mask.tobytes() != split.warp.live.tobytes():
        raise SimError(f".sync.aligned instruction executed by {lanes_text(mask)} only")


def _items(operand: object) -> tuple:
    return operand.items if isinstance(operand, Vec) else (operand,)


@op("tcgen05.ld")
def ld(emit: Emit, instr: Instr) -> None:
    _whole_warp(emit)
    shape, count = _shape_of(instr)
    operands = list(instr.operands)
    items = _items(operands.pop(0))
    reduced = operands.pop(0) if instr.has("red") else None
    if reduced is not None and emit.program.module.target.startswith("sm_100"):
        raise PtxError("tcgen05.ld.red does not exist on sm_100 (ptxas refuses it; sm_103 has it)")
    address = emit.address(operands[0], "u32")
    half = operands[1].value if len(operands) > 1 else 0
    rows = emit.value(_load, address, repr(shape), str(count), str(instr.has("pack::16b")), str(half))
    at = emit.rows(items)
    if at is not None and emit.where is None:
        emit.line(f"RF[{at}] = {rows}")
    else:
        for i, item in enumerate(items):
            emit.put(item, "u32", f"{rows}[{i}]")
    if reduced is not None:
        name = "min" if instr.has("min") else "max"
        emit.put(
            reduced,
            instr.type,
            emit.value(_reduce, rows, repr(name), repr(instr.type), str(instr.has("abs")), str(instr.has("NaN"))),
        )


def _reduce(
    split: Split, mask: np.ndarray, index: int, rows: np.ndarray, name: str, kind: str, absolute: bool, nan: bool
) -> np.ndarray:
    values = np.ascontiguousarray(rows).view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[kind])
    if absolute:
        values = np.abs(values)
    function = {("min", True): np.minimum, ("max", True): np.maximum, ("min", False): np.fmin, ("max", False): np.fmax}[
        name, nan
    ]
    return function.reduce(values, axis=0)


@op("tcgen05.st")
def st(emit: Emit, instr: Instr) -> None:
    _whole_warp(emit)
    shape, count = _shape_of(instr)
    operands = list(instr.operands)
    address = emit.address(operands.pop(0), "u32")
    half = operands.pop(0).value if shape == "16x32bx2" else 0
    items = _items(operands[0])
    at = emit.rows(items)
    rows = f"RF[{at}]" if at is not None else emit.temp(f"np.stack(({', '.join(emit.src(i, 'u32') for i in items)},))")
    emit.call(_store, address, repr(shape), str(count), str(instr.has("unpack::16b")), str(half), rows)


def _wait(split: Split, mask: np.ndarray, index: int, kind: str) -> None:
    if split.machine.observer is not None:
        split.machine.observer.fence(split, mask, index, kind)


@op("tcgen05.wait::ld", "tcgen05.wait::st", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def wait(emit: Emit, instr: Instr) -> None:
    emit.call(_wait, repr(f"tcgen05.{instr.parts[1]}"))


# Matrix products ------------------------------------------------------------------------------------------------------


class Shape:
    """The decoded instruction descriptor of kind::f16 (PTX ISA 9.7.16.4.2)."""

    __slots__ = ("a_bf16", "a_k_major", "accumulate_f16", "b_bf16", "b_k_major", "m", "n", "negate")

    def __init__(self, idesc: int) -> None:
        if idesc >> 2 & 1:
            raise SimError("sparse tcgen05.mma is not modelled")
        self.accumulate_f16 = (idesc >> 4 & 3) == 0
        if idesc >> 4 & 3 > 1 or idesc & (1 << 3 | 1 << 6 | 1 << 23 | 1 << 29 | 3 << 30):
            raise SimError(
                f"instruction descriptor 0x{idesc:08x}: an accumulator format, reserved bit or maximum shift that is "
                "not modelled for kind::f16"
            )
        formats = idesc >> 7 & 7, idesc >> 10 & 7
        if max(formats) > 1:
            raise SimError(f"instruction descriptor 0x{idesc:08x}: operand formats {formats} for kind::f16")
        self.a_bf16, self.b_bf16 = (f == 1 for f in formats)
        self.negate = (idesc >> 13 & 1) ^ (idesc >> 14 & 1)
        self.a_k_major, self.b_k_major = not idesc >> 15 & 1, not idesc >> 16 & 1
        self.n, self.m = (idesc >> 17 & 63) * 8, (idesc >> 24 & 31) * 16


def segments(m: int, n: int, pair: bool, ws: bool, lane: int) -> list[tuple[int, int, int, int, int]]:
    """(first lane, first row, rows, first column of N, columns) of a CTA's accumulator."""
    if (pair and m == 256) or (not pair and m == 128):
        return [(0, 0, 128, 0, n)]
    if (pair and m == 128) or (ws and m == 64):
        return [(64 * h, 0, 64, h * n // 2, n // 2) for h in (0, 1)]
    if m == 64 and not pair:
        return [(32 * w + (lane & 16), 16 * w, 16, 0, n) for w in range(4)]
    if m == 32 and ws:
        return [(32 * w, 0, 32, w * n // 4, n // 4) for w in range(4)]
    raise SimError(f"tcgen05.mma with M {m}, cta_group::{2 if pair else 1}{', .ws' if ws else ''} does not exist")


def check_shape(shape: Shape, pair: bool, ws: bool) -> None:
    """The M and N that kind::f16 allows (PTX ISA 9.7.16.2.1, table of shapes)."""
    m, n = shape.m, shape.n
    if ws:
        good = m in (32, 64, 128) and n in (64, 128, 256)
    elif pair:
        good = m in (128, 256) and n % (16 if m == 128 else 32) == 0 and 16 <= n <= 256
    else:
        good = ((m == 64 and n % 8 == 0) or (m == 128 and n % 16 == 0)) and 8 <= n <= 256
    if not good:
        raise SimError(
            f"tcgen05.mma shape M {m}, N {n} is not allowed for cta_group::{2 if pair else 1}{' .ws' if ws else ''}"
        )


def _pair_of(split: Split, pair: bool) -> list[Cta]:
    cta = split.cta
    if not pair:
        return [cta]
    ctas = cta.cluster.ctas
    if len(ctas) < 2:
        raise SimError("cta_group::2 in a cluster of one CTA")
    both = [ctas[cta.rank & ~1], ctas[cta.rank | 1]]
    for other in both:
        must_live(split, other.base)
    return both


def mma(
    split: Split,
    mask: np.ndarray,
    index: int,
    d: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    idesc: np.ndarray,
    enable: np.ndarray,
    a_in_tmem: bool,
    pair: bool,
    ws: bool,
    disable: tuple = (),
) -> None:
    """D = A B (+ D) in fp32, K = 16."""
    lane = one_lane(mask, "tcgen05.mma")
    if lane < 0:
        return
    shape = Shape(int(idesc[lane]))
    check_shape(shape, pair, ws)
    target, accumulate = int(d[lane]), bool(enable[lane])
    if target >> 16 and (target >> 16 != 16 or ws or pair or shape.m != 64):
        raise SimError(f"tcgen05.mma: accumulator address 0x{target:08x} has lane {target >> 16}")
    a_value, b_desc = int(a[lane]), decode_umma(int(b[lane]))
    if any(int(word[lane]) for word in disable):
        raise SimError("disable-output-lane masks other than zero are not modelled")
    if shape.accumulate_f16:
        raise SimError("fp16 accumulators are not modelled")

    majors = "".join("K" if major else "MN" for major in (shape.a_k_major, shape.b_k_major))
    where = "tmem" if a_in_tmem else f"swizzle {decode_umma(a_value).span}"
    element = "bf16" if shape.a_bf16 else "f16"
    split.machine.report.forms.add(
        f"umma cta_group::{2 if pair else 1}{' ws' if ws else ''} M{shape.m} N{shape.n} "
        f"{element} A {where}, B swizzle {b_desc.span}, majors {majors}"
    )

    def run() -> None:
        _product(split, index, shape, target, a_value, b_desc, accumulate, a_in_tmem, pair, ws)

    split.machine.submit(AsyncOp("tcgen05", run, split, index, mask))


def _product(
    split: Split,
    index: int,
    shape: Shape,
    target: int,
    a_value: int,
    b_desc: Descriptor,
    accumulate: bool,
    a_in_tmem: bool,
    pair: bool,
    ws: bool,
) -> None:
    ctas = _pair_of(split, pair)
    shared = split.cta.cluster.shared
    machine = split.machine
    share = shape.n // len(ctas)
    tile = (b_desc, share, 16, shape.b_k_major)
    b_bits = [read_tile(shared, cta.base, *tile) for cta in ctas]
    if any(unwritten(shared, bits, cta.base, *tile) for cta, bits in zip(ctas, b_bits, strict=True)):
        machine.finding(f"tcgen05.mma reads uninitialised shared memory as B ({b_desc}) for {split.warp.name}", index)
    b = np.concatenate([to_float(bits, shape.b_bf16) for bits in b_bits])
    if shape.negate:
        b = -b
    a_desc = None if a_in_tmem else decode_umma(a_value)
    column = target & 0xFFFF
    for cta in ctas:
        if machine.observer is not None:
            machine.observer.mma(split, index, cta, shape, target, a_value if a_in_tmem else a_desc, b_desc, accumulate)
        rows = shape.m // len(ctas)
        whole = None
        if a_desc is not None:
            bits = read_tile(shared, cta.base, a_desc, rows, 16, shape.a_k_major)
            if unwritten(shared, bits, cta.base, a_desc, rows, 16, shape.a_k_major):
                machine.finding(
                    f"tcgen05.mma reads uninitialised shared memory as A ({a_desc}) for {split.warp.name}", index
                )
            whole = to_float(bits, shape.a_bf16)
        parts = segments(shape.m, shape.n, pair, ws, target >> 16)
        _columns(cta, column, max(p[4] for p in parts), "tcgen05.mma accumulator")
        for first_lane, first_row, count, first_n, width in parts:
            if whole is None:
                a_column = a_value & 0xFFFF
                _columns(cta, a_column, 8, "tcgen05.mma operand A")
                words = np.ascontiguousarray(cta.tmem[a_column : a_column + 8, first_lane : first_lane + count].T)
                if (words == POISON).any():
                    machine.finding(
                        f"tcgen05.mma reads uninitialised tensor memory as A (column {a_column}) for {split.warp.name}",
                        index,
                    )
                a = to_float(words.view(np.uint16), shape.a_bf16)
            else:
                a = whole[first_row : first_row + count]
            out = b[first_n : first_n + width] @ a.T
            cells = cta.tmem[column : column + width, first_lane : first_lane + count].view(np.float32)
            if accumulate:
                if (cells.view(np.uint32) == POISON).any():
                    machine.finding(
                        f"tcgen05.mma accumulates on uninitialised tensor memory (column {column}) for "
                        f"{split.warp.name}",
                        index,
                    )
                cells += out
            else:
                cells[:] = out


@op("tcgen05.mma")
def tcgen05_mma(emit: Emit, instr: Instr) -> None:
    if not instr.has("kind::f16") or instr.has("sp") or instr.has("block_scale"):
        raise PtxError(f"{instr.op} is not modelled (kind::f16, dense)")
    d, a, b, idesc, *rest = instr.operands
    in_tmem = isinstance(a, Addr)
    disable = "()"
    if rest and isinstance(rest[0], Vec):
        disable = emit.temp(f"({', '.join(emit.src(w, 'u32') for w in rest.pop(0).items)},)")
    if len(rest) > 1 and not (isinstance(rest[1], Imm) and rest[1].value == 0):
        raise PtxError("tcgen05.mma with scale-input-d or a zero-column mask is not modelled")
    emit.call(
        mma,
        emit.address(d, "u32"),
        emit.address(a, "u32") if in_tmem else emit.src(a, "u64"),
        emit.src(b, "u64"),
        emit.src(idesc, "u32"),
        emit.src(rest[0], "pred"),
        str(in_tmem),
        str(instr.has("cta_group::2")),
        str(instr.has("ws")),
        disable,
    )


def _commit(split: Split, mask: np.ndarray, index: int, address: np.ndarray, cta_mask: np.ndarray | None) -> None:
    """One arrival on the barrier (of every CTA in the mask) when all earlier tcgen05 work of the thread is done."""
    lane = one_lane(mask, "tcgen05.commit")
    if lane < 0:
        return
    where = int(address[lane])
    spots = [where]
    if cta_mask is not None:
        spots = [(r << RANK_SHIFT) | (where & OFFSET_MASK) for r in range(16) if int(cta_mask[lane]) >> r & 1]

    def run() -> None:
        for spot in spots:
            barrier = find(split, spot)
            if split.machine.observer is not None:
                split.machine.observer.commit(split, index, barrier)
            barrier.arrive(1)

    split.machine.submit(AsyncOp("tcgen05", run, split, index, mask))


@op("tcgen05.commit")
def commit(emit: Emit, instr: Instr) -> None:
    cta_mask = emit.src(instr.operands[1], "u16") if instr.has("multicast::cluster") else "None"
    emit.call(_commit, address_of(emit, instr.operands[0], "shared::cluster"), cta_mask)


# Copies from shared memory --------------------------------------------------------------------------------------------

# Shape -> (rows, bytes per row, lane groups that receive a copy).
CP_SHAPES = {"128x256b": (128, 32), "128x128b": (128, 16), "4x256b": (4, 32), "64x128b": (64, 16), "32x128b": (32, 16)}


def _cp(
    split: Split,
    mask: np.ndarray,
    index: int,
    address: np.ndarray,
    descriptor: np.ndarray,
    name: str,
    spread: str,
    pair: bool,
) -> None:
    lane = one_lane(mask, "tcgen05.cp")
    if lane < 0:
        return
    target, desc = int(address[lane]), decode_umma(int(descriptor[lane]))
    rows, width = CP_SHAPES[name]
    if target >> 16:
        raise SimError(f"tcgen05.cp to lane {target >> 16}: lanes other than 0 are not modelled")
    split.machine.report.forms.add(f"tcgen05.cp {name} {spread} swizzle {desc.span}")

    def run() -> None:
        column, words = target & 0xFFFF, width // 4
        for cta in _pair_of(split, pair):
            bits = read_tile(split.cta.cluster.shared, cta.base, desc, rows, width // 2, True)
            data = np.ascontiguousarray(bits).view(np.uint32).T
            _columns(cta, column, words, "tcgen05.cp")
            if split.machine.observer is not None:
                split.machine.observer.cp(split, index, cta, desc, rows, width, target)
            if unwritten(split.cta.cluster.shared, bits, cta.base, desc, rows, width // 2, True):
                split.machine.finding(f"tcgen05.cp reads uninitialised shared memory ({desc})", index)
            if spread == "warpx4":
                for w in range(4):
                    cta.tmem[column : column + words, 32 * w : 32 * w + 32] = data
            elif spread in ("warpx2::02_13", "warpx2::01_23"):
                pairs = ((0, 2), (1, 3)) if spread.endswith("02_13") else ((0, 1), (2, 3))
                for half, warps in enumerate(pairs):
                    for w in warps:
                        cta.tmem[column : column + words, 32 * w : 32 * w + 32] = data[:, 32 * half : 32 * half + 32]
            else:
                cta.tmem[column : column + words, :rows] = data

    split.machine.submit(AsyncOp("tcgen05", run, split, index, mask))


@op("tcgen05.cp")
def cp(emit: Emit, instr: Instr) -> None:
    name = next((p for p in instr.parts if p in CP_SHAPES), None)
    if name is None or any(p.startswith(("b8x16", "b4x16", "b6x16")) for p in instr.parts):
        raise PtxError(f"{instr.op} is not modelled")
    spread = next((p for p in instr.parts if p.startswith("warpx")), "")
    emit.call(
        _cp,
        emit.address(instr.operands[0], "u32"),
        emit.src(instr.operands[1], "u64"),
        repr(name),
        repr(spread),
        str(instr.has("cta_group::2")),
    )
