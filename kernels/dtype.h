/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types that tensors have on the wire, on disk and in memory, with their conversions.
 *
 * Everything here is pure and safe from any thread. The float conversions follow IEEE 754:
 * narrowing rounds to nearest, ties to even, overflows to infinity, keeps NaN a (quiet) NaN;
 * widening is exact. Pointers to elements may have any alignment, because tensors arrive
 * behind a JSON head of any length. Values are little-endian, as is every host we build for.
 */
#ifndef EXPERTD_KERNELS_DTYPE_H
#define EXPERTD_KERNELS_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum dtype {
    DTYPE_BF16 = 0, /* 8 exponent bits, 7 fraction bits */
    DTYPE_FP16 = 1, /* 5 exponent bits, 10 fraction bits */
    DTYPE_FP32 = 2,
    DTYPE_INT32 = 3,
    DTYPE_INT64 = 4,
    DTYPE_BYTES = 5, /* variable length; only on the wire */
};

/* Bytes of one element; 0 for DTYPE_BYTES. */
static inline size_t dtype_size(enum dtype d)
{
    static const uint8_t size[] = {2, 2, 4, 4, 8, 0};
    return size[d];
}

static inline bool dtype_is_float(enum dtype d) { return d <= DTYPE_FP32; }

/* The Open Inference Protocol's name: "BF16", "FP16", "FP32", "INT32", "INT64", "BYTES". */
const char *dtype_name(enum dtype d);

/* The reverse of dtype_name, over exactly `len` bytes; false when the name is none of ours. */
bool dtype_parse(const char *name, size_t len, enum dtype *out);

static inline uint32_t dtype_bits_from_f32(float v)
{
    uint32_t b;
    memcpy(&b, &v, sizeof b);
    return b;
}

static inline float dtype_f32_from_bits(uint32_t b)
{
    float v;
    memcpy(&v, &b, sizeof v);
    return v;
}

static inline float dtype_bf16_to_f32(uint16_t v) { return dtype_f32_from_bits((uint32_t)v << 16); }

static inline uint16_t dtype_f32_to_bf16(float v)
{
    uint32_t b = dtype_bits_from_f32(v);
    if ((b & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((b >> 16) | 0x40u);
    return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

static inline float dtype_fp16_to_f32(uint16_t v)
{
    uint32_t sign = (uint32_t)(v & 0x8000u) << 16, exp = (v >> 10) & 31u, frac = v & 0x3ffu;
    if (exp == 31)
        return dtype_f32_from_bits(sign | 0x7f800000u | (frac ? 0x400000u | frac << 13 : 0));
    if (exp)
        return dtype_f32_from_bits(sign | ((exp + 112u) << 23) | frac << 13);
    /* Zero and subnormals: frac * 2^-24 is exact in fp32. */
    float m = (float)frac * 0x1p-24f;
    return dtype_f32_from_bits(dtype_bits_from_f32(m) | sign);
}

static inline uint16_t dtype_f32_to_fp16(float v)
{
    uint32_t b = dtype_bits_from_f32(v), sign = (b >> 16) & 0x8000u, mag = b & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((mag >> 13) & 0x3ffu));
    if (mag >= 0x477ff000u) /* 65520 and up round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (mag >= 0x38800000u) /* normal in fp16 */
        return (uint16_t)(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13));
    /* Subnormal: adding 0.5 lines the fp16 fraction up with fp32's lowest bits, and rounds. */
    float t = dtype_f32_from_bits(mag) + 0.5f;
    return (uint16_t)(sign | (dtype_bits_from_f32(t) - 0x3f000000u));
}

/* One element at any alignment, widened. `d` is a float type. */
static inline float dtype_load_f32(const void *p, enum dtype d)
{
    if (d == DTYPE_FP32) {
        float v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return d == DTYPE_BF16 ? dtype_bf16_to_f32(h) : dtype_fp16_to_f32(h);
}

/* One element at any alignment, rounded to `d`, a float type. */
static inline void dtype_store_f32(void *p, enum dtype d, float v)
{
    if (d == DTYPE_FP32) {
        memcpy(p, &v, sizeof v);
        return;
    }
    uint16_t h = d == DTYPE_BF16 ? dtype_f32_to_bf16(v) : dtype_f32_to_fp16(v);
    memcpy(p, &h, sizeof h);
}

/* `v` rounded to `d` and widened again. */
static inline float dtype_round_f32(enum dtype d, float v)
{
    if (d == DTYPE_FP32)
        return v;
    return d == DTYPE_BF16 ? dtype_bf16_to_f32(dtype_f32_to_bf16(v)) : dtype_fp16_to_f32(dtype_f32_to_fp16(v));
}

/* `n` elements from one float type to another; the spans must not overlap unless types are equal in size. */
void dtype_convert(void *dst, enum dtype dst_type, const void *src, enum dtype src_type, size_t n);

#ifdef __cplusplus
}
#endif
#endif
