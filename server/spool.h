/* SPDX-License-Identifier: Apache-2.0
 *
 * Where uploads lie while they are read: a private folder of this process under --spool-dir, with one folder for each upload. The
 * folder is locked while the process lives, so that what a killed server left behind is known from what a living one uses. Any thread.
 */
#ifndef EXPERTD_SERVER_SPOOL_H
#define EXPERTD_SERVER_SPOOL_H

#include <stdbool.h>
#include <stddef.h>

struct spool;

/* Removes what dead servers left, then makes ours. NULL: `message` says why. */
struct spool *spool_create(const char *dir, char *message, size_t size);
void spool_destroy(struct spool *spool); /* removes the folder; NULL is fine */

struct spool_entry {
    int dir_fd;
    char name[24];
};

/* A new empty folder. False: errno says why. */
bool spool_open(struct spool *spool, struct spool_entry *entry);
/* Removes the folder with the upload's two files. */
void spool_close(struct spool *spool, struct spool_entry *entry);

#endif
