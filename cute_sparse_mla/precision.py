"""The contract's precision clause: results of an implementation against the float64 oracle and the budget.

For `out`, `dq` and `dkv`, with row norms over the last dimension, `e` the error against the oracle and `b` the budget
implementation's: `rms(e) <= 1.5 rms(b) + floor` in total and `|e_r| <= 2 |b_r| + floor` for every row, the floor being
1e-3 of the oracle's RMS row norm. `lse` within `1e-5 + 2e-6 max|s|` per row; `d_sink`, on out and lse as
passed, within 1e-3 of the sum of absolute terms. Nothing may be non-finite, except `lse = -inf` exactly where a row is
empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference, validation
from .reference import Roundings

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

    `error` is the total error relative to the oracle's norm (for `lse`, `d_sink`: the largest absolute error).
    """

    name: str
    error: float
    total: float
    worst_row: float
    worst_row_index: int
    nonfinite: int

    @property
    def ok(self) -> bool:
        return self.nonfinite == 0 and self.total <= 1 and self.worst_row <= 1

    def __str__(self) -> str:
        state = "ok  " if self.ok else "MISS"
        text = f"{state} {self.name:6s} error {self.error:9.2e}   of limit: total {self.total:5.2f}, "
        text += f"worst row {self.worst_row:5.2f} (row {self.worst_row_index})"
        return text + (f", {self.nonfinite} non-finite values" if self.nonfinite else "")


def run(inputs: Inputs, fwd: Callable, bwd: Callable, **options: Any) -> Results:
    """Forward and backward through functions with the signatures of `api.fwd` and `api.bwd`."""
    out, lse = fwd(inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, **inputs.options, **options)
    gradients = bwd(
        inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, **inputs.options, **options
    )
    return Results(out, lse, *gradients)


@dataclass
class Judge:
    """The oracle's and the budget's results for one set of inputs, computed once, and the comparison with others."""

    inputs: Inputs
    _stats: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def oracle(self) -> Results:
        """float64 results."""
        return self._reference(reference.oracle(), self._stats)

    @cached_property
    def budget(self) -> Results:
        """The budget implementation's results."""
        return self._reference(reference.budget(self.inputs.q.dtype), {})

    def _reference(self, roundings: Roundings, stats: dict[str, Tensor]) -> Results:
        i = self.inputs
        call = validation.forward(
            i.q, i.kv, i.indices, d_v=i.d_v, causal=i.causal,
            q_positions=i.q_positions, topk_length=i.topk_length, attn_sink=i.attn_sink,
        )  # fmt: skip
        packed = call.problem.packed
        dout = i.dout.unsqueeze(0) if packed else i.dout
        dlse = i.dlse.unsqueeze(0) if packed and i.dlse is not None else i.dlse
        options: dict[str, Any] = dict(
            sm_scale=i.sm_scale, causal=i.causal, q_positions=call.q_positions, topk_length=call.topk_length,
            attn_sink=call.attn_sink, roundings=roundings,
        )  # fmt: skip
        out, lse, stats["max_abs_score"] = reference.forward(call.q, call.kv, call.indices, d_v=i.d_v, **options)
        dq, dkv, d_sink, _ = reference.backward(call.q, call.kv, out, dout, call.indices, lse, dlse=dlse, **options)
        if packed:
            out, lse, dq, dkv = out[0], lse[0], dq[0], dkv[0]
        return Results(out, lse, dq, dkv, d_sink)

    def checks(self, got: Results) -> list[TensorCheck]:
        """Every tensor of `got` against the clause. A tensor that is `None` in `got` is left out."""
        oracle, budget = self.oracle, self.budget
        for name, tensor, exact in zip(got._fields, got, oracle, strict=True):
            # Differences would broadcast, and a wrong shape pass for a right one.
            if tensor is not None and exact is not None and tensor.shape != exact.shape:
                raise ValueError(f"{name}: shape {list(tensor.shape)} instead of {list(exact.shape)}")
        checks = [
            compare_rows(name, getattr(got, name), getattr(oracle, name), getattr(budget, name))
            for name in ("out", "dq", "dkv")
            if getattr(got, name) is not None
        ]
        if got.lse is not None:
            checks.insert(1, compare_lse(got.lse, oracle.lse, self._stats["max_abs_score"]))
        if got.d_sink is not None and self.inputs.attn_sink is not None:
            # The sink's gradient is defined on out and lse as passed, so it is judged on the implementation's own.
            out, dout, lse = got.out, self.inputs.dout, got.lse
            if self.inputs.q.dim() == 3:
                out, dout, lse = out[None], dout[None], lse[None]
            exact, absolute = reference.sink_gradient(out, dout, lse, self.inputs.attn_sink, torch.float64)
            checks.append(compare_d_sink(got.d_sink, exact, absolute))
        return checks


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


def compare_rows(name: str, got: Tensor, oracle: Tensor, budget: Tensor) -> TensorCheck:
    """A tensor of rows `[..., n]` against the oracle, within the budget implementation's error."""
    exact = oracle.double()
    errors, granted = _row_norms(got.double() - exact), _row_norms(budget.double() - exact)
    norm = _rms(_row_norms(exact))
    floor = FLOOR * norm
    worst, row = _worst(errors, ROW_FACTOR * granted + floor)
    total = _ratio(_rms(errors), TOTAL_FACTOR * _rms(granted) + floor)
    nonfinite = int((~torch.isfinite(got)).sum())
    return TensorCheck(name, _ratio(_rms(errors), norm) if norm else _rms(errors), total, worst, row, nonfinite)


def compare_lse(got: Tensor, oracle: Tensor, max_abs_score: Tensor) -> TensorCheck:
    """`lse` within `1e-5 + 2e-6 max|s|`; empty rows must be -inf exactly and no other row may be."""
    got, exact = got.double().flatten(), oracle.double().flatten()
    bound = max_abs_score.double().flatten()
    empty = exact == float("-inf")
    nonfinite = int(((got == float("-inf")) != empty).sum() + (~torch.isfinite(got) & ~empty).sum())
    errors = (got - exact).abs().masked_fill(empty, 0)
    worst, row = _worst(errors, 1e-5 + 2e-6 * bound)
    return TensorCheck("lse", float(errors.max()) if errors.numel() else 0.0, worst, worst, row, nonfinite)


def compare_d_sink(got: Tensor, oracle: Tensor, absolute_terms: Tensor) -> TensorCheck:
    """`d_sink` within 1e-3 of the sum of absolute terms, per head."""
    errors = (got.double() - oracle.double()).abs()
    worst, row = _worst(errors, 1e-3 * absolute_terms.double())
    nonfinite = int((~torch.isfinite(got)).sum())
    return TensorCheck("d_sink", float(errors.max()) if errors.numel() else 0.0, worst, worst, row, nonfinite)
