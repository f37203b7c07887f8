/* SPDX-License-Identifier: Apache-2.0
 *
 * The process_* figures, from /proc, with the names that every Prometheus client library uses.
 */
#include "server/metrics_counters.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

struct process_stat {
    uint64_t user_ticks, system_ticks, start_ticks, virtual_bytes, resident_pages;
};

static bool read_stat(struct process_stat *s)
{
    char text[1024];
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file)
        return false;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    char *after_name = strrchr(text, ')'); /* the name may hold anything */
    return after_name && sscanf(after_name + 1,
                                " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %" SCNu64 " %" SCNu64 " %*d %*d %*d %*d %*d %*d %" SCNu64
                                " %" SCNu64 " %" SCNu64,
                                &s->user_ticks, &s->system_ticks, &s->start_ticks, &s->virtual_bytes, &s->resident_pages) == 5;
}

double metrics_process_start(void)
{
    struct process_stat stat;
    if (!read_stat(&stat))
        return 0;
    FILE *file = fopen("/proc/stat", "re");
    if (!file)
        return 0;
    char *line = NULL;
    size_t size = 0;
    uint64_t boot = 0;
    while (!boot && getline(&line, &size, file) > 0) {
        if (sscanf(line, "btime %" SCNu64, &boot) != 1)
            boot = 0;
    }
    free(line);
    fclose(file);
    return boot ? (double)boot + (double)stat.start_ticks / (double)sysconf(_SC_CLK_TCK) : 0;
}

static int64_t count_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    if (!dir)
        return -1;
    int64_t count = -1; /* the folder's own */
    for (struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

void metrics_write_process(FILE *out, double start_time)
{
    struct process_stat stat;
    if (read_stat(&stat)) {
        metrics_write_family(out, "process_cpu_seconds_total", "counter", "User and system CPU time spent, in seconds.");
        fprintf(out, "process_cpu_seconds_total %.2f\n", (double)(stat.user_ticks + stat.system_ticks) / (double)sysconf(_SC_CLK_TCK));
        metrics_write_family(out, "process_resident_memory_bytes", "gauge", "Resident memory.");
        fprintf(out, "process_resident_memory_bytes %" PRIu64 "\n", stat.resident_pages * (uint64_t)sysconf(_SC_PAGESIZE));
        metrics_write_family(out, "process_virtual_memory_bytes", "gauge", "Virtual memory.");
        fprintf(out, "process_virtual_memory_bytes %" PRIu64 "\n", stat.virtual_bytes);
    }
    if (start_time > 0) {
        metrics_write_family(out, "process_start_time_seconds", "gauge", "When the process started, in seconds since 1970.");
        fprintf(out, "process_start_time_seconds %.2f\n", start_time);
    }
    int64_t descriptors = count_descriptors();
    if (descriptors >= 0) {
        metrics_write_family(out, "process_open_fds", "gauge", "Open file descriptors.");
        fprintf(out, "process_open_fds %" PRId64 "\n", descriptors);
    }
    struct rlimit limit;
    if (!getrlimit(RLIMIT_NOFILE, &limit)) {
        metrics_write_family(out, "process_max_fds", "gauge", "Most file descriptors that may be open.");
        fprintf(out, "process_max_fds %" PRIu64 "\n", (uint64_t)limit.rlim_cur);
    }
}
