"""Blackwell (SM100) kernels in CuTe DSL; packaged as `cute_sparse_mla.sm100`.

Nothing here imports CuTe DSL before a kernel is asked for.
"""

from __future__ import annotations

from .launch import bwd, check, fwd, group_size, make_lists, smem_bytes, warmup

__all__ = ["bwd", "check", "fwd", "group_size", "make_lists", "smem_bytes", "warmup"]
