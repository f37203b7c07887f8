/* SPDX-License-Identifier: Apache-2.0
 *
 * The inner product of a few packed rows with one block of weights: 32 sums a row, each over its own accumulator in order of k,
 * whatever the number of rows; so bits don't depend on how rows are grouped.
 *
 * Packed rows ("panel"): [K / 2][rows] pairs of bf16 where the family has dot products of them, else [K][rows] floats.
 */
#ifndef EXPERTD_KERNELS_CPU_PRODUCT_H
#define EXPERTD_KERNELS_CPU_PRODUCT_H

#include "kernels/cpu/layout.h"
#include "kernels/cpu/vec.h"

#define SUBS (LAYOUT_HALF / VL) /* vectors of a half */

/* Rows at once: what the registers hold as accumulators of one half or, for few rows, of both. */
#if defined(FAMILY_AVX512)
#define MAX_ROWS 12
#define MAX_ROWS_BOTH 12
#elif defined(FAMILY_AVX2)
#define MAX_ROWS 6
#define MAX_ROWS_BOTH 3
#elif defined(__aarch64__)
#define MAX_ROWS 6
#define MAX_ROWS_BOTH 3
#else
#define MAX_ROWS 3
#define MAX_ROWS_BOTH 1
#endif

#if defined(FAMILY_BF16)
#define DOT_PAIRS 1
#else
#define DOT_PAIRS 0
#endif

/* Bytes of one element of a panel. */
static inline size_t panel_size(enum dtype op) { return DOT_PAIRS && op == DTYPE_BF16 ? 2 : 4; }

/* How far ahead of the loads weights are fetched: memory, not the hardware's prefetcher, should set the pace. */
#ifndef PREFETCH_BYTES
#define PREFETCH_BYTES 2048
#endif

static void panel_pack(enum dtype op, void *panel, const uint16_t *const *row, int rows, int32_t width)
{
    if (DOT_PAIRS && op == DTYPE_BF16) {
        for (int r = 0; r < rows; r++)
            for (int32_t k = 0; k < width / 2; k++)
                memcpy((uint32_t *)panel + (size_t)k * (size_t)rows + r, row[r] + 2 * k, 4);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int32_t k = 0; k < width; k += VL) {
            vf v = vf_load_float(row[r] + k, op);
            for (int i = 0; i < VL; i++)
                ((float *)panel)[(size_t)(k + i) * (size_t)rows + r] = v[i];
        }
}

/* One input of 16 channels, from a line: k is 0 or 1. */
ALWAYS_INLINE vf line_input(const bool fp16, const uint16_t *line, int k, int sub)
{
    if (fp16)
        return vf_load_fp16(line + k * LAYOUT_HALF + sub * VL);
    vu pair = vu_load(line + sub * 2 * VL);
    return (vf)(k ? pair & 0xffff0000u : pair << 16);
}

/* `halves` halves of the block from line pointer `w` on; `out` is [rows][32] floats. */
ALWAYS_INLINE void product_halves(const int rows, const int halves, const bool fp16, const void *panel, const uint16_t *w, int32_t width,
                                  float *out)
{
    vf sum[MAX_ROWS][2][SUBS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
            for (int s = 0; s < SUBS; s++)
                sum[r][h][s] = vf_set(0);
    for (int32_t pair = 0; pair < width / 2; pair++, w += LAYOUT_PAIR) {
        __builtin_prefetch((const char *)w + PREFETCH_BYTES);
        if (halves == 2)
            __builtin_prefetch((const char *)w + PREFETCH_BYTES + 64);
#if DOT_PAIRS
        if (!fp16) {
            const uint32_t *x = (const uint32_t *)panel + (size_t)pair * (size_t)rows;
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 2 * LAYOUT_HALF);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                __m512bh xr = (__m512bh)_mm512_set1_epi32((int)x[r]);
                sum[r][0][0] = _mm512_dpbf16_ps(sum[r][0][0], xr, w0);
                sum[r][1][0] = _mm512_dpbf16_ps(sum[r][1][0], xr, w1);
            }
            continue;
        }
#endif
        const float *x = (const float *)panel + (size_t)pair * 2 * (size_t)rows;
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++)
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
                for (int s = 0; s < SUBS; s++) {
                    vf weight = line_input(fp16, w + h * 2 * LAYOUT_HALF, k, s);
#pragma GCC unroll 16
                    for (int r = 0; r < rows; r++)
                        sum[r][h][s] = vf_fma(vf_set(x[k * rows + r]), weight, sum[r][h][s]);
                }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
            for (int s = 0; s < SUBS; s++)
                vf_store(out + r * LAYOUT_BLOCK + h * LAYOUT_HALF + s * VL, sum[r][h][s]);
}

ALWAYS_INLINE void product_rows(const int rows, const bool fp16, const void *panel, const uint16_t *w, int32_t width, float *out)
{
    if (rows <= MAX_ROWS_BOTH) {
        product_halves(rows, 2, fp16, panel, w, width, out);
        return;
    }
    product_halves(rows, 1, fp16, panel, w, width, out);
    product_halves(rows, 1, fp16, panel, w + 2 * LAYOUT_HALF, width, out + LAYOUT_HALF);
}

#define PRODUCT_CASE(n)                                                                                                                    \
    case n:                                                                                                                                \
        product_rows(n, PRODUCT_FP16, panel, w, width, out);                                                                               \
        return;
#if MAX_ROWS == 12
#define PRODUCT_CASES                                                                                                                      \
    PRODUCT_CASE(1)                                                                                                                        \
    PRODUCT_CASE(2)                                                                                                                        \
    PRODUCT_CASE(3)                                                                                                                        \
    PRODUCT_CASE(4)                                                                                                                        \
    PRODUCT_CASE(5)                                                                                                                        \
    PRODUCT_CASE(6)                                                                                                                        \
    PRODUCT_CASE(7) PRODUCT_CASE(8) PRODUCT_CASE(9) PRODUCT_CASE(10) PRODUCT_CASE(11) PRODUCT_CASE(12)
#elif MAX_ROWS == 6
#define PRODUCT_CASES PRODUCT_CASE(1) PRODUCT_CASE(2) PRODUCT_CASE(3) PRODUCT_CASE(4) PRODUCT_CASE(5) PRODUCT_CASE(6)
#else
#define PRODUCT_CASES PRODUCT_CASE(1) PRODUCT_CASE(2) PRODUCT_CASE(3)
#endif

static void product_bf16(int rows, const void *panel, const uint16_t *w, int32_t width, float *out)
{
#define PRODUCT_FP16 false
    switch (rows) {
        PRODUCT_CASES
    }
#undef PRODUCT_FP16
}

static void product_fp16(int rows, const void *panel, const uint16_t *w, int32_t width, float *out)
{
#define PRODUCT_FP16 true
    switch (rows) {
        PRODUCT_CASES
    }
#undef PRODUCT_FP16
}

/* Adds an adapter's B s to 16 sums; `b` is one half of B (see layout.h). Summed apart, then added once. */
ALWAYS_INLINE void expand_half(const bool fp16, const uint16_t *b, const uint16_t *s, int32_t rank, vf sum[SUBS])
{
    vf delta[SUBS];
#pragma GCC unroll 4
    for (int i = 0; i < SUBS; i++)
        delta[i] = vf_set(0);
    for (int32_t k = 0; k < rank; k += 2, b += 2 * LAYOUT_HALF) {
#if DOT_PAIRS
        if (!fp16) {
            int32_t pair;
            memcpy(&pair, s + k, 4);
            delta[0] = _mm512_dpbf16_ps(delta[0], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(b));
            continue;
        }
#endif
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            vf x = vf_set(fp16 ? dtype_fp16_to_f32(s[k + i]) : dtype_bf16_to_f32(s[k + i]));
#pragma GCC unroll 4
            for (int j = 0; j < SUBS; j++)
                delta[j] = vf_fma(x, line_input(fp16, b, i, j), delta[j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < SUBS; i++)
        sum[i] += delta[i];
}

#endif
