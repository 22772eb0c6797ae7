"""The whole sentinel sweep of the SM100 kernels, in the simulator; `make sentinel-sim` runs it (not part of the suite).

Every head count beside sinks, causal bounds and slot counts on and off the block, and K 2048 once per D.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .ptx_sim import capture_cute
from .ptx_sim.races import Races
from .sm100 import judge, judge_backward, sentinel_case
from .test_sentinel_heads import HEADS

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 simulator: {REASON}")
LENGTHS = (1, 64, 100, 128, 192, 640)
CHECKS = (judge, judge_backward)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("K", LENGTHS)
@pytest.mark.parametrize("causal", (False, True), ids=("all", "causal"))
@pytest.mark.parametrize("sink", (None, "random"), ids=("no_sink", "sink"))
@pytest.mark.parametrize("D", (512, 576))
@pytest.mark.parametrize("heads", HEADS)
def test_head_count_with_sentinels(check: Callable, heads: int, D: int, sink: str | None, causal: bool, K: int) -> None:
    check(sentinel_case(heads, D, K, sink, causal).but(dlse=True).inputs(seed=heads))


# Tiles of 64 and of 128 rows, full and with padded heads.
GROUPS = ((1, 16), (8, 8), (8, 16), (12, 4), (16, 8), (24, 2), (40, 2), (64, 2))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("K", (1, 100, 192))
@pytest.mark.parametrize(("sink", "causal"), ((None, False), ("random", True)), ids=("plain", "sink_causal"))
@pytest.mark.parametrize("D", (512, 576))
@pytest.mark.parametrize(("heads", "tokens"), GROUPS)
def test_groups_with_sentinels(
    check: Callable, heads: int, tokens: int, D: int, sink: str | None, causal: bool, K: int
) -> None:
    """Two tiles and a partial one, race-free."""
    case, observer = sentinel_case(heads, D, K, sink, causal), Races()
    case = case.but(S=2 * tokens + 1, dlse=True, duplicates=True, length="random")
    check(case.inputs(seed=heads), tokens_per_tile=tokens, observer=observer)
    assert not observer.races, observer.races[0].text


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("heads", "D"), ((128, 512), (64, 576)))
def test_a_long_row(check: Callable, heads: int, D: int) -> None:
    check(sentinel_case(heads, D, 2048, "random", True).inputs(seed=heads))
