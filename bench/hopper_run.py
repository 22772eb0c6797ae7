"""Check and time the SM90 path on a Hopper GPU: `python -m bench.hopper_run --check --time [--peer-path DIR]`.

`--check` judges cases by the contract's precision clause against the float64 oracle. `--time` interleaves this package
with the public TileLang example (`sparse_mla_fwd_pipelined.py`, `sparse_mla_bwd.py` in `--peer-path`) in one process
and writes one JSON line a measurement: medians and the 10th and 90th percentile of CUDA-event times, in ms.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

import cute_sparse_mla as csm
from cute_sparse_mla.precision import Judge, run
from cute_sparse_mla.problem import Problem

from .cases import Case

# -- correctness -----------------------------------------------------------------------------------------------------

SMALL = Case(name="base", S=33, S_kv=300, H=16, K=128, sm_scale=None)


def check_cases(level: int) -> list[Case]:
    """Cases of the contract; a higher level is a wider sweep."""
    cases = [
        SMALL,
        SMALL.but(name="h64", H=64, K=192),
        SMALL.but(name="h128", H=128, K=256),
        SMALL.but(name="h100_d512_sink", H=100, D=512, sink="random", dlse=True),
        SMALL.but(name="fp16_holes", H=24, dtype=torch.float16, invalid="odd", sink="random"),
        SMALL.but(name="k17", K=17), SMALL.but(name="k100_tail", K=100, invalid="tail"),
        SMALL.but(name="k1", K=1),
        SMALL.but(name="groups_batch", B=2, H=6, G=2, invalid="out_of_range", length="random", causal=True,
                  sink="random", duplicates=True, index_dtype=torch.int64, dlse=True),
        SMALL.but(name="positions", positions="random", H=8, packed=True),
        SMALL.but(name="empty_rows_sink", invalid="one_row", sink="random", dlse=True),
        SMALL.but(name="all_empty", invalid="all", sink="random"),
        SMALL.but(name="sink_plus_inf", sink=float("inf"), dlse=True),
        SMALL.but(name="sink_200", sink=200.0, dlse=True),
        SMALL.but(name="large_scores", q_scale=64.0, sink="random"),
        SMALL.but(name="zero_scale", sm_scale=0.0),
        SMALL.but(name="k2048", H=8, S=40, S_kv=4096, K=2048, causal=True, length="random"),
    ]  # fmt: skip
    if level >= 2:
        for H in (1, 8, 16, 24, 48, 64, 72, 96, 100, 120, 128):
            for D in (512, 576):
                for dtype in (torch.bfloat16, torch.float16):
                    cases.append(SMALL.but(name=f"heads_{H}_{D}_{dtype}", H=H, D=D, dtype=dtype, K=100, sink="random"))
        for blocks in range(1, 9):
            for invalid in ("none", "shuffled"):
                cases.append(SMALL.but(name=f"blocks_{blocks}_{invalid}", H=64, K=64 * blocks, invalid=invalid))
        for invalid in ("head", "tail", "odd", "one_row", "out_of_range"):
            cases.append(SMALL.but(name=f"invalid_{invalid}", H=40, K=320, invalid=invalid, index_dtype=torch.int64))
    return cases


def check(level: int) -> int:
    """Number of cases that miss."""
    misses = 0
    for case in check_cases(level):
        try:
            judge = Judge(case.inputs(seed=zlib.crc32(case.name.encode()), device="cuda"))
            checks = judge.checks(run(judge.inputs, csm.fwd, csm.bwd, backend="sm90"))
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{case.name:32s} FAILED {type(error).__name__}: {str(error)[:600]}", flush=True)
            misses += 1
            continue
        ok = all(c.ok for c in checks)
        misses += not ok
        worst = max(max(c.total, c.worst_row) for c in checks)
        print(f"{case.name:32s} {'ok' if ok else 'MISS'} worst {worst:.2f}", flush=True)
        if not ok:
            print("\n".join(f"    {c}" for c in checks), flush=True)
    return misses


# -- time --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One timed shape; random causal rows."""

    T: int
    S_kv: int
    H: int
    D: int = 576
    K: int = 2048


SHAPES = {
    "main": [Shape(4096, 8192, 64), Shape(4096, 8192, 8)],
    "one": [Shape(4096, 8192, 64)],
    "quick": [
        Shape(4096, 8192, 64), Shape(4096, 8192, 8), Shape(4096, 8192, 64, 512, 640), Shape(4096, 8192, 8, 512, 640),
    ],
    "table": [
        Shape(4096, 8192, 8), Shape(4096, 8192, 16), Shape(4096, 8192, 64), Shape(4096, 8192, 128),
        Shape(4096, 32768, 64), Shape(4096, 131072, 64), Shape(16384, 16384, 64), Shape(16384, 16384, 8),
        Shape(4096, 8192, 64, 512, 640), Shape(4096, 8192, 128, 512, 1152), Shape(4096, 8192, 8, 512, 640),
        Shape(2048, 2048, 64), Shape(4096, 4096, 64), Shape(8192, 8192, 64),
    ],
}  # fmt: skip


Calls = dict[str, Callable[[], object]]
QUEUE_CYCLES = 2_000_000  # about a millisecond


def timed(functions: Calls, rounds: int) -> dict[str, dict[str, float]]:
    """Interleaved CUDA-event times of several functions: median, p10, p90 in ms."""
    for function in functions.values():
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The device waits while the host enqueues: launch overhead stays out of the time.
            torch.cuda._sleep(QUEUE_CYCLES)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end))
    found = {}
    for name, values in samples.items():
        values = sorted(values)
        at = lambda share: values[min(len(values) - 1, int(share * len(values)))]  # noqa: B023, E731
        found[name] = {"median": at(0.5), "p10": at(0.1), "p90": at(0.9)}
    return found


def inputs_of(shape: Shape) -> tuple[torch.Tensor, ...]:
    """`q, kv, indices, dout` with rows drawn below each token's causal bound."""
    gen = torch.Generator(device="cuda").manual_seed(shape.T + shape.H)
    normal = lambda *s: torch.randn(s, generator=gen, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, kv = normal(1, shape.T, shape.H, shape.D), normal(1, shape.S_kv, 1, shape.D)
    dout = normal(1, shape.T, shape.H, 512)
    bound = (torch.arange(shape.T, device="cuda") + shape.S_kv - shape.T + 1).view(1, -1, 1, 1)
    draw = torch.rand((1, shape.T, 1, shape.K), generator=gen, device="cuda")
    # Distinct rows: a random start and an odd stride, below the bound; -1 where the bound is shorter than K.
    step = torch.clamp(bound // shape.K, min=1)
    slot = torch.arange(shape.K, device="cuda").view(1, 1, 1, -1)
    order = draw.argsort(dim=-1)
    rows = order * step + (draw[..., :1] * step).long()
    indices = torch.where(slot * 0 + rows < bound, rows, -1).to(torch.int32)
    return q, kv, indices, dout


def peers(path: str, shape: Shape, saved: tuple[torch.Tensor, ...]) -> tuple[Calls, Calls]:
    """The public example's forward and backward on the same inputs, where it supports the shape."""
    if path not in sys.path:
        sys.path.insert(0, path)
    import sparse_mla_bwd as peer_bwd
    import sparse_mla_fwd_pipelined as peer_fwd

    q, kv, out, dout, indices, lse = saved
    tail = shape.D - 512
    fwd: Calls = {}
    bwd: Calls = {}
    if tail and shape.H in (64, 128):
        kernel = peer_fwd.sparse_mla_fwd_interface(q, kv, indices, shape.S_kv - shape.T + 1, 1, return_kernel=True)
        first = torch.tensor([shape.S_kv - shape.T], dtype=torch.int32, device="cuda")
        fwd["tilelang_example"] = lambda: kernel(q, kv, indices, first)
    if tail:
        log2_lse = lse * 1.4426950408889634

        def example(threads: int) -> Callable[[], object]:
            def call() -> object:
                delta = peer_bwd.preprocess(out, dout)
                dkv = torch.zeros_like(kv, dtype=torch.float32)
                dq = peer_bwd.bwd(
                    q,
                    kv,
                    dout,
                    indices,
                    log2_lse,
                    delta,
                    dkv,
                    shape.H,
                    512,
                    tail,
                    shape.K,
                    1,
                    None,
                    True,
                    threads=threads,
                )
                return dq, peer_bwd.postprocess(dkv, 512, tail, 1)

            return call

        bwd["tilelang_example"] = example(256 if shape.H >= 64 else 128)
        if shape.H >= 64:
            bwd["tilelang_example_128"] = example(128)
    return fwd, bwd


def measure(names: str, rounds: int, peer_path: str | None, sink: TextIO) -> None:
    """Time every shape and write one JSON line a function."""
    import tilelang

    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "tilelang": tilelang.__version__,
        "python": platform.python_version(), "rounds": rounds,
    }  # fmt: skip
    shapes = [s for name in names.split(",") for s in SHAPES[name]]
    for shape in shapes:
        q, kv, indices, dout = inputs_of(shape)
        out, lse = csm.fwd(q, kv, indices, causal=True)
        saved = (q, kv, out, dout, indices, lse)
        fwd: Calls = {"sm90": partial(csm.fwd, q, kv, indices, causal=True)}
        bwd: Calls = {"sm90": partial(csm.bwd, *saved, causal=True)}
        if peer_path:
            try:
                more_fwd, more_bwd = peers(peer_path, shape, saved)
                fwd.update(more_fwd)
                bwd.update(more_bwd)
            except Exception as error:
                print(f"peer failed: {type(error).__name__}: {str(error)[:300]}")
        problem = Problem(1, shape.T, shape.S_kv, shape.H, 1, shape.K, shape.D, 512, q.dtype, indices.dtype, True)
        for kind, functions, flops in (("fwd", fwd, problem.forward_flops), ("bwd", bwd, problem.backward_flops)):
            try:
                found = timed(functions, rounds)
            except Exception as error:
                print(f"{shape} {kind} failed: {type(error).__name__}: {str(error)[:500]}")
                continue
            for name, ms in found.items():
                tflops = flops / ms["median"] / 1e9
                row = {"kind": kind, "implementation": name, **asdict(shape), **ms, "tflops": tflops, **about}
                sink.write(json.dumps(row) + "\n")
                spread = f"[{ms['p10']:.3f}, {ms['p90']:.3f}]"
                print(f"{kind} {name:22s} {shape} {ms['median']:8.3f} ms {spread} {tflops:6.0f} TFLOP/s", flush=True)
        sink.flush()
        del q, kv, indices, dout, out, lse, fwd, bwd, saved
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int, default=0, help="1: the contract's cases, 2: a wider sweep")
    parser.add_argument("--time", default="", help=f"comma-separated sets of shapes: {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--peer-path", default=None)
    parser.add_argument("--out", type=Path, default=Path("hopper.jsonl"))
    args = parser.parse_args()
    begin = time.time()
    misses = check(args.check) if args.check else 0
    print(f"checks: {misses} misses, {time.time() - begin:.0f} s")
    if args.time:
        with args.out.open("w") as sink:
            measure(args.time, args.rounds, args.peer_path, sink)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
