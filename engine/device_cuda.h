/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the CUDA device share; private to them. device_cuda.c owns memory, uploads and the device's life,
 * device_cuda_batch.c batches, adapter tables and the canary, device_cuda_graph.c captured forwards, device_cuda_sensors.c what
 * the driver's management library tells.
 *
 * A device that stops answering is `lost`: any CUDA call may wait for it then, so that none is made any more, memory is left to the end
 * of the process, and every entry of device_ops fails at once.
 *
 * Streams: `compute` runs every forward and everything that has to be in order with it; `copy_in` and `copy_out` carry the rows of
 * large batches beside it; each lane of uploads has one of its own. Nothing here uses the default stream.
 */
#ifndef EXPERTD_ENGINE_DEVICE_CUDA_H
#define EXPERTD_ENGINE_DEVICE_CUDA_H

#include "engine/device.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

enum {
    CUDA_DEPTH = 2, /* one batch computes while the next one's rows arrive */
    CUDA_LANES = 4, /* uploads at one time */
    CUDA_ALIGN = 256,
    CUDA_BOUNCE_BYTES = 16 << 20, /* of a lane; the pieces of one upload are gathered here and placed on the device */
    CUDA_GATHER_BYTES = 1 << 20, /* of a batch: short runs of rows travel together in one copy of at most this */
    CUDA_TABLE_STAGE_BYTES = 1 << 20,
    CUDA_GRAPHS = 4096, /* captured forwards kept */
};

/* A run of rows whose outputs are copied by hand from a flight's `blob` when it has finished. */
struct cuda_run {
    void *out;
    size_t at, bytes;
};

/* One batch between submit and wait. */
struct cuda_flight {
    unsigned char *blob; /* pinned: the batch's arrays, then gathered rows, which later hold their outputs */
    uint64_t blob_device; /* where it goes when it travels on copy_in */
    uint64_t rows_device; /* long runs of rows, in and out */
    cudaEvent_t arrived, computed, finished;
    struct cuda_run *run; /* [max_rows] gathered ones, to be scattered */
    int32_t runs;
    int32_t rows, layer_index; /* for the message when it is overdue */
    int64_t submitted_ns, limit_ns;
};

/* Uploads of any thread: one at a time through a lane. */
struct cuda_lane {
    pthread_mutex_t lock;
    cudaStream_t stream;
    uint64_t bounce; /* of CUDA_BOUNCE_BYTES, taken when first needed */
};

/* What a canary sends. */
struct cuda_probe {
    struct kernel_row row;
    uint32_t number;
};

struct cuda_graphs;
struct cuda_sensors;

struct device_cuda {
    struct device base;
    int number;
    bool eager; /* no graphs: for tests */
    struct device_limits limits;
    cudaStream_t compute, copy_in, copy_out;
    struct kernel_stream *kernel_stream; /* of compute */
    struct kernel_forward forward; /* scratch bound */
    uint64_t scratch, blob; /* `blob`: where forwards find the batch's arrays */
    uint64_t tables; /* [layers, adapters, experts, KERNEL_PROJECTIONS] of struct kernel_lora_entry; 0 without adapters */
    struct cuda_flight flight[CUDA_DEPTH];
    int first, flying;
    int64_t last_finish_ns; /* when a batch was last waited for */
    cudaEvent_t mark; /* of the engine thread: how far a stream is */
    atomic_bool lost;
    struct cuda_lane lane[CUDA_LANES];
    int lanes; /* made so far */
    atomic_uint next_lane;
    unsigned char *table_stage; /* pinned */
    size_t table_used;
    struct cuda_probe *probe; /* pinned: [0] sent, [1] received */
    uint64_t probe_device;
    struct cuda_graphs *graphs;
    struct cuda_sensors *sensors; /* NULL: none */
    atomic_uint_fast64_t bytes_in, bytes_out, bytes_uploaded;
};

static inline struct device_cuda *cuda_of(struct device *device) { return (struct device_cuda *)device; }

/* Converts a result that is no success, and clears it: running out of memory is not the end, all else is. */
enum engine_code cuda_fail(const struct device_cuda *cuda, cudaError_t e, const char *doing, struct engine_error *error);

static inline bool cuda_is_lost(struct device *device) { return atomic_load_explicit(&cuda_of(device)->lost, memory_order_relaxed); }
/* What everything fails with then. */
enum engine_code cuda_fail_lost(const struct device_cuda *cuda, struct engine_error *error);

/* ---- device_cuda_batch.c: entries of device_ops -------------------------------------------------------------- */

enum engine_code cuda_table_write(struct device *device, int32_t layer_index, size_t first, size_t count,
                                  const struct kernel_lora_entry *entries, struct engine_error *error);
enum engine_code cuda_submit(struct device *device, const struct device_batch *batch, struct engine_error *error);
bool cuda_ready(struct device *device);
enum engine_code cuda_wait(struct device *device, struct engine_error *error);
enum engine_code cuda_canary(struct device *device, struct engine_error *error);
enum engine_code cuda_warm(struct device *device, int32_t layer_index, const struct kernel_weights *weights, struct engine_error *error);

/* [engine thread] Waits for all that was put on a stream, but not for ever. */
enum engine_code cuda_await_stream(struct device_cuda *cuda, cudaStream_t stream, const char *doing, struct engine_error *error);

/* Bytes of the arrays of a batch, as they lie in a blob: rows, slot_row, slot_expert, slot_weight. */
size_t cuda_arrays_bytes(size_t rows, size_t slots);
/* Completes the device's forward for so many rows and slots, whose arrays lie in `blob`. */
void cuda_bind_batch(const struct device_cuda *cuda, int32_t layer_index, const struct kernel_weights *weights, enum kernel_path path,
                     bool adapted, int32_t rows, int32_t slots, struct kernel_forward *f);

/* ---- device_cuda_graph.c -------------------------------------------------------------------------------------- */

/* The count that a graph is captured for: the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds n, and at most `most`. */
int32_t cuda_bucket(int32_t n, int32_t most);

struct cuda_graphs *cuda_graphs_create(int device);
void cuda_graphs_destroy(struct cuda_graphs *graphs); /* NULL is fine */
/* A captured forward for f, which is complete and of bucket sizes. Captures on the first use, and then may drop the one that has
 * not been used for longest. */
cudaError_t cuda_graphs_find(struct cuda_graphs *graphs, const struct kernel_table *kernels, int32_t layer_index,
                             const struct kernel_forward *f, cudaGraphExec_t *out);
int cuda_graphs_room(const struct cuda_graphs *graphs); /* how many more can be kept without dropping one */
uint64_t cuda_graphs_captures(const struct cuda_graphs *graphs);

/* ---- device_cuda_sensors.c ------------------------------------------------------------------------------------- */

/* NULL: the library is not installed or does not know the device. `bus_id` as cudaDeviceGetPCIBusId writes it. */
struct cuda_sensors *cuda_sensors_create(const char *bus_id);
void cuda_sensors_destroy(struct cuda_sensors *sensors); /* NULL is fine */
/* Writes all but the figures of copies and graphs. */
void cuda_sensors_read(struct cuda_sensors *sensors, struct engine_device_stats *out);

#endif
