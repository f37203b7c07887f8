/* SPDX-License-Identifier: Apache-2.0
 *
 * What we need from a checkpoint's config.json, whatever each family calls it. Untrusted input; sizes are not believed but
 * compared with the tensors.
 */
#ifndef EXPERTD_ENGINE_CONFIG_H
#define EXPERTD_ENGINE_CONFIG_H

#include "engine/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define CONFIG_FILE "config.json"

/* A number with the key it was found under, for messages. */
struct config_value {
    const char *key; /* a constant; NULL: absent */
    int64_t value;
};

struct model_config {
    char model_type[64]; /* of the whole; "" absent */
    char text_type[64]; /* of the nested language model; "" when not nested */
    struct config_value experts, top_k, hidden, layers;
    struct config_value moe_inter; /* an expert's own size */
    struct config_value inter; /* dense layers' size; an expert's too where moe_inter is absent */
    char activation[64]; /* "" absent */
    char quantization[64]; /* the method's name; "" none */
    bool has_swiglu_limit;
    double swiglu_limit;
};

/* That of the folder which is open as dir_fd; sentences begin with the file's path. */
enum engine_code config_read(int dir_fd, const char *folder, struct model_config *out, struct engine_error *error);

/* A JSON object from a file in a folder: regular files only, at most `limit` bytes, duplicates refused. Python's NaN and
 * Infinity, which are no JSON, are read as null. A fault of the content is `bad`. The caller drops the reference. */
enum engine_code config_load_json(int dir_fd, const char *folder, const char *name, size_t limit, enum engine_code bad, json_t **out,
                                  struct engine_error *error);

#endif
