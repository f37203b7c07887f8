/* SPDX-License-Identifier: Apache-2.0
 *
 * A strict, streaming reader of multipart/form-data (RFC 7578) with bounded memory: pieces go in as they arrive, parts come out through
 * callbacks. One thread at a time.
 */
#ifndef EXPERTD_SERVER_MULTIPART_H
#define EXPERTD_SERVER_MULTIPART_H

#include <stdbool.h>
#include <stddef.h>

#define MULTIPART_BOUNDARY_MAX 70
#define MULTIPART_HEAD_MAX 4096 /* bytes of a part's headers */
#define MULTIPART_NAME_MAX 64 /* of a field */

struct multipart;

struct multipart_sink {
    /* A part begins; its field's name is a string. False stops, with the callee's own error. */
    bool (*begin)(void *arg, const char *name);
    bool (*data)(void *arg, const char *data, size_t size);
    bool (*end)(void *arg);
    void *arg;
};

/* `content_type` is the request's header, or NULL. NULL: it is not multipart/form-data with a usable boundary (*memory false), or there is no
 * memory (*memory true). */
struct multipart *multipart_create(const char *content_type, const struct multipart_sink *sink, bool *memory);
void multipart_destroy(struct multipart *multipart); /* NULL is fine */

/* False: a callback stopped it, or the form is malformed; multipart_error then has the sentence, or NULL when it was a callback. */
bool multipart_feed(struct multipart *multipart, const char *data, size_t size);
/* Whether the closing boundary has come. */
bool multipart_complete(const struct multipart *multipart);
const char *multipart_error(const struct multipart *multipart);

#endif
