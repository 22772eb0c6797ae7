"""Copies that the forward's and the backward's copy warpgroup share. 8 threads a row, 16 bytes a thread and step."""

import tilelang.language as T

VECTOR = 8  # elements of a 16-byte copy
STEP = 64  # columns that the 8 threads of a row copy at a time
PASSES = 4  # of 16 rows: 128 threads cover 64 rows


@T.macro
def load_heads(X, X_s, b, t, head_0, heads, r0, c0, columns):
    """Rows `[head_0, head_0 + 64)` of token t into shared memory; rows from `heads` on become zero and are not read."""
    for r in T.unroll(PASSES):
        for u in T.unroll(columns // STEP):
            T.ptx_cp_async(
                T.access_ptr(X_s[r * 16 + r0, u * STEP + c0], "w", VECTOR),
                T.access_ptr(
                    X[b, t, head_0 + T.if_then_else(r * 16 + r0 < heads, r * 16 + r0, 0), u * STEP + c0], "r", VECTOR
                ),
                VECTOR,
                predicate=r * 16 + r0 < heads,
            )
