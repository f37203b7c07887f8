/* SPDX-License-Identifier: Apache-2.0
 *
 * exp, erfc and the activations on vectors: relative error below 1e-6 over the whole range, overflow to infinity, underflow to
 * zero through the subnormals, NaN stays NaN. Every lane goes the same way, so that bits don't depend on the position.
 */
#ifndef EXPERTD_KERNELS_CPU_ACTIVATION_H
#define EXPERTD_KERNELS_CPU_ACTIVATION_H

#include "kernels/cpu/vec.h"
#include "kernels/kernels.h"

ALWAYS_INLINE vf vf_exp(vf x)
{
    /* x = n ln 2 + r, |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    const float round = 0x1.8p23f;
    x = vf_max(vf_min(x, 89.0f), -105.0f);
    vf shifted = vf_fma(x, vf_set(1.44269504f), vf_set(round));
    vf n = shifted - round;
    vf r = vf_fma(n, vf_set(-0x1.62e4p-1f), x); /* ln 2 in two parts, the first exact in products */
    r = vf_fma(n, vf_set(-0x1.7f7d1cp-20f), r);
    vf p = vf_set(1.0f / 5040);
    p = vf_fma(p, r, vf_set(1.0f / 720));
    p = vf_fma(p, r, vf_set(1.0f / 120));
    p = vf_fma(p, r, vf_set(1.0f / 24));
    p = vf_fma(p, r, vf_set(1.0f / 6));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r, vf_set(1.0f));
    p = vf_fma(p, r, vf_set(1.0f));
    /* Two factors, since 2^n itself may be out of range where p 2^n is not. */
    vi e = (vi)((vu)shifted << 10) >> 10;
    vi half = e >> 1;
    vf a = (vf)((half + 127) << 23), b = (vf)((e - half + 127) << 23);
    return p * a * b;
}

ALWAYS_INLINE vf vf_sigmoid(vf x) { return 1.0f / (1.0f + vf_exp(-x)); }

/* erfc(x) = exp(-x^2) t P(t), t = 1 / (1 + 0.4 x), for x >= 0; P is a least-squares fit of relative error 9e-8. */
ALWAYS_INLINE vf vf_erfc(vf x)
{
    static const float coefficient[] = {0.045969202f, -0.16306387f, 0.1305071f,   0.035424147f, 0.115475588f,
                                        0.178477317f, 0.205611020f, 0.225936681f, 0.225662898f};
    vf magnitude = (vf)((vu)x & 0x7fffffffu);
    vf t = 1.0f / vf_fma(magnitude, vf_set(0.4f), vf_set(1.0f));
    vf p = vf_set(coefficient[0]);
    for (size_t i = 1; i < sizeof coefficient / sizeof coefficient[0]; i++)
        p = vf_fma(p, t, vf_set(coefficient[i]));
    vf tail = vf_exp(-(magnitude * magnitude)) * t * p;
    return vf_select(x < vf_set(0), 2.0f - tail, tail);
}

ALWAYS_INLINE vf vf_activate(enum kernel_activation a, vf g, vf u)
{
    switch (a) {
    case KERNEL_ACT_SILU: return g * vf_sigmoid(g) * u;
    case KERNEL_ACT_GELU: return 0.5f * g * vf_erfc(g * -0.70710678f) * u;
    case KERNEL_ACT_GELU_TANH: /* (1 + tanh z) / 2 = sigmoid(2 z) */
        return g * vf_sigmoid(1.59576912f * vf_fma(g * g * g, vf_set(0.044715f), g)) * u;
    case KERNEL_ACT_GPT_OSS: break;
    }
    g = vf_min(g, 7.0f);
    u = vf_max(vf_min(u, 7.0f), -7.0f);
    return (u + 1.0f) * g * vf_sigmoid(g * 1.702f);
}

#endif
