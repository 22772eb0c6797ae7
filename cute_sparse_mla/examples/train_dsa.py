"""A small language model with DSA attention (DeepSeek-V3.2) trained on text, beside its dense twin.

    python -m cute_sparse_mla.examples.train_dsa                  # about a minute on a CPU; unchanged on a GPU
    python -m cute_sparse_mla.examples.train_dsa --steps 1000 --context 512 --topk 64

Each layer projects tokens to a latent row (512 wide, plus 64 rotary columns) that all heads share; a lightning indexer
scores the earlier rows and the layer attends to the best `topk` of them. The dense twin attends to all. Queries are
multiplied into the latent space and results out of it ("absorbed" projections), as the package's kernels expect. The
indexer learns from its own loss only: the divergence of its distribution over the selected rows from the attention's.
The sparse model starts with dense attention while its indexer warms up, then selects.

The text is Python's own documentation (`pydoc_data`), byte by byte; nothing is downloaded. Loss curves go to an SVG.
Sources: DeepSeek-V2 (latent attention), DeepSeek-V3.2 (lightning indexer and its loss).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cute_sparse_mla
from cute_sparse_mla import arguments, charts, indices
from cute_sparse_mla.problem import MAX_HEADS_PER_GROUP

LATENT, ROPE = 512, 64  # the kernels' D = 576 and d_v = 512
VOCABULARY = 256  # bytes
# The dense twin holds all scores of a step: bounds, so that what does not fit is said before anything is trained.
MOST_TOKENS, MOST_SCORES = 1 << 16, 1 << 28

HELP = {
    "steps": "training steps of each model",
    "warmup": "of them, those in which the sparse model attends densely",
    "batch": "documents of a step",
    "context": "tokens of a document",
    "topk": "rows that a token selects",
    "layers": "layers of each model",
    "heads": "attention heads of a layer",
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training; the sparse model attends densely in the first `warmup` steps."""

    steps: int = 300
    warmup: int = 60
    batch: int = 2
    context: int = 128
    topk: int = 16
    width: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    index_heads: int = 4
    index_dim: int = 32
    learning_rate: float = 2e-3
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step: `batch` documents of `context` tokens, packed."""
        return self.batch * self.context


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: `x [T, ..., d]`, pairs are the halves of the last axis."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (positions[:, None] * frequency).view(len(x), *[1] * (x.dim() - 2), half)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).to(x.dtype)


class Indexer(nn.Module):
    """Lightning indexer: `score[t, s] = sum_h weights[t, h] relu(iq[t, h] . ik[s])`. Its input gets no gradient."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.shape = (s.index_heads, s.index_dim)
        self.queries = nn.Linear(s.width, s.index_heads * s.index_dim, bias=False)
        self.keys = nn.Linear(s.width, s.index_dim, bias=False)
        self.weights = nn.Linear(s.width, s.index_heads, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(iq [T, H_i, d], ik [T, d], weights [T, H_i])` of `x [T, width]`."""
        x = x.detach()
        iq = rotated(self.queries(x).unflatten(-1, self.shape), positions)
        return iq, rotated(self.keys(x), positions), self.weights(x) * (self.shape[0] * self.shape[1]) ** -0.5


class Attention(nn.Module):
    """Latent attention over all earlier rows of a document, or over the `topk` that the indexer selects."""

    def __init__(self, s: Settings, sparse: bool) -> None:
        super().__init__()
        self.s, self.sparse, self.selects = s, sparse, sparse
        self.query = nn.Linear(s.width, s.heads * (s.head_dim + ROPE), bias=False)
        self.latent = nn.Linear(s.width, LATENT, bias=False)
        self.norm = nn.RMSNorm(LATENT)
        self.key_rope = nn.Linear(s.width, ROPE, bias=False)
        self.up_key = nn.Parameter(torch.randn(s.heads, s.head_dim, LATENT) * LATENT**-0.5)
        self.up_value = nn.Parameter(torch.randn(s.heads, LATENT, s.head_dim) * LATENT**-0.5)
        self.output = nn.Linear(s.heads * s.head_dim, s.width, bias=False)
        self.indexer = Indexer(s) if sparse else None
        self.index_loss: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`x [T, width]`; `positions [T]` in the documents; sets `index_loss`, which reaches the indexer only."""
        s = self.s
        query = self.query(x).unflatten(-1, (s.heads, s.head_dim + ROPE))
        nope, rope = query.split([s.head_dim, ROPE], dim=-1)
        absorbed = torch.einsum("thd,hdc->thc", nope, self.up_key)
        q = torch.cat([absorbed, rotated(rope, positions)], dim=-1).bfloat16()
        kv = torch.cat([self.norm(self.latent(x)), rotated(self.key_rope(x), positions)], dim=-1).bfloat16()
        scale = (s.head_dim + ROPE) ** -0.5
        rows = None
        if self.indexer is not None:
            indexer = self.indexer(x, positions)
            if self.selects:
                iq, ik, weights = (t.detach() for t in indexer)
                rows = indices.select_topk(iq, ik, weights, s.topk, cu_seqlens)
            self.index_loss = self._divergence(q.detach(), kv.detach(), indexer, rows, scale)
        if rows is None:
            p = self._scores(q, kv, scale).softmax(-1)
            out = torch.einsum("bths,bsc->bthc", p, kv[:, :LATENT].float().unflatten(0, self.documents)).flatten(0, 1)
        else:
            out = cute_sparse_mla.sparse_mla(q, kv[:, None], rows, sm_scale=scale, causal=True)  # type: ignore
        heads = torch.einsum("thc,hcd->thd", out.float(), self.up_value)
        return self.output(heads.flatten(1))

    @property
    def documents(self) -> tuple[int, int]:
        """Packed tokens as documents of equal length."""
        return self.s.batch, self.s.context

    def _scores(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        """All scores in fp32, `[batch, t, heads, s]`, -inf for later rows: contexts are short here."""
        q, kv = (t.float().unflatten(0, self.documents) for t in (q, kv))
        scores = torch.einsum("bthc,bsc->bths", q, kv) * scale
        later = torch.ones(2 * self.documents[1:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later[:, None], -math.inf)

    def _divergence(
        self, q: Tensor, kv: Tensor, indexer: tuple[Tensor, Tensor, Tensor], rows: Tensor | None, scale: float
    ) -> Tensor:
        """KL of the indexer's softmax from the mean of the heads', over the selected rows or over all."""
        scores = self._scores(q, kv, scale)
        iq, ik, weights = (t.unflatten(0, self.documents) for t in indexer)
        own = torch.einsum("bths,bth->bts", torch.einsum("bthd,bsd->bths", iq, ik).relu(), weights)
        own = own.masked_fill(scores[:, :, 0].isinf(), -1e9)
        if rows is not None:
            local = torch.where(rows < 0, 0, rows % self.s.context).long().unflatten(0, self.documents)
            empty = (rows < 0).unflatten(0, self.documents)
            scores = scores.gather(-1, local[:, :, None].expand(-1, -1, self.s.heads, -1))
            scores = scores.masked_fill(empty[:, :, None], -math.inf)
            own = own.gather(-1, local).masked_fill(empty, -1e9)
        return F.kl_div(own.log_softmax(-1), scores.softmax(-1).mean(2), reduction="sum") / len(q)


class Model(nn.Module):
    """Embedding, `layers` blocks of attention and MLP, a head over bytes."""

    def __init__(self, s: Settings, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, s.width)
        self.attention = nn.ModuleList(Attention(s, sparse) for _ in range(s.layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(s.width, 4 * s.width), nn.GELU(), nn.Linear(4 * s.width, s.width))
            for _ in range(s.layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(s.width) for _ in range(2 * s.layers + 1))
        self.head = nn.Linear(s.width, VOCABULARY, bias=False)

    def attentions(self) -> list[Attention]:
        """The attention layers."""
        return [layer for layer in self.attention if isinstance(layer, Attention)]

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits `[T, 256]` of packed `tokens [T]`."""
        x = self.embedding(tokens)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x), positions, cu_seqlens)
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def text(device: torch.device) -> Tensor:
    """Python's documentation as bytes, int64."""
    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(joined, "utf-8"), dtype=torch.uint8).long().to(device)


def train(s: Settings, sparse: bool, device: torch.device) -> tuple[list[float], list[float]]:
    """`(losses, index losses)` of every step, in nats per byte and per token, for the seed's batches and weights."""
    torch.manual_seed(s.seed)
    model = Model(s, sparse=False).to(device)
    if sparse:
        # The dense twin's weights, and indexers of its own.
        sparse_model = Model(s, sparse=True).to(device)
        sparse_model.load_state_dict(model.state_dict(), strict=False)
        model = sparse_model
    data, gen = text(device), torch.Generator().manual_seed(s.seed)
    positions = torch.arange(s.context, device=device).repeat(s.batch)
    cu_seqlens = torch.arange(0, s.tokens + 1, s.context, dtype=torch.int32, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), s.learning_rate, betas=(0.9, 0.95))
    # A rise of a step at least: one of no length divides by zero.
    rise = max(0.1, 1.5 / max(s.steps, 2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, s.learning_rate, s.steps, pct_start=rise)
    losses, index_losses = [], []
    for step in range(s.steps):
        for layer in model.attentions():
            layer.selects = sparse and step >= s.warmup
        starts = torch.randint(len(data) - s.context - 1, (s.batch, 1), generator=gen).to(device)
        window = data[starts + torch.arange(s.context + 1, device=device)]
        logits = model(window[:, :-1].flatten(), positions, cu_seqlens)
        loss = F.cross_entropy(logits, window[:, 1:].flatten())
        index_loss = torch.zeros((), device=device)
        for layer in model.attentions():
            if layer.index_loss is not None:
                index_loss = index_loss + layer.index_loss
        optimizer.zero_grad()
        (loss + index_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        index_losses.append(index_loss.detach())
    return torch.stack(losses).tolist(), torch.stack(index_losses).tolist()


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the start's bias."""
    result, average = [], 0.0
    for step, value in enumerate(values, 1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**step))
    return result


def curves_svg(curves: dict[str, Sequence[float]], title: str) -> str:
    """A picture of loss curves, each smoothed over its pale raw values."""
    lines = []
    for (name, values), colour in zip(curves.items(), charts.PALETTE, strict=False):
        mean = smoothed(values)
        lines.append(charts.Line(list(enumerate(values, 1)), colour=colour, faint=True))
        lines.append(charts.Line(list(enumerate(mean, 1)), f"{name}: {mean[-1]:.2f}", colour))
    return charts.picture((title, lines, charts.Axis("step", low=0), charts.Axis("nats per byte")))


def unusable(s: Settings) -> str:
    """Why a training with these settings cannot run or shows nothing, or an empty string."""
    if s.steps <= s.warmup:
        return f"--steps must be more than --warmup, or no row is ever selected: got {s.steps} and {s.warmup}"
    if s.context < 2:
        return f"--context must be at least 2, or there is no earlier row to select: got {s.context}"
    if s.topk > s.context:
        return f"--topk must be at most --context: got {s.topk} and {s.context}"
    if s.tokens > MOST_TOKENS:
        return f"--batch times --context must be at most {MOST_TOKENS} tokens: got {s.batch} x {s.context}"
    scores = s.layers * s.heads * s.tokens * s.context
    if scores > MOST_SCORES:
        rule = f"--layers x --heads x --batch x --context^2 must be at most {MOST_SCORES}, scores of the dense twin"
        return f"{rule}: got {scores}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Train both models, print a line for each, write the picture."""
    s = Settings()
    parser = argparse.ArgumentParser(prog="train_dsa", description="Train a small DSA model beside its dense twin.")
    most = dict(layers=64, heads=MAX_HEADS_PER_GROUP)
    for name, what in HELP.items():
        kind = arguments.count_to(most[name]) if name in most else arguments.count
        parser.add_argument(f"--{name}", type=kind, default=getattr(s, name), help=f"{what} (default %(default)s)")
    parser.add_argument("--seed", type=arguments.seed, default=s.seed, help="of weights and text (default %(default)s)")
    parser.add_argument("--device", type=arguments.device, help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--svg", type=arguments.output_file, default="train_dsa.svg", metavar="FILE", help="picture of the loss curves"
    )
    parser.add_argument(
        "--threads", type=arguments.count_to(os.cpu_count() or 1), default=1,
        help="of a CPU (default 1: the tensors are small, and on shared cores threads wait for one another)",
    )  # fmt: skip
    given = vars(parser.parse_args(argv))
    threads, svg = given.pop("threads"), given.pop("svg")
    device = given.pop("device") or arguments.default_device()
    s = Settings(**given)
    if fault := unusable(s):
        parser.error(fault)
    torch.set_num_threads(threads)
    curves: dict[str, Sequence[float]] = {}
    for name, sparse in (("dense", False), (f"sparse, top {s.topk}", True)):
        started = time.perf_counter()
        losses, index_losses = train(s, sparse, device)
        curves[name] = losses
        extra = f", indexer {smoothed(index_losses)[-1]:.3f}" if sparse else ""
        seconds = time.perf_counter() - started
        print(
            f"{name:16s} loss {smoothed(losses)[-1]:.3f} nats per byte{extra}; {s.steps} steps in {seconds:.1f} s",
            flush=True,
        )
    title = f"Loss (nats per byte), {s.layers} layers, context {s.context}; rows selected from step {s.warmup} on"
    svg.write_text(curves_svg(curves, title), encoding="utf-8")
    print(f"curves: {svg}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
