"""What the simulator refuses or reports: undefined behaviour, limits of the hardware, PTX that does not assemble."""

from __future__ import annotations

import numpy as np
import pytest

from .ptx_sim.memory import SimError
from .ptx_sim.testing import LANE, aligned, lane_address, run


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
    assert ["ends with an incomplete named barrier 3: 32 of 64 threads" in f for f in report.findings] == [True]
    assert not run("bar.arrive 3, 32;", {}).findings


# Messages -------------------------------------------------------------------------------------------------------------


def test_misaligned_atomics_name_the_buffer_and_lanes() -> None:
    with pytest.raises(SimError, match=r"global atomic of 4 bytes misaligned: 0x\w+, byte 6 of rows(.|\n)*lanes 4-31"):
        run(LANE + "setp.lt.u32 %p1, %r0, 4; @%p1 bra OUT; red.global.add.u32 [%d0+6], %r0; OUT:", words())
    with pytest.raises(SimError, match=r"shared atomic of 8 bytes misaligned: .*byte 4 of smem"):
        run("mov.b32 %r1, smem; atom.shared.add.u64 %d5, [%r1+4], %d6;", {})
