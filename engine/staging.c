/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks come in sizes of four steps per doubling, so that requests of about the same size share them at little waste. A block
 * that comes back waits in its size's list, newest first; when more is kept than allowed, the oldest of the largest sizes go.
 */
#include "engine/staging.h"

#include <pthread.h>
#include <stdlib.h>

enum {
    HEAD_BYTES = 256, /* before each block; keeps the memory behind it aligned for the device's copies */
    LEAST_SHIFT = 12, /* the smallest block */
    STEPS = 4,
    CLASSES = (47 - LEAST_SHIFT) * STEPS,
};

struct block {
    size_t asked; /* by its present holder */
    int class;
    unsigned age; /* trims it has survived, while kept */
    struct block *next;
};

struct staging {
    struct device *device;
    int64_t limit, keep;
    pthread_mutex_t lock;
    int64_t used; /* sum of `asked` of blocks handed out */
    int64_t kept; /* sum of sizes of blocks in `unused` */
    struct block *unused[CLASSES];
};

/* Bytes of a block, head included: 2^(LEAST_SHIFT + class / STEPS), plus class % STEPS quarters of that. */
static size_t class_bytes(int class)
{
    size_t octave = (size_t)1 << (LEAST_SHIFT + class / STEPS);
    return octave + octave / STEPS * (size_t)(class % STEPS);
}

/* The smallest class that holds so many bytes behind the head; CLASSES: none. */
static int class_of(size_t bytes)
{
    int class = 0;
    if (bytes > class_bytes(CLASSES - 1) - HEAD_BYTES)
        return CLASSES;
    size_t whole = bytes + HEAD_BYTES;
    if (whole > class_bytes(0))
        class = (63 - __builtin_clzll((unsigned long long)whole) - LEAST_SHIFT) * STEPS;
    while (class_bytes(class) < whole)
        class ++;
    return class;
}

struct staging *staging_create(struct device *device, int64_t limit, int64_t keep)
{
    struct staging *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->device = device;
    s->limit = limit;
    s->keep = keep < limit ? keep : limit;
    pthread_mutex_init(&s->lock, NULL);
    return s;
}

static void free_blocks(struct staging *s, struct block *list)
{
    while (list) {
        struct block *b = list;
        list = b->next;
        s->device->ops->host_free(s->device, b, class_bytes(b->class));
    }
}

/* Takes kept blocks out, largest first and of a size the oldest first, until at most `keep` bytes are left. Under the lock. */
static struct block *evict(struct staging *s, int64_t keep)
{
    struct block *out = NULL;
    for (int class = CLASSES - 1; class >= 0 && s->kept > keep; class --) {
        while (s->unused[class] && s->kept > keep) {
            struct block **last = &s->unused[class];
            while ((*last)->next)
                last = &(*last)->next;
            struct block *b = *last;
            *last = NULL;
            s->kept -= (int64_t)class_bytes(class);
            b->next = out;
            out = b;
        }
    }
    return out;
}

enum engine_code staging_check(struct staging *s, size_t bytes)
{
    if (bytes > (uint64_t)s->limit || class_of(bytes) == CLASSES)
        return ENGINE_TOO_LARGE;
    return (int64_t)bytes > s->limit - staging_bytes(s) ? ENGINE_QUEUE_FULL : ENGINE_OK;
}

enum engine_code staging_acquire(struct staging *s, size_t bytes, void **out)
{
    int class = class_of(bytes);
    if (bytes > (uint64_t)s->limit || class == CLASSES)
        return ENGINE_TOO_LARGE;
    pthread_mutex_lock(&s->lock);
    if ((int64_t)bytes > s->limit - s->used) {
        pthread_mutex_unlock(&s->lock);
        return ENGINE_QUEUE_FULL;
    }
    s->used += (int64_t)bytes;
    struct block *block = s->unused[class], *spare = NULL;
    if (block) {
        s->unused[class] = block->next;
        s->kept -= (int64_t)class_bytes(class);
    } else {
        /* What is kept must not come on top of the bound. */
        int64_t room = s->limit - s->used;
        spare = evict(s, room < s->keep ? room : s->keep);
    }
    pthread_mutex_unlock(&s->lock);
    free_blocks(s, spare);
    if (!block)
        block = s->device->ops->host_alloc(s->device, class_bytes(class));
    if (!block) {
        pthread_mutex_lock(&s->lock);
        s->used -= (int64_t)bytes;
        pthread_mutex_unlock(&s->lock);
        return ENGINE_OUT_OF_MEMORY;
    }
    *block = (struct block){.asked = bytes, .class = class};
    *out = (char *)block + HEAD_BYTES;
    return ENGINE_OK;
}

void staging_release(struct staging *s, void *memory)
{
    if (!memory)
        return;
    struct block *block = (struct block *)((char *)memory - HEAD_BYTES);
    pthread_mutex_lock(&s->lock);
    s->used -= (int64_t)block->asked;
    block->age = 0;
    block->next = s->unused[block->class];
    s->unused[block->class] = block;
    s->kept += (int64_t)class_bytes(block->class);
    struct block *spare = evict(s, s->keep);
    pthread_mutex_unlock(&s->lock);
    free_blocks(s, spare);
}

void staging_trim(struct staging *s)
{
    struct block *spare = NULL;
    pthread_mutex_lock(&s->lock);
    for (int class = 0; class < CLASSES; class ++) {
        for (struct block **at = &s->unused[class]; *at;) {
            struct block *b = *at;
            if (b->age++ == 0) {
                at = &b->next;
                continue;
            }
            *at = b->next;
            s->kept -= (int64_t)class_bytes(class);
            b->next = spare;
            spare = b;
        }
    }
    pthread_mutex_unlock(&s->lock);
    free_blocks(s, spare);
}

int64_t staging_bytes(struct staging *s)
{
    pthread_mutex_lock(&s->lock);
    int64_t used = s->used;
    pthread_mutex_unlock(&s->lock);
    return used;
}

void staging_destroy(struct staging *s)
{
    if (!s)
        return;
    free_blocks(s, evict(s, 0));
    pthread_mutex_destroy(&s->lock);
    free(s);
}
