/* SPDX-License-Identifier: Apache-2.0
 *
 * Decimal numbers to floats and integers.
 *
 * A float is rounded once, from the decimal to the target type: 19 digits in an integer times a 64-bit power of ten give bounds
 * that are 2^-63 apart, and nearly always both round to the same value. When they don't, the number lies close to the middle of
 * two neighbours and is compared with it in exact arithmetic.
 */
#include "proto-json/internal.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Halfway points have at most 112 significant digits (those of float32's smallest values); digits past this count only by being there. */
#define DIGITS_KEPT 128

struct decimal {
    uint64_t digits; /* the first 19 significant ones */
    int64_t exponent; /* of the last of them */
    bool negative, truncated;
    const char *first, *last; /* the digits as written, with the point among them */
    int64_t last_exponent; /* of the last digit written */
};

static inline bool is_digit(char c) { return (unsigned char)(c - '0') < 10; }

/* How many of the eight bytes, in memory order, are digits before the first that is none. */
static inline unsigned leading_digits(uint64_t x)
{
    /* A digit's high nibble is 3, and still 3 after adding 6. The sum may carry out of bytes above 0xf9 only, into later ones. */
    uint64_t other = ((x & 0xf0f0f0f0f0f0f0f0u) | (((x + 0x0606060606060606u) & 0xf0f0f0f0f0f0f0f0u) >> 4)) ^ 0x3333333333333333u;
    return other ? (unsigned)__builtin_ctzll(other) / 8 : 8;
}

/* Whether all eight bytes are digits. The first that is none meets no carry: bytes below '0' borrow, those above '9' set the high bit in
 * the sum or, from 0xba on, in the difference. */
static inline bool all_digits(uint64_t x) { return !(((x + 0x4646464646464646u) | (x - 0x3030303030303030u)) & 0x8080808080808080u); }

static const uint32_t small_powers[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000};

/* Eight digits in memory order: neighbours are joined to pairs, pairs to fours, fours to the whole. */
static inline uint64_t eight_digits(uint64_t x)
{
    x &= 0x0f0f0f0f0f0f0f0fu;
    x = (x * (10 * 256 + 1) >> 8) & 0x00ff00ff00ff00ffu;
    x = (x * (100 * 65536 + 1) >> 16) & 0x0000ffff0000ffffu;
    return x * (10000 * (UINT64_C(1) << 32) + 1) >> 32;
}

/* More than 19 digits were written, perhaps zeros in front: keep the first 19 significant ones. */
static void decimal_trim(struct decimal *d)
{
    const char *p = d->first;
    while (p < d->last && (*p == '0' || *p == '.'))
        p++;
    /* Nothing was lost when zeros in front made up the number. */
    if (d->last - p <= 19)
        return;
    int64_t left = 0; /* digits from the first significant one on */
    uint64_t w = 0;
    int taken = 0;
    for (; p < d->last; p++) {
        if (*p == '.')
            continue;
        left++;
        if (taken < 19) {
            w = w * 10 + (uint64_t)(*p - '0');
            taken++;
        } else if (*p != '0') {
            d->truncated = true;
        }
    }
    d->digits = w;
    d->exponent = d->last_exponent + (left - taken);
}

/* The grammar of a JSON number. Returns bytes used, 0 when it is none. */
static ALWAYS_INLINE size_t decimal_scan(const char *p, const char *end, struct decimal *d)
{
    const char *start = p;
    d->negative = p < end && *p == '-';
    p += d->negative;
    d->truncated = false;
    d->first = p;
    uint64_t w = 0;
    while (p < end && is_digit(*p))
        w = w * 10 + (uint64_t)(*p++ - '0');
    size_t count = (size_t)(p - d->first);
    if (!count || (count > 1 && *d->first == '0'))
        return 0;
    int64_t exponent = 0;
    if (p < end && *p == '.') {
        const char *fraction = ++p;
        while (end - p >= 8) {
            uint64_t x;
            memcpy(&x, p, 8);
            if (all_digits(x)) {
                w = w * 100000000 + eight_digits(x);
                p += 8;
                continue;
            }
            unsigned n = leading_digits(x);
            /* The last digits go to the end of the word, behind zeros, without a branch on how many they are. */
            w = w * small_powers[n] + eight_digits(x << 8 << (56 - 8 * n));
            p += n;
            break;
        }
        while (p < end && is_digit(*p))
            w = w * 10 + (uint64_t)(*p++ - '0');
        if (p == fraction)
            return 0;
        exponent = -(p - fraction);
        count += (size_t)(p - fraction);
    }
    d->last = p;
    if (p < end && (*p | 0x20) == 'e') {
        p++;
        bool negative = p < end && *p == '-';
        if (p < end && (*p == '-' || *p == '+'))
            p++;
        const char *first = p;
        int64_t e = 0;
        /* No body is long enough for its digits to make up for an exponent of this size. */
        for (; p < end && is_digit(*p); p++)
            if (e < INT64_C(1000000000000000))
                e = e * 10 + (*p - '0');
        if (p == first)
            return 0;
        exponent += negative ? -e : e;
    }
    d->digits = w;
    d->exponent = d->last_exponent = exponent;
    if (count > 19)
        decimal_trim(d);
    return (size_t)(p - start);
}

/* ---- exact comparison ---- */

struct big {
    uint32_t word[48];
    int count;
};

static void big_multiply_add(struct big *b, uint32_t factor, uint32_t add)
{
    uint64_t carry = add;
    for (int i = 0; i < b->count; i++) {
        carry += (uint64_t)b->word[i] * factor;
        b->word[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry)
        b->word[b->count++] = (uint32_t)carry;
}

static void big_scale_ten(struct big *b, int64_t power)
{
    for (; power >= 9; power -= 9)
        big_multiply_add(b, 1000000000, 0);
    for (; power > 0; power--)
        big_multiply_add(b, 10, 0);
}

static void big_scale_two(struct big *b, int power)
{
    for (; power >= 31; power -= 31)
        big_multiply_add(b, 1u << 31, 0);
    if (power > 0)
        big_multiply_add(b, 1u << power, 0);
}

static int big_compare(const struct big *a, const struct big *b)
{
    if (a->count != b->count)
        return a->count < b->count ? -1 : 1;
    for (int i = a->count - 1; i >= 0; i--)
        if (a->word[i] != b->word[i])
            return a->word[i] < b->word[i] ? -1 : 1;
    return 0;
}

/* The number's sign against m * 2^power. It lies within float32's range and next to that value, so that neither side takes more
 * than about 1100 bits: 128 digits, 10^175, and 2^150. */
static int decimal_compare(const struct decimal *d, uint32_t m, int power)
{
    struct big a = {.count = 0}, b = {.word = {m}, .count = 1};
    int64_t exponent = d->last_exponent;
    int kept = 0;
    bool rest = false;
    for (const char *p = d->first; p < d->last; p++) {
        if (*p == '.' || (!kept && *p == '0'))
            continue;
        if (kept < DIGITS_KEPT) {
            big_multiply_add(&a, 10, (uint32_t)(*p - '0'));
            kept++;
        } else {
            rest = rest || *p != '0';
            exponent++;
        }
    }
    if (exponent >= 0)
        big_scale_ten(&a, exponent);
    else
        big_scale_ten(&b, -exponent);
    if (power >= 0)
        big_scale_two(&b, power);
    else
        big_scale_two(&a, -power);
    int order = big_compare(&a, &b);
    return order ? order : rest;
}

/* ---- rounding ---- */

struct format {
    int bits; /* of the significand, with the implicit one */
    int min_exponent; /* of the smallest normal value */
    uint32_t infinity; /* its bits: values' bits are ordered as the values, and this follows the largest */
};

static const struct format bf16 = {8, -126, 0x7f80u}, fp16 = {11, -14, 0x7c00u}, fp32 = {24, -126, 0x7f800000u};

/* Bits of the value nearest to digits * 10^q. The product may be too small, by at most `slack` in its top word. When a middle between
 * two values lies in that range, `*unsure` is set and the lower of the two is returned. */
static ALWAYS_INLINE uint32_t round_product(uint64_t digits, int q, uint64_t slack, const struct format *f, bool *unsure)
{
    int zeros = __builtin_clzll(digits);
    unsigned __int128 product = (unsigned __int128)(digits << zeros) * proto_power_mantissa[q - PROTO_POWER_MIN];
    unsigned shift = !(product >> 127);
    product <<= shift;
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    int exponent = proto_power_exponent(q) + 64 - zeros - (int)shift, keep = f->bits;
    if (exponent < f->min_exponent) {
        keep -= f->min_exponent - exponent;
        exponent = f->min_exponent;
        if (keep <= 0) {
            /* The only middle here is that of zero and the smallest value. */
            *unsure = slack && (keep ? keep == -1 && high > UINT64_MAX - slack : high == UINT64_C(1) << 63);
            return !*unsure && keep == 0 && (high > UINT64_C(1) << 63 || low);
        }
    }
    uint64_t m = high >> (64 - keep), half = UINT64_C(1) << (63 - keep), rest = high & (2 * half - 1);
    *unsure = slack && rest - (half - slack) <= slack;
    m += (uint64_t)(!*unsure) & ((rest > half) | ((rest == half) & ((low != 0) | (m & 1))));
    /* A significand that was rounded up to the next power of two carries into the exponent. */
    return ((uint32_t)(exponent - f->min_exponent) << (f->bits - 1)) + (uint32_t)m;
}

/* The number lies next to the middle of the value with bits `b` and its upper neighbour. */
static __attribute__((noinline)) uint32_t decimal_round_exactly(const struct decimal *d, uint32_t b, const struct format *f)
{
    uint32_t exponent = b >> (f->bits - 1), m = b & ((1u << (f->bits - 1)) - 1);
    if (exponent)
        m |= 1u << (f->bits - 1);
    else
        exponent = 1;
    int order = decimal_compare(d, 2 * m + 1, (int)exponent - 1 + f->min_exponent - f->bits);
    return b + (order > 0 || (order == 0 && (b & 1)));
}

static ALWAYS_INLINE uint32_t decimal_round(const struct decimal *d, const struct format *f)
{
    if (!d->digits || d->exponent < PROTO_POWER_MIN)
        return 0;
    if (d->exponent > 38)
        return f->infinity;
    /* Both factors have 64 bits. One more in the power is up to 2 in the top word, once that has its highest bit set; one more in
     * 19 digits (at least 2^59) is up to 32, and 2 for the power. */
    int q = (int)d->exponent;
    uint64_t slack = d->truncated ? 40 : proto_power_exact(q) ? 0 : 2;
    bool unsure;
    uint32_t b = round_product(d->digits, q, slack, f, &unsure);
    if (b < f->infinity && unsure)
        b = decimal_round_exactly(d, b, f);
    return b < f->infinity ? b : f->infinity;
}

/* Inlined for each type, so that its format is known. */
static ALWAYS_INLINE size_t decimal_read(const char *p, const char *end, const struct format *f, unsigned sign, uint32_t *bits,
                                         bool *overflow)
{
    struct decimal d;
    size_t used = decimal_scan(p, end, &d);
    if (!used)
        return 0;
    uint32_t b = decimal_round(&d, f);
    *overflow = b >= f->infinity;
    *bits = b | (uint32_t)d.negative << sign;
    return used;
}

size_t proto_decimal_read(const char *p, const char *end, enum dtype type, uint32_t *bits, bool *overflow)
{
    switch (type) {
    case DTYPE_BF16: return decimal_read(p, end, &bf16, 15, bits, overflow);
    case DTYPE_FP16: return decimal_read(p, end, &fp16, 15, bits, overflow);
    default: return decimal_read(p, end, &fp32, 31, bits, overflow);
    }
}

size_t proto_integer_read(const char *p, const char *end, int64_t *value, enum proto_integer *status)
{
    struct decimal d;
    size_t used = decimal_scan(p, end, &d);
    if (!used)
        return 0;
    const char *digits_end = p + d.negative;
    while (digits_end < end && is_digit(*digits_end))
        digits_end++;
    uint64_t limit = (uint64_t)INT64_MAX + d.negative;
    if (digits_end != p + used)
        *status = PROTO_INTEGER_REAL;
    else if (digits_end - d.first > 19 || d.digits > limit)
        *status = PROTO_INTEGER_RANGE;
    else {
        *status = PROTO_INTEGER_OK;
        *value = (int64_t)(d.negative ? 0 - d.digits : d.digits);
    }
    return used;
}

size_t proto_scan_float(const char *text, size_t length, float *out)
{
    uint32_t bits;
    bool overflow;
    size_t used = proto_decimal_read(text, text + length, DTYPE_FP32, &bits, &overflow);
    if (used)
        *out = dtype_f32_from_bits(bits);
    return used;
}
