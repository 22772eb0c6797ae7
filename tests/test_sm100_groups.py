"""Token groups of the SM100 path in the simulator: the union lists slot by slot, and calls that the device decides."""

from __future__ import annotations

import pytest

from bench.cases import Case
from cute_sparse_mla import union_lists

from .list_cases import LISTS, SMALL_SIZES, checked, judge_lists
from .ptx_sim import capture_cute, project_sm100
from .ptx_sim.races import Races

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 simulator: {REASON}")


def clean(observer: Races, recorder: capture_cute.Recorder) -> None:
    assert not observer.races, observer.races[0].text
    assert not [finding for report in recorder.reports for finding in report.findings]


@pytest.mark.parametrize("sizes", (None, SMALL_SIZES), ids=("one_range", "ranges"))
@pytest.mark.parametrize(("case", "tokens"), LISTS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_lists(case: Case, tokens: int, sizes: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, observer = checked(case), Races()
    monkeypatch.setattr(union_lists, "UNION_SIZES", sizes or union_lists.UNION_SIZES)
    if sizes:
        call.indices.masked_fill_((call.indices > 70) & (call.indices < 290), 3)
    with project_sm100.simulated(observer=observer) as recorder:
        from cute_sparse_mla.sm100 import launch

        rows, bits, lengths, chosen = launch.make_lists(
            call.problem, tokens, call.indices, call.topk_length, call.q_positions
        )
    clean(observer, recorder)
    assert int(chosen) == 1
    judge_lists(call, tokens, rows, bits, lengths)
