/* SPDX-License-Identifier: Apache-2.0
 *
 * The log: nothing that comes from outside can forge a line, leave a JSON line invalid or reach a terminal raw, and lines of many
 * threads stay whole.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "server/log.h"

#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int reader, writer;
static char text[1 << 20];

static int open_pipe(void **state)
{
    (void)state;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        return -1;
    reader = ends[0];
    writer = ends[1];
    return 0;
}

static int close_pipe(void **state)
{
    (void)state;
    log_init(STDERR_FILENO, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    close(reader);
    if (writer >= 0)
        close(writer);
    return 0;
}

/* Everything logged so far. */
static const char *collect(void)
{
    close(writer);
    writer = -1;
    size_t length = 0;
    for (ssize_t n; (n = read(reader, text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)n;
    text[length] = '\0';
    return text;
}

static size_t count_lines(const char *s)
{
    size_t n = 0;
    for (; *s; s++)
        n += *s == '\n';
    return n;
}

static json_t *parse_line(const char *line)
{
    json_error_t error;
    json_t *object = json_loadb(line, strcspn(line, "\n"), JSON_REJECT_DUPLICATES, &error);
    if (!object)
        fail_msg("%s in: %s", error.text, line);
    return object;
}

static const char hostile[] =
    "a\"b\\c\n2026-01-01T00:00:00.000Z error forged\r\x1b[31m\x7f\xc3\xa9\xff\xc0\x80\xed\xa0\x80\xc2\x9b\xe2\x80\xae end";

static void json_survives_hostile_text(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_JSON, LOG_LEVEL_DEBUG);
    const struct log_field field[] = {{"user", hostile, 0}, {"n", NULL, INT64_MIN}};
    log_event(LOG_LEVEL_ERROR, hostile, field, 2);
    const char *line = collect();
    assert_int_equal(count_lines(line), 1);
    for (const char *c = line; *c != '\n'; c++)
        assert_true((unsigned char)*c >= 0x20 && *c != 0x7f);
    json_t *o = parse_line(line);
    assert_string_equal(json_string_value(json_object_get(o, "level")), "error");
    assert_int_equal(json_integer_value(json_object_get(o, "n")), INT64_MIN);
    const char *user = json_string_value(json_object_get(o, "user"));
    assert_memory_equal(user, "a\"b\\c\n2026", 10);
    assert_non_null(strstr(user, "\xc3\xa9"));
    assert_null(strstr(user, "\xe2\x80\xae")); /* right-to-left override */
    const char *time = json_string_value(json_object_get(o, "time"));
    assert_int_equal(strlen(time), 24);
    assert_int_equal(time[10], 'T');
    assert_int_equal(time[19], '.');
    assert_int_equal(time[23], 'Z');
    json_decref(o);
}

static void text_survives_hostile_text(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_DEBUG);
    const struct log_field field[] = {{"user", hostile, 0}, {"plain", "a.b/c", 0}, {"empty", "", 0}, {"pair", "x=y", 0}};
    log_event(LOG_LEVEL_INFO, hostile, field, 4);
    const char *line = collect();
    assert_int_equal(count_lines(line), 1);
    for (const char *c = line; *c != '\n'; c++)
        assert_true((unsigned char)*c >= 0x20 && *c != 0x7f);
    assert_non_null(strstr(line, " info a\"b\\c\\x0a2026"));
    assert_non_null(strstr(line, "user=\"a\\\"b\\\\c\\x0a"));
    assert_non_null(strstr(line, " plain=a.b/c empty=\"\" pair=\"x=y\"\n"));
}

static void overlong_text_is_cut_and_the_line_stays_whole(void **state)
{
    (void)state;
    static const unsigned char fill[] = {'x', '\x01', '"', 0xff};
    static char big[100000];
    log_init(writer, LOG_FORMAT_JSON, LOG_LEVEL_DEBUG);
    for (size_t i = 0; i < sizeof fill; i++) {
        memset(big, fill[i], sizeof big - 1);
        const struct log_field field[] = {{"one", big, 0},    {"two", big, 0},   {"three", big, 0}, {"four", big, 0}, {"five", big, 0},
                                          {"six", NULL, 666}, {"seven", big, 0}, {"eight", big, 0}, {"nine", big, 0}};
        log_event(LOG_LEVEL_INFO, "short", field, 9);
        log_event(LOG_LEVEL_INFO, big, field, 9);
    }
    const char *line = collect();
    assert_int_equal(count_lines(line), 2 * sizeof fill);
    for (size_t i = 0; i < 2 * sizeof fill; i++) {
        assert_true(strcspn(line, "\n") < 4096);
        json_decref(parse_line(line));
        line += strcspn(line, "\n") + 1;
    }
}

static void levels_filter(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_WARNING);
    assert_false(log_enabled(LOG_LEVEL_INFO));
    log_message(LOG_LEVEL_INFO, "hidden %d", 1);
    log_message(LOG_LEVEL_WARNING, "shown %d", 2);
    log_from_engine(NULL, "debug", "hidden");
    log_from_engine(NULL, "error", "shown 3");
    const struct log_request good = {.method = "GET", .status = 200}, bad = {.method = "GET", .status = 503};
    log_request(&good);
    log_request(&bad);
    const char *lines = collect();
    assert_int_equal(count_lines(lines), 3);
    assert_non_null(strstr(lines, " warning shown 2\n"));
    assert_non_null(strstr(lines, " error shown 3\n"));
    assert_non_null(strstr(lines, "status=503"));
    assert_null(strstr(lines, "\x1b")); /* a pipe gets no colours */
}

static void probes_are_quiet_until_they_fail(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    const struct log_request requests[] = {
        {.method = "GET", .route = "/health/live", .status = 200},  {.method = "GET", .route = "/v2/health/ready", .status = 200},
        {.method = "GET", .route = "/metrics", .status = 200},      {.method = "GET", .route = "/metrics", .status = 401},
        {.method = "GET", .route = "/health/ready", .status = 503}, {.method = "GET", .route = "/adapters", .status = 200}};
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++)
        log_request(&requests[i]);
    const char *lines = collect();
    assert_int_equal(count_lines(lines), 3);
    assert_non_null(strstr(lines, "status=401"));
    assert_non_null(strstr(lines, "status=503"));
    assert_non_null(strstr(lines, "route=/adapters"));
}

static void requests_show_what_they_have(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_JSON, LOG_LEVEL_INFO);
    struct log_request r = {.request_id = "id-1",
                            .method = "POST",
                            .route = "/moe/forward",
                            .remote = "127.0.0.1:9",
                            .status = 200,
                            .layer = 0,
                            .path = "decode",
                            .rows = 8,
                            .adapters = 2,
                            .bytes_in = 100,
                            .bytes_out = 200,
                            .queue_us = 1,
                            .compute_us = 2,
                            .total_us = 3};
    log_request(&r);
    r = (struct log_request){.request_id = "id-2",
                             .method = "GET",
                             .route = "/metrics",
                             .status = 401,
                             .code = "unauthorized",
                             .layer = -1,
                             .rows = -1,
                             .adapters = -1,
                             .bytes_in = 0,
                             .bytes_out = 5,
                             .queue_us = -1,
                             .compute_us = -1,
                             .total_us = 7};
    log_request(&r);
    const char *line = collect();
    json_t *first = parse_line(line), *second = parse_line(strchr(line, '\n') + 1);
    static const char *const keys[] = {"time", "level",    "message",  "request_id", "method",   "route",      "status",   "layer", "path",
                                       "rows", "adapters", "bytes_in", "bytes_out",  "queue_us", "compute_us", "total_us", "remote"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        assert_non_null(json_object_get(first, keys[i]));
    assert_int_equal(json_object_size(first), sizeof keys / sizeof keys[0]);
    assert_int_equal(json_integer_value(json_object_get(first, "layer")), 0);
    assert_null(json_object_get(second, "layer"));
    assert_null(json_object_get(second, "queue_us"));
    assert_null(json_object_get(second, "remote"));
    assert_string_equal(json_string_value(json_object_get(second, "code")), "unauthorized");
    json_decref(first);
    json_decref(second);
}

#define THREADS 8
#define LINES 200
#define REFUSED 1000

static size_t count_words(const char *s, const char *word)
{
    size_t n = 0;
    for (; (s = strstr(s, word)); s++)
        n++;
    return n;
}

/* The number in a summary's line. */
static size_t summed(const char *lines, const char *what)
{
    const char *at = strstr(lines, what);
    if (!at || strstr(at + 1, what))
        fail_msg("not one \"%s\" in: %s", what, lines);
    for (at--; at > lines && at[-1] != ' ';)
        at--;
    return strtoul(at, NULL, 10);
}

static const struct log_request full = {.method = "POST", .status = 429, .code = "queue_full"};
static const struct log_request draining = {.method = "POST", .status = 503, .code = "draining"};
static const struct log_request wrong = {.method = "POST", .status = 400, .code = "bad_json"};

static void *refuse_many(void *arg)
{
    (void)arg;
    for (int i = 0; i < REFUSED; i++) {
        log_request(&full);
        if (i % 2 == 0)
            log_request(&draining);
        if (i % 50 == 0)
            log_request(&wrong);
    }
    return NULL;
}

static void refusals_are_limited_and_counted(void **state)
{
    (void)state;
    pthread_t thread[THREADS];
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, refuse_many, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    usleep(1000000);
    log_refused_summary(false);
    log_refused_summary(true); /* nothing new */
    log_request(&full); /* shown again */
    const char *lines = collect();
    /* More than ten where a second ends meanwhile. */
    size_t shown = count_words(lines, " code=queue_full") - 1;
    assert_in_range(shown, 10, 50);
    assert_int_equal(shown + summed(lines, "more requests were refused with 429 queue_full in the last "), THREADS * REFUSED);
    shown = count_words(lines, " code=draining");
    assert_in_range(shown, 10, 50);
    assert_int_equal(shown + summed(lines, "more requests were refused with 503 draining in the last "), THREADS * REFUSED / 2);
    assert_int_equal(count_words(lines, " code=bad_json"), THREADS * REFUSED / 50);
    assert_int_equal(count_words(lines, " more request"), 2);
}

static void summaries_wait_for_a_second_or_the_end(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_JSON, LOG_LEVEL_INFO);
    size_t asked = 0;
    for (int i = 0; i < 50; i++, asked++)
        log_request(&full);
    log_refused_summary(false);
    log_refused_summary(true);
    log_refused_summary(true);
    const char *lines = collect(), *last = lines;
    size_t shown = count_words(lines, "\"message\":\"request\"");
    assert_int_equal(count_lines(lines), shown + 1);
    for (size_t i = 0; i < shown; i++)
        last = strchr(last, '\n') + 1;
    json_t *summary = parse_line(last);
    assert_int_equal(json_integer_value(json_object_get(summary, "requests")), asked - shown);
    assert_int_equal(json_integer_value(json_object_get(summary, "status")), 429);
    assert_string_equal(json_string_value(json_object_get(summary, "code")), "queue_full");
    assert_string_equal(json_string_value(json_object_get(summary, "level")), "info");
    json_decref(summary);
}

static void levels_decide_what_is_counted(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_DEBUG);
    for (int i = 0; i < 100; i++)
        log_request(&full);
    log_refused_summary(true); /* all were shown */
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_WARNING);
    for (int i = 0; i < 100; i++)
        log_request(&full);
    log_refused_summary(true); /* nobody wanted to see them */
    assert_int_equal(count_lines(collect()), 100);
}

static void *log_many(void *arg)
{
    char word[256];
    memset(word, 'a' + *(int *)arg, sizeof word - 1);
    word[sizeof word - 1] = '\0';
    for (int i = 0; i < LINES; i++)
        log_message(LOG_LEVEL_INFO, "%s", word);
    return NULL;
}

static void *drain_pipe(void *arg)
{
    size_t *length = arg;
    for (ssize_t n; (n = read(reader, text + *length, sizeof text - 1 - *length)) > 0;)
        *length += (size_t)n;
    text[*length] = '\0';
    return NULL;
}

static void threads_do_not_mix_lines(void **state)
{
    (void)state;
    pthread_t thread[THREADS], drain;
    int number[THREADS];
    size_t length = 0;
    log_init(writer, LOG_FORMAT_JSON, LOG_LEVEL_INFO);
    assert_int_equal(pthread_create(&drain, NULL, drain_pipe, &length), 0);
    for (int i = 0; i < THREADS; i++) {
        number[i] = i;
        assert_int_equal(pthread_create(&thread[i], NULL, log_many, &number[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    close(writer);
    writer = -1;
    pthread_join(drain, NULL);
    assert_int_equal(count_lines(text), THREADS * LINES);
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        json_t *o = parse_line(line);
        const char *word = json_string_value(json_object_get(o, "message"));
        assert_int_equal(strspn(word, (char[]){word[0], 0}), 255);
        json_decref(o);
    }
}

static void a_full_pipe_drops_and_counts(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    assert_int_equal(fcntl(writer, F_SETFL, O_NONBLOCK), 0);
    uint64_t before = log_dropped();
    for (int i = 0; i < 4000; i++)
        log_message(LOG_LEVEL_INFO, "a line of some length that fills the pipe before long");
    size_t kept = count_lines(collect());
    assert_true(log_dropped() > before);
    assert_int_equal(kept + (log_dropped() - before), 4000);
}

/* Nobody reads, and writes would wait for ever: those who log do not. */
static void a_reader_that_stops_holds_nobody_up(void **state)
{
    (void)state;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    uint64_t before = log_dropped();
    alarm(60); /* ends a test that hangs */
    for (int i = 0; i < 4000; i++)
        log_message(LOG_LEVEL_INFO, "a line of some length that fills the pipe before long");
    uint64_t dropped = log_dropped() - before;
    assert_true(dropped > 0);
    char some[32768];
    ssize_t got = read(reader, some, sizeof some - 1);
    assert_true(got > 0);
    some[got] = '\0';
    log_message(LOG_LEVEL_INFO, "it reads again");
    size_t kept = count_lines(some) + count_lines(collect());
    alarm(0);
    assert_non_null(strstr(text, "it reads again"));
    assert_int_equal(log_dropped() - before, dropped);
    assert_int_equal(kept + dropped, 4001);
}

static void progress_writes_lines_beside_a_terminal(void **state)
{
    (void)state;
    struct log_progress p;
    log_init(writer, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    log_progress_begin(&p, "loading weights");
    for (int i = 0; i <= 1000; i++)
        log_progress_update(&p, i * INT64_C(1048576), 1000 * INT64_C(1048576)); /* faster than one line a second */
    p.shown_ns -= 11 * INT64_C(1000000000); /* as if 11 s had passed */
    log_progress_update(&p, 1000 * INT64_C(1048576), 1000 * INT64_C(1048576));
    log_progress_end(&p);
    const char *lines = collect();
    assert_int_equal(count_lines(lines), 2);
    assert_non_null(strstr(lines, "info loading weights: 100%, 1000.0 MiB of 1000.0 MiB, "));
    assert_non_null(strstr(lines, "info loading weights: 1000.0 MiB in "));
    assert_null(strchr(lines, '\r'));
}

static void progress_draws_a_bar_on_a_terminal(void **state)
{
    (void)state;
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || grantpt(master) || unlockpt(master))
        skip();
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(terminal >= 0);
    struct log_progress p;
    log_init(terminal, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    log_progress_begin(&p, "loading weights");
    p.started_ns -= INT64_C(1000000000);
    p.shown_ns = p.started_ns;
    log_progress_update(&p, 512 << 20, 1024 << 20);
    log_message(LOG_LEVEL_WARNING, "between");
    p.shown_ns = p.started_ns;
    log_progress_update(&p, 1024 << 20, 1024 << 20);
    log_progress_end(&p);
    ssize_t length = read(master, text, 4096);
    assert_true(length > 0);
    for (ssize_t n = 0; length < 4096 && fcntl(master, F_SETFL, O_NONBLOCK) == 0 && (n = read(master, text + length, 4096)) > 0;)
        length += n;
    text[length] = '\0';
    assert_non_null(strstr(text, "\rloading weights [##########..........]  50% 512.0 MiB of 1.0 GiB, "));
    assert_non_null(strstr(text, "s left\x1b[K\r\x1b[K2")); /* a line takes the bar's place */
    assert_non_null(strstr(text, "\x1b[33mwarning\x1b[0m between\r\n"));
    assert_non_null(strstr(text, "[####################] 100%"));
    assert_non_null(strstr(text, "info loading weights: 1.0 GiB in "));
    log_init(STDERR_FILENO, LOG_FORMAT_TEXT, LOG_LEVEL_INFO);
    close(terminal);
    close(master);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(json_survives_hostile_text, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(text_survives_hostile_text, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(overlong_text_is_cut_and_the_line_stays_whole, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(levels_filter, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(probes_are_quiet_until_they_fail, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(requests_show_what_they_have, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(refusals_are_limited_and_counted, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(summaries_wait_for_a_second_or_the_end, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(levels_decide_what_is_counted, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(threads_do_not_mix_lines, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(a_full_pipe_drops_and_counts, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(a_reader_that_stops_holds_nobody_up, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(progress_writes_lines_beside_a_terminal, open_pipe, close_pipe),
        cmocka_unit_test_setup_teardown(progress_draws_a_bar_on_a_terminal, open_pipe, close_pipe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
