/* SPDX-License-Identifier: Apache-2.0
 *
 * Random weights of a given shape, for load tests. Every element is a function of the seed and its place, so that the bits
 * do not depend on how the work is cut; values come from a small table, so that one core makes gigabytes a second.
 */
#include "engine/convert.h"
#include "engine/plan.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LEVELS 4096 /* of the uniform distribution: twelve bits of random a value */
#define MAX_LAYERS 4096

static uint64_t mix(uint64_t v)
{
    v ^= v >> 30;
    v *= 0xbf58476d1ce4e5b9u;
    v ^= v >> 27;
    v *= 0x94d049bb133111ebu;
    return v ^ v >> 31;
}

void synthetic_rows(uint64_t seed, int64_t layer, int32_t expert, enum kernel_projection p, int32_t row0, int32_t rows, int32_t columns,
                    enum dtype op, uint16_t *dst)
{
    uint16_t level[LEVELS];
    const float edge = sqrtf(3.0f / (float)columns); /* uniform in [-edge, edge]: variance 1 / fan_in */
    for (int i = 0; i < LEVELS; i++)
        level[i] = convert_narrow(edge * ((float)(2 * i + 1) / LEVELS - 1.0f), op);
    const uint64_t stream = mix(mix(seed + (uint64_t)layer * 0x9e3779b97f4a7c15u) + (uint64_t)expert * KERNEL_PROJECTIONS + (uint64_t)p);
    const uint64_t blocks = ((uint64_t)columns + 3) / 4; /* four values a draw; a row begins a draw */
    for (int32_t r = 0; r < rows; r++) {
        uint64_t at = stream + ((uint64_t)(row0 + r) * blocks) * 0x9e3779b97f4a7c15u;
        int32_t c = 0;
        for (; c + 4 <= columns; c += 4, at += 0x9e3779b97f4a7c15u) {
            uint64_t v = mix(at);
            dst[c] = level[v >> 52];
            dst[c + 1] = level[v >> 36 & (LEVELS - 1)];
            dst[c + 2] = level[v >> 20 & (LEVELS - 1)];
            dst[c + 3] = level[v >> 4 & (LEVELS - 1)];
        }
        for (uint64_t v = mix(at); c < columns; c++, v <<= 16)
            dst[c] = level[v >> 52];
        dst += columns;
    }
}

/* ---- the description --------------------------------------------------------------------------------------- */

struct shape {
    int64_t e, k, h, i, l, seed;
};

static enum engine_code parse_shape(const char *text, struct shape *out, enum kernel_activation *activation, struct engine_error *error)
{
    const struct {
        const char *key;
        int64_t *value, max;
    } field[] = {{"E", &out->e, KERNEL_MAX_EXPERTS}, {"K", &out->k, KERNEL_MAX_EXPERTS}, {"H", &out->h, KERNEL_MAX_WIDTH},
                 {"I", &out->i, KERNEL_MAX_WIDTH},   {"L", &out->l, MAX_LAYERS},         {"SEED", &out->seed, INT64_MAX}};
    const size_t fields = sizeof field / sizeof field[0];
    *out = (struct shape){.seed = 1};
    *activation = KERNEL_ACT_SILU;
    for (const char *s = text; *s;) {
        size_t length = strcspn(s, ","), name = strcspn(s, "=");
        const char *value = s + name + 1;
        size_t f = 0;
        if (name + 1 >= length)
            return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic: \"%.100s\" is not NAME=VALUE,...", s);
        while (f < fields && (strlen(field[f].key) != name || memcmp(field[f].key, s, name)))
            f++;
        if (f < fields) {
            char *end;
            errno = 0;
            long long v = strtoll(value, &end, 10);
            if (end != s + length || errno || v < (f + 1 < fields) || v > field[f].max)
                return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic: %.*s is not a number from %d to %lld", (int)length, s,
                                   f + 1 < fields, (long long)field[f].max);
            *field[f].value = v;
        } else if (name == 3 && !memcmp(s, "ACT", 3)) {
            char act[32];
            snprintf(act, sizeof act, "%.*s", (int)(s + length - value), value);
            if (!family_parse_activation(act, activation))
                return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic: ACT=%s is none of silu, gelu, gelu_tanh, gpt_oss", act);
        } else {
            return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic: %.*s: there is no such field (E, K, H, I, L, ACT, SEED)", (int)name,
                               s);
        }
        s += length;
        s += *s == ',';
    }
    for (size_t f = 0; f + 1 < fields; f++)
        if (!*field[f].value)
            return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic: %s is missing", field[f].key);
    if (out->k > out->e)
        return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic: K=%lld is more than E=%lld", (long long)out->k, (long long)out->e);
    return ENGINE_OK;
}

enum engine_code synthetic_plan(const struct engine_options *options, struct model *model, struct plan *plan, struct engine_error *error)
{
    struct shape shape;
    struct selection keep_layers, keep_experts;
    int32_t layer[MAX_LAYERS], layers = 0;
    if (options->model)
        return engine_fail(error, ENGINE_BAD_OPTION, "--model and --synthetic exclude each other");
    enum engine_code code = parse_shape(options->synthetic, &shape, &model->activation, error);
    if (!code)
        code = selection_parse(options->layers, "--layers", &keep_layers, error);
    if (!code)
        code = selection_parse(options->experts, "--experts", &keep_experts, error);
    if (!code)
        code = plan_choose_dtype(options->dtype, false, &model->dims.op, error);
    if (code)
        return code;
    for (int32_t r = 0; r < keep_layers.ranges; r++)
        if (keep_layers.range[r].last >= shape.l)
            return engine_fail(error, ENGINE_BAD_OPTION, "--layers: there is no layer %d; the model has 0 to %lld",
                               keep_layers.range[r].last, (long long)shape.l - 1);
    for (int32_t l = 0; l < shape.l; l++)
        if (selection_has(&keep_layers, l))
            layer[layers++] = l;
    code = plan_hold(model, plan, layer, layers, (int32_t)shape.e, &keep_experts, error);
    if (code)
        return code;
    strcpy(model->family, "synthetic");
    model->top_k = (int32_t)shape.k;
    model->dims.hidden = (int32_t)shape.h;
    model->dims.inter = (int32_t)shape.i;
    model->checkpoint_layers = shape.l;
    plan->seed = (uint64_t)shape.seed;
    return ENGINE_OK;
}
