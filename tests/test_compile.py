"""torch.compile, AOT autograd, fake tensors and selective checkpointing: one graph for every length and every scale.

On a CPU the reference runs inside the graphs; the twins marked `sm90` run the Hopper kernels, and nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import autograd, compat, dispatch, env
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.precision import Inputs

SMALL = Case(S=6, S_kv=11, H=4, G=2, K=7, D=24, d_v=16, invalid="shuffled", sink="random")
KERNELS = SMALL.but(H=20, G=1, D=576, d_v=512)
DEVICES = (pytest.param("cpu", id="cpu"), pytest.param("cuda", id="sm90", marks=pytest.mark.sm90))
SCALES = (0.1, 0.2, 0.35, 0.05, 0.7)


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs compiled since the test began."""
    return counters["stats"]["unique_graphs"]


def case_for(device: str, case: Case = SMALL) -> Case:
    return case if device == "cpu" else case.but(H=KERNELS.H, G=1, D=KERNELS.D, d_v=KERNELS.d_v)


def gradients(function: Callable, i: Inputs, *rest: Any) -> tuple[Tensor, ...]:
    """out, lse and the gradients of q, kv and the sink of `function(q, kv, sink, indices, *rest)`."""
    assert i.attn_sink is not None
    leaves = [t.clone().requires_grad_() for t in (i.q, i.kv, i.attn_sink)]
    out, lse = function(*leaves, i.indices, *rest)
    torch.autograd.backward((out, lse.masked_fill(lse.isinf(), 0)), (i.dout, torch.ones_like(lse)))
    return out.detach(), lse.detach(), *(t.grad for t in leaves)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Bit for bit on a CPU; on a GPU dkv and d_sink are summed in any order."""
    for mine, other in zip(got, want, strict=True):
        if mine.is_cuda:
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-3)
        else:
            assert torch.equal(mine, other)


def layer(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, d_v: int, sm_scale: Any = None) -> tuple:
    return cute_sparse_mla.sparse_mla(
        q, kv, indices, d_v=d_v, sm_scale=sm_scale, attn_sink=sink, causal=True, return_lse=True
    )


def test_errors_of_arguments_keep_their_text() -> None:
    """In a graph of its own too, where torch may wrap them."""
    i = case_for("cpu").inputs()
    compiled = torch.compile(cute_sparse_mla.sparse_mla, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"sm_scale.*must be"):
        compiled(i.q, i.kv, i.indices, d_v=i.d_v, sm_scale=True)


@pytest.mark.parametrize(("call", "argument"), [
    (lambda i: cute_sparse_mla.sparse_mla(i.q[0, 0], i.kv, i.indices), "q"),
    (lambda i: cute_sparse_mla.sparse_mla(i.q, i.kv, i.indices, d_v=25), "d_v"),
    (lambda i: cute_sparse_mla.plan(i.indices[:, :, 0], i.kv.shape, 2), "indices"),
    (lambda i: compat.sparse_attention(i.q, i.kv[0], i.indices, 0.1, 16), "kv"),
    (lambda i: compat.sparse_mla_bwd(i.q, i.kv, i.q, i.q, i.indices, i.attn_sink), "lse"),
])  # fmt: skip
def test_errors_about_shapes_reach_the_caller(call: Callable[[Inputs], Any], argument: str) -> None:
    """Where sizes are symbols, of which a traced function cannot make a text."""
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception, match=rf"ArgumentValueError\('{argument}', "):
        compiled(SMALL.inputs())


def planned_step(q: Tensor, kv: Tensor, indices: Tensor, options: dict, tokens: int | None = None) -> Tensor:
    """A plan, and a call with it."""
    bounds = {name: options[name] for name in ("causal", "q_positions", "topk_length")}
    plan = cute_sparse_mla.plan(
        indices, kv.shape, heads_per_group=q.shape[-2] // kv.shape[-2], tokens_per_tile=tokens, **bounds
    )
    return cute_sparse_mla.sparse_mla(q, kv, indices, plan=plan, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_can_be_made_inside_a_graph(device: str) -> None:
    """One graph for all lengths; on a GPU the device decides in it whether tokens are grouped."""
    compiled = torch.compile(planned_step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in range(6):
        i = case_for(device).but(S=6 + 3 * n, S_kv=11 + 5 * n, K=7 + n).inputs(seed=n, device=device)
        options = dict(i.options, d_v=i.d_v)
        assert torch.equal(compiled(i.q, i.kv, i.indices, options), planned_step(i.q, i.kv, i.indices, options))
    assert graphs() == 1


@pytest.mark.parametrize("tokens", [None, 2])
def test_a_plan_in_a_graph_asks_no_device(monkeypatch: pytest.MonkeyPatch, tokens: int | None) -> None:
    """On a machine that says it is a Hopper GPU the trace of a plan loads no kernels, whose code it could not take."""
    monkeypatch.setattr(env, "capability", lambda device: (9, 0))
    seen: list[list[str]] = []

    def record(module: torch.fx.GraphModule, _: list) -> Callable:
        seen.append([str(node.target) for node in module.graph.nodes if "sparse_mla." in str(node.target)])
        return lambda *inputs: (torch.zeros(()),)

    compiled = torch.compile(planned_step, fullgraph=True, dynamic=True, backend=record)
    for n in range(3):
        i = KERNELS.but(S=6 + n, S_kv=11 + n, K=7 + n).inputs(seed=n)
        compiled(i.q, i.kv, i.indices, dict(i.options, d_v=i.d_v), tokens)
    made = "lists" if tokens is None else "plan"
    assert seen == [[f"cute_sparse_mla.{name}.default" for name in (made, "fwd")]]


def test_a_plan_is_exported() -> None:
    class Planned(torch.nn.Module):
        def forward(self, q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
            return planned_step(q, kv, indices, dict(causal=True, q_positions=None, topk_length=None, d_v=16))

    def arguments(i: Inputs) -> tuple:
        return i.q, i.kv, i.indices

    S, S_kv, K = (torch.export.Dim(name, min=2, max=1 << 20) for name in ("S", "S_kv", "K"))
    program = torch.export.export(
        Planned(), arguments(SMALL.inputs()), dynamic_shapes=({1: S}, {1: S_kv}, {1: S, 3: K}), strict=True
    )
    given = arguments(SMALL.but(S=9, S_kv=31, K=5).inputs(seed=1))
    assert torch.equal(program.module()(*given), Planned()(*given))


def test_a_config_can_be_an_argument_of_a_graph() -> None:
    i = case_for("cpu").inputs()

    def step(q: Tensor, kv: Tensor, indices: Tensor, config: SparseAttentionConfig) -> Any:
        return cute_sparse_mla.sparse_mla(q, kv, indices, d_v=i.d_v, config=config, **i.options)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for threads in (256, 384):
        config = SparseAttentionConfig(tokens_per_tile=1, fwd_threads=threads)
        assert torch.equal(compiled(i.q, i.kv, i.indices, config), step(i.q, i.kv, i.indices, config))


# -- lengths and scales --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_one_compile_over_fifty_lengths(device: str, packed: bool) -> None:
    """Forward and backward, every length and the scale with it, with the eager results."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    gen = torch.Generator().manual_seed(int(packed))
    case = case_for(device).but(packed=packed)
    for n in range(50):
        # Sizes of 0 and 1 have graphs of their own in torch; the first sizes differ, or torch takes them for one.
        S, S_kv, K = (int(torch.randint(2, high, (), generator=gen)) for high in (20, 60, 40)) if n else (6, 11, 7)
        B = 1 if packed else (3, 2)[n % 2]
        i = case.but(B=B, S=S, S_kv=S_kv, K=K).inputs(seed=n, device=device)
        scale = 0.05 + 0.01 * n
        assert_same(gradients(compiled, i, i.d_v, scale), gradients(layer, i, i.d_v, scale))
    assert graphs() == 1


SCALE_KINDS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "int": lambda scale: round(100 * scale),
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "int64": lambda scale: np.int64(round(100 * scale)),
    "array": np.array,
    "tensor": torch.tensor,
    "tensor_int": lambda scale: torch.tensor(round(100 * scale)),
    "tensor_bf16": lambda scale: torch.tensor(scale, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_scales_of_every_kind_share_a_graph(kind: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    i = SMALL.inputs(seed=1)
    for value in SCALES:
        scale = SCALE_KINDS[kind](value)
        assert_same(gradients(compiled, i, i.d_v, scale), gradients(layer, i, i.d_v, scale))
    assert graphs() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_scales_as_torch_finds_out_that_they_vary(device: str) -> None:
    """Without `dynamic=True` torch fixes the first float, then lets it vary: two graphs for any number."""
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    i = case_for(device).inputs(seed=2, device=device)
    for scale in SCALES:
        assert_same(gradients(compiled, i, i.d_v, scale), gradients(layer, i, i.d_v, scale))
    assert graphs() == 2


def test_a_scale_that_a_module_holds() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sm_scale = 0.0

        def forward(self, *arguments: Any) -> tuple:
            return layer(*arguments, self.sm_scale)

    module, i = Attention(), SMALL.inputs(seed=3)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for module.sm_scale in SCALES:
        assert_same(gradients(compiled, i, i.d_v), gradients(layer, i, i.d_v, module.sm_scale))
    assert graphs() == 1


def test_a_constant_scale_is_no_tensor_of_the_graph() -> None:
    """A CPU tensor would keep a compiled region out of CUDA graphs."""
    seen: list[tuple] = []

    def record(module: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        seen.extend(tuple(node.args[6:8]) for node in module.graph.nodes if "sparse_mla.fwd" in str(node.target))
        return module

    i = SMALL.inputs(seed=4)
    for function in (lambda *arguments: layer(*arguments, 0.25), layer):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=record)
        compiled(i.q, i.kv, i.attn_sink, i.indices, i.d_v)
    assert seen == [(0.25, None), (None, None)]


def test_the_explicit_backward_compiles_too() -> None:
    """With and without a caller's buffer, which the graph adds into."""

    def step(i: Inputs, out: Tensor, lse: Tensor, scale: float, dkv: Tensor | None) -> tuple:
        return cute_sparse_mla.bwd(
            i.q, i.kv, out, i.dout, i.indices, lse, sm_scale=scale, attn_sink=i.attn_sink, dkv=dkv
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    i = SMALL.inputs(seed=5)
    mine, eager = torch.ones(i.kv.shape), torch.ones(i.kv.shape)
    for scale in SCALES:
        out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, sm_scale=scale, attn_sink=i.attn_sink)
        assert_same(compiled(i, out, lse, scale, mine), step(i, out, lse, scale, eager))
    assert torch.equal(mine, eager) and graphs() == 1
    assert_same(compiled(i, out, lse, 0.3, None), step(i, out, lse, 0.3, None))
    assert graphs() == 2


def test_inductor() -> None:
    """The default backend, whose generated code calls the ops with symbolic sizes and a scale of its own."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for n, scale in enumerate(SCALES):
        i = SMALL.but(S=6 + n, S_kv=11 + 2 * n).inputs(seed=n)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            assert_same(gradients(compiled, i, i.d_v, scale), gradients(layer, i, i.d_v, scale))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), 1e39])
def test_a_wrong_scale_is_refused_when_the_graph_runs(scale: float) -> None:
    i = SMALL.inputs(seed=6)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(i.q, i.kv, i.attn_sink, i.indices, i.d_v, 0.5)
    with pytest.raises(cute_sparse_mla.ArgumentValueError, match="sm_scale: must be"):
        compiled(i.q, i.kv, i.attn_sink, i.indices, i.d_v, scale)


@pytest.mark.parametrize("scale", [True, np.bool_(True), np.complex64(1), "1", Fraction(1, 3), torch.ones(1)])
def test_what_is_no_scale_is_refused_when_the_graph_is_traced(scale: Any) -> None:
    i = SMALL.inputs(seed=6)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception):  # noqa: B017
        compiled(i.q, i.kv, i.attn_sink, i.indices, i.d_v, scale)


# -- other ways to trace -------------------------------------------------------------------------------------------


def test_traced_with_symbols() -> None:
    """AOT's own tracer, without Dynamo: forward and backward in one graph that runs at other lengths."""

    def step(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, dout: Tensor, scale: Tensor) -> tuple:
        q, kv, sink = (t.detach().requires_grad_() for t in (q, kv, sink))
        out, _ = layer(q, kv, sink, indices, 16, scale)
        return out, *torch.autograd.grad(out, (q, kv, sink), dout)

    def arguments(i: Inputs, scale: float) -> tuple:
        return i.q, i.kv, i.attn_sink, i.indices, i.dout, torch.tensor(scale)

    graph = make_fx(step, tracing_mode="symbolic")(*arguments(SMALL.inputs(), 0.2))
    for n, scale in enumerate((0.2, 0.4)):
        given = arguments(SMALL.but(S=8 + n, S_kv=23 - n).inputs(seed=n), scale)
        assert_same(graph(*given), step(*given))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("B", [1, 3])
def test_exported(B: int, strict: bool) -> None:
    """torch.export with lengths left open in ranges and the scale an input; with several entries, their number too."""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: Tensor) -> tuple:
            return layer(q, kv, sink, indices, 16, scale)

    def arguments(i: Inputs, scale: float) -> tuple:
        return i.q, i.kv, i.attn_sink, i.indices, torch.tensor(scale)

    S, S_kv, K, entries = (torch.export.Dim(name, min=2, max=1 << 20) for name in ("S", "S_kv", "K", "B"))
    open_entries = {0: entries} if B > 1 else {}
    shapes = {1: S} | open_entries, {1: S_kv} | open_entries, None, {1: S, 3: K} | open_entries, None
    program = torch.export.export(
        Attention(), arguments(SMALL.but(B=B).inputs(), 0.3), dynamic_shapes=shapes, strict=strict
    )
    i = SMALL.but(S=9, S_kv=31, K=5, B=B if B == 1 else 4).inputs(seed=1)
    given = arguments(i, 0.7)
    assert_same(program.module()(*given), Attention()(*given))
    if B > 1:
        # What the graph leaves open, the op checks when it runs: here rows of 2 1/3 groups.
        wide = torch.zeros(4, 31, 56, dtype=i.kv.dtype)[..., :48].unflatten(-1, (2, 24))
        with pytest.raises(cute_sparse_mla.ArgumentValueError, match="strides must be multiples of the smallest"):
            program.module()(given[0], wide, *given[2:])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_flow_through(device: str) -> None:
    """Shapes, dtypes and devices of a forward and backward without memory, for a GPU that need not be there."""
    with FakeTensorMode():
        q = torch.empty((2, 6, 4, 576), dtype=torch.bfloat16, device=device)
        kv = torch.empty((2, 11, 1, 576), dtype=torch.bfloat16, device=device)
        indices = torch.empty((2, 6, 1, 7), dtype=torch.int32, device=device)
        scale = torch.tensor(0.5)
        out, lse = cute_sparse_mla.fwd(q, kv, indices, sm_scale=scale)
        dq, dkv, _ = cute_sparse_mla.bwd(q, kv, out, torch.empty_like(out), indices, lse, sm_scale=scale)
    assert (out.shape, out.dtype, out.device.type) == ((2, 6, 4, 512), torch.bfloat16, device)
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 6, 4), torch.float32, device)
    for grad, of in ((dq, q), (dkv, kv)):
        assert (grad.shape, grad.dtype, grad.device) == (of.shape, of.dtype, of.device)


def test_autograd_on_fake_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty((2, 6, 4, 576), dtype=torch.bfloat16, requires_grad=True)
        kv = torch.empty((2, 11, 1, 576), dtype=torch.bfloat16, requires_grad=True)
        indices = torch.empty((2, 6, 1, 7), dtype=torch.int32)
        out, lse = cute_sparse_mla.sparse_mla(q, kv, indices, return_lse=True)
        (out.float().sum() + lse.sum()).backward()
    for leaf in (q, kv):
        assert leaf.grad is not None and (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_with_a_traced_scale(device: str) -> None:
    i = case_for(device, SMALL.but(dlse=True)).inputs(seed=7, device=device)
    scale = torch.tensor(0.2, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (i.q, i.kv, i.attn_sink)]
    rest = (i.d_v, False, "{}", "")
    torch.library.opcheck(autograd.fwd_op, (*leaves[:2], i.indices, None, None, leaves[2], None, scale, *rest))
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, sm_scale=0.2, attn_sink=i.attn_sink)
    tensors = (i.q, i.kv, out, i.dout, i.indices, lse, i.dlse)
    options = (None, None, i.attn_sink, None, scale, False, True, None, "{}", "")
    torch.library.opcheck(autograd.bwd_op, (*tensors, *options))
    torch.library.opcheck(autograd.bwd_add_op, (*tensors, torch.zeros_like(i.kv, dtype=torch.float32), *options))


# -- checkpointing -------------------------------------------------------------------------------------------------


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scales of the forwards that ran, one entry each."""
    seen: list[float] = []
    original = dispatch.forward

    def record(call: Any, scale: float, *rest: Any) -> Any:
        seen.append(scale)
        return original(call, scale, *rest)

    monkeypatch.setattr(dispatch, "forward", record)
    return seen


def save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op == torch.ops.cute_sparse_mla.fwd.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def block(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, d_v: int, scale: float) -> tuple:
    out, lse = layer(q * 2, kv * 0.5, sink, indices, d_v, scale)
    return out * 1.5, lse


@pytest.mark.parametrize("compiled", [False, True], ids=("eager", "compiled"))
@pytest.mark.parametrize("selective", [False, True], ids=("plain", "selective"))
@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing(forwards: list[float], device: str, selective: bool, compiled: bool) -> None:
    """Same gradients; plain checkpointing runs the forward again, a policy that keeps its results does not."""

    def checkpointed(*arguments: Any) -> tuple:
        options: dict[str, Any] = {}
        if selective:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, save_attention)
        return checkpoint(block, *arguments, use_reentrant=False, **options)

    # The minimum-cut partitioner is the one that honours what a policy asks of a compiled region.
    backend = "aot_eager_decomp_partition"
    function = torch.compile(checkpointed, fullgraph=True, backend=backend) if compiled else checkpointed
    i = case_for(device).inputs(seed=8, device=device)
    expected = gradients(block, i, i.d_v, 0.2)
    forwards.clear()
    assert_same(gradients(function, i, i.d_v, 0.2), expected)
    assert forwards == ([0.2] if selective else [0.2, 0.2])


# -- what only a GPU can show --------------------------------------------------------------------------------------


@pytest.mark.sm90
def test_compiled_calls_do_not_synchronise() -> None:
    """Scales of every kind, forward and backward; the first call, which compiles, is not watched."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    i = KERNELS.inputs(seed=9, device="cuda")
    leaves = [t.clone().requires_grad_() for t in (i.q, i.kv, i.attn_sink)]

    def step(scale: Any) -> None:
        out, _ = compiled(*leaves, i.indices, i.d_v, scale)
        out.backward(i.dout)

    for kind in ("float", "float32", "tensor"):
        step(SCALE_KINDS[kind](0.1))
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(SCALE_KINDS[kind](0.2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
