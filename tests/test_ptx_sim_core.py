"""The simulator's core: arithmetic, divergence, barriers, memory checks and reports, on small PTX programs."""

from __future__ import annotations

import numpy as np
import pytest

from .ptx_sim.machine import Deadlock
from .ptx_sim.memory import SimError
from .ptx_sim.parser import PtxError, parse
from .ptx_sim.testing import LANE, aligned, lane_address, launch, ptx, run, unary

RNG = np.random.default_rng(0)
A, B, C = (RNG.integers(0, 1 << 32, 32, dtype=np.uint32) for _ in range(3))
A[:4], B[:4] = (0, 1, 0xFFFFFFFF, 0x80000000), (5, 0xFFFFFFFF, 0x80000000, 31)
LONG = RNG.integers(0, 1 << 63, 32, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
M32 = 0xFFFFFFFF


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def trunc_div(a: int, b: int) -> int:
    return int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


INTEGER = {
    "add.u32 %r100, %r1, %r2;": lambda a, b, c: a + b,
    "sub.s32 %r100, %r1, %r2;": lambda a, b, c: a - b,
    "mul.lo.s32 %r100, %r1, %r2;": lambda a, b, c: a * b,
    "mul.hi.u32 %r100, %r1, %r2;": lambda a, b, c: (a * b) >> 32,
    "mul.hi.s32 %r100, %r1, %r2;": lambda a, b, c: (signed(a) * signed(b)) >> 32,
    "mad.lo.s32 %r100, %r1, %r2, %r3;": lambda a, b, c: a * b + c,
    "min.s32 %r100, %r1, %r2;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r100, %r1, %r2;": lambda a, b, c: max(a, b),
    "min.relu.s32 %r100, %r1, %r2;": lambda a, b, c: max(0, min(signed(a), signed(b))),
    "and.b32 %r100, %r1, %r2;": lambda a, b, c: a & b,
    "lop3.b32 %r100, %r1, %r2, %r3, 0x96;": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %r100, %r1, %r2, %r3, 0xE8;": lambda a, b, c: (a & b) | (a & c) | (b & c),
    "shl.b32 %r100, %r1, %r2;": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %r100, %r1, %r2;": lambda a, b, c: a >> min(b, 32),
    "shr.s32 %r100, %r1, %r2;": lambda a, b, c: signed(a) >> min(b, 31),
    "shf.l.wrap.b32 %r100, %r1, %r2, %r3;": lambda a, b, c: (((b << 32) | a) << (c & 31)) >> 32,
    "shf.r.clamp.b32 %r100, %r1, %r2, %r3;": lambda a, b, c: ((b << 32) | a) >> min(c, 32),
    "bfe.u32 %r100, %r1, 5, 9;": lambda a, b, c: (a >> 5) & 511,
    "bfi.b32 %r100, %r1, %r2, 4, 8;": lambda a, b, c: (b & ~0xFF0) | ((a & 0xFF) << 4),
    "prmt.b32 %r100, %r1, %r2, 0x7531;": lambda a, b, c: int.from_bytes(
        (a.to_bytes(4, "little") + b.to_bytes(4, "little"))[1::2], "little"
    ),
    "popc.b32 %r100, %r1;": lambda a, b, c: a.bit_count(),
    "clz.b32 %r100, %r1;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %r100, %r1;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "div.u32 %r100, %r1, 7;": lambda a, b, c: a // 7,
    "div.s32 %r100, %r1, -7;": lambda a, b, c: trunc_div(signed(a), -7),
    "rem.s32 %r100, %r1, 7;": lambda a, b, c: signed(a) - 7 * trunc_div(signed(a), 7),
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r100, %r1, %r2, %p1;": lambda a, b, c: a if signed(a) < signed(b) else b,
    "setp.hi.u32 %p1|%p2, %r1, %r2; selp.b32 %r100, 1, 0, %p2;": lambda a, b, c: int(a <= b),
    "cvt.s32.s8 %r100, %r1;": lambda a, b, c: (a & 255) - ((a & 128) << 1),
    "cvt.u32.u16 %r100, %r1;": lambda a, b, c: a & 0xFFFF,
}


@pytest.mark.parametrize("code", INTEGER)
def test_integer_instructions(code: str) -> None:
    if "cvt" in code:
        code_run = code.replace("%r1;", "%h1;")
        (out,) = unary(f"cvt.u16.u32 %h1, %r1; {code_run}\n", [A, B, C])
    else:
        (out,) = unary(code + "\n", [A, B, C])
    truth = [INTEGER[code](int(a), int(b), int(c)) & M32 for a, b, c in zip(A, B, C, strict=True)]
    assert out.tolist() == truth


def test_predicated_instructions_leave_other_lanes() -> None:
    (out,) = unary(
        "mov.b32 %r100, 7; setp.gt.u32 %p1, %r0, 9; @%p1 add.u32 %r100, %r100, %r0; @!%p1 mov.b32 %r100, 3;\n", [A]
    )
    assert out.tolist() == [3] * 10 + [7 + i for i in range(10, 32)]


def test_float_rounding() -> None:
    """fma rounds once; cvt.rn.bf16x2 rounds to even and keeps NaN."""
    a, b, c = (RNG.standard_normal(32).astype(np.float32) for _ in range(3))
    a[0], b[0], c[0] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(-1)
    (out,) = unary("fma.rn.f32 %r100, %r1, %r2, %r3;\n", [x.view(np.uint32) for x in (a, b, c)])
    from fractions import Fraction

    for got, x, y, z in zip(out.view(np.float32), a, b, c, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [Fraction(float(v)) for v in (np.nextafter(got, np.float32(-9)), got, np.nextafter(got, np.float32(9)))]
        assert abs(near[1] - exact) == min(abs(v - exact) for v in near)
    special = np.array([0x3F808000, 0x3F818000, 0x7FC00001, 0x7F7FFFFF, 0xBF800001, 0x3F800000] * 6, np.uint32)[:32]
    (out,) = unary("cvt.rn.bf16x2.f32 %r100, %r1, %r1;\n", [special])
    assert [hex(v & 0xFFFF) for v in out[:6]] == ["0x3f80", "0x3f82", "0x7fff", "0x7f80", "0xbf80", "0x3f80"]


def test_registers_that_nobody_wrote_read_as_nan() -> None:
    """So an accumulator that is not cleared shows."""
    code = "mov.b32 %r100, %r40;\nmov.b32 %r101, %r41;\n"
    for bits in unary(code, [A], out=2):
        assert np.isnan(bits.view(np.float32)).all()


def test_packed_arithmetic_and_64_bits() -> None:
    x = RNG.standard_normal(64).astype(np.float32)
    y = RNG.standard_normal(64).astype(np.float32)
    (out,) = unary("add.rn.f32x2 %d50, %d11, %d12;\n", [x.view(np.uint64), y.view(np.uint64)], width=64)
    assert np.array_equal(out.view(np.float32), x + y)
    (out,) = unary("mul.hi.u64 %d50, %d11, %d12;\n", [LONG, LONG[::-1].copy()], width=64)
    assert out.tolist() == [(int(a) * int(b)) >> 64 for a, b in zip(LONG, LONG[::-1], strict=True)]


def test_divergence_reconverges() -> None:
    """A loop with a trip count per lane inside an if, then a vote that needs all lanes again."""
    code = """mov.b32 %r100, 0; setp.lt.u32 %p1, %r0, 20; @!%p1 bra SKIP; mov.b32 %r5, %r0;
LOOP: setp.eq.u32 %p2, %r5, 0; @%p2 bra SKIP; add.u32 %r100, %r100, 2; sub.u32 %r5, %r5, 1; bra LOOP;
SKIP: vote.sync.ballot.b32 %r101, 1, -1;
"""
    out, ballot = unary(code, [A], out=2)
    assert out.tolist() == [2 * i if i < 20 else 0 for i in range(32)]
    assert (ballot == M32).all()


def test_lanes_of_a_warp_make_independent_progress() -> None:
    """One lane spins on a flag that another lane of the same warp sets later."""
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    code = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 bra SPIN;
mov.b32 %r2, 5; st.global.b32 [%d0], %r2; bra END;
SPIN: ld.volatile.global.b32 %r1, [%d0]; setp.eq.u32 %p2, %r1, 0; @%p2 bra SPIN; st.global.b32 [%d1], %r1;
END: bar.warp.sync -1;
"""
    run(code, {"flag": flag, "out": out})
    assert out[0] == 5


def test_exit_of_some_lanes() -> None:
    out = np.zeros(32, np.uint32)
    run(
        LANE
        + lane_address(0, 10)
        + """setp.lt.u32 %p1, %r0, 8; @%p1 exit;
mov.b32 %r2, 1; st.global.b32 [%d10], %r2; vote.sync.ballot.b32 %r3, 1, -1; st.global.b32 [%d10], %r3;
""",
        {"out": out},
    )
    assert out.tolist() == [0] * 8 + [0xFFFFFF00] * 24


@pytest.mark.parametrize(
    ("mode", "truth"),
    [
        ("idx.b32 %r100, %r0, 3, 31", [3] * 32),
        ("up.b32 %r100, %r0, 1, 0", [0, *range(31)]),
        ("down.b32 %r100, %r0, 2, 31", [*range(2, 32), 30, 31]),
        ("bfly.b32 %r100, %r0, 1, 31", [i ^ 1 for i in range(32)]),
        ("idx.b32 %r100, %r0, 1, 6175", [(i & 24) + 1 for i in range(32)]),
    ],
)
def test_shuffles(mode: str, truth: list) -> None:
    (out,) = unary(f"shfl.sync.{mode}, -1;\n", [A])
    assert out.tolist() == truth


def test_redux_elect_match() -> None:
    total, leader = unary(
        """redux.sync.add.u32 %r100, %r0, -1; setp.gt.u32 %p2, %r0, 4; mov.b32 %r101, 0;
@!%p2 bra OUT;
elect.sync %r5|%p1, 0xFFFFFFE0; @%p1 mov.b32 %r101, %r0;
OUT:
""",
        [A],
        out=2,
    )
    assert (total == 31 * 16).all()
    assert leader.tolist() == [0] * 5 + [5] + [0] * 26


# Memory checks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ld.global.b32 %r1, [%d0+128];", ["load of 4 bytes out of range", "0 bytes past the end of rows", "line"]),
        ("ld.global.b32 %r1, [%d0+2];", ["misaligned", "byte 2 of rows"]),
        ("st.global.v4.b32 [%d0+120], {%r1, %r1, %r1, %r1};", ["store of 16 bytes misaligned"]),
        ("mov.b32 %r1, 5000; ld.shared.b32 %r2, [%r1+1024];", ["load of 4 bytes out of range", "offset 6024 of 5120"]),
        ("mov.b32 %r1, smem; st.shared.v2.b32 [%r1+4], {%r1, %r1};", ["misaligned", "byte 4 of smem"]),
        ("mov.b32 %r1, smem; mbarrier.arrive.shared.b64 _, [%r1];", ["no mbarrier was initialised", "smem"]),
        ("bar.sync 1, 48;", ["no multiple of the warp size"]),
        ("trap;", ["trap executed"]),
    ],
)
def test_bad_accesses_name_the_buffer_and_the_line(code: str, words: list) -> None:
    array = aligned(32, np.uint32)
    with pytest.raises(SimError) as caught:
        run(code, {"rows": array})
    for word in [*words, "PTX line", "CTA (0, 0, 0)"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("form", [
    "mul24.lo.u32", "cvt.pack.sat.s16.s32.b32", "mad.lo.cc.u32", "mad.hi.sat.s32", "cvt.rn.relu.bf16.f32",
    "cvt.rn.relu.f16x2.e4m3x2", "cvt.rn.satfinite.f16x2.f32", "cvt.rni.f16.f16", "cvt.rmi.f64.f64", "rcp.rz.f32",
    "sqrt.rp.f32", "setp.gt.f16x2", "set.gt.f16x2.f16x2", "cvt.sat.u32.u64", "cvt.sat.s64.u64", "cvt.rm.f16.f32",
    "cvt.rn.sat.f16.f32", "add.sat.f16x2", "fma.rn.sat.f16x2", "cvt.rp.f32.u64", "cvt.rn.bf16.s32", "cvt.rn.f16.f64",
    "cvt.rn.satfinite.tf32.f32", "cvt.rs.f16x2.f32", "cp.async.bulk.global.shared::cta.bulk_group.cp_mask",
    "tcgen05.mma.cta_group::1.kind::f16.ashift",
])  # fmt: skip
def test_forms_that_are_not_modelled_are_refused(form: str) -> None:
    """Their modifiers or roundings would be dropped in silence; none may fall back to a shorter opcode."""
    with pytest.raises(PtxError, match=rf"unmodelled form {form}\n  at line \d+"):
        run(f"{form} %r1, %r2, %r3;", {"x": aligned(32, np.uint32)})


def test_unknown_opcode_is_an_error_with_its_line() -> None:
    with pytest.raises(PtxError, match=r"unknown opcode frobnicate.u32\n  at line \d+: frobnicate.u32 %r1, %r2"):
        run("frobnicate.u32 %r1, %r2;", {})


def test_uninitialised_shared_memory_is_reported() -> None:
    report = run("mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1+64];", {})
    assert "uninitialised shared memory" in report.findings[0]
    assert "byte 64 of smem" in report.findings[0]
    assert not run("mov.b32 %r1, smem; st.shared.b32 [%r1], %r1; ld.shared.b32 %r2, [%r1];", {}).findings


def test_deadlock_says_who_waits_for_what() -> None:
    code = """mov.b32 %r1, smem; mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, 32; @%p1 bra OTHER;
mbarrier.init.shared.b64 [%r1], 3;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT; bra END;
OTHER: bar.sync 2, 96;
END:
"""
    code = code.replace("mbarrier.init", "setp.eq.u32 %p3, %r0, 0;\n@%p3 mbarrier.init")
    with pytest.raises(Deadlock) as caught:
        run(code, {}, block=64)
    text = str(caught.value)
    assert "warp 0 waits for mbarrier at shared address 0x400" in text
    assert "phase 0, 3 of 3 arrivals and 0 bytes pending" in text
    assert "warp 1 waits for named barrier 2: 32 of 96 threads arrived" in text


def test_livelock_is_reported() -> None:
    flag = {"flag": np.zeros(1, np.uint32)}
    with pytest.raises(Deadlock, match=r"livelock: CTA .* warp 0 spins at PTX line(.|\n)*can run"):
        run("SPIN: ld.volatile.global.b32 %r1, [%d0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;", flag)
    with pytest.raises(Deadlock, match=r"livelock: 5 time slices without progress: CTA .* warp 0 runs at PTX line"):
        run("SPIN: mov.u32 %r1, %clock; setp.ne.u32 %p1, %r1, 1; @%p1 bra SPIN;", flag, limit=5)


# Barriers and asynchronous copies -------------------------------------------------------------------------------------


def test_mbarrier_phases_and_bulk_copy() -> None:
    """expect_tx, a bulk load, a bulk store and a bulk reduction."""
    source, out = aligned(64, np.float32), aligned(64, np.float32)
    source[:] = RNG.standard_normal(64)
    out[:] = 1
    code = """mov.b32 %r1, smem; mov.u32 %r0, %tid.x; add.s32 %r2, %r1, 512; setp.ne.u32 %p1, %r0, 0; @%p1 bra WAIT;
mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [%r2];
WAIT: bar.warp.sync -1;
AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra AGAIN;
@%p1 bra END;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 256;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
"""
    run(code, {"source": source, "out": out})
    assert np.array_equal(out, 1 + source)


def test_too_many_arrivals() -> None:
    with pytest.raises(SimError, match="32 arrivals at an mbarrier that expects 4 more"):
        run(
            """mov.b32 %r1, smem; elect.sync %r9|%p1, -1; @%p1 mbarrier.init.shared.b64 [%r1], 4;
mbarrier.arrive.shared.b64 %d9, [%r1];""",
            {},
        )


def test_cluster_shared_memory() -> None:
    """Each CTA of a pair writes into the other's shared memory through mapa, then reads its own."""
    out = np.zeros(64, np.uint32)
    code = """mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
mov.b32 %r3, smem; shl.b32 %r4, %r0, 2; add.u32 %r3, %r3, %r4;
mapa.shared::cluster.u32 %r5, %r3, %r2; mad.lo.u32 %r6, %r1, 100, %r0;
barrier.cluster.arrive; barrier.cluster.wait;
st.shared::cluster.b32 [%r5], %r6;
barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
ld.shared.b32 %r7, [%r3]; mad.lo.u32 %r8, %r1, 32, %r0; mul.wide.u32 %d9, %r8, 4; add.s64 %d9, %d9, %d0;
st.global.b32 [%d9], %r7;
"""
    run(code, {"out": out}, grid=2, cluster=2)
    assert out.tolist() == [100 + i for i in range(32)] + list(range(32))


def test_named_barrier_between_producers_and_consumers() -> None:
    out = np.zeros(32, np.uint32)
    code = """mov.u32 %r0, %tid.x; mov.b32 %r1, smem; and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 2; add.u32 %r1, %r1, %r3;
setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
add.u32 %r4, %r0, 40; st.shared.b32 [%r1], %r4; bar.arrive 1, 64; bra END;
CONSUMER: bar.sync 1, 64; ld.shared.b32 %r5, [%r1]; mul.wide.u32 %d9, %r2, 4; add.s64 %d9, %d9, %d0;
st.global.b32 [%d9], %r5;
END:
"""
    report = run(code, {"out": out}, block=64)
    assert out.tolist() == list(range(40, 72))
    assert not report.findings


def test_atomics() -> None:
    total, slots = np.zeros(4, np.uint32), np.zeros(32, np.uint32)
    run(
        LANE
        + lane_address(1, 10)
        + """atom.global.add.u32 %r5, [%d0], 2; st.global.b32 [%d10], %r5;
red.global.max.u32 [%d0+4], %r0; atom.global.cas.b32 %r6, [%d0+8], 0, %r0; atom.global.exch.b32 %r7, [%d0+12], %r0;
""",
        {"total": total, "slots": slots},
    )
    assert total.tolist() == [64, 31, 1, 31]
    assert sorted(slots.tolist()) == list(range(0, 64, 2))


@pytest.mark.parametrize("lanes_meet", [False, True])
def test_fp32_adds_flush_in_global_memory_only(lanes_meet: bool) -> None:
    """PTX ISA, atom and red: of subnormal operands and results the sign stays; shared memory keeps them."""
    tiny = np.float32(2.0**-130)
    start = np.array([tiny, -tiny, 2.0**-126, 1.0], np.float32)
    value = np.array([tiny, -0.0, -(2.0**-126) - 2.0**-140, 1.0], np.float32)
    cells, vector, shared = start.copy(), start.copy(), np.zeros(4, np.float32)
    who = "setp.lt.u32 %p1, %r0, 4;" if not lanes_meet else "setp.eq.u32 %p1, %r0, %r0;"
    pick = "and.b32 %r1, %r0, 3; shl.b32 %r2, %r1, 2; cvt.u64.u32 %d9, %r2;"
    run(
        LANE
        + f"""{pick} {who} mov.b32 %r3, smem; add.u32 %r3, %r3, %r2;
add.s64 %d10, %d9, %d1; add.s64 %d11, %d9, %d3; add.s64 %d12, %d9, %d0; add.s64 %d13, %d9, %d4;
ld.global.b32 %r4, [%d10]; ld.global.b32 %r5, [%d13]; st.shared.b32 [%r3], %r5; bar.warp.sync -1;
setp.lt.u32 %p2, %r0, 4; @%p2 red.shared.add.f32 [%r3], %r4; bar.warp.sync -1;
ld.shared.b32 %r6, [%r3]; st.global.b32 [%d11], %r6;
@%p1 red.global.add.f32 [%d12], %r4;
ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d1]; setp.eq.u32 %p3, %r0, 0;
@%p3 red.global.add.v4.f32 [%d2], {{%r20, %r21, %r22, %r23}};
""",
        {"cells": cells, "value": value, "vector": vector, "shared": shared, "start": start.copy()},
    )
    flushed = np.array([0.0, -0.0, -0.0, 2.0], np.float32)
    assert shared.view(np.uint32).tolist() == (start + value).view(np.uint32).tolist()
    assert vector.view(np.uint32).tolist() == flushed.view(np.uint32).tolist()
    if lanes_meet:
        assert cells[:2].tolist() == [0, 0] and cells[3] == 9
    else:
        assert cells.view(np.uint32).tolist() == flushed.view(np.uint32).tolist()


def test_clocks_advance() -> None:
    (out,) = unary(
        "mov.u32 %r1, %clock; mov.u64 %d9, %globaltimer; mov.u32 %r2, %clock; sub.u32 %r100, %r2, %r1;\n", [A]
    )
    assert (out > 0).all()


def test_a_program_is_translated_once_and_its_global_variables_are_its_own() -> None:
    """Launches of one text share its translation, not what they run on; with a variable in memory nothing."""
    body = LANE + lane_address(0, 60) + "mov.u32 %r1, %ntid.x;\nst.global.b32 [%d60], %r1;\n"
    launches = [launch(body, {"a": np.zeros(64, np.uint32)}, block=block) for block in (32, 64)]
    first, second = (one.program(one.memory()) for one in launches)
    assert first.full_code is second.full_code and first.launch is not second.launch
    for one, threads in zip(launches, (32, 64), strict=True):
        one.run()
        assert one.tensors[0][3].tolist() == [threads] * threads + [0] * (64 - threads)
    counted = ".global .u32 count = 5;\n" + LANE + lane_address(0, 60)
    counted += "mov.u64 %d1, count;\natom.global.add.u32 %r1, [%d1], 1;\nst.global.b32 [%d60], %r1;\n"
    for _ in range(2):
        a = np.zeros(32, np.uint32)
        run(counted, {"a": a})
        assert sorted(a.tolist()) == list(range(5, 37))


def test_parser_scopes_and_lines() -> None:
    module = parse(ptx("{ .reg .b32 x; mov.b32 x, 1; { .reg .b32 x; mov.b32 x, 2; } mov.b32 %r1, x; }", 0))
    body = module.kernels["kernel"].body
    assert body[0].operands[0] == body[2].operands[1]
    assert body[0].operands[0] != body[1].operands[0]


PRINT = """.local .align 8 .b8 depot[32]; mov.b64 %d20, depot; cvta.local.u64 %d21, %d20; setp.gt.u32 %p1, %r0, 1;
st.local.b32 [%d20], %r0; mov.b64 %d22, 0d3FF8000000000000; st.local.b64 [%d20+8], %d22; st.local.b64 [%d20+16], %d0;
@%p1 bra OUT;
{ .param .b64 text; .param .b64 values; .param .b32 result; st.param.b64 [text], %d1; st.param.b64 [values], %d21;
call.uni (result), vprintf, (text, values); ld.param.b32 %r9, [result]; }
OUT:
"""


def test_printf(capsys: pytest.CaptureFixture) -> None:
    """The PTX that compilers emit for printf: one line per lane, values laid out as a C struct."""
    name = np.frombuffer(b"rows\0", np.uint8).copy()
    text = np.frombuffer(b"%02d: %-5.1f|%s 100%%\n\0", np.uint8).copy()
    report = run(LANE + PRINT, {"name": name, "text": text})
    assert report.printed == ["00: 1.5  |rows 100%\n", "01: 1.5  |rows 100%\n"]
    assert capsys.readouterr().out == "".join(report.printed)
    assert not report.findings


def test_calls_of_other_functions_are_refused() -> None:
    with pytest.raises(PtxError, match=r"call of somewhere: device functions that are not inlined are not modelled"):
        run("call.uni somewhere, (%r1);", {})
