/* SPDX-License-Identifier: Apache-2.0
 *
 * Answers as bytes and as libmicrohttpd's responses.
 */
#ifndef EXPERTD_SERVER_REPLY_H
#define EXPERTD_SERVER_REPLY_H

#include <stddef.h>

#define REPLY_RAW_MAX 2048

/* A whole HTTP/1.1 answer with our error object, closing the connection, for places where libmicrohttpd can't answer. `request_id` NULL: a new
 * one. Returns the bytes used. */
size_t reply_raw_error(char *text, size_t size, int status, const char *code, const char *message, const char *request_id);

/* The same with a body made by the caller. */
size_t reply_raw(char *text, size_t size, int status, const char *request_id, const char *body, size_t length);

/* A request id of our own: 32 hexadecimal digits. */
void reply_new_id(char id[33]);

const char *reply_reason(int status);

#endif
