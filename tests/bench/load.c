/* SPDX-License-Identifier: Apache-2.0
 *
 * Closed-loop load: every client sends its next request when the last one is answered.
 *
 * Each client draws a few distinct requests once and repeats them. The first reply to each is kept, and every later reply to it has to
 * have the same bits, whatever else the server was computing: a row's bits don't depend on its company. While requests are counted, a
 * long reply is compared in one window, which moves on from reply to reply: comparing all of 16 MiB would take the client a fifth as long
 * as the whole request, and the rate would be its own. When no client gets any answer for GIVE_UP_S, all stop, and so they do when each
 * was told HOPELESS times, and nothing else, that its requests are wrong. Latency is what the client
 * sees, from the first byte sent to the last byte read; overhead is latency less the server's own queue and compute time.
 */
#include "tests/bench/load.h"
#include "kernels/dtype.h"
#include "tests/bench/http_client.h"

#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DISTINCT 4 /* requests a client alternates between */
#define MAX_ADAPTERS 1024
#define WINDOW ((size_t)32 << 10) /* bytes compared of a counted reply */
#define HOPELESS (2 * DISTINCT) /* each request twice */
#define STATUSES 600 /* HTTP statuses are below; what is not, counts as 0 */
#define GIVE_UP_S 3

struct settings {
    const char *url, *key, *mode, *encoding, *adapters;
    enum dtype dtype;
    int clients, rows, k, layer, base_percent;
    double duration, warmup;
    bool csv;
    /* From the server. */
    int hidden, experts;
    int adapter_ids[MAX_ADAPTERS], adapter_count;
};

struct body {
    char *data;
    size_t length;
    long json_length;
    unsigned char *expected; /* first reply's tensor */
    size_t expected_length;
    size_t window; /* where the next one begins */
};

struct worker {
    const struct settings *settings;
    pthread_t thread;
    uint64_t seed;
    bool prepared;
    struct body body[DISTINCT];
    float *latency, *overhead, *compute; /* microseconds, of counted requests */
    size_t count, capacity;
    size_t different;
    size_t unanswered[HTTP_FAILURES], status[STATUSES]; /* status[200] is not counted */
    atomic_int silent_ms; /* how long calls without an answer have followed each other; 0: the last call had one */
    char first_error[256]; /* of what counts as failed */
};

static atomic_bool counting, stopping, hopeless;
static const char *const failure_name[HTTP_FAILURES] = {
    [HTTP_NO_CONNECTION] = "no connection", [HTTP_TIMED_OUT] = "timed out", [HTTP_CUT_OFF] = "cut off"};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* splitmix64 */
static uint64_t draw(uint64_t *seed)
{
    uint64_t z = *seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float draw_normal(uint64_t *seed)
{
    double u = ((double)(draw(seed) >> 11) + 1) * 0x1p-53, v = (double)(draw(seed) >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

/* The tensors of one request, as the wire wants them. */
struct tensors {
    float *hidden;
    int32_t *experts, *adapters;
    float *weights;
};

static void draw_tensors(const struct settings *s, uint64_t *seed, struct tensors *t)
{
    size_t slots = (size_t)s->rows * (size_t)s->k;
    for (size_t i = 0; i < (size_t)s->rows * (size_t)s->hidden; i++)
        t->hidden[i] = dtype_round_f32(s->dtype, draw_normal(seed));
    for (int r = 0; r < s->rows; r++) {
        for (int k = 0; k < s->k; k++) { /* distinct experts, as a router picks them */
            int32_t *row = t->experts + (size_t)r * (size_t)s->k, e;
            bool taken;
            do {
                e = (int32_t)(draw(seed) % (uint64_t)s->experts);
                taken = false;
                for (int j = 0; j < k; j++)
                    taken |= row[j] == e;
            } while (taken && k < s->experts);
            row[k] = e;
        }
        bool base = !s->adapter_count || (int)(draw(seed) % 100) < s->base_percent;
        t->adapters[r] = base ? -1 : s->adapter_ids[draw(seed) % (uint64_t)s->adapter_count];
    }
    for (size_t i = 0; i < slots; i++)
        t->weights[i] = (float)(draw(seed) >> 40) * 0x1p-24f / (float)s->k;
}

static void print_floats(FILE *out, const float *v, size_t n)
{
    fputc('[', out);
    for (size_t i = 0; i < n; i++)
        fprintf(out, i ? ",%.9g" : "%.9g", (double)v[i]);
    fputc(']', out);
}

static void print_ints(FILE *out, const int32_t *v, size_t n)
{
    fputc('[', out);
    for (size_t i = 0; i < n; i++)
        fprintf(out, i ? ",%d" : "%d", v[i]);
    fputc(']', out);
}

static bool build_body(const struct settings *s, const struct tensors *t, struct body *b)
{
    size_t slots = (size_t)s->rows * (size_t)s->k, cells = (size_t)s->rows * (size_t)s->hidden;
    size_t size = dtype_size(s->dtype);
    bool binary = !strcmp(s->encoding, "binary");
    FILE *out = open_memstream(&b->data, &b->length);
    if (!out)
        return false;
    fprintf(out, "{\"parameters\":{\"layer\":%d,\"mode\":\"%s\",\"binary_data_output\":%s},\"inputs\":[", s->layer, s->mode,
            binary ? "true" : "false");
    struct {
        const char *name, *type;
        int columns;
        size_t bytes;
    } input[] = {{"hidden", dtype_name(s->dtype), s->hidden, cells * size},
                 {"expert_ids", "INT32", s->k, slots * 4},
                 {"expert_weights", "FP32", s->k, slots * 4},
                 {"adapter_id", "INT32", 0, (size_t)s->rows * 4}};
    int inputs = s->adapter_count ? 4 : 3;
    for (int i = 0; i < inputs; i++) {
        fprintf(out, "%s{\"name\":\"%s\",\"datatype\":\"%s\",\"shape\":[%d", i ? "," : "", input[i].name, input[i].type, s->rows);
        if (input[i].columns)
            fprintf(out, ",%d", input[i].columns);
        if (binary) {
            fprintf(out, "],\"parameters\":{\"binary_data_size\":%zu}}", input[i].bytes);
            continue;
        }
        fputs("],\"data\":", out);
        if (i == 0)
            print_floats(out, t->hidden, cells);
        else if (i == 2)
            print_floats(out, t->weights, slots);
        else
            print_ints(out, i == 1 ? t->experts : t->adapters, i == 1 ? slots : (size_t)s->rows);
        fputc('}', out);
    }
    fputs("]}", out);
    fflush(out);
    b->json_length = binary ? (long)b->length : -1;
    if (binary) {
        unsigned char row[4096]; /* a write an element would take longer than the load */
        size_t step = sizeof row / size;
        for (size_t i = 0; i < cells; i += step) {
            size_t n = cells - i < step ? cells - i : step;
            dtype_convert(row, s->dtype, t->hidden + i, DTYPE_FP32, n);
            fwrite(row, size, n, out);
        }
        fwrite(t->experts, 4, slots, out);
        fwrite(t->weights, 4, slots, out);
        if (inputs == 4)
            fwrite(t->adapters, 4, (size_t)s->rows, out);
    }
    return fclose(out) == 0;
}

/* On a thread of its own: drawing takes seconds when there is much. */
static void *prepare(void *arg)
{
    struct worker *w = arg;
    const struct settings *s = w->settings;
    size_t slots = (size_t)s->rows * (size_t)s->k;
    struct tensors t = {.hidden = malloc((size_t)s->rows * (size_t)s->hidden * sizeof(float)),
                        .experts = malloc(slots * sizeof(int32_t)),
                        .adapters = malloc((size_t)s->rows * sizeof(int32_t)),
                        .weights = malloc(slots * sizeof(float))};
    bool ok = t.hidden && t.experts && t.adapters && t.weights;
    for (int i = 0; ok && i < DISTINCT; i++) {
        draw_tensors(s, &w->seed, &t);
        ok = build_body(s, &t, &w->body[i]);
    }
    free(t.hidden);
    free(t.experts);
    free(t.adapters);
    free(t.weights);
    w->prepared = ok;
    return NULL;
}

static double number_after(const char *json, size_t length, const char *key)
{
    const char *at = memmem(json, length, key, strlen(key));
    return at ? strtod(at + strlen(key), NULL) : 0;
}

/* What must repeat: the binary tensor, or the text from "outputs" on. */
static bool reply_tensor(const struct http_reply *reply, const char **data, size_t *length)
{
    if (reply->json_length < reply->length) {
        *data = reply->body + reply->json_length;
        *length = reply->length - reply->json_length;
        return true;
    }
    *data = memmem(reply->body, reply->length, "\"outputs\"", 9);
    *length = *data ? reply->length - (size_t)(*data - reply->body) : 0;
    return *data != NULL;
}

static void check_reply(struct worker *w, struct body *b, const struct http_reply *reply, bool whole)
{
    const char *data;
    size_t length;
    if (!reply_tensor(reply, &data, &length)) {
        w->different++;
        return;
    }
    if (!b->expected) {
        b->expected = malloc(length);
        if (b->expected) {
            memcpy(b->expected, data, length);
            b->expected_length = length;
        }
    } else if (length != b->expected_length) {
        w->different++;
    } else {
        size_t at = whole || b->window >= length ? 0 : b->window, left = length - at;
        size_t bytes = whole || left < WINDOW ? left : WINDOW;
        b->window = at + bytes;
        if (memcmp(data + at, b->expected + at, bytes))
            w->different++;
    }
}

static void record(struct worker *w, double latency, const struct http_reply *reply)
{
    if (w->count == w->capacity) {
        size_t grown = w->capacity ? 2 * w->capacity : 4096;
        float *a = realloc(w->latency, grown * sizeof *a), *b = realloc(w->overhead, grown * sizeof *b);
        float *c = realloc(w->compute, grown * sizeof *c);
        w->latency = a ? a : w->latency;
        w->overhead = b ? b : w->overhead;
        w->compute = c ? c : w->compute;
        if (!a || !b || !c)
            return;
        w->capacity = grown;
    }
    double compute = number_after(reply->body, reply->json_length, "\"compute_us\":");
    double queue = number_after(reply->body, reply->json_length, "\"queue_us\":");
    w->latency[w->count] = (float)(latency * 1e6);
    w->compute[w->count] = (float)compute;
    w->overhead[w->count++] = (float)(latency * 1e6 - compute - queue);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct http_client client;
    http_client_init(&client, w->settings->url, w->settings->key);
    double silent_since = 0;
    int wrong = 0; /* answers in a row that blame the request; -1 once there was another */
    for (int i = 0; !atomic_load(&stopping); i++) {
        struct body *b = &w->body[i % DISTINCT];
        struct http_reply reply;
        double start = now();
        bool answered = http_client_call(&client, "POST", "/moe/forward", b->data, b->length, b->json_length, &reply);
        double latency = now() - start;
        if (answered)
            silent_since = 0;
        else if (silent_since <= 0)
            silent_since = start;
        atomic_store(&w->silent_ms, answered ? 0 : (int)((now() - silent_since) * 1e3));
        const bool blamed = answered && reply.status >= 400 && reply.status < 500 && reply.status != 408 && reply.status != 429;
        wrong = blamed && wrong >= 0 ? wrong + 1 : answered ? -1 : wrong;
        if (answered && reply.status == 200) {
            bool counted = atomic_load(&counting);
            check_reply(w, b, &reply, !counted);
            if (counted)
                record(w, latency, &reply);
            continue;
        }
        if (answered)
            w->status[reply.status > 0 && reply.status < STATUSES ? reply.status : 0]++;
        else
            w->unanswered[client.failure]++;
        if (!w->first_error[0] && !answered)
            snprintf(w->first_error, sizeof w->first_error, "no answer: %s", failure_name[client.failure]);
        else if (!w->first_error[0] && reply.status != 429)
            snprintf(w->first_error, sizeof w->first_error, "%d %.200s", reply.status, reply.body);
        if (wrong == HOPELESS) { /* the next would be answered likewise */
            atomic_store(&hopeless, true);
            atomic_store(&w->silent_ms, GIVE_UP_S * 1000);
            break;
        }
        if (!answered || reply.status == 429)
            nanosleep(&(struct timespec){.tv_nsec = answered ? 1000000 : 20000000}, NULL);
    }
    http_client_finish(&client);
    return NULL;
}

/* "load: GET /moe/model: 503 not_ready: the model is being loaded" */
static void report_refusal(const char *target, const struct http_reply *reply)
{
    json_t *tree = json_loadb(reply->body, reply->length, 0, NULL);
    const char *code = json_string_value(json_object_get(tree, "code")), *sentence = json_string_value(json_object_get(tree, "error"));
    if (code && sentence)
        fprintf(stderr, "load: GET %s: %d %s: %s\n", target, reply->status, code, sentence);
    else
        fprintf(stderr, "load: GET %s: %d %.*s\n", target, reply->status, (int)(reply->length < 200 ? reply->length : 200), reply->body);
    json_decref(tree);
}

static json_t *get_json(const struct settings *s, const char *target)
{
    struct http_client client;
    struct http_reply reply;
    json_t *tree = NULL;
    http_client_init(&client, s->url, s->key);
    if (!http_client_call(&client, "GET", target, NULL, 0, -1, &reply))
        fprintf(stderr, "load: GET %s: no answer from %s (%s); is the server up?\n", target, s->url, failure_name[client.failure]);
    else if (reply.status != 200)
        report_refusal(target, &reply);
    else if (!(tree = json_loadb(reply.body, reply.length, 0, NULL)))
        fprintf(stderr, "load: GET %s at %s: the answer is not JSON\n", target, s->url);
    http_client_finish(&client);
    return tree;
}

static bool ask_server(struct settings *s)
{
    json_t *model = get_json(s, "/moe/model");
    if (!model)
        return false;
    s->hidden = (int)json_integer_value(json_object_get(model, "hidden_size"));
    s->experts = (int)json_integer_value(json_object_get(model, "experts"));
    int top_k = (int)json_integer_value(json_object_get(model, "top_k"));
    json_t *layers = json_object_get(model, "layers");
    if (s->k == 0)
        s->k = top_k > 0 ? top_k : 1;
    if (s->layer < 0)
        s->layer = (int)json_integer_value(json_array_get(layers, 0));
    json_decref(model);
    if (s->hidden <= 0 || s->experts <= 0) {
        fprintf(stderr, "load: /moe/model gives no hidden_size or no experts\n");
        return false;
    }
    if (!strcmp(s->adapters, "none"))
        return true;
    json_t *tree = get_json(s, "/adapters"), *adapter;
    size_t i;
    json_array_foreach(json_object_get(tree, "adapters"), i, adapter)
    {
        const char *name = json_string_value(json_object_get(adapter, "name"));
        size_t n = name ? strlen(name) : 0;
        bool wanted = !strcmp(s->adapters, "all");
        for (const char *p = s->adapters; !wanted && p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
            wanted = n && !strncmp(p, name, n) && (p[n] == ',' || p[n] == 0);
        if (wanted && s->adapter_count < MAX_ADAPTERS)
            s->adapter_ids[s->adapter_count++] = (int)json_integer_value(json_object_get(adapter, "id"));
    }
    json_decref(tree);
    if (!s->adapter_count)
        fprintf(stderr, "load: the server has none of the adapters asked for (%s)\n", s->adapters);
    return s->adapter_count > 0;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile(const float *sorted, size_t n, double p) { return n ? (double)sorted[(size_t)(p * (double)(n - 1) + 0.5)] : 0; }

static float *gather(const struct worker *workers, int n, size_t offset, size_t total)
{
    float *all = malloc((total ? total : 1) * sizeof *all);
    for (int i = 0, at = 0; all && i < n; at += (int)workers[i].count, i++)
        if (workers[i].count)
            memcpy(all + at, *(float *const *)((const char *)&workers[i] + offset), workers[i].count * sizeof *all);
    if (all)
        qsort(all, total, sizeof *all, by_value);
    return all;
}

/* Microseconds, or "-" when there are none. */
static const char *show(char text[32], const float *sorted, size_t n, double p, int digits)
{
    if (n)
        snprintf(text, 32, "%.*f", digits, percentile(sorted, n, p));
    else
        snprintf(text, 32, "-");
    return text;
}

/* "no connection: 12, 503: 4" */
static void print_failures(const size_t unanswered[HTTP_FAILURES], const size_t status[STATUSES], const char *between)
{
    const char *before = "";
    for (int i = 0; i < HTTP_FAILURES; i++) {
        if (unanswered[i]) {
            printf("%s%s: %zu", before, failure_name[i], unanswered[i]);
            before = between;
        }
    }
    for (int i = 0; i < STATUSES; i++) {
        if (status[i] && i != 429) {
            printf("%s%d: %zu", before, i, status[i]);
            before = between;
        }
    }
}

static int report(const struct settings *s, const struct worker *workers, double seconds)
{
    size_t total = 0, failed = 0, different = 0, unanswered[HTTP_FAILURES] = {0}, status[STATUSES] = {0};
    const char *error = "";
    for (int i = 0; i < s->clients; i++) {
        total += workers[i].count;
        different += workers[i].different;
        for (int j = 0; j < HTTP_FAILURES; j++) {
            unanswered[j] += workers[i].unanswered[j];
            failed += workers[i].unanswered[j];
        }
        for (int j = 0; j < STATUSES; j++) {
            status[j] += workers[i].status[j];
            failed += j == 429 ? 0 : workers[i].status[j];
        }
        if (!error[0])
            error = workers[i].first_error;
    }
    size_t refused = status[429];
    float *latency = gather(workers, s->clients, offsetof(struct worker, latency), total);
    float *overhead = gather(workers, s->clients, offsetof(struct worker, overhead), total);
    float *compute = gather(workers, s->clients, offsetof(struct worker, compute), total);
    if (!latency || !overhead || !compute)
        return 1;
    double rate = (double)total / seconds;
    int digits = s->csv ? 1 : 0;
    char a[7][32];
    const char *p50 = show(a[0], latency, total, 0.5, digits), *p90 = show(a[1], latency, total, 0.9, digits);
    const char *p99 = show(a[2], latency, total, 0.99, digits), *most = show(a[3], latency, total, 1, digits);
    const char *c50 = show(a[4], compute, total, 0.5, digits);
    const char *o50 = show(a[5], overhead, total, 0.5, digits), *o99 = show(a[6], overhead, total, 0.99, digits);
    if (s->csv) {
        printf("rows,clients,encoding,dtype,adapters,requests,failed,refused,different,p50_us,p90_us,p99_us,max_us,compute_p50_us,"
               "overhead_p50_us,overhead_p99_us,requests_s,rows_s,failures\n");
        printf("%d,%d,%s,%s,%d,%zu,%zu,%zu,%zu,%s,%s,%s,%s,%s,%s,%s,%.1f,%.1f,", s->rows, s->clients, s->encoding, dtype_name(s->dtype),
               s->adapter_count, total, failed, refused, different, p50, p90, p99, most, c50, o50, o99, rate, rate * s->rows);
        print_failures(unanswered, status, "; ");
        putchar('\n');
    } else {
        printf("%d rows x %d clients, %s %s, K=%d, %d adapters: %zu requests in %.1f s, %.1f requests/s, %.0f rows/s\n", s->rows,
               s->clients, s->encoding, dtype_name(s->dtype), s->k, s->adapter_count, total, seconds, rate, rate * s->rows);
        printf("latency  p50 %s us  p90 %s  p99 %s  max %s\n", p50, p90, p99, most);
        printf("compute  p50 %s us  overhead (latency - queue - compute) p50 %s us  p99 %s\n", c50, o50, o99);
        printf("%zu failed", failed);
        if (failed) {
            printf(" (");
            print_failures(unanswered, status, ", ");
            printf(")");
        }
        printf(", %zu refused (429), %zu replies whose bits differ from the first reply to the same request\n", refused, different);
    }
    if (error[0])
        fprintf(stderr, "load: first error: %s\n", error);
    free(latency);
    free(overhead);
    free(compute);
    fflush(stdout);
    return failed || different || !total;
}

static void usage(FILE *out)
{
    fprintf(
        out,
        "usage: expert-bench load [OPTIONS]\n"
        "\n"
        "Posts batches to a running server as fast as it answers them, and compares each reply with the first one to the same request.\n"
        "\n"
        "  --url URL            http://HOST:PORT or unix:PATH; default http://127.0.0.1:8080\n"
        "  --api-key KEY        bearer key, where the server wants one\n"
        "  --clients N          connections, each with one request at a time; default 1\n"
        "  --rows N             rows of a request; default 32\n"
        "  --k N                experts of a row; default what the model says\n"
        "  --layer N            default the first that the server holds\n"
        "  --mode MODE          auto (default), decode or prefill\n"
        "  --dtype TYPE         BF16 (default), FP16 or FP32\n"
        "  --encoding ENCODING  binary (default) or json\n"
        "  --adapters WHICH     none (default), all that are installed, or names A,B,...: each row draws one\n"
        "  --base-percent N     of the rows, in percent, that use none; default 0\n"
        "  --duration S         seconds that are counted; default 10\n"
        "  --warmup S           seconds before them; default 2\n"
        "  --csv                a header and one line of figures instead of sentences\n"
        "  --help               print this\n"
        "\n"
        "Failed requests are counted by kind: no connection, timed out, cut off, or the HTTP status. 429 counts apart, as refused.\n"
        "When no client has had any answer for %d s, or each only answers that its requests are wrong, the load ends early.\n"
        "The exit status is 0 when there were answers, none failed and all repeated bit for bit.\n",
        GIVE_UP_S);
}

/* No client has had an answer, of whatever status, for that long, or has any use for more. */
static bool all_silent(struct worker *workers, int n)
{
    for (int i = 0; i < n; i++)
        if (atomic_load(&workers[i].silent_ms) < GIVE_UP_S * 1000)
            return false;
    return n > 0;
}

/* False: nobody answers any more. */
static bool let_run(struct worker *workers, int n, double seconds)
{
    for (double end = now() + seconds, left; (left = end - now()) > 0;) {
        if (all_silent(workers, n))
            return false;
        double step = left < 0.1 ? left : 0.1;
        nanosleep(&(struct timespec){.tv_nsec = (long)(step * 1e9)}, NULL);
    }
    return true;
}

/* How many could be started. */
static int start_all(struct worker *workers, int n, void *(*main)(void *))
{
    int started = 0;
    while (started < n && pthread_create(&workers[started].thread, NULL, main, &workers[started]) == 0)
        started++;
    return started;
}

int load_main(int argc, char **argv)
{
    struct settings s = {.url = "http://127.0.0.1:8080",
                         .mode = "auto",
                         .encoding = "binary",
                         .adapters = "none",
                         .dtype = DTYPE_BF16,
                         .clients = 1,
                         .rows = 32,
                         .layer = -1,
                         .duration = 10,
                         .warmup = 2};
    static const struct option names[] = {
        {"url", 1, 0, 'u'},      {"api-key", 1, 0, 'a'},  {"clients", 1, 0, 'c'},      {"rows", 1, 0, 'r'},
        {"k", 1, 0, 'k'},        {"layer", 1, 0, 'l'},    {"mode", 1, 0, 'm'},         {"dtype", 1, 0, 't'},
        {"encoding", 1, 0, 'e'}, {"adapters", 1, 0, 'A'}, {"base-percent", 1, 0, 'b'}, {"duration", 1, 0, 'd'},
        {"warmup", 1, 0, 'w'},   {"csv", 0, 0, 'C'},      {"help", 0, 0, 'h'},         {0, 0, 0, 0}};
    bool ok = true;
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'u': s.url = optarg; break;
        case 'a': s.key = optarg; break;
        case 'c': s.clients = atoi(optarg); break;
        case 'r': s.rows = atoi(optarg); break;
        case 'k': s.k = atoi(optarg); break;
        case 'l': s.layer = atoi(optarg); break;
        case 'm': s.mode = optarg; break;
        case 't': ok &= dtype_parse(optarg, strlen(optarg), &s.dtype) && dtype_is_float(s.dtype); break;
        case 'e': s.encoding = optarg; break;
        case 'A': s.adapters = optarg; break;
        case 'b': s.base_percent = atoi(optarg); break;
        case 'd': s.duration = atof(optarg); break;
        case 'w': s.warmup = atof(optarg); break;
        case 'C': s.csv = true; break;
        case 'h': usage(stdout); return 0;
        default: ok = false;
        }
    }
    struct http_client probe;
    ok &= optind == argc && s.clients > 0 && s.clients <= 4096 && s.rows > 0 && s.duration > 0 && s.warmup >= 0 &&
          http_client_init(&probe, s.url, s.key) && (!strcmp(s.encoding, "binary") || !strcmp(s.encoding, "json"));
    if (!ok) {
        fputs("expert-bench load: an option is unknown or its value makes no sense; --help lists them\n", stderr);
        return 2;
    }
    if (!ask_server(&s))
        return 1;
    struct worker *workers = calloc((size_t)s.clients, sizeof *workers);
    for (int i = 0; workers && i < s.clients; i++) {
        workers[i].settings = &s;
        workers[i].seed = (uint64_t)i + 1;
    }
    int started = workers ? start_all(workers, s.clients, prepare) : 0;
    bool prepared = started == s.clients;
    for (int i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
        prepared &= workers[i].prepared;
    }
    started = prepared ? start_all(workers, s.clients, work) : 0;
    bool alive = let_run(workers, started, s.warmup);
    double start = now();
    atomic_store(&counting, true);
    alive = alive && let_run(workers, started, s.duration);
    double seconds = now() - start;
    atomic_store(&stopping, true);
    if (!alive && atomic_load(&hopeless))
        fputs("load: stopped early: these requests are refused whenever they are sent\n", stderr);
    else if (!alive)
        fprintf(stderr, "load: stopped early: no client has had any answer from %s for %d s\n", s.url, GIVE_UP_S);
    for (int i = 0; i < started; i++)
        pthread_join(workers[i].thread, NULL);
    int status = started == s.clients ? report(&s, workers, seconds) : 1;
    if (started < s.clients)
        fputs("load: no memory or no threads for so many clients\n", stderr);
    for (int i = 0; workers && i < s.clients; i++) {
        for (int j = 0; j < DISTINCT; j++) {
            free(workers[i].body[j].data);
            free(workers[i].body[j].expected);
        }
        free(workers[i].latency);
        free(workers[i].overhead);
        free(workers[i].compute);
    }
    free(workers);
    return status;
}
