/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands between the engine and its CPU device (the linker puts it there) in a daemon that is built for tests alone. Files in the folder
 * that FAILING_DEVICE names tell the device what to do: while `hold` is there batches don't finish, and once `fail` is there the device
 * is lost, with the batch that it has in hand.
 */
#include "engine/device.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum engine_code __real_device_cpu_create(const struct device_options *options, struct device **out, struct engine_error *error);
enum engine_code __wrap_device_cpu_create(const struct device_options *options, struct device **out, struct engine_error *error);

static const struct device_ops *real;
static struct device_ops failing;

static bool told(const char *what)
{
    char path[4096];
    const char *folder = getenv("FAILING_DEVICE");
    int length = folder ? snprintf(path, sizeof path, "%s/%s", folder, what) : -1;
    return length > 0 && (size_t)length < sizeof path && access(path, F_OK) == 0;
}

static enum engine_code lose(struct engine_error *error) { return engine_fail(error, ENGINE_DEVICE_FAILED, "the device was told to fail"); }

static enum engine_code failing_submit(struct device *device, const struct device_batch *batch, struct engine_error *error)
{
    while (told("hold") && !told("fail"))
        usleep(5000);
    return told("fail") ? lose(error) : real->submit(device, batch, error);
}

static enum engine_code failing_canary(struct device *device, struct engine_error *error)
{
    return told("fail") ? lose(error) : real->canary(device, error);
}

enum engine_code __wrap_device_cpu_create(const struct device_options *options, struct device **out, struct engine_error *error)
{
    enum engine_code code = __real_device_cpu_create(options, out, error);
    if (code != ENGINE_OK)
        return code;
    real = (*out)->ops;
    failing = *real;
    failing.submit = failing_submit;
    failing.canary = failing_canary;
    (*out)->ops = &failing;
    return ENGINE_OK;
}
