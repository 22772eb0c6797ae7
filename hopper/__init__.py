"""Hopper (SM90) kernels in TileLang; packaged as `cute_sparse_mla.hopper`."""
