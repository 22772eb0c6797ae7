"""compute-sanitizer over the SM90 kernels on a Hopper GPU: `python -m tests.sanitize [--out FILE]`.

Every tool runs every case of `CASES` in a process of its own and looks at this package's kernels only; one JSON line a
tool says what it found. Exit code 1 when a tool found something.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import env

TOOLS = {
    "memcheck": (),
    # Hazards of any severity count.
    "racecheck": ("--racecheck-detect-level", "info"),
    "initcheck": (),
    "synccheck": (),
}
SMALL = Case(S=5, S_kv=150, H=16, K=130)
CASES = (
    SMALL.but(name="one head", H=1, K=1),
    SMALL.but(name="24 heads fp16, holes", H=24, D=512, dtype=torch.float16, invalid="odd", sink="random"),
    SMALL.but(name="64 heads", H=64, causal=True, length="random", sink="random", dlse=True),
    SMALL.but(name="100 heads, five blocks", H=100, D=512, K=320, invalid="shuffled"),
    SMALL.but(name="groups", B=2, H=12, G=2, invalid="out_of_range", index_dtype=torch.int64, duplicates=True),
    SMALL.but(name="empty rows", invalid="all", sink="random"),
)
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def run_cases() -> None:
    """Forward and backward of every case."""
    for number, case in enumerate(CASES):
        i = case.inputs(number, "cuda")
        out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, backend="sm90", **i.options)
        results = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, backend="sm90", **i.options)
        torch.cuda.synchronize()
        assert all(bool(torch.isfinite(t).all()) for t in results if t is not None), case.name


def start(tool: str) -> subprocess.Popen[str]:
    """One tool over the cases, in a process of its own."""
    filters = ("--kernel-name", "kernel_substring=sparse_mla")
    command = ("compute-sanitizer", "--tool", tool, *filters, *TOOLS[tool], sys.executable, "-m", "tests.sanitize")
    return subprocess.Popen(
        (*command, "--cases"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(tool: str, process: subprocess.Popen[str], limit: float) -> dict[str, object]:
    """Wait for a tool and describe what it found; `found` is None when it did not finish."""
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = f"not finished in {limit:.0f} s: " + process.communicate()[0]
    counts = [int(first or second) for first, second in SUMMARY.findall(text)]
    ran = process.returncode == 0 and bool(counts)
    return {
        "kind": "sanitizer", "tool": tool, "cases": [case.name for case in CASES],
        "found": sum(counts) if ran else None, "device": torch.cuda.get_device_name(),
        "versions": env.versions("tilelang"), "note": "" if ran and not sum(counts) else text[-2000:],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", action="store_true", help="only run the cases: what the tools watch")
    parser.add_argument("--tool", nargs="+", choices=tuple(TOOLS), default=tuple(TOOLS))
    parser.add_argument("--limit", type=float, default=900, help="seconds that each tool may take (default 900)")
    parser.add_argument("--out", type=Path, help="append result rows as JSON lines")
    args = parser.parse_args()
    if args.cases:
        run_cases()
        return 0
    run_cases()  # compiles, so that the tools do not wait for it
    processes = {tool: start(tool) for tool in args.tool}
    failed = False
    for tool, process in processes.items():
        row = finish(tool, process, args.limit)
        print(f"{tool:10s} found {row['found']} {row['note']}", flush=True)
        failed |= row["found"] != 0
        if args.out:
            with args.out.open("a") as sink:
                sink.write(json.dumps(row) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
