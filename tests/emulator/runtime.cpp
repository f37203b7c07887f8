/* SPDX-License-Identifier: Apache-2.0
 *
 * The runtime: memory, streams, events, graphs.
 *
 * Any thread of the host may call. Work is queued here and carried out by queue.cpp, as late as it may be.
 *
 * Stricter than the runtime: copies from and to pageable memory are as late as all others. Less than the runtime: a capture is of one
 * stream, without events; blocking streams and the default one wait for each other on the host; and of errors there are only wrong arguments,
 * memory that runs out, and faults that tests ask for. What is forbidden while a stream is captured fails and spoils the capture, as far as
 * expertd calls it.
 */
#include "queue.h"

#include <algorithm>
#include <map>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROCESSORS 3 /* few, so that blocks have more than one turn */
#define MEMORY_BYTES ((size_t)4 << 30) /* $EMULATOR_MEMORY instead */
#define CONTEXT_BYTES ((size_t)8 << 20) /* taken before anybody asks */
#define NODE_BYTES 1024 /* of a graph on the device */

struct allocation {
    size_t bytes;
    bool device;
};

static std::map<uintptr_t, allocation> &allocations = *new std::map<uintptr_t, allocation>; /* by begin */
static std::map<const void *, size_t> &limits = *new std::map<const void *, size_t>; /* of dynamic shared memory, where raised */
static size_t memory_total, memory_used;

static emulator_stream *stream_of(cudaStream_t s) { return s ? s : &default_stream; }

/* ---- errors ------------------------------------------------------------------------------------------------- */

/* The last one of each thread of the host. Not thread-local: the program's thread-local memory is the kernels' shared memory. */
static std::map<std::thread::id, cudaError_t> &last_errors = *new std::map<std::thread::id, cudaError_t>;

/* The caller holds `lock`, as of all functions that don't take it. */
static cudaError_t result(cudaError_t e)
{
    if (e != cudaSuccess && e != cudaErrorNotReady)
        last_errors[std::this_thread::get_id()] = e;
    return e;
}

cudaError_t cudaGetLastError(void)
{
    holding hold(lock);
    auto found = last_errors.find(std::this_thread::get_id());
    if (found == last_errors.end())
        return fault;
    cudaError_t e = found->second;
    last_errors.erase(found);
    return fault ? fault : e;
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
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
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

/* What each function does first that needs the device. */
#define BEGIN                                                                                                                              \
    holding hold(lock);                                                                                                                    \
    if (fault)                                                                                                                             \
    return result(fault)

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    BEGIN;
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

static size_t memory_of_device(void)
{
    if (!memory_total) {
        const char *text = getenv("EMULATOR_MEMORY");
        memory_total = text ? (size_t)strtoull(text, NULL, 10) : MEMORY_BYTES;
        memory_used = std::min(memory_total, CONTEXT_BYTES);
    }
    return memory_total;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    BEGIN;
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_BYTES; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    default: return result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    BEGIN;
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulated device");
    p->major = 9;
    p->multiProcessorCount = PROCESSORS;
    p->totalGlobalMem = memory_of_device();
    p->sharedMemPerBlockOptin = SHARED_BYTES;
    p->l2CacheSize = 1 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device)
{
    BEGIN;
    snprintf(id, (size_t)size, "0000:00:00.0");
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* ---- captures ------------------------------------------------------------------------------------------------ */

/* What may not be called by a thread that captures, nor by any other while one captures for all: it fails, and so does the capture. */
static bool forbidden(void)
{
    bool some = false;
    for (emulator_stream *s : streams) {
        if (s->capture && (s->mode == cudaStreamCaptureModeGlobal ||
                           (s->mode == cudaStreamCaptureModeThreadLocal && s->capturer == std::this_thread::get_id())))
            some = s->spoilt = true;
    }
    return some;
}

/* What may never be asked of a stream that is captured. */
static bool captured(emulator_stream *s)
{
    if (s->capture)
        s->spoilt = true;
    return s->capture;
}

cudaError_t cudaDeviceSynchronize(void)
{
    BEGIN;
    bool some = forbidden();
    for (emulator_stream *s : streams)
        some |= captured(s);
    if (some)
        return result(cudaErrorStreamCaptureUnsupported);
    drain(hold);
    return result(fault);
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(void **p, size_t bytes, bool device, bool in_order = false)
{
    BEGIN;
    if (!in_order && forbidden())
        return result(cudaErrorStreamCaptureUnsupported);
    if (bytes == 0) {
        *p = NULL;
        return cudaSuccess;
    }
    if (device && bytes > memory_of_device() - memory_used)
        return result(cudaErrorMemoryAllocation);
    /* Room behind it, so that what lies past the end belongs to nobody. */
    *p = aligned_alloc(512, (bytes + 511 + 512) / 512 * 512);
    if (!*p)
        return result(cudaErrorMemoryAllocation);
    memset(*p, 0xd7, bytes);
    memory_add(*p, bytes, !device || getenv("EMULATOR_FILLED")); /* the host writes its own memory unseen */
    allocations[(uintptr_t)*p] = {bytes, device};
    if (device)
        memory_used += bytes;
    return cudaSuccess;
}

static cudaError_t release(void *p, bool device, bool in_order = false)
{
    BEGIN;
    if (!in_order && forbidden())
        return result(cudaErrorStreamCaptureUnsupported);
    if (!p)
        return cudaSuccess;
    drain(hold);
    if (fault)
        return result(fault);
    auto found = allocations.find((uintptr_t)p);
    if (found == allocations.end() || found->second.device != device)
        return result(cudaErrorInvalidValue);
    memory_remove(p);
    if (device)
        memory_used -= found->second.bytes;
    allocations.erase(found);
    free(p);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate(p, bytes, true); }
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream) { return allocate(p, bytes, true, true); }
cudaError_t cudaFree(void *p) { return release(p, true); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return release(p, true, true); }
cudaError_t cudaMallocHost(void **p, size_t bytes) { return allocate(p, bytes, false); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return allocate(p, bytes, false); }
cudaError_t cudaFreeHost(void *p) { return release(p, false); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    BEGIN;
    *total = memory_of_device();
    *free_bytes = memory_total - memory_used;
    return cudaSuccess;
}

/* Where an address lies; NULL: in none that the runtime gave. */
static const std::pair<const uintptr_t, allocation> *allocation_of(const void *p)
{
    auto after = allocations.upper_bound((uintptr_t)p);
    if (after == allocations.begin() || (uintptr_t)p - std::prev(after)->first >= std::prev(after)->second.bytes)
        return NULL;
    return &*std::prev(after);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p)
{
    BEGIN;
    const auto *found = allocation_of(p);
    *a = {!found ? cudaMemoryTypeUnregistered : found->second.device ? cudaMemoryTypeDevice : cudaMemoryTypeHost, 0, (void *)p, (void *)p};
    if (!found)
        a->devicePointer = NULL;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = NULL;
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) { return cudaSuccess; }

/* ---- streams ------------------------------------------------------------------------------------------------- */

static cudaError_t enqueue(holding &hold, cudaStream_t stream, operation &&o)
{
    emulator_stream *s = stream_of(stream);
    if (s->capture) {
        if (s->spoilt)
            return result(cudaErrorStreamCaptureInvalidated);
        if (o.kind == operation::RECORD || o.kind == operation::WAIT || o.kind == operation::TRAP || o.kind == operation::OCCUPY) {
            s->spoilt = true;
            return result(cudaErrorStreamCaptureUnsupported);
        }
        s->capture->operations.push_back(std::move(o));
        return cudaSuccess;
    }
    /* The default stream and blocking ones wait for each other. */
    if (s == &default_stream) {
        for (size_t i = 0; i < streams.size(); i++)
            if (streams[i]->blocking)
                drain_stream(hold, streams[i]);
    } else if (s->blocking) {
        drain_stream(hold, &default_stream);
    }
    if (fault)
        return result(fault);
    o.number = ++last_number;
    s->queue.push_back(std::move(o));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    BEGIN;
    *stream = new emulator_stream();
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    BEGIN;
    drain_stream(hold, stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    delete stream->capture;
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    BEGIN;
    if (captured(stream_of(stream)) || forbidden())
        return result(cudaErrorStreamCaptureUnsupported);
    drain_stream(hold, stream_of(stream));
    return result(fault);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    BEGIN;
    waiter w = {};
    if (captured(stream_of(stream)) || forbidden())
        return result(cudaErrorStreamCaptureUnsupported);
    w.stream = stream_of(stream);
    w.number = last_number;
    return result(query(hold, w));
}

cudaError_t emulator_function_limit(const void *kernel, int bytes)
{
    BEGIN;
    if (bytes < 0 || bytes > SHARED_BYTES)
        return result(cudaErrorInvalidValue);
    limits[kernel] = (size_t)bytes;
    return cudaSuccess;
}

cudaError_t emulator_launch(const cudaLaunchConfig_t *config, const emulator_call *call)
{
    std::shared_ptr<const void> arguments(call->arguments, call->end);
    BEGIN;
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
    return enqueue(hold, config->stream, std::move(o));
}

/* Memory of the device has to be all of one allocation, memory of the host none of it. */
static bool sound(const void *p, size_t bytes, bool device)
{
    const auto *found = allocation_of(p);
    if (found && (found->second.device || device))
        return found->second.device == device && bytes <= found->first + found->second.bytes - (uintptr_t)p;
    return !device;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream)
{
    BEGIN;
    if (!width || !height)
        return cudaSuccess;
    const bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
               from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (width > dst_pitch || width > src_pitch ||
        (kind != cudaMemcpyDefault &&
         (!sound(dst, (height - 1) * dst_pitch + width, to) || !sound(src, (height - 1) * src_pitch + width, from))))
        return result(cudaErrorInvalidValue);
    operation o = {};
    o.kind = operation::COPY;
    o.dst = dst;
    o.src = src;
    o.width = width;
    o.height = height;
    o.dst_pitch = dst_pitch;
    o.src_pitch = src_pitch;
    return enqueue(hold, stream, std::move(o));
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(dst, bytes, src, bytes, bytes, 1, kind, stream);
}

/* On the default stream, to its end. */
static cudaError_t finish_default(cudaError_t e)
{
    BEGIN;
    if (e != cudaSuccess)
        return e;
    drain_stream(hold, &default_stream);
    return result(fault);
}

static cudaError_t permitted(void)
{
    BEGIN;
    return forbidden() ? result(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind)
{
    cudaError_t e = permitted();
    return e != cudaSuccess ? e : finish_default(cudaMemcpyAsync(dst, src, bytes, kind, NULL));
}

cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t stream)
{
    BEGIN;
    if (!bytes)
        return cudaSuccess;
    if (!sound(dst, bytes, true))
        return result(cudaErrorInvalidValue);
    operation o = {};
    o.kind = operation::SET;
    o.dst = dst;
    o.byte = byte;
    o.width = bytes;
    return enqueue(hold, stream, std::move(o));
}

cudaError_t cudaMemset(void *dst, int byte, size_t bytes)
{
    cudaError_t e = permitted();
    return e != cudaSuccess ? e : finish_default(cudaMemsetAsync(dst, byte, bytes, NULL));
}

/* ---- events -------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    BEGIN;
    *event = new emulator_event{std::make_shared<event_state>()};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    BEGIN;
    delete event;
    return cudaSuccess;
}

static cudaError_t enqueue_event(holding &hold, cudaStream_t stream, cudaEvent_t event, bool record)
{
    operation o = {};
    o.kind = record ? operation::RECORD : operation::WAIT;
    o.event = event->state;
    o.turn = event->state->recorded + record;
    cudaError_t e = enqueue(hold, stream, std::move(o));
    if (e == cudaSuccess && record)
        event->state->recorded++;
    return e;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    BEGIN;
    return enqueue_event(hold, stream, event, true);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    BEGIN;
    return enqueue_event(hold, stream, event, false);
}

/* For what the event was last recorded behind. */
static waiter waiter_of_event(cudaEvent_t event)
{
    waiter w = {};
    w.event = event->state;
    w.turn = event->state->recorded;
    return w;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    BEGIN;
    if (forbidden())
        return result(cudaErrorStreamCaptureUnsupported);
    return result(query(hold, waiter_of_event(event)));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    BEGIN;
    if (forbidden())
        return result(cudaErrorStreamCaptureUnsupported);
    waiter w = waiter_of_event(event);
    await(hold, w);
    return result(fault);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    BEGIN;
    if (begin->state->done < begin->state->recorded || end->state->done < end->state->recorded)
        return result(cudaErrorNotReady);
    *milliseconds = (float)((end->state->at - begin->state->at) * 1e3);
    return cudaSuccess;
}

/* ---- graphs -------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    BEGIN;
    const emulator_stream *s = stream_of(stream);
    *status = !s->capture ? cudaStreamCaptureStatusNone : s->spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    BEGIN;
    emulator_stream *s = stream_of(stream);
    if (s == &default_stream || s->capture)
        return result(cudaErrorStreamCaptureUnsupported);
    s->capture = new emulator_graph();
    s->mode = mode;
    s->spoilt = false;
    s->capturer = std::this_thread::get_id();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    BEGIN;
    emulator_stream *s = stream_of(stream);
    *graph = NULL;
    if (!s->capture)
        return result(cudaErrorInvalidValue);
    if (s->mode != cudaStreamCaptureModeRelaxed && s->capturer != std::this_thread::get_id())
        return result(cudaErrorStreamCaptureWrongThread);
    if (s->spoilt)
        delete s->capture;
    else
        *graph = s->capture;
    s->capture = NULL;
    return *graph ? cudaSuccess : result(cudaErrorStreamCaptureInvalidated);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    BEGIN;
    const size_t bytes = graph->operations.size() * NODE_BYTES;
    if (bytes > memory_of_device() - memory_used)
        return result(cudaErrorMemoryAllocation);
    memory_used += bytes;
    *exec = new emulator_graph_exec{graph->operations};
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    BEGIN;
    return cudaSuccess;
}

/* A graph begins when what came before on the stream has ended: its first launch does not overlap. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    BEGIN;
    bool first = true;
    for (operation o : exec->operations) {
        if (first)
            o.launch.overlap = false;
        first = false;
        cudaError_t e = enqueue(hold, stream, std::move(o));
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    BEGIN;
    memory_used -= exec->operations.size() * NODE_BYTES;
    delete exec; /* what is queued has copies of its own */
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    BEGIN;
    delete graph;
    return cudaSuccess;
}

/* ---- faults -------------------------------------------------------------------------------------------------- */

cudaError_t emulator_trap(cudaStream_t stream)
{
    BEGIN;
    operation o = {};
    o.kind = operation::TRAP;
    return enqueue(hold, stream, std::move(o));
}

cudaError_t emulator_occupy(cudaStream_t stream, double for_seconds)
{
    BEGIN;
    operation o = {};
    o.kind = operation::OCCUPY;
    o.seconds = for_seconds;
    cudaError_t e = enqueue(hold, stream, std::move(o));
    /* It begins now. */
    waiter w = {};
    w.stream = stream_of(stream);
    w.number = last_number;
    w.once = true;
    while (e == cudaSuccess && !occupied() && !reached(w))
        await(hold, w);
    return e;
}
