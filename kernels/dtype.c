/* SPDX-License-Identifier: Apache-2.0
 *
 * Names and bulk conversion of element types. The loops are plain so that the compiler vectorizes them.
 */
#include "kernels/dtype.h"

static const char *const names[] = {"BF16", "FP16", "FP32", "INT32", "INT64", "BYTES"};

const char *dtype_name(enum dtype d) { return names[d]; }

bool dtype_parse(const char *name, size_t len, enum dtype *out)
{
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strlen(names[i]) == len && !memcmp(names[i], name, len)) {
            *out = (enum dtype)i;
            return true;
        }
    return false;
}

void dtype_convert(void *dst, enum dtype dst_type, const void *src, enum dtype src_type, size_t n)
{
    size_t ds = dtype_size(dst_type), ss = dtype_size(src_type);
    if (dst_type == src_type) {
        memmove(dst, src, n * ds);
        return;
    }
    for (size_t i = 0; i < n; i++)
        dtype_store_f32((char *)dst + i * ds, dst_type, dtype_load_f32((const char *)src + i * ss, src_type));
}
