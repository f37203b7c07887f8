/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters in the portable prefill product: [W | B] [x | s]. After the last block of k a tile runs extra blocks of 64 columns, cut into 8
 * slots of 8 ranks. A piece is one projection of one run of equal adapters in the tile; its B fills its slots' columns of the
 * weights' side, its s those of the rows' side, with zeros for all rows outside the run. Adding exact zeros changes no bit of a
 * finite sum, and a piece starts at a multiple of its own length rounded up to a power of two (at most a block), so how a row's
 * own products fall into matrix instructions does not depend on the pieces before.
 */
#ifndef EXPERTD_KERNELS_CUDA_PIECES_CUH
#define EXPERTD_KERNELS_CUDA_PIECES_CUH

#include "kernels/cuda/device.cuh"

struct lora_piece {
    const uint8_t *b;
    uint16_t begin, end; /* rows of the tile */
    uint16_t first; /* slot */
    uint16_t rank; /* bit 15: up instead of gate */
};

#define PIECE_UP 0x8000

/* Appends a piece; for a whole warp with equal arguments. */
__device__ __forceinline__ void piece_add(struct lora_piece *piece, int *pieces, int *slots, uint64_t b, int begin, int end, int rank,
                                          int up)
{
    if (b == 0)
        return;
    int length = rank / 8, align = length >= 8 ? 8 : length > 4 ? 8 : length > 2 ? 4 : length;
    *slots = (*slots + align - 1) / align * align;
    if (threadIdx.x % 32 == 0) {
        struct lora_piece p = {(const uint8_t *)b, (uint16_t)begin, (uint16_t)end, (uint16_t)*slots, (uint16_t)(rank | up)};
        piece[*pieces] = p;
    }
    *slots += length;
    ++*pieces;
}

/* Lists the pieces of positions [begin, begin + count) of an expert, whose first segment is `segment`; by one warp. Returns their number;
 * *blocks is how many extra blocks they need. `piece` holds 2 * count. */
template <bool DOWN>
__device__ __forceinline__ int pieces_build(const struct kernel_forward &f, int segment, int expert, int begin, int count,
                                            struct lora_piece *piece, int *blocks)
{
    const int lane = threadIdx.x % 32, segments = *f.routing.segment_count;
    int pieces = 0, slots = 0;
    for (bool more = true; more; segment += 32) {
        /* 32 segments at a time, up to the first that begins past the tile. */
        const int i = min(segment + lane, segments - 1), from = f.routing.segment_begin[i], to = f.routing.segment_begin[i + 1];
        const int adapter = f.routing.segment_adapter[i];
        const bool mine = segment + lane < segments && from < begin + count;
        struct kernel_lora_entry e0 = {}, e1 = {};
        if (mine && to > begin && adapter >= 0) {
            e0 = *lora_entry(f, adapter, expert, DOWN ? KERNEL_DOWN : KERNEL_GATE);
            if (!DOWN)
                e1 = *lora_entry(f, adapter, expert, KERNEL_UP);
        }
        more = __all_sync(~0u, mine);
        for (unsigned left = __ballot_sync(~0u, e0.a != 0 || e1.a != 0); left; left &= left - 1) {
            const int lead = __ffs(left) - 1;
            const int first = max(0, __shfl_sync(~0u, from, lead) - begin), last = min(count, __shfl_sync(~0u, to, lead) - begin);
            piece_add(piece, &pieces, &slots, __shfl_sync(~0u, e0.a ? e0.b : 0, lead), first, last, __shfl_sync(~0u, e0.rank, lead), 0);
            if (!DOWN)
                piece_add(piece, &pieces, &slots, __shfl_sync(~0u, e1.a ? e1.b : 0, lead), first, last, __shfl_sync(~0u, e1.rank, lead),
                          PIECE_UP);
        }
    }
    *blocks = (slots + 7) / 8;
    return pieces;
}

/* Where slot `slot` of the extra blocks reads: `cursor` only moves on. False: nothing, zeros. */
__device__ __forceinline__ bool piece_at(const struct lora_piece *piece, int pieces, int *cursor, int slot, struct lora_piece *out)
{
    while (*cursor + 1 < pieces && piece[*cursor + 1].first <= slot)
        ++*cursor;
    *out = piece[*cursor];
    int length = (out->rank & ~PIECE_UP) / 8;
    return slot >= out->first && slot < out->first + length;
}

/* The 16 bytes of B for row r of a tile that starts at group `group`; NULL: this row isn't the piece's. k: 8 ranks. */
template <bool DOWN>
__device__ __forceinline__ const uint8_t *piece_weights(const struct kernel_forward &f, const struct lora_piece &p, int group, int r, int k)
{
    const int rank = p.rank & ~PIECE_UP;
    if (DOWN)
        return lora_b_at(p.b, rank, f.dims.hidden_pad, group * 16 + r / 16 * 16 + r % 8 * 2 + r / 8 % 2, k);
    if ((r & 8) != (p.rank & PIECE_UP ? 8 : 0))
        return NULL;
    return lora_b_at(p.b, rank, f.dims.inter_pad, group * 8 + r / 16 * 8 + r % 8, k);
}

/* The 16 bytes of s for the row of the batch at `position`. */
template <bool DOWN>
__device__ __forceinline__ const uint8_t *piece_rows(const struct kernel_forward &f, const struct lora_piece &p, int position, int k)
{
    const void *s = DOWN ? f.s_down : p.rank & PIECE_UP ? f.s_up : f.s_gate;
    return (const uint8_t *)s + ((size_t)position * f.lora.max_rank + k * 8) * 2;
}

#endif
