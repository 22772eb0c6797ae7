"""Predicted times of the project's SM100 forward at its models' shapes: `python -m tests.ptx_sim predicted-sm100`.

Beside each: the forward of the wheel `nvidia-cudnn-frontend` for the same heads, D and K, predicted with the same table
of constants, and times that others published. The kernel is persistent: a cluster works through its tiles, one begins
while the one before ends. So it is recorded with two and with three tiles a cluster at the real K; their difference is
a tile. The longest cluster decides: its last tile is charged like any other, though some SMs are idle by then.

A query reads K random rows, all valid. FLOP are `2 T H K (D + 512)` with the real heads: padded rows are no work.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .launch import Launch
from .predict import Footprint, Pair, Prediction, memory_of, predict, savings
from .predicted import GB200_TIMES, PUBLISHED_GB200, ROOT, Row, predict_row
from .published import contract_times
from .rates import GB200
from .trace import record

OUT = ROOT / "bench" / "results" / "sm100_predicted.jsonl"
WHEEL_KERNELS = "cudnn sm100 forward"
TILES = (2, 3)
ROWS = 1024
TOKENS = (4096, 8192, 16384)
D_V = 512
OTHERS_GB200 = contract_times("forward", TOKENS)
PUBLISHED_OTHERS = "published, GB200, DeepSeek-V4 contract, tiles of 128 rows"


@dataclass(frozen=True)
class Shape:
    """A layer: heads of one rank, and whether it has a sink."""

    layer: str
    heads: int
    D: int
    K: int
    sink: bool = False

    @property
    def name(self) -> str:
        return f"{self.layer} H {self.heads} D {self.D} K {self.K}"

    @property
    def wheel(self) -> bool:
        """Whether the wheel has a forward for these heads."""
        return (self.heads, self.D) in ((64, 512), (64, 576), (128, 512))


SHAPES = (
    Shape("GLM-5", 64, 576, 2048),
    Shape("GLM-5 TP 2", 32, 576, 2048),
    Shape("GLM-5 TP 4", 16, 576, 2048),
    Shape("GLM-5 TP 8", 8, 576, 2048),
    Shape("DeepSeek-V3.2", 128, 576, 2048),
    Shape("DeepSeek-V4-Flash", 64, 512, 640, True),
    Shape("published, 128 heads", 128, 512, 640, True),
    Shape("DeepSeek-V4-Pro", 128, 512, 1152, True),
)


def capture(shape: Shape, tokens: int) -> Launch:
    """The launch of one cluster that has a tile for each of `tokens`, not run."""
    from . import project_sm100

    gen = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, shape.heads, shape.D, generator=gen).bfloat16()
    kv = torch.randn(ROWS, 1, shape.D, generator=gen).bfloat16()
    indices = torch.randint(0, ROWS, (tokens, 1, shape.K), dtype=torch.int32, generator=gen)
    sink = torch.randn(shape.heads, generator=gen) if shape.sink else None
    with project_sm100.simulated(multiprocessors=ctas(shape), run=False) as recorder:
        import cute_sparse_mla
        from cute_sparse_mla.config import SparseAttentionConfig

        alone = SparseAttentionConfig(tokens_per_tile=1)
        cute_sparse_mla.fwd(q, kv, indices, attn_sink=sink, config=alone, backend="sm100")
    (launch,) = recorder.launches
    return launch


def ctas(shape: Shape) -> int:
    """CTAs of a cluster, which hold 64 rows each."""
    return 1 if shape.heads <= 64 else 2


@functools.cache
def recorded(shape: Shape) -> Pair:
    """The launch with two and with three tiles."""
    shorter, longer = (record(capture(shape, tiles)) for tiles in TILES)
    return Pair(shorter, longer, TILES[1] - TILES[0], 0.0)


@functools.cache
def limits(shape: Shape, gather_mb: float) -> dict[str, float]:
    """Share of the time that each resource saves when it is twice as fast."""
    return savings(recorded(shape).longer, GB200, memory_of(GB200, Footprint(gather_mb)))


def footprint(shape: Shape, tokens: int) -> float:
    """MB of rows, as many as tokens; below the first entry of the table of rates they are all the same."""
    return max(tokens * shape.D * 2 / 1e6, GB200.gather[0][0])


@functools.cache
def clocks(shape: Shape, gather_mb: float) -> Prediction:
    """The launch of two tiles a cluster on the whole chip."""
    return predict(recorded(shape), GB200, int(GB200["sms"]), Footprint(gather_mb), explain=False)


def line(shape: Shape, tokens: int) -> dict:
    """A row of the committed file."""
    gather_mb = footprint(shape, tokens)
    found, saved = clocks(shape, gather_mb), limits(shape, gather_mb)
    tiles = math.ceil(tokens / (int(GB200["sms"]) // ctas(shape)))
    more = (tiles - TILES[0]) * found.step_clocks
    ms = found.milliseconds + more / GB200["clock"] / 1e6
    return {
        "label": "predicted",
        "kernels": "project sm100 forward",
        "chip": GB200.name,
        **asdict(shape),
        "tokens": tokens,
        "rows": tokens,
        "predicted_ms": round(ms, 4),
        "tflops": round(2 * tokens * shape.heads * shape.K * (shape.D + D_V) / ms / 1e9),
        "limiter": next(iter(saved)),
        "saved_if_twice_as_fast": {name: round(share, 3) for name, share in list(saved.items())[:4]},
        "ptx_sha256": found.sha256,
        "tiles_of_the_longest_cluster": tiles,
        "clocks_per_tile": round(found.step_clocks),
        "wheel": _wheel(shape, tokens, ms),
        "published": published(shape, tokens, ms, WHEEL_KERNELS, OTHERS_GB200),
    }


def _wheel(shape: Shape, tokens: int, ms: float) -> dict | None:
    """The wheel's kernel at the same size, predicted; `ratio` is ours over it."""
    if not shape.wheel:
        return None
    row = Row(WHEEL_KERNELS, GB200.name, tokens, tokens, shape.heads, shape.D, shape.K, math.nan, "")
    (found,) = predict_row(row)
    return {
        "predicted_ms": round(found.milliseconds, 4),
        "ratio": round(ms / found.milliseconds, 3),
        "limiter": found.limiter,
        "ptx_sha256": found.sha256,
    }


def published(shape: Shape, tokens: int, ms: float, kernels: str, others: dict) -> list[dict]:
    """Times that others published for this size, of the wheel's `kernels` and in `others`; `ratio` is `ms` over one."""
    found = []
    times = dict(GB200_TIMES.get((kernels, shape.heads, shape.D, shape.K), ()))
    if tokens in times:
        found.append((f"{kernels}, {PUBLISHED_GB200}", times[tokens]))
    if shape.D == D_V and (shape.heads, shape.K) in others:
        found.append((PUBLISHED_OTHERS, others[shape.heads, shape.K][TOKENS.index(tokens)]))
    return [{"source": source, "ms": known, "ratio": round(ms / known, 3)} for source, known in found]


def describe(entry: dict) -> str:
    """One line of the table."""
    size = f"{entry['tokens']:5d}, H {entry['heads']:3d}, D {entry['D']}, K {entry['K']:4d}"
    wheel = entry["wheel"]
    beside = f"wheel's {wheel['predicted_ms']:6.3f} ({wheel['ratio']:.2f})" if wheel else ""
    known = ", ".join(f"{item['ms']:.3f} ({item['ratio']:.2f})" for item in entry["published"])
    return (
        f"{entry['layer']:20s} {size}: predicted {entry['predicted_ms']:6.3f} ms, {entry['tflops']:4d} TFLOP/s, "
        f"{entry['limiter']:18s} {beside:22s} {'published ' if known else ''}{known}"
    )


def committed(path: Path = OUT) -> list[dict]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_lines(args: argparse.Namespace, line: Callable[[Shape, int], dict]) -> int:
    """Predict the shapes whose name contains `args.only` by `line`, print them, and replace them in `args.out`."""
    key = [(shape.name, tokens) for shape in SHAPES for tokens in TOKENS].index
    entries = {}
    for entry in committed(args.out):
        shape = Shape(*(entry[name] for name in ("layer", "heads", "D", "K", "sink")))
        entries[key((shape.name, entry["tokens"]))] = entry
    for shape in SHAPES:
        if args.only in shape.name:
            for tokens in TOKENS:
                entry = entries[key((shape.name, tokens))] = line(shape, tokens)
                print(describe(entry), flush=True)
                # Row by row: the whole takes minutes.
                args.out.write_text("".join(json.dumps(entries[n]) + "\n" for n in sorted(entries)), encoding="utf-8")
    return 0


def write(args: argparse.Namespace) -> int:
    """Predict the forward of the shapes whose name contains `args.only`."""
    return write_lines(args, line)
