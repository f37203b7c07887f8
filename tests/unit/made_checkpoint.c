/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/made_checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

float made_value(int32_t layer, int32_t expert, int kind, int32_t row, int32_t column)
{
    uint32_t h = (uint32_t)layer * 73856093u ^ (uint32_t)expert * 19349663u ^ (uint32_t)kind * 83492791u ^ (uint32_t)row * 2654435761u ^
                 (uint32_t)column * 40503u;
    h = (h ^ h >> 15) * 2246822519u;
    h ^= h >> 13;
    return (float)((int)(h % 255) - 127) / 64.0f;
}

/* What element `at` of a tensor holds. */
typedef float (*element)(const struct made *m, int32_t layer, int32_t expert, const int64_t *at);

static float separate(const struct made *m, int32_t layer, int32_t kind, const int64_t *at)
{
    (void)m;
    return made_value(layer, kind >> 2, kind & 3, (int32_t)at[0], (int32_t)at[1]);
}

static float fused_gate_up(const struct made *m, int32_t layer, int32_t kind, const int64_t *at)
{
    bool transposed = m->layout >= MADE_FUSED_TRANSPOSED;
    int32_t channel = (int32_t)at[transposed ? 2 : 1], column = (int32_t)at[transposed ? 1 : 2];
    (void)kind;
    if (m->layout == MADE_GPT_OSS)
        return made_value(layer, (int32_t)at[0], channel % 2, channel / 2, column);
    return made_value(layer, (int32_t)at[0], channel >= m->inter, channel % m->inter, column);
}

static float fused_down(const struct made *m, int32_t layer, int32_t kind, const int64_t *at)
{
    bool transposed = m->layout >= MADE_FUSED_TRANSPOSED;
    (void)kind;
    return made_value(layer, (int32_t)at[0], KERNEL_DOWN, (int32_t)at[transposed ? 2 : 1], (int32_t)at[transposed ? 1 : 2]);
}

static float gate_up_bias(const struct made *m, int32_t layer, int32_t kind, const int64_t *at)
{
    (void)m, (void)kind;
    return made_value(layer, (int32_t)at[0], 3 + at[1] % 2, (int32_t)at[1] / 2, 0);
}

static float down_bias(const struct made *m, int32_t layer, int32_t kind, const int64_t *at)
{
    (void)m, (void)kind;
    return made_value(layer, (int32_t)at[0], 5, (int32_t)at[1], 0);
}

struct output {
    struct st_writer shard[16];
    char *map;
    size_t count, map_length;
    const struct made *made;
    const struct scratch *folder;
};

static void add(struct output *o, struct made_tensor t, int32_t layer, int32_t kind, element value)
{
    const struct made *m = o->made;
    const int64_t shape[4] = {t.shape[0], t.shape[1], t.rank > 2 ? t.shape[2] : 1, 1};
    if (!t.dtype)
        t.dtype = m->dtype;
    if (m->edit && !m->edit(&t))
        return;
    size_t width = !strcmp(t.dtype, "F32") ? 4 : !strncmp(t.dtype, "F8", 2) ? 1 : 2, n = 1, i = 0;
    for (int r = 0; r < t.rank; r++)
        n *= (size_t)t.shape[r];
    unsigned char *data = calloc(n + 1, width);
    if (!data)
        exit(1);
    for (int64_t a = 0; width > 1 && a < shape[0]; a++)
        for (int64_t b = 0; b < shape[1]; b++)
            for (int64_t c = 0; c < shape[2] && i < n; c++, i++)
                dtype_store_f32(data + i * width,
                                width == 4                ? DTYPE_FP32
                                : !strcmp(t.dtype, "F16") ? DTYPE_FP16
                                                          : DTYPE_BF16,
                                m->scale * value(m, layer, kind, (int64_t[]){a, b, c}));
    int32_t shard = m->shards ? (int32_t)(o->count % (size_t)m->shards) : 0;
    st_writer_add(&o->shard[shard], t.name, t.dtype, t.rank, t.shape, data, n * width);
    free(data);
    o->map = realloc(o->map, o->map_length + 300);
    if (!o->map)
        exit(1);
    o->map_length += (size_t)snprintf(o->map + o->map_length, 300, "%s\"%s\":\"part%d.safetensors\"", o->count ? "," : "", t.name, shard);
    o->count++;
}

static void name_tensor(struct made_tensor *t, const struct made *m, int32_t layer, const char *rest)
{
    snprintf(t->name, sizeof t->name, "%slayers.%d.%s", m->prefix, layer, rest);
}

static void add_layer(struct output *o, int32_t layer)
{
    static const char *const role[2][3] = {{"w1", "w3", "w2"}, {"gate_proj", "up_proj", "down_proj"}};
    const struct made *m = o->made;
    const int64_t e = m->experts, h = m->hidden, i = m->inter;
    struct made_tensor t = {.rank = 2, .shape = {e, h}};
    name_tensor(&t, m, layer, m->layout == MADE_MIXTRAL ? "block_sparse_moe.gate.weight" : "mlp.gate.weight");
    add(o, t, layer, 0, separate);
    if (m->layout <= MADE_SEPARATE) {
        for (int32_t x = 0; x < e; x++)
            for (int p = 0; p < KERNEL_PROJECTIONS; p++) {
                char rest[100];
                snprintf(rest, sizeof rest, "%s.experts.%d.%s.weight", m->layout == MADE_MIXTRAL ? "block_sparse_moe" : "mlp", x,
                         role[m->layout][p]);
                name_tensor(&t, m, layer, rest);
                t.shape[0] = p == KERNEL_DOWN ? h : i;
                t.shape[1] = p == KERNEL_DOWN ? i : h;
                add(o, t, layer, x << 2 | p, separate);
            }
        return;
    }
    bool transposed = m->layout >= MADE_FUSED_TRANSPOSED, llama4 = m->layout == MADE_LLAMA4, granite = m->layout == MADE_GRANITE;
    struct made_tensor g = {.rank = 3, .shape = {e, transposed ? h : 2 * i, transposed ? 2 * i : h}};
    struct made_tensor d = {.rank = 3, .shape = {e, transposed ? i : h, transposed ? h : i}};
    name_tensor(&g, m, layer,
                granite  ? "block_sparse_moe.input_linear.weight"
                : llama4 ? "feed_forward.experts.gate_up_proj"
                         : "mlp.experts.gate_up_proj");
    name_tensor(&d, m, layer,
                granite  ? "block_sparse_moe.output_linear.weight"
                : llama4 ? "feed_forward.experts.down_proj"
                         : "mlp.experts.down_proj");
    add(o, g, layer, 0, fused_gate_up);
    add(o, d, layer, 0, fused_down);
    if (m->layout != MADE_GPT_OSS)
        return;
    t.shape[0] = e;
    t.shape[1] = 2 * i;
    name_tensor(&t, m, layer, "mlp.experts.gate_up_proj_bias");
    add(o, t, layer, 0, gate_up_bias);
    t.shape[1] = h;
    name_tensor(&t, m, layer, "mlp.experts.down_proj_bias");
    add(o, t, layer, 0, down_bias);
}

void made_write(struct made *m, const struct scratch *folder)
{
    static const char *const type[] = {"mixtral", "qwen3_moe", "granitemoe", "qwen3_moe", "qwen3_moe", "gpt_oss", "llama4_text"};
    m->prefix = m->prefix ? m->prefix : "model.";
    m->dtype = m->dtype ? m->dtype : "BF16";
    m->experts = m->experts ? m->experts : 4;
    m->hidden = m->hidden ? m->hidden : 24;
    m->inter = m->inter ? m->inter : 16;
    m->layers = m->layers ? m->layers : 2;
    m->scale = m->scale != 0 ? m->scale : 1;
    struct output o = {.made = m, .folder = folder};
    for (int32_t l = 0; l < m->layers; l++)
        add_layer(&o, m->first_layer + l);
    for (int32_t s = 0; s < (m->shards ? m->shards : 1); s++) {
        char name[64] = "model.safetensors";
        if (m->shards)
            snprintf(name, sizeof name, "part%d.safetensors", s);
        st_writer_finish(&o.shard[s], folder, name);
    }
    if (m->shards)
        scratch_write_text(folder, "model.safetensors.index.json", "{\"metadata\":{},\"weight_map\":{%s}}", o.map);
    free(o.map);
    if (m->config)
        scratch_write_text(folder, "config.json", "%s", m->config);
    else
        scratch_write_text(
            folder, "config.json",
            "{\"model_type\":\"%s\",\"num_experts\":%d,\"num_experts_per_tok\":2,\"hidden_size\":%d,\"intermediate_size\":%d,"
            "\"num_hidden_layers\":%d,\"hidden_act\":\"silu\"}",
            type[m->layout], m->experts, m->hidden, m->inter, m->first_layer + m->layers);
}

uint16_t packed_weight(const struct kernel_table *k, const struct model *m, int32_t layer, int32_t expert, enum kernel_projection p,
                       int32_t row, int32_t column)
{
    const struct kernel_weights *w = &m->layer[layer].weights;
    const char *base = p == KERNEL_DOWN ? (const char *)w->down + k->down_bytes(&m->dims) * (size_t)expert
                                        : (const char *)w->gate_up + k->gate_up_bytes(&m->dims) * (size_t)expert;
    struct kernel_span span;
    k->span(&m->dims, p, row, 1, &span);
    uint16_t v;
    memcpy(&v, base + span.offset + 2 * (size_t)column, 2);
    return v;
}

/* ---- the device -------------------------------------------------------------------------------------------- */

static struct heap_device *heap_of(struct device *device) { return (struct heap_device *)device; }

static enum engine_code heap_alloc(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error)
{
    struct heap_device *d = heap_of(device);
    *out = 0;
    void *p = d->allocations_left ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
    if (!p)
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "heap: no room for %zu bytes", bytes);
    d->allocations_left -= d->allocations_left > 0;
    memset(p, 0xa5, bytes);
    d->allocated += (int64_t)bytes;
    *out = (uint64_t)(uintptr_t)p;
    return ENGINE_OK;
}

static void heap_free(struct device *device, uint64_t address, size_t bytes)
{
    heap_of(device)->allocated -= (int64_t)bytes;
    free((void *)(uintptr_t)address);
}

static size_t heap_prepare_bytes(struct device *device, const struct device_limits *limits)
{
    return limits->dims.hidden > 0 && limits->layers > 0 ? heap_of(device)->batches : 0;
}

static void heap_memory_info(struct device *device, int64_t *total, int64_t *free_now) { *total = *free_now = heap_of(device)->memory; }

static void *heap_host_alloc(struct device *device, size_t bytes)
{
    (void)device;
    return malloc(bytes);
}

static void heap_host_free(struct device *device, void *memory, size_t bytes)
{
    (void)device, (void)bytes;
    free(memory);
}

static enum engine_code heap_upload(struct device *device, uint64_t dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                    size_t height, struct engine_error *error)
{
    (void)error;
    for (size_t i = 0; i < height; i++)
        memcpy((char *)(uintptr_t)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    __atomic_fetch_add(&heap_of(device)->uploaded, (int64_t)(width * height), __ATOMIC_RELAXED);
    return ENGINE_OK;
}

void heap_device_init(struct heap_device *d, const struct kernel_table *kernels, bool direct_memory)
{
    static const struct device_ops ops = {
        .alloc = heap_alloc,
        .free = heap_free,
        .prepare_bytes = heap_prepare_bytes,
        .memory_info = heap_memory_info,
        .host_alloc = heap_host_alloc,
        .host_free = heap_host_free,
        .upload = heap_upload,
    };
    *d = (struct heap_device){.memory = INT64_MAX, .allocations_left = -1};
    d->device.ops = &ops;
    d->device.kernels = kernels;
    d->device.kind = "heap";
    d->device.direct_memory = direct_memory;
    d->device.host_pool = kernels_cpu_stream_create(3);
    if (!d->device.host_pool)
        exit(1);
}

void heap_device_finish(struct heap_device *d) { kernels_cpu_stream_destroy(d->device.host_pool); }
