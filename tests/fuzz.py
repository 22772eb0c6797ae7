"""Differential fuzzing of the contract: random calls through kernels or their simulation, judged by the reference.

    python -m tests.fuzz --target sm90 --cases 20000 --workers 14 --out fuzz.jsonl   on a Hopper GPU
    python -m tests.fuzz --target sim-sm100 --cases 500                              kernels in the simulator, on a CPU
    python -m tests.fuzz --target sim-sm90 --cases 1000 --out fuzz.jsonl --resume    in parts: stop it, call it again
    ... --workers 16 --seconds 500                                                   with many cores, and for that long
    python -m tests.fuzz --target reference --cases 2000                             the reference against brute force
    python -m tests.fuzz --target sm90 --replay '{"seed": 3, ...}'                   a printed reproducer

A call counts when it has an invalid slot, a repeated row, a sink, a causal bound or several groups. Rows of kv that no
valid slot names are NaN, kv lies between rows of infinity, freed memory is NaN, and dkv is added into a buffer of -0.0
between canaries, in which every add, of +0.0 too, leaves a trace. Hypothesis draws the calls and shrinks what fails.

Two kinds of misses do not end a search, but are counted apart. The first, on a Hopper GPU, fails the command unless
`--allow-cancelled-scores`: an `lse` whose scores are small by cancellation, where the limit of 2e-6 max|s| is below
what the tensor core's truncation leaves of the partial sums. Such an lse must be that of the scores as the tensor core
makes them (`tensor_core.py`), within the limit of the clause (`cancelled_scores`). So is a dq or dkv that misses where
gradients cancel, unless `--allow-cancelled-gradients`: each of its rows beyond the limit must be what follows from such
sums, or from the rounding of a dS or P at the middle of two numbers (`cancelled_gradients`).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import queue
import secrets
import time
import tokenize
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

import cute_sparse_mla
from bench.cases import INVALID_PATTERNS, Case
from bench.report import append_jsonl
from cute_sparse_mla import arguments, env, reference
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import (
    FLOOR,
    ROW_FACTOR,
    TOTAL_FACTOR,
    Inputs,
    Judge,
    Results,
    TensorCheck,
    compare_d_sink,
    compare_rows,
)
from cute_sparse_mla.reference import Backward

from . import brute_force, tensor_core

SIMULATED = {"sim-sm90": "sm90", "sim-sm100": "sm100"}
TARGETS = ("reference", *SIMULATED, "sm90", "sm100")
# What the kernels of a backend are made from.
SOURCES = {"reference": "cute_sparse_mla/reference.py", "sm90": "hopper", "sm100": "sm100"}
SCALES = (None, 0.0, 1e-3, 256**-0.5, 0.5)
SINKS = (None, None, "random", "random", 0.0, 50.0, 200.0, -200.0, math.inf, -math.inf)
# What a sum of 512 products in fp32 leaves where the exact result cancels, as in rows with one distinct valid row, over
# the product of its vectors' norms; a tensor core (`tensor_core.py`) of 200,000 random sums at most; and what remains
# of dP - Delta when those sums are known.
FP32_NOISE = 5e-8
TENSOR_CORE_NOISE = 2e-7
ULPS = 1e-8
# Relative error of a P in fp32: of its exp2 and products, and of half an ulp of lse in base 2 per unit of |lse|.
P_NOISE, P_NOISE_PER_LSE = 2.0**-21, 2.0**-24
# Scores count as cancelled when their products' absolute values sum to this many times the score; 14 is usual.
CANCELLED = 4
# Stands for how many times a limit of 0 something is off: JSON has no infinity.
NO_LIMIT = 1e9
# What is counted apart from other misses, by its field of `Verdict` and `Outcome`.
APART = {"cancelled": "lse of cancelled scores", "gradients": "dq or dkv of cancelled gradients"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class Contract:
    """One random call: a `Case`, its seed, how its tensors lie in memory, and options of the call."""

    case: Case
    seed: int
    q_transposed: bool = False
    kv_sliced: bool = False
    indices_transposed: bool = False
    dout_transposed: bool = False
    dkv_buffer: bool = True
    tokens_per_tile: int | None = 1

    def text(self) -> str:
        """The reproducer, as `--replay` takes it: fields that differ from the defaults."""
        case = {k: v for k, v in asdict(self.case).items() if v != getattr(Case(), k)}
        own = {k: v for k, v in vars(self).items() if k != "case" and v != getattr(type(self), k, None)}
        return json.dumps(case | own, default=lambda value: str(value).removeprefix("torch."))

    @staticmethod
    def parse(text: str) -> Contract:
        """Inverse of `text`."""
        values = {k: DTYPES.get(v, v) if isinstance(v, str) else v for k, v in json.loads(text).items()}
        own = {k: values.pop(k) for k in list(values) if k in Contract.__dataclass_fields__}
        return Contract(Case(**values), **own)


@dataclass(frozen=True)
class Sizes:
    """Bounds of what a target runs in the time of a case."""

    tokens: int
    rows: int
    slots: int
    heads: tuple[int, ...]
    widths: tuple[tuple[int, int], ...] = ((512, 512), (576, 512))
    tiles: tuple[int | None, ...] = (1,)  # tokens of one; None leaves it to the device
    tile_rows: int = 64
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    index_dtypes: tuple[str, ...] = ("int32", "int64")


GPU = Sizes(24, 300, 300, (*range(1, 129),))
SIZES = {
    "reference": Sizes(6, 9, 9, (1, 2, 3), widths=((8, 5), (16, 16), (24, 8))),
    "sim-sm90": Sizes(2, 80, 130, (1, 3, 16, 40, 64, 70)),
    "sim-sm100": Sizes(3, 80, 130, (1, 3, 16, 40, 64, 70), tiles=(1, None, 2, 8, 16), tile_rows=128),
    "sm90": replace(GPU, tiles=(1, None, 2, 4, 8, 16)),
    "sm100": replace(GPU, tiles=(1, None, 2, 4, 8, 16), tile_rows=128),
}


def narrow(sizes: Sizes) -> Sizes:
    """One kernel of each kind: compiling takes seconds to a minute, a simulated call a second."""
    return replace(
        sizes, heads=(1, 3, 12, 16), widths=sizes.widths[-1:], tiles=(1,), dtypes=sizes.dtypes[:1],
        index_dtypes=("int32",),
    )  # fmt: skip


@st.composite
def contracts(draw: Callable, sizes: Sizes) -> Contract:
    """Random calls within `sizes`; simple values first, which is what shrinking leads to."""

    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    packed, flag = draw(st.booleans()), st.booleans()
    G = some(1, 1, 1, 2, 3)
    causal, positions = some((False, None), (True, None), (True, "random"))
    D, d_v = some(*sizes.widths)
    heads, tokens = draw(st.sampled_from(sizes.heads)), some(*sizes.tiles)
    if tokens is not None and tokens * heads > sizes.tile_rows:
        tokens = 1
    case = Case(
        name="fuzz", B=1 if packed else some(1, 1, 2), S=draw(st.integers(1, sizes.tokens)),
        S_kv=draw(st.integers(1, sizes.rows)), H=G * heads, G=G,
        K=draw(st.integers(1, sizes.slots)), D=D, d_v=d_v, packed=packed, dtype=DTYPES[some(*sizes.dtypes)],
        index_dtype=DTYPES[some(*sizes.index_dtypes)], causal=causal, positions=positions,
        length=some(None, "random", "zero"), sink=some(*SINKS), invalid=some(*INVALID_PATTERNS),
        share=some(0.5, 0.1, 0.9), duplicates=draw(flag), dlse=draw(flag), q_scale=some(1.0, 4.0),
        sm_scale=some(*SCALES),
    )  # fmt: skip
    return Contract(
        case, draw(st.integers(0, 2**31 - 1)), draw(flag), draw(flag), draw(flag), draw(flag), draw(flag), tokens,
    )  # fmt: skip


# -- one call ------------------------------------------------------------------------------------------------------


def inputs_of(contract: Contract, device: torch.device) -> Inputs:
    """The call's inputs, drawn on a CPU: from the same seed a GPU draws others, which no simulator would see."""
    drawn = vars(contract.case.inputs(contract.seed))
    return Inputs(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in drawn.items()})


def valid_slots(i: Inputs) -> Tensor:
    """Which slots count, `[B, S, G, K]`, by the contract's sentences."""
    rows, kv, lengths, positions = i.indices, i.kv, i.topk_length, i.q_positions
    if i.q.dim() == 3:
        rows, kv = rows[None], kv[None]
        lengths, positions = (None if t is None else t[None] for t in (lengths, positions))
    S, K, S_kv = rows.shape[1], rows.shape[3], kv.shape[1]
    valid = (rows >= 0) & (rows < S_kv)
    if lengths is not None:
        valid &= torch.arange(K, device=rows.device) < lengths[..., None, None]
    if i.causal:
        bound = torch.arange(S, device=rows.device)[None] + S_kv - S if positions is None else positions
        valid &= rows <= bound[..., None, None]
    return valid


def selected_rows(i: Inputs, valid: Tensor) -> Tensor:
    """Which rows of kv a valid slot names, in kv's form without its last dimension."""
    packed = i.q.dim() == 3
    rows, shape = (i.indices[None], i.kv[None].shape) if packed else (i.indices, i.kv.shape)
    B, S_kv, G = shape[:3]
    batch, _, group, _ = torch.nonzero(valid, as_tuple=True)
    named = torch.zeros(B, S_kv, G, dtype=torch.bool, device=rows.device)
    named[batch, rows[valid].long(), group] = True
    return named[0] if packed else named


def counts(i: Inputs, valid: Tensor) -> bool:
    """Whether the call has anything that a plain one has not."""
    if i.attn_sink is not None or i.causal or i.kv.shape[-2] > 1 or not bool(valid.all()):
        return True
    ordered = i.indices.sort(dim=-1).values
    return bool((ordered[..., 1:] == ordered[..., :-1]).any())


def _transposed(tensor: Tensor, wanted: bool) -> Tensor:
    """The same values with the second and third last dimensions swapped in memory."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2) if wanted else tensor


def sent(contract: Contract, i: Inputs, named: Tensor) -> Inputs:
    """The call as it is made: poisoned, and laid out in memory as the contract says."""
    kv = i.kv.masked_fill(~named[..., None], math.nan)
    if contract.kv_sliced:
        axis = kv.dim() - 3
        border = torch.full_like(kv.narrow(axis, 0, 1), math.inf)
        kv = torch.cat((border, kv, border), dim=axis).narrow(axis, 1, kv.shape[axis])
    indices = i.indices
    if contract.indices_transposed:
        indices = indices.transpose(-3, -1).contiguous().transpose(-3, -1)
    return replace(
        i, q=_transposed(i.q, contract.q_transposed), kv=kv, indices=indices,
        dout=_transposed(i.dout, contract.dout_transposed),
    )  # fmt: skip


def poison_memory(device: torch.device) -> None:
    """Fill memory that the next allocations are likely to get with NaN."""
    if device.type == "cuda":
        held = [torch.full((size,), math.nan, device=device) for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 21)]
        del held


@contextmanager
def machine(target: str, contract: Contract) -> Iterator[list[Any]]:
    """Inside, `backend=` of the target runs; afterwards the list holds the simulator's findings."""
    findings: list[Any] = []
    if target == "sim-sm100":
        from .ptx_sim import project_sm100

        rows = contract.case.H // contract.case.G * (contract.tokens_per_tile or 1)
        with project_sm100.simulated(multiprocessors=2 if rows > 64 else 1) as recorder:
            yield findings
    elif target == "sim-sm90":
        from .ptx_sim import project_hopper

        with project_hopper.simulated() as recorder:
            yield findings
    else:
        yield findings
        return
    findings += [finding for report in recorder.reports for finding in report.findings]


def checks_of(contract: Contract, judge: Judge, results: Results, exact: Backward) -> list[TensorCheck]:
    """As `Judge.checks`, but fp32 sums in a caller's buffer against a budget implementation that keeps fp32 too.

    With three slots of one row P is 3 x bf16(1/3) = 1.002: an error of 0.2 %, which rounding the sum may take away.
    """
    out, lse, dq, dkv, d_sink = results
    checks, dtype = judge.forward_checks(out, lse), judge.inputs.q.dtype
    granted = judge.gradients(out, lse, replace(judge.rules[1], outputs=torch.float32))
    checks.append(compare_rows("dq", dq, exact.dq, granted.dq.to(dtype)))
    rounded = granted.dkv if contract.dkv_buffer else granted.dkv.to(dtype)
    checks.append(compare_rows("dkv", dkv, exact.dkv, rounded))
    if d_sink is not None and exact.d_sink is not None and exact.d_sink_abs is not None:
        checks.append(compare_d_sink(d_sink, exact.d_sink, exact.d_sink_abs))
    return checks


def _beyond_fp32(check: TensorCheck, contract: Contract, i: Inputs, results: Results, exact: Backward) -> bool:
    """Whether a miss of a gradient is what fp32 leaves of terms that cancel exactly, or of a sum that it flushes.

    Of `dq` and `d_sink` sums of 512 products cancel: `dP - Delta` in rows with one distinct valid row, and `Delta`
    itself where no other token makes up for it. A caller's buffer takes adds in global memory, in which hardware
    flushes terms below the smallest normal number to 0; dq then comes from P and dS without their unit.
    """
    if check.nonfinite or check.name not in ("dq", "dkv", "d_sink"):
        return False
    if check.name == "d_sink":
        return _d_sink_within_noise(i, results, exact)
    flushed = float(torch.finfo(torch.float32).tiny) if contract.dkv_buffer else 0.0
    scale, slots = max(i.sm_scale, 1e-30), i.indices.shape[-1]
    q, kv, value = (float(t.float().norm(dim=-1).max()) for t in (i.q, i.kv, i.kv[..., : i.d_v]))
    dout = i.dout.double().norm(dim=-1)
    slope = 1 + float(dout.max()) * value  # bounds dP, of which w may be flushed, and 1
    if check.name == "dkv":
        errors = (results.dkv.double() - exact.dkv.double()).norm(dim=-1)
        terms = slots * i.q.numel() // i.q.shape[-1]
        return bool((errors <= flushed * terms * (scale * q * slope + float(dout.max()))).all())
    weight = torch.ones_like(dout)
    if i.attn_sink is not None:
        # Of an empty row with a sink of -inf NaN, where dq must be 0.
        weight = torch.sigmoid(results.lse.double() - i.attn_sink.double()).nan_to_num()
    noise = scale * kv * (FP32_NOISE * weight * dout * value + flushed * slots * slope)
    return bool((_before_rounding(results.dq, exact.dq) <= noise).all())


def _before_rounding(got: Tensor, wanted: Tensor) -> Tensor:
    """The least errors of rows `[..., n]` that lead to `got` when they are rounded to its dtype."""
    limits = torch.finfo(got.dtype)
    exponents = torch.frexp(got.double()).exponent - 1
    units = torch.ldexp(torch.full_like(got, limits.eps, dtype=torch.float64), exponents)
    units = units.clamp(min=limits.tiny * limits.eps)
    return ((got.double() - wanted.double()).abs() - units / 2).clamp(min=0).norm(dim=-1)


def _d_sink_within_noise(i: Inputs, results: Results, exact: Backward) -> bool:
    assert exact.d_sink is not None and exact.d_sink_abs is not None and results.d_sink is not None
    assert i.attn_sink is not None
    products = i.dout.double().norm(dim=-1) * results.out.double().norm(dim=-1)
    rest = torch.sigmoid(i.attn_sink.double() - results.lse.double()).nan_to_num()
    noise = FP32_NOISE * (rest * products).flatten(0, -2).sum(dim=0) + torch.finfo(torch.float32).tiny
    errors = (results.d_sink.double() - exact.d_sink.double()).abs()
    return bool((errors <= 1e-3 * exact.d_sink_abs.double() + noise).all())


def _orders(D: int) -> list[list[int]]:
    """In which orders the SM90 forward adds the columns of a score: of even and odd blocks of slots."""
    ascending = list(range(0, D, tensor_core.DEPTH))
    return [ascending, [c for c in ascending if 256 <= c < 512] + [c for c in ascending if not 256 <= c < 512]]


def cancelled_scores(i: Inputs, valid: Tensor, lse: Tensor, exact: Tensor, max_abs: Tensor) -> bool:
    """Whether every `lse` beyond its limit is right for scores as the tensor core makes them, and these cancel.

    `lse`, `exact`, `max_abs [B, S, H]` (or packed). A row's lse must lie, within the limit of the clause, between those
    of its scores summed in the one and in the other order.
    """
    q, kv, rows = (t[None] if i.q.dim() == 3 else t for t in (i.q, i.kv, i.indices))
    lse, exact, max_abs = (t.view(q.shape[:3]).double() for t in (lse, exact, max_abs))
    limit, heads = 1e-5 + 2e-6 * max_abs, q.shape[2] // kv.shape[2]
    for b, t, h in torch.nonzero((lse - exact).abs() > limit).tolist():
        group = h // heads
        k = kv[b, rows[b, t, group][valid[b, t, group]].long(), group].double()
        row, scale = q[b, t, h].double(), i.sm_scale
        if CANCELLED * float(max_abs[b, t, h]) > scale * float((row * k).abs().sum(dim=-1).max()):
            return False
        sums = torch.stack([tensor_core.products(row, k, order) for order in _orders(k.shape[-1])]) * scale
        low, high = (torch.logsumexp(part, dim=-1) for part in (sums.amin(dim=0), sums.amax(dim=0)))
        if not bool((lse[b, t, h] >= low - limit[b, t, h]) & (lse[b, t, h] <= high + limit[b, t, h])):
            return False
    return True


def cancelled_gradients(
    name: str, contract: Contract, target: str, i: Inputs, valid: Tensor, results: Results, judge: Judge,
    exact: Backward,
) -> bool:  # fmt: skip
    """Whether every row of a `dq` or `dkv` that misses the clause is what the hardware's sums make of it.

    A row of dq must lie within the clause's limit of what follows from scores and dP as the tensor core sums them (in a
    simulator, from exact ones, but for `FP32_NOISE`). Or a row's limit is that of a budget implementation. Both are
    taken three times, twice with the noise of such sums and of fp32 in P, so that a P or dS at the middle of two
    numbers is rounded to the other one. Without these rows the whole must be within the clause.
    """
    got, oracle = (getattr(r, name) for r in (results, exact))
    rule, real = replace(judge.rules[1], outputs=torch.float32), target == "sm90"
    largest = float(i.kv.float().norm(dim=-1).max())
    shift = i.sm_scale * (TENSOR_CORE_NOISE if real else FP32_NOISE) * largest * i.q.float().norm(dim=-1)
    shift = shift + P_NOISE + P_NOISE_PER_LSE * results.lse.abs().nan_to_num(posinf=0)
    lses = (results.lse, results.lse + shift, results.lse - shift)
    budgets = [getattr(judge.gradients(results.out, lse, rule), name) for lse in lses]
    if name == "dq" or not contract.dkv_buffer:
        budgets = [budget.to(i.q.dtype) for budget in budgets]
    errors, *granted = ((t.double() - oracle.double()).norm(dim=-1) for t in (got, *budgets))
    floor = FLOOR * float(oracle.double().norm(dim=-1).square().mean().sqrt())
    beyond = errors > ROW_FACTOR * granted[0] + floor
    flipped = errors <= ROW_FACTOR * torch.stack(granted).amax(dim=0) + floor
    followed = torch.zeros_like(beyond)
    if name == "dq":
        loose = errors > TOTAL_FACTOR * granted[0] + floor
        models = [modelled_dq(i, valid, results.out, lse, loose, real) for lse in lses]
        weight = torch.ones_like(errors)
        if i.attn_sink is not None:
            weight = torch.sigmoid(results.lse.double() - i.attn_sink.double()).nan_to_num()
        value = float(i.kv[..., : i.d_v].float().norm(dim=-1).max())
        rest = (ULPS if real else FP32_NOISE) * i.sm_scale * largest * value * weight * i.dout.double().norm(dim=-1)
        away = [(got.double() - model).norm(dim=-1) if real else _before_rounding(got, model) for model in models]
        nearest = torch.stack(away).amin(dim=0)
        followed = loose & (nearest <= ROW_FACTOR * granted[0] + floor + rest)
    if bool((beyond & ~flipped & ~followed).any()):
        return False
    without = torch.where((beyond | followed)[..., None], oracle, got.to(oracle.dtype))
    return compare_rows(name, without, oracle, budgets[0]).ok


def modelled_dq(
    i: Inputs, valid: Tensor, out: Tensor, lse: Tensor, wanted: Tensor, tensor_cores: bool, lanes: int = 8
) -> Tensor:
    """The `wanted [B, S, H]` (or packed) rows of dq from given `out` and `lse`, as a Hopper backward computes them.

    In float64, rounded where the kernel rounds to the input dtype; 0 elsewhere. With `tensor_cores` scores and dP are
    their sums, and Delta and its product with w those of `hopper/row_stats.py`, where so many `lanes` add a Delta.
    """
    dq = torch.zeros(i.q.shape, dtype=torch.float64, device=i.q.device)
    packed = i.q.dim() == 3
    q, kv, rows, dout, out, lse, wanted, result = (
        t[None] if packed else t for t in (i.q, i.kv, i.indices, i.dout, out, lse, wanted, dq)
    )
    dlse = None if i.dlse is None else i.dlse.view(q.shape[:3])
    heads, dtype = q.shape[2] // kv.shape[2], q.dtype

    def products(a: Tensor, b: Tensor) -> Tensor:
        if tensor_cores:
            return tensor_core.products(a[:, None], b[None], _orders(a.shape[-1])[0])
        return a @ b.T

    for b, t, group in torch.nonzero(wanted.unflatten(2, (-1, heads)).any(dim=-1)).tolist():
        k = kv[b, rows[b, t, group][valid[b, t, group]].long(), group].double()
        of_group = torch.arange(group * heads, (group + 1) * heads, device=q.device)
        h = of_group[wanted[b, t, of_group]]
        row_lse = lse[b, t, h].double()
        given, output = dout[b, t, h].double(), out[b, t, h].double()
        delta = _delta(given, output, lanes) if tensor_cores else (given * output).sum(dim=-1)
        w = torch.ones_like(row_lse)
        if i.attn_sink is not None:
            w = torch.sigmoid(row_lse - i.attn_sink[h].double())
        if tensor_cores:
            w = w.float().double()
        less = (w * delta).float().double() if tensor_cores else w * delta
        less = less if dlse is None else less - dlse[b, t, h].double()
        p = (products(q[b, t, h].double(), k) * i.sm_scale - row_lse[:, None]).exp()
        slope = w[:, None] * products(given, k[:, : i.d_v]) - less[:, None]
        dS = (p * slope.float().double()).to(dtype).double()
        result[b, t, h] = (dS @ k * i.sm_scale).to(dtype).double()
    return dq


def _delta(a: Tensor, b: Tensor, lanes: int) -> Tensor:
    """Sums `[h]` of `a b [h, 512]`: each lane adds 8 of every `8 lanes` products, then lanes add in pairs."""
    own = (a * b).unflatten(-1, (-1, lanes, 8)).transpose(1, 2).flatten(2)
    sums = torch.zeros_like(own[..., 0])
    for n in range(own.shape[-1]):
        sums = (sums + own[..., n]).float().double()
    while sums.shape[-1] > 1:
        sums = sum(sums.chunk(2, dim=-1)).float().double()
    return sums[..., 0]


@dataclass(frozen=True)
class Verdict:
    """What a call misses.

    Apart from that how many times its limit an lse of cancelled scores is off, and a dq or dkv of cancelled gradients
    (0: none).
    """

    misses: list[str]
    cancelled: float = 0.0
    gradients: float = 0.0


def misses(contract: Contract, target: str, device: torch.device) -> list[str] | None:
    """What a call misses of the contract, `None` for a call that does not count."""
    verdict = judge_call(contract, target, device)
    if verdict is None:
        return None
    apart = {what: getattr(verdict, kind) for kind, what in APART.items()}
    return verdict.misses + [f"{what}: {ratio:.2f} of limit" for what, ratio in apart.items() if ratio]


def judge_call(contract: Contract, target: str, device: torch.device) -> Verdict | None:
    """A call's misses, `None` for one that does not count."""
    i = inputs_of(contract, device)
    valid = valid_slots(i)
    if not counts(i, valid):
        return None
    if target == "reference":
        return Verdict(_against_brute_force(i))
    named = selected_rows(i, valid)
    call, packed = sent(contract, i, named), i.q.dim() == 3
    options: dict[str, Any] = dict(backend=SIMULATED.get(target, target), **call.options)
    options["config"] = SparseAttentionConfig(tokens_per_tile=contract.tokens_per_tile)
    room = torch.full((3, *i.kv.shape), -0.0, device=device) if contract.dkv_buffer else None
    try:
        with machine(target, contract) as findings:
            poison_memory(device)
            out, lse = cute_sparse_mla.fwd(call.q, call.kv, call.indices, d_v=i.d_v, **options)
            poison_memory(device)
            gradients = cute_sparse_mla.bwd(
                call.q, call.kv, out, call.dout, call.indices, lse, dlse=call.dlse,
                dkv=None if room is None else room[1], **options,
            )  # fmt: skip
    except Exception as error:
        # Whatever a correct call raises is a miss, and hypothesis shall shrink it like one.
        return Verdict([f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"])
    found = [f"finding: {finding}" for finding in findings[:3]]
    results, judge = Results(out, lse, *gradients), Judge(i)
    exact = judge.gradients(out, lse, judge.rules[0])
    missed = [check for check in checks_of(contract, judge, results, exact) if not check.ok]
    cancelled = gradients_beyond = 0.0
    for check in missed:
        if target == "sm90" and check.name == "lse" and not check.nonfinite:
            oracle = judge.forwards[0]
            if cancelled_scores(i, valid, lse, oracle.lse, oracle.max_abs_score):
                cancelled = _of_limit(check)
                continue
        if _beyond_fp32(check, contract, i, results, exact):
            continue
        explained = check.name in ("dq", "dkv") and not check.nonfinite
        if explained and cancelled_gradients(check.name, contract, target, i, valid, results, judge, exact):
            gradients_beyond = max(gradients_beyond, _of_limit(check))
        else:
            found.append(str(check))
    empty = ~valid.any(dim=-1).repeat_interleave(i.q.shape[-2] // i.kv.shape[-2], dim=-1)
    empty = empty[0] if packed else empty
    if bool(results.out[empty].any()) or bool(results.dq[empty].any()):
        found.append("an empty row has an out or a dq that is not zero")
    if room is None:
        if bool(results.dkv[~named].any()):
            found.append("dkv of a row that no valid slot names is not zero")
    elif not all(bool(torch.signbit(part).all()) for part in (room[0], room[2], room[1][~named])):
        found.append("dkv: something was added to a canary or to a row that no valid slot names")
    return Verdict(found, cancelled, gradients_beyond)


def _of_limit(check: TensorCheck) -> float:
    """How many times its limit a tensor is off."""
    return min(max(check.total, check.worst_row), NO_LIMIT)


def _against_brute_force(i: Inputs) -> list[str]:
    judge = Judge(i)
    c = judge.call
    options: dict[str, Any] = dict(
        sm_scale=i.sm_scale, causal=i.causal, q_positions=c.q_positions, topk_length=c.topk_length,
        attn_sink=c.attn_sink,
    )  # fmt: skip
    exact_out, exact_lse = brute_force.forward(c.q, c.kv, c.indices, d_v=i.d_v, **options)
    out, lse, _ = reference.forward(c.q, c.kv, c.indices, d_v=i.d_v, roundings=judge.rules[0], **options)
    dout, dlse = (t if t is None or i.q.dim() == 4 else t[None] for t in (i.dout, i.dlse))
    arguments = (c.q, c.kv, exact_out, dout, c.indices, exact_lse)
    exact = brute_force.backward(*arguments, dlse=dlse, **options)
    got = reference.backward(*arguments, dlse=dlse, roundings=judge.rules[0], **options)
    pairs = {"out": (out, exact_out), "lse": (lse, exact_lse), "dq": (got.dq, exact.dq), "dkv": (got.dkv, exact.dkv)}
    if exact.d_sink is not None:
        pairs["d_sink"] = (got.d_sink, exact.d_sink)
    return [name for name, (a, b) in pairs.items() if not torch.allclose(a, b, rtol=1e-9, atol=1e-9)]


# -- the search ----------------------------------------------------------------------------------------------------


class Miss(AssertionError):
    """A call that breaks the contract."""

    def __init__(self, contract: Contract, found: list[str]) -> None:
        super().__init__(f"{'; '.join(found)}\nreproducer: {contract.text()}")
        self.contract, self.found = contract, found


class Enough(BaseException):
    """Ends a search; no `Exception`, which hypothesis would shrink."""


@dataclass
class Outcome:
    """Calls that counted and differ, and the smallest miss that was found.

    `cancelled`: calls with an lse of cancelled scores beyond its limit, `worst_cancelled` by how much; `gradients`:
    calls with a dq or dkv of cancelled gradients.
    """

    target: str
    seed: int
    cases: int = 0
    seconds: float = 0.0
    found: list[str] = field(default_factory=list)
    reproducer: str = ""
    cancelled: int = 0
    worst_cancelled: float = 0.0
    cancelled_reproducer: str = ""
    gradients: int = 0
    worst_gradients: float = 0.0
    gradients_reproducer: str = ""


def search(
    target: str, cases: int, seed: int, device: torch.device, sizes: Sizes, seconds: float = math.inf,
    after_each: Callable[[Outcome], None] = lambda _: None,
) -> Outcome:  # fmt: skip
    """Judge that many different random calls, or as many as the time allows; the first miss ends it, shrunk.

    `after_each` is given what was found so far, of every call that passed.
    """
    outcome, start, seen = Outcome(target, seed), time.perf_counter(), set()

    @hypothesis.seed(seed)
    @settings(
        max_examples=2 * cases, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.given(contracts(sizes))
    def judge_one(contract: Contract) -> None:
        if time.perf_counter() - start > seconds or (len(seen) >= cases and not outcome.found):
            raise Enough
        verdict = judge_call(contract, target, device)
        hypothesis.assume(verdict is not None)
        assert verdict is not None
        for kind in APART:
            ratio = getattr(verdict, kind)
            if ratio and contract not in seen:
                setattr(outcome, kind, getattr(outcome, kind) + 1)
                if ratio > getattr(outcome, f"worst_{kind}"):
                    setattr(outcome, f"worst_{kind}", ratio)
                    setattr(outcome, f"{kind}_reproducer", contract.text())
        seen.add(contract)
        if verdict.misses:
            outcome.found, outcome.reproducer = verdict.misses, contract.text()
            raise Miss(contract, verdict.misses)
        if not outcome.found:
            outcome.cases, outcome.seconds = len(seen), round(time.perf_counter() - start, 1)
            after_each(outcome)

    try:
        judge_one()
    except Miss as miss:
        outcome.found, outcome.reproducer = miss.found, miss.contract.text()
    except Enough:
        pass
    outcome.cases, outcome.seconds = len(seen), round(time.perf_counter() - start, 1)
    return outcome


def _compile(target: str, device: torch.device, job: tuple[int, str, str, int, bool]) -> None:
    D, dtype, index_dtype, tokens, backward = job
    cute_sparse_mla.warmup(
        64 // tokens, D, dtype=DTYPES[dtype], index_dtype=DTYPES[index_dtype], backward=backward, backend=target,
        device=device, config=SparseAttentionConfig(tokens_per_tile=tokens),
    )  # fmt: skip


def _warm_up(pool: Executor, args: argparse.Namespace, sizes: Sizes) -> None:
    """Compile on disk what the workers will need, a few kernels a process; forwards first, the backwards find them."""
    tokens = [t for t in sizes.tiles if t is not None]
    jobs = [
        (D, dtype, index_dtype, t, backward)
        for backward, index_dtype in itertools.product((False, True), sizes.index_dtypes)
        for t, dtype, (D, _) in itertools.product(tokens, sizes.dtypes, sizes.widths)
    ]
    list(pool.map(partial(_compile, args.target, args.device), jobs))


def kinds_of(sizes: Sizes) -> list[Sizes]:
    """A part of the sizes for each set of kernels, which a process loads for seconds."""
    return [
        replace(sizes, widths=(width,), dtypes=(dtype,), index_dtypes=(index_dtype,))
        for width, dtype, index_dtype in itertools.product(sizes.widths, sizes.dtypes, sizes.index_dtypes)
    ]


def _workers(
    args: argparse.Namespace, cases: int, seed: int, sizes: Sizes, after_each: Callable[[Outcome], None]
) -> Iterator[Outcome]:
    """The search spread over processes, each with a seed of its own and, where it can be, one set of kernels."""
    compiles = args.target in ("sm90", "sm100")
    kinds = kinds_of(sizes)
    if args.target == "reference" or (args.target in SIMULATED and args.workers < len(kinds)):
        kinds = [sizes]
    if args.target in SIMULATED:
        # A simulated call is one long thread of small steps.
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    shares = [len(range(n, cases, args.workers)) for n in range(min(args.workers, cases))]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        if compiles:
            _warm_up(pool, args, sizes)
        judged = manager.Queue()
        started = [
            pool.submit(
                search, args.target, share, seed + n, args.device, kinds[n % len(kinds)], args.seconds, judged.put
            )
            for n, share in enumerate(shares)
        ]
        while not all(work.done() for work in started):
            with suppress(queue.Empty):
                after_each(judged.get(timeout=0.2))
        for n, work in enumerate(started):
            error = work.exception()
            failed = Outcome(args.target, seed + n, found=[f"the worker ended with {error!r}"])
            yield failed if error else work.result()


def _outcomes(
    args: argparse.Namespace, cases: int, seed: int, sizes: Sizes,
    after_each: Callable[[Outcome], None] = lambda _: None,
) -> Iterator[Outcome]:  # fmt: skip
    """The search in this process or in several."""
    if args.workers > 1:
        yield from _workers(args, cases, seed, sizes, after_each)
    else:
        yield search(args.target, cases, seed, args.device, sizes, args.seconds, after_each)


def code_of(text: str) -> str:
    """Python source without comments, docstrings and empty lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            said = node.body[0]
            assert said.end_lineno is not None
            lines[said.lineno - 1 : said.end_lineno] = [""] * (said.end_lineno - said.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def kernels_of(target: str) -> str:
    """A digest of the code from which a target's kernels are made."""
    place = Path(__file__).parents[1] / SOURCES[SIMULATED.get(target, target)]
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        digest.update(code_of(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:12]


@dataclass
class Count:
    """Calls judged in parts over the same kernels: a row of a file of JSON lines, written anew after each call."""

    path: Path
    target: str
    kernels: str
    row: dict[str, Any] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(path: Path, target: str, seed: int, device: torch.device) -> Count:
        """The count that a file holds of the present kernels, or one that begins with `seed`."""
        count = Count(path, target, kernels_of(target))
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            row = json.loads(line)
            if row["target"] == target and row.get("kernels") == count.kernels and "next_seed" in row:
                row, count.row = count.row, row
            if row:
                count.others.append(row)
        if not count.row:
            start = vars(Outcome(target, seed)) | {"device": env.device_name(device)}
            count.row = start | {"kernels": count.kernels, "next_seed": seed}
        return count

    def add(self, before: dict[str, Any], outcomes: list[Outcome]) -> None:
        """Add what searches from `next_seed` on have found so far to the row as it was before them."""
        found = _whole(outcomes, before["seed"])
        whole = _whole([Outcome(**{k: before[k] for k in vars(found)}), found], before["seed"])
        whole.seconds = round(before["seconds"] + found.seconds, 1)
        self.row = before | vars(whole) | {"next_seed": 1 + max(outcome.seed for outcome in outcomes)}
        self.row["versions"] = env.versions("hypothesis", "tilelang")
        written = self.path.with_name(self.path.name + ".new")
        written.write_text("".join(json.dumps(row) + "\n" for row in (*self.others, self.row)), "utf-8")
        os.replace(written, self.path)


def _go_on(args: argparse.Namespace, seed: int, sizes: Sizes) -> Outcome:
    """What a file says of calls judged before, and the rest of them."""
    count = Count.of(args.out, args.target, seed, args.device)
    before = count.row | {"workers": args.workers}
    print(f"{before['cases']} calls judged before, over kernels {count.kernels}", flush=True)
    if before["cases"] < args.cases and not before["found"]:
        newest: dict[int, Outcome] = {}

        def note(outcome: Outcome) -> None:
            newest[outcome.seed] = outcome
            count.add(before, list(newest.values()))

        for outcome in _outcomes(args, args.cases - before["cases"], before["next_seed"], sizes, note):
            note(outcome)
    return Outcome(**{k: count.row[k] for k in vars(Outcome(args.target, seed))})


def _whole(outcomes: list[Outcome], seed: int) -> Outcome:
    whole = Outcome(
        outcomes[0].target, seed, sum(o.cases for o in outcomes), max(o.seconds for o in outcomes),
        list(itertools.chain.from_iterable(o.found for o in outcomes)),
        " ".join(o.reproducer for o in outcomes if o.reproducer),
    )  # fmt: skip
    for kind in APART:
        worst = max(outcomes, key=lambda o: getattr(o, f"worst_{kind}"))
        setattr(whole, kind, sum(getattr(o, kind) for o in outcomes))
        for name in (f"worst_{kind}", f"{kind}_reproducer"):
            setattr(whole, name, getattr(worst, name))
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--cases", type=int, default=200, help="calls that count (default 200; 0 compiles)")
    parser.add_argument("--seed", type=int, help="of the search (default: random, printed)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--device", type=torch.device, help="default: the GPU for sm90 and sm100, else the CPU")
    parser.add_argument("--narrow", action="store_true", help="one kernel of each kind: few heads, one D and dtype")
    parser.add_argument("--replay", metavar="JSON", help="judge this printed reproducer alone")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each process, compiling aside (no limit)")
    parser.add_argument(
        "--allow-cancelled-scores", action="store_true", help="an lse of cancelled scores is no failure"
    )
    parser.add_argument(
        "--allow-cancelled-gradients", action="store_true", help="a dq or dkv of cancelled gradients is no failure"
    )
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append the outcome as a JSON line")
    parser.add_argument(
        "--resume", action="store_true", help="count what the file has of the present kernels, and keep it up to date"
    )
    args = parser.parse_args()
    if args.resume and args.out is None:
        parser.error("--resume goes with --out")
    args.device = args.device or torch.device("cuda" if args.target in ("sm90", "sm100") else "cpu")
    if args.replay:
        found = misses(Contract.parse(args.replay), args.target, args.device)
        print("does not count" if found is None else "\n".join(found) or "no miss")
        return int(bool(found))
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    sizes = narrow(SIZES[args.target]) if args.narrow else SIZES[args.target]
    outcomes = [_go_on(args, seed, sizes)] if args.resume else list(_outcomes(args, args.cases, seed, sizes))
    whole = _whole(outcomes or [Outcome(args.target, seed)], seed)
    print(f"{args.target}: {whole.cases} calls in {whole.seconds} s, seed {seed}, {args.workers} processes")
    for outcome in outcomes:
        if outcome.found:
            print(f"MISS (seed {outcome.seed}): {'; '.join(outcome.found)}\n  --replay '{outcome.reproducer}'")
    for kind, what in APART.items():
        if getattr(whole, kind):
            worst, reproducer = getattr(whole, f"worst_{kind}"), getattr(whole, f"{kind}_reproducer")
            print(
                f"MISS {what}, explained by the hardware's sums: {getattr(whole, kind)} calls, at most {worst:.2f} of "
                f"the limit\n  --replay '{reproducer}'"
            )
    if args.out and not args.resume:
        row = asdict(whole) | {"workers": args.workers, "device": env.device_name(args.device)}
        row["kernels"] = kernels_of(args.target)
        append_jsonl(args.out, [row | {"versions": env.versions("hypothesis", "tilelang")}])
    not_allowed = whole.cancelled and not args.allow_cancelled_scores
    not_allowed = not_allowed or (whole.gradients and not args.allow_cancelled_gradients)
    return int(bool(whole.found) or bool(not_allowed))


if __name__ == "__main__":
    raise SystemExit(main())
