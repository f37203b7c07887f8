/* SPDX-License-Identifier: Apache-2.0
 *
 * What builds with CUDA but without cuBLAS' header have in place of blas.c.
 */
#include "tests/bench/blas.h"

const char *blas_kind_name(enum blas_kind kind) { return "none"; }

struct blas *blas_open(const char *library, cudaStream_t stream, char *why, size_t why_size)
{
    snprintf(why, why_size, "cublas_v2.h was not found when this program was built");
    return NULL;
}

void blas_close(struct blas *b) {}

int blas_version(const struct blas *b) { return 0; }

void blas_load(struct blas *b, const struct layer *l) {}

struct blas_run *blas_run_create(struct blas *b, const struct layer *l, enum blas_kind kind, const struct set *set, int sets, char *why,
                                 size_t why_size)
{
    snprintf(why, why_size, "there is no cuBLAS");
    return NULL;
}

void blas_run_destroy(struct blas_run *r) {}

bool blas_run_row(struct blas_run *r, const struct layer *l, int t, uint16_t *out, char *why, size_t why_size) { return false; }

struct contender blas_run_contender(struct blas_run *r, bool down_too) { return (struct contender){0}; }

double blas_dense_rate(struct blas *b, int n) { return 0; }
