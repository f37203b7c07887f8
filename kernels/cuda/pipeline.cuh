/* SPDX-License-Identifier: Apache-2.0
 *
 * Hopper's barriers in shared memory and its bulk copies, and where a ring of stages stands.
 */
#ifndef EXPERTD_KERNELS_CUDA_PIPELINE_CUH
#define EXPERTD_KERNELS_CUDA_PIPELINE_CUH

#include "kernels/cuda/device.cuh"

__device__ __forceinline__ void barrier_init(uint32_t bar, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n .reg .pred p;\n WAIT_%=:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @!p bra WAIT_%=;\n }" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
/* Arrives, and has the barrier wait for so many bytes of bulk copies more. */
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Has it wait for more bytes, without an arrival. */
__device__ __forceinline__ void barrier_expect_more(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Arrives when this thread's cp.async have. */
__device__ __forceinline__ void barrier_arrive_copies(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes),
                 "r"(bar)
                 : "memory");
}

/* Barriers of stages lie side by side. */
struct ring_cursor {
    uint32_t stage, phase;
};

template <int STAGES> __device__ __forceinline__ void ring_next(struct ring_cursor *c)
{
    if (++c->stage == STAGES) {
        c->stage = 0;
        c->phase ^= 1;
    }
}

#endif
