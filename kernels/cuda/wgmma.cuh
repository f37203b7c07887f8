/* SPDX-License-Identifier: Apache-2.0
 *
 * Hopper's warpgroup matrix instructions, m64nNk16, fp32 sums, both operands in shared memory with the 128-byte swizzle, k
 * contiguous. d[N / 2]: as in mma m16n8k16's c, for each 8 columns: rows g, g, g + 8, g + 8 of the warp's 16.
 */
#ifndef EXPERTD_KERNELS_CUDA_WGMMA_CUH
#define EXPERTD_KERNELS_CUDA_WGMMA_CUH

#include "kernels/cuda/device.cuh"

/* A tile of rows of 128 bytes, 8 rows an atom of 1024 bytes. A step of 16 columns adds 32 bytes, 2 units. */
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

/* Operand lists: registers 8 i .. 8 i + 7. */
#define WGMMA_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_R8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_R9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_R15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_D(i)                                                                                                                         \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]),                    \
        "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])

/* wgmma_run<OP, N>: d += a b. */
template <typename OP, int N> struct wgmma_run;

#define WGMMA_TYPE(op, type, n, a, b, registers, ...)                                                                                      \
    template <> struct wgmma_run<op, n> {                                                                                                  \
        static __device__ __forceinline__ void go(float *d, uint64_t x, uint64_t y)                                                        \
        {                                                                                                                                  \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, %" #a ", %" #b                 \
                         ", 1, 1, 1, 0, 0;"                                                                                                \
                         : __VA_ARGS__                                                                                                     \
                         : "l"(x), "l"(y));                                                                                                \
        }                                                                                                                                  \
    }
#define WGMMA(n, a, b, registers, ...)                                                                                                     \
    WGMMA_TYPE(__nv_bfloat16, "bf16", n, a, b, registers, __VA_ARGS__);                                                                    \
    WGMMA_TYPE(__half, "f16", n, a, b, registers, __VA_ARGS__)

WGMMA(16, 8, 9, WGMMA_R0, WGMMA_D(0));
WGMMA(32, 16, 17, WGMMA_R0 "," WGMMA_R1, WGMMA_D(0), WGMMA_D(1));
WGMMA(64, 32, 33, WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3, WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3));
WGMMA(96, 48, 49, WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3 "," WGMMA_R4 "," WGMMA_R5, WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3),
      WGMMA_D(4), WGMMA_D(5));
WGMMA(128, 64, 65, WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3 "," WGMMA_R4 "," WGMMA_R5 "," WGMMA_R6 "," WGMMA_R7, WGMMA_D(0),
      WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7));
WGMMA(160, 80, 81,
      WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3 "," WGMMA_R4 "," WGMMA_R5 "," WGMMA_R6 "," WGMMA_R7 "," WGMMA_R8 "," WGMMA_R9,
      WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9));
WGMMA(192, 96, 97,
      WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3 "," WGMMA_R4 "," WGMMA_R5 "," WGMMA_R6 "," WGMMA_R7 "," WGMMA_R8 "," WGMMA_R9
               "," WGMMA_R10 "," WGMMA_R11,
      WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10),
      WGMMA_D(11));
WGMMA(224, 112, 113,
      WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3 "," WGMMA_R4 "," WGMMA_R5 "," WGMMA_R6 "," WGMMA_R7 "," WGMMA_R8 "," WGMMA_R9
               "," WGMMA_R10 "," WGMMA_R11 "," WGMMA_R12 "," WGMMA_R13,
      WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10),
      WGMMA_D(11), WGMMA_D(12), WGMMA_D(13));
WGMMA(256, 128, 129,
      WGMMA_R0 "," WGMMA_R1 "," WGMMA_R2 "," WGMMA_R3 "," WGMMA_R4 "," WGMMA_R5 "," WGMMA_R6 "," WGMMA_R7 "," WGMMA_R8 "," WGMMA_R9
               "," WGMMA_R10 "," WGMMA_R11 "," WGMMA_R12 "," WGMMA_R13 "," WGMMA_R14 "," WGMMA_R15,
      WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10),
      WGMMA_D(11), WGMMA_D(12), WGMMA_D(13), WGMMA_D(14), WGMMA_D(15));

#endif
