"""Tensor parallelism by heads: each rank has some of the heads, kv and the rows are the same on all of them.

    torchrun --nproc-per-node 2 -m cute_sparse_mla.examples.head_parallel

Every rank computes its heads' part of dkv for all rows; the parts are summed over the ranks in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

import cute_sparse_mla
from cute_sparse_mla.autograd import readable_gradient


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
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, kv, indices, out, lse = ctx.saved_tensors
        dout = readable_gradient(dout, out, ctx.options.get("backend"))
        dq, dkv, _ = cute_sparse_mla.bwd(q, kv, out, dout, indices, lse, dkv_dtype=torch.float32, **ctx.options)
        dist.all_reduce(dkv, group=ctx.group)
        return dq, dkv.to(kv.dtype), None, None, None


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
    """Run under torchrun: NCCL where there is a GPU for each rank, gloo on a CPU."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    errors = compare(device)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: relative errors {errors}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
