"""Device code that TileLang has no word for."""

DKV_STREAM = r"""
namespace sparse_mla {
// A left operand [64 x 64] in registers is handed from a warpgroup to the same lanes of another: 64 bytes a lane, of
// which each warp keeps its own 2 KB.
__device__ __forceinline__ uint4 *fragment(const void *shared) {
  return static_cast<uint4 *>(const_cast<void *>(shared)) + threadIdx.x % 128 / 32 * 128 + threadIdx.x % 32;
}
__device__ __forceinline__ void give(const void *operand, const void *shared) {
  const uint4 *from = static_cast<const uint4 *>(operand);
#pragma unroll
  for (int j = 0; j < 4; ++j) fragment(shared)[32 * j] = from[j];
}
__device__ __forceinline__ void take(void *operand, const void *shared) {
  uint4 *to = static_cast<uint4 *>(operand);
#pragma unroll
  for (int j = 0; j < 4; ++j) to[j] = fragment(shared)[32 * j];
}

// A [64 x 64] accumulator of a warpgroup (m64 layout) is added to 64 fp32 rows in full 128-byte lines.
// Straight from the registers a warp would touch 8 sectors of 32 bytes an instruction, which the L2 adds at 2.3 TB/s
// against 3.8 for whole lines. So lanes deal them out by shuffles, 8 rows at a time.
// Rows 8 to 15 of a warp's 16 are set aside, so that the accumulator can be used again. They are multiplied by an
// opaque 1: copies would be merged with the accumulator, for which ptxas then finds no registers and serialises every
// product.
__device__ __forceinline__ float copy(float value, float one) {
  float result;
  asm volatile("mul.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(one));
  return result;
}
__device__ __forceinline__ float opaque_one() {
  float one = 1.f;
  asm volatile("" : "+f"(one));
  return one;
}
// `Exchanged`: with the first exchange of `add` behind them. Nothing then is left for ptxas to copy; but the product
// that uses the accumulator next comes later.
template <int Columns = 64, bool Exchanged = false>
__device__ __forceinline__ void keep(const void *accumulator, void *kept) {
  const float *acc = static_cast<const float *>(accumulator), one = opaque_one();
  float *to = static_cast<float *>(kept);
  if constexpr (Exchanged) {
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < Columns / 16; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float left = acc[8 * i + 2 + e], right = acc[8 * i + 6 + e];
        const float other = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
        to[4 * i + e] = copy(odd ? other : left, one);
        to[4 * i + 2 + e] = copy(odd ? right : other, one);
      }
  } else {
#pragma unroll
    for (int j = 0; j < Columns / 4; ++j) to[j] = copy(acc[j / 2 * 4 + 2 + j % 2], one);
  }
}
// Where a lane adds to row 0 of dkv, whose columns of a chunk begin at element `at`: the first 4 of 64 bytes that are
// dealt to 4 lanes.
__device__ __forceinline__ long long line(const void *dkv, long long at) {
  const int lane = threadIdx.x % 4;
  return reinterpret_cast<long long>(static_cast<const float *>(dkv) + at + lane % 2 * 8 + lane / 2 * 4);
}
#define SPARSE_MLA_LINE(INSTRUCTION)                                                                       \
  do {                                                                                                     \
    if constexpr (All)                                                                                     \
      asm volatile(INSTRUCTION " [%0 + %5], {%1, %2, %3, %4};" ::"l"(line), "f"(v[0]), "f"(v[1]), "f"(v[2]),  \
                   "f"(v[3]), "n"(Offset)                                                                   \
                   : "memory");                                                                            \
    else                                                                                                   \
      asm volatile("{\n"                                                                                   \
                   ".reg .pred valid;\n"                                                                   \
                   "setp.ge.s32 valid, %5, 0;\n"                                                           \
                   "@valid " INSTRUCTION " [%0 + %6], {%1, %2, %3, %4};\n"                                 \
                   "}" ::"l"(line), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(row), "n"(Offset)          \
                   : "memory");                                                                            \
  } while (0)
// Predicated, not branched around: a wait in a divergent path would serialise the products in flight.
template <bool Store, bool All, int Offset>
__device__ __forceinline__ void add_line(long long line, int row, const float *v) {
  if constexpr (Store)
    SPARSE_MLA_LINE("st.global.v4.f32");
  else
    SPARSE_MLA_LINE("red.global.add.v4.f32");
}
#undef SPARSE_MLA_LINE
// Where a row begins, opaque to the compiler: addresses kept from chunk to chunk would cost registers that are not
// there.
__device__ __forceinline__ long long row_at(long long to, int row, int stride) {
  long long at;
  asm volatile("{\n"
               ".reg .b64 offset;\n"
               "mul.wide.s32 offset, %1, %2;\n"
               "add.s64 %0, offset, %3;\n"
               "}"
               : "=l"(at)
               : "r"(row), "r"(stride), "l"(to));
  return at;
}
// Add 8 of a warp's 16 rows, or with `Store` write them. `pairs`: of a lane's row two columns of every 8, each pair
// `Step` values after the one before, 4 in an accumulator and 2 as kept; or with `Exchanged` as kept so. `row0`,
// `row1`: rows of dkv of the even and the odd one of the two rows that 8 lanes hold, negative if they are invalid, as
// none is with `All`; `stride`: bytes from one row to the next.
// Two lanes first exchange pairs, so that each has 4 columns in a row; then of two rows half is exchanged, so that 8
// lanes have 32 columns of the one, and 32 of the other.
template <bool Store, bool All, int Step, int Columns = 64, bool Exchanged = false>
__device__ __forceinline__ void add(const void *pairs, long long to, int row0, int row1, int stride) {
  const float *const given = static_cast<const float *>(pairs), one = opaque_one();
  float mine[Columns / 4];
#pragma unroll
  for (int j = 0; j < Columns / 4; ++j) mine[j] = Exchanged ? given[j] : copy(given[j / 2 * Step + j % 2], one);
  const bool odd = threadIdx.x & 1, second = threadIdx.x & 4;
  const long long at0 = row_at(to + (second ? 64 : 0), row0, stride);
  const long long at1 = row_at(to + (second ? 0 : 64), row1, stride);
#pragma unroll
  for (int half = 0; half < Columns / 32; ++half) {
    float four[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float *left = mine + 8 * half + 4 * i, *right = left + 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float other = Exchanged ? 0.f : __shfl_xor_sync(0xffffffffu, odd ? left[e] : right[e], 1);
        four[i][e] = odd && !Exchanged ? other : left[e];
        four[i][2 + e] = odd || Exchanged ? right[e] : other;
      }
    }
    float line0[4], line1[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float other = __shfl_xor_sync(0xffffffffu, four[1][c], 4);
      line0[c] = second ? other : four[0][c];
      line1[c] = second ? four[0][c] : other;
    }
    if (half == 0) {
      add_line<Store, All, 0>(at0, row0, line0);
      add_line<Store, All, 0>(at1, row1, line1);
    } else {
      add_line<Store, All, 128>(at0, row0, line0);
      add_line<Store, All, 128>(at1, row1, line1);
    }
  }
}
// If some of a warp's 16 slots, `rows`, are invalid, of each of a thread's four places, 16 apart from `slot`, which 8
// lanes share, a row of the 16 blocks after the first, or -1. The rest as in `load_slots` and `place_rows`.
template <typename Index>
__device__ __forceinline__ void look_ahead(void *found, const void *rows, const void *list, long long stride, int slot,
                                           int length, long long limit) {
  const int *row = static_cast<const int *>(rows);
  if (__all_sync(0xffffffffu, (row[0] | row[1] | row[2] | row[3]) >= 0)) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    int ahead = -1;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = slot + 16 * r + 64 * (1 + 8 * n + static_cast<int>(threadIdx.x) % 8);
      const char *from = static_cast<const char *>(list) + at * stride;
      const Index entry = at < length ? __ldg(reinterpret_cast<const Index *>(from)) : -1;
      ahead = entry >= 0 && entry < limit ? static_cast<int>(entry) : ahead;
    }
    static_cast<int *>(found)[r] = ahead;
  }
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      int &mine = static_cast<int *>(found)[r];
      mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, lanes));
    }
}
// Rows that the terms of a thread's four slots go to, of a warp's 16, each held by 8 lanes; `rows`: what the slots are,
// negative if they are invalid. Terms of invalid slots are zero and go where their place went in the block before (at
// first what `look_ahead` found), else where another slot of this block goes, so that hardly an add has to be left out;
// no row takes many, as those to one row would wait for each other. Only while fewer than 2 places have a row are the
// others' adds left out, at -1.
__device__ __forceinline__ void spread(void *to, const void *rows) {
  int *goal = static_cast<int *>(to);
  int known = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = static_cast<const int *>(rows)[r];
    goal[r] = row < 0 ? goal[r] : row;
    known += goal[r] >= 0;
  }
  const bool enough = __reduce_add_sync(0xffffffffu, static_cast<unsigned>(known)) >= 8 * 2u;
  int filled[4] = {goal[0], goal[1], goal[2], goal[3]};
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const int before[4] = {filled[0], filled[1], filled[2], filled[3]};
#pragma unroll
    for (int r = 0; r < 4; ++r) filled[r] = before[r] < 0 ? before[r ^ step] : before[r];
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
      const int other = __shfl_xor_sync(0xffffffffu, filled[r], lanes);
      filled[r] = filled[r] < 0 ? other : filled[r];
    }
    goal[r] = enough ? filled[r] : goal[r];
  }
}
// What a thread's four slots, 16 apart, are and where their terms go, by the first of the 8 threads that hold them.
__device__ __forceinline__ void say_slots(const void *rows, const void *to, const void *slot_row, const void *slot_to) {
  if (threadIdx.x % 8) return;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    static_cast<int *>(const_cast<void *>(slot_row))[16 * r] = static_cast<const int *>(rows)[r];
    static_cast<int *>(const_cast<void *>(slot_to))[16 * r] = static_cast<const int *>(to)[r];
  }
}
// An arrival, predicated, not branched around.
__device__ __forceinline__ void arrive_if(int yes, unsigned barrier) {
  asm volatile("{\n"
               ".reg .pred yes;\n"
               "setp.ne.s32 yes, %1, 0;\n"
               "@yes mbarrier.arrive.shared::cta.b64 _, [%0];\n"
               "}" ::"r"(barrier),
               "r"(yes)
               : "memory");
}
// Whether a warp finds no negative row among 64.
__device__ __forceinline__ int all_valid(const void *rows) {
  const int *row = static_cast<const int *>(rows) + threadIdx.x % 32;
  return __all_sync(0xffffffffu, row[0] >= 0 && row[32] >= 0);
}
}  // namespace sparse_mla
"""

PRODUCTS = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
namespace sparse_mla {
// S^T and dP^T [64 x 64] of 128 columns in one product of 64 slots of kv and 128 rows, those of q with those of dout
// below them: kv is read once, which two products would each do. The parts of a sum are one group of products, in which
// nothing else may touch the accumulators; the last may add to S^T the 64 columns of the tail, which dout has not. In
// shared memory 64 columns are a piece of 64 and of 128 rows of 128 bytes.
enum class Part { first, more, last, last_with_tail };
template <tl::DataType Type, Part Of>
__device__ __forceinline__ void scores(const void *s, const void *dp, const void *kv, const void *q_dout) {
  float *const halves[2] = {static_cast<float *>(const_cast<void *>(s)), static_cast<float *>(const_cast<void *>(dp))};
  float c[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) c[i] = halves[i / 32][i % 32];
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<1, 1, 64>(a, const_cast<void *>(kv));
  tl::initialize_wgmma_descriptor<1, 1, 64>(b, const_cast<void *>(q_dout));
  tl::warpgroup_fence_operand(c, 64);
  if constexpr (Of == Part::first) tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 128, 16, false, false, 1, 1>(
        uint64_t(a + ((k / 4 * 8192 + k % 4 * 32) >> 4)), uint64_t(b + ((k / 4 * 16384 + k % 4 * 32) >> 4)),
        reinterpret_cast<uint32_t *>(c), Of != Part::first || k > 0);
  if constexpr (Of == Part::last_with_tail)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
          uint64_t(a + ((2 * 8192 + k * 32) >> 4)), uint64_t(b + ((2 * 16384 + k * 32) >> 4)),
          reinterpret_cast<uint32_t *>(c), 1);
  if constexpr (Of == Part::last || Of == Part::last_with_tail) tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(c, 64);
#pragma unroll
  for (int i = 0; i < 64; ++i) halves[i / 32][i % 32] = c[i];
}
// [64 x 128] accumulator (m64 layout) += dS^T of 64 slots times 128 columns of their rows of kv, in a group of its own.
// Since the warpgroup's last arrival nothing may have touched the accumulator.
template <tl::DataType Type> __device__ __forceinline__ void add_dq(void *accumulator, const void *dS, const void *kv) {
  float *acc = static_cast<float *>(accumulator);
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<1, 0, 64>(a, const_cast<void *>(dS));
  tl::initialize_wgmma_descriptor<1, 512, 64>(b, const_cast<void *>(kv));
  tl::warpgroup_fence_operand(acc, 64);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 128, 16, true, true, 1, 1>(
        uint64_t(a + (k * 2048 >> 4)), uint64_t(b + (k * 2048 >> 4)), reinterpret_cast<uint32_t *>(acc), 1);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 64);
}
// [64 x 64] accumulator = dS of 64 slots times 64 columns of q, under way. With `none` it is of no use, and made of dS
// alone: an accumulator that a product is not for sure made in, ptxas has no registers for.
template <tl::DataType Type>
__device__ __forceinline__ void begin_chunk(void *accumulator, const void *dS, const void *q, bool none) {
  float *acc = static_cast<float *>(accumulator);
  tl::GmmaDescriptor by_slots, q_columns;
  tl::initialize_wgmma_descriptor<1, 1, 64>(by_slots, const_cast<void *>(dS));
  tl::initialize_wgmma_descriptor<1, 0, 64>(q_columns, const_cast<void *>(none ? dS : q));
  tl::warpgroup_fence_operand(acc, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, true, 1, 1>(
        uint64_t(by_slots + (k * 32 >> 4)), uint64_t(q_columns + (k * 2048 >> 4)), reinterpret_cast<uint32_t *>(acc),
        k > 0);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 32);
}
// [64 x 64] accumulators, in one group: `accumulator` = dS of 64 slots times 64 columns of q, `dq` += dS^T times 64
// columns of kv.
template <tl::DataType Type>
__device__ __forceinline__ void begin_chunk_and_add_dq(void *accumulator, void *dq, const void *dS, const void *q,
                                                       const void *kv) {
  float *acc = static_cast<float *>(accumulator), *sum = static_cast<float *>(dq);
  tl::GmmaDescriptor by_slots, by_rows, q_columns, kv_columns;
  tl::initialize_wgmma_descriptor<1, 1, 64>(by_slots, const_cast<void *>(dS));
  tl::initialize_wgmma_descriptor<1, 0, 64>(by_rows, const_cast<void *>(dS));
  tl::initialize_wgmma_descriptor<1, 0, 64>(q_columns, const_cast<void *>(q));
  tl::initialize_wgmma_descriptor<1, 0, 64>(kv_columns, const_cast<void *>(kv));
  tl::warpgroup_fence_operand(acc, 32);
  tl::warpgroup_fence_operand(sum, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, true, 1, 1>(
        uint64_t(by_slots + (k * 32 >> 4)), uint64_t(q_columns + (k * 2048 >> 4)), reinterpret_cast<uint32_t *>(acc),
        k > 0);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, true, true, 1, 1>(
        uint64_t(by_rows + (k * 2048 >> 4)), uint64_t(kv_columns + (k * 2048 >> 4)), reinterpret_cast<uint32_t *>(sum),
        1);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 32);
  tl::warpgroup_fence_operand(sum, 32);
}
}  // namespace sparse_mla
"""

# Other than T.wgmma_gemm, with no arrival and no group of its own for each part of a sum.
PART_OF_SCORES = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
namespace sparse_mla {
// Scores [64 x 64] += `Columns` columns of 64 rows of q times those of 64 slots, or with `Begins` = them; both stand in
// panels of 64 rows of 128 bytes. `Arrives`: the warpgroup has touched the scores since it last arrived. `Commits`: the
// group of products ends here.
template <tl::DataType Type, int Columns, bool Begins, bool Arrives, bool Commits>
__device__ __forceinline__ void part_of_scores(const void *scores, const void *q, const void *kv) {
  float *s = static_cast<float *>(const_cast<void *>(scores));
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<1, 1, 64>(a, const_cast<void *>(q));
  tl::initialize_wgmma_descriptor<1, 1, 64>(b, const_cast<void *>(kv));
  tl::warpgroup_fence_operand(s, 32);
  if constexpr (Arrives) tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < Columns / 16; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
        uint64_t(a + ((k / 4 * 8192 + k % 4 * 32) >> 4)), uint64_t(b + ((k / 4 * 8192 + k % 4 * 32) >> 4)),
        reinterpret_cast<uint32_t *>(s), !Begins || k > 0);
  if constexpr (Commits) tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(s, 32);
}
}  // namespace sparse_mla
"""
# Types of matrix operands.
WGMMA_TYPE = {"bfloat16": "tl::DataType::kBFloat16", "float16": "tl::DataType::kFloat16"}

GATHER = r"""
namespace sparse_mla {
// `Steps` x 64 columns from `first` of four rows of 16-bit elements, 16 rows apart in shared memory: 16 bytes a thread,
// row and step. Rows are given by the addresses of their column 0, so that every copy has an immediate offset from its
// row's: with strides as run-time values the address of each copy would cost four instructions.
// `to`: address of the thread's 16 bytes of the first row and step, in panels of [`Rows` x 128 bytes], swizzled.
// A row that is not valid becomes zero and is not read.
template <int Steps, int Rows = 64>
__device__ __forceinline__ void gather_rows(const void *to, const void *rows, const void *valid, int block, int first) {
  const long long *row = static_cast<const long long *>(rows) + 4 * block;
  const int *ok = static_cast<const int *>(valid) + 4 * block;
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int u = 0; u < Steps; ++u)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared + r * 2048 + u * Rows * 128),
                   "l"(row[r] + 2 * (first + 64 * u)), "r"(ok[r] ? 16 : 0));
}
// The same as a loop: what waits for reads under way ptxas moves before straight code, not before it, and straight code
// behind a branch it makes predicated copies.
template <int Steps, int Rows>
__device__ __forceinline__ void gather_rows_in_turn(const void *to, const void *rows, const void *valid,
                                                    int first = 0) {
  const long long *row = static_cast<const long long *>(rows);
  const int *ok = static_cast<const int *>(valid);
  unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll 1
  for (int u = 0; u < Steps; ++u, shared += Rows * 128)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared + r * 2048),
                   "l"(row[r] + 2 * first + 128 * u), "r"(ok[r] ? 16 : 0));
}
// Ask for a line of 128 bytes, and for four rows of `Bytes` bytes of q, `further` bytes on from where they are given by
// the address of the thread's 16 bytes of column 0, into the L2. Eight threads have the same rows.
__device__ __forceinline__ void ask_for(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
template <int Bytes> __device__ __forceinline__ void ask_for_rows(const void *rows, long long further) {
  const int thread = threadIdx.x % 8;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const char *row = reinterpret_cast<const char *>(static_cast<const long long *>(rows)[r]) - 16 * thread + further;
    ask_for(row + 128 * thread);
    if (Bytes > 1024 && thread == 0) ask_for(row + 1024);
  }
}
// An address that the compiler keeps as it is, not as the sum that it came from.
__device__ __forceinline__ long long kept(const void *address) {
  long long value = reinterpret_cast<long long>(address);
  asm volatile("" : "+l"(value));
  return value;
}
// Entries of some slots, 16 apart from `slot`; -1, which is no row, from `length` on, unread. `list`: address of slot
// 0's entry, `stride`: bytes from one to the next.
template <typename Index, int Slots = 8>
__device__ __forceinline__ void load_slots(void *found, const void *list, long long stride, int slot, int length) {
  const char *from = static_cast<const char *>(list) + slot * stride;
#pragma unroll
  for (int j = 0; j < Slots; ++j, from += 16 * stride)
    static_cast<Index *>(found)[j] = slot + 16 * j < length ? __ldg(reinterpret_cast<const Index *>(from)) : -1;
}
__device__ __forceinline__ long long offset(int row, long long stride) { return static_cast<unsigned>(row) * stride; }
__device__ __forceinline__ long long offset(long long row, long long stride) { return row * stride; }
// Addresses of rows of kv, of row 0 for what is no row, and which are rows: those from 0 to below `limit`.
template <typename Index, int Slots = 8>
__device__ __forceinline__ void place_rows(void *rows, void *valid, const void *found, const void *kv, long long stride,
                                           long long limit) {
  const long long most = limit > 0 ? limit : 0;
  const Index end = most < 0x7fffffff || sizeof(Index) > 4 ? most : 0x7fffffff;
#pragma unroll
  for (int j = 0; j < Slots; ++j) {
    const Index row = static_cast<const Index *>(found)[j];
    const bool is_row = row >= 0 && row < end;
    static_cast<int *>(valid)[j] = is_row;
    static_cast<long long *>(rows)[j] = kept(static_cast<const char *>(kv) + offset(is_row ? row : 0, stride));
  }
}
}  // namespace sparse_mla
"""

LEAVE = r"""
namespace sparse_mla {
// End the whole CTA unless `stay`, which must be the same for all threads.
__device__ __forceinline__ void leave_unless(bool stay) {
  if (!stay) asm volatile("exit;");
}
}  // namespace sparse_mla
"""

SUBNORMAL = r"""
namespace sparse_mla {
// Arithmetic that keeps what lies below fp32's normal range, as where a sink leaves little of out. The compiler's own
// flushes it to 0.
__device__ __forceinline__ float product(float a, float b) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float add_product(float sum, float a, float b) {
  asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum) : "f"(a), "f"(b));
  return sum;
}
}  // namespace sparse_mla
"""

ROW_SCALE = r"""
namespace sparse_mla {
// A warpgroup's accumulators in the m64 layout: a lane holds two rows, 8 apart, two columns of each at a time.
// Multiply the rows of a [64 x 256] accumulator by a factor each, unless all rows of the warp have factor 1: once the
// running maximum has settled, nothing is to be done.
__device__ __forceinline__ void rescale(void *accumulator, const void *factors) {
  float *o = static_cast<float *>(accumulator);
  const float *s = static_cast<const float *>(factors);
  if (__any_sync(0xffffffffu, s[0] != 1.f || s[1] != 1.f)) {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= s[i / 2 % 2];
  }
}
// w / sum with w = sigmoid(gap). Of exp(gap) only the root is formed, which is a normal
// number wherever the result is not 0: one of the two roots is 1, the other that of a power below 1.
__device__ __forceinline__ float weight_over(float sum, float gap) {
  const float up = exp2f(fminf(gap, 0.f) * 0.72134752f), down = exp2f(fmaxf(gap, 0.f) * -0.72134752f);  // exp(x / 2)
  const float root = up * down;
  return product(up / (sum * (1.f + root * root)), up);
}
// Up to which score a slot's exponential is at most a quarter of a row's sum, of which four lanes have a part each, in
// powers of the row's maximum: two rows.
__device__ __forceinline__ void find_reach(void *reach, const void *sums, const void *maxima, float scale_log2) {
  const float *l = static_cast<const float *>(sums), *m = static_cast<const float *>(maxima);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = l[i] + __shfl_xor_sync(0xffffffffu, l[i], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    static_cast<float *>(reach)[i] = m[i] + (__log2f(sum) - 2.f) / scale_log2;
  }
}
// Up to which score a row's maximum stays as it is: P of a slot may then be 256, and a quarter of the sum. P above 1 is
// rounded like any other, and one that has much of a row's weight must be an exact 1.
__device__ __forceinline__ void bound_by(void *bound, const void *reach, const void *maxima, float scale_log2) {
  const float *m = static_cast<const float *>(maxima), *r = static_cast<const float *>(reach);
#pragma unroll
  for (int i = 0; i < 2; ++i) static_cast<float *>(bound)[i] = fmaxf(m[i], fminf(r[i], m[i] + 8.f / scale_log2));
}
// sums = factors sums + row sums of a [64 x 64] accumulator, over the columns that the lane holds.
__device__ __forceinline__ void add_sums(const void *accumulator, void *sums, const void *factors) {
  const float *p = static_cast<const float *>(accumulator);
  const float *s = static_cast<const float *>(factors);
  float *l = static_cast<float *>(sums);
  float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 32; ++i) part[i % 4] += p[i];
  l[0] = l[0] * s[0] + (part[0] + part[1]);
  l[1] = l[1] * s[1] + (part[2] + part[3]);
}
// A value a row from a warpgroup's lanes to shared memory; `at`: address of the thread's row.
__device__ __forceinline__ void say_rows(const void *values, unsigned at) {
  const float *v = static_cast<const float *>(values);
  if (threadIdx.x % 4 == 0)
    asm volatile("st.shared.f32 [%0], %1;\nst.shared.f32 [%0+32], %2;" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
}
// The sums of the four lanes that share a row.
__device__ __forceinline__ void quad_sums(void *sums) {
  float *l = static_cast<float *>(sums);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    l[i] += __shfl_xor_sync(0xffffffffu, l[i], 1);
    l[i] += __shfl_xor_sync(0xffffffffu, l[i], 2);
  }
}
}  // namespace sparse_mla
"""

VALID = r"""
namespace sparse_mla {
// Which of a block's 64 slots are valid: bit 8 j + r of word w for row 16 r + 4 w + j, which is how the copy warps w
// hold them, eight lanes a row.
__device__ __forceinline__ void say_valid(const void *valid, const void *words, int block) {
  const int *ok = static_cast<const int *>(valid) + 4 * block;
  unsigned word = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) word |= (__ballot_sync(0xffffffffu, ok[r] != 0) & 0x01010101u) << r;
  unsigned *to = static_cast<unsigned *>(const_cast<void *>(words)) + 4 * block + threadIdx.x / 32 % 4;
  if (threadIdx.x % 32 == 0) *to = word;
}
// Scores [64 x 64] of a warpgroup (m64 layout): -inf where the slot is invalid. `words`: those of the block.
__device__ __forceinline__ void mask(void *scores, const void *words) {
  float *s = static_cast<float *>(scores);
  const unsigned *w = static_cast<const unsigned *>(words);
  if ((w[0] & w[1] & w[2] & w[3]) != 0x0f0f0f0fu) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned word = (q < 2 ? w[j % 2 * 2] : w[j % 2 * 2 + 1]) >> (16 * (q % 2) + j / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!(word >> 8 * (i % 2) & 1)) s[4 * j + i] = -INFINITY;
    }
  }
}
// The same of a tile of several tokens: where the row's token did not select the slot. `bits`: of the block's slots.
template <int Tokens>
__device__ __forceinline__ void mask_tokens(void *scores, const void *bits) {
  float *s = static_cast<float *>(scores);
  const unsigned *of = static_cast<const unsigned *>(bits);
  const int lane = threadIdx.x % 32, q = lane % 4;
  const unsigned half[2] = {of[lane], of[lane + 32]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // A warp's rows are of one token, or the even and the odd ones of 8 of two, or of four tokens.
    const int token = (threadIdx.x / 32 % 4 * 16 + 8 * i) * Tokens / 64;
    unsigned word[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      word[h] = __ballot_sync(0xffffffffu, half[h] >> token & 1);
      if constexpr (Tokens == 16) {
        const unsigned next = __ballot_sync(0xffffffffu, half[h] >> token & 2);
        word[h] = lane < 16 ? word[h] : next;
      }
      word[h] >>= 2 * q;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(word[j / 4] >> (8 * (j % 4) + e) & 1)) s[4 * j + 2 * i + e] = -INFINITY;
  }
}
__device__ __forceinline__ void load_valid(void *words, const void *shared, int block) {
  *static_cast<uint4 *>(words) = static_cast<const uint4 *>(shared)[block];
}
}  // namespace sparse_mla
"""

OPERAND = r"""
namespace sparse_mla {
// A warpgroup's [64 x 64] operand of 16-bit elements (layout of an A operand in registers) to shared memory, swizzled
// by 128 bytes. `shared`: swizzled address of row 16 warp + lane % 16, column 8 (lane / 16).
__device__ __forceinline__ void store_operand(const void *operand, unsigned shared) {
  const unsigned *p = static_cast<const unsigned *>(operand);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared ^ 32 * i),
                 "r"(p[4 * i]), "r"(p[4 * i + 1]), "r"(p[4 * i + 2]), "r"(p[4 * i + 3])
                 : "memory");
}
__device__ __forceinline__ void store_operand(const void *operand, const void *to) {
  store_operand(operand, static_cast<unsigned>(__cvta_generic_to_shared(to)));
}
// An address in shared memory that stays in its register: as the result of a shuffle it is not computed anew in every
// round of a loop, on the way from one warpgroup to the other.
__device__ __forceinline__ unsigned kept_shared(const void *address) {
  return __shfl_sync(0xffffffffu, static_cast<unsigned>(__cvta_generic_to_shared(address)), threadIdx.x % 32);
}
}  // namespace sparse_mla
"""

ROUNDED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace sparse_mla {
__device__ __forceinline__ unsigned rounded(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned *>(&two);
}
__device__ __forceinline__ unsigned rounded(__half, float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned *>(&two);
}
// A warpgroup's [64 x 64 `Panels`] accumulator (m64 layout) times `scale`, rounded, to as many panels of [64 x 128
// bytes]. `to`: as for `store_operand`, in the first.
template <typename Element, int Panels>
__device__ __forceinline__ void store_scaled(const void *accumulator, float scale, const void *to) {
  const float *acc = static_cast<const float *>(accumulator);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int n = 0; n < Panels; ++n) {
    unsigned operand[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float *two = acc + 32 * n + 2 * i;
      operand[i] = rounded(Element(), product(two[0], scale), product(two[1], scale));
    }
    store_operand(operand, shared + 8192 * n);
  }
}
// The same with a factor a row, of which a lane has two.
template <typename Element, int Panels>
__device__ __forceinline__ void store_weighted(const void *accumulator, const void *weights, const void *to) {
  const float *acc = static_cast<const float *>(accumulator), *w = static_cast<const float *>(weights);
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int n = 0; n < Panels; ++n) {
    unsigned operand[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float *two = acc + 32 * n + 2 * i;
      operand[i] = rounded(Element(), product(two[0], w[i % 2]), product(two[1], w[i % 2]));
    }
    store_operand(operand, shared + 8192 * n);
  }
}
}  // namespace sparse_mla
"""

ROW_DOT = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace sparse_mla {
// 128 columns from `first` of four rows of 16-bit elements given by the addresses of their column 0, 8 threads a row;
// zeros, unread, of rows that are not `there`.
__device__ __forceinline__ void load_rows(void *values, const void *rows, const void *there, int first) {
  unsigned *to = static_cast<unsigned *>(values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[4 * i + j] = 0;
    asm volatile("{\n"
                 ".reg .pred there;\n"
                 "setp.ne.s32 there, %5, 0;\n"
                 "@there ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "+r"(to[4 * i]), "+r"(to[4 * i + 1]), "+r"(to[4 * i + 2]), "+r"(to[4 * i + 3])
                 : "l"(static_cast<const long long *>(rows)[i / 2] + 2 * (first + i % 2 * 64)),
                   "r"(static_cast<const int *>(there)[i / 2]));
  }
}
__device__ __forceinline__ float2 pair(__nv_bfloat16, unsigned two) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
__device__ __forceinline__ float2 pair(__half, unsigned two) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&two));
}
// To the sums of four rows the products of what `load_rows` read and of the same columns in shared memory, where they
// stand 16 rows apart in panels of [128 rows x 128 bytes], swizzled. `shared`: the thread's 16 bytes of the first.
template <typename Element>
__device__ __forceinline__ void add_dots(void *sums, const void *values, const void *shared) {
  const unsigned *from = static_cast<const unsigned *>(values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 x = *reinterpret_cast<const uint4 *>(static_cast<const char *>(shared) + i / 2 * 2048 + i % 2 * 16384);
    const unsigned two[4] = {x.x, x.y, x.z, x.w};
    float &sum = static_cast<float *>(sums)[i / 2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = pair(Element(), from[4 * i + j]), b = pair(Element(), two[j]);
      sum = add_product(add_product(sum, a.x, b.x), a.y, b.y);
    }
  }
}
// Row lane % 4 of the four rows' sums over the 8 threads that share them.
__device__ __forceinline__ float row_sum(const void *sums) {
  const float *from = static_cast<const float *>(sums);
  const int row = threadIdx.x % 4;
  float mine = 0.f;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float sum = from[r];
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, sum, lanes);
      asm("add.rn.f32 %0, %0, %1;" : "+f"(sum) : "f"(other));
    }
    if (row == r) mine = sum;
  }
  return mine;
}
// The values of a row, which stand 64 rows apart.
__device__ __forceinline__ void store_stats(const void *to, float lse, float weight, float rest) {
  float *row = static_cast<float *>(const_cast<void *>(to));
  row[0] = lse;
  row[64] = weight;
  row[128] = rest;
}
}  // namespace sparse_mla
"""
# Its elements.
ELEMENT = {"bfloat16": "__nv_bfloat16", "float16": "__half"}
