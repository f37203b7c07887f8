/* SPDX-License-Identifier: Apache-2.0
 *
 * Captured forwards. A graph belongs to one layer, path, bucket of rows and of slots, and to batches with or without adapted rows:
 * kernels take the layer's addresses as arguments, in constant memory, which costs them nothing, while a layer read from device
 * memory would put a dependent load before every kernel's first byte, and changing the arguments of captured launches costs the host
 * as much as launching them. So there are more graphs than shapes, but a replay needs nothing from the host but the choice of graph.
 * They are bounded: when all places are taken the graph that has not been used for longest is dropped.
 *
 * Capturing: the forward is launched on a stream that is being captured, for this thread alone ("thread-local"), so that other
 * threads may take memory meanwhile. The launches end up as the nodes of a graph instead of running. The arguments hold addresses
 * that never change while the device lives: scratch, tables, the blob of a batch's arrays, and weights.
 *
 * Owned by the engine thread, except that the count of captures may be read by any.
 */
#include "engine/device_cuda.h"

#include <stdlib.h>
#include <string.h>

enum { HEADS = 8192 };

struct graph {
    uint64_t key;
    struct kernel_weights weights; /* that it was captured with */
    cudaGraphExec_t exec;
    int32_t next; /* with the same head; or of unused places */
    int32_t newer, older; /* by use */
};

struct cuda_graphs {
    cudaStream_t stream; /* for capturing */
    struct kernel_stream *kernel_stream;
    int32_t head[HEADS];
    int32_t unused, newest, oldest;
    int room;
    atomic_uint_fast64_t captures;
    struct graph graph[CUDA_GRAPHS];
};

int32_t cuda_bucket(int32_t n, int32_t most)
{
    int32_t bucket = 1;
    while (bucket < n && bucket < most)
        bucket = bucket < 2 ? 2 : (bucket & (bucket - 1)) == 0 ? bucket + bucket / 2 : bucket / 3 * 4;
    return bucket < most ? bucket : most;
}

struct cuda_graphs *cuda_graphs_create(int device)
{
    struct cuda_graphs *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    memset(g->head, -1, sizeof g->head);
    g->newest = g->oldest = -1;
    for (int32_t i = 0; i < CUDA_GRAPHS; i++)
        g->graph[i].next = i + 1 < CUDA_GRAPHS ? i + 1 : -1;
    g->room = CUDA_GRAPHS;
    if (cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking) == cudaSuccess)
        g->kernel_stream = kernels_cuda_stream_create(device, g->stream);
    if (!g->kernel_stream) {
        (void)cudaGetLastError();
        cuda_graphs_destroy(g);
        return NULL;
    }
    return g;
}

void cuda_graphs_destroy(struct cuda_graphs *g)
{
    if (!g)
        return;
    for (int32_t i = g->newest; i >= 0; i = g->graph[i].older)
        (void)cudaGraphExecDestroy(g->graph[i].exec);
    kernels_cuda_stream_destroy(g->kernel_stream);
    if (g->stream)
        (void)cudaStreamDestroy(g->stream);
    (void)cudaGetLastError();
    free(g);
}

static int32_t *head_of(struct cuda_graphs *g, uint64_t key) { return &g->head[key * UINT64_C(0x9e3779b97f4a7c15) >> 51]; }

static void unlink_use(struct cuda_graphs *g, int32_t i)
{
    struct graph *e = &g->graph[i];
    *(e->newer >= 0 ? &g->graph[e->newer].older : &g->newest) = e->older;
    *(e->older >= 0 ? &g->graph[e->older].newer : &g->oldest) = e->newer;
}

static void link_newest(struct cuda_graphs *g, int32_t i)
{
    struct graph *e = &g->graph[i];
    e->newer = -1;
    e->older = g->newest;
    *(g->newest >= 0 ? &g->graph[g->newest].newer : &g->oldest) = i;
    g->newest = i;
}

/* A graph that is running is freed by the driver when it has ended. */
static void drop(struct cuda_graphs *g, int32_t i)
{
    int32_t *at = head_of(g, g->graph[i].key);
    while (*at != i)
        at = &g->graph[*at].next;
    *at = g->graph[i].next;
    unlink_use(g, i);
    (void)cudaGraphExecDestroy(g->graph[i].exec);
    g->graph[i].next = g->unused;
    g->unused = i;
    g->room++;
}

static bool same_weights(const struct kernel_weights *a, const struct kernel_weights *b)
{
    return a->gate_up == b->gate_up && a->down == b->down && a->gate_bias == b->gate_bias && a->up_bias == b->up_bias &&
           a->down_bias == b->down_bias && a->activation == b->activation && a->weight_on_input == b->weight_on_input;
}

static cudaError_t capture(struct cuda_graphs *g, const struct kernel_table *kernels, const struct kernel_forward *f, cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    cudaError_t e = cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess)
        return e;
    enum kernel_status status = forward_run(kernels, g->kernel_stream, f);
    cudaError_t launch = cudaGetLastError();
    e = cudaStreamEndCapture(g->stream, &graph);
    if (status != KERNEL_OK)
        e = launch != cudaSuccess ? launch : e != cudaSuccess ? e : cudaErrorUnknown;
    if (e == cudaSuccess)
        e = cudaGraphInstantiate(out, graph, 0);
    if (graph)
        (void)cudaGraphDestroy(graph);
    return e;
}

cudaError_t cuda_graphs_find(struct cuda_graphs *g, const struct kernel_table *kernels, int32_t layer_index, const struct kernel_forward *f,
                             cudaGraphExec_t *out)
{
    /* Rows take at most 17 bits, slots 27; layers the rest but two. */
    uint64_t key = (uint64_t)layer_index << 46 | (uint64_t)f->batch.rows << 29 | (uint64_t)f->batch.slots << 2 |
                   (uint64_t)(f->path == KERNEL_PREFILL) << 1 | (f->lora.entry != NULL);
    int32_t i = *head_of(g, key);
    while (i >= 0 && g->graph[i].key != key)
        i = g->graph[i].next;
    if (i >= 0 && same_weights(&g->graph[i].weights, &f->weights)) {
        unlink_use(g, i);
        link_newest(g, i);
        *out = g->graph[i].exec;
        return cudaSuccess;
    }
    if (i >= 0)
        drop(g, i);
    cudaGraphExec_t exec;
    cudaError_t e = capture(g, kernels, f, &exec);
    if (e != cudaSuccess)
        return e;
    if (g->unused < 0)
        drop(g, g->oldest);
    i = g->unused;
    g->unused = g->graph[i].next;
    g->room--;
    int32_t *head = head_of(g, key);
    g->graph[i] = (struct graph){.key = key, .weights = f->weights, .exec = exec, .next = *head};
    *head = i;
    link_newest(g, i);
    atomic_fetch_add_explicit(&g->captures, 1, memory_order_relaxed);
    *out = exec;
    return cudaSuccess;
}

int cuda_graphs_room(const struct cuda_graphs *g) { return g->room; }

uint64_t cuda_graphs_captures(const struct cuda_graphs *g) { return atomic_load_explicit(&g->captures, memory_order_relaxed); }
