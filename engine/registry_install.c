/* SPDX-License-Identifier: Apache-2.0
 *
 * Installing an adapter: take a slot, open, pack into device memory, publish between two batches. Whatever fails on the way,
 * everything before it is undone.
 */
#include "engine/clock.h"
#include "engine/path.h"
#include "engine/registry.h"

#include <stdlib.h>
#include <string.h>

/* ---- publishing ------------------------------------------------------------------------------------------------ */

/* [engine thread] */
static void publish(void *arg)
{
    struct registry_install *in = arg;
    struct engine_adapter *a = in->adapter, *old = NULL;
    struct registry *r = a->registry;
    size_t n = registry_entries(r);
    int32_t written = 0;
    if (r->next_id == INT32_MAX)
        in->code = engine_fail(&in->error, ENGINE_INTERNAL, "all adapter ids are used up; restart the server");
    for (; in->code == ENGINE_OK && written < a->part_count; written++)
        in->code = r->device->ops->table_write(r->device, a->part[written].layer_index, (size_t)a->slot * n, n, a->part[written].entries,
                                               &in->error);
    if (in->code != ENGINE_OK)
        in->slot_lost = !registry_clear_slot(r, a, written);

    pthread_mutex_lock(&r->lock);
    bool retire = false;
    if (in->code == ENGINE_OK) {
        old = registry_find(r, a->name, strlen(a->name));
        in->replaced = old != NULL;
        r->replaced += in->replaced;
        if (old)
            retire = registry_leave(r, old);
        registry_enter(r, a);
    }
    in->published = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    /* `in` and `a` may be gone by now. */
    if (retire)
        registry_retire(old);
}

/* ---- installs take turns --------------------------------------------------------------------------------------- */

/* Lock held. */
static bool must_wait(const struct registry *r, const struct registry_install *in)
{
    for (const struct registry_install *other = r->installs; other != in; other = other->next)
        if (!strcmp(other->name, in->name))
            return true;
    return false;
}

/* Lock held; waits for its turn, and then has a slot. */
static enum engine_code take_slot(struct registry *r, struct registry_install *in, bool replace, int32_t *slot, struct engine_error *error)
{
    for (;;) {
        if (r->draining)
            return engine_fail(error, ENGINE_DRAINING, "the server is going down and takes no new adapters");
        if (!replace && registry_find(r, in->name, strlen(in->name)))
            return engine_fail(error, ENGINE_ADAPTER_EXISTS, "an adapter called \"%s\" is installed already", in->name);
        bool turn = !must_wait(r, in);
        if (turn && r->free_slots) {
            *slot = r->free_slot[--r->free_slots];
            return ENGINE_OK;
        }
        if (turn && !r->retiring) {
            char removed[80] = "";
            if (r->drained)
                snprintf(removed, sizeof removed, ", and %lld of these are removed ones that requests still use", (long long)r->drained);
            return engine_fail(error, ENGINE_ADAPTER_SLOTS_FULL, "no slot is free for adapter \"%s\": --max-adapters allows %d%s", in->name,
                               r->max_adapters, removed);
        }
        pthread_cond_wait(&r->changed, &r->lock);
    }
}

static enum engine_code open_adapter(struct registry *r, const char *path, int dir_fd, struct adapter_data **data,
                                     struct engine_error *error)
{
    if (!path)
        return adapter_open(dir_fd, r->model, r->max_adapter_bytes, data, error);
    const char *below = path[0] == '/' ? path_strip_root(r->root_given, path) : NULL;
    return adapter_open_beneath(r->root_fd, r->root, below ? below : path, r->model, r->max_adapter_bytes, data, error);
}

static enum engine_code build(struct registry *r, struct registry_install *in, const char *path, int dir_fd,
                              struct engine_adapter_info *info, struct engine_error *error)
{
    struct adapter_data *data = NULL;
    enum engine_code code = open_adapter(r, path, dir_fd, &data, error);
    in->opened_ns = clock_now_ns();
    if (code == ENGINE_OK)
        code = registry_pack(r, data, in->adapter, error);
    if (code == ENGINE_OK)
        code = adapter_check_unchanged(data, error);
    in->packed_ns = clock_now_ns();
    adapter_data_destroy(data);
    if (code == ENGINE_OK && !registry_describe(in->adapter, info))
        code = engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for adapter \"%s\"", in->name);
    return code;
}

/* Lock held. The last step, either way. */
static void leave_queue(struct registry *r, struct registry_install *in)
{
    struct registry_install **at = &r->installs;
    while (*at != in)
        at = &(*at)->next;
    *at = in->next;
    pthread_cond_broadcast(&r->changed);
}

static void join_queue(struct registry *r, struct registry_install *in)
{
    struct registry_install **at = &r->installs;
    while (*at)
        at = &(*at)->next;
    *at = in;
}

static enum engine_code check_call(const struct registry *r, const char *name, const char *path, struct engine_error *error)
{
    if (!engine_adapter_name_valid(name, strlen(name)))
        return engine_fail(error, ENGINE_BAD_REQUEST,
                           "an adapter's name has 1 to %d characters of A-Z a-z 0-9 . _ - and '/' inside, and does not "
                           "start with '.' or '/'",
                           ENGINE_ADAPTER_NAME_MAX);
    if (path && r->root_fd < 0)
        return engine_fail(error, ENGINE_FORBIDDEN_PATH,
                           "adapters can't be installed by path: the server was started without --adapter-root");
    return ENGINE_OK;
}

static void log_times(const struct registry *r, const struct registry_install *in, const struct engine_adapter_info *info)
{
    if (!r->log)
        return;
    const double ms = 1e-6;
    char line[320];
    snprintf(line, sizeof line, "adapter \"%s\": %lld bytes installed in %.1f ms: opening and checking %.1f, values %.1f, publishing %.1f",
             info->name, (long long)info->bytes, (double)(clock_now_ns() - in->begun_ns) * ms, (double)(in->opened_ns - in->begun_ns) * ms,
             (double)(in->packed_ns - in->opened_ns) * ms, (double)(clock_now_ns() - in->packed_ns) * ms);
    r->log(r->log_arg, "debug", line);
}

enum engine_code registry_install(struct registry *r, const char *name, const char *path, int dir_fd, bool replace,
                                  struct engine_adapter_info *info, bool *replaced, struct engine_error *error)
{
    struct registry_install in = {.name = name, .begun_ns = clock_now_ns()};
    struct engine_adapter_info built;
    enum engine_code code = check_call(r, name, path, error);
    struct engine_adapter *a = code == ENGINE_OK ? calloc(1, sizeof *a) : NULL;
    if (code == ENGINE_OK && !a)
        code = engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for adapter \"%s\"", name);
    if (code != ENGINE_OK) {
        pthread_mutex_lock(&r->lock);
        r->failed++;
        pthread_mutex_unlock(&r->lock);
        return code;
    }
    a->registry = r;
    a->holds = 2; /* its life, and this call */
    memcpy(a->name, name, strlen(name));
    in.adapter = a;

    pthread_mutex_lock(&r->lock);
    join_queue(r, &in);
    code = take_slot(r, &in, replace, &a->slot, error);
    bool slot = code == ENGINE_OK;
    pthread_mutex_unlock(&r->lock);

    if (code == ENGINE_OK)
        code = build(r, &in, path, dir_fd, &built, error);
    bool described = code == ENGINE_OK;
    if (code == ENGINE_OK)
        r->publisher.post(r->publisher.context, publish, &in);

    pthread_mutex_lock(&r->lock);
    while (described && !in.published)
        pthread_cond_wait(&r->changed, &r->lock);
    if (described)
        code = in.code;
    if (code == ENGINE_OK) {
        registry_describe_now(a, &built);
    } else {
        r->failed++;
        if (slot && !in.slot_lost)
            r->free_slot[r->free_slots++] = a->slot;
    }
    leave_queue(r, &in);
    pthread_mutex_unlock(&r->lock);

    if (code == ENGINE_OK) {
        log_times(r, &in, &built);
        for (int32_t i = 0; i < a->part_count; i++) {
            free(a->part[i].entries);
            a->part[i].entries = NULL;
        }
        registry_drop_hold(r, a);
        *info = built;
        *replaced = in.replaced;
        return ENGINE_OK;
    }
    if (described) {
        engine_adapter_info_finish(&built);
        if (error)
            *error = in.error;
    }
    registry_adapter_destroy(a);
    return code;
}
