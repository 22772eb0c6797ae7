"""Running one case of the contract through the SM100 kernels in the simulator, judged against float64."""

from __future__ import annotations

import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs, Judge

from .ptx_sim import project_sm100
from .ptx_sim.machine import Report
from .simulated_judge import judge_gradients, poisoned

BLOCK_K = 64
ROW_STAGES, SLOTS = 4, 5  # the deepest rings


def tiles_for(K: int) -> int:
    """Tiles that one cluster must process: at least three, and enough that every ring wraps twice."""
    blocks = -(-K // BLOCK_K)
    return max(3, -(-2 * max(ROW_STAGES, SLOTS) // blocks))


def call(
    inputs: Inputs, *, tokens_per_tile: int | None = 1, clusters: int = 1, **options: object
) -> tuple[torch.Tensor, torch.Tensor, list[Report]]:
    """`(out, lse, reports)` of the public forward with `backend="sm100"`; `options` go to the machine."""
    heads = inputs.q.shape[-2] // inputs.kv.shape[-2]
    ctas = 2 if heads * (tokens_per_tile or 1) > 64 else 1
    with project_sm100.simulated(multiprocessors=clusters * ctas, **options) as recorder:
        out, lse = cute_sparse_mla.fwd(
            inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, backend="sm100",
            config=SparseAttentionConfig(tokens_per_tile=tokens_per_tile), **inputs.options,
        )  # fmt: skip
    return out, lse, recorder.reports


def judge(inputs: Inputs, **how: object) -> list[Report]:
    """Fails unless out and lse are within the precision clause and the simulator has nothing to report."""
    out, lse, reports = call(poisoned(inputs), **how)
    checks = Judge(inputs).forward_checks(out, lse)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    without_findings(reports)
    return reports


def without_findings(reports: list[Report]) -> None:
    """Fails where the simulator has something to report."""
    findings = [finding for report in reports for finding in report.findings]
    assert not findings, findings[:5]


def call_backward(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, *, dkv: torch.Tensor | None = None,
    tokens_per_tile: int | None = 1, ctas: int = 1, deterministic: bool = False, **options: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[Report]]:  # fmt: skip
    """`(dq, dkv, d_sink, reports)` of the public backward with `backend="sm100"`, tiles spread over so many CTAs."""
    heads = inputs.q.shape[-2] // inputs.kv.shape[-2]
    width = 2 if heads * (tokens_per_tile or 1) > 64 else 1
    with project_sm100.simulated(multiprocessors=ctas * width, **options) as recorder:
        gradients = cute_sparse_mla.bwd(
            inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, dkv=dkv, backend="sm100",
            deterministic=deterministic, config=SparseAttentionConfig(tokens_per_tile=tokens_per_tile),
            **inputs.options,
        )  # fmt: skip
    return *gradients, recorder.reports


def judge_backward(inputs: Inputs, **how: object) -> list[Report]:
    """Fails unless the gradients are right (`judge_gradients`) and the simulator has nothing to report."""
    reports: list[Report] = []

    def backward(
        sent: Inputs, out: torch.Tensor, lse: torch.Tensor, dkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        *gradients, found = call_backward(sent, out, lse, dkv=dkv, **how)
        reports.extend(found)
        return tuple(gradients)

    judge_gradients(inputs, backward)
    without_findings(reports)
    return reports


def sentinel_case(heads: int, D: int, K: int, sink: str | None, causal: bool) -> Case:
    """A case of the sentinel sweep: sentinels stand in half of the slots, one cluster processes all tiles."""
    S = tiles_for(K)
    invalid = "shuffled" if K > 1 else "none"
    return Case(S=S, S_kv=max(K, 96) + 7, H=heads, K=K, D=D, sink=sink, causal=causal, invalid=invalid)
