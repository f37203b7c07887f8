/* SPDX-License-Identifier: Apache-2.0
 *
 * The /metrics page. Families come out whole and once each, as the format demands; a histogram's count is the sum of its
 * buckets, so that a page read while counters move is consistent in itself.
 */
#include "server/metrics_counters.h"
#include "server/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const path_name[2] = {"decode", "prefill"};

void metrics_write_family(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

void metrics_write_label(FILE *out, const char *value)
{
    for (; *value; value++) {
        if (*value == '\n')
            fputs("\\n", out);
        else {
            if (*value == '"' || *value == '\\')
                fputc('\\', out);
            fputc(*value, out);
        }
    }
}

/* ---- scalars of struct engine_stats ------------------------------------------------------------------------- */

enum scalar_kind { SCALAR_U64, SCALAR_I64, SCALAR_NS, SCALAR_U64_BY_PATH };

#define STAT(member) offsetof(struct engine_stats, member)

static const struct {
    const char *name, *type, *help;
    enum scalar_kind kind;
    size_t offset;
} engine_scalar[] = {
    {"expertd_requests_total", "counter", "Forward requests computed.", SCALAR_U64_BY_PATH, STAT(requests_ok)},
    {"expertd_rows_total", "counter", "Rows computed.", SCALAR_U64_BY_PATH, STAT(rows_ok)},
    {"expertd_slots_total", "counter", "Slots (rows times experts a row) computed.", SCALAR_U64_BY_PATH, STAT(slots_ok)},
    {"expertd_adapted_rows_total", "counter", "Rows computed with an adapter.", SCALAR_U64_BY_PATH, STAT(adapted_rows)},
    {"expertd_batches_total", "counter", "Batches run on the device.", SCALAR_U64_BY_PATH, STAT(batches)},
    {"expertd_batch_waits_total", "counter", "Batches held back on a free device for others to join (--batch-wait-us auto).", SCALAR_U64,
     STAT(batch_waits)},
    {"expertd_batch_waits_in_vain_total", "counter", "Of these, the batches for which that did not pay.", SCALAR_U64,
     STAT(batch_waits_in_vain)},
    {"expertd_batch_wait_seconds_total", "counter", "Time for which these batches were held back.", SCALAR_NS, STAT(batch_wait_ns)},
    {"expertd_requests_failed_total", "counter", "Accepted forward requests that the engine failed.", SCALAR_U64, STAT(requests_failed)},
    {"expertd_requests_cancelled_total", "counter", "Forward requests dropped before compute because the client had gone.", SCALAR_U64,
     STAT(requests_cancelled)},
    {"expertd_requests_expired_total", "counter", "Forward requests dropped before compute because their time was up.", SCALAR_U64,
     STAT(requests_expired)},
    {"expertd_requests_rejected_total", "counter", "Forward requests refused because the queue was full or closed.", SCALAR_U64,
     STAT(requests_rejected)},
    {"expertd_queue_rows", "gauge", "Rows waiting.", SCALAR_I64, STAT(queued_rows)},
    {"expertd_queue_requests", "gauge", "Forward requests waiting.", SCALAR_I64, STAT(queued_requests)},
    {"expertd_running_rows", "gauge", "Rows being computed.", SCALAR_I64, STAT(running_rows)},
    {"expertd_adapter_installs_total", "counter", "Adapters installed, replacements included.", SCALAR_U64, STAT(adapters_installed)},
    {"expertd_adapter_replacements_total", "counter", "Adapters replaced by another of the same name.", SCALAR_U64,
     STAT(adapters_replaced)},
    {"expertd_adapter_removals_total", "counter", "Adapters removed.", SCALAR_U64, STAT(adapters_removed)},
    {"expertd_adapter_install_failures_total", "counter", "Installs that failed.", SCALAR_U64, STAT(adapter_installs_failed)},
    {"expertd_adapters_bytes", "gauge", "Device memory that adapters take.", SCALAR_I64, STAT(adapter_bytes)},
    {"expertd_adapter_arena_bytes", "gauge", "Device memory held for adapters, free parts included.", SCALAR_I64,
     STAT(adapter_arena_bytes)},
    {"expertd_staging_bytes", "gauge", "Memory of bodies and replies in flight.", SCALAR_I64, STAT(staging_bytes)},
    {"expertd_staging_limit_bytes", "gauge", "Most memory that bodies and replies in flight may take.", SCALAR_I64, STAT(staging_limit)},
    {"expertd_device_memory_bytes", "gauge",
     "Memory of the device that computes: a GPU's own, or on the CPU all of this machine's, as far as this process may use it.", SCALAR_I64,
     STAT(device_memory_total)},
    {"expertd_device_memory_free_bytes", "gauge",
     "What of that is free: of a GPU, by all processes; on the CPU, what can be had without swapping.", SCALAR_I64,
     STAT(device_memory_free)},
};

static void write_engine_scalars(FILE *out, const struct engine_stats *stats)
{
    for (size_t i = 0; i < sizeof engine_scalar / sizeof engine_scalar[0]; i++) {
        const char *name = engine_scalar[i].name, *field = (const char *)stats + engine_scalar[i].offset;
        metrics_write_family(out, name, engine_scalar[i].type, engine_scalar[i].help);
        if (engine_scalar[i].kind == SCALAR_I64) {
            fprintf(out, "%s %" PRId64 "\n", name, *(const int64_t *)field);
        } else if (engine_scalar[i].kind == SCALAR_NS) {
            fprintf(out, "%s %.9f\n", name, (double)*(const int64_t *)field * 1e-9);
        } else if (engine_scalar[i].kind == SCALAR_U64) {
            fprintf(out, "%s %" PRIu64 "\n", name, *(const uint64_t *)field);
        } else {
            for (size_t path = 0; path < 2; path++)
                fprintf(out, "%s{path=\"%s\"} %" PRIu64 "\n", name, path_name[path], ((const uint64_t *)field)[path]);
        }
    }
}

/* ---- histograms ----------------------------------------------------------------------------------------------- */

/* `unit` turns the engine's buckets (powers of two) and sum into the family's unit. */
static void write_engine_histogram(FILE *out, const char *name, const char *help, const struct engine_histogram h[2], double unit)
{
    metrics_write_family(out, name, "histogram", help);
    for (size_t path = 0; path < 2; path++) {
        uint64_t below = 0;
        for (size_t i = 0; i + 1 < ENGINE_BUCKETS; i++) {
            below += h[path].bucket[i];
            fprintf(out, "%s_bucket{path=\"%s\",le=\"%.9g\"} %" PRIu64 "\n", name, path_name[path], (double)(1u << i) * unit, below);
        }
        below += h[path].bucket[ENGINE_BUCKETS - 1];
        fprintf(out, "%s_bucket{path=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", name, path_name[path], below);
        fprintf(out, "%s_sum{path=\"%s\"} %.9g\n", name, path_name[path], h[path].sum * unit);
        fprintf(out, "%s_count{path=\"%s\"} %" PRIu64 "\n", name, path_name[path], below);
    }
}

static void write_route_duration(FILE *out, const struct metrics_route *route)
{
    static const char name[] = "expertd_http_request_duration_seconds";
    uint64_t bucket[METRICS_DURATIONS + 1], below = 0;
    for (size_t i = 0; i <= METRICS_DURATIONS; i++)
        below += bucket[i] = metrics_read(&route->duration[i]);
    if (!below)
        return;
    below = 0;
    for (size_t i = 0; i <= METRICS_DURATIONS; i++) {
        below += bucket[i];
        fprintf(out, "%s_bucket{route=\"", name);
        metrics_write_label(out, route->name);
        if (i < METRICS_DURATIONS)
            fprintf(out, "\",le=\"%.9g\"} %" PRIu64 "\n", metrics_duration_bound[i], below);
        else
            fprintf(out, "\",le=\"+Inf\"} %" PRIu64 "\n", below);
    }
    fprintf(out, "%s_sum{route=\"", name);
    metrics_write_label(out, route->name);
    fprintf(out, "\"} %.9g\n%s_count{route=\"", (double)metrics_read(&route->duration_ns) * 1e-9, name);
    metrics_write_label(out, route->name);
    fprintf(out, "\"} %" PRIu64 "\n", below);
}

/* ---- HTTP ----------------------------------------------------------------------------------------------------- */

static void write_counter(FILE *out, const char *name, const char *help, uint64_t value)
{
    metrics_write_family(out, name, "counter", help);
    fprintf(out, "%s %" PRIu64 "\n", name, value);
}

static void write_gauge(FILE *out, const char *name, const char *help, int64_t value)
{
    metrics_write_family(out, name, "gauge", help);
    fprintf(out, "%s %" PRId64 "\n", name, value);
}

static void write_route_requests(FILE *out, const struct metrics_route *route)
{
    for (size_t method = 0; method < METRICS_METHODS; method++) {
        for (size_t status = 0; status < METRICS_STATUSES; status++) {
            uint64_t count = metrics_read(&route->requests[method][status]);
            if (!count)
                continue;
            fputs("expertd_http_requests_total{route=\"", out);
            metrics_write_label(out, route->name);
            fprintf(out, "\",method=\"%s\",status=\"", metrics_method_name[method]);
            if (metrics_status_code[status])
                fprintf(out, "%d", metrics_status_code[status]);
            else
                fputs("other", out);
            fprintf(out, "\"} %" PRIu64 "\n", count);
        }
    }
}

static void write_route_bytes(FILE *out, const char *name, const char *help, const struct metrics *m, size_t offset)
{
    metrics_write_family(out, name, "counter", help);
    for (size_t i = 0; i < m->routes; i++) {
        uint64_t count = metrics_read((const metrics_counter *)((const char *)&m->route[i] + offset));
        if (!count)
            continue;
        fprintf(out, "%s{route=\"", name);
        metrics_write_label(out, m->route[i].name);
        fprintf(out, "\"} %" PRIu64 "\n", count);
    }
}

static int64_t difference(const metrics_counter *up, const metrics_counter *down)
{
    uint64_t less = metrics_read(down), more = metrics_read(up); /* in this order the difference can't be negative */
    return (int64_t)(more - less);
}

static void write_http(FILE *out, const struct metrics *m)
{
    write_gauge(out, "expertd_http_connections", "Open connections.", difference(&m->connections_opened, &m->connections_closed));
    write_counter(out, "expertd_http_connections_total", "Connections accepted.", metrics_read(&m->connections_opened));
    write_counter(out, "expertd_http_connections_refused_total", "Connections turned away at the limit.",
                  metrics_read(&m->connections_refused));
    write_gauge(out, "expertd_http_requests_in_flight", "Requests being received, computed or answered.",
                difference(&m->requests_started, &m->requests_finished));
    metrics_write_family(out, "expertd_http_requests_total", "counter",
                         "Requests answered; status 499 are those whose client left before an answer.");
    for (size_t i = 0; i < m->routes; i++)
        write_route_requests(out, &m->route[i]);
    metrics_write_family(out, "expertd_http_request_duration_seconds", "histogram", "From a request's head to the end of its answer.");
    for (size_t i = 0; i < m->routes; i++)
        write_route_duration(out, &m->route[i]);
    write_route_bytes(out, "expertd_http_request_bytes_total", "Bytes of request bodies.", m, offsetof(struct metrics_route, bytes_in));
    write_route_bytes(out, "expertd_http_response_bytes_total", "Bytes of response bodies.", m, offsetof(struct metrics_route, bytes_out));
}

/* ---- the names that Triton's tooling reads ---------------------------------------------------------------------- */

static void write_triton_sample(FILE *out, const char *name, const char *model, const char *reason, uint64_t value)
{
    fprintf(out, "%s{model=\"", name);
    metrics_write_label(out, model);
    fprintf(out, "\",version=\"1\"%s%s%s} %" PRIu64 "\n", reason ? ",reason=\"" : "", reason ? reason : "", reason ? "\"" : "", value);
}

static void write_triton(FILE *out, const struct metrics *m, const struct metrics_sources *sources)
{
    static const char *const reason[] = {[METRICS_REJECTED] = "REJECTED", "CANCELED", "BACKEND", "OTHER"};
    const struct engine_stats *stats = sources->stats;
    const char *model = sources->model_name;
    struct metrics_inference all;
    metrics_inference_get(m, &all);
    const struct {
        const char *name, *type, *help;
        uint64_t value;
    } family[] = {
        {"nv_inference_request_success", "counter", "Infer requests answered.", all.success},
        {"nv_inference_count", "counter", "Rows computed.", stats ? stats->rows_ok[0] + stats->rows_ok[1] : 0},
        {"nv_inference_exec_count", "counter", "Batches run.", stats ? stats->batches[0] + stats->batches[1] : 0},
        {"nv_inference_request_duration_us", "counter", "Time of answered infer requests, from head to the end of the answer.",
         all.total_ns / 1000},
        {"nv_inference_queue_duration_us", "counter", "Time that answered infer requests waited.", all.queue_ns / 1000},
        {"nv_inference_compute_input_duration_us", "counter", "Time to read and check answered infer requests.", all.input_ns / 1000},
        {"nv_inference_compute_infer_duration_us", "counter", "Time to compute answered infer requests.", all.compute_ns / 1000},
        {"nv_inference_compute_output_duration_us", "counter", "Time to write answers of infer requests.", all.output_ns / 1000},
        {"nv_inference_pending_request_count", "gauge", "Infer requests waiting.", stats ? (uint64_t)stats->queued_requests : 0},
    };
    for (size_t i = 0; i < sizeof family / sizeof family[0]; i++) {
        metrics_write_family(out, family[i].name, family[i].type, family[i].help);
        write_triton_sample(out, family[i].name, model, NULL, family[i].value);
    }
    metrics_write_family(out, "nv_inference_request_failure", "counter", "Infer requests that failed, by reason.");
    for (size_t i = METRICS_REJECTED; i <= METRICS_OTHER; i++)
        write_triton_sample(out, "nv_inference_request_failure", model, reason[i], metrics_read(&m->outcome[i]));
}

/* ---- model and adapters ------------------------------------------------------------------------------------------ */

static void write_model(FILE *out, const struct metrics_sources *sources)
{
    const struct engine_model_info *model = sources->model;
    metrics_write_family(out, "expertd_model_info", "gauge", "The model served; always 1.");
    const char *const label[][2] = {{"model", sources->model_name},
                                    {"family", model->family},
                                    {"device", model->device},
                                    {"device_name", model->device_name},
                                    {"weights", dtype_name(model->weight_dtype)}};
    fputs("expertd_model_info{", out);
    for (size_t i = 0; i < sizeof label / sizeof label[0]; i++) {
        fprintf(out, "%s%s=\"", i ? "," : "", label[i][0]);
        metrics_write_label(out, label[i][1]);
        fputc('"', out);
    }
    fputs("} 1\n", out);
    write_gauge(out, "expertd_model_layers", "Layers held.", model->layers_held);
    write_gauge(out, "expertd_model_experts", "Experts of each layer held.", model->experts_held);
    write_gauge(out, "expertd_model_weights_bytes", "Device memory that weights take.", model->weight_bytes);
    write_gauge(out, "expertd_scratch_bytes", "Device memory that scratch takes.", model->scratch_bytes);
    write_gauge(out, "expertd_queue_limit_rows", "Most rows that may wait and run.", model->queue_rows);
    write_gauge(out, "expertd_adapters_limit", "Most adapters that may be installed.", model->max_adapters);
}

/* While a replaced adapter drains, two have one name, and a label set must be unique: figures of memory and use add up, and rows are
 * those of the one that serves, whose counter starts anew as after a restart. */
static const struct engine_adapter_info *twin_of(const struct metrics_sources *sources, size_t index, bool twins, bool *first,
                                                 int64_t *in_flight, int64_t *bytes)
{
    const struct engine_adapter_info *shown = &sources->adapter[index];
    *first = true;
    *in_flight = shown->in_flight;
    *bytes = shown->bytes;
    if (!twins)
        return shown;
    *in_flight = *bytes = 0;
    for (size_t i = 0; i < sources->adapters; i++) {
        const struct engine_adapter_info *a = &sources->adapter[i];
        if (strcmp(a->name, sources->adapter[index].name))
            continue;
        if (i < index)
            *first = false;
        *in_flight += a->in_flight;
        *bytes += a->bytes;
        if (a->state == ENGINE_ADAPTER_READY)
            shown = a;
    }
    return shown;
}

static void write_adapters(FILE *out, const struct metrics_sources *sources)
{
    static const char *const name[] = {"expertd_adapter_rows_served_total", "expertd_adapter_in_flight", "expertd_adapter_bytes"};
    static const char *const type[] = {"counter", "gauge", "gauge"};
    static const char *const help[] = {"Rows computed with the adapter.", "Requests that hold the adapter.", "Device memory it takes."};
    bool twins = false; /* all that are ready differ in name */
    for (size_t i = 0; i < sources->adapters; i++)
        twins |= sources->adapter[i].state != ENGINE_ADAPTER_READY;
    for (size_t family = 0; family < 3; family++) {
        metrics_write_family(out, name[family], type[family], help[family]);
        for (size_t i = 0; i < sources->adapters; i++) {
            bool first;
            int64_t value[3];
            const struct engine_adapter_info *shown = twin_of(sources, i, twins, &first, &value[1], &value[2]);
            if (!first)
                continue;
            value[0] = shown->rows_served;
            fprintf(out, "%s{adapter=\"", name[family]);
            metrics_write_label(out, shown->name);
            fprintf(out, "\"} %" PRId64 "\n", value[family]);
        }
    }
}

static void write_engine(FILE *out, const struct engine_stats *stats)
{
    write_gauge(out, "expertd_device_failed", "1 once the device has failed for good.", stats->failed);
    write_engine_scalars(out, stats);
    if (stats->has_device)
        metrics_write_device(out, &stats->device);
    metrics_write_family(out, "expertd_adapters", "gauge", "Adapters by state.");
    fprintf(out, "expertd_adapters{state=\"ready\"} %" PRId64 "\nexpertd_adapters{state=\"draining\"} %" PRId64 "\n", stats->adapters_ready,
            stats->adapters_draining);
    write_engine_histogram(out, "expertd_queue_seconds", "How long forward requests waited.", stats->queue_us, 1e-6);
    write_engine_histogram(out, "expertd_compute_seconds", "How long forward requests were computed.", stats->compute_us, 1e-6);
    write_engine_histogram(out, "expertd_batch_rows", "Rows a batch.", stats->batch_rows, 1);
}

char *metrics_render(struct metrics *metrics, const struct metrics_sources *sources, size_t *length)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, length);
    if (!out)
        return NULL;
    metrics_write_process(out, metrics->start_time);
    metrics_write_family(out, "expertd_build_info", "gauge", "The program; always 1.");
    fputs("expertd_build_info{version=\"" EXPERTD_VERSION "\"} 1\n", out);
    write_gauge(out, "expertd_ready", "1 when /health/ready says so.", sources->ready);
    write_gauge(out, "expertd_draining", "1 while shutting down.", sources->draining);
    write_counter(out, "expertd_log_lines_dropped_total", "Log lines that could not be written.", log_dropped());
    write_http(out, metrics);
    if (sources->model)
        write_model(out, sources);
    if (sources->stats)
        write_engine(out, sources->stats);
    if (sources->model)
        write_adapters(out, sources);
    write_triton(out, metrics, sources);
    bool failed = ferror(out);
    if (fclose(out) || failed) {
        free(text);
        return NULL;
    }
    return text;
}
