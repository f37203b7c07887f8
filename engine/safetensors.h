/* SPDX-License-Identifier: Apache-2.0
 *
 * A strict reader of safetensors files, which are untrusted: every rule of the format is checked at open, every read is
 * a pread inside the bounds found then, and a file that shrinks meanwhile gives an error, never a signal.
 *
 * A file belongs to who opened it; an open file may be read from many threads.
 */
#ifndef EXPERTD_ENGINE_SAFETENSORS_H
#define EXPERTD_ENGINE_SAFETENSORS_H

#include "engine/error.h"
#include "kernels/dtype.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SAFETENSORS_MAX_RANK 8
#define SAFETENSORS_MAX_HEADER 100000000

/* Element types a header may name; only BF16, F16 and F32 are ever read as numbers. */
enum safetensors_dtype {
    ST_BOOL,
    ST_U8,
    ST_I8,
    ST_F8_E4M3,
    ST_F8_E5M2,
    ST_F8_E8M0,
    ST_I16,
    ST_U16,
    ST_F16,
    ST_BF16,
    ST_I32,
    ST_U32,
    ST_F32,
    ST_F64,
    ST_I64,
    ST_U64,
    ST_F4,
    ST_F6_E2M3,
    ST_F6_E3M2,
    ST_F8_E4M3FNUZ,
    ST_F8_E5M2FNUZ,
    ST_C64,
};

struct safetensors_tensor {
    const char *name; /* owned by the file; UTF-8, no NUL inside */
    enum safetensors_dtype dtype;
    int32_t rank;
    int64_t shape[SAFETENSORS_MAX_RANK];
    int64_t begin, end; /* bytes in the file, absolute */
};

struct safetensors_file;

/* Opens dir_fd/name (regular files only; symlinks are followed, see path.h for roots) and checks it whole. `bad` is the
 * code for faults in the content: ENGINE_BAD_CHECKPOINT or ENGINE_BAD_ADAPTER. Sentences begin with the file's path, of which `folder` is
 * dir_fd's part (NULL: its name will do), and name the tensor. */
enum engine_code safetensors_open(int dir_fd, const char *folder, const char *name, enum engine_code bad, struct safetensors_file **out,
                                  struct engine_error *error);
/* The same for an open descriptor, which the file takes over (also on failure). Sentences begin with `name`. */
enum engine_code safetensors_open_fd(int fd, const char *name, enum engine_code bad, struct safetensors_file **out,
                                     struct engine_error *error);
void safetensors_close(struct safetensors_file *file); /* NULL is fine */

const char *safetensors_name(const struct safetensors_file *file); /* as sentences call it */
size_t safetensors_count(const struct safetensors_file *file);
/* In order of position in the file. */
const struct safetensors_tensor *safetensors_at(const struct safetensors_file *file, size_t index);
const struct safetensors_tensor *safetensors_find(const struct safetensors_file *file, const char *name); /* NULL: none */

/* Reads `bytes` from `offset` bytes into the tensor's data. */
enum engine_code safetensors_read(const struct safetensors_file *file, const struct safetensors_tensor *tensor, int64_t offset, void *dst,
                                  size_t bytes, struct engine_error *error);

/* After the last read: see path_check_unchanged. */
enum engine_code safetensors_check_unchanged(const struct safetensors_file *file, struct engine_error *error);

/* Tells the system that these bytes will be read soon. A hint only. */
void safetensors_prefetch(const struct safetensors_file *file, const struct safetensors_tensor *tensor, int64_t offset, int64_t bytes);

const char *safetensors_dtype_name(enum safetensors_dtype dtype); /* "BF16" */
/* Element size in bits. */
int safetensors_dtype_bits(enum safetensors_dtype dtype);
/* BF16, F16, F32 as ours; false for the others. */
bool safetensors_dtype_float(enum safetensors_dtype dtype, enum dtype *out);

#endif
