/* SPDX-License-Identifier: Apache-2.0
 *
 * What the parts of the registry share: registry.c (names, ids, references, removal), registry_install.c (from a folder to published
 * table entries) and registry_pack.c (from files to device memory).
 *
 * An adapter's life:  installing -> ready -> draining (no name, no id, still used) -> retiring (a job is about to clear its table
 * entries and free its memory) -> removed. It leaves the list and gives its slot back with the last step.
 *
 * One lock guards everything that changes; it is never held while reading files, packing, posting jobs or calling the device.
 */
#ifndef EXPERTD_ENGINE_REGISTRY_H
#define EXPERTD_ENGINE_REGISTRY_H

#include "engine/adapter.h"
#include "engine/arena.h"

#include <pthread.h>
#include <stdatomic.h>

enum registry_life { LIFE_INSTALLING, LIFE_READY, LIFE_DRAINING, LIFE_RETIRING, LIFE_REMOVED };

/* An adapter's share of one layer. */
struct registry_part {
    int32_t layer_index;
    struct kernel_lora_entry *entries; /* [experts, KERNEL_PROJECTIONS], host; only until they are published */
};

struct engine_adapter {
    /* Constant once ready. */
    struct registry *registry;
    char name[ENGINE_ADAPTER_NAME_MAX + 1];
    int32_t id, slot;
    int32_t rank;
    int32_t *layers; /* [part_count] numbers in the checkpoint */
    int64_t experts;
    bool projection[KERNEL_PROJECTIONS];
    int64_t tensors, ignored;
    char **warnings;
    int32_t warning_count;
    int64_t bytes;
    int64_t installed_at;
    struct registry_part *part;
    int32_t part_count;
    uint64_t address; /* of its arena memory; 0 none */

    /* Under the registry's lock. */
    enum registry_life life;
    int64_t refs; /* of requests */
    int holds; /* of calls that look at it, and of its own life: the struct goes with the last */
    struct engine_adapter *next_id, *next_name; /* hash chains, while ready */
    struct engine_adapter *prev, *next; /* list in order of installation */

    atomic_llong rows_served;
};

/* One running call of registry_install; installs of one name take turns in order of arrival. */
struct registry_install {
    struct registry_install *next;
    const char *name;
    struct engine_adapter *adapter;
    bool published; /* the job has run; code and error say how it went */
    bool slot_lost; /* table entries could not be cleared */
    bool replaced;
    enum engine_code code;
    struct engine_error error;
    int64_t begun_ns, opened_ns, packed_ns;
};

enum {
    REGISTRY_PACKERS = 8, /* threads that pack at one time with a piece of `stage` */
    REGISTRY_STAGE_BYTES = 1 << 20, /* of each: what a batch's rows may have to wait for on their way to the device */
};

struct registry {
    struct device *device;
    const struct model *model;
    struct adapter_publisher publisher;
    struct arena *arena;
    int64_t max_adapter_bytes;
    int root_fd; /* -1: none */
    char *root_given, *root; /* as configured, and its real path */
    struct kernel_lora_entry *zeros; /* [experts, KERNEL_PROJECTIONS] */
    void (*log)(void *arg, const char *level, const char *message); /* NULL: none */
    void *log_arg;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool draining;
    char *stage; /* the device's host memory for uploads, [REGISTRY_PACKERS] pieces; NULL until needed */
    uint32_t stages_busy; /* bits of those in use */
    int helpers; /* threads that pack beside those that install */
    int max_adapters;
    int32_t *free_slot; /* [free_slots] */
    int free_slots;
    int retiring; /* adapters whose slot a posted job will give back */
    uint64_t retired; /* those jobs that have run */
    int32_t next_id;
    uint32_t buckets; /* a power of two */
    struct engine_adapter **by_id, **by_name;
    struct engine_adapter *first, *last;
    struct registry_install *installs;
    int64_t ready, drained; /* adapters by state */
    uint64_t installed, replaced, removed, failed;
};

/* ---- registry.c ------------------------------------------------------------------------------------------------ */

size_t registry_entries(const struct registry *r); /* of one slot in one layer's table */
/* Lock held. NULL: none is ready. */
struct engine_adapter *registry_find(struct registry *r, const char *name, size_t len);
/* Lock held. Makes it ready under a new id. */
void registry_enter(struct registry *r, struct engine_adapter *adapter);
/* Lock held. Takes name and id away. True: nobody uses it, and the caller must have registry_retire run on the engine thread. */
bool registry_leave(struct registry *r, struct engine_adapter *adapter);
/* [engine thread] A job: clears the table entries, frees the memory and gives the slot back. */
void registry_retire(void *adapter);
/* [engine thread] False: entries may be left in the slot, which must not be used again. */
bool registry_clear_slot(struct registry *r, const struct engine_adapter *adapter, int32_t parts);

/* Copies what is constant; false: out of memory, and nothing is left to free. */
bool registry_describe(const struct engine_adapter *adapter, struct engine_adapter_info *info);
/* Lock held. Copies what changes. */
void registry_describe_now(const struct engine_adapter *adapter, struct engine_adapter_info *info);

/* Ends a call's look at it. Lock not held. */
void registry_drop_hold(struct registry *r, struct engine_adapter *adapter);
/* Frees memory, device memory included; never the slot. */
void registry_adapter_destroy(struct engine_adapter *adapter);

/* ---- registry_pack.c ---------------------------------------------------------------------------------------------- */

/* Allocates and packs everything that `data` has, into an adapter that was made for it. Moves the warnings out of `data`. */
enum engine_code registry_pack(struct registry *r, struct adapter_data *data, struct engine_adapter *adapter, struct engine_error *error);

#endif
