/* SPDX-License-Identifier: Apache-2.0
 *
 * What orchestrators and monitors ask for, and the description of the API.
 */
#include "proto-json/proto.h"
#include "server/handlers.h"
#include "server/openapi.h"

#include <stdlib.h>

void health_live(struct http_request *r) { http_reply_json(r, 200, json_pack("{s:b}", "live", 1)); }

void health_ready(struct http_request *r)
{
    const char *message, *code = server_unready(r->server, &message);
    if (code)
        http_fail(r, 503, code, "%s", message);
    else
        http_reply_json(r, 200, json_pack("{s:b}", "ready", 1));
}

void health_metrics(struct http_request *r)
{
    struct engine *engine = server_engine(r->server);
    struct engine_stats stats;
    struct engine_adapter_info *infos = NULL;
    size_t count = 0, length = 0;
    const char *message;
    struct metrics_sources sources = {
        .model_name = r->server->model_name,
        .ready = !server_unready(r->server, &message),
        .draining = atomic_load(&r->server->phase) == SERVER_DRAINING,
    };
    if (engine) {
        struct engine_error error;
        engine_stats_get(engine, &stats);
        sources.model = engine_model(engine);
        sources.stats = &stats;
        if (engine_adapter_list(engine, &infos, &count, &error) == ENGINE_OK) {
            sources.adapter = infos;
            sources.adapters = count;
        }
    }
    char *text = metrics_render(r->server->metrics, &sources, &length);
    for (size_t i = 0; i < count; i++)
        engine_adapter_info_finish(&infos[i]);
    free(infos);
    http_reply(r, 200, METRICS_CONTENT_TYPE, text, length);
}

void health_openapi(struct http_request *r)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(sizeof openapi_json - 1, (void *)(uintptr_t)openapi_json, MHD_RESPMEM_PERSISTENT);
    if (response)
        MHD_add_response_header(response, "Content-Type", "application/json");
    http_reply_response(r, 200, response, (int64_t)(sizeof openapi_json - 1));
}
