"""The contract's precision clause: results of an implementation against the float64 oracle and the budget.

For `out`, `dq` and `dkv`, with row norms over the last dimension, `e` the error against the oracle and `b` the budget
implementation's: `rms(e) <= 1.5 rms(b) + floor` in total and `|e_r| <= 2 |b_r| + floor` for every row, the floor being
1e-3 of the oracle's RMS row norm. `lse` within `1e-5 + 2e-6 max|s|` per row, `d_sink` within 1e-3 of the sum
of absolute terms. Nothing may be non-finite, except `lse = -inf` exactly where a row is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference, validation
from .reference import Backward, Forward, Roundings
from .validation import Call

TOTAL_FACTOR, ROW_FACTOR, FLOOR = 1.5, 2.0, 1e-3


@dataclass(frozen=True)
class Inputs:
    """The arguments of one forward and backward, in the caller's form; tensors as in `api`."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    dout: Tensor
    d_v: int
    sm_scale: float
    causal: bool = False
    q_positions: Tensor | None = None
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    dlse: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keywords shared by `fwd` and `bwd`."""
        names = ("sm_scale", "causal", "q_positions", "topk_length", "attn_sink")
        return {name: getattr(self, name) for name in names}


class Results(NamedTuple):
    """What a forward and backward return, in the caller's form."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dkv: Tensor
    d_sink: Tensor | None


@dataclass(frozen=True)
class TensorCheck:
    """One tensor against its limits. `total` and `worst_row` are errors over their limits: at most 1 passes.

    `error` is the total error relative to the oracle's norm (for `lse`, `d_sink`: the largest absolute error);
    `leading` the tensor's shape without its last dimension, which makes `worst_row_index` a position.
    """

    name: str
    error: float
    total: float
    worst_row: float
    worst_row_index: int
    nonfinite: int
    leading: tuple[int, ...] = ()

    @property
    def worst_row_at(self) -> tuple[int, ...]:
        """Position of the worst row in the tensor's leading dimensions, such as (token, head)."""
        number, position = self.worst_row_index, []
        for length in reversed(self.leading):
            number, place = divmod(number, length)
            position.append(place)
        return tuple(reversed(position)) if self.leading else (number,)

    @property
    def ok(self) -> bool:
        return self.nonfinite == 0 and self.total <= 1 and self.worst_row <= 1

    def __str__(self) -> str:
        state = "ok  " if self.ok else "MISS"
        text = f"{state} {self.name:6s} error {self.error:9.2e}   of limit: total {self.total:5.2f}, "
        text += f"worst row {self.worst_row:5.2f} at {list(self.worst_row_at)}"
        return text + (f", {self.nonfinite} non-finite values" if self.nonfinite else "")


def run(inputs: Inputs, fwd: Callable, bwd: Callable, **options: Any) -> Results:
    """Forward and backward through functions with the signatures of `api.fwd` and `api.bwd`."""
    out, lse = fwd(inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, **inputs.options, **options)
    gradients = bwd(
        inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, **inputs.options, **options
    )
    return Results(out, lse, *gradients)


class Judge:
    """The oracle's and the budget's results for one set of inputs, and the comparison with others.

    The forward is judged on the inputs, the backward on the inputs plus `out` and `lse` as the backward was given them:
    the contract defines `Delta` and `w` on those. Judged on the oracle's own `out` instead, a row with few valid slots
    is dominated by one scalar, the rounding of its `Delta`, and no multiple of the budget's bounds the ratio of two
    such scalars.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.packed = inputs.q.dim() == 3
        self.rules = reference.oracle(), reference.budget(inputs.q.dtype)

    @cached_property
    def call(self) -> Call:
        """The checked call, batched."""
        i = self.inputs
        return validation.forward(
            i.q, i.kv, i.indices, d_v=i.d_v, causal=i.causal,
            q_positions=i.q_positions, topk_length=i.topk_length, attn_sink=i.attn_sink,
        )  # fmt: skip

    @property
    def _options(self) -> dict[str, Any]:
        c, i = self.call, self.inputs
        optional = dict(q_positions=c.q_positions, topk_length=c.topk_length, attn_sink=c.attn_sink)
        return dict(sm_scale=i.sm_scale, causal=i.causal, **optional)

    @cached_property
    def forwards(self) -> tuple[Forward, Forward]:
        """The oracle's and the budget's forward in the caller's form; computed once."""
        c = self.call
        oracle, budget = (
            reference.forward(c.q, c.kv, c.indices, d_v=self.inputs.d_v, roundings=rule, **self._options)
            for rule in self.rules
        )
        return (Forward(*(t[0] for t in oracle)), Forward(*(t[0] for t in budget))) if self.packed else (oracle, budget)

    def gradients(self, out: Tensor, lse: Tensor, roundings: Roundings) -> Backward:
        """The reference's backward for `out` and `lse` as passed, in the caller's form."""
        c, i = self.call, self.inputs
        dout, dlse = i.dout, i.dlse
        if self.packed:
            out, lse, dout, dlse = out[None], lse[None], dout[None], None if dlse is None else dlse[None]
        result = reference.backward(
            c.q, c.kv, out, dout, c.indices, lse, dlse=dlse, roundings=roundings, **self._options
        )
        return result._replace(dq=result.dq[0], dkv=result.dkv[0]) if self.packed else result

    @cached_property
    def oracle(self) -> Results:
        """float64 results, the backward on the oracle's own `out` and `lse`."""
        return self._end_to_end(0)

    @cached_property
    def budget(self) -> Results:
        """The budget implementation's results, the backward on its own `out` and `lse`."""
        return self._end_to_end(1)

    def budget_forward(self) -> tuple[Tensor, Tensor]:
        """The budget implementation's `(out, lse)`."""
        return self.forwards[1].out, self.forwards[1].lse

    def _end_to_end(self, which: int) -> Results:
        out, lse, _ = self.forwards[which]
        dq, dkv, d_sink, _ = self.gradients(out, lse, self.rules[which])
        return Results(out, lse, dq, dkv, d_sink)

    def forward_checks(self, out: Tensor | None = None, lse: Tensor | None = None) -> list[TensorCheck]:
        """`out` and `lse`, those that are given, against the clause."""
        if out is None and lse is None:
            return []
        oracle, budget = self.forwards
        checks = []
        if out is not None:
            checks.append(compare_rows("out", out, oracle.out, budget.out))
        if lse is not None:
            checks.append(compare_lse(lse, oracle.lse, oracle.max_abs_score))
        return checks

    def gradient_checks(
        self, out: Tensor, lse: Tensor, dq: Tensor | None = None, dkv: Tensor | None = None,
        d_sink: Tensor | None = None,
    ) -> list[TensorCheck]:  # fmt: skip
        """Gradients, those that are given, of a backward that was passed `out` and `lse`, against the clause."""
        if dq is None and dkv is None and d_sink is None:
            return []
        exact, granted = (self.gradients(out, lse, rule) for rule in self.rules)
        checks = []
        if dq is not None:
            checks.append(compare_rows("dq", dq, exact.dq, granted.dq))
        if dkv is not None:
            checks.append(compare_rows("dkv", dkv, exact.dkv, granted.dkv))
        if d_sink is not None and exact.d_sink is not None and exact.d_sink_abs is not None:
            checks.append(compare_d_sink(d_sink, exact.d_sink, exact.d_sink_abs))
        return checks

    def checks(self, got: Results) -> list[TensorCheck]:
        """Every tensor of a forward and of the backward that followed it."""
        return self.forward_checks(got.out, got.lse) + self.gradient_checks(*got)


def _row_norms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=-1).flatten()


def _rms(norms: Tensor) -> float:
    return float(norms.square().mean().sqrt()) if norms.numel() else 0.0


def _ratio(value: float, limit: float) -> float:
    return value / limit if limit > 0 else (0.0 if value == 0 else float("inf"))


def _worst(errors: Tensor, limits: Tensor) -> tuple[float, int]:
    """Largest error over its limit, and the row it stands in; 0 over 0 passes."""
    if not errors.numel():
        return 0.0, 0
    ratios = torch.where(errors == 0, torch.zeros_like(errors), errors / limits).nan_to_num(nan=float("inf"))
    row = int(ratios.argmax())
    return float(ratios[row]), row


def _same_shape(name: str, got: Tensor, oracle: Tensor) -> None:
    # A difference would broadcast, and a wrong shape pass for a right one.
    if got.shape != oracle.shape:
        raise ValueError(f"{name}: shape {list(got.shape)} instead of {list(oracle.shape)}")


def compare_rows(name: str, got: Tensor, oracle: Tensor, budget: Tensor) -> TensorCheck:
    """A tensor of rows `[..., n]` against the oracle, within the budget implementation's error."""
    _same_shape(name, got, oracle)
    exact = oracle.double()
    errors, granted = _row_norms(got.double() - exact), _row_norms(budget.double() - exact)
    norm = _rms(_row_norms(exact))
    floor = FLOOR * norm
    worst, row = _worst(errors, ROW_FACTOR * granted + floor)
    total = _ratio(_rms(errors), TOTAL_FACTOR * _rms(granted) + floor)
    nonfinite = int((~torch.isfinite(got)).sum())
    error = _ratio(_rms(errors), norm) if norm else _rms(errors)
    return TensorCheck(name, error, total, worst, row, nonfinite, tuple(oracle.shape[:-1]))


def compare_lse(got: Tensor, oracle: Tensor, max_abs_score: Tensor) -> TensorCheck:
    """`lse` within `1e-5 + 2e-6 max|s|`; empty rows must be -inf exactly and no other row may be."""
    _same_shape("lse", got, oracle)
    leading = tuple(oracle.shape)
    got, exact = got.double().flatten(), oracle.double().flatten()
    bound = max_abs_score.double().flatten()
    empty = exact == float("-inf")
    nonfinite = int(((got == float("-inf")) != empty).sum() + (~torch.isfinite(got) & ~empty).sum())
    errors = (got - exact).abs().masked_fill(empty, 0)
    worst, row = _worst(errors, 1e-5 + 2e-6 * bound)
    return TensorCheck("lse", float(errors.max()) if errors.numel() else 0.0, worst, worst, row, nonfinite, leading)


def compare_d_sink(got: Tensor, oracle: Tensor, absolute_terms: Tensor) -> TensorCheck:
    """`d_sink` within 1e-3 of the sum of absolute terms, per head."""
    _same_shape("d_sink", got, oracle)
    errors = (got.double() - oracle.double()).abs()
    # Below fp32's smallest normal number there is nothing to compare: a sink far above or below lse gets there.
    worst, row = _worst(errors, 1e-3 * absolute_terms.double() + torch.finfo(torch.float32).tiny)
    nonfinite = int((~torch.isfinite(got)).sum())
    return TensorCheck("d_sink", float(errors.max()) if errors.numel() else 0.0, worst, worst, row, nonfinite)
