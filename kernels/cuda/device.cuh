/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels share on the device: operand types, the activation, launches, offsets, adapters. Instructions: ptx.cuh.
 */
#ifndef EXPERTD_KERNELS_CUDA_DEVICE_CUH
#define EXPERTD_KERNELS_CUDA_DEVICE_CUH

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- operand types ------------------------------------------------------------------------------------- */

template <typename OP> __device__ __forceinline__ OP op_from_f32(float v);
template <> __device__ __forceinline__ __nv_bfloat16 op_from_f32(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ __half op_from_f32(float v) { return __float2half_rn(v); }
__device__ __forceinline__ float op_to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float op_to_f32(__half v) { return __half2float(v); }

template <typename OP> struct op_pair;
template <> struct op_pair<__nv_bfloat16> {
    static __device__ __forceinline__ float2 widen(uint32_t v)
    {
        return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    }
    static __device__ __forceinline__ uint32_t narrow(float lo, float hi)
    {
        __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
        return *reinterpret_cast<uint32_t *>(&p);
    }
};
template <> struct op_pair<__half> {
    static __device__ __forceinline__ float2 widen(uint32_t v) { return __half22float2(*reinterpret_cast<__half2 *>(&v)); }
    static __device__ __forceinline__ uint32_t narrow(float lo, float hi)
    {
        __half2 p = __floats2half2_rn(lo, hi);
        return *reinterpret_cast<uint32_t *>(&p);
    }
};

/* ---- the activation ------------------------------------------------------------------------------------ */

/* silu and gpt_oss: g sigmoid(alpha g) (u + beta) within limits. The clamps keep NaN. */
struct gated_linear {
    float limit, scale, beta; /* scale: -alpha / ln 2 */
};

__device__ __forceinline__ struct gated_linear gated_linear_of(enum kernel_activation act)
{
    const bool oss = act == KERNEL_ACT_GPT_OSS;
    struct gated_linear a = {oss ? 7.0f : __int_as_float(0x7f800000), (oss ? -1.702f : -1.0f) * 1.4426950408889634f, oss ? 1.0f : 0.0f};
    return a;
}

/* What is left of it for a g and a u + beta within the limits. */
__device__ __forceinline__ float gated_product(float scale, float g, float u)
{
    const float e = ex2_approx(scale * g), r = rcp_approx(1.0f + e);
    return g * r * u;
}

__device__ __forceinline__ float activate_linear(const struct gated_linear &a, float g, float u)
{
    g = min_nan(g, a.limit);
    u = max_nan(min_nan(u, a.limit), -a.limit);
    return gated_product(a.scale, g, u + a.beta);
}

__device__ __forceinline__ float activate(enum kernel_activation act, float g, float u)
{
    if (act == KERNEL_ACT_SILU || act == KERNEL_ACT_GPT_OSS)
        return activate_linear(gated_linear_of(act), g, u);
    float t = act == KERNEL_ACT_GELU ? erff(g * 0.70710678118654752f) : tanhf(0.79788456080286536f * (g + 0.044715f * g * g * g));
    return 0.5f * g * (1.0f + t) * u;
}

/* ---- addresses ----------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- overlapping launches ------------------------------------------------------------------------------ */

/* Code for sm_90a alone waits for what it depends on and lets what depends on it begin; portable code is built without either,
 * so its launches never ask for overlap.
 *
 * A launch begins when every block of the one before has called launch_release or has ended; launch_wait returns when the one before
 * is complete and its writes can be seen. The rules:
 *  - every kernel calls launch_wait before its first write to global memory, and before it ends if it writes none. So launches
 *    complete in order, and a buffer is written when all who read or wrote it before are done.
 *  - every kernel but enter, route's first and shrink for batches of few rows (cuda_few) calls launch_release after its own
 *    launch_wait. So when launch n begins, launch n - 2 and all before it are complete, and n may read what they wrote before its own
 *    launch_wait; what n - 1 writes needs it. Behind those three, n reads nothing that a launch has written before it.
 *  - a batch's arrays, weights and adapters are written by copies, on which launches depend in full: they may always be read.
 * What is read before launch_wait, other than these three, is read past the first-level cache (__ldcg). */
__device__ __forceinline__ void launch_wait() { grid_wait(); }
__device__ __forceinline__ void launch_release() { grid_release(); }

/* For kernels that have nothing to do before. */
__device__ __forceinline__ void launch_begin()
{
    launch_wait();
    launch_release();
}

template <typename... P, typename... A>
static inline cudaError_t launch(struct kernel_stream *s, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... args)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = s->stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = s->overlap && !CUDA_PORTABLE ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, P(args)...);
}

/* Loads a kernel's code and allows it `shared` bytes of dynamic shared memory. */
template <typename K> static inline cudaError_t load(K *kernel, size_t shared)
{
    if (shared > 48 * 1024) {
        cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (e != cudaSuccess)
            return e;
    }
    cudaFuncAttributes a;
    return cudaFuncGetAttributes(&a, kernel);
}

/* ---- weights ------------------------------------------------------------------------------------------- */

/* Where a group's first block lies in its expert's projection; the next follow CUDA_STRIP_BYTES apart. */
__device__ __forceinline__ size_t group_offset(int group, int blocks)
{
    return ((size_t)(group / CUDA_STRIP_GROUPS) * blocks * CUDA_STRIP_GROUPS + group % CUDA_STRIP_GROUPS) * CUDA_BLOCK_BYTES;
}

/* ---- sums over a warp ---------------------------------------------------------------------------------- */

/* The sum of the lanes' values up to this one's, for a whole warp. `lane` is the thread's, which the first warp has in threadIdx.x. */
__device__ __forceinline__ int warp_sum_inclusive(int v, int lane)
{
    for (int d = 1; d < 32; d *= 2) {
        int before = __shfl_up_sync(~0u, v, d);
        if (lane >= d)
            v += before;
    }
    return v;
}

/* ---- offsets of experts -------------------------------------------------------------------------------- */

/* Fills offset[0..experts], the first position of each expert; for all threads of a block, ends with a barrier. `complete`: the launch
 * that wrote routing's is two back or more. In gate_up without adapters it is the one before: up to CUDA_COUNT_SLOTS slots the block
 * counts for itself, above it waits. */
__device__ __forceinline__ void offsets_fill(int *offset, const struct kernel_forward &f, bool complete)
{
    const int experts = f.dims.experts, slots = f.batch.slots;
    if (complete || slots > CUDA_COUNT_SLOTS) {
        if (!complete)
            launch_wait();
        for (int e = threadIdx.x; e <= experts; e += blockDim.x)
            offset[e] = __ldcg(f.routing.expert_offset + e);
        __syncthreads();
        return;
    }
    for (int e = threadIdx.x; e <= experts; e += blockDim.x)
        offset[e] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        int e = f.batch.slot_expert[i];
        if (e >= 0)
            atomicAdd(&offset[e + 1], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int each = (experts + 31) / 32, begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts), sum = 0;
        for (int e = begin; e < end; e++)
            sum += offset[e + 1];
        const int inclusive = warp_sum_inclusive(sum, threadIdx.x);
        int running = inclusive - sum;
        for (int e = begin; e < end; e++) {
            running += offset[e + 1];
            offset[e + 1] = running;
        }
    }
    __syncthreads();
}

/* ---- chunks of experts --------------------------------------------------------------------------------- */

/* The products work on chunks: up to `chunk` consecutive positions of one expert. For all threads of a block: fills first[e] with
 * the number of chunks of the experts before e, from offset[0..experts]. */
__device__ __forceinline__ int chunks_scan(const int *offset, int *first, int experts, int chunk)
{
    if (threadIdx.x < 32) {
        int each = (experts + 31) / 32, begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts), sum = 0;
        for (int e = begin; e < end; e++)
            sum += (offset[e + 1] - offset[e] + chunk - 1) / chunk;
        const int inclusive = warp_sum_inclusive(sum, threadIdx.x);
        int running = inclusive - sum;
        for (int e = begin; e < end; e++) {
            first[e] = running;
            running += (offset[e + 1] - offset[e] + chunk - 1) / chunk;
        }
        if (threadIdx.x == 31)
            first[experts] = inclusive;
    }
    __syncthreads();
    return first[experts];
}

/* The expert whose chunks include number v. */
__device__ __forceinline__ int chunks_find(const int *first, int experts, int v)
{
    int low = 0, high = experts;
    while (high - low > 1) {
        int mid = (low + high) / 2;
        if (first[mid] <= v)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* ---- dealing out tiles ---------------------------------------------------------------------------------- */

/* The first TILE_COUNTERS words of f.work: how many tiles of gate_up and of down blocks have asked for, beyond their first. route's first
 * kernel clears them. Which block computes a tile decides no bit. */
#define TILE_COUNTERS 4

template <bool DOWN> __device__ __forceinline__ int *tile_counter(const struct kernel_forward &f) { return (int *)f.work + (DOWN ? 1 : 0); }

__device__ __forceinline__ void tile_counters_clear(const struct kernel_forward &f)
{
    if (blockIdx.x == 0 && threadIdx.x < TILE_COUNTERS)
        ((int *)f.work)[threadIdx.x] = 0;
}

/* ---- adapters ------------------------------------------------------------------------------------------ */

/* The adapter of the row at a position, or -1. */
__device__ __forceinline__ int adapter_at(const struct kernel_forward &f, int position)
{
    return f.batch.row[f.batch.slot_row[f.routing.order[position]]].adapter;
}

/* first[e] = the first segment of each expert that has any; for all threads of a block, before a barrier. Returns how many there are. */
__device__ __forceinline__ int segments_first(int *first, const struct kernel_forward &f)
{
    const int segments = __ldcg(f.routing.segment_count);
    for (int i = threadIdx.x; i < segments; i += blockDim.x) {
        int expert = __ldcg(f.routing.segment_expert + i);
        if (i == 0 || __ldcg(f.routing.segment_expert + i - 1) != expert)
            first[expert] = i;
    }
    return segments;
}

/* Where 8 ranks, from 8 k on, of an adapter's B lie for output row r of `rows`. */
__device__ __forceinline__ const uint8_t *lora_b_at(const uint8_t *b, int rank, int rows, int r, int k)
{
    const int plane = k / 2 * CUDA_PLANE_RANKS;
    const uint8_t *base = b + (size_t)plane * rows * 2;
    return plane + CUDA_PLANE_RANKS <= rank ? base + r * 32 + k % 2 * 16 : base + r * 16;
}

__device__ __forceinline__ const struct kernel_lora_entry *lora_entry(const struct kernel_forward &f, int adapter, int expert,
                                                                      int projection)
{
    return f.lora.entry + ((size_t)adapter * f.dims.experts + expert) * KERNEL_PROJECTIONS + projection;
}

#endif
