"""Every check of arguments, once, at the door: before a backend is chosen and before anything is compiled.

The checks read shapes, strides, dtypes and addresses only, never device data. Each message names the argument, the
rule and what came. Nothing here uses `assert`, so `python -O` changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from .config import SparseAttentionConfig
from .errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from .problem import KERNEL_DTYPES, MAX_HEADS_PER_GROUP, MaybeTensor, Problem, default_d_v, default_scale

ROW_ALIGNMENT = 16  # bytes
SCALE_RULE = "must be a finite number >= 0 (Python or numpy scalar, or a 0-dim CPU tensor)"
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Call:
    """A checked call: its facts and its tensors as batched views (a packed call gets a leading axis of 1)."""

    problem: Problem
    q: Tensor
    kv: Tensor
    indices: Tensor
    q_positions: Tensor | None
    topk_length: Tensor | None
    attn_sink: Tensor | None


@dataclass(frozen=True)
class ListsCall:
    """What says which rows a call reads, checked and batched; dtype and d_v of the problem stand for any."""

    problem: Problem
    indices: Tensor
    q_positions: Tensor | None
    topk_length: Tensor | None


@dataclass(frozen=True)
class BackwardCall(Call):
    """A checked backward call; `dkv` is the caller's fp32 buffer or `None`, `dkv_dtype` what is returned."""

    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None
    dkv: Tensor | None
    dkv_dtype: torch.dtype


# -- scalars and flags, normalised once in the front-end ----------------------------------------------------------


def scale(sm_scale: Any) -> tuple[float | None, Tensor | None]:
    """`sm_scale` for the custom ops: a Python float, or a 0-dim CPU tensor where a traced graph has no value yet.

    `None` stays `None`: the ops fill in `D ** -0.5`. A CUDA tensor is refused: reading it would synchronise.
    """
    if sm_scale is None:
        return None, None
    if torch.compiler.is_compiling():
        return _traced_scale(sm_scale)
    if isinstance(sm_scale, Tensor):
        _scale_tensor(sm_scale)
        if is_fake(sm_scale):
            return None, sm_scale
        sm_scale = sm_scale.item()
    if isinstance(sm_scale, bool) or not _is_real(sm_scale):
        raise ArgumentTypeError("sm_scale", SCALE_RULE, type(sm_scale).__name__)
    try:
        value = float(sm_scale)
    except OverflowError:
        value = math.inf
    return scale_value(value), None


def _traced_scale(sm_scale: Any) -> tuple[float | None, Tensor | None]:
    """`scale` inside a traced function, where numbers may be symbols; the op looks at the value when it runs.

    A custom op would fix a symbolic float to its first value and recompile for the next, so the symbol enters as a
    tensor, by a product that torch can make one with tensors only. A constant stays a constant: a CPU tensor in the
    graph would keep it out of CUDA graphs.
    """
    # Here, because it imports sympy: half a second, which whoever traces has paid already.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if isinstance(sm_scale, bool):
        raise ArgumentTypeError("sm_scale", SCALE_RULE, "bool")
    if isinstance(sm_scale, (int, float, torch.SymInt, torch.SymFloat)):
        # True of constants; of a symbol nothing is known, and nothing is guarded.
        if not isinstance(sm_scale, torch.SymInt) and statically_known_true(cast(bool, sm_scale >= 0)):
            return cast(float, sm_scale) * 1.0, None
        return None, torch.ones((), dtype=torch.float64, device="cpu") * cast(float, sm_scale)
    if not isinstance(sm_scale, Tensor):
        if not hasattr(sm_scale, "dtype"):
            raise ArgumentTypeError("sm_scale", SCALE_RULE, type(sm_scale).__name__)
        # A numpy scalar, which a traced function sees as a 0-dim array.
        sm_scale = torch.as_tensor(sm_scale, device="cpu")
    _scale_tensor(sm_scale)
    return None, sm_scale


def _scale_tensor(sm_scale: Tensor) -> None:
    if sm_scale.device.type != "cpu":
        rule = f"{SCALE_RULE}: reading a device tensor would synchronise"
        raise ArgumentTypeError("sm_scale", rule, sm_scale.device)
    if sm_scale.dim() != 0 or sm_scale.is_complex() or sm_scale.dtype == torch.bool:
        raise ArgumentTypeError("sm_scale", SCALE_RULE, f"a tensor of shape {list(sm_scale.shape)}, {sm_scale.dtype}")
    if sm_scale.requires_grad:
        raise ArgumentTypeError("sm_scale", f"{SCALE_RULE}; it gets no gradient", "a tensor that requires grad")
    refuse_forward_mode(sm_scale)


def scale_of(sm_scale: float | None, traced: Tensor | None, D: int) -> float:
    """The value of a pair that `scale` gave, checked; `D ** -0.5` for none. Reads no device memory."""
    if traced is not None:
        _scale_tensor(traced)
        return scale_value(float(traced.item()))
    return default_scale(D) if sm_scale is None else scale_value(sm_scale)


def scale_value(value: float) -> float:
    """The scale's value, checked."""
    if not math.isfinite(value) or value < 0:
        raise ArgumentValueError("sm_scale", SCALE_RULE, value)
    if value > torch.finfo(torch.float32).max:
        raise ArgumentValueError("sm_scale", "must be finite in fp32, in which scores are computed", value)
    return value


def _is_real(value: object) -> bool:
    if isinstance(value, Real):
        return True
    # numpy's float16 and 0-dim arrays are not registered as Real; its texts and complex numbers convert all the same.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind in ("f", "i", "u") and getattr(value, "shape", None) == ()


def flag(name: str, value: Any) -> bool:
    """A real `bool`; a truthy something else is a mistake more often than a wish."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(name, "must be True or False", type(value).__name__)
    return value


def value_width(d_v: Any, D: int) -> int:
    """`d_v`, or 512 at D 512 and 576 when it is not given."""
    if d_v is None:
        d_v = default_d_v(D)
        if d_v is None:
            raise ArgumentValueError("d_v", f"must be given when D is not 512 or 576 (D = {D})", None)
    return count("d_v", d_v, D, f"D = {D}")


def integer(name: str, value: Any) -> int:
    """An int, numpy's too, but no bool."""
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise ArgumentTypeError(name, "must be an int", type(value).__name__)
    # A size of a graph with dynamic shapes stays symbolic.
    return cast(int, value) if isinstance(value, torch.SymInt) else int(value)


def at_least(name: str, value: Any, low: int) -> int:
    """An int from `low` on."""
    number = integer(name, value)
    if number < low:
        raise ArgumentValueError(name, f"must be at least {low}", number)
    return number


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """A shape: a sequence of ints of at least 0."""
    if not isinstance(value, (tuple, list)):
        raise ArgumentTypeError(name, "must be a shape, a sequence of ints", type(value).__name__)
    numbers = tuple(integer(name, number) for number in value)
    if any(number < 0 for number in numbers):
        raise ArgumentValueError(name, "must be a shape, of ints of at least 0", list(numbers))
    return numbers


def place(device: Any) -> torch.device:
    """A device, or the name of one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentValueError("device", "must be a torch device or its name", repr(device)) from error


def dtype_of(name: str, value: Any, allowed: tuple[torch.dtype, ...]) -> None:
    """One of these dtypes."""
    if not isinstance(value, torch.dtype) or value not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ArgumentTypeError(
            name, f"must be {names}", value if isinstance(value, torch.dtype) else type(value).__name__
        )


def count(name: str, value: Any, high: int, limit: str) -> int:
    """An int in `1..high`, where `limit` is how the message calls `high`."""
    number = integer(name, value)
    if not 1 <= number <= high:
        raise ArgumentValueError(name, f"must lie in 1..{limit}", number)
    return number


def capability(value: Any) -> tuple[int, int]:
    """A compute capability, `(major, minor)`."""
    if not isinstance(value, tuple) or len(value) != 2 or not all(type(part) is int for part in value):
        raise ArgumentTypeError("capability", "must be (major, minor), two ints", repr(value))
    if min(value) < 0:
        raise ArgumentValueError("capability", "must be (major, minor), two ints of at least 0", repr(value))
    return value


def encoded_config(config: Any) -> str:
    """The caller's config as text for the custom op."""
    if config is None:
        return "{}"
    if not isinstance(config, SparseAttentionConfig):
        raise ArgumentTypeError("config", "must be a SparseAttentionConfig or None", type(config).__name__)
    return config.encode()


def backend_name(backend: Any) -> str:
    """The wished backend's name, `""` for the device's own."""
    if backend is None:
        return ""
    if not isinstance(backend, str) or not backend:
        raise ArgumentTypeError("backend", "must be a backend's name or None", repr(backend))
    return backend


def tensors(optional: tuple[str, ...] = (), **named: Any) -> None:
    """Everything named is a tensor; only those in `optional` may be `None`."""
    for name, value in named.items():
        if value is None and name in optional:
            continue
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(name, "must be a torch.Tensor", type(value).__name__)
        if value.layout != torch.strided or value.is_nested:
            raise ArgumentTypeError(name, "must be a dense (strided) tensor", value.layout)


def updatable(name: str, tensor: Tensor) -> None:
    """Torch refuses to change such tensors only after all has been computed."""
    # A traced function cannot ask.
    if torch.compiler.is_compiling():
        return
    if tensor.is_neg():
        raise ArgumentValueError(name, "must be writable", "a view that is negated when it is read")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentValueError(name, "must be writable", "a tensor of inference mode, outside of it")


def destination(name: str, tensor: Tensor) -> None:
    """A tensor that results are copied into, of any strides: no two of its elements may be one."""
    axes = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    for i, (_, stride) in enumerate(axes):
        # Without a sort, which cannot be traced where sizes are symbols.
        extent = 1 + sum((n - 1) * s for j, (n, s) in enumerate(axes) if j != i and s <= stride)
        if stride < extent and 0 not in tensor.shape:
            rule = "elements must not overlap (stride 0, or less than the extent of smaller strides)"
            raise ArgumentValueError(name, rule, f"shape {list(tensor.shape)}, strides {tensor.stride()}")
    updatable(name, tensor)
    # A leaf, a view of one and one of several views of a tensor: torch refuses to change each of them. A graph that
    # another destination belongs to would lose its gradient.
    if tensor.requires_grad and torch.is_grad_enabled():
        rule = "must not require a gradient while gradients are recorded: write it under torch.no_grad()"
        raise ArgumentValueError(name, rule, "a tensor that requires one")


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Forward-mode AD would silently see a derivative of zero: custom ops have no rule for it."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError("forward-mode automatic differentiation is not supported; use reverse mode (backward)")


def refuse_function_transforms(*tensors: Tensor | None) -> None:
    """Torch refuses them with the name of an autograd.Function that no caller has written."""
    if torch.compiler.is_compiling() or not (torch._C._are_functorch_transforms_active() and torch.is_grad_enabled()):
        return
    for tensor in tensors:
        while tensor is not None and functorch.is_batchedtensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        if tensor is not None and functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            raise UnsupportedError(
                "gradients by torch.func (grad, vjp, jacrev) are not supported; use torch.autograd.grad or backward"
            )


# -- one line per tensor and property ------------------------------------------------------------------------------


def _dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], why: str = "") -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ArgumentTypeError(name, f"dtype must be {names}{why}", tensor.dtype)


def _shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ArgumentValueError(name, f"shape must be [{letters}] = {list(expected)}", list(tensor.shape))


def _device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ArgumentValueError(name, f"must be on q's device {device}", tensor.device)


def _layout_fault(tensor: Tensor, pointers: bool, is_output: bool = False) -> tuple[str, object] | None:
    """The first rule of the row layout that a tensor breaks, or `None`: (rule, what came).

    `is_output` is for `out` and `dout`: rows of an odd d_v only need the alignment that they can have, and rows may be
    expanded (stride 0), since they are only read once each.
    """
    if 0 in tensor.shape:
        return None
    shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
    alignment = math.gcd(ROW_ALIGNMENT, shape[-1] * size) if is_output else ROW_ALIGNMENT
    if shape[-1] > 1 and strides[-1] != 1:
        return "last dimension must be contiguous (stride 1)", f"strides {strides}"
    for length, stride in zip(shape[:-1], strides[:-1], strict=True):
        if length == 1:
            continue
        if stride == 0 and not is_output:
            return "must not be expanded (stride 0): its rows are read in place", f"strides {strides}"
        if stride * size % alignment:
            return f"rows must start on {alignment} bytes", f"strides {strides} of {size}-byte elements"
    if pointers and tensor.data_ptr() % alignment:
        return f"rows must start on {alignment} bytes", f"an address {tensor.data_ptr() % alignment} bytes past"
    return None


def _has_address(tensor: Tensor) -> bool:
    # Fake and functional tensors (torch.compile, AOT autograd) and the meta device have no memory to look at.
    if tensor.device.type == "meta" or is_fake(tensor):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def rows_readable(dout: Tensor) -> bool:
    """Whether the gradient of `out` can be read in place under the row layout of the contract."""
    return _layout_fault(dout, _has_address(dout), is_output=True) is None


def layout(name: str, tensor: Tensor, is_output: bool = False) -> None:
    """Refuse rows that cannot be read in place."""
    fault = _layout_fault(tensor, _has_address(tensor), is_output)
    if fault is not None:
        raise ArgumentValueError(name, *fault)


def _kv_strides(kv: Tensor) -> None:
    """B, S_kv and G strides are multiples of the smallest: rows are then one flat table for a tensor map."""
    if 0 in kv.shape:
        return
    strides = [s for length, s in zip(kv.shape[:-1], kv.stride()[:-1], strict=True) if length > 1]
    if any(isinstance(s, torch.SymInt) for s in strides):
        # The smallest of symbols is a guard on lengths, which an exported range refuses; the op asks when it runs.
        return
    if strides and any(s % min(strides) for s in strides):
        rule = "its B, S_kv and G strides must be multiples of the smallest of them"
        raise ArgumentValueError("kv", rule, f"strides {kv.stride()}")


# -- whole calls ---------------------------------------------------------------------------------------------------

# What calls passed before, by all that the checks look at: a training step repeats them. Nothing that failed is kept.
_passed: dict[tuple | None, Any] = {}
MOST_PASSED = 4096
_PLAIN = (Tensor, torch.nn.Parameter)


def _seen(kind: str, tensors: tuple[Tensor | None, ...], *options: object) -> tuple | None:
    """The facts of a call, by which `_passed` knows it; `None` where tensors have no address or sizes are symbols."""
    facts: list[object] = [kind]
    for tensor in tensors:
        if tensor is None:
            facts.append(None)
            continue
        if type(tensor) not in _PLAIN:
            return None
        try:
            address = tensor.data_ptr() % ROW_ALIGNMENT
        except RuntimeError:
            return None
        facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address))
    # As text: 1, 1.0 and True are equal, and a wrong option may have no hash.
    return (*facts, repr(options))


def _pass(key: tuple | None, found: Any) -> None:
    if key is not None:
        if len(_passed) >= MOST_PASSED:
            _passed.clear()
        _passed[key] = found


def _batched(tensor: MaybeTensor, packed: bool) -> MaybeTensor:
    return tensor.unsqueeze(0) if packed and tensor is not None else tensor


def row_width(q: Tensor) -> int:
    """D of a `q` of the right rank, at least 1."""
    if q.dim() not in (3, 4):
        raise ArgumentValueError("q", "must be [B, S, H, D] or packed [T, H, D]", f"shape {list(q.shape)}")
    if 0 in q.shape[-2:]:
        raise ArgumentValueError("q", "must have at least one head and one column", f"shape {list(q.shape)}")
    return q.shape[-1]


def _ranks(q: Tensor, kv: Tensor, indices: Tensor) -> bool:
    """Check ranks; `True` for a packed call."""
    row_width(q)
    packed = q.dim() == 3
    if kv.dim() != q.dim():
        letters = "[T_kv, G, D] (q is packed)" if packed else "[B, S_kv, G, D] (q is batched)"
        raise ArgumentValueError("kv", f"must be {letters}", f"shape {list(kv.shape)}")
    if indices.dim() not in (q.dim(), q.dim() - 1):
        letters = "[T, G, K]" if packed else "[B, S, G, K]"
        raise ArgumentValueError("indices", f"must be {letters}", f"shape {list(indices.shape)}")
    if indices.dim() == q.dim() - 1 and kv.shape[-2] != 1:
        rule = f"may leave out its G axis only when kv has one group (G = {kv.shape[-2]})"
        raise ArgumentValueError("indices", rule, f"shape {list(indices.shape)}")
    return packed


def forward(
    q: Tensor, kv: Tensor, indices: Tensor, *, d_v: int, causal: bool,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
) -> Call:  # fmt: skip
    """Check the tensors that forward and backward share."""
    key = _seen("forward", (q, kv, indices, q_positions, topk_length, attn_sink), d_v, causal)
    problem = _passed.get(key)
    if problem is None:
        problem = _forward_problem(q, kv, indices, d_v, causal, q_positions, topk_length, attn_sink)
        _pass(key, problem)
    packed = problem.packed
    if indices.dim() == q.dim() - 1:
        indices = indices.unsqueeze(-2)
    return Call(
        problem, _batched(q, packed), _batched(kv, packed), _batched(indices, packed),
        _batched(q_positions, packed), _batched(topk_length, packed), attn_sink,
    )  # fmt: skip


def _forward_problem(
    q: Tensor, kv: Tensor, indices: Tensor, d_v: int, causal: bool, q_positions: Tensor | None,
    topk_length: Tensor | None, attn_sink: Tensor | None,
) -> Problem:  # fmt: skip
    packed = _ranks(q, kv, indices)
    _dtype("q", q, KERNEL_DTYPES)
    _dtype("kv", kv, (q.dtype,), " as q")
    _dtype("indices", indices, INDEX_DTYPES)
    named: dict[str, Tensor | None] = {"q": q, "kv": kv, "indices": indices}
    named |= {"q_positions": q_positions, "topk_length": topk_length, "attn_sink": attn_sink}
    for name, tensor in named.items():
        if tensor is not None:
            _device(name, tensor, q.device)

    if indices.dim() == q.dim() - 1:
        indices = indices.unsqueeze(-2)
    lead, (H, D), K = tuple(q.shape[:-2]), q.shape[-2:], indices.shape[-1]
    prefix = "T" if packed else "B, S"
    S_kv, G = kv.shape[-3:-1]
    if G < 1 or H % G:
        raise ArgumentValueError("kv", f"its group count must divide q's head count {H}", f"G = {G}")
    if H // G > MAX_HEADS_PER_GROUP:
        raise ArgumentValueError("q", f"must have at most {MAX_HEADS_PER_GROUP} heads per group", f"{H} / {G}")
    kv_shape = (S_kv, G, D) if packed else (lead[0], S_kv, G, D)
    _shape("kv", kv, kv_shape, "T_kv, G, D" if packed else "B, S_kv, G, D")
    _shape("indices", indices, (*lead, G, K), f"{prefix}, G, K")
    value_width(d_v, D)
    layout("q", q)
    layout("kv", kv)
    _kv_strides(kv)

    _bounds(causal, q_positions, topk_length, lead, prefix)
    if attn_sink is not None:
        _dtype("attn_sink", attn_sink, (torch.float32,))
        _shape("attn_sink", attn_sink, (H,), "H")

    B, S = (1, lead[0]) if packed else lead
    return Problem(
        B, S, S_kv, H, G, K, D, d_v, q.dtype, indices.dtype, causal,
        attn_sink is not None, topk_length is not None, q_positions is not None, packed,
    )  # fmt: skip


def _bounds(
    causal: bool, q_positions: Tensor | None, topk_length: Tensor | None, lead: tuple[int, ...], prefix: str
) -> None:
    if topk_length is not None:
        _dtype("topk_length", topk_length, (torch.int32,))
        _shape("topk_length", topk_length, lead, prefix)
    if q_positions is not None:
        if not causal:
            raise ArgumentValueError("q_positions", "has no effect without causal=True", f"causal={causal}")
        _dtype("q_positions", q_positions, INDEX_DTYPES)
        _shape("q_positions", q_positions, lead, prefix)


def lists(
    indices: Tensor, kv_shape: tuple[int, ...], heads_per_group: int, *, causal: bool, q_positions: Tensor | None,
    topk_length: Tensor | None,
) -> ListsCall:  # fmt: skip
    """Check what says which rows a call reads; `kv_shape` tells packed from batched."""
    # A traced `plan` asks too.
    tracing = torch.compiler.is_compiling()
    options = (kv_shape, heads_per_group, causal)
    key = None if tracing else _seen("lists", (indices, q_positions, topk_length), *options)
    problem = None if tracing else _passed.get(key)
    if problem is None:
        problem = _lists_problem(indices, *options, q_positions, topk_length)
        _pass(key, problem)
    packed = problem.packed
    if indices.dim() == len(kv_shape) - 1:
        indices = indices.unsqueeze(-2)
    return ListsCall(problem, _batched(indices, packed), _batched(q_positions, packed), _batched(topk_length, packed))


def _lists_problem(
    indices: Tensor, kv_shape: tuple[int, ...], heads_per_group: int, causal: bool, q_positions: Tensor | None,
    topk_length: Tensor | None,
) -> Problem:  # fmt: skip
    if len(kv_shape) not in (3, 4):
        raise ArgumentValueError("kv_shape", "must be [B, S_kv, G, D] or packed [T_kv, G, D]", list(kv_shape))
    S_kv, G, D = kv_shape[-3:]
    if G < 1 or D < 1:
        raise ArgumentValueError("kv_shape", "must have at least one group and one column", list(kv_shape))
    heads = count("heads_per_group", heads_per_group, MAX_HEADS_PER_GROUP, str(MAX_HEADS_PER_GROUP))
    packed = len(kv_shape) == 3
    _dtype("indices", indices, INDEX_DTYPES)
    if indices.dim() == len(kv_shape) - 1 and G == 1:
        indices = indices.unsqueeze(-2)
    prefix = "T" if packed else "B, S"
    if indices.dim() != len(kv_shape):
        raise ArgumentValueError(
            "indices", f"must be [{prefix}, G, K] for this kv_shape", f"shape {list(indices.shape)}"
        )
    lead, K = tuple(indices.shape[:-2]), indices.shape[-1]
    expected = (*lead, G, K) if packed else (kv_shape[0], lead[1], G, K)
    _shape("indices", indices, expected, f"{prefix}, G, K")
    for name, tensor in {"q_positions": q_positions, "topk_length": topk_length}.items():
        if tensor is not None and tensor.device != indices.device:
            raise ArgumentValueError(name, f"must be on the device of indices, {indices.device}", tensor.device)
    _bounds(causal, q_positions, topk_length, lead, prefix)
    B, S = (1, lead[0]) if packed else lead
    return Problem(
        B, S, S_kv, G * heads, G, K, D, default_d_v(D) or D, torch.bfloat16, indices.dtype, causal,
        has_topk_length=topk_length is not None, has_q_positions=q_positions is not None, packed=packed,
    )  # fmt: skip


def backward(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, *,
    dlse: Tensor | None, dkv: Tensor | None, dkv_dtype: torch.dtype | None, causal: bool,
    q_positions: Tensor | None, topk_length: Tensor | None, attn_sink: Tensor | None,
) -> BackwardCall:  # fmt: skip
    """Check a backward call; `d_v` is the width of `out`."""
    key = _seen(
        "backward", (q, kv, out, dout, indices, lse, dlse, dkv, q_positions, topk_length, attn_sink), dkv_dtype, causal
    )
    found = _passed.get(key)
    if found is None:
        found = _backward_problem(
            q, kv, out, dout, indices, lse, dlse, dkv, dkv_dtype, causal, q_positions, topk_length, attn_sink
        )
        _pass(key, found)
    problem, returned = found
    packed = problem.packed
    if indices.dim() == q.dim() - 1:
        indices = indices.unsqueeze(-2)
    return BackwardCall(
        problem, _batched(q, packed), _batched(kv, packed), _batched(indices, packed),
        _batched(q_positions, packed), _batched(topk_length, packed), attn_sink, _batched(out, packed),
        _batched(dout, packed), _batched(lse, packed), _batched(dlse, packed), _batched(dkv, packed), returned,
    )  # fmt: skip


def _backward_problem(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, lse: Tensor, dlse: Tensor | None,
    dkv: Tensor | None, dkv_dtype: torch.dtype | None, causal: bool, q_positions: Tensor | None,
    topk_length: Tensor | None, attn_sink: Tensor | None,
) -> tuple[Problem, torch.dtype]:  # fmt: skip
    """The problem, and the dtype of the returned dkv."""
    if out.dim() != q.dim():
        raise ArgumentValueError("out", "must have q's rank", f"shape {list(out.shape)}")
    d_v = out.shape[-1]
    if not 1 <= d_v <= q.shape[-1]:
        raise ArgumentValueError("out", f"its last dimension d_v must lie in 1..D = {q.shape[-1]}", d_v)
    problem = _forward_problem(q, kv, indices, d_v, causal, q_positions, topk_length, attn_sink)
    H = problem.H
    lead, prefix = tuple(q.shape[:-2]), "T" if q.dim() == 3 else "B, S"
    for name, tensor in {"out": out, "dout": dout}.items():
        _device(name, tensor, q.device)
        _dtype(name, tensor, (q.dtype,), " as q")
        _shape(name, tensor, (*lead, H, d_v), f"{prefix}, H, d_v")
        layout(name, tensor, is_output=True)
    row_terms: dict[str, Tensor | None] = {"lse": lse, "dlse": dlse}
    for name, term in row_terms.items():
        if term is None:
            continue
        _device(name, term, q.device)
        _dtype(name, term, (torch.float32,))
        _shape(name, term, (*lead, H), f"{prefix}, H")
    return problem, _dkv_dtype(kv, dkv, dkv_dtype)


def _dkv_dtype(kv: Tensor, dkv: Tensor | None, dkv_dtype: torch.dtype | None) -> torch.dtype:
    """Check the caller's buffer and the wished dtype of dkv; what is returned."""
    if dkv_dtype is not None and not isinstance(dkv_dtype, torch.dtype):
        raise ArgumentTypeError("dkv_dtype", "must be a torch.dtype or None", type(dkv_dtype).__name__)
    if dkv_dtype not in (None, kv.dtype, torch.float32):
        raise ArgumentTypeError("dkv_dtype", f"must be kv's dtype {kv.dtype} or float32", dkv_dtype)
    if dkv is None:
        return dkv_dtype or kv.dtype
    _device("dkv", dkv, kv.device)
    _dtype("dkv", dkv, (torch.float32,), ": gradients are added into it")
    _shape("dkv", dkv, tuple(kv.shape), "as kv")
    if not dkv.is_contiguous():
        raise ArgumentValueError("dkv", "must be contiguous", f"strides {dkv.stride()}")
    layout("dkv", dkv)
    if dkv_dtype not in (None, torch.float32):
        raise ArgumentValueError("dkv_dtype", "must be None or float32 when dkv= is given", dkv_dtype)
    return torch.float32
