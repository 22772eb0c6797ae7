"""Load on a GPU: `python -m tests.load [--calls N] [--out FILE]`; one JSON line a subject, exit code 1 on a failure.

    mixed calls      forward and backward of random shapes: memory, compiled kernels and time per call stay flat
    cold cache       8 processes compile into one empty folder, one more was killed while it did: all get right results
    unwritable cache a folder that cannot be written changes no result
    threads          two threads compile at once, one of them inside autograd's backward
    out of memory    in the middle of a backward: the next call is right

On a CPU the reference stands in, which compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cute_sparse_mla
from bench.cases import BASE, Case
from bench.report import append_jsonl
from cute_sparse_mla import env
from cute_sparse_mla.precision import Inputs, Judge, run

# Folders of compiled kernels, of TileLang's and of this package.
CACHES = ("TILELANG_CACHE_DIR", "CUTE_SPARSE_MLA_CACHE")
# A process of its own: one judged forward and backward.
JUDGED = """
import sys, torch
from tests import load
load.judged_call(torch.device(sys.argv[1]))
print("right")
"""


def misses(inputs: Inputs) -> list[str]:
    """What a forward and backward miss of the precision clause."""
    results = run(inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd)
    return [str(check) for check in Judge(inputs).checks(results) if not check.ok]


def judged_call(device: torch.device) -> None:
    """One small call; raises when it is not within the precision clause."""
    found = misses(BASE.but(S=8, invalid="shuffled", sink="random").inputs(device=device))
    if found:
        raise AssertionError("; ".join(found))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _held(device: torch.device) -> int:
    """Bytes that this process holds: of the device's memory, or of its own at most so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _kernels() -> int:
    module = sys.modules.get("cute_sparse_mla.hopper.build")
    return module.kernel.cache_info().currsize if module else 0


def mixed_case(number: int) -> Case:
    """Shapes, options and strides that differ from call to call, of one dtype."""
    gen = torch.Generator().manual_seed(number)

    def some(high: int) -> int:
        return int(torch.randint(1, high, (), generator=gen))

    return BASE.but(
        S=some(60), S_kv=some(400), H=some(33), K=some(200), D=(512, 576)[number % 2], causal=number % 3 == 0,
        sink="random" if number % 5 == 0 else None, length="random" if number % 7 == 0 else None, invalid="shuffled",
    )  # fmt: skip


def mixed_calls(device: torch.device, calls: int) -> dict[str, Any]:
    """Forward and backward, `calls` times; the first tenth warms up, the last tenth is compared with the second."""
    tenth, times = max(calls // 10, 1), []
    held = kernels = 0
    for number in range(calls):
        if number == tenth:
            held, kernels = _held(device), _kernels()
        inputs = mixed_case(number).inputs(device=device)
        _synchronize(device)
        start = time.perf_counter()
        run(inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd)
        _synchronize(device)
        times.append(time.perf_counter() - start)
        del inputs
    early, late = (statistics.median(part) for part in (times[tenth : 2 * tenth], times[-tenth:]))
    row = {
        "calls": calls, "grown bytes": _held(device) - held, "grown kernels": _kernels() - kernels,
        "ms per call early": round(early * 1e3, 3), "ms per call late": round(late * 1e3, 3),
    }  # fmt: skip
    # A CPU's figure is a peak, which fragments; a GPU's is exact.
    allowed = 1 << 16 if device.type == "cuda" else 64 << 20
    flat = row["grown bytes"] <= allowed and row["grown kernels"] == 0 and late <= 1.25 * early
    return row | {"ok": flat}


def _process(device: torch.device, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | dict.fromkeys(CACHES, str(folder))
    return subprocess.Popen(
        [sys.executable, "-c", JUDGED, str(device)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def _answers(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
    said = [process.communicate(timeout=500) for process in processes]
    right = [out.strip().endswith("right") for out, _ in said]
    failures = [err.strip().splitlines()[-1][:300] for (_, err), ok in zip(said, right, strict=True) if not ok and err]
    return {"processes": len(processes), "right": sum(right), "ok": all(right), "failures": failures}


def cold_cache(device: torch.device, processes: int = 8, kill_after: float = 12.0) -> dict[str, Any]:
    """Processes that start together on an empty folder, in which another was killed while it compiled."""
    with tempfile.TemporaryDirectory() as folder:
        victim = _process(device, Path(folder))
        try:
            victim.wait(timeout=kill_after)
        except subprocess.TimeoutExpired:
            victim.send_signal(signal.SIGKILL)
        victim.communicate()
        answers = _answers([_process(device, Path(folder)) for _ in range(processes)])
    return answers | {"killed": victim.returncode == -signal.SIGKILL}


def unwritable_cache(device: torch.device) -> dict[str, Any]:
    """A file stands where the folder should be: nobody, root included, can write there."""
    with tempfile.NamedTemporaryFile() as file:
        return _answers([_process(device, Path(file.name) / "cache")])


def threads(device: torch.device) -> dict[str, Any]:
    """Kernels of two plans at once from an empty memory: a forward in one thread, a backward in autograd's."""
    module = sys.modules.get("cute_sparse_mla.hopper.build")
    if module:
        module.kernel.cache_clear()
    found: list[str] = []

    def work(D: int) -> None:
        try:
            i = BASE.but(S=8, D=D).inputs(device=device)
            leaves = [t.clone().requires_grad_() for t in (i.q, i.kv)]
            cute_sparse_mla.sparse_mla(*leaves, i.indices).backward(i.dout)
            found.extend(misses(i))
        except Exception as error:
            # A thread's exception would be lost.
            found.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(D,)) for D in (512, 576, 576)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"ok": not found, "failures": found}


def out_of_memory(device: torch.device) -> dict[str, Any]:
    """A backward whose fp32 dkv does not fit any more; then the memory comes back, and the next call is judged."""
    if device.type != "cuda":
        return {"ok": True, "skipped": "a GPU's memory only"}
    i = Case(S=64, S_kv=200_000, H=16, K=64, packed=True, duplicates=True).inputs(device=device)
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    # Leaves less than dkv in fp32 takes.
    hog = torch.empty(free - i.kv.numel() * 2, dtype=torch.uint8, device=device)
    raised = False
    try:
        cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse)
    except torch.OutOfMemoryError:
        raised = True
    del hog
    torch.cuda.empty_cache()
    found = misses(BASE.inputs(device=device))
    return {"ok": raised and not found, "raised": raised, "failures": found}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.load", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--calls", type=int, default=10_000, help="mixed calls (default 10000)")
    parser.add_argument("--device", type=torch.device, help="default: the GPU where there is one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append result rows as JSON lines")
    args = parser.parse_args()
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subjects: dict[str, Callable[[], dict[str, Any]]] = {
        "mixed calls": lambda: mixed_calls(device, args.calls),
        "cold cache": lambda: cold_cache(device),
        "unwritable cache": lambda: unwritable_cache(device),
        "threads": lambda: threads(device),
        "out of memory": lambda: out_of_memory(device),
    }
    failed = False
    for name, subject in subjects.items():
        start = time.perf_counter()
        row = {"subject": name, "device": env.device_name(device), **subject()}
        row["seconds"] = round(time.perf_counter() - start, 1)
        failed |= not row["ok"]
        print(json.dumps(row), flush=True)
        if args.out:
            append_jsonl(args.out, [row])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
