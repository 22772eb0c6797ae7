"""Promises that users tripped over: results are ordinary tensors, nothing is silently wrong outside the usual paths."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import indices

CASE = Case(S=9, S_kv=21, H=4, K=8, D=64, d_v=48, invalid="shuffled", sink="random")


@pytest.mark.parametrize("packed", [False, True])
def test_results_are_not_views(packed: bool) -> None:
    """A view returned by an op cannot be changed in place under autograd, so none of the results is one."""
    i = CASE.but(packed=packed).inputs(seed=1)
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **i.options)
    for dkv_dtype in (None, torch.float32):
        grads = cute_sparse_mla.bwd(i.q, i.kv, out, i.dout, i.indices, lse, dkv_dtype=dkv_dtype, **i.options)
        assert not any(t._is_view() or not t.is_contiguous() for t in (out, lse, *grads))
    out *= torch.ones(1, requires_grad=True)
    q = i.q.clone().requires_grad_()
    out, lse = cute_sparse_mla.sparse_mla(q, i.kv, i.indices, d_v=i.d_v, return_lse=True, **i.options)
    assert not out._is_view() and not lse._is_view()
    loss = out.float().sum()
    out.add_(1)
    # out is saved for the backward: torch itself says so, as for any operator that saves its result.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forward_mode_is_refused() -> None:
    """Without a rule of its own, forward mode would see a derivative of zero."""
    i = CASE.inputs(seed=2)

    def call(q: Tensor) -> Tensor:
        return cute_sparse_mla.sparse_mla(q, i.kv, i.indices, d_v=i.d_v)

    with pytest.raises(cute_sparse_mla.UnsupportedError, match="forward-mode"):
        torch.func.jvp(call, (i.q,), (i.q,))
    with forward_ad.dual_level():
        with pytest.raises(cute_sparse_mla.UnsupportedError, match="forward-mode"):
            call(forward_ad.make_dual(i.q, i.q))
        call(i.q)


@pytest.mark.parametrize("name", ["q", "out", "dout", "lse", "dlse", "dkv", "sm_scale"])
def test_forward_mode_through_a_backward_is_refused(name: str) -> None:
    """Through any tensor of the call that could carry a derivative."""
    i = CASE.inputs(seed=2)
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v)
    given = dict(q=i.q, kv=i.kv, out=out, dout=i.dout, indices=i.indices, lse=lse, dlse=torch.zeros_like(lse))
    given |= dict(dkv=torch.zeros(i.kv.shape), sm_scale=torch.tensor(0.1))
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(cute_sparse_mla.UnsupportedError, match="forward-mode"):
            cute_sparse_mla.bwd(**given)


def test_function_transforms() -> None:
    """Gradients by torch.func are refused by name; calls without gradients, frozen ones and vmap work."""
    i = CASE.inputs(seed=2)

    def call(q: Tensor, kv: Tensor = i.kv, indices: Tensor = i.indices) -> Tensor:
        return cute_sparse_mla.sparse_mla(q, kv, indices, d_v=i.d_v)

    def mapped(q: Tensor) -> Tensor:
        return torch.vmap(call)(q, i.kv, i.indices)

    for function in (call, mapped):
        with pytest.raises(
            cute_sparse_mla.UnsupportedError, match=r"torch.func \(grad, vjp, jacrev\).*use torch.autogr"
        ):
            torch.func.grad(lambda q, f=function: f(q).float().sum())(i.q)
    want, weight = call(i.q), torch.tensor(2.0)
    total = want.float().sum()
    assert torch.equal(torch.func.grad(lambda x: call(i.q).float().sum() * x)(weight), total)

    def detached(q: Tensor) -> Tensor:
        with torch.no_grad():
            value = call(q).float().sum()
        return (value + call(q.detach()).float().sum()) * weight * q.flatten()[0].float()

    assert torch.func.grad(detached)(i.q).flatten()[0] == (4 * total).to(i.q.dtype)
    assert torch.equal(mapped(i.q), want)
    q, sink = i.q.clone().requires_grad_(), torch.zeros(i.q.shape[-2], requires_grad=True)
    vmapped = torch.vmap(lambda *tensors: cute_sparse_mla.sparse_mla(*tensors, d_v=i.d_v, attn_sink=sink))
    got = torch.autograd.grad(vmapped(q, i.kv, i.indices), (q, sink), i.dout)
    explicit = cute_sparse_mla.sparse_mla(q, i.kv, i.indices, d_v=i.d_v, attn_sink=sink)
    for mine, other in zip(got, torch.autograd.grad(explicit, (q, sink), i.dout), strict=True):
        torch.testing.assert_close(mine, other)


def test_scales_do_not_break_a_compiled_graph() -> None:
    i = CASE.inputs(seed=3)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q: Tensor, scale: float) -> Tensor:
        return cute_sparse_mla.sparse_mla(q, i.kv, i.indices, d_v=i.d_v, sm_scale=scale)

    for scale in (0.1, 0.2, 0.3, 0.05):
        assert torch.equal(
            call(i.q, scale), cute_sparse_mla.sparse_mla(i.q, i.kv, i.indices, d_v=i.d_v, sm_scale=scale)
        )
    with pytest.raises(Exception, match="sm_scale: must be a finite number"):
        call(i.q, -1.0)


class _Subclass(Tensor):
    pass


def test_a_misaligned_subclass_is_refused() -> None:
    i = CASE.inputs(seed=4)
    q = torch.zeros(i.q.numel() + 1, dtype=i.q.dtype)[1:].view(i.q.shape).as_subclass(_Subclass)
    with pytest.raises(cute_sparse_mla.ArgumentValueError, match="rows must start on 16 bytes"):
        cute_sparse_mla.fwd(q, i.kv, i.indices, d_v=i.d_v)


def test_nested_tensors_are_refused() -> None:
    i = CASE.inputs(seed=5)
    for layout in (torch.strided, torch.jagged):
        q = torch.nested.nested_tensor([i.q[0], i.q[0]], layout=layout)
        with pytest.raises(cute_sparse_mla.ArgumentTypeError, match=r"q: must be a dense \(strided\) tensor"):
            cute_sparse_mla.fwd(q, i.kv, i.indices, d_v=i.d_v)
        assert not cute_sparse_mla.explain(q, i.kv, i.indices, d_v=i.d_v).ok


def test_nothing_runs_before_a_wrong_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    i = CASE.inputs(seed=6)
    monkeypatch.setattr(cute_sparse_mla.dispatch, "forward", lambda *_: pytest.fail("ran"))
    with pytest.raises(cute_sparse_mla.ArgumentTypeError, match="return_lse"):
        cute_sparse_mla.sparse_mla(i.q, i.kv, i.indices, d_v=i.d_v, return_lse=1)
    with pytest.raises(cute_sparse_mla.ArgumentValueError, match="backend"):
        cute_sparse_mla.fwd(i.q.to("meta"), i.kv.to("meta"), i.indices.to("meta"), d_v=i.d_v, backend="nope")


@pytest.mark.parametrize("device", ["cuda:99", "nowhere"])
def test_warmup_names_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(cute_sparse_mla.ArgumentValueError, match="device"):
        cute_sparse_mla.warmup(64, 576, device=device)


# -- rows never wrap, ties never depend on the packing ---------------------------------------------------------------


def test_rows_that_do_not_fit_are_invalid() -> None:
    far = torch.tensor([2**32])
    assert indices.local_to_global(torch.tensor([[1]], dtype=torch.int32), far).tolist() == [[-1]]
    assert indices.local_to_global(torch.tensor([[1]]), far).tolist() == [[2**32 + 1]]
    last = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert indices.local_to_global(last, torch.tensor([10], dtype=torch.int32)).tolist() == [[-1]]
    assert indices.range_rows(far, far + 3, 4).tolist() == [[-1] * 4]
    assert indices.range_rows(torch.tensor([-2]), torch.tensor([2]), 4).tolist() == [[-1, -1, 0, 1]]
    first = torch.tensor([-(2**31)], dtype=torch.int32)
    assert indices.sliding_window(first, 3).tolist() == [[-1] * 3]


def test_tokens_behind_the_documents_see_themselves_only() -> None:
    cu_seqlens = torch.tensor([0, 2])
    start, stop = indices.causal_ranges(4, cu_seqlens)
    assert start.tolist() == [0, 0, 2, 2]
    assert stop.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_are_broken_alike_packed_and_alone(dtype: torch.dtype) -> None:
    """relu makes exact zeros common: the later row wins, in a packed call as in the document's own."""
    gen = torch.Generator().manual_seed(7)
    T, lengths = 70, (10, 60)
    # Small integers: sums are exact, and most scores tie.
    iq = torch.randint(-1, 2, (T, 2, 4), generator=gen).to(dtype)
    ik = torch.randint(-1, 2, (T, 4), generator=gen).to(dtype)
    weights = torch.randint(-1, 2, (T, 2), generator=gen).to(dtype)
    packed = indices.select_topk(iq, ik, weights, 8, cu_seqlens=torch.tensor([0, 10, 70]))
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = indices.select_topk(iq[part], ik[part], weights[part], 8)
        assert torch.equal(packed[part], torch.where(alone < 0, -1, alone + first))
        scores = torch.einsum("thd,sd->ths", iq[part], ik[part]).relu()
        scores = torch.einsum("ths,th->ts", scores, weights[part]).double()
        for t in range(length):
            best = sorted(range(t + 1), key=lambda s: (-float(scores[t, s]), -s))[:8]
            assert alone[t, : len(best)].tolist() == best
        first += length
