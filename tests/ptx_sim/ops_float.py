"""Floating-point arithmetic: fp32, fp64, fp16, bf16, packed forms and approximations (PTX ISA 9.7.3 to 9.7.5).

fma rounds once: products of fp32 are exact in fp64, and the fp64 sum is rounded to odd where it is a tie for fp32.
Directed roundings go through an fp64 sum rounded to odd, too; fp64 itself is computed with rational numbers.
An H200 judged the details that PTX leaves open: minimum and maximum order -0 below +0, and .ftz flushes operands before
anything else sees them. Its NaN results are 0x7FFFFFFF (0x7FFF in halves); plain and .rn fp32 add, sub, mul, fma and
div, approximations, minimum and maximum of NaNs, and fp64 keep the NaN of numpy, because a check would slow them down.
Approximations (ex2, lg2, rcp, rsqrt, tanh, sin, cos) are computed in higher precision and rounded, which lies inside
the error bounds that PTX states for them.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np

from .ops_int import float_source, flush, flushed_source
from .parser import Imm, Instr, PtxError
from .translate import Emit, op

CANONICAL = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
TINY = np.float32(1.1754944e-38)
_LOW = np.uint64(0x0FFFFFFF)
TINY_HALF = np.float32(2.0**-14)


def some(lanes: np.ndarray) -> bool:
    """any() of bools, for few of them several times as fast."""
    return b"\1" in lanes.tobytes()


def round_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, round to nearest even, NaN to 0x7FFF (PTX ISA 9.7.9.21)."""
    bits = x.view(np.uint32)
    out = ((bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FFF
    return out


def round_f16(x: np.ndarray) -> np.ndarray:
    """Floats -> fp16 bits, round to nearest even, NaN to 0x7FFF."""
    bits = x.astype(np.float16).view(np.uint16)
    nan = x != x
    if some(nan):
        bits[nan] = 0x7FFF
    return bits


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def odd_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """fp64 sum rounded to odd: rounding it again to fp32 or less, in any mode, is rounding the exact sum.

    Operands are fp32 values or products of two, so that nothing overflows or underflows in fp64.
    """
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    move = even & (error != 0) & np.isfinite(total)
    return np.where(move, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 fused multiply-add with one rounding."""
    product = a.astype(np.float64) * b
    total = product + c
    out = total.astype(np.float32)
    round_bits = (total.view(np.uint64) & _LOW) == 0
    if some(round_bits) and some(round_bits & (out != total)):
        # Perhaps a tie for fp32 (of fewer bits if subnormal) in the fp64 sum, which the exact sum decides.
        out = odd_sum(product, c.astype(np.float64)).astype(np.float32)
    return out


def canonical(x: np.ndarray) -> np.ndarray:
    """The NaN of the hardware for fp32."""
    nan = x != x
    if some(nan):
        x = np.where(nan, CANONICAL, x)
    return x


def flush_result(x: np.ndarray) -> np.ndarray:
    """Subnormal fp32 to signed zero, NaN to the canonical one."""
    normal = np.abs(x) >= TINY
    return canonical(x * normal) if b"\0" in normal.tobytes() else x


def saturate(x: np.ndarray) -> np.ndarray:
    """.sat: to [0, 1], NaN to +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


ARITH = {"add": "np_add", "sub": "np_subtract", "mul": "np_multiply"}


def _directed_sum(x: np.ndarray, y: np.ndarray, mode: str) -> np.ndarray:
    """x + y, exact in two fp64 numbers, to fp32. Toward -inf, zero is negative unless both terms are +0."""
    out = directed(odd_sum(x, y), mode)
    if mode == "rm":
        out = np.where((x + y == 0) & (np.signbit(x) | np.signbit(y)), np.float32(-0.0), out)
    return canonical(out)


def _rounded_directed(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, name: str, mode: str
) -> np.ndarray:
    """add, sub and mul with a directed rounding."""
    if a.dtype == np.float64:
        one = np.ones_like(a)
        if name == "mul":
            return exact_fma(a, b, np.copysign(0.0, np.copysign(1.0, a) * np.copysign(1.0, b)), mode)
        return exact_fma(a, one, b if name == "add" else -b, mode)
    x, y = a.astype(np.float64), b.astype(np.float64)
    if name == "mul":
        return canonical(directed(x * y, mode))
    return _directed_sum(x, y if name == "add" else -y, mode)


def _fma_directed(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    return _directed_sum(a.astype(np.float64) * b, c.astype(np.float64), mode)


def _round64(exact: Fraction, mode: str) -> float:
    """A rational number that is not zero to fp64."""
    toward = {"rn": 0.0, "rz": 0.0, "rm": -math.inf, "rp": math.inf}[mode]
    try:
        near = float(exact)
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
        return near if mode == "rn" or near == toward else math.copysign(sys.float_info.max, near)
    back = Fraction(near)
    wrong = {"rn": False, "rz": abs(back) > abs(exact), "rm": back > exact, "rp": back < exact}[mode]
    return math.nextafter(near, toward) if wrong else near


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """fp64 fused multiply-add with one rounding, with rational numbers: rare, hence lane by lane."""
    with np.errstate(all="ignore"):
        out = a * b + c
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        if not math.isfinite(z):
            out[i] = z
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact:
            out[i] = _round64(exact, mode)
        elif mode == "rm":
            positive = math.copysign(1, x) * math.copysign(1, y) > 0 and math.copysign(1, z) > 0
            out[i] = 0.0 if positive else -0.0
        else:
            out[i] = 0.0 if x and y else x * y + z
    return out


def _fma_double(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str
) -> np.ndarray:
    return exact_fma(a, b, c, mode)


def rounding_of(instr: Instr) -> str:
    return next((p for p in instr.parts if p in ("rz", "rm", "rp")), "rn")


def _sources(emit: Emit, instr: Instr, operands: tuple, kind: str) -> list[str]:
    """fp32 and fp64 operands; .ftz flushes those of fp32."""
    return [flushed_source(emit, instr, x, kind) for x in operands]


def directed(wide: np.ndarray, mode: str) -> np.ndarray:
    """Round fp64 to fp32 toward zero (rz), -inf (rm) or +inf (rp)."""
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    if mode == "rz":
        away = np.abs(back) > np.abs(wide)
        return np.where(away, np.nextafter(near, np.float32(0)), near)
    if mode == "rm":
        return np.where(back > wide, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(back < wide, np.nextafter(near, np.float32(np.inf)), near)


def _float_binary(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    name = instr.base
    d, a, b = instr.operands
    if kind == "f32x2":
        _packed_f32(emit, instr, ARITH[name])
        return
    if kind in ("f16", "f16x2", "bf16x2", "bf16"):
        _half_operation(emit, instr, name)
        return
    mode = rounding_of(instr)
    sources = _sources(emit, instr, (a, b), kind)
    if mode == "rn" and not instr.has("ftz") and not instr.has("sat"):
        emit.ufunc(ARITH[name], sources, d, kind)
        return
    if mode == "rn":
        t = emit.temp(f"{ARITH[name]}({', '.join(sources)})")
    else:
        t = emit.value(_rounded_directed, *sources, repr(name), repr(mode))
    emit.put(d, kind, _finish(emit, instr, t))


def _finish(emit: Emit, instr: Instr, t: str) -> str:
    """.ftz and .sat of a result."""
    if instr.has("ftz"):
        t = emit.temp(f"{emit.bind(flush_result)}({t})")
    if instr.has("sat"):
        t = emit.temp(f"{emit.bind(saturate)}({t})")
    return t


def _half_operation(emit: Emit, instr: Instr, name: str) -> None:
    kind = instr.type
    d, *operands = instr.operands
    flags = [str(instr.has(flag)) for flag in ("ftz", "sat")]
    emit.put(d, kind, emit.value(_half_binary, *(emit.src(x, kind) for x in operands), repr(name), repr(kind), *flags))


def _mixed_add(emit: Emit, instr: Instr) -> None:
    """add.f32.bf16 and its kin (sm_100): a 16-bit first operand, fp32 second operand and result."""
    d, a, b = instr.operands
    kind = instr.types[1]
    wide = emit.temp(f"{emit.bind(half_to_float)}({emit.src(a, kind)}, '{kind}')")
    emit.ufunc(ARITH[instr.base], [wide, emit.src(b, "f32")], d, "f32")


op(*[f"{n}{r}.f32.{k}" for n in ("add", "sub") for r in ("", ".rn") for k in ("f16", "bf16")])(_mixed_add)
for _name in ("add", "sub", "mul"):
    op(
        *[
            f"{_name}{r}{m}.{k}"
            for r in ("", ".rn", ".rz", ".rm", ".rp")
            for m in ("", ".ftz", ".sat", ".ftz.sat")
            for k in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
        ]
    )(_float_binary)


def pair_name(emit: Emit, operand: object) -> str:
    """A 64-bit register as 64 fp32 values: lane i's pair at 2 i and 2 i + 1."""
    from .parser import Reg

    if isinstance(operand, Reg):
        return f"{emit.name(operand)}p"
    return emit.temp(f"{emit.src(operand, 'u64')}.view(np_f32)")


def _pair_source(emit: Emit, instr: Instr, operand: object) -> str:
    name = pair_name(emit, operand)
    return emit.temp(f"{emit.bind(flush)}({name})") if instr.has("ftz") else name


def _packed_f32(emit: Emit, instr: Instr, function: str) -> None:
    d, a, b = instr.operands
    if instr.has("rz") or instr.has("rm") or instr.has("rp"):
        raise PtxError(f"{instr.op}: directed rounding of packed fp32 is not modelled")
    if emit.where is None and not instr.has("ftz"):
        emit.line(f"{function}({pair_name(emit, a)}, {pair_name(emit, b)}, {emit.name(d)}p)")
        return
    t = emit.temp(f"{function}({_pair_source(emit, instr, a)}, {_pair_source(emit, instr, b)})")
    if instr.has("ftz"):
        t = emit.temp(f"{emit.bind(flush_result)}({t})")
    emit.put(d, "u64", f"{t}.view(np_u64)")


def half_to_float(x: np.ndarray, kind: str) -> np.ndarray:
    """f16x2 or bf16x2 registers (or scalar ones) -> fp32 values, two per lane for packed kinds."""
    if kind.endswith("x2"):
        x = x.view(np.uint16)
    return widen_bf16(x.view(np.uint16)) if kind.startswith("bf16") else x.view(np.float16).astype(np.float32)


def float_to_half(x: np.ndarray, kind: str) -> np.ndarray:
    bits = round_bf16(x.astype(np.float32)) if kind.startswith("bf16") else round_f16(x)
    if kind.endswith("x2"):
        return bits.view(np.uint32)
    return bits if kind.startswith("bf16") else bits.view(np.float16)


def _half_binary(
    split: object,
    mask: object,
    index: int,
    a: np.ndarray,
    b: np.ndarray,
    name: str,
    kind: str,
    ftz: bool = False,
    sat: bool = False,
) -> np.ndarray:
    values = [half_to_float(x, kind) for x in (a, b)]
    if ftz:
        values = [_flush_half(x) for x in values]
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}.get(name) or EXTREMES[name][0]
    out = function(*values)
    if name in EXTREMES:
        out = signed_zeros(out, *values, EXTREMES[name][1])
    if ftz:
        out = _flush_half(out)
    return float_to_half(saturate(out) if sat else out, kind)


def _flush_half(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < TINY_HALF, np.copysign(np.float32(0), x), x)


def _half_fma(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, relu: bool
) -> np.ndarray:
    # The product of halves is exact in fp32 and fp64; the sum is rounded to odd in fp64 and on the way to fp32.
    product = half_to_float(a, kind).astype(np.float64) * half_to_float(b, kind)
    exact = odd_sum(product, half_to_float(c, kind).astype(np.float64))
    near = directed(exact, "rz")
    inexact = near.astype(np.float64) != exact
    bits = near.view(np.uint32)
    out = np.where(inexact & np.isfinite(near), bits | np.uint32(1), bits).view(np.float32)
    if relu:
        out = np.maximum(out, np.float32(0))
    return float_to_half(out, kind)


def _fma_single(emit: Emit, instr: Instr, sources: list[str]) -> str:
    mode = rounding_of(instr)
    if mode == "rn":
        return emit.temp(f"{emit.bind(fused)}({', '.join(sources)})")
    return emit.temp(f"{emit.bind(_fma_directed)}({', '.join(sources)}, '{mode}')")


@op("fma", "mad.f32", "mad.rn.f32", "mad.rn.ftz.f32")
def fma(emit: Emit, instr: Instr) -> None:
    d, a, b, c = instr.operands
    if len(instr.types) == 2:
        # Mixed precision (sm_100): 16-bit factors, fp32 addend and result.
        kind = instr.types[1]
        factors = [emit.temp(f"{emit.bind(half_to_float)}({emit.src(x, kind)}, '{kind}')") for x in (a, b)]
        emit.put(d, "f32", f"{emit.bind(fused)}({factors[0]}, {factors[1]}, {emit.src(c, 'f32')})")
        return
    kind = instr.type
    if kind == "f32x2":
        sources = [_pair_source(emit, instr, x) for x in (a, b, c)]
        emit.put(d, "u64", f"{_finish(emit, instr, _fma_single(emit, instr, sources))}.view(np_u64)")
    elif kind == "f32":
        sources = _sources(emit, instr, (a, b, c), kind)
        emit.put(d, kind, _finish(emit, instr, _fma_single(emit, instr, sources)))
    elif kind == "f64":
        sources = [emit.src(x, kind) for x in (a, b, c)]
        emit.put(d, kind, emit.value(_fma_double, *sources, repr(rounding_of(instr))))
    else:
        sources = [emit.src(x, kind) for x in (a, b, c)]
        emit.put(d, kind, emit.value(_half_fma, *sources, repr(kind), str(instr.has("relu"))))


EXTREMES = {
    "min": (np.fmin, False),
    "max": (np.fmax, True),
    "min.NaN": (np.minimum, False),
    "max.NaN": (np.maximum, True),
}


def signed_zeros(out: np.ndarray, a: np.ndarray, b: np.ndarray, largest: bool) -> np.ndarray:
    """The minimum or maximum of two zeros: -0 is less than +0, which numpy leaves open."""
    zero = (a == 0) & (b == 0)
    negative = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
    return np.where(zero, np.where(negative, out.dtype.type(-0.0), out.dtype.type(0.0)), out)


def _settle(out: np.ndarray, a: np.ndarray, b: np.ndarray, largest: bool, ftz: bool) -> np.ndarray:
    out = signed_zeros(out, a, b, largest)
    return flush(out) if ftz else out


def _extreme(emit: Emit, instr: Instr, name: str, operands: tuple, sources: list[str]) -> str:
    function, largest = EXTREMES[name]
    ftz = instr.has("ftz") and instr.type == "f32"
    t = emit.temp(f"{emit.bind(function)}({', '.join(sources)})")
    settle = f"{t} = {emit.bind(_settle)}({t}, {', '.join(sources)}, {largest}, {ftz})"
    if ftz:
        # To flush is monotonic, so the result is flushed and not the operands.
        emit.line(f"if {emit.bind(some)}({emit.bind(np.abs)}({t}) < {emit.bind(TINY)}): {settle}")
    elif not any(isinstance(x, Imm) and x.value for x in operands):
        # Two zeros need one in the result; their low bytes, which few other numbers have, are quick to find.
        emit.line(f"if b'\\0\\0\\0' in {t}.tobytes(): {settle}")
    if name.endswith("NaN") and instr.type == "f32":
        t = emit.temp(f"{emit.bind(canonical)}({t})")
    return t


def _minmax(emit: Emit, instr: Instr) -> None:
    """NaN operands lose, unless .NaN is given (PTX ISA 9.7.3.11)."""
    kind = instr.type
    d, *operands = instr.operands
    name = instr.base + (".NaN" if instr.has("NaN") else "")
    if instr.has("xorsign") or instr.has("abs"):
        raise PtxError(f"{instr.op} is not modelled")
    if kind not in ("f32", "f64"):
        _half_operation(emit, instr, name)
        return
    sources = [emit.src(x, kind) for x in operands]
    t = _extreme(emit, instr, name, operands[:2], sources[:2])
    if len(sources) == 3:
        t = _extreme(emit, instr, name, operands[2:], [t, sources[2]])
    emit.put(d, kind, t)


for _name in ("min", "max"):
    op(
        *[
            f"{_name}{z}{n}.{k}"
            for z in ("", ".ftz")
            for n in ("", ".NaN")
            for k in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
        ]
    )(_minmax)


@op(
    *[
        f"{n}{z}.{k}"
        for n in ("neg", "abs")
        for z in ("", ".ftz")
        for k in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    ]
)
def sign_ops(emit: Emit, instr: Instr) -> None:
    """neg and abs act on the sign bits; a NaN of fp32 becomes the canonical one."""
    kind = instr.type
    bits = {"f32": "u32", "f64": "u64", "f16": "u16", "bf16": "u16"}.get(kind, "u32")
    signs = {"u16": 0x8000, "u32": 0x80000000, "u64": 1 << 63}[bits]
    if kind.endswith("x2"):
        signs = 0x80008000
    source = emit.src(instr.operands[1], bits)
    if instr.has("ftz"):
        if kind != "f32":
            raise PtxError(f"{instr.op} is not modelled")
        source = emit.temp(f"{flushed_source(emit, instr, instr.operands[1], kind)}.view(np_u32)")
    function, constant = ("^", signs) if instr.base == "neg" else ("&", signs ^ (2 ** int(bits[1:]) - 1))
    t = f"{source} {function} np_{bits}({constant})"
    if kind == "f32":
        emit.put(instr.operands[0], kind, f"{emit.bind(canonical)}(({t}).view(np_f32))")
    else:
        emit.put(instr.operands[0], bits, t)


@op("copysign")
def copysign(emit: Emit, instr: Instr) -> None:
    # copysign d, a, b: sign of a, magnitude of b.
    kind = instr.type
    a, b = (emit.src(x, kind) for x in instr.operands[1:])
    emit.put(instr.operands[0], kind, f"np.copysign({b}, {a})")


@op("testp")
def testp(emit: Emit, instr: Instr) -> None:
    test = {
        "finite": "np.isfinite({0})",
        "infinite": "np.isinf({0})",
        "number": "~np_isnan({0})",
        "notanumber": "np_isnan({0})",
    }[instr.parts[1]]
    emit.put(instr.operands[0], "pred", test.format(emit.src(instr.operands[1], instr.type)))


def _divide(split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b)


@op(*[f"div.{r}{z}.{k}" for r in ("rn", "full", "approx", "rz") for z in ("", ".ftz") for k in ("f32", "f64")])
def div(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    a, b = _sources(emit, instr, instr.operands[1:], kind)
    if instr.has("rz"):
        if kind != "f32":
            raise PtxError(f"{instr.op} is not modelled")
        t = emit.temp(f"{emit.bind(directed)}({a}.astype(np_f64) / {b}, 'rz')")
        emit.put(instr.operands[0], kind, _finish(emit, instr, t))
    elif instr.has("ftz"):
        emit.put(instr.operands[0], kind, _finish(emit, instr, emit.temp(f"np_divide({a}, {b})")))
    else:
        emit.ufunc("np_divide", [a, b], instr.operands[0], kind)


UNARY = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}


def _unary(split: object, mask: object, index: int, x: np.ndarray, name: str, ftz: bool) -> np.ndarray:
    if ftz:
        x = flush(x)
    out = UNARY[name](x.astype(np.float64)).astype(np.float32)
    return flush(out) if ftz else out


def _unary_half(split: object, mask: object, index: int, x: np.ndarray, name: str, kind: str) -> np.ndarray:
    return float_to_half(UNARY[name](half_to_float(x, kind).astype(np.float64)), kind)


@op("ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt", "rsqrt")
def unary(emit: Emit, instr: Instr) -> None:
    kind = instr.type
    if kind == "f32":
        source = emit.src(instr.operands[1], kind)
        t = emit.value(_unary, source, repr(instr.base), str(instr.has("ftz")))
        if not instr.has("approx"):
            t = f"{emit.bind(canonical)}({t})"
        emit.put(instr.operands[0], kind, t)
    elif kind == "f64":
        emit.put(instr.operands[0], kind, f"{emit.bind(UNARY[instr.base])}({emit.src(instr.operands[1], kind)})")
    else:
        emit.put(
            instr.operands[0],
            kind,
            emit.value(_unary_half, emit.src(instr.operands[1], kind), repr(instr.base), repr(kind)),
        )


__all__ = ["float_source", "flush", "fused", "round_bf16", "widen_bf16"]
