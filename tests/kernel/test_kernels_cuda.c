/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA back end against the reference.
 *
 *     test_kernels_cuda [--bench | --small | --stream | --soak] CODE      CODE: sm90, portable, auto; exit status 77: no device, or none that runs it
 *
 * --small leaves out what takes minutes under a memory or race checker; --stream has forwards that follow each other at once. --soak goes on for SOAK_SECONDS (of the environment; 20).
 */
#include "cases.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#define EXIT_SKIPPED 77

static void check(cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        fail_msg("%s: %s", what, cudaGetErrorString(e));
}

/* A case takes thousands of blocks, so that none of this waits for the device, but for the copies from and to memory of the host: the
 * kernels' stream and the default one, on which all this is, wait for each other. Blocks are of the driver's pool, which keeps what was
 * freed; memory checkers know them by their sizes. */
static void *device_alloc(size_t bytes)
{
    void *p = NULL;
    check(cudaMallocAsync(&p, bytes, NULL), "cudaMallocAsync");
    return p;
}

static void device_free(void *p) { check(cudaFreeAsync(p, NULL), "cudaFreeAsync"); }

static void keep_freed_memory(void)
{
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    check(cudaDeviceGetDefaultMemPool(&pool, 0), "the device's memory pool");
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "the device's memory pool");
}

static void device_upload(void *dst, const void *src, size_t bytes)
{
    check(cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice), "upload");
}

static void device_download(void *dst, const void *src, size_t bytes)
{
    check(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost), "download");
}

static void device_fill(void *dst, int byte, size_t bytes) { check(cudaMemsetAsync(dst, byte, bytes, NULL), "fill"); }

static const struct body_memory device_memory = {device_alloc, device_free, device_upload, device_download, device_fill};

static struct body_target target, other;

static void test_steps(void **state) { cases_check_steps(&target); }
static void test_forward(void **state) { cases_check_forward(&target); }
static void test_rule(void **state) { cases_check_rule(&target); }
static void test_sums(void **state) { cases_check_sums(&target); }
static void test_order(void **state) { cases_check_order(&target); }
static void test_company(void **state) { cases_check_company(&target); }
static void test_base(void **state) { cases_check_base(&target); }
static void test_stream(void **state) { cases_check_stream(&target); }
static void test_soak(void **state)
{
    const char *seconds = getenv("SOAK_SECONDS");
    cases_soak(&target, seconds ? atof(seconds) : 20);
}
static void test_nan(void **state) { cases_check_nan(&target); }
static void test_same(void **state) { cases_check_same(&target, &other); }
static void test_large(void **state) { cases_check_large(&target); }

static void test_unknown_code(void **state)
{
    char why[256] = "";
    assert_null(kernels_cuda("no such code", 0, why, sizeof why));
    assert_non_null(strstr(why, "no such code"));
    assert_null(kernels_cuda(NULL, 9999, why, sizeof why));
    assert_non_null(strstr(why, "9999"));
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 && argv[1][0] == '-' ? argv[1] : "";
    const bool bench = !strcmp(mode, "--bench"), small = !strcmp(mode, "--small"), stream_mode = !strcmp(mode, "--stream"),
               soak = !strcmp(mode, "--soak");
    const char *code = argc > 1 + !!*mode ? argv[1 + !!*mode] : "auto";
    if (*mode && !bench && !small && !stream_mode && !soak) {
        fprintf(stderr, "unknown option %s\n", mode);
        return 2;
    }
    char why[256];
    const struct kernel_table *table = kernels_cuda(code, 0, why, sizeof why);
    if (!table) {
        fprintf(stderr, "skipped: %s\n", why);
        return EXIT_SKIPPED;
    }
    cudaStream_t stream = NULL;
    if (cudaStreamCreate(&stream) != cudaSuccess)
        return 1;
    struct kernel_stream *wrapped = kernels_cuda_stream_create(0, stream), *second = kernels_cuda_stream_create(0, stream);
    if (!wrapped || !second)
        return 1;
    keep_freed_memory();
    target = (struct body_target){table, wrapped, &device_memory};
    other = (struct body_target){table, second, &device_memory};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unknown_code), cmocka_unit_test(test_steps), cmocka_unit_test(test_forward), cmocka_unit_test(test_base),
        cmocka_unit_test(test_rule),         cmocka_unit_test(test_sums),  cmocka_unit_test(test_order),   cmocka_unit_test(test_nan),
        cmocka_unit_test(test_stream),       cmocka_unit_test(test_same),  cmocka_unit_test(test_company), cmocka_unit_test(test_large),
    };
    const struct CMUnitTest few[] = {cmocka_unit_test(test_steps), cmocka_unit_test(test_forward)};
    const struct CMUnitTest streaming[] = {cmocka_unit_test(test_stream)};
    const struct CMUnitTest soaking[] = {cmocka_unit_test(test_soak)};
    int failed = 0;
    if (bench)
        cases_bench(&target);
    else if (stream_mode)
        failed = cmocka_run_group_tests_name(table->name, streaming, NULL, NULL);
    else if (soak)
        failed = cmocka_run_group_tests_name(table->name, soaking, NULL, NULL);
    else if (small)
        failed = cmocka_run_group_tests_name(table->name, few, NULL, NULL);
    else
        failed = cmocka_run_group_tests_name(table->name, tests, NULL, NULL);
    kernels_cuda_stream_destroy(wrapped);
    kernels_cuda_stream_destroy(second);
    cudaStreamDestroy(stream);
    return failed;
}
