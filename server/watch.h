/* SPDX-License-Identifier: Apache-2.0
 *
 * What libmicrohttpd does not watch: peers that vanish while their request waits, absolute deadlines, and the last bytes of clients that
 * were answered before they had sent everything.
 *
 * Each connection is known here from accept to close through a descriptor of our own for the same socket, which one thread watches.
 * Its `lock` guards phase, deadline, gone and cancel; the request's own data is not touched under it.
 *
 * A peer that closes its sending side while its request waits has gone, as for nginx: whether it also stopped reading can't be told
 * apart. Such a request is cancelled and gets no answer. A peer that does so while its answer is being written still gets all of it.
 */
#ifndef EXPERTD_SERVER_WATCH_H
#define EXPERTD_SERVER_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct http_request;
struct watch;

enum connection_phase {
    CONNECTION_IDLE, /* between requests, or nothing has arrived yet */
    CONNECTION_HEAD, /* a request line has arrived */
    CONNECTION_BODY,
    CONNECTION_WAIT, /* suspended */
    CONNECTION_REPLY,
    CONNECTION_CUT, /* answered or shut from here; libmicrohttpd must do no more than close it */
};

#define HTTP_REQUEST_ID_MAX 128

struct connection {
    struct watch *watch;
    struct connection *previous, *next;
    pthread_mutex_t lock;
    int fd; /* a duplicate of libmicrohttpd's */
    enum connection_phase phase;
    int64_t phase_ns; /* when it began */
    int64_t deadline_ns; /* of the phase; 0 none */
    bool fresh; /* no request has been seen yet */
    bool gone; /* the peer has closed its sending side */
    bool expired; /* cut by a deadline */
    bool linger; /* read on for a while after closing */
    bool closed; /* libmicrohttpd is done with it */
    bool refused; /* past the limit */
    bool local; /* listener and peer are on this machine */
    int64_t linger_bytes;
    void (*cancel)(struct http_request *request); /* while waiting: called once when the peer vanishes, with the lock held */
    struct http_request *request; /* for cancel */
    struct http_request *current; /* of the listener's thread: begun and not completed yet; NULL: none */
    char remote[64];
    char request_id[HTTP_REQUEST_ID_MAX + 1]; /* of the request whose head came last */
};

struct watch *watch_create(void); /* NULL: no descriptors, memory or thread */
/* All connections are closed. NULL is fine. */
void watch_destroy(struct watch *watch);

/* Starts watching; `fd` is duplicated. NULL: no memory or descriptors. */
struct connection *watch_add(struct watch *watch, int fd);
/* libmicrohttpd has closed the connection; it is freed here, later. */
void watch_remove(struct connection *connection);

/* Enters a phase with `limit_ns` from now (0: no limit). False when the connection was cut meanwhile. */
bool watch_enter(struct connection *connection, enum connection_phase phase, int64_t limit_ns);

/* Answers with raw bytes from outside libmicrohttpd, once nothing else is being sent, and cuts the connection. */
void watch_cut(struct connection *connection, const char *bytes, size_t length);

/* After watch_cut, when libmicrohttpd has nothing to do for it: shuts the socket soon, in case the peer neither sends nor closes. */
void watch_expire_soon(struct connection *connection);

#endif
