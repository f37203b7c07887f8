/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply.h"

#include "proto-json/proto.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

const char *reply_reason(int status)
{
    switch (status) {
    case 400: return "Bad Request";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 415: return "Unsupported Media Type";
    case 429: return "Too Many Requests";
    case 500: return "Internal Server Error";
    case 503: return "Service Unavailable";
    default: return "Error";
    }
}

void reply_new_id(char id[33])
{
    /* One random start for the process, then a counter spread over all bits: unique, and cheap on every request. */
    static _Atomic uint64_t start, counter;
    uint64_t base = atomic_load_explicit(&start, memory_order_relaxed);
    while (!base) {
        uint64_t fresh = 0, none = 0;
        if (getrandom(&fresh, sizeof fresh, 0) != sizeof fresh) {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            fresh = (uint64_t)t.tv_sec * 1000000007u ^ (uint64_t)t.tv_nsec << 20;
        }
        atomic_compare_exchange_strong(&start, &none, fresh | 1);
        base = atomic_load(&start);
    }
    uint64_t z = base + 0x9e3779b97f4a7c15u * (1 + atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed));
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u; /* splitmix64: a bijection, so ids of one process never repeat */
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    snprintf(id, 33, "%016llx%016llx", (unsigned long long)base, (unsigned long long)z);
}

size_t reply_raw(char *text, size_t size, int status, const char *request_id, const char *body, size_t length)
{
    int n = snprintf(text, size,
                     "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nX-Request-Id: %s\r\n%sConnection: close\r\n"
                     "Content-Length: %zu\r\n\r\n%s",
                     status, reply_reason(status), request_id, status == 429 || status == 503 ? "Retry-After: 1\r\n" : "", length,
                     body ? body : "");
    return n < 0 ? 0 : (size_t)n < size ? (size_t)n : size - 1;
}

size_t reply_raw_error(char *text, size_t size, int status, const char *code, const char *message, const char *request_id)
{
    char id[33];
    if (!request_id) {
        reply_new_id(id);
        request_id = id;
    }
    size_t length = 0;
    char *body = proto_error_json(message, code, request_id, &length);
    size_t used = reply_raw(text, size, status, request_id, body, length);
    free(body);
    return used;
}
