"""The main job: forward and backward of a real model's layer on real rows, judged by the float64 oracle and timed."""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import api, arguments, env, text_rows, validation
from .errors import ArgumentValueError
from .indices import union_ratios
from .models import MODELS, ModelShape
from .precision import Inputs, Judge, Results, TensorCheck, run
from .problem import MAX_HEADS_PER_GROUP
from .text_rows import UNION_K, UNION_RANGES, Indexer, TextRows

# The reference on a CPU runs a part of the text's queries over all of its rows; a GPU runs a training-size call.
DEFAULT_TOKENS = {"cpu": 128, "cuda": 4096}
REPEATS = {"cpu": 3, "cuda": 20}
# After so many seconds a pass is not run again, unless --repeats asks for it: on a busy CPU one takes minutes.
ENOUGH = 20.0


class Progress:
    """A bar on a terminal, a line per step elsewhere; on stderr, so that results can be piped."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.started = steps, 0, time.perf_counter()

    def step(self, what: str) -> None:
        """Say what comes next."""
        self._show(what)
        self.done += 1

    def _show(self, what: str) -> None:
        filled = "#" * self.done + "." * (self.steps - self.done)
        text = f"[{filled}] {time.perf_counter() - self.started:5.1f} s  {what}"
        print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
        if not sys.stderr.isatty():
            print(file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal line clean, or a full bar elsewhere."""
        self._show("done")
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one pass: median, fastest and slowest run."""

    name: str
    ms: float
    fastest: float
    slowest: float
    flops: int
    bytes: int

    def __str__(self) -> str:
        rates = f"{self.flops / self.ms / 1e9:9.3f} TFLOP/s  {self.bytes / self.ms / 1e9:8.4f} TB/s"
        return f"{self.name:9s}{self.ms:11.3f} ms [{self.fastest:.3f}, {self.slowest:.3f}]  {rates}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `check`."""
    arguments.add_shape(parser)
    parser.add_argument(
        "--tokens", type=arguments.count, help="queries: the last so many tokens (default 128 on a CPU, else 4096)"
    )
    parser.add_argument("--rows", metavar="FILE", help="indexer tensors made by bench.make_rows (default: the sample)")
    parser.add_argument("--repeats", type=arguments.count, help="timed runs (default 3 on a CPU, else 20, for 20 s)")
    parser.add_argument("--seed", type=arguments.seed, help="seed of q, kv and dout (default: a fresh one)")


def main(args: argparse.Namespace) -> int:
    """Run the check; 0 when everything is within its limits, 1 on a miss."""
    device = args.device or arguments.default_device()
    model = MODELS[args.model]
    if args.heads:
        validation.count("heads", args.heads, MAX_HEADS_PER_GROUP, str(MAX_HEADS_PER_GROUP))
        model = replace(model, heads=args.heads)
    progress = Progress(6)
    progress.step("load the indexer tensors of the text")
    indexer = text_rows.load_indexer(args.rows, device)
    default_tokens = DEFAULT_TOKENS.get(device.type, DEFAULT_TOKENS["cuda"])
    tokens = args.tokens if args.tokens is not None else min(default_tokens, indexer.tokens)
    if not 1 <= tokens <= indexer.tokens:
        raise ArgumentValueError("--tokens", f"must lie in 1..{indexer.tokens}, the tokens of the text", tokens)
    progress.step(f"select rows of {indexer.tokens} tokens")
    every_row = text_rows.text_rows(indexer, model, indexer.tokens)
    rows = replace(every_row, indices=every_row.indices[indexer.tokens - tokens :])
    seed = args.seed if args.seed is not None else secrets.randbelow(2**31)
    inputs = make_inputs(model, rows, seed, device)
    explained = api.explain(inputs.q, inputs.kv, inputs.indices, **_forward_options(inputs), backend=args.backend)
    if not explained.ok:
        progress.close()
        print(explained, file=sys.stderr)
        return 1
    progress.step("run forward and backward")
    got = run(inputs, api.fwd, api.bwd, backend=args.backend)
    judge = Judge(inputs)
    progress.step("judge the forward: float64 oracle and budget implementation")
    checks = judge.forward_checks(got.out, got.lse)
    progress.step("judge the backward")
    checks += judge.gradient_checks(*got)
    progress.step("time")
    repeats = args.repeats or REPEATS.get(device.type, REPEATS["cuda"])
    enough = math.inf if args.repeats else ENOUGH
    timings = time_passes(inputs, got, args.backend, repeats, explained, enough)
    progress.close()
    _print_head(model, inputs, explained, device, seed)
    overlap_ok = _print_overlap(every_row, model, indexer)
    return _print_results(checks, timings, overlap_ok)


def make_inputs(model: ModelShape, rows: TextRows, seed: int, device: torch.device) -> Inputs:
    """Normal random `q`, `kv`, `dout` (and sink) for given rows; packed."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device).to(torch.bfloat16)

    T = rows.indices.shape[0]
    return Inputs(
        q=normal(T, model.heads, model.D), kv=normal(rows.S_kv, 1, model.D), indices=rows.indices,
        dout=normal(T, model.heads, model.d_v), d_v=model.d_v, sm_scale=model.sm_scale, causal=rows.causal,
        attn_sink=torch.randn(model.heads, generator=gen, device=device) if model.has_sink else None,
    )  # fmt: skip


def _forward_options(inputs: Inputs) -> dict:
    return {"d_v": inputs.d_v, **inputs.options}


def time_passes(
    inputs: Inputs,
    got: Results,
    backend: str | None,
    repeats: int,
    explained: api.Explanation,
    enough: float = math.inf,
) -> list[Timing]:
    """Median time of forward and backward, each warm; of fewer runs where these take more than `enough` seconds."""
    problem = explained.problem
    if problem is None:
        return []
    out, lse = got.out, got.lse
    tensors = (inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse)
    passes: list[tuple[str, Callable[[], object], int, int]] = [
        (
            "forward",
            lambda: api.fwd(inputs.q, inputs.kv, inputs.indices, backend=backend, **_forward_options(inputs)),
            problem.forward_flops,
            problem.gather_bytes,
        ),
        (
            "backward",
            lambda: api.bwd(*tensors, backend=backend, **inputs.options),
            problem.backward_flops,
            problem.gather_bytes + problem.add_bytes,
        ),
    ]
    timings = []
    for name, call, flops, size in passes:
        times = _milliseconds(call, repeats, inputs.q.device, enough)
        timings.append(Timing(name, statistics.median(times), min(times), max(times), flops, size))
    return timings


def _milliseconds(call: Callable[[], object], repeats: int, device: torch.device, enough: float) -> list[float]:
    times: list[float] = []
    while len(times) < repeats and sum(times) <= enough * 1e3:
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return times


def _print_head(model: ModelShape, inputs: Inputs, explained: api.Explanation, device: torch.device, seed: int) -> None:
    T, S_kv = inputs.q.shape[0], inputs.kv.shape[0]
    print(
        f"{model.name}: {T} queries x {S_kv} rows, {model.heads} heads, D {model.D}, d_v {model.d_v}, K {model.K}, "
        f"scale {model.sm_scale:.4f}{', sink' if model.has_sink else ''}, bfloat16, seed {seed}"
    )
    print(f"device    {env.device_name(device)}, torch {torch.__version__}\n{explained}")


def _print_overlap(rows: TextRows, model: ModelShape, indexer: Indexer) -> bool:
    """Print the unions of neighbouring tokens' rows; False when they leave the measured ranges (known for K = 2048)."""
    ratios = union_ratios(rows.indices, rows.S_kv, tuple(UNION_RANGES))
    known = model.K == UNION_K and not model.window
    good = {n: not known or low <= ratios[n] <= high for n, (low, high) in UNION_RANGES.items()}
    print(f"rows: {indexer.source}")
    print(f"unions of n neighbouring tokens' rows over K, all full rows of {rows.indices.shape[0]} tokens:")
    for n, (low, high) in UNION_RANGES.items():
        expected = f"   expected {low} to {high}: {'ok' if good[n] else 'MISS'}" if known else ""
        print(f"  n = {n:2d}  {ratios[n]:.2f}{expected}")
    return all(good.values())


def _print_results(checks: list[TensorCheck], timings: list[Timing], overlap_ok: bool) -> int:
    print(
        "errors against the float64 oracle (relative RMS; lse, d_sink: largest absolute) and their share of the limits,"
    )
    print(
        "which are those of a plain low-precision implementation times 1.5 in total and 2 per row (at most 1 passes):"
    )
    for check in checks:
        print(f"  {check}")
    print("time: median [fastest, slowest] (FLOPs count every slot; bytes: gathered rows, backward also fp32 adds):")
    for timing in timings:
        print(f"  {timing}")
    passed = overlap_ok and all(check.ok for check in checks)
    print("PASS" if passed else "MISS")
    return 0 if passed else 1
