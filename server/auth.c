/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys from files, compared in a time that depends on the length of what the caller sent only.
 */
#include "server/auth.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define KEY_MAX 4096
#define KEY_PATIENCE_MS 1000

struct key {
    size_t length; /* 0: no such key is set */
    char text[KEY_MAX];
};

struct keys {
    struct key api, admin;
};

struct auth {
    pthread_rwlock_t lock;
    struct keys keys;
    bool metrics_open;
};

static enum engine_code auth_read_key(struct key *key, const char *path, struct engine_error *error)
{
    if (!path)
        return ENGINE_OK;
    /* A shell's <(...) is a pipe, whose writer may be slow or not there: that must not hold up the thread that takes signals. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK), ready = 1;
    ssize_t got = 0;
    size_t have = 0;
    while (fd >= 0 && have < sizeof key->text && (ready = poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, KEY_PATIENCE_MS)) > 0 &&
           (got = read(fd, key->text + have, sizeof key->text - have)) > 0)
        have += (size_t)got;
    if (fd >= 0 && !ready) {
        close(fd);
        return engine_fail(error, ENGINE_BAD_OPTION, "key file %s: nothing came from it within %d ms", path, KEY_PATIENCE_MS);
    }
    if (fd < 0 || got < 0 || ready < 0) {
        int number = errno;
        if (fd >= 0)
            close(fd);
        return engine_fail(error, engine_errno_code(number), "key file %s: %s", path, strerror(number));
    }
    close(fd);
    if (have == sizeof key->text)
        return engine_fail(error, ENGINE_BAD_OPTION, "key file %s: a key has at most %d bytes", path, KEY_MAX - 1);
    while (have && strchr(" \t\r\n", key->text[have - 1]))
        have--;
    if (!have)
        return engine_fail(error, ENGINE_BAD_OPTION, "key file %s is empty", path);
    for (size_t i = 0; i < have; i++)
        if (key->text[i] <= ' ' || key->text[i] > '~')
            return engine_fail(error, ENGINE_BAD_OPTION, "key file %s: byte %zu is not printable ASCII", path, i);
    key->length = have;
    return ENGINE_OK;
}

enum engine_code auth_create(const char *api_key_file, const char *admin_key_file, bool metrics_open, struct auth **out,
                             struct engine_error *error)
{
    struct auth *auth = calloc(1, sizeof *auth);
    if (!auth)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for keys");
    auth->metrics_open = metrics_open;
    pthread_rwlock_init(&auth->lock, NULL);
    enum engine_code code = auth_reload(auth, api_key_file, admin_key_file, error);
    if (code != ENGINE_OK) {
        auth_destroy(auth);
        return code;
    }
    *out = auth;
    return ENGINE_OK;
}

enum engine_code auth_reload(struct auth *auth, const char *api_key_file, const char *admin_key_file, struct engine_error *error)
{
    struct keys keys = {0};
    enum engine_code code = auth_read_key(&keys.api, api_key_file, error);
    if (code == ENGINE_OK)
        code = auth_read_key(&keys.admin, admin_key_file, error);
    if (code == ENGINE_OK) {
        pthread_rwlock_wrlock(&auth->lock);
        auth->keys = keys;
        pthread_rwlock_unlock(&auth->lock);
    }
    explicit_bzero(&keys, sizeof keys);
    return code;
}

void auth_destroy(struct auth *auth)
{
    if (!auth)
        return;
    pthread_rwlock_destroy(&auth->lock);
    explicit_bzero(auth, sizeof *auth);
    free(auth);
}

static bool auth_key_equal(const struct key *key, const char *text, size_t length)
{
    if (!key->length)
        return false;
    unsigned different = key->length != length;
    for (size_t i = 0, k = 0; i < length; i++) {
        different |= (unsigned char)text[i] ^ (unsigned char)key->text[k];
        k = k + 1 == key->length ? 0 : k + 1;
    }
    return !different;
}

static enum auth_result auth_check_keys(const struct keys *keys, enum auth_level level, const char *header, bool local)
{
    if (level == AUTH_DATA && !keys->api.length)
        return AUTH_ALLOWED;
    if (level == AUTH_ADMIN && !keys->admin.length)
        return local ? AUTH_ALLOWED : AUTH_NOT_LOCAL;

    if (!header || strncasecmp(header, "Bearer ", 7) != 0)
        return AUTH_NO_KEY;
    header += 7;
    header += strspn(header, " ");
    size_t length = strlen(header);
    bool api = auth_key_equal(&keys->api, header, length), admin = auth_key_equal(&keys->admin, header, length);
    if (admin || (api && level == AUTH_DATA))
        return AUTH_ALLOWED;
    return api ? AUTH_NOT_ADMIN : AUTH_WRONG_KEY;
}

enum auth_result auth_check(struct auth *auth, enum auth_level level, const char *header, bool local)
{
    if (level == AUTH_METRICS)
        level = auth->metrics_open ? AUTH_OPEN : AUTH_DATA;
    if (level == AUTH_OPEN)
        return AUTH_ALLOWED;
    pthread_rwlock_rdlock(&auth->lock);
    enum auth_result result = auth_check_keys(&auth->keys, level, header, local);
    pthread_rwlock_unlock(&auth->lock);
    return result;
}
