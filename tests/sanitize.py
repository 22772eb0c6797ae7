"""compute-sanitizer over the SM90 kernels on a Hopper GPU: `python -m tests.sanitize [--out FILE]`.

Every tool runs every case of `CASES` in a process of its own, as many side by side as the machine has cores; one JSON
line a tool says what it found. Exit code 1 when a tool found something or did not finish. Tensors have allocations of
their own there, so that an access past the end of one is not hidden by its neighbour.

For synccheck the kernels are compiled so that each product is waited for at once (`IN_TURN`); barriers, warps and
branches, which it looks at, are the same. With products in flight a forward does not end under it where the list's last
pair has an empty block behind a full one (K 192, 320; K 128, 130, 256 pass). It ends without the tool and under the
other three, no register is spilled, the simulator finds neither race nor deadlock under adversarial schedules, and the
same instructions with a call in a wait, or without setmaxnreg, both of which make ptxas wait for each product, pass as
well. Why is not known; a small kernel of one product beside one barrier passes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import Case
from bench.report import append_jsonl
from cute_sparse_mla import SparseAttentionConfig, arguments, env
from cute_sparse_mla.precision import Inputs

# Kernels of others are not looked at, except for what they initialise.
OURS = ("--kernel-name", "kernel_substring=sparse_mla")
TOOLS = {
    "memcheck": OURS,
    # Hazards of any severity count.
    "racecheck": (*OURS, "--racecheck-detect-level", "info"),
    "synccheck": OURS,
    "initcheck": (),
}
IN_TURN = {"synccheck": ["-Xptxas", "-O0"]}  # ptxas then says C7511: products serialised
# A report with the stack of a Python process takes longer than the kernel.
BRIEF = ("--print-limit", "20", "--show-backtrace", "no")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)

SMALL = Case(S=2, S_kv=150, H=16, K=130)
SWEEP = SMALL.but(name="head sweep", S=1, K=65)
HEADS = (*range(1, 17), 20, 22, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 96, 100, 112, 120, 127, 128)
CASES: dict[Case, int | None] = {  # tokens a tile
    SMALL.but(name="one head", H=1, K=1): 1,
    SMALL.but(name="24 heads fp16, holes", H=24, D=512, dtype=torch.float16, invalid="odd", sink="random"): 1,
    SMALL.but(name="64 heads", H=64, causal=True, length="random", sink="random", dlse=True): 1,
    SMALL.but(name="100 heads, five blocks", S=1, H=100, D=512, K=320, invalid="shuffled"): 1,
    SMALL.but(name="groups", B=2, S=1, H=12, G=2, invalid="out_of_range", index_dtype=torch.int64, duplicates=True): 1,
    SMALL.but(name="empty rows", invalid="all", sink="random"): 1,
    SMALL.but(name="8 tokens a tile", S=11, H=8, causal=True, length="random", duplicates=True): 8,
    SMALL.but(name="the device decides", S=5, H=8, invalid="shuffled"): None,
    SMALL.but(name="rows in order", S_kv=23_000, invalid="tail"): 1,
    SWEEP: 1,
}


def on_device(inputs: Inputs) -> Inputs:
    """Drawn on the CPU and copied, so that no kernel but ours runs before the call."""
    moved: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        moved[field.name] = value.cuda() if isinstance(value, Tensor) else value
    return Inputs(**moved)


def run_case(number: int, tool: str | None = None) -> None:
    """Forward and backward of a case, of the sweep with each of its head counts, as `tool` looks at them."""
    if tool in IN_TURN:
        from cute_sparse_mla.hopper import build

        build.PASS_CONFIGS["tl.device_compile_flags"] = IN_TURN[tool]
    case, tokens = list(CASES.items())[number]
    for heads in HEADS if case is SWEEP else (case.H,):
        i = on_device(case.but(H=heads).inputs(number))
        options: dict[str, Any] = dict(backend="sm90", config=SparseAttentionConfig(tokens_per_tile=tokens))
        out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **options, **i.options)
        results = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, **options, **i.options)
        torch.cuda.synchronize()
        # Judged on the CPU: read by a copy, not by a kernel.
        assert all(bool(torch.isfinite(t.cpu()).all()) for t in (out, *results) if t is not None), (case.name, heads)


@dataclass
class Finding:
    """What a tool said about a case; `count` is None when it did not finish."""

    case: str
    count: int | None
    seconds: float
    text: str


RUNNING: set[int] = set()  # process groups of what runs


def end(*_: Any) -> None:
    """Ended from outside, the tools must not stay on the GPU: they would share it with whatever is timed next."""
    for group in tuple(RUNNING):
        os.killpg(group, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def watched(tool: str, number: int, limit: float, watch: bool = True) -> Finding:
    """One tool over one case; or the case alone, so that its kernels are compiled."""
    command = ["compute-sanitizer", "--tool", tool, *BRIEF, *TOOLS[tool]] if watch else []
    command += [sys.executable, "-m", "tests.sanitize", "--case", str(number), "--tool", tool]
    start = time.perf_counter()
    process = subprocess.Popen(  # a group of its own: the tool and the Python that it watches end together
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    RUNNING.add(process.pid)
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = f"not finished in {limit:.0f} s: " + process.communicate()[0]
    RUNNING.discard(process.pid)
    counts = [int(first or second) for first, second in SUMMARY.findall(text)]
    finished = process.returncode == 0 and bool(counts)
    case = list(CASES)[number].name
    return Finding(case, sum(counts) if finished else None, time.perf_counter() - start, text)


def row(tool: str, found: Sequence[Finding]) -> dict[str, Any]:
    """The result row of a tool; `found` is None when a case did not finish."""
    counts = [f.count for f in found]
    bad = [f for f in found if f.count != 0]
    return {
        "kind": "sanitizer", "tool": tool, "compiled": IN_TURN.get(tool, []), "cases": [f.case for f in found],
        "found": None if None in counts else sum(filter(None, counts)),
        "seconds": round(sum(f.seconds for f in found), 1), "device": torch.cuda.get_device_name(),
        "versions": env.versions("tilelang"),
        "note": "\n".join(f"{f.case} ({f.count}): {f.text[-1200:]}" for f in bad[:2]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help="only run this case: what the tools watch")
    parser.add_argument("--tool", nargs="+", choices=tuple(TOOLS), default=tuple(TOOLS))
    parser.add_argument("--limit", type=float, default=300, help="seconds of a tool for a case (default 300)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side (default: cores)")
    parser.add_argument("--out", type=arguments.output_file, help="append result rows as JSON lines")
    args = parser.parse_args()
    if args.case is not None:
        run_case(args.case, *args.tool[:1])
        return 0
    numbers, kinds = range(len(CASES)), {str(IN_TURN.get(tool)): tool for tool in args.tool}.values()
    signal.signal(signal.SIGTERM, end)
    with ThreadPoolExecutor(args.jobs) as pool:  # compiles, so that the tools do not wait for it
        runs = [pool.submit(watched, tool, n, args.limit, watch=False) for tool in kinds for n in numbers]
    for alone in (run.result() for run in runs):
        if "Traceback" in alone.text or "not finished" in alone.text:
            print(f"{alone.case} without a tool: {alone.text[-1200:]}", flush=True)
    failed = False
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {t: [pool.submit(watched, t, n, args.limit) for n in numbers] for t in args.tool}
        for tool, futures in jobs.items():
            done = row(tool, [future.result() for future in futures])
            print(f"{tool:10s} found {done['found']} in {done['seconds']} s of processes {done['note']}", flush=True)
            failed |= done["found"] != 0
            if args.out:
                append_jsonl(args.out, [done])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
