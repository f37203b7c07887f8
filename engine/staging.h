/* SPDX-License-Identifier: Apache-2.0
 *
 * Host memory for bodies and replies, from the device's host allocator, bounded in all and reused. Any thread; never waits for
 * another request's memory.
 */
#ifndef EXPERTD_ENGINE_STAGING_H
#define EXPERTD_ENGINE_STAGING_H

#include "engine/device.h"

struct staging;

/* `limit`: bytes handed out at one time, as asked for; `keep`: bytes of returned blocks kept for reuse. NULL: no memory. */
struct staging *staging_create(struct device *device, int64_t limit, int64_t keep);
void staging_destroy(struct staging *staging); /* all blocks are back; NULL is fine */
/* What staging_acquire would say now to so many bytes, memory aside; nothing is held. */
enum engine_code staging_check(struct staging *staging, size_t bytes);
enum engine_code staging_acquire(struct staging *staging, size_t bytes, void **out);
void staging_release(struct staging *staging, void *memory); /* NULL is fine */
/* Gives back to the system what was kept since the last call and not used since. */
void staging_trim(struct staging *staging);
int64_t staging_bytes(struct staging *staging); /* handed out now, as asked for */

#endif
