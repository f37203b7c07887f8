/* SPDX-License-Identifier: Apache-2.0
 *
 * cuBLAS as a comparison and an oracle: a layer's two products by its general routines, on plain row-major copies of the weights.
 * The library is found when the program runs, so that neither building nor the other measurements need it.
 *
 * Routing, gather, activation, routing weight and sum are not in these times, and the host knows the counts beforehand: all of that
 * favours cuBLAS.
 */
#ifndef EXPERTD_TESTS_BENCH_BLAS_H
#define EXPERTD_TESTS_BENCH_BLAS_H

#include "tests/bench/measure.h"

enum blas_kind {
    BLAS_PLAIN, /* one product an expert, one after the other */
    BLAS_GROUPED, /* one call for all experts, of different counts */
    BLAS_POINTERS, /* one call by pointer arrays: each slot a product of its own, or experts' rows padded to equal counts */
    BLAS_KINDS,
};

struct blas;
struct blas_run;

const char *blas_kind_name(enum blas_kind kind);
/* `library`: NULL looks for it under its usual names. NULL with `why` filled when it can't be had. */
struct blas *blas_open(const char *library, cudaStream_t stream, char *why, size_t why_size);
void blas_close(struct blas *b); /* NULL is fine */
int blas_version(const struct blas *b);
void blas_load(struct blas *b, const struct layer *l); /* copies the weights; in place of an earlier layer's */

/* The products of these sets, which live on; their adapters are ignored. NULL with `why` filled when it does not apply here. */
struct blas_run *blas_run_create(struct blas *b, const struct layer *l, enum blas_kind kind, const struct set *set, int sets, char *why,
                                 size_t why_size);
void blas_run_destroy(struct blas_run *r); /* NULL is fine; before it, the contenders that run it */
/* Row t of set 0: the layer's output, its two products by cuBLAS and the rest on the host. False: cuBLAS refused, see `why`. */
bool blas_run_row(struct blas_run *r, const struct layer *l, int t, uint16_t *out, char *why, size_t why_size);
/* Both products of all sets, or gate and up alone: captured where cuBLAS allows it and the bits are those of an eager run, else
 * launched. Lives as long as the run. */
struct contender blas_run_contender(struct blas_run *r, bool down_too);

/* Operations a second of a dense bf16 product of n x n matrices; 0 when cuBLAS refuses. */
double blas_dense_rate(struct blas *b, int n);

#endif
