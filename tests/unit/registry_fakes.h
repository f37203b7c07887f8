/* SPDX-License-Identifier: Apache-2.0
 *
 * What the registry works with, for its tests: a device that can be told to fail, and a small engine thread that can be held.
 */
#ifndef EXPERTD_TESTS_UNIT_REGISTRY_FAKES_H
#define EXPERTD_TESTS_UNIT_REGISTRY_FAKES_H

#include "engine/device.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

struct fake {
    struct device base;
    pthread_mutex_t lock;
    int slots;
    struct kernel_lora_entry *table; /* [2 layers, slots, 4 experts, 3] */
    size_t limit, used;
    int allocs, uploads, writes;
    int fail_alloc, fail_upload, fail_write; /* the nth call from now fails; 0: none */
    bool no_host_memory;
    const char *touched; /* a file whose time of modification every upload changes; NULL: none */
};

extern const struct device_ops fake_ops;

struct job {
    struct job *next;
    void (*fn)(void *);
    void *arg;
};

struct thread {
    pthread_t id;
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct job *head, **tail;
    bool stop, paused;
};

/* A publisher's post; its context is the thread. */
void thread_post(void *context, void (*fn)(void *), void *arg);
/* What the thread runs, on `struct thread *`; ends once it is told to stop and nothing is left to do. */
void *thread_run(void *thread);
void thread_pause(struct thread *t, bool paused);

#endif
