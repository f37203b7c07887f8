/* SPDX-License-Identifier: Apache-2.0
 *
 * Weak stand-ins for parts that are being written beside this one, so that programs link meanwhile. Each goes when its part lands.
 */
#include "engine/model.h"

#define WEAK __attribute__((weak))
#define ABSENT engine_fail(error, ENGINE_INTERNAL, "%s: this build lacks the part", __func__)

WEAK enum engine_code model_load(struct device *device, const struct engine_options *options, const atomic_bool *cancel, struct model **out,
                                 struct engine_error *error)
{
    return ABSENT;
}
WEAK void model_destroy(struct model *model) {}
WEAK const struct model_layer *model_find_layer(const struct model *model, int64_t layer)
{
    for (int32_t i = 0; i < model->layers; i++) {
        if (model->layer[i].layer == layer)
            return &model->layer[i];
    }
    return NULL;
}
WEAK enum engine_code engine_check(const char *path, const struct engine_options *options, FILE *out) { return ENGINE_INTERNAL; }
WEAK bool model_parse_layer_name(const char *name, int64_t *layer, const char **rest) { return false; }
