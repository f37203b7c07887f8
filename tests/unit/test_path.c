/* SPDX-License-Identifier: Apache-2.0
 *
 * Nothing leaves the root: every case with openat2 and with the walk that stands in for it.
 */
#include "engine/adapter.h"
#include "engine/path.h"
#include "scratch.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tree {
    struct scratch s;
    char *root;
    int root_fd;
};

static void make_dir(const struct tree *t, const char *name) { assert_return_code(mkdirat(t->s.fd, name, 0755), errno); }

static void link_to(const struct tree *t, const char *target, const char *name)
{
    assert_return_code(symlinkat(target, t->s.fd, name), errno);
}

static void write_file(const struct tree *t, const char *name, const char *text)
{
    int fd = openat(t->s.fd, name, O_WRONLY | O_CREAT | O_EXCL, 0644);
    assert_return_code(fd, errno);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static int setup(void **state)
{
    struct tree *t = calloc(1, sizeof *t);
    scratch_init(&t->s);
    make_dir(t, "root");
    make_dir(t, "root/hub");
    make_dir(t, "root/hub/blobs");
    make_dir(t, "root/hub/snapshots");
    make_dir(t, "root/hub/snapshots/x");
    make_dir(t, "outside");
    make_dir(t, "root-other");
    write_file(t, "root/hub/blobs/f", "inside");
    write_file(t, "outside/f", "secret");
    link_to(t, "../../blobs/f", "root/hub/snapshots/x/f");
    link_to(t, "hub/snapshots", "root/in");
    link_to(t, "../outside", "root/out");
    link_to(t, "/etc", "root/etc");
    link_to(t, "loop", "root/loop");
    link_to(t, "/proc/self/fd/0", "root/magic");
    char root[PATH_MAX], target[PATH_MAX];
    snprintf(root, sizeof root, "%s/root", t->s.path);
    t->root = realpath(root, NULL);
    snprintf(target, sizeof target, "%s/hub/blobs", t->root);
    link_to(t, target, "root/absolute");
    t->root_fd = open(root, O_PATH | O_DIRECTORY);
    assert_non_null(t->root);
    *state = t;
    return 0;
}

static int teardown(void **state)
{
    struct tree *t = *state;
    close(t->root_fd);
    free(t->root);
    scratch_finish(&t->s);
    free(t);
    return 0;
}

typedef int (*opener)(int, const char *, const char *, int, int *);
static const opener openers[] = {path_open_beneath, path_walk_beneath};

static void expect(const struct tree *t, const char *path, int want, const char *text)
{
    for (int i = 0; i < 2; i++) {
        int fd = -1, e = openers[i](t->root_fd, t->root, path, O_RDONLY, &fd);
        if (e != want)
            fail_msg("%s \"%s\": %s, not %s", i ? "walk" : "open", path, strerror(e), strerror(want));
        if (e)
            continue;
        char have[16] = "";
        if (text)
            assert_int_equal(read(fd, have, sizeof have), (ssize_t)strlen(text));
        assert_string_equal(have, text ? text : "");
        close(fd);
    }
}

static void stays_inside(void **state)
{
    const struct tree *t = *state;
    expect(t, "hub/blobs/f", 0, "inside");
    expect(t, "hub//blobs/./f", 0, "inside");
    expect(t, "hub/snapshots/x/f", 0, "inside");
    expect(t, "in/x/f", 0, "inside");
    expect(t, "in/x/../../blobs/f", 0, "inside");
    expect(t, "absolute/f", 0, "inside");
    expect(t, ".", 0, NULL);
    expect(t, "hub/", 0, NULL);
    expect(t, "hub/blobs/nothing", ENOENT, NULL);
    expect(t, "hub/blobs/f/", ENOTDIR, NULL);
    expect(t, "hub/blobs/f/x", ENOTDIR, NULL);
    expect(t, "", ENOENT, NULL);
}

static void leaves(void **state)
{
    const struct tree *t = *state;
    expect(t, "..", EXDEV, NULL);
    expect(t, "../outside/f", EXDEV, NULL);
    expect(t, "hub/../../outside/f", EXDEV, NULL);
    expect(t, "out/f", EXDEV, NULL);
    expect(t, "out", EXDEV, NULL);
    expect(t, "etc/passwd", EXDEV, NULL);
    expect(t, "in/../../outside/f", ENOENT, NULL); /* "in" is hub/snapshots: two levels up is the root */
    expect(t, "in/../../../outside/f", EXDEV, NULL);
    expect(t, "loop", ELOOP, NULL);
    expect(t, "/etc/passwd", EXDEV, NULL);
}

static void long_names(void **state)
{
    const struct tree *t = *state;
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    expect(t, name, ENAMETOOLONG, NULL);
    static char path[PATH_MAX + 10];
    for (size_t i = 0; i + 2 < sizeof path; i += 2)
        memcpy(path + i, "./", 2);
    expect(t, path, ENAMETOOLONG, NULL);
}

static void strips_roots(void **state)
{
    (void)state;
    assert_string_equal(path_strip_root("/a/b", "/a/b/c"), "c");
    assert_string_equal(path_strip_root("/a/b/", "/a/b//c"), "c");
    assert_string_equal(path_strip_root("/a/b", "/a/b"), ".");
    assert_string_equal(path_strip_root("/a/b", "/a/b/"), ".");
    assert_string_equal(path_strip_root("/", "/x"), "x");
    assert_null(path_strip_root("/a/b", "/a/bc"));
    assert_null(path_strip_root("/a/b", "/a"));
    assert_null(path_strip_root("/a/b", "b"));
}

static void files_are_shown_with_their_folders(void **state)
{
    (void)state;
    char folder[PATH_FOLDER_SHOWN + 100], name[256];
    assert_string_equal(path_show("/m", "config.json").s, "/m/config.json");
    assert_string_equal(path_show("/m/", "config.json").s, "/m/config.json");
    assert_string_equal(path_show("/m", NULL).s, "/m");
    assert_string_equal(path_show(NULL, "config.json").s, "config.json");
    assert_string_equal(path_show(NULL, NULL).s, "");
    memset(folder, 'd', sizeof folder - 1);
    folder[sizeof folder - 1] = '\0';
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    struct path_text long_one = path_show(folder, name);
    assert_int_equal(strlen(long_one.s), PATH_FOLDER_SHOWN + 1 + 255);
    assert_memory_equal(long_one.s, folder, PATH_FOLDER_SHOWN);
    assert_string_equal(long_one.s + PATH_FOLDER_SHOWN + 1, name);
}

static void folder(const struct tree *t, const char *path, enum engine_code want, const char *message)
{
    struct engine_error error = {0};
    int fd = -1;
    enum engine_code code = adapter_folder_beneath(t->root_fd, t->root, path, &fd, &error);
    assert_int_equal(code, want);
    if (code == ENGINE_OK)
        close(fd);
    else if (!strstr(error.message, message))
        fail_msg("\"%s\" does not say \"%s\"", error.message, message);
}

static void folders_and_their_errors(void **state)
{
    const struct tree *t = *state;
    char path[PATH_MAX + 100];
    folder(t, "hub/snapshots/x", ENGINE_OK, NULL);
    snprintf(path, sizeof path, "%s/hub", t->root);
    folder(t, path, ENGINE_OK, NULL);
    snprintf(path, sizeof path, "%s-other", t->root);
    folder(t, path, ENGINE_FORBIDDEN_PATH, "is not beneath the adapter root");
    folder(t, "/etc", ENGINE_FORBIDDEN_PATH, "path \"/etc\" is not beneath the adapter root");
    folder(t, "..", ENGINE_FORBIDDEN_PATH, "path \"..\" leaves the adapter root");
    folder(t, "out", ENGINE_FORBIDDEN_PATH, "leaves the adapter root");
    folder(t, "", ENGINE_BAD_REQUEST, "is empty");
    folder(t, "nothing", ENGINE_NO_FILE, "there is no folder \"nothing\"");
    folder(t, "hub/blobs/f", ENGINE_BAD_ADAPTER, "is not a folder");
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    folder(t, path, ENGINE_BAD_REQUEST, "at most 4095 are allowed");
}

/* ---- a link that changes all the time ------------------------------------------------------------------------ */

struct swapper {
    const struct tree *t;
    atomic_bool stop;
};

static void *swap_links(void *arg)
{
    struct swapper *s = arg;
    int fd = s->t->s.fd;
    while (!atomic_load(&s->stop)) {
        (void)!symlinkat("hub/blobs", fd, "root/next");
        (void)!renameat(fd, "root/next", fd, "root/swap");
        (void)!symlinkat("../outside", fd, "root/next");
        (void)!renameat(fd, "root/next", fd, "root/swap");
        (void)!mkdirat(fd, "root/next", 0755);
        unlinkat(fd, "root/swap", 0);
        (void)!renameat(fd, "root/next", fd, "root/swap");
        unlinkat(fd, "root/swap", AT_REMOVEDIR);
    }
    return NULL;
}

static void swapped_links_never_lead_out(void **state)
{
    struct swapper s = {.t = *state};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, swap_links, &s), 0);
    int inside = 0, secret = 0, refused = 0;
    for (int i = 0; i < 1000000 && (i < 20000 || inside < 100 || refused < 100); i++) {
        int fd, e = openers[i & 1](s.t->root_fd, s.t->root, "swap/f", O_RDONLY, &fd);
        if (e) {
            refused++;
            continue;
        }
        char text[8] = "";
        assert_int_equal(read(fd, text, 6), 6);
        close(fd);
        inside += !strcmp(text, "inside");
        secret += !strcmp(text, "secret");
    }
    atomic_store(&s.stop, true);
    pthread_join(thread, NULL);
    assert_int_equal(secret, 0);
    assert_true(inside > 0);
    assert_true(refused > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stays_inside),
        cmocka_unit_test(leaves),
        cmocka_unit_test(long_names),
        cmocka_unit_test(strips_roots),
        cmocka_unit_test(files_are_shown_with_their_folders),
        cmocka_unit_test(folders_and_their_errors),
        cmocka_unit_test(swapped_links_never_lead_out),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
