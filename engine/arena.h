/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory for adapters, cut from large chunks: taking and returning memory of a device disturbs the batches that run on
 * it, so that empty chunks stay until arena_trim, or until an allocation needs what they hold.
 *
 * All functions may be called from any thread. The device outlives the arena.
 */
#ifndef EXPERTD_ENGINE_ARENA_H
#define EXPERTD_ENGINE_ARENA_H

#include "engine/device.h"

#define ARENA_ALIGN 256
#define ARENA_CHUNK ((size_t)32 << 20)

struct arena;

struct arena_stats {
    size_t used; /* bytes handed out, rounded up to ARENA_ALIGN */
    size_t chunks; /* bytes taken from the device */
    int chunk_count;
};

/* `chunk` is the usual size of a chunk; larger requests get one of their own. NULL: out of memory. */
struct arena *arena_create(struct device *device, size_t chunk);
/* Gives all chunks back; everything has been freed. NULL is fine. */
void arena_destroy(struct arena *arena);

/* *address is aligned to ARENA_ALIGN; bytes > 0. On failure nothing has changed. */
enum engine_code arena_alloc(struct arena *arena, size_t bytes, uint64_t *address, struct engine_error *error);
/* `address` came from arena_alloc; 0 is fine. Never calls the device. */
void arena_free(struct arena *arena, uint64_t address);
/* Gives empty chunks back but for one of the usual size: for when nothing runs. */
void arena_trim(struct arena *arena);
void arena_get_stats(struct arena *arena, struct arena_stats *out);

#endif
