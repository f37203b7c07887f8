/* SPDX-License-Identifier: Apache-2.0
 *
 * Times of GPU work and the floors that they stand against.
 *
 * What is to be compared takes turns: each contender's work, a graph that goes round several batches so that neither weights nor x
 * wait in the cache, runs once a round, in the other order every second round. So a clock that sinks or a cache that one leaves warm
 * meets all alike, and ratios can be taken round by round.
 */
#ifndef EXPERTD_TESTS_BENCH_MEASURE_H
#define EXPERTD_TESTS_BENCH_MEASURE_H

#include "tests/bench/layer.h"

#include <stdio.h>

#define MOST_SETS 8
#define MOST_ROUNDS 64
#define FORWARD_STEPS 7

struct contender {
    cudaGraphExec_t exec; /* or, where it can't be captured, */
    void (*launch)(void *arg);
    void *arg;
    int sets; /* forwards of one run */
    /* After take_turns, of one forward: */
    double us, least_us; /* median, least */
    int rounds;
    float sample[MOST_ROUNDS]; /* us, in order of rounds */
};

/* The first `steps` steps of each forward, one forward after the other. Without a table entry adapters' steps are left out. */
cudaGraphExec_t forwards_capture(const struct layer *l, const struct kernel_forward *f, int sets, int steps);
void contender_drop(struct contender *c);
/* Rounds until each has run for that long, at least 5. */
void take_turns(const struct layer *l, struct contender *c, int n, double milliseconds);
/* Median over rounds of a's time over b's. */
double turns_ratio(const struct contender *a, const struct contender *b);

struct limits {
    double bandwidth, rate; /* bytes and operations a second */
};

/* One line of a table. */
struct figure {
    const char *run; /* "layer", "sweep-rows", ... */
    const char *code; /* whose code: the table's name, "cublas-plain", ... */
    const char *shape, *path;
    struct mix mix;
    int rank;
    double touched, pairs; /* mean over sets */
    double bytes, lora_bytes, flops; /* that no version can do without; bytes has lora_bytes in it */
    double floor_us, us, least_us;
    double ratio; /* to what it took turns with, round by round; 0: nothing */
    double error; /* NAN: unchecked */
    bool same; /* bits of a captured run are those of an eager one */
};

/* All but times and verdicts. */
struct figure figure_of(const struct layer *l, const struct set *set, int sets, const struct limits *limits);
const char *path_name(enum kernel_path path);
void figure_csv_head(FILE *csv);
void figure_csv(FILE *csv, const struct figure *f); /* NULL: nothing is written */
bool figure_print(const struct figure *f, const char *more); /* false when it is wrong as far as it was checked */

#endif
