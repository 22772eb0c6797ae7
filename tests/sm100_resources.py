"""Registers, spills and shared memory of every SM100 kernel, by ptxas: `python -m tests.sm100_resources` rewrites them.

The PTX is the one that CuTe DSL hands to its own assembler. A toolkit that is older than the DSL's gets it with the
`.version` line lowered to its own: it refuses what it does not know.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .ptx_sim import capture_cute

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results" / "sm100_resources.jsonl"
ARCHITECTURES = ("sm_100a", "sm_103a")


def plans() -> Iterator[object]:
    """Every plan that the launch code can ask for, for each architecture."""
    from cute_sparse_mla.sm100.heads import rows_for
    from cute_sparse_mla.sm100.launch import TOKENS_PER_TILE
    from cute_sparse_mla.sm100.plan import Plan

    for arch in ARCHITECTURES:
        for D in (512, 576):
            for dtype in ("bfloat16", "float16"):
                for tokens in TOKENS_PER_TILE:
                    for rows in (64, 128):
                        for index in ("int32", "int64") if tokens == 1 else ("int32",):
                            yield Plan(D, dtype, index, rows_for(rows // tokens, tokens), arch)


def name(plan: object) -> str:
    """A row's name in the results."""
    rows = plan.rows
    return f"{plan.arch} D{plan.D} {plan.dtype} {plan.index_dtype} {rows.tokens} x {rows.padded_heads} rows"


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
    return {"kernel": name(plan), **found, "shared_memory": plan.smem_bytes, "ptx_lines": ptx.count("\n")}


def main() -> None:
    if shutil.which("ptxas") is None:
        raise SystemExit("needs ptxas on the PATH")
    capture_cute.prepare()
    with RESULTS.open("w") as file:
        for plan in plans():
            row = measure(plan)
            print(row)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
