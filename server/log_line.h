/* SPDX-License-Identifier: Apache-2.0
 *
 * Composing one log line in fixed memory, for log.c and its progress lines. A line always has room to be ended properly,
 * however long its parts are.
 */
#ifndef EXPERTD_SERVER_LOG_LINE_H
#define EXPERTD_SERVER_LOG_LINE_H

#include "server/log.h"

#define LOG_LINE_MAX 4096 /* a pipe takes this much at once or not at all (PIPE_BUF) */

struct log_line {
    enum log_format format;
    bool color;
    size_t length;
    char text[LOG_LINE_MAX];
};

/* Time, level and message. */
void log_line_begin(struct log_line *line, enum log_format format, bool color, enum log_level level, const char *message);
void log_line_add_text(struct log_line *line, const char *key, const char *value);
void log_line_add_number(struct log_line *line, const char *key, int64_t value);
/* After this the line ends in a newline and is whole. */
void log_line_end(struct log_line *line);

/* "1.5 GiB" */
void log_format_bytes(char out[16], double bytes);

#endif
