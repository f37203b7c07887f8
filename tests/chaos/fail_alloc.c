/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into a server under test: makes one chosen allocation fail.
 *
 * FAIL_ALLOC_FILE names a file of 16 bytes that the test and the server share. The first word counts down with each allocation
 * while it is positive; the one that takes it to zero returns NULL with ENOMEM. The second word counts failures given, so that a test
 * knows when it has gone past the last allocation of what it exercises.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct control {
    _Atomic int64_t countdown, failures;
};

static struct control *control;

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static void *(*real_aligned_alloc)(size_t, size_t);
static int (*real_posix_memalign)(void **, size_t, size_t);

/* dlsym itself allocates on some systems, before the real functions are known. */
static char early[65536];
static size_t early_used;

static void *early_allocate(size_t size)
{
    size_t at = (early_used + 15) & ~(size_t)15;
    if (size > sizeof early - at)
        return NULL;
    early_used = at + size;
    return early + at;
}

static bool is_early(const void *p) { return (const char *)p >= early && (const char *)p < early + sizeof early; }

__attribute__((constructor)) static void setup(void)
{
    *(void **)&real_calloc = dlsym(RTLD_NEXT, "calloc");
    *(void **)&real_realloc = dlsym(RTLD_NEXT, "realloc");
    *(void **)&real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    *(void **)&real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    *(void **)&real_malloc = dlsym(RTLD_NEXT, "malloc");
    const char *path = getenv("FAIL_ALLOC_FILE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED)
        control = page;
}

static bool must_fail(void)
{
    if (!control || atomic_load_explicit(&control->countdown, memory_order_relaxed) <= 0)
        return false;
    if (atomic_fetch_sub(&control->countdown, 1) != 1)
        return false;
    atomic_fetch_add(&control->failures, 1);
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    if (!real_malloc)
        return early_allocate(size);
    return must_fail() ? NULL : real_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    if (!real_calloc)
        return early_allocate(n * size); /* static memory is zero */
    return must_fail() ? NULL : real_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    if (!real_realloc || is_early(p))
        return early_allocate(size);
    return must_fail() ? NULL : real_realloc(p, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return must_fail() ? NULL : real_aligned_alloc(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) { return must_fail() ? ENOMEM : real_posix_memalign(out, alignment, size); }

void free(void *p)
{
    static void (*real_free)(void *);
    if (!p || is_early(p))
        return;
    if (!real_free)
        *(void **)&real_free = dlsym(RTLD_NEXT, "free");
    real_free(p);
}
