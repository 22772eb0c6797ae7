"""Run the project's own SM100 launches (`cute_sparse_mla.sm100`) in the simulator, on CPU tensors.

The front-end and the launch code stay as they are: a CPU is said to have compute capability 10.0, and the launch's
executor is replaced by one that records the launch through CuTe DSL's real host code and executes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from . import capture_cute
from .foreign_dsa import Problem, oracle

BACKWARD = ((64, 512), (64, 576), (24, 576), (128, 512), (128, 576))  # (heads, D)
# (heads, D, tokens per tile) of the forwards that the race commands know: one CTA, a pair, grouped tokens.
FORWARD = ((64, 512, 1), (64, 576, 1), (128, 512, 1), (128, 576, 1), (8, 576, 8))


def unavailable() -> str | None:
    """Why the project's SM100 kernels cannot run here, or None."""
    return capture_cute.available()


@contextmanager
def simulated(
    multiprocessors: int | None = None, run: bool = True, **options: object
) -> Iterator[capture_cute.Recorder]:
    """Inside, `backend="sm100"` takes CPU tensors and runs in the simulator, on so many multiprocessors.

    With `run=False` launches are only recorded.

    What `torch.empty` gives is NaN. Nothing is kept on disk: a kernel from there comes without its PTX.
    """
    capture_cute.prepare()
    from cute_sparse_mla.sm100 import cache, launch

    from cute_sparse_mla import env

    recorder = capture_cute.Recorder(run=run)
    recorder.options = options

    def execute(kernel: Callable, arguments: tuple, tensors: dict[str, torch.Tensor]) -> None:
        recorder.call(kernel, tensors, *arguments, 0)

    empty = torch.empty

    def poisoned(*size: object, **how: object) -> torch.Tensor:
        made = empty(*size, **how)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    count = launch.multiprocessors if multiprocessors is None else lambda device: multiprocessors
    with (
        mock.patch.object(env, "capability", lambda device: (10, 0)),
        mock.patch.object(launch, "executor", execute),
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(launch, "multiprocessors", count),
        mock.patch.dict(os.environ, {cache.VARIABLE: ""}),
    ):
        yield recorder


def forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    sink: torch.Tensor,
    tokens_per_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One packed call of a single group, `kv [rows, D]`, all tiles on one cluster."""
    import cute_sparse_mla
    from cute_sparse_mla.config import SparseAttentionConfig

    with simulated(multiprocessors=2 if q.shape[1] * tokens_per_tile > 64 else 1):
        return cute_sparse_mla.fwd(
            q,
            kv[:, None],
            indices,
            topk_length=lengths,
            attn_sink=sink,
            config=SparseAttentionConfig(tokens_per_tile=tokens_per_tile),
            backend="sm100",
        )


def lists(p: Problem) -> None:
    """The gather lists of such a problem for 8 tokens a tile, after a look at a sample."""
    import cute_sparse_mla

    with simulated(multiprocessors=1):
        cute_sparse_mla.plan(p.indices, p.kv[:, None].shape, 8, topk_length=p.lengths, backend="sm100")


def backward(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of such a problem, from the float64 forward's rounded out and lse, all tiles on one CTA."""
    import cute_sparse_mla
    from cute_sparse_mla.config import SparseAttentionConfig

    truth = oracle(p)
    out, lse = truth["out"].to(p.q.dtype), truth["lse"].float().contiguous()
    with simulated(multiprocessors=1):
        return cute_sparse_mla.bwd(
            p.q, p.kv[:, None], out, p.dout, p.indices, lse, topk_length=p.lengths, attn_sink=p.sink, backend="sm100",
            config=SparseAttentionConfig(tokens_per_tile=1),
        )  # fmt: skip
