/* SPDX-License-Identifier: Apache-2.0
 *
 * What the emulated device finds wrong with a kernel: accesses outside of any allocation, and races.
 *
 * Kernels are compiled with the compiler's instrumentation for ThreadSanitizer, whose hooks are these. Every 8 bytes that kernels touch
 * remember the last accesses of several actors. Two accesses to the same byte, one of them a write, are a race unless one happened before
 * the other: within a block by its barriers (vector clocks), between launches by launch_wait, and between blocks of a launch never.
 * Shuffles and ballots order no memory, as PTX says. What a copy or a product does happens between its start and the end of a wait for it.
 */
#include "internal.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>

extern "C" thread_local uint8_t shared[];

bool checker_on = true;

#define CELL_BYTES 8
#define CELL_ACCESSES 4

enum { ACCESS_WRITE = 1, ACCESS_ATOMIC = 2, ACCESS_LOOSE = 4 };

struct access {
    uint32_t launch; /* 0: none */
    uint32_t number; /* the actor's time */
    uint32_t pc; /* from the program's begin */
    uint16_t block, actor;
    uint8_t bytes; /* a bit each */
    uint8_t flags;
};

struct cell {
    struct access access[CELL_ACCESSES];
};

/* ---- errors ------------------------------------------------------------------------------------------------- */

static std::mutex error_lock;
static long errors;
static std::set<std::pair<uint64_t, uint64_t>> reported; /* pairs of places */
static uintptr_t program;
static char program_path[4096];

static int find_program(struct dl_phdr_info *info, size_t size, void *arg)
{
    program = info->dlpi_addr;
    return 1; /* the first is the program itself */
}

static void prepare(void)
{
    if (program_path[0])
        return;
    dl_iterate_phdr(find_program, NULL);
    ssize_t n = readlink("/proc/self/exe", program_path, sizeof program_path - 1);
    if (n <= 0)
        strcpy(program_path, "?");
    checker_on = !getenv("EMULATOR_UNCHECKED");
}

/* The line of a place, where addr2line is at hand. */
static void print_place(const char *what, uint32_t pc)
{
    char command[4200], text[1024] = "";
    snprintf(command, sizeof command, "addr2line -s -e '%s' %#x 2>/dev/null", program_path, pc - 1);
    FILE *f = popen(command, "r");
    if (f) {
        if (!fgets(text, sizeof text, f))
            text[0] = 0;
        pclose(f);
    }
    text[strcspn(text, "\n")] = 0;
    fprintf(stderr, "    %s %s (%#x)\n", what, text, pc);
}

extern "C" long emulator_errors(void) { return errors; }

/* A program that met errors fails, whatever it thinks itself. */
__attribute__((destructor)) static void fail(void)
{
    if (!errors)
        return;
    fprintf(stderr, "emulator: %ld errors\n", errors);
    fflush(NULL);
    _exit(97);
}

/* True the first time for these places, and not after too many. */
static bool error_is_new(uint64_t a, uint64_t b)
{
    errors++;
    return reported.insert({a < b ? a : b, a < b ? b : a}).second && reported.size() <= 40;
}

void emulator_error(const void *pc, const char *format, ...)
{
    std::lock_guard<std::mutex> hold(error_lock);
    prepare();
    const uint32_t place = pc ? (uint32_t)((uintptr_t)pc - program) : 0;
    if (!error_is_new(place, 0))
        return;
    va_list list;
    va_start(list, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    if (pc)
        print_place("at", place);
}

void emulator_fatal(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    abort();
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

struct allocation {
    size_t bytes;
    struct cell *cell;
};

static std::mutex memory_lock;
static std::map<uintptr_t, allocation> memory; /* by begin */
static uintptr_t last_begin, last_end; /* of the allocation found last */
static struct cell *last_cell;

void memory_add(void *p, size_t bytes)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    memory[(uintptr_t)p] = {bytes, NULL};
}

void memory_remove(void *p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = memory.find((uintptr_t)p);
    if (found == memory.end())
        return;
    if (found->second.cell)
        munmap(found->second.cell, (found->second.bytes / CELL_BYTES + 2) * sizeof(struct cell));
    memory.erase(found);
    last_begin = last_end = 0;
}

size_t memory_size(const void *p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = memory.find((uintptr_t)p);
    return found == memory.end() ? 0 : found->second.bytes;
}

static struct cell *cells_make(size_t bytes)
{
    void *p = mmap(NULL, (bytes / CELL_BYTES + 2) * sizeof(struct cell), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        emulator_fatal("no memory for what accesses are remembered in");
    return (struct cell *)p;
}

static bool memory_find(uintptr_t p)
{
    if (p >= last_begin && p < last_end)
        return true;
    std::lock_guard<std::mutex> hold(memory_lock);
    auto after = memory.upper_bound(p);
    if (after == memory.begin())
        return false;
    --after;
    if (p >= after->first + after->second.bytes)
        return false;
    if (!after->second.cell)
        after->second.cell = cells_make(after->second.bytes);
    last_begin = after->first;
    last_end = after->first + after->second.bytes;
    last_cell = after->second.cell;
    return true;
}

static uintptr_t tls_begin, tls_end, dynamic_begin;
static struct cell *tls_cell;

void checker_shared(uint8_t *begin, size_t bytes, uint8_t *dynamic)
{
    tls_begin = (uintptr_t)begin;
    tls_end = tls_begin + bytes;
    dynamic_begin = (uintptr_t)dynamic;
    tls_cell = cells_make(bytes);
}

/* ---- clocks ------------------------------------------------------------------------------------------------- */

void checker_block(struct block *b)
{
    prepare();
    b->free_actors.clear();
    for (int i = 0; i < FLYING; i++)
        b->free_actors.push_back(i);
    b->actor_number.assign(FLYING, 0);
}

void checker_thread(fiber *t, int number)
{
    t->now.reset();
    if (!checker_on) {
        t->clock.clear();
        return;
    }
    t->clock.assign((size_t)(2 * t->block->threads + FLYING), 0);
    t->clock[(size_t)number] = 1;
}

moment thread_moment(fiber *t)
{
    if (checker_on && !t->now)
        t->now = std::make_shared<const times>(t->clock);
    return t->now;
}

void thread_tick(fiber *t)
{
    if (!checker_on)
        return;
    t->clock[(size_t)t->number]++;
    t->now.reset();
}

void thread_learn(fiber *t, int actor, uint32_t number)
{
    if (!checker_on || t->clock[(size_t)actor] >= number)
        return;
    t->clock[(size_t)actor] = number;
    t->now.reset();
}

void thread_join(fiber *t, const times &from)
{
    if (!checker_on)
        return;
    times_join(t->clock, from);
    t->now.reset();
}

void sync_clocks(fiber *const *threads, int n)
{
    if (!checker_on || n == 0)
        return;
    times all = threads[0]->clock;
    for (int i = 1; i < n; i++)
        times_join(all, threads[i]->clock);
    for (int i = 0; i < n; i++) {
        threads[i]->clock = all;
        thread_tick(threads[i]);
    }
}

/* ---- accesses ----------------------------------------------------------------------------------------------- */

static void report_race(struct block *b, const struct access &now, const struct access &before, uintptr_t p, bool in_shared)
{
    std::lock_guard<std::mutex> hold(error_lock);
    if (!error_is_new(now.pc, before.pc))
        return;
    const char *const kind[] = {"read", "write", "atomic", "atomic", "loose read"};
    char at[64];
    if (in_shared)
        snprintf(at, sizeof at, "shared memory %#zx", (size_t)(p - dynamic_begin));
    else
        snprintf(at, sizeof at, "device memory %#zx", (size_t)p);
    fprintf(stderr, "emulator: %s: race in %s\n", where_of(b->launch->call.kernel).c_str(), at);
    char text[160];
    snprintf(text, sizeof text, "%s by actor %d of block %u of launch %u:", kind[now.flags], now.actor, now.block, now.launch);
    print_place(text, now.pc);
    snprintf(text, sizeof text, "%s by actor %d of block %u of launch %u:", kind[before.flags], before.actor, before.block, before.launch);
    print_place(text, before.pc);
}

/* Has `before` happened before what `clock` and `acquired` know? */
static bool happened(const struct access &before, const struct access &now, const times &clock, uint32_t acquired)
{
    if (before.launch != now.launch)
        return before.launch <= acquired;
    return before.block == now.block && before.number <= clock[before.actor];
}

/* False: a loose read met a write that has not happened before. */
static bool touch(struct block *b, struct cell *c, const struct access &now, const times &clock, uint32_t acquired, uintptr_t p,
                  bool in_shared)
{
    int to = -1;
    bool defined = true;
    for (int i = 0; i < CELL_ACCESSES; i++) {
        struct access &a = c->access[i];
        if (a.launch == 0 || (in_shared && (a.launch != now.launch || a.block != now.block))) {
            a.launch = 0;
            if (to < 0)
                to = i;
            continue;
        }
        const bool same = a.launch == now.launch && a.block == now.block && a.actor == now.actor;
        const bool before = same || happened(a, now, clock, acquired);
        if ((a.bytes & now.bytes) && (a.flags | now.flags) & ACCESS_WRITE && !before && !(a.flags & now.flags & ACCESS_ATOMIC)) {
            if (now.flags & ACCESS_LOOSE)
                defined = false;
            else if (!(a.flags & ACCESS_LOOSE))
                report_race(b, now, a, p, in_shared);
        }
        /* What it says is said by the new one as well. */
        if (before && !(a.bytes & ~now.bytes) && ((now.flags & ACCESS_WRITE) || !(a.flags & ACCESS_WRITE))) {
            a.launch = 0;
            to = i;
        }
    }
    if (to < 0)
        to = (int)(random_next() % CELL_ACCESSES);
    c->access[to] = now;
    return defined;
}

static bool touch_range(struct block *b, int actor, uint32_t number, const times &clock, uint32_t acquired, const void *ptr, size_t bytes,
                        uint8_t flags, const void *pc)
{
    bool defined = true;
    uintptr_t p = (uintptr_t)ptr;
    const uintptr_t end = p + bytes;
    const bool in_shared = p >= tls_begin && p < tls_end;
    struct access now = {b->launch->number, number, (uint32_t)((uintptr_t)pc - program), (uint16_t)b->index, (uint16_t)actor, 0, flags};
    if (in_shared) {
        if (p >= dynamic_begin && p < dynamic_begin + SHARED_BYTES && end > dynamic_begin + b->launch->dynamic) {
            emulator_error(pc, "%s: %zu bytes at %#zx of %zu bytes of dynamic shared memory", where_of(b->launch->call.kernel).c_str(),
                           bytes, (size_t)(p - dynamic_begin), b->launch->dynamic);
            return false;
        }
    } else if (!memory_find(p) || end > last_end) {
        emulator_error(pc, "%s: %zu bytes at %p, which is outside of any allocation", where_of(b->launch->call.kernel).c_str(), bytes, ptr);
        if (!memory_find(p))
            emulator_fatal("no way on");
        return false;
    }
    struct cell *cells = in_shared ? tls_cell : last_cell;
    const uintptr_t base = in_shared ? tls_begin : last_begin;
    while (p < end) {
        const size_t i = (p - base) / CELL_BYTES, from = (p - base) % CELL_BYTES,
                     n = end - p < CELL_BYTES - from ? end - p : CELL_BYTES - from;
        now.bytes = (uint8_t)(((1u << n) - 1) << from);
        defined &= touch(b, &cells[i], now, clock, acquired, p, in_shared);
        p += n;
    }
    return defined;
}

void checker_async(struct block *b, int actor, uint32_t number, const moment &begun, const void *p, size_t bytes, bool write,
                   const void *pc)
{
    /* What was complete to the thread that began it: launches are acquired before anything is begun that needs it. */
    if (checker_on && begun)
        touch_range(b, actor, number, *begun, b->launch->can_acquire_all ? b->launch->number - 1 : b->launch->acquired, p, bytes,
                    write ? ACCESS_WRITE : 0, pc);
}

static void access_of_thread(const void *p, size_t bytes, uint8_t flags, const void *pc)
{
    if (!current_block || !checker_on)
        return;
    fiber *t = self();
    const uintptr_t at = (uintptr_t)p;
    if (at - (uintptr_t)t->stack < STACK_BYTES)
        return;
    touch_range(current_block, t->number, t->clock[(size_t)t->number], t->clock, t->acquired, p, bytes, flags, pc);
}

bool checker_loose_read(struct block *b, int actor, uint32_t number, const moment &begun, const void *p, size_t bytes, const void *pc)
{
    return !checker_on || !begun || touch_range(b, actor, number, *begun, b->launch->number - 1, p, bytes, ACCESS_LOOSE, pc);
}

void checker_access(const void *p, size_t bytes, bool write, const void *pc) { access_of_thread(p, bytes, write ? ACCESS_WRITE : 0, pc); }
void checker_atomic(const void *p, size_t bytes, const void *pc) { access_of_thread(p, bytes, ACCESS_WRITE | ACCESS_ATOMIC, pc); }

/* ---- the compiler's hooks ----------------------------------------------------------------------------------- */

/* The program's own: constants, and the emulator's variables that kernels see. Host code that is compiled with the kernels has no block. */
static bool of_program(const void *p)
{
    extern char __executable_start[], end[];
    return (const char *)p >= __executable_start && (const char *)p < end;
}

/* Another thread of the host may be in code of these sources meanwhile, to launch. */
static inline bool on_device(void)
{
    return current_fiber && (uintptr_t)__builtin_frame_address(0) - (uintptr_t)current_fiber->stack < STACK_BYTES;
}

static void hook(const void *p, size_t bytes, uint8_t flags, const void *pc)
{
    if (!current_block || !checker_on || !on_device() || of_program(p))
        return;
    const struct launch *l = current_block->launch;
    if ((uintptr_t)p - (uintptr_t)l->call.arguments < l->call.bytes)
        return;
    access_of_thread(p, bytes, flags, pc);
}

#define HOOK(n)                                                                                                                            \
    void __tsan_read##n(void *p) { hook(p, n, 0, __builtin_return_address(0)); }                                                           \
    void __tsan_write##n(void *p) { hook(p, n, ACCESS_WRITE, __builtin_return_address(0)); }                                               \
    void __tsan_unaligned_read##n(void *p) { hook(p, n, 0, __builtin_return_address(0)); }                                                 \
    void __tsan_unaligned_write##n(void *p) { hook(p, n, ACCESS_WRITE, __builtin_return_address(0)); }                                     \
    void __tsan_volatile_read##n(void *p) { hook(p, n, 0, __builtin_return_address(0)); }                                                  \
    void __tsan_volatile_write##n(void *p) { hook(p, n, ACCESS_WRITE, __builtin_return_address(0)); }

extern "C" {
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
void __tsan_read_range(void *p, unsigned long bytes) { hook(p, bytes, 0, __builtin_return_address(0)); }
void __tsan_write_range(void *p, unsigned long bytes) { hook(p, bytes, ACCESS_WRITE, __builtin_return_address(0)); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_init(void) {}
void __tsan_vptr_update(void *, void *) {}
void __tsan_vptr_read(void *) {}
}
