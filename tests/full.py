"""All that continuous integration has no time for: `make full`, or `python -m tests.full [--only PART ...]`.

A part is a make target and runs as it does alone. What this machine cannot run is named and left out: a CPU runs the
simulator's parts (about two hours on two cores), a Hopper GPU its own as well. One JSON line a part says how it
ended; exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.report import Row, append_jsonl
from cute_sparse_mla import arguments, env

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "full.jsonl"
# Hopper GPUs that a part needs.
PARTS = {
    "sentinel-sim": 0, "sim-races": 0, "fuzz-sim": 0, "sync-mutants": 0,
    "sentinel-h200": 1, "sanitize-h200": 1, "fuzz-h200": 1, "load-h200": 1, "peer-suites-h200": 1, "bench-pages": 1,
    "parallel-h200": 2,
}  # fmt: skip


def hopper_gpus() -> int:
    """How many of this machine's GPUs have compute capability 9.x."""
    return sum(torch.cuda.get_device_capability(n)[0] == 9 for n in range(torch.cuda.device_count()))


def missing(part: str, gpus: int, peers: Path | None) -> str:
    """What a part needs that is not there, or an empty string."""
    if PARTS[part] > gpus:
        return f"needs {PARTS[part]} Hopper GPU{'s' * (PARTS[part] > 1)}"
    return "needs --peer-path" if part == "peer-suites-h200" and peers is None else ""


def run(part: str, words: str = "") -> Row:
    """Runs a make target with this Python, its output passed on; its result row, which has the last words of it."""
    python = sys.executable
    if not PARTS[part] and torch.cuda.is_available():
        python += f" -m tests.ptx_sim.without_gpu {python}"  # the simulator's stand-in driver comes first
    # `make full` hands its own ARGS on, unless they are given here.
    command = ("make", "--no-print-directory", part, "NO_VENV=1", f"PYTHON={python}", f"ARGS={words}")
    start, last = time.perf_counter(), ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = torch.device("cuda" if PARTS[part] else "cpu")
    return {
        "kind": "full", "part": part, "ok": process.returncode == 0, "said": last[-300:],
        "seconds": round(time.perf_counter() - start, 1), "device": env.device_name(device), "commit": commit[:12],
        "versions": env.versions("tilelang", "nvidia-cutlass-dsl"),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.full", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="these parts (all)")
    parser.add_argument("--peer-path", type=Path, help="folder of the peers' suites")
    parser.add_argument("--out", type=arguments.output_file, default=RESULTS, help="append result rows as JSON lines")
    args = parser.parse_args(argv)
    gpus, failed = hopper_gpus(), False
    for part in args.only:
        if reason := missing(part, gpus, args.peer_path):
            print(f"{part}: left out, {reason}", flush=True)
            continue
        row = run(part, f"--peer-path {args.peer_path.resolve()}" if part == "peer-suites-h200" else "")
        append_jsonl(args.out, [row])
        failed |= not row["ok"]
        print(f"{part}: {'ok' if row['ok'] else 'FAILED'} in {row['seconds']} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
