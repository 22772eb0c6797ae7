"""Device code that TileLang has no word for."""

ROW_ADD = r"""
namespace sparse_mla {
// Add one [64 x 8 N] accumulator of a warpgroup (m64 layout) to fp32 rows. A lane pair swaps halves first, so that
// the even lane holds four columns of row r and the odd lane four columns of row r + 8: one 16-byte reduction each.
// `row` points at this lane's row and column group, or is null when the slot is invalid.
template <int N>
__device__ __forceinline__ void add_rows(const float *acc, float *row) {
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float a0 = acc[4 * j], a1 = acc[4 * j + 1], a2 = acc[4 * j + 2], a3 = acc[4 * j + 3];
    float r0 = __shfl_xor_sync(0xffffffffu, odd ? a0 : a2, 1);
    float r1 = __shfl_xor_sync(0xffffffffu, odd ? a1 : a3, 1);
    float v0 = odd ? r0 : a0, v1 = odd ? r1 : a1, v2 = odd ? a2 : r0, v3 = odd ? a3 : r1;
    if (row != nullptr)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(row + 8 * j), "f"(v0), "f"(v1), "f"(v2), "f"(v3)
                   : "memory");
  }
}
__device__ __forceinline__ void add_rows_64(const void *acc, const void *base, long long offset, int valid) {
  add_rows<8>(static_cast<const float *>(acc), valid ? static_cast<float *>(const_cast<void *>(base)) + offset : nullptr);
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
