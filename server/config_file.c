/* SPDX-License-Identifier: Apache-2.0
 *
 * The config file: the options of the command line, one a line.
 */
#include "server/config_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define OPTIONS_MAX_ROWS 64

struct reader {
    struct options *options;
    const char *path;
    int line;
    int first_line[OPTIONS_MAX_ROWS]; /* where each option was set; 0: not yet */
    char *message;
    size_t message_size;
};

/* The whole file with a terminator; NULL with a message. */
static char *read_whole(const char *path, size_t *length, char *message, size_t size)
{
    FILE *file = fopen(path, "re");
    char *text = malloc(CONFIG_FILE_MAX + 1);
    if (!file || !text) {
        snprintf(message, size, "%s: %s", path, file ? "out of memory" : strerror(errno));
    } else {
        *length = fread(text, 1, CONFIG_FILE_MAX + 1, file);
        if (ferror(file))
            snprintf(message, size, "%s: %s", path, strerror(errno));
        else if (*length > CONFIG_FILE_MAX)
            snprintf(message, size, "%s: larger than %d bytes, so not a config file", path, CONFIG_FILE_MAX);
        else if (memchr(text, '\0', *length))
            snprintf(message, size, "%s: holds a NUL byte, so not a config file", path);
        else {
            text[*length] = '\0';
            fclose(file);
            return text;
        }
    }
    if (file)
        fclose(file);
    free(text);
    return NULL;
}

/* Cuts blanks off both ends of [text, end) and terminates it. */
static char *trim(char *text, char *end)
{
    while (text < end && strchr(" \t\r", *text))
        text++;
    while (end > text && strchr(" \t\r", end[-1]))
        end--;
    *end = '\0';
    return text;
}

static bool fail_unknown(struct reader *r, const char *name)
{
    const char *nearest = options_nearest(name, strlen(name));
    snprintf(r->message, r->message_size, "%s:%d: unknown option '%.80s'%s%s%s", r->path, r->line, name, nearest ? "; did you mean '" : "",
             nearest ? nearest : "", nearest ? "'?" : "");
    return false;
}

static bool read_line(struct reader *r, char *text, char *end)
{
    text = trim(text, end);
    if (!*text || *text == '#')
        return true;
    char *equals = strchr(text, '=');
    if (!equals) {
        snprintf(r->message, r->message_size, "%s:%d: expected `name = value`, found '%.80s'", r->path, r->line, text);
        return false;
    }
    char *value = trim(equals + 1, equals + 1 + strlen(equals + 1));
    char *name = trim(text, equals);
    const struct options_row *row = options_find(name, strlen(name));
    if (!row)
        return fail_unknown(r, name);
    if (!row->config) {
        snprintf(r->message, r->message_size, "%s:%d: '%s' is for the command line only", r->path, r->line, name);
        return false;
    }
    int *first = &r->first_line[row - options_table];
    if (*first && row->kind != OPTION_LIST) {
        snprintf(r->message, r->message_size, "%s:%d: '%s' was already set in line %d", r->path, r->line, name, *first);
        return false;
    }
    if (!*first && row->kind == OPTION_LIST)
        options_clear_list(r->options, row);
    if (!*first)
        *first = r->line;

    char label[4096 + 96];
    snprintf(label, sizeof label, "%s:%d: '%s'", r->path, r->line, name);
    return options_set(r->options, row, value, label, r->message, r->message_size);
}

bool config_file_read(struct options *o, const char *path, char *message, size_t message_size)
{
    struct reader r = {.options = o, .path = path, .message = message, .message_size = message_size};
    size_t length;
    char *text = read_whole(path, &length, message, message_size);
    if (!text)
        return false;
    bool ok = true;
    for (char *line = text; ok && line < text + length;) {
        char *end = strchrnul(line, '\n');
        char *next = *end ? end + 1 : end;
        r.line++;
        ok = read_line(&r, line, end);
        line = next;
    }
    free(text);
    return ok;
}
