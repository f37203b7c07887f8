/* SPDX-License-Identifier: Apache-2.0
 *
 * Thousands of rows that name few adapters: each name or id is looked up in the engine once, and its reference serves all of its rows, so
 * that a replace during the walk can't split the request between two versions.
 */
#include "server/forward.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct forward_adapter_key {
    uint64_t hash;
    const char *name; /* into the request's tensors; NULL: id */
    size_t length;
    int64_t id;
};

static uint64_t forward_hash(const char *name, size_t length, int64_t id)
{
    uint64_t h = 0xcbf29ce484222325u;
    if (!name)
        h ^= (uint64_t)id;
    for (size_t i = 0; name && i < length; i++)
        h = (h ^ (unsigned char)name[i]) * 0x100000001b3u;
    h = (h ^ h >> 32) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

static bool forward_adapters_grow(struct forward_adapters *a)
{
    int32_t capacity = a->capacity ? 2 * a->capacity : 8;
    uint32_t size = 4 * (uint32_t)capacity;
    struct engine_adapter **item = realloc(a->item, (size_t)capacity * sizeof *item);
    if (item)
        a->item = item;
    struct forward_adapter_key *key = realloc(a->key, (size_t)capacity * sizeof *key);
    if (key)
        a->key = key;
    int32_t *table = malloc(size * sizeof *table);
    if (!item || !key || !table) {
        free(table);
        return false;
    }
    free(a->table);
    a->table = table;
    a->table_size = size;
    a->capacity = capacity;
    memset(table, 0xff, size * sizeof *table);
    for (int32_t i = 0; i < a->count; i++) {
        uint32_t at = (uint32_t)key[i].hash & (size - 1);
        while (table[at] >= 0)
            at = (at + 1) & (size - 1);
        table[at] = i;
    }
    return true;
}

int32_t forward_adapter_index(struct http_request *r, struct forward *f, const char *name, size_t length, int64_t id, int64_t row)
{
    struct forward_adapters *a = &f->adapters;
    if (a->count == a->capacity && !forward_adapters_grow(a)) {
        http_fail_memory(r);
        return -1;
    }
    uint64_t hash = forward_hash(name, length, id);
    uint32_t at = (uint32_t)hash & (a->table_size - 1);
    for (; a->table[at] >= 0; at = (at + 1) & (a->table_size - 1)) {
        const struct forward_adapter_key *key = &a->key[a->table[at]];
        if (key->hash == hash && (name ? key->length == length && memcmp(key->name, name, length) == 0 : key->id == id))
            return a->table[at];
    }
    struct engine_adapter *adapter = name ? engine_adapter_acquire_name(f->engine, name, length) : engine_adapter_acquire_id(f->engine, id);
    if (!adapter) {
        char where[48] = "";
        if (row >= 0)
            snprintf(where, sizeof where, " (row %" PRId64 ")", row);
        if (name)
            http_fail(r, 404, "adapter_not_found", "no adapter is named \"%.*s\"%s", (int)(length > 128 ? 128 : length), name, where);
        else
            http_fail(r, 404, "adapter_not_found", "no adapter has the id %" PRId64 "%s", id, where);
        return -1;
    }
    a->key[a->count] = (struct forward_adapter_key){hash, name, length, id};
    a->item[a->count] = adapter;
    a->table[at] = a->count;
    return a->count++;
}

void forward_release_adapters(struct forward *f)
{
    for (int32_t i = 0; i < f->adapters.count; i++)
        engine_adapter_release(f->engine, f->adapters.item[i]);
    free(f->adapters.item);
    free(f->adapters.key);
    free(f->adapters.table);
    f->adapters = (struct forward_adapters){0};
}
