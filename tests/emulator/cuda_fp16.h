/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for the CUDA toolkit's header of this name: the conversions that kernels use, by kernels/dtype.h. As there, what is not a
 * number becomes the one with all fraction bits set.
 */
#ifndef EXPERTD_TESTS_EMULATOR_CUDA_FP16_H
#define EXPERTD_TESTS_EMULATOR_CUDA_FP16_H

#include "device.h"
#include "kernels/dtype.h"

/* A kernel that is compiled twice, for two devices, is two functions: by the namespace of its operands' type. */
#if CUDA_PORTABLE
inline namespace portable
#else
inline namespace sm90
#endif
{

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};
static inline __half __float2half_rn(float v) { return {(uint16_t)(v != v ? 0x7fff : dtype_f32_to_fp16(v))}; }
static inline float __half2float(__half v) { return dtype_fp16_to_f32(v.bits); }
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
static inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
static inline __half __ushort_as_half(unsigned short v) { return {v}; }
static inline unsigned short __half_as_ushort(__half v) { return v.bits; }
}
#endif
