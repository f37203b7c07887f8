/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain keys (letters, digits, '_', '-', '.') sit in a sorted array, in which each dotted suffix of a module's name is looked
 * up: adapters made by rank allocation carry tens of thousands of them. The others go through PCRE2 one by one.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/pattern.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MATCH_LIMIT 100000
#define DEPTH_LIMIT 5000
#define HEAP_LIMIT_KIB 2048

struct plain {
    char *key;
    size_t order;
    double value;
};

struct regex {
    char *key;
    size_t order;
    double value;
    pcre2_code *code;
    pcre2_match_data *data;
};

struct pattern_set {
    const char *field;
    struct plain *plain;
    size_t plain_count, plain_room;
    bool sorted;
    struct regex regex[PATTERN_MAX_REGEX];
    size_t regex_count;
    size_t next_order;
    pcre2_compile_context *compile;
    pcre2_match_context *match;
    long steps;
};

/* Called before every item of a pattern is matched: a count that does not depend on the machine's speed. */
static int count_step(pcre2_callout_block *block, void *data)
{
    struct pattern_set *set = data;
    (void)block;
    return ++set->steps > PATTERN_MAX_STEPS ? PCRE2_ERROR_MATCHLIMIT : 0;
}

struct pattern_set *pattern_set_create(const char *field)
{
    struct pattern_set *set = calloc(1, sizeof *set);
    if (!set)
        return NULL;
    set->field = field;
    set->compile = pcre2_compile_context_create(NULL);
    set->match = pcre2_match_context_create(NULL);
    if (!set->compile || !set->match) {
        pattern_set_destroy(set);
        return NULL;
    }
    pcre2_set_max_pattern_length(set->compile, PATTERN_MAX_KEY + 16);
    pcre2_set_parens_nest_limit(set->compile, 64);
    pcre2_set_match_limit(set->match, MATCH_LIMIT);
    pcre2_set_depth_limit(set->match, DEPTH_LIMIT);
    pcre2_set_heap_limit(set->match, HEAP_LIMIT_KIB);
    pcre2_set_callout(set->match, count_step, set);
    return set;
}

void pattern_set_destroy(struct pattern_set *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->plain_count; i++)
        free(set->plain[i].key);
    for (size_t i = 0; i < set->regex_count; i++) {
        free(set->regex[i].key);
        pcre2_match_data_free(set->regex[i].data);
        pcre2_code_free(set->regex[i].code);
    }
    free(set->plain);
    pcre2_compile_context_free(set->compile);
    pcre2_match_context_free(set->match);
    free(set);
}

static bool is_plain(const char *key)
{
    for (; *key; key++)
        if (!((*key >= 'a' && *key <= 'z') || (*key >= 'A' && *key <= 'Z') || (*key >= '0' && *key <= '9') || strchr("._-", *key)))
            return false;
    return true;
}

static enum engine_code no_memory(struct pattern_set *set, struct engine_error *error)
{
    return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory while reading %s", set->field);
}

static enum engine_code add_plain(struct pattern_set *set, const char *key, double value, struct engine_error *error)
{
    if (set->plain_count == set->plain_room) {
        size_t room = set->plain_room ? 2 * set->plain_room : 16;
        struct plain *grown = reallocarray(set->plain, room, sizeof *grown);
        if (!grown)
            return no_memory(set, error);
        set->plain = grown;
        set->plain_room = room;
    }
    char *copy = strdup(key);
    if (!copy)
        return no_memory(set, error);
    set->plain[set->plain_count++] = (struct plain){copy, set->next_order++, value};
    set->sorted = false;
    return ENGINE_OK;
}

static enum engine_code add_regex(struct pattern_set *set, const char *key, double value, struct engine_error *error)
{
    if (set->regex_count == PATTERN_MAX_REGEX)
        return engine_fail(error, ENGINE_BAD_ADAPTER, "%s has more than %d keys that are regular expressions", set->field,
                           PATTERN_MAX_REGEX);
    if (strlen(key) > PATTERN_MAX_KEY)
        return engine_fail(error, ENGINE_BAD_ADAPTER, "%s has a regular expression of %zu bytes; at most %d are allowed: \"%.60s...\"",
                           set->field, strlen(key), PATTERN_MAX_KEY, key);
    char text[PATTERN_MAX_KEY + 16];
    int len = snprintf(text, sizeof text, "(.*\\.)?(%s)$", key), code = 0;
    size_t at = 0;
    struct regex r = {.order = set->next_order, .value = value};
    r.code = pcre2_compile((PCRE2_SPTR)text, (size_t)len,
                           PCRE2_ANCHORED | PCRE2_AUTO_CALLOUT | PCRE2_NEVER_UTF | PCRE2_NEVER_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at,
                           set->compile);
    if (!r.code && code == PCRE2_ERROR_HEAP_FAILED)
        return no_memory(set, error);
    if (!r.code) {
        PCRE2_UCHAR why[128];
        pcre2_get_error_message(code, why, sizeof why);
        return engine_fail(error, ENGINE_BAD_ADAPTER, "%s key \"%.120s\" is not a valid regular expression: %s", set->field, key,
                           (const char *)why);
    }
    r.data = pcre2_match_data_create(1, NULL);
    r.key = strdup(key);
    if (!r.data || !r.key) {
        pcre2_match_data_free(r.data);
        pcre2_code_free(r.code);
        free(r.key);
        return no_memory(set, error);
    }
    set->regex[set->regex_count++] = r;
    set->next_order++;
    return ENGINE_OK;
}

enum engine_code pattern_set_add(struct pattern_set *set, const char *key, double value, struct engine_error *error)
{
    return is_plain(key) ? add_plain(set, key, value, error) : add_regex(set, key, value, error);
}

static int compare(const void *a, const void *b) { return strcmp(((const struct plain *)a)->key, ((const struct plain *)b)->key); }

enum engine_code pattern_set_match(struct pattern_set *set, const char *module, double *value, struct engine_error *error)
{
    if (!set->sorted && set->plain_count) {
        qsort(set->plain, set->plain_count, sizeof *set->plain, compare);
        set->sorted = true;
    }
    size_t best = SIZE_MAX;
    for (const char *suffix = module; suffix && set->plain_count; suffix = strchr(suffix, '.')) {
        if (*suffix == '.')
            suffix++;
        struct plain want = {.key = (char *)suffix};
        const struct plain *found = bsearch(&want, set->plain, set->plain_count, sizeof *set->plain, compare);
        if (found && found->order < best) {
            best = found->order;
            *value = found->value;
        }
    }
    size_t len = strlen(module);
    for (size_t i = 0; i < set->regex_count && set->regex[i].order < best; i++) {
        struct regex *r = &set->regex[i];
        int rc = pcre2_match(r->code, (PCRE2_SPTR)module, len, 0, 0, r->data, set->match);
        if (rc >= 0) {
            *value = r->value;
            return ENGINE_OK;
        }
        if (rc == PCRE2_ERROR_NOMEMORY)
            return no_memory(set, error);
        if (rc != PCRE2_ERROR_NOMATCH)
            return engine_fail(error, ENGINE_BAD_ADAPTER, "%s key \"%.120s\" takes too long to match against module \"%.200s\"", set->field,
                               r->key, module);
    }
    return ENGINE_OK;
}
