/* SPDX-License-Identifier: Apache-2.0
 *
 * Operands of Hopper's warpgroup matrix instructions, m64nNk16 (wgmma_run in ptx.cuh): fp32 sums, both operands in shared memory with the
 * 128-byte swizzle, k contiguous. d[N / 2]: as in mma m16n8k16's c, for each 8 columns: rows g, g, g + 8, g + 8 of the warp's 16.
 */
#ifndef EXPERTD_KERNELS_CUDA_WGMMA_CUH
#define EXPERTD_KERNELS_CUDA_WGMMA_CUH

#include "kernels/cuda/device.cuh"

/* A tile of rows of 128 bytes, 8 rows an atom of 1024 bytes. A step of 16 columns adds 32 bytes, 2 units.
 *
 * The descriptor's fields, in units of 16 bytes where they are addresses or distances:
 *   bits 0-13   where the tile begins (with steps added: the address before the swizzle)
 *   bits 16-29  1: the distance along k, which this swizzle has no use for
 *   bits 32-45  64: from 8 rows to the next 8, 1024 bytes
 *   bits 49-51  0: atoms lie at multiples of 1024
 *   bits 62-63  1: the 128-byte swizzle
 * Column k of row r: 2 k bytes after the beginning plus 1024 (r / 8) + 128 (r % 8), then bits 4-6 of the address xor its bits 7-9. */
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#endif
