/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_device.h"

#include "engine/clock.h"

#include <stdlib.h>
#include <string.h>

static struct fake_device *fake_of(struct device *device) { return (struct fake_device *)device; }

static void compute(const struct device_batch *batch)
{
    for (int32_t i = 0; i < batch->batch.rows; i++) {
        const struct kernel_row *row = &batch->batch.row[i];
        float add = 0;
        for (int32_t s = row->first_slot; s < row->first_slot + row->slots; s++)
            add += 1000.f * (float)batch->batch.slot_expert[s] + batch->batch.slot_weight[s] + (batch->batch.slot_row[s] == i ? 0.f : 1e6f);
        for (size_t j = 0; j < FAKE_HIDDEN; j++) {
            size_t at = j * dtype_size((enum dtype)row->dtype);
            float v = dtype_load_f32((const char *)(uintptr_t)row->in + at, (enum dtype)row->dtype);
            dtype_store_f32((char *)(uintptr_t)row->out + at, (enum dtype)row->dtype, v + add);
        }
    }
}

/* The oldest batch leaves the device. Under the lock. */
static enum engine_code complete(struct fake_device *fake, int failing, struct engine_error *error)
{
    struct timespec due = clock_timespec(fake->due_ns[fake->finished % 8]);
    while (fake->held)
        pthread_cond_wait(&fake->changed, &fake->lock);
    while (clock_now_ns() < fake->due_ns[fake->finished % 8])
        pthread_cond_timedwait(&fake->changed, &fake->lock, &due);
    struct device_batch batch = fake->pending[fake->finished % 8];
    fake->finished++;
    if (fake->finished == failing)
        return engine_fail(error, fake->fail_code, "injected fault");
    compute(&batch);
    return ENGINE_OK;
}

static enum engine_code fake_submit(struct device *device, const struct device_batch *batch, struct engine_error *error)
{
    struct fake_device *fake = fake_of(device);
    enum engine_code code = ENGINE_OK;
    pthread_mutex_lock(&fake->lock);
    if (fake->submitted < FAKE_RECORDS)
        fake->record[fake->submitted] = (struct fake_record){batch->layer_index, batch->batch.rows, batch->batch.slots, batch->path};
    fake->due_ns[fake->submitted % 8] = fake->busy_ns > 0 ? clock_now_ns() + fake->busy_ns : 0;
    fake->pending[fake->submitted++ % 8] = *batch;
    if (fake->submitted - fake->finished > fake->most_pending)
        fake->most_pending = fake->submitted - fake->finished;
    pthread_cond_broadcast(&fake->changed);
    if (device->depth == 1) {
        code = complete(fake, fake->fail_submit, error);
    } else if (fake->submitted == fake->fail_submit) {
        fake->submitted--; /* it never got in flight */
        fake->fail_submit = 0;
        code = engine_fail(error, fake->fail_code, "injected fault");
    }
    pthread_mutex_unlock(&fake->lock);
    return code;
}

static enum engine_code fake_wait(struct device *device, struct engine_error *error)
{
    struct fake_device *fake = fake_of(device);
    if (device->depth == 1)
        return ENGINE_OK;
    pthread_mutex_lock(&fake->lock);
    enum engine_code code = complete(fake, fake->fail_wait, error);
    pthread_mutex_unlock(&fake->lock);
    return code;
}

static bool fake_ready(struct device *device)
{
    struct fake_device *fake = fake_of(device);
    pthread_mutex_lock(&fake->lock);
    bool ready = !fake->held && clock_now_ns() >= fake->due_ns[fake->finished % 8];
    pthread_mutex_unlock(&fake->lock);
    return ready;
}

static enum engine_code fake_canary(struct device *device, struct engine_error *error)
{
    struct fake_device *fake = fake_of(device);
    pthread_mutex_lock(&fake->lock);
    fake->canaries++;
    enum engine_code code = fake->canary_code;
    pthread_mutex_unlock(&fake->lock);
    return code == ENGINE_OK ? ENGINE_OK : engine_fail(error, code, "the canary is dead");
}

static void *fake_host_alloc(struct device *device, size_t bytes)
{
    (void)device;
    return malloc(bytes);
}

static void fake_host_free(struct device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)bytes;
    free(memory);
}

static const struct device_ops fake_ops = {
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .submit = fake_submit,
    .wait = fake_wait,
    .canary = fake_canary,
};

static const struct device_ops telling_ops = {
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .submit = fake_submit,
    .ready = fake_ready,
    .wait = fake_wait,
    .canary = fake_canary,
};

void fake_init(struct fake_device *fake, int depth, bool tells)
{
    *fake = (struct fake_device){.kernels = {.name = "fake", .device = "fake", .decode_rows = 4}};
    fake->base = (struct device){.ops = tells ? &telling_ops : &fake_ops, .kernels = &fake->kernels, .kind = "fake", .depth = depth};
    for (int i = 0; i < FAKE_LAYERS; i++) {
        fake->held_layers[i] = 2 * i;
        fake->layer[i].layer = 2 * i;
    }
    for (int i = 0; i < FAKE_EXPERTS; i++) {
        fake->held_experts[i] = i;
        fake->local_expert[i] = i < FAKE_EXPERTS - 1 ? i : -1;
    }
    fake->model = (struct model){
        .dims = {.experts = FAKE_EXPERTS - 1, .hidden = FAKE_HIDDEN, .inter = 8, .op = DTYPE_BF16},
        .experts = FAKE_EXPERTS,
        .held_experts = fake->held_experts,
        .local_expert = fake->local_expert,
        .layer = fake->layer,
        .layers = FAKE_LAYERS,
        .held_layers = fake->held_layers,
        .device = &fake->base,
    };
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&fake->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&fake->lock, NULL);
    fake->record = calloc(FAKE_RECORDS, sizeof *fake->record);
}

void fake_finish(struct fake_device *fake)
{
    free(fake->record);
    pthread_cond_destroy(&fake->changed);
    pthread_mutex_destroy(&fake->lock);
}

void fake_hold(struct fake_device *fake)
{
    pthread_mutex_lock(&fake->lock);
    fake->held = true;
    pthread_mutex_unlock(&fake->lock);
}

void fake_release(struct fake_device *fake)
{
    pthread_mutex_lock(&fake->lock);
    fake->held = false;
    pthread_cond_broadcast(&fake->changed);
    pthread_mutex_unlock(&fake->lock);
}

int fake_submitted(struct fake_device *fake)
{
    pthread_mutex_lock(&fake->lock);
    int n = fake->submitted;
    pthread_mutex_unlock(&fake->lock);
    return n;
}

bool fake_wait_submitted(struct fake_device *fake, int count)
{
    struct timespec t = clock_timespec(clock_now_ns() + 5 * CLOCK_NS_PER_S);
    pthread_mutex_lock(&fake->lock);
    while (fake->submitted < count && !pthread_cond_timedwait(&fake->changed, &fake->lock, &t))
        ;
    bool ok = fake->submitted >= count;
    pthread_mutex_unlock(&fake->lock);
    return ok;
}
