/* SPDX-License-Identifier: Apache-2.0
 *
 * s = op(scale * A v) for many positions, for Hopper.
 *
 * A unit is up to SHRINK_POSITIONS positions of one segment and up to SHRINK_RANKS ranks, gate's and up's counted as one row of
 * ranks. Ranks are the M operand of wgmma, positions N; rows of M past the unit's ranks and columns past its positions hold
 * whatever shared memory does and are never stored, as no output depends on another's row or column. A unit's k goes through the
 * ring in stages of as many blocks of 64 columns as fit, and the stages run on from unit to unit.
 *
 * A grid of one block a multiprocessor deals the units out in turn. In a block one warp lists the units ahead of all others
 * (segments, adapters' entries), two look up their rows of x, one streams A by bulk copies, a warpgroup gathers the rows by
 * cp.async, and a warpgroup multiplies. Nothing but the gathering depends on the launch before shrink_down, and so the rest begins
 * without waiting for it. Every output is a sum of chains of SUM_BLOCKS blocks of k, whatever the unit's shape: in one chain of 20000
 * columns the tensor cores' truncation shows in fp16.
 *
 * Times of an H200, E 64, K 8, H 2048, I 1024, in us, of shrink_gate_up + shrink_down (expert-bench kernel --steps). 8 adapters of
 * rank 16: T = 32 14 + 7, 128 23 + 11, 512 29 + 12, 2048 48 + 33 (shrink.cu: 57 + 50). 32 of rank 64: T = 32 36 + 10, 512 233 + 59,
 * 2048 275 + 78. Before, with 6 stages of 36 KB, 64-bit sums for descriptors, gate and up apart at T = 128 and segments looked through
 * 32 at a time: 15 + 7, 30 + 13, 30 + 15, 40 + 34 (2048 on a chip whose base forward took 488, above 518); 40 + 10, 246 + 71,
 * 295 + 100. There the profile said that at T = 128 the consumers waited for data a fourteenth of their time, at 18 instructions a
 * wgmma, and that at 2048 shrink_down's gathering waited more than half of its for the list of units.
 */
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/wgmma.cuh"

#define CONSUMER_THREADS 128
#define GATHER_THREADS 128
#define SHRINK_THREADS (CONSUMER_THREADS + GATHER_THREADS + 128)
#define WARP_LIST 8
#define WARP_A 9
#define WARP_ROWS 10 /* and the next */
#define ROWS_WARPS 2

#define STAGES 9
#define STAGE_ROWS 192 /* of 128 bytes: ranks and positions of the stage's blocks */
#define STAGE_BYTES (STAGE_ROWS * 128)
#define SHRINK_RANKS 128
#define SHRINK_POSITIONS 128
#define UNITS_AHEAD 8
#define LIST_EACH 8
#define SUM_BLOCKS 12 /* whose sums the tensor cores add up, before they are added to the others */

struct shrink_unit {
    const uint8_t *a[2]; /* gate's (down's) and up's first row in block 0 */
    uint32_t pitch[2]; /* bytes from block to block */
    int rows[2]; /* ranks of either */
    int begin, count; /* positions; no unit comes after one with count 0 */
    int rank0; /* of the first projection, for the first row: the second's begins here */
    int split; /* row at which the second projection begins */
    int rank1; /* its rank there */
    int each; /* blocks a stage */
    float scale[2];
    bool same; /* up's s is gate's */
    int32_t row[SHRINK_POSITIONS]; /* of x */
};

/* The tail of shared memory, after the stages. What wgmma reads past the last stage lies in here. */
struct shrink_shared {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t unit_full[UNITS_AHEAD], unit_empty[UNITS_AHEAD], rows_full[UNITS_AHEAD];
    struct shrink_unit unit[UNITS_AHEAD];
    uint8_t rest[3072];
};
static_assert(sizeof(struct shrink_shared) >= 7 * 1024, "a tile may begin at the last 8 rows of the ring");

#define SHRINK_SHARED (STAGES * STAGE_BYTES + sizeof(struct shrink_shared))

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

/* Segments, LIST_EACH a lane, before anybody waits for them. Past the last segment: something. */
__device__ __forceinline__ void segments_load(const struct kernel_forward &f, struct shrink_segment *s, int first)
{
#pragma unroll
    for (int j = 0; j < LIST_EACH; j++) {
        const int i = min(first + j * 32 + (int)threadIdx.x % 32, f.batch.slots - 1);
        s[j].begin = __ldcg(f.routing.segment_begin + i);
        s[j].end = __ldcg(f.routing.segment_begin + i + 1);
        s[j].expert = __ldcg(f.routing.segment_expert + i);
        s[j].adapter = __ldcg(f.routing.segment_adapter + i);
    }
}

/* Some ranks of one chunk of a segment: tile `tile` of `tiles` of ranks [base, base + all) of both projections' row of ranks. */
__device__ __forceinline__ void shrink_unit_set(struct shrink_unit *u, const struct shrink_entry &e0, const struct shrink_entry &e1,
                                                int begin, int count, int base, int all, int tile, int tiles)
{
    const bool same = e0.a == e1.a;
    const int per = ((all + tiles - 1) / tiles + 7) / 8 * 8, q0 = base + tile * per, q1 = min(base + all, q0 + per);
    const int n0 = max(0, min(q1, e0.rank) - q0), n1 = q1 - q0 - n0, first1 = max(q0, e0.rank) - e0.rank;
    u->a[0] = (const uint8_t *)e0.a + (size_t)q0 * 128;
    u->a[1] = (const uint8_t *)e1.a + (size_t)first1 * 128;
    u->pitch[0] = e0.rank * 128;
    u->pitch[1] = e1.rank * 128;
    u->rows[0] = n0;
    u->rows[1] = n1;
    u->begin = begin;
    u->count = count;
    u->rank0 = q0;
    u->split = n0;
    u->rank1 = first1;
    /* Stages end where chains do. */
    const int most = STAGE_ROWS / (n0 + n1 + (count + 7) / 8 * 8);
    u->each = most >= 12 ? 12 : most >= 6 ? 6 : most > 4 ? 4 : most;
    u->scale[0] = e0.scale;
    u->scale[1] = e1.scale;
    u->same = same;
}

/* Every chunk of up to `most` positions of an adapted segment is dealt to a block (gate's and up's share to one each where there
 * are fewer chunks than half the blocks), which does its ranks tile after tile. What is cut how changes no bit. */
template <bool DOWN> __device__ __forceinline__ void shrink_list(const struct kernel_forward &f, struct shrink_shared *s)
{
    const int lane = threadIdx.x % 32, grid = gridDim.x;
    struct shrink_segment now[LIST_EACH];
    segments_load(f, now, 0);
    const int segments = __ldcg(f.routing.segment_count), valid = __ldcg(f.routing.expert_offset + f.dims.experts);
    int most = f.lora.max_rank > 32 ? 64 : SHRINK_POSITIONS; /* sums of more ranks and positions do not fit into registers */
    while (most > 32 && valid < most * grid)
        most /= 2;
    const int parts = !DOWN && 2 * segments <= grid ? 2 : 1;
    struct ring_cursor at = {0, 1};
    int before = 0, want = blockIdx.x;
    for (int i = 0; i < segments; i += 32 * LIST_EACH) {
        int units[LIST_EACH], sum = 0;
#pragma unroll
        for (int j = 0; j < LIST_EACH; j++) {
            const bool real = i + j * 32 + lane < segments && now[j].adapter >= 0;
            units[j] = real ? (now[j].end - now[j].begin + most - 1) / most * parts : 0;
            sum += units[j];
        }
        const int inclusive = warp_sum_inclusive(sum, lane);
        const int total = __shfl_sync(~0u, inclusive, 31), first = before + inclusive - sum;
        while (want < before + total) {
            /* Up to 32 of this block's units, one a lane, so that their entries are fetched together. */
            struct shrink_segment mine = {};
            int local = 0, found = 0;
            for (; found < 32 && want < before + total; found++, want += grid) {
                const int owner = __ffs(__ballot_sync(~0u, want < first + sum)) - 1;
                struct shrink_segment it = now[0];
                int left = want - first, number = 0;
                bool done = false;
#pragma unroll
                for (int j = 0; j < LIST_EACH; j++) {
                    if (!done && left < units[j]) {
                        it = now[j];
                        number = left;
                        done = true;
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
            const int rank1 = e0.a == e1.a ? 0 : e1.rank, part = local % parts;
            const int base = part ? e0.rank : 0, all = part ? rank1 : parts == 2 ? e0.rank : e0.rank + rank1;
            const int tiles = (all + SHRINK_RANKS - 1) / SHRINK_RANKS;
            const int chunks = max(1, (mine.end - mine.begin + most - 1) / most),
                      positions = ((mine.end - mine.begin + chunks - 1) / chunks + 7) / 8 * 8,
                      begin = mine.begin + local / parts * positions, count = min(positions, mine.end - begin);
            for (int n = 0; n < found; n++) {
                const int many = __shfl_sync(~0u, tiles, n);
                for (int tile = 0; tile < many; tile++, ring_next<UNITS_AHEAD>(&at)) {
                    /* All lanes are past the wait before one hands the unit over: a lane that came late could sleep through two phases. */
                    barrier_wait(smem_address(&s->unit_empty[at.stage]), at.phase);
                    __syncwarp();
                    if (lane == n) {
                        shrink_unit_set(&s->unit[at.stage], e0, e1, begin, count, base, all, tile, tiles);
                        barrier_arrive(smem_address(&s->unit_full[at.stage]));
                    }
                    __syncwarp();
                }
            }
        }
        before += total;
        if (i + 32 * LIST_EACH < segments)
            segments_load(f, now, i + 32 * LIST_EACH);
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
                u->row[i * 32 + lane] = row[i];
        barrier_arrive(smem_address(&s->rows_full[at.stage]));
        for (int i = 0; i < ROWS_WARPS; i++)
            ring_next<UNITS_AHEAD>(&at);
    }
}

/* ---- streams ------------------------------------------------------------------------------------------- */

/* A's part of a stage: blocks [k, k + n), each the ranks' rows of 128 bytes. For a whole warp. */
__device__ __forceinline__ void shrink_stage_a(const struct shrink_unit *u, uint32_t stage, uint32_t full, int k, int n)
{
    const int lane = threadIdx.x % 32, rows0 = u->rows[0], rows1 = u->rows[1];
    const uint32_t pitch0 = u->pitch[0], pitch1 = u->pitch[1];
    if (lane == 0)
        barrier_expect(full, (rows0 + rows1) * 128 * n);
    __syncwarp();
    if (rows1 == 0 && pitch0 == (uint32_t)rows0 * 128) {
        if (lane == 0)
            bulk_copy(stage, u->a[0] + (size_t)k * pitch0, pitch0 * n, full);
        return;
    }
    for (int i = lane; i < 2 * n; i += 32) {
        const int b = i / 2, second = i % 2, rows = second ? rows1 : rows0;
        if (rows)
            bulk_copy(stage + (b * (rows0 + rows1) + (second ? rows0 : 0)) * 128,
                      u->a[second] + (size_t)(k + b) * (second ? pitch1 : pitch0), rows * 128, full);
    }
}

/* The positions' part, after A's: the same blocks, each their rows of 128 bytes, swizzled. For GATHER_THREADS threads, of which 8
 * copy a row of a block; short units share out the blocks, too. */
template <bool DOWN>
__device__ __forceinline__ void shrink_stage_v(const struct kernel_forward &f, const struct shrink_unit *u, uint32_t stage, int k, int n,
                                               int thread)
{
    const int count = u->count, chunk = thread % 8, shift = count > 8 ? 4 : count > 4 ? 3 : count > 2 ? 2 : count > 1 ? 1 : 0;
    const int b0 = thread / 8 >> shift, step = 16 >> shift, block = (count + 7) / 8 * 1024;
    const size_t ldx = (size_t)(DOWN ? f.dims.inter_pad : f.dims.hidden_pad) * 2;
    const uint8_t *v = (const uint8_t *)(DOWN ? f.h : f.x) + (size_t)k * CUDA_BLOCK_K * 2 + chunk * 16;
    stage += u->each * (u->rows[0] + u->rows[1]) * 128;
    for (int r = thread / 8 & ((1 << shift) - 1); r < count; r += 16) {
        const uint8_t *from = v + (size_t)(DOWN ? u->begin + r : u->row[r]) * ldx;
        const uint32_t to = stage + r * 128 + (chunk ^ (r & 7)) * 16;
#pragma unroll 4
        for (int b = b0; b < n; b += step)
            copy_async_16(to + b * block, from + b * (CUDA_BLOCK_K * 2), true);
    }
}

__device__ __forceinline__ void shrink_stream_a(struct shrink_shared *s, uint32_t ring, int blocks)
{
    struct ring_cursor unit = {0, 0}, at = {0, 1};
    for (;; ring_next<UNITS_AHEAD>(&unit)) {
        barrier_wait(smem_address(&s->unit_full[unit.stage]), unit.phase);
        const struct shrink_unit *u = &s->unit[unit.stage];
        if (u->count == 0)
            return;
        const int each = u->each;
        for (int k = 0; k < blocks; k += each, ring_next<STAGES>(&at)) {
            barrier_wait(smem_address(&s->empty[at.stage]), at.phase);
            shrink_stage_a(u, ring + at.stage * STAGE_BYTES, smem_address(&s->full[at.stage]), k, min(each, blocks - k));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(smem_address(&s->unit_empty[unit.stage]));
    }
}

template <bool DOWN>
__device__ __forceinline__ void shrink_stream_v(const struct kernel_forward &f, struct shrink_shared *s, uint32_t ring, int blocks)
{
    const int thread = threadIdx.x - CONSUMER_THREADS;
    struct ring_cursor unit = {0, 0}, at = {0, 1};
    for (;; ring_next<UNITS_AHEAD>(&unit)) {
        barrier_wait(smem_address(&s->unit_full[unit.stage]), unit.phase);
        const struct shrink_unit *u = &s->unit[unit.stage];
        if (u->count == 0)
            break;
        if (!DOWN)
            barrier_wait(smem_address(&s->rows_full[unit.stage]), unit.phase);
        const int each = u->each;
        for (int k = 0; k < blocks; k += each, ring_next<STAGES>(&at)) {
            barrier_wait(smem_address(&s->empty[at.stage]), at.phase);
            shrink_stage_v<DOWN>(f, u, ring + at.stage * STAGE_BYTES, k, min(each, blocks - k), thread);
            barrier_arrive_copies(smem_address(&s->full[at.stage]));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(smem_address(&s->unit_empty[unit.stage]));
    }
    copy_async_wait_all();
}

/* ---- products ------------------------------------------------------------------------------------------ */

template <typename OP, bool DOWN, int N>
__device__ __forceinline__ void shrink_store(const struct kernel_forward &f, const struct shrink_unit *u, int m, const float *acc)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, count = u->count;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = m * 64 + warp * 16 + half * 8;
        if (row >= u->rows[0] + u->rows[1])
            return;
        const bool second = row >= u->split, twice = !DOWN && u->same;
        const float scale = u->scale[second];
        const size_t at = (size_t)(u->begin + g) * f.lora.max_rank + (second ? u->rank1 + row - u->split : u->rank0 + row) + 2 * t;
        OP *out = (OP *)(DOWN ? f.s_down : second ? f.s_up : f.s_gate) + at, *also = (OP *)f.s_up + at;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const uint32_t v = transpose_8x8(op_pair<OP>::narrow(scale * acc[4 * j + 2 * half], scale * acc[4 * j + 2 * half + 1]));
            if (j * 8 + g < count) {
                *reinterpret_cast<uint32_t *>(out + (size_t)j * 8 * f.lora.max_rank) = v;
                if (twice)
                    *reinterpret_cast<uint32_t *>(also + (size_t)j * 8 * f.lora.max_rank) = v;
            }
        }
    }
}

/* The part of a tile's descriptor (wgmma.cuh) that says where, bits 0-31; the rest never changes. */
__device__ __forceinline__ uint32_t tile_low(uint32_t address) { return (uint32_t)wgmma_tile(address); }
__device__ __forceinline__ uint64_t tile_of(uint32_t low) { return (uint64_t)(uint32_t)(wgmma_tile(0) >> 32) << 32 | low; }

/* The compiler then knows that it is the same for the whole warp. */
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }

template <typename OP, bool DOWN, int MT, int N>
__device__ __forceinline__ void shrink_multiply(const struct kernel_forward &f, struct shrink_shared *s, const struct shrink_unit *u,
                                                uint32_t ring, int blocks, struct ring_cursor *at)
{
    const int lane = threadIdx.x % 32, each = uniform(u->each), ranks = uniform(u->rows[0] + u->rows[1]);
    const uint32_t a_block = ranks * 128 / 16, v_block = uniform((u->count + 7) / 8 * 1024 / 16);
    float sum[MT][N / 2] = {}, acc[MT][N / 2] = {};
    uint32_t before = 0;
    for (int k0 = 0; k0 < blocks; k0 += SUM_BLOCKS) {
        const int end = min(blocks, k0 + SUM_BLOCKS);
        for (int k = k0; k < end; k += each, ring_next<STAGES>(at)) {
            const uint32_t stage = ring + at->stage * STAGE_BYTES;
            barrier_wait(smem_address(&s->full[at->stage]), at->phase);
            /* cp.async wrote by the generic proxy, wgmma reads by the other. */
            fence_async_proxy();
            uint32_t a = tile_low(stage), v = tile_low(stage + each * ranks * 128);
            const int n = min(each, end - k);
            for (int b = 0; b < n; b++, a += a_block, v += v_block) {
                wgmma_begin();
#pragma unroll
                for (int step = 0; step < 4; step++) {
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        wgmma_run<OP, N>::go(acc[m], tile_of(a + m * (8192 >> 4) + step * 2), tile_of(v + step * 2));
                }
                wgmma_commit();
                if (b == 0 && k > 0) {
                    wgmma_wait<1>();
                    if (lane == 0)
                        barrier_arrive(smem_address(&s->empty[before]));
                }
            }
            before = at->stage;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                sum[m][i] += acc[m][i];
                acc[m][i] = 0.0f;
            }
        }
    }
    if (lane == 0)
        barrier_arrive(smem_address(&s->empty[before]));
#pragma unroll
    for (int m = 0; m < MT; m++)
        shrink_store<OP, DOWN, N>(f, u, m, sum[m]);
}

template <typename OP, bool DOWN>
__device__ __forceinline__ void shrink_consume(const struct kernel_forward &f, struct shrink_shared *s, uint32_t ring, int blocks)
{
    struct ring_cursor unit = {0, 0}, at = {0, 0};
    for (;; ring_next<UNITS_AHEAD>(&unit)) {
        barrier_wait(smem_address(&s->unit_full[unit.stage]), unit.phase);
        const struct shrink_unit *u = &s->unit[unit.stage];
        if (u->count == 0)
            return;
        const int count = uniform(u->count);
        if (uniform(u->rows[0] + u->rows[1]) <= 64) {
            if (count <= 16)
                shrink_multiply<OP, DOWN, 1, 16>(f, s, u, ring, blocks, &at);
            else if (count <= 32)
                shrink_multiply<OP, DOWN, 1, 32>(f, s, u, ring, blocks, &at);
            else if (count <= 64)
                shrink_multiply<OP, DOWN, 1, 64>(f, s, u, ring, blocks, &at);
            else
                shrink_multiply<OP, DOWN, 1, 128>(f, s, u, ring, blocks, &at);
        } else if (count <= 16) {
            shrink_multiply<OP, DOWN, 2, 16>(f, s, u, ring, blocks, &at);
        } else if (count <= 32) {
            shrink_multiply<OP, DOWN, 2, 32>(f, s, u, ring, blocks, &at);
        } else {
            shrink_multiply<OP, DOWN, 2, 64>(f, s, u, ring, blocks, &at);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(smem_address(&s->unit_empty[unit.stage]));
    }
}

/* Entries of adapters were last read a forward ago and have left the cache since. */
__device__ __forceinline__ void shrink_prefetch_entries(const struct kernel_forward &f)
{
    const int64_t bytes = (int64_t)f.lora.adapters * f.dims.experts * KERNEL_PROJECTIONS * (int64_t)sizeof(struct kernel_lora_entry);
    const int64_t at = ((int64_t)blockIdx.x * SHRINK_THREADS + threadIdx.x) * 128;
    if (at < bytes)
        prefetch_l2((const uint8_t *)f.lora.entry + at);
}

template <typename OP, bool DOWN>
__global__ void __launch_bounds__(SHRINK_THREADS, 1) shrink_sm90_kernel(const __grid_constant__ struct kernel_forward f)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    struct shrink_shared *s = (struct shrink_shared *)(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem_address(&s->full[i]), GATHER_THREADS + 1);
            barrier_init(smem_address(&s->empty[i]), CONSUMER_THREADS / 32);
        }
        for (int i = 0; i < UNITS_AHEAD; i++) {
            barrier_init(smem_address(&s->unit_full[i]), 1);
            barrier_init(smem_address(&s->unit_empty[i]), (CONSUMER_THREADS + GATHER_THREADS) / 32 + 1);
            barrier_init(smem_address(&s->rows_full[i]), 32);
        }
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
    if (warp < CONSUMER_THREADS / 32) {
        shrink_consume<OP, DOWN>(f, s, ring, blocks);
    } else if (warp < (CONSUMER_THREADS + GATHER_THREADS) / 32) {
        shrink_stream_v<DOWN>(f, s, ring, blocks);
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

template <typename OP, bool DOWN> static cudaError_t shrink_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    return launch(stream, shrink_sm90_kernel<OP, DOWN>, dim3(stream->processors), dim3(SHRINK_THREADS), SHRINK_SHARED, *f);
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
