"""What the simulator refuses or reports: undefined behaviour, limits of the hardware, PTX that does not assemble."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from .ptx_sim import assembly
from .ptx_sim.launch import Launch
from .ptx_sim.machine import Deadlock, Findings
from .ptx_sim.matrix_operands import decode_umma, decode_wgmma
from .ptx_sim.memory import SimError
from .ptx_sim.ops_tcgen05 import Shape
from .ptx_sim.parser import PtxError
from .ptx_sim.tensormap import encode
from .ptx_sim.testing import LANE, aligned, lane_address, launch, ptx, run


def words() -> dict[str, np.ndarray]:
    return {"rows": aligned(64, np.uint32)}


# Member masks ---------------------------------------------------------------------------------------------------------

SYNC = [
    "vote.sync.ballot.b32 %r5, 1, {};",
    "vote.sync.any.pred %p5, 1, {};",
    "shfl.sync.idx.b32 %r5, %r0, 0, 31, {};",
    "shfl.sync.bfly.b32 %r5, %r0, 1, 31, {};",
    "redux.sync.add.u32 %r5, %r0, {};",
    "match.any.sync.b32 %r5, %r0, {};",
    "elect.sync %r5|%p5, {};",
    "bar.warp.sync {};",
]


@pytest.mark.parametrize("code", SYNC)
def test_a_member_mask_without_the_executing_lanes(code: str) -> None:
    with pytest.raises(SimError, match=r"lane 31 not in the member mask 0x7fffffff(.|\n)*PTX line \d+"):
        run(LANE + code.format("0x7FFFFFFF"), {})
    with pytest.raises(SimError, match=r"lanes 16-31 not in the member mask 0x0000ffff"):
        run(LANE + "mov.b32 %r9, 0xFFFF;" + code.format("%r9"), {})
    half = "setp.lt.u32 %p1, %r0, 16; @!%p1 bra OUT; " + code + " OUT: bar.warp.sync -1;"
    run(LANE + half.format("0xFFFF"), {})
    with pytest.raises(SimError, match=r"lanes 8-15 not in the member mask 0xffff00ff"):
        run(LANE + half.format("0xFFFF00FF"), {})


def test_different_member_masks_at_once_are_refused() -> None:
    code = "setp.lt.u32 %p1, %r0, 16; selp.b32 %r9, 0xFFFF, 0xFFFF0000, %p1; vote.sync.ballot.b32 %r5, 1, %r9;"
    with pytest.raises(SimError, match="different member masks"):
        run(LANE + code, {})


def test_a_shuffle_that_names_lanes_which_branched_away_goes_on() -> None:
    """As on hardware, and as a shipped kernel relies on; it is a finding."""
    code = "setp.lt.u32 %p1, %r0, 16; @!%p1 bra OUT; shfl.sync.idx.b32 %r5, %r0, 3, 31, -1; OUT: bar.warp.sync -1;"
    report = run(LANE + code, {})
    assert any("branched around" in f for f in report.findings)


# Named barriers -------------------------------------------------------------------------------------------------------


def test_named_barrier_numbers_and_counts() -> None:
    with pytest.raises(SimError, match=r"named barrier 16: a CTA has barriers 0 to 15"):
        run("bar.sync 16, 32;", {})
    with pytest.raises(SimError, match=r"named barrier 99"):
        run("mov.b32 %r1, 99; bar.arrive %r1, 64;", {})
    for code in ("bar.sync 1, 48;", "bar.arrive 1, 40;", "mov.b32 %r1, 33; barrier.sync 1, %r1;"):
        with pytest.raises(SimError, match="no multiple of the warp size"):
            run(code, {})


def test_arrivals_that_nobody_completes_are_reported() -> None:
    report = run("bar.arrive 3, 64;", {})
    assert len(report.findings) == 1
    assert "incomplete at the exit of CTA (0, 0, 0): named barrier 3: 32 of 64 threads" in report.findings[0]
    assert not run("bar.arrive 3, 32;", {}).findings


# Uninitialised memory -------------------------------------------------------------------------------------------------

SMEM = "mov.b32 %r1, smem; mov.b16 %h1, 0x7FF7; mov.b32 %r9, 0x7FF77FF7; mov.b64 %d9, 0x7FF77FF77FF77FF7;\n"
LOCAL = ".local .align 16 .b8 depot[64]; mov.b64 %d20, depot; cvta.local.u64 %d21, %d20;\n"


@pytest.mark.parametrize(
    ("write", "read"),
    [
        ("st.shared.b8 [%r1], %h1;", "ld.shared.u8 %r2, [%r1];"),
        ("st.shared.b16 [%r1], %h1;", "ld.shared.b16 %h2, [%r1];"),
        ("st.shared.b32 [%r1], %r9;", "ld.shared.b32 %r2, [%r1];"),
        ("st.shared.v2.b64 [%r1], {%d9, %d9};", "ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];"),
        ("st.shared.b32 [%r1], %r9;", "atom.shared.add.u32 %r2, [%r1], 1;"),
        ("st.shared.b32 [%r1], %r9;", "red.shared.add.u32 [%r1], 1;"),
        ("st.shared.b64 [%r1], %d9;", "ld.shared.v4.b16 {%h1, %h2, %h3, %h4}, [%r1];"),
        (
            "st.shared.v2.b64 [%r1], {%d9, %d9};",
            "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16; cp.async.bulk.wait_group 0;",
        ),
        ("st.local.b32 [%d20], %r9;", "ld.local.b32 %r2, [%d20];"),
        ("st.local.b8 [%d20], %h1;", "ld.u8 %r2, [%d21];"),
    ],
)
def test_reads_of_what_nobody_wrote_are_reported(write: str, read: str) -> None:
    """Each kind of read is a finding without the write, and none with it, even when it writes the poison's bits."""
    code = (LOCAL if "%d2" in read else "") + SMEM
    (finding,) = run(code + read, words()).findings
    assert "uninitialised" in finding
    assert "byte 0 of" in finding
    assert not run(code + write + read, words()).findings


def test_a_word_of_which_one_byte_is_missing_is_reported() -> None:
    code = SMEM + "st.shared.b8 [%r1], %h1; st.shared.b8 [%r1+1], %h1; st.shared.b8 [%r1+2], %h1;"
    (finding,) = run(code + "ld.shared.b32 %r2, [%r1];", {}).findings
    assert "load of uninitialised shared memory: 4 bytes" in finding
    assert not run(code + "st.shared.b8 [%r1+3], %h1; ld.shared.b32 %r2, [%r1];", {}).findings


def test_memory_is_unwritten_again_for_the_next_cta() -> None:
    code = SMEM + "mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0; @%p1 bra READ; st.shared.b32 [%r1], %r9; READ: "
    (finding,) = run(code + "ld.shared.b32 %r2, [%r1];", {}, grid=2).findings
    assert "CTA (1, 0, 0)" in finding


# Live mbarriers -------------------------------------------------------------------------------------------------------

BARRIER = (
    "mov.b32 %r1, smem; mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1+32], 1;\n"
)


@pytest.mark.parametrize(
    "code",
    [
        "st.shared.b32 [%r1+36], %r1;",
        "st.shared.v4.b32 [%r1+32], {%r1, %r1, %r1, %r1};",
        "st.shared.b8 [%r1+39], %h1;",
        "cvt.u64.u32 %d6, %r1; cvta.shared.u64 %d5, %d6; st.b32 [%d5+32], %r1;",
        "cp.async.cg.shared.global [%r1+32], [%d0], 16; cp.async.wait_all;",
        "st.shared.b32 [%r1+36], %r1; atom.shared.add.u32 %r5, [%r1+36], %r1;",
        "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+32], 64; @%p1 cp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes [%r1], [%d0], 64, [%r1+32];",
    ],
)
def test_writes_over_a_live_mbarrier_are_reported(code: str) -> None:
    findings = run(BARRIER + code, words()).findings
    assert any("write over a live mbarrier: by CTA (0, 0, 0)" in f and "byte 32 of smem" in f for f in findings)
    away = run(BARRIER + "@%p1 mbarrier.inval.shared.b64 [%r1+32];" + code, words()) if "arrive" not in code else None
    assert away is None or not any("live mbarrier" in f for f in away.findings)
    assert not run(BARRIER + "st.shared.b32 [%r1+28], %r1; st.shared.b32 [%r1+40], %r1;", {}).findings


def test_init_over_a_live_mbarrier_is_reported() -> None:
    again = "@%p1 mbarrier.init.shared.b64 [%r1+32], 2;"
    (finding,) = run(BARRIER + again, {}).findings
    assert "mbarrier.init over a live mbarrier without mbarrier.inval" in finding
    assert not run(BARRIER + "@%p1 mbarrier.inval.shared.b64 [%r1+32];" + again, {}).findings


# Messages -------------------------------------------------------------------------------------------------------------


def test_misaligned_atomics_name_the_buffer_and_lanes() -> None:
    with pytest.raises(SimError, match=r"global atomic of 4 bytes misaligned: 0x\w+, byte 6 of rows(.|\n)*lanes 4-31"):
        run(LANE + "setp.lt.u32 %p1, %r0, 4; @%p1 bra OUT; red.global.add.u32 [%d0+6], %r0; OUT:", words())
    with pytest.raises(SimError, match=r"shared atomic of 8 bytes misaligned: .*byte 4 of smem"):
        run("mov.b32 %r1, smem; atom.shared.add.u64 %d5, [%r1+4], %d6;", {})


def test_misaligned_copies_name_the_buffers() -> None:
    setup = BARRIER + "@!%p1 bra OUT; "
    for code, text in (
        ("cp.async.bulk.global.shared::cta.bulk_group [%d0+8], [%r1], 16;", r"byte 8 of rows"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1+4], 16;", r"byte 4 of smem"),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+8], [%d0], 16, [%r1+32];",
            r"byte 8 of smem",
        ),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d0, {%r5, %r6}], [%r1+16];", r"byte 16 of smem"),
    ):
        with pytest.raises(SimError, match=rf"misaligned, to \d+ bytes: .*{text}(.|\n)*in CTA .* warp 0, lane 0"):
            run(setup + code + " OUT:", {"rows": tensor_map()})


def tensor_map() -> np.ndarray:
    """A valid tensor map of itself: 32 rows of 4 bytes."""
    out = aligned(64, np.uint32)
    out.view(np.uint8)[:128] = np.frombuffer(encode(out.ctypes.data, "u32", (4, 8), (16,), (4, 8), 0), np.uint8)
    return out


def test_tensor_memory_messages_say_what_is_allocated() -> None:
    code = """mov.b32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64; bar.sync 0;
mov.b32 %r2, 48; tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{}}}, [%r2];""".format(
        ", ".join(f"%r{i}" for i in range(100, 132))
    )
    words = r"tcgen05.ld: columns 48 to 79 of CTA \(0, 0, 0\) are not all allocated; those are: 0-63\n  at PTX line"
    with pytest.raises(SimError, match=words):
        run(code, {})


# Generic addresses ----------------------------------------------------------------------------------------------------


def test_lanes_may_mix_state_spaces() -> None:
    """Lanes 0-9 point into global memory, 10-19 into shared memory, the others into local memory."""
    table, out = np.arange(100, 132, dtype=np.uint32), np.zeros(32, np.uint32)
    code = (
        ".local .align 16 .b8 depot[64]; mov.b64 %d20, depot; cvta.local.u64 %d21, %d20;\n"
        + LANE
        + lane_address(0, 10)
        + lane_address(1, 11)
        + """mov.b32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2; cvt.u64.u32 %d12, %r1;
cvta.shared.u64 %d12, %d12; add.s64 %d12, %d12, 0; add.s64 %d21, %d21, 16;
setp.lt.u32 %p1, %r0, 10; setp.lt.u32 %p2, %r0, 20; selp.b64 %d13, %d12, %d21, %p2; selp.b64 %d13, %d10, %d13, %p1;
add.u32 %r3, %r0, 1000; st.b32 [%d13], %r3; @%p2 atom.add.u32 %r5, [%d13], 5; ld.b32 %r4, [%d13];
st.global.b32 [%d11], %r4;
"""
    )
    report = run(code, {"table": table, "out": out})
    assert out.tolist() == [1005 + i for i in range(20)] + [1000 + i for i in range(20, 32)]
    assert table.tolist() == [1005 + i for i in range(10)] + [100 + i for i in range(10, 32)]
    assert not report.findings


def test_barriers_and_copies_need_shared_addresses() -> None:
    with pytest.raises(SimError, match=r"mbarrier: the generic address of all lanes is not in shared memory"):
        run("mbarrier.arrive.b64 %d5, [%d0];", words())
    with pytest.raises(SimError, match="atomic on local memory"):
        run(LOCAL + "st.local.b32 [%d20], %r1; atom.add.u32 %r5, [%d21], 1;", {})


# Forward progress -----------------------------------------------------------------------------------------------------

LOCK = """LOCK: atom.global.cas.b32 %r5, [%d0], 0, 1; setp.ne.u32 %p2, %r5, 0; @%p2 bra LOCK;
ld.global.b32 %r6, [%d0+4]; add.u32 %r6, %r6, 1; st.global.b32 [%d0+4], %r6;
membar.gl; atom.global.exch.b32 %r7, [%d0], 0;
"""


@pytest.mark.parametrize("after", ["", "bar.sync 0;", "bar.warp.sync -1;", "vote.sync.all.pred %p4, 1, -1;"])
@pytest.mark.parametrize("block", [32, 48, 96])
def test_every_lane_gets_its_turn_at_a_lock(after: str, block: int) -> None:
    state = np.zeros(2, np.uint32)
    run(LOCK + after, {"state": state}, block=block)
    assert state.tolist() == [0, block]


def test_a_lock_inside_a_branch_with_backoff() -> None:
    state = np.zeros(2, np.uint32)
    lock = LOCK.replace("@%p2 bra LOCK", "@%p2 nanosleep.u32 100; @%p2 bra LOCK")
    run(LANE + "setp.lt.u32 %p1, %r0, 7; @%p1 bra OUT;" + lock + "OUT: bar.sync 0;", {"state": state}, block=64)
    assert state.tolist() == [0, 57]


def test_a_lock_that_is_never_released_is_reported_at_once() -> None:
    code = LOCK.replace("atom.global.exch.b32 %r7, [%d0], 0;", "")
    with pytest.raises(Deadlock, match=r"livelock: CTA .* warp 0 spins at PTX line \d+: atom.global.cas"):
        run(code, {"state": np.zeros(2, np.uint32)})


WAIT_FOR_OTHERS = """mov.u32 %r1, %ctaid.x; atom.global.add.u32 %r2, [%d0], 1;
SPIN: ld.acquire.gpu.global.b32 %r3, [%d0]; setp.lt.u32 %p1, %r3, 64; @%p1 bra SPIN;
"""


def test_ctas_that_wait_for_each_other_need_the_resident_option() -> None:
    with pytest.raises(Deadlock, match=r"spins at PTX line(.|\n)*1 clusters .* have not started(.|\n)*`resident`"):
        run(WAIT_FOR_OTHERS, words(), grid=2)
    run(WAIT_FOR_OTHERS, words(), grid=2, resident=2)


@pytest.mark.parametrize(
    "code",
    [
        "@%p1 barrier.sync 1, 32; @!%p1 barrier.sync 1, 32;",
        "@%p1 bra A; barrier.sync 1, 32; bra B; A: barrier.sync 1, 32; B: bar.sync 0;",
        "@!%p1 bra A; barrier.sync 1, 32; A: @%p1 bra B; barrier.sync 1, 32; B: bar.sync 0;",
    ],
)
def test_barriers_on_both_sides_of_a_branch(code: str) -> None:
    """Half of the lanes arrive at each instruction; together they are the 32 threads of the barrier."""
    assert not run(LANE + "setp.lt.u32 %p1, %r0, 16;" + code, {}).findings


@pytest.mark.parametrize("code", ["@%p1 bar.sync 1, 64; @!%p1 bar.sync 1, 64;", "@%p1 bar.sync 0; @!%p1 bar.sync 0;"])
def test_warps_may_take_different_sides(code: str) -> None:
    run(LANE + "setp.lt.u32 %p1, %r0, 32;" + code, {}, block=64)
    with pytest.raises(SimError, match=r"\.aligned barrier \d executed by lanes 0-15 of 32 lanes"):
        run(LANE + "setp.lt.u32 %p1, %r0, 16;" + code, {}, block=64)


def test_a_real_deadlock_is_told_as_it_was_before_lanes_went_on() -> None:
    """Lane 0 waits for ever, the others for it: letting them go must not replace that report by their own errors."""
    code = BARRIER + "@!%p1 bra OUT; W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+32], 0; @!%p2 bra W; OUT: "
    with pytest.raises(Deadlock, match=r"deadlock: nothing can run\n  CTA .* lane 0 waits for mbarrier(.|\n)*"):
        run(code + "bar.sync 0;", {})
    with pytest.raises(Deadlock, match=r"lane 0 waits for mbarrier(.|\n)*went on, and then: (.|\n)*trap executed"):
        run(code + "@!%p1 trap;", {})


# Launch limits --------------------------------------------------------------------------------------------------------

STATIC = ".shared .align 16 .b8 fixed[1024]; mov.b32 %r1, fixed;"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_bytes": 232448 + 16}, r"0 static \+ 232464 dynamic = 232464 bytes .* sm_100 has at most 232448"),
        ({"block": (1056, 1, 1)}, r"block \(1056, 1, 1\) has 1056 threads; at most 1024"),
        ({"block": (1, 1, 65)}, r"at most 1024, and \(1024, 1024, 64\) per dimension"),
        ({"block": (0, 1, 1)}, r"has 0 threads"),
        ({"grid": (1, 65536, 1)}, r"grid \(1, 65536, 1\)"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, r"grid \(3, 1, 1\) is no multiple of the cluster \(2, 1, 1\)"),
        ({"grid": (16, 1, 1), "cluster": (16, 1, 1)}, r"has 16 CTAs; at most 8, or 16 with the function attribute"),
        (
            {"grid": (32, 1, 1), "cluster": (32, 1, 1), "nonportable_cluster": True},
            r"has 32 CTAs; at most 8, or 16",
        ),
        ({"params": b""}, r"0 bytes of parameters; the kernel takes 8"),
    ],
)
def test_launches_that_a_gpu_refuses(changes: dict, words: str) -> None:
    good = launch("", {"rows": aligned(64, np.uint32)})
    good.run()
    with pytest.raises(SimError, match=rf"launch of kernel refused: .*{words}"):
        replace(good, **changes).run()


def test_limits_are_those_of_the_kernel_and_the_architecture() -> None:
    with pytest.raises(SimError, match=r"1024 static \+ 231440 dynamic = 232464 bytes"):
        run(STATIC, {}, shared=231440)
    run(STATIC, {}, shared=231424)
    run("", {}, shared=99 * 1024, target="sm_120a")
    with pytest.raises(SimError, match="a block of sm_120 has at most 101376"):
        run("", {}, shared=99 * 1024 + 16, target="sm_120a")
    with pytest.raises(SimError, match="at most 49152"):
        run(".shared .align 16 .b8 fixed[50000]; mov.b32 %r1, fixed;", {})
    with pytest.raises(SimError, match="sm_80, which has no clusters"):
        run("", {}, grid=2, cluster=2, target="sm_80")


@pytest.mark.parametrize(
    ("directive", "block", "cluster", "words"),
    [
        (".maxntid 32, 2, 1", 96, 1, r"96 threads; the kernel's .maxntid allows 64"),
        (".reqntid 64", 32, 1, r"block \(32, 1, 1\); the kernel's .reqntid wants \(64, 1, 1\)"),
        (".explicitcluster .reqnctapercluster 2", 64, 1, r"the kernel's .reqnctapercluster wants \(2, 1, 1\)"),
        (".maxclusterrank 2", 64, 4, r"exceeds the kernel's .maxclusterrank 2"),
    ],
)
def test_performance_directives_bound_the_launch(directive: str, block: int, cluster: int, words: str) -> None:
    bad = launch("", {}, block=block, grid=4, cluster=cluster)
    bad.ptx = bad.ptx.replace("kernel()\n", f"kernel() {directive}\n")
    with pytest.raises(SimError, match=words):
        bad.run()


def test_sixteen_ctas_run_with_the_attribute_that_a_saved_launch_keeps(tmp_path: Path) -> None:
    out = np.zeros(16, np.uint32)
    code = LANE + "mov.u32 %r1, %cluster_ctarank; mul.wide.u32 %d5, %r1, 4; add.s64 %d5, %d5, %d0;"
    large = launch(code + "st.global.b32 [%d5], %r1;", {"out": out}, grid=16, cluster=16)
    large.nonportable_cluster = True
    large.run()
    assert out.tolist() == list(range(16))
    large.save(tmp_path)
    assert Launch.load(tmp_path).nonportable_cluster


# PTX that does not assemble -------------------------------------------------------------------------------------------

BAD_PTX = [
    ("bra NOWHERE;", "sm_100a", "undefined label NOWHERE"),
    ("@%p1 bra %r1;", "sm_100a", "undefined label"),
    ("mov.b32 %r1, %r9999;", "sm_100a", "undeclared register %r9999"),
    ("mov.b32 %x1, %r1;", "sm_100a", "undeclared register %x1"),
    ("st.global.b32 [%d200], %r1;", "sm_100a", "undeclared register %d200"),
    ("@%r1 mov.b32 %r1, %r2;", "sm_100a", "guard %r1 is no predicate"),
    ("add.u32 %r1, %r2;", "sm_100a", "add.u32 takes 3 operands, 2 given"),
    ("mov.b32 %r1, %r2, %r3;", "sm_100a", "mov.b32 takes 2 operands, 3 given"),
    ("fma.rn.f32 %r1, %r2, %r3;", "sm_100a", "fma.rn.f32 takes 4 operands, 3 given"),
    ("setp.lt.s32 %p1, %r1;", "sm_100a", "takes 3 or 4 operands, 2 given"),
    ("selp.b32 %r1, %r2, %r3;", "sm_100a", "takes 4 operands"),
    ("shfl.sync.idx.b32 %r1, %r2, 0, 31;", "sm_100a", "takes 5 operands"),
    ("ld.global.b32 %r1;", "sm_100a", "takes 2 or 3 operands, 1 given"),
    ("add.u32 %r1, %r2, %d3;", "sm_100a", "operand %d3 is .b64, 4 bytes of .u32 wanted"),
    ("add.s64 %d1, %r2, %d3;", "sm_100a", "operand %r2 is .b32, 8 bytes of .s64 wanted"),
    ("mul.wide.u32 %r1, %r2, %r3;", "sm_100a", "operand %r1 is .b32, 8 bytes of .u32 wanted"),
    ("and.b32 %r1, %p1, %r3;", "sm_100a", "operand %p1 is .pred"),
    ("setp.eq.u32 %p1, %r1, %h2;", "sm_100a", "operand %h2 is .b16"),
    ("tcgen05.wait::ld.sync.aligned;", "sm_90a", "exists on sm_100 to sm_110 only; this module is for sm_90a"),
    ("tcgen05.wait::ld.sync.aligned;", "sm_100", "needs sm_100a or later"),
    ("wgmma.fence.sync.aligned;", "sm_100a", "exists on sm_90a only"),
    ("wgmma.fence.sync.aligned;", "sm_90", "exists on sm_90a only"),
    ("setmaxnreg.inc.sync.aligned.u32 128;", "sm_90", "needs sm_90a or later"),
    ("add.rn.f32x2 %d1, %d2, %d3;", "sm_90a", "needs sm_100 or later"),
    ("barrier.cluster.arrive;", "sm_80", "needs sm_90 or later"),
    ("mapa.shared::cluster.u32 %r1, %r2, %r3;", "sm_80", "needs sm_90 or later"),
    ("redux.sync.min.f32 %r1, %r2, -1;", "sm_90a", "needs sm_100a or later"),
    ("cp.async.bulk.commit_group;", "sm_80", "needs sm_90 or later"),
]


@pytest.mark.parametrize(("code", "target", "words"), BAD_PTX)
def test_ptx_that_does_not_assemble_is_refused(code: str, target: str, words: str, monkeypatch, tmp_path: Path) -> None:
    """By our own checks with the line, before anything runs; ptxas, where present, agrees on every one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PtxError) as caught:
        run(code, {}, target=target)
    assert words in str(caught.value)
    assert "line 12" in str(caught.value)
    if shutil.which("ptxas"):
        assert assembly.ptxas_errors(ptx(code, 0, target)) is not None


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH")
def test_an_older_ptxas_judges_what_it_knows(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    newer = ptx("mov.b32 %r1, 0;", 0).replace(".version 8.8", ".version 99.9")
    assert assembly.ptxas_errors(newer) is None
    assert "the newest of this ptxas" in assembly.ptxas_errors(newer.replace("mov.b32 %r1", "mov.b32 %x1"))


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH")
def test_ptxas_verdicts_are_kept_and_can_be_asked_for(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bad = launch("cvt.u32.f32 %r1, %r2;", {})
    bad.run()
    with pytest.raises(PtxError, match=r"ptxas rejects the PTX:\n(.|\n)*Rounding modifier required"):
        bad.run(ptxas=True)
    (kept,) = (tmp_path / "ptx_sim").iterdir()
    kept.write_text("")
    assembly.ptxas_errors.cache_clear()
    bad.run(ptxas=True)
    launch("mov.b32 %r1, 0;", {}).run(ptxas=True)


def test_findings_raise_when_asked_to() -> None:
    code = SMEM + "ld.shared.b32 %r2, [%r1];"
    assert len(run(code, {}).findings) == 1
    with pytest.raises(Findings, match="load of uninitialised shared memory") as caught:
        run(code, {}, strict=True)
    assert caught.value.report.warp_instructions > 0
    run("mov.b32 %r1, 0;", {}, strict=True)


# Values that only the text of the PTX ISA fixes -----------------------------------------------------------------------

ONE_LANE = "mov.u32 %r0, %tid.x; setp.ne.u32 %p1, %r0, 0; @%p1 bra END; {} END:"

NAN64, NAN32 = 0x7FF8000000000000, 0x7FC00000
VALUES = {
    "mov.b16 %h1, 1; mov.b32 %r5, 65536; shl.b16 %h2, %h1, %r5; cvt.u32.u16 %r6, %h2;": 0,
    "mov.b16 %h1, 0x8000; mov.b32 %r5, 65537; shr.s16 %h2, %h1, %r5; cvt.u32.u16 %r6, %h2;": 0xFFFF,
    f"mov.b32 %r5, {NAN32}; cvt.rzi.s64.f32 %d5, %r5; shr.u64 %d5, %d5, 32; cvt.u32.u64 %r6, %d5;": 1 << 31,
    f"mov.b64 %d5, {NAN64}; cvt.rzi.u32.f64 %r6, %d5;": 1 << 31,
    f"mov.b64 %d5, {NAN64}; cvt.rzi.s16.f64 %h2, %d5; cvt.u32.u16 %r6, %h2;": 1 << 15,
    f"mov.b32 %r5, {NAN32}; cvt.rzi.s32.f32 %r6, %r5;": 0,
    "mov.b32 %r5, 1; setp.ne.u32 %p2, %r5, 1; set.lt.and.u32.s32 %r6, %r5, 2, %p2;": 0,
    "mov.b32 %r5, 1; setp.ne.u32 %p2, %r5, 1; set.lt.xor.u32.s32 %r6, %r5, 2, %p2;": 0xFFFFFFFF,
    "setp.ne.u32 %p2, 1, 1; selp.f32 %r6, 1.0, 2.0, %p2;": 0x40000000,
    "st.global.v2.f32 [%d0+8], {1.0, 2.0}; ld.global.b32 %r6, [%d0+12];": 0x40000000,
    "mov.u32 %r6, 010;": 8,
    "mov.u32 %r6, 0b1010;": 10,
    "mov.u32 %r6, WARP_SZ;": 32,
}


@pytest.mark.parametrize("code", VALUES)
def test_corner_cases_of_the_isa(code: str) -> None:
    arrays = words()
    run(code + " st.global.b32 [%d0], %r6;", arrays)
    assert arrays["rows"][0] == VALUES[code]


def test_counting_reductions_and_barriers_of_diverged_lanes() -> None:
    rows = aligned(4, np.uint32)
    fill = "mov.u32 %r1, smem; mov.u32 %r2, 7; st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};"
    for name, expected in (("inc", [1, 6, 0, 0]), ("dec", [7, 4, 7, 6])):
        rows[:] = 0, 5, 9, 7
        copy = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{name}.u32 [%d0], [%r1], 16;"
        run(ONE_LANE.format(fill + copy), {"rows": rows})
        assert rows.tolist() == expected
    code = """setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW; barrier.red.popc.u32 %r5, 0, %p1; bra OUT;
LOW: barrier.red.popc.u32 %r5, 0, %p1; OUT: add.s64 %d5, %d0, %d100; st.global.b32 [%d5], %r5;"""
    arrays = words()
    run(LANE + code, arrays)
    assert (arrays["rows"][:32] == 16).all()


# Misuse that hardware answers with an exception, a hang or wrong data -------------------------------------------------

MISUSE = [
    ("ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d0+16];", "access of 32 bytes misaligned: .*rows"),
    ("st.global.v4.b64 [%d0+16], {%d1, %d1, %d1, %d1};", "access of 32 bytes misaligned"),
    ("mov.b32 %r5, 12; cp.async.ca.shared.global [%r1], [%d0], 8, %r5;", "8 bytes with a source size of 12"),
    ("mov.b32 %r5, 4; cp.async.ca.shared.global [%r1+4], [%d0], 8, %r5;", "shared store of 8 bytes misaligned"),
    ("mov.b32 %r5, 4; cp.async.ca.shared.global [%r1], [%d0+4], 8, %r5;", "access of 8 bytes misaligned: .*rows"),
    ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 2097152;", "the transaction count exceeds 1048575 bytes"),
    ("mov.b32 %r5, 0; mbarrier.arrive.shared.b64 %d5, [%r2], %r5;", "a count of 0"),
    ("mbarrier.arrive.noComplete.shared.b64 %d5, [%r2], 1;", "noComplete arrival that completes"),
    ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;", ".sync.aligned instruction executed by lane 0 only"),
    ("mov.b32 %r5, 0; barrier.sync 1, %r5;", "thread count 0"),
]


@pytest.mark.parametrize(("code", "message"), MISUSE)
def test_misuse_is_an_error_with_its_line(code: str, message: str) -> None:
    start = "mov.u32 %r1, smem; add.u32 %r2, %r1, 2048; mbarrier.init.shared.b64 [%r2], 1;"
    with pytest.raises(SimError, match=rf"{message}(.|\n)*PTX line \d+"):
        run(ONE_LANE.format(start + code), words())


def test_operands_of_one_mbarrier_that_differ_between_lanes() -> None:
    start = "mov.u32 %r1, smem;" + ONE_LANE.format("mbarrier.init.shared.b64 [%r1], 528;") + " bar.warp.sync -1;"
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra W;"
    run(start + "add.u32 %r5, %r0, 1; mbarrier.arrive.shared.b64 %d5, [%r1], %r5;" + wait, {})
    one = "mov.u32 %r1, smem; mov.u32 %r0, %tid.x; add.u32 %r5, %r0, 1; mbarrier.init.shared.b64 [%r1], %r5;"
    with pytest.raises(SimError, match="different counts"):
        run(one, {})
    with pytest.raises(SimError, match="different barriers"):
        run("mov.u32 %r0, %tid.x; and.b32 %r5, %r0, 1; barrier.sync %r5, 32;", {})


def test_bytes_that_never_came_are_reported() -> None:
    code = "mov.u32 %r1, smem; mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;"
    report = run(ONE_LANE.format(code), {})
    assert any("bytes pending at the exit" in f and "64 bytes" in f for f in report.findings)


REMOTE = """mov.u32 %r0, %tid.x; mov.u32 %r1, smem; mov.u32 %r9, %cluster_ctarank; st.shared.b32 [%r1], %r0;
barrier.cluster.arrive; barrier.cluster.wait; mapa.shared::cluster.u32 %r5, %r1, 0; """
LATE = "setp.eq.u32 %p2, %r9, 0; @%p2 bra END; L: add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 3000; @%p3 bra L; "


@pytest.mark.parametrize(
    "code",
    [
        "ld.shared::cluster.b32 %r6, [%r5];",
        "st.shared::cluster.b32 [%r5], %r0;",
        "red.shared::cluster.add.u32 [%r5], %r0;",
        "mbarrier.arrive.shared::cluster.b64 _, [%r5+8];",
    ],
)
def test_memory_of_a_cta_that_has_ended(code: str) -> None:
    barrier = "@%p9 bra READY; mbarrier.init.shared.b64 [%r1+8], 99; READY: "
    start = "mov.u32 %r1, smem; mov.u32 %r8, %tid.x; setp.ne.u32 %p9, %r8, 0;" + barrier + REMOTE
    report = run(start + "mov.b32 %r8, 0; " + LATE + code + " END:", {}, grid=2, cluster=2)
    assert any("of a CTA that has exited" in f for f in report.findings)


@pytest.mark.parametrize(
    "code",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r5];",
        "and.b32 %r6, %r0, 1; mapa.shared::cluster.u32 %r5, %r1, %r6; ld.shared.b32 %r6, [%r5];",
    ],
)
def test_shared_cta_accesses_stay_in_their_cta(code: str) -> None:
    with pytest.raises(SimError, match="through shared::cta of another CTA's memory"):
        run(REMOTE + code, {}, grid=2, cluster=2)


def test_shared_cta_addresses_are_those_of_the_own_cta() -> None:
    arrays = words()
    code = """cvt.u64.u32 %d6, %r5; cvta.shared::cluster.u64 %d5, %d6; isspacep.shared::cta %p3, %d5;
isspacep.shared::cluster %p4, %d5; selp.b32 %r6, 1, 2, %p3; selp.b32 %r6, %r6, 3, %p4; mul.wide.u32 %d7, %r9, 4;
add.s64 %d7, %d7, %d0; st.global.b32 [%d7], %r6;"""
    run(REMOTE + code, arrays, grid=2, cluster=2)
    assert arrays["rows"][:2].tolist() == [1, 2]


def test_register_budgets() -> None:
    role = (
        "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 128; @%p1 bra LOW; setmaxnreg.inc.sync.aligned.u32 240; bra END; "
    )
    run(role + "LOW: setmaxnreg.dec.sync.aligned.u32 24; END:", {}, block=384)
    with pytest.raises(Deadlock, match=r"registers of CTA \(0, 0, 0\): 64512 in all"):
        run(role + "LOW: setmaxnreg.dec.sync.aligned.u32 64; bar.sync 1, 384; END: bar.sync 1, 384;", {}, block=384)
    report = run(role.replace("128", "96") + "LOW: END:", {}, block=128)
    assert any("part of a warpgroup" in f for f in report.findings)
    with pytest.raises(SimError, match=r"setmaxnreg executed by lanes 16-31 only"):
        run(role.replace("128", "16") + "LOW: END:", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 2}, "multiples of 16"),
        ({"box": (4, 8), "swizzle": 0}, "box rows of 8 bytes must be multiples of 16"),
        ({"flags": 1 << 11}, "interleave 1"),
        ({"flags": 4 << 13}, "swizzle 4"),
    ],
)
def test_malformed_tensor_maps(changes: dict, message: str) -> None:
    fields = {"element": "bf16", "dims": (64, 32), "strides": (128,), "box": (64, 8), "swizzle": 0}
    flags = changes.pop("flags", 0)
    array = aligned(2048, np.uint16)
    data = bytearray(encode(array.ctypes.data + changes.pop("address", 0), **(fields | changes)))
    data[9] |= flags >> 8
    tmap = aligned(128, np.uint8)
    tmap[:] = np.frombuffer(bytes(data), np.uint8)
    code = """mov.u32 %r1, smem; mov.b32 %r5, 0; cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group
 [%d0, {%r5, %r5}], [%r1];"""
    with pytest.raises(SimError, match=rf"{message}(.|\n)*PTX line \d+"):
        run(ONE_LANE.format(code), {"map": tmap, "array": array})
    with pytest.raises(SimError, match="strides are multiples of 16"):
        encode(array.ctypes.data, **(fields | {"strides": (136,)}))


@pytest.mark.parametrize("bit", [3, 5, 6, 23, 29, 30])
def test_reserved_bits_of_instruction_descriptors(bit: int) -> None:
    Shape(1 << 4 | 8 << 17 | 8 << 24)
    with pytest.raises(SimError, match="reserved bit"):
        Shape(1 << 4 | 8 << 17 | 8 << 24 | 1 << bit)
    for decode, version in ((decode_umma, 1 << 46), (decode_wgmma, 0)):
        with pytest.raises(SimError, match="base offset 2"):
            decode(version | 2 << 49)


def test_tensor_memory_is_given_back_as_it_was_taken() -> None:
    take = """mov.u32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
ld.shared.b32 %r4, [%r1];
"""
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, "
    run(take + free + "64;", {})
    with pytest.raises(SimError, match="the allocation there has 64"):
        run(take + free + "32;", {})
    with pytest.raises(SimError, match="no allocation starts there"):
        run(take + "add.u32 %r4, %r4, 32;" + free + "32;", {})
    with pytest.raises(Deadlock, match="448 columns are free"):
        run(take + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;", {})
