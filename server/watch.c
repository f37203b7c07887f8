/* SPDX-License-Identifier: Apache-2.0
 *
 * One thread, one epoll set. Hang-ups come as edge-triggered events, so a busy connection costs nothing here; deadlines are looked at four
 * times a second, and what the log left out is told as often; connections are freed by this thread alone, so that an event never meets a dead
 * one.
 */
#include "server/watch.h"

#include "server/log.h"
#include "server/reply.h"
#include "server/server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define WATCH_TICK_MS 250
#define WATCH_EVENTS 64
/* After an answer that came before the request's end: how long and how much we read on so that the client sees it. */
#define WATCH_LINGER_NS (5 * INT64_C(1000000000))
#define WATCH_LINGER_BYTES (INT64_C(512) << 20)
#define WATCH_LINGER_MAX 256
#define WATCH_SOON_NS INT64_C(2000000000)

struct watch {
    pthread_mutex_t lock; /* guards the list; taken before a connection's */
    struct connection *first;
    int epoll, wake, lingering;
    bool stop;
    pthread_t thread;
};

/* connection->lock is held. */
static void watch_shut(struct connection *c)
{
    c->phase = CONNECTION_CUT;
    c->deadline_ns = 0;
    if (c->fd >= 0)
        shutdown(c->fd, SHUT_RDWR); /* libmicrohttpd reads the end of file and closes */
}

static void watch_cut_locked(struct connection *c, const char *bytes, size_t length)
{
    /* Small, and into a socket whose buffer is empty: all of it or, for a peer that doesn't read, nothing that matters. */
    if (c->fd >= 0)
        (void)!send(c->fd, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    c->phase = CONNECTION_CUT;
    c->deadline_ns = 0;
    c->linger = true;
    if (c->fd >= 0)
        shutdown(c->fd, SHUT_WR);
}

void watch_cut(struct connection *c, const char *bytes, size_t length)
{
    pthread_mutex_lock(&c->lock);
    if (c->phase != CONNECTION_CUT)
        watch_cut_locked(c, bytes, length);
    pthread_mutex_unlock(&c->lock);
}

void watch_expire_soon(struct connection *c)
{
    pthread_mutex_lock(&c->lock);
    c->deadline_ns = server_now_ns() + WATCH_SOON_NS;
    pthread_mutex_unlock(&c->lock);
}

bool watch_enter(struct connection *c, enum connection_phase phase, int64_t limit_ns)
{
    int64_t now = server_now_ns(), deadline = limit_ns ? now + limit_ns : 0;
    pthread_mutex_lock(&c->lock);
    bool good = c->phase != CONNECTION_CUT;
    if (good) {
        if (c->phase != phase)
            c->phase_ns = now;
        c->phase = phase;
        c->deadline_ns = deadline;
        if (phase != CONNECTION_IDLE)
            c->fresh = false;
    }
    pthread_mutex_unlock(&c->lock);
    return good;
}

/* The deadline of a phase has passed. */
static void watch_expire(struct connection *c)
{
    char text[REPLY_RAW_MAX], why[96];
    double seconds = (double)(server_now_ns() - c->phase_ns) * 1e-9;
    c->expired = true;
    switch (c->phase) {
    case CONNECTION_HEAD:
    case CONNECTION_BODY:
        snprintf(why, sizeof why, "the request's %s did not arrive within %.0f s", c->phase == CONNECTION_HEAD ? "head" : "body", seconds);
        watch_cut_locked(c, text,
                         reply_raw_error(text, sizeof text, 408, "timeout", why, c->phase == CONNECTION_HEAD ? NULL : c->request_id));
        shutdown(c->fd, SHUT_RD);
        break;
    case CONNECTION_IDLE:
        if (c->fresh) {
            snprintf(why, sizeof why, "no request arrived within %.0f s", seconds);
            watch_cut_locked(c, text, reply_raw_error(text, sizeof text, 408, "timeout", why, NULL));
        }
        watch_shut(c);
        break;
    case CONNECTION_REPLY:
    case CONNECTION_CUT: watch_shut(c); break;
    case CONNECTION_WAIT: break;
    }
    c->deadline_ns = 0;
}

/* Taken out of the set first: libmicrohttpd's descriptor keeps the socket open for a moment, and the set would go on reporting it. */
static void watch_close(struct connection *c)
{
    epoll_ctl(c->watch->epoll, EPOLL_CTL_DEL, c->fd, NULL);
    close(c->fd);
    c->fd = -1;
}

/* Reads away what a closed connection's peer still sends. True when it is done. */
static bool watch_drain(struct connection *c)
{
    static char sink[65536];
    for (int i = 0; i < 64; i++) {
        ssize_t got = recv(c->fd, sink, sizeof sink, MSG_DONTWAIT | MSG_TRUNC);
        if (got < 0)
            return errno != EAGAIN && errno != EINTR;
        c->linger_bytes += got;
        if (got == 0 || c->linger_bytes > WATCH_LINGER_BYTES)
            return true;
    }
    return false;
}

/* libmicrohttpd, edge-triggered too, takes a short read for the end of what there is, and so misses an end of file that came with the last
 * bytes. This makes no difference to the socket, whose peer sends no more, but raises a new event. Repeated until it is noticed, since the
 * event may come before that short read. */
static void watch_nudge(struct connection *c)
{
    if (c->phase == CONNECTION_IDLE || c->phase == CONNECTION_HEAD || c->phase == CONNECTION_BODY)
        shutdown(c->fd, SHUT_RD);
}

static void watch_event(struct connection *c, uint32_t events)
{
    pthread_mutex_lock(&c->lock);
    if (c->closed) {
        if (c->fd >= 0 && watch_drain(c))
            watch_close(c);
    } else if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) && !c->gone && c->phase != CONNECTION_CUT) {
        c->gone = true;
        watch_nudge(c);
        if (c->phase == CONNECTION_WAIT && c->cancel) {
            c->cancel(c->request);
            c->cancel = NULL;
        }
    }
    pthread_mutex_unlock(&c->lock);
}

/* Frees what is finished and enforces deadlines. */
static void watch_sweep(struct watch *w, int64_t now)
{
    pthread_mutex_lock(&w->lock);
    for (struct connection *c = w->first, *next; c; c = next) {
        next = c->next;
        pthread_mutex_lock(&c->lock);
        if (c->deadline_ns && now >= c->deadline_ns) {
            if (!c->closed) {
                watch_expire(c);
            } else if (c->fd >= 0) {
                watch_close(c);
            }
        }
        if (c->gone && !c->closed)
            watch_nudge(c);
        bool done = c->closed && c->fd < 0;
        pthread_mutex_unlock(&c->lock);
        if (!done)
            continue;
        if (c->linger)
            w->lingering--;
        *(c->previous ? &c->previous->next : &w->first) = c->next;
        if (c->next)
            c->next->previous = c->previous;
        pthread_mutex_destroy(&c->lock);
        free(c);
    }
    pthread_mutex_unlock(&w->lock);
}

static void *watch_run(void *arg)
{
    struct watch *w = arg;
    struct epoll_event event[WATCH_EVENTS];
    int64_t swept = 0;
    for (bool stop = false; !stop;) {
        int n = epoll_wait(w->epoll, event, WATCH_EVENTS, WATCH_TICK_MS);
        for (int i = 0; i < n; i++)
            if (event[i].data.ptr)
                watch_event(event[i].data.ptr, event[i].events);
        int64_t now = server_now_ns();
        if (now - swept >= WATCH_TICK_MS * INT64_C(1000000)) {
            watch_sweep(w, now);
            log_refused_summary(false);
            swept = now;
        }
        pthread_mutex_lock(&w->lock);
        stop = w->stop;
        pthread_mutex_unlock(&w->lock);
    }
    return NULL;
}

struct watch *watch_create(void)
{
    struct watch *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    pthread_mutex_init(&w->lock, NULL);
    w->epoll = epoll_create1(EPOLL_CLOEXEC);
    w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    if (w->epoll < 0 || w->wake < 0 || epoll_ctl(w->epoll, EPOLL_CTL_ADD, w->wake, &e) != 0 ||
        pthread_create(&w->thread, NULL, watch_run, w) != 0) {
        if (w->epoll >= 0)
            close(w->epoll);
        if (w->wake >= 0)
            close(w->wake);
        pthread_mutex_destroy(&w->lock);
        free(w);
        return NULL;
    }
    return w;
}

void watch_destroy(struct watch *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_mutex_unlock(&w->lock);
    (void)!write(w->wake, &(uint64_t){1}, sizeof(uint64_t));
    pthread_join(w->thread, NULL);
    while (w->first) {
        struct connection *c = w->first;
        w->first = c->next;
        if (c->fd >= 0)
            close(c->fd);
        pthread_mutex_destroy(&c->lock);
        free(c);
    }
    close(w->epoll);
    close(w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

struct connection *watch_add(struct watch *w, int fd)
{
    struct connection *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->watch = w;
    c->fresh = true;
    c->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_init(&c->lock, NULL);
    struct epoll_event e = {.events = EPOLLRDHUP | EPOLLET, .data.ptr = c};
    if (c->fd < 0 || epoll_ctl(w->epoll, EPOLL_CTL_ADD, c->fd, &e) != 0) {
        if (c->fd >= 0)
            close(c->fd);
        pthread_mutex_destroy(&c->lock);
        free(c);
        return NULL;
    }
    pthread_mutex_lock(&w->lock);
    c->next = w->first;
    if (c->next)
        c->next->previous = c;
    w->first = c;
    pthread_mutex_unlock(&w->lock);
    return c;
}

void watch_remove(struct connection *c)
{
    struct watch *w = c->watch;
    char byte;
    pthread_mutex_lock(&w->lock);
    pthread_mutex_lock(&c->lock);
    c->closed = true;
    c->cancel = NULL;
    /* Closing with unread bytes would reset the connection and take the answer from the client. */
    bool unread = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
    c->linger = (c->linger || unread) && w->lingering < WATCH_LINGER_MAX && !w->stop;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
    if (c->linger && epoll_ctl(w->epoll, EPOLL_CTL_MOD, c->fd, &e) == 0) {
        w->lingering++;
        shutdown(c->fd, SHUT_WR);
        c->deadline_ns = server_now_ns() + WATCH_LINGER_NS;
    } else {
        c->linger = false;
        watch_close(c);
    }
    pthread_mutex_unlock(&c->lock);
    pthread_mutex_unlock(&w->lock);
}
