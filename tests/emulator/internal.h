/* SPDX-License-Identifier: Apache-2.0
 *
 * What the emulator's sources share. All of this belongs to the device's one thread of the host, unless said otherwise.
 */
#ifndef EXPERTD_TESTS_EMULATOR_INTERNAL_H
#define EXPERTD_TESTS_EMULATOR_INTERNAL_H

#include "device.h"

#include <stdlib.h>

#include <deque>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#define WARP 32
#define STACK_BYTES (256 * 1024)
#define SHARED_BYTES (227 * 1024) /* what an H200 lets a block have */
#define FLYING 128 /* bulk copies of a block that are under way at once, at most */

/* ---- happens-before ----------------------------------------------------------------------------------------- */

/* Times of a block's actors: its threads, the cp.async of each, the products of each warp, and bulk copies. at[i]: what has happened of
 * actor i, or of it before a fence of proxies; beyond n, nothing. at[0]: launches up to this are complete. Shared by all that know the same, so that nobody changes it. */
struct times {
    uint32_t references, n;
    uint32_t at[];
};

class times_ref
{
    times *p = nullptr;

  public:
    times_ref() {}
    explicit times_ref(times *fresh) : p(fresh) {} /* takes its one reference */
    times_ref(const times_ref &o) : p(o.p) { p ? (void)p->references++ : (void)0; }
    times_ref(times_ref &&o) : p(o.p) { o.p = nullptr; }
    times_ref &operator=(times_ref o)
    {
        times *q = p;
        p = o.p;
        o.p = q;
        return *this;
    }
    ~times_ref()
    {
        if (p && !--p->references)
            free(p);
    }
    const times *get() const { return p; }
    bool operator==(const times_ref &o) const { return p == o.p; }
    bool operator!=(const times_ref &o) const { return p != o.p; }
    uint32_t operator[](uint32_t i) const { return p && i < p->n ? p->at[i] : 0; }
};

/* What a thread knows at some time: what it shares with others, and of itself more than that. */
struct moment {
    times_ref base;
    uint32_t thread; /* the actor */
    uint32_t number; /* its own time */
    uint32_t copies; /* of its cp.async, what it has waited for */
    uint32_t fenced, fenced_copies; /* of both, what lies before a fence of proxies */
    uint32_t acquired; /* launches up to this are complete */
};

/* ---- blocks ------------------------------------------------------------------------------------------------- */

struct launch;
struct block;

/* A copy to shared memory that has been started. */
struct copy {
    uint8_t *dst;
    const uint8_t *src; /* NULL: zeros */
    uint32_t bytes;
    uint32_t number; /* of its actor's */
    struct moment begun;
    const void *pc;
};

/* What a thread's cp.async has to do, in order: copies, and arrivals behind them. */
struct copy_item {
    bool arrival;
    uint32_t barrier;
    struct copy copy;
};

enum thread_state { READY, IN_WARP, IN_BARRIER, IN_MBARRIER, IN_GRID, ENDED };
extern const char *const thread_state_name[];

struct fiber {
    struct block *block;
    void *sp; /* of its fiber, while it does not run */
    uint8_t *stack;
    size_t stack_bytes; /* a little less for some, so that stacks don't meet in the cache */
    int number;
    enum thread_state state;
    uint32_t waits_for, parity; /* barrier */
    /* cp.async */
    std::deque<copy_item> items;
    std::deque<uint32_t> groups; /* number of the last copy of each committed group */
    uint32_t copies, done; /* numbers of the last begun and the last done */
    struct moment now;
    uint32_t touched; /* its time at its last access */
};

struct exchange {
    int arrived, operation;
    uint64_t round;
    uint64_t value[2][WARP];
};

struct named_barrier {
    int arrived;
    std::vector<fiber *> waiting;
};

struct mbarrier {
    int expected, pending;
    int64_t bytes;
    uint32_t phase; /* completed phases, modulo 2 */
    std::vector<uint32_t> gathering; /* of those who have arrived */
    times_ref gathered; /* the last that has been joined to it */
    times_ref complete;
    std::vector<fiber *> waiting;
};

/* A bulk copy. */
struct flight {
    int actor;
    struct copy copy;
    uint32_t barrier;
};

/* A warp's part of a warpgroup's product: its 16 rows. Takes place when the warp waits for it, as late as it may: so it meets whatever
 * should not yet have been written to its operands. */
struct wgmma {
    uint64_t turn;
    bool bf16;
    int n, sums; /* index of its sums */
    uint64_t a, b; /* descriptors */
    struct moment begun;
    const void *pc;
};

/* Sums of products under way. What their registers hold meanwhile is no number. */
struct wgmma_sums {
    bool used;
    uint64_t last; /* turn of the last product that adds to them */
    int n;
    float *d[WARP];
    float at[16][256];
};

struct warp_products {
    bool fenced; /* since the last wait there was a wgmma_begin */
    std::deque<wgmma> open; /* begun and not yet done, oldest first */
    std::vector<wgmma_sums *> sums;
    uint64_t begun, told; /* how many were begun; of how many the warp knows that they are done */
    std::deque<uint64_t> commits; /* how many were begun at each commit */
    /* What the warp knew at its last product, and what its lanes had then: often the same at the next. */
    struct moment lately;
    struct lane_then {
        times_ref base;
        uint32_t number, fenced;
    } then[WARP];
};

enum block_state { BLOCK_NEW, BLOCK_LIVE, BLOCK_DONE };

struct block {
    struct launch *launch;
    unsigned index;
    int threads, live;
    std::vector<fiber *> thread_of;
    std::vector<fiber *> ready;
    std::vector<exchange> warp;
    std::vector<warp_products> products;
    named_barrier barrier[17]; /* 16: of all threads, bar 0 */
    std::unordered_map<uint32_t, mbarrier> mbarriers;
    std::vector<flight> flights;
    std::vector<int> free_actors;
    std::vector<uint32_t> actor_number; /* of bulk copies' */
    /* The first of each kind; before them, threads, from 1 on. What few kernels have lies behind. */
    int actor_products, actor_fenced, actor_bulk, actor_copies, actor_copies_fenced;
    std::vector<fiber *> copying; /* threads with cp.async to do */
    int policy, async_policy;
    bool preempt;
    bool released; /* some thread has let the next launch begin */
    uint32_t released_acquired; /* the least that the threads which did had acquired */
    uint32_t ended_acquired; /* the most that a thread which has ended had acquired */
    std::vector<uint8_t> saved; /* shared memory, while another block runs */
};

struct launch {
    uint32_t number;
    dim3 grid, block_dim;
    size_t dynamic;
    bool overlap;
    emulator_call call;
    std::shared_ptr<const void> arguments; /* the call's */
    std::vector<uint8_t> state; /* enum block_state of each block */
    unsigned fresh, done; /* blocks not begun from here on; ended */
    std::vector<block *> live;
    bool complete;
    uint32_t acquired; /* at its begin */
    uint32_t promised; /* to the next: the least of what its blocks that have released or ended had acquired then */
    bool can_acquire_all; /* the launch before is complete */
};

extern struct block *current_block;
extern struct fiber *current_fiber;
static inline fiber *self(void) { return current_fiber; }

/* exec.cpp */
void thread_pause(enum thread_state state); /* until thread_wake */
void thread_wake(fiber *t);
enum {
    OP_SYNC = 1,
    OP_SHUFFLE,
    OP_BALLOT,
    OP_MATCH,
    OP_REDUCE,
    OP_MMA,
    OP_TRANSPOSE,
    OP_WGMMA,
    OP_WGMMA_BEGIN,
    OP_WGMMA_COMMIT,
    OP_WGMMA_WAIT
};
/* Gives a value, gets all 32; they stay until this lane takes part in the second exchange from here. *last: nobody else has got them yet. */
const uint64_t *warp_exchange(int operation, uint64_t value, bool *last);
void barrier_at(named_barrier &bar, int threads);
void emulator_run(std::vector<launch *> &launches); /* in order of a stream, to the end */
uint64_t random_next(void);
uint64_t emulator_seed_get(void);
std::string where_of(const void *kernel);

/* ptx.cpp */
bool async_any(struct block *b); /* is something under way? */
void async_step(struct block *b); /* does a part of it */
void products_drop(struct block *b);
void block_async_end(struct block *b);

/* checker.cpp */
extern bool checker_on;
void checker_shared(uint8_t *begin, size_t bytes, uint8_t *dynamic);
void checker_block(struct block *b); /* a fresh one */
void checker_thread(fiber *t, int number);
void thread_tick(fiber *t); /* its next access is a later one */
void thread_learn_copies(fiber *t, uint32_t number); /* its cp.async up to this number have happened */
void thread_learn_products(fiber *const *lanes, int actor, uint32_t number); /* of a warp, to its lanes */
void thread_join(fiber *t, const times_ref &from);
void thread_fence(fiber *t); /* of proxies */
uint32_t thread_acquired(const fiber *t);
void sync_clocks(fiber *const *threads, int n); /* all have seen all */
moment moment_of_all(fiber *const *threads, int n);
void gather(mbarrier &m, const fiber *t); /* it arrives */
void gather_actor(mbarrier &m, int actor, uint32_t number);
times_ref gathered(mbarrier &m);
/* An access by actor `actor` at its time `number`, which began at `begun`; through the async proxy or the generic one. */
void checker_async(struct block *b, int actor, uint32_t number, const moment &begun, const void *p, size_t bytes, bool write, bool proxy,
                   const void *pc);
/* A read through the async proxy of what may be under way to being written, and is then not used: false, and no race, when it is. */
bool checker_loose_read(struct block *b, const moment &begun, const void *p, size_t bytes, const void *pc);
void checker_proxy(const void *p, size_t bytes, const void *pc); /* the running fiber begins what reads it through the async proxy */
void memory_written(void *p, size_t bytes); /* by other than kernels */
void checker_access(const void *p, size_t bytes, bool write, const void *pc); /* of the running fiber */
void checker_atomic(const void *p, size_t bytes, const void *pc);
void emulator_error(const void *pc, const char *format, ...) __attribute__((format(printf, 2, 3)));
void emulator_fatal(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
void memory_add(void *p, size_t bytes, bool written);
void memory_remove(void *p);
size_t memory_size(const void *p); /* 0: no begin of a block */

static inline int actor_of_copies(const fiber *t) { return t->block->actor_copies + t->number; }
/* Does it access memory through the generic proxy? */
static inline bool actor_generic(const struct block *b, int actor) { return actor < b->actor_products || actor >= b->actor_copies; }

#endif
