/* SPDX-License-Identifier: Apache-2.0
 *
 * Request targets: percent-encoding, path segments and query parameters. Pure; any thread.
 */
#ifndef EXPERTD_SERVER_TARGET_H
#define EXPERTD_SERVER_TARGET_H

#include <stdbool.h>
#include <stddef.h>

/* Decodes in place; false when an escape is malformed or hides a control character. '+' stays itself. */
bool target_decode(char *text);

/* Splits `uri` in place: at most `max` decoded segments, and the raw query (NULL: none). "/a/b/" has the segments "a", "b", "". An
 * absolute URI's scheme and authority are skipped. False: malformed; *too_many when there are more segments than that. */
bool target_split(char *uri, char **segment, size_t max, size_t *segments, const char **query, bool *too_many);

/* A parameter's value, decoded, malloc'ed; empty when it is malformed. NULL: absent or out of memory. */
char *target_query(const char *query, const char *name);

#endif
