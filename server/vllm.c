/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters as vLLM's clients call them: statuses, success texts and error objects are vLLM's, what happens is what /adapters does.
 */
#include "proto-json/proto.h"
#include "server/handlers.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct vllm_call {
    struct proto_vllm_lora lora;
    enum engine_code code;
    struct engine_error error;
};

static void vllm_destroy(struct http_request *r)
{
    struct vllm_call *call = r->work_state;
    proto_vllm_lora_finish(&call->lora);
    free(call);
}

static struct vllm_call *vllm_parse(struct http_request *r, bool load)
{
    size_t length;
    const char *body = http_control_body(r, &length);
    struct proto_error error;
    struct vllm_call *call = calloc(1, sizeof *call);
    if (!call) {
        http_fail_memory(r);
        return NULL;
    }
    r->work_state = call;
    r->work_destroy = vllm_destroy;
    if (proto_vllm_lora_parse(body, length, load, &call->lora, &error) == PROTO_OK) {
        r->adapter = call->lora.lora_name;
        return call;
    }
    http_fail_proto(r, &error);
    return NULL;
}

static void vllm_succeed(struct http_request *r, const char *name, const char *what)
{
    char *text = NULL;
    int length = asprintf(&text, "Success: LoRA adapter '%s' %s successfully.", name, what);
    http_reply(r, 200, "text/plain; charset=utf-8", length < 0 ? NULL : text, length < 0 ? 0 : (size_t)length);
}

static void vllm_load_work(struct http_request *r)
{
    struct vllm_call *call = r->work_state;
    struct engine_adapter_info info;
    bool replaced;
    call->code = engine_adapter_install(server_engine(r->server), call->lora.lora_name, call->lora.lora_path, call->lora.load_inplace,
                                        &info, &replaced, &call->error);
    if (call->code != ENGINE_OK)
        return;
    adapters_log(replaced ? "adapter replaced" : "adapter installed", &info, "path", call->lora.lora_path, r->id);
    engine_adapter_info_finish(&info);
}

static void vllm_load_answer(struct http_request *r)
{
    struct vllm_call *call = r->work_state;
    switch (call->code) {
    case ENGINE_OK: vllm_succeed(r, call->lora.lora_name, "added"); break;
    case ENGINE_ADAPTER_EXISTS:
        http_fail(r, 400, "adapter_exists", "adapter '%s' is loaded already; load_inplace true replaces it", call->lora.lora_name);
        break;
    case ENGINE_NO_FILE: http_fail(r, 404, "adapter_not_found", "%s", call->error.message); break;
    default: http_fail_engine(r, &call->error);
    }
}

void vllm_load(struct http_request *r)
{
    if (vllm_parse(r, true))
        http_offload(r, r->server->workers, vllm_load_work, vllm_load_answer);
}

static void vllm_unload_work(struct http_request *r)
{
    struct vllm_call *call = r->work_state;
    struct engine_adapter_info info;
    call->code = engine_adapter_remove(server_engine(r->server), call->lora.lora_name, 0, &info, &call->error);
    if (call->code != ENGINE_OK)
        return;
    adapters_log("adapter removed", &info, NULL, NULL, r->id);
    engine_adapter_info_finish(&info);
}

static void vllm_unload_answer(struct http_request *r)
{
    struct vllm_call *call = r->work_state;
    if (call->code == ENGINE_OK)
        vllm_succeed(r, call->lora.lora_name, "removed");
    else
        http_fail_engine(r, &call->error);
}

void vllm_unload(struct http_request *r)
{
    if (vllm_parse(r, false))
        http_offload(r, r->server->workers, vllm_unload_work, vllm_unload_answer);
}

static json_t *vllm_card(const struct http_request *r, const char *id, const char *parent, int64_t created)
{
    json_t *path = parent || !r->server->options->model ? NULL : json_string(r->server->options->model); /* NULL, too, if it is not UTF-8 */
    json_t *card =
        json_pack("{s:s, s:s, s:I, s:s, s:s, s:s?, s:n, s:[]}", "id", id, "object", "model", "created", (json_int_t)created, "owned_by",
                  "expertd", "root", path ? json_string_value(path) : id, "parent", parent, "max_model_len", "permission");
    json_decref(path);
    return card;
}

void vllm_models(struct http_request *r)
{
    struct engine_adapter_info *infos = NULL;
    struct engine_error error;
    size_t count = 0;
    if (engine_adapter_list(server_engine(r->server), &infos, &count, &error) != ENGINE_OK) {
        http_fail_engine(r, &error);
        return;
    }
    json_t *list = json_array();
    const char *base = r->server->model_name;
    bool good = json_array_append_new(list, vllm_card(r, base, NULL, r->server->started_at)) == 0;
    for (size_t i = 0; i < count; i++) {
        if (infos[i].state == ENGINE_ADAPTER_READY)
            good = json_array_append_new(list, vllm_card(r, infos[i].name, base, infos[i].installed_at)) == 0 && good;
        engine_adapter_info_finish(&infos[i]);
    }
    free(infos);
    if (!good) {
        json_decref(list);
        http_fail_memory(r);
        return;
    }
    http_reply_json(r, 200, json_pack("{s:s, s:o}", "object", "list", "data", list));
}
