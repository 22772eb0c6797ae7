"""Predicted beside published and measured times of whole calls: `python -m tests.ptx_sim predicted`.

Every kernel is captured at three small sizes (for its grid as a function of tokens and rows) and recorded with two
numbers of slots. A launch whose grid is smaller on a GPU of one multiprocessor has CTAs that go over tiles: it is
recorded there, for a CTA of several, and its grid on a GPU of many is the number of tiles. One table of constants
(`rates.py`) serves all rows. Those marked `fit` were looked at when its FIT figures were chosen: the forwards. The
backwards judge.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from .launch import Launch
from .predict import Footprint, Pair, Prediction, Tiles, predict, predict_tiles
from .published import wheel_times
from .rates import CHIPS, Chip
from .trace import record

ROOT = Path(__file__).resolve().parents[2]
MEASURED = tuple(ROOT / "bench" / "results" / name for name in ("h200.jsonl", "groups.jsonl"))
# The project's kernels as they are were measured from this run on. 64 heads fill their tile, of fewer rows are masked,
# and 128 take two.
PRESENT_KERNELS, HEADS = "20261130T222506", (8, 64, 128)
OUT = ROOT / "bench" / "results" / "predicted.jsonl"
# Small problems: tokens, rows, and the two numbers of slots that are recorded.
TOKENS, ROWS = 64, 1024
SLOTS = (512, 768)
# Multiprocessors of a GPU on which every tile of them has a CTA, and tokens for a GPU of one.
MANY, TILE_TOKENS = 1024, (2, 3)
PUBLISHED_GB200 = "published by the kernels' authors, GB200"
MEASURED_H200 = "measured on an H200"
GB200_TIMES = wheel_times()
# (kernels, heads, D, K) -> (tokens, rows, ms) on H200.
H200_TIMES = {
    ("cudnn sm90 backward", 64, 576, 2048): (
        (4096, 8192, 6.99),
        (4096, 32768, 11.4),
        (4096, 131072, 15.5),
        (16384, 16384, 27.8),
        (32768, 32768, 67.7),
    ),
    ("cudnn sm90 backward", 16, 576, 2048): ((4096, 8192, 6.26),),
    ("cudnn sm90 backward", 32, 576, 2048): ((4096, 8192, 6.36),),
    ("cudnn sm90 backward", 128, 576, 2048): ((4096, 8192, 14.05),),
    ("cudnn sm90 backward", 128, 512, 1152): ((4096, 8192, 7.61),),
    ("cudnn sm90 backward", 8, 576, 2048): ((4096, 8192, 6.19), (16384, 16384, 24.2), (4096, 131072, 15.2)),
    ("cudnn sm90 backward", 64, 512, 640): ((4096, 8192, 2.22),),
    ("cudnn sm90 backward", 8, 512, 640): ((4096, 8192, 1.89),),
}


@dataclass(frozen=True)
class Row:
    """One known time of a call."""

    kernels: str
    chip: str
    tokens: int
    rows: int
    heads: int
    D: int
    K: int
    ms: float
    source: str

    @property
    def fit(self) -> bool:
        return self.kernels.endswith("forward")


def stated() -> Iterator[Row]:
    """The times that stand above."""
    for (kernels, heads, dim, slots), times in GB200_TIMES.items():
        for tokens, ms in times:
            yield Row(kernels, "GB200", tokens, tokens, heads, dim, slots, ms, PUBLISHED_GB200)
    for (kernels, heads, dim, slots), measured in H200_TIMES.items():
        for tokens, rows, ms in measured:
            yield Row(kernels, "H200", tokens, rows, heads, dim, slots, ms, MEASURED_H200)


def known() -> Iterator[Row]:
    """Those, and the measurements of the project's own kernels."""
    yield from stated()
    measured = [json.loads(text) for path in MEASURED for text in path.read_text(encoding="utf-8").splitlines()]
    newest: dict[tuple, Row] = {}
    for row in sorted(measured, key=lambda row: row["run"]):
        if row["run"] >= PRESENT_KERNELS and row["H"] in HEADS and _single(row) and row["ms"]:
            name = {"fwd": "project sm90 forward", "bwd": "project sm90 backward"}[row["pass"]]
            sizes = (row["T"], row["S_kv"], row["H"], row["D"], row["K"])
            newest[name, sizes] = Row(name, "H200", *sizes, row["ms"], MEASURED_H200)
    yield from newest.values()


def _single(row: dict) -> bool:
    """Whether a measured row is of the project's default kernels with one token a tile and no invalid slots."""
    alone = row["impl"] == "ours:tokens_per_tile=1"
    alone |= row["impl"] == "ours" and row["config"].get("groups", "").startswith("none")
    return alone and not row.get("invalid")


def capture(
    kernels: str,
    heads: int,
    dim: int,
    slots: int,
    tokens: int,
    rows: int = ROWS,
    in_order: bool = False,
    multiprocessors: int = MANY,
) -> list[Launch]:
    """The launches of a call, not run; `in_order`: with the rows of each token in rising order first.

    Only the project's kernels ask for the number of multiprocessors.
    """
    if kernels.startswith("project"):
        from . import project_hopper

        with project_hopper.going_over_tiles(multiprocessors):
            return _capture_project(kernels, heads, dim, slots, tokens, rows, in_order)
    from . import foreign_dsa

    foreign_dsa.capture_cute.prepare()
    problem = foreign_dsa.problem(heads, dim, slots, tokens, rows)
    call = {
        "cudnn sm100 forward": foreign_dsa.forward,
        "cudnn sm100 backward": foreign_dsa.backward,
        "cudnn sm90 backward": foreign_dsa.backward_sm90,
    }[kernels]
    return call(problem, run=False).launches


def _capture_project(
    kernels: str, heads: int, dim: int, slots: int, tokens: int, rows: int, in_order: bool
) -> list[Launch]:
    from . import project_hopper

    project_hopper.capture_tilelang.prepare()
    from cute_sparse_mla.hopper import launch

    from cute_sparse_mla.config import SparseAttentionConfig
    from cute_sparse_mla.problem import Problem

    problem = Problem(1, tokens, rows, heads, 1, slots, dim, 512, torch.bfloat16, torch.int32)
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, tokens, heads, dim, generator=gen).bfloat16()
    kv = torch.randn(1, rows, 1, dim, generator=gen).bfloat16()
    indices = torch.randint(0, rows, (1, tokens, 1, slots), dtype=torch.int32, generator=gen)
    shared = {"sm_scale": dim**-0.5, "topk_length": None, "q_positions": None, "attn_sink": None}
    # A small problem's dkv fits L2.
    sorts = mock.patch.object(launch, "sorts_rows", lambda problem: in_order)
    with project_hopper.simulated(run=False) as recorder, sorts:
        if kernels.endswith("forward"):
            launch.fwd(problem, SparseAttentionConfig(tokens_per_tile=1), q, kv, indices, **shared)
        else:
            out, lse = q[..., :512].contiguous(), torch.zeros(1, tokens, heads)
            extra = {"dlse": None, "dkv": None, "dkv_dtype": None, "deterministic": False}
            launch.bwd(
                problem, SparseAttentionConfig(tokens_per_tile=1), q, kv, out, out, indices, lse, **shared, **extra
            )
    return recorder.launches


def _ctas(launch: Launch) -> int:
    return math.prod(launch.grid)


@dataclass
class Kernels:
    """The recorded launches of a call, and of each its CTAs, or tiles, at three sizes.

    `ctas`: of a launch whose CTAs go over tiles, those of a GPU of one multiprocessor.
    """

    traces: list[Pair | Tiles]
    grids: list[tuple[int, int, int]]
    ctas: list[int]

    def grid(self, number: int, tokens: int, rows: int) -> int:
        """CTAs, or tiles, of a launch at a problem size: linear in tokens and in rows."""
        base, more_tokens, more_rows = self.grids[number]
        scaled = base + (more_tokens - base) * (tokens / TOKENS - 1) + (more_rows - base) * (rows / ROWS - 1)
        return max(1, math.ceil(scaled))


@functools.lru_cache(maxsize=4)
def recorded(kernels: str, heads: int, dim: int, in_order: bool = False) -> Kernels:
    """Record the launches of a call on small problems."""

    def captured(slots: int, tokens: int, rows: int = ROWS, multiprocessors: int = MANY) -> list[Launch]:
        return capture(kernels, heads, dim, slots, tokens, rows, in_order, multiprocessors)

    steps = SLOTS[1] - SLOTS[0]
    short, long = (captured(slots, TOKENS) for slots in SLOTS)
    sizes = short, captured(SLOTS[0], 2 * TOKENS), captured(SLOTS[0], TOKENS, 2 * ROWS)
    grids = [tuple(_ctas(launch) for launch in launches) for launches in zip(*sizes, strict=True)]
    # A backward that goes over tiles begins one under the last adds of the one before. The replay hides more of it than
    # the H200 (0.80 to 0.89 of what was measured), and lists that were not made have no slots: so a tile a CTA.
    ctas = [grid[0] for grid in grids]
    if kernels.endswith("forward"):
        ctas = [_ctas(launch) for launch in captured(SLOTS[0], TOKENS, multiprocessors=1)]
    found = Kernels([], grids, ctas)
    few, more = TILE_TOKENS
    longer = ((SLOTS[0], few), (SLOTS[0], more), (SLOTS[1], few))
    alone = [captured(*size, multiprocessors=1) for size in longer] if ctas != [grid[0] for grid in grids] else []
    for number, (a, b) in enumerate(zip(short, long, strict=True)):
        if ctas[number] == grids[number][0]:
            found.traces.append(Pair(record(a, 1), record(b, 1), steps, 0.0))
            continue
        tiles, more_tiles = (found.grid(number, tokens, ROWS) // ctas[number] for tokens in TILE_TOKENS)
        traces = (record(launches[number], 1) for launches in alone)
        found.traces.append(Tiles(*traces, tiles, more_tiles - tiles, steps))
    return found


def _in_order(row: Row) -> bool:
    """Whether the call takes each token's rows in rising order."""
    if row.kernels != "project sm90 backward":
        return False
    from cute_sparse_mla.hopper import launch

    from cute_sparse_mla.problem import Problem

    return launch.sorts_rows(
        Problem(1, row.tokens, row.rows, row.heads, 1, row.K, row.D, 512, torch.bfloat16, torch.int32)
    )


def hits_in_order(row: Row, chip: Chip) -> float:
    """The share of adds that find their row of dkv in L2 where all CTAs go through the rows in rising order.

    The CTAs of a wave then add to the same part of dkv at a time, so a row misses once a wave, at random rows.
    """
    ctas = chip["sms"]
    distinct = row.rows * (1 - (1 - row.K / row.rows) ** ctas)
    return 1 - distinct / (ctas * row.K)


def predict_row(row: Row, explain: bool = True) -> list[Prediction]:
    """Predictions of the launches of a call, in order."""
    chip = CHIPS[row.chip]
    in_order = _in_order(row)
    found = recorded(row.kernels, row.heads, row.D, in_order)
    known_hits = hits_in_order(row, chip) if in_order else 0.0
    footprint = Footprint(row.rows * row.D * 2 / 1e6, row.rows * row.D * 4 / 1e6, known_hits)
    out = []
    more = row.K - SLOTS[0]
    for number, traces in enumerate(found.traces):
        grid = found.grid(number, row.tokens, row.rows)
        if isinstance(traces, Tiles):
            ctas = min(grid, int(chip["sms"]) * found.ctas[number])
            out.append(predict_tiles(replace(traces, more=more), chip, ctas, grid, footprint, explain))
        else:
            out.append(predict(replace(traces, more=more), chip, grid, footprint, explain))
    return out


def line(row: Row, predictions: list[Prediction]) -> dict:
    """A row of the committed file."""
    main = max(predictions, key=lambda p: p.milliseconds)
    total = sum(p.milliseconds for p in predictions)
    return {
        "label": "predicted",
        **asdict(row),
        "used_for_fit": row.fit,
        "predicted_ms": round(total, 3),
        "ratio": round(total / row.ms, 3),
        "limiter": main.limiter,
        "saved_if_twice_as_fast": {name: round(share, 3) for name, share in list(main.savings.items())[:4]},
        "launches": [
            {
                "kernel": p.kernel[:100],
                "ptx_sha256": p.sha256,
                "ctas": p.ctas,
                "ctas_per_sm": p.ctas_per_sm,
                "waves": p.waves,
                "tiles_per_cta": p.tiles_per_cta,
                "clocks_of_512_slots": round(p.fixed_clocks),
                "clocks_per_slot": round(p.step_clocks, 2),
                "predicted_ms": round(p.milliseconds, 3),
            }
            for p in predictions
        ],
    }


def describe(entry: dict) -> str:
    size = f"{entry['tokens']} x {entry['rows']}, H {entry['heads']}, D {entry['D']}, K {entry['K']}"
    return (
        f"{entry['kernels']:22s} {entry['chip']:5s} {size:38s} predicted {entry['predicted_ms']:8.3f} ms, known "
        f"{entry['ms']:8.3f}, ratio {entry['ratio']:.3f}{' (fit)' if entry['used_for_fit'] else ''}; "
        f"limiter: {entry['limiter']}"
    )


def committed(path: Path = OUT) -> list[dict]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def key(entry: dict) -> tuple:
    """What identifies a row, in the order of the file."""
    return tuple(entry[name] for name in ("kernels", "heads", "D", "K", "tokens", "rows"))


def write(path: Path, explain: bool = True, only: str = "") -> int:
    """Predict the known times whose row contains `only`, print them, and replace them in the file.

    Rows whose time is known no longer are dropped.
    """
    rows = sorted(known(), key=lambda r: key(asdict(r)))
    valid = {key(asdict(row)) for row in rows}
    entries = {key(entry): entry for entry in committed(path) if key(entry) in valid}
    for row in rows:
        if only in f"{row.kernels} H {row.heads} D {row.D} K {row.K}":
            entry = line(row, predict_row(row, explain))
            entries[key(entry)] = entry
            print(describe(entry), flush=True)
            # Row by row: the whole takes several minutes.
            text = "".join(json.dumps(entries[name]) + "\n" for name in sorted(entries))
            path.write_text(text, encoding="utf-8")
    return 0
