"""The simulator against what an H200 computed for the micro-kernels of `judge_cases` (see `ptx_sim/judge.py`)."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from .ptx_sim import judge
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
