"""`deterministic=True` on SM90, dkv by products or by terms added in order: in the simulator, and on a Hopper GPU."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import UnsupportedError
from cute_sparse_mla.precision import Inputs, Judge, run
from cute_sparse_mla.problem import Problem

from .ptx_sim import coverage, project_hopper
from .ptx_sim.policies import Delay, Priorities
from .ptx_sim.races import Races
from .simulated_judge import judge_gradients
from .test_hopper_build import problem

REASON = project_hopper.unavailable()
simulated = pytest.mark.skipif(REASON is not None, reason=f"Hopper kernels: {REASON}")
if REASON is None:
    project_hopper.capture_tilelang.prepare()

EVERYTHING = Case(
    B=2, S=2, S_kv=40, H=8, G=2, K=70, invalid="out_of_range", length="random", causal=True, duplicates=True,
    index_dtype=torch.int64, sink="random", dlse=True,
)  # fmt: skip
TWO_TILES = Case(S=2, S_kv=30, H=72, D=512, K=70, positions="random", invalid="shuffled", packed=True)
GROUPED = Case(S=3, S_kv=50, H=20, K=40, causal=True, length="random", duplicates=True, sink="random", dlse=True)
CALLS = ((EVERYTHING, 1), (TWO_TILES, 1), (GROUPED, 2))
# Two blocks of rows of kv. Cases of products, and blocks of slots that a piece has room for, if not for all.
TWO_ROW_BLOCKS = GROUPED.but(S_kv=140, invalid="shuffled")
MULTIPLIED = ((TWO_ROW_BLOCKS.but(B=2, H=40, G=2), None), (TWO_ROW_BLOCKS.but(K=360), 2))


def backward(i: Inputs, out: Tensor, lse: Tensor, dkv: Tensor | None = None, **how: object) -> tuple[Tensor, ...]:
    given = {**i.options, "deterministic": True, **how}
    return cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=dkv, backend="sm90", **given)


def small_workspace(monkeypatch: pytest.MonkeyPatch, case: Case, tiles: int, tokens: int) -> None:
    """Room for one block of slots of so many tiles at a time."""
    from cute_sparse_mla.hopper import launch

    ctas = case.B * case.G * -(-case.H // case.G // 64) * tiles
    monkeypatch.setattr(launch.env, "multiprocessors", lambda device: ctas + launch.SORT_UNITS)
    room = 64 * (4 * case.D + launch.TERM_SORT_BYTES) + launch.ROWS * case.D * 4
    lists = 16 * 64 * -(-tokens * case.K // 64) if tokens > 1 else 0
    if by_products(case, tokens):
        room, lists = 64 * 256 + launch.ROWS * case.D * 4, 16 * tokens * case.K + 4 * (case.S_kv + 1)
    monkeypatch.setattr(launch, "WORKSPACE", ctas * (room + lists))


def by_products(case: Case, tokens: int) -> bool:
    from cute_sparse_mla.hopper import launch

    sizes = problem(case.H, case.D, B=case.B, S=case.S, S_kv=case.S_kv, K=case.K, G=case.G)
    return launch.pieces_of(sizes, tokens, 132) is not None


def clean(observer: Races, recorder: project_hopper.capture_tilelang.Recorder) -> None:
    """No race, no finding, and no instruction form without a witness."""
    assert not observer.races, observer.races[0].text
    assert not [finding for report in recorder.reports for finding in report.findings]
    used = {form for report in recorder.reports for form in coverage.executed_forms(report)}
    assert not (missing := used - set(coverage.witnesses())), missing


@simulated
@pytest.mark.parametrize(("case", "tokens"), CALLS, ids=("everything", "two_tiles", "grouped"))
def test_contract(case: Case, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the precision clause and without a race, in several groups of tokens and parts of their lists."""
    observer = Races()
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        monkeypatch.setattr(launch, "PRODUCTS_PAY", (0, 0))
        small_workspace(monkeypatch, case, 1, tokens)
        judge_gradients(case.inputs(seed=3), partial(backward, config=SparseAttentionConfig(tokens_per_tile=tokens)))
    clean(observer, recorder)
    parts = [entry.kernel for entry in recorder.launches].count("sparse_mla_ordered_sums_kernel")
    assert parts == -(-case.S // tokens) * -(-case.K * tokens // 64)


@simulated
@pytest.mark.parametrize(("case", "blocks"), MULTIPLIED, ids=("whole", "pieces"))
def test_products(case: Case, blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by products, repeated rows included."""
    observer = Races()
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        if blocks:
            held = blocks * 64 * 256 + 64 * 4 * case.D + 16 * 2 * case.K + 4 * (case.S_kv + 1)
            monkeypatch.setattr(launch, "WORKSPACE", case.B * case.G * held)
        config = SparseAttentionConfig(tokens_per_tile=2)
        judge_gradients(case.inputs(seed=3), partial(backward, config=config))
    clean(observer, recorder)
    names = [entry.kernel for entry in recorder.launches]
    pieces = -(-case.S // 2) * -(-case.K * 2 // (64 * blocks)) if blocks else 1
    for name in ("sparse_mla_products_kernel", "sparse_mla_repeats_kernel"):
        assert names.count(name) == pieces


SHARED = (
    (Case(S=3, S_kv=20, H=4, D=512, K=40, invalid="shuffled", sink="random", dlse=True), 1),
    (Case(S=5, S_kv=140, H=20, K=40, duplicates=True, invalid="shuffled", sink="random"), 2),
)


@simulated
@pytest.mark.parametrize(("case", "tokens"), SHARED, ids=("terms", "products"))
def test_schedules_change_nothing(case: Case, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adversarial schedules of CTAs whose terms belong to the same rows: bit for bit."""
    from cute_sparse_mla.hopper import launch

    monkeypatch.setattr(launch, "PRODUCTS_PAY", (0, launch.PRODUCTS_PAY[1]))
    assert by_products(case, tokens) == (tokens > 1)
    i = case.inputs(seed=4)
    out, lse = Judge(i).budget_forward()
    config = SparseAttentionConfig(tokens_per_tile=tokens)

    def gradients(seed: int) -> tuple[Tensor, ...]:
        with project_hopper.simulated(resident=3, policy=Delay(seed), order=Priorities(seed)):
            return backward(i, out, lse, torch.zeros(i.kv.shape), config=config)

    first, second = (gradients(seed) for seed in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def layer(**changes: int) -> Problem:
    return problem(**{"heads": 64, "S": 4096, "S_kv": 8192, "K": 2048, **changes})


SIZES = (
    {}, {"S": 1}, {"S": 16384}, {"heads": 128}, {"D": 512, "K": 640}, {"K": 1}, {"K": 100_000}, {"B": 300, "S": 70},
    {"S": 1_000_000, "K": 64},
)  # fmt: skip


@pytest.mark.parametrize("tokens", (1, 8))
@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_workspace_is_bounded_at_any_length(changes: dict[str, int], tokens: int) -> None:
    """What is held beside fp32 dkv, per-row values and the bounds of the sorted rows."""
    from cute_sparse_mla.hopper import launch

    sizes = layer(**changes)
    pieces = launch.pieces_of(sizes, tokens, 132)
    if pieces is not None:
        ctas, listed = sizes.B * sizes.G * pieces.tiles, tokens * sizes.K
        assert pieces.slots % 64 == 0 and pieces.slots > 0 and 1 <= pieces.tiles <= launch.MOST_TILES
        sums = ctas * 64 * sizes.D * 4 if pieces.slots < listed else 0
        held = ctas * (pieces.slots * 256 + 16 * listed + 4 * (sizes.S_kv + 1)) + sums
        assert held <= launch.WORKSPACE < 256e6
    parts = launch.parts_of(sizes, tokens, 132)
    ctas = sizes.B * sizes.G * parts.tiles * launch._tiles(sizes)
    assert parts.slots % 64 == 0 and parts.parts * parts.slots >= tokens * sizes.K and 1 <= parts.sorted <= parts.parts
    terms = ctas * parts.slots * sizes.D * 4
    sums = ctas * 64 * sizes.D * 4 if parts.parts > 1 else 0
    lists = 16 * ctas * tokens * sizes.K if tokens > 1 else 0
    assert terms + sums + lists + ctas * parts.slots * parts.sorted * launch.TERM_SORT_BYTES <= launch.WORKSPACE < 256e6


def test_batches_beyond_the_workspace_are_refused() -> None:
    from cute_sparse_mla.hopper import launch

    with pytest.raises(
        UnsupportedError, match=r"takes up to 841 .* with 2048 slots at D = 576, not 5000; pass fewer batch entries"
    ):
        launch.parts_of(layer(B=5000, S=1), 1, 132)


# -- on a Hopper GPU -----------------------------------------------------------------------------------------------

ON_GPU = (
    EVERYTHING.but(S=45, S_kv=300, K=700),
    TWO_TILES.but(S=33, S_kv=300, K=300),
    Case(S=40, S_kv=4096, H=8, K=2048, causal=True, length="random", sink="random"),
    Case(S=300, S_kv=50, H=64, K=640, D=512, dtype=torch.float16, duplicates=True, invalid="one_row", dlse=True),
)


@pytest.mark.sm90
@pytest.mark.parametrize("small", (False, True), ids=("whole", "parts"))
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: f"{case.S}x{case.S_kv}_{case.H}_{case.D}")
def test_contract_on_a_gpu(case: Case, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        small_workspace(monkeypatch, case, 4, max(1, 64 // (case.H // case.G)))
    judge = Judge(case.inputs(seed=3, device="cuda"))
    checks = judge.checks(run(judge.inputs, cute_sparse_mla.fwd, partial(cute_sparse_mla.bwd, deterministic=True)))
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


@pytest.mark.sm90
@pytest.mark.parametrize("heads", (8, 64))
def test_a_hundred_times_on_a_gpu(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise equal, grouped and not, by products and by terms; the default's dkv not. By terms dq is the default's."""
    from cute_sparse_mla.hopper import launch

    case = Case(S=500, S_kv=600, H=heads, K=512, sink="random", causal=True, duplicates=True)
    i = case.inputs(device="cuda")
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, **i.options)
    single = dict(dkv_dtype=torch.float32, config=SparseAttentionConfig(tokens_per_tile=1))
    for pay, given in itertools.product((launch.PRODUCTS_PAY, (0, 0)), ({}, single)):
        monkeypatch.setattr(launch, "PRODUCTS_PAY", pay)
        first = backward(i, out, lse, **given)
        for _ in range(99):
            assert all(torch.equal(a, b) for a, b in zip(first, backward(i, out, lse, **given), strict=True))
    plain = [backward(i, out, lse, **single, deterministic=False) for _ in range(5)]
    assert torch.equal(plain[0][0], first[0]) and torch.equal(plain[0][2], first[2])
    assert any(not torch.equal(plain[0][1], other[1]) for other in plain[1:])


@pytest.mark.sm90
def test_memory() -> None:
    """Beyond fp32 dkv, per-row values and the gradients themselves at most 256 MB, whatever the number of tokens."""
    for S in (500, 3000):
        i = Case(S=S, S_kv=2048, H=64, K=2048).inputs(device="cuda")
        out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices)
        backward(i, out, lse)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        dq, dkv, _ = backward(i, out, lse)
        torch.cuda.synchronize()
        known = dq.nbytes + 3 * dkv.nbytes + 16 * lse.numel()
        assert torch.cuda.max_memory_allocated() - before - known <= 256e6
