/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine's verdicts as clients see them: the status and code of each, as the error table of the API has them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/http.h"

static void test_engine_codes(void **state)
{
    (void)state;
    static const struct {
        enum engine_code code;
        int status;
        const char *name;
    } want[] = {
        {ENGINE_BAD_ADAPTER, 400, "bad_adapter"},
        {ENGINE_ADAPTER_UNSUPPORTED, 400, "adapter_unsupported"},
        {ENGINE_BAD_REQUEST, 400, "bad_request"},
        {ENGINE_FORBIDDEN_PATH, 403, "forbidden_path"},
        {ENGINE_ADAPTER_NOT_FOUND, 404, "adapter_not_found"},
        {ENGINE_LAYER_NOT_FOUND, 404, "layer_not_found"},
        {ENGINE_ADAPTER_EXISTS, 409, "adapter_exists"},
        {ENGINE_TOO_LARGE, 413, "too_large"},
        {ENGINE_QUEUE_FULL, 429, "queue_full"},
        {ENGINE_DRAINING, 503, "draining"},
        {ENGINE_DEVICE_FAILED, 503, "device_failed"},
        {ENGINE_DEADLINE_EXCEEDED, 504, "deadline_exceeded"},
        {ENGINE_OUT_OF_DEVICE_MEMORY, 507, "out_of_device_memory"},
        {ENGINE_ADAPTER_SLOTS_FULL, 507, "adapter_slots_full"},
        /* What a client can't mend, or could not make sense of, has one name. */
        {ENGINE_OUT_OF_MEMORY, 500, "internal"},
        {ENGINE_NO_FILE, 500, "internal"},
        {ENGINE_IO, 500, "internal"},
        {ENGINE_INTERNAL, 500, "internal"},
        {ENGINE_BAD_OPTION, 500, "internal"},
        {ENGINE_BAD_CHECKPOINT, 500, "internal"},
    };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        const char *name = NULL;
        assert_int_equal(http_engine_status(want[i].code, &name), want[i].status);
        assert_string_equal(name, want[i].name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_engine_codes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
