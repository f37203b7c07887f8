/* SPDX-License-Identifier: Apache-2.0
 *
 * What the emulator's sources share. All of this belongs to the device's one thread of the host, unless said otherwise.
 */
#ifndef EXPERTD_TESTS_EMULATOR_INTERNAL_H
#define EXPERTD_TESTS_EMULATOR_INTERNAL_H

#include "device.h"

#include <deque>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#define WARP 32
#define STACK_BYTES (256 * 1024)
#define SHARED_BYTES (227 * 1024) /* what an H200 lets a block have */
#define FLYING 512 /* copies and products of a block that are under way at once, at most */

/* ---- happens-before ----------------------------------------------------------------------------------------- */

/* Times of a block's actors: its threads, the cp.async of each, and whatever else is under way. clock[i]: what has happened of actor i. */
typedef std::vector<uint32_t> times;
typedef std::shared_ptr<const times> moment;

static inline void times_join(times &to, const times &from)
{
    for (size_t i = 0; i < to.size(); i++)
        to[i] = to[i] < from[i] ? from[i] : to[i];
}

/* ---- blocks ------------------------------------------------------------------------------------------------- */

struct launch;
struct block;

/* A copy to shared memory that has been started. */
struct copy {
    uint8_t *dst;
    const uint8_t *src; /* NULL: zeros */
    uint32_t bytes;
    uint32_t number; /* of its actor's */
    moment begun;
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
    int number;
    enum thread_state state;
    uint32_t waits_for, parity; /* barrier */
    /* cp.async */
    std::deque<copy_item> items;
    std::deque<uint32_t> groups; /* number of the last copy of each committed group */
    uint32_t copies, done; /* numbers of the last begun and the last done */
    /* happens-before */
    times clock;
    moment now; /* of `clock`, while it is unchanged */
    uint32_t acquired; /* launches up to this are complete, as this thread was promised */
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
    times gathering, complete;
    std::vector<fiber *> waiting;
};

/* A bulk copy, or a warpgroup's product. */
struct flight {
    int actor;
    struct copy copy;
    uint32_t barrier;
};

/* A warp's part of a warpgroup's product: its 16 rows. */
struct wgmma {
    uint64_t turn;
    int actor;
    uint32_t number;
    bool bf16;
    int n;
    uint64_t a, b; /* descriptors */
    float *d[WARP];
    moment begun;
    const void *pc;
};

struct warp_products {
    std::deque<wgmma> open; /* begun and not yet done, oldest first */
    uint64_t begun, told; /* how many were begun; of how many the warp knows that they are done */
    std::deque<uint64_t> commits; /* how many were begun at each commit */
    struct finish {
        uint64_t turn;
        int actor;
        uint32_t number;
    };
    std::deque<finish> finished; /* of which the warp has not yet been told */
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
    std::vector<uint32_t> actor_number; /* of the extra actors */
    std::vector<fiber *> copying; /* threads with cp.async to do */
    int policy, async_policy;
    bool preempt;
    bool released; /* some thread has let the next launch begin */
    uint32_t released_acquired; /* the least that the threads which did had acquired */
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
    bool can_acquire_all; /* the launch before is complete */
};

extern struct block *current_block;
extern struct fiber *current_fiber;
static inline fiber *self(void) { return current_fiber; }

/* exec.cpp */
void thread_pause(enum thread_state state); /* until thread_wake */
void thread_wake(fiber *t);
enum { OP_SYNC = 1, OP_SHUFFLE, OP_BALLOT, OP_MATCH, OP_REDUCE, OP_MMA, OP_TRANSPOSE, OP_WGMMA, OP_WGMMA_COMMIT, OP_WGMMA_WAIT };
/* Gives a value, gets all 32; they stay until this lane takes part in the second exchange from here. *last: nobody else has got them yet. */
const uint64_t *warp_exchange(int operation, uint64_t value, bool *last);
void barrier_at(named_barrier &bar, int threads);
void emulator_run(std::vector<launch *> &launches); /* in order of a stream, to the end */
uint64_t random_next(void);
std::string where_of(const void *kernel);

/* ptx.cpp */
bool async_any(struct block *b); /* is something under way? */
void async_step(struct block *b); /* does a part of it */
void block_async_end(struct block *b);

/* checker.cpp */
extern bool checker_on;
void checker_shared(uint8_t *begin, size_t bytes, uint8_t *dynamic);
void checker_block(struct block *b);
void checker_thread(fiber *t, int number);
moment thread_moment(fiber *t); /* NULL without a checker, as all that follows does nothing then */
void thread_tick(fiber *t); /* its next access is a later one */
void thread_learn(fiber *t, int actor, uint32_t number); /* what the actor did up to its time `number` has happened */
void thread_join(fiber *t, const times &from);
void sync_clocks(fiber *const *threads, int n); /* all have seen all */
/* An access by actor `actor` at its time `number`, which began at `begun`. */
void checker_async(struct block *b, int actor, uint32_t number, const moment &begun, const void *p, size_t bytes, bool write,
                   const void *pc);
/* A read of what may be under way to being written, and is then not used: false, and no race, when it is. */
bool checker_loose_read(struct block *b, int actor, uint32_t number, const moment &begun, const void *p, size_t bytes, const void *pc);
void checker_access(const void *p, size_t bytes, bool write, const void *pc); /* of the running fiber */
void checker_atomic(const void *p, size_t bytes, const void *pc);
void emulator_error(const void *pc, const char *format, ...) __attribute__((format(printf, 2, 3)));
void emulator_fatal(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
extern "C" long emulator_errors(void);
void memory_add(void *p, size_t bytes);
void memory_remove(void *p);
size_t memory_size(const void *p); /* 0: no begin of a block */

/* Actors: threads, their cp.async, then the others. */
static inline int actor_of_copies(const fiber *t) { return t->block->threads + t->number; }
static inline int actor_extra(const struct block *b, int i) { return 2 * b->threads + i; }

#endif
