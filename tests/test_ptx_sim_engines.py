"""Asynchronous engines on small PTX programs: tensor copies, the tensor cores of SM100 and SM90, matrix loads."""

from __future__ import annotations

import numpy as np
import pytest

from .ptx_sim import tensormap
from .ptx_sim.memory import SimError
from .ptx_sim.ops_float import round_bf16, widen_bf16
from .ptx_sim.testing import aligned, run

RNG = np.random.default_rng(1)

SETUP = """mov.u32 %r0, %tid.x; mov.b32 %r1, smem; add.s32 %r2, %r1, 65536; setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1; mbarrier.init.shared.b64 [%r2+8], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
"""
LARGE = 65536 + 64


def wait(barrier: str, label: str, parity: int = 0) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p2, [{barrier}], {parity}; @!%p2 bra {label};\n"


def map_array(array: np.ndarray, element: str, box: tuple, swizzle: int) -> np.ndarray:
    """A tensor map of a C-contiguous array (dims reversed: the fastest first)."""
    out = aligned(128, np.uint8)
    dims = array.shape[::-1]
    data = tensormap.encode(array.ctypes.data, element, dims, array.strides[::-1][1:], box, swizzle)
    out[:] = np.frombuffer(data, np.uint8)
    return out


def dump(words: int) -> str:
    """Copy `words` 32-bit words of shared memory from smem to the second array, by the first warp."""
    return f"""mov.b32 %r10, %r0; mov.u32 %r14, %ntid.x;
DUMP: shl.b32 %r11, %r10, 2; add.u32 %r12, %r1, %r11; ld.shared.b32 %r13, [%r12];
mul.wide.u32 %d20, %r10, 4; add.s64 %d20, %d20, %d1; st.global.b32 [%d20], %r13; add.u32 %r10, %r10, %r14;
setp.lt.u32 %p5, %r10, {words}; @%p5 bra DUMP;
"""


def swizzled(rows: np.ndarray, span: int) -> np.ndarray:
    """Dense rows of `span` bytes as they stand in shared memory: chunk index XOR (row of the 128-byte line)."""
    data = rows.view(np.uint8).reshape(-1)
    at = np.arange(data.size)
    out = np.empty_like(data)
    out[tensormap.swizzle_offsets(at, span)] = data
    return out


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("corner", [(0, 0), (16, 3), (-8, -1), (56, 30)])
def test_tile_load_swizzles_and_fills_with_zeros(swizzle: int, corner: tuple) -> None:
    array = aligned((32, 64), np.uint16)
    array[:] = RNG.integers(1, 1 << 16, array.shape)
    width = (swizzle or 64) // 2
    tmap, out = map_array(array, "bf16", (width, 8), swizzle), aligned(8 * width // 2, np.uint32)
    code = (
        SETUP
        + f"""@%p1 bra WAIT0; mov.b32 %r5, {corner[0]}; mov.b32 %r6, {corner[1]};
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {16 * width};
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%d0, {{%r5, %r6}}], [%r2];
"""
        + wait("%r2", "WAIT0")
        + dump(4 * width)
    )
    run(code, {"map": tmap, "out": out, "array": array}, shared=LARGE)
    box = np.zeros((8, width), np.uint16)
    for i in range(8):
        for j in range(width):
            x, y = corner[0] + j, corner[1] + i
            if 0 <= x < 64 and 0 <= y < 32:
                box[i, j] = array[y, x]
    assert np.array_equal(out.view(np.uint8), swizzled(box, swizzle))


def test_gather4_and_scatter4() -> None:
    """Four rows by index, one of them out of range; scatter4 writes them to other rows and drops that one."""
    array, target = aligned((40, 64), np.uint16), aligned((40, 64), np.uint16)
    array[:] = RNG.integers(1, 1 << 16, array.shape)
    tmap, out = map_array(array, "bf16", (64, 1), 128), aligned(128, np.uint32)
    code = (
        SETUP
        + """@%p1 bra WAIT0; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
mov.b32 %r5, 0; mov.b32 %r6, 7; mov.b32 %r7, -1; mov.b32 %r8, 39; mov.b32 %r9, 40;
cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::1 [%r1],
 [%d0, {%r5, %r6, %r7, %r8, %r9}], [%r2];
"""
        + wait("%r2", "WAIT0")
        + """@%p1 bra OUT; mov.b32 %r20, 3; mov.b32 %r21, -1; mov.b32 %r22, 11; mov.b32 %r23, 1000;
cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d2, {%r5, %r20, %r21, %r22, %r23}], [%r1];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; OUT:
"""
        + dump(128)
    )
    run(
        code,
        {"map": tmap, "out": out, "to": map_array(target, "bf16", (64, 1), 128), "array": array, "target": target},
        shared=LARGE,
    )
    rows = np.stack([array[7], np.zeros(64, np.uint16), array[39], np.zeros(64, np.uint16)])
    assert np.array_equal(out.view(np.uint8), swizzled(rows, 128))
    assert np.array_equal(target[3], array[7])
    assert np.array_equal(target[11], array[39])
    assert not np.delete(target, (3, 11), 0).any()


def test_tile_reduction_adds_and_clips() -> None:
    array = aligned((6, 32), np.float32)
    array[:] = 1
    tmap, out = map_array(array, "f32", (32, 8), 128), aligned(256, np.uint32)
    code = (
        SETUP
        + """mov.b32 %r10, %r0; FILL: shl.b32 %r11, %r10, 2; add.u32 %r12, %r1, %r11; mov.b32 %r13, 0f40000000;
st.shared.b32 [%r12], %r13; add.u32 %r10, %r10, 32; setp.lt.u32 %p5, %r10, 256; @%p5 bra FILL;
fence.proxy.async; bar.sync 0; @%p1 bra END; mov.b32 %r5, 0; mov.b32 %r6, 2;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d0, {%r5, %r6}], [%r1]; END:
"""
    )
    run(code, {"map": tmap, "out": out, "array": array}, shared=LARGE)
    assert (array[:2] == 1).all()
    assert (array[2:] == 3).all()


def test_multicast_reaches_every_cta() -> None:
    array = aligned((8, 64), np.uint16)
    array[:] = RNG.integers(1, 1 << 16, array.shape)
    tmap, out = map_array(array, "bf16", (64, 8), 0), aligned(512, np.uint32)
    code = (
        SETUP
        + """mov.u32 %r30, %cluster_ctarank; @%p1 bra JOIN;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 1024; JOIN: barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p6, %r30, 0; or.pred %p6, %p6, %p1; @%p6 bra WAIT0; mov.b32 %r5, 0; mov.b16 %h1, 3;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r1],
 [%d0, {%r5, %r5}], [%r2], %h1;
"""
        + wait("%r2", "WAIT0")
        + "mul.wide.u32 %d21, %r30, 1024; add.s64 %d1, %d1, %d21;\n"
        + dump(256)
    )
    run(code, {"map": tmap, "out": out, "array": array}, shared=LARGE, grid=2, cluster=2)
    assert np.array_equal(out.view(np.uint16).reshape(2, 8, 64), np.stack([array, array]))


# Tensor memory --------------------------------------------------------------------------------------------------------

ALLOC = """add.s32 %r3, %r2, 32; shr.u32 %r40, %r0, 5; setp.ne.u32 %p7, %r40, 0; @%p7 bra SKIP_ALLOC;
tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r3], 512; SKIP_ALLOC: bar.sync 0; ld.shared.b32 %r4, [%r3];
"""
FREE = """bar.sync 0; @%p7 bra SKIP_FREE; tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 %r4, 512; SKIP_FREE:
"""


@pytest.mark.parametrize(("shape", "count"), [("32x32b", 16), ("16x64b", 8), ("16x128b", 4), ("16x256b", 2)])
def test_tensor_memory_shapes(shape: str, count: int) -> None:
    """Store 16 columns with 32x32b, read them with each shape: the fragment must be that of the PTX ISA figures."""
    regs = {"32x32b": count, "16x64b": count, "16x128b": 2 * count, "16x256b": 4 * count}[shape]
    out = np.zeros((regs, 32), np.uint32)
    code = SETUP + ALLOC.format(g=1) + "".join(f"mad.lo.u32 %r{100 + i}, %r0, 256, {i};\n" for i in range(16))
    code += (
        f"""tcgen05.st.sync.aligned.32x32b.x16.b32 [%r4], {{{", ".join(f"%r{100 + i}" for i in range(16))}}};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{", ".join(f"%r{200 + i}" for i in range(regs))}}}, [%r4];
tcgen05.wait::ld.sync.aligned; mul.wide.u32 %d20, %r0, 4; add.s64 %d20, %d20, %d0;
"""
        + "".join(f"st.global.b32 [%d20+{128 * i}], %r{200 + i};\n" for i in range(regs))
        + FREE.format(g=1)
    )
    report = run(code, {"out": out}, shared=LARGE)
    assert not report.findings
    lane, column = out >> 8, out & 255
    t = np.arange(32)
    if shape == "16x256b":
        # The accumulator fragment of mma.m16n8: rows t / 4 and t / 4 + 8, column pairs 2 (t % 4).
        assert np.array_equal(lane[:4], np.stack([t // 4, t // 4, t // 4 + 8, t // 4 + 8]))
        assert np.array_equal(column[:2], np.stack([2 * (t % 4), 2 * (t % 4) + 1]))
        assert (column[4:] == column[:4] + 8).all()
    elif shape == "16x128b":
        assert np.array_equal(lane[:2], np.stack([t // 4, t // 4 + 8]))
        assert np.array_equal(column[0], t % 4)
    elif shape == "16x64b":
        assert np.array_equal(lane[0], t // 4 + 8 * (t // 2 % 2))
        assert np.array_equal(column[0], t % 2)
    else:
        assert np.array_equal(lane[3], t)
        assert (column[3] == 3).all()


def test_tensor_memory_misuse() -> None:
    with pytest.raises(SimError, match="not all allocated"):
        run(SETUP + "mov.b32 %r4, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];", {}, shared=LARGE)
    report = run(SETUP + ALLOC.format(g=1) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4];", {}, shared=LARGE)
    assert any("uninitialised tensor memory" in f for f in report.findings)
    assert any("not deallocated" in f for f in report.findings)


def k_major_tile(values: np.ndarray) -> np.ndarray:
    """[rows, 64] 16-bit values as a 128-byte swizzled K-major operand: 8-row groups of 1024 bytes."""
    return swizzled(np.ascontiguousarray(values), 128)


def umma_descriptor(offset: int, stride: int = 1024) -> int:
    return (offset >> 4) | (1 << 16) | (stride >> 4) << 32 | 1 << 46 | 2 << 61


def idesc(m: int, n: int, b_major: int = 0) -> int:
    return 1 << 4 | 1 << 7 | 1 << 10 | b_major << 16 | (n // 8) << 17 | (m // 16) << 24


MMA_CASES = [
    (64, 128, 1, ""),
    (128, 64, 1, ""),
    (64, 128, 1, ".ws"),
    (32, 128, 1, ".ws"),
    (128, 64, 2, ""),
    (256, 64, 2, ""),
]


@pytest.mark.parametrize(("m", "n", "group", "ws"), MMA_CASES)
def test_mma_accumulator_layouts(m: int, n: int, group: int, ws: str) -> None:
    """A [m, 64] times B [n, 64] over four instructions of K 16, read back lane by lane."""
    a = widen_bf16(round_bf16(RNG.standard_normal((m, 64)).astype(np.float32)))
    b = widen_bf16(round_bf16(RNG.standard_normal((n, 64)).astype(np.float32)))
    rows, share = m // group, n // group
    images = np.concatenate(
        [
            np.concatenate(
                [
                    k_major_tile(round_bf16(np.ascontiguousarray(x[c * k : (c + 1) * k])))
                    for x, k in ((a, rows), (b, share))
                ]
            )
            for c in range(group)
        ]
    )
    size = (rows + share) * 128
    source = aligned(images.size, np.uint8)
    source[:] = images
    out = np.zeros((group, 128, n), np.float32)
    start = 1024
    code = (
        SETUP
        + ALLOC.format(g=group)
        + f"""mov.u32 %r30, %cluster_ctarank; mul.wide.u32 %d20, %r30, {size};
add.s64 %d20, %d20, %d0; @%p1 bra WAIT0; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {size};
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d20], {size}, [%r2];
"""
        + wait("%r2", "WAIT0")
        + f"""barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p6, %r30, 0; or.pred %p6, %p6, %p1; @%p6 bra WAIT1; mov.b32 %r50, {idesc(m, n)};
"""
    )
    for k in range(4):
        a_desc, b_desc = umma_descriptor(start + 32 * k), umma_descriptor(start + rows * 128 + 32 * k)
        code += f"""setp.ne.u32 %p8, {k}, 0; mov.b64 %d30, {a_desc - (1 << 64)}; mov.b64 %d31, {b_desc - (1 << 64)};
tcgen05.mma{ws}.cta_group::{group}.kind::f16 [%r4], %d30, %d31, %r50, %p8;
"""
    multicast, mask = (".multicast::cluster", ", %h1") if group == 2 else ("", "")
    code += (
        f"""mov.b16 %h1, 3; add.s32 %r60, %r2, 8;
tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r60]{mask};
"""
        + wait("%r2+8", "WAIT1")
        + f"""shl.b32 %r61, %r40, 21; add.u32 %r61, %r61, %r4;
mad.lo.u32 %r62, %r30, 128, %r0; mul.wide.u32 %d40, %r62, {4 * n}; add.s64 %d40, %d40, %d1; mov.b32 %r63, 0;
READ: tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{", ".join(f"%r{100 + i}" for i in range(8))}}}, [%r61];
tcgen05.wait::ld.sync.aligned; st.global.v4.b32 [%d40], {{%r100, %r101, %r102, %r103}};
st.global.v4.b32 [%d40+16], {{%r104, %r105, %r106, %r107}}; add.s64 %d40, %d40, 32; add.u32 %r61, %r61, 8;
add.u32 %r63, %r63, 8; setp.lt.u32 %p9, %r63, {n}; @%p9 bra READ;
"""
        + FREE.format(g=group)
    )
    run(code, {"source": source, "out": out}, shared=LARGE, grid=group, cluster=group, block=128)
    truth = a.astype(np.float64) @ b.T.astype(np.float64)
    for c in range(group):
        mine = truth[c * rows : (c + 1) * rows]
        if rows == 128:
            parts = [(0, 0, 128, 0, n)]
        elif (ws and m == 64) or group == 2:
            parts = [(0, 0, 64, 0, n // 2), (64, 0, 64, n // 2, n // 2)]
        elif m == 32:
            parts = [(32 * w, 0, 32, w * n // 4, n // 4) for w in range(4)]
        else:
            parts = [(32 * w, 16 * w, 16, 0, n) for w in range(4)]
        for lane, row, count, column, width in parts:
            got = out[c, lane : lane + count, :width]
            np.testing.assert_allclose(got, mine[row : row + count, column : column + width], rtol=1e-5, atol=1e-4)


# SM90 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a_source", ["shared", "registers"])
def test_wgmma(a_source: str) -> None:
    n = 32
    a = widen_bf16(round_bf16(RNG.standard_normal((64, 64)).astype(np.float32)))
    b = widen_bf16(round_bf16(RNG.standard_normal((n, 64)).astype(np.float32)))
    source = aligned(128 * (64 + n), np.uint8)
    source[:] = np.concatenate([k_major_tile(round_bf16(a)), k_major_tile(round_bf16(b))])
    out = np.zeros((64, n), np.float32)
    plain = aligned((64, 64), np.uint16)
    plain[:] = round_bf16(a)
    accumulators = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    code = (
        SETUP
        + f"""@%p1 bra WAIT0; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {source.size};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], {source.size}, [%r2];
"""
        + wait("%r2", "WAIT0")
        + """shr.u32 %r40, %r0, 5; and.b32 %r41, %r0, 31; shr.u32 %r42, %r41, 2;
and.b32 %r43, %r41, 3;
mad.lo.u32 %r44, %r40, 16, %r42; mul.wide.u32 %d40, %r44, 128; mul.wide.u32 %d41, %r43, 4; add.s64 %d40, %d40, %d41;
add.s64 %d40, %d40, %d2; wgmma.fence.sync.aligned;
"""
    )
    for k in range(4):
        a_desc = (1024 + 32 * k) >> 4 | 1 << 16 | 64 << 32 | 1 << 62
        b_desc = (1024 + 64 * 128 + 32 * k) >> 4 | 1 << 16 | 64 << 32 | 1 << 62
        code += f"setp.ne.u32 %p8, {k}, 0; mov.b64 %d30, {a_desc}; mov.b64 %d31, {b_desc};\n"
        if a_source == "shared":
            code += (
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{accumulators}}}, "
                "%d30, %d31, %p8, 1, 1, 0, 0;\n"
            )
        else:
            code += "".join(
                f"ld.global.b32 %r{200 + i}, [%d40+{32 * k + 1024 * (i % 2) + 16 * (i // 2)}];\n" for i in range(4)
            )
            code += (
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{accumulators}}}, "
                "{%r200, %r201, %r202, %r203}, %d31, %p8, 1, 1, 0;\n"
            )
    code += f"""wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %d50, %r44, {4 * n}; mul.wide.u32 %d51, %r43, 8; add.s64 %d50, %d50, %d51; add.s64 %d50, %d50, %d1;
"""
    for i in range(n // 8):
        code += f"st.global.v2.b32 [%d50+{32 * i}], {{%r{100 + 4 * i}, %r{101 + 4 * i}}};\n"
        code += f"st.global.v2.b32 [%d50+{32 * i + 32 * n}], {{%r{102 + 4 * i}, %r{103 + 4 * i}}};\n"
    run(code, {"source": source, "out": out, "plain": plain}, shared=LARGE, block=128, target="sm_90a")
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.T.astype(np.float64), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("transpose", ["", ".trans"])
def test_ldmatrix_and_stmatrix(transpose: str) -> None:
    source, out = aligned((16, 16), np.uint16), aligned((16, 16), np.uint16)
    source[:] = RNG.integers(0, 1 << 16, source.shape)
    code = f"""mov.u32 %r0, %tid.x; mov.b32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2;
mul.wide.u32 %d9, %r0, 16; add.s64 %d10, %d0, %d9; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d10];
st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4{transpose}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];
add.u32 %r3, %r3, 1024; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {{%r10, %r11, %r12, %r13}};
bar.warp.sync -1; ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3]; add.s64 %d10, %d1, %d9;
st.global.v4.b32 [%d10], {{%r4, %r5, %r6, %r7}};
"""
    run(code, {"source": source, "out": out})
    matrices = source.reshape(4, 8, 8)
    truth = matrices.transpose(0, 2, 1) if transpose else matrices
    assert np.array_equal(out.reshape(4, 8, 8), truth)
