/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters in Hopper's prefill products. After the last block of k a tile's sums get B s from extra stages of the same ring, each with
 * one plane of 16 ranks of a few runs (rows of the tile with one adapter): the plane's rows of B as they lie in memory, by bulk
 * copies, and the runs' rows of s. What a warp holds of a wgmma tile are fragments of mma m16n8k16, so it adds a run to the
 * eights of columns that the run touches and to no others: nearly no zeros are multiplied.
 *
 * Planes are the outer loop and runs the inner one, so a row's sum is its product with W, then its planes in order, wherever the
 * stages are cut and whatever else is in the tile. In an eight that two runs share, s is zero for the rows of the other run, and exact
 * zeros change no bit of a finite sum.
 */
#ifndef EXPERTD_KERNELS_CUDA_LORA_SM90_CUH
#define EXPERTD_KERNELS_CUDA_LORA_SM90_CUH

#include "kernels/cuda/pipeline.cuh"

#define LORA_PIECES 8 /* most runs a stage */
#define LORA_B_BYTES (32 * 1024) /* of a stage; s follows, gate's, then up's */
#define LORA_S_BYTES 32 /* a row's 16 ranks */
#define LORA_S_ROWS 256 /* of a tile */

/* Rows [begin, end) of a tile with one adapter. Rank 0: that projection is not adapted. Gate and up, or down and none. */
struct lora_run {
    const uint8_t *b[2];
    uint16_t begin, end;
    uint16_t rank[2];
};

/* One run's plane in a stage, and how many eights of ranks each projection has of it: 0, 1 or 2. */
struct __align__(8) lora_piece
{
    uint16_t begin, end;
    uint16_t eights[2];
};

struct lora_stage {
    struct lora_piece piece[LORA_PIECES];
    int pieces;
    int last; /* of its tile */
};

/* Where the stages of a tile stand; every thread of the producers has the same. */
struct lora_cursor {
    int runs, most; /* of the tile; their largest rank */
    int plane, run;
};

/* ---- producers ----------------------------------------------------------------------------------------- */

/* A warp's 32 segments of an expert, from its first on. */
struct lora_segments {
    int begin[32], end[32], adapter[32];
};

/* Reads them ahead of lora_list; by one warp. `segments`: how many there are of all experts. */
__device__ __forceinline__ void lora_look(const struct kernel_forward &f, int segment, int segments, struct lora_segments *to)
{
    const int lane = threadIdx.x % 32, i = min(segment + lane, segments - 1);
    const int begin = __ldcg(f.routing.segment_begin + i), end = __ldcg(f.routing.segment_begin + i + 1),
              adapter = __ldcg(f.routing.segment_adapter + i);
    to->begin[lane] = begin;
    to->end[lane] = end;
    to->adapter[lane] = adapter;
}

/* Lists the adapted runs of positions [begin, begin + count) of an expert, whose first segment is `segment`, which lora_look has read with
 * those after it; by the same warp. Returns their number, at most `count`; *most is their largest rank. */
template <bool DOWN>
__device__ __forceinline__ int lora_list(const struct kernel_forward &f, int segment, int segments, struct lora_segments *look, int expert,
                                         int begin, int count, struct lora_run *run, int *most)
{
    const int lane = threadIdx.x % 32;
    int runs = 0, largest = 0;
    for (;;) {
        /* 32 segments at a time, up to the first that begins past the tile. */
        const int from = look->begin[lane], to = look->end[lane], adapter = look->adapter[lane];
        const bool mine = segment + lane < segments && from < begin + count;
        struct kernel_lora_entry e0 = {}, e1 = {};
        if (mine && to > begin && adapter >= 0) {
            e0 = *lora_entry(f, adapter, expert, DOWN ? KERNEL_DOWN : KERNEL_GATE);
            if (!DOWN)
                e1 = *lora_entry(f, adapter, expert, KERNEL_UP);
        }
        const bool adapted = e0.a != 0 || e1.a != 0;
        const unsigned listed = __ballot_sync(~0u, adapted);
        if (adapted) {
            struct lora_run r = {{(const uint8_t *)e0.b, (const uint8_t *)e1.b},
                                 (uint16_t)max(0, from - begin),
                                 (uint16_t)min(count, to - begin),
                                 {(uint16_t)(e0.a ? e0.rank : 0), (uint16_t)(e1.a ? e1.rank : 0)}};
            run[runs + __popc(listed & ((1u << lane) - 1))] = r;
            largest = max(largest, max(r.rank[0], r.rank[1]));
        }
        runs += __popc(listed);
        if (!__all_sync(~0u, mine))
            break;
        segment += 32;
        lora_look(f, segment, segments, look);
    }
    *most = __reduce_max_sync(~0u, largest);
    return runs;
}

/* Fills the next stage of a tile of `groups` groups from `group` on, whose rows begin at position `begin`; by all producers. `most`: so
 * many pieces fit. False: it was the tile's last. */
template <bool DOWN, int THREADS>
__device__ __forceinline__ bool lora_fill(const struct kernel_forward &f, const struct lora_run *run, struct lora_cursor *c, int begin,
                                          int group, int groups, int pieces, uint32_t at, uint32_t full, struct lora_stage *stage)
{
    const int lane = threadIdx.x % 32, limit = c->plane * CUDA_PLANE_RANKS;
    const uint32_t piece_bytes = LORA_B_BYTES / pieces;
    int taken = 0, low = 0, high = 0, next = c->runs;
    for (int first = c->run; first < c->runs && taken < pieces; first += 32) {
        const int i = min(first + lane, c->runs - 1);
        const int r0 = run[i].rank[0] - limit, r1 = DOWN ? 0 : run[i].rank[1] - limit;
        const bool here = first + lane < c->runs && max(r0, r1) > 0;
        const int n = taken + __popc(__ballot_sync(~0u, here) & ((1u << lane) - 1));
        const bool mine = here && n < pieces;
        const unsigned all = __ballot_sync(~0u, mine);
        if (mine && threadIdx.x < 32) {
            /* The rows of B that the tile's groups stand for, of each projection: one run of memory. */
            const int rows = DOWN ? f.dims.hidden_pad : f.dims.inter_pad, each = DOWN ? 16 : 8;
            const uint32_t e0 = min(max(r0, 0) / 8, 2), e1 = min(max(r1, 0) / 8, 2);
            const uint32_t bytes0 = groups * each * 16 * e0, bytes1 = groups * each * 16 * e1, dst = at + n * piece_bytes;
            stage->piece[n] = {run[i].begin, run[i].end, {(uint16_t)e0, (uint16_t)e1}};
            barrier_expect_more(full, bytes0 + bytes1);
            if (e0)
                bulk_copy(dst, run[i].b[0] + (size_t)limit * rows * 2 + (size_t)group * each * 16 * e0, bytes0, full);
            if (e1)
                bulk_copy(dst + piece_bytes / 2, run[i].b[1] + (size_t)limit * rows * 2 + (size_t)group * each * 16 * e1, bytes1, full);
        }
        if (all) {
            if (taken == 0)
                low = run[first + __ffs(all) - 1].begin;
            const int final = first + 31 - __clz(all);
            high = run[final].end;
            taken += __popc(all);
            if (taken == pieces)
                next = final + 1;
        }
    }
    /* The rows between the first run and the last; what a run has not is not read. */
    constexpr int CHUNKS = DOWN ? 2 : 4;
    const int chunk = threadIdx.x % CHUNKS, column = limit + chunk % 2 * 8;
    if (column < f.lora.max_rank) {
        const uint8_t *s = (const uint8_t *)(DOWN ? f.s_down : chunk < 2 ? f.s_gate : f.s_up) + (size_t)column * 2;
        const uint32_t dst = at + LORA_B_BYTES + chunk / 2 * (LORA_S_ROWS * LORA_S_BYTES) + chunk % 2 * 16;
        for (int r = low + threadIdx.x / CHUNKS; r < high; r += THREADS / CHUNKS)
            copy_async_16(dst + r * LORA_S_BYTES, s + (size_t)(begin + r) * f.lora.max_rank * 2, true);
    }
    c->run = next;
    if (next == c->runs) {
        c->run = 0;
        c->plane++;
    }
    const bool more = c->plane * CUDA_PLANE_RANKS < c->most;
    if (threadIdx.x < 32) {
        if (lane == 0) {
            stage->pieces = taken;
            stage->last = !more;
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(full);
    }
    return more;
}

/* ---- consumers ----------------------------------------------------------------------------------------- */

/* acc += B s of one stage, for M tiles of 16 rows a warp, 64 rows apart; `local` is the warp's first group in the tile of GROUPS groups. A
 * thread has ranks 4 t .. 4 t + 3 of the plane. */
template <typename OP, bool DOWN, int M, int N, int GROUPS>
__device__ __forceinline__ void lora_fold(float (&acc)[M][N / 2], uint32_t at, const struct lora_stage *stage, int local)
{
    constexpr int PIECE = GROUPS * 16 * LORA_S_BYTES;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint2 mine = make_uint2(0, 0); /* lane i: piece i */
    if (lane < stage->pieces)
        mine = *reinterpret_cast<const uint2 *>(&stage->piece[lane]);
    const int first = mine.x & 0xffff, last = mine.x >> 16;
    const uint32_t s_at = at + LORA_B_BYTES + g * LORA_S_BYTES + t * 8;
#pragma unroll
    for (int j0 = 0; j0 < N / 8; j0 += 4) {
        /* Four eights at a time: their loads, then their products. */
        unsigned todo = __ballot_sync(~0u, first < 8 * j0 + 32 && last > 8 * j0);
        while (todo) {
            const int i = __ffs(todo) - 1;
            const uint32_t range = __shfl_sync(~0u, mine.x, i), eights = __shfl_sync(~0u, mine.y, i);
            const int begin = range & 0xffff, end = range >> 16;
            const uint32_t length = end - begin, row = g - begin; /* the eight's row g, and so on, against the run: unsigned */
            const uint32_t e0 = eights & 0xffff, e1 = eights >> 16, b = at + i * PIECE + t * 8;
            const bool has0 = t < 2 * e0, has1 = t < 2 * e1;
            uint2 a[M][2], s[4][2];
            todo &= todo - 1;
#pragma unroll
            for (int m = 0; m < M; m++) {
                const uint32_t group = local + 4 * m;
                if (DOWN) {
                    /* Rows 2 g and 2 g + 1, half of the threads the other way round: no bank is met twice. */
                    const uint32_t odd = g / 2 % 2;
                    const uint2 u = shared_load_8(b + (group * 16 + 2 * g + odd) * 16 * e0, has0);
                    const uint2 v = shared_load_8(b + (group * 16 + 2 * g + 1 - odd) * 16 * e0, has0);
                    a[m][0] = odd ? v : u;
                    a[m][1] = odd ? u : v;
                } else {
                    a[m][0] = shared_load_8(b + (group * 8 + g) * 16 * e0, has0);
                    a[m][1] = shared_load_8(b + PIECE / 2 + (group * 8 + g) * 16 * e1, has1);
                }
            }
#pragma unroll
            for (int j = 0; j < 4 && j0 + j < N / 8; j++) {
                const bool in = row + 8 * (j0 + j) < length;
                s[j][0] = shared_load_8(s_at + 8 * (j0 + j) * LORA_S_BYTES, in && has0);
                if (!DOWN)
                    s[j][1] = shared_load_8(s_at + (LORA_S_ROWS + 8 * (j0 + j)) * LORA_S_BYTES, in && has1);
            }
            /* Gate has the tile's rows g, up rows g + 8. Products that wait for one another are kept apart. */
#pragma unroll
            for (int p = 0; p < (DOWN ? 1 : 2); p++) {
#pragma unroll
                for (int j = 0; j < 4 && j0 + j < N / 8; j++) {
                    if (8 * (j0 + j) >= end || 8 * (j0 + j) + 8 <= begin)
                        continue;
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        float *c = acc[m] + 4 * (j0 + j);
                        if (DOWN)
                            mma_16816<OP>(c, a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, s[j][0].x, s[j][0].y);
                        else if (p == 0)
                            mma_16816<OP>(c, a[m][0].x, 0, a[m][0].y, 0, s[j][0].x, s[j][0].y);
                        else
                            mma_16816<OP>(c, 0, a[m][1].x, 0, a[m][1].y, s[j][1].x, s[j][1].y);
                    }
                }
            }
        }
    }
}

#endif
