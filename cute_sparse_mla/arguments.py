"""Types of command-line arguments, shared by the package's commands: a wrong value is one line, never a traceback."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from . import env
from .dispatch import BACKENDS
from .errors import ArgumentValueError
from .models import MODELS


def count(text: str) -> int:
    """An int of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, got {text!r}")
    return value


def count_to(most: int) -> Callable[[str], int]:
    """The type of an int in 1 to `most`."""

    def bounded(text: str) -> int:
        value = count(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text!r}")
        return value

    return bounded


def input_file(text: str) -> Path:
    """A file that can be read."""
    path = Path(text)
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {text!r} ({error})") from error
    return path


def output_file(text: str) -> Path:
    """A file that can be written, said before the work whose results it takes; its folder is made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file itself is not made: other processes, such as ranks of the same command, may be about to.
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r} ({error})") from error
    return path


def seed(text: str) -> int:
    """A seed that torch's generators take: 0 to 2**63 - 1."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be an int in 0..2**63 - 1, got {text!r}")
    return value


def capability(text: str) -> tuple[int, int]:
    """A compute capability such as 9.0."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and (minor or "0").isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a compute capability such as 9.0, got {text!r}")
    return int(major), int(minor or 0)


def device(text: str) -> torch.device:
    """A device of this machine that tensors with values can be on."""
    try:
        value = torch.device(text)
        env.require_device(value)
        if value.type not in ("cpu", "cuda", "meta"):
            torch.empty(0, device=value)
    except (RuntimeError, AssertionError, ArgumentValueError) as error:
        raise argparse.ArgumentTypeError(f"no such device here: {text!r}") from error
    if value.type == "meta":
        raise argparse.ArgumentTypeError("must be a device with memory, got 'meta'")
    return value


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options of every command that looks at one layer of a model."""
    parser.add_argument("--model", choices=sorted(MODELS), default="glm5", help="layer shape (default glm5)")
    parser.add_argument("--heads", type=count, help="heads after tensor parallelism (default: all of the model's)")
    parser.add_argument("--device", type=device, help="torch device (default: cuda where there is one, else cpu)")
    parser.add_argument("--backend", help=f"one of {', '.join(BACKENDS)} (default: the device's own)")
