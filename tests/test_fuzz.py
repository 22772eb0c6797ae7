"""The fuzzer in continuous integration: a fixed seed and a share of its time; and that it finds what is broken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench.cases import Case
from cute_sparse_mla import reference
from cute_sparse_mla.precision import Judge, Results

from . import fuzz, tensor_core
from .ptx_sim import capture_cute, project_hopper

CPU = torch.device("cpu")
REASONS = {"sim-sm90": project_hopper.unavailable(), "sim-sm100": capture_cute.available()}


def _outcome(target: str, cases: int, seed: int) -> None:
    outcome = fuzz.search(target, cases, seed, CPU, fuzz.narrow(fuzz.SIZES[target]))
    assert not outcome.found, f"{outcome.found}, reproducer: {outcome.reproducer}"
    assert outcome.cases == cases and not outcome.cancelled


def test_the_reference_against_brute_force() -> None:
    _outcome("reference", 200, seed=11)


@pytest.mark.parametrize("target", fuzz.SIMULATED)
def test_simulated_kernels_against_the_reference(target: str) -> None:
    if REASONS[target]:
        pytest.skip(REASONS[target])
    _outcome(target, 15, seed=12)


@pytest.mark.sm90
def test_kernels_against_the_reference() -> None:
    device = torch.device("cuda")
    outcome = fuzz.search("sm90", 200, 13, device, fuzz.narrow(fuzz.SIZES["sm90"]))
    assert not outcome.found, f"{outcome.found}, reproducer: {outcome.reproducer}"


def test_what_is_broken_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that takes a repeated row for one slot: the reproducer is small, and fails again when replayed."""
    real = reference.forward

    def deduplicating(q: Any, kv: Any, indices: Any, **options: Any) -> Any:
        ordered = indices.sort(dim=-1).values
        repeated = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0), value=False)
        return real(q, kv, ordered.masked_fill(repeated, -1), **options)

    monkeypatch.setattr(reference, "forward", deduplicating)
    outcome = fuzz.search("reference", 300, 14, CPU, fuzz.SIZES["reference"])
    assert "lse" in outcome.found
    smallest = fuzz.Contract.parse(outcome.reproducer)
    assert smallest.case.S == 1 and smallest.case.K <= 3
    assert fuzz.misses(smallest, "reference", CPU)
    monkeypatch.undo()
    assert fuzz.misses(smallest, "reference", CPU) == []


def test_reproducers_are_read_back() -> None:
    case = Case(S=3, dtype=torch.float16, index_dtype=torch.int64, sink=float("-inf"), invalid="odd", sm_scale=0.0)
    contract = fuzz.Contract(case, seed=5, kv_sliced=True, dkv_buffer=False, tokens_per_tile=8)
    assert fuzz.Contract.parse(contract.text()) == contract


@pytest.mark.parametrize("changes", [dict(invalid="one_row"), dict(sink=0.0), dict(causal=True), dict(G=2)])
def test_only_calls_with_something_count(changes: dict[str, Any]) -> None:
    plain = Case(S=3, S_kv=20, H=4, K=8, D=16, d_v=8)
    assert fuzz.misses(fuzz.Contract(plain, 1), "reference", CPU) is None
    assert fuzz.misses(fuzz.Contract(plain.but(**changes), 1), "reference", CPU) == []


def test_lse_of_cancelled_scores_is_told_from_other_misses() -> None:
    """That of the scores as a tensor core sums them passes, a little more does not, nor where nothing cancels."""
    i = Case(S=12, S_kv=40, H=16, K=2, D=512, q_scale=4.0, sm_scale=0.5, invalid="shuffled").inputs(seed=2)
    valid, judge = fuzz.valid_slots(i), Judge(i)
    exact, max_abs = judge.forwards[0].lse, judge.forwards[0].max_abs_score
    k = i.kv[0, i.indices[0, :, 0].clamp(min=0).long(), 0]
    orders = fuzz._orders(512)
    sums = [tensor_core.products(i.q[0][:, :, None], k[:, None], order) * i.sm_scale for order in orders]
    summed = [torch.logsumexp(s.masked_fill(~valid[0], -torch.inf), -1)[None] for s in sums]
    limit = 1e-5 + 2e-6 * max_abs
    beyond = (summed[0] - exact).abs() > limit
    assert beyond.any()
    assert all(fuzz.cancelled_scores(i, valid, lse.float(), exact, max_abs) for lse in summed)
    wrong = exact + (torch.maximum(*summed) - exact).clamp(min=0) + 2 * limit
    assert not fuzz.cancelled_scores(i, valid, torch.where(beyond, wrong, exact), exact, max_abs)
    i.q[:] = i.kv[0, i.indices[0, :, 0].clamp(min=0)[:, 0].long()]
    exact, max_abs = Judge(i).forwards[0].lse, Judge(i).forwards[0].max_abs_score
    assert not fuzz.cancelled_scores(i, valid, exact * (1 + 4e-6), exact, max_abs)


def test_fp32_sums_are_judged_as_fp32() -> None:
    """Rows selected three times over: the budget's 0.2 % is granted where nothing rounds dkv, and only there."""
    case = Case(S=12, S_kv=160, H=1, K=237, causal=True, positions="random", q_scale=4.0, sm_scale=0.5)
    judge = Judge(case.inputs(seed=4))
    out, lse = judge.budget_forward()
    granted = judge.gradients(out, lse, dataclasses.replace(judge.rules[1], outputs=torch.float32))
    exact = judge.gradients(out, lse, judge.rules[0])
    for buffer in (True, False):
        rounded = granted.dkv if buffer else granted.dkv.bfloat16()
        results = Results(out, lse, granted.dq.bfloat16(), rounded, None)
        checks = fuzz.checks_of(fuzz.Contract(case, 4, dkv_buffer=buffer), judge, results, exact)
        assert all(check.ok for check in checks)
    checks = fuzz.checks_of(fuzz.Contract(case, 4, dkv_buffer=False), judge, results._replace(dkv=granted.dkv), exact)
    assert [check.name for check in checks if not check.ok] == ["dkv"]
