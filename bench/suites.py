"""Named suites: the shapes behind the project's tables and plots, and how each is measured.

    python -m cute_sparse_mla bench --suite v4           # the same command on an H200 and on a GB200

| suite | shapes |
|---|---|
| `v4` | the DeepSeek-V4 contract: D = d_v = 512, window 128 and a causal top-k of rows compressed 4 to 1 |
| `layers` | a layer of each model on rows of real text |
| `models` | GLM-5, GLM-5.3-Flash and DeepSeek-V4.1 at 4k to 128k tokens and 1 to 8 tensor-parallel ranks |
| `heads` | 1 to 128 heads on rows of real text, tokens alone, in groups, and with a plan |
| `overlap` | 8 to 32 heads on rows that neighbours share more or less |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .implementations import BOTH, BWD, FWD
from .shapes import ALL_MODELS, POOLS, TP_DEGREES, BenchShape, model_shape, model_shapes

SINGLE, PLANNED, PADDED = "ours:tokens_per_tile=1", "ours:plan", "ours:pad_heads=128"
V4_TOKENS = (4096, 8192, 16384)
V4_MODELS = ("v4-flash", "v4-h128", "v4-pro")  # 64 heads and K 640, 128 and 640, 128 and 1152
MODEL_TOKENS = (4096, 16384, 65536, 131072)
LONG = 32768  # tokens from which on few replays have to do: a backward takes half a second
LAYERS = (("glm5", 1), ("glm5", 8), ("v32", 1), ("v4-flash", 1), ("v4-flash", 8), ("v4-pro", 1))
HEADS = (1, 8, 16, 24, 32, 48, 64, 96, 128)
TEXT = (4096, 8192)  # queries, of the text sample's tokens


@dataclass(frozen=True)
class Part:
    """Shapes that are measured alike; `seconds` and `fewest` as in `harness.Settings`.

    Replays of a CUDA graph, or a small call would show how fast its host code is.
    """

    shapes: tuple[BenchShape, ...]
    implementations: tuple[str, ...] = ("ours",)
    passes: tuple[str, ...] = (FWD, BWD)
    graph: bool = True
    seconds: float = 0.5
    fewest: int = 20


def _v4() -> Iterator[Part]:
    for name in V4_MODELS:
        shapes = tuple(model_shape(ALL_MODELS[name], T, T) for T in V4_TOKENS)
        padded = (PADDED,) if ALL_MODELS[name].heads < 128 else ()
        yield Part(shapes, ("ours", *padded), (FWD, BWD, BOTH), seconds=0, fewest=50)


def _models() -> Iterator[Part]:
    shapes = model_shapes(
        ("glm5", "glm5.3-flash", "v4.1-flash"), [(T, T) for T in MODEL_TOKENS], TP_DEGREES, ("random",)
    )
    other_forms = ("glm5.3-flash-tail", "glm5.3-flash-2112", "v4-flash-ratio0", "v4-flash-ratio128")
    shapes += model_shapes(other_forms, [(16384, 16384)], (1, 8), ("random",))
    # Under tensor parallelism groups of tokens count, and random rows have none to share.
    shapes += model_shapes(("glm5", "glm5.3-flash", "v4.1-flash"), [(T, T) for T in MODEL_TOKENS], (8,), ("pool2",))
    yield Part(tuple(s for s in shapes if s.T < LONG), seconds=0.4, fewest=10)
    yield Part(tuple(s for s in shapes if s.T >= LONG), seconds=0.4, fewest=3)


def _layers() -> Iterator[Part]:
    yield Part(tuple(model_shape(ALL_MODELS[name], *TEXT, tp, "text") for name, tp in LAYERS), fewest=50)


def _heads() -> Iterator[Part]:
    one = model_shape(ALL_MODELS["glm5"], *TEXT, rows="text")
    few = tuple(replace(one, name="heads", H=heads) for heads in HEADS if heads <= 32)
    yield Part(few, ("ours", SINGLE, PLANNED))
    yield Part(tuple(replace(one, name="heads", H=heads) for heads in HEADS if heads > 32))


def _overlap() -> Iterator[Part]:
    one = model_shape(ALL_MODELS["glm5"], *TEXT)
    shapes = [replace(one, name="overlap", H=heads, rows=rows) for heads in (8, 16, 32) for rows in (*POOLS, "random")]
    yield Part(tuple(shapes), ("ours", SINGLE), seconds=0.25, fewest=10)


SUITES = {"v4": _v4, "layers": _layers, "models": _models, "heads": _heads, "overlap": _overlap}


def parts(suite: str) -> list[Part]:
    """The parts of a suite of `SUITES`."""
    return list(SUITES[suite]())
