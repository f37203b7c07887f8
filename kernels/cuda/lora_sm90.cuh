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
#define LORA_B_BYTES (32 * 1024) /* of a stage; s follows, row by row, gate's ranks and then up's */
#define LORA_S_BYTES 32 /* a row's 16 ranks */

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
        const uint32_t dst = at + LORA_B_BYTES + chunk * 16;
        for (int r = low + threadIdx.x / CHUNKS; r < high; r += THREADS / CHUNKS)
            copy_async_16(dst + r * CHUNKS * 16, s + (size_t)(begin + r) * f.lora.max_rank * 2, true);
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

/* What a thread has of a piece's rows of B, for a group: 8 ranks. Gate and up: those of gate's row g, the first or the last 8, in threads of
 * t 0 and 1, of up's in the others; PARTS 1: 4 of them. Down: ranks 4 t .. 4 t + 3 of rows 2 g and 2 g + 1, where `odd` of 2 g + 1 and
 * 2 g. Zeros past the piece's ranks. `b` is where the thread's part of the piece begins, `row` its (lower) row of the warp's first group. */
template <bool DOWN, int M, int PARTS>
__device__ __forceinline__ void lora_load_b(uint4 (&v)[M], uint32_t b, uint32_t row, bool odd, uint32_t eights, bool valid)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
        const uint32_t at = b + (row * 16 + 4 * m * (DOWN ? 256 : 128)) * eights;
        if (DOWN) {
            const uint2 x = shared_load_8(at + (odd ? 16 : 0) * eights, valid), y = shared_load_8(at + (odd ? 0 : 16) * eights, valid);
            v[m] = make_uint4(x.x, x.y, y.x, y.y);
        } else if (PARTS == 2) {
            v[m] = shared_load_16(at, valid);
        } else {
            const uint2 x = shared_load_8(at, valid);
            v[m] = make_uint4(x.x, x.y, 0, 0);
        }
    }
}

/* A thread's part of the rows of s of two eights of columns; zeros where `mine`, a bit each, is not set. 8 bytes, or 16 of 2 PARTS. */
template <bool DOWN, int PARTS> __device__ __forceinline__ void lora_load_s(uint4 (&s)[2], uint32_t at, uint32_t mine)
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint32_t from = at + j * 8 * (DOWN ? 1 : 2) * LORA_S_BYTES, in = mine & 1u << j;
        if (PARTS == 2) {
            s[j] = shared_load_16(from, in);
        } else {
            const uint2 half = shared_load_8(from, in);
            s[j] = make_uint4(half.x, half.y, 0, 0);
        }
    }
}

/* acc += B s for eights J and J + 1 of columns, those that `touched` has bits of. Products that wait for one another are kept apart. `a`:
 * the fragments of B. */
template <typename OP, int M, int N, int PARTS, int J>
__device__ __forceinline__ void lora_pair(float (&acc)[M][N / 2], const uint32_t (&a)[M][PARTS][4], const uint4 (&s)[2], uint32_t touched)
{
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int j = 0; j < 2 && J + j < N / 8; j++) {
            if (!(touched & 1u << (J + j)))
                continue;
#pragma unroll
            for (int m = 0; m < M; m++)
                mma_16816<OP>(acc[m] + 4 * (J + j), a[m][p][0], a[m][p][1], a[m][p][2], a[m][p][3], p ? s[j].z : s[j].x,
                              p ? s[j].w : s[j].y);
        }
    }
}

/* What a thread has of the piece whose turn is next. */
template <int M> struct lora_next {
    uint4 v[M]; /* of B */
    uint4 s[2]; /* of the first pair of eights of columns that the run touches */
    uint32_t touched; /* those eights, the same for all threads */
    uint32_t mine; /* those in which the thread's row is of the run, and its ranks are of the piece */
};

/* acc += B s of one stage, for M tiles of 16 rows a warp, 64 rows apart; `local` is the warp's first group in the tile of GROUPS groups.
 *
 * Gate's ranks and up's are summed by one instruction, of 8 ranks each and zeros in gate's rows for up's ranks, in up's for gate's: a row
 * of s is one load of 16 bytes a thread. The ranks of a plane are taken in the same order whatever their number and the tile's shape. */
template <typename OP, bool DOWN, int M, int N, int GROUPS>
__device__ __forceinline__ void lora_fold(float (&acc)[M][N / 2], uint32_t at, const struct lora_stage *stage, int local)
{
    /* The sums of large wide tiles leave few registers: there, a piece's two instructions are two passes, and loads wait. */
    constexpr int PASSES = !DOWN && M == 2 && N > 96 ? 2 : 1, PARTS = DOWN || PASSES == 2 ? 1 : 2;
    constexpr bool AHEAD = M == 1 || N <= 128;
    constexpr uint32_t PIECE = GROUPS * 16 * LORA_S_BYTES, S_ROW = (DOWN ? 1 : 2) * LORA_S_BYTES;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, turns = stage->pieces * PASSES;
    const uint32_t s_at = at + LORA_B_BYTES + g * S_ROW + t * (DOWN ? 8 : 16);
    const uint32_t row = DOWN ? local * 16 + 2 * g : local * 8 + g,
                   select = DOWN || t < 2 ? 0x4410 : 0x4432; /* of gate's eights and up's */
    const bool odd = g / 2 % 2; /* the other way round: no bank is met twice */
    const uint32_t b = DOWN ? at + t * 8 : at + t / 2 * (PIECE / 2) + t % 2 * 16;
    struct lora_next<M> next;
    auto load = [&](int i) {
        const uint2 piece = reinterpret_cast<const uint2 *>(stage->piece)[min(i, turns - 1) / PASSES];
        const uint32_t eights = __byte_perm(piece.y, 0, select), pass = i % PASSES * 8;
        const bool has = i < turns && (DOWN ? (uint32_t)t < 2 * eights : t % 2 < eights);
        lora_load_b<DOWN, M, PARTS>(next.v, b + i / PASSES * PIECE + pass, row, odd, eights, has);
        const uint32_t ends = piece.x + (uint32_t)(7 - g) * 0x10001, begin = (piece.x & 0xffff) / 8, low = (ends & 0xffff) / 8;
        next.touched = bits_from(begin, ((piece.x >> 16) + 7) / 8 - begin);
        next.mine = has ? bits_from(low, (ends >> 19) - low) : 0;
        lora_load_s<DOWN, PARTS>(next.s, s_at + pass + begin / 2 * 16 * S_ROW, next.mine >> begin / 2 * 2);
    };
    if (AHEAD)
        load(0);
#pragma unroll 1
    for (int i = 0; i < turns; i++) {
        if (!AHEAD)
            load(i);
        uint32_t a[M][PARTS][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint32_t part[4] = {next.v[m].x, next.v[m].y, next.v[m].z, next.v[m].w};
#pragma unroll
            for (int k = 0; k < 2 * PARTS; k++) {
                const bool up = t >= 2;
                a[m][k / 2][k % 2 * 2] = DOWN ? (odd ? part[k + 2] : part[k]) : up ? 0 : part[k];
                a[m][k / 2][k % 2 * 2 + 1] = DOWN ? (odd ? part[k] : part[k + 2]) : up ? part[k] : 0;
            }
        }
        uint4 s[2] = {next.s[0], next.s[1]};
        /* Equal in all lanes: said by a reduction, it is what the compiler believes, and branches and products on it need nothing to bring
         * lanes together. */
        const uint32_t touched = __reduce_max_sync(~0u, next.touched), mine = next.mine, from = s_at + i % PASSES * 8;
        if (AHEAD) /* under way beside the products with this piece; past the last, nothing is read */
            load(i + 1);
        /* From the first pair of eights to the last. A look at each pair would take longer than most runs' products. */
        switch ((__ffs(touched) - 1) / 2) {
#define LORA_PAIR(k)                                                                                                                       \
    case k:                                                                                                                                \
        if (2 * k < N / 8)                                                                                                                 \
            lora_pair<OP, M, N, PARTS, 2 * k>(acc, a, s, touched);                                                                         \
        if (2 * k + 2 >= N / 8 || touched >> (2 * k + 2) % 32 == 0)                                                                        \
            break;                                                                                                                         \
        lora_load_s<DOWN, PARTS>(s, from + (2 * k + 2) * 8 * S_ROW, mine >> (2 * k + 2) % 32)
            LORA_PAIR(0);
            LORA_PAIR(1);
            LORA_PAIR(2);
            LORA_PAIR(3);
            LORA_PAIR(4);
            LORA_PAIR(5);
            LORA_PAIR(6);
            LORA_PAIR(7);
            LORA_PAIR(8);
            LORA_PAIR(9);
            LORA_PAIR(10);
            LORA_PAIR(11);
            LORA_PAIR(12);
            LORA_PAIR(13);
            LORA_PAIR(14);
            LORA_PAIR(15);
#undef LORA_PAIR
        }
    }
}

#endif
