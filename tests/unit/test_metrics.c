/* SPDX-License-Identifier: Apache-2.0
 *
 * The metrics page against a strict reading of Prometheus' text format, the figures on it, and the names that the dashboard and the
 * alert rules in deploy/ use.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "server/metrics.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const routes[] = {"/moe/forward", "/metrics", "/adapters/{name}", "none"};
enum { FORWARD, METRICS, ADAPTER, NONE, ROUTES };

/* ---- a strict parser: one pass, every rule of the format that a scraper relies on ------------------------------- */

#define MAX_FAMILIES 200
#define MAX_SAMPLES 4000

struct sample {
    char series[512]; /* name and labels as written */
    double value;
};

static struct {
    char family[MAX_FAMILIES][96], type[MAX_FAMILIES][16];
    size_t families, samples;
    struct sample sample[MAX_SAMPLES];
} page;

static size_t name_length(const char *s)
{
    size_t n = 0;
    if (!isalpha((unsigned char)s[0]) && s[0] != '_' && s[0] != ':')
        return 0;
    while (isalnum((unsigned char)s[n]) || s[n] == '_' || s[n] == ':')
        n++;
    return n;
}

static const char *parse_label(const char *s)
{
    size_t n = name_length(s);
    assert_true(n > 0 && s[n] == '=' && s[n + 1] == '"');
    for (s += n + 2; *s != '"'; s++) {
        assert_true((unsigned char)*s >= ' ');
        if (*s == '\\') {
            s++;
            assert_true(*s == '\\' || *s == '"' || *s == 'n');
        }
    }
    return s + 1;
}

static double sample_value(const char *series)
{
    for (size_t i = 0; i < page.samples; i++) {
        if (!strcmp(page.sample[i].series, series))
            return page.sample[i].value;
    }
    return NAN;
}

/* le must rise, counts must not fall, +Inf comes last and equals _count. */
static void check_bucket(const char *family, const char *series)
{
    static char last_labels[512];
    static double last_bound, last_value;
    const char *le = strstr(series, "le=\"");
    assert_non_null(le);
    char labels[512];
    snprintf(labels, sizeof labels, "%.*s", (int)(le - series), series);
    double bound = strtod(le + 4, NULL), value = page.sample[page.samples - 1].value;
    if (!strcmp(labels, last_labels)) {
        assert_true(bound > last_bound);
        assert_true(value >= last_value);
    }
    snprintf(last_labels, sizeof last_labels, "%s", labels);
    last_bound = bound;
    last_value = value;
    (void)family;
}

static void parse_sample(const char *line, const char *family, const char *type)
{
    size_t n = name_length(line), stem = strlen(family);
    assert_true(n > 0);
    bool histogram = !strcmp(type, "histogram");
    const char *suffix = line + stem;
    assert_memory_equal(line, family, stem); /* samples follow their family's TYPE */
    size_t suffix_length = n - stem;
    if (histogram)
        assert_true((suffix_length == 7 && !memcmp(suffix, "_bucket", 7)) || (suffix_length == 4 && !memcmp(suffix, "_sum", 4)) ||
                    (suffix_length == 6 && !memcmp(suffix, "_count", 6)));
    else
        assert_int_equal(suffix_length, 0);
    const char *s = line + n;
    if (*s == '{') {
        do
            s = parse_label(s + 1);
        while (*s == ',');
        assert_int_equal(*s++, '}');
    }
    assert_int_equal(*s, ' ');
    assert_true(page.samples < MAX_SAMPLES);
    struct sample *sample = &page.sample[page.samples];
    assert_true((size_t)(s - line) < sizeof sample->series);
    snprintf(sample->series, sizeof sample->series, "%.*s", (int)(s - line), line);
    char *end;
    sample->value = strtod(s + 1, &end);
    assert_true(end > s + 1 && *end == '\n');
    assert_true(isnan(sample_value(sample->series))); /* no series twice */
    page.samples++;
    if (histogram && suffix_length == 7)
        check_bucket(family, sample->series);
}

static void parse_page(const char *text)
{
    memset(&page, 0, sizeof page);
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        assert_non_null(strchr(line, '\n'));
        if (line[0] != '#') {
            assert_true(page.families > 0);
            parse_sample(line, page.family[page.families - 1], page.type[page.families - 1]);
            continue;
        }
        /* HELP and, right after it, TYPE of the same name. */
        char help_name[96], type_name[96], type[16];
        assert_int_equal(sscanf(line, "# HELP %95s %*[^\n]\n# TYPE %95s %15s\n", help_name, type_name, type), 3);
        assert_string_equal(help_name, type_name);
        assert_true(!strcmp(type, "counter") || !strcmp(type, "gauge") || !strcmp(type, "histogram"));
        for (size_t i = 0; i < page.families; i++)
            assert_string_not_equal(page.family[i], type_name);
        assert_true(page.families < MAX_FAMILIES);
        memcpy(page.family[page.families], type_name, sizeof type_name);
        memcpy(page.type[page.families++], type, sizeof type);
        line = strchr(line, '\n') + 1;
    }
    for (size_t i = 0; i < page.samples; i++) {
        const char *inf = strstr(page.sample[i].series, "le=\"+Inf\"");
        if (!inf)
            continue;
        char count[512];
        const char *bucket = strstr(page.sample[i].series, "_bucket{");
        snprintf(count, sizeof count, "%.*s_count{%.*s}", (int)(bucket - page.sample[i].series), page.sample[i].series,
                 (int)(inf - 1 - (bucket + 8)), bucket + 8);
        assert_true(page.sample[i].value == sample_value(count));
    }
}

/* ---- a server in the middle of its life ------------------------------------------------------------------------- */

static struct engine_stats stats;
static const struct engine_model_info model = {.family = "qwen3_moe",
                                               .device = "cpu",
                                               .device_name = "avx2 \"quoted\"",
                                               .activation = "silu",
                                               .hidden_size = 128,
                                               .experts_held = 16,
                                               .layers_held = 2,
                                               .queue_rows = 1024,
                                               .weight_bytes = 4096,
                                               .scratch_bytes = 512,
                                               .max_adapters = 8};
static struct engine_adapter_info adapters[3] = {
    {.name = "same", .id = 1, .state = ENGINE_ADAPTER_DRAINING, .bytes = 100, .in_flight = 2, .rows_served = 1000},
    {.name = "other/a", .id = 2, .state = ENGINE_ADAPTER_READY, .bytes = 50, .in_flight = 0, .rows_served = 5},
    {.name = "same", .id = 3, .state = ENGINE_ADAPTER_READY, .bytes = 30, .in_flight = 1, .rows_served = 7},
};

static void render(struct metrics *m, const struct metrics_sources *sources)
{
    size_t length;
    char *text = metrics_render(m, sources, &length);
    assert_non_null(text);
    assert_int_equal(strlen(text), length);
    parse_page(text);
    free(text);
}

static void render_all(struct metrics *m)
{
    const struct metrics_sources sources = {
        .model_name = "m\"\\\n", .ready = true, .model = &model, .stats = &stats, .adapter = adapters, .adapters = 3};
    render(m, &sources);
}

static void fill_stats(void)
{
    memset(&stats, 0, sizeof stats);
    stats.rows_ok[0] = 10;
    stats.rows_ok[1] = 300;
    stats.batches[0] = 4;
    stats.batches[1] = 2;
    stats.batch_waits = 5;
    stats.batch_waits_in_vain = 1;
    stats.batch_wait_ns = 1500000;
    stats.requests_rejected = 9;
    stats.queued_requests = 3;
    stats.staging_limit = 1 << 20;
    stats.adapters_ready = 2;
    stats.adapters_draining = 1;
    stats.queue_us[0].bucket[0] = 1;
    stats.queue_us[0].bucket[10] = 2;
    stats.queue_us[0].bucket[ENGINE_BUCKETS - 1] = 1;
    stats.queue_us[0].count = 4;
    stats.queue_us[0].sum = 3e6;
}

static void a_page_while_loading_is_valid(void **state)
{
    (void)state;
    struct metrics *m = metrics_create(routes, ROUTES);
    const struct metrics_sources sources = {.model_name = "m"};
    render(m, &sources);
    assert_true(sample_value("expertd_ready") == 0);
    assert_true(sample_value("nv_inference_count{model=\"m\",version=\"1\"}") == 0);
    metrics_destroy(m);
    metrics_destroy(NULL);
}

static void the_engines_figures_are_shown(void **state)
{
    (void)state;
    fill_stats();
    struct metrics *m = metrics_create(routes, ROUTES);
    render_all(m);
    assert_true(sample_value("expertd_rows_total{path=\"decode\"}") == 10);
    assert_true(sample_value("expertd_rows_total{path=\"prefill\"}") == 300);
    assert_true(sample_value("expertd_requests_rejected_total") == 9);
    assert_true(sample_value("expertd_batch_waits_total") == 5);
    assert_true(sample_value("expertd_batch_waits_in_vain_total") == 1);
    assert_true(sample_value("expertd_batch_wait_seconds_total") == 0.0015);
    assert_true(sample_value("expertd_staging_limit_bytes") == 1 << 20);
    assert_true(sample_value("expertd_model_weights_bytes") == 4096);
    assert_true(sample_value("expertd_adapters{state=\"draining\"}") == 1);
    assert_true(sample_value("expertd_queue_seconds_bucket{path=\"decode\",le=\"1e-06\"}") == 1);
    assert_true(sample_value("expertd_queue_seconds_bucket{path=\"decode\",le=\"0.001024\"}") == 3);
    assert_true(sample_value("expertd_queue_seconds_bucket{path=\"decode\",le=\"+Inf\"}") == 4);
    assert_true(sample_value("expertd_queue_seconds_sum{path=\"decode\"}") == 3);
    assert_true(sample_value("nv_inference_count{model=\"m\\\"\\\\\\n\",version=\"1\"}") == 310);
    assert_true(sample_value("nv_inference_exec_count{model=\"m\\\"\\\\\\n\",version=\"1\"}") == 6);
    assert_true(sample_value("nv_inference_pending_request_count{model=\"m\\\"\\\\\\n\",version=\"1\"}") == 3);
    metrics_destroy(m);
}

/* A figure that the sensors don't give is not shown, and none is without sensors. */
static void a_gpu_is_described_as_triton_does(void **state)
{
    (void)state;
    fill_stats();
    stats.has_device = true;
    stats.device = (struct engine_device_stats){
        .bytes_in = 1000,
        .bytes_out = 2000,
        .bytes_uploaded = UINT64_C(3000000000000),
        .graph_captures = 12,
        .uuid = "GPU-1\"2",
        .utilization = 0.25,
        .memory_utilization = 0.5,
        .memory_total_bytes = 150754820096.0,
        .memory_used_bytes = 1e9,
        .power_watts = 123.5,
        .power_limit_watts = NAN,
        .energy_joules = 42.5,
    };
    struct metrics *m = metrics_create(routes, ROUTES);
    render_all(m);
    assert_true(sample_value("expertd_device_copy_bytes_total{what=\"batches_in\"}") == 1000);
    assert_true(sample_value("expertd_device_copy_bytes_total{what=\"batches_out\"}") == 2000);
    assert_true(sample_value("expertd_device_copy_bytes_total{what=\"weights\"}") == 3e12);
    assert_true(sample_value("expertd_device_graph_captures_total") == 12);
    assert_true(sample_value("expertd_device_utilization") == 0.25);
    assert_true(sample_value("nv_gpu_utilization{gpu_uuid=\"GPU-1\\\"2\"}") == 0.25);
    assert_true(sample_value("nv_gpu_memory_total_bytes{gpu_uuid=\"GPU-1\\\"2\"}") == 150754820096.0);
    assert_true(sample_value("nv_gpu_memory_used_bytes{gpu_uuid=\"GPU-1\\\"2\"}") == 1e9);
    assert_true(sample_value("nv_gpu_power_usage{gpu_uuid=\"GPU-1\\\"2\"}") == 123.5);
    assert_true(isnan(sample_value("nv_gpu_power_limit{gpu_uuid=\"GPU-1\\\"2\"}")));
    assert_true(sample_value("nv_energy_consumption{gpu_uuid=\"GPU-1\\\"2\"}") == 42.5);
    stats.device.uuid[0] = '\0';
    render_all(m);
    assert_true(isnan(sample_value("expertd_device_utilization")));
    assert_true(isnan(sample_value("nv_gpu_utilization{gpu_uuid=\"\"}")));
    assert_true(sample_value("expertd_device_graph_captures_total") == 12);
    metrics_destroy(m);
}

static void adapters_of_one_name_make_one_series(void **state)
{
    (void)state;
    fill_stats();
    struct metrics *m = metrics_create(routes, ROUTES);
    render_all(m); /* the parser refuses a series twice */
    assert_true(sample_value("expertd_adapter_rows_served_total{adapter=\"same\"}") == 7);
    assert_true(sample_value("expertd_adapter_in_flight{adapter=\"same\"}") == 3);
    assert_true(sample_value("expertd_adapter_bytes{adapter=\"same\"}") == 130);
    assert_true(sample_value("expertd_adapter_bytes{adapter=\"other/a\"}") == 50);
    metrics_destroy(m);
}

static void requests_are_counted(void **state)
{
    (void)state;
    fill_stats();
    struct metrics *m = metrics_create(routes, ROUTES);
    metrics_connection_opened(m);
    metrics_connection_opened(m);
    metrics_connection_closed(m);
    metrics_connection_refused(m);
    for (int i = 0; i < 5; i++)
        metrics_request_started(m);
    struct metrics_request r = {.route = FORWARD,
                                .method = "POST",
                                .status = 200,
                                .bytes_in = 100,
                                .bytes_out = 200,
                                .total_ns = 300000,
                                .outcome = METRICS_SUCCESS,
                                .input_ns = 1000,
                                .queue_ns = 2000,
                                .compute_ns = 250000,
                                .output_ns = 4000};
    metrics_request_finished(m, &r);
    r.total_ns = 700000000;
    metrics_request_finished(m, &r);
    r = (struct metrics_request){.route = FORWARD, .method = "POST", .total_ns = 90000000000, .outcome = METRICS_CANCELED};
    metrics_request_finished(m, &r);
    r = (struct metrics_request){.route = NONE, .method = "BREW", .status = 418};
    metrics_request_finished(m, &r);
    render_all(m);
    assert_true(sample_value("expertd_http_connections") == 1);
    assert_true(sample_value("expertd_http_connections_total") == 2);
    assert_true(sample_value("expertd_http_connections_refused_total") == 1);
    assert_true(sample_value("expertd_http_requests_in_flight") == 1);
    assert_true(sample_value("expertd_http_requests_total{route=\"/moe/forward\",method=\"POST\",status=\"200\"}") == 2);
    assert_true(sample_value("expertd_http_requests_total{route=\"/moe/forward\",method=\"POST\",status=\"499\"}") == 1);
    assert_true(sample_value("expertd_http_requests_total{route=\"none\",method=\"OTHER\",status=\"other\"}") == 1);
    assert_true(sample_value("expertd_http_request_bytes_total{route=\"/moe/forward\"}") == 200);
    assert_true(sample_value("expertd_http_response_bytes_total{route=\"/moe/forward\"}") == 400);
    assert_true(sample_value("expertd_http_request_duration_seconds_bucket{route=\"/moe/forward\",le=\"0.00025\"}") == 0);
    assert_true(sample_value("expertd_http_request_duration_seconds_bucket{route=\"/moe/forward\",le=\"0.0005\"}") == 1);
    assert_true(sample_value("expertd_http_request_duration_seconds_bucket{route=\"/moe/forward\",le=\"1\"}") == 2);
    assert_true(sample_value("expertd_http_request_duration_seconds_bucket{route=\"/moe/forward\",le=\"60\"}") == 2);
    assert_true(sample_value("expertd_http_request_duration_seconds_count{route=\"/moe/forward\"}") == 3);
    assert_true(sample_value("nv_inference_request_success{model=\"m\\\"\\\\\\n\",version=\"1\"}") == 2);
    assert_true(sample_value("nv_inference_compute_infer_duration_us{model=\"m\\\"\\\\\\n\",version=\"1\"}") == 500);
    assert_true(sample_value("nv_inference_request_duration_us{model=\"m\\\"\\\\\\n\",version=\"1\"}") == 700300);
    assert_true(sample_value("nv_inference_request_failure{model=\"m\\\"\\\\\\n\",version=\"1\",reason=\"CANCELED\"}") == 1);
    assert_true(sample_value("nv_inference_request_failure{model=\"m\\\"\\\\\\n\",version=\"1\",reason=\"BACKEND\"}") == 0);
    metrics_destroy(m);
}

static void the_process_is_described(void **state)
{
    (void)state;
    struct metrics *m = metrics_create(routes, ROUTES);
    FILE *extra = tmpfile();
    render_all(m);
    double descriptors = sample_value("process_open_fds");
    fclose(extra);
    render_all(m);
    assert_true(sample_value("process_open_fds") == descriptors - 1);
    assert_true(sample_value("process_resident_memory_bytes") > 100000);
    assert_true(sample_value("process_virtual_memory_bytes") >= sample_value("process_resident_memory_bytes"));
    assert_true(sample_value("process_max_fds") >= descriptors);
    assert_true(fabs(sample_value("process_start_time_seconds") - (double)time(NULL)) < 3600);
    assert_true(sample_value("process_cpu_seconds_total") >= 0);
    metrics_destroy(m);
}

static void *count_many(void *arg)
{
    struct metrics *m = arg;
    const struct metrics_request r = {.route = METRICS, .method = "GET", .status = 200, .bytes_out = 3, .total_ns = 5000};
    for (int i = 0; i < 10000; i++) {
        metrics_request_started(m);
        metrics_request_finished(m, &r);
    }
    return NULL;
}

static void nothing_is_lost_between_threads(void **state)
{
    (void)state;
    struct metrics *m = metrics_create(routes, ROUTES);
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, count_many, m), 0);
    for (int i = 0; i < 10; i++)
        render_all(m); /* valid while counters move */
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    render_all(m);
    assert_true(sample_value("expertd_http_requests_total{route=\"/metrics\",method=\"GET\",status=\"200\"}") == 40000);
    assert_true(sample_value("expertd_http_response_bytes_total{route=\"/metrics\"}") == 120000);
    assert_true(sample_value("expertd_http_requests_in_flight") == 0);
    metrics_destroy(m);
}

/* ---- deploy/ ------------------------------------------------------------------------------------------------------ */

static bool has_family(const char *name, size_t length)
{
    for (size_t i = 0; i < page.families; i++) {
        size_t stem = strlen(page.family[i]);
        if (length < stem || memcmp(name, page.family[i], stem))
            continue;
        if (length == stem)
            return true;
        bool histogram = !strcmp(page.type[i], "histogram");
        if (histogram &&
            ((length == stem + 7 && !memcmp(name + stem, "_bucket", 7)) || (length == stem + 4 && !memcmp(name + stem, "_sum", 4)) ||
             (length == stem + 6 && !memcmp(name + stem, "_count", 6))))
            return true;
    }
    return false;
}

/* Every word that looks like a metric's name must be one. */
static size_t check_names_in(const char *path)
{
    static const char *const prefix[] = {"expertd_", "nv_", "process_"};
    static char text[262144];
    size_t found = 0;
    FILE *file = fopen(path, "re");
    if (!file)
        fail_msg("%s is missing", path);
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    assert_true(size < sizeof text - 1);
    text[size] = '\0';
    for (const char *s = text; *s;) {
        size_t n = name_length(s);
        for (size_t i = 0; n && i < 3; i++) {
            if (strncmp(s, prefix[i], strlen(prefix[i])))
                continue;
            if (!has_family(s, n))
                fail_msg("%s: no metric %.*s", path, (int)n, s);
            found++;
        }
        s += n ? n : 1;
    }
    return found;
}

static void the_dashboard_and_alerts_use_our_names(void **state)
{
    (void)state;
    fill_stats();
    stats.has_device = true;
    stats.device = (struct engine_device_stats){.uuid = "GPU-1"};
    struct metrics *m = metrics_create(routes, ROUTES);
    render_all(m);
    assert_true(check_names_in(DEPLOY "/grafana-dashboard.json") > 10);
    assert_true(check_names_in(DEPLOY "/prometheus-rules.yaml") > 5);
    metrics_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_while_loading_is_valid),
        cmocka_unit_test(the_engines_figures_are_shown),
        cmocka_unit_test(a_gpu_is_described_as_triton_does),
        cmocka_unit_test(adapters_of_one_name_make_one_series),
        cmocka_unit_test(requests_are_counted),
        cmocka_unit_test(the_process_is_described),
        cmocka_unit_test(nothing_is_lost_between_threads),
        cmocka_unit_test(the_dashboard_and_alerts_use_our_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
