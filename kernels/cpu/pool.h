/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread pool as the CPU back end's steps see it. A pool runs one job at a time, started by the thread that owns the stream.
 */
#ifndef EXPERTD_KERNELS_CPU_POOL_H
#define EXPERTD_KERNELS_CPU_POOL_H

#include "kernels/kernels.h"

/* Each thread's own memory for packed rows: about half of a server core's second-level cache. */
#define POOL_SCRATCH_BYTES ((size_t)1 << 20)

typedef void (*pool_fn)(void *arg, int i, void *scratch);

/* Runs fn(arg, i, scratch) for i in 0..n-1, in any order, on the pool's threads; returns when all are done. `scratch` is
 * POOL_SCRATCH_BYTES of the running thread's memory, 64-byte aligned, with unknown contents. */
void pool_run(struct kernel_stream *stream, int n, pool_fn fn, void *arg);

#endif
