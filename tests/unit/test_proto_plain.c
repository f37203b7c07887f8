/* SPDX-License-Identifier: Apache-2.0
 *
 * The common form of a request: what the quick reader takes and leaves, and that whatever it takes the other one takes alike.
 */
#include "proto-json/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TAIL 28 /* bytes behind the JSON: what the tensors of TENSORS take */
#define TENSORS                                                                                                                            \
    "\"inputs\":[{\"name\":\"hidden\",\"datatype\":\"BF16\",\"shape\":[1,4],\"parameters\":{\"binary_data_size\":8}},"                     \
    "{\"parameters\": {\"binary_data_size\": 8}, \"shape\": [1, 2], \"datatype\": \"INT32\", \"name\": \"expert_ids\"},\n"                 \
    "{\"name\":\"expert_weights\",\"shape\":[1,2],\"datatype\":\"FP32\",\"parameters\":{\"binary_data_size\":8}},"                         \
    "{\"name\":\"adapter\",\"shape\":[1],\"datatype\":\"BYTES\",\"parameters\":{\"binary_data_size\":4}}]"

/* A body of its own exact size, so that a sanitizer sees a read past the end. The tail is all zero: also a BYTES element of no length. */
static char *make_body(const char *text, size_t length)
{
    char *body = calloc(1, length + TAIL);
    assert_non_null(body);
    memcpy(body, text, length);
    return body;
}

static bool read_plain(const char *text, size_t length, struct proto_infer *out, char **body)
{
    memset(out, 0, sizeof *out);
    *body = make_body(text, length);
    return proto_plain_parse(*body, length + TAIL, length, out);
}

static void assert_same_text(const char *a, const char *b)
{
    assert_int_equal(a != NULL, b != NULL);
    if (a)
        assert_string_equal(a, b);
}

/* A member that nobody knows is ignored, but not by the quick reader. */
static void assert_other_agrees(const char *text, size_t length, const struct proto_infer *plain, const char *plain_body)
{
    static const char unknown[] = "{\"unknown\":0,";
    struct proto_infer other;
    struct proto_error error = {0};
    const char *start = memchr(text, '{', length);
    assert_non_null(start);
    size_t rest = length - (size_t)(start + 1 - text), whole = sizeof unknown - 1 + rest;
    char *longer = malloc(whole);
    assert_non_null(longer);
    memcpy(longer, unknown, sizeof unknown - 1);
    memcpy(longer + sizeof unknown - 1, start + 1, rest);
    char *body = make_body(longer, whole);
    if (proto_infer_parse(body, whole + TAIL, (int64_t)whole, NULL, &other, &error) != PROTO_OK)
        fail_msg("%.*s\n  was taken, but: %s", (int)length, text, error.message);
    assert_same_text(plain->id, other.id);
    assert_same_text(plain->adapter, other.adapter);
    assert_int_equal(plain->has_layer, other.has_layer);
    assert_int_equal(plain->layer, other.layer);
    assert_int_equal(plain->mode, other.mode);
    assert_int_equal(plain->binary_output, other.binary_output);
    assert_int_equal(plain->inputs, other.inputs);
    for (int32_t i = 0; i < plain->inputs; i++) {
        const struct proto_tensor *a = &plain->input[i], *b = &other.input[i];
        assert_string_equal(a->name, b->name);
        assert_int_equal(a->dtype, b->dtype);
        assert_int_equal(a->rank, b->rank);
        assert_memory_equal(a->shape, b->shape, (size_t)a->rank * sizeof a->shape[0]);
        assert_int_equal(a->elements, b->elements);
        assert_int_equal(a->bytes, b->bytes);
        assert_false(a->owned || b->owned);
        assert_int_equal((const char *)a->data - (plain_body + length), (const char *)b->data - (body + whole));
    }
    proto_infer_finish(&other);
    free(body);
    free(longer);
}

static const char *const common[] = {
    "{" TENSORS "}",
    " { \"parameters\" : { \"layer\" : 0 , \"binary_data_output\" : true } , " TENSORS " } \n",
    "{\"parameters\":{\"layer\":2147483647,\"mode\":\"decode\",\"adapter\":\"a/b\",\"binary_data_output\":false},\"id\":\"7\"," TENSORS "}",
    "{\"id\":\"\",\"outputs\":[{\"name\":\"hidden\",\"parameters\":{\"binary_data\":true}}]," TENSORS "}",
    "{" TENSORS ",\"outputs\":[{\"parameters\":{\"binary_data\":false},\"name\":\"hidden\"}],\"parameters\":{\"binary_data_output\":true}}",
    "{" TENSORS ",\"outputs\":[{\"name\":\"hidden\"}],\"parameters\":{\"mode\":\"prefill\",\"binary_data_output\":true}}",
};

static void takes_the_common_form(void **state)
{
    for (size_t i = 0; i < sizeof common / sizeof common[0]; i++) {
        struct proto_infer infer;
        char *body;
        if (!read_plain(common[i], strlen(common[i]), &infer, &body))
            fail_msg("not taken: %s", common[i]);
        assert_int_equal(infer.inputs, 4);
        assert_other_agrees(common[i], strlen(common[i]), &infer, body);
        proto_infer_finish(&infer);
        free(body);
    }
}

/* Of these some are well formed and some are not; the other reader tells. */
static void leaves_everything_else(void **state)
{
    static const char *const text[] = {
        "",
        "{",
        "{}",
        "[]",
        "{" TENSORS "} x",
        "{" TENSORS,
        "{" TENSORS ",}",
        "{" TENSORS "," TENSORS "}",
        "{\"parameters\":{}," TENSORS "}",
        "{\"parameters\":{\"layer\":1,\"layer\":1}," TENSORS "}",
        "{\"parameters\":{\"layer\":-1}," TENSORS "}",
        "{\"parameters\":{\"layer\":01}," TENSORS "}",
        "{\"parameters\":{\"layer\":1.0}," TENSORS "}",
        "{\"parameters\":{\"layer\":1e0}," TENSORS "}",
        "{\"parameters\":{\"layer\":2147483648}," TENSORS "}",
        "{\"parameters\":{\"layer\":1000000000000000000}," TENSORS "}",
        "{\"parameters\":{\"layer\":}," TENSORS "}",
        "{\"parameters\":{\"mode\":\"fast\"}," TENSORS "}",
        "{\"parameters\":{\"mode\":null}," TENSORS "}",
        "{\"parameters\":{\"binary_data_output\":tru}," TENSORS "}",
        "{\"parameters\":{\"binary_data_output\":1}," TENSORS "}",
        "{\"parameters\":{\"other\":1}," TENSORS "}",
        "{\"parameters\":{\"adapter\":\"\\u0061\"}," TENSORS "}",
        "{\"parameters\":{\"adapter\":\"\xc3\xa9\"}," TENSORS "}",
        "{\"parameters\":{\"adapter\":\"a\tb\"}," TENSORS "}",
        "{\"parameters\":{\"adapter\":\"a}," TENSORS "}",
        "{\"id\":1," TENSORS "}",
        "{\"unknown\":1," TENSORS "}",
        "{\"outputs\":[]," TENSORS "}",
        "{\"outputs\":[{\"name\":\"y\"}]," TENSORS "}",
        "{\"outputs\":[{\"parameters\":{\"binary_data\":true}}]," TENSORS "}",
        "{\"outputs\":[{\"name\":\"hidden\"},{\"name\":\"hidden\"}]," TENSORS "}",
        "{\"outputs\":[{\"name\":\"hidden\",\"parameters\":{\"classification\":0}}]," TENSORS "}",
        "{\"outputs\":[{\"name\":\"hidden\",\"parameters\":{\"binary_data\":true,\"binary_data\":true}}]," TENSORS "}",
        "{\"inputs\":[]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[7]}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[7],\"data\":[1,2,3,4,5,6,7]}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[7,1,1,1,1],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[8],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP64\",\"shape\":[7],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"\",\"datatype\":\"FP32\",\"shape\":[7],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[6],\"parameters\":{\"binary_data_size\":24}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[8],\"parameters\":{\"binary_data_size\":32}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"BYTES\",\"shape\":[6],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[4294967296,4294967296],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[4294967296,1073741824],\"parameters\":{\"binary_data_size\":28}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[7],\"parameters\":{\"binary_data_size\":28,\"x\":1}}]}",
        "{\"inputs\":[{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[3],\"parameters\":{\"binary_data_size\":12}},"
        "{\"name\":\"h\",\"datatype\":\"FP32\",\"shape\":[4],\"parameters\":{\"binary_data_size\":16}}]}",
    };
    for (size_t i = 0; i < sizeof text / sizeof text[0]; i++) {
        struct proto_infer infer;
        char *body;
        if (read_plain(text[i], strlen(text[i]), &infer, &body))
            fail_msg("taken: %s", text[i]);
        proto_infer_finish(&infer);
        free(body);
    }
}

static uint64_t draw(uint64_t *seed)
{
    uint64_t z = *seed += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* One or two small changes of the kind that keeps a text near a request. */
static size_t mutate(char *text, size_t length, uint64_t *seed)
{
    static const char letters[] = "{}[],:\"\\ 0123456789-.eEtfn\x7f\x80\t_ahx";
    for (int n = 1 + (int)(draw(seed) % 2); n > 0 && length; n--) {
        size_t at = draw(seed) % length, from = draw(seed) % length;
        size_t most = length - (at > from ? at : from), some = 1 + draw(seed) % 24;
        switch (draw(seed) % 4) {
        case 0: text[at] = letters[draw(seed) % (sizeof letters - 1)]; break;
        case 1:
            memmove(text + at, text + at + 1, length - at - 1);
            length--;
            break;
        case 2:
            memmove(text + at + 1, text + at, length - at);
            text[at] = letters[draw(seed) % (sizeof letters - 1)];
            length++;
            break;
        default: memmove(text + at, text + from, some < most ? some : most);
        }
    }
    return length;
}

static void mutants_are_taken_alike(void **state)
{
    uint64_t seed = 1;
    int taken = 0;
    for (int i = 0; i < 60000; i++) {
        const char *model = common[(size_t)i % (sizeof common / sizeof common[0])];
        char text[1024];
        size_t length = strlen(model);
        memcpy(text, model, length);
        length = mutate(text, length, &seed);
        struct proto_infer infer;
        char *body;
        if (read_plain(text, length, &infer, &body)) {
            taken++;
            assert_other_agrees(text, length, &infer, body);
        }
        proto_infer_finish(&infer);
        free(body);
    }
    assert_in_range(taken, 1000, 30000); /* neither all nor none, or this shows nothing */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_the_common_form),
        cmocka_unit_test(leaves_everything_else),
        cmocka_unit_test(mutants_are_taken_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
