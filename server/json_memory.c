/* SPDX-License-Identifier: Apache-2.0
 *
 * The reserve is a plain stack of blocks that starts again when the last block is returned: it is used for moments, if ever.
 */
#include "server/json_memory.h"

#include <jansson.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { RESERVE = 64 << 20 }; /* address space; pages are touched only in need */

static struct {
    pthread_mutex_t lock;
    char *base;
    size_t used, blocks;
} reserve = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *reserve_take(size_t bytes)
{
    void *block = NULL;
    pthread_mutex_lock(&reserve.lock);
    if (bytes <= RESERVE - reserve.used) {
        block = reserve.base + reserve.used;
        reserve.used += (bytes + 15) & ~(size_t)15;
        reserve.blocks++;
    }
    pthread_mutex_unlock(&reserve.lock);
    return block;
}

static void *json_memory_allocate(size_t bytes)
{
    void *block = malloc(bytes);
    return block ? block : reserve_take(bytes);
}

static void json_memory_free(void *block)
{
    uintptr_t at = (uintptr_t)block, base = (uintptr_t)reserve.base;
    if (at < base || at >= base + RESERVE) {
        free(block);
        return;
    }
    pthread_mutex_lock(&reserve.lock);
    if (--reserve.blocks == 0)
        reserve.used = 0;
    pthread_mutex_unlock(&reserve.lock);
}

bool json_memory_init(void)
{
    void *base = mmap(NULL, RESERVE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return false;
    reserve.base = base;
    json_set_alloc_funcs(json_memory_allocate, json_memory_free);
    return true;
}
