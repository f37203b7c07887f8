/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests/conformance/trap.cu has for a GPU, for the emulated device.
 */
#include "cuda_runtime_api.h"

extern "C" int trap_device(void)
{
    cudaStream_t stream = nullptr;
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = emulator_trap(stream);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    (void)cudaGetLastError();
    return (int)e;
}

extern "C" int spin_device(double seconds)
{
    cudaStream_t stream = nullptr;
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = emulator_occupy(stream, seconds);
    (void)cudaGetLastError();
    return (int)e;
}
