/* SPDX-License-Identifier: Apache-2.0
 *
 * The emulated device's instructions compute what the device's do.
 */
#include "test_emulator.h"

/* ---- instructions ----------------------------------------------------------------------------------------------- */

template <typename OP> static uint16_t bits_of(float v)
{
    const OP o = op_from_f32<OP>(v);
    uint16_t bits;
    memcpy(&bits, &o, 2);
    return bits;
}

/* Whole numbers, small enough that sums are exact in any order. */
static int number(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return (int)(*state >> 24) % 17 - 8;
}

/* d[64 x N] += a[64 x 64] b[N x 64]^T */
template <typename OP, int N> __global__ void warpgroup_product(const uint16_t *a, const uint16_t *b, float *d)
{
    tiles_fill<OP>(a, b, N);
    fence_async_proxy();
    __syncthreads();
    float sum[N / 2];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto at = [&](int i) { return (16 * warp + g + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2; };
    for (int i = 0; i < N / 2; i++)
        sum[i] = d[at(i)];
    wgmma_begin();
    for (int k = 0; k < 4; k++)
        wgmma_run<OP, N>::go(sum, wgmma_tile(TILE_A) + 2 * k, wgmma_tile(TILE_B) + 2 * k);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; i++)
        d[at(i)] = sum[i];
}

template <typename OP> __global__ void warp_product(const uint16_t *a, const uint16_t *b, float *c)
{
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    auto pair = [](const uint16_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 16; };
    float sum[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
    mma_16816<OP>(sum, pair(a + g * 16 + 2 * t), pair(a + (g + 8) * 16 + 2 * t), pair(a + g * 16 + 2 * t + 8),
                  pair(a + (g + 8) * 16 + 2 * t + 8), pair(b + g * 16 + 2 * t), pair(b + g * 16 + 2 * t + 8));
    for (int i = 0; i < 4; i++)
        c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

/* c[m x n] += a[m x k] b[n x k]^T by `kernel`, against a plain sum. */
template <typename OP>
static void check_product(int m, int n, int k, int block, size_t bytes, void (*kernel)(const uint16_t *, const uint16_t *, float *))
{
    uint32_t state = (uint32_t)(n + k);
    std::vector<float> a((size_t)(m * k)), b((size_t)(n * k)), c((size_t)(m * n)), result((size_t)(m * n));
    std::vector<uint16_t> a_bits(a.size()), b_bits(b.size());
    for (size_t i = 0; i < a.size(); i++)
        a_bits[i] = bits_of<OP>(a[i] = (float)number(&state));
    for (size_t i = 0; i < b.size(); i++)
        b_bits[i] = bits_of<OP>(b[i] = (float)number(&state));
    for (size_t i = 0; i < c.size(); i++)
        c[i] = (float)number(&state);
    uint16_t *da, *db;
    float *dc;
    cudaMalloc((void **)&da, a.size() * 2);
    cudaMalloc((void **)&db, b.size() * 2);
    cudaMalloc((void **)&dc, c.size() * 4);
    cudaMemcpy(da, a_bits.data(), a.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(db, b_bits.data(), b.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(dc, c.data(), c.size() * 4, cudaMemcpyHostToDevice);
    go(false, 1, block, bytes, kernel, (const uint16_t *)da, (const uint16_t *)db, dc);
    cudaMemcpy(result.data(), dc, c.size() * 4, cudaMemcpyDeviceToHost);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = c[(size_t)(i * n + j)];
            for (int x = 0; x < k; x++)
                sum += a[(size_t)(i * k + x)] * b[(size_t)(j * k + x)];
            if (result[(size_t)(i * n + j)] != sum)
                fail_msg("%d x %d x %d: element (%d, %d) is %g, not %g", m, n, k, i, j, (double)result[(size_t)(i * n + j)], (double)sum);
        }
    cudaFree(da);
    cudaFree(db);
    cudaFree(dc);
}

template <typename OP, int... N> static void check_products(void)
{
    check_product<OP>(16, 8, 16, 32, 0, warp_product<OP>);
    (check_product<OP>(64, N, 64, 128, TILE_BYTES, warpgroup_product<OP, N>), ...);
}

static void test_products(void **state)
{
    emulator_seed(0);
    check_products<__half, 16, 32, 64, 96, 128, 160, 192, 224, 256>();
    check_products<__nv_bfloat16, 16, 32, 64, 96, 128, 160, 192, 224, 256>();
}

__global__ void transpose(int *out)
{
    /* Element (i, j) is 8 i + j. */
    const unsigned e = 8 * (threadIdx.x / 4) + threadIdx.x % 4 * 2;
    out[threadIdx.x] = (int)transpose_8x8(e | (e + 1) << 16);
}

static void test_transpose(void **state)
{
    refill();
    go(false, 1, 32, 0, transpose, out);
    const std::vector<int> v = results(32);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            assert_int_equal(v[(size_t)(4 * i + j / 2)] >> j % 2 * 16 & 0xffff, 8 * j + i);
}

__global__ void matrices(int *out)
{
    /* Element (i, j) of matrix m is 64 m + 8 i + j; rows lie in the opposite order. */
    const int row = 31 - (int)threadIdx.x;
    for (int j = 0; j < 4; j++)
        ((unsigned *)shared)[4 * threadIdx.x + j] = (unsigned)(8 * row + 2 * j) | (unsigned)(8 * row + 2 * j + 1) << 16;
    __syncwarp();
    const uint4 v = shared_load_matrices(16 * (unsigned)row);
    for (int m = 0; m < 4; m++)
        out[4 * threadIdx.x + m] = (int)(&v.x)[m];
}

static void test_matrices(void **state)
{
    refill();
    go(false, 1, 32, 512, matrices, out);
    const std::vector<int> v = results(128);
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 8; j++)
                assert_int_equal(v[(size_t)(4 * (4 * i + j / 2) + m)] >> j % 2 * 16 & 0xffff, 64 * m + 8 * i + j);
}

__global__ void copies(const int *in, int *out)
{
    uint4 *p = (uint4 *)shared;
    p[threadIdx.x] = {~0u, ~0u, ~0u, ~0u};
    copy_async_16(16 * threadIdx.x, threadIdx.x % 2 ? in + 4 * threadIdx.x : NULL, threadIdx.x % 2);
    copy_async_commit();
    copy_async_wait<0>();
    const uint4 v = shared_load_16(16 * threadIdx.x);
    const uint2 none = shared_load_8(1u << 30, 0);
    const uint4 no = shared_load_16(1u << 30, 0), same = shared_load_16(16 * threadIdx.x, 8);
    for (int i = 0; i < 4; i++)
        out[4 * threadIdx.x + i] = (&same.x)[i] == (&v.x)[i] ? (int)(&v.x)[i] + (int)(none.x | none.y | (&no.x)[i]) : -1;
    const uint2 half = shared_load_8(16 * threadIdx.x + 8, 8);
    out[128 + 2 * threadIdx.x] = (int)half.x;
    out[128 + 2 * threadIdx.x + 1] = (int)half.y;
}

static void test_copies(void **state)
{
    refill();
    go(false, 1, 32, 4096, copies, (const int *)in, out);
    const std::vector<int> v = results(192);
    for (int i = 0; i < 128; i++)
        assert_int_equal(v[(size_t)i], i / 4 % 2 ? i : 0);
    for (int i = 0; i < 64; i++)
        assert_int_equal(v[(size_t)(128 + i)], i / 2 % 2 ? i / 2 * 4 + 2 + i % 2 : 0);
}

__global__ void collectives(int *out)
{
    const int lane = threadIdx.x;
    int *mine = out + 12 * lane;
    mine[0] = __shfl_sync(~0u, lane * 3, lane ^ 5);
    mine[1] = __shfl_sync(~0u, lane * 3, 32 + 7);
    mine[2] = __shfl_up_sync(~0u, lane * 3, 4);
    mine[3] = (int)__ballot_sync(~0u, lane % 3 == 0);
    mine[4] = __all_sync(~0u, lane < 32) + 2 * __all_sync(~0u, lane < 31);
    mine[5] = (int)__match_any_sync(~0u, lane % 5 - 2);
    mine[6] = __reduce_add_sync(~0u, lane - 20);
    mine[7] = __reduce_max_sync(~0u, lane - 40);
    mine[8] = (int)(__shfl_sync(~0u, (float)lane * 0.5f, 9) * 2);
    mine[9] = atomicAdd(out + 1000, 2);
    mine[10] = (int)atomicOr((unsigned *)out + 1001, 1u << lane);
    mine[11] = (int)__shfl_sync(~0u, (uint64_t)lane << 40, 3) + (int)(__shfl_sync(~0u, (uint64_t)lane << 40, 3) >> 40);
}

static void test_collectives(void **state)
{
    refill();
    go(false, 1, 32, 0, collectives, out);
    const std::vector<int> v = results(1002);
    unsigned third = 0, sums = 0;
    for (int i = 0; i < 32; i += 3)
        third |= 1u << i;
    for (int i = 0; i < 32; i++) {
        const int *mine = &v[(size_t)(12 * i)];
        unsigned same = 0;
        for (int j = i % 5; j < 32; j += 5)
            same |= 1u << j;
        assert_int_equal(mine[0], (i ^ 5) * 3);
        assert_int_equal(mine[1], 21);
        assert_int_equal(mine[2], (i < 4 ? i : i - 4) * 3);
        assert_int_equal((unsigned)mine[3], third);
        assert_int_equal(mine[4], 1);
        assert_int_equal((unsigned)mine[5], same);
        assert_int_equal(mine[6], 31 * 16 - 640);
        assert_int_equal(mine[7], -9);
        assert_int_equal(mine[8], 9);
        assert_true(mine[9] % 2 == 0 && mine[9] < 64);
        sums |= 1u << mine[9] / 2; /* each comes once */
        assert_false((unsigned)mine[10] >> i & 1);
        assert_int_equal(mine[11], 3);
    }
    assert_int_equal(sums, ~0u);
    assert_int_equal(v[1000], 64);
    assert_int_equal((unsigned)v[1001], ~0u);
}

static void test_arithmetic(void **state)
{
    const float inf = __int_as_float(0x7f800000), nan = __int_as_float(0x7fc00000);
    assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0x3210), 0x33221100);
    assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0x7531), 0x77553311);
    assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0x0404), 0x00440044);
    assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0xffff8888), 0); /* of a selector, 3 bits count */
    assert_int_equal(__popc(0xf00f), 8);
    assert_int_equal(__ffs(0), 0);
    assert_int_equal(__ffs(8), 4);
    assert_int_equal(__clz(0), 32);
    assert_int_equal(__clz(1), 31);
    assert_int_equal(min(3u, 4), 3);
    assert_int_equal(max(-3, 2), 2);
    assert_int_equal(bits_from(3, 2), 0x18);
    assert_int_equal(bits_from(0, 32), ~0u);
    assert_int_equal(bits_from(30, 5), 0xc0000000);
    assert_int_equal(bits_from(32, 0) | bits_from(5, 0), 0);
    assert_true(min_nan(1, 2) == 1 && min_nan(2, -inf) == -inf && max_nan(1, 2) == 2 && max_nan(-inf, 3) == 3);
    assert_true(min_nan(-0.0f, 0.0f) == 0 && signbit(min_nan(-0.0f, 0.0f)) && signbit(min_nan(0.0f, -0.0f)));
    assert_true(!signbit(max_nan(-0.0f, 0.0f)) && !signbit(max_nan(0.0f, -0.0f)));
    for (int i = 0; i < 3; i++) {
        const float x = i == 1 ? 1 : nan, y = i == 0 ? 1 : nan;
        assert_true(min_nan(x, y) != min_nan(x, y) && max_nan(x, y) != max_nan(x, y));
    }
    assert_true(ex2_approx(3) == 8 && ex2_approx(-inf) == 0 && ex2_approx(inf) == inf && ex2_approx(-140) == 0);
    assert_true(rcp_approx(4) == 0.25f && rcp_approx(inf) == 0 && rcp_approx(1e-40f) == inf && rcp_approx(2e38f) == 0);
    assert_int_equal(bits_of<__half>(nan), 0x7fff);
    assert_int_equal(bits_of<__nv_bfloat16>(nan), 0x7fff);
    assert_int_equal(bits_of<__half>(65520), 0x7c00);
    assert_int_equal(bits_of<__nv_bfloat16>(1.00390625f), 0x3f80); /* halfway: to even */
    assert_int_equal(bits_of<__nv_bfloat16>(1.01171875f), 0x3f82);
}

int main(void)
{
    prepare();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),    cmocka_unit_test(test_transpose),   cmocka_unit_test(test_matrices),
        cmocka_unit_test(test_copies),      cmocka_unit_test(test_collectives), cmocka_unit_test(test_arithmetic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
