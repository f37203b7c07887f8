/* SPDX-License-Identifier: Apache-2.0
 *
 * Instructions of PTX that kernels use by name (kernels/cuda/ptx.cuh), on the emulated device. Addresses of shared memory are those of
 * emulator_shared_address.
 */
#ifndef EXPERTD_TESTS_EMULATOR_PTX_H
#define EXPERTD_TESTS_EMULATOR_PTX_H

#include <stdint.h>

void emulator_launch_wait(void);
void emulator_launch_release(void);
void emulator_bar_sync(int id, int threads);

void emulator_copy_async(uint32_t dst, const void *src, bool valid); /* 16 bytes */
void emulator_copy_async_commit(void);
void emulator_copy_async_wait(int groups); /* negative: for all, committed or not */

void emulator_mbarrier_init(uint32_t barrier, int count);
void emulator_mbarrier_arrive(uint32_t barrier, int count, int64_t bytes); /* after it has been told to expect so many bytes more */
void emulator_mbarrier_expect(uint32_t barrier, int64_t bytes);
void emulator_mbarrier_arrive_copies(uint32_t barrier);
void emulator_mbarrier_wait(uint32_t barrier, uint32_t parity);
void emulator_bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t barrier);
void emulator_fence_proxy(void);

void emulator_shared_load(void *to, uint32_t address, uint32_t bytes);
void emulator_mma(bool bf16, float c[4], const uint32_t a[4], const uint32_t b[2]);
uint32_t emulator_transpose(uint32_t v);
void emulator_wgmma(bool bf16, int n, float *d, uint64_t a, uint64_t b);
void emulator_wgmma_begin(void);
void emulator_wgmma_commit(void);
void emulator_wgmma_wait(int groups);

#endif
