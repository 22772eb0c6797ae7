"""Traces, counters, the timed replay and its predictions: longest paths known by hand, and a kernel by others."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from .ptx_sim import (
    capture_cute,
    counters,
    foreign_dsa,
    predict,
    predicted,
    predicted_sm100,
    predicted_sm100_backward,
    predicted_sm100_groups,
    rates,
    timeline,
)
from .ptx_sim.costs import removable
from .ptx_sim.launch import Launch
from .ptx_sim.parser import parse
from .ptx_sim.policies import Delay
from .ptx_sim.replay import Memory, Replay, replay
from .ptx_sim.testing import aligned, launch, ptx
from .ptx_sim.trace import DRAIN, SIGNAL, WAIT, Op, Trace, WarpTrace, bank_passes, record

CHIP = rates.H200_CHIP
MEMORY = Memory(read=32.0, reduce=16.0, write=32.0)
REASON = foreign_dsa.unavailable()
if REASON is None:
    # Chooses the runtime library, so it must happen before any test imports cutlass.
    foreign_dsa.capture_cute.prepare()
needs_wheel = pytest.mark.skipif(REASON is not None, reason=f"foreign kernels: {REASON}")
NO_SM100 = capture_cute.available()
needs_sm100 = pytest.mark.skipif(NO_SM100 is not None, reason=f"SM100 simulator: {NO_SM100}")

PRODUCER_CONSUMER = """mov.u32 %r0, %tid.x;
mov.f32 %r2, 0f3F800000;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [smem], 32;
bar.sync 0;
setp.ge.u32 %p1, %r0, 32;
@%p1 bra CONSUMER;
{produce}
mbarrier.arrive.shared.b64 %d0, [smem];
bra END;
CONSUMER:
{before}
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [smem], 0;
@!%p2 bra WAIT;
{consume}
END:
"""
ADD = "add.rn.f32 %r2, %r2, %r2;\n"


def producer_consumer(produce: int, before: int, consume: int, **options: object) -> float:
    """Predicted clocks of two warps: a chain of additions, a signal, a wait and another chain."""
    body = PRODUCER_CONSUMER.format(produce=ADD * produce, before=ADD * before, consume=ADD * consume)
    return replay(record(launch(body, {}, block=64), **options), CHIP, MEMORY).clocks


def test_longest_path_of_a_producer_and_a_consumer() -> None:
    """Every dependent addition takes four clocks on the path, and none beside it."""
    base = producer_consumer(100, 20, 50)
    assert producer_consumer(110, 20, 50) - base == pytest.approx(40)
    assert producer_consumer(100, 20, 60) - base == pytest.approx(40)
    # What the consumer does while it would wait anyway is free.
    assert producer_consumer(100, 90, 50) == pytest.approx(base)
    # Then the consumer is the longer one, and the producer's work is free.
    assert producer_consumer(10, 200, 50) == pytest.approx(producer_consumer(20, 200, 50))
    # Both chains, the signal and set-up: 4 (100 + 50), 20 after the signal, under 80 clocks of everything else.
    assert 620 < base < 700


def test_replay_does_not_depend_on_the_order_of_the_recording() -> None:
    assert producer_consumer(100, 20, 50, policy=Delay(1)) == producer_consumer(100, 20, 50)


def test_exchanges_between_lanes_overlap() -> None:
    """Independent shuffles cost their issue, dependent ones their latency; behind a label nothing moves up."""

    def clocks(*body: str) -> float:
        code = "mov.u32 %r0, %tid.x; mov.b32 %r1, %r0; mov.b32 %r2, %r0; mov.b32 %r3, %r0; mov.b32 %r4, %r0;"
        return replay(record(launch(code + "".join(body), {})), CHIP, MEMORY).clocks

    def exchange(to: int, source: int) -> str:
        return f"shfl.sync.bfly.b32 %r{to}, %r{source}, {to}, 31, -1;\n"

    latency, issue = CHIP.latency["shuffle"], rates.OCCUPANCY["shuffle"].value
    one = clocks(exchange(1, 0), "xor.b32 %r5, %r1, 1;")
    four = clocks(*(exchange(to, 0) for to in (1, 2, 3, 4)), "xor.b32 %r5, %r1, %r4;")
    chain = clocks(*(exchange(to, to - 1) for to in (1, 2, 3, 4)), "xor.b32 %r5, %r4, 1;")
    assert four - one == pytest.approx(3 * issue)
    assert chain - one == pytest.approx(3 * latency)
    labels = clocks(*(f"L{to}: {exchange(to, 0)} xor.b32 %r5, %r{to}, 1;" for to in (1, 2, 3, 4)))
    assert labels - one >= 2 * latency


def hand_made(streams: list[list[tuple]], ops: list[Op]) -> Trace:
    """A trace without code: signals, waits and operations only. Operations of warp w are issued at its start."""
    trace = Trace(Launch("", "kernel", (1, 1, 1), (64, 1, 1), (1, 1, 1), 0, b""), [], "sm_90a", 1)
    for index, stream in enumerate(streams):
        issues = tuple((0, n) for n, op in enumerate(ops) if op.warp == index)
        trace.warps.append(WarpTrace(0, index, [("issue", issues), *stream] if issues else stream))
    trace.ops = ops
    trace.expected = Counter(item[1] for stream in streams for item in stream if item[0] == SIGNAL)
    trace.expected.update(key for op in ops for key in op.signals)
    return trace


class Issuing(Replay):
    """Starts the operations of hand-made traces at time 0."""

    def run(self) -> object:
        for _, warp in self.warps:
            if warp.stream and warp.stream[0][0] == "issue":
                for _, number in warp.stream[0][1]:
                    self._at(0.0, self._issue, 0, number)
                warp.pos = 1
        return super().run()


def run_by_hand(streams: list[list[tuple]], ops: list[Op], memory: Memory = MEMORY) -> float:
    return Issuing(hand_made(streams, ops), CHIP, memory).run().clocks


def product(flop: int, operand_bytes: int = 0, signals: tuple = ()) -> Op:
    return Op("tcgen05", 0, 0, 0, (0,), ("wgmma", False, 64), flop, operand_bytes, signals=list(signals))


def test_tensor_core_works_in_order() -> None:
    """Three products of 100 clocks, then 50 more clocks of the shared-memory port in the last."""
    key = ("mbarrier", 0, 1)
    flop = 100 * 4096
    latency = CHIP["matrix_latency"] + CHIP["wake"]
    assert (
        run_by_hand([[(WAIT, key, 0)]], [product(flop), product(flop), product(flop, signals=(key,))]) == 300 + latency
    )
    slow = product(flop, operand_bytes=150 * 128, signals=(key,))
    assert run_by_hand([[(WAIT, key, 0)]], [product(flop), product(flop), slow]) == 350 + latency


def test_copies_share_the_path_from_l2() -> None:
    """Two bulk copies of 6400 bytes at 32 bytes a clock; the second completes when both are through."""
    key = ("mbarrier", 0, 1)

    def copy(number: int) -> Op:
        return Op("bulk", 0, 0, 0, (0,), global_read=6400, shared_write=Counter({0: 6400}), pieces=1, signals=[key])

    start = CHIP["tma_instruction"] + CHIP["tma_request"]
    one = run_by_hand([[(WAIT, key, 0)]], [copy(0)])
    two = run_by_hand([[(WAIT, key, 0)]], [copy(0), copy(1)])
    assert one == 200 + CHIP["tma_latency"] + CHIP["wake"]
    assert two - one == 200
    # Short copies are limited by the copy engine instead.
    small = Op("bulk", 0, 0, 0, (0,), global_read=16, shared_write=Counter({0: 16}), pieces=1, signals=[key])
    assert run_by_hand([[(WAIT, key, 0)]], [replace(small) for _ in range(10)]) == pytest.approx(
        10 * start + CHIP["tma_latency"] + CHIP["wake"]
    )


REMOTE_STORES = """mov.u32 %r0, %tid.x;
mov.u32 %r1, %cluster_ctarank;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [smem], 1;
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r2, smem;
xor.b32 %r3, %r1, 1;
mapa.shared::cluster.u32 %r4, %r2, %r3;
shl.b32 %r5, %r0, 4;
add.u32 %r5, %r5, %r4;
{stores}
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [smem], 0;
@!%p2 bra WAIT;
"""


def test_stores_to_another_cta_take_their_path_before_the_signal_behind_them() -> None:
    def clocks(count: int) -> float:
        stores = "\n".join(
            f"st.shared::cluster.v4.b32 [%r5+{1024 + 512 * i}], {{%r0, %r0, %r0, %r0}};" for i in range(count)
        )
        body = REMOTE_STORES.format(stores=stores)
        return replay(record(launch(body, {}, grid=2, cluster=2, shared=16384)), CHIP, MEMORY).clocks

    assert clocks(20) - clocks(10) == pytest.approx(10 * 512 / CHIP["remote_bytes"], rel=0.05)


def test_groups_wait_for_reads_or_completion() -> None:
    store = Op("bulk store", 0, 0, 0, (0,), global_reduce=1600, shared_read=1600, pieces=1)
    reads = run_by_hand(
        [[(DRAIN, (0,), True, 0), (SIGNAL, ("mbarrier", 0, 1))], [(WAIT, ("mbarrier", 0, 1), 0)]], [store]
    )
    whole = run_by_hand([[(DRAIN, (0,), False, 0)]], [replace(store)])
    # 1600 bytes at 16 a clock, after the copy engine has read them.
    assert whole == CHIP["tma_instruction"] + CHIP["tma_request"] + 100 + CHIP["l2_latency"]
    assert reads == whole


def test_a_phase_that_never_completes_is_an_error() -> None:
    trace = hand_made([[(WAIT, ("mbarrier", 0, 1), 0)]], [])
    trace.expected[("mbarrier", 0, 1)] = 1
    with pytest.raises(RuntimeError, match="CTA 0 warp 0 wait for phases"):
        replay(trace, CHIP, MEMORY)


def test_bank_conflicts() -> None:
    lanes = np.arange(32, dtype=np.uint32)
    assert bank_passes(4 * lanes, 4) == 1
    assert bank_passes(0 * lanes, 4) == 1
    assert bank_passes(8 * lanes, 4) == 2
    assert bank_passes(128 * lanes, 4) == 32
    assert bank_passes(16 * lanes, 16) == 4
    assert bank_passes(8 * lanes, 8) == 2
    assert bank_passes(128 * lanes, 16) == 32


def test_what_an_assembler_removes() -> None:
    """Hoisted: all that depends on parameters and lane only. Common subexpressions: the second of two equal ones."""
    body = """mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 2;
mov.u32 %r10, 0;
LOOP:
add.s32 %r2, %r10, %r1;
add.s32 %r3, %r10, %r1;
add.s32 %r4, %r3, 1;
st.shared.u32 [%r4], %r2;
add.s32 %r10, %r10, 1;
setp.lt.u32 %p0, %r10, 5;
@%p0 bra LOOP;
"""
    code = parse(ptx(body, 0)).kernels["kernel"].body
    for index, instr in enumerate(code):
        instr.index = index
    assert [code[i].text for i in sorted(removable(code))] == [
        "mov.u32 %r0, %tid.x",
        "shl.b32 %r1, %r0, 2",
        "add.s32 %r3, %r10, %r1",
    ]


def test_loads_and_l1() -> None:
    """A sector that the CTA has loaded before costs the latency of L1, not that of L2."""
    data = aligned(64, np.uint32)

    def clocks(offset: int) -> float:
        body = f"""ld.global.u32 %r1, [%d0];
add.s32 %r2, %r1, 1;
cvt.u64.u32 %d1, %r2;
add.s64 %d2, %d1, %d0;
ld.global.u32 %r3, [%d2+{offset - 1}];
add.s32 %r4, %r3, 1;
st.global.u32 [%d0+128], %r4;
"""
        return replay(record(launch(body, {"data": data}, block=32)), CHIP, MEMORY).clocks

    assert clocks(64) - clocks(4) == pytest.approx(CHIP["l2_latency"] - CHIP["l1_latency"], abs=2)


def test_waves_and_occupancy() -> None:
    body = PRODUCER_CONSUMER.format(produce=ADD * 100, before="", consume="")
    first = record(launch(body, {}, block=64, shared=200 * 1024))
    longer = record(launch(body.replace(ADD, ADD * 2), {}, block=64, shared=200 * 1024))
    pair = predict.Pair(first, longer, steps=1, more=9)
    one, two, three = (
        predict.predict(pair, CHIP, ctas, explain=False) for ctas in (1, int(CHIP["sms"]), 2 * int(CHIP["sms"]) + 1)
    )
    assert (one.waves, two.waves, three.waves) == (1, 1, 3)
    assert one.ctas_per_sm == 1
    assert one.step_clocks == pytest.approx(400)
    wave = (one.fixed_clocks + 9 * one.step_clocks + CHIP["cta_start"]) / CHIP["clock"] / 1e6
    assert three.milliseconds - CHIP["launch"] / 1e3 == pytest.approx(3 * wave)
    assert predict.predict(pair, CHIP, 1).limiter == "instruction latency"


def test_ctas_that_go_over_tiles() -> None:
    """One wave: the longest CTA decides, its last tile with the shared paths of the CTAs that have ended."""
    data = aligned(4096, np.uint32)

    def recorded(tiles: int, loads: int) -> Trace:
        """A tile loads 512 bytes so many times, each load behind the one before."""
        body = "mov.u32 %r0, %tid.x;\nmul.wide.u32 %d1, %r0, 16;\nadd.s64 %d2, %d0, %d1;\n"
        for at in range(0, 512 * tiles * loads, 512):
            body += f"ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%d2+{at}];\n"
            body += "cvt.u64.u32 %d4, %r1;\nadd.s64 %d2, %d2, %d4;\n"
        return record(launch(body, {"data": data}, shared=200 * 1024))

    sms = int(CHIP["sms"])
    found = predict.Tiles(recorded(2, 10), recorded(3, 10), recorded(2, 15), 2, 1, steps=5, more=20)
    clocks = found.clocks(CHIP, predict.memory_of(CHIP, predict.Footprint()))
    assert clocks.of_tile(20) == pytest.approx(3 * clocks.tile, rel=0.01)
    one, six, part = (
        predict.predict_tiles(found, CHIP, sms, tiles, predict.Footprint(), explain=False)
        for tiles in (sms, 6 * sms, 5 * sms + 1)
    )
    assert [p.tiles_per_cta for p in (one, six, part)] == [1, 6, 6]
    assert {p.waves for p in (one, six, part)} == {1}
    tile = clocks.of_tile(20) / CHIP["clock"] / 1e6
    assert six.milliseconds - one.milliseconds == pytest.approx(5 * tile)
    assert 5.5 * tile < part.milliseconds - one.milliseconds + tile < 6 * tile
    with pytest.raises(ValueError, match="do not fit"):
        predict.predict_tiles(found, CHIP, sms + 1, 6 * sms, predict.Footprint())


def test_grids_are_linear_in_tokens_and_rows() -> None:
    """As many tiles as a GPU with a multiprocessor for each would have CTAs."""
    found = predicted.Kernels([], [(128, 256, 128), (64, 64, 128)], [1, 64])
    assert found.grid(0, 4096, 8192) == 2 * 4096
    assert found.grid(1, 4096, 8192) == 64 * 8


def test_every_figure_names_its_source() -> None:
    for chip in rates.CHIPS.values():
        assert all(figure.source and figure.unit for figure in chip.figures.values())
        assert chip.adds(1.0) == pytest.approx(chip["adds_hit"])
        assert chip.adds(1e4) < 1.05 * chip["adds_miss"]
    assert rates.interpolate(((1, 10.0), (3, 20.0)), 2) == 15


@needs_wheel
def test_counters_and_replay_of_a_whole_kernel() -> None:
    """The wheel's 64-head forward: its matrix work and gathers are known; its replay ends and is not trivial."""
    p = foreign_dsa.problem(64, 576, 256)
    saved = foreign_dsa.forward(p, run=False).launches[0]
    trace = record(saved, 1)
    found = counters.count(trace)
    assert found.ctas == 1
    assert found.flop == 2 * 64 * 256 * (576 + 512)
    gathered, q = 256 * 1152, 64 * 1152
    assert found.bytes["L2", "copies read"] == gathered + q
    assert found.bytes["L2", "copies write"] == 64 * 1024
    assert "tcgen05.mma cta_group::1 ws M64 N256 K16" in counters.table(trace, found)
    memory = predict.memory_of(rates.GB200, predict.Footprint(9.4, 18.9))
    result = replay(trace, rates.GB200, memory)
    floor = gathered / memory.read
    assert floor < result.clocks < 10 * floor
    # A recording whose engines complete late has the same edges.
    late = replay(record(saved, 1, policy=Delay(3)), rates.GB200, memory)
    assert late.clocks == pytest.approx(result.clocks, rel=0.02)
    drawing = ElementTree.fromstring(timeline.picture(trace, rates.GB200, memory))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text and "matrix products" in text for text in texts)
    assert "tensor core" in texts and "gather" in texts


@needs_wheel
def test_replay_of_cta_pairs() -> None:
    trace = record(foreign_dsa.forward(foreign_dsa.problem(128, 512, 128), run=False).launches[0], 1)
    assert trace.ctas_per_cluster == 2
    assert counters.count(trace).flop == 2 * 128 * 128 * 1024
    memory = predict.memory_of(rates.GB200, predict.Footprint())
    assert 1000 < replay(trace, rates.GB200, memory).clocks < 100_000


def test_predicted_times_beside_known_ones() -> None:
    """The committed predictions: of GB200 within 15 %, of H200 within 20 % of what was measured last."""
    found = {predicted.key(row): row for row in predicted.committed()}
    assert {row["label"] for row in found.values()} == {"predicted"}
    assert all(len(item["ptx_sha256"]) == 64 for row in found.values() for item in row["launches"])
    bounds = {"GB200": 0.15, "H200": 0.2}
    known = {predicted.key(vars(row)): row for row in predicted.known()}
    assert found.keys() == known.keys(), "python -m tests.ptx_sim predicted"
    ratios = {key: row["predicted_ms"] / known[key].ms for key, row in found.items()}
    assert not {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > bounds[found[key]["chip"]]}


def test_predicted_launches_have_all_tiles() -> None:
    """A tile for each token and 64 heads of the project's Hopper kernels, however many CTAs they are spread over."""
    for row in predicted.committed():
        if row["kernels"].startswith("project sm90"):
            main = max(row["launches"], key=lambda item: item["predicted_ms"])
            tiles = row["tokens"] * math.ceil(row["heads"] / 64)
            assert tiles <= main["ctas"] * main["tiles_per_cta"] < tiles + main["ctas"], predicted.describe(row)


def test_predicted_forward_of_sm100() -> None:
    """The committed rows: every shape and token count, never behind the wheel's kernels or others' 128-row tiles."""
    found = predicted_sm100.committed()
    names = [(row["layer"], row["heads"], row["D"], row["K"], row["sink"], row["tokens"]) for row in found]
    assert names == [(*vars(s).values(), tokens) for s in predicted_sm100.SHAPES for tokens in predicted_sm100.TOKENS]
    assert {row["label"] for row in found} == {"predicted"}
    assert all(len(row["ptx_sha256"]) == 64 for row in found)
    assert all(row["wheel"]["ratio"] <= 1.0 for row in found if row["wheel"])
    others = [item for row in found for item in row["published"] if item["source"] == predicted_sm100.PUBLISHED_OTHERS]
    assert len(others) == 9 and all(item["ratio"] < 1.0 for item in others)


def test_predicted_backward_of_sm100() -> None:
    """The committed rows: every shape and token count, ahead of others' times and of the wheel's kernels."""
    found = predicted_sm100.committed(predicted_sm100_backward.OUT)
    names = [(row["layer"], row["heads"], row["D"], row["K"], row["sink"], row["tokens"]) for row in found]
    assert names == [(*vars(s).values(), tokens) for s in predicted_sm100.SHAPES for tokens in predicted_sm100.TOKENS]
    assert {row["label"] for row in found} == {"predicted"}
    assert all(len(sha) == 64 for row in found for sha in row["ptx_sha256"])
    assert all(row["wheel"]["ratio"] < 1.0 for row in found if row["wheel"])
    fixed_order = [row for row in found if "deterministic_ms" in row]
    assert fixed_order and all(row["deterministic_ms"] > row["predicted_ms"] for row in fixed_order)
    known = [item["ratio"] for row in found for item in row["published"]]
    assert len(known) == 12 and max(known) < 1.0


def test_predicted_groups_of_sm100() -> None:
    """The committed rows: every group that fits a tile; one CTA's rows gain 1.35 at least, pairs of CTAs less."""
    found = predicted_sm100.committed(predicted_sm100_groups.OUT)
    names = [(row["layer"], row["heads"], row["tokens_per_tile"]) for row in found]
    assert names == [key[:3] for key in predicted_sm100_groups.every_row()]
    assert {row["label"] for row in found} == {"predicted"}
    assert all(len(sha) == 64 for row in found for sha in row["ptx_sha256"])
    alone = [row for row in found if row["rows_of_a_tile"] == 64]
    assert all(1.3 < row["forward"]["gain"] < row["backward"]["gain"] < 1.03 * row["implied"] for row in alone)
    # What is tried where the config does not say, as many tokens as fill one CTA, is the fastest of both passes but for
    # 2 %, which the replay cannot tell: it is up to 20 % off where times are known.
    for layer, heads in predicted_sm100_groups.LAYERS:
        rows = [row for row in found if (row["layer"], row["heads"]) == (layer, heads)]
        times = {r["tokens_per_tile"]: r["forward"]["grouped_ms"] + r["backward"]["grouped_ms"] for r in rows}
        # 64 heads fill one CTA: two tokens in a pair lose more in the backward than they gain in the forward.
        alone = rows[0]["forward"]["single_ms"] + rows[0]["backward"]["single_ms"]
        assert (alone if heads == 64 else times[64 // heads]) <= 1.02 * min(times.values())


@needs_sm100
def test_a_block_of_the_sm100_backward() -> None:
    """A block takes its matrix and addition time at least, and little more than the larger of the two."""
    shape = predicted_sm100.Shape("small", 64, 512, 640)
    found = predicted_sm100_backward.clocks(shape, predicted_sm100.footprint(shape, 4096), 8.4)
    matrix = 2 * 64 * 64 * (3 * 512 + 2 * 512) / rates.GB200["matrix"]
    added = 64 * 512 * 4 / predict.memory_of(rates.GB200, predict.Footprint(0.0, 8.4)).reduce
    assert matrix < added <= found.step * 1.01 and found.step < 1.1 * added
    assert found.tile < 5.5 * found.step


@needs_sm100
def test_a_tile_of_the_sm100_forward() -> None:
    """A tile of one block takes its matrix and gather time at least, and its warps' chain of one block at most."""
    shape = predicted_sm100.Shape("small", 64, 512, 64)
    found = predicted_sm100.clocks(shape, predicted_sm100.footprint(shape, 4096))
    assert (found.ctas, found.ctas_per_sm, found.waves) == (148, 1, 1)
    matrix = 2 * 64 * 64 * 1024 / rates.GB200["matrix"]
    assert max(matrix, 64 * 1024 / 64) < found.step_clocks < found.fixed_clocks
