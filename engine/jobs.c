/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/jobs.h"

#include <stdint.h>
#include <stdlib.h>

void jobs_init(struct jobs *jobs)
{
    jobs->head = jobs->tail = jobs->unused = NULL;
    for (int i = 0; i < JOBS_SPARE; i++) {
        jobs->spare[i].next = jobs->unused;
        jobs->unused = &jobs->spare[i];
    }
}

static bool is_spare(const struct jobs *jobs, const struct job *job)
{
    return (uintptr_t)job >= (uintptr_t)jobs->spare && (uintptr_t)job < (uintptr_t)(jobs->spare + JOBS_SPARE);
}

bool jobs_push(struct jobs *jobs, void (*fn)(void *arg), void *arg)
{
    struct job *job = malloc(sizeof *job);
    if (!job) {
        job = jobs->unused;
        if (!job)
            return false;
        jobs->unused = job->next;
    }
    *job = (struct job){fn, arg, NULL};
    if (jobs->tail)
        jobs->tail->next = job;
    else
        jobs->head = job;
    jobs->tail = job;
    return true;
}

bool jobs_pop(struct jobs *jobs, struct job *out)
{
    struct job *job = jobs->head;
    if (!job)
        return false;
    *out = *job;
    jobs->head = job->next;
    if (!jobs->head)
        jobs->tail = NULL;
    if (is_spare(jobs, job)) {
        job->next = jobs->unused;
        jobs->unused = job;
    } else {
        free(job);
    }
    return true;
}
