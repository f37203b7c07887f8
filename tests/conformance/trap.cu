/* SPDX-License-Identifier: Apache-2.0
 *
 * A fault for tests alone: a kernel that traps, which makes every later CUDA call of the process fail.
 */
#include <cuda_runtime_api.h>

__global__ void trap_kernel() { asm volatile("trap;"); }

/* Returns the error that CUDA reports, 0 when there was none. */
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
