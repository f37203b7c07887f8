/* SPDX-License-Identifier: Apache-2.0
 *
 * s = op(scale * A v) for many positions, for Hopper.
 *
 * A unit is up to SHRINK_POSITIONS positions of one segment and up to SHRINK_RANKS ranks, gate's and up's counted as one row of
 * ranks. Its k goes through a ring in shared memory in stages of STAGE_BLOCKS blocks of 64 columns, which run on from unit to unit; the
 * ring is cut into as many stages as the block's first units allow. Blocks deal the units out in turn, in order of experts; there may be
 * any number of blocks.
 *
 * In a block one warp lists the units ahead of all others (segments, adapters' entries), two look up their rows of x, one streams A by
 * bulk copies, four gather the rows by cp.async, and CHAINS multiply. Nothing but the gathering depends on the launch before
 * shrink_down, and so the rest begins without waiting for it.
 *
 * Each multiplying warp takes every CHAINS-th stage, alone and whole, so that none waits for another, and multiplies by mma: a tile of A
 * is as small as 16 ranks by 8 positions. An output is the sum, always in this order, of the warps' sums of up to CHAIN_STAGES of their
 * stages, whatever the unit's shape. In one chain of 20000 columns the tensor cores' truncation shows in fp16. Ranks and
 * positions of a tile past the unit's are whatever shared memory holds, and are never stored: no output depends on another's.
 *
 * Times of an H200, E 64, K 8, H 2048, I 1024, in us, of shrink_gate_up + shrink_down (expert-bench kernel --steps). 8 adapters of
 * rank 16: T = 32 9 + 4, 128 19 + 7, 512 23 + 9, 2048 36 + 7 to 28, 8192 79. 32 of rank 64: T = 128 103 + 26, 512 220 + 56, 2048 273 + 38.
 * With 44 blocks of 8 x 16, what one of them draws: T = 32 14, 128 27, 512 35 for gate and up, 49 to 55 bytes a ns each at T >= 128. Before, by
 * wgmma of 64 ranks, all consumers at each stage: 15 + 4, 22 + 8, 27 + 13, 52 + 20, 124; 108 + 26, 228 + 57, 276 + 71. What did not pay:
 * eight warps that multiply; gate and up apart for short segments.
 */
#include "kernels/cuda/pipeline.cuh"

#define CHAINS 4 /* warps that multiply */
#define CHAIN_STAGES 3 /* whose sums the tensor cores add up, before they are added to the others */
#define GATHER_WARPS 4
#define WARP_LIST (CHAINS + GATHER_WARPS)
#define WARP_A (WARP_LIST + 1)
#define WARP_ROWS (WARP_LIST + 2) /* and the next */
#define ROWS_WARPS 2
#define SHRINK_THREADS (32 * (WARP_ROWS + ROWS_WARPS))
#define REGISTERS_MULTIPLY 232 /* of 504 for a thread of each warpgroup */
#define REGISTERS_OTHERS 136

#define RING_BYTES (208 * 1024)
#define STAGE_BLOCKS 2
#define STAGE_ROW (STAGE_BLOCKS * 128) /* bytes of a rank or a position in a stage */
#define LEAST_SHIFT 3 /* logarithms of how many stages the ring is cut into */
#define MOST_SHIFT 5
#define MOST_STAGES (1 << MOST_SHIFT)
#define SHRINK_RANKS 64
#define SHRINK_POSITIONS 64
#define SHRINK_TILES 16 /* of 16 ranks by 8 positions, whose sums a warp has room for */
#define UNITS_AHEAD 8
#define LIST_EACH 4

struct shrink_unit {
    const uint8_t *a[2]; /* gate's (down's) and up's first row in block 0 */
    uint32_t pitch[2]; /* bytes from block to block */
    int rows[2]; /* ranks of either */
    int begin, count; /* positions; no unit comes after one with count 0 */
    int columns; /* the positions' room in a stage */
    int rank0; /* of the first projection, for the first row: the second's begins here */
    int split; /* row at which the second projection begins */
    int rank1; /* its rank there */
    int shift; /* the ring's, for all units of the block alike */
    float scale[2];
    bool same; /* up's s is gate's */
    uint32_t row[SHRINK_POSITIONS]; /* where x's begin, in units of 16 bytes */
};

/* The tail of shared memory, after the ring. */
struct shrink_shared {
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], empty_a[MOST_STAGES / CHAINS]; /* the last: of CHAINS stages in a row */
    uint64_t unit_full[UNITS_AHEAD], unit_empty[UNITS_AHEAD], rows_full[UNITS_AHEAD];
    uint64_t turn[CHAINS]; /* that warp may add to `sum` */
    struct shrink_unit unit[UNITS_AHEAD];
    float4 sum[SHRINK_TILES][32]; /* of the chains before, as fragments */
};

#define SHRINK_SHARED (RING_BYTES + sizeof(struct shrink_shared))

/* ---- the list of units --------------------------------------------------------------------------------- */

struct shrink_segment {
    int begin, end, expert, adapter;
};

struct shrink_entry {
    uint64_t a;
    float scale;
    int rank;
};

__device__ __forceinline__ struct shrink_entry entry_at(const struct kernel_forward &f, const struct shrink_segment &s, bool real,
                                                        int projection)
{
    struct shrink_entry e = {};
    if (real) {
        const uint2 *at = reinterpret_cast<const uint2 *>(lora_entry(f, s.adapter, s.expert, projection));
        const uint2 a = __ldcg(at), rest = __ldcg(at + 2);
        e.a = (uint64_t)a.y << 32 | a.x;
        e.scale = __uint_as_float(rest.x);
        e.rank = e.a ? (int)rest.y : 0;
    }
    return e;
}

/* Segments, LIST_EACH a lane in order, before anybody waits for them. Past the last segment: something. */
struct shrink_segments {
    int begin[LIST_EACH + 1], expert[LIST_EACH], adapter[LIST_EACH];
};

__device__ __forceinline__ void segments_load(const struct kernel_forward &f, struct shrink_segments *s, int first)
{
    first += (int)threadIdx.x % 32 * LIST_EACH;
#pragma unroll
    for (int j = 0; j <= LIST_EACH; j++) {
        const int i = min(first + j, f.batch.slots - 1);
        s->begin[j] = __ldcg(f.routing.segment_begin + min(first + j, f.batch.slots));
        if (j < LIST_EACH) {
            s->expert[j] = __ldcg(f.routing.segment_expert + i);
            s->adapter[j] = __ldcg(f.routing.segment_adapter + i);
        }
    }
}

/* How the launch's work is cut into what is dealt out; all blocks come to the same. */
struct shrink_cut {
    int parts; /* units a chunk's projections are dealt as, 1 or 2 */
    int most, shift; /* positions of a chunk, 1 << shift */
};

template <bool DOWN> __device__ __forceinline__ struct shrink_cut shrink_cut_of(int segments, int valid)
{
    const int grid = gridDim.x;
    struct shrink_cut c = {1, 0, valid < SHRINK_POSITIONS * grid ? 5 : 6};
    /* Small stages, and many, where segments are short. */
    while (c.shift > 3 && (int64_t)segments << c.shift >= 4 * (int64_t)valid)
        c.shift--;
    c.most = 1 << c.shift;
    if (!DOWN && 2 * segments <= grid)
        c.parts = 2;
    return c;
}

/* Positions that a warp's tiles cover, for so many. */
__device__ __forceinline__ int shrink_columns(int count)
{
    return count <= 8 ? 8 : count <= 16 ? 16 : count <= 32 ? 32 : count <= 48 ? 48 : 64;
}

/* Some ranks of one chunk of a segment: [q0, q1) of both projections' row of ranks. */
__device__ __forceinline__ void shrink_unit_set(struct shrink_unit *u, const struct shrink_entry &e0, const struct shrink_entry &e1,
                                                int begin, int count, int q0, int q1, int shift)
{
    const int n0 = max(0, min(q1, e0.rank) - q0), n1 = q1 - q0 - n0, first1 = max(q0, e0.rank) - e0.rank;
    u->a[0] = (const uint8_t *)e0.a + (size_t)q0 * 128;
    u->a[1] = (const uint8_t *)e1.a + (size_t)first1 * 128;
    u->pitch[0] = e0.rank * 128;
    u->pitch[1] = e1.rank * 128;
    u->rows[0] = n0;
    u->rows[1] = n1;
    u->begin = begin;
    u->count = count;
    u->columns = shrink_columns(count);
    u->rank0 = q0;
    u->split = n0;
    u->rank1 = first1;
    u->shift = shift;
    u->scale[0] = e0.scale;
    u->scale[1] = e1.scale;
    u->same = e0.a == e1.a;
}

/* Every chunk of up to `most` positions of an adapted segment is dealt to a block in turn, in order of experts (gate's and up's share to
 * one each where there are fewer segments than half the blocks); the block does its ranks tile after tile. What is cut how changes
 * no bit. */
template <bool DOWN> __device__ __forceinline__ void shrink_list(const struct kernel_forward &f, struct shrink_shared *s)
{
    const int lane = threadIdx.x % 32, grid = gridDim.x;
    struct shrink_segments next;
    segments_load(f, &next, 0);
    const int segments = __ldcg(f.routing.segment_count), valid = __ldcg(f.routing.expert_offset + f.dims.experts);
    const struct shrink_cut c = shrink_cut_of<DOWN>(segments, valid);
    struct ring_cursor at = {0, 1};
    int before = 0, want = blockIdx.x, shift = -1;
    for (int i = 0; i < segments; i += 32 * LIST_EACH) {
        const struct shrink_segments now = next;
        int units[LIST_EACH], sum = 0;
#pragma unroll
        for (int j = 0; j < LIST_EACH; j++) {
            const bool real = i + lane * LIST_EACH + j < segments && now.adapter[j] >= 0;
            units[j] = real ? ((now.begin[j + 1] - now.begin[j] + c.most - 1) >> c.shift) * c.parts : 0;
            sum += units[j];
        }
        const int inclusive = warp_sum_inclusive(sum, lane);
        const int total = __shfl_sync(~0u, inclusive, 31), first = before + inclusive - sum;
        bool loaded = false; /* the next segments: while the first entries come */
        while (want < before + total) {
            /* Up to 32 of this block's units, one a lane, so that their entries are fetched together. */
            struct shrink_segment mine = {};
            int local = 0, found = 0;
            for (; found < 32 && want < before + total; found++, want += grid) {
                const int owner = __ffs(__ballot_sync(~0u, want < first + sum)) - 1;
                struct shrink_segment it = {};
                int left = want - first, number = 0;
#pragma unroll
                for (int j = 0; j < LIST_EACH; j++) {
                    if (left >= 0 && left < units[j]) {
                        it.begin = now.begin[j];
                        it.end = now.begin[j + 1];
                        it.expert = now.expert[j];
                        it.adapter = now.adapter[j];
                        number = left;
                    }
                    left -= units[j];
                }
                it.begin = __shfl_sync(~0u, it.begin, owner);
                it.end = __shfl_sync(~0u, it.end, owner);
                it.expert = __shfl_sync(~0u, it.expert, owner);
                it.adapter = __shfl_sync(~0u, it.adapter, owner);
                number = __shfl_sync(~0u, number, owner);
                if (lane == found) {
                    mine = it;
                    local = number;
                }
            }
            const bool real = lane < found;
            const struct shrink_entry e0 = entry_at(f, mine, real, DOWN ? KERNEL_DOWN : KERNEL_GATE);
            struct shrink_entry e1 = {};
            if (!DOWN)
                e1 = entry_at(f, mine, real, KERNEL_UP);
            if (!loaded && i + 32 * LIST_EACH < segments)
                segments_load(f, &next, i + 32 * LIST_EACH);
            loaded = true;
            const int rank1 = e0.a == e1.a ? 0 : e1.rank, part = local & (c.parts - 1);
            const int base = part ? e0.rank : 0, limit = part || c.parts == 1 ? e0.rank + rank1 : e0.rank;
            const int begin = mine.begin + ((local >> (c.parts - 1)) << c.shift), count = min(c.most, mine.end - begin);
            const int fit = count <= 32 ? SHRINK_RANKS : SHRINK_RANKS / 2; /* ranks whose sums fit into registers */
            if (shift < 0) {
                /* The first units' ranks decide into how many stages the ring is cut. Later ones with more are done in parts. */
                const int largest = __reduce_max_sync(~0u, real ? max(16, min(limit - base, fit)) : 16);
                shift = LEAST_SHIFT;
                while (shift < MOST_SHIFT && (largest + c.most) * STAGE_ROW <= RING_BYTES >> (shift + 1))
                    shift++;
            }
            const int step = min(fit, (RING_BYTES >> shift) / STAGE_ROW - shrink_columns(count)) / 8 * 8;
            for (int n = 0; n < found; n++) {
                const int end = __shfl_sync(~0u, limit, n), each = __shfl_sync(~0u, step, n);
                for (int q = __shfl_sync(~0u, base, n); q < end; q += each, ring_next<UNITS_AHEAD>(&at)) {
                    /* All lanes are past the wait before one hands the unit over: a lane that came late could sleep through two phases. */
                    barrier_wait(smem_address(&s->unit_empty[at.stage]), at.phase);
                    __syncwarp();
                    if (lane == n) {
                        shrink_unit_set(&s->unit[at.stage], e0, e1, begin, count, q, min(end, q + each), shift);
                        barrier_arrive(smem_address(&s->unit_full[at.stage]));
                    }
                    __syncwarp();
                }
            }
        }
        before += total;
        if (!loaded && i + 32 * LIST_EACH < segments)
            segments_load(f, &next, i + 32 * LIST_EACH);
    }
    /* One end for each of the warps that look up rows. */
    for (int i = 0; i < ROWS_WARPS; i++) {
        barrier_wait(smem_address(&s->unit_empty[at.stage]), at.phase);
        __syncwarp();
        if (lane == 0) {
            s->unit[at.stage].count = 0;
            barrier_arrive(smem_address(&s->unit_full[at.stage]));
        }
        __syncwarp();
        ring_next<UNITS_AHEAD>(&at);
    }
}

/* Which rows of x a unit's positions stand for; by warp `which` of those that do this in turn. */
__device__ __forceinline__ void shrink_rows(const struct kernel_forward &f, struct shrink_shared *s, int which)
{
    const int lane = threadIdx.x % 32;
    struct ring_cursor at = {(uint32_t)which, 0};
    for (;;) {
        barrier_wait(smem_address(&s->unit_full[at.stage]), at.phase);
        struct shrink_unit *u = &s->unit[at.stage];
        const int count = u->count, begin = u->begin;
        if (count == 0)
            return;
        int slot[SHRINK_POSITIONS / 32], row[SHRINK_POSITIONS / 32];
#pragma unroll
        for (int i = 0; i < SHRINK_POSITIONS / 32; i++)
            slot[i] = i * 32 + lane < count ? __ldcg(f.routing.order + begin + i * 32 + lane) : -1;
#pragma unroll
        for (int i = 0; i < SHRINK_POSITIONS / 32; i++)
            row[i] = slot[i] >= 0 ? __ldcg(f.batch.slot_row + slot[i]) : 0;
#pragma unroll
        for (int i = 0; i < SHRINK_POSITIONS / 32; i++)
            if (i * 32 + lane < count)
                u->row[i * 32 + lane] = (uint32_t)row[i] * (uint32_t)(f.dims.hidden_pad / 8);
        barrier_arrive(smem_address(&s->rows_full[at.stage]));
        for (int i = 0; i < ROWS_WARPS; i++)
            ring_next<UNITS_AHEAD>(&at);
    }
}

/* ---- streams ------------------------------------------------------------------------------------------- */

/* A stage, STAGE_BLOCKS blocks of k: the first projection's blocks, each its ranks' rows of 128 bytes, then the second's, then the
 * positions' blocks, each `columns` rows. All rows are swizzled. Stages are counted through all units. */
struct shrink_ring {
    uint32_t base, bytes, mask, shift;
    uint32_t positions; /* where a stage's begin */
};

__device__ __forceinline__ struct shrink_ring shrink_ring_of(const struct shrink_unit *u, uint32_t base)
{
    const uint32_t shift = u->shift;
    struct shrink_ring r = {base, (uint32_t)RING_BYTES >> shift, (1u << shift) - 1, shift, (uint32_t)(u->rows[0] + u->rows[1]) * STAGE_ROW};
    return r;
}

/* A unit's stages; with some of no block, so that a slot of the ring is always the same warps', who then need look at no other. */
__device__ __forceinline__ int shrink_stages(int blocks) { return (blocks + STAGE_BLOCKS * CHAINS - 1) / (STAGE_BLOCKS * CHAINS) * CHAINS; }

__device__ __forceinline__ int shrink_stage_blocks(int blocks, int stage)
{
    return max(0, min(STAGE_BLOCKS, blocks - stage * STAGE_BLOCKS));
}

/* A's part of all stages, of CHAINS at a time. For a whole warp, of which a lane copies a projection's block, or all of a stage's where these
 * lie side by side. All lanes wait for the same barrier: racecheck has the first one that copies begin the others' copies, too. */
__device__ __forceinline__ void shrink_stream_a(struct shrink_shared *s, uint32_t base, int blocks)
{
    static_assert(2 * STAGE_BLOCKS * CHAINS <= 32 && (1 << LEAST_SHIFT) % CHAINS == 0,
                  "a lane a copy; no CHAINS stages go round the ring's end");
    const int lane = threadIdx.x % 32, ahead = lane / (2 * STAGE_BLOCKS), second = lane / STAGE_BLOCKS & 1, b = lane % STAGE_BLOCKS,
              stages = shrink_stages(blocks);
    struct ring_cursor unit = {0, 0};
    uint32_t number = 0;
    for (;; ring_next<UNITS_AHEAD>(&unit)) {
        barrier_wait(smem_address(&s->unit_full[unit.stage]), unit.phase);
        const struct shrink_unit *u = &s->unit[unit.stage];
        if (u->count == 0)
            return;
        const struct shrink_ring ring = shrink_ring_of(u, base);
        const uint32_t rows = u->rows[second], pitch = u->pitch[second], all = u->rows[0] + u->rows[1];
        const bool whole = pitch == rows * 128, mine = ahead < CHAINS && rows > 0 && (b == 0 || !whole);
        const uint8_t *from = u->a[second] + (size_t)(ahead * STAGE_BLOCKS + b) * pitch;
        const uint32_t to = ring.base + (second ? u->rows[0] * STAGE_ROW : 0) + b * rows * 128;
#pragma unroll 1
        for (int j = 0; j < stages; j += CHAINS, number += CHAINS, from += (size_t)(CHAINS * STAGE_BLOCKS) * pitch) {
            const int n = shrink_stage_blocks(blocks, j + ahead);
            const uint32_t slot = (number + ahead) & ring.mask, full = smem_address(&s->full[slot]);
            /* All lanes are past the wait before one arrives: a lane that came late could sleep through two phases. */
            barrier_wait(smem_address(&s->empty_a[(number & ring.mask) / CHAINS]), (number >> ring.shift & 1) ^ 1);
            __syncwarp();
            /* Where another unit's rows of x lay, by the generic proxy. */
            fence_async_proxy();
            if (ahead < CHAINS && second + b == 0)
                barrier_expect(full, all * 128 * n);
            __syncwarp();
            if (mine && b < n)
                bulk_copy(to + slot * ring.bytes, from, rows * 128 * (whole ? n : 1), full);
        }
        barrier_arrive(smem_address(&s->unit_empty[unit.stage]));
    }
}

/* The positions' part. For a warp of GATHER_WARPS, which has every GATHER_WARPS-th of a unit's stages; half a warp copies a position's
 * blocks. */
template <bool DOWN>
__device__ __forceinline__ void shrink_stream_v(const struct kernel_forward &f, struct shrink_shared *s, uint32_t base, int blocks,
                                                int warp)
{
    static_assert(STAGE_BLOCKS == 2 && GATHER_WARPS == CHAINS, "16 threads copy a position's; a slot is always the same warp's");
    const int lane = threadIdx.x % 32, half = lane / 16, b = lane / 8 % 2, chunk = lane % 8, stages = shrink_stages(blocks);
    const size_t ld = (size_t)(DOWN ? f.dims.inter_pad : f.dims.hidden_pad) * 2;
    const uint8_t *v = (const uint8_t *)(DOWN ? f.h : f.x) + b * 128 + chunk * 16;
    uint32_t swizzled[4]; /* where the thread's 16 bytes of positions half, 2 + half, ... of an eight lie in it */
#pragma unroll
    for (int i = 0; i < 4; i++)
        swizzled[i] = (2 * i + half) * 128 + (chunk ^ (2 * i + half)) * 16;
    struct ring_cursor unit = {0, 0};
    for (uint32_t number = 0;; ring_next<UNITS_AHEAD>(&unit), number += stages) {
        barrier_wait(smem_address(&s->unit_full[unit.stage]), unit.phase);
        const struct shrink_unit *u = &s->unit[unit.stage];
        const int count = u->count, begin = u->begin;
        if (count == 0)
            break;
        if (!DOWN)
            barrier_wait(smem_address(&s->rows_full[unit.stage]), unit.phase);
        const struct shrink_ring ring = shrink_ring_of(u, base);
        const uint32_t to = ring.base + ring.positions + b * u->columns * 128;
#pragma unroll 1
        for (int j = warp; j < stages; j += GATHER_WARPS) {
            const uint32_t slot = (number + j) & ring.mask;
            const uint8_t *from = keep_in_register(v + (size_t)j * STAGE_ROW);
            const int limit = b < shrink_stage_blocks(blocks, j) ? count - half : 0;
            uint32_t at = to + slot * ring.bytes;
            barrier_wait(smem_address(&s->empty[slot]), ((number + j) >> ring.shift & 1) ^ 1);
            int r = 0;
#pragma unroll 1
            for (; r + 6 < limit; r += 8, at += 1024) {
                const uint8_t *row[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    row[i] = from + (DOWN ? (size_t)(begin + r + half + 2 * i) * ld : (size_t)u->row[r + half + 2 * i] * 16);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    copy_async_16(at + swizzled[i], row[i], true);
            }
#pragma unroll
            for (int i = 0; i < 3; i++)
                if (r + 2 * i < limit)
                    copy_async_16(at + swizzled[i],
                                  from + (DOWN ? (size_t)(begin + r + half + 2 * i) * ld : (size_t)u->row[r + half + 2 * i] * 16), true);
            barrier_arrive_copies(smem_address(&s->full[slot]));
        }
        barrier_arrive(smem_address(&s->unit_empty[unit.stage]));
    }
    copy_async_wait_all();
}

/* ---- products ------------------------------------------------------------------------------------------ */

template <typename OP, bool DOWN, int MT, int NT>
__device__ __forceinline__ void shrink_store(const struct kernel_forward &f, const struct shrink_unit *u, const float (&acc)[MT][NT][4])
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, count = u->count;
    const bool twice = !DOWN && u->same;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        const int row = i * 8;
        if (row >= u->rows[0] + u->rows[1])
            return;
        const bool second = row >= u->split;
        const float scale = u->scale[second];
        const size_t at = (size_t)(u->begin + g) * f.lora.max_rank + (second ? u->rank1 + row - u->split : u->rank0 + row) + 2 * t;
        OP *out = (OP *)(DOWN ? f.s_down : second ? f.s_up : f.s_gate) + at, *also = (OP *)f.s_up + at;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint32_t v = transpose_8x8(op_pair<OP>::narrow(scale * acc[i / 2][n][i % 2 * 2], scale * acc[i / 2][n][i % 2 * 2 + 1]));
            if (n * 8 + g < count) {
                *reinterpret_cast<uint32_t *>(out + (size_t)n * 8 * f.lora.max_rank) = v;
                if (twice)
                    *reinterpret_cast<uint32_t *>(also + (size_t)n * 8 * f.lora.max_rank) = v;
            }
        }
    }
}

/* acc += one block: MT x 16 ranks by NT x 8 positions. `a`, `v`: where the lane's row of each four matrices (8 x 8) of the first columns
 * lies, of a's two eights by two chunks of 16 bytes, of v's one by four. With the swizzle, the next columns are an xor away. */
template <typename OP, int MT, int NT>
__device__ __forceinline__ void shrink_block(float (&acc)[MT][NT][4], const uint32_t (&a)[MT], uint32_t v)
{
    constexpr int HALVES = MT * NT <= 8 ? 2 : 1; /* whose loads are under way together */
#pragma unroll
    for (int h0 = 0; h0 < 2; h0 += HALVES) {
        uint4 ranks[2 * HALVES][MT], positions[HALVES][NT];
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
            for (int n = 0; n < NT; n++)
                positions[h][n] = shared_load_matrices((v ^ (h0 + h) * 64) + n * 1024);
#pragma unroll
            for (int step = 2 * h; step < 2 * h + 2; step++) {
#pragma unroll
                for (int m = 0; m < MT; m++)
                    ranks[step][m] = shared_load_matrices(a[m] ^ (2 * h0 + step) * 32);
            }
        }
#pragma unroll
        for (int step = 0; step < 2 * HALVES; step++) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 p = positions[step / 2][n];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    const uint4 r = ranks[step][m];
                    mma_16816<OP>(acc[m][n], r.x, r.y, r.z, r.w, step % 2 ? p.z : p.x, step % 2 ? p.w : p.y);
                }
            }
        }
    }
}

/* The warp's stages of a unit, every CHAINS-th. Sums of up to CHAIN_STAGES of them are added to the warp's, and the warps' in shared
 * memory, one after the other; the last one's go out. `turn`: of the warp's next addition there. */
template <typename OP, bool DOWN, int MT, int NT>
__device__ __forceinline__ void shrink_multiply(const struct kernel_forward &f, struct shrink_shared *s, const struct shrink_unit *u,
                                                uint32_t base, int blocks, uint32_t number, uint32_t *turn)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = shrink_stages(blocks);
    const int row = lane % 8, matrix = lane / 8, rows0 = u->rows[0], rows1 = u->rows[1];
    const struct shrink_ring ring = shrink_ring_of(u, base);
    const uint32_t positions = ring.positions + row * 128 + (matrix ^ row) * 16;
    uint32_t eight[MT], next[MT]; /* of the matrix's rows: where they begin in a stage, and how far the next block is */
#pragma unroll
    for (int m = 0; m < MT; m++) {
        int r = m * 16 + matrix % 2 * 8;
        if (r >= rows0 + rows1)
            r = 0; /* any will do */
        eight[m] = (r < rows0 ? r * 128 : rows0 * STAGE_ROW + (r - rows0) * 128) + row * 128 + (matrix / 2 ^ row) * 16;
        next[m] = (r < rows0 ? rows0 : rows1) * 128;
    }
    float sum[MT][NT][4] = {};
    for (int j = warp; j < stages;) {
        float acc[MT][NT][4] = {};
#pragma unroll 1
        for (int end = min(stages, j + CHAINS * CHAIN_STAGES); j < end; j += CHAINS) {
            const uint32_t slot = (number + j) & ring.mask, stage = ring.base + slot * ring.bytes;
            uint32_t a[MT], v = stage + positions;
#pragma unroll
            for (int m = 0; m < MT; m++)
                a[m] = stage + eight[m];
            barrier_wait(smem_address(&s->full[slot]), (number + j) >> ring.shift & 1);
#pragma unroll 1
            for (int n = shrink_stage_blocks(blocks, j); n > 0; n--) {
                shrink_block<OP, MT, NT>(acc, a, v);
                v += NT * 1024;
#pragma unroll
                for (int m = 0; m < MT; m++)
                    a[m] += next[m];
            }
            barrier_arrive(smem_address(&s->empty[slot])); /* each lane for itself: racecheck follows no __syncwarp to another's */
            barrier_arrive(smem_address(&s->empty_a[slot / CHAINS]));
        }
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++)
            sum[i / 4 / NT][i / 4 % NT][i % 4] += acc[i / 4 / NT][i / 4 % NT][i % 4];
    }
    const bool last = warp == CHAINS - 1;
    barrier_wait(smem_address(&s->turn[warp]), *turn ^ (warp == 0));
    *turn ^= 1;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float4 *at = &s->sum[m * NT + n][lane];
            if (warp > 0) {
                const float4 before = *at;
                sum[m][n][0] = before.x + sum[m][n][0];
                sum[m][n][1] = before.y + sum[m][n][1];
                sum[m][n][2] = before.z + sum[m][n][2];
                sum[m][n][3] = before.w + sum[m][n][3];
            }
            if (!last)
                *at = make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
        }
    }
    barrier_arrive(smem_address(&s->turn[last ? 0 : warp + 1])); /* likewise */
    if (last)
        shrink_store<OP, DOWN, MT, NT>(f, u, sum);
}

template <typename OP, bool DOWN, int MT>
__device__ __forceinline__ void shrink_multiply_some(const struct kernel_forward &f, struct shrink_shared *s, const struct shrink_unit *u,
                                                     uint32_t base, int blocks, uint32_t number, uint32_t *turn)
{
    if (u->columns == 8) {
        shrink_multiply<OP, DOWN, MT, 1>(f, s, u, base, blocks, number, turn);
    } else if (u->columns == 16) {
        shrink_multiply<OP, DOWN, MT, 2>(f, s, u, base, blocks, number, turn);
    } else if (u->columns == 32) {
        shrink_multiply<OP, DOWN, MT, 4>(f, s, u, base, blocks, number, turn);
    } else if constexpr (MT * 6 <= SHRINK_TILES) {
        if (u->columns == 48)
            shrink_multiply<OP, DOWN, MT, 6>(f, s, u, base, blocks, number, turn);
        else
            shrink_multiply<OP, DOWN, MT, 8>(f, s, u, base, blocks, number, turn);
    }
}

template <typename OP, bool DOWN>
__device__ __forceinline__ void shrink_consume(const struct kernel_forward &f, struct shrink_shared *s, uint32_t base, int blocks)
{
    struct ring_cursor unit = {0, 0};
    uint32_t number = 0, turn = 0;
    for (;; ring_next<UNITS_AHEAD>(&unit), number += shrink_stages(blocks)) {
        barrier_wait(smem_address(&s->unit_full[unit.stage]), unit.phase);
        const struct shrink_unit *u = &s->unit[unit.stage];
        if (u->count == 0)
            return;
        const int rows = u->rows[0] + u->rows[1];
        if (rows <= 16)
            shrink_multiply_some<OP, DOWN, 1>(f, s, u, base, blocks, number, &turn);
        else if (rows <= 32)
            shrink_multiply_some<OP, DOWN, 2>(f, s, u, base, blocks, number, &turn);
        else
            shrink_multiply_some<OP, DOWN, 4>(f, s, u, base, blocks, number, &turn);
        barrier_arrive(smem_address(&s->unit_empty[unit.stage]));
    }
}

/* Entries of adapters were last read a forward ago and have left the cache since. */
__device__ __forceinline__ void shrink_prefetch_entries(const struct kernel_forward &f)
{
    const int64_t bytes = (int64_t)f.lora.adapters * f.dims.experts * KERNEL_PROJECTIONS * (int64_t)sizeof(struct kernel_lora_entry);
    for (int64_t at = ((int64_t)blockIdx.x * SHRINK_THREADS + threadIdx.x) * 128; at < bytes;
         at += (int64_t)gridDim.x * SHRINK_THREADS * 128)
        prefetch_l2((const uint8_t *)f.lora.entry + at);
}

template <typename OP, bool DOWN>
__global__ void __launch_bounds__(SHRINK_THREADS, 1) shrink_sm90_kernel(const __grid_constant__ struct kernel_forward f)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    struct shrink_shared *s = (struct shrink_shared *)(shared + RING_BYTES);
    if (threadIdx.x % 32 == 0) {
        /* One after the other; some each. */
        for (int i = threadIdx.x / 32; i < MOST_STAGES; i += SHRINK_THREADS / 32) {
            barrier_init(smem_address(&s->full[i]), 32 + 1);
            barrier_init(smem_address(&s->empty[i]), 32);
            if (i % CHAINS == 0)
                barrier_init(smem_address(&s->empty_a[i / CHAINS]), CHAINS * 32);
        }
        for (int i = threadIdx.x / 32; i < UNITS_AHEAD; i += SHRINK_THREADS / 32) {
            barrier_init(smem_address(&s->unit_full[i]), 1);
            barrier_init(smem_address(&s->unit_empty[i]), 32 * (CHAINS + GATHER_WARPS + 1));
            barrier_init(smem_address(&s->rows_full[i]), 32);
        }
        for (int i = threadIdx.x / 32; i < CHAINS; i += SHRINK_THREADS / 32)
            barrier_init(smem_address(&s->turn[i]), 32);
        fence_async_proxy();
    }
    __syncthreads();
    const uint32_t ring = smem_address(shared);
    const int warp = threadIdx.x / 32, blocks = (DOWN ? f.dims.inter_pad : f.dims.hidden_pad) / CUDA_BLOCK_K;
    if (!DOWN)
        shrink_prefetch_entries(f);
    /* What these read of shrink_down's was there before the launch before it began. */
    if (!DOWN || (warp != WARP_LIST && warp != WARP_A)) {
        launch_wait();
        launch_release();
    }
    if (warp < CHAINS)
        registers_increase<REGISTERS_MULTIPLY>();
    else
        registers_decrease<REGISTERS_OTHERS>();
    if (warp < CHAINS) {
        shrink_consume<OP, DOWN>(f, s, ring, blocks);
    } else if (warp < CHAINS + GATHER_WARPS) {
        shrink_stream_v<DOWN>(f, s, ring, blocks, warp - CHAINS);
    } else if (warp == WARP_LIST) {
        shrink_list<DOWN>(f, s);
        if (DOWN)
            launch_wait();
    } else if (warp == WARP_A) {
        shrink_stream_a(s, ring, blocks);
        if (DOWN)
            launch_wait();
    } else if (!DOWN) {
        shrink_rows(f, s, warp - WARP_ROWS);
    }
}

/* The product begins on the multiprocessors that this leaves free, and with its first tiles' weights needs no s for as long as this takes.
 * Adds in all, in us, with 132, 110, 96 and 80 blocks, as above: T = 32 31, 26, 26, 25; 128 51, 47, 44, 44; 512 57, 48, 50, 55; 2048 95, 90,
 * 92, 102. Counting what of s is there, expert by expert, for a product that goes on beside 44 blocks cost more than it gave: T = 128 73. */
static int shrink_blocks(const struct kernel_stream *stream, const struct kernel_forward *f)
{
    const bool few = f->batch.slots <= 32 * f->dims.experts;
    return few ? stream->processors * 3 / 4 : stream->processors * 5 / 6;
}

template <typename OP, bool DOWN> static cudaError_t shrink_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    return launch(stream, shrink_sm90_kernel<OP, DOWN>, dim3(shrink_blocks(stream, f)), dim3(SHRINK_THREADS), SHRINK_SHARED, *f);
}

cudaError_t cuda_shrink_sm90(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    if (f->dims.op == DTYPE_BF16)
        return down ? shrink_launch<__nv_bfloat16, true>(stream, f) : shrink_launch<__nv_bfloat16, false>(stream, f);
    return down ? shrink_launch<__half, true>(stream, f) : shrink_launch<__half, false>(stream, f);
}

cudaError_t cuda_load_shrink_sm90(void)
{
    cudaError_t e = load(shrink_sm90_kernel<__nv_bfloat16, false>, SHRINK_SHARED);
    if (e == cudaSuccess)
        e = load(shrink_sm90_kernel<__nv_bfloat16, true>, SHRINK_SHARED);
    if (e == cudaSuccess)
        e = load(shrink_sm90_kernel<__half, false>, SHRINK_SHARED);
    return e == cudaSuccess ? load(shrink_sm90_kernel<__half, true>, SHRINK_SHARED) : e;
}
