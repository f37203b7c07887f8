/* SPDX-License-Identifier: Apache-2.0
 *
 * The inner product of a few packed rows with one block of weights: 32 sums a row, each over its own accumulator in order of k,
 * whatever the number of rows; so bits don't depend on how rows are grouped.
 *
 * Packed rows ("panel"): [K / 2][rows] pairs of bf16 for dot products of them, else [K][rows] floats.
 */
#ifndef EXPERTD_KERNELS_CPU_PRODUCT_H
#define EXPERTD_KERNELS_CPU_PRODUCT_H

#include "kernels/cpu/layout.h"
#include "kernels/cpu/vec.h"
#include "kernels/kernels.h"

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

/* How products are formed. One path and shape has one of them. */
enum product_mode {
    PRODUCT_BF16_DOT, /* dot products of pairs; flush subnormal operands and sums to zero */
    PRODUCT_BF16_FMA, /* widened to fp32 */
    PRODUCT_FP16_FMA,
};

/* Intel's cores start one dot product where they start two fused multiply-adds, which makes the two equal in work and the wider
 * panel of the latter the better one by half once it is the multipliers that limit; with few rows it is memory, and dot products
 * need the fewest instructions. AMD's start as many of either. */
static inline enum product_mode product_choose(enum dtype op, enum kernel_path path)
{
    if (op == DTYPE_FP16)
        return PRODUCT_FP16_FMA;
#if DOT_PAIRS
    if (path == KERNEL_DECODE || __builtin_cpu_is("amd"))
        return PRODUCT_BF16_DOT;
#endif
    return PRODUCT_BF16_FMA;
}

/* Bytes of one element of a panel. */
static inline size_t panel_size(enum product_mode mode) { return mode == PRODUCT_BF16_DOT ? 2 : 4; }

/* How far ahead of the loads weights are fetched, into the first-level cache and into the second: memory, not the hardware's prefetcher,
 * should set the pace. The far one has to cover the latency of memory that all cores draw on; so much at once does not fit the near one,
 * whose lines in flight are few. Rows so many that they take the halves of a block one after the other are
 * limited by the multipliers, and do with one distance. */
#define FETCH_NEAR 1024
#define FETCH_FAR 8192
#define FETCH_HALF 2048

static void panel_pack(enum product_mode mode, void *panel, const uint16_t *const *row, int rows, int32_t width)
{
    if (mode == PRODUCT_BF16_DOT) {
        for (int r = 0; r < rows; r++)
            for (int32_t k = 0; k < width / 2; k++)
                memcpy((uint32_t *)panel + (size_t)k * (size_t)rows + r, row[r] + 2 * k, 4);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int32_t k = 0; k < width; k += VL) {
            vf v = mode == PRODUCT_FP16_FMA ? vf_load_fp16(row[r] + k) : vf_load_bf16(row[r] + k);
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
ALWAYS_INLINE void product_halves(const int rows, const int halves, const enum product_mode mode, const void *panel, const uint16_t *w,
                                  int32_t width, float *out)
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
        for (int line = 0; line < halves; line++)
            __builtin_prefetch((const char *)w + (halves == 2 ? FETCH_NEAR : FETCH_HALF) + 64 * line, 0, 3);
        for (int line = 0; line < halves && halves == 2; line++)
            __builtin_prefetch((const char *)w + FETCH_FAR + 64 * line, 0, 2);
#if DOT_PAIRS
        if (mode == PRODUCT_BF16_DOT) {
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
        for (int k = 0; k < 2; k++) {
            /* Weights wait in registers for each row's input, not the other way round: fewer of them. */
            vf weight[2][SUBS];
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
                for (int s = 0; s < SUBS; s++)
                    weight[h][s] = line_input(mode == PRODUCT_FP16_FMA, w + h * 2 * LAYOUT_HALF, k, s);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf input = vf_set(x[k * rows + r]);
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
                    for (int s = 0; s < SUBS; s++)
                        sum[r][h][s] = vf_fma(input, weight[h][s], sum[r][h][s]);
            }
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

ALWAYS_INLINE void product_rows(const int rows, const enum product_mode mode, const void *panel, const uint16_t *w, int32_t width,
                                float *out)
{
    if (rows <= MAX_ROWS_BOTH) {
        product_halves(rows, 2, mode, panel, w, width, out);
        return;
    }
    product_halves(rows, 1, mode, panel, w, width, out);
    product_halves(rows, 1, mode, panel, w + 2 * LAYOUT_HALF, width, out + LAYOUT_HALF);
}

#define PRODUCT_CASE(n)                                                                                                                    \
    case n:                                                                                                                                \
        product_rows(n, PRODUCT_MODE, panel, w, width, out);                                                                               \
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

#define PRODUCT_FUNCTION(name)                                                                                                             \
    static void name(int rows, const void *panel, const uint16_t *w, int32_t width, float *out)                                            \
    {                                                                                                                                      \
        switch (rows) {                                                                                                                    \
            PRODUCT_CASES                                                                                                                  \
        }                                                                                                                                  \
    }

#if DOT_PAIRS
#define PRODUCT_MODE PRODUCT_BF16_DOT
PRODUCT_FUNCTION(product_bf16_dot)
#undef PRODUCT_MODE
#endif
#define PRODUCT_MODE PRODUCT_BF16_FMA
PRODUCT_FUNCTION(product_bf16_fma)
#undef PRODUCT_MODE
#define PRODUCT_MODE PRODUCT_FP16_FMA
PRODUCT_FUNCTION(product_fp16_fma)
#undef PRODUCT_MODE

/* `rows` packed rows, at most MAX_ROWS, with one block of weights. */
static inline void product_tile(enum product_mode mode, int rows, const void *panel, const uint16_t *w, int32_t width, float *out)
{
#if DOT_PAIRS
    if (mode == PRODUCT_BF16_DOT) {
        product_bf16_dot(rows, panel, w, width, out);
        return;
    }
#endif
    (mode == PRODUCT_FP16_FMA ? product_fp16_fma : product_bf16_fma)(rows, panel, w, width, out);
}

/* Rows that share an adapter, at once: one row's sums wait for each other, several rows' don't, and they share the loads of B. */
#define EXPAND_ROWS (8 / SUBS)

/* Adds an adapter's B s to 16 sums of each row; `b` is one half of B (see layout.h). Summed apart, then added once. Rows of s are
 * `stride` elements apart, those of sums a block. */
ALWAYS_INLINE void expand_half(const int rows, const bool fp16, const uint16_t *b, const uint16_t *s, size_t stride, int32_t rank,
                               float *sums)
{
    vf delta[EXPAND_ROWS][SUBS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < SUBS; i++)
            delta[r][i] = vf_set(0);
    for (int32_t k = 0; k < rank; k += 2, b += 2 * LAYOUT_HALF) {
#if DOT_PAIRS
        if (!fp16) {
            const __m512bh line = (__m512bh)_mm512_loadu_si512(b);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, s + (size_t)r * stride + k, 4);
                delta[r][0] = _mm512_dpbf16_ps(delta[r][0], (__m512bh)_mm512_set1_epi32(pair), line);
            }
            continue;
        }
#endif
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            vf line[SUBS];
#pragma GCC unroll 4
            for (int j = 0; j < SUBS; j++)
                line[j] = line_input(fp16, b, i, j);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const uint16_t v = s[(size_t)r * stride + k + i];
                vf x = vf_set(fp16 ? dtype_fp16_to_f32(v) : dtype_bf16_to_f32(v));
#pragma GCC unroll 4
                for (int j = 0; j < SUBS; j++)
                    delta[r][j] = vf_fma(x, line[j], delta[r][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < SUBS; i++) {
            float *to = sums + r * LAYOUT_BLOCK + i * VL;
            vf_store(to, vf_load(to) + delta[r][i]);
        }
}

#define EXPAND_CASE(n)                                                                                                                     \
    case n:                                                                                                                                \
        expand_half(n <= EXPAND_ROWS ? n : 1, EXPAND_FP16, b, s, stride, rank, sums);                                                      \
        return;

#define EXPAND_FUNCTION(name)                                                                                                              \
    static void name(int rows, const uint16_t *b, const uint16_t *s, size_t stride, int32_t rank, float *sums)                             \
    {                                                                                                                                      \
        switch (rows) {                                                                                                                    \
            EXPAND_CASE(1)                                                                                                                 \
            EXPAND_CASE(2) EXPAND_CASE(3) EXPAND_CASE(4) EXPAND_CASE(5) EXPAND_CASE(6) EXPAND_CASE(7) EXPAND_CASE(8)                       \
        }                                                                                                                                  \
    }

#define EXPAND_FP16 false
EXPAND_FUNCTION(expand_bf16)
#undef EXPAND_FP16
#define EXPAND_FP16 true
EXPAND_FUNCTION(expand_fp16)
#undef EXPAND_FP16

#endif
