/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters from disk to published table entries.
 *
 *   adapter_open     adapter_config.json + adapter_model.safetensors  ->  struct adapter_data   (peft.c, any thread)
 *   adapter_reader   the values, piece by piece, by several threads at a time                   (peft_values.c)
 *   registry         names, ids, slots, reference counts, device memory, publication           (registry.c)
 *
 * The registry never touches a table itself: it posts jobs to the engine thread, which runs them between batches.
 */
#ifndef EXPERTD_ENGINE_ADAPTER_H
#define EXPERTD_ENGINE_ADAPTER_H

#include "engine/device.h"
#include "engine/engine.h"
#include "engine/model.h"

/* ---- files ------------------------------------------------------------------------------------------------- */

/* One projection of one (layer, expert), in the orientation y += scale * B (A v); A [rank, in], B [out, rank], row-major,
 * in the model's operand type. gate and up of one expert may share `a`. */
struct adapter_delta {
    int32_t layer_index; /* among the model's layers */
    int32_t expert; /* among those held */
    enum kernel_projection projection;
    int32_t rank;
    float scale;
    bool shares_a; /* an up that has the `a` of the gate before it */
    const void *a, *b;
};

/* A share of the file that is read at one time: the values of some deltas, and those that are only checked because their layers or
 * experts are not held here. */
struct adapter_piece {
    size_t pair, pairs; /* of struct peft_plan */
    size_t delta, deltas;
    size_t elements; /* of the deltas' A and B together */
};

struct adapter_files; /* peft.h */

struct adapter_data {
    struct adapter_delta *delta; /* sorted by layer_index, expert, projection */
    size_t deltas;
    struct adapter_piece *piece; /* together all deltas, in order */
    size_t pieces;
    size_t largest_piece; /* elements */
    int32_t rank; /* largest */
    int64_t tensors, ignored; /* together every tensor of the file */
    char **warnings;
    int32_t warning_count;
    struct adapter_files *files;
    void *memory; /* of adapter_read */
};

/* Opens a folder and checks all but the values; only deltas for held layers and experts are kept (the others are checked, too).
 * Their a and b are NULL. max_bytes bounds the file of tensors; 0: no bound. The model outlives the data. */
enum engine_code adapter_open(int dir_fd, const struct model *model, int64_t max_bytes, struct adapter_data **out,
                              struct engine_error *error);
/* The same for a folder beneath root_fd, whose files may be symlinks if they stay beneath it too. */
enum engine_code adapter_open_beneath(int root_fd, const char *root, const char *path, const struct model *model, int64_t max_bytes,
                                      struct adapter_data **out, struct engine_error *error);
/* Opens a folder with all values in memory. `report` as in model_inspect. */
enum engine_code adapter_read(int dir_fd, const struct model *model, int64_t max_bytes, FILE *report, struct adapter_data **out,
                              struct engine_error *error);
/* After the last piece was read: that its files are still those that were opened. */
enum engine_code adapter_check_unchanged(const struct adapter_data *data, struct engine_error *error);
void adapter_data_destroy(struct adapter_data *data); /* NULL is fine */

/* One thread's buffers for reading values. Several threads, each with its own, may read pieces of one adapter_data. */
struct adapter_reader;
struct adapter_reader *adapter_reader_create(struct adapter_data *data); /* NULL: out of memory */
void adapter_reader_destroy(struct adapter_reader *reader); /* NULL is fine */
/* Reads and checks a piece, and points its deltas to the values, which stay until the reader's next call. */
enum engine_code adapter_reader_read(struct adapter_reader *reader, size_t piece, struct engine_error *error);

/* Opens a folder beneath root_fd without ever leaving it; `root` is its real path, for absolute paths. */
enum engine_code adapter_folder_beneath(int root_fd, const char *root, const char *path, int *dir_fd, struct engine_error *error);

/* ---- registry ---------------------------------------------------------------------------------------------- */

/* Runs fn(arg) on the engine thread between two batches, soon; never blocks. Jobs run in order, all of them, also
 * while draining. */
struct adapter_publisher {
    void (*post)(void *context, void (*fn)(void *arg), void *arg);
    void *context;
};

struct registry;

struct registry_options {
    struct device *device;
    const struct model *model;
    int max_adapters;
    int64_t max_adapter_bytes;
    const char *adapter_root; /* NULL: none */
    struct adapter_publisher publisher;
    void (*log)(void *arg, const char *level, const char *message); /* as in engine_options */
    void *log_arg;
};

enum engine_code registry_check_root(const char *path, struct engine_error *error); /* a folder that may be searched */
enum engine_code registry_create(const struct registry_options *options, struct registry **out, struct engine_error *error);
/* All references are released and all jobs have run. NULL is fine. */
void registry_destroy(struct registry *registry);
/* From now on installs fail with ENGINE_DRAINING. */
void registry_begin_drain(struct registry *registry);

/* See engine_adapter_*. path NULL: from dir_fd. */
enum engine_code registry_install(struct registry *registry, const char *name, const char *path, int dir_fd, bool replace,
                                  struct engine_adapter_info *info, bool *replaced, struct engine_error *error);
enum engine_code registry_remove(struct registry *registry, const char *name, int64_t wait_ms, struct engine_adapter_info *info,
                                 struct engine_error *error);
enum engine_code registry_show(struct registry *registry, const char *name, struct engine_adapter_info *info, struct engine_error *error);
enum engine_code registry_list(struct registry *registry, struct engine_adapter_info **infos, size_t *count, struct engine_error *error);
struct engine_adapter *registry_acquire_name(struct registry *registry, const char *name, size_t len);
struct engine_adapter *registry_acquire_id(struct registry *registry, int64_t id);
void registry_release(struct registry *registry, struct engine_adapter *adapter);

/* The adapter's slot in every layer's table; constant while a reference is held. */
int32_t engine_adapter_slot(const struct engine_adapter *adapter);
/* Counts rows computed with it. */
void engine_adapter_count_rows(struct engine_adapter *adapter, int64_t rows);
/* Gives device memory back that adapters have left: for when nothing runs. */
void registry_trim(struct registry *registry);
/* Fills the adapter figures of `out`. */
void registry_stats(struct registry *registry, struct engine_stats *out);

#endif
