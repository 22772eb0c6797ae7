"""Time and peak memory of functions on one device: interleaved, warm, with the spread.

On a GPU a run is the span between two CUDA events around the call, or around one replay of a CUDA graph of it; on a CPU
it is wall time. Every round runs all functions once, in an order that rotates, so that clock and temperature drift and
what the predecessor left in the caches fall on all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARMUP = 3
# Runs per function when the caller does not say: as many as fit the time, between these.
FEWEST, MOST = {"cpu": 3, "cuda": 20}, {"cpu": 30, "cuda": 200}


@dataclass(frozen=True)
class Spread:
    """Milliseconds: median, 10th and 90th percentile of n runs."""

    ms: float
    p10: float
    p90: float
    n: int


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile with linear interpolation between the two nearest values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    """Median and spread of run times in milliseconds."""
    return Spread(quantile(values, 0.5), quantile(values, 0.1), quantile(values, 0.9), len(values))


class L2Flush:
    """Overwrites twice the L2's size between runs, so that each starts with none of its inputs there."""

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.empty(2 * size, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A function that replays `function` from a CUDA graph, into the same outputs; capture errors are raised."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = function()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def _rotations(names: Sequence[str], count: int) -> Iterator[list[str]]:
    for number in range(count):
        first = number % len(names)
        yield [*names[first:], *names[:first]]


def _run_cpu(functions: Mapping[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for order in _rotations(list(functions), count):
        for name in order:
            start = time.perf_counter()
            functions[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _run_cuda(
    functions: Mapping[str, Callable[[], Any]], count: int, device: torch.device, flush: L2Flush | None
) -> dict[str, list[float]]:
    with torch.cuda.device(device):
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
        for order in _rotations(list(functions), count):
            for name in order:
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if flush is not None:
                    flush()
                # No synchronisation in the loop: the host runs ahead, so launch latency hides behind the device's work.
                pair[0].record()
                functions[name]()
                pair[1].record()
                events[name].append(pair)
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(stop) for start, stop in pairs] for name, pairs in events.items()}


def interleaved(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, *, reps: int | None = None, seconds: float = 3.0,
    flush: bool = False, fewest: int | None = None,
) -> dict[str, Spread]:  # fmt: skip
    """Median and spread per function.

    Args:
        functions: by name, already run once each (compiled).
        reps: runs of each after `WARMUP` warm ones; default as many as fit `seconds` for all of them together.
        flush: overwrite the L2 before every run (on a GPU).
        fewest: of `reps` left to `seconds`; default 3 on a CPU, 20 on a GPU.
    """
    if not functions:
        return {}

    def rounds(count: int) -> dict[str, list[float]]:
        return _run_cuda(functions, count, device, flusher) if device.type == "cuda" else _run_cpu(functions, count)

    flusher = L2Flush(device) if flush and device.type == "cuda" else None
    warm = rounds(WARMUP if device.type == "cuda" else 1)
    if reps is None:
        total = sum(min(values) for values in warm.values())
        kind = "cuda" if device.type == "cuda" else "cpu"
        reps = max(fewest or FEWEST[kind], min(MOST[kind], int(seconds * 1e3 / max(total, 1e-6))))
    return {name: spread(values) for name, values in rounds(reps).items()}


def peak_extra_mb(function: Callable[[], Any], device: torch.device) -> float | None:
    """Peak device memory of one run above what was allocated before it, outputs included, in 1e6 bytes; GPU only."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept: Tensor | Any = function()
    torch.cuda.synchronize(device)
    del kept
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6
