"""Running one case of the contract through the SM100 forward in the simulator, judged against float64."""

from __future__ import annotations

from dataclasses import replace

import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs, Judge

from .ptx_sim import project_sm100
from .ptx_sim.machine import Report

BLOCK_K = 64
ROW_STAGES, SLOTS = 4, 5  # the deepest rings


def tiles_for(K: int) -> int:
    """Tiles that one cluster must process: at least three, and enough that every ring wraps twice."""
    blocks = -(-K // BLOCK_K)
    return max(3, -(-2 * max(ROW_STAGES, SLOTS) // blocks))


def poisoned(inputs: Inputs) -> Inputs:
    """The same call, with NaN in every row of kv that no index names: those may not be read."""
    kv, indices = inputs.kv, inputs.indices
    packed = kv.dim() == 3
    kv, indices = (kv[None], indices[None]) if packed else (kv, indices)
    named = torch.zeros(kv.shape[:3], dtype=torch.bool)
    for b, g in ((b, g) for b in range(kv.shape[0]) for g in range(kv.shape[2])):
        rows = indices[b] if indices.dim() == 3 else indices[b, :, g]
        rows = rows[(rows >= 0) & (rows < kv.shape[1])].long()
        named[b, rows.unique(), g] = True
    kv = kv.masked_fill(~named[..., None], torch.nan)
    return replace(inputs, kv=kv[0] if packed else kv)


def call(
    inputs: Inputs, *, tokens_per_tile: int = 1, clusters: int = 1, **options: object
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """`(out, lse, report)` of the public forward with `backend="sm100"`; `options` go to the machine."""
    heads = inputs.q.shape[-2] // inputs.kv.shape[-2]
    ctas = 2 if heads * tokens_per_tile > 64 else 1
    with project_sm100.simulated(multiprocessors=clusters * ctas, **options) as recorder:
        out, lse = cute_sparse_mla.fwd(
            inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, backend="sm100",
            config=SparseAttentionConfig(tokens_per_tile=tokens_per_tile), **inputs.options,
        )  # fmt: skip
    (report,) = recorder.reports
    return out, lse, report


def judge(inputs: Inputs, **how: object) -> Report:
    """Fails unless out and lse are within the precision clause and the simulator has nothing to report."""
    out, lse, report = call(poisoned(inputs), **how)
    checks = Judge(inputs).forward_checks(out, lse)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    assert not report.findings, report.findings[:5]
    return report


def sentinel_case(heads: int, D: int, K: int, sink: str | None, causal: bool) -> Case:
    """A case of the sentinel sweep: sentinels stand in half of the slots, one cluster processes all tiles."""
    S = tiles_for(K)
    invalid = "shuffled" if K > 1 else "none"
    return Case(S=S, S_kv=max(K, 96) + 7, H=heads, K=K, D=D, sink=sink, causal=causal, invalid=invalid)
