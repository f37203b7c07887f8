/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches on the CUDA device.
 *
 * Rows of a batch lie where the requests were received, in host memory. Long contiguous runs of them are copied straight from there
 * and back, short ones are gathered behind the batch's arrays in the flight's blob and travel with these in one copy. On the device a
 * row's output takes the place of its input, which nobody reads any more by then.
 *
 * Forwards find the arrays at one address, as captured ones must. A small batch does everything on the compute stream: its blob goes
 * there directly, and kernels read its long runs and write all its outputs over the link, where they lie in host memory: each saves a
 * copy and the start of it. A large one, and a small one behind another, sends its blob and rows ahead on copy_in, beside the forward before
 * it; the compute stream waits for them and moves the arrays into place; copy_out takes the outputs home beside the next forward. A flight's
 * memory is used again only after its batch has been waited for, and the place of the arrays is written in the order of the compute
 * stream.
 *
 * Measured on an H200 with 64 experts, 8 a row, of 2048 x 1024, for batches alone: outputs written over the link take 3.3 us off 1 row, 6.8
 * off 32, 7.1 off 128; runs read over it another 3.1 off 8 rows, 8.0 off 32, 2.4 off 128. From 512 rows on copies beside the next forward
 * are better: 253 us a batch with two of 512 in flight, 290 with outputs written over the link and 330 with rows read over it, too; 853,
 * 1106 and 1427 with 4096 rows. Of 8 clients with 32 rows each over HTTP, 128 experts of 2048 x 768, whose batches of about 128 rows followed
 * each other so, 349,000 and 356,000 rows a second were computed over the link, 383,000 and 394,000 with copies. A large batch alone has its copies exposed: 1473 us with 4096 rows. Two windows of half the size would
 * save 153 of them (40 of 825 with 2048 rows, but lose 120 of 485 with 1024), as long as reading the weights twice costs less than
 * that; not done, being little beside what so many rows take over HTTP.
 */
#include "engine/device_cuda.h"
#include "engine/clock.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    DIRECT_BYTES = 32 * 1024, /* runs from this on are copied straight: starting a copy costs as much as gathering so many bytes */
    OVERLAP_BYTES = 1 << 20, /* batches from this on use the copying streams: their copies outweigh what crossing streams costs */
    BESIDE_BYTES = 64 * 1024, /* as do those from this on that go behind another, while which they cross */
    POLL_US = 50,
    WARM_DECODE_ROWS = 1024, /* larger batches of the decode path only come about by merging */
};
#define LIMIT_NS INT64_C(10000000000) /* how long the device may take for next to nothing */
#define LIMIT_FLOPS_NS 1000.0 /* and for a batch, beyond that: as if it reached 1 TFLOP/s, of the 40 and more that any of them does */
#define SPIN_NS 50000000 /* how long its answer is watched for without a pause */

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t cuda_arrays_bytes(size_t rows, size_t slots)
{
    return round_up(rows * sizeof(struct kernel_row) + slots * (2 * sizeof(int32_t) + sizeof(float)), CUDA_ALIGN);
}

static struct cuda_flight *newest_free(struct device_cuda *cuda) { return &cuda->flight[(cuda->first + cuda->flying) % CUDA_DEPTH]; }

static size_t row_bytes(const struct device_cuda *cuda, const struct kernel_row *row)
{
    return (size_t)cuda->limits.dims.hidden * dtype_size((enum dtype)row->dtype);
}

void cuda_bind_batch(const struct device_cuda *cuda, int32_t layer_index, const struct kernel_weights *weights, enum kernel_path path,
                     bool adapted, int32_t rows, int32_t slots, struct kernel_forward *f)
{
    size_t layer_entries = (size_t)cuda->limits.adapters * (size_t)cuda->limits.dims.experts * KERNEL_PROJECTIONS;
    uintptr_t at = cuda->blob, slot = at + (size_t)rows * sizeof(struct kernel_row);
    *f = cuda->forward;
    f->weights = *weights;
    f->path = path;
    f->batch = (struct kernel_batch){
        .rows = rows,
        .slots = slots,
        .row = (const struct kernel_row *)at,
        .slot_row = (const int32_t *)slot,
        .slot_expert = (const int32_t *)slot + slots,
        .slot_weight = (const float *)(slot + 2 * (size_t)slots * sizeof(int32_t)),
    };
    if (adapted) {
        f->lora.adapters = cuda->limits.adapters;
        f->lora.entry = (const struct kernel_lora_entry *)(uintptr_t)cuda->tables + (size_t)layer_index * layer_entries;
    }
}

/* ---- patience ------------------------------------------------------------------------------------------------- */

/* Waits until `event` has happened, at most to `until_ns`: then the device is lost, and the result cudaErrorNotReady. A driver's own waiting
 * has no such end. The clock is read first, so that a process that was stopped for long finds what was done meanwhile. */
static cudaError_t await(struct device_cuda *cuda, cudaEvent_t event, int64_t until_ns)
{
    int64_t begin = clock_now_ns();
    for (;;) {
        int64_t now = clock_now_ns();
        cudaError_t e = cudaEventQuery(event);
        if (e != cudaErrorNotReady)
            return e;
        (void)cudaGetLastError();
        if (now > until_ns) {
            atomic_store(&cuda->lost, true);
            return e;
        }
        if (now - begin < SPIN_NS)
            sched_yield();
        else
            usleep(POLL_US);
    }
}

enum engine_code cuda_await_stream(struct device_cuda *cuda, cudaStream_t stream, const char *doing, struct engine_error *error)
{
    int64_t until = clock_now_ns() + LIMIT_NS;
    for (int i = 0; i < cuda->flying; i++)
        until += cuda->flight[(cuda->first + i) % CUDA_DEPTH].limit_ns;
    cudaError_t e = cudaEventRecord(cuda->mark, stream);
    if (e == cudaSuccess)
        e = await(cuda, cuda->mark, until);
    if (e == cudaErrorNotReady)
        return engine_fail(error, ENGINE_DEVICE_FAILED, "%s: the device does not answer: %s has not ended", cuda->base.id, doing);
    return e == cudaSuccess ? ENGINE_OK : cuda_fail(cuda, e, doing, error);
}

static int64_t batch_limit_ns(const struct device_cuda *cuda, const struct kernel_batch *batch)
{
    const struct kernel_dims *d = &cuda->limits.dims;
    return LIMIT_NS + (int64_t)(6.0 * batch->slots * d->hidden_pad * d->inter_pad / LIMIT_FLOPS_NS);
}

/* A batch behind another one begins when that one has been waited for. */
static int64_t flight_until_ns(const struct device_cuda *cuda, const struct cuda_flight *flight)
{
    return (flight->submitted_ns > cuda->last_finish_ns ? flight->submitted_ns : cuda->last_finish_ns) + flight->limit_ns;
}

/* ---- submit --------------------------------------------------------------------------------------------------- */

/* A batch on its way. */
struct passage {
    struct device_cuda *cuda;
    struct cuda_flight *flight;
    const struct kernel_batch *batch;
    int32_t rows, slots; /* as the forward sees them */
    size_t arrays, gathered; /* bytes in the blob: of its head, and behind that */
    size_t direct; /* bytes taken of rows_device */
    bool overlap;
    bool home; /* kernels use host memory where they can */
    cudaStream_t in, out;
    cudaError_t error;
};

static void try_copy(struct passage *p, void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (p->error == cudaSuccess)
        p->error = cudaMemcpyAsync(dst, src, bytes, kind, stream);
}

static void try_call(struct passage *p, cudaError_t e)
{
    if (p->error == cudaSuccess)
        p->error = e;
}

/* The end of the run of rows that begins at `t`: each lies right behind the one before, in and out. */
static int32_t run_end(const struct passage *p, int32_t t, size_t *bytes)
{
    const struct kernel_row *row = p->batch->row;
    uint64_t in = row[t].in, out = row[t].out;
    *bytes = 0;
    for (; t < p->batch->rows && row[t].in == in + *bytes && row[t].out == out + *bytes; t++)
        *bytes += row_bytes(p->cuda, &row[t]);
    return t;
}

/* Writes rows [t, end) of the forward, which lie from `in` and `out` on. */
static void write_rows(const struct passage *p, int32_t t, int32_t end, uint64_t in, uint64_t out)
{
    struct kernel_row *to = (struct kernel_row *)p->flight->blob;
    for (; t < end; t++) {
        size_t bytes = row_bytes(p->cuda, &p->batch->row[t]);
        to[t] = p->batch->row[t];
        to[t].in = in;
        to[t].out = out;
        in += bytes;
        out += bytes;
    }
}

/* Whether kernels may go there, and in wide pieces: addresses of pinned memory are the same for both sides. */
static bool device_reaches(uint64_t host)
{
    struct cudaPointerAttributes a;
    if (host % 16 != 0)
        return false;
    if (cudaPointerGetAttributes(&a, (const void *)(uintptr_t)host) == cudaSuccess && a.type == cudaMemoryTypeHost)
        return true;
    (void)cudaGetLastError();
    return false;
}

/* Puts all rows on their way, or into the blob. */
static void send_rows(struct passage *p)
{
    struct cuda_flight *flight = p->flight;
    uint64_t gather_base = (p->overlap ? flight->blob_device : p->cuda->blob) + p->arrays;
    flight->runs = 0;
    for (int32_t t = 0, end; t < p->batch->rows; t = end) {
        size_t bytes;
        end = run_end(p, t, &bytes);
        const void *in = (const void *)(uintptr_t)p->batch->row[t].in;
        if (bytes < DIRECT_BYTES && p->gathered + bytes <= CUDA_GATHER_BYTES) {
            unsigned char *place = flight->blob + p->arrays + p->gathered;
            memcpy(place, in, bytes);
            write_rows(p, t, end, gather_base + p->gathered, p->home ? (uint64_t)(uintptr_t)place : gather_base + p->gathered);
            flight->run[flight->runs++] =
                (struct cuda_run){.out = (void *)(uintptr_t)p->batch->row[t].out, .at = p->arrays + p->gathered, .bytes = bytes};
            p->gathered = round_up(p->gathered + bytes, 16);
        } else {
            uint64_t at = flight->rows_device + p->direct;
            bool near_in = p->home && device_reaches(p->batch->row[t].in), near_out = p->home && device_reaches(p->batch->row[t].out);
            if (!near_in)
                try_copy(p, (void *)(uintptr_t)at, in, bytes, cudaMemcpyHostToDevice, p->in);
            write_rows(p, t, end, near_in ? p->batch->row[t].in : at, near_out ? p->batch->row[t].out : at);
            p->direct = round_up(p->direct + bytes, CUDA_ALIGN);
        }
    }
}

/* The arrays in the blob, up to the sizes that the forward sees. */
static void write_arrays(const struct passage *p)
{
    const struct kernel_batch *b = p->batch;
    struct kernel_row *row = (struct kernel_row *)p->flight->blob;
    int32_t *slot_row = (int32_t *)(row + p->rows), *slot_expert = slot_row + p->slots;
    float *slot_weight = (float *)(slot_expert + p->slots);
    size_t n = (size_t)b->slots;
    for (int32_t t = b->rows; t < p->rows; t++)
        row[t] = (struct kernel_row){.dtype = DTYPE_BF16, .adapter = -1, .first_slot = b->slots};
    memcpy(slot_row, b->slot_row, n * sizeof *slot_row);
    memcpy(slot_expert, b->slot_expert, n * sizeof *slot_expert);
    memcpy(slot_weight, b->slot_weight, n * sizeof *slot_weight);
    for (int32_t i = b->slots; i < p->slots; i++) {
        slot_row[i] = b->rows - 1;
        slot_expert[i] = -1;
        slot_weight[i] = 0;
    }
}

/* Brings the blob's arrays to where forwards look for them, and its gathered rows to where the arrays say. */
static void send_blob(struct passage *p)
{
    struct cuda_flight *flight = p->flight;
    void *place = (void *)(uintptr_t)p->cuda->blob;
    size_t bytes = p->arrays + p->gathered;
    if (!p->overlap) {
        try_copy(p, place, flight->blob, bytes, cudaMemcpyHostToDevice, p->cuda->compute);
        return;
    }
    void *ahead = (void *)(uintptr_t)flight->blob_device;
    try_copy(p, ahead, flight->blob, bytes, cudaMemcpyHostToDevice, p->in);
    try_call(p, cudaEventRecord(flight->arrived, p->in));
    try_call(p, cudaStreamWaitEvent(p->cuda->compute, flight->arrived, 0));
    try_copy(p, place, ahead, p->arrays, cudaMemcpyDeviceToDevice, p->cuda->compute);
}

static void run_forward(struct passage *p, const struct device_batch *batch)
{
    struct device_cuda *cuda = p->cuda;
    struct kernel_forward f;
    cudaGraphExec_t exec;
    if (p->error != cudaSuccess)
        return;
    cuda_bind_batch(cuda, batch->layer_index, &batch->weights, batch->path, batch->adapted, p->rows, p->slots, &f);
    if (!cuda->eager) {
        p->error = cuda_graphs_find(cuda->graphs, cuda->base.kernels, batch->layer_index, &f, &exec);
        if (p->error == cudaSuccess) {
            p->error = cudaGraphLaunch(exec, cuda->compute);
            return;
        }
        if (p->error != cudaErrorMemoryAllocation)
            return;
        (void)cudaGetLastError(); /* no memory for one more graph: launches need none */
    }
    enum kernel_status status = forward_run(cuda->base.kernels, cuda->kernel_stream, &f);
    p->error = status == KERNEL_OK ? cudaSuccess : cudaGetLastError();
    if (status != KERNEL_OK && p->error == cudaSuccess)
        p->error = cudaErrorUnknown;
}

/* The outputs, over the same ways. */
static void fetch_rows(struct passage *p)
{
    struct cuda_flight *flight = p->flight;
    if (p->overlap) {
        try_call(p, cudaEventRecord(flight->computed, p->cuda->compute));
        try_call(p, cudaStreamWaitEvent(p->out, flight->computed, 0));
    }
    if (p->gathered && !p->home) {
        uint64_t from = (p->overlap ? flight->blob_device : p->cuda->blob) + p->arrays;
        try_copy(p, flight->blob + p->arrays, (const void *)(uintptr_t)from, p->gathered, cudaMemcpyDeviceToHost, p->out);
    }
    const struct kernel_row *sent = (const struct kernel_row *)flight->blob;
    uint64_t direct_end = flight->rows_device + p->direct;
    for (int32_t t = 0, end; t < p->batch->rows; t = end) {
        size_t bytes;
        end = run_end(p, t, &bytes);
        if (sent[t].out >= flight->rows_device && sent[t].out < direct_end)
            try_copy(p, (void *)(uintptr_t)p->batch->row[t].out, (const void *)(uintptr_t)sent[t].out, bytes, cudaMemcpyDeviceToHost,
                     p->out);
    }
    try_call(p, cudaEventRecord(flight->finished, p->out));
}

enum engine_code cuda_submit(struct device *device, const struct device_batch *batch, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    const struct kernel_batch *b = &batch->batch;
    struct passage p = {.cuda = cuda, .flight = newest_free(cuda), .batch = b, .rows = b->rows, .slots = b->slots};
    if (cuda_is_lost(device))
        return cuda_fail_lost(cuda, error);
    if (cuda->flying == CUDA_DEPTH || b->rows < 1 || b->rows > cuda->limits.max_rows || b->slots < 0 || b->slots > cuda->limits.max_slots ||
        (batch->adapted && !cuda->tables))
        return engine_fail(error, ENGINE_INTERNAL, "%s: a batch of %d rows and %d slots behind %d others is out of bounds", device->id,
                           b->rows, b->slots, cuda->flying);
    if (!cuda->eager) {
        p.rows = cuda_bucket(b->rows, cuda->limits.max_rows);
        p.slots = cuda_bucket(b->slots, cuda->limits.max_slots);
    }
    p.arrays = cuda_arrays_bytes((size_t)p.rows, (size_t)p.slots);
    size_t bytes = p.arrays;
    for (int32_t t = 0; t < b->rows; t++)
        bytes += row_bytes(cuda, &b->row[t]);
    p.overlap = bytes >= (cuda->flying > 0 ? BESIDE_BYTES : OVERLAP_BYTES);
    p.home = !p.overlap && cuda->limits.dims.hidden % 8 == 0; /* every row on a multiple of 16 bytes */
    p.in = p.overlap ? cuda->copy_in : cuda->compute;
    p.out = p.overlap ? cuda->copy_out : cuda->compute;
    p.error = cudaSetDevice(cuda->number);
    send_rows(&p);
    write_arrays(&p);
    send_blob(&p);
    run_forward(&p, batch);
    fetch_rows(&p);
    if (p.error != cudaSuccess) {
        /* Nothing may touch the caller's memory any more once he knows. */
        enum engine_code code = ENGINE_OK;
        cudaStream_t stream[] = {p.in, cuda->compute, p.out};
        for (int i = 0; code == ENGINE_OK && i < 3; i++)
            code = cuda_await_stream(cuda, stream[i], "starting a batch", error);
        return code != ENGINE_OK ? code : cuda_fail(cuda, p.error, "starting a batch", error);
    }
    cuda->flying++;
    p.flight->rows = b->rows;
    p.flight->layer_index = batch->layer_index;
    p.flight->submitted_ns = clock_now_ns();
    p.flight->limit_ns = batch_limit_ns(cuda, b);
    atomic_fetch_add_explicit(&cuda->bytes_in, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&cuda->bytes_out, bytes - p.arrays, memory_order_relaxed);
    return ENGINE_OK;
}

bool cuda_ready(struct device *device)
{
    struct device_cuda *cuda = cuda_of(device);
    if (cuda->flying == 0 || cuda_is_lost(device))
        return true;
    const struct cuda_flight *flight = &cuda->flight[cuda->first];
    int64_t now = clock_now_ns();
    cudaError_t e = cudaEventQuery(flight->finished);
    if (e == cudaSuccess)
        return true;
    (void)cudaGetLastError();
    return e != cudaErrorNotReady || now > flight_until_ns(cuda, flight); /* wait will say what it is */
}

enum engine_code cuda_wait(struct device *device, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    struct cuda_flight *flight = &cuda->flight[cuda->first];
    bool lost = cuda_is_lost(device);
    cudaError_t e = lost ? cudaErrorNotReady : await(cuda, flight->finished, flight_until_ns(cuda, flight));
    cuda->first = (cuda->first + 1) % CUDA_DEPTH;
    cuda->flying--;
    cuda->last_finish_ns = clock_now_ns();
    if (lost)
        return cuda_fail_lost(cuda, error);
    if (e == cudaErrorNotReady)
        return engine_fail(error, ENGINE_DEVICE_FAILED,
                           "%s: the device does not answer: a batch of %d rows of layer index %d, begun %.1f s ago, has not ended",
                           device->id, flight->rows, flight->layer_index, (double)(cuda->last_finish_ns - flight->submitted_ns) * 1e-9);
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "computing a batch", error);
    for (int32_t i = 0; i < flight->runs; i++)
        memcpy(flight->run[i].out, flight->blob + flight->run[i].at, flight->run[i].bytes);
    return ENGINE_OK;
}

/* ---- adapter tables -------------------------------------------------------------------------------------------- */

enum engine_code cuda_table_write(struct device *device, int32_t layer_index, size_t first, size_t count,
                                  const struct kernel_lora_entry *entries, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    size_t per_layer = (size_t)cuda->limits.adapters * (size_t)cuda->limits.dims.experts * KERNEL_PROJECTIONS;
    if (layer_index < 0 || layer_index >= cuda->limits.layers || first > per_layer || count > per_layer - first)
        return engine_fail(error, ENGINE_INTERNAL, "adapter table: entries %zu..%zu of layer %d lie outside its %zu", first, first + count,
                           layer_index, per_layer);
    if (cuda_is_lost(device))
        return cuda_fail_lost(cuda, error);
    uint64_t to = cuda->tables + ((size_t)layer_index * per_layer + first) * sizeof *entries;
    const unsigned char *from = (const unsigned char *)entries;
    size_t left = count * sizeof *entries;
    cudaError_t e = cudaSetDevice(cuda->number);
    while (e == cudaSuccess && left > 0) {
        if (cuda->table_used == CUDA_TABLE_STAGE_BYTES) {
            enum engine_code code = cuda_await_stream(cuda, cuda->compute, "writing adapter tables", error);
            if (code != ENGINE_OK)
                return code;
            cuda->table_used = 0; /* what was staged has been read */
            continue;
        }
        size_t bytes = CUDA_TABLE_STAGE_BYTES - cuda->table_used;
        bytes = bytes < left ? bytes : left;
        unsigned char *stage = cuda->table_stage + cuda->table_used;
        memcpy(stage, from, bytes);
        e = cudaMemcpyAsync((void *)(uintptr_t)to, stage, bytes, cudaMemcpyHostToDevice, cuda->compute);
        cuda->table_used += bytes;
        from += bytes;
        to += bytes;
        left -= bytes;
    }
    return e == cudaSuccess ? ENGINE_OK : cuda_fail(cuda, e, "writing an adapter table", error);
}

/* ---- the canary ------------------------------------------------------------------------------------------------- */

/* Sends a number through the device and back, and has the first kernel of a forward run over a row that fills batches up: copies alone
 * are done by engines of their own, and would go on beside multiprocessors that don't. A device that answers nothing at all counts as
 * lost, too. */
enum engine_code cuda_canary(struct device *device, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    struct cuda_probe *sent = &cuda->probe[0], *back = &cuda->probe[1];
    struct cuda_probe *there = (struct cuda_probe *)(uintptr_t)cuda->probe_device;
    struct kernel_forward f = cuda->forward;
    if (cuda_is_lost(device))
        return cuda_fail_lost(cuda, error);
    sent->number++;
    sent->row = (struct kernel_row){.dtype = DTYPE_BF16, .adapter = -1};
    f.batch = (struct kernel_batch){.rows = 1, .row = &there->row};
    cudaError_t e = cudaSetDevice(cuda->number);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(there, sent, sizeof *sent, cudaMemcpyHostToDevice, cuda->compute);
    if (e == cudaSuccess && device->kernels->enter(cuda->kernel_stream, &f) != KERNEL_OK)
        e = cudaGetLastError();
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(back, there, sizeof *back, cudaMemcpyDeviceToHost, cuda->compute);
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "probing the device", error);
    enum engine_code code = cuda_await_stream(cuda, cuda->compute, "a probe", error);
    if (code == ENGINE_OK && back->number != sent->number)
        code = engine_fail(error, ENGINE_DEVICE_FAILED, "%s: the device returned %u for %u", device->id, back->number, sent->number);
    return code;
}

/* ---- warming ----------------------------------------------------------------------------------------------------- */

/* Captures what requests of the checkpoint's own top-k lead to, smallest batches first, as far as graphs are kept. */
enum engine_code cuda_warm(struct device *device, int32_t layer_index, const struct kernel_weights *weights, struct engine_error *error)
{
    struct device_cuda *cuda = cuda_of(device);
    const struct device_limits *limits = &cuda->limits;
    int32_t k = limits->max_slots / limits->max_rows, decode = device->kernels->decode_rows;
    if (cuda->eager)
        return ENGINE_OK;
    cudaError_t e = cudaSetDevice(cuda->number);
    if (e != cudaSuccess)
        return cuda_fail(cuda, e, "capturing forwards", error);
    for (int32_t rows = 1, last = 0; rows != last; last = rows, rows = cuda_bucket(rows + 1, limits->max_rows)) {
        int32_t slots = cuda_bucket((int32_t)((int64_t)rows * (k > 0 ? k : 1)), limits->max_slots);
        for (int variant = 0; variant < 4; variant++) {
            enum kernel_path path = variant & 1 ? KERNEL_PREFILL : KERNEL_DECODE;
            bool adapted = variant & 2;
            struct kernel_forward f;
            cudaGraphExec_t exec;
            if (path == KERNEL_PREFILL ? rows <= decode : rows > WARM_DECODE_ROWS)
                continue;
            if ((adapted && !cuda->tables) || cuda_graphs_room(cuda->graphs) == 0)
                continue;
            cuda_bind_batch(cuda, layer_index, weights, path, adapted, rows, slots, &f);
            e = cuda_graphs_find(cuda->graphs, device->kernels, layer_index, &f, &exec);
            if (e == cudaSuccess)
                e = cudaGraphUpload(exec, cuda->compute);
            if (e == cudaErrorMemoryAllocation) {
                (void)cudaGetLastError();
                return ENGINE_OK; /* the rest is launched without */
            }
            if (e != cudaSuccess)
                return cuda_fail(cuda, e, "capturing a forward", error);
        }
    }
    return cuda_await_stream(cuda, cuda->compute, "capturing forwards", error);
}
