/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU device: memory that is refused before the machine runs out of it, adapter tables, and the bounds of a batch.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/device.h"
#include "engine/host_memory.h"
#include "engine/internal.h"

#include <stdlib.h>
#include <string.h>

static struct device *make(const char *isa)
{
    struct device_options options = {.device = "cpu", .isa = isa, .threads = 2};
    struct device *device = NULL;
    struct engine_error error;
    enum engine_code code = device_create(&options, &device, &error);
    if (code != ENGINE_OK)
        fail_msg("%s", error.message);
    return device;
}

static void devices_are_chosen_by_name(void **state)
{
    (void)state;
    static const char *const bad[] = {"", "gpu", "cpu0", "cuda:", "cuda:x", "cuda:0x", "cuda:123456", "CPU"};
    struct engine_error error;
    struct device *device = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct device_options options = {.device = bad[i]};
        assert_int_equal(device_create(&options, &device, &error), ENGINE_BAD_OPTION);
        assert_non_null(strstr(error.message, bad[i]));
        assert_null(device);
    }
    struct device_options unknown = {.device = "cpu", .isa = "abacus"};
    assert_int_equal(device_create(&unknown, &device, &error), ENGINE_BAD_OPTION);
    assert_non_null(strstr(error.message, "abacus"));
    if (!device_cuda_available()) {
        struct device_options cuda = {.device = "cuda"};
        assert_int_equal(device_create(&cuda, &device, &error), ENGINE_BAD_OPTION);
        /* A build with CUDA says instead what its device lacks. */
        if (strstr(error.message, "no CUDA back end"))
            assert_non_null(strstr(error.message, "-Dcuda=disabled was given; meson configure BUILD -Dcuda=enabled"));
        else
            assert_non_null(strstr(error.message, "can't be used"));
        device = make("auto");
        assert_string_equal(device->kind, "cpu");
        device_destroy(device);
    }
    device = make("ref");
    assert_string_equal(device->kernels->name, "ref");
    assert_int_equal(device->depth, 1);
    device_destroy(device);
}

static void memory_is_aligned_zero_and_counted(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 4095, 256 * 1024, 5 * 1024 * 1024 + 17};
    struct device *device = make(NULL);
    struct engine_error error;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t p;
        assert_int_equal(device->ops->alloc(device, sizes[i], &p, &error), ENGINE_OK);
        assert_int_equal(p % 256, 0);
        memset((void *)(uintptr_t)p, 1, sizes[i]);
        device->ops->free(device, p, sizes[i]);
        void *h = device->ops->host_alloc(device, sizes[i]);
        assert_non_null(h);
        memset(h, 1, sizes[i]);
        device->ops->host_free(device, h, sizes[i]);
    }
    device->ops->free(device, 0, 100);
    /* Strided upload and download. */
    uint64_t p;
    char src[12] = "abXcdXefX", dst[9] = {0};
    assert_int_equal(device->ops->alloc(device, 16, &p, &error), ENGINE_OK);
    memset((void *)(uintptr_t)p, '-', 16);
    assert_int_equal(device->ops->upload(device, p, 3, src, 3, 2, 3, &error), ENGINE_OK);
    assert_int_equal(device->ops->download(device, dst, p, 8, &error), ENGINE_OK);
    assert_memory_equal(dst, "ab-cd-ef", 8);
    device->ops->free(device, p, 16);
    device_destroy(device);
}

/* Twice the half of what is free can't be had, though neither half was touched: the second is refused with the numbers. */
static void memory_is_refused_before_it_runs_out(void **state)
{
    (void)state;
    struct device *device = make(NULL);
    struct engine_error error = {0};
    int64_t total, left, later;
    device->ops->memory_info(device, &total, &left);
    assert_true(left > 0 && left < total);
    uint64_t a = 0, b = 1;
    size_t most = (size_t)left / 10 * 7;
    assert_int_equal(device->ops->alloc(device, most, &a, &error), ENGINE_OK);
    assert_int_equal(device->ops->alloc(device, most, &b, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(b, 0);
    char wanted[32];
    snprintf(wanted, sizeof wanted, "%zu", most);
    assert_non_null(strstr(error.message, wanted));
    assert_int_equal(device->ops->alloc(device, SIZE_MAX - 5, &b, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    device->ops->free(device, a, most);
    device->ops->memory_info(device, &total, &later);
    assert_true(later > left / 10 * 7);
    device_destroy(device);
}

static struct kernel_dims dims_of(const struct kernel_table *kernels, int32_t experts, int32_t hidden, int32_t inter)
{
    struct kernel_dims dims = {.experts = experts, .hidden = hidden, .inter = inter, .op = DTYPE_BF16};
    kernels->dims_init(&dims);
    return dims;
}

static void adapter_tables_are_bounded(void **state)
{
    (void)state;
    struct device *device = make("ref");
    struct engine_error error;
    struct device_limits limits = {.dims = dims_of(device->kernels, 4, 16, 8), .max_rows = 4, .max_slots = 16, .adapters = 2, .layers = 2};
    assert_int_equal(device->ops->prepare(device, &limits, &error), ENGINE_OK);
    assert_true(device->scratch_bytes > 0);
    struct kernel_lora_entry entries[24] = {{.rank = 8}};
    assert_int_equal(device->ops->table_write(device, 1, 0, 24, entries, &error), ENGINE_OK);
    assert_int_equal(device->ops->table_write(device, 1, 23, 1, entries, &error), ENGINE_OK);
    assert_int_equal(device->ops->table_write(device, 1, 23, 2, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->table_write(device, 2, 0, 1, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->table_write(device, -1, 0, 1, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->table_write(device, 0, SIZE_MAX, 2, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->canary(device, &error), ENGINE_OK);
    device_destroy(device);

    /* Scratch that no machine has is an error, not a crash. */
    device = make("ref");
    limits.dims = dims_of(device->kernels, 1024, 1 << 20, 1 << 20);
    limits.max_rows = 65536;
    limits.max_slots = 1 << 26;
    assert_int_equal(device->ops->prepare(device, &limits, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    device_destroy(device);
}

/* The arrays of scratch don't overlap and lie within what was said to be needed. */
static void scratch_is_laid_out_without_overlap(void **state)
{
    (void)state;
    for (int adapters = 0; adapters <= 3; adapters += 3) {
        const struct kernel_table *kernels = kernels_ref();
        struct device_limits limits = {
            .dims = dims_of(kernels, 7, 40, 24), .max_rows = 5, .max_slots = 33, .adapters = adapters, .layers = 1};
        size_t bytes = forward_bind_scratch(kernels, &limits, NULL, NULL);
        char *base = aligned_alloc(256, bytes);
        struct kernel_forward f = {0};
        assert_int_equal(forward_bind_scratch(kernels, &limits, base, &f), bytes);
        size_t rank = adapters ? KERNEL_MAX_RANK : 0, hidden = (size_t)f.dims.hidden_pad, inter = (size_t)f.dims.inter_pad;
        assert_int_equal(f.lora.max_rank, rank);
        const struct {
            void *at;
            size_t bytes;
        } arrays[] = {
            {f.x, 5 * hidden * 2},
            {f.h, 33 * inter * 2},
            {f.y, 33 * hidden * 2},
            {f.s_gate, 33 * rank * 2},
            {f.s_up, 33 * rank * 2},
            {f.s_down, 33 * rank * 2},
            {f.routing.order, 33 * 4},
            {f.routing.position, 33 * 4},
            {f.routing.expert_offset, 8 * 4},
            {f.routing.segment_count, 4},
            {f.routing.segment_begin, 34 * 4},
            {f.routing.segment_expert, 33 * 4},
            {f.routing.segment_adapter, 33 * 4},
            {f.work, kernels->work_bytes(&limits.dims, 5, 33, (int32_t)rank)},
        };
        char *end = base;
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
            assert_true((char *)arrays[i].at >= end);
            assert_int_equal((uintptr_t)arrays[i].at % 256, 0);
            end = (char *)arrays[i].at + arrays[i].bytes;
        }
        assert_true(end <= base + bytes);
        free(base);
    }
}

/* A CPU's own choice keeps scratch well below what serving may add to the weights, for every shape that people run. */
static void batches_fit_their_memory(void **state)
{
    (void)state;
    static const int32_t shapes[][4] = {{64, 8, 2048, 1024}, {128, 8, 2048, 768}, {8, 2, 4096, 14336},    {256, 8, 7168, 2048},
                                        {16, 1, 5120, 8192}, {8, 0, 64, 32},      {1024, 32, 8192, 8192}, {1, 1, 8, 8}};
    struct device *device = make(NULL);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int32_t *s = shapes[i];
        struct kernel_dims dims = dims_of(device->kernels, s[0], s[2], s[3]);
        int32_t rows = 0, slots = 0;
        engine_batch_bounds(device, &dims, s[0], s[1], 0, 16, &rows, &slots);
        struct device_limits limits = {.dims = dims, .max_rows = rows, .max_slots = slots, .adapters = 16, .layers = 1};
        assert_in_range(rows, 1, 512);
        assert_true(slots >= s[0] && slots >= rows * s[1]);
        assert_true(forward_bind_scratch(device->kernels, &limits, NULL, NULL) <= (i == 6 ? 256u : 128u) << 20);
        engine_batch_bounds(device, &dims, s[0], s[1], 1, 16, &rows, &slots);
        assert_int_equal(rows, 1);
        assert_true(slots >= s[0]);
        engine_batch_bounds(device, &dims, s[0], s[1], 4096, 16, &rows, &slots);
        assert_int_equal(rows, 4096); /* asked for: kept */
    }
    device_destroy(device);
}

static void the_machine_says_what_it_has(void **state)
{
    (void)state;
    int64_t total = 0, left = -1;
    host_memory_info(&total, &left);
    assert_true(total > 0);
    assert_in_range(left, 1, total);
    int64_t before = host_memory_resident();
    size_t bytes = 64 << 20;
    char *p = malloc(bytes);
    assert_non_null(p);
    memset(p, 1, bytes);
    assert_true(host_memory_resident() >= before + (int64_t)bytes / 2);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_are_chosen_by_name),           cmocka_unit_test(memory_is_aligned_zero_and_counted),
        cmocka_unit_test(memory_is_refused_before_it_runs_out), cmocka_unit_test(adapter_tables_are_bounded),
        cmocka_unit_test(scratch_is_laid_out_without_overlap),  cmocka_unit_test(batches_fit_their_memory),
        cmocka_unit_test(the_machine_says_what_it_has),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
