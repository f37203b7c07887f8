/* SPDX-License-Identifier: Apache-2.0
 *
 * The daemon's life: options, listeners, the model, serving, draining.
 *
 * Listeners answer from the first moment (live, not ready); the main thread loads the model and then waits for the end. Signals are taken
 * by a thread of their own: the first SIGTERM or SIGINT starts draining, also while loading, the second ends the process on the spot,
 * and SIGHUP reads the key files again.
 */
#include "server/handlers.h"
#include "server/json_memory.h"
#include "server/listener.h"
#include "server/log.h"
#include "server/notify.h"
#include "server/route.h"
#include "server/spool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#define MAIN_POLL_MS 100
#define MAIN_FAILED_S 2 /* after the device failed: time for waiting clients to be told */
#define MAIN_WORKERS 4
#define MAIN_WORKERS_WAITING 64
#define MAIN_PARSERS 2
#define MAIN_WAITERS 16 /* removals that wait for an adapter's last request, at once */

/* Told apart for whoever starts the process: after EXIT_USAGE, what was asked for has to be changed before another start can help. */
enum { EXIT_GOOD = 0, EXIT_BAD = 1, EXIT_USAGE = 2 };

static int main_status(enum engine_code code)
{
    switch (code) {
    case ENGINE_OK: return EXIT_GOOD;
    case ENGINE_CANCELLED: /* by a signal that also says how this ends */
    case ENGINE_DEVICE_FAILED:
    case ENGINE_OUT_OF_MEMORY:
    case ENGINE_OUT_OF_DEVICE_MEMORY:
    case ENGINE_IO:
    case ENGINE_INTERNAL: return EXIT_BAD;
    default: return EXIT_USAGE; /* options, the checkpoint, adapters */
    }
}

struct main_state {
    struct server server;
    struct listener_set listeners;
    atomic_bool stop; /* engine_create's cancel too */
    int wake;
};

/* ---- signals ----------------------------------------------------------------------------------------------------- */

static sigset_t main_signal_set(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    return set;
}

static void main_reload_keys(const struct main_state *m)
{
    const struct options *o = m->server.options;
    struct engine_error error;
    if (!o->api_key_file && !o->admin_key_file)
        log_message(LOG_LEVEL_INFO, "SIGHUP: there are no key files to read again");
    else if (auth_reload(m->server.auth, o->api_key_file, o->admin_key_file, &error) == ENGINE_OK)
        log_message(LOG_LEVEL_INFO, "SIGHUP: the key files were read again");
    else
        log_message(LOG_LEVEL_ERROR, "SIGHUP: the keys stay as they are: %s", error.message);
}

/* Waits for a signal that asks for the end. */
static int main_next_end(const struct main_state *m)
{
    sigset_t set = main_signal_set();
    for (;;) {
        int signal_number = 0;
        if (sigwait(&set, &signal_number) != 0)
            continue;
        if (signal_number != SIGHUP)
            return signal_number;
        int state;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* the log's lock must not be left behind */
        main_reload_keys(m);
        pthread_setcancelstate(state, NULL);
    }
}

static void *main_take_signals(void *arg)
{
    struct main_state *m = arg;
    main_next_end(m);
    atomic_store(&m->server.phase, SERVER_DRAINING);
    atomic_store(&m->stop, true);
    (void)!write(m->wake, &(uint64_t){1}, sizeof(uint64_t));
    int signal_number = main_next_end(m);
    listener_unlink_all(&m->listeners);
    _exit(128 + signal_number);
}

/* ---- start --------------------------------------------------------------------------------------------------------- */

static void main_raise_descriptors(const struct options *o)
{
    /* Two for each connection, and some for files, epoll sets and threads. */
    struct rlimit limit;
    rlim_t wanted = 2 * (rlim_t)o->max_connections + 1024;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
        return;
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= wanted ? wanted : limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < wanted)
        log_message(LOG_LEVEL_WARNING, "only %" PRIu64 " descriptors are allowed; %" PRIu64 " would serve --max-connections",
                    (uint64_t)limit.rlim_cur, (uint64_t)wanted);
}

/* NULL: the name can't be written in JSON or in a URL. */
static const char *main_model_name(const struct options *o, char *text, size_t size)
{
    char *real = o->model && !o->model_name ? realpath(o->model, NULL) : NULL;
    const char *slash = real ? strrchr(real, '/') : NULL;
    int length = snprintf(text, size, "%s",
                          o->model_name       ? o->model_name
                          : !o->model         ? "synthetic"
                          : slash && slash[1] ? slash + 1
                                              : "model");
    free(real);
    bool good = length > 0 && (size_t)length < size;
    for (const char *p = text; good && *p; p++)
        good = (unsigned char)*p >= ' ' && *p != 0x7f;
    json_t *string = good ? json_string(text) : NULL; /* NULL: not UTF-8 */
    json_decref(string);
    return string ? text : NULL;
}

static struct engine_options main_engine_options(const struct options *o)
{
    return (struct engine_options){
        .model = o->model,
        .synthetic = o->synthetic,
        .family = o->family,
        .layers = o->layers,
        .experts = o->experts,
        .dtype = o->dtype,
        .device = o->device,
        .threads = (int)o->threads,
        .max_batch_rows = o->max_batch_rows,
        .queue_rows = o->queue_rows,
        .batch_wait_us = o->batch_wait_us == OPTIONS_WORD ? ENGINE_BATCH_WAIT_AUTO : o->batch_wait_us,
        .max_adapters = (int)o->max_adapters,
        .max_adapter_bytes = o->max_adapter_bytes,
        .adapter_root = o->adapter_root,
        .max_inflight_bytes = o->max_inflight_bytes,
        .log = log_from_engine,
    };
}

/* The name in NAME=PATH, and a descriptor of the folder, which is the caller's to close. -1: the line that says why is logged, and *status
 * is the exit status. */
static int main_open_adapter(const char *item, char name[ENGINE_ADAPTER_NAME_MAX + 1], int *status)
{
    *status = EXIT_USAGE;
    const char *equals = strchr(item, '=');
    size_t length = (size_t)(equals - item);
    if (!engine_adapter_name_valid(item, length)) {
        log_message(LOG_LEVEL_ERROR, "--adapter %s: a name is 1 to %d of A-Z a-z 0-9 . _ - and / inside", item, ENGINE_ADAPTER_NAME_MAX);
        return -1;
    }
    memcpy(name, item, length);
    name[length] = '\0';
    int fd = open(equals + 1, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        *status = main_status(engine_errno_code(errno));
        log_message(LOG_LEVEL_ERROR, "--adapter %s: %s", item, strerror(errno));
    }
    return fd;
}

/* What needs no weights to be found wrong is said before anybody is told that there is a server. Returns the exit status. */
static int main_check_options(const struct options *o)
{
    char message[512];
    for (size_t i = 0; i < o->listen.count; i++) {
        if (!listener_check(o->listen.item[i], message, sizeof message)) {
            log_message(LOG_LEVEL_ERROR, "%s", message);
            return EXIT_USAGE;
        }
    }
    struct engine_options options = main_engine_options(o);
    struct engine_error error;
    enum engine_code code = engine_options_check(&options, &error);
    if (code != ENGINE_OK) {
        log_message(LOG_LEVEL_ERROR, "%s", error.message);
        return main_status(code);
    }
    for (size_t i = 0; i < o->adapter.count; i++) {
        char name[ENGINE_ADAPTER_NAME_MAX + 1];
        int status, fd = main_open_adapter(o->adapter.item[i], name, &status);
        if (fd < 0)
            return status;
        close(fd);
    }
    return EXIT_GOOD;
}

/* What is wrong with the adapters' files, and needs no values to be seen, is said before time goes into loading weights; not before there
 * is a server, since every shard's header is read for it. Returns the exit status. */
static int main_check_adapters(const struct main_state *m)
{
    const struct options_list *list = &m->server.options->adapter;
    struct engine_options options = main_engine_options(m->server.options);
    struct engine_outline *outline = NULL;
    struct engine_error error;
    enum engine_code code = list->count ? engine_outline_create(&options, &outline, &error) : ENGINE_OK;
    if (code != ENGINE_OK) {
        log_message(LOG_LEVEL_ERROR, "%s", error.message);
        return main_status(code);
    }
    int status = EXIT_GOOD;
    for (size_t i = 0; i < list->count && status == EXIT_GOOD && !atomic_load(&m->stop); i++) {
        char name[ENGINE_ADAPTER_NAME_MAX + 1];
        int fd = main_open_adapter(list->item[i], name, &status);
        if (fd < 0)
            break;
        code = engine_outline_check_adapter(outline, fd, &error);
        close(fd);
        if (code != ENGINE_OK)
            log_message(LOG_LEVEL_ERROR, "--adapter %s: %s", list->item[i], error.message);
        status = main_status(code);
    }
    engine_outline_destroy(outline);
    return status;
}

/* --adapter NAME=PATH, each before the first request. Returns the exit status. */
static int main_install_adapters(const struct main_state *m, struct engine *engine)
{
    const struct options_list *list = &m->server.options->adapter;
    for (size_t i = 0; i < list->count && !atomic_load(&m->stop); i++) {
        char name[ENGINE_ADAPTER_NAME_MAX + 1];
        int status, fd = main_open_adapter(list->item[i], name, &status);
        if (fd < 0)
            return status;
        struct engine_adapter_info info;
        struct engine_error error;
        bool replaced;
        enum engine_code code = engine_adapter_install_fd(engine, name, fd, false, &info, &replaced, &error);
        close(fd);
        if (code != ENGINE_OK) {
            log_message(LOG_LEVEL_ERROR, "--adapter %s: %s", list->item[i], error.message);
            return main_status(code);
        }
        adapters_log("adapter installed", &info, "--adapter", strchr(list->item[i], '=') + 1, NULL);
        engine_adapter_info_finish(&info);
    }
    return EXIT_GOOD;
}

/* NULL: *status is the exit status. */
static struct engine *main_load(struct main_state *m, int *status)
{
    struct log_progress progress;
    struct engine_options options = main_engine_options(m->server.options);
    struct engine *engine = NULL;
    struct engine_error error;
    *status = main_check_adapters(m);
    if (*status != EXIT_GOOD || atomic_load(&m->stop))
        return NULL;
    log_progress_begin(&progress, "loading weights");
    options.progress = log_progress_update;
    options.progress_arg = &progress;
    enum engine_code code = engine_create(&options, &m->stop, &engine, &error);
    log_progress_end(&progress);
    if (code != ENGINE_OK) {
        if (code != ENGINE_CANCELLED)
            log_message(LOG_LEVEL_ERROR, "%s", error.message);
        *status = main_status(code);
        return NULL;
    }
    *status = main_install_adapters(m, engine);
    if (*status == EXIT_GOOD)
        return engine;
    engine_destroy(engine);
    return NULL;
}

/* ---- serving and the end -------------------------------------------------------------------------------------------- */

static void main_wait(struct main_state *m, int64_t timeout_ms)
{
    struct pollfd p = {.fd = m->wake, .events = POLLIN};
    poll(&p, 1, (int)timeout_ms);
}

/* Waits until no request is open; false when the time is up first. */
static bool main_wait_requests(const struct main_state *m, int64_t timeout_ms)
{
    for (int64_t until = server_now_ns() + timeout_ms * 1000000;
         atomic_load(&m->server.requests) + atomic_load(&m->server.suspended) > 0;) {
        if (server_now_ns() >= until)
            return false;
        usleep(5000);
    }
    return true;
}

/* Serves until a signal or a failure. Returns the exit status so far. */
static int main_serve(struct main_state *m, struct engine *engine)
{
    int ready = SERVER_LOADING;
    atomic_store_explicit(&m->server.engine, engine, memory_order_release);
    if (atomic_compare_exchange_strong(&m->server.phase, &ready, SERVER_READY)) {
        notify_manager("READY=1");
        log_message(LOG_LEVEL_INFO, "ready");
    }
    while (!atomic_load(&m->stop) && !engine_failed(engine))
        main_wait(m, MAIN_POLL_MS);
    bool failed = engine_failed(engine);
    notify_manager("STOPPING=1");
    int64_t limit_ms = m->server.options->drain_timeout_s * 1000;
    const int waiting = atomic_load(&m->server.requests); /* before anybody is told, and may be done by then */
    if (failed) {
        log_message(LOG_LEVEL_ERROR, "the device has failed; leaving");
        usleep(MAIN_FAILED_S * 1000000); /* so that whoever asks is told why, and probes see it */
    } else {
        log_message(LOG_LEVEL_INFO, "draining, at most %" PRId64 " s", m->server.options->drain_timeout_s);
    }
    int64_t began = server_now_ns();
    /* The engine goes on taking what was accepted before: new heads are refused by their own check. */
    bool drained = main_wait_requests(m, limit_ms);
    engine_begin_drain(engine);
    if (drained)
        log_message(LOG_LEVEL_INFO, "drained, %d requests finished in %.1f s", waiting, (double)(server_now_ns() - began) * 1e-9);
    else
        log_message(LOG_LEVEL_WARNING, "drain timed out with %d requests open", atomic_load(&m->server.requests));
    return failed || !drained ? EXIT_BAD : EXIT_GOOD;
}

/* A standard descriptor that came closed would be given to the first socket or file opened, and the log be written into that. */
static bool main_fill_descriptors(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            return false;
    return true;
}

static int main_run(struct main_state *m)
{
    struct server *s = &m->server;
    const struct options *o = s->options;
    char message[512] = "out of memory or descriptors";
    const char *route[64];
    int status = EXIT_BAD;
    struct http *http = NULL;
    struct engine *engine = NULL;
    pthread_t signals;
    bool have_signals = false;

    for (size_t i = 0; i <= route_count; i++)
        route[i] = route_table[i].pattern;
    m->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int checked = main_check_options(o);
    if (checked != EXIT_GOOD)
        return checked;
    struct engine_error error;
    if (auth_create(o->api_key_file, o->admin_key_file, o->metrics_open, &s->auth, &error) != ENGINE_OK) {
        log_message(LOG_LEVEL_ERROR, "%s", error.message);
        return main_status(error.code);
    }
    s->spool = spool_create(o->spool_dir, message, sizeof message);
    if (!s->spool || !listener_open_all(&m->listeners, &o->listen, message, sizeof message)) {
        log_message(LOG_LEVEL_ERROR, "%s", message);
        status = s->spool ? EXIT_BAD : EXIT_USAGE;
        goto out;
    }
    s->metrics = metrics_create(route, route_count + 1);
    s->watch = watch_create();
    s->workers = workers_create(MAIN_WORKERS, MAIN_WORKERS_WAITING);
    s->waiters = workers_create(MAIN_WAITERS, MAIN_WORKERS_WAITING);
    s->parsers = workers_create(MAIN_PARSERS, (int)o->max_connections);
    if (m->wake >= 0 && s->metrics && s->watch && s->workers && s->waiters && s->parsers)
        http = http_start(s, &m->listeners, message, sizeof message);
    if (!http || pthread_create(&signals, NULL, main_take_signals, m) != 0) {
        log_message(LOG_LEVEL_ERROR, "%s", message);
        goto out;
    }
    have_signals = true;
    for (size_t i = 0; i < m->listeners.count; i++)
        dprintf(STDERR_FILENO, "listening on %s\n", m->listeners.item[i].text);

    engine = main_load(m, &status);
    if (engine)
        status = main_serve(m, engine);
    else if (atomic_load(&m->stop))
        status = EXIT_GOOD;
    atomic_store(&s->stopping, true);
    if (atomic_load(&s->suspended) > 0 || (engine && engine_failed(engine))) {
        /* Neither libmicrohttpd nor the engine can be stopped under open requests; and what a lost device holds can't be given back: its
         * driver may wait for it for ever, even in a destructor that the C library calls. */
        listener_unlink_all(&m->listeners);
        log_refused_summary(true);
        _exit(EXIT_BAD);
    }

out:
    http_stop(http);
    workers_destroy(s->workers);
    workers_destroy(s->waiters);
    workers_destroy(s->parsers);
    atomic_store(&s->engine, NULL);
    engine_destroy(engine);
    watch_destroy(s->watch);
    metrics_destroy(s->metrics);
    if (have_signals) { /* it may use the listeners and `wake` until here */
        pthread_cancel(signals);
        pthread_join(signals, NULL);
    }
    listener_close_all(&m->listeners);
    spool_destroy(s->spool);
    log_refused_summary(true);
    if (have_signals)
        log_message(LOG_LEVEL_INFO, "stopped");
    auth_destroy(s->auth);
    /* m->wake stays open: the signal thread may be about to write to it. */
    return status;
}

int main(int argc, char **argv)
{
    static struct main_state state; /* the signal thread outlives main's frame */
    struct options options;
    char message[512], name[256];
    enum log_format format = LOG_FORMAT_TEXT;
    enum log_level level = LOG_LEVEL_INFO;

    if (!main_fill_descriptors())
        return EXIT_BAD;
    sigset_t set = main_signal_set();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* so that a file too large fails to be written, as on a full disk */
    if (!json_memory_init()) {
        fputs("expertd: no address space for the reserve of JSON memory\n", stderr);
        return EXIT_BAD;
    }
    if (!options_parse(&options, argc, argv, message, sizeof message)) {
        fprintf(stderr, "expertd: %s\n", message);
        return EXIT_USAGE;
    }
    if (options.help) {
        options_print_help(stdout);
        options_finish(&options);
        return EXIT_GOOD;
    }
    if (options.version) {
        printf("expertd %s\n", EXPERTD_VERSION);
        options_finish(&options);
        return EXIT_GOOD;
    }
    log_format_parse(options.log_format, &format);
    log_level_parse(options.log_level, &level);
    log_init(STDERR_FILENO, format, level);
    int status;
    if (options.check) {
        struct engine_options engine = main_engine_options(&options);
        pthread_sigmask(SIG_UNBLOCK, &set, NULL); /* nobody waits for them here */
        status = main_status(engine_check(options.check, &engine, stdout));
    } else {
        main_raise_descriptors(&options);
        state.server.options = &options;
        state.server.model_name = main_model_name(&options, name, sizeof name);
        if (!state.server.model_name) {
            fprintf(stderr, "expertd: --model-name takes 1 to %zu bytes of UTF-8 without control characters%s\n", sizeof name - 1,
                    options.model_name ? "" : "; the folder's name is none, so it is needed");
            options_finish(&options);
            return EXIT_USAGE;
        }
        state.server.started_at = time(NULL);
        state.wake = -1;
        status = main_run(&state);
    }
    options_finish(&options);
    return status;
}
