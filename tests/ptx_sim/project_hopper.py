"""Run the project's own Hopper launches (`cute_sparse_mla.hopper`) in the simulator, on CPU tensors.

The front-end code of a launch stays as it is: only the compiled kernel that it calls is replaced by one that records
the launch through TileLang's real host code and executes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from unittest import mock

import torch

from . import capture_tilelang


def unavailable() -> str | None:
    reason = capture_tilelang.available()
    if reason is None:
        try:
            found = find_spec("cute_sparse_mla.hopper")
        except ModuleNotFoundError:
            found = None
        if found is None:
            reason = "cute_sparse_mla.hopper is not installed"
    return reason


# What a kernel writes whole; starts as NaN.
OUTPUTS = {"forward": ("Out", "Lse"), "backward": ("dQ",), "backward_pair": ("dQ",)}


class _Simulated:
    """Stands in for a compiled TileLang kernel."""

    def __init__(self, kernel: object, recorder: capture_tilelang.Recorder, outputs: tuple[str, ...]) -> None:
        self.kernel = kernel
        self.recorder = recorder
        self.outputs = outputs

    def __call__(self, *arguments: object) -> None:
        names = [str(p.name).removesuffix("_handle") for p in self.kernel.prim_func.params]
        tensors = {n: a for n, a in zip(names, arguments, strict=True) if isinstance(a, torch.Tensor)}
        values = dict(zip(names, arguments, strict=True))
        # Of two kernels among which the device chooses the second follows with wanted = 0; later tiles have launches of
        # their own.
        for name in self.outputs if values.get("wanted") != 0 and not values.get("tile_0") else ():
            tensors[name].fill_(torch.nan)
        self.recorder.call(self.kernel, tensors, *arguments)


@functools.cache
def _kernel(build: Callable[..., object], kind: str, plan: object) -> object:
    """A kernel without its cubin, so kept apart from those of `build.kernel`, which `build` is beneath its cache."""
    with capture_tilelang.without_cubin():
        return build(kind, plan)


@contextmanager
def simulated(run: bool = True, **options: object) -> Iterator[capture_tilelang.Recorder]:
    """Inside, `backend="sm90"` takes CPU tensors and runs in the simulator; with `run=False` launches are recorded."""
    capture_tilelang.prepare()
    from cute_sparse_mla.hopper import build

    from cute_sparse_mla import env

    recorder = capture_tilelang.Recorder(run=run)
    recorder.options = options
    real = build.kernel.__wrapped__

    def kernel(kind: str, plan: object) -> _Simulated:
        return _Simulated(_kernel(real, kind, plan), recorder, OUTPUTS.get(kind, ()))

    with mock.patch.object(build, "kernel", kernel), mock.patch.object(env, "capability", lambda device: (9, 0)):
        yield recorder


@dataclass
class Example:
    """One forward and backward call: inputs as the contract has them (batch of one), outputs, what was launched."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    recorder: capture_tilelang.Recorder


@contextmanager
def going_over_tiles(multiprocessors: int) -> Iterator[None]:
    """Inside, kernels run on a GPU of so few multiprocessors, each of which has one CTA for all of its whole rounds."""
    capture_tilelang.prepare()
    from cute_sparse_mla.hopper import launch

    from cute_sparse_mla import env

    few = mock.patch.object(env, "multiprocessors", lambda device: multiprocessors)
    with few, mock.patch.object(launch, "STAYING", 1.0):
        yield


def example(
    D: int, H: int, K: int, S: int = 2, deterministic: bool = False, multiprocessors: int = 132,
    bwd_cluster: int | None = None,
) -> Example:  # fmt: skip
    """Both passes in the simulator on S queries and 200 rows, with invalid slots, short rows and sinks."""
    with simulated() as recorder, going_over_tiles(multiprocessors):
        from cute_sparse_mla.hopper import launch

        from cute_sparse_mla.config import SparseAttentionConfig
        from cute_sparse_mla.problem import Problem

        gen = torch.Generator().manual_seed(D + H)
        S_kv = 200
        q = torch.randn(1, S, H, D, generator=gen).bfloat16()
        kv = torch.randn(1, S_kv, 1, D, generator=gen).bfloat16()
        indices = torch.randint(-20, S_kv + 20, (1, S, 1, K), dtype=torch.int32, generator=gen)
        lengths = torch.tensor([[K, K // 2] * S], dtype=torch.int32)[:, :S]
        sink = torch.randn(H, generator=gen)
        dout = torch.randn(1, S, H, 512, generator=gen).bfloat16()
        problem = Problem(1, S, S_kv, H, 1, K, D, 512, torch.bfloat16, torch.int32, has_sink=True, has_topk_length=True)
        config = SparseAttentionConfig(tokens_per_tile=1, bwd_cluster=bwd_cluster)
        shared = {"sm_scale": D**-0.5, "topk_length": lengths, "q_positions": None, "attn_sink": sink}
        out, lse = launch.fwd(problem, config, q, kv, indices, **shared)
        options = {"dlse": None, "dkv": None, "dkv_dtype": None, "deterministic": deterministic}
        dq, dkv, d_sink = launch.bwd(problem, config, q, kv, out, dout, indices, lse, **shared, **options)
    inputs = {"q": q, "kv": kv, "indices": indices, "lengths": lengths, "sink": sink, "dout": dout}
    return Example(inputs, {"out": out, "lse": lse, "dq": dq, "dkv": dkv, "d_sink": d_sink}, recorder)


def forward_over_tiles(D: int, H: int, K: int, S: int, multiprocessors: int) -> Example:
    """A forward of S queries on 200 rows, with invalid slots, on a GPU of so few multiprocessors: tiles share CTAs."""
    from cute_sparse_mla import fwd
    from cute_sparse_mla.config import SparseAttentionConfig

    gen = torch.Generator().manual_seed(D + H)
    q, kv = (torch.randn(shape, generator=gen).bfloat16() for shape in ((1, S, H, D), (1, 200, 1, D)))
    indices = torch.randint(-20, 220, (1, S, 1, K), dtype=torch.int32, generator=gen)
    with simulated() as recorder, going_over_tiles(multiprocessors):
        out, lse = fwd(q, kv, indices, backend="sm90", config=SparseAttentionConfig(tokens_per_tile=1))
    return Example({"q": q, "kv": kv, "indices": indices}, {"out": out, "lse": lse}, recorder)
