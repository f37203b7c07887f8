/* SPDX-License-Identifier: Apache-2.0
 *
 * The numbers that --layers and --experts keep: "0-3,7".
 */
#ifndef EXPERTD_ENGINE_SELECTION_H
#define EXPERTD_ENGINE_SELECTION_H

#include "engine/error.h"

#include <stdbool.h>
#include <stdint.h>

#define SELECTION_MAX_RANGES 256

struct selection {
    bool all;
    int32_t ranges;
    struct {
        int32_t first, last;
    } range[SELECTION_MAX_RANGES];
};

/* NULL text selects everything. `option` ("--layers") is for messages. */
enum engine_code selection_parse(const char *text, const char *option, struct selection *out, struct engine_error *error);
bool selection_has(const struct selection *selection, int64_t number);

#endif
