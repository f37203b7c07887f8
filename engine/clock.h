/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine's one clock: CLOCK_MONOTONIC in nanoseconds, the same that request deadlines are written in.
 */
#ifndef EXPERTD_ENGINE_CLOCK_H
#define EXPERTD_ENGINE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define CLOCK_NS_PER_S INT64_C(1000000000)

static inline int64_t clock_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * CLOCK_NS_PER_S + t.tv_nsec;
}

/* For waits on condition variables that were made with this clock. */
static inline struct timespec clock_timespec(int64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / CLOCK_NS_PER_S), .tv_nsec = (long)(ns % CLOCK_NS_PER_S)};
    return t;
}

#endif
