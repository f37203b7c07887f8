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

/* One finite value by its bits. Inlined for each type, so that its layout is known. */
static inline __attribute__((always_inline)) size_t write_bits(char *dst, uint32_t bits, unsigned width, unsigned fraction_bits, int bias)
{
    unsigned sign = bits >> (width - 1);
    bits &= (1u << (width - 1)) - 1;
    *dst = '-';
    dst += sign;
    if (!bits) {
        memcpy(dst, "0.0", 3);
        return sign + 3;
    }
    uint32_t exponent = bits >> fraction_bits, fraction = bits & ((1u << fraction_bits) - 1), digits;
    bool narrow = !fraction && exponent > 1;
    if (exponent)
        fraction |= 1u << fraction_bits;
    else
        exponent = 1;
    int k = shortest_decimal(fraction, (int)exponent - bias - (int)fraction_bits, narrow, &digits);
    return sign + write_decimal(dst, digits, k);
}

static inline __attribute__((always_inline)) char *write_row(char *dst, const char *from, size_t count, size_t *written, unsigned width,
                                                             unsigned fraction_bits, int bias)
{
    const uint32_t infinity = ((1u << (width - 1)) - 1) >> fraction_bits << fraction_bits;
    size_t i;
    for (i = 0; i < count; i++) {
        uint32_t bits = 0;
        memcpy(&bits, from + i * (width / 8), width / 8); /* little-endian, as dtype.h says */
        if ((bits & infinity) == infinity)
            break;
        dst += write_bits(dst, bits, width, fraction_bits, bias);
        *dst++ = ',';
    }
    *written = i;
    return dst;
}

char *proto_row_write(char *dst, const char *from, size_t count, enum dtype type, size_t *written)
{
    if (type == DTYPE_FP32)
        return write_row(dst, from, count, written, 32, 23, 127);
    return type == DTYPE_BF16 ? write_row(dst, from, count, written, 16, 7, 127) : write_row(dst, from, count, written, 16, 10, 15);
}

size_t proto_write_float(char *dst, float v, enum dtype type)
{
    char text[PROTO_NUMBER_SPACE], element[4];
    size_t written;
    dtype_store_f32(element, type, v);
    size_t length = (size_t)(proto_row_write(text, element, 1, type, &written) - text) - written;
    memcpy(dst, text, length);
    return length;
}
