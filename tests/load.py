"""Load on a GPU: `python -m tests.load [--only NAME ...] [--calls N] [--out FILE]`; one JSON line a subject.

    mixed-calls       forward and backward of random shapes: memory, compiled kernels and time per call stay flat
    cold-cache        8 processes compile into one empty folder: all get right results
    killed-compile    kill -9 when the first file of a kernel appears: the next process is right
    unwritable-cache  a folder that cannot be made changes no result
    full-cache        neither does one in which every write fails
    fork              a child forked after the import, and then its parent, use the GPU
    threads           two threads compile at once, one of them inside autograd's backward
    out-of-memory     in the middle of a backward: the next call is right

Exit code 1 on a failure. `SUBJECTS` says how long each takes. On a CPU the reference stands in, which compiles nothing.
"""

from __future__ import annotations

import argparse
import builtins
import errno
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cute_sparse_mla
from bench.cases import BASE, Case
from bench.report import append_jsonl
from cute_sparse_mla import arguments, env
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs, Judge, run

# Folders of compiled kernels, of TileLang's and of this package.
CACHES = ("TILELANG_CACHE_DIR", "CUTE_SPARSE_MLA_CACHE")
# Few kernels to compile.
SINGLE = SparseAttentionConfig(tokens_per_tile=1)
# Processes of their own; arguments: device, folder of kernels.
JUDGED = """
import sys, torch
from tests import load
load.judged_call(torch.device(sys.argv[1]))
print("right")
"""
FULL = JUDGED.replace("load.judged", "load.fill(sys.argv[2])\nload.judged")
FORKED = """
import os, sys, torch
from tests import load
child = os.fork()
load.judged_call(torch.device(sys.argv[1]))
if child == 0:
    os._exit(0)
print("right" if os.waitpid(child, 0)[1] == 0 else "the child failed")
"""
THREADS = """
import sys, torch
from tests import load
row = load.threads(torch.device(sys.argv[1]))
print("right" if row["ok"] else row)
"""


def misses(inputs: Inputs) -> list[str]:
    """What a forward and backward miss of the precision clause."""
    results = run(inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, config=SINGLE)
    return [str(check) for check in Judge(inputs).checks(results) if not check.ok]


def judged_call(device: torch.device) -> None:
    """One small forward; raises when it is not within the precision clause."""
    i = BASE.but(S=8, invalid="shuffled", sink="random").inputs(device=device)
    results = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, config=SINGLE, **i.options)
    found = [str(check) for check in Judge(i).forward_checks(*results) if not check.ok]
    if found:
        raise AssertionError("; ".join(found))


def fill(folder: str) -> None:
    """From now on every write of Python's into the folder fails, as on a full disk."""
    real = builtins.open

    def full(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and str(file).startswith(folder):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return real(file, mode, *rest, **options)

    builtins.open = full  # type: ignore[assignment]


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


def _process(device: torch.device, folder: Path, code: str = JUDGED) -> subprocess.Popen[str]:
    environment = os.environ | dict.fromkeys(CACHES, str(folder))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(device), str(folder)], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _answers(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
    said = [process.communicate(timeout=500) for process in processes]
    right = [out.strip().endswith("right") for out, _ in said]
    failures = [(out + err).strip()[-300:] for (out, err), ok in zip(said, right, strict=True) if not ok]
    return {"processes": len(processes), "right": sum(right), "ok": all(right), "failures": failures}


def cold_cache(device: torch.device, processes: int = 8) -> dict[str, Any]:
    """Processes that start together on an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return _answers([_process(device, Path(folder)) for _ in range(processes)])


def killed_compile(device: torch.device) -> dict[str, Any]:
    """kill -9 when the first file of a kernel appears, then another process; `killed`: whether it was in time."""
    with tempfile.TemporaryDirectory() as folder:
        victim = _process(device, Path(folder))
        while victim.poll() is None and not any(path.is_file() for path in Path(folder).rglob("*")):
            time.sleep(0.001)
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        killed = device.type != "cuda" or victim.returncode == -signal.SIGKILL
        answers = _answers([_process(device, Path(folder))])
    return answers | {"killed": killed, "ok": answers["ok"] and killed}


def unwritable_cache(device: torch.device) -> dict[str, Any]:
    """A file stands where the folder should be: nobody, root included, can write there."""
    with tempfile.NamedTemporaryFile() as file:
        return _answers([_process(device, Path(file.name) / "cache")])


def in_a_process(code: str, device: torch.device) -> dict[str, Any]:
    """One process on an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return _answers([_process(device, Path(folder), code)])


def threads(device: torch.device) -> dict[str, Any]:
    """Kernels of two D at once: a forward in one thread, a backward in autograd's."""
    found: list[str] = []

    def work(D: int) -> None:
        try:
            i = BASE.but(S=8, D=D).inputs(device=device)
            leaves = [t.clone().requires_grad_() for t in (i.q, i.kv)]
            cute_sparse_mla.sparse_mla(*leaves, i.indices, config=SINGLE).backward(i.dout)
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
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, config=SINGLE)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    # Leaves less than dkv in fp32 takes.
    hog = torch.empty(free - i.kv.numel() * 2, dtype=torch.uint8, device=device)
    raised = False
    try:
        cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, config=SINGLE)
    except torch.OutOfMemoryError:
        raised = True
    del hog
    torch.cuda.empty_cache()
    found = misses(BASE.inputs(device=device))
    return {"ok": raised and not found, "raised": raised, "failures": found}


class Subject(NamedTuple):
    """What is tried, and the seconds that it takes on an H200 with 16 cores at most, compiling all that it needs."""

    run: Callable[[torch.device], dict[str, Any]]
    seconds: int


SUBJECTS = {
    "mixed-calls": Subject(partial(mixed_calls, calls=10_000), 90),
    "cold-cache": Subject(cold_cache, 60),
    "killed-compile": Subject(killed_compile, 90),
    "unwritable-cache": Subject(unwritable_cache, 60),
    "full-cache": Subject(partial(in_a_process, FULL), 80),
    "fork": Subject(partial(in_a_process, FORKED), 60),
    "threads": Subject(partial(in_a_process, THREADS), 120),
    "out-of-memory": Subject(out_of_memory, 45),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.load", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=[*SUBJECTS], help="these subjects (all)")
    parser.add_argument("--calls", type=int, default=10_000, help="mixed calls (default 10000)")
    parser.add_argument("--device", type=torch.device, help="default: the GPU where there is one")
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append result rows as JSON lines")
    args = parser.parse_args()
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = False
    for name in args.only:
        start = time.perf_counter()
        result = mixed_calls(device, args.calls) if name == "mixed-calls" else SUBJECTS[name].run(device)
        row = {"subject": name, "device": env.device_name(device), **result}
        row["seconds"] = round(time.perf_counter() - start, 1)
        failed |= not row["ok"]
        print(json.dumps(row), flush=True)
        if args.out:
            append_jsonl(args.out, [row])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
