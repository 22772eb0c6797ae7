"""One harness for correctness and speed; packaged as `cute_sparse_mla.bench`."""
