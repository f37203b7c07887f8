/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads, warps, blocks and launches.
 *
 * A kernel's thread is a fiber. All fibers of all blocks run on one thread of the host, one at a time, from one point where they wait for
 * others to the next; who is next is drawn by chance, from a seed, in one of several manners, so that orders come up that no device would
 * show but for once in a million. A launch that may begin before the one before has ended does so, as far as it is allowed.
 */
#include "emulator.h"
#include "internal.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Dynamic shared memory, by all the names that kernels have for it. */
extern "C" {
alignas(1024) thread_local uint8_t shared[SHARED_BYTES] = {};
}
extern thread_local uint8_t warp_count[] __attribute__((alias("shared")));

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
struct block *current_block;
struct fiber *current_fiber;
const char *const thread_state_name[] = {"ready", "in its warp", "at a barrier", "at an mbarrier", "for the launch before", "ended"};

/* ---- chance ------------------------------------------------------------------------------------------------- */

static uint64_t random_state, random_seed;

uint64_t random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void emulator_seed(uint64_t seed)
{
    random_seed = seed;
    random_state = (seed + 1) * 0x9e3779b97f4a7c15;
    if (!random_state)
        random_state = 1;
    for (int i = 0; i < 8; i++) /* seeds that are near each other are so no more */
        random_next();
}

uint64_t emulator_seed_get(void) { return random_seed; }

/* What a program that has failed, in whatever way, was run with. */
static void print_seed(int status, void *arg)
{
    if (status)
        fprintf(stderr, "emulator: EMULATOR_SEED=%llu\n", (unsigned long long)random_seed);
}

__attribute__((constructor)) static void seed_from_environment(void)
{
    const char *seed = getenv("EMULATOR_SEED");
    emulator_seed(seed ? strtoull(seed, NULL, 0) : 0);
    on_exit(print_seed, NULL);
}

/* ---- fibers ------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* Stores where this fiber stands, goes on with the other. */
extern "C" void fiber_switch(void **from, void *to);
asm(".text\n.globl fiber_switch\n.type fiber_switch,@function\nfiber_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size fiber_switch,.-fiber_switch\n");

static void *fiber_make(uint8_t *stack, size_t bytes, void (*entry)(void))
{
    void **sp = (void **)(stack + bytes / 16 * 16);
    *--sp = NULL; /* the stack is aligned as if entry had been called */
    *--sp = (void *)entry;
    for (int i = 0; i < 6; i++)
        *--sp = NULL;
    return sp;
}
#else
#include <ucontext.h>

static void fiber_switch(void **from, void *to)
{
    ucontext_t here;
    *from = &here;
    swapcontext(&here, (ucontext_t *)to);
}

static void *fiber_make(uint8_t *stack, size_t bytes, void (*entry)(void))
{
    ucontext_t *c = (ucontext_t *)stack;
    getcontext(c);
    c->uc_stack.ss_sp = stack + sizeof *c;
    c->uc_stack.ss_size = bytes - sizeof *c;
    c->uc_link = NULL;
    makecontext(c, entry, 0);
    return c;
}
#endif

static void *base_sp; /* of who runs blocks */
static std::vector<fiber *> spare_threads;
static std::vector<block *> spare_blocks;

static fiber *thread_get(void)
{
    if (!spare_threads.empty()) {
        fiber *t = spare_threads.back();
        spare_threads.pop_back();
        return t;
    }
    fiber *t = new fiber();
    void *p = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        emulator_fatal("no memory for a thread's stack");
    t->stack = (uint8_t *)p;
    static size_t made;
    t->stack_bytes = STACK_BYTES - made++ % 61 * 1088;
    return t;
}

/* ---- who is next -------------------------------------------------------------------------------------------- */

void thread_wake(fiber *t)
{
    t->state = READY;
    t->block->ready.push_back(t);
}

static fiber *pick(struct block *b)
{
    size_t n = b->ready.size(), i = b->policy == 0 ? random_next() % n : b->policy == 1 ? n - 1 : 0;
    if (b->policy == 2 && random_next() % 16 == 0) /* in turn, mostly */
        i = random_next() % n;
    fiber *t = b->ready[i];
    if (b->policy == 2)
        b->ready.erase(b->ready.begin() + (ptrdiff_t)i);
    else
        b->ready[i] = b->ready.back(), b->ready.pop_back();
    return t;
}

/* Goes on with whoever is next; `from` is where the caller stands. Copies under way make progress at once, by chance, or only when nobody
 * can go on without. */
static void go_on(void **from)
{
    struct block *b = current_block;
    for (;;) {
        if (b->preempt) {
            b->preempt = false;
            break;
        }
        const bool under_way = b->live && async_any(b); /* when all have ended, nobody has waited for the rest */
        if (under_way && (b->ready.empty() || b->async_policy == 0 || (b->async_policy == 1 && random_next() % 8 == 0))) {
            async_step(b);
            continue;
        }
        if (b->ready.empty())
            break;
        fiber *t = pick(b);
        current_fiber = t;
        threadIdx.x = (unsigned)t->number;
        if (from != &t->sp)
            fiber_switch(from, t->sp);
        return;
    }
    if (from != &base_sp)
        fiber_switch(from, base_sp);
}

void thread_pause(enum thread_state state)
{
    fiber *t = self();
    t->state = state;
    go_on(&t->sp);
}

static void thread_entry(void)
{
    fiber *t = self();
    t->block->launch->call.call(t->block->launch->call.kernel, t->block->launch->call.arguments);
    t->state = ENDED;
    t->block->live--;
    if (t->block->ended_acquired < thread_acquired(t))
        t->block->ended_acquired = thread_acquired(t);
    /* Whoever has ended counts as arrived at the barrier of all. */
    named_barrier &all = t->block->barrier[16];
    if (all.arrived && all.arrived == t->block->live) {
        sync_clocks(all.waiting.data(), (int)all.waiting.size());
        for (fiber *w : all.waiting)
            thread_wake(w);
        all.waiting.clear();
        all.arrived = 0;
    }
    go_on(&t->sp);
    abort();
}

/* ---- warps -------------------------------------------------------------------------------------------------- */

const uint64_t *warp_exchange(int operation, uint64_t value, bool *last)
{
    fiber *t = self();
    struct block *b = t->block;
    exchange &w = b->warp[(size_t)(t->number / WARP)];
    if (w.arrived == 0)
        w.operation = operation;
    else if (w.operation != operation)
        emulator_fatal("%s: lanes of a warp meet different operations (%d and %d)", where_of(b->launch->call.kernel).c_str(), w.operation,
                       operation);
    const uint64_t round = w.round;
    w.value[round % 2][t->number % WARP] = value;
    *last = ++w.arrived == WARP;
    if (!*last) {
        thread_pause(IN_WARP);
        return w.value[round % 2];
    }
    w.arrived = 0;
    w.round++;
    fiber **lanes = &b->thread_of[(size_t)(t->number / WARP * WARP)];
    if (operation == OP_SYNC)
        sync_clocks(lanes, WARP);
    for (int i = 0; i < WARP; i++)
        if (lanes[i] != t)
            thread_wake(lanes[i]);
    return w.value[round % 2];
}

static const uint64_t *exchange_values(int operation, uint64_t value)
{
    bool last;
    return warp_exchange(operation, value, &last);
}

void emulator_sync_warp(void) { exchange_values(OP_SYNC, 0); }

uint64_t emulator_shuffle(uint64_t v, int from)
{
    const uint64_t *all = exchange_values(OP_SHUFFLE, v);
    return from < 0 || from >= WARP ? v : all[from];
}

unsigned emulator_ballot(bool v)
{
    const uint64_t *all = exchange_values(OP_BALLOT, v);
    unsigned r = 0;
    for (int i = 0; i < WARP; i++)
        r |= (unsigned)all[i] << i;
    return r;
}

unsigned emulator_match(uint64_t v)
{
    const uint64_t *all = exchange_values(OP_MATCH, v);
    unsigned r = 0;
    for (int i = 0; i < WARP; i++)
        r |= (unsigned)(all[i] == v) << i;
    return r;
}

int emulator_reduce(int v, bool most)
{
    const uint64_t *all = exchange_values(OP_REDUCE, (uint64_t)(unsigned)v);
    int r = (int)(unsigned)all[0];
    for (int i = 1; i < WARP; i++) {
        const int w = (int)(unsigned)all[i];
        r = most ? (r < w ? w : r) : r + w;
    }
    return r;
}

/* ---- barriers of a block ------------------------------------------------------------------------------------ */

void barrier_at(named_barrier &bar, int threads)
{
    fiber *t = self();
    bar.waiting.push_back(t);
    if (++bar.arrived < threads) {
        thread_pause(IN_BARRIER);
        return;
    }
    if (bar.arrived > threads)
        emulator_fatal("%s: %d threads at a barrier for %d", where_of(t->block->launch->call.kernel).c_str(), bar.arrived, threads);
    sync_clocks(bar.waiting.data(), (int)bar.waiting.size());
    for (fiber *w : bar.waiting)
        if (w != t)
            thread_wake(w);
    bar.waiting.clear();
    bar.arrived = 0;
}

void emulator_sync_threads(void)
{
    struct block *b = current_block;
    barrier_at(b->barrier[16], b->live);
}

int emulator_atomic_add(int *p, int v)
{
    checker_atomic(p, sizeof *p, __builtin_return_address(0));
    int old = *p;
    *p = old + v;
    return old;
}

unsigned emulator_atomic_or(unsigned *p, unsigned v)
{
    checker_atomic(p, sizeof *p, __builtin_return_address(0));
    unsigned old = *p;
    *p = old | v;
    return old;
}

uint32_t emulator_shared_address(const void *p) { return (uint32_t)((const uint8_t *)p - shared); }

/* ---- launches ----------------------------------------------------------------------------------------------- */

void emulator_launch_wait(void)
{
    fiber *t = self();
    struct launch *l = t->block->launch;
    if (!l->can_acquire_all)
        thread_pause(IN_GRID);
    t->now.acquired = l->number - 1;
}

void emulator_launch_release(void)
{
    fiber *t = self();
    struct block *b = t->block;
    const uint32_t acquired = thread_acquired(t);
    if (!b->released || acquired < b->released_acquired)
        b->released_acquired = acquired;
    if (!b->released && random_next() % 2)
        b->preempt = true;
    b->released = true;
    if (b->preempt) {
        b->ready.push_back(t);
        thread_pause(READY);
    }
}

/* The executable's thread-local memory is the kernels' shared memory and nothing else. */
static uint8_t *tls_begin;
static size_t tls_bytes;

static int find_tls(struct dl_phdr_info *info, size_t size, void *arg)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_TLS)
            continue;
        uint8_t *begin = (uint8_t *)info->dlpi_tls_data;
        const size_t bytes = info->dlpi_phdr[i].p_memsz;
        if (begin && begin <= shared && shared + SHARED_BYTES <= begin + bytes) {
            tls_begin = begin;
            tls_bytes = bytes;
        }
    }
    return 0;
}

static struct block *resident; /* whose shared memory is in place */

static void block_enter(struct block *b)
{
    if (!tls_begin) {
        dl_iterate_phdr(find_tls, NULL);
        if (!tls_begin)
            emulator_fatal("shared memory is not found");
        checker_shared(tls_begin, tls_bytes, shared);
    }
    if (resident == b)
        return;
    /* Of dynamic shared memory, what the launch has asked for. */
    auto each_part = [](const struct block *x, auto part) {
        const size_t before = (size_t)(shared - tls_begin), dynamic = x->launch->dynamic;
        part(tls_begin, before + dynamic);
        part(shared + SHARED_BYTES, tls_bytes - before - SHARED_BYTES);
    };
    if (resident) {
        std::vector<uint8_t> &to = resident->saved;
        to.clear();
        each_part(resident, [&](uint8_t *p, size_t n) { to.insert(to.end(), p, p + n); });
    }
    if (!b->saved.empty()) {
        const uint8_t *from = b->saved.data();
        each_part(b, [&](uint8_t *p, size_t n) {
            memcpy(p, from, n);
            from += n;
        });
    } else {
        each_part(b, [](uint8_t *p, size_t n) { memset(p, 0xd7, n); }); /* what a block finds: nothing of use */
    }
    resident = b;
}

/* Runs a block until it has ended, waits for the launch before, or gives way. */
static void block_slice(struct block *b)
{
    const dim3 grid = b->launch->grid;
    block_enter(b);
    blockIdx = {b->index % grid.x, b->index / grid.x % grid.y, b->index / grid.x / grid.y};
    blockDim = b->launch->block_dim;
    gridDim = grid;
    current_block = b;
    go_on(&base_sp);
    current_block = NULL;
}

static struct block *block_begin(struct launch *l, unsigned index)
{
    struct block *b;
    if (spare_blocks.empty()) {
        b = new block();
    } else {
        b = spare_blocks.back();
        spare_blocks.pop_back();
    }
    b->launch = l;
    b->index = index;
    b->threads = b->live = (int)(l->block_dim.x * l->block_dim.y * l->block_dim.z);
    if (b->threads % WARP || l->block_dim.y != 1 || l->block_dim.z != 1)
        emulator_fatal("blocks of %u x %u x %u threads", l->block_dim.x, l->block_dim.y, l->block_dim.z);
    b->policy = (int)(random_next() % 3);
    b->async_policy = (int)(random_next() % 3);
    b->preempt = b->released = false;
    b->ended_acquired = l->acquired;
    b->warp.assign((size_t)(b->threads / WARP), exchange());
    products_drop(b);
    b->products.assign((size_t)(b->threads / WARP), warp_products());
    for (named_barrier &bar : b->barrier)
        bar.arrived = 0, bar.waiting.clear();
    b->mbarriers.clear();
    b->flights.clear();
    b->copying.clear();
    b->saved.clear();
    b->ready.clear();
    b->thread_of.clear();
    checker_block(b);
    for (int i = 0; i < b->threads; i++) {
        fiber *t = thread_get();
        t->block = b;
        t->number = i;
        t->state = READY;
        t->items.clear();
        t->groups.clear();
        t->copies = t->done = 0;
        t->sp = fiber_make(t->stack, t->stack_bytes, thread_entry);
        b->thread_of.push_back(t);
        b->ready.push_back(t);
        checker_thread(t, i);
    }
    l->state[index] = BLOCK_LIVE;
    l->live.push_back(b);
    return b;
}

static void block_stuck(struct block *b)
{
    print_seed(1, NULL);
    fprintf(stderr, "emulator: %s, block %u: no thread can go on\n", where_of(b->launch->call.kernel).c_str(), b->index);
    for (int i = 0; i < b->threads; i++) {
        fiber *t = b->thread_of[(size_t)i];
        if (i == 0 || t->state != b->thread_of[(size_t)i - 1]->state || t->waits_for != b->thread_of[(size_t)i - 1]->waits_for)
            fprintf(stderr, "  thread %d on: %s (%#x, parity %u)\n", i, thread_state_name[t->state], t->waits_for, t->parity);
    }
    for (auto &m : b->mbarriers)
        fprintf(stderr, "  mbarrier %#x: phase %u, %d of %d arrivals and %lld bytes to come\n", m.first, m.second.phase, m.second.pending,
                m.second.expected, (long long)m.second.bytes);
    abort();
}

static void block_run(struct block *b)
{
    struct launch *l = b->launch;
    block_slice(b);
    if (b->live == 0) {
        block_async_end(b);
        for (fiber *t : b->thread_of)
            spare_threads.push_back(t);
        if (resident == b)
            resident = NULL;
        l->state[b->index] = BLOCK_DONE;
        l->done++;
        for (size_t i = 0; i < l->live.size(); i++)
            if (l->live[i] == b)
                l->live[i] = l->live.back(), l->live.pop_back();
        const uint32_t acquired = b->released ? b->released_acquired : b->ended_acquired; /* its end is its release */
        if (acquired < l->promised)
            l->promised = acquired;
        l->complete = l->done == l->state.size();
        spare_blocks.push_back(b);
        return;
    }
    if (!b->ready.empty())
        return; /* gave way */
    for (fiber *t : b->thread_of)
        if (t->state == IN_GRID)
            return;
    block_stuck(b);
}

static bool block_waits(struct block *b) { return b->ready.empty(); /* otherwise it gave way */ }

/* Has every block let the next launch begin? Then *acquired is what all of them knew to be complete. */
static bool launch_released(struct launch *l, uint32_t *acquired)
{
    if (l->fresh < l->state.size())
        return false;
    *acquired = l->promised;
    for (struct block *b : l->live) {
        if (!b->released)
            return false;
        if (b->released_acquired < *acquired)
            *acquired = b->released_acquired;
    }
    return true;
}

/* Lets those who wait for the launch before go on. */
static void launch_admit(struct launch *l)
{
    l->can_acquire_all = true;
    for (struct block *b : l->live)
        for (fiber *t : b->thread_of)
            if (t->state == IN_GRID)
                thread_wake(t);
}

static void launch_begin_at(struct launch *l, uint32_t acquired)
{
    l->acquired = acquired;
    l->promised = l->number - 1; /* what it itself writes, nobody may rely on that has not waited for it */
    l->state.assign((size_t)l->grid.x * l->grid.y * l->grid.z, BLOCK_NEW);
    l->fresh = l->done = 0;
    l->complete = l->state.empty();
    l->can_acquire_all = false;
}

#define EARLY_BLOCKS 24 /* of launches that are not yet the first, at once */

/* In order of their numbers. The first of those not complete runs; the next begin early where they may. */
void emulator_run(std::vector<launch *> &launches)
{
    size_t first = 0, begun = 0;
    while (first < launches.size()) {
        struct launch *l = launches[first];
        if (begun <= first) {
            launch_begin_at(l, first > 0 && l->overlap ? launches[first - 1]->promised : l->number - 1);
            begun = first + 1;
        }
        if (!l->can_acquire_all)
            launch_admit(l);
        if (l->complete) {
            first++;
            continue;
        }
        /* May another begin? What it may rely on is settled by what the launch before has said, not by when it does begin here. */
        uint32_t acquired;
        if (begun < launches.size() && launches[begun]->overlap && launch_released(launches[begun - 1], &acquired)) {
            launch_begin_at(launches[begun], acquired);
            begun++;
        }
        size_t early = 0;
        for (size_t i = first + 1; i < begun; i++)
            early += launches[i]->live.size();
        if (begun > first + 1 && random_next() % 2) {
            struct launch *next = launches[first + 1 + random_next() % (begun - first - 1)];
            if (next->fresh < next->state.size() && early < EARLY_BLOCKS && random_next() % 2) {
                block_run(block_begin(next, next->fresh++));
                continue;
            }
            if (!next->live.empty()) {
                struct block *b = next->live[random_next() % next->live.size()];
                if (!block_waits(b)) {
                    block_run(b);
                    continue;
                }
            }
        }
        /* The first: a fresh block, or one that gave way or waited. */
        const bool fresh = l->fresh < l->state.size();
        if (fresh && (l->live.empty() || (l->live.size() < EARLY_BLOCKS && random_next() % 2)))
            block_run(block_begin(l, l->fresh++));
        else if (!l->live.empty())
            block_run(l->live[random_next() % l->live.size()]);
    }
}

std::string where_of(const void *kernel)
{
    Dl_info info;
    if (!dladdr(kernel, &info) || !info.dli_sname) {
        char text[32];
        snprintf(text, sizeof text, "kernel %p", kernel);
        return text;
    }
    int status;
    char *plain = abi::__cxa_demangle(info.dli_sname, NULL, NULL, &status);
    std::string s = plain ? plain : info.dli_sname;
    free(plain);
    return s.substr(0, s.find('('));
}
