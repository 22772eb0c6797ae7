"""Where the time of the main kernels goes, from hardware counters, beside the floors.

    python -m bench.counters [--shape T,S_kv,H,D,K ...] [--pass fwd,bwd] [--out FILE]

Runs itself under `ncu` (Nsight Compute, which may need root), one launch of the main kernel per shape and pass, tokens
one by one, on random causal rows. Clocks stay as they are. A row of JSON for each; a counter that the tool does not
know is left out.

    floors   FLOP and bytes of the pass, as in `harness`, over what one H200 was measured to do (`RATES`)
    l2       sectors of 32 bytes that the L2 served, by kind of access
    stalls   warps that waited for each reason, per instruction issued
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

import cute_sparse_mla
from cute_sparse_mla import SparseAttentionConfig, arguments
from cute_sparse_mla.errors import ArgumentValueError, SparseMLAError, UnsupportedError

from . import report
from .harness import Run
from .implementations import BWD, FWD
from .shapes import BenchShape, draw, plain_shape

SHAPES = ("4096,8192,64,576,2048", "4096,8192,8,576,2048")
KERNELS = {FWD: "sparse_mla_fwd_kernel", BWD: "sparse_mla_bwd_kernel"}
# Of one H200: FLOP a second of an 8192^3 bf16 product, bytes a second of plain loops (rows of kind `floor` in
# results/hopper_h200.jsonl: 1.067 and 5.025 ms for 4096 x 2048 rows of 576).
RATES = {"matrix": 790e12, "gather": 9.06e12, "adds": 3.85e12}
SECTOR = 32
# Field of a row: metric.
TOTALS = {
    "ns": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "instructions": "sm__inst_executed.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared_conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
}
SECTORS = {kind: f"lts__t_sectors_op_{kind}.sum" for kind in ("read", "write", "red", "atom")}
PERCENT = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor_hmma": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor_gmma": "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_slots": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "lsu": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared_port": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
STALLS = {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in REASONS}
METRICS = (*TOTALS.values(), *SECTORS.values(), *PERCENT.values(), *STALLS.values())


def run_kernels(shapes: Sequence[BenchShape], passes: Sequence[str]) -> None:
    """What `ncu` watches: of every shape and pass the launches of one call, after one outside its sight."""
    config = SparseAttentionConfig(tokens_per_tile=1)
    for shape in shapes:
        i = draw(shape, torch.device("cuda"))
        given = {**i.options, "config": config}

        def fwd(i=i, given=given):  # type: ignore[no-untyped-def]
            return cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **given)

        out, lse = fwd()

        def bwd(i=i, given=given, out=out, lse=lse):  # type: ignore[no-untyped-def]
            return cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **given)

        for which in passes:
            call = {FWD: fwd, BWD: bwd}[which]
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def known_metrics(names: str) -> list[str]:
    """Those of `METRICS` whose base names stand in the tool's list."""
    listed = set(re.findall(r"^(\w+__\w+)", names, re.MULTILINE))
    return [metric for metric in METRICS if metric.partition(".")[0] in listed]


def measured(text: str) -> Iterator[dict[str, float]]:
    """The launches of the tool's CSV output, `--page raw --print-units base`: metric -> value."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise UnsupportedError(f"ncu gave no counters: {' '.join(lines[-5:])}")
    for record in csv.DictReader(lines[start:]):
        # The row below the names holds units.
        if record["ID"]:
            values = {name: record[name].replace(",", "") for name in METRICS if record.get(name)}
            yield {name: float(value) for name, value in values.items() if re.fullmatch(r"[-+.\de]+", value)}


def row_of(values: Mapping[str, float], shape: BenchShape, which: str, run: Run) -> report.Row:
    """A result row from one launch's counters."""
    problem = shape.problem()
    flops = problem.forward_flops if which == FWD else problem.backward_flops
    work = {"matrix": flops, "gather": problem.gather_bytes, "adds": problem.add_bytes if which == BWD else 0}
    totals = {name: values[metric] for name, metric in TOTALS.items() if metric in values}
    seconds = totals["ns"] / 1e9
    sectors = {kind: values[metric] * SECTOR for kind, metric in SECTORS.items() if metric in values}

    def picked(metrics: Mapping[str, str], digits: int) -> dict[str, float]:
        return {name: round(values[metric], digits) for name, metric in metrics.items() if metric in values}

    return {
        "kind": "counters", "run": run.id, "pass": which, "kernel": KERNELS[which], "T": shape.T, "S_kv": shape.S_kv,
        "H": shape.H, "D": shape.D, "K": shape.K, "rows": shape.rows, "ms": round(seconds * 1e3, 4),
        "cycles": totals.get("cycles"),
        "floors_ms": {name: round(amount / RATES[name] * 1e3, 3) for name, amount in work.items() if amount},
        "l2_gb": {kind: round(size / 1e9, 3) for kind, size in sectors.items()},
        "l2_tbps": {kind: round(size / seconds / 1e12, 3) for kind, size in sectors.items()},
        "dram_gb": {name[5:]: round(totals[name] / 1e9, 3) for name in ("dram_read", "dram_write") if name in totals},
        "percent_of_peak": picked(PERCENT, 1), "stalls": picked(STALLS, 2),
        "instructions": totals.get("instructions"), "shared_wavefronts": totals.get("shared_wavefronts"),
        "shared_conflicts": totals.get("shared_conflicts"), "device": run.device_name, "versions": run.versions,
    }  # fmt: skip


def describe(row: report.Row) -> str:
    """A row for people."""
    stalls = sorted(row["stalls"].items(), key=lambda item: -item[1])[:6]
    parts = {
        "floors ms": row["floors_ms"], "L2 TB/s": row["l2_tbps"], "DRAM GB": row["dram_gb"],
        "% of peak": row["percent_of_peak"], "stalls": dict(stalls),
    }  # fmt: skip
    texts = (f"{name}: {', '.join(f'{k} {v:g}' for k, v in part.items())}" for name, part in parts.items())
    return f"{row['pass']} H {row['H']} D {row['D']} K {row['K']}: {row['ms']} ms\n  " + "\n  ".join(texts)


def _profiled(tool: str, words: Sequence[str], launches: int) -> str:
    metrics = known_metrics(subprocess.run([tool, "--query-metrics"], capture_output=True, text=True).stdout)
    command = [
        tool, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start",
        "off", "--target-processes", "all", "--kernel-name", "regex:^sparse_mla_(fwd|bwd)_kernel$", "--launch-count",
        str(launches), "--metrics", ",".join(metrics or METRICS), sys.executable, "-m", "bench.counters", "--run-only",
        *words,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"ncu failed ({done.returncode}): {(done.stdout + done.stderr)[-600:]}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr where nothing can be measured."""
    parser = argparse.ArgumentParser(prog="bench.counters", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--shape", action="append", metavar="T,S_kv,H,D,K", help=f"default {' and '.join(SHAPES)}")
    parser.add_argument("--pass", dest="passes", default=f"{FWD},{BWD}", metavar="PASS,...", help="default fwd,bwd")
    parser.add_argument("--ncu", default="ncu", metavar="PATH", help="the tool")
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append rows as JSON lines")
    parser.add_argument("--run-only", action="store_true", help="run the kernels without the tool: what it watches")
    args = parser.parse_args(argv)
    given = args.shape or list(SHAPES)
    try:
        shapes, passes = [plain_shape(text) for text in given], args.passes.split(",")
        if not set(passes) <= set(KERNELS):
            raise ArgumentValueError("--pass", f"must be of {', '.join(KERNELS)}", args.passes)
        if not torch.cuda.is_available():
            raise UnsupportedError("hardware counters need a GPU")
        if args.run_only:
            run_kernels(shapes, passes)
            return 0
        if shutil.which(args.ncu) is None:
            raise UnsupportedError(f"no {args.ncu} here: it comes with the CUDA toolkit (Nsight Compute)")
        asked = [(shape, which) for shape in shapes for which in passes]
        options = [word for text in given for word in ("--shape", text)]
        text = _profiled(args.ncu, [*options, "--pass", args.passes], len(asked))
        run = Run(torch.device("cuda", torch.cuda.current_device()))
        rows = [row_of(values, *what, run) for values, what in zip(measured(text), asked, strict=True)]
    except SparseMLAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for row in rows:
        print(describe(row), flush=True)
    if args.out:
        report.append_jsonl(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
