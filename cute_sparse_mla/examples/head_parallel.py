"""Tensor parallelism by heads: each rank has some of the heads, kv and the rows are the same on all of them.

    torchrun --nproc-per-node 2 -m cute_sparse_mla.examples.head_parallel

Without torchrun the one process has all heads.
Every rank computes its heads' part of dkv for all rows; the parts are summed over the ranks in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cute_sparse_mla
from cute_sparse_mla import arguments, parallel
from cute_sparse_mla.autograd import first_order, readable_gradient
from cute_sparse_mla.errors import SparseMLAError


class HeadShardedAttention(torch.autograd.Function):
    """`HeadShardedAttention.apply(q, kv, indices, group, options)`: `out` of this rank's heads `q [T, H / ranks, D]`.

    `options` are those of `cute_sparse_mla.fwd`, but for sinks; the gradient of kv is that of the heads of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, indices: Tensor, group: Any, options: dict[str, Any]) -> Tensor:
        out, lse = cute_sparse_mla.fwd(q, kv, indices, **options)
        ctx.save_for_backward(q, kv, indices, out, lse)
        ctx.group, ctx.options = group, {name: value for name, value in options.items() if name != "d_v"}
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, kv, indices, out, lse = ctx.saved_tensors
        with torch.no_grad():
            own = readable_gradient(dout, out, ctx.options.get("backend"))
            dq, dkv, _ = cute_sparse_mla.bwd(q, kv, out, own, indices, lse, dkv_dtype=torch.float32, **ctx.options)
            dist.all_reduce(dkv, group=ctx.group)
            dkv = dkv.to(kv.dtype)
        return first_order(dq, q, kv, dout), first_order(dkv, q, kv, dout), None, None, None


def compare(device: torch.device, heads: int = 16, T: int = 64) -> dict[str, float]:
    """Relative errors of `out`, `dq` and `dkv` of the sharded call against the whole call on one rank."""
    gen = torch.Generator(device=device).manual_seed(0)
    q, kv, dout = (
        torch.randn(shape, generator=gen, device=device).bfloat16()
        for shape in ((T, heads, 576), (T, 1, 576), (T, heads, 512))
    )
    rows = cute_sparse_mla.indices.sliding_window(torch.arange(T, device=device), 32)
    out, lse = cute_sparse_mla.fwd(q, kv, rows, causal=True)
    dq, dkv, _ = cute_sparse_mla.bwd(q, kv, out, dout, rows, lse, causal=True)

    def own_heads(x: Tensor) -> Tensor:
        return x.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()

    own_q, own_kv = own_heads(q).requires_grad_(), kv.clone().requires_grad_()
    own_out = HeadShardedAttention.apply(own_q, own_kv, rows, None, dict(causal=True))
    own_dq, own_dkv = torch.autograd.grad(own_out, (own_q, own_kv), own_heads(dout))
    pairs = dict(out=(own_out.detach(), own_heads(out)), dq=(own_dq, own_heads(dq)), dkv=(own_dkv, dkv))
    return {name: float((a.float() - b.float()).norm() / b.float().norm()) for name, (a, b) in pairs.items()}


def main() -> None:
    """NCCL where there are GPUs, one for each rank; gloo on a CPU."""
    try:
        with parallel.process_group(arguments.default_device()) as device:
            errors = compare(device)
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}: relative errors {errors}")
    except SparseMLAError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
