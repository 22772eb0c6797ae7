"""Run the project's own Hopper launches (`cute_sparse_mla.hopper`) in the simulator, on CPU tensors.

The front-end code of a launch stays as it is: only the compiled kernel that it calls is replaced by one that records
the launch through TileLang's real host code and executes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from . import capture_tilelang


def unavailable() -> str | None:
    reason = capture_tilelang.available()
    if reason is None:
        try:
            found = find_spec("cute_sparse_mla.hopper")
        except ModuleNotFoundError:
            found = None
        if found is None:
            reason = "cute_sparse_mla.hopper is not installed"
    return reason


class _Simulated:
    """Stands in for a compiled TileLang kernel."""

    def __init__(self, kernel: object, recorder: capture_tilelang.Recorder) -> None:
        self.kernel = kernel
        self.recorder = recorder

    def __call__(self, *arguments: object) -> None:
        names = [str(p.name).removesuffix("_handle") for p in self.kernel.prim_func.params]
        tensors = {n: a for n, a in zip(names, arguments, strict=True) if isinstance(a, torch.Tensor)}
        self.recorder.call(self.kernel, tensors, *arguments)


@contextmanager
def simulated(run: bool = True, **options: object) -> Iterator[capture_tilelang.Recorder]:
    """Inside, `hopper.launch.fwd` and `bwd` take CPU tensors and run in the simulator, or are only recorded."""
    capture_tilelang.prepare()
    from cute_sparse_mla.hopper import build

    recorder = capture_tilelang.Recorder(run=run)
    recorder.options = options
    real = build.kernel
    build.kernel = lambda kind, plan: _Simulated(real(kind, plan), recorder)
    try:
        yield recorder
    finally:
        build.kernel = real
