/* SPDX-License-Identifier: Apache-2.0
 *
 * The product of up to 32 rows with one block of weights on AMX tiles: two tiles of rows times the block's two halves.
 * A row's sums don't depend on the other rows of its tile; rows past the last are zeros, or rows of other tiles, and unused.
 *
 * Packed rows: [row / 16][K / 32][16 rows][32 inputs], a tile a kilobyte.
 */
#ifndef EXPERTD_KERNELS_CPU_AMX_H
#define EXPERTD_KERNELS_CPU_AMX_H

#include "kernels/cpu/layout.h"

#include <immintrin.h>

#define AMX_TILE 16
#define AMX_ROWS 32
#define AMX_DEPTH 32 /* inputs of a tile */

static void amx_begin(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = AMX_TILE;
    }
    _tile_loadconfig(&config);
}

static void amx_end(void) { _tile_release(); }

static void amx_pack_row(void *panel, const uint16_t *row, int32_t r, int32_t width)
{
    char *to = (char *)panel + (size_t)(r / AMX_TILE) * AMX_TILE * (size_t)width * 2 + (size_t)(r % AMX_TILE) * AMX_DEPTH * 2;
    for (int32_t k = 0; k < width; k += AMX_DEPTH, to += AMX_TILE * AMX_DEPTH * 2)
        _mm512_storeu_si512(to, _mm512_loadu_si512(row + k));
}

/* Fills the last tile of `rows` rows up with zeros. */
static void amx_pad_rows(void *panel, int32_t rows, int32_t width)
{
    for (int32_t r = rows; r % AMX_TILE; r++) {
        char *to = (char *)panel + (size_t)(r / AMX_TILE) * AMX_TILE * (size_t)width * 2 + (size_t)(r % AMX_TILE) * AMX_DEPTH * 2;
        for (int32_t k = 0; k < width; k += AMX_DEPTH, to += AMX_TILE * AMX_DEPTH * 2)
            _mm512_storeu_si512(to, _mm512_setzero_si512());
    }
}

/* Tile loads come in bursts that leave the hardware's prefetcher behind. */
#define AMX_PREFETCH_BYTES 4096

static inline void amx_prefetch(const char *b)
{
#pragma GCC unroll 32
    for (int i = 0; i < 2 * AMX_TILE; i++)
        _mm_prefetch(b + AMX_PREFETCH_BYTES + i * 64, _MM_HINT_T0);
}

/* Rows [r, r + rows), r a multiple of 16; `out` has room for 32 rows of 32 sums. The first to meet a block fetches it ahead. */
static void amx_product(const void *panel, int32_t r, int rows, const uint16_t *w, int32_t width, float *out)
{
    const bool fetch = r == 0;
    const size_t tile_bytes = AMX_TILE * AMX_DEPTH * 2, line = 2 * LAYOUT_HALF * 2, out_line = LAYOUT_BLOCK * sizeof(float);
    const char *a = (const char *)panel + (size_t)r * (size_t)width * 2, *b = (const char *)w;
    const char *a2 = a + AMX_TILE * (size_t)width * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= AMX_TILE) {
        for (int32_t k = 0; k < width; k += AMX_DEPTH, a += tile_bytes, b += AMX_TILE * 2 * line) {
            if (fetch)
                amx_prefetch(b);
            _tile_loadd(4, a, 64);
            _tile_loadd(6, b, 2 * line);
            _tile_loadd(7, b + line, 2 * line);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int32_t k = 0; k < width; k += AMX_DEPTH, a += tile_bytes, a2 += tile_bytes, b += AMX_TILE * 2 * line) {
            if (fetch)
                amx_prefetch(b);
            _tile_loadd(4, a, 64);
            _tile_loadd(6, b, 2 * line);
            _tile_loadd(7, b + line, 2 * line);
            _tile_loadd(5, a2, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out + AMX_TILE * LAYOUT_BLOCK, out_line);
        _tile_stored(3, out + AMX_TILE * LAYOUT_BLOCK + LAYOUT_HALF, out_line);
    }
    _tile_stored(0, out, out_line);
    _tile_stored(1, out + LAYOUT_HALF, out_line);
}

#endif
