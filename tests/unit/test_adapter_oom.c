/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory runs out at every allocation of reading, installing, listing and removing an adapter, one after the other: each
 * call says so, and nothing is left behind (leaks are for the sanitizers to see).
 */
#include "engine/adapter.h"
#include "tests/unit/adapter_files.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- allocations ----------------------------------------------------------------------------------------------- */

static int countdown; /* 0: never */

static bool strikes(void) { return countdown && !--countdown; }

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_reallocarray(void *p, size_t n, size_t size);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_reallocarray(void *p, size_t n, size_t size);
char *__wrap_strdup(const char *s);

void *__wrap_malloc(size_t n) { return strikes() ? NULL : __real_malloc(n); }
void *__wrap_calloc(size_t n, size_t size) { return strikes() ? NULL : __real_calloc(n, size); }
void *__wrap_realloc(void *p, size_t n) { return strikes() ? NULL : __real_realloc(p, n); }
void *__wrap_reallocarray(void *p, size_t n, size_t size) { return strikes() ? NULL : __real_reallocarray(p, n, size); }
char *__wrap_strdup(const char *s) { return strikes() ? NULL : __real_strdup(s); }

/* ---- a device without failures of its own, and an engine thread that is the caller ----------------------------- */

static const struct test_model_shape shape = {4, 8, 6, DTYPE_BF16, false, false, 4, {0, 2, -1}, {-1}};
static size_t device_used;

static enum engine_code device_alloc(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error)
{
    (void)device;
    (void)error;
    *out = (uint64_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
    device_used += bytes;
    return ENGINE_OK;
}

static void device_free(struct device *device, uint64_t address, size_t bytes)
{
    (void)device;
    free((void *)(uintptr_t)address);
    device_used -= bytes;
}

static void *host_alloc(struct device *device, size_t bytes)
{
    (void)device;
    (void)bytes;
    return NULL;
}

static enum engine_code upload(struct device *device, uint64_t dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                               size_t height, struct engine_error *error)
{
    (void)device;
    (void)error;
    for (size_t i = 0; i < height; i++)
        memcpy((char *)(uintptr_t)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return ENGINE_OK;
}

static enum engine_code table_write(struct device *device, int32_t layer, size_t first, size_t count,
                                    const struct kernel_lora_entry *entries, struct engine_error *error)
{
    (void)device, (void)layer, (void)first, (void)count, (void)entries, (void)error;
    return ENGINE_OK;
}

static const struct device_ops ops = {
    .alloc = device_alloc, .free = device_free, .host_alloc = host_alloc, .upload = upload, .table_write = table_write};

static void run_now(void *context, void (*fn)(void *), void *arg)
{
    (void)context;
    fn(arg);
}

static void write_folder(const struct scratch *s)
{
    test_adapter_write(s, "x", &shape, 0, 3, 2, 5);
    scratch_write_text(s, "x/adapter_config.json",
                       "{\"r\":2,\"lora_alpha\":4,\"rank_pattern\":{\"w3\":2,\"w(1|2)\":4},\"alpha_pattern\":{\"up_proj\":3},"
                       "\"target_parameters\":[\"experts.down_proj\"],\"unheard_of\":1}");
    /* beside the Linears of layer 0, a fused parameter in layer 2 */
    struct st_writer w;
    st_writer_init(&w);
    test_adapter_tensor(&w, "model.layers.2.mlp.experts.lora_A.weight", "F32", 8, 6, 1);
    test_adapter_tensor(&w, "model.layers.2.mlp.experts.lora_B.weight", "F32", 8, 8, 2);
    test_adapter_tensor(&w, "model.layers.0.mlp.experts.1.up_proj.lora_A.weight", "F16", 2, 8, 3);
    test_adapter_tensor(&w, "model.layers.0.mlp.experts.1.up_proj.lora_B.weight", "F16", 6, 2, 4);
    st_writer_finish(&w, s, "x/adapter_model.safetensors");
}

static void reading(void **state)
{
    (void)state;
    struct scratch s;
    scratch_init(&s);
    write_folder(&s);
    struct model *model = test_model_create(&shape);
    int n = 0;
    for (bool struck = true; struck; n++) {
        struct adapter_data *data = NULL;
        struct engine_error error = {0};
        countdown = n + 1;
        enum engine_code code = adapter_open_beneath(s.fd, s.path, "x", model, 0, &data, &error);
        struck = !countdown;
        countdown = 0;
        if (code != ENGINE_OK) {
            assert_int_equal(code, ENGINE_OUT_OF_MEMORY);
            assert_true(error.message[0]);
            assert_null(data);
        } else {
            assert_int_equal(data->deltas, 5);
        }
        assert_true(struck || code == ENGINE_OK);
        adapter_data_destroy(data);
        assert_true(n < 1000);
    }
    assert_true(n > 15);
    test_model_destroy(model);
    scratch_finish(&s);
}

/* Installs, shows, lists and removes; the first code that is not OK. Leaves nothing installed. */
static enum engine_code round_trip(struct registry *r)
{
    struct engine_adapter_info info, *list;
    struct engine_error error = {0};
    size_t count;
    bool replaced;
    enum engine_code code = registry_install(r, "a", "x", -1, false, &info, &replaced, &error), first = code;
    if (code == ENGINE_OK) {
        engine_adapter_info_finish(&info);
        first = code = registry_show(r, "a", &info, &error);
        if (code == ENGINE_OK)
            engine_adapter_info_finish(&info);
        code = registry_list(r, &list, &count, &error);
        if (code == ENGINE_OK) {
            assert_int_equal(count, 1);
            engine_adapter_info_finish(list);
            free(list);
        }
        first = first == ENGINE_OK ? code : first;
        code = registry_remove(r, "a", 0, &info, &error);
        first = first == ENGINE_OK ? code : first;
        countdown = code == ENGINE_OK ? countdown : 0;
        if (code != ENGINE_OK) /* it must still be there, whole */
            assert_int_equal(registry_remove(r, "a", 0, &info, &error), ENGINE_OK);
        assert_int_equal(info.state, ENGINE_ADAPTER_REMOVED);
        engine_adapter_info_finish(&info);
    }
    return first;
}

static void installing(void **state)
{
    (void)state;
    struct scratch s;
    scratch_init(&s);
    write_folder(&s);
    struct model *model = test_model_create(&shape);
    struct device device = {.ops = &ops, .kernels = kernels_ref()};
    struct registry_options o = {
        .device = &device, .model = model, .max_adapters = 2, .adapter_root = s.path, .publisher = {run_now, NULL}};
    struct registry *r = NULL;
    struct engine_error error;
    int n = 0;
    for (; n < 100; n++) {
        countdown = n + 1;
        enum engine_code code = registry_create(&o, &r, &error);
        countdown = 0;
        if (code == ENGINE_OK)
            break;
        assert_true(code == ENGINE_OUT_OF_MEMORY || code == ENGINE_BAD_OPTION);
        assert_null(r);
    }
    assert_non_null(r);
    assert_true(n > 4);
    int failures = 0;
    for (n = 0; n < 1000; n++) {
        countdown = n + 1;
        enum engine_code code = round_trip(r);
        bool struck = !countdown;
        countdown = 0;
        struct engine_stats stats = {0};
        registry_stats(r, &stats);
        assert_int_equal(stats.adapters_ready + stats.adapters_draining, 0);
        assert_int_equal(stats.adapter_bytes, 0);
        failures += code != ENGINE_OK;
        assert_true(code == ENGINE_OK || code == ENGINE_OUT_OF_MEMORY);
        if (!struck)
            break;
    }
    assert_true(n > 30 && n < 1000 && failures > 30);
    registry_destroy(r);
    assert_int_equal(device_used, 0);
    test_model_destroy(model);
    scratch_finish(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reading),
        cmocka_unit_test(installing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
