"""External backends against stand-ins of the packages' conventions, and against the packages on a Hopper GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench import fastest as table_of
from bench import report
from bench.cases import Case
from cute_sparse_mla import (
    MissingDependencyError,
    SparseAttentionConfig,
    UnsupportedError,
    dispatch,
    env,
    fastest,
    validation,
)
from cute_sparse_mla.precision import Inputs, Judge, run
from cute_sparse_mla.problem import BACKWARD, FORWARD

from .stand_ins import CUDNN, FLASH_MLA

# Both packages together: what users without one package for both glue.
GLUED: dict[str, Any] = dict(backend="cudnn", config=SparseAttentionConfig(fwd_backend="flash_mla"))
CASE = Case(S=12, S_kv=150, H=16, K=128, packed=True)
INF = float("inf")
SENTINELS = (
    CASE.but(name="plain"),
    CASE.but(name="8 heads", H=8, invalid="odd"),
    CASE.but(name="64 heads", H=64, invalid="shuffled"),
    CASE.but(name="no rope tail", D=512, invalid="tail"),
    CASE.but(name="head", invalid="head"),
    CASE.but(name="out of range", invalid="out_of_range"),
    CASE.but(name="out of range int64", invalid="out_of_range", index_dtype=torch.int64),
    CASE.but(name="duplicates", duplicates=True),
    CASE.but(name="length", length="random", D=512),
    CASE.but(name="zero length", length="zero", sink="random"),
    CASE.but(name="causal", causal=True, S_kv=90),
    CASE.but(name="positions", positions="random", length="random"),
    CASE.but(name="one batch entry", packed=False, invalid="shuffled"),
    CASE.but(name="sink", sink="random", invalid="shuffled"),
    CASE.but(name="sink 200", sink=200.0),
    CASE.but(name="sink +inf", sink=INF),
    CASE.but(name="sink -inf", sink=-INF),
    CASE.but(name="empty row", invalid="one_row"),
    CASE.but(name="empty row, sink", invalid="one_row", sink="random"),
    CASE.but(name="all empty", invalid="all", sink="random"),
    CASE.but(name="scale 0", sm_scale=0.0),
)


def _installed(*packages: str) -> str:
    return ", ".join(name for name in packages if not env.is_installed(name))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Stand-ins of both packages on a machine that says it has compute capability 9.0; gives a package by its name."""
    for name, text in (("flash_mla", FLASH_MLA), ("cudnn", CUDNN)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(env, "capability", lambda device: (9, 0))
    yield importlib.import_module
    for name in ("flash_mla", "cudnn"):
        sys.modules.pop(name, None)


def misses(inputs: Inputs, **options: Any) -> list[str]:
    results = run(inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, **options)
    return [str(check) for check in Judge(inputs).checks(results) if not check.ok]


@pytest.mark.parametrize("case", SENTINELS, ids=lambda case: case.name)
def test_the_contract_through_both_packages(case: Case, packages: Any) -> None:
    assert misses(case.inputs(seed=1), **GLUED) == []


@pytest.mark.sm90
@pytest.mark.parametrize("case", SENTINELS, ids=lambda case: case.name)
def test_the_contract_through_both_packages_on_a_gpu(case: Case) -> None:
    if missing := _installed("flash_mla", "cudnn"):
        pytest.skip(f"{missing}: not installed")
    assert misses(case.but(S=64, S_kv=256).inputs(seed=1, device="cuda"), **GLUED) == []


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (63, 64), (64, 64), (65, 128), (100, 128), (128, 128)])
@pytest.mark.parametrize(("K", "slots"), [(1, 128), (100, 128), (128, 128), (130, 256)])
def test_heads_and_slots_are_padded_for_flash_mla(heads: int, padded: int, K: int, slots: int, packages: Any) -> None:
    inputs = CASE.but(S=3, H=heads, K=K, sink="random").inputs()
    out, lse = cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, d_v=512, backend="flash_mla", **inputs.options)
    assert packages("flash_mla").seen == [(padded, slots)]
    assert out.is_contiguous() and lse.is_contiguous()
    assert all(check.ok for check in Judge(inputs).forward_checks(out, lse))


def test_nothing_is_copied_that_need_not_be(packages: Any) -> None:
    i = CASE.but(H=64).inputs()
    strided = torch.empty(12, 2, 64, 576, dtype=torch.bfloat16)[:, 1].copy_(i.q)
    out, lse = cute_sparse_mla.fwd(strided, i.kv, i.indices, backend="flash_mla")
    assert packages("flash_mla").pointers == [(strided.data_ptr(), i.kv.data_ptr(), i.indices.data_ptr())]
    cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, backend="cudnn")
    assert packages("cudnn").pointers == [tuple(t.data_ptr() for t in (i.q, i.kv, out, i.dout, i.indices))]


def test_empty_calls_need_no_package(packages: Any) -> None:
    for sizes in (dict(S=0), dict(S_kv=0), dict(K=0), dict(B=0, packed=False)):
        i = CASE.but(**sizes).inputs()
        q, kv = i.q.requires_grad_(), i.kv.requires_grad_()
        out = cute_sparse_mla.sparse_mla(q, kv, i.indices, **GLUED)
        out.sum().backward()
        assert out.shape == (*q.shape[:-1], 512) and not out.any()
        assert q.grad is not None and kv.grad is not None and not q.grad.any() and not kv.grad.any()
    assert packages("flash_mla").seen == []


def test_int64_rows_never_wrap(packages: Any) -> None:
    i = CASE.inputs()
    rows = i.indices.long()
    rows[:, :, ::2] += 2**32
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, rows, backend="flash_mla")
    same = cute_sparse_mla.fwd(i.q, i.kv, rows, backend="reference")
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])


@pytest.mark.parametrize("heads", [8, 64, 100])
def test_cudnn_has_a_forward_on_blackwell(heads: int, packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "capability", lambda device: (10, 0))
    case = CASE.but(S=3, H=heads, D=512, invalid="one_row", length="random", sink="random")
    assert misses(case.inputs(), backend="cudnn") == []
    if heads > 64:
        with pytest.raises(UnsupportedError, match="at most 64 heads at D 576"):
            misses(case.but(D=576).inputs(), backend="cudnn")


# -- through autograd ----------------------------------------------------------------------------------------------


def test_gradients_flow_through_both_packages(packages: Any) -> None:
    i = CASE.but(sink="random", invalid="shuffled").inputs()

    def gradients(**options: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (i.q, i.kv, i.attn_sink)]
        out = cute_sparse_mla.sparse_mla(leaves[0], leaves[1], i.indices, attn_sink=leaves[2], **options)
        out.backward(i.dout)
        return [leaf.grad for leaf in leaves]

    for got, expected in zip(gradients(**GLUED), gradients(backend="reference"), strict=True):
        assert torch.equal(got, expected)


def test_a_strided_gradient_is_made_dense_for_a_package(packages: Any) -> None:
    """A projection of each head's values hands back a transposed gradient; a package takes dense ones."""
    i = CASE.inputs()
    values = torch.randn(16, 512, 64, dtype=torch.bfloat16)

    def gradients(**options: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (i.q, i.kv)]
        out = cute_sparse_mla.sparse_mla(*leaves, i.indices, **options)
        torch.bmm(out.transpose(0, 1), values).float().square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for got, expected in zip(gradients(**GLUED), gradients(backend="reference"), strict=True):
        assert torch.equal(got, expected)


def test_a_backend_without_a_backward_is_refused_before_the_forward(packages: Any) -> None:
    i = CASE.inputs()
    with pytest.raises(UnsupportedError, match=r"'flash_mla' has no backward.*config.fwd_backend"):
        cute_sparse_mla.sparse_mla(i.q.requires_grad_(), i.kv, i.indices, backend="flash_mla")
    with torch.no_grad():
        cute_sparse_mla.sparse_mla(i.q, i.kv, i.indices, backend="flash_mla")


# -- refusals ------------------------------------------------------------------------------------------------------


def _bwd(i: Inputs, **options: Any) -> None:
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, backend="reference", **i.options)
    cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, backend="cudnn", **{**i.options, **options})


def _fwd(i: Inputs, backend: str = "flash_mla", **options: Any) -> None:
    cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, backend=backend, **{**i.options, **options})


@pytest.mark.parametrize(("call", "message"), [
    (lambda: _fwd(CASE.but(G=2).inputs()), "FlashMLA takes one kv group, not 2"),
    (lambda: _fwd(CASE.but(B=2, packed=False).inputs()), "FlashMLA takes packed calls or B = 1, not B = 2"),
    (lambda: _fwd(CASE.but(dtype=torch.float16).inputs()), "FlashMLA takes bfloat16, not torch.float16"),
    (lambda: _fwd(CASE.inputs(), config=SparseAttentionConfig(fwd_stages=2)), "config.fwd_stages must be None, not 2"),
    (lambda: _fwd(CASE.but(D=64, d_v=32).inputs()), r"flash_mla kernels take \(D, d_v\) in"),
    (lambda: _fwd(CASE.inputs(), "cudnn"), "sparse forward runs on compute capability 10.x only"),
    (lambda: _bwd(CASE.but(H=1).inputs()), "cuDNN's sparse backward takes 2 heads and more"),
    (lambda: _bwd(CASE.but(H=6, G=2).inputs()), "cuDNN takes one kv group, not 2"),
    (lambda: _bwd(CASE.inputs(), deterministic=True), "cuDNN is deterministic on compute capability 10.x"),
    (lambda: _bwd(CASE.inputs(), dlse=torch.zeros(12, 16)), "cuDNN has no gradient through lse"),
    (lambda: _bwd(CASE.inputs(), dkv_dtype=torch.float32), "cuDNN rounds dkv to torch.bfloat16"),
    (lambda: _bwd(CASE.inputs(), dkv=torch.zeros(150, 1, 576)), "cuDNN rounds dkv to torch.bfloat16"),
    (lambda: _bwd(replace(i := CASE.inputs(), kv=i.kv.repeat(2, 1, 1)[::2])), r"cuDNN takes dense tensors; kv has str"),
    (lambda: _bwd(replace(i := CASE.inputs(), dout=i.dout[:1].expand(12, -1, -1))), "dense tensors; dout has strides"),
])  # fmt: skip
def test_what_a_package_cannot_compute_is_refused_by_name(call: Callable, message: str, packages: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        call()


def test_a_package_of_that_name_without_the_function_is_named(packages: Any) -> None:
    i = CASE.inputs()
    del packages("flash_mla").flash_mla_sparse_fwd
    with pytest.raises(MissingDependencyError, match="flash_mla has no flash_mla_sparse_fwd; pip install"):
        _fwd(i)


def test_offsets_beyond_32_bits_are_refused(packages: Any) -> None:
    T = 1 << 21
    q = torch.empty(T, 64, 576, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(T, 1, 576, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(T, 2048, dtype=torch.int32, device="meta")
    answer = cute_sparse_mla.explain(q, kv, rows, backend="flash_mla", capability=(9, 0))
    assert not answer.ok and "counts slots in 32 bits" in answer.reason
    answer = cute_sparse_mla.explain(q[:4096], kv[:4096], rows[:4096], backend="flash_mla", capability=(9, 0))
    assert answer.ok and answer.backend == "flash_mla" and "no sparse backward" in answer.backward
    options: dict[str, Any] = dict(causal=False, q_positions=None, topk_length=None, attn_sink=None)
    long = validation.forward(q, kv, rows, d_v=512, **options)
    with pytest.raises(UnsupportedError, match="not known to address 2\\*\\*31 elements and more; q has"):
        dispatch.choose(long.problem, "cuda", (9, 0), "cudnn", SparseAttentionConfig(), BACKWARD, call=long)


@pytest.mark.parametrize(("backend", "install"), [
    ("flash_mla", "pip install git+https://github.com/deepseek-ai/FlashMLA"),
    ("cudnn", "pip install 'cute_sparse_mla[cudnn]'"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_install_command(
    backend: str, install: str, packages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "is_installed", lambda module: module != backend)
    with pytest.raises(MissingDependencyError) as raised:
        _fwd(CASE.inputs(), backend)
    assert f"needs the package '{backend}'" in str(raised.value) and install in str(raised.value)


@pytest.mark.parametrize("backend", ["flash_mla", "cudnn"])
def test_other_devices_are_refused(backend: str) -> None:
    i = CASE.inputs()
    with pytest.raises(UnsupportedError, match=r"needs compute capability 9\.0, 10\.0 or 10\.3.*device type cpu"):
        _fwd(i, backend)
    answer = cute_sparse_mla.explain(i.q, i.kv, i.indices, backend=backend, capability=(12, 0))
    assert not answer.ok and "backend='reference' runs there" in answer.reason


# -- fastest -------------------------------------------------------------------------------------------------------


def _shape(**ms: float) -> dict[str, Any]:
    return {"T": 4096, "S_kv": 8192, "K": 2048, "ms": ms}


ENTRIES = (
    {"architecture": "sm90", "D": 576, "heads": 16, "pass": FORWARD,
     "shapes": [_shape(sm90=2.0, flash_mla=1.8), _shape(sm90=2.0, flash_mla=1.9)]},
    {"architecture": "sm90", "D": 576, "heads": 16, "pass": BACKWARD, "shapes": [_shape(sm90=8.0, cudnn=6.0)]},
    {"architecture": "sm90", "D": 576, "heads": 64, "pass": FORWARD,
     "shapes": [_shape(sm90=2.0, flash_mla=1.0), _shape(sm90=1.0, flash_mla=4.0)]},
)  # fmt: skip


@pytest.fixture
def measured(packages: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The table of `ENTRIES`, and own kernels that nothing may run; packages in the result count as missing."""
    missing: set[str] = set()
    monkeypatch.setattr(fastest, "table", lambda: ENTRIES)
    monkeypatch.setattr(env, "is_installed", lambda module: module not in missing)
    monkeypatch.setattr(dispatch, "load", lambda name: type("Own", (), {"check": lambda *args: None}))
    return missing


def _fastest(
    case: Case, which: str, capability: tuple[int, int] = (9, 0), tokens: int | None = None, **options: Any
) -> dispatch.Choice:
    i = case.inputs()
    call: validation.Call = validation.forward(
        i.q, i.kv, i.indices, d_v=512, causal=i.causal, q_positions=None, topk_length=None, attn_sink=None
    )  # fmt: skip
    if which == BACKWARD:
        out, lse = torch.zeros_like(i.dout), torch.zeros(i.q.shape[:-1])
        call = validation.backward(
            i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv=None, dkv_dtype=None, causal=False,
            q_positions=None, topk_length=None, attn_sink=None,
        )  # fmt: skip
    config = SparseAttentionConfig(tokens_per_tile=tokens)
    return dispatch.choose(call.problem, "cuda", capability, "fastest", config, which, call=call, **options)


def test_the_fastest_is_taken_per_pass_with_its_figure(measured: set[str]) -> None:
    forward, backward = (_fastest(CASE, which) for which in (FORWARD, BACKWARD))
    assert (forward.backend, backward.backend) == ("flash_mla", "cudnn")
    assert "1.8 ms at 4096 x 8192 tokens, K 2048; 0.92 times the sm90 kernels' time over 2 shapes" in forward.reason
    i = CASE.inputs()
    answer = cute_sparse_mla.explain(i.q, i.kv, i.indices, backend="fastest", capability=(9, 0))
    assert answer.backend == "flash_mla" and answer.backward.startswith("cudnn (fastest: 6.0 ms")


def test_the_own_kernels_run_where_they_are_faster_or_nothing_was_measured(measured: set[str]) -> None:
    assert _fastest(CASE.but(H=64), FORWARD).backend == "sm90"
    unmeasured = _fastest(CASE.but(H=24), FORWARD)
    assert unmeasured.backend == "sm90"
    assert "no forward measured beside others at D 576 and 24 heads" in unmeasured.reason
    assert _fastest(CASE, FORWARD, capability=(10, 0)).backend == "sm100"


def test_who_is_missing_or_refuses_is_passed_over_with_the_reason(measured: set[str]) -> None:
    refused = _fastest(CASE.but(dlse=True), BACKWARD)
    assert refused.backend == "sm90" and "not cudnn: " in refused.reason and "dlse" in refused.reason
    assert _fastest(CASE, BACKWARD, deterministic=True).backend == "sm90"
    measured.add("flash_mla")
    absent = _fastest(CASE, FORWARD)
    assert absent.backend == "sm90" and "which is not installed" in absent.reason
    measured.clear()
    measured.add("tilelang")  # the own kernels' package: those of others run all the same
    assert _fastest(CASE, FORWARD).backend == "flash_mla"
    with pytest.raises(MissingDependencyError, match="tilelang"):
        _fastest(CASE.but(H=24), FORWARD)


def test_the_table_is_what_the_committed_rows_give() -> None:
    assert fastest.TABLE.read_text() == table_of.text(table_of.entries(report.read_jsonl(table_of.RESULTS)))


def _row(impl: str, ms: float | None, **changes: Any) -> dict[str, Any]:
    shape = dict(D=576, H=8, model="shape", T=4096, S_kv=8192, K=2048, rows="random", invalid=0.0)
    backend = {"backend": "sm90"} if impl == "ours" else {}
    row = {"run": "a", "impl": impl, "pass": "fwd", "ms": ms, "ok": True, "device": "GPU", "config": backend}
    return {**row, **shape, **changes}


def test_only_what_was_measured_side_by_side_enters_the_table() -> None:
    rows = [
        _row("ours", 2.0), _row("flash_mla", 1.5), _row("tilelang_example", 3.0),
        _row("ours", 2.1, run="b"), _row("flash_mla", 1.6, run="b"),
        _row("ours", 4.0, H=16), _row("cudnn", None, H=16),
        _row("ours", 8.0, H=32, **{"pass": "bwd"}), _row("cudnn", 6.0, H=32, **{"pass": "bwd"}),
        _row("ours", 8.0, H=64), _row("flash_mla", 6.0, H=64, ok=False),
        _row("ours", 8.0, H=64, invalid=0.5), _row("flash_mla", 6.0, H=64, invalid=0.5),
    ]  # fmt: skip
    table = table_of.entries(rows)
    assert [(e["heads"], e["pass"], [s["ms"] for s in e["shapes"]]) for e in table] == [
        (8, FORWARD, [{"sm90": 2.1, "flash_mla": 1.6}]),
        (32, BACKWARD, [{"sm90": 8.0, "cudnn": 6.0}]),
    ]


def test_a_plan_s_token_groups_are_for_the_own_kernels(measured: set[str]) -> None:
    """Others work token by token whatever the plan says, and are not passed over for it."""
    config = SparseAttentionConfig(fwd_backend="flash_mla")
    for backend, which, tokens in (("cudnn", BACKWARD, 1), ("sm90", FORWARD, 1), ("sm90", BACKWARD, 4)):
        assert dispatch.planned(config, 4, "cuda", (9, 0), backend, which).tokens_per_tile == tokens
    assert dispatch.planned(SparseAttentionConfig(), 4, "cuda", (9, 0), "fastest").tokens_per_tile == 4
    assert _fastest(CASE, FORWARD, tokens=4).backend == "flash_mla"
    assert _fastest(CASE.but(H=64), FORWARD, tokens=1).config.tokens_per_tile == 1


def test_fastest_runs_on_a_cpu_by_the_reference() -> None:
    i = CASE.inputs()
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, backend="fastest")
    same = cute_sparse_mla.fwd(i.q, i.kv, i.indices)
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])
