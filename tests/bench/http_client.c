/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/http_client.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define HEAD_MAX 16384
#define TIMEOUT_S 120 /* for connecting, and for each piece sent or received */

bool http_client_init(struct http_client *client, const char *url, const char *key)
{
    memset(client, 0, sizeof *client);
    client->fd = -1;
    if (key)
        snprintf(client->authorization, sizeof client->authorization, "Authorization: Bearer %s\r\n", key);
    if (!strncmp(url, "unix:", 5)) {
        size_t n = strlen(url + 5);
        if (n == 0 || n >= sizeof client->path)
            return false;
        memcpy(client->path, url + 5, n);
        snprintf(client->host, sizeof client->host, "localhost");
        return true;
    }
    if (strncmp(url, "http://", 7))
        return false;
    const char *host = url + 7, *end = strchr(host, '/');
    size_t n = end ? (size_t)(end - host) : strlen(host);
    const char *colon = memrchr(host, ':', n);
    if (!colon || memchr(colon, ']', n - (size_t)(colon - host)))
        return false;
    size_t host_length = (size_t)(colon - host), port_length = n - host_length - 1;
    if (host[0] == '[' && host_length > 2)
        host++, host_length -= 2;
    if (!host_length || host_length >= sizeof client->host || !port_length || port_length >= sizeof client->port)
        return false;
    memcpy(client->host, host, host_length);
    memcpy(client->port, colon + 1, port_length);
    return true;
}

void http_client_finish(struct http_client *client)
{
    if (client->fd >= 0)
        close(client->fd);
    free(client->buffer);
    client->fd = -1;
    client->buffer = NULL;
}

static void set_limits(int fd)
{
    struct timeval limit = {.tv_sec = TIMEOUT_S};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit); /* of connect, too */
}

static int open_unix(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    set_limits(fd);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

static int open_tcp(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list;
    if (getaddrinfo(host, port, &hints, &list))
        return -1;
    int fd = -1, one = 1;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
        if (fd < 0)
            continue;
        set_limits(fd);
        if (connect(fd, a->ai_addr, a->ai_addrlen)) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    if (fd >= 0)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static bool client_connect(struct http_client *client)
{
    client->fd = client->path[0] ? open_unix(client->path) : open_tcp(client->host, client->port);
    return client->fd >= 0;
}

static bool send_all(int fd, struct iovec *piece, int pieces)
{
    while (pieces) {
        struct msghdr message = {.msg_iov = piece, .msg_iovlen = (size_t)pieces};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        while (pieces && (size_t)sent >= piece->iov_len) {
            sent -= (ssize_t)piece->iov_len;
            piece++, pieces--;
        }
        if (pieces) {
            piece->iov_base = (char *)piece->iov_base + sent;
            piece->iov_len -= (size_t)sent;
        }
    }
    return true;
}

static bool reserve(struct http_client *client, size_t bytes)
{
    if (bytes <= client->capacity)
        return true;
    char *grown = realloc(client->buffer, bytes);
    if (!grown)
        return false;
    client->buffer = grown;
    client->capacity = bytes;
    return true;
}

/* Value of a header in a head that ends with an empty line; -1: absent. */
static long header_number(const char *head, const char *name)
{
    size_t n = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line && line[2] != '\r'; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, n) && line[2 + n] == ':')
            return strtol(line + 3 + n, NULL, 10);
    return -1;
}

static bool header_closes(const char *head)
{
    for (const char *line = strstr(head, "\r\n"); line && line[2] != '\r'; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, "connection: close", 17))
            return true;
    return false;
}

static bool receive_reply(struct http_client *client, bool head_only, struct http_reply *reply)
{
    if (!reserve(client, HEAD_MAX + 1))
        return false;
    size_t got = 0;
    char *end = NULL;
    while (!end) {
        ssize_t n = got < HEAD_MAX ? recv(client->fd, client->buffer + got, HEAD_MAX - got, 0) : 0;
        if (n <= 0)
            return false;
        got += (size_t)n;
        client->buffer[got] = 0;
        end = strstr(client->buffer, "\r\n\r\n");
    }
    size_t head = (size_t)(end - client->buffer) + 4;
    char saved = client->buffer[head];
    client->buffer[head] = 0;
    long length = header_number(client->buffer, "content-length"), json = header_number(client->buffer, "inference-header-content-length");
    bool closes = header_closes(client->buffer);
    reply->status = strncmp(client->buffer, "HTTP/1.1 ", 9) ? 0 : atoi(client->buffer + 9);
    client->buffer[head] = saved;
    if (length < 0 || !reply->status || !reserve(client, head + (size_t)length + 1))
        return false;
    for (size_t want = head + (head_only ? 0 : (size_t)length); got < want;) {
        ssize_t n = recv(client->fd, client->buffer + got, want - got, 0);
        if (n <= 0)
            return false;
        got += (size_t)n;
    }
    client->buffer[got] = 0;
    reply->body = client->buffer + head;
    reply->length = (size_t)length;
    reply->json_length = json >= 0 && (size_t)json <= reply->length ? (size_t)json : reply->length;
    if (closes) {
        close(client->fd);
        client->fd = -1;
    }
    return true;
}

bool http_client_call(struct http_client *client, const char *method, const char *target, const void *body, size_t length, long json_length,
                      struct http_reply *reply)
{
    errno = 0;
    if (client->fd < 0 && !client_connect(client)) {
        client->failure = errno == EINPROGRESS || errno == ETIMEDOUT ? HTTP_TIMED_OUT : HTTP_NO_CONNECTION; /* EINPROGRESS: SO_SNDTIMEO's */
        return false;
    }
    char head[1024], inference[64] = "";
    if (json_length >= 0)
        snprintf(inference, sizeof inference, "Inference-Header-Content-Length: %ld\r\n", json_length);
    int n = snprintf(head, sizeof head, "%s %s HTTP/1.1\r\nHost: %s\r\n%s%sContent-Length: %zu\r\n\r\n", method, target, client->host,
                     client->authorization, inference, body ? length : 0);
    struct iovec piece[2] = {{head, (size_t)n}, {(void *)(size_t)body, length}};
    errno = 0;
    if (n >= (int)sizeof head || !send_all(client->fd, piece, body ? 2 : 1) || !receive_reply(client, !strcmp(method, "HEAD"), reply)) {
        client->failure = errno == EAGAIN || errno == EWOULDBLOCK ? HTTP_TIMED_OUT : HTTP_CUT_OFF;
        close(client->fd);
        client->fd = -1;
        return false;
    }
    return true;
}
