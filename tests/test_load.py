"""What many calls and processes do to each other, as far as a CPU shows it; `tests.load` has a GPU's part."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cute_sparse_mla.sm100 import cache

from . import load
from .ptx_sim import project_hopper

CPU = torch.device("cpu")
VARIABLE = "TILELANG_CACHE_DIR"
needs_tilelang = pytest.mark.skipif(
    project_hopper.unavailable() is not None, reason=f"TileLang: {project_hopper.unavailable()}"
)
NAME, CONTENT = "0123", bytes(range(256)) * 4096


class _Compiled:
    """Stands in for a compiled kernel: written in pieces, so that others can look in between."""

    def __init__(self, between: Callable[[], None] = lambda: time.sleep(0.002)) -> None:
        self.between = between

    def export_to_c(self, path: str, function: str) -> None:
        with open(path, "wb") as file:
            for first in range(0, len(CONTENT), len(CONTENT) // 8):
                file.write(CONTENT[first : first + len(CONTENT) // 8])
                file.flush()
                self.between()


def _forked(work: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return pid


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_share_a_cold_cache(folder: Path) -> None:
    """Eight processes write one kernel at once; each sees the file whole or not at all, before and after."""
    stored = folder / f"{NAME}.o"

    def work() -> bool:
        def whole() -> None:
            if stored.exists() and stored.read_bytes() != CONTENT:
                os._exit(3)

        cache.store(NAME, _Compiled(whole))
        return stored.read_bytes() == CONTENT

    children = [_forked(work) for _ in range(8)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert [file.name for file in folder.iterdir()] == [stored.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_compile_leaves_no_trace(folder: Path) -> None:
    """kill -9 while a kernel is written: no half file under its name, no lock; the next process stores it."""
    child = _forked(lambda: cache.store(NAME, _Compiled(lambda: os.kill(os.getpid(), signal.SIGKILL))) is None)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (folder / f"{NAME}.o").exists() and cache.load(NAME) is None
    cache.store(NAME, _Compiled())
    assert (folder / f"{NAME}.o").read_bytes() == CONTENT


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["a file in its place", "full"])
def test_a_folder_that_cannot_be_written(
    how: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps nothing and raises nothing; one plain warning says where and what to do."""
    cache._warn.cache_clear()
    if how != "full":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))
    compiled = _Compiled(_full if how == "full" else lambda: None)
    with pytest.warns(RuntimeWarning, match=r"compiled kernels are not kept: .* cannot be written .*CUTE_SPARSE_MLA_C"):
        cache.store(NAME, compiled)
    cache.store(NAME, compiled)
    assert cache.load(NAME) is None
    assert how != "full" or list(folder.iterdir()) == []


@needs_tilelang
def test_two_threads_compile_at_once() -> None:
    project_hopper.capture_tilelang.prepare()
    from cute_sparse_mla.hopper import build
    from cute_sparse_mla.hopper.plan import Plan

    build.kernel.cache_clear()
    found: list[object] = []
    plans = [Plan(D, "bfloat16", "int32") for D in (512, 576, 576)]
    workers = [threading.Thread(target=lambda p=plan: found.append(build.kernel("postprocess", p))) for plan in plans]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 3 and all(callable(kernel) for kernel in found)


# In a process of its own.
COMPILES = """
import sys, warnings
import torch
from cute_sparse_mla.hopper import launch
from tests import load
build = launch._build()
if sys.argv[2] == "full":
    load.fill(sys.argv[1])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from cute_sparse_mla.hopper.plan import Plan
    kernel = build.kernel("postprocess", Plan(576, "bfloat16", "int32"))
assert kernel.get_kernel_source()
print(*[w.message for w in said if "are not kept" in str(w.message)])
"""


@needs_tilelang
@pytest.mark.parametrize("how", ["full", "a file in its place"])
def test_tilelang_in_a_folder_that_cannot_be_written(how: str, tmp_path: Path) -> None:
    """A kernel is compiled all the same, and a warning names the folder."""
    place = tmp_path / "kernels"
    if how != "full":
        place.write_text("")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TILELANG_")} | {VARIABLE: str(place)}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", COMPILES, str(place), how], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout if how == "full" else done.stderr
    assert f"compiled kernels are not kept: {place} cannot be written (" in told
    assert how == "a file in its place" or not [path for path in place.rglob("*") if path.is_file()]


def test_mixed_calls_hold_no_memory() -> None:
    row = load.mixed_calls(CPU, 60)
    assert row["grown bytes"] <= 64 << 20 and row["grown kernels"] == 0


def test_threads_that_call_at_once_are_right() -> None:
    assert load.threads(CPU) == {"ok": True, "failures": []}


@pytest.mark.parametrize("name", ["full-cache", "fork", "killed-compile"])
def test_a_process_of_the_load_command_is_right(name: str) -> None:
    row = load.SUBJECTS[name].run(CPU)
    assert (row["right"], row["ok"], row["failures"]) == (1, True, [])


@pytest.mark.sm90
@pytest.mark.parametrize("name", [name for name in load.SUBJECTS if name != "mixed-calls"])
def test_load_on_a_gpu(name: str) -> None:
    row = load.SUBJECTS[name].run(torch.device("cuda"))
    assert row["ok"], row
