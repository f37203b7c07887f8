/* SPDX-License-Identifier: Apache-2.0
 *
 * What is known of model families: how their expert tensors are named, laid out and applied.
 */
#ifndef EXPERTD_ENGINE_FAMILY_H
#define EXPERTD_ENGINE_FAMILY_H

#include "engine/model.h"

/* A model_type with known conventions. */
struct family {
    const char *name;
    bool transposed; /* its fused parameters are [E, in, out] */
    bool may_be_transposed; /* files of both orientations are around, and the transposed ones are halves */
    bool biases; /* its fused parameters have them */
    bool weight_on_input;
    enum model_fused fused;
    bool gpt_oss; /* its activation, whatever hidden_act says */
    int32_t top_k; /* where the config has none */
};

/* By model_type, whose suffix "_text" does not matter. NULL: unknown. */
const struct family *family_find(const char *model_type);
/* All names, for messages. */
const char *family_name(size_t index); /* NULL past the end */

/* What a tensor's name says it is. The first three come once an expert, the next four once a layer. */
enum family_role {
    FAMILY_GATE,
    FAMILY_UP,
    FAMILY_DOWN,
    FAMILY_FUSED_GATE_UP,
    FAMILY_FUSED_DOWN,
    FAMILY_FUSED_GATE_UP_BIAS,
    FAMILY_FUSED_DOWN_BIAS,
    FAMILY_QUANTISED, /* on an expert's path, of a form of quantisation */
    FAMILY_UNKNOWN, /* on an expert's path, and we can't say what it is */
};

struct family_tensor {
    int64_t layer;
    int64_t expert; /* -1 where there is none */
    enum family_role role;
};

/* False: not of a routed expert. */
bool family_parse_tensor(const char *name, struct family_tensor *out);

/* hidden_act as ours; false when we don't know it. */
bool family_parse_activation(const char *name, enum kernel_activation *out);
const char *family_activation_name(enum kernel_activation activation);

#endif
