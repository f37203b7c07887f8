/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors reader. It owns the file descriptor, the tensor table and the names.
 *
 * The header is cut at its top level here. Entries as writers of the format write them are read here, too, since adapters have tens
 * of thousands; all others are handed to jansson one member at a time, so that a hostile header of the largest legal size costs
 * memory in proportion to the tensors it really names. Names stay in the header's text. Duplicates are found by sorting, which the
 * lookup needs anyhow.
 */
#include "engine/safetensors.h"
#include "engine/path.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A tensor's entry is three short members; anything longer than this is no tensor. */
#define MAX_ENTRY 4096

struct safetensors_file {
    int fd;
    char *name;
    enum engine_code bad;
    int64_t size;
    struct stat opened; /* as it was then */
    char *text; /* the header; names point into it */
    struct safetensors_tensor *tensor; /* by position */
    const struct safetensors_tensor **sorted; /* by name */
    size_t count, capacity;
};

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    [ST_BOOL] = {"BOOL", 8},
    [ST_U8] = {"U8", 8},
    [ST_I8] = {"I8", 8},
    [ST_F8_E4M3] = {"F8_E4M3", 8},
    [ST_F8_E5M2] = {"F8_E5M2", 8},
    [ST_F8_E8M0] = {"F8_E8M0", 8},
    [ST_I16] = {"I16", 16},
    [ST_U16] = {"U16", 16},
    [ST_F16] = {"F16", 16},
    [ST_BF16] = {"BF16", 16},
    [ST_I32] = {"I32", 32},
    [ST_U32] = {"U32", 32},
    [ST_F32] = {"F32", 32},
    [ST_F64] = {"F64", 64},
    [ST_I64] = {"I64", 64},
    [ST_U64] = {"U64", 64},
    [ST_F4] = {"F4", 4},
    [ST_F6_E2M3] = {"F6_E2M3", 6},
    [ST_F6_E3M2] = {"F6_E3M2", 6},
    [ST_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [ST_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [ST_C64] = {"C64", 64},
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype) { return dtypes[dtype].name; }

int safetensors_dtype_bits(enum safetensors_dtype dtype) { return dtypes[dtype].bits; }

bool safetensors_dtype_float(enum safetensors_dtype dtype, enum dtype *out)
{
    switch (dtype) {
    case ST_BF16: *out = DTYPE_BF16; return true;
    case ST_F16: *out = DTYPE_FP16; return true;
    case ST_F32: *out = DTYPE_FP32; return true;
    default: return false;
    }
}

const char *safetensors_name(const struct safetensors_file *file) { return file->name; }

size_t safetensors_count(const struct safetensors_file *file) { return file->count; }

const struct safetensors_tensor *safetensors_at(const struct safetensors_file *file, size_t index) { return &file->tensor[index]; }

const struct safetensors_tensor *safetensors_find(const struct safetensors_file *file, const char *name)
{
    size_t lo = 0, hi = file->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(name, file->sorted[mid]->name);
        if (!c)
            return file->sorted[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

void safetensors_close(struct safetensors_file *file)
{
    if (!file)
        return;
    free(file->text);
    free(file->tensor);
    free(file->sorted);
    free(file->name);
    close(file->fd);
    free(file);
}

static enum engine_code read_exactly(const struct safetensors_file *file, int64_t offset, void *dst, size_t bytes,
                                     struct engine_error *error)
{
    while (bytes) {
        ssize_t n = pread(file->fd, dst, bytes, offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return engine_fail(error, ENGINE_IO, "%s: reading at byte %" PRId64 ": %s", file->name, offset, strerror(errno));
        if (!n)
            return engine_fail(error, file->bad, "%s: the file shrank while it was being read: it ends before byte %" PRId64 " of %" PRId64,
                               file->name, offset + (int64_t)bytes, file->size);
        dst = (char *)dst + n;
        offset += n;
        bytes -= (size_t)n;
    }
    return ENGINE_OK;
}

enum engine_code safetensors_read(const struct safetensors_file *file, const struct safetensors_tensor *tensor, int64_t offset, void *dst,
                                  size_t bytes, struct engine_error *error)
{
    int64_t span = tensor->end - tensor->begin;
    if (offset < 0 || offset > span || bytes > (uint64_t)(span - offset))
        return engine_fail(error, ENGINE_INTERNAL, "%s: tensor \"%.200s\": a read of %zu bytes at %" PRId64 " passes its end at %" PRId64,
                           file->name, tensor->name, bytes, offset, span);
    return read_exactly(file, tensor->begin + offset, dst, bytes, error);
}

enum engine_code safetensors_check_unchanged(const struct safetensors_file *file, struct engine_error *error)
{
    return path_check_unchanged(file->fd, &file->opened, file->name, file->bad, error);
}

void safetensors_prefetch(const struct safetensors_file *file, const struct safetensors_tensor *tensor, int64_t offset, int64_t bytes)
{
    posix_fadvise(file->fd, tensor->begin + offset, bytes, POSIX_FADV_WILLNEED);
}

/* ---- the header ------------------------------------------------------------------------------------------ */

struct header {
    struct safetensors_file *file;
    char *text;
    size_t length, at;
    struct engine_error *error;
};

static enum engine_code bad_header(const struct header *h, const char *what)
{
    return engine_fail(h->error, h->file->bad, "%s: the header is not a legal JSON object: %s (near byte %zu)", h->file->name, what, h->at);
}

static void skip_space(struct header *h)
{
    while (h->at < h->length && strchr(" \t\r\n", h->text[h->at]) && h->text[h->at])
        h->at++;
}

/* The next value, of at most `limit` bytes; NULL after an error. */
static json_t *next_value(struct header *h, size_t limit)
{
    size_t rest = h->length - h->at;
    json_error_t e;
    json_t *v =
        json_loadb(h->text + h->at, rest < limit ? rest : limit, JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK | JSON_REJECT_DUPLICATES, &e);
    if (!v) {
        if (!e.text[0] || json_error_code(&e) == json_error_out_of_memory) /* no text: it could not even begin */
            engine_fail(h->error, ENGINE_OUT_OF_MEMORY, "%s: out of memory while reading the header", h->file->name);
        else
            bad_header(h, e.text);
        return NULL;
    }
    h->at += (size_t)e.position;
    return v;
}

/* The next value, which must be a string: that is seen before it is parsed, since a tree of what else stands there could be far larger than
 * its text. NULL after an error, which is `wanted` if something else stands there. */
static json_t *next_string(struct header *h, const char *wanted)
{
    skip_space(h);
    if (h->at == h->length || h->text[h->at] != '"') {
        bad_header(h, wanted);
        return NULL;
    }
    return next_value(h, h->length);
}

static enum engine_code bad_tensor(const struct header *h, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
static enum engine_code bad_tensor(const struct header *h, const char *name, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return engine_fail(h->error, h->file->bad, "%s: tensor \"%.200s\": %s", h->file->name, name, text);
}

/* One tensor's entry; offsets are still relative to the data. */
static enum engine_code parse_tensor(const struct header *h, const char *name, const json_t *entry, struct safetensors_tensor *t)
{
    if (!json_is_object(entry))
        return bad_tensor(h, name, "its entry is not an object");
    const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) || json_object_size(entry) != 3)
        return bad_tensor(h, name, "its entry must hold exactly dtype (string), shape (array) and data_offsets (array)");

    size_t d = 0;
    while (d < sizeof dtypes / sizeof dtypes[0] && strcmp(dtypes[d].name, json_string_value(dtype)))
        d++;
    if (d == sizeof dtypes / sizeof dtypes[0])
        return bad_tensor(h, name, "unknown dtype \"%.64s\"", json_string_value(dtype));
    t->dtype = (enum safetensors_dtype)d;

    if (json_array_size(shape) > SAFETENSORS_MAX_RANK)
        return bad_tensor(h, name, "its rank %zu is more than %d", json_array_size(shape), SAFETENSORS_MAX_RANK);
    t->rank = (int32_t)json_array_size(shape);
    for (int32_t i = 0; i < t->rank; i++) {
        const json_t *n = json_array_get(shape, (size_t)i);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            return bad_tensor(h, name, "shape[%d] is not a non-negative integer", i);
        t->shape[i] = json_integer_value(n);
    }
    if (json_array_size(offsets) != 2 || !json_is_integer(json_array_get(offsets, 0)) || !json_is_integer(json_array_get(offsets, 1)))
        return bad_tensor(h, name, "data_offsets must be two integers");
    t->begin = json_integer_value(json_array_get(offsets, 0));
    t->end = json_integer_value(json_array_get(offsets, 1));
    return ENGINE_OK;
}

/* Whether shape, type and offsets agree. */
static enum engine_code check_tensor(const struct header *h, const char *name, const struct safetensors_tensor *t)
{
    int64_t bits = dtypes[t->dtype].bits;
    bool empty = false, overflow = false;
    for (int32_t i = 0; i < t->rank; i++) {
        empty |= !t->shape[i];
        overflow |= __builtin_mul_overflow(bits, t->shape[i], &bits);
    }
    if (overflow && !empty)
        return bad_tensor(h, name, "the product of its shape overflows");
    if (empty)
        bits = 0;
    if (bits % 8)
        return bad_tensor(h, name, "its %" PRId64 " bits are no whole number of bytes", bits);
    if (t->begin < 0 || t->end < t->begin)
        return bad_tensor(h, name, "data_offsets [%" PRId64 ", %" PRId64 "] are negative or reversed", t->begin, t->end);
    int64_t data = h->file->size - 8 - (int64_t)h->length;
    if (t->end > data)
        return bad_tensor(h, name, "data_offsets [%" PRId64 ", %" PRId64 "] pass the end of the file's %" PRId64 " bytes of data", t->begin,
                          t->end, data);
    if (t->end - t->begin != bits / 8)
        return bad_tensor(h, name, "data_offsets span %" PRId64 " bytes, but its shape and dtype need %" PRId64, t->end - t->begin,
                          bits / 8);
    return ENGINE_OK;
}

static enum engine_code out_of_memory(const struct header *h)
{
    return engine_fail(h->error, ENGINE_OUT_OF_MEMORY, "%s: out of memory for the tensor table", h->file->name);
}

static enum engine_code add_tensor(const struct header *h, const struct safetensors_tensor *t)
{
    struct safetensors_file *file = h->file;
    enum engine_code code = check_tensor(h, t->name, t);
    if (code)
        return code;
    if (file->count == file->capacity) {
        size_t capacity = file->capacity ? file->capacity * 2 : 64;
        struct safetensors_tensor *grown = reallocarray(file->tensor, capacity, sizeof *grown);
        if (!grown)
            return out_of_memory(h);
        file->tensor = grown;
        file->capacity = capacity;
    }
    file->tensor[file->count++] = *t;
    return ENGINE_OK;
}

/* ---- what writers write: {"dtype":"BF16","shape":[16,2048],"data_offsets":[0,65536]}, without spaces, members in any order ---- */

static bool plain_text(const struct header *h, size_t *at, const char *text)
{
    size_t n = strlen(text);
    if (h->length - *at < n || memcmp(h->text + *at, text, n) != 0)
        return false;
    *at += n;
    return true;
}

/* Of at most 18 digits, so that it can't overflow. What follows is the caller's to look at. */
static bool plain_number(const struct header *h, size_t *at, int64_t *out)
{
    size_t begin = *at;
    int64_t v = 0;
    for (; *at < h->length && *at - begin < 18 && h->text[*at] >= '0' && h->text[*at] <= '9'; (*at)++)
        v = 10 * v + (h->text[*at] - '0');
    *out = v;
    return *at > begin && (h->text[begin] != '0' || *at == begin + 1);
}

static bool plain_numbers(const struct header *h, size_t *at, int64_t *out, int32_t most, int32_t *count)
{
    *count = 0;
    if (!plain_text(h, at, "["))
        return false;
    if (plain_text(h, at, "]"))
        return true;
    do {
        if (*count == most || !plain_number(h, at, &out[(*count)++]))
            return false;
    } while (plain_text(h, at, ","));
    return plain_text(h, at, "]");
}

static bool plain_dtype(const struct header *h, size_t *at, enum safetensors_dtype *out)
{
    if (!plain_text(h, at, "\""))
        return false;
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        size_t after = *at;
        if (plain_text(h, &after, dtypes[d].name) && plain_text(h, &after, "\"")) {
            *at = after;
            *out = (enum safetensors_dtype)d;
            return true;
        }
    }
    return false;
}

/* False: it is not of this form, right or wrong, and nothing was consumed. */
static bool plain_tensor(struct header *h, struct safetensors_tensor *t)
{
    size_t at = h->at;
    int64_t offsets[2];
    int32_t count;
    bool dtype = false, shape = false, span = false;
    if (!plain_text(h, &at, "{"))
        return false;
    do {
        if (!dtype && plain_text(h, &at, "\"dtype\":"))
            dtype = plain_dtype(h, &at, &t->dtype);
        else if (!shape && plain_text(h, &at, "\"shape\":"))
            shape = plain_numbers(h, &at, t->shape, SAFETENSORS_MAX_RANK, &t->rank);
        else if (!span && plain_text(h, &at, "\"data_offsets\":"))
            span = plain_numbers(h, &at, offsets, 2, &count) && count == 2;
        else
            return false;
    } while (plain_text(h, &at, ","));
    if (!dtype || !shape || !span || !plain_text(h, &at, "}"))
        return false;
    t->begin = offsets[0];
    t->end = offsets[1];
    h->at = at;
    return true;
}

/* A string of printable ASCII without escapes, ended where its closing quote was. NULL: it is not of this form. */
static char *plain_string(struct header *h)
{
    if (h->at == h->length || h->text[h->at] != '"')
        return NULL;
    size_t at = h->at + 1;
    while (at < h->length && h->text[at] >= ' ' && h->text[at] <= '~' && h->text[at] != '"' && h->text[at] != '\\')
        at++;
    if (at == h->length || h->text[at] != '"')
        return NULL;
    char *text = h->text + h->at + 1;
    h->text[at] = 0;
    h->at = at + 1;
    return text;
}

/* ---- members ---- */

/* The next member's name, put into the header's text, where it has room; NULL after an error. */
static char *next_name(struct header *h)
{
    skip_space(h);
    char *name = plain_string(h);
    if (name)
        return name;
    size_t begin = h->at;
    json_t *value = next_string(h, "a member's name is not a string");
    if (!value)
        return NULL;
    name = h->text + begin + 1;
    memcpy(name, json_string_value(value), json_string_length(value) + 1); /* escapes are longer than what they stand for */
    json_decref(value);
    return name;
}

/* The members of the object at `at`, one after the other: `member` gets each one's name and stands before its value, which it consumes. */
static enum engine_code parse_object(struct header *h, enum engine_code (*member)(struct header *h, char *name, void *arg), void *arg)
{
    h->at++;
    skip_space(h);
    if (h->at < h->length && h->text[h->at] == '}') {
        h->at++;
        return ENGINE_OK;
    }
    for (;;) {
        char *name = next_name(h);
        if (!name)
            return h->error->code;
        skip_space(h);
        enum engine_code code;
        if (h->at == h->length || h->text[h->at] != ':') {
            code = bad_header(h, "':' expected");
        } else {
            h->at++;
            skip_space(h);
            code = member(h, name, arg);
        }
        if (code)
            return code;
        skip_space(h);
        char c = h->at < h->length ? h->text[h->at++] : 0;
        if (c == '}')
            return ENGINE_OK;
        if (c != ',')
            return bad_header(h, "',' or '}' expected");
    }
}

/* ---- __metadata__: checked and dropped, with no more kept than what tells duplicates ---- */

struct metadata {
    uint64_t *hash; /* of the keys */
    size_t count, capacity;
};

static int by_hash(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static enum engine_code parse_metadata_member(struct header *h, char *name, void *arg)
{
    struct metadata *m = arg;
    if (h->at == h->length || h->text[h->at] != '"')
        return engine_fail(h->error, h->file->bad, "%s: __metadata__ must map strings to strings; the value of \"%.200s\" is no string",
                           h->file->name, name);
    if (m->count == m->capacity) {
        size_t capacity = m->capacity ? m->capacity * 2 : 64;
        uint64_t *grown = reallocarray(m->hash, capacity, sizeof *grown);
        if (!grown)
            return out_of_memory(h);
        m->hash = grown;
        m->capacity = capacity;
    }
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *p = name; *p; p++)
        hash = (hash ^ (unsigned char)*p) * 0x100000001b3u;
    m->hash[m->count++] = hash;
    json_t *value = next_string(h, "a string expected");
    json_decref(value);
    return value ? ENGINE_OK : h->error->code;
}

static enum engine_code parse_metadata(struct header *h)
{
    struct metadata m = {0};
    if (h->at == h->length || h->text[h->at] != '{')
        return engine_fail(h->error, h->file->bad, "%s: __metadata__ is not an object", h->file->name);
    enum engine_code code = parse_object(h, parse_metadata_member, &m);
    if (!code && m.count)
        qsort(m.hash, m.count, sizeof *m.hash, by_hash);
    for (size_t i = 1; !code && i < m.count; i++)
        if (m.hash[i] == m.hash[i - 1])
            code = engine_fail(h->error, h->file->bad, "%s: duplicate key in __metadata__", h->file->name);
    free(m.hash);
    return code;
}

/* ---- the whole ---- */

static enum engine_code parse_member(struct header *h, char *name, void *arg)
{
    bool *metadata_seen = arg;
    if (!strcmp(name, "__metadata__")) {
        if (*metadata_seen)
            return engine_fail(h->error, h->file->bad, "%s: duplicate __metadata__ in the header", h->file->name);
        *metadata_seen = true;
        return parse_metadata(h);
    }
    struct safetensors_tensor t = {0};
    if (!plain_tensor(h, &t)) {
        json_t *entry = next_value(h, MAX_ENTRY);
        enum engine_code code = entry ? parse_tensor(h, name, entry, &t) : h->error->code;
        json_decref(entry);
        if (code)
            return code;
    }
    t.name = name;
    return add_tensor(h, &t);
}

static enum engine_code parse_members(struct header *h)
{
    if (!h->length || h->text[0] != '{')
        return bad_header(h, "it does not begin with '{'");
    bool metadata_seen = false;
    enum engine_code code = parse_object(h, parse_member, &metadata_seen);
    if (code)
        return code;
    skip_space(h);
    return h->at == h->length ? ENGINE_OK : bad_header(h, "something follows the object");
}

static int by_position(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
    const struct safetensors_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* Files are mostly in order already. */
static void sort(void *base, size_t n, size_t size, int (*compare)(const void *, const void *))
{
    size_t i = 1;
    while (i < n && compare((char *)base + (i - 1) * size, (char *)base + i * size) <= 0)
        i++;
    if (i < n)
        qsort(base, n, size, compare);
}

/* Sorts both ways; refuses duplicates, overlaps and holes; makes offsets absolute. */
static enum engine_code order_tensors(struct header *h)
{
    struct safetensors_file *file = h->file;
    int64_t data = 8 + (int64_t)h->length, at = 0;
    if (file->count) {
        sort(file->tensor, file->count, sizeof *file->tensor, by_position);
        file->sorted = reallocarray(NULL, file->count, sizeof *file->sorted);
        if (!file->sorted)
            return out_of_memory(h);
        for (size_t i = 0; i < file->count; i++)
            file->sorted[i] = &file->tensor[i];
        sort(file->sorted, file->count, sizeof *file->sorted, by_name);
    }
    for (size_t i = 1; i < file->count; i++)
        if (!strcmp(file->sorted[i - 1]->name, file->sorted[i]->name))
            return bad_tensor(h, file->sorted[i]->name, "duplicate name in the header");
    for (size_t i = 0; i < file->count; i++) {
        struct safetensors_tensor *t = &file->tensor[i];
        if (t->begin < at)
            return bad_tensor(h, t->name, "its data overlap those of \"%.200s\"", file->tensor[i - 1].name);
        if (t->begin > at)
            return bad_tensor(h, t->name, "a hole of %" PRId64 " bytes lies before its data", t->begin - at);
        at = t->end;
        t->begin += data;
        t->end += data;
    }
    if (at != file->size - data)
        return engine_fail(h->error, file->bad, "%s: %" PRId64 " bytes at the end of the file belong to no tensor", file->name,
                           file->size - data - at);
    return ENGINE_OK;
}

static enum engine_code load_header(struct safetensors_file *file, struct engine_error *error)
{
    if (fstat(file->fd, &file->opened))
        return engine_fail(error, engine_errno_code(errno), "%s: %s", file->name, strerror(errno));
    if (!S_ISREG(file->opened.st_mode))
        return engine_fail(error, file->bad, "%s is not a regular file", file->name);
    file->size = file->opened.st_size;
    if (file->size < 8)
        return engine_fail(error, file->bad, "%s: %" PRId64 " bytes are too few for a safetensors file", file->name, file->size);
    unsigned char raw[8];
    enum engine_code code = read_exactly(file, 0, raw, sizeof raw, error);
    if (code)
        return code;
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | raw[i];
    if (length > SAFETENSORS_MAX_HEADER)
        return engine_fail(error, file->bad, "%s: a header of %" PRIu64 " bytes is over the limit of %d", file->name, length,
                           SAFETENSORS_MAX_HEADER);
    if (length > (uint64_t)file->size - 8)
        return engine_fail(error, file->bad, "%s: truncated: the header's %" PRIu64 " bytes pass the file's end at %" PRId64, file->name,
                           length, file->size);
    char *text = file->text = malloc(length ? length : 1);
    if (!text)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "%s: out of memory for a header of %" PRIu64 " bytes", file->name, length);
    struct header h = {.file = file, .text = text, .length = length, .error = error};
    code = read_exactly(file, 8, text, length, error);
    if (!code)
        code = parse_members(&h);
    if (!code)
        code = order_tensors(&h);
    return code;
}

enum engine_code safetensors_open_fd(int fd, const char *name, enum engine_code bad, struct safetensors_file **out,
                                     struct engine_error *error)
{
    struct engine_error own;
    if (!error) /* the parser keeps its verdict there */
        error = &own;
    struct safetensors_file *file = calloc(1, sizeof *file);
    if (file)
        file->name = strdup(name);
    if (!file || !file->name) {
        close(fd);
        free(file);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "%s: out of memory", name);
    }
    file->fd = fd;
    file->bad = bad;
    enum engine_code code = load_header(file, error);
    if (code) {
        safetensors_close(file);
        return code;
    }
    *out = file;
    return ENGINE_OK;
}

enum engine_code safetensors_open(int dir_fd, const char *folder, const char *name, enum engine_code bad, struct safetensors_file **out,
                                  struct engine_error *error)
{
    const struct path_text path = path_show(folder, name);
    /* O_NONBLOCK: opening a FIFO must not wait for a writer; it means nothing for regular files. */
    int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return engine_fail(error, engine_errno_code(errno), "%s: %s", path.s, strerror(errno));
    return safetensors_open_fd(fd, path.s, bad, out, error);
}
