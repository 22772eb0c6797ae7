"""Gather lists of tiles of several tokens: the union of the tokens' rows of kv, one CTA per (batch entry, tile, group).

`indices [B, S, G, K]` -> `rows`, `bits [B, L, G, C]`, of which the first `lengths [B, L, G]` count, with
`L = ceil(S / tokens)` and `C = tokens K`. A slot is a row of kv and who selected it, bit t for token t of the tile:
distinct rows in rising order, then one slot of one bit for every repeat of a row within a token's own list, by row and
token. What the contract calls invalid (range, `topk_length`, causal bound) is in no slot.

The bits of `span` rows at a time stand in shared memory: every selected row sets its token's bit, and one scan writes
the slots, which a warp puts side by side in shared memory before it stores them. Bits that were set already are the
repeats; they are put down at the end of the list's room and moved up last. Of a kv longer than `span` the ranges that
hold no selected row are skipped: while it sets bits, a pass finds the lowest row beyond its range, where the next
begins. No other memory is used and nothing sorted.

Whether grouping pays is decided on the device. `build_samples` counts, for some tiles and a share of the rows of kv,
the slots of the union and those of the tokens' own lists; `build` sums these up, says in `chosen` whether the first are
at most `per_mille` of the second, and makes no lists where they are not. The main kernels read `chosen`. `build` begins
beside `build_samples` (a programmatic dependent launch): its first CTAs have set their bits when the samples are there.

One token a tile is allowed: its list is then its row in rising order, without the invalid slots, and `bits` is left
alone.
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from ..union_lists import UnionPlan
from .plan import LIST_THREADS
from .ptx import LEAVE
from .tile import find_tile, leave_unless_chosen, limit_at

# Words of shared state: next row, repeats, rows counted by each of up to 32 warps.
STATE = 2 + 32
# Rows of a warp that are put side by side before they are stored.
STAGED = 256
UNION = r"""
namespace sparse_mla {
// The lowest bit of every `Width`-bit field of a word that is not zero.
template <int Width>
__device__ __forceinline__ unsigned taken(unsigned word) {
#pragma unroll
  for (int step = 1; step < Width; step *= 2) word |= word >> step;
  return word & (Width == 16 ? 0x00010001u : Width == 8 ? 0x01010101u : Width == 4 ? 0x11111111u
                 : Width == 2 ? 0x55555555u : ~0u);
}
__device__ __forceinline__ int sum_of_warp(unsigned value) {
  return static_cast<int>(__reduce_add_sync(~0u, value));
}
// Counts of one tile, of every 2^step-th row from `phase`: slots of the union, to state[0], and of the tokens, to
// state[1], both zeroed by the caller.
template <typename Index, int Tokens, int Threads, int Words>
__device__ __forceinline__ void sample_union(const void *list, long long token_stride, long long slot_stride,
                                             const int *lengths, const int *limits, int step, int phase, void *masks,
                                             int *state) {
  constexpr int Warps = Threads / 32, Loads = 4, PerWord = 32 / Tokens;
  const Index *indices = static_cast<const Index *>(list);
  unsigned *words = static_cast<unsigned *>(masks);
  uint4 *vectors = static_cast<uint4 *>(masks);
  const int lane = threadIdx.x % 32;
  int longest = 0, distinct = 0, all = 0;
#pragma unroll
  for (int token = 0; token < Tokens; ++token) longest = max(longest, lengths[token]);
  for (int v = threadIdx.x; v < Words / 4; v += Threads) vectors[v] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  for (int chunk = threadIdx.x / 32; chunk / Tokens * 32 * Loads < longest; chunk += Warps) {
    const int token = chunk % Tokens, first = chunk / Tokens * 32 * Loads + lane;
    const int length = lengths[token], limit = limits[token];
    Index index[Loads];
#pragma unroll
    for (int u = 0; u < Loads; ++u)
      index[u] = first + 32 * u < length ? indices[token * token_stride + (first + 32 * u) * slot_stride] : -1;
#pragma unroll
    for (int u = 0; u < Loads; ++u) {
      if (index[u] < 0 || index[u] >= limit || (index[u] & ((1 << step) - 1)) != phase) continue;
      const int row = static_cast<int>(index[u] >> step), field = row % PerWord * Tokens;
      const unsigned before = atomicOr(words + row / PerWord, 1u << (field + token)) >> field;
      distinct += (before & ((2u << (Tokens - 1)) - 1)) == 0 || (before >> token & 1);
      ++all;
    }
  }
  distinct = sum_of_warp(distinct);
  all = sum_of_warp(all);
  if (lane == 0) {
    atomicAdd(state, distinct);
    atomicAdd(state + 1, all);
  }
  __syncthreads();
}
// Whether the union's slots are few enough, from the counts of all samples; the same answer in every thread.
__device__ __forceinline__ int pays(const void *samples, int count, int per_mille) {
  const int *counts = static_cast<const int *>(samples);
  long long margin = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32)
    margin += static_cast<long long>(counts[2 * i + 1]) * per_mille - counts[2 * i] * 1000ll;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) margin += __shfl_xor_sync(~0u, margin, step);
  return margin >= 0;
}
// The same once the samples are there.
__device__ __forceinline__ int decide(const void *samples, int count, int per_mille) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  return pays(samples, count, per_mille);
}
template <typename Index, int Tokens, int Threads, int Span, int Width, int Staged>
__device__ __forceinline__ int build_union(const void *list, long long token_stride, long long slot_stride,
                                           const int *lengths, const int *limits, int S_kv, int capacity,
                                           const void *samples, int sampled, int per_mille, bool late, void *masks,
                                           void *staged, int *state, void *rows_out, void *bits_out, void *length_out) {
  constexpr int Warps = Threads / 32, Loads = 4, None = 0x7fffffff, PerWord = 32 / Width, PerVector = 4 * PerWord;
  constexpr int Together = Warps < Tokens ? 1 : Warps / Tokens;  // warps that read the list of one token
  constexpr unsigned OfTokens = (2u << (Tokens - 1)) - 1;
  const Index *indices = static_cast<const Index *>(list);
  unsigned *words = static_cast<unsigned *>(masks);
  uint4 *vectors = static_cast<uint4 *>(masks);
  int *rows = static_cast<int *>(rows_out), *bits = static_cast<int *>(bits_out);
  int *next_row = state, *repeats = state + 1, *counts = state + 2;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  unsigned short *own_staged = static_cast<unsigned short *>(staged) + warp * Staged;
  int total = 0;
  bool decided = sampled == 0;
  if (late && !decided) {
    if (!decide(samples, sampled, per_mille)) return 0;
    decided = true;
  }
  // A warp reads the next entries of a token's list before it sets the bits of those at hand.
  Index ahead[Loads];
  int token, entry;
  const Index *from;
  const auto read = [&] {
#pragma unroll
    for (int u = 0; u < Loads; ++u) ahead[u] = entry + 32 * u < lengths[token] ? from[32 * u * slot_stride] : -1;
  };
  const auto begin = [&] {
    entry = warp / Tokens * Loads * 32 + lane;
    from = indices + token * token_stride + entry * slot_stride;
    read();
  };
  if (thread == 0) *repeats = 0;
  for (int start = 0; start < S_kv;) {
    token = warp % Tokens;
    begin();
    const int filled = (min(Span, S_kv - start) + PerVector - 1) / PerVector;  // vectors in use
#pragma unroll 1
    for (int v = thread; v < filled; v += Threads) vectors[v] = make_uint4(0, 0, 0, 0);
    if (thread == 0) *next_row = None;
    __syncthreads();

    int beyond = None;
    while (token < Tokens) {
      const int limit = limits[token];
      const unsigned own_bit = 1u << token;
      Index index[Loads];
#pragma unroll
      for (int u = 0; u < Loads; ++u) index[u] = ahead[u];
      entry += Together * Loads * 32;
      from += Together * Loads * 32 * slot_stride;
      if (entry - lane < lengths[token]) {
        read();
      } else {
        token += Warps;
        if (token < Tokens) begin();
      }
#pragma unroll
      for (int u = 0; u < Loads; ++u) {
        if (index[u] < start || index[u] >= limit) continue;
        const unsigned row = static_cast<unsigned>(index[u] - start);
        if (row >= Span) {
          beyond = min(beyond, static_cast<int>(index[u]));
          continue;
        }
        const unsigned bit = own_bit << row % PerWord * Width;
        if (atomicOr(words + row / PerWord, bit) & bit) {
          const int slot = capacity - 1 - atomicAdd(repeats, 1);
          rows[slot] = static_cast<int>(index[u]);
          if (Tokens > 1) bits[slot] = own_bit;
        }
      }
    }
    if (S_kv - start > Span && beyond != None) atomicMin(next_row, beyond);
    __syncthreads();
    if (!decided && !decide(samples, sampled, per_mille)) return 0;
    decided = true;

    // Each warp owns a stretch of the range: first how many rows it will write, then the rows.
    const int stretch = (filled + Warps - 1) / Warps;
    const int own = min(warp * stretch, filled), end = min(own + stretch, filled);
    static_assert(Span / PerVector <= 32 * Threads, "a bit for every 32 vectors of a stretch");
    unsigned occupied = 0;
    int count = 0;
#pragma unroll 1
    for (int v = own + lane; v - lane < end; v += 32) {
      const uint4 x = v < end ? vectors[v] : make_uint4(0, 0, 0, 0);
      if (!__any_sync(~0u, x.x | x.y | x.z | x.w)) continue;
      occupied |= 1u << (v - own) / 32;
      count += __popc(taken<Width>(x.x)) + __popc(taken<Width>(x.y)) + __popc(taken<Width>(x.z)) +
               __popc(taken<Width>(x.w));
    }
    count = sum_of_warp(count);
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    const int counted = lane < Warps ? counts[lane] : 0;
    int slot = total + sum_of_warp(lane < warp ? counted : 0);
    total += sum_of_warp(counted);
    for (int group = own * 4; group < end * 4; group += 128, occupied /= 2) {
      if (occupied % 2 == 0) continue;
      for (int first = group; first < min(group + 128, end * 4); first += 32) {
        const unsigned word = first + lane < end * 4 ? words[first + lane] : 0;
        unsigned fields = taken<Width>(word);
        if constexpr (PerWord == 2) {
          // Lanes write side by side, which pays where many rows are selected.
          const unsigned low = __ballot_sync(~0u, fields & 1), high = __ballot_sync(~0u, fields >> 16);
          const unsigned earlier = (1u << lane) - 1;
          int at = slot + __popc(low & earlier) + __popc(high & earlier);
          for (int half = 0; half < 2; ++half) {
            if (!(fields >> 16 * half & 1)) continue;
            rows[at] = start + 2 * (first + lane) + half;
            if (Tokens > 1) bits[at] = word >> 16 * half & 0xffff;
            ++at;
          }
          slot += __popc(low) + __popc(high);
          continue;
        }
        const int mine = __popc(fields);
        if (!__any_sync(~0u, mine)) continue;
        int upto = mine;  // inclusive sum over the lanes
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int below = __shfl_up_sync(~0u, upto, step);
          if (lane >= step) upto += below;
        }
        const int found = __shfl_sync(~0u, upto, 31);
        // Rows are put side by side in shared memory first: lanes that store them as they find them take twice as long.
        unsigned short *to = own_staged + upto - mine;
#pragma unroll 1
        for (int done = 0; done < found; done += Staged, to -= Staged) {
          for (; fields && to < own_staged + Staged; fields &= fields - 1) {
            const int shift = __popc(~fields & (fields - 1));
            *to++ = (lane * PerWord + shift / Width) << Tokens | (word >> shift & OfTokens);
          }
          __syncwarp();
#pragma unroll 1
          for (int i = lane; i < min(found - done, Staged); i += 32) {
            const unsigned entry = own_staged[i];
            rows[slot + done + i] = start + first * PerWord + (entry >> Tokens);
            if (Tokens > 1) bits[slot + done + i] = entry & OfTokens;
          }
          __syncwarp();
        }
        slot += found;
      }
    }
    start = S_kv - start > Span ? *next_row : S_kv;
    __syncthreads();
  }

  const int extra = *repeats;
  for (int first = 0; first < extra; first += Threads) {
    int row, bit;
    const int to = total + first + thread, from = capacity - extra + first + thread;
    const bool moved = first + thread < extra;
    if (moved) row = rows[from];
    if (moved && Tokens > 1) bit = bits[from];
    __syncthreads();
    if (moved) rows[to] = row;
    if (moved && Tokens > 1) bits[to] = bit;
    __syncthreads();
  }
  // Sorted by row and bit, so that nothing depends on the order in which warps came: a bitonic network all of whose
  // comparisons put the smaller key first, as if keys above all others filled it up to a power of two.
  int *row_of = rows + total, *bits_of = bits + total;
  for (int width = 2; width < 2 * extra; width *= 2)
    for (int span = width; span > 1; span /= 2) {
      for (int i = thread; i < extra; i += Threads) {
        const int other = span == width ? i ^ (width - 1) : i ^ (span / 2);
        if (other <= i || other >= extra) continue;
        const int row = row_of[i], other_row = row_of[other];
        const int bit = Tokens > 1 ? bits_of[i] : 0, other_bit = Tokens > 1 ? bits_of[other] : 0;
        if (row < other_row || (row == other_row && bit <= other_bit)) continue;
        row_of[i] = other_row;
        row_of[other] = row;
        if (Tokens > 1) {
          bits_of[i] = other_bit;
          bits_of[other] = bit;
        }
      }
      __syncthreads();
    }
  if (thread == 0) *static_cast<int *>(length_out) = total + extra;
  return 1;
}
}  // namespace sparse_mla
"""
CTYPES = {"int32": "int", "int64": "long long"}


@T.macro
def say_bounds(
    lengths, limits, TopkLength, QPositions, tx, tokens, b, first, S, K, S_kv, causal, has_length, has_positions
):  # fmt: skip
    """Each token's number of slots, 0 past the end of the sequence, and the first row that it may not select."""
    if tx < tokens:
        t = T.alloc_var("int64")
        length = T.alloc_var("int32")
        limit = T.alloc_var("int64")
        t = first + tx
        length = 0
        limit = S_kv
        if t < S:
            length = T.cast(K, "int32")
            if has_length != 0:
                length = T.max(0, T.min(TopkLength[b, t], T.cast(K, "int32")))
            if causal != 0:
                limit = T.min(S_kv, t + S_kv - S + 1)
                if has_positions != 0:
                    limit = limit_at(QPositions[b, t], S_kv)
        lengths[tx] = length
        limits[tx] = T.cast(T.max(T.int64(0), limit), "int32")
    T.sync_threads()


def build(plan: UnionPlan) -> PrimFunc:
    """The lists for `plan`; shapes, strides and flags are run-time values. `C` is tokens K.

    The lists are those of the L tiles from `tile_0`. With `samples` above 0 that many of `Samples` decide whether they
    are made, which `Chosen` says, and CTAs below `early` set their bits first; else they are. Nothing runs where
    `Gate` says other than `wanted`, if not negative.
    """
    tokens, idx_t, i32, i64 = plan.tokens, plan.index_dtype, "int32", "int64"
    B, S, L, G, K, C, N = (T.dynamic(n, i64) for n in ("B", "S", "L", "G", "K", "C", "N"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    mb, ml, mg, mc = (T.dynamic(n, i64) for n in ("m_b", "m_l", "m_g", "m_c"))
    tb, ts, pb, ps = (T.dynamic(n, i64) for n in ("t_b", "t_s", "p_b", "p_s"))
    types = f"{CTYPES[idx_t]}, {tokens}, {plan.threads}, {plan.span}, {plan.width}, {STAGED}"
    function = f"sparse_mla::build_union<{types}>"

    @T.prim_func
    def sparse_mla_unions(
        Indices: T.StridedTensor((B, S, G, K), (ib, is_, ig, ik), idx_t),
        TopkLength: T.StridedTensor((B, S), (tb, ts), i32),
        QPositions: T.StridedTensor((B, S), (pb, ps), i64),
        Samples: T.Tensor((N, 2), i32),
        Rows: T.Tensor((B, L, G, C), i32),
        Bits: T.StridedTensor((B, L, G, C), (mb, ml, mg, mc), i32),
        Lengths: T.Tensor((B, L, G), i32),
        Chosen: T.Tensor((1,), i32),
        Gate: T.Tensor((1,), i32),
        wanted: T.int32,
        tile_0: T.int32,
        samples: T.int32,
        per_mille: T.int32,
        early: T.int32,
        S_kv: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
    ):
        with T.Kernel(T.cast(B * L * G, i32), threads=plan.threads) as bx:
            T.import_source(LEAVE + UNION)
            T.annotate_min_blocks_per_sm(LIST_THREADS // plan.threads)
            if samples == 0:
                T.pdl_sync()
            leave_unless_chosen(Gate, wanted)
            masks = T.alloc_shared([plan.words], "uint32")
            staged = T.alloc_shared([plan.threads // 32 * STAGED], "uint16", scope="shared")
            state = T.alloc_shared([STATE], i32, scope="shared")
            lengths = T.alloc_shared([tokens], i32, scope="shared")
            limits = T.alloc_shared([tokens], i32, scope="shared")
            tx = T.get_thread_binding()
            chosen = T.alloc_var(i32)
            at = T.alloc_local([4], i32)
            find_tile(at, bx, B, G, L, 1)
            g, ti, b = (T.cast(at[n], i64) for n in (1, 2, 3))
            first = T.alloc_var(i64)
            first = (tile_0 + ti) * tokens
            say_bounds(
                lengths, limits, TopkLength, QPositions, tx, tokens, b, first, S, K, S_kv,
                causal, has_length, has_positions,
            )  # fmt: skip
            chosen = T.call_extern(
                i32, function, T.access_ptr(Indices[b, first, g, 0], "r", 1), is_, ik,
                T.access_ptr(lengths[0], "r", tokens), T.access_ptr(limits[0], "r", tokens), S_kv, T.cast(C, i32),
                T.access_ptr(Samples[0, 0], "r", 1), samples, per_mille, bx >= early,
                T.access_ptr(masks[0], "rw", plan.words), T.access_ptr(staged[0], "rw", plan.threads // 32 * STAGED),
                T.access_ptr(state[0], "rw", STATE),
                T.access_ptr(Rows[b, ti, g, 0], "w", 1), T.access_ptr(Bits[b, ti, g, 0], "w", 1),
                T.access_ptr(Lengths[b, ti, g], "w", 1),
            )  # fmt: skip
            if (bx == 0) & (tx == 0):
                Chosen[0] = chosen

    return sparse_mla_unions


def build_samples(plan: UnionPlan) -> PrimFunc:
    """`Samples [N, 2]` for `plan`: of N tiles, evenly spaced, the slots of the union and those of the tokens."""
    tokens, idx_t, i32, i64 = plan.tokens, plan.index_dtype, "int32", "int64"
    B, S, G, K, N = (T.dynamic(n, i64) for n in ("B", "S", "G", "K", "N"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    tb, ts, pb, ps = (T.dynamic(n, i64) for n in ("t_b", "t_s", "p_b", "p_s"))
    function = f"sparse_mla::sample_union<{CTYPES[idx_t]}, {tokens}, {plan.threads}, {plan.words}>"

    @T.prim_func
    def sparse_mla_union_samples(
        Indices: T.StridedTensor((B, S, G, K), (ib, is_, ig, ik), idx_t),
        TopkLength: T.StridedTensor((B, S), (tb, ts), i32),
        QPositions: T.StridedTensor((B, S), (pb, ps), i64),
        Samples: T.Tensor((N, 2), i32),
        L: T.int32,
        step: T.int32,
        S_kv: T.int32,
        causal: T.int32,
        has_length: T.int32,
        has_positions: T.int32,
    ):
        with T.Kernel(T.cast(N, i32), threads=plan.threads) as bx:
            T.import_source(UNION)
            T.pdl_trigger()
            masks = T.alloc_shared([plan.words], "uint32")
            state = T.alloc_shared([2], i32, scope="shared")
            lengths = T.alloc_shared([tokens], i32, scope="shared")
            limits = T.alloc_shared([tokens], i32, scope="shared")
            tx = T.get_thread_binding()
            at = T.alloc_local([4], i32)
            find_tile(at, T.cast(T.truncdiv((2 * T.cast(bx, i64) + 1) * B * L * G, 2 * N), i32), B, G, L, 1)
            g, ti, b = (T.cast(at[n], i64) for n in (1, 2, 3))
            if tx < 2:
                state[tx] = 0
            say_bounds(
                lengths, limits, TopkLength, QPositions, tx, tokens, b, ti * tokens, S, K, S_kv,
                causal, has_length, has_positions,
            )  # fmt: skip
            T.call_extern(
                "handle", function, T.access_ptr(Indices[b, ti * tokens, g, 0], "r", 1), is_, ik,
                T.access_ptr(lengths[0], "r", tokens), T.access_ptr(limits[0], "r", tokens),
                step, T.bitwise_and(bx, T.shift_left(1, step) - 1), T.access_ptr(masks[0], "rw", plan.words),
                T.access_ptr(state[0], "rw", 2),
            )  # fmt: skip
            T.sync_threads()
            if tx < 2:
                Samples[bx, tx] = state[tx]

    return sparse_mla_union_samples
