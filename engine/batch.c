/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/batch.h"
#include "engine/adapter.h"

#include <stdlib.h>
#include <string.h>

enum engine_code batch_init(struct batch *batch, struct device *device, int32_t max_rows, int32_t max_slots, struct engine_error *error)
{
    /* Rows first: they have the widest members, so everything after them is aligned, too. */
    size_t rows = (size_t)max_rows, slots = (size_t)max_slots;
    size_t bytes = rows * sizeof *batch->row + slots * (sizeof *batch->slot_row + sizeof *batch->slot_expert + sizeof *batch->slot_weight);
    *batch = (struct batch){.max_rows = max_rows, .max_slots = max_slots, .owner = device, .memory_bytes = bytes};
    batch->part = calloc(rows, sizeof *batch->part);
    batch->memory = batch->part ? device->ops->host_alloc(device, bytes) : NULL;
    if (!batch->memory) {
        batch_finish(batch);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for batches of %d rows and %d slots", max_rows, max_slots);
    }
    batch->row = batch->memory;
    batch->slot_row = (int32_t *)(batch->row + rows);
    batch->slot_expert = batch->slot_row + slots;
    batch->slot_weight = (float *)(batch->slot_expert + slots);
    return ENGINE_OK;
}

void batch_finish(struct batch *batch)
{
    if (batch->memory)
        batch->owner->ops->host_free(batch->owner, batch->memory, batch->memory_bytes);
    free(batch->part);
    *batch = (struct batch){0};
}

int64_t batch_request_slots(const struct engine_request *request, int32_t first, int32_t rows)
{
    if (request->row_slots)
        return (int64_t)request->row_slots[first + rows] - request->row_slots[first];
    return (int64_t)rows * request->k;
}

int64_t batch_request_widest(const struct engine_request *request)
{
    if (!request->row_slots)
        return request->k;
    int64_t widest = 0;
    for (int32_t t = 0; t < request->rows; t++) {
        int64_t slots = batch_request_slots(request, t, 1);
        widest = slots > widest ? slots : widest;
    }
    return widest;
}

int32_t batch_request_fit(const struct engine_request *request, int32_t first, int32_t rows, int64_t slots)
{
    int32_t most = request->rows - first;
    if (most > rows)
        most = rows;
    if (!request->row_slots) {
        if (request->k > 0 && most > slots / request->k)
            most = (int32_t)(slots / request->k);
        return most;
    }
    int32_t low = 0; /* the largest count whose slots fit; row_slots ascends */
    while (low < most) {
        int32_t middle = low + (most - low + 1) / 2;
        if (batch_request_slots(request, first, middle) <= slots)
            low = middle;
        else
            most = middle - 1;
    }
    return low;
}

void batch_clear(struct batch *batch) { batch->rows = batch->slots = batch->parts = batch->adapted_rows = 0; }

void batch_add(struct batch *batch, struct engine_request *request, int32_t first, int32_t rows)
{
    batch->part[batch->parts++] = (struct batch_part){request, first, rows};
    batch->rows += rows;
    batch->slots += (int32_t)batch_request_slots(request, first, rows);
}

static int32_t row_adapter_slot(const struct engine_request *request, int32_t t)
{
    if (request->adapter_count == 0)
        return -1;
    int32_t i = request->row_adapter ? request->row_adapter[t] : 0;
    return i < 0 ? -1 : engine_adapter_slot(request->adapters[i]);
}

/* Writes one window's rows and slots from `row` and `slot` on; returns the slot after its last. */
static int32_t fill_part(struct batch *batch, const struct model *model, const struct batch_part *part, int32_t row, int32_t slot)
{
    const struct engine_request *request = part->request;
    size_t row_bytes = (size_t)model->dims.hidden * dtype_size(request->dtype);
    for (int32_t t = part->first; t < part->first + part->rows; t++, row++) {
        int64_t from = request->row_slots ? request->row_slots[t] : (int64_t)t * request->k;
        int32_t slots = (int32_t)batch_request_slots(request, t, 1), adapter = row_adapter_slot(request, t);
        batch->row[row] = (struct kernel_row){
            .in = (uint64_t)(uintptr_t)request->hidden + (size_t)t * row_bytes,
            .out = (uint64_t)(uintptr_t)request->out + (size_t)t * row_bytes,
            .dtype = (int32_t)request->dtype,
            .adapter = adapter,
            .first_slot = slot,
            .slots = slots,
        };
        batch->adapted_rows += adapter >= 0;
        for (int32_t k = 0; k < slots; k++, slot++) {
            int32_t expert = request->expert_ids[from + k];
            batch->slot_row[slot] = row;
            batch->slot_expert[slot] = expert < 0 ? -1 : model->local_expert[expert];
            batch->slot_weight[slot] = request->expert_weights[from + k];
        }
    }
    return slot;
}

void batch_fill(struct batch *batch, const struct model *model, int32_t layer_index, enum kernel_path path)
{
    int32_t row = 0, slot = 0;
    batch->adapted_rows = 0;
    for (int32_t i = 0; i < batch->parts; i++) {
        slot = fill_part(batch, model, &batch->part[i], row, slot);
        row += batch->part[i].rows;
    }
    batch->device = (struct device_batch){
        .weights = model->layer[layer_index].weights,
        .path = path,
        .layer_index = layer_index,
        .adapted = batch->adapted_rows > 0,
        .batch = {.rows = batch->rows,
                  .slots = batch->slots,
                  .row = batch->row,
                  .slot_row = batch->slot_row,
                  .slot_expert = batch->slot_expert,
                  .slot_weight = batch->slot_weight},
    };
}
