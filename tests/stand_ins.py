"""Sources of modules with the calling conventions of other packages, which check what those demand of their inputs and
compute by the package's reference."""

FLASH_MLA = """
import math
import torch
import cute_sparse_mla
seen, pointers = [], []
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    assert q.shape[1] in (64, 128) and indices.shape[1] == 1 and indices.shape[2] % 128 == 0 and d_v == 512
    assert indices.dtype == torch.int32 and kv.dim() == 3 and q.dtype == torch.bfloat16
    seen.append((q.shape[1], indices.shape[2]))
    pointers.append((q.data_ptr(), kv.data_ptr(), indices.data_ptr()))
    out, lse = cute_sparse_mla.fwd(q, kv, indices, d_v=d_v, sm_scale=sm_scale, attn_sink=attn_sink,
                                   topk_length=topk_length, backend="reference")
    return out, torch.zeros_like(lse), lse.masked_fill(lse == -math.inf, math.inf)
"""

CUDNN = """
import torch
import cute_sparse_mla
pointers = []
class DSA:
    @staticmethod
    def sparse_attention_backward_wrapper(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None,
                                          topk_length=None, dq=None, dkv=None, block_tile=64, deterministic=False,
                                          stream=None, workspace=None, q_cluster_mode="off"):
        assert kv.dim() == 2 and topk_idxs.dim() == 2 and topk_idxs.dtype == torch.int32
        assert attn_sink.shape == (q.shape[1],) and attn_sink.dtype == lse.dtype == torch.float32
        assert all(t.is_contiguous() for t in (q, kv, out, dout, lse, topk_idxs))
        pointers.append((q.data_ptr(), kv.data_ptr(), out.data_ptr(), dout.data_ptr(), topk_idxs.data_ptr()))
        dq, dkv, d_sink = cute_sparse_mla.bwd(
            q, kv[:, None], out, dout, topk_idxs, lse, sm_scale=softmax_scale, topk_length=topk_length,
            attn_sink=attn_sink, backend="reference")
        return {"dq": dq, "dkv": dkv[:, 0], "d_sink": d_sink}
    @staticmethod
    def sparse_attention_forward_wrapper(q, kv, topk_idxs, attn_sink=None, topk_length=None, softmax_scale=None):
        assert q.shape[1:] in ((64, 512), (64, 576), (128, 512)) and kv.dim() == 2 and topk_idxs.dim() == 2
        assert q.is_contiguous() and kv.is_contiguous() and topk_idxs.dtype == torch.int32
        out, lse = cute_sparse_mla.fwd(q, kv[:, None], topk_idxs, sm_scale=softmax_scale, topk_length=topk_length,
                                       attn_sink=attn_sink, backend="reference")
        return {"out": out, "lse": lse.masked_fill(lse == -float("inf"), float("inf"))}
"""
