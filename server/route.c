/* SPDX-License-Identifier: Apache-2.0 */
#include "server/route.h"

#include "server/handlers.h"

#include <stdio.h>
#include <string.h>

#define GET(level, handler)                                                                                                                \
    {                                                                                                                                      \
        {                                                                                                                                  \
            "GET", level, false, NULL, handler                                                                                             \
        }                                                                                                                                  \
    }
#define GET_ALWAYS(level, handler)                                                                                                         \
    {                                                                                                                                      \
        {                                                                                                                                  \
            "GET", level, true, NULL, handler                                                                                              \
        }                                                                                                                                  \
    }
#define POST(level, body, handler)                                                                                                         \
    {                                                                                                                                      \
        {                                                                                                                                  \
            "POST", level, false, body, handler                                                                                            \
        }                                                                                                                                  \
    }

/* Literal patterns stand before those that match any segment. */
const struct http_route route_table[] = {
    {"/adapters",
     false,
     {{"GET", AUTH_DATA, false, NULL, adapters_list}, {"POST", AUTH_ADMIN, false, &http_body_control, adapters_install}}},
    {"/adapters/{}",
     false,
     {{"GET", AUTH_DATA, false, NULL, adapters_show},
      {"PUT", AUTH_ADMIN, false, &upload_body, upload_handle},
      {"DELETE", AUTH_ADMIN, false, NULL, adapters_remove}}},
    {"/health/live", false, GET_ALWAYS(AUTH_OPEN, health_live)},
    {"/health/ready", false, GET_ALWAYS(AUTH_OPEN, health_ready)},
    {"/metrics", false, GET_ALWAYS(AUTH_METRICS, health_metrics)},
    {"/moe/forward", false, POST(AUTH_DATA, &forward_body, forward_handle)},
    {"/moe/model", false, GET(AUTH_DATA, model_moe)},
    {"/openapi.json", false, GET_ALWAYS(AUTH_DATA, health_openapi)},
    {"/v1/load_lora_adapter", true, POST(AUTH_ADMIN, &http_body_control, vllm_load)},
    {"/v1/models", true, GET(AUTH_DATA, vllm_models)},
    {"/v1/unload_lora_adapter", true, POST(AUTH_ADMIN, &http_body_control, vllm_unload)},
    {"/v2", false, GET_ALWAYS(AUTH_DATA, model_server)},
    {"/v2/", false, GET_ALWAYS(AUTH_DATA, model_server)},
    {"/v2/health/live", false, GET_ALWAYS(AUTH_OPEN, health_live)},
    {"/v2/health/ready", false, GET_ALWAYS(AUTH_OPEN, health_ready)},
    {"/v2/models/stats", false, GET(AUTH_DATA, model_stats)},
    {"/v2/models/{}", false, GET(AUTH_DATA, model_metadata)},
    {"/v2/models/{}/config", false, GET(AUTH_DATA, model_config)},
    {"/v2/models/{}/infer", false, POST(AUTH_DATA, &forward_body, forward_handle)},
    {"/v2/models/{}/ready", false, GET_ALWAYS(AUTH_DATA, model_ready)},
    {"/v2/models/{}/stats", false, GET(AUTH_DATA, model_stats)},
    {"/v2/models/{}/versions/{}", false, GET(AUTH_DATA, model_metadata)},
    {"/v2/models/{}/versions/{}/config", false, GET(AUTH_DATA, model_config)},
    {"/v2/models/{}/versions/{}/infer", false, POST(AUTH_DATA, &forward_body, forward_handle)},
    {"/v2/models/{}/versions/{}/ready", false, GET_ALWAYS(AUTH_DATA, model_ready)},
    {"/v2/models/{}/versions/{}/stats", false, GET(AUTH_DATA, model_stats)},
    {"/v2/repository/index", false, POST(AUTH_ADMIN, &http_body_control, model_index)},
    {"other", false, {{0}}},
};
const size_t route_count = sizeof route_table / sizeof route_table[0] - 1;

static bool route_matches(const char *pattern, char *const *segment, size_t segments)
{
    for (size_t i = 0; i < segments; i++) {
        if (*pattern++ != '/')
            return false;
        size_t length = strcspn(pattern, "/");
        bool any = length == 2 && memcmp(pattern, "{}", 2) == 0;
        if (any ? !*segment[i] : strlen(segment[i]) != length || memcmp(segment[i], pattern, length) != 0)
            return false;
        pattern += length;
    }
    return !*pattern;
}

const struct http_route *route_find(char *const *segment, size_t segments)
{
    for (size_t i = 0; segments && i < route_count; i++)
        if (route_matches(route_table[i].pattern, segment, segments))
            return &route_table[i];
    return NULL;
}

const struct http_method *route_find_method(const struct http_route *route, const char *name, char *allow)
{
    const char *wanted = strcmp(name, "HEAD") == 0 ? "GET" : name;
    size_t used = 0;
    for (size_t i = 0; i < sizeof route->method / sizeof route->method[0] && route->method[i].name; i++) {
        const struct http_method *m = &route->method[i];
        if (strcmp(m->name, wanted) == 0)
            return m;
        used += (size_t)snprintf(allow + used, 32 - used, "%s%s", used ? ", " : "", strcmp(m->name, "GET") == 0 ? "GET, HEAD" : m->name);
    }
    return NULL;
}
