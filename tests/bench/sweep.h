/* SPDX-License-Identifier: Apache-2.0
 *
 * How cost grows: with rows, experts touched, adapters in the batch, a favoured expert and rank. Each step is compared with the one
 * before and the path that `auto` takes with the other.
 */
#ifndef EXPERTD_TESTS_BENCH_SWEEP_H
#define EXPERTD_TESTS_BENCH_SWEEP_H

#include "tests/bench/measure.h"

struct sweep {
    const char *kinds; /* a list of rows, experts, adapters, skew, rank; "all" */
    int rows; /* of batches that grow otherwise; 0: some of both paths */
    int rank; /* where that does not grow */
    int most_rows; /* where rows grow */
    double milliseconds; /* a measurement */
    struct limits limits;
    FILE *csv; /* or NULL */
};

bool sweep_known(const char *kinds);
int sweep_most_rows(const struct sweep *s); /* that the layer has to be loaded for */
/* Leaves the layer without adapters. Returns the number of cliffs and bad choices of path, each of which it prints. */
int sweep_run(struct layer *l, const struct sweep *s);

#endif
