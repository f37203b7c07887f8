/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing for the CUDA back end, on the host: the layouts that launch.h describes.
 */
#include "kernels/cuda/layout.h"

#include <string.h>

#define CHUNK 16 /* bytes */

static size_t round_up(size_t v, size_t to) { return (v + to - 1) / to * to; }

static size_t columns(const struct kernel_dims *d, enum kernel_projection p) { return (size_t)(p == KERNEL_DOWN ? d->inter : d->hidden); }

static size_t columns_pad(const struct kernel_dims *d, enum kernel_projection p)
{
    return (size_t)(p == KERNEL_DOWN ? d->inter_pad : d->hidden_pad);
}

static size_t rows_pad(const struct kernel_dims *d, enum kernel_projection p)
{
    return (size_t)(p == KERNEL_DOWN ? d->hidden_pad : d->inter_pad);
}

static size_t rows_true(const struct kernel_dims *d, enum kernel_projection p) { return (size_t)(p == KERNEL_DOWN ? d->hidden : d->inter); }

/* Bytes of one row's share of a group's block. */
#define ROW_BYTES (CUDA_BLOCK_K * 2)

void cuda_dims_init(struct kernel_dims *d)
{
    d->hidden_pad = (int32_t)round_up((size_t)d->hidden, CUDA_BLOCK_K);
    d->inter_pad = (int32_t)round_up((size_t)d->inter, CUDA_BLOCK_K);
}

size_t cuda_gate_up_bytes(const struct kernel_dims *d) { return (size_t)2 * d->inter_pad * d->hidden_pad * 2; }

size_t cuda_down_bytes(const struct kernel_dims *d) { return (size_t)d->hidden_pad * d->inter_pad * 2; }

void cuda_span(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, struct kernel_span *out)
{
    size_t blocks = columns_pad(d, p) / CUDA_BLOCK_K, padded = round_up((size_t)rows, CUDA_PACK_ROWS);
    if (p == KERNEL_DOWN) {
        out->offset = (size_t)row0 / CUDA_GROUP_ROWS * blocks * CUDA_BLOCK_BYTES;
        out->width = padded / CUDA_GROUP_ROWS * blocks * CUDA_BLOCK_BYTES;
        out->pitch = out->width;
        out->count = 1;
        return;
    }
    /* Half of every block of the strips that hold these channels. */
    out->offset = (size_t)row0 / 8 * blocks * CUDA_BLOCK_BYTES + (p == KERNEL_UP ? CUDA_BLOCK_BYTES / 2 : 0);
    out->width = CUDA_BLOCK_BYTES / 2;
    out->pitch = CUDA_BLOCK_BYTES;
    out->count = padded / 8 * blocks;
}

/* One row's 64 columns of block k, swizzled for row r of a tile; zeros past the true width, and all zeros where src is NULL. */
static void pack_row(unsigned char *dst, const unsigned char *src, size_t k, size_t width, size_t r)
{
    size_t begin = k * ROW_BYTES, have = !src || begin >= width * 2 ? 0 : width * 2 - begin;
    if (have >= ROW_BYTES) { /* nearly all rows, at the speed of copying */
        const size_t swizzle = (r & 7) * CHUNK;
        for (size_t c = 0; c < ROW_BYTES; c += CHUNK)
            memcpy(dst + (c ^ swizzle), src + begin + c, CHUNK);
        return;
    }
    for (size_t c = 0; c < ROW_BYTES / CHUNK; c++) {
        unsigned char *to = dst + (c ^ (r & 7)) * CHUNK;
        size_t bytes = have <= c * CHUNK ? 0 : have - c * CHUNK;
        if (bytes >= CHUNK) {
            memcpy(to, src + begin + c * CHUNK, CHUNK);
        } else {
            memset(to, 0, CHUNK);
            if (bytes)
                memcpy(to, src + begin + c * CHUNK, bytes);
        }
    }
}

void cuda_pack(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, const void *src, size_t src_stride,
               void *dst, size_t dst_pitch)
{
    size_t blocks = columns_pad(d, p) / CUDA_BLOCK_K, width = columns(d, p), padded = round_up((size_t)rows, CUDA_PACK_ROWS);
    size_t tile = p == KERNEL_DOWN ? CUDA_GROUP_ROWS : 8, tile_bytes = tile * ROW_BYTES;
    const unsigned char *from = src;
    for (size_t r0 = 0; r0 < padded; r0 += tile) {
        for (size_t k = 0; k < blocks; k++) {
            /* down is one long piece; gate and up a piece a block. */
            size_t group = r0 / tile, strip = group / CUDA_STRIP_GROUPS;
            size_t piece = (strip * blocks + k) * CUDA_STRIP_GROUPS + group % CUDA_STRIP_GROUPS;
            unsigned char *to = (unsigned char *)dst + (p == KERNEL_DOWN ? piece * tile_bytes : piece * dst_pitch);
            for (size_t r = 0; r < tile; r++) {
                size_t at = p == KERNEL_DOWN ? r % 2 * 8 + r / 2 : r;
                pack_row(to + at * ROW_BYTES, r0 + r < (size_t)rows ? from + (r0 + r) * src_stride * 2 : NULL, k, width, at);
            }
        }
    }
}

static size_t rank_pad(int32_t rank) { return round_up((size_t)rank, KERNEL_RANK_PAD); }

size_t cuda_lora_a_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    return round_up(rank_pad(rank) * columns_pad(d, p) * 2, 64);
}

size_t cuda_lora_b_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    return round_up(rows_pad(d, p) * rank_pad(rank) * 2, 64);
}

/* Blocks of CUDA_BLOCK_K columns, each [rank] rows of 128 bytes, swizzled as weights are, padded with zeros. */
void cuda_pack_lora_a(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst)
{
    const size_t rows = rank_pad(rank), width = columns(d, p);
    for (size_t k = 0; k < columns_pad(d, p) / CUDA_BLOCK_K; k++) {
        for (size_t r = 0; r < rows; r++) {
            const unsigned char *from = r < (size_t)rank ? (const unsigned char *)src + r * width * 2 : NULL;
            pack_row((unsigned char *)dst + (k * rows + r) * ROW_BYTES, from, k, width, r);
        }
    }
    const size_t used = rows * columns_pad(d, p) * 2;
    memset((unsigned char *)dst + used, 0, cuda_lora_a_bytes(d, p, rank) - used);
}

/* Planes of CUDA_PLANE_RANKS ranks, each [rows] of those ranks; a rest of 8 is a plane of its own, [rows] of 8. Padded with zeros. */
void cuda_pack_lora_b(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst)
{
    memset(dst, 0, cuda_lora_b_bytes(d, p, rank));
    for (size_t k = 0; k < (size_t)rank; k += CUDA_PLANE_RANKS) {
        const size_t left = rank_pad(rank) - k, width = left < CUDA_PLANE_RANKS ? left : CUDA_PLANE_RANKS;
        const size_t have = (size_t)rank - k < width ? (size_t)rank - k : width;
        unsigned char *plane = (unsigned char *)dst + k * rows_pad(d, p) * 2;
        for (size_t r = 0; r < rows_true(d, p); r++)
            memcpy(plane + r * width * 2, (const unsigned char *)src + (r * (size_t)rank + k) * 2, have * 2);
    }
}
