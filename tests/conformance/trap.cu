/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults for tests alone: a kernel that traps, which makes every later CUDA call of the process fail, and one that takes every
 * multiprocessor whole and keeps it, so that no other kernel of the device begins. That one ends by itself.
 */
#include <cuda_runtime_api.h>

#define SPIN_THREADS 512 /* of a block; a divisor of what multiprocessors hold */

__global__ void trap_kernel() { asm volatile("trap;"); }

__device__ static unsigned long long now_ns()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__global__ void __launch_bounds__(SPIN_THREADS) spin_kernel(unsigned long long ns)
{
    unsigned long long begin = now_ns();
    while (now_ns() - begin < ns)
        ;
}

/* Both return the error that CUDA reports, 0 when there was none. The first waits for the end of its kernel, the second doesn't. */
extern "C" int trap_device(void)
{
    void *arguments[1] = {nullptr};
    cudaStream_t stream = nullptr;
    cudaError_t e = cudaSetDevice(0);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaLaunchKernel((const void *)trap_kernel, dim3(1), dim3(1), arguments, 0, stream);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    (void)cudaGetLastError();
    return (int)e;
}

extern "C" int spin_device(double seconds)
{
    unsigned long long ns = (unsigned long long)(seconds * 1e9);
    void *arguments[1] = {&ns};
    cudaStream_t stream = nullptr;
    int processors = 0, blocks = 0;
    cudaError_t e = cudaSetDevice(0);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (const void *)spin_kernel, SPIN_THREADS, 0);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaLaunchKernel((const void *)spin_kernel, dim3((unsigned)(processors * blocks)), dim3(SPIN_THREADS), arguments, 0, stream);
    (void)cudaGetLastError();
    return (int)e;
}
