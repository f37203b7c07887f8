/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory for jansson, from which a lack of memory must be kept.
 *
 * When an allocation fails in the middle of a string, jansson 2.14's reader drops the rest of the string and then copies past the end of
 * what it has. So its allocations are given a reserve of their own to fall back on, far larger than the texts we let it read
 * need; what was read that way is answered as usual.
 */
#ifndef EXPERTD_SERVER_JSON_MEMORY_H
#define EXPERTD_SERVER_JSON_MEMORY_H

#include <stdbool.h>

/* Once, before the first use of jansson; false when the reserve can't be had. */
bool json_memory_init(void);

#endif
