"""What the harness can run: this package in any configuration, and the interface that adapters of peers follow.

An `Implementation` says what it supports; `prepare` gives a `Call` bound to one set of inputs. Conversions that a user
of the implementation would make once (views, an index builder's filler for invalid slots) belong to `prepare` and are
not timed; copies that every call needs (padded heads, padded slots) happen inside `fwd` and `bwd` and are. A `Call`'s
`state` is whatever its forward returns; the backward takes it in that native form, and `out_lse` and `gradients` turn
native results into the contract's, outside the timed part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import cute_sparse_mla
from cute_sparse_mla import env
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import ArgumentValueError
from cute_sparse_mla.groups import TokenPlan
from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.problem import Problem

from .fixed_shapes import fixed_shapes

FWD, BWD, BOTH = "fwd", "bwd", "fwd+bwd"
PASSES = (FWD, BWD, BOTH)
Gradients = tuple[Tensor, Tensor, Tensor | None]
Kernels = AbstractContextManager[None]  # within it, calls run some other build of the kernels


class Call(ABC):
    """One implementation bound to one set of inputs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @abstractmethod
    def fwd(self) -> Any:
        """Run the forward: native state."""

    @abstractmethod
    def bwd(self, state: Any) -> Any:
        """Run the backward from a native state: native gradients."""

    @abstractmethod
    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        """`out [T, H, d_v]` and natural-log `lse [T, H]`, -inf for rows without a valid slot."""

    @abstractmethod
    def gradients(self, native: Any) -> Gradients:
        """`dq [T, H, D]`, `dkv [S_kv, 1, D]`, `d_sink [H]` or `None`."""

    @abstractmethod
    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        """Native state for `bwd` from the contract's `out` and `lse` of another implementation's forward."""

    def conversions(self) -> str:
        """What was converted for this call, and which of it is in its time."""
        return ""


def plan_of(inputs: Inputs, tokens: int | None, backend: str | None = None) -> TokenPlan:
    """The plan of a call's inputs, for so many tokens a tile; `None`: as many as the kernels would try."""
    i = inputs
    return cute_sparse_mla.plan(
        i.indices, i.kv.shape, i.q.shape[-2] // i.kv.shape[-2], causal=i.causal, q_positions=i.q_positions,
        topk_length=i.topk_length, tokens_per_tile=tokens, backend=backend,
    )  # fmt: skip


class ContractCall(Call):
    """A call whose native state and gradients are the contract's."""

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        return state

    def gradients(self, native: Any) -> Gradients:
        return native

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        return out, lse


class Implementation(ABC):
    """Something that computes the forward, the backward, or both."""

    name: str
    version: str | None = None

    @abstractmethod
    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        """Why a pass (`fwd` or `bwd`) of this problem cannot run, or an empty string."""

    @abstractmethod
    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        """Bind to inputs."""

    def differs(self, inputs: Inputs, which: str) -> str:
        """Why a pass computes something else than the contract on these inputs, at the same cost; or an empty string.

        Such a pass is timed, but neither judged nor compared.
        """
        return ""

    def config(self, inputs: Inputs) -> dict[str, str]:
        """The configuration that runs, for the result row."""
        return {}

    def unsupported_pass(self, problem: Problem, which: str, device: torch.device) -> str:
        """As `unsupported`, for `fwd+bwd` too."""
        parts = (FWD, BWD) if which == BOTH else (which,)
        return "; ".join(dict.fromkeys(filter(None, (self.unsupported(problem, part, device) for part in parts))))


# -- ours ----------------------------------------------------------------------------------------------------------


class _OursCall(ContractCall):
    def __init__(
        self, inputs: Inputs, options: dict[str, Any], deterministic: bool, kernels: Callable[[], Kernels],
        planned: bool,
    ) -> None:  # fmt: skip
        super().__init__(inputs)
        self.options = {**inputs.options, **options}
        if planned:
            self.options["plan"] = plan_of(inputs, options["config"].tokens_per_tile, options["backend"])
        self.deterministic = deterministic
        self.kernels = kernels

    def fwd(self) -> Any:
        i = self.inputs
        with self.kernels():
            return cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **self.options)

    def bwd(self, state: Any) -> Any:
        i, (out, lse) = self.inputs, state
        with self.kernels():
            return cute_sparse_mla.bwd(
                i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, deterministic=self.deterministic, **self.options
            )


class _PaddedCall(_OursCall):
    """Heads padded with zeros in global memory, as for kernels without a small tile; the copies are in its time."""

    def __init__(self, inputs: Inputs, heads: int, *rest: Any) -> None:
        super().__init__(inputs, *rest)
        self.heads, self.extra = inputs.q.shape[1], heads - inputs.q.shape[1]
        if self.extra < 0:
            raise ArgumentValueError("--impl ours:pad_heads", f"must be at least the {self.heads} heads", heads)

    def _padded(self, tensor: Tensor) -> Tensor:
        return pad(tensor, (0, 0, 0, self.extra))

    def fwd(self) -> Any:
        i, q = self.inputs, self._padded(self.inputs.q)
        out, lse = cute_sparse_mla.fwd(q, i.kv, i.indices, d_v=i.d_v, **self._with_sink())
        return q, out, lse

    def bwd(self, state: Any) -> Any:
        i, (q, out, lse) = self.inputs, state
        dlse = None if i.dlse is None else pad(i.dlse, (0, self.extra))
        dq, dkv, d_sink = cute_sparse_mla.bwd(
            q, i.kv, out, self._padded(i.dout), i.indices, lse, dlse=dlse, deterministic=self.deterministic,
            **self._with_sink(),
        )  # fmt: skip
        return dq[:, : self.heads], dkv, None if d_sink is None else d_sink[: self.heads]

    def _with_sink(self) -> dict[str, Any]:
        sink = self.options.get("attn_sink")
        return self.options if sink is None else {**self.options, "attn_sink": pad(sink, (0, self.extra))}

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        _, out, lse = state
        return out[:, : self.heads], lse[:, : self.heads]

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        return self._padded(self.inputs.q), self._padded(out), pad(lse, (0, self.extra))

    def conversions(self) -> str:
        return f"q and dout padded to {self.heads + self.extra} heads (in its time)"


class Ours(Implementation):
    """This package. `settings` in the name, `ours:deterministic,tokens_per_tile=1`, tell variants apart.

    `fixed_shapes` compiles the kernels for the shapes at hand (SM90), which the package itself never does; `plan` makes
    the lists of token groups ahead, once for forward and backward, outside their times; `pad_heads=N` pads q and dout
    in global memory.
    """

    def __init__(self, settings: str = "", backend: str | None = None) -> None:
        self.name = f"ours:{settings}" if settings else "ours"
        self.version = cute_sparse_mla.__version__
        self.deterministic = self.planned = False
        self.kernels: Callable[[], Kernels] = nullcontext
        self.backend = backend
        self.pad_heads = 0
        names = {field.name for field in fields(SparseAttentionConfig)}
        chosen: dict[str, Any] = {}
        for setting in filter(None, settings.split(",")):
            key, _, value = setting.partition("=")
            if key == "deterministic" and not value:
                self.deterministic = True
            elif key == "fixed_shapes" and not value:
                self.kernels = fixed_shapes
            elif key == "plan" and not value:
                self.planned = True
            elif key == "pad_heads" and value.isdecimal():
                self.pad_heads = int(value)
            elif key == "backend" and value:
                self.backend = value
            elif key in names and value:
                chosen[key] = int(value) if value.isdecimal() else value
            else:
                own = ("deterministic", "fixed_shapes", "plan", "pad_heads=...", "backend=...")
                known = ", ".join([*own, *(f"{name}=..." for name in sorted(names))])
                raise ArgumentValueError("--impl ours", f"settings are {known}", setting)
        self.settings = SparseAttentionConfig(**chosen)

    def _options(self) -> dict[str, Any]:
        return {"backend": self.backend, "config": self.settings}

    def explained(self, problem: Problem, device: torch.device) -> cute_sparse_mla.Explanation:
        """What runs such a call on a device."""
        q = torch.empty(problem.S, problem.H, problem.D, dtype=problem.dtype, device="meta")
        kv = torch.empty(problem.S_kv, problem.G, problem.D, dtype=problem.dtype, device="meta")
        rows = torch.empty(problem.S, problem.G, problem.K, dtype=problem.index_dtype, device="meta")
        # The meta device costs no memory; the answer is the real device's.
        return cute_sparse_mla.explain(
            q, kv, rows, d_v=problem.d_v, causal=problem.causal, capability=env.capability(device), **self._options()
        )

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        if env.capability(device) is None and (self.backend or "reference") == "reference":
            return ""
        answer = self.explained(problem, device)
        return "" if answer.ok else answer.reason

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        rest = (self._options(), self.deterministic, self.kernels, self.planned)
        return _PaddedCall(inputs, self.pad_heads, *rest) if self.pad_heads else _OursCall(inputs, *rest)

    def config(self, inputs: Inputs) -> dict[str, str]:
        i, q, options = inputs, inputs.q, inputs.options
        if self.pad_heads:
            q, sink = q.new_empty((len(q), self.pad_heads, q.shape[-1])), i.attn_sink
            options["attn_sink"] = None if sink is None else sink.new_empty(self.pad_heads)
        answer = cute_sparse_mla.explain(q, i.kv, i.indices, d_v=i.d_v, **options, **self._options())
        found = {"backend": str(answer.backend), "config": str(answer.config), "why": answer.table_row}
        return found | ({"groups": answer.groups} if answer.groups else {})


# -- a forward of one and the backward of another ------------------------------------------------------------------


class _PairCall(Call):
    def __init__(self, forward: Call, backward: Call) -> None:
        super().__init__(forward.inputs)
        self.forward, self.backward = forward, backward

    def fwd(self) -> Any:
        return self.forward.fwd()

    def bwd(self, state: Any) -> Any:
        return self.backward.bwd(self.backward.adopt(*self.forward.out_lse(state)))

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        return self.forward.out_lse(state)

    def gradients(self, native: Any) -> Gradients:
        return self.backward.gradients(native)

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        raise NotImplementedError("a pair runs its own forward")

    def conversions(self) -> str:
        parts = (self.forward.conversions(), self.backward.conversions(), "out and lse handed over in the bwd's time")
        return "; ".join(filter(None, parts))


class Pair(Implementation):
    """`forward+backward`: what users without one package for both glue together."""

    def __init__(self, forward: Implementation, backward: Implementation) -> None:
        self.forward, self.backward = forward, backward
        self.name = f"{forward.name}+{backward.name}"
        self.version = f"{forward.version} + {backward.version}"

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        return (self.forward if which == FWD else self.backward).unsupported(problem, which, device)

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        return _PairCall(self.forward.prepare(inputs, problem), self.backward.prepare(inputs, problem))

    def differs(self, inputs: Inputs, which: str) -> str:
        return (self.forward if which == FWD else self.backward).differs(inputs, which)
