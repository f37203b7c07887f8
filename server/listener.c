/* SPDX-License-Identifier: Apache-2.0
 *
 * Addresses to listening sockets. A socket file in the way is removed only if it is a socket on which nobody answers, and a file of ours
 * is removed at exit only if it is still the one we made.
 */
#include "server/listener.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define LISTENER_DEFAULT "127.0.0.1:8080"
#define LISTENER_FIRST_FD 3 /* systemd's convention */
#define LISTENER_HOST_SIZE 256
#define LISTENER_PORT_MAX 65535

static bool listener_fail(char *message, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool listener_fail(char *message, size_t size, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, size, format, args);
    va_end(args);
    return false;
}

/* Fills text and local from the bound address. */
static void listener_describe(struct listener *l)
{
    union {
        struct sockaddr_storage storage;
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un un;
    } a = {0};
    socklen_t length = sizeof a;
    char host[INET6_ADDRSTRLEN];
    getsockname(l->fd, &a.any, &length);
    switch (a.any.sa_family) {
    case AF_INET:
        inet_ntop(AF_INET, &a.v4.sin_addr, host, sizeof host);
        snprintf(l->text, sizeof l->text, "http://%s:%u", host, ntohs(a.v4.sin_port));
        l->local = ntohl(a.v4.sin_addr.s_addr) >> 24 == 127;
        l->tcp = true;
        break;
    case AF_INET6:
        inet_ntop(AF_INET6, &a.v6.sin6_addr, host, sizeof host);
        snprintf(l->text, sizeof l->text, "http://[%s]:%u", host, ntohs(a.v6.sin6_port));
        l->local = IN6_IS_ADDR_LOOPBACK(&a.v6.sin6_addr);
        l->tcp = true;
        break;
    case AF_UNIX:
        if (length > offsetof(struct sockaddr_un, sun_path) && a.un.sun_path[0] == '\0')
            snprintf(l->text, sizeof l->text, "unix:@%.*s", (int)(length - offsetof(struct sockaddr_un, sun_path) - 1), a.un.sun_path + 1);
        else
            snprintf(l->text, sizeof l->text, "unix:%.*s", (int)sizeof a.un.sun_path, a.un.sun_path);
        l->local = true;
        break;
    default: snprintf(l->text, sizeof l->text, "family %d", a.any.sa_family);
    }
}

static bool listener_check_unix(const char *path, char *message, size_t size)
{
    const size_t most = sizeof((struct sockaddr_un *)NULL)->sun_path - 1;
    if (*path && strlen(path) <= most)
        return true;
    return listener_fail(message, size, "--listen unix:%s: a socket's path has 1 to %zu bytes", path, most);
}

static bool listener_open_unix(struct listener *l, const char *path, char *message, size_t size)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct stat st;
    if (!listener_check_unix(path, message, size))
        return false;
    memcpy(a.sun_path, path, strlen(path) + 1);
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return listener_fail(message, size, "--listen unix:%s: %s", path, strerror(errno));
    if (lstat(path, &st) == 0) {
        if (!S_ISSOCK(st.st_mode))
            return listener_fail(message, size, "--listen unix:%s: the file exists and is not a socket", path);
        int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        bool dead = probe >= 0 && connect(probe, (struct sockaddr *)&a, sizeof a) != 0 && errno == ECONNREFUSED;
        if (probe >= 0)
            close(probe);
        if (!dead)
            return listener_fail(message, size, "--listen unix:%s: another process listens there", path);
        if (unlink(path) != 0 && errno != ENOENT)
            return listener_fail(message, size, "--listen unix:%s: %s", path, strerror(errno));
    }
    mode_t before = umask(0117); /* for the owner and the group */
    int bound = bind(l->fd, (struct sockaddr *)&a, sizeof a), error = errno;
    umask(before);
    if (bound != 0)
        return listener_fail(message, size, "--listen unix:%s: %s", path, strerror(error));
    if (lstat(path, &st) == 0) {
        l->device = st.st_dev;
        l->inode = st.st_ino;
        char *real = realpath(path, NULL); /* the working directory may change */
        l->unlink_path = real ? real : strdup(path);
    }
    if (listen(l->fd, SOMAXCONN) != 0)
        return listener_fail(message, size, "--listen unix:%s: %s", path, strerror(errno));
    return true;
}

/* The host, without brackets, and where the port begins in `text`. */
static bool listener_split(const char *text, char host[LISTENER_HOST_SIZE], const char **port, char *message, size_t size)
{
    const char *colon = strrchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : 0;
    if (!colon || !colon[1] || length >= LISTENER_HOST_SIZE || strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return listener_fail(message, size, "--listen %s: wanted HOST:PORT, [V6]:PORT or unix:PATH", text);
    if (strlen(colon + 1) > 5 || atoi(colon + 1) > LISTENER_PORT_MAX)
        return listener_fail(message, size, "--listen %s: a port is 0 to %d, where 0 takes any that is free", text, LISTENER_PORT_MAX);
    memcpy(host, text, length);
    host[length] = '\0';
    if (host[0] == '[' && length > 2 && host[length - 1] == ']') {
        memmove(host, host + 1, length - 2);
        host[length - 2] = '\0';
    } else if (strpbrk(host, "[]:")) {
        return listener_fail(message, size, "--listen %s: write an IPv6 address in brackets", text);
    }
    *port = colon + 1;
    return true;
}

static bool listener_open_tcp(struct listener *l, const char *text, char *message, size_t size)
{
    char host[LISTENER_HOST_SIZE];
    const char *port = NULL;
    if (!listener_split(text, host, &port, message, size))
        return false;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *found = NULL;
    bool any = !host[0] || strcmp(host, "*") == 0;
    int code = getaddrinfo(any ? NULL : host, port, &hints, &found);
    if (code)
        return listener_fail(message, size, "--listen %s: %s", text, gai_strerror(code));
    l->fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int one = 1, error = 0;
    if (l->fd < 0 || setsockopt(l->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        (found->ai_family == AF_INET6 && setsockopt(l->fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one) != 0) ||
        setsockopt(l->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0 || bind(l->fd, found->ai_addr, found->ai_addrlen) != 0 ||
        listen(l->fd, SOMAXCONN) != 0)
        error = errno;
    freeaddrinfo(found);
    return error ? listener_fail(message, size, "--listen %s: %s", text, strerror(error)) : true;
}

bool listener_check(const char *text, char *message, size_t size)
{
    char host[LISTENER_HOST_SIZE];
    const char *port;
    if (strncmp(text, "unix:", 5) == 0)
        return listener_check_unix(text + 5, message, size);
    return listener_split(text, host, &port, message, size);
}

/* LISTEN_FDS for this process: sockets that already listen. */
static bool listener_take_handed(struct listener_set *set, char *message, size_t size)
{
    const char *pid = getenv("LISTEN_PID"), *fds = getenv("LISTEN_FDS");
    long count = pid && fds && strtol(pid, NULL, 10) == (long)getpid() ? strtol(fds, NULL, 10) : 0;
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
    unsetenv("LISTEN_FDNAMES");
    if (count < 0 || count > OPTIONS_MAX_LIST)
        return listener_fail(message, size, "LISTEN_FDS is %ld; at most %d sockets can be handed over", count, OPTIONS_MAX_LIST);
    for (long i = 0; i < count; i++) {
        int fd = LISTENER_FIRST_FD + (int)i, listening = 0;
        socklen_t length = sizeof listening;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0 || !listening)
            return listener_fail(message, size, "descriptor %d was handed over by the service manager but is not a listening socket", fd);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
        struct listener *l = &set->item[set->count++];
        *l = (struct listener){.fd = fd};
        listener_describe(l);
    }
    return true;
}

bool listener_open_all(struct listener_set *set, const struct options_list *wanted, char *message, size_t size)
{
    memset(set, 0, sizeof *set);
    bool good = listener_take_handed(set, message, size);
    bool only_default = wanted->count == 1 && strcmp(wanted->item[0], LISTENER_DEFAULT) == 0;
    for (size_t i = 0; good && i < wanted->count && !(set->count && only_default); i++) {
        struct listener *l = &set->item[set->count++];
        *l = (struct listener){.fd = -1};
        const char *text = wanted->item[i];
        good = strncmp(text, "unix:", 5) == 0 ? listener_open_unix(l, text + 5, message, size) : listener_open_tcp(l, text, message, size);
        if (good)
            listener_describe(l);
    }
    if (!good)
        listener_close_all(set);
    return good;
}

void listener_unlink_all(const struct listener_set *set)
{
    for (size_t i = 0; i < set->count; i++) {
        const struct listener *l = &set->item[i];
        struct stat st;
        if (l->unlink_path && lstat(l->unlink_path, &st) == 0 && st.st_dev == l->device && st.st_ino == l->inode)
            unlink(l->unlink_path);
    }
}

void listener_close_all(struct listener_set *set)
{
    listener_unlink_all(set);
    for (size_t i = 0; i < set->count; i++) {
        if (set->item[i].fd >= 0)
            close(set->item[i].fd);
        free(set->item[i].unlink_path);
    }
    set->count = 0;
}
