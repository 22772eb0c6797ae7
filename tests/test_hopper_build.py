"""The SM90 path without a GPU: what is refused before compiling, the plan's sums, and the compile-only sweep."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys

import pytest
import torch
from cute_sparse_mla.hopper import launch
from cute_sparse_mla.hopper.plan import SMEM_LIMIT, Plan

from bench import fixed_shapes
from cute_sparse_mla import config as config_table
from cute_sparse_mla import env
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import MissingDependencyError, UnsupportedError
from cute_sparse_mla.problem import HEAD_CLASSES, KERNEL_DIMS, Problem

NO_COMPILER = not env.is_installed("tilelang") or shutil.which("nvcc") is None


def problem(heads: int = 16, D: int = 576, **changes: object) -> Problem:
    fields = dict(B=1, S=4, S_kv=64, H=heads, G=1, K=64, D=D, d_v=512, dtype=torch.bfloat16, index_dtype=torch.int32)
    return Problem(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: launch.TILELANG_VERSIONS[-1])
    launch._check_tilelang.cache_clear()


@pytest.mark.parametrize("D", [D for D, _ in KERNEL_DIMS])
def test_shared_memory_fits(D: int) -> None:
    plan = Plan(D, "bfloat16", "int32")
    assert sum(plan.forward_smem.values()) <= SMEM_LIMIT
    assert sum(plan.backward_smem.values()) <= SMEM_LIMIT
    assert sum(plan.pair_smem.values()) <= SMEM_LIMIT
    for cluster, parts in ((None, plan.backward_smem), (2, plan.pair_smem)):
        found = launch.smem_bytes(problem(128, D), SparseAttentionConfig(bwd_cluster=cluster))
        assert found == {"forward": sum(plan.forward_smem.values()), "backward": sum(parts.values())}


@pytest.mark.parametrize("D", [D for D, _ in KERNEL_DIMS])
@pytest.mark.parametrize("heads", HEAD_CLASSES)
def test_every_table_row_is_accepted(tested_version: None, heads: int, D: int) -> None:
    filled, row = config_table.choose("sm90", problem(heads, D), SparseAttentionConfig())
    launch.check(problem(heads, D), filled)
    assert row.reason and row.figure


def test_config_past_shared_memory_is_refused_with_the_arithmetic(tested_version: None) -> None:
    with pytest.raises(UnsupportedError, match=r"bwd_stages = 1, not 2 .*would need 305408 of 232448 bytes"):
        launch.check(problem(), SparseAttentionConfig(bwd_stages=2))


def test_pairs_of_ctas_are_for_more_than_a_cta_has_rows(tested_version: None) -> None:
    for heads in (65, 128):
        launch.check(problem(heads), SparseAttentionConfig(bwd_cluster=2))
    launch.check(problem(), SparseAttentionConfig(bwd_cluster=1))
    with pytest.raises(UnsupportedError, match=r"bwd_cluster = 2 is for more than 64 heads per group, .* not 64"):
        launch.check(problem(64), SparseAttentionConfig(bwd_cluster=2))
    with pytest.raises(UnsupportedError, match="tokens_per_tile = 2 with 128 heads"):
        launch.check(problem(128), SparseAttentionConfig(bwd_cluster=2, tokens_per_tile=2))
    needed = sum(Plan(576, "bfloat16", "int32").pair_smem.values()) + 64 * 288 * 2
    with pytest.raises(UnsupportedError, match=rf"bwd_stages = 1, not 2 .*would need {needed} of 232448 bytes"):
        launch.check(problem(128), SparseAttentionConfig(bwd_cluster=2, bwd_stages=2))


@pytest.mark.skipif(not env.is_installed("tilelang"), reason="needs tilelang")
@pytest.mark.parametrize(
    ("kind", "tokens"), [("forward", 1), ("forward", 8), ("backward", 1), ("backward", 8), ("backward_pair", 1)]
)
def test_fixed_shapes_know_every_variable(kind: str, tokens: int) -> None:
    """TileLang renames a variable that a builder also calls otherwise, as the tiles of one token each."""
    function, variables = fixed_shapes._dynamic_build(kind, Plan(576, "bfloat16", "int32", tokens))
    args: list[torch.Tensor | int] = []
    for parameter in function.params:
        ndim = len(function.buffer_map[parameter].shape) if parameter in function.buffer_map else 0
        args.append(torch.empty_strided([2] * ndim, [3] * ndim) if ndim else 0)
    assert dict(fixed_shapes._extents(function, variables, tuple(args))).keys() == variables.keys()


@pytest.mark.parametrize(
    ("S_kv", "K", "tokens", "waves"),
    [(16_384, 2048, 1, None), (32_768, 2048, 1, 8), (65_536, 2048, 1, 2), (32_768, 2048, 2, None),
     (65_536, 2048, 2, 4), (65_536, 2048, 8, 4), (131_072, 2048, 8, 2), (65_536, 640, 1, None)],
)  # fmt: skip
def test_backwards_in_order_go_in_waves_where_dkv_exceeds_the_l2(
    S_kv: int, K: int, tokens: int, waves: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "multiprocessors", lambda device: 132)
    for heads, tiles in ((64, 1), (128, 2)):
        found = launch._tiles_at_once(problem(heads, S=70_000, S_kv=S_kv, K=K), tokens, torch.device("cpu"))
        assert found == (70_000 if waves is None else waves * 132 // tiles)


def test_token_groups_that_do_not_fit_are_refused(tested_version: None) -> None:
    for heads, tokens in ((1, 16), (4, 16), (8, 8), (9, 4), (32, 2), (128, 1)):
        launch.check(problem(heads), SparseAttentionConfig(tokens_per_tile=tokens))
    with pytest.raises(UnsupportedError, match=r"tokens_per_tile in \(1, 2, 4, 8, 16\), not 3"):
        launch.check(problem(), SparseAttentionConfig(tokens_per_tile=3))
    with pytest.raises(
        UnsupportedError, match="8 with 9 heads per group needs more than the 64 rows of a tile; 4 fits"
    ):
        launch.check(problem(9), SparseAttentionConfig(tokens_per_tile=8))


@pytest.mark.parametrize(("has_length", "whole", "rounds"), [(0, False, 5), (0, True, 4), (1, False, 3), (1, True, 3)])
def test_tiles_of_a_cta(has_length: int, whole: bool, rounds: int) -> None:
    """Of 9 tiles on 2 multiprocessors: a forward's CTA has one more than all have, a backward's has not."""
    slots = torch.empty((1, 9, 1, 64), dtype=torch.int32)
    nothing = torch.empty(0)
    gather = launch.Gather(1, slots, nothing, nothing, nothing, nothing, -1, (0, has_length, 0))
    assert launch._rounds(problem(S=9), gather, 2, whole) == (2, rounds)
    assert launch._rounds(problem(S=9), gather, 100, whole) == (100, 1)
    assert launch._rounds(problem(128, S=9), gather, 2, whole, tiles_per_group=1) == (2, rounds)


def test_other_tilelang_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.14")
    launch._check_tilelang.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"0\.1\.14 is installed: pip install tilelang==0\.1\.15"):
        launch.check(problem(), SparseAttentionConfig())
    launch._check_tilelang.cache_clear()


@pytest.mark.skipif(NO_COMPILER, reason="needs tilelang and nvcc")
def test_what_was_built_before_changes_no_code() -> None:
    """Two processes build the same two kernels in two orders: each kernel's source is the same, which none compiles."""
    code = (
        "import hashlib, sys; from cute_sparse_mla.config import SparseAttentionConfig\n"
        "from cute_sparse_mla.hopper import build, launch; from tests.test_hopper_build import problem\n"
        "from tilelang.contrib import nvcc; nvcc.compile_cuda = lambda *_, **options: bytearray(b'none')\n"
        "for kind in sys.argv[1:]:\n"
        "    source = build.kernel(kind, launch.plan_of(problem())).get_kernel_source()\n"
        "    print(kind, hashlib.sha256(source.encode()).hexdigest())\n"
    )
    orders = (("forward", "backward"), ("backward", "forward"))
    runs = [subprocess.run([sys.executable, "-c", code, *order], check=True, capture_output=True, text=True).stdout
            for order in orders]  # fmt: skip
    first, second = (sorted(line for line in run.splitlines() if line.startswith(orders[0])) for run in runs)
    assert len(first) == 2 and first == second


def test_importing_the_backend_leaves_tilelang_alone() -> None:
    code = "import sys, cute_sparse_mla.hopper; assert 'tilelang' not in sys.modules and 'tvm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(NO_COMPILER, reason="needs tilelang and nvcc")
@pytest.mark.parametrize("D", [D for D, _ in KERNEL_DIMS])
@pytest.mark.parametrize("heads", HEAD_CLASSES)
def test_compiles_for_sm_90a_without_a_gpu(heads: int, D: int) -> None:
    """One kernel serves all head classes of a D: only the first of them compiles."""
    from cute_sparse_mla.hopper import build

    launch.warmup(problem(heads, D), SparseAttentionConfig(tokens_per_tile=1), backward=True)
    for kind in ("forward", "backward"):
        source = build.kernel(kind, launch.plan_of(problem(heads, D))).get_kernel_source()
        assert "wgmma" in source
