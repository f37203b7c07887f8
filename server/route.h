/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of all calls.
 */
#ifndef EXPERTD_SERVER_ROUTE_H
#define EXPERTD_SERVER_ROUTE_H

#include "server/http.h"

/* ROUTE_COUNT routes; one more, of which only the pattern is set, stands for "no such route" in the metrics. */
extern const struct http_route route_table[];
extern const size_t route_count;

/* NULL: none. */
const struct http_route *route_find(char *const *segment, size_t segments);
/* NULL: not one of the route's; then `allow` (room for 32 bytes) lists those. HEAD goes where GET goes. */
const struct http_method *route_find_method(const struct http_route *route, const char *name, char *allow);

#endif
