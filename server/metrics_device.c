/* SPDX-License-Identifier: Apache-2.0
 *
 * Figures of a device with memory of its own, and those of them that Triton's tooling reads. What the device's sensors don't say
 * is left out: a figure that is not there is not zero.
 */
#include "server/metrics_counters.h"

#include <inttypes.h>
#include <math.h>

static void write_sample(FILE *out, const char *name, const char *type, const char *help, const char *uuid, double value)
{
    if (isnan(value))
        return;
    metrics_write_family(out, name, type, help);
    fputs(name, out);
    if (uuid) {
        fputs("{gpu_uuid=\"", out);
        metrics_write_label(out, uuid);
        fputs("\"}", out);
    }
    fprintf(out, " %.15g\n", value);
}

void metrics_write_device(FILE *out, const struct engine_device_stats *d)
{
    static const char copies[] = "expertd_device_copy_bytes_total";
    metrics_write_family(out, copies, "counter", "Bytes copied: of batches to and from the device, and of weights and adapters to it.");
    fprintf(out, "%s{what=\"batches_in\"} %" PRIu64 "\n", copies, d->bytes_in);
    fprintf(out, "%s{what=\"batches_out\"} %" PRIu64 "\n", copies, d->bytes_out);
    fprintf(out, "%s{what=\"weights\"} %" PRIu64 "\n", copies, d->bytes_uploaded);
    metrics_write_family(out, "expertd_device_graph_captures_total", "counter", "Forwards captured to be replayed.");
    fprintf(out, "expertd_device_graph_captures_total %" PRIu64 "\n", d->graph_captures);
    if (!d->uuid[0])
        return;
    const struct {
        const char *name, *type, *help;
        bool by_uuid;
        double value;
    } family[] = {
        {"expertd_device_utilization", "gauge", "Share of the last moments in which the device computed, 0 to 1.", false, d->utilization},
        {"expertd_device_memory_utilization", "gauge", "Share of the last moments in which its memory was read or written, 0 to 1.", false,
         d->memory_utilization},
        {"expertd_device_power_watts", "gauge", "Power that the device draws.", false, d->power_watts},
        {"nv_gpu_utilization", "gauge", "GPU utilization, 0.0 to 1.0.", true, d->utilization},
        {"nv_gpu_memory_total_bytes", "gauge", "GPU memory.", true, d->memory_total_bytes},
        {"nv_gpu_memory_used_bytes", "gauge", "GPU memory in use, by all processes.", true, d->memory_used_bytes},
        {"nv_gpu_power_usage", "gauge", "GPU power in watts.", true, d->power_watts},
        {"nv_gpu_power_limit", "gauge", "GPU power limit in watts.", true, d->power_limit_watts},
        {"nv_energy_consumption", "counter", "GPU energy in joules since the model was loaded.", true, d->energy_joules},
    };
    for (size_t i = 0; i < sizeof family / sizeof family[0]; i++)
        write_sample(out, family[i].name, family[i].type, family[i].help, family[i].by_uuid ? d->uuid : NULL, family[i].value);
}
