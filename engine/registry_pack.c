/* SPDX-License-Identifier: Apache-2.0
 *
 * From an opened adapter to device memory. Where everything goes is laid out first: one allocation, layer after layer, each with its
 * table entries. Then the pieces are read, packed and uploaded by this thread and some helpers, each with buffers that stay in its
 * cache, so that an adapter's bytes cross memory once. Helpers are for one install, are bounded over all of them, and give way to
 * the threads that serve.
 */
#include "engine/clock.h"
#include "engine/registry.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define HELPER_NICE 10

struct packing {
    struct registry *r;
    struct adapter_data *data;
    struct engine_adapter *adapter;
    atomic_size_t next; /* piece */
    atomic_bool stop;
    pthread_mutex_t lock; /* the rest */
    size_t failed; /* the first piece that failed */
    enum engine_code code;
    struct engine_error error;
    int64_t read_ns, upload_ns, pack_ns; /* of all threads */
};

/* One thread's part. */
struct packer {
    struct packing *all;
    struct adapter_reader *reader;
    char *stage; /* where the device can't be written to directly */
    size_t stage_room, stage_used;
    char *stage_own; /* the same when it is none of the registry's */
    int stage_index; /* of the registry's; -1: none */
    uint64_t stage_address; /* where its first byte goes */
    int64_t read_ns, upload_ns, pack_ns;
};

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static size_t a_bytes(const struct registry *r, const struct adapter_delta *d)
{
    return d->shares_a ? 0 : round_up(r->device->kernels->lora_a_bytes(&r->model->dims, d->projection, d->rank), ARENA_ALIGN);
}

static size_t b_bytes(const struct registry *r, const struct adapter_delta *d)
{
    return round_up(r->device->kernels->lora_b_bytes(&r->model->dims, d->projection, d->rank), ARENA_ALIGN);
}

/* ---- laying out ------------------------------------------------------------------------------------------------ */

static struct kernel_lora_entry *entry_of(const struct engine_adapter *a, int32_t part, const struct adapter_delta *d)
{
    return &a->part[part].entries[(size_t)d->expert * KERNEL_PROJECTIONS + (size_t)d->projection];
}

/* The figures, and the parts with entries whose addresses count from 0. */
static enum engine_code lay_out(struct registry *r, const struct adapter_data *data, struct engine_adapter *a, size_t *largest)
{
    size_t most = (size_t)r->model->layers + 1;
    uint64_t at = 0, a_at = 0;
    a->layers = calloc(most, sizeof *a->layers);
    a->part = calloc(most, sizeof *a->part);
    if (!a->layers || !a->part)
        return ENGINE_OUT_OF_MEMORY;
    for (size_t i = 0; i < data->deltas; i++) {
        const struct adapter_delta *d = &data->delta[i];
        const bool new_layer = !i || d->layer_index != d[-1].layer_index;
        const size_t bytes_a = a_bytes(r, d), bytes_b = b_bytes(r, d);
        if (new_layer) {
            struct registry_part *part = &a->part[a->part_count];
            part->layer_index = d->layer_index;
            part->entries = calloc(registry_entries(r), sizeof *part->entries);
            if (!part->entries)
                return ENGINE_OUT_OF_MEMORY;
            a->layers[a->part_count++] = r->model->layer[d->layer_index].layer;
        }
        a_at = bytes_a ? at : a_at;
        *entry_of(a, a->part_count - 1, d) = (struct kernel_lora_entry){
            .a = a_at, .b = at + bytes_a, .scale = d->scale, .rank = (int32_t)round_up((size_t)d->rank, KERNEL_RANK_PAD)};
        at += bytes_a + bytes_b;
        *largest = bytes_a > *largest ? bytes_a : *largest;
        *largest = bytes_b > *largest ? bytes_b : *largest;
        a->experts += new_layer || d->expert != d[-1].expert;
        a->projection[d->projection] = true;
    }
    a->bytes = (int64_t)at;
    return ENGINE_OK;
}

/* Device memory, waiting for what is being given back before saying that there is none. */
static enum engine_code take_memory(struct registry *r, struct engine_adapter *a, struct engine_error *error)
{
    for (;;) {
        pthread_mutex_lock(&r->lock);
        int retiring = r->retiring;
        uint64_t retired = r->retired;
        pthread_mutex_unlock(&r->lock);
        enum engine_code code = arena_alloc(r->arena, (size_t)a->bytes, &a->address, error);
        if (code != ENGINE_OUT_OF_DEVICE_MEMORY)
            return code;
        if (!retiring) {
            int64_t total, left;
            r->device->ops->memory_info(r->device, &total, &left);
            return engine_fail(error, code, "adapter \"%s\" takes %lld bytes of device memory; %lld of %lld are free", a->name,
                               (long long)a->bytes, (long long)left, (long long)total);
        }
        pthread_mutex_lock(&r->lock);
        while (r->retiring && r->retired == retired)
            pthread_cond_wait(&r->changed, &r->lock);
        pthread_mutex_unlock(&r->lock);
    }
}

static void move_entries(const struct adapter_data *data, const struct engine_adapter *a)
{
    int32_t part = 0;
    for (size_t i = 0; i < data->deltas; i++) {
        const struct adapter_delta *d = &data->delta[i];
        part += d->layer_index != a->part[part].layer_index;
        struct kernel_lora_entry *e = entry_of(a, part, d);
        e->a += a->address;
        e->b += a->address;
    }
}

/* ---- packing --------------------------------------------------------------------------------------------------- */

static enum engine_code flush(struct packer *p, struct engine_error *error)
{
    struct device *device = p->all->r->device;
    size_t n = p->stage_used;
    p->stage_used = 0;
    if (!n)
        return ENGINE_OK;
    int64_t begin = clock_now_ns();
    enum engine_code code = device->ops->upload(device, p->stage_address, n, p->stage, n, n, 1, error);
    p->upload_ns += clock_now_ns() - begin;
    return code;
}

/* Host memory whose content will be at the device's `address`; NULL after an error. */
static void *place(struct packer *p, uint64_t address, size_t bytes, struct engine_error *error)
{
    if (p->all->r->device->direct_memory)
        return (void *)(uintptr_t)address;
    bool next = p->stage_used && p->stage_address + p->stage_used == address && p->stage_used + bytes <= p->stage_room;
    if (!next) {
        if (flush(p, error) != ENGINE_OK)
            return NULL;
        p->stage_address = address;
    }
    void *at = p->stage + p->stage_used;
    p->stage_used += bytes;
    return at;
}

static enum engine_code pack_piece(struct packer *p, const struct adapter_piece *piece, struct engine_error *error)
{
    const struct registry *r = p->all->r;
    const struct engine_adapter *a = p->all->adapter;
    int32_t part = 0;
    for (size_t i = piece->delta; i < piece->delta + piece->deltas; i++) {
        const struct adapter_delta *d = &p->all->data->delta[i];
        while (a->part[part].layer_index != d->layer_index)
            part++;
        const struct kernel_lora_entry *e = entry_of(a, part, d);
        void *to;
        if (!d->shares_a) {
            if (!(to = place(p, e->a, a_bytes(r, d), error)))
                return error->code;
            r->device->kernels->pack_lora_a(&r->model->dims, d->projection, d->rank, d->a, to);
        }
        if (!(to = place(p, e->b, b_bytes(r, d), error)))
            return error->code;
        r->device->kernels->pack_lora_b(&r->model->dims, d->projection, d->rank, d->b, to);
    }
    return flush(p, error);
}

/* Memory that the device reads fast is kept, since taking and returning it may wait for running batches. Whoever comes while all of it
 * is in use, or needs more, makes do with ordinary memory. */
static bool take_stage(struct packer *p, size_t largest)
{
    struct registry *r = p->all->r;
    p->stage_index = -1;
    pthread_mutex_lock(&r->lock);
    for (int i = 0; largest <= REGISTRY_STAGE_BYTES && i < REGISTRY_PACKERS && p->stage_index < 0; i++)
        if (!(r->stages_busy >> i & 1))
            p->stage_index = i;
    if (p->stage_index >= 0)
        r->stages_busy |= 1u << p->stage_index;
    char *kept = r->stage;
    pthread_mutex_unlock(&r->lock);
    if (p->stage_index >= 0 && kept) {
        p->stage = kept + (size_t)p->stage_index * REGISTRY_STAGE_BYTES;
        p->stage_room = REGISTRY_STAGE_BYTES;
        return true;
    }
    p->stage_room = largest > REGISTRY_STAGE_BYTES ? largest : REGISTRY_STAGE_BYTES;
    p->stage = p->stage_own = malloc(p->stage_room);
    return p->stage;
}

static void return_stage(struct packer *p)
{
    struct registry *r = p->all->r;
    free(p->stage_own);
    if (p->stage_index < 0)
        return;
    pthread_mutex_lock(&r->lock);
    r->stages_busy &= ~(1u << p->stage_index);
    pthread_mutex_unlock(&r->lock);
}

/* Installs that come at the same time: the first makes it, and has it all until it is made. */
static void make_stages(struct registry *r)
{
    pthread_mutex_lock(&r->lock);
    bool make = !r->stage && !r->stages_busy;
    r->stages_busy |= make ? UINT32_MAX : 0;
    pthread_mutex_unlock(&r->lock);
    if (!make)
        return;
    char *stage = r->device->ops->host_alloc(r->device, (size_t)REGISTRY_PACKERS * REGISTRY_STAGE_BYTES);
    pthread_mutex_lock(&r->lock);
    r->stage = stage;
    r->stages_busy = 0;
    pthread_mutex_unlock(&r->lock);
}

/* Pieces are handed out in order and those begun are finished, so that the first one at fault is found whatever threads do. */
static void give_up(struct packing *all, size_t piece, const struct engine_error *error)
{
    pthread_mutex_lock(&all->lock);
    if (all->code == ENGINE_OK || piece < all->failed) {
        all->failed = piece;
        all->code = error->code;
        all->error = *error;
    }
    pthread_mutex_unlock(&all->lock);
    atomic_store(&all->stop, true);
}

static void work(struct packing *all, size_t largest, bool must)
{
    struct packer p = {.all = all, .stage_index = -1};
    struct engine_error error;
    p.reader = adapter_reader_create(all->data);
    bool ready = p.reader && (all->r->device->direct_memory || take_stage(&p, largest));
    if (!ready && must) {
        engine_fail(&error, ENGINE_OUT_OF_MEMORY, "out of memory for adapter \"%s\"", all->adapter->name);
        give_up(all, 0, &error);
    }
    for (size_t i; ready && !atomic_load(&all->stop) && (i = atomic_fetch_add(&all->next, 1)) < all->data->pieces;) {
        int64_t begin = clock_now_ns(), uploading = p.upload_ns;
        enum engine_code code = adapter_reader_read(p.reader, i, &error);
        int64_t read = clock_now_ns();
        if (code == ENGINE_OK)
            code = pack_piece(&p, &all->data->piece[i], &error);
        p.read_ns += read - begin;
        p.pack_ns += clock_now_ns() - read - (p.upload_ns - uploading);
        if (code != ENGINE_OK)
            give_up(all, i, &error);
    }
    return_stage(&p);
    adapter_reader_destroy(p.reader);
    pthread_mutex_lock(&all->lock);
    all->read_ns += p.read_ns;
    all->pack_ns += p.pack_ns;
    all->upload_ns += p.upload_ns;
    pthread_mutex_unlock(&all->lock);
}

struct helper {
    pthread_t thread;
    struct packing *all;
    size_t largest;
};

static void *help(void *arg)
{
    const struct helper *h = arg;
    /* Wishes: without them the work gets done as well. */
    (void)sched_setscheduler(0, SCHED_BATCH, &(struct sched_param){0});
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), HELPER_NICE);
    work(h->all, h->largest, false);
    return NULL;
}

/* As many helpers as are free, as there is work for, and as leave the serving threads half of the processors. */
static int engage(struct registry *r, size_t pieces)
{
    int most = r->device->threads / 2 < REGISTRY_PACKERS ? r->device->threads / 2 : REGISTRY_PACKERS;
    pthread_mutex_lock(&r->lock);
    int free_now = most - 1 - r->helpers, n = pieces > 1 && free_now > 0 ? free_now : 0;
    n = (size_t)n < pieces ? n : (int)pieces - 1;
    r->helpers += n;
    pthread_mutex_unlock(&r->lock);
    return n;
}

static enum engine_code fill(struct registry *r, struct packing *all, size_t largest, struct engine_error *error)
{
    struct helper helper[REGISTRY_PACKERS];
    int engaged = engage(r, all->data->pieces), started = 0;
    if (!r->device->direct_memory)
        make_stages(r);
    for (; started < engaged; started++) {
        helper[started] = (struct helper){.all = all, .largest = largest};
        if (pthread_create(&helper[started].thread, NULL, help, &helper[started]))
            break;
    }
    int64_t begin = clock_now_ns();
    work(all, largest, true);
    for (int i = 0; i < started; i++)
        pthread_join(helper[i].thread, NULL);
    pthread_mutex_lock(&r->lock);
    r->helpers -= engaged;
    pthread_mutex_unlock(&r->lock);
    if (all->code != ENGINE_OK) {
        *error = all->error;
        return all->code;
    }
    if (r->log) {
        const double ms = 1e-6 / (started + 1);
        char line[320];
        snprintf(line, sizeof line,
                 "adapter \"%s\": values in %.1f ms by %d threads, which read for %.1f, packed for %.1f, uploaded for %.1f",
                 all->adapter->name, (double)(clock_now_ns() - begin) * 1e-6, started + 1, (double)all->read_ns * ms,
                 (double)all->pack_ns * ms, (double)all->upload_ns * ms);
        r->log(r->log_arg, "debug", line);
    }
    return ENGINE_OK;
}

enum engine_code registry_pack(struct registry *r, struct adapter_data *data, struct engine_adapter *a, struct engine_error *error)
{
    struct packing all = {.r = r, .data = data, .adapter = a, .lock = PTHREAD_MUTEX_INITIALIZER};
    struct engine_error own;
    size_t largest = 0;
    error = error ? error : &own;
    a->rank = data->rank;
    a->tensors = data->tensors;
    a->ignored = data->ignored;
    a->warnings = data->warnings;
    a->warning_count = data->warning_count;
    data->warnings = NULL;
    data->warning_count = 0;
    if (lay_out(r, data, a, &largest) != ENGINE_OK)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for adapter \"%s\"", a->name);
    /* All memory is taken before anything is copied: failing later would only take longer. */
    enum engine_code code = a->bytes ? take_memory(r, a, error) : ENGINE_OK;
    if (code != ENGINE_OK)
        return code;
    move_entries(data, a);
    return fill(r, &all, largest, error);
}
