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
    /* No branches from here: which of the two lengths fits is a coin toss. */
    uint32_t unit = value / 4, tens = unit / 10;
    bool down = low <= 40 * tens, up = 40 * tens + 40 <= high, shorter = down ^ up;
    uint32_t short_digits = tens + up;
    down = low <= 4 * unit;
    up = 4 * unit + 4 <= high;
    bool nearer = (value > 4 * unit + 2) | ((value == 4 * unit + 2) & (unit & 1));
    uint32_t long_digits = unit + ((up & !down) | ((up == down) & nearer));
    *digits = long_digits ^ ((long_digits ^ short_digits) & -(uint32_t)shorter);
    return k + shorter;
}

/* Eight digits in memory order, each as a number. Halves, quarters and digits are split side by side in one word. */
static inline uint64_t split_digits(uint32_t v)
{
    uint64_t x = v / 10000 + ((uint64_t)(v % 10000) << 32);
    uint64_t hundreds = (x * 10486 >> 20) & 0x0000007f0000007fu;
    x = hundreds + ((x - hundreds * 100) << 16);
    uint64_t tens = (x * 103 >> 10) & 0x000f000f000f000fu;
    return tens + ((x - tens * 10) << 8);
}

/* v * 10^exponent, always as a JSON real: with a point or an exponent. v < 10^9. May write rubbish behind the text, up to
 * 28 bytes in all. */
static inline size_t write_decimal(char *dst, uint32_t v, int exponent)
{
    static const uint32_t powers[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000};
    /* log10 from log2: 1233 / 4096. */
    unsigned log = (32 - (unsigned)__builtin_clz(v)) * 1233 >> 12, count = log + (v >= powers[log]);
    int point = (int)count + exponent; /* where it stands among the digits */
    v *= powers[9 - count];
    uint64_t tail = split_digits(v % 100000000);
    int n = tail ? 9 - __builtin_clzll(tail) / 8 : 1; /* digits without zeros at the end */
    tail |= 0x3030303030303030u;
    char first = (char)('0' + v / 100000000);
    if (point <= 0 && point > -4) {
        memcpy(dst, "0.000", 5);
        dst[2 - point] = first;
        memcpy(dst + 3 - point, &tail, 8);
        return (size_t)(2 - point + n);
    }
    if (point > 0 && point < n) {
        dst[0] = first;
        memcpy(dst + 1, &tail, 8);
        dst[point] = '.';
        /* From the register: reading back what was just stored would wait for it. */
        tail >>= 8 * (point - 1);
        memcpy(dst + point + 1, &tail, 8);
        return (size_t)n + 1;
    }
    dst[0] = first;
    if (point > 0 && point <= 10) { /* an integer */
        memcpy(dst + 1, &tail, 8);
        memcpy(dst + 9, "0", 1);
        memcpy(dst + point, ".0", 2);
        return (size_t)point + 2;
    }
    char *p = dst + 1;
    if (n > 1) {
        *p++ = '.';
        memcpy(p, &tail, 8);
        p += n - 1;
    }
    *p++ = 'e';
    if (--point < 0) {
        *p++ = '-';
        point = -point;
    }
    if (point >= 10)
        *p++ = (char)('0' + point / 10);
    *p++ = (char)('0' + point % 10);
    return (size_t)(p - dst);
}

static const struct layout {
    unsigned fraction_bits;
    int bias;
} layouts[] = {[DTYPE_BF16] = {7, 127}, [DTYPE_FP16] = {10, 15}, [DTYPE_FP32] = {23, 127}};

size_t proto_bits_write(char *dst, uint32_t bits, enum dtype type)
{
    const struct layout *layout = &layouts[type];
    unsigned sign = type == DTYPE_FP32 ? bits >> 31 : bits >> 15;
    bits &= type == DTYPE_FP32 ? 0x7fffffffu : 0x7fffu;
    *dst = '-';
    dst += sign;
    if (!bits) {
        memcpy(dst, "0.0", 3);
        return sign + 3;
    }
    uint32_t exponent = bits >> layout->fraction_bits, fraction = bits & ((1u << layout->fraction_bits) - 1), digits;
    bool narrow = !fraction && exponent > 1;
    if (exponent)
        fraction |= 1u << layout->fraction_bits;
    else
        exponent = 1;
    int k = shortest_decimal(fraction, (int)exponent - layout->bias - (int)layout->fraction_bits, narrow, &digits);
    return sign + write_decimal(dst, digits, k);
}

size_t proto_write_float(char *dst, float v, enum dtype type)
{
    uint32_t bits;
    char text[PROTO_NUMBER_SPACE];
    if (type == DTYPE_FP32)
        bits = dtype_bits_from_f32(v);
    else
        bits = type == DTYPE_BF16 ? dtype_f32_to_bf16(v) : dtype_f32_to_fp16(v);
    size_t length = proto_bits_write(text, bits, type);
    memcpy(dst, text, length);
    return length;
}
