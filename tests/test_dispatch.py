"""Which backend and config a call gets on which device, what is refused and with which words."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import BASE
from cute_sparse_mla import (
    ArgumentValueError,
    MissingDependencyError,
    SparseAttentionConfig,
    UnsupportedError,
    config,
    dispatch,
    env,
)
from cute_sparse_mla.models import MODELS
from cute_sparse_mla.problem import HEAD_CLASSES, KERNEL_DIMS, KERNEL_DTYPES, Problem

PROBLEM = Problem(1, 64, 256, 16, 1, 128, 576, 512, torch.bfloat16, torch.int32)
NOTHING = SparseAttentionConfig()
OTHER_GPUS = ((8, 0), (8, 9), (12, 0), (12, 1), (11, 0), (10, 1), (10, 2), (7, 5))
KERNEL_GPUS = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}
CONFIG_ROW = config.ConfigRow("any", (), (1, 128), SparseAttentionConfig(tokens_per_tile=1), "a test's", "none")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both kernel backends as if present and installed: they record what reaches them."""
    seen = SimpleNamespace(checked=[], ran=[], warmed=[], missing=set())

    def recording(name: str) -> SimpleNamespace:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no kernel may run in this test")

        return SimpleNamespace(
            check=lambda problem, config: seen.checked.append(name),
            warmup=lambda problem, config, backward: seen.warmed.append((name, problem, backward)),
            fwd=refuse, bwd=refuse,
        )  # fmt: skip

    backends = {name: recording(name) for name in ("sm90", "sm100")}
    monkeypatch.setattr(dispatch, "load", backends.__getitem__)
    monkeypatch.setattr(env, "is_installed", lambda module: module not in seen.missing)
    rows = tuple(replace(CONFIG_ROW, architecture=name) for name in backends)
    monkeypatch.setattr(config, "TABLE", (*rows, *config.TABLE))
    return seen


def choose(
    capability: tuple[int, int] | None, backend: str = "", problem: Problem = PROBLEM,
    wished: SparseAttentionConfig = NOTHING,
) -> dispatch.Choice:  # fmt: skip
    return dispatch.choose(problem, "cuda" if capability else "cpu", capability, backend, wished)


# -- the choice ----------------------------------------------------------------------------------------------------


def test_a_cpu_runs_the_reference() -> None:
    choice = choose(None)
    assert choice.backend == "reference" and not choice.warning and "CPU" in choice.reason


@pytest.mark.parametrize("capability", KERNEL_GPUS)
def test_hopper_and_blackwell_run_their_kernels(capability: tuple[int, int], kernels: SimpleNamespace) -> None:
    choice = choose(capability)
    assert choice.backend == KERNEL_GPUS[capability] and not choice.warning
    assert f"{capability[0]}.{capability[1]}" in choice.reason
    assert kernels.checked == [choice.backend]


@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_other_gpus_run_the_reference_with_a_warning(capability: tuple[int, int], kernels: SimpleNamespace) -> None:
    choice = choose(capability)
    assert choice.backend == "reference"
    assert f"no kernels for compute capability {capability[0]}.{capability[1]}" in choice.warning
    assert not kernels.checked


@pytest.mark.parametrize("capability", [None, *KERNEL_GPUS, *OTHER_GPUS])
def test_the_reference_may_be_asked_for_anywhere(capability: tuple[int, int] | None, kernels: SimpleNamespace) -> None:
    choice = choose(capability, "reference")
    assert choice.backend == "reference" and not choice.warning and choice.reason == "named by the caller"


@pytest.mark.parametrize("backend", ["sm90", "sm100"])
@pytest.mark.parametrize("capability", [None, *KERNEL_GPUS, *OTHER_GPUS])
def test_a_named_backend_is_used_or_refused(
    capability: tuple[int, int] | None, backend: str, kernels: SimpleNamespace
) -> None:
    fitting = KERNEL_GPUS.get(capability)
    if fitting == backend:
        assert choose(capability, backend).backend == backend
        return
    with pytest.raises(UnsupportedError) as refused:
        choose(capability, backend)
    message = str(refused.value)
    assert f"backend '{backend}' needs compute capability {'9.x' if backend == 'sm90' else '10.0 or 10.3'}" in message
    where = "device type cpu" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
    assert f"the tensors are on {where}" in message
    assert f"backend='{fitting or 'reference'}' runs there" in message
    assert not kernels.checked


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentValueError, match=r"backend: must be one of reference, sm90, .*, fastest; got 'fast'"):
        choose(None, "fast")


# -- what is missing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("capability", "package", "extra"), [
    ((9, 0), "tilelang", "hopper"), ((10, 0), "cutlass", "blackwell"), ((10, 3), "cutlass", "blackwell"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_install_command(
    capability: tuple[int, int], package: str, extra: str, named: bool, kernels: SimpleNamespace
) -> None:
    kernels.missing.add(package)
    with pytest.raises(MissingDependencyError) as raised:
        choose(capability, KERNEL_GPUS[capability] if named else "")
    assert isinstance(raised.value, ImportError)
    assert f"pip install 'cute_sparse_mla[{extra}]'" in str(raised.value) and f"'{package}'" in str(raised.value)
    i = BASE.inputs()
    answer = cute_sparse_mla.explain(i.q, i.kv, i.indices, capability=capability)
    assert not answer.ok and isinstance(answer.error, MissingDependencyError) and "pip install" in str(answer)
    # Empty calls, which no kernel would run, get the same answer: shapes must not decide whether an install works.
    with pytest.raises(MissingDependencyError):
        choose(capability, problem=replace(PROBLEM, S=0))


def test_the_other_architecture_package_is_not_asked_for(kernels: SimpleNamespace) -> None:
    kernels.missing.add("cutlass")
    assert choose((9, 0)).backend == "sm90"
    kernels.missing.clear()
    kernels.missing.add("tilelang")
    assert choose((10, 0)).backend == "sm100"


@pytest.mark.parametrize("capability", KERNEL_GPUS)
def test_a_version_without_kernels_says_so(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "is_installed", lambda module: not module.startswith("cute_sparse_mla."))
    with pytest.raises(UnsupportedError, match=r"this version has no sm.* kernels; backend='reference' runs anywhere"):
        choose(capability)


@pytest.mark.parametrize(("D", "d_v"), [(512, 256), (576, 576), (64, 64), (128, 512)])
def test_kernels_refuse_other_widths_with_what_works(D: int, d_v: int, kernels: SimpleNamespace) -> None:
    for capability in KERNEL_GPUS:
        with pytest.raises(UnsupportedError) as refused:
            choose(capability, problem=replace(PROBLEM, D=D, d_v=d_v))
        assert f"({D}, {d_v})" in str(refused.value) and "backend='reference'" in str(refused.value)
    assert choose(None, problem=replace(PROBLEM, D=D, d_v=d_v)).backend == "reference"


@pytest.mark.parametrize(("wished", "error"), [
    (SparseAttentionConfig(tokens_per_tile=2), UnsupportedError),
    (SparseAttentionConfig(fwd_backend="sm90"), UnsupportedError),
    (SparseAttentionConfig(fwd_backend="fast"), ArgumentValueError),
])  # fmt: skip
def test_a_config_that_the_reference_cannot_have(wished: SparseAttentionConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        choose(None, wished=wished)
    i = BASE.but(S=2, H=1, K=4).inputs()
    with pytest.raises(error):
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, config=wished)


# -- the warning ---------------------------------------------------------------------------------------------------


def test_an_unknown_gpu_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward on one unknown capability warn once in all; another capability warns again."""
    i = BASE.but(S=2, H=2, K=4, D=64, d_v=32).inputs()
    original, capability = dispatch.choose, (8, 0)
    monkeypatch.setattr(
        dispatch,
        "choose",
        lambda problem, device, found, *rest, **call: original(problem, "cuda", capability, *rest, **call),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=32)
            cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse)
    assert [str(w.message) for w in seen if "cute_sparse_mla" in str(w.message)] == [
        "no kernels for compute capability 8.0: cute_sparse_mla runs its plain torch reference there, which is slow"
    ]
    capability = (12, 0)
    with pytest.warns(RuntimeWarning, match=r"12\.0"):
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=32)


def test_a_kernel_asked_for_on_an_unknown_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    i = BASE.but(S=2, H=2, K=4).inputs()
    monkeypatch.setattr(env, "capability", lambda device: (12, 0))
    with pytest.raises(UnsupportedError, match=r"needs compute capability 9\.x .* are on compute capability 12\.0"):
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, backend="sm90")


def test_a_cpu_warns_of_nothing() -> None:
    i = BASE.but(S=2, H=2, K=4).inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cute_sparse_mla.fwd(i.q, i.kv, i.indices)
        cute_sparse_mla.fwd(i.q, i.kv, i.indices, backend="reference")


# -- explain -------------------------------------------------------------------------------------------------------


def test_explain_on_a_cpu() -> None:
    i = BASE.but(sink="random", length="random").inputs()
    answer = cute_sparse_mla.explain(i.q, i.kv, i.indices, causal=True, **{
        name: getattr(i, name) for name in ("attn_sink", "topk_length")
    })  # fmt: skip
    assert answer.ok and answer.backend == "reference" and answer.error is None and not answer.warning
    assert answer.config == SparseAttentionConfig(tokens_per_tile=1)
    p = answer.problem
    assert (p.B, p.S, p.S_kv, p.H, p.G, p.K, p.D, p.d_v) == (1, 64, 256, 16, 1, 128, 576, 512)
    assert p.causal and p.has_sink and p.has_topk_length and not p.has_q_positions and not p.packed
    for part in ("reference", "tokens_per_tile=1", "table"):
        assert part in str(answer)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_explain_on_behalf_of_a_gpu(model: Any, capability: tuple[int, int], kernels: SimpleNamespace) -> None:
    """Tensors on the meta device cost no memory at any size."""
    T = 1 << 20
    q = torch.empty(T, model.heads, model.D, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(T, 1, model.D, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(T, model.K, dtype=torch.int32, device="meta")
    answer = cute_sparse_mla.explain(q, kv, rows, causal=True, capability=capability)
    assert answer.ok and answer.problem.packed
    assert answer.backend == KERNEL_GPUS.get(capability, "reference")
    assert bool(answer.warning) == (capability not in KERNEL_GPUS)
    assert answer.warning in str(answer)
    refused = cute_sparse_mla.explain(q, kv, rows, backend="sm90", capability=capability)
    assert refused.ok == (capability == (9, 0))
    if not refused.ok:
        assert str(refused).startswith("cannot run: backend 'sm90' needs compute capability 9.x")


@pytest.mark.parametrize("capability", [(9,), 9, "9.0", [9, 0], (9.0, 0), (True, 0), (-1, 0), (9, -1)])
def test_what_is_no_compute_capability_is_reported(capability: Any) -> None:
    i = BASE.inputs()
    answer = cute_sparse_mla.explain(i.q, i.kv, i.indices, capability=capability)
    assert not answer.ok and answer.reason.startswith("capability: must be (major, minor), two ints")


def test_explain_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("explain must not run anything")

    for module, name in ((dispatch, "forward"), (dispatch.reference, "forward"), (dispatch, "load")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(Tensor, "item", refuse)
    monkeypatch.setattr(Tensor, "tolist", refuse)
    i = BASE.inputs()
    assert cute_sparse_mla.explain(i.q, i.kv, i.indices).ok


# -- warmup --------------------------------------------------------------------------------------------------------


def test_warmup_on_a_cpu_compiles_nothing() -> None:
    choices = cute_sparse_mla.warmup(16, 576, device="cpu")
    assert [choice.backend for choice in choices] == ["reference"] * 2
    assert len(cute_sparse_mla.warmup(16, 576, causal=True, device=torch.device("cpu"))) == 1
    with pytest.raises(UnsupportedError):
        cute_sparse_mla.warmup(16, 576, device="cpu", backend="sm90")


@pytest.mark.parametrize("backward", [False, True])
def test_warmup_asks_the_backend_for_both_flavours(
    backward: bool, kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "capability", lambda device: (9, 0))
    cute_sparse_mla.warmup(24, 512, dtype=torch.float16, index_dtype=torch.int64, backward=backward, device="cpu")
    assert [(name, flag) for name, _, flag in kernels.warmed] == [("sm90", backward)] * 2
    problems = [problem for _, problem, _ in kernels.warmed]
    assert [p.causal for p in problems] == [False, True]
    for p in problems:
        assert (p.heads_per_group, p.head_class, p.D, p.d_v) == (24, 32, 512, 512)
        assert p.dtype == torch.float16 and p.index_dtype == torch.int64 and not p.is_empty


# -- the config table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", (*config.measured(), *config.TABLE), ids=lambda row: f"{row.architecture}-{row.D}-{row.heads}-{row.K}"
)
def test_every_row_of_the_table(row: config.ConfigRow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reason and measurement given, ranges sane, values that a config may have, and not hidden by an earlier row."""
    assert row.reason and row.figure
    assert row.architecture in dispatch.BACKENDS
    low, high = row.heads
    assert 1 <= low <= high <= HEAD_CLASSES[-1]
    assert set(row.D) <= {D for D, _ in KERNEL_DIMS} or row.architecture == "reference"
    assert config.decode(row.config.encode()) == row.config
    problem = replace(PROBLEM, H=low, **({"D": row.D[0]} if row.D else {}))
    if row in config.measured():
        problem = replace(problem, K=row.K[0], S_kv=row.S_kv[0])
    else:
        # The rows of `config.TABLE` hold where nothing was measured.
        monkeypatch.setattr(config, "measured", tuple)
    assert config.choose(row.architecture, problem, NOTHING) == (row.config, row)


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 17, 32, 64, 100, 128])
@pytest.mark.parametrize("D", [512, 576])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_problem_has_a_row(heads: int, D: int, dtype: torch.dtype) -> None:
    problem = replace(PROBLEM, H=heads, D=D, dtype=dtype)
    assert problem.head_class == next(c for c in (16, 32, 64, 128) if c >= heads)
    for architecture in {row.architecture for row in config.TABLE}:
        filled, row = config.choose(architecture, problem, NOTHING)
        assert row.holds_for(architecture, problem)
        # With kernels of our own the device decides.
        assert (filled.tokens_per_tile is None) == (architecture in ("sm90", "sm100"))


def test_the_callers_fields_win_over_the_table() -> None:
    filled, row = config.choose("reference", PROBLEM, SparseAttentionConfig(fwd_threads=256))
    assert filled == SparseAttentionConfig(fwd_threads=256, tokens_per_tile=1)
    assert row.config.fwd_threads is None
    assert str(filled) == "fwd_threads=256, tokens_per_tile=1" and str(NOTHING) == "defaults"
    assert config.decode(NOTHING.encode()) == NOTHING
    with pytest.raises(UnsupportedError, match="no kernel config for nothing"):
        config.choose("nothing", PROBLEM, NOTHING)


# -- empty calls ---------------------------------------------------------------------------------------------------

EMPTY = [dict(B=0), dict(S=0), dict(S_kv=0), dict(K=0), dict(B=0, K=0), dict(S=0, S_kv=0), dict(S_kv=0, K=0)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sink", [None, "random"])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_calls(sizes: dict[str, int], sink: str | None, packed: bool) -> None:
    """Empty or zero results of the right shape and dtype, with the autograd graph connected."""
    if packed and "B" in sizes:
        pytest.skip("a packed call has no batch axis")
    case = BASE.but(S=3, S_kv=5, K=4, H=4, G=2, D=64, d_v=32, sink=sink, causal=True, dlse=True, packed=packed)
    i = case.but(**sizes).inputs()
    options = i.options
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=32, **options)
    assert out.shape == (*i.q.shape[:-1], 32) and out.dtype == torch.bfloat16 and not out.any()
    assert lse.shape == i.q.shape[:-1] and lse.dtype == torch.float32 and (lse == -float("inf")).all()
    dlse = torch.full_like(lse, float("nan"))
    dq, dkv, d_sink = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dlse=dlse, **options)
    assert dq.shape == i.q.shape and dq.dtype == i.q.dtype and not dq.any()
    assert dkv.shape == i.kv.shape and dkv.dtype == i.kv.dtype and not dkv.any()
    assert d_sink is None if sink is None else d_sink.shape == (4,) and not d_sink.any()
    buffer = torch.full(i.kv.shape, -0.0)
    _, same, _ = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dkv=buffer, **options)
    assert same is buffer and torch.signbit(buffer).all()

    leaves = [t.clone().requires_grad_() for t in (i.q, i.kv, i.attn_sink) if t is not None]
    graph = options | dict(attn_sink=leaves[2] if sink else None)
    out, lse = cute_sparse_mla.sparse_mla(leaves[0], leaves[1], i.indices, d_v=32, return_lse=True, **graph)
    assert out.requires_grad and lse.requires_grad
    (out.sum() + lse.sum()).backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype and not leaf.grad.any()
