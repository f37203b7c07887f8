/* SPDX-License-Identifier: Apache-2.0
 *
 * The handlers that the route table names, by the file that holds them.
 */
#ifndef EXPERTD_SERVER_HANDLERS_H
#define EXPERTD_SERVER_HANDLERS_H

#include "server/http.h"

/* forward.c: POST /moe/forward, and the same as an OIP infer call */
extern const struct http_body_ops forward_body;
void forward_handle(struct http_request *r);

/* adapters.c */
void adapters_list(struct http_request *r);
void adapters_show(struct http_request *r);
void adapters_install(struct http_request *r);
void adapters_remove(struct http_request *r);
/* Snapshot to JSON; new reference, NULL: out of memory. */
json_t *adapters_info_json(const struct engine_adapter_info *info);
/* The line by which a change of what is installed can be audited. `source` is "path", "upload", "--adapter" or, of a removal, NULL;
 * `path` and `request_id` may be NULL. */
void adapters_log(const char *what, const struct engine_adapter_info *info, const char *source, const char *path, const char *request_id);

/* upload.c: PUT /adapters/{name} */
extern const struct http_body_ops upload_body;
void upload_handle(struct http_request *r);

/* vllm.c */
void vllm_load(struct http_request *r);
void vllm_unload(struct http_request *r);
void vllm_models(struct http_request *r);

/* model.c: descriptions and statistics */
void model_server(struct http_request *r);
void model_metadata(struct http_request *r);
void model_ready(struct http_request *r);
void model_config(struct http_request *r);
void model_stats(struct http_request *r);
void model_index(struct http_request *r);
void model_moe(struct http_request *r);
/* False (and 404) unless the route's {model}, and {version} if any, name what is served. */
bool model_named(struct http_request *r);

/* health.c */
void health_live(struct http_request *r);
void health_ready(struct http_request *r);
void health_metrics(struct http_request *r);
void health_openapi(struct http_request *r);

#endif
