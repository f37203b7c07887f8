/* SPDX-License-Identifier: Apache-2.0
 *
 * route: slots -> positions sorted by (expert, adapter), stable; offsets of experts; segments.
 *
 * Up to CUDA_ROUTE_SMALL slots it is one launch without any exchange between blocks: every warp ranks one slot by counting the
 * smaller keys, and every block builds a bitmap of the keys that occur, from which segment numbers follow. It depends on the batch
 * alone and so runs beside enter, and lets the next launch begin at once: gate_up fills its first stages of weights meanwhile.
 * Above, a counting sort, likewise in one launch beside enter: every block counts all slots by key, and those of the blocks before it
 * by themselves, and puts its own in place. That is work that grows with the square of the slots, but spread over blocks: counting
 * 64 Ki slots costs a block about what two more launches do. Keys are (expert, adapter) while there is room for them, or else
 * experts: then one block an expert sorts its positions by adapter, and a last launch lines the segments up, which takes far longer.
 * No atomic's order decides anything.
 */
#include "kernels/cuda/device.cuh"

#define SMALL_THREADS 256
#define SMALL_ITEMS (SMALL_THREADS / 32)
#define SORT_THREADS 256
#define COUNT_AHEAD 8 /* slots a thread that are on their way at once */
/* The bitmap of small batches: keys beyond this take the other way. */
#define SMALL_KEYS (256 * 1024)
/* Most keys of the counting sort, of which a thread adds up SORT_EACH; in shared memory they take 8 bytes and one more for each of 32 warps:
 * on an H200 there is room for all 5120, which is more than 64 experts have with 64 adapters, on others for fewer, 2483 at the least. */
#define SORT_EACH 5
#define SORT_KEYS (SORT_EACH * CUDA_ROUTE_BLOCK)
#define SORT_KEY_BYTES (8 + 32)
#define SORT_RESERVED 2048 /* of shared memory: what the kernel has without asking, and the system's */

struct route_work {
    int32_t *order; /* [N] sorted by expert alone */
    int32_t *segments; /* [experts] */
    int32_t *begin, *adapter; /* [N] an expert's segments, from its first position on */
};

static struct route_work route_work_at(const struct kernel_forward *f)
{
    struct route_work w;
    w.order = (int32_t *)f->work + TILE_COUNTERS;
    w.segments = w.order + f->batch.slots;
    w.begin = w.segments + f->dims.experts;
    w.adapter = w.begin + f->batch.slots;
    return w;
}

size_t cuda_route_bytes(const struct kernel_dims *dims, int32_t max_slots)
{
    return 4 * (TILE_COUNTERS + (size_t)dims->experts + 3 * (size_t)max_slots);
}

/* ---- small batches ------------------------------------------------------------------------------------- */

/* Keys: expert * (adapters + 1) + adapter + 1; -1 where the slot is skipped. */
__global__ void __launch_bounds__(SMALL_THREADS) route_small_kernel(const __grid_constant__ struct kernel_forward f, int adapters)
{
    extern __shared__ int32_t shared[];
    /* The next launch may begin while enter and this one run: what it reads before its own launch_wait is the batch alone
     * (offsets_fill), or it is shrink, which reads nothing. */
    launch_release();
    const int slots = f.batch.slots, experts = f.dims.experts, per = adapters + 1, words = (experts * per + 31) / 32;
    int32_t *key = shared;
    uint32_t *bitmap = (uint32_t *)shared + (slots + 31) / 32 * 32;
    for (int i = threadIdx.x; i < words; i += SMALL_THREADS)
        bitmap[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += SMALL_THREADS) {
        int expert = f.batch.slot_expert[i], k = -1;
        /* Read by the products and combine, who would wait for memory behind the weights. */
        prefetch_l2(f.batch.slot_row + i);
        prefetch_l2(f.batch.slot_weight + i);
        if (expert >= 0) {
            k = expert * per;
            if (adapters)
                k += f.batch.row[f.batch.slot_row[i]].adapter + 1;
            atomicOr(&bitmap[k / 32], 1u << (k % 32));
        }
        key[i] = k;
    }
    launch_wait();
    tile_counters_clear(f);
    __syncthreads();

    /* Items: the slots, then the experts' offsets and the end of the segments. A warp takes one at a time. */
    const int lane = threadIdx.x % 32;
    for (int item = blockIdx.x * SMALL_ITEMS + threadIdx.x / 32; item < slots + experts + 1; item += gridDim.x * SMALL_ITEMS) {
        int expert = item - slots, mine = item < slots ? key[item] : expert * per;
        if (item < slots && mine < 0) {
            if (lane == 0)
                f.routing.position[item] = -1;
            continue;
        }
        int smaller = 0, before = 0;
        for (int i = lane; i < slots; i += 32) {
            int k = key[i];
            smaller += k >= 0 && k < mine;
            before += k == mine && i < item;
        }
        smaller = __reduce_add_sync(~0u, smaller);
        if (item >= slots) {
            if (lane == 0)
                f.routing.expert_offset[expert] = smaller;
            if (expert < experts)
                continue;
            /* One past the last expert: every key is smaller. */
            int segments = 0;
            for (int i = lane; i < words; i += 32)
                segments += __popc(bitmap[i]);
            segments = __reduce_add_sync(~0u, segments);
            if (lane == 0) {
                *f.routing.segment_count = segments;
                f.routing.segment_begin[segments] = smaller;
            }
            continue;
        }
        before = __reduce_add_sync(~0u, before);
        if (lane == 0) {
            f.routing.position[item] = smaller + before;
            f.routing.order[smaller + before] = item;
        }
        if (before)
            continue;
        int segment = 0;
        for (int i = lane; i <= mine / 32; i += 32)
            segment += __popc(i < mine / 32 ? bitmap[i] : bitmap[i] & ((1u << (mine % 32)) - 1));
        segment = __reduce_add_sync(~0u, segment);
        if (lane == 0) {
            f.routing.segment_begin[segment] = smaller;
            f.routing.segment_expert[segment] = mine / per;
            f.routing.segment_adapter[segment] = mine % per - 1;
        }
    }
}

/* ---- large batches ------------------------------------------------------------------------------------- */

/* expert * per, and the adapter + 1 where keys tell adapters apart; -1 where the slot is skipped. */
__device__ __forceinline__ int slot_key(const struct kernel_forward &f, int slot, int per)
{
    int expert = slot < f.batch.slots ? f.batch.slot_expert[slot] : -1;
    if (expert < 0 || per == 1)
        return expert;
    return expert * per + f.batch.row[f.batch.slot_row[slot]].adapter + 1;
}

/* Exclusive sum over a block of 1024 threads; *total gets the whole. */
__device__ __forceinline__ int block_scan(int value, int *total)
{
    __shared__ int warp_sum[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, inclusive = warp_sum_inclusive(value, lane);
    __syncthreads();
    if (lane == 31)
        warp_sum[warp] = inclusive;
    __syncthreads();
    int before = 0, sum = 0;
    for (int i = 0; i < 32; i++) {
        before += i < warp ? warp_sum[i] : 0;
        sum += warp_sum[i];
    }
    *total = sum;
    return before + inclusive - value;
}

/* A block puts CUDA_ROUTE_BLOCK slots in place. `segments_too`: a key is a segment. */
__global__ void __launch_bounds__(CUDA_ROUTE_BLOCK)
    sort_kernel(const __grid_constant__ struct kernel_forward f, int per, bool segments_too, int32_t *order)
{
    extern __shared__ int32_t shared[];
    launch_release(); /* as in route_small_kernel */
    const int slots = f.batch.slots, experts = f.dims.experts, keys = experts * per, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t *base = shared,
            *before = shared + keys; /* slots of each key from this block's on, and of blocks before; then first positions */
    uint8_t *warp_count = (uint8_t *)(before + keys); /* [32 warps, keys] of this block */
    for (int i = threadIdx.x; i < keys * (SORT_KEY_BYTES / 4); i += CUDA_ROUTE_BLOCK)
        shared[i] = 0;
    const int slot = blockIdx.x * CUDA_ROUTE_BLOCK + threadIdx.x, mine = slot_key(f, slot, per);
    __syncthreads();
    const unsigned same = __match_any_sync(~0u, mine);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (mine >= 0 && rank == 0)
        warp_count[warp * keys + mine] = (uint8_t)__popc(same);
    for (int first = 0; first < slots; first += COUNT_AHEAD * CUDA_ROUTE_BLOCK) {
        int key[COUNT_AHEAD];
#pragma unroll
        for (int i = 0; i < COUNT_AHEAD; i++)
            key[i] = slot_key(f, first + i * CUDA_ROUTE_BLOCK + threadIdx.x, per);
#pragma unroll
        for (int i = 0; i < COUNT_AHEAD; i++)
            if (key[i] >= 0)
                atomicAdd(&shared[first / CUDA_ROUTE_BLOCK + i < (int)blockIdx.x ? keys + key[i] : key[i]], 1);
    }
    __syncthreads();
    const int k = SORT_EACH * threadIdx.x;
    int count[SORT_EACH] = {}, sum = 0, used = 0, total, segments;
#pragma unroll
    for (int i = 0; i < SORT_EACH; i++) {
        if (k + i < keys)
            count[i] = base[k + i] + before[k + i];
        sum += count[i];
        used += count[i] > 0;
    }
    int offset = block_scan(sum, &total), segment = block_scan(used, &segments);
    launch_wait();
    tile_counters_clear(f);
    const bool says = blockIdx.x == 0;
#pragma unroll
    for (int i = 0; i < SORT_EACH; i++) {
        const int key = k + i;
        if (key < keys)
            base[key] = offset;
        if (says && key < keys && key % per == 0)
            f.routing.expert_offset[key / per] = offset;
        if (says && segments_too && count[i] > 0) {
            f.routing.segment_begin[segment] = offset;
            f.routing.segment_expert[segment] = key / per;
            f.routing.segment_adapter[segment] = key % per - 1;
            segment++;
        }
        offset += count[i];
    }
    if (says && threadIdx.x == 0) {
        f.routing.expert_offset[experts] = total;
        if (segments_too) {
            f.routing.segment_begin[segments] = total;
            *f.routing.segment_count = segments;
        }
    }
    __syncthreads();
    if (mine >= 0) {
        int position = base[mine] + before[mine] + rank;
        for (int i = 0; i < warp; i++)
            position += warp_count[i * keys + mine];
        order[position] = slot;
        f.routing.position[slot] = position;
    } else if (slot < slots) {
        f.routing.position[slot] = -1;
    }
}

/* One block an expert: sorts its positions by adapter, in tiles of a slot a thread. */
__global__ void __launch_bounds__(SORT_THREADS)
    adapter_sort_kernel(const __grid_constant__ struct kernel_forward f, struct route_work w, int adapters)
{
    extern __shared__ int32_t shared[]; /* [adapters + 1] next position of each */
    __shared__ int tile[SORT_THREADS];
    __shared__ int warp_sum[SORT_THREADS / 32], warp_used[SORT_THREADS / 32];
    launch_begin();
    const int e = blockIdx.x, begin = f.routing.expert_offset[e], end = f.routing.expert_offset[e + 1], bins = adapters + 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int b = threadIdx.x; b < bins; b += SORT_THREADS)
        shared[b] = 0;
    __syncthreads();
    for (int p = begin + threadIdx.x; p < end; p += SORT_THREADS)
        atomicAdd(&shared[f.batch.row[f.batch.slot_row[w.order[p]]].adapter + 1], 1);
    __syncthreads();
    int position = begin, segments = 0;
    for (int b0 = 0; b0 < bins; b0 += SORT_THREADS) {
        int b = b0 + threadIdx.x, count = b < bins ? shared[b] : 0;
        const unsigned used = __ballot_sync(~0u, count > 0);
        const int sum = warp_sum_inclusive(count, lane);
        if (lane == 31)
            warp_sum[warp] = sum, warp_used[warp] = __popc(used);
        __syncthreads();
        int at = position + sum - count, segment = segments + __popc(used & ((1u << lane) - 1));
        for (int i = 0; i < SORT_THREADS / 32; i++) {
            at += i < warp ? warp_sum[i] : 0;
            segment += i < warp ? warp_used[i] : 0;
            position += warp_sum[i];
            segments += warp_used[i];
        }
        if (b < bins)
            shared[b] = at;
        if (count > 0) {
            w.begin[begin + segment] = at;
            w.adapter[begin + segment] = b - 1;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        w.segments[e] = segments;
    for (int p0 = begin; p0 < end; p0 += SORT_THREADS) {
        int p = p0 + threadIdx.x, slot = p < end ? w.order[p] : -1, bin = p < end ? f.batch.row[f.batch.slot_row[slot]].adapter + 1 : -1;
        tile[threadIdx.x] = bin;
        __syncthreads();
        int rank = 0, after = 0;
        for (int i = 0; i < SORT_THREADS; i++) {
            rank += tile[i] == bin && i < (int)threadIdx.x;
            after += tile[i] == bin && i > (int)threadIdx.x;
        }
        int at = p < end ? shared[bin] + rank : 0;
        if (p < end) {
            f.routing.order[at] = slot;
            f.routing.position[slot] = at;
        }
        __syncthreads();
        if (p < end && after == 0)
            shared[bin] = at + 1;
        __syncthreads();
    }
}

/* One block an expert: where its segments go among all. */
__global__ void __launch_bounds__(1024) segment_kernel(const __grid_constant__ struct kernel_forward f, struct route_work w)
{
    launch_begin();
    const int experts = f.dims.experts, e = blockIdx.x;
    int first, all;
    block_scan((int)threadIdx.x < e ? w.segments[threadIdx.x] : 0, &first);
    block_scan((int)threadIdx.x < experts ? w.segments[threadIdx.x] : 0, &all);
    int begin = f.routing.expert_offset[e];
    for (int i = threadIdx.x; i < w.segments[e]; i += 1024) {
        f.routing.segment_begin[first + i] = w.begin[begin + i];
        f.routing.segment_expert[first + i] = e;
        f.routing.segment_adapter[first + i] = w.adapter[begin + i];
    }
    if (e == 0 && threadIdx.x == 0) {
        *f.routing.segment_count = all;
        f.routing.segment_begin[all] = f.routing.expert_offset[experts];
    }
}

/* ---- launches ------------------------------------------------------------------------------------------ */

/* Keys that there is room for, in `shared` bytes that a block may have. */
static int sort_keys(int shared)
{
    const int room = (shared - SORT_RESERVED) / SORT_KEY_BYTES;
    return room < SORT_KEYS ? room : SORT_KEYS;
}

cudaError_t cuda_route(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const int slots = f->batch.slots, experts = f->dims.experts, adapters = f->lora.entry ? f->lora.adapters : 0;
    const int64_t keys = (int64_t)experts * (adapters + 1);
    if (slots <= CUDA_ROUTE_SMALL && keys <= SMALL_KEYS) {
        int items = slots + experts + 1, blocks = (items + SMALL_ITEMS - 1) / SMALL_ITEMS;
        size_t bytes = 4 * ((size_t)(slots + 31) / 32 * 32 + (size_t)(keys + 31) / 32);
        return launch(stream, route_small_kernel, dim3(blocks < 2 * stream->processors ? blocks : 2 * stream->processors),
                      dim3(SMALL_THREADS), bytes, *f, adapters);
    }
    struct route_work w = route_work_at(f);
    const bool once = keys <= sort_keys(stream->shared_bytes);
    const int blocks = (slots + CUDA_ROUTE_BLOCK - 1) / CUDA_ROUTE_BLOCK, per = once ? adapters + 1 : 1;
    cudaError_t e = launch(stream, sort_kernel, dim3(blocks), dim3(CUDA_ROUTE_BLOCK), SORT_KEY_BYTES * (size_t)(experts * per), *f, per,
                           once, once ? f->routing.order : w.order);
    if (e == cudaSuccess && !once)
        e = launch(stream, adapter_sort_kernel, dim3(experts), dim3(SORT_THREADS), 4 * ((size_t)adapters + 1), *f, w, adapters);
    if (e == cudaSuccess && !once)
        e = launch(stream, segment_kernel, dim3(experts), dim3(1024), 0, *f, w);
    return e;
}

cudaError_t cuda_load_route(void)
{
    int device, shared = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess)
        e = load(route_small_kernel, 4 * (CUDA_ROUTE_SMALL + SMALL_KEYS / 32));
    if (e == cudaSuccess)
        e = load(sort_kernel, SORT_KEY_BYTES * (size_t)sort_keys(shared));
    if (e == cudaSuccess)
        e = load(adapter_sort_kernel, 0);
    return e == cudaSuccess ? load(segment_kernel, 0) : e;
}
