"""Verification before timing: against the float64 oracle where that is affordable, and among implementations.

Up to `verify_tokens` query tokens, everything is judged by the contract's precision clause. Beyond, on a sample:

* `out`, `lse` and `dq` of the whole call at the sampled tokens (runs of neighbours, the first and the last included);
* all tensors of a call of the sampled tokens alone, over the same kv: that is where `dkv` rows are judged;
* the column sums of the whole call's `dkv` against their closed form: sums over rows leave
  `sum_th w dout + sm_scale (dlse + (1 - w) Delta) q`, so a lost, doubled or garbled token shows at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cute_sparse_mla import reference
from cute_sparse_mla.precision import Inputs, Judge, TensorCheck, compare_d_sink

# Neighbouring tokens per run of the sample, so that token groups of up to 16 are exercised.
RUN = 16
# Tokens at which `out` and `dq` of two implementations are compared.
AGREE_TOKENS = 4096
# Column sums of dkv against the norm of the column times the dtype's epsilon; a lost token exceeds it many times.
TOTAL_LIMIT = 4.0
CHUNK_TOKENS = 1024


def sample_tokens(T: int, count: int, device: torch.device) -> Tensor:
    """`count` of T token numbers, rising: runs of 16 neighbours spread evenly from token 0 to token T - 1."""
    if count >= T:
        return torch.arange(T, device=device)
    runs, length = max(1, count // RUN), min(RUN, count)
    starts = [round(i * (T - length) / max(runs - 1, 1)) for i in range(runs)] if runs > 1 else [T - length]
    return torch.tensor(sorted({start + i for start in starts for i in range(length)}), device=device)


def take_tokens(inputs: Inputs, tokens: Tensor) -> Inputs:
    """The packed call of some of the tokens over the same kv; causal bounds become explicit positions."""
    positions = inputs.q_positions
    if inputs.causal and positions is None:
        T, S_kv = inputs.q.shape[0], inputs.kv.shape[0]
        positions = torch.arange(S_kv - T, S_kv, device=tokens.device)

    def take(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[tokens]

    return replace(
        inputs, q=inputs.q[tokens], indices=inputs.indices[tokens], dout=inputs.dout[tokens],
        q_positions=take(positions) if inputs.causal else None, topk_length=take(inputs.topk_length),
        dlse=take(inputs.dlse),
    )  # fmt: skip


@dataclass(frozen=True)
class Partial:
    """What an implementation returned; `None` for what it does not compute or is not to be judged.

    `basis` is the `(out, lse)` that its backward was given.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dkv: Tensor | None = None
    d_sink: Tensor | None = None
    basis: tuple[Tensor, Tensor] | None = None

    def at(self, tokens: Tensor) -> Partial:
        """Per-token tensors at some tokens; `dkv` and `d_sink`, which sum over all, are left out."""
        out, lse, dq = (None if t is None else t[tokens] for t in (self.out, self.lse, self.dq))
        basis = None if self.basis is None else (self.basis[0][tokens], self.basis[1][tokens])
        return Partial(out, lse, dq, basis=basis)


@dataclass
class Verdict:
    """Errors against float64 and their share of the limit, per tensor; `how` says what was judged."""

    how: str
    error: dict[str, float] = field(default_factory=dict)
    of_limit: dict[str, float] = field(default_factory=dict)
    misses: list[tuple[str, str]] = field(default_factory=list)

    def add(self, check: TensorCheck, where: str) -> None:
        """Keep the worst of several checks of one tensor."""
        share = max(check.total, check.worst_row)
        share = math.inf if check.nonfinite else share
        if share >= self.of_limit.get(check.name, -1.0):
            self.error[check.name], self.of_limit[check.name] = check.error, share
        if not check.ok:
            self.misses.append((check.name, f"{where}: {str(check).removeprefix('MISS ')}"))


class Verifier:
    """Judges implementations on one shape's inputs; the oracle's forward runs once."""

    def __init__(self, inputs: Inputs, verify_tokens: int) -> None:
        self.inputs = inputs
        T = inputs.q.shape[0]
        self.tokens = sample_tokens(T, verify_tokens, inputs.q.device)
        self.whole = self.tokens.numel() == T
        self.sample = inputs if self.whole else take_tokens(inputs, self.tokens)
        self.judge = Judge(self.sample)

    def judged(self, results: Partial, run_sample: Callable[[Inputs], Partial | None]) -> Verdict:
        """The verdict on a whole call's results.

        `run_sample` runs the implementation on the sampled tokens alone; `None` when it cannot.
        """
        T, n = self.inputs.q.shape[0], self.tokens.numel()
        if self.whole:
            verdict = Verdict("all tokens")
            self._add(verdict, results, "call")
            return verdict
        verdict = Verdict(f"{n} of {T} tokens")
        self._add(verdict, results.at(self.tokens), "whole call")
        alone = run_sample(self.sample)
        if alone is not None:
            verdict.how += ", and a call of those alone"
            self._add(verdict, alone, "sampled tokens alone")
        if results.basis is not None and results.dkv is not None:
            verdict.how += ", column sums of dkv"
            verdict.add(check_dkv_totals(self.inputs, *results.basis, results.dkv), "whole call")
        if results.basis is not None and results.d_sink is not None:
            verdict.how += ", d_sink"
            verdict.add(_check_d_sink(self.inputs, *results.basis, results.d_sink), "whole call")
        return verdict

    def _add(self, verdict: Verdict, got: Partial, where: str) -> None:
        checks = self.judge.forward_checks(got.out, got.lse)
        if got.basis is not None:
            checks += self.judge.gradient_checks(*got.basis, got.dq, got.dkv, got.d_sink)
        for check in checks:
            verdict.add(check, where)


def _check_d_sink(inputs: Inputs, out: Tensor, lse: Tensor, d_sink: Tensor) -> TensorCheck:
    # The sink's gradient is defined on out and lse as passed.
    sink = inputs.attn_sink
    if sink is None:
        raise ValueError("a call without a sink has no d_sink")
    exact, absolute = reference.sink_gradient(out[None], inputs.dout[None], lse[None], sink, torch.float64)
    return compare_d_sink(d_sink, exact, absolute)


def _token_chunks(T: int) -> Iterator[slice]:
    for first in range(0, T, CHUNK_TOKENS):
        yield slice(first, first + CHUNK_TOKENS)


def check_dkv_totals(inputs: Inputs, out: Tensor, lse: Tensor, dkv: Tensor) -> TensorCheck:
    """Sums of `dkv [S_kv, 1, D]` over its rows against their closed form in float64, per column."""
    d_v = out.shape[-1]
    exact = torch.zeros(inputs.q.shape[-1], dtype=torch.float64, device=dkv.device)
    for chunk in _token_chunks(inputs.q.shape[0]):
        dout, row_lse, q = inputs.dout[chunk].double(), lse[chunk].double(), inputs.q[chunk].double()
        empty = row_lse == -math.inf
        w = torch.ones_like(row_lse)
        slope = torch.zeros_like(row_lse)
        if inputs.attn_sink is not None:
            w = torch.sigmoid(row_lse - inputs.attn_sink.double())
            slope = (1 - w) * torch.linalg.vecdot(dout, out[chunk].double())
        if inputs.dlse is not None:
            slope = slope + inputs.dlse[chunk].double()
        w, slope = w.masked_fill(empty, 0), slope.masked_fill(empty, 0)
        exact[:d_v] += torch.einsum("th,thd->d", w, dout)
        exact += inputs.sm_scale * torch.einsum("th,thd->d", slope, q)
    sums = dkv.sum(dim=(0, 1), dtype=torch.float64)
    norms = torch.linalg.vector_norm(dkv, dim=(0, 1), dtype=torch.float64)
    errors = (sums - exact).abs()
    limits = TOTAL_LIMIT * torch.finfo(dkv.dtype).eps * norms
    shares = torch.where(errors == 0, torch.zeros_like(errors), errors / limits).nan_to_num(nan=math.inf)
    worst = int(shares.argmax())
    relative = float(errors.norm() / norms.norm()) if float(norms.norm()) else float(errors.norm())
    nonfinite = int((~torch.isfinite(dkv)).sum())
    return TensorCheck("dkv_total", relative, float(shares[worst]), float(shares[worst]), worst, nonfinite)


# -- agreement -----------------------------------------------------------------------------------------------------


def kept_for_agreement(results: Partial) -> dict[str, Tensor]:
    """`out`, `dq` (of large calls every n-th token) and `dkv`, as they are compared with other implementations'."""
    kept = {}
    for name in ("out", "dq"):
        tensor = getattr(results, name)
        if tensor is not None:
            step = max(1, -(-tensor.shape[0] // AGREE_TOKENS))
            kept[name] = tensor if step == 1 else tensor[::step].clone()
    if results.dkv is not None:
        kept["dkv"] = results.dkv
    return kept


def relative_rms(a: Tensor, b: Tensor) -> float:
    """RMS of the difference over the RMS of the mean magnitude: symmetric, 0 for equal tensors."""
    difference = scale = 0.0
    for first in range(0, a.shape[0], CHUNK_TOKENS):
        x, y = a[first : first + CHUNK_TOKENS].double(), b[first : first + CHUNK_TOKENS].double()
        difference += float((x - y).square().sum())
        scale += float((x.square() + y.square()).sum() / 2)
    if scale == 0:
        return math.sqrt(difference)
    return math.sqrt(difference / scale)


def agreement(mine: dict[str, Tensor], others: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, float]]:
    """Relative RMS difference to each other implementation, per tensor that both have."""
    result: dict[str, dict[str, float]] = {}
    for name, theirs in others.items():
        shared = {key: relative_rms(mine[key], theirs[key]) for key in mine if key in theirs}
        if shared:
            result[name] = shared
    return result
