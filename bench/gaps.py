"""What a call costs beyond its kernels: `bench --gaps`, for this package's own calls, on a GPU.

kernels_ms  time in which at least one kernel runs, by torch's profiler, over the calls of the next two
replay_ms   one replay of a CUDA graph of the call: gaps between kernels that the device alone makes
queued_ms   one call behind others, between CUDA events: gaps that remain when the host runs ahead
idle_ms     one call on an idle device, from the host's first line to the last kernel's end: what a caller waits
host_ms     the host's time for one call
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import timing
from .harness import Run, Settings
from .implementations import BWD, FWD, Ours
from .report import Row
from .shapes import BenchShape, draw, unsupported_rows

RUNS = 20


def _alone(function: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Median milliseconds of the host's part and of the whole call, each call on an idle device."""
    host, whole = [], []
    for _ in range(RUNS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize(device)
        whole.append((time.perf_counter() - start) * 1e3)
    return timing.quantile(host, 0.5), timing.quantile(whole, 0.5)


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _behind_others(function: Callable[[], Any], device: torch.device) -> tuple[float, float, float, int]:
    """Milliseconds of a replayed call, of a queued one and of their kernels, and the number of these."""
    timed = {"replay": timing.captured(function, device), "queued": function}
    calls = len(timed) * (RUNS + timing.WARMUP)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        spreads = timing.interleaved(timed, device, reps=RUNS)
    ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = busy((event.time_range.start, event.time_range.end) for event in ran) / calls / 1e3
    return spreads["replay"].ms, spreads["queued"].ms, kernels, round(len(ran) / calls)


def rows(shape: BenchShape, ours: Ours, settings: Settings, run: Run, indexer: Any = None) -> list[Row]:
    """A row of kind `gaps` for each pass."""
    problem, device = shape.problem(), settings.device
    if unsupported_rows(shape, indexer) or ours.unsupported_pass(problem, FWD, device):
        return []
    call = ours.prepare(draw(shape, device, settings.seed, indexer), problem)
    state = call.fwd()
    functions = {FWD: call.fwd, BWD: lambda: call.bwd(state)}
    found = []
    for which in (which for which in settings.passes if which in functions):
        function = functions[which]
        function()
        replay, queued, kernels, count = _behind_others(function, device)
        host, idle = _alone(function, device)
        ms = {"kernels": kernels, "replay": replay, "queued": queued, "idle": idle}
        found.append(
            {
                "kind": "gaps", "run": run.id, "impl": ours.name, "pass": which, "model": shape.name, "T": shape.T,
                "S_kv": shape.S_kv, "H": shape.H, "D": shape.D, "K": shape.K, "rows": shape.rows, "kernels": count,
                **{f"{name}_ms": round(value, 4) for name, value in ms.items()}, "host_ms": round(host, 4),
                "device": run.device_name, "versions": run.versions,
            }
        )  # fmt: skip
    return found


def describe(row: Row) -> str:
    """A row for people."""
    beyond = {name: row[f"{name}_ms"] - row["kernels_ms"] for name in ("replay", "queued", "idle")}
    texts = ", ".join(f"{name} +{ms * 1e3:.0f} us" for name, ms in beyond.items())
    return (
        f"  {row['pass']:8s}{row['impl']}: {row['kernels']} kernels {row['kernels_ms']:.4g} ms; {texts}; "
        f"host {row['host_ms'] * 1e3:.0f} us"
    )
