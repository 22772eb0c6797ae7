"""Predicted times of the project's SM100 backward: `python -m tests.ptx_sim predicted-sm100-backward`.

Shapes, token counts and the rules for tiles are the forward's (`predicted_sm100.py`). The main kernel is recorded at
`SLOTS` with two and three tiles a cluster, and once with more slots: a tile of K slots is the difference of the first
two and a block for each 64 slots more. The kernel of the per-row values is predicted too; what torch does beside them
(clearing and rounding dkv, the sum of the sink's gradient) counts by its bytes, each kernel with a launch.

`deterministic_ms` is the same with `deterministic=True`: per part of the tokens its own main kernel, the kernel that
sums the terms (every row has as many) and torch's kernels that sort their rows, these by their bytes and launches.

Beside it the wheel's backward, all its launches, by the same table of constants; at 128 heads its kernels for pairs of
CTAs, compiled for two numbers of slots that it knows. FLOP are `2 T H K (3 D + 2 512)` with the real heads.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from .launch import Launch
from .predict import Footprint, Pair, TileClocks, Tiles, memory_of, predict, savings
from .predicted import ROOT, Row, predict_row
from .predicted_sm100 import D_V, ROWS, TILES, TOKENS, Shape, ctas, footprint, published, write_lines
from .published import contract_times
from .rates import GB200
from .replay import Memory
from .trace import Trace, record

OUT = ROOT / "bench" / "results" / "sm100_predicted_backward.jsonl"
WHEEL_KERNELS = "cudnn sm100 backward"
SLOTS, MORE_SLOTS, BLOCK = 320, 640, 64
# (tiles of a cluster, slots) that the main kernel is recorded with.
SIZES = ((TILES[0], SLOTS), (TILES[1], SLOTS), (TILES[0], MORE_SLOTS))
# (heads, D) -> numbers of slots for which the wheel has the same kernel.
WHEEL_SLOTS = {(128, 512): (512, 1152), (128, 576): (512, 1024)}
WHEEL_TOKENS = (64, 128)
OTHERS_GB200 = contract_times("backward", TOKENS)
TORCH_KERNELS = 3
# Of a part of a deterministic backward: 19 that find the rows of its slots, 11 of a radix sort of 64-bit keys with
# their numbers, 2 of the search for the first slot of each row.
SORT_KERNELS = 32
SORT_PASSES = 8  # each reads and writes key and number
SUM_ROWS = 32  # of the recordings of the sums


def capture(shape: Shape, tokens: int, slots: int, rows: int = ROWS, deterministic: bool = False) -> list[Launch]:
    """The launches of a call in which one cluster has a tile for each of `tokens`, not run.

    Deterministic: one part, and every row of kv stands in the same number of slots.
    """
    from . import project_sm100

    gen = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, shape.heads, shape.D, generator=gen).bfloat16()
    kv = torch.randn(rows, 1, shape.D, generator=gen).bfloat16()
    indices = torch.randint(0, rows, (tokens, 1, slots), dtype=torch.int32, generator=gen)
    if deterministic:
        indices = (torch.randperm(tokens * slots, generator=gen) % rows).to(torch.int32).view(tokens, 1, slots)
    out, lse = q[..., :D_V].contiguous(), torch.full((tokens, shape.heads), 8.0)
    sink = torch.randn(shape.heads, generator=gen) if shape.sink else None
    with project_sm100.simulated(multiprocessors=ctas(shape), run=False) as recorder:
        import cute_sparse_mla
        from cute_sparse_mla.config import SparseAttentionConfig

        alone = SparseAttentionConfig(tokens_per_tile=1)
        cute_sparse_mla.bwd(
            q, kv, out, out, indices, lse, attn_sink=sink, deterministic=deterministic, config=alone, backend="sm100"
        )
    return recorder.launches


def recorded(shape: Shape, deterministic: bool = False) -> tuple[Trace, dict[tuple[int, int], Trace]]:
    """The kernel of the row values, and the main kernel by (tiles, slots)."""
    return _recorded(replace(shape, layer="", K=0), deterministic)


@functools.cache
def _recorded(shape: Shape, deterministic: bool) -> tuple[Trace, dict[tuple[int, int], Trace]]:
    """Layers that differ in the number of slots only are recorded once."""
    found = {}
    for tiles, slots in SIZES:
        values, main, *_ = capture(shape, tiles, slots, deterministic=deterministic)
        found[tiles, slots] = record(main)
    return record(values, 1), found


@functools.cache
def clocks(
    shape: Shape, gather_mb: float, adds_mb: float, deterministic: bool = False, active: int | None = None
) -> TileClocks:
    """Of the main kernel; a step is a block."""
    _, traces = recorded(shape, deterministic)
    return tile_clocks(traces, memory_of(GB200, Footprint(gather_mb, adds_mb), active))


def tile_clocks(traces: dict[tuple[int, int], Trace], memory: Memory) -> TileClocks:
    """The same of a persistent kernel recorded in `SIZES`."""
    found = Tiles(*(traces[size] for size in SIZES), TILES[0], TILES[1] - TILES[0], (MORE_SLOTS - SLOTS) / BLOCK)
    return found.clocks(GB200, memory)


def launch_milliseconds(clocks: TileClocks, tiles: int, slots: float) -> float:
    """A launch whose longest cluster, which decides, has so many tiles of so many slots."""
    total = clocks.total(tiles, (slots - SLOTS) / BLOCK) + GB200["cta_start"]
    return total / GB200["clock"] / 1e6 + GB200["launch"] / 1e3


@functools.cache
def limits(shape: Shape, gather_mb: float, adds_mb: float) -> dict[str, float]:
    """Share of the time that each resource saves when it is twice as fast."""
    _, traces = recorded(shape)
    return savings(traces[TILES[0], MORE_SLOTS], GB200, memory_of(GB200, Footprint(gather_mb, adds_mb)))


def main_milliseconds(shape: Shape, tokens: int) -> float:
    """The main kernel."""
    tiles = math.ceil(tokens / (int(GB200["sms"]) // ctas(shape)))
    return launch_milliseconds(clocks(shape, footprint(shape, tokens), adds(shape, tokens)), tiles, shape.K)


def deterministic_milliseconds(shape: Shape, tokens: int) -> float:
    """What stands for the main kernel when `deterministic=True`: as many parts as the workspace asks for."""
    from cute_sparse_mla.sm100.launch import terms_at_a_time

    clusters = int(GB200["sms"]) // ctas(shape)
    most = min(tokens, terms_at_a_time(shape.K, shape.D, clusters))
    parts = [most] * (tokens // most) + ([tokens % most] if tokens % most else [])
    return sum(_part_milliseconds(shape, tokens, part, clusters) for part in parts)


@functools.cache
def _part_milliseconds(shape: Shape, tokens: int, tiles: int, clusters: int) -> float:
    """Main kernel, sorting and sums of a part of so many tiles."""
    active = min(tiles, clusters) * ctas(shape)
    found = clocks(shape, footprint(shape, tokens), 0.0, True, active)
    main = launch_milliseconds(found, math.ceil(tiles / clusters), shape.K)
    terms = tiles * shape.K
    sort = terms * SORT_PASSES * 2 * 16 / (GB200["dram"] * 1e9) + SORT_KERNELS * GB200["launch"] / 1e3
    return main + sort + _sum_milliseconds(shape, tokens, terms)


def _sum_milliseconds(shape: Shape, tokens: int, terms: int) -> float:
    """The kernel that adds so many terms to the rows of dkv, as many as tokens."""
    from cute_sparse_mla.sm100.backward_plan import SUM_WARPS

    few, many = (TILES[0] * slots / SUM_ROWS for slots in (SLOTS, MORE_SLOTS))
    shorter, longer = _recorded_sums(replace(shape, layer="", K=0))
    pair = Pair(shorter, longer, many - few, terms / tokens - few)
    sizes = Footprint(terms * shape.D * 4 / 1e6, 0.0)
    return predict(pair, GB200, math.ceil(tokens / SUM_WARPS), sizes, explain=False).milliseconds


@functools.cache
def _recorded_sums(shape: Shape) -> tuple[Trace, Trace]:
    """The kernel of the sums for two numbers of terms a row."""
    few, many = (
        record(capture(shape, TILES[0], slots, SUM_ROWS, deterministic=True)[-1], 1) for slots in (SLOTS, MORE_SLOTS)
    )
    return few, many


def adds(shape: Shape, tokens: int) -> float:
    """MB of the rows that are added to, as many as tokens."""
    return tokens * shape.D * 4 / 1e6


def values_milliseconds(shape: Shape, tokens: int) -> float:
    """The kernel of the row values."""
    from cute_sparse_mla.sm100.backward_plan import ROWS_PER_WARP, STATS_WARPS

    trace, _ = recorded(shape)
    number = math.ceil(tokens * shape.heads / (STATS_WARPS * ROWS_PER_WARP))
    return predict(Pair(trace, trace, 1.0, 0.0), GB200, number, explain=False).milliseconds


def torch_milliseconds(shape: Shape, tokens: int) -> float:
    """Clearing the sums of dkv, rounding them, and the sum of the sink's gradient, by their bytes."""
    kernels = TORCH_KERNELS if shape.sink else TORCH_KERNELS - 1
    size = tokens * shape.D * (4 + 4 + 2) + (tokens * shape.heads * 4 if shape.sink else 0)
    return size / (GB200["dram"] * 1e9) + kernels * GB200["launch"] / 1e3


def line(shape: Shape, tokens: int) -> dict:
    """A row of the committed file."""
    sizes = footprint(shape, tokens), adds(shape, tokens)
    saved = limits(shape, *sizes)
    parts = [f(shape, tokens) for f in (main_milliseconds, values_milliseconds, torch_milliseconds)]
    ms = sum(parts)
    main = clocks(shape, *sizes)
    values, traces = recorded(shape)
    return {
        "label": "predicted",
        "kernels": "project sm100 backward",
        "chip": GB200.name,
        **asdict(shape),
        "tokens": tokens,
        "rows": tokens,
        "predicted_ms": round(ms, 4),
        "main_ms": round(parts[0], 4),
        "row_values_ms": round(parts[1], 4),
        "torch_ms": round(parts[2], 4),
        "deterministic_ms": round(ms - parts[0] + deterministic_milliseconds(shape, tokens), 3),
        "tflops": round(2 * tokens * shape.heads * shape.K * (3 * shape.D + 2 * D_V) / ms / 1e9),
        "limiter": next(iter(saved)),
        "saved_if_twice_as_fast": {name: round(share, 3) for name, share in list(saved.items())[:4]},
        "ptx_sha256": [traces[TILES[0], SLOTS].launch.sha256, values.launch.sha256],
        "clocks_per_tile": round(main.of_tile((shape.K - SLOTS) / BLOCK)),
        "clocks_per_block": round(main.step),
        "wheel": _wheel(shape, tokens, ms),
        "published": published(shape, tokens, ms, WHEEL_KERNELS, OTHERS_GB200),
    }


def _wheel(shape: Shape, tokens: int, ms: float) -> dict | None:
    """The wheel's launches at the same size, predicted; `ratio` is ours over them."""
    if (shape.heads, shape.D) in WHEEL_SLOTS:
        found = wheel_pair(shape, tokens)
    elif shape.heads == 64:
        row = Row(WHEEL_KERNELS, GB200.name, tokens, tokens, shape.heads, shape.D, shape.K, math.nan, "")
        found = predict_row(row, explain=False)
    else:
        return None
    total = sum(prediction.milliseconds for prediction in found)
    return {
        "predicted_ms": round(total, 4),
        "ratio": round(ms / total, 3),
        "ptx_sha256": found[0].sha256,
    }


@functools.cache
def _wheel_traces(heads: int, D: int) -> list[tuple[Trace, Trace, tuple[int, int]]]:
    """Per launch of the wheel's kernels for pairs: the traces at both numbers of slots, and CTAs at both of tokens."""
    from . import foreign_dsa

    foreign_dsa.capture_cute.prepare()
    call: Callable = foreign_dsa.backward if D == D_V else foreign_dsa.backward_pair

    def launches(slots: int, tokens: int) -> list[Launch]:
        return call(foreign_dsa.problem(heads, D, slots, tokens, ROWS), run=False).launches

    less, more = WHEEL_SLOTS[heads, D]
    grids = [[math.prod(launch.grid) for launch in launches(less, tokens)] for tokens in WHEEL_TOKENS]
    pairs = zip(launches(less, WHEEL_TOKENS[0]), launches(more, WHEEL_TOKENS[0]), strict=True)
    traces = [(record(a, 1), record(b, 1)) for a, b in pairs]
    return [(a, b, grid) for (a, b), grid in zip(traces, zip(*grids, strict=True), strict=True)]


def wheel_pair(shape: Shape, tokens: int) -> list:
    """The wheel's launches for 128 heads, predicted."""
    less, more = WHEEL_SLOTS[shape.heads, shape.D]
    sizes = Footprint(footprint(shape, tokens), adds(shape, tokens))
    found = []
    for shorter, longer, (few, twice) in _wheel_traces(shape.heads, shape.D):
        number = math.ceil(few + (twice - few) * (tokens / WHEEL_TOKENS[0] - 1))
        pair = Pair(shorter, longer, more - less, shape.K - less)
        found.append(predict(pair, GB200, number, sizes, explain=False))
    return found


def write(args: argparse.Namespace) -> int:
    """Predict the shapes whose name contains `args.only`, print them, and replace them in the file."""
    return write_lines(args, line)
