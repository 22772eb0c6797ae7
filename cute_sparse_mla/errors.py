"""Errors of the package.

Wrong arguments are `TypeError`s or `ValueError`s that name the argument, the rule and what came. What the hardware or
a missing package forbids is an `UnsupportedError`, with the nearest thing that works.
"""

from __future__ import annotations

import torch


class SparseMLAError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(SparseMLAError):
    """An argument breaks a rule of the contract.

    Attributes: `argument` (its name), `rule` (what is expected), `got` (what came).
    """

    def __init__(self, argument: str, rule: str, got: object) -> None:
        # Not through super().__init__, which torch.compile cannot trace: the text would be lost there.
        self.args = (f"{argument}: {rule}; got {got}",)
        self.argument, self.rule = argument, rule
        # Nor can it take the text of symbols: the error would be about that.
        self.got = got if torch.compiler.is_compiling() else str(got)

    def __reduce__(self) -> tuple:
        return type(self), (self.argument, self.rule, self.got)


class ArgumentTypeError(ArgumentError, TypeError):
    """The argument has the wrong type or dtype."""


class ArgumentValueError(ArgumentError, ValueError):
    """The argument has the right type and a wrong shape, value, layout or device."""


class UnsupportedError(SparseMLAError, RuntimeError):
    """The call is correct, but this device, version or config cannot run it. The message says what can."""


class MissingDependencyError(UnsupportedError, ImportError):
    """The device's kernels need a package that is not installed. The message has the install command."""
