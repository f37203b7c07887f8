/* SPDX-License-Identifier: Apache-2.0
 *
 * The log's one sink, and progress on it.
 */
#include "server/log.h"
#include "server/log_line.h"
#include "server/log_refused.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_MS 1000 /* with a reader that has stopped; threads that serve wait behind the line */

static struct {
    pthread_mutex_t lock; /* orders lines and the bar; held across the write only */
    int fd;
    bool stuck; /* the reader had stopped when a line was last tried */
    bool bar; /* a progress bar stands in the last row */
    atomic_bool terminal;
    atomic_int format, level;
    atomic_uint_fast64_t dropped;
} sink = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = STDERR_FILENO, .format = LOG_FORMAT_TEXT, .level = LOG_LEVEL_INFO};

void log_init(int fd, enum log_format format, enum log_level level)
{
    pthread_mutex_lock(&sink.lock);
    sink.fd = fd;
    sink.stuck = false;
    atomic_store(&sink.terminal, format == LOG_FORMAT_TEXT && isatty(fd));
    sink.bar = false;
    atomic_store(&sink.format, (int)format);
    atomic_store(&sink.level, (int)level);
    log_refused_reset();
    pthread_mutex_unlock(&sink.lock);
}

bool log_format_parse(const char *name, enum log_format *out)
{
    if (strcmp(name, "text") && strcmp(name, "json"))
        return false;
    *out = name[0] == 't' ? LOG_FORMAT_TEXT : LOG_FORMAT_JSON;
    return true;
}

bool log_level_parse(const char *name, enum log_level *out)
{
    static const char *const names[] = {"debug", "info", "warning", "error"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!strcmp(name, names[i])) {
            *out = (enum log_level)i;
            return true;
        }
    }
    return false;
}

bool log_enabled(enum log_level level) { return (int)level >= atomic_load_explicit(&sink.level, memory_order_relaxed); }

uint64_t log_dropped(void) { return atomic_load(&sink.dropped); }

/* With the lock held. False: the reader does not read, and has been waited for. A pipe that polls as writable takes a whole line. */
static bool wait_for_reader(void)
{
    struct pollfd p = {.fd = sink.fd, .events = POLLOUT};
    int ready;
    do
        ready = poll(&p, 1, sink.stuck ? 0 : PATIENCE_MS);
    while (ready < 0 && errno == EINTR);
    sink.stuck = !ready;
    return ready;
}

/* With the lock held. Continues after partial writes to files and terminals; gives a line up on any other trouble, since
 * there is nobody left to tell. */
static void write_out(const char *text, size_t length)
{
    if (!wait_for_reader()) {
        atomic_fetch_add(&sink.dropped, 1);
        return;
    }
    while (length) {
        ssize_t written = write(sink.fd, text, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0) {
            atomic_fetch_add(&sink.dropped, 1);
            return;
        }
        text += written;
        length -= (size_t)written;
    }
}

static void emit(struct log_line *line)
{
    static const char clear[] = "\r\x1b[K";
    log_line_end(line);
    pthread_mutex_lock(&sink.lock);
    if (sink.bar) {
        write_out(clear, sizeof clear - 1);
        sink.bar = false; /* the next update draws it again below the line */
    }
    write_out(line->text, line->length);
    pthread_mutex_unlock(&sink.lock);
}

static void begin(struct log_line *line, enum log_level level, const char *message)
{
    log_line_begin(line, (enum log_format)atomic_load(&sink.format), atomic_load(&sink.terminal), level, message);
}

void log_event(enum log_level level, const char *message, const struct log_field *fields, size_t count)
{
    if (!log_enabled(level))
        return;
    struct log_line line;
    begin(&line, level, message);
    for (size_t i = 0; i < count; i++) {
        if (fields[i].text)
            log_line_add_text(&line, fields[i].key, fields[i].text);
        else
            log_line_add_number(&line, fields[i].key, fields[i].number);
    }
    emit(&line);
}

void log_message(enum log_level level, const char *format, ...)
{
    if (!log_enabled(level))
        return;
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    log_event(level, message, NULL, 0);
}

void log_from_engine(void *arg, const char *level, const char *message)
{
    enum log_level parsed = LOG_LEVEL_INFO;
    log_level_parse(level, &parsed);
    log_event(parsed, message, NULL, 0);
}

/* Probes and scrapes come every few seconds for ever, and say nothing when they go well or meet a state that was logged itself. */
static bool is_routine(const struct log_request *r)
{
    size_t length = r->route ? strlen(r->route) : 0;
    bool probe = length > 6 && (strstr(r->route, "/health/") || !strcmp(r->route + length - 6, "/ready"));
    if (r->status >= 400)
        return probe && r->code && (!strcmp(r->code, "not_ready") || !strcmp(r->code, "draining"));
    return probe || (r->route && !strcmp(r->route, "/metrics"));
}

void log_request(const struct log_request *r)
{
    enum log_level level = is_routine(r) ? LOG_LEVEL_DEBUG : r->status >= 500 ? LOG_LEVEL_WARNING : LOG_LEVEL_INFO;
    if (!log_enabled(level) || (!log_enabled(LOG_LEVEL_DEBUG) && !log_refused_admit(r->status, r->code)))
        return;
    const struct log_field fields[] = {
        {"request_id", r->request_id, -1},
        {"method", r->method, -1},
        {"route", r->route, -1},
        {"target", r->target, -1},
        {"status", NULL, r->status},
        {"code", r->code, -1},
        {"adapter", r->adapter, -1},
        {"layer", NULL, r->layer},
        {"path", r->path, -1},
        {"rows", NULL, r->rows},
        {"adapters", NULL, r->adapters},
        {"bytes_in", NULL, r->bytes_in},
        {"bytes_out", NULL, r->bytes_out},
        {"queue_us", NULL, r->queue_us},
        {"compute_us", NULL, r->compute_us},
        {"total_us", NULL, r->total_us},
        {"remote", r->remote, -1},
        {"error", r->error, -1}, /* the longest comes last, so that it is what gets cut */
    };
    struct log_line line;
    begin(&line, level, "request");
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].text)
            log_line_add_text(&line, fields[i].key, fields[i].text);
        else if (fields[i].number >= 0)
            log_line_add_number(&line, fields[i].key, fields[i].number);
    }
    emit(&line);
}

void log_refused_summary(bool all)
{
    struct log_refused r;
    bool json = atomic_load(&sink.format) == LOG_FORMAT_JSON;
    for (size_t i = 0; i < LOG_REFUSED_KINDS; i++) {
        if (!log_refused_take(i, all, &r))
            continue;
        char message[160];
        snprintf(message, sizeof message, "%" PRId64 " more %s refused with %d %s in the last %.1f s", r.requests,
                 r.requests == 1 ? "request was" : "requests were", r.status, r.code, r.seconds < 0.1 ? 0.1 : r.seconds);
        const struct log_field fields[] = {{"status", NULL, r.status}, {"code", r.code, -1}, {"requests", NULL, r.requests}};
        log_event(r.status >= 500 ? LOG_LEVEL_WARNING : LOG_LEVEL_INFO, message, fields, json ? 3 : 0);
    }
}

/* ---- progress ---------------------------------------------------------------------------------------------- */

#define BAR_WIDTH 20
#define SECOND INT64_C(1000000000)

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

static double fraction(const struct log_progress *p) { return p->total > 0 ? (double)p->done / (double)p->total : 0; }

static double bytes_per_second(const struct log_progress *p, int64_t now)
{
    double seconds = (double)(now - p->started_ns) / SECOND;
    return seconds > 0 ? (double)p->done / seconds : 0;
}

static void draw_bar(const struct log_progress *p, int64_t now)
{
    char text[256], cells[BAR_WIDTH + 1], done[16], total[16], rate[16], left[32] = "";
    double speed = bytes_per_second(p, now);
    for (int i = 0; i < BAR_WIDTH; i++)
        cells[i] = i < (int)(fraction(p) * BAR_WIDTH) ? '#' : '.';
    cells[BAR_WIDTH] = '\0';
    log_format_bytes(done, (double)p->done);
    log_format_bytes(total, (double)p->total);
    log_format_bytes(rate, speed);
    if (speed > 0)
        snprintf(left, sizeof left, ", %.0f s left", (double)(p->total - p->done) / speed);
    int length = snprintf(text, sizeof text, "\r%.40s [%s] %3.0f%% %s of %s, %s/s%s\x1b[K", p->what, cells, 100 * fraction(p), done, total,
                          rate, left);
    pthread_mutex_lock(&sink.lock);
    write_out(text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
    sink.bar = true;
    pthread_mutex_unlock(&sink.lock);
}

static void log_progress_line(const struct log_progress *p, int64_t now, bool ended)
{
    char message[160], done[16], total[16], rate[16];
    double speed = bytes_per_second(p, now);
    log_format_bytes(done, (double)p->done);
    log_format_bytes(total, (double)p->total);
    log_format_bytes(rate, speed);
    if (ended) {
        snprintf(message, sizeof message, "%.40s: %s in %.1f s, %s/s", p->what, done, (double)(now - p->started_ns) / SECOND, rate);
    } else {
        snprintf(message, sizeof message, "%.40s: %.0f%%, %s of %s, %s/s, %.0f s left", p->what, 100 * fraction(p), done, total, rate,
                 speed > 0 ? (double)(p->total - p->done) / speed : 0.0);
    }
    const struct log_field fields[] = {{"bytes_done", NULL, p->done}, {"bytes_total", NULL, p->total}};
    bool json = atomic_load(&sink.format) == LOG_FORMAT_JSON;
    log_event(LOG_LEVEL_INFO, message, fields, json ? 2 : 0);
}

void log_progress_begin(struct log_progress *progress, const char *what)
{
    *progress = (struct log_progress){.what = what, .started_ns = now_ns()};
    progress->shown_ns = progress->started_ns;
}

void log_progress_update(void *progress, int64_t done, int64_t total)
{
    struct log_progress *p = progress;
    int64_t now = now_ns(), since = now - p->shown_ns;
    p->done = done;
    p->total = total;
    if (!log_enabled(LOG_LEVEL_INFO))
        return;
    bool terminal = atomic_load(&sink.terminal);
    bool step = total > 0 && (double)(done - p->shown_done) >= 0.05 * (double)total;
    if (terminal ? since < SECOND / 10 && done < total : !(step && since >= SECOND) && since < 10 * SECOND)
        return;
    p->shown_ns = now;
    p->shown_done = done;
    if (terminal)
        draw_bar(p, now);
    else
        log_progress_line(p, now, false);
}

void log_progress_end(struct log_progress *progress)
{
    static const char clear[] = "\r\x1b[K";
    pthread_mutex_lock(&sink.lock);
    if (sink.bar)
        write_out(clear, sizeof clear - 1);
    sink.bar = false;
    pthread_mutex_unlock(&sink.lock);
    if (progress->total > 0 && progress->done >= progress->total)
        log_progress_line(progress, now_ns(), true);
}
