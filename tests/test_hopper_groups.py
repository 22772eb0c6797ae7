"""Token groups of the SM90 path in the simulator: the union lists slot by slot, and the kernels over them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import env, union_lists
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs, Judge

from .list_cases import EVERYTHING, LISTS, SMALL_SIZES, checked, judge_lists, selected, slots_of
from .ptx_sim import coverage, project_hopper
from .ptx_sim.races import Races
from .simulated_judge import judge_gradients, poisoned

REASON = project_hopper.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"Hopper kernels: {REASON}")
if REASON is None:
    project_hopper.capture_tilelang.prepare()

OWN_LISTS = (*LISTS, (Case(S=3, S_kv=3000, H=4, K=300, invalid="shuffled", duplicates=True, causal=True), 1))


@pytest.mark.parametrize("sizes", (None, SMALL_SIZES), ids=("one_range", "ranges"))
@pytest.mark.parametrize(("case", "tokens"), OWN_LISTS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_lists(case: Case, tokens: int, sizes: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, observer = checked(case), Races()
    if sizes:
        call.indices.masked_fill_((call.indices > 70) & (call.indices < 290), 3)
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        monkeypatch.setattr(union_lists, "UNION_SIZES", sizes or union_lists.UNION_SIZES)
        rows, bits, lengths, _ = launch.make_lists(
            call.problem, tokens, call.indices, call.topk_length, call.q_positions
        )
    clean(observer, recorder)
    if tokens == 1:
        bits.fill_(1)  # left alone
    judge_lists(call, tokens, rows, bits, lengths)


@pytest.mark.parametrize("tokens", (1, 2))
def test_lists_of_neighbouring_rows(tokens: int) -> None:
    """More rows next to each other than a warp puts side by side before it stores them."""
    call, observer = checked(Case(S=tokens, S_kv=3000, H=4, K=330)), Races()
    for t in range(tokens):
        call.indices[:, t] = 200 * t + 100 + torch.randperm(330, generator=torch.Generator().manual_seed(t))
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch, unions

        rows, bits, lengths, _ = launch.make_lists(call.problem, tokens, call.indices, None, None)
    assert int(lengths.min()) > unions.STAGED
    clean(observer, recorder)
    if tokens == 1:
        bits.fill_(1)  # left alone
    judge_lists(call, tokens, rows, bits, lengths)


@pytest.mark.parametrize("K", (640, 300))
@pytest.mark.parametrize("layout", ("dense", "shifted", "strided"))
def test_lists_of_any_layout(layout: str, K: int) -> None:
    """Lists that can be read 16 bytes at a time, with or without an end, that start between, whose slots lie apart."""
    call, observer = checked(Case(S=3, S_kv=4000, H=4, K=K, duplicates=K == 300)), Races()
    room = torch.full((1, 3, 1, 2 * K + 4), 1, dtype=torch.int32)
    rows = {"dense": room[..., :K], "shifted": room[..., 1 : K + 1], "strided": room[..., : 2 * K : 2]}[layout]
    rows.copy_(call.indices)
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        lists = launch.make_lists(call.problem, 2, rows, None, None)
    clean(observer, recorder)
    judge_lists(call, 2, *lists[:3])


@pytest.mark.parametrize("S_kv", (900, 2**31 - 1))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_lists_of_entries_at_the_ends(dtype: torch.dtype, S_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One list for all tokens, by a stride of 0, that holds the ends of its type and of kv, in ranges of a few rows."""
    call, observer = checked(Case(S=3, S_kv=900, H=4, K=132, index_dtype=dtype, duplicates=True)), Races()
    ends = [S_kv, S_kv - 1, 0, -1, 2**31 - 1, 1 - 2**31, -(2**31)]
    if dtype == torch.int64:
        ends += [2**63 - 1, -(2**63), 2**32, 2**32 + 5, 5 - 2**32, 2**31 + 5]
    one = call.indices[:, :1]
    one.masked_fill_(one == 5, 3)  # row 5 is in no list, as it would be if an entry were cut off
    one[..., 40 : 40 + 2 * len(ends)] = torch.tensor(2 * ends)
    call = dataclasses.replace(
        call, indices=one.expand(1, 3, 1, 132), problem=dataclasses.replace(call.problem, S_kv=S_kv)
    )
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        monkeypatch.setattr(union_lists, "UNION_SIZES", SMALL_SIZES)
        monkeypatch.setattr(launch, "SMALLER_LISTS", {})
        lists = launch.make_lists(call.problem, 2, call.indices, None, None)
    assert S_kv - 1 in lists[0][0, 0, 0].tolist()
    clean(observer, recorder)
    judge_lists(call, 2, *lists[:3])


SAMPLED = (EVERYTHING, 8), (Case(S=40, S_kv=3000, H=4, K=300, invalid="shuffled", duplicates=True), 2)


@pytest.mark.parametrize(("case", "tokens"), SAMPLED, ids=("everything", "two_tokens"))
def test_samples(case: Case, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the union and of the tokens, of some tiles and a share of the rows and of the tokens' invalid slots.

    Repeats have slots of their own.
    """
    call, observer = checked(case), Races()
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        monkeypatch.setattr(launch, "SAMPLES", 5)
        monkeypatch.setattr(launch, "_lists", lambda *args, samples, **options: samples)
        samples = launch.make_lists(call.problem, tokens, call.indices, call.topk_length, call.q_positions, decide=True)
    clean(observer, recorder)
    B, S, G, _ = call.indices.shape
    tiles = [(b, tile, g) for b in range(B) for tile in range(-(-S // tokens)) for g in range(G)]
    step = 1 << union_lists.sample_step(call.problem, union_lists.sample_plan_of(call.problem, tokens))
    for n, counts in enumerate(samples.tolist()):
        b, tile, g = tiles[(2 * n + 1) * len(tiles) // (2 * len(samples))]
        own = [selected(call, b, tile * tokens + t, g) for t in range(tokens)]
        kept = [{row: times for row, times in of.items() if row % step == n % step} for of in own]
        slots = sum(sum(of.values()) for of in kept)
        walked = sum(slots_of(call, b, tile * tokens + t) for t in range(tokens))
        invalid = walked - sum(sum(of.values()) for of in own)
        assert counts == [len(set().union(*kept)) + slots - sum(map(len, kept)), slots + invalid // step]


CALLS = (
    (EVERYTHING, 8),
    (EVERYTHING.but(H=48, S=3, D=512, index_dtype=torch.int32), 2),
    (Case(S=17, S_kv=200, H=3, K=50, invalid="one_row", packed=True), 16),
)


def options(inputs: Inputs, tokens: int) -> dict:
    return {**inputs.options, "backend": "sm90", "config": SparseAttentionConfig(tokens_per_tile=tokens)}


def clean(observer: Races, recorder: project_hopper.capture_tilelang.Recorder) -> None:
    """No race, no finding, and no instruction form that neither a foreign kernel nor an H200 witnesses."""
    assert not observer.races, observer.races[0].text
    assert not [finding for report in recorder.reports for finding in report.findings]
    used = {form for report in recorder.reports for form in coverage.executed_forms(report)}
    assert not used - set(coverage.witnesses())


@pytest.mark.parametrize(("case", "tokens"), CALLS, ids=("everything", "two_tokens_512", "packed"))
def test_forward(case: Case, tokens: int) -> None:
    """Within the precision clause and without a race; what no index names is NaN."""
    inputs, observer = case.inputs(seed=tokens), Races()
    sent = poisoned(inputs)
    with project_hopper.simulated(observer=observer) as recorder:
        out, lse = cute_sparse_mla.fwd(sent.q, sent.kv, sent.indices, **options(inputs, tokens))
    clean(observer, recorder)
    checks = Judge(inputs).forward_checks(out, lse)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


def test_forward_over_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs that go over tiles of different length, and CTAs of one tile after them."""
    case, observer = Case(S=17, S_kv=200, H=16, D=512, K=90, length="random", duplicates=True, sink="random"), Races()
    inputs = case.inputs(seed=5)
    sent = poisoned(inputs)
    monkeypatch.setattr(env, "multiprocessors", lambda device: 2)
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        monkeypatch.setattr(launch, "STAYING", 1.0)
        out, lse = cute_sparse_mla.fwd(sent.q, sent.kv, sent.indices, **options(inputs, 4))
    assert recorder.launches[-1].grid == (3, 1, 1)  # of five tiles
    clean(observer, recorder)
    checks = Judge(inputs).forward_checks(out, lse)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize(("case", "tokens"), CALLS[:2], ids=("everything", "two_tokens_512"))
def test_backward(case: Case, tokens: int) -> None:
    observer = Races()
    with project_hopper.simulated(observer=observer) as recorder:

        def backward(i: Inputs, out: Tensor, lse: Tensor, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return cute_sparse_mla.bwd(
                i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=dkv, **options(i, tokens)
            )

        judge_gradients(case.inputs(seed=tokens), backward)
    clean(observer, recorder)


def test_backward_over_tiles() -> None:
    """Of different length, the longest first, and CTAs of one tile after them."""
    case = Case(S=17, S_kv=200, H=16, D=512, K=60, length="random", duplicates=True, sink="random", dlse=True)
    observer = Races()
    with project_hopper.simulated(observer=observer) as recorder, project_hopper.going_over_tiles(2):

        def backward(i: Inputs, out: Tensor, lse: Tensor, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=dkv, **options(i, 4))

        judge_gradients(case.inputs(seed=5), backward)
    assert recorder.launches[-1].grid == (3, 1, 1)  # of five tiles
    clean(observer, recorder)


DECIDED = (
    (Case(S=11, S_kv=90, H=8, K=60, causal=True, sink="random", invalid="shuffled"), True),
    (Case(B=2, S=5, S_kv=9000, H=8, K=70, length="random", duplicates=True), False),
)


@pytest.mark.parametrize(("case", "grouped"), DECIDED, ids=("near", "far"))
def test_decided_on_the_device(case: Case, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels are launched and one of them leaves at once; backwards over far rows take some tiles at a time."""
    inputs, observer = case.inputs(seed=case.S), Races()
    given = {**inputs.options, "backend": "sm90"}
    monkeypatch.setattr(env, "multiprocessors", lambda device: 1)  # so that fewer tiles are less time
    with project_hopper.simulated(observer=observer) as recorder:
        from cute_sparse_mla.hopper import launch

        monkeypatch.setattr(launch, "L2_BYTES", 0)
        monkeypatch.setattr(launch, "LEAST_ADDS", 0)
        monkeypatch.setattr(launch, "FAR_WAVES", 1)
        monkeypatch.setattr(launch, "SORT_BYTES", 4 * 3 * case.B * case.K)
        out, lse = cute_sparse_mla.fwd(inputs.q, poisoned(inputs).kv, inputs.indices, **given)

        def backward(i: Inputs, out: Tensor, lse: Tensor, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=dkv, **given)

        judge_gradients(inputs, backward)
    clean(observer, recorder)
    checks = Judge(inputs).forward_checks(out, lse)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    for name in ("sparse_mla_fwd_kernel", "sparse_mla_bwd_kernel"):
        work = [
            report.warp_instructions
            for entry, report in zip(recorder.launches, recorder.reports, strict=True)
            if entry.kernel == name
        ]
        tiles = 1 if "fwd" in name else -(-case.S // 8)
        assert len(work) == tiles + (1 if "fwd" in name else case.S)
        assert (sum(work[:tiles]) > sum(work[tiles:])) == grouped


def test_autograd_keeps_the_lists() -> None:
    """Made once for forward and backward; a plan serves several calls."""
    inputs = Case(S=9, S_kv=90, H=8, K=40, causal=True).inputs(seed=3)
    q, kv = (t.clone().requires_grad_() for t in (inputs.q, inputs.kv))
    given = dict(causal=True, backend="sm90")
    with project_hopper.simulated() as recorder:
        out = cute_sparse_mla.sparse_mla(
            q, kv, inputs.indices, config=SparseAttentionConfig(tokens_per_tile=8), **given
        )
        out.float().sum().backward()
        assert [entry.kernel for entry in recorder.launches].count("sparse_mla_unions_kernel") == 1
        plan = cute_sparse_mla.plan(inputs.indices, kv.shape, 8, tokens_per_tile=8, **given)
        again, _ = cute_sparse_mla.fwd(q, kv, inputs.indices, plan=plan, **given)
        assert [entry.kernel for entry in recorder.launches].count("sparse_mla_unions_kernel") == 2
        answer = cute_sparse_mla.explain(q, kv, inputs.indices, plan=plan, **given)
    assert torch.equal(out, again) and q.grad is not None and bool(torch.isfinite(q.grad).all())
    assert answer.config is not None and answer.config.tokens_per_tile == 8 and "8 tokens a tile" in str(answer)
