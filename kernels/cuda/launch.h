/* SPDX-License-Identifier: Apache-2.0
 *
 * What table.c and the .cu files share: the stream, the layout constants and the launchers of every step.
 *
 * Layout of weights in device memory: an expert's projection is a sequence of strips of 4 groups of CUDA_GROUP_ROWS output rows. A strip
 * holds, for each block of CUDA_BLOCK_K columns, its groups' blocks one after the other: 16 rows of 128 bytes each, whose 16-byte
 * chunk c of row r lies at chunk c ^ (r & 7). That is the swizzle that shared memory wants, so a strip's block is one plain copy. In
 * gate_up a group is 8 gate rows, then the 8 up rows of the same channels: both halves of an activation land in one thread. In
 * down a group's even channels come first, then its odd ones, so that two neighbours land in one thread.
 *
 * Layout of adapters: A is a sequence of blocks of CUDA_BLOCK_K columns, each all ranks' rows of 128 bytes with the same swizzle, so
 * that ranks fill a tile of shared memory as weight rows do. B is a sequence of planes of CUDA_PLANE_RANKS ranks, each all output
 * rows in their natural order with 32 bytes a row (a rest of 8 ranks: 16 bytes), so that a step of a matrix instruction over any
 * run of rows is one plain copy, and fragments of it meet no bank twice.
 */
#ifndef EXPERTD_KERNELS_CUDA_LAUNCH_H
#define EXPERTD_KERNELS_CUDA_LAUNCH_H

#include "kernels/kernels.h"
#ifdef __cplusplus
extern "C" {
#endif
#include "kernels/cuda/layout.h"
#ifdef __cplusplus
}
#endif

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Slots up to which route ranks each by itself; above, a counting sort in blocks of so many. */
#define CUDA_ROUTE_SMALL 1024
#define CUDA_ROUTE_BLOCK 1024
/* Slots up to which blocks of gate_up count for themselves instead of waiting for route. */
#define CUDA_COUNT_SLOTS 4096

/* Batches for which every block of decode's products finds out for itself what it needs of routing: up to so many slots and rows. An
 * expert's weights are read once for every CUDA_FEW_CHUNK of its rows, so there are no more rows than that, or else many experts: no
 * more than two slots for each. olmoe64 and qwen3-30b gain 4 to 5% at 9 to 12 rows, 3% at 16, 1% at 24, mixtral nothing above 8; with
 * adapters they gain 2 to 3% at 12 rows of 8 slots, nothing at 14, and lose from there on. */
#define CUDA_FEW_CHUNK 8
#define CUDA_FEW_ROWS 24
#define CUDA_FEW_SLOTS 256
#define CUDA_FEW_ADAPTED 112
static inline bool cuda_few(const struct kernel_forward *f)
{
    const int32_t rows = f->batch.rows, slots = f->batch.slots;
    return f->path == KERNEL_DECODE && slots <= (f->lora.entry ? CUDA_FEW_ADAPTED : CUDA_FEW_SLOTS) &&
           (rows <= CUDA_FEW_CHUNK || (rows <= CUDA_FEW_ROWS && slots <= 2 * f->dims.experts));
}

struct kernel_stream {
    cudaStream_t stream;
    int device;
    int processors;
    bool overlap; /* launches may begin before the launch before has ended (sm_90) */
    int shared_bytes; /* that a block may have */
};

/* Every launcher returns the launch's own result; errors of execution surface in wait. */
cudaError_t cuda_enter(struct kernel_stream *stream, const struct kernel_forward *f);
cudaError_t cuda_route(struct kernel_stream *stream, const struct kernel_forward *f);
size_t cuda_route_bytes(const struct kernel_dims *dims, int32_t max_slots);
cudaError_t cuda_combine(struct kernel_stream *stream, const struct kernel_forward *f);
cudaError_t cuda_shrink(struct kernel_stream *stream, const struct kernel_forward *f, bool down);
cudaError_t cuda_shrink_sm90(struct kernel_stream *stream, const struct kernel_forward *f, bool down);
cudaError_t cuda_decode_sm90(struct kernel_stream *stream, const struct kernel_forward *f, bool down);
cudaError_t cuda_decode_portable(struct kernel_stream *stream, const struct kernel_forward *f, bool down);
cudaError_t cuda_prefill_sm90_bf16(struct kernel_stream *stream, const struct kernel_forward *f, bool down);
cudaError_t cuda_prefill_sm90_fp16(struct kernel_stream *stream, const struct kernel_forward *f, bool down);
cudaError_t cuda_prefill_portable(struct kernel_stream *stream, const struct kernel_forward *f, bool down);

/* Loads the code and raises shared-memory limits, so that no launch does either. */
cudaError_t cuda_load_move(void);
cudaError_t cuda_load_route(void);
cudaError_t cuda_load_shrink(void);
cudaError_t cuda_load_shrink_sm90(void);
cudaError_t cuda_load_decode_sm90(void);
cudaError_t cuda_load_decode_portable(void);
cudaError_t cuda_load_prefill_sm90_bf16(void);
cudaError_t cuda_load_prefill_sm90_fp16(void);
cudaError_t cuda_load_prefill_portable(void);

#ifdef __cplusplus
}
#endif
#endif
