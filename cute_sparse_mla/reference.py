"""The whole contract in plain torch, forward and backward, on any device.

One implementation serves three purposes, told apart only by where it rounds (`Roundings`):

* `oracle()`: float64 throughout on the inputs as rounded; what every kernel is judged against.
* `default(dtype)`: fp32 arithmetic, outputs in the input dtype; the CPU path and the fallback for unknown GPUs.
* `budget(dtype)`: the error that the contract grants. As the default, but P and dS are rounded once to the input dtype
  before they enter their second matrix product, as a tensor-core kernel must.

Equations (`s = sm_scale q k`, sums over the valid slots of a row):

    lse    = ln sum exp(s)                  w  = sigmoid(lse - sink)          p_hat = exp(s - lse)
    out    = w sum p_hat v                  dP = dout . v                     Delta = sum dout * out
    dS     = p_hat (w (dP - Delta) + dlse)  dq = sm_scale sum dS k            d_sink = -sum_t (1 - w) Delta
    dk_row = sm_scale dS q                  dv_row = w p_hat dout

Tensors are batched: `q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]`, as in `problem.Problem`. Work runs
over chunks of tokens and slots, so memory stays near `CHUNK_BYTES` whatever the lengths. Nothing here reads device
data on the host. On CUDA torch's matmul precision applies: leave TF32 off (the default) for fp32 scores.

Sources: the softmax recurrence over slot chunks is Milakov and Gimelshein (2018); `Delta` is the row term of
FlashAttention-2's backward; the sink is one extra logit without a value (StreamingLLM, gpt-oss).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import MaybeTensor

# Working set of one chunk: gathered rows and scores. More gains nothing on a CPU.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# Longer rows are split every so many slots, whatever the number of tokens: a row's result must not depend on others.
WHOLE_ROW = 4096
# Bytes per slot that resolving validity takes; it runs over whole rows.
VALIDITY_BYTES = 4


@dataclass(frozen=True)
class Roundings:
    """Where values are rounded: arithmetic in `compute`, P and dS once to `operands`, results to `outputs`."""

    compute: torch.dtype
    operands: torch.dtype
    outputs: torch.dtype


def oracle() -> Roundings:
    """No rounding beyond float64."""
    return Roundings(torch.float64, torch.float64, torch.float64)


def default(dtype: torch.dtype) -> Roundings:
    """fp32 arithmetic (float64 for float64 inputs), outputs in `dtype`."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return Roundings(compute, compute, dtype)


def budget(dtype: torch.dtype) -> Roundings:
    """The budget implementation of the contract's precision clause."""
    return Roundings(torch.float32, dtype, dtype)


class Forward(NamedTuple):
    """`out [B, S, H, d_v]`, `lse [B, S, H]`, and `max |s|` over valid slots `[B, S, H]` (0 for an empty row)."""

    out: Tensor
    lse: Tensor
    max_abs_score: Tensor


class Backward(NamedTuple):
    """`dq`, `dkv` as their inputs, `d_sink [H]`, and `sum_t |(1 - w) Delta|` per head (both `None` without a sink)."""

    dq: Tensor
    dkv: Tensor
    d_sink: Tensor | None
    d_sink_abs: Tensor | None


# -- slots ---------------------------------------------------------------------------------------------------------


def valid_slots(indices: Tensor, S_kv: int, positions: Tensor | None, topk_length: Tensor | None) -> Tensor:
    """The contract's validity of every slot: `bool [..., G, K]` for `indices [..., G, K]`.

    `positions [...]` are the causal bounds (`None`: no bound), `topk_length [...]` the slots that count. Indices keep
    their width, so nothing wraps.
    """
    valid = (indices >= 0) & (indices < S_kv)
    if topk_length is not None:
        valid &= torch.arange(indices.shape[-1], device=indices.device) < topk_length[..., None, None]
    if positions is not None:
        valid &= indices <= positions[..., None, None]
    return valid


class _Tokens:
    """The flattened (B, S) axis: chunks of it, and a chunk of any `[B, S, ...]` tensor without copying the whole."""

    def __init__(self, B: int, S: int, device: torch.device) -> None:
        self.B, self.S, self.device = B, S, device

    def chunks(self, per_token_bytes: int) -> Iterator[slice]:
        step = max(1, CHUNK_BYTES.get(self.device.type, CHUNK_BYTES["cpu"]) // max(per_token_bytes, 1))
        return _chunks(self.B * self.S, step)

    def batch_entry(self, tokens: slice) -> Tensor:
        """Batch entry of every token of a chunk, `[t]`."""
        return torch.arange(tokens.start, tokens.stop, device=self.device) // self.S

    def take(self, tensor: MaybeTensor, tokens: slice) -> MaybeTensor:
        """The chunk of a `[B, S, ...]` tensor as `[t, ...]`."""
        if tensor is None:
            return None
        if self.B == 1:
            return tensor[0, tokens]
        number = torch.arange(tokens.start, tokens.stop, device=self.device)
        return tensor[number // self.S, number % self.S]


def _chunks(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


@dataclass(frozen=True)
class _Slots:
    """The slots of one chunk of tokens: `indices` and `valid`, both `[t, G, K]`, and each token's batch entry."""

    indices: Tensor
    valid: Tensor
    batch: Tensor | None
    kv: Tensor
    compute: torch.dtype

    def rows(self, group: int, slots: slice) -> tuple[Tensor, Tensor, Tensor]:
        """`(rows [t, k, D] in the compute dtype, valid [t, k], flat row number [t, k])`.

        Invalid slots come back as zero rows, so a NaN in a row that nobody selected cannot reach a sum; their flat row
        number is one past the last row of the last batch entry.
        """
        valid = self.valid[:, group, slots]
        index = self.indices[:, group, slots].long().masked_fill(~valid, 0)
        table, S_kv = self.kv[:, :, group], self.kv.shape[1]
        if self.batch is None:
            rows, number = table[0].index_select(0, index.flatten()).view(*index.shape, -1), index
        else:
            batch = self.batch[:, None].expand_as(index)
            rows, number = table[batch, index], index + batch * S_kv
        rows = rows.to(self.compute).masked_fill_(~valid[..., None], 0)
        return rows, valid, number.masked_fill(~valid, self.kv.shape[0] * S_kv)


@dataclass(frozen=True)
class _Selection:
    """The whole call's slots; `take` resolves those of a chunk of tokens."""

    kv: Tensor
    indices: Tensor
    causal: bool
    q_positions: Tensor | None
    topk_length: Tensor | None
    compute: torch.dtype

    def take(self, axis: _Tokens, tokens: slice) -> _Slots:
        indices = axis.take(self.indices, tokens)
        S_kv = self.kv.shape[1]
        positions = axis.take(self.q_positions, tokens)
        if self.causal and positions is None:
            number = torch.arange(tokens.start, tokens.stop, device=axis.device)
            positions = number % axis.S + (S_kv - axis.S)
        valid = valid_slots(indices, S_kv, positions, axis.take(self.topk_length, tokens))
        return _Slots(indices, valid, axis.batch_entry(tokens) if axis.B > 1 else None, self.kv, self.compute)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` per token, `[t, m, k] @ [t, k, n]`."""
    if a.shape[0] != 1:
        return torch.bmm(a, b)
    # A lone matrix takes another path through the BLAS than one of many, with other roundings.
    return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """`target += a @ b` per token."""
    if a.shape[0] != 1:
        target.baddbmm_(a, b)
    else:
        target.copy_(torch.baddbmm(target.expand(2, -1, -1), a.expand(2, -1, -1), b.expand(2, -1, -1))[:1])


def _masked_scores(q: Tensor, rows: Tensor, valid: Tensor, sm_scale: float) -> Tensor:
    """`s [t, h, k]`, `-inf` at invalid slots."""
    scores = _product(q, rows.transpose(1, 2)).mul_(sm_scale)
    return scores.masked_fill_(~valid[:, None, :], float("-inf"))


def _is_empty(lse: Tensor) -> Tensor:
    return lse == float("-inf")


def _sink_weights(lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """`w` and `1 - w`, each exact to the last bits for any sink; both are 0 in an empty row."""
    empty = _is_empty(lse)
    if sink is None:
        ones = torch.ones_like(lse)
        return ones.masked_fill(empty, 0), torch.zeros_like(lse)
    w, rest = torch.sigmoid(lse - sink), torch.sigmoid(sink - lse)
    return w.masked_fill(empty, 0), rest.masked_fill(empty, 0)


# -- forward -------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float, d_v: int, causal: bool = False,
    q_positions: Tensor | None = None, topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
    roundings: Roundings | None = None,
) -> Forward:  # fmt: skip
    """`out` and `lse` of the contract; `lse` is fp32, or float64 where the compute dtype is."""
    rule = roundings or default(q.dtype)
    B, S, H, D = q.shape
    S_kv, G, K = kv.shape[1], kv.shape[2], indices.shape[3]
    h, item = H // G, rule.compute.itemsize
    # Results are returned as allocated, not as views: autograd forbids changing a view from an op in place.
    out = q.new_zeros((B, S, H, d_v), dtype=rule.outputs)
    lse = q.new_full((B, S, H), float("-inf"), dtype=rule.compute)
    max_abs = torch.zeros_like(lse)
    if 0 in (B * S, S_kv, K):
        return Forward(out, lse, max_abs)
    out_rows, lse_rows, max_abs_rows = out.view(B * S, H, d_v), lse.view(B * S, H), max_abs.view(B * S, H)

    axis = _Tokens(B, S, q.device)
    selection = _Selection(kv, indices, causal, q_positions, topk_length, rule.compute)
    sink = None if attn_sink is None else attn_sink.to(rule.compute)
    per_slot = (2 * D + 3 * h) * item
    for tokens in axis.chunks(min(K, WHOLE_ROW) * per_slot + G * K * VALIDITY_BYTES):
        chunk, q_chunk = selection.take(axis, tokens), axis.take(q, tokens)
        for group in range(G):
            heads = slice(group * h, (group + 1) * h)
            q_group = q_chunk[:, heads].to(rule.compute)
            state = _OnlineSoftmax(q_group.shape[0], h, d_v, rule, q.device)
            for slots in _chunks(K, WHOLE_ROW):
                rows, valid, _ = chunk.rows(group, slots)
                state.add(_masked_scores(q_group, rows, valid, sm_scale), rows[..., :d_v])
            result, row_lse = state.finish(None if sink is None else sink[heads])
            out_rows[tokens, heads] = result.to(rule.outputs)
            lse_rows[tokens, heads], max_abs_rows[tokens, heads] = row_lse, state.max_abs
    return Forward(out, lse, max_abs)


def max_scores(
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float, causal: bool = False,
    q_positions: Tensor | None = None, topk_length: Tensor | None = None, roundings: Roundings | None = None,
) -> Tensor:  # fmt: skip
    """The largest `s` over the valid slots of each row, `[B, S, H]` in the compute dtype; -inf for an empty row."""
    rule = roundings or default(q.dtype)
    B, S, H, D = q.shape
    S_kv, G, K = kv.shape[1], kv.shape[2], indices.shape[3]
    h, item = H // G, rule.compute.itemsize
    largest = q.new_full((B, S, H), float("-inf"), dtype=rule.compute)
    if 0 in (B * S, S_kv, K):
        return largest
    largest_rows = largest.view(B * S, H)
    axis = _Tokens(B, S, q.device)
    selection = _Selection(kv, indices, causal, q_positions, topk_length, rule.compute)
    for tokens in axis.chunks(min(K, WHOLE_ROW) * (2 * D + h) * item + G * K * VALIDITY_BYTES):
        chunk, q_chunk = selection.take(axis, tokens), axis.take(q, tokens)
        for group in range(G):
            heads = slice(group * h, (group + 1) * h)
            for slots in _chunks(K, WHOLE_ROW):
                rows, valid, _ = chunk.rows(group, slots)
                scores = _masked_scores(q_chunk[:, heads].to(rule.compute), rows, valid, sm_scale)
                largest_rows[tokens, heads] = torch.maximum(largest_rows[tokens, heads], scores.amax(-1))
    return largest


class _OnlineSoftmax:
    """Running maximum, sum and weighted values of a row over chunks of its slots."""

    def __init__(self, tokens: int, heads: int, d_v: int, rule: Roundings, device: torch.device) -> None:
        self.operands = rule.operands
        self.maximum = torch.full((tokens, heads), float("-inf"), dtype=rule.compute, device=device)
        self.total = torch.zeros_like(self.maximum)
        self.max_abs = torch.zeros_like(self.maximum)
        self.values = torch.zeros((tokens, heads, d_v), dtype=rule.compute, device=device)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Fold in `scores [t, h, k]` (-inf where invalid) and `values [t, k, d_v]`."""
        maximum = torch.maximum(self.maximum, scores.amax(-1))
        # A row without a valid slot so far keeps -inf; shifting by 0 then keeps every exponential at 0.
        shift = maximum.masked_fill(maximum == float("-inf"), 0)
        self.max_abs = torch.maximum(self.max_abs, scores.masked_fill(scores == float("-inf"), 0).abs().amax(-1))
        decay = torch.exp(self.maximum - shift)
        p = scores.sub_(shift[..., None]).exp_()
        self.total = self.total * decay + p.sum(-1)
        p = p.to(self.operands).to(values.dtype)
        _add_product(self.values.mul_(decay[..., None]), p, values)
        self.maximum = maximum

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(out [t, h, d_v], lse [t, h])`."""
        lse = self.maximum + self.total.log()
        w, _ = _sink_weights(lse, sink)
        # w goes in last: a weight that underflows must not spoil the quotient.
        safe_total = self.total.masked_fill(self.total == 0, 1)
        return self.values / safe_total[..., None] * w[..., None], lse


# -- backward ------------------------------------------------------------------------------------------------------


def backward(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, *, sm_scale: float,
    dlse: Tensor | None = None, causal: bool = False, q_positions: Tensor | None = None,
    topk_length: Tensor | None = None, attn_sink: Tensor | None = None, dkv: Tensor | None = None,
    dkv_dtype: torch.dtype | None = None, deterministic: bool = False, roundings: Roundings | None = None,
) -> Backward:  # fmt: skip
    """Gradients of the contract. `dkv` (fp32, contiguous) is added into; `dkv_dtype` overrides the rounding of dkv.

    `dkv` is summed in the compute dtype and rounded once. `deterministic` only matters on CUDA, where it replaces
    atomic adds by a sorted accumulation.
    """
    rule = roundings or default(q.dtype)
    B, S, H, D = q.shape
    S_kv, G, K = kv.shape[1], kv.shape[2], indices.shape[3]
    h, d_v, item = H // G, out.shape[-1], rule.compute.itemsize
    sink = None if attn_sink is None else attn_sink.to(rule.compute)
    d_sink = d_sink_abs = None if sink is None else torch.zeros_like(sink)
    dq = q.new_zeros((B, S, H, D), dtype=rule.outputs)
    dq_rows = dq.view(B * S, H, D) if B * S else dq
    # One row past the end takes what invalid slots would add, so no real row is touched by them.
    sums = q.new_zeros((B * S_kv + 1, G, D), dtype=rule.compute)
    # Only a caller's buffer has rows to leave alone.
    touched = None if dkv is None else torch.zeros(B * S_kv + 1, G, dtype=torch.bool, device=q.device)
    axis = _Tokens(B, S, q.device)
    selection = _Selection(kv, indices, causal, q_positions, topk_length, rule.compute)
    per_slot = (3 * D + 5 * h) * item
    for tokens in axis.chunks(max(min(K, WHOLE_ROW) * per_slot + G * K * VALIDITY_BYTES, 4 * H * D * item)):
        row = _row_terms(
            axis.take(out, tokens), axis.take(dout, tokens), axis.take(lse, tokens), axis.take(dlse, tokens), sink,
            rule.compute,
        )  # fmt: skip
        if sink is not None and d_sink is not None and d_sink_abs is not None:
            terms = _sink_terms(row, sink)
            d_sink, d_sink_abs = d_sink - terms.sum(0), d_sink_abs + terms.abs().sum(0)
        if 0 in (S_kv, K):
            continue
        chunk, q_chunk = selection.take(axis, tokens), axis.take(q, tokens)
        for group in range(G):
            heads = slice(group * h, (group + 1) * h)
            q_group, group_row = q_chunk[:, heads].to(rule.compute), row.heads(heads)
            grad_q = torch.zeros_like(q_group)
            for slots in _chunks(K, WHOLE_ROW):
                rows, valid, number = chunk.rows(group, slots)
                p, dS = _score_gradients(q_group, rows, valid, group_row, sm_scale, d_v)
                p, dS = (x.to(rule.operands).to(rule.compute) for x in (p, dS))
                _add_product(grad_q, dS, rows)
                grad_rows = _product(dS.transpose(1, 2), q_group).mul_(sm_scale)
                _add_product(grad_rows[..., :d_v], p.transpose(1, 2), group_row.dout)
                _add_rows(sums[:, group], number.flatten(), grad_rows.flatten(0, 1), deterministic)
                if touched is not None:
                    touched[:, group].index_fill_(0, number.flatten(), True)
            dq_rows[tokens, heads] = grad_q.mul_(sm_scale).to(rule.outputs)
    result = _finish_dkv(sums, touched, (B, S_kv, G, D), dkv, dkv_dtype or rule.outputs)
    return Backward(dq, result, d_sink, d_sink_abs)


class _RowTerms(NamedTuple):
    """Per-row inputs of the backward for a chunk: `dout [t, H, d_v]`; the rest `[t, H]` (`rest` is `1 - w`)."""

    dout: Tensor
    delta: Tensor
    lse: Tensor
    w: Tensor
    rest: Tensor
    dlse: Tensor | None

    def heads(self, heads: slice) -> _RowTerms:
        dlse = None if self.dlse is None else self.dlse[:, heads]
        return _RowTerms(
            self.dout[:, heads], self.delta[:, heads], self.lse[:, heads], self.w[:, heads], self.rest[:, heads], dlse
        )


def _row_terms(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor | None, compute: torch.dtype
) -> _RowTerms:
    dout, lse = dout.to(compute), lse.to(compute)
    # Whatever an empty row's out, dout or dlse hold must not reach a gradient.
    delta = torch.linalg.vecdot(dout, out.to(compute)).masked_fill(_is_empty(lse), 0)
    w, rest = _sink_weights(lse, sink)
    return _RowTerms(dout, delta, lse, w, rest, None if dlse is None else dlse.to(compute))


def _sink_terms(row: _RowTerms, sink: Tensor) -> Tensor:
    """`(1 - w) Delta` per token and head."""
    # out is 0 under an infinite sink, and so is the sink's gradient, whatever `out` was passed.
    return (row.rest * row.delta).masked_fill(sink.isinf(), 0)


def sink_gradient(
    out: Tensor, dout: Tensor, lse: Tensor, attn_sink: Tensor, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`d_sink` alone, from `out` and `lse` as passed, and the sum of its absolute terms: both `[H]`."""
    B, S, H, d_v = out.shape
    axis, sink = _Tokens(B, S, out.device), attn_sink.to(compute)
    total, absolute = torch.zeros_like(sink), torch.zeros_like(sink)
    for tokens in axis.chunks(4 * H * d_v * compute.itemsize):
        chunk = axis.take(out, tokens), axis.take(dout, tokens), axis.take(lse, tokens)
        row = _row_terms(chunk[0], chunk[1], chunk[2], None, sink, compute)
        terms = _sink_terms(row, sink)
        total, absolute = total - terms.sum(0), absolute + terms.abs().sum(0)
    return total, absolute


def _score_gradients(
    q: Tensor, rows: Tensor, valid: Tensor, row: _RowTerms, sm_scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    """`p = w p_hat` and `dS`, both `[t, h, k]`, exactly 0 at invalid slots."""
    invalid = ~valid[:, None, :]
    lse = row.lse.masked_fill(_is_empty(row.lse), 0)
    p_hat = _masked_scores(q, rows, valid, sm_scale).sub_(lse[..., None]).exp_()
    dP = _product(row.dout, rows[..., :d_v].transpose(1, 2))
    slope = dP.sub_(row.delta[..., None]).mul_(row.w[..., None])
    if row.dlse is not None:
        slope.add_(row.dlse[..., None])
    dS = slope.mul_(p_hat).masked_fill_(invalid, 0)
    return p_hat.mul_(row.w[..., None]), dS


def _add_rows(target: Tensor, number: Tensor, rows: Tensor, deterministic: bool) -> None:
    if deterministic and target.is_cuda:
        # Accumulating index_put sorts its indices on CUDA, which fixes the order of the sum.
        target.index_put_((number,), rows, accumulate=True)
    else:
        target.index_add_(0, number, rows)


def _finish_dkv(
    sums: Tensor, touched: Tensor | None, shape: tuple[int, int, int, int], dkv: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if dkv is None or touched is None:
        # The row past the end goes without a copy where the sums themselves are wanted.
        return sums.resize_(shape) if sums.dtype == dtype else sums[:-1].view(shape).to(dtype)
    sums, touched = sums[:-1].view(shape), touched[:-1].view(*shape[:-1], 1)
    # Rows that no valid slot selects keep their bits: even adding 0.0 would change a -0.0.
    return dkv.copy_(torch.where(touched, dkv + sums, dkv))
