"""Hopper (SM90) kernels in TileLang; packaged as `cute_sparse_mla.hopper`.

Nothing here imports TileLang before a kernel is asked for.
"""

from __future__ import annotations

from .launch import bwd, check, fwd, group_size, make_lists, smem_bytes, warmup

__all__ = ["bwd", "check", "fwd", "group_size", "make_lists", "smem_bytes", "warmup"]
