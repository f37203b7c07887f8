/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptions of what is served: Open Inference Protocol metadata with the extensions of Triton that its clients read, and ours.
 */
#include "server/handlers.h"
#include "proto-json/proto.h"

#include <string.h>

/* The tensors of an infer request, as metadata and config list them. A dimension of 0 stands for the hidden size, -1 for any. */
static const struct model_tensor {
    const char *name;
    enum dtype dtype;
    int rank;
    int dim[2];
    bool optional;
} model_inputs[] = {
    {"hidden", DTYPE_FP32, 2, {-1, 0}, false},
    {"expert_ids", DTYPE_INT32, 2, {-1, -1}, false},
    {"expert_weights", DTYPE_FP32, 2, {-1, -1}, false},
    {"adapter_id", DTYPE_INT32, 1, {-1}, true},
    {"adapter", DTYPE_BYTES, 1, {-1}, true},
    {"sorted_token_ids", DTYPE_INT32, 1, {-1}, true},
    {"expert_counts", DTYPE_INT32, 1, {-1}, true},
    {"sorted_weights", DTYPE_FP32, 1, {-1}, true},
};
static const struct model_tensor model_outputs[] = {{"hidden", DTYPE_FP32, 2, {-1, 0}, false}};

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

bool model_named(struct http_request *r)
{
    if (r->segments < 3 || strcmp(r->segment[0], "v2") != 0 || strcmp(r->segment[1], "models") != 0)
        return true;
    if (r->segments == 3 && strcmp(r->segment[2], "stats") == 0 && strcmp(r->route->pattern, "/v2/models/stats") == 0)
        return true;
    if (strcmp(r->segment[2], r->server->model_name) != 0) {
        http_fail(r, 404, "model_not_found", "model \"%.128s\" is not served here; \"%s\" is", r->segment[2], r->server->model_name);
        return false;
    }
    if (r->segments >= 5 && strcmp(r->segment[3], "versions") == 0 && strcmp(r->segment[4], "1") != 0) {
        http_fail(r, 404, "model_not_found", "model \"%s\" has version 1 only, not \"%.32s\"", r->server->model_name, r->segment[4]);
        return false;
    }
    return true;
}

static json_t *model_dims(const struct model_tensor *t, int hidden)
{
    json_t *dims = json_array();
    for (int i = 0; i < t->rank; i++)
        json_array_append_new(dims, json_integer(t->dim[i] ? t->dim[i] : hidden));
    return dims;
}

static json_t *model_tensor_list(const struct model_tensor *t, size_t count, int hidden, bool config)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++, t++) {
        char type[16];
        json_t *entry;
        if (config) {
            snprintf(type, sizeof type, "TYPE_%s", t->dtype == DTYPE_BYTES ? "STRING" : dtype_name(t->dtype));
            entry = json_pack("{s:s, s:s, s:o}", "name", t->name, "data_type", type, "dims", model_dims(t, hidden));
            if (t->optional)
                json_object_set_new(entry, "optional", json_true());
        } else {
            entry = json_pack("{s:s, s:s, s:o}", "name", t->name, "datatype", dtype_name(t->dtype), "shape", model_dims(t, hidden));
        }
        json_array_append_new(list, entry);
    }
    return list;
}

void model_server(struct http_request *r)
{
    http_reply_json(r, 200,
                    json_pack("{s:s, s:s, s:[s, s, s, s, s]}", "name", "expertd", "version", EXPERTD_VERSION, "extensions",
                              "binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics"));
}

void model_metadata(struct http_request *r)
{
    if (!model_named(r))
        return;
    int hidden = engine_model(server_engine(r->server))->hidden_size;
    http_reply_json(r, 200,
                    json_pack("{s:s, s:[s], s:s, s:o, s:o}", "name", r->server->model_name, "versions", "1", "platform", "expertd",
                              "inputs", model_tensor_list(model_inputs, COUNT(model_inputs), hidden, false), "outputs",
                              model_tensor_list(model_outputs, COUNT(model_outputs), hidden, false)));
}

void model_ready(struct http_request *r)
{
    const char *message, *code = server_unready(r->server, &message);
    if (!model_named(r))
        return;
    if (code)
        http_fail(r, 503, code, "%s", message);
    else
        http_reply_json(r, 200, json_pack("{s:s, s:b}", "name", r->server->model_name, "ready", 1));
}

void model_config(struct http_request *r)
{
    if (!model_named(r))
        return;
    const struct engine_model_info *m = engine_model(server_engine(r->server));
    bool gpu = strncmp(m->device, "cuda", 4) == 0;
    const char *colon = strchr(m->device, ':');
    json_t *gpus = json_array();
    if (gpu)
        json_array_append_new(gpus, json_integer(colon ? strtol(colon + 1, NULL, 10) : 0));
    http_reply_json(r, 200,
                    json_pack("{s:s, s:s, s:s, s:{s:{s:i}}, s:i, s:o, s:o, s:[{s:s, s:s, s:i, s:o}], s:{s:b}}", "name",
                              r->server->model_name, "platform", "expertd", "backend", "expertd", "version_policy", "latest",
                              "num_versions", 1, "max_batch_size", 0, "input",
                              model_tensor_list(model_inputs, COUNT(model_inputs), m->hidden_size, true), "output",
                              model_tensor_list(model_outputs, COUNT(model_outputs), m->hidden_size, true), "instance_group", "name",
                              r->server->model_name, "kind", gpu ? "KIND_GPU" : "KIND_CPU", "count", 1, "gpus", gpus,
                              "model_transaction_policy", "decoupled", 0));
}

static json_t *model_duration(uint64_t count, uint64_t ns)
{
    return json_pack("{s:I, s:I}", "count", (json_int_t)count, "ns", (json_int_t)ns);
}

void model_stats(struct http_request *r)
{
    if (!model_named(r))
        return;
    struct engine_stats s;
    struct metrics_inference all;
    engine_stats_get(server_engine(r->server), &s);
    metrics_inference_get(r->server->metrics, &all);
    json_t *inference =
        json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "success", model_duration(all.success, all.total_ns), "fail",
                  model_duration(all.failure, 0), "queue", model_duration(all.success, all.queue_ns), "compute_input",
                  model_duration(all.success, all.input_ns), "compute_infer", model_duration(all.success, all.compute_ns), "compute_output",
                  model_duration(all.success, all.output_ns), "cache_hit", model_duration(0, 0), "cache_miss", model_duration(0, 0));
    http_reply_json(r, 200,
                    json_pack("{s:[{s:s, s:s, s:I, s:I, s:I, s:o, s:[]}]}", "model_stats", "name", r->server->model_name, "version", "1",
                              "last_inference", (json_int_t)atomic_load_explicit(&r->server->last_inference_ms, memory_order_relaxed),
                              "inference_count", (json_int_t)(s.rows_ok[0] + s.rows_ok[1]), "execution_count",
                              (json_int_t)(s.batches[0] + s.batches[1]), "inference_stats", inference, "batch_stats"));
}

void model_index(struct http_request *r)
{
    size_t length;
    const char *body = http_control_body(r, &length);
    struct proto_error error;
    json_t *options;
    if (proto_object_parse(body, length, true, &options, &error) != PROTO_OK) {
        http_fail_proto(r, &error);
        return;
    }
    json_decref(options); /* {"ready": true} leaves out what is not ready, and what is served is */
    http_reply_json(r, 200,
                    json_pack("[{s:s, s:s, s:s, s:s}]", "name", r->server->model_name, "version", "1", "state", "READY", "reason", ""));
}

static json_t *model_numbers(const int32_t *v, int32_t count)
{
    json_t *list = json_array();
    for (int32_t i = 0; i < count; i++)
        json_array_append_new(list, json_integer(v[i]));
    return list;
}

void model_moe(struct http_request *r)
{
    struct engine *engine = server_engine(r->server);
    const struct engine_model_info *m = engine_model(engine);
    struct engine_stats s;
    engine_stats_get(engine, &s);
    json_t *root = json_pack("{s:s, s:s, s:o, s:i, s:o, s:i, s:i, s:i, s:s, s:s, s:b}", "name", r->server->model_name, "family", m->family,
                             "layers", model_numbers(m->held_layers, m->layers_held), "experts", (int)m->experts, "experts_held",
                             model_numbers(m->held_experts, m->experts_held), "top_k", (int)m->top_k, "hidden_size", (int)m->hidden_size,
                             "intermediate_size", (int)m->intermediate_size, "weight_format", dtype_name(m->weight_dtype), "activation",
                             m->activation, "weight_on_input", (int)m->weight_on_input);
    json_t *rest = json_pack(
        "{s:s, s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "device", m->device, "device_name", m->device_name, "threads",
        (int)m->threads, "max_batch_rows", (json_int_t)m->max_batch_rows, "queue_rows", (json_int_t)m->queue_rows, "weight_bytes",
        (json_int_t)m->weight_bytes, "adapter_bytes", (json_int_t)s.adapter_bytes, "scratch_bytes", (json_int_t)m->scratch_bytes,
        "bytes_resident", (json_int_t)(m->weight_bytes + s.adapter_bytes + m->scratch_bytes), "device_memory_free",
        (json_int_t)s.device_memory_free, "adapters", (json_int_t)s.adapters_ready, "max_adapters", (json_int_t)m->max_adapters);
    if (root && json_object_update_new(root, rest) != 0) {
        json_decref(root);
        root = NULL;
    }
    http_reply_json(r, 200, root);
}
