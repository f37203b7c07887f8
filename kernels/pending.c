/* SPDX-License-Identifier: Apache-2.0
 *
 * Weak stand-ins for the tables that are being written beside this, so that programs link meanwhile.
 */
#include "kernels/kernels.h"

#define WEAK __attribute__((weak))

WEAK const struct kernel_table *kernels_ref(void) { return NULL; }
WEAK const struct kernel_table *kernels_cpu(const char *isa) { return NULL; }
WEAK const char *kernels_cpu_isa(int i) { return NULL; }
WEAK struct kernel_stream *kernels_cpu_stream_create(int threads) { return NULL; }
WEAK void kernels_cpu_stream_destroy(struct kernel_stream *stream) {}
WEAK int kernels_cpu_stream_threads(const struct kernel_stream *stream) { return 1; }
WEAK void kernels_cpu_parallel(struct kernel_stream *stream, int n, void (*fn)(void *arg, int i), void *arg)
{
    for (int i = 0; i < n; i++)
        fn(arg, i);
}
