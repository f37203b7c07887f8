/* SPDX-License-Identifier: Apache-2.0
 *
 * enter: rows of any float type and alignment -> x.    combine: y, weighted and summed in slot order -> rows of any type.
 * Both are bound by memory, and have as many blocks as run at one time, which look ahead. 16-byte accesses wherever the caller's addresses
 * allow them, single bytes where they are odd.
 */
#include "kernels/cuda/device.cuh"

#define MOVE_THREADS 256
/* Slots of a row whose y are in flight at once. */
#define COMBINE_SLOTS 8
#define COMBINE_BLOCKS 4 /* a multiprocessor */
#define ENTER_BLOCKS 4 /* likewise; they leave room for route's */

/* 2 or 4 bytes at any address. */
__device__ __forceinline__ uint32_t load_bytes(const uint8_t *p, int bytes)
{
    uint32_t v = 0;
    for (int i = 0; i < bytes; i++)
        v |= (uint32_t)p[i] << (8 * i);
    return v;
}

__device__ __forceinline__ void store_bytes(uint8_t *p, uint32_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

__device__ __forceinline__ float widen_bits(int dtype, uint32_t bits)
{
    if (dtype == DTYPE_FP32)
        return __uint_as_float(bits);
    if (dtype == DTYPE_BF16)
        return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half((unsigned short)bits));
}

__device__ __forceinline__ uint32_t narrow_bits(int dtype, float v)
{
    if (dtype == DTYPE_FP32)
        return __float_as_uint(v);
    if (dtype == DTYPE_BF16)
        return __bfloat16_as_ushort(__float2bfloat16_rn(v));
    return __half_as_ushort(__float2half_rn(v));
}

/* 8 elements of a row as they lie in memory; those of 2 bytes fill the first half. */
struct row_piece {
    uint4 half[2];
};

/* The row's elements c..c+7; zeros past `count`. */
__device__ __forceinline__ struct row_piece row_load_8(const uint8_t *row, int dtype, int c, int count)
{
    const int size = dtype == DTYPE_FP32 ? 4 : 2;
    const uint8_t *p = row + (size_t)c * size;
    struct row_piece v = {};
    if (((uintptr_t)p & 15) == 0 && c + 8 <= count) {
        v.half[0] = *reinterpret_cast<const uint4 *>(p);
        if (dtype == DTYPE_FP32)
            v.half[1] = *reinterpret_cast<const uint4 *>(p + 16);
        return v;
    }
    uint32_t w[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t bits = c + i < count ? load_bytes(p + i * size, size) : 0;
        if (dtype == DTYPE_FP32)
            w[i] = bits;
        else
            w[i / 2] |= bits << (i % 2 * 16);
    }
    v.half[0] = make_uint4(w[0], w[1], w[2], w[3]);
    v.half[1] = make_uint4(w[4], w[5], w[6], w[7]);
    return v;
}

__device__ __forceinline__ void row_widen_8(float v[8], const struct row_piece &piece, int dtype)
{
    const uint32_t w[8] = {piece.half[0].x, piece.half[0].y, piece.half[0].z, piece.half[0].w,
                           piece.half[1].x, piece.half[1].y, piece.half[1].z, piece.half[1].w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = dtype == DTYPE_FP32 ? __uint_as_float(w[i]) : widen_bits(dtype, (w[i / 2] >> (i % 2 * 16)) & 0xffff);
}

__device__ __forceinline__ void row_store_8(const float v[8], uint8_t *row, int dtype, int c, int count)
{
    int size = dtype == DTYPE_FP32 ? 4 : 2;
    uint8_t *p = row + (size_t)c * size;
    if (((uintptr_t)p & 15) == 0 && c + 8 <= count) {
        if (dtype == DTYPE_FP32) {
            *reinterpret_cast<float4 *>(p) = make_float4(v[0], v[1], v[2], v[3]);
            *reinterpret_cast<float4 *>(p + 16) = make_float4(v[4], v[5], v[6], v[7]);
            return;
        }
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = narrow_bits(dtype, v[2 * i]) | narrow_bits(dtype, v[2 * i + 1]) << 16;
        *reinterpret_cast<uint4 *>(p) = make_uint4(w[0], w[1], w[2], w[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (c + i < count)
            store_bytes(p + i * size, narrow_bits(dtype, v[i]), size);
}

/* One thread's part of item `item`: `turns` items are a row. Filler rows are zeros. */
__device__ __forceinline__ struct row_piece enter_load(const struct kernel_forward &f, const struct kernel_row &row, int item, int turns)
{
    const int c = (item % turns * MOVE_THREADS + threadIdx.x) * 8;
    struct row_piece none = {};
    return row.in ? row_load_8((const uint8_t *)row.in, row.dtype, c, f.dims.hidden) : none;
}

/* `early`: the launch before is one of this back end's or none (a graph's first), so the batch has arrived before this one begins, and
 * route and gate_up, which read nothing else before their own waits, may begin while a forward before ends. A piece is converted while
 * the next one is on its way, whose row was read before that. */
template <typename OP>
__global__ void __launch_bounds__(MOVE_THREADS, ENTER_BLOCKS)
    enter_kernel(const __grid_constant__ struct kernel_forward f, int turns, bool early)
{
    if (early)
        launch_release();
    else
        launch_begin();
    const int items = f.batch.rows * turns, step = gridDim.x;
    int item = blockIdx.x;
    struct kernel_row row = f.batch.row[item / turns], next = f.batch.row[min(item + step, items - 1) / turns];
    struct row_piece piece = enter_load(f, row, item, turns);
    if (early)
        launch_wait();
    for (; item < items; item += step) {
        struct row_piece ahead = {};
        if (item + step < items)
            ahead = enter_load(f, next, item + step, turns);
        const struct kernel_row after = f.batch.row[min(item + 2 * step, items - 1) / turns];
        const int c = (item % turns * MOVE_THREADS + threadIdx.x) * 8;
        float v[8];
        row_widen_8(v, piece, row.dtype);
        if (c < f.dims.hidden_pad)
            *reinterpret_cast<uint4 *>((OP *)f.x + (size_t)(item / turns) * f.dims.hidden_pad + c) =
                make_uint4(op_pair<OP>::narrow(v[0], v[1]), op_pair<OP>::narrow(v[2], v[3]), op_pair<OP>::narrow(v[4], v[5]),
                           op_pair<OP>::narrow(v[6], v[7]));
        piece = ahead;
        row = next;
        next = after;
    }
}

/* Where a slot's y lies, and its weight; NULL: skipped, or past the row's last. */
template <typename OP> struct combine_source {
    const OP *y;
    float weight;
};

/* Of slot `s` of a row. Routing is complete, as two launches back. */
template <typename OP>
__device__ __forceinline__ struct combine_source<OP> combine_find(const struct kernel_forward &f, const struct kernel_row &row, int s) {
    const int slot = row.first_slot + s, position = s < row.slots ? __ldcg(f.routing.position + slot) : -1;
    if (position < 0)
        return {NULL, 1.0f};
    return {(const OP *)f.y + (size_t)position * f.dims.hidden_pad, f.weights.weight_on_input ? 1.0f : f.batch.slot_weight[slot]};
}

/* A block takes rows in turn: the next row's sources are looked up, and the one's after is read, while y of this one is on its way. */
template <typename OP>
__global__ void __launch_bounds__(MOVE_THREADS, COMBINE_BLOCKS) combine_kernel(const __grid_constant__ struct kernel_forward f)
{
    __shared__ struct combine_source<OP> shared_source[2][COMBINE_SLOTS];
    const int hidden = f.dims.hidden, rows = f.batch.rows, step = gridDim.x, lane = threadIdx.x;
    int r = blockIdx.x;
    struct kernel_row row = f.batch.row[r], next = f.batch.row[min(r + step, rows - 1)];
    if (lane < COMBINE_SLOTS)
        shared_source[0][lane] = combine_find<OP>(f, row, lane);
    __syncthreads();
    launch_begin();
    for (int turn = 0; r < rows; r += step, turn ^= 1) {
        struct combine_source<OP> *source = shared_source[turn], ahead = {
            NULL, 1.0f
        };
        if (lane < COMBINE_SLOTS && r + step < rows)
            ahead = combine_find<OP>(f, next, lane);
        const struct kernel_row after = f.batch.row[min(r + 2 * step, rows - 1)];
        bool found = true; /* the first slots' sources lie ready */
        for (int c0 = blockIdx.y * MOVE_THREADS * 8; row.out != 0 && c0 < hidden; c0 += gridDim.y * MOVE_THREADS * 8) {
            int c = c0 + lane * 8;
            float sum[8] = {};
            for (int s = 0; s < row.slots; s += COMBINE_SLOTS) {
                if (!found) {
                    __syncthreads();
                    if (lane < COMBINE_SLOTS)
                        source[lane] = combine_find<OP>(f, row, s + lane);
                    __syncthreads();
                }
                found = row.slots <= COMBINE_SLOTS;
                if (c >= hidden)
                    continue;
                uint4 y[COMBINE_SLOTS];
#pragma unroll
                for (int i = 0; i < COMBINE_SLOTS; i++)
                    if (source[i].y)
                        y[i] = *reinterpret_cast<const uint4 *>(source[i].y + c);
#pragma unroll
                for (int i = 0; i < COMBINE_SLOTS; i++) {
                    if (!source[i].y)
                        continue;
                    const float weight = source[i].weight;
                    uint32_t w[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float2 p = op_pair<OP>::widen(w[j]);
                        sum[2 * j] = fmaf(weight, p.x, sum[2 * j]);
                        sum[2 * j + 1] = fmaf(weight, p.y, sum[2 * j + 1]);
                    }
                }
            }
            if (c < hidden)
                row_store_8(sum, (uint8_t *)row.out, row.dtype, c, hidden);
        }
        if (lane < COMBINE_SLOTS)
            shared_source[turn ^ 1][lane] = ahead;
        __syncthreads();
        row = next;
        next = after;
    }
}

/* So many times MOVE_THREADS threads have 8 elements of a row each. */
static int move_turns(const struct kernel_forward *f) { return (f->dims.hidden_pad + MOVE_THREADS * 8 - 1) / (MOVE_THREADS * 8); }

cudaError_t cuda_enter(struct kernel_stream *stream, const struct kernel_forward *f)
{
    /* In a graph copies are nodes or come before its launch, and kernels depend on both in full. */
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaError_t e = cudaStreamIsCapturing(stream->stream, &capturing);
    if (e != cudaSuccess)
        return e;
    const int turns = move_turns(f), items = f->batch.rows * turns, most = ENTER_BLOCKS * stream->processors;
    return launch(stream, f->dims.op == DTYPE_BF16 ? enter_kernel<__nv_bfloat16> : enter_kernel<__half>, dim3(items < most ? items : most),
                  dim3(MOVE_THREADS), 0, *f, turns, capturing == cudaStreamCaptureStatusActive);
}

/* Few rows alone would leave most of the device idle, turn after turn. */
cudaError_t cuda_combine(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const int rows = f->batch.rows, most = COMBINE_BLOCKS * stream->processors;
    return launch(stream, f->dims.op == DTYPE_BF16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>,
                  dim3(rows < most ? rows : most, rows < 2 * stream->processors ? move_turns(f) : 1), dim3(MOVE_THREADS), 0, *f);
}

cudaError_t cuda_load_move(void)
{
    cudaError_t e = load(enter_kernel<__nv_bfloat16>, 0);
    if (e == cudaSuccess)
        e = load(enter_kernel<__half>, 0);
    if (e == cudaSuccess)
        e = load(combine_kernel<__nv_bfloat16>, 0);
    return e == cudaSuccess ? load(combine_kernel<__half>, 0) : e;
}
