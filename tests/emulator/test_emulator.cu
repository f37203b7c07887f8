/* SPDX-License-Identifier: Apache-2.0
 *
 * The emulated device finds what it should: each kind of fault is reported and its repaired twin is not, under many orders of threads.
 * Faults that end the program are met in a child: this program, with the fault's name as its argument.
 */
#include "test_emulator.h"

#include <sys/wait.h>
#include <unistd.h>

#include <string>

#define SEEDS 24

/* ---- faults within a block ------------------------------------------------------------------------------------ */

template <bool GOOD> __global__ void read_after_write(int *out)
{
    __shared__ int x[64];
    x[threadIdx.x] = threadIdx.x;
    if (GOOD)
        __syncthreads();
    out[threadIdx.x] = x[threadIdx.x ^ 32];
}

template <bool GOOD> __global__ void write_after_read(int *out)
{
    __shared__ int x[64];
    x[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const int v = x[threadIdx.x ^ 32];
    if (GOOD)
        __syncthreads();
    x[threadIdx.x] = v + 1;
    out[threadIdx.x] = v;
}

template <bool GOOD> __global__ void write_after_write(int *out)
{
    __shared__ int x;
    if (threadIdx.x == 0)
        x = 1;
    if (GOOD)
        __syncthreads();
    if (threadIdx.x == 33)
        x = 2;
    __syncthreads();
    out[threadIdx.x] = x;
}

/* Writes to neighbouring bytes are no race, whoever does it. */
template <bool GOOD> __global__ void bytes_of_a_word(int *out)
{
    __shared__ uint8_t x[64];
    x[threadIdx.x] = (uint8_t)threadIdx.x;
    if (!GOOD && threadIdx.x == 1)
        x[34] = 1;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x];
}

template <bool GOOD> __global__ void barrier_of_a_part(int *out)
{
    __shared__ int x[96];
    x[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 64)
        bar_sync(1, 64);
    else
        bar_sync(2, 32);
    const int other = GOOD ? threadIdx.x < 64 ? threadIdx.x ^ 32 : threadIdx.x : (threadIdx.x + 32) % 96;
    out[threadIdx.x] = x[other];
}

template <bool GOOD> __global__ void exchange_in_a_warp(int *out)
{
    __shared__ int x[32];
    x[threadIdx.x] = threadIdx.x;
    if (GOOD)
        __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 1];
}

template <bool GOOD> __global__ void shuffles_order_nothing(int *out)
{
    __shared__ int x[32];
    x[threadIdx.x] = threadIdx.x;
    const int v = __shfl_sync(~0u, (int)threadIdx.x, 3) + (int)__ballot_sync(~0u, true);
    if (GOOD)
        __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 1] + v;
}

/* A barrier of the warp tells nothing to other warps. */
template <bool GOOD> __global__ void warps_apart(int *out)
{
    __shared__ int x[64];
    x[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ (GOOD ? 1 : 32)];
}

template <bool GOOD> __global__ void copy_before_wait(const int *in, int *out)
{
    copy_async_16(16 * threadIdx.x, in + 4 * threadIdx.x, true);
    copy_async_commit();
    if (GOOD)
        copy_async_wait<0>();
    out[threadIdx.x] = ((int *)shared)[4 * threadIdx.x];
    copy_async_wait_all();
}

template <bool GOOD> __global__ void copy_of_the_next_group(const int *in, int *out)
{
    for (int i = 0; i < 2; i++) {
        copy_async_16(1024 * i + 16 * threadIdx.x, in + 4 * threadIdx.x, true);
        copy_async_commit();
    }
    copy_async_wait<1>();
    out[threadIdx.x] = ((int *)(shared + (GOOD ? 0 : 1024)))[4 * threadIdx.x];
    copy_async_wait_all();
}

template <bool GOOD> __global__ void copy_before_barrier(const int *in, int *out)
{
    copy_async_16(16 * threadIdx.x, in + 4 * threadIdx.x, true);
    if (GOOD) {
        copy_async_wait_all();
        __syncthreads();
    } else {
        __syncthreads(); /* which does not wait for copies */
        copy_async_wait_all();
    }
    out[threadIdx.x] = ((int *)shared)[4 * (threadIdx.x ^ 32)];
}

/* What is copied to lies still until those who read it are done. */
template <bool GOOD> __global__ void copy_over_readers(const int *in, int *out)
{
    ((int *)shared)[4 * threadIdx.x] = threadIdx.x;
    __syncthreads();
    const int v = ((int *)shared)[4 * (threadIdx.x ^ 32)];
    if (GOOD)
        __syncthreads();
    copy_async_16(16 * threadIdx.x, in + 4 * threadIdx.x, true);
    copy_async_wait_all();
    out[threadIdx.x] = v;
}

template <bool GOOD> __global__ void copy_told_by_barrier(const int *in, int *out)
{
    const uint32_t bar = 2048;
    if (threadIdx.x == 0)
        barrier_init(bar, 64);
    __syncthreads();
    copy_async_16(16 * threadIdx.x, in + 4 * threadIdx.x, true);
    if (GOOD)
        barrier_arrive_copies(bar);
    else
        barrier_arrive(bar);
    barrier_wait(bar, 0);
    out[threadIdx.x] = ((int *)shared)[4 * (threadIdx.x ^ 32)];
    copy_async_wait_all();
}

template <bool GOOD> __global__ void barrier_before_init(int *out)
{
    const uint32_t bar = 2048;
    if (threadIdx.x == 0)
        barrier_init(bar, 64);
    if (GOOD)
        __syncthreads();
    else
        for (int i = 0; i < 8; i++) /* so that the initialization comes first, in the emulator */
            __ballot_sync(~0u, true);
    if (GOOD || threadIdx.x < 32)
        barrier_arrive(bar);
    __syncthreads();
    out[threadIdx.x] = 0;
}

/* Copies count bytes through the async proxy, a barrier is initialized through the generic one. */
template <bool GOOD> __global__ void barrier_without_fence(const int *in, int *out)
{
    const uint32_t bar = 2048;
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        if (GOOD)
            fence_async_proxy();
        barrier_expect(bar, 1024);
        bulk_copy(0, in, 1024, bar);
    }
    __syncthreads();
    barrier_wait(bar, 0);
    out[threadIdx.x] = ((int *)shared)[threadIdx.x];
}

/* Another thread's fence does, where a barrier lies between. */
template <bool GOOD> __global__ void bulk_over_writes(const int *in, int *out)
{
    const uint32_t bar = 2048;
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        fence_async_proxy();
    }
    ((int *)shared)[threadIdx.x] = 1;
    __syncthreads();
    if (GOOD && threadIdx.x == 5)
        fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(bar, 256);
        bulk_copy(0, in, 256, bar);
    }
    barrier_wait(bar, 0);
    out[threadIdx.x] = ((int *)shared)[threadIdx.x];
}

template <bool GOOD> __global__ void bulk_before_phase(const int *in, int *out)
{
    const uint32_t bar = 2048;
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        fence_async_proxy();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(bar, 1024);
        bulk_copy(0, in, 1024, bar);
    }
    if (GOOD)
        barrier_wait(bar, 0);
    out[threadIdx.x] = ((int *)shared)[threadIdx.x];
    barrier_wait(bar, 0);
}

/* One stage that warp 1 fills and warp 0 reads, several times over; at fault, it is filled again without a look at who reads. */
template <bool GOOD> __global__ void refill_of_a_stage(const int *in, int *out)
{
    const uint32_t full = 2048, empty = 2056, other = 2064;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(empty, 32);
        barrier_init(other, 1);
        fence_async_proxy();
    }
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        if (threadIdx.x == 32) {
            const uint32_t bar = GOOD || i == 0 ? full : other;
            if (GOOD)
                barrier_wait(empty, (i & 1) ^ 1);
            barrier_expect(bar, 128);
            bulk_copy(0, in + 32 * i, 128, bar);
            barrier_wait(bar, GOOD || i == 0 ? i & 1 : (i - 1) & 1);
        } else if (threadIdx.x < 32 && (GOOD || i == 0)) {
            barrier_wait(full, i & 1);
            out[32 * i + threadIdx.x] = ((int *)shared)[threadIdx.x];
            barrier_arrive(empty);
        }
    }
}

/* ---- faults between blocks and launches ------------------------------------------------------------------------ */

template <bool GOOD> __global__ void blocks_write_one_word(int *out)
{
    if (threadIdx.x)
        return;
    if (GOOD)
        atomicAdd(out, 1);
    else
        out[0] = 1;
}

__global__ void produce(int *out)
{
    launch_wait();
    launch_release();
    out[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x;
}

template <bool GOOD> __global__ void read_unwritten(int *fresh, int *out)
{
    if (GOOD || threadIdx.x != 7)
        fresh[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = fresh[threadIdx.x];
}

template <bool GOOD> __global__ void copy_unwritten(int *fresh, int *out)
{
    if (threadIdx.x < 128 - 4 * !GOOD)
        fresh[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x < 32)
        copy_async_16(16 * threadIdx.x, fresh + 4 * threadIdx.x, true);
    copy_async_wait_all();
}

/* Reads what the launch before writes. */
template <bool GOOD> __global__ void consume(const int *out, int *in)
{
    if (GOOD)
        launch_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, v = out[i];
    if (!GOOD)
        launch_wait();
    launch_release();
    in[i] = v;
}

/* As one thread waits for the launch before and the others for that thread. */
template <bool GOOD> __global__ void consume_told(const int *out, int *in)
{
    if (threadIdx.x == 0)
        launch_wait();
    if (GOOD)
        __syncthreads();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, v = out[i];
    launch_wait();
    in[i] = v;
}

/* The copy is begun before the wait, by a block others of which may have waited. */
template <bool GOOD> __global__ void consume_by_copy(const int *out, int *in)
{
    if (GOOD || threadIdx.x == 0)
        launch_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i % 4 == 0)
        copy_async_16(4 * threadIdx.x, out + i, true);
    copy_async_wait_all();
    __syncthreads();
    launch_wait();
    in[i] = ((int *)shared)[threadIdx.x];
}

template <bool WAITS_FIRST> __global__ void between(void)
{
    if (WAITS_FIRST)
        launch_wait();
    launch_release();
    if (!WAITS_FIRST)
        launch_wait();
}

/* Reads, before its wait, what the launch before the one before wrote. */
__global__ void consume_second(const int *out, int *in)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x, v = out[i];
    launch_wait();
    launch_release();
    in[i] = v;
}

/* ---- products of a warpgroup ------------------------------------------------------------------------------------ */

enum product_fault { NO_FAULT, REFILLED, UNWAITED, UNFENCED, FENCED_BY_READER, NOT_BEGUN };

/* Of ones: every sum is 16, unless it is not a number. */
template <enum product_fault FAULT> __global__ void product_of_ones(const uint16_t *a, const uint16_t *b, float *d)
{
    if (threadIdx.x == 0) {
        barrier_init(TILE_BARRIER, 1);
        fence_async_proxy();
    }
    tiles_fill<__half>(a, b, 16);
    if (FAULT != UNFENCED && FAULT != FENCED_BY_READER)
        fence_async_proxy();
    __syncthreads();
    if (FAULT == FENCED_BY_READER)
        fence_async_proxy();
    float sum[8] = {};
    if (FAULT != NOT_BEGUN)
        wgmma_begin();
    wgmma_run<__half, 16>::go(sum, wgmma_tile(TILE_A), wgmma_tile(TILE_B));
    wgmma_commit();
    if (FAULT == REFILLED && threadIdx.x == 0) {
        barrier_expect(TILE_BARRIER, 1024);
        bulk_copy(TILE_B, b, 1024, TILE_BARRIER);
    }
    if (FAULT != UNWAITED)
        wgmma_wait<0>();
    for (int i = 0; i < 8; i++)
        d[8 * threadIdx.x + i] = sum[i];
    wgmma_wait<0>();
    if (FAULT == REFILLED)
        barrier_wait(TILE_BARRIER, 0);
}

/* ---- the faults' table -------------------------------------------------------------------------------------------- */

struct fault {
    const char *name, *says;
    void (*run)(bool good);
};

#define BLOCK_FAULT(kernel, threads, ...) FAULT_OF("race in shared memory", kernel, threads, __VA_ARGS__)
#define FAULT_OF(says, kernel, threads, ...)                                                                                               \
    {                                                                                                                                      \
#kernel, says, [](bool good) {                                                                                  \
            if (good)                                                                                                                      \
                go(false, 1, threads, 4096, kernel<true>, __VA_ARGS__);                                                                    \
            else                                                                                                                           \
                go(false, 1, threads, 4096, kernel<false>, __VA_ARGS__);                                                                   \
        }                          \
    }

static void produce_and(void (*kernel)(const int *, int *))
{
    go(true, 2, 64, 0, produce, out);
    go(true, 2, 64, 4096, kernel, out, in);
}

/* With memory that nobody has written. */
static void with_fresh(void (*kernel)(int *, int *))
{
    int *fresh;
    assert_int_equal(cudaMalloc((void **)&fresh, 512), cudaSuccess);
    go(false, 1, 128, 4096, kernel, fresh, out);
    assert_int_equal(cudaFree(fresh), cudaSuccess);
}

static const struct fault faults[] = {
    BLOCK_FAULT(read_after_write, 64, out),
    BLOCK_FAULT(write_after_read, 64, out),
    BLOCK_FAULT(write_after_write, 64, out),
    BLOCK_FAULT(bytes_of_a_word, 64, out),
    BLOCK_FAULT(barrier_of_a_part, 96, out),
    BLOCK_FAULT(exchange_in_a_warp, 32, out),
    BLOCK_FAULT(shuffles_order_nothing, 32, out),
    BLOCK_FAULT(warps_apart, 64, out),
    BLOCK_FAULT(copy_before_wait, 64, in, out),
    BLOCK_FAULT(copy_of_the_next_group, 64, in, out),
    BLOCK_FAULT(copy_before_barrier, 64, in, out),
    BLOCK_FAULT(copy_over_readers, 64, in, out),
    BLOCK_FAULT(copy_told_by_barrier, 64, in, out),
    BLOCK_FAULT(barrier_before_init, 64, out),
    BLOCK_FAULT(bulk_before_phase, 64, in, out),
    FAULT_OF("no fence of proxies", barrier_without_fence, 64, in, out),
    FAULT_OF("no fence of proxies", bulk_over_writes, 64, in, out),
    BLOCK_FAULT(refill_of_a_stage, 64, in, out),
    {"read_unwritten", "never written", [](bool good) { with_fresh(good ? read_unwritten<true> : read_unwritten<false>); }},
    {"copy_unwritten", "never written", [](bool good) { with_fresh(good ? copy_unwritten<true> : copy_unwritten<false>); }},
    {"blocks_write_one_word", "race in device memory",
     [](bool good) { go(false, 4, 32, 0, good ? blocks_write_one_word<true> : blocks_write_one_word<false>, out); }},
    {"consume", "race in device memory", [](bool good) { produce_and(good ? consume<true> : consume<false>); }},
    {"consume_told", "race in device memory", [](bool good) { produce_and(good ? consume_told<true> : consume_told<false>); }},
    {"consume_by_copy", "race in device memory", [](bool good) { produce_and(good ? consume_by_copy<true> : consume_by_copy<false>); }},
    {"consume_second", "race in device memory",
     [](bool good) {
         go(true, 2, 64, 0, produce, out);
         go(true, 2, 64, 0, good ? between<true> : between<false>);
         go(true, 2, 64, 0, consume_second, out, in);
     }},
};

static void check_fault(const struct fault &f)
{
    for (int good = 0; good < 2; good++)
        for (uint64_t seed = 1; seed <= SEEDS; seed++) {
            refill();
            char first[256] = "";
            emulator_seed(seed);
            emulator_expect();
            f.run(good);
            assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
            const long n = emulator_expected(first, sizeof first);
            if (good ? n != 0 : n == 0 || !strstr(first, f.says))
                fail_msg("%s, %s, seed %d: %ld reports, the first: %s", f.name, good ? "repaired" : "at fault", (int)seed, n, first);
        }
}

static void test_faults(void **state)
{
    for (const struct fault &f : faults)
        check_fault(f);
}

/* ---- faults of products -------------------------------------------------------------------------------------------- */

/* Sums that are not numbers, over all seeds. */
template <enum product_fault FAULT> static int spoiled(int *least)
{
    std::vector<uint16_t> ones(64 * 64, 0x3c00);
    uint16_t *a;
    float *d;
    assert_int_equal(cudaMalloc((void **)&a, 8192), cudaSuccess);
    assert_int_equal(cudaMalloc((void **)&d, 128 * 8 * sizeof *d), cudaSuccess);
    cudaMemcpy(a, ones.data(), 8192, cudaMemcpyHostToDevice);
    int all = 0;
    *least = 1 << 30;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        float v[1024];
        emulator_seed(seed);
        cudaMemset(d, 0, sizeof v);
        go(false, 1, 128, TILE_BYTES, product_of_ones<FAULT>, (const uint16_t *)a, (const uint16_t *)a, d);
        cudaMemcpy(v, d, sizeof v, cudaMemcpyDeviceToHost);
        int n = 0;
        for (float s : v) {
            assert_true(s == 16 || s != s);
            n += s != s;
        }
        all += n;
        *least = n < *least ? n : *least;
    }
    cudaFree(a);
    cudaFree(d);
    return all;
}

static void test_product_faults(void **state)
{
    int least;
    assert_int_equal(spoiled<NO_FAULT>(&least), 0);
    assert_int_equal(spoiled<FENCED_BY_READER>(&least), 0);
    assert_int_equal(spoiled<UNWAITED>(&least), SEEDS * 1024); /* whether or not it has been computed */
    assert_int_equal(spoiled<UNFENCED>(&least), SEEDS * 1024);
    const int refilled = spoiled<REFILLED>(&least); /* where the copy comes first */
    assert_true(refilled > 0);
    print_message("refilled: not a number in %d of %d sums\n", refilled, SEEDS * 1024);
    char first[256];
    emulator_expect();
    spoiled<NOT_BEGUN>(&least);
    assert_int_equal(emulator_expected(first, sizeof first), 4 * SEEDS);
    assert_non_null(strstr(first, "without wgmma_begin"));
}

/* ---- faults that end the program ------------------------------------------------------------------------------------ */

__global__ void read_outside(int *p, int index) { p[1] = p[index]; }
__global__ void write_outside(int *p, int index) { p[index] = 1; }
__global__ void read_shared_outside(int *p, int index) { p[0] = ((int *)shared)[index]; }
__global__ void copy_outside(int *p, int index)
{
    copy_async_16(16 * threadIdx.x, p + index, true);
    copy_async_wait_all();
}

__global__ void wait_for_nobody(int *p)
{
    if (threadIdx.x == 0)
        barrier_init(0, 2);
    __syncthreads();
    if (threadIdx.x == 0)
        barrier_arrive(0);
    barrier_wait(0, 0);
}
__global__ void absent_at_barrier(int *p)
{
    if (threadIdx.x < 32)
        bar_sync(1, 64);
}
__global__ void different_operations(int *p)
{
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __ballot_sync(~0u, true);
}
__global__ void absent_lanes(int *p)
{
    if (threadIdx.x < 16)
        __syncwarp();
}
__global__ void too_many_arrivals(int *p)
{
    if (threadIdx.x == 0)
        barrier_init(0, 2);
    __syncthreads();
    if (threadIdx.x == 0)
        emulator_mbarrier_arrive(0, 3, 0);
}
__global__ void no_barrier(int *p) { barrier_arrive(64); }
__global__ void copies_at_end(int *p) { copy_async_16(16 * threadIdx.x, p, true); }
__global__ void bulk_at_end(int *p)
{
    if (threadIdx.x == 0) {
        barrier_init(1024, 1);
        fence_async_proxy();
        barrier_expect(1024, 16);
        bulk_copy(0, p, 16, 1024);
    }
}
__global__ void misaligned_copy(int *p)
{
    copy_async_16(16 * threadIdx.x + 4, p, true);
    copy_async_wait_all();
}

struct death {
    const char *name, *says;
    void (*run)(void);
};

#define DEATH(kernel, says)                                                                                                                \
    {                                                                                                                                      \
#kernel, says, [] { go(false, 1, 32, 4096, kernel, in); }                                                                          \
    }

static const struct death deaths[] = {
    {"read_outside", "outside of any allocation", [] { go(false, 1, 32, 0, read_outside, in, WORDS); }},
    {"read_before", "outside of any allocation", [] { go(false, 1, 32, 0, read_outside, in, -1); }},
    {"write_outside", "outside of any allocation", [] { go(false, 1, 32, 0, write_outside, in, WORDS + 2); }},
    {"copy_outside", "outside of any allocation", [] { go(false, 1, 32, 4096, copy_outside, in, WORDS); }},
    {"read_shared_outside", "of dynamic shared memory", [] { go(false, 1, 32, 4096, read_shared_outside, in, 1024); }},
    DEATH(wait_for_nobody, "no thread can go on"),
    {"absent_at_barrier", "no thread can go on", [] { go(false, 1, 64, 0, absent_at_barrier, in); }},
    DEATH(different_operations, "meet different operations"),
    DEATH(absent_lanes, "no thread can go on"),
    DEATH(too_many_arrivals, "more arrivals"),
    DEATH(no_barrier, "not initialized"),
    {"copies_at_end", "cp.async are under way",
     [] {
         for (int i = 0; i < 16; i++) /* some of which are done by then */
             go(false, 1, 32, 4096, copies_at_end, in);
     }},
    {"bulk_at_end", "bulk copies are under way",
     [] {
         for (int i = 0; i < 16; i++)
             go(false, 1, 32, 4096, bulk_at_end, in);
     }},
    DEATH(misaligned_copy, "cp.async of 16 bytes"),
};

static int die(const char *name)
{
    alarm(60);
    prepare();
    for (const struct death &d : deaths)
        if (!strcmp(d.name, name)) {
            d.run();
            cudaDeviceSynchronize();
            return 0; /* which its errors make another status */
        }
    return 1;
}

static void test_deaths(void **state)
{
    for (const struct death &d : deaths) {
        int fd[2];
        assert_int_equal(pipe(fd), 0);
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            dup2(fd[1], 2);
            close(fd[0]);
            execl("/proc/self/exe", "test_emulator", d.name, (char *)NULL);
            _exit(126);
        }
        close(fd[1]);
        std::string said;
        char text[512];
        for (ssize_t n; (n = read(fd[0], text, sizeof text)) > 0;)
            said.append(text, (size_t)n);
        close(fd[0]);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        const bool failed = WIFSIGNALED(status) ? WTERMSIG(status) == SIGABRT : WEXITSTATUS(status) == 97;
        if (!failed || said.find(d.says) == std::string::npos)
            fail_msg("%s: status %#x: %s", d.name, status, said.c_str());
    }
}

/* An order is its seed's. */
__global__ void arrival_order(int *out)
{
    __ballot_sync(~0u, true);
    out[1 + atomicAdd(out, 1)] = threadIdx.x;
}

static std::vector<int> order_of(uint64_t seed)
{
    refill();
    emulator_seed(seed);
    go(false, 1, 64, 0, arrival_order, out);
    return results(65);
}

static void test_seeds(void **state)
{
    int different = 0;
    for (uint64_t seed = 0; seed < 8; seed++) {
        assert_true(order_of(seed) == order_of(seed));
        different += order_of(seed) != order_of(seed + 1);
    }
    assert_true(different >= 4);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return die(argv[1]);
    prepare();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_product_faults),
        cmocka_unit_test(test_deaths),
        cmocka_unit_test(test_seeds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
