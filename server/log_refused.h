/* SPDX-License-Identifier: Apache-2.0
 *
 * For log.c: which lines of refused requests are written. Clients that are refused for being too many, or too early, try again at once and
 * all together; thousands of lines a second would bury all others and take the time of threads that serve.
 */
#ifndef EXPERTD_SERVER_LOG_REFUSED_H
#define EXPERTD_SERVER_LOG_REFUSED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LOG_REFUSED_LINES 10 /* a second, for each kind */
#define LOG_REFUSED_KINDS 5 /* codes */

/* False: the line is to be left out, and is counted. True, too, of answers that are no such refusals. Any thread. */
bool log_refused_admit(int status, const char *code);

struct log_refused {
    int status;
    const char *code;
    int64_t requests; /* left out */
    double seconds; /* since the first of them, or since others were taken */
};
/* Takes the count of a kind for a summary, when a second has passed, or at once with `all`. False: none is due. Any thread. */
bool log_refused_take(size_t kind, bool all, struct log_refused *out);
/* Nothing was shown or left out so far. */
void log_refused_reset(void);

#endif
