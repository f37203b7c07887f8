/* SPDX-License-Identifier: Apache-2.0
 *
 * A temporary folder for tests, and writers of the files that go into it: safetensors built tensor by tensor, or raw bytes
 * for hostile ones. Failures to write end the test.
 */
#ifndef EXPERTD_TESTS_SCRATCH_H
#define EXPERTD_TESTS_SCRATCH_H

#include <stddef.h>
#include <stdint.h>

struct scratch {
    char path[64];
    int fd;
};

void scratch_init(struct scratch *s);
void scratch_finish(struct scratch *s); /* removes the folder with all that is in it */
void scratch_write(const struct scratch *s, const char *name, const void *bytes, size_t length);
void scratch_write_text(const struct scratch *s, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* A safetensors file from a header's text and `data` bytes of zeros. */
void scratch_write_header(const struct scratch *s, const char *name, const char *header, size_t data);

/* Tensors of one file being made; names and data are copied. */
struct st_writer {
    char *header;
    size_t header_length;
    unsigned char *data;
    size_t data_length;
};

void st_writer_init(struct st_writer *w);
/* `dtype` as in the file ("BF16"); `bytes` of data. */
void st_writer_add(struct st_writer *w, const char *name, const char *dtype, int rank, const int64_t *shape, const void *data,
                   size_t bytes);
/* Writes the file and frees the writer's memory. */
void st_writer_finish(struct st_writer *w, const struct scratch *s, const char *name);

#endif
