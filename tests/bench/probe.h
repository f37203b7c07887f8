/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of the measurements themselves, in probe.cu. Both only launch.
 */
#ifndef EXPERTD_TESTS_BENCH_PROBE_H
#define EXPERTD_TESTS_BENCH_PROBE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads all of it once, a multiple of 16 bytes, and writes next to nothing; `sink` takes 4 bytes. A cudaError_t. */
int probe_read(const void *from, size_t bytes, uint32_t *sink, int processors, void *stream);
/* dst[i] = src[row[i]], or zeros for -1; rows of `bytes`, a multiple of 16. A cudaError_t. */
int probe_gather(void *dst, const void *src, const int32_t *row, int rows, size_t bytes, void *stream);

#ifdef __cplusplus
}
#endif
#endif
