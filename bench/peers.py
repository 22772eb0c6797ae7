"""Adapters for other implementations of sparse MLA. Nothing is imported unless an adapter is asked for.

Each adapter names its peer's conventions where they differ from the contract's, and converts exactly:

    FlashMLA         flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length) ->
                     (out, max_logits, lse); forward only; 64 or 128 heads, K a multiple of 128 (SM90), int32 [T, 1, K];
                     natural-log lse without the sink, +inf for a row without a valid slot.
    TileLang example tile-ai/tilelang examples/deepseek_v32: sparse_mla_fwd_interface(q, kv, indices, sm_scale=...) and
                     sparse_mla_bwd(q, kv, o, do, indices, lse, sm_scale=...), batched, D 576, no sink, K a multiple of
                     128; log2 lse; a slot counts when `index <= token number` (the pipelined forward: plus a start), so
                     -1 counts and the filler must be S_kv. The backward needs S_kv == T to compute the contract. The
                     pipelined forward (at a35008a) never stores its lse, leaves stale shared memory where a slot is
                     invalid and reads the row sums of the other warpgroup without a barrier: it misses its
                     verification. Compiled by TileLang 0.1.15 some launches do not end: of the barriers that the
                     compiler puts between accesses to shared memory, those of the copy warpgroup and of the first
                     matrix warpgroup have one number, 3, for 128 threads each, so either lets warps of the other
                     through. `tilelang_example_own_barriers` gives the copy warpgroup a number of its own.
    miles            deepseek_v4 ops of radixark/miles, the example's form for D 512: sparse_mqa_fwd_interface(q, kv,
                     sink, indices, sm_scale), sparse_mqa_bwd_interface(q, kv, sink, o, do, indices, lse, sm_scale);
                     kv [B, S_kv, D]; -1 is the only filler; log2 lse with the sink's share; a sink is required (-inf
                     is none).
    cuDNN frontend   cudnn.DSA.sparse_attention_backward_wrapper(q, kv, out, dout, lse, attn_sink, topk_idxs,
                     softmax_scale, topk_length) -> dq, dkv, d_sink; kv [S_kv, D]; natural-log lse without the sink; a
                     sink is required (-inf is none); SM90 2 heads and more. Its forward
                     (sparse_attention_forward_wrapper) runs on SM100 only: 64 heads, or 128 at D 512.
    masked_dense     plain torch over all rows with a mask (masked_dense.py); needs no place and runs on a CPU.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_sparse_mla import env
from cute_sparse_mla.errors import ArgumentValueError, MissingDependencyError
from cute_sparse_mla.indices import pad_slots
from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.problem import Problem
from cute_sparse_mla.scales import LOG2_E

from .implementations import BWD, FWD, Call, Gradients, Implementation
from .loading import load_module, version_of
from .masked_dense import MaskedDense


def _capability_major(device: torch.device) -> int | None:
    capability = env.capability(device)
    return capability[0] if capability else None


def _common_limits(problem: Problem, dtypes: tuple[torch.dtype, ...], D: tuple[int, ...]) -> str:
    if problem.G != 1:
        return "one kv group only"
    if problem.D not in D or problem.d_v != 512:
        return f"D in {D} with d_v 512 only"
    if problem.dtype not in dtypes:
        return f"dtypes {', '.join(str(d).removeprefix('torch.') for d in dtypes)} only"
    return ""


def _int32_rows(inputs: Inputs) -> Tensor:
    """`indices` as contiguous int32 `[T, K]`."""
    rows = inputs.indices if inputs.indices.dim() == 2 else inputs.indices[:, 0]
    return rows.int().contiguous()


# -- FlashMLA ------------------------------------------------------------------------------------------------------


class _FlashMLACall(Call):
    HEADS, SLOTS = (64, 128), 128

    def __init__(self, inputs: Inputs, function: Callable) -> None:
        super().__init__(inputs)
        self.function = function
        self.heads = inputs.q.shape[1]
        self.extra_heads = next(h for h in self.HEADS if h >= self.heads) - self.heads
        self.rows = _int32_rows(inputs).unsqueeze(1)
        self.extra_slots = -self.rows.shape[-1] % self.SLOTS

    def fwd(self) -> Any:
        i, q, rows, sink = self.inputs, self.inputs.q, self.rows, self.inputs.attn_sink
        if self.extra_heads:
            q = pad(q, (0, 0, 0, self.extra_heads))
            sink = None if sink is None else pad(sink, (0, self.extra_heads))
        if self.extra_slots:
            rows = pad_slots(rows, self.SLOTS)
        out, _, lse = self.function(
            q, i.kv, rows, i.sm_scale, d_v=i.d_v, attn_sink=sink, topk_length=i.topk_length
        )  # fmt: skip
        return out[:, : self.heads], lse[:, : self.heads]

    def bwd(self, state: Any) -> Any:
        raise NotImplementedError("FlashMLA has no sparse backward")

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        out, lse = state
        return out, lse.masked_fill(lse == math.inf, -math.inf)

    def gradients(self, native: Any) -> Gradients:
        raise NotImplementedError("FlashMLA has no sparse backward")

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        raise NotImplementedError("FlashMLA has no sparse backward")

    def conversions(self) -> str:
        parts = []
        if self.extra_heads:
            parts.append(f"q padded to {self.heads + self.extra_heads} heads (in its time)")
        if self.extra_slots:
            parts.append(f"indices padded by {self.extra_slots} slots (in its time)")
        return ", ".join(parts)


class FlashMLA(Implementation):
    """FlashMLA's sparse prefill forward."""

    name = "flash_mla"

    def __init__(self, where: str | None = None) -> None:
        module = load_module(where, "flash_mla")
        self.function = module.flash_mla_sparse_fwd
        self.version = version_of(module, "flash_mla")

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        if which == BWD:
            return "FlashMLA has no sparse backward"
        if problem.H > 128:
            return "FlashMLA takes at most 128 heads"
        if problem.K == 0:
            return "FlashMLA needs K > 0"
        return _common_limits(problem, (torch.bfloat16,), (512, 576))

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        return _FlashMLACall(inputs, self.function)

    def differs(self, inputs: Inputs, which: str) -> str:
        return _future_rows("FlashMLA", inputs)


def _future_rows(peer: str, inputs: Inputs) -> str:
    """A peer without a causal mask computes the contract only where no row holds a slot above its bound."""
    if not inputs.causal:
        return ""
    T, S_kv = inputs.q.shape[0], inputs.kv.shape[0]
    bounds = inputs.q_positions
    if bounds is None:
        bounds = torch.arange(S_kv - T, S_kv, device=inputs.q.device)
    rows = _int32_rows(inputs)
    if bool(((rows > bounds[:, None]) & (rows < S_kv)).any()):
        return f"{peer} has no causal mask and rows hold slots above their bounds"
    return ""


# -- TileLang example ----------------------------------------------------------------------------------------------


class _TileLangCall(Call):
    SLOTS = 128

    def __init__(self, inputs: Inputs, fwd: Callable | None, bwd: Callable | None, start: int) -> None:
        super().__init__(inputs)
        self.run_fwd, self.run_bwd = fwd, bwd
        S_kv = inputs.kv.shape[0]
        rows = _int32_rows(inputs)
        # -1 would pass the example's only test, index <= token number; S_kv fails it.
        self.rows = rows.masked_fill((rows < 0) | (rows >= S_kv), S_kv)[None, :, None].contiguous()
        self.q, self.kv, self.dout = (t.contiguous()[None] for t in (inputs.q, inputs.kv, inputs.dout))
        self.extra_slots = -self.rows.shape[-1] % self.SLOTS
        self.start_options = {} if fwd is None else _start_options(fwd, start)

    def _rows(self) -> Tensor:
        return pad(self.rows, (0, self.extra_slots), value=self.kv.shape[1]) if self.extra_slots else self.rows

    def fwd(self) -> Any:
        assert self.run_fwd is not None
        scale = self.inputs.sm_scale
        out, lse = self.run_fwd(self.q, self.kv, self._rows(), sm_scale=scale, **self.start_options)
        return out, lse

    def bwd(self, state: Any) -> Any:
        assert self.run_bwd is not None
        out, lse = state
        return self.run_bwd(self.q, self.kv, out, self.dout, self._rows(), lse, sm_scale=self.inputs.sm_scale)

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        out, lse = state
        return out[0], lse[0] / LOG2_E

    def gradients(self, native: Any) -> Gradients:
        dq, dkv = native[:2]
        return dq[0], dkv[0], None

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        return out.contiguous()[None], (lse * LOG2_E)[None]

    def conversions(self) -> str:
        text = "invalid slots filled with S_kv, lse between log2 and ln (not in its time)"
        return text + (f", indices padded by {self.extra_slots} slots (in its time)" if self.extra_slots else "")


def _start_options(function: Callable, start: int) -> dict[str, int]:
    """Keywords that tell the pipelined forward where queries start; the plain one has none."""
    names = inspect.signature(function).parameters
    options = {"q_start_index_s": start} if "q_start_index_s" in names else {}
    return options | ({"kv_stride": 1} if "kv_stride" in names else {})


class TileLangExample(Implementation):
    """The sparse MLA example of TileLang, or a copy of it with the same two entry points.

    `where` is a folder with `sparse_mla_fwd_pipelined.py` or `sparse_mla_fwd.py`, and `sparse_mla_bwd.py`; one file; or
    a module that has both functions.
    """

    name = "tilelang_example"
    FORWARD, BACKWARD = "sparse_mla_fwd_interface", "sparse_mla_bwd"
    THREADS: int | None = None

    def __init__(self, where: str | None = None) -> None:
        if where is None:
            raise ArgumentValueError("--peer", f"{self.name} needs {self.name}=FOLDER, FILE or MODULE", None)
        folder = Path(where)
        if folder.is_dir():
            names = ("sparse_mla_fwd_pipelined", "sparse_mla_fwd", "sparse_mla_bwd")
            files = [folder / f"{name}.py" for name in names if (folder / f"{name}.py").is_file()]
            if not files:
                raise ArgumentValueError("--peer", f"the folder must hold one of {', '.join(names)} (.py)", where)
            # The pipelined forward before the plain one: it is the faster, and takes a start position.
            modules = [load_module(str(file), file.stem) for file in files]
        else:
            modules = [load_module(where, where)]
        self.fwd = next((getattr(m, self.FORWARD) for m in modules if hasattr(m, self.FORWARD)), None)
        self.bwd = next((getattr(m, self.BACKWARD) for m in modules if hasattr(m, self.BACKWARD)), None)
        if self.fwd is None and self.bwd is None:
            raise ArgumentValueError("--peer", f"must have {self.FORWARD} or {self.BACKWARD}", where)
        self.version = version_of(modules[0])
        if self.THREADS is not None:
            self.fwd = None
            self.bwd = next((_backward_with(m, self.THREADS) for m in modules if hasattr(m, self.BACKWARD)), None)

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        if (self.fwd if which == FWD else self.bwd) is None:
            return f"this copy of the example has no {'forward' if which == FWD else 'backward'}"
        if problem.has_sink:
            return "the TileLang example has no attention sink"
        if problem.has_topk_length:
            return "the TileLang example has no topk_length"
        if problem.H > 64 and problem.H % 64:
            return "above 64 heads the TileLang example takes multiples of 64"
        if problem.K == 0:
            return "the TileLang example needs K > 0"
        return _common_limits(problem, (torch.bfloat16,), (576,))

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        return _TileLangCall(inputs, self.fwd, self.bwd, _last_tokens_start(inputs))

    def differs(self, inputs: Inputs, which: str) -> str:
        if inputs.causal and inputs.q_positions is not None:
            return "the TileLang example takes no positions"
        start = _last_tokens_start(inputs)
        takes_start = which == FWD and self.fwd is not None and "q_start_index_s" in _start_options(self.fwd, 0)
        if start == 0 or (takes_start and start > 1):
            return "" if inputs.causal or _is_causal(inputs, start) else "the TileLang example is always causal"
        return f"the TileLang example's {which} bounds rows by the token number, here {start} below the position"


class TileLangExample128(TileLangExample):
    """The example's backward built with 128 threads, as it was before it chose them by the head block."""

    name = "tilelang_example_128"
    THREADS = 128


PARTIAL_SYNC = re.compile(r"__sync_thread_partial\((\d+), ")


def own_barriers(code: str) -> str:
    """CUDA code of TileLang with other named barriers in its last role, a copy warpgroup, than in those before it."""
    before, role, copies = code.rpartition("tl::warpgroup_reg_dealloc<")
    used = set(PARTIAL_SYNC.findall(code))
    shared = set(PARTIAL_SYNC.findall(before)) & set(PARTIAL_SYNC.findall(copies))
    free = max(map(int, used), default=0) + 1
    for offset, number in enumerate(sorted(shared)):
        copies = copies.replace(f"__sync_thread_partial({number}, ", f"__sync_thread_partial({free + offset}, ")
    return before + role + copies


class TileLangExampleOwnBarriers(TileLangExample):
    """The example's forward with `own_barriers`. Its kernel must not come from a cache of TileLang's without them."""

    name = "tilelang_example_own_barriers"

    def __init__(self, where: str | None = None) -> None:
        super().__init__(where)
        self.bwd = None
        if self.fwd is not None:
            callback = importlib.import_module("tilelang.engine.callback")
            # Told by an argument of theirs from other kernels that are compiled in this process.
            callback.register_cuda_postproc(lambda code, _: own_barriers(code) if "q_start_index_s" in code else code)


def _backward_with(module: ModuleType, threads: int) -> Callable:
    """The example's `sparse_mla_bwd` from its parts, since it passes no thread count on."""

    def sparse_mla_bwd(
        q: Tensor, kv: Tensor, o: Tensor, do: Tensor, indices: Tensor, lse: Tensor, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        D, tail, groups = o.shape[-1], q.shape[-1] - o.shape[-1], kv.shape[2]
        delta, dkv = module.preprocess(o, do), torch.zeros_like(kv, dtype=torch.float32)
        dq = module.bwd(
            q, kv, do, indices, lse, delta, dkv, q.shape[2], D, tail, indices.shape[-1], groups, sm_scale, True,
            threads=threads,
        )  # fmt: skip
        return dq, module.postprocess(dkv, D, tail, groups)

    return sparse_mla_bwd


def _last_tokens_start(inputs: Inputs) -> int:
    """Position of the first query when queries are the last tokens."""
    return inputs.kv.shape[0] - inputs.q.shape[0]


def _is_causal(inputs: Inputs, start: int) -> bool:
    """Whether no token has a slot above its own position."""
    rows = _int32_rows(inputs)
    bounds = torch.arange(start, start + rows.shape[0], device=rows.device)
    return not bool(((rows > bounds[:, None]) & (rows < inputs.kv.shape[0])).any())


# -- the example's form in miles, for D 512 ------------------------------------------------------------------------


class _MilesCall(Call):
    def __init__(self, inputs: Inputs, fwd: Callable, bwd: Callable) -> None:
        super().__init__(inputs)
        self.run_fwd, self.run_bwd = fwd, bwd
        rows, S_kv = _int32_rows(inputs), inputs.kv.shape[0]
        self.rows = rows.masked_fill((rows < 0) | (rows >= S_kv), -1)[None].contiguous()
        self.q, self.kv, self.dout = (t.contiguous()[None] for t in (inputs.q, inputs.kv[:, 0], inputs.dout))
        no_sink = torch.full((inputs.q.shape[1],), -math.inf, device=inputs.q.device)
        self.sink = no_sink if inputs.attn_sink is None else inputs.attn_sink

    def fwd(self) -> Any:
        return self.run_fwd(self.q, self.kv, self.sink, self.rows, sm_scale=self.inputs.sm_scale)

    def bwd(self, state: Any) -> Any:
        out, lse = state
        return self.run_bwd(
            self.q, self.kv, self.sink, out, self.dout, self.rows, lse, sm_scale=self.inputs.sm_scale
        )  # fmt: skip

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        out, lse = state[0][0], state[1][0] / LOG2_E
        # Theirs counts the sink's share.
        return out, lse + torch.log1p(-torch.exp(self.sink - lse))

    def gradients(self, native: Any) -> Gradients:
        dq, dkv, d_sink = native
        return dq[0], dkv[0, :, None], None if self.inputs.attn_sink is None else d_sink

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        return out.contiguous()[None], (torch.logaddexp(lse, self.sink) * LOG2_E)[None]

    def conversions(self) -> str:
        return "lse between log2 with the sink and ln without (not in its time)"


class Miles(Implementation):
    """The DeepSeek-V4 sparse MLA of miles (radixark/miles, `deepseek_v4/ops/kernel`): the example's form for D 512.

    `where` is a folder with `tilelang_sparse_mla_fwd.py` and `tilelang_sparse_mla_bwd.py`.
    """

    name = "miles_v4"

    def __init__(self, where: str | None = None) -> None:
        if where is None:
            raise ArgumentValueError("--peer", "miles_v4 needs miles_v4=FOLDER", None)
        forward, backward = (
            load_module(str(Path(where) / f"{name}.py"), name)
            for name in ("tilelang_sparse_mla_fwd", "tilelang_sparse_mla_bwd")
        )
        self.fwd, self.bwd = forward.sparse_mqa_fwd_interface, backward.sparse_mqa_bwd_interface
        self.version = version_of(forward)

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        if problem.has_topk_length:
            return "miles has no topk_length"
        if problem.H > 64 and problem.H % 64:
            return "above 64 heads miles takes multiples of 64"
        if problem.K == 0:
            return "miles needs K > 0"
        return _common_limits(problem, (torch.bfloat16,), (512,))

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        return _MilesCall(inputs, self.fwd, self.bwd)

    def differs(self, inputs: Inputs, which: str) -> str:
        return _future_rows("miles", inputs)


# -- cuDNN ---------------------------------------------------------------------------------------------------------


class _CuDNNCall(Call):
    def __init__(self, inputs: Inputs, dsa: Any) -> None:
        super().__init__(inputs)
        self.dsa = dsa
        self.rows = _int32_rows(inputs)
        self.q, self.kv, self.dout = inputs.q.contiguous(), inputs.kv[:, 0].contiguous(), inputs.dout.contiguous()
        no_sink = torch.full((inputs.q.shape[1],), -math.inf, device=inputs.q.device)
        self.sink = no_sink if inputs.attn_sink is None else inputs.attn_sink

    def fwd(self) -> Any:
        i = self.inputs
        done = self.dsa.sparse_attention_forward_wrapper(
            self.q, self.kv, self.rows, attn_sink=i.attn_sink, topk_length=i.topk_length, softmax_scale=i.sm_scale
        )
        return done["out"], done["lse"]

    def bwd(self, state: Any) -> Any:
        i, (out, lse) = self.inputs, state
        done = self.dsa.sparse_attention_backward_wrapper(
            self.q, self.kv, out, self.dout, lse, self.sink, self.rows, softmax_scale=i.sm_scale,
            topk_length=i.topk_length,
        )  # fmt: skip
        return done["dq"], done["dkv"], done["d_sink"]

    def out_lse(self, state: Any) -> tuple[Tensor, Tensor]:
        out, lse = state
        return out, lse.masked_fill(lse == math.inf, -math.inf)

    def gradients(self, native: Any) -> Gradients:
        dq, dkv, d_sink = native
        return dq, dkv[:, None], None if self.inputs.attn_sink is None else d_sink

    def adopt(self, out: Tensor, lse: Tensor) -> Any:
        return out.contiguous(), lse.contiguous()

    def conversions(self) -> str:
        return "" if self.inputs.attn_sink is not None else "a sink of -inf stands for none"


class CuDNN(Implementation):
    """The sparse attention of the cuDNN frontend's DSA namespace."""

    name = "cudnn"
    FORWARD_SHAPES = ((64, 512), (64, 576), (128, 512))

    def __init__(self, where: str | None = None) -> None:
        module = load_module(where, "cudnn")
        if not hasattr(module, "DSA"):
            raise MissingDependencyError("module cudnn has no DSA: nvidia-cudnn-frontend 1.32 or newer is needed")
        self.dsa = module.DSA
        self.version = version_of(module, "nvidia-cudnn-frontend")

    def unsupported(self, problem: Problem, which: str, device: torch.device) -> str:
        if which == FWD:
            if _capability_major(device) != 10:
                return "cuDNN's sparse forward runs on compute capability 10.x only"
            if (problem.H, problem.D) not in self.FORWARD_SHAPES:
                return f"cuDNN's sparse forward takes (heads, D) in {self.FORWARD_SHAPES} only"
        elif problem.H < 2:
            return "cuDNN's sparse backward takes 2 heads and more"
        return _common_limits(problem, (torch.bfloat16, torch.float16), (512, 576))

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        return _CuDNNCall(inputs, self.dsa)

    def differs(self, inputs: Inputs, which: str) -> str:
        return _future_rows("cuDNN", inputs)


_ADAPTERS = (FlashMLA, TileLangExample, TileLangExampleOwnBarriers, TileLangExample128, Miles, CuDNN, MaskedDense)
PEERS: dict[str, Callable[[str | None], Implementation]] = {peer.name: peer for peer in _ADAPTERS}
