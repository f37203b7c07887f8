/* SPDX-License-Identifier: Apache-2.0
 *
 * PUT /adapters/{name}: a form with the files adapter_config and adapter_model, written to the spool as they arrive, then installed from
 * there. The spool's folder goes with the request, however that ends.
 */
#include "server/handlers.h"
#include "server/multipart.h"
#include "server/spool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UPLOAD_MAX_AT_ONCE 4
#define UPLOAD_FORM_BYTES (64 << 10) /* boundaries and headers, beside the files */
#define UPLOAD_FILES 2

static const char *const upload_field[UPLOAD_FILES] = {"adapter_config", "adapter_model"};
static const char *const upload_file[UPLOAD_FILES] = {"adapter_config.json", "adapter_model.safetensors"};

struct upload {
    struct http_request *r;
    struct spool_entry entry;
    bool spooled, counted;
    struct multipart *form;
    int fd; /* the file being written, or -1 */
    bool seen[UPLOAD_FILES];
    enum engine_code code;
    struct engine_error error;
    struct engine_adapter_info info;
    bool have_info, replaced;
};

static void upload_fail_io(struct http_request *r)
{
    http_fail(r, 500, "internal", "the upload can't be written to --spool-dir: %s", strerror(errno));
}

static bool upload_part_begin(void *arg, const char *name)
{
    struct upload *u = arg;
    for (int i = 0; i < UPLOAD_FILES; i++) {
        if (strcmp(name, upload_field[i]) != 0)
            continue;
        if (u->seen[i]) {
            http_fail(u->r, 400, "bad_request", "the form has the field %s twice", name);
            return false;
        }
        u->seen[i] = true;
        u->fd = openat(u->entry.dir_fd, upload_file[i], O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (u->fd < 0)
            upload_fail_io(u->r);
        return u->fd >= 0;
    }
    http_fail(u->r, 400, "bad_request", "the form has an unknown field \"%s\"; it takes adapter_config and adapter_model", name);
    return false;
}

static bool upload_part_data(void *arg, const char *data, size_t size)
{
    struct upload *u = arg;
    while (size) {
        ssize_t n = write(u->fd, data, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            upload_fail_io(u->r);
            return false;
        }
        data += n;
        size -= (size_t)n;
    }
    return true;
}

static bool upload_part_end(void *arg)
{
    struct upload *u = arg;
    int failed = close(u->fd);
    u->fd = -1;
    if (failed)
        upload_fail_io(u->r);
    return !failed;
}

/* Empties the spool as soon as nothing reads it, before the client is answered. */
static void upload_discard(struct http_request *r, struct upload *u)
{
    if (u->fd >= 0)
        close(u->fd);
    u->fd = -1;
    if (u->spooled)
        spool_close(r->server->spool, &u->entry);
    u->spooled = false;
}

static int64_t upload_limit(const struct http_request *r) { return r->server->options->max_adapter_bytes + UPLOAD_FORM_BYTES; }

static bool upload_begin(struct http_request *r)
{
    const char *name = r->segment[1];
    if (!engine_adapter_name_valid(name, strlen(name))) {
        http_fail(r, 400, "bad_request", "\"%.128s\" is not an adapter's name: 1 to %d of A-Z a-z 0-9 . _ - and / inside", name,
                  ENGINE_ADAPTER_NAME_MAX);
        return false;
    }
    if (r->length > upload_limit(r)) {
        http_fail(r, 413, "too_large", "the upload has %" PRId64 " bytes; --max-adapter-bytes allows %" PRId64, r->length,
                  r->server->options->max_adapter_bytes);
        return false;
    }
    struct upload *u = calloc(1, sizeof *u);
    if (!u) {
        http_fail_memory(r);
        return false;
    }
    r->state = u;
    u->r = r;
    u->fd = -1;
    bool memory;
    u->form = multipart_create(http_header(r, "Content-Type"),
                               &(struct multipart_sink){upload_part_begin, upload_part_data, upload_part_end, u}, &memory);
    if (!u->form) {
        if (memory)
            http_fail_memory(r);
        else
            http_fail(r, 415, "unsupported_media_type", "an upload is multipart/form-data with a boundary");
        return false;
    }
    u->counted = true;
    if (atomic_fetch_add(&r->server->uploads, 1) >= UPLOAD_MAX_AT_ONCE) {
        http_fail(r, 429, "queue_full", "%d uploads are being received already", UPLOAD_MAX_AT_ONCE);
        return false;
    }
    u->spooled = spool_open(r->server->spool, &u->entry);
    if (!u->spooled)
        upload_fail_io(r);
    return u->spooled;
}

static bool upload_data(struct http_request *r, const char *data, size_t size)
{
    struct upload *u = r->state;
    if (r->received > upload_limit(r)) {
        http_fail(r, 413, "too_large", "the upload has more bytes than --max-adapter-bytes allows, %" PRId64,
                  r->server->options->max_adapter_bytes);
        upload_discard(r, u);
        return false;
    }
    if (multipart_feed(u->form, data, size))
        return true;
    if (!r->status)
        http_fail(r, 400, "bad_request", "the form is malformed: %s", multipart_error(u->form));
    upload_discard(r, u);
    return false;
}

static void upload_destroy(struct http_request *r)
{
    struct upload *u = r->state;
    if (!u)
        return;
    if (u->have_info)
        engine_adapter_info_finish(&u->info);
    upload_discard(r, u);
    if (u->counted)
        atomic_fetch_sub(&r->server->uploads, 1);
    multipart_destroy(u->form);
    free(u);
}

const struct http_body_ops upload_body = {upload_begin, upload_data, upload_destroy};

static void upload_work(struct http_request *r)
{
    struct upload *u = r->state;
    u->code = engine_adapter_install_fd(server_engine(r->server), r->segment[1], u->entry.dir_fd, true, &u->info, &u->replaced, &u->error);
    u->have_info = u->code == ENGINE_OK;
    if (u->have_info)
        adapters_log(u->replaced ? "adapter replaced" : "adapter installed", &u->info, "upload", NULL, r->id);
    upload_discard(r, u);
}

static void upload_answer(struct http_request *r)
{
    struct upload *u = r->state;
    if (u->code == ENGINE_OK)
        http_reply_json(r, u->replaced ? 200 : 201, adapters_info_json(&u->info));
    else
        http_fail_engine(r, &u->error);
}

void upload_handle(struct http_request *r)
{
    struct upload *u = r->state;
    const char *missing = !u->seen[0] ? upload_field[0] : !u->seen[1] ? upload_field[1] : NULL;
    if (multipart_complete(u->form) && !missing) {
        http_offload(r, r->server->workers, upload_work, upload_answer);
        return;
    }
    if (!multipart_complete(u->form))
        http_fail(r, 400, "bad_request", "the form ends before its closing boundary");
    else
        http_fail(r, 400, "bad_request", "the form lacks the field %s", missing);
    upload_discard(r, u);
}
