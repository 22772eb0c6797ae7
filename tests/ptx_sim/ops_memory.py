"""ld, st, atom, red, prefetch, fences and cp.async (PTX ISA 9.7.9.8 to 9.7.9.25, 9.7.13.4 to 9.7.13.8)."""

from __future__ import annotations

import numpy as np

from .access import atomic, load, must_align, reduce_half, reduce_vector, store
from .machine import AsyncOp, Split
from .memory import SimError
from .parser import SIZES, Addr, Imm, Instr, PtxError, Reg, Sym, Vec
from .translate import VIEWS, Emit, op


def space_of(instr: Instr) -> str:
    for part in instr.parts[1:]:
        if part in ("global", "local", "const", "generic"):
            return "global" if part == "const" else part
        if part in ("shared", "shared::cta"):
            return "shared::cta"
        if part == "shared::cluster":
            return "shared::cluster"
        if part.startswith("param"):
            return "param"
    return "generic"


def address_of(emit: Emit, operand: Addr, space: str) -> str:
    """Lane addresses as u32 for shared memory, u64 elsewhere."""
    if space.startswith("shared"):
        base = operand.base
        if isinstance(base, Reg) and emit.width(base) == 64:
            return emit.temp(f"{emit.address(operand, 'u64')}.astype(np_u32)")
        return emit.address(operand, "u32")
    if isinstance(operand.base, Reg) and emit.width(operand.base) == 32:
        return emit.temp(f"{emit.address(operand, 'u32')}.astype(np_u64)")
    return emit.address(operand, "u64")


def vector_length(instr: Instr) -> int:
    return next((int(p[1:]) for p in instr.parts if p in ("v2", "v4", "v8")), 1)


def is_call_parameter(emit: Emit, operand: Addr) -> bool:
    """Parameters of calls are declared inside the kernel and live in local memory."""
    return isinstance(operand.base, Sym) and emit.program.symbols.get(operand.base.name, ("",))[0] == "local"


@op("ld", "ldu")
def ld(emit: Emit, instr: Instr) -> None:
    kind, count = instr.type, vector_length(instr)
    target, source = instr.operands[:2]
    items = target.items if isinstance(target, Vec) else (target,)
    space = space_of(instr)
    size = SIZES[kind]
    space = "local" if is_call_parameter(emit, source) else space
    if space == "param" and isinstance(source.base, Sym):
        _ld_param(emit, items, source, kind, size)
        return
    if kind == "b128":
        rows = emit.value(load, address_of(emit, source, space), "16", repr(space))
        emit.line(f"copyto({emit.name(items[0])}, {rows}.view(np_u64).T, where={emit.mask})")
        return
    space = "global" if space == "param" else space
    total = size * count
    view = VIEWS[kind]
    bits = f"u{8 * size}"
    address = address_of(emit, source, space)
    if total > 16:
        emit.call(must_align, address, str(total), repr(space))
        lower = emit.value(load, address, "16", repr(space))
        second = emit.temp(f"{address} + {address}.dtype.type(16)")
        upper = emit.value(load, second, "16", repr(space))
        rows = emit.temp(f"np.concatenate(({lower}, {upper}), 1).view(np_{bits})")
    else:
        rows = emit.value(load, address, str(total), repr(space))
        if count == 1:
            emit.put(items[0], kind, rows if view == bits else f"{rows}.view(np_{view})")
            return
        rows = emit.temp(f"{rows}.view(np_{bits}).reshape(32, {count})")
    for i, item in enumerate(items):
        emit.put(item, kind, f"{rows}[:, {i}]" + ("" if view == bits else f".view(np_{view})"))


def _ld_param(emit: Emit, items: tuple, source: Addr, kind: str, size: int) -> None:
    start = emit.program.symbols[source.base.name][1] + source.base.offset + source.offset
    view = VIEWS[kind] if kind != "b128" else "u64"
    for i, item in enumerate(items):
        at = start + i * size
        emit.put(item, kind, f"S.machine.params[{at}:{at + size}].view(np_{view})")


def data_rows(emit: Emit, items: tuple, kind: str) -> str:
    """Source registers of a store as [32] values or [32, n] rows of the element type."""
    bits = f"u{8 * SIZES[kind]}"
    # Registers of any type give their bits; a literal is a number of the type.
    names = [
        emit.temp(f"{emit.src(x, kind)}.view(np_{bits})") if isinstance(x, Imm) else emit.src(x, "b" + bits[1:])
        for x in items
    ]
    if len(names) == 1:
        return names[0]
    return emit.temp(f"np.stack(({', '.join(names)}), 1)")


@op("st")
def st(emit: Emit, instr: Instr) -> None:
    if instr.has("async"):
        raise PtxError("st.async belongs to ops_bulk")
    kind, count = instr.type, vector_length(instr)
    target, source = instr.operands[:2]
    items = source.items if isinstance(source, Vec) else (source,)
    space = "local" if is_call_parameter(emit, target) else space_of(instr)
    address = address_of(emit, target, space)
    if kind == "b128":
        emit.call(store, address, "16", repr(space), f"np.ascontiguousarray({emit.name(items[0])}.T).view(np_u32)")
        return
    total = SIZES[kind] * count
    rows = data_rows(emit, items, kind)
    if total > 16:
        emit.call(must_align, address, str(total), repr(space))
        whole = emit.temp(f"{rows}.view(np_u32)")
        emit.call(store, address, "16", repr(space), f"{whole}[:, :4]")
        emit.call(store, f"{address} + {address}.dtype.type(16)", "16", repr(space), f"{whole}[:, 4:]")
    elif count == 1:
        emit.call(store, address, str(total), repr(space), rows)
    elif total == 16:
        emit.call(store, address, "16", repr(space), f"{rows}.view(np_u32)")
    else:
        emit.call(store, address, str(total), repr(space), f"{rows}.view(np_u{8 * total}).reshape(32)")


@op("atom", "red")
def atom(emit: Emit, instr: Instr) -> None:
    kind, count = instr.type, vector_length(instr)
    returns = instr.base == "atom"
    operands = list(instr.operands)
    target = operands.pop(0) if returns else None
    address_operand = operands.pop(0)
    name = next(
        p for p in instr.parts[1:] if p in ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")
    )
    space = space_of(instr)
    address = address_of(emit, address_operand, space)
    operands = operands[:2] if name == "cas" else operands[:1]
    items = operands[0].items if isinstance(operands[0], Vec) else tuple(operands)
    sources = [emit.src(item, kind) for item in items]
    if name == "add" and kind == "f32" and space == "global":
        name = "add.flushed"
    view = {"b32": "u32", "b64": "u64", "b16": "u16"}.get(kind, VIEWS[kind])
    dtype = np.dtype({"u": "u", "s": "i", "f": "f"}[view[0]] + str(int(view[1:]) // 8)).str
    if kind in ("f16", "bf16", "f16x2", "bf16x2") and name in ("add", "min", "max"):
        words = [emit.src(item, "b16" if kind in ("f16", "bf16") else "b32") for item in items]
        old = emit.value(reduce_half, address, repr(kind), repr(space), repr(name), *words)
        if returns and count == 1:
            emit.put(target, "b16" if kind in ("f16", "bf16") else "b32", old)
    elif count > 1:
        old = emit.value(reduce_vector, address, repr(dtype), repr(space), repr(name), *sources)
        if returns:
            for i, item in enumerate(target.items):
                emit.put(item, kind, f"{old}[:, {i}]")
    else:
        old = emit.value(atomic, address, repr(dtype), repr(space), repr(name), *sources)
        if returns:
            emit.put(target, kind, old)


def _fence(split: Split, mask: np.ndarray, index: int, kind: str) -> None:
    """Memory is sequentially consistent here; fences matter to the observer only."""
    if split.machine.observer is not None:
        split.machine.observer.fence(split, mask, index, kind)


@op("fence", "membar")
def fence(emit: Emit, instr: Instr) -> None:
    emit.call(_fence, repr(".".join(instr.parts[1:])))


@op("prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "cp.async.bulk.prefetch", "pmevent")
def hint(emit: Emit, instr: Instr) -> None:
    """Performance hints: no architectural effect. createpolicy yields an opaque value."""
    if instr.base == "createpolicy":
        emit.put(instr.operands[0], "u64", "np.zeros(32, np_u64)")


# cp.async ----------------------------------------------------------------------------------------------------------


def _copy_async(
    split: Split,
    mask: np.ndarray,
    index: int,
    target: np.ndarray,
    source: np.ndarray,
    size: int,
    source_size: np.ndarray | None,
) -> None:
    """Each lane copies `size` bytes global to shared; bytes past the source size are zero-filled."""
    if not mask.any():
        return
    target, source, mask = target.copy(), source.copy(), mask.copy()
    count = np.full(32, size) if source_size is None else source_size.astype(np.int64)
    if (mask & (count > size)).any():
        raise SimError(f"cp.async of {size} bytes with a source size of {int(count[mask].max())}")
    must_align(split, mask & (count > 0), index, source, size, "global")

    def run() -> None:
        whole = mask & (count == size)
        if whole.any():
            data = load(split, whole, index, source, size, "global")
            store(split, whole, index, target, size, "shared::cta", data)
        none = mask & (count == 0)
        if none.any():
            data = np.zeros((32, 4), np.uint32) if size == 16 else np.zeros(32, f"u{size}")
            store(split, none, index, target, size, "shared::cta", data)
        some = mask & (count > 0) & (count < size)
        if some.any():
            rows = np.zeros((32, size), np.uint8)
            for lane in np.flatnonzero(some).tolist():
                at, length = int(source[lane]), int(count[lane])
                rows[lane, :length] = split.machine.memory.bytes_at(at, length)
                if split.machine.observer is not None:
                    one, address = np.arange(32) == lane, np.full(32, at, np.uint64)
                    split.machine.observer.access(split, one, index, "global", address, length, "read")
            data = rows.view(np.uint32) if size == 16 else rows.view(f"u{size}")[:, 0]
            store(split, some, index, target, size, "shared::cta", data)

    split.machine.submit(AsyncOp("cp.async", run, split, index, mask))


@op("cp.async.ca", "cp.async.cg")
def cp_async(emit: Emit, instr: Instr) -> None:
    target, source, size, *rest = instr.operands
    where = address_of(emit, target, "shared::cta")
    origin = address_of(emit, source, "global")
    source_size = "None"
    rest = [r for r in rest if not (isinstance(r, Reg) and emit.program.registers[r.name][0] == "d")]
    if rest and isinstance(rest[0], Reg) and emit.program.registers[rest[0].name][0] == "p":
        # ignore-src: a true predicate copies zeros.
        source_size = emit.temp(f"where({emit.src(rest[0], 'pred')}, np_s64(0), np_s64({size.value}))")
    elif rest:
        source_size = emit.src(rest[0], "u32")
    emit.call(_copy_async, where, origin, str(size.value), source_size)


@op("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
def cp_async_group(emit: Emit, instr: Instr) -> None:
    """Groups complete in order; with immediate completion there is nothing to wait for."""
    emit.call(_group, repr(instr.parts[2]), str(instr.operands[0].value if instr.operands else 0))


def _group(split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
    if split.machine.policy is not None:
        split.machine.policy.group(split, "cp.async", action, count)
    if split.machine.observer is not None:
        split.machine.observer.cp_async_group(split, mask, index, action, count)
