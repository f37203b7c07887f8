/* SPDX-License-Identifier: Apache-2.0
 *
 * The PTX instructions that the kernels use and CUDA C++ has no names for, a function each. No other file has inline assembly: the rest
 * is C++ and CUDA's own names, which a compiler for the host takes when something stands in for those. For these functions that is
 * ptx_host.h, which lies with the tests and is found by their include path alone.
 *
 * For all of them:
 *  - an address in shared memory is one of the shared state space, in 32 bits (smem_address), and of the block's own memory.
 *  - g = lane / 4, t = lane % 4. Registers of 32 bits hold two elements of 16, the first in the lower half.
 *  - "for a whole warp" (or warpgroup: 4 warps, the first of which is a multiple of 4): all its threads call it together.
 *  - what touches memory is kept in its place among other accesses by the compiler. What the hardware orders is said at each.
 * Writes by the threads and by copy_async go through the generic proxy, bulk_copy's through the async proxy; wgmma reads through the
 * latter.
 */
#ifndef EXPERTD_KERNELS_CUDA_PTX_CUH
#define EXPERTD_KERNELS_CUDA_PTX_CUH

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* ---- arithmetic ---------------------------------------------------------------------------------------- */

/* NaN if either is. */
__device__ __forceinline__ float min_nan(float a, float b)
{
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float max_nan(float a, float b)
{
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* 2^v and 1 / v, approximately; subnormal numbers count as zeros, as operands and as results. */
__device__ __forceinline__ float ex2_approx(float v)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ float rcp_approx(float v)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

/* `width` ones from bit `first` on, both 0 .. 32; none past bit 31. */
__device__ __forceinline__ uint32_t bits_from(uint32_t first, uint32_t width)
{
    uint32_t r;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(r) : "r"(first), "r"(width));
    return r;
}

/* ---- registers ----------------------------------------------------------------------------------------- */

/* Returns p, of which the optimizer knows nothing any more: it keeps it in a register, instead of loading or computing it again. */
template <typename T> __device__ __forceinline__ T *keep_in_register(T *p)
{
    asm volatile("" : "+l"(p));
    return p;
}

/* For a whole warpgroup, registers a thread, N a multiple of 8: hands back all above N; waits until it has N, of those that the block's
 * other warpgroups have handed back. sm_90a. */
template <int N> __device__ __forceinline__ void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

/* ---- a warp's matrices --------------------------------------------------------------------------------- */

/* c[16x8] += a[16x16] b[16x8], fp32 sums, for a whole warp. A thread has, at columns 2 t and 2 t + 1 of k, a0: row g, a1: row g + 8, b0:
 * column g; at 2 t + 8 and 2 t + 9, a2: row g, a3: row g + 8, b1: column g; c[0], c[1]: row g, c[2], c[3]: row g + 8, at columns
 * 2 t and 2 t + 1. Which columns of k a thread's registers stand for is free, as long as a and b agree. */
template <typename OP>
__device__ __forceinline__ void mma_16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                         uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16816<__half>(float c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Transposes 8 x 8 elements that a warp holds as mma fragments do (row g, columns 2 t and 2 t + 1), for a whole warp. */
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v)
{
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

/* ---- loads from shared memory -------------------------------------------------------------------------- */

/* 16 bytes, at a multiple of 16. */
__device__ __forceinline__ uint4 shared_load_16(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

/* The same; zeros when `valid` is 0, and nothing is read: the address may be any. */
__device__ __forceinline__ uint4 shared_load_16(uint32_t address, uint32_t valid)
{
    uint4 v;
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
                 " @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "r"(address), "r"(valid)
                 : "memory");
    return v;
}

/* Four matrices of 8 x 8 elements of 16 bits, for a whole warp: lane 8 i + r says where row r of matrix i lies, 16 bytes at a multiple of 16.
 * Gives of each matrix row g, columns 2 t and 2 t + 1, as mma fragments have them. */
__device__ __forceinline__ uint4 shared_load_matrices(uint32_t address)
{
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* 8 bytes, at a multiple of 8; zeros when `valid` is 0, and nothing is read: the address may be any. */
__device__ __forceinline__ uint2 shared_load_8(uint32_t address, uint32_t valid)
{
    uint2 v;
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n @p ld.shared.v2.u32 {%0,%1}, [%2];\n }"
                 : "=&r"(v.x), "=&r"(v.y)
                 : "r"(address), "r"(valid)
                 : "memory");
    return v;
}

/* ---- copies from global to shared memory --------------------------------------------------------------- */

/* 16 bytes, both ends at multiples of 16, past the first-level cache; zeros are written when `valid` is false, and nothing is read. The
 * thread's copies lie ready, for itself, behind one of the waits below, for others behind a barrier after it or the barrier of
 * barrier_arrive_copies. */
__device__ __forceinline__ void copy_async_16(uint32_t dst, const void *src, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
/* The thread's copies since its last commit are a group, maybe an empty one. */
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until at most the thread's last N groups are under way. */
template <int N> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
/* Waits for all of the thread's copies, committed or not. */
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* By one thread: copies `bytes`, a multiple of 16, both ends at multiples of 16. As they arrive, the barrier `bar` has so many bytes
 * fewer to wait for, and who has waited for its phase sees them. Nothing holds the copy back behind loads from `dst` that have been
 * issued only. sm_90. */
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
                 "r"(bar)
                 : "memory");
}

/* The same of what nobody reads again soon: the first to leave the second-level cache. */
__device__ __forceinline__ void bulk_copy_once(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

/* What comes before it of accesses to shared memory through the generic proxy, the thread's own and others' that a barrier has put
 * there, comes before the accesses through the async proxy that follow. sm_90. */
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* Fetches the line of an address in global memory into the second-level cache; waits for nothing. */
__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/* ---- barriers ------------------------------------------------------------------------------------------ */

/* Waits until `threads` threads (a multiple of 32) have come to barrier `id` of the block, 1 to 15, as __syncthreads does with number 0
 * and all of them: what they did to memory before, they all see. For whole warps. */
__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Barriers in shared memory, 8 bytes at a multiple of 8. A phase is complete when `count` arrivals have come and no byte of copies is
 * waited for; then the next begins, with `count` arrivals again. Phases have parities 0, 1, 0, ... An arrival releases what the thread
 * did before, a wait acquires it. barrier_wait and what counts bytes are sm_90's. */

/* By one thread. Others use it behind a barrier of the block, copies behind fence_async_proxy. */
__device__ __forceinline__ void barrier_init(uint32_t bar, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
/* The same as so many arrivals. */
__device__ __forceinline__ void barrier_arrive_many(uint32_t bar, int count)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
/* Waits until the phase of this parity is complete: the current one or the one before. Before the first there was one of parity 1. */
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n .reg .pred p;\n WAIT_%=:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @!p bra WAIT_%=;\n }" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
/* Arrives, and has the barrier wait for so many bytes of bulk copies more, both at once. */
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Has it wait for more bytes, without an arrival: before the phase's last. Orders nothing. */
__device__ __forceinline__ void barrier_expect_more(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Arrives when all copy_async_16 that this thread has begun have; one of the `count` arrivals. */
__device__ __forceinline__ void barrier_arrive_copies(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

/* ---- launches ------------------------------------------------------------------------------------------ */

/* By any thread: waits until the launches that this one depends on are complete and what they wrote can be seen; lets those that depend
 * on this one begin, once all blocks have called it or ended. The rules are launch_wait's (device.cuh). Nothing before sm_90. */
__device__ __forceinline__ void grid_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_release()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- a warpgroup's matrices, sm_90a -------------------------------------------------------------------- */

/* For a whole warpgroup. The sums that the instructions after it add to are as the threads left them. Shared memory that was written
 * through the generic proxy needs fence_async_proxy besides. */
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Those since the last commit are a group. */
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most the last N groups are under way: the others' sums may be used, and the memory that they read written. */
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

/* Operand lists of n sixteens of columns, 8 registers each: their numbers, and what they stand for. */
#define WGMMA_LIST_1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_LIST_2                                                                                                                       \
    WGMMA_LIST_1 ","                                                                                                                       \
                 "%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_LIST_3                                                                                                                       \
    WGMMA_LIST_2 ","                                                                                                                       \
                 "%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_LIST_4                                                                                                                       \
    WGMMA_LIST_3 ","                                                                                                                       \
                 "%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_LIST_5                                                                                                                       \
    WGMMA_LIST_4 ","                                                                                                                       \
                 "%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_LIST_6                                                                                                                       \
    WGMMA_LIST_5 ","                                                                                                                       \
                 "%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_LIST_7                                                                                                                       \
    WGMMA_LIST_6 ","                                                                                                                       \
                 "%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_LIST_8                                                                                                                       \
    WGMMA_LIST_7 ","                                                                                                                       \
                 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_LIST_9                                                                                                                       \
    WGMMA_LIST_8 ","                                                                                                                       \
                 "%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_LIST_10                                                                                                                      \
    WGMMA_LIST_9 ","                                                                                                                       \
                 "%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_LIST_11                                                                                                                      \
    WGMMA_LIST_10 ","                                                                                                                      \
                  "%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_LIST_12                                                                                                                      \
    WGMMA_LIST_11 ","                                                                                                                      \
                  "%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_LIST_13                                                                                                                      \
    WGMMA_LIST_12 ","                                                                                                                      \
                  "%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_LIST_14                                                                                                                      \
    WGMMA_LIST_13 ","                                                                                                                      \
                  "%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_LIST_15                                                                                                                      \
    WGMMA_LIST_14 ","                                                                                                                      \
                  "%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_LIST_16                                                                                                                      \
    WGMMA_LIST_15 ","                                                                                                                      \
                  "%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_EIGHT(i)                                                                                                                     \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]),                    \
        "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define WGMMA_SUMS_1 WGMMA_EIGHT(0)
#define WGMMA_SUMS_2 WGMMA_SUMS_1, WGMMA_EIGHT(1)
#define WGMMA_SUMS_3 WGMMA_SUMS_2, WGMMA_EIGHT(2)
#define WGMMA_SUMS_4 WGMMA_SUMS_3, WGMMA_EIGHT(3)
#define WGMMA_SUMS_5 WGMMA_SUMS_4, WGMMA_EIGHT(4)
#define WGMMA_SUMS_6 WGMMA_SUMS_5, WGMMA_EIGHT(5)
#define WGMMA_SUMS_7 WGMMA_SUMS_6, WGMMA_EIGHT(6)
#define WGMMA_SUMS_8 WGMMA_SUMS_7, WGMMA_EIGHT(7)
#define WGMMA_SUMS_9 WGMMA_SUMS_8, WGMMA_EIGHT(8)
#define WGMMA_SUMS_10 WGMMA_SUMS_9, WGMMA_EIGHT(9)
#define WGMMA_SUMS_11 WGMMA_SUMS_10, WGMMA_EIGHT(10)
#define WGMMA_SUMS_12 WGMMA_SUMS_11, WGMMA_EIGHT(11)
#define WGMMA_SUMS_13 WGMMA_SUMS_12, WGMMA_EIGHT(12)
#define WGMMA_SUMS_14 WGMMA_SUMS_13, WGMMA_EIGHT(13)
#define WGMMA_SUMS_15 WGMMA_SUMS_14, WGMMA_EIGHT(14)
#define WGMMA_SUMS_16 WGMMA_SUMS_15, WGMMA_EIGHT(15)

/* wgmma_run<OP, N>::go(d, a, b): d[64 x N] += a[64 x 16] b[16 x N], for a whole warpgroup. a and b are descriptors (wgmma.cuh) of tiles in
 * shared memory, read through the async proxy; both have k contiguous. d[N / 2]: for each 8 columns as mma_16816's c, of the 16 rows
 * from 16 (warp % 4) on: rows g, g, g + 8, g + 8, columns 2 t, 2 t + 1, 2 t, 2 t + 1. It only begins: between wgmma_begin and a wgmma_wait
 * for its group nobody touches d, or writes what it reads. */
template <typename OP, int N> struct wgmma_run;

/* `sums` sixteens of columns; a and b: the numbers of the operands after 8 registers for each. */
#define WGMMA_TYPE(op, type, n, sums, a, b)                                                                                                \
    template <> struct wgmma_run<op, n> {                                                                                                  \
        static __device__ __forceinline__ void go(float *d, uint64_t x, uint64_t y)                                                        \
        {                                                                                                                                  \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_LIST_##sums "}, %" #a ", %" #b         \
                                                                                                                ", 1, 1, 1, 0, 0;"         \
                         : WGMMA_SUMS_##sums                                                                                               \
                         : "l"(x), "l"(y));                                                                                                \
        }                                                                                                                                  \
    }
#define WGMMA(n, sums, a, b)                                                                                                               \
    WGMMA_TYPE(__nv_bfloat16, "bf16", n, sums, a, b);                                                                                      \
    WGMMA_TYPE(__half, "f16", n, sums, a, b)

WGMMA(16, 1, 8, 9);
WGMMA(32, 2, 16, 17);
WGMMA(48, 3, 24, 25);
WGMMA(64, 4, 32, 33);
WGMMA(80, 5, 40, 41);
WGMMA(96, 6, 48, 49);
WGMMA(112, 7, 56, 57);
WGMMA(128, 8, 64, 65);
WGMMA(144, 9, 72, 73);
WGMMA(160, 10, 80, 81);
WGMMA(176, 11, 88, 89);
WGMMA(192, 12, 96, 97);
WGMMA(208, 13, 104, 105);
WGMMA(224, 14, 112, 113);
WGMMA(240, 15, 120, 121);
WGMMA(256, 16, 128, 129);

#else

#include "ptx_host.h"

#endif
#endif
