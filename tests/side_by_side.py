"""Tests in several processes of one machine: `python -m tests.side_by_side [--jobs N] [--chunk N] PYTEST ARGUMENTS`.

For tests on a GPU, most of whose time is a compiler's: kernels are compiled on as many cores as there are, and kept by
their cache. What the arguments select, from pytest's root folder, is collected once and dealt out, neighbours together,
since they share kernels. A line a chunk as it ends, the output of those that failed, and the sum; exit code 1 when a
test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--no-header", "-p", "no:cacheprovider")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|xfailed|xpassed)")
NO_TESTS = 5  # pytest's exit code


def collected(words: Sequence[str]) -> list[str]:
    """The tests that pytest's arguments select."""
    done = subprocess.run((*PYTEST, "--collect-only", *words), capture_output=True, text=True)
    if done.returncode not in (0, NO_TESTS):
        raise SystemExit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def run(tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A chunk of them."""
    return subprocess.run((*PYTEST, *tests), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.side_by_side", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: cores)")
    parser.add_argument("--chunk", type=int, default=16, help="tests of a process (default 16)")
    args, words = parser.parse_known_args(argv)
    tests, start = collected(words), time.perf_counter()
    chunks = [tests[first : first + args.chunk] for first in range(0, len(tests), args.chunk)]
    counts, failed = Counter[str](), False
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run, chunk): chunk for chunk in chunks}
        for future in as_completed(running):
            done, chunk = future.result(), running[future]
            last = (done.stdout.strip().splitlines() or [""])[-1]
            for count, what in COUNTS.findall(last):
                counts[what] += int(count)
            failed |= done.returncode != 0
            print(f"{chunk[0]} and {len(chunk) - 1} more: {last}", flush=True)
            if done.returncode:
                print(done.stdout, flush=True)
    summary = ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "no tests"
    print(f"{summary} of {len(tests)} in {time.perf_counter() - start:.0f} s, {args.jobs} processes")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
