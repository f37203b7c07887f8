/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of a checkpoint folder: one model.safetensors, or shards under a model.safetensors.index.json. Knows every
 * tensor's name at once and opens a shard only when a tensor of it is wanted.
 */
#ifndef EXPERTD_ENGINE_CHECKPOINT_H
#define EXPERTD_ENGINE_CHECKPOINT_H

#include "engine/faults.h"
#include "engine/safetensors.h"

struct checkpoint;

/* A folder that has a checkpoint's files, unread: the caller closes *dir_fd. Here as below, sentences begin with the path of the folder, or
 * of the file in it that is at fault. */
enum engine_code checkpoint_open_folder(const char *folder, int *dir_fd, struct engine_error *error);
enum engine_code checkpoint_open(const char *folder, struct checkpoint **out, struct engine_error *error);
/* Whether a folder has the files of a PEFT adapter, or one of them, and none of a checkpoint. */
bool checkpoint_is_adapter(int dir_fd);
void checkpoint_close(struct checkpoint *checkpoint); /* NULL is fine */

int checkpoint_dir_fd(const struct checkpoint *checkpoint);
/* Sorted by name. */
size_t checkpoint_count(const struct checkpoint *checkpoint);
const char *checkpoint_tensor_name(const struct checkpoint *checkpoint, size_t index);

/* Opens the shard if that has not been done. False: there is a fault, which has been added unless it was before. */
bool checkpoint_resolve(struct checkpoint *checkpoint, size_t index, const struct safetensors_file **file,
                        const struct safetensors_tensor **tensor, struct faults *faults);
/* Position of an opened file among the checkpoint's. */
int32_t checkpoint_file_index(const struct checkpoint *checkpoint, size_t index);
/* After the last read: that the opened files are still what they were. */
enum engine_code checkpoint_check_unchanged(const struct checkpoint *checkpoint, struct engine_error *error);
int32_t checkpoint_files(const struct checkpoint *checkpoint);
int32_t checkpoint_files_opened(const struct checkpoint *checkpoint);

#endif
