/* SPDX-License-Identifier: Apache-2.0
 *
 * s = op(scale * A v) for the adapted positions, for gate and up in one pass over x, or for down.
 *
 * A unit is up to SHRINK_ROWS positions of one segment, cut at multiples of SHRINK_ROWS: a unit begins where a segment begins
 * or at such a multiple, so units are found without a list of them. Ranks are the M operand of mma m16n8k16, up to SHRINK_TILES
 * tiles of 16 in registers at once (gate's and up's are counted as one row of tiles), positions the N operand; a block's 8 warps
 * share out k, and their sums are added in order. A row's s depends on nothing but its own v and adapter.
 *
 * Up to SHRINK_FEW slots most segments are one position. Then a block takes a slot and a tile of 16 ranks, with the same
 * instructions in the same order: which A it needs follows from the batch alone, so it is fetched while routing is still under way.
 * Where the products, too, find out for themselves (cuda_few), they may begin at once.
 * On an H200, shape and rank 16 as in shrink_sm90.cu, in us of shrink_gate_up + shrink_down: T = 1 1.9 + 1.7, 8 4.8 + 2.6, 15 8.0 + 3.2.
 */
#include "kernels/cuda/device.cuh"

#define SHRINK_WARPS 8
#define SHRINK_THREADS (SHRINK_WARPS * 32)
#define SHRINK_ROWS 32
#define SHRINK_TILES 2
#define SHRINK_FEW 512
#define SHRINK_FEW_BLOCKS 4 /* of k, of a warp at a time */

/* The last segment that begins at or before `position`; for a whole warp. */
__device__ __forceinline__ int segment_find(const int32_t *begin, int count, int position)
{
    int low = 0, high = count;
    while (high - low > 1) {
        int step = (high - low + 31) / 32, probe = low + step * (threadIdx.x % 32);
        bool below = probe < high && begin[probe] <= position;
        int last = 31 - __clz(__ballot_sync(~0u, below));
        low += step * last;
        high = min(high, low + step);
    }
    return low;
}

/* One unit: `count` positions from `begin` on, at most 8 N. */
template <typename OP, bool DOWN, int N>
__device__ __forceinline__ void shrink_unit(const struct kernel_forward &f, float (*partial)[SHRINK_TILES * 16 * SHRINK_ROWS], int begin,
                                            int count, int expert, int adapter)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const size_t ldx = DOWN ? f.dims.inter_pad : f.dims.hidden_pad;
    const int blocks = ldx / CUDA_BLOCK_K, k_begin = blocks * warp / SHRINK_WARPS, k_end = blocks * (warp + 1) / SHRINK_WARPS;
    struct kernel_lora_entry e0 = *lora_entry(f, adapter, expert, DOWN ? KERNEL_DOWN : KERNEL_GATE), e1 = {};
    if (!DOWN)
        e1 = *lora_entry(f, adapter, expert, KERNEL_UP);
    /* Rows of tiles: e0's, then e1's. Projections that share `a` share s, too. */
    const bool same = e0.a == e1.a;
    const int tiles0 = e0.a ? (e0.rank + 15) / 16 : 0, tiles1 = e1.a && !same ? (e1.rank + 15) / 16 : 0;

    const OP *x[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        int n = j * 8 + g, p = begin + n;
        x[j] = NULL;
        if (n < count)
            x[j] =
                (DOWN ? (const OP *)f.h + (size_t)p * ldx : (const OP *)f.x + (size_t)f.batch.slot_row[f.routing.order[p]] * ldx) + 16 * t;
    }
    for (int tile0 = 0; tile0 < tiles0 + tiles1; tile0 += SHRINK_TILES) {
        const OP *lo[SHRINK_TILES], *hi[SHRINK_TILES];
        size_t block[SHRINK_TILES]; /* elements of a block of A */
        float acc[SHRINK_TILES][N][4] = {};
#pragma unroll
        for (int m = 0; m < SHRINK_TILES; m++) {
            int tile = tile0 + m;
            bool second = tile >= tiles0;
            const OP *a = (const OP *)(second ? e1.a : e0.a);
            int r = (second ? tile - tiles0 : tile) * 16 + g, rank = tile < tiles0 + tiles1 ? (second ? e1.rank : e0.rank) : 0;
            lo[m] = r < rank ? a + r * CUDA_BLOCK_K : NULL;
            hi[m] = r + 8 < rank ? a + (r + 8) * CUDA_BLOCK_K : NULL;
            block[m] = (size_t)rank * CUDA_BLOCK_K;
        }
#pragma unroll(N == 1 ? 4 : 2)
        for (int k = k_begin; k < k_end; k++) {
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const size_t at = (size_t)k * CUDA_BLOCK_K + 8 * p, a_at = ((2 * t + p) ^ g) * 8;
                const uint4 zero = make_uint4(0, 0, 0, 0);
                uint4 v[N], al[SHRINK_TILES], ah[SHRINK_TILES];
#pragma unroll
                for (int m = 0; m < SHRINK_TILES; m++) {
                    al[m] = lo[m] ? *reinterpret_cast<const uint4 *>(lo[m] + k * block[m] + a_at) : zero;
                    ah[m] = hi[m] ? *reinterpret_cast<const uint4 *>(hi[m] + k * block[m] + a_at) : zero;
                }
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[j] = x[j] ? *reinterpret_cast<const uint4 *>(x[j] + at) : zero;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    if (j * 8 >= count)
                        break;
#pragma unroll
                    for (int m = 0; m < SHRINK_TILES; m++) {
                        mma_16816<OP>(acc[m][j], al[m].x, ah[m].x, al[m].y, ah[m].y, v[j].x, v[j].y);
                        mma_16816<OP>(acc[m][j], al[m].z, ah[m].z, al[m].w, ah[m].w, v[j].z, v[j].w);
                    }
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < SHRINK_TILES; m++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int r = m * 16 + g + (i / 2) * 8, n = j * 8 + 2 * t + i % 2;
                    partial[warp][n * (SHRINK_TILES * 16) + r] = acc[m][j][i];
                }
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count * SHRINK_TILES * 16; i += SHRINK_THREADS) {
            int n = i / (SHRINK_TILES * 16), tile = tile0 + i % (SHRINK_TILES * 16) / 16;
            bool second = tile >= tiles0;
            int r = (second ? tile - tiles0 : tile) * 16 + i % 16;
            if (tile >= tiles0 + tiles1 || r >= (second ? e1.rank : e0.rank))
                continue;
            float sum = 0.0f;
            for (int w = 0; w < SHRINK_WARPS; w++)
                sum += partial[w][i];
            OP v = op_from_f32<OP>((second ? e1.scale : e0.scale) * sum);
            size_t at = (size_t)(begin + n) * f.lora.max_rank + r;
            if (DOWN) {
                ((OP *)f.s_down)[at] = v;
            } else {
                if (!second)
                    ((OP *)f.s_gate)[at] = v;
                if (second || same)
                    ((OP *)f.s_up)[at] = v;
            }
        }
    }
}

template <typename OP, bool DOWN>
__global__ void __launch_bounds__(SHRINK_THREADS, 2) shrink_kernel(const __grid_constant__ struct kernel_forward f)
{
    __shared__ float partial[SHRINK_WARPS][SHRINK_TILES * 16 * SHRINK_ROWS];
    __shared__ int unit_begin, unit_end, unit_expert, unit_adapter;
    launch_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int segments = *f.routing.segment_count, valid = f.routing.expert_offset[f.dims.experts];
    const int units = segments + (valid + SHRINK_ROWS - 1) / SHRINK_ROWS;

    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        __syncthreads();
        if (warp == 0) {
            int s = unit, begin;
            if (unit < segments) {
                begin = f.routing.segment_begin[s];
            } else {
                begin = (unit - segments) * SHRINK_ROWS;
                s = segment_find(f.routing.segment_begin, segments, begin);
                if (f.routing.segment_begin[s] == begin)
                    s = -1; /* the segment's own unit does it */
            }
            if (lane == 0) {
                unit_adapter = s < 0 ? -1 : f.routing.segment_adapter[s];
                if (unit_adapter >= 0) {
                    unit_begin = begin;
                    unit_end = min(f.routing.segment_begin[s + 1], (begin / SHRINK_ROWS + 1) * SHRINK_ROWS);
                    unit_expert = f.routing.segment_expert[s];
                }
            }
        }
        __syncthreads();
        if (unit_adapter < 0)
            continue;
        if (unit_end - unit_begin <= 8)
            shrink_unit<OP, DOWN, 1>(f, partial, unit_begin, unit_end - unit_begin, unit_expert, unit_adapter);
        else
            shrink_unit<OP, DOWN, SHRINK_ROWS / 8>(f, partial, unit_begin, unit_end - unit_begin, unit_expert, unit_adapter);
    }
}

/* ---- few slots ----------------------------------------------------------------------------------------- */

__device__ __forceinline__ uint4 load_16(const void *p) { return __ldcg(reinterpret_cast<const uint4 *>(p)); }

/* Block (slot, tile): gate's tiles (down's), then up's, in turn. */
template <typename OP, bool DOWN>
__global__ void __launch_bounds__(SHRINK_THREADS, 2) shrink_few_kernel(const __grid_constant__ struct kernel_forward f, bool early)
{
    if (early)
        launch_release();
    auto begin = [&] {
        launch_wait();
        if (!early)
            launch_release();
    };
    __shared__ float partial[2][SHRINK_WARPS][16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, slot = blockIdx.x;
    const size_t ldx = DOWN ? f.dims.inter_pad : f.dims.hidden_pad;
    const int blocks = ldx / CUDA_BLOCK_K, k_begin = blocks * warp / SHRINK_WARPS, k_end = blocks * (warp + 1) / SHRINK_WARPS;
    const bool up = !DOWN && blockIdx.y % 2;
    const int expert = __ldcg(f.batch.slot_expert + slot), row = __ldcg(f.batch.slot_row + slot),
              adapter = __ldcg(&f.batch.row[row].adapter);
    struct kernel_lora_entry e = {};
    bool same = false;
    if (expert >= 0 && adapter >= 0) {
        e = *lora_entry(f, adapter, expert, DOWN ? KERNEL_DOWN : up ? KERNEL_UP : KERNEL_GATE);
        if (!DOWN)
            same = e.a == lora_entry(f, adapter, expert, up ? KERNEL_GATE : KERNEL_UP)->a;
    }
    const int tiles = e.a && !(up && same) ? (e.rank + 15) / 16 : 0, tile0 = DOWN ? blockIdx.y : blockIdx.y / 2,
              step = DOWN ? gridDim.y : gridDim.y / 2;
    bool waited = false;
    int position = 0, turn = 0;
    for (int tile = tile0; tile < tiles; tile += step, turn ^= 1) {
        const bool real0 = tile * 16 + g < e.rank, real1 = tile * 16 + 8 + g < e.rank;
        const OP *a = (const OP *)e.a + (tile * 16 + g) * CUDA_BLOCK_K;
        const size_t block = (size_t)e.rank * CUDA_BLOCK_K;
        float acc[4] = {};
        for (int k0 = k_begin; k0 < k_end; k0 += SHRINK_FEW_BLOCKS) {
            const uint4 zero = make_uint4(0, 0, 0, 0);
            uint4 lo[SHRINK_FEW_BLOCKS][2], hi[SHRINK_FEW_BLOCKS][2], v[SHRINK_FEW_BLOCKS][2];
#pragma unroll
            for (int i = 0; i < SHRINK_FEW_BLOCKS; i++) {
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    const OP *at = a + (k0 + i) * block + ((2 * t + p) ^ g) * 8;
                    lo[i][p] = k0 + i < k_end && real0 ? load_16(at) : zero;
                    hi[i][p] = k0 + i < k_end && real1 ? load_16(at + 8 * CUDA_BLOCK_K) : zero;
                }
            }
            if (!waited) {
                begin();
                position = __ldcg(f.routing.position + slot);
                waited = true;
            }
            const OP *x = (DOWN ? (const OP *)f.h + (size_t)position * ldx : (const OP *)f.x + (size_t)row * ldx) + 16 * t;
#pragma unroll
            for (int i = 0; i < SHRINK_FEW_BLOCKS; i++) {
#pragma unroll
                for (int p = 0; p < 2; p++)
                    v[i][p] = k0 + i < k_end && g == 0 ? load_16(x + (size_t)(k0 + i) * CUDA_BLOCK_K + 8 * p) : zero;
            }
#pragma unroll
            for (int i = 0; i < SHRINK_FEW_BLOCKS; i++) {
                if (k0 + i >= k_end)
                    break;
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    mma_16816<OP>(acc, lo[i][p].x, hi[i][p].x, lo[i][p].y, hi[i][p].y, v[i][p].x, v[i][p].y);
                    mma_16816<OP>(acc, lo[i][p].z, hi[i][p].z, lo[i][p].w, hi[i][p].w, v[i][p].z, v[i][p].w);
                }
            }
        }
        if (!waited) { /* a warp without any k */
            begin();
            position = __ldcg(f.routing.position + slot);
            waited = true;
        }
        if (t == 0) {
            partial[turn][warp][g] = acc[0];
            partial[turn][warp][g + 8] = acc[2];
        }
        __syncthreads();
        const int r = tile * 16 + threadIdx.x;
        if (threadIdx.x < 16 && r < e.rank) {
            float sum = 0.0f;
            for (int w = 0; w < SHRINK_WARPS; w++)
                sum += partial[turn][w][threadIdx.x];
            const OP s = op_from_f32<OP>(e.scale * sum);
            const size_t at = (size_t)position * f.lora.max_rank + r;
            if (DOWN) {
                ((OP *)f.s_down)[at] = s;
            } else {
                ((OP *)(up ? f.s_up : f.s_gate))[at] = s;
                if (same)
                    ((OP *)f.s_up)[at] = s;
            }
        }
    }
    if (!waited)
        begin();
}

template <typename OP, bool DOWN> static cudaError_t shrink_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    if (f->batch.slots <= SHRINK_FEW) {
        const int tiles = (f->lora.max_rank + 15) / 16, each = tiles < 4 ? tiles : 4;
        return launch(stream, shrink_few_kernel<OP, DOWN>, dim3(f->batch.slots, DOWN ? each : 2 * each), dim3(SHRINK_THREADS), 0, *f,
                      cuda_few(f));
    }
    int64_t most = (int64_t)f->batch.slots + (f->batch.slots + SHRINK_ROWS - 1) / SHRINK_ROWS, grid = 4 * (int64_t)stream->processors;
    return launch(stream, shrink_kernel<OP, DOWN>, dim3((unsigned)(most < grid ? most : grid)), dim3(SHRINK_THREADS), 0, *f);
}

cudaError_t cuda_shrink(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    if (f->dims.op == DTYPE_BF16)
        return down ? shrink_launch<__nv_bfloat16, true>(stream, f) : shrink_launch<__nv_bfloat16, false>(stream, f);
    return down ? shrink_launch<__half, true>(stream, f) : shrink_launch<__half, false>(stream, f);
}

template <typename OP> static cudaError_t shrink_load(void)
{
    cudaError_t e = load(shrink_kernel<OP, false>, 0);
    if (e == cudaSuccess)
        e = load(shrink_kernel<OP, true>, 0);
    if (e == cudaSuccess)
        e = load(shrink_few_kernel<OP, false>, 0);
    return e == cudaSuccess ? load(shrink_few_kernel<OP, true>, 0) : e;
}

cudaError_t cuda_load_shrink(void)
{
    cudaError_t e = shrink_load<__nv_bfloat16>();
    return e == cudaSuccess ? shrink_load<__half>() : e;
}
