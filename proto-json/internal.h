/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of proto-json share and nobody outside sees: sentences of errors, the text under construction, decimal
 * numbers in both directions, the structure of a JSON text, and the data arrays cut out of it.
 */
#ifndef EXPERTD_PROTO_JSON_INTERNAL_H
#define EXPERTD_PROTO_JSON_INTERNAL_H

#include "proto-json/proto.h"

/* Nesting that we follow, and how large a JSON text may be once the data arrays are cut out of it: jansson's tree takes many times the
 * text, so that an unbounded text would be a way to eat memory. */
#define PROTO_MAX_DEPTH 64
#define PROTO_MAX_TREE_TEXT (1u << 20)

/* ---- error.c ------------------------------------------------------------------------------------------------ */

/* Fills `error`, if there is one, and returns `code`. */
enum proto_code proto_fail(struct proto_error *error, enum proto_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));
enum proto_code proto_fail_memory(struct proto_error *error);

/* A caller's bytes made fit for a sentence: valid UTF-8 without control characters, cut to about 64 bytes. */
struct proto_excerpt {
    char text[80];
};
const char *proto_excerpt(struct proto_excerpt *out, const char *bytes, size_t length);

/* Bytes of the UTF-8 sequence at `p`, 0 when it isn't one (overlong, surrogate, past U+10FFFF, cut off). */
size_t proto_utf8_length(const char *p, size_t length);
/* Writes one code point, at most 4 bytes. */
size_t proto_utf8_write(char *dst, uint32_t code_point);

/* ---- text.c ------------------------------------------------------------------------------------------------- */

/* A growing text. After a failed allocation `failed` stays true and further writes do nothing, so that callers check once. */
struct proto_text {
    char *data;
    size_t length, capacity;
    bool failed;
};
/* Room for `more` bytes behind `length`; false: no memory. */
bool proto_text_reserve(struct proto_text *text, size_t more);
void proto_text_append(struct proto_text *text, const char *bytes, size_t length);
void proto_text_format(struct proto_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A JSON string with its quotes; bytes that are not UTF-8 become U+FFFD. */
void proto_text_string(struct proto_text *text, const char *bytes, size_t length);
/* Bytes used by the escape at `p`, behind its backslash, two for a pair of surrogates; 0: not one. */
size_t proto_escape_read(const char *p, const char *end, uint32_t *code_point);
/* The finished text, which the caller frees; NULL after a failure. */
char *proto_text_finish(struct proto_text *text, size_t *length);

/* ---- powers.c ----------------------------------------------------------------------------------------------- */

#define PROTO_POWER_MIN (-65)
#define PROTO_POWER_MAX 45
/* The top 64 bits of 10^q, rounded down; exact for 0 <= q <= 27. 10^q = mantissa * 2^(proto_power_exponent(q) - 63). */
extern const uint64_t proto_power_mantissa[PROTO_POWER_MAX - PROTO_POWER_MIN + 1];
static inline int proto_power_exponent(int q) { return (q * 217706) >> 16; } /* floor(q * log2(10)) */
static inline bool proto_power_exact(int q) { return q >= 0 && q <= 27; }

/* ---- decimal.c ---------------------------------------------------------------------------------------------- */

/* Reads the JSON number at `p`; `*bits` gets the nearest value of float type `type` (ties to even, straight from the decimal),
 * `*overflow` whether that is beyond the largest finite one. Returns bytes used, 0: not a JSON number. */
size_t proto_decimal_read(const char *p, const char *end, enum dtype type, uint32_t *bits, bool *overflow);

enum proto_integer { PROTO_INTEGER_OK, PROTO_INTEGER_REAL, PROTO_INTEGER_RANGE };
/* Reads a JSON number that must be an integer. Returns bytes used, 0: not a JSON number. */
size_t proto_integer_read(const char *p, const char *end, int64_t *value, enum proto_integer *status);

/* ---- shortest.c ---------------------------------------------------------------------------------------------- */

/* Writes `count` elements of float type `type`, each with a comma behind it, and returns where the text ends. A number has
 * PROTO_NUMBER_LONGEST bytes at most; behind the last one more may be overwritten, PROTO_NUMBER_SPACE bytes in all. `*written` is less than
 * `count` when the next element is not finite. */
#define PROTO_NUMBER_LONGEST 15
#define PROTO_NUMBER_SPACE 32
char *proto_row_write(char *dst, const char *from, size_t count, enum dtype type, size_t *written);

/* ---- structure.c -------------------------------------------------------------------------------------------- */

struct proto_span {
    const char *start;
    size_t length;
    size_t at; /* offset in the reduced text of the number that stands for it */
};

/* The text's tree. With `spans`, each array that is a root.inputs[*].data is replaced by its index in `span`; nothing else
 * can have an integer there. `*count` gets how many there are, at most PROTO_MAX_INPUTS. `behind`, when not NULL, ends the sentence about an
 * object that something follows. */
enum proto_code proto_tree_parse(const char *text, size_t length, const char *behind, struct proto_span *span, int32_t *count, json_t **out,
                                 struct proto_error *error);

static inline bool proto_is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
static inline const char *proto_skip_space(const char *p, const char *end)
{
    while (p < end && proto_is_space(*p))
        p++;
    return p;
}

/* ---- plain.c ------------------------------------------------------------------------------------------------ */

/* Fills *out, zeroed but for its caller, if the request has the common form and nothing is wrong with it. After false *out holds
 * anything, for proto_infer_finish. */
bool proto_plain_parse(const char *body, size_t length, size_t json_length, struct proto_infer *out);

/* ---- tensor.c ----------------------------------------------------------------------------------------------- */

/* Fills tensor->data, bytes and owned from the array; name, dtype, rank, shape and elements are set. `what` begins sentences. */
enum proto_code proto_tensor_scan(struct proto_tensor *tensor, const char *what, const struct proto_span *span,
                                  const struct proto_caller *caller, struct proto_error *error);
/* Takes a view of binary data; `size` bytes are there. */
enum proto_code proto_tensor_view(struct proto_tensor *tensor, const char *what, const char *bytes, size_t size, struct proto_error *error);
/* "[2,4]" */
struct proto_shape_text {
    char text[PROTO_MAX_RANK * 21 + 3];
};
const char *proto_shape_text(struct proto_shape_text *out, const struct proto_tensor *tensor);

#endif
