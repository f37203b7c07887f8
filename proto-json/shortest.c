/* SPDX-License-Identifier: Apache-2.0
 *
 * Floats to the shortest decimal that reads back as the same value of their type.
 *
 * All decimals between the middles to both neighbours read back alike. In units of 10^k, with k so chosen that this gap is 1 to 10
 * units wide, the gap holds at least one integer and at most one multiple of ten, which is shorter by a digit or more; among several
 * integers the nearest to the value is taken (R. Giulietti, "The Schubfach way to render doubles"). Products with the power of ten
 * keep two bits below the unit and remember in the lowest whether anything was cut off.
 */
#include "proto-json/internal.h"

static inline uint32_t product_sticky(uint64_t power, uint32_t factor)
{
    unsigned __int128 product = (unsigned __int128)power * factor;
    uint32_t whole = (uint32_t)(product >> 64), below = (uint32_t)(product >> 32);
    /* The power was rounded up, by less than a unit: at most 1 in `below` comes from that alone. */
    return whole | (below > 1);
}

/* value = *digits * 10^result; significand * 2^exponent is not zero. `narrow`: the lower neighbour is at half the distance. */
static int shortest_decimal(uint32_t significand, int exponent, bool narrow, uint32_t *digits)
{
    /* floor(log10(2^exponent)), or of 3/4 of that when the gap is that much smaller. */
    int k = (exponent * 1262611 - (narrow ? 524031 : 0)) >> 22;
    int shift = exponent + proto_power_exponent(-k) + 1;
    uint64_t power = proto_power_mantissa[-k - PROTO_POWER_MIN] + !proto_power_exact(-k);
    uint32_t quarter = significand * 4;
    uint32_t low = product_sticky(power, (quarter - 2 + narrow) << shift);
    uint32_t value = product_sticky(power, quarter << shift);
    uint32_t high = product_sticky(power, (quarter + 2) << shift);
    /* The middles themselves are rounded to even. */
    low += significand & 1;
    high -= significand & 1;
    uint32_t unit = value / 4, ten = unit / 10 * 10;
    if (ten) {
        bool down = low <= 4 * ten, up = 4 * (ten + 10) <= high;
        if (down != up) {
            *digits = ten / 10 + up;
            return k + 1;
        }
    }
    bool down = low <= 4 * unit, up = 4 * (unit + 1) <= high;
    if (down == up)
        up = value > 4 * unit + 2 || (value == 4 * unit + 2 && (unit & 1));
    *digits = unit + up;
    return k;
}

static inline int write_digits(char *dst, uint32_t v)
{
    char reversed[10];
    int n = 0;
    do {
        reversed[n++] = (char)('0' + v % 10);
        v /= 10;
    } while (v);
    for (int i = 0; i < n; i++)
        dst[i] = reversed[n - 1 - i];
    return n;
}

/* 0.d * 10^point, always as a JSON real: with a point or an exponent. */
static size_t write_decimal(char *dst, uint32_t v, int exponent)
{
    char digits[10];
    char *p = dst;
    while (v % 10 == 0) {
        v /= 10;
        exponent++;
    }
    int n = write_digits(digits, v), point = n + exponent;
    if (point > 0 && point <= 10) {
        int whole = n < point ? n : point;
        memcpy(p, digits, (size_t)whole);
        memset(p + whole, '0', (size_t)(point - whole));
        p += point;
        *p++ = '.';
        if (n <= point)
            *p++ = '0';
        else
            memcpy(p, digits + point, (size_t)(n - point));
        return (size_t)(p - dst) + (n > point ? (size_t)(n - point) : 0);
    }
    if (point <= 0 && point > -4) {
        memcpy(p, "0.000", 5);
        p += 2 - point;
        memcpy(p, digits, (size_t)n);
        return (size_t)(p - dst) + (size_t)n;
    }
    *p++ = digits[0];
    if (n > 1) {
        *p++ = '.';
        memcpy(p, digits + 1, (size_t)n - 1);
        p += n - 1;
    }
    *p++ = 'e';
    if (point < 1)
        *p++ = '-';
    p += write_digits(p, (uint32_t)(point < 1 ? 1 - point : point - 1));
    return (size_t)(p - dst);
}

size_t proto_write_float(char *dst, float v, enum dtype dtype)
{
    uint32_t bits, fraction_bits, bias;
    size_t used = 0;
    if (dtype == DTYPE_FP32) {
        bits = dtype_bits_from_f32(v);
        fraction_bits = 23;
        bias = 127;
    } else if (dtype == DTYPE_BF16) {
        bits = (uint32_t)dtype_f32_to_bf16(v) << 16;
        bits = (bits & 0x80000000u) | (bits & 0x7fffffffu) >> 16;
        fraction_bits = 7;
        bias = 127;
    } else {
        uint32_t half = dtype_f32_to_fp16(v);
        bits = (half & 0x8000u) << 16 | (half & 0x7fffu);
        fraction_bits = 10;
        bias = 15;
    }
    if (bits & 0x80000000u)
        dst[used++] = '-';
    bits &= 0x7fffffffu;
    if (!bits) {
        memcpy(dst + used, "0.0", 3);
        return used + 3;
    }
    uint32_t exponent = bits >> fraction_bits, fraction = bits & ((1u << fraction_bits) - 1), digits;
    bool narrow = !fraction && exponent > 1;
    if (exponent)
        fraction |= 1u << fraction_bits;
    else
        exponent = 1;
    int k = shortest_decimal(fraction, (int)exponent - (int)bias - (int)fraction_bits, narrow, &digits);
    return used + write_decimal(dst + used, digits, k);
}
