/* SPDX-License-Identifier: Apache-2.0 */
#include "server/spool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPOOL_PREFIX "expertd-spool-"

struct spool {
    int parent_fd, fd;
    char name[64];
    atomic_uint next;
};

static int spool_open_dir(int at, const char *name) { return openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

static void spool_remove_upload(int at, const char *name)
{
    int fd = spool_open_dir(at, name);
    if (fd >= 0) {
        unlinkat(fd, "adapter_config.json", 0);
        unlinkat(fd, "adapter_model.safetensors", 0);
        close(fd);
    }
    unlinkat(at, name, AT_REMOVEDIR);
}

/* Empties a server's folder of uploads; only names that we make are touched. */
static void spool_remove_server(int at, const char *name, int fd)
{
    int again = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    DIR *dir = again >= 0 ? fdopendir(again) : NULL;
    if (!dir && again >= 0)
        close(again);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;)
        if (strncmp(e->d_name, "upload-", 7) == 0)
            spool_remove_upload(fd, e->d_name);
    if (dir)
        closedir(dir);
    unlinkat(at, name, AT_REMOVEDIR);
}

static void spool_remove_dead(int parent)
{
    int again = fcntl(parent, F_DUPFD_CLOEXEC, 0);
    DIR *dir = again >= 0 ? fdopendir(again) : NULL;
    if (!dir && again >= 0)
        close(again);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        struct stat st;
        if (strncmp(e->d_name, SPOOL_PREFIX, sizeof SPOOL_PREFIX - 1) != 0)
            continue;
        int fd = spool_open_dir(parent, e->d_name);
        if (fd < 0)
            continue;
        if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && flock(fd, LOCK_EX | LOCK_NB) == 0)
            spool_remove_server(parent, e->d_name, fd);
        close(fd);
    }
    if (dir)
        closedir(dir);
}

struct spool *spool_create(const char *path, char *message, size_t size)
{
    struct spool *spool = calloc(1, sizeof *spool);
    if (!spool) {
        snprintf(message, size, "out of memory");
        return NULL;
    }
    spool->fd = -1;
    spool->parent_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (spool->parent_fd >= 0) {
        spool_remove_dead(spool->parent_fd);
        /* Made under a name that nobody else guards, then locked before another server could take it for dead: a folder that is
         * gone by then is simply made again. */
        for (unsigned i = 0; i < 100 && spool->fd < 0; i++) {
            snprintf(spool->name, sizeof spool->name, SPOOL_PREFIX "%ld-%u", (long)getpid(), i);
            if (mkdirat(spool->parent_fd, spool->name, 0700) != 0) {
                if (errno != EEXIST)
                    break;
                continue;
            }
            spool->fd = spool_open_dir(spool->parent_fd, spool->name);
            struct stat st;
            if (spool->fd >= 0 && (flock(spool->fd, LOCK_EX | LOCK_NB) != 0 || fstat(spool->fd, &st) != 0 || st.st_nlink == 0)) {
                close(spool->fd);
                spool->fd = -1;
            }
        }
    }
    if (spool->fd < 0) {
        snprintf(message, size, "--spool-dir %s: %s", path, strerror(errno));
        if (spool->parent_fd >= 0)
            close(spool->parent_fd);
        free(spool);
        return NULL;
    }
    return spool;
}

void spool_destroy(struct spool *spool)
{
    if (!spool)
        return;
    spool_remove_server(spool->parent_fd, spool->name, spool->fd);
    close(spool->fd);
    close(spool->parent_fd);
    free(spool);
}

bool spool_open(struct spool *spool, struct spool_entry *entry)
{
    snprintf(entry->name, sizeof entry->name, "upload-%u", atomic_fetch_add(&spool->next, 1));
    entry->dir_fd = -1;
    if (mkdirat(spool->fd, entry->name, 0700) != 0)
        return false;
    entry->dir_fd = spool_open_dir(spool->fd, entry->name);
    if (entry->dir_fd >= 0)
        return true;
    int error = errno;
    unlinkat(spool->fd, entry->name, AT_REMOVEDIR);
    errno = error;
    return false;
}

void spool_close(struct spool *spool, struct spool_entry *entry)
{
    close(entry->dir_fd);
    entry->dir_fd = -1;
    spool_remove_upload(spool->fd, entry->name);
}
