"""Token groups of the SM100 path in the simulator: the union lists slot by slot, and calls that the device decides."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import union_lists
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Judge

from .list_cases import LISTS, SMALL_SIZES, checked, judge_lists
from .ptx_sim import capture_cute, project_sm100
from .ptx_sim.policies import Delay, Priorities
from .ptx_sim.races import Races
from .sm100 import call, call_backward, judge, judge_backward

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 simulator: {REASON}")


def clean(observer: Races, recorder: capture_cute.Recorder) -> None:
    assert not observer.races, observer.races[0].text
    assert not [finding for report in recorder.reports for finding in report.findings]


@pytest.mark.parametrize("sizes", (None, SMALL_SIZES), ids=("one_range", "ranges"))
@pytest.mark.parametrize(("case", "tokens"), LISTS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_lists(case: Case, tokens: int, sizes: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, observer = checked(case), Races()
    monkeypatch.setattr(union_lists, "UNION_SIZES", sizes or union_lists.UNION_SIZES)
    if sizes:
        call.indices.masked_fill_((call.indices > 70) & (call.indices < 290), 3)
    with project_sm100.simulated(observer=observer) as recorder:
        from cute_sparse_mla.sm100 import launch

        rows, bits, lengths, chosen = launch.make_lists(
            call.problem, tokens, call.indices, call.topk_length, call.q_positions
        )
    clean(observer, recorder)
    assert int(chosen) == 1
    judge_lists(call, tokens, rows, bits, lengths)


DECIDED = (
    (Case(S=11, S_kv=90, H=8, K=60, causal=True, sink="random", invalid="shuffled", dlse=True), True),
    (Case(B=2, S=5, S_kv=9000, H=16, K=70, length="random", duplicates=True), False),
    (Case(S=5, S_kv=9000, H=16, K=300, invalid="shuffled", share=0.95), True),
)


@pytest.mark.parametrize(("case", "grouped"), DECIDED, ids=("near", "far", "few_valid"))
def test_decided_on_the_device(case: Case, grouped: bool) -> None:
    """Both kernels are launched and one of them leaves at once."""
    inputs, observer = case.inputs(seed=case.S), Races()
    forward = judge(inputs, tokens_per_tile=None, observer=observer)
    backward = judge_backward(inputs, tokens_per_tile=None, observer=observer)
    assert not observer.races, observer.races[0].text
    # Samples, lists, two forwards; row values, samples, lists, two backwards.
    for reports, count in ((forward, 4), (backward, 5)):
        in_groups, alone = (report.warp_instructions for report in reports[-2:])
        assert len(reports) == count and (in_groups > alone) == grouped


# Rows that stand several times in a token's list: few; more than a warp reads at a time, in lists of several warps.
REPEATS = (
    (Case(S=2, S_kv=60, H=8, K=40, D=512, dtype=torch.float16, duplicates=True, dlse=True), 2),
    (Case(S=4, S_kv=70, H=4, K=300, D=512, duplicates=True, invalid="shuffled", causal=True, length="random"), 4),
)


@pytest.mark.parametrize(("case", "tokens"), REPEATS, ids=("few", "many"))
def test_repeated_rows_do_not_depend_on_schedules(case: Case, tokens: int) -> None:
    """The forward and the deterministic backward, warps and engines held back at random: bit for bit."""
    inputs = case.inputs(seed=1)
    out, lse = Judge(inputs).budget_forward()

    def results(**how: object) -> list[torch.Tensor]:
        forward = call(inputs, tokens_per_tile=tokens, **how)[:2]
        return [*forward, *call_backward(inputs, out, lse, tokens_per_tile=tokens, deterministic=True, **how)[:2]]

    plain = results()
    for how in ({"order": Priorities(1)}, {"order": Priorities(2)}, {"order": Priorities(3), "policy": Delay(3)}):
        assert [torch.equal(a, b) for a, b in zip(plain, results(**how), strict=True)] == [True] * 4, how


def test_a_deterministic_call_is_grouped_only_on_request() -> None:
    inputs = Case(S=4, S_kv=40, H=8, K=20, D=512).inputs(seed=2)
    out, lse, _ = call(inputs)
    alone, decided = (
        call_backward(inputs, out, lse, tokens_per_tile=tokens, deterministic=True) for tokens in (1, None)
    )
    assert len(alone[3]) == len(decided[3]) == 3 and torch.equal(alone[1], decided[1])


def test_autograd_keeps_the_lists() -> None:
    """Made once for forward and backward; a plan serves several calls."""
    inputs = Case(S=9, S_kv=90, H=8, K=40, causal=True).inputs(seed=3)
    q, kv = (t.clone().requires_grad_() for t in (inputs.q, inputs.kv))
    given = dict(causal=True, backend="sm100")
    with project_sm100.simulated(multiprocessors=1) as recorder:

        def lists() -> int:
            return sum("Unions" in entry.kernel for entry in recorder.launches)

        config = SparseAttentionConfig(tokens_per_tile=8)
        out = cute_sparse_mla.sparse_mla(q, kv, inputs.indices, config=config, **given)
        out.float().sum().backward()
        assert lists() == 1
        plan = cute_sparse_mla.plan(inputs.indices, kv.shape, 8, tokens_per_tile=8, **given)
        again, _ = cute_sparse_mla.fwd(q, kv, inputs.indices, plan=plan, **given)
        assert lists() == 2
        answer = cute_sparse_mla.explain(q, kv, inputs.indices, plan=plan, **given)
    assert torch.equal(out, again) and q.grad is not None and bool(torch.isfinite(q.grad).all())
    assert answer.config is not None and answer.config.tokens_per_tile == 8 and "8 tokens a tile" in str(answer)


def test_a_compiled_call_makes_its_lists_once() -> None:
    """One graph for all lengths, one tile too; its backward takes the forward's lists, whoever decides on groups."""

    def layer(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return cute_sparse_mla.sparse_mla(q, kv, indices, causal=True, backend="sm100")

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    for S in (9, 5):
        inputs = Case(S=S, S_kv=90, H=8, K=30 + S, D=512, causal=True).inputs(seed=S)
        results = []
        for function in (layer, compiled):
            q, kv = (t.clone().requires_grad_() for t in (inputs.q, inputs.kv))
            with project_sm100.simulated(multiprocessors=1) as recorder:
                out = function(q, kv, inputs.indices)
                out.backward(inputs.dout)
            assert ["Unions" in entry.kernel for entry in recorder.launches].count(True) == 1
            assert ["Samples" in entry.kernel for entry in recorder.launches].count(True) == 1
            results.append((out, q.grad, kv.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert graphs.frame_count == 1
