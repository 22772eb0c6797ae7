"""Race detection: a correct micro-kernel per kind of edge, and the same kernel without that edge."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from .ptx_sim import race_commands, subjects, sync_mutants
from .ptx_sim.__main__ import main
from .ptx_sim.machine import Machine
from .ptx_sim.memory import SimError
from .ptx_sim.policies import Delay, Priorities
from .ptx_sim.race_commands import check as check_launch
from .ptx_sim.races import Races
from .ptx_sim.registers import RegisterCheck
from .ptx_sim.testing import aligned, launch
from .test_ptx_sim_engines import ALLOC, FREE, LARGE, SETUP, idesc, map_array, umma_descriptor, wait

# In the kernels below `<<a>>` is an edge: a is there in the correct kernel and missing in the broken one, and with
# `<<a|b>>` b takes its place. `%r0` is the thread, `%r1` shared memory, `%r2` two mbarriers of one arrival, `%p1` true
# for all threads but 0; `%p10` is true in warp 0.
EDGE = re.compile(r"<<([^<>|]*)(?:\|([^<>|]*))?>>")
SLOT = "shl.b32 %r20, %r0, 2; add.u32 %r21, %r1, %r20; xor.b32 %r22, %r21, 128; setp.lt.u32 %p10, %r0, 32;\n"
GLOBAL = "mul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20; xor.b64 %d22, %d21, 128;\n"
FIRST = "mov.u32 %r0, %tid.x; setp.ne.u32 %p1, %r0, 0;\n"


def load(bytes_: int = 256) -> str:
    """Thread 0 copies `in` to shared memory with a bulk copy that signals the first mbarrier."""
    return f"""@%p1 bra LOADED; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {bytes_};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], {bytes_}, [%r2]; LOADED:
"""


CTA = {
    "bar.sync": ("order", SETUP + SLOT + "st.shared.b32 [%r21], %r0; <<bar.sync 0;>> ld.shared.b32 %r5, [%r22];"),
    "bar.sync before an overwrite": (
        "order",
        SETUP + SLOT + "ld.shared.b32 %r5, [%r22]; <<bar.sync 0;>> st.shared.b32 [%r21], %r0;",
    ),
    "bar.arrive is no wait": (
        "order",
        SETUP
        + SLOT
        + "@%p10 bra A; st.shared.b32 [%r21], %r0; bar.arrive 1, 64; bra B; A: bar.<<sync|arrive>> 1, 64; "
        + "ld.shared.b32 %r5, [%r22]; B:",
    ),
    "bar.warp.sync": (
        "order",
        SETUP
        + SLOT
        + "xor.b32 %r22, %r21, 4; st.shared.b32 [%r21], %r0; <<bar.warp.sync -1;>> ld.shared.b32 %r5, [%r22];",
    ),
    "mbarrier wait": (
        "order",
        SETUP
        + SLOT
        + "@%p1 bra W; st.shared.b32 [%r1], %r0; mbarrier.arrive.shared.b64 _, [%r2]; W: "
        + "<<"
        + wait("%r2", "WAIT").replace("\n", " ")
        + ">> ld.shared.b32 %r5, [%r1];",
    ),
    "mbarrier arrival releases": (
        "order",
        SETUP
        + SLOT
        + "@%p1 bra W; st.shared.b32 [%r1], %r0; mbarrier.arrive<<|.relaxed.cta>>.shared.b64 _, [%r2]; W: "
        + wait("%r2", "WAIT")
        + "ld.shared.b32 %r5, [%r1];",
    ),
    "a lane arrives for its warp": (
        "order",
        SETUP
        + SLOT
        + "@!%p10 bra W; st.shared.b32 [%r21], %r0; <<bar.warp.sync -1;>> @%p1 bra END; "
        + "mbarrier.arrive.shared.b64 _, [%r2]; bra END; W: "
        + wait("%r2", "WAIT")
        + "ld.shared.b32 %r5, [%r22]; END:",
    ),
    "mbarrier init before use": (
        "init",
        FIRST
        + "mov.b32 %r1, smem; add.s32 %r2, %r1, 1024; @!%p1 mbarrier.init.shared.b64 [%r2], 64; <<bar.sync 0;>> "
        + "mbarrier.arrive.shared.b64 _, [%r2];",
    ),
    "fence.mbarrier_init": (
        "init",
        SETUP.replace("fence.mbarrier_init.release.cluster;", "<<fence.mbarrier_init.release.cluster;>>")
        + load()
        + wait("%r2", "WAIT"),
    ),
    "phase overrun": (
        "overrun",
        SETUP
        + SLOT
        + "@%p1 bra W; mbarrier.arrive.shared.b64 _, [%r2]; W: "
        + wait("%r2", "WAIT")
        + "<<bar.sync 0;>> @%p1 bra E; mbarrier.arrive.shared.b64 _, [%r2]; E: @%p10 bra F; "
        + "ld.shared.b32 %r5, [%r1+2048]; F: @%p1 bra G; mbarrier.arrive.shared.b64 _, [%r2]; G:",
    ),
    "bulk load": (
        "order",
        SETUP + SLOT + load() + "<<" + wait("%r2", "WAIT").replace("\n", " ") + ">> ld.shared.b32 %r5, [%r21];",
    ),
    "fence.proxy.async before a bulk load over written memory": (
        "proxy",
        SETUP + SLOT + "st.shared.b32 [%r21], %r0; <<fence.proxy.async;>> bar.sync 0;\n" + load() + wait("%r2", "WAIT"),
    ),
    "order alone before a bulk load over read memory": (
        "order",
        SETUP + SLOT + "ld.shared.b32 %r5, [%r21]; <<bar.sync 0;>>\n" + load() + wait("%r2", "WAIT"),
    ),
    "fence.proxy.async before a bulk store": (
        "proxy",
        SETUP
        + SLOT
        + "st.shared.b32 [%r21], %r0; <<fence.proxy.async;>> bar.sync 0; @%p1 bra END; "
        + "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256; cp.async.bulk.commit_group; "
        + "cp.async.bulk.wait_group 0; END:",
    ),
    "wait_group.read before an overwrite": (
        "order",
        SETUP
        + SLOT
        + "st.shared.b32 [%r21], %r0; fence.proxy.async; bar.sync 0; @%p1 bra END; "
        + "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256; cp.async.bulk.commit_group; "
        + "<<cp.async.bulk.wait_group.read 0;>> END: bar.sync 0; st.shared.b32 [%r21], %r0; @%p1 bra LAST; "
        + "cp.async.bulk.wait_group 0; LAST:",
    ),
    "commit_group before wait_group": (
        "order",
        SETUP
        + SLOT
        + "st.shared.b32 [%r21], %r0; fence.proxy.async; bar.sync 0; @%p1 bra END; "
        + "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256; <<cp.async.bulk.commit_group;>> "
        + "cp.async.bulk.wait_group.read 0; st.shared.b32 [%r1], %r0; END:",
    ),
    "wait_group without .read before the result is read": (
        "order",
        SETUP
        + SLOT
        + "st.shared.b32 [%r21], %r0; fence.proxy.async; bar.sync 0; @%p1 bra END; "
        + "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256; cp.async.bulk.commit_group; "
        + "cp.async.bulk.wait_group<<|.read>> 0; ld.global.b32 %r5, [%d1]; END:",
    ),
    "a bulk store ends before its CTA": (
        "exit",
        SETUP
        + SLOT
        + "st.shared.b32 [%r21], %r0; fence.proxy.async; bar.sync 0; @%p1 bra END; "
        + "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256; cp.async.bulk.commit_group; "
        + "<<cp.async.bulk.wait_group.read 0;>> END:",
    ),
    "cp.async wait_group": (
        "order",
        SETUP
        + SLOT
        + GLOBAL
        + "cp.async.ca.shared.global [%r21], [%d21], 4; cp.async.commit_group; <<cp.async.wait_group 0;>> bar.sync 0; "
        + "ld.shared.b32 %r5, [%r22]; cp.async.wait_all;",
    ),
    "cp.async wait_all": (
        "order",
        SETUP
        + SLOT
        + GLOBAL
        + "cp.async.ca.shared.global [%r21], [%d21], 4; <<cp.async.wait_all;>> ld.shared.b32 %r5, [%r21]; "
        + "cp.async.wait_all;",
    ),
    "cp.async.mbarrier.arrive": (
        "order",
        SETUP.replace("[%r2], 1;", "[%r2], 32;")
        + SLOT
        + GLOBAL
        + "@!%p10 bra W; cp.async.ca.shared.global [%r21], [%d21], 4; cp.async.mbarrier.arrive.noinc.shared.b64 [%r2]; "
        + "cp.async.wait_all; bra E; W: <<"
        + wait("%r2", "WAIT").replace("\n", " ")
        + ">> ld.shared.b32 %r5, [%r22]; E:",
    ),
    "atomics exclude reads, not each other": (
        "order",
        SETUP + SLOT + "red.shared.add.u32 [%r1], 1; <<bar.sync 0;>> ld.shared.b32 %r5, [%r1];",
    ),
    "global memory of one CTA": (
        "order",
        SETUP + SLOT + GLOBAL + "st.global.b32 [%d21], %r0; <<bar.sync 0;>> ld.global.b32 %r5, [%d22];",
    ),
    "halves of a word are cells of their own": (
        "order",
        SETUP
        + SLOT
        + "shl.b32 %r23, %r0, 1; add.u32 %r24, %r1, %r23; mov.b16 %h1, 1; @%p10 bra Z; "
        + "sub.u32 %r24, %r24, <<62|64>>; Z: "
        + "and.b32 %r25, %r0, 31; setp.ne.u32 %p11, %r25, 0; @%p11 bra END; st.shared.b16 [%r24], %h1; END:",
    ),
}


def broken(code: str, number: int) -> str:
    """The kernel without edge `number`; -1 keeps all."""
    count = iter(range(100))
    return EDGE.sub(lambda m: (m[2] or "") if next(count) == number else m[1], code)


def races_of(code: str, arrays: dict | None = None, *, make: dict | None = None, **shape: object) -> set[str]:
    """Kinds of the reports of one run, register checks included."""
    if arrays is None:
        arrays = {name: aligned(256, np.uint32, 256) for name in ("in", "out")}
    options = {"shared": LARGE, "block": 64} | shape
    resident = options.pop("resident", 1)
    item = launch(code, arrays, **options)
    memory = item.memory()
    program = item.program(memory)
    observer = Races(**(make or {}))
    report = Machine(program, item, memory, observer=observer, resident=resident).run()
    kinds = {race.kind for race in observer.races}
    return kinds | {"registers" for _ in RegisterCheck(program).misuses(report.visits)}


def check(kinds: str | list[str], code: str, **options: object) -> None:
    """No report for the kernel, and for each edge that it lacks one of the named kind."""
    assert races_of(broken(code, -1), **options) == set()
    count = len(EDGE.findall(code))
    assert count
    for number in range(count):
        kind = kinds if isinstance(kinds, str) else kinds[number]
        assert kind in races_of(broken(code, number), **options), (number, kind)


@pytest.mark.parametrize("name", CTA)
def test_edges_within_a_cta(name: str) -> None:
    check(*CTA[name])


PAIR = {"grid": 2, "cluster": 2}
REMOTE = (
    SETUP
    + SLOT
    + """mov.u32 %r30, %cluster_ctarank; xor.b32 %r31, %r30, 1; mapa.shared::cluster.u32 %r32, %r21, %r31;
mapa.shared::cluster.u32 %r33, %r2, %r31;
"""
)
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;\n"


def one_line(text: str) -> str:
    return text.replace("\n", " ")


# The receiver announces a round of 256 bytes: by a word of each thread, or by a copy of what they wrote 1024 bytes on.
ANNOUNCE = "@%p1 bra TOLD; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256; TOLD:\n"
SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r32], %r0, [%r33];\n"
COPY = """@%p1 bra SENT; add.u32 %r34, %r1, 1024;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r32], [%r34], 256, [%r33]; SENT:
"""
CLUSTER = {
    "cluster barrier": (
        "order",
        REMOTE
        + SYNC
        + "st.shared::cluster.b32 [%r32], %r0; <<"
        + SYNC.strip()
        + ">> ld.shared.b32 %r5, [%r21]; "
        + SYNC,
    ),
    "cluster arrive releases": (
        "order",
        REMOTE
        + SYNC
        + "st.shared::cluster.b32 [%r32], %r0; barrier.cluster.arrive<<|.relaxed>>; barrier.cluster.wait; "
        + "ld.shared.b32 %r5, [%r21];"
        + SYNC,
    ),
    "fence before a relaxed cluster arrive": (
        "order",
        REMOTE
        + SYNC
        + "st.shared::cluster.b32 [%r32], %r0; <<fence.acq_rel.cluster;>> barrier.cluster.arrive.relaxed; "
        + "barrier.cluster.wait; ld.shared.b32 %r5, [%r21];"
        + SYNC,
    ),
    "fence.mbarrier_init before a relaxed cluster arrive": (
        "init",
        REMOTE.replace("fence.mbarrier_init.release.cluster;", "<<fence.mbarrier_init.release.cluster;>>")
        + "barrier.cluster.arrive.relaxed; barrier.cluster.wait; "
        + "@%p1 bra W; mbarrier.arrive.shared::cluster.b64 _, [%r33]; W:"
        + wait("%r2", "WAIT")
        + SYNC,
    ),
    "st.async": (
        "order",
        REMOTE
        + SYNC
        + ANNOUNCE
        + SEND
        + "<<"
        + one_line(wait("%r2", "WAIT"))
        + ">> ld.shared.b32 %r5, [%r21]; "
        + SYNC,
    ),
    "st.async over what the other CTA's threads wrote": (
        "order",
        REMOTE
        + SYNC
        + "st.shared.b32 [%r21], %r0; <<"
        + one_line(SYNC)
        + ">>"
        + ANNOUNCE
        + SEND
        + wait("%r2", "WAIT")
        + "ld.shared.b32 %r5, [%r21]; "
        + SYNC,
    ),
    "st.async over what the other CTA reads": (
        "order",
        REMOTE
        + SYNC
        + ANNOUNCE
        + SEND
        + wait("%r2", "WAIT")
        + "ld.shared.b32 %r5, [%r21]; bar.sync 0; @%p1 bra FREED; "
        + "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r33+8]; FREED: <<"
        + one_line(wait("%r2+8", "FREE"))
        + ">>"
        + ANNOUNCE.replace("TOLD", "AGAIN")
        + SEND
        + wait("%r2", "WAIT1", 1)
        + SYNC,
    ),
    "fence.proxy.async before a bulk copy over what came by st.async": (
        "proxy",
        REMOTE
        + "st.shared.b32 [%r21+1024], %r0; fence.proxy.async;"
        + SYNC
        + ANNOUNCE
        + SEND
        + wait("%r2", "WAIT")
        + "<<fence.proxy.async;>> "
        + ANNOUNCE.replace("TOLD", "AGAIN")
        + SYNC
        + COPY
        + wait("%r2", "WAIT1", 1)
        + SYNC,
    ),
    "bulk copy to the other CTA": (
        ["proxy", "order"],
        REMOTE
        + SYNC
        + "st.shared.b32 [%r21+1024], %r0; <<fence.proxy.async;>> bar.sync 0; "
        + ANNOUNCE
        + COPY
        + "<<"
        + one_line(wait("%r2", "WAIT"))
        + ">> ld.shared.b32 %r5, [%r21]; "
        + SYNC,
    ),
    "bulk copy over what the other CTA reads": (
        "order",
        REMOTE
        + SYNC
        + "st.shared.b32 [%r21], %r0; st.shared.b32 [%r21+1024], %r0; fence.proxy.async; ld.shared.b32 %r5, [%r21]; "
        + ANNOUNCE
        + "<<"
        + one_line(SYNC)
        + ">>"
        + COPY
        + wait("%r2", "WAIT")
        + SYNC,
    ),
    "a CTA stays while others use its memory": (
        "exit",
        REMOTE + SYNC + "st.shared::cluster.b32 [%r32], %r0; <<" + SYNC.strip() + ">>",
    ),
    "a CTA stays while others arrive at its mbarriers": (
        "exit",
        REMOTE + SYNC + "@%p1 bra W; mbarrier.arrive.shared::cluster.b64 _, [%r33]; W: <<" + SYNC.strip() + ">>",
    ),
}


@pytest.mark.parametrize("name", CLUSTER)
def test_edges_within_a_cluster(name: str) -> None:
    check(*CLUSTER[name], **PAIR)


FLAG = """mov.u32 %r0, %tid.x; mov.u32 %r30, %ctaid.x; setp.ne.u32 %p1, %r30, 0; add.s64 %d9, %d0, 512; mov.b32 %r9, 1;
@%p1 bra READER; st.global.b32 [%d0], %r9; {write} bra END;
READER: {read} setp.ne.u32 %p2, %r5, 1; @%p2 bra READER; {then} ld.global.b32 %r6, [%d0]; END:
"""
FLAGS = {
    "release and acquire": (
        "st<<.release|.relaxed>>.gpu.global.b32 [%d9], %r9;",
        "ld<<.acquire|.relaxed>>.gpu.global.b32 %r5, [%d9];",
        "",
    ),
    "fences and relaxed": (
        "<<fence.acq_rel.gpu;>> red.relaxed.gpu.global.add.u32 [%d9], 1;",
        "ld.relaxed.gpu.global.b32 %r5, [%d9];",
        "<<fence.acq_rel.gpu;>>",
    ),
    "membar and volatile": (
        "<<membar.gl;>> st.volatile.global.b32 [%d9], %r9;",
        "ld.volatile.global.b32 %r5, [%d9];",
        "<<membar.gl;>>",
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_between_clusters(name: str) -> None:
    write, read, then = FLAGS[name]
    check("order", FLAG.format(write=write, read=read, then=then), grid=2, block=1, resident=2)


def test_clusters_without_a_flag_are_not_ordered() -> None:
    """Two CTAs that write the same word race, whatever runs first; sums by atomics do not."""
    assert races_of("st.global.b32 [%d0], 1;", grid=2, block=1) == {"order"}
    assert races_of("red.global.add.u32 [%d0], 1;", grid=2, block=1) == set()


# Tensor memory: warp 4 reaches the lanes of warp 0. %p10 is true in warp 0, %p12 in warps 0 and 4.
TENSOR = (
    SETUP
    + ALLOC.format(g=1)
    + SLOT
    + """setp.eq.u32 %p12, %r40, 4; or.pred %p12, %p12, %p10;
@!%p10 bra FILLED; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync; FILLED: bar.sync 0; tcgen05.fence::after_thread_sync; @!%p12 bra DONE0;
"""
)
PRODUCT = (
    SETUP
    + ALLOC.format(g=1)
    + SLOT
    + f"""@%p1 bra L0; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 24576;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 24576, [%r2]; L0: {{loaded}}
mov.b32 %r50, {idesc(128, 64)}; setp.ne.u32 %p8, 0, 0;
mov.b64 %d30, {umma_descriptor(1024) - (1 << 64)}; mov.b64 %d31, {umma_descriptor(1024 + 16384) - (1 << 64)};
@%p1 bra L1; tcgen05.mma.cta_group::1.kind::f16 [%r4], %d30, %d31, %r50, %p8; add.s32 %r60, %r2, 8;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r60]; L1: {{done}}
"""
)


# A second operation of thread 0 behind a product, and its commit: phase 1 of the first mbarrier.
LOADED = one_line(wait("%r2", "WAIT0")) + "bar.sync 0; "
TWICE = (
    PRODUCT.replace("{loaded}", LOADED).replace("{done}", "")
    + "@%p1 bra L2; {second} tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2]; L2: "
    + one_line(wait("%r2", "WAIT2", 1))
    + FREE.format(g=1)
)
COPY = (
    f"mov.b64 %d30, {umma_descriptor(1024) - (1 << 64)}; @%p1 bra L3; "
    "tcgen05.cp.cta_group::1.128x256b [%r4], %d30; L3: "
)
READ = "shl.b32 %r61, %r40, 21; add.u32 %r61, %r61, %r4; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r61]; "
TMEM = {
    "tcgen05.wait::st and fences": (
        ["order", "tensor fence", "order", "tensor fence"],
        TENSOR
        + "@!%p10 bra S; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; <<tcgen05.wait::st.sync.aligned;>> "
        + "<<tcgen05.fence::before_thread_sync;>> S: <<bar.sync 1, 64;>> <<tcgen05.fence::after_thread_sync;>> "
        + "@%p10 bra DONE0; "
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4]; tcgen05.wait::ld.sync.aligned; DONE0: "
        + FREE.format(g=1),
    ),
    "tcgen05.wait::ld before an overwrite": (
        ["order", "tensor fence"],
        TENSOR
        + "@!%p10 bra S; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4]; <<tcgen05.wait::ld.sync.aligned;>> "
        + "<<tcgen05.fence::before_thread_sync;>> S: bar.sync 1, 64; tcgen05.fence::after_thread_sync; "
        + "@%p10 bra DONE0; "
        + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; tcgen05.wait::st.sync.aligned; DONE0: "
        + FREE.format(g=1),
    ),
    "a lane's tcgen05.wait::ld speaks of its own part": (
        "order",
        TENSOR
        + "@!%p10 bra S; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4]; tcgen05.wait::ld.sync.aligned; "
        + "tcgen05.fence::before_thread_sync; <<bar.warp.sync -1;>> @%p1 bra DONE0; mbarrier.arrive.shared.b64 _, "
        + "[%r2]; bra DONE0; S: "
        + one_line(wait("%r2", "WAIT"))
        + "tcgen05.fence::after_thread_sync; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; "
        + "tcgen05.wait::st.sync.aligned; DONE0: "
        + FREE.format(g=1),
    ),
    "tcgen05.wait::st between two stores": (
        "order",
        TENSOR
        + "@!%p10 bra DONE0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; <<tcgen05.wait::st.sync.aligned;>> "
        + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0}; tcgen05.wait::st.sync.aligned; DONE0: "
        + FREE.format(g=1),
    ),
    "allocation before use, use before deallocation": (
        ["order", "order"],
        SETUP
        + ALLOC.format(g=1).replace("bar.sync 0;", "<<bar.sync 0;>>")
        + "mov.b32 %r4, 0; @!%p7 bra USE; "
        + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4+2097152], {%r0}; tcgen05.wait::st.sync.aligned; USE: "
        + FREE.format(g=1).replace("bar.sync 0;", "<<bar.sync 0;>>"),
    ),
    "tcgen05.ld before its result is used": (
        "registers",
        TENSOR
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4]; <<tcgen05.wait::ld.sync.aligned;>> add.u32 %r6, %r5, 1; "
        + "tcgen05.wait::ld.sync.aligned; DONE0: "
        + FREE.format(g=1),
    ),
    "load, product, commit": (
        ["order", "order", "tensor fence"],
        PRODUCT.replace("{loaded}", "<<" + one_line(wait("%r2", "WAIT0")) + ">>").replace(
            "{done}", "<<" + one_line(wait("%r2+8", "WAIT1")) + ">>"
        )
        + "<<tcgen05.fence::after_thread_sync;>> "
        + READ
        + "tcgen05.wait::ld.sync.aligned; "
        + FREE.format(g=1),
    ),
    "a copy over the accumulator waits for the product": (
        ["order", "tensor fence"],
        TWICE.replace(
            "{second}",
            "<<"
            + one_line(wait("%r2+8", "WAIT1"))
            + ">> <<tcgen05.fence::after_thread_sync;>> tcgen05.cp.cta_group::1.128x256b [%r4], %d30;",
        ),
    ),
    "products of one accumulator and shape are in order": (
        "order",
        TWICE.replace(
            "{second}",
            f"mov.b32 %r51, {idesc(128, 32)}; "
            "tcgen05.mma.cta_group::1.kind::f16 [%r4], %d30, %d31, <<%r50|%r51>>, %p8;",
        ),
    ),
    "a product behind a copy is in order, a copy behind a product is not": (
        "order",
        TWICE.replace(LOADED, LOADED + COPY).replace("{second}", "<<|tcgen05.cp.cta_group::1.128x256b [%r4], %d30;>>"),
    ),
}


@pytest.mark.parametrize("name", TMEM)
def test_tensor_memory(name: str) -> None:
    kinds, code = TMEM[name]
    arrays = {"in": aligned(6144, np.uint32), "out": aligned(64, np.uint32)}
    block = 128 if "mma" in code else 64 if "deallocation" in name else 160
    check(kinds, code, arrays=arrays, block=block)


WGMMA = (
    SETUP
    + """mov.b32 %r20, %r0; Z: shl.b32 %r21, %r20, 2; add.u32 %r22, %r1, %r21; st.shared.b32 [%r22], 0;
add.u32 %r20, %r20, 128; setp.lt.u32 %p5, %r20, 3072; @%p5 bra Z; <<fence.proxy.async;>> bar.sync 0;
<<wgmma.fence.sync.aligned;>> setp.ne.u32 %p8, 0, 0;
"""
    + f"""mov.b64 %d30, {1024 >> 4 | 1 << 16 | 64 << 32 | 1 << 62};
mov.b64 %d31, {9216 >> 4 | 1 << 16 | 64 << 32 | 1 << 62};
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r100, %r101, %r102, %r103}}, %d30, %d31, %p8, 1, 1, 0, 0;
<<wgmma.commit_group.sync.aligned;>> <<wgmma.wait_group.sync.aligned 0;>> add.u32 %r5, %r100, 1; <<bar.sync 0;>>
shl.b32 %r21, %r0, 2; add.u32 %r22, %r1, %r21; st.shared.b32 [%r22], %r5;
"""
)


def test_one_cta_group_per_kernel() -> None:
    code = SETUP + ALLOC.format(g=1) + FREE.format(g=1)
    assert races_of(code) == set()
    assert races_of(SETUP + ALLOC.format(g=1) + FREE.format(g=2)) == {"tensor memory"}


def test_transaction_count_overflows() -> None:
    code = SETUP + "@%p1 bra E; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 1048575; "
    races_of(code + "E:")
    with pytest.raises(SimError, match="transaction count"):
        races_of(code + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 1; E:")


def test_wgmma() -> None:
    """The last barrier is for the other warps: each waits for the product, which all four issue, so it may go."""
    code = WGMMA.replace("<<bar.sync 0;>>", "bar.sync 0;")
    check(["proxy", "registers", "registers", "registers"], code, block=128, target="sm_90a")
    assert "order" in races_of(broken(code, 3), block=128, target="sm_90a")


def test_tensor_map_written_by_the_launch() -> None:
    """A map that a kernel copies to global memory needs fence.proxy.tensormap before a copy uses it."""
    source = aligned((8, 64), np.uint16)
    arrays = {"map": map_array(source, "bf16", (64, 8), 0), "to": aligned(32, np.uint32), "source": source}
    code = (
        SETUP
        + """@%p1 bra END; mov.b32 %r10, 0; COPY: mul.wide.u32 %d20, %r10, 4; add.s64 %d21, %d20, %d0;
add.s64 %d22, %d20, %d1; ld.global.b32 %r11, [%d21]; st.global.b32 [%d22], %r11; add.u32 %r10, %r10, 1;
setp.lt.u32 %p5, %r10, 32; @%p5 bra COPY; <<fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;>> mov.b32 %r5, 0;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 1024;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {%r5, %r5}], [%r2];
"""
        + wait("%r2", "WAIT")
        + "END:"
    )
    check("proxy", code, arrays=arrays)


def test_launches_are_ordered_by_their_stream() -> None:
    """One observer follows a chain of launches: what the first wrote, the second may read and overwrite."""
    arrays = {"out": aligned(64, np.uint32)}
    observer = Races()
    for _ in range(2):
        launch("ld.global.b32 %r5, [%d0]; st.global.b32 [%d0], 1;", arrays, block=1).run(observer=observer)
    assert not observer.races


def test_griddepcontrol() -> None:
    """What the launch before this one writes may be read after griddepcontrol.wait."""
    arrays = {"in": aligned(64, np.uint32)}
    previous = {"previous": ((arrays["in"].ctypes.data, 256),)}
    check("order", "<<griddepcontrol.wait;>> ld.global.b32 %r5, [%d0];", arrays=arrays, make=previous)


def test_a_report_names_everything() -> None:
    code = broken(CTA["bar.sync"][1], 0)
    item = launch(code, {"out": aligned(64, np.uint32)}, shared=LARGE, block=64)
    observer = Races()
    item.run(observer=observer)
    text = observer.races[0].text
    for part in ("order race at shared address", "of smem", "write by CTA (0, 0, 0)", "warp 0", "read by", "warp 1"):
        assert part in text
    assert text.count("at PTX line") == 2
    assert "missing: no chain of arrivals" in text


@pytest.mark.parametrize("seed", [0, 1])
def test_schedules_do_not_hide_or_invent_races(seed: int) -> None:
    for name in ("bulk load", "mbarrier wait", "bar.sync"):
        kinds, code = CTA[name]
        for number, expected in ((-1, set()), (0, {kinds})):
            item = launch(
                broken(code, number),
                {"in": aligned(256, np.uint32), "out": aligned(256, np.uint32)},
                shared=LARGE,
                block=64,
            )
            observer = Races()
            item.run(observer=observer, policy=Delay(seed), order=Priorities(seed))
            found = {race.kind for race in observer.races}
            assert found >= expected if expected else not found


# Whole kernels --------------------------------------------------------------------------------------------------------

KERNELS = (
    ("wheel-fwd-h64-d576", 128),
    ("wheel-fwd-h128-d512", 128),
    ("wheel-bwd-h64-d512", 128),
    ("wheel-bwd-pair-h96", 128),
    ("wheel-bwd90-h64-d512", 128),
    ("hopper-h24-d512", 128),
)


@pytest.mark.parametrize(("name", "slots"), KERNELS)
def test_known_good_kernels_have_no_races(name: str, slots: int) -> None:
    """Others: `python -m tests.ptx_sim races all`. What they do against the PTX ISA stands in allowances.py."""
    if name not in subjects.subjects():
        pytest.skip(f"{name} cannot run here")
    for label, item in subjects.record(name, slots):
        found, allowed, cost = check_launch(item)
        assert not found, (label, found[0].text)
        assert not allowed or name.startswith("wheel-")
        assert cost < 250, "tracking has become ten times as slow as it should be"


def test_survivors_are_explained() -> None:
    """Two barriers in a row: either is enough, so both survive, each the other's twin. A fence orders nothing."""
    code = SETUP + SLOT + "st.shared.b32 [%r21], %r0; bar.sync 0; bar.sync 0; fence.proxy.async; "
    code += "ld.shared.b32 %r5, [%r22];"
    inquiry = sync_mutants.Inquiry([launch(code, {}, shared=LARGE, block=64)])
    last = inquiry.sites[-3:]
    found = [inquiry.try_site(site) for site in last]
    assert [(o.verdict, o.kind) for o in found] == [("survived", "twin"), ("survived", "twin"), ("survived", "idle")]
    assert "without both: order" in found[0].detail
    for processes in (1, 2, 3):
        assert inquiry.redundant(last, processes) == ([last[0], last[2]], "")


def test_a_mutant_is_judged_on_several_inputs() -> None:
    """The barrier matters only where the flag is set, and only there the fence is executed."""
    code = SETUP + SLOT + "ld.global.u32 %r9, [%d0]; setp.eq.u32 %p11, %r9, 0; st.shared.b32 [%r21], %r0; bar.sync 0; "
    code += "@%p11 bra END; fence.proxy.async; ld.shared.b32 %r5, [%r22]; END:"
    off, on = (launch(code, {"in": np.full(4, flag, np.uint32)}, shared=LARGE, block=64) for flag in (0, 1))
    inquiry = sync_mutants.Inquiry([off, on])
    barrier, fence = inquiry.sites[-2:]
    assert [inquiry.laboratories[n].verdict(barrier)[0] for n in (0, 1)] == ["survived", "race"]
    assert inquiry.try_site(barrier).verdict == "race"
    assert fence not in inquiry.laboratories[0].sites and inquiry.try_site(fence).kind == "idle"
    with pytest.raises(ValueError, match="not launches of one PTX"):
        sync_mutants.Inquiry([off, launch("ret;", {})])


def test_a_sum_in_another_order_is_no_wrong_result() -> None:
    """Atomic adds of fp32 depend on the schedule; such tensors are compared within rounding."""
    code = "mov.u32 %r0, %tid.x; cvt.rn.f32.u32 %r6, %r0; mul.f32 %r6, %r6, 0f3DCCCCCD; mul.f32 %r6, %r6, %r6; "
    code += "red.global.add.f32 [%d0], %r6; bar.sync 0;"
    laboratory = sync_mutants.Laboratory(launch(code, {"out": np.zeros(4, np.float32)}, block=256))
    assert laboratory.loose == [True]
    assert laboratory.verdict(laboratory.sites[-1])[0] == "survived"


def test_mutants_of_a_known_good_kernel() -> None:
    """Of the committed results for the wheel's 64-head forward, one reported mutant of each opcode, again."""
    if "wheel-fwd-h64-d512" not in subjects.subjects():
        pytest.skip("the wheel's kernels cannot run here")
    results = json.loads(race_commands.RESULTS.read_text())
    name = next(n for n in results if n.startswith("wheel-fwd-h64-d512"))
    item = subjects.record("wheel-fwd-h64-d512", *results[name]["inputs"][0])[0][1]
    assert item.sha256 == results[name]["sha256"]
    laboratory = sync_mutants.Laboratory(item)
    assert len(laboratory.sites) == results[name]["sites"]
    sites = {laboratory.program.code[site].line: site for site in laboratory.sites}
    chosen = {op: line for line, op, verdict, _ in results[name]["mutants"] if verdict == "race"}
    assert len(chosen) >= 6
    for line in chosen.values():
        assert laboratory.verdict(sites[line])[0] == "race"


def test_mutants_of_the_sm100_forward() -> None:
    """All of them, on a tile of several blocks and on tiles of one: at least 95 % are reported."""
    name = "sm100-fwd-h64-d512"
    if name not in subjects.subjects():
        pytest.skip(f"{name} cannot run here")
    inquiry = sync_mutants.Inquiry([subjects.record(name, *size)[0][1] for size in ((256, 2), (64, 4))])
    verdicts = [inquiry.verdict(site)[0] for site in inquiry.sites]
    assert len(verdicts) > 90
    assert verdicts.count("survived") <= 0.05 * len(verdicts)


def test_committed_mutants_of_the_sm100_kernels() -> None:
    """Of every kernel at least 95 % are reported, and what is not orders nothing."""
    results = {n: r for n, r in json.loads(race_commands.RESULTS.read_text()).items() if n.startswith("sm100-")}
    assert {n.split()[0] for n in results} == {t for t, *_ in race_commands.COMMITTED if t.startswith("sm100-")}
    for name, record in results.items():
        assert record["reported"] >= 0.95 * record["sites"], name
        assert record["reported"] + record["redundant"] == record["sites"], name
        assert not record["wrong without the redundant"], name


def test_committed_mutants_of_the_hopper_kernels() -> None:
    """TileLang writes what is not reported, and it orders nothing."""
    results = {n: r for n, r in json.loads(race_commands.RESULTS.read_text()).items() if n.startswith("hopper-")}
    assert {n.split()[0] for n in results} == {t for t, *_ in race_commands.COMMITTED if t.startswith("hopper-")}
    for name, record in results.items():
        assert record["reported"] >= 0.95 * record["sites"], name
        assert record["reported"] + record["redundant"] == record["sites"], name
        assert not record["wrong without the redundant"], name


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    launch(broken(CTA["bar.sync"][1], 0), {}, shared=LARGE, block=64).save(tmp_path / "bad" / "000")
    launch(broken(CTA["bar.sync"][1], -1), {}, shared=LARGE, block=64).save(tmp_path / "good" / "000")
    monkeypatch.setattr("sys.argv", ["ptx_sim", "races", str(tmp_path / "good"), "--schedules", "2"])
    assert main() == 0
    assert "schedule 1: 0 reports" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["ptx_sim", "races", str(tmp_path / "bad")])
    assert main() == 1
    assert "order race" in capsys.readouterr().out
    target = tmp_path / "results.json"
    options = ["--processes", "1", "--json", str(target)]
    monkeypatch.setattr("sys.argv", ["ptx_sim", "sync-mutants", str(tmp_path / "good"), *options])
    assert main() == 0
    (record,) = json.loads(target.read_text()).values()
    assert record["race"] >= 1
    monkeypatch.setattr("sys.argv", ["ptx_sim", "sync-mutants", str(tmp_path / "good"), "--launch", "other"])
    with pytest.raises(SystemExit, match="no launch other, but 000 "):
        main()
