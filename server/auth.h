/* SPDX-License-Identifier: Apache-2.0
 *
 * Who may call: the two keys, read at start and again when the operator asks for it. Any thread.
 */
#ifndef EXPERTD_SERVER_AUTH_H
#define EXPERTD_SERVER_AUTH_H

#include "engine/engine.h"

#include <stdbool.h>
#include <stddef.h>

struct auth;

enum auth_level { AUTH_OPEN, AUTH_METRICS, AUTH_DATA, AUTH_ADMIN };
enum auth_result { AUTH_ALLOWED, AUTH_NO_KEY, AUTH_WRONG_KEY, AUTH_NOT_ADMIN, AUTH_NOT_LOCAL };

/* The files hold one key each; NULL: none. */
enum engine_code auth_create(const char *api_key_file, const char *admin_key_file, bool metrics_open, struct auth **out,
                             struct engine_error *error);
/* Reads both files again. After a failure the keys are as they were, both of them. */
enum engine_code auth_reload(struct auth *auth, const char *api_key_file, const char *admin_key_file, struct engine_error *error);
void auth_destroy(struct auth *auth); /* NULL is fine */

/* `header` is the Authorization value or NULL; `local` says that both listener and peer are this machine's. */
enum auth_result auth_check(struct auth *auth, enum auth_level level, const char *header, bool local);

#endif
