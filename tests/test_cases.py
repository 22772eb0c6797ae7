"""Faults that users of sparse-attention kernels reported: every kind has its tests.

`KINDS` names for each kind the tests that cover it, here and in other files. Those here run on a CPU (the front-end and
the reference) and on a Hopper GPU (the kernels), with the same inputs and the float64 oracle; `sm90` alone marks what
only a GPU can show. The SM100 kernels have their own twins in the simulator.
"""

from __future__ import annotations

import ast
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench import timing
from bench.cases import BASE, Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs, Judge, compare_rows, run

HERE = Path(__file__).parent
INF = math.inf
DEVICES = (pytest.param("cpu", id="cpu"), pytest.param("cuda", id="sm90", marks=pytest.mark.sm90))
on_both = pytest.mark.parametrize("device", DEVICES)
sm90 = pytest.mark.sm90

KINDS = {
    "sentinel read": "test_cases::test_poison_beside_kv_is_never_read "
    "test_sm100_forward::test_head_count_with_sentinels",
    "sentinel scatter": "test_cases::test_only_selected_rows_are_added_to test_sm100_backward::test_contract",
    "holes": "test_cases::test_invalid_slots_equal_the_compacted_row",
    "out of range": "test_cases::test_out_of_range_equals_minus_one test_sm100_forward::test_contract",
    "length": "test_cases::test_slots_beyond_the_length_are_ignored",
    "groups": "test_cases::test_groups_equal_their_own_calls",
    "padding cost": "test_cases::test_invalid_slots_never_cost_time",
    "empty rows": "test_cases::test_empty_rows test_reference::test_empty_rows_let_nothing_through",
    "sink": "test_cases::test_sinks test_reference::test_sink_extremes",
    "lse base": "test_cases::test_lse_counts_the_slots test_compat::test_tilelang_example",
    "lse gradient": "test_cases::test_gradients_through_lse test_autograd::test_two_way_merge_of_partials "
    "test_reference::test_gradcheck",
    "scale": "test_validation::test_scales_of_every_kind_give_the_same_bits "
    "test_compile::test_scales_of_every_kind_share_a_graph",
    "block count": "test_cases::test_block_counts test_hopper_matrix::test_matrix",
    "compiler": "test_cases::test_many_seeds test_hopper_build::test_other_tilelang_versions_are_refused_by_name",
    "hot rows": "test_cases::test_hot_rows",
    "head sweep": "test_hopper_matrix::test_every_head_count test_sm100_backward::test_head_count_with_sentinels",
    "column halves": "test_cases::test_halves_of_the_columns test_sm100_backward::test_contract",
    "K odd": "test_cases::test_any_number_of_slots",
    "no rope tail": "test_cases::test_without_a_rope_tail",
    "32-bit offsets": "test_cases::test_offsets_past_32_bits test_sm100_forward::test_offsets_past_32_bits",
    "grid limits": "test_cases::test_grid_limits",
    "memory": "test_hopper_matrix::test_backward_memory test_reference::test_working_set_stays_near_chunk_bytes "
    "test_sm100_backward::test_workspace_is_bounded_at_any_length",
    "recompiles": "test_cases::test_no_recompiles test_compile::test_one_compile_over_fifty_lengths",
    "cache": "test_load::test_processes_share_a_cold_cache test_load::test_a_killed_compile_leaves_no_trace "
    "test_load::test_a_folder_that_cannot_be_written test_load::test_load_on_a_gpu "
    "test_sm100_build::test_the_cache_key_knows_what_changes_code "
    "test_hopper_build::test_what_was_built_before_changes_no_code",
    "device": "test_cases::test_tensors_on_another_device test_validation::test_wrong_argument",
    "stream": "test_cases::test_a_side_stream test_hopper_kernels::test_graph_replay "
    "test_hopper_kernels::test_graph_replay_of_a_training_step",
    "import": "test_install::test_import_is_light test_install::test_fork_after_import "
    "test_install::test_import_works_without_any_optional_dependency "
    "test_install::test_every_combination_of_missing_packages",
    "strides": "test_validation::test_strides_give_the_same_bits test_hopper_kernels::test_strides_give_the_same_bits "
    "test_sm100_forward::test_strided_tensors_are_read_in_place",
    "empty": "test_cases::test_nothing_to_do test_dispatch::test_empty_calls",
    "wrong arguments": "test_validation::test_wrong_argument test_validation::test_whole_table_under_optimised_python",
    "unknown GPU": "test_dispatch::test_other_gpus_run_the_reference_with_a_warning "
    "test_dispatch::test_a_kernel_asked_for_on_an_unknown_gpu_is_an_error",
    "packing": "test_cases::test_documents_equal_their_own_runs "
    "test_autograd::test_packed_documents_equal_their_own_runs",
    "context parallel": "test_cases::test_queries_split_four_ways "
    "test_parallel::test_ranks_have_the_parts_of_the_whole_call",
    "recompute": "test_autograd::test_activation_checkpointing test_compile::test_checkpointing "
    "test_autograd::test_changing_saved_indices_in_place_is_noticed",
    "determinism": "test_autograd::test_deterministic_backward_is_the_same_a_hundred_times "
    "test_hopper_deterministic::test_a_hundred_times_on_a_gpu",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_tests_that_exist(kind: str) -> None:
    for name in KINDS[kind].split():
        file, _, test = name.partition("::")
        tree = ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def misses(inputs: Inputs, **options: Any) -> list[str]:
    """What forward and backward miss of the precision clause."""
    results = run(inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, **options)
    return [str(check) for check in Judge(inputs).checks(results) if not check.ok]


# What makes results independent of the other queries of a call; `misses` leaves the grouping of tokens to the device.
ALONE = SparseAttentionConfig(tokens_per_tile=1)


def forward(inputs: Inputs, config: SparseAttentionConfig | None = ALONE) -> tuple[Tensor, Tensor]:
    return cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, config=config, **inputs.options)


def backward(
    inputs: Inputs, out: Tensor, lse: Tensor, config: SparseAttentionConfig | None = ALONE, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    return cute_sparse_mla.bwd(
        inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, config=config, **inputs.options,
        **options,
    )  # fmt: skip


def same_results(first: Inputs, second: Inputs) -> None:
    """Two calls that mean the same: out, lse and dq bit for bit, dkv up to the order of its sums."""
    (out, lse), (other_out, other_lse) = forward(first), forward(second)
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
    dq, dkv, _ = backward(first, out, lse, dkv_dtype=torch.float32)
    other_dq, other_dkv, _ = backward(second, out, lse, dkv_dtype=torch.float32)
    assert torch.equal(dq, other_dq)
    torch.testing.assert_close(dkv, other_dkv, rtol=1e-5, atol=1e-5 * float(dkv.abs().max()))


def judged_alike(first: Inputs, second: Inputs) -> None:
    """Two calls that mean the same, though blocks may hold other slots: both by the first one's oracle."""
    judge = Judge(first)
    for inputs in (first, second):
        out, lse = forward(inputs)
        dq, dkv, d_sink = backward(inputs, out, lse)
        checks = judge.forward_checks(out, lse) + judge.gradient_checks(out, lse, dq, dkv, d_sink)
        assert all(check.ok for check in checks), "\n".join(map(str, checks))


# -- slots that must not count -------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("poison", [INF, math.nan])
def test_poison_beside_kv_is_never_read(poison: float, device: str) -> None:
    """kv is a view between poisoned rows, and half of the slots are -1."""
    i = BASE.but(invalid="shuffled").inputs(device=device)
    room = torch.full((1, 258, 1, 576), poison, dtype=i.kv.dtype, device=device)
    room[:, 1:257] = i.kv
    same_results(i, replace(i, kv=room[:, 1:257]))
    assert misses(i) == []


@on_both
def test_only_selected_rows_are_added_to(device: str) -> None:
    """-1 in batch entry 1 only; entry 0's last row is selected by nobody; canaries round the caller's dkv."""
    i = BASE.but(B=2, invalid="shuffled", S_kv=200).inputs(device=device)
    i.indices[0] = i.indices[0].abs() % 199
    assert bool((i.indices[0] >= 0).all()) and bool((i.indices[1] == -1).any())
    out, lse = forward(i)
    room = torch.full((4, 200, 1, 576), -0.0, device=device)
    _, dkv, _ = backward(i, out, lse, dkv=room[1:3])
    # An add of +0.0 would flip the sign of a canary.
    assert bool(torch.signbit(room[0]).all()) and bool(torch.signbit(room[3]).all())
    assert bool(torch.signbit(dkv[0, 199]).all())


@on_both
@pytest.mark.parametrize("kind", ["odd", "first 64", "first 128", "last 100"])
def test_invalid_slots_equal_the_compacted_row(kind: str, device: str) -> None:
    i = BASE.but(S=16, K=256, S_kv=400, sink="random", dlse=True).inputs(device=device)
    slot = torch.arange(256, device=device)
    holes = {"odd": slot % 2 == 1, "first 64": slot < 64, "first 128": slot < 128, "last 100": slot >= 156}[kind]
    with_holes = replace(i, indices=i.indices.masked_fill(holes, -1))
    compact = replace(i, indices=i.indices[..., ~holes])
    assert misses(with_holes) == []
    judged_alike(with_holes, compact)


@on_both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_out_of_range_equals_minus_one(dtype: torch.dtype, device: str) -> None:
    i = BASE.but(S=16, invalid="out_of_range", index_dtype=dtype).inputs(device=device)
    outside = (i.indices < 0) | (i.indices >= 256)
    assert int(outside.sum()) > 100
    same_results(i, replace(i, indices=i.indices.masked_fill(outside, -1)))


@on_both
@pytest.mark.parametrize("S", [63, 64, 65, 128])
def test_slots_beyond_the_length_are_ignored(S: int, device: str) -> None:
    """Valid-looking rows and garbage beyond each length."""
    i = BASE.but(S=S, length="random").inputs(seed=S, device=device)
    beyond = torch.arange(128, device=device) >= i.topk_length[..., None, None]
    assert bool(beyond.any())
    garbage = replace(
        i, indices=torch.where(beyond & (torch.arange(128, device=device) % 2 == 1), 2**31 - 1, i.indices)
    )
    same_results(i, garbage)
    judged_alike(i, replace(i, indices=i.indices.masked_fill(beyond, -1), topk_length=None))


@on_both
def test_groups_equal_their_own_calls(device: str) -> None:
    """Different kv and different indices per group."""
    i = BASE.but(S=16, H=48, G=2, invalid="shuffled").inputs(device=device)
    out, lse = forward(i)
    for group in range(2):
        own = replace(
            i, q=i.q[:, :, group * 24 : (group + 1) * 24], kv=i.kv[:, :, group : group + 1],
            indices=i.indices[:, :, group : group + 1],
        )  # fmt: skip
        own_out, own_lse = forward(own)
        assert torch.equal(out[:, :, group * 24 : (group + 1) * 24], own_out)
        assert torch.equal(lse[:, :, group * 24 : (group + 1) * 24], own_lse)
    assert misses(i) == []


@on_both
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sink", [None, "random"])
@pytest.mark.parametrize("invalid", ["one_row", "all"])
def test_empty_rows(invalid: str, sink: str | None, device: str) -> None:
    i = BASE.but(S=16, invalid=invalid, sink=sink, dlse=True).inputs(device=device)
    empty = (i.indices < 0).all(dim=-1)[..., 0]
    i.dlse[empty] = math.nan
    out, lse = forward(i)
    dq, dkv, d_sink = backward(i, out, lse)
    assert bool((lse[empty] == -INF).all()) and not bool(out[empty].any()) and not bool(dq[empty].any())
    assert bool(dkv.isfinite().all()) and (d_sink is None or bool(d_sink.isfinite().all()))
    if invalid == "all":
        assert not bool(dkv.any()) and (d_sink is None or not bool(d_sink.any()))
    assert misses(i) == []


# -- sinks and lse -------------------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("D", [512, 576])
@pytest.mark.parametrize("q_scale", [1.0, 16.0, 64.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["all valid", "half", "none"])
@pytest.mark.parametrize("sink", [None, 0.0, 50.0, 100.0, INF, -INF])
def test_sinks(sink: float | None, share: float, q_scale: float, D: int, device: str) -> None:
    case = BASE.but(S=6, S_kv=80, H=4, K=40, D=D, sink=sink, q_scale=q_scale)
    assert (
        misses(case.but(invalid="shuffled" if share == 0.5 else "all" if share else "none").inputs(device=device)) == []
    )


@on_both
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 2047])
def test_lse_counts_the_slots(n: int, device: str) -> None:
    """q = 0: the natural logarithm of the number of valid slots."""
    i = BASE.but(S=4, K=2048, length=None).inputs(device=device)
    i.q.zero_()
    i.indices[..., n:] = -1
    _, lse = forward(i)
    assert float((lse - math.log(n)).abs().max()) <= 1e-6 * max(1.0, math.log(n))


@on_both
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("sink", [None, 20.0, 88.0, 89.0, 200.0, INF])
def test_gradients_through_lse(sink: float | None, dlse: bool, device: str) -> None:
    """NaN and infinite dlse on an empty row change nothing."""
    i = BASE.but(S=8, sink=sink, invalid="one_row", dlse=dlse).inputs(device=device)
    if dlse:
        i.dlse[:, 4, ::2], i.dlse[:, 4, 1::2] = math.nan, INF
    assert misses(i) == []


@on_both
def test_a_loss_of_lse_alone(device: str) -> None:
    i = BASE.but(S=8, sink=30.0).inputs(device=device)
    out, lse = forward(i)
    alone = replace(i, dout=torch.zeros_like(i.dout), dlse=torch.ones_like(lse))
    gradients = backward(alone, out, lse)
    checks = Judge(alone).gradient_checks(out, lse, *gradients)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    assert not bool(gradients[2].any())


# -- shapes --------------------------------------------------------------------------------------------------------


@sm90
@pytest.mark.parametrize("invalid", ["none", "shuffled"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("K", [*(64 * n for n in range(1, 9)), 2048])
def test_block_counts(K: int, heads: int, invalid: str) -> None:
    i = BASE.but(S=16, S_kv=2048, H=heads, K=K, invalid=invalid).inputs(seed=K + heads, device="cuda")
    assert misses(i) == []
    assert float(forward(i)[0].abs().max()) <= float(i.kv[..., :512].abs().max())


@sm90
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 100, 128])
def test_many_seeds(heads: int) -> None:
    for seed in range(20):
        case = BASE.but(S=8, H=heads, K=(64, 128, 192)[seed % 3], D=(512, 576)[seed % 2], invalid="shuffled")
        assert misses(case.inputs(seed, "cuda")) == [], seed


@on_both
def test_hot_rows(device: str) -> None:
    """All queries select the same 64 rows: those are right, and the others exactly 0."""
    S = 64 if device == "cpu" else 4096
    i = BASE.but(S=S, S_kv=300, K=64, H=16).inputs(device=device)
    rows = torch.arange(100, 164, dtype=torch.int32, device=device)
    hot = replace(i, indices=rows.expand(1, S, 1, 64))
    out, lse = forward(hot)
    _, dkv, _ = backward(hot, out, lse)
    assert not bool(dkv[:, :100].any()) and not bool(dkv[:, 164:].any())
    assert all(check.ok for check in Judge(hot).gradient_checks(out, lse, dkv=dkv))


@on_both
@pytest.mark.parametrize("heads", [24, 48, 64])
def test_halves_of_the_columns(heads: int, device: str) -> None:
    """Columns 0 to 255, 256 to 511 and the tail of dkv apart."""
    i = BASE.but(S=16, H=heads).inputs(device=device)
    judge = Judge(i)
    out, lse = forward(i)
    dkv = backward(i, out, lse)[1]
    exact, granted = (judge.gradients(out, lse, rule).dkv for rule in judge.rules)
    for first, last in ((0, 256), (256, 512), (512, 576)):
        check = compare_rows(f"dkv {first}", *(t[..., first:last] for t in (dkv, exact, granted)))
        assert check.ok, str(check)


@on_both
@pytest.mark.parametrize("S_kv", [64, 4096])
@pytest.mark.parametrize("K", [0, 1, 17, 100, 2047, 2051])
def test_any_number_of_slots(K: int, S_kv: int, device: str) -> None:
    """More slots than rows included. With one slot dq is a full cancellation: its size is judged alone."""
    i = BASE.but(S=4, S_kv=S_kv, K=K).inputs(seed=K, device=device)
    if K != 1:
        assert misses(i) == []
        return
    out, lse = forward(i)
    assert torch.equal(out[0], i.kv[0, i.indices[0, :, 0, 0].long(), 0, None, :512].expand_as(out[0]))
    assert float(backward(i, out, lse)[0].abs().max()) < 1e-4


@on_both
def test_nothing_to_do(device: str) -> None:
    """Each of B, S, S_kv and K is 0: empty or zero results, and a connected graph."""
    for size in ("B", "S", "S_kv", "K"):
        i = BASE.but(H=4, **{size: 0}).inputs(device=device)
        leaves = [t.clone().requires_grad_() for t in (i.q, i.kv)]
        out, lse = cute_sparse_mla.sparse_mla(*leaves, i.indices, return_lse=True)
        assert not bool(out.any()) and bool((lse == -INF).all())
        (out.sum() + lse.sum()).backward()
        assert all(leaf.grad.shape == leaf.shape and not bool(leaf.grad.any()) for leaf in leaves)


def judged_tokens(inputs: Inputs, out: Tensor, lse: Tensor, dq: Tensor, tokens: Tensor) -> None:
    """Those query tokens of a packed call against the oracle on them alone."""
    part = replace(inputs, q=inputs.q[tokens], indices=inputs.indices[tokens], dout=inputs.dout[tokens])
    checks = Judge(part).forward_checks(out[tokens], lse[tokens])
    checks += Judge(part).gradient_checks(out[tokens], lse[tokens], dq=dq[tokens])
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


@on_both
@pytest.mark.parametrize(("B", "S"), [(1, 65535), (1, 65536), (1, 65537), (65536, 1)])
def test_grid_limits(B: int, S: int, device: str) -> None:
    """More tokens, or batch entries, than a grid's second and third dimensions take."""
    if device == "cpu" and B == 1:
        pytest.skip("a CPU has no grid: the batch is enough")
    gen = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device, dtype=torch.bfloat16)

    q, kv, dout = normal(B, S, 1, 576), normal(B, 3 if B > 1 else 50, 1, 576), normal(B, S, 1, 512)
    rows = torch.randint(-1, kv.shape[1], (B, S, 1, 3), generator=gen, device=device, dtype=torch.int32)
    i = Inputs(q, kv, rows, dout, 512, 576**-0.5)
    out, lse = forward(i)
    dq, dkv, _ = backward(i, out, lse)
    if B == 1:
        packed = replace(i, q=q[0], kv=kv[0], indices=rows[0], dout=dout[0])
        ends = torch.tensor([0, 1, S // 2, S - 2, S - 1], device=device)
        judged_tokens(packed, out[0], lse[0], dq[0], ends)
        return
    ends = torch.tensor([0, 1, B // 2, B - 1], device=device)
    part = replace(i, q=q[ends], kv=kv[ends], indices=rows[ends], dout=dout[ends])
    checks = Judge(part).forward_checks(out[ends], lse[ends])
    checks += Judge(part).gradient_checks(out[ends], lse[ends], dq=dq[ends], dkv=dkv[ends])
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


@sm90
def test_offsets_past_32_bits() -> None:
    """q and out of more than 2**31 elements; rows of kv past 2**31 elements, forward and backward."""
    gen = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16)

    T = 65600
    q, kv, dout = normal(T, 64, 576), normal(500, 1, 576), normal(T, 64, 512)
    rows = torch.randint(0, 500, (T, 1, 64), generator=gen, device="cuda", dtype=torch.int32)
    i = Inputs(q, kv, rows, dout, 512, 576**-0.5)
    out, lse = forward(i)
    dq, _, _ = backward(i, out, lse)
    judged_tokens(i, out, lse, dq, torch.tensor([0, T // 2, T - 2, T - 1], device="cuda"))
    del i, q, out, dq, dout
    far = torch.zeros((3_730_000, 1, 576), dtype=torch.bfloat16, device="cuda")
    far[-200:] = kv[:200]
    near = BASE.but(S=16, S_kv=200, packed=True).inputs(device="cuda")
    # In rising order, as the backward takes each token's rows where kv has so many.
    near = replace(near, kv=kv[:200].contiguous(), indices=near.indices.sort(dim=-1).values)
    distant = replace(near, kv=far, indices=near.indices + (far.shape[0] - 200))
    (out, lse), (same, same_lse) = forward(near), forward(distant)
    assert torch.equal(out, same) and torch.equal(lse, same_lse)
    dq, dkv, _ = backward(near, out, lse)
    far_dq, far_dkv, _ = backward(distant, out, lse)
    assert torch.equal(dq, far_dq) and not bool(far_dkv[:-200].any())
    torch.testing.assert_close(dkv.float(), far_dkv[-200:].float(), rtol=2e-2, atol=1e-3 * float(dkv.abs().max()))


@sm90
def test_no_recompiles() -> None:
    """50 lengths, K 1900 to 2048, sliced kv: one kernel of each kind."""
    from cute_sparse_mla.hopper import build

    gen = torch.Generator().manual_seed(0)
    counts = set()
    for _ in range(50):
        S, S_kv, K = (
            int(torch.randint(low, high, (), generator=gen)) for low, high in ((1, 20), (1, 3000), (1900, 2049))
        )
        i = BASE.but(S=S, S_kv=S_kv + 1, K=K, H=1 + S % 16).inputs(device="cuda")
        i = replace(i, kv=i.kv[:, 1:])
        backward(i, *forward(i))
        counts.add(build.kernel.cache_info().currsize)
    assert len(counts) == 1


# -- costs ---------------------------------------------------------------------------------------------------------


def medians(calls: dict[str, Any]) -> dict[str, float]:
    return {name: s.ms for name, s in timing.interleaved(calls, torch.device("cuda"), reps=30).items()}


def packed_case(T: int, D: int, K: int) -> Case:
    return Case(S=T, S_kv=T, H=16, D=D, K=K, packed=True, duplicates=True)


def never_slower_with_invalid_slots(case: Case, config: SparseAttentionConfig | None) -> None:
    """Backward at 0, 50 and 95 % of -1: never slower than with all slots valid."""
    calls = {}
    for share in (0.0, 0.5, 0.95):
        i = case.but(invalid="shuffled" if share else "none", share=share).inputs(device="cuda")
        out, lse = forward(i, config)
        calls[f"{share}"] = lambda i=i, out=out, lse=lse: backward(i, out, lse, config)
        calls[f"{share}"]()
    ms = medians(calls)
    # 3 %: what two runs of the same kernel differ by.
    assert ms["0.5"] <= 1.03 * ms["0.0"] and ms["0.95"] <= 1.03 * ms["0.5"], ms


@sm90
def test_invalid_slots_never_cost_time() -> None:
    """Of single tokens."""
    never_slower_with_invalid_slots(packed_case(2048, 576, 1024), ALONE)


@sm90
def test_invalid_slots_never_cost_time_where_the_device_decides() -> None:
    """Of 8 heads, whose tokens may share lists: few valid slots are few in a union, not alone."""
    never_slower_with_invalid_slots(Case(S=2048, S_kv=4096, H=8, D=576, K=1024), None)


@sm90
def test_without_a_rope_tail() -> None:
    """D = d_v = 512 is judged, and faster than the same with a tail of zeros."""
    i = packed_case(2048, 512, 1024).inputs(device="cuda")
    assert misses(BASE.but(D=512).inputs(device="cuda")) == []
    tail = replace(i, q=torch.nn.functional.pad(i.q, (0, 64)), kv=torch.nn.functional.pad(i.kv, (0, 64)))
    calls = {}
    for name, inputs in (("512", i), ("576", tail)):
        out, lse = forward(inputs)
        calls[f"fwd {name}"] = lambda inputs=inputs: forward(inputs)
        calls[f"bwd {name}"] = lambda inputs=inputs, out=out, lse=lse: backward(inputs, out, lse)
    ms = medians(calls)
    assert ms["fwd 512"] < ms["fwd 576"] and ms["bwd 512"] < ms["bwd 576"], ms


# -- devices, streams, documents, ranks ----------------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_tensors_on_another_device() -> None:
    i, other = (BASE.inputs(device=f"cuda:{number}") for number in (1, 0))
    with torch.cuda.device(0):
        assert misses(i) == []
    with pytest.raises(ValueError, match="kv: must be on q's device cuda:1"):
        cute_sparse_mla.fwd(i.q, other.kv, i.indices)


@sm90
def test_a_side_stream() -> None:
    """Inputs that a side stream makes late, behind a sleep, are read in order there."""
    i = BASE.inputs(device="cuda")
    out, lse = forward(i)
    late = replace(i, q=torch.zeros_like(i.q), kv=torch.zeros_like(i.kv), indices=torch.full_like(i.indices, -1))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for name in ("q", "kv", "indices"):
            getattr(late, name).copy_(getattr(i, name))
        late_out, late_lse = forward(late)
        late_dq = backward(late, late_out, late_lse)[0]
    stream.synchronize()
    assert torch.equal(out, late_out) and torch.equal(lse, late_lse)
    assert torch.equal(backward(i, out, lse)[0], late_dq)


@on_both
def test_documents_equal_their_own_runs(device: str) -> None:
    """An empty and two one-token documents among them; global rows, each document's own."""
    ends = [0, 1, 1, 64, 65, 256]
    i = BASE.but(S=256, K=64, packed=True, causal=True).inputs(device=device)
    number = torch.tensor(ends, device=device)
    token = torch.arange(256, device=device)
    first = number[torch.searchsorted(number, token, right=True) - 1]
    rows = first[:, None] + torch.arange(64, device=device)
    i = replace(i, indices=torch.where(rows <= token[:, None], rows, -1).int()[:, None])
    out, lse = forward(i)
    dq, dkv, _ = backward(i, out, lse, dkv_dtype=torch.float32)
    for a, b in itertools.pairwise(ends):
        part = {name: getattr(i, name)[a:b] for name in ("q", "kv", "dout")}
        own = replace(i, **part, indices=torch.where(i.indices[a:b] < 0, -1, i.indices[a:b] - a))
        own_out, own_lse = forward(own)
        own_dq, own_dkv, _ = backward(own, own_out, own_lse, dkv_dtype=torch.float32)
        assert torch.equal(out[a:b], own_out) and torch.equal(lse[a:b], own_lse) and torch.equal(dq[a:b], own_dq)
        torch.testing.assert_close(dkv[a:b], own_dkv, rtol=1e-5, atol=1e-5 * float(dkv.abs().max()))


@on_both
def test_queries_split_four_ways(device: str) -> None:
    """kv whole: out bit for bit, the parts' dkv add up to 1e-5; where the device groups tokens, parts are precise."""
    i = BASE.but(S=128, packed=True, causal=True, invalid="shuffled").inputs(device=device)
    out, lse = forward(i)
    whole = backward(i, out, lse, dkv_dtype=torch.float32)[1]
    added = torch.zeros_like(whole)
    for part in torch.arange(128, device=device).chunk(4):
        taken = {name: getattr(i, name)[part] for name in ("q", "indices", "dout")}
        own = replace(i, **taken, q_positions=part + 256 - 128)
        own_out, own_lse = forward(own)
        assert torch.equal(own_out, out[part]) and torch.equal(own_lse, lse[part])
        backward(own, own_out, own_lse, dkv=added)
        assert misses(own) == []
    assert float((added - whole).norm() / whole.norm()) <= 1e-5
