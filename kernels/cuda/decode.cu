/* SPDX-License-Identifier: Apache-2.0
 *
 * The two products for few rows an expert: bound by reading each touched expert's weights once.
 *
 * Weights are the M operand of mma m16n8k16, rows of the batch the N operand, up to DECODE_CHUNK of one expert at a time. All
 * (chunk, group of 16 weight rows) pairs are dealt out evenly to the blocks of a grid that fills the device; a block's warps
 * work on groups of their own, each streaming through a private ring of shared memory that is RING blocks of 2 KiB deep, so no
 * warp ever waits for another. The ring is filled by bulk copies (sm_90) or cp.async (sm_80); x comes through L1, which is what
 * the ring's size is taken from: 6 blocks were a tenth slower than 3.
 * Every output element is one chain of matrix instructions over k, then the adapter's over its rank: what else is in the batch
 * changes nothing. Adapters: a chunk holds runs of rows with one adapter; each run adds B s with s masked to the run's rows.
 *
 * Compiled twice: -DCUDA_PORTABLE=0 for sm_90a, =1 for sm_80 and PTX.
 */
#include "kernels/cuda/device.cuh"

#define DECODE_WARPS 8
#define DECODE_THREADS (DECODE_WARPS * 32)
#define DECODE_CHUNK 32
#define RING 3

#define RING_BYTES ((size_t)DECODE_WARPS * RING * CUDA_BLOCK_BYTES)

/* Where a warp's next block of weights comes from. */
struct decode_cursor {
    const uint8_t *next;
    int item; /* the pair's number; at the end: none */
    int left; /* blocks of the pair */
};

struct decode_block {
    const int *offset, *first; /* [experts + 1] in shared memory */
    const uint8_t *weights;
    size_t expert_bytes;
    int groups, blocks; /* of an expert; of a group */
    int end; /* of this block's pairs */
};

__device__ __forceinline__ void cursor_set(struct decode_cursor *c, const struct decode_block &b, int experts, int item)
{
    c->item = item;
    c->left = b.blocks;
    if (item < b.end) {
        int v = item / b.groups, e = chunks_find(b.first, experts, v);
        c->next = b.weights + e * b.expert_bytes + group_offset(item - v * b.groups, b.blocks);
    }
}

__device__ __forceinline__ void ring_init(uint32_t bars)
{
#if !CUDA_PORTABLE
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < RING; i++)
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bars + 8 * i) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
}

/* Starts the copy of the cursor's block into stage `stage`; with no block left, keeps the count of copies right. */
__device__ __forceinline__ void ring_fill(struct decode_cursor *c, const struct decode_block &b, int experts, uint32_t ring, uint32_t bars,
                                          int stage)
{
    if (c->item < b.end) {
#if !CUDA_PORTABLE
        if (threadIdx.x % 32 == 0) {
            uint32_t bar = bars + 8 * stage;
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "n"(CUDA_BLOCK_BYTES) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             ring + stage * CUDA_BLOCK_BYTES),
                         "l"(c->next), "n"(CUDA_BLOCK_BYTES), "r"(bar)
                         : "memory");
        }
#else
#pragma unroll
        for (int i = 0; i < CUDA_BLOCK_BYTES / 512; i++)
            copy_async_16(ring + stage * CUDA_BLOCK_BYTES + i * 512 + threadIdx.x % 32 * 16, c->next + i * 512 + threadIdx.x % 32 * 16,
                          true);
#endif
        c->next += CUDA_STRIP_BYTES;
        if (--c->left == 0)
            cursor_set(c, b, experts, c->item + DECODE_WARPS);
    }
#if CUDA_PORTABLE
    copy_async_commit();
#endif
}

__device__ __forceinline__ void ring_wait(uint32_t bars, int stage, uint32_t phase)
{
#if !CUDA_PORTABLE
    asm volatile(
        "{\n .reg .pred p;\n WAIT_%=:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @!p bra WAIT_%=;\n }" ::"r"(bars + 8 * stage),
        "r"(phase)
        : "memory");
#else
    copy_async_wait<RING - 1>();
    __syncwarp();
#endif
}

/* What lane n keeps of row n of a chunk, from one pair of the chunk to the next. */
struct decode_rows {
    int chunk; /* -1: of none */
    int adapter;
    struct kernel_lora_entry entry[2]; /* gate and up, or down */
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

/* acc += B s for every run of adapted rows. With few rows the loads of a step are under way while the one before is computed; with
 * more there are no registers for that, and other warps fill the time. */
template <typename OP, bool DOWN, int NT>
__device__ __forceinline__ void decode_fold(float (&acc)[NT][4], const struct kernel_forward &f, const struct decode_rows &rows, int group,
                                            int begin)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const size_t stride = (size_t)f.lora.max_rank * 2;
    const int b_rows = DOWN ? f.dims.hidden_pad : f.dims.inter_pad, row0 = DOWN ? group * 16 + 2 * g : group * 8 + g,
              row1 = DOWN ? row0 + 1 : row0;
    const uint8_t *s0 = (const uint8_t *)(DOWN ? f.s_down : f.s_gate) + (begin + g) * stride;
    const uint8_t *s1 = (const uint8_t *)f.s_up + (begin + g) * stride;
    unsigned left = __ballot_sync(~0u, rows.adapter >= 0 && (rows.entry[0].a != 0 || (!DOWN && rows.entry[1].a != 0))), run = 0;
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
            const int lead = __ffs(left) - 1, adapter = __shfl_sync(~0u, rows.adapter, lead);
            run = __ballot_sync(~0u, rows.adapter == adapter);
            left &= ~run;
            b0 = (const uint8_t *)__shfl_sync(~0u, rows.entry[0].b, lead);
            r0 = __shfl_sync(~0u, rows.entry[0].a ? rows.entry[0].rank : 0, lead);
            b1 = DOWN ? b0 : (const uint8_t *)__shfl_sync(~0u, rows.entry[1].b, lead);
            r1 = DOWN ? r0 : __shfl_sync(~0u, rows.entry[1].a ? rows.entry[1].rank : 0, lead);
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

template <typename OP, bool DOWN, bool LORA, int NT>
__device__ __forceinline__ void decode_pair(const struct kernel_forward &f, const struct decode_block &b, struct decode_cursor *fill,
                                            struct decode_rows *rows, int number, int expert, int group, int begin, int count,
                                            uint32_t ring, uint32_t bars, uint32_t *turn)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const size_t ldx = DOWN ? f.dims.inter_pad : f.dims.hidden_pad;
    const OP *x[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        int n = j * 8 + g;
        x[j] = NULL;
        if (n < count)
            x[j] = DOWN ? (const OP *)f.h + (size_t)(begin + n) * ldx
                        : (const OP *)f.x + (size_t)f.batch.slot_row[f.routing.order[begin + n]] * ldx;
        if (x[j])
            x[j] += 16 * t;
    }
    const bool fresh = LORA && rows->chunk != number;
    if (fresh) {
        rows->chunk = number;
        rows->adapter = adapter_at(f, begin + min(lane, count - 1));
    }

    /* x of the blocks to come: with few rows there are registers for two. */
    constexpr int AHEAD = NT <= 2 ? 2 : 1;
    float acc[NT][4] = {};
    uint4 next[AHEAD][NT][2];
    auto load_x = [&](int j, int k, int p) {
        return x[j] && k < b.blocks ? *reinterpret_cast<const uint4 *>(x[j] + (size_t)k * CUDA_BLOCK_K + 8 * p) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < AHEAD * NT * 2; i++)
        next[i / 2 / NT][i / 2 % NT][i % 2] = load_x(i / 2 % NT, i / 2 / NT, i % 2);
    for (int k = 0; k < b.blocks; k++) {
        if (LORA && fresh && k == (b.blocks > 1)) {
            /* The adapters have come by now, and the entries will have by the end. */
            rows->adapter = lane < count ? rows->adapter : -1;
            const int some = max(rows->adapter, 0);
            rows->entry[0] = *lora_entry(f, some, expert, DOWN ? KERNEL_DOWN : KERNEL_GATE);
            if (!DOWN)
                rows->entry[1] = *lora_entry(f, some, expert, KERNEL_UP);
        }
        uint4 now[NT][2];
#pragma unroll
        for (int i = 0; i < NT * 2; i++) {
            const int j = i / 2, p = i % 2;
            now[j][p] = next[0][j][p];
            if (AHEAD == 2)
                next[0][j][p] = next[AHEAD - 1][j][p];
            next[AHEAD - 1][j][p] = load_x(j, k + AHEAD, p);
        }
        int stage = *turn % RING;
        ring_wait(bars, stage, *turn / RING & 1);
        uint32_t row = ring + stage * CUDA_BLOCK_BYTES + g * 128;
        uint4 lo[2], hi[2];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t chunk = ((2 * t + p) ^ g) * 16;
            lo[p] = shared_load_16(row + chunk);
            hi[p] = shared_load_16(row + 1024 + chunk);
        }
        __syncwarp();
        ring_fill(fill, b, f.dims.experts, ring, bars, stage);
        ++*turn;
#pragma unroll
        for (int p = 0; p < 2; p++) {
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_16816<OP>(acc[j], lo[p].x, hi[p].x, lo[p].y, hi[p].y, now[j][p].x, now[j][p].y);
#pragma unroll
            for (int j = 0; j < NT; j++)
                mma_16816<OP>(acc[j], lo[p].z, hi[p].z, lo[p].w, hi[p].w, now[j][p].z, now[j][p].w);
        }
    }

    if (LORA)
        decode_fold<OP, DOWN, NT>(acc, f, *rows, group, begin);

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

template <typename OP, bool DOWN, bool LORA>
__global__ void __launch_bounds__(DECODE_THREADS, 2) decode_kernel(const __grid_constant__ struct kernel_forward f)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(8) uint64_t barrier[DECODE_WARPS][RING];
    const int warp = threadIdx.x / 32, experts = f.dims.experts;
    uint32_t ring = smem_address(shared) + warp * RING * CUDA_BLOCK_BYTES, bars = smem_address(barrier[warp]);
    int *offset = (int *)(shared + RING_BYTES), *first = offset + experts + 1;
    ring_init(bars);
    launch_begin();
    offsets_fill(offset, f, true);
    int chunks = chunks_scan(offset, first, experts, DECODE_CHUNK);

    struct decode_block b;
    b.offset = offset;
    b.first = first;
    b.weights = (const uint8_t *)(DOWN ? f.weights.down : f.weights.gate_up);
    b.groups = DOWN ? f.dims.hidden_pad / 16 : f.dims.inter_pad / 8;
    b.blocks = (DOWN ? f.dims.inter_pad : f.dims.hidden_pad) / CUDA_BLOCK_K;
    b.expert_bytes = (size_t)b.groups * b.blocks * CUDA_BLOCK_BYTES;
    int64_t pairs = (int64_t)chunks * b.groups;
    int item = (int)(pairs * blockIdx.x / gridDim.x) + warp;
    b.end = (int)(pairs * (blockIdx.x + 1) / gridDim.x);

    struct decode_cursor fill;
    cursor_set(&fill, b, experts, item);
    for (int i = 0; i < RING; i++)
        ring_fill(&fill, b, experts, ring, bars, i);
    struct decode_rows rows = {};
    rows.chunk = -1;
    uint32_t turn = 0;
    for (; item < b.end; item += DECODE_WARPS) {
        int v = item / b.groups, e = chunks_find(first, experts, v), group = item - v * b.groups;
        int begin = offset[e] + (v - first[e]) * DECODE_CHUNK, count = min(DECODE_CHUNK, offset[e + 1] - begin);
        if (count <= 8)
            decode_pair<OP, DOWN, LORA, 1>(f, b, &fill, &rows, v, e, group, begin, count, ring, bars, &turn);
        else if (count <= 16)
            decode_pair<OP, DOWN, LORA, 2>(f, b, &fill, &rows, v, e, group, begin, count, ring, bars, &turn);
        else
            decode_pair<OP, DOWN, LORA, 4>(f, b, &fill, &rows, v, e, group, begin, count, ring, bars, &turn);
    }
#if CUDA_PORTABLE
    copy_async_wait<0>();
#endif
}

static size_t decode_shared(int experts) { return RING_BYTES + 8 * ((size_t)experts + 1); }

#if !CUDA_PORTABLE
#define DECODE_NAME(n) n##_sm90
#else
#define DECODE_NAME(n) n##_portable
#endif

template <typename OP, bool DOWN, bool LORA> static cudaError_t decode_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    return launch(stream, decode_kernel<OP, DOWN, LORA>, dim3(2 * stream->processors), dim3(DECODE_THREADS), decode_shared(f->dims.experts),
                  *f);
}

template <typename OP> static cudaError_t decode_any(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    if (f->lora.entry)
        return down ? decode_launch<OP, true, true>(stream, f) : decode_launch<OP, false, true>(stream, f);
    return down ? decode_launch<OP, true, false>(stream, f) : decode_launch<OP, false, false>(stream, f);
}

cudaError_t DECODE_NAME(cuda_decode)(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    return f->dims.op == DTYPE_BF16 ? decode_any<__nv_bfloat16>(stream, f, down) : decode_any<__half>(stream, f, down);
}

template <typename OP> static cudaError_t decode_load()
{
    size_t shared = decode_shared(KERNEL_MAX_EXPERTS);
    cudaError_t e = load(decode_kernel<OP, false, false>, shared);
    if (e == cudaSuccess)
        e = load(decode_kernel<OP, false, true>, shared);
    if (e == cudaSuccess)
        e = load(decode_kernel<OP, true, false>, shared);
    return e == cudaSuccess ? load(decode_kernel<OP, true, true>, shared) : e;
}

cudaError_t DECODE_NAME(cuda_load_decode)(void)
{
    cudaError_t e = decode_load<__nv_bfloat16>();
    return e == cudaSuccess ? decode_load<__half>() : e;
}
