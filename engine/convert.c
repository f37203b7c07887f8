/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/convert.h"

#include <string.h>

/* Sixteen bytes, which every 64-bit processor handles at once. */
typedef uint16_t lanes __attribute__((vector_size(16), aligned(1), may_alias));

void convert_count_non_finite(const void *src, enum dtype type, size_t n, struct convert_tally *t)
{
    const uint16_t exponent = type == DTYPE_BF16 ? 0x7f80 : 0x7c00;
    enum { LANES = 8, BLOCK = 128 * LANES };
    const char *p = src;
    for (; n >= BLOCK; n -= BLOCK, p += 2 * BLOCK) {
        lanes found = {0}, more = {0}; /* a lane that compares equal is -1 */
        for (const lanes *v = (const lanes *)p; (const char *)v < p + 2 * BLOCK; v += 2) {
            found -= (lanes)((v[0] & exponent) == exponent);
            more -= (lanes)((v[1] & exponent) == exponent);
        }
        found += more;
        for (int i = 0; i < LANES; i++)
            t->non_finite += found[i];
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, p + 2 * i, sizeof v);
        t->non_finite += (v & exponent) == exponent;
    }
}

void convert_values(uint16_t *dst, enum dtype op, const void *src, enum dtype from, size_t n, struct convert_tally *t)
{
    const char *p = src;
    size_t size = dtype_size(from);
    for (; from == DTYPE_FP32 && op == DTYPE_BF16 && n >= 64; n -= 64, p += 256, dst += 64) {
        uint32_t bits[64], found = 0;
        memcpy(bits, p, sizeof bits);
        for (int i = 0; i < 64; i++)
            found += (bits[i] & 0x7f800000u) == 0x7f800000u;
        if (found) /* NaN wants care: leave the block to the loop below */
            for (int i = 0; i < 64; i++)
                dst[i] = convert_one(&bits[i], from, op, t);
        else
            for (int i = 0; i < 64; i++)
                dst[i] = (uint16_t)((bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u)) >> 16);
    }
    for (size_t i = 0; i < n; i++)
        dst[i] = convert_one(p + i * size, from, op, t);
}
