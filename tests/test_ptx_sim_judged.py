"""The simulator against what an H200 computed for the micro-kernels of `judge_cases` (see `ptx_sim/judge.py`)."""

from __future__ import annotations

import math
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest

from .ptx_sim import judge, ops_float
from .ptx_sim.judge_cases import Case, cases, operand_image

CASES = {case.name: case for case in cases()}
FAMILIES = sorted({case.family for case in CASES.values()})
RESULTS = dict(np.load(judge.RESULTS)) if judge.RESULTS.exists() else {}


@pytest.mark.skipif(not RESULTS, reason="no H200 results are committed")
@pytest.mark.parametrize("family", FAMILIES)
def test_simulator_agrees_with_the_h200(family: str) -> None:
    problems = {name: judge.compare(case, RESULTS)[0] for name, case in CASES.items() if case.family == family}
    assert not {name: text for name, text in problems.items() if text}


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas")
@pytest.mark.parametrize("family", FAMILIES)
def test_micro_kernels_assemble(family: str) -> None:
    for case in CASES.values():
        if case.family == family:
            try:
                judge.image_of(judge.text_of(case))
            except subprocess.CalledProcessError:
                pytest.fail(f"ptxas refuses {case.name}")


def test_every_micro_kernel_runs() -> None:
    for case in cases():
        _, forms = judge.simulate(case)
        assert forms, case.name


def test_comparison_notices_a_wrong_bit() -> None:
    value = np.arange(8, dtype=np.uint32)
    other = value.copy()
    assert judge.differs(value, other, "bits") is None
    other[3] ^= 1
    assert "1 of 8 differ, first 3" in judge.differs(value, other, "bits")
    nan = np.array([0x7FC00000, 0x7FFF3F80], np.uint32)
    assert judge.differs(nan, np.array([0x7FFFFFFF, 0x7F813F80], np.uint32), "float") is None
    assert judge.differs(nan, np.array([0x7FFF0000, 0x7F813F80], np.uint32), "bf16") is None
    assert judge.differs(nan, np.array([0x7FFF0000, 0x7F813F81], np.uint32), "bf16")


def rounded(exact: Fraction, mode: str) -> np.float32:
    """A rational number that is not zero to fp32, by integers."""
    magnitude = abs(exact)
    exponent = -149
    while magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    integer = int(scaled)
    rest = scaled - integer
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and integer % 2 == 1),
        "rz": False,
        "rm": exact < 0 and rest > 0,
        "rp": exact > 0 and rest > 0,
    }[mode]
    return np.float32(math.copysign(math.ldexp(integer + up, exponent), exact))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("low", [-90, -75, -20])
def test_fma_rounds_the_exact_sum_once(mode: str, low: int) -> None:
    """Ties, far terms and subnormals (which the random words of the H200 cases seldom reach) against rationals."""
    gen, count = np.random.default_rng(-low), 3000

    def values(first: int, last: int) -> np.ndarray:
        few = (1 << gen.integers(0, 24, count)).astype(float)
        mantissa = gen.integers(0, 1 << 24, count) * (gen.random(count) < 0.5) + few
        return np.ldexp(mantissa * gen.choice([-1, 1], count), gen.integers(first, last, count)).astype(np.float32)

    a, b, c = values(low, low + 20), values(low, low + 20), values(max(2 * low, -149), max(2 * low, -149) + 49)
    got = ops_float.fused(a, b, c) if mode == "rn" else ops_float._fma_directed(a, b, c, mode)
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact:
            want = rounded(exact, mode)
            assert value == want, (x, y, z)


def test_fma_at_a_tie_of_subnormals() -> None:
    """2^-127 + 2^-150 (1 + 2^-30): above the tie, but its fp64 sum is the tie."""
    a, b, c = (np.array([x], np.float32) for x in (13325 * 2.0**-90, 80581 * 2.0**-90, 2.0**-127))
    assert ops_float.fused(a, b, c)[0] == np.float32(2.0**-127 + 2.0**-149)


def test_double_fma_at_the_ends_of_the_range() -> None:
    top, tiny = np.finfo(np.float64).max, 5e-324
    a = np.array([top, top, -top, tiny, -tiny, 1.0, 1.0, 0.0])
    b = np.array([2.0, 2.0, 2.0, 0.5, 0.5, 1.0, 1.0, -1.0])
    c = np.array([-top, top, -top, 0.0, 0.0, -1.0, tiny, 0.0])
    wanted = {
        "rn": [top, np.inf, -np.inf, 0.0, -0.0, 0.0, 1.0, 0.0],
        "rz": [top, top, -top, 0.0, -0.0, 0.0, 1.0, 0.0],
        "rm": [top, top, -np.inf, 0.0, -tiny, -0.0, 1.0, -0.0],
        "rp": [top, np.inf, -top, tiny, -0.0, 0.0, 1.0 + 2**-52, 0.0],
    }
    for mode, want in wanted.items():
        got = ops_float.exact_fma(a, b, c, mode)
        assert np.array_equal(got.view(np.uint64), np.array(want).view(np.uint64)), (mode, got)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("k_major", [True, False])
def test_operand_images_hold_every_element_once(span: int, k_major: bool) -> None:
    values = np.arange(1, 64 * 64 + 1, dtype=np.uint16).reshape(64, 64)
    image, _, _ = operand_image(values, span, k_major)
    assert sorted(image.view(np.uint16).tolist()) == sorted(values.reshape(-1).tolist())


def exact_product(case: Case) -> np.ndarray:
    return judge.simulate(case)[0]["out"]


def test_integer_products_do_not_depend_on_the_layout() -> None:
    """The same integers through every swizzle and major give sums of products of small integers."""
    for case in cases():
        if case.family == "wgmma" and "integers" in case.name:
            out = exact_product(case)
            assert np.array_equal(out, np.rint(out))
            assert np.abs(out).max() <= 16 * 64
