"""What one does without sparse kernels: plain torch over all rows of kv, with a mask. A peer that runs anywhere.

Scores, softmax and products in fp32; the mask is made from the indices in every call (in its time), and the backward
makes the scores again. A row of kv that a query lists twice counts once here, and twice by the contract.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.problem import Problem

from .implementations import Call, ContractCall, Implementation

SCORES_LIMIT = 8 << 30  # bytes of the fp32 scores of all heads; a few tensors of this size live at a time


class _MaskedDenseCall(ContractCall):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.rows = valid_rows(inputs)

    def _scores(self) -> Tensor:
        i = self.inputs
        mask = i.q.new_zeros((i.q.shape[0], i.kv.shape[0] + 1), dtype=torch.bool)
        mask.scatter_(1, self.rows, True)
        scores = torch.einsum("thd,sd->ths", i.q.float(), i.kv[:, 0].float()) * i.sm_scale
        return scores.masked_fill(~mask[:, None, :-1], -torch.inf)

    def _sink_factor(self, lse: Tensor) -> Tensor | float:
        return 1.0 if self.inputs.attn_sink is None else torch.sigmoid(lse - self.inputs.attn_sink)[..., None]

    def fwd(self) -> Any:
        i, scores = self.inputs, self._scores()
        lse = scores.logsumexp(-1)
        weights = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0) * self._sink_factor(lse)
        return torch.einsum("ths,sd->thd", weights, i.kv[:, 0, : i.d_v].float()).to(i.q.dtype), lse

    def bwd(self, state: Any) -> Any:
        i, (out, lse) = self.inputs, state
        keys, dout = i.kv[:, 0].float(), i.dout.float()
        w, delta = self._sink_factor(lse), (dout * out).sum(-1, keepdim=True)
        p_hat = (self._scores() - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()
        dS = p_hat * (w * (torch.einsum("thd,sd->ths", dout, keys[:, : i.d_v]) - delta))
        dq = torch.einsum("ths,sd->thd", dS, keys) * i.sm_scale
        dkv = torch.einsum("ths,thd->sd", dS, i.q.float()) * i.sm_scale
        dkv[:, : i.d_v] += torch.einsum("ths,thd->sd", p_hat * w, dout)
        d_sink = None if i.attn_sink is None else -((1 - w) * delta)[..., 0].sum(0)
        return dq.to(i.q.dtype), dkv[:, None].to(i.kv.dtype), d_sink


def valid_rows(inputs: Inputs) -> Tensor:
    """Rows `[T, K]` int64 of the valid slots; `S_kv` for the others."""
    S_kv, rows = inputs.kv.shape[0], inputs.indices.reshape(inputs.indices.shape[0], -1).long()
    valid = (rows >= 0) & (rows < S_kv)
    if inputs.topk_length is not None:
        valid &= torch.arange(rows.shape[1], device=rows.device) < inputs.topk_length[:, None]
    if inputs.causal:
        bounds = inputs.q_positions
        if bounds is None:
            bounds = torch.arange(S_kv - rows.shape[0], S_kv, device=rows.device)
        valid &= rows <= bounds[:, None]
    return rows.masked_fill(~valid, S_kv)


class MaskedDense(Implementation):
    """Masked attention over all rows, in torch."""

    name = "masked_dense"

    def __init__(self, where: str | None = None) -> None:
        self.version = f"torch {torch.__version__}"

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        if problem.G != 1:
            return "one kv group only"
        size = 4 * problem.S * problem.H * problem.S_kv
        return f"fp32 scores of all rows would take {size / 1e9:.0f} GB" if size > SCORES_LIMIT else ""

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        return _MaskedDenseCall(inputs)

    def differs(self, inputs: Inputs, which: str) -> str:
        rows, S_kv = valid_rows(inputs).sort(-1).values, inputs.kv.shape[0]
        repeated = (rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] < S_kv)
        return "rows are listed twice, which a mask counts once" if bool(repeated.any()) else ""
