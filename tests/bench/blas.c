/* SPDX-License-Identifier: Apache-2.0
 *
 * A layer's products by cuBLAS; see blas.h. cuBLAS counts columns first: what lies row-major as Y [m, n] = X [m, k] * W [n, k]^T is, to
 * it, the product of W^T, which it is told to transpose, and X^T, with the result's leading dimension n.
 */
#include "tests/bench/blas.h"
#include "tests/bench/probe.h"

#include <cublas_v2.h>
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE_BYTES (64 << 20)
#define SLOTS_ROWS 32 /* up to so many rows each slot is a product of its own; more would read weights too often to be of interest */
#define COMPARED_BYTES (16 << 20)

enum { GATE_UP, DOWN, PRODUCTS };

struct blas {
    void *library;
    cublasHandle_t handle;
    cudaStream_t stream;
    void *workspace;
    uint16_t *gate_up, *down; /* device: [E, 2 I, H], [E, H, I] */
    int version;
    __typeof__(&cublasDestroy) destroy;
    __typeof__(&cublasGemmEx) gemm;
    __typeof__(&cublasGemmBatchedEx) gemm_batched;
    __typeof__(&cublasGemmGroupedBatchedEx) gemm_grouped; /* NULL: an older cuBLAS */
};

/* How one set's rows lie: group by group, each the rows of one expert. */
struct plan {
    int groups, positions;
    int *expert, *first, *count; /* [groups] */
    int *n[PRODUCTS], *k[PRODUCTS]; /* [groups], all alike, as the grouped call wants them */
    int32_t *slot; /* [positions], -1: padding */
    uint16_t *x, *h; /* device: [positions, H], [positions, I] */
    void **pointers; /* device: [PRODUCTS][W, X, Y][groups] */
};

struct blas_run {
    struct blas *b;
    enum blas_kind kind;
    int sets, k, hidden, inter, most_groups;
    struct plan plan[MOST_SETS];
    const struct set *set;
    uint16_t *g, *y; /* device: [most positions, 2 I], [most positions, H]; of the set that ran last */
    float *one, *zero; /* [most_groups] */
    int *single; /* [most_groups] of 1 */
    cublasOperation_t *transposed, *straight;
};

const char *blas_kind_name(enum blas_kind kind)
{
    static const char *const name[] = {"plain", "grouped", "pointers"};
    return name[kind];
}

static void *find_library(const char *name, char *why, size_t why_size)
{
    char versioned[32];
    snprintf(versioned, sizeof versioned, "libcublas.so.%d", CUBLAS_VER_MAJOR);
    const char *names[] = {name ? name : versioned, "libcublas.so"};
    for (int i = 0; i < (name ? 1 : 2); i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library)
            return library;
        snprintf(why, why_size, "%s", dlerror());
    }
    return NULL;
}

struct blas *blas_open(const char *library, cudaStream_t stream, char *why, size_t why_size)
{
    void *found = find_library(library, why, why_size);
    if (!found)
        return NULL;
    struct blas *b = calloc(1, sizeof *b);
    if (!b)
        cuda_check(cudaErrorMemoryAllocation, "cuBLAS");
    b->library = found;
    b->stream = stream;
    /* C has no cast from what dlsym gives to a function that is not a warning somewhere. */
    __typeof__(&cublasCreate) create;
    __typeof__(&cublasSetStream) set_stream;
    __typeof__(&cublasSetWorkspace) set_workspace;
    __typeof__(&cublasGetVersion) get_version;
    const struct {
        const char *name;
        void *to;
    } symbol[] = {{"cublasCreate_v2", &create},
                  {"cublasSetStream_v2", &set_stream},
                  {"cublasSetWorkspace_v2", &set_workspace},
                  {"cublasGetVersion_v2", &get_version},
                  {"cublasDestroy_v2", &b->destroy},
                  {"cublasGemmEx", &b->gemm},
                  {"cublasGemmBatchedEx", &b->gemm_batched},
                  {"cublasGemmGroupedBatchedEx", &b->gemm_grouped}};
    for (size_t i = 0; i < sizeof symbol / sizeof symbol[0]; i++) {
        void *address = dlsym(found, symbol[i].name);
        if (!address && i + 1 < sizeof symbol / sizeof symbol[0]) {
            snprintf(why, why_size, "cuBLAS has no %s", symbol[i].name);
            goto fail;
        }
        memcpy(symbol[i].to, &address, sizeof address);
    }
    cublasStatus_t status = create(&b->handle);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_stream(b->handle, stream);
    b->workspace = device_alloc(WORKSPACE_BYTES);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set_workspace(b->handle, b->workspace, WORKSPACE_BYTES);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = get_version(b->handle, &b->version);
    if (status == CUBLAS_STATUS_SUCCESS)
        return b;
    snprintf(why, why_size, "cuBLAS can't start: status %d", (int)status);
fail:
    blas_close(b);
    return NULL;
}

void blas_close(struct blas *b)
{
    if (!b)
        return;
    if (b->handle)
        (void)b->destroy(b->handle);
    cuda_check(cudaFree(b->workspace), "free");
    cuda_check(cudaFree(b->gate_up), "free");
    cuda_check(cudaFree(b->down), "free");
    dlclose(b->library);
    free(b);
}

int blas_version(const struct blas *b) { return b->version; }

void blas_load(struct blas *b, const struct layer *l)
{
    const size_t matrix = (size_t)l->shape.hidden * (size_t)l->shape.inter;
    cuda_check(cudaFree(b->gate_up), "free");
    cuda_check(cudaFree(b->down), "free");
    b->gate_up = device_alloc((size_t)l->shape.experts * 2 * matrix * 2);
    b->down = device_alloc((size_t)l->shape.experts * matrix * 2);
    uint16_t *noise = device_copy(l->noise, l->noise_count * 2);
    for (int e = 0; e < l->shape.experts; e++)
        for (enum kernel_projection p = KERNEL_GATE; p < KERNEL_PROJECTIONS; p++) {
            uint16_t *to = p == KERNEL_DOWN ? b->down + (size_t)e * matrix : b->gate_up + ((size_t)e * 2 + p) * matrix;
            cuda_check(cudaMemcpyAsync(to, noise + (layer_weights(l, e, p) - l->noise), matrix * 2, cudaMemcpyDeviceToDevice, b->stream),
                       "copying weights");
        }
    cuda_check(cudaStreamSynchronize(b->stream), "copying weights");
    cuda_check(cudaFree(noise), "free");
}

/* ---- how rows lie -------------------------------------------------------------------------------------- */

static void plan_alloc(struct plan *p, int groups, int positions)
{
    *p = (struct plan){.groups = groups, .positions = positions};
    p->expert = host_alloc((size_t)groups * sizeof(int));
    p->first = host_alloc((size_t)groups * sizeof(int));
    p->count = host_alloc((size_t)groups * sizeof(int));
    p->slot = host_alloc((size_t)positions * sizeof(int32_t));
}

/* Each slot a group, in order of slots. */
static void plan_slots(struct plan *p, const struct set *set, int slots)
{
    plan_alloc(p, slots, slots);
    for (int i = 0; i < slots; i++) {
        p->expert[i] = set->expert[i];
        p->first[i] = p->slot[i] = i;
        p->count[i] = 1;
    }
}

/* Each touched expert a group; all of them as long as the longest when `padded`. False: padding would be most of it. */
static bool plan_experts(struct plan *p, const struct set *set, int slots, int experts, bool padded)
{
    int *count = calloc((size_t)experts, sizeof *count), longest = 0, group = 0, at = 0;
    if (!count)
        cuda_check(cudaErrorMemoryAllocation, "sorting slots");
    for (int i = 0; i < slots; i++)
        longest = ++count[set->expert[i]] > longest ? count[set->expert[i]] : longest;
    if (padded && (double)longest * set->touched > 4.0 * slots) {
        free(count);
        return false;
    }
    plan_alloc(p, set->touched, padded ? longest * set->touched : slots);
    for (int e = 0; e < experts; e++) {
        if (!count[e])
            continue;
        p->expert[group] = e;
        p->first[group] = at;
        p->count[group] = padded ? longest : count[e];
        for (int i = 0, end = at + p->count[group]; at < end; at++) {
            while (i < slots && set->expert[i] != e)
                i++;
            p->slot[at] = i < slots ? i++ : -1;
        }
        group++;
    }
    free(count);
    return true;
}

/* Rows to their places, numbers where activations would be, and the addresses of every group's three matrices. */
static void plan_finish(struct plan *p, const struct blas_run *r, const struct set *set)
{
    const size_t hidden = (size_t)r->hidden, inter = (size_t)r->inter, positions = (size_t)p->positions;
    int32_t *row = host_alloc(positions * sizeof *row);
    for (size_t i = 0; i < positions; i++)
        row[i] = p->slot[i] < 0 ? -1 : p->slot[i] / r->k;
    int32_t *row_device = device_copy(row, positions * sizeof *row);
    p->x = device_alloc(positions * hidden * 2);
    p->h = device_alloc(positions * inter * 2);
    cuda_check((cudaError_t)probe_gather(p->x, set->hidden, row_device, p->positions, hidden * 2, r->b->stream), "gather");
    for (size_t done = 0, all = positions * inter, most = hidden * inter; done < all; done += most)
        cuda_check(
            cudaMemcpyAsync(p->h + done, r->b->down, (all - done < most ? all - done : most) * 2, cudaMemcpyDeviceToDevice, r->b->stream),
            "activations");
    void **pointers = host_alloc((size_t)PRODUCTS * 3 * (size_t)p->groups * sizeof *pointers), **to = pointers;
    for (int product = 0; product < PRODUCTS; product++) {
        const size_t n = product == DOWN ? hidden : 2 * inter, k = product == DOWN ? inter : hidden;
        p->n[product] = host_alloc((size_t)p->groups * sizeof(int));
        p->k[product] = host_alloc((size_t)p->groups * sizeof(int));
        for (int i = 0; i < p->groups; i++, to++) {
            to[0] = (product == DOWN ? r->b->down : r->b->gate_up) + (size_t)p->expert[i] * n * k;
            to[p->groups] = (product == DOWN ? p->h : p->x) + (size_t)p->first[i] * k;
            to[2 * p->groups] = (product == DOWN ? r->y : r->g) + (size_t)p->first[i] * n;
            p->n[product][i] = (int)n;
            p->k[product][i] = (int)k;
        }
        to += 2 * p->groups;
    }
    p->pointers = device_copy(pointers, (size_t)PRODUCTS * 3 * (size_t)p->groups * sizeof *pointers);
    cuda_check(cudaStreamSynchronize(r->b->stream), "gather");
    cuda_check(cudaFree(row_device), "free");
    free(pointers);
    free(row);
}

static void plan_drop(struct plan *p)
{
    void *host[] = {p->expert, p->first, p->count, p->slot, p->n[0], p->n[1], p->k[0], p->k[1]}, *device[] = {p->x, p->h, p->pointers};
    for (size_t i = 0; i < sizeof host / sizeof host[0]; i++)
        free(host[i]);
    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        cuda_check(cudaFree(device[i]), "free");
}

struct blas_run *blas_run_create(struct blas *b, const struct layer *l, enum blas_kind kind, const struct set *set, int sets, char *why,
                                 size_t why_size)
{
    if (kind == BLAS_GROUPED && !b->gemm_grouped) {
        snprintf(why, why_size, "this cuBLAS has no cublasGemmGroupedBatchedEx");
        return NULL;
    }
    if (l->shape.hidden % 8 || l->shape.inter % 8) {
        snprintf(why, why_size, "rows are no multiples of 16 bytes");
        return NULL;
    }
    struct blas_run *r = calloc(1, sizeof *r);
    if (!r)
        cuda_check(cudaErrorMemoryAllocation, "cuBLAS");
    *r = (struct blas_run){
        .b = b, .kind = kind, .sets = sets, .k = l->shape.k, .hidden = l->shape.hidden, .inter = l->shape.inter, .set = set};
    size_t positions = 0;
    for (int i = 0; i < sets; i++) {
        const int slots = set[i].mix.rows * r->k;
        if (kind == BLAS_POINTERS && set[i].mix.rows <= SLOTS_ROWS) {
            plan_slots(&r->plan[i], &set[i], slots);
        } else if (!plan_experts(&r->plan[i], &set[i], slots, l->shape.experts, kind == BLAS_POINTERS)) {
            snprintf(why, why_size, "equal counts would be padding for the most part");
            blas_run_destroy(r);
            return NULL;
        }
        positions = (size_t)r->plan[i].positions > positions ? (size_t)r->plan[i].positions : positions;
        r->most_groups = r->plan[i].groups > r->most_groups ? r->plan[i].groups : r->most_groups;
    }
    r->g = device_alloc(positions * 2 * (size_t)r->inter * 2);
    r->y = device_alloc(positions * (size_t)r->hidden * 2);
    r->one = host_alloc((size_t)r->most_groups * sizeof *r->one);
    r->zero = host_alloc((size_t)r->most_groups * sizeof *r->zero);
    r->single = host_alloc((size_t)r->most_groups * sizeof *r->single);
    r->transposed = host_alloc((size_t)r->most_groups * sizeof *r->transposed);
    r->straight = host_alloc((size_t)r->most_groups * sizeof *r->straight);
    for (int i = 0; i < r->most_groups; i++) {
        r->one[i] = 1;
        r->zero[i] = 0;
        r->single[i] = 1;
        r->transposed[i] = CUBLAS_OP_T;
        r->straight[i] = CUBLAS_OP_N;
    }
    for (int i = 0; i < sets; i++)
        plan_finish(&r->plan[i], r, &set[i]);
    return r;
}

void blas_run_destroy(struct blas_run *r)
{
    if (!r)
        return;
    for (int i = 0; i < r->sets; i++)
        plan_drop(&r->plan[i]);
    cuda_check(cudaFree(r->g), "free");
    cuda_check(cudaFree(r->y), "free");
    free(r->one);
    free(r->zero);
    free(r->single);
    free(r->transposed);
    free(r->straight);
    free(r);
}

/* ---- the products -------------------------------------------------------------------------------------- */

static cublasStatus_t launch_product(const struct blas_run *r, const struct plan *p, int product)
{
    const struct blas *b = r->b;
    const int n = p->n[product][0], k = p->k[product][0];
    void **w = p->pointers + (size_t)product * 3 * (size_t)p->groups, **x = w + p->groups, **y = x + p->groups;
    if (r->kind == BLAS_GROUPED)
        return b->gemm_grouped(b->handle, r->transposed, r->straight, p->n[product], p->count, p->k[product], r->one,
                               (const void *const *)w, CUDA_R_16BF, p->k[product], (const void *const *)x, CUDA_R_16BF, p->k[product],
                               r->zero, y, CUDA_R_16BF, p->n[product], p->groups, r->single, CUBLAS_COMPUTE_32F);
    if (r->kind == BLAS_POINTERS)
        return b->gemm_batched(b->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, p->count[0], k, r->one, (const void *const *)w, CUDA_R_16BF, k,
                               (const void *const *)x, CUDA_R_16BF, k, r->zero, y, CUDA_R_16BF, n, p->groups, CUBLAS_COMPUTE_32F,
                               CUBLAS_GEMM_DEFAULT);
    const uint16_t *weights = product == DOWN ? b->down : b->gate_up, *rows = product == DOWN ? p->h : p->x;
    uint16_t *out = product == DOWN ? r->y : r->g;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < p->groups && status == CUBLAS_STATUS_SUCCESS; i++)
        status =
            b->gemm(b->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, p->count[i], k, r->one, weights + (size_t)p->expert[i] * (size_t)n * (size_t)k,
                    CUDA_R_16BF, k, rows + (size_t)p->first[i] * (size_t)k, CUDA_R_16BF, k, r->zero, out + (size_t)p->first[i] * (size_t)n,
                    CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status;
}

static cublasStatus_t launch_sets(const struct blas_run *r, bool down_too)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < r->sets && status == CUBLAS_STATUS_SUCCESS; i++) {
        status = launch_product(r, &r->plan[i], GATE_UP);
        if (down_too && status == CUBLAS_STATUS_SUCCESS)
            status = launch_product(r, &r->plan[i], DOWN);
    }
    return status;
}

bool blas_run_row(struct blas_run *r, const struct layer *l, int t, uint16_t *out, char *why, size_t why_size)
{
    const struct plan *p = &r->plan[0];
    const size_t hidden = (size_t)r->hidden, inter = (size_t)r->inter;
    uint16_t *row = host_alloc((hidden > 2 * inter ? hidden : 2 * inter) * 2);
    float *sum = calloc(hidden, sizeof *sum);
    size_t *at = host_alloc((size_t)r->k * sizeof *at);
    if (!sum)
        cuda_check(cudaErrorMemoryAllocation, "cuBLAS");
    for (int i = 0; i < p->positions; i++)
        if (p->slot[i] >= 0 && p->slot[i] / r->k == t)
            at[p->slot[i] % r->k] = (size_t)i;
    cublasStatus_t status = launch_product(r, p, GATE_UP);
    cudaError_t e = cudaStreamSynchronize(r->b->stream);
    for (int s = 0; s < r->k && status == CUBLAS_STATUS_SUCCESS && e == cudaSuccess; s++) {
        e = cudaMemcpy(row, r->g + at[s] * 2 * inter, 2 * inter * 2, cudaMemcpyDeviceToHost);
        for (size_t i = 0; i < inter; i++) {
            float gate = dtype_bf16_to_f32(row[i]), up = dtype_bf16_to_f32(row[inter + i]);
            row[i] = dtype_f32_to_bf16(gate / (1 + expf(-gate)) * up);
        }
        device_write(p->h + at[s] * inter, row, inter * 2);
    }
    if (status == CUBLAS_STATUS_SUCCESS)
        status = launch_product(r, p, DOWN);
    cudaError_t last = cudaStreamSynchronize(r->b->stream);
    e = e == cudaSuccess ? last : e;
    for (int s = 0; s < r->k && status == CUBLAS_STATUS_SUCCESS && e == cudaSuccess; s++) {
        e = cudaMemcpy(row, r->y + at[s] * hidden, hidden * 2, cudaMemcpyDeviceToHost);
        for (size_t i = 0; i < hidden; i++)
            sum[i] += r->set[0].weight[t * r->k + s] * dtype_bf16_to_f32(row[i]);
    }
    for (size_t i = 0; i < hidden; i++)
        out[i] = dtype_f32_to_bf16(sum[i]);
    if (status != CUBLAS_STATUS_SUCCESS)
        snprintf(why, why_size, "refused: cublasStatus_t %d", (int)status);
    else
        cuda_check(e, "a product by cuBLAS");
    free(row);
    free(sum);
    free(at);
    return status == CUBLAS_STATUS_SUCCESS;
}

static void launch_both(void *arg)
{
    if (launch_sets(arg, true) != CUBLAS_STATUS_SUCCESS)
        cuda_check(cudaErrorUnknown, "a product by cuBLAS");
}

static void launch_gate_up(void *arg)
{
    if (launch_sets(arg, false) != CUBLAS_STATUS_SUCCESS)
        cuda_check(cudaErrorUnknown, "a product by cuBLAS");
}

static cudaGraphExec_t capture(const struct blas_run *r, bool down_too)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    if (cudaStreamBeginCapture(r->b->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
        return NULL;
    cublasStatus_t status = launch_sets(r, down_too);
    cudaError_t e = cudaStreamEndCapture(r->b->stream, &graph);
    if (status == CUBLAS_STATUS_SUCCESS && e == cudaSuccess && cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess)
        exec = NULL;
    if (graph)
        (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    return exec;
}

/* The last set's result, as far as it is compared, after its memory was poisoned and everything ran. */
static void result_of(const struct blas_run *r, const struct contender *c, uint16_t *from, uint16_t *to, size_t bytes)
{
    cuda_check(cudaMemsetAsync(from, 0xff, bytes, r->b->stream), "poison");
    if (c->exec)
        cuda_check(cudaGraphLaunch(c->exec, r->b->stream), "replay");
    else
        c->launch(c->arg);
    cuda_check(cudaStreamSynchronize(r->b->stream), "a product by cuBLAS");
    cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "download");
}

struct contender blas_run_contender(struct blas_run *r, bool down_too)
{
    const struct plan *last = &r->plan[r->sets - 1];
    size_t bytes = (size_t)last->positions * (size_t)last->n[down_too ? DOWN : GATE_UP][0] * 2;
    bytes = bytes < COMPARED_BYTES ? bytes : COMPARED_BYTES;
    uint16_t *eager = host_alloc(bytes), *replayed = host_alloc(bytes), *from = down_too ? r->y : r->g;
    struct contender c = {.launch = down_too ? launch_both : launch_gate_up, .arg = r, .sets = r->sets};
    result_of(r, &c, from, eager, bytes);
    c.exec = capture(r, down_too);
    if (c.exec) {
        result_of(r, &c, from, replayed, bytes);
        if (memcmp(eager, replayed, bytes))
            contender_drop(&c);
    }
    free(eager);
    free(replayed);
    return c;
}

double blas_dense_rate(struct blas *b, int n)
{
    enum { ROUNDS = 12, WARM = 3 };
    const size_t bytes = (size_t)n * (size_t)n * 2;
    char *m = device_alloc(3 * bytes);
    float one = 1, zero = 0, took;
    cudaEvent_t begin, end;
    cuda_check(cudaEventCreate(&begin), "event");
    cuda_check(cudaEventCreate(&end), "event");
    /* Numbers as weights have them, of both signs: what is multiplied decides on power and so on the clock. */
    uint16_t *piece = host_alloc(bytes);
    uint64_t seed = 7;
    for (size_t i = 0; i < bytes / 2; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        piece[i] = dtype_f32_to_bf16(((float)(seed >> 40) * 0x1p-24f - 0.5f) * 0.1f);
    }
    device_write(m, piece, bytes);
    device_write(m + bytes, piece, bytes);
    double total = 0;
    bool good = true;
    for (int i = 0; i < WARM + ROUNDS && good; i++) {
        cuda_check(cudaEventRecord(begin, b->stream), "event");
        good = b->gemm(b->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, m, CUDA_R_16BF, n, m + bytes, CUDA_R_16BF, n, &zero,
                       m + 2 * bytes, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS;
        cuda_check(cudaEventRecord(end, b->stream), "event");
        cuda_check(cudaEventSynchronize(end), "a product by cuBLAS");
        cuda_check(cudaEventElapsedTime(&took, begin, end), "event");
        if (i >= WARM)
            total += (double)took;
    }
    cuda_check(cudaEventDestroy(begin), "event");
    cuda_check(cudaEventDestroy(end), "event");
    cuda_check(cudaFree(m), "free");
    free(piece);
    return good ? 2.0 * n * n * (double)n / (total / ROUNDS) * 1e3 : 0;
}
