"""Plans of token groups in the front-end: made, checked against the call they are given to, ignored by the reference.

The lists themselves are tested where they are made: `test_hopper_groups.py`, `test_sm100_build.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cute_sparse_mla.hopper import launch as hopper_launch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import autograd, env, groups
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from cute_sparse_mla.problem import Problem

CASE = Case(B=2, S=5, S_kv=11, H=4, G=2, K=7, D=24, d_v=16, invalid="shuffled")


def made(case: Case = CASE, **options: Any) -> tuple[Any, cute_sparse_mla.TokenPlan]:
    i = case.inputs(seed=1)
    given = dict(causal=i.causal, q_positions=i.q_positions, topk_length=i.topk_length)
    return i, cute_sparse_mla.plan(i.indices, i.kv.shape, case.H // case.G, **{**given, **options})


@pytest.mark.parametrize("packed", (False, True))
def test_a_plan_on_a_cpu_changes_nothing(packed: bool) -> None:
    case = CASE.but(B=1, packed=True) if packed else CASE.but(causal=True, positions="random", length="random")
    i, plan = made(case)
    assert plan.tokens_per_tile == 1 and plan.lists is None and plan.shape == (case.B, 5, 2, 7)
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, plan=plan, **i.options)
    want, want_lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **i.options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    for given in ({}, {"plan": plan}):
        cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **given, **i.options)
        cute_sparse_mla.sparse_mla(
            i.q.requires_grad_(), i.kv, i.indices, d_v=i.d_v, **given, **i.options
        ).sum().backward()
    assert cute_sparse_mla.explain(i.q, i.kv, i.indices, d_v=i.d_v, plan=plan, **i.options).ok


def test_the_group_axis_may_be_left_out() -> None:
    i = CASE.but(G=1).inputs()
    assert cute_sparse_mla.plan(i.indices.squeeze(2), i.kv.shape, 4).shape == (2, 5, 1, 7)


def test_the_reference_takes_no_groups() -> None:
    with pytest.raises(UnsupportedError, match="token by token"):
        made(tokens_per_tile=8)


@pytest.mark.parametrize(
    ("changes", "what"),
    (
        (dict(S=6), "indices of shape"),
        (dict(K=8), "indices of shape"),
        (dict(S_kv=12), "S_kv 11"),
        (dict(H=8), "heads per group 2"),
        (dict(causal=True), "causal False"),
        (dict(length="random"), "topk_length False"),
    ),
)
def test_a_plan_of_another_call_is_refused(changes: dict, what: str) -> None:
    _, plan = made()
    i = CASE.but(**changes).inputs()
    with pytest.raises(ArgumentValueError, match=f"plan: was made for another call: {what}"):
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, plan=plan, **i.options)
    answer = cute_sparse_mla.explain(i.q, i.kv, i.indices, d_v=i.d_v, plan=plan, **i.options)
    assert not answer.ok and what in answer.reason


def test_a_plan_and_a_config_that_disagree_are_refused() -> None:
    i, plan = made()
    with pytest.raises(ArgumentValueError, match=r"plan: has tokens_per_tile = 1; config.tokens_per_tile"):
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, plan=plan, config=SparseAttentionConfig(tokens_per_tile=2))
    with pytest.raises(ArgumentValueError, match="device"):
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, plan=replace(plan, device=torch.device("meta")))


WRONG = (
    (dict(kv_shape=(2, 11)), ArgumentValueError, "kv_shape: must be"),
    (dict(kv_shape=(2, 11, 0, 24)), ArgumentValueError, "kv_shape: must have"),
    (dict(kv_shape=(3, 11, 2, 24)), ArgumentValueError, "indices: shape"),
    (dict(kv_shape=(11, 2, 24)), ArgumentValueError, "indices: must be"),
    (dict(heads_per_group=0), ArgumentValueError, "heads_per_group"),
    (dict(heads_per_group=1.0), ArgumentTypeError, "heads_per_group"),
    (dict(indices=torch.zeros(2, 5, 2, 7)), ArgumentTypeError, "indices: dtype"),
    (dict(indices=[1]), ArgumentTypeError, "indices: must be a torch.Tensor"),
    (dict(topk_length=torch.zeros(2, 6, dtype=torch.int32)), ArgumentValueError, "topk_length: shape"),
    (
        dict(topk_length=torch.zeros(2, 5, dtype=torch.int32, device="meta")),
        ArgumentValueError,
        "topk_length: must be on",
    ),
    (dict(q_positions=torch.zeros(2, 5, dtype=torch.int32)), ArgumentValueError, "q_positions: has no effect"),
    (dict(causal=1), ArgumentTypeError, "causal"),
    (dict(tokens_per_tile=0), ArgumentValueError, "tokens_per_tile"),
    (dict(backend="nope"), ArgumentValueError, "backend"),
)


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_arguments(changes: dict, error: type[Exception], message: str) -> None:
    i = CASE.inputs()
    given: dict[str, Any] = dict(indices=i.indices, kv_shape=i.kv.shape, heads_per_group=2)
    with pytest.raises(error, match=message):
        cute_sparse_mla.plan(**{**given, **changes})


@pytest.mark.parametrize("heads", (2.0, [2]), ids=str)
def test_no_check_is_lost_after_a_correct_plan(heads: Any) -> None:
    """Nor for what equals the right value, or has no hash."""
    i = CASE.inputs()
    cute_sparse_mla.plan(i.indices, i.kv.shape, 2)
    with pytest.raises(ArgumentTypeError, match="heads_per_group: must be an int"):
        cute_sparse_mla.plan(i.indices, i.kv.shape, heads)


# Queries, rows of kv, heads, D, slots of the unions over those of the tokens, passes, and whether an H200 was faster
# with groups, lists included (bench/results/groups.jsonl, hopper_h200.jsonl): text, then random rows.
MEASURED = (
    (4096, 8192, 8, 576, 0.245, "both", True),
    (4096, 8192, 32, 576, 0.652, "both", True),
    (4096, 8192, 8, 576, 0.357, "forward", True),
    (4096, 8192, 32, 576, 0.827, "forward", True),
    (4096, 131_072, 8, 576, 0.946, "both", True),
    (4096, 131_072, 16, 576, 0.976, "both", True),
    (16_384, 131_072, 16, 512, 0.975, "forward", True),
    (16_384, 131_072, 32, 512, 0.992, "backward", True),
    (131_072, 131_072, 32, 512, 0.956, "forward", False),
    (131_072, 131_072, 32, 512, 0.956, "both", True),
)


@pytest.mark.parametrize(("S", "S_kv", "H", "D", "slots", "purpose", "pays"), MEASURED)
def test_the_decision_is_what_was_measured(
    S: int, S_kv: int, H: int, D: int, slots: float, purpose: Any, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "multiprocessors", lambda device: 132)
    problem = Problem(1, S, S_kv, H, 1, 2048, D, 512, torch.bfloat16, torch.int32)
    tokens = hopper_launch.group_size(problem)
    assert (1000 * slots <= hopper_launch.per_mille(problem, tokens, torch.device("cuda"), purpose)) == pays


def test_fake_lists_have_the_real_shapes() -> None:
    with FakeTensorMode():
        indices = torch.empty((5, 2, 7), dtype=torch.int64)
        lists = autograd.plan_op(indices, None, None, [11, 2, 24], 2, False, 4, True, "")
    assert [tuple(t.shape) for t in lists] == [(1, 2, 2, 28), (1, 2, 2, 28), (1, 2, 2), (1,)]
    assert all(isinstance(t, Tensor) and t.dtype == torch.int32 for t in lists)


def test_the_op_of_a_traced_call() -> None:
    """No list where nothing is grouped, nor for a wrong call; the same for fake tensors."""
    i = CASE.inputs()
    arguments = (i.indices, None, None, [2, 11, 2, 24], 2, False, "{}", "")
    torch.library.opcheck(autograd.lists_op, arguments)
    for given in (arguments, (i.indices, None, None, [3, 11, 2, 24], 2, False, "{}", "")):
        assert [t.numel() for t in autograd.lists_op(*given)] == [0] * 4


def test_a_wrong_call_is_named_by_its_own_check() -> None:
    i = CASE.inputs()
    assert groups.lists_for(i.q, i.kv, i.indices[:1], False, None, None, None, None, "") == groups.NO_LISTS
    with pytest.raises(ArgumentValueError, match="indices: shape must be"):
        cute_sparse_mla.sparse_mla(i.q, i.kv, i.indices[:1], d_v=i.d_v)
