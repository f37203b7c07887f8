/* SPDX-License-Identifier: Apache-2.0
 *
 * adapter_read: opens an adapter's files, has them parsed and planned (see peft.h), and turns the tensors into deltas of the
 * model's operand type. All values are read and checked, also those for layers and experts that are not held here.
 */
#include "engine/path.h"
#include "engine/peft.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG_NAME "adapter_config.json"
#define MODEL_NAME "adapter_model.safetensors"
#define PICKLE_NAME "adapter_model.bin"
#define READ_PIECE ((size_t)4 << 20)
#define MAX_MOVED 32 /* a folder that is replaced while we read it is begun anew so often */

/* Where the files are: straight in dir_fd, or at path/ beneath root_fd, which is then opened as dir_fd, too. */
struct source {
    int dir_fd;
    int root_fd; /* -1: dir_fd alone */
    const char *root, *path;
    bool *moved; /* set when path/ was seen to lead to another folder than dir_fd */
};

/* ---- files ----------------------------------------------------------------------------------------------------- */

static enum engine_code split_path(const char *root, const char *path, const char **relative, struct engine_error *error)
{
    if (!*path)
        return engine_fail(error, ENGINE_BAD_REQUEST, "the adapter's path is empty");
    if (strlen(path) >= PATH_MAX)
        return engine_fail(error, ENGINE_BAD_REQUEST, "the adapter's path has %zu bytes; at most %d are allowed", strlen(path),
                           PATH_MAX - 1);
    *relative = path[0] == '/' ? path_strip_root(root, path) : path;
    if (!*relative)
        return engine_fail(error, ENGINE_FORBIDDEN_PATH, "path \"%s\" is not beneath the adapter root", PEFT_QUOTE(path));
    return ENGINE_OK;
}

enum engine_code adapter_open_beneath(int root_fd, const char *root, const char *path, int *dir_fd, struct engine_error *error)
{
    const char *relative;
    enum engine_code code = split_path(root, path, &relative, error);
    if (code != ENGINE_OK)
        return code;
    int e = path_open_beneath(root_fd, root, relative, O_RDONLY | O_DIRECTORY | O_CLOEXEC, dir_fd);
    switch (e) {
    case 0: return ENGINE_OK;
    case EXDEV:
    case ELOOP: return engine_fail(error, ENGINE_FORBIDDEN_PATH, "path \"%s\" leaves the adapter root", PEFT_QUOTE(path));
    case ENOENT: return engine_fail(error, ENGINE_IO, "there is no folder \"%s\" beneath the adapter root", PEFT_QUOTE(path));
    case ENOTDIR: return engine_fail(error, ENGINE_BAD_ADAPTER, "path \"%s\" is not a folder", PEFT_QUOTE(path));
    case ENAMETOOLONG: return engine_fail(error, ENGINE_BAD_REQUEST, "path \"%s\" is too long", PEFT_QUOTE(path));
    case EMFILE:
    case ENFILE:
    case ENOMEM: return engine_fail(error, ENGINE_OUT_OF_MEMORY, "path \"%s\" can't be opened: out of files or memory", PEFT_QUOTE(path));
    default: return engine_fail(error, ENGINE_IO, "path \"%s\" can't be opened: %s", PEFT_QUOTE(path), strerror(e));
    }
}

/* An errno, or 0 and a descriptor. O_NONBLOCK: a FIFO must not hang us before we see that it is one. */
static int open_file(const struct source *source, const char *name, int *fd)
{
    int flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    if (source->root_fd < 0) {
        *fd = openat(source->dir_fd, name, flags);
        return *fd < 0 ? errno : 0;
    }
    char *path = NULL;
    if (asprintf(&path, "%s/%s", source->path, name) < 0)
        return ENOMEM;
    int e = path_open_beneath(source->root_fd, source->root, path, flags, fd);
    free(path);
    if (e)
        return e;
    /* The path is walked anew for each file, since links in the folder must stay beneath the root. Where a link on the way was swapped
     * meanwhile, as deployments do, this file would belong to another version than those before: it must be the one in dir_fd. */
    struct stat opened, ours;
    if (!fstat(*fd, &opened) && !fstatat(source->dir_fd, name, &ours, 0) && opened.st_dev == ours.st_dev && opened.st_ino == ours.st_ino)
        return 0;
    close(*fd);
    *source->moved = true;
    return ESTALE;
}

/* -1 and a fault when the file is not there or not a plain one. */
static int open_plain(const struct source *source, const char *name, struct stat *st, struct faults *log)
{
    int fd, e = open_file(source, name, &fd);
    if (!e && fstat(fd, st)) {
        e = errno;
        close(fd);
    }
    if (e) {
        if (e == EXDEV || e == ELOOP)
            faults_add(log, ENGINE_FORBIDDEN_PATH, "%s is a link that leaves the adapter root", name);
        else if (e == ENOENT)
            faults_add(log, ENGINE_IO, "the adapter's folder has no %s", name);
        else if (e == ESTALE)
            faults_add(log, ENGINE_IO, "%s: the adapter's folder is replaced again and again while it is read", name);
        else
            faults_add(log, e == ENOMEM || e == EMFILE || e == ENFILE ? ENGINE_OUT_OF_MEMORY : ENGINE_IO, "%s can't be opened: %s", name,
                       strerror(e));
        return -1;
    }
    if (!S_ISREG(st->st_mode)) {
        close(fd);
        faults_add(log, ENGINE_BAD_ADAPTER, "%s is not a regular file", name);
        return -1;
    }
    return fd;
}

static bool read_config(const struct source *source, struct peft_config *config, struct faults *log)
{
    struct stat st;
    int fd = open_plain(source, CONFIG_NAME, &st, log);
    if (fd < 0)
        return false;
    if (st.st_size > PEFT_MAX_CONFIG) {
        close(fd);
        return faults_add(log, ENGINE_BAD_ADAPTER, CONFIG_NAME " has %lld bytes; at most %d are allowed", (long long)st.st_size,
                          PEFT_MAX_CONFIG) &&
               false;
    }
    size_t want = (size_t)st.st_size, have = 0;
    char *text = malloc(want + 1);
    int e = text ? 0 : ENOMEM;
    while (!e && have < want) {
        ssize_t n = pread(fd, text + have, want - have, (off_t)have);
        if (n > 0)
            have += (size_t)n;
        else if (n == 0)
            break; /* it shrank: what there is must parse */
        else if (errno != EINTR)
            e = errno;
    }
    close(fd);
    bool on = e ? faults_add(log, e == ENOMEM ? ENGINE_OUT_OF_MEMORY : ENGINE_IO, CONFIG_NAME " can't be read: %s", strerror(e)) && false
                : peft_config_parse(text, have, config, log);
    free(text);
    return on;
}

static struct safetensors_file *open_model(const struct source *source, int64_t max_bytes, struct faults *log)
{
    struct stat st;
    int fd, e = open_file(source, MODEL_NAME, &fd);
    if (!e)
        close(fd);
    if (e == ENOENT && !open_file(source, PICKLE_NAME, &fd)) {
        close(fd);
        faults_add(log, ENGINE_ADAPTER_UNSUPPORTED, PICKLE_NAME " is a pickle, which is not read; save the adapter as " MODEL_NAME);
        return NULL;
    }
    fd = open_plain(source, MODEL_NAME, &st, log);
    if (fd < 0)
        return NULL;
    if (max_bytes > 0 && st.st_size > max_bytes) {
        close(fd);
        faults_add(log, ENGINE_TOO_LARGE, MODEL_NAME " has %lld bytes; the limit is %lld", (long long)st.st_size, (long long)max_bytes);
        return NULL;
    }
    struct safetensors_file *file = NULL;
    struct engine_error error;
    if (safetensors_open_fd(fd, MODEL_NAME, ENGINE_BAD_ADAPTER, &file, &error) != ENGINE_OK) {
        faults_add_error(log, &error);
        return NULL;
    }
    return file;
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

struct reader {
    const struct safetensors_file *file;
    const struct model *model;
    struct faults *log;
    struct adapter_data *data;
    uint16_t *next; /* unused part of data->memory; operand types have two bytes */
    char *piece; /* [READ_PIECE] bytes as they are in the file */
    uint16_t *fused[2]; /* a whole fused tensor, A and B */
    size_t fused_room[2];
    int64_t not_held; /* tensors */
};

static int64_t elements(const struct safetensors_tensor *t) { return t->shape[0] * t->shape[1]; }

static bool is_finite(enum dtype op, uint16_t v)
{
    uint16_t exponent = op == DTYPE_BF16 ? 0x7f80 : 0x7c00;
    return (v & exponent) != exponent;
}

/* All of a tensor as operands; dst NULL: only checked. */
static bool read_tensor(struct reader *r, const struct safetensors_tensor *t, uint16_t *dst)
{
    enum dtype op = r->model->dims.op, type = DTYPE_FP32;
    safetensors_dtype_float(t->dtype, &type);
    size_t size = dtype_size(type), count = (size_t)elements(t), step = READ_PIECE / size;
    uint16_t *checked = (uint16_t *)(r->piece + READ_PIECE);
    for (size_t at = 0; at < count; at += step) {
        size_t n = count - at < step ? count - at : step;
        struct engine_error error;
        if (safetensors_read(r->file, t, (int64_t)(at * size), r->piece, n * size, &error) != ENGINE_OK)
            return faults_add_error(r->log, &error);
        uint16_t *to = dst ? dst + at : checked;
        dtype_convert(to, op, r->piece, type, n);
        for (size_t i = 0; i < n; i++)
            if (!is_finite(op, to[i]))
                return faults_add(r->log, ENGINE_BAD_ADAPTER, "tensor \"%s\": element %zu is %g, which is not finite as %s",
                                  PEFT_QUOTE(t->name), at + i, (double)dtype_load_f32(r->piece + i * size, type), dtype_name(op));
    }
    return true;
}

static struct adapter_delta *add_delta(struct reader *r, int32_t layer_index, int32_t expert, enum kernel_projection projection,
                                       const struct peft_pair *pair)
{
    struct adapter_delta *d = &r->data->delta[r->data->deltas++];
    *d = (struct adapter_delta){
        .layer_index = layer_index, .expert = expert, .projection = projection, .rank = pair->rank, .scale = pair->scale};
    return d;
}

static uint16_t *claim(struct reader *r, int64_t count)
{
    uint16_t *at = r->next;
    r->next += count;
    return at;
}

static bool read_linear(struct reader *r, const struct peft_pair *pair, int32_t layer_index)
{
    int32_t expert = r->model->local_expert[pair->expert];
    if (layer_index < 0 || expert < 0)
        return read_tensor(r, pair->a, NULL) && read_tensor(r, pair->b, NULL);
    uint16_t *a = claim(r, elements(pair->a)), *b = claim(r, elements(pair->b));
    struct adapter_delta *d = add_delta(r, layer_index, expert, pair->projection, pair);
    d->a = a;
    d->b = b;
    return read_tensor(r, pair->a, a) && read_tensor(r, pair->b, b);
}

/* One expert's A, [rank, in], out of the fused pair: the tensor A has the expert slowest, B has it fastest. */
static void cut_a(const struct reader *r, const struct peft_pair *pair, int64_t expert, uint16_t *a)
{
    const uint16_t *fa = r->fused[0], *fb = r->fused[1];
    int64_t rank = pair->rank, experts = r->model->experts, n = pair->a->shape[1], m = pair->b->shape[0];
    if (!pair->swapped)
        memcpy(a, fa + expert * rank * n, (size_t)(rank * n) * sizeof *a);
    else
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < rank; j++)
                a[j * m + i] = fb[(i * rank + j) * experts + expert];
}

/* Row `row` of one expert's B, [out, rank]. */
static void cut_b_row(const struct reader *r, const struct peft_pair *pair, int64_t expert, int64_t row, uint16_t *b)
{
    const uint16_t *fa = r->fused[0], *fb = r->fused[1];
    int64_t rank = pair->rank, experts = r->model->experts, n = pair->a->shape[1];
    for (int64_t j = 0; j < rank; j++)
        b[j] = pair->swapped ? fa[(expert * rank + j) * n + row] : fb[(row * rank + j) * experts + expert];
}

static void cut_expert(struct reader *r, const struct peft_pair *pair, int32_t layer_index, int32_t held)
{
    int64_t expert = r->model->held_experts[held], rank = pair->rank, inter = r->model->dims.inter, hidden = r->model->dims.hidden;
    bool down = pair->projection == KERNEL_DOWN, interleaved = r->model->fused == MODEL_FUSED_INTERLEAVED;
    uint16_t *a = claim(r, rank * (down ? inter : hidden));
    cut_a(r, pair, expert, a);
    int64_t out = down ? hidden : inter;
    for (int part = 0; part < (down ? 1 : 2); part++) { /* gate, then up, which share A */
        uint16_t *b = claim(r, out * rank);
        for (int64_t i = 0; i < out; i++)
            cut_b_row(r, pair, expert, down ? i : interleaved ? 2 * i + part : part * inter + i, b + i * rank);
        struct adapter_delta *d = add_delta(r, layer_index, held, down ? KERNEL_DOWN : part ? KERNEL_UP : KERNEL_GATE, pair);
        d->a = a;
        d->b = b;
    }
}

static bool read_fused(struct reader *r, const struct peft_pair *pair, int32_t layer_index)
{
    if (layer_index < 0)
        return read_tensor(r, pair->a, NULL) && read_tensor(r, pair->b, NULL);
    const struct safetensors_tensor *t[2] = {pair->a, pair->b};
    for (int i = 0; i < 2; i++) {
        size_t count = (size_t)elements(t[i]);
        if (r->fused_room[i] < count) {
            free(r->fused[i]);
            r->fused[i] = malloc(count * sizeof *r->fused[i]);
            r->fused_room[i] = r->fused[i] ? count : 0;
        }
        if (!r->fused[i])
            return faults_add(r->log, ENGINE_OUT_OF_MEMORY, "out of memory for tensor \"%s\"", PEFT_QUOTE(t[i]->name));
        if (!read_tensor(r, t[i], r->fused[i]))
            return false;
    }
    for (int32_t held = 0; held < r->model->dims.experts; held++)
        cut_expert(r, pair, layer_index, held);
    return true;
}

static int32_t find_layer(const struct model *model, int64_t number)
{
    const struct model_layer *layer = model_find_layer(model, number);
    return layer ? (int32_t)(layer - model->layer) : -1;
}

/* Room for everything held. Sums can't overflow: what is held is no more than the file, whose size is that of its tensors. */
static bool make_room(struct reader *r, const struct peft_plan *plan)
{
    size_t deltas = 0, count = 0;
    for (size_t i = 0; i < plan->pairs; i++) {
        const struct peft_pair *pair = &plan->pair[i];
        bool fused = pair->expert < 0,
             held = find_layer(r->model, pair->layer) >= 0 && (fused || r->model->local_expert[pair->expert] >= 0);
        size_t whole = (size_t)(elements(pair->a) + elements(pair->b));
        r->not_held += held ? 0 : 2;
        if (held) {
            deltas += !fused ? 1 : (size_t)r->model->dims.experts * (pair->projection == KERNEL_DOWN ? 1 : 2);
            count += fused ? whole / (size_t)r->model->experts * (size_t)r->model->dims.experts : whole;
        }
        if (pair->rank > r->data->rank)
            r->data->rank = pair->rank;
    }
    r->data->delta = calloc(deltas ? deltas : 1, sizeof *r->data->delta);
    r->data->memory = r->next = malloc(count ? count * sizeof *r->next : 1);
    r->piece = malloc(READ_PIECE + READ_PIECE);
    return (r->data->delta && r->data->memory && r->piece) ||
           faults_add(r->log, ENGINE_OUT_OF_MEMORY, "out of memory for an adapter of %zu values", count);
}

static int compare_deltas(const void *pa, const void *pb)
{
    const struct adapter_delta *a = pa, *b = pb;
    if (a->layer_index != b->layer_index)
        return a->layer_index < b->layer_index ? -1 : 1;
    if (a->expert != b->expert)
        return a->expert < b->expert ? -1 : 1;
    return (int)a->projection - (int)b->projection;
}

static void read_values(struct reader *r, const struct peft_plan *plan)
{
    bool on = make_room(r, plan);
    for (size_t i = 0; on && i < plan->pairs; i++) {
        const struct peft_pair *pair = &plan->pair[i];
        int32_t layer_index = find_layer(r->model, pair->layer);
        on = pair->expert < 0 ? read_fused(r, pair, layer_index) : read_linear(r, pair, layer_index);
    }
    if (on)
        qsort(r->data->delta, r->data->deltas, sizeof *r->data->delta, compare_deltas);
    free(r->piece);
    free(r->fused[0]);
    free(r->fused[1]);
}

/* ---- the whole ------------------------------------------------------------------------------------------------- */

static void note_what_is_missing(const struct reader *r, const struct peft_plan *plan, struct faults *log)
{
    if (!plan->tensors)
        faults_warn(log, "no tensor adapts a routed expert: rows with this adapter equal those of the base model");
    if (r->not_held)
        faults_warn(log, "%lld tensors are for layers or experts that this server does not hold", (long long)r->not_held);
}

static void read_all(const struct source *source, const struct model *model, int64_t max_bytes, struct adapter_data *data,
                     struct faults *log)
{
    struct peft_config config = {0};
    struct peft_plan plan = {0};
    struct safetensors_file *file = NULL;
    bool on = read_config(source, &config, log);
    if (on || log->report) {
        file = open_model(source, max_bytes, log);
        on = on && file;
    }
    on = on && peft_plan_create(file, &config, model, log, &plan);
    if (on) {
        struct reader r = {.file = file, .model = model, .log = log, .data = data};
        data->tensors = plan.tensors;
        data->ignored = plan.ignored;
        read_values(&r, &plan);
        if (!log->count)
            note_what_is_missing(&r, &plan, log);
    }
    peft_plan_finish(&plan);
    safetensors_close(file);
    peft_config_finish(&config);
}

static enum engine_code read_source(const struct source *source, const struct model *model, int64_t max_bytes, FILE *report,
                                    struct adapter_data **out, struct engine_error *error)
{
    struct adapter_data *data = calloc(1, sizeof *data);
    if (!data)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for an adapter");
    struct faults log = {.report = report};
    read_all(source, model, max_bytes, data, &log);
    enum engine_code code = faults_finish(&log, error);
    if (code != ENGINE_OK) {
        adapter_data_destroy(data);
        return code;
    }
    data->warning_count = faults_take_warnings(&log, &data->warnings);
    *out = data;
    return ENGINE_OK;
}

enum engine_code adapter_read(int dir_fd, const struct model *model, int64_t max_bytes, FILE *report, struct adapter_data **out,
                              struct engine_error *error)
{
    return read_source(&(struct source){.dir_fd = dir_fd, .root_fd = -1}, model, max_bytes, report, out, error);
}

enum engine_code adapter_read_beneath(int root_fd, const char *root, const char *path, const struct model *model, int64_t max_bytes,
                                      struct adapter_data **out, struct engine_error *error)
{
    bool moved;
    struct source source = {.root_fd = root_fd, .root = root, .moved = &moved};
    enum engine_code code = split_path(root, path, &source.path, error);
    if (code != ENGINE_OK)
        return code;
    int tries = 0;
    do {
        moved = false;
        code = adapter_open_beneath(root_fd, root, source.path, &source.dir_fd, error);
        if (code != ENGINE_OK)
            return code;
        code = read_source(&source, model, max_bytes, NULL, out, error);
        close(source.dir_fd);
    } while (code != ENGINE_OK && moved && ++tries < MAX_MOVED);
    return code;
}

void adapter_data_destroy(struct adapter_data *data)
{
    if (!data)
        return;
    for (int32_t i = 0; i < data->warning_count; i++)
        free(data->warnings[i]);
    free(data->warnings);
    free(data->delta);
    free(data->memory);
    free(data);
}
