/* SPDX-License-Identifier: Apache-2.0
 *
 * The option table, the command line and --help. The config file is read by config_file.c through the same setter.
 *
 * On the command line the last of a repeated option wins, as with most tools, so that wrappers may append overrides; lists
 * collect. A list given on the command line replaces the config file's, and that replaces the default.
 */
#include "server/options.h"
#include "server/config_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(member) offsetof(struct options, member)
#define MAX_BYTES ((int64_t)1 << 50)

const struct options_row options_table[] = {
    {"adapter", OPTION_LIST, FIELD(adapter), "NAME=PATH", NULL, 0, 0, NULL, true,
     "Install the adapter in folder PATH as NAME before serving; may be repeated."},
    {"adapter-root", OPTION_STRING, FIELD(adapter_root), "DIR", NULL, 0, 0, NULL, true,
     "Folder that adapters may be installed from by path; without it only uploads and --adapter install."},
    {"admin-key-file", OPTION_STRING, FIELD(admin_key_file), "FILE", NULL, 0, 0, NULL, true,
     "File whose first line is the key for adapter changes and repository calls; without it these are taken on loopback and Unix "
     "listeners only."},
    {"api-key-file", OPTION_STRING, FIELD(api_key_file), "FILE", NULL, 0, 0, NULL, true,
     "File whose first line is the key for data calls; without it they need none."},
    {"batch-wait-us", OPTION_INT, FIELD(batch_wait_us), "MICROSECONDS|auto", "0", 0, 1000000, "auto", true,
     "How long a lone request waits for others to share its batch. auto: batches wait for clients that come back in time, when that "
     "has been seen to cost less than a batch of their own."},
    {"check", OPTION_STRING, FIELD(check), "DIR", NULL, 0, 0, NULL, false,
     "Examine a checkpoint or an adapter (against --model, if given), print what it would serve or every fault, and exit."},
    {"config", OPTION_STRING, FIELD(config), "FILE", NULL, 0, 0, NULL, false,
     "Read options from FILE: lines of `name = value` with the names of this list, # comments; the command line wins."},
    {"device", OPTION_STRING, FIELD(device), "auto|cpu|cuda[:N]", "auto", 0, 0, NULL, true,
     "Where to compute; auto takes a GPU if there is one."},
    {"drain-timeout-s", OPTION_INT, FIELD(drain_timeout_s), "SECONDS", "30", 0, 86400, NULL, true,
     "How long requests in flight may take to finish after SIGTERM."},
    {"dtype", OPTION_STRING, FIELD(dtype), "bf16|fp16", NULL, 0, 0, "bf16|fp16", true,
     "Type that weights are held in; unless given, fp16 for fp16 files and bf16 for all others."},
    {"experts", OPTION_STRING, FIELD(experts), "LIST", NULL, 0, 0, NULL, true,
     "Hold these experts only, as in 0-31,40; all unless given. Slots routed to others contribute nothing."},
    {"family", OPTION_STRING, FIELD(family), "NAME", NULL, 0, 0, NULL, true,
     "Read the checkpoint as this model_type; unless given, config.json and the tensors decide."},
    {"help", OPTION_FLAG, FIELD(help), NULL, NULL, 0, 0, NULL, false, "Print this and exit."},
    {"layers", OPTION_STRING, FIELD(layers), "LIST", NULL, 0, 0, NULL, true,
     "Hold these layers only, as in 0-3,7; all unless given. The others are never read."},
    {"listen", OPTION_LIST, FIELD(listen), "ADDR", "127.0.0.1:8080", 0, 0, NULL, true,
     "Address to serve: HOST:PORT, [IPV6]:PORT or unix:PATH; port 0 picks a free one; may be repeated. Sockets handed over by systemd "
     "take its place."},
    {"log-format", OPTION_STRING, FIELD(log_format), "text|json", "text", 0, 0, "text|json", true,
     "Form of the log on stderr: for people, or one JSON object a line."},
    {"log-level", OPTION_STRING, FIELD(log_level), "LEVEL", "info", 0, 0, "debug|info|warning|error", true,
     "Least important lines to log: debug, info, warning or error. Requests are logged at info."},
    {"max-adapter-bytes", OPTION_SIZE, FIELD(max_adapter_bytes), "BYTES", "8G", 1, MAX_BYTES, NULL, true,
     "Largest adapter file taken, by path or upload."},
    {"max-adapters", OPTION_INT, FIELD(max_adapters), "N", "64", 0, 4096, NULL, true,
     "Adapters that may be installed at once, counting removed ones that requests still use."},
    {"max-batch-rows", OPTION_INT, FIELD(max_batch_rows), "ROWS", "0", 0, 65536, NULL, true,
     "Rows computed at once, which fixes scratch memory; larger requests run in windows. 0: what suits the device."},
    {"max-body-bytes", OPTION_SIZE, FIELD(max_body_bytes), "BYTES", "256M", 1024, MAX_BYTES, NULL, true,
     "Largest request body taken; adapter uploads have --max-adapter-bytes."},
    {"max-connections", OPTION_INT, FIELD(max_connections), "N", "1024", 1, 1000000, NULL, true,
     "Connections open at once; further ones are refused. What a client has not read yet lies in its socket's buffer, beside "
     "--max-inflight-bytes: up to 1 MiB each on Unix sockets."},
    {"max-inflight-bytes", OPTION_SIZE, FIELD(max_inflight_bytes), "BYTES", "1G", 1048576, MAX_BYTES, NULL, true,
     "Memory for bodies and replies of requests in flight; past it requests get 429, and one that needs more than this alone 413."},
    {"metrics-open", OPTION_FLAG, FIELD(metrics_open), NULL, NULL, 0, 0, NULL, true, "Serve /metrics without the data key."},
    {"model", OPTION_STRING, FIELD(model), "DIR", NULL, 0, 0, NULL, true,
     "Folder of the checkpoint to serve: config.json and safetensors. This or --synthetic is needed."},
    {"model-name", OPTION_STRING, FIELD(model_name), "NAME", NULL, 0, 0, NULL, true,
     "Name of the model in URLs and replies; unless given, the folder's name."},
    {"queue-rows", OPTION_INT, FIELD(queue_rows), "ROWS", "65536", 1, 1073741824, NULL, true,
     "Rows that may wait and run in all; past it requests get 429."},
    {"request-timeout-s", OPTION_INT, FIELD(request_timeout_s), "SECONDS", "60", 1, 86400, NULL, true,
     "Time for a client to send a request whole, and then for it to be answered."},
    {"spool-dir", OPTION_STRING, FIELD(spool_dir), "DIR", "/var/tmp", 0, 0, NULL, true, "Folder for adapter uploads while they are read."},
    {"synthetic", OPTION_STRING, FIELD(synthetic), "SHAPE", NULL, 0, 0, NULL, true,
     "Serve random weights of a shape, as in E=64,K=8,H=2048,I=1024,L=1, for load tests."},
    {"threads", OPTION_INT, FIELD(threads), "N", "0", 0, 4096, NULL, true, "Compute threads; 0: one for each core."},
    {"version", OPTION_FLAG, FIELD(version), NULL, NULL, 0, 0, NULL, false, "Print the version and exit."},
    {NULL, OPTION_FLAG, 0, NULL, NULL, 0, 0, NULL, false, NULL},
};

#define OPTIONS_COUNT (sizeof options_table / sizeof options_table[0] - 1)

static void *field_of(struct options *o, const struct options_row *row) { return (char *)o + row->offset; }

static void list_clear(struct options_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->item[i]);
    list->count = 0;
}

void options_finish(struct options *o)
{
    for (const struct options_row *row = options_table; row->name; row++) {
        if (row->kind == OPTION_STRING)
            free(*(char **)field_of(o, row));
        else if (row->kind == OPTION_LIST)
            list_clear(field_of(o, row));
    }
    memset(o, 0, sizeof *o);
}

const struct options_row *options_find(const char *name, size_t length)
{
    for (const struct options_row *row = options_table; row->name; row++) {
        if (strlen(row->name) == length && !memcmp(row->name, name, length))
            return row;
    }
    return NULL;
}

/* Levenshtein's distance; names are short, so one row of the table on the stack is enough. */
static size_t edit_distance(const char *a, size_t a_length, const char *b)
{
    size_t row[64], b_length = strlen(b);
    if (a_length >= 64 || b_length >= 64)
        return 64;
    for (size_t j = 0; j <= b_length; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[b_length];
}

const char *options_nearest(const char *name, size_t length)
{
    const char *nearest = NULL;
    size_t best = length / 3 + 2; /* further than this is no typing error */
    for (const struct options_row *row = options_table; row->name; row++) {
        size_t distance = edit_distance(name, length, row->name);
        if (distance < best) {
            best = distance;
            nearest = row->name;
        }
    }
    return nearest;
}

/* Digits with an optional power of 1024; false when it is no such number. An overflow gives INT64_MAX, past every limit. */
static bool parse_number(const char *text, bool suffix, int64_t *out)
{
    if (*text < '0' || *text > '9')
        return false;
    char *end;
    errno = 0;
    intmax_t value = strtoimax(text, &end, 10);
    if (errno == ERANGE || value > INT64_MAX)
        value = INT64_MAX;
    if (suffix && *end) {
        static const char letters[] = "KkMmGgTt";
        const char *letter = strchr(letters, *end);
        if (!letter)
            return false;
        int shift = 10 * (int)((letter - letters) / 2 + 1);
        value = value > INT64_MAX >> shift ? INT64_MAX : value << shift;
        end++;
    }
    *out = value;
    return *end == '\0';
}

static bool is_choice(const char *choices, const char *text)
{
    size_t length = strlen(text);
    while (true) {
        size_t span = strcspn(choices, "|");
        if (span == length && !memcmp(choices, text, length))
            return true;
        if (!choices[span])
            return false;
        choices += span + 1;
    }
}

static bool is_device(const char *text)
{
    if (is_choice("auto|cpu|cuda", text))
        return true;
    return !strncmp(text, "cuda:", 5) && text[5] && strspn(text + 5, "0123456789") == strlen(text + 5) && strlen(text) <= 8;
}

static bool fail(char *message, size_t size, const char *prefix, const char *text)
{
    snprintf(message, size, "%s %s", prefix, text);
    return false;
}

static bool set_number(struct options *o, const struct options_row *row, const char *text, const char *label, char *message, size_t size)
{
    int64_t value;
    if (row->choices && !strcmp(text, row->choices)) {
        *(int64_t *)field_of(o, row) = OPTIONS_WORD;
        return true;
    }
    if (!parse_number(text, row->kind == OPTION_SIZE, &value)) {
        snprintf(message, size, "%s takes a %s%s%s", label,
                 row->kind == OPTION_SIZE ? "number of bytes, such as 4096, 64K, 256M or 8G" : "whole number", row->choices ? " or " : "",
                 row->choices ? row->choices : "");
        return false;
    }
    if (value < row->min || value > row->max) {
        snprintf(message, size, "%s must lie between %" PRId64 " and %" PRId64 ", and '%.40s' does not", label, row->min, row->max, text);
        return false;
    }
    *(int64_t *)field_of(o, row) = value;
    return true;
}

static bool set_string(struct options *o, const struct options_row *row, const char *text, const char *label, char *message, size_t size)
{
    char **field = field_of(o, row);
    if (row->choices && !is_choice(row->choices, text)) {
        snprintf(message, size, "%s takes one of %s, not '%.80s'", label, row->choices, text);
        return false;
    }
    if (row->offset == FIELD(device) && !is_device(text)) {
        snprintf(message, size, "%s takes one of auto, cpu, cuda or cuda:N, not '%.80s'", label, text);
        return false;
    }
    char *copy = strdup(text);
    if (!copy)
        return fail(message, size, label, "can't be kept: out of memory");
    free(*field);
    *field = copy;
    return true;
}

static bool add_item(struct options *o, const struct options_row *row, const char *text, const char *label, char *message, size_t size)
{
    struct options_list *list = field_of(o, row);
    if (row->offset == FIELD(adapter)) {
        const char *equals = strchr(text, '=');
        if (!equals || equals == text || !equals[1]) {
            snprintf(message, size, "%s takes NAME=PATH, not '%.80s'", label, text);
            return false;
        }
    }
    if (list->count == OPTIONS_MAX_LIST) {
        snprintf(message, size, "%s may be given at most %d times", label, OPTIONS_MAX_LIST);
        return false;
    }
    char *copy = strdup(text);
    if (!copy)
        return fail(message, size, label, "can't be kept: out of memory");
    list->item[list->count++] = copy;
    return true;
}

bool options_set(struct options *o, const struct options_row *row, const char *text, const char *label, char *message, size_t size)
{
    if (row->kind == OPTION_FLAG) {
        if (strcmp(text, "true") && strcmp(text, "false")) {
            snprintf(message, size, "%s takes true or false, not '%.80s'", label, text);
            return false;
        }
        *(bool *)field_of(o, row) = text[0] == 't';
        return true;
    }
    if (!*text)
        return fail(message, size, label, "needs a value that is not empty");
    if (row->kind == OPTION_LIST)
        return add_item(o, row, text, label, message, size);
    if (row->kind == OPTION_STRING)
        return set_string(o, row, text, label, message, size);
    return set_number(o, row, text, label, message, size);
}

void options_clear_list(struct options *o, const struct options_row *row) { list_clear(field_of(o, row)); }

static bool set_defaults(struct options *o, char *message, size_t size)
{
    for (const struct options_row *row = options_table; row->name; row++) {
        if (row->default_text && !options_set(o, row, row->default_text, row->name, message, size))
            return false;
    }
    return true;
}

/* Options that print something and exit have their first letter as a short form, -h and -v. */
static bool is_short(const struct options_row *row) { return row->kind == OPTION_FLAG && !row->config; }

static const struct options_row *find_short(const char *argument)
{
    for (const struct options_row *row = options_table; row->name; row++) {
        if (is_short(row) && argument[0] == '-' && argument[1] == row->name[0] && !argument[2])
            return row;
    }
    return NULL;
}

/* Finds the option and value at argv[*i] and steps past them. */
static bool next_argument(int argc, char **argv, int *i, const struct options_row **row, const char **value, char *message, size_t size)
{
    const char *argument = argv[(*i)++];
    *value = "true";
    *row = find_short(argument);
    if (*row)
        return true;
    if (argument[0] != '-' || argument[1] != '-' || !argument[2]) {
        snprintf(message, size, "'%.80s' is not an option; options look like --name VALUE (see --help)", argument);
        return false;
    }
    const char *name = argument + 2;
    size_t length = strcspn(name, "=");
    *row = options_find(name, length);
    if (!*row) {
        const char *nearest = options_nearest(name, length);
        snprintf(message, size, "unknown option --%.*s%s%s%s", (int)(length > 80 ? 80 : length), name, nearest ? "; did you mean --" : "",
                 nearest ? nearest : " (see --help)", nearest ? "?" : "");
        return false;
    }
    if (name[length]) {
        *value = name + length + 1;
    } else if ((*row)->kind == OPTION_FLAG) {
        *value = "true";
    } else if (*i < argc) {
        *value = argv[(*i)++];
    } else {
        snprintf(message, size, "--%s needs a value (%s)", (*row)->name, (*row)->value);
        return false;
    }
    return true;
}

static bool apply_command_line(struct options *o, int argc, char **argv, char *message, size_t size)
{
    bool seen[OPTIONS_COUNT] = {false};
    for (int i = 1; i < argc;) {
        const struct options_row *row;
        const char *value;
        char label[64];
        if (!next_argument(argc, argv, &i, &row, &value, message, size))
            return false;
        bool *again = &seen[row - options_table];
        if (row->kind == OPTION_LIST && !*again)
            options_clear_list(o, row);
        *again = true;
        snprintf(label, sizeof label, "--%s", row->name);
        if (!options_set(o, row, value, label, message, size))
            return false;
    }
    return true;
}

/* The file must be read before the rest of the command line, which overrides it. */
static bool find_config(int argc, char **argv, const char **path, char *message, size_t size)
{
    *path = NULL;
    for (int i = 1; i < argc;) {
        const struct options_row *row;
        const char *value;
        if (!next_argument(argc, argv, &i, &row, &value, message, size))
            return false;
        if (row->offset == FIELD(config))
            *path = value;
        if (row->offset == FIELD(help) || row->offset == FIELD(version)) {
            *path = NULL; /* these must work beside a broken file */
            return true;
        }
    }
    return true;
}

static bool check_together(const struct options *o, char *message, size_t size)
{
    if (o->help || o->version)
        return true;
    if (o->model && o->synthetic)
        return fail(message, size, "--model and --synthetic", "exclude each other");
    if (o->check && o->synthetic)
        return fail(message, size, "--check and --synthetic", "exclude each other");
    if (!o->check && !o->model && !o->synthetic)
        return fail(message, size, "--model DIR or --synthetic SHAPE", "is needed (see --help)");
    if (o->synthetic && (o->layers || o->experts || o->family))
        return fail(message, size, "--layers, --experts and --family", "are for checkpoints, not for --synthetic");
    if (o->adapter.count > (size_t)o->max_adapters) {
        snprintf(message, size, "--adapter is given %zu times, and --max-adapters is %" PRId64, o->adapter.count, o->max_adapters);
        return false;
    }
    for (size_t i = 1; i < o->adapter.count; i++) {
        const char *item = o->adapter.item[i];
        size_t name = strcspn(item, "=") + 1;
        for (size_t k = 0; k < i; k++) {
            if (!strncmp(item, o->adapter.item[k], name)) {
                snprintf(message, size, "--adapter %s: --adapter %s has the same name", item, o->adapter.item[k]);
                return false;
            }
        }
    }
    return true;
}

bool options_parse(struct options *o, int argc, char **argv, char *message, size_t size)
{
    const char *path;
    memset(o, 0, sizeof *o);
    if (find_config(argc, argv, &path, message, size) && set_defaults(o, message, size) &&
        (!path || config_file_read(o, path, message, size)) && apply_command_line(o, argc, argv, message, size) &&
        check_together(o, message, size))
        return true;
    options_finish(o);
    return false;
}

#define HELP_WIDTH 100
#define HELP_INDENT 6

/* Words of `text` in lines of at most HELP_WIDTH columns. */
static void print_wrapped(FILE *out, const char *text)
{
    size_t column = 0;
    while (*text) {
        size_t word = strcspn(text, " ");
        if (column && column + 1 + word > HELP_WIDTH) {
            fputc('\n', out);
            column = 0;
        }
        if (column)
            column += (size_t)fprintf(out, " ");
        else
            column = (size_t)fprintf(out, "%*s", HELP_INDENT, "");
        fwrite(text, 1, word, out);
        column += word;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

void options_print_help(FILE *out)
{
    fprintf(out, "usage: expertd --model DIR [--name VALUE | --name=VALUE]...\n"
                 "       expertd --check DIR [--model DIR]\n\n"
                 "Serves the experts of a mixture-of-experts model, with LoRA adapters chosen row by row, over HTTP.\n"
                 "BYTES may end in K, M, G or T (powers of 1024). Of a repeated option the last wins, unless it says that it may\n"
                 "be repeated. A config file's options have these names, too: see --config.\n\n");
    for (const struct options_row *row = options_table; row->name; row++) {
        char text[512];
        snprintf(text, sizeof text, "%s%s%s%s", row->help, row->default_text ? " Default: " : "",
                 row->default_text ? row->default_text : "", row->default_text ? "." : "");
        fprintf(out, "  --%s%s%s", row->name, row->value ? " " : "", row->value ? row->value : "");
        if (is_short(row))
            fprintf(out, ", -%c", row->name[0]);
        fputc('\n', out);
        print_wrapped(out, text);
    }
    fputs("\nSIGTERM and SIGINT end the server once what is in flight has finished; a second one ends it at once.\n"
          "SIGHUP reads the key files again.\n"
          "\n"
          "Exit status, of --check, too:\n"
          "  0  an orderly end; with --check, nothing is wrong\n"
          "  1  a failure while serving, or of the machine: memory, a device, an address that is taken, a drain that\n"
          "     timed out\n"
          "  2  what was asked for can't be used: an option, the config or a key file; a checkpoint, adapter, layer or\n"
          "     expert that is missing, damaged or does not fit. Starting again does not help before something is changed.\n",
          out);
}
