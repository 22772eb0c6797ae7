"""dkv as plain products in fixed order, for a deterministic backward of token groups: no atomic operation, no sort.

    dkv[r] += sm_scale sum_x dS[x, r] q[x] + sum_x P[x, r] dout[x]     x: rows of all tiles, in their order

A main kernel that stores `FACTORS` leaves P and dS of every slot and of the 64 rows of its tile, rounded, as
`[tile, slot, dS 64 | P 64]`: 256 bytes where the terms of dkv (`ordered.py`) would be 2304. `places` says where each
tile has a row of kv; `products` then multiplies, for 128 rows of kv and half of the columns, tile after tile those dS
and P with the tile's q and dout on the tensor cores. A row that a tile lacks is a zero there, so this pays where the
unions are not much smaller than kv. `repeats` adds what further slots of a row within a token's own list add, which
stand behind the distinct ones.

Pipeline of `products`, time down; the stages of a ring hold the factors of 128 rows, and q or dout, of one tile.

    copy warpgroup                     two matrix warpgroups, 64 rows each
    wait free[n]                       wait ready[n]
    gather dS of a tile, its q,        acc += dS q
      ready[n]                         free[n]
    ... all tiles                      acc *= sm_scale
    the same of P and dout             acc += P dout
                                       dkv += acc
"""

import tilelang.language as T
from tvm.tirx import PrimFunc

from .plan import (
    D_V,
    FACTOR_COLUMNS,
    HALF,
    ITEM,
    MATRIX_REGISTERS,
    MOST_TILES,
    PRODUCER_REGISTERS,
    PRODUCT_ROWS,
    PRODUCT_STAGES,
    ROWS,
    THREADS,
    WARPGROUP,
    PlacePlan,
    Plan,
    RepeatPlan,
)
from .ptx import WGMMA_TYPE
from .tile import PASSES, VECTOR, head_of, token_of

PLACE_THREADS = 512
REPEAT_ROWS, REPEAT_THREADS = 64, 96  # rows of kv of a CTA; threads, 3 pairs of columns each

PLACES = r"""
namespace sparse_mla {
// Where each row of kv stands in a list of `length` slots, counted from `slot_0`, if within `slots` of it, else -1; of
// a row that stands there more than once the first. The list's distinct rows rise; what follows them are repeats.
__device__ __forceinline__ void find_places(const void *list, int length, int slot_0, int slots, int S_kv,
                                            void *places_out, void *distinct_out, int *first_repeat) {
  const int *rows = static_cast<const int *>(list);
  int *places = static_cast<int *>(places_out);
  for (int i = threadIdx.x; i < S_kv; i += blockDim.x) places[i] = -1;
  if (threadIdx.x == 0) *first_repeat = length;
  __syncthreads();
  for (int i = 1 + threadIdx.x; i < length; i += blockDim.x)
    if (rows[i] <= rows[i - 1]) {
      atomicMin(first_repeat, i);
      break;
    }
  __syncthreads();
  const int distinct = *first_repeat, end = min(distinct, slot_0 + slots);
  for (int i = slot_0 + threadIdx.x; i < end; i += blockDim.x) places[rows[i]] = i - slot_0;
  if (threadIdx.x == 0) *static_cast<int *>(distinct_out) = distinct;
}
}  // namespace sparse_mla
"""

TILES = r"""
namespace sparse_mla {
__device__ __forceinline__ void copy_16(unsigned to, const char *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// For the compiler only: the rings are written.
__device__ __forceinline__ void fills(const void *, const void *) {}
// Sixteen bytes a thread of eight rows, 16 apart in shared memory; a row without a place becomes zero, unread.
__device__ __forceinline__ void load_factors(const void *to, const void *from, const void *places_of) {
  const int *places = static_cast<const int *>(places_of);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int r = 0; r < 8; ++r)
    copy_16(shared + 2048 * r, static_cast<const char *>(from) + max(places[r], 0) * 256ll, places[r] >= 0);
}
// The same of four rows of a tile and every 64 of `Columns`, in panels of [64 rows x 128 bytes].
template <int Columns, int RowsOfToken>
__device__ __forceinline__ void load_tile(const void *to, const void *from, const void *offsets_of, int first,
                                          int heads, int left) {
  const long long *offsets = static_cast<const long long *>(offsets_of);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = 16 * r + first;
    const bool there = row % RowsOfToken < heads && row / RowsOfToken < left;
    const char *source = static_cast<const char *>(from) + (there ? offsets[r] : 0);
#pragma unroll
    for (int u = 0; u < Columns / 64; ++u) copy_16(shared + 2048 * r + 8192 * u, source + 128 * u, there);
  }
}
// `scale` times a [64 x Columns] accumulator (m64 layout) to the rows of dkv that `named` has a bit for.
template <int Columns>
__device__ __forceinline__ void add_rows(const void *accumulator, float scale, void *rows, long long stride,
                                         const void *named) {
  const float *acc = static_cast<const float *>(accumulator);
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + 8 * i;
    if (!(static_cast<const unsigned *>(named)[r / 32] >> r % 32 & 1)) continue;
    float2 *to = reinterpret_cast<float2 *>(static_cast<float *>(rows) + r * stride + threadIdx.x % 4 * 2);
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j) {
      float2 sum = to[4 * j];
      sum.x += scale * acc[4 * j + 2 * i];
      sum.y += scale * acc[4 * j + 2 * i + 1];
      to[4 * j] = sum;
    }
  }
}
// Those of `L` tiles that have one of the 128 rows of kv from `first`, in order: how many; and which rows they have, a
// bit each. `with_rows` takes a bit per tile; `stride`: from a tile's places to the next one's. Before another warp
// reads `tiles` the CTA is to be synchronised.
template <int MostTiles>
__device__ __forceinline__ int find_tiles(const void *places_of, long long stride, int L, int first, int S_kv,
                                          int *tiles, unsigned *with_rows, unsigned *named) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 4) named[threadIdx.x] = 0;
  if (threadIdx.x < MostTiles / 32) with_rows[threadIdx.x] = 0;
  __syncthreads();
  for (int tile = threadIdx.x / 32; tile < L; tile += blockDim.x / 32) {
    const int *places = static_cast<const int *>(places_of) + tile * stride;
    unsigned any = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first + 32 * j + lane;
      const unsigned there = __ballot_sync(~0u, row < S_kv && places[row] >= 0);
      if (lane == 0 && there) atomicOr(named + j, there);
      any |= there;
    }
    if (lane == 0 && any) atomicOr(with_rows + tile / 32, 1u << tile % 32);
  }
  __syncthreads();
  int found = 0;
  for (int tile = 0; tile < L; tile += 32) {
    const unsigned all = with_rows[tile / 32];
    if (threadIdx.x < 32 && all >> lane & 1) tiles[found + __popc(all & ((1u << lane) - 1))] = tile + lane;
    found += __popc(all);
  }
  return found;
}
}  // namespace sparse_mla
"""

# One arrival and one commit for the products of both widths: T.wgmma_gemm has its own for each.
WIDE_PRODUCT = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
namespace sparse_mla {
// [64 x 256] and [64 x 64] accumulators (m64 layout) += factors^T of 64 rows of kv, times 320 columns of a tile's rows.
template <tl::DataType Type>
__device__ __forceinline__ void multiply(void *accumulator, void *tail, const void *factors, const void *columns) {
  float *acc = static_cast<float *>(accumulator), *rest = static_cast<float *>(tail);
  char *rows = static_cast<char *>(const_cast<void *>(columns));
  tl::GmmaDescriptor a, b, b_tail;
  tl::initialize_wgmma_descriptor<1, 1, 64>(a, const_cast<void *>(factors));
  tl::initialize_wgmma_descriptor<1, 512, 64>(b, rows);
  tl::initialize_wgmma_descriptor<1, 0, 64>(b_tail, rows + 4 * 8192);
  tl::warpgroup_fence_operand(acc, 128);
  tl::warpgroup_fence_operand(rest, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 256, 16, false, true, 1, 1>(
        uint64_t(a + (k * 32 >> 4)), uint64_t(b + (k * 2048 >> 4)), reinterpret_cast<uint32_t *>(acc), 1);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, true, 1, 1>(
        uint64_t(a + (k * 32 >> 4)), uint64_t(b_tail + (k * 2048 >> 4)), reinterpret_cast<uint32_t *>(rest), 1);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 128);
  tl::warpgroup_fence_operand(rest, 32);
}
}  // namespace sparse_mla
"""

REPEATS = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace sparse_mla {
// Elements 2 i and 2 i + 1 in fp32.
template <bool BFloat16> __device__ __forceinline__ float2 pair(const void *from, long long i) {
  const unsigned word = static_cast<const unsigned *>(from)[i];
  if constexpr (BFloat16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}
template <bool BFloat16> __device__ __forceinline__ float value(const void *from, int i) {
  const float2 both = pair<BFloat16>(from, i >> 1);
  return i & 1 ? both.y : both.x;
}
// Whether one of `L` lists has repeats; `stride` and `next`: from a list's length, and number of distinct rows, on.
__device__ __forceinline__ int any_repeats(const void *lengths_of, long long stride, const void *distinct_of,
                                           long long next, int L) {
  bool any = false;
  for (int i = threadIdx.x % 32; i < L; i += 32)
    any |= static_cast<const int *>(distinct_of)[i * next] < static_cast<const int *>(lengths_of)[i * stride];
  return __any_sync(~0u, any);
}
// What the repeats of a tile that stand in slots from `slot_0` on add to the `Rows` rows of dkv from `first`: they are
// sorted by row and token, and those of a row and token are alike. `factors`: those of slot `slot_0`.
template <bool BFloat16, int D, int Tokens, int Rows, int Threads>
__device__ __forceinline__ void add_repeats(const void *list, const void *bits_of, int distinct, int length,
                                            int slot_0, int slots, int first, int heads, const void *factors,
                                            const void *q, long long q_token, long long q_head, const void *dout,
                                            long long dout_token, long long dout_head, float sm_scale, void *dkv_rows,
                                            long long dkv_row) {
  constexpr int TileRows = 64, V = 512, Pairs = (D / 2 + Threads - 1) / Threads;
  const int *rows = static_cast<const int *>(list), *bits = static_cast<const int *>(bits_of);
  const int end = min(length, slot_0 + slots);
  int slot = max(distinct, slot_0);
  for (int high = end; slot < high;) {
    const int middle = (slot + high) / 2;
    if (rows[middle] < first)
      slot = middle + 1;
    else
      high = middle;
  }
  while (slot < end && rows[slot] < first + Rows) {
    // Single tokens have no bits.
    const int row = rows[slot], bit = Tokens > 1 ? bits[slot] : 1, token = __popc((bit & -bit) - 1);
    const int of_slot = (slot - slot_0) * (2 * TileRows) + token * (TileRows / Tokens);
    int many = 1;
    while (slot + many < end && rows[slot + many] == row && (Tokens == 1 || bits[slot + many] == bit)) ++many;
    float2 scores[Pairs] = {}, values[Pairs] = {};
    for (int head = 0; head < heads; ++head) {
      const float dS = value<BFloat16>(factors, of_slot + head);
      const float P = value<BFloat16>(factors, of_slot + TileRows + head);
#pragma unroll
      for (int j = 0; j < Pairs; ++j) {
        const int at = threadIdx.x + j * Threads;
        if (2 * at < D) {
          const float2 x = pair<BFloat16>(q, (token * q_token + head * q_head) / 2 + at);
          scores[j].x += dS * x.x;
          scores[j].y += dS * x.y;
        }
        if (2 * at < V) {
          const float2 x = pair<BFloat16>(dout, (token * dout_token + head * dout_head) / 2 + at);
          values[j].x += P * x.x;
          values[j].y += P * x.y;
        }
      }
    }
    float *dkv = static_cast<float *>(dkv_rows) + row * dkv_row;
#pragma unroll
    for (int j = 0; j < Pairs; ++j) {
      const int column = 2 * (threadIdx.x + j * Threads);
      if (column >= D) continue;
      dkv[column] += many * (sm_scale * scores[j].x + values[j].x);
      dkv[column + 1] += many * (sm_scale * scores[j].y + values[j].y);
    }
    slot += many;
  }
}
}  // namespace sparse_mla
"""


def build_places(plan: PlacePlan) -> PrimFunc:
    """`Places [B, L, G, S_kv]` of the lists of L tiles, and the number of their distinct rows, `Distinct [B, L, G]`."""
    i32, i64 = "int32", "int64"
    B, L, G, C, S_kv = (T.dynamic(n, i64) for n in ("B", "L", "G", "C", "S_kv"))
    ib, il, ig, ic = (T.dynamic(n, i64) for n in ("i_b", "i_l", "i_g", "i_c"))
    tb, tl, tg = (T.dynamic(n, i64) for n in ("t_b", "t_l", "t_g"))

    @T.prim_func
    def sparse_mla_places(
        Rows: T.StridedTensor((B, L, G, C), (ib, il, ig, ic), i32),
        Lengths: T.StridedTensor((B, L, G), (tb, tl, tg), i32),
        Places: T.Tensor((B, L, G, S_kv), i32),
        Distinct: T.Tensor((B, L, G), i32),
        slot_0: T.int32,
        slots: T.int32,
    ):
        with T.Kernel(T.cast(B * L * G, i32), threads=PLACE_THREADS) as bx:
            T.import_source(PLACES)
            first_repeat = T.alloc_shared([1], i32, scope="shared")
            g = T.truncmod(T.cast(bx, i64), G)
            ti = T.truncmod(T.truncdiv(T.cast(bx, i64), G), L)
            b = T.truncdiv(T.truncdiv(T.cast(bx, i64), G), L)
            T.call_extern(
                "handle", "sparse_mla::find_places", T.access_ptr(Rows[b, ti, g, 0], "r", 1), Lengths[b, ti, g],
                slot_0, slots, T.cast(S_kv, i32), T.access_ptr(Places[b, ti, g, 0], "w", 1),
                T.access_ptr(Distinct[b, ti, g], "w", 1), T.access_ptr(first_repeat[0], "rw", 1),
            )  # fmt: skip

    return sparse_mla_places


def build_products(plan: Plan) -> PrimFunc:
    """The products of the factors of L tiles from `tile_0`, added to `dKV`."""
    D, TOKENS, dtype = plan.D, plan.tokens, plan.dtype
    TAIL = D - D_V
    STAGES = PRODUCT_STAGES
    fp32, i32, i64 = "float32", "int32", "int64"
    B, S, S_kv, H, G, L, N = (T.dynamic(n, i64) for n in ("B", "S", "S_kv", "H", "G", "L", "N"))
    qb, qs, qh = (T.dynamic(n, i64) for n in ("q_b", "q_s", "q_h"))
    ob, os_, oh = (T.dynamic(n, i64) for n in ("do_b", "do_s", "do_h"))

    @T.macro
    def find_places(Places, places, b, ti, g, r_0, S_kv, lane):
        for r in T.unroll(PRODUCT_ROWS // 16):
            row = r_0 + r * 16 + lane // 8
            places[r] = T.if_then_else(row < S_kv, Places[b, ti, g, T.min(row, S_kv - 1)], -1)

    @T.macro
    def load_tiles(
        X, x_s, x_h, columns, first, Factors, factor, Places, A_s, X_s, tiles, places, offsets, found, step_0, b, g,
        tile_0, S, S_kv, L, G, r_0, part_slots, head_0, heads, lane, ready, free,
    ):  # fmt: skip
        # Of each tile the factors of 128 rows of kv, and columns from `first` of its rows of q or dout.
        c0 = lane % 8 * VECTOR
        for r in T.unroll(PASSES):
            row = r * 16 + lane // 8
            offsets[r] = (token_of(row, TOKENS) * x_s + T.min(head_of(row, TOKENS), heads - 1) * x_h) * ITEM
        find_places(Places, places, b, T.cast(tiles[0], i64), g, r_0, S_kv, lane)
        for i in T.unroll(found, unroll_factor=1):
            stage = (step_0 + i) % STAGES
            ti = T.cast(tiles[i], i64)
            t = (tile_0 + ti) * TOKENS
            left = T.cast(T.min(S - t, T.cast(TOKENS, i64)), i32)
            T.barrier_wait(free[stage], ((step_0 + i) // STAGES & 1) ^ 1)
            T.call_extern(
                "handle", "sparse_mla::load_factors", T.access_ptr(A_s[stage, lane // 8, c0], "r", VECTOR),
                T.access_ptr(Factors[((b * L + ti) * G + g) * part_slots * FACTOR_COLUMNS + factor + c0], "r", VECTOR),
                places.data,
            )  # fmt: skip
            # Those of the next tile, in time.
            find_places(Places, places, b, T.cast(tiles[T.min(i + 1, found - 1)], i64), g, r_0, S_kv, lane)
            T.call_extern(
                "handle", f"sparse_mla::load_tile<{columns}, {ROWS // TOKENS}>",
                T.access_ptr(X_s[stage, lane // 8, c0], "r", VECTOR),
                T.access_ptr(X[b, t, head_0, first + c0], "r", VECTOR), offsets.data, lane // 8, heads, left,
            )  # fmt: skip
            T.cp_async_barrier_noinc(ready[stage])

    @T.macro
    def multiply(half, tail, found, step_0, acc, rest, A_s, X_s, ready, free):
        for i in T.unroll(found, unroll_factor=1):
            step = step_0 + i
            stage = step % STAGES
            T.barrier_wait(ready[stage], step // STAGES & 1)
            T.fence_proxy_async()
            if tail:
                T.call_extern(
                    "handle", f"sparse_mla::multiply<{WGMMA_TYPE[dtype]}>", acc.data, rest.data,
                    T.access_ptr(A_s[stage, half * ROWS, 0], "r", 1), T.access_ptr(X_s[stage, 0, 0], "r", 1),
                )  # fmt: skip
            else:
                T.wgmma_gemm(A_s[stage, half * ROWS : half * ROWS + ROWS, :], X_s[stage, :, :HALF], acc)
            T.wait_wgmma(0)
            T.barrier_arrive(free[stage])

    @T.macro
    def add_rows(columns, acc, scale, dKV, b, row, g, first, named, half, S_kv, G):
        # Rows that none of the tiles has are left alone.
        T.call_extern(
            "handle", f"sparse_mla::add_rows<{columns}>", acc.data, scale,
            T.access_ptr(dKV[b, T.min(row, S_kv - 1), g, first], "rw", 1), G * D,
            T.access_ptr(named[half * (ROWS // 32)], "r", ROWS // 32),
        )  # fmt: skip

    @T.macro
    def products(half, columns, first, found, A_s, X_s, dKV, b, g, r_0, S_kv, G, named, sm_scale, ready, free):
        tail = columns > HALF
        acc = T.alloc_fragment([ROWS, HALF], fp32)
        T.fill(acc, 0)
        rest = acc
        if tail:
            rest = T.alloc_local([ROWS * TAIL // WARPGROUP], fp32)
            for j in T.unroll(ROWS * TAIL // WARPGROUP):
                rest[j] = T.float32(0)
        multiply(half, tail, found, 0, acc, rest, A_s, X_s, ready, free)
        for r, d in T.Parallel(ROWS, HALF):
            acc[r, d] *= sm_scale
        multiply(half, False, found, found, acc, rest, A_s, X_s, ready, free)
        add_rows(HALF, acc, T.float32(1), dKV, b, r_0 + half * ROWS, g, first, named, half, S_kv, G)
        if tail:
            add_rows(TAIL, rest, sm_scale, dKV, b, r_0 + half * ROWS, g, D_V, named, half, S_kv, G)

    @T.prim_func
    def sparse_mla_products(
        Q: T.StridedTensor((B, S, H, D), (qb, qs, qh, 1), dtype),
        dO: T.StridedTensor((B, S, H, D_V), (ob, os_, oh, 1), dtype),
        Factors: T.Tensor((N,), dtype),
        Places: T.Tensor((B, L, G, S_kv), i32),
        dKV: T.Tensor((B, S_kv, G, D), fp32),
        sm_scale: T.float32,
        heads: T.int32,
        tile_0: T.int32,
        part_slots: T.int32,
    ):
        # Half of the columns each: 256, and the others.
        with T.Kernel(2, T.cast(T.ceildiv(S_kv, PRODUCT_ROWS), i32), T.cast(B * G, i32), threads=THREADS) as (
            bx,
            by,
            bz,
        ):
            T.import_source(TILES + WIDE_PRODUCT)
            A_s = T.alloc_shared([STAGES, PRODUCT_ROWS, ROWS], dtype)
            X_s = T.alloc_shared([STAGES, ROWS, HALF + TAIL], dtype)
            tiles = T.alloc_shared([MOST_TILES], i32, scope="shared")
            with_rows = T.alloc_shared([MOST_TILES // 32], "uint32", scope="shared")
            named = T.alloc_shared([PRODUCT_ROWS // 32], "uint32", scope="shared")
            ready = T.alloc_barrier(arrive_count=[WARPGROUP] * STAGES)
            free = T.alloc_barrier(arrive_count=[2 * WARPGROUP] * STAGES)
            tx = T.get_thread_binding()
            b = T.truncdiv(T.cast(bz, i64), G)
            g = T.truncmod(T.cast(bz, i64), G)
            r_0 = by * PRODUCT_ROWS
            head_0 = g * heads
            # `ready` and `free` order the rings. Told of writes in the loops, TileLang would add barriers there.
            T.call_extern(
                "handle", "sparse_mla::fills", T.access_ptr(A_s[0, 0, 0], "w", VECTOR),
                T.access_ptr(X_s[0, 0, 0], "w", VECTOR),
            )  # fmt: skip
            found = T.alloc_var(i32)
            found = T.call_extern(
                i32, f"sparse_mla::find_tiles<{MOST_TILES}>", T.access_ptr(Places[b, 0, g, 0], "r", 1), G * S_kv,
                T.cast(L, i32), r_0, T.cast(S_kv, i32), T.access_ptr(tiles[0], "rw", MOST_TILES),
                T.access_ptr(with_rows[0], "rw", MOST_TILES // 32), T.access_ptr(named[0], "rw", PRODUCT_ROWS // 32),
            )  # fmt: skip
            if found > 0:
                # Does: gathers factors, loads q, then dout. Produces: ready. Consumes: free.
                if tx >= 2 * WARPGROUP:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    lane = tx - 2 * WARPGROUP
                    places = T.alloc_local([PRODUCT_ROWS // 16], i32)
                    offsets = T.alloc_local([PASSES], i64)
                    if bx == 0:
                        load_tiles(
                            Q, qs, qh, HALF, 0, Factors, 0, Places, A_s, X_s, tiles, places, offsets, found,
                            0, b, g, tile_0, S, S_kv, L, G, r_0, part_slots, head_0, heads, lane, ready, free,
                        )  # fmt: skip
                        load_tiles(
                            dO, os_, oh, HALF, 0, Factors, ROWS, Places, A_s, X_s, tiles, places, offsets, found,
                            found, b, g, tile_0, S, S_kv, L, G, r_0, part_slots, head_0, heads, lane, ready, free,
                        )  # fmt: skip
                    else:
                        load_tiles(
                            Q, qs, qh, HALF + TAIL, HALF, Factors, 0, Places, A_s, X_s, tiles, places, offsets, found,
                            0, b, g, tile_0, S, S_kv, L, G, r_0, part_slots, head_0, heads, lane, ready, free,
                        )  # fmt: skip
                        load_tiles(
                            dO, os_, oh, HALF, HALF, Factors, ROWS, Places, A_s, X_s, tiles, places, offsets, found,
                            found, b, g, tile_0, S, S_kv, L, G, r_0, part_slots, head_0, heads, lane, ready, free,
                        )  # fmt: skip
                # Does: the products of 64 rows. Produces: free. Consumes: ready.
                elif tx < WARPGROUP:
                    T.set_max_nreg(MATRIX_REGISTERS, 1)
                    if bx == 0:
                        products(
                            0, HALF, 0, found, A_s, X_s, dKV, b, g, r_0, S_kv, G, named, sm_scale, ready, free
                        )  # fmt: skip
                    else:
                        products(
                            0, HALF + TAIL, HALF, found, A_s, X_s, dKV, b, g, r_0, S_kv, G, named, sm_scale, ready,
                            free,
                        )  # fmt: skip
                else:
                    T.set_max_nreg(MATRIX_REGISTERS, 1)
                    if bx == 0:
                        products(
                            1, HALF, 0, found, A_s, X_s, dKV, b, g, r_0, S_kv, G, named, sm_scale, ready, free
                        )  # fmt: skip
                    else:
                        products(
                            1, HALF + TAIL, HALF, found, A_s, X_s, dKV, b, g, r_0, S_kv, G, named, sm_scale, ready,
                            free,
                        )  # fmt: skip

    return sparse_mla_products


def build_repeats(plan: RepeatPlan) -> PrimFunc:
    """What the repeats among the slots of a part add to `dKV`, for lists of L tiles from `tile_0`."""
    D, TOKENS, dtype = plan.D, plan.tokens, plan.dtype
    i32, i64 = "int32", "int64"
    B, S, S_kv, H, G, L, C, N = (T.dynamic(n, i64) for n in ("B", "S", "S_kv", "H", "G", "L", "C", "N"))
    qb, qs, qh = (T.dynamic(n, i64) for n in ("q_b", "q_s", "q_h"))
    ob, os_, oh = (T.dynamic(n, i64) for n in ("do_b", "do_s", "do_h"))
    ib, il, ig, ic = (T.dynamic(n, i64) for n in ("i_b", "i_l", "i_g", "i_c"))
    mb, ml, mg, mc = (T.dynamic(n, i64) for n in ("m_b", "m_l", "m_g", "m_c"))
    tb, tl, tg = (T.dynamic(n, i64) for n in ("t_b", "t_l", "t_g"))
    is_bf16 = "true" if dtype == "bfloat16" else "false"
    function = f"sparse_mla::add_repeats<{is_bf16}, {D}, {TOKENS}, {REPEAT_ROWS}, {REPEAT_THREADS}>"

    @T.prim_func
    def sparse_mla_repeats(
        Q: T.StridedTensor((B, S, H, D), (qb, qs, qh, 1), dtype),
        dO: T.StridedTensor((B, S, H, D_V), (ob, os_, oh, 1), dtype),
        Rows: T.StridedTensor((B, L, G, C), (ib, il, ig, ic), i32),
        Bits: T.StridedTensor((B, L, G, C), (mb, ml, mg, mc), i32),
        Lengths: T.StridedTensor((B, L, G), (tb, tl, tg), i32),
        Distinct: T.Tensor((B, L, G), i32),
        Factors: T.Tensor((N,), dtype),
        dKV: T.Tensor((B, S_kv, G, D), "float32"),
        sm_scale: T.float32,
        heads: T.int32,
        tile_0: T.int32,
        slot_0: T.int32,
        part_slots: T.int32,
    ):
        with T.Kernel(T.cast(T.ceildiv(S_kv, REPEAT_ROWS), i32), T.cast(B * G, i32), threads=REPEAT_THREADS) as (
            bx,
            by,
        ):
            T.import_source(REPEATS)
            b = T.truncdiv(T.cast(by, i64), G)
            g = T.truncmod(T.cast(by, i64), G)
            found = T.call_extern(
                i32, "sparse_mla::any_repeats", T.access_ptr(Lengths[b, 0, g], "r", 1), tl,
                T.access_ptr(Distinct[b, 0, g], "r", 1), G, T.cast(L, i32),
            )  # fmt: skip
            for ti in T.serial(T.if_then_else(found != 0, T.cast(L, i32), 0)):
                if Distinct[b, ti, g] < Lengths[b, ti, g]:
                    t = T.cast(tile_0 + ti, i64) * TOKENS
                    T.call_extern(
                        "handle", function, T.access_ptr(Rows[b, ti, g, 0], "r", 1),
                        T.access_ptr(Bits[b, ti, g, 0], "r", 1), Distinct[b, ti, g], Lengths[b, ti, g], slot_0,
                        part_slots, bx * REPEAT_ROWS, heads,
                        T.access_ptr(Factors[((b * L + ti) * G + g) * part_slots * FACTOR_COLUMNS], "r", 1),
                        T.access_ptr(Q[b, t, g * heads, 0], "r", 1), qs, qh,
                        T.access_ptr(dO[b, t, g * heads, 0], "r", 1), os_, oh, sm_scale,
                        T.access_ptr(dKV[b, 0, g, 0], "rw", 1), G * D,
                    )  # fmt: skip

    return sparse_mla_repeats
