/* SPDX-License-Identifier: Apache-2.0
 *
 * libFuzzer harness of the safetensors reader. The input is the header's text; the file gets as much data after it as the
 * input's first byte says, so that the fuzzer need not learn to count. What opens must keep its promises.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int memory = -1;
    if (!size)
        return 0;
    if (memory < 0)
        memory = memfd_create("fuzz", MFD_CLOEXEC);
    uint64_t length = size - 1;
    check(!ftruncate(memory, 0));
    check(pwrite(memory, &length, 8, 0) == 8);
    check(pwrite(memory, data + 1, length, 8) == (ssize_t)length);
    check(!ftruncate(memory, (off_t)(8 + length + data[0])));

    struct safetensors_file *file;
    struct engine_error error;
    enum engine_code code = safetensors_open_fd(dup(memory), "fuzz", ENGINE_BAD_ADAPTER, &file, &error);
    if (code) {
        check(code == ENGINE_BAD_ADAPTER && error.code == code && error.message[0]);
        return 0;
    }
    int64_t at = 8 + (int64_t)length;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const struct safetensors_tensor *t = safetensors_at(file, i);
        char byte[256];
        check(t->begin == at && t->end >= at && t->rank <= SAFETENSORS_MAX_RANK);
        check(safetensors_find(file, t->name) == t);
        check(!safetensors_read(file, t, 0, byte, (size_t)(t->end - t->begin), &error));
        at = t->end;
    }
    check(at == (int64_t)(8 + length + data[0]));
    safetensors_close(file);
    return 0;
}
