/* SPDX-License-Identifier: Apache-2.0
 *
 * Between options.c and config_file.c: reading the config file, and the setter both parsers share.
 */
#ifndef EXPERTD_SERVER_CONFIG_FILE_H
#define EXPERTD_SERVER_CONFIG_FILE_H

#include "server/options.h"

#define CONFIG_FILE_MAX 1048576

/* Sets what the file names: lines of `name = value`, blank lines, and comments whose first character is #. A value reaches from the
 * first to the last character that is not a blank, so it may hold spaces, = and #. Flags take true or false. Lists repeat;
 * anything else twice is an error. False: *message begins with file and line. */
bool config_file_read(struct options *o, const char *path, char *message, size_t message_size);

/* NULL: no such option. */
const struct options_row *options_find(const char *name, size_t length);
/* The option a mistyped name most likely meant; NULL when none is near. */
const char *options_nearest(const char *name, size_t length);
/* Checks and stores one value; appends for lists. `label` begins the sentence on failure. */
bool options_set(struct options *o, const struct options_row *row, const char *text, const char *label, char *message, size_t message_size);
void options_clear_list(struct options *o, const struct options_row *row);

#endif
