"""Micro-kernels of every sm_90 instruction family, for an H200 to judge the simulator by.

Inputs are random bits from fixed seeds, so that both sides make the same ones. `check` says how results compare:
"bits"; "float", "f16", "bf16" (bits, any NaN equals any NaN, the last two half by half); ("ulp", n) or ("absolute", x)
for approximations and matrix sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from . import tensormap
from .matrix_operands import chunk_offsets
from .ops_float import round_bf16
from .testing import aligned

COUNT = 2048
SPECIAL32 = np.array(
    [
        0,
        0x80000000,
        1,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F7FFFFF,
        0x00800000,
        0x007FFFFF,
        0x3F800000,
        0xBF800000,
        0x33000000,
        0x4B000000,
        0x3F808000,
        0x3F818000,
        0x477FE000,
        0x477FF000,
        0x38800000,
        0xFFFFFFFF,
        0x7FFFFFFF,
    ],
    np.uint32,
)


@dataclass
class Case:
    name: str
    family: str
    body: str
    arrays: dict
    outputs: list
    check: object = "bits"
    grid: int = 1
    block: int = 32
    cluster: int = 1
    shared: int = 4096
    maps: dict = field(default_factory=dict)


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def words(name: str, width: int, floats: bool) -> np.ndarray:
    """Random bits with special values first; floats get half of their values near one."""
    gen = rng(name)
    out = gen.integers(0, 1 << 32, COUNT * (width // 32 or 1), dtype=np.uint64).astype(np.uint32)
    if floats and width == 32:
        half = len(out) // 2
        out[half:] = gen.standard_normal(len(out) - half).astype(np.float32).view(np.uint32)
    grid = len(SPECIAL32)
    take = np.arange(grid * grid)
    order = take // grid if name.endswith("b") else take % grid
    out[: len(order)] = SPECIAL32[order]
    return out.view(np.uint64) if width == 64 else out


def elementwise(
    name: str,
    family: str,
    code: str,
    inputs: int = 2,
    width: int = 32,
    out_width: int = 32,
    check: object = "bits",
    floats: bool = False,
    values: list | None = None,
) -> Case:
    """`code` maps %r1, %r2, %r3 (or %d1 ...) to %r10 (or %d10), one element per thread."""
    arrays, body = {}, "mov.u32 %r90, %tid.x; mov.u32 %r91, %ctaid.x; mad.lo.u32 %r90, %r91, 128, %r90;\n"
    for i in range(inputs):
        label = "abc"[i]
        arrays[label] = values[i] if values else words(f"{name} {label}", width, floats)
    # Parameters sit in %d0 and up; 64-bit operands therefore start at %d11.
    for i in range(inputs):
        target = f"%r{i + 1}" if width == 32 else f"%d{i + 11}"
        body += f"mul.wide.u32 %d90, %r90, {width // 8}; cvta.to.global.u64 %d92, %d{i}; add.s64 %d91, %d92, %d90;\n"
        body += f"ld.global.b{width} {target}, [%d91];\n"
    source = "%r10" if out_width == 32 else "%d20"
    body += code + f"\nmul.wide.u32 %d90, %r90, {out_width // 8}; add.s64 %d91, %d{inputs}, %d90;\n"
    body += f"st.global.b{out_width} [%d91], {source};\n"
    arrays["out"] = np.zeros(COUNT, f"u{out_width // 8}")
    return Case(name, family, body, arrays, ["out"], check, grid=COUNT // 128, block=128)


INTEGER = {
    "add": "add.u32 %r10, %r1, %r2;",
    "sub": "sub.s32 %r10, %r1, %r2;",
    "mul.lo": "mul.lo.u32 %r10, %r1, %r2;",
    "mul.hi.u32": "mul.hi.u32 %r10, %r1, %r2;",
    "mul.hi.s32": "mul.hi.s32 %r10, %r1, %r2;",
    "mad.lo": "mad.lo.s32 %r10, %r1, %r2, %r3;",
    "mad.hi": "mad.hi.u32 %r10, %r1, %r2, %r3;",
    "min.s32": "min.s32 %r10, %r1, %r2;",
    "max.u32": "max.u32 %r10, %r1, %r2;",
    "neg": "neg.s32 %r10, %r1;",
    "min.relu": "min.relu.s32 %r10, %r1, %r2;",
    "abs": "abs.s32 %r10, %r1;",
    "not": "not.b32 %r10, %r1;",
    "shl": "and.b32 %r4, %r2, 63; shl.b32 %r10, %r1, %r4;",
    "shr.u32": "and.b32 %r4, %r2, 63; shr.u32 %r10, %r1, %r4;",
    "shr.s32": "and.b32 %r4, %r2, 63; shr.s32 %r10, %r1, %r4;",
    "shf.l": "shf.l.wrap.b32 %r10, %r1, %r2, %r3;",
    "shf.r": "shf.r.clamp.b32 %r10, %r1, %r2, %r3;",
    "lop3": "lop3.b32 %r10, %r1, %r2, %r3, 0x5A;",
    "prmt": "prmt.b32 %r10, %r1, %r2, %r3;",
    "bfe.u32": "bfe.u32 %r10, %r1, %r2, %r3;",
    "bfe.s32": "bfe.s32 %r10, %r1, %r2, %r3;",
    "bfi": "bfi.b32 %r10, %r1, %r2, %r3, 7;",
    "popc": "popc.b32 %r10, %r1;",
    "clz": "clz.b32 %r10, %r1;",
    "brev": "brev.b32 %r10, %r1;",
    "bfind.u32": "bfind.u32 %r10, %r1;",
    "bfind.s32": "bfind.s32 %r10, %r1;",
    "div.u32": "or.b32 %r4, %r2, 1; div.u32 %r10, %r1, %r4;",
    "div.s32": "or.b32 %r4, %r2, 3; div.s32 %r10, %r1, %r4;",
    "rem.u32": "or.b32 %r4, %r2, 1; rem.u32 %r10, %r1, %r4;",
    "rem.s32": "or.b32 %r4, %r2, 3; rem.s32 %r10, %r1, %r4;",
    "dp4a": "dp4a.s32.u32 %r10, %r1, %r2, %r3;",
    "sad": "sad.u32 %r10, %r1, %r2, %r3;",
    "setp.lt.s32": "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r10, %r1, %r3, %p1;",
    "setp.and": "setp.gt.u32 %p2, %r3, %r1; setp.ge.and.u32 %p1|%p3, %r1, %r2, %p2; selp.b32 %r10, 1, 0, %p1; "
    "@%p3 add.u32 %r10, %r10, 2;",
    "add.cc": "add.cc.u32 %r4, %r1, %r2; addc.u32 %r10, %r3, %r3;",
    "slct": "slct.s32.s32 %r10, %r1, %r2, %r3;",
    **{
        f"setp.{c}.{t}": f"setp.{c}.{t} %p1, %r1, %r2; selp.b32 %r10, 1, 0, %p1;"
        for c, t in (
            ("eq", "s32"),
            ("ne", "b32"),
            ("le", "s32"),
            ("gt", "u32"),
            ("ge", "s32"),
            ("gt", "s32"),
            ("lt", "u32"),
            ("ge", "u32"),
            ("le", "u32"),
        )
    },
    "preds": "setp.gt.u32 %p1, %r1, %r2; setp.lt.s32 %p2, %r2, %r3; and.pred %p3, %p1, %p2; or.pred %p4, %p1, %p2; "
    "xor.pred %p5, %p3, %p4; not.pred %p6, %p5; selp.b32 %r10, %r1, %r3, %p6;",
    "and": "and.b32 %r10, %r1, %r2;",
    "or": "or.b32 %r10, %r1, %r2;",
    "xor": "xor.b32 %r10, %r1, %r2;",
    "max.s32": "max.s32 %r10, %r1, %r2;",
    "min.u32": "min.u32 %r10, %r1, %r2;",
    "add.s32": "add.s32 %r10, %r1, %r2;",
    "mul.lo.s32": "mul.lo.s32 %r10, %r1, %r2;",
    "mul.wide.s32": "mul.wide.s32 %d5, %r1, %r2; mov.b64 {%r4, %r5}, %d5; xor.b32 %r10, %r4, %r5;",
    "mul.wide.u32": "mul.wide.u32 %d5, %r1, %r2; mov.b64 {%r4, %r5}, %d5; xor.b32 %r10, %r4, %r5;",
    "cvt.s64.s32": "cvt.s64.s32 %d5, %r1; shr.u64 %d5, %d5, 20; cvt.u32.u64 %r10, %d5;",
    "cvt.u16.u32": "cvt.u16.u32 %h1, %r1; and.b16 %h2, %h1, 255; or.b16 %h3, %h2, 512; cvt.u32.u16 %r10, %h3;",
    "cvt.s8": "cvt.s32.s8 %r10, %r1;",
    "cvt.u16": "cvt.u32.u16 %r10, %r1;",
    "cvt.s64.s8": "cvt.u16.u32 %h1, %r1; cvt.s64.s8 %d5, %h1; shr.u64 %d5, %d5, 4; cvt.u32.u64 %r10, %d5;",
    "cvt.u64.u16": "cvt.u16.u32 %h1, %r1; cvt.u64.u16 %d5, %h1; shl.b64 %d5, %d5, 12; cvt.u32.u64 %r10, %d5;",
    "griddepcontrol": "griddepcontrol.launch_dependents; griddepcontrol.wait; add.u32 %r10, %r1, %r2;",
    "cvt.sat": "cvt.sat.s32.s64 %r10, %d5;",
}
FLOAT = {
    "add": "add.rn.f32 %r10, %r1, %r2;",
    "add.ftz": "add.ftz.f32 %r10, %r1, %r2;",
    "sub.ftz": "sub.ftz.f32 %r10, %r1, %r2;",
    "add.f32": "add.f32 %r10, %r1, %r2;",
    "mul.f32": "mul.f32 %r10, %r1, %r2;",
    "min.ftz": "min.ftz.f32 %r10, %r1, %r2;",
    **{
        f"setp.{c}.ftz": f"setp.{c}.ftz.f32 %p1, %r1, %r2; selp.b32 %r10, 1, 0, %p1;"
        for c in ("lt", "eq", "leu", "gt", "neu")
    },
    "sub": "sub.f32 %r10, %r1, %r2;",
    "mul": "mul.rn.f32 %r10, %r1, %r2;",
    "mul.ftz": "mul.ftz.f32 %r10, %r1, %r2;",
    "fma": "fma.rn.f32 %r10, %r1, %r2, %r3;",
    "fma.ftz": "fma.rn.ftz.f32 %r10, %r1, %r2, %r3;",
    "add.rz": "add.rz.f32 %r10, %r1, %r2;",
    "mul.rz": "mul.rz.f32 %r10, %r1, %r2;",
    "add.rm": "add.rm.f32 %r10, %r1, %r2;",
    "div": "div.rn.f32 %r10, %r1, %r2;",
    "min": "min.f32 %r10, %r1, %r2;",
    "max": "max.f32 %r10, %r1, %r2;",
    "max.NaN": "max.NaN.f32 %r10, %r1, %r2;",
    "max.ftz": "max.ftz.f32 %r10, %r1, %r2;",
    "neg": "neg.f32 %r10, %r1;",
    "abs": "abs.f32 %r10, %r1;",
    "rcp": "rcp.rn.f32 %r10, %r1;",
    "sqrt": "sqrt.rn.f32 %r10, %r1;",
    "copysign": "copysign.f32 %r10, %r1, %r2;",
    "add.f16x2": "add.rn.f16x2 %r10, %r1, %r2;",
    "mul.f16x2": "mul.rn.f16x2 %r10, %r1, %r2;",
    "fma.f16x2": "fma.rn.f16x2 %r10, %r1, %r2, %r3;",
    "fma.bf16x2": "fma.rn.bf16x2 %r10, %r1, %r2, %r3;",
    "add.bf16x2": "add.rn.bf16x2 %r10, %r1, %r2;",
    "mul.bf16x2": "mul.rn.bf16x2 %r10, %r1, %r2;",
    "max.bf16x2": "max.bf16x2 %r10, %r1, %r2;",
    "min.f16x2": "min.f16x2 %r10, %r1, %r2;",
    **{
        f"setp.{c}": f"setp.{c}.f32 %p1, %r1, %r2; selp.b32 %r10, 1, 0, %p1;"
        for c in ("lt", "le", "eq", "ne", "ge", "gtu", "neu", "num", "nan")
    },
    "setp.lt.bf16": "mov.b32 {%h1, %h2}, %r1; setp.lt.bf16 %p1, %h1, %h2; selp.b32 %r10, 1, 0, %p1;",
    "cvt.bf16x2": "cvt.rn.bf16x2.f32 %r10, %r1, %r2;",
    "cvt.f16x2": "cvt.rn.f16x2.f32 %r10, %r1, %r2;",
    "cvt.rz.bf16x2": "cvt.rz.bf16x2.f32 %r10, %r1, %r2;",
    "cvt.relu": "cvt.rn.relu.bf16x2.f32 %r10, %r1, %r2;",
    "cvt.bf16": "cvt.rn.bf16.f32 %h1, %r1; mov.b32 %r10, {%h1, %h1};",
    "cvt.f32.bf16": "mov.b32 {%h1, %h2}, %r1; cvt.f32.bf16 %r10, %h2;",
    "cvt.f32.f16": "mov.b32 {%h1, %h2}, %r1; cvt.f32.f16 %r10, %h2;",
    "cvt.s32": "cvt.rzi.s32.f32 %r10, %r1;",
    "cvt.u32": "cvt.rni.u32.f32 %r10, %r1;",
    "cvt.floor": "cvt.rmi.f32.f32 %r10, %r1;",
    "cvt.f32.s32": "cvt.rn.f32.s32 %r10, %r1;",
    "cvt.f32.u32": "cvt.rz.f32.u32 %r10, %r1;",
    "cvt.e4m3": "cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2; mov.b32 %r10, {%h1, %h1};",
    "cvt.e5m2": "cvt.rn.satfinite.e5m2x2.f32 %h1, %r1, %r2; mov.b32 %r10, {%h1, %h1};",
    "cvt.f16x2.e4m3": "mov.b32 {%h1, %h2}, %r1; cvt.rn.f16x2.e4m3x2 %r10, %h1;",
    "cvt.tf32": "cvt.rna.tf32.f32 %r10, %r1;",
}
# Errors that PTX states: ex2 2 ulp, lg2 and others by table 9.7.3; (operation, bound, low, high of the argument).
APPROXIMATE = {
    "ex2": (("ulp", 3), -126.0, 126.0),
    "lg2": (("ulp", 16), 4.0, 1e6),
    "rcp": (("ulp", 2), 0.01, 1e6),
    "rsqrt": (("ulp", 3), 0.01, 1e6),
    "sqrt": (("ulp", 2), 0.01, 1e6),
    "sin": (("absolute", 2**-20), -3.0, 3.0),
    "cos": (("absolute", 2**-20), -3.0, 3.0),
    "tanh": (("absolute", 2**-10), -4.0, 4.0),
}
DIVIDE = {
    "div.approx": "div.approx.f32 %r10, %r1, %r2;",
    "div.approx.ftz": "div.approx.ftz.f32 %r10, %r1, %r2;",
    "div.full": "div.full.f32 %r10, %r1, %r2;",
}
LONG = {
    "add": "add.s64 %d20, %d11, %d12;",
    "sub": "sub.s64 %d20, %d11, %d12;",
    "mul.s64": "mul.lo.s64 %d20, %d11, %d12;",
    "mad": "mad.lo.s64 %d20, %d11, %d12, %d11;",
    "and": "and.b64 %d20, %d11, %d12;",
    "or": "or.b64 %d20, %d11, %d12;",
    "max": "max.s64 %d20, %d11, %d12;",
    "shl": "cvt.u32.u64 %r4, %d12; and.b32 %r4, %r4, 127; shl.b64 %d20, %d11, %r4;",
    "shr.u64": "cvt.u32.u64 %r4, %d12; and.b32 %r4, %r4, 127; shr.u64 %d20, %d11, %r4;",
    "div.s64": "or.b64 %d13, %d12, 5; div.s64 %d20, %d11, %d13;",
    "rem.s64": "or.b64 %d13, %d12, 5; rem.s64 %d20, %d11, %d13;",
    "neg": "neg.s64 %d20, %d11;",
    **{
        f"setp.{c}.{t}": f"setp.{c}.{t} %p1, %d11, %d12; selp.b64 %d20, %d11, 7, %p1;"
        for c, t in (
            ("eq", "s64"),
            ("ne", "s64"),
            ("lt", "s64"),
            ("ge", "s64"),
            ("gt", "s64"),
            ("le", "s64"),
            ("lt", "u64"),
            ("gt", "u64"),
        )
    },
    "mul.lo": "mul.lo.u64 %d20, %d11, %d12;",
    "mul.hi": "mul.hi.u64 %d20, %d11, %d12;",
    "shr": "cvt.u32.u64 %r4, %d12; and.b32 %r4, %r4, 127; shr.s64 %d20, %d11, %r4;",
    "min": "min.s64 %d20, %d11, %d12;",
    "xor": "xor.b64 %d20, %d11, %d12;",
    "clz": "clz.b64 %r4, %d11; cvt.u64.u32 %d20, %r4;",
    "div": "or.b64 %d13, %d12, 5; div.u64 %d20, %d11, %d13;",
    "fma.f64": "fma.rn.f64 %d20, %d11, %d12, %d11;",
    "pack": "mov.b64 {%r4, %r5}, %d11; mov.b64 %d20, {%r5, %r4};",
}
WARP = {
    **{
        f"shfl.{m}.{c}": f"and.b32 %r4, %r2, 31; shfl.sync.{m}.b32 %r10|%p1, %r1, {b}, {c}, -1; "
        "@%p1 xor.b32 %r10, %r10, 1;"
        for m, b, c in (
            ("idx", "%r4", 31),
            ("up", 3, 0),
            ("down", 5, 31),
            ("bfly", 9, 31),
            ("idx", "%r4", 6175),
            ("up", 2, 6144),
            ("bfly", 3, 7199),
        )
    },
    "ballot": "setp.lt.s32 %p1, %r1, %r2; vote.sync.ballot.b32 %r10, %p1, -1;",
    "vote.any": "setp.lt.u32 %p1, %r1, 64; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;",
    "vote.all": "setp.gt.u32 %p1, %r1, 64; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;",
    **{
        f"redux.{n}": f"redux.sync.{n}.{t} %r10, %r1, -1;"
        for n, t in (("add", "u32"), ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"))
    },
    "match": "and.b32 %r4, %r1, 3; match.any.sync.b32 %r10, %r4, -1;",
    "elect": "mov.b32 %r10, 0; elect.sync %r5|%p1, -1; @%p1 mov.b32 %r10, 7;",
    "divergent": "mov.b32 %r10, 0; and.b32 %r4, %r1, 15; LOOP: setp.eq.u32 %p1, %r4, 0; @%p1 bra OUT; "
    "add.u32 %r10, %r10, %r2; sub.u32 %r4, %r4, 1; bra LOOP; OUT: bar.warp.sync -1;",
}


def _shared_pairs() -> Iterator[Case]:
    source = rng("shared pairs").integers(0, 1 << 32, (32, 2), dtype=np.uint64).astype(np.uint32)
    body = """mov.u32 %r0, %tid.x; mov.b32 %r1, smem; shl.b32 %r2, %r0, 3; add.u32 %r3, %r1, %r2;
mul.wide.u32 %d9, %r0, 8; add.s64 %d10, %d0, %d9; ld.global.v2.b32 {%r4, %r5}, [%d10]; mov.b64 %d11, {%r4, %r5};
st.shared.b64 [%r3], %d11; bar.warp.sync -1; xor.b32 %r3, %r3, 8; ld.shared.v2.b32 {%r6, %r7}, [%r3];
add.s64 %d10, %d1, %d9; st.global.v2.b32 [%d10], {%r6, %r7};"""
    yield Case("st.shared.b64", "shared pairs", body, {"in": source, "out": np.zeros((32, 2), np.uint32)}, ["out"])


def _adds() -> Iterator[Case]:
    """fp32 adds to global memory, to shared memory, and four at a time; half of the values are subnormal or near it."""
    values = {label: words(f"fp32 adds {label}", 32, True) for label in "ab"}
    for label, array in values.items():
        array[COUNT // 2 :] &= np.uint32(0x80FFFFFF if label == "a" else 0x81FFFFFF)
    place = "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 128, %r0;\n"
    place += "mul.wide.u32 %d9, %r2, 4; add.s64 %d10, %d0, %d9; add.s64 %d11, %d1, %d9; ld.global.b32 %r4, [%d11];\n"
    shared = "mov.b32 %r3, smem; shl.b32 %r5, %r0, 2; add.u32 %r3, %r3, %r5; ld.global.b32 %r6, [%d10];\n"
    forms = {
        "red.global.add.f32": place + "red.global.add.f32 [%d10], %r4;",
        "red.shared.add.f32": place + shared + "st.shared.b32 [%r3], %r6; red.shared.add.f32 [%r3], %r4;\n"
        "ld.shared.b32 %r7, [%r3]; st.global.b32 [%d10], %r7;",
        "red.global.add.v4.f32": place + "and.b32 %r8, %r0, 3; setp.ne.u32 %p1, %r8, 0; @%p1 bra END;\n"
        "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d11]; red.global.add.v4.f32 [%d10], {%r4, %r5, %r6, %r7};\nEND:",
    }  # fmt: skip
    for form, body in forms.items():
        arrays = {"sum": values["a"].copy(), "value": values["b"].copy()}
        yield Case(f"fp32 adds {form}", "adds", body, arrays, ["sum"], "float", grid=COUNT // 128, block=128)


def _matrix_moves() -> Iterator[Case]:
    for trans in ("", ".trans"):
        source = rng("ldmatrix").integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype(np.uint32)
        body = f"""mov.u32 %r0, %tid.x; mov.b32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2;
mul.wide.u32 %d9, %r0, 16; add.s64 %d10, %d0, %d9; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d10];
st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];
add.s64 %d10, %d1, %d9; st.global.v4.b32 [%d10], {{%r10, %r11, %r12, %r13}}; bar.warp.sync -1;
stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3]; add.s64 %d10, %d2, %d9;
st.global.v4.b32 [%d10], {{%r4, %r5, %r6, %r7}};"""
        zeros = np.zeros((32, 4), np.uint32)
        yield Case(
            f"ldmatrix and stmatrix x4{trans}",
            "matrix moves",
            body,
            {"in": source, "load": zeros.copy(), "store": zeros.copy()},
            ["load", "store"],
        )


SETUP = """mov.u32 %r0, %tid.x; mov.b32 %r1, smem; add.s32 %r2, %r1, 65536; setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; READY: bar.sync 0;
"""
WAIT = "WAIT0: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT0;\n"
DUMP = """mov.b32 %r10, %r0; mov.u32 %r14, %ntid.x;
DUMP: shl.b32 %r11, %r10, 2; add.u32 %r12, %r1, %r11; ld.shared.b32 %r13, [%r12];
mul.wide.u32 %d20, %r10, 4; add.s64 %d20, %d20, %d1; st.global.b32 [%d20], %r13; add.u32 %r10, %r10, %r14;
setp.lt.u32 %p5, %r10, WORDS; @%p5 bra DUMP;
"""


def _copies() -> Iterator[Case]:
    """cp.async of every size, with zero-fill past the source size, completing on an mbarrier or a group."""
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        for finish in ("group", "all", "noinc"):
            source = aligned(32 * size, np.uint8)
            source[:] = rng(f"cp.async {size}").integers(1, 256, source.size)
            body = f"""mov.u32 %r0, %tid.x; mov.b32 %r1, smem; add.s32 %r2, %r1, 1024; setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY; mbarrier.init.shared::cta.b64 [%r2], 32; fence.mbarrier_init.release.cluster; READY: bar.sync 0;
mad.lo.u32 %r3, %r0, {size}, %r1; mul.wide.u32 %d9, %r0, {size}; add.s64 %d10, %d0, %d9; rem.u32 %r4, %r0, 3;
setp.eq.u32 %p2, %r4, 1; selp.b32 %r5, 0, {size}, %p2; setp.eq.u32 %p3, %r4, 2; selp.b32 %r5, {size // 2}, %r5, %p3;
cp.async.{cache}.shared.global [%r3], [%d10], {size}, %r5;
"""
            if finish == "group":
                body += "cp.async.commit_group; cp.async.wait_group 0; bar.warp.sync -1;\n"
            elif finish == "all":
                body += "cp.async.wait_all; bar.warp.sync -1;\n"
            else:
                body += (
                    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2];\n"
                    "WAIT0: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0; @!%p4 bra WAIT0;\n"
                )
            body += f"""mov.b32 %r6, 0; COPY: add.u32 %r7, %r3, %r6; ld.shared.b32 %r8, [%r7]; cvt.u64.u32 %d11, %r6;
add.s64 %d12, %d1, %d9; add.s64 %d12, %d12, %d11; st.global.b32 [%d12], %r8; add.u32 %r6, %r6, 4;
setp.lt.u32 %p5, %r6, {size}; @%p5 bra COPY;
"""
            yield Case(
                f"cp.async.{cache} {size} {finish}",
                "cp.async",
                body,
                {"in": source, "out": np.zeros(32 * size // 4, np.uint32)},
                ["out"],
            )


def _tensor_copies() -> Iterator[Case]:
    for swizzle in (0, 32, 64, 128):
        for corner in ((0, 0), (16, 3), (-8, -1), (56, 30)):
            name = f"tile load swizzle {swizzle} at {corner}"
            array = aligned((32, 64), np.uint16)
            array[:] = rng(name).integers(1, 1 << 16, array.shape)
            width = (swizzle or 64) // 2
            size = 16 * width
            body = (
                SETUP
                + f"""@%p1 bra WAIT0; mov.b32 %r5, {corner[0]}; mov.b32 %r6, {corner[1]};
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {size};
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%d0, {{%r5, %r6}}], [%r2];
"""
                + WAIT
                + DUMP.replace("WORDS", str(size // 4))
            )
            arrays = {"map": aligned(128, np.uint8), "out": np.zeros(size // 4, np.uint32), "array": array}
            yield Case(
                name,
                "tensor copies",
                body,
                arrays,
                ["out"],
                shared=65600,
                maps={"map": ("array", "bf16", (width, 8), swizzle)},
            )
    for kind, value in (("f32", "0f40000000"), ("bf16", "0x3FC03FC0")):
        array = aligned((6, 64), np.float32) if kind == "f32" else aligned((6, 64), np.uint16)
        array[:] = 1 if kind == "f32" else 0x3F81
        row = 32 if kind == "f32" else 64
        body = (
            SETUP
            + f"""mov.b32 %r10, %r0; mov.b32 %r13, {value};
FILL: shl.b32 %r11, %r10, 2; add.u32 %r12, %r1, %r11;
st.shared.b32 [%r12], %r13; add.u32 %r10, %r10, 32; setp.lt.u32 %p5, %r10, 256; @%p5 bra FILL;
fence.proxy.async; bar.sync 0; @%p1 bra END; mov.b32 %r5, 0; mov.b32 %r6, 2;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d0, {{%r5, %r6}}], [%r1];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""
        )
        yield Case(
            f"tile reduction {kind}",
            "tensor copies",
            body,
            {"map": aligned(128, np.uint8), "array": array},
            ["array"],
            shared=65600,
            maps={"map": ("array", kind, (row, 8), 128)},
        )


def _clusters() -> Iterator[Case]:
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
mov.b32 %r3, smem; shl.b32 %r4, %r0, 2; add.u32 %r3, %r3, %r4; mapa.shared::cluster.u32 %r5, %r3, %r2;
mad.lo.u32 %r6, %r1, 100, %r0; barrier.cluster.arrive; barrier.cluster.wait; st.shared::cluster.b32 [%r5], %r6;
barrier.cluster.arrive.release; barrier.cluster.wait.acquire; ld.shared.b32 %r7, [%r3]; mad.lo.u32 %r8, %r1, 32, %r0;
mul.wide.u32 %d9, %r8, 4; add.s64 %d9, %d9, %d0; st.global.b32 [%d9], %r7;"""
    yield Case(
        "distributed shared memory", "clusters", body, {"out": np.zeros(64, np.uint32)}, ["out"], grid=2, cluster=2
    )
    # Vectors for the other CTA and one arrival a thread on its barrier, which orders them.
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.b32 %r3, smem;
setp.ne.u32 %p1, %r0, 0; @%p1 bra READY; mbarrier.init.shared::cta.b64 [%r3], 32; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 %r14, 1;
shl.b32 %r4, %r0, 4; add.u32 %r5, %r3, 1024; add.u32 %r5, %r5, %r4;
mapa.shared::cluster.u32 %r6, %r5, %r2; mapa.shared::cluster.u32 %r7, %r3, %r2;
mad.lo.u32 %r10, %r1, 1000, %r0; mul.lo.u32 %r11, %r10, 3; mul.lo.u32 %r12, %r10, 5; mul.lo.u32 %r13, %r10, 7;
st.shared::cluster.v4.b32 [%r6], {%r10, %r11, %r12, %r13};
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7], %r14; mov.b32 %r15, 0;
AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3], %r15; @!%p2 bra AGAIN;
ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r5]; mad.lo.u32 %r8, %r1, 32, %r0; mul.wide.u32 %d9, %r8, 16;
add.s64 %d9, %d9, %d0; st.global.v4.b32 [%d9], {%r20, %r21, %r22, %r23};
barrier.cluster.arrive; barrier.cluster.wait;"""
    yield Case("remote vectors", "clusters", body, {"out": np.zeros(256, np.uint32)}, ["out"], grid=2, cluster=2)
    # A receiver announces what comes: vectors of each thread, or a copy of what the threads wrote. In the next round
    # the sender knows by an arrival that the memory is free again.
    send = """mul.lo.u32 %r11, %r10, 3; mul.lo.u32 %r12, %r10, 5; mul.lo.u32 %r13, %r10, 7;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r6], {%r10, %r11, %r12, %r13}, [%r7];"""
    yield _exchange("vectors by st.async", send)
    send = """mul.lo.u32 %r11, %r10, 3; mul.lo.u32 %r12, %r10, 5; mul.lo.u32 %r13, %r10, 7; add.u32 %r16, %r5, 512;
st.shared.v4.b32 [%r16], {%r10, %r11, %r12, %r13}; fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra SENT{round};
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r6], [%r16], 512, [%r7]; SENT{round}:"""
    yield _exchange("bulk copy between CTAs", send)
    total = np.zeros(4, np.uint32)
    body = """mov.u32 %r0, %tid.x; red.global.add.u32 [%d0], %r0; red.global.max.s32 [%d0+4], %r0;
red.global.or.b32 [%d0+8], %r0; mov.b32 %r2, 0f3F800000; red.global.add.f32 [%d0+12], %r2;"""
    yield Case("reductions", "atomics", body, {"out": total}, ["out"], grid=4, block=64)
    # Each thread's own word tells what the second operation found, a common word what all of them left.
    body = """mov.u32 %r0, %tid.x; mov.b32 %r3, smem; shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r3; mov.b32 %r5, 0;
st.shared.b32 [%r4], %r5; st.shared.b32 [%r4+128], %r5; st.shared.b32 [%r4+256], %r5; bar.sync 0;
shl.b32 %r6, 1, %r0; atom.shared.or.b32 %r7, [%r4], %r6; atom.shared.or.b32 %r8, [%r4], 3;
atom.shared.or.b32 %r9, [%r3+128], %r6; atom.shared.add.u32 %r9, [%r4+256], %r0; atom.shared.add.u32 %r10, [%r4+256], 5;
atom.shared.add.u32 %r9, [%r3+132], %r0; sub.s32 %r11, 7, %r0; atom.shared.min.s32 %r9, [%r3+136], %r11; bar.sync 0;
add.u32 %r7, %r7, %r8; ld.shared.b32 %r12, [%r4+128]; mul.wide.u32 %d9, %r0, 4; add.s64 %d9, %d9, %d0;
st.global.b32 [%d9], %r7; st.global.b32 [%d9+128], %r10; st.global.b32 [%d9+256], %r12;"""
    yield Case("shared atomics", "atomics", body, {"out": np.zeros(96, np.uint32)}, ["out"])
    sums = aligned(4, np.float32)
    body = """mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000; red.global.add.v4.f32 [%d0], {%r1, %r2, %r1, %r2};"""
    yield Case("vector reduction", "atomics", body, {"out": sums}, ["out"], grid=2)


def _exchange(name: str, send: str) -> Case:
    """Two rounds in which each CTA of a pair sends 512 bytes to the other's, by `send`, and stores what has come."""
    code = """mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.b32 %r3, smem;
setp.ne.u32 %p1, %r0, 0; @%p1 bra READY; mbarrier.init.shared::cta.b64 [%r3], 1;
mbarrier.init.shared::cta.b64 [%r3+8], 32; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive; barrier.cluster.wait;
shl.b32 %r4, %r0, 4; add.u32 %r5, %r3, 1024; add.u32 %r5, %r5, %r4;
mapa.shared::cluster.u32 %r6, %r5, %r2; mapa.shared::cluster.u32 %r7, %r3, %r2; add.u32 %r17, %r7, 8;
"""
    for number in (0, 1):
        code += f"""@%p1 bra WAIT{number}; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512; WAIT{number}:
mad.lo.u32 %r10, %r1, 1000, %r0; add.u32 %r10, %r10, {100 * number};
"""
        if number:
            code += """FREE: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3+8], 0; @!%p2 bra FREE;
"""
        code += f"""{send.replace("{round}", str(number))}
AGAIN{number}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3], {number}; @!%p2 bra AGAIN{number};
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r5]; mad.lo.u32 %r8, %r1, 32, %r0; mul.wide.u32 %d9, %r8, 16;
add.s64 %d9, %d9, %d0; st.global.v4.b32 [%d9+{1024 * number}], {{%r20, %r21, %r22, %r23}};
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r17];
"""
    code += "barrier.cluster.arrive; barrier.cluster.wait;"
    return Case(name, "clusters", code, {"out": np.zeros(512, np.uint32)}, ["out"], grid=2, cluster=2)


def operand_image(values: np.ndarray, span: int, k_major: bool) -> tuple[np.ndarray, int, int]:
    """(bytes, LBO, SBO) of a [rows, k] 16-bit operand in the canonical layout of a swizzle span."""
    rows, k = values.shape
    width = max(span, 16) // 16
    if k_major:
        groups = k // (8 * width) if span else k // 8
        stride = 8 * width * 16
        leading = rows * width * 16
        chunk_count = k // 8
        offsets = np.empty((rows, chunk_count), np.int64)
        for g in range(groups):
            part = chunk_offsets(rows, width, span, 16, stride, True)
            offsets[:, g * width : (g + 1) * width] = part + g * leading
        data = values
    else:
        # K rows in groups of 8, MN chunks in spans: SBO steps k groups, LBO steps spans (swapped without a swizzle).
        stride = 8 * width * 16
        leading = k * width * 16
        pair = (leading, stride) if span else (stride, leading)
        offsets = chunk_offsets(k, rows // 8, span, pair[0], pair[1], False)
        leading, stride = pair
        data = values.T
    image = np.zeros(rows * k * 2, np.uint8)
    address = tensormap.swizzle_offsets(offsets, span)
    source = np.ascontiguousarray(data).view(np.uint8).reshape(*offsets.shape, 16)
    for i in range(16):
        image[address + i] = source[:, :, i]
    return image, leading, stride


def _wgmma() -> Iterator[Case]:
    codes = {0: 0, 128: 1, 64: 2, 32: 3}
    for n in (8, 32, 64, 128, 256):
        for span in (0, 32, 64, 128):
            for majors in ("KK", "KM", "MK", "MM"):
                if (n > 64 and span not in (0, 128)) or (majors[1] == "M" and n * 2 < span):
                    continue
                for exact in (True, False) if n <= 64 else (True,):
                    yield _wgmma_case(n, span, majors, exact, codes[span])
                    if majors[0] == "K":
                        yield _wgmma_case(n, span, majors, exact, codes[span], registers=True)
                    if majors == "KK" and span == 128 and not exact:
                        yield _wgmma_case(n, span, majors, exact, codes[span], steps=4)
    # 32 columns beside operands of 64, and more rows of them.
    for majors in ("KM", "MM"):
        for n in (32, 64):
            yield _wgmma_case(n, 128, majors, True, 1, right=(64, 2))
    for n in (128, 256):
        yield _wgmma_case(n, 64, "KK", True, 2)


def wgmma_operands(name: str, n: int, span: int, majors: str, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits of A `[64, k]` and B `[n, k]`, of which a product takes the first 16 columns, or the first of all."""
    gen = rng(name)
    k = max(16, span // 2) if "K" in majors else 16
    make = (
        (lambda shape: gen.integers(-8, 9, shape).astype(np.float32))
        if exact
        else (lambda shape: gen.standard_normal(shape).astype(np.float32))
    )
    return round_bf16(make((64, k))), round_bf16(make((n, k)))


def _wgmma_case(
    n: int, span: int, majors: str, exact: bool, code: int, registers: bool = False, steps: int = 1,
    right: tuple[int, int] | None = None,
) -> Case:  # fmt: skip
    """One m64nNk16 product; K 16 fits one span of 32 bytes and up. A comes from shared memory or from registers.

    More `steps` add the products of the following columns, of a span of 128 bytes, to the same accumulators. `right`:
    span and code of B where they are not those of A.
    """
    b_span, b_code = right or (span, code)
    name = (
        f"wgmma n{n} {'A in registers, ' if registers else ''}swizzle {span}{f', B {b_span}' if right else ''} "
        f"majors {majors} "
        f"{f'{steps} steps ' if steps > 1 else ''}{'integers' if exact else 'random'}"
    )
    a, b = wgmma_operands(name, n, span, majors, exact)
    a_image, a_lead, a_stride = operand_image(a, span, majors[0] == "K")
    b_image, b_lead, b_stride = operand_image(b, b_span, majors[1] == "K")
    source = aligned(-(-(a_image.size + 1024 + b_image.size) // 16) * 16, np.uint8)
    source[: a_image.size] = a_image
    place = -(-a_image.size // 1024) * 1024
    source[place : place + b_image.size] = b_image

    def descriptor(lead: int, stride: int, code: int) -> int:
        return (lead >> 4) << 16 | (stride >> 4) << 32 | code << 62

    accumulators = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    transposes = ", ".join("0" if m == "K" else "1" for m in (majors[1] if registers else majors))
    left, arrays = "%d30", {"in": source}
    if registers:
        # Row-major A in global memory: register r holds rows +8 for odd r, columns +8 from r = 2 on.
        plain = aligned((64, 16), np.uint16)
        plain[:] = a[:, :16]
        arrays["a"] = plain
        left = "{%r80, %r81, %r82, %r83}"
    arrays["out"] = np.zeros((n // 2, 128), np.float32)
    target = len(arrays) - 1
    product = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{accumulators}}}"
    more = "".join(
        f"add.s64 %d32, %d30, {2 * i}; add.s64 %d33, %d31, {2 * i}; setp.eq.u32 %p9, %r1, %r1;\n"
        f"{product}, %d32, %d33, %p9, 1, 1, {transposes};\n"
        for i in range(1, steps)
    )
    body = (
        SETUP
        + f"""@%p1 bra WAIT0; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {source.size};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], {source.size}, [%r2];
"""
        + WAIT
        + f"""and.b32 %r50, %r1, 0x3FFFF; shr.u32 %r51, %r50, 4; cvt.u64.u32 %d30, %r51;
add.s64 %d31, %d30, {place >> 4};
or.b64 %d30, %d30, {_signed(descriptor(a_lead, a_stride, code))}; \
or.b64 %d31, %d31, {_signed(descriptor(b_lead, b_stride, b_code))};
shr.u32 %r40, %r0, 5; and.b32 %r41, %r0, 31; shr.u32 %r42, %r41, 2; and.b32 %r43, %r41, 3;
mad.lo.u32 %r44, %r40, 16, %r42; mul.wide.u32 %d40, %r44, 32; mul.wide.u32 %d41, %r43, 4; add.s64 %d40, %d40, %d41;
add.s64 %d40, %d40, %d1;
"""
        + (
            "".join(f"ld.global.b32 %r{80 + i}, [%d40+{256 * (i % 2) + 16 * (i // 2)}];\n" for i in range(4))
            if registers
            else ""
        )
        + f"""setp.ne.u32 %p8, %r1, %r1; wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{accumulators}}}, {left}, %d31, %p8, 1, 1, {transposes};
{more}wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %d50, %r0, 4; add.s64 %d50, %d50, %d{target};
"""
        + "".join(f"st.global.b32 [%d50+{512 * i}], %r{100 + i};\n" for i in range(n // 2))
    )
    return Case(name, "wgmma", body, arrays, ["out"], "bits" if exact else ("absolute", 2e-5), block=128, shared=65600)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def cases() -> Iterator[Case]:
    for name, code in INTEGER.items():
        if name == "cvt.sat":
            code = "mov.b64 %d5, {%r1, %r2}; " + code
        yield elementwise(f"integer {name}", "integer", code, 3)
    for name, code in FLOAT.items():
        check = "float"
        if "x2" in name or name in ("cvt.relu", "cvt.bf16"):
            check = "f16" if ".f16x2" in name else "bf16"
        yield elementwise(
            f"float {name}", "conversions" if name.startswith("cvt") else "float", code, 3, check=check, floats=True
        )
    for name, code in LONG.items():
        yield elementwise(f"64-bit {name}", "integer", code, 2, 64, 64, "float" if "f64" in name else "bits")
    for name, code in WARP.items():
        yield elementwise(f"warp {name}", "warp", code, 2)
    for name, (check, low, high) in APPROXIMATE.items():
        values = [rng(name).uniform(low, high, COUNT).astype(np.float32).view(np.uint32)]
        for ftz in ("", ".ftz") if name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt") else ("",):
            yield elementwise(
                f"approximate {name}{ftz}",
                "approximate",
                f"{name}.approx{ftz}.f32 %r10, %r1;",
                1,
                check=check,
                values=values,
            )
    for name, code in DIVIDE.items():
        values = [rng(f"{name} {i}").uniform(0.1, 100.0, COUNT).astype(np.float32).view(np.uint32) for i in (0, 1)]
        yield elementwise(f"approximate {name}", "approximate", code, 2, check=("ulp", 3), values=values)
    yield from _shared_pairs()
    yield from _adds()
    yield from _matrix_moves()
    yield from _copies()
    yield from _tensor_copies()
    yield from _clusters()
    yield from _wgmma()
