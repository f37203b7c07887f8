/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels/cuda/ptx.cuh is on the emulated device; what each function means is said there.
 */
#ifndef EXPERTD_TESTS_EMULATOR_PTX_HOST_H
#define EXPERTD_TESTS_EMULATOR_PTX_HOST_H

#include "ptx.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

__device__ __forceinline__ float min_nan(float a, float b) { return a != a ? a : b != b ? b : a < b || (a == b && signbit(a)) ? a : b; }
__device__ __forceinline__ float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b || (a == b && signbit(b)) ? a : b; }
__device__ __forceinline__ float flush_subnormal(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0, v) : v; }
__device__ __forceinline__ float ex2_approx(float v) { return flush_subnormal(exp2f(flush_subnormal(v))); }
__device__ __forceinline__ float rcp_approx(float v) { return flush_subnormal(1.0f / flush_subnormal(v)); }
__device__ __forceinline__ uint32_t bits_from(uint32_t first, uint32_t width) { return (uint32_t)(((1ull << width) - 1) << first); }
template <typename T> __device__ __forceinline__ T *keep_in_register(T *p) { return p; }
template <int N> __device__ __forceinline__ void registers_decrease() {}
template <int N> __device__ __forceinline__ void registers_increase() {}

template <typename OP>
__device__ __forceinline__ void mma_16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    emulator_mma(std::is_same<OP, __nv_bfloat16>::value, c, a, b);
}
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) { return emulator_transpose(v); }

__device__ __forceinline__ uint4 shared_load_16(uint32_t address)
{
    uint4 v;
    emulator_shared_load(&v, address, 16);
    return v;
}
__device__ __forceinline__ uint4 shared_load_16(uint32_t address, uint32_t valid)
{
    uint4 v = {0, 0, 0, 0};
    if (valid)
        emulator_shared_load(&v, address, 16);
    return v;
}
__device__ __forceinline__ uint4 shared_load_matrices(uint32_t address)
{
    const int lane = threadIdx.x % 32;
    uint4 row, v;
    emulator_shared_load(&row, address, 16);
    for (int i = 0; i < 4; i++) {
        const uint32_t word[4] = {__shfl_sync(~0u, row.x, 8 * i + lane / 4), __shfl_sync(~0u, row.y, 8 * i + lane / 4),
                                  __shfl_sync(~0u, row.z, 8 * i + lane / 4), __shfl_sync(~0u, row.w, 8 * i + lane / 4)};
        (&v.x)[i] = word[lane % 4];
    }
    return v;
}
__device__ __forceinline__ uint2 shared_load_8(uint32_t address, uint32_t valid)
{
    uint2 v = {0, 0};
    if (valid)
        emulator_shared_load(&v, address, 8);
    return v;
}

__device__ __forceinline__ void copy_async_16(uint32_t dst, const void *src, bool valid) { emulator_copy_async(dst, src, valid); }
__device__ __forceinline__ void copy_async_commit() { emulator_copy_async_commit(); }
template <int N> __device__ __forceinline__ void copy_async_wait() { emulator_copy_async_wait(N); }
__device__ __forceinline__ void copy_async_wait_all() { emulator_copy_async_wait(-1); }
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    emulator_bulk_copy(dst, src, bytes, bar);
}
__device__ __forceinline__ void bulk_copy_once(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    emulator_bulk_copy(dst, src, bytes, bar);
}
__device__ __forceinline__ void fence_async_proxy() { emulator_fence_proxy(); }
__device__ __forceinline__ void prefetch_l2(const void *p) {}

__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads) { emulator_bar_sync((int)id, (int)threads); }
__device__ __forceinline__ void barrier_init(uint32_t bar, int count) { emulator_mbarrier_init(bar, count); }
__device__ __forceinline__ void barrier_arrive(uint32_t bar) { emulator_mbarrier_arrive(bar, 1, 0); }
__device__ __forceinline__ void barrier_arrive_many(uint32_t bar, int count) { emulator_mbarrier_arrive(bar, count, 0); }
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) { emulator_mbarrier_wait(bar, parity); }
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) { emulator_mbarrier_arrive(bar, 1, bytes); }
__device__ __forceinline__ void barrier_expect_more(uint32_t bar, uint32_t bytes) { emulator_mbarrier_expect(bar, bytes); }
__device__ __forceinline__ void barrier_arrive_copies(uint32_t bar) { emulator_mbarrier_arrive_copies(bar); }

__device__ __forceinline__ void grid_wait() { emulator_launch_wait(); }
__device__ __forceinline__ void grid_release() { emulator_launch_release(); }

__device__ __forceinline__ void wgmma_begin() { emulator_wgmma_begin(); }
__device__ __forceinline__ void wgmma_commit() { emulator_wgmma_commit(); }
template <int N> __device__ __forceinline__ void wgmma_wait() { emulator_wgmma_wait(N); }
template <typename OP, int N> struct wgmma_run {
    static __device__ __forceinline__ void go(float *d, uint64_t x, uint64_t y)
    {
        emulator_wgmma(std::is_same<OP, __nv_bfloat16>::value, N, d, x, y);
    }
};
#endif
