/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of the emulated device share: two arrays of device memory, launches, and tiles as products of a warpgroup read them.
 */
#ifndef EXPERTD_TESTS_EMULATOR_TEST_EMULATOR_H
#define EXPERTD_TESTS_EMULATOR_TEST_EMULATOR_H

#include "emulator.h"

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/wgmma.cuh"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

extern "C" {
#include <cmocka.h>
}

#define WORDS 4096 /* of each of the two buffers that kernels get */

extern __shared__ uint8_t shared[];

/* What kernels have: two arrays of device memory. `in` is filled with its indexes, `out` with zeros. */
static int *in, *out;
static cudaStream_t stream;

template <typename... P, typename... A> static void go(bool overlap, int grid, int block, size_t bytes, void (*kernel)(P...), A... args)
{
    struct kernel_stream s = {stream, 0, 3, overlap};
    assert_int_equal(launch(&s, kernel, dim3((unsigned)grid), dim3((unsigned)block), bytes, args...), cudaSuccess);
}

static void refill(void)
{
    std::vector<int> v(WORDS);
    for (int i = 0; i < WORDS; i++)
        v[(size_t)i] = i;
    cudaMemcpy(in, v.data(), WORDS * sizeof(int), cudaMemcpyHostToDevice);
    cudaMemset(out, 0, WORDS * sizeof(int));
}

static std::vector<int> results(int n)
{
    std::vector<int> v((size_t)n);
    cudaMemcpy(v.data(), out, (size_t)n * sizeof(int), cudaMemcpyDeviceToHost);
    return v;
}

static void prepare(void)
{
    assert_int_equal(cudaStreamCreate(&stream), cudaSuccess);
    assert_int_equal(cudaMalloc((void **)&in, WORDS * sizeof(int)), cudaSuccess);
    assert_int_equal(cudaMalloc((void **)&out, WORDS * sizeof(int)), cudaSuccess);
    refill();
}

/* Element (r, k) of a tile of rows of 128 bytes with their swizzle. */
static uint16_t *tile_element(uint8_t *tile, int r, int k) { return (uint16_t *)(tile + 128 * r + ((k / 8) ^ (r % 8)) * 16) + k % 8; }

#define TILE_A 0
#define TILE_B 8192
#define TILE_BARRIER 49152 - 1024
#define TILE_BYTES 49152

template <typename OP> static __device__ void tiles_fill(const uint16_t *a, const uint16_t *b, int n)
{
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x)
        *tile_element(shared + TILE_A, i / 64, i % 64) = a[i];
    for (int i = threadIdx.x; i < n * 64; i += blockDim.x)
        *tile_element(shared + TILE_B, i / 64, i % 64) = b[i];
}
#endif
