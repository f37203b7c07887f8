/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA device itself: memory that runs out and comes back, uploads of every form, tables, and how it ends when a kernel has
 * trapped, or (a run of its own, with the argument "hang") when one does not end. With the argument "emulated" batches are small, since
 * the emulated device (tests/emulator) computes slowly, and nothing is timed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/device.h"
#include "engine/clock.h"
#include "subject.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int trap_device(void); /* trap.cu */
int spin_device(double seconds);

static struct device *make(void)
{
    struct device_options options = {.device = "cuda", .threads = 2};
    struct device *device = NULL;
    struct engine_error error;
    if (device_create(&options, &device, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    return device;
}

static void devices_that_are_not_there_are_named(void **state)
{
    (void)state;
    struct device *device = NULL;
    struct engine_error error;
    struct device_options far = {.device = "cuda:9999"}, code = {.device = "cuda", .isa = "abacus"};
    assert_int_equal(device_create(&far, &device, &error), ENGINE_BAD_OPTION);
    assert_non_null(strstr(error.message, "9999"));
    assert_int_equal(device_create(&code, &device, &error), ENGINE_BAD_OPTION);
    assert_non_null(strstr(error.message, "abacus"));
    struct device_options any = {.device = "auto"};
    assert_int_equal(device_create(&any, &device, &error), ENGINE_OK);
    assert_string_equal(device->kind, "cuda");
    assert_false(device->direct_memory);
    print_message("%s: %s\n", device->id, device->name);
    device_destroy(device);
}

/* More than there is: refused with the numbers, and nothing is broken by it. */
static void memory_that_runs_out_is_no_failure(void **state)
{
    (void)state;
    struct device *device = make();
    struct engine_error error = {0};
    int64_t total, before, after;
    uint64_t a, b = 1;
    device->ops->memory_info(device, &total, &before);
    assert_true(before > 0 && before < total);
    assert_int_equal(device->ops->alloc(device, (size_t)total, &b, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(b, 0);
    char wanted[32];
    snprintf(wanted, sizeof wanted, "%lld", (long long)total);
    assert_non_null(strstr(error.message, wanted));
    assert_int_equal(device->ops->alloc(device, SIZE_MAX / 2, &b, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(device->ops->alloc(device, 64 << 20, &a, &error), ENGINE_OK);
    assert_int_equal(a % 256, 0);
    device->ops->memory_info(device, &total, &after);
    assert_true(after <= before - (64 << 20));
    device->ops->free(device, a, 64 << 20);
    device->ops->memory_info(device, &total, &after);
    assert_int_equal(after, before);
    struct device_limits limits = {.dims = {.experts = 1024, .hidden = 65536, .inter = 65536, .op = DTYPE_BF16},
                                   .max_rows = 65536,
                                   .max_slots = 1 << 26,
                                   .adapters = 65536,
                                   .layers = 100};
    device->kernels->dims_init(&limits.dims);
    assert_int_equal(device->ops->prepare(device, &limits, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    device_destroy(device);
}

static void round_trip(struct device *device, size_t dst_pitch, size_t src_pitch, size_t width, size_t height)
{
    struct engine_error error = {0};
    size_t bytes = dst_pitch * height;
    unsigned char *src = malloc(src_pitch * height), *dst = malloc(bytes);
    uint64_t p, seed = width * height;
    for (size_t i = 0; i < src_pitch * height; i++)
        src[i] = (unsigned char)subject_random(&seed);
    assert_int_equal(device->ops->alloc(device, bytes, &p, &error), ENGINE_OK);
    memset(dst, 0x5a, bytes);
    assert_int_equal(device->ops->upload(device, p, bytes, dst, bytes, bytes, 1, &error), ENGINE_OK);
    if (device->ops->upload(device, p, dst_pitch, src, src_pitch, width, height, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    assert_int_equal(device->ops->download(device, dst, p, bytes, &error), ENGINE_OK);
    for (size_t i = 0; i < height; i++) {
        assert_memory_equal(dst + i * dst_pitch, src + i * src_pitch, width);
        for (size_t j = width; j < dst_pitch; j++)
            assert_int_equal(dst[i * dst_pitch + j], 0x5a);
    }
    device->ops->free(device, p, bytes);
    free(src);
    free(dst);
}

static void uploads_arrive_in_every_form(void **state)
{
    (void)state;
    struct device *device = make();
    struct engine_error error = {0};
    round_trip(device, 100, 100, 100, 1);
    round_trip(device, 1000, 1000, 1000, 30);
    round_trip(device, 2048, 1024, 1024, 5000); /* halves of blocks, as weights have them */
    round_trip(device, 2048, 1024, 1024, 20000); /* more than goes at once */
    round_trip(device, 30, 20, 10, 50);
    round_trip(device, 200000, 100000, 100000, 3);
    uint64_t p;
    assert_int_equal(device->ops->alloc(device, 16, &p, &error), ENGINE_OK);
    assert_int_equal(device->ops->upload(device, p, 0, NULL, 0, 0, 0, &error), ENGINE_OK);
    device->ops->free(device, p, 16);
    void *h = device->ops->host_alloc(device, 12345);
    assert_non_null(h);
    memset(h, 1, 12345);
    device->ops->host_free(device, h, 12345);
    device->ops->host_free(device, NULL, 0);
    device_destroy(device);
}

struct uploader {
    struct device *device;
    uint64_t to;
    size_t width; /* of a piece; its place is twice as wide when that is less than all */
    void *from; /* pinned */
    pthread_t thread;
    enum engine_code code;
};

enum { UPLOADERS = 8, UPLOADS = 48, UPLOAD_BYTES = 4 << 20 };

static void *upload_main(void *arg)
{
    struct uploader *u = arg;
    struct engine_error error;
    size_t pitch = u->width < UPLOAD_BYTES ? 2 * u->width : u->width;
    for (int i = 0; i < UPLOADS && u->code == ENGINE_OK; i++)
        u->code = u->device->ops->upload(u->device, u->to, pitch, u->from, u->width, u->width, UPLOAD_BYTES / u->width, &error);
    return NULL;
}

/* As the loader does it, on several threads; the rates are for people to read. */
static void uploads_run_side_by_side(void **state)
{
    (void)state;
    static const size_t widths[] = {UPLOAD_BYTES, UPLOAD_BYTES, 1024};
    struct device *device = make();
    struct engine_error error;
    struct uploader u[UPLOADERS];
    void *from[UPLOADERS];
    uint64_t to;
    assert_int_equal(device->ops->alloc(device, (size_t)UPLOADERS * 2 * UPLOAD_BYTES, &to, &error), ENGINE_OK);
    for (size_t i = 0; i < UPLOADERS; i++) {
        from[i] = device->ops->host_alloc(device, UPLOAD_BYTES);
        assert_non_null(from[i]);
        memset(from[i], 1, UPLOAD_BYTES);
    }
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        int64_t start = clock_now_ns();
        for (size_t i = 0; i < UPLOADERS; i++) {
            u[i] = (struct uploader){.device = device, .to = to + i * 2 * UPLOAD_BYTES, .width = widths[w], .from = from[i]};
            assert_int_equal(pthread_create(&u[i].thread, NULL, upload_main, &u[i]), 0);
        }
        for (size_t i = 0; i < UPLOADERS; i++) {
            pthread_join(u[i].thread, NULL);
            assert_int_equal(u[i].code, ENGINE_OK);
        }
        double seconds = (double)(clock_now_ns() - start) * 1e-9;
        print_message("uploads in pieces of %zu bytes: %.1f GB/s\n", widths[w],
                      (double)UPLOADERS * UPLOADS * UPLOAD_BYTES / seconds * 1e-9);
    }
    for (size_t i = 0; i < UPLOADERS; i++)
        device->ops->host_free(device, from[i], UPLOAD_BYTES);
    device->ops->free(device, to, (size_t)UPLOADERS * 2 * UPLOAD_BYTES);
    device_destroy(device);
}

static void adapter_tables_are_bounded(void **state)
{
    (void)state;
    struct device *device = make();
    struct engine_error error;
    struct device_limits limits = {
        .dims = {.experts = 4, .hidden = 16, .inter = 8, .op = DTYPE_BF16}, .max_rows = 4, .max_slots = 16, .adapters = 2, .layers = 2};
    device->kernels->dims_init(&limits.dims);
    assert_int_equal(device->ops->prepare(device, &limits, &error), ENGINE_OK);
    assert_int_equal(device->scratch_bytes, device->ops->prepare_bytes(device, &limits));
    struct kernel_lora_entry entries[24] = {{.rank = 8}};
    assert_int_equal(device->ops->table_write(device, 1, 0, 24, entries, &error), ENGINE_OK);
    assert_int_equal(device->ops->table_write(device, 1, 23, 2, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->table_write(device, 2, 0, 1, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->table_write(device, -1, 0, 1, entries, &error), ENGINE_INTERNAL);
    assert_int_equal(device->ops->table_write(device, 0, SIZE_MAX, 2, entries, &error), ENGINE_INTERNAL);
    for (int i = 0; i < 3000; i++) /* more than is staged at once */
        assert_int_equal(device->ops->table_write(device, i % 2, 0, 24, entries, &error), ENGINE_OK);
    assert_int_equal(device->ops->canary(device, &error), ENGINE_OK);
    assert_int_equal(device->ops->canary(device, &error), ENGINE_OK);
    struct device_batch none = {.batch = {.rows = 5, .slots = 0}};
    assert_int_equal(device->ops->submit(device, &none, &error), ENGINE_INTERNAL);
    device_destroy(device);
}

/* ---- batches -------------------------------------------------------------------------------------------------------- */

enum { ROWS = 2048, TOP_K = 2, EXPERTS = 8, SMALL = 32 };

/* Rows have TOP_K slots, or only one in so many has. Copies of a batch go over streams of their own either way. */
struct shape {
    int32_t rows, hidden, inter, routed;
    int batches;
    bool timed;
};
static struct shape shape = {.rows = ROWS, .hidden = 2048, .inter = 512, .routed = 1, .batches = 40, .timed = true};
static const struct shape shape_emulated = {.rows = 80, .hidden = 8192, .inter = 8, .routed = 20, .batches = 6};

/* Two batches of different rows in host memory that the device copies from. */
struct pair {
    struct device *device;
    struct device_batch batch[2];
    struct kernel_row row[2][ROWS];
    int32_t slot_row[ROWS * TOP_K], slot_expert[ROWS * TOP_K];
    float slot_weight[ROWS * TOP_K];
    unsigned char *in, *out; /* [2, rows, hidden] of bf16 */
    size_t half; /* bytes of a batch */
};

static void pair_init(struct pair *p, struct device *device, const struct kernel_weights *weights)
{
    uint64_t seed = 1;
    const size_t half = p->half = (size_t)shape.rows * (size_t)shape.hidden * sizeof(uint16_t);
    int32_t slots = 0;
    p->device = device;
    p->in = device->ops->host_alloc(device, 2 * half);
    p->out = device->ops->host_alloc(device, 2 * half);
    assert_true(p->in && p->out);
    for (size_t i = 0; i < 2 * half / sizeof(uint16_t); i++) {
        uint16_t v = (uint16_t)(0x3f80 | (subject_random(&seed) & 0x807f)); /* 1 to 2, of either sign */
        memcpy(p->in + i * sizeof v, &v, sizeof v);
    }
    for (int32_t t = 0; t < shape.rows; t++) {
        int32_t first = slots;
        for (; t % shape.routed == 0 && slots < first + TOP_K; slots++) {
            p->slot_row[slots] = t;
            p->slot_expert[slots] = (int32_t)(subject_random(&seed) % EXPERTS);
            p->slot_weight[slots] = 0.5f;
        }
        for (size_t b = 0; b < 2; b++) {
            size_t at = b * half + (size_t)t * (size_t)shape.hidden * sizeof(uint16_t);
            p->row[b][t] = (struct kernel_row){.in = (uint64_t)(uintptr_t)(p->in + at),
                                               .out = (uint64_t)(uintptr_t)(p->out + at),
                                               .dtype = DTYPE_BF16,
                                               .adapter = -1,
                                               .first_slot = first,
                                               .slots = slots - first};
        }
    }
    for (size_t b = 0; b < 2; b++) {
        p->batch[b] = (struct device_batch){.weights = *weights,
                                            .path = KERNEL_PREFILL,
                                            .batch = {.rows = shape.rows,
                                                      .slots = slots,
                                                      .row = p->row[b],
                                                      .slot_row = p->slot_row,
                                                      .slot_expert = p->slot_expert,
                                                      .slot_weight = p->slot_weight}};
    }
}

static void pair_submit(struct pair *p, int i)
{
    struct engine_error error;
    if (p->device->ops->submit(p->device, &p->batch[i % 2], &error) != ENGINE_OK)
        fail_msg("%s", error.message);
}

static void pair_wait(struct pair *p)
{
    struct engine_error error;
    if (p->device->ops->wait(p->device, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
}

/* Microseconds a batch, with so many in flight. */
static double pair_time(struct pair *p, int in_flight)
{
    int64_t begin = clock_now_ns();
    for (int i = 0; i < in_flight; i++)
        pair_submit(p, i);
    for (int i = in_flight; i < shape.batches; i++) {
        pair_wait(p);
        pair_submit(p, i);
    }
    for (int i = 0; i < in_flight; i++)
        pair_wait(p);
    return (double)(clock_now_ns() - begin) * 1e-3 / shape.batches;
}

/* Copying a batch of this shape takes longer than computing it. With two in flight the copies of one run beside those of the other in the
 * opposite direction and beside its computation: less time a batch than a third of it idle would leave. The bits stay those of a batch
 * alone. So do those of small ones, which the kernels read and write in host memory when nothing else is on its way, and which are copied
 * behind another. */
static void batches_in_flight_overlap(void **state)
{
    (void)state;
    static struct pair p;
    struct device *device = make();
    struct engine_error error;
    struct kernel_dims dims = {.experts = EXPERTS, .hidden = shape.hidden, .inter = shape.inter, .op = DTYPE_BF16};
    device->kernels->dims_init(&dims);
    size_t gate_up = EXPERTS * device->kernels->gate_up_bytes(&dims), down = EXPERTS * device->kernels->down_bytes(&dims);
    uint64_t address;
    assert_int_equal(device->ops->alloc(device, gate_up + down, &address, &error), ENGINE_OK);
    uint16_t *values = malloc(gate_up + down);
    uint64_t seed = 2;
    for (size_t i = 0; i < (gate_up + down) / sizeof *values; i++)
        values[i] = (uint16_t)(0x3c00 | (subject_random(&seed) & 0x807f)); /* about 0.01 */
    assert_int_equal(device->ops->upload(device, address, gate_up + down, values, gate_up + down, gate_up + down, 1, &error), ENGINE_OK);
    free(values);
    struct device_limits limits = {.dims = dims, .max_rows = shape.rows, .max_slots = shape.rows * TOP_K, .layers = 1};
    assert_int_equal(device->ops->prepare(device, &limits, &error), ENGINE_OK);
    struct kernel_weights weights = {.gate_up = (void *)(uintptr_t)address, .down = (void *)(uintptr_t)(address + gate_up)};
    pair_init(&p, device, &weights);
    const size_t half = p.half;
    unsigned char *alone = malloc(2 * half);
    for (int64_t begin = clock_now_ns(); shape.timed && clock_now_ns() - begin < 500000000;) /* link and clocks rise under load only */
        (void)pair_time(&p, 1);
    double one = pair_time(&p, 1);
    memcpy(alone, p.out, 2 * half);
    assert_memory_not_equal(alone, alone + half, half);
    memset(p.out, 0x5a, 2 * half);
    double two = pair_time(&p, 2);
    assert_memory_equal(p.out, alone, 2 * half);
    print_message("%d rows of %d bytes: %.1f us a batch alone, %.1f with two in flight\n", shape.rows, shape.hidden * 2, one, two);
    assert_true(!shape.timed || two < 0.67 * one);
    size_t few = half / (size_t)shape.rows * SMALL;
    for (int i = 0; i < 2; i++) {
        p.batch[i].batch.rows = SMALL;
        p.batch[i].batch.slots = p.row[i][SMALL].first_slot;
    }
    for (int in_flight = 1; in_flight <= 2; in_flight++) {
        memset(p.out, 0x5a, 2 * half);
        (void)pair_time(&p, in_flight);
        assert_memory_equal(p.out, alone, few);
        assert_memory_equal(p.out + half, alone + half, few);
        assert_memory_not_equal(p.out + few, alone + few, few);
    }
    free(alone);
    device->ops->host_free(device, p.in, 2 * half);
    device->ops->host_free(device, p.out, 2 * half);
    device->ops->free(device, address, gate_up + down);
    device_destroy(device);
}

/* The last test: no CUDA call of this process works any more after it. An engine at rest notices by its canary. */
static void a_trapped_kernel_fails_the_device_for_good(void **state)
{
    (void)state;
    struct subject s;
    struct call c;
    struct engine_error error = {0};
    subject_backend = "cuda";
    subject_open(&s, &(struct subject_options){.fixture = "olmoe"});
    struct device *device = make();
    call_init(&c, &s, 0, ENGINE_DECODE, DTYPE_BF16, 3, 2, 1);
    call_run(&s, &c);
    assert_false(engine_failed(s.engine));
    assert_int_not_equal(trap_device(), 0);
    for (int i = 0; i < 500 && !engine_failed(s.engine); i++)
        usleep(10000);
    assert_true(engine_failed(s.engine));
    assert_int_equal(engine_submit(s.engine, &c.request, &error), ENGINE_DEVICE_FAILED);
    uint64_t p = 1;
    assert_int_equal(device->ops->alloc(device, 100, &p, &error), ENGINE_DEVICE_FAILED);
    assert_int_equal(p, 0);
    print_message("%s\n", error.message);
    char byte = 0;
    assert_int_equal(device->ops->upload(device, 4096, 1, &byte, 1, 1, 1, &error), ENGINE_DEVICE_FAILED);
    assert_null(device->ops->host_alloc(device, 100));
    device_destroy(device);
    call_finish(&c);
    subject_close(&s);
}

/* Nothing but this runs in its process: no CUDA call can be relied on to return once the device is kept busy. */
static void a_kernel_that_does_not_end_fails_the_device_for_good(void **state)
{
    (void)state;
    struct subject s;
    struct call c, behind;
    struct engine_error error = {0};
    subject_backend = "cuda";
    subject_open(&s, &(struct subject_options){.fixture = "olmoe"});
    call_init(&c, &s, 0, ENGINE_DECODE, DTYPE_BF16, 3, 2, 1);
    call_init(&behind, &s, 0, ENGINE_DECODE, DTYPE_BF16, 2, 2, 2);
    call_run(&s, &c);
    assert_int_equal(spin_device(60), 0);
    usleep(200000);
    atomic_store(&c.done, 0);
    int64_t begin = clock_now_ns();
    assert_int_equal(engine_submit(s.engine, &c.request, &error), ENGINE_OK);
    usleep(100000);
    assert_int_equal(engine_submit(s.engine, &behind.request, &error), ENGINE_OK);
    while ((!atomic_load(&c.done) || !atomic_load(&behind.done)) && clock_now_ns() - begin < INT64_C(30000000000))
        usleep(1000);
    double seconds = (double)(clock_now_ns() - begin) * 1e-9;
    print_message("noticed after %.3f s\n", seconds);
    assert_true(atomic_load(&c.done) && atomic_load(&behind.done));
    assert_true(seconds > 9.9 && seconds < 12);
    assert_int_equal(c.request.status, ENGINE_DEVICE_FAILED);
    assert_int_equal(behind.request.status, ENGINE_DEVICE_FAILED);
    assert_true(engine_failed(s.engine));
    assert_int_equal(engine_submit(s.engine, &c.request, &error), ENGINE_DEVICE_FAILED);
    assert_non_null(strstr(error.message, "a batch of 3 rows of layer index 0, begun 10."));
    struct engine_stats stats;
    engine_stats_get(s.engine, &stats);
    begin = clock_now_ns();
    subject_close(&s);
    assert_true(clock_now_ns() - begin < INT64_C(2000000000));
    /* The calls' memory stays: the device may write there yet. */
}

/* CUDA's own destructors, which exit runs, may wait for the device. */
static _Noreturn void leave(int status)
{
    fflush(stdout);
    fflush(stderr);
    _exit(status);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest hang[] = {cmocka_unit_test(a_kernel_that_does_not_end_fails_the_device_for_good)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_that_are_not_there_are_named),
        cmocka_unit_test(memory_that_runs_out_is_no_failure),
        cmocka_unit_test(uploads_arrive_in_every_form),
        cmocka_unit_test(uploads_run_side_by_side),
        cmocka_unit_test(adapter_tables_are_bounded),
        cmocka_unit_test(batches_in_flight_overlap),
        cmocka_unit_test(a_trapped_kernel_fails_the_device_for_good),
    };
    if (!device_cuda_available()) {
        print_message("SKIP: this machine or build has no cuda\n");
        return 77;
    }
    if (argc > 1 && !strcmp(argv[1], "hang"))
        leave(cmocka_run_group_tests(hang, NULL, NULL));
    if (argc > 1 && !strcmp(argv[1], "emulated"))
        shape = shape_emulated;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
