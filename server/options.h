/* SPDX-License-Identifier: Apache-2.0
 *
 * The daemon's options: one alphabetical table from which --help, the command line, the config file and the test of the sample
 * file are made.
 */
#ifndef EXPERTD_SERVER_OPTIONS_H
#define EXPERTD_SERVER_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define OPTIONS_MAX_LIST 64
#define OPTIONS_WORD (-1) /* in place of a number: its word was given */

struct options_list {
    char *item[OPTIONS_MAX_LIST];
    size_t count;
};

struct options {
    struct options_list adapter; /* NAME=PATH */
    char *adapter_root;
    char *admin_key_file, *api_key_file;
    int64_t batch_wait_us; /* or OPTIONS_WORD: auto */
    char *check; /* folder; also `--check` without serving */
    char *config;
    char *device;
    int64_t drain_timeout_s;
    char *dtype, *experts, *family, *layers;
    struct options_list listen; /* HOST:PORT, [V6]:PORT, unix:PATH */
    char *log_format; /* text, json */
    char *log_level; /* debug, info, warning, error */
    int64_t max_adapter_bytes, max_adapters, max_batch_rows, max_body_bytes, max_connections, max_inflight_bytes;
    bool metrics_open;
    char *model, *model_name;
    int64_t queue_rows, request_timeout_s;
    char *spool_dir;
    char *synthetic;
    int64_t threads;
    bool help, version;
};

/* OPTION_SIZE: bytes in an int64_t, with an optional suffix K, M, G or T (powers of 1024). */
enum options_kind { OPTION_FLAG, OPTION_INT, OPTION_SIZE, OPTION_STRING, OPTION_LIST };

struct options_row {
    const char *name; /* without dashes; the same word in the config file */
    enum options_kind kind;
    size_t offset; /* of the field in struct options */
    const char *value; /* metavariable of --help; NULL for flags */
    const char *default_text; /* as the user would write it; NULL: none */
    int64_t min, max; /* OPTION_INT and OPTION_SIZE */
    const char *choices; /* "a|b|c": OPTION_STRING restricted to these; a word that OPTION_INT takes beside numbers; NULL: free */
    bool config; /* allowed in the config file */
    const char *help; /* one sentence with the unit */
};

/* Alphabetical; ends with a row whose name is NULL. */
extern const struct options_row options_table[];

/* Fills `o` from defaults, then the config file that --config names, then the command line (which wins; a list given on the
 * command line replaces the file's). False: *message holds a sentence (file and line, option, value, limit). */
bool options_parse(struct options *o, int argc, char **argv, char *message, size_t message_size);
void options_finish(struct options *o);
void options_print_help(FILE *out);

#endif
