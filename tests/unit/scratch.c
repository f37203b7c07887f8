/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/scratch.h"

#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void need(int condition, const char *what)
{
    if (!condition) {
        perror(what);
        exit(1);
    }
}

void scratch_init(struct scratch *s)
{
    strcpy(s->path, "/tmp/expertd-test-XXXXXX");
    need(mkdtemp(s->path) != NULL, "mkdtemp");
    s->fd = open(s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    need(s->fd >= 0, s->path);
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

void scratch_finish(struct scratch *s)
{
    close(s->fd);
    need(!nftw(s->path, remove_entry, 8, FTW_DEPTH | FTW_PHYS), s->path);
}

void scratch_write(const struct scratch *s, const char *name, const void *bytes, size_t length)
{
    int fd = openat(s->fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    need(fd >= 0, name);
    for (size_t at = 0; at < length;) {
        ssize_t n = write(fd, (const char *)bytes + at, length - at);
        need(n > 0, name);
        at += (size_t)n;
    }
    need(!close(fd), name);
}

void scratch_write_text(const struct scratch *s, const char *name, const char *format, ...)
{
    char *text;
    va_list args;
    va_start(args, format);
    int n = vasprintf(&text, format, args);
    va_end(args);
    need(n >= 0, "vasprintf");
    scratch_write(s, name, text, (size_t)n);
    free(text);
}

static void write_file(const struct scratch *s, const char *name, const char *header, size_t length, const void *data, size_t bytes)
{
    unsigned char *file = calloc(1, 8 + length + bytes);
    need(file != NULL, "calloc");
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)((uint64_t)length >> 8 * i);
    memcpy(file + 8, header, length);
    if (data)
        memcpy(file + 8 + length, data, bytes);
    scratch_write(s, name, file, 8 + length + bytes);
    free(file);
}

void scratch_write_header(const struct scratch *s, const char *name, const char *header, size_t data)
{
    write_file(s, name, header, strlen(header), NULL, data);
}

void st_writer_init(struct st_writer *w) { memset(w, 0, sizeof *w); }

static void append(struct st_writer *w, const char *text, size_t length)
{
    w->header = realloc(w->header, w->header_length + length + 1);
    need(w->header != NULL, "realloc");
    memcpy(w->header + w->header_length, text, length + 1);
    w->header_length += length;
}

void st_writer_add(struct st_writer *w, const char *name, const char *dtype, int rank, const int64_t *shape, const void *data, size_t bytes)
{
    char text[1024];
    int n = snprintf(text, sizeof text, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[", w->header_length ? ',' : '{', name, dtype);
    for (int i = 0; i < rank; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%" PRId64, i ? "," : "", shape[i]);
    n += snprintf(text + n, sizeof text - (size_t)n, "],\"data_offsets\":[%zu,%zu]}", w->data_length, w->data_length + bytes);
    need((size_t)n < sizeof text, name);
    append(w, text, (size_t)n);
    if (!bytes)
        return;
    w->data = realloc(w->data, w->data_length + bytes);
    need(w->data != NULL, "realloc");
    memcpy(w->data + w->data_length, data, bytes);
    w->data_length += bytes;
}

void st_writer_finish(struct st_writer *w, const struct scratch *s, const char *name)
{
    append(w, w->header_length ? "}" : "{}", w->header_length ? 1 : 2);
    write_file(s, name, w->header, w->header_length, w->data, w->data_length);
    free(w->header);
    free(w->data);
    st_writer_init(w);
}
