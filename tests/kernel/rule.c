/* SPDX-License-Identifier: Apache-2.0
 *
 * The forward pass in double, rounded to the operand type at the four points that promise 1 names and nowhere else. It shares no
 * code with the reference, which it holds to that promise.
 */
#include "rule.h"

#include <math.h>
#include <stdlib.h>

static double rounded(enum dtype type, double v)
{
    char bits[4];
    dtype_store_f32(bits, type, (float)v);
    return dtype_load_f32(bits, type);
}

/* Row `row` of a matrix of `op` elements times `v`. */
static double product(enum dtype op, const uint16_t *matrix, size_t row, const double *v, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += dtype_load_f32(matrix + row * (size_t)n + i, op) * v[i];
    return sum;
}

/* W v + bias + B s, for all output channels of one expert. */
static void project(const struct problem *p, enum kernel_projection q, int32_t expert, int32_t adapter, const double *v, double *out)
{
    const int32_t in = problem_in(p, q), channels = problem_out(p, q);
    const struct problem_delta *d = NULL;
    double s[KERNEL_MAX_RANK];
    if (adapter >= 0 && p->delta)
        d = &p->delta[((size_t)adapter * (size_t)p->o.experts + (size_t)expert) * KERNEL_PROJECTIONS + q];
    for (int32_t r = 0; d && r < d->rank; r++)
        s[r] = rounded(p->o.op, d->scale * product(p->o.op, d->a, (size_t)r, v, in));
    for (int32_t i = 0; i < channels; i++) {
        size_t row = (size_t)expert * (size_t)channels + (size_t)i;
        out[i] = product(p->o.op, p->weight[q], row, v, in) + (p->bias[q] ? p->bias[q][row] : 0);
        if (d && d->rank)
            out[i] += product(p->o.op, d->b, (size_t)i, s, d->rank);
    }
}

static double logistic(double v) { return 1 / (1 + exp(-v)); }

static double activation(enum kernel_activation a, double g, double u)
{
    switch (a) {
    case KERNEL_ACT_SILU: return g * logistic(g) * u;
    case KERNEL_ACT_GELU: return g * u * (1 + erf(g / sqrt(2))) / 2;
    case KERNEL_ACT_GELU_TANH: return g * u * (1 + tanh(sqrt(2 / acos(-1)) * (g + 0.044715 * pow(g, 3)))) / 2;
    case KERNEL_ACT_GPT_OSS: break;
    }
    g = fmin(g, 7);
    u = fmax(-7, fmin(u, 7));
    return (u + 1) * g * logistic(1.702 * g);
}

double *rule_forward(const struct problem *p)
{
    const int32_t hidden = p->o.hidden, inter = p->o.inter;
    double *out = problem_alloc((size_t)p->o.rows * (size_t)hidden * sizeof *out);
    double *x = problem_alloc((size_t)hidden * sizeof *x), *y = problem_alloc((size_t)hidden * sizeof *y);
    double *g = problem_alloc((size_t)inter * sizeof *g), *u = problem_alloc((size_t)inter * sizeof *u);
    for (int32_t t = 0; t < p->o.rows; t++) {
        const struct kernel_row *row = &p->row[t];
        const enum dtype type = (enum dtype)row->dtype;
        for (int32_t i = 0; i < hidden && row->in != UINT64_MAX; i++)
            x[i] = rounded(p->o.op, dtype_load_f32(p->input + row->in + (size_t)i * dtype_size(type), type));
        for (int32_t s = row->first_slot; s < row->first_slot + row->slots; s++) {
            const int32_t e = p->slot_expert[s];
            const double weight = p->slot_weight[s], before = p->o.weight_on_input ? weight : 1, after = p->o.weight_on_input ? 1 : weight;
            if (e < 0)
                continue;
            project(p, KERNEL_GATE, e, row->adapter, x, g);
            project(p, KERNEL_UP, e, row->adapter, x, u);
            for (int32_t i = 0; i < inter; i++)
                g[i] = rounded(p->o.op, activation(p->o.activation, before * g[i], before * u[i]));
            project(p, KERNEL_DOWN, e, row->adapter, g, y);
            for (int32_t i = 0; i < hidden; i++)
                out[(size_t)t * (size_t)hidden + (size_t)i] += after * rounded(p->o.op, y[i]);
        }
        for (int32_t i = 0; i < hidden; i++)
            out[(size_t)t * (size_t)hidden + (size_t)i] = rounded(type, out[(size_t)t * (size_t)hidden + (size_t)i]);
    }
    free(x);
    free(y);
    free(g);
    free(u);
    return out;
}
