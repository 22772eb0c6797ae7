"""Every error message: class, argument, rule and what came; the same table runs under `python -O` too."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cute_sparse_mla
from bench.cases import BASE
from cute_sparse_mla import (
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    SparseAttentionConfig,
    SparseMLAError,
    dispatch,
    indices,
)

ROOT = Path(__file__).resolve().parents[1]
B, S, S_kv, H, G, K, D, d_v = 2, 3, 5, 4, 2, 6, 24, 16
CASE = BASE.but(B=B, S=S, S_kv=S_kv, H=H, G=G, K=K, D=D, d_v=d_v)


def arguments() -> dict[str, Any]:
    """A correct forward call."""
    i = CASE.inputs()
    return dict(q=i.q, kv=i.kv, indices=i.indices, d_v=d_v)


def backward_arguments() -> dict[str, Any]:
    """A correct backward call."""
    i = CASE.inputs()
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=d_v)
    return dict(q=i.q, kv=i.kv, out=out, dout=i.dout, indices=i.indices, lse=lse)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def shifted(tensor: Tensor) -> Tensor:
    """The same values one element past an aligned address."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape).copy_(tensor)


def column_strided(tensor: Tensor) -> Tensor:
    """The same shape with a last dimension of stride 2."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


def odd_rows(tensor: Tensor) -> Tensor:
    """The same shape with rows one element further apart than they are long."""
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)[..., :-1]


@dataclass(frozen=True)
class Wrong:
    """One wrong argument: `change` maps the correct value to the wrong one; `rule` and `got` occur in the message."""

    argument: str
    change: Callable[[Any], Any]
    error: type[ArgumentError]
    rule: str
    got: str
    also: dict[str, Any] | None = None
    names: str = ""
    forward_only: bool = False

    @property
    def named(self) -> str:
        """The argument that the error names."""
        return self.names or self.argument

    def __str__(self) -> str:
        return f"{self.argument}-{self.rule[:28]}-{self.got[:24]}".replace(" ", "_")


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def no_stride_multiple(kv: Tensor) -> Tensor:
    """B, S_kv and G strides of 240, 48 and 32 elements."""
    return bf16(1000).as_strided(kv.shape, (240, 48, 32, 1))


T, V = ArgumentTypeError, ArgumentValueError
TENSOR, DENSE = "must be a torch.Tensor", "must be a dense (strided) tensor"
SCALE = "must be a finite number >= 0"
CAUSAL: dict[str, Any] = dict(causal=True)

# Arguments of fwd, sparse_mla and explain, and but for d_v of bwd.
FORWARD = (
    # types
    *(Wrong(name, to(value), T, TENSOR, kind) for name in ("q", "kv", "indices")
      for value, kind in ((None, "NoneType"), ([1.0], "list"), (np.zeros(3), "ndarray"))),
    *(Wrong(name, to([1]), T, TENSOR, "list", CAUSAL) for name in ("q_positions", "topk_length", "attn_sink")),
    *(Wrong(name, lambda t: t.to_sparse(), T, DENSE, "sparse_coo") for name in ("q", "indices")),
    Wrong("topk_length", to(torch.zeros(B, S, dtype=torch.int32).to_sparse()), T, DENSE, "sparse_coo"),
    # dtypes
    Wrong("q", lambda t: t.float(), T, "dtype must be bfloat16 or float16", "float32"),
    Wrong("q", lambda t: t.double(), T, "dtype must be bfloat16 or float16", "float64"),
    Wrong("q", lambda t: t.to(torch.float8_e4m3fn), T, "dtype must be bfloat16 or float16", "float8_e4m3fn"),
    Wrong("kv", lambda t: t.half(), T, "dtype must be bfloat16 as q", "float16"),
    Wrong("kv", lambda t: t.float(), T, "dtype must be bfloat16 as q", "float32"),
    *(Wrong("indices", lambda t, d=dtype: t.to(d), T, "dtype must be int32 or int64", str(dtype))
      for dtype in (torch.int16, torch.uint8, torch.bool, torch.float32)),
    *(Wrong("topk_length", to(torch.zeros(B, S, dtype=dtype)), T, "dtype must be int32", str(dtype))
      for dtype in (torch.int64, torch.float32, torch.bool)),
    *(Wrong("q_positions", to(torch.zeros(B, S, dtype=dtype)), T, "dtype must be int32 or int64", str(dtype), CAUSAL)
      for dtype in (torch.int16, torch.float32)),
    *(Wrong("attn_sink", to(torch.zeros(H, dtype=dtype)), T, "dtype must be float32", str(dtype))
      for dtype in (torch.bfloat16, torch.float64, torch.int32)),
    # ranks
    Wrong("q", to(bf16()), V, "must be [B, S, H, D] or packed [T, H, D]", "shape []"),
    Wrong("q", to(bf16(4, D)), V, "must be [B, S, H, D] or packed [T, H, D]", f"shape [4, {D}]"),
    Wrong("q", to(bf16(1, 1, 1, 4, D)), V, "must be [B, S, H, D] or packed [T, H, D]", f"shape [1, 1, 1, 4, {D}]"),
    Wrong("kv", lambda t: t[0], V, "must be [B, S_kv, G, D] (q is batched)", "shape [5, 2, 24]"),
    Wrong("kv", to(bf16()), V, "must be [B, S_kv, G, D] (q is batched)", "shape []"),
    Wrong("q", lambda t: t[0], V, "must be [T_kv, G, D] (q is packed)", "shape [2, 5, 2, 24]", names="kv",
          forward_only=True),
    Wrong("indices", lambda t: t[0, 0], V, "must be [B, S, G, K]", "shape [2, 6]"),
    Wrong("indices", lambda t: t[None], V, "must be [B, S, G, K]", "shape [1, 2, 3, 2, 6]"),
    Wrong("indices", lambda t: t[:, :, 0], V, "may leave out its G axis only when kv has one group (G = 2)",
          "shape [2, 3, 6]"),
    # shapes
    Wrong("q", to(bf16(B, S, 0, D)), V, "must have at least one head and one column", "shape [2, 3, 0, 24]"),
    Wrong("q", to(bf16(B, S, H, 0)), V, "must have at least one head and one column", "shape [2, 3, 4, 0]"),
    Wrong("kv", to(bf16(B, S_kv, 0, D)), V, "its group count must divide q's head count 4", "G = 0"),
    Wrong("kv", to(bf16(B, S_kv, 3, D)), V, "its group count must divide q's head count 4", "G = 3"),
    Wrong("q", to(bf16(B, S, 258, D)), V, "must have at most 128 heads per group", "258 / 2"),
    Wrong("kv", to(bf16(B, S_kv, G, 32)), V, "shape must be [B, S_kv, G, D] = [2, 5, 2, 24]", "[2, 5, 2, 32]"),
    Wrong("kv", to(bf16(3, S_kv, G, D)), V, "shape must be [B, S_kv, G, D] = [2, 5, 2, 24]", "[3, 5, 2, 24]"),
    Wrong("kv", to(bf16(1, S_kv, G, D)), V, "shape must be [B, S_kv, G, D] = [2, 5, 2, 24]", "[1, 5, 2, 24]"),
    Wrong("indices", lambda t: t[:1], V, "shape must be [B, S, G, K] = [2, 3, 2, 6]", "[1, 3, 2, 6]"),
    Wrong("indices", lambda t: t[:, :2], V, "shape must be [B, S, G, K] = [2, 3, 2, 6]", "[2, 2, 2, 6]"),
    Wrong("indices", lambda t: t[:, :, :1], V, "shape must be [B, S, G, K] = [2, 3, 2, 6]", "[2, 3, 1, 6]"),
    *(Wrong("topk_length", to(torch.zeros(shape, dtype=torch.int32)), V, "shape must be [B, S] = [2, 3]",
            str(list(shape))) for shape in ((), (B,), (S,), (B, 1), (B, S, G))),
    *(Wrong("q_positions", to(torch.zeros(shape, dtype=torch.int32)), V, "shape must be [B, S] = [2, 3]",
            str(list(shape)), CAUSAL) for shape in ((S,), (1, S), (B, S, 1))),
    *(Wrong("attn_sink", to(torch.zeros(shape)), V, "shape must be [H] = [4]", str(list(shape)))
      for shape in ((), (1,), (5,), (1, H))),
    Wrong("q_positions", to(torch.zeros(B, S, dtype=torch.int32)), V, "has no effect without causal=True",
          "causal=False"),
    # devices
    Wrong("q", on_meta, V, "must be on q's device meta", "cpu", names="kv"),
    *(Wrong(name, on_meta, V, "must be on q's device cpu", "meta") for name in ("kv", "indices")),
    *(Wrong(name, to(torch.zeros(B, S, dtype=torch.int32, device="meta")), V, "must be on q's device cpu", "meta",
            CAUSAL) for name in ("topk_length", "q_positions")),
    Wrong("attn_sink", to(torch.zeros(H, device="meta")), V, "must be on q's device cpu", "meta"),
    # layouts
    *(Wrong(name, column_strided, V, "last dimension must be contiguous (stride 1)", "strides (")
      for name in ("q", "kv")),
    *(Wrong(name, odd_rows, V, "rows must start on 16 bytes", "strides (") for name in ("q", "kv")),
    *(Wrong(name, shifted, V, "rows must start on 16 bytes", "an address 2 bytes past") for name in ("q", "kv")),
    *(Wrong(name, lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), V,
            "last dimension must be contiguous", "strides (") for name in ("q", "kv")),
    *(Wrong(name, lambda t, a=axis: t.narrow(a, 0, 1).expand(t.shape), V, "must not be expanded (stride 0)",
            "strides (") for name in ("q", "kv") for axis in (0, 1, 2)),
    *(Wrong(name, lambda t: t[..., :1].expand(t.shape), V, "last dimension must be contiguous", "0)")
      for name in ("q", "kv")),
    Wrong("kv", no_stride_multiple, V, "B, S_kv and G strides must be multiples of the smallest",
          "strides (240, 48, 32, 1)"),
    # scale
    *(Wrong("sm_scale", to(value), T, SCALE, kind) for value, kind in (
        ("0.5", "str"), (True, "bool"), (np.bool_(True), "bool"), (1j, "complex"), (np.complex64(1), "complex64"),
        (np.str_("0.5"), "str_"), ([0.5], "list"), (np.zeros(1), "ndarray"), (np.array("0.5"), "ndarray"),
        (torch.zeros(1), "a tensor of shape [1]"), (torch.zeros(()).bool(), "torch.bool"),
        (torch.zeros((), dtype=torch.complex64), "torch.complex64"),
        (torch.zeros((), requires_grad=True), "a tensor that requires grad"),
        (torch.zeros((), device="meta"), "meta"))),
    Wrong("sm_scale", to(torch.zeros((), device="meta")), T, "reading a device tensor would synchronise", "meta"),
    *(Wrong("sm_scale", to(value), V, SCALE, got) for value, got in (
        (-0.1, "-0.1"), (-1, "-1"), (float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf"),
        (10**400, "inf"), (Fraction(10**400), "inf"), (np.float32("nan"), "nan"), (torch.tensor(float("inf")), "inf"),
        (torch.tensor(-1), "-1"), (np.float16("inf"), "inf"))),
    Wrong("sm_scale", to(1e300), V, "must be finite in fp32", "1e+300"),
    # options
    *(Wrong("causal", to(value), T, "must be True or False", kind)
      for value, kind in ((1, "int"), (None, "NoneType"), ("yes", "str"), (np.bool_(True), "bool"))),
    *(Wrong("config", to(value), T, "must be a SparseAttentionConfig or None", kind)
      for value, kind in (({}, "dict"), ("fast", "str"), (SparseAttentionConfig, "type"))),
    *(Wrong("backend", to(value), T, "must be a backend's name or None", got)
      for value, got in ((1, "1"), ("", "''"), (True, "True"), (b"sm90", "b'sm90'"))),
    *(Wrong("backend", to(value), V, "must be one of reference, sm90, sm100, ", repr(value))
      for value in ("cuda", "SM90", "hopper", "reference ")),
    Wrong("config", to(SparseAttentionConfig(fwd_backend="fast")), V, "must be one of reference, sm90, sm100", "'fast'",
          names="config.fwd_backend"),
    *(Wrong("plan", to(value), T, "must be what cute_sparse_mla.plan returned, or None", kind)
      for value, kind in ((1, "int"), ({}, "dict"), (False, "bool"))),
)  # fmt: skip

WIDTH = (
    *(Wrong("d_v", to(value), T, "must be an int", kind)
      for value, kind in ((16.0, "float"), ("16", "str"), (True, "bool"), (torch.tensor(16), "Tensor"))),
    *(Wrong("d_v", to(value), V, "must lie in 1..D = 24", str(value)) for value in (0, -1, 25)),
    Wrong("d_v", to(None), V, "must be given when D is not 512 or 576 (D = 24)", "None"),
)  # fmt: skip

OUT = "shape must be [B, S, H, d_v] = [2, 3, 4, 16]"
BACKWARD = (
    *(Wrong(name, to(value), T, TENSOR, kind) for name in ("out", "dout", "lse")
      for value, kind in ((None, "NoneType"), (1.0, "float"))),
    *(Wrong(name, to(1.0), T, TENSOR, "float") for name in ("dlse", "dkv")),
    *(Wrong(name, lambda t: t.float(), T, "dtype must be bfloat16 as q", "float32") for name in ("out", "dout")),
    *(Wrong(name, lambda t: t.half(), T, "dtype must be bfloat16 as q", "float16") for name in ("out", "dout")),
    *(Wrong(name, to(torch.zeros(B, S, H, dtype=dtype)), T, "dtype must be float32", str(dtype))
      for name in ("lse", "dlse") for dtype in (torch.bfloat16, torch.float64)),
    Wrong("dkv", to(bf16(B, S_kv, G, D)), T, "dtype must be float32: gradients are added into it", "bfloat16"),
    Wrong("out", lambda t: t[0], V, "must have q's rank", "shape [3, 4, 16]"),
    Wrong("out", to(bf16(B, S, H, 0)), V, "its last dimension d_v must lie in 1..D = 24", "0"),
    Wrong("out", to(bf16(B, S, H, 32)), V, "its last dimension d_v must lie in 1..D = 24", "32"),
    Wrong("out", lambda t: t[:, :2], V, OUT, "[2, 2, 4, 16]"),
    Wrong("out", lambda t: t[:, :, :2], V, OUT, "[2, 3, 2, 16]"),
    Wrong("dout", lambda t: t[..., :8], V, OUT, "[2, 3, 4, 8]"),
    Wrong("dout", lambda t: t[0], V, OUT, "[3, 4, 16]"),
    *(Wrong(name, to(torch.zeros(shape)), V, "shape must be [B, S, H] = [2, 3, 4]", str(list(shape)))
      for name in ("lse", "dlse") for shape in ((B, H, S), (S, H), (B, S, H, 1), ())),
    Wrong("dkv", to(torch.zeros(B, S_kv, D)), V, "shape must be [as kv] = [2, 5, 2, 24]", "[2, 5, 24]"),
    Wrong("dkv", to(torch.zeros(B, S_kv, G, 2 * D)[..., :D]), V, "must be contiguous", "strides (480, 96, 48, 1)"),
    Wrong("dkv", to(torch.zeros(1, 1, 1, 1).expand(B, S_kv, G, D)), V, "must be contiguous", "strides (0, 0, 0, 0)"),
    Wrong("dkv", to(torch.zeros(B * S_kv * G * D + 1)[1:].view(B, S_kv, G, D)), V, "rows must start on 16 bytes",
          "an address 4 bytes past"),
    *(Wrong(name, on_meta, V, "must be on q's device cpu", "meta") for name in ("out", "dout", "lse")),
    *(Wrong(name, to(torch.zeros(shape, device="meta")), V, "must be on q's device cpu", "meta")
      for name, shape in (("dlse", (B, S, H)), ("dkv", (B, S_kv, G, D)))),
    *(Wrong(name, column_strided, V, "last dimension must be contiguous (stride 1)", "strides (")
      for name in ("out", "dout")),
    *(Wrong(name, odd_rows, V, "rows must start on 16 bytes", "strides (") for name in ("out", "dout")),
    *(Wrong(name, shifted, V, "rows must start on 16 bytes", "an address 2 bytes past") for name in ("out", "dout")),
    Wrong("dout", lambda t: t[..., :1].expand(t.shape), V, "last dimension must be contiguous (stride 1)", "strides ("),
    *(Wrong("deterministic", to(value), T, "must be True or False", kind)
      for value, kind in ((1, "int"), (None, "NoneType"))),
    Wrong("dkv_dtype", to("float32"), T, "must be a torch.dtype or None", "str"),
    *(Wrong("dkv_dtype", to(dtype), T, "must be kv's dtype torch.bfloat16 or float32", str(dtype))
      for dtype in (torch.float16, torch.float64, torch.int32)),
    Wrong("dkv_dtype", to(torch.bfloat16), V, "must be None or float32 when dkv= is given", "bfloat16",
          dict(dkv=torch.zeros(B, S_kv, G, D))),
)  # fmt: skip

CALLS: dict[str, tuple[Callable, Callable[[], dict[str, Any]]]] = {
    "fwd": (cute_sparse_mla.fwd, arguments),
    "sparse_mla": (cute_sparse_mla.sparse_mla, arguments),
    "bwd": (cute_sparse_mla.bwd, backward_arguments),
}


def _table() -> list[tuple[str, Wrong]]:
    rows = [(call, wrong) for call in ("fwd", "sparse_mla") for wrong in (*FORWARD, *WIDTH)]
    return rows + [("bwd", wrong) for wrong in (*FORWARD, *BACKWARD) if not wrong.forward_only]


TABLE = _table()


def mismatch(wrong: Wrong, raised: BaseException | None) -> str | None:
    """How the error differs from the table, `None` when it does not."""
    if type(raised) is not wrong.error:
        return f"expected {wrong.error.__name__}, came {raised!r}"
    builtin = TypeError if wrong.error is ArgumentTypeError else ValueError
    checks = {
        "builtin class": isinstance(raised, builtin) and isinstance(raised, SparseMLAError),
        "argument": raised.argument == wrong.named,
        "rule": wrong.rule in raised.rule,
        "got": wrong.got in raised.got,
        "message": str(raised) == f"{raised.argument}: {raised.rule}; got {raised.got}",
    }
    failed = [name for name, passed in checks.items() if not passed]
    return f"{', '.join(failed)} of {raised!r} differ from {wrong}" if failed else None


def provoke(call: str, wrong: Wrong) -> BaseException | None:
    """What the call raises with the one wrong argument."""
    function, correct = CALLS[call]
    keywords = correct() | (wrong.also or {})
    keywords[wrong.argument] = wrong.change(keywords.get(wrong.argument))
    try:
        function(**keywords)
    except BaseException as error:
        return error
    return None


def _never_runs(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a backend was chosen before the arguments were checked")


@pytest.mark.parametrize(("call", "wrong"), TABLE, ids=lambda value: str(value))
def test_wrong_argument(call: str, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = None
    function, correct = CALLS[call]
    keywords = correct() | (wrong.also or {})
    keywords[wrong.argument] = wrong.change(keywords.get(wrong.argument))
    for module in (cute_sparse_mla.reference, dispatch):
        monkeypatch.setattr(module, "forward", _never_runs)
        monkeypatch.setattr(module, "backward", _never_runs)
    if wrong.named in ("backend", "config.fwd_backend"):
        # Names are looked up where backends are chosen, still before any of them runs.
        monkeypatch.undo()
    try:
        function(**keywords)
    except BaseException as error:
        raised = error
    assert mismatch(wrong, raised) is None


def test_no_check_is_lost_after_a_correct_call() -> None:
    """What a correct call leaves behind lets no wrong one pass, nor does a wrong one that was refused before."""
    for call, wrong in (*TABLE, *TABLE):
        function, correct = CALLS[call]
        function(**correct())
        assert mismatch(wrong, provoke(call, wrong)) is None, str(wrong)


@pytest.mark.parametrize("wrong", [*FORWARD, *WIDTH], ids=str)
def test_explain_reports_wrong_arguments(wrong: Wrong) -> None:
    keywords = arguments() | (wrong.also or {})
    keywords[wrong.argument] = wrong.change(keywords.get(wrong.argument))
    answer = cute_sparse_mla.explain(**keywords)
    assert not answer.ok and answer.reason == str(answer.error)
    assert mismatch(wrong, answer.error) is None


def test_the_correct_calls_of_the_table_pass() -> None:
    for function, correct in CALLS.values():
        function(**correct())


def test_whole_table_under_optimised_python() -> None:
    """`python -O` drops asserts; no check may be one."""
    run = subprocess.run(
        [sys.executable, "-O", "-m", "tests.test_validation"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(TABLE)} wrong calls, 0 mismatches" in run.stdout


# -- the errors themselves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [
    ArgumentTypeError("q", "dtype must be bfloat16", torch.float32), ArgumentValueError("kv", "shape", [1, 2]),
    cute_sparse_mla.UnsupportedError("use the reference"), cute_sparse_mla.MissingDependencyError("pip install x"),
])  # fmt: skip
def test_errors_survive_pickling(error: SparseMLAError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error)
        assert vars(again) == vars(error)


def test_error_classes() -> None:
    """What callers catch: the builtin kinds, and one base for all."""
    assert issubclass(ArgumentTypeError, TypeError) and issubclass(ArgumentValueError, ValueError)
    assert issubclass(cute_sparse_mla.UnsupportedError, RuntimeError)
    assert issubclass(cute_sparse_mla.MissingDependencyError, ImportError)
    assert all(
        issubclass(error, SparseMLAError)
        for error in (ArgumentError, cute_sparse_mla.UnsupportedError, cute_sparse_mla.MissingDependencyError)
    )


@pytest.mark.parametrize(("fields", "error", "argument"), [
    (dict(fwd_threads="128"), ArgumentTypeError, "config.fwd_threads"),
    (dict(fwd_threads=True), ArgumentTypeError, "config.fwd_threads"),
    (dict(fwd_threads=100), ArgumentValueError, "config.fwd_threads"),
    (dict(bwd_threads=1024), ArgumentValueError, "config.bwd_threads"),
    (dict(fwd_stages=0), ArgumentValueError, "config.fwd_stages"),
    (dict(bwd_stages=-1), ArgumentValueError, "config.bwd_stages"),
    (dict(fwd_block_k=64.0), ArgumentTypeError, "config.fwd_block_k"),
    (dict(bwd_block_k=0), ArgumentValueError, "config.bwd_block_k"),
    (dict(bwd_split_store=0), ArgumentValueError, "config.bwd_split_store"),
    (dict(bwd_cluster=3), ArgumentValueError, "config.bwd_cluster"),
    (dict(tokens_per_tile=0), ArgumentValueError, "config.tokens_per_tile"),
    (dict(fwd_backend=""), ArgumentValueError, "config.fwd_backend"),
    (dict(fwd_backend='sm90"'), ArgumentValueError, "config.fwd_backend"),
    (dict(tokens_per_tile=None, fwd_backend=90), ArgumentTypeError, "config.fwd_backend"),
])  # fmt: skip
def test_config_fields(fields: dict[str, Any], error: type[ArgumentError], argument: str) -> None:
    with pytest.raises(error) as raised:
        SparseAttentionConfig(**fields)
    assert raised.value.argument == argument and raised.value.rule and raised.value.got


@pytest.mark.parametrize(("changes", "error", "argument"), [
    (dict(heads_per_group="8"), ArgumentTypeError, "heads_per_group"),
    (dict(heads_per_group=8.0), ArgumentTypeError, "heads_per_group"),
    (dict(heads_per_group=True), ArgumentTypeError, "heads_per_group"),
    (dict(heads_per_group=0), ArgumentValueError, "heads_per_group"),
    (dict(heads_per_group=129), ArgumentValueError, "heads_per_group"),
    (dict(D="576"), ArgumentTypeError, "D"),
    (dict(D=576.0), ArgumentTypeError, "D"),
    (dict(D=0), ArgumentValueError, "D"),
    (dict(D=100), ArgumentValueError, "d_v"),
    (dict(d_v=577), ArgumentValueError, "d_v"),
    (dict(d_v="512"), ArgumentTypeError, "d_v"),
    (dict(dtype=torch.float32), ArgumentTypeError, "dtype"),
    (dict(index_dtype=torch.int16), ArgumentTypeError, "index_dtype"),
    (dict(causal=1), ArgumentTypeError, "causal"),
    (dict(causal=(True, "no")), ArgumentTypeError, "causal"),
    (dict(backward=1), ArgumentTypeError, "backward"),
    (dict(config={}), ArgumentTypeError, "config"),
    (dict(backend=3), ArgumentTypeError, "backend"),
    (dict(backend="cuda"), ArgumentValueError, "backend"),
    (dict(device="nowhere"), ArgumentValueError, "device"),
])  # fmt: skip
def test_warmup_arguments(changes: dict[str, Any], error: type[ArgumentError], argument: str) -> None:
    with pytest.raises(error) as raised:
        cute_sparse_mla.warmup(**(dict(heads_per_group=8, D=576, device="cpu") | changes))
    assert raised.value.argument == argument


@pytest.mark.parametrize("capability", [9, "9.0", (9,), (9, 0, 0), ("9", "0"), 9.0])
def test_explain_reports_a_wrong_capability(capability: Any) -> None:
    answer = cute_sparse_mla.explain(**arguments(), capability=capability)
    assert not answer.ok and answer.error.argument == "capability"


def test_return_lse_is_a_flag() -> None:
    with pytest.raises(ArgumentTypeError, match="return_lse: must be True or False; got int"):
        cute_sparse_mla.sparse_mla(**arguments(), return_lse=1)


# -- what must be accepted, with the same bits ---------------------------------------------------------------------


def run(i: dict[str, Any], **options: Any) -> list[Tensor]:
    """out, lse, dq, dkv of a call; `i` has q, kv, indices, dout, dlse."""
    out, lse = cute_sparse_mla.fwd(i["q"], i["kv"], i["indices"], d_v=d_v, **options)
    gradients = cute_sparse_mla.bwd(
        i["q"], i["kv"], i.get("out", out), i["dout"], i["indices"], i.get("lse", lse), dlse=i["dlse"], **options
    )
    return [out, lse, *gradients[:2]]


def strided_like(tensor: Tensor, axis: int) -> Tensor:
    """The same values with every second place of an axis left out in memory."""
    doubled = torch.full((*tensor.shape[:axis], 2 * tensor.shape[axis], *tensor.shape[axis + 1 :]), 77).to(tensor.dtype)
    view = doubled.narrow(axis, 0, doubled.shape[axis]).unflatten(axis, (-1, 2)).select(axis + 1, 1)
    return view.copy_(tensor)


def permuted(tensor: Tensor, *order: int) -> Tensor:
    """The same tensor stored in another order of its axes."""
    inverse = [order.index(axis) for axis in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


def behind_a_row(tensor: Tensor, axis: int = 1) -> Tensor:
    """`buffer[:, 1:]` of a buffer that holds the values behind a row of inf."""
    buffer = torch.full((*tensor.shape[:axis], tensor.shape[axis] + 1, *tensor.shape[axis + 1 :]), float("inf"))
    view = buffer.to(tensor.dtype).narrow(axis, 1, tensor.shape[axis])
    return view.copy_(tensor)


STRIDES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "q from [B, H, S, D]": ("q", lambda t: permuted(t, 0, 2, 1, 3)),
    "q from [S, B, H, D]": ("q", lambda t: permuted(t, 1, 0, 2, 3)),
    "q[:, 1:]": ("q", behind_a_row),
    "q of wider rows": ("q", lambda t: behind_a_row(t.repeat(1, 1, 1, 2), 2)[..., :D]),
    "kv[:, 1:]": ("kv", behind_a_row),
    "kv from [B, G, S_kv, D]": ("kv", lambda t: permuted(t, 0, 2, 1, 3)),
    "kv from [S_kv, B, G, D]": ("kv", lambda t: permuted(t, 1, 0, 2, 3)),
    "kv[..., 1:, :] of more groups": ("kv", lambda t: behind_a_row(t, 2)),
    "kv every second row": ("kv", lambda t: strided_like(t, 1)),
    "dout from [B, H, S, d_v]": ("dout", lambda t: permuted(t, 0, 2, 1, 3)),
    "dout[:, 1:]": ("dout", behind_a_row),
    "indices from [B, G, K, S]": ("indices", lambda t: permuted(t, 0, 2, 3, 1)),
    "indices every second slot": ("indices", lambda t: strided_like(t, 3)),
    "int64 indices": ("indices", lambda t: t.long()),
    "int64 indices transposed": ("indices", lambda t: permuted(t.long(), 3, 2, 1, 0)),
    "dlse from [B, H, S]": ("dlse", lambda t: permuted(t, 0, 2, 1)),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_give_the_same_bits(name: str) -> None:
    i = CASE.but(invalid="shuffled", dlse=True).inputs(seed=3)
    tensors = {n: getattr(i, n) for n in ("q", "kv", "indices", "dout", "dlse")}
    dense = run(tensors)
    argument, change = STRIDES[name]
    changed = change(tensors[argument])
    assert not changed.is_contiguous() or changed.dtype == torch.int64 or changed.storage_offset()
    assert torch.equal(changed, tensors[argument])
    for before, after in zip(dense, run(tensors | {argument: changed}), strict=True):
        assert torch.equal(before, after)
        assert after.is_contiguous()


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)])
def test_expanded_dout_gives_the_same_bits(axes: tuple[int, ...]) -> None:
    """The backward reads dout in place whatever its leading strides, 0 included; nothing is made dense."""
    i = CASE.but(B=2).inputs(seed=5)
    tensors = {n: getattr(i, n) for n in ("q", "kv", "indices", "dout", "dlse")}
    expanded = tensors["dout"]
    for axis in axes:
        expanded = expanded.narrow(axis, 0, 1)
    expanded = expanded.expand(tensors["dout"].shape)
    dense = run(tensors | {"dout": expanded.contiguous()})
    for before, after in zip(dense, run(tensors | {"dout": expanded}), strict=True):
        assert torch.equal(before, after)


def test_strided_row_terms_give_the_same_bits() -> None:
    """out and lse as passed to the backward, lengths, positions and a sink with any strides, expanded ones included."""
    i = CASE.but(dlse=True, sink="random").inputs(seed=4)
    tensors = {n: getattr(i, n) for n in ("q", "kv", "indices", "dout", "dlse")}
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    positions = torch.arange(S)
    dense = dict(
        topk_length=lengths[:, None].repeat(1, S), q_positions=positions.repeat(B, 1), attn_sink=i.attn_sink,
        causal=True,
    )  # fmt: skip
    loose = dict(
        topk_length=lengths[:, None].expand(B, S), q_positions=positions.expand(B, S),
        attn_sink=strided_like(i.attn_sink, 0), causal=True,
    )  # fmt: skip
    before = run(tensors, **dense)
    out, lse = permuted(before[0], 0, 2, 1, 3), permuted(before[1], 2, 1, 0)
    after = run(tensors | dict(out=out, lse=lse, dlse=permuted(i.dlse, 2, 0, 1)), **loose)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_size_one_axes_may_have_any_stride() -> None:
    """torch leaves odd strides on axes of one element; nothing steps over them."""
    i = CASE.but(B=1, G=1, H=1).inputs(seed=5)
    q, kv = (t.as_strided(t.shape, (0, t.stride(1), 7, 1)) for t in (i.q, i.kv))
    out, lse = cute_sparse_mla.fwd(q, kv, i.indices, d_v=d_v)
    dense_out, dense_lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=d_v)
    assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)


def test_group_axis_may_be_left_out() -> None:
    for packed in (False, True):
        i = CASE.but(B=1, G=1, packed=packed).inputs(seed=6)
        whole = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=d_v)
        short = cute_sparse_mla.fwd(i.q, i.kv, i.indices.squeeze(-2), d_v=d_v)
        assert all(torch.equal(a, b) for a, b in zip(whole, short, strict=True))


@pytest.mark.parametrize("value", [
    0.25, np.float16(0.25), np.float32(0.25), np.float64(0.25), np.array(0.25), np.array(0.25, dtype=np.float32),
    torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64), torch.tensor(0.25, dtype=torch.bfloat16),
    Fraction(1, 4),
], ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")))  # fmt: skip
def test_scales_of_every_kind_give_the_same_bits(value: Any) -> None:
    results = [cute_sparse_mla.fwd(**arguments(), sm_scale=scale) for scale in (0.25, value)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value", [0, 1, np.int32(1), torch.tensor(1), 0.0])
def test_integer_and_zero_scales(value: Any) -> None:
    results = [cute_sparse_mla.fwd(**arguments(), sm_scale=scale) for scale in (float(value), value)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    if value == 0:
        # Every slot weighs the same: the mean of the rows, ln K.
        assert torch.allclose(results[0][1], torch.full((), float(K)).log(), atol=1e-6)


def test_missing_scale_is_the_inverse_root_of_D() -> None:
    default = cute_sparse_mla.fwd(**arguments())
    given = cute_sparse_mla.fwd(**arguments(), sm_scale=D**-0.5)
    assert all(torch.equal(a, b) for a, b in zip(default, given, strict=True))


@pytest.mark.parametrize("wide", [512, 576])
def test_default_width_of_values(wide: int) -> None:
    i = CASE.but(D=wide, d_v=512).inputs()
    assert cute_sparse_mla.fwd(i.q, i.kv, i.indices)[0].shape[-1] == 512


@pytest.mark.parametrize("width", [1, 3, 5, 23, 24])
@pytest.mark.parametrize("packed", [False, True])
def test_any_width_of_values_works_forward_and_backward(width: int, packed: bool) -> None:
    """Rows of an odd d_v cannot start on 16 bytes; the gradient takes the same columns of kv as the forward."""
    i = CASE.but(B=1, d_v=width, packed=packed).inputs(seed=7)
    q, kv = i.q.clone().requires_grad_(), i.kv.clone().requires_grad_()
    out = cute_sparse_mla.sparse_mla(q, kv, i.indices, d_v=width)
    out.backward(i.dout)
    full = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=D)[0]
    torch.testing.assert_close(out.detach(), full[..., :width], rtol=1e-2, atol=1e-5)
    padded = torch.nn.functional.pad(i.dout, (0, D - width))
    out_full, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=D)
    dq, dkv, _ = cute_sparse_mla.bwd(i.q, i.kv, out_full, padded, i.indices, lse)
    torch.testing.assert_close(q.grad, dq, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(kv.grad, dkv, rtol=2e-2, atol=1e-3)


# -- errors of the index helpers -----------------------------------------------------------------------------------

IQ, IK, W = torch.zeros(4, 2, 8), torch.zeros(6, 8), torch.zeros(4, 2)
CU, ROWS = torch.tensor([0, 2, 4]), torch.zeros(4, 3, dtype=torch.int32)
POSITIONS = torch.arange(4)


@pytest.mark.parametrize(("call", "error", "argument"), [
    (lambda: indices.select_topk(None, IK, W, 2), ArgumentTypeError, "iq"),
    (lambda: indices.select_topk(IQ[0], IK, W, 2), ArgumentValueError, "iq"),
    (lambda: indices.select_topk(IQ, IK[0], W, 2), ArgumentValueError, "ik"),
    (lambda: indices.select_topk(IQ, IK[:, :4], W, 2), ArgumentValueError, "ik"),
    (lambda: indices.select_topk(IQ, IK.to("meta"), W, 2), ArgumentValueError, "ik"),
    (lambda: indices.select_topk(IQ, IK, W[:2], 2), ArgumentValueError, "weights"),
    (lambda: indices.select_topk(IQ, IK, W[0], 2), ArgumentValueError, "weights"),
    (lambda: indices.select_topk(IQ, IK, W, -1), ArgumentValueError, "k"),
    (lambda: indices.select_topk(IQ, IK, W, 2.0), ArgumentTypeError, "k"),
    (lambda: indices.select_topk(IQ, IK, W, True), ArgumentTypeError, "k"),
    (lambda: indices.select_topk(IQ, IK, W, 2, q_positions=torch.arange(3)), ArgumentValueError, "q_positions"),
    (lambda: indices.select_topk(IQ, IK, W, 2, q_positions=POSITIONS.float()), ArgumentTypeError, "q_positions"),
    (lambda: indices.select_topk(IQ, IK, W, 2, q_positions=[0, 1, 2, 3]), ArgumentTypeError, "q_positions"),
    (lambda: indices.select_topk(IQ, IK, W, 2, [0, 4]), ArgumentTypeError, "cu_seqlens"),
    (lambda: indices.select_topk(IQ, IK, W, 2, CU.float()), ArgumentTypeError, "cu_seqlens"),
    (lambda: indices.causal_ranges(4, CU[None]), ArgumentValueError, "cu_seqlens"),
    (lambda: indices.causal_ranges(4, CU[:1]), ArgumentValueError, "cu_seqlens"),
    (lambda: indices.causal_ranges(-1), ArgumentValueError, "T"),
    (lambda: indices.causal_ranges(4.0), ArgumentTypeError, "T"),
    (lambda: indices.causal_ranges(4, q_positions=torch.arange(3)), ArgumentValueError, "q_positions"),
    (lambda: indices.document_starts(POSITIONS, None), ArgumentTypeError, "cu_seqlens"),
    (lambda: indices.document_starts(POSITIONS.float(), CU), ArgumentTypeError, "positions"),
    (lambda: indices.range_rows(POSITIONS, POSITIONS + 1, -1), ArgumentValueError, "K"),
    (lambda: indices.range_rows(0, POSITIONS, 2), ArgumentTypeError, "start"),
    (lambda: indices.range_rows(POSITIONS, 5, 2), ArgumentTypeError, "stop"),
    (lambda: indices.local_to_global(ROWS.float(), POSITIONS), ArgumentTypeError, "indices"),
    (lambda: indices.local_to_global(ROWS, POSITIONS.tolist()), ArgumentTypeError, "start"),
    (lambda: indices.local_to_global(ROWS, POSITIONS[:3]), ArgumentValueError, "start"),
    (lambda: indices.local_to_global(ROWS, POSITIONS, POSITIONS[:3]), ArgumentValueError, "length"),
    (lambda: indices.sliding_window(POSITIONS, 0), ArgumentValueError, "window"),
    (lambda: indices.sliding_window(POSITIONS.float(), 2), ArgumentTypeError, "q_positions"),
    (lambda: indices.sliding_window([1, 2], 2), ArgumentTypeError, "q_positions"),
    (lambda: indices.compressed_positions(POSITIONS, 0), ArgumentValueError, "ratio"),
    (lambda: indices.compressed_positions(POSITIONS.float(), 4), ArgumentTypeError, "q_positions"),
    (lambda: indices.window_and_selected(ROWS, ROWS, -1), ArgumentValueError, "selected_offset"),
    (lambda: indices.window_and_selected(ROWS, ROWS.float()), ArgumentTypeError, "selected"),
    (lambda: indices.window_and_selected(ROWS.float(), ROWS), ArgumentTypeError, "window_rows"),
    (lambda: indices.window_and_selected(ROWS, ROWS[:2]), ArgumentValueError, "selected"),
    (lambda: indices.pad_slots(ROWS, 0), ArgumentValueError, "multiple"),
    (lambda: indices.pad_slots(ROWS.float(), 4), ArgumentTypeError, "indices"),
    (lambda: indices.union_ratios(ROWS[None], 8), ArgumentValueError, "indices"),
    (lambda: indices.union_ratios(ROWS, 8.0), ArgumentTypeError, "S_kv"),
    (lambda: indices.union_ratios(ROWS, 8, groups=(0,)), ArgumentValueError, "groups"),
])  # fmt: skip
def test_index_helpers_name_the_wrong_argument(call: Callable, error: type[ArgumentError], argument: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert raised.value.argument == argument and raised.value.rule and raised.value.got


def main() -> int:
    """The table without pytest and without asserts: prints mismatches, returns 1 when there are any."""
    if __debug__:
        print("note: run with -O to test what this is for")
    mismatches = [(call, fault) for call, wrong in TABLE if (fault := mismatch(wrong, provoke(call, wrong)))]
    for call, fault in mismatches:
        print(f"{call}: {fault}")
    print(f"{len(TABLE)} wrong calls, {len(mismatches)} mismatches")
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
