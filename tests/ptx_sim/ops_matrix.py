"""ldmatrix, stmatrix, movmatrix, mma.sync and wgmma (PTX ISA 9.7.14 and 9.7.15)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .access import WRITTEN, shared_index
from .machine import FULL, AsyncOp, Split, Waitable
from .matrix_operands import decode_wgmma, read_tile, to_float, unwritten
from .memory import POISON_HALF, SimError
from .ops_memory import address_of
from .parser import Imm, Instr, PtxError, Reg, Vec
from .translate import Emit, op

_ROW, _COL = np.arange(32) // 4, np.arange(32) % 4


def _count(instr: Instr) -> int:
    return int(next(p for p in instr.parts if p in ("x1", "x2", "x4"))[1:])


def _ldmatrix(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, count: int, transpose: bool
) -> np.ndarray:
    """Register rows [count, 32] of 8x8 matrices of 16-bit elements."""
    if mask is not FULL and mask.tobytes() != split.warp.live.tobytes():
        raise SimError("ldmatrix executed by part of a warp")
    chunks = shared_index(split, address[: 8 * count], 16, "ldmatrix", False)
    if split.machine.observer is not None:
        split.machine.observer.access(split, mask, index, "shared::cta", address[: 8 * count], 16, "read")
    shared = split.cta.cluster.shared
    words = shared.views[16][chunks]
    if shared.odd or (words.view(np.uint16) == POISON_HALF).any():
        missing = (shared.marks[16][chunks] != WRITTEN[16]).any(1)
        if missing.any():
            where = shared.describe(16 * int(chunks[int(missing.argmax())]))
            split.machine.finding(
                f"ldmatrix of uninitialised shared memory: row at {where} by {split.warp.name}", index
            )
    if transpose:
        halves = words.view(np.uint16).reshape(count, 8, 8).transpose(0, 2, 1)
        words = np.ascontiguousarray(halves).view(np.uint32)
    return words.reshape(count, 32)


def _stmatrix(
    split: Split, mask: np.ndarray, index: int, address: np.ndarray, count: int, transpose: bool, rows: np.ndarray
) -> None:
    if mask is not FULL and mask.tobytes() != split.warp.live.tobytes():
        raise SimError("stmatrix executed by part of a warp")
    chunks = shared_index(split, address[: 8 * count], 16, "stmatrix", False, index)
    if split.machine.observer is not None:
        split.machine.observer.access(split, mask, index, "shared::cta", address[: 8 * count], 16, "write")
    words = np.ascontiguousarray(rows).reshape(count, 8, 4)
    if transpose:
        halves = words.view(np.uint16).reshape(count, 8, 8).transpose(0, 2, 1)
        words = np.ascontiguousarray(halves).view(np.uint32)
    shared = split.cta.cluster.shared
    shared.views[16][chunks] = words.reshape(8 * count, 4)
    shared.marks[16][chunks] = WRITTEN[16]


def _check_matrix(instr: Instr) -> None:
    if not instr.has("m8n8") or instr.type != "b16":
        raise PtxError(f"{instr.op}: only m8n8 matrices of b16 are modelled")


@op("ldmatrix")
def ldmatrix(emit: Emit, instr: Instr) -> None:
    _check_matrix(instr)
    count = _count(instr)
    target, source = instr.operands
    rows = emit.value(_ldmatrix, address_of(emit, source, "shared::cta"), str(count), str(instr.has("trans")))
    items = target.items if isinstance(target, Vec) else (target,)
    for i, item in enumerate(items):
        emit.put(item, "u32", f"{rows}[{i}]")


@op("stmatrix")
def stmatrix(emit: Emit, instr: Instr) -> None:
    _check_matrix(instr)
    count = _count(instr)
    target, source = instr.operands
    items = source.items if isinstance(source, Vec) else (source,)
    rows = emit.temp(f"np.stack(({', '.join(emit.src(i, 'u32') for i in items)},))")
    emit.call(_stmatrix, address_of(emit, target, "shared::cta"), str(count), str(instr.has("trans")), rows)


def _movmatrix(split: Split, mask: np.ndarray, index: int, source: np.ndarray) -> np.ndarray:
    halves = source.view(np.uint16).reshape(8, 8).T
    return np.ascontiguousarray(halves).view(np.uint32).reshape(32)


@op("movmatrix")
def movmatrix(emit: Emit, instr: Instr) -> None:
    emit.put(instr.operands[0], "u32", emit.value(_movmatrix, emit.src(instr.operands[1], "u32")))


# mma.sync -------------------------------------------------------------------------------------------------------------


def a_fragment(words: np.ndarray, bf16: bool) -> np.ndarray:
    """A of m16nXk(8 * regs / 2): register r holds rows +8 for odd r, columns +8 per pair of registers."""
    count = len(words)
    out = np.empty((16, 4 * count), np.float32)
    values = to_float(np.ascontiguousarray(words).view(np.uint16), bf16).reshape(count, 32, 2)
    for r in range(count):
        for j in (0, 1):
            out[_ROW + 8 * (r & 1), 2 * _COL + j + 8 * (r >> 1)] = values[r, :, j]
    return out


def _mma_sync(
    split: Split, mask: np.ndarray, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, bf16: bool
) -> np.ndarray:
    left = a_fragment(a, bf16)
    right = np.empty((8, 8 * len(b)), np.float32)
    values = to_float(np.ascontiguousarray(b).view(np.uint16), bf16).reshape(len(b), 32, 2)
    for r in range(len(b)):
        for j in (0, 1):
            right[_ROW, 2 * _COL + j + 8 * r] = values[r, :, j]
    product = left @ right.T
    out = np.empty((4, 32), np.float32)
    for r in range(4):
        out[r] = product[_ROW + 8 * (r >> 1), 2 * _COL + (r & 1)]
    return out + c


@op("mma.sync")
def mma_sync(emit: Emit, instr: Instr) -> None:
    shape = next(p for p in instr.parts if p[0] == "m" and p[1:2].isdigit())
    kinds = instr.types
    if shape not in ("m16n8k16", "m16n8k8") or kinds[0] != "f32" or kinds[1] not in ("bf16", "f16"):
        raise PtxError(f"{instr.op} is not modelled")
    d, a, b, c = instr.operands
    stack = [
        emit.temp(f"np.stack(({', '.join(emit.src(i, kind) for i in v.items)},))")
        for v, kind in ((a, "u32"), (b, "u32"), (c, "f32"))
    ]
    out = emit.value(_mma_sync, *stack, str(kinds[1] == "bf16"))
    for i, item in enumerate(d.items):
        emit.put(item, "f32", f"{out}[{i}]")


# wgmma ----------------------------------------------------------------------------------------------------------------


class Warpgroup(Waitable):
    """The four warps that issue wgmma together (PTX ISA 9.7.15: every warp of the warpgroup executes each one).

    The product runs when the last of the four warps has issued it, so no warp can see it complete before that; a
    shipped Hopper backward reuses shared memory behind its own wait_group and relies on this.
    """

    __slots__ = ("done", "index", "pending", "warps")

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.done = 0
        self.pending: dict[int, dict] = {}
        # Per warp of the four: instructions issued, and that count at each commit_group.
        self.warps = [[0, []] for _ in range(4)]

    def describe(self) -> str:
        issued = ", ".join(f"warp {4 * self.index + w} {count}" for w, (count, _) in enumerate(self.warps))
        return f"wgmma of warpgroup {self.index}: {self.done} done; issued by {issued}"


def warpgroup(split: Split) -> Warpgroup:
    index = split.warp.index // 4
    groups = split.cta.__dict__.setdefault("warpgroups", {})
    found = groups.get(index)
    if found is None:
        if 4 * index + 4 > len(split.cta.warps):
            raise SimError(f"wgmma in an incomplete warpgroup: warps {4 * index} to {len(split.cta.warps) - 1}")
        found = groups[index] = Warpgroup(index)
    return found


def wgmma(
    split: Split,
    mask: np.ndarray,
    index: int,
    a: object,
    b: np.ndarray,
    scale_d: np.ndarray,
    n: int,
    bf16: bool,
    flags: tuple,
    file: np.ndarray,
    rows: object,
) -> None:
    """One warp's part of a wgmma; the fourth part runs it."""
    if mask is not FULL and mask.tobytes() != split.warp.live.tobytes():
        raise SimError("wgmma executed by part of a warp")
    group = warpgroup(split)
    slab = split.warp.index % 4
    state = group.warps[slab]
    number = state[0]
    state[0] += 1
    if split.machine.observer is not None:
        split.machine.observer.wgmma_issue(split, index, number)
    from_shared = isinstance(a, np.ndarray)
    part = (int(a[0]) if from_shared else np.stack(a), int(b[0]), bool(scale_d[0]), file, rows)
    parts = group.pending.setdefault(number, {})
    parts[slab] = part
    key = (index, part[1], part[2], part[0] if from_shared else None)
    if parts.setdefault("key", key) != key:
        raise SimError(f"warps of warpgroup {group.index} issue different wgmma: {parts['key']} and {key}")
    if len(parts) == 5:
        del group.pending[number]

        def run() -> None:
            _product(split, index, parts, from_shared, n, bf16, flags)
            group.done += 1
            if group.waiters:
                split.machine.wake(group)

        split.machine.submit(AsyncOp("wgmma", run, split, index, mask))


@lru_cache(maxsize=64)
def _accumulator(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row of the warp's slab, column) of D per accumulator register and lane (PTX ISA 9.7.15.5.1, figure of D)."""
    reg = np.arange(n // 2)[:, None]
    return _ROW + 8 * (reg >> 1 & 1), 8 * (reg >> 2) + 2 * _COL + (reg & 1)


def _product(split: Split, index: int, parts: dict, from_shared: bool, n: int, bf16: bool, flags: tuple) -> None:
    negate_a, negate_b, transpose_a, transpose_b = flags
    shared, base, machine = split.cta.cluster.shared, split.cta.base, split.machine
    b_desc = decode_wgmma(parts[0][1])
    bits = read_tile(shared, base, b_desc, n, 16, not transpose_b)
    if unwritten(shared, bits, base, b_desc, n, 16, not transpose_b):
        machine.finding(f"wgmma reads uninitialised shared memory as B ({b_desc})", index)
    a_desc = None
    where = f"swizzle {decode_wgmma(parts[0][0]).span}" if from_shared else "registers"
    majors = "".join("MN" if t else "K" for t in (transpose_a, transpose_b))
    machine.report.forms.add(
        f"wgmma n{n} {'bf16' if bf16 else 'f16'} A {where}, B swizzle {b_desc.span}, majors {majors}"
    )
    if from_shared:
        a_desc = decode_wgmma(parts[0][0])
        left_bits = read_tile(shared, base, a_desc, 64, 16, not transpose_a)
        if unwritten(shared, left_bits, base, a_desc, 64, 16, not transpose_a):
            machine.finding(f"wgmma reads uninitialised shared memory as A ({a_desc})", index)
        left = to_float(left_bits, bf16)
    else:
        left = np.concatenate([a_fragment(parts[w][0], bf16) for w in range(4)])
    if machine.observer is not None:
        machine.observer.wgmma(split, index, a_desc, b_desc, n, not transpose_a, not transpose_b)
    product = left @ to_float(bits, bf16).T
    if negate_a ^ negate_b:
        product = -product
    lanes, columns = _accumulator(n)
    for w in range(4):
        _, _, accumulate, file, rows = parts[w]
        piece = product[lanes + 16 * w, columns]
        file[rows] = file[rows] + piece if accumulate else piece


@op("wgmma.mma_async")
def wgmma_async(emit: Emit, instr: Instr) -> None:
    shape = next(p for p in instr.parts if p.startswith("m64n"))
    n = int(shape[4:].split("k")[0])
    kinds = instr.types
    if kinds[0] != "f32" or kinds[1] not in ("bf16", "f16"):
        raise PtxError(f"{instr.op} is not modelled (fp32 accumulators, 16-bit operands)")
    d, a, b, scale_d, *flags = instr.operands
    values = [f.value for f in flags]
    negate_a, negate_b = values[0] < 0, values[1] < 0
    transposes = values[2:]
    if isinstance(a, Vec):
        left = emit.temp(f"({', '.join(emit.src(i, 'u32') for i in a.items)},)")
        bits = (negate_a, negate_b, False, bool(transposes[0]) if transposes else False)
    else:
        left = emit.src(a, "u64")
        bits = (negate_a, negate_b, *(bool(t) for t in transposes or (0, 0)))
    scale = emit.const(scale_d, "pred") if isinstance(scale_d, Imm) else emit.src(scale_d, "pred")
    rows = emit.rows(d.items)
    if rows is None:
        raise PtxError("wgmma accumulators that are not distinct 32-bit registers")
    rows = f"slice({rows.replace(':', ', ')})" if ":" in rows else rows
    emit.call(wgmma, left, emit.src(b, "u64"), scale, str(n), str(kinds[1] == "bf16"), repr(bits), "RFF", rows)


@op("wgmma.fence", "wgmma.commit_group")
def wgmma_fence(emit: Emit, instr: Instr) -> None:
    emit.call(_fence_or_commit, repr(instr.parts[1]))


def _fence_or_commit(split: Split, mask: np.ndarray, index: int, action: str) -> None:
    if action == "commit_group":
        state = warpgroup(split).warps[split.warp.index % 4]
        state[1].append(state[0])
    if split.machine.observer is not None:
        split.machine.observer.wgmma_sync(split, mask, index, action, 0)


@op("wgmma.wait_group", blocking=True)
def wgmma_wait(emit: Emit, instr: Instr) -> None:
    emit.blocking(_wait_group, str(instr.operands[0].value))


def _wait_group(split: Split, mask: np.ndarray, index: int, count: int) -> bool:
    group = warpgroup(split)
    commits = group.warps[split.warp.index % 4][1]
    if len(commits) > count and group.done < commits[len(commits) - count - 1]:
        return split.park(group)
    if split.machine.observer is not None:
        split.machine.observer.wgmma_sync(split, mask, index, "wait_group", count)
    return False


__all__ = ["Reg"]
