/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a batch has all the company that it will get, and whether it should wait for more: what `--batch-wait-us auto` goes by. It owns
 * its estimates, takes no lock and looks at no clock: its owner does.
 *
 * While a batch computes, those who come meanwhile make up the next one, and it would be handed over best the moment before the first
 * one ends: the device need not wait for it then, and nobody is left behind. When that moment comes is not known well enough (clients that
 * miss it wait for a whole batch more), but often all are here long before: when as many are in the queue and on the device as have ever
 * been at once of late, nobody is left who could come. With clients at random that is so rarely, and little is lost.
 *
 * Waiting: a small batch costs little more than the weights that it makes the device read, so two groups of clients that take turns on the
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
    int32_t computing; /* requests in batches that have begun */
    int32_t most[2], batches; /* most requests that were here at once, waiting and computing, in this period and the last; its batches */
    bool open, crowded;
    bool growing; /* since the last batch began more have been here than in either period before */
};

struct company {
    struct company_watch *watch; /* [keys]; NULL: nobody waits, and all below is free */
    struct company_cost *cost; /* [kinds]; key % kinds says which */
    int32_t keys, kinds;
    bool waits; /* false: company_until never asks for it */
};

/* What became of a wait. */
struct company_wait {
    int64_t ns; /* 0: there was none */
    bool in_vain; /* it cost more than it gave */
};

bool company_init(struct company *company, int32_t keys, int32_t kinds, bool waits); /* false: no memory */
void company_finish(struct company *company); /* a zeroed one is fine */

/* A request has been queued; so many of the key wait now. */
void company_count_arrival(struct company *company, int32_t key, int32_t waiting, int64_t now_ns);
/* A batch of so many requests, and rows, has ended, of which the device was rid after spent_ns (0: it failed). It has answered `answered`
 * (fewer, if it was part of longer ones, or failed), whose clients don't know yet. `crowded`: others of the key wait. */
void company_count_batch(struct company *company, int32_t key, int32_t requests, int32_t answered, int32_t rows, int64_t spent_ns,
                         int64_t now_ns, bool crowded);
/* The device is at work, and so many requests and rows of the key wait: whether to hand them over, as nobody is left who could join. */
bool company_early(const struct company *company, int32_t key, int32_t requests, int64_t rows, int64_t max_rows);
/* The device is free, and so many rows of the key wait, of which one has to be computed by deadline_ns: until when they should wait
 * for others, or now_ns for not at all. To be asked again at each arrival. */
int64_t company_until(struct company *company, int32_t key, int64_t rows, int64_t max_rows, int64_t deadline_ns, int64_t now_ns);
/* A batch of so many requests and rows of the key begins. */
struct company_wait company_begin(struct company *company, int32_t key, int32_t requests, int64_t rows, int64_t now_ns);

#endif
