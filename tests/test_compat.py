"""The drop-ins against their namesakes' definitions, written out densely in float64, and the contract's calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import autograd, compat
from cute_sparse_mla.precision import Inputs

from . import doubtful

PACKED = Case(S=9, S_kv=21, H=4, G=2, K=8, D=40, d_v=24, packed=True)
BATCHED = PACKED.but(B=2, packed=False)
DEVICES = (pytest.param("cpu", id="cpu"), pytest.param("cuda", id="sm90", marks=pytest.mark.sm90))


def inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """On a GPU at the kernels' widths."""
    return (case if device == "cpu" else case.but(D=576, d_v=512)).inputs(seed=seed, device=device)


class Dense(NamedTuple):
    """A packed call's float64 results; empty rows have `out` 0, `lse` and `largest` -inf."""

    out: Tensor
    lse: Tensor
    largest: Tensor


def dense(
    q: Tensor, kv: Tensor, indices: Tensor, valid: Tensor, scale: float, d_v: int, sink: Tensor | None = None
) -> Dense:
    """Softmax attention of `q [T, H, D]` over the valid slots `[T, G, K]` of `kv [T_kv, G, D]`, differentiable."""
    T, H, D = q.shape
    G = kv.shape[1]
    groups = torch.arange(G, device=q.device)[None, :, None]
    rows = kv.double()[indices.long().masked_fill(~valid, 0), groups]
    scores = torch.einsum("tghd,tgkd->tghk", q.double().view(T, G, H // G, D), rows) * scale
    scores = scores.masked_fill(~valid[:, :, None], -math.inf).flatten(1, 2)
    lse = scores.logsumexp(-1)
    empty = lse.detach() == -math.inf
    whole = lse if sink is None else torch.logaddexp(lse, sink.double())
    # A safe value before the exponential: the gradient of an unused branch must not be NaN.
    p = torch.exp(scores - whole.masked_fill(empty, 0)[..., None]).masked_fill(empty[..., None], 0)
    out = torch.einsum("tghk,tgkd->tghd", p.view(T, G, H // G, -1), rows[..., :d_v]).flatten(1, 2)
    return Dense(out, lse, scores.amax(-1))


def in_range(i: Inputs, kv: Tensor) -> Tensor:
    valid = (i.indices >= 0) & (i.indices < kv.shape[-3])
    if i.topk_length is not None:
        valid &= torch.arange(i.indices.shape[-1], device=kv.device) < i.topk_length[..., None, None]
    return valid


def assert_near(got: Tensor, want: Tensor, limit: float = 6e-3) -> None:
    """Within the rounding of bf16 results, as a fraction of the whole norm."""
    assert got.shape == want.shape and torch.isfinite(got).all()
    assert float((got.double() - want).norm()) <= limit * float(want.norm()) + 1e-6


def assert_row_terms(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-5)


# -- FlashMLA ------------------------------------------------------------------------------------------------------

FLASH_MLA_CASES = (
    PACKED.but(name="plain"),
    PACKED.but(name="sink", sink="random"),
    PACKED.but(name="sink_none", sink=-math.inf),
    PACKED.but(name="sink_all", sink=math.inf),
    PACKED.but(name="lengths", length="random", sink="random", invalid="out_of_range"),
    PACKED.but(name="zero_length", length="zero"),
    PACKED.but(name="empty_row", invalid="one_row", sink="random"),
    PACKED.but(name="all_empty", invalid="all", sink="random"),
    PACKED.but(name="duplicates", duplicates=True, sm_scale=0.0),
    PACKED.but(name="no_slots", K=0),
    PACKED.but(name="large_scores", q_scale=64.0, dtype=torch.float16),
)


@pytest.mark.parametrize("case", FLASH_MLA_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("device", DEVICES)
def test_flash_mla(device: str, case: Case) -> None:
    i = inputs(case, device, seed=1)
    got = compat.flash_mla_sparse_fwd(i.q, i.kv, i.indices, i.sm_scale, i.d_v, i.attn_sink, i.topk_length)
    out, max_logits, lse = got
    plain = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **i.options)
    empty = torch.isinf(plain[1])
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1].masked_fill(empty, math.inf))
    if case.K == 0:
        assert bool((lse == math.inf).all() and (max_logits == -math.inf).all()) and not out.any()
        return
    want = dense(i.q, i.kv, i.indices, in_range(i, i.kv), i.sm_scale, i.d_v, i.attn_sink)
    assert_near(out, want.out)
    assert_row_terms(max_logits, want.largest)
    assert_row_terms(lse, want.lse.masked_fill(want.lse == -math.inf, math.inf))
    assert torch.equal(max_logits == -math.inf, empty) and torch.equal(lse == math.inf, empty)
    assert bool(empty.any()) or case.name not in ("empty_row", "all_empty", "zero_length")


def test_max_logits_over_chunks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass over the scores works in pieces of tokens and slots."""
    i = BATCHED.but(invalid="shuffled", length="random").inputs(seed=2)
    whole = autograd.max_scores_op(i.q, i.kv, i.indices, i.topk_length, 0.3, None)
    monkeypatch.setattr(cute_sparse_mla.dispatch.reference, "WHOLE_ROW", 3)
    monkeypatch.setattr(cute_sparse_mla.dispatch.reference, "CHUNK_BYTES", {"cpu": 4000})
    torch.testing.assert_close(autograd.max_scores_op(i.q, i.kv, i.indices, i.topk_length, 0.3, None), whole)
    for b in range(2):
        valid = in_range(i, i.kv)[b]
        assert_row_terms(whole[b], dense(i.q[b], i.kv[b], i.indices[b], valid, 0.3, 24).largest)


@pytest.mark.parametrize("scale", [(0.2, None), (None, torch.tensor(0.2)), (None, None)])
def test_opcheck_of_max_scores(scale: tuple) -> None:
    i = PACKED.but(length="random").inputs(seed=3)
    torch.library.opcheck(autograd.max_scores_op, (i.q, i.kv, i.indices, i.topk_length, *scale))


# -- miles ---------------------------------------------------------------------------------------------------------


def rows_of(i: Inputs, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, kv and the slots of one batch entry."""
    return i.q[b], i.kv[b], i.indices[b]


@pytest.mark.parametrize("sink", [None, "random"])
@pytest.mark.parametrize("invalid", ["one_row", "shuffled"])
@pytest.mark.parametrize("device", DEVICES)
def test_miles(device: str, invalid: str, sink: str | None) -> None:
    i = inputs(BATCHED.but(invalid=invalid, sink=sink), device, seed=4)
    leaves = [t.clone().requires_grad_() for t in (i.q, i.kv, i.attn_sink) if t is not None]
    out = compat.sparse_attention(*leaves[:2], i.indices, i.sm_scale, i.d_v, *leaves[2:])
    out.backward(i.dout)

    exact = [t.detach().double().requires_grad_() for t in leaves]
    valid = in_range(i, i.kv)
    want = torch.stack([
        dense(exact[0][b], exact[1][b], i.indices[b], valid[b], i.sm_scale, i.d_v, exact[2] if sink else None).out
        for b in range(2)
    ])  # fmt: skip
    want.backward(i.dout.double())
    assert_near(out.detach(), want.detach())
    for mine, other in zip(leaves, exact, strict=True):
        assert_near(mine.grad, other.grad, 2e-2)


def test_miles_takes_the_whole_row_as_values() -> None:
    i = BATCHED.inputs(seed=5)
    out = compat.sparse_attention(i.q, i.kv, i.indices, 0.2, config=cute_sparse_mla.SparseAttentionConfig())
    assert torch.equal(out, cute_sparse_mla.fwd(i.q, i.kv, i.indices, sm_scale=0.2, d_v=40)[0])


# -- the TileLang example ------------------------------------------------------------------------------------------


def tilelang_inputs(device: str) -> tuple[Inputs, Tensor]:
    """Rows above the token number, fillers of both kinds and an empty row; which slots count."""
    i = inputs(BATCHED.but(S_kv=13, K=10), device, seed=6)
    i.indices[:, 0] = -1
    i.indices[:, 1, :, 3:] = i.kv.shape[1]
    tokens = torch.arange(i.q.shape[1], device=device)[:, None, None]
    return i, (i.indices >= 0) & (i.indices <= tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_tilelang_example(device: str) -> None:
    i, valid = tilelang_inputs(device)
    scale = i.q.shape[-1] ** -0.5
    out, lse = compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, d_v=i.d_v)
    dq, dkv = compat.sparse_mla_bwd(i.q, i.kv, out, i.dout, i.indices, lse)
    assert (dq.dtype, dkv.dtype) == (i.q.dtype, i.kv.dtype)
    assert not out[:, 0].any() and bool((lse[:, 0] == -math.inf).all()) and not dq[:, 0].any()
    for b in range(2):
        q, kv, rows = rows_of(i, b)
        q, kv = (t.double().requires_grad_() for t in (q, kv))
        want = dense(q, kv, rows, valid[b], scale, i.d_v)
        want.out.backward(i.dout[b].double())
        assert_near(out[b], want.out.detach())
        assert_row_terms(lse[b], want.lse.detach() / math.log(2))
        assert_near(dq[b], q.grad, 2e-2)
        assert_near(dkv[b], kv.grad, 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_tilelang_example_with_a_delta_of_its_own(device: str) -> None:
    """`dS = p (dP - delta)` for any delta; the one it computes itself changes nothing."""
    i, valid = tilelang_inputs(device)
    out, lse = compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, 0.2, d_v=i.d_v)
    own = (out.float() * i.dout.float()).sum(-1)
    plain = compat.sparse_mla_bwd(i.q, i.kv, out, i.dout, i.indices, lse, 0.2)
    for mine, other in zip(
        compat.sparse_mla_bwd(i.q, i.kv, out, i.dout, i.indices, lse, 0.2, delta=own), plain, strict=True
    ):
        assert_near(mine, other.double())
    delta = torch.randn(own.shape, generator=torch.Generator().manual_seed(7)).to(own.device)
    dq, _ = compat.sparse_mla_bwd(i.q, i.kv, out, i.dout, i.indices, lse, 0.2, delta=delta)
    for b in range(2):
        q, kv, rows = rows_of(i, b)
        q = q.double().requires_grad_()
        want = dense(q, kv, rows, valid[b], 0.2, i.d_v)
        # The gradient of lse is p, so this adds p (Delta - delta) to dS.
        exact_delta = (want.out.detach() * i.dout[b]).sum(-1)
        some = torch.isfinite(want.lse)
        loss = (want.out * i.dout[b]).sum() + ((exact_delta - delta[b])[some] * want.lse[some]).sum()
        loss.backward()
        assert_near(dq[b], q.grad, 2e-2)


# -- cuDNN ---------------------------------------------------------------------------------------------------------

ONE_GROUP = PACKED.but(G=1, invalid="one_row", length="random")


def cudnn_arguments(i: Inputs) -> tuple:
    sink = i.attn_sink if i.attn_sink is not None else torch.full((i.q.shape[1],), -math.inf, device=i.q.device)
    out, lse = cute_sparse_mla.fwd(
        i.q, i.kv, i.indices, d_v=i.d_v, sm_scale=0.2, topk_length=i.topk_length, attn_sink=sink
    )
    return i.q, i.kv[:, 0], out, i.dout, lse, sink, i.indices[:, 0], 0.2, i.topk_length


@pytest.mark.parametrize("sink", [None, "random"])
@pytest.mark.parametrize("device", DEVICES)
def test_cudnn(device: str, sink: str | None) -> None:
    i = inputs(ONE_GROUP.but(sink=sink), device, seed=8)
    arguments = cudnn_arguments(i)
    done = compat.sparse_attention_backward_wrapper(*arguments)
    dq, dkv, d_sink = done
    assert done["dq"] is done[0] is dq and done["dkv"] is dkv and done["d_sink"] is done[2] is d_sink
    assert list(done.keys()) == ["dq", "dkv", "d_sink"] and len(done) == 3

    q, kv = (t.double().requires_grad_() for t in (i.q, i.kv))
    exact_sink = arguments[5].double().requires_grad_()
    want = dense(q, kv, i.indices, in_range(i, i.kv), 0.2, i.d_v, exact_sink if sink else None)
    want.out.backward(i.dout.double())
    assert_near(dq, q.grad, 2e-2)
    assert_near(dkv, kv.grad[:, 0], 2e-2)
    if sink:
        assert_near(d_sink, exact_sink.grad, 2e-2)
    else:
        assert not d_sink.any()


@pytest.mark.parametrize("sink", [math.inf, "random"])
def test_cudnn_takes_either_infinity_of_an_empty_row(sink: str | float) -> None:
    """Whatever such a row's out holds."""
    i = ONE_GROUP.but(sink=sink).inputs(seed=9)
    arguments = cudnn_arguments(i)
    out, lse = arguments[2], arguments[4]
    assert bool((lse == -math.inf).any())
    out[lse == -math.inf] = math.nan
    other = lse.masked_fill(lse == -math.inf, math.inf)
    flipped = compat.sparse_attention_backward_wrapper(*arguments[:4], other, *arguments[5:])
    for mine, same in zip(flipped, compat.sparse_attention_backward_wrapper(*arguments), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, same)


def test_cudnn_fills_the_destinations() -> None:
    """Overwritten, not added into, whatever their strides; dkv also in fp32."""
    i = ONE_GROUP.but(sink="random").inputs(seed=10)
    arguments = cudnn_arguments(i)
    want = compat.sparse_attention_backward_wrapper(*arguments, deterministic=True)
    dq = torch.full((*i.q.shape[:2], 2 * i.q.shape[2]), 7.0, dtype=i.q.dtype)[..., ::2]
    dkv = torch.full((i.kv.shape[0], i.kv.shape[2]), math.nan)
    done = compat.sparse_attention_backward_wrapper(*arguments, dq=dq, dkv=dkv, deterministic=True, block_tile=128)
    assert done["dq"] is dq and torch.equal(dq, want["dq"])
    assert done["dkv"] is dkv and torch.equal(dkv.to(i.kv.dtype), want["dkv"])


# -- all of them ---------------------------------------------------------------------------------------------------


def test_backends_are_named_or_refused() -> None:
    i, one = BATCHED.inputs(seed=11), ONE_GROUP.inputs(seed=11)
    p = PACKED.inputs(seed=11)
    out, lse = compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, d_v=i.d_v)
    calls: tuple[Callable, ...] = (
        lambda **o: compat.flash_mla_sparse_fwd(p.q, p.kv, p.indices, 0.2, p.d_v, **o),
        lambda **o: compat.sparse_attention(i.q, i.kv, i.indices, 0.2, i.d_v, **o),
        lambda **o: compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, d_v=i.d_v, **o),
        lambda **o: compat.sparse_mla_bwd(i.q, i.kv, out, i.dout, i.indices, lse, **o),
        lambda **o: compat.sparse_attention_backward_wrapper(*cudnn_arguments(one), **o),
    )
    for call in calls:
        named, chosen = call(backend="reference"), call()
        for mine, same in zip(named, chosen, strict=True):
            assert torch.equal(mine, same)
        with pytest.raises(cute_sparse_mla.UnsupportedError, match="backend 'sm90' needs compute capability"):
            call(backend="sm90")


def test_options_of_one_setting_are_refused_in_another() -> None:
    i = BATCHED.inputs(seed=12)
    out, lse = compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, d_v=i.d_v)
    backward = (i.q, i.kv, out, i.dout, i.indices, lse)
    error = cute_sparse_mla.ArgumentValueError
    with pytest.raises(error, match="return_p_sum: must be False"):
        compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, return_p_sum=True)
    with pytest.raises(error, match="is_casual: must be True"):
        compat.sparse_mla_bwd(*backward, is_casual=False)
    with pytest.raises(error, match="return_kernel: must be False"):
        compat.sparse_mla_bwd(*backward, return_kernel=True)
    with pytest.raises(error, match=r"q: shape must be \[B, S, H, D\]"):
        compat.sparse_mla_fwd_interface(i.q[0], i.kv[0], i.indices[0], d_v=i.d_v)
    arguments = cudnn_arguments(ONE_GROUP.inputs())
    with pytest.raises(error, match="stream: must be None"):
        compat.sparse_attention_backward_wrapper(*arguments, stream=1)
    with pytest.raises(error, match=r"kv: shape must be \[T_kv, D\] with D = 40"):
        compat.sparse_attention_backward_wrapper(arguments[0], arguments[1][:, None], *arguments[2:])
    with pytest.raises(error, match="dq: shape must be"):
        compat.sparse_attention_backward_wrapper(*arguments, dq=arguments[1])


def test_arguments_of_the_peers_forms_are_checked_before_anything_runs() -> None:
    i = BATCHED.inputs(seed=12)
    out, lse = compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, d_v=i.d_v)
    arguments = cudnn_arguments(one := ONE_GROUP.inputs())

    def example(do: Tensor = i.dout, lse: Tensor = lse, **options: Any) -> None:
        compat.sparse_mla_bwd(i.q, i.kv, out, do, i.indices, lse, **options)

    def cudnn(**options: Any) -> None:
        compat.sparse_attention_backward_wrapper(*arguments, **options)

    def flash_mla(indexer_topk: int) -> None:
        compat.flash_mla_sparse_fwd(one.q, one.kv, one.indices, 0.2, one.d_v, None, None, indexer_topk)

    rows = one.q.shape[:-1]
    wrong: tuple[tuple[Callable, str], ...] = (
        (lambda: example(lse=lse.int()), "lse: dtype must be float32"),
        (lambda: example(delta=lse.bfloat16()), "delta: dtype must be float32"),
        (lambda: example(delta=lse[0, 0]), "delta: shape must be"),
        (lambda: example(do=i.dout[..., :-1]), "do: shape must be"),
        (lambda: cudnn(dq=torch.zeros_like(one.q, dtype=torch.int32)), "dq: must be torch"),
        (lambda: cudnn(dq=torch.zeros_like(one.q, device="meta")), "dq: must be on cpu"),
        (lambda: cudnn(dq=one.q.new_zeros(1).expand(one.q.shape)), "dq: elements must not overlap"),
        (lambda: cudnn(dq=torch.zeros_like(one.q).requires_grad_()), "dq: must not require a gradient"),
        (lambda: cudnn(dkv=torch.zeros_like(arguments[1], dtype=torch.float64)), "dkv: must be torch"),
        (lambda: compat.sparse_attention_backward_wrapper(*arguments[:4], torch.zeros(rows).long(), *arguments[5:]),
         "lse: dtype must be float32"),
        (lambda: flash_mla(4), "indexer_topk: must be 0"),
    )  # fmt: skip
    for call, message in wrong:
        with pytest.raises(cute_sparse_mla.ArgumentError, match=message):
            call()
    flash_mla(0)
    compat.sparse_attention(i.q, i.kv, i.indices, 0.2, i.d_v, None, "tilelang")


DROP_INS = (
    compat.flash_mla_sparse_fwd, compat.sparse_attention, compat.sparse_mla_fwd_interface, compat.sparse_mla_bwd,
    compat.sparse_attention_backward_wrapper,
)  # fmt: skip


def all_arguments(drop_in: Callable) -> dict[str, Any]:
    """A value for every parameter of a drop-in."""
    p = PACKED.but(G=1, sink="random", length="random").inputs(seed=13)
    b = BATCHED.but(sink="random").inputs(seed=13)
    shared = dict(backend="reference", config=cute_sparse_mla.SparseAttentionConfig())
    rows = dict(q=b.q, kv=b.kv, indices=b.indices, sm_scale=0.2)
    if drop_in is compat.flash_mla_sparse_fwd:
        own = dict(q=p.q, kv=p.kv, indices=p.indices, sm_scale=0.2, d_v=p.d_v, indexer_topk=0)
        own |= dict(attn_sink=p.attn_sink, topk_length=p.topk_length)
    elif drop_in is compat.sparse_attention:
        own = rows | dict(d_v=b.d_v, attn_sink=b.attn_sink, forward_backend="tilelang")
    elif drop_in is compat.sparse_mla_fwd_interface:
        own = rows | dict(return_p_sum=False, d_v=b.d_v, block_I=64, num_stages=2, threads=256)
    elif drop_in is compat.sparse_mla_bwd:
        out, lse = compat.sparse_mla_fwd_interface(b.q, b.kv, b.indices, 0.2, d_v=b.d_v)
        own = rows | dict(o=out, do=b.dout, lse=lse, is_casual=True, return_kernel=False, delta=torch.zeros_like(lse))
    else:
        own = dict(zip(inspect.signature(drop_in).parameters, cudnn_arguments(p), strict=False))
        own |= dict(dq=torch.zeros_like(p.q), dkv=torch.zeros_like(p.kv[:, 0]), block_tile=64, deterministic=False)
        own |= dict(stream=0, workspace=torch.zeros(1, dtype=torch.uint8), q_cluster_mode="off")
    assert (shared | own).keys() == inspect.signature(drop_in).parameters.keys()
    return shared | own


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda f: f.__name__)
def test_wrong_arguments_are_named_in_the_drop_ins_own_form(drop_in: Callable) -> None:
    """Whatever any argument is: a result, or an error of this package that names an argument of this signature."""
    refused = doubtful.refusals(drop_in, all_arguments(drop_in))
    # Such as an object() each refuses by its own name.
    assert all(refused.values()), refused


def test_what_the_namesakes_require_is_required() -> None:
    p, b = PACKED.inputs(), BATCHED.inputs()
    with pytest.raises(cute_sparse_mla.ArgumentTypeError, match=r"sm_scale: must be a finite number.*no default"):
        compat.flash_mla_sparse_fwd(p.q, p.kv, p.indices, None, p.d_v)  # type: ignore[arg-type]
    with pytest.raises(cute_sparse_mla.ArgumentTypeError, match=r"sm_scale: must be a finite number.*no default"):
        compat.sparse_attention(b.q, b.kv, b.indices, None, b.d_v)  # type: ignore[arg-type]


def test_destinations_whose_elements_share_memory_are_refused() -> None:
    """Strides of 0 and windows that slide by less than their width; slices and transposes are taken."""
    i = ONE_GROUP.but(sink="random").inputs(seed=14)
    arguments = cudnn_arguments(i)
    want = compat.sparse_attention_backward_wrapper(*arguments)
    for name, shape, dtype in (("dq", i.q.shape, i.q.dtype), ("dkv", arguments[1].shape, torch.float32)):
        room = torch.zeros(4 * math.prod(shape), dtype=dtype)
        sliding = room.as_strided(shape, (shape[-1] // 2, 1) if len(shape) == 2 else (shape[-1], shape[-1] // 2, 1))
        for wrong in (sliding, room[0].expand(shape), room.as_strided(shape, (1,) * len(shape))):
            with pytest.raises(cute_sparse_mla.ArgumentValueError, match=f"{name}: elements must not overlap"):
                compat.sparse_attention_backward_wrapper(*arguments, **{name: wrong})
        assert not room.any()
        for right in (torch.zeros(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape)))),
                      room.view(-1, 4)[:, 1].view(shape)):  # fmt: skip
            done = compat.sparse_attention_backward_wrapper(*arguments, **{name: right})
            assert done[name] is right and torch.equal(right.to(i.q.dtype), want[name])
    with torch.inference_mode():
        dq = torch.zeros_like(i.q)
    with pytest.raises(cute_sparse_mla.ArgumentValueError, match="dq: must be writable; got a tensor of inf"):
        compat.sparse_attention_backward_wrapper(*arguments, dq=dq)


@pytest.mark.parametrize("make", [
    lambda t: t, lambda t: t[:], lambda t: t * 1, lambda t: torch.stack([t, t]).unbind()[1],
], ids=["leaf", "view_of_a_leaf", "in_a_graph", "one_of_several_views"])  # fmt: skip
def test_destinations_that_require_gradients(make: Callable[[Tensor], Tensor]) -> None:
    """Those that torch refuses to change are refused by name, before anything runs; without gradients it writes all."""
    i = ONE_GROUP.but(sink="random").inputs(seed=15)
    arguments = cudnn_arguments(i)
    want = compat.sparse_attention_backward_wrapper(*arguments)
    for name in ("dq", "dkv"):
        given = make(torch.zeros_like(want[name]).requires_grad_())
        assert given.requires_grad
        with Computed() as ops, pytest.raises(cute_sparse_mla.ArgumentValueError, match=f"{name}: must not require"):
            compat.sparse_attention_backward_wrapper(*arguments, **{name: given})
        assert not ops
        with torch.no_grad():
            done = compat.sparse_attention_backward_wrapper(*arguments, **{name: given})
        assert done[name] is given and torch.equal(given, want[name])


class Computed(TorchDispatchMode):
    """The operators that run inside it, but for those that only look at a tensor otherwise."""

    VIEWS = ("aten.unsqueeze", "aten.view", "aten.expand", "aten.detach", "aten.alias", "aten.slice")

    def __enter__(self) -> Any:
        super().__enter__()
        self.ops: list[str] = []
        return self.ops

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(op).startswith(self.VIEWS):
            self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


BY_DTYPE = (torch.float64, torch.int64)


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda f: f.__name__)
def test_wrong_arguments_are_refused_before_anything_is_computed(drop_in: Callable) -> None:
    """But by the op of the call itself, which checks first; a wrong dtype is blamed on the tensor that has it."""
    # With a config that has sparse_mla make the lists of token groups ahead.
    arguments = all_arguments(drop_in) | dict(config=cute_sparse_mla.SparseAttentionConfig(tokens_per_tile=2))
    first = ["cute_sparse_mla.fwd.default"]
    for name, value in arguments.items():
        wrong: list[Any] = [object()]
        if isinstance(value, Tensor) and name != "workspace":
            wrong += [value.to(dtype) for dtype in BY_DTYPE if dtype != value.dtype and value.is_floating_point()]
            wrong += [value.bool(), value.to("meta")]
            if name in ("q", "kv", "o", "do", "out", "dout"):
                strided = value.new_zeros((*value.shape, 2))[..., 0]
                wrong += [strided, value.new_zeros(value.numel() + 1)[1:].view(value.shape)]
        for other in wrong:
            with Computed() as ops, pytest.raises(cute_sparse_mla.ArgumentError) as caught:
                drop_in(**{**arguments, name: other})
            assert ops in ([], first), (name, ops)
            # All others are then on another device than q.
            moved = isinstance(other, Tensor) and other.is_meta and name == "q"
            assert caught.value.argument == name or moved, (name, caught.value)


def test_layouts_are_refused_with_the_callers_strides() -> None:
    """As the docstrings say; the cuDNN form has a kv of two axes."""
    i = ONE_GROUP.but(sink="random").inputs(seed=16)
    arguments = cudnn_arguments(i)
    rows, width = arguments[1].shape
    wide = torch.zeros(rows, width + 4, dtype=i.kv.dtype)
    wrong = (
        (wide[:, :width], r"rows must start on 16 bytes; got strides \(44, 1\)"),
        (wide.t().contiguous().t()[:, :width], r"last dimension must be contiguous.*; got strides \(1, 21\)"),
        (wide[:1, :width].expand(rows, width), r"must not be expanded.*; got strides \(0, 1\)"),
    )
    for kv, message in wrong:
        with pytest.raises(cute_sparse_mla.ArgumentValueError, match=f"kv: {message}"):
            compat.sparse_attention_backward_wrapper(arguments[0], kv, *arguments[2:])
    for drop_in in DROP_INS:
        assert "else refused" in inspect.getdoc(drop_in)


@pytest.mark.sm90
def test_nothing_synchronises() -> None:
    """After a first call, which compiles."""
    case = PACKED.but(G=1, D=576, d_v=512, sink="random", length="random")
    i, batched = case.inputs(device="cuda"), case.but(packed=False, B=2, length=None).inputs(device="cuda")
    arguments = cudnn_arguments(i)

    def step() -> None:
        compat.flash_mla_sparse_fwd(i.q, i.kv, i.indices, 0.2, 512, i.attn_sink, i.topk_length)
        compat.sparse_attention(batched.q, batched.kv, batched.indices, 0.2, 512, batched.attn_sink)
        out, lse = compat.sparse_mla_fwd_interface(batched.q, batched.kv, batched.indices)
        compat.sparse_mla_bwd(batched.q, batched.kv, out, batched.dout, batched.indices, lse, delta=lse)
        compat.sparse_attention_backward_wrapper(*arguments)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_whole() -> None:
    """The drop-ins trace into one graph, scale and lengths dynamic."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(q: Tensor, kv: Tensor, rows: Tensor, lengths: Tensor, scale: float) -> tuple:
        found = compat.flash_mla_sparse_fwd(q, kv, rows, scale, 24, None, lengths)
        return *found, compat.sparse_attention(q[None], kv[None], rows[None], scale, 24)

    for n in range(4):
        i = PACKED.but(S=5 + n, S_kv=30 - n, length="random").inputs(seed=n)
        arguments = (i.q, i.kv, i.indices, i.topk_length, 0.1 + n)
        for mine, eager in zip(step(*arguments), step._torchdynamo_orig_callable(*arguments), strict=True):
            assert torch.equal(mine, eager)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_compiled_backwards() -> None:
    """Those that call their arguments otherwise than this package, destinations included."""
    torch._dynamo.reset()
    i, one = BATCHED.inputs(seed=2), ONE_GROUP.but(sink="random").inputs(seed=2)
    out, lse = compat.sparse_mla_fwd_interface(i.q, i.kv, i.indices, d_v=i.d_v)
    for drop_in, arguments in (
        (compat.sparse_mla_bwd, (i.q, i.kv, out, i.dout, i.indices, lse)),
        (compat.sparse_attention_backward_wrapper, cudnn_arguments(one)),
        (compat.sparse_attention_backward_wrapper, (*cudnn_arguments(one), torch.zeros_like(one.q), one.kv[:, 0] * 0)),
    ):
        compiled = torch.compile(drop_in, fullgraph=True, dynamic=True, backend="aot_eager")
        for mine, eager in zip(compiled(*arguments), drop_in(*arguments), strict=True):
            assert torch.equal(mine, eager)
    torch._dynamo.reset()


def test_exported_with_its_named_gradients() -> None:
    class Backward(torch.nn.Module):
        def forward(self, *arguments: Any) -> Any:
            return compat.sparse_attention_backward_wrapper(*arguments)

    arguments = cudnn_arguments(ONE_GROUP.but(sink="random").inputs(seed=17))
    done, want = torch.export.export(Backward(), arguments).module()(*arguments), Backward()(*arguments)
    assert type(done) is compat.NamedGradients and list(done.keys()) == ["dq", "dkv", "d_sink"]
    assert all(torch.equal(mine, eager) for mine, eager in zip(done, want, strict=True))


def test_a_drop_in_itself_compiled() -> None:
    """Its own defaults become numbers that dynamo makes dynamic."""
    torch._dynamo.reset()
    i = PACKED.inputs(seed=1)
    compiled = torch.compile(compat.flash_mla_sparse_fwd, fullgraph=True, dynamic=True, backend="aot_eager")
    arguments = (i.q, i.kv, i.indices, 0.1, 24)
    for mine, eager in zip(compiled(*arguments), compat.flash_mla_sparse_fwd(*arguments), strict=True):
        assert torch.equal(mine, eager)
    torch._dynamo.reset()


def _names(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def test_the_cudnn_signature_is_that_of_the_installed_one() -> None:
    dsa = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed").DSA
    assert _names(compat.sparse_attention_backward_wrapper) == _names(dsa.sparse_attention_backward_wrapper)
