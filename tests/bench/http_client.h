/* SPDX-License-Identifier: Apache-2.0
 *
 * A small blocking HTTP/1.1 client for load generation: one keep-alive connection, one request at a time.
 *
 * A client belongs to one thread. The reply's memory belongs to the client and lives until its next call.
 */
#ifndef EXPERTD_TESTS_BENCH_HTTP_CLIENT_H
#define EXPERTD_TESTS_BENCH_HTTP_CLIENT_H

#include <stdbool.h>
#include <stddef.h>

/* Why a call had no answer. */
enum http_failure { HTTP_NO_CONNECTION, HTTP_TIMED_OUT, HTTP_CUT_OFF, HTTP_FAILURES }; /* HTTP_CUT_OFF: closed, reset, or not HTTP */

struct http_client {
    char host[128], port[16]; /* TCP */
    char path[108]; /* Unix socket; "" for TCP */
    int fd; /* -1: not connected */
    char *buffer;
    size_t capacity;
    enum http_failure failure; /* after a call that returned false */
    char authorization[512]; /* the whole header line with CRLF, or "" */
};

struct http_reply {
    int status;
    const char *body;
    size_t length;
    size_t json_length; /* Inference-Header-Content-Length, or `length` */
};

/* `url`: http://HOST:PORT, http://[V6]:PORT or unix:PATH; `key`: a bearer token or NULL. False: the URL is malformed. */
bool http_client_init(struct http_client *client, const char *url, const char *key);
void http_client_finish(struct http_client *client);

/* Sends a request (body NULL: none; json_length < 0: no Inference-Header-Content-Length) and reads the reply. Connects when it
 * must. False: there is no answer, and `failure` says why; the connection is closed and the next call connects again. */
bool http_client_call(struct http_client *client, const char *method, const char *target, const void *body, size_t length, long json_length,
                      struct http_reply *reply);

#endif
