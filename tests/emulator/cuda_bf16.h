/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for the CUDA toolkit's header of this name: the conversions that kernels use, by kernels/dtype.h. As there, what is not a
 * number becomes the one with all fraction bits set.
 */
#ifndef EXPERTD_TESTS_EMULATOR_CUDA_BF16_H
#define EXPERTD_TESTS_EMULATOR_CUDA_BF16_H

#include "device.h"
#include "kernels/dtype.h"

/* A kernel that is compiled twice, for two devices, is two functions: by the namespace of its operands' type. */
#if CUDA_PORTABLE
inline namespace portable
#else
inline namespace sm90
#endif
{

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
static inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {(uint16_t)(v != v ? 0x7fff : dtype_f32_to_bf16(v))}; }
static inline float __bfloat162float(__nv_bfloat16 v) { return dtype_bf16_to_f32(v.bits); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
}
#endif
