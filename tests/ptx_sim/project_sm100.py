"""Run the project's own SM100 launches (`cute_sparse_mla.sm100`) in the simulator, on CPU tensors.

The launch code stays as it is: only its executor is replaced by one that records the launch through CuTe DSL's real
host code and executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import capture_cute


@contextmanager
def simulated(multiprocessors: int | None = None, **options: object) -> Iterator[capture_cute.Recorder]:
    """Inside, `sm100.launch.fwd` takes CPU tensors and runs in the simulator, on so many multiprocessors."""
    capture_cute.prepare()
    from cute_sparse_mla.sm100 import launch

    recorder = capture_cute.Recorder(run=True)
    recorder.options = options

    def execute(kernel: Callable, arguments: tuple, tensors: dict[str, torch.Tensor]) -> None:
        for name in ("out", "lse"):
            tensors[name].fill_(torch.nan)
        recorder.call(kernel, tensors, *arguments, 0)

    before = launch.executor, launch.multiprocessors
    launch.executor = execute
    if multiprocessors is not None:
        launch.multiprocessors = lambda device: multiprocessors
    try:
        yield recorder
    finally:
        launch.executor, launch.multiprocessors = before
