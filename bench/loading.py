"""Loading a peer's module from wherever its user has it, and telling which version it is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from cute_sparse_mla.errors import ArgumentValueError, MissingDependencyError


def load_module(where: str | None, name: str) -> ModuleType:
    """The peer module `name`: importable (`where=None`), in a folder, in one Python file, or under another name."""
    path = Path(where or name)
    if path.suffix == ".py":
        return _load_file(path)
    if where is not None and path.is_dir():
        sys.path.insert(0, str(path.resolve()))
        where = name
    try:
        return importlib.import_module(where or name)
    except ImportError as error:
        raise MissingDependencyError(
            f"peer module {where or name!r} cannot be imported ({error}); name its place with --peer NAME=PATH"
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ArgumentValueError("--peer", "must name a module, a Python file or a folder of them", str(path))
    # Under the file's own name, since files of a peer import each other by it.
    found = sys.modules.get(path.stem)
    if found is not None and Path(getattr(found, "__file__", None) or "").resolve() == path.resolve():
        return found
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    # The folder is searched while the file loads, and no longer: it may hold a `utils.py`.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def version_of(module: ModuleType, distribution: str | None = None) -> str | None:
    """The distribution's version, or the git commit of the checkout that the module's file lies in."""
    if distribution:
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    file = getattr(module, "__file__", None)
    commit = git_commit(Path(file).resolve()) if file else None
    return f"git {commit}" if commit else getattr(module, "__version__", None)


def git_commit(path: Path) -> str | None:
    """Short commit of the checkout that tracks a file or folder, `None` where none does (a copy inside one is none)."""
    git = ["git", "-C", str(path if path.is_dir() else path.parent)]
    command = [*git, "rev-parse", "--short=12", "HEAD"]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", str(path)], capture_output=True, timeout=10, check=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
