"""The builders of index rows against naive Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cute_sparse_mla import indices

DOCUMENTS = ([0, 7], [0, 1, 1, 4, 7], [0, 0, 0, 3, 7, 7], [0, 0, 7], [0, 3, 7, 7, 7])


def owner(position: int, cu_seqlens: Sequence[int]) -> int:
    """Number of the document that holds a row: the one with `start <= position < stop`."""
    for number, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        if start <= position < stop:
            return number
    raise AssertionError(position)


def cu(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_document_starts_and_causal_ranges(documents: list[int], dtype: torch.dtype) -> None:
    expected = [documents[owner(p, documents)] for p in range(7)]
    starts = indices.document_starts(torch.arange(7, dtype=dtype), cu(documents))
    assert starts.tolist() == expected and starts.dtype == dtype
    start, stop = indices.causal_ranges(7, cu(documents, dtype))
    assert start.tolist() == expected and stop.tolist() == list(range(1, 8))
    assert start.dtype == stop.dtype == torch.int32
    positions = torch.tensor([5, 0, 3], dtype=dtype)
    start, stop = indices.causal_ranges(3, cu(documents), q_positions=positions)
    assert start.tolist() == [expected[p] for p in (5, 0, 3)] and stop.tolist() == [6, 1, 4]


def test_causal_ranges_of_one_document() -> None:
    start, stop = indices.causal_ranges(4)
    assert start.tolist() == [0] * 4 and stop.tolist() == [1, 2, 3, 4]
    start, stop = indices.causal_ranges(3, q_positions=torch.tensor([-2, -1, 0]))
    assert start.tolist() == [0, 0, 0] and stop.tolist() == [-1, 0, 1]
    for tensor in indices.causal_ranges(0):
        assert tensor.shape == (0,) and tensor.dtype == torch.int32


@pytest.mark.parametrize("K", [0, 1, 3, 8])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_range_rows(documents: list[int], K: int) -> None:
    rows = indices.range_rows(*indices.causal_ranges(7, cu(documents)), K)
    assert rows.dtype == torch.int32 and rows.shape == (7, K)
    for t in range(7):
        first = documents[owner(t, documents)]
        every = list(range(first, t + 1))[:K]
        assert rows[t].tolist() == every + [-1] * (K - len(every))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
def test_local_to_global(dtype: torch.dtype, with_length: bool, groups: int | None) -> None:
    start, length = [0, 4, 4, 9], [4, 5, 5, 1]
    garbage = [-1, -7, 2**31 - 1] + ([2**32 + 5] if dtype == torch.int64 else [])
    rows = torch.tensor([[0, 1, 3, 4, 5, *garbage]] * 4, dtype=dtype)
    local = rows if groups is None else rows[:, None].repeat(1, groups, 1)
    got = indices.local_to_global(local, torch.tensor(start), torch.tensor(length) if with_length else None)
    assert got.dtype == dtype and got.shape == local.shape
    for t in range(4):
        for g, row in enumerate(got[t].reshape(-1, rows.shape[1])):
            for slot, value in enumerate(row.tolist()):
                index = int(rows[t, slot])
                if index < 0 or (with_length and index >= length[t]):
                    assert value == -1, (t, g, slot)
                elif index < 2**31 - 1:
                    assert value == index + start[t]
                else:
                    # Out of range stays out of range: below 0 or above any row, never wrapped into kv.
                    assert value < 0 or value >= 2**31 - 1
    assert indices.local_to_global(local[:0], torch.tensor(start)[:0]).shape[0] == 0
    assert torch.equal(local, rows if groups is None else rows[:, None].repeat(1, groups, 1))


@pytest.mark.parametrize("window", [1, 2, 4, 12])
@pytest.mark.parametrize("documents", [None, *DOCUMENTS], ids=str)
def test_sliding_window(documents: list[int] | None, window: int) -> None:
    positions = torch.tensor([[6, 0, 1], [2, 5, 3]])
    rows = indices.sliding_window(positions, window, None if documents is None else cu(documents))
    assert rows.dtype == torch.int32 and rows.shape == (2, 3, window)
    for position, row in zip(positions.flatten().tolist(), rows.flatten(0, 1).tolist(), strict=True):
        first = 0 if documents is None else documents[owner(position, documents)]
        assert row == [r if r >= first else -1 for r in range(position - window + 1, position + 1)]


def test_sliding_window_of_negative_positions_is_empty() -> None:
    assert (indices.sliding_window(torch.tensor([-1, -5]), 3) == -1).all()
    assert (indices.sliding_window(torch.tensor([-1, -5]), 3, cu([0, 4, 7])) == -1).all()


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_compressed_positions(ratio: int) -> None:
    """A compressed row may be read once the last of its `ratio` tokens is at or before the query."""
    positions = torch.arange(-3, 300)
    bounds = indices.compressed_positions(positions, ratio)
    for position, bound in zip(positions.tolist(), bounds.tolist(), strict=True):
        complete = [block for block in range(301) if (block + 1) * ratio - 1 <= position]
        assert bound == max(complete) if complete else bound < 0


def test_window_and_selected() -> None:
    window = torch.tensor([[0, 1], [-1, 2]], dtype=torch.int32)
    selected = torch.tensor([[3, -1, 0], [-1, -5, 2]], dtype=torch.int32)
    got = indices.window_and_selected(window, selected, 100)
    assert got.dtype == torch.int32
    assert got[:, :2].equal(window)
    assert got[:, 2:].tolist() == [[103, -1, 100], [-1, -1, 102]]
    assert indices.window_and_selected(window, selected)[:, 2:].tolist() == [[3, -1, 0], [-1, -1, 2]]
    assert indices.window_and_selected(window.long(), selected, 5).dtype == torch.int64
    assert indices.window_and_selected(window[:0], selected[:0]).shape == (0, 5)


@pytest.mark.parametrize(
    ("K", "multiple", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (7, 1, 7)]
)
def test_pad_slots(K: int, multiple: int, expected: int) -> None:
    rows = torch.arange(2 * K, dtype=torch.int32).view(2, K)
    padded = indices.pad_slots(rows, multiple)
    assert padded.shape == (2, expected) and padded.dtype == torch.int32
    assert torch.equal(padded[:, :K], rows) and (padded[:, K:] == -1).all()


# -- selection -----------------------------------------------------------------------------------------------------


def naive_topk(
    iq: Tensor, ik: Tensor, weights: Tensor, k: int, documents: list[int] | None, positions: list[int]
) -> list[list[int]]:
    """Rows of every token, best first, padded with -1; integer inputs make the scores exact."""
    rows = []
    for t, position in enumerate(positions):
        candidates = range(min(position + 1, ik.shape[0]))
        if documents is not None and candidates:
            number = owner(min(position, documents[-1] - 1), documents)
            candidates = range(documents[number], min(position + 1, documents[number + 1]))
        scored = []
        for row in candidates:
            dots = [sum(int(a) * int(b) for a, b in zip(head, ik[row], strict=True)) for head in iq[t]]
            scored.append((sum(float(w) * max(dot, 0) for w, dot in zip(weights[t], dots, strict=True)), row))
        best = sorted(scored, key=lambda pair: -pair[0])[:k]
        assert len({score for score, _ in scored}) == len(scored), "a tie: choose other inputs"
        rows.append([row for _, row in best] + [-1] * (k - len(best)))
    return rows


def indexer(T: int, S_kv: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """int8 queries and keys whose scores have no ties; weights of both signs."""
    gen = torch.Generator().manual_seed(seed)
    iq = torch.randint(-128, 128, (T, 3, 16), generator=gen, dtype=torch.int8)
    ik = torch.randint(-128, 128, (S_kv, 16), generator=gen, dtype=torch.int8)
    # The first dimension keeps every dot product above 0, so that relu makes no ties.
    iq[..., 0], ik[:, 0] = 127, 127
    iq[..., 1:], ik[:, 1:] = iq[..., 1:] // 8, ik[:, 1:] // 8
    weights = torch.randn(T, 3, generator=gen)
    weights[::2] = -weights[::2].abs()
    return iq, ik, weights


@pytest.mark.parametrize("k", [0, 1, 3, 7, 12])
@pytest.mark.parametrize("documents", [None, *DOCUMENTS], ids=str)
def test_select_topk(documents: list[int] | None, k: int) -> None:
    inputs = indexer(7, 7)
    rows = indices.select_topk(*inputs, k, None if documents is None else cu(documents))
    assert rows.dtype == torch.int32
    assert rows.tolist() == naive_topk(*inputs, k, documents, list(range(7)))


@pytest.mark.parametrize("documents", [None, [0, 1, 1, 4, 7]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_select_topk_positions(documents: list[int] | None, dtype: torch.dtype) -> None:
    """Positions of a part of the tokens, negative ones and ones past the last row."""
    iq, ik, weights = indexer(5, 7, seed=1)
    positions = [3, -1, 6, -4, 2] if documents else [3, -1, 9, -4, 0]
    rows = indices.select_topk(
        iq.to(dtype), ik.to(dtype), weights, 4, None if documents is None else cu(documents),
        q_positions=torch.tensor(positions),
    )  # fmt: skip
    assert rows.tolist() == naive_topk(iq, ik, weights, 4, documents, positions)


@pytest.mark.parametrize("S_kv", [0, 2, 5, 9])
def test_select_topk_default_positions(S_kv: int) -> None:
    """As for attention: the last query stands at the last row."""
    inputs = indexer(5, S_kv, seed=2)
    rows = indices.select_topk(*inputs, 3)
    assert rows.tolist() == naive_topk(*inputs, 3, None, [t + S_kv - 5 for t in range(5)])


@pytest.mark.parametrize(("T", "S_kv"), [(0, 0), (0, 4), (3, 0)])
def test_select_topk_of_nothing(T: int, S_kv: int) -> None:
    rows = indices.select_topk(torch.zeros(T, 2, 8), torch.zeros(S_kv, 8), torch.zeros(T, 2), 4)
    assert rows.shape == (T, 4) and (rows == -1).all()


def test_select_topk_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = indexer(7, 7, seed=3)
    whole = indices.select_topk(*inputs, 3, cu([0, 1, 1, 4, 7]))
    monkeypatch.setattr(indices, "CHUNK_BYTES", 1)
    assert torch.equal(whole, indices.select_topk(*inputs, 3, cu([0, 1, 1, 4, 7])))


def test_select_topk_keeps_its_precision_under_autocast() -> None:
    gen = torch.Generator().manual_seed(4)
    inputs = torch.randn(64, 4, 32, generator=gen), torch.randn(64, 32, generator=gen), torch.rand(64, 4, generator=gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = indices.select_topk(*inputs, 16)
    assert torch.equal(mixed, indices.select_topk(*inputs, 16))


# -- overlap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 1 << 28])
def test_union_ratios(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with an invalid slot are left out, as is a last partial group."""
    monkeypatch.setattr(indices, "CHUNK_BYTES", chunk)
    gen = torch.Generator().manual_seed(5)
    rows = torch.rand(13, 20, generator=gen).argsort(-1)[:, :6].int()
    rows[2, :3], rows[5, 1] = -1, 20
    got = indices.union_ratios(rows, 20, groups=(1, 2, 4, 16))
    for n in (1, 2, 4):
        groups = [rows[i : i + n].tolist() for i in range(0, 13 // n * n, n)]
        whole = [group for group in groups if all(0 <= row < 20 for token in group for row in token)]
        assert 0 < len(whole) < len(groups)
        expected = sum(len(set().union(*group)) for group in whole) / len(whole) / 6
        assert got[n] == pytest.approx(expected, rel=1e-12)
    assert got[1] == pytest.approx(1.0)
    assert math.isnan(got[16])
    assert math.isnan(indices.union_ratios(torch.full((4, 3), -1), 20, groups=(2,))[2])
    assert math.isnan(indices.union_ratios(torch.zeros((0, 3), dtype=torch.int32), 20, groups=(2,))[2])
    same = torch.arange(6).repeat(8, 1)
    assert indices.union_ratios(same, 20, groups=(8,)) == {8: 1.0}
    apart = torch.arange(48).view(8, 6)
    assert indices.union_ratios(apart, 48, groups=(8,)) == {8: 8.0}


def test_strided_cu_seqlens_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Every second entry of a tensor, read as it is."""
    ends = torch.tensor([0, 9, 3, 9, 8, 9], dtype=torch.int32)[::2]
    starts = indices.document_starts(torch.arange(8, dtype=torch.int32), ends)
    assert starts.tolist() == [0] * 3 + [3] * 5 and len(recwarn) == 0
