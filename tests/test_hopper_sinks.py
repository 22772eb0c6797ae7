"""Sinks that leave next to nothing of out, on SM90 in the simulator; its adds in global memory flush as a GPU's do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Judge, run

from .ptx_sim import project_hopper

REASON = project_hopper.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"Hopper kernels: {REASON}")
if REASON is None:
    project_hopper.capture_tilelang.prepare()

# lse is about 5.3: w = exp(lse - sink) is 1e-36 and its share of a slot 1e-38.
CASE = Case(S=2, S_kv=150, H=5, K=128, sink=88.0, invalid="shuffled", share=0.1)


@pytest.mark.parametrize(
    "how", [{}, {"deterministic": True}, {"dkv_dtype": torch.float32}], ids=lambda how: str([*how])
)
@pytest.mark.parametrize("sink", [88.0, 89.0])
def test_gradients_below_the_normal_range(sink: float, how: dict[str, Any]) -> None:
    i = CASE.but(sink=sink).inputs(seed=1)
    with project_hopper.simulated():
        config = SparseAttentionConfig(tokens_per_tile=1)
        backward = partial(cute_sparse_mla.bwd, **how)
        results = run(i, cute_sparse_mla.fwd, backward, backend="sm90", config=config)
    checks = Judge(i).checks(results)
    assert all(check.ok for check in checks), "\n".join(map(str, checks))
    assert float(results.dkv.abs().max()) > 0
