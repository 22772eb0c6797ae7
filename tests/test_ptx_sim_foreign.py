"""Whole kernels of the `nvidia-cudnn-frontend` wheel, known to work on Blackwell, against a float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

from .ptx_sim import foreign_dsa as dsa
from .ptx_sim import foreign_gemm as gemm
from .ptx_sim.observer import Observer
from .ptx_sim.policies import Delay

REASON = dsa.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"foreign kernels: {REASON}")
if REASON is None:
    # Chooses the runtime library, so it must happen before any test imports cutlass.
    dsa.capture_cute.prepare()

# bf16 keeps 8 bits: P, dS and the outputs are each rounded once, which gives 2e-3 in norm on such inputs.
BF16_ERROR = 4e-3


# What is known of these kernels and harmless: the SM100 backward's sum of products shuffles under a mask that names
# lanes which branched around it, and the SM90 main kernel arrives on two barriers once more than it waits.
KNOWN = ("a .sync member mask names lanes that branched around the instruction", "incomplete at the exit of CTA")


def check_findings(result: dsa.Result) -> None:
    """No report about a kernel that is known to work, but for what is true of it."""
    findings = [f for report in result.reports for f in report.findings]
    assert not [f for f in findings if not f.startswith(KNOWN)]


@pytest.mark.parametrize(("heads", "dim"), dsa.FORWARD)
@pytest.mark.parametrize(("slots", "ragged"), [(128, False), (256, True)])
def test_forward(heads: int, dim: int, slots: int, ragged: bool) -> None:
    p = dsa.problem(heads, dim, slots, tokens=2 + ragged, ragged=ragged, seed=slots)
    result, truth = dsa.forward(p), dsa.oracle(p)
    assert dsa.relative_error(result.tensors["out"], truth["out"]) < BF16_ERROR
    torch.testing.assert_close(result.tensors["lse"].double(), truth["lse"], atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(result.tensors["max"].double(), truth["max"], atol=3e-6, rtol=1e-6)
    assert not result.reports[0].findings


def test_float16() -> None:
    """fp16 keeps 11 bits, so the bound is eight times tighter."""
    for run, heads, dim in (
        (dsa.forward, 64, 576),
        (dsa.forward, 128, 512),
        (dsa.backward, 64, 576),
        (dsa.backward_sm90, 64, 512),
    ):
        p = dsa.problem(heads, dim, 128, seed=7, dtype=torch.float16)
        found, truth = run(p).tensors, dsa.oracle(p)
        for name in ("out",) if run is dsa.forward else ("dq", "dkv", "d_sink"):
            assert dsa.relative_error(found[name], truth[name]) < BF16_ERROR / 8, (run.__name__, name)


def test_growing_scores() -> None:
    """Running maxima move, so the forward rescales its accumulator in tensor memory."""
    p = dsa.growing(dsa.problem(64, 512, 384))
    result = dsa.forward(p)
    assert dsa.relative_error(result.tensors["out"], dsa.oracle(p)["out"]) < BF16_ERROR
    assert "tcgen05.st.sync.aligned.32x32b.x32.b32" in result.reports[0].opcodes


@pytest.mark.parametrize(("dtype", "a_major", "b_major"), gemm.CASES)
def test_gemm(dtype: str, a_major: str, b_major: str) -> None:
    """The wheel's dense GEMM: every combination of contiguous axes, in both types."""
    result = gemm.product(dtype, a_major, b_major)
    a, b, ab = (result.tensors[name][..., 0].double() for name in ("a", "b", "ab"))
    assert dsa.relative_error(ab, a @ b.t()) < (BF16_ERROR if dtype == "bf16" else BF16_ERROR / 8)
    assert not result.reports[0].findings


def test_forward_of_an_empty_row() -> None:
    p = dsa.problem(64, 512, 128)
    p.lengths[1] = 0
    result = dsa.forward(p)
    assert (result.tensors["out"][1] == 0).all()
    assert (result.tensors["lse"][1] == math.inf).all()
    assert dsa.relative_error(result.tensors["out"][0], dsa.oracle(p)["out"][0]) < BF16_ERROR


@pytest.mark.parametrize(("heads", "dim", "deterministic"), dsa.BACKWARD)
def test_backward(heads: int, dim: int, deterministic: bool) -> None:
    p = dsa.problem(heads, dim, 128, seed=1)
    result, truth = dsa.backward(p, deterministic), dsa.oracle(p)
    check_findings(result)
    for name in ("dq", "dkv", "d_sink"):
        assert dsa.relative_error(result.tensors[name], truth[name]) < BF16_ERROR, name


@pytest.mark.parametrize("heads", dsa.PAIR)
def test_backward_of_cta_pairs(heads: int) -> None:
    p = dsa.problem(heads, 576, 128, seed=4)
    result, truth = dsa.backward_pair(p), dsa.oracle(p)
    check_findings(result)
    for name in ("dq", "dkv", "d_sink"):
        assert dsa.relative_error(result.tensors[name], truth[name]) < BF16_ERROR, name


def test_backward_of_ragged_rows() -> None:
    p = dsa.problem(64, 576, 128, tokens=3, rows=200, seed=2, ragged=True)
    result, truth = dsa.backward(p), dsa.oracle(p)
    check_findings(result)
    for name in ("dq", "dkv", "d_sink"):
        assert dsa.relative_error(result.tensors[name], truth[name]) < BF16_ERROR, name


def test_exact_sums() -> None:
    """q = 0 and a power of two of slots on integer kv: every product and sum is exact, so out is too."""
    p = dsa.problem(64, 576, 128)
    p.q.zero_()
    p.kv.copy_(torch.randint(-8, 9, p.kv.shape).bfloat16())
    p.sink.fill_(-math.inf)
    out = dsa.forward(p).tensors["out"]
    mean = p.kv.double()[p.indices.long()][..., :512].mean(1)
    assert torch.equal(out, mean[:, None].expand(out.shape).bfloat16())


@pytest.mark.parametrize(("heads", "dim"), dsa.HOPPER)
def test_backward_for_hopper(heads: int, dim: int) -> None:
    """The wheel's SM90 backward: wgmma, TMA, named barriers, fp32 vector reductions."""
    p = dsa.problem(heads, dim, 128, seed=3, ragged=True)
    result, truth = dsa.backward_sm90(p), dsa.oracle(p)
    check_findings(result)
    for name in ("dq", "dkv", "d_sink"):
        assert dsa.relative_error(result.tensors[name], truth[name]) < BF16_ERROR, name


@pytest.mark.parametrize("seed", [0, 1])
def test_results_do_not_depend_on_when_engines_complete(seed: int) -> None:
    """Tensor cores, tensor copies, cp.async and stores held back at random: correct kernels do not notice."""
    for run, heads, dim in (
        (dsa.forward, 64, 576),
        (dsa.forward, 128, 512),
        (dsa.backward, 64, 512),
        (dsa.backward_sm90, 64, 512),
    ):
        p = dsa.problem(heads, dim, 128, seed=6)
        policy = Delay(seed)
        result, truth = run(p, policy=policy), dsa.oracle(p)
        assert policy.delayed
        for name in ("out",) if run is dsa.forward else ("dq", "dkv", "d_sink"):
            assert dsa.relative_error(result.tensors[name], truth[name]) < BF16_ERROR, (run.__name__, name)


class Counter(Observer):
    """Counts the calls of every hook."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __getattribute__(self, name: str) -> object:
        if name in ("calls", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        self.calls[name] = self.calls.get(name, 0) + 1
        return object.__getattribute__(self, name)


def test_observers_see_everything() -> None:
    """Every hook is called by some kernel, results stay the same, and operations begin and end in pairs."""
    seen: dict[str, int] = {}
    for run, heads, dim in (
        (dsa.forward, 64, 576),
        (dsa.forward, 128, 512),
        (dsa.backward, 64, 512),
        (dsa.backward_sm90, 64, 512),
    ):
        p = dsa.problem(heads, dim, 128, seed=6)
        counter = Counter()
        result, plain = run(p, observer=counter), run(p)
        name = "out" if run is dsa.forward else "dq"
        assert torch.equal(result.tensors[name], plain.tensors[name])
        assert counter.calls["begin"] == counter.calls["end"] == counter.calls["issue"]
        seen |= counter.calls
    hooks = {name for name in vars(Observer) if not name.startswith("_")}
    assert hooks - set(seen) <= {"warp_sync", "griddepcontrol"}
