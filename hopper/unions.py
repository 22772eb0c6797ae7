"""Gather lists of tiles of several tokens: the union of the tokens' rows of kv, one CTA per (batch entry, tile, group).

`indices [B, S, G, K]` -> `rows`, `bits [B, L, G, C]`, of which the first `lengths [B, L, G]` count, with
`L = ceil(S / tokens)` and `C = tokens K`. A slot is a row of kv and who selected it, bit t for token t of the tile:
distinct rows in rising order, then one slot of one bit for every repeat of a row within a token's own list, in no fixed
order. What the contract calls invalid (range, `topk_length`, causal bound) is in no slot.

The masks of `span` rows at a time stand in shared memory, 16 bits each: every selected row sets its token's bit, and
one scan writes the slots. Bits that were set already are the repeats; they are put down at the end of the list's room
and moved up last. Of a kv longer than `span` the ranges that hold no selected row are skipped: while it sets bits, a
pass finds the lowest row beyond its range, where the next begins. No other memory is used and nothing sorted.
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import UnionPlan

# Words of shared state: next row, repeats, rows counted by each of up to 32 warps.
STATE = 2 + 32

UNION = r"""
namespace sparse_mla {
template <typename Index, int Tokens, int Threads, int Span>
__device__ __forceinline__ void build_union(const void *list, long long token_stride, long long slot_stride,
                                            const int *lengths, const int *limits, int S_kv, int capacity, void *masks,
                                            int *state, void *rows_out, void *bits_out, void *length_out) {
  constexpr int Warps = Threads / 32, Loads = 4, None = 0x7fffffff;
  const Index *indices = static_cast<const Index *>(list);
  unsigned *words = static_cast<unsigned *>(masks);  // two rows each
  uint4 *vectors = static_cast<uint4 *>(masks);
  int *rows = static_cast<int *>(rows_out), *bits = static_cast<int *>(bits_out);
  int *next_row = state, *repeats = state + 1, *counts = state + 2;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int longest = 0, total = 0;
#pragma unroll
  for (int token = 0; token < Tokens; ++token) longest = max(longest, lengths[token]);
  if (thread == 0) *repeats = 0;
  for (int start = 0; start < S_kv;) {
    const int filled = (min(Span, S_kv - start) + 7) / 8;  // vectors in use
    for (int v = thread; v < filled; v += Threads) vectors[v] = make_uint4(0, 0, 0, 0);
    if (thread == 0) *next_row = None;
    __syncthreads();

    int beyond = None;
    for (int chunk = warp; chunk / Tokens * 32 * Loads < longest; chunk += Warps) {
      const int token = chunk % Tokens, first = chunk / Tokens * 32 * Loads + lane;
      const int length = lengths[token], limit = limits[token];
      Index index[Loads];
#pragma unroll
      for (int u = 0; u < Loads; ++u)
        index[u] = first + 32 * u < length ? indices[token * token_stride + (first + 32 * u) * slot_stride] : -1;
#pragma unroll
      for (int u = 0; u < Loads; ++u) {
        if (index[u] < start || index[u] >= limit) continue;
        const int row = static_cast<int>(index[u]) - start;
        if (row >= Span) {
          beyond = min(beyond, row + start);
          continue;
        }
        const unsigned bit = 1u << (row % 2 * 16 + token);
        if (atomicOr(words + row / 2, bit) & bit) {
          const int slot = capacity - 1 - atomicAdd(repeats, 1);
          rows[slot] = row + start;
          bits[slot] = 1 << token;
        }
      }
    }
    if (S_kv - start > Span && beyond != None) atomicMin(next_row, beyond);
    __syncthreads();

    // Each warp owns a stretch of the range: first how many rows it will write, then the rows.
    const int stretch = (filled + Warps - 1) / Warps;
    const int own = min(warp * stretch, filled), end = min(own + stretch, filled);
    int count = 0;
    for (int v = own + lane; v < end; v += 32) {
      const uint4 x = vectors[v];
      count += (x.x % 65536 != 0) + (x.x / 65536 != 0) + (x.y % 65536 != 0) + (x.y / 65536 != 0) +
               (x.z % 65536 != 0) + (x.z / 65536 != 0) + (x.w % 65536 != 0) + (x.w / 65536 != 0);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(~0u, count, step);
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int before = lane < warp ? counts[lane] : 0, all = lane < Warps ? counts[lane] : 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      before += __shfl_xor_sync(~0u, before, step);
      all += __shfl_xor_sync(~0u, all, step);
    }
    int slot = total + before;
    total += all;
    for (int first = own * 4; first < end * 4; first += 32) {
      const unsigned word = first + lane < end * 4 ? words[first + lane] : 0;
      const unsigned low = __ballot_sync(~0u, word % 65536 != 0), high = __ballot_sync(~0u, word / 65536 != 0);
      if ((low | high) == 0) continue;
      const unsigned earlier = (1u << lane) - 1;
      int at = slot + __popc(low & earlier) + __popc(high & earlier);
      if (word % 65536 != 0) {
        rows[at] = start + 2 * (first + lane);
        bits[at++] = word % 65536;
      }
      if (word / 65536 != 0) {
        rows[at] = start + 2 * (first + lane) + 1;
        bits[at] = word / 65536;
      }
      slot += __popc(low) + __popc(high);
    }
    start = S_kv - start > Span ? *next_row : S_kv;
    __syncthreads();
  }

  const int extra = *repeats;
  for (int first = 0; first < extra; first += Threads) {
    int row, bit;
    const int from = capacity - extra + first + thread;
    if (first + thread < extra) row = rows[from], bit = bits[from];
    __syncthreads();
    if (first + thread < extra) rows[total + first + thread] = row, bits[total + first + thread] = bit;
    __syncthreads();
  }
  if (thread == 0) *static_cast<int *>(length_out) = total + extra;
}
}  // namespace sparse_mla
"""
CTYPES = {"int32": "int", "int64": "long long"}


def build(plan: UnionPlan) -> PrimFunc:
    """The lists for `plan`; shapes, strides and flags are run-time values. `capacity` is tokens K."""
    tokens, idx_t, i32, i64 = plan.tokens, plan.index_dtype, "int32", "int64"
    B, S, L, G, K, C = (T.dynamic(n, i64) for n in ("B", "S", "L", "G", "K", "C"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    tb, ts, pb, ps = (T.dynamic(n, i64) for n in ("t_b", "t_s", "p_b", "p_s"))
    function = f"sparse_mla::build_union<{CTYPES[idx_t]}, {tokens}, {plan.threads}, {plan.span}>"

    @T.prim_func
    def sparse_mla_unions(
        Indices: T.StridedTensor((B, S, G, K), (ib, is_, ig, ik), idx_t),
        TopkLength: T.StridedTensor((B, S), (tb, ts), i32),
        QPositions: T.StridedTensor((B, S), (pb, ps), i64),
        Rows: T.Tensor((B, L, G, C), i32),
        Bits: T.Tensor((B, L, G, C), i32),
        Lengths: T.Tensor((B, L, G), i32),
        S_kv: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
    ):
        with T.Kernel(T.cast(B * L * G, i32), threads=plan.threads) as bx:
            T.import_source(UNION)
            masks = T.alloc_shared([plan.span // 2], "uint32")
            state = T.alloc_shared([STATE], i32, scope="shared")
            lengths = T.alloc_shared([tokens], i32, scope="shared")
            limits = T.alloc_shared([tokens], i32, scope="shared")
            tx = T.get_thread_binding()
            g = T.alloc_var(i64)
            ti = T.alloc_var(i64)
            b = T.alloc_var(i64)
            t = T.alloc_var(i64)
            g = T.truncmod(T.cast(bx, i64), G)
            ti = T.truncdiv(T.cast(bx, i64), G)
            b = T.truncdiv(ti, L)
            ti = T.truncmod(ti, L)
            if tx < tokens:
                length = T.alloc_var(i32)
                limit = T.alloc_var(i64)
                t = ti * tokens + tx
                length = 0
                limit = S_kv
                if t < S:
                    length = T.cast(K, i32)
                    if has_length != 0:
                        length = T.max(0, T.min(TopkLength[b, t], T.cast(K, i32)))
                    if causal != 0:
                        limit = T.min(S_kv, t + S_kv - S + 1)
                        if has_positions != 0:
                            limit = T.min(S_kv, QPositions[b, t] + 1)
                lengths[tx] = length
                limits[tx] = T.cast(T.max(T.int64(0), limit), i32)
            T.sync_threads()
            T.call_extern(
                "handle", function, T.access_ptr(Indices[b, ti * tokens, g, 0], "r", 1), is_, ik,
                T.access_ptr(lengths[0], "r", tokens), T.access_ptr(limits[0], "r", tokens), S_kv, T.cast(C, i32),
                T.access_ptr(masks[0], "rw", plan.span // 2), T.access_ptr(state[0], "rw", STATE),
                T.access_ptr(Rows[b, ti, g, 0], "w", 1), T.access_ptr(Bits[b, ti, g, 0], "w", 1),
                T.access_ptr(Lengths[b, ti, g], "w", 1),
            )  # fmt: skip

    return sparse_mla_unions
