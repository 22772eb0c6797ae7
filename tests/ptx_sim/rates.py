"""The one table of constants of predicted times: throughputs and latencies, each with its source.

Sources are public documents, measurements on one H200 (`H200`: plain loops, no L2 hints, rows of 1152 bytes), or a fit.
`FIT` marks what no document gives: those were chosen once so that the published GB200 forward times, or the measured
H200 forward times, come out; backward times judge them. Nothing here names a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

GUIDE = "CUDA C++ Programming Guide, throughput of native arithmetic instructions"
TUNING = "NVIDIA tuning guides for Hopper and Blackwell"
DATA_SHEET = "NVIDIA data sheet"
H200 = "measured on one H200"
PAPERS = "published microbenchmarks (arXiv 2402.13499 for Hopper, 2507.10789 and 2512.02189 for Blackwell)"
FIT = "fit on forward times"


@dataclass(frozen=True)
class Figure:
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Chip:
    """Rates of one GPU; bytes and FLOP per clock are per SM unless the name says total."""

    name: str
    figures: dict[str, Figure]
    # (footprint of the rows in MB, total TB/s) of gathers.
    gather: tuple[tuple[float, float], ...]
    # Instruction latency in clocks by class.
    latency: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def per_clock(self, total_tbps: float) -> float:
        """Bytes per clock and SM of a rate that all SMs share."""
        return total_tbps * 1e12 / (self["clock"] * 1e9 * self["sms"])

    def adds(self, footprint: float, known_hits: float = 0.0) -> float:
        """Total TB/s of fp32 additions to rows of `footprint` MB: part of them hit L2, at least `known_hits`."""
        hits = max(known_hits, min(1.0, self["adds_capacity"] / max(footprint, 1e-9)))
        return 1 / (hits / self["adds_hit"] + (1 - hits) / self["adds_miss"])

    def with_figure(self, name: str, value: float) -> Chip:
        """A copy in which one figure is another: what-if questions."""
        figures = dict(self.figures)
        figures[name] = replace(figures[name], value=value)
        return replace(self, figures=figures)


def interpolate(table: tuple[tuple[float, float], ...], at: float) -> float:
    """Linear in between, constant outside."""
    if at <= table[0][0]:
        return table[0][1]
    for (x0, y0), (x1, y1) in pairwise(table):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return table[-1][1]


# Pipe occupancy of one warp instruction on a quarter SM, in clocks (32 lanes over the lanes per clock and quarter).
OCCUPANCY = {
    "fp32": Figure(1, "clk", GUIDE + ": 128 lanes"),
    "fp32x2": Figure(2, "clk", GUIDE + ": 128 lanes, two elements each"),
    "integer": Figure(2, "clk", GUIDE + ": 64 lanes"),
    "multiply": Figure(2, "clk", GUIDE + ": 64 lanes"),
    "convert": Figure(2, "clk", GUIDE + ": 64 lanes"),
    "special": Figure(8, "clk", GUIDE + ": 16 lanes"),
    "shuffle": Figure(4, "clk", GUIDE + ": 32 lanes"),
    "half": Figure(1, "clk", GUIDE + ": 128 lanes of two"),
    "double": Figure(16, "clk", GUIDE + ": 64 lanes; 16 clocks stands for both chips"),
}

# Clocks from issue to a usable result, by instruction class.
LATENCY = {
    "fp32": Figure(4, "clk", PAPERS),
    "fp32x2": Figure(4, "clk", "as fp32"),
    "half": Figure(4, "clk", "as fp32"),
    "integer": Figure(4.5, "clk", PAPERS + ": 4 or 5"),
    "multiply": Figure(4.5, "clk", PAPERS + ": 4 or 5"),
    "convert": Figure(6, "clk", PAPERS),
    "special": Figure(18, "clk", PAPERS),
    "shuffle": Figure(23, "clk", PAPERS),
    "double": Figure(16, "clk", PAPERS),
    "predicate": Figure(6, "clk", "an integer instruction, and more for its use in a branch"),
    "shared": Figure(29, "clk", PAPERS),
}


def _common() -> dict[str, Figure]:
    return {
        "issue": Figure(1, "warp instr/clk/quarter", TUNING),
        "shared": Figure(128, "B/clk", TUNING),
        "sm_read_limit": Figure(64, "B/clk", PAPERS),
        "l1_latency": Figure(39, "clk", PAPERS),
        "barrier": Figure(20, "clk", PAPERS + "; bar.sync of few warps"),
        "wake": Figure(20, "clk", PAPERS + "; a try_wait that succeeds after its phase ended"),
        "proxy_fence": Figure(25, "clk", FIT),
        "remote": Figure(180, "clk", PAPERS + "; distributed shared memory"),
        "remote_bytes": Figure(32, "B/clk", PAPERS + "; distributed shared memory"),
        "reduce_queue": Figure(400, "clk", FIT + ": additions, or stores to another CTA, on their way"),
        "port_turn": Figure(40, "clk", FIT + ": the longest wait of a warp behind copies and matrix operands"),
        "threads": Figure(2048, "an SM", GUIDE),
        "ctas": Figure(32, "an SM", GUIDE),
        "shared_bytes": Figure(228 * 1024, "B an SM", GUIDE),
        "cta_shared_bytes": Figure(1024, "B a CTA, reserved", GUIDE),
        "launch": Figure(3.0, "us", "usual time of a dependent launch in a stream"),
    }


GB200 = Chip(
    "GB200",
    _common()
    | {
        "clock": Figure(1.87, "GHz", "between 1.85 and 1.9 under load"),
        "sms": Figure(148, "SMs", DATA_SHEET),
        "matrix": Figure(8192, "FLOP/clk", DATA_SHEET + ": 2.25 PFLOP/s dense bf16"),
        "matrix_half_rows": Figure(0.5, "of the full rate", "M 64 of one CTA uses 64 of 128 lanes (PTX ISA, layout F)"),
        "matrix_ws": Figure(1, "of the full rate", FIT + ": all 128 lanes (PTX ISA, layout E)"),
        "matrix_latency": Figure(60, "clk", FIT),
        "commit": Figure(60, "clk", FIT),
        "tmem_read": Figure(128, "B/clk/quarter", PAPERS),
        "tmem_write": Figure(128, "B/clk/quarter", PAPERS),
        "tmem_latency": Figure(25, "clk", PAPERS),
        "l2_latency": Figure(300, "clk", PAPERS),
        "tma_latency": Figure(450, "clk", FIT),
        "tma_request": Figure(2, "clk/row", FIT),
        "tma_instruction": Figure(4, "clk", FIT + "; gather4 moves at least 40 B/clk in public kernels"),
        "reduce_limit": Figure(32, "B/clk", FIT),
        "write_limit": Figure(32, "B/clk", PAPERS),
        "dram": Figure(7.2, "TB/s", DATA_SHEET + ": 8 TB/s, nine tenths of it reached"),
        "adds_hit": Figure(4.6, "TB/s", "H200's, per clock and SM"),
        "adds_miss": Figure(2.3, "TB/s", "H200's, in proportion to DRAM rates"),
        "adds_capacity": Figure(96, "MB", "H200's, in proportion to L2 sizes of 126 and 50 MB"),
        "cta_start": Figure(500, "clk", FIT),
    },
    # FIT for the level; its fall with the footprint is H200's, footprints in proportion to the L2 sizes.
    gather=((24, 11.5), (95, 9.6), (380, 8.1)),
    latency={kind: figure.value for kind, figure in LATENCY.items()},
)

H200_CHIP = Chip(
    "H200",
    _common()
    | {
        "clock": Figure(1.755, "GHz", "between 1.7 and 1.98; matrix rate of 770 to 800 TFLOP/s in 8192^3"),
        "sms": Figure(132, "SMs", DATA_SHEET),
        "matrix": Figure(4096, "FLOP/clk", DATA_SHEET + ": 989 TFLOP/s dense bf16"),
        "matrix_half_rows": Figure(1, "of the full rate", "wgmma has M 64 only"),
        "matrix_ws": Figure(1, "of the full rate", "no such form"),
        "matrix_latency": Figure(32, "clk", PAPERS),
        "commit": Figure(0, "clk", "wgmma completes in order"),
        "tmem_read": Figure(128, "B/clk/quarter", "no tensor memory"),
        "tmem_write": Figure(128, "B/clk/quarter", "no tensor memory"),
        "tmem_latency": Figure(0, "clk", "no tensor memory"),
        "l2_latency": Figure(270, "clk", PAPERS),
        "tma_latency": Figure(600, "clk", PAPERS),
        "tma_request": Figure(2, "clk/row", FIT),
        "tma_instruction": Figure(50, "clk", H200 + ": boxes of one row by 64 columns"),
        "reduce_limit": Figure(32, "B/clk", FIT),
        "write_limit": Figure(32, "B/clk", PAPERS),
        "dram": Figure(4.3, "TB/s", DATA_SHEET + ": 4.8 TB/s, nine tenths of it reached"),
        "adds_hit": Figure(3.84, "TB/s", H200 + ": red.global.add.v4.f32, 4k and 16k rows of 2304 bytes"),
        "adds_miss": Figure(1.39, "TB/s", H200 + ": what 1.67 at 64k and 1.5 at 128k random rows leave for misses"),
        "adds_capacity": Figure(38, "MB", H200 + ": 16k rows still hit"),
        "cta_start": Figure(500, "clk", FIT),
    },
    # FIT for the level: the middle of the project's forwards of 8, 64 and 128 heads (the first take 11 to 16 % less for
    # the same predicted time, probably at higher clocks). On average over its run, prologue and last round included,
    # that of 8 heads gathers rows of 1152 bytes at 6.1 and 4.6 TB/s from 8k and 128k rows. The fall is H200: a forward
    # by others gathers at 5.4, 4.5 and 3.8 TB/s from 8k, 32k and 128k rows; the first entry is 4k rows.
    gather=((4.7, 7.5), (9.4, 7.1), (37.7, 6.0), (151, 5.1)),
    latency={kind: figure.value for kind, figure in LATENCY.items()},
)

CHIPS = {"GB200": GB200, "H200": H200_CHIP}


def chip_of(target: str) -> Chip:
    """The chip whose kernels a PTX target names."""
    return GB200 if target.startswith("sm_10") else H200_CHIP
