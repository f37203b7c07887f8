/* SPDX-License-Identifier: Apache-2.0
 *
 * The vectors of one instruction family. Included by sources that are compiled once for each family, with FAMILY defined to its
 * name and one of FAMILY_AVX512 (with FAMILY_BF16 for its dot products), FAMILY_AVX2 or FAMILY_GENERIC.
 *
 * Everything goes by the compiler's vector types; intrinsics stand only where they can't say it. Fused multiply-add is always
 * explicit and contraction is off (see meson.build): the same source gives an element the same bits in every unrolled variant.
 */
#ifndef EXPERTD_KERNELS_CPU_VEC_H
#define EXPERTD_KERNELS_CPU_VEC_H

#include "kernels/dtype.h"

#if defined(FAMILY_AVX512)
#include <immintrin.h>
#define VL 16
#elif defined(FAMILY_AVX2)
#include <immintrin.h>
#define VL 8
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define VL 4
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define FAMILY_PASTE_(a, b) a##_##b
#define FAMILY_PASTE(a, b) FAMILY_PASTE_(a, b)
#define FAMILY_NAME(stem) FAMILY_PASTE(stem, FAMILY) /* a function's name in this family */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

ALWAYS_INLINE vf vf_load(const void *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

ALWAYS_INLINE void vf_store(void *p, vf v) { memcpy(p, &v, sizeof v); }

ALWAYS_INLINE vu vu_load(const void *p)
{
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

ALWAYS_INLINE vf vf_set(float v)
{
#if VL == 16
    return _mm512_set1_ps(v);
#elif VL == 8
    return _mm256_set1_ps(v);
#else
    return (vf){v, v, v, v};
#endif
}

ALWAYS_INLINE vu vu_set(uint32_t v) { return (vu){0} + v; }

ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c)
{
#if defined(FAMILY_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(FAMILY_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

/* mask lanes are all ones or all zeros, as comparisons give them */
ALWAYS_INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Comparisons are false for NaN, so that NaN passes through. */
ALWAYS_INLINE vf vf_min(vf v, float top) { return vf_select(v > vf_set(top), vf_set(top), v); }

ALWAYS_INLINE vf vf_max(vf v, float bottom) { return vf_select(v < vf_set(bottom), vf_set(bottom), v); }

/* The sum over lanes, by halves. */
ALWAYS_INLINE float vf_sum(vf v)
{
    float lane[VL];
    memcpy(lane, &v, sizeof v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}

/* The sums over lanes of four vectors, in the order of vf_sum. */
ALWAYS_INLINE void vf_sum4(const vf *v, float *out)
{
#if defined(FAMILY_AVX512)
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); /* four lanes of each */
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    for (int i = 0; i < 4; i++)
        out[i] = s[4 * i];
#elif defined(FAMILY_AVX2)
    for (int i = 0; i < 4; i += 2) {
        __m256 s = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 1], 0x20), _mm256_permute2f128_ps(v[i], v[i + 1], 0x31));
        s = _mm256_add_ps(s, _mm256_permute_ps(s, 0x4e));
        s = _mm256_add_ps(s, _mm256_permute_ps(s, 0xb1));
        out[i] = s[0];
        out[i + 1] = s[4];
    }
#else
    for (int i = 0; i < 4; i++)
        out[i] = vf_sum(v[i]);
#endif
}

/* VL consecutive fp16 elements, widened. */
ALWAYS_INLINE vf vf_load_fp16(const void *p)
{
#if defined(FAMILY_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(FAMILY_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    vh h;
    memcpy(&h, p, sizeof h);
    vu b = __builtin_convertvector(h, vu), sign = (b & 0x8000u) << 16, rest = (b & 0x7fffu) << 13;
    /* Scaling by 2^112 moves the exponent's bias, and makes subnormals normal; what was 31 must become 255. */
    vf scaled = (vf)rest * 0x1p112f;
    vu special = (vu)(rest >= vu_set(0x7c00u << 13)) & 0x7f800000u;
    return (vf)((vu)scaled | special | sign);
#endif
}

ALWAYS_INLINE vf vf_load_bf16(const void *p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

ALWAYS_INLINE vf vf_load_float(const void *p, enum dtype d)
{
    return d == DTYPE_FP32 ? vf_load(p) : d == DTYPE_BF16 ? vf_load_bf16(p) : vf_load_fp16(p);
}

/* Rounded to bf16 or fp16; VL elements. */
ALWAYS_INLINE void vf_store_half(void *p, enum dtype d, vf v)
{
    vh h;
    if (d == DTYPE_BF16) {
        vu b = (vu)v;
        vu rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16, nan = (b >> 16) | 0x40u;
        vu is_nan = (vu)(v != v);
        h = __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), vh);
    } else {
#if defined(FAMILY_AVX512)
        _mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        return;
#elif defined(FAMILY_AVX2)
        _mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        return;
#else
        for (int i = 0; i < VL; i++)
            h[i] = dtype_f32_to_fp16(v[i]);
#endif
    }
    memcpy(p, &h, sizeof h);
}

ALWAYS_INLINE void vf_store_float(void *p, enum dtype d, vf v)
{
    if (d == DTYPE_FP32)
        vf_store(p, v);
    else
        vf_store_half(p, d, v);
}

#endif
