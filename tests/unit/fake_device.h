/* SPDX-License-Identifier: Apache-2.0
 *
 * A device for scheduler tests: records the batches that it is given, holds them back until it is told to go on, fails on demand.
 * Its arithmetic is simple, so that a row's result tells which row and slots it was given: out[j] = hidden[j] + 1000 * (sum of the
 * row's expert ids, -1 included) + the sum of its weights.
 */
#ifndef EXPERTD_TESTS_FAKE_DEVICE_H
#define EXPERTD_TESTS_FAKE_DEVICE_H

#include "engine/device.h"
#include "engine/model.h"

#include <pthread.h>

enum { FAKE_HIDDEN = 3, FAKE_EXPERTS = 8, FAKE_LAYERS = 3, FAKE_RECORDS = 100000 };

struct fake_record {
    int32_t layer_index, rows, slots;
    enum kernel_path path;
};

struct fake_device {
    struct device base;
    struct kernel_table kernels;
    struct model model;
    struct model_layer layer[FAKE_LAYERS];
    int32_t held_layers[FAKE_LAYERS], held_experts[FAKE_EXPERTS], local_expert[FAKE_EXPERTS];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct device_batch pending[8]; /* between submit and wait */
    int submitted, finished; /* batches */
    int64_t busy_ns; /* that a batch takes; 0: no time */
    int64_t due_ns[8]; /* when each of `pending` is done */
    bool held; /* batches don't finish while this is so */
    int fail_submit, fail_wait; /* the batch of this number (from 1) fails with `fail_code` */
    enum engine_code fail_code;
    enum engine_code canary_code;
    int canaries;
    int most_pending;
    struct fake_record *record; /* [submitted] */
};

/* `depth` batches in flight; `tells`: has the operation `ready`. Layers are numbered 0, 2, 4; the last expert is not held. */
void fake_init(struct fake_device *fake, int depth, bool tells);
void fake_finish(struct fake_device *fake);
void fake_hold(struct fake_device *fake);
void fake_release(struct fake_device *fake);
int fake_submitted(struct fake_device *fake); /* batches handed over so far */
/* Waits until so many batches have been handed over; false after five seconds. */
bool fake_wait_submitted(struct fake_device *fake, int count);

#endif
