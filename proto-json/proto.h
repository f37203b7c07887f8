/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes to requests and answers to bytes: the Open Inference Protocol's infer request with its binary tensor extension,
 * the adapter calls (ours and vLLM's), and the bodies of errors and descriptions.
 *
 * This layer knows JSON and datatypes, not models: it checks that a message is well formed and that its sizes add up.
 * It has no state; every function may be called from any thread. What a parse function fills is owned by the caller and
 * freed with the matching finish function, which takes a zeroed or half-filled struct. Views point into the body,
 * which must outlive them.
 */
#ifndef EXPERTD_PROTO_JSON_PROTO_H
#define EXPERTD_PROTO_JSON_PROTO_H

#include "kernels/dtype.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum proto_code {
    PROTO_OK = 0,
    PROTO_BAD_JSON, /* not JSON: syntax, UTF-8, depth, duplicate keys; the sentence has line or offset */
    PROTO_BAD_REQUEST, /* JSON, but not what this call takes */
    PROTO_BAD_TENSOR, /* a tensor's data doesn't fit its shape or datatype */
    PROTO_SHAPE_MISMATCH, /* tensors that disagree with one another; found by whoever knows the model */
    PROTO_UNSUPPORTED_DATATYPE,
    PROTO_NON_FINITE_OUTPUT, /* when writing: JSON can't hold it */
    PROTO_OUT_OF_MEMORY,
};

struct proto_error {
    enum proto_code code;
    char message[512]; /* UTF-8, one sentence, cut to fit */
};

/* "bad_json", ...: the code field of HTTP errors. */
const char *proto_code_name(enum proto_code code);

/* ---- infer -------------------------------------------------------------------------------------------------- */

#define PROTO_MAX_RANK 4
#define PROTO_MAX_INPUTS 16
#define PROTO_MAX_NAME 128

struct proto_tensor {
    char name[PROTO_MAX_NAME + 1];
    enum dtype dtype;
    int32_t rank;
    int64_t shape[PROTO_MAX_RANK]; /* every one >= 0; the product times the element size fits size_t */
    size_t elements;
    /* Numbers: `elements` little-endian values at any alignment, a view of the body (binary) or owned (JSON).
     * BYTES: as on the wire, each element a 4-byte little-endian length and the bytes, checked to add up. */
    const void *data;
    size_t bytes;
    bool owned;
};

enum proto_mode { PROTO_AUTO, PROTO_DECODE, PROTO_PREFILL };

/* What a caller brings; zeroed: malloc's memory, and any shape will do. */
struct proto_caller {
    /* Where numbers that came as JSON are put. `take` returns NULL when there is none. */
    void *(*take)(void *context, size_t bytes);
    void (*give)(void *context, void *memory);
    /* Asked about each input when its name, datatype and shape are known and its data has not been looked at: that a shape is wrong for the
     * model says more than that the data doesn't fit it. Other than PROTO_OK ends the reading, with *error filled. It may be asked twice. */
    enum proto_code (*look)(void *context, const struct proto_tensor *tensor, struct proto_error *error);
    void *context;
};

struct proto_infer {
    struct proto_caller caller;
    char *id; /* NULL: none */
    /* Known request parameters. Others are ignored, but not those whose names begin as if they named an adapter. */
    bool has_layer;
    int64_t layer;
    enum proto_mode mode;
    char *adapter; /* NULL: none */
    bool binary_output; /* from `outputs`' entry for "hidden", else from binary_data_output */
    struct proto_tensor input[PROTO_MAX_INPUTS];
    int32_t inputs;
};

/* `json_length` is Inference-Header-Content-Length, or -1 when the header was absent (all of the body is JSON).
 * Refused here: repeated inputs, more than PROTO_MAX_INPUTS, requested outputs other than "hidden", names over the limit, data
 * both in JSON and binary or neither, sizes that don't add up to the body, numbers out of the datatype's range; and
 * parameters and members of the request that are unknown and begin with adapter, adaptor or lora, in any case: ignored, they would get
 * the base's numbers.
 * Numeric `data` (flat or nested as the shape says) is scanned straight into the tensor, without a tree; the tensor lies in the
 * `caller`'s memory (NULL: malloc's), of which a body can make us take at most four times its length. */
enum proto_code proto_infer_parse(const void *body, size_t length, int64_t json_length, const struct proto_caller *caller,
                                  struct proto_infer *out, struct proto_error *error);
void proto_infer_finish(struct proto_infer *infer);
const struct proto_tensor *proto_infer_find(const struct proto_infer *infer, const char *name); /* NULL: absent */

/* A BYTES tensor's next element: *cursor starts at 0; false past the end. */
bool proto_bytes_next(const struct proto_tensor *tensor, size_t *cursor, const char **data, size_t *length);

struct proto_answer {
    const char *model_name;
    const char *id; /* NULL: none */
    const char *path; /* "decode" or "prefill" */
    int64_t layer, rows, hidden_size;
    int64_t queue_us, compute_us;
    enum dtype dtype;
    const void *data; /* [rows, hidden_size] at any alignment */
    bool binary;
};

/* Writes the answer. Binary: *json gets the head only and the tensor's bytes go out after it; else all of the body.
 * The text is malloc'ed; the caller frees it. Floats are written as the shortest decimal that reads back to the same value of the
 * answer's datatype. A NaN or infinity in a JSON answer is PROTO_NON_FINITE_OUTPUT naming the first row. */
enum proto_code proto_answer_write(const struct proto_answer *answer, char **json, size_t *length, struct proto_error *error);

/* One float, shortest round trip, at most 24 bytes, no terminator; returns the length. `v` is finite and a value of `dtype`. */
size_t proto_write_float(char *dst, float v, enum dtype dtype);
/* A JSON number at `text`; the nearest float, which may be infinite. Returns bytes used, 0 when it is not a JSON number. */
size_t proto_scan_float(const char *text, size_t length, float *out);

/* ---- adapters and the rest ------------------------------------------------------------------------------------ */

struct proto_install { /* POST /adapters; members other than these are refused */
    char *name, *path;
    bool replace;
};
enum proto_code proto_install_parse(const void *body, size_t length, struct proto_install *out, struct proto_error *error);
void proto_install_finish(struct proto_install *install);

struct proto_vllm_lora { /* POST /v1/load_lora_adapter, /v1/unload_lora_adapter; other members are ignored, as vLLM does */
    char *lora_name, *lora_path; /* lora_path NULL in unload */
    bool load_inplace;
};
enum proto_code proto_vllm_lora_parse(const void *body, size_t length, bool load, struct proto_vllm_lora *out, struct proto_error *error);
void proto_vllm_lora_finish(struct proto_vllm_lora *lora);

struct proto_adapter {
    const char *name, *state;
    int64_t id, rank;
    const int32_t *layers;
    size_t layer_count;
    int64_t experts;
    bool gate, up, down;
    int64_t tensors, ignored;
    char *const *warnings;
    size_t warning_count;
    int64_t bytes, in_flight, rows_served;
    int64_t installed_at; /* seconds since 1970; written as RFC 3339 */
};
json_t *proto_adapter_json(const struct proto_adapter *adapter); /* new reference; NULL: out of memory */

/* {"error":...,"code":...,"request_id":...}, and vLLM's {"error":{"message","type","param","code"}}; malloc'ed. NULL: no memory. */
char *proto_error_json(const char *message, const char *code, const char *request_id, size_t *length);
char *proto_vllm_error_json(const char *message, const char *type, int status, size_t *length);
/* Compact text of a tree, malloc'ed; takes the reference. NULL: no memory or `tree` NULL. */
char *proto_dump(json_t *tree, size_t *length);

/* Strict parse of a control body: one JSON object, duplicates and depth over 64 refused. An empty body is an empty object when
 * `empty_ok`. New reference in *out. */
enum proto_code proto_object_parse(const void *body, size_t length, bool empty_ok, json_t **out, struct proto_error *error);

#endif
