/* SPDX-License-Identifier: Apache-2.0
 *
 * The log: lines for people or JSON objects, written to one descriptor with one write(2) each.
 *
 * Any thread may log at any time; before log_init lines go to stderr as text from level info up. Control characters,
 * quotes where they matter, and bytes that are not UTF-8 are escaped in both forms, so what a client sends can neither forge a line nor
 * reach a terminal raw. Overlong strings are cut. A line that can't be written is dropped and counted: at once where the descriptor is
 * non-blocking, else when whoever reads it has stopped for a second, and from then on until that one reads again.
 */
#ifndef EXPERTD_SERVER_LOG_H
#define EXPERTD_SERVER_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum log_level { LOG_LEVEL_DEBUG, LOG_LEVEL_INFO, LOG_LEVEL_WARNING, LOG_LEVEL_ERROR };
enum log_format { LOG_FORMAT_TEXT, LOG_FORMAT_JSON };

/* Where and how to log from now on; the descriptor stays the caller's. Colours and progress bars appear when it is a terminal
 * and the format is text. */
void log_init(int fd, enum log_format format, enum log_level level);

/* The names of --log-format and --log-level, and of engine_options.log; false when it is none. */
bool log_format_parse(const char *name, enum log_format *out);
bool log_level_parse(const char *name, enum log_level *out);

bool log_enabled(enum log_level level);

/* A named value beside the message. */
struct log_field {
    const char *key; /* a plain word of ours */
    const char *text; /* NULL: `number` is the value */
    int64_t number;
};

void log_event(enum log_level level, const char *message, const struct log_field *fields, size_t count);
void log_message(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* For struct engine_options.log; the argument is not used. */
void log_from_engine(void *arg, const char *level, const char *message);

/* One answered request, logged at info; from status 500 up at warning; probes and successful scrapes at debug. A probe that is told
 * that the model is being loaded, or that the server is draining, is as routine as one that succeeds. NULL texts and negative numbers are
 * left out. Of requests refused with 429 or 503 some ten a second are logged for each code, unless level debug is, and the others counted. */
struct log_request {
    const char *request_id, *method, *route, *remote;
    const char *target; /* the path as it was asked for, where the route does not tell: errors 404 and 405, and no route */
    int status;
    const char *code; /* of an error: "queue_full" */
    const char *error; /* its sentence */
    const char *adapter; /* that an adapter call names */
    int64_t layer;
    const char *path; /* "decode", "prefill" */
    int64_t rows, adapters;
    int64_t bytes_in, bytes_out;
    int64_t queue_us, compute_us, total_us;
};
void log_request(const struct log_request *request);

/* Says how many refused requests were left out, once a second has passed since the first of them or since the last such line; `all`: at
 * once. To be called several times a second, so that a burst's last line comes without another request. */
void log_refused_summary(bool all);

/* Lines given up so far because the descriptor would not take them. */
uint64_t log_dropped(void);

/* Progress of something long, in bytes: a bar on a terminal (at most ten times a second, log lines pass above it), lines elsewhere
 * (every 5% but at most one a second, or every 10 s). One at a time. log_progress_update fits engine_options.progress, with the
 * struct as its argument. */
struct log_progress {
    const char *what; /* "loading weights" */
    int64_t started_ns, shown_ns;
    int64_t shown_done, done, total;
};
void log_progress_begin(struct log_progress *progress, const char *what);
void log_progress_update(void *progress, int64_t done, int64_t total);
/* Takes the bar away; when all was done, logs a line with bytes, seconds and rate. */
void log_progress_end(struct log_progress *progress);

#endif
