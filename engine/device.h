/* SPDX-License-Identifier: Apache-2.0
 *
 * The device boundary: memory, copies and whole batches on one device. Internal to the engine.
 *
 * A device is created by its own module (device_cpu.c, device_cuda.c or its stub) and used through this table.
 * The functions marked [engine thread] are called by one thread only; the others by any. Addresses of device memory are
 * uint64_t so that nobody follows them by mistake; on the CPU they are host addresses.
 * Every result of the device's API is converted to an engine_code where it happens.
 */
#ifndef EXPERTD_ENGINE_DEVICE_H
#define EXPERTD_ENGINE_DEVICE_H

#include "engine/error.h"
#include "kernels/kernels.h"

struct device;
struct engine_device_stats; /* of engine.h */

struct device_options {
    const char *device; /* "auto", "cpu", "cuda", "cuda:N" */
    const char *isa; /* kernels: NULL or "auto"; tests force "ref", a name of kernels_cpu_isa, a code of the CUDA back end,
                      * "eager" (no captured graphs on CUDA) or a code with "-eager" behind it */
    int threads;
};

/* Bounds known after the model's header was read: sizes scratch and staging. */
struct device_limits {
    struct kernel_dims dims;
    int32_t max_rows; /* rows of a batch */
    int32_t max_slots; /* slots of a batch */
    int32_t adapters; /* adapter slots */
    int32_t layers;
};

/* A batch as the scheduler hands it over. Arrays are host memory, alive until the batch is waited for; row.in and
 * row.out are host addresses (of staging memory, mostly). Within both bounds of device_limits. */
struct device_batch {
    struct kernel_weights weights;
    enum kernel_path path;
    int32_t layer_index; /* 0..layers-1, position among the layers held: selects the adapter table */
    bool adapted; /* some row has an adapter: false skips every adapter step */
    struct kernel_batch batch;
};

struct device_ops {
    void (*destroy)(struct device *device);
    /* Allocates scratch, tables and streams. Once. Adapter tables start all zero. */
    enum engine_code (*prepare)(struct device *device, const struct device_limits *limits, struct engine_error *error);

    /* Device memory; 256-byte aligned. *out is 0 on failure (ENGINE_OUT_OF_DEVICE_MEMORY names bytes wanted and free). */
    enum engine_code (*alloc)(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error);
    void (*free)(struct device *device, uint64_t address, size_t bytes);
    /* Device memory that prepare will take, so that a model is budgeted next to it. NULL: not counted. */
    size_t (*prepare_bytes)(struct device *device, const struct device_limits *limits);
    void (*memory_info)(struct device *device, int64_t *total, int64_t *free_now);

    /* Host memory that the device copies from and to at full speed (pinned on CUDA). NULL when there is none. */
    void *(*host_alloc)(struct device *device, size_t bytes);
    void (*host_free)(struct device *device, void *memory, size_t bytes);

    /* Copies `height` pieces of `width` bytes to the device; returns when the source may be reused. Runs beside batches. Where
     * direct_memory is true (CPU) loaders write to the address instead and never call this. */
    enum engine_code (*upload)(struct device *device, uint64_t dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                               size_t height, struct engine_error *error);
    enum engine_code (*download)(struct device *device, void *dst, uint64_t src, size_t bytes, struct engine_error *error);

    /* [engine thread] Writes entries of a layer's adapter table, in order with batches: those submitted before see the old
     * entries, those after the new. `first` counts entries of [adapters, experts, KERNEL_PROJECTIONS]. */
    enum engine_code (*table_write)(struct device *device, int32_t layer_index, size_t first, size_t count,
                                    const struct kernel_lora_entry *entries, struct engine_error *error);

    /* [engine thread] Starts a batch. At most `depth` batches are between submit and wait; they finish in order. */
    enum engine_code (*submit)(struct device *device, const struct device_batch *batch, struct engine_error *error);
    /* [engine thread] True when wait would return at once. NULL: the device can't tell, and is waited for. Where it can, work
     * that arrives while a batch computes need not wait for its end before it is handed over. */
    bool (*ready)(struct device *device);
    /* [engine thread] Waits for the oldest batch; then its outputs are in host memory. */
    enum engine_code (*wait)(struct device *device, struct engine_error *error);

    /* [engine thread] A cheap probe while idle; ENGINE_DEVICE_FAILED when the device is gone. */
    enum engine_code (*canary)(struct device *device, struct engine_error *error);

    /* After prepare and loading, before the engine thread starts: makes a layer's first batches as fast as later ones. NULL: they
     * are anyway. */
    enum engine_code (*warm)(struct device *device, int32_t layer_index, const struct kernel_weights *weights, struct engine_error *error);
    /* Any thread. NULL: there is nothing to tell. */
    void (*stats)(struct device *device, struct engine_device_stats *out);
};

/* The common head of every device. */
struct device {
    const struct device_ops *ops;
    const struct kernel_table *kernels;
    const char *kind; /* "cpu", "cuda" */
    char id[32]; /* "cpu", "cuda:0" */
    char name[128]; /* for people: "NVIDIA H200", "avx512bf16, 16 threads" */
    int threads;
    int depth; /* batches that may be in flight: 1 on the CPU */
    bool direct_memory;
    int64_t default_batch_rows;
    size_t scratch_bytes; /* after prepare */
    struct kernel_stream *host_pool; /* host threads for loading; never NULL */
};

/* Whether device_create would find that device, without setting it up. */
enum engine_code device_check(const struct device_options *options, struct engine_error *error);
enum engine_code device_create(const struct device_options *options, struct device **out, struct engine_error *error);
static inline void device_destroy(struct device *device)
{
    if (device)
        device->ops->destroy(device);
}

enum engine_code device_cpu_create(const struct device_options *options, struct device **out, struct engine_error *error);
/* In builds without CUDA a stub takes its place: available() is false, check and create say what is missing. */
bool device_cuda_available(void);
enum engine_code device_cuda_check(const struct device_options *options, struct engine_error *error);
enum engine_code device_cuda_create(const struct device_options *options, struct device **out, struct engine_error *error);

/* The forward sequence, the same for every back end: runs all steps of f, which is complete, on the stream. */
enum kernel_status forward_run(const struct kernel_table *kernels, struct kernel_stream *stream, const struct kernel_forward *f);

/* Lays x, h, y, s_*, routing and work of `f` out in device memory from `base` (256-byte aligned) at the sizes of `limits`, sets
 * f->dims and lora.max_rank, and returns the bytes that takes. With f NULL only the bytes are computed; a size that no machine
 * has stands for products that overflow. Without adapter slots the s_* arrays are empty. */
size_t forward_bind_scratch(const struct kernel_table *kernels, const struct device_limits *limits, void *base, struct kernel_forward *f);

#endif
