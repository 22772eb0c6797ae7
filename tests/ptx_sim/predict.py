"""Predicted time and limiter of a launch at a real problem size, from traces of small ones.

Two recordings differ by a known amount of steady-state work (more blocks of slots, or one more tile a CTA). The replay
of the shorter gives prologue and epilogue, the difference of both the time of a step:

    clocks of a CTA = clocks(shorter) + steps * (clocks(longer) - clocks(shorter)) / (steps between them)

CTAs run in waves of as many as fit the chip. A last, partial wave has the paths that all SMs share to itself. A launch
whose time does not depend on the step streams its operands: it is no faster than its bytes through DRAM.

CTAs that go over tiles are one wave. A third recording, with more tiles a CTA, tells what a tile takes beside the end
of the one before and the start of the next. CTAs with one tile more than the others have the shared paths to themselves
in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .rates import Chip, interpolate
from .replay import Memory, replay
from .trace import Trace

# Copies of a CTA that the replay runs on one SM; more of them change little.
MOST_COPIES = 8
# Recordings whose clocks differ by less do not depend on the step.
SAME_CLOCKS = 0.02


@dataclass(frozen=True)
class Footprint:
    """MB of the rows that CTAs gather from, and of the fp32 rows that they add to: what must stay in L2.

    `hits` of the adds, 0 to 1, find their row there whatever the footprint is.
    """

    gather: float = 0.0
    adds: float = 0.0
    hits: float = 0.0


@dataclass
class Prediction:
    """Predicted figures of one launch.

    Clocks are per CTA (or cluster) of a full wave; where CTAs go over tiles, per tile.
    """

    kernel: str
    sha256: str
    chip: str
    ctas: int
    ctas_per_sm: int
    waves: int
    fixed_clocks: float
    step_clocks: float
    milliseconds: float
    limiter: str
    savings: dict[str, float] = field(default_factory=dict)
    # Of the CTAs that have most.
    tiles_per_cta: int = 1


@dataclass
class Pair:
    """A launch recorded twice; `steps` is the work that the longer has more, `more` what the real one adds to it."""

    shorter: Trace
    longer: Trace
    steps: float
    more: float


@dataclass(frozen=True)
class TileClocks:
    """Clocks of a CTA's first `recorded` tiles, of a tile more, and of a step more in a tile."""

    first: float
    tile: float
    step: float
    recorded: int

    def of_tile(self, more: float) -> float:
        """A tile, with so many steps more than recorded."""
        return self.tile + more * self.step

    def total(self, tiles: int, more: float) -> float:
        """All of a CTA's tiles, each with so many steps more than recorded."""
        return self.first + self.recorded * more * self.step + (tiles - self.recorded) * self.of_tile(more)


@dataclass(frozen=True)
class Tiles:
    """A launch whose CTAs go over tiles, recorded with one CTA: `tiles` of them, `more_tiles`, or `steps` more in each.

    `more` is the steps that the real one adds to each tile of `shorter`.
    """

    shorter: Trace
    another: Trace
    longer: Trace
    tiles: int
    more_tiles: int
    steps: float
    more: float = 0.0

    def clocks(self, chip: Chip, memory: Memory, copies: int = 1) -> TileClocks:
        first, another, longer = (
            replay(trace, chip, memory, copies).clocks for trace in (self.shorter, self.another, self.longer)
        )
        tile, step = (another - first) / self.more_tiles, (longer - first) / self.tiles / self.steps
        return TileClocks(first, tile, step, self.tiles)


def memory_of(chip: Chip, footprint: Footprint, active: int | None = None) -> Memory:
    """Bytes per clock and SM when `active` SMs (default: all) share the paths to L2."""
    share = chip["sms"] / (active or chip["sms"])
    read = chip.per_clock(interpolate(chip.gather, footprint.gather)) * share
    adds = chip.per_clock(chip.adds(footprint.adds, footprint.hits)) * share
    return Memory(min(chip["sm_read_limit"], read), min(chip["reduce_limit"], adds), chip["write_limit"])


def ctas_per_sm(trace: Trace, chip: Chip) -> int:
    """By threads and shared memory; PTX does not tell registers."""
    launch = trace.launch
    threads = math.prod(launch.block)
    shared = launch.shared_bytes + chip["cta_shared_bytes"]
    return int(max(1, min(chip["threads"] // threads, chip["shared_bytes"] // shared, chip["ctas"])))


def cta_clocks(pair: Pair, chip: Chip, memory: Memory, copies: int = 1) -> tuple[float, float]:
    """(clocks of the shorter recording, clocks of a step)."""
    first = replay(pair.shorter, chip, memory, copies).clocks
    if pair.longer is pair.shorter:
        return first, 0.0
    second = replay(pair.longer, chip, memory, copies).clocks
    if abs(second - first) < SAME_CLOCKS * first:
        return first, 0.0
    return first, (second - first) / pair.steps


def _half(*names: str) -> Callable:
    def change(chip: Chip, memory: Memory) -> tuple[Chip, Memory]:
        for name in names:
            chip = chip.with_figure(name, chip[name] / 2)
        return chip, memory

    return change


def _twice(*names: str) -> Callable:
    def change(chip: Chip, memory: Memory) -> tuple[Chip, Memory]:
        for name in names:
            chip = chip.with_figure(name, chip[name] * 2)
        return chip, memory

    return change


# Name of a resource -> the chip and paths with it twice as fast, its latencies half.
WHAT_IF: dict[str, Callable] = {
    "tensor core rate": _twice("matrix"),
    "reads from L2": lambda chip, memory: (chip, replace(memory, read=2 * memory.read)),
    "additions in L2": lambda chip, memory: (chip, replace(memory, reduce=2 * memory.reduce)),
    "shared memory port": _twice("shared"),
    "tensor memory": _twice("tmem_read", "tmem_write"),
    "copy engine": _half("tma_instruction", "tma_request"),
    "instruction issue": _twice("issue"),
    "instruction latency": lambda chip, memory: (
        replace(chip, latency={kind: clocks / 2 for kind, clocks in chip.latency.items()}),
        memory,
    ),
    "memory latency": _half("l2_latency", "tma_latency"),
    "synchronisation latency": _half("wake", "barrier", "commit", "matrix_latency", "proxy_fence"),
}


def savings(trace: Trace, chip: Chip, memory: Memory) -> dict[str, float]:
    """Share of a recording's clocks that vanishes when one resource is twice as fast; largest first."""
    now = replay(trace, chip, memory).clocks
    found = {name: 1 - replay(trace, *change(chip, memory)).clocks / now for name, change in WHAT_IF.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def streamed_bytes(trace: Trace) -> int:
    """Bytes between one CTA (or cluster) and memory."""
    generic = sum(size for (path, _), size in trace.traffic.items() if path == "global")
    return generic + sum(op.global_read + op.global_write + op.global_reduce for op in trace.ops)


def predict(pair: Pair, chip: Chip, ctas: int, footprint: Footprint | None = None, explain: bool = True) -> Prediction:
    """Predicted time of a launch of `ctas` CTAs. `explain=False` leaves the limiter out, which needs ten replays."""
    footprint = footprint or Footprint()
    trace = pair.shorter
    cluster, resident, copies = _occupancy(trace, chip)
    memory = memory_of(chip, footprint)
    first, step = cta_clocks(pair, chip, memory, copies)
    per_wave = int(chip["sms"]) // cluster * resident
    full, rest = divmod(math.ceil(ctas / cluster), per_wave)
    clocks = full * (first + pair.more * step + chip["cta_start"])
    if rest:
        active, together = _spread(rest, cluster, copies, chip)
        last = cta_clocks(pair, chip, memory_of(chip, footprint, active), together)
        clocks += last[0] + pair.more * last[1] + chip["cta_start"]
    milliseconds = clocks / chip["clock"] / 1e6
    limiter, saved = "", {}
    if step == 0:
        stream = streamed_bytes(trace) * math.ceil(ctas / cluster) / (chip["dram"] * 1e9)
        limiter = "DRAM" if stream > milliseconds else "latency of its CTAs"
        milliseconds = max(milliseconds, stream)
    elif explain:
        saved = savings(pair.longer, chip, memory)
        limiter = next(iter(saved))
    return _prediction(
        trace, chip, ctas, waves=full + bool(rest), fixed_clocks=first, step_clocks=step, limiter=limiter,
        milliseconds=milliseconds + chip["launch"] / 1e3, savings=saved,
    )  # fmt: skip


def predict_tiles(
    found: Tiles, chip: Chip, ctas: int, tiles: int, footprint: Footprint, explain: bool = True
) -> Prediction:
    """Predicted time of a launch whose `ctas` CTAs go over so many tiles; `ValueError` if they do not fit at a time."""
    trace = found.shorter
    cluster, resident, copies = _occupancy(trace, chip)
    clusters = math.ceil(ctas / cluster)
    if clusters > int(chip["sms"]) // cluster * resident:
        raise ValueError(f"{ctas} CTAs of {trace.launch.kernel} do not fit {chip.name}: {resident} fit an SM")
    active, together = _spread(clusters, cluster, copies, chip)
    memory = memory_of(chip, footprint, active)
    clocks = found.clocks(chip, memory, together)
    most = math.ceil(tiles / clusters)
    total = clocks.total(most, found.more) + chip["cta_start"]
    rest = tiles % clusters
    if rest and most > 1:
        active, together = _spread(rest, cluster, copies, chip)
        last = found.clocks(chip, memory_of(chip, footprint, active), together)
        total += last.of_tile(found.more) - clocks.of_tile(found.more)
    saved = savings(found.longer, chip, memory) if explain else {}
    return _prediction(
        trace, chip, ctas, waves=1, fixed_clocks=clocks.tile, step_clocks=clocks.step, limiter=next(iter(saved), ""),
        milliseconds=total / chip["clock"] / 1e6 + chip["launch"] / 1e3, savings=saved, tiles_per_cta=most,
    )  # fmt: skip


def _prediction(trace: Trace, chip: Chip, ctas: int, **found: Any) -> Prediction:
    launch = trace.launch
    return Prediction(launch.kernel, launch.sha256, chip.name, ctas, ctas_per_sm(trace, chip), **found)


def _occupancy(trace: Trace, chip: Chip) -> tuple[int, int, int]:
    """(CTAs of a cluster, CTAs that fit an SM, copies of them to replay)."""
    cluster = trace.ctas_per_cluster
    resident = ctas_per_sm(trace, chip)
    return cluster, resident, min(resident, MOST_COPIES) if cluster == 1 else 1


def _spread(clusters: int, cluster: int, copies: int, chip: Chip) -> tuple[int, int]:
    """(SMs that work, copies on each) of so many clusters: CTAs spread over the SMs before they share one."""
    active = min(clusters * cluster, int(chip["sms"]))
    return active, min(copies, math.ceil(clusters * cluster / active))


def busy_shares(trace: Trace, chip: Chip, memory: Memory) -> Counter:
    """Share of a replay's clocks in which each resource works; per quarter SM where there are four of it."""
    result = replay(trace, chip, memory)
    quarters = (
        "issue",
        "integer",
        "fp32",
        "fp32x2",
        "half",
        "convert",
        "special",
        "shuffle",
        "double",
        "tensor memory",
    )
    return Counter({name: busy / result.clocks / (4 if name in quarters else 1) for name, busy in result.busy.items()})
