/* SPDX-License-Identifier: Apache-2.0
 *
 * The runtime: memory, streams, events, graphs. Work is queued and carried out when somebody waits for it or asks after it, by the one
 * thread that is the device; so what runs when is settled by the program and the seed.
 */
#include "internal.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>

#define PROCESSORS 3 /* few, so that blocks have more than one turn */
#define MEMORY_BYTES ((size_t)4 << 30)

struct operation {
    enum { LAUNCH, COPY, SET, RECORD, WAIT } kind;
    struct launch launch;
    void *dst;
    const void *src;
    size_t width, height, dst_pitch, src_pitch;
    int byte;
    struct emulator_event *event;
    uint64_t turn; /* of the event */
};

struct emulator_graph {
    std::vector<operation> operations;
};
struct emulator_graph_exec {
    std::vector<operation> operations;
};

struct emulator_stream {
    std::deque<operation> queue;
    emulator_graph *capture;
    bool blocking; /* waits for the default stream, and it for this one */
};

struct emulator_event {
    uint64_t recorded, done; /* turns */
    double at; /* seconds, of the last one done */
};

static std::recursive_mutex lock; /* of all that follows */
static std::vector<emulator_stream *> streams;
static emulator_stream default_stream = {};
static uint32_t launches;
static std::map<const void *, size_t> limits; /* of dynamic shared memory, where raised */
static size_t memory_used;

static emulator_stream *stream_of(cudaStream_t s) { return s ? s : &default_stream; }

/* ---- errors ------------------------------------------------------------------------------------------------- */

/* The last one of each thread of the host. Not thread-local: the program's thread-local memory is the kernels' shared memory. */
static std::map<std::thread::id, cudaError_t> last_errors;

static cudaError_t result(cudaError_t e)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (e != cudaSuccess && e != cudaErrorNotReady)
        last_errors[std::this_thread::get_id()] = e;
    return e;
}

cudaError_t cudaGetLastError(void)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    cudaError_t e = last_errors[std::this_thread::get_id()];
    last_errors[std::this_thread::get_id()] = cudaSuccess;
    return e;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_text[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};

const char *cudaGetErrorString(cudaError_t e)
{
    for (const auto &t : error_text)
        if (t.error == e)
            return t.text;
    return "unknown error";
}

const char *cudaGetErrorName(cudaError_t e)
{
    for (const auto &t : error_text)
        if (t.error == e)
            return t.name;
    return "cudaErrorUnknown";
}

/* ---- the device ---------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    default: return result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulated device");
    p->major = 9;
    p->multiProcessorCount = PROCESSORS;
    p->totalGlobalMem = MEMORY_BYTES;
    p->sharedMemPerBlockOptin = SHARED_BYTES;
    p->l2CacheSize = 1 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device)
{
    snprintf(id, (size_t)size, "0000:00:00.0");
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Carries out the first operations of a stream; consecutive launches together, as they may overlap. False: it waits for an event. */
static bool stream_step(emulator_stream *s)
{
    operation &o = s->queue.front();
    switch (o.kind) {
    case operation::LAUNCH: {
        std::vector<struct launch *> run;
        size_t n = 0;
        while (n < s->queue.size() && s->queue[n].kind == operation::LAUNCH && (n == 0 || s->queue[n].launch.overlap)) {
            s->queue[n].launch.number = ++launches;
            run.push_back(&s->queue[n].launch);
            n++;
        }
        emulator_run(run);
        s->queue.erase(s->queue.begin(), s->queue.begin() + (ptrdiff_t)n);
        return true;
    }
    case operation::COPY:
        for (size_t i = 0; i < o.height; i++)
            memcpy((uint8_t *)o.dst + i * o.dst_pitch, (const uint8_t *)o.src + i * o.src_pitch, o.width);
        break;
    case operation::SET: memset(o.dst, o.byte, o.width); break;
    case operation::RECORD:
        o.event->done = o.turn;
        o.event->at = seconds();
        break;
    case operation::WAIT:
        if (o.event->done < o.turn)
            return false;
        break;
    }
    s->queue.pop_front();
    return true;
}

static void drain_all(void)
{
    std::vector<emulator_stream *> all = streams;
    all.push_back(&default_stream);
    for (bool some = true; some;) {
        some = false;
        for (emulator_stream *s : all)
            if (!s->queue.empty() && stream_step(s))
                some = true;
    }
    for (emulator_stream *s : all)
        if (!s->queue.empty())
            emulator_fatal("a stream waits for an event that is never recorded");
}

/* The thread that is the device. */
static std::mutex &device_lock = *new std::mutex; /* never ended: the device outlives main */
static std::condition_variable &device_asked = *new std::condition_variable, &device_done = *new std::condition_variable;
static uint64_t asked, done;

static void device_main(void)
{
    std::unique_lock<std::mutex> hold(device_lock);
    for (;;) {
        device_asked.wait(hold, [] { return asked > done; });
        const uint64_t upto = asked;
        hold.unlock();
        drain_all();
        hold.lock();
        done = upto;
        device_done.notify_all();
    }
}

/* All that has been queued is carried out. The caller holds `lock`. */
static void drain(void)
{
    static std::thread *device;
    std::unique_lock<std::mutex> hold(device_lock);
    if (!device) {
        device = new std::thread(device_main);
        device->detach();
    }
    const uint64_t mine = ++asked;
    device_asked.notify_one();
    device_done.wait(hold, [mine] { return done >= mine; });
}

cudaError_t cudaDeviceSynchronize(void)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    drain();
    return cudaSuccess;
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(void **p, size_t bytes, bool counted)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (bytes == 0) {
        *p = NULL;
        return cudaSuccess;
    }
    if (counted && memory_used + bytes > MEMORY_BYTES)
        return result(cudaErrorMemoryAllocation);
    /* Room behind it, so that what lies past the end belongs to nobody. */
    *p = aligned_alloc(512, (bytes + 511 + 512) / 512 * 512);
    if (!*p)
        return result(cudaErrorMemoryAllocation);
    memset(*p, 0xd7, bytes);
    memory_add(*p, bytes);
    if (counted)
        memory_used += bytes;
    return cudaSuccess;
}

static cudaError_t release(void *p, bool counted)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (!p)
        return cudaSuccess;
    const size_t bytes = memory_size(p);
    if (!bytes)
        return result(cudaErrorInvalidValue);
    drain();
    memory_remove(p);
    if (counted)
        memory_used -= bytes;
    free(p);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate(p, bytes, true); }
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream) { return allocate(p, bytes, true); }
cudaError_t cudaFree(void *p) { return release(p, true); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return release(p, true); }
cudaError_t cudaMallocHost(void **p, size_t bytes) { return allocate(p, bytes, false); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return allocate(p, bytes, false); }
cudaError_t cudaFreeHost(void *p) { return release(p, false); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    *free_bytes = MEMORY_BYTES - memory_used;
    *total = MEMORY_BYTES;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p)
{
    *a = {memory_size(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered, 0, (void *)p, (void *)p};
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = NULL;
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) { return cudaSuccess; }

/* ---- streams ------------------------------------------------------------------------------------------------- */

static cudaError_t enqueue(cudaStream_t stream, const operation &o)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    emulator_stream *s = stream_of(stream);
    if (s->capture) {
        s->capture->operations.push_back(o);
        return cudaSuccess;
    }
    /* The default stream and blocking ones wait for each other. */
    if (s == &default_stream || s->blocking) {
        for (emulator_stream *t : streams)
            if (t != s && (s == &default_stream ? t->blocking : false) && !t->queue.empty())
                drain();
        if (s != &default_stream && !default_stream.queue.empty())
            drain();
    }
    s->queue.push_back(o);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    *stream = new emulator_stream();
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    drain();
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == stream)
            streams.erase(streams.begin() + (ptrdiff_t)i);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaDeviceSynchronize(); }

cudaError_t emulator_function_limit(const void *kernel, int bytes)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (bytes < 0 || bytes > SHARED_BYTES)
        return result(cudaErrorInvalidValue);
    limits[kernel] = (size_t)bytes;
    return cudaSuccess;
}

cudaError_t emulator_launch(const cudaLaunchConfig_t *config, const emulator_call *call)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    std::shared_ptr<const void> arguments(call->arguments, call->end);
    const dim3 g = config->gridDim, b = config->blockDim;
    const uint64_t threads = (uint64_t)b.x * b.y * b.z;
    auto limit = limits.find(call->kernel);
    if (!g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535 || !threads || threads > 1024 ||
        config->dynamicSmemBytes > (limit == limits.end() ? (size_t)48 * 1024 : limit->second))
        return result(cudaErrorInvalidValue);
    operation o = {};
    o.kind = operation::LAUNCH;
    o.launch.grid = g;
    o.launch.block_dim = b;
    o.launch.dynamic = config->dynamicSmemBytes;
    o.launch.call = *call;
    o.launch.arguments = arguments;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            o.launch.overlap = config->attrs[i].val.programmaticStreamSerializationAllowed;
    return enqueue(config->stream, o);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream)
{
    operation o = {};
    o.kind = operation::COPY;
    o.dst = dst;
    o.src = src;
    o.width = width;
    o.height = height;
    o.dst_pitch = dst_pitch;
    o.src_pitch = src_pitch;
    return enqueue(stream, o);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(dst, bytes, src, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    cudaMemcpyAsync(dst, src, bytes, kind, NULL);
    return cudaDeviceSynchronize();
}

cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t stream)
{
    operation o = {};
    o.kind = operation::SET;
    o.dst = dst;
    o.byte = byte;
    o.width = bytes;
    return enqueue(stream, o);
}

cudaError_t cudaMemset(void *dst, int byte, size_t bytes)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    cudaMemsetAsync(dst, byte, bytes, NULL);
    return cudaDeviceSynchronize();
}

/* ---- events -------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = new emulator_event();
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    drain();
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    operation o = {};
    o.kind = operation::RECORD;
    o.event = event;
    o.turn = ++event->recorded;
    return enqueue(stream, o);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    operation o = {};
    o.kind = operation::WAIT;
    o.event = event;
    o.turn = event->recorded;
    return enqueue(stream, o);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaDeviceSynchronize(); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaDeviceSynchronize(); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    drain();
    *milliseconds = (float)((end->at - begin->at) * 1e3);
    return cudaSuccess;
}

/* ---- graphs -------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    emulator_stream *s = stream_of(stream);
    if (s == &default_stream || s->capture)
        return result(cudaErrorInvalidValue);
    s->capture = new emulator_graph();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    emulator_stream *s = stream_of(stream);
    *graph = s->capture;
    s->capture = NULL;
    return *graph ? cudaSuccess : result(cudaErrorInvalidValue);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    *exec = new emulator_graph_exec{graph->operations};
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) { return cudaSuccess; }

/* A graph begins when what came before on the stream has ended: its first launch does not overlap. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    bool first = true;
    for (operation o : exec->operations) {
        if (first)
            o.launch.overlap = false;
        first = false;
        enqueue(stream, o);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    drain();
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}
