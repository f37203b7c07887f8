/* SPDX-License-Identifier: Apache-2.0
 *
 * Installing an adapter: take a slot, read, pack into device memory, publish between two batches. Whatever fails on the way,
 * everything before it is undone.
 */
#include "engine/path.h"
#include "engine/registry.h"

#include <stdlib.h>
#include <string.h>

#define STAGE_BYTES ((size_t)8 << 20)

/* ---- packing --------------------------------------------------------------------------------------------------- */

struct packer {
    struct registry *r;
    const struct adapter_data *data;
    struct engine_adapter *adapter;
    struct engine_error *error;
    char *stage; /* where the device can't be written to directly */
    size_t stage_room, stage_used;
    char *stage_own; /* the same when it is this packer's, and not the one that the registry keeps */
    bool stage_is_kept; /* the registry's is taken */
    uint64_t stage_address; /* where its first byte goes */
};

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* gate and up that share A share it on the device, too. */
static bool shares_a(const struct adapter_delta *d, size_t i)
{
    return i && d[i].a == d[i - 1].a && d[i].layer_index == d[i - 1].layer_index && d[i].expert == d[i - 1].expert &&
           d[i].projection == KERNEL_UP && d[i - 1].projection == KERNEL_GATE;
}

static size_t a_bytes(const struct packer *p, size_t i)
{
    const struct adapter_delta *d = &p->data->delta[i];
    return shares_a(p->data->delta, i)
               ? 0
               : round_up(p->r->device->kernels->lora_a_bytes(&p->r->model->dims, d->projection, d->rank), ARENA_ALIGN);
}

static size_t b_bytes(const struct packer *p, size_t i)
{
    const struct adapter_delta *d = &p->data->delta[i];
    return round_up(p->r->device->kernels->lora_b_bytes(&p->r->model->dims, d->projection, d->rank), ARENA_ALIGN);
}

static size_t layer_end(const struct adapter_data *data, size_t begin)
{
    size_t end = begin;
    while (end < data->deltas && data->delta[end].layer_index == data->delta[begin].layer_index)
        end++;
    return end;
}

static enum engine_code flush(struct packer *p)
{
    size_t n = p->stage_used;
    p->stage_used = 0;
    if (!n)
        return ENGINE_OK;
    enum engine_code code = p->r->device->ops->upload(p->r->device, p->stage_address, n, p->stage, n, n, 1, p->error);
    p->stage_address += n;
    return code;
}

/* Host memory whose content will be at the device's `address`; addresses rise. */
static enum engine_code place(struct packer *p, uint64_t address, size_t bytes, void **out)
{
    if (p->r->device->direct_memory) {
        *out = (void *)(uintptr_t)address;
        return ENGINE_OK;
    }
    if (p->stage_used + bytes > p->stage_room || (p->stage_used && p->stage_address + p->stage_used != address)) {
        enum engine_code code = flush(p);
        if (code != ENGINE_OK)
            return code;
    }
    if (!p->stage_used)
        p->stage_address = address;
    *out = p->stage + p->stage_used;
    p->stage_used += bytes;
    return ENGINE_OK;
}

static enum engine_code pack_layer(struct packer *p, struct registry_part *part, size_t begin, size_t end)
{
    const struct kernel_table *k = p->r->device->kernels;
    const struct kernel_dims *dims = &p->r->model->dims;
    uint64_t at = part->address, a_address = 0;
    for (size_t i = begin; i < end; i++) {
        const struct adapter_delta *d = &p->data->delta[i];
        size_t a = a_bytes(p, i), b = b_bytes(p, i);
        void *dst;
        enum engine_code code;
        if (a) {
            code = place(p, at, a, &dst);
            if (code != ENGINE_OK)
                return code;
            k->pack_lora_a(dims, d->projection, d->rank, d->a, dst);
            a_address = at;
            at += a;
        }
        code = place(p, at, b, &dst);
        if (code != ENGINE_OK)
            return code;
        k->pack_lora_b(dims, d->projection, d->rank, d->b, dst);
        part->entries[(size_t)d->expert * KERNEL_PROJECTIONS + (size_t)d->projection] = (struct kernel_lora_entry){
            .a = a_address, .b = at, .scale = d->scale, .rank = (int32_t)round_up((size_t)d->rank, KERNEL_RANK_PAD)};
        at += b;
    }
    return flush(p);
}

/* Device memory, waiting for what is being given back before saying that there is none. */
static enum engine_code alloc_part(struct packer *p, size_t bytes, size_t whole, uint64_t *address)
{
    struct registry *r = p->r;
    for (;;) {
        pthread_mutex_lock(&r->lock);
        int retiring = r->retiring;
        uint64_t retired = r->retired;
        pthread_mutex_unlock(&r->lock);
        enum engine_code code = arena_alloc(r->arena, bytes, address, p->error);
        if (code != ENGINE_OUT_OF_DEVICE_MEMORY)
            return code;
        if (!retiring) {
            int64_t total, left;
            r->device->ops->memory_info(r->device, &total, &left);
            return engine_fail(p->error, code, "adapter \"%s\" takes %zu bytes of device memory; %lld of %lld are free", p->adapter->name,
                               whole, (long long)left, (long long)total);
        }
        pthread_mutex_lock(&r->lock);
        while (r->retiring && r->retired == retired)
            pthread_cond_wait(&r->changed, &r->lock);
        pthread_mutex_unlock(&r->lock);
    }
}

/* One buffer that the device reads fast is kept, since taking and returning such memory may wait for running batches. Whoever
 * comes while it is in use, or needs more, makes do with ordinary memory. */
static enum engine_code make_stage(struct packer *p, size_t largest_piece, size_t largest_layer)
{
    struct registry *r = p->r;
    pthread_mutex_lock(&r->lock);
    p->stage_is_kept = !r->stage_busy && largest_piece <= STAGE_BYTES;
    r->stage_busy |= p->stage_is_kept;
    pthread_mutex_unlock(&r->lock);
    if (p->stage_is_kept && !r->stage) {
        r->stage = r->device->ops->host_alloc(r->device, STAGE_BYTES);
        r->stage_bytes = STAGE_BYTES;
    }
    if (p->stage_is_kept && r->stage) {
        p->stage = r->stage;
        p->stage_room = STAGE_BYTES;
        return ENGINE_OK;
    }
    p->stage_room = largest_layer < STAGE_BYTES ? largest_layer : largest_piece > STAGE_BYTES ? largest_piece : STAGE_BYTES;
    p->stage_own = p->stage = malloc(p->stage_room);
    if (!p->stage)
        return engine_fail(p->error, ENGINE_OUT_OF_MEMORY, "out of memory for %zu bytes of staging", p->stage_room);
    return ENGINE_OK;
}

static void free_stage(struct packer *p)
{
    free(p->stage_own);
    if (!p->stage_is_kept)
        return;
    pthread_mutex_lock(&p->r->lock);
    p->r->stage_busy = false;
    pthread_mutex_unlock(&p->r->lock);
}

/* The figures, the parts and how large they and their pieces are. */
static void count(struct packer *p, size_t *part_bytes, size_t *largest_piece)
{
    const struct adapter_data *data = p->data;
    struct engine_adapter *a = p->adapter;
    for (size_t i = 0; i < data->deltas; i++) {
        const struct adapter_delta *d = &data->delta[i];
        bool new_layer = !i || d->layer_index != d[-1].layer_index;
        if (new_layer) {
            a->layers[a->part_count] = p->r->model->layer[d->layer_index].layer;
            a->part[a->part_count].layer_index = d->layer_index;
            part_bytes[a->part_count++] = 0;
        }
        size_t bytes_a = a_bytes(p, i), bytes_b = b_bytes(p, i), *sum = &part_bytes[a->part_count - 1];
        if (bytes_a > *largest_piece)
            *largest_piece = bytes_a;
        if (bytes_b > *largest_piece)
            *largest_piece = bytes_b;
        *sum += bytes_a + bytes_b;
        a->bytes += (int64_t)(bytes_a + bytes_b);
        a->experts += new_layer || d->expert != d[-1].expert;
        a->projection[d->projection] = true;
    }
}

enum engine_code registry_pack(struct registry *r, struct adapter_data *data, struct engine_adapter *a, struct engine_error *error)
{
    struct packer p = {.r = r, .data = data, .adapter = a, .error = error};
    size_t largest_piece = 0, largest_layer = 0, most = (size_t)r->model->layers + 1;
    a->rank = data->rank;
    a->tensors = data->tensors;
    a->ignored = data->ignored;
    a->warnings = data->warnings;
    a->warning_count = data->warning_count;
    data->warnings = NULL;
    data->warning_count = 0;
    a->layers = calloc(most, sizeof *a->layers);
    a->part = calloc(most, sizeof *a->part);
    size_t *part_bytes = calloc(most, sizeof *part_bytes);
    enum engine_code code = a->layers && a->part && part_bytes ? ENGINE_OK : ENGINE_OUT_OF_MEMORY;
    if (code == ENGINE_OK)
        count(&p, part_bytes, &largest_piece);
    for (int32_t i = 0; code == ENGINE_OK && i < a->part_count; i++) {
        a->part[i].entries = calloc(registry_entries(r), sizeof *a->part[i].entries);
        code = a->part[i].entries ? ENGINE_OK : ENGINE_OUT_OF_MEMORY;
        largest_layer = part_bytes[i] > largest_layer ? part_bytes[i] : largest_layer;
    }
    if (code != ENGINE_OK)
        engine_fail(error, code, "out of memory for adapter \"%s\"", a->name);
    /* All memory is taken before anything is copied: failing later would only take longer. */
    for (int32_t i = 0; code == ENGINE_OK && i < a->part_count; i++)
        code = alloc_part(&p, part_bytes[i], (size_t)a->bytes, &a->part[i].address);
    if (code == ENGINE_OK && a->part_count && !r->device->direct_memory)
        code = make_stage(&p, largest_piece, largest_layer);
    size_t begin = 0;
    for (int32_t i = 0; code == ENGINE_OK && i < a->part_count; i++) {
        size_t end = layer_end(data, begin);
        code = pack_layer(&p, &a->part[i], begin, end);
        begin = end;
    }
    free_stage(&p);
    free(part_bytes);
    return code;
}

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

static enum engine_code read_adapter(struct registry *r, const char *path, int dir_fd, struct adapter_data **data,
                                     struct engine_error *error)
{
    if (!path)
        return adapter_read(dir_fd, r->model, r->max_adapter_bytes, NULL, data, error);
    const char *below = path[0] == '/' ? path_strip_root(r->root_given, path) : NULL;
    return adapter_read_beneath(r->root_fd, r->root, below ? below : path, r->model, r->max_adapter_bytes, data, error);
}

static enum engine_code build(struct registry *r, struct registry_install *in, const char *path, int dir_fd,
                              struct engine_adapter_info *info, struct engine_error *error)
{
    struct adapter_data *data = NULL;
    enum engine_code code = read_adapter(r, path, dir_fd, &data, error);
    if (code == ENGINE_OK)
        code = registry_pack(r, data, in->adapter, error);
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

enum engine_code registry_install(struct registry *r, const char *name, const char *path, int dir_fd, bool replace,
                                  struct engine_adapter_info *info, bool *replaced, struct engine_error *error)
{
    struct registry_install in = {.name = name};
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
