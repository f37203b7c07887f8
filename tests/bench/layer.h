/* SPDX-License-Identifier: Apache-2.0
 *
 * One layer on a GPU, for measurements: its weights, its adapters, batches drawn for it, and the scalar reference's answer to any of
 * their rows. Everything is made of numbers from fixed seeds. One thread uses it; whatever fails ends the program with a sentence.
 */
#ifndef EXPERTD_TESTS_BENCH_LAYER_H
#define EXPERTD_TESTS_BENCH_LAYER_H

#include "engine/device.h"

#include <cuda_runtime_api.h>

struct shape {
    const char *name;
    int experts, k, hidden, inter;
};

/* Of a known name or E:K:H:I; `text` lives on as the name. */
bool shape_parse(const char *text, struct shape *out);

struct layer {
    struct shape shape;
    const struct kernel_table *table;
    cudaStream_t stream;
    struct kernel_stream *wrapped, *pool;
    struct kernel_dims dims;
    int adapters, rank, most_rows; /* installed; 0: none */
    uint16_t *noise; /* host: every matrix is a piece of it */
    size_t noise_count;
    char *gate_up, *down, *lora; /* device */
    struct kernel_lora_entry *entry; /* host copy; device addresses inside */
    struct kernel_lora_entry *entry_device;
    void *scratch, *lora_scratch;
    struct kernel_forward forward; /* scratch of a server without adapters */
    struct kernel_forward lora_forward; /* scratch and table of one with adapters */
};

/* What a batch is drawn from. */
struct mix {
    int rows;
    int adapters; /* rows draw one of the first so many; 0: base rows */
    int experts; /* slots draw from the first so many; 0: all */
    double skew; /* that share of the slots is expert 0, in a row as often as it comes */
};

struct set {
    struct mix mix;
    struct kernel_batch batch; /* device */
    uint16_t *hidden, *out; /* device, [T, H] */
    struct kernel_row *row; /* host */
    int32_t *expert;
    float *weight;
    int32_t touched, pairs; /* experts; (adapter, expert) */
};

void layer_open(struct layer *l, const char *code); /* the device, its code and streams */
void layer_close(struct layer *l);
void layer_load(struct layer *l, const struct shape *shape, int most_rows);
void layer_install(struct layer *l, int adapters, int rank); /* in place of those installed before; 0: none */
void layer_unload(struct layer *l);

/* Set number `index`. Rows of a set are the same in any longer one of the same number. */
void set_make(const struct layer *l, struct set *set, const struct mix *mix, int index);
void set_drop(struct set *set);
/* A forward of the set on the scratch that it needs. */
struct kernel_forward set_forward(const struct layer *l, const struct set *set, enum kernel_path path);
/* Which path `auto` takes. */
enum kernel_path layer_automatic(const struct layer *l, int rows);

/* Host copies of what the reference takes, row-major: [inter, hidden] for gate and up, [hidden, inter] for down. */
const uint16_t *layer_weights(const struct layer *l, int expert, enum kernel_projection p);
/* Row t by the scalar reference, [H] in bf16; with its adapter if it has one. */
void layer_reference(const struct layer *l, const struct set *set, int t, uint16_t *want);
/* Of the first and the last row of a set that was run, the greater distance from the reference. */
double set_error(const struct layer *l, const struct set *set);
double row_distance(const uint16_t *got, const uint16_t *want, int n); /* relative, infinite for NaN */

void cuda_check(cudaError_t e, const char *what);
void status_check(enum kernel_status s, const char *what);
void *host_alloc(size_t bytes);
void *device_alloc(size_t bytes);
void device_write(void *to, const void *src, size_t bytes); /* it is there when this returns */
void *device_copy(const void *src, size_t bytes);

#endif
