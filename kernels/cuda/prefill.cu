/* SPDX-License-Identifier: Apache-2.0
 *
 * The two products for many rows an expert, portable: mma m16n8k16 from a ring of shared memory filled by cp.async.
 *
 * A tile is TILE_M weight rows (M operand) by up to TILE_N positions of one expert (N operand); 8 warps hold 32 x 64 each. Rows of x
 * are gathered as they are loaded. A grid that fills the device walks over the tiles, all row tiles of a chunk of positions
 * first, so that the chunk's x and the expert's weights are in L2 when they are wanted again. One chain of instructions over k an
 * element, then the adapters' blocks (pieces.cuh).
 */
#include "kernels/cuda/pieces.cuh"

#define TILE_M 128
#define TILE_N 128
#define STAGES 2
#define PREFILL_THREADS 256
#define STAGE_BYTES ((TILE_M + TILE_N) * 128)
#define PIECES (2 * TILE_N)

template <typename OP, bool DOWN, bool LORA>
__global__ void __launch_bounds__(PREFILL_THREADS, 2) prefill_kernel(const __grid_constant__ struct kernel_forward f)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int extra_blocks, extra_pieces;
    launch_begin();
    const int experts = f.dims.experts;
    struct lora_piece *piece = (struct lora_piece *)(shared + STAGES * STAGE_BYTES);
    int *offset = (int *)(shared + STAGES * STAGE_BYTES + (LORA ? PIECES * sizeof *piece : 0)), *first = offset + experts + 1;
    int *segment = first + experts + 1;
    if (LORA)
        segments_first(segment, f);
    offsets_fill(offset, f, true);
    const int chunks = chunks_scan(offset, first, experts, TILE_N);
    const int all_groups = DOWN ? f.dims.hidden_pad / 16 : f.dims.inter_pad / 8, row_tiles = (all_groups * 16 + TILE_M - 1) / TILE_M;
    const int ldx = DOWN ? f.dims.inter_pad : f.dims.hidden_pad, blocks = ldx / CUDA_BLOCK_K;
    const uint8_t *weights = (const uint8_t *)(DOWN ? f.weights.down : f.weights.gate_up);
    const uint32_t ring = smem_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, wm = warp % 4, wn = warp / 4;
    const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8; /* what this thread copies: 4 rows, 32 apart, of each side */
    const uint32_t put = row0 * 128 + ((chunk ^ (row0 & 7)) * 16);

    for (int tile = blockIdx.x; tile < chunks * row_tiles; tile += gridDim.x) {
        const int v = tile / row_tiles, e = chunks_find(first, experts, v), group = (tile - v * row_tiles) * (TILE_M / 16);
        const int begin = offset[e] + (v - first[e]) * TILE_N, count = min(TILE_N, offset[e + 1] - begin);
        const int rows = min(TILE_M, (all_groups - group) * 16);
        const uint8_t *w[4];
        const OP *x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = row0 + 32 * i;
            w[i] = weights + (size_t)e * all_groups * blocks * CUDA_BLOCK_BYTES + group_offset(group + r / 16, blocks) + r % 16 * 128 +
                   chunk * 16;
            x[i] = r >= count ? NULL
                   : DOWN     ? (const OP *)f.h + (size_t)(begin + r) * ldx + chunk * 8
                              : (const OP *)f.x + (size_t)f.batch.slot_row[f.routing.order[begin + r]] * ldx + chunk * 8;
        }
        __syncthreads();
        int extra = 0, pieces = 0, cursor = 0;
        if (LORA) {
            if (warp == 0) {
                int n = pieces_build<DOWN>(f, segment[e], e, begin, count, piece, &extra);
                if (lane == 0)
                    extra_blocks = extra, extra_pieces = n;
            }
            __syncthreads();
            extra = extra_blocks;
            pieces = extra_pieces;
        }
        const int total = blocks + extra;
        auto fill = [&](int k) {
            if (k < total) {
                uint32_t at = ring + k % STAGES * STAGE_BYTES;
                if (!LORA || k < blocks) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        /* The weights come swizzled; x is swizzled here. */
                        bool there = row0 + 32 * i < rows;
                        copy_async_16(at + (row0 + 32 * i) * 128 + chunk * 16, there ? w[i] + (size_t)k * CUDA_STRIP_BYTES : weights,
                                      there);
                        copy_async_16(at + TILE_M * 128 + put + i * 4096, x[i] ? x[i] + (size_t)k * CUDA_BLOCK_K : (const OP *)weights,
                                      x[i] != NULL);
                    }
                } else {
                    struct lora_piece p;
                    bool any = piece_at(piece, pieces, &cursor, (k - blocks) * 8 + chunk, &p);
                    int rank8 = (k - blocks) * 8 + chunk - p.first;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int r = row0 + 32 * i;
                        const uint8_t *b = any && r < rows ? piece_weights<DOWN>(f, p, group, r, rank8) : NULL;
                        const uint8_t *s = any && r >= p.begin && r < p.end ? piece_rows<DOWN>(f, p, begin + r, rank8) : NULL;
                        copy_async_16(at + put + i * 4096, b ? b : weights, b != NULL);
                        copy_async_16(at + TILE_M * 128 + put + i * 4096, s ? s : weights, s != NULL);
                    }
                }
            }
            copy_async_commit();
        };

        float acc[2][8][4] = {};
        for (int k = 0; k < STAGES - 1; k++)
            fill(k);
        for (int k = 0; k < total; k++) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            fill(k + STAGES - 1);
            uint32_t at = ring + k % STAGES * STAGE_BYTES;
#pragma unroll
            for (int p = 0; p < 2; p++) {
                uint32_t in_row = g * 128 + ((2 * t + p) ^ g) * 16;
                uint4 lo[2], hi[2];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    lo[m] = shared_load_16(at + (wm * 32 + m * 16) * 128 + in_row);
                    hi[m] = shared_load_16(at + (wm * 32 + m * 16 + 8) * 128 + in_row);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    uint4 b = shared_load_16(at + (TILE_M + wn * 64 + j * 8) * 128 + in_row);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma_16816<OP>(acc[m][j], lo[m].x, hi[m].x, lo[m].y, hi[m].y, b.x, b.y);
                        mma_16816<OP>(acc[m][j], lo[m].z, hi[m].z, lo[m].w, hi[m].w, b.z, b.w);
                    }
                }
            }
        }
        copy_async_wait<0>();

#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int local = wm * 2 + m;
            if (local * 16 >= rows)
                continue;
            const int c = DOWN ? (group + local) * 16 + 2 * g : (group + local) * 8 + g;
            float bias0 = 0.0f, bias1 = 0.0f;
            if (DOWN && f.weights.down_bias) {
                bias0 = f.weights.down_bias[(size_t)e * f.dims.hidden_pad + c];
                bias1 = f.weights.down_bias[(size_t)e * f.dims.hidden_pad + c + 1];
            } else if (!DOWN && f.weights.gate_bias) {
                bias0 = f.weights.gate_bias[(size_t)e * f.dims.inter_pad + c];
                bias1 = f.weights.up_bias[(size_t)e * f.dims.inter_pad + c];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int n = wn * 64 + j * 8 + 2 * t + i;
                    if (n >= count)
                        continue;
                    float v0 = acc[m][j][i] + bias0, v1 = acc[m][j][i + 2] + bias1;
                    if (DOWN) {
                        *reinterpret_cast<uint32_t *>((OP *)f.y + (size_t)(begin + n) * f.dims.hidden_pad + c) =
                            op_pair<OP>::narrow(v0, v1);
                    } else {
                        float weight = f.weights.weight_on_input ? f.batch.slot_weight[f.routing.order[begin + n]] : 1.0f;
                        float h = activate(f.weights.activation, weight * v0, weight * v1);
                        ((OP *)f.h)[(size_t)(begin + n) * f.dims.inter_pad + c] = op_from_f32<OP>(c < f.dims.inter ? h : 0.0f);
                    }
                }
            }
        }
    }
}

static size_t prefill_shared(int experts, bool lora)
{
    return STAGES * STAGE_BYTES + (lora ? PIECES * sizeof(struct lora_piece) : 0) + 12 * ((size_t)experts + 1);
}

template <typename OP, bool DOWN, bool LORA> static cudaError_t prefill_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    return launch(stream, prefill_kernel<OP, DOWN, LORA>, dim3(2 * stream->processors), dim3(PREFILL_THREADS),
                  prefill_shared(f->dims.experts, LORA), *f);
}

template <typename OP> static cudaError_t prefill_any(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    if (f->lora.entry)
        return down ? prefill_launch<OP, true, true>(stream, f) : prefill_launch<OP, false, true>(stream, f);
    return down ? prefill_launch<OP, true, false>(stream, f) : prefill_launch<OP, false, false>(stream, f);
}

cudaError_t cuda_prefill_portable(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    return f->dims.op == DTYPE_BF16 ? prefill_any<__nv_bfloat16>(stream, f, down) : prefill_any<__half>(stream, f, down);
}

template <typename OP> static cudaError_t prefill_load()
{
    cudaError_t e = load(prefill_kernel<OP, false, false>, prefill_shared(KERNEL_MAX_EXPERTS, false));
    if (e == cudaSuccess)
        e = load(prefill_kernel<OP, false, true>, prefill_shared(KERNEL_MAX_EXPERTS, true));
    if (e == cudaSuccess)
        e = load(prefill_kernel<OP, true, false>, prefill_shared(KERNEL_MAX_EXPERTS, false));
    return e == cudaSuccess ? load(prefill_kernel<OP, true, true>, prefill_shared(KERNEL_MAX_EXPERTS, true)) : e;
}

cudaError_t cuda_load_prefill_portable(void)
{
    cudaError_t e = prefill_load<__nv_bfloat16>();
    return e == cudaSuccess ? prefill_load<__half>() : e;
}
