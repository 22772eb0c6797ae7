"""Predicted gain of token groups on SM100, on rows of real text: `python -m tests.ptx_sim predicted-sm100-groups`.

For the layers of the text sample, forward and backward of every group size that fits a tile, beside one token a tile.
Each kernel is recorded as `predicted_sm100_backward.py` records the backward (`tile_clocks`), over lists of a chosen
length; a tile of n tokens then has the slots of the mean union of the committed text rows. Padded heads cost what real
ones do, so a kernel of so many tokens and rows stands for all heads that take it. The lists, their samples and the
kernel that ends at once because the device chose the other are predicted too, from one tile of the text rows.

`implied` is the gain that the union implies: n tokens' own slots over those of their union.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from cute_sparse_mla.indices import union_ratios
from cute_sparse_mla.models import MODELS, ModelShape
from cute_sparse_mla.text_rows import TextRows, load_indexer, text_rows

from .launch import Launch
from .predict import Footprint, Pair, TileClocks, memory_of, predict
from .predicted import ROOT
from .predicted_sm100 import D_V, ROWS, Shape
from .predicted_sm100_backward import SIZES, launch_milliseconds, tile_clocks, torch_milliseconds, values_milliseconds
from .rates import GB200
from .trace import Trace, record

OUT = ROOT / "bench" / "results" / "sm100_predicted_groups.jsonl"
QUERIES = 4096
# (layer, heads of one rank): tensor parallelism 8, 4, 2 and, of GLM-5, none. Pairs of CTAs are predicted for GLM-5.
LAYERS = (*(("glm5", heads) for heads in (8, 16, 32, 64)), *(("v4-flash", heads) for heads in (8, 16, 32)))
PAIRS = ("glm5",)
GROUPS = (2, 4, 8, 16)
CTA_ROWS, MOST_ROWS = 64, 128


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for, as far as its time goes."""

    D: int
    tokens: int
    rows: int

    @property
    def ctas(self) -> int:
        return self.rows // CTA_ROWS


def tile_of(D: int, heads: int, tokens: int) -> Tile | None:
    """The tile of so many heads and tokens; `None` where they fit none."""
    rows = next((rows for rows in (CTA_ROWS, MOST_ROWS) if heads * tokens <= rows), None)
    return None if rows is None else Tile(D, tokens, rows)


@functools.cache
def rows_of(layer: str) -> tuple[TextRows, dict[int, float]]:
    """A layer's rows of the text sample, and the unions of n neighbours over K."""
    model: ModelShape = MODELS[layer]
    rows = text_rows(load_indexer(), model, QUERIES)
    return rows, union_ratios(rows.indices, rows.S_kv, GROUPS)


def _inputs(D: int, heads: int, tokens: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(*size, generator=gen).bfloat16() for size in ((tokens, heads, D), (rows, 1, D)))
    return q, kv


def _capture(tile: Tile, backward: bool, tiles: int, slots: int) -> Launch:
    """The main launch of a call in which one cluster has so many tiles of so many slots, not run."""
    from . import project_sm100

    tokens, heads = tile.tokens * tiles, tile.rows // tile.tokens
    q, kv = _inputs(tile.D, heads, tokens)
    gen = torch.Generator().manual_seed(1)
    indices = torch.randint(0, ROWS, (tokens, 1, slots), dtype=torch.int32, generator=gen)
    options: dict[str, Any] = dict(backend="sm100", plan=None)
    with project_sm100.simulated(multiprocessors=tile.ctas, run=False) as recorder:
        import cute_sparse_mla
        from cute_sparse_mla.config import SparseAttentionConfig
        from cute_sparse_mla.groups import Lists, TokenPlan

        if tile.tokens == 1:
            options["config"] = SparseAttentionConfig(tokens_per_tile=1)
        else:
            capacity = tile.tokens * slots
            rows, bits = (
                torch.randint(low, high, (1, tiles, 1, capacity), dtype=torch.int32, generator=gen)
                for low, high in ((0, ROWS), (1, 1 << tile.tokens))
            )
            lists = Lists(rows, bits, torch.full((1, tiles, 1), slots, dtype=torch.int32), None)
            options["plan"] = TokenPlan(
                tile.tokens, (1, tokens, 1, slots), ROWS, heads, False, False, False, q.device, lists
            )
        if backward:
            out, lse = q[..., :D_V].contiguous(), torch.full((tokens, heads), 8.0)
            cute_sparse_mla.bwd(q, kv, out, out, indices, lse, **options)
        else:
            cute_sparse_mla.fwd(q, kv, indices, **options)
    return recorder.launches[-1]


@functools.cache
def _recorded(tile: Tile, backward: bool) -> dict[tuple[int, int], Trace]:
    return {size: record(_capture(tile, backward, *size)) for size in SIZES}


@functools.cache
def _clocks(tile: Tile, backward: bool, footprint: Footprint) -> TileClocks:
    return tile_clocks(_recorded(tile, backward), memory_of(GB200, footprint))


def main_milliseconds(tile: Tile, backward: bool, slots: float, S_kv: int) -> float:
    """The main kernel over `QUERIES` tokens, a tile having so many slots in the mean."""
    size = S_kv * tile.D / 1e6
    clocks = _clocks(tile, backward, Footprint(max(2 * size, GB200.gather[0][0]), 4 * size if backward else 0.0))
    tiles = math.ceil(math.ceil(QUERIES / tile.tokens) / (int(GB200["sms"]) // tile.ctas))
    # The last block of a tile is half full in the mean, unless all lists have the same length.
    return launch_milliseconds(clocks, tiles, slots if tile.tokens == 1 else slots + 32)


@functools.cache
def _extra(layer: str, tokens: int) -> tuple[float, float, float]:
    """Milliseconds of the samples, of the lists, and of the forward that ends at once, for as many heads as fit."""
    from . import project_sm100

    rows, _ = rows_of(layer)
    q, kv = _inputs(MODELS[layer].D, CTA_ROWS // tokens, tokens, rows.S_kv)
    with project_sm100.simulated(multiprocessors=1, run=False) as recorder:
        from cute_sparse_mla.sm100 import launch

        import cute_sparse_mla

        with torch.no_grad(), _group_size(launch, tokens):
            cute_sparse_mla.fwd(
                q, kv, rows.indices[-tokens:], causal=rows.causal, q_positions=rows.q_positions, backend="sm100"
            )
    samples, lists, _, alone = recorder.launches
    tiles = QUERIES // tokens
    found = []
    for launched, ctas in ((samples, launch.SAMPLES), (lists, tiles), (alone, int(GB200["sms"]))):
        trace = record(launched, 1)
        found.append(predict(Pair(trace, trace, 1.0, 0.0), GB200, ctas, explain=False).milliseconds)
    return found[0], found[1], found[2]


def _group_size(launch: Any, tokens: int) -> Any:
    from unittest import mock

    return mock.patch.object(launch, "group_size", lambda problem: tokens)


def line(layer: str, heads: int, tokens: int, tile: Tile) -> dict:
    """A row of the committed file."""
    model = MODELS[layer]
    rows, unions = rows_of(layer)
    alone = Tile(model.D, 1, CTA_ROWS)
    slots = unions[tokens] * model.K
    samples, lists, ends = _extra(layer, tokens)
    shape = Shape(layer, heads, model.D, model.K, model.has_sink)
    rest = values_milliseconds(shape, QUERIES) + torch_milliseconds(shape, QUERIES)
    parts: dict[str, dict[str, float]] = {}
    for name, backward in (("forward", False), ("backward", True)):
        single = main_milliseconds(alone, backward, model.K, rows.S_kv) + rest * backward
        planned = main_milliseconds(tile, backward, slots, rows.S_kv) + ends + rest * backward
        # Autograd hands the forward's lists to the backward.
        grouped = planned if backward else planned + samples + lists
        parts[name] = {
            "single_ms": round(single, 4), "planned_ms": round(planned, 4), "grouped_ms": round(grouped, 4),
            "gain": round(single / grouped, 3),
        }  # fmt: skip
    return {
        "label": "predicted",
        "kernels": "project sm100 token groups",
        "chip": GB200.name,
        "layer": layer,
        "heads": heads,
        "D": model.D,
        "K": model.K,
        "tokens": QUERIES,
        "rows": rows.S_kv,
        "tokens_per_tile": tokens,
        "rows_of_a_tile": tile.rows,
        "union": round(unions[tokens], 4),
        "implied": round(tokens / unions[tokens], 3),
        **parts,
        "samples_ms": round(samples, 4),
        "lists_ms": round(lists, 4),
        "ends_at_once_ms": round(ends, 4),
        "ptx_sha256": [_recorded(tile, backward)[SIZES[0]].launch.sha256 for backward in (False, True)],
    }


def describe(entry: dict) -> str:
    """One line of the table."""
    gains = ", ".join(
        f"{name} {entry[name]['single_ms']:.3f} -> {entry[name]['grouped_ms']:.3f} ms ({entry[name]['gain']:.2f})"
        for name in ("forward", "backward")
    )
    size = f"{entry['heads']:2d} heads, {entry['tokens_per_tile']:2d} tokens in {entry['rows_of_a_tile']:3d} rows"
    return f"{entry['layer']:9s} {size}: union {entry['union']:.2f} K, implied {entry['implied']:.2f}; {gains}"


def write(args: argparse.Namespace) -> int:
    """Predict the layers whose name contains `args.only`, print the rows and replace them in `args.out`."""
    known = [json.loads(text) for text in args.out.read_text().splitlines()] if args.out.exists() else []
    kept = {(row["layer"], row["heads"], row["tokens_per_tile"]): row for row in known}
    for layer, heads, tokens, tile in every_row():
        if args.only in f"{layer} {heads} heads, {tokens} tokens":
            kept[layer, heads, tokens] = line(layer, heads, tokens, tile)
            print(describe(kept[layer, heads, tokens]), flush=True)
            # Row by row: the whole takes minutes.
            rows = (kept[key[:3]] for key in every_row() if key[:3] in kept)
            args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def every_row() -> list[tuple[str, int, int, Tile]]:
    """Layer, heads, tokens and tile of every row."""
    tiles = ((layer, heads, n, tile_of(MODELS[layer].D, heads, n)) for layer, heads in LAYERS for n in GROUPS)
    return [(layer, heads, n, tile) for layer, heads, n, tile in tiles if tile and (tile.ctas == 1 or layer in PAIRS)]
