"""Device code of the backward by pairs of CTAs (`backward_pair.py`)."""

PAIR = r"""
namespace sparse_mla {
// Operands [rows x 32 columns] of the tail stand in rows of 64 bytes, swizzled by 64 bytes; 8 rows are 512 bytes. All
// others are panels of 64 columns, in rows of 128 bytes.
constexpr int Tail = 2, Panel = 1;  // layouts of a matrix descriptor
__device__ __forceinline__ unsigned in_shared(const void *address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}
__device__ __forceinline__ unsigned of_peer(const void *address, int peer) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(in_shared(address)), "r"(peer));
  return there;
}
// A number that the compiler knows nothing of: what follows from it is not kept in registers through a loop.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
// A thread's 64 values to the place from which the same thread of the peer reads them.
__device__ __forceinline__ void send(const void *values, const void *to, const void *barrier, int peer) {
  const float *v = static_cast<const float *>(values);
  const unsigned at = of_peer(to, peer) + threadIdx.x % 128 * 16, full = of_peer(barrier, peer);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     at + 2048 * i),
                 "f"(v[4 * i]), "f"(v[4 * i + 1]), "f"(v[4 * i + 2]), "f"(v[4 * i + 3]), "r"(full)
                 : "memory");
}
__device__ __forceinline__ void add_received(void *values, const void *from) {
  float *v = static_cast<float *>(values);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 x = static_cast<const float4 *>(from)[threadIdx.x % 128 + 128 * i];
    v[4 * i] += x.x;
    v[4 * i + 1] += x.y;
    v[4 * i + 2] += x.z;
    v[4 * i + 3] += x.w;
  }
}
// By one thread.
__device__ __forceinline__ void copy_to_peer(const void *from, int bytes, const void *barrier, int peer) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   of_peer(from, peer)),
               "r"(in_shared(from)), "r"(bytes), "r"(of_peer(barrier, peer))
               : "memory");
}
// An arrival by each warp.
__device__ __forceinline__ void arrive_here(const void *barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(in_shared(barrier)) : "memory");
}
// Predicated, not branched around.
__device__ __forceinline__ void arrive_if_here(int yes, const void *barrier) {
  __syncwarp();
  arrive_if(yes != 0 && threadIdx.x % 32 == 0, in_shared(barrier));
}
__device__ __forceinline__ void arrive_there(const void *barrier, int peer) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_peer(barrier, peer)) : "memory");
}
// The arrival of one thread, and so many bytes that the peer sends.
__device__ __forceinline__ void expect(const void *barrier, int bytes) {
  if (threadIdx.x % 128 == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void wait_for_peer(const void *barrier, int parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n"
               "}" ::"r"(in_shared(barrier)),
               "r"(parity)
               : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void sync_warpgroup(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
// So many registers of accumulators are there.
template <int Count> __device__ __forceinline__ void finish(void *accumulator) {
  tl::wait_wgmma<0>();
  tl::warpgroup_fence_operand(static_cast<float *>(accumulator), Count);
}
template <int Count> __device__ __forceinline__ void zero(void *values) {
#pragma unroll
  for (int i = 0; i < Count; ++i) static_cast<float *>(values)[i] = 0.f;
}
__device__ __forceinline__ void scale_by(void *values, float factor, int count) {
#pragma unroll
  for (int i = 0; i < count; ++i) static_cast<float *>(values)[i] *= factor;
}

// 32 registers to local memory and back: dq of the tail, which is used once a block, gives way to wider chunks of dkv.
__device__ __forceinline__ void put_away(const void *values, void *room) {
  const float *v = static_cast<const float *>(values);
  const size_t to = __cvta_generic_to_local(room);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm volatile("st.local.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 16 * i), "f"(v[4 * i]), "f"(v[4 * i + 1]),
                 "f"(v[4 * i + 2]), "f"(v[4 * i + 3])
                 : "memory");
}
__device__ __forceinline__ void take_back(void *values, void *room) {
  float *v = static_cast<float *>(values);
  const size_t from = __cvta_generic_to_local(room);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm volatile("ld.local.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[4 * i]), "=f"(v[4 * i + 1]), "=f"(v[4 * i + 2]), "=f"(v[4 * i + 3])
                 : "l"(from + 16 * i)
                 : "memory");
}

template <int Layout, int Leading, int Stride>
__device__ __forceinline__ tl::GmmaDescriptor operand(const void *shared) {
  tl::GmmaDescriptor made;
  tl::initialize_wgmma_descriptor<Layout, Leading, Stride>(made, const_cast<void *>(shared));
  return made;
}

// S^T over dP^T of 64 slots and the 64 heads of a half, of two panels of columns. `heads`: q, and below it dout.
template <tl::DataType Type, bool First>
__device__ __forceinline__ void part_of_scores(void *scores, const void *kv, const void *heads) {
  float *c = static_cast<float *>(scores);
  const tl::GmmaDescriptor a = operand<Panel, 1, 64>(kv), b = operand<Panel, 1, 64>(heads);
  tl::warpgroup_fence_operand(c, 64);
  if constexpr (First) tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 128, 16, false, false, 1, 1>(
        uint64_t(a + ((k / 4 * 8192 + k % 4 * 32) >> 4)), uint64_t(b + ((k / 4 * 16384 + k % 4 * 32) >> 4)),
        reinterpret_cast<uint32_t *>(c), !First || k > 0);
  tl::warpgroup_fence_operand(c, 64);
}
template <tl::DataType Type, bool Tailed>
__device__ __forceinline__ void last_of_scores(void *scores, const void *kv, const void *q) {
  float *c = static_cast<float *>(scores);
  if constexpr (Tailed) {
    const tl::GmmaDescriptor a = operand<Tail, 1, 32>(kv), b = operand<Tail, 1, 32>(q);
    tl::warpgroup_fence_operand(c, 64);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
          uint64_t(a + (k * 32 >> 4)), uint64_t(b + (k * 32 >> 4)), reinterpret_cast<uint32_t *>(c), 1);
  }
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(c, 64);
}
__device__ __forceinline__ void begin_products() { tl::warpgroup_arrive(); }

// P and dS of a warpgroup's [64 slots x 64 heads], as left operands in registers. `stats`: as in `row_stats.py`.
template <typename Element>
__device__ __forceinline__ void softmax(const void *scores, void *P, void *dS, const void *stats, const void *slot_row,
                                        float scale_log2) {
  const float *c = static_cast<const float *>(scores), *of = static_cast<const float *>(stats);
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int *slot = static_cast<const int *>(slot_row) + row;
  const bool valid[2] = {slot[0] >= 0, slot[8] >= 0};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float *column = of + 8 * j + lane % 4 * 2;
    const float2 lse = *reinterpret_cast<const float2 *>(column);
    const float2 weight = *reinterpret_cast<const float2 *>(column + 64);
    const float2 rest = *reinterpret_cast<const float2 *>(column + 128);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 4 * j + 2 * i;
      const float x = valid[i] ? exp2f(c[at] * scale_log2 - lse.x) : 0.f;
      const float y = valid[i] ? exp2f(c[at + 1] * scale_log2 - lse.y) : 0.f;
      static_cast<unsigned *>(dS)[2 * j + i] =
          rounded(Element(), x * (weight.x * c[32 + at] + rest.x), y * (weight.y * c[32 + at + 1] + rest.y));
      static_cast<unsigned *>(P)[2 * j + i] = rounded(Element(), x * weight.x, y * weight.y);
    }
  }
}
// Where a thread begins to store an operand, as `store_operand` wants it.
__device__ __forceinline__ unsigned corner(const void *shared) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  return in_shared(shared) + row * 128 + ((lane / 16 ^ row % 8) << 4);
}
__device__ __forceinline__ void put_operand(const void *values, const void *shared) {
  store_operand(values, corner(shared));
}

// [64 heads x 32 columns] accumulators of both halves += dS^T times the tail of kv, and an accumulator of 32 columns =
// dS of 64 slots and 128 heads times the tail of q, in one group.
template <tl::DataType Type>
__device__ __forceinline__ void tail_products(void *accumulator, void *dq, const void *dS, const void *q,
                                              const void *kv) {
  float *acc = static_cast<float *>(accumulator), *sum = static_cast<float *>(dq);
  const tl::GmmaDescriptor by_slots = operand<Panel, 1, 64>(dS), by_rows = operand<Panel, 1, 64>(dS),
                           q_columns = operand<Tail, 0, 32>(q), kv_columns = operand<Tail, 0, 32>(kv);
  tl::warpgroup_fence_operand(acc, 16);
  tl::warpgroup_fence_operand(sum, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 32, 16, true, true, 1, 1>(
          uint64_t(by_rows + ((h * 8192 + k * 2048) >> 4)), uint64_t(kv_columns + (k * 1024 >> 4)),
          reinterpret_cast<uint32_t *>(sum + 16 * h), 1);
#pragma unroll
  for (int k = 0; k < 8; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 32, 16, false, true, 1, 1>(
        uint64_t(by_slots + ((k / 4 * 8192 + k % 4 * 32) >> 4)),
        uint64_t(q_columns + ((k / 4 * 4096 + k % 4 * 1024) >> 4)), reinterpret_cast<uint32_t *>(acc),
        k > 0);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 16);
  tl::warpgroup_fence_operand(sum, 32);
}
// [64 slots x 64 columns] accumulator = dS of 128 heads times a panel of q, under way.
template <tl::DataType Type>
__device__ __forceinline__ void dS_q(void *accumulator, const void *dS, const void *q) {
  float *acc = static_cast<float *>(accumulator);
  const tl::GmmaDescriptor a = operand<Panel, 1, 64>(dS), b = operand<Panel, 1, 64>(q);
  tl::warpgroup_fence_operand(acc, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, true, 1, 1>(
        uint64_t(a + ((k / 4 * 8192 + k % 4 * 32) >> 4)), uint64_t(b + ((k / 4 * 65536 + k % 4 * 2048) >> 4)),
        reinterpret_cast<uint32_t *>(acc), k > 0);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 32);
}
// += P of 128 heads, a left operand in registers, times a panel of dout, under way.
template <tl::DataType Type>
__device__ __forceinline__ void add_P_dO(void *accumulator, const void *P, const void *dout) {
  float *acc = static_cast<float *>(accumulator);
  const uint32_t *p = static_cast<const uint32_t *>(P);
  const tl::GmmaDescriptor b = operand<Panel, 1, 64>(dout);
  tl::warpgroup_fence_operand(acc, 32);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    tl::wgmma_rs<Type, Type, tl::DataType::kFloat32, 64, 64, 16, false, true, 1, 1>(
        p + 4 * k, uint64_t(b + ((k / 4 * 65536 + k % 4 * 2048) >> 4)), reinterpret_cast<uint32_t *>(acc), 1);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(acc, 32);
}
// 8 of a warp's 16 rows, as `add`. `rows`: of the warp's slots, the even one of a lane's two first.
template <bool All, int Columns, int Step>
__device__ __forceinline__ void add_rows(const void *pairs, long long to, const void *rows, int stride) {
  const int *row = static_cast<const int *>(rows);
  add<false, All, Step, Columns>(pairs, to, row[0], row[1], stride);
}

// Where a thread's 16 bytes of its first row go in a panel.
__device__ __forceinline__ const void *in_panel(const void *panel) {
  const int r0 = threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
  return static_cast<const char *>(panel) + r0 * 128 + ((piece ^ r0 % 8) << 4);
}
// 64 columns from `first` of four rows given by the addresses of a thread's first 16 bytes of each, 8 threads a row,
// rows 16 apart in shared memory.
__device__ __forceinline__ void load_panel(const void *panel, const void *rows, const void *valid, int first) {
  gather_rows<1, 128>(in_panel(panel), rows, valid, 0, first);
}
// Their tails, 32 columns of 64 bytes, of which each thread copies two pieces; `further`: bytes from a row's first 16
// bytes that are copied to its tail.
__device__ __forceinline__ void copy_tail(const void *to, const long long *row, const bool *valid, int further) {
  const int thread = threadIdx.x % 8, piece = thread % 4, r0 = threadIdx.x % 128 / 8;
  const bool upper = thread >= 4;
  const unsigned shared = in_shared(to) + (upper ? 2048 : 0) + r0 * 64 + ((piece ^ r0 / 2 % 4) << 4);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared + r * 1024),
                 "l"((upper ? row[2 + r] : row[r]) + (further + 16 * (piece - thread))),
                 "r"((upper ? valid[2 + r] : valid[r]) ? 16 : 0));
}
__device__ __forceinline__ void load_tail(const void *to, const void *rows, const void *there, int further) {
  const int *is = static_cast<const int *>(there);
  const bool valid[4] = {is[0] != 0, is[1] != 0, is[2] != 0, is[3] != 0};
  copy_tail(to, static_cast<const long long *>(rows), valid, further);
}
// The rows that a thread's four entries of a block are, of those below `limit`, or -1.
template <typename Index> __device__ __forceinline__ void find_rows(void *rows, const void *found, long long limit) {
  const long long most = limit > 0 ? limit : 0;
  const Index end = most < 0x7fffffff || sizeof(Index) > 4 ? most : 0x7fffffff;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Index row = static_cast<const Index *>(found)[j];
    static_cast<int *>(rows)[j] = row >= 0 && row < end ? static_cast<int>(row) : -1;
  }
}
// Two panels of a block's rows of kv, and if `Tailed` their tail. Addresses are made here: those of a block cost the
// registers of which the products under way have none to spare.
template <bool Tailed>
__device__ __forceinline__ void gather_block(const void *panels, const void *tail, const void *rows, const void *kv,
                                             long long stride, int first, int further) {
  const unsigned shared = in_shared(in_panel(panels));
  long long at[4];
  bool valid[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = static_cast<const int *>(rows)[r];
    valid[r] = row >= 0;
    at[r] = reinterpret_cast<long long>(kv) + offset(row >= 0 ? row : 0, stride);
#pragma unroll
    for (int u = 0; u < 2; ++u)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared + r * 2048 + u * 8192),
                   "l"(at[r] + 2 * (first + 64 * u)), "r"(valid[r] ? 16 : 0));
  }
  if constexpr (Tailed) copy_tail(tail, at, valid, further);
}
// Where terms of a thread's four slots went in the block before, as `say_slots` said.
__device__ __forceinline__ void load_goals(void *goal, const void *slot_to) {
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 4; ++r) static_cast<int *>(goal)[r] = static_cast<const int *>(slot_to)[16 * r];
}

// Sums of products of four rows of out and of dout over 512 columns, 8 threads a row, each its part of them.
template <typename Element>
__device__ __forceinline__ void dot_rows(void *sums, const void *out_rows, const void *dout_rows, const void *there) {
  unsigned x[32], y[32];
#pragma unroll
  for (int r = 0; r < 4; ++r) static_cast<float *>(sums)[r] = 0.f;
#pragma unroll 1
  for (int first = 0; first < 512; first += 128) {
    load_rows(x, out_rows, there, first);
    load_rows(y, dout_rows, there, first);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float &sum = static_cast<float *>(sums)[i / 8];
      const float2 a = pair(Element(), x[i]), b = pair(Element(), y[i]);
      sum = add_product(add_product(sum, a.x, b.x), a.y, b.y);
    }
  }
}

// A [64 heads x 128 columns] accumulator times `scale`, rounded, to rows of dq through two panels of shared memory.
// `row`: address of head 0 in the first of the columns, `stride`: bytes from one head to the next.
template <typename Element>
__device__ __forceinline__ void leave_rows(const void *accumulator, float scale, const void *panels, long long row,
                                           long long stride, int heads, int barrier) {
  const float *acc = static_cast<const float *>(accumulator);
  const unsigned to = corner(panels);
  sync_warpgroup(barrier);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    unsigned values[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      values[i] = rounded(Element(), product(acc[32 * n + 2 * i], scale), product(acc[32 * n + 2 * i + 1], scale));
    store_operand(values, to + 8192 * n);
  }
  sync_warpgroup(barrier);
  const int thread = threadIdx.x % 8, r0 = threadIdx.x % 128 / 8;
  const char *from = static_cast<const char *>(in_panel(panels));
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (r0 + 16 * r < heads)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        *reinterpret_cast<uint4 *>(row + (r0 + 16 * r) * stride + 128 * n + 16 * thread) =
            *reinterpret_cast<const uint4 *>(from + 2048 * r + 8192 * n);
}
// The same of a [64 heads x 32 columns] accumulator, from the registers.
template <typename Element>
__device__ __forceinline__ void leave_tail(const void *accumulator, float scale, long long row, long long stride,
                                           int heads) {
  const float *acc = static_cast<const float *>(accumulator);
  const int lane = threadIdx.x % 32, r0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (r0 + 8 * i < heads)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<unsigned *>(row + (r0 + 8 * i) * stride + 16 * j + 4 * (lane % 4)) = rounded(
            Element(), product(acc[4 * j + 2 * i], scale), product(acc[4 * j + 2 * i + 1], scale));
}
}  // namespace sparse_mla
"""
