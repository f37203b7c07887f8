/* SPDX-License-Identifier: Apache-2.0
 *
 * Between a checkpoint's names and its weights: which tensor, or which seed, each projection of each held expert comes from.
 * plan_read fills the model's description and the plan; the loader then carries the plan out.
 */
#ifndef EXPERTD_ENGINE_PLAN_H
#define EXPERTD_ENGINE_PLAN_H

#include "engine/checkpoint.h"
#include "engine/family.h"
#include "engine/selection.h"

struct plan_source {
    const struct safetensors_file *file;
    const struct safetensors_tensor *tensor; /* NULL: none */
    int32_t file_index;
    enum dtype dtype;
    _Atomic int64_t non_finite; /* values the loader has seen */
};

enum plan_fused { PLAN_GATE_UP, PLAN_DOWN, PLAN_GATE_UP_BIAS, PLAN_DOWN_BIAS, PLAN_FUSED };

/* Either one tensor for each projection of each held expert, or fused ones for the layer. */
struct plan_layer {
    bool fused, transposed;
    struct plan_source *source; /* [held * KERNEL_PROJECTIONS], or [PLAN_FUSED]; NULL: synthetic */
};

struct plan {
    struct checkpoint *checkpoint; /* NULL: synthetic */
    uint64_t seed; /* synthetic */
    struct plan_layer *layer; /* [layers] as in the model */
    int32_t layers;
};

/* Fills `model` (zeroed by the caller, who destroys it with model_destroy in any case) and `plan` (zeroed, too). Weights
 * and memory of the model stay NULL. `options` as for model_load. */
enum engine_code plan_read(const struct kernel_table *kernels, const struct engine_options *options, struct faults *faults,
                           struct model *model, struct plan *plan);
void plan_finish(struct plan *plan);
/* What plan_read would say about the options before it opens a shard: by config.json and the names of the tensors. */
enum engine_code plan_check_options(const struct engine_options *options, struct engine_error *error);

/* Sets the layers held and, of all experts, those held; allocates the arrays of both structs. */
enum engine_code plan_hold(struct model *model, struct plan *plan, const int32_t *layers, int32_t layer_count, int32_t experts,
                           const struct selection *held, struct engine_error *error);
/* --dtype; NULL: that of the files, if we can hold it. */
enum engine_code plan_choose_dtype(const char *name, bool float16_files, enum dtype *out, struct engine_error *error);

/* ---- synthetic.c ---- */

/* Fills model and plan from options->synthetic. */
enum engine_code synthetic_plan(const struct engine_options *options, struct model *model, struct plan *plan, struct engine_error *error);
/* Rows [row0, row0 + rows) of a projection of one expert, of `columns` each, as op elements without gaps. The bits depend on
 * nothing but the arguments; `layer` and `expert` are numbers of the checkpoint. */
void synthetic_rows(uint64_t seed, int64_t layer, int32_t expert, enum kernel_projection p, int32_t row0, int32_t rows, int32_t columns,
                    enum dtype op, uint16_t *dst);

/* ---- loader.c ---- */

/* Fills the device memory that the model's weights point to. */
enum engine_code loader_run(struct device *device, struct model *model, struct plan *plan, const struct engine_options *options,
                            const atomic_bool *cancel, struct engine_error *error);

#endif
