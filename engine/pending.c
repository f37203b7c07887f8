/* SPDX-License-Identifier: Apache-2.0
 *
 * Weak stand-ins for parts that are being written beside this one, so that programs link meanwhile. Each goes when its part lands.
 */
#include "engine/adapter.h"
#include "engine/model.h"

#include <string.h>

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
WEAK enum engine_code registry_create(const struct registry_options *options, struct registry **out, struct engine_error *error)
{
    *out = NULL;
    return ENGINE_OK;
}
WEAK void registry_destroy(struct registry *registry) {}
WEAK void registry_begin_drain(struct registry *registry) {}
WEAK enum engine_code registry_install(struct registry *registry, const char *name, const char *path, int dir_fd, bool replace,
                                       struct engine_adapter_info *info, bool *replaced, struct engine_error *error)
{
    return ABSENT;
}
WEAK enum engine_code registry_remove(struct registry *registry, const char *name, int64_t wait_ms, struct engine_adapter_info *info,
                                      struct engine_error *error)
{
    return ABSENT;
}
WEAK enum engine_code registry_show(struct registry *registry, const char *name, struct engine_adapter_info *info,
                                    struct engine_error *error)
{
    return ABSENT;
}
WEAK enum engine_code registry_list(struct registry *registry, struct engine_adapter_info **infos, size_t *count,
                                    struct engine_error *error)
{
    return ABSENT;
}
WEAK struct engine_adapter *registry_acquire_name(struct registry *registry, const char *name, size_t len) { return NULL; }
WEAK struct engine_adapter *registry_acquire_id(struct registry *registry, int64_t id) { return NULL; }
WEAK void registry_release(struct registry *registry, struct engine_adapter *adapter) {}
WEAK void registry_stats(struct registry *registry, struct engine_stats *out) {}
WEAK int32_t engine_adapter_slot(const struct engine_adapter *adapter) { return -1; }
WEAK void engine_adapter_count_rows(struct engine_adapter *adapter, int64_t rows) {}
WEAK const char *engine_adapter_name(const struct engine_adapter *adapter) { return ""; }
WEAK void engine_adapter_info_finish(struct engine_adapter_info *info) { memset(info, 0, sizeof *info); }
WEAK bool engine_adapter_name_valid(const char *name, size_t len) { return len > 0 && len <= ENGINE_ADAPTER_NAME_MAX; }
