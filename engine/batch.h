/* SPDX-License-Identifier: Apache-2.0
 *
 * A batch: windows of requests of one (layer, path), and the arrays that the device reads them from. The arrays are allocated
 * once at the bounds of a batch; a batch belongs to the engine thread.
 */
#ifndef EXPERTD_ENGINE_BATCH_H
#define EXPERTD_ENGINE_BATCH_H

#include "engine/device.h"
#include "engine/engine.h"
#include "engine/model.h"

/* Rows [first, first + rows) of a request. */
struct batch_part {
    struct engine_request *request;
    int32_t first, rows;
};

struct batch {
    int32_t max_rows, max_slots;
    int32_t rows, slots, parts, adapted_rows;
    int32_t key;
    int64_t gathered_ns; /* what had arrived by then could have been in it */
    int64_t begun_ns; /* when it was handed to the device */
    struct device_batch device;
    struct batch_part *part; /* [max_rows] */
    struct kernel_row *row; /* [max_rows] */
    int32_t *slot_row, *slot_expert; /* [max_slots] */
    float *slot_weight; /* [max_slots] */
    struct device *owner;
    void *memory; /* of the device's host memory: all arrays but `part` */
    size_t memory_bytes;
};

enum engine_code batch_init(struct batch *batch, struct device *device, int32_t max_rows, int32_t max_slots, struct engine_error *error);
void batch_finish(struct batch *batch); /* a zeroed one is fine */

/* Slots that rows [first, first + rows) of a request own. */
int64_t batch_request_slots(const struct engine_request *request, int32_t first, int32_t rows);
/* Slots of the row that owns most. */
int64_t batch_request_widest(const struct engine_request *request);
/* How many rows of the request, from `first` on, fit within `rows` and `slots`. */
int32_t batch_request_fit(const struct engine_request *request, int32_t first, int32_t rows, int64_t slots);

void batch_clear(struct batch *batch);
/* Adds a window that fits: costs nothing, so that it can be done under a lock. */
void batch_add(struct batch *batch, struct engine_request *request, int32_t first, int32_t rows);
/* Writes the arrays for the windows added. */
void batch_fill(struct batch *batch, const struct model *model, int32_t layer_index, enum kernel_path path);

#endif
