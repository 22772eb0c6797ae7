"""Sums of dkv in fixed order, for a deterministic backward: an `ordered` main kernel stores the terms, these add them.

The terms of a part are those of some tiles (in order of batch entries, tokens, groups and tiles of heads) and of `W`
slots of each: row `x W + slot` has those of tile x. `term_rows` says which row of dkv each term belongs to; torch sorts
that stably, and `ordered_sums` adds to every row its terms one after the other:

    sums[r] += terms[order[starts[r]]] + ... + terms[order[starts[r + 1] - 1]]      left to right, in fp32

One warp a row at a time; a row without terms is neither read nor written. No atomic operation, so nothing depends on
schedules. On an H200 (4096 x 8192, D 576, K 2048) sums beside the main kernel of the next part, on 24 or 32
multiprocessors of their own, took longer than one after the other (21.0 and 20.1 against 19.4 ms in a graph).
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import SumPlan, TermPlan
from .tile import limit_at

THREADS = 256
SUM_THREADS = 512  # 16 warps, whose registers fill a multiprocessor

SUM = r"""
namespace sparse_mla {
// A row a warp: adds terms[order[i] - base], i from starts[row] to starts[row + 1], to the row's D fp32. Lane l has
// columns 4 l to 4 l + 3 of each 128.
template <int D>
__device__ __forceinline__ void sum_terms(const void *term_rows, const void *term_order, const void *term_starts,
                                          long long base, void *sum_rows, long long rows) {
  constexpr int Parts = (D + 127) / 128, Ahead = 4;
  const float *terms = static_cast<const float *>(term_rows);
  const long long *order = static_cast<const long long *>(term_order);
  const int *starts = static_cast<const int *>(term_starts);
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const int first = starts[row], end = starts[row + 1];
  if (first >= end) return;
  int column[Parts];
#pragma unroll
  for (int j = 0; j < Parts; ++j) {
    // The last columns of 576 are those of half a warp; the others repeat a load of theirs and do not store.
    column[j] = 128 * j + 4 * lane;
    if (column[j] >= D) column[j] -= 128;
  }
  float *sums = static_cast<float *>(sum_rows) + row * D;
  float4 sum[Parts];
#pragma unroll
  for (int j = 0; j < Parts; ++j) sum[j] = *reinterpret_cast<const float4 *>(sums + column[j]);
  for (int chunk = first; chunk < end; chunk += 32) {
    const int mine = static_cast<int>(order[min(chunk + lane, end - 1)] - base), count = min(32, end - chunk);
    for (int i = 0; i < count; i += Ahead) {
      float4 term[Ahead][Parts];
#pragma unroll
      for (int u = 0; u < Ahead; ++u) {
        const float *from = terms + static_cast<long long>(__shfl_sync(~0u, mine, i + u)) * D;
#pragma unroll
        for (int j = 0; j < Parts; ++j) term[u][j] = *reinterpret_cast<const float4 *>(from + column[j]);
      }
#pragma unroll
      for (int u = 0; u < Ahead; ++u) {
        // Adding -0 changes nothing. No branch, into which loads would be moved.
        const bool real = i + u < count;
#pragma unroll
        for (int j = 0; j < Parts; ++j) {
          sum[j].x += real ? term[u][j].x : -0.f;
          sum[j].y += real ? term[u][j].y : -0.f;
          sum[j].z += real ? term[u][j].z : -0.f;
          sum[j].w += real ? term[u][j].w : -0.f;
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < Parts; ++j)
    if (128 * j + 4 * lane < D) *reinterpret_cast<float4 *>(sums + column[j]) = sum[j];
}
}  // namespace sparse_mla
"""


def build_term_rows(plan: TermPlan) -> PrimFunc:
    """`Rows [parts, B, L, G, tiles, W]`, flat: `p (rows + 1) + row` of the terms of part p, L tiles from `tile_0`.

    Rows of dkv are numbered `(b S_kv + index) G + g`; `rows`, their number, stands for an invalid slot. Part p has the
    slots from `slot_0 + p W` on.
    """
    i32, i64, idx_t = "int32", "int64", plan.index_dtype
    B, S, L, G, K, N = (T.dynamic(n, i64) for n in ("B", "S", "L", "G", "K", "N"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    tb, ts, tg, pb, ps = (T.dynamic(n, i64) for n in ("t_b", "t_s", "t_g", "p_b", "p_s"))

    @T.prim_func
    def sparse_mla_term_rows(
        Indices: T.StridedTensor((B, L, G, K), (ib, is_, ig, ik), idx_t),
        Lengths: T.StridedTensor((B, L, G), (tb, ts, tg), i32),
        QPositions: T.StridedTensor((B, S), (pb, ps), i64),
        Rows: T.Tensor((N,), i32),
        S_kv: T.int64,
        tile_0: T.int32,
        tiles: T.int32,
        slot_0: T.int32,
        slots: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
    ):
        with T.Kernel(T.cast(T.ceildiv(N, THREADS), i32), threads=THREADS) as bx:
            at = T.alloc_var(i32)
            rest = T.alloc_var(i32)
            at = bx * THREADS + T.get_thread_binding()
            if at < T.cast(N, i32):
                slot = T.alloc_var(i32)
                part = T.alloc_var(i32)
                g = T.alloc_var(i64)
                ti = T.alloc_var(i64)
                t = T.alloc_var(i64)
                b = T.alloc_var(i64)
                length = T.alloc_var(i32)
                limit = T.alloc_var(i64)
                row = T.alloc_var(i64)
                slot = T.truncmod(at, slots)
                rest = T.truncdiv(T.truncdiv(at, slots), tiles)
                g = T.cast(T.truncmod(rest, T.cast(G, i32)), i64)
                rest = T.truncdiv(rest, T.cast(G, i32))
                ti = T.cast(T.truncmod(rest, T.cast(L, i32)), i64)
                rest = T.truncdiv(rest, T.cast(L, i32))
                b = T.cast(T.truncmod(rest, T.cast(B, i32)), i64)
                part = T.truncdiv(rest, T.cast(B, i32))
                slot = slot_0 + part * slots + slot
                length = T.cast(K, i32)
                limit = S_kv
                if has_length != 0:
                    length = T.min(Lengths[b, ti, g], T.cast(K, i32))
                if causal != 0:
                    # Lists of tiles of several tokens hold valid slots only: tiles are tokens here.
                    t = tile_0 + ti
                    limit = T.min(S_kv, t + S_kv - S + 1)
                    if has_positions != 0:
                        limit = limit_at(QPositions[b, t], S_kv)
                row = -1
                if slot < length:
                    row = T.cast(Indices[b, ti, g, slot], i64)
                row = T.if_then_else((row >= 0) & (row < limit), (b * S_kv + row) * G + g, B * S_kv * G)
                Rows[at] = T.cast(part * (B * S_kv * G + 1) + row, i32)

    return sparse_mla_term_rows


def build_sums(plan: SumPlan) -> PrimFunc:
    """Adds the terms of a part to `Sums [rows, D]`.

    `Starts` from `start` on is that of the part, whose positions in `Order` begin at `base`.
    """
    i32, i64 = "int32", "int64"
    rows, terms, N, E = (T.dynamic(n, i64) for n in ("rows", "terms", "N", "E"))
    D = plan.D

    @T.prim_func
    def sparse_mla_ordered_sums(
        Terms: T.Tensor((terms, D), "float32"),
        Order: T.Tensor((N,), i64),
        Starts: T.Tensor((E,), i32),
        Sums: T.Tensor((rows, D), "float32"),
        start: T.int64,
        base: T.int64,
    ):
        with T.Kernel(T.cast(T.ceildiv(rows, SUM_THREADS // 32), i32), threads=SUM_THREADS):
            T.import_source(SUM)
            T.call_extern(
                "handle", f"sparse_mla::sum_terms<{D}>", T.access_ptr(Terms[0, 0], "r", 1),
                T.access_ptr(Order[0], "r", 1), T.access_ptr(Starts[start], "r", 1), base,
                T.access_ptr(Sums[0, 0], "rw", D), rows,
            )  # fmt: skip

    return sparse_mla_ordered_sums
