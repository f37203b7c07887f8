/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests and benchmarks may ask of the engine beyond its public face.
 */
#ifndef EXPERTD_ENGINE_INTERNAL_H
#define EXPERTD_ENGINE_INTERNAL_H

#include "engine/device.h"
#include "engine/engine.h"

/* engine_create with kernels of one kind: see device_options.isa. */
enum engine_code engine_create_isa(const struct engine_options *options, const char *isa, atomic_bool *cancel, struct engine **out,
                                   struct engine_error *error);

/* Rows and slots of a batch: `asked` rows, or when that is 0 as many as the device likes and its scratch should hold.
 * Slots suffice for the checkpoint's top-k in every row, and for one row that names every expert. */
void engine_batch_bounds(const struct device *device, const struct kernel_dims *dims, int32_t experts, int32_t top_k, int64_t asked,
                         int adapters, int32_t *rows, int32_t *slots);

#endif
