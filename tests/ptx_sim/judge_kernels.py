"""Judge whole kernels: the project's Hopper forward and backward on an H200 against the same launches simulated.

`python -m tests.ptx_sim judge-kernels RESULTS.npz --device` runs them on the GPU and stores outputs; without
`--device` the same problems run in the simulator and are compared. Exact problems (q = 0, a power of two of valid
slots, integer kv) must agree in `out` bit for bit; all else within the rounding of the outputs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

# Outputs are rounded to bf16 once on either side; sums differ in order.
BOUNDS = {"out": 4e-3, "dq": 4e-3, "dkv": 4e-3, "d_sink": 1e-3, "lse": 1e-5}


@dataclass
class Kernel:
    """One problem. Inputs come from a fixed seed, so both sides make the same ones."""

    name: str
    D: int
    H: int
    K: int
    exact: bool

    def inputs(self) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(self.D + self.H + self.K + self.exact)
        S, rows = 3, 400
        q = torch.randn(1, S, self.H, self.D, generator=gen)
        kv = torch.randn(1, rows, 1, self.D, generator=gen)
        indices = torch.randint(0, rows, (1, S, 1, self.K), dtype=torch.int32, generator=gen)
        sink = torch.randn(self.H, generator=gen)
        if self.exact:
            q, kv = torch.zeros_like(q), torch.randint(-8, 9, kv.shape, generator=gen).float()
            sink.fill_(-math.inf)
        else:
            indices[..., ::5] = -1
            indices[..., 1:9] = indices[..., 11:12]
        return {
            "q": q.bfloat16(),
            "kv": kv.bfloat16(),
            "indices": indices,
            "sink": sink,
            "dout": torch.randn(1, S, self.H, 512, generator=gen).bfloat16(),
        }


def kernels() -> Iterator[Kernel]:
    for D, H, K in ((576, 64, 256), (512, 64, 128), (576, 8, 128), (512, 128, 192)):
        yield Kernel(f"D {D} H {H} K {K} random", D, H, K, False)
        if K & (K - 1) == 0:
            yield Kernel(f"D {D} H {H} K {K} exact", D, H, K, True)


def run(kernel: Kernel, device: str) -> dict[str, np.ndarray]:
    """Forward and backward through the package's own launch code."""
    from cute_sparse_mla.hopper import launch

    from cute_sparse_mla.config import SparseAttentionConfig
    from cute_sparse_mla.problem import Problem

    t = {name: value.to(device) for name, value in kernel.inputs().items()}
    _, S, H, D = t["q"].shape
    problem = Problem(1, S, t["kv"].shape[1], H, 1, kernel.K, D, 512, torch.bfloat16, torch.int32, has_sink=True)
    shared = {"sm_scale": D**-0.5, "topk_length": None, "q_positions": None, "attn_sink": t["sink"]}
    config = SparseAttentionConfig(tokens_per_tile=1)
    out, lse = launch.fwd(problem, config, t["q"], t["kv"], t["indices"], **shared)
    dq, dkv, d_sink = launch.bwd(
        problem,
        config,
        t["q"],
        t["kv"],
        out,
        t["dout"],
        t["indices"],
        lse,
        **shared,
        dlse=None,
        dkv=None,
        dkv_dtype=None,
        deterministic=False,
    )
    values = {"out": out, "lse": lse, "dq": dq, "dkv": dkv, "d_sink": d_sink}
    return {name: v.float().cpu().numpy() for name, v in values.items()}


def difference(kernel: Kernel, name: str, got: np.ndarray, want: np.ndarray) -> str | None:
    if kernel.exact and name == "out":
        wrong = int((got != want).sum())
        return f"{wrong} of {got.size} values differ" if wrong else None
    scale = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got.astype(np.float64) - want)) / scale if scale else float(np.abs(got).max())
    return None if error <= BOUNDS[name] else f"relative error {error:.2e} exceeds {BOUNDS[name]:.0e}"


def main(args: argparse.Namespace) -> int:
    if args.device:
        found = {}
        for kernel in kernels():
            found |= {f"{kernel.name}|{name}": value for name, value in run(kernel, "cuda").items()}
            print(f"{kernel.name}: done")
        np.savez_compressed(args.file, **found)
        return 0
    if not args.file.exists():
        sys.exit(f"{args.file} does not exist: run with --device on a Hopper GPU first")
    from . import project_hopper

    if (reason := project_hopper.unavailable()) is not None:
        sys.exit(reason)
    results = dict(np.load(args.file))
    failed = 0
    with project_hopper.simulated():
        for kernel in kernels():
            for name, got in run(kernel, "cpu").items():
                problem = difference(kernel, name, got, results[f"{kernel.name}|{name}"])
                if problem:
                    failed += 1
                    print(f"{kernel.name}, {name}: {problem}")
    print(f"{failed} outputs differ")
    return int(failed > 0)
