"""Adapters of peers against stand-ins that have the peers' signatures, conventions and refusals."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_sparse_mla
from bench import cli, peers
from bench.harness import Run, Settings, run_shape
from bench.implementations import Ours, Pair
from bench.masked_dense import MaskedDense, valid_rows
from bench.peers import CuDNN, FlashMLA, Miles, TileLangExample, TileLangExample128, own_barriers
from bench.shapes import BenchShape, draw
from cute_sparse_mla.precision import Inputs

from .stand_ins import CUDNN, FLASH_MLA

CPU = torch.device("cpu")
D576 = BenchShape("shape", 24, 24, 8, 576, 512, 40, 256**-0.5)

# Stand-ins as in `stand_ins`.
TILELANG_FWD = """
import math
import torch
import utils
import cute_sparse_mla
def _check(q, kv, indices):
    assert q.dim() == kv.dim() == indices.dim() == 4 and q.shape[-1] == 576 and indices.is_contiguous()
    assert indices.dtype == torch.int32 and indices.shape[-1] % 128 == 0
    assert (indices >= 0).all(), "index -1 would pass the causal test and count"
def positions(q, start=0):
    return torch.arange(start, start + q.shape[1])[None]
def sparse_mla_fwd_interface(q, kv, indices, START sm_scale=None, d_v=512):
    _check(q, kv, indices)
    out, lse = cute_sparse_mla.fwd(q, kv, indices, sm_scale=sm_scale, causal=True, q_positions=positions(q, OFFSET),
                                   backend="reference")
    return out, lse * math.log2(math.e)
"""
PLAIN = TILELANG_FWD.replace("START ", "").replace("OFFSET", "0")
PIPELINED = TILELANG_FWD.replace("START", "q_start_index_s, kv_stride,").replace("OFFSET", "q_start_index_s")

TILELANG_BWD = """
import math
import torch
import utils
import cute_sparse_mla
def sparse_mla_bwd(q, kv, o, do, indices, lse, sm_scale=None, is_casual=True, return_kernel=False, delta=None):
    assert q.dim() == kv.dim() == o.dim() == do.dim() == indices.dim() == 4 and lse.is_contiguous()
    assert (indices >= 0).all() and indices.shape[-1] % 32 == 0
    dq, dkv, _ = cute_sparse_mla.bwd(q, kv, o, do, indices, lse * math.log(2), sm_scale=sm_scale, causal=True,
                                     q_positions=torch.arange(q.shape[1])[None], backend="reference")
    return dq, dkv
"""

PARTS = """
import torch
import sparse_mla_bwd as whole
seen = []
def preprocess(o, do):
    return (o, do)
def bwd(q, kv, do, indices, lse, delta, dkv, H, D, D_tail, topk, kv_group, sm_scale, is_causal, threads=None):
    assert delta[1] is do and H == q.shape[2] and (D, D_tail, kv_group) == (512, 64, 1) and topk == indices.shape[-1]
    seen.append(threads)
    dq, total = whole.sparse_mla_bwd(q, kv, delta[0], do, indices, lse, sm_scale=sm_scale)
    dkv += total
    return dq
def postprocess(dkv, D, D_tail, kv_group):
    return dkv.bfloat16()
def sparse_mla_bwd():
    raise AssertionError("its parts are called")
"""

MILES_FWD = """
import math
import torch
import cute_sparse_mla
def sparse_mqa_fwd_interface(q, kv, attn_sink, topk_idxs, sm_scale=None, block_I=64, num_stages=2, threads=256):
    assert kv.dim() == 3 and topk_idxs.dim() == 3 and attn_sink.dtype == torch.float32
    out, lse = cute_sparse_mla.fwd(q, kv[:, :, None], topk_idxs[:, :, None], sm_scale=sm_scale, attn_sink=attn_sink,
                                   backend="reference")
    return out, torch.logaddexp(lse, attn_sink) * math.log2(math.e)
"""

MILES_BWD = """
import math
import torch
import cute_sparse_mla
def sparse_mqa_bwd_interface(q, kv, attn_sink, o, do, topk_idxs, lse, sm_scale=None):
    natural = lse * math.log(2)
    dq, dkv, d_sink = cute_sparse_mla.bwd(
        q, kv[:, :, None], o, do, topk_idxs[:, :, None], natural + torch.log1p(-torch.exp(attn_sink - natural)),
        sm_scale=sm_scale, attn_sink=attn_sink, backend="reference")
    return dq, dkv[:, :, 0], d_sink
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with all stand-ins; modules loaded from it are forgotten afterwards."""
    files = {
        "utils": "", "fake_flash": FLASH_MLA, "fake_cudnn": CUDNN, "sparse_mla_fwd": PLAIN,
        "sparse_mla_fwd_pipelined": PIPELINED, "sparse_mla_bwd": TILELANG_BWD,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in files:
        sys.modules.pop(name, None)


def flash_mla(folder: Path) -> FlashMLA:
    return FlashMLA(str(folder / "fake_flash.py"))


def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, **inputs.options)


def backward(inputs: Inputs) -> tuple:
    out, lse = forward(inputs)
    return cute_sparse_mla.bwd(inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, **inputs.options)


def inputs_of(**changes: object) -> tuple[BenchShape, Inputs]:
    shape = replace(D576, **changes)  # type: ignore[arg-type]
    return shape, draw(shape, CPU)


# -- FlashMLA ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (64, 64), (72, 128)])
@pytest.mark.parametrize("sink", [False, True])
def test_flash_mla(folder: Path, heads: int, padded: int, sink: bool) -> None:
    shape, inputs = inputs_of(T=6, H=heads, has_sink=sink)
    rows = inputs.indices.clone()
    rows[2] = -1
    inputs = replace(inputs, indices=rows, topk_length=torch.tensor([40, 40, 40, 3, 40, 40], dtype=torch.int32))
    peer = flash_mla(folder)
    call = peer.prepare(inputs, shape.problem())
    out, lse = call.out_lse(call.fwd())
    wanted_out, wanted_lse = forward(inputs)
    assert out.shape == wanted_out.shape and torch.equal(out, wanted_out)
    assert torch.equal(lse, wanted_lse) and (lse[2] == -math.inf).all()
    assert sys.modules["fake_flash"].seen[-1] == (padded, 128)
    text = call.conversions()
    assert ("padded to" in text) == (heads != padded) and "88 slots" in text


def test_flash_mla_limits(folder: Path) -> None:
    peer = flash_mla(folder)
    problem = D576.problem()
    assert peer.unsupported(problem, "fwd", CPU) == ""
    assert "no sparse backward" in peer.unsupported(problem, "bwd", CPU)
    assert "no sparse backward" in peer.unsupported_pass(problem, "fwd+bwd", CPU)
    assert "128 heads" in peer.unsupported(replace(problem, H=130), "fwd", CPU)
    assert "D in" in peer.unsupported(replace(problem, D=192), "fwd", CPU)
    assert "bfloat16" in peer.unsupported(replace(problem, dtype=torch.float16), "fwd", CPU)
    assert "one kv group" in peer.unsupported(replace(problem, G=2), "fwd", CPU)
    _, inputs = inputs_of()
    assert peer.differs(replace(inputs, causal=True), "fwd") == ""
    late = torch.full_like(inputs.indices, 23)
    assert "no causal mask" in peer.differs(replace(inputs, causal=True, indices=late), "fwd")


# -- TileLang example ----------------------------------------------------------------------------------------------


def test_tilelang_example(folder: Path) -> None:
    shape, inputs = inputs_of()
    assert (inputs.indices < 0).any()
    peer = TileLangExample(str(folder))
    assert peer.differs(inputs, "fwd") == peer.differs(inputs, "bwd") == ""
    call = peer.prepare(inputs, shape.problem())
    state = call.fwd()
    out, lse = call.out_lse(state)
    wanted_out, wanted_lse = forward(inputs)
    assert torch.equal(out, wanted_out) and torch.allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    for native in (state, call.adopt(wanted_out, wanted_lse)):
        dq, dkv, d_sink = call.gradients(call.bwd(native))
        wanted = backward(inputs)
        assert d_sink is None and dkv.shape == inputs.kv.shape
        for mine, theirs in zip((dq, dkv), wanted, strict=False):
            assert (mine.float() - theirs.float()).norm() < 2e-3 * theirs.float().norm()
    assert "88 slots" in call.conversions() and "log2" in call.conversions()


def test_tilelang_example_bounds_rows_by_token_number(folder: Path) -> None:
    shape, inputs = inputs_of(context=40)
    both, plain = TileLangExample(str(folder)), TileLangExample(str(folder / "sparse_mla_fwd.py"))
    assert both.differs(inputs, "fwd") == "" and "16 below" in both.differs(inputs, "bwd")
    assert "16 below" in plain.differs(inputs, "fwd")
    call = both.prepare(inputs, shape.problem())
    assert torch.equal(call.out_lse(call.fwd())[0], forward(inputs)[0])
    rows = run_shape(shape, [Ours(), both], Settings(CPU, reps=1), Run(CPU))
    peer = {row["pass"]: row for row in rows if row["impl"] == "tilelang_example"}
    assert peer["fwd"]["ok"] is True and peer["fwd"]["agree"]["ours"]["out"] == 0
    assert peer["bwd"]["ok"] is None and peer["bwd"]["ms"] > 0 and "not compared" in peer["bwd"]["note"]


def test_tilelang_example_with_128_threads(folder: Path) -> None:
    shape, inputs = inputs_of()
    (folder / "parts.py").write_text(PARTS)
    peer = TileLangExample128(str(folder / "parts.py"))
    assert "no forward" in peer.unsupported(shape.problem(), "fwd", CPU)
    call = peer.prepare(inputs, shape.problem())
    dq, dkv, _ = call.gradients(call.bwd(call.adopt(*forward(inputs))))
    for mine, theirs in zip((dq, dkv), backward(inputs), strict=False):
        assert (mine.float() - theirs.float()).norm() < 4e-3 * theirs.float().norm()
    assert sys.modules["parts"].seen == [128]


@pytest.mark.parametrize("sink", (False, True))
def test_miles(folder: Path, sink: bool) -> None:
    (folder / "tilelang_sparse_mla_fwd.py").write_text(MILES_FWD)
    (folder / "tilelang_sparse_mla_bwd.py").write_text(MILES_BWD)
    shape = replace(D576, D=512, has_sink=sink)
    inputs, peer = draw(shape, CPU), Miles(str(folder))
    assert peer.unsupported(shape.problem(), "fwd", CPU) == peer.unsupported(shape.problem(), "bwd", CPU) == ""
    assert "D in (512,)" in peer.unsupported(D576.problem(), "fwd", CPU)
    assert "multiples of 64" in peer.unsupported(replace(shape.problem(), H=96), "bwd", CPU)
    call = peer.prepare(inputs, shape.problem())
    state = call.fwd()
    wanted_out, wanted_lse = forward(inputs)
    out, lse = call.out_lse(state)
    assert torch.equal(out, wanted_out) and torch.allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    for native in (state, call.adopt(wanted_out, wanted_lse)):
        for mine, theirs in zip(call.gradients(call.bwd(native)), backward(inputs), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or (mine.float() - theirs.float()).norm() < 2e-3 * theirs.float().norm()


def test_tilelang_example_limits(folder: Path) -> None:
    peer, problem = TileLangExample(str(folder)), D576.problem()
    assert peer.unsupported(problem, "fwd", CPU) == peer.unsupported(problem, "bwd", CPU) == ""
    assert "sink" in peer.unsupported(replace(problem, has_sink=True), "fwd", CPU)
    assert "D in (576,)" in peer.unsupported(replace(problem, D=512), "bwd", CPU)
    assert "multiples of 64" in peer.unsupported(replace(problem, H=96), "fwd", CPU)
    only_forward = TileLangExample(str(folder / "sparse_mla_fwd.py"))
    assert "no backward" in only_forward.unsupported(problem, "bwd", CPU)
    _, inputs = inputs_of()
    late = torch.full_like(inputs.indices, 23)
    assert "always causal" in peer.differs(replace(inputs, indices=late), "fwd")


# -- cuDNN ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [False, True])
def test_cudnn(folder: Path, sink: bool) -> None:
    shape, inputs = inputs_of(has_sink=sink)
    peer = CuDNN(str(folder / "fake_cudnn.py"))
    call = peer.prepare(inputs, shape.problem())
    out, lse = forward(inputs)
    dq, dkv, d_sink = call.gradients(call.bwd(call.adopt(out.expand(out.shape), lse.t().contiguous().t())))
    wanted = backward(inputs)
    assert torch.equal(dq, wanted[0]) and torch.equal(dkv, wanted[1])
    assert (d_sink is None) == (not sink) and (not sink or torch.equal(d_sink, wanted[2]))
    assert ("-inf" in call.conversions()) == (not sink)


def test_cudnn_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, problem = CuDNN(str(folder / "fake_cudnn.py")), D576.problem()
    assert peer.unsupported(problem, "bwd", CPU) == ""
    assert "10.x" in peer.unsupported(problem, "fwd", CPU)
    assert "2 heads" in peer.unsupported(replace(problem, H=1), "bwd", CPU)
    monkeypatch.setattr(peers, "_capability_major", lambda device: 10)
    assert "(heads, D)" in peer.unsupported(problem, "fwd", CPU)
    assert peer.unsupported(replace(problem, H=64), "fwd", CPU) == ""


# -- together ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify_tokens", [8, 64])
def test_all_peers_in_one_run(folder: Path, verify_tokens: int) -> None:
    cudnn, flash = CuDNN(str(folder / "fake_cudnn.py")), flash_mla(folder)
    everyone = [Ours(), flash, cudnn, Pair(flash, cudnn), TileLangExample(str(folder))]
    settings = Settings(CPU, ("fwd", "bwd", "fwd+bwd"), reps=1, verify_tokens=verify_tokens)
    rows = run_shape(D576, everyone, settings, Run(CPU))
    json.dumps(rows, allow_nan=False)
    by = {(row["impl"], row["pass"]): row for row in rows}
    ran = {key for key, row in by.items() if row["ms"]}
    assert ran == {
        ("ours", "fwd"), ("ours", "bwd"), ("ours", "fwd+bwd"), ("flash_mla", "fwd"), ("cudnn", "bwd"),
        ("flash_mla+cudnn", "fwd"), ("flash_mla+cudnn", "bwd"), ("flash_mla+cudnn", "fwd+bwd"),
        ("tilelang_example", "fwd"), ("tilelang_example", "bwd"), ("tilelang_example", "fwd+bwd"),
    }  # fmt: skip
    assert {key: by[key]["note"] for key in ran if by[key]["ok"] is not True} == {}
    assert by["cudnn", "bwd"]["agree"]["ours"]["dkv"] < 1e-6
    assert by["cudnn", "bwd"]["err_vs_fp64"].keys() >= {"dq", "dkv"}


def test_command_line_with_peers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "8,8,8,576,8", "--reps", "1", "--device", "cpu", "--pass", "fwd,bwd,fwd+bwd"]
    words += ["--peer", f"flash_mla={folder / 'fake_flash.py'}", "--peer", "cudnn=fake_cudnn"]
    words += ["--peer-path", str(folder), "--peer", f"tilelang_example={folder}"]
    words += ["--impl", "ours,flash_mla+cudnn,cudnn"]
    assert cli.console(words) == 0
    text = capsys.readouterr().out
    assert "ours, flash_mla+cudnn, cudnn, tilelang_example" in text.splitlines()[0]
    assert "q padded to 64 heads" in text and "10.x only" in text


def test_module_in_a_folder(tmp_path: Path) -> None:
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text(FLASH_MLA + "\n__version__ = '9.9'\n")
    path = list(sys.path)
    try:
        assert FlashMLA(str(tmp_path)).version == "9.9"
    finally:
        sys.path[:] = path
        sys.modules.pop("flash_mla", None)


@pytest.mark.parametrize(
    ("name", "changes"), [("plain", {}), ("sink", {"has_sink": True}), ("text_bounds", {"T": 16, "context": 64})]
)
def test_masked_dense(name: str, changes: dict) -> None:
    shape = replace(D576, **{"T": 24, "context": 48, "K": 16, **changes})
    rows = run_shape(shape, [Ours(), MaskedDense()], Settings(CPU, ("fwd", "bwd", "fwd+bwd"), reps=1), Run(CPU))
    assert all(row["ok"] for row in rows), [row["note"] for row in rows]


def test_masked_dense_bounds_and_repeats() -> None:
    shape = replace(D576, T=8, context=8, H=2, K=5)
    inputs = draw(shape, CPU)
    inputs.indices[:] = torch.tensor([0, 3, 7, -1, 8])
    bounded = replace(inputs, causal=True, topk_length=torch.full((8,), 2, dtype=torch.int32))
    assert valid_rows(bounded)[2].tolist() == [0, 8, 8, 8, 8] and valid_rows(bounded)[3].tolist() == [0, 3, 8, 8, 8]
    assert valid_rows(inputs)[0].tolist() == [0, 3, 7, 8, 8]
    out, lse = MaskedDense().prepare(bounded, shape.problem()).fwd()
    ours, ours_lse = cute_sparse_mla.fwd(
        bounded.q, bounded.kv, bounded.indices, d_v=512, backend="reference", **bounded.options
    )
    torch.testing.assert_close(lse, ours_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, ours, rtol=2e-2, atol=2e-2)
    assert MaskedDense().differs(inputs, "fwd") == ""
    inputs.indices[:, 1] = 0
    assert "twice" in MaskedDense().differs(inputs, "fwd")
    assert "GB" in MaskedDense().unsupported(replace(shape, T=4096, context=65536, H=64).problem(), "fwd", CPU)


def test_roles_that_share_a_barrier_get_their_own() -> None:
    """The last role's numbers change where another role has them too, and nowhere else."""
    sync = "tl::__sync_thread_partial({}, 128); "
    first, second = sync.format(3) + sync.format(3), sync.format(4)
    copies = "tl::warpgroup_reg_dealloc<80>(); " + sync.format(3) + sync.format(6)
    code = first + second + copies
    assert own_barriers(code) == first + second + copies.replace("(3, ", "(7, ")
    apart = first + second + "tl::warpgroup_reg_dealloc<80>(); " + sync.format(5)
    assert own_barriers(apart) == apart and own_barriers(first) == first
