"""The whole sentinel sweep of the SM100 forward, in the simulator; `make sentinel-sim` runs it (not part of the suite).

Every head count beside sinks, causal bounds and slot counts on and off the block, and K 2048 once per D.
"""

from __future__ import annotations

import pytest

from .ptx_sim import capture_cute
from .sm100 import judge, sentinel_case
from .test_sentinel_heads import HEADS

REASON = capture_cute.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"SM100 simulator: {REASON}")
LENGTHS = (1, 64, 100, 128, 192, 640)


@pytest.mark.parametrize("K", LENGTHS)
@pytest.mark.parametrize("causal", (False, True), ids=("all", "causal"))
@pytest.mark.parametrize("sink", (None, "random"), ids=("no_sink", "sink"))
@pytest.mark.parametrize("D", (512, 576))
@pytest.mark.parametrize("heads", HEADS)
def test_head_count_with_sentinels(heads: int, D: int, sink: str | None, causal: bool, K: int) -> None:
    judge(sentinel_case(heads, D, K, sink, causal).inputs(seed=heads))


@pytest.mark.parametrize(("heads", "D"), ((128, 512), (64, 576)))
def test_a_long_row(heads: int, D: int) -> None:
    judge(sentinel_case(heads, D, 2048, "random", True).inputs(seed=heads))
