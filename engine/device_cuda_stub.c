/* SPDX-License-Identifier: Apache-2.0
 *
 * Takes device_cuda.c's place in builds without the CUDA compiler, or without the wish for it.
 */
#include "engine/device.h"

bool device_cuda_available(void) { return false; }

enum engine_code device_cuda_check(const struct device_options *options, struct engine_error *error)
{
    return engine_fail(error, ENGINE_BAD_OPTION,
                       "--device: \"%.64s\" asked for, but this build has no CUDA back end: nvcc was missing when it was configured, or "
                       "-Dcuda=disabled was given; meson configure BUILD -Dcuda=enabled, and build again",
                       options->device ? options->device : "cuda");
}

enum engine_code device_cuda_create(const struct device_options *options, struct device **out, struct engine_error *error)
{
    (void)out;
    return device_cuda_check(options, error);
}
