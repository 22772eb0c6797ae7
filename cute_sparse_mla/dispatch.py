"""From a checked call to a backend: the choice by device, lazy imports, and nothing else.

Import direction: `api` -> `autograd` -> `dispatch` -> one backend. A backend never imports another, nor the front-end.
A named backend is used or refused with the reason; it is never replaced by another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import config as config_table
from . import env, fastest, reference
from .config import ConfigRow, SparseAttentionConfig
from .errors import ArgumentValueError, MissingDependencyError, UnsupportedError
from .problem import BACKWARD, FORWARD, KERNEL_DIMS, KERNEL_DTYPES, Problem
from .validation import BackwardCall, Call, ListsCall

REFERENCE, FASTEST = "reference", "fastest"
# Gather lists of a plan, as `groups.Lists`, or none.
Lists = tuple[Tensor, ...] | None


@dataclass(frozen=True)
class KernelBackend:
    """A backend of compiled kernels: where its code lives, what it runs on, and what it needs installed."""

    name: str
    module: str
    capabilities: str
    runs_on: Callable[[tuple[int, int]], bool]
    requires: str
    extra: str
    # Whether a deterministic backward groups tokens without asking the device if it pays.
    groups_in_order: bool


KERNEL_BACKENDS = (
    KernelBackend("sm90", "hopper", "9.x (Hopper)", lambda c: c[0] == 9, "tilelang", "hopper", True),
    KernelBackend(
        "sm100", "sm100", "10.0 or 10.3 (Blackwell)", lambda c: c in ((10, 0), (10, 3)), "cutlass", "blackwell", False
    ),
)


@dataclass(frozen=True)
class ExternalBackend:
    """Someone else's package behind the front-end (`external`): what it runs on, and how it is installed."""

    name: str
    capabilities: str
    runs_on: Callable[[tuple[int, int]], bool]
    requires: str
    install: str
    has_backward: bool


def _either_architecture(capability: tuple[int, int]) -> bool:
    return capability in ((9, 0), (10, 0), (10, 3))


EXTERNAL_BACKENDS = (
    ExternalBackend(
        "flash_mla", "9.0, 10.0 or 10.3", _either_architecture, "flash_mla",
        "pip install git+https://github.com/deepseek-ai/FlashMLA", has_backward=False,
    ),
    ExternalBackend(
        "cudnn", "9.0, 10.0 or 10.3", _either_architecture, "cudnn", env.install_command("cudnn"),
        has_backward=True,
    ),
)  # fmt: skip
_OWN = {backend.name: backend for backend in KERNEL_BACKENDS}
BACKENDS = (REFERENCE, *(b.name for b in (*KERNEL_BACKENDS, *EXTERNAL_BACKENDS)), FASTEST)


@dataclass(frozen=True)
class Choice:
    """What runs a call, and why."""

    backend: str
    config: SparseAttentionConfig
    row: ConfigRow
    reason: str
    warning: str = ""


# -- the choice ----------------------------------------------------------------------------------------------------


def choose(
    problem: Problem, device_type: str, capability: tuple[int, int] | None, backend: str, config: SparseAttentionConfig,
    which: str = FORWARD, *, call: Call | None = None, deterministic: bool = False,
) -> Choice:  # fmt: skip
    """Backend and config of a call's pass on a device of this type and compute capability; raises what the contract
    says. `call` and `deterministic` matter to external backends, which refuse by layout, too."""
    check_name("config.fwd_backend", config.fwd_backend or "")
    wished = _wished(backend, config, which)
    if wished == FASTEST:
        config = replace(config, fwd_backend=None)
        return _choose_fastest(problem, device_type, capability, config, which, call, deterministic)
    name, reason, warning = _backend_of(device_type, capability, wished)
    if name == REFERENCE and config.tokens_per_tile not in (None, 1):
        raise UnsupportedError("the reference works token by token: config.tokens_per_tile must be None or 1")
    if name != REFERENCE:
        _require_kernels(name, problem)
    filled, row = config_table.choose(name, problem, config)
    choice = Choice(name, filled, row, reason, warning)
    if _is_external(name):
        refusal = external(name).refusal(problem, config, which, capability, deterministic, call)
        if refusal:
            raise UnsupportedError(f"backend '{name}', {which}: {refusal}")
    elif name != REFERENCE and not problem.is_empty:
        load(name).check(problem, filled)
    return choice


def _wished(backend: str, config: SparseAttentionConfig, which: str) -> str:
    """The backend that a caller names for a pass."""
    return config.fwd_backend if which == FORWARD and config.fwd_backend else backend


def _choose_fastest(
    problem: Problem, device_type: str, capability: tuple[int, int] | None, config: SparseAttentionConfig, which: str,
    call: Call | None, deterministic: bool,
) -> Choice:  # fmt: skip
    """The first of the measured ranking that is installed and takes the call; the device's own where none was measured
    or none does. A group size is a wish to the package's own kernels, and no reason against the others."""
    own_name, *_ = _backend_of(device_type, capability, "")
    own = functools.partial(choose, problem, device_type, capability, "", config, which)
    others = replace(config, tokens_per_tile=None)
    candidates = fastest.ranking(own_name, problem, which)
    if not candidates:
        missing = f"no {which} measured beside others at D {problem.D} and {problem.heads_per_group} heads"
        choice = own()
        return replace(choice, reason=f"fastest: {missing}; {choice.reason}")
    passed: list[str] = []
    for candidate in candidates:
        try:
            if candidate.backend == own_name:
                choice = own()
            else:
                choice = choose(
                    problem, device_type, capability, candidate.backend, others, which, call=call,
                    deterministic=deterministic,
                )  # fmt: skip
        except UnsupportedError as error:
            passed.append(f"not {candidate.backend}: {error}")
            continue
        return replace(choice, reason="; ".join((f"fastest: {candidate.figure}", *passed)))
    choice = own()
    return replace(choice, reason="; ".join(("fastest", *passed, choice.reason)))


def reads_dense(backend: str | None) -> bool:
    """Whether a backward that is asked for by this name may need a dense `dout`, as the external ones do."""
    return backend == FASTEST or _is_external(backend)


def require_backward(backend: str) -> None:
    """Refuse, before a forward that will be differentiated, a named backend that has no backward at all."""
    if any(b.name == backend and not b.has_backward for b in EXTERNAL_BACKENDS):
        raise UnsupportedError(
            f"backend '{backend}' has no backward, and a gradient is required: name it in config.fwd_backend, and a "
            "backend with a backward, or None, in backend"
        )


def grouping(
    problem: Problem, device_type: str, capability: tuple[int, int] | None, backend: str, config: SparseAttentionConfig
) -> tuple[int, bool]:
    """Tokens of a tile, and whether the device decides if they are grouped at all; the config's wish is followed."""
    choice = _chosen(problem, device_type, capability, backend, config)
    if choice.config.tokens_per_tile is not None:
        return choice.config.tokens_per_tile, False
    return load(choice.backend).group_size(problem), True


def describe_groups(choice: Choice, problem: Problem) -> str:
    """How many tokens share a gather list, and who decides."""
    tokens = choice.config.tokens_per_tile
    if tokens is not None:
        return "" if tokens == 1 else f"{tokens} tokens a tile, as the config or the plan has it"
    tokens = load(choice.backend).group_size(problem)
    if tokens == 1:
        return f"none: {problem.heads_per_group} heads per group leave no room for a second token in a tile"
    always = any(b.name == choice.backend and b.groups_in_order for b in KERNEL_BACKENDS)
    decided = "where their union of rows pays, decided on the device from a sample of tiles"
    return f"{tokens} tokens a tile {decided}{'; always in a deterministic backward' if always else ''}"


def planned(
    config: SparseAttentionConfig, tokens: int | None, device_type: str, capability: tuple[int, int] | None,
    backend: str, which: str = FORWARD,
) -> SparseAttentionConfig:  # fmt: skip
    """A call's config with the group size of its plan; the reference and external backends work token by token whatever
    the plan says."""
    wished = _wished(backend, config, which)
    name, _, _ = _backend_of(device_type, capability, "" if wished == FASTEST else wished)
    return replace(config, tokens_per_tile=1 if name == REFERENCE or _is_external(name) else tokens)


def check_name(argument: str, name: str) -> None:
    """A backend's name is known; `""` stands for none."""
    if name and name not in BACKENDS:
        raise ArgumentValueError(argument, f"must be one of {', '.join(BACKENDS)}", repr(name))


def _is_external(name: str | None) -> bool:
    return any(b.name == name for b in EXTERNAL_BACKENDS)


def _backend_of(device_type: str, capability: tuple[int, int] | None, wished: str) -> tuple[str, str, str]:
    """`(backend, reason, warning)`."""
    where = f"compute capability {capability[0]}.{capability[1]}" if capability else f"device type {device_type}"
    check_name("backend", wished)
    if wished == REFERENCE:
        return wished, "named by the caller", ""
    fitting = next((b for b in KERNEL_BACKENDS if capability and b.runs_on(capability)), None)
    if wished:
        named = next(b for b in (*KERNEL_BACKENDS, *EXTERNAL_BACKENDS) if b.name == wished)
        if capability is None or not named.runs_on(capability):
            works = fitting.name if fitting else REFERENCE
            raise UnsupportedError(
                f"backend '{wished}' needs compute capability {named.capabilities}; the tensors are on {where}. "
                f"backend='{works}' runs there"
            )
        return wished, "named by the caller", ""
    if fitting is not None:
        return fitting.name, f"{where} runs the {fitting.name} kernels", ""
    if device_type == "cpu":
        return REFERENCE, "a CPU runs the reference", ""
    warning = f"no kernels for {where}: cute_sparse_mla runs its plain torch reference there, which is slow"
    return REFERENCE, f"no kernels for {where}", warning


def _require_kernels(name: str, problem: Problem) -> None:
    if (problem.D, problem.d_v) not in KERNEL_DIMS:
        raise UnsupportedError(
            f"the {name} kernels take (D, d_v) in {list(KERNEL_DIMS)}, not ({problem.D}, {problem.d_v}); pad q and kv "
            f"with zero columns to D = 512 or 576, or pass backend='{REFERENCE}'"
        )
    if problem.dtype not in KERNEL_DTYPES:
        raise UnsupportedError(f"the {name} kernels take bfloat16 and float16, not {problem.dtype}")
    outside = next((b for b in EXTERNAL_BACKENDS if b.name == name), None)
    if outside is not None:
        if not env.is_installed(outside.requires):
            raise MissingDependencyError(
                f"backend '{name}' needs the package '{outside.requires}', which is not installed: {outside.install}"
            )
        return
    backend = next(b for b in KERNEL_BACKENDS if b.name == name)
    if not env.is_installed(f"{env.PACKAGE}.{backend.module}"):
        raise UnsupportedError(f"this version has no {name} kernels; backend='{REFERENCE}' runs anywhere")
    if not env.is_installed(backend.requires):
        raise MissingDependencyError(
            f"the {name} kernels need the package '{backend.requires}': {env.install_command(backend.extra)}"
        )


def load(name: str) -> ModuleType:
    """The module of a kernel backend, imported on first use."""
    return importlib.import_module(f"{env.PACKAGE}.{_OWN[name].module}")


def external(name: str) -> ModuleType:
    """The module of an external backend, which imports the package itself at its first call."""
    return importlib.import_module(f"{env.PACKAGE}.external.{name}")


_warned: set[str] = set()
# Choices of the package's own kernels for calls that were made before.
_choices: dict[tuple, Choice] = {}
MOST_CHOICES = 4096


def _choose_for(
    call: Call, backend: str, config_text: str, lists: Lists, which: str, deterministic: bool = False
) -> Choice:
    device = call.q.device
    capability, config = env.capability(device), config_table.decode(config_text)
    if lists:
        tokens = lists[0].shape[-1] // call.problem.K
        config = planned(config, tokens, device.type, capability, backend, which)
    choice = _chosen(call.problem, device.type, capability, backend, config, which, call, deterministic)
    if choice.warning and choice.warning not in _warned:
        _warned.add(choice.warning)
        warnings.warn(choice.warning, RuntimeWarning, stacklevel=2)
    return choice


def _chosen(
    problem: Problem, device_type: str, capability: tuple[int, int] | None, backend: str, config: SparseAttentionConfig,
    which: str = FORWARD, call: Call | None = None, deterministic: bool = False,
) -> Choice:  # fmt: skip
    """`choose`, remembered where the package's own kernels run: others look at more than the problem."""
    key = (problem, device_type, capability, backend, config, which)
    try:
        known = _choices.get(key)
    except TypeError:  # sizes of a traced graph, which are symbols
        return choose(problem, device_type, capability, backend, config, which, call=call, deterministic=deterministic)
    if known is not None:
        return known
    choice = choose(problem, device_type, capability, backend, config, which, call=call, deterministic=deterministic)
    if choice.backend in _OWN and _wished(backend, config, which) != FASTEST:
        if len(_choices) >= MOST_CHOICES:
            _choices.clear()
        _choices[key] = choice
    return choice


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The tensors' device, whatever device is current, and no autocast: an operator's roundings are its own."""
    kind = device.type
    elsewhere = kind == "cuda" and device.index != torch.cuda.current_device()
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # Each of these takes as long as a launch, and most calls need neither.
    if not elsewhere and not cast:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if elsewhere:
        stack.enter_context(torch.cuda.device(device))
    if cast:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


# -- running -------------------------------------------------------------------------------------------------------


def forward(call: Call, sm_scale: float, backend: str, config: str, lists: Lists = None) -> tuple[Tensor, Tensor]:
    """Run a checked forward: `(out, lse)` in the caller's form (packed or batched); `lists` are a plan's.

    Backends return fresh batched tensors, which lose their leading axis in place: views could not be changed in place
    under autograd.
    """
    problem = call.problem
    choice = _choose_for(call, backend, config, lists, FORWARD)
    options: dict[str, Any] = dict(
        sm_scale=sm_scale, q_positions=call.q_positions, topk_length=call.topk_length, attn_sink=call.attn_sink
    )
    with _on_device(call.q.device):
        if choice.backend == REFERENCE or problem.is_empty:
            out, lse, _ = reference.forward(
                call.q, call.kv, call.indices, d_v=problem.d_v, causal=problem.causal, **options
            )
        elif _is_external(choice.backend):
            out, lse = external(choice.backend).fwd(call, sm_scale)
        else:
            kernels = load(choice.backend)
            out, lse = kernels.fwd(problem, choice.config, call.q, call.kv, call.indices, lists=lists, **options)
    return (out.squeeze_(0), lse.squeeze_(0)) if problem.packed else (out, lse)


def backward(
    call: BackwardCall, sm_scale: float, deterministic: bool, backend: str, config: str, lists: Lists = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a checked backward: `(dq, dkv, d_sink)` in the caller's form; a caller's `dkv` is added into and returned."""
    problem = call.problem
    choice = _choose_for(call, backend, config, lists, BACKWARD, deterministic)
    options: dict[str, Any] = dict(
        sm_scale=sm_scale, dlse=call.dlse, q_positions=call.q_positions, topk_length=call.topk_length,
        attn_sink=call.attn_sink, dkv=call.dkv, dkv_dtype=call.dkv_dtype, deterministic=deterministic,
    )  # fmt: skip
    tensors = (call.q, call.kv, call.out, call.dout, call.indices, call.lse)
    with _on_device(call.q.device):
        if choice.backend == REFERENCE or problem.is_empty:
            dq, dkv, d_sink, _ = reference.backward(*tensors, causal=problem.causal, **options)
        elif _is_external(choice.backend):
            dq, dkv, d_sink = external(choice.backend).bwd(call, sm_scale, deterministic)
        else:
            dq, dkv, d_sink = load(choice.backend).bwd(problem, choice.config, *tensors, lists=lists, **options)
    return (dq.squeeze_(0), dkv.squeeze_(0), d_sink) if problem.packed else (dq, dkv, d_sink)


def make_lists(call: ListsCall, tokens: int, decide: bool, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(rows, bits, lengths, chosen)` of a checked call's gather lists for tiles of so many tokens."""
    device = call.indices.device
    config = SparseAttentionConfig(tokens_per_tile=tokens)
    # Lists are for the package's own kernels, whoever else runs the other pass.
    own = "" if backend == FASTEST or _is_external(backend) else backend
    choice = _chosen(call.problem, device.type, env.capability(device), own, config)
    with _on_device(device):
        return load(choice.backend).make_lists(
            call.problem, tokens, call.indices, call.topk_length, call.q_positions, decide
        )


def max_scores(call: Call, sm_scale: float) -> Tensor:
    """The largest score of each row of a checked call, fp32 in the caller's form; always the reference."""
    with _on_device(call.q.device):
        largest = reference.max_scores(
            call.q, call.kv, call.indices, sm_scale=sm_scale, causal=call.problem.causal,
            q_positions=call.q_positions, topk_length=call.topk_length,
        )  # fmt: skip
    return largest.squeeze_(0) if call.problem.packed else largest


def warmup(
    problem: Problem, device_type: str, capability: tuple[int, int] | None, backend: str,
    config: SparseAttentionConfig, include_backward: bool,
) -> Choice:  # fmt: skip
    """Compile what a call like `problem` would need, without data."""
    # A placeholder length: kernels are compiled for any B, S, S_kv and K.
    problem = replace(problem, B=1, S=1, S_kv=1, K=1)
    choices = [choose(problem, device_type, capability, backend, config, FORWARD)]
    if include_backward:
        choices.append(choose(problem, device_type, capability, backend, config, BACKWARD))
    own = {c.backend: c.config for c in choices if c.backend != REFERENCE and not _is_external(c.backend)}
    for name, filled in own.items():
        load(name).warmup(problem, filled, include_backward and choices[-1].backend == name)
    return choices[0]
