/* SPDX-License-Identifier: Apache-2.0
 *
 * Names, ids, references and removal of adapters; registry.h tells their life.
 */
#include "engine/registry.h"
#include "engine/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* ---- names and ids --------------------------------------------------------------------------------------------- */

bool engine_adapter_name_valid(const char *name, size_t len)
{
    if (!len || len > ENGINE_ADAPTER_NAME_MAX || name[0] == '.' || name[0] == '/' || name[len - 1] == '/')
        return false;
    for (size_t i = 0; i < len; i++) {
        char c = name[i];
        if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-' || c == '/'))
            return false;
    }
    return true;
}

static struct engine_adapter **name_bucket(struct registry *r, const char *name, size_t len)
{
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)name[i]) * 16777619u;
    return &r->by_name[h & (r->buckets - 1)];
}

static struct engine_adapter **id_bucket(struct registry *r, int32_t id) { return &r->by_id[(uint32_t)id & (r->buckets - 1)]; }

struct engine_adapter *registry_find(struct registry *r, const char *name, size_t len)
{
    struct engine_adapter *a = *name_bucket(r, name, len);
    while (a && (strlen(a->name) != len || memcmp(a->name, name, len)))
        a = a->next_name;
    return a;
}

size_t registry_entries(const struct registry *r) { return (size_t)r->model->dims.experts * KERNEL_PROJECTIONS; }

void registry_enter(struct registry *r, struct engine_adapter *adapter)
{
    adapter->id = r->next_id++;
    adapter->installed_at = (int64_t)time(NULL);
    adapter->life = LIFE_READY;
    struct engine_adapter **name = name_bucket(r, adapter->name, strlen(adapter->name)), **id = id_bucket(r, adapter->id);
    adapter->next_name = *name;
    *name = adapter;
    adapter->next_id = *id;
    *id = adapter;
    adapter->prev = r->last;
    *(r->last ? &r->last->next : &r->first) = adapter;
    r->last = adapter;
    r->ready++;
    r->installed++;
}

bool registry_leave(struct registry *r, struct engine_adapter *adapter)
{
    struct engine_adapter **at = name_bucket(r, adapter->name, strlen(adapter->name));
    while (*at != adapter)
        at = &(*at)->next_name;
    *at = adapter->next_name;
    at = id_bucket(r, adapter->id);
    while (*at != adapter)
        at = &(*at)->next_id;
    *at = adapter->next_id;
    r->ready--;
    r->drained++;
    adapter->life = adapter->refs ? LIFE_DRAINING : LIFE_RETIRING;
    r->retiring += !adapter->refs;
    return !adapter->refs;
}

/* ---- the end of an adapter ------------------------------------------------------------------------------------- */

void registry_adapter_destroy(struct engine_adapter *adapter)
{
    arena_free(adapter->registry->arena, adapter->address);
    for (int32_t i = 0; i < adapter->part_count; i++)
        free(adapter->part[i].entries);
    for (int32_t i = 0; i < adapter->warning_count; i++)
        free(adapter->warnings[i]);
    free(adapter->warnings);
    free(adapter->layers);
    free(adapter->part);
    free(adapter);
}

bool registry_clear_slot(struct registry *r, const struct engine_adapter *adapter, int32_t parts)
{
    bool clear = true;
    size_t n = registry_entries(r);
    for (int32_t i = 0; i < parts; i++)
        clear &=
            r->device->ops->table_write(r->device, adapter->part[i].layer_index, (size_t)adapter->slot * n, n, r->zeros, NULL) == ENGINE_OK;
    return clear;
}

void registry_retire(void *arg)
{
    struct engine_adapter *adapter = arg;
    struct registry *r = adapter->registry;
    bool clear = registry_clear_slot(r, adapter, adapter->part_count);
    arena_free(r->arena, adapter->address);
    adapter->address = 0;
    pthread_mutex_lock(&r->lock);
    *(adapter->prev ? &adapter->prev->next : &r->first) = adapter->next;
    *(adapter->next ? &adapter->next->prev : &r->last) = adapter->prev;
    adapter->life = LIFE_REMOVED;
    r->drained--;
    r->retiring--;
    r->retired++;
    if (clear)
        r->free_slot[r->free_slots++] = adapter->slot;
    bool last = !--adapter->holds;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    if (last)
        registry_adapter_destroy(adapter);
}

static void post_retire(struct registry *r, struct engine_adapter *adapter)
{
    r->publisher.post(r->publisher.context, registry_retire, adapter);
}

void registry_drop_hold(struct registry *r, struct engine_adapter *adapter)
{
    pthread_mutex_lock(&r->lock);
    bool last = !--adapter->holds;
    pthread_mutex_unlock(&r->lock);
    if (last)
        registry_adapter_destroy(adapter);
}

/* ---- references ------------------------------------------------------------------------------------------------ */

struct engine_adapter *registry_acquire_name(struct registry *r, const char *name, size_t len)
{
    pthread_mutex_lock(&r->lock);
    struct engine_adapter *a = registry_find(r, name, len);
    if (a)
        a->refs++;
    pthread_mutex_unlock(&r->lock);
    return a;
}

struct engine_adapter *registry_acquire_id(struct registry *r, int64_t id)
{
    if (id < 0 || id > INT32_MAX)
        return NULL;
    pthread_mutex_lock(&r->lock);
    struct engine_adapter *a = *id_bucket(r, (int32_t)id);
    while (a && a->id != id)
        a = a->next_id;
    if (a)
        a->refs++;
    pthread_mutex_unlock(&r->lock);
    return a;
}

void registry_release(struct registry *r, struct engine_adapter *adapter)
{
    if (!adapter)
        return;
    pthread_mutex_lock(&r->lock);
    bool retire = !--adapter->refs && adapter->life == LIFE_DRAINING;
    if (retire) {
        adapter->life = LIFE_RETIRING;
        r->retiring++;
    }
    pthread_mutex_unlock(&r->lock);
    if (retire)
        post_retire(r, adapter);
}

const char *engine_adapter_name(const struct engine_adapter *adapter) { return adapter->name; }

int32_t engine_adapter_slot(const struct engine_adapter *adapter) { return adapter->slot; }

void engine_adapter_count_rows(struct engine_adapter *adapter, int64_t rows)
{
    atomic_fetch_add_explicit(&adapter->rows_served, rows, memory_order_relaxed);
}

/* ---- looking --------------------------------------------------------------------------------------------------- */

void engine_adapter_info_finish(struct engine_adapter_info *info)
{
    for (int32_t i = 0; info->warnings && i < info->warning_count; i++)
        free(info->warnings[i]);
    free(info->warnings);
    free(info->layers);
    memset(info, 0, sizeof *info);
}

bool registry_describe(const struct engine_adapter *a, struct engine_adapter_info *info)
{
    *info = (struct engine_adapter_info){
        .rank = a->rank,
        .experts = a->experts,
        .gate = a->projection[KERNEL_GATE],
        .up = a->projection[KERNEL_UP],
        .down = a->projection[KERNEL_DOWN],
        .tensors = a->tensors,
        .ignored = a->ignored,
        .bytes = a->bytes,
    };
    memcpy(info->name, a->name, sizeof info->name);
    info->layers = calloc((size_t)a->part_count + 1, sizeof *info->layers);
    info->warnings = calloc((size_t)a->warning_count + 1, sizeof *info->warnings);
    bool fine = info->layers && info->warnings;
    if (info->layers && a->part_count)
        memcpy(info->layers, a->layers, (size_t)a->part_count * sizeof *a->layers);
    info->layer_count = a->part_count;
    for (; fine && info->warning_count < a->warning_count; info->warning_count += fine)
        fine = (info->warnings[info->warning_count] = strdup(a->warnings[info->warning_count])) != NULL;
    if (!fine)
        engine_adapter_info_finish(info);
    return fine;
}

void registry_describe_now(const struct engine_adapter *a, struct engine_adapter_info *info)
{
    info->id = a->id;
    info->installed_at = a->installed_at;
    info->state = a->life == LIFE_READY ? ENGINE_ADAPTER_READY : a->life == LIFE_REMOVED ? ENGINE_ADAPTER_REMOVED : ENGINE_ADAPTER_DRAINING;
    info->in_flight = a->refs;
    info->rows_served = atomic_load_explicit(&a->rows_served, memory_order_relaxed);
}

static enum engine_code not_found(const char *name, struct engine_error *error)
{
    return engine_fail(error, ENGINE_ADAPTER_NOT_FOUND, "no adapter is called \"%.*s\"", ENGINE_ADAPTER_NAME_MAX, name);
}

static enum engine_code no_memory(struct engine_error *error)
{
    return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory while describing adapters");
}

static struct engine_adapter *find_and_hold(struct registry *r, const char *name)
{
    pthread_mutex_lock(&r->lock);
    struct engine_adapter *a = registry_find(r, name, strlen(name));
    if (a)
        a->holds++;
    pthread_mutex_unlock(&r->lock);
    return a;
}

enum engine_code registry_show(struct registry *r, const char *name, struct engine_adapter_info *info, struct engine_error *error)
{
    struct engine_adapter *a = find_and_hold(r, name);
    if (!a)
        return not_found(name, error);
    struct engine_adapter_info found;
    enum engine_code code = registry_describe(a, &found) ? ENGINE_OK : no_memory(error);
    if (code == ENGINE_OK) {
        pthread_mutex_lock(&r->lock);
        registry_describe_now(a, &found);
        pthread_mutex_unlock(&r->lock);
        *info = found;
    }
    registry_drop_hold(r, a);
    return code;
}

enum engine_code registry_list(struct registry *r, struct engine_adapter_info **infos, size_t *count, struct engine_error *error)
{
    size_t n = 0, described = 0, i = 0;
    pthread_mutex_lock(&r->lock);
    size_t most = (size_t)(r->ready + r->drained);
    struct engine_adapter **held = calloc(most + 1, sizeof(struct engine_adapter *));
    struct engine_adapter_info *info = calloc(most + 1, sizeof *info), *now = calloc(most + 1, sizeof *now);
    bool fine = held && info && now;
    for (struct engine_adapter *a = r->first; fine && a; a = a->next) {
        a->holds++;
        registry_describe_now(a, &now[n]); /* all at one instant */
        held[n++] = a;
    }
    pthread_mutex_unlock(&r->lock);
    for (; fine && described < n; described += fine) {
        fine = registry_describe(held[described], &info[described]);
        if (fine) {
            struct engine_adapter_info *to = &info[described], *from = &now[described];
            to->id = from->id;
            to->installed_at = from->installed_at;
            to->state = from->state;
            to->in_flight = from->in_flight;
            to->rows_served = from->rows_served;
        }
    }
    for (i = 0; i < n; i++)
        registry_drop_hold(r, held[i]);
    free(held);
    free(now);
    if (!fine) {
        while (described)
            engine_adapter_info_finish(&info[--described]);
        free(info);
        return no_memory(error);
    }
    *infos = info;
    *count = n;
    return ENGINE_OK;
}

void registry_trim(struct registry *r) { arena_trim(r->arena); }

void registry_stats(struct registry *r, struct engine_stats *out)
{
    struct arena_stats arena;
    arena_get_stats(r->arena, &arena);
    pthread_mutex_lock(&r->lock);
    out->adapters_ready = r->ready;
    out->adapters_draining = r->drained;
    out->adapters_installed = r->installed;
    out->adapters_replaced = r->replaced;
    out->adapters_removed = r->removed;
    out->adapter_installs_failed = r->failed;
    pthread_mutex_unlock(&r->lock);
    out->adapter_bytes = (int64_t)arena.used;
    out->adapter_arena_bytes = (int64_t)arena.chunks;
}

/* ---- removal --------------------------------------------------------------------------------------------------- */

enum engine_code registry_remove(struct registry *r, const char *name, int64_t wait_ms, struct engine_adapter_info *info,
                                 struct engine_error *error)
{
    struct engine_adapter *a = find_and_hold(r, name);
    if (!a)
        return not_found(name, error);
    /* Described first: once the name is gone there is no way back. */
    struct engine_adapter_info found;
    enum engine_code code = registry_describe(a, &found) ? ENGINE_OK : no_memory(error);
    if (code != ENGINE_OK) {
        registry_drop_hold(r, a);
        return code;
    }
    int64_t deadline = clock_now_ns() + (wait_ms > 0 ? wait_ms : 0) * (CLOCK_NS_PER_S / 1000);
    pthread_mutex_lock(&r->lock);
    bool mine = a->life == LIFE_READY, retire = false;
    if (mine) {
        retire = registry_leave(r, a);
        r->removed++;
    }
    pthread_mutex_unlock(&r->lock);
    if (!mine) { /* another call was faster */
        engine_adapter_info_finish(&found);
        registry_drop_hold(r, a);
        return not_found(name, error);
    }
    if (retire)
        post_retire(r, a);
    struct timespec until = clock_timespec(deadline);
    pthread_mutex_lock(&r->lock);
    while (wait_ms > 0 && a->life != LIFE_REMOVED && pthread_cond_timedwait(&r->changed, &r->lock, &until) != ETIMEDOUT)
        ;
    registry_describe_now(a, &found);
    pthread_mutex_unlock(&r->lock);
    registry_drop_hold(r, a);
    *info = found;
    return ENGINE_OK;
}

/* ---- start and stop -------------------------------------------------------------------------------------------- */

/* A start that an id cached from another run hardly hits, with room for a thousand million installs. */
static int32_t random_id(void)
{
    uint32_t v;
    if (getrandom(&v, sizeof v, 0) != (ssize_t)sizeof v)
        v = (uint32_t)clock_now_ns() * 2654435761u;
    return (int32_t)(v & 0x3fffffff) + 1;
}

static enum engine_code open_root_folder(const char *path, int *fd, struct engine_error *error)
{
    *fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0)
        return engine_fail(error, engine_errno_code(errno), "--adapter-root: \"%.200s\" can't be opened: %s", path, strerror(errno));
    return ENGINE_OK;
}

enum engine_code registry_check_root(const char *path, struct engine_error *error)
{
    int fd;
    enum engine_code code = open_root_folder(path, &fd, error);
    if (code == ENGINE_OK)
        close(fd);
    return code;
}

static enum engine_code open_root(struct registry *r, const char *path, struct engine_error *error)
{
    enum engine_code code = open_root_folder(path, &r->root_fd, error);
    if (code != ENGINE_OK)
        return code;
    r->root_given = strdup(path);
    r->root = realpath(path, NULL);
    if (!r->root_given || !r->root)
        return engine_fail(error, ENGINE_BAD_OPTION, "--adapter-root: \"%.200s\" can't be resolved: %s", path, strerror(errno));
    return ENGINE_OK;
}

static bool make_lock(struct registry *r)
{
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr))
        return false;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    bool mutex = !pthread_mutex_init(&r->lock, NULL), cond = mutex && !pthread_cond_init(&r->changed, &attr);
    if (mutex && !cond)
        pthread_mutex_destroy(&r->lock);
    pthread_condattr_destroy(&attr);
    return cond;
}

enum engine_code registry_create(const struct registry_options *o, struct registry **out, struct engine_error *error)
{
    struct registry *r = calloc(1, sizeof *r);
    if (!r || !make_lock(r)) {
        free(r);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the adapter registry");
    }
    r->device = o->device;
    r->model = o->model;
    r->publisher = o->publisher;
    r->log = o->log;
    r->log_arg = o->log_arg;
    r->max_adapter_bytes = o->max_adapter_bytes;
    r->max_adapters = o->max_adapters;
    r->root_fd = -1;
    r->next_id = random_id();
    for (r->buckets = 16; r->buckets < 2 * (uint32_t)o->max_adapters;)
        r->buckets *= 2;
    r->arena = arena_create(o->device, ARENA_CHUNK);
    r->zeros = calloc(registry_entries(r), sizeof *r->zeros);
    r->free_slot = calloc((size_t)o->max_adapters + 1, sizeof *r->free_slot);
    r->by_id = calloc(r->buckets, sizeof(struct engine_adapter *));
    r->by_name = calloc(r->buckets, sizeof(struct engine_adapter *));
    enum engine_code code = ENGINE_OK;
    if (!r->arena || !r->zeros || !r->free_slot || !r->by_id || !r->by_name)
        code = engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for %d adapter slots", o->max_adapters);
    else if (o->adapter_root)
        code = open_root(r, o->adapter_root, error);
    if (code != ENGINE_OK) {
        registry_destroy(r);
        return code;
    }
    while (r->free_slots < r->max_adapters) { /* the lowest is taken first */
        r->free_slot[r->free_slots] = r->max_adapters - 1 - r->free_slots;
        r->free_slots++;
    }
    *out = r;
    return ENGINE_OK;
}

void registry_destroy(struct registry *r)
{
    if (!r)
        return;
    while (r->first) {
        struct engine_adapter *next = r->first->next;
        registry_adapter_destroy(r->first);
        r->first = next;
    }
    arena_destroy(r->arena);
    if (r->stage)
        r->device->ops->host_free(r->device, r->stage, (size_t)REGISTRY_PACKERS * REGISTRY_STAGE_BYTES);
    if (r->root_fd >= 0)
        close(r->root_fd);
    free(r->root_given);
    free(r->root);
    free(r->zeros);
    free(r->free_slot);
    free(r->by_id);
    free(r->by_name);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

void registry_begin_drain(struct registry *r)
{
    pthread_mutex_lock(&r->lock);
    r->draining = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}
