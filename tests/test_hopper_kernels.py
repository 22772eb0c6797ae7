"""The SM90 kernels on a Hopper GPU against the precision clause, and what only a GPU can show."""

from __future__ import annotations

import math

import pytest
import torch

import cute_sparse_mla
from bench import timing
from bench.cases import Case
from cute_sparse_mla.precision import Judge, run

pytestmark = pytest.mark.sm90

BASE = Case(S=33, S_kv=300, H=16, K=128)
HEAD_SWEEP = (1, 2, 7, 20, 32, 33, 40, 63, 65, 80, 112, 127)
CASES = (
    BASE.but(name="groups_batch", B=2, H=6, G=2, invalid="out_of_range", length="random", causal=True, sink="random",
             duplicates=True, index_dtype=torch.int64, dlse=True),
    BASE.but(name="positions_packed", positions="random", H=8, packed=True),
    BASE.but(name="empty_row_sink", invalid="one_row", sink="random", dlse=True),
    BASE.but(name="all_empty", invalid="all", sink="random"),
    BASE.but(name="zero_length", length="zero"),
    BASE.but(name="sink_plus_inf", sink=math.inf, dlse=True),
    BASE.but(name="sink_minus_inf", sink=-math.inf, dlse=True),
    BASE.but(name="sink_200", sink=200.0, dlse=True),
    BASE.but(name="large_scores", q_scale=64.0),
    BASE.but(name="zero_scale", sm_scale=0.0),
    BASE.but(name="fp16", H=24, dtype=torch.float16, invalid="odd", sink="random"),
    BASE.but(name="fp16_512", H=100, D=512, dtype=torch.float16, dlse=True),
    BASE.but(name="more_slots_than_rows", S_kv=40, K=200),
    BASE.but(name="long", H=8, S=40, S_kv=4096, K=2048, causal=True, length="random"),
    *(BASE.but(name=f"k{K}", K=K) for K in (17, 63, 64, 65, 100)),
    *(BASE.but(name=f"blocks_{n}", H=64, K=64 * n, invalid="shuffled") for n in range(1, 9)),
    *(BASE.but(name=f"invalid_{kind}", H=40, K=320, invalid=kind) for kind in ("head", "tail", "odd", "out_of_range")),
    *(BASE.but(name=f"heads_{H}", H=H, K=100, D=D, sink="random") for H in HEAD_SWEEP for D in (512, 576)),
)  # fmt: skip

SINGLE = {"backend": "sm90", "config": cute_sparse_mla.SparseAttentionConfig(tokens_per_tile=1)}
GROUPED = (
    CASES[0].but(H=8, S=45),
    *(
        BASE.but(name=name, H=H, S=37, S_kv=3000, K=300, D=D, **changes)
        for D in (512, 576)
        for name, H, changes in (
            ("causal", 4, dict(causal=True, invalid="shuffled")),
            ("packed", 7, dict(packed=True, positions="random", duplicates=True)),
            ("empty_rows", 16, dict(length="zero", sink="random", dlse=True)),
            ("fp16", 32, dict(dtype=torch.float16, invalid="one_row")),
        )
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name + f"_{case.D}")
def test_contract(case: Case) -> None:
    judge = Judge(case.inputs(seed=len(case.name), device="cuda"))
    checks = judge.checks(run(judge.inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, backend="sm90"))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


def test_one_slot_rows() -> None:
    """out is the slot's v exactly; dq is a full cancellation, so only its size is judged."""
    i = BASE.but(K=1).inputs(device="cuda")
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, backend="sm90")
    dq, _, _ = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, backend="sm90")
    v = i.kv[0, i.indices[0, :, 0, 0].long(), 0, :512]
    assert torch.equal(out[0], v[:, None].expand_as(out[0]))
    assert float(dq.abs().max()) < 1e-4


def test_sentinels_are_neither_read_nor_written() -> None:
    """kv is a view between rows of inf and NaN; dkv is a view between canaries that an add of +0.0 would change."""
    case = Case(B=2, S=40, S_kv=128, H=16, K=128, invalid="out_of_range")
    i = case.inputs(device="cuda")
    i.indices[0] = i.indices[0].abs() % 128
    big = torch.full((2, 130, 1, 576), math.inf, dtype=i.kv.dtype, device="cuda")
    big[:, 129] = math.nan
    big[:, 1:129] = i.kv
    kv = big[:, 1:129]
    out, lse = cute_sparse_mla.fwd(i.q, kv, i.indices, backend="sm90")
    dense, dense_lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, backend="sm90")
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
    room = torch.full((4, 128, 1, 576), -0.0, dtype=torch.float32, device="cuda")
    dkv = room[1:3]
    dkv.zero_()
    cute_sparse_mla.bwd(i.q, kv, out, i.dout, i.indices, lse, dkv=dkv, backend="sm90")
    assert torch.isfinite(dkv).all()
    untouched = torch.cat((room[:1], room[3:]))
    assert bool(torch.signbit(untouched).all()), "a canary of -0.0 was added to"


def test_strides_give_the_same_bits() -> None:
    i = BASE.but(H=24, causal=True, length="random").inputs(device="cuda")
    options = dict(causal=True, topk_length=i.topk_length, backend="sm90")
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, **options)
    q = i.q.transpose(1, 2).contiguous().transpose(1, 2)
    kv = torch.cat((i.kv[:, :1], i.kv), dim=1)[:, 1:]
    indices = i.indices.transpose(1, 3).contiguous().transpose(1, 3)
    assert not q.is_contiguous() and not indices.is_contiguous()
    again, lse_again = cute_sparse_mla.fwd(q, kv, indices, **options)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    dq, _, _ = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **options)
    dout = i.dout.transpose(1, 2).contiguous().transpose(1, 2)
    dq_again, _, _ = cute_sparse_mla.bwd(q, kv, out, dout, indices, lse, **options)
    assert torch.equal(dq, dq_again)


def test_a_query_does_not_depend_on_the_others() -> None:
    i = BASE.but(H=64, K=256).inputs(device="cuda")
    out, _ = cute_sparse_mla.fwd(i.q, i.kv, i.indices, **SINGLE)
    part, _ = cute_sparse_mla.fwd(i.q[:, 7:12], i.kv, i.indices[:, 7:12], **SINGLE)
    assert torch.equal(out[:, 7:12], part)


def test_random_lengths_use_one_kernel() -> None:
    from cute_sparse_mla.hopper import build

    gen = torch.Generator().manual_seed(0)
    build.kernel.cache_clear()
    for _ in range(50):
        S, S_kv, K = (int(torch.randint(1, high, (), generator=gen)) for high in (40, 400, 300))
        i = Case(S=S, S_kv=S_kv, H=1 + S % 16, K=K).inputs(device="cuda")
        out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, **SINGLE)
        cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **SINGLE)
    assert build.kernel.cache_info().currsize == 3  # forward, backward, postprocess


@pytest.mark.parametrize("tokens", (1, 2, 4, 8, 16))
@pytest.mark.parametrize("case", GROUPED, ids=lambda case: f"{case.name}_{case.D}")
def test_token_groups(case: Case, tokens: int) -> None:
    """Every group size that fits within the precision clause, with a plan and without one."""
    if tokens * case.H // case.G > 64:
        pytest.skip("needs more rows than a tile has")
    judge = Judge(case.inputs(seed=tokens, device="cuda"))
    i, config = judge.inputs, cute_sparse_mla.SparseAttentionConfig(tokens_per_tile=tokens)
    plan = cute_sparse_mla.plan(
        i.indices, i.kv.shape, case.H // case.G, causal=i.causal, q_positions=i.q_positions,
        topk_length=i.topk_length, tokens_per_tile=tokens,
    )  # fmt: skip
    for given in ({"config": config}, {"plan": plan}):
        checks = judge.checks(run(i, cute_sparse_mla.fwd, cute_sparse_mla.bwd, **given))
        assert all(check.ok for check in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize("near", (True, False))
def test_the_device_decides(near: bool) -> None:
    """Tokens that share their rows are grouped, tokens that share none are not; either way the results are right."""
    case = Case(S=2048, S_kv=512 if near else 60_000, H=8, K=256)
    judge = Judge(case.inputs(device="cuda"))
    i = judge.inputs
    plan = cute_sparse_mla.plan(i.indices, i.kv.shape, case.H)
    assert plan.tokens_per_tile == 8 and plan.lists is not None and bool(plan.lists.chosen) == near
    for given in ({}, {"plan": plan}):
        checks = judge.checks(run(i, cute_sparse_mla.fwd, cute_sparse_mla.bwd, **given))
        assert all(check.ok for check in checks), "\n".join(map(str, checks))


def test_rows_in_order_where_dkv_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of single tokens, a few tokens at a time."""
    from cute_sparse_mla.hopper import launch

    case = CASES[0].but(H=80, S=40)
    judge = Judge(case.inputs(device="cuda"))
    monkeypatch.setattr(launch, "L2_BYTES", 0)
    monkeypatch.setattr(launch, "SORT_BYTES", 4 * 7 * case.B * case.G * case.K)
    checks = judge.checks(run(judge.inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


PAIRS = {"backend": "sm90", "config": cute_sparse_mla.SparseAttentionConfig(bwd_cluster=2)}
PAIR = BASE.but(H=128)
PAIR_CASES = (
    *(PAIR.but(name=f"blocks_{n}", K=64 * n, invalid="shuffled") for n in range(1, 6)),
    PAIR.but(name="groups_batch", B=2, H=144, G=2, invalid="out_of_range", length="random", causal=True, sink="random",
             duplicates=True, index_dtype=torch.int64, dlse=True),
    PAIR.but(name="fp16", dtype=torch.float16, invalid="odd", sink="random", positions="random"),
    PAIR.but(name="empty_rows", H=96, D=512, length="zero", sink="random", dlse=True),
    PAIR.but(name="long", S=40, S_kv=4096, K=2048, causal=True, length="random"),
    *(PAIR.but(name=f"heads_{H}", H=H, K=100, D=D, sink="random") for H in (65, 72, 120) for D in (512, 576)),
)  # fmt: skip


@pytest.mark.parametrize("case", PAIR_CASES, ids=lambda case: case.name + f"_{case.D}")
def test_pairs_of_ctas(case: Case) -> None:
    judge = Judge(case.inputs(seed=len(case.name), device="cuda"))
    checks = judge.checks(run(judge.inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, **PAIRS))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize("D", (512, 576))
def test_pairs_do_not_depend_on_timing(D: int) -> None:
    """What two CTAs send to each other is there when it is used: dq, to which nothing is added, is the same each time.

    So many tiles that pairs are at different places, and rows of different length.
    """
    case = Case(S=700, S_kv=3000, H=128, K=640, D=D, length="random", sink="random", causal=True)
    i = case.inputs(device="cuda")
    given = {**PAIRS, **i.options}
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, **given)
    first, _, d_sink = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **given)
    for _ in range(30):
        again, _, other = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **given)
        assert torch.equal(first, again) and torch.equal(d_sink, other)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("heads", (8, 64))
def test_graph_replay(heads: int, deterministic: bool) -> None:
    """Captured after one warm-up call, replayed on changed inputs, one row of them empty."""
    first, second = (BASE.but(H=heads).inputs(seed=seed, device="cuda") for seed in (1, 2))
    second.indices[:, 3] = -1
    q, kv, indices, dout = (t.clone() for t in (first.q, first.kv, first.indices, first.dout))

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = cute_sparse_mla.fwd(q, kv, indices, backend="sm90")
        how = dict(dkv_dtype=torch.float32, deterministic=deterministic, backend="sm90")
        return out, lse, *cute_sparse_mla.bwd(q, kv, out, dout, indices, lse, **how)

    replay = timing.captured(step, q.device)
    for mine, new in zip((q, kv, indices, dout), (second.q, second.kv, second.indices, second.dout), strict=True):
        mine.copy_(new)
    captured, eager = replay(), step()
    assert torch.equal(captured[0], eager[0]) and torch.equal(captured[1], eager[1])
    assert torch.equal(captured[2], eager[2])
    torch.testing.assert_close(captured[3], eager[3], rtol=1e-5, atol=1e-5)
    assert not deterministic or torch.equal(captured[3], eager[3])


@pytest.mark.parametrize("planned", (False, True))
def test_graph_replay_of_a_training_step(planned: bool) -> None:
    """The differentiable call, backward and plan in one graph, replayed on other inputs."""
    case = BASE.but(H=8, sink="random", causal=True)
    first, second = (case.inputs(seed=seed, device="cuda") for seed in (3, 4))
    second.indices[:, 5] = -1
    leaves = [t.clone().requires_grad_() for t in (first.q, first.kv, first.attn_sink)]
    indices, dout = first.indices.clone(), first.dout.clone()

    def step() -> tuple[torch.Tensor, ...]:
        q, kv, sink = leaves
        plan = cute_sparse_mla.plan(indices, kv.shape, case.H, causal=True) if planned else None
        out, lse = cute_sparse_mla.sparse_mla(q, kv, indices, causal=True, attn_sink=sink, return_lse=True, plan=plan)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    replay = timing.captured(step, indices.device)
    with torch.no_grad():
        for mine, new in zip(
            (*leaves, indices, dout), (second.q, second.kv, second.attn_sink, second.indices, second.dout), strict=True
        ):
            mine.copy_(new)
    captured, eager = replay(), step()
    for replayed, mine in zip(captured[:3], eager[:3], strict=True):
        assert torch.equal(replayed, mine)
    for replayed, mine in zip(captured[3:], eager[3:], strict=True):
        # Summed in any order.
        torch.testing.assert_close(replayed, mine, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("heads", (8, 64))
def test_nothing_synchronises(heads: int) -> None:
    """Forward, backward, the differentiable call and plans, with every option; the first call may compile."""
    case = BASE.but(
        H=heads, causal=True, positions="random", length="random", sink="random", dlse=True, index_dtype=torch.int64
    )
    i = case.inputs(device="cuda")
    bounds = dict(causal=True, q_positions=i.q_positions, topk_length=i.topk_length)

    def step() -> None:
        plan = cute_sparse_mla.plan(i.indices, i.kv.shape, heads, **bounds)
        for given in (None, plan):
            out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, attn_sink=i.attn_sink, plan=given, **bounds)
            cute_sparse_mla.bwd(
                i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, attn_sink=i.attn_sink, plan=given, **bounds
            )
            leaves = [t.detach().requires_grad_() for t in (i.q, i.kv, i.attn_sink)]
            cute_sparse_mla.sparse_mla(*leaves[:2], i.indices, attn_sink=leaves[2], plan=given, **bounds).backward(
                i.dout
            )

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_past_32_bits() -> None:
    """Rows past 2**31 elements of kv."""
    rows = 3_730_000
    kv = torch.empty((1, rows, 1, 576), dtype=torch.bfloat16, device="cuda")
    kv[:, -200:] = torch.randn((1, 200, 1, 576), device="cuda").to(kv.dtype)
    i = Case(S=16, S_kv=200, H=16, K=128).inputs(device="cuda")
    far = i.indices + (rows - 200)
    near_kv = kv[:, -200:].clone()
    out, lse = cute_sparse_mla.fwd(i.q, kv, far, backend="sm90")
    near, near_lse = cute_sparse_mla.fwd(i.q, near_kv, i.indices, backend="sm90")
    assert torch.equal(out, near) and torch.equal(lse, near_lse)
