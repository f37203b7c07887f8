/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening files below a folder that nothing may leave: not "..", not a symlink, and not a symlink swapped in meanwhile.
 * Symlinks that stay below are followed, as hub caches need. And two small things about files: what messages call them, and whether they
 * stay as they are. Any thread.
 */
#ifndef EXPERTD_ENGINE_PATH_H
#define EXPERTD_ENGINE_PATH_H

#include "engine/error.h"

#include <stdbool.h>
#include <sys/stat.h>

/* Bytes of a folder's path in a message: there must be room for what is wrong. */
#define PATH_FOLDER_SHOWN 300

/* Opens `path`, relative to root_fd, with `flags` of open(2). `root` is the folder's real path, by which absolute symlinks
 * are recognised as staying below; NULL refuses them all. 0, or an errno: EXDEV means that the path leaves the root. */
int path_open_beneath(int root_fd, const char *root, const char *path, int flags, int *fd);

/* The same without openat2(2): what path_open_beneath falls back on. */
int path_walk_beneath(int root_fd, const char *root, const char *path, int flags, int *fd);

/* What of the absolute `path` follows `root`: "." for the root itself, NULL when it does not lie below. Compares text only. */
const char *path_strip_root(const char *root, const char *path);

/* What a message calls the file `name` in `folder`: its path, of which a long folder's is cut. Either may be NULL, and is left out. */
struct path_text {
    char s[PATH_FOLDER_SHOWN + 1 + 255 + 1];
};
struct path_text path_show(const char *folder, const char *name);

/* After the last read of `fd`: that all of them saw the same file, and not one that somebody writes anew in its place. Told by its size and
 * time of modification, which the system keeps to some milliseconds, against those in `before`. `bad` is the code if it changed, `name` what
 * the sentence begins with. */
enum engine_code path_check_unchanged(int fd, const struct stat *before, const char *name, enum engine_code bad,
                                      struct engine_error *error);

#endif
