/* SPDX-License-Identifier: Apache-2.0
 *
 * A second look at every request head. libmicrohttpd is lenient where two parsers could disagree about where a request ends; what
 * it lets through is refused here, before anything acts on it.
 */
#ifndef EXPERTD_SERVER_FRAMING_H
#define EXPERTD_SERVER_FRAMING_H

#include <microhttpd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct framing {
    int64_t length; /* of the body; 0 none, -1 chunked */
};

/* `method` and `version` are where libmicrohttpd has them. `raw_uri` is where the request target stood in libmicrohttpd's buffer, `raw_length` its length, `uri` a copy of it. False: `message` says
 * what is wrong. */
bool framing_check(struct MHD_Connection *mhd, const char *method, const char *version, const char *raw_uri, size_t raw_length,
                   const char *uri, struct framing *out, char *message, size_t size);

#endif
