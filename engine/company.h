/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a batch should wait for company: what `--batch-wait-us auto` goes by. It owns its estimates, takes no lock and looks at no
 * clock: its owner does.
 *
 * A small batch costs little more than the weights that it makes the device read, so two groups of clients that take turns on the
 * device read them twice for what one batch could do. They don't find together by themselves: while one group computes the other one
 * waits, and starts as soon as the device is free. It pays to leave the device idle until the first group is back, if
 *
 *     the time until they are here + a batch of all  <  a batch of those who wait + a batch of those who come
 *
 * and for that the following is estimated, from what was seen:
 *   - of each key, how many of the requests that a batch answered are followed by another of that key, and when the last of these
 *     arrives, counted from the end of the batch: mean and deviation. Who sends them does not matter. Ends of batches that left others
 *     of the key waiting (groups take turns) are kept apart from those that left none (everybody was in it): what arrives next
 *     means something else in each. Frontends that walk through layers are followed by nothing under a key, and so never waited for.
 *   - of each kind of batch, what it costs by its rows: one point for each power of two, joined by straight lines. Sizes not seen for
 *     a while are forgotten, so that neither a slow moment nor a size that is never tried any more decides for good.
 * Estimates follow quickly, as clients come and go. After a wait that has cost more than it gave, the next opportunities pass unused,
 * four times as many each time; one that has paid takes back half a step.
 */
#ifndef EXPERTD_ENGINE_COMPANY_H
#define EXPERTD_ENGINE_COMPANY_H

#include <stdbool.h>
#include <stdint.h>

enum { COMPANY_SIZES = 31 };

struct company_size {
    double rows, ns; /* means; ns 0: not known */
    uint64_t seen; /* number of the batch that was last of this size */
};

struct company_cost {
    struct company_size size[COMPANY_SIZES]; /* batches of 2^i rows and more */
    uint64_t batches;
};

struct company_habit {
    double back; /* requests that follow, per request answered */
    double gap_ns, spread_ns; /* until the last of them arrives: mean and mean deviation */
    bool known, timed;
};

/* What follows the last batch of a key. */
struct company_watch {
    struct company_habit habit[2]; /* [whether others waited when the batch ended] */
    int64_t finished_ns, spent_ns; /* the end of the batch, and how long it took */
    int64_t last_ns; /* the last arrival that counts */
    int64_t waited_ns, until_ns; /* since when the next batch is held back, 0: it is not; and until when at most */
    double waited_rows; /* how many waited then */
    double request_rows; /* mean of the requests answered */
    int32_t answered, arrived; /* requests */
    int32_t strikes, skip; /* waits in vain; batches that don't wait because of them */
    bool open, crowded;
};

struct company {
    struct company_watch *watch; /* [keys]; NULL: nobody waits, and all below is free */
    struct company_cost *cost; /* [kinds]; key % kinds says which */
    int32_t keys, kinds;
};

/* What became of a wait. */
struct company_wait {
    int64_t ns; /* 0: there was none */
    bool in_vain; /* it cost more than it gave */
};

bool company_init(struct company *company, int32_t keys, int32_t kinds); /* false: no memory */
void company_finish(struct company *company); /* a zeroed one is fine */

/* A request has been queued. */
void company_count_arrival(struct company *company, int32_t key, int64_t now_ns);
/* A batch of so many rows, of which the device was rid after spent_ns, has answered `requests` (0: it was part of longer ones, or
 * failed), whose clients don't know yet. `crowded`: others of the key wait. */
void company_count_batch(struct company *company, int32_t key, int32_t requests, int32_t rows, int64_t spent_ns, int64_t now_ns,
                         bool crowded);
/* The device is free, and so many rows of the key wait, of which one has to be computed by deadline_ns: until when they should wait
 * for others, or now_ns for not at all. To be asked again at each arrival. */
int64_t company_until(struct company *company, int32_t key, int64_t rows, int64_t max_rows, int64_t deadline_ns, int64_t now_ns);
/* A batch of so many rows of the key begins. */
struct company_wait company_begin(struct company *company, int32_t key, int64_t rows, int64_t now_ns);

#endif
