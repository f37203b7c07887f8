/* SPDX-License-Identifier: Apache-2.0
 *
 * A few threads for calls that block: adapters being installed and removed. The queue is bounded.
 */
#ifndef EXPERTD_SERVER_WORKERS_H
#define EXPERTD_SERVER_WORKERS_H

#include <stdbool.h>

struct workers;

struct workers_job {
    void (*run)(struct workers_job *job);
    struct workers_job *next;
};

struct workers *workers_create(int threads, int max_waiting); /* NULL: no memory or threads */
/* Runs what was accepted, then ends the threads. NULL is fine. */
void workers_destroy(struct workers *workers);
int workers_most(const struct workers *workers); /* that may wait */
/* The job is the caller's memory and alive until run returns. False: too many wait. */
bool workers_submit(struct workers *workers, struct workers_job *job);

#endif
