/* SPDX-License-Identifier: Apache-2.0
 *
 * The two products for few rows an expert: bound by reading each touched expert's weights once.
 *
 * Weights are the M operand of mma m16n8k16, rows of the batch the N operand, a chunk of one expert's at a time. All
 * (chunk, group of 16 weight rows) pairs are dealt out evenly to the blocks of a grid that fills the device. k is cut into ranges, as
 * many as the model's sizes alone say; each is summed for itself, then the sums are added in order, so that what else is in the batch
 * changes no bit of a row. Each warp streams its weights, pair after pair, through a private ring of shared memory that is RING blocks
 * of 2 KiB deep and filled by bulk copies (sm_90) or cp.async (sm_80). Adapters: a chunk holds runs of rows with one adapter; each run
 * adds B s, with s masked to the run's rows, to the whole sum.
 *
 * As many warps as there are ranges make a team: each takes its range of a pair, and one of them, another for every pair, ends it. So a
 * block's warps all end together, however few and long its pairs are. With adapters the others would wait for the one that ends a pair, whose
 * fold waits for loads of one adapter after the other. There a warp takes all ranges of a pair in turn, to the same bits; and in
 * batches of few rows only of as many pairs as there are for every warp alike. What is left over, which with 2 to 4 pairs a warp would leave
 * a tenth of them idle, falls to teams, whose folds come last, all at once.
 *
 * FEW: batches of few rows, Hopper's code only. What counts there is the time in which no weights are asked for. A block finds out from
 * the batch itself what it needs of routing, without loads that depend on each other, and asks for weights before the launch before it
 * has ended. A team's warps go on to the next pair when they have given their sums to the one that ends this one. Code for chunks of 8
 * rows alone is small, and has registers to fetch x and adapters ahead. Weights leave the second-level cache before all else.
 *
 * Other batches have chunks of up to 32 rows. Without adapters the rings are filled before launch_wait (device.cuh), with adapters
 * after: shrink's loads, each of which waits for the one before, would queue behind all those weights.
 *
 * Compiled twice: -DCUDA_PORTABLE=0 for sm_90a, =1 for sm_80 and PTX.
 */
#include "kernels/cuda/decode_lora.cuh"
#include "kernels/cuda/pipeline.cuh"

#define DECODE_WARPS 8
#define DECODE_THREADS (DECODE_WARPS * 32)
#define DECODE_RANGE 3 /* blocks of k that a range has at least */
#define RING 3
#define RING_BYTES ((size_t)DECODE_WARPS * RING * CUDA_BLOCK_BYTES)

template <bool FEW> struct decode_sizes {
    static constexpr int CHUNK = FEW ? CUDA_FEW_CHUNK : 32;
    static constexpr int SUM_WARP = FEW ? DECODE_WARPS * 32 : 16 * CHUNK / 4; /* float4 a warp: what its team gives it, or its own sum */
    static constexpr size_t SUM_BYTES = (size_t)DECODE_WARPS * SUM_WARP * 16;
};

/* Shared memory: rings, then sums, then where chunks are: the experts' offsets and first chunks, or FEW's table. */
extern __shared__ __align__(128) uint8_t shared[];

#define FEW_NONE ~0u

struct decode_rows { /* a chunk */
    int expert, begin, count;
};

struct decode_table {
    /* Of slots; FEW_NONE where there is none. */
    uint32_t expert[CUDA_FEW_SLOTS];
    uint32_t first[CUDA_FEW_SLOTS]; /* the expert again, where a chunk begins */
    uint32_t order[CUDA_FEW_SLOTS]; /* by expert, then adapter */
    int row_at[CUDA_FEW_SLOTS], adapter_at[CUDA_FEW_SLOTS]; /* of positions */
    struct decode_rows chunk[CUDA_FEW_SLOTS];
};

/* How a block's pairs are dealt out: each to a warp; each to a team; or the first to warps, as long as there is one for every warp, and
 * those left over to teams. */
enum decode_deal { DEAL_WARPS, DEAL_TEAMS, DEAL_BOTH };

/* A block's share. What follows from the sizes alone is computed again where it is needed: registers are short. */
struct decode_block {
    int range_begin, range; /* this warp's blocks of k, of a team's pair */
    int shift, split, teams; /* 1 << shift ranges of k, and as many warps a team */
    int begin, left, end; /* pairs; from `left` on they are teams' */
};

template <bool DOWN> __device__ __forceinline__ int decode_groups(const struct kernel_dims &d)
{
    return DOWN ? d.hidden_pad / 16 : d.inter_pad / 8;
}
template <bool DOWN> __device__ __forceinline__ int decode_blocks(const struct kernel_dims &d)
{
    return (DOWN ? d.inter_pad : d.hidden_pad) / CUDA_BLOCK_K;
}
__device__ __forceinline__ float4 *decode_sums() { return (float4 *)(shared + RING_BYTES); }
__device__ __forceinline__ int *decode_offset() { return (int *)(shared + RING_BYTES + decode_sizes<false>::SUM_BYTES); }
__device__ __forceinline__ int *decode_first(int experts) { return decode_offset() + experts + 1; }
__device__ __forceinline__ struct decode_table *few_table()
{
    return (struct decode_table *)(shared + RING_BYTES + decode_sizes<true>::SUM_BYTES);
}

template <bool FEW> __device__ __forceinline__ struct decode_rows chunk_rows(const struct kernel_forward &f, int v)
{
    if (FEW)
        return few_table()->chunk[v];
    constexpr int CHUNK = decode_sizes<FEW>::CHUNK;
    const int *offset = decode_offset(), *first = decode_first(f.dims.experts);
    struct decode_rows c = {chunks_find(first, f.dims.experts, v)};
    c.begin = offset[c.expert] + (v - first[c.expert]) * CHUNK;
    c.count = min(CHUNK, offset[c.expert + 1] - c.begin);
    return c;
}

/* ---- few rows: routing again, by every block for itself ------------------------------------------------ */

/* A thread's slot. */
struct few_slot {
    uint32_t expert;
    int row;
};

/* Fills the table's chunks; for all threads of a block, ends with a barrier. Returns how many there are. Positions are those of routing as
 * long as adapters don't matter. */
__device__ __forceinline__ int few_chunks(const struct kernel_forward &f, const struct few_slot &s)
{
    constexpr int CHUNK = decode_sizes<true>::CHUNK;
    struct decode_table *const t = few_table();
    const int slots = f.batch.slots, me = threadIdx.x;
    t->expert[me] = s.expert;
    __syncthreads();
    int smaller = 0, same = 0, before = 0;
    if (s.expert != FEW_NONE) {
        for (int i = 0; i < slots; i += 4) { /* FEW_NONE past the last */
            const uint4 e = *reinterpret_cast<const uint4 *>(t->expert + i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t other = j == 0 ? e.x : j == 1 ? e.y : j == 2 ? e.z : e.w;
                smaller += other < s.expert;
                same += other == s.expert;
                before += other == s.expert && i + j < me;
            }
        }
        t->row_at[smaller + before] = s.row;
    }
    const bool begins = s.expert != FEW_NONE && before % CHUNK == 0;
    t->first[me] = begins ? s.expert : FEW_NONE;
    __syncthreads();
    int chunks = 0, rank = 0;
    for (int i = 0; i < slots; i += 32)
        chunks += __popc(__ballot_sync(~0u, t->first[i + me % 32] != FEW_NONE));
    if (begins) {
        for (int i = 0; i < slots; i += 4) {
            const uint4 e = *reinterpret_cast<const uint4 *>(t->first + i);
            rank += (e.x < s.expert) + (e.y < s.expert) + (e.z < s.expert) + (e.w < s.expert);
        }
        const struct decode_rows c = {(int)s.expert, smaller + before, min(CHUNK, same - before)};
        t->chunk[rank + before / CHUNK] = c;
    }
    __syncthreads();
    return chunks;
}

/* Brings an expert's rows into the order of their adapters; the same way. */
__device__ __forceinline__ void few_order(const struct kernel_forward &f, const struct few_slot &s, int adapter)
{
    struct decode_table *const t = few_table();
    const int me = threadIdx.x;
    const uint32_t key = s.expert == FEW_NONE ? FEW_NONE : s.expert * (f.lora.adapters + 1) + adapter + 1;
    t->order[me] = key;
    __syncthreads();
    if (s.expert != FEW_NONE) {
        int at = 0;
        for (int i = 0; i < f.batch.slots; i += 4) {
            const uint4 k = *reinterpret_cast<const uint4 *>(t->order + i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t other = j == 0 ? k.x : j == 1 ? k.y : j == 2 ? k.z : k.w;
                at += other < key || (other == key && i + j < me);
            }
        }
        t->row_at[at] = s.row;
        t->adapter_at[at] = adapter;
    }
    __syncthreads();
}

/* ---- a warp's pairs, in turn: numbers, up to the end of the block's ------------------------------------- */

template <enum decode_deal DEAL> __device__ __forceinline__ bool pair_whole(const struct decode_block &b, int item)
{
    return DEAL == DEAL_WARPS || (DEAL == DEAL_BOTH && item < b.left);
}

/* Of those left over, the one that this warp ends: another for each warp, as there are fewer of them than warps. It comes to it last, when it
 * has given the others of its team what they need. */
__device__ __forceinline__ int pair_mine(const struct decode_block &b)
{
    const int warp = threadIdx.x / 32;
    return b.left + (warp & (b.split - 1)) * b.teams + (warp >> b.shift);
}

/* Its team's first, with which the turn goes on after the last. */
__device__ __forceinline__ int pair_team_first(const struct decode_block &b) { return b.left + (threadIdx.x / 32 >> b.shift); }

__device__ __forceinline__ int pair_first_left(const struct decode_block &b)
{
    const int next = pair_mine(b) + b.teams;
    return next < b.end ? next : pair_team_first(b);
}

template <enum decode_deal DEAL> __device__ __forceinline__ int pair_first(const struct decode_block &b)
{
    if (DEAL == DEAL_BOTH && b.begin == b.left)
        return pair_first_left(b);
    return b.begin + (threadIdx.x / 32 >> (DEAL == DEAL_TEAMS ? b.shift : 0));
}

template <enum decode_deal DEAL> __device__ __forceinline__ int pair_next(const struct decode_block &b, int item)
{
    if (DEAL != DEAL_BOTH)
        return item + (DEAL == DEAL_TEAMS ? b.teams : DECODE_WARPS);
    if (item < b.left) {
        item += DECODE_WARPS;
        return item < b.left ? item : pair_first_left(b);
    }
    const int mine = pair_mine(b), next = item + b.teams;
    if (item == mine)
        return b.end;
    return next >= b.end && mine < b.end ? pair_team_first(b) : next;
}

/* The warp that ends a team's pair, which is the team's `round`-th or, of those left over, this one. */
template <enum decode_deal DEAL> __device__ __forceinline__ int pair_end_warp(const struct decode_block &b, int item, int round)
{
    const int warp = threadIdx.x / 32;
    return (warp & ~(b.split - 1)) + (DEAL == DEAL_BOTH ? (item - b.left) / b.teams : round & (b.split - 1));
}

/* ---- rings --------------------------------------------------------------------------------------------- */

/* Where a warp's next block of weights comes from. */
struct decode_cursor {
    const uint8_t *next, *expert;
    int item; /* the pair's number; at the end: none */
    int left; /* blocks of the range */
    int chunk; /* that `expert` was found for; -1: none */
};

template <bool DOWN, bool FEW, enum decode_deal DEAL>
__device__ __forceinline__ void cursor_set(struct decode_cursor *c, const struct kernel_forward &f, const struct decode_block &b, int item)
{
    const int groups = decode_groups<DOWN>(f.dims), blocks = decode_blocks<DOWN>(f.dims);
    const bool whole = pair_whole<DEAL>(b, item);
    c->item = item;
    c->left = whole ? blocks : b.range;
    if (item < b.end) {
        const int v = item / groups;
        if (v != c->chunk) {
            c->chunk = v;
            c->expert = (const uint8_t *)(DOWN ? f.weights.down : f.weights.gate_up) +
                        (size_t)chunk_rows<FEW>(f, v).expert * groups * blocks * CUDA_BLOCK_BYTES;
        }
        c->next = c->expert + group_offset(item - v * groups, blocks) + (size_t)(whole ? 0 : b.range_begin) * CUDA_STRIP_BYTES;
    }
}

__device__ __forceinline__ void ring_init(uint32_t bars)
{
#if !CUDA_PORTABLE
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < RING; i++)
            barrier_init(bars + 8 * i, 1);
        fence_async_proxy();
    }
    __syncwarp();
#endif
}

/* Starts the copy of the cursor's block into stage `stage`; with no block left, keeps the count of copies right. Loads from shared
 * memory that have been issued only need not have read it yet, and nothing holds a bulk copy back behind them: `read` is 0, and
 * computed from what the last loads from this stage returned. */
template <bool DOWN, bool FEW, enum decode_deal DEAL>
__device__ __forceinline__ void ring_fill(struct decode_cursor *c, const struct kernel_forward &f, const struct decode_block &b,
                                          uint32_t ring, uint32_t bars, int stage, uint32_t read)
{
    if (c->item < b.end) {
#if !CUDA_PORTABLE
        if (threadIdx.x % 32 == 0) {
            uint32_t bar = bars + 8 * stage;
            barrier_expect(bar, CUDA_BLOCK_BYTES | read);
            if (FEW)
                bulk_copy_once(ring + stage * CUDA_BLOCK_BYTES, c->next, CUDA_BLOCK_BYTES, bar);
            else
                bulk_copy(ring + stage * CUDA_BLOCK_BYTES, c->next, CUDA_BLOCK_BYTES, bar);
        }
#else
#pragma unroll
        for (int i = 0; i < CUDA_BLOCK_BYTES / 512; i++)
            copy_async_16(ring + stage * CUDA_BLOCK_BYTES + i * 512 + threadIdx.x % 32 * 16, c->next + i * 512 + threadIdx.x % 32 * 16,
                          true);
#endif
        c->next += CUDA_STRIP_BYTES;
        if (--c->left == 0)
            cursor_set<DOWN, FEW, DEAL>(c, f, b, pair_next<DEAL>(b, c->item));
    }
#if CUDA_PORTABLE
    copy_async_commit();
#endif
}

__device__ __forceinline__ void ring_wait(uint32_t bars, int stage, uint32_t phase)
{
#if !CUDA_PORTABLE
    barrier_wait(bars + 8 * stage, phase);
#else
    copy_async_wait<RING - 1>();
    __syncwarp();
#endif
}

__device__ __forceinline__ void team_sync(const struct decode_block &b) { bar_sync(1 + (threadIdx.x / 32 >> b.shift), b.split * 32); }

/* Adds a team's sums, for the warp whose pair is `mine`. Where the halves of a warp's space are used in turn, the barrier of the
 * next pair is the one behind which nobody reads this pair's any more. */
template <int NT> __device__ __forceinline__ void team_add(float (&acc)[NT][4], const struct decode_block &b, bool mine, int round)
{
    if (b.split == 1)
        return;
    constexpr int SUM_WARP = decode_sizes<false>::SUM_WARP;
    constexpr bool WHOLE = NT * 8 == decode_sizes<false>::CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 *sum = decode_sums() + (WHOLE ? 0 : round % 2 * (SUM_WARP / 2)) + lane;
    if (WHOLE)
        team_sync(b);
#pragma unroll
    for (int j = 0; j < NT; j++)
        sum[warp * SUM_WARP + j * 32] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
    team_sync(b);
    if (mine) {
        sum += (warp & ~(b.split - 1)) * SUM_WARP;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float4 v = sum[j * 32];
            for (int r = 1; r < b.split; r++) {
                const float4 more = sum[r * SUM_WARP + j * 32];
                v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
            }
            acc[j][0] = v.x, acc[j][1] = v.y, acc[j][2] = v.z, acc[j][3] = v.w;
        }
    }
    if (WHOLE)
        team_sync(b);
}

/* The same where a warp, `to`, has space for what the others give it, and they go on when they have given. Each comes to a pair of its own,
 * for which it waits for all others, before it gives anyone more than that one has read. `phase`: of how many it has ended before. */
__device__ __forceinline__ void team_give(float (&acc)[1][4], const struct decode_block &b, int to, uint32_t phase, uint32_t given)
{
    if (b.split == 1)
        return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp & (b.split - 1);
    float4 *const sum = decode_sums() + to * decode_sizes<true>::SUM_WARP + lane;
    const float4 own = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
    if (to != warp) {
        sum[part * 32] = own;
        barrier_arrive(given + 8 * to); /* each lane for itself: racecheck follows no __syncwarp to another's */
        return;
    }
    barrier_wait(given + 8 * to, phase & 1);
    float4 v = part == 0 ? own : sum[0];
    for (int r = 1; r < b.split; r++) {
        const float4 more = r == part ? own : sum[r * 32];
        v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    }
    acc[0][0] = v.x, acc[0][1] = v.y, acc[0][2] = v.z, acc[0][3] = v.w;
}

/* ---- pairs --------------------------------------------------------------------------------------------- */

template <typename OP, bool DOWN, bool LORA, enum decode_deal DEAL, bool FEW, int NT>
__device__ __forceinline__ void decode_pair(const struct kernel_forward &f, const struct decode_block &b, struct decode_cursor *fill,
                                            struct decode_chunk *chunk, int item, int group, int round, uint32_t ring, uint32_t bars,
                                            uint32_t given, struct ring_cursor *turn)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, expert = chunk->expert, begin = chunk->begin, count = chunk->count;
    const bool whole = pair_whole<DEAL>(b, item);
    const int to = whole ? threadIdx.x / 32 : pair_end_warp<DEAL>(b, item, round);
    const int range = whole ? decode_blocks<DOWN>(f.dims) : b.range, range_begin = whole ? 0 : b.range_begin;
    const bool mine = to == threadIdx.x / 32; /* this warp ends the pair */
    const size_t ldx = DOWN ? f.dims.inter_pad : f.dims.hidden_pad;
    const OP *x[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        /* Past the last row it once more: sums of positions that aren't there are never stored. */
        const int n = j * 8 + g, row = DOWN ? begin + min(n, count - 1) : __shfl_sync(~0u, chunk->row, n);
        x[j] = (const OP *)(DOWN ? f.h : f.x) + row * ldx + range_begin * CUDA_BLOCK_K + 16 * t;
    }

    /* x of this block of k and those to come: with few rows there are registers for two. Each has its own, as to move them from one to the
     * other is to wait for what has just been asked for. */
    constexpr int AHEAD = NT <= (LORA ? 1 : 2) ? 2 : 1;
    float acc[NT][4] = {};
    int cut = 1;
    uint4 next[AHEAD][2][NT];
    auto load_x = [&](int j, int k, int p) { return *reinterpret_cast<const uint4 *>(x[j] + min(k, range - 1) * CUDA_BLOCK_K + 8 * p); };
    auto block = [&](uint4(&v)[2][NT], int k) {
        const int stage = turn->stage;
        ring_wait(bars, stage, turn->phase);
        uint32_t row = ring + stage * CUDA_BLOCK_BYTES + g * 128;
        uint4 lo[2], hi[2];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t at = ((2 * t + p) ^ g) * 16;
            lo[p] = shared_load_16(row + at);
            hi[p] = shared_load_16(row + 1024 + at);
        }
        /* No model has so many experts, but the compiler doesn't know. */
        const uint32_t read = (lo[0].x ^ hi[0].x ^ lo[1].x ^ hi[1].x) & (uint32_t)f.dims.experts >> 30;
        __syncwarp();
        ring_fill<DOWN, FEW, DEAL>(fill, f, b, ring, bars, stage, read);
        ring_next<RING>(turn);
#pragma unroll
        for (int p = 0; p < 2; p++) {
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_16816<OP>(acc[j], lo[p].x, hi[p].x, lo[p].y, hi[p].y, v[p][j].x, v[p][j].y);
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_16816<OP>(acc[j], lo[p].z, hi[p].z, lo[p].w, hi[p].w, v[p][j].z, v[p][j].w);
#pragma unroll
            for (int j = 0; j < NT; j++)
                v[p][j] = load_x(j, k + AHEAD, p);
        }
        if (DEAL != DEAL_TEAMS && whole && k + 1 == range * cut >> b.shift) {
            /* The end of a range: sums as a team's are. Each lane keeps its own in shared memory, for want of registers, where no other warp
             * gives it anything. */
            float4 *own = decode_sums() + threadIdx.x / 32 * decode_sizes<FEW>::SUM_WARP + lane;
            if (DEAL == DEAL_BOTH)
                own += (threadIdx.x / 32 & (b.split - 1)) * 32;
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (cut > 1) {
                    const float4 before = own[j * 32];
                    acc[j][0] = before.x + acc[j][0], acc[j][1] = before.y + acc[j][1], acc[j][2] = before.z + acc[j][2],
                    acc[j][3] = before.w + acc[j][3];
                }
                if (k + 1 < range) {
                    own[j * 32] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
                    acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
                }
            }
            cut++;
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD * 2 * NT; i++)
        next[i / NT / 2][i / NT % 2][i % NT] = load_x(i % NT, i / NT / 2, i / NT % 2);
    constexpr bool EARLY = LORA && FEW;
    struct decode_step<NT> step; /* a fold's first */
    const int later = range > AHEAD ? AHEAD : 0, early = LORA && chunk->known ? 0 : later;
    for (int k = 0; k < range; k += AHEAD) {
        if (LORA && mine && !chunk->known && k == (FEW ? 0 : later)) {
            /* The adapter has come by now, and its addresses will have by the end. */
            chunk->known = true;
            chunk->adapter = lane < count ? chunk->adapter : -1;
            const int some = max(chunk->adapter, 0);
#pragma unroll
            for (int i = 0; i < (DOWN ? 1 : 2); i++) {
                const struct kernel_lora_entry *entry = lora_entry(f, some, expert, DOWN ? KERNEL_DOWN : KERNEL_GATE + i);
                chunk->b[i] = entry->b;
                chunk->rank[i] = entry->a ? entry->rank : 0;
            }
        }
        if (EARLY && mine && k == early) {
            struct decode_place p = place_begin<DOWN>(*chunk);
            if (place_next<DOWN>(&p, *chunk)) {
                step_load<DOWN, NT>(&step, f, *chunk, group, p);
                /* With few steps to come, looking for them takes what it gives. */
                if (max(p.r0, p.r1) > 16)
                    while (place_next<DOWN>(&p, *chunk))
                        step_prefetch<DOWN>(f, group, p);
            }
        }
        block(next[0], k);
        if (AHEAD == 2 && k + 1 < range)
            block(next[AHEAD - 1], k + 1);
    }

    if constexpr (FEW && DEAL != DEAL_WARPS) {
        if (!whole)
            team_give(acc, b, to, DEAL == DEAL_BOTH ? 0 : round >> b.shift, given);
    } else if (DEAL == DEAL_TEAMS) {
        team_add<NT>(acc, b, mine, round);
    }
    if (!mine)
        return;
    if (LORA)
        decode_fold<OP, DOWN, EARLY, NT>(acc, f, *chunk, group, &step);

    if (DOWN) {
        int c = group * 16 + 2 * g;
        float bias0 = f.weights.down_bias ? f.weights.down_bias[(size_t)expert * f.dims.hidden_pad + c] : 0.0f;
        float bias1 = f.weights.down_bias ? f.weights.down_bias[(size_t)expert * f.dims.hidden_pad + c + 1] : 0.0f;
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int n = j * 8 + 2 * t + i;
                if (n < count)
                    *reinterpret_cast<uint32_t *>((OP *)f.y + (size_t)(begin + n) * f.dims.hidden_pad + c) =
                        op_pair<OP>::narrow(acc[j][i] + bias0, acc[j][i + 2] + bias1);
            }
        }
    } else {
        int c = group * 8 + g;
        size_t at = (size_t)expert * f.dims.inter_pad + c;
        float gate_bias = f.weights.gate_bias ? f.weights.gate_bias[at] : 0.0f, up_bias = f.weights.up_bias ? f.weights.up_bias[at] : 0.0f;
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int n = j * 8 + 2 * t + i;
                if (n < count) {
                    float w = f.weights.weight_on_input ? f.batch.slot_weight[f.routing.order[begin + n]] : 1.0f;
                    float v = activate(f.weights.activation, w * (acc[j][i] + gate_bias), w * (acc[j][i + 2] + up_bias));
                    ((OP *)f.h)[(size_t)(begin + n) * f.dims.inter_pad + c] = op_from_f32<OP>(c < f.dims.inter ? v : 0.0f);
                }
            }
        }
    }
}

/* `shift`: logarithm of the ranges of k. */
template <typename OP, bool DOWN, bool LORA, bool FEW>
__global__ void __launch_bounds__(DECODE_THREADS, 2) decode_kernel(const __grid_constant__ struct kernel_forward f, int shift)
{
    constexpr enum decode_deal DEAL = !LORA ? DEAL_TEAMS : FEW ? DEAL_BOTH : DEAL_WARPS;
    __shared__ __align__(8) uint64_t barrier[DECODE_WARPS][RING], give[FEW ? DECODE_WARPS : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = f.dims.experts, groups = decode_groups<DOWN>(f.dims),
              blocks = decode_blocks<DOWN>(f.dims);
    const uint32_t ring = smem_address(shared) + warp * RING * CUDA_BLOCK_BYTES, bars = smem_address(barrier[warp]),
                   given = smem_address(give);
    struct few_slot slot = {FEW_NONE};
    int chunks, adapter = -1;
    if (FEW) {
        const bool there = threadIdx.x < f.batch.slots;
        if (there) {
            slot.expert = (uint32_t)__ldcg(f.batch.slot_expert + threadIdx.x); /* -1 is FEW_NONE */
            slot.row = __ldcg(f.batch.slot_row + threadIdx.x);
        }
        ring_init(bars);
        if (lane == 0)
            barrier_init(given + 8 * warp, 32 * max((1 << shift) - 1, 1));
        chunks = few_chunks(f, slot);
        if (LORA && there)
            adapter = __ldcg(&f.batch.row[slot.row].adapter);
    } else {
        ring_init(bars);
        offsets_fill(decode_offset(), f, CUDA_PORTABLE || DOWN || LORA);
        chunks = chunks_scan(decode_offset(), decode_first(experts), experts, decode_sizes<FEW>::CHUNK);
    }
    const unsigned pairs = (unsigned)chunks * groups, each = pairs / gridDim.x, rest = pairs - each * gridDim.x;

    struct decode_block b;
    b.shift = shift;
    b.split = 1 << shift;
    b.teams = DECODE_WARPS >> shift;
    b.range_begin = blocks * (warp & (b.split - 1)) >> shift;
    b.range = (blocks * ((warp & (b.split - 1)) + 1) >> shift) - b.range_begin;
    b.begin = each * blockIdx.x + min(blockIdx.x, rest);
    b.end = b.begin + each + (blockIdx.x < rest);
    b.left = b.begin + (b.end - b.begin) / DECODE_WARPS * DECODE_WARPS;
    int item = pair_first<DEAL>(b);

    struct decode_cursor fill;
    fill.chunk = -1;
    if (LORA && !FEW)
        launch_begin();
    cursor_set<DOWN, FEW, DEAL>(&fill, f, b, item);
    constexpr int TIMES = FEW ? 1 : RING; /* code that runs once comes from memory */
#pragma unroll(TIMES)
    for (int i = 0; i < RING; i++)
        ring_fill<DOWN, FEW, DEAL>(&fill, f, b, ring, bars, i, 0);
    if (LORA && FEW)
        few_order(f, slot, adapter);
    if (!LORA || FEW)
        launch_begin();
    struct decode_chunk chunk = {};
    chunk.number = -1;
    struct ring_cursor turn = {};
    for (int round = 0; item < b.end; item = pair_next<DEAL>(b, item), round++) {
        const int v = item / groups, group = item - v * groups;
        if (v != chunk.number) {
            const struct decode_rows c = chunk_rows<FEW>(f, v);
            const int at = c.begin + min(lane, c.count - 1);
            chunk.number = v;
            chunk.known = false;
            chunk.expert = c.expert;
            chunk.begin = c.begin;
            chunk.count = c.count;
            if (LORA || !DOWN)
                chunk.row = FEW ? few_table()->row_at[at] : f.batch.slot_row[f.routing.order[at]];
            if (LORA)
                chunk.adapter = FEW ? few_table()->adapter_at[at] : f.batch.row[chunk.row].adapter;
        }
        if constexpr (FEW)
            decode_pair<OP, DOWN, LORA, DEAL, FEW, 1>(f, b, &fill, &chunk, item, group, round, ring, bars, given, &turn);
        else if (chunk.count <= 8)
            decode_pair<OP, DOWN, LORA, DEAL, FEW, 1>(f, b, &fill, &chunk, item, group, round, ring, bars, given, &turn);
        else if (chunk.count <= 16)
            decode_pair<OP, DOWN, LORA, DEAL, FEW, 2>(f, b, &fill, &chunk, item, group, round, ring, bars, given, &turn);
        else
            decode_pair<OP, DOWN, LORA, DEAL, FEW, 4>(f, b, &fill, &chunk, item, group, round, ring, bars, given, &turn);
    }
#if CUDA_PORTABLE
    copy_async_wait<0>();
#endif
}

template <bool FEW> static size_t decode_shared(int experts)
{
    return RING_BYTES + decode_sizes<FEW>::SUM_BYTES + (FEW ? sizeof(struct decode_table) : 8 * ((size_t)experts + 1));
}

#if !CUDA_PORTABLE
#define DECODE_NAME(n) n##_sm90
#else
#define DECODE_NAME(n) n##_portable
#endif

/* Ranges of k, as a power of two: settled by the sizes. */
static int decode_shift(int blocks)
{
    int shift = 0;
    while (1 << shift < DECODE_WARPS && blocks >> (shift + 1) >= DECODE_RANGE)
        shift++;
    return shift;
}

template <typename OP, bool DOWN, bool FEW> static cudaError_t decode_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const int shift = decode_shift((DOWN ? f->dims.inter_pad : f->dims.hidden_pad) / CUDA_BLOCK_K);
    return launch(stream, f->lora.entry ? decode_kernel<OP, DOWN, true, FEW> : decode_kernel<OP, DOWN, false, FEW>,
                  dim3(2 * stream->processors), dim3(DECODE_THREADS), decode_shared<FEW>(f->dims.experts), *f, shift);
}

template <typename OP> static cudaError_t decode_any(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
#if !CUDA_PORTABLE
    if (cuda_few(f))
        return down ? decode_launch<OP, true, true>(stream, f) : decode_launch<OP, false, true>(stream, f);
#endif
    return down ? decode_launch<OP, true, false>(stream, f) : decode_launch<OP, false, false>(stream, f);
}

cudaError_t DECODE_NAME(cuda_decode)(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    return f->dims.op == DTYPE_BF16 ? decode_any<__nv_bfloat16>(stream, f, down) : decode_any<__half>(stream, f, down);
}

template <typename OP, bool DOWN, bool FEW> static cudaError_t decode_load_sizes()
{
    const size_t shared = decode_shared<FEW>(KERNEL_MAX_EXPERTS);
    cudaError_t e = load(decode_kernel<OP, DOWN, false, FEW>, shared);
    return e == cudaSuccess ? load(decode_kernel<OP, DOWN, true, FEW>, shared) : e;
}

template <typename OP, bool DOWN> static cudaError_t decode_load()
{
    cudaError_t e = decode_load_sizes<OP, DOWN, false>();
#if !CUDA_PORTABLE
    if (e == cudaSuccess)
        e = decode_load_sizes<OP, DOWN, true>();
#endif
    return e;
}

cudaError_t DECODE_NAME(cuda_load_decode)(void)
{
    cudaError_t e = decode_load<__nv_bfloat16, false>();
    if (e == cudaSuccess)
        e = decode_load<__nv_bfloat16, true>();
    if (e == cudaSuccess)
        e = decode_load<__half, false>();
    return e == cudaSuccess ? decode_load<__half, true>() : e;
}
