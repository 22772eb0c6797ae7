"""Installs of the package with each extra and beside its neighbours: `python -m tests.install_matrix [--out FILE]`.

Every combination gets a fresh virtual environment, whatever versions pip resolves there (torch pinned by a constraints
file), `pip check`, and a look from inside: imports in both orders, the reference forward and backward, what `explain`
answers for either architecture, and a kernel compiled where a kernel package is installed. One JSON line each; exit
code 1 when a combination failed. A combination takes two or three minutes, and a gigabyte that is given back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import append_jsonl
from cute_sparse_mla import arguments

ROOT = Path(__file__).resolve().parents[1]
CUDNN, QUACK = "nvidia-cudnn-frontend", "quack-kernels"
# Name: (extras of this package, neighbours).
COMBINATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": ((), ()),
    "hopper": (("hopper",), ()),
    "blackwell": (("blackwell",), ()),
    "hopper beside cudnn": (("hopper",), (CUDNN,)),
    # quack imports triton, which comes with torch only where torch is built for CUDA.
    "blackwell beside quack": (("blackwell",), (QUACK, "triton")),
    "everything": (("hopper", "blackwell", "cudnn"), (QUACK, "triton")),
}
MODULES = {
    "hopper": "tilelang",
    "blackwell": "cutlass",
    "cudnn": "cudnn",
    CUDNN: "cudnn",
    QUACK: "quack",
    "triton": "triton",
}
# Runs in the new environment; the last line it prints is the JSON answer.
PROBE = """
import importlib, importlib.metadata, json, sys
first, modules = sys.argv[1] == "first", sys.argv[2:]
def neighbours():
    for name in modules:
        importlib.import_module(name)
if not first:
    neighbours()
import torch, cute_sparse_mla
from cute_sparse_mla import env
q, kv = torch.randn(2, 16, 576).bfloat16().requires_grad_(), torch.randn(9, 1, 576).bfloat16().requires_grad_()
rows = torch.tensor([[0, 3, -1], [8, 8, 2]], dtype=torch.int32)
out = cute_sparse_mla.sparse_mla(q, kv, rows)
out.sum().backward()
assert out.isfinite().all() and q.grad.isfinite().all() and kv.grad.abs().sum() > 0
if first:
    neighbours()
answers = {}
for capability, package, extra in (((9, 0), "tilelang", "hopper"), ((10, 0), "cutlass", "blackwell")):
    answer = cute_sparse_mla.explain(q, kv, rows, capability=capability)
    answers[extra] = "ok" if answer.ok else answer.reason
    present = env.is_installed(package)
    assert answer.ok == present, answer.reason
    assert present or f"pip install 'cute_sparse_mla[{extra}]'" in answer.reason, answer.reason
compiled = []
if first and env.is_installed("tilelang"):
    from cute_sparse_mla.hopper import build
    from cute_sparse_mla.hopper.plan import Plan
    build.kernel("postprocess", Plan(576, "bfloat16", "int32"))
    compiled.append("sm90 postprocess")
if first and env.is_installed("cutlass"):
    import cutlass
    from cutlass import cute
    @cute.kernel
    def nothing():
        pass
    @cute.jit
    def launch():
        nothing().launch(grid=(1, 1, 1), block=(32, 1, 1))
    cute.compile(launch, options="--gpu-arch sm_100a")
    compiled.append("a CuTe DSL kernel for sm_100a")
assert not torch.cuda.is_initialized()
names = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
print(json.dumps({"explain": answers, "compiled": compiled, "versions": dict(sorted(names.items()))}))
"""


def _run(
    command: Sequence[str], timeout: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=True, cwd="/", env=environment
    )


def combination(name: str, constraints: Path | None) -> dict[str, Any]:
    """Install and look at one combination: the result row."""
    extras, beside = COMBINATIONS[name]
    row: dict[str, Any] = {"combination": name, "extras": extras, "beside": beside, "ok": False}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="install_matrix_") as folder:
        python = str(Path(folder) / "bin" / "python")
        own = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        limits = ["-c", str(constraints)] if constraints else []
        modules = list(dict.fromkeys(MODULES[part] for part in (*extras, *beside)))
        # A home of its own: nothing comes from a cache of compiled kernels.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HOME": folder}
        try:
            _run([sys.executable, "-m", "venv", folder], 300)
            # numpy: torch warns at import without it.
            _run([python, "-m", "pip", "install", "-q", *limits, own, "numpy", *beside], 1800)
            row["pip check"] = _run([python, "-m", "pip", "check"], 300).stdout.strip()
            # A file: CuTe DSL reads the sources of what it compiles.
            probe = Path(folder) / "probe.py"
            probe.write_text(PROBE, encoding="utf-8")
            for order in ("first", "last"):
                said = _run([python, str(probe), order, *modules], 600, environment).stdout
                row |= {"ok": True, **({} if order == "last" else json.loads(said.splitlines()[-1]))}
        except subprocess.CalledProcessError as error:
            lines = (error.stdout + error.stderr).strip().splitlines()
            row |= {"ok": False, "error": " | ".join(lines[-3:])[:600]}
        except subprocess.TimeoutExpired as error:
            row |= {"ok": False, "error": f"no answer within {error.timeout} s"}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.install_matrix", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=COMBINATIONS, metavar="NAME", default=list(COMBINATIONS))
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints-dev.txt", help="for pip; '-' for none")
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append result rows as JSON lines")
    args = parser.parse_args()
    failed = False
    for name in args.only:
        row = combination(name, None if str(args.constraints) == "-" else args.constraints)
        failed |= not row["ok"]
        print(f"{'ok    ' if row['ok'] else 'FAILED'} {name} ({row['seconds']} s) {row.get('error', '')}", flush=True)
        if args.out:
            append_jsonl(args.out, [row])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
