"""A folder for TileLang's compiled kernels that cannot be written: they are not kept then, and no call fails of it.

TileLang itself raises there: at its import when it cannot make its folders, after a compilation when it cannot store.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

VARIABLE = "TILELANG_CACHE_DIR"
Result = TypeVar("Result")


def folder() -> Path:
    """TileLang's folder of compiled kernels."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".tilelang" / "cache")


def prepare() -> None:
    """Before TileLang is imported: point it to a temporary folder if it could not make its own."""
    if "tilelang" in sys.modules:
        return
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        if next(place.glob("*/*/.staging"), None):
            return  # Its folders are there, and what they hold can be read.
        temporary = tempfile.mkdtemp(prefix="cute_sparse_mla_")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        os.environ[VARIABLE] = temporary
        _warn(place, error.strerror)


def kept_or_not(compile_: Callable[[], Result]) -> Result:
    """The result of a compilation, once more without storing it if it failed of the folder."""
    import tilelang

    try:
        return compile_()
    except Exception as error:
        # TileLang's compiler hands an OSError on as text.
        why = re.search(r"\[Errno \d+\] ([^:]*)", str(error))
        if why is None or not tilelang.is_cache_enabled():
            raise
        _warn(folder(), why[1])
    tilelang.disable_cache()
    try:
        return compile_()
    finally:
        tilelang.enable_cache()


@functools.cache
def _warn(place: Path, why: str) -> None:
    warnings.warn(
        f"compiled kernels are not kept: {place} cannot be written ({why}); ${VARIABLE} names another folder",
        RuntimeWarning, stacklevel=4,
    )  # fmt: skip
