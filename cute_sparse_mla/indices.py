"""What callers need to build rows of `indices`: windows, documents, causal ranges, top-k selection, overlap.

All functions work on the device of their inputs and never read device data on the host. Rows are int32 row numbers of
`kv`, padded with -1. Packed tokens are described by `cu_seqlens [documents + 1]` (int32 or int64, non-decreasing, from
0 to the token count, empty documents allowed), as in FlashAttention's variable-length calls. Wrong arguments raise
TypeError or ValueError (`ArgumentError` names the argument, the rule and what came).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import validation
from .errors import ArgumentTypeError, ArgumentValueError

INVALID = -1
MOST = 2**31 - 1
# Scores of one chunk of queries against all rows stay near this size.
CHUNK_BYTES = 256 << 20
_MINUS_INFINITY = -0x7F800001  # ordered bits of -inf, see _best_rows


# -- documents and ranges ------------------------------------------------------------------------------------------


def _check_rows(
    name: str, rows: Tensor, shape: tuple[int, ...] | None = None, letters: str = "", like: Tensor | None = None
) -> None:
    """Row numbers or counts of rows: an int32 or int64 tensor, of this shape and on the device of `like` if given."""
    validation.tensors((), **{name: rows})
    validation.dtype_of(name, rows.dtype, validation.INDEX_DTYPES)
    if shape is not None and tuple(rows.shape) != shape:
        raise ArgumentValueError(name, f"shape must be [{letters}] = {list(shape)}", list(rows.shape))
    if like is not None and rows.device != like.device:
        raise ArgumentValueError(name, f"must be on {like.device}, as the others", rows.device)


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, like: Tensor | None = None) -> None:
    _check_rows(name, cu_seqlens, like=like)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ArgumentValueError(name, "must be [documents + 1] with at least one document", list(cu_seqlens.shape))


def _check_count(name: str, value: int, low: int) -> None:
    validation.integer(name, value)
    if not low <= value <= MOST:
        raise ArgumentValueError(name, f"must be at least {low}, and at most 2**31 - 1, as rows", value)


def document_starts(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """First kv row of the document that holds each row number in `positions` (any shape), same dtype.

    Rows at or past `cu_seqlens[-1]` (padding behind the documents) count as one more document that starts there.
    """
    _check_rows("positions", positions)
    _check_cu_seqlens("cu_seqlens", cu_seqlens, positions)
    return cu_seqlens[_document_of(positions, cu_seqlens)].to(positions.dtype)


def _document_of(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    # right=True steps over empty documents: the last one that starts at or before the position holds it.
    found = torch.searchsorted(cu_seqlens.contiguous(), positions.to(cu_seqlens.dtype).contiguous(), right=True) - 1
    # Rows at or past the last entry are padding behind the documents, and stand together as one more.
    return found.clamp_(0, cu_seqlens.numel() - 1)


def causal_ranges(T: int, cu_seqlens: Tensor | None = None, *, q_positions: Tensor | None = None,
                  device: torch.device | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kv rows `[start, stop)` that each of T packed tokens may attend to: its document up to itself.

    Args:
        T: number of query tokens.
        cu_seqlens: documents in kv rows; `None` is a single document from row 0.
        q_positions: `[T]` kv row of each query token (default `0..T-1`); pass it when queries are a part of the
            tokens, as in context parallelism.
        device: where to build when neither tensor says so.

    Returns: `(start, stop)`, both int32 `[T]`.
    """
    _check_count("T", T, 0)
    if cu_seqlens is not None:
        _check_cu_seqlens("cu_seqlens", cu_seqlens)
    if q_positions is None:
        asked = None if device is None else validation.place(device)
        where = asked if cu_seqlens is None else cu_seqlens.device
        q_positions = torch.arange(T, device=where, dtype=torch.int32)
    else:
        _check_rows("q_positions", q_positions, (T,), "T", cu_seqlens)
    starts = torch.zeros_like(q_positions) if cu_seqlens is None else document_starts(q_positions, cu_seqlens)
    return starts.int(), (q_positions + 1).int()


def range_rows(start: Tensor, stop: Tensor, K: int) -> Tensor:
    """All rows of each range, `[..., K]` int32: `start, start + 1, ..., stop - 1`, then -1; cut off at K."""
    _check_rows("start", start)
    _check_rows("stop", stop, tuple(start.shape), "start's", start)
    _check_count("K", K, 0)
    rows = start[..., None].long() + torch.arange(K, device=start.device)
    return _narrowed(rows, (rows >= 0) & (rows < stop[..., None]), torch.int32)


def _narrowed(rows: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 rows in a narrower dtype: -1 where invalid, and where the row does not fit, never wrapped."""
    return rows.masked_fill(~valid | (rows > torch.iinfo(dtype).max), INVALID).to(dtype)


def local_to_global(indices: Tensor, start: Tensor, length: Tensor | None = None) -> Tensor:
    """Rows counted from each token's document start to rows of the packed kv.

    Args:
        indices: `[T, K]` or `[T, G, K]`, int32 or int64, local rows; anything below 0 is invalid.
        start: `[T]` first kv row of each token's document (`causal_ranges` or `document_starts`).
        length: `[T]` rows of that document; local rows at or past it become invalid. Without it, a local row past the
            end of its document would reach into the next one.

    Returns: global rows as `indices`, -1 where invalid.
    """
    _check_rows("indices", indices)
    _check_rows("start", start, tuple(indices.shape[:1]), "T", indices)
    shape = (-1,) + (1,) * (indices.dim() - 1)
    valid = (indices >= 0) & (start.view(shape) >= 0)
    if length is not None:
        _check_rows("length", length, tuple(indices.shape[:1]), "T", indices)
        valid &= indices < length.view(shape)
    return _narrowed(indices.long() + start.view(shape), valid, indices.dtype)


# -- windows and padding -------------------------------------------------------------------------------------------


def sliding_window(q_positions: Tensor, window: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The last `window` rows up to each of `q_positions [...]`: `[..., window]` int32, oldest first.

    -1 stands for rows before the start of the document, which `cu_seqlens` tells.
    """
    _check_rows("q_positions", q_positions)
    _check_count("window", window, 1)
    rows = q_positions[..., None].long() + torch.arange(1 - window, 1, device=q_positions.device)
    starts = 0 if cu_seqlens is None else document_starts(q_positions, cu_seqlens)[..., None]
    return _narrowed(rows, (rows >= 0) & (rows >= starts), torch.int32)


def compressed_positions(q_positions: Tensor, ratio: int) -> Tensor:
    """Causal bounds of `q_positions [...]` in rows of a KV compressed `ratio` to one: whole blocks up to each count.

    May be -1 (no block is complete yet). For one document whose compressed rows start at 0; packed documents are
    compressed one by one, so give positions within the document and add its first compressed row. DeepSeek-V4's
    compressed layers.
    """
    _check_rows("q_positions", q_positions)
    _check_count("ratio", ratio, 1)
    return (q_positions + 1) // ratio - 1


def window_and_selected(window_rows: Tensor, selected: Tensor, selected_offset: int = 0) -> Tensor:
    """One row of slots per token from a window and a selection (DeepSeek-V4): `[..., W + K]`.

    Args:
        window_rows: `[..., W]`, rows of the window part, -1 padded (`sliding_window`).
        selected: `[..., K]`, rows of the selected part, -1 padded (`select_topk`).
        selected_offset: first kv row of the selected part, when kv is the concatenation of uncompressed rows and
            compressed ones; 0 when both parts index the same rows. A row that stands in both parts counts twice.
    """
    _check_rows("window_rows", window_rows)
    _check_rows("selected", selected, like=window_rows)
    if selected.shape[:-1] != window_rows.shape[:-1]:
        rule = f"leading dimensions must be window_rows' {list(window_rows.shape[:-1])}"
        raise ArgumentValueError("selected", rule, list(selected.shape))
    _check_count("selected_offset", selected_offset, 0)
    return torch.cat([window_rows, torch.where(selected < 0, INVALID, selected + selected_offset)], dim=-1)


def pad_slots(indices: Tensor, multiple: int) -> Tensor:
    """`indices [..., K]` with -1 appended until K is a multiple. Ours never needs it; other kernels do."""
    _check_rows("indices", indices)
    if indices.dim() < 1:
        raise ArgumentValueError("indices", "must be [..., K]", f"shape {list(indices.shape)}")
    _check_count("multiple", multiple, 1)
    return torch.nn.functional.pad(indices, (0, -indices.shape[-1] % multiple), value=INVALID)


# -- selection -----------------------------------------------------------------------------------------------------


def select_topk(
    iq: Tensor, ik: Tensor, weights: Tensor, k: int, cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal top-k rows of the lightning indexer, `score[t, s] = sum_h weights[t, h] relu(iq[t, h] . ik[s])`.

    Args:
        iq: `[T, H_i, d]` indexer queries.
        ik: `[S_kv, d]` indexer keys, one per kv row.
        weights: `[T, H_i]` head weights.
        k: slots per row; rows with fewer candidates are padded with -1.
        cu_seqlens: documents in kv rows; a token only selects from the document that holds its position.
        q_positions: `[T]` kv row of each token, the last it may select (default `t + S_kv - T`; may be negative).

    Returns: int32 `[T, k]`, global rows in falling order of score, later rows first among equal scores. Sums are fp32
    (float64 for float64 inputs), compared in fp32. Memory is bounded by chunks over tokens.

    Source: DeepSeek-V3.2, lightning indexer.
    """
    _check_indexer(iq, ik, weights, k)
    T, heads, _ = iq.shape
    S_kv = ik.shape[0]
    if q_positions is None:
        q_positions = torch.arange(T, device=iq.device) + (S_kv - T)
    else:
        _check_rows("q_positions", q_positions, (T,), "T", iq)
    if cu_seqlens is not None:
        _check_cu_seqlens("cu_seqlens", cu_seqlens, iq)
    start, stop = causal_ranges(T, cu_seqlens, q_positions=q_positions)
    compute = torch.float64 if iq.dtype == torch.float64 else torch.float32
    keys = ik.to(compute)
    row_number = torch.arange(S_kv, device=iq.device)
    rows = torch.full((T, k), INVALID, dtype=torch.int32, device=iq.device)
    take = min(k, S_kv)
    step = max(1, CHUNK_BYTES // max((heads + 9) * S_kv * compute.itemsize, 1))
    for first in range(0, T if take else 0, step):
        chunk = slice(first, first + step)
        # Autocast would compute the scores in 16 bits.
        with torch.autocast(iq.device.type, enabled=False):
            logits = torch.einsum("thd,sd->ths", iq[chunk].to(compute), keys).relu_()
            scores = torch.einsum("ths,th->ts", logits, weights[chunk].to(compute))
        outside = (row_number < start[chunk, None]) | (row_number >= stop[chunk, None])
        rows[chunk, :take] = _best_rows(scores.masked_fill_(outside, float("-inf")), take)
    return rows


def _best_rows(scores: Tensor, k: int) -> Tensor:
    """Rows of the k largest scores `[t, S_kv]`, best first, later rows first among equals; -1 for a score of -inf.

    One int64 key per pair, the score's bits above the row number, so equal scores are ranked alike on every device and
    in every packing: relu makes exact ties common.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 equal to 0.0
    # Negative floats order backwards by their bits; flipping all but the sign mends that.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) | torch.arange(scores.shape[-1], device=scores.device)
    best = keys.topk(k, dim=-1).values
    return (best & 0xFFFFFFFF).masked_fill_((best >> 32) <= _MINUS_INFINITY, INVALID).int()


def _check_indexer(iq: Tensor, ik: Tensor, weights: Tensor, k: int) -> None:
    for name, tensor, rank, letters in (
        ("iq", iq, 3, "[T, H_i, d]"),
        ("ik", ik, 2, "[S_kv, d]"),
        ("weights", weights, 2, "[T, H_i]"),
    ):
        validation.tensors((), **{name: tensor})
        if tensor.dim() != rank:
            raise ArgumentValueError(name, f"must be {letters}", f"shape {list(tensor.shape)}")
        if tensor.is_complex():
            raise ArgumentTypeError(name, "must be real", tensor.dtype)
        if tensor.device != iq.device:
            raise ArgumentValueError(name, f"must be on iq's device {iq.device}", tensor.device)
    if ik.shape[1] != iq.shape[2]:
        raise ArgumentValueError("ik", f"last dimension must be iq's d = {iq.shape[2]}", list(ik.shape))
    if weights.shape != iq.shape[:2]:
        raise ArgumentValueError("weights", f"shape must be [T, H_i] = {list(iq.shape[:2])}", list(weights.shape))
    _check_count("k", k, 0)


# -- overlap -------------------------------------------------------------------------------------------------------


def union_ratios(indices: Tensor, S_kv: int, groups: Sequence[int] = (2, 4, 8, 16)) -> dict[int, float]:
    """How many distinct kv rows n neighbouring tokens select together, over K.

    Args:
        indices: `[T, K]`; a slot is valid when its entry lies in `0..S_kv-1`.
        S_kv: number of kv rows.
        groups: numbers of neighbouring tokens; group i of size n holds tokens `n i` to `n i + n - 1`.

    Returns: per n the mean of `|union of the group's rows| / K`, from 1 (all rows alike) to n (all disjoint), over
    complete groups whose slots are all valid: the first tokens of a causal document select all there is, which says
    nothing. NaN without such a group. Reads its result on the host: for reports, not for the hot path.
    """
    _check_rows("indices", indices)
    if indices.dim() != 2:
        raise ArgumentValueError("indices", "must be [T, K]", f"shape {list(indices.shape)}")
    if indices.device.type == "meta":
        raise ArgumentValueError("indices", "must have values, which are read", indices.device)
    _check_count("S_kv", S_kv, 0)
    if not isinstance(groups, (tuple, list)):
        raise ArgumentTypeError("groups", "must be a sequence of ints", type(groups).__name__)
    for n in groups:
        _check_count("groups", n, 1)
    T, K = indices.shape
    full = ((indices >= 0) & (indices < S_kv)).all(dim=1)
    step = max(1, CHUNK_BYTES // max(S_kv, 1))
    ratios = {}
    for n in groups:
        complete = T // n
        whole = full[: complete * n].view(complete, n).all(dim=1)
        rows = indices[: complete * n].reshape(complete, n * K)
        union = torch.zeros((), dtype=torch.int64, device=indices.device)
        for first in range(0, complete, step):
            chunk = rows[first : first + step][whole[first : first + step]].long()
            seen = torch.zeros(chunk.shape[0], S_kv, dtype=torch.bool, device=indices.device)
            union += seen.scatter_(1, chunk, True).sum()
        slots = int(whole.sum()) * K
        ratios[n] = int(union) / slots if slots else float("nan")
    return ratios
