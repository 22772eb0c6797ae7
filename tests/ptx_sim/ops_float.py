"""Floating-point arithmetic: fp32, fp64, fp16, bf16, packed forms and approximations (PTX ISA 9.7.3 to 9.7.5).

fma rounds once: products of fp32 are exact in fp64, and the fp64 sum is rounded to odd where it is a tie for fp32.
Approximations (ex2, lg2, rcp, rsqrt, tanh, sin, cos) are computed in higher precision and rounded, which lies inside
the error bounds that PTX states for them.
"""

from __future__ import annotations

import numpy as np

from .ops_int import float_source
from .parser import Instr, PtxError
from .translate import Emit, op

TINY = np.float32(1.1754944e-38)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, round to nearest even, NaN to 0x7FFF (PTX ISA 9.7.9.21)."""
    bits = x.view(np.uint32)
    out = ((bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FFF
    return out


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 fused multiply-add with one rounding."""
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.uint64)
    if ((bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)).any():
        # A tie for fp32 in the fp64 sum: the exact sum decides, by the error of the addition.
        back = total - product
        error = (product - (total - back)) + (c - back)
        odd = np.where(
            (error != 0) & np.isfinite(total), np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total
        )
        total = odd
    return total.astype(np.float32)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal fp32 to signed zero."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def _nearest(kind: str) -> str:
    return {"f32": "f32", "f64": "f64", "f16": "f16"}[kind]


ARITH = {"add": "np_add", "sub": "np_subtract", "mul": "np_multiply"}


def _rounded_directed(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, name: str, mode: str
) -> np.ndarray:
    """add/sub/mul in fp32 with a directed rounding: computed in fp64, then nudged."""
    wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](a.astype(np.float64), b)
    return directed(wide, mode)


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
    elif kind in ("f16x2", "bf16x2", "bf16"):
        emit.put(d, kind, emit.value(_half_binary, *(emit.src(x, kind) for x in (a, b)), repr(name), repr(kind)))
    elif instr.has("rz") or instr.has("rm") or instr.has("rp"):
        mode = next(p for p in instr.parts if p in ("rz", "rm", "rp"))
        emit.put(d, kind, emit.value(_rounded_directed, emit.src(a, kind), emit.src(b, kind), repr(name), repr(mode)))
    elif instr.has("ftz"):
        t = emit.temp(f"{ARITH[name]}({emit.src(a, kind)}, {emit.src(b, kind)})")
        emit.put(d, kind, f"{emit.bind(flush)}({t})")
    else:
        emit.ufunc(ARITH[name], [emit.src(a, kind), emit.src(b, kind)], d, kind)
        if instr.has("sat"):
            emit.put(d, kind, f"np.clip({emit.src(d, kind)}, np_f32(0), np_f32(1))")


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


def _packed_f32(emit: Emit, instr: Instr, function: str) -> None:
    d, a, b = instr.operands
    if instr.has("rz") or instr.has("rm") or instr.has("rp"):
        raise PtxError(f"{instr.op}: directed rounding of packed fp32 is not modelled")
    if emit.where is None and not instr.has("ftz"):
        emit.line(f"{function}({pair_name(emit, a)}, {pair_name(emit, b)}, {emit.name(d)}p)")
        return
    t = emit.temp(f"{function}({pair_name(emit, a)}, {pair_name(emit, b)})")
    if instr.has("ftz"):
        t = emit.temp(f"{emit.bind(flush)}({t})")
    emit.put(d, "u64", f"{t}.view(np_u64)")


def half_to_float(x: np.ndarray, kind: str) -> np.ndarray:
    """f16x2 or bf16x2 registers (or scalar ones) -> fp32 values, two per lane for packed kinds."""
    if kind.endswith("x2"):
        x = x.view(np.uint16)
    return widen_bf16(x.view(np.uint16)) if kind.startswith("bf16") else x.view(np.float16).astype(np.float32)


def float_to_half(x: np.ndarray, kind: str) -> np.ndarray:
    bits = round_bf16(x.astype(np.float32)) if kind.startswith("bf16") else x.astype(np.float16).view(np.uint16)
    if kind.endswith("x2"):
        return bits.view(np.uint32)
    return bits if kind.startswith("bf16") else bits.view(np.float16)


def _half_binary(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, name: str, kind: str
) -> np.ndarray:
    x, y = half_to_float(a, kind), half_to_float(b, kind)
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}
    return float_to_half(functions[name](x, y), kind)


def _half_fma(
    split: object, mask: object, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, relu: bool
) -> np.ndarray:
    # The product of halves is exact in fp32 and fp64; the fp64 sum is rounded to odd on the way to fp32.
    exact = half_to_float(a, kind).astype(np.float64) * half_to_float(b, kind) + half_to_float(c, kind)
    near = directed(exact, "rz")
    inexact = near.astype(np.float64) != exact
    bits = near.view(np.uint32)
    out = np.where(inexact & np.isfinite(near), bits | np.uint32(1), bits).view(np.float32)
    if relu:
        out = np.maximum(out, np.float32(0))
    return float_to_half(out, kind)


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
        sources = [pair_name(emit, x) for x in (a, b, c)]
        t = emit.temp(f"{emit.bind(fused)}({', '.join(sources)})")
        if instr.has("ftz"):
            t = emit.temp(f"{emit.bind(flush)}({t})")
        emit.put(d, "u64", f"{t}.view(np_u64)")
    elif kind == "f32":
        sources = [emit.src(x, kind) for x in (a, b, c)]
        if any(instr.has(m) for m in ("rz", "rm", "rp")):
            mode = next(m for m in ("rz", "rm", "rp") if instr.has(m))
            t = emit.temp(f"{emit.bind(directed)}({sources[0]}.astype(np_f64) * {sources[1]} + {sources[2]}, '{mode}')")
        else:
            t = emit.temp(f"{emit.bind(fused)}({', '.join(sources)})")
        if instr.has("ftz"):
            t = emit.temp(f"{emit.bind(flush)}({t})")
        if instr.has("sat"):
            t = emit.temp(f"np.clip({t}, np_f32(0), np_f32(1))")
        emit.put(d, kind, t)
    elif kind == "f64":
        t = emit.temp(f"{emit.src(a, kind)} * {emit.src(b, kind)}")
        emit.ufunc("np_add", [t, emit.src(c, kind)], d, kind)
    else:
        sources = [emit.src(x, kind) for x in (a, b, c)]
        emit.put(d, kind, emit.value(_half_fma, *sources, repr(kind), str(instr.has("relu"))))


def _minmax(emit: Emit, instr: Instr) -> None:
    """NaN operands lose, unless .NaN is given (PTX ISA 9.7.3.11)."""
    kind = instr.type
    d, *sources = instr.operands
    propagate = instr.has("NaN")
    function = {
        ("min", False): "np_fmin",
        ("min", True): "np_minimum",
        ("max", False): "np_fmax",
        ("max", True): "np_maximum",
    }[instr.base, propagate]
    if kind in ("f32", "f64"):
        names = [emit.src(x, kind) for x in sources]
        if len(names) == 3:
            names = [emit.temp(f"{function}({names[0]}, {names[1]})"), names[2]]
        if instr.has("xorsign") or instr.has("abs"):
            raise PtxError(f"{instr.op} is not modelled")
        emit.ufunc(function, names, d, kind)
    else:
        names = [emit.src(x, kind) for x in sources]
        emit.put(d, kind, emit.value(_half_binary, *names, repr(instr.base), repr(kind)))


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
    """neg and abs act on the sign bits, NaN included."""
    kind = instr.type
    bits = {"f32": "u32", "f64": "u64", "f16": "u16", "bf16": "u16"}.get(kind, "u32")
    signs = {"u16": 0x8000, "u32": 0x80000000, "u64": 1 << 63}[bits]
    if kind.endswith("x2"):
        signs = 0x80008000
    source = emit.src(instr.operands[1], bits)
    if instr.base == "neg":
        emit.put(instr.operands[0], bits, f"{source} ^ np_{bits}({signs})")
    else:
        emit.put(instr.operands[0], bits, f"{source} & np_{bits}({signs ^ (2 ** int(bits[1:]) - 1)})")


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
    a, b = (emit.src(x, kind) for x in instr.operands[1:])
    if instr.has("rz"):
        t = emit.temp(f"{emit.bind(directed)}({a}.astype(np_f64) / {b}, 'rz')")
        emit.put(instr.operands[0], kind, t)
        return
    emit.ufunc("np_divide", [a, b], instr.operands[0], kind)
    if instr.has("ftz"):
        emit.put(instr.operands[0], kind, f"{emit.bind(flush)}({emit.src(instr.operands[0], kind)})")


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
        emit.put(instr.operands[0], kind, emit.value(_unary, source, repr(instr.base), str(instr.has("ftz"))))
    elif kind == "f64":
        emit.put(instr.operands[0], kind, f"{emit.bind(UNARY[instr.base])}({emit.src(instr.operands[1], kind)})")
    else:
        emit.put(
            instr.operands[0],
            kind,
            emit.value(_unary_half, emit.src(instr.operands[1], kind), repr(instr.base), repr(kind)),
        )


__all__ = ["float_source", "flush", "fused", "round_bf16", "widen_bf16"]
