/* SPDX-License-Identifier: Apache-2.0
 *
 * What builds without CUDA link in place of the CUDA back end.
 */
#include "kernels/kernels.h"

#include <stdio.h>

const struct kernel_table *kernels_cuda(const char *code, int device, char *why, size_t why_size)
{
    snprintf(why, why_size, "this build has no CUDA back end");
    return NULL;
}

struct kernel_stream *kernels_cuda_stream_create(int device, void *cuda_stream) { return NULL; }

void kernels_cuda_stream_destroy(struct kernel_stream *stream) {}
