/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/registry_fakes.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- a device -------------------------------------------------------------------------------------------------- */

static bool strikes(int *countdown) { return *countdown && !--*countdown; }

static enum engine_code fake_alloc(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error)
{
    struct fake *f = (struct fake *)device;
    pthread_mutex_lock(&f->lock);
    f->allocs++;
    bool fine = !strikes(&f->fail_alloc) && bytes <= f->limit - f->used;
    if (fine) {
        f->used += bytes;
        *out = (uint64_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
    }
    pthread_mutex_unlock(&f->lock);
    return fine ? ENGINE_OK : engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "%zu bytes wanted", bytes);
}

static void fake_free(struct device *device, uint64_t address, size_t bytes)
{
    struct fake *f = (struct fake *)device;
    free((void *)(uintptr_t)address);
    pthread_mutex_lock(&f->lock);
    f->used -= bytes;
    pthread_mutex_unlock(&f->lock);
}

static void fake_memory_info(struct device *device, int64_t *total, int64_t *left)
{
    struct fake *f = (struct fake *)device;
    pthread_mutex_lock(&f->lock);
    *total = (int64_t)f->limit;
    *left = (int64_t)(f->limit - f->used);
    pthread_mutex_unlock(&f->lock);
}

static void *fake_host_alloc(struct device *device, size_t bytes) { return ((struct fake *)device)->no_host_memory ? NULL : malloc(bytes); }

static void fake_host_free(struct device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)bytes;
    free(memory);
}

static enum engine_code fake_upload(struct device *device, uint64_t dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                    size_t height, struct engine_error *error)
{
    struct fake *f = (struct fake *)device;
    pthread_mutex_lock(&f->lock);
    f->uploads++;
    bool fine = !strikes(&f->fail_upload);
    if (f->touched)
        utimensat(AT_FDCWD, f->touched, (const struct timespec[2]){{.tv_sec = f->uploads}, {.tv_sec = f->uploads}}, 0);
    pthread_mutex_unlock(&f->lock);
    for (size_t i = 0; fine && i < height; i++)
        memcpy((char *)(uintptr_t)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return fine ? ENGINE_OK : engine_fail(error, ENGINE_DEVICE_FAILED, "upload failed");
}

static enum engine_code fake_table_write(struct device *device, int32_t layer_index, size_t first, size_t count,
                                         const struct kernel_lora_entry *entries, struct engine_error *error)
{
    struct fake *f = (struct fake *)device;
    f->writes++;
    memcpy(f->table + (size_t)layer_index * (size_t)f->slots * 12 + first, entries, count * sizeof *entries);
    return strikes(&f->fail_write) ? engine_fail(error, ENGINE_DEVICE_FAILED, "table write failed") : ENGINE_OK;
}

const struct device_ops fake_ops = {.alloc = fake_alloc,
                                    .free = fake_free,
                                    .memory_info = fake_memory_info,
                                    .host_alloc = fake_host_alloc,
                                    .host_free = fake_host_free,
                                    .upload = fake_upload,
                                    .table_write = fake_table_write};

/* ---- an engine thread ------------------------------------------------------------------------------------------ */

void thread_post(void *context, void (*fn)(void *), void *arg)
{
    struct thread *t = context;
    struct job *job = malloc(sizeof *job);
    *job = (struct job){NULL, fn, arg};
    pthread_mutex_lock(&t->lock);
    *t->tail = job;
    t->tail = &job->next;
    pthread_cond_signal(&t->work);
    pthread_mutex_unlock(&t->lock);
}

void *thread_run(void *arg)
{
    struct thread *t = arg;
    pthread_mutex_lock(&t->lock);
    while (!t->stop || t->head) {
        if (!t->head || (t->paused && !t->stop)) {
            pthread_cond_wait(&t->work, &t->lock);
            continue;
        }
        struct job *job = t->head;
        t->head = job->next;
        if (!t->head)
            t->tail = &t->head;
        pthread_mutex_unlock(&t->lock);
        job->fn(job->arg);
        free(job);
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

void thread_pause(struct thread *t, bool paused)
{
    pthread_mutex_lock(&t->lock);
    t->paused = paused;
    pthread_cond_signal(&t->work);
    pthread_mutex_unlock(&t->lock);
}
