/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of CUDA C that the compiler itself knows: qualifiers, built-in variables, vector types and functions of the device. Included
 * before a .cu file, by the command line.
 */
#ifndef EXPERTD_TESTS_EMULATOR_DEVICE_H
#define EXPERTD_TESTS_EMULATOR_DEVICE_H

#include "cuda_runtime_api.h"

#include <math.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
/* The device is one thread of the host, so this is a block's memory; dynamic shared memory is defined by the emulator. */
#define __shared__ thread_local
#define __CUDA_ARCH__ (CUDA_PORTABLE ? 800 : 900)

/* Of the thread that runs. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* ---- vectors ------------------------------------------------------------------------------------------------ */

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

/* ---- arithmetic --------------------------------------------------------------------------------------------- */

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
static inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
static inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }

static inline float __uint_as_float(unsigned v)
{
    float f;
    memcpy(&f, &v, sizeof f);
    return f;
}
static inline float __int_as_float(int v) { return __uint_as_float((unsigned)v); }
static inline unsigned __float_as_uint(float f)
{
    unsigned v;
    memcpy(&v, &f, sizeof v);
    return v;
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
/* Byte i of the result is byte (s >> 4 i) % 8 of y:x. */
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
    const uint64_t all = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++)
        r |= (unsigned)(all >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

template <typename T> static inline T __ldcg(const T *p) { return *p; }
int emulator_atomic_add(int *p, int v);
unsigned emulator_atomic_or(unsigned *p, unsigned v);
static inline int atomicAdd(int *p, int v) { return emulator_atomic_add(p, v); }
static inline unsigned atomicOr(unsigned *p, unsigned v) { return emulator_atomic_or(p, v); }
/* An address of shared memory in its own 32-bit space, in which dynamic shared memory begins at 0. */
uint32_t emulator_shared_address(const void *p);
static inline size_t __cvta_generic_to_shared(const void *p) { return emulator_shared_address(p); }

/* ---- threads together --------------------------------------------------------------------------------------- */

/* All 32 of a warp take part in each; fewer are reported as an error. */
void emulator_sync_threads(void);
void emulator_sync_warp(void);
uint64_t emulator_shuffle(uint64_t v, int from); /* from: a lane; of lanes outside the warp: the own value */
unsigned emulator_ballot(bool v);
unsigned emulator_match(uint64_t v);
int emulator_reduce(int v, bool most); /* the largest, or the sum */

static inline void emulator_whole_warp(unsigned mask)
{
    if (mask != ~0u)
        __builtin_trap();
}
static inline int emulator_lane(void) { return (int)(threadIdx.x % 32); }
static inline void __syncthreads() { emulator_sync_threads(); }
static inline void __syncwarp() { emulator_sync_warp(); }
template <typename T> static inline T __shfl_sync(unsigned mask, T v, int from)
{
    emulator_whole_warp(mask);
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = emulator_shuffle(bits, from & 31);
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, int by)
{
    emulator_whole_warp(mask);
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = emulator_shuffle(bits, emulator_lane() - by);
    memcpy(&v, &bits, sizeof v);
    return v;
}
static inline unsigned __ballot_sync(unsigned mask, bool v)
{
    emulator_whole_warp(mask);
    return emulator_ballot(v);
}
static inline bool __all_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) == ~0u; }
static inline unsigned __match_any_sync(unsigned mask, int v)
{
    emulator_whole_warp(mask);
    return emulator_match((uint64_t)v);
}
static inline int __reduce_add_sync(unsigned mask, int v)
{
    emulator_whole_warp(mask);
    return emulator_reduce(v, false);
}
static inline int __reduce_max_sync(unsigned mask, int v)
{
    emulator_whole_warp(mask);
    return emulator_reduce(v, true);
}
#endif
