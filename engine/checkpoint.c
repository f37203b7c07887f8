/* SPDX-License-Identifier: Apache-2.0
 *
 * The index and its shards. Owns the folder's descriptor and every open file. The index is as untrusted as the shards: its
 * file names must be plain, and what it says of a shard must be what the shard holds.
 */
#include "engine/checkpoint.h"
#include "engine/config.h"
#include "engine/family.h"
#include "engine/path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SINGLE "model.safetensors"
#define INDEX "model.safetensors.index.json"
#define MAX_INDEX ((size_t)128 << 20)

struct shard {
    char *name;
    struct safetensors_file *file;
    bool failed; /* its faults have been added */
};

struct entry {
    const char *name; /* owned by the index, or by the only file */
    int32_t shard;
};

struct checkpoint {
    int dir_fd;
    char *folder; /* its path */
    json_t *index; /* NULL: a single file */
    struct shard *shard;
    int32_t shards;
    struct entry *entry;
    size_t count;
};

void checkpoint_close(struct checkpoint *c)
{
    if (!c)
        return;
    for (int32_t i = 0; i < c->shards; i++) {
        safetensors_close(c->shard[i].file);
        free(c->shard[i].name);
    }
    free(c->shard);
    free(c->entry);
    free(c->folder);
    json_decref(c->index);
    if (c->dir_fd >= 0)
        close(c->dir_fd);
    free(c);
}

int checkpoint_dir_fd(const struct checkpoint *c) { return c->dir_fd; }

size_t checkpoint_count(const struct checkpoint *c) { return c->count; }

const char *checkpoint_tensor_name(const struct checkpoint *c, size_t index) { return c->entry[index].name; }

int32_t checkpoint_file_index(const struct checkpoint *c, size_t index) { return c->entry[index].shard; }

int32_t checkpoint_files(const struct checkpoint *c) { return c->shards; }

int32_t checkpoint_files_opened(const struct checkpoint *c)
{
    int32_t n = 0;
    for (int32_t i = 0; i < c->shards; i++)
        n += c->shard[i].file != NULL;
    return n;
}

static enum engine_code out_of_memory(struct engine_error *error)
{
    return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory while reading the checkpoint's list of tensors");
}

static int by_name(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static int compare_strings(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

static int compare_shard(const void *key, const void *element) { return strcmp(key, ((const struct shard *)element)->name); }

static bool plain_file_name(const char *name)
{
    return name[0] && !strchr(name, '/') && strcmp(name, ".") && strcmp(name, "..") && strlen(name) <= 255;
}

/* Distinct file names of the map, sorted, become the shards. */
static enum engine_code list_shards(struct checkpoint *c, json_t *map, struct engine_error *error)
{
    size_t n = json_object_size(map), at = 0;
    const char **name = reallocarray(NULL, n + 1, sizeof *name), *key;
    json_t *value;
    if (!name)
        return out_of_memory(error);
    enum engine_code code = ENGINE_OK;
    json_object_foreach(map, key, value)
    {
        const char *file = json_string_value(value);
        if (!file || !plain_file_name(file)) {
            code = engine_fail(error, ENGINE_BAD_CHECKPOINT, "%s: weight_map must map \"%.200s\" to a plain file name, not to %.100s",
                               path_show(c->folder, INDEX).s, key, file ? file : "another type");
            goto out;
        }
        name[at++] = file;
    }
    qsort(name, n, sizeof *name, compare_strings);
    c->shard = calloc(n ? n : 1, sizeof *c->shard);
    if (!c->shard) {
        code = out_of_memory(error);
        goto out;
    }
    for (size_t i = 0; i < n; i++)
        if (!i || strcmp(name[i - 1], name[i])) {
            c->shard[c->shards].name = strdup(name[i]);
            if (!c->shard[c->shards++].name) {
                code = out_of_memory(error);
                break;
            }
        }
out:
    free(name);
    return code;
}

static enum engine_code open_index(struct checkpoint *c, struct engine_error *error)
{
    enum engine_code code = config_load_json(c->dir_fd, c->folder, INDEX, MAX_INDEX, ENGINE_BAD_CHECKPOINT, &c->index, error);
    if (code)
        return code;
    json_t *map = json_object_get(c->index, "weight_map"), *value;
    if (!json_is_object(map))
        return engine_fail(error, ENGINE_BAD_CHECKPOINT, "%s: weight_map is missing or not an object", path_show(c->folder, INDEX).s);
    code = list_shards(c, map, error);
    if (code)
        return code;
    c->entry = calloc(json_object_size(map) + 1, sizeof *c->entry);
    if (!c->entry)
        return out_of_memory(error);
    const char *key;
    json_object_foreach(map, key, value)
    {
        const struct shard *s = bsearch(json_string_value(value), c->shard, (size_t)c->shards, sizeof *c->shard, compare_shard);
        c->entry[c->count++] = (struct entry){key, (int32_t)(s - c->shard)};
    }
    qsort(c->entry, c->count, sizeof *c->entry, by_name);
    return ENGINE_OK;
}

static enum engine_code open_single(struct checkpoint *c, struct engine_error *error)
{
    c->shard = calloc(1, sizeof *c->shard);
    if (!c->shard)
        return out_of_memory(error);
    c->shards = 1;
    c->shard[0].name = strdup(SINGLE);
    if (!c->shard[0].name)
        return out_of_memory(error);
    enum engine_code code = safetensors_open(c->dir_fd, c->folder, SINGLE, ENGINE_BAD_CHECKPOINT, &c->shard[0].file, error);
    if (code)
        return code;
    c->count = safetensors_count(c->shard[0].file);
    c->entry = calloc(c->count + 1, sizeof *c->entry);
    if (!c->entry)
        return out_of_memory(error);
    for (size_t i = 0; i < c->count; i++)
        c->entry[i].name = safetensors_at(c->shard[0].file, i)->name;
    qsort(c->entry, c->count, sizeof *c->entry, by_name);
    return ENGINE_OK;
}

bool checkpoint_is_adapter(int dir_fd)
{
    static const char *const of_adapter[] = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"};
    struct stat st;
    if (!fstatat(dir_fd, SINGLE, &st, 0) || !fstatat(dir_fd, INDEX, &st, 0))
        return false;
    for (size_t i = 0; i < sizeof of_adapter / sizeof of_adapter[0]; i++)
        if (!fstatat(dir_fd, of_adapter[i], &st, 0))
            return true;
    return false;
}

enum engine_code checkpoint_open_folder(const char *folder, int *dir_fd, struct engine_error *error)
{
    struct stat st;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return engine_fail(error, engine_errno_code(errno), "%s: %s", path_show(folder, NULL).s, strerror(errno));
    if (!fstatat(fd, SINGLE, &st, 0) || !fstatat(fd, INDEX, &st, 0)) {
        *dir_fd = fd;
        return ENGINE_OK;
    }
    engine_fail(error, ENGINE_BAD_CHECKPOINT, "%s holds neither " SINGLE " nor " INDEX "%s", path_show(folder, NULL).s,
                checkpoint_is_adapter(fd) ? ": it is an adapter's folder, for --adapter or POST /adapters" : "");
    close(fd);
    return ENGINE_BAD_CHECKPOINT;
}

enum engine_code checkpoint_open(const char *folder, struct checkpoint **out, struct engine_error *error)
{
    struct checkpoint *c = calloc(1, sizeof *c);
    if (!c)
        return out_of_memory(error);
    struct stat st;
    c->dir_fd = -1;
    c->folder = strdup(folder);
    enum engine_code code = c->folder ? checkpoint_open_folder(folder, &c->dir_fd, error) : out_of_memory(error);
    if (!code) /* a folder with both: the single file is what transformers would read, too */
        code = !fstatat(c->dir_fd, SINGLE, &st, 0) ? open_single(c, error) : open_index(c, error);
    if (code) {
        checkpoint_close(c);
        return code;
    }
    *out = c;
    return ENGINE_OK;
}

/* A shard just opened must agree with the index about the tensors that it holds. */
static bool check_shard(const struct checkpoint *c, int32_t index, struct faults *faults)
{
    const struct shard *s = &c->shard[index];
    bool good = true;
    for (size_t i = 0; i < safetensors_count(s->file); i++) {
        const struct entry key = {safetensors_at(s->file, i)->name, 0};
        const struct entry *e = bsearch(&key, c->entry, c->count, sizeof *c->entry, by_name);
        struct family_tensor t;
        if (e && e->shard == index)
            continue;
        if (!e && !family_parse_tensor(key.name, &t))
            continue; /* somebody else's, and not loaded by anybody */
        good = false;
        const char *path = safetensors_name(s->file);
        if (!(e ? faults_add(faults, ENGINE_BAD_CHECKPOINT, "%s: tensor \"%.200s\" is here, but by " INDEX " in %.80s", path, key.name,
                             c->shard[e->shard].name)
                : faults_add(faults, ENGINE_BAD_CHECKPOINT, "%s: tensor \"%.200s\" is here, but not in " INDEX, path, key.name)))
            return false;
    }
    return good;
}

bool checkpoint_resolve(struct checkpoint *c, size_t index, const struct safetensors_file **file, const struct safetensors_tensor **tensor,
                        struct faults *faults)
{
    const struct entry *e = &c->entry[index];
    struct shard *s = &c->shard[e->shard];
    struct engine_error error;
    if (s->failed)
        return false;
    if (!s->file) {
        if (safetensors_open(c->dir_fd, c->folder, s->name, ENGINE_BAD_CHECKPOINT, &s->file, &error)) {
            s->failed = true;
            faults_add_error(faults, &error);
            return false;
        }
        if (!check_shard(c, e->shard, faults)) {
            s->failed = !faults->report; /* when only reporting, its tensors are worth a look */
            if (s->failed)
                return false;
        }
    }
    *file = s->file;
    *tensor = safetensors_find(s->file, e->name);
    if (!*tensor)
        faults_add(faults, ENGINE_BAD_CHECKPOINT, "%s: tensor \"%.200s\" is not here, where " INDEX " says it is",
                   safetensors_name(s->file), e->name);
    return *tensor != NULL;
}

enum engine_code checkpoint_check_unchanged(const struct checkpoint *c, struct engine_error *error)
{
    enum engine_code code = ENGINE_OK;
    for (int32_t i = 0; i < c->shards && !code; i++)
        if (c->shard[i].file)
            code = safetensors_check_unchanged(c->shard[i].file, error);
    return code;
}
