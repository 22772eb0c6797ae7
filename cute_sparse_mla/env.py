"""Facts about this installation and machine: versions, devices, and sources that are not installed."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from .errors import ArgumentValueError, MissingDependencyError

PACKAGE = __name__.rpartition(".")[0]
_PACKAGE_DIR = Path(__file__).resolve().parent
# Sub-packages that live beside the package in a checkout and inside it once installed.
_MAPPED = ("hopper", "sm100", "bench")


class _CheckoutFinder(importlib.abc.MetaPathFinder):
    """Finds the mapped sub-packages of an uninstalled checkout: GPU machines often have no registry to install from."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != PACKAGE or name not in _MAPPED:
            return None
        folder = _PACKAGE_DIR.parent / name
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def support_checkout() -> None:
    """Make `cute_sparse_mla.hopper` and `.bench` importable when the package is used from its source tree."""
    in_checkout = (_PACKAGE_DIR.parent / "pyproject.toml").is_file() and not (_PACKAGE_DIR / _MAPPED[0]).exists()
    if in_checkout and not any(type(f).__name__ == _CheckoutFinder.__name__ for f in sys.meta_path):
        # In front: an editable install of another checkout would otherwise lend this one its sub-packages.
        sys.meta_path.insert(0, _CheckoutFinder())


@functools.cache
def _facts(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors of a CUDA device; asking torch each time takes longer than a launch."""
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, `None` for any other."""
    return _facts(_index(device))[0] if device.type == "cuda" else None


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; of an H200 for any other, whose kernels run in a simulator."""
    return _facts(_index(device))[1] if device.type == "cuda" else 132


def require_device(device: torch.device) -> None:
    """Raise a `ValueError` for a device that this machine does not have."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentValueError("device", f"must be one of this machine's {torch.cuda.device_count()} GPUs", device)


def device_name(device: torch.device) -> str:
    """The device's own name, such as `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} ({torch.get_num_threads()} threads)"


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    if sys.modules.get(module) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def install_command(extra: str) -> str:
    """What brings an optional dependency, to an installed package and to a checkout."""
    return f"pip install '{PACKAGE}[{extra}]', in a checkout pip install -e '.[{extra}]'"


def require_release(kernels: str, package: str, tested: tuple[str, ...], extra: str) -> None:
    """Raise `MissingDependencyError` unless `package` is there in a release that these kernels were tested with."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            f"the {kernels} kernels need {package} {tested[-1]}: {install_command(extra)}"
        ) from None
    if version.split("+")[0] not in tested:
        raise MissingDependencyError(
            f"the {kernels} kernels were tested with {package} {', '.join(tested)}; {version} is installed: "
            f"pip install {package}=={tested[-1]}"
        )


def versions(*distributions: str) -> dict[str, str]:
    """Versions of Python, torch, CUDA and the named distributions that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in (PACKAGE, *distributions):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
