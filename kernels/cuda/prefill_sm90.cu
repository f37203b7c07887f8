/* SPDX-License-Identifier: Apache-2.0
 *
 * The two products for many rows an expert, for Hopper: wgmma with the weights as the M operand and up to 256 positions as N, so
 * that N can follow the number of rows in steps of 16 or 32 while weights come in whole groups.
 *
 * Activations with a sigmoid only: models with the others take the portable product.
 *
 * A block is one producer warpgroup and two consumers. The producers stream stages of 64 columns: weights by bulk copies, which are
 * swizzled at load, rows of x gathered by cp.async. A tile is 128 weight rows by up to 256 positions (a consumer holds 64 x N), or,
 * where at most 144 positions come together, 256 weight rows (a consumer holds 2 x 64 x N), which halves how often x is read. A grid of one
 * block a multiprocessor walks over the tiles; the stages run on from tile to tile. Whoever is done takes the next tile, which the
 * producers have asked for meanwhile. Every output element is one chain of
 * instructions over k, then the adapters' planes (lora_sm90.cuh), whatever the tile's shape.
 *
 * What counted, in time of 8192 rows of 64 experts, H 2048, I 1024: copies of whole strips instead of groups, sources of copies in
 * registers and an epilogue without branches, together 2812 -> 1598 us; 8-byte stores of down, 1509; tiles dealt out as blocks
 * get free, N in steps of 16 above 144, 1531 -> 1464 (2048 rows: 485 -> 453); wide tiles up to 144 positions instead of 128, 2048 rows
 * 447 -> 398; chunks of positions side by side (TILES_TOGETHER), 8192 rows of mixtral's shape 10.9 -> 10.2 ms. What didn't: arrivals by
 * cp.async itself instead of wait and fence; N in steps of 16 for wide tiles; finer tiles for the last experts, whose 64 KiB under way a
 * block are too few.
 *
 * The consumers' loops over k stay rolled: unrolled by four, as the compiler would, they are four times the code for nothing. And no
 * row of a tile is compared by its number where that could be told ahead: the compiler then keeps all the numbers in registers, through
 * the whole kernel, and has none left to have more than one load of a fold under way.
 */
#include "kernels/cuda/lora_sm90.cuh"
#include "kernels/cuda/wgmma.cuh"

#define PRODUCERS 128
#define HOPPER_THREADS 384
#define STAGES 4
#define STAGE_BYTES (50 * 1024) /* weights: 32 KiB of a wide tile, 16 of others; then rows of x */
/* The first thread of the warp of producers that says which tile is next and lists a tile's runs of adapters, while the others go on. In two
 * parts, LIST_EACH blocks apart, so that neither takes longer than the ring is deep. */
#define LISTER 96
#define LIST_EACH STAGES
#define MOST_N 256
#define WIDE_N 144 /* up to here tiles have 256 weight rows */
#define TILES_AHEAD 8
#define TILES_TOGETHER 128

struct hopper_tile {
    int expert; /* -1: there are no more */
    int group, groups, begin, count;
    bool wide;
};

/* The tail of shared memory, after the stages. */
struct hopper_shared {
    uint64_t full[STAGES], empty[STAGES];
    struct lora_stage lora[STAGES]; /* what adapters' stages hold */
    struct lora_run run[2][MOST_N]; /* of a tile; of those the producers are at, and the next */
    struct lora_segments look; /* of the tile's expert, for the lister */
    int segments; /* of all experts */
    int runs[TILES_AHEAD], most[2]; /* how many; their largest rank */
    struct hopper_tile tile[TILES_AHEAD]; /* the block's, one after the other */
    int offset[KERNEL_MAX_EXPERTS + 1], first[KERNEL_MAX_EXPERTS + 1], segment[KERNEL_MAX_EXPERTS];
};

__device__ __forceinline__ int hopper_chunks(int count) { return (count + MOST_N - 1) / MOST_N; }

/* Positions of a chunk, of an expert with so many; the last has the rest. */
__device__ __forceinline__ int hopper_rows(int count, int chunks) { return ((count + chunks - 1) / chunks + 15) / 16 * 16; }

__device__ __forceinline__ int hopper_units(int count, int groups)
{
    const int chunks = hopper_chunks(count), each = chunks == 0 || hopper_rows(count, chunks) <= WIDE_N ? 16 : 8;
    return chunks * ((groups + each - 1) / each);
}

/* Like chunks_scan, over tiles. */
__device__ __forceinline__ void hopper_scan(struct hopper_shared *s, int experts, int groups)
{
    if (threadIdx.x < 32) {
        int each = (experts + 31) / 32, begin = min((int)threadIdx.x * each, experts), end = min(begin + each, experts), sum = 0;
        for (int e = begin; e < end; e++)
            sum += hopper_units(s->offset[e + 1] - s->offset[e], groups);
        const int inclusive = warp_sum_inclusive(sum, threadIdx.x);
        int running = inclusive - sum;
        for (int e = begin; e < end; e++) {
            s->first[e] = running;
            running += hopper_units(s->offset[e + 1] - s->offset[e], groups);
        }
        if (threadIdx.x == 31)
            s->first[experts] = inclusive;
    }
    __syncthreads();
}

/* Tile number `tile` of all. What is under way at one time, about as many tiles as there are blocks, is to share weights and rows in
 * the second-level cache: so many row tiles as give TILES_TOGETHER with all chunks of positions come before the next row tiles do,
 * chunk by chunk. */
__device__ __forceinline__ struct hopper_tile hopper_tile_at(const struct hopper_shared *s, int experts, int groups, int tile)
{
    struct hopper_tile t;
    t.expert = -1;
    if (tile >= s->first[experts])
        return t;
    t.expert = chunks_find(s->first, experts, tile);
    int all = s->offset[t.expert + 1] - s->offset[t.expert], chunks = hopper_chunks(all);
    const int rows = hopper_rows(all, chunks);
    t.wide = rows <= WIDE_N;
    int each = t.wide ? 16 : 8, row_tiles = (groups + each - 1) / each, local = tile - s->first[t.expert];
    int together = max(1, TILES_TOGETHER / chunks), before = local / (together * chunks) * together;
    local -= before * chunks;
    together = min(together, row_tiles - before);
    int chunk = local / together;
    t.group = (before + local - chunk * together) * each;
    t.groups = min(each, groups - t.group);
    t.begin = s->offset[t.expert] + chunk * rows;
    t.count = max(0, min(rows, all - chunk * rows));
    return t;
}

/* ---- producers ----------------------------------------------------------------------------------------- */

__device__ __forceinline__ const uint8_t *hopper_weights(const uint8_t *weights, const struct hopper_tile &t, int groups, int blocks)
{
    return weights + ((size_t)t.expert * groups + t.group) * blocks * CUDA_BLOCK_BYTES;
}

/* Starts the copies of block k of a tile's weights into a stage; by one thread. */
__device__ __forceinline__ void hopper_copy_weights(uint32_t at, uint32_t full, const uint8_t *w, int groups, int blocks, int k)
{
    barrier_expect(full, groups * CUDA_BLOCK_BYTES);
    for (int i = 0; i < groups / CUDA_STRIP_GROUPS; i++)
        bulk_copy(at + i * CUDA_STRIP_BYTES, w + ((size_t)i * blocks + k) * CUDA_STRIP_BYTES, CUDA_STRIP_BYTES, full);
}

/* Blocks of the first tile whose weights are on their way before all else. Not a tile's last: consumers who have met the arrival for it
 * go on to the next tile and to the list of this one's runs, which are not there yet. */
__device__ __forceinline__ int hopper_ahead(int blocks) { return min(STAGES, blocks - 1); }

/* Weights depend on no launch before: those of the first stages are on their way while routing and x are still being written. */
__device__ __forceinline__ void hopper_copy_ahead(const uint8_t *weights, const struct hopper_shared *s, const struct hopper_tile &t,
                                                  uint32_t ring, int groups, int blocks)
{
    for (int k = 0; k < hopper_ahead(blocks); k++)
        hopper_copy_weights(ring + k * STAGE_BYTES, smem_address(&s->full[k]), hopper_weights(weights, t, groups, blocks), t.groups, blocks,
                            k);
}

/* The lister's second part. There are two lists: that of the tile before is another, and the one before that, which this takes the place of,
 * was last read ahead of the barrier behind which that tile's list was. */
template <bool DOWN>
__device__ __forceinline__ void hopper_list(const struct kernel_forward &f, struct hopper_shared *s, const struct hopper_tile &t,
                                            int number)
{
    int most;
    const int runs = lora_list<DOWN>(f, s->segment[t.expert], s->segments, &s->look, t.expert, t.begin, t.count, s->run[number % 2], &most);
    if (threadIdx.x == LISTER) {
        s->runs[number % TILES_AHEAD] = runs;
        s->most[number % 2] = most;
    }
}

template <typename OP, bool DOWN, bool LORA>
__device__ __forceinline__ void hopper_produce(const struct kernel_forward &f, uint8_t *stages, struct hopper_shared *s, int groups,
                                               int blocks)
{
    const int experts = f.dims.experts, chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;
    const uint32_t ldx = (uint32_t)blocks * 8; /* a row of x in chunks of 16 bytes */
    const uint32_t put = row0 * 128 + ((chunk ^ (row0 & 7)) * 16), ring = smem_address(stages);
    const uint8_t *x = (const uint8_t *)(DOWN ? f.h : f.x) + chunk * 16,
                  *weights = (const uint8_t *)(DOWN ? f.weights.down : f.weights.gate_up);
    uint32_t turn = 0;
    for (int number = 0;; number++) {
        const struct hopper_tile t = s->tile[number % TILES_AHEAD];
        if (t.expert < 0)
            break;
        int next = 0; /* known to the lister when it asks below: the answer is as long on its way as loads are */
        if (threadIdx.x == LISTER)
            next = (int)gridDim.x + atomicAdd(tile_counter<DOWN>(f), 1);
        uint32_t from[MOST_N / 16]; /* where this thread's rows of x begin, in 16 bytes; past the last the last again */
        const int turns = (t.count + 15) / 16;
#pragma unroll
        for (int i = 0; i < MOST_N / 16; i++) {
            int position = t.begin + min(row0 + 16 * i, t.count - 1);
            if (i < turns)
                from[i] = (DOWN ? (uint32_t)position : (uint32_t)f.batch.slot_row[__ldcg(f.routing.order + position)]) * ldx;
        }
        const uint8_t *w = hopper_weights(weights, t, groups, blocks), *column = x;
        column = keep_in_register(column); /* or every copy loads it again */
        const uint32_t x_at = t.wide ? 32 * 1024 : 16 * 1024;
        /* What is done once a tile goes between loops, not into one: registers for it would be taken from the copies. */
        int k = 0;
#pragma unroll 1
        for (int part = LORA ? 0 : 1; part < 4; part++) {
            const int end = part < 2 ? min(LORA ? (part + 1) * LIST_EACH : LIST_EACH, blocks - 1) : part == 2 ? blocks - 1 : blocks;
#pragma unroll 1
            for (; k < end; k++, turn++) {
                const uint32_t stage = turn % STAGES, at = ring + stage * STAGE_BYTES, full = smem_address(&s->full[stage]);
                barrier_wait(smem_address(&s->empty[stage]), (turn / STAGES & 1) ^ 1);
                if (threadIdx.x == 0 && (k >= hopper_ahead(blocks) || number > 0)) /* or hopper_copy_ahead has */
                    hopper_copy_weights(at, full, w, t.groups, blocks, k);
#pragma unroll
                for (int i = 0; i < MOST_N / 16; i++)
                    if (i < turns)
                        copy_async_16(at + x_at + put + i * 2048, column + (size_t)from[i] * 16, true);
                column += CUDA_BLOCK_K * 2;
                barrier_arrive_copies(full);
            }
            if (part == (LORA ? 0 : 1)) {
                if (threadIdx.x == LISTER)
                    s->tile[(number + 1) % TILES_AHEAD] = hopper_tile_at(s, experts, groups, next);
                if (LORA && threadIdx.x >= LISTER)
                    lora_look(f, s->segment[t.expert], s->segments, &s->look);
            } else if (part == 1) {
                if (threadIdx.x >= LISTER)
                    hopper_list<DOWN>(f, s, t, number);
            } else if (part == 2) {
                bar_sync(1, PRODUCERS); /* What the first thread arrives for from here on, consumers see both behind. */
            }
        }
        if (!LORA)
            continue;
        if (number == 0)
            launch_wait();
        struct lora_cursor c = {s->runs[number % TILES_AHEAD], s->most[number % 2], 0, 0};
#pragma unroll 1
        for (bool more = c.runs > 0; more; turn++) {
            const uint32_t stage = turn % STAGES, full = smem_address(&s->full[stage]);
            barrier_wait(smem_address(&s->empty[stage]), (turn / STAGES & 1) ^ 1);
            more = lora_fill<DOWN, PRODUCERS>(f, s->run[number % 2], &c, t.begin, t.group, t.groups, t.wide ? LORA_PIECES / 2 : LORA_PIECES,
                                              ring + stage * STAGE_BYTES, full, &s->lora[stage]);
            barrier_arrive_copies(full);
        }
    }
    copy_async_wait_all();
}

/* ---- consumers ----------------------------------------------------------------------------------------- */

/* Stores are as few instructions as can be: unrolled for every shape they would not stay in the instruction cache. Rows are compared with
 * what is left of the tile: with their numbers, these would fill registers all through the kernel. */

/* PLAIN: silu of the sums as they are, and channels of the model alone. */
template <typename OP, bool PLAIN, int N>
__device__ __forceinline__ void hopper_store_gate_up(const struct kernel_forward &f, const struct hopper_tile &tile, int group, float *acc)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, c = group * 8 + g;
    float bias0 = 0.0f, bias1 = 0.0f;
    if (!PLAIN && f.weights.gate_bias) {
        bias0 = f.weights.gate_bias[(size_t)tile.expert * f.dims.inter_pad + c];
        bias1 = f.weights.up_bias[(size_t)tile.expert * f.dims.inter_pad + c];
    }
    if (!PLAIN && f.weights.weight_on_input) {
        const int32_t *order = f.routing.order + tile.begin + 2 * t;
        const int left = tile.count - 2 * t;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int n = i / 2 * 8 + i % 2;
            float w = n < left ? f.batch.slot_weight[order[n]] : 0.0f;
            acc[i / 2 * 4 + i % 2] = w * (acc[i / 2 * 4 + i % 2] + bias0);
            acc[i / 2 * 4 + i % 2 + 2] = w * (acc[i / 2 * 4 + i % 2 + 2] + bias1);
        }
        bias0 = bias1 = 0.0f;
    }
    const struct gated_linear linear = gated_linear_of(PLAIN ? KERNEL_ACT_SILU : f.weights.activation);
    const bool real = PLAIN || c < f.dims.inter;
    const size_t ld = f.dims.inter_pad;
    const int left = tile.count - g;
    OP *out = (OP *)f.h + (size_t)(tile.begin + g) * ld + group * 8 + 2 * t;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float *v = acc + 4 * j;
        uint32_t h = PLAIN ? op_pair<OP>::narrow(gated_product(linear.scale, v[0], v[2]), gated_product(linear.scale, v[1], v[3]))
                           : op_pair<OP>::narrow(activate_linear(linear, v[0] + bias0, v[2] + bias1),
                                                 activate_linear(linear, v[1] + bias0, v[3] + bias1));
        h = transpose_8x8(real ? h : 0);
        if (j * 8 < left)
            *reinterpret_cast<uint32_t *>(out) = h;
        out += 8 * ld;
    }
}

template <typename OP, bool BIAS, int N>
__device__ __forceinline__ void hopper_store_down(const struct kernel_forward &f, const struct hopper_tile &tile, int group,
                                                  const float *acc)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, c = group * 16 + 2 * g;
    float bias0 = 0.0f, bias1 = 0.0f;
    if (BIAS) {
        bias0 = f.weights.down_bias[(size_t)tile.expert * f.dims.hidden_pad + c];
        bias1 = f.weights.down_bias[(size_t)tile.expert * f.dims.hidden_pad + c + 1];
    }
    const size_t ld = f.dims.hidden_pad;
    const int left = tile.count - g;
    OP *out = (OP *)f.y + (size_t)(tile.begin + g) * ld + group * 16 + 4 * t;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float v0 = BIAS ? acc[4 * j] + bias0 : acc[4 * j], v1 = BIAS ? acc[4 * j + 1] + bias0 : acc[4 * j + 1];
        const float v2 = BIAS ? acc[4 * j + 2] + bias1 : acc[4 * j + 2], v3 = BIAS ? acc[4 * j + 3] + bias1 : acc[4 * j + 3];
        /* lo has channels 4 t and 4 t + 2, hi 4 t + 1 and 4 t + 3. */
        const uint32_t lo = transpose_8x8(op_pair<OP>::narrow(v0, v1)), hi = transpose_8x8(op_pair<OP>::narrow(v2, v3));
        if (j * 8 < left)
            *reinterpret_cast<uint2 *>(out) = make_uint2(__byte_perm(lo, hi, 0x5410), __byte_perm(lo, hi, 0x7632));
        out += 8 * ld;
    }
}

template <typename OP, bool DOWN, int N>
__device__ __forceinline__ void hopper_store(const struct kernel_forward &f, const struct hopper_tile &tile, int local, float *acc)
{
    const int group = tile.group + local;
    if (local >= tile.groups)
        return;
    if (DOWN) {
        if (f.weights.down_bias)
            hopper_store_down<OP, true, N>(f, tile, group, acc);
        else
            hopper_store_down<OP, false, N>(f, tile, group, acc);
    } else if (f.weights.activation == KERNEL_ACT_SILU && !f.weights.gate_bias && !f.weights.weight_on_input &&
               group * 8 + 8 <= f.dims.inter) {
        hopper_store_gate_up<OP, true, N>(f, tile, group, acc);
    } else {
        hopper_store_gate_up<OP, false, N>(f, tile, group, acc);
    }
}

/* A stage of weights is done with, by a whole warp, whose product has ended. With adapters the barriers count lanes: each that has read
 * of an adapters' stage arrives for itself. */
template <bool LORA> __device__ __forceinline__ void hopper_done(struct hopper_shared *s, uint32_t turn)
{
    const uint32_t empty = smem_address(&s->empty[turn % STAGES]);
    if (threadIdx.x % 32 != 0)
        return;
    if (LORA)
        barrier_arrive_many(empty, 32);
    else
        barrier_arrive(empty);
}

template <typename OP, bool DOWN, bool LORA, int MT, int N>
__device__ __forceinline__ void hopper_consume(const struct kernel_forward &f, const struct hopper_tile &tile, uint32_t ring,
                                               struct hopper_shared *s, int blocks, int number, uint32_t *turn)
{
    const int consumer = threadIdx.x / 128 - 1;
    float acc[MT][N / 2] = {}; /* not left to the first instruction: every tile shape's would live through the loop over tiles */
#pragma unroll 1 /* four times the code has to come from afar */
    for (int k = 0; k < blocks; k++, ++*turn) {
        const uint32_t stage = *turn % STAGES, at = ring + stage * STAGE_BYTES;
        barrier_wait(smem_address(&s->full[stage]), *turn / STAGES & 1);
        /* cp.async wrote by the generic proxy, wgmma reads by the other. */
        fence_async_proxy();
        const uint64_t x = wgmma_tile(at + (MT == 2 ? 32 * 1024 : 16 * 1024)), w = wgmma_tile(at + consumer * MT * 8192);
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < 4; step++) {
#pragma unroll
            for (int m = 0; m < MT; m++)
                wgmma_run<OP, N>::go(acc[m], w + m * (8192 >> 4) + step * 2, x + step * 2);
        }
        wgmma_commit();
        if (k > 0) {
            wgmma_wait<1>();
            hopper_done<LORA>(s, *turn - 1);
        }
    }
    wgmma_wait<0>();
    hopper_done<LORA>(s, *turn - 1);
    if (LORA) {
        bool more = s->runs[number % TILES_AHEAD] > 0;
        __syncwarp(); /* likewise */
#pragma unroll 1
        for (; more; ++*turn) {
            const uint32_t stage = *turn % STAGES;
            barrier_wait(smem_address(&s->full[stage]), *turn / STAGES & 1);
            more = !s->lora[stage].last;
            lora_fold<OP, DOWN, MT, N, MT * 8>(acc, ring + stage * STAGE_BYTES, &s->lora[stage], consumer * MT * 4 + threadIdx.x / 32 % 4);
            barrier_arrive(smem_address(&s->empty[stage]));
        }
    }
    if (LORA && number == 0)
        launch_begin();
#pragma unroll
    for (int m = 0; m < MT; m++)
        hopper_store<OP, DOWN, N>(f, tile, (consumer * MT + m) * 4 + threadIdx.x / 32 % 4, acc[m]);
}

/* LORA: with adapters. Rows without one meet the same instructions in both; the code for adapters alone costs those who have none. */
template <typename OP, bool DOWN, bool LORA>
__global__ void __launch_bounds__(HOPPER_THREADS, 1) hopper_kernel(const __grid_constant__ struct kernel_forward f)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    struct hopper_shared *s = (struct hopper_shared *)(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem_address(&s->full[i]), PRODUCERS + 1);
            barrier_init(smem_address(&s->empty[i]), LORA ? 256 : 8);
        }
        fence_async_proxy();
    }
    const int groups = DOWN ? f.dims.hidden_pad / 16 : f.dims.inter_pad / 8;
    const int blocks = (DOWN ? f.dims.inter_pad : f.dims.hidden_pad) / CUDA_BLOCK_K;
    /* Down comes two launches after routing, and so does gate_up after shrink. The fill's barrier is the one that orders the barriers'
     * initialization before their use. */
    offsets_fill(s->offset, f, DOWN || LORA);
    hopper_scan(s, f.dims.experts, groups);
    if (threadIdx.x == 0) {
        const struct hopper_tile t = hopper_tile_at(s, f.dims.experts, groups, blockIdx.x);
        s->tile[0] = t;
        if (t.expert >= 0)
            hopper_copy_ahead((const uint8_t *)(DOWN ? f.weights.down : f.weights.gate_up), s, t, smem_address(shared), groups, blocks);
    }
    /* With adapters, shrink is the launch before, and what is needed of it are sums, at the end of the first tile. */
    if (LORA) {
        const int segments = segments_first(s->segment, f);
        if (threadIdx.x == 0)
            s->segments = segments;
    } else {
        launch_begin();
    }
    __syncthreads();
    /* 88 + 2 * 208 = 120 + 2 * 192 = 3 * 168: what the launch took is all there is to share; asking for more waits for ever. */
    if (threadIdx.x < PRODUCERS) {
        if (LORA)
            registers_decrease<120>();
        else
            registers_decrease<88>();
        hopper_produce<OP, DOWN, LORA>(f, shared, s, groups, blocks);
    } else {
        if (LORA)
            registers_increase<192>();
        else
            registers_increase<208>();
        uint32_t turn = 0;
        const uint32_t ring = smem_address(shared);
        for (int number = 0;; number++) {
            const struct hopper_tile t = s->tile[number % TILES_AHEAD];
            if (t.expert < 0)
                break;
            __syncwarp(); /* all lanes have read it when the first arrives anywhere */
            if (t.wide) {
                if (t.count <= 16)
                    hopper_consume<OP, DOWN, LORA, 2, 16>(f, t, ring, s, blocks, number, &turn);
                else if (t.count <= 32)
                    hopper_consume<OP, DOWN, LORA, 2, 32>(f, t, ring, s, blocks, number, &turn);
                else if (t.count <= 64)
                    hopper_consume<OP, DOWN, LORA, 2, 64>(f, t, ring, s, blocks, number, &turn);
                else if (t.count <= 96)
                    hopper_consume<OP, DOWN, LORA, 2, 96>(f, t, ring, s, blocks, number, &turn);
                else if (t.count <= 128)
                    hopper_consume<OP, DOWN, LORA, 2, 128>(f, t, ring, s, blocks, number, &turn);
                else
                    hopper_consume<OP, DOWN, LORA, 2, 144>(f, t, ring, s, blocks, number, &turn);
            } else if (t.count <= 160) {
                hopper_consume<OP, DOWN, LORA, 1, 160>(f, t, ring, s, blocks, number, &turn);
            } else if (t.count <= 176) {
                hopper_consume<OP, DOWN, LORA, 1, 176>(f, t, ring, s, blocks, number, &turn);
            } else if (t.count <= 192) {
                hopper_consume<OP, DOWN, LORA, 1, 192>(f, t, ring, s, blocks, number, &turn);
            } else if (t.count <= 208) {
                hopper_consume<OP, DOWN, LORA, 1, 208>(f, t, ring, s, blocks, number, &turn);
            } else if (t.count <= 224) {
                hopper_consume<OP, DOWN, LORA, 1, 224>(f, t, ring, s, blocks, number, &turn);
            } else if (t.count <= 240) {
                hopper_consume<OP, DOWN, LORA, 1, 240>(f, t, ring, s, blocks, number, &turn);
            } else {
                hopper_consume<OP, DOWN, LORA, 1, 256>(f, t, ring, s, blocks, number, &turn);
            }
        }
    }
    if (LORA)
        launch_wait();
}

#define HOPPER_SHARED (STAGES * STAGE_BYTES + sizeof(struct hopper_shared))
static_assert(HOPPER_SHARED <= 227 * 1024, "a block's most");

template <typename OP, bool DOWN> static cudaError_t hopper_launch(struct kernel_stream *stream, const struct kernel_forward *f)
{
    return launch(stream, f->lora.entry ? hopper_kernel<OP, DOWN, true> : hopper_kernel<OP, DOWN, false>, dim3(stream->processors),
                  dim3(HOPPER_THREADS), HOPPER_SHARED, *f);
}

/* Compiled twice, so that two compilers work side by side: -DCUDA_FP16=0 for bf16, =1 for fp16. */
#if CUDA_FP16
#define HOPPER_OP __half
#define HOPPER_NAME(n) n##_fp16
#else
#define HOPPER_OP __nv_bfloat16
#define HOPPER_NAME(n) n##_bf16
#endif

cudaError_t HOPPER_NAME(cuda_prefill_sm90)(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    return down ? hopper_launch<HOPPER_OP, true>(stream, f) : hopper_launch<HOPPER_OP, false>(stream, f);
}

cudaError_t HOPPER_NAME(cuda_load_prefill_sm90)(void)
{
    cudaError_t e = load(hopper_kernel<HOPPER_OP, false, false>, HOPPER_SHARED);
    if (e == cudaSuccess)
        e = load(hopper_kernel<HOPPER_OP, false, true>, HOPPER_SHARED);
    if (e == cudaSuccess)
        e = load(hopper_kernel<HOPPER_OP, true, false>, HOPPER_SHARED);
    return e == cudaSuccess ? load(hopper_kernel<HOPPER_OP, true, true>, HOPPER_SHARED) : e;
}
