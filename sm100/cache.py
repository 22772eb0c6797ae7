"""Compiled kernels on disk, one object file each, named by a hash of everything that changes its code.

The folder is `$CUTE_SPARSE_MLA_CACHE`, by default `~/.cache/cute_sparse_mla`; an empty value turns the cache off. Files
appear whole or not at all, so any number of processes may share the folder; two that compile the same kernel at once
write the same file. Nothing is ever deleted: the folder may be, at any time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "CUTE_SPARSE_MLA_CACHE"
FUNCTION = "sparse_mla_forward"  # exported name
# Releases that compile, or that the object file links against.
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi")


def folder() -> Path | None:
    """Where objects are kept; None when the cache is off."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return Path.home() / ".cache" / "cute_sparse_mla"
    return Path(named) if named else None


@functools.cache
def _surroundings() -> str:
    facts = [sys.version, platform.machine(), platform.processor()]
    for name in PACKAGES:
        try:
            facts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            facts.append(f"{name} absent")
    for source in sorted(Path(__file__).parent.glob("*.py")):
        facts.append(f"{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()}")
    return "\n".join(facts)


def key(what: str) -> str:
    """Hash of `what` (a plan and compiler options), this package's sources, versions and machine type."""
    return hashlib.sha256(f"{what}\n{_surroundings()}".encode()).hexdigest()


def load(name: str) -> Callable[..., Any] | None:
    """The kernel stored under a key, or None."""
    place = folder()
    path = None if place is None else place / f"{name}.o"
    if path is None or not path.is_file():
        return None
    from cutlass import cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), FUNCTION)


def store(name: str, compiled: Any) -> None:
    """Keep a compiled kernel; a folder that cannot be written keeps nothing, and is told of once."""
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as private:
            file = Path(private) / f"{name}.o"
            compiled.export_to_c(str(file), FUNCTION)
            os.replace(file, place / file.name)
    except OSError as error:
        _warn(f"compiled kernels are not kept: {place} cannot be written ({error}); ${VARIABLE} names another folder")


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
