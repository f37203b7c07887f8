/* SPDX-License-Identifier: Apache-2.0
 *
 * First fit over blocks in order of address, with the neighbours of a freed block joined to it. An adapter takes one
 * allocation, so that lists stay short. The device is never called with the lock held: its calls may wait for running batches.
 */
#include "engine/arena.h"

#include <pthread.h>
#include <stdlib.h>

#define GRANULE ((size_t)2 << 20) /* chunks are multiples of this, which is what devices hand out anyway */

struct block {
    struct block *next; /* by address; together the blocks cover the chunk */
    uint64_t address;
    size_t bytes;
    bool used;
};

struct chunk {
    struct chunk *next;
    uint64_t address;
    size_t bytes, used;
    struct block *blocks;
};

struct arena {
    struct device *device;
    size_t chunk_bytes;
    pthread_mutex_t lock;
    struct chunk *chunks;
    struct arena_stats stats;
};

struct arena *arena_create(struct device *device, size_t chunk)
{
    struct arena *arena = calloc(1, sizeof *arena);
    if (!arena)
        return NULL;
    arena->device = device;
    arena->chunk_bytes = chunk;
    if (pthread_mutex_init(&arena->lock, NULL)) {
        free(arena);
        return NULL;
    }
    return arena;
}

static void chunk_destroy(struct arena *arena, struct chunk *chunk)
{
    if (chunk->address)
        arena->device->ops->free(arena->device, chunk->address, chunk->bytes);
    while (chunk->blocks) {
        struct block *next = chunk->blocks->next;
        free(chunk->blocks);
        chunk->blocks = next;
    }
    free(chunk);
}

void arena_destroy(struct arena *arena)
{
    if (!arena)
        return;
    while (arena->chunks) {
        struct chunk *next = arena->chunks->next;
        chunk_destroy(arena, arena->chunks);
        arena->chunks = next;
    }
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

/* Takes `bytes` from the first block that is large enough. `spare` becomes the rest of that block if it has one. Lock held. */
static bool take(struct arena *arena, size_t bytes, struct block **spare, uint64_t *address)
{
    for (struct chunk *c = arena->chunks; c; c = c->next) {
        if (c->bytes - c->used < bytes || (c->bytes > arena->chunk_bytes && bytes < c->bytes / 2))
            continue; /* a large chunk is for large requests: a small one would keep all of it */
        for (struct block *b = c->blocks; b; b = b->next) {
            if (b->used || b->bytes < bytes)
                continue;
            if (b->bytes > bytes) {
                struct block *rest = *spare;
                *rest = (struct block){b->next, b->address + bytes, b->bytes - bytes, false};
                *spare = NULL;
                b->next = rest;
                b->bytes = bytes;
            }
            b->used = true;
            c->used += bytes;
            arena->stats.used += bytes;
            *address = b->address;
            return true;
        }
    }
    return false;
}

static enum engine_code chunk_create(struct arena *arena, size_t bytes, struct chunk **out, struct engine_error *error)
{
    struct chunk *chunk = calloc(1, sizeof *chunk);
    struct block *block = calloc(1, sizeof *block);
    if (!chunk || !block) {
        free(chunk);
        free(block);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory while bookkeeping %zu bytes of adapter memory", bytes);
    }
    chunk->blocks = block;
    /* When the usual size does not fit any more, the least that would do may. */
    size_t least = (bytes + GRANULE - 1) / GRANULE * GRANULE, usual = least > arena->chunk_bytes ? least : arena->chunk_bytes;
    chunk->bytes = usual;
    enum engine_code code = arena->device->ops->alloc(arena->device, usual, &chunk->address, error);
    if (code == ENGINE_OUT_OF_DEVICE_MEMORY && least < usual) {
        chunk->bytes = least;
        code = arena->device->ops->alloc(arena->device, least, &chunk->address, error);
    }
    if (code != ENGINE_OK) {
        chunk->address = 0;
        chunk_destroy(arena, chunk);
        return code;
    }
    *block = (struct block){NULL, chunk->address, chunk->bytes, false};
    *out = chunk;
    return ENGINE_OK;
}

/* Unlinks empty chunks for the caller to give back; all, or all but one of the usual size. Lock held. */
static struct chunk *unlink_empty(struct arena *arena, bool all)
{
    struct chunk *list = NULL;
    bool kept = all;
    for (struct chunk **at = &arena->chunks; *at;) {
        struct chunk *chunk = *at;
        if (chunk->used || (!kept && chunk->bytes <= arena->chunk_bytes)) {
            kept |= !chunk->used;
            at = &chunk->next;
            continue;
        }
        *at = chunk->next;
        arena->stats.chunks -= chunk->bytes;
        arena->stats.chunk_count--;
        chunk->next = list;
        list = chunk;
    }
    return list;
}

/* True if there were any. */
static bool give_back_empty(struct arena *arena, bool all)
{
    pthread_mutex_lock(&arena->lock);
    struct chunk *list = unlink_empty(arena, all);
    pthread_mutex_unlock(&arena->lock);
    bool any = list != NULL;
    while (list) {
        struct chunk *next = list->next;
        chunk_destroy(arena, list);
        list = next;
    }
    return any;
}

void arena_trim(struct arena *arena) { give_back_empty(arena, false); }

enum engine_code arena_alloc(struct arena *arena, size_t bytes, uint64_t *address, struct engine_error *error)
{
    if (bytes > SIZE_MAX / 2)
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "%zu bytes of device memory were asked for", bytes);
    bytes = (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    struct block *spare = malloc(sizeof *spare);
    if (!spare)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory while bookkeeping %zu bytes of adapter memory", bytes);
    pthread_mutex_lock(&arena->lock);
    bool done = take(arena, bytes, &spare, address);
    pthread_mutex_unlock(&arena->lock);
    enum engine_code code = ENGINE_OK;
    while (!done) {
        struct chunk *chunk = NULL;
        code = chunk_create(arena, bytes, &chunk, error);
        if (code == ENGINE_OUT_OF_DEVICE_MEMORY && give_back_empty(arena, true))
            continue;
        if (code != ENGINE_OK)
            break;
        pthread_mutex_lock(&arena->lock);
        chunk->next = arena->chunks;
        arena->chunks = chunk;
        arena->stats.chunks += chunk->bytes;
        arena->stats.chunk_count++;
        done = take(arena, bytes, &spare, address);
        pthread_mutex_unlock(&arena->lock);
    }
    free(spare);
    return code;
}

static void join_next(struct block *block)
{
    struct block *next = block->next;
    if (next && !next->used && !block->used) {
        block->bytes += next->bytes;
        block->next = next->next;
        free(next);
    }
}

void arena_free(struct arena *arena, uint64_t address)
{
    if (!address)
        return;
    pthread_mutex_lock(&arena->lock);
    struct chunk *c = arena->chunks;
    while (c && (address < c->address || address - c->address >= c->bytes))
        c = c->next;
    struct block *before = NULL, *b = c ? c->blocks : NULL;
    while (b && b->address != address) {
        before = b;
        b = b->next;
    }
    if (b && b->used) {
        b->used = false;
        c->used -= b->bytes;
        arena->stats.used -= b->bytes;
        join_next(b);
        if (before)
            join_next(before);
    }
    pthread_mutex_unlock(&arena->lock);
}

void arena_get_stats(struct arena *arena, struct arena_stats *out)
{
    pthread_mutex_lock(&arena->lock);
    *out = arena->stats;
    pthread_mutex_unlock(&arena->lock);
}
