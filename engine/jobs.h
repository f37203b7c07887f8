/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions waiting to be run between two batches, in order. Its owner locks.
 *
 * A poster can't be told that there was no memory for his job, so some nodes are set aside for bad times.
 */
#ifndef EXPERTD_ENGINE_JOBS_H
#define EXPERTD_ENGINE_JOBS_H

#include <stdbool.h>

enum { JOBS_SPARE = 64 };

struct job {
    void (*fn)(void *arg);
    void *arg;
    struct job *next;
};

struct jobs {
    struct job spare[JOBS_SPARE];
    struct job *unused; /* of spare */
    struct job *head, *tail;
};

void jobs_init(struct jobs *jobs);
/* False: no node is to be had just now. */
bool jobs_push(struct jobs *jobs, void (*fn)(void *arg), void *arg);
/* False: none is waiting. */
bool jobs_pop(struct jobs *jobs, struct job *out);

#endif
