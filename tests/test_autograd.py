"""The differentiable call: gradients, graph integration, documents packed together, queries split over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cute_sparse_mla
from bench.cases import BASE, CONTRACT_CASES, Case
from cute_sparse_mla import autograd, dispatch, indices
from cute_sparse_mla.precision import Inputs

SMALL = BASE.but(S=6, S_kv=11, H=4, G=2, K=7, D=24, d_v=16, invalid="shuffled", sink="random")


def leaves(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, kv and the sink as leaves that require grad."""
    sink = None if inputs.attn_sink is None else inputs.attn_sink.clone().requires_grad_()
    return inputs.q.clone().requires_grad_(), inputs.kv.clone().requires_grad_(), sink


def call(inputs: Inputs, q: Tensor, kv: Tensor, sink: Tensor | None, **options: Any) -> Any:
    keywords = inputs.options | dict(attn_sink=sink) | options
    return cute_sparse_mla.sparse_mla(q, kv, inputs.indices, d_v=inputs.d_v, **keywords)


def explicit(inputs: Inputs, dout: Tensor, dlse: Tensor | None, **options: Any) -> tuple:
    """Gradients of the explicit backward."""
    out, lse = cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, d_v=inputs.d_v, **inputs.options)
    return cute_sparse_mla.bwd(
        inputs.q, inputs.kv, out, dout, inputs.indices, lse, dlse=dlse, **inputs.options, **options
    )


def assert_gradients(grads: tuple, expected: tuple) -> None:
    for got, want in zip(grads, expected, strict=True):
        assert got is want is None or torch.equal(got, want)


def grads_of(*tensors: Tensor | None) -> tuple:
    return tuple(None if t is None else t.grad for t in tensors)


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONTRACT_CASES, ids=lambda case: case.name)
def test_gradients_equal_the_explicit_backward(case: Case) -> None:
    """Bit for bit, through out and, where the case has a dlse, through lse."""
    i = case.inputs(seed=1)
    q, kv, sink = leaves(i)
    out, lse = call(i, q, kv, sink, return_lse=True)
    plain_out, plain_lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **i.options)
    assert torch.equal(out, plain_out) and torch.equal(lse, plain_lse)
    outputs, grads = ((out,), (i.dout,)) if i.dlse is None else ((out, lse), (i.dout, i.dlse))
    torch.autograd.backward(outputs, grads)
    assert_gradients(grads_of(q, kv, sink), explicit(i, i.dout, i.dlse))


def test_out_alone_is_returned_by_default() -> None:
    i = SMALL.inputs()
    assert isinstance(call(i, *leaves(i)), Tensor)
    assert len(call(i, *leaves(i), return_lse=True)) == 2


@pytest.mark.parametrize("sink", [None, "random", math.inf, -math.inf])
def test_a_loss_of_lse_alone(sink: str | float | None) -> None:
    i = SMALL.but(sink=sink).inputs(seed=2)
    q, kv, sinks = leaves(i)
    _, lse = call(i, q, kv, sinks, return_lse=True)
    finite = torch.isfinite(lse)
    lse.masked_fill(~finite, 0).sum().backward()
    expected = explicit(i, torch.zeros_like(i.dout), finite.float())
    assert_gradients(grads_of(q, kv, sinks), expected)
    assert q.grad.any() and kv.grad.any()
    assert sinks is None or not sinks.grad.any()


def test_a_loss_of_lse_alone_with_empty_rows() -> None:
    """`lse.sum()` is -inf; its gradient is still exact and finite."""
    i = SMALL.but(invalid="one_row").inputs(seed=3)
    q, kv, sink = leaves(i)
    _, lse = call(i, q, kv, sink, return_lse=True)
    lse.sum().backward()
    assert torch.isinf(lse[:, 3]).all()
    assert all(torch.isfinite(t.grad).all() for t in (q, kv, sink))
    assert not q.grad[:, 3].any() and q.grad[:, 2].any()


@pytest.mark.parametrize("loss", ["sum", "mean", "first_token", "one_head", "transposed", "misaligned"])
def test_gradients_that_autograd_hands_over_in_any_layout(loss: str) -> None:
    """Expanded, strided and misaligned gradients of out give what dense ones give."""
    i = SMALL.inputs(seed=4)
    q, kv, sink = leaves(i)
    out = call(i, q, kv, sink)
    dense = torch.zeros_like(i.dout)
    if loss == "sum":
        out.sum().backward()
        dense.fill_(1)
    elif loss == "mean":
        out.float().mean().backward()
        dense.fill_(1 / out.numel())
    elif loss == "first_token":
        out[:, 0].sum().backward()
        dense[:, 0] = 1
    elif loss == "one_head":
        (out[:, :, 2] * 2).sum().backward()
        dense[:, :, 2] = 2
    elif loss == "transposed":
        dense.copy_(i.dout)
        out.permute(3, 1, 2, 0).backward(dense.permute(3, 1, 2, 0).contiguous())
    else:
        dense.copy_(i.dout)
        storage = torch.zeros(dense.numel() + 1, dtype=dense.dtype)
        out.backward(storage[1:].view(dense.shape).copy_(dense))
    assert_gradients(grads_of(q, kv, sink), explicit(i, dense, None))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_requires_grad_gets_one(wanted: tuple[bool, bool, bool]) -> None:
    i = SMALL.inputs(seed=5)
    tensors = leaves(i)
    for tensor, flag in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(flag)
    call(i, *tensors).backward(i.dout)
    expected = explicit(i, i.dout, None)
    for tensor, flag, want in zip(tensors, wanted, expected, strict=True):
        assert torch.equal(tensor.grad, want) if flag else tensor.grad is None


def test_no_graph_without_grad() -> None:
    i = SMALL.inputs(seed=5)
    assert not call(i, i.q, i.kv, i.attn_sink).requires_grad
    tensors = leaves(i)
    with torch.no_grad():
        assert not call(i, *tensors).requires_grad
    with torch.inference_mode():
        out = call(i, i.q, i.kv, i.attn_sink)
    assert torch.equal(out, call(i, *tensors))
    out, lse = cute_sparse_mla.fwd(tensors[0], tensors[1], i.indices, d_v=16)
    assert not out.requires_grad and not lse.requires_grad


def test_gradients_add_up_over_calls_that_share_kv() -> None:
    """Two calls with other indices between forward and backward: each uses its own."""
    first, second = SMALL.inputs(seed=6), SMALL.inputs(seed=7)
    kv = first.kv.clone().requires_grad_()
    outs = [call(i, i.q, kv, i.attn_sink) for i in (first, second)]
    torch.autograd.backward(outs, [first.dout, second.dout])
    second_on_first = Inputs(**(vars(second) | dict(kv=first.kv)))
    parts = [explicit(i, i.dout, None)[1] for i in (first, second_on_first)]
    assert torch.equal(kv.grad, parts[0] + parts[1])


def test_changing_saved_indices_in_place_is_noticed() -> None:
    i = SMALL.inputs(seed=8)
    out = call(i, *leaves(i))
    i.indices.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(i.dout)


def test_two_way_merge_of_partials() -> None:
    """Attention over two halves of the slots, merged by their lse, has the gradients of the whole call."""
    i = BASE.but(S=5, S_kv=20, H=3, K=12, D=64, d_v=32).inputs(seed=9)
    q, kv, _ = leaves(i)
    parts = [
        cute_sparse_mla.sparse_mla(q, kv, rows, d_v=32, return_lse=True) for rows in i.indices.split([5, 7], dim=-1)
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out.float() * (part - lse).exp()[..., None] for out, part in parts)
    merged.backward(i.dout.float())
    out, whole_lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=32)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged.detach(), out.float(), rtol=2e-2, atol=1e-2)
    dq, dkv, _ = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, whole_lse)
    for got, want in ((q.grad, dq), (kv.grad, dkv)):
        assert float((got.float() - want.float()).norm() / want.float().norm()) < 1e-2


def test_a_buffer_for_dkv_takes_several_calls() -> None:
    i = SMALL.inputs(seed=10)
    once = explicit(i, i.dout, None, dkv_dtype=torch.float32)
    buffer = torch.zeros(i.kv.shape)
    for n in (1, 2, 3):
        dq, same, d_sink = explicit(i, i.dout, None, dkv=buffer)
        assert same is buffer and torch.equal(dq, once[0]) and torch.equal(d_sink, once[2])
        torch.testing.assert_close(buffer, n * once[1], rtol=1e-6, atol=1e-6)


# -- modes of torch ------------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The `deterministic` flags that reach the backends."""
    seen: list[bool] = []
    original = dispatch.backward

    def record(call: Any, scale: float, deterministic: bool, *rest: Any) -> Any:
        seen.append(deterministic)
        return original(call, scale, deterministic, *rest)

    monkeypatch.setattr(dispatch, "backward", record)
    yield seen
    torch.use_deterministic_algorithms(False)


def test_deterministic_mode_reaches_the_backend(deterministic_seen: list[bool]) -> None:
    i = SMALL.inputs(seed=11)
    call(i, *leaves(i)).backward(i.dout)
    torch.use_deterministic_algorithms(True)
    call(i, *leaves(i)).backward(i.dout)
    torch.use_deterministic_algorithms(False)
    explicit(i, i.dout, None, deterministic=True)
    explicit(i, i.dout, None)
    assert deterministic_seen == [False, True, True, False]


def test_deterministic_backward_is_the_same_a_hundred_times() -> None:
    i = BASE.but(S=64, H=4, S_kv=16, K=32, D=64, d_v=32, duplicates=True, sink="random").inputs(seed=12)
    first = explicit(i, i.dout, None, deterministic=True)
    for _ in range(100):
        assert_gradients(explicit(i, i.dout, None, deterministic=True), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Scores and sums stay fp32 in a region of automatic mixed precision."""
    i = SMALL.inputs(seed=13)
    expected = explicit(i, i.dout, None)
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **i.options)
    q, kv, sink = leaves(i)
    with torch.autocast("cpu", dtype=dtype):
        mixed, mixed_lse = call(i, q, kv, sink, return_lse=True)
        mixed.backward(i.dout)
    assert torch.equal(mixed, out) and torch.equal(mixed_lse, lse)
    assert_gradients(grads_of(q, kv, sink), expected)


def test_default_dtype_changes_nothing() -> None:
    i = SMALL.inputs(seed=13)
    expected = explicit(i, i.dout, None)
    torch.set_default_dtype(torch.float64)
    try:
        assert_gradients(explicit(i, i.dout, None), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """Recomputed forwards give the same gradients, other calls in between notwithstanding."""
    first, second = SMALL.inputs(seed=14), SMALL.inputs(seed=15)
    q, kv, sink = leaves(first)
    out = checkpoint(lambda a, b, c: call(first, a, b, c), q, kv, sink, use_reentrant=reentrant)
    call(second, *leaves(second)).backward(second.dout)
    out.backward(first.dout)
    assert_gradients(grads_of(q, kv, sink), explicit(first, first.dout, None))


# -- custom ops ----------------------------------------------------------------------------------------------------


def op_arguments(i: Inputs, requires_grad: bool = False) -> tuple:
    q, kv, sink = leaves(i) if requires_grad else (i.q, i.kv, i.attn_sink)
    return q, kv, i.indices, i.q_positions, i.topk_length, sink, i.sm_scale, None, i.d_v, i.causal, "{}", ""


def backward_arguments(i: Inputs) -> tuple[tuple, tuple]:
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **i.options)
    tensors = (i.q, i.kv, out, i.dout, i.indices, lse, i.dlse)
    options = (i.q_positions, i.topk_length, i.attn_sink, i.sm_scale, None, i.causal, False, None, "{}", "")
    return tensors, options


OPCHECK_CASES = (
    SMALL,
    SMALL.but(sink=None, dlse=True, length="random", causal=True, positions="random"),
    SMALL.but(packed=True, dlse=True, index_dtype=torch.int64),
)


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=("batched", "options", "packed"))
def test_opcheck(case: Case) -> None:
    """torch's own checks of schemas, fakes, autograd registration and AOT tracing."""
    i = case.inputs(seed=16)
    torch.library.opcheck(autograd.fwd_op, op_arguments(i))
    torch.library.opcheck(autograd.fwd_op, op_arguments(i, requires_grad=True))
    tensors, options = backward_arguments(i)
    torch.library.opcheck(autograd.bwd_op, (*tensors, *options))
    torch.library.opcheck(autograd.bwd_add_op, (*tensors, torch.zeros(i.kv.shape), *options))


@pytest.mark.parametrize("dkv_dtype", [None, torch.float32])
@pytest.mark.parametrize("case", OPCHECK_CASES, ids=("batched", "options", "packed"))
def test_fakes_say_what_the_ops_return(case: Case, dkv_dtype: torch.dtype | None) -> None:
    i = case.inputs(seed=17)
    tensors, options = backward_arguments(i)
    options = (*options[:7], dkv_dtype, *options[8:])

    def meta(values: tuple) -> tuple:
        return tuple(value.to("meta") if isinstance(value, Tensor) else value for value in values)

    for op, arguments in ((autograd.fwd_op, op_arguments(i)), (autograd.bwd_op, (*tensors, *options))):
        for real, fake in zip(op(*arguments), op(*meta(arguments)), strict=True):
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic: bool) -> None:
    """One graph, forward and backward, with the eager results; other lengths too when shapes are dynamic."""

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def layer(q: Tensor, kv: Tensor, sink: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = cute_sparse_mla.sparse_mla(
            q * 2, kv, rows, d_v=16, sm_scale=0.2, causal=True, attn_sink=sink, return_lse=True,
            config=cute_sparse_mla.SparseAttentionConfig(tokens_per_tile=1),
        )  # fmt: skip
        return out + 1, lse

    torch._dynamo.reset()
    for S in (6, 9) if dynamic else (6,):
        i = SMALL.but(S=S).inputs(seed=18)
        results = []
        for function in (layer, layer._torchdynamo_orig_callable):
            q, kv, sink = leaves(i)
            out, lse = function(q, kv, sink, i.indices)
            (out.float().square().sum() + lse[torch.isfinite(lse)].sum()).backward()
            results.append((out.detach(), lse.detach(), *grads_of(q, kv, sink)))
        for compiled, eager in zip(*results, strict=True):
            assert torch.equal(compiled, eager)


def test_compiled_with_options_of_every_kind() -> None:
    i = SMALL.but(length="random", positions="random").inputs(seed=19)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        return call(i, q, kv, sink, backend="reference")

    torch._dynamo.reset()
    q, kv, sink = leaves(i)
    layer(q, kv, sink).backward(i.dout)
    assert_gradients(grads_of(q, kv, sink), explicit(i, i.dout, None))


# -- packed documents ----------------------------------------------------------------------------------------------

CU_SEQLENS = [0, 1, 1, 64, 65, 256]
PACKED = BASE.but(S=256, S_kv=256, H=4, K=48, D=64, d_v=32, packed=True, causal=True, sink="random", dlse=True)


def packed_inputs(seed: int = 0) -> tuple[Inputs, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A packed call's inputs, cu_seqlens, and an indexer's queries, keys and weights."""
    gen = torch.Generator().manual_seed(seed)
    # Positive and in double precision, so that no two scores tie: which of them a topk takes first is its own affair.
    indexer = tuple(torch.rand(shape, generator=gen).double() for shape in ((256, 2, 16), (256, 16), (256, 2)))
    return PACKED.inputs(seed), torch.tensor(CU_SEQLENS, dtype=torch.int32), indexer


def run(i: Inputs, rows: Tensor) -> dict[str, Tensor]:
    q, kv, sink = leaves(i)
    out, lse = cute_sparse_mla.sparse_mla(
        q, kv, rows, d_v=i.d_v, attn_sink=sink, causal=True, sm_scale=i.sm_scale, return_lse=True
    )
    torch.autograd.backward((out, lse), (i.dout, i.dlse))
    return dict(out=out.detach(), lse=lse.detach(), dq=q.grad, dkv=kv.grad, d_sink=sink.grad)


@pytest.mark.parametrize("how", ["global", "local", "causal_ranges", "window"])
def test_packed_documents_equal_their_own_runs(how: str) -> None:
    """Through the index builders and the differentiable call, an empty and two one-token documents included."""
    i, cu, (iq, ik, weights) = packed_inputs(seed=20)
    K, spans = PACKED.K, [(a, b) for a, b in itertools.pairwise(CU_SEQLENS) if b > a]
    start, stop = indices.causal_ranges(256, cu)

    def rows_of(a: int, b: int) -> Tensor:
        """The rows of one document's own run, counted from its start."""
        if how == "causal_ranges":
            return indices.range_rows(*indices.causal_ranges(b - a), 200)
        if how == "window":
            return indices.sliding_window(torch.arange(b - a), 16)
        return indices.select_topk(iq[a:b], ik[a:b], weights[a:b], K)

    local = [rows_of(a, b) for a, b in spans]
    if how == "global":
        packed = indices.select_topk(iq, ik, weights, K, cu)
    elif how == "causal_ranges":
        packed = indices.range_rows(start, stop, 200)
    elif how == "window":
        packed = indices.sliding_window(torch.arange(256), 16, cu)
    else:
        lengths = torch.cat([torch.full((b - a,), b - a) for a, b in spans])
        packed = indices.local_to_global(torch.cat(local), start, lengths)
    for (a, b), own in zip(spans, local, strict=True):
        inside = packed[a:b] >= 0
        assert torch.equal(torch.where(inside, packed[a:b] - a, -1), own)
        assert ((packed[a:b] < b) & ((packed[a:b] >= a) | ~inside)).all()

    together = run(i, packed)
    d_sink = torch.zeros(4, dtype=torch.float64)
    for (a, b), own in zip(spans, local, strict=True):
        part = Inputs(**(vars(i) | {n: getattr(i, n)[a:b] for n in ("q", "kv", "dout", "dlse")}))
        alone = run(part, own)
        for name in ("out", "lse", "dq", "dkv"):
            assert torch.equal(together[name][a:b], alone[name]), (name, a, b)
        d_sink += alone["d_sink"].double()
    torch.testing.assert_close(together["d_sink"].double(), d_sink, rtol=1e-5, atol=1e-5)


def test_nothing_leaks_between_documents() -> None:
    """NaN in the rows and queries of one document stays there."""
    i, cu, (iq, ik, weights) = packed_inputs(seed=21)
    rows = indices.select_topk(iq, ik, weights, PACKED.K, cu)
    clean = run(i, rows)
    for tensor in (i.q, i.kv, i.dout, i.dlse):
        tensor[1:64] = math.nan
    dirty = run(i, rows)
    for name in ("out", "lse", "dq", "dkv"):
        assert torch.equal(dirty[name][64:], clean[name][64:]) and torch.equal(dirty[name][:1], clean[name][:1])
        assert torch.isnan(dirty[name][1:64]).any()


# -- context parallelism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
@pytest.mark.parametrize("packed", [False, True])
def test_queries_split_four_ways_over_whole_kv(packed: bool, order: str) -> None:
    """Each rank's out is that of the whole call bit for bit; the ranks' fp32 dkv add up to 1e-5."""
    case = PACKED.but(packed=packed, invalid="shuffled")
    i = case.inputs(seed=22)
    axis = 0 if packed else 1
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=32, **i.options)
    whole = cute_sparse_mla.bwd(
        i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv_dtype=torch.float32, **i.options
    )
    added = torch.zeros(i.kv.shape)
    d_sink = torch.zeros(4)
    tokens = torch.arange(256)
    parts = tokens.chunk(4) if order == "contiguous" else [tokens[rank::4] for rank in range(4)]
    for part in parts:

        def take(tensor: Tensor) -> Tensor:
            return tensor.index_select(axis, part)  # noqa: B023

        positions = part if packed else part[None]
        options = i.options | dict(q_positions=positions)
        q, rows, dout, dlse = take(i.q), take(i.indices), take(i.dout), take(i.dlse)
        own_out, own_lse = cute_sparse_mla.fwd(q, i.kv, rows, d_v=32, **options)
        assert torch.equal(own_out, take(out)) and torch.equal(own_lse, take(lse))
        dq, _, own_sink = cute_sparse_mla.bwd(q, i.kv, own_out, dout, rows, own_lse, dlse=dlse, dkv=added, **options)
        assert torch.equal(dq, take(whole[0]))
        d_sink += own_sink
    assert float((added - whole[1]).norm() / whole[1].norm()) <= 1e-5
    torch.testing.assert_close(d_sink, whole[2], rtol=1e-5, atol=1e-5)


def test_contiguous_ranks_select_what_the_whole_selects() -> None:
    i, cu, (iq, ik, weights) = packed_inputs(seed=23)
    whole = indices.select_topk(iq, ik, weights, 32, cu)
    for part in torch.arange(256).chunk(4):
        own = indices.select_topk(iq[part], ik, weights[part], 32, cu, q_positions=part)
        assert torch.equal(own, whole[part])
    assert i.q.shape[0] == 256
