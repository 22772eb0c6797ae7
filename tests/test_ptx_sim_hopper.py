"""The project's own Hopper kernels in the simulator, against a float64 oracle of the contract."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.cases import Case
from cute_sparse_mla import SparseAttentionConfig, bwd
from cute_sparse_mla.precision import Inputs, Judge

from .ptx_sim import coverage, project_hopper, race_commands
from .ptx_sim.races import Races
from .simulated_judge import late_weight

REASON = project_hopper.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"Hopper kernels: {REASON}")
if REASON is None:
    # The stand-in driver must be loaded before any test imports tilelang.
    project_hopper.capture_tilelang.prepare()

# Made by PTX_SIM_DUMP=DIR pytest tests/test_ptx_sim_hopper.py tests/test_hopper_groups.py
# tests/test_hopper_deterministic.py, then python -m tests.ptx_sim coverage DIR.
LIST = Path(__file__).parent / "ptx_sim" / "coverage_hopper.md"
# P, dS and the outputs are rounded to bf16 once each.
BF16_ERROR = 4e-3


def oracle(q, kv, indices, lengths, sink, dout, scale):
    """One batch entry and group: (out, lse, dq, dkv, d_sink) in float64."""
    q, kv, sink = (x.double().requires_grad_() for x in (q, kv, sink))
    slots = torch.arange(indices.shape[1])
    valid = (indices >= 0) & (indices < len(kv)) & (slots < lengths[:, None])
    rows = kv[indices.clamp(0, len(kv) - 1).long()]
    scores = torch.einsum("thd,tkd->thk", q, rows) * scale
    scores = scores.masked_fill(~valid[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse[..., None]).exp() * torch.sigmoid(lse - sink)[..., None]
    out = torch.einsum("thk,tkd->thd", weights, rows[..., :512])
    out.backward(dout.double())
    return out.detach(), lse.detach(), q.grad, kv.grad, sink.grad


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize(("D", "H", "K"), [(576, 64, 192), (512, 24, 128)])
def test_forward_and_backward(D: int, H: int, K: int) -> None:
    example = project_hopper.example(D, H, K)
    q, kv, indices, lengths, sink, dout = example.inputs.values()
    out, lse, dq, dkv, d_sink = example.outputs.values()
    truth = oracle(q[0], kv[0, :, 0], indices[0, :, 0], lengths[0], sink, dout[0], D**-0.5)
    torch.testing.assert_close(lse[0].double(), truth[1], atol=1e-5, rtol=2e-6)
    found = (out[0], dq[0], dkv[0, :, 0], d_sink)
    for name, value, want in zip(("out", "dq", "dkv", "d_sink"), found, (truth[0], *truth[2:]), strict=True):
        assert error(value, want) < BF16_ERROR, name
    assert not [f for r in example.recorder.reports for f in r.findings]
    # Every form is witnessed by a foreign kernel or by an H200, and stands in the generated list.
    used = {form for r in example.recorder.reports for form in coverage.executed_forms(r)}
    assert not used - set(coverage.witnesses())
    listed = LIST.read_text(encoding="utf-8")
    assert not [form for form in used if f"| `{form}` |" not in listed]


@pytest.mark.parametrize(("tokens", "deterministic"), ((1, False), (2, True)))
def test_positions_at_the_ends_of_int64(tokens: int, deterministic: bool) -> None:
    from cute_sparse_mla import fwd

    inputs = Case(S=3, S_kv=50, H=5, K=40, D=512, causal=True, positions="random").inputs(seed=1)
    assert inputs.q_positions is not None
    inputs.q_positions[0] = torch.tensor((2**63 - 1, 2**62, -(2**63)))
    judge, config = Judge(inputs), SparseAttentionConfig(tokens_per_tile=tokens)
    with project_hopper.simulated():
        out, lse = fwd(inputs.q, inputs.kv, inputs.indices, backend="sm90", config=config, **inputs.options)
        gradients = bwd(
            inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, backend="sm90", config=config,
            deterministic=deterministic, **inputs.options,
        )  # fmt: skip
    checks = judge.forward_checks(out, lse) + judge.gradient_checks(out, lse, *gradients)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


def judge_a_forward(inputs: Inputs) -> None:
    from cute_sparse_mla import fwd

    with project_hopper.simulated() as recorder:
        out, lse = fwd(inputs.q, inputs.kv, inputs.indices, sm_scale=inputs.sm_scale, backend="sm90")
    checks = Judge(inputs).forward_checks(out, lse)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    [launch] = recorder.launches
    assert not race_commands.check(launch)[0]
    assert not [f for r in recorder.reports for f in r.findings]


def test_a_slot_that_comes_late_with_all_the_weight() -> None:
    judge_a_forward(late_weight(64, 512))


@pytest.mark.parametrize("late", (130, 270, 400))
def test_a_slot_about_as_far_above_the_maximum_as_that_may_lag(late: int) -> None:
    """The maximum lags by what leaves a slot a quarter of its warpgroup's sum, 4 powers after two blocks, or by 8."""
    H, D, K = 64, 512, late + 10
    blocks = torch.tensor((0.0, 0, 3, 3, 6, 6))[: late // 64]
    sums = 64 * blocks[late // 64 % 2 :: 2].exp2().sum()
    most = min((sums / 4).log2().item(), 8)
    # The first number of a row of kv is its score in powers of 2, the second that of the late one in each head.
    kv, q = torch.zeros(1, K, 1, D), torch.zeros(1, 1, H, D)
    kv[0, :, 0, 0] = torch.cat((blocks.repeat_interleave(64), torch.full((K - 64 * len(blocks),), -20.0)))
    kv[0, :, 0, 2:] = torch.randn((K, D - 2), generator=torch.Generator().manual_seed(late))
    kv[0, late, 0, 0], kv[0, late, 0, 1] = 0, 1
    q[..., 0], q[..., 1] = 1, torch.linspace(most - 1, most + 1, H)
    indices = torch.arange(K, dtype=torch.int32).view(1, 1, 1, K)
    dout = torch.ones(1, 1, H, 512).bfloat16()
    judge_a_forward(Inputs(q.bfloat16(), kv.bfloat16(), indices, dout, 512, sm_scale=math.log(2)))


def test_a_cta_goes_over_tiles() -> None:
    """A forward on a GPU of two multiprocessors: one CTA has two tiles, of lists of one pair of blocks and a bit."""
    S, H, D, K = 3, 24, 512, 130
    example = project_hopper.forward_over_tiles(D, H, K, S, multiprocessors=2)
    recorder, (q, kv, indices), (out, lse) = example.recorder, example.inputs.values(), example.outputs.values()
    lengths, no_sink = torch.full((S,), K), torch.full((H,), -math.inf)
    truth = oracle(q[0], kv[0, :, 0], indices[0, :, 0], lengths, no_sink, torch.zeros(S, H, 512), D**-0.5)
    torch.testing.assert_close(lse[0].double(), truth[1], atol=1e-5, rtol=2e-6)
    assert error(out[0], truth[0]) < BF16_ERROR
    [launch] = recorder.launches
    races, _, _ = race_commands.check(launch)
    assert launch.grid[0] == 2 and not races
    assert not [f for r in recorder.reports for f in r.findings]
    listed = LIST.read_text(encoding="utf-8")
    forms = {form for r in recorder.reports for form in coverage.executed_forms(r)}
    assert "prefetch.global.L2" in forms and not [form for form in forms if f"| `{form}` |" not in listed]


@pytest.mark.parametrize(("D", "H", "deterministic"), [(576, 24, False), (512, 72, False), (576, 5, True)])
def test_a_backward_cta_goes_over_tiles(D: int, H: int, deterministic: bool) -> None:
    """Lists of several blocks, of one, and of none: on two multiprocessors as where each tile has its CTA."""
    S, K = 5, 150
    inputs = Case(
        S=S, S_kv=160, H=H, D=D, K=K, invalid="shuffled", length="random", sink="random", dlse=True, duplicates=True
    ).inputs(seed=7)  # fmt: skip
    assert inputs.topk_length is not None
    inputs.topk_length.view(-1)[:] = torch.tensor((K, 0, 60, 64, K))
    judge, found, observer = Judge(inputs), [], Races()
    out, lse = judge.budget_forward()
    for multiprocessors in (132, 2):
        over = project_hopper.going_over_tiles(multiprocessors)
        with project_hopper.simulated(observer=observer) as recorder, over, pytest.MonkeyPatch.context() as patch:
            from cute_sparse_mla.hopper import launch

            patch.setattr(launch, "SORT_UNITS", 0)
            patch.setattr(launch, "PRODUCTS_PAY", (0, 0))
            found.append(
                bwd(
                    inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, backend="sm90",
                    deterministic=deterministic, config=SparseAttentionConfig(tokens_per_tile=1), **inputs.options,
                )
            )  # fmt: skip
        [main] = [entry for entry in recorder.launches if entry.kernel == "sparse_mla_bwd_kernel"]
        tiles = S * -(-H // 64)
        assert main.grid[0] == (tiles if tiles < multiprocessors else multiprocessors + tiles % multiprocessors)
        assert not [f for r in recorder.reports for f in r.findings]
    assert not observer.races, observer.races[0].text
    (dq, dkv, d_sink), again = found
    assert torch.equal(dq, again[0]) and torch.equal(d_sink, again[2])
    assert torch.equal(dkv, again[1]) if deterministic else error(again[1], dkv.double()) < BF16_ERROR
    checks = judge.gradient_checks(out, lse, *again)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))


def test_no_kernel_is_left_behind_without_its_cubin() -> None:
    """The simulator's kernels end at PTX; what a process builds besides them has its cubin still."""
    from cute_sparse_mla.hopper import build

    asked = build.kernel.cache_info()
    project_hopper.forward_over_tiles(576, 64, 64, 1, multiprocessors=1)
    assert build.kernel.cache_info() == asked


def test_nothing_is_compiled_without_its_cubin_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilelang import env
    from tilelang.contrib import nvcc

    compile_cuda = nvcc.compile_cuda
    for kept in (True, False):
        monkeypatch.setattr(env, "is_cache_enabled", lambda kept=kept: kept)
        with project_hopper.capture_tilelang.without_cubin():
            assert (nvcc.compile_cuda is compile_cuda) == kept


def test_a_torch_with_cuda_does_not_get_ahead_of_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime whose symbols are already in the process, as those of a torch with CUDA, stays unused."""
    runtime = tmp_path / "libcudart.so.13"
    source = tmp_path / "runtime.c"
    source.write_text("int cudaSetDevice(int device) { return 100; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(runtime), str(source)], check=True)
    script = f"""
import ctypes, os
ctypes.CDLL("{runtime}", mode=ctypes.RTLD_GLOBAL)
import torch
torch.version.cuda = "13.0"
from tests.ptx_sim import capture_tilelang
assert capture_tilelang.available() is None and os.environ["CUDA_VISIBLE_DEVICES"] == ""
capture_tilelang.prepare()
assert ctypes.CDLL(None).cudaSetDevice(0) == 0
hook = capture_tilelang._HOOK(lambda name, arguments: 7)
capture_tilelang._shims[0].ptx_sim_set_driver_hook(hook)
assert ctypes.CDLL(None).cuModuleLoadData(0, 0) == 7
"""
    command = [sys.executable, "-m", "tests.ptx_sim.without_gpu", sys.executable, "-c", script]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(project_hopper.capture_tilelang.LOADED, raising=False)
    assert "without_gpu" in (project_hopper.unavailable() or "")
