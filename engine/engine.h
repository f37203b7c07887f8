/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine: one model's experts and adapters resident on one device, and a queue of forward requests.
 *
 * It owns weights, adapters, scratch, staging memory and its own threads. All functions may be called from any
 * thread unless they say otherwise. Strings that go in are copied; structs that come out are the caller's.
 * On failure an out parameter is left as it was, and nothing else has changed.
 */
#ifndef EXPERTD_ENGINE_ENGINE_H
#define EXPERTD_ENGINE_ENGINE_H

#include "engine/error.h"
#include "kernels/dtype.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct engine;

/* ---- start and stop ------------------------------------------------------------------------------------ */

enum { ENGINE_BATCH_WAIT_AUTO = -1 }; /* a batch waits when what was seen before says that it pays: engine/company.h */

struct engine_options {
    const char *model; /* folder of a checkpoint; NULL with synthetic */
    const char *synthetic; /* "E=64,K=8,H=2048,I=1024,L=1": random weights of that shape (also ACT=, SEED=) */
    const char *family; /* NULL: from config.json and the tensors */
    const char *layers; /* "0-3,7": NULL all */
    const char *experts; /* "0-31": NULL all */
    const char *dtype; /* "bf16", "fp16" or NULL: bf16, but fp16 for fp16 files */
    const char *device; /* "auto", "cpu", "cuda", "cuda:N" */
    int threads; /* 0: all cores */
    int64_t max_batch_rows; /* rows computed at once; larger batches run in windows. 0: the device's default */
    int64_t queue_rows; /* rows waiting and running */
    int64_t batch_wait_us; /* how long a lone request waits for company, or ENGINE_BATCH_WAIT_AUTO */
    int max_adapters; /* adapter slots */
    int64_t max_adapter_bytes; /* an adapter's file on disk */
    const char *adapter_root; /* NULL: no install by path */
    int64_t max_inflight_bytes; /* staging memory */
    /* Loading progress, from one thread at a time; NULL: none. `done` and `total` in bytes. */
    void (*progress)(void *arg, int64_t done, int64_t total);
    void *progress_arg;
    /* One line for the log; level is "debug", "info", "warning" or "error". Any thread. NULL: none. */
    void (*log)(void *arg, const char *level, const char *message);
    void *log_arg;
};

/* What can be said about options in a moment, without reading weights: their form and limits, whether the device and the folders are there, and
 * whether config.json and the tensors' names are of a kind that we serve and have the layers and experts that are asked for. engine_create
 * checks all of it, too. */
enum engine_code engine_options_check(const struct engine_options *options, struct engine_error *error);

/* A model without its weights, by its config and its tensors' headers: so that adapters can be held against it before minutes have gone into
 * loading. */
struct engine_outline;
enum engine_code engine_outline_create(const struct engine_options *options, struct engine_outline **out, struct engine_error *error);
/* What an install from the folder would say by adapter_config.json and the tensors' names, types and shapes; no values are read. */
enum engine_code engine_outline_check_adapter(const struct engine_outline *outline, int dir_fd, struct engine_error *error);
void engine_outline_destroy(struct engine_outline *outline); /* NULL is fine */

/* Loads the model; may take minutes. Serves as soon as it returns. Setting *cancel (NULL is fine) from a signal
 * handler or another thread makes loading give up with ENGINE_CANCELLED. */
enum engine_code engine_create(const struct engine_options *options, atomic_bool *cancel, struct engine **out, struct engine_error *error);

/* Refuses new requests and installs (ENGINE_DRAINING) from now on; what was accepted goes on. */
void engine_begin_drain(struct engine *engine);
/* Waits until nothing is queued or running, at most timeout_ms; true when it is so. */
bool engine_wait_idle(struct engine *engine, int64_t timeout_ms);
/* Stops: requests still queued complete with ENGINE_DRAINING, running ones finish. Every request has completed and
 * every adapter reference has been released by the caller before memory is freed. NULL is fine. */
void engine_destroy(struct engine *engine);

/* True once the device has failed for good. */
bool engine_failed(const struct engine *engine);

/* `expertd --check`: examines a checkpoint or adapter folder without serving and prints what it would serve, or every
 * fault found, to `out`. An adapter is checked against options->model when that is given. ENGINE_OK when it is fine. */
enum engine_code engine_check(const char *path, const struct engine_options *options, FILE *out);

/* ---- the model ----------------------------------------------------------------------------------------- */

struct engine_model_info {
    const char *family; /* "qwen3_moe", "synthetic", ... */
    const char *device; /* "cpu", "cuda:0" */
    const char *device_name; /* "NVIDIA H200", the CPU's kernels ("avx512bf16"), ... */
    const char *activation; /* "silu", "gelu", "gelu_tanh", "gpt_oss" */
    bool weight_on_input;
    enum dtype weight_dtype;
    int32_t hidden_size, intermediate_size;
    int32_t experts; /* of the model: ids are 0..experts-1 */
    int32_t experts_held;
    const int32_t *held_experts; /* [experts_held], ascending */
    int32_t top_k; /* of the checkpoint's config; 0 unknown */
    int32_t layers_held;
    const int32_t *held_layers; /* [layers_held], ascending */
    int32_t threads;
    int64_t max_batch_rows;
    int64_t queue_rows;
    int64_t weight_bytes, scratch_bytes; /* resident */
    int max_adapters;
};
/* Constant while the engine lives; pointers inside belong to the engine. */
const struct engine_model_info *engine_model(const struct engine *engine);
bool engine_has_layer(const struct engine *engine, int64_t layer);

/* ---- adapters ------------------------------------------------------------------------------------------ */

#define ENGINE_ADAPTER_NAME_MAX 128

enum engine_adapter_state { ENGINE_ADAPTER_READY, ENGINE_ADAPTER_DRAINING, ENGINE_ADAPTER_REMOVED };

/* A snapshot; strings and arrays inside are owned by the snapshot: free it with engine_adapter_info_finish. */
struct engine_adapter_info {
    char name[ENGINE_ADAPTER_NAME_MAX + 1];
    int32_t id;
    enum engine_adapter_state state;
    int32_t rank; /* largest */
    int32_t *layers; /* [layer_count], ascending: layers with adapted experts that this server holds */
    int32_t layer_count;
    int64_t experts; /* (layer, expert) pairs adapted */
    bool gate, up, down; /* projections adapted anywhere */
    int64_t tensors, ignored;
    char **warnings;
    int32_t warning_count;
    int64_t bytes; /* device memory */
    int64_t in_flight, rows_served;
    int64_t installed_at; /* seconds since 1970 */
};
void engine_adapter_info_finish(struct engine_adapter_info *info);

/* 1 to 128 of A-Z a-z 0-9 . _ - and '/' inside; not starting with '.' or '/'. */
bool engine_adapter_name_valid(const char *name, size_t len);

/* Installs from a folder below adapter_root: relative, or absolute if beneath it. Blocks (reads files, uploads, waits
 * for publication between two batches): not for threads that serve sockets. *replaced says whether a ready adapter
 * of that name was replaced; without `replace` that is ENGINE_ADAPTER_EXISTS. */
enum engine_code engine_adapter_install(struct engine *engine, const char *name, const char *path, bool replace,
                                        struct engine_adapter_info *info, bool *replaced, struct engine_error *error);
/* The same from a folder anywhere (uploads in the spool, --adapter at start): dir_fd stays the caller's. */
enum engine_code engine_adapter_install_fd(struct engine *engine, const char *name, int dir_fd, bool replace,
                                           struct engine_adapter_info *info, bool *replaced, struct engine_error *error);
/* Takes the name away at once. Waits up to wait_ms for the memory to be freed; info->state says how far it got. */
enum engine_code engine_adapter_remove(struct engine *engine, const char *name, int64_t wait_ms, struct engine_adapter_info *info,
                                       struct engine_error *error);
enum engine_code engine_adapter_show(struct engine *engine, const char *name, struct engine_adapter_info *info, struct engine_error *error);
/* All that are ready or draining, in order of installation. Free each, then the array with free(). */
enum engine_code engine_adapter_list(struct engine *engine, struct engine_adapter_info **infos, size_t *count, struct engine_error *error);

/* References: a request holds one on each adapter it names, from before it is submitted until it has completed. */
struct engine_adapter;
struct engine_adapter *engine_adapter_acquire_name(struct engine *engine, const char *name, size_t len); /* NULL: none ready */
struct engine_adapter *engine_adapter_acquire_id(struct engine *engine, int64_t id); /* NULL: unknown or removed */
void engine_adapter_release(struct engine *engine, struct engine_adapter *adapter);
const char *engine_adapter_name(const struct engine_adapter *adapter);

/* ---- forward ------------------------------------------------------------------------------------------- */

enum engine_mode { ENGINE_AUTO, ENGINE_DECODE, ENGINE_PREFILL };

/* One request. Caller memory, validated by the caller as said at each field; it and all that it points to stay alive and
 * untouched from engine_submit until `done` is called. */
struct engine_request {
    int32_t layer; /* held, or submit says ENGINE_LAYER_NOT_FOUND */
    enum engine_mode mode;
    int32_t rows; /* T >= 1 */
    enum dtype dtype; /* of hidden and out: BF16, FP16, FP32 */
    const void *hidden; /* [T, H], any alignment */
    void *out; /* [T, H], any alignment; meaningful only if the status is ENGINE_OK */
    int32_t k; /* K when every row owns K slots, else 0 and row_slots is set */
    const int32_t *row_slots; /* [T + 1] or NULL: row t owns slots row_slots[t] .. row_slots[t+1]-1 */
    const int32_t *expert_ids; /* [slots] -1 or an id of the model, 0..experts-1 */
    const float *expert_weights; /* [slots] finite where the id is not -1 */
    struct engine_adapter *const *adapters; /* [adapter_count] references held by the caller */
    int32_t adapter_count;
    const int32_t *row_adapter; /* [T] index into adapters or -1; NULL: adapters[0] for every row, or base if there are none */
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0 none */
    /* Called exactly once after a successful submit, from an engine thread, with no lock held. Must not block. */
    void (*done)(struct engine_request *request);
    void *user;

    /* Results, valid in `done`. */
    enum engine_code status;
    enum engine_mode path; /* ENGINE_DECODE or ENGINE_PREFILL */
    int64_t queue_ns, compute_ns; /* until the device took it up, and while it had it; without what was between windows */
    int32_t batch_rows; /* rows of the largest batch it was part of */

    /* The engine's own. */
    struct engine_request *next;
    int64_t submitted_ns, started_ns;
    int32_t rows_started, rows_done;
    atomic_int cancelled;
};

/* Queues a request. Any code but ENGINE_OK: it was not queued and `done` will not be called. */
enum engine_code engine_submit(struct engine *engine, struct engine_request *request, struct engine_error *error);
/* The client went away: if the request has not started it completes soon with ENGINE_CANCELLED; else it finishes. The
 * request must not have completed yet (the caller's own lock sees to that). */
void engine_cancel(struct engine *engine, struct engine_request *request);

/* ---- staging memory ------------------------------------------------------------------------------------ */

/* Host memory for bodies and replies that the device can copy from and to directly. Bounded by max_inflight_bytes in all.
 * ENGINE_QUEUE_FULL: the bound is reached for now; ENGINE_TOO_LARGE: larger than the bound itself. */
/* What engine_staging_acquire would say now; nothing is held. */
enum engine_code engine_staging_check(struct engine *engine, size_t bytes);
enum engine_code engine_staging_acquire(struct engine *engine, size_t bytes, void **out);
void engine_staging_release(struct engine *engine, void *memory); /* NULL is fine */

/* ---- figures ------------------------------------------------------------------------------------------- */

#define ENGINE_BUCKETS 24 /* bucket i counts values <= 2^i (microseconds, or rows); the last counts all others */

struct engine_histogram {
    uint64_t bucket[ENGINE_BUCKETS];
    uint64_t count;
    double sum; /* same unit as the buckets */
};

/* Of a device with memory of its own. What its sensors don't say is NaN; without sensors `uuid` is empty. */
struct engine_device_stats {
    uint64_t bytes_in, bytes_out; /* of batches, to and from the device */
    uint64_t bytes_uploaded; /* weights and adapters */
    uint64_t graph_captures;
    char uuid[96];
    double utilization, memory_utilization; /* 0..1: share of the last moments in which it computed, and used its memory */
    double memory_total_bytes, memory_used_bytes; /* by all processes */
    double power_watts, power_limit_watts, energy_joules; /* energy since the engine was created */
};

struct engine_stats {
    /* index 0 decode, 1 prefill */
    uint64_t requests_ok[2], rows_ok[2], slots_ok[2], batches[2], adapted_rows[2];
    uint64_t requests_failed, requests_cancelled, requests_expired, requests_rejected;
    struct engine_histogram queue_us[2], compute_us[2], batch_rows[2];
    int64_t queued_rows, queued_requests, running_rows;
    int64_t adapters_ready, adapters_draining;
    uint64_t adapters_installed, adapters_replaced, adapters_removed, adapter_installs_failed;
    int64_t adapter_bytes, adapter_arena_bytes;
    int64_t staging_bytes, staging_limit;
    int64_t device_memory_total, device_memory_free;
    bool has_device; /* `device` is filled */
    struct engine_device_stats device;
    uint64_t batch_waits, batch_waits_in_vain; /* with ENGINE_BATCH_WAIT_AUTO: batches held back; of these, that cost more than they gave */
    int64_t batch_wait_ns; /* of batch_waits, while the device was free */
    bool failed;
};
void engine_stats_get(struct engine *engine, struct engine_stats *out);

#endif
