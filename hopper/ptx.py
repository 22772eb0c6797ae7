"""Device code that TileLang has no word for."""

ROW_ADD = r"""
namespace sparse_mla {
// Add a [64 x 32] accumulator of a warpgroup (m64 layout) to 64 fp32 rows, in full 128-byte lines.
// Straight from the registers a warp would touch 16 sectors of 32 bytes an instruction, which the L2 adds at 2.3 TB/s
// against 3.8 for whole lines. So each warp turns [8 rows x 32 columns] at a time in its own KB of shared memory: float2
// writes and float4 reads, both without bank conflicts (16-byte chunk c of row r stands at c ^ (2 (r % 4) ^ (r / 4))).
// `row_n`: kv row of slot 16 warp + 4 n + lane / 8, negative when the slot is invalid.
// Predicated, not branched around: products are in flight here, and a wait in a divergent path would serialise them.
__device__ __forceinline__ void add_line(float *base, int row, int row_stride, const float4 v) {
  asm volatile("{\n"
               ".reg .pred valid;\n"
               "setp.ge.s32 valid, %5, 0;\n"
               "@valid red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
               "}" ::"l"(base + (long long)row * row_stride),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(row)
               : "memory");
}
__device__ __forceinline__ void add_rows(const void *accumulator, const void *stage, const void *dkv, long long column,
                                         int row_stride, int row_0, int row_1, int row_2, int row_3) {
  const float *acc = static_cast<const float *>(accumulator);
  // Opaque to the compiler: addresses kept from call to call would cost the registers that the accumulators need.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  asm volatile("" : "+r"(row_0), "+r"(row_1), "+r"(row_2), "+r"(row_3));
  const int lane = thread % 32, r = lane / 4, q = lane % 4, line = lane / 8, c = lane % 8;
  float *mine = static_cast<float *>(const_cast<void *>(stage)) + thread / 32 * 256;
  float *write = mine + 32 * r + 2 * (q % 2);
  const float *read = mine + 32 * line;
  float *base = static_cast<float *>(const_cast<void *>(dkv)) + column + 4 * c;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float2 *>(write + 4 * ((2 * j + q / 2) ^ (2 * (r % 4) ^ r / 4))) =
          make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
    __syncwarp();
    const float4 low = *reinterpret_cast<const float4 *>(read + 4 * (c ^ (2 * line)));
    const float4 high = *reinterpret_cast<const float4 *>(read + 128 + 4 * (c ^ (2 * line) ^ 1));
    const int to_low = half ? row_2 : row_0, to_high = half ? row_3 : row_1;
    add_line(base, to_low, row_stride, low);
    add_line(base, to_high, row_stride, high);
  }
}
}  // namespace sparse_mla
"""

VECTOR_DOT = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace sparse_mla {
// Sum of the products of eight elements at two 16-byte aligned addresses, in fp32. TileLang cannot vectorise loads whose
// strides are run-time values.
__device__ __forceinline__ float dot8_bf16(const void *a, const void *b) {
  const uint4 x = *static_cast<const uint4 *>(a), y = *static_cast<const uint4 *>(b);
  const unsigned u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(__uint_as_float(u[i] << 16), __uint_as_float(v[i] << 16), sum);
    sum = fmaf(__uint_as_float(u[i] & 0xffff0000u), __uint_as_float(v[i] & 0xffff0000u), sum);
  }
  return sum;
}
__device__ __forceinline__ float dot8_fp16(const void *a, const void *b) {
  const uint4 x = *static_cast<const uint4 *>(a), y = *static_cast<const uint4 *>(b);
  const unsigned u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = __half22float2(*reinterpret_cast<const __half2 *>(&u[i]));
    const float2 q = __half22float2(*reinterpret_cast<const __half2 *>(&v[i]));
    sum = fmaf(p.x, q.x, sum);
    sum = fmaf(p.y, q.y, sum);
  }
  return sum;
}
}  // namespace sparse_mla
"""
