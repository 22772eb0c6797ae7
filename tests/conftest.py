"""Markers for tests that need a GPU: skipped with the reason where there is none."""

from __future__ import annotations

import pytest
import torch

from cute_sparse_mla import dispatch

from .ptx_sim import capture_cute, capture_tilelang


def pytest_configure() -> None:
    """Choose the simulator's stand-in libraries before any test imports CuTe DSL or TileLang; never beside a GPU."""
    for capture in (capture_cute, capture_tilelang):
        if capture.available() is None:
            capture.prepare()


def _missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, `None` when they can."""
    count = torch.cuda.device_count()
    if marker == "multi_gpu":
        return None if count >= 2 else f"needs two GPUs; {count} present"
    if count == 0:
        return f"needs a GPU that runs the {marker} kernels; none present"
    capability = torch.cuda.get_device_capability(0)
    backend = next(b for b in dispatch.KERNEL_BACKENDS if b.name == marker)
    if not backend.runs_on(capability):
        return f"needs compute capability {backend.capabilities}; the GPU has {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {marker: _missing(marker) for marker in ("sm90", "sm100", "multi_gpu")}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test sees the once-only warnings and the choice of a backend again, and leaves no trace for the next."""
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_choices", {})
