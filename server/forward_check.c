/* SPDX-License-Identifier: Apache-2.0
 *
 * From a well-formed infer request to one that the engine may run: names, shapes, datatypes and ranges, once, with sentences that name
 * what is wrong. The engine trusts what comes out of here.
 */
#include "server/forward.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Inputs by name; NULL where absent. */
struct forward_inputs {
    const struct proto_tensor *hidden, *expert_ids, *expert_weights, *adapter_id, *adapter;
    const struct proto_tensor *sorted_token_ids, *expert_counts, *sorted_weights;
};

static int64_t forward_integer(const struct proto_tensor *t, size_t i)
{
    if (t->dtype == DTYPE_INT64) {
        int64_t v;
        memcpy(&v, (const char *)t->data + i * sizeof v, sizeof v);
        return v;
    }
    int32_t v;
    memcpy(&v, (const char *)t->data + i * sizeof v, sizeof v);
    return v;
}

static bool forward_take_inputs(struct http_request *r, const struct proto_infer *infer, struct forward_inputs *in)
{
    const struct {
        const char *name;
        const struct proto_tensor **to;
    } known[] = {
        {"hidden", &in->hidden},
        {"expert_ids", &in->expert_ids},
        {"expert_weights", &in->expert_weights},
        {"adapter_id", &in->adapter_id},
        {"adapter", &in->adapter},
        {"sorted_token_ids", &in->sorted_token_ids},
        {"expert_counts", &in->expert_counts},
        {"sorted_weights", &in->sorted_weights},
    };
    for (int32_t i = 0; i < infer->inputs; i++) {
        size_t k = 0;
        while (k < sizeof known / sizeof known[0] && strcmp(known[k].name, infer->input[i].name) != 0)
            k++;
        if (k == sizeof known / sizeof known[0]) {
            char list[200] = "";
            for (k = 0; k < sizeof known / sizeof known[0]; k++)
                snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", k ? ", " : "", known[k].name);
            http_fail(r, 400, "bad_request", "unknown input \"%s\"; there are %s", infer->input[i].name, list);
            return false;
        }
        *known[k].to = &infer->input[i];
    }
    return true;
}

static bool forward_is_integer(struct http_request *r, const struct proto_tensor *t)
{
    if (t->dtype == DTYPE_INT32 || t->dtype == DTYPE_INT64)
        return true;
    http_fail(r, 400, "unsupported_datatype", "input \"%s\" is %s; it must be INT32 or INT64", t->name, dtype_name(t->dtype));
    return false;
}

static bool forward_is_float(struct http_request *r, const struct proto_tensor *t)
{
    if (dtype_is_float(t->dtype))
        return true;
    http_fail(r, 400, "unsupported_datatype", "input \"%s\" is %s; it must be BF16, FP16 or FP32", t->name, dtype_name(t->dtype));
    return false;
}

static void forward_print_shape(const struct proto_tensor *t, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int32_t i = 0; i < t->rank && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRId64, i ? ", " : "", t->shape[i]);
}

/* The shape [rows, columns], or [rows] when columns is negative. */
static bool forward_has_shape(struct http_request *r, const struct proto_tensor *t, int64_t rows, int64_t columns)
{
    if (t->rank == (columns < 0 ? 1 : 2) && t->shape[0] == rows && (columns < 0 || t->shape[1] == columns))
        return true;
    char found[112], wanted[64];
    forward_print_shape(t, found, sizeof found);
    if (columns < 0)
        snprintf(wanted, sizeof wanted, "%" PRId64, rows);
    else
        snprintf(wanted, sizeof wanted, "%" PRId64 ", %" PRId64, rows, columns);
    http_fail(r, 400, "shape_mismatch", "input \"%s\" has shape [%s]; it must be [%s]", t->name, found, wanted);
    return false;
}

/* Held layers as in --layers; a list too long for the message is cut. */
static void forward_list_layers(const struct engine_model_info *model, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int32_t i = 0, last; i < model->layers_held; i = last + 1) {
        for (last = i; last + 1 < model->layers_held && model->held_layers[last + 1] == model->held_layers[last] + 1;)
            last++;
        if (size - used < 40) {
            snprintf(text + used, size - used, ",...");
            return;
        }
        used += (size_t)snprintf(text + used, size - used, "%s%d", i ? "," : "", model->held_layers[i]);
        if (last > i)
            used += (size_t)snprintf(text + used, size - used, "-%d", model->held_layers[last]);
    }
}

static bool forward_check_layer(struct http_request *r, struct forward *f, const struct engine_model_info *model)
{
    if (!f->infer.has_layer) {
        if (model->layers_held != 1) {
            http_fail(r, 400, "bad_request", "parameters.layer is missing; this server holds %d layers", model->layers_held);
            return false;
        }
        f->layer = model->held_layers[0];
    } else if (!engine_has_layer(f->engine, f->infer.layer)) {
        char held[200];
        forward_list_layers(model, held, sizeof held);
        http_fail(r, 404, "layer_not_found", "layer %" PRId64 " is not held here; held are %s", f->infer.layer, held);
        return false;
    } else {
        f->layer = (int32_t)f->infer.layer;
    }
    r->layer = f->layer;
    return true;
}

/* Of a datatype that can't be, that is said later. */
enum proto_code forward_look(void *context, const struct proto_tensor *tensor, struct proto_error *error)
{
    const struct http_request *r = context;
    const struct forward *f = r->state;
    int32_t hidden = engine_model(f->engine)->hidden_size;
    if (strcmp(tensor->name, "hidden") != 0 || !dtype_is_float(tensor->dtype) ||
        (tensor->rank == 2 && tensor->shape[0] >= 1 && tensor->shape[1] == hidden))
        return PROTO_OK;
    char found[112];
    forward_print_shape(tensor, found, sizeof found);
    error->code = PROTO_SHAPE_MISMATCH;
    snprintf(error->message, sizeof error->message, "input \"hidden\" has shape [%s]; it must be [T, %d] with T at least 1", found, hidden);
    return error->code;
}

/* Its shape is [T, hidden_size]: forward_look has seen to that. */
static bool forward_check_hidden(struct http_request *r, struct forward *f, const struct proto_tensor *t,
                                 const struct engine_model_info *model)
{
    if (!t) {
        http_fail(r, 400, "bad_request", "input \"hidden\" is missing");
        return false;
    }
    if (!forward_is_float(r, t))
        return false;
    if (t->shape[0] > model->queue_rows || t->shape[0] > INT32_MAX) {
        http_fail(r, 413, "too_large", "the request has %" PRId64 " rows; the queue holds %" PRId64, t->shape[0], model->queue_rows);
        return false;
    }
    f->rows = (int32_t)t->shape[0];
    r->rows = f->rows;
    return true;
}

static bool forward_check_slots(struct http_request *r, struct forward *f, const struct forward_inputs *in,
                                const struct engine_model_info *model)
{
    bool grouped = in->sorted_token_ids || in->expert_counts || in->sorted_weights;
    bool plain = in->expert_ids || in->expert_weights;
    if (grouped && plain) {
        http_fail(r, 400, "bad_request",
                  "routing comes as expert_ids and expert_weights, or as sorted_token_ids, expert_counts and "
                  "sorted_weights, not as a mixture");
        return false;
    }
    const char *missing = grouped ? (!in->sorted_token_ids ? "sorted_token_ids"
                                     : !in->expert_counts  ? "expert_counts"
                                     : !in->sorted_weights ? "sorted_weights"
                                                           : NULL)
                                  : (!in->expert_ids       ? "expert_ids"
                                     : !in->expert_weights ? "expert_weights"
                                                           : NULL);
    if (missing) {
        http_fail(r, 400, "bad_request", "input \"%s\" is missing", missing);
        return false;
    }
    const struct proto_tensor *ids = grouped ? in->sorted_token_ids : in->expert_ids,
                              *weights = grouped ? in->sorted_weights : in->expert_weights;
    if (!forward_is_integer(r, ids) || !forward_is_float(r, weights) || (grouped && !forward_is_integer(r, in->expert_counts)))
        return false;
    if (grouped) {
        if (ids->rank != 1)
            return forward_has_shape(r, ids, (int64_t)ids->elements, -1);
        f->k = 0;
        if (!forward_has_shape(r, weights, ids->shape[0], -1) || !forward_has_shape(r, in->expert_counts, model->experts, -1))
            return false;
    } else {
        int64_t k = ids->rank == 2 ? ids->shape[1] : 0;
        if (!forward_has_shape(r, ids, f->rows, ids->rank == 2 ? k : 1))
            return false;
        if (k < 1 || k > model->experts) {
            http_fail(r, 400, "shape_mismatch", "input \"expert_ids\" has K = %" PRId64 "; it must be 1 to %d, the model's experts", k,
                      model->experts);
            return false;
        }
        if (!forward_has_shape(r, weights, f->rows, k))
            return false;
        f->k = (int32_t)k;
    }
    f->slots = (int64_t)ids->elements;
    if (f->slots > INT32_MAX) {
        http_fail(r, 413, "too_large", "the request has %" PRId64 " routed slots; at most %d are taken", f->slots, INT32_MAX);
        return false;
    }
    return true;
}

static bool forward_check_weight(struct http_request *r, const struct proto_tensor *t, size_t i, int32_t k, float *out)
{
    float v = dtype_load_f32((const char *)t->data + i * dtype_size(t->dtype), t->dtype);
    *out = v;
    if (v - v == 0)
        return true;
    const char *what = v != v ? "NaN" : v > 0 ? "Infinity" : "-Infinity";
    if (k)
        http_fail(r, 400, "non_finite_weight", "expert_weights at row %zu, slot %zu is %s", i / (size_t)k, i % (size_t)k, what);
    else
        http_fail(r, 400, "non_finite_weight", "sorted_weights at entry %zu is %s", i, what);
    return false;
}

/* The datatypes that clients use, without a branch for each slot. False: some slot is out of range. */
static bool forward_copy_plain(const struct forward *f, const struct forward_inputs *in, int32_t experts, int32_t *ids, float *weights)
{
    size_t n = (size_t)f->slots;
    unsigned bad = 0;
    memcpy(ids, in->expert_ids->data, n * sizeof *ids);
    memcpy(weights, in->expert_weights->data, n * sizeof *weights);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &weights[i], sizeof bits);
        bad |= ((uint32_t)ids[i] + 1 > (uint32_t)experts) | ((bits & 0x7f800000) == 0x7f800000);
    }
    return !bad;
}

static bool forward_fill_plain(struct http_request *r, struct forward *f, const struct forward_inputs *in, int32_t experts, int32_t *ids,
                               float *weights)
{
    if (in->expert_ids->dtype == DTYPE_INT32 && in->expert_weights->dtype == DTYPE_FP32 && forward_copy_plain(f, in, experts, ids, weights))
        return true;
    for (size_t i = 0; i < (size_t)f->slots; i++) {
        int64_t id = forward_integer(in->expert_ids, i);
        if (id < -1 || id >= experts) {
            http_fail(r, 400, "expert_out_of_range", "expert_ids at row %zu, slot %zu is %" PRId64 "; it must be -1 to %d",
                      i / (size_t)f->k, i % (size_t)f->k, id, experts - 1);
            return false;
        }
        ids[i] = (int32_t)id;
        if (!forward_check_weight(r, in->expert_weights, i, f->k, &weights[i]))
            return false;
    }
    return true;
}

/* Grouped by expert to grouped by row; a row's slots come in order of appearance. */
static bool forward_fill_grouped(struct http_request *r, struct forward *f, const struct forward_inputs *in, int32_t experts, int32_t *ids,
                                 float *weights, int32_t *row_slots)
{
    int64_t sum = 0, entries = f->slots;
    for (int32_t e = 0; e < experts; e++) {
        int64_t count = forward_integer(in->expert_counts, (size_t)e);
        if (count < 0 || count > entries - sum) {
            http_fail(r, 400, "bad_request",
                      "expert_counts[%d] is %" PRId64 "; counts must be 0 or more and sum to %" PRId64 ", the length of sorted_token_ids",
                      e, count, entries);
            return false;
        }
        sum += count;
    }
    if (sum != entries) {
        http_fail(r, 400, "bad_request", "expert_counts sum to %" PRId64 "; sorted_token_ids has %" PRId64 " entries", sum, entries);
        return false;
    }
    memset(row_slots, 0, ((size_t)f->rows + 1) * sizeof *row_slots);
    for (size_t i = 0; i < (size_t)entries; i++) {
        int64_t row = forward_integer(in->sorted_token_ids, i);
        if (row < 0 || row >= f->rows) {
            http_fail(r, 400, "bad_request", "sorted_token_ids[%zu] is %" PRId64 "; it must be 0 to %d", i, row, f->rows - 1);
            return false;
        }
        if (++row_slots[row + 1] > experts) {
            http_fail(r, 400, "bad_request", "sorted_token_ids names row %" PRId64 " more than %d times, the number of experts", row,
                      experts);
            return false;
        }
    }
    for (int32_t t = 0; t < f->rows; t++)
        row_slots[t + 1] += row_slots[t];
    /* Each row's start moves forward while its slots are filled, and ends up at the next row's; then all move back by one. */
    size_t i = 0;
    for (int32_t e = 0; e < experts; e++)
        for (int64_t n = forward_integer(in->expert_counts, (size_t)e); n > 0; n--, i++) {
            int32_t at = row_slots[forward_integer(in->sorted_token_ids, i)]++;
            ids[at] = e;
            if (!forward_check_weight(r, in->sorted_weights, i, 0, &weights[at]))
                return false;
        }
    memmove(row_slots + 1, row_slots, (size_t)f->rows * sizeof *row_slots);
    row_slots[0] = 0;
    return true;
}

static bool forward_check_adapters(struct http_request *r, struct forward *f, const struct forward_inputs *in)
{
    if ((in->adapter_id != NULL) + (in->adapter != NULL) + (f->infer.adapter != NULL) > 1) {
        http_fail(r, 400, "bad_request",
                  "adapters are named by the input \"adapter_id\", the input \"adapter\" or parameters.adapter, only one of them");
        return false;
    }
    if (in->adapter_id)
        return forward_is_integer(r, in->adapter_id) && forward_has_shape(r, in->adapter_id, f->rows, -1);
    if (!in->adapter)
        return true;
    if (in->adapter->dtype != DTYPE_BYTES) {
        http_fail(r, 400, "unsupported_datatype", "input \"adapter\" is %s; it must be BYTES", dtype_name(in->adapter->dtype));
        return false;
    }
    return forward_has_shape(r, in->adapter, f->rows, -1);
}

static bool forward_fill_adapters(struct http_request *r, struct forward *f, const struct forward_inputs *in, int32_t *row_adapter)
{
    size_t cursor = 0, length;
    const char *name;
    if (!in->adapter_id && !in->adapter) {
        if (f->infer.adapter && f->infer.adapter[0])
            return forward_adapter_index(r, f, f->infer.adapter, strlen(f->infer.adapter), -1, -1) >= 0;
        return true;
    }
    for (int32_t t = 0; t < f->rows; t++) {
        row_adapter[t] = -1;
        if (in->adapter_id) {
            int64_t id = forward_integer(in->adapter_id, (size_t)t);
            if (id == -1)
                continue;
            row_adapter[t] = forward_adapter_index(r, f, NULL, 0, id, t);
        } else {
            if (!proto_bytes_next(in->adapter, &cursor, &name, &length) || !length)
                continue;
            row_adapter[t] = forward_adapter_index(r, f, name, length, -1, t);
        }
        if (row_adapter[t] < 0)
            return false;
    }
    if (f->adapters.count)
        f->request.row_adapter = row_adapter;
    return true;
}

bool forward_prepare(struct http_request *r, struct forward *f)
{
    const struct engine_model_info *model = engine_model(f->engine);
    struct forward_inputs in = {0};
    if (!forward_take_inputs(r, &f->infer, &in) || !forward_check_layer(r, f, model) || !forward_check_hidden(r, f, in.hidden, model) ||
        !forward_check_slots(r, f, &in, model) || !forward_check_adapters(r, f, &in))
        return false;

    /* One allocation: ids | weights | row_slots | row_adapter | out. All sizes are bounded by those of the body's tensors. */
    size_t slots = (size_t)f->slots, rows = (size_t)f->rows;
    size_t arrays = slots * (sizeof(int32_t) + sizeof(float)) + (2 * rows + 1) * sizeof(int32_t);
    f->room = ((arrays < FORWARD_HEAD_ROOM ? FORWARD_HEAD_ROOM : arrays) + 63) & ~(size_t)63;
    if (!forward_acquire(r, f, f->room + in.hidden->bytes, &f->work))
        return false;
    f->out = (char *)f->work + f->room;
    int32_t *ids = f->work;
    float *weights = (float *)(ids + slots);
    int32_t *row_slots = (int32_t *)(weights + slots), *row_adapter = row_slots + rows + 1;
    bool grouped = in.sorted_token_ids != NULL;
    if (!(grouped ? forward_fill_grouped(r, f, &in, model->experts, ids, weights, row_slots)
                  : forward_fill_plain(r, f, &in, model->experts, ids, weights)) ||
        !forward_fill_adapters(r, f, &in, row_adapter))
        return false;

    struct engine_request *q = &f->request;
    q->layer = f->layer;
    q->mode = f->infer.mode == PROTO_DECODE ? ENGINE_DECODE : f->infer.mode == PROTO_PREFILL ? ENGINE_PREFILL : ENGINE_AUTO;
    q->rows = f->rows;
    q->dtype = in.hidden->dtype;
    q->hidden = in.hidden->data;
    q->out = f->out;
    q->k = f->k;
    q->row_slots = grouped ? row_slots : NULL;
    q->expert_ids = ids;
    q->expert_weights = weights;
    q->adapters = f->adapters.item;
    q->adapter_count = f->adapters.count;
    r->adapters = f->adapters.count;
    return true;
}
