/* SPDX-License-Identifier: Apache-2.0
 *
 * The rank_pattern and alpha_pattern of an adapter: keys that name modules, each with a number. A key matches a module that
 * equals it or ends in ".key"; the first in file order wins. Keys may be regular expressions; they come from strangers, so
 * that matching is bounded for each attempt and over the whole set.
 *
 * A set belongs to one thread at a time.
 */
#ifndef EXPERTD_ENGINE_PATTERN_H
#define EXPERTD_ENGINE_PATTERN_H

#include "engine/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PATTERN_MAX_REGEX 256 /* keys of a set that are regular expressions */
#define PATTERN_MAX_KEY 1024 /* bytes of such a key */
#define PATTERN_MAX_STEPS 20000000 /* of all matching with a set */

struct pattern_set;

/* `field` names the set in messages and must outlive it. NULL: out of memory. */
struct pattern_set *pattern_set_create(const char *field);
void pattern_set_destroy(struct pattern_set *set); /* NULL is fine */

/* Adds a key after those added before. ENGINE_BAD_ADAPTER: not a regular expression, or one too large. */
enum engine_code pattern_set_add(struct pattern_set *set, const char *key, double value, struct engine_error *error);

/* *value is set if a key matches, else left alone. ENGINE_BAD_ADAPTER: a key takes too long to match. */
enum engine_code pattern_set_match(struct pattern_set *set, const char *module, double *value, struct engine_error *error);

#endif
