/* SPDX-License-Identifier: Apache-2.0
 *
 * The two products for few rows an expert: bound by reading each touched expert's weights once.
 *
 * Weights are the M operand of mma m16n8k16, rows of the batch the N operand, up to DECODE_CHUNK of one expert at a time. All
 * (chunk, group of 16 weight rows) pairs are dealt out evenly to the blocks of a grid that fills the device. k is cut into ranges, as
 * many as the model's sizes alone say; each is summed for itself, then the sums are added in order, so that what else is in the batch
 * changes no bit of a row. Each warp streams its weights, pair after pair, through a private ring of shared memory that is RING blocks
 * of 2 KiB deep and filled by bulk copies (sm_90) or cp.async (sm_80).
 *
 * Without adapters as many warps as there are ranges make a team: each takes its range of a pair, and one of them, another for every
 * pair, ends it. So a block's warps all end together, however few and long its pairs are. With adapters it is so where pairs are long
 * and too few for most warps to have one. Elsewhere a warp takes a pair's ranges in turn, to the same bits: a fold waits for its
 * loads, for which a whole team would wait, pair after pair. Adapters: a chunk holds runs of rows with one adapter; each run adds B s, with s masked to the run's rows, to
 * the whole sum.
 *
 * Without adapters the rings are filled before launch_wait (device.cuh), with adapters after: shrink's loads, each of which waits for
 * the one before, would queue behind all those weights.
 *
 * Compiled twice: -DCUDA_PORTABLE=0 for sm_90a, =1 for sm_80 and PTX.
 */
#include "kernels/cuda/device.cuh"

#define DECODE_WARPS 8
#define DECODE_THREADS (DECODE_WARPS * 32)
#define DECODE_CHUNK 32
#define DECODE_RANGE 3 /* blocks of k that a range has at least */
/* With adapters: blocks of k that a range has, and warps that there are for a pair, where teams are made, too. */
#define DECODE_TEAM_RANGE 8
#define DECODE_TEAM_WARPS 2
#define RING 3

#define RING_BYTES ((size_t)DECODE_WARPS * RING * CUDA_BLOCK_BYTES)
#define SUM_WARP (16 * DECODE_CHUNK / 4) /* float4 that hold a warp's sum of a whole chunk */
#define SUM_BYTES ((size_t)DECODE_WARPS * SUM_WARP * 16)

/* Shared memory: rings, then sums, then the experts' offsets and first chunks. */
extern __shared__ __align__(128) uint8_t shared[];

/* A block's share. What follows from the sizes alone is computed again where it is needed: registers are short. */
struct decode_block {
    int range_begin, range; /* this warp's blocks of k */
    int shift, split, teams; /* 1 << shift warps a team */
    int cuts; /* a warp's own range is 1 << cuts of the sizes' ranges */
    int end; /* of the pairs */
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
__device__ __forceinline__ int *decode_offset() { return (int *)(shared + RING_BYTES + SUM_BYTES); }
__device__ __forceinline__ int *decode_first(int experts) { return decode_offset() + experts + 1; }

/* Where a warp's next block of weights comes from. */
struct decode_cursor {
    const uint8_t *next, *expert;
    int item; /* the pair's number; at the end: none */
    int left; /* blocks of the range */
    int chunk; /* that `expert` was found for; -1: none */
};

template <bool DOWN>
__device__ __forceinline__ void cursor_set(struct decode_cursor *c, const struct kernel_forward &f, const struct decode_block &b, int item)
{
    const int groups = decode_groups<DOWN>(f.dims), blocks = decode_blocks<DOWN>(f.dims);
    c->item = item;
    c->left = b.range;
    if (item < b.end) {
        const int v = item / groups;
        if (v != c->chunk) {
            c->chunk = v;
            c->expert = (const uint8_t *)(DOWN ? f.weights.down : f.weights.gate_up) + (size_t)b.range_begin * CUDA_STRIP_BYTES +
                        (size_t)chunks_find(decode_first(f.dims.experts), f.dims.experts, v) * groups * blocks * CUDA_BLOCK_BYTES;
        }
        c->next = c->expert + group_offset(item - v * groups, blocks);
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
template <bool DOWN>
__device__ __forceinline__ void ring_fill(struct decode_cursor *c, const struct kernel_forward &f, const struct decode_block &b,
                                          uint32_t ring, uint32_t bars, int stage, uint32_t read)
{
    if (c->item < b.end) {
#if !CUDA_PORTABLE
        if (threadIdx.x % 32 == 0) {
            uint32_t bar = bars + 8 * stage;
            barrier_expect(bar, CUDA_BLOCK_BYTES | read);
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
            cursor_set<DOWN>(c, f, b, c->item + b.teams);
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

/* The chunk that a warp works on, kept from one pair to the next. Lane n keeps what concerns row n. */
struct decode_chunk {
    int number; /* -1: none */
    int expert, begin, count;
    int row; /* of x */
    int adapter; /* -1: none */
    uint64_t b[2]; /* of the adapter: gate's and up's, or down's */
    int rank[2]; /* 0: not adapted */
};

__device__ __forceinline__ void team_sync(const struct decode_block &b) { bar_sync(1 + (threadIdx.x / 32 >> b.shift), b.split * 32); }

/* Adds a team's sums, for the warp whose pair is `mine`. Where the halves of a warp's space are used in turn, the barrier of the
 * next pair is the one behind which nobody reads this pair's any more. */
template <int NT> __device__ __forceinline__ void team_add(float (&acc)[NT][4], const struct decode_block &b, bool mine, int round)
{
    if (b.split == 1)
        return;
    constexpr bool WHOLE = NT * 8 == DECODE_CHUNK;
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

/* acc += B s for every run of adapted rows. With few rows the loads of a step are under way while the one before is computed; with
 * more there are no registers for that, and other warps fill the time. */
template <typename OP, bool DOWN, int NT>
__device__ __forceinline__ void decode_fold(float (&acc)[NT][4], const struct kernel_forward &f, const struct decode_chunk &chunk,
                                            int group)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const size_t stride = (size_t)f.lora.max_rank * 2;
    const int b_rows = DOWN ? f.dims.hidden_pad : f.dims.inter_pad, row0 = DOWN ? group * 16 + 2 * g : group * 8 + g,
              row1 = DOWN ? row0 + 1 : row0;
    const uint8_t *s0 = (const uint8_t *)(DOWN ? f.s_down : f.s_gate) + (chunk.begin + g) * stride;
    const uint8_t *s1 = (const uint8_t *)f.s_up + (chunk.begin + g) * stride;
    unsigned left = __ballot_sync(~0u, chunk.adapter >= 0 && (chunk.rank[0] > 0 || (!DOWN && chunk.rank[1] > 0))), run = 0;
    const uint8_t *b0 = NULL, *b1 = NULL;
    int r0 = 0, r1 = 0, k = 0;
    constexpr bool AHEAD = NT == 1;
    struct decode_step<NT> now, next;
    bool have = false;
    for (;;) {
        /* On to the next 16 ranks, or to the next run. */
        k += 16;
        bool more = k < max(r0, r1);
        if (!more && left) {
            const int lead = __ffs(left) - 1, adapter = __shfl_sync(~0u, chunk.adapter, lead);
            run = __ballot_sync(~0u, chunk.adapter == adapter);
            left &= ~run;
            b0 = (const uint8_t *)__shfl_sync(~0u, chunk.b[0], lead);
            r0 = __shfl_sync(~0u, chunk.rank[0], lead);
            b1 = DOWN ? b0 : (const uint8_t *)__shfl_sync(~0u, chunk.b[1], lead);
            r1 = DOWN ? r0 : __shfl_sync(~0u, chunk.rank[1], lead);
            k = 0;
            more = true;
        }
        if (more) {
            next.a[0] = load_quad_b(b0, b_rows, row0, k, r0, t);
            next.a[1] = load_quad_b(b1, b_rows, row1, k, r1, t);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const bool in_run = run >> (j * 8 + g) & 1;
                next.s[0][j] = load_quad(s0 + j * 8 * stride, k, in_run ? r0 : 0, t);
                if (!DOWN)
                    next.s[1][j] = load_quad(s1 + j * 8 * stride, k, in_run ? r1 : 0, t);
            }
        }
        if (!AHEAD && more) {
            now = next;
            have = true;
        }
        if (have) {
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (DOWN) {
                    mma_16816<OP>(acc[j], now.a[0].lo, now.a[1].lo, now.a[0].hi, now.a[1].hi, now.s[0][j].lo, now.s[0][j].hi);
                } else {
                    /* 8 ranks of both in one: gate's rows and s in the lower half of k, up's in the upper. */
                    mma_16816<OP>(acc[j], now.a[0].lo, 0, 0, now.a[1].lo, now.s[0][j].lo, now.s[1][j].lo);
                    mma_16816<OP>(acc[j], now.a[0].hi, 0, 0, now.a[1].hi, now.s[0][j].hi, now.s[1][j].hi);
                }
            }
        }
        if (!more)
            break;
        if (AHEAD) {
            now = next;
            have = true;
        } else {
            have = false;
        }
    }
}

template <typename OP, bool DOWN, bool LORA, bool TEAM, int NT>
__device__ __forceinline__ void decode_pair(const struct kernel_forward &f, const struct decode_block &b, struct decode_cursor *fill,
                                            struct decode_chunk *chunk, int group, bool fresh, int round, uint32_t ring, uint32_t bars,
                                            uint32_t *turn)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, expert = chunk->expert, begin = chunk->begin, count = chunk->count;
    const size_t ldx = DOWN ? f.dims.inter_pad : f.dims.hidden_pad;
    const OP *x[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const int n = j * 8 + g, row = DOWN ? begin + n : __shfl_sync(~0u, chunk->row, n);
        x[j] = n < count ? (const OP *)(DOWN ? f.h : f.x) + row * ldx + b.range_begin * CUDA_BLOCK_K + 16 * t : NULL;
    }

    /* x of the blocks to come: with few rows there are registers for two. */
    constexpr int AHEAD = NT <= (LORA ? 1 : 2) ? 2 : 1;
    float acc[NT][4] = {};
    int cut = 1;
    uint4 next[AHEAD][2][NT];
    auto load_x = [&](int j, int k, int p) {
        return x[j] && k < b.range ? *reinterpret_cast<const uint4 *>(x[j] + k * CUDA_BLOCK_K + 8 * p) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < AHEAD * 2 * NT; i++)
        next[i / NT / 2][i / NT % 2][i % NT] = load_x(i % NT, i / NT / 2, i / NT % 2);
    const bool mine = (threadIdx.x / 32 & (b.split - 1)) == (round & (b.split - 1)); /* this warp ends the pair */
    for (int k = 0; k < b.range; k++) {
        if (LORA && fresh && k == (b.range > 1)) {
            /* The adapter has come by now, and its addresses will have by the end. */
            chunk->adapter = lane < count ? chunk->adapter : -1;
            const int some = max(chunk->adapter, 0);
#pragma unroll
            for (int i = 0; i < (DOWN ? 1 : 2); i++) {
                const struct kernel_lora_entry *entry = lora_entry(f, some, expert, DOWN ? KERNEL_DOWN : KERNEL_GATE + i);
                chunk->b[i] = entry->b;
                chunk->rank[i] = entry->a ? entry->rank : 0;
            }
        }
        int stage = *turn % RING;
        ring_wait(bars, stage, *turn / RING & 1);
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
        ring_fill<DOWN>(fill, f, b, ring, bars, stage, read);
        ++*turn;
#pragma unroll
        for (int p = 0; p < 2; p++) {
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_16816<OP>(acc[j], lo[p].x, hi[p].x, lo[p].y, hi[p].y, next[0][p][j].x, next[0][p][j].y);
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_16816<OP>(acc[j], lo[p].z, hi[p].z, lo[p].w, hi[p].w, next[0][p][j].z, next[0][p][j].w);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                next[0][p][j] = next[AHEAD - 1][p][j];
                next[AHEAD - 1][p][j] = load_x(j, k + AHEAD, p);
            }
        }
        if (!TEAM && k + 1 == b.range * cut >> b.cuts) {
            /* The end of a range: sums as a team's are. Each lane keeps its own in shared memory, for want of registers. */
            float4 *own = decode_sums() + threadIdx.x / 32 * SUM_WARP + lane;
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (cut > 1) {
                    const float4 v = own[j * 32];
                    acc[j][0] = v.x + acc[j][0], acc[j][1] = v.y + acc[j][1], acc[j][2] = v.z + acc[j][2], acc[j][3] = v.w + acc[j][3];
                }
                if (k + 1 < b.range) {
                    own[j * 32] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
                    acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
                }
            }
            cut++;
        }
    }

    if (TEAM)
        team_add<NT>(acc, b, mine, round);
    if (!mine)
        return;
    if (LORA)
        decode_fold<OP, DOWN, NT>(acc, f, *chunk, group);

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

/* TEAM: warps make teams. */
template <typename OP, bool DOWN, bool LORA, bool TEAM>
__global__ void __launch_bounds__(DECODE_THREADS, 2) decode_kernel(const __grid_constant__ struct kernel_forward f, int shift)
{
    __shared__ __align__(8) uint64_t barrier[DECODE_WARPS][RING];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = f.dims.experts, groups = decode_groups<DOWN>(f.dims),
              blocks = decode_blocks<DOWN>(f.dims);
    uint32_t ring = smem_address(shared) + warp * RING * CUDA_BLOCK_BYTES, bars = smem_address(barrier[warp]);
    int *const offset = decode_offset(), *const first = decode_first(experts);
    ring_init(bars);
    offsets_fill(offset, f, CUDA_PORTABLE || DOWN || LORA);
    const unsigned pairs = (unsigned)chunks_scan(offset, first, experts, DECODE_CHUNK) * groups, each = pairs / gridDim.x,
                   rest = pairs - each * gridDim.x;

    struct decode_block b;
    b.shift = TEAM ? shift : 0;
    b.split = 1 << b.shift;
    b.teams = DECODE_WARPS >> b.shift;
    b.cuts = TEAM ? 0 : shift;
    b.range_begin = blocks * (warp & (b.split - 1)) >> b.shift;
    b.range = (blocks * ((warp & (b.split - 1)) + 1) >> b.shift) - b.range_begin;
    int item = each * blockIdx.x + min(blockIdx.x, rest);
    b.end = item + each + (blockIdx.x < rest);
    item += warp >> b.shift;

    struct decode_cursor fill;
    fill.chunk = -1;
    if (LORA)
        launch_begin();
    cursor_set<DOWN>(&fill, f, b, item);
    for (int i = 0; i < RING; i++)
        ring_fill<DOWN>(&fill, f, b, ring, bars, i, 0);
    if (!LORA)
        launch_begin();
    struct decode_chunk chunk = {};
    chunk.number = -1;
    uint32_t turn = 0;
    for (int round = 0; item < b.end; item += b.teams, round++) {
        const int v = item / groups, group = item - v * groups;
        const bool fresh = v != chunk.number;
        if (fresh) {
            chunk.number = v;
            chunk.expert = chunks_find(first, experts, v);
            chunk.begin = offset[chunk.expert] + (v - first[chunk.expert]) * DECODE_CHUNK;
            chunk.count = min(DECODE_CHUNK, offset[chunk.expert + 1] - chunk.begin);
            if (LORA || !DOWN)
                chunk.row = f.batch.slot_row[f.routing.order[chunk.begin + min(lane, chunk.count - 1)]];
            if (LORA)
                chunk.adapter = f.batch.row[chunk.row].adapter;
        }
        if (chunk.count <= 8)
            decode_pair<OP, DOWN, LORA, TEAM, 1>(f, b, &fill, &chunk, group, fresh, round, ring, bars, &turn);
        else if (chunk.count <= 16)
            decode_pair<OP, DOWN, LORA, TEAM, 2>(f, b, &fill, &chunk, group, fresh, round, ring, bars, &turn);
        else
            decode_pair<OP, DOWN, LORA, TEAM, 4>(f, b, &fill, &chunk, group, fresh, round, ring, bars, &turn);
    }
#if CUDA_PORTABLE
    copy_async_wait<0>();
#endif
}

static size_t decode_shared(int experts) { return RING_BYTES + SUM_BYTES + 8 * ((size_t)experts + 1); }

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

template <typename OP, bool DOWN> static cudaError_t decode_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const int blocks = (DOWN ? f->dims.inter_pad : f->dims.hidden_pad) / CUDA_BLOCK_K, shift = decode_shift(blocks);
    const int64_t pairs = (int64_t)f->batch.slots * (DOWN ? f->dims.hidden_pad / 16 : f->dims.inter_pad / 8); /* at most */
    const bool team = blocks >> shift >= DECODE_TEAM_RANGE && pairs * DECODE_TEAM_WARPS <= 2 * stream->processors * DECODE_WARPS;
    void (*kernel)(struct kernel_forward, int) = decode_kernel<OP, DOWN, false, true>;
    if (f->lora.entry)
        kernel = team ? decode_kernel<OP, DOWN, true, true> : decode_kernel<OP, DOWN, true, false>;
    return launch(stream, kernel, dim3(2 * stream->processors), dim3(DECODE_THREADS), decode_shared(f->dims.experts), *f, shift);
}

template <typename OP> static cudaError_t decode_any(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    return down ? decode_launch<OP, true>(stream, f) : decode_launch<OP, false>(stream, f);
}

cudaError_t DECODE_NAME(cuda_decode)(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    return f->dims.op == DTYPE_BF16 ? decode_any<__nv_bfloat16>(stream, f, down) : decode_any<__half>(stream, f, down);
}

template <typename OP, bool DOWN> static cudaError_t decode_load()
{
    size_t shared = decode_shared(KERNEL_MAX_EXPERTS);
    cudaError_t e = load(decode_kernel<OP, DOWN, false, true>, shared);
    if (e == cudaSuccess)
        e = load(decode_kernel<OP, DOWN, true, true>, shared);
    return e == cudaSuccess ? load(decode_kernel<OP, DOWN, true, false>, shared) : e;
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
