"""Integer arithmetic, logic, shifts, comparison and selection (PTX ISA 9.7.1, 9.7.6, 9.7.8)."""

from __future__ import annotations

import numpy as np

from .parser import Imm, Instr, Pair, PtxError, Sink
from .translate import VIEWS, Emit, op

WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_FLOATS = ("f32", "f64", "f16", "bf16", "f32x2", "f16x2", "bf16x2")
COMPARE = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "lo": "less",
    "ls": "less_equal",
    "hi": "greater",
    "hs": "greater_equal",
}


def simple(emit: Emit, instr: Instr, function: str) -> None:
    kind = instr.type
    sources = [emit.src(x, kind) for x in instr.operands[1:]]
    emit.ufunc(function, sources, instr.operands[0], kind)


def integer(name: str, function: str) -> None:
    """Register `name` for integer types; float forms of the same mnemonic live in ops_float."""

    def emitter(emit: Emit, instr: Instr) -> None:
        simple(emit, instr, function)

    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        op(f"{name}.{kind}")(emitter)


for _name, _function in (
    ("add", "np_add"),
    ("sub", "np_subtract"),
    ("min", "np_minimum"),
    ("max", "np_maximum"),
    ("neg", "np_negative"),
    ("abs", "np_absolute"),
):
    integer(_name, _function)


@op("min.relu", "max.relu")
def minmax_relu(emit: Emit, instr: Instr) -> None:
    """.relu clamps negative results to zero (PTX ISA 9.7.1.14, .relu.s32)."""
    kind = instr.type
    if kind != "s32":
        raise PtxError(f"{instr.op} is not modelled")
    simple(emit, instr, "np_minimum" if instr.base == "min" else "np_maximum")
    emit.put(instr.operands[0], kind, f"np_maximum({emit.src(instr.operands[0], kind)}, np_s32(0))")


@op("add.cc", "addc", "sub.cc", "subc")
def add_carry(emit: Emit, instr: Instr) -> None:
    """Extended-precision add and subtract; the carry flag is kept per warp as a row."""
    kind = instr.type
    if VIEWS[kind] not in ("u32", "s32"):
        raise PtxError("only 32-bit carry arithmetic is modelled")
    a, b = (emit.src(x, "u32") for x in instr.operands[1:])
    carry_in = "c" in instr.base[3:]
    emit.line("CC = S.warp.engine.setdefault('carry', np.zeros(32, np.uint64))")
    if instr.base.startswith("add"):
        total = emit.temp(f"{a}.astype(np_u64) + {b}" + (" + CC" if carry_in else ""))
    else:
        total = emit.temp(f"{a}.astype(np_u64) - {b}" + (" - CC" if carry_in else ""))
    emit.put(instr.operands[0], "u32", f"{total}.astype(np_u32)")
    if instr.has("cc"):
        emit.line(f"copyto(CC, ({total} >> np_u64(32)) & np_u64(1), where={emit.mask})")


@op("mul", "mul24")
def mul(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    destination, a, b = instr.operands
    if instr.has("wide"):
        wide = WIDER[VIEWS[kind]]
        emit.ufunc("np_multiply", [emit.src(a, kind), emit.src(b, kind)], destination, wide, f", dtype=np_{wide}")
    elif instr.has("hi"):
        emit.put(destination, kind, emit.value(_high_product, emit.src(a, kind), emit.src(b, kind)))
    else:
        emit.ufunc("np_multiply", [emit.src(a, kind), emit.src(b, kind)], destination, kind)


def _high_product(split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (np.multiply(a, b, dtype=wide) >> wide(32)).astype(a.dtype)
    bits = 8 * a.dtype.itemsize
    values = [((int(x) * int(y)) >> bits) & ((1 << bits) - 1) for x, y in zip(a, b, strict=True)]
    return np.array(values, f"u{a.dtype.itemsize}").view(a.dtype)


@op("mad", "mad24")
def mad(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    destination, a, b, c = instr.operands
    if instr.has("wide"):
        wide = WIDER[VIEWS[kind]]
        product = emit.temp(f"np_multiply({emit.src(a, kind)}, {emit.src(b, kind)}, dtype=np_{wide})")
        emit.ufunc("np_add", [product, emit.src(c, wide)], destination, wide)
    elif instr.has("hi"):
        product = emit.value(_high_product, emit.src(a, kind), emit.src(b, kind))
        emit.ufunc("np_add", [product, emit.src(c, kind)], destination, kind)
    else:
        product = emit.temp(f"np_multiply({emit.src(a, kind)}, {emit.src(b, kind)})")
        emit.ufunc("np_add", [product, emit.src(c, kind)], destination, kind)


def _divide(split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Truncating division; division by zero gives all ones, as hardware does (PTX leaves it unspecified)."""
    if a.dtype.kind == "u":
        return np.where(
            b == 0, a.dtype.type(np.iinfo(a.dtype).max), np.floor_divide(a, np.where(b == 0, 1, b).astype(a.dtype))
        )
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = np.floor_divide(a, safe)
    fix = (np.remainder(a, safe) != 0) & ((a < 0) != (safe < 0))
    return np.where(b == 0, a.dtype.type(-1), quotient + fix.astype(a.dtype))


def _modulo(split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _divide(split, mask, index, a, b) * b


@op("div.u32", "div.s32", "div.u64", "div.s64", "div.u16", "div.s16")
def div(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    a, b = (emit.src(x, kind) for x in instr.operands[1:])
    emit.put(instr.operands[0], kind, emit.value(_divide, a, b))


@op("rem")
def rem(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    a, b = (emit.src(x, kind) for x in instr.operands[1:])
    emit.put(instr.operands[0], kind, emit.value(_modulo, a, b))


@op("and", "or", "xor")
def logic(emit: Emit, instr: Instr) -> None:
    function = {"and": "np_bitwise_and", "or": "np_bitwise_or", "xor": "np_bitwise_xor"}[instr.base]
    simple(emit, instr, function)


@op("not")
def invert(emit: Emit, instr: Instr) -> None:
    simple(emit, instr, "np_invert")


@op("cnot")
def cnot(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    emit.put(instr.operands[0], kind, f"({emit.src(instr.operands[1], kind)} == 0).astype(np_{VIEWS[kind]})")


@op("shl", "shr")
def shift(emit: Emit, instr: Instr) -> None:
    """Amounts at or above the width give 0 (sign for shr.s); numpy defines them the same way."""
    kind = instr.type
    destination, a, b = instr.operands
    view = VIEWS[kind]
    amount = emit.src(b, "u32")
    if view in ("u16", "s16"):
        amount = emit.temp(f"np_minimum({amount}, np_u32(16))")
    if view != "u32":
        amount = emit.temp(f"{amount}.astype(np_{view})")
    function = "np_left_shift" if instr.base == "shl" else "np_right_shift"
    emit.ufunc(function, [emit.src(a, kind), amount], destination, kind)


def _funnel(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, left: bool, wrap: bool
) -> np.ndarray:
    wide = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    amount = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
    if left:
        return ((wide << amount) >> np.uint64(32)).astype(np.uint32)
    return (wide >> amount).astype(np.uint32)


@op("shf")
def funnel_shift(emit: Emit, instr: Instr) -> None:
    a, b, c = (emit.src(x, "u32") for x in instr.operands[1:])
    emit.put(instr.operands[0], "u32", emit.value(_funnel, a, b, c, str(instr.has("l")), str(instr.has("wrap"))))


def _lop3(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int
) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    for minterm in range(8):
        if table >> minterm & 1:
            out |= (a if minterm & 4 else ~a) & (b if minterm & 2 else ~b) & (c if minterm & 1 else ~c)
    return out


@op("lop3")
def lop3(emit: Emit, instr: Instr) -> None:
    a, b, c = (emit.src(x, "u32") for x in instr.operands[1:4])
    emit.put(instr.operands[0], "u32", emit.value(_lop3, a, b, c, str(instr.operands[4].value & 255)))


def _permute(split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt in its default mode: each selector nibble picks a byte, its top bit replicates the sign."""
    wide = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(32, np.uint32)
    for byte in range(4):
        nibble = (selector >> np.uint32(4 * byte)) & np.uint32(15)
        value = (wide >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(value & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, value).astype(np.uint32) << np.uint32(8 * byte)
    return out


@op("prmt.b32")
def prmt(emit: Emit, instr: Instr) -> None:
    if len(instr.parts) > 2:
        raise PtxError(f"prmt mode {instr.op} is not modelled")
    a, b, c = (emit.src(x, "u32") for x in instr.operands[1:])
    emit.put(instr.operands[0], "u32", emit.value(_permute, a, b, c))


def _popc(split: object, mask: object, index: int, a: np.ndarray) -> np.ndarray:
    # numpy has bitwise_count only from 2.0 on.
    return np.unpackbits(a.view(np.uint8).reshape(32, -1), axis=1).sum(1).astype(np.uint32)


def _clz(split: object, mask: object, index: int, a: np.ndarray) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    return np.array([width - int(x).bit_length() for x in a], np.uint32)


def _bfind(split: object, mask: object, index: int, a: np.ndarray, shift: bool) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    values = []
    for x in a.tolist():
        x = ~x if x < 0 else x
        at = x.bit_length() - 1
        values.append(0xFFFFFFFF if at < 0 else (width - 1 - at if shift else at))
    return np.array(values, np.uint32)


def _brev(split: object, mask: object, index: int, a: np.ndarray) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    return np.array([int(f"{int(x):0{width}b}"[::-1], 2) for x in a], a.dtype)


@op("popc")
def popc(emit: Emit, instr: Instr) -> None:
    emit.put(instr.operands[0], "u32", emit.value(_popc, emit.src(instr.operands[1], instr.type)))


@op("clz")
def clz(emit: Emit, instr: Instr) -> None:
    emit.put(instr.operands[0], "u32", emit.value(_clz, emit.src(instr.operands[1], instr.type)))


@op("bfind")
def bfind(emit: Emit, instr: Instr) -> None:
    emit.put(
        instr.operands[0],
        "u32",
        emit.value(_bfind, emit.src(instr.operands[1], instr.type), str(instr.has("shiftamt"))),
    )


@op("brev")
def brev(emit: Emit, instr: Instr) -> None:
    emit.put(instr.operands[0], instr.type, emit.value(_brev, emit.src(instr.operands[1], instr.type)))


def _extract(
    split: object, mask: object, index: int, a: np.ndarray, position: np.ndarray, length: np.ndarray
) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    out = []
    for x, start, count in zip(a.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True):
        raw = (x & ((1 << width) - 1)) >> start if start < width else 0
        value = raw & ((1 << count) - 1)
        if a.dtype.kind == "i" and count:
            sign = (x >> min(start + count - 1, width - 1)) & 1
            if sign:
                value |= -1 << max(min(count, width - start), 0)
        out.append(value & ((1 << width) - 1))
    return np.array(out, f"u{a.dtype.itemsize}").view(a.dtype)


def _insert(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray
) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    out = []
    for x, y, start, count in zip(
        a.tolist(), b.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True
    ):
        field = (((1 << count) - 1) << start) & ((1 << width) - 1)
        out.append((y & ~field) | ((x << start) & field))
    return np.array(out, a.dtype)


@op("bfe")
def bfe(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    d, a, b, c = instr.operands
    emit.put(d, kind, emit.value(_extract, emit.src(a, kind), emit.src(b, "u32"), emit.src(c, "u32")))


@op("bfi")
def bfi(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    d, a, b, c, e = instr.operands
    emit.put(d, kind, emit.value(_insert, emit.src(a, kind), emit.src(b, kind), emit.src(c, "u32"), emit.src(e, "u32")))


def _bytes_dot(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, signed_a: bool, signed_b: bool
) -> np.ndarray:
    x = a.view(np.int8 if signed_a else np.uint8).reshape(32, 4).astype(np.int64)
    y = b.view(np.int8 if signed_b else np.uint8).reshape(32, 4).astype(np.int64)
    return ((x * y).sum(1) + c.astype(np.int64)).astype(np.uint32)


@op("dp4a")
def dp4a(emit: Emit, instr: Instr) -> None:
    kinds = instr.types
    a, b, c = (emit.src(x, "u32") for x in instr.operands[1:])
    emit.put(instr.operands[0], "u32", emit.value(_bytes_dot, a, b, c, str(kinds[0] == "s32"), str(kinds[-1] == "s32")))


# Comparison and selection -------------------------------------------------------------------------------------------


def float_source(emit: Emit, operand: object, kind: str) -> str:
    """A float array expression; bf16 is widened to fp32."""
    if kind == "bf16":
        return emit.temp(f"({emit.src(operand, 'u16')}.astype(np_u32) << np_u32(16)).view(np_f32)")
    return emit.src(operand, kind)


TINY = np.float32(1.1754944e-38)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal fp32 to signed zero."""
    return x * (np.abs(x) >= TINY)


def flushed_source(emit: Emit, instr: Instr, operand: object, kind: str) -> str:
    """A float operand, with .ftz a subnormal one as zero."""
    source = float_source(emit, operand, kind)
    if not instr.has("ftz") or kind != "f32":
        return source
    if isinstance(operand, Imm):
        return emit.program.constant(flush(emit.program.shared_names[source]))
    return emit.temp(f"{emit.bind(flush)}({source})")


def _compare(emit: Emit, instr: Instr, a: str, b: str, relation: str, kind: str) -> str:
    is_float = kind in _FLOATS
    if relation in ("num", "nan"):
        nan = f"(np_isnan({a}) | np_isnan({b}))"
        return emit.temp(nan if relation == "nan" else f"~{nan}")
    if is_float and relation == "ne":
        # Ordered not-equal is false for NaN, numpy's is true.
        return emit.temp(f"np_less({a}, {b}) | np_greater({a}, {b})")
    if is_float and len(relation) == 3 and relation.endswith("u"):
        opposite = {
            "equ": None,
            "neu": "equal",
            "ltu": "greater_equal",
            "leu": "greater",
            "gtu": "less_equal",
            "geu": "less",
        }[relation]
        if relation == "equ":
            return emit.temp(f"~(np_less({a}, {b}) | np_greater({a}, {b}))")
        return emit.temp(f"~np_{opposite}({a}, {b})")
    return f"np_{COMPARE[relation]}({a}, {b})"


def _combination(instr: Instr) -> str | None:
    """The operator that combines the comparison with a predicate operand, if there is one."""
    return next((s for p, s in (("and", "&"), ("or", "|"), ("xor", "^")) if p in instr.parts[2:]), None)


@op("setp")
def setp(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    relation = instr.parts[1]
    signless = {"b16": "u16", "b32": "u32", "b64": "u64"}.get(kind, kind)
    a = flushed_source(emit, instr, instr.operands[1], signless)
    b = flushed_source(emit, instr, instr.operands[2], signless)
    target = instr.operands[0]
    sign = _combination(instr)
    if (
        sign is None
        and not isinstance(target, Pair)
        and relation in COMPARE
        and not (kind in _FLOATS and relation == "ne")
    ):
        emit.ufunc(f"np_{COMPARE[relation]}", [a, b], target, "pred")
        return
    result = emit.temp(_compare(emit, instr, a, b, relation, kind))
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    if sign is None:
        emit.put(first, "pred", result)
        emit.put(second, "pred", f"~{result}")
        return
    extra = emit.temp(emit.src(instr.operands[3], "pred") + " | False")
    emit.put(first, "pred", f"{result} {sign} {extra}")
    emit.put(second, "pred", f"~{result} {sign} {extra}")


@op("set")
def set_value(emit: Emit, instr: Instr) -> None:
    out, kind = instr.types[-2:]
    result = _compare(
        emit,
        instr,
        flushed_source(emit, instr, instr.operands[1], kind),
        flushed_source(emit, instr, instr.operands[2], kind),
        instr.parts[1],
        kind,
    )
    if sign := _combination(instr):
        result = emit.temp(f"({result}) {sign} {emit.src(instr.operands[3], 'pred')}")
    if VIEWS[out] == "f32":
        emit.put(instr.operands[0], "f32", f"{result}.astype(np_f32)")
    else:
        emit.put(instr.operands[0], out, f"(-({result}.astype(np_s32))).view(np_{VIEWS[out]})")


@op("selp")
def selp(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    d, a, b, p = instr.operands
    bits = {"f32": "u32", "f64": "u64", "f16": "u16"}.get(VIEWS[kind], VIEWS[kind])
    sources = [emit.src(x, kind) + f".view(np_{bits})" if isinstance(x, Imm) else emit.src(x, bits) for x in (a, b)]
    emit.put(d, bits, f"where({emit.src(p, 'pred')}, {sources[0]}, {sources[1]})")


@op("slct")
def slct(emit: Emit, instr: Instr) -> None:
    kind, test = instr.types
    d, a, b, c = instr.operands
    emit.put(d, kind, f"where({emit.src(c, test)} >= 0, {emit.src(a, kind)}, {emit.src(b, kind)})")


@op("sad")
def sad(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    a, b, c = (emit.src(x, kind) for x in instr.operands[1:])
    emit.put(instr.operands[0], kind, f"np_maximum({a}, {b}) - np_minimum({a}, {b}) + {c}")
