/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute boundary: a back end is one `struct kernel_table` of functions over POD structs.
 *
 * This layer owns nothing but streams. All buffers belong to the caller, who allocates them at the sizes
 * given here and keeps them alive until the stream has finished. "Device" pointers are host pointers for the
 * `ref` and `cpu` back ends. Callers have validated everything; kernels trust (debug builds assert).
 * A table is immutable and shared by all threads; a stream belongs to one thread at a time.
 * On the CPU weights want huge pages (madvise(MADV_HUGEPAGE) on 2 MiB aligned memory before it is written): decode runs at the
 * speed of memory, and small pages cost it a fifth; 64-byte alignment is needed for full speed. The bf16 dot product and tile
 * instructions take subnormal numbers for zero.
 *
 * The forward pass of one layer, for a batch of rows that each own some (expert, routing weight) slots
 * (numerics as in the project's promises; `op` is the operand type, bf16 or fp16):
 *
 *     x      = op(hidden)                                            enter
 *     order  = slots sorted by (expert, adapter), stable             route
 *     s_gu   = op(scale * A x), for gate and for up                  shrink_gate_up   (adapted slots only)
 *     g, u   = Wg x + bg [+ Bg s_g],  Wu x + bu [+ Bu s_u]           gate_up
 *     h      = op(act(w g, w u))     w = routing weight if weight_on_input, else 1
 *     s_d    = op(scale * A h)                                       shrink_down      (adapted slots only)
 *     y      = op(Wd h + bd [+ Bd s_d])                              down
 *     out    = round(sum over the row's slots, in slot order, of  routing weight * y)    combine
 *              (weight_on_input: plain sum). Products accumulate in fp32.
 *
 * The weight on the input is applied to the fp32 sums g and u, deltas included: W(w x) = w (W x), and so
 * `hidden` is rounded once, on entry.
 */
#ifndef EXPERTD_KERNELS_KERNELS_H
#define EXPERTD_KERNELS_KERNELS_H

#include "kernels/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kernel_status {
    KERNEL_OK = 0,
    KERNEL_OUT_OF_MEMORY, /* nothing was changed; may succeed later */
    KERNEL_DEVICE_FAILED, /* sticky: the device can't be used again by this process */
};

enum kernel_projection { KERNEL_GATE = 0, KERNEL_UP = 1, KERNEL_DOWN = 2, KERNEL_PROJECTIONS = 3 };

enum kernel_activation {
    KERNEL_ACT_SILU = 0, /* silu(g) * u */
    KERNEL_ACT_GELU = 1, /* g * Phi(g) * u, with erf */
    KERNEL_ACT_GELU_TANH = 2, /* the tanh approximation of gelu */
    KERNEL_ACT_GPT_OSS = 3, /* g = min(g,7), u = clamp(u,+-7): (u+1) * g * sigmoid(1.702 g); clamps keep NaN */
};

enum kernel_path { KERNEL_DECODE = 0, KERNEL_PREFILL = 1, KERNEL_PATHS = 2 };

#define KERNEL_MAX_EXPERTS 1024
#define KERNEL_MAX_RANK 512
#define KERNEL_MAX_WIDTH 65536 /* of hidden and inter */
#define KERNEL_RANK_PAD 8 /* adapter ranks are padded to a multiple of this, with zeros */

/* Sizes of a layer's experts. The padded ones are chosen by kernel_table.dims_init: rows and columns past the
 * true size hold zeros in weights, and zeros in x and h. */
struct kernel_dims {
    int32_t experts; /* held here, 1..KERNEL_MAX_EXPERTS */
    int32_t hidden; /* H */
    int32_t inter; /* I */
    int32_t hidden_pad; /* leading dimension, in elements, of x and y rows */
    int32_t inter_pad; /* leading dimension of h rows */
    enum dtype op; /* DTYPE_BF16 or DTYPE_FP16: weights, x, s, h, y */
};

/* One layer's resident weights. gate_up holds, per expert, both projections in the back end's own layout. */
struct kernel_weights {
    const void *gate_up; /* experts * gate_up_bytes(dims) */
    const void *down; /* experts * down_bytes(dims) */
    const float *gate_bias, *up_bias; /* [experts, inter_pad] or NULL */
    const float *down_bias; /* [experts, hidden_pad] or NULL */
    enum kernel_activation activation;
    bool weight_on_input;
};

/* Where some rows of one projection of one expert lie within that expert's gate_up or down block:
 * `count` pieces of `width` bytes, the first at `offset`, `pitch` bytes apart. */
struct kernel_span {
    size_t offset, width, pitch, count;
};

/* One row of the batch. `in` and `out` are device addresses of H contiguous elements of `dtype`, any alignment.
 * Filler rows (that round a batch up to a captured shape) have slots = 0, adapter = -1, in = out = 0. */
struct kernel_row {
    uint64_t in, out;
    int32_t dtype; /* enum dtype, BF16, FP16 or FP32 */
    int32_t adapter; /* adapter slot, or -1 for the base model */
    int32_t first_slot; /* the row owns slots [first_slot, first_slot + slots), in slot order */
    int32_t slots;
};

/* All arrays in device memory, written by the caller. Slots of row 0 come first, then row 1, ... */
struct kernel_batch {
    int32_t rows; /* T */
    int32_t slots; /* N, the sum of rows' slots */
    const struct kernel_row *row; /* [T] */
    const int32_t *slot_row; /* [N] */
    const int32_t *slot_expert; /* [N] index into the experts held, or -1: contributes nothing */
    const float *slot_weight; /* [N] routing weight */
};

/* Output of route; device memory of the caller. Positions 0..valid-1 list the valid slots (expert >= 0)
 * sorted by (expert, adapter), equal keys in slot order; valid = expert_offset[experts]. */
struct kernel_routing {
    int32_t *order; /* [N] slot at each position */
    int32_t *position; /* [N] position of each slot; -1 where the slot is skipped */
    int32_t *expert_offset; /* [experts + 1] first position of each expert */
    int32_t *segment_count; /* [1] number of (expert, adapter) segments, in order of position */
    int32_t *segment_begin; /* [N + 1] first position of each segment; the entry past the last holds `valid` */
    int32_t *segment_expert; /* [N] */
    int32_t *segment_adapter; /* [N] adapter slot or -1 */
};

/* One projection of one expert of one adapter; a = 0: not adapted.
 * a: op [rank, hidden_pad or inter_pad], from pack_lora_a; b: from pack_lora_b. gate and up may share `a`,
 * and then share scale and rank too. */
struct kernel_lora_entry {
    uint64_t a, b; /* device addresses */
    float scale;
    int32_t rank; /* padded to KERNEL_RANK_PAD */
};

/* A layer's adapters. The table lies at a fixed device address and changes between batches only. */
struct kernel_lora {
    const struct kernel_lora_entry *entry; /* [adapters, experts, KERNEL_PROJECTIONS]; NULL: no row is adapted */
    int32_t adapters; /* adapter slots; a row's slot is below this */
    int32_t max_rank; /* leading dimension of s_gate, s_up, s_down rows; a multiple of KERNEL_RANK_PAD */
};

/* Everything a step reads or writes. Rows of h, y and s_* are indexed by position (after route). */
struct kernel_forward {
    struct kernel_dims dims;
    struct kernel_weights weights;
    struct kernel_batch batch;
    struct kernel_routing routing;
    struct kernel_lora lora;
    enum kernel_path path;
    void *x; /* op [T, hidden_pad] */
    void *h; /* op [N, inter_pad] */
    void *y; /* op [N, hidden_pad] */
    void *s_gate, *s_up, *s_down; /* op [N, max_rank]; unused when lora.entry is NULL */
    void *work; /* work_bytes of the table, for its steps alone; contents need not survive between forwards */
};

struct kernel_stream; /* an execution context of one back end */

/* A back end. Steps may be asynchronous on the stream; `wait` returns when all are done. Errors of asynchronous
 * steps surface at the latest in wait. No step synchronizes with the host, allocates, or depends on timing. */
struct kernel_table {
    const char *name; /* "ref", "cpu-avx512bf16", "cuda-sm90", ... */
    const char *device; /* "cpu" or "cuda" */

    /* Rows up to which mode "auto" takes the decode path. */
    int32_t decode_rows;

    /* Fills the padded sizes from the others. */
    void (*dims_init)(struct kernel_dims *dims);
    size_t (*gate_up_bytes)(const struct kernel_dims *dims); /* one expert; a multiple of 64 */
    size_t (*down_bytes)(const struct kernel_dims *dims);
    size_t (*work_bytes)(const struct kernel_dims *dims, int32_t max_rows, int32_t max_slots, int32_t max_rank);

    /* Packing, on any host thread, into host memory. Rows [row0, row0 + rows) of a projection (row = output
     * channel; gate, up: inter rows of hidden columns; down: hidden rows of inter columns). row0 is a multiple of
     * pack_rows, and so is rows unless the range ends at the projection's last row; then the padding rows after it
     * are written as well. `span` says where they belong in the expert's block; `pack` writes span.count pieces
     * of span.width bytes, dst_pitch apart, from row-major op elements, `src_stride` elements from row to row. */
    int32_t pack_rows;
    void (*span)(const struct kernel_dims *dims, enum kernel_projection p, int32_t row0, int32_t rows, struct kernel_span *out);
    void (*pack)(const struct kernel_dims *dims, enum kernel_projection p, int32_t row0, int32_t rows, const void *src, size_t src_stride,
                 void *dst, size_t dst_pitch);

    /* Adapters: `rank` is the true rank; bytes are multiples of 64. A is [rank, in], B is [out, rank], both
     * row-major op elements. */
    size_t (*lora_a_bytes)(const struct kernel_dims *dims, enum kernel_projection p, int32_t rank);
    size_t (*lora_b_bytes)(const struct kernel_dims *dims, enum kernel_projection p, int32_t rank);
    void (*pack_lora_a)(const struct kernel_dims *dims, enum kernel_projection p, int32_t rank, const void *src, void *dst);
    void (*pack_lora_b)(const struct kernel_dims *dims, enum kernel_projection p, int32_t rank, const void *src, void *dst);

    /* The steps, in the order in which the sequence runs them. */
    enum kernel_status (*enter)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*route)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*shrink_gate_up)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*gate_up)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*shrink_down)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*down)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*combine)(struct kernel_stream *stream, const struct kernel_forward *f);
    enum kernel_status (*wait)(struct kernel_stream *stream);
};

/* The scalar reference: literal, slow, one thread; takes a NULL stream. */
const struct kernel_table *kernels_ref(void);

/* The CPU back end. `isa` NULL or "auto" picks the best that this processor has; otherwise a name from
 * kernels_cpu_isa(i). NULL when the name is unknown or the processor lacks it. */
const struct kernel_table *kernels_cpu(const char *isa);
/* Names of all instruction families compiled in, best first: "amx", "avx512bf16", "avx512", "avx2", "generic";
 * NULL past the end. */
const char *kernels_cpu_isa(int i);

/* A thread pool of `threads` (the calling thread is one of them; 0: all cores this process may run on).
 * NULL when threads can't be had. */
struct kernel_stream *kernels_cpu_stream_create(int threads);
void kernels_cpu_stream_destroy(struct kernel_stream *stream); /* NULL is fine */
int kernels_cpu_stream_threads(const struct kernel_stream *stream);
/* Runs fn(arg, i) for i in 0..n-1 on the pool's threads and returns when all are done. For loaders and copies. */
void kernels_cpu_parallel(struct kernel_stream *stream, int n, void (*fn)(void *arg, int i), void *arg);

/* The CUDA back end, for device number `device`. `code` NULL or "auto" picks the best compiled code that the device runs;
 * "sm90" or "portable" forces one. NULL when there is none: `why`, of `why_size` bytes, then says what is missing (the build,
 * a driver, the device, code for it). Loads the code; may take a second. Builds without CUDA link a stub. */
const struct kernel_table *kernels_cuda(const char *code, int device, char *why, size_t why_size);
/* Wraps a cudaStream_t of that device, which stays the caller's. NULL when out of memory. The steps only launch: they can be
 * captured into a graph. */
struct kernel_stream *kernels_cuda_stream_create(int device, void *cuda_stream);
void kernels_cuda_stream_destroy(struct kernel_stream *stream); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
