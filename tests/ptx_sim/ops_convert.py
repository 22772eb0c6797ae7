"""cvt and mov (PTX ISA 9.7.9.2, 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

import numpy as np

from .ops_float import canonical, directed, flush_result, round_bf16, round_f16, saturate, some
from .ops_int import flushed_source
from .parser import Imm, Instr, PtxError, Reg, Sym, Vec
from .translate import VIEWS, Emit, op

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_E4M3_MAX, _E5M2_MAX = 448.0, 57344.0


def _to_integer(x: np.ndarray, rounding: str, target: str) -> np.ndarray:
    """Float to integer saturates; NaN becomes 0, or the top bit alone where either side has 64 bits (9.7.9.21)."""
    dtype = np.dtype(f"{'u' if target[0] == 'u' else 'i'}{int(target[1:]) // 8}")
    info = np.iinfo(dtype)
    y = _ROUND[rounding](x.astype(np.float64))
    low, high = y <= info.min, y >= info.max
    safe = np.where(np.isnan(y) | low | high, 0, y).astype(np.int64 if target != "u64" else np.uint64).astype(dtype)
    out = np.where(high, info.max, np.where(low, info.min, safe)).astype(dtype)
    if 8 in (x.dtype.itemsize, dtype.itemsize):
        top = np.array(1 << (8 * dtype.itemsize - 1), f"u{dtype.itemsize}").view(dtype)
        return np.where(np.isnan(x), top, out)
    return out


def _float_to_f32(split: object, mask: object, index: int, x: np.ndarray, mode: str) -> np.ndarray:
    return x.astype(np.float32) if mode == "rn" else directed(x.astype(np.float64), mode)


def _round_f32(x: np.ndarray, rounding: str) -> np.ndarray:
    return canonical(_ROUND[rounding](x))


def half_directed(x: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """fp32 -> fp16 or bf16 bits with rounding rn or rz."""
    if mode == "rn":
        return round_bf16(x) if kind == "bf16" else round_f16(x)
    if kind == "bf16":
        out = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FFF), out)
    near = x.astype(np.float16)
    away = np.abs(near.astype(np.float32)) > np.abs(x)
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.where(away, np.nextafter(near, np.float16(0)), near).view("u2"))


def _pack(
    split: object, mask: object, index: int, high: np.ndarray, low: np.ndarray, kind: str, mode: str, relu: bool
) -> np.ndarray:
    if mode == "rn" and kind == "bf16" and not relu:
        # The hot path of attention kernels: both halves rounded in place, NaN checked once.
        a, b = high.view(np.uint32), low.view(np.uint32)
        out = (a + (((a >> _16) & _1) + _7FFF)) & _HIGH
        out |= (b + (((b >> _16) & _1) + _7FFF)) >> _16
        nan = (high != high) | (low != low)
        if True in nan.tolist():
            return (round_bf16(high).astype(np.uint32) << _16) | round_bf16(low)
        return out
    if mode == "rn" and kind == "f16" and not relu and not some((high != high) | (low != low)):
        pair = np.empty((len(high), 2), np.float16)
        pair[:, 0], pair[:, 1] = low, high
        return pair.view(np.uint32)[:, 0]
    if relu:
        high, low = np.maximum(high, np.float32(0)), np.maximum(low, np.float32(0))
    bits = [half_directed(x, kind, mode).astype(np.uint32) for x in (high, low)]
    return (bits[0] << _16) | bits[1]


_1, _16, _7FFF, _HIGH = np.uint32(1), np.uint32(16), np.uint32(0x7FFF), np.uint32(0xFFFF0000)


def _fp8_tables(mantissa: int, bias: int, top: float) -> tuple[np.ndarray, np.ndarray]:
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    values = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias - mantissa), (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
    )
    keep = values <= top
    return codes[keep], values[keep]


FP8 = {"e4m3": _fp8_tables(3, 7, _E4M3_MAX), "e5m2": _fp8_tables(2, 15, _E5M2_MAX)}


def to_fp8(x: np.ndarray, kind: str) -> np.ndarray:
    """fp32 -> fp8 code, nearest even, saturating to the largest finite value; NaN to 0x7F."""
    codes, values = FP8[kind]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    at = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below, above = values[at - 1], values[at]
    middle = (below + above) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (codes[at] % 2 == 0))
    code = np.where(up, codes[at], codes[at - 1]) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint32)


def from_fp8(code: np.ndarray, kind: str) -> np.ndarray:
    codes, values = FP8[kind]
    table = np.full(128, np.nan)
    table[codes] = values
    if kind == "e5m2":
        table[0x7C] = np.inf
    out = table[code & 0x7F]
    return np.where(code & 0x80, -out, out).astype(np.float32)


def _pack_fp8(split: object, mask: object, index: int, high: np.ndarray, low: np.ndarray, kind: str) -> np.ndarray:
    return ((to_fp8(high, kind) << np.uint32(8)) | to_fp8(low, kind)).astype(np.uint16)


def _unpack_fp8(split: object, mask: object, index: int, x: np.ndarray, kind: str) -> np.ndarray:
    codes = [(x >> np.uint16(8 * i)) & np.uint16(255) for i in (0, 1)]
    halves = [round_f16(from_fp8(code, kind)) for code in codes]
    return halves[0].astype(np.uint32) | (halves[1].astype(np.uint32) << np.uint32(16))


def _tf32(split: object, mask: object, index: int, x: np.ndarray, rounding: str) -> np.ndarray:
    bits = x.view(np.uint32)
    if rounding == "rna":
        rounded = bits + np.uint32(0x1000)
    elif rounding == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    else:
        rounded = bits
    # A NaN is cut off, not rounded.
    return np.where(np.isnan(x), bits, rounded) & np.uint32(0xFFFFE000)


@op("cvt")
def cvt(emit: Emit, instr: Instr) -> None:
    kinds = instr.types
    target, source = kinds[-2], kinds[-1]
    d, *operands = instr.operands
    mode = next((p for p in instr.parts if p in ("rn", "rz", "rm", "rp", "rna")), "rn")
    if target in ("bf16x2", "f16x2") and source == "f32":
        names = [emit.src(x, "f32") for x in operands]
        emit.put(d, "b32", emit.value(_pack, *names, repr(target[:-2]), repr(mode), str(instr.has("relu"))))
    elif target in ("e4m3x2", "e5m2x2") and source == "f32":
        names = [emit.src(x, "f32") for x in operands]
        emit.put(d, "u16", emit.value(_pack_fp8, *names, repr(target[:-2])))
    elif source in ("e4m3x2", "e5m2x2") and target == "f16x2":
        emit.put(d, "b32", emit.value(_unpack_fp8, emit.src(operands[0], "u16"), repr(source[:-2])))
    elif target == "tf32":
        emit.put(d, "b32", emit.value(_tf32, emit.src(operands[0], "f32"), repr(mode)))
    elif target in _INTEGERS and source in _INTEGERS:
        _integer_to_integer(emit, instr, d, operands[0], target, source)
    elif target in _INTEGERS:
        rounding = next((p for p in instr.parts if p in _ROUND), "rzi")
        value = flushed_source(emit, instr, operands[0], source)
        emit.put(d, target, f"{emit.bind(_to_integer)}({value}, '{rounding}', '{target}')")
    elif source in _INTEGERS:
        # fp32 from 64-bit integers directly: fp64 in between would round twice.
        direct = target == "f32" and mode == "rn"
        wide = emit.temp(f"{emit.src(operands[0], source)}.astype({'np_f32' if direct else 'np_f64'})")
        _from_wide(emit, d, target, wide, mode)
    else:
        _float_to_float(emit, instr, d, operands[0], target, source, mode)


def _integer_to_integer(emit: Emit, instr: Instr, d: Reg, a: object, target: str, source: str) -> None:
    value = emit.src(a, source)
    if instr.has("sat"):
        info = np.iinfo(f"{'u' if target[0] == 'u' else 'i'}{int(target[1:]) // 8}")
        value = emit.temp(f"np.clip({value}.astype(np_s64), {info.min}, {min(info.max, 2**63 - 1)})")
    emit.put(d, target, f"{value}.astype(np_{target})")


def _from_wide(emit: Emit, d: Reg, target: str, value: str, mode: str) -> None:
    if target == "f64":
        emit.put(d, "f64", f"{value}.astype(np_f64)")
    elif target == "f32":
        emit.put(d, "f32", emit.value(_float_to_f32, value, repr(mode)))
    elif target in ("f16", "bf16"):
        single = emit.temp(f"{value}.astype(np_f32)")
        emit.put(d, "u16", f"{emit.bind(half_directed)}({single}, '{target}', '{mode}')")
    else:
        raise PtxError(f"cvt to {target} is not modelled")


def _float_to_float(emit: Emit, instr: Instr, d: Reg, a: object, target: str, source: str, mode: str) -> None:
    value = flushed_source(emit, instr, a, source)
    rounding = next((p for p in instr.parts if p in _ROUND), None)
    if rounding and target == source == "f32":
        value = emit.temp(f"{emit.bind(_round_f32)}({value}, '{rounding}')")
        if instr.has("sat"):
            value = emit.temp(f"{emit.bind(saturate)}({value})")
        emit.put(d, "f32", value)
        return
    if target == "f32" and source in ("f16", "bf16", "f32"):
        value = emit.temp(f"{value}.astype(np_f32)")
        if instr.has("ftz"):
            value = emit.temp(f"{emit.bind(flush_result)}({value})")
        elif source == "f16":
            value = emit.temp(f"{emit.bind(canonical)}({value})")
        if instr.has("sat"):
            value = emit.temp(f"{emit.bind(saturate)}({value})")
        emit.put(d, "f32", value)
        return
    _from_wide(emit, d, target, value, mode)


@op("mov")
def mov(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    d, a = instr.operands
    if kind == "b128":
        _mov_b128(emit, d, a)
    elif isinstance(d, Vec):
        _unpack(emit, d, a, kind)
    elif isinstance(a, Vec):
        _pack_vector(emit, d, a, kind)
    elif kind == "pred":
        emit.put(d, "pred", emit.src(a, "pred"))
    else:
        bits = {"f32": "u32", "f64": "u64", "f16": "u16", "bf16": "u16", "s32": "u32", "s64": "u64", "s16": "u16"}
        view = bits.get(VIEWS[kind], VIEWS[kind])
        if isinstance(a, Imm) and a.is_float and kind == "f64":
            emit.put(d, "f64", emit.src(a, "f64"))
        elif isinstance(a, Imm) and a.is_float and a.bits == 64 and kind == "f32":
            emit.put(d, "f32", emit.src(a, "f32"))
        else:
            emit.put(d, view, emit.src(a, view))


def _mov_b128(emit: Emit, d: object, a: object) -> None:
    if isinstance(d, Vec):
        for i, item in enumerate(d.items):
            emit.put(item, "u64", f"{emit.name(a)}[{i}]")
    else:
        parts = [emit.src(item, "u64") for item in a.items]
        for i, part in enumerate(parts):
            emit.line(f"copyto({emit.name(d)}[{i}], {part}, where={emit.mask})")


def _unpack(emit: Emit, d: Vec, a: object, kind: str) -> None:
    """mov.b64 {lo, hi}, %rd and the 16- and 8-bit forms."""
    if kind in ("b64", "f64", "u64") and len(d.items) == 2 and isinstance(a, Reg):
        name = emit.name(a)
        emit.put(d.items[0], "u32", f"{name}l")
        emit.put(d.items[1], "u32", f"{name}h")
        return
    source = emit.src(a, {"b64": "u64", "b32": "u32", "u32": "u32", "b16": "u16"}[kind])
    width = int(VIEWS[kind][1:]) // len(d.items)
    copy = emit.temp(f"{source}.copy()")
    for i, item in enumerate(d.items):
        emit.put(item, f"u{width}", f"({copy} >> np_{VIEWS[kind]}({i * width})).astype(np_u{width})")


def _pack_vector(emit: Emit, d: Reg, a: Vec, kind: str) -> None:
    width = int(VIEWS[kind][1:]) // len(a.items)
    if width == 32 and emit.where is None:
        name = emit.name(d)
        low, high = (emit.src(item, "u32") for item in a.items)
        emit.line(f"{name}l[:] = {low}")
        emit.line(f"{name}h[:] = {high}")
        return
    view = VIEWS[kind]
    terms = [
        f"({emit.src(item, f'u{width}')}.astype(np_{view}) << np_{view}({i * width}))" for i, item in enumerate(a.items)
    ]
    emit.put(d, view, " | ".join(terms))


@op("cvta")
def cvta(emit: Emit, instr: Instr) -> None:
    """Shared and local windows sit at fixed generic addresses; global, const and param ones are generic already."""
    from .memory import LOCAL_WINDOW, SHARED_WINDOW

    kind = instr.type
    d, a = instr.operands
    window = 0
    if any(p.startswith("shared") for p in instr.parts):
        window = SHARED_WINDOW
    elif instr.has("local"):
        window = LOCAL_WINDOW
    source = emit.src(a, kind)
    if not window:
        emit.put(d, kind, source)
    elif instr.has("to"):
        emit.put(d, kind, f"{source} - np_u64({window})")
    else:
        emit.put(d, kind, f"{source} + np_u64({window})")


@op("isspacep")
def isspacep(emit: Emit, instr: Instr) -> None:
    from .memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW

    d, a = instr.operands
    address = emit.src(a, "u64")
    space = instr.parts[1]
    if space in ("shared", "shared::cta"):
        emit.put(
            d, "pred", f"({address} >> np_u64({RANK_SHIFT})) == np_u64(({SHARED_WINDOW} + S.cta.base) >> {RANK_SHIFT})"
        )
    elif space.startswith("shared"):
        emit.put(d, "pred", f"({address} >= np_u64({SHARED_WINDOW})) & ({address} < np_u64({LOCAL_WINDOW}))")
    elif space == "local":
        emit.put(d, "pred", f"{address} >= np_u64({LOCAL_WINDOW})")
    else:
        emit.put(d, "pred", f"{address} < np_u64({SHARED_WINDOW})")


__all__ = ["Sym"]
