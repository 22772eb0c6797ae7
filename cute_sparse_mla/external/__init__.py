"""Other people's kernels behind this front-end, where a user has them installed: `backend="flash_mla"`, `"cudnn"`.

Each module converts the contract's arguments to its package's conventions, exactly, and refuses by name what the
package cannot compute. What is copied is stated there: padded heads, and `indices` where they must be rewritten
(`arguments.peer_rows`). `q`, `kv`, `out` and `dout` are never copied for their layout.

An external backend has no kernels of its own to compile: `warmup` does nothing, and the package may compile at the
first call of each shape.
"""
