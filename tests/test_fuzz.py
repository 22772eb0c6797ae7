"""The fuzzer in continuous integration: a fixed seed and a share of its time; and that it finds what is broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.cases import Case
from cute_sparse_mla import reference

from . import fuzz
from .ptx_sim import capture_cute, project_hopper

CPU = torch.device("cpu")
REASONS = {"sim-sm90": project_hopper.unavailable(), "sim-sm100": capture_cute.available()}


def _outcome(target: str, cases: int, seed: int) -> None:
    outcome = fuzz.search(target, cases, seed, CPU, fuzz.narrow(fuzz.SIZES[target]))
    assert not outcome.found, f"{outcome.found}, reproducer: {outcome.reproducer}"
    assert outcome.cases >= cases


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
