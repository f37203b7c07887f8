/* SPDX-License-Identifier: Apache-2.0
 *
 * Chooses the device that the operator named.
 */
#include "engine/device.h"

#include <string.h>

enum engine_code device_create(const struct device_options *options, struct device **out, struct engine_error *error)
{
    const char *name = options->device ? options->device : "auto";
    if (!strcmp(name, "auto"))
        return device_cuda_available() ? device_cuda_create(options, out, error) : device_cpu_create(options, out, error);
    if (!strcmp(name, "cpu"))
        return device_cpu_create(options, out, error);
    size_t digits = 0;
    if (!strncmp(name, "cuda:", 5))
        digits = strspn(name + 5, "0123456789");
    if (!strcmp(name, "cuda") || (digits > 0 && digits <= 4 && name[5 + digits] == '\0'))
        return device_cuda_create(options, out, error);
    return engine_fail(error, ENGINE_BAD_OPTION, "device: \"%.64s\" is none of auto, cpu, cuda, cuda:N", name);
}
