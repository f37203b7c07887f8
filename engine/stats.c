/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/stats.h"

void stats_count_value(struct engine_histogram *histogram, int64_t value)
{
    int i = 0;
    if (value > 1) {
        i = 64 - __builtin_clzll((unsigned long long)value - 1);
        if (i > ENGINE_BUCKETS - 1)
            i = ENGINE_BUCKETS - 1;
    }
    histogram->bucket[i]++;
    histogram->count++;
    histogram->sum += (double)value;
}

static int path_index(enum engine_mode path) { return path == ENGINE_PREFILL; }

void stats_count_batch(struct engine_stats *stats, const struct batch *batch)
{
    int p = batch->device.path == KERNEL_PREFILL;
    stats->batches[p]++;
    stats->slots_ok[p] += (uint64_t)batch->slots;
    stats->adapted_rows[p] += (uint64_t)batch->adapted_rows;
    stats_count_value(&stats->batch_rows[p], batch->rows);
}

void stats_count_wait(struct engine_stats *stats, struct company_wait wait)
{
    if (wait.ns <= 0)
        return;
    stats->batch_waits++;
    stats->batch_waits_in_vain += wait.in_vain;
    stats->batch_wait_ns += wait.ns;
}

void stats_count_request(struct engine_stats *stats, const struct engine_request *request)
{
    int p = path_index(request->path);
    switch (request->status) {
    case ENGINE_OK:
        stats->requests_ok[p]++;
        stats->rows_ok[p] += (uint64_t)request->rows;
        stats_count_value(&stats->queue_us[p], request->queue_ns / 1000);
        stats_count_value(&stats->compute_us[p], request->compute_ns / 1000);
        break;
    case ENGINE_CANCELLED: stats->requests_cancelled++; break;
    case ENGINE_DEADLINE_EXCEEDED: stats->requests_expired++; break;
    default: stats->requests_failed++; break;
    }
}
