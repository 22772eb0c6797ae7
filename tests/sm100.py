"""Running one case of the contract through the SM100 kernels in the simulator, judged against float64."""

from __future__ import annotations

from dataclasses import replace

import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs, Judge, compare_rows

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


def call_backward(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, *, dkv: torch.Tensor | None = None,
    tokens_per_tile: int = 1, ctas: int = 1, deterministic: bool = False, **options: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[Report]]:  # fmt: skip
    """`(dq, dkv, d_sink, reports)` of the public backward with `backend="sm100"`, tiles spread over so many CTAs."""
    heads = inputs.q.shape[-2] // inputs.kv.shape[-2]
    width = 2 if heads * tokens_per_tile > 64 else 1
    with project_sm100.simulated(multiprocessors=ctas * width, **options) as recorder:
        gradients = cute_sparse_mla.bwd(
            inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, dkv=dkv, backend="sm100",
            deterministic=deterministic, config=SparseAttentionConfig(tokens_per_tile=tokens_per_tile),
            **inputs.options,
        )  # fmt: skip
    return *gradients, recorder.reports


def judge_backward(inputs: Inputs, **how: object) -> list[Report]:
    """Fails unless all gradients, and ranges of columns apart, are within the precision clause, and no canary moved.

    dkv starts as -0.0 between guard rows of -0.0: what nothing is added to, +0.0 included, keeps its sign.
    """
    judged, sent = Judge(inputs), poisoned(inputs)
    out, lse = judged.budget_forward()
    room = torch.full((3, *inputs.kv.shape), -0.0)
    dq, dkv, d_sink, reports = call_backward(sent, out, lse, dkv=room[1], **how)
    assert torch.signbit(room[0]).all() and torch.signbit(room[2]).all(), "a guard row was added to"
    unnamed = sent.kv.isnan().any(dim=-1)
    assert torch.signbit(dkv[unnamed]).all(), "a row that no slot names was added to"
    checks = judged.gradient_checks(out, lse, d_sink=d_sink)
    exact, granted = (judged.gradients(out, lse, rule) for rule in judged.rules)
    for name, got in (("dq", dq), ("dkv", dkv)):
        for first, last in ((0, 256), (256, 512), (512, got.shape[-1]), (0, got.shape[-1])):
            if first < last:
                parts = (t[..., first:last] for t in (got, getattr(exact, name), getattr(granted, name)))
                checks.append(compare_rows(f"{name} {first}", *parts))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    findings = [finding for report in reports for finding in report.findings]
    assert not findings, findings[:5]
    return reports


def sentinel_case(heads: int, D: int, K: int, sink: str | None, causal: bool) -> Case:
    """A case of the sentinel sweep: sentinels stand in half of the slots, one cluster processes all tiles."""
    S = tiles_for(K)
    invalid = "shuffled" if K > 1 else "none"
    return Case(S=S, S_kv=max(K, 96) + 7, H=heads, K=K, D=D, sink=sink, causal=causal, invalid=invalid)
