"""Device code that TileLang has no word for."""

ROW_ADD = r"""
namespace sparse_mla {
// Add a [64 x 64] accumulator of a warpgroup (m64 layout) to 64 fp32 rows, in full 128-byte lines.
// Straight from the registers a warp would touch 16 sectors of 32 bytes an instruction, which the L2 adds at 2.3 TB/s
// against 3.8 for whole lines. So each warp turns [8 rows x 32 columns] at a time in its own KB of shared memory: float2
// writes and float4 reads, both without bank conflicts (16-byte chunk c of row r stands at c ^ (2 (r % 4) ^ (r / 4))).
// `row[n]`: kv row of slot 16 warp + 4 n + lane / 8, negative when the slot is invalid.
__device__ __forceinline__ void add_rows_64(const void *accumulator, const void *stage, const void *dkv, long long column,
                                            long long row_stride, int row0, int row1, int row2, int row3) {
  const float *acc = static_cast<const float *>(accumulator);
  const int lane = threadIdx.x % 32;
  float *mine = static_cast<float *>(const_cast<void *>(stage)) + threadIdx.x / 32 * 256;
  const int r = lane / 4, q = lane % 4, swizzle = 2 * (r % 4) ^ r / 4;
  float *write = mine + 32 * r + 2 * (q % 2);
  const int r_low = lane / 8, r_high = r_low + 4;
  const float4 *read_low = reinterpret_cast<const float4 *>(mine) + 8 * r_low + ((lane % 8) ^ (2 * r_low));
  const float4 *read_high = reinterpret_cast<const float4 *>(mine) + 8 * r_high + ((lane % 8) ^ (2 * r_low ^ 1));
  float *base = static_cast<float *>(const_cast<void *>(dkv)) + column + 4 * (lane % 8);
  const int row[4] = {row0, row1, row2, row3};
#pragma unroll
  for (int half = 0; half < 4; ++half) {  // columns 32 (half / 2), rows 8 (half % 2)
    const float *part = acc + 16 * (half / 2) + 2 * (half % 2);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float2 *>(write + 4 * ((2 * j + q / 2) ^ swizzle)) = make_float2(part[4 * j], part[4 * j + 1]);
    __syncwarp();
    const float4 low = *read_low, high = *read_high;
    const int to_low = row[2 * (half % 2)], to_high = row[2 * (half % 2) + 1];
    if (to_low >= 0)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(base + to_low * row_stride + 32 * (half / 2)),
                   "f"(low.x), "f"(low.y), "f"(low.z), "f"(low.w)
                   : "memory");
    if (to_high >= 0)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(base + to_high * row_stride + 32 * (half / 2)),
                   "f"(high.x), "f"(high.y), "f"(high.z), "f"(high.w)
                   : "memory");
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
