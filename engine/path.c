/* SPDX-License-Identifier: Apache-2.0
 *
 * Resolution below a root. openat2 with RESOLVE_BENEATH where the kernel has it; where it has not, or where it says no to
 * something that may still be fine (an absolute symlink that points below the root), a walk that opens one component at
 * a time without following links and keeps every folder on the way open, so that ".." never asks the kernel.
 */
#include "engine/path.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_DEPTH 64 /* folders open at once */
#define MAX_LINKS 40 /* as the kernel */
#define MAX_RETRY 32 /* lost races in one resolution */

struct walk {
    int root_fd;
    const char *root;
    int fd[MAX_DEPTH];
    int depth;
    int links, retries;
    char rest[PATH_MAX]; /* what is still to be resolved */
};

static int top(const struct walk *w) { return w->depth ? w->fd[w->depth - 1] : w->root_fd; }

static void pop(struct walk *w, int keep)
{
    while (w->depth > keep)
        close(w->fd[--w->depth]);
}

const char *path_strip_root(const char *root, const char *path)
{
    size_t n = strlen(root);
    while (n > 1 && root[n - 1] == '/')
        n--;
    if (n == 1 && root[0] == '/')
        n = 0;
    if (strncmp(root, path, n) || (path[n] && path[n] != '/') || path[0] != '/')
        return NULL;
    path += n;
    path += strspn(path, "/");
    return *path ? path : ".";
}

/* Puts a link's target in front of what is left after it. */
static int put_target(struct walk *w, const char *target, const char *after)
{
    if (++w->links > MAX_LINKS)
        return ELOOP;
    if (target[0] == '/') {
        target = w->root ? path_strip_root(w->root, target) : NULL;
        if (!target)
            return EXDEV;
        pop(w, 0);
    }
    size_t a = strlen(target), b = strlen(after); /* `after` is empty or starts with a slash */
    if (a + b + 1 > sizeof w->rest)
        return ENAMETOOLONG;
    memmove(w->rest + a, after, b + 1);
    memcpy(w->rest, target, a);
    return 0;
}

/* The last component is neither "." nor ".." nor a link. */
static int open_last(struct walk *w, const char *name, int flags, int *fd)
{
    *fd = openat(top(w), name, flags | O_NOFOLLOW | O_CLOEXEC);
    return *fd >= 0 ? 0 : errno;
}

static int step(struct walk *w, int flags, int *fd, bool *done)
{
    size_t skip = strspn(w->rest, "/"), len = strcspn(w->rest + skip, "/");
    if (!len) {
        *done = true;
        *fd = openat(top(w), ".", flags | O_CLOEXEC);
        return *fd >= 0 ? 0 : errno;
    }
    char name[NAME_MAX + 1];
    if (len > NAME_MAX)
        return ENAMETOOLONG;
    memcpy(name, w->rest + skip, len);
    name[len] = 0;
    const char *after = w->rest + skip + len;
    bool last = !after[strspn(after, "/")];

    if (!strcmp(name, ".") || !strcmp(name, "..")) {
        if (name[1] && !w->depth)
            return EXDEV;
        if (name[1])
            pop(w, w->depth - 1);
        memmove(w->rest, after, strlen(after) + 1);
        return 0;
    }

    int at = openat(top(w), name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;
    if (at < 0)
        return errno;
    if (fstat(at, &st)) {
        int e = errno;
        close(at);
        return e;
    }
    if (S_ISLNK(st.st_mode)) {
        char target[PATH_MAX];
        ssize_t n = readlinkat(at, "", target, sizeof target);
        int e = n < 0 ? errno : n >= (ssize_t)sizeof target ? ENAMETOOLONG : 0;
        close(at);
        if (e)
            return e;
        if (!n)
            return ENOENT;
        target[n] = 0;
        return put_target(w, target, after);
    }
    if (last && !*after) {
        close(at);
        *done = true;
        int e = open_last(w, name, flags, fd);
        /* It became a link since we looked (ENOTDIR is what O_DIRECTORY says of one): look again. */
        if ((e == ELOOP || (e == ENOTDIR && S_ISDIR(st.st_mode))) && ++w->retries < MAX_RETRY) {
            *done = false;
            return 0;
        }
        return e;
    }
    if (!S_ISDIR(st.st_mode) || w->depth == MAX_DEPTH) {
        close(at);
        return S_ISDIR(st.st_mode) ? ENAMETOOLONG : ENOTDIR;
    }
    w->fd[w->depth++] = at;
    memmove(w->rest, after, strlen(after) + 1);
    return 0;
}

int path_walk_beneath(int root_fd, const char *root, const char *path, int flags, int *fd)
{
    struct walk w = {.root_fd = root_fd, .root = root};
    size_t n = strlen(path);
    if (!n)
        return ENOENT;
    if (path[0] == '/')
        return EXDEV;
    if (n >= sizeof w.rest)
        return ENAMETOOLONG;
    memcpy(w.rest, path, n + 1);
    bool done = false;
    int e = 0;
    while (!e && !done)
        e = step(&w, flags, fd, &done);
    pop(&w, 0);
    return e;
}

int path_open_beneath(int root_fd, const char *root, const char *path, int flags, int *fd)
{
    struct open_how how = {.flags = (unsigned)(flags | O_CLOEXEC), .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    long at = -1;
    for (int i = 0; i < 4; i++) {
        at = syscall(SYS_openat2, root_fd, path, &how, sizeof how);
        if (at >= 0 || (errno != EAGAIN && errno != EINTR))
            break;
    }
    if (at >= 0) {
        *fd = (int)at;
        return 0;
    }
    switch (errno) {
    case EXDEV: /* perhaps an absolute link that stays below */
    case ENOSYS:
    case EPERM: /* what some sandboxes say for calls that they don't know */
    case EINVAL:
    case EAGAIN: /* somebody renames all the time; the walk does not mind */
    case EINTR: return path_walk_beneath(root_fd, root, path, flags, fd);
    default: return errno;
    }
}

struct path_text path_show(const char *folder, const char *name)
{
    struct path_text out;
    size_t length = folder ? strlen(folder) : 0;
    bool apart = length && name && folder[length - 1] != '/';
    snprintf(out.s, sizeof out.s, "%.*s%s%s", PATH_FOLDER_SHOWN, folder ? folder : "", apart ? "/" : "", name ? name : "");
    return out;
}

enum engine_code path_check_unchanged(int fd, const struct stat *before, const char *name, enum engine_code bad, struct engine_error *error)
{
    struct stat now;
    if (fstat(fd, &now))
        return engine_fail(error, engine_errno_code(errno), "%s: %s", name, strerror(errno));
    if (now.st_size == before->st_size && now.st_mtim.tv_sec == before->st_mtim.tv_sec && now.st_mtim.tv_nsec == before->st_mtim.tv_nsec)
        return ENGINE_OK;
    return engine_fail(error, bad, "%s: the file was written to while it was being read", name);
}
