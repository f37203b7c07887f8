/* SPDX-License-Identifier: Apache-2.0
 *
 * Listening sockets: opened from --listen, or handed over by systemd. Owned by main; not for several threads at once.
 */
#ifndef EXPERTD_SERVER_LISTENER_H
#define EXPERTD_SERVER_LISTENER_H

#include "server/options.h"

#include <limits.h>
#include <sys/types.h>

#define LISTENER_MAX (2 * OPTIONS_MAX_LIST)

struct listener {
    int fd; /* -1 once libmicrohttpd owns it */
    char text[256]; /* "http://127.0.0.1:8080", "unix:/run/expertd.sock" */
    bool local; /* loopback or Unix: no other machine reaches it */
    bool tcp;
    char *unlink_path; /* a socket file that we made; NULL: none */
    dev_t device;
    ino_t inode;
};

struct listener_set {
    struct listener item[LISTENER_MAX];
    size_t count;
};

/* False: `text` is no HOST:PORT, [V6]:PORT or unix:PATH, and `message` says so. Whether it can be listened on is found out below. */
bool listener_check(const char *text, char *message, size_t size);
/* Sockets that systemd handed over take the place of the default --listen; others given by name are opened too. False: `message`
 * names the address and the reason, and nothing is left open. */
bool listener_open_all(struct listener_set *set, const struct options_list *listen, char *message, size_t size);
/* Removes our socket files, also from a signal thread. */
void listener_unlink_all(const struct listener_set *set);
/* Closes what is still ours and removes socket files. */
void listener_close_all(struct listener_set *set);

#endif
