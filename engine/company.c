/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/company.h"

#include <math.h>
#include <stdlib.h>

enum {
    WINDOW = 4, /* who has not come after so many times the batch's own does not belong to it */
    FORGET = 1000, /* batches of a kind after which a size is unknown again; at most one of so many is spent on finding out */
    MOST_STRIKES = 8,
    PERIOD = 32, /* batches; how many are present at most is remembered for one to two of these */
};

/* One batch in place of two, and the wait for it, may cost so much of what the two cost. To begin with, as estimates err; and in
 * hindsight, as what it has gained was not worth the risk if it was less. */
#define WORTHWHILE 0.95
#define PAID 0.9

bool company_init(struct company *company, int32_t keys, int32_t kinds, bool waits)
{
    *company = (struct company){.keys = keys, .kinds = kinds, .waits = waits};
    company->watch = calloc((size_t)keys, sizeof *company->watch);
    company->cost = calloc((size_t)kinds, sizeof *company->cost);
    if (company->watch && company->cost)
        return true;
    company_finish(company);
    return false;
}

void company_finish(struct company *company)
{
    free(company->watch);
    free(company->cost);
    *company = (struct company){0};
}

/* ---- what a batch costs ------------------------------------------------------------------------------------ */

static void count_cost(struct company_cost *cost, int32_t rows, int64_t ns)
{
    struct company_size *size = &cost->size[31 - __builtin_clz((unsigned)rows)];
    bool fresh = size->ns == 0 || cost->batches - size->seen > FORGET;
    size->seen = ++cost->batches;
    size->rows += fresh ? (double)rows - size->rows : ((double)rows - size->rows) / 4;
    size->ns += fresh ? (double)ns - size->ns : ((double)ns - size->ns) / 4;
}

/* What a batch of so many rows should take, from the sizes that are known; 0 if none is. */
static double cost_of(const struct company_cost *cost, double rows)
{
    const struct company_size *below = NULL, *before = NULL, *above = NULL;
    for (int i = 0; i < COMPANY_SIZES; i++) {
        const struct company_size *size = &cost->size[i];
        if (size->ns == 0 || cost->batches - size->seen > FORGET)
            continue;
        if (size->rows > rows) {
            above = size;
            break;
        }
        before = below;
        below = size;
    }
    if (!below && !above)
        return 0;
    if (!below)
        return above->ns * rows / above->rows; /* at least so much, which speaks against waiting until it has been seen */
    if (!above) {
        if (!before || before->ns >= below->ns)
            return below->ns; /* which speaks for it, likewise */
        above = below;
        below = before;
    }
    return below->ns + (above->ns - below->ns) * (rows - below->rows) / (above->rows - below->rows);
}

/* ---- who comes back ---------------------------------------------------------------------------------------- */

/* No more of them count. */
static void close_watch(struct company_watch *w)
{
    struct company_habit *habit = &w->habit[w->crowded];
    if (!w->open)
        return;
    w->open = false;
    double back = (double)w->arrived / w->answered, gap = (double)(w->last_ns - w->finished_ns);
    habit->back += habit->known ? (back - habit->back) / 2 : back;
    habit->known = true;
    if (w->arrived == 0)
        return;
    if (!habit->timed) {
        habit->gap_ns = gap;
        habit->spread_ns = gap / 4;
        habit->timed = true;
        return;
    }
    habit->spread_ns += (fabs(gap - habit->gap_ns) - habit->spread_ns) / 4;
    habit->gap_ns += (gap - habit->gap_ns) / 4;
}

/* `present`: how many of the key are here now. */
static void count_present(struct company_watch *w, int32_t present)
{
    if (present > w->most[0] && present > w->most[1])
        w->growing = true;
    if (present > w->most[0])
        w->most[0] = present;
}

void company_count_arrival(struct company *company, int32_t key, int32_t waiting, int64_t now_ns)
{
    if (!company->watch)
        return;
    struct company_watch *w = &company->watch[key];
    count_present(w, w->computing + waiting);
    if (!w->open)
        return;
    if (now_ns - w->finished_ns > WINDOW * w->spent_ns) {
        close_watch(w);
        return;
    }
    w->last_ns = now_ns;
    if (++w->arrived == w->answered)
        close_watch(w);
}

void company_count_batch(struct company *company, int32_t key, int32_t requests, int32_t answered, int32_t rows, int64_t spent_ns,
                         int64_t now_ns, bool crowded)
{
    if (!company->watch)
        return;
    struct company_watch *w = &company->watch[key];
    close_watch(w);
    w->computing -= requests;
    if (++w->batches == PERIOD) {
        w->most[1] = w->most[0];
        w->most[0] = w->batches = 0;
    }
    if (rows > 0 && spent_ns > 0)
        count_cost(&company->cost[key % company->kinds], rows, spent_ns);
    w->waited_ns = 0;
    if (w->skip > 0)
        w->skip--;
    if (answered <= 0)
        return;
    w->open = true;
    w->crowded = crowded || w->computing > 0;
    w->finished_ns = w->last_ns = now_ns;
    w->spent_ns = spent_ns;
    w->answered = answered;
    w->arrived = 0;
    w->request_rows = (double)rows / answered;
}

static int32_t missing(const struct company_watch *w)
{
    const struct company_habit *habit = &w->habit[w->crowded];
    return w->open && habit->timed ? (int32_t)(habit->back * w->answered + 0.5) - w->arrived : 0;
}

/* Whether one batch in place of two pays, of so many rows here and to come in so many nanoseconds. */
static bool pays(const struct company_cost *cost, double here, double come, double left)
{
    return (left > 0 ? left : 0) + cost_of(cost, here + come) <= WORTHWHILE * (cost_of(cost, here) + cost_of(cost, come));
}

bool company_early(const struct company *company, int32_t key, int32_t requests, int64_t rows, int64_t max_rows)
{
    if (!company->watch)
        return false;
    const struct company_watch *w = &company->watch[key];
    const struct company_habit *habit = &w->habit[true];
    if (w->growing || w->most[1] == 0 || w->computing + requests < (w->most[0] > w->most[1] ? w->most[0] : w->most[1]))
        return false;
    if (!company->waits || !habit->timed || w->skip > 0)
        return true;
    double here = (double)rows, come = habit->back * w->computing * w->request_rows;
    return here + come > (double)max_rows || !pays(&company->cost[key % company->kinds], here, come, habit->gap_ns + habit->spread_ns);
}

int64_t company_until(struct company *company, int32_t key, int64_t rows, int64_t max_rows, int64_t deadline_ns, int64_t now_ns)
{
    if (!company->waits)
        return now_ns;
    struct company_watch *w = &company->watch[key];
    const struct company_habit *habit = &w->habit[w->crowded];
    int32_t others = missing(w);
    if (others <= 0 || w->skip > 0)
        return now_ns;
    double here = (double)rows, come = others * w->request_rows, slack = 2 * habit->spread_ns;
    if (slack < (double)w->spent_ns / 32)
        slack = (double)w->spent_ns / 32;
    int64_t until = w->finished_ns + (int64_t)(habit->gap_ns + slack);
    double left = (double)w->finished_ns + habit->gap_ns + habit->spread_ns - (double)now_ns;
    if (until <= now_ns || here + come > (double)max_rows || until > deadline_ns - w->spent_ns)
        return now_ns;
    if (!pays(&company->cost[key % company->kinds], here, come, left))
        return now_ns;
    if (w->waited_ns == 0) {
        w->waited_ns = now_ns;
        w->waited_rows = here;
    }
    w->until_ns = until;
    return until;
}

struct company_wait company_begin(struct company *company, int32_t key, int32_t requests, int64_t rows, int64_t now_ns)
{
    struct company_wait wait = {0};
    if (!company->watch)
        return wait;
    struct company_watch *w = &company->watch[key];
    w->computing += requests;
    w->growing = false;
    if (w->waited_ns == 0)
        return wait;
    const struct company_cost *cost = &company->cost[key % company->kinds];
    double came = (double)rows - w->waited_rows;
    wait.ns = (now_ns < w->until_ns ? now_ns : w->until_ns) - w->waited_ns; /* those who waited may have left meanwhile */
    double apart = came > 0 ? cost_of(cost, w->waited_rows) + cost_of(cost, came) : 0;
    wait.in_vain = (double)wait.ns + cost_of(cost, (double)rows) > PAID * apart;
    w->waited_ns = 0;
    if (wait.in_vain) {
        w->strikes += w->strikes < MOST_STRIKES ? 2 : 0;
        w->skip = 1 << w->strikes;
    } else {
        w->strikes -= w->strikes > 0;
    }
    return wait;
}
