/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing for the CUDA back end, which runs on the host: every weight where the kernels look for it, zeros around them, every byte
 * of an expert's block written once. Needs no GPU.
 */
#include "kernels/cuda/layout.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const int32_t sizes[][2] = {{8, 8}, {64, 64}, {100, 72}, {136, 200}, {512, 320}};

static struct kernel_dims make_dims(int32_t hidden, int32_t inter)
{
    struct kernel_dims d = {.experts = 1, .hidden = hidden, .inter = inter, .op = DTYPE_BF16};
    cuda_dims_init(&d);
    assert_int_equal(d.hidden_pad % CUDA_BLOCK_K, 0);
    assert_int_equal(d.inter_pad % CUDA_BLOCK_K, 0);
    return d;
}

/* Never zero, and different for neighbours. */
static uint16_t value(enum kernel_projection p, int32_t row, int32_t column)
{
    return (uint16_t)(((uint32_t)row * 1009 + (uint32_t)column * 31 + (uint32_t)p * 7) % 65521 + 1);
}

/* Where the kernels look for an element, in elements: written down from launch.h, not from the packing. */
static size_t place(const struct kernel_dims *d, enum kernel_projection p, int32_t row, int32_t column)
{
    int32_t group, r, blocks = (p == KERNEL_DOWN ? d->inter_pad : d->hidden_pad) / 64;
    if (p == KERNEL_DOWN) {
        group = row / 16;
        r = row % 16 / 2 + (row % 2 ? 8 : 0);
    } else {
        group = row / 8;
        r = row % 8 + (p == KERNEL_UP ? 8 : 0);
    }
    size_t block = ((size_t)(group / 4) * (size_t)blocks + (size_t)(column / 64)) * 4 + (size_t)(group % 4);
    return block * 1024 + (size_t)r * 64 + (size_t)((column % 64 / 8) ^ (r % 8)) * 8 + (size_t)(column % 8);
}

/* Packs a projection in portions of `portion` rows and puts the pieces in place, counting how often each byte is written. */
static void pack(const struct kernel_dims *d, enum kernel_projection p, int32_t portion, char *block, unsigned char *written, size_t bytes)
{
    int32_t rows = p == KERNEL_DOWN ? d->hidden : d->inter, columns = p == KERNEL_DOWN ? d->inter : d->hidden;
    uint16_t *src = malloc((size_t)rows * (size_t)columns * 2);
    assert_non_null(src);
    for (int32_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < columns; c++)
            src[(size_t)r * (size_t)columns + (size_t)c] = value(p, r, c);
    for (int32_t row0 = 0; row0 < rows; row0 += portion) {
        int32_t n = portion < rows - row0 ? portion : rows - row0;
        struct kernel_span span;
        cuda_span(d, p, row0, n, &span);
        size_t pitch = span.width + 16;
        char *pieces = malloc(span.count * pitch);
        assert_non_null(pieces);
        cuda_pack(d, p, row0, n, src + (size_t)row0 * (size_t)columns, (size_t)columns, pieces, pitch);
        for (size_t i = 0; i < span.count; i++) {
            size_t at = span.offset + i * span.pitch;
            assert_true(at + span.width <= bytes);
            memcpy(block + at, pieces + i * pitch, span.width);
            for (size_t j = 0; j < span.width; j++)
                written[at + j]++;
        }
        free(pieces);
    }
    free(src);
}

static void check_block(const struct kernel_dims *d, bool down, int32_t portion)
{
    const enum kernel_projection first = down ? KERNEL_DOWN : KERNEL_GATE, last = down ? KERNEL_DOWN : KERNEL_UP;
    size_t bytes = down ? cuda_down_bytes(d) : cuda_gate_up_bytes(d), found = 0, elements = 0;
    char *block = malloc(bytes);
    unsigned char *written = calloc(bytes, 1);
    assert_non_null(block);
    assert_non_null(written);
    memset(block, 0xff, bytes);
    for (enum kernel_projection p = first; p <= last; p++)
        pack(d, p, portion, block, written, bytes);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(written[i], 1);
    for (enum kernel_projection p = first; p <= last; p++) {
        int32_t rows = down ? d->hidden : d->inter, columns = down ? d->inter : d->hidden;
        elements += (size_t)rows * (size_t)columns;
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t c = 0; c < columns; c++) {
                uint16_t v;
                memcpy(&v, block + place(d, p, r, c) * 2, 2);
                assert_int_equal(v, value(p, r, c));
            }
        }
    }
    for (size_t i = 0; i < bytes / 2; i++) {
        uint16_t v;
        memcpy(&v, block + i * 2, 2);
        found += v != 0;
    }
    assert_int_equal(found, elements); /* zeros everywhere else */
    free(block);
    free(written);
}

static void test_weights(void **state)
{
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct kernel_dims d = make_dims(sizes[i][0], sizes[i][1]);
        for (int32_t portion = CUDA_PACK_ROWS; portion <= 3 * CUDA_PACK_ROWS; portion += CUDA_PACK_ROWS) {
            check_block(&d, false, portion);
            check_block(&d, true, portion);
        }
    }
}

/* A is blocks of 64 columns, [rank] rows with swizzled chunks of 8; B is planes of 16 ranks, [rows], the last maybe of 8: written down
 * from launch.h, not from the packing. Both are padded with zeros. */
static void check_lora(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    int32_t in = p == KERNEL_DOWN ? d->inter : d->hidden, in_pad = p == KERNEL_DOWN ? d->inter_pad : d->hidden_pad;
    int32_t out = p == KERNEL_DOWN ? d->hidden : d->inter, rank_pad = (rank + 7) / 8 * 8,
            out_pad = p == KERNEL_DOWN ? d->hidden_pad : d->inter_pad;
    size_t a_bytes = cuda_lora_a_bytes(d, p, rank), b_bytes = cuda_lora_b_bytes(d, p, rank),
           n = (size_t)rank * (size_t)(in > out ? in : out);
    assert_int_equal(a_bytes % 64 + b_bytes % 64, 0);
    uint16_t *src = malloc(n * 2), *a = malloc(a_bytes), *b = malloc(b_bytes);
    assert_true(src && a && b);
    for (size_t i = 0; i < n; i++)
        src[i] = value(p, (int32_t)i, 3);
    memset(a, 0xff, a_bytes);
    memset(b, 0xff, b_bytes);
    cuda_pack_lora_a(d, p, rank, src, a);
    cuda_pack_lora_b(d, p, rank, src, b);
    for (int32_t r = 0; r < rank_pad; r++) {
        for (int32_t c = 0; c < in_pad; c++) {
            size_t at = ((size_t)(c / 64) * (size_t)rank_pad + (size_t)r) * 64 + (size_t)((c % 64 / 8) ^ (r % 8)) * 8 + (size_t)(c % 8);
            assert_int_equal(a[at], r < rank && c < in ? src[(size_t)r * (size_t)in + (size_t)c] : 0);
        }
    }
    for (int32_t r = 0; r < out_pad; r++) {
        for (int32_t c = 0; c < rank_pad; c++) {
            int32_t width = rank_pad - c / 16 * 16 < 16 ? 8 : 16;
            size_t at = (size_t)(c / 16 * 16) * (size_t)out_pad + (size_t)r * (size_t)width + (size_t)(c % 16);
            assert_int_equal(b[at], r < out && c < rank ? src[(size_t)r * (size_t)rank + (size_t)c] : 0);
        }
    }
    for (size_t i = (size_t)rank_pad * (size_t)in_pad; i < a_bytes / 2; i++)
        assert_int_equal(a[i], 0);
    for (size_t i = (size_t)rank_pad * (size_t)out_pad; i < b_bytes / 2; i++)
        assert_int_equal(b[i], 0);
    free(src);
    free(a);
    free(b);
}

static void test_adapters(void **state)
{
    static const int32_t ranks[] = {1, 8, 9, 16, 33};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct kernel_dims d = make_dims(sizes[i][0], sizes[i][1]);
        for (size_t j = 0; j < sizeof ranks / sizeof ranks[0]; j++)
            for (enum kernel_projection p = KERNEL_GATE; p < KERNEL_PROJECTIONS; p++)
                check_lora(&d, p, ranks[j]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_weights), cmocka_unit_test(test_adapters)};
    return cmocka_run_group_tests_name("cuda layout", tests, NULL, NULL);
}
