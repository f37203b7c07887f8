/* SPDX-License-Identifier: Apache-2.0
 *
 * A forward request between HTTP and the engine. Internal to forward*.c.
 */
#ifndef EXPERTD_SERVER_FORWARD_H
#define EXPERTD_SERVER_FORWARD_H

#include "proto-json/proto.h"
#include "server/http.h"

#define FORWARD_HEAD_ROOM ((size_t)512) /* at least so much room */

/* The adapters that a request names, each once, each with a reference. */
struct forward_adapters {
    struct engine_adapter **item;
    int32_t count, capacity;
    int32_t *table; /* open addressing: index into item and key, or -1 */
    uint32_t table_size; /* a power of two, more than twice `capacity` */
    struct forward_adapter_key *key; /* [capacity] */
};

struct forward {
    struct engine *engine;
    /* The body: staging memory, or NULL. */
    char *body;
    size_t length, capacity;
    struct proto_infer infer;
    bool parsed;
    int32_t layer, rows, k;
    int64_t slots;
    struct forward_adapters adapters;
    void *work; /* staging memory: the arrays of the engine's request, then out */
    void *out; /* [rows, hidden] */
    size_t room; /* bytes of work before out: free for the reply's head once the engine is done */
    struct engine_request request;
    int64_t answered_ns;
};

/* Staging memory for the request; false: it has failed, and *out is as it was. */
bool forward_acquire(struct http_request *r, struct forward *f, size_t bytes, void **out);
/* proto_caller's: whether `hidden` has the model's width. `context` is the request. */
enum proto_code forward_look(void *context, const struct proto_tensor *tensor, struct proto_error *error);
/* Checks names, shapes and ranges against the model, takes adapter references and fills f->request. False: the request has failed. */
bool forward_prepare(struct http_request *r, struct forward *f);

/* The index among f->adapters of the one called `name` or numbered `id` (name NULL), which is looked up once. -1: it failed the request. */
int32_t forward_adapter_index(struct http_request *r, struct forward *f, const char *name, size_t length, int64_t id, int64_t row);
void forward_release_adapters(struct forward *f);

#endif
