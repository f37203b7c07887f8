/* SPDX-License-Identifier: Apache-2.0
 *
 * A model: the expert weights of the layers and experts held here, resident on a device. Immutable after loading.
 */
#ifndef EXPERTD_ENGINE_MODEL_H
#define EXPERTD_ENGINE_MODEL_H

#include "engine/device.h"
#include "engine/engine.h"

/* How a family lays its fused tensors out and how its adapters must be read (see family.c). */
enum model_fused { MODEL_FUSED_HALVES, MODEL_FUSED_INTERLEAVED };

struct model_layer {
    int32_t layer; /* number in the checkpoint */
    struct kernel_weights weights;
};

struct model {
    char family[64]; /* model_type of the config, "synthetic", or the layout's name */
    struct kernel_dims dims; /* dims.experts counts those held */
    int32_t experts; /* of the checkpoint */
    int32_t top_k; /* of the config; 0 unknown */
    int32_t *held_experts; /* [dims.experts], ascending */
    int32_t *local_expert; /* [experts] index among the held ones, or -1 */
    struct model_layer *layer; /* [layers], ascending */
    int32_t layers;
    int32_t *held_layers; /* [layers] */
    int64_t checkpoint_layers; /* 1 + the largest layer number with experts in the checkpoint */
    enum kernel_activation activation;
    bool weight_on_input;
    enum model_fused fused; /* order of gate and up in a fused gate_up, also in adapters for it */
    bool transposed; /* fused parameters are [E, in, out] in the family's own model (gpt_oss, llama4) */
    int64_t weight_bytes; /* device memory */
    int64_t tensors, ignored; /* of the files: those that weights come from, and those of other modules or not held */
    struct device *device; /* not owned */
    void *memory; /* the model's own bookkeeping of device memory */
};

/* Reads options->model or makes options->synthetic; only the model options are looked at. */
enum engine_code model_load(struct device *device, const struct engine_options *options, const atomic_bool *cancel, struct model **out,
                            struct engine_error *error);
/* The same without reading or allocating any weights: dims and bookkeeping are filled, weights are NULL. `report`, when not
 * NULL, gets one line for every fault found, and loading goes on to find more; the first is returned. */
enum engine_code model_inspect(const struct kernel_table *kernels, const struct engine_options *options, FILE *report, struct model **out,
                               struct engine_error *error);
void model_destroy(struct model *model); /* NULL is fine */

/* NULL: not held. */
const struct model_layer *model_find_layer(const struct model *model, int64_t layer);

/* Strips the layer prefixes that training and serving code put before "layers.L."; *rest is what follows the layer number's
 * dot. False when the name is not of a decoder layer. Shared by checkpoints and adapters. */
bool model_parse_layer_name(const char *name, int64_t *layer, const char **rest);

#endif
