"""What each rank of the tests of `cute_sparse_mla.parallel` runs; a module of its own, since ranks import it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import parallel as bench_parallel
from bench.cases import Case
from bench.parallel import ONE_TOKEN
from cute_sparse_mla import indices, parallel
from cute_sparse_mla.examples import head_parallel
from cute_sparse_mla.precision import Inputs

Results = dict[str, Tensor]
# Parts of 7, 7 and 6 tokens on three ranks; batched ones of 8.
PACKED = Case("packed", S=23, S_kv=23, H=4, K=12, packed=True, causal=True, sink="random", dlse=True)
CASES = (
    PACKED,
    PACKED.but(name="batched", B=2, S=24, S_kv=24, H=4, G=2, invalid="shuffled", length="random", packed=False),
    PACKED.but(name="out_of_range_int64", S=12, S_kv=12, invalid="out_of_range", index_dtype=torch.int64, dlse=False),
    # Fewer queries than rows, bounded by positions of their own.
    PACKED.but(name="compressed", S=23, S_kv=10, K=6, positions="random", sink=None),
    PACKED.but(name="two_tokens", S=2, S_kv=2, K=4, sink=None),
    PACKED.but(name="no_tokens", S=0, S_kv=0, K=4),
)
CU_SEQLENS = (0, 5, 6, 6, 23)


def case_inputs(case: Case, device: torch.device | str) -> Inputs:
    """A case's inputs with the same values on every device; the packed case's rows stay in their documents."""
    i = case.inputs(seed=3)
    if case is PACKED:
        i = replace(i, indices=document_rows())
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(i).items()}
    return Inputs(**moved)


def document_rows(part: Tensor | None = None) -> Tensor:
    """Top-k rows of a lightning indexer for all tokens of the packed documents, or for those in `part`."""
    gen = torch.Generator().manual_seed(4)
    iq, ik, weights = (torch.rand(shape, generator=gen) for shape in ((23, 2, 8), (23, 8), (23, 2)))
    part = torch.arange(23) if part is None else part
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    return indices.select_topk(iq[part], ik, weights[part], PACKED.K, cu_seqlens, q_positions=part)


@dataclass(frozen=True)
class Part:
    """A rank's part of a case, and the splits of queries and kv."""

    inputs: Inputs
    queries: parallel.TokenSplit
    rows: parallel.TokenSplit


def part_of(i: Inputs, kind: str) -> Part:
    axis = 0 if i.q.dim() == 3 else 1
    queries, rows = (parallel.TokenSplit(t.shape[axis], kind) for t in (i.q, i.kv))
    own: dict[str, Any] = {"kv": rows.split(i.kv, axis)}
    for name in ("q", "indices", "dout", "dlse", "topk_length", "q_positions"):
        value = getattr(i, name)
        own[name] = None if value is None else queries.split(value, axis)
    return Part(replace(i, **own), queries, rows)


def run_case(i: Inputs, kind: str) -> Results:
    """The explicit calls, and the differentiable one with a plain and with an overlapped gather."""
    part = part_of(i, kind)
    own, split = part.inputs, part.rows
    kv = parallel.gather_kv(own.kv, split)
    options = own.options | dict(split=split, config=ONE_TOKEN)
    out, lse = parallel.fwd(own.q, kv, own.indices, d_v=own.d_v, **options)
    dq, dkv, d_sink = parallel.bwd(
        own.q, own.kv, out, own.dout, own.indices, lse, dlse=own.dlse, dkv_dtype=torch.float32, **options
    )
    results = dict(out=out, lse=lse, dq=dq, dkv=dkv, d_sink=d_sink, positions=part.queries.positions())
    results["unsplit"] = part.queries.unsplit(out, dim=out.dim() - 3)
    for name, overlapped in (("plain", False), ("overlapped", True)):
        grads = differentiable(own, split, overlapped)
        results |= {f"{name}_{key}": value for key, value in grads.items()}
    return {name: value.cpu() for name, value in results.items() if value is not None}


def differentiable(own: Inputs, split: parallel.TokenSplit, overlapped: bool) -> Results:
    q, kv = own.q.clone().requires_grad_(), own.kv.clone().requires_grad_()
    sink = None if own.attn_sink is None else own.attn_sink.clone().requires_grad_()
    rows = parallel.gather_kv(kv, split) if overlapped else kv
    # Recorded after the gather has started: its backward comes before that of the gather.
    projected = q * 1
    options = own.options | dict(split=split, config=ONE_TOKEN, attn_sink=sink)
    out, lse = parallel.sparse_mla(projected, rows, own.indices, return_lse=True, d_v=own.d_v, **options)
    outputs, grads = ((out,), (own.dout,)) if own.dlse is None else ((out, lse), (own.dout, own.dlse))
    torch.autograd.backward(outputs, grads)
    results = dict(out=out.detach(), lse=lse.detach(), dq=q.grad, dkv=kv.grad)
    return results if sink is None else results | dict(d_sink=sink.grad)


def verdicts(device: torch.device) -> dict[tuple, dict[str, Any]]:
    """The bench's verdicts on two tokens with a value in one tensor, in the parts only or in the whole, too.

    Each of two ranks has a token, a third none.
    """
    split = parallel.TokenSplit(2, "contiguous")
    shapes = dict(out=(2, 2, 4), lse=(2, 2), dq=(2, 2, 4), dkv=(2, 1, 4))
    found: dict[tuple, dict[str, Any]] = {}
    for name, value, token, in_whole in itertools.product(shapes, (math.nan, math.inf, 2.0), (0, 1), (False, True)):
        whole = {n: torch.ones(shape, device=device) for n, shape in shapes.items()}
        # A row without a valid slot, and one that no row attends to.
        whole["lse"][0, 0], whole["dkv"][0] = -math.inf, 0
        parts = {n: t.clone() for n, t in whole.items()}
        for tensors in (parts, whole) if in_whole else (parts,):
            tensors[name][token] = value
        own = tuple(split.split(t) for t in parts.values())
        found[name, value, token, in_whole] = bench_parallel.verify(tuple(whole.values()), own, split)
    return found


def run_rank(rank: int, ranks: int, folder: str, device_type: str) -> None:
    """Everything on one rank; results are left in `folder`."""
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    results: dict[Any, Any] = {}
    for case, kind in itertools.product(CASES, parallel.SPLITS):
        results[case.name, kind] = run_case(case_inputs(case, device), kind)
    for kind in parallel.SPLITS:
        results["rows", kind] = document_rows(parallel.TokenSplit(PACKED.S, kind).positions())
    results["heads"] = head_parallel.compare(device, heads=5, T=40)
    options = dict(tokens=5, heads=2, reps=1, splits="zigzag", device=device_type, out=f"{folder}/rows.jsonl")
    results["bench"] = bench_parallel.main([f"--{name}={value}" for name, value in options.items()])
    results["verdicts"] = verdicts(device)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
