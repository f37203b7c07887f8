/* SPDX-License-Identifier: Apache-2.0
 *
 * Collects what is wrong with files on disk. Without a report the first fault ends the work; with one every fault becomes a
 * line of it and the work goes on to find more.
 */
#ifndef EXPERTD_ENGINE_FAULTS_H
#define EXPERTD_ENGINE_FAULTS_H

#include "engine/error.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct faults {
    FILE *report; /* NULL: stop at the first */
    struct engine_error first;
    int64_t count;
};

/* Records a fault. True: go on looking for more. Running out of memory always ends the work. */
bool faults_add(struct faults *faults, enum engine_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same for an error that a callee has filled. */
bool faults_add_error(struct faults *faults, const struct engine_error *error);
/* Says how many lines were left out, copies the first fault to `error` and returns its code; ENGINE_OK when there was none. */
enum engine_code faults_finish(struct faults *faults, struct engine_error *error);

#endif
