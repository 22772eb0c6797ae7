"""Registers, spills and shared memory of every SM100 kernel, by ptxas: `python -m tests.sm100_resources` rewrites them.

`--only TEXT` measures the kernels whose name has it, and those that have no row yet.

The PTX is the one that CuTe DSL hands to its own assembler. A toolkit that is older than the DSL's gets it with the
`.version` line lowered to its own: it refuses what it does not know.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from .ptx_sim import capture_cute

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results" / "sm100_resources.jsonl"
ARCHITECTURES = ("sm_100a", "sm_103a")
DTYPES = ("bfloat16", "float16")
KINDS = {
    "Plan": "forward",
    "BackwardPlan": "backward",
    "RowPlan": "row values",
    "SumPlan": "ordered sum",
    "ListPlan": "union lists",
    "SamplePlan": "union samples",
}


def plans() -> Iterator[object]:
    """Every plan that the launch code can ask for, for each architecture."""
    from cute_sparse_mla.sm100.backward_plan import BackwardPlan, RowPlan, SumPlan
    from cute_sparse_mla.sm100.heads import rows_for
    from cute_sparse_mla.sm100.launch import list_plan_of
    from cute_sparse_mla.sm100.list_plan import SamplePlan
    from cute_sparse_mla.sm100.plan import Plan

    from cute_sparse_mla.union_lists import SAMPLE_THREADS, TOKENS_PER_TILE, union_plans

    for arch, dtype in itertools.product(ARCHITECTURES, DTYPES):
        yield RowPlan(dtype, arch)
    for arch, D in itertools.product(ARCHITECTURES, (512, 576)):
        yield SumPlan(D, arch)
    for arch, tokens, index in itertools.product(ARCHITECTURES, TOKENS_PER_TILE[1:], (torch.int32, torch.int64)):
        made = union_plans(tokens, index)
        yield from (list_plan_of(plan, arch) for plan in made)
        yield list_plan_of(replace(made[0], width=tokens, threads=SAMPLE_THREADS), arch, SamplePlan)
    kinds = (Plan, BackwardPlan, partial(BackwardPlan, ordered=True))
    for kind, arch, D, dtype in itertools.product(kinds, ARCHITECTURES, (512, 576), DTYPES):
        for tokens, rows in itertools.product(TOKENS_PER_TILE, (64, 128)):
            for index in ("int32", "int64") if tokens == 1 else ("int32",):
                yield kind(D, dtype, index, rows_for(rows // tokens, tokens), arch)


def name(plan: object) -> str:
    """A row's name in the results."""
    kind = KINDS[type(plan).__name__]
    if hasattr(plan, "tokens"):
        return f"{kind} {plan.arch} {plan.index_dtype} {plan.tokens} tokens, {plan.width} bits in {plan.size} bytes"
    if not hasattr(plan, "rows"):
        return f"{kind} {plan.arch} " + (f"D{plan.D}" if hasattr(plan, "D") else plan.dtype)
    rows = f"{plan.rows.tokens} x {plan.rows.padded_heads} rows"
    ordered = "ordered " if getattr(plan, "ordered", False) else ""
    return f"{ordered}{kind} {plan.arch} D{plan.D} {plan.dtype} {plan.index_dtype} {rows}"


def assemble(ptx: str, arch: str) -> dict[str, object]:
    """What `ptxas -v` says about a module of one kernel."""
    release = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.search(r"release (\d+)\.(\d+)", release).groups()
    # PTX ISA 9.x comes with CUDA 13.x.
    own = (int(major) - 4, int(minor))
    asked = tuple(map(int, re.search(r"^\.version (\d+)\.(\d+)", ptx, re.M).groups()))
    ptx = re.sub(r"^\.version .*", f".version {min(own, asked)[0]}.{min(own, asked)[1]}", ptx, count=1, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        run = subprocess.run(
            ["ptxas", "-v", f"-arch={arch}", str(source), "-o", str(source.with_suffix(".cubin"))],
            capture_output=True, text=True,
        )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"ptxas refuses the kernel: {run.stderr}")
    stack, stores, loads = map(int, re.search(r"(\d+) bytes stack.*?(\d+) bytes.*?(\d+) bytes", run.stderr).groups())
    registers = int(re.search(r"Used (\d+) registers", run.stderr)[1])
    return {
        "registers": registers, "stack": stack, "spill_stores": stores, "spill_loads": loads,
        "ptxas": f"{major}.{minor}",
    }  # fmt: skip


def measure(plan: object) -> dict[str, object]:
    """One row of the results."""
    from cute_sparse_mla.sm100 import build

    with capture_cute.architecture(plan.arch):
        ptx = build.compile_plan(plan).__ptx__.rstrip("\0")
    found = assemble(ptx, plan.arch)
    return {
        "kernel": name(plan),
        **found,
        "shared_memory": getattr(plan, "smem_bytes", 0),
        "ptx_lines": ptx.count("\n"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.sm100_resources")
    parser.add_argument("--only", default="", help="kernels whose name contains this, and those without a row")
    args = parser.parse_args()
    if shutil.which("ptxas") is None:
        raise SystemExit("needs ptxas on the PATH")
    capture_cute.prepare()
    known = {row["kernel"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
    wanted = {name(plan): plan for plan in plans()}
    for kernel, plan in wanted.items():
        if args.only in kernel or kernel not in known:
            known[kernel] = measure(plan)
            print(known[kernel], flush=True)
            rows = (known[other] for other in wanted if other in known)
            RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
