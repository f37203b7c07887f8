/* SPDX-License-Identifier: Apache-2.0
 *
 * Where weights and adapters lie in the CPU back end; one layout for every instruction family, for decode and prefill.
 *
 * A block holds 32 output channels as two halves of 16: of gate_up, 16 gate rows and the same 16 up rows, so that the activation
 * finds both in one tile; of down, 32 rows. Within a block the input channels come in pairs, and each pair of each half fills one
 * cache line: [block][K / 2][half][16 channels x 2 inputs]. So the experts' weights are read strictly in sequence, every
 * accumulator register holds 16 output channels and no sums across registers are needed. The line is [16][2] for bf16 (the order
 * that its dot product instructions and AMX's tiles want) and [2][16] for fp16 (which is widened 16 at a time).
 * K is padded to 32, a tile's depth.
 *
 * LoRA A is row-major, [rank, K]; B is [channel / 16][rank / 2][16 x 2], the same lines.
 */
#ifndef EXPERTD_KERNELS_CPU_LAYOUT_H
#define EXPERTD_KERNELS_CPU_LAYOUT_H

#include "kernels/kernels.h"

#define LAYOUT_HALF 16 /* output channels of a line */
#define LAYOUT_BLOCK 32 /* output channels (gate and up: 16 of each) of a block */
#define LAYOUT_PAIR (2 * LAYOUT_BLOCK) /* elements of one pair of inputs of a block */

/* What every family's table shares. */
void layout_dims_init(struct kernel_dims *d);
size_t layout_gate_up_bytes(const struct kernel_dims *d);
size_t layout_down_bytes(const struct kernel_dims *d);
void layout_span(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, struct kernel_span *out);
void layout_pack(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, const void *src, size_t src_stride,
                 void *dst, size_t dst_pitch);
size_t layout_lora_a_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank);
size_t layout_lora_b_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank);
void layout_pack_lora_a(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst);
void layout_pack_lora_b(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst);

#endif
