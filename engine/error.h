/* SPDX-License-Identifier: Apache-2.0
 *
 * What can go wrong below HTTP. Functions that can fail return an enum engine_code and, when it is not ENGINE_OK,
 * fill the caller's struct engine_error with a sentence that names the thing, its value and the limit.
 */
#ifndef EXPERTD_ENGINE_ERROR_H
#define EXPERTD_ENGINE_ERROR_H

#include <stdarg.h>

enum engine_code {
    ENGINE_OK = 0,
    ENGINE_BAD_OPTION, /* a start option makes no sense, alone or with this model or machine */
    ENGINE_BAD_CHECKPOINT, /* the model's files are damaged, incomplete or of a kind we don't serve */
    ENGINE_BAD_ADAPTER, /* the adapter's files are damaged or don't fit the model */
    ENGINE_ADAPTER_UNSUPPORTED, /* the adapter uses a feature we refuse; the sentence names the field */
    ENGINE_FORBIDDEN_PATH, /* the path leaves the adapter root, or there is no root */
    ENGINE_BAD_REQUEST, /* a name or value of the caller's is malformed */
    ENGINE_ADAPTER_EXISTS,
    ENGINE_ADAPTER_NOT_FOUND,
    ENGINE_LAYER_NOT_FOUND,
    ENGINE_TOO_LARGE, /* more rows than the queue could ever hold; adapter over its byte limit */
    ENGINE_QUEUE_FULL, /* try again soon */
    ENGINE_DEADLINE_EXCEEDED, /* dropped before compute */
    ENGINE_CANCELLED, /* the client went away; dropped before compute */
    ENGINE_DRAINING,
    ENGINE_DEVICE_FAILED, /* sticky; the process must be restarted */
    ENGINE_OUT_OF_MEMORY, /* host memory */
    ENGINE_OUT_OF_DEVICE_MEMORY,
    ENGINE_ADAPTER_SLOTS_FULL,
    ENGINE_NO_FILE, /* a file or folder that was named is not there, or not for us; the sentence has the path and errno's text */
    ENGINE_IO, /* one that is there can't be read, for no fault of whoever named it: a disk's, or the network's; likewise */
    ENGINE_INTERNAL,
};

struct engine_error {
    enum engine_code code;
    char message[512]; /* UTF-8, one sentence, cut to fit */
};

/* Fills `e` (NULL is fine) and returns `code`, so that `return engine_fail(...)` reads well. */
enum engine_code engine_fail(struct engine_error *e, enum engine_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));
enum engine_code engine_vfail(struct engine_error *e, enum engine_code code, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

/* The code for a file that could not be opened or looked at: ENGINE_NO_FILE, ENGINE_IO, or ENGINE_OUT_OF_MEMORY, which is also that of no
 * more descriptors. */
enum engine_code engine_errno_code(int number);

/* "bad_adapter", "queue_full", ...: the stable names that logs and HTTP use. */
const char *engine_code_name(enum engine_code code);

#endif
