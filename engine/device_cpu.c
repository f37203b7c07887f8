/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU as a device: device memory is host memory, a batch is computed inside submit, and wait has nothing left to do.
 */
#include "engine/device.h"
#include "engine/host_memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    SMALL_BYTES = 256 * 1024, /* below this the C library's heap serves, above it pages of our own */
    HUGE_BYTES = 2 * 1024 * 1024, /* the size of a huge page on x86-64 and (with 4 KiB pages) aarch64 */
    ALIGN_BYTES = 256,
    RESERVE_BYTES = 64 * 1024 * 1024, /* kept free of weights and adapters, for stacks, sockets and the rest */
};

struct device_cpu {
    struct device base;
    struct kernel_stream *stream; /* of the engine thread; NULL where kernels run on one thread */
    struct device_limits limits;
    struct kernel_forward forward;
    size_t scratch_mapped, tables_mapped;
    void *scratch;
    struct kernel_lora_entry *tables; /* [layers, adapters, experts, KERNEL_PROJECTIONS] */
    pthread_mutex_t lock;
    int64_t allocated; /* bytes handed out by alloc, under lock: they count as used even while their pages are untouched */
};

static struct device_cpu *cpu_of(struct device *device) { return (struct device_cpu *)device; }

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* Pages of zeros, on a huge page's boundary and asked to be huge when that wastes next to nothing. NULL when there are none. */
static void *map_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = round_up(bytes, page);
    bool huge = size >= 2 * (size_t)HUGE_BYTES;
    size_t slack = huge ? HUGE_BYTES : 0;
    char *p = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (!huge)
        return p;
    char *start = (char *)round_up((uintptr_t)p, HUGE_BYTES), *end = start + size;
    if (start > p)
        munmap(p, (size_t)(start - p));
    if (end < p + size + slack)
        munmap(end, (size_t)(p + size + slack - end));
    madvise(start, size / HUGE_BYTES * HUGE_BYTES, MADV_HUGEPAGE); /* a wish: the kernel may lack it */
    return start;
}

static void unmap_pages(void *p, size_t bytes)
{
    if (p)
        munmap(p, round_up(bytes, (size_t)sysconf(_SC_PAGESIZE)));
}

static void *host_take(size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    return bytes >= SMALL_BYTES ? map_pages(bytes) : aligned_alloc(ALIGN_BYTES, round_up(bytes ? bytes : 1, ALIGN_BYTES));
}

static void host_give(void *p, size_t bytes)
{
    if (bytes >= SMALL_BYTES)
        unmap_pages(p, bytes);
    else
        free(p);
}

/* Memory that was handed out but not yet written is free as far as the system knows, and must not be promised twice. */
static int64_t free_beyond_promises(int64_t allocated, int64_t *total)
{
    int64_t available;
    host_memory_info(total, &available);
    int64_t untouched = allocated - host_memory_resident();
    available -= RESERVE_BYTES + (untouched > 0 ? untouched : 0);
    return available > 0 ? available : 0;
}

static void cpu_memory_info(struct device *device, int64_t *total, int64_t *free_now)
{
    struct device_cpu *cpu = cpu_of(device);
    pthread_mutex_lock(&cpu->lock);
    int64_t allocated = cpu->allocated;
    pthread_mutex_unlock(&cpu->lock);
    *free_now = free_beyond_promises(allocated, total);
}

static enum engine_code cpu_alloc(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error)
{
    struct device_cpu *cpu = cpu_of(device);
    int64_t total = 0, left = 0;
    *out = 0;
    pthread_mutex_lock(&cpu->lock);
    /* Asking the system costs a few file reads; small pieces can't bring a machine down. */
    bool fits = bytes < SMALL_BYTES || (left = free_beyond_promises(cpu->allocated, &total)) >= 0;
    if (fits && bytes >= SMALL_BYTES)
        fits = bytes <= (uint64_t)left;
    void *p = fits ? host_take(bytes) : NULL;
    if (p)
        cpu->allocated += (int64_t)bytes;
    pthread_mutex_unlock(&cpu->lock);
    if (!p) {
        if (!total)
            cpu_memory_info(device, &total, &left);
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "out of memory: %zu bytes wanted, %lld free of %lld", bytes, (long long)left,
                           (long long)total);
    }
    *out = (uint64_t)(uintptr_t)p;
    return ENGINE_OK;
}

static void cpu_free(struct device *device, uint64_t address, size_t bytes)
{
    struct device_cpu *cpu = cpu_of(device);
    if (!address)
        return;
    host_give((void *)(uintptr_t)address, bytes);
    pthread_mutex_lock(&cpu->lock);
    cpu->allocated -= (int64_t)bytes;
    pthread_mutex_unlock(&cpu->lock);
}

static void *cpu_host_alloc(struct device *device, size_t bytes)
{
    (void)device;
    return host_take(bytes);
}

static void cpu_host_free(struct device *device, void *memory, size_t bytes)
{
    (void)device;
    host_give(memory, bytes);
}

static enum engine_code cpu_upload(struct device *device, uint64_t dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                   size_t height, struct engine_error *error)
{
    (void)device;
    (void)error;
    for (size_t i = 0; i < height; i++)
        memcpy((char *)(uintptr_t)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return ENGINE_OK;
}

static enum engine_code cpu_download(struct device *device, void *dst, uint64_t src, size_t bytes, struct engine_error *error)
{
    (void)device;
    (void)error;
    memcpy(dst, (const void *)(uintptr_t)src, bytes);
    return ENGINE_OK;
}

static size_t table_entries(const struct device_limits *limits)
{
    return (size_t)limits->adapters * (size_t)limits->dims.experts * KERNEL_PROJECTIONS;
}

static enum engine_code cpu_prepare(struct device *device, const struct device_limits *limits, struct engine_error *error)
{
    struct device_cpu *cpu = cpu_of(device);
    size_t scratch = forward_bind_scratch(device->kernels, limits, NULL, NULL), tables;
    if (__builtin_mul_overflow(table_entries(limits) * sizeof(struct kernel_lora_entry), (size_t)limits->layers, &tables))
        tables = SIZE_MAX / 4;
    int64_t total, left;
    cpu_memory_info(device, &total, &left);
    if (scratch > (uint64_t)left)
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "out of memory: scratch for %d rows takes %zu bytes, %lld free of %lld",
                           limits->max_rows, scratch, (long long)left, (long long)total);
    void *s = map_pages(scratch);
    void *t = tables ? map_pages(tables) : NULL; /* zeros, and only pages that get an entry become real */
    if (!s || (tables && !t)) {
        unmap_pages(s, scratch);
        unmap_pages(t, tables);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory: scratch of %zu and adapter tables of %zu bytes", scratch, tables);
    }
    if (t)
        madvise(t, tables, MADV_NOHUGEPAGE); /* entries are sparse */
    cpu->limits = *limits;
    cpu->scratch = s;
    cpu->scratch_mapped = scratch;
    cpu->tables = t;
    cpu->tables_mapped = tables;
    forward_bind_scratch(device->kernels, limits, s, &cpu->forward);
    device->scratch_bytes = scratch;
    return ENGINE_OK;
}

static enum engine_code cpu_table_write(struct device *device, int32_t layer_index, size_t first, size_t count,
                                        const struct kernel_lora_entry *entries, struct engine_error *error)
{
    struct device_cpu *cpu = cpu_of(device);
    size_t per_layer = table_entries(&cpu->limits);
    if (layer_index < 0 || layer_index >= cpu->limits.layers || first > per_layer || count > per_layer - first)
        return engine_fail(error, ENGINE_INTERNAL, "adapter table: entries %zu..%zu of layer %d lie outside its %zu", first, first + count,
                           layer_index, per_layer);
    memcpy(cpu->tables + (size_t)layer_index * per_layer + first, entries, count * sizeof *entries);
    return ENGINE_OK;
}

static enum engine_code cpu_code(enum kernel_status status, struct engine_error *error)
{
    switch (status) {
    case KERNEL_OK: return ENGINE_OK;
    case KERNEL_OUT_OF_MEMORY: return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory in a compute step");
    case KERNEL_DEVICE_FAILED: break;
    }
    return engine_fail(error, ENGINE_DEVICE_FAILED, "a compute step failed on the CPU");
}

static enum engine_code cpu_submit(struct device *device, const struct device_batch *batch, struct engine_error *error)
{
    struct device_cpu *cpu = cpu_of(device);
    struct kernel_forward *f = &cpu->forward;
    f->weights = batch->weights;
    f->batch = batch->batch;
    f->path = batch->path;
    f->lora.adapters = batch->adapted ? cpu->limits.adapters : 0;
    f->lora.entry = batch->adapted ? cpu->tables + (size_t)batch->layer_index * table_entries(&cpu->limits) : NULL;
    enum kernel_status status = forward_run(device->kernels, cpu->stream, f);
    if (status == KERNEL_OK)
        status = device->kernels->wait(cpu->stream);
    return cpu_code(status, error);
}

static enum engine_code cpu_wait(struct device *device, struct engine_error *error)
{
    (void)device;
    (void)error;
    return ENGINE_OK;
}

static void cpu_destroy(struct device *device)
{
    struct device_cpu *cpu = cpu_of(device);
    unmap_pages(cpu->scratch, cpu->scratch_mapped);
    unmap_pages(cpu->tables, cpu->tables_mapped);
    kernels_cpu_stream_destroy(cpu->stream);
    kernels_cpu_stream_destroy(device->host_pool);
    pthread_mutex_destroy(&cpu->lock);
    free(cpu);
}

static const struct device_ops cpu_ops = {
    .destroy = cpu_destroy,
    .prepare = cpu_prepare,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .memory_info = cpu_memory_info,
    .host_alloc = cpu_host_alloc,
    .host_free = cpu_host_free,
    .upload = cpu_upload,
    .download = cpu_download,
    .table_write = cpu_table_write,
    .submit = cpu_submit,
    .wait = cpu_wait,
    .canary = cpu_wait, /* a processor that runs this is there */
};

enum engine_code device_cpu_create(const struct device_options *options, struct device **out, struct engine_error *error)
{
    bool ref = options->isa && !strcmp(options->isa, "ref");
    const struct kernel_table *kernels = ref ? kernels_ref() : kernels_cpu(options->isa);
    if (!kernels)
        return engine_fail(error, ENGINE_BAD_OPTION, "--device: this processor or build has no \"%.64s\" kernels", options->isa);
    struct device_cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the device");
    struct device *device = &cpu->base;
    device->ops = &cpu_ops;
    device->kernels = kernels;
    device->kind = "cpu";
    device->depth = 1;
    device->direct_memory = true;
    device->default_batch_rows = 512;
    pthread_mutex_init(&cpu->lock, NULL);
    /* Loaders and the engine thread may work at the same time, and a stream serves one thread. */
    device->host_pool = kernels_cpu_stream_create(options->threads);
    if (!ref)
        cpu->stream = kernels_cpu_stream_create(options->threads);
    if (!device->host_pool || (!ref && !cpu->stream)) {
        cpu_destroy(device);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "--threads: %d compute threads can't be started", options->threads);
    }
    device->threads = ref ? 1 : kernels_cpu_stream_threads(cpu->stream);
    const char *isa = strncmp(kernels->name, "cpu-", 4) ? kernels->name : kernels->name + 4;
    snprintf(device->id, sizeof device->id, "cpu");
    snprintf(device->name, sizeof device->name, "%s, %d thread%s", isa, device->threads, device->threads == 1 ? "" : "s");
    *out = device;
    return ENGINE_OK;
}
