/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/host_memory.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* folder/name, opened for reading; NULL when there is none. */
static FILE *open_in(const char *folder, const char *name)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n > 0 && n < (int)sizeof path ? fopen(path, "re") : NULL;
}

/* The number in the line "KEY number" or "KEY: number kB", times `unit`; -1 when there is none. */
static int64_t read_key(const char *folder, const char *name, const char *key, int64_t unit)
{
    FILE *f = open_in(folder, name);
    char line[256];
    int64_t found = -1;
    size_t len = strlen(key);
    while (f && found < 0 && fgets(line, sizeof line, f)) {
        if (!strncmp(line, key, len) && (line[len] == ' ' || line[len] == ':'))
            found = (int64_t)strtoll(line + len + 1, NULL, 10) * unit;
    }
    if (f)
        fclose(f);
    return found;
}

/* The number that a file holds; -1 when it can't be read or says "max". */
static int64_t read_number(const char *folder, const char *name)
{
    FILE *f = open_in(folder, name);
    long long v = -1;
    if (f) {
        if (fscanf(f, "%lld", &v) != 1)
            v = -1;
        fclose(f);
    }
    return v;
}

/* Narrows total and free by one control group's limit. */
static void narrow(const char *folder, bool v2, int64_t *total, int64_t *free_now)
{
    int64_t limit = read_number(folder, v2 ? "memory.max" : "memory.limit_in_bytes");
    int64_t used = read_number(folder, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (limit < 0 || used < 0)
        return;
    int64_t cold = read_key(folder, "memory.stat", v2 ? "inactive_file" : "total_inactive_file", 1);
    int64_t warm = read_key(folder, "memory.stat", v2 ? "active_file" : "total_active_file", 1);
    int64_t left = limit > INT64_MAX / 2 ? INT64_MAX : limit - used + (cold > 0 ? cold : 0) + (warm > 0 ? warm : 0);
    if (limit < *total)
        *total = limit;
    if (left < 0)
        left = 0;
    if (left < *free_now)
        *free_now = left;
}

/* A limit anywhere above us binds us too, so every level counts, up to the mount point. Inside a container the path may not
 * exist below the mount point, which then is our own group. */
static void narrow_all(const char *mount, const char *group, bool v2, int64_t *total, int64_t *free_now)
{
    char folder[PATH_MAX];
    if (snprintf(folder, sizeof folder, "%s%s", mount, group) >= (int)sizeof folder)
        return;
    size_t stop = strlen(mount);
    for (;;) {
        narrow(folder, v2, total, free_now);
        char *slash = strrchr(folder + stop, '/');
        if (!slash)
            break;
        *slash = '\0';
    }
}

void host_memory_info(int64_t *total, int64_t *free_now)
{
    int64_t all = read_key("/proc", "meminfo", "MemTotal", 1024), available = read_key("/proc", "meminfo", "MemAvailable", 1024);
    if (all < 0)
        all = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (available < 0)
        available = (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[PATH_MAX];
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = '\0';
        controllers++;
        if (!*controllers)
            narrow_all("/sys/fs/cgroup", group, true, &all, &available);
        else if (!strcmp(controllers, "memory"))
            narrow_all("/sys/fs/cgroup/memory", group, false, &all, &available);
    }
    if (f)
        fclose(f);
    *total = all;
    *free_now = available;
}

int64_t host_memory_resident(void)
{
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f)
        return 0;
    long size, resident, shared;
    int got = fscanf(f, "%ld %ld %ld", &size, &resident, &shared);
    fclose(f);
    return got == 3 && resident > shared ? (int64_t)(resident - shared) * sysconf(_SC_PAGESIZE) : 0;
}
