/* SPDX-License-Identifier: Apache-2.0
 *
 * What the emulated device finds wrong with a kernel: accesses outside of any allocation, and races.
 *
 * Kernels are compiled with the compiler's instrumentation for ThreadSanitizer, whose hooks are these. Every 8 bytes that kernels touch
 * remember the last accesses of several actors. Two accesses to the same byte, one of them a write, are a race unless one happened before
 * the other: within a block by its barriers (vector clocks), between launches by launch_wait, and between blocks of a launch never.
 * Shuffles and ballots order no memory, as PTX says. What a copy or a product does happens between its start and the end of a wait for it.
 */
#include "emulator.h"
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
/* Accesses that a cell remembers; of more, chance says which. */
#define CELL_ACCESSES 4
#define SHARED_CELL_ACCESSES 8 /* those past the first 4 lie elsewhere, as they are seldom there */

enum { ACCESS_WRITE = 1, ACCESS_ATOMIC = 2, ACCESS_LOOSE = 4, ACCESS_PROXY = 8 /* through the async proxy */ };

/* In two words, for speed. who: launch (0: none, and none behind it), block, actor. what: the actor's time, flags, the place from the
 * program's begin, and a bit for each byte. */
struct access {
    uint64_t who, what;
};
static inline uint64_t who_word(uint32_t launch, uint32_t block, uint32_t actor)
{
    return launch | (uint64_t)(block & 0xfffff) << 32 | (uint64_t)actor << 52;
}
static inline uint64_t what_word(uint32_t number, uint32_t flags, uint32_t pc)
{
    return (number & 0xfffffff) | (uint64_t)flags << 28 | (uint64_t)(pc & 0xffffff) << 32;
}
static inline uint32_t launch_of(struct access a) { return (uint32_t)a.who; }
static inline uint32_t block_of(struct access a) { return (uint32_t)(a.who >> 32) & 0xfffff; }
static inline uint32_t actor_of(struct access a) { return (uint32_t)(a.who >> 52); }
static inline uint32_t number_of(struct access a) { return (uint32_t)a.what & 0xfffffff; }
static inline uint32_t flags_of(struct access a) { return (uint32_t)a.what >> 28; }
static inline uint32_t pc_of(struct access a) { return (uint32_t)(a.what >> 32) & 0xffffff; }
static inline uint32_t bytes_of(struct access a) { return (uint32_t)(a.what >> 56); }

/* An allocation, or the thread-local memory that is a block's shared one. */
struct region {
    uintptr_t begin, end;
    struct access *cells;
    uint8_t *written; /* a bit for each byte that has been; NULL: all have */
};

/* ---- errors ------------------------------------------------------------------------------------------------- */

static std::mutex error_lock;
static long errors;
static bool expecting; /* errors are counted apart */
static long expected;
static std::string expected_first;
static std::set<std::pair<uint64_t, uint64_t>> reported; /* pairs of places */
static uintptr_t program;
static bool show_loose; /* report what loose reads meet */
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
    show_loose = getenv("EMULATOR_LOOSE") != NULL;
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

long emulator_errors(void) { return errors; }

/* A program that met errors fails, whatever it thinks itself. */
__attribute__((destructor)) static void fail(void)
{
    if (!errors)
        return;
    fprintf(stderr, "emulator: %ld errors, EMULATOR_SEED=%llu\n", errors, (unsigned long long)emulator_seed_get());
    fflush(NULL);
    _exit(97);
}

void emulator_expect(void)
{
    std::lock_guard<std::mutex> hold(error_lock);
    expecting = true;
    expected = 0;
    expected_first.clear();
}

long emulator_expected(char *first, size_t size)
{
    std::lock_guard<std::mutex> hold(error_lock);
    expecting = false;
    if (expected)
        snprintf(first, size, "%s", expected_first.c_str());
    return expected;
}

/* Is this one to be printed? The first time for these places, and not after too many. */
static bool error_count(const std::string &text, uint64_t a, uint64_t b)
{
    if (expecting) {
        if (!expected++)
            expected_first = text;
        return false;
    }
    errors++;
    return reported.insert({a < b ? a : b, a < b ? b : a}).second && reported.size() <= 40;
}

void emulator_error(const void *pc, const char *format, ...)
{
    std::lock_guard<std::mutex> hold(error_lock);
    prepare();
    const uint32_t place = pc ? (uint32_t)((uintptr_t)pc - program) : 0;
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (!error_count(text, place, 0))
        return;
    fprintf(stderr, "emulator: %s\n", text);
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
    fprintf(stderr, "emulator: EMULATOR_SEED=%llu\n", (unsigned long long)emulator_seed_get());
    abort();
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

static std::mutex memory_lock;
static std::map<uintptr_t, region> &memory = *new std::map<uintptr_t, region>; /* by begin */
#define FOUND 256
static region *found_last[FOUND]; /* by address */

static void *pages_make(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        emulator_fatal("no memory for what accesses are remembered in");
    return p;
}

static size_t cells_of(size_t bytes) { return bytes / CELL_BYTES + 2; }

void memory_add(void *p, size_t bytes, bool written)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    prepare();
    memory[(uintptr_t)p] = {(uintptr_t)p, (uintptr_t)p + bytes, NULL,
                            written || !checker_on ? NULL : (uint8_t *)pages_make(cells_of(bytes))};
}

void memory_remove(void *p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = memory.find((uintptr_t)p);
    if (found == memory.end())
        return;
    const region &r = found->second;
    if (r.cells)
        munmap(r.cells, cells_of(r.end - r.begin) * CELL_ACCESSES * sizeof(struct access));
    if (r.written)
        munmap(r.written, cells_of(r.end - r.begin));
    memory.erase(found);
    memset(found_last, 0, sizeof found_last);
}

size_t memory_size(const void *p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = memory.find((uintptr_t)p);
    return found == memory.end() ? 0 : found->second.end - found->second.begin;
}

static region *memory_search(uintptr_t p)
{
    std::lock_guard<std::mutex> hold(memory_lock);
    auto after = memory.upper_bound(p);
    if (after == memory.begin())
        return NULL;
    region *r = &(--after)->second;
    if (p >= r->end)
        return NULL;
    if (!r->cells)
        r->cells = (struct access *)pages_make(cells_of(r->end - r->begin) * CELL_ACCESSES * sizeof(struct access));
    return r;
}

static inline region *memory_find(uintptr_t p)
{
    region *&r = found_last[(p >> 9) % FOUND];
    if (__builtin_expect(r && p - r->begin < r->end - r->begin, 1))
        return r;
    return r = memory_search(p);
}

static region shared_region;
static struct access *shared_more;
static uintptr_t dynamic_begin;

static inline bool is_shared(uintptr_t p) { return p - shared_region.begin < shared_region.end - shared_region.begin; }

void checker_shared(uint8_t *begin, size_t bytes, uint8_t *dynamic)
{
    /* Its cells are those of the 8 bytes that begin at multiples of 8. */
    dynamic_begin = (uintptr_t)dynamic;
    shared_region.begin = (uintptr_t)begin & ~(uintptr_t)(CELL_BYTES - 1);
    shared_region.end = (uintptr_t)begin + bytes;
    shared_region.cells = (struct access *)pages_make(cells_of(bytes) * CELL_ACCESSES * sizeof(struct access));
    shared_more = (struct access *)pages_make(cells_of(bytes) * CELL_ACCESSES * sizeof(struct access));
}

/* Which of the 8 bytes at a multiple of 8 are p to end's, one of both being there. */
static inline uint8_t bytes_of_cell(uintptr_t cell, uintptr_t p, uintptr_t end)
{
    const unsigned from = p > cell ? (unsigned)(p - cell) : 0, upto = end < cell + CELL_BYTES ? (unsigned)(end - cell) : CELL_BYTES;
    return (uint8_t)((1u << upto) - (1u << from));
}

void memory_written(void *ptr, size_t bytes)
{
    const uintptr_t p = (uintptr_t)ptr, end = p + bytes;
    region *r = checker_on && bytes ? memory_find(p) : NULL;
    if (!r || !r->written || end > r->end)
        return;
    for (uintptr_t cell = p & ~(uintptr_t)(CELL_BYTES - 1); cell < end; cell += CELL_BYTES)
        r->written[(cell - r->begin) / CELL_BYTES] |= bytes_of_cell(cell, p, end);
}

/* ---- clocks ------------------------------------------------------------------------------------------------- */

static times *times_make(uint32_t n)
{
    times *t = (times *)malloc(sizeof(times) + n * sizeof(uint32_t));
    t->references = 1;
    t->n = n;
    return t;
}

/* A copy with n entries at least. */
static times *times_copy(const times *from, uint32_t n)
{
    const uint32_t have = from ? from->n : 0;
    times *t = times_make(n > have ? n : have);
    if (have)
        memcpy(t->at, from->at, have * sizeof(uint32_t));
    memset(t->at + have, 0, (t->n - have) * sizeof(uint32_t));
    return t;
}

static inline void raise(uint32_t &to, uint32_t v) { to = to < v ? v : to; }

__attribute__((optimize("O3"))) static void raise_all(uint32_t *__restrict to, const uint32_t *__restrict from, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        to[i] = to[i] < from[i] ? from[i] : to[i];
}

/* What was computed lately from what: threads that know the same go on to know the same. */
enum { MADE_JOIN = 1, MADE_FENCE, MADE_SET };
struct made {
    int how;
    uint32_t actor, number;
    times_ref a, b, result;
};
#define MADE 256
static made *made_lately = new made[MADE]; /* never ended, as the device outlives main */

static made &made_at(int how, const times_ref &a, const times_ref &b, uint32_t actor, uint32_t number, bool *there)
{
    const uintptr_t x = (uintptr_t)a.get() >> 4, y = (uintptr_t)b.get() >> 4;
    made &m = made_lately[(x ^ x >> 7 ^ y * 5 ^ y >> 9 ^ (uintptr_t)how ^ actor ^ number) % MADE];
    *there = m.how == how && m.a == a && m.b == b && m.actor == actor && m.number == number;
    if (!*there)
        m = {how, actor, number, a, b, times_ref()};
    return m;
}

static times_ref join(const times_ref &a, const times_ref &b)
{
    if (a == b || !b.get())
        return a;
    if (!a.get())
        return b;
    bool there;
    made &m = made_at(MADE_JOIN, a, b, 0, 0, &there);
    if (!there) {
        times *t = times_copy(a.get(), b.get()->n);
        raise_all(t->at, b.get()->at, b.get()->n);
        m.result = times_ref(t);
        /* Often one knows all that the other does. */
        if (t->n == a.get()->n && !memcmp(t->at, a.get()->at, t->n * sizeof(uint32_t)))
            m.result = a;
        else if (t->n == b.get()->n && !memcmp(t->at, b.get()->at, t->n * sizeof(uint32_t)))
            m.result = b;
    }
    return m.result;
}

void checker_block(struct block *b)
{
    prepare();
    b->free_actors.clear();
    for (int i = 0; i < FLYING; i++)
        b->free_actors.push_back(i);
    b->actor_number.assign(FLYING, 0);
    b->actor_products = 1 + b->threads;
    b->actor_fenced = b->actor_products + b->threads / WARP;
    b->actor_bulk = b->actor_fenced + b->threads;
    b->actor_copies = b->actor_bulk + FLYING;
    b->actor_copies_fenced = b->actor_copies + b->threads;
}

void checker_thread(fiber *t, int number) { t->now = {times_ref(), (uint32_t)number + 1, 1, 0, 0, 0, t->block->launch->acquired}; }

void thread_tick(fiber *t) { t->now.number++; }

void thread_learn_copies(fiber *t, uint32_t number) { raise(t->now.copies, number); }

void thread_learn_products(fiber *const *lanes, int actor, uint32_t number)
{
    if (!checker_on)
        return;
    for (int i = 0; i < WARP; i++) {
        times_ref &base = lanes[i]->now.base;
        if (base[(uint32_t)actor] >= number)
            continue;
        bool there;
        made &m = made_at(MADE_SET, base, times_ref(), (uint32_t)actor, number, &there);
        if (!there) {
            times *t = times_copy(base.get(), (uint32_t)actor + 1);
            t->at[actor] = number;
            m.result = times_ref(t);
        }
        base = m.result;
    }
}

void thread_join(fiber *t, const times_ref &from)
{
    if (checker_on)
        t->now.base = join(t->now.base, from);
}

uint32_t thread_acquired(const fiber *t)
{
    const uint32_t told = t->now.base[0];
    return told > t->now.acquired ? told : t->now.acquired;
}

void thread_fence(fiber *t)
{
    if (!checker_on)
        return;
    moment &now = t->now;
    const struct block *b = t->block;
    const uint32_t fenced = (uint32_t)b->actor_fenced, copies = (uint32_t)b->actor_copies, n = (uint32_t)b->threads;
    raise(now.copies, now.base[(uint32_t)actor_of_copies(t)]);
    now.fenced = now.number++;
    now.fenced_copies = now.copies;
    if (!now.base.get())
        return;
    bool there;
    made &m = made_at(MADE_FENCE, now.base, times_ref(), fenced, n, &there);
    if (!there) {
        const bool some = now.base.get()->n > copies;
        times *fresh = times_copy(now.base.get(), some ? copies + 2 * n : fenced + n);
        raise_all(fresh->at + fenced, fresh->at + 1, n);
        if (some)
            raise_all(fresh->at + copies + n, fresh->at + copies, n);
        m.result = times_ref(fresh);
    }
    now.base = m.result;
}

/* Enters what a thread knows more than its base. `at` has entries for that. */
static void enter_own(uint32_t *at, const fiber *t)
{
    const struct block *b = t->block;
    const moment &m = t->now;
    const uint32_t i = (uint32_t)t->number;
    raise(at[0], m.acquired);
    raise(at[m.thread], m.number);
    if (m.fenced)
        raise(at[(uint32_t)b->actor_fenced + i], m.fenced);
    if (m.copies)
        raise(at[(uint32_t)b->actor_copies + i], m.copies);
    if (m.fenced_copies)
        raise(at[(uint32_t)b->actor_copies_fenced + i], m.fenced_copies);
}

static uint32_t entries_for(const fiber *t)
{
    const struct block *b = t->block;
    const moment &m = t->now;
    return (uint32_t)(1 + t->number +
                      (m.fenced_copies ? b->actor_copies_fenced
                       : m.copies      ? b->actor_copies
                       : m.fenced      ? b->actor_fenced
                                       : 1));
}

/* What all of them know together. */
static times_ref known_to(fiber *const *threads, int n)
{
    times_ref all = threads[0]->now.base;
    uint32_t entries = 0;
    for (int i = 0; i < n; i++) {
        if (i && threads[i]->now.base != threads[i - 1]->now.base)
            all = join(all, threads[i]->now.base);
        const uint32_t own = entries_for(threads[i]);
        entries = entries < own ? own : entries;
    }
    times *r = times_copy(all.get(), entries);
    for (int i = 0; i < n; i++)
        enter_own(r->at, threads[i]);
    return times_ref(r);
}

void sync_clocks(fiber *const *threads, int n)
{
    if (!checker_on || n == 0)
        return;
    const times_ref all = known_to(threads, n);
    for (int i = 0; i < n; i++) {
        threads[i]->now.base = all;
        threads[i]->now.number++;
    }
}

moment moment_of_all(fiber *const *threads, int n)
{
    moment m = {};
    if (checker_on)
        m.base = known_to(threads, n);
    return m;
}

void gather(mbarrier &m, const fiber *t)
{
    if (!checker_on)
        return;
    const times *base = t->now.base.get();
    const uint32_t own = entries_for(t), entries = base && base->n > own ? base->n : own;
    if (m.gathering.size() < entries)
        m.gathering.resize(entries);
    if (base && m.gathered != t->now.base) {
        raise_all(m.gathering.data(), base->at, base->n);
        m.gathered = t->now.base;
    }
    enter_own(m.gathering.data(), t);
}

void gather_actor(mbarrier &m, int actor, uint32_t number)
{
    if (!checker_on)
        return;
    if (m.gathering.size() <= (size_t)actor)
        m.gathering.resize((size_t)actor + 1);
    raise(m.gathering[(size_t)actor], number);
}

times_ref gathered(mbarrier &m)
{
    times *t = times_make((uint32_t)m.gathering.size());
    if (t->n)
        memcpy(t->at, m.gathering.data(), t->n * sizeof(uint32_t));
    return times_ref(t);
}

/* ---- accesses ----------------------------------------------------------------------------------------------- */

static void report_race(struct block *b, struct access now, struct access before, uintptr_t p, bool in_shared, bool unfenced)
{
    std::lock_guard<std::mutex> hold(error_lock);
    const char *const kind[] = {"read", "write", "atomic", "atomic", "loose read"};
    char text[512];
    snprintf(text, sizeof text, "%s: %s in %s memory %#zx", where_of(b->launch->call.kernel).c_str(),
             unfenced ? "no fence of proxies" : "race", in_shared ? "shared" : "device", (size_t)(in_shared ? p - dynamic_begin : p));
    if (!error_count(text, pc_of(now), pc_of(before)))
        return;
    fprintf(stderr, "emulator: %s\n", text);
    auto line = [&](const struct access &a) {
        const int actor = (int)actor_of(a);
        char who[64];
        if (actor < 1)
            snprintf(who, sizeof who, "a product");
        else if (launch_of(a) != b->launch->number) /* whose blocks may be of another size */
            snprintf(who, sizeof who, "actor %d", actor);
        else if (actor < b->actor_products)
            snprintf(who, sizeof who, "thread %d", actor - 1);
        else if (actor >= b->actor_copies)
            snprintf(who, sizeof who, "a cp.async of thread %d", actor - b->actor_copies);
        else
            snprintf(who, sizeof who, "a bulk copy");
        snprintf(text, sizeof text, "%s by %s of block %u of launch %u:", kind[flags_of(a) & 7], who, block_of(a), launch_of(a));
        print_place(text, pc_of(a));
    };
    line(now);
    line(before);
}

/* Has what actor did at its time `number`, in the same block, happened before what m knows? */
static inline bool happened(const struct block *b, const moment &m, uint32_t actor, uint32_t number)
{
    return number <= m.base[actor] ||
           (actor == m.thread ? number <= m.number : actor == (uint32_t)b->actor_copies + m.thread - 1 && m.thread && number <= m.copies);
}

/* And is it before a fence of proxies that m knows of? */
static bool fenced(const struct block *b, const moment &m, uint32_t actor, uint32_t number)
{
    if (actor < (uint32_t)b->actor_products)
        return number <= m.base[(uint32_t)b->actor_fenced + actor - 1] || (actor == m.thread && number <= m.fenced);
    const uint32_t i = actor - (uint32_t)b->actor_copies;
    return number <= m.base[(uint32_t)b->actor_copies_fenced + i] || (m.thread && i == m.thread - 1 && number <= m.fenced_copies);
}

/* c: the cell's first accesses; more: those of shared memory past CELL_ACCESSES. */
template <int N>
static inline __attribute__((always_inline)) void touch(struct block *b, struct access *c, struct access *more, const struct access now,
                                                        const moment &m, uint32_t acquired, uintptr_t p)
{
    const bool in_shared = N == SHARED_CELL_ACCESSES;
    const uint32_t flags = flags_of(now), bytes = bytes_of(now);
    auto at = [&](int i) -> struct access & { return N == CELL_ACCESSES || i < CELL_ACCESSES ? c[i] : more[i - CELL_ACCESSES]; };
    int kept = 0, i = 0;
    for (; i < N; i++) {
        const struct access a = at(i);
        if (!launch_of(a))
            break;
        const uint64_t other = a.who ^ now.who;
        const uint32_t a_flags = flags_of(a), a_bytes = bytes_of(a);
        /* The same thread at the same time, and no less: all has been said. */
        if (!other && number_of(a) == number_of(now) && !(bytes & ~a_bytes) && (a_flags == flags || a_flags == ACCESS_WRITE) &&
            !(flags & ~ACCESS_WRITE)) {
            if (kept != i) { /* close the gap */
                for (; i < N && launch_of(at(i)); i++)
                    at(kept++) = at(i);
                at(kept).who = 0;
            }
            return;
        }
        bool before = !other;
        if (other) {
            if (other << 12) { /* of another launch or block */
                if (in_shared)
                    continue; /* which is gone */
                before = (uint32_t)other && launch_of(a) <= acquired;
            } else {
                before = happened(b, m, actor_of(a), number_of(a));
            }
        }
        bool unfenced = false;
        if (in_shared && (flags & ACCESS_PROXY) && before && (a_flags & ACCESS_WRITE) && actor_generic(b, (int)actor_of(a)))
            unfenced = !fenced(b, m, actor_of(a), number_of(a));
        if ((!before || unfenced) && (a_bytes & bytes) && ((a_flags | flags) & ACCESS_WRITE) && !(a_flags & flags & ACCESS_ATOMIC))
            report_race(b, now, a, p, in_shared, unfenced);
        /* What it says is said by the new one as well. */
        if (before && !(a_bytes & ~bytes) && ((flags & ACCESS_WRITE) || !(a_flags & ACCESS_WRITE)))
            continue;
        if (kept != i)
            at(kept) = a;
        kept++;
    }
    if (kept == N)
        kept = (int)(random_next() % N);
    else if (kept + 1 < N)
        at(kept + 1).who = 0;
    at(kept) = {now.who, now.what & ~((uint64_t)ACCESS_PROXY << 28)};
}

/* NULL, and reported, unless all of it lies in one. */
static inline region *region_of(struct block *b, uintptr_t p, size_t bytes, const void *pc)
{
    const uintptr_t end = p + bytes;
    if (is_shared(p)) {
        if (__builtin_expect(p - dynamic_begin < SHARED_BYTES && end > dynamic_begin + b->launch->dynamic, 0)) {
            emulator_error(pc, "%s: %zu bytes at %#zx of %zu bytes of dynamic shared memory", where_of(b->launch->call.kernel).c_str(),
                           bytes, (size_t)(p - dynamic_begin), b->launch->dynamic);
            return NULL;
        }
        return &shared_region;
    }
    region *r = memory_find(p);
    if (__builtin_expect(!r || end > r->end, 0)) {
        emulator_error(pc, "%s: %zu bytes at %p, which is outside of any allocation", where_of(b->launch->call.kernel).c_str(), bytes,
                       (void *)p);
        if (!r)
            emulator_fatal("no way on");
        return NULL;
    }
    return r;
}

template <int N>
static inline __attribute__((always_inline)) void touch_cells(struct block *b, region *r, uint64_t who, uint64_t what, const moment &m,
                                                              uintptr_t p, uintptr_t end, const void *pc)
{
    const bool in_shared = N == SHARED_CELL_ACCESSES;
    size_t i = (p - r->begin) / CELL_BYTES;
    struct access *const cells = r->cells;
    uint8_t *const written = in_shared ? NULL : r->written;
    __builtin_prefetch(cells + i * CELL_ACCESSES);
    __builtin_prefetch(cells + (i + 1) * CELL_ACCESSES);
    const uint32_t told = in_shared ? 0 : m.base[0], acquired = told > m.acquired ? told : m.acquired;
    for (uintptr_t cell = r->begin + i * CELL_BYTES; cell < end; cell += CELL_BYTES, i++) {
        const uint8_t bytes = bytes_of_cell(cell, p, end);
        if (written) {
            const uint8_t unwritten = bytes & ~written[i];
            if (__builtin_expect(unwritten != 0, 0)) {
                if ((what >> 28 & 15) != ACCESS_WRITE)
                    emulator_error(pc, "%s: reads device memory %#zx, which was never written", where_of(b->launch->call.kernel).c_str(),
                                   cell);
                written[i] |= unwritten; /* once */
            }
        }
        touch<N>(b, cells + i * CELL_ACCESSES, shared_more + i * CELL_ACCESSES, {who, what | (uint64_t)bytes << 56}, m, acquired, cell);
    }
}

static void touch_range(struct block *b, uint32_t actor, uint32_t number, const moment &m, const void *ptr, size_t bytes, uint32_t flags,
                        const void *pc)
{
    const uintptr_t p = (uintptr_t)ptr;
    region *r = region_of(b, p, bytes, pc);
    if (!r)
        return;
    const uint64_t who = who_word(b->launch->number, b->index, actor), what = what_word(number, flags, (uint32_t)((uintptr_t)pc - program));
    if (r == &shared_region)
        touch_cells<SHARED_CELL_ACCESSES>(b, r, who, what, m, p, p + bytes, pc);
    else
        touch_cells<CELL_ACCESSES>(b, r, who, what, m, p, p + bytes, pc);
}

void checker_async(struct block *b, int actor, uint32_t number, const moment &begun, const void *p, size_t bytes, bool write, bool proxy,
                   const void *pc)
{
    if (checker_on)
        touch_range(b, (uint32_t)actor, number, begun, p, bytes, (write ? ACCESS_WRITE : 0) | (proxy ? ACCESS_PROXY : 0), pc);
}

static void access_of_thread(const void *p, size_t bytes, uint32_t flags, const void *pc)
{
    if (!current_block || !checker_on)
        return;
    fiber *t = self();
    t->touched = t->now.number;
    touch_range(current_block, t->now.thread, t->now.number, t->now, p, bytes, flags, pc);
}

bool checker_loose_read(struct block *b, const moment &m, const void *ptr, size_t bytes, const void *pc)
{
    if (!checker_on)
        return true;
    const uintptr_t p = (uintptr_t)ptr;
    if (!region_of(b, p, bytes, pc))
        return false;
    const struct launch *l = b->launch;
    for (uintptr_t cell = p; cell < p + bytes; cell += CELL_BYTES) {
        const size_t first = (cell - shared_region.begin) / CELL_BYTES * CELL_ACCESSES;
        const struct access *c = shared_region.cells + first;
        for (int i = 0; i < SHARED_CELL_ACCESSES; i++) {
            if (i == CELL_ACCESSES)
                c = shared_more + first - CELL_ACCESSES;
            const struct access a = c[i];
            if (!launch_of(a))
                break;
            if (!(flags_of(a) & ACCESS_WRITE) || launch_of(a) != l->number || block_of(a) != (b->index & 0xfffff))
                continue;
            const uint32_t actor = actor_of(a), number = number_of(a);
            if (actor_generic(b, (int)actor) ? fenced(b, m, actor, number) : happened(b, m, actor, number))
                continue;
            if (show_loose)
                report_race(b, {who_word(l->number, b->index, 0), what_word(0, ACCESS_LOOSE, (uint32_t)((uintptr_t)pc - program))}, a, cell,
                            true, happened(b, m, actor, number));
            return false;
        }
    }
    return true;
}

void checker_access(const void *p, size_t bytes, bool write, const void *pc) { access_of_thread(p, bytes, write ? ACCESS_WRITE : 0, pc); }
void checker_proxy(const void *p, size_t bytes, const void *pc) { access_of_thread(p, bytes, ACCESS_PROXY, pc); }
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

static inline void hook(const void *p, size_t bytes, uint32_t flags, const void *pc)
{
    if (!current_block || !checker_on || !on_device())
        return;
    const uintptr_t at = (uintptr_t)p;
    if (at - (uintptr_t)current_fiber->stack < STACK_BYTES)
        return;
    if (!is_shared(at)) {
        if (of_program(p))
            return;
        const struct launch *l = current_block->launch;
        if (at - (uintptr_t)l->call.arguments < l->call.bytes)
            return;
    }
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
