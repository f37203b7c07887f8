/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of reading a PEFT adapter, between their files:
 *
 *   peft_config.c   adapter_config.json                          ->  struct peft_config
 *   peft_names.c    a tensor's name                              ->  struct peft_name
 *   peft_plan.c     names and shapes against the model           ->  struct peft_pair, checked
 *   peft_values.c   the values of pairs                          ->  struct adapter_delta
 *   peft.c          folders, and adapter_open itself
 */
#ifndef EXPERTD_ENGINE_PEFT_H
#define EXPERTD_ENGINE_PEFT_H

#include "engine/adapter.h"
#include "engine/faults.h"
#include "engine/pattern.h"
#include "engine/safetensors.h"

#include <sys/stat.h>

#define PEFT_MAX_CONFIG (4 << 20) /* bytes of adapter_config.json */
#define PEFT_MAX_NAME 512 /* bytes of the name of a tensor that adapts experts */

/* Text of strangers for a message: cut to fit at a character's border. */
struct peft_text {
    char s[164];
};
struct peft_text peft_quote(const char *text, size_t len);
#define PEFT_QUOTE(text) (peft_quote((text), strlen(text)).s)

/* ---- adapter_config.json --------------------------------------------------------------------------------------- */

struct peft_config {
    int32_t r; /* 0: missing, which is a fault */
    double alpha;
    bool rslora;
    struct pattern_set *ranks, *alphas;
    char **target_parameters;
    size_t target_parameter_count;
    int version_major, version_minor; /* of peft, -1 unknown */
    bool version_development; /* a state between two releases */
};

/* Parses `len` bytes. Filled as far as it went even when faults were found; false when it makes no sense to go on. */
bool peft_config_parse(const char *text, size_t len, struct peft_config *config, struct faults *log);
void peft_config_finish(struct peft_config *config);

/* Rank and scale of a module by r, lora_alpha and the patterns. *scale is left alone when the rank is unknown. */
enum engine_code peft_config_scale(struct peft_config *config, const char *module, int32_t *rank, float *scale, struct engine_error *error);

/* ---- names ----------------------------------------------------------------------------------------------------- */

enum peft_kind {
    PEFT_OTHER, /* another module's: the caller's business */
    PEFT_LINEAR, /* a Linear of one expert */
    PEFT_FUSED, /* a 3-D parameter of all experts; which one is known later */
    PEFT_UNKNOWN, /* lies on a routed-expert path and cannot be understood */
};

/* Which parameter a fused pair adapts. */
enum peft_fused {
    PEFT_OUTER, /* experts.lora_*: down if there is an inner one, else what target_parameters says */
    PEFT_INNER, /* experts.base_layer.lora_*: gate_up */
    PEFT_GATE_UP, /* input_linear */
    PEFT_DOWN, /* output_linear */
};

struct peft_name {
    enum peft_kind kind;
    int64_t layer;
    int64_t expert; /* PEFT_LINEAR */
    enum kernel_projection projection; /* PEFT_LINEAR */
    enum peft_fused fused; /* PEFT_FUSED */
    bool b; /* lora_B */
    bool foreign; /* PEFT_OTHER: routed experts outside the decoder's layers (mtp, vision) */
    char module[PEFT_MAX_NAME + 1]; /* as patterns see it, without base_layer */
    char adapter[PEFT_MAX_NAME + 1]; /* "default" of lora_A.default.weight, else empty */
    const char *why; /* PEFT_UNKNOWN: what could not be understood */
};

void peft_name_parse(const char *tensor, struct peft_name *out);

/* ---- plan ------------------------------------------------------------------------------------------------------ */

/* A and B of one module, found to fit. */
struct peft_pair {
    const struct safetensors_tensor *a, *b;
    int64_t layer;
    int32_t expert; /* of the checkpoint; -1: all of them, fused */
    enum kernel_projection projection; /* of a Linear, or KERNEL_DOWN; KERNEL_GATE for gate_up */
    bool swapped; /* fused, written for the transposed parameter */
    int32_t rank;
    float scale;
};

struct peft_plan {
    struct peft_pair *pair; /* sorted by layer, expert, projection */
    size_t pairs;
    int64_t tensors, ignored;
};

/* False when reading cannot go on; faults are in the log either way. */
bool peft_plan_create(const struct safetensors_file *file, struct peft_config *config, const struct model *model, struct faults *log,
                      struct peft_plan *out);
void peft_plan_finish(struct peft_plan *plan);

/* ---- values ---------------------------------------------------------------------------------------------------- */

struct adapter_files {
    int config_fd; /* -1: not opened */
    struct stat config; /* as it was then */
    struct safetensors_file *file;
    struct peft_plan plan;
    const struct model *model;
    int64_t not_held; /* tensors for layers or experts that are not held here */
};

/* Cuts the plan into deltas, without values, and pieces. */
bool peft_values_cut(struct adapter_data *data, struct faults *log);
/* Reads and checks all, into data->memory. */
bool peft_values_read(struct adapter_data *data, struct faults *log);

#endif
