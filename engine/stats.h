/* SPDX-License-Identifier: Apache-2.0
 *
 * Counting what the scheduler did. Callers hold the lock that guards the struct.
 */
#ifndef EXPERTD_ENGINE_STATS_H
#define EXPERTD_ENGINE_STATS_H

#include "engine/batch.h"
#include "engine/company.h"
#include "engine/engine.h"

void stats_count_value(struct engine_histogram *histogram, int64_t value);
/* A batch that was computed. */
void stats_count_batch(struct engine_stats *stats, const struct batch *batch);
/* What held a batch back, if anything did. */
void stats_count_wait(struct engine_stats *stats, struct company_wait wait);
/* A request that has its final status, path and times. */
void stats_count_request(struct engine_stats *stats, const struct engine_request *request);

#endif
