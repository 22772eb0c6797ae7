"""The list of the SM100 kernels' instruction forms is up to date, and the guide names those without a witness."""

from __future__ import annotations

import pytest

from .ptx_sim import capture_cute, coverage

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 kernels: {REASON}")


@pytest.mark.parametrize("number", (0, 3, 10))
def test_every_form_is_listed(number: int) -> None:
    from . import sm100_coverage

    listed = sm100_coverage.LIST.read_text(encoding="utf-8")
    for kernel, used in sm100_coverage.forms(*sm100_coverage.CASES[number]):
        missing = [form for form in used if f"| `{form}` |" not in listed]
        assert not missing, (kernel, missing)


def test_unproven_forms_are_those_without_a_witness() -> None:
    from . import sm100_coverage

    known = coverage.witnesses()
    rows = [line for line in sm100_coverage.LIST.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows
    for row in rows:
        form = row.split("`")[1]
        assert ("**unproven**" in row) == (form not in known), form
