/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens an adapter's folder and files, and has them parsed, planned and cut into pieces (see peft.h).
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

enum engine_code adapter_folder_beneath(int root_fd, const char *root, const char *path, int *dir_fd, struct engine_error *error)
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
    case ENOENT: return engine_fail(error, ENGINE_NO_FILE, "there is no folder \"%s\" beneath the adapter root", PEFT_QUOTE(path));
    case ENOTDIR: return engine_fail(error, ENGINE_BAD_ADAPTER, "path \"%s\" is not a folder", PEFT_QUOTE(path));
    case ENAMETOOLONG: return engine_fail(error, ENGINE_BAD_REQUEST, "path \"%s\" is too long", PEFT_QUOTE(path));
    default: return engine_fail(error, engine_errno_code(e), "path \"%s\" can't be opened: %s", PEFT_QUOTE(path), strerror(e));
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
            faults_add(log, ENGINE_NO_FILE, "the adapter's folder has no %s", name);
        else if (e == ESTALE)
            faults_add(log, ENGINE_NO_FILE, "%s: the adapter's folder is replaced again and again while it is read", name);
        else
            faults_add(log, engine_errno_code(e), "%s can't be opened: %s", name, strerror(e));
        return -1;
    }
    if (!S_ISREG(st->st_mode)) {
        close(fd);
        faults_add(log, ENGINE_BAD_ADAPTER, "%s is not a regular file", name);
        return -1;
    }
    return fd;
}

/* It stays open, to be looked at again when the weights that it belongs to have been read. */
static bool read_config(const struct source *source, struct adapter_files *files, struct peft_config *config, struct faults *log)
{
    int fd = files->config_fd = open_plain(source, CONFIG_NAME, &files->config, log);
    if (fd < 0)
        return false;
    if (files->config.st_size > PEFT_MAX_CONFIG)
        return faults_add(log, ENGINE_BAD_ADAPTER, CONFIG_NAME " has %lld bytes; at most %d are allowed", (long long)files->config.st_size,
                          PEFT_MAX_CONFIG) &&
               false;
    size_t want = (size_t)files->config.st_size, have = 0;
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

/* ---- the whole ------------------------------------------------------------------------------------------------- */

static void note_what_is_missing(const struct adapter_files *files, struct faults *log)
{
    if (!files->plan.tensors)
        faults_warn(log, "no tensor adapts a routed expert: rows with this adapter equal those of the base model");
    if (files->not_held)
        faults_warn(log, "%lld tensors are for layers or experts that this server does not hold", (long long)files->not_held);
}

static void open_all(const struct source *source, int64_t max_bytes, bool values, struct adapter_data *data, struct faults *log)
{
    struct peft_config config = {0};
    struct adapter_files *files = data->files;
    bool on = read_config(source, files, &config, log);
    if (on || log->report) {
        files->file = open_model(source, max_bytes, log);
        on = on && files->file;
    }
    on = on && peft_plan_create(files->file, &config, files->model, log, &files->plan);
    peft_config_finish(&config);
    if (!on)
        return;
    data->tensors = files->plan.tensors;
    data->ignored = files->plan.ignored;
    on = peft_values_cut(data, log) && (!values || peft_values_read(data, log));
    if (on && !log->count)
        note_what_is_missing(files, log);
}

static enum engine_code open_source(const struct source *source, const struct model *model, int64_t max_bytes, bool values, FILE *report,
                                    struct adapter_data **out, struct engine_error *error)
{
    struct adapter_data *data = calloc(1, sizeof *data);
    if (data)
        data->files = calloc(1, sizeof *data->files);
    if (!data || !data->files) {
        free(data);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for an adapter");
    }
    data->files->model = model;
    data->files->config_fd = -1;
    struct faults log = {.report = report};
    open_all(source, max_bytes, values, data, &log);
    enum engine_code code = faults_finish(&log, error);
    if (code != ENGINE_OK) {
        adapter_data_destroy(data);
        return code;
    }
    data->warning_count = faults_take_warnings(&log, &data->warnings);
    *out = data;
    return ENGINE_OK;
}

enum engine_code adapter_open(int dir_fd, const struct model *model, int64_t max_bytes, struct adapter_data **out,
                              struct engine_error *error)
{
    return open_source(&(struct source){.dir_fd = dir_fd, .root_fd = -1}, model, max_bytes, false, NULL, out, error);
}

enum engine_code adapter_read(int dir_fd, const struct model *model, int64_t max_bytes, FILE *report, struct adapter_data **out,
                              struct engine_error *error)
{
    return open_source(&(struct source){.dir_fd = dir_fd, .root_fd = -1}, model, max_bytes, true, report, out, error);
}

enum engine_code adapter_open_beneath(int root_fd, const char *root, const char *path, const struct model *model, int64_t max_bytes,
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
        code = adapter_folder_beneath(root_fd, root, source.path, &source.dir_fd, error);
        if (code != ENGINE_OK)
            return code;
        code = open_source(&source, model, max_bytes, false, NULL, out, error);
        close(source.dir_fd);
    } while (code != ENGINE_OK && moved && ++tries < MAX_MOVED);
    return code;
}

enum engine_code adapter_check_unchanged(const struct adapter_data *data, struct engine_error *error)
{
    const struct adapter_files *files = data->files;
    enum engine_code code = path_check_unchanged(files->config_fd, &files->config, CONFIG_NAME, ENGINE_BAD_ADAPTER, error);
    return code ? code : safetensors_check_unchanged(files->file, error);
}

void adapter_data_destroy(struct adapter_data *data)
{
    if (!data)
        return;
    for (int32_t i = 0; i < data->warning_count; i++)
        free(data->warnings[i]);
    free(data->warnings);
    free(data->delta);
    free(data->piece);
    free(data->memory);
    peft_plan_finish(&data->files->plan);
    safetensors_close(data->files->file);
    if (data->files->config_fd >= 0)
        close(data->files->config_fd);
    free(data->files);
    free(data);
}
