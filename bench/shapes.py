"""What is measured: layer shapes, and their inputs on random causal rows, shared or not, or on rows of real text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_sparse_mla import indices as index_tools
from cute_sparse_mla.errors import ArgumentValueError
from cute_sparse_mla.models import MODELS, ModelShape
from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.problem import Problem, default_d_v, default_scale
from cute_sparse_mla.text_rows import Indexer, text_rows

# `poolM`: neighbouring tokens choose from a pool of M K rows, so that M bounds how little they share.
POOLS = {f"pool{share:g}": share for share in (1.25, 1.5, 2, 3, 4, 8)}
POOL_TOKENS = 64
ROWS = ("random", "text", *POOLS)
TP_DEGREES = (1, 2, 4, 8)
# Random keys of one chunk of tokens against all rows; enough to fill a GPU, small beside its memory.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}

# Layers beyond `models.MODELS` that differ in what bounds the kernels. `topk=0` is a window-only layer, and a negative
# `topk` selects every compressed row: K grows with the text. Sources: the models' public configurations.
EXTRA_MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("glm5.3-flash", 64, 512, 512, 2048, 256**-0.5),
        ModelShape("glm5.3-flash-tail", 64, 576, 512, 2048, 256**-0.5),
        ModelShape("glm5.3-flash-2112", 64, 512, 512, 2112, 256**-0.5),
        ModelShape("v4.1-flash", 64, 512, 512, 512, 512**-0.5, has_sink=True, window=128, compression=1),
        ModelShape("v4-h128", 128, 512, 512, 512, 512**-0.5, has_sink=True, window=128, compression=4),
        ModelShape("v4-flash-ratio0", 64, 512, 512, 0, 512**-0.5, has_sink=True, window=128),
        ModelShape("v4-flash-ratio128", 64, 512, 512, -1, 512**-0.5, has_sink=True, window=128, compression=128),
    )
}
ALL_MODELS = {**MODELS, **EXTRA_MODELS}


@dataclass(frozen=True)
class BenchShape:
    """One packed call: T query tokens, the last of a text of `context` tokens, over `S_kv` rows of kv.

    A layer with a window holds the text's own rows first and the rows compressed `compression` to one behind them.
    `invalid` is the share of slots, spread at random, that are made -1.
    """

    name: str
    T: int
    context: int
    H: int
    D: int
    d_v: int
    K: int
    sm_scale: float
    has_sink: bool = False
    window: int = 0
    compression: int = 1
    rows: str = "random"
    tp: int = 1
    dtype: torch.dtype = torch.bfloat16
    invalid: float = 0.0

    @property
    def topk(self) -> int:
        """Slots that are selected, beside the window."""
        return self.K - self.window

    @property
    def S_kv(self) -> int:
        extra = self.context // self.compression if self.window and self.topk else 0
        return self.context + extra

    @property
    def causal(self) -> bool:
        """Whether calls pass `causal=True`: never for random rows, which are causal by construction."""
        return self.rows == "text" and not self.window

    def problem(self) -> Problem:
        """The call's facts, with the FLOP and byte counts."""
        return Problem(
            1, self.T, self.S_kv, self.H, 1, self.K, self.D, self.d_v, self.dtype, torch.int32, causal=self.causal,
            has_sink=self.has_sink, packed=True,
        )  # fmt: skip

    def __str__(self) -> str:
        text = f"{self.name} tp{self.tp}" if self.name in ALL_MODELS else self.name
        holes = f", {self.invalid:.0%} of slots invalid" if self.invalid else ""
        return f"{text}: {self.T} x {self.S_kv}, H {self.H}, D {self.D}, K {self.K}, {self.rows} rows{holes}"


def model_shape(model: ModelShape, T: int, context: int, tp: int = 1, rows: str = "random") -> BenchShape:
    """A model's layer on one rank of `tp`."""
    if model.heads % tp:
        raise ArgumentValueError("tp", f"must divide the {model.heads} heads of {model.name}", tp)
    topk = context // model.compression if model.topk < 0 else model.topk
    return BenchShape(
        model.name, T, context, model.heads // tp, model.D, model.d_v, model.window + topk, model.sm_scale,
        has_sink=model.has_sink, window=model.window, compression=model.compression, rows=rows, tp=tp,
    )  # fmt: skip


def model_shapes(
    models: Iterable[str], tokens: Iterable[tuple[int, int]], tps: Sequence[int], rows: Iterable[str]
) -> list[BenchShape]:
    """Every combination; `tokens` are pairs `(T, context)`."""
    return [
        model_shape(ALL_MODELS[name], T, context, tp, kind)
        for name in models
        for T, context in tokens
        for tp in tps
        for kind in rows
    ]


def plain_shape(text: str, rows: str = "random") -> BenchShape:
    """`T,S_kv,H,D,K`: no window, no sink, default scale."""
    try:
        T, S_kv, H, D, K = (int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentValueError("--shape", "must be T,S_kv,H,D,K", text) from None
    if min(T, S_kv, H, D, K) < 1 or S_kv < T:
        raise ArgumentValueError("--shape", "numbers must be positive, and S_kv at least T", text)
    return BenchShape("shape", T, S_kv, H, D, default_d_v(D) or D, K, default_scale(D), rows=rows)


# -- rows ----------------------------------------------------------------------------------------------------------


def random_causal_rows(
    bounds: Tensor, rows: int, K: int, generator: torch.Generator | None = None, offset: int = 0
) -> Tensor:
    """K distinct rows per token, uniform among `0..bounds[t]`, in random order; -1 padded where there are fewer.

    Args:
        bounds: `[T]` last row that each token may see; below 0 for none.
        rows: number of rows there are; `bounds` at or past it mean all of them.
        generator: on the device of `bounds`.
        offset: added to every row.

    Returns: int32 `[T, K]` on the device of `bounds`.
    """
    T, device = bounds.shape[0], bounds.device
    result = torch.full((T, K), -1, dtype=torch.int32, device=device)
    take = min(K, rows)
    number = torch.arange(rows, device=device)
    step = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"]) // max(4 * rows, 1))
    for first in range(0, T if take else 0, step):
        bound = bounds[first : first + step, None]
        # The largest of independent uniform keys are a uniform choice without repeats, in a uniform order.
        keys = torch.rand((bound.shape[0], rows), generator=generator, device=device)
        best = keys.masked_fill_(number > bound, -1.0).topk(take, dim=-1)
        result[first : first + step, :take] = (best.indices.int() + offset).masked_fill_(best.values < 0, -1)
    return result


def pooled_rows(
    bounds: Tensor, rows: int, K: int, share: float, generator: torch.Generator | None = None, offset: int = 0
) -> Tensor:
    """As `random_causal_rows`, with K rows of a pool of `share * K` that `POOL_TOKENS` neighbouring tokens have.

    `bounds` must rise; a pool lies below the bound of its first token.
    """
    T, size = bounds.shape[0], min(round(share * K), rows)
    pools = random_causal_rows(bounds[::POOL_TOKENS], rows, size, generator, offset)
    result = torch.full((T, K), -1, dtype=torch.int32, device=bounds.device)
    step = POOL_TOKENS * max(1, CHUNK_BYTES.get(bounds.device.type, CHUNK_BYTES["cpu"]) // (8 * POOL_TOKENS * size + 1))
    for first in range(0, T if size else 0, step):
        pool = pools[first // POOL_TOKENS :].repeat_interleave(POOL_TOKENS, 0)[: min(step, T - first)]
        keys = torch.rand(pool.shape, generator=generator, device=bounds.device).masked_fill_(pool < 0, -1.0)
        chosen = pool.gather(1, keys.topk(min(K, size), dim=-1).indices)
        result[first : first + step, : chosen.shape[1]] = chosen
    return result


def _random_rows(shape: BenchShape, generator: torch.Generator, device: torch.device) -> Tensor:
    positions = torch.arange(shape.context - shape.T, shape.context, device=device)

    def select(bounds: Tensor, rows: int, K: int, offset: int = 0) -> Tensor:
        if shape.rows in POOLS:
            return pooled_rows(bounds, rows, K, POOLS[shape.rows], generator, offset)
        return random_causal_rows(bounds, rows, K, generator, offset)

    if not shape.window:
        return select(positions, shape.context, shape.K)
    window = index_tools.sliding_window(positions, shape.window)
    if not shape.topk:
        return window
    bounds = index_tools.compressed_positions(positions, shape.compression)
    blocks = shape.context // shape.compression
    selected = select(bounds, blocks, shape.topk, shape.context)
    return torch.cat([window, selected], dim=-1)


def unsupported_rows(shape: BenchShape, indexer: Indexer | None) -> str:
    """Why the shape's rows cannot be made, or an empty string."""
    if shape.rows != "text":
        return ""
    if indexer is None:
        return "no text rows: the indexer sample could not be loaded"
    if indexer.tokens < shape.context:
        return (
            f"the text has {indexer.tokens} tokens, {shape.context} are asked for (bench.make_rows makes longer ones)"
        )
    return ""


def draw(shape: BenchShape, device: torch.device, seed: int = 0, indexer: Indexer | None = None) -> Inputs:
    """Inputs for a shape, made on the device; text rows: the last T tokens of the text's first `context`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    positions = None
    if shape.rows == "text":
        if indexer is None:
            raise ArgumentValueError("indexer", "is needed for text rows", None)
        layer = ModelShape(
            shape.name, shape.H, shape.D, shape.d_v, shape.topk, shape.sm_scale, shape.has_sink, shape.window,
            shape.compression,
        )  # fmt: skip
        made = text_rows(indexer.first(shape.context), layer, shape.T, device)
        indices, positions = made.indices, made.q_positions
    else:
        indices = _random_rows(shape, generator, device)
    if shape.invalid:
        indices = indices.masked_fill(torch.rand(indices.shape, generator=generator, device=device) < shape.invalid, -1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

    return Inputs(
        q=normal(shape.T, shape.H, shape.D),
        kv=normal(shape.S_kv, 1, shape.D),
        indices=indices,
        dout=normal(shape.T, shape.H, shape.d_v),
        d_v=shape.d_v,
        sm_scale=shape.sm_scale,
        causal=shape.causal,
        q_positions=positions,
        attn_sink=torch.randn(shape.H, generator=generator, device=device) if shape.has_sink else None,
    )
