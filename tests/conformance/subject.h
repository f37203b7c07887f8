/* SPDX-License-Identifier: Apache-2.0
 *
 * What a conformance test works with: an engine on one back end holding one checkpoint, and calls to it whose rows are known.
 * Helpers end the test when something fails that the test isn't about.
 */
#ifndef EXPERTD_TESTS_SUBJECT_H
#define EXPERTD_TESTS_SUBJECT_H

#include "engine/engine.h"
#include "engine/safetensors.h"

enum { SUBJECT_ADAPTERS = 8, SUBJECT_LAYERS = 4 };

/* The back end of this run: "ref", a name of kernels_cpu_isa, "cuda", or "cuda-" and a name of its code. */
extern const char *subject_backend;
/* Takes it from the command line; false when this machine or build lacks it (the test is skipped). A number behind it, for back ends that
 * take long: of the cases that ask subject_takes, one in so many is run. */
bool subject_choose_backend(int argc, char **argv);
bool subject_takes(void); /* always true without that number */

extern const char *const subject_fixtures[]; /* names, ends with NULL */

struct subject_options {
    const char *fixture; /* NULL with synthetic */
    const char *synthetic;
    const char *backend; /* NULL: subject_backend */
    const char *layers, *experts, *dtype;
    int64_t max_batch_rows; /* 0: the default */
    int64_t batch_wait_us;
    bool adapters; /* install the fixture's */
    int spare_adapters; /* slots beyond SUBJECT_ADAPTERS */
};

struct subject {
    struct engine *engine;
    const struct engine_model_info *info;
    char folder[512];
    char adapter_name[SUBJECT_ADAPTERS][64]; /* in order of name, as the golden files number them */
    struct engine_adapter *adapter[SUBJECT_ADAPTERS];
    int adapters;
    struct safetensors_file *golden;
};

void subject_open(struct subject *s, const struct subject_options *options);
void subject_install(struct subject *s); /* all of the fixture's adapters */
void subject_close(struct subject *s);
/* A float tensor of the golden file as fp32 or an I32 one as int32; caller frees. *count elements. */
float *subject_golden_f32(const struct subject *s, int32_t layer, const char *name, size_t *count);
int32_t *subject_golden_i32(const struct subject *s, int32_t layer, const char *name, size_t *count);

/* A request that owns its arrays. */
struct call {
    struct engine_request request;
    void *hidden, *out;
    int32_t *ids, *row_slots, *row_adapter;
    float *weights;
    size_t columns;
    atomic_int done;
};

/* Rows filled from `seed`: values about 1, ids in 0..experts-1, weights in 0..1. K slots a row; base. */
void call_init(struct call *c, const struct subject *s, int32_t layer, enum engine_mode mode, enum dtype dtype, int32_t rows, int32_t k,
               uint64_t seed);
/* The golden file's rows; every row on adapter `all`, or -1 base, or -2 as the golden file mixes them. */
void call_init_golden(struct call *c, const struct subject *s, int32_t layer, enum engine_mode mode, enum dtype dtype, int all);
/* Row t of `from` as a request of one row, with its adapter. */
void call_init_row(struct call *c, const struct call *from, int32_t t);
void call_mix_adapters(struct call *c, const struct subject *s, uint64_t seed); /* adapters and base at random */
void call_finish(struct call *c);

/* Submits all, waits for all, all have to succeed. */
void calls_run(struct subject *s, struct call **calls, int n);
void call_run(struct subject *s, struct call *c);

size_t call_row_bytes(const struct call *c);
/* The bits of row i of a equal those of row j of b. */
bool call_row_equal(const struct call *a, int32_t i, const struct call *b, int32_t j);
float call_value(const struct call *c, int32_t row, size_t column);
/* ‖a - b‖ / ‖b‖ over rows [0, rows) of the result against fp32 values. */
double call_error(const struct call *c, const float *expected);
double call_distance(const struct call *a, const struct call *b);

uint64_t subject_random(uint64_t *seed);

#endif
