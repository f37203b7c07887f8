/* SPDX-License-Identifier: Apache-2.0
 *
 * /adapters: list, show, install from a folder under --adapter-root, remove.
 */
#include "proto-json/proto.h"
#include "server/handlers.h"
#include "server/log.h"

#include <stdlib.h>
#include <string.h>

#define ADAPTERS_WAIT_MAX_S 60

/* A call that waits for a worker. */
struct adapters_call {
    char *name, *path;
    bool replace;
    int64_t wait_ms;
    enum engine_code code;
    struct engine_error error;
    struct engine_adapter_info info;
    bool have_info, replaced;
};

static const char *adapters_state_name(enum engine_adapter_state state)
{
    return state == ENGINE_ADAPTER_READY ? "ready" : state == ENGINE_ADAPTER_DRAINING ? "draining" : "removed";
}

json_t *adapters_info_json(const struct engine_adapter_info *info)
{
    struct proto_adapter a = {
        .name = info->name,
        .state = adapters_state_name(info->state),
        .id = info->id,
        .rank = info->rank,
        .layers = info->layers,
        .layer_count = (size_t)info->layer_count,
        .experts = info->experts,
        .gate = info->gate,
        .up = info->up,
        .down = info->down,
        .tensors = info->tensors,
        .ignored = info->ignored,
        .warnings = info->warnings,
        .warning_count = (size_t)info->warning_count,
        .bytes = info->bytes,
        .in_flight = info->in_flight,
        .rows_served = info->rows_served,
        .installed_at = info->installed_at,
    };
    return proto_adapter_json(&a);
}

void adapters_log(const char *what, const struct engine_adapter_info *info, const char *source, const char *path, const char *request_id)
{
    struct log_field field[8] = {
        {"adapter", info->name, 0},
        {"id", NULL, info->id},
        {"rank", NULL, info->rank},
        {"bytes", NULL, info->bytes},
        {"state", adapters_state_name(info->state), 0},
    };
    size_t count = 5;
    if (source)
        field[count++] = (struct log_field){"source", source, 0};
    if (path)
        field[count++] = (struct log_field){"path", path, 0};
    if (request_id)
        field[count++] = (struct log_field){"request_id", request_id, 0};
    log_event(LOG_LEVEL_INFO, what, field, count);
}

void adapters_list(struct http_request *r)
{
    struct engine_adapter_info *infos = NULL;
    struct engine_error error;
    size_t count = 0;
    if (engine_adapter_list(server_engine(r->server), &infos, &count, &error) != ENGINE_OK) {
        http_fail_engine(r, &error);
        return;
    }
    json_t *list = json_array(), *root = json_object();
    bool good = list && root;
    for (size_t i = 0; i < count; i++) {
        good = good && json_array_append_new(list, adapters_info_json(&infos[i])) == 0;
        engine_adapter_info_finish(&infos[i]);
    }
    free(infos);
    if (json_object_set_new(root, "adapters", list) != 0)
        good = false;
    if (!good) {
        json_decref(root);
        root = NULL;
    }
    http_reply_json(r, 200, root);
}

void adapters_show(struct http_request *r)
{
    struct engine_adapter_info info;
    struct engine_error error;
    if (engine_adapter_show(server_engine(r->server), r->segment[1], &info, &error) != ENGINE_OK) {
        http_fail_engine(r, &error);
        return;
    }
    http_reply_json(r, 200, adapters_info_json(&info));
    engine_adapter_info_finish(&info);
}

static void adapters_call_destroy(struct http_request *r)
{
    struct adapters_call *call = r->work_state;
    if (!call)
        return;
    if (call->have_info)
        engine_adapter_info_finish(&call->info);
    free(call->name);
    free(call->path);
    free(call);
    r->work_state = NULL;
}

static struct adapters_call *adapters_call_create(struct http_request *r)
{
    struct adapters_call *call = calloc(1, sizeof *call);
    if (!call) {
        http_fail_memory(r);
        return NULL;
    }
    r->work_state = call;
    r->work_destroy = adapters_call_destroy;
    return call;
}

static void adapters_answer(struct http_request *r)
{
    struct adapters_call *call = r->work_state;
    if (call->code == ENGINE_OK)
        http_reply_json(r, call->replaced || r->method->name[0] == 'D' ? 200 : 201, adapters_info_json(&call->info));
    else if (call->code == ENGINE_NO_FILE) /* of the caller's folder, not of ours */
        http_fail(r, 400, "bad_adapter", "%s", call->error.message);
    else if (call->code == ENGINE_ADAPTER_EXISTS)
        http_fail(r, 409, "adapter_exists", "%s; \"replace\": true replaces it, and an upload by PUT /adapters/{name} does, too",
                  call->error.message);
    else
        http_fail_engine(r, &call->error);
}

static void adapters_install_work(struct http_request *r)
{
    struct adapters_call *call = r->work_state;
    call->code =
        engine_adapter_install(server_engine(r->server), call->name, call->path, call->replace, &call->info, &call->replaced, &call->error);
    call->have_info = call->code == ENGINE_OK;
    if (call->have_info)
        adapters_log(call->replaced ? "adapter replaced" : "adapter installed", &call->info, "path", call->path, r->id);
}

void adapters_install(struct http_request *r)
{
    size_t length;
    const char *body = http_control_body(r, &length);
    struct proto_install install;
    struct proto_error error;
    if (proto_install_parse(body, length, &install, &error) != PROTO_OK) {
        http_fail_proto(r, &error);
        return;
    }
    struct adapters_call *call = adapters_call_create(r);
    if (call) {
        call->name = install.name;
        call->path = install.path;
        call->replace = install.replace;
        r->adapter = call->name;
        install.name = install.path = NULL;
        http_offload(r, r->server->workers, adapters_install_work, adapters_answer);
    }
    proto_install_finish(&install);
}

static void adapters_remove_work(struct http_request *r)
{
    struct adapters_call *call = r->work_state;
    call->code = engine_adapter_remove(server_engine(r->server), r->segment[1], call->wait_ms, &call->info, &call->error);
    call->have_info = call->code == ENGINE_OK;
    if (call->have_info)
        adapters_log("adapter removed", &call->info, NULL, NULL, r->id);
}

void adapters_remove(struct http_request *r)
{
    char *wait = http_query(r, "wait");
    long seconds = 0;
    if (wait) {
        size_t digits = strspn(wait, "0123456789");
        seconds = digits && !wait[digits] && digits < 4 ? strtol(wait, NULL, 10) : -1;
        if (seconds < 0 || seconds > ADAPTERS_WAIT_MAX_S)
            http_fail(r, 400, "bad_request", "wait is \"%.32s\"; it must be 0 to %d seconds", wait, ADAPTERS_WAIT_MAX_S);
        free(wait);
    }
    struct adapters_call *call = r->status ? NULL : adapters_call_create(r);
    if (!call)
        return;
    call->wait_ms = seconds * 1000;
    http_offload(r, seconds ? r->server->waiters : r->server->workers, adapters_remove_work, adapters_answer);
}
