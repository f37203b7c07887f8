/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a ring of stages stands, which Hopper's barriers in shared memory and bulk copies (ptx.cuh) fill and empty.
 */
#ifndef EXPERTD_KERNELS_CUDA_PIPELINE_CUH
#define EXPERTD_KERNELS_CUDA_PIPELINE_CUH

#include "kernels/cuda/device.cuh"

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
