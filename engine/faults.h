/* SPDX-License-Identifier: Apache-2.0
 *
 * Collects what is wrong with the files of a checkpoint or an adapter. Without a report the first fault ends the work; with one
 * every fault becomes a line of it and the work goes on to find more. Warnings are for whoever uses files that are fine.
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
    char **warnings;
    int32_t warning_count, warnings_dropped;
};

/* Records a fault. True: go on looking for more. Running out of memory always ends the work. */
bool faults_add(struct faults *faults, enum engine_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same for an error that a callee has filled. */
bool faults_add_error(struct faults *faults, const struct engine_error *error);
/* Notes a warning; those past a few dozen are counted. False: out of memory, which is a fault. */
bool faults_warn(struct faults *faults, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Says how many lines were left out, copies the first fault to `error` and returns its code; ENGINE_OK when there was none. With
 * faults, warnings are dropped. */
enum engine_code faults_finish(struct faults *faults, struct engine_error *error);
/* Gives the warnings away: the caller frees each of them and the array. Returns their number. */
int32_t faults_take_warnings(struct faults *faults, char ***warnings);

#endif
