"""The harness: on each shape, run every implementation, verify it, then time them all interleaved; one row per result.

Conventions, the same for every implementation (from `Problem`; T tokens, H heads, K slots, invalid slots counted):

    FLOP   forward 2 T H K (D + d_v); backward 2 T H K (3 D + 2 d_v)
    bytes  forward 2 D per (token, slot): the gather; backward that plus 4 D: the fp32 adds into dkv
    ratio  the other's median over ours: above 1, ours is faster

A row is a flat JSON object (`ROW_FIELDS`). `ms` is `null` for what did not run, and `note` says why. Memory in 1e6
bytes: `input_mb` the call's tensors, `peak_mb` what a pass allocates beyond what was there, outputs included; for
`fwd+bwd` the sum is `torch.cuda.max_memory_allocated` of a process that holds nothing else.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cute_sparse_mla
from cute_sparse_mla import env
from cute_sparse_mla.indices import union_ratios
from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.problem import Problem
from cute_sparse_mla.text_rows import Indexer

from . import timing
from .implementations import BOTH, BWD, FWD, Call, Implementation, Ours
from .loading import git_commit
from .shapes import BenchShape, draw, unsupported_rows
from .verify import Partial, Verdict, Verifier, agreement, kept_for_agreement

Row = dict[str, Any]
ROW_FIELDS = (
    "run", "suite", "impl", "pass", "model", "tp", "T", "S_kv", "H", "D", "d_v", "K", "rows", "invalid", "union", "ms",
    "p10", "p90", "n", "timing", "tflops", "tbps", "peak_mb", "input_mb", "ok", "verified", "err_vs_fp64", "of_limit",
    "agree", "config", "device", "versions", "note",
)  # fmt: skip
TENSORS = {FWD: ("out", "lse"), BWD: ("dq", "dkv", "d_sink", "dkv_total")}
TENSORS[BOTH] = TENSORS[FWD] + TENSORS[BWD]
DISTRIBUTIONS = ("tilelang", "apache-tvm-ffi", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "triton")


def work(problem: Problem, which: str) -> tuple[int, int]:
    """`(FLOP, bytes)` of a pass, by the conventions above."""
    forward = (problem.forward_flops, problem.gather_bytes)
    backward = (problem.backward_flops, problem.gather_bytes + problem.add_bytes)
    both = (forward[0] + backward[0], forward[1] + backward[1])
    return {FWD: forward, BWD: backward, BOTH: both}[which]


def input_bytes(inputs: Inputs) -> int:
    """Bytes of a call's tensors, dout included."""
    tensors = (getattr(inputs, field.name) for field in fields(inputs))
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@dataclass(frozen=True)
class Settings:
    """How to measure. `verify_tokens=0` skips the oracle; `reps=None` takes as many runs as fit `seconds`.

    `fewest` runs it is at least; `suite` names the suite of shapes that the rows belong to, if any.
    """

    device: torch.device
    passes: tuple[str, ...] = (FWD, BWD)
    reps: int | None = None
    seconds: float = 3.0
    flush: bool = False
    graph: bool = False
    verify_tokens: int = 64
    seed: int = 0
    fewest: int | None = None
    suite: str = ""
    progress: Callable[[str], None] = lambda message: None


@dataclass
class Run:
    """What is the same in every row of a run."""

    device: torch.device
    id: str = field(default_factory=lambda: f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}")
    device_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device_name = env.device_name(self.device)
        commit = git_commit(Path(cute_sparse_mla.__file__).resolve().parent)
        self.versions = env.versions(*DISTRIBUTIONS) | {"cute_sparse_mla": cute_sparse_mla.__version__}
        self.versions |= {"commit": commit} if commit else {}


@dataclass
class _Subject:
    """One implementation on one shape."""

    impl: Implementation
    passes: list[str]
    refused: dict[str, str]
    call: Call | None = None
    state: Any = None
    results: Partial = field(default_factory=Partial)
    verdict: Verdict | None = None
    notes: list[str] = field(default_factory=list)
    error: str = ""

    def function(self, which: str) -> Callable[[], Any]:
        """The timed part of a pass."""
        call, state = self.call, self.state
        assert call is not None
        functions = {FWD: call.fwd, BWD: lambda: call.bwd(state), BOTH: lambda: call.bwd(call.fwd())}
        return functions[which]


# -- running and judging -------------------------------------------------------------------------------------------


def _evaluate(
    impl: Implementation, call: Call, inputs: Inputs, passes: Sequence[str], problem: Problem, device: torch.device,
    forward: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[Any, Partial, list[str]]:  # fmt: skip
    """Run what `passes` need once: `(state, results, notes)`. `forward` gives out and lse to a backward without one."""
    notes = []
    has_forward = not impl.unsupported(problem, FWD, device)
    differs = {which: impl.differs(inputs, which) for which in (FWD, BWD)}
    out = lse = dq = dkv = d_sink = None
    if has_forward:
        state = call.fwd()
        out, lse = basis = call.out_lse(state)
    else:
        basis = forward()
        state = call.adopt(*basis)
    if any(which != FWD for which in passes):
        dq, dkv, d_sink = call.gradients(call.bwd(state))
    if has_forward and differs[FWD]:
        notes.append(f"out and lse not compared: {differs[FWD]}")
        out = lse = None
    reason = differs[BWD] or (differs[FWD] if has_forward else "")
    if reason and dq is not None:
        notes.append(f"gradients not compared: {reason}")
        dq = dkv = d_sink = None
    return state, Partial(out, lse, dq, dkv, d_sink, None if reason else basis), notes


def _reference_forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return cute_sparse_mla.fwd(
        inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, backend="reference", **inputs.options
    )


def _try_subject(
    subject: _Subject, inputs: Inputs, shape: BenchShape, settings: Settings, verifier: Verifier | None,
    forward: Callable[[], tuple[Tensor, Tensor]],
) -> None:  # fmt: skip
    impl, problem, device = subject.impl, shape.problem(), settings.device

    def alone(sample: Inputs) -> Partial | None:
        # A peer that needs queries to be the last tokens cannot run a sample of them.
        if any(impl.differs(sample, which) for which in (FWD, BWD)):
            return None
        if verifier is None:
            return None
        call = impl.prepare(sample, problem)
        _, results, _ = _evaluate(impl, call, sample, subject.passes, problem, device, verifier.judge.budget_forward)
        return results

    subject.call = impl.prepare(inputs, problem)
    if subject.call.conversions():
        subject.notes.append(subject.call.conversions())
    subject.state, subject.results, notes = _evaluate(
        impl, subject.call, inputs, subject.passes, problem, device, forward
    )
    subject.notes += notes
    if verifier is not None:
        subject.verdict = verifier.judged(subject.results, alone)


def _prepare_subjects(
    shape: BenchShape, inputs: Inputs, implementations: Sequence[Implementation], settings: Settings
) -> list[_Subject]:
    """Run and judge every implementation once; one that cannot run says why and is left out of the timing."""
    verifier = Verifier(inputs, settings.verify_tokens) if settings.verify_tokens else None
    problem, subjects = shape.problem(), []
    provided: list[Partial] = []

    def forward() -> tuple[Tensor, Tensor]:
        for results in provided:
            if results.out is not None and results.lse is not None:
                return results.out, results.lse
        return _reference_forward(inputs)

    for impl in implementations:
        refused = {which: impl.unsupported_pass(problem, which, settings.device) for which in settings.passes}
        subject = _Subject(impl, [which for which, reason in refused.items() if not reason], refused)
        subjects.append(subject)
        if not subject.passes:
            continue
        settings.progress(f"verify {impl.name}")
        try:
            _try_subject(subject, inputs, shape, settings, verifier, forward)
        except Exception as error:
            # A peer that fails to compile or runs out of memory must not take the others' results with it.
            subject.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            subject.call = subject.state = None
            settings.progress(f"failed {impl.name}: {subject.error}")
        provided.append(subject.results)
    return subjects


# -- timing and rows -----------------------------------------------------------------------------------------------


def _time_pass(
    which: str, subjects: Sequence[_Subject], settings: Settings
) -> tuple[dict[str, timing.Spread], dict[str, float | None], dict[str, str]]:
    """`(spread, peak MB, mode)` by implementation."""
    functions, peaks, modes = {}, {}, {}
    plain = "events" if settings.device.type == "cuda" else "perf_counter"
    for subject in subjects:
        if subject.call is None or which not in subject.passes:
            continue
        name, function = subject.impl.name, subject.function(which)
        peaks[name], modes[name] = timing.peak_extra_mb(function, settings.device), plain
        if settings.graph and settings.device.type == "cuda":
            try:
                function, modes[name] = timing.captured(function, settings.device), "graph"
            except Exception as error:
                subject.notes.append(f"{which} not captured in a graph ({type(error).__name__}), timed by events")
        functions[name] = function
    spreads = timing.interleaved(
        functions, settings.device, reps=settings.reps, seconds=settings.seconds, flush=settings.flush,
        fewest=settings.fewest,
    )  # fmt: skip
    return spreads, peaks, modes


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _finite(values: dict[str, float]) -> dict[str, float | str]:
    """JSON has no infinity and no NaN: those become strings."""
    return {k: float(f"{v:.3g}") if math.isfinite(v) else str(v) for k, v in values.items()}


def _judgement(subject: _Subject, which: str) -> Row:
    verdict = subject.verdict
    if subject.error or verdict is None:
        # Our own failure is a miss; a peer's is a fact about the peer.
        failed = bool(subject.error) and isinstance(subject.impl, Ours)
        return {"ok": False if failed else None, "verified": "no", "err_vs_fp64": {}, "of_limit": {}, "misses": []}
    names = [name for name in TENSORS[which] if name in verdict.error]
    misses = [text for name, text in verdict.misses if name in TENSORS[which]]
    return {
        "ok": not misses if names else None,
        "verified": verdict.how if names else "no",
        "err_vs_fp64": _finite({name: verdict.error[name] for name in names}),
        "of_limit": _finite({name: verdict.of_limit[name] for name in names}),
        "misses": misses,
    }


def _row(
    subject: _Subject,
    which: str,
    base: Row,
    problem: Problem,
    measured: tuple,
    settings: Settings,
    agree: dict,
    run: Run,
) -> Row:
    spreads, peaks, modes = measured
    name = subject.impl.name
    spread = spreads.get(name)
    judgement = _judgement(subject, which)
    refused = subject.refused[which]
    problems = [f"not run: {refused}"] if refused else [f"failed: {subject.error}"] if subject.error else []
    if refused:
        judgement |= {"ok": None, "verified": "no"}
    notes = problems or [*(f"MISS {text}" for text in judgement.pop("misses")), *subject.notes]
    judgement.pop("misses", None)
    row: Row = dict.fromkeys(ROW_FIELDS) | base | judgement
    row |= {"run": run.id, "impl": name, "pass": which, "device": run.device_name, "note": "; ".join(notes)}
    row["versions"] = run.versions | ({"impl": subject.impl.version} if subject.impl.version else {})
    row["agree"] = {
        other: _finite({key: value for key, value in tensors.items() if key in TENSORS[which]})
        for other, tensors in agree.get(name, {}).items()
    }
    if spread is not None:
        flops, volume = work(problem, which)
        row |= {
            "ms": _rounded(spread.ms, 5), "p10": _rounded(spread.p10, 5), "p90": _rounded(spread.p90, 5), "n": spread.n,
            "tflops": _rounded(flops / spread.ms / 1e9), "tbps": _rounded(volume / spread.ms / 1e9),
            "peak_mb": _rounded(peaks[name], 6),
            "timing": {"mode": modes[name], "l2_flush": settings.flush and settings.device.type == "cuda"},
        }  # fmt: skip
    return row


def run_shape(
    shape: BenchShape, implementations: Sequence[Implementation], settings: Settings, run: Run,
    indexer: Indexer | None = None,
) -> list[Row]:  # fmt: skip
    """Verify and time every implementation on one shape: rows, grouped by pass."""
    missing = unsupported_rows(shape, indexer)
    inputs: Inputs | None = None
    if not missing:
        settings.progress("inputs")
        inputs = draw(shape, settings.device, settings.seed, indexer)
    problem = shape.problem()
    base: Row = {
        "suite": settings.suite, "model": shape.name, "tp": shape.tp, "T": shape.T, "S_kv": shape.S_kv, "H": shape.H,
        "D": shape.D, "d_v": shape.d_v, "K": shape.K, "rows": shape.rows, "invalid": shape.invalid, "config": {},
    }  # fmt: skip
    if inputs is None:
        subjects = [_Subject(impl, [], dict.fromkeys(settings.passes, missing)) for impl in implementations]
    else:
        ratios = union_ratios(inputs.indices, shape.S_kv)
        base["input_mb"] = _rounded(input_bytes(inputs) / 1e6, 6)
        base["union"] = {str(n): _rounded(r, 4) if math.isfinite(r) else None for n, r in ratios.items()}
        subjects = _prepare_subjects(shape, inputs, implementations, settings)
    kept = {s.impl.name: kept_for_agreement(s.results) for s in subjects}
    agree = {name: agreement(mine, {k: v for k, v in kept.items() if k != name}) for name, mine in kept.items()}
    del kept
    for subject in subjects:
        subject.results = Partial()
    rows = []
    for which in settings.passes:
        settings.progress(f"time {which}")
        measured = _time_pass(which, subjects, settings)
        for subject in subjects:
            config = {} if inputs is None or subject.error else subject.impl.config(inputs)
            rows.append(_row(subject, which, base | {"config": config}, problem, measured, settings, agree, run))
    return rows
