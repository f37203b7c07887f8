/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing into the CPU back end's layout. Runs at loading speed: one pass over the source, whole cache lines written.
 */
#include "kernels/cpu/layout.h"

static int32_t round_up(int32_t v, int32_t to) { return (v + to - 1) / to * to; }

static int32_t columns(const struct kernel_dims *d, enum kernel_projection p) { return p == KERNEL_DOWN ? d->inter : d->hidden; }

static int32_t columns_pad(const struct kernel_dims *d, enum kernel_projection p)
{
    return p == KERNEL_DOWN ? d->inter_pad : d->hidden_pad;
}

static int32_t channels(const struct kernel_dims *d, enum kernel_projection p) { return p == KERNEL_DOWN ? d->hidden : d->inter; }

void layout_dims_init(struct kernel_dims *d)
{
    d->hidden_pad = round_up(d->hidden, LAYOUT_BLOCK);
    d->inter_pad = round_up(d->inter, LAYOUT_BLOCK);
}

size_t layout_gate_up_bytes(const struct kernel_dims *d) { return (size_t)2 * d->inter_pad * d->hidden_pad * 2; }

size_t layout_down_bytes(const struct kernel_dims *d) { return (size_t)d->hidden_pad * d->inter_pad * 2; }

void layout_span(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, struct kernel_span *out)
{
    size_t pairs = (size_t)columns_pad(d, p) / 2, line = LAYOUT_HALF * 2 * 2;
    if (p == KERNEL_DOWN) {
        out->width = pairs * 2 * line;
        out->pitch = out->width;
        out->count = (size_t)round_up(rows, LAYOUT_BLOCK) / LAYOUT_BLOCK;
        out->offset = (size_t)row0 / LAYOUT_BLOCK * out->width;
        return;
    }
    /* Every other line belongs to the other projection. */
    out->width = line;
    out->pitch = 2 * line;
    out->count = (size_t)round_up(rows, LAYOUT_BLOCK) / LAYOUT_HALF * pairs;
    out->offset = (size_t)row0 / LAYOUT_HALF * pairs * 2 * line + (p == KERNEL_UP ? line : 0);
}

/* 16 rows (of which `rows` exist), two inputs of each: one line. The source may have any alignment. */
static void pack_line(enum dtype op, uint16_t *dst, const uint16_t *src, size_t stride, int32_t rows, int32_t columns_left)
{
    if (rows >= LAYOUT_HALF && columns_left >= 2 && op == DTYPE_BF16) {
        for (int32_t r = 0; r < LAYOUT_HALF; r++)
            memcpy(dst + 2 * r, src + (size_t)r * stride, 4);
        return;
    }
    for (int32_t r = 0; r < LAYOUT_HALF; r++)
        for (int32_t k = 0; k < 2; k++) {
            uint16_t v = 0;
            if (r < rows && k < columns_left)
                memcpy(&v, src + (size_t)r * stride + k, sizeof v);
            dst[op == DTYPE_BF16 ? 2 * r + k : LAYOUT_HALF * k + r] = v;
        }
}

typedef uint32_t quad __attribute__((vector_size(16)));
typedef uint16_t eight __attribute__((vector_size(16)));

/* 16 whole rows, 32 inputs of each: 16 lines, `pitch` bytes apart. Rows are mostly a power of two apart, so that their cache lines
 * compete for the same places of the first-level cache: each is read once, in squares of 4 by 4 pairs. */
static void pack_square(enum dtype op, char *dst, size_t pitch, const uint16_t *src, size_t stride)
{
    for (int32_t r = 0; r < LAYOUT_HALF; r += 4)
        for (int32_t k = 0; k < LAYOUT_HALF; k += 4) {
            quad row[4], line[4];
            for (int32_t i = 0; i < 4; i++)
                memcpy(&row[i], src + (size_t)(r + i) * stride + 2 * k, sizeof row[i]);
            const quad a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5), b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
            const quad c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7), d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
            line[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
            line[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
            line[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
            line[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
            for (int32_t i = 0; i < 4; i++) {
                char *to = dst + (size_t)(k + i) * pitch;
                if (op == DTYPE_BF16) {
                    memcpy(to + (size_t)r * 4, &line[i], sizeof line[i]);
                    continue;
                }
                const eight inputs = __builtin_shufflevector((eight)line[i], (eight)line[i], 0, 2, 4, 6, 1, 3, 5, 7);
                memcpy(to + (size_t)r * 2, &inputs, 8);
                memcpy(to + (size_t)(LAYOUT_HALF + r) * 2, (const char *)&inputs + 8, 8);
            }
        }
}

/* Lines of all pairs of one half, `pitch` bytes apart. */
static void pack_half(enum dtype op, char *dst, size_t pitch, const uint16_t *src, size_t stride, int32_t rows, int32_t width,
                      int32_t width_pad)
{
    int32_t k = 0;
    for (; rows >= LAYOUT_HALF && k + 2 * LAYOUT_HALF <= width; k += 2 * LAYOUT_HALF, dst += LAYOUT_HALF * pitch)
        pack_square(op, dst, pitch, src + k, stride);
    for (; k < width_pad; k += 2, dst += pitch)
        pack_line(op, (uint16_t *)dst, rows > 0 ? src + k : NULL, stride, rows, width - k);
}

void layout_pack(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, const void *src, size_t src_stride,
                 void *dst, size_t dst_pitch)
{
    int32_t width = columns(d, p), width_pad = columns_pad(d, p);
    size_t line = LAYOUT_HALF * 2 * 2, pairs = (size_t)width_pad / 2;
    for (int32_t r = 0; r < round_up(rows, LAYOUT_BLOCK); r += LAYOUT_HALF) {
        const uint16_t *from = r < rows ? (const uint16_t *)src + (size_t)r * src_stride : NULL;
        size_t half = (size_t)r / LAYOUT_HALF;
        if (p == KERNEL_DOWN)
            pack_half(d->op, (char *)dst + half / 2 * dst_pitch + half % 2 * line, 2 * line, from, src_stride, rows - r, width, width_pad);
        else
            pack_half(d->op, (char *)dst + half * pairs * dst_pitch, dst_pitch, from, src_stride, rows - r, width, width_pad);
    }
}

size_t layout_lora_a_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    return (size_t)round_up(rank, KERNEL_RANK_PAD) * columns_pad(d, p) * 2;
}

size_t layout_lora_b_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    return (size_t)round_up(channels(d, p), LAYOUT_BLOCK) * round_up(rank, KERNEL_RANK_PAD) * 2;
}

void layout_pack_lora_a(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst)
{
    int32_t width = columns(d, p), width_pad = columns_pad(d, p);
    memset(dst, 0, layout_lora_a_bytes(d, p, rank));
    for (int32_t r = 0; r < rank; r++)
        memcpy((uint16_t *)dst + (size_t)r * width_pad, (const uint16_t *)src + (size_t)r * width, (size_t)width * 2);
}

void layout_pack_lora_b(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst)
{
    int32_t rows = channels(d, p), rank_pad = round_up(rank, KERNEL_RANK_PAD);
    size_t half = (size_t)rank_pad * LAYOUT_HALF * 2;
    for (int32_t r = 0; r < round_up(rows, LAYOUT_BLOCK); r += LAYOUT_HALF, dst = (char *)dst + half) {
        const uint16_t *from = r < rows ? (const uint16_t *)src + (size_t)r * rank : NULL;
        pack_half(d->op, dst, LAYOUT_HALF * 2 * 2, from, (size_t)rank, rows - r, rank, rank_pad);
    }
}
