/* SPDX-License-Identifier: Apache-2.0
 *
 * Chooses the device that the operator named.
 */
#include "engine/device.h"

#include <string.h>

enum kind { KIND_CPU, KIND_CUDA, KIND_NONE };

static enum kind kind_of(const char *name)
{
    if (!name || !strcmp(name, "auto"))
        return device_cuda_available() ? KIND_CUDA : KIND_CPU;
    if (!strcmp(name, "cpu"))
        return KIND_CPU;
    size_t digits = 0;
    if (!strncmp(name, "cuda:", 5))
        digits = strspn(name + 5, "0123456789");
    return !strcmp(name, "cuda") || (digits > 0 && digits <= 4 && name[5 + digits] == '\0') ? KIND_CUDA : KIND_NONE;
}

static enum engine_code fail_name(const char *name, struct engine_error *error)
{
    return engine_fail(error, ENGINE_BAD_OPTION, "--device: \"%.64s\" is none of auto, cpu, cuda, cuda:N", name);
}

enum engine_code device_check(const struct device_options *options, struct engine_error *error)
{
    switch (kind_of(options->device)) {
    case KIND_CPU: return ENGINE_OK;
    case KIND_CUDA: return device_cuda_check(options, error);
    case KIND_NONE: break;
    }
    return fail_name(options->device, error);
}

enum engine_code device_create(const struct device_options *options, struct device **out, struct engine_error *error)
{
    switch (kind_of(options->device)) {
    case KIND_CPU: return device_cpu_create(options, out, error);
    case KIND_CUDA: return device_cuda_create(options, out, error);
    case KIND_NONE: break;
    }
    return fail_name(options->device, error);
}
