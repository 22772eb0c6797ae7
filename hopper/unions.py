"""Gather lists of tiles of several tokens: the union of the tokens' rows of kv, one CTA per (batch entry, tile, group).

`indices [B, S, G, K]` -> `rows`, `bits [B, L, G, C]`, of which the first `lengths [B, L, G]` count, with
`L = ceil(S / tokens)` and `C = tokens K`. A slot is a row of kv and who selected it, bit t for token t of the tile:
distinct rows in rising order, then one slot of one bit for every repeat of a row within a token's own list, by row and
token. What the contract calls invalid (range, `topk_length`, causal bound) is in no slot.

The bits of `span` rows at a time stand in shared memory: every selected row sets its token's bit, without a look at
what was there, and one scan writes the slots, a piece of the range a warp at a time, which the warp puts side by side
in shared memory before it stores them. Where fewer bits are set than there were entries they are set once more, to find
the repeats, which are put down at the end of the list's room, and moved up and sorted last. Of a kv longer than `span`
the ranges that hold no selected row are skipped: while it sets bits, a pass finds the lowest row beyond its range,
where the next begins. No other memory is used and nothing else sorted.

Whether grouping pays is decided on the device. `build_samples` counts, for some tiles and a share of the rows of kv,
the slots of the union and those of the tokens' own lists, with that share of the invalid ones, which a tile of one
token goes through as well; `build` sums these up, says in `chosen` whether the first are at most `per_mille` of the
second, and makes no lists where they are not. The main kernels read `chosen`. `build` begins beside `build_samples` (a
programmatic dependent launch): its first CTAs have set their bits when the samples are there.

One token a tile is allowed: its list is then its row in rising order, without the invalid slots, and `bits` is left
alone.
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from ..union_lists import UnionPlan
from .plan import LIST_THREADS
from .ptx import LEAVE
from .tile import find_tile, leave_unless_chosen, limit_at

# Words of shared state: three offsets, next row, repeats, decision, and how many entries more than bits each of up to
# 32 warps found. Behind them stand the numbers of rows of the range's pieces.
STATE = 9 + 32
# Rows of a warp that are put side by side before they are stored.
STAGED = 256
LEAST_PIECE = 256  # rows of a piece of the range, or twice as many
UNION = r"""
namespace sparse_mla {
constexpr int None = 0x7fffffff;
// Vectors of 16 bytes of a list that a lane has in flight.
constexpr int LIST_LOADS = 4, SAMPLE_LOADS = 4;
// Rows of a lane's 16 up to which a loop over them takes less time than a look at each.
constexpr unsigned FEW_ROWS = 7;
// The lowest bit of a word that is not zero.
__device__ __forceinline__ int lowest(unsigned word) { return __popc(~word & (word - 1)); }
// The highest bit of every `Width`-bit field of a word that is not zero.
template <int Width>
__device__ __forceinline__ unsigned marks(unsigned word) {
  constexpr unsigned High = Width == 16 ? 0x80008000u : Width == 8 ? 0x80808080u : Width == 4 ? 0x88888888u
                          : Width == 2 ? 0xaaaaaaaau : ~0u;
  return Width == 1 ? word : (((word & ~High) + ~High) | word) & High;
}
// Bit n: whether field n of a word is not zero.
template <int Width>
__device__ __forceinline__ unsigned fields_of(unsigned word) {
  unsigned x = marks<Width>(word) >> (Width - 1);
  if constexpr (Width == 8) return x * 0x10204080u >> 28;  // the sum's highest bits are the four fields
  if constexpr (Width <= 2) x = Width == 2 ? (x | x >> 1) & 0x33333333u : x;
  if constexpr (Width == 2) x = (x | x >> 2) & 0x0f0f0f0fu;
  if constexpr (Width == 4) x = (x | x >> 3) & 0x03030303u;
  if constexpr (Width == 4) x = (x | x >> 6) & 0x000f000fu;
  if constexpr (Width == 2) x = (x | x >> 4) & 0x00ff00ffu;
  if constexpr (Width == 4) x = (x | x >> 12) & 0xffu;
  if constexpr (Width == 2) x = (x | x >> 8) & 0xffffu;
  return x;
}
// What a lane looks at a time: 16 rows, or the 8 of 16 bytes.
template <int Width>
struct Unit {
  static constexpr int Rows = Width == 16 ? 8 : 16;
  unsigned words[Width < 2 ? 1 : Width < 16 ? Width / 2 : 4];
  __device__ __forceinline__ static Unit read(const void *masks, int number, bool there) {
    Unit unit = {};
    if constexpr (Width == 1) {
      if (there) unit.words[0] = static_cast<const unsigned short *>(masks)[number];
    } else {
      using Vector = std::conditional_t<Width == 2, unsigned, std::conditional_t<Width == 4, uint2, uint4>>;
      if (there) *reinterpret_cast<Vector *>(unit.words) = static_cast<const Vector *>(masks)[number];
    }
    return unit;
  }
  __device__ __forceinline__ unsigned any() const {
    unsigned all = 0;
#pragma unroll
    for (const unsigned word : words) all |= word;
    return all;
  }
  __device__ __forceinline__ int bits() const {
    int count = 0;
#pragma unroll
    for (const unsigned word : words) count += __popc(word);
    return count;
  }
  // Rows that have a bit.
  __device__ __forceinline__ int taken() const {
    unsigned all = 0;
    int place = 0;
#pragma unroll
    for (const unsigned word : words) all |= marks<Width>(word) >> place++;
    return __popc(all);
  }
  // The same, bit n for row n.
  __device__ __forceinline__ unsigned rows() const {
    unsigned all = 0;
    int place = 0;
#pragma unroll
    for (const unsigned word : words) all |= fields_of<Width>(word) << 32 / Width * place++;
    return all;
  }
};
template <int Width>
__device__ __forceinline__ unsigned field_at(const void *masks, int row) {
  if constexpr (Width == 16) return static_cast<const unsigned short *>(masks)[row];
  constexpr int PerWord = 32 / Width;
  return static_cast<const unsigned *>(masks)[row / PerWord] >> row % PerWord * Width & (2u << (Width - 1)) - 1;
}
// The sum over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  return value;
}
__device__ __forceinline__ int sum_of_warp(unsigned value) {
  return static_cast<int>(__reduce_add_sync(~0u, value));
}
// Whether entries of all tokens' lists can be read 16 bytes at a time.
template <typename Index>
__device__ __forceinline__ bool in_vectors(const Index *list, long long token_stride, long long slot_stride) {
  return slot_stride == 1 && (reinterpret_cast<unsigned long long>(list) | token_stride * sizeof(Index)) % 16 == 0;
}
// A value in a register, which the compiler neither computes anew nor narrows.
__device__ __forceinline__ unsigned in_register(unsigned value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}
__device__ __forceinline__ unsigned shared_address(const void *at) {
  return in_register(static_cast<unsigned>(__cvta_generic_to_shared(at)));
}
// Sets the bit of a token in a row's field of `Width` bits, if `there`; `bit` is the token's in row 0.
template <int Width>
__device__ __forceinline__ void set_bit(unsigned masks, unsigned bit, unsigned row, bool there) {
  const unsigned word = masks + row / (32 / Width) * 4;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      ".reg .b32 before;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "@there atom.shared.or.b32 before, [%0], %1;\n"
      "}" ::"r"(word), "r"(__funnelshift_l(bit, bit, row * Width)), "r"(static_cast<int>(there))
      : "memory");
}
// Calls `use` with the entries of a token's list that a warp reads, -1 among them: the `part`th of `parts` warps. Where
// the list allows it 16 bytes at a time, `Loads` of them in flight. `meanwhile` runs once, behind the first loads.
template <int Loads, typename Index, typename Use, typename Meanwhile>
__device__ __forceinline__ void for_entries(const Index *list, long long slot_stride, int length, bool in_vectors,
                                            int part, int parts, Use use, Meanwhile meanwhile) {
  constexpr int Wide = 16 / sizeof(Index), Chunk = 32 * Wide;
  const int lane = threadIdx.x % 32, whole = in_vectors ? length / Chunk : 0;
  int chunk = part;
  const int4 *from = reinterpret_cast<const int4 *>(list) + (part * 32 + lane);
#pragma unroll 1
  do {
    int4 found[Loads];
#pragma unroll
    for (int u = 0; u < Loads; ++u)
      if (chunk + u * parts < whole) found[u] = from[32 * u * parts];
    if (chunk == part) meanwhile();
#pragma unroll
    for (int u = 0; u < Loads; ++u) {
      if (chunk + u * parts >= whole) break;
      Index entries[Wide];
      memcpy(entries, found + u, sizeof(int4));
      use(entries);
    }
    chunk += Loads * parts;
    from += 32 * Loads * parts;
  } while (chunk < whole);
#pragma unroll 1
  for (chunk = whole + (part + parts - whole % parts) % parts; chunk * Chunk < length; chunk += parts) {
    Index entries[Wide];
#pragma unroll
    for (int u = 0; u < Wide; ++u) {
      const int entry = chunk * Chunk + 32 * u + lane;
      entries[u] = entry < length ? list[entry * slot_stride] : -1;
    }
    use(entries);
  }
}
// Counts of one tile, of every 2^step-th row from `phase`: slots of the union, to state[0], and of the tokens, to
// state[1]; and all invalid slots of the tokens, to state[2]. The caller zeroed them.
template <typename Index, int Tokens, int Threads>
__device__ __forceinline__ void sample_union(const void *list, long long token_stride, long long slot_stride,
                                             const int *lengths, const int *limits, int S_kv, int step, int phase,
                                             void *masks, int *state) {
  constexpr int Warps = Threads / 32, PerVector = 128 / Tokens, Together = Warps / Tokens;
  static_assert(Warps >= Tokens, "a warp for every token");
  const Index *indices = static_cast<const Index *>(list);
  uint4 *vectors = static_cast<uint4 *>(masks);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = warp % Tokens;
  const int rows = ((S_kv - 1) >> step) + 1, filled = (rows + PerVector - 1) / PerVector;
  const Index limit = limits[token];
  const unsigned at = shared_address(masks);
  int distinct = 0, all = 0, valid = 0;
  for_entries<SAMPLE_LOADS>(
      indices + token * token_stride, slot_stride, lengths[token], in_vectors(indices, token_stride, slot_stride),
      warp / Tokens, Together,
      [&](const auto &entries) {
#pragma unroll
        for (const Index index : entries) {
          const bool selects = index >= 0 && index < limit;
          const bool there = selects && (index & ((1 << step) - 1)) == phase;
          valid += selects;
          set_bit<Tokens>(at, 1u << token, static_cast<unsigned>(index >> step), there);
          all += there;
        }
      },
      [&] {
        for (int v = threadIdx.x; v < filled; v += Threads) vectors[v] = make_uint4(0, 0, 0, 0);
        __syncthreads();
      });
  __syncthreads();
  // An entry that set no bit is a repeat, which has a slot of its own.
  for (int n = threadIdx.x; n * Unit<Tokens>::Rows < rows; n += Threads) {
    const auto unit = Unit<Tokens>::read(masks, n, true);
    distinct += unit.taken() - unit.bits();
  }
  distinct = sum_of_warp(distinct + all);
  all = sum_of_warp(all);
  valid = sum_of_warp(valid);
  if (lane == 0) {
    atomicAdd(state, distinct);
    atomicAdd(state + 1, all);
    atomicAdd(state + 2, (warp < Tokens ? lengths[token] : 0) - valid);
  }
  __syncthreads();
}
// Whether the union's slots are few enough, from the counts of all samples once they are there; for a warp.
__device__ __forceinline__ int decide(const void *samples, int count, int per_mille) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int *counts = static_cast<const int *>(samples);
  long long margin = 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < count; i += 32)
    margin += static_cast<long long>(counts[2 * i + 1]) * per_mille - counts[2 * i] * 1000ll;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) margin += __shfl_xor_sync(~0u, margin, step);
  return margin >= 0;
}
template <typename Index, int Tokens, int Threads, int Span, int Width, int Staged>
__device__ __forceinline__ int build_union(const void *list, long long token_stride, long long slot_stride,
                                           const int *lengths, const int *limits, int S_kv, int capacity,
                                           const void *samples, int sampled, int per_mille, bool late, void *masks,
                                           void *staged, int *state, void *rows_out, void *bits_out, void *length_out,
                                           void *all_rows, void *all_bits, void *all_lengths) {
  constexpr int Warps = Threads / 32;
  constexpr int PerWord = 32 / Width, PerVector = 4 * PerWord, Rows = Unit<Width>::Rows, Piece = 32 * Rows;
  constexpr int Together = Warps < Tokens ? 1 : Warps / Tokens;  // warps that read the list of one token
  constexpr unsigned OwnPieces = Warps == 32 ? 1 : ~0u / ((1u << Warps % 32) - 1);  // of 32, those of warp 0
  const Index *indices = static_cast<const Index *>(list);
  unsigned *words = static_cast<unsigned *>(masks);
  uint4 *vectors = static_cast<uint4 *>(masks);
  // What is needed late only is kept where it takes no registers.
  long long *offsets = reinterpret_cast<long long *>(state);
  int *next_row = state + 6, *repeats = state + 7, *chosen = state + 8;
  int *surplus = state + 9;
  unsigned short *counts = reinterpret_cast<unsigned short *>(state + 9 + 32);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const bool side_by_side = in_vectors(indices, token_stride, slot_stride);
  unsigned short *own_staged = static_cast<unsigned short *>(staged) + warp * Staged;
  const unsigned at = shared_address(masks);
  int total = 0;
  if (thread == 0) {
    offsets[0] = static_cast<int *>(rows_out) - static_cast<int *>(all_rows);
    offsets[1] = static_cast<int *>(bits_out) - static_cast<int *>(all_bits);
    offsets[2] = static_cast<int *>(length_out) - static_cast<int *>(all_lengths);
    *repeats = 0;
    *chosen = 1;
  }
  bool decided = sampled == 0;
  // Whether lists are made, known behind the next barrier.
  const auto ask = [&] {
    if (decided || warp != 0) return;
    const int answer = decide(samples, sampled, per_mille);
    if (lane == 0) *chosen = answer;
  };
  if (late) {
    ask();
    __syncthreads();
    if (!*chosen) return 0;
    decided = true;
  }
  for (int start = 0; start < S_kv;) {
    const bool more = S_kv - start > Span;
    const int in_range = min(Span, S_kv - start), filled = (in_range + PerVector - 1) / PerVector;
    int surplus_here = 0;
    unsigned beyond = None;
    const auto clear = [&] {
#pragma unroll 1
      for (int v = thread; v < filled; v += Threads) vectors[v] = make_uint4(0, 0, 0, 0);
    };
    // Bits are set without a look at what was there.
#pragma unroll 1
    for (int token = warp % Tokens; token < Tokens; token += Warps) {
      const unsigned left = max(limits[token] - start, 0), within = min(left, static_cast<unsigned>(Span));
      for_entries<LIST_LOADS>(
          indices + token * token_stride, slot_stride, lengths[token], side_by_side, warp / Tokens, Together,
          [&](const auto &entries) {
#pragma unroll
            for (const Index index : entries) {
              const auto row = static_cast<std::make_unsigned_t<Index>>(index - start);
              set_bit<Width>(at, 1u << token, static_cast<unsigned>(row), row < within);
              surplus_here += row < within;
            }
            if (!more) return;
#pragma unroll
            for (const Index index : entries) {
              const auto row = static_cast<std::make_unsigned_t<Index>>(index - start);
              if (row >= Span && row < left) beyond = min(beyond, static_cast<unsigned>(row));
            }
          },
          [&] {
            if (token >= Warps) return;
            clear();
            if (thread == 0) *next_row = None;
            __syncthreads();
          });
    }
    if (beyond != None) atomicMin(next_row, static_cast<int>(start + beyond));
    ask();
    __syncthreads();
    if (!*chosen) return 0;
    decided = true;

    int *const rows = static_cast<int *>(all_rows) + offsets[0];
    int *const bits = static_cast<int *>(all_bits) + offsets[1];
    // Warps take turns at pieces of the range: first how many rows each has, then the rows.
#pragma unroll 1
    for (int piece = warp; piece * Piece < in_range; piece += Warps) {
      const int number = 32 * piece + lane;
      const auto unit = Unit<Width>::read(masks, number, number * Rows < in_range);
      int count = 0;
      if (__any_sync(~0u, unit.any())) {
        count = sum_of_warp(unit.taken());
        surplus_here -= unit.bits();
      }
      if (lane == 0) counts[piece] = count;
    }
    surplus_here = sum_of_warp(surplus_here);
    if (lane == 0) surplus[warp] = surplus_here;
    __syncthreads();
    // Where there are fewer bits than entries they are set once more, to find the repeats.
    if (sum_of_warp(lane < Warps ? surplus[lane] : 0)) {
      clear();
      __syncthreads();
#pragma unroll 1
      for (int token = warp % Tokens; token < Tokens; token += Warps) {
        const int stop = start + min(max(limits[token] - start, 0), Span);
#pragma unroll 1
        for (int entry = warp / Tokens * 32 + lane; entry < lengths[token]; entry += Together * 32) {
          const Index index = indices[token * token_stride + entry * slot_stride];
          if (index < start || index >= stop) continue;
          const unsigned row = static_cast<unsigned>(index - start), bit = 1u << row % PerWord * Width + token;
          if (atomicOr(words + row / PerWord, bit) & bit) {
            const int place = capacity - 1 - atomicAdd(repeats, 1);
            rows[place] = static_cast<int>(index);
            if (Tokens > 1) bits[place] = 1 << token;
          }
        }
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int base = 0; base * Piece < in_range; base += 32) {
      const int counted = (base + lane) * Piece < in_range ? counts[base + lane] : 0;
      int before = sum_up_to(counted, lane) - counted + total;
      total = __shfl_sync(~0u, before + counted, 31);
      unsigned own = __ballot_sync(~0u, counted) & OwnPieces << warp;
#pragma unroll 1
      for (; own; own &= own - 1) {
        const int n = lowest(own), first = (base + n) * Piece, found = __shfl_sync(~0u, counted, n);
        int slot = __shfl_sync(~0u, before, n);
        // A lane a row, which pays where many are selected.
        if (Width == 16 || found > Staged) {
#pragma unroll Width == 16 ? 4 : 1
          for (int row = first + lane; row - lane < min(first + Piece, in_range); row += 32) {
            const unsigned field = row < in_range ? field_at<Width>(masks, row) : 0;
            const unsigned there = __ballot_sync(~0u, field);
            const int at = slot + __popc(there & (1u << lane) - 1);
            if (field) rows[at] = start + row;
            if (field && Tokens > 1) bits[at] = field;
            slot += __popc(there);
          }
          continue;
        }
        const int number = first / Rows + lane;
        const unsigned there = Unit<Width>::read(masks, number, number * Rows < in_range).rows();
        const int mine = __popc(there);
        const int upto = sum_up_to(mine, lane);
        // Rows are put side by side in shared memory first: lanes that store them as they find them take twice as long.
        unsigned short *to = own_staged + upto - mine;
        const unsigned lane_row = in_register(Rows * lane);
        if (__reduce_max_sync(~0u, static_cast<unsigned>(mine)) <= FEW_ROWS) {
#pragma unroll 1
          for (unsigned left = there; left; left &= left - 1) *to++ = lane_row + lowest(left);
        } else {
#pragma unroll
          for (int n = 0; n < Rows; ++n)
            if (there >> n & 1) *to++ = lane_row + n;
        }
        __syncwarp();
        int *row_to = rows + slot + lane, *bits_to = bits + slot + lane;
#pragma unroll 1
        for (int i = lane; i < found; i += 32, row_to += 32, bits_to += 32) {
          const int row = first + own_staged[i];
          *row_to = start + row;
          if (Tokens > 1) *bits_to = field_at<Width>(masks, row);
        }
        __syncwarp();
      }
    }
    start = more ? *next_row : S_kv;
    __syncthreads();
  }

  int *const rows = static_cast<int *>(all_rows) + offsets[0];
  int *const bits = static_cast<int *>(all_bits) + offsets[1];
  const int extra = *repeats;
#pragma unroll 1
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
#pragma unroll 1
  for (int width = 2; width < 2 * extra; width *= 2)
#pragma unroll 1
    for (int span = width; span > 1; span /= 2) {
#pragma unroll 1
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
  if (thread == 0) static_cast<int *>(all_lengths)[offsets[2]] = total + extra;
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
    words = STATE + -(-plan.span // LEAST_PIECE) // 2 + 1

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
            state = T.alloc_shared([words], i32, scope="shared")
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
                T.access_ptr(state[0], "rw", words),
                T.access_ptr(Rows[b, ti, g, 0], "w", 1), T.access_ptr(Bits[b, ti, g, 0], "w", 1),
                T.access_ptr(Lengths[b, ti, g], "w", 1),
                T.access_ptr(Rows[0, 0, 0, 0], "w", 1), T.access_ptr(Bits[0, 0, 0, 0], "w", 1),
                T.access_ptr(Lengths[0, 0, 0], "w", 1),
            )  # fmt: skip
            if (bx == 0) & (tx == 0):
                Chosen[0] = chosen

    return sparse_mla_unions


def build_samples(plan: UnionPlan) -> PrimFunc:
    """`Samples [N, 2]` for `plan`: of N tiles, evenly spaced, the slots of the union and those of the tokens' lists."""
    tokens, idx_t, i32, i64 = plan.tokens, plan.index_dtype, "int32", "int64"
    B, S, G, K, N = (T.dynamic(n, i64) for n in ("B", "S", "G", "K", "N"))
    ib, is_, ig, ik = (T.dynamic(n, i64) for n in ("i_b", "i_s", "i_g", "i_k"))
    tb, ts, pb, ps = (T.dynamic(n, i64) for n in ("t_b", "t_s", "p_b", "p_s"))
    function = f"sparse_mla::sample_union<{CTYPES[idx_t]}, {tokens}, {plan.threads}>"

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
            state = T.alloc_shared([3], i32, scope="shared")
            lengths = T.alloc_shared([tokens], i32, scope="shared")
            limits = T.alloc_shared([tokens], i32, scope="shared")
            tx = T.get_thread_binding()
            at = T.alloc_local([4], i32)
            find_tile(at, T.cast(T.truncdiv((2 * T.cast(bx, i64) + 1) * B * L * G, 2 * N), i32), B, G, L, 1)
            g, ti, b = (T.cast(at[n], i64) for n in (1, 2, 3))
            if tx < 3:
                state[tx] = 0
            say_bounds(
                lengths, limits, TopkLength, QPositions, tx, tokens, b, ti * tokens, S, K, S_kv,
                causal, has_length, has_positions,
            )  # fmt: skip
            T.call_extern(
                "handle", function, T.access_ptr(Indices[b, ti * tokens, g, 0], "r", 1), is_, ik,
                T.access_ptr(lengths[0], "r", tokens), T.access_ptr(limits[0], "r", tokens), S_kv,
                step, T.bitwise_and(bx, T.shift_left(1, step) - 1), T.access_ptr(masks[0], "rw", plan.words),
                T.access_ptr(state[0], "rw", 3),
            )  # fmt: skip
            T.sync_threads()
            if tx < 2:
                Samples[bx, tx] = state[tx] + T.if_then_else(tx > 0, T.shift_right(state[2], step), 0)

    return sparse_mla_union_samples
