/* SPDX-License-Identifier: Apache-2.0
 *
 * How much memory the machine, or the control group we live in, still has for us. Linux's figures; any thread.
 */
#ifndef EXPERTD_ENGINE_HOST_MEMORY_H
#define EXPERTD_ENGINE_HOST_MEMORY_H

#include <stdint.h>

/* The tighter of the machine and every control group above us (versions 1 and 2). Page cache that can be dropped counts as free. */
void host_memory_info(int64_t *total, int64_t *free_now);

/* Anonymous memory of this process that is resident, in bytes. */
int64_t host_memory_resident(void);

#endif
