"""The SM100 path without running a kernel: plans, tiles, refusals, the disk cache, what ptxas says."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cute_sparse_mla.sm100 import cache, launch
from cute_sparse_mla.sm100.backward_plan import BackwardPlan
from cute_sparse_mla.sm100.heads import ROWS_PER_CTA, Rows, heads_first, rows_for, split
from cute_sparse_mla.sm100.plan import (
    REGISTER_FILE,
    REGISTERS,
    ROLE,
    SMEM_LIMIT,
    THREADS,
    TMEM_COLUMNS,
    Area,
    Plan,
    PlanError,
    check_areas,
)  # fmt: skip

import cute_sparse_mla
from cute_sparse_mla import config as config_table
from cute_sparse_mla import env
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import MissingDependencyError, UnsupportedError
from cute_sparse_mla.problem import HEAD_CLASSES, KERNEL_DIMS, Problem

from . import sm100_resources
from .ptx_sim import capture_cute

NO_CAPTURE = capture_cute.available()
PLANS = [
    kind(D, "bfloat16", "int32", rows_for(rows // tokens, tokens))
    for kind in (Plan, BackwardPlan)
    for D, _ in KERNEL_DIMS
    for rows in (64, 128)
    for tokens in launch.TOKENS_PER_TILE
]


def problem(heads: int = 16, D: int = 576, **changes: object) -> Problem:
    fields = dict(B=1, S=4, S_kv=64, H=heads, G=1, K=64, D=D, d_v=512, dtype=torch.bfloat16, index_dtype=torch.int32)
    return Problem(**{**fields, **changes})  # type: ignore[arg-type]


# -- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"{type(plan).__name__}-D{plan.D}-{plan.rows.tokens}x{plan.rows.padded_heads}"
)
def test_a_plan_fits_and_is_drawn(plan: Plan) -> None:
    plan.check()
    assert plan.smem_bytes <= SMEM_LIMIT
    assert max(area.end for area in plan.tmem.values()) <= TMEM_COLUMNS
    assert REGISTERS * THREADS <= REGISTER_FILE
    drawn = plan.draw()
    assert all(name in drawn for name in (*plan.smem, *plan.tmem, *ROLE, *(b.name for b in plan.barriers)))


def test_overlap_and_overflow_are_refused_with_the_sums() -> None:
    with pytest.raises(PlanError, match="a ends at 12, past the start 8 of b"):
        check_areas("shared memory", (Area("a", 0, 12), Area("b", 8, 4)), 100)
    with pytest.raises(PlanError, match=r"60 \(a\) \+ 50 \(b\) end at 110; there are 100"):
        check_areas("shared memory", (Area("a", 0, 60), Area("b", 60, 50)), 100)
    with pytest.raises(PlanError, match="no plan for D 640"):
        Plan(640, "bfloat16", "int32", Rows(1, 64)).check()


def test_arrivals_follow_from_the_roles() -> None:
    single, pair = (Plan(512, "bfloat16", "int32", rows_for(heads, 1)) for heads in (64, 128))
    counts = [{b.name: b.arrivals(plan.ctas) for b in plan.barriers} for plan in (single, pair)]
    assert counts[0]["p_ready"] == ROLE["softmax"].warps and counts[1]["p_ready"] == 2 * ROLE["softmax"].warps
    assert counts[0]["rows_free"] == counts[1]["rows_free"] == ROLE["gather"].warps + ROLE["softmax"].warps
    offsets = [pair.barrier_offset(b.name) for b in pair.barriers]
    assert offsets == sorted(set(offsets)) and offsets[0] == pair.smem["barriers"].start


# -- tiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", launch.TOKENS_PER_TILE)
@pytest.mark.parametrize("heads", (1, 8, 16, 24, 48, 64, 72, 96, 100, 120, 128))
def test_boxes_hold_the_rows_that_the_guards_name(heads: int, tokens: int) -> None:
    """Loading every box of the heads-first view, with zeros past its extents, gives row for row what `Rows.of` says."""
    rows = rows_for(heads, tokens)
    if rows is None:
        assert heads * tokens > 128
        return
    B, S, G, D = 2, 5, 2, 4
    q = torch.randn(B, S, G * heads, D)
    extents, strides = heads_first(q.shape, q.stride()[:3], heads)
    view = q.as_strided(extents, strides)
    box_heads, box_tokens = rows.box
    assert box_heads * box_tokens == ROWS_PER_CTA
    token_tiles = -(-S // tokens)
    seen: Counter = Counter()
    for tile in range(B * token_tiles * G):
        b, s, g = split(tile, token_tiles, G)
        for rank in range(rows.ctas):
            head_0, token_0 = rows.origin(s, rank)
            for row in range(ROWS_PER_CTA):
                h, t = head_0 + row % box_heads, token_0 + row // box_heads
                head, token = rows.of(row, rank)
                assert (h, t) == (head, s * tokens + token)
                if h < extents[1] and t < extents[2]:
                    assert torch.equal(view[:, h, t, g, b], q[b, t, g * heads + h])
                    seen[b, t, g * heads + h] += 1
    assert len(seen) == B * S * G * heads and set(seen.values()) == {1}


# -- the door ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: launch.DSL_VERSIONS[-1] if name == launch.DSL_PACKAGE else real(name),
    )
    launch._check_dsl.cache_clear()


@pytest.mark.parametrize("D", [D for D, _ in KERNEL_DIMS])
@pytest.mark.parametrize("heads", HEAD_CLASSES)
def test_every_table_row_is_accepted(tested_version: None, heads: int, D: int) -> None:
    filled, row = config_table.choose("sm100", problem(heads, D), SparseAttentionConfig())
    launch.check(problem(heads, D), filled)
    assert row.reason and row.figure
    assert max(launch.smem_bytes(problem(heads, D), filled).values()) <= SMEM_LIMIT


def test_what_does_not_fit_is_refused_with_what_does(tested_version: None) -> None:
    with pytest.raises(UnsupportedError, match=r"fwd_stages = 5, not 6 \(shared memory of 232448 bytes: .*\(slots\)"):
        launch.check(problem(), SparseAttentionConfig(fwd_stages=6))
    with pytest.raises(UnsupportedError, match=r"takes? tokens_per_tile in \(1, 2, 4, 8, 16\), not 3"):
        launch.check(problem(), SparseAttentionConfig(tokens_per_tile=3))
    with pytest.raises(
        UnsupportedError, match="8 with 24 heads per group needs more than the 128 rows of a tile; 4 fits"
    ):
        launch.check(problem(24), SparseAttentionConfig(tokens_per_tile=8))
    with pytest.raises(UnsupportedError, match="bwd_cluster = 2 is for the sm90 backward"):
        launch.check(problem(128), SparseAttentionConfig(bwd_cluster=2))


def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.7.0")
    launch._check_dsl.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"4\.7\.0 is installed: pip install nvidia-cutlass-dsl==4\.8\.1"):
        launch.check(problem(), SparseAttentionConfig())
    launch._check_dsl.cache_clear()


def test_a_deterministic_backward_refuses_rows_whose_terms_fill_its_workspace() -> None:
    with pytest.raises(UnsupportedError, match=r"up to 106\d\d\d slots of a tile at D = 576, not 107374"):
        launch.terms_at_a_time(107374, 576, 148)


def test_importing_the_backend_leaves_the_dsl_alone() -> None:
    code = "import sys, cute_sparse_mla.sm100; assert 'cutlass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("capability", ((10, 0), (10, 3)))
def test_explain_on_behalf_of_a_blackwell_gpu(tested_version: None, capability: tuple[int, int]) -> None:
    q, kv = torch.empty(8, 24, 576, dtype=torch.bfloat16), torch.empty(8, 1, 576, dtype=torch.bfloat16)
    answer = cute_sparse_mla.explain(q, kv, torch.zeros(8, 100, dtype=torch.int64), capability=capability)
    if env.is_installed("cutlass"):
        assert answer.ok and answer.backend == "sm100" and "sm100" in str(answer)
    else:
        assert "pip install 'cute_sparse_mla[blackwell]'" in str(answer)


def test_rows_of_kv_with_any_order_of_dimensions() -> None:
    kv = torch.zeros(2, 5, 3, 576)
    assert launch._kv_rows(kv) == (576, 30, (15, 3, 1))
    assert launch._kv_rows(kv.transpose(1, 2).contiguous().transpose(1, 2)) == (576, 30, (15, 1, 5))
    # One group of every second row: a batch is no multiple of two rows, which validation refuses; one batch is fine.
    assert launch._kv_rows(kv[:1, ::2, 1:2]) == (6 * 576, 3, (0, 1, 0))
    assert launch._kv_rows(kv[:1, :1, :1]) == (576, 1, (0, 0, 0))


# -- the compiler --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(NO_CAPTURE is not None, reason=f"CuTe DSL: {NO_CAPTURE}")
def test_a_kernel_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_cute.prepare()
    from cute_sparse_mla.sm100 import build

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    plan = Plan(512, "bfloat16", "int32", rows_for(64, 1))
    build.kernel.cache_clear()
    build.kernel(plan)
    assert [file.suffix for file in tmp_path.iterdir()] == [".o"]
    build.kernel.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_plan", lambda plan: pytest.fail("compiled again"))
        kernel = build.kernel(plan)
    build.kernel.cache_clear()
    # It launches what was compiled.
    recorder = capture_cute.Recorder()
    recorder.add_ptx(build.compile_plan(plan).__ptx__)
    memory = torch.zeros(64, dtype=torch.int64)
    arguments = tuple(tuple(int(x) for x in part) for part in build.example_arguments(plan)[:3])
    (launched,) = recorder.call(kernel, {"memory": memory}, *arguments, (1.0,), 1, 0)
    assert launched.block == (THREADS, 1, 1) and launched.shared_bytes == plan.smem_bytes


def test_the_cache_key_knows_what_changes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(512, "bfloat16", "int32", rows_for(64, 1))
    others = [replace(plan, **change) for change in (
        dict(D=576), dict(dtype="float16"), dict(index_dtype="int64"), dict(arch="sm_103a"), dict(rows=Rows(8, 8)),
    )]  # fmt: skip
    keys = {cache.key(str(p)) for p in (plan, *others)}
    assert len(keys) == 6
    cache._surroundings.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "other")
    assert cache.key(str(plan)) not in keys
    cache._surroundings.cache_clear()


@pytest.mark.skipif(NO_CAPTURE is not None or shutil.which("ptxas") is None, reason=f"{NO_CAPTURE or 'no ptxas'}")
@pytest.mark.parametrize(("kind", "arch", "D", "heads"), (
    (Plan, "sm_100a", 576, 128), (Plan, "sm_103a", 576, 64), (BackwardPlan, "sm_103a", 576, 128),
))  # fmt: skip
def test_ptxas_accepts_without_spills(kind: type[Plan], arch: str, D: int, heads: int) -> None:
    capture_cute.prepare()
    row = sm100_resources.measure(kind(D, "bfloat16", "int64", rows_for(heads, 1), arch))
    assert row["spill_stores"] == row["spill_loads"] == row["stack"] == 0
    assert row["registers"] <= REGISTERS


def test_the_committed_resources_have_every_kernel_without_spills() -> None:
    rows = [json.loads(line) for line in sm100_resources.RESULTS.read_text().splitlines()]
    assert [row["kernel"] for row in rows] == [sm100_resources.name(plan) for plan in sm100_resources.plans()]
    assert all(row["spill_stores"] == row["spill_loads"] == row["stack"] == 0 for row in rows)
    assert all(row["registers"] <= REGISTERS and row["shared_memory"] <= SMEM_LIMIT for row in rows)
