/* SPDX-License-Identifier: Apache-2.0
 *
 * Counting lines of refused requests, without a lock: most of them end here.
 */
#include "server/log_refused.h"
#include "server/server.h"

#include <string.h>

#define SECOND INT64_C(1000000000)

static struct refused {
    int status;
    const char *code;
    atomic_uint_fast64_t shown; /* the second of which lines were shown last, times 256, and how many were */
    atomic_uint_fast64_t left_out; /* since the last summary */
    atomic_int_fast64_t since_ns; /* when the first of these was, or the last summary */
} refused[LOG_REFUSED_KINDS] = {
    {.status = 429, .code = "queue_full"},    {.status = 429, .code = "too_many_bytes_in_flight"},
    {.status = 503, .code = "not_ready"},     {.status = 503, .code = "draining"},
    {.status = 503, .code = "device_failed"},
};

bool log_refused_admit(int status, const char *code)
{
    struct refused *r = refused;
    while (r < refused + LOG_REFUSED_KINDS && !(r->status == status && code && !strcmp(r->code, code)))
        r++;
    if (r == refused + LOG_REFUSED_KINDS)
        return true;
    int64_t now = server_now_ns();
    uint64_t second = (uint64_t)(now / SECOND), seen = atomic_load(&r->shown), next;
    do {
        bool current = seen / 256 >= second;
        if (current && seen % 256 >= LOG_REFUSED_LINES) {
            if (!atomic_load(&r->left_out))
                atomic_store(&r->since_ns, now);
            atomic_fetch_add(&r->left_out, 1);
            return false;
        }
        next = current ? seen + 1 : second * 256 + 1;
    } while (!atomic_compare_exchange_weak(&r->shown, &seen, next));
    return true;
}

bool log_refused_take(size_t kind, bool all, struct log_refused *out)
{
    struct refused *r = &refused[kind];
    int64_t now = server_now_ns(), since = atomic_load(&r->since_ns);
    if (!atomic_load(&r->left_out) || (!all && now - since < SECOND))
        return false;
    atomic_store(&r->since_ns, now); /* before the count begins anew: whoever counts after it finds the time right */
    *out = (struct log_refused){r->status, r->code, (int64_t)atomic_exchange(&r->left_out, 0), (double)(now - since) / SECOND};
    return out->requests > 0;
}

void log_refused_reset(void)
{
    for (struct refused *r = refused; r < refused + LOG_REFUSED_KINDS; r++) {
        atomic_store(&r->shown, 0);
        atomic_store(&r->left_out, 0);
    }
}
