/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors reader against legal files, and against one hostile file for every rule it enforces.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/safetensors.h"
#include "tests/unit/scratch.h"

static struct scratch scratch;

static int group_setup(void **state)
{
    (void)state;
    scratch_init(&scratch);
    return 0;
}

static int group_teardown(void **state)
{
    (void)state;
    scratch_finish(&scratch);
    return 0;
}

static void expect_refused(const char *name, enum engine_code code, const char *text)
{
    struct safetensors_file *file = NULL;
    struct engine_error e = {0};
    enum engine_code got = safetensors_open(scratch.fd, NULL, name, ENGINE_BAD_ADAPTER, &file, &e);
    if (got != code || got != e.code || !strstr(e.message, text) || !strstr(e.message, name))
        fail_msg("expected %s with \"%s\", got %s: %s", engine_code_name(code), text, engine_code_name(got), e.message);
    assert_null(file);
}

static void reads_what_was_written(void **state)
{
    (void)state;
    const uint16_t a[6] = {1, 2, 3, 4, 5, 6};
    const float b[2] = {0.5f, -2.0f};
    struct st_writer w;
    st_writer_init(&w);
    st_writer_add(&w, "m.z", "BF16", 2, (int64_t[]){2, 3}, a, sizeof a);
    st_writer_add(&w, "nothing", "F32", 2, (int64_t[]){0, INT64_MAX}, NULL, 0);
    st_writer_add(&w, "m.a", "F32", 1, (int64_t[]){2}, b, sizeof b);
    st_writer_add(&w, "scalar", "I64", 0, NULL, "01234567", 8);
    st_writer_finish(&w, &scratch, "good.safetensors");

    struct safetensors_file *f;
    struct engine_error e;
    assert_int_equal(safetensors_open(scratch.fd, NULL, "good.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e), ENGINE_OK);
    assert_string_equal(safetensors_name(f), "good.safetensors");
    assert_int_equal(safetensors_count(f), 4);
    assert_string_equal(safetensors_at(f, 0)->name, "m.z");
    assert_string_equal(safetensors_at(f, 3)->name, "scalar");
    const struct safetensors_tensor *t = safetensors_find(f, "m.a");
    assert_non_null(t);
    assert_int_equal(t->dtype, ST_F32);
    assert_int_equal(t->rank, 1);
    assert_int_equal(t->shape[0], 2);
    float one;
    assert_int_equal(safetensors_read(f, t, 4, &one, 4, &e), ENGINE_OK);
    assert_true(one == -2.0f);
    assert_int_equal(safetensors_read(f, t, 8, &one, 0, &e), ENGINE_OK);
    assert_int_equal(safetensors_read(f, t, 5, &one, 4, &e), ENGINE_INTERNAL);
    assert_int_equal(safetensors_read(f, t, -1, &one, 4, &e), ENGINE_INTERNAL);
    assert_int_equal(safetensors_find(f, "scalar")->rank, 0);
    assert_int_equal(safetensors_find(f, "nothing")->shape[1], INT64_MAX);
    assert_null(safetensors_find(f, "m.b"));
    assert_null(safetensors_find(f, ""));
    safetensors_close(f);
    safetensors_close(NULL);

    scratch_write_header(&scratch, "bare.safetensors", "{}  \n", 0);
    assert_int_equal(safetensors_open(scratch.fd, NULL, "bare.safetensors", ENGINE_BAD_CHECKPOINT, &f, NULL), ENGINE_OK);
    assert_int_equal(safetensors_count(f), 0);
    safetensors_close(f);
    scratch_write_header(
        &scratch, "meta.safetensors",
        "{ \"__metadata__\" : {\"format\":\"pt\"} , \"\\u00e9\\\"\" : {\"shape\":[1],\"data_offsets\":[0,1],\"dtype\":\"F8_E4M3\"} }", 1);
    assert_int_equal(safetensors_open(scratch.fd, NULL, "meta.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e), ENGINE_OK);
    assert_int_equal(safetensors_find(f, "\xc3\xa9\"")->dtype, ST_F8_E4M3);
    safetensors_close(f);
}

/* As writers write them, and in all other ways. */
static void reads_entries_of_every_form(void **state)
{
    (void)state;
    static const char *const form[] = {
        "\"t\":{\"dtype\":\"BF16\",\"shape\":[2,10],\"data_offsets\":[0,40]}",
        "\"t\":{\"data_offsets\":[0,40],\"shape\":[2,10],\"dtype\":\"BF16\"}",
        "\"t\" : {\"dtype\":\"BF16\",\"shape\":[2,10],\"data_offsets\":[0,40]}",
        "\"t\":{ \"dtype\" : \"BF16\", \"shape\" : [2, 10], \"data_offsets\" : [0, 40] }",
        "\"\\u0074\":{\"dtype\":\"\\u0042F16\",\"shape\":[2,10],\"data_offsets\":[0,40]}",
        "\"t\":{\"dty\\u0070e\":\"BF16\",\"shape\":[2,10],\"data_offsets\":[-0,40]}",
    };
    for (size_t i = 0; i < sizeof form / sizeof form[0]; i++) {
        char header[200];
        snprintf(header, sizeof header, "{%s,\"u\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[40,41]}}", form[i]);
        scratch_write_header(&scratch, "form.safetensors", header, 41);
        struct safetensors_file *f;
        struct engine_error e;
        if (safetensors_open(scratch.fd, NULL, "form.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e) != ENGINE_OK)
            fail_msg("%s: %s", header, e.message);
        const struct safetensors_tensor *t = safetensors_find(f, "t");
        assert_non_null(t);
        assert_int_equal(t->dtype, ST_BF16);
        assert_int_equal(t->rank, 2);
        assert_int_equal(t->shape[0], 2);
        assert_int_equal(t->shape[1], 10);
        assert_int_equal(t->end - t->begin, 40);
        assert_int_equal(safetensors_find(f, "u")->rank, 0);
        safetensors_close(f);
    }
}

/* A tensor of BF16 [2] at [0,4], with one thing changed. */
static void refuses_every_fault_of_the_header(void **state)
{
    (void)state;
#define T(dtype, shape, offsets) "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
    static const struct {
        const char *header;
        size_t data;
        const char *text;
    } bad[] = {
        {"", 0, "does not begin with '{'"},
        {" {}", 0, "does not begin with '{'"},
        {"[]", 0, "does not begin with '{'"},
        {"{", 0, "near byte 1"},
        {"{}x", 0, "something follows"},
        {"{} {}", 0, "something follows"},
        {"{\"t\"}", 0, "':' expected"},
        {"{\"t\":}", 0, "near"},
        {"{1:{}}", 0, "name is not a string"},
        {"{,}", 0, "near"},
        {"{\"t\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},}", 4, "near"},
        {"{\"t\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]} \"u\":1}", 4, "',' or '}' expected"},
        {"{\"t\":1}", 0, "not an object"},
        {"{\"t\":[]}", 0, "not an object"},
        {"{\"t\":{}}", 0, "exactly dtype"},
        {"{\"t\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4],\"x\":0}}", 4, "exactly dtype"},
        {T("1", "[2]", "[0,4]"), 4, "exactly dtype"},
        {T("\"BF16\"", "2", "[0,4]"), 4, "exactly dtype"},
        {T("\"BF16\"", "[2]", "\"0,4\""), 4, "exactly dtype"},
        {T("\"BF17\"", "[2]", "[0,4]"), 4, "unknown dtype \"BF17\""},
        {T("\"bf16\"", "[2]", "[0,4]"), 4, "unknown dtype"},
        {T("\"BF16\"", "[-2]", "[0,4]"), 4, "shape[0]"},
        {T("\"BF16\"", "[2.0]", "[0,4]"), 4, "shape[0]"},
        {T("\"BF16\"", "[1,\"2\"]", "[0,4]"), 4, "shape[1]"},
        {T("\"BF16\"", "[true]", "[0,4]"), 4, "shape[0]"},
        {T("\"BF16\"", "[99999999999999999999]", "[0,4]"), 4, "too big integer"},
        {T("\"BF16\"", "[4294967296,4294967296]", "[0,4]"), 4, "overflows"},
        {T("\"BF16\"", "[9223372036854775807]", "[0,4]"), 4, "overflows"},
        {T("\"BF16\"", "[1,1,1,1,1,1,1,1,2]", "[0,4]"), 4, "rank 9 is more than 8"},
        {T("\"F4\"", "[3]", "[0,1]"), 1, "no whole number of bytes"},
        {T("\"BF16\"", "[2]", "[0]"), 4, "two integers"},
        {T("\"BF16\"", "[2]", "[0,4,4]"), 4, "two integers"},
        {T("\"BF16\"", "[2]", "[0.0,4]"), 4, "two integers"},
        {T("\"BF16\"", "[2]", "[0,4e0]"), 4, "two integers"},
        {T("\"BF16\"", "[2]", "[-4,0]"), 4, "negative or reversed"},
        {T("\"BF16\"", "[2]", "[4,0]"), 4, "negative or reversed"},
        {T("\"BF16\"", "[2]", "[0,4]"), 3, "pass the end of the file's 3 bytes"},
        {T("\"BF16\"", "[2]", "[0,9223372036854775807]"), 4, "pass the end"},
        {T("\"BF16\"", "[3]", "[0,4]"), 4, "span 4 bytes, but its shape and dtype need 6"},
        {T("\"BF16\"", "[0]", "[0,4]"), 4, "span 4 bytes, but its shape and dtype need 0"},
        {T("\"BF16\"", "[2]", "[2,6]"), 6, "hole of 2 bytes"},
        {T("\"BF16\"", "[2]", "[0,4]"), 5, "1 bytes at the end"},
        {"{}", 1, "1 bytes at the end"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"u\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3,
         "overlap those of \"t\""},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"u\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
         "overlap those of \"t\""},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"u\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]}}", 5,
         "hole of 1 bytes"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]},\"u\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
         "overlap those of \"u\""},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2,
         "\"t\": duplicate name"},
        {"{\"t\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "duplicate"},
        {"{\"t\\u0000x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\\u0000"},
        {"{\"t\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "unable to decode"},
        {"{\"t\xc0\x80\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "unable to decode"},
        {"{\"t\\ud800\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "near"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "the value of \"a\" is no string"},
        {"{\"__metadata__\":{\"a\":null}}", 0, "the value of \"a\" is no string"},
        {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "duplicate"},
        {"{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"\\u0061\":\"3\"}}", 0, "duplicate"},
        {"{\"__metadata__\":{\"a\":{}}}", 0, "the value of \"a\" is no string"},
        {"{\"__metadata__\":{\"a\":\"1\",}}", 0, "name is not a string"},
        {"{\"__metadata__\":{\"a\":\"1\" \"b\":\"2\"}}", 0, "',' or '}' expected"},
        {"{\"__metadata__\":{\"a\":\"1\"", 0, "',' or '}' expected"},
        {"{\"__metadata__\":{\"a\"}}", 0, "':' expected"},
        {"{\"__metadata__\":{\"a\":\"\xff\"}}", 0, "unable to decode"},
        {"{\"__metadata__\":", 0, "__metadata__ is not an object"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate __metadata__"},
    };
#undef T
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        scratch_write_header(&scratch, "bad.safetensors", bad[i].header, bad[i].data);
        expect_refused("bad.safetensors", ENGINE_BAD_ADAPTER, bad[i].text);
    }
}

static void refuses_deep_and_long_entries(void **state)
{
    (void)state;
    static char header[200000];
    size_t n = (size_t)sprintf(header, "{\"t\":");
    memset(header + n, '[', sizeof header - 1 - n);
    scratch_write_header(&scratch, "deep.safetensors", header, 0);
    expect_refused("deep.safetensors", ENGINE_BAD_ADAPTER, "near byte 5");
    n = (size_t)sprintf(header, "{\"__metadata__\":");
    memset(header + n, '[', sizeof header - 1 - n);
    scratch_write_header(&scratch, "deep.safetensors", header, 0);
    expect_refused("deep.safetensors", ENGINE_BAD_ADAPTER, "__metadata__ is not an object");
    n = (size_t)sprintf(header, "{\"__metadata__\":{\"a\":");
    memset(header + n, '[', sizeof header - 1 - n);
    scratch_write_header(&scratch, "deep.safetensors", header, 0);
    expect_refused("deep.safetensors", ENGINE_BAD_ADAPTER, "the value of \"a\" is no string");
    n = (size_t)sprintf(header, "{");
    memset(header + n, '[', sizeof header - 1 - n);
    scratch_write_header(&scratch, "deep.safetensors", header, 0);
    expect_refused("deep.safetensors", ENGINE_BAD_ADAPTER, "name is not a string");
    n = (size_t)sprintf(header, "{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1],\"shape\":[1");
    while (n < sizeof header - 8)
        n += (size_t)sprintf(header + n, ",1");
    sprintf(header + n, "]}}");
    scratch_write_header(&scratch, "long.safetensors", header, 1);
    expect_refused("long.safetensors", ENGINE_BAD_ADAPTER, "near byte");
}

static size_t tree_bytes, tree_peak;

static void *tree_allocate(size_t bytes)
{
    size_t *block = malloc(sizeof(size_t[2]) + bytes);
    if (!block)
        return NULL;
    *block = bytes;
    tree_bytes += bytes;
    tree_peak = tree_bytes > tree_peak ? tree_bytes : tree_peak;
    return block + 2;
}

static void tree_free(void *memory)
{
    size_t *block = memory ? (size_t *)memory - 2 : NULL;
    if (block)
        tree_bytes -= *block;
    free(block);
}

/* What is not tensors must not become a tree many times as large as its text: a header may have a hundred million bytes. */
static void trees_stay_small(void **state)
{
    (void)state;
    static const struct {
        const char *start, *end, *text; /* NULL: legal */
    } header[] = {
        {"{\"__metadata__\":[", "1]}", "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":[", "1]}}", "the value of \"a\" is no string"},
        {"{[", "1]}", "name is not a string"},
        {"{\"__metadata__\":{\"x\":\"\"", "}}", NULL},
    };
    const size_t room = 2000000;
    char *text = malloc(room + 64);
    assert_non_null(text);
    json_set_alloc_funcs(tree_allocate, tree_free);
    for (size_t i = 0; i < sizeof header / sizeof header[0]; i++) {
        size_t n = (size_t)sprintf(text, "%s", header[i].start);
        for (size_t k = 0; n < room; k++)
            n += (size_t)(header[i].text ? sprintf(text + n, "1,") : sprintf(text + n, ",\"%07zx\":\"\"", k));
        strcpy(text + n, header[i].end);
        scratch_write_header(&scratch, "tree.safetensors", text, 0);
        tree_peak = 0;
        struct safetensors_file *f = NULL;
        if (header[i].text)
            expect_refused("tree.safetensors", ENGINE_BAD_ADAPTER, header[i].text);
        else
            assert_int_equal(safetensors_open(scratch.fd, NULL, "tree.safetensors", ENGINE_BAD_ADAPTER, &f, NULL), ENGINE_OK);
        safetensors_close(f);
        assert_true(tree_peak < 4096);
        assert_int_equal(tree_bytes, 0);
    }
    json_set_alloc_funcs(malloc, free);
    free(text);
}

static void refuses_files_of_the_wrong_kind_or_length(void **state)
{
    (void)state;
    expect_refused("absent.safetensors", ENGINE_NO_FILE, "No such file");
    scratch_write(&scratch, "empty.safetensors", "", 0);
    expect_refused("empty.safetensors", ENGINE_BAD_ADAPTER, "0 bytes are too few");
    scratch_write(&scratch, "seven.safetensors", "\2\0\0\0\0\0\0", 7);
    expect_refused("seven.safetensors", ENGINE_BAD_ADAPTER, "7 bytes are too few");
    scratch_write(&scratch, "cut.safetensors", "\3\0\0\0\0\0\0\0{}", 10);
    expect_refused("cut.safetensors", ENGINE_BAD_ADAPTER, "truncated");
    scratch_write(&scratch, "limit.safetensors", "\1\341\365\5\0\0\0\0{}", 10); /* 100,000,001 */
    expect_refused("limit.safetensors", ENGINE_BAD_ADAPTER, "100000001 bytes is over the limit of 100000000");
    scratch_write(&scratch, "huge.safetensors", "\377\377\377\377\377\377\377\377{}", 10);
    expect_refused("huge.safetensors", ENGINE_BAD_ADAPTER, "over the limit");
    assert_int_equal(mkdirat(scratch.fd, "dir.safetensors", 0700), 0);
    expect_refused("dir.safetensors", ENGINE_BAD_ADAPTER, "not a regular file");
    assert_int_equal(mkfifoat(scratch.fd, "fifo.safetensors", 0600), 0);
    expect_refused("fifo.safetensors", ENGINE_BAD_ADAPTER, "not a regular file"); /* and does not wait for a writer */
    assert_int_equal(symlinkat("bare2.safetensors", scratch.fd, "link.safetensors"), 0);
    expect_refused("link.safetensors", ENGINE_NO_FILE, "No such file");
    scratch_write_header(&scratch, "bare2.safetensors", "{}", 0);
    struct safetensors_file *f;
    assert_int_equal(safetensors_open(scratch.fd, NULL, "link.safetensors", ENGINE_BAD_ADAPTER, &f, NULL), ENGINE_OK);
    safetensors_close(f);
}

static void notices_a_file_that_shrinks(void **state)
{
    (void)state;
    scratch_write_header(&scratch, "shrinks.safetensors", "{\"t\":{\"dtype\":\"U8\",\"shape\":[100],\"data_offsets\":[0,100]}}", 100);
    struct safetensors_file *f;
    struct engine_error e;
    assert_int_equal(safetensors_open(scratch.fd, NULL, "shrinks.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e), ENGINE_OK);
    const struct safetensors_tensor *t = safetensors_find(f, "t");
    char path[128], data[100];
    snprintf(path, sizeof path, "%s/shrinks.safetensors", scratch.path);
    assert_int_equal(truncate(path, t->begin + 50), 0);
    assert_int_equal(safetensors_read(f, t, 0, data, 50, &e), ENGINE_OK);
    assert_int_equal(safetensors_read(f, t, 0, data, 100, &e), ENGINE_BAD_CHECKPOINT);
    assert_non_null(strstr(e.message, "shrank"));
    safetensors_close(f);
}

static void notices_a_file_that_changes(void **state)
{
    (void)state;
    scratch_write_header(&scratch, "changes.safetensors", "{\"t\":{\"dtype\":\"U8\",\"shape\":[100],\"data_offsets\":[0,100]}}", 100);
    for (int way = 0; way < 3; way++) {
        struct safetensors_file *f;
        struct engine_error e;
        char path[128], data[100];
        snprintf(path, sizeof path, "%s/changes.safetensors", scratch.path);
        assert_int_equal(utimensat(AT_FDCWD, path, (const struct timespec[2]){{.tv_sec = 1}, {.tv_sec = 1}}, 0), 0);
        assert_int_equal(safetensors_open(scratch.fd, NULL, "changes.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e), ENGINE_OK);
        const struct safetensors_tensor *t = safetensors_find(f, "t");
        assert_int_equal(safetensors_read(f, t, 0, data, 100, &e), ENGINE_OK);
        assert_int_equal(safetensors_check_unchanged(f, &e), ENGINE_OK);
        int fd = openat(scratch.fd, "changes.safetensors", O_WRONLY | (way == 1 ? O_APPEND : 0));
        if (way < 2)
            assert_int_equal(write(fd, "x", 1), 1);
        else
            assert_int_equal(ftruncate(fd, t->end - 1), 0);
        close(fd);
        assert_int_equal(safetensors_check_unchanged(f, &e), ENGINE_BAD_CHECKPOINT);
        assert_non_null(strstr(e.message, "changes.safetensors: the file was written to"));
        safetensors_close(f);
        scratch_write_header(&scratch, "changes.safetensors", "{\"t\":{\"dtype\":\"U8\",\"shape\":[100],\"data_offsets\":[0,100]}}", 100);
    }
}

static void finds_among_a_hundred_thousand(void **state)
{
    (void)state;
    const size_t count = 100000;
    char *header = malloc(count * 100), name[64];
    assert_non_null(header);
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        n += (size_t)sprintf(header + n, "%c\"model.layers.%zu.x.%zu\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                             i ? ',' : '{', i % 61, i, i, i + 1);
    strcpy(header + n, "}");
    scratch_write_header(&scratch, "many.safetensors", header, count);
    free(header);
    struct safetensors_file *f;
    assert_int_equal(safetensors_open(scratch.fd, NULL, "many.safetensors", ENGINE_BAD_CHECKPOINT, &f, NULL), ENGINE_OK);
    assert_int_equal(safetensors_count(f), count);
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "model.layers.%zu.x.%zu", i % 61, i);
        assert_ptr_equal(safetensors_find(f, name), safetensors_at(f, i));
    }
    safetensors_close(f);
}

/* Names are quoted in messages: a line break or a cut character must not get through. */
static void messages_stay_printable(void **state)
{
    (void)state;
    char header[1024], name[402] = "a";
    for (int i = 0; i < 200; i++)
        strcat(name, "\xc3\xa9");
    snprintf(header, sizeof header, "{\"%s\":1}", name);
    scratch_write_header(&scratch, "name.safetensors", header, 0);
    struct safetensors_file *f;
    struct engine_error e;
    assert_int_equal(safetensors_open(scratch.fd, NULL, "name.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e), ENGINE_BAD_CHECKPOINT);
    assert_non_null(strstr(e.message, "\xc3\xa9?\""));
    scratch_write_header(&scratch, "name.safetensors", "{\"x\\ny\\u001b[2J\":1}", 0);
    assert_int_equal(safetensors_open(scratch.fd, NULL, "name.safetensors", ENGINE_BAD_CHECKPOINT, &f, &e), ENGINE_BAD_CHECKPOINT);
    assert_non_null(strstr(e.message, "\"x?y?[2J\""));
}

static void knows_its_dtypes(void **state)
{
    (void)state;
    enum dtype d;
    assert_true(safetensors_dtype_float(ST_BF16, &d) && d == DTYPE_BF16);
    assert_true(safetensors_dtype_float(ST_F16, &d) && d == DTYPE_FP16);
    assert_true(safetensors_dtype_float(ST_F32, &d) && d == DTYPE_FP32);
    assert_false(safetensors_dtype_float(ST_F8_E4M3, &d));
    assert_false(safetensors_dtype_float(ST_F64, &d));
    assert_string_equal(safetensors_dtype_name(ST_F8_E8M0), "F8_E8M0");
    assert_int_equal(safetensors_dtype_bits(ST_F4), 4);
    assert_int_equal(safetensors_dtype_bits(ST_I64), 64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_was_written),
        cmocka_unit_test(reads_entries_of_every_form),
        cmocka_unit_test(refuses_every_fault_of_the_header),
        cmocka_unit_test(refuses_deep_and_long_entries),
        cmocka_unit_test(refuses_files_of_the_wrong_kind_or_length),
        cmocka_unit_test(notices_a_file_that_shrinks),
        cmocka_unit_test(notices_a_file_that_changes),
        cmocka_unit_test(finds_among_a_hundred_thousand),
        cmocka_unit_test(messages_stay_printable),
        cmocka_unit_test(knows_its_dtypes),
        cmocka_unit_test(trees_stay_small),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
