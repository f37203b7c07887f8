/* SPDX-License-Identifier: Apache-2.0
 *
 * An NVIDIA GPU as a device: its choice, memory, uploads, and the parts that batches need.
 *
 * Any thread may take memory and upload; every function that such threads call names the device first, since the runtime keeps the
 * current device per thread. The order in which things are destroyed is that of use: the engine's threads are gone by then.
 */
#include "engine/device_cuda.h"
#include "engine/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BATCH_ROWS = 4096, /* large enough for full speed, small enough that a larger request's windows overlap */
    DIRECT_PIECE_BYTES = 64 * 1024, /* 2-D uploads of narrower pieces than this are placed by the device: links copy those slowly */
};

static void *device_pointer(uint64_t address) { return (void *)(uintptr_t)address; }

enum engine_code cuda_fail(const struct device_cuda *cuda, cudaError_t e, const char *doing, struct engine_error *error)
{
    (void)cudaGetLastError();
    if (e == cudaErrorMemoryAllocation)
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "%s: out of device memory while %s", cuda->base.id, doing);
    return engine_fail(error, ENGINE_DEVICE_FAILED, "%s: %s failed: %s (%s)", cuda->base.id, doing, cudaGetErrorString(e),
                       cudaGetErrorName(e));
}

enum engine_code cuda_fail_lost(const struct device_cuda *cuda, struct engine_error *error)
{
    return engine_fail(error, ENGINE_DEVICE_FAILED, "%s: the device does not answer", cuda->base.id);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void cuda_memory_info(struct device *device, int64_t *total, int64_t *free_now)
{
    size_t all = 0, unused = 0;
    if (!cuda_is_lost(device) && (cudaSetDevice(cuda_of(device)->number) != cudaSuccess || cudaMemGetInfo(&unused, &all) != cudaSuccess))
        (void)cudaGetLastError();
    *total = (int64_t)all;
    *free_now = (int64_t)unused;
}

static enum engine_code cuda_alloc(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    void *p = NULL;
    *out = 0;
    if (cuda_is_lost(device))
        return cuda_fail_lost(cuda, error);
    cudaError_t e = cudaSetDevice(cuda->number);
    if (e == cudaSuccess)
        e = cudaMalloc(&p, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        int64_t total, unused;
        (void)cudaGetLastError();
        cuda_memory_info(device, &total, &unused);
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "%s: out of device memory: %zu bytes wanted, %lld free of %lld", device->id,
                           bytes, (long long)unused, (long long)total);
    }
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "taking device memory", error);
    *out = (uint64_t)(uintptr_t)p;
    return ENGINE_OK;
}

static void cuda_free(struct device *device, uint64_t address, size_t bytes)
{
    (void)bytes;
    if (address && !cuda_is_lost(device) &&
        (cudaSetDevice(cuda_of(device)->number) != cudaSuccess || cudaFree(device_pointer(address)) != cudaSuccess))
        (void)cudaGetLastError(); /* the device is lost, and its memory with it */
}

static void *cuda_host_alloc(struct device *device, size_t bytes)
{
    void *p = NULL;
    if (cuda_is_lost(device))
        return NULL;
    if (cudaSetDevice(cuda_of(device)->number) != cudaSuccess ||
        cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocPortable) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    return p;
}

static void cuda_host_free(struct device *device, void *memory, size_t bytes)
{
    (void)bytes;
    if (memory && !cuda_is_lost(device) && (cudaSetDevice(cuda_of(device)->number) != cudaSuccess || cudaFreeHost(memory) != cudaSuccess))
        (void)cudaGetLastError();
}

/* ---- uploads and downloads --------------------------------------------------------------------------------------- */

static struct cuda_lane *lane_lock(struct device_cuda *cuda)
{
    unsigned first = atomic_fetch_add_explicit(&cuda->next_lane, 1, memory_order_relaxed);
    for (unsigned i = 0; i < CUDA_LANES; i++) {
        struct cuda_lane *lane = &cuda->lane[(first + i) % CUDA_LANES];
        if (pthread_mutex_trylock(&lane->lock) == 0)
            return lane;
    }
    pthread_mutex_lock(&cuda->lane[first % CUDA_LANES].lock);
    return &cuda->lane[first % CUDA_LANES];
}

/* Pieces that lie close together at the source cross the link in one go and are spread on the device. */
static cudaError_t upload_spread(struct cuda_lane *lane, uint64_t dst, size_t dst_pitch, const void *src, size_t width, size_t height)
{
    size_t rows = CUDA_BOUNCE_BYTES / width;
    cudaError_t e = cudaSuccess;
    for (size_t i = 0; e == cudaSuccess && i < height; i += rows) {
        size_t n = height - i < rows ? height - i : rows;
        e = cudaMemcpyAsync(device_pointer(lane->bounce), (const char *)src + i * width, n * width, cudaMemcpyHostToDevice, lane->stream);
        if (e == cudaSuccess)
            e = cudaMemcpy2DAsync(device_pointer(dst + i * dst_pitch), dst_pitch, device_pointer(lane->bounce), width, width, n,
                                  cudaMemcpyDeviceToDevice, lane->stream);
    }
    return e;
}

static enum engine_code cuda_upload(struct device *device, uint64_t dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                    size_t height, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    if (width == 0 || height == 0)
        return ENGINE_OK;
    if (cuda_is_lost(device))
        return cuda_fail_lost(cuda, error);
    if (dst_pitch == width && src_pitch == width) {
        width *= height;
        height = 1;
    }
    cudaError_t e = cudaSetDevice(cuda->number);
    struct cuda_lane *lane = lane_lock(cuda);
    bool spread = height > 1 && src_pitch == width && width < DIRECT_PIECE_BYTES;
    if (e == cudaSuccess && spread && !lane->bounce) {
        void *p = NULL;
        e = cudaMalloc(&p, CUDA_BOUNCE_BYTES);
        lane->bounce = e == cudaSuccess ? (uint64_t)(uintptr_t)p : 0;
        spread = lane->bounce != 0;
        if (e == cudaErrorMemoryAllocation) {
            (void)cudaGetLastError();
            e = cudaSuccess; /* slowly, then */
        }
    }
    if (e != cudaSuccess)
        ;
    else if (height == 1)
        e = cudaMemcpyAsync(device_pointer(dst), src, width, cudaMemcpyHostToDevice, lane->stream);
    else if (spread)
        e = upload_spread(lane, dst, dst_pitch, src, width, height);
    else
        e = cudaMemcpy2DAsync(device_pointer(dst), dst_pitch, src, src_pitch, width, height, cudaMemcpyHostToDevice, lane->stream);
    cudaError_t end = cudaStreamSynchronize(lane->stream);
    pthread_mutex_unlock(&lane->lock);
    e = e == cudaSuccess ? end : e;
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "copying to the device", error);
    atomic_fetch_add_explicit(&cuda->bytes_uploaded, width * height, memory_order_relaxed);
    return ENGINE_OK;
}

static enum engine_code cuda_download(struct device *device, void *dst, uint64_t src, size_t bytes, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    if (cuda_is_lost(device))
        return cuda_fail_lost(cuda, error);
    cudaError_t e = cudaSetDevice(cuda->number);
    struct cuda_lane *lane = lane_lock(cuda);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(dst, device_pointer(src), bytes, cudaMemcpyDeviceToHost, lane->stream);
    cudaError_t end = cudaStreamSynchronize(lane->stream);
    pthread_mutex_unlock(&lane->lock);
    e = e == cudaSuccess ? end : e;
    return e == cudaSuccess ? ENGINE_OK : cuda_fail(cuda, e, "copying from the device", error);
}

/* ---- what batches need -------------------------------------------------------------------------------------------- */

/* Sizes of everything that prepare takes on the device. */
struct sizes {
    size_t scratch, tables, arrays, blob, rows, total;
};

static size_t product(size_t a, size_t b)
{
    size_t n;
    return __builtin_mul_overflow(a, b, &n) ? SIZE_MAX : n;
}

static size_t sum(size_t a, size_t b)
{
    size_t n;
    return __builtin_add_overflow(a, b, &n) ? SIZE_MAX : n;
}

static struct sizes sizes_of(const struct device *device, const struct device_limits *limits)
{
    size_t entries = product(product((size_t)limits->adapters, (size_t)limits->dims.experts), KERNEL_PROJECTIONS);
    struct sizes s = {.scratch = forward_bind_scratch(device->kernels, limits, NULL, NULL)};
    s.tables = product(product(entries, sizeof(struct kernel_lora_entry)), (size_t)limits->layers);
    s.arrays = cuda_arrays_bytes((size_t)limits->max_rows, (size_t)limits->max_slots);
    s.blob = s.arrays + CUDA_GATHER_BYTES;
    s.rows = product((size_t)limits->max_rows, (size_t)limits->dims.hidden * sizeof(float) + CUDA_ALIGN);
    s.total = sum(sum(s.scratch, s.tables), sum(product(s.blob, CUDA_DEPTH + 1), product(s.rows, CUDA_DEPTH)));
    return s;
}

static size_t cuda_prepare_bytes(struct device *device, const struct device_limits *limits) { return sizes_of(device, limits).total; }

static enum engine_code make_flight(struct device_cuda *cuda, struct cuda_flight *flight, const struct sizes *s, struct engine_error *error)
{
    struct device *device = &cuda->base;
    enum engine_code code = cuda_alloc(device, s->blob, &flight->blob_device, error);
    if (code == ENGINE_OK)
        code = cuda_alloc(device, s->rows, &flight->rows_device, error);
    if (code != ENGINE_OK)
        return code;
    flight->blob = cuda_host_alloc(device, s->blob);
    flight->run = calloc((size_t)cuda->limits.max_rows, sizeof *flight->run);
    if (!flight->blob || !flight->run)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "%s: out of memory for batches: %zu bytes of pinned memory wanted", device->id,
                           s->blob);
    cudaEvent_t *event[] = {&flight->arrived, &flight->computed, &flight->finished};
    for (size_t i = 0; i < sizeof event / sizeof *event; i++) {
        cudaError_t e = cudaEventCreateWithFlags(event[i], cudaEventDisableTiming);
        if (e != cudaSuccess)
            return cuda_fail(cuda, e, "making events", error);
    }
    return ENGINE_OK;
}

static enum engine_code cuda_prepare(struct device *device, const struct device_limits *limits, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    struct sizes s = sizes_of(device, limits);
    int64_t total, unused;
    /* Loading is over, and with it the use of the lanes' memory for narrow pieces. */
    for (int i = 0; i < CUDA_LANES; i++) {
        pthread_mutex_lock(&cuda->lane[i].lock);
        cuda_free(device, cuda->lane[i].bounce, CUDA_BOUNCE_BYTES);
        cuda->lane[i].bounce = 0;
        pthread_mutex_unlock(&cuda->lane[i].lock);
    }
    cuda_memory_info(device, &total, &unused);
    if (s.total > (uint64_t)unused)
        return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY,
                           "%s: out of device memory: scratch for %d rows and tables of %d adapters take %zu bytes, %lld free of %lld",
                           device->id, limits->max_rows, limits->adapters, s.total, (long long)unused, (long long)total);
    cuda->limits = *limits;
    enum engine_code code = cuda_alloc(device, s.scratch, &cuda->scratch, error);
    if (code == ENGINE_OK)
        code = cuda_alloc(device, s.blob, &cuda->blob, error);
    if (code == ENGINE_OK && s.tables)
        code = cuda_alloc(device, s.tables, &cuda->tables, error);
    if (code == ENGINE_OK)
        code = cuda_alloc(device, sizeof *cuda->probe, &cuda->probe_device, error);
    for (int i = 0; code == ENGINE_OK && i < CUDA_DEPTH; i++)
        code = make_flight(cuda, &cuda->flight[i], &s, error);
    if (code != ENGINE_OK)
        return code;
    cuda->table_stage = cuda_host_alloc(device, CUDA_TABLE_STAGE_BYTES);
    cuda->probe = cuda_host_alloc(device, 2 * sizeof *cuda->probe);
    cuda->graphs = cuda->eager ? NULL : cuda_graphs_create(cuda->number);
    cuda->kernel_stream = kernels_cuda_stream_create(cuda->number, cuda->compute);
    if (!cuda->table_stage || !cuda->probe || !cuda->kernel_stream || (!cuda->eager && !cuda->graphs))
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "%s: out of memory for batches", device->id);
    memset(cuda->probe, 0, 2 * sizeof *cuda->probe);
    cudaError_t e = cudaEventCreateWithFlags(&cuda->mark, cudaEventDisableTiming);
    if (e == cudaSuccess && s.tables)
        e = cudaMemsetAsync(device_pointer(cuda->tables), 0, s.tables, cuda->compute);
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "clearing adapter tables", error);
    code = cuda_await_stream(cuda, cuda->compute, "clearing adapter tables", error);
    if (code != ENGINE_OK)
        return code;
    forward_bind_scratch(device->kernels, limits, device_pointer(cuda->scratch), &cuda->forward);
    device->scratch_bytes = s.total;
    return ENGINE_OK;
}

static void cuda_stats(struct device *device, struct engine_device_stats *out)
{
    struct device_cuda *cuda = cuda_of(device);
    *out = (struct engine_device_stats){
        .bytes_in = atomic_load_explicit(&cuda->bytes_in, memory_order_relaxed),
        .bytes_out = atomic_load_explicit(&cuda->bytes_out, memory_order_relaxed),
        .bytes_uploaded = atomic_load_explicit(&cuda->bytes_uploaded, memory_order_relaxed),
        .graph_captures = cuda->graphs ? cuda_graphs_captures(cuda->graphs) : 0,
    };
    if (cuda->sensors)
        cuda_sensors_read(cuda->sensors, out);
}

/* ---- life ----------------------------------------------------------------------------------------------------------- */

static void destroy_stream(cudaStream_t stream)
{
    if (stream)
        (void)cudaStreamDestroy(stream);
}

static void cuda_destroy(struct device *device)
{
    struct device_cuda *cuda = cuda_of(device);
    if (cuda_is_lost(device)) {
        /* It may still write where it was told to; nothing is given back but what it does not know. */
        cuda_sensors_destroy(cuda->sensors);
        kernels_cpu_stream_destroy(device->host_pool);
        return;
    }
    (void)cudaSetDevice(cuda->number);
    if (cuda->compute)
        (void)cudaStreamSynchronize(cuda->compute);
    if (cuda->mark)
        (void)cudaEventDestroy(cuda->mark);
    cuda_graphs_destroy(cuda->graphs);
    for (int i = 0; i < CUDA_DEPTH; i++) {
        struct cuda_flight *flight = &cuda->flight[i];
        cudaEvent_t event[] = {flight->arrived, flight->computed, flight->finished};
        for (size_t n = 0; n < sizeof event / sizeof *event; n++) {
            if (event[n])
                (void)cudaEventDestroy(event[n]);
        }
        cuda_free(device, flight->blob_device, 0);
        cuda_free(device, flight->rows_device, 0);
        cuda_host_free(device, flight->blob, 0);
        free(flight->run);
    }
    for (int i = 0; i < cuda->lanes; i++) {
        destroy_stream(cuda->lane[i].stream);
        cuda_free(device, cuda->lane[i].bounce, CUDA_BOUNCE_BYTES);
        pthread_mutex_destroy(&cuda->lane[i].lock);
    }
    kernels_cuda_stream_destroy(cuda->kernel_stream);
    destroy_stream(cuda->compute);
    destroy_stream(cuda->copy_in);
    destroy_stream(cuda->copy_out);
    cuda_free(device, cuda->scratch, 0);
    cuda_free(device, cuda->blob, 0);
    cuda_free(device, cuda->tables, 0);
    cuda_free(device, cuda->probe_device, 0);
    cuda_host_free(device, cuda->table_stage, 0);
    cuda_host_free(device, cuda->probe, 0);
    cuda_sensors_destroy(cuda->sensors);
    kernels_cpu_stream_destroy(device->host_pool);
    (void)cudaGetLastError();
    free(cuda);
}

static const struct device_ops cuda_ops = {
    .destroy = cuda_destroy,
    .prepare = cuda_prepare,
    .prepare_bytes = cuda_prepare_bytes,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .memory_info = cuda_memory_info,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .table_write = cuda_table_write,
    .submit = cuda_submit,
    .ready = cuda_ready,
    .wait = cuda_wait,
    .canary = cuda_canary,
    .warm = cuda_warm,
    .stats = cuda_stats,
};

/* How many devices there are; 0 with what is missing in `why`. */
static int count_devices(char *why, size_t why_size)
{
    int devices = 0, driver = 0, runtime = 0;
    cudaError_t e = cudaDriverGetVersion(&driver);
    if (e == cudaSuccess)
        e = cudaRuntimeGetVersion(&runtime);
    if (e == cudaSuccess && driver == 0) {
        snprintf(why, why_size, "this machine has no NVIDIA driver: libcuda.so.1 can't be loaded");
        return 0;
    }
    if (e == cudaSuccess)
        e = cudaGetDeviceCount(&devices);
    (void)cudaGetLastError();
    if (e == cudaErrorInsufficientDriver)
        snprintf(why, why_size, "the NVIDIA driver is too old: it offers CUDA %d.%d, and this build needs %d.%d", driver / 1000,
                 driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else if (e == cudaErrorNoDevice || (e == cudaSuccess && devices == 0))
        snprintf(why, why_size, "the NVIDIA driver finds no GPU (or CUDA_VISIBLE_DEVICES hides it)");
    else if (e != cudaSuccess)
        snprintf(why, why_size, "CUDA can't be used: %s", cudaGetErrorString(e));
    return e == cudaSuccess ? devices : 0;
}

/* The first device that there is code for, or -1. */
static int first_usable(void)
{
    char why[256];
    int devices = count_devices(why, sizeof why);
    for (int i = 0; i < devices; i++) {
        if (kernels_cuda(NULL, i, why, sizeof why))
            return i;
    }
    return -1;
}

bool device_cuda_available(void) { return first_usable() >= 0; }

/* Splits "sm90-eager" and the like. */
static bool parse_isa(const char *isa, char *code, size_t size, bool *eager)
{
    static const char word[] = "eager";
    size_t n = isa ? strlen(isa) : 0, tail = sizeof word - 1;
    *eager = n >= tail && !strcmp(isa + n - tail, word) && (n == tail || isa[n - tail - 1] == '-');
    if (*eager)
        n = n == tail ? 0 : n - tail - 1;
    if (n >= size)
        return false;
    memcpy(code, isa ? isa : "", n);
    code[n] = '\0';
    return true;
}

static enum engine_code make_parts(struct device_cuda *cuda, int threads, struct engine_error *error)
{
    cudaError_t e = cudaSetDevice(cuda->number);
    cudaStream_t *stream[] = {&cuda->compute, &cuda->copy_in, &cuda->copy_out};
    for (size_t i = 0; e == cudaSuccess && i < sizeof stream / sizeof *stream; i++)
        e = cudaStreamCreateWithFlags(stream[i], cudaStreamNonBlocking);
    for (; e == cudaSuccess && cuda->lanes < CUDA_LANES; cuda->lanes++) {
        e = cudaStreamCreateWithFlags(&cuda->lane[cuda->lanes].stream, cudaStreamNonBlocking);
        if (e != cudaSuccess)
            break;
        pthread_mutex_init(&cuda->lane[cuda->lanes].lock, NULL);
    }
    struct cudaDeviceProp properties;
    if (e == cudaSuccess)
        e = cudaGetDeviceProperties(&properties, cuda->number);
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "setting up", error);
    snprintf(cuda->base.name, sizeof cuda->base.name, "%.100s", properties.name);
    char bus_id[32];
    if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, cuda->number) == cudaSuccess)
        cuda->sensors = cuda_sensors_create(bus_id);
    (void)cudaGetLastError();
    cuda->base.host_pool = kernels_cpu_stream_create(threads);
    if (!cuda->base.host_pool)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "--threads: %d threads can't be started", threads);
    cuda->base.threads = kernels_cpu_stream_threads(cuda->base.host_pool);
    return ENGINE_OK;
}

/* Which device it is to be, and the code for it. */
static enum engine_code choose(const struct device_options *options, int *number, bool *eager, const struct kernel_table **kernels,
                               struct engine_error *error)
{
    const char *name = options->device ? options->device : "auto";
    char why[256], code_name[32];
    *number = !strcmp(name, "auto") ? first_usable() : !strncmp(name, "cuda:", 5) ? atoi(name + 5) : 0;
    *kernels = NULL;
    if (!parse_isa(options->isa, code_name, sizeof code_name, eager))
        return engine_fail(error, ENGINE_BAD_OPTION, "--device: \"%.64s\" names no code of the CUDA back end", options->isa);
    if (count_devices(why, sizeof why) > 0)
        *kernels = kernels_cuda(code_name[0] ? code_name : NULL, *number, why, sizeof why);
    if (!*kernels)
        return engine_fail(error, ENGINE_BAD_OPTION, "--device: \"%.64s\" can't be used: %s", name, why);
    return ENGINE_OK;
}

enum engine_code device_cuda_check(const struct device_options *options, struct engine_error *error)
{
    const struct kernel_table *kernels;
    bool eager;
    int number;
    return choose(options, &number, &eager, &kernels, error);
}

enum engine_code device_cuda_create(const struct device_options *options, struct device **out, struct engine_error *error)
{
    const struct kernel_table *kernels;
    bool eager;
    int number;
    enum engine_code code = choose(options, &number, &eager, &kernels, error);
    if (code != ENGINE_OK)
        return code;
    struct device_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the device");
    struct device *device = &cuda->base;
    cuda->number = number;
    cuda->eager = eager;
    device->ops = &cuda_ops;
    device->kernels = kernels;
    device->kind = "cuda";
    device->depth = CUDA_DEPTH;
    device->default_batch_rows = BATCH_ROWS;
    snprintf(device->id, sizeof device->id, "cuda:%d", number);
    code = make_parts(cuda, options->threads, error);
    if (code != ENGINE_OK) {
        cuda_destroy(device);
        return code;
    }
    *out = device;
    return ENGINE_OK;
}
