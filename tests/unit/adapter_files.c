/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/adapter_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct model *test_model_create(const struct test_model_shape *shape)
{
    struct model *m = calloc(1, sizeof *m);
    m->held_experts = calloc((size_t)shape->experts, sizeof *m->held_experts);
    m->local_expert = calloc((size_t)shape->experts, sizeof *m->local_expert);
    m->layer = calloc(4, sizeof *m->layer);
    m->held_layers = calloc(4, sizeof *m->held_layers);
    strcpy(m->family, "test");
    m->experts = shape->experts;
    int32_t held = 0;
    for (int32_t e = 0; e < shape->experts; e++) {
        bool is_held = shape->held[0] < 0;
        for (int i = 0; i < 8 && shape->held[i] >= 0; i++)
            is_held |= shape->held[i] == e;
        m->local_expert[e] = is_held ? held : -1;
        if (is_held)
            m->held_experts[held++] = e;
    }
    m->dims = (struct kernel_dims){.experts = held, .hidden = shape->hidden, .inter = shape->inter, .op = shape->op};
    kernels_ref()->dims_init(&m->dims);
    for (; m->layers < 4 && shape->layers[m->layers] >= 0; m->layers++)
        m->held_layers[m->layers] = m->layer[m->layers].layer = shape->layers[m->layers];
    m->checkpoint_layers = shape->checkpoint_layers;
    m->transposed = shape->transposed;
    m->fused = shape->interleaved ? MODEL_FUSED_INTERLEAVED : MODEL_FUSED_HALVES;
    return m;
}

void test_model_destroy(struct model *m)
{
    free(m->held_experts);
    free(m->local_expert);
    free(m->layer);
    free(m->held_layers);
    free(m);
}

/* Exact in bf16. */
float test_adapter_value(unsigned seed, int64_t i) { return (float)((int)((seed * 37u + (unsigned)i * 11u) % 255u) - 127) / 64.0f; }

void test_adapter_tensor(struct st_writer *w, const char *name, const char *dtype, int64_t rows, int64_t cols, unsigned seed)
{
    size_t size = strcmp(dtype, "F32") ? 2 : 4;
    char *data = malloc((size_t)(rows * cols) * size);
    for (int64_t i = 0; i < rows * cols; i++)
        dtype_store_f32(data + (size_t)i * size,
                        size == 4              ? DTYPE_FP32
                        : strcmp(dtype, "F16") ? DTYPE_BF16
                                               : DTYPE_FP16,
                        test_adapter_value(seed, i));
    st_writer_add(w, name, dtype, 2, (int64_t[]){rows, cols}, data, (size_t)(rows * cols) * size);
    free(data);
}

void test_adapter_write(const struct scratch *s, const char *name, const struct test_model_shape *shape, int layer, int experts, int rank,
                        unsigned seed)
{
    char path[256], tensor[256];
    mkdirat(s->fd, name, 0755);
    snprintf(path, sizeof path, "%s/adapter_config.json", name);
    scratch_write_text(s, path, "{\"peft_type\":\"LORA\",\"r\":%d,\"lora_alpha\":%d}", rank, 2 * rank);
    struct st_writer w;
    st_writer_init(&w);
    static const char *const projections[] = {"gate_proj", "up_proj", "down_proj"};
    for (int e = 0; e < experts; e++)
        for (int p = 0; p < 3; p++) {
            int64_t in = p == 2 ? shape->inter : shape->hidden, out = p == 2 ? shape->hidden : shape->inter;
            snprintf(tensor, sizeof tensor, "base_model.model.model.layers.%d.mlp.experts.%d.%s.lora_A.weight", layer, e, projections[p]);
            test_adapter_tensor(&w, tensor, "BF16", rank, in, seed + (unsigned)(e * 3 + p));
            snprintf(tensor, sizeof tensor, "base_model.model.model.layers.%d.mlp.experts.%d.%s.lora_B.weight", layer, e, projections[p]);
            test_adapter_tensor(&w, tensor, "BF16", out, rank, seed + 1000 + (unsigned)(e * 3 + p));
        }
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", name);
    st_writer_finish(&w, s, path);
}
