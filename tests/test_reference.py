"""The reference against brute force and `gradcheck`, clause by clause of the contract, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.cases import BASE, CONTRACT_CASES, Case
from cute_sparse_mla import reference
from cute_sparse_mla.precision import Inputs

from . import brute_force

INF, NAN = float("inf"), float("nan")
ORACLE = reference.oracle()
SMALL = BASE.but(S=6, S_kv=11, H=3, K=7, D=24, d_v=16)


def batched(inputs: Inputs) -> tuple[Inputs, dict[str, Any]]:
    """Inputs with a batch axis, and the keywords that forward and backward share."""
    if inputs.q.dim() == 3:
        names = ("q", "kv", "indices", "dout", "q_positions", "topk_length", "dlse")
        lifted = {name: getattr(inputs, name) for name in names}
        lifted = {name: None if tensor is None else tensor[None] for name, tensor in lifted.items()}
        inputs = Inputs(
            **lifted, d_v=inputs.d_v, sm_scale=inputs.sm_scale, causal=inputs.causal, attn_sink=inputs.attn_sink
        )
    return inputs, inputs.options


def both(inputs: Inputs, roundings: reference.Roundings = ORACLE) -> tuple[reference.Forward, reference.Backward]:
    """Forward, and backward from its results."""
    i, options = batched(inputs)
    fwd = reference.forward(i.q, i.kv, i.indices, d_v=i.d_v, roundings=roundings, **options)
    bwd = reference.backward(
        i.q, i.kv, fwd.out, i.dout, i.indices, fwd.lse, dlse=i.dlse, roundings=roundings, **options
    )
    return fwd, bwd


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# -- brute force ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONTRACT_CASES, ids=lambda case: case.name)
def test_equals_brute_force(case: Case) -> None:
    inputs, options = batched(case.inputs(seed=1))
    fwd, bwd = both(inputs)
    out, lse = brute_force.forward(inputs.q, inputs.kv, inputs.indices, d_v=case.d_v, **options)
    empty = lse == -INF
    assert torch.equal(fwd.lse == -INF, empty)
    close(fwd.lse.masked_fill(empty, 0), lse.masked_fill(empty, 0))
    close(fwd.out, out)
    assert not fwd.out[empty].any()

    exact = brute_force.backward(
        inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, dlse=inputs.dlse, **options
    )
    close(bwd.dq, exact.dq)
    close(bwd.dkv, exact.dkv)
    assert not bwd.dq[empty].any()
    assert not bwd.dkv[~exact.touched].any()
    if case.sink is None:
        assert bwd.d_sink is None
    else:
        close(bwd.d_sink, exact.d_sink)
    assert all(torch.isfinite(t).all() for t in (fwd.out, bwd.dq, bwd.dkv))


def test_contract_cases_contain_what_their_names_say() -> None:
    """The patterns do occur in the drawn inputs; a case that lost its sentinel would pass anything."""
    drawn = {case.name: case.inputs(seed=1) for case in CONTRACT_CASES}
    assert (drawn["holes"].indices[..., 1::2] == -1).all()
    assert (drawn["head"].indices[..., 0] == -1).all()
    assert (drawn["tail"].indices[..., -1] == -1).all()
    narrow, wide = {-1, -2, 11, 16, 2**31 - 1, -(2**31)}, {2**32 + 5, -(2**32) + 5}
    assert narrow <= set(drawn["out_of_range"].indices.flatten().tolist())
    assert narrow | wide <= set(drawn["out_of_range_int64"].indices.flatten().tolist())
    assert (drawn["positions"].q_positions < 0).any()
    lengths = drawn["length"].topk_length
    assert (lengths < 7).any()
    assert (drawn["zero_length"].topk_length == 0).any()
    duplicates = drawn["duplicates"].indices.sort(-1).values.diff(dim=-1) == 0
    assert duplicates.any()
    assert (drawn["all_empty"].indices < 0).all()


# -- gradcheck -----------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The reference's forward and backward in float64, as one differentiable function of q, kv and the sink."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sink: Tensor | None, indices: Tensor, options: dict) -> tuple:
        out, lse, _ = reference.forward(q, kv, indices, d_v=3, attn_sink=sink, roundings=ORACLE, **options)
        ctx.save_for_backward(q, kv, sink, indices, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple:
        q, kv, sink, indices, out, lse = ctx.saved_tensors
        dq, dkv, d_sink, _ = reference.backward(
            q, kv, out, dout, indices, lse, dlse=dlse, attn_sink=sink, dkv_dtype=torch.float64, roundings=ORACLE,
            **ctx.options,
        )  # fmt: skip
        return dq, dkv, d_sink, None, None


SINKS = (None, 0.0, 20.0, 88.0, 89.0, 200.0, INF, -INF)
GRADCHECK_CASES = (
    SMALL.but(name="plain"),
    SMALL.but(name="duplicates", duplicates=True, S_kv=4),
    SMALL.but(name="causal", causal=True, S=3, S_kv=2),
    SMALL.but(name="positions", positions="random"),
    SMALL.but(name="length", length="random"),
    SMALL.but(name="groups_holes", G=2, H=4, invalid="out_of_range"),
    SMALL.but(name="batch_empty_row", B=2, invalid="one_row"),
    SMALL.but(
        name="everything", B=2, G=2, H=4, invalid="shuffled", length="zero", causal=True, duplicates=True
    ),
)  # fmt: skip


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("case", GRADCHECK_CASES, ids=lambda case: case.name)
def test_gradcheck(case: Case, sink: float | None) -> None:
    """Gradients through out and lse, of q, kv and the sink, against finite differences."""
    case = case.but(D=4, d_v=3, S=min(case.S, 3), H=min(case.H, 4), S_kv=min(case.S_kv, 5), K=4)
    inputs = case.inputs(seed=3)
    q, kv = inputs.q.double().requires_grad_(), inputs.kv.double().requires_grad_()
    options = {name: value for name, value in inputs.options.items() if name != "attn_sink"}
    sinks = None
    if sink is not None:
        sinks = torch.full((case.H,), sink, dtype=torch.float64)
        sinks.requires_grad_(math.isfinite(sink))

    def outputs(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _Attention.apply(
            leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else sinks, inputs.indices, options
        )
        # An empty row's lse is -inf and constant.
        return out, lse.masked_fill(lse == -INF, 0)

    leaves = (q, kv) if sinks is None or not sinks.requires_grad else (q, kv, sinks)
    assert torch.autograd.gradcheck(outputs, leaves, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shift", [-2.0, 0.0, 3.0])
def test_gradcheck_sink_near_large_lse(shift: float) -> None:
    """Sinks of about the size of an lse near 90, where `exp(sink - lse)` would overflow in single precision."""
    inputs = SMALL.but(D=4, d_v=3, S=3, S_kv=5, K=5).inputs(seed=4)
    indices, options = inputs.indices, dict(sm_scale=1.0)
    q, kv = inputs.q.double().requires_grad_(), inputs.kv.double()
    kv[..., 0], q.data[..., 0] = 9.0, 10.0
    kv.requires_grad_()
    _, lse, _ = reference.forward(q.detach(), kv.detach(), indices, sm_scale=1.0, d_v=3, roundings=ORACLE)
    sink = (lse[0, 0] + shift).detach().requires_grad_()
    assert float(lse.max()) > 85
    assert torch.autograd.gradcheck(lambda *leaves: _Attention.apply(*leaves, indices, options), (q, kv, sink))


# -- clauses worth their own numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 64, 128])
def test_lse_is_a_natural_logarithm(n: int) -> None:
    """q = 0 with n valid slots: ln n."""
    inputs = BASE.but(S=2, H=2).inputs()
    inputs.indices[..., n:] = -1
    _, lse, _ = reference.forward(
        torch.zeros_like(inputs.q), inputs.kv, inputs.indices, sm_scale=inputs.sm_scale, d_v=512
    )
    assert lse.dtype == torch.float32
    assert float((lse - math.log(n)).abs().max()) <= 1e-6


def test_repeated_index_counts_once_per_slot() -> None:
    """`{3, 3}` gives the out of `{3}` and an lse larger by ln 2; its row's gradient is the same."""
    inputs = SMALL.inputs(seed=2)
    once, twice = torch.full((1, 6, 1, 1), 3), torch.full((1, 6, 1, 2), 3)
    results = []
    for indices in (once, twice):
        fwd = reference.forward(inputs.q, inputs.kv, indices, sm_scale=0.2, d_v=16, roundings=ORACLE)
        bwd = reference.backward(
            inputs.q, inputs.kv, fwd.out, inputs.dout, indices, fwd.lse, sm_scale=0.2, roundings=ORACLE
        )
        results.append((fwd, bwd))
    (single, single_grad), (double, double_grad) = results
    close(double.out, single.out, 1e-13)
    close(double.lse - single.lse, torch.full_like(single.lse, math.log(2)), 1e-13)
    close(double_grad.dkv, single_grad.dkv, 1e-13)


def test_sink_extremes() -> None:
    """-inf is no sink, bit for bit; +inf stops everything but the gradient through lse."""
    inputs = SMALL.but(dlse=True).inputs(seed=5)
    none, none_grad = both(inputs)
    i, options = batched(inputs)

    def with_sink(value: float, dlse: Tensor | None) -> tuple[reference.Forward, reference.Backward]:
        sink = dict(options, attn_sink=torch.full((3,), value))
        fwd = reference.forward(i.q, i.kv, i.indices, d_v=16, roundings=ORACLE, **sink)
        bwd = reference.backward(i.q, i.kv, fwd.out, i.dout, i.indices, fwd.lse, dlse=dlse, roundings=ORACLE, **sink)
        return fwd, bwd

    minus, minus_grad = with_sink(-INF, inputs.dlse)
    assert torch.equal(minus.out, none.out) and torch.equal(minus.lse, none.lse)
    assert torch.equal(minus_grad.dq, none_grad.dq) and torch.equal(minus_grad.dkv, none_grad.dkv)
    assert not minus_grad.d_sink.any()

    plus, plus_grad = with_sink(INF, None)
    assert torch.equal(plus.lse, none.lse)
    for tensor in (plus.out, plus_grad.dq, plus_grad.dkv, plus_grad.d_sink):
        assert not tensor.any() and torch.isfinite(tensor).all()
    _, through_lse = with_sink(INF, inputs.dlse)
    assert through_lse.dq.any() and through_lse.dkv.any() and not through_lse.d_sink.any()


@pytest.mark.parametrize("sink", [50.0, 88.0, 89.0, 100.0, 200.0, 1e30, -50.0, -200.0, -1e30, INF, -INF])
@pytest.mark.parametrize("roundings", [reference.default(torch.bfloat16), reference.budget(torch.bfloat16)])
@pytest.mark.parametrize("q_scale", [1.0, 16.0, 64.0])
def test_single_precision_is_finite_for_every_sink(sink: float, roundings: reference.Roundings, q_scale: float) -> None:
    inputs = SMALL.but(sink=sink, dlse=True, invalid="one_row", q_scale=q_scale).inputs(seed=6)
    fwd, bwd = both(inputs, roundings)
    assert torch.isfinite(fwd.out).all()
    assert torch.isfinite(fwd.lse[fwd.lse != -INF]).all()
    assert all(torch.isfinite(t).all() for t in (bwd.dq, bwd.dkv, bwd.d_sink))


# -- what must never be read or written ----------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("rounding", ["oracle", "default", "budget"])
def test_unselected_rows_are_never_read(poison: float, rounding: str) -> None:
    """kv rows that no valid slot selects hold NaN or inf, row 0, the last and those of invalid slots among them."""
    case = SMALL.but(B=2, H=4, G=2, causal=True, length="random", invalid="out_of_range", index_dtype=torch.int64)
    inputs, options = batched(case.but(dlse=True, sink="random").inputs(seed=7))
    inputs.indices[inputs.indices == 0] = 1
    exact = brute_force.backward(
        inputs.q, inputs.kv, inputs.dout, inputs.dout, inputs.indices, torch.zeros(2, 6, 4), **options
    )
    assert not exact.touched[:, 0].any() and not exact.touched.all()
    roundings = {
        "oracle": ORACLE, "default": reference.default(torch.bfloat16), "budget": reference.budget(torch.bfloat16)
    }[rounding]  # fmt: skip
    clean = both(inputs, roundings)
    inputs.kv[~exact.touched] = poison
    dirty = both(inputs, roundings)
    for before, after in zip([*clean[0], *clean[1]], [*dirty[0], *dirty[1]], strict=True):
        assert torch.equal(before, after)


def test_kv_as_a_view_behind_poisoned_rows() -> None:
    """-1 must not reach the row before kv's first."""
    inputs = SMALL.but(invalid="shuffled").inputs(seed=8)
    assert (inputs.indices == -1).any()
    storage = torch.full((1, 13, 1, 24), INF, dtype=torch.bfloat16)
    storage[:, 1:12] = inputs.kv
    i, options = batched(inputs)
    kv = storage[:, 1:12]
    fwd = reference.forward(i.q, kv, i.indices, d_v=16, **options)
    bwd = reference.backward(i.q, kv, fwd.out, i.dout, i.indices, fwd.lse, **options)
    dense, dense_grad = both(inputs, reference.default(torch.bfloat16))
    assert torch.equal(fwd.out, dense.out) and torch.equal(bwd.dq, dense_grad.dq)
    assert torch.equal(bwd.dkv, dense_grad.dkv) and torch.isfinite(bwd.dkv).all()


@pytest.mark.parametrize("sink", [None, "random", INF, -INF])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("rows", ["one_row", "all"])
def test_empty_rows_let_nothing_through(rows: str, poison: float, sink: str | float | None) -> None:
    """Whatever q, out, dout and dlse hold in a row without a valid slot."""
    inputs, options = batched(SMALL.but(invalid=rows, sink=sink, dlse=True).inputs(seed=9))
    clean_fwd, clean = both(inputs)
    empty = (inputs.indices < 0).all(-1).expand(-1, -1, 3)
    out = clean_fwd.out.clone()
    for tensor in (inputs.q, out, inputs.dout, inputs.dlse):
        tensor[empty] = poison
    fwd = reference.forward(inputs.q, inputs.kv, inputs.indices, d_v=16, roundings=ORACLE, **options)
    assert torch.equal(fwd.out, clean_fwd.out) and torch.equal(fwd.lse, clean_fwd.lse)
    bwd = reference.backward(
        inputs.q, inputs.kv, out, inputs.dout, inputs.indices, fwd.lse, dlse=inputs.dlse, roundings=ORACLE, **options
    )
    for before, after in zip(clean, bwd, strict=True):
        assert before is after is None or torch.equal(before, after)
    assert not bwd.dq[empty].any()


def test_dkv_buffer_is_added_into_and_untouched_rows_keep_their_bits() -> None:
    """A canary of -0.0 would become 0.0 by adding 0.0 to it."""
    inputs, options = batched(SMALL.but(B=2, invalid="out_of_range", H=4, G=2, S_kv=30).inputs(seed=10))
    fwd, bwd = both(inputs)
    touched = brute_force.backward(
        inputs.q, inputs.kv, fwd.out, inputs.dout, inputs.indices, fwd.lse, **options
    ).touched
    assert touched.any() and not touched.all()
    start = torch.randn(inputs.kv.shape)
    start[~touched] = -0.0
    buffer = start.clone()
    result = reference.backward(
        inputs.q, inputs.kv, fwd.out, inputs.dout, inputs.indices, fwd.lse, dkv=buffer, roundings=ORACLE, **options
    )
    assert result.dkv is buffer
    untouched = buffer[~touched]
    assert not untouched.any() and torch.signbit(untouched).all()
    close(buffer.double(), start.double() + bwd.dkv, 1e-6)


@pytest.mark.parametrize("dkv_dtype", [None, torch.float32])
def test_dkv_dtype(dkv_dtype: torch.dtype | None) -> None:
    inputs, options = batched(SMALL.inputs(seed=11))
    _, exact = both(inputs)
    fwd = reference.forward(inputs.q, inputs.kv, inputs.indices, d_v=16, **options)
    dkv = reference.backward(
        inputs.q, inputs.kv, fwd.out, inputs.dout, inputs.indices, fwd.lse, dkv_dtype=dkv_dtype, **options
    ).dkv
    assert dkv.dtype == (dkv_dtype or torch.bfloat16)
    error = float((dkv.double() - exact.dkv).norm() / exact.dkv.norm())
    assert error < 1e-2


# -- chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONTRACT_CASES[::4], ids=lambda case: case.name)
def test_chunks_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and two slots at a time give what one chunk gives."""
    inputs = case.but(dlse=True).inputs(seed=12)
    whole = both(inputs)
    monkeypatch.setattr(reference, "CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(reference, "WHOLE_ROW", 2)
    chunked = both(inputs)
    for before, after in zip([*whole[0], *whole[1]], [*chunked[0], *chunked[1]], strict=True):
        assert before is after is None or close(after, before, 1e-12) is None


def test_slots_over_several_chunks_equal_brute_force() -> None:
    """Whole slot chunks without a valid slot stand before, between and after valid ones."""
    inputs, options = batched(SMALL.but(K=10, S=3, sink="random").inputs(seed=13))
    inputs.indices[0, 0, 0, :4] = -1
    inputs.indices[0, 1, 0, 4:8] = -1
    inputs.indices[0, 2, 0, 2:] = -1
    out, lse = brute_force.forward(inputs.q, inputs.kv, inputs.indices, d_v=16, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "WHOLE_ROW", 2)
        fwd, _ = both(inputs)
    close(fwd.out, out)
    close(fwd.lse, lse)


def test_working_set_stays_near_chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that forward and backward make besides results: bounded by the chunk, not by S or K."""
    limit = 1 << 19
    monkeypatch.setattr(reference, "CHUNK_BYTES", {"cpu": limit})
    monkeypatch.setattr(reference, "WHOLE_ROW", 256)
    inputs, _ = batched(SMALL.but(S=40, K=2000, S_kv=100, invalid="shuffled").inputs(seed=14))
    results = 8 * max(40 * 3 * 24, 101 * 24, 40 * 2000)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                self.size = max(self.size, made.numel() * made.element_size())
            return made

    with Largest() as largest:
        both(inputs)
    assert 10 * max(limit, results) < 200 * 1000 * 24 * 8
    assert largest.size <= max(limit, results)


# -- independence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [slice(0, 1), slice(9, 10), slice(3, 5), slice(1, 8)])
@pytest.mark.parametrize("changes", [
    dict(), dict(K=1), dict(K=7), dict(H=5, K=64), dict(H=1), dict(H=1, K=1), dict(K=5000, S_kv=64),
    dict(D=64, d_v=32), dict(sink="random", invalid="shuffled", length="random"), dict(dtype=torch.float16),
])  # fmt: skip
def test_a_query_does_not_depend_on_the_others(changes: dict[str, Any], part: slice) -> None:
    """tokens_per_tile=1 promises the same bits, whatever else is in the call."""
    inputs, options = batched(BASE.but(S=10, H=3, K=17).but(**changes).inputs(seed=15))
    rounding = reference.default(inputs.q.dtype)
    fwd, bwd = both(inputs, rounding)
    fewer = dict(options, topk_length=None if options["topk_length"] is None else options["topk_length"][:, part])
    i = inputs
    out, lse, _ = reference.forward(i.q[:, part], i.kv, i.indices[:, part], d_v=i.d_v, **fewer)
    grad = reference.backward(i.q[:, part], i.kv, out, i.dout[:, part], i.indices[:, part], lse, **fewer)
    assert torch.equal(out, fwd.out[:, part])
    assert torch.equal(lse, fwd.lse[:, part])
    assert torch.equal(grad.dq, bwd.dq[:, part])


def test_batch_entries_and_groups_are_independent() -> None:
    """A batch entry or a group alone gives the same bits as in the call."""
    inputs, options = batched(SMALL.but(B=3, H=6, G=2, invalid="shuffled", causal=True).inputs(seed=16))
    fwd, bwd = both(inputs, reference.default(torch.bfloat16))
    i = inputs
    for b in range(3):
        for g in range(2):
            one, heads = slice(b, b + 1), slice(3 * g, 3 * g + 3)
            q, kv, rows = i.q[one, :, heads], i.kv[one, :, g : g + 1], i.indices[one, :, g : g + 1]
            out, lse, _ = reference.forward(q, kv, rows, d_v=16, **options)
            grad = reference.backward(q, kv, out, i.dout[one, :, heads], rows, lse, **options)
            assert torch.equal(out, fwd.out[one, :, heads]) and torch.equal(lse, fwd.lse[one, :, heads])
            assert torch.equal(grad.dq, bwd.dq[one, :, heads])
            assert torch.equal(grad.dkv, bwd.dkv[one, :, g : g + 1])


@pytest.mark.parametrize("name", ["holes", "head", "out_of_range", "shuffled"])
def test_invalid_slots_equal_the_compacted_row(name: str) -> None:
    """Wherever invalid slots stand, the result is that of the row without them."""
    case = next(case for case in CONTRACT_CASES if case.name == name)
    inputs, options = batched(case.inputs(seed=17))
    fwd, bwd = both(inputs)
    valid = (inputs.indices >= 0) & (inputs.indices < case.S_kv)
    order = valid.int().argsort(dim=-1, descending=True, stable=True)
    compact = inputs.indices.masked_fill(~valid, -1).gather(-1, order)
    i = inputs
    again = reference.forward(i.q, i.kv, compact, d_v=16, roundings=ORACLE, **options)
    grad = reference.backward(i.q, i.kv, again.out, i.dout, compact, again.lse, roundings=ORACLE, **options)
    for got, expected in ((again.out, fwd.out), (again.lse, fwd.lse), (grad.dq, bwd.dq), (grad.dkv, bwd.dkv)):
        close(got, expected, 1e-13)
