/* SPDX-License-Identifier: Apache-2.0
 *
 * Utilisation, memory, power and energy of a GPU, from NVIDIA's management library. It comes with the driver and is opened at run
 * time, since containers and minimal hosts may lack it: then there are no such figures, and nothing else is missed. Its few functions
 * used here are declared by hand: their binary interface is fixed by the version in their names.
 */
#include "engine/device_cuda.h"
#include "engine/engine.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct nvml_device *nvml_device;
struct nvml_rates {
    unsigned gpu, memory; /* percent */
};
struct nvml_memory {
    unsigned long long total, unused, used;
};

struct cuda_sensors {
    void *library;
    nvml_device device;
    int (*shutdown)(void);
    int (*rates)(nvml_device, struct nvml_rates *);
    int (*memory)(nvml_device, struct nvml_memory *);
    int (*power)(nvml_device, unsigned *milliwatts);
    int (*power_limit)(nvml_device, unsigned *milliwatts);
    int (*energy)(nvml_device, unsigned long long *millijoules);
    unsigned long long energy_at_start;
    char uuid[sizeof((struct engine_device_stats *)0)->uuid];
};

/* What POSIX says of dlsym: its result may be a function. */
static bool find(void *library, const char *name, void *function)
{
    void *p = dlsym(library, name);
    *(void **)function = p;
    return p != NULL;
}

struct cuda_sensors *cuda_sensors_create(const char *bus_id)
{
    int (*init)(void), (*by_bus_id)(const char *, nvml_device *), (*uuid)(nvml_device, char *, unsigned);
    struct cuda_sensors *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    void *l = s->library;
    bool whole = l && find(l, "nvmlInit_v2", &init) && find(l, "nvmlShutdown", &s->shutdown) &&
                 find(l, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus_id) && find(l, "nvmlDeviceGetUUID", &uuid) &&
                 find(l, "nvmlDeviceGetUtilizationRates", &s->rates) && find(l, "nvmlDeviceGetMemoryInfo", &s->memory) &&
                 find(l, "nvmlDeviceGetPowerUsage", &s->power) && find(l, "nvmlDeviceGetEnforcedPowerLimit", &s->power_limit) &&
                 find(l, "nvmlDeviceGetTotalEnergyConsumption", &s->energy);
    if (!whole || init() != 0) {
        s->shutdown = NULL;
        cuda_sensors_destroy(s);
        return NULL;
    }
    if (by_bus_id(bus_id, &s->device) != 0 || uuid(s->device, s->uuid, sizeof s->uuid) != 0) {
        cuda_sensors_destroy(s);
        return NULL;
    }
    if (s->energy(s->device, &s->energy_at_start) != 0)
        s->energy_at_start = 0;
    return s;
}

void cuda_sensors_destroy(struct cuda_sensors *s)
{
    if (!s)
        return;
    if (s->shutdown)
        s->shutdown();
    if (s->library)
        dlclose(s->library);
    free(s);
}

void cuda_sensors_read(struct cuda_sensors *s, struct engine_device_stats *out)
{
    struct nvml_rates rates;
    struct nvml_memory memory;
    unsigned power, limit;
    unsigned long long energy;
    bool has_rates = s->rates(s->device, &rates) == 0, has_memory = s->memory(s->device, &memory) == 0;
    bool has_energy = s->energy(s->device, &energy) == 0 && energy >= s->energy_at_start;
    memcpy(out->uuid, s->uuid, sizeof out->uuid);
    out->utilization = has_rates ? rates.gpu / 100.0 : NAN;
    out->memory_utilization = has_rates ? rates.memory / 100.0 : NAN;
    out->memory_total_bytes = has_memory ? (double)memory.total : NAN;
    out->memory_used_bytes = has_memory ? (double)memory.used : NAN;
    out->power_watts = s->power(s->device, &power) == 0 ? power / 1000.0 : NAN;
    out->power_limit_watts = s->power_limit(s->device, &limit) == 0 ? limit / 1000.0 : NAN;
    out->energy_joules = has_energy ? (double)(energy - s->energy_at_start) / 1000.0 : NAN;
}
