"""Every argument of every call, wrong in bulk (`doubtful`); test_compat.py and test_parallel.py have theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla import SparseAttentionConfig, indices

from . import doubtful

CASE = Case(S=5, S_kv=9, H=4, G=2, K=6, D=24, d_v=16, packed=True, sink="random", length="random")


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each call with a correct value for every argument."""
    i = CASE.inputs(seed=1)
    positions, cu_seqlens = torch.arange(9), torch.tensor([0, 5, 9], dtype=torch.int32)
    iq, ik, weights = torch.randn(9, 2, 8), torch.randn(9, 8), torch.rand(9, 2)
    rows, (start, stop) = indices.select_topk(iq, ik, weights, 4), indices.causal_ranges(9)
    lists = dict(causal=True, q_positions=positions[:5], topk_length=i.topk_length, backend="reference")
    shared = dict(indices=i.indices, sm_scale=0.1, attn_sink=i.attn_sink, config=SparseAttentionConfig(), plan=None)
    forward = shared | lists | dict(q=i.q, kv=i.kv, d_v=16)
    out, lse = cute_sparse_mla.fwd(**forward)
    backward = shared | lists | dict(q=i.q, kv=i.kv, out=out, dout=i.dout, lse=lse, dlse=torch.zeros_like(lse))
    backward |= dict(deterministic=False, dkv=torch.zeros(i.kv.shape), dkv_dtype=None)
    kernels = dict(heads_per_group=4, D=576, d_v=512, dtype=torch.bfloat16, index_dtype=torch.int32, causal=False)
    kernels |= dict(backward=True, config=None, backend="reference", device="cpu")
    return {
        "fwd": (cute_sparse_mla.fwd, forward),
        "sparse_mla": (cute_sparse_mla.sparse_mla, forward | dict(return_lse=True)),
        "bwd": (cute_sparse_mla.bwd, backward),
        "explain": (cute_sparse_mla.explain, forward | dict(capability=(9, 0))),
        "warmup": (cute_sparse_mla.warmup, kernels),
        "plan": (cute_sparse_mla.plan, lists | dict(
            indices=i.indices, kv_shape=tuple(i.kv.shape), heads_per_group=2, tokens_per_tile=1)),
        "causal_ranges": (indices.causal_ranges, dict(
            T=9, cu_seqlens=cu_seqlens, q_positions=positions, device=torch.device("cpu"))),
        "compressed_positions": (indices.compressed_positions, dict(q_positions=positions, ratio=2)),
        "document_starts": (indices.document_starts, dict(positions=positions, cu_seqlens=cu_seqlens)),
        "local_to_global": (indices.local_to_global, dict(indices=rows, start=start, length=stop)),
        "pad_slots": (indices.pad_slots, dict(indices=rows, multiple=4)),
        "range_rows": (indices.range_rows, dict(start=start, stop=stop, K=3)),
        "select_topk": (indices.select_topk, dict(
            iq=iq, ik=ik, weights=weights, k=4, cu_seqlens=cu_seqlens, q_positions=positions)),
        "sliding_window": (indices.sliding_window, dict(q_positions=positions, window=3, cu_seqlens=cu_seqlens)),
        "union_ratios": (indices.union_ratios, dict(indices=rows, S_kv=9, groups=(2, 4))),
        "window_and_selected": (indices.window_and_selected, dict(window_rows=rows, selected=rows, selected_offset=9)),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_a_result_or_an_error_that_names_an_argument(name: str) -> None:
    call, arguments = calls()[name]
    refused = doubtful.refusals(call, arguments)
    # `explain` reports; a device is asked for only where no tensor says one.
    quiet = set(arguments) if name == "explain" else {"device"} if name == "causal_ranges" else set()
    assert all(count for argument, count in refused.items() if argument not in quiet), refused
