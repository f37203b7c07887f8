/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters in decode's products (decode.cu): B s for the runs of rows with one adapter that a chunk holds, added to a pair's whole sum, in steps
 * of 16 ranks. What a lane holds of a step are fragments of mma m16n8k16, with weight rows as the M operand, as in the product.
 */
#ifndef EXPERTD_KERNELS_CUDA_DECODE_LORA_CUH
#define EXPERTD_KERNELS_CUDA_DECODE_LORA_CUH

#include "kernels/cuda/device.cuh"

/* The chunk that a warp works on, kept from one pair to the next. Lane n keeps what concerns row n. */
struct decode_chunk {
    int number; /* -1: none */
    int expert, begin, count;
    int row; /* of x */
    int adapter; /* -1: none */
    bool known; /* what follows is there, on the warp that ends a pair of the chunk */
    uint64_t b[2]; /* of the adapter: gate's and up's, or down's */
    int rank[2]; /* 0: not adapted */
};

/* 16 ranks of a row of B or s from k on, 4 a thread: 2 in lo, 2 in hi; a last half step of 8 has 2 a thread. */
struct decode_quad {
    uint32_t lo, hi;
};

__device__ __forceinline__ struct decode_quad load_quad(const uint8_t *row, int k, int rank, int t)
{
    struct decode_quad q = {0, 0};
    if (k + 16 <= rank) {
        uint2 v = *reinterpret_cast<const uint2 *>(row + 2 * k + 8 * t);
        q.lo = v.x;
        q.hi = v.y;
    } else if (k < rank) {
        q.lo = *reinterpret_cast<const uint32_t *>(row + 2 * k + 4 * t);
    }
    return q;
}

/* The same of row r of B. */
__device__ __forceinline__ struct decode_quad load_quad_b(const uint8_t *b, int rows, int r, int k, int rank, int t)
{
    struct decode_quad q = {0, 0};
    const uint8_t *plane = b + (size_t)k * rows * 2;
    if (k + 16 <= rank) {
        uint2 v = *reinterpret_cast<const uint2 *>(plane + r * 32 + 8 * t);
        q.lo = v.x;
        q.hi = v.y;
    } else if (k < rank) {
        q.lo = *reinterpret_cast<const uint32_t *>(plane + r * 16 + 4 * t);
    }
    return q;
}

/* One step of a fold: 16 ranks of one run of rows with one adapter. */
template <int NT> struct decode_step {
    struct decode_quad a[2]; /* rows g and g + 8 of the tile: of B, or of gate's and up's B */
    struct decode_quad s[2][NT]; /* of rows g of the chunk's eights; zeros for rows outside the run */
};

/* Which step. */
struct decode_place {
    unsigned left, run; /* rows: of the runs to come, of this one */
    const uint8_t *b0, *b1;
    int r0, r1, k;
};

template <bool DOWN> __device__ __forceinline__ struct decode_place place_begin(const struct decode_chunk &chunk)
{
    struct decode_place p = {};
    p.left = __ballot_sync(~0u, chunk.adapter >= 0 && (chunk.rank[0] > 0 || (!DOWN && chunk.rank[1] > 0)));
    return p;
}

/* On to the next 16 ranks, or to the next run; false: there is none. */
template <bool DOWN> __device__ __forceinline__ bool place_next(struct decode_place *p, const struct decode_chunk &chunk)
{
    p->k += 16;
    if (p->k < max(p->r0, p->r1))
        return true;
    if (!p->left)
        return false;
    const int lead = __ffs(p->left) - 1, adapter = __shfl_sync(~0u, chunk.adapter, lead);
    p->run = __ballot_sync(~0u, chunk.adapter == adapter);
    p->left &= ~p->run;
    p->b0 = (const uint8_t *)__shfl_sync(~0u, chunk.b[0], lead);
    p->r0 = __shfl_sync(~0u, chunk.rank[0], lead);
    p->b1 = DOWN ? p->b0 : (const uint8_t *)__shfl_sync(~0u, chunk.b[1], lead);
    p->r1 = DOWN ? p->r0 : __shfl_sync(~0u, chunk.rank[1], lead);
    p->k = 0;
    return true;
}

template <bool DOWN, int NT>
__device__ __forceinline__ void step_load(struct decode_step<NT> *step, const struct kernel_forward &f, const struct decode_chunk &chunk,
                                          int group, const struct decode_place &p)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const size_t stride = (size_t)f.lora.max_rank * 2;
    const int b_rows = DOWN ? f.dims.hidden_pad : f.dims.inter_pad, row0 = DOWN ? group * 16 + 2 * g : group * 8 + g,
              row1 = DOWN ? row0 + 1 : row0;
    const uint8_t *s0 = (const uint8_t *)(DOWN ? f.s_down : f.s_gate) + (chunk.begin + g) * stride;
    const uint8_t *s1 = (const uint8_t *)f.s_up + (chunk.begin + g) * stride;
    step->a[0] = load_quad_b(p.b0, b_rows, row0, p.k, p.r0, t);
    step->a[1] = load_quad_b(p.b1, b_rows, row1, p.k, p.r1, t);
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const bool in_run = p.run >> (j * 8 + g) & 1;
        step->s[0][j] = load_quad(s0 + j * 8 * stride, p.k, in_run ? p.r0 : 0, t);
        if (!DOWN)
            step->s[1][j] = load_quad(s1 + j * 8 * stride, p.k, in_run ? p.r1 : 0, t);
    }
}

/* B of a step that comes later, from memory into the second-level cache. */
template <bool DOWN> __device__ __forceinline__ void step_prefetch(const struct kernel_forward &f, int group, const struct decode_place &p)
{
    const int g = threadIdx.x % 32 / 4, b_rows = DOWN ? f.dims.hidden_pad : f.dims.inter_pad,
              row = DOWN ? group * 16 + 2 * g : group * 8 + g;
    const size_t plane = (size_t)p.k * b_rows * 2;
    if (p.k < p.r0)
        prefetch_l2(p.b0 + plane + row * (p.k + 16 <= p.r0 ? 32 : 16));
    if (!DOWN && p.k < p.r1)
        prefetch_l2(p.b1 + plane + row * (p.k + 16 <= p.r1 ? 32 : 16));
}

template <typename OP, bool DOWN, int NT> __device__ __forceinline__ void step_add(float (&acc)[NT][4], const struct decode_step<NT> &step)
{
#pragma unroll
    for (int j = 0; j < NT; j++) {
        if (DOWN) {
            mma_16816<OP>(acc[j], step.a[0].lo, step.a[1].lo, step.a[0].hi, step.a[1].hi, step.s[0][j].lo, step.s[0][j].hi);
        } else {
            /* 8 ranks of both in one: gate's rows and s in the lower half of k, up's in the upper. */
            mma_16816<OP>(acc[j], step.a[0].lo, 0, 0, step.a[1].lo, step.s[0][j].lo, step.s[1][j].lo);
            mma_16816<OP>(acc[j], step.a[0].hi, 0, 0, step.a[1].hi, step.s[0][j].hi, step.s[1][j].hi);
        }
    }
}

/* acc += B s for every run of adapted rows. In chunks of up to 8 rows the loads of a step are under way while the one before is computed;
 * with more there are no registers for that, and other warps fill the time. EARLY: *now is the first step already. */
template <typename OP, bool DOWN, bool EARLY, int NT>
__device__ __forceinline__ void decode_fold(float (&acc)[NT][4], const struct kernel_forward &f, const struct decode_chunk &chunk,
                                            int group, struct decode_step<NT> *now)
{
    struct decode_place p = place_begin<DOWN>(chunk);
    if (NT > 1) {
        while (place_next<DOWN>(&p, chunk)) {
            step_load<DOWN, NT>(now, f, chunk, group, p);
            step_add<OP, DOWN, NT>(acc, *now);
        }
        return;
    }
    if (!place_next<DOWN>(&p, chunk))
        return;
    if (!EARLY)
        step_load<DOWN, NT>(now, f, chunk, group, p);
    for (;;) {
        struct decode_step<NT> next;
        const bool more = place_next<DOWN>(&p, chunk);
        if (more)
            step_load<DOWN, NT>(&next, f, chunk, group, p);
        step_add<OP, DOWN, NT>(acc, *now);
        if (!more)
            return;
        *now = next;
    }
}

#endif
