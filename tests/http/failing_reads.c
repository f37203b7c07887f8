/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands between the daemon and the system's calls that open and read files (the linker puts it there), in a build for tests alone, as a
 * disk or a network that fails: EIO for the files whose names FAIL_OPEN and FAIL_READ give, the latter from the byte FAIL_READ_AT on.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __real_openat64(int dir_fd, const char *path, int flags, ...);
int __wrap_openat64(int dir_fd, const char *path, int flags, ...);
ssize_t __real_pread64(int fd, void *to, size_t bytes, off_t offset);
ssize_t __wrap_pread64(int fd, void *to, size_t bytes, off_t offset);
ssize_t __real_read(int fd, void *to, size_t bytes);
ssize_t __wrap_read(int fd, void *to, size_t bytes);
/* What compilers that check sizes by default (_FORTIFY_SOURCE) call instead. */
ssize_t __wrap___pread64_chk(int fd, void *to, size_t bytes, off_t offset, size_t room);
ssize_t __wrap___read_chk(int fd, void *to, size_t bytes, size_t room);

/* Whether the path's last part is the name that the variable holds. */
static bool meant(const char *variable, const char *path)
{
    const char *name = getenv(variable), *slash = strrchr(path, '/');
    return name && !strcmp(name, slash ? slash + 1 : path);
}

static int fail(void)
{
    errno = EIO;
    return -1;
}

/* Modes go with O_CREAT alone; passing one that was not given is harmless. */
int __wrap_open64(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    int mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    return meant("FAIL_OPEN", path) ? fail() : __real_open64(path, flags, mode);
}

int __wrap_openat64(int dir_fd, const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    int mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    return meant("FAIL_OPEN", path) ? fail() : __real_openat64(dir_fd, path, flags, mode);
}

static bool meant_open(const char *variable, int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = '\0';
    return meant(variable, path);
}

ssize_t __wrap_pread64(int fd, void *to, size_t bytes, off_t offset)
{
    const char *from = getenv("FAIL_READ_AT");
    if (meant_open("FAIL_READ", fd) && offset + (off_t)bytes > (from ? atoll(from) : 0))
        return fail();
    return __real_pread64(fd, to, bytes, offset);
}

ssize_t __wrap_read(int fd, void *to, size_t bytes) { return meant_open("FAIL_READ", fd) ? fail() : __real_read(fd, to, bytes); }

ssize_t __wrap___pread64_chk(int fd, void *to, size_t bytes, off_t offset, size_t room)
{
    if (bytes > room)
        abort();
    return __wrap_pread64(fd, to, bytes, offset);
}

ssize_t __wrap___read_chk(int fd, void *to, size_t bytes, size_t room)
{
    if (bytes > room)
        abort();
    return __wrap_read(fd, to, bytes);
}
