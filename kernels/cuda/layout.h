/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing for the CUDA back end; the same for all of its code. Needs no CUDA.
 */
#ifndef EXPERTD_KERNELS_CUDA_LAYOUT_H
#define EXPERTD_KERNELS_CUDA_LAYOUT_H

#include "kernels/kernels.h"

#define CUDA_GROUP_ROWS 16
#define CUDA_BLOCK_K 64
#define CUDA_BLOCK_BYTES (CUDA_GROUP_ROWS * CUDA_BLOCK_K * 2)
#define CUDA_STRIP_GROUPS 4
#define CUDA_STRIP_BYTES (CUDA_STRIP_GROUPS * CUDA_BLOCK_BYTES)
#define CUDA_PLANE_RANKS 16 /* of an adapter's B */
#define CUDA_PACK_ROWS 64 /* a strip of down, two of gate and up; so padding rows always belong to the last range */

void cuda_dims_init(struct kernel_dims *d);
size_t cuda_gate_up_bytes(const struct kernel_dims *d);
size_t cuda_down_bytes(const struct kernel_dims *d);
void cuda_span(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, struct kernel_span *out);
void cuda_pack(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, const void *src, size_t src_stride,
               void *dst, size_t dst_pitch);
size_t cuda_lora_a_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank);
size_t cuda_lora_b_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank);
void cuda_pack_lora_a(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst);
void cuda_pack_lora_b(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst);

#endif
