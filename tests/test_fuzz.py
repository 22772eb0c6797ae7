"""The fuzzer in continuous integration: a fixed seed and a share of its time; and that it finds what is broken."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.cases import Case
from cute_sparse_mla import reference
from cute_sparse_mla.precision import Inputs, Judge, Results, TensorCheck

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


def test_a_ratio_to_a_limit_of_zero_can_be_written() -> None:
    check = TensorCheck("dq", 4.6e-7, math.inf, math.inf, (0, 0), 0, (1, 1))
    assert json.dumps(fuzz._of_limit(check), allow_nan=False) == "1000000000.0"


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


def _explained(
    contract: fuzz.Contract, target: str, i: Inputs, results: Results, judge_of: type[Judge] = Judge
) -> bool:
    judge = judge_of(i)
    exact = judge.gradients(results.out, results.lse, judge.rules[0])
    check = next(c for c in fuzz.checks_of(contract, judge, results, exact) if c.name == "dq")
    assert not check.ok
    return fuzz.cancelled_gradients("dq", contract, target, i, fuzz.valid_slots(i), results, judge, exact)


@pytest.mark.parametrize("which", [1, 2])
def test_a_tensor_cores_dq_of_cancelling_rows(which: int) -> None:
    """Rows with all weight on one row of kv, where dP - Delta cancels: an H200's dq, which the model gives bit for bit.

    `h200_cancelled_dq.npz` has a token of two calls (fp16, scale 0.5, a sink) that missed the clause there, of
    kernels in which a warp added a Delta. One misses on a CPU too, where the budget's own sums come out otherwise. More
    than the sums leave is a miss.
    """
    recorded = np.load(Path(__file__).with_name("h200_cancelled_dq.npz"))
    q, kv, dout, out, dq = (
        torch.from_numpy(recorded[f"{which}_{name}"]).view(torch.float16) for name in ("q", "kv", "dout", "out", "dq")
    )
    lse, sink, rows = (torch.from_numpy(recorded[f"{which}_{name}"]) for name in ("lse", "sink", "indices"))
    i = Inputs(q[None], kv[:, None], rows[None, None], dout[None], 512, 0.5, attn_sink=sink)
    whole = torch.ones(1, len(q), dtype=torch.bool)
    model = fuzz.modelled_dq(i, fuzz.valid_slots(i), out[None], lse[None], whole, tensor_cores=True, lanes=32)
    assert torch.equal(model.half(), dq[None])
    if which == 1:
        return
    contract = fuzz.Contract(Case(sm_scale=0.5), seed=0, dkv_buffer=False)
    results = Results(out[None], lse[None], dq[None], torch.zeros_like(i.kv), torch.zeros_like(sink))
    assert _explained(contract, "sm90", i, results)
    assert not _explained(contract, "sm90", i, results._replace(dq=3 * results.dq))


def test_a_rounding_at_the_middle_of_two_numbers_may_go_either_way() -> None:
    """dS of a row selected three times, just above the middle: found on an H200 at 1.03 times the clause's limit."""
    case = Case(S=1, S_kv=1, H=25, K=3, D=576, duplicates=True, sink=50.0, dlse=True, sm_scale=0.5)
    contract = fuzz.Contract(case, seed=0, dkv_buffer=False)
    i = fuzz.inputs_of(contract, CPU)
    assert i.dlse is not None
    i.dlse[:] = 0
    i.dlse[0, 0, 0] = -3 * (170 + 171) / 512 * (1 + 1e-5)
    judge = Judge(i)
    budget = judge.budget
    exact = judge.gradients(budget.out, budget.lse, judge.rules[0]).dq
    other = judge.gradients(budget.out, budget.lse + 3e-5, judge.rules[1]).dq
    assert _explained(contract, "sm90", i, budget._replace(dq=other))
    worse = (exact + 2.1 * (other.double() - exact)).bfloat16()
    assert not _explained(contract, "sm90", i, budget._replace(dq=worse))


class _ExactBudget(Judge):
    """As on a GPU, where sums of fp32 left so little of a dq of 0 that it rounded to 0."""

    def gradients(self, out: Tensor, lse: Tensor, roundings: reference.Roundings) -> reference.Backward:
        return super().gradients(out, lse, self.rules[0])


def test_the_last_bit_of_p_decides_a_dS_at_the_middle_of_two_numbers() -> None:
    """An H200's dq whose exact value and limit are 0: 32 slots name one row of kv, so that P is 1 / 32.

    What a tensor core's dP leaves of Delta, over 32, is 5.5 of fp16's smallest numbers in head 3 of token 3, and became
    6 there; the call's other 71 rows were the model's bit for bit. More than the other one of these is a miss.
    """
    text = """{"S": 6, "S_kv": 1, "H": 12, "K": 62, "packed": true, "dtype": "float16", "index_dtype": "int64",
        "invalid": "shuffled", "sm_scale": 0.001, "seed": 0, "dkv_buffer": false}"""
    contract = fuzz.Contract.parse(text)
    i = fuzz.inputs_of(contract, CPU)
    i = dataclasses.replace(i, q=i.q[3:4], dout=i.dout[3:4], indices=i.indices[3:4])
    out, lse = Judge(i).budget_forward()
    rows, one_bit = torch.ones(1, 12, dtype=torch.bool), 3e-7
    either = [fuzz.modelled_dq(i, fuzz.valid_slots(i), out, lse + by, rows, True) for by in (0, one_bit)]
    assert (either[0] != either[1]).any(dim=-1).nonzero().tolist() == [[0, 3]]
    for dq in (*either, 2 * either[1] - either[0]):
        results = Results(out, lse, dq.half(), torch.zeros_like(i.kv), None)
        assert _explained(contract, "sm90", i, results, _ExactBudget) == any(dq is model for model in either)


@pytest.mark.parametrize(("share", "allowed"), [(0.9, True), (3, False)])
def test_what_fp32_leaves_of_a_dq_of_0_is_rounded_too(share: float, allowed: bool) -> None:
    """To fp16's smallest numbers, which made a simulated dq 1.09 times as long as the noise of fp32 allowed."""
    case = Case(S=1, S_kv=1, H=1, K=1, D=576, dtype=torch.float16, sm_scale=0.001)
    contract, i = fuzz.Contract(case, seed=0, dkv_buffer=False), case.inputs(seed=0)
    kv = i.kv[0, 0].double()
    slope = share * fuzz.FP32_NOISE * i.dout.double().norm(dim=-1) * kv[:, :512].norm()
    dq = (0.001 * slope[..., None] * kv).half()
    assert (dq.norm(dim=-1) > 0.001 * slope * kv.norm()).all()
    out, lse = Judge(i).budget_forward()
    results = Results(out, lse, dq, torch.zeros_like(i.kv), None)
    assert _explained(contract, "sim-sm90", i, results, _ExactBudget) == allowed
    exact = Judge(i).gradients(out, lse, reference.oracle())
    check = TensorCheck("dq", 1.0, math.inf, math.inf, 0, 0, (1, 1, 1))
    assert fuzz._beyond_fp32(check, contract, i, results, exact) == allowed


def test_inputs_are_the_same_on_every_device() -> None:
    """Drawn on a CPU, also for a device that could not draw them: what a GPU misses is replayed in the simulator."""
    contract = fuzz.Contract(Case(S=3, K=5, sink="random", dlse=True, length="random", positions="random"), seed=1)
    there, here = (vars(fuzz.inputs_of(contract, torch.device(name))) for name in ("meta", "cpu"))
    tensors = {name for name, value in here.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 8 and all(there[name].is_meta for name in tensors)


def test_a_count_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls judged before a kill count, those of other kernels do not, and a whole count judges nothing more.

    Two processes go on where one was.
    """
    out = tmp_path / "count.jsonl"
    real, left = fuzz.judge_call, 7

    def stopped(*arguments: Any) -> Any:
        nonlocal left
        verdict = real(*arguments)
        left -= verdict is not None
        if left < 0:
            raise KeyboardInterrupt
        return verdict

    def run(cases: int, workers: int = 1) -> list[dict[str, Any]]:
        words = f"fuzz --target reference --cases {cases} --workers {workers} --seed 15 --resume --out {out}".split()
        monkeypatch.setattr("sys.argv", words)
        assert fuzz.main() == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    monkeypatch.setattr(fuzz, "judge_call", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(20)
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    before = row["cases"]
    assert 5 <= before <= 7 and row["next_seed"] == 16
    monkeypatch.setattr(fuzz, "judge_call", real)
    (row,) = run(20)
    assert row["cases"] == 20 and row["seed"] == 15 and row["next_seed"] == 17
    assert run(20) == [row]
    out.write_text(json.dumps(row | {"seed": 1}) + "\n" + json.dumps(row) + "\n")
    assert [counted["seed"] for counted in run(20)] == [1, 15], "the last of two counts goes on, the other stays"
    out.write_text(json.dumps(row) + "\n")
    (row,) = run(30, workers=2)
    assert row["cases"] == 30 and row["seed"] == 15 and row["next_seed"] == 19 and row["workers"] == 2
    monkeypatch.setattr(fuzz, "kernels_of", lambda target: "others")
    assert [row["cases"] for row in run(5)] == [30, 5]
    monkeypatch.setattr(fuzz.env, "device_name", str)
    assert fuzz.Count.of(out, "sm90", 1, torch.device("cuda")).row["device"] == "cuda"


def test_comments_and_docstrings_leave_a_count_valid() -> None:
    code = '"""Said."""\nX = "# no comment"  # one\n\n\n'
    code += 'def f(x: int) -> int:\n    """Also\n    said."""\n    return x  # y\n'
    bare = 'X = "# no comment"\ndef f(x: int) -> int:\n    return x'
    assert fuzz.code_of(code) == fuzz.code_of(bare) == bare
    assert fuzz.code_of(code.replace("return x", "return -x")) != bare
    assert fuzz.code_of(code.replace("# no comment", "# another")) != bare
