/* SPDX-License-Identifier: Apache-2.0
 *
 * Two threads and one lock. The engine thread owns the device: it runs jobs, gathers waiting requests into a batch, hands it
 * over, and completes the oldest batch in flight. The sweeper completes requests whose client has gone or whose deadline has
 * passed while the engine thread is busy with others. The lock guards the queue, the jobs and the figures; it is never held while
 * the device works, a job runs or a request's `done` is called.
 */
#include "engine/scheduler.h"
#include "engine/adapter.h"
#include "engine/batch.h"
#include "engine/clock.h"
#include "engine/company.h"
#include "engine/jobs.h"
#include "engine/queue.h"
#include "engine/stats.h"

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_DEPTH = 8,
    WORTHWHILE = 16, /* see choose_key */
    IDLE_NS = 1000000000, /* between two canaries */
    AWAKE_NS = 200000, /* after work, before the engine thread sleeps; see stay_awake */
    HELD_NS = 2000000, /* while a batch is held back for no longer than this it does not sleep, either */
    SWEEP_NS = 1000000, /* at least so long between two sweeps, each of which walks the whole queue */
};

struct scheduler {
    struct scheduler_options options;
    pthread_t engine, sweeper;
    pthread_t engine_self; /* what the engine thread calls itself, under the lock */
    bool engine_started, sweeper_started, locks_made;

    pthread_mutex_t lock;
    pthread_cond_t work; /* for the engine thread: requests, jobs, stop */
    pthread_cond_t sweep; /* for the sweeper: cancellations, earlier deadlines, stop */
    pthread_cond_t idle; /* for scheduler_wait_idle and posters without memory */
    struct queue queue; /* key = 2 * layer index + path */
    struct company company; /* of the same keys */
    struct jobs jobs;
    atomic_uint arrivals; /* requests, jobs and orders to stop, counted under the lock */
    struct engine_stats stats;
    int64_t running_rows;
    int64_t open; /* requests whose done has not returned yet */
    bool draining, stopping; /* refuse; also end the threads */
    bool gone; /* the engine thread runs no more jobs */
    atomic_bool failed;
    char failure[sizeof((struct engine_error *)0)->message];

    /* The engine thread's own. Batches in flight are those from `first` on, `flying` of them, in a ring. */
    struct batch ring[MAX_DEPTH];
    int depth, first, flying;
    int64_t last_finish_ns;
};

/* ---- completion ------------------------------------------------------------------------------------------ */

/* Successful rows of each adapter, counted in one go where a request names few. */
static void count_adapter_rows(const struct engine_request *request)
{
    int64_t rows[64] = {0};
    if (request->adapter_count == 0)
        return;
    if (!request->row_adapter) {
        engine_adapter_count_rows(request->adapters[0], request->rows);
        return;
    }
    int32_t few = request->adapter_count < 64 ? request->adapter_count : 64;
    for (int32_t t = 0; t < request->rows; t++) {
        int32_t i = request->row_adapter[t];
        if (i >= few)
            engine_adapter_count_rows(request->adapters[i], 1);
        else if (i >= 0)
            rows[i]++;
    }
    for (int32_t i = 0; i < few; i++) {
        if (rows[i])
            engine_adapter_count_rows(request->adapters[i], rows[i]);
    }
}

/* Tells the owners of a list of requests, which have their final status. The memory of a request may be gone after its done. */
static void complete_list(struct scheduler *s, struct engine_request *list)
{
    int64_t count = 0;
    if (!list)
        return;
    pthread_mutex_lock(&s->lock);
    for (struct engine_request *r = list; r; r = r->next)
        stats_count_request(&s->stats, r);
    pthread_mutex_unlock(&s->lock);
    while (list) {
        struct engine_request *r = list;
        list = r->next;
        r->next = NULL;
        if (r->status == ENGINE_OK)
            count_adapter_rows(r);
        r->done(r);
        count++;
    }
    pthread_mutex_lock(&s->lock);
    s->open -= count;
    if (s->open == 0)
        pthread_cond_broadcast(&s->idle);
    pthread_mutex_unlock(&s->lock);
}

/* The queue time of requests that never began. */
static void stamp_waits(struct engine_request *list)
{
    int64_t now = clock_now_ns();
    for (; list; list = list->next)
        list->queue_ns = now - list->submitted_ns;
}

/* The device is lost, and with it everybody who waits. Batches in flight are left to their own completion. */
static void fail_device(struct scheduler *s, const char *message)
{
    struct engine_request *waiting = NULL, **last = &waiting, *next;
    pthread_mutex_lock(&s->lock);
    bool first = !atomic_load(&s->failed);
    if (first) {
        snprintf(s->failure, sizeof s->failure, "%s", message);
        s->stats.failed = true;
        atomic_store(&s->failed, true);
    }
    for (struct engine_request *r = queue_take_all(&s->queue, true, ENGINE_DEVICE_FAILED); r; r = next) {
        next = r->next;
        r->next = NULL;
        if (r->rows_started > r->rows_done)
            continue; /* completes with its windows in flight */
        *last = r;
        last = &r->next;
    }
    pthread_mutex_unlock(&s->lock);
    if (first && s->options.on_failure)
        s->options.on_failure(s->options.on_failure_arg, message);
    complete_list(s, waiting);
}

/* Books a batch that has left the device and completes the requests that end with it. */
static void finish_batch(struct scheduler *s, struct batch *batch, enum engine_code code)
{
    int64_t now = clock_now_ns();
    /* A batch that waited behind another began when that one ended. */
    int64_t behind = s->last_finish_ns > batch->begun_ns ? s->last_finish_ns - batch->begun_ns : 0, spent = now - batch->begun_ns - behind;
    struct engine_request *done = NULL, **last = &done;
    int32_t answered = 0;
    s->last_finish_ns = now;
    pthread_mutex_lock(&s->lock);
    s->running_rows -= batch->rows;
    if (code == ENGINE_OK)
        stats_count_batch(&s->stats, batch);
    for (int32_t i = 0; i < batch->parts; i++) {
        struct engine_request *r = batch->part[i].request;
        bool waits = r->rows_started < r->rows && r->status == ENGINE_OK;
        r->rows_done += batch->part[i].rows;
        r->compute_ns += spent;
        if (batch->part[i].first == 0)
            r->queue_ns += behind;
        if (batch->rows > r->batch_rows)
            r->batch_rows = batch->rows;
        if (code != ENGINE_OK && r->status == ENGINE_OK) {
            r->status = code;
            if (waits)
                queue_remove(&s->queue, batch->key, r);
        }
        if (r->rows_done == (r->status == ENGINE_OK ? r->rows : r->rows_started)) {
            *last = r;
            last = &r->next;
            answered += r->status == ENGINE_OK;
        }
    }
    *last = NULL;
    company_count_batch(&s->company, batch->key, batch->parts, answered, batch->rows, code == ENGINE_OK ? spent : 0, now,
                        s->queue.list[batch->key].head != NULL);
    pthread_mutex_unlock(&s->lock);
    complete_list(s, done);
}

/* ---- batches --------------------------------------------------------------------------------------------- */

/* Moves what waits under `key` into the batch, in order, until a bound closes it. A request is cut only when it could not fit
 * a batch of its own; what remains of it goes to the end of the list. Returns those to be dropped. */
static struct engine_request *gather(struct scheduler *s, int32_t key, int64_t now, struct batch *batch)
{
    struct engine_request *dropped = NULL, **last = &dropped, *r;
    batch_clear(batch);
    batch->key = key;
    batch->gathered_ns = now;
    while ((r = s->queue.list[key].head) && batch->rows < batch->max_rows) {
        enum engine_code why = queue_dropped(r, now);
        if (why != ENGINE_OK) {
            queue_pop(&s->queue, key);
            r->status = why;
            *last = r;
            last = &r->next;
            continue;
        }
        int32_t left = r->rows - r->rows_started;
        int32_t fit = batch_request_fit(r, r->rows_started, batch->max_rows - batch->rows, batch->max_slots - batch->slots);
        if (fit == 0 || (fit < left && batch_request_fit(r, r->rows_started, batch->max_rows, batch->max_slots) == left))
            break;
        queue_pop(&s->queue, key);
        batch_add(batch, r, r->rows_started, fit);
        if (r->rows_started == 0)
            r->queue_ns = now - r->submitted_ns;
        r->started_ns = now;
        r->rows_started += fit;
        s->running_rows += fit;
        if (fit < left) {
            queue_push(&s->queue, key, r);
            break;
        }
    }
    return dropped;
}

/* Until when a batch of this key, whose turn it is on a free device, should wait for others. Not while anything else waits, as the
 * device would be idle for all of them, nor to become one of which a part would be handed over beside another anyway. */
static int64_t hold_back(struct scheduler *s, int32_t key, int64_t now)
{
    const struct queue_list *list = &s->queue.list[key];
    if (s->draining || list->rows != s->queue.rows || list->head->rows_started > 0)
        return now;
    return company_until(&s->company, key, list->rows, s->options.max_rows / WORTHWHILE, s->queue.next_deadline_ns, now);
}

/* The key of a small batch for a device that is at work: the oldest one, if everybody is here who could be in it; or -1. */
static int32_t early_key(struct scheduler *s)
{
    int64_t next;
    int32_t key = queue_oldest(&s->queue, INT64_MAX, 0, &next);
    if (key < 0)
        return -1;
    const struct queue_list *list = &s->queue.list[key];
    return company_early(&s->company, key, list->requests, list->rows, s->options.max_rows / WORTHWHILE) ? key : -1;
}

/* The key to start a batch of now, or -1; then *wake_ns is when to look again if nothing happens.
 *
 * A device that is at work gets another batch meanwhile if that is a sizeable part of a full one: copying it overlaps with the
 * computation before it. A smaller one costs little more than the weights that it makes the device read, so it does better to
 * wait for the company that arrives meanwhile, unless a batch was preferred to it already, or nobody is left who could come. */
static int32_t choose_key(struct scheduler *s, int64_t now, int64_t *wake_ns)
{
    int64_t wait_ns = s->draining || s->options.batch_wait_us < 0 ? 0 : s->options.batch_wait_us * 1000, before = now - wait_ns + 1,
            enough = s->options.max_rows, next;
    if (s->flying == s->depth)
        return -1;
    if (s->flying > 0) {
        int64_t newest = s->ring[(s->first + s->flying - 1) % s->depth].gathered_ns;
        before = newest < before ? newest : before;
        enough = wait_ns > 0 ? enough : enough / WORTHWHILE;
    }
    int32_t key = queue_oldest(&s->queue, before, enough, &next);
    *wake_ns = next < INT64_MAX ? next + wait_ns : INT64_MAX;
    if (key < 0 && s->flying > 0 && wait_ns == 0)
        return early_key(s);
    if (key < 0 || s->flying > 0)
        return key;
    int64_t until = hold_back(s, key, now);
    if (until <= now)
        return key;
    *wake_ns = until;
    return -1;
}

/* Hands a gathered batch to the device. */
static void start_batch(struct scheduler *s, struct batch *batch)
{
    struct engine_error error = {0};
    batch_fill(batch, s->options.model, batch->key / KERNEL_PATHS, (enum kernel_path)(batch->key % KERNEL_PATHS));
    batch->begun_ns = clock_now_ns();
    enum engine_code code = s->options.device->ops->submit(s->options.device, &batch->device, &error);
    if (code == ENGINE_OK) {
        s->flying++;
        return;
    }
    if (code == ENGINE_DEVICE_FAILED)
        fail_device(s, error.message);
    finish_batch(s, batch, code);
}

/* True when the oldest batch has finished, or nobody can tell; false when something has arrived since `seen` was read. */
static bool await_oldest(const struct scheduler *s, unsigned seen)
{
    struct device *device = s->options.device;
    if (s->flying == s->depth || !device->ops->ready)
        return true;
    while (!device->ops->ready(device)) {
        if (atomic_load(&s->arrivals) != seen)
            return false;
        sched_yield();
    }
    return true;
}

static void finish_oldest(struct scheduler *s)
{
    struct engine_error error = {0};
    struct batch *batch = &s->ring[s->first];
    enum engine_code code = s->options.device->ops->wait(s->options.device, &error);
    s->first = (s->first + 1) % s->depth;
    s->flying--;
    if (code == ENGINE_DEVICE_FAILED)
        fail_device(s, error.message);
    if (atomic_load(&s->failed))
        code = ENGINE_DEVICE_FAILED; /* nothing that a lost device says about the batches behind it is to be believed */
    finish_batch(s, batch, code);
}

/* ---- the engine thread ------------------------------------------------------------------------------------ */

/* Runs all jobs that wait. Called and returns without the lock. */
static void run_jobs(struct scheduler *s)
{
    struct job job;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        bool got = jobs_pop(&s->jobs, &job);
        if (got)
            pthread_cond_broadcast(&s->idle);
        pthread_mutex_unlock(&s->lock);
        if (!got)
            return;
        job.fn(job.arg);
    }
}

static void probe(struct scheduler *s)
{
    struct engine_error error = {0};
    if (!atomic_load(&s->failed) && s->options.device->ops->canary(s->options.device, &error) == ENGINE_DEVICE_FAILED)
        fail_device(s, error.message);
    if (s->options.on_idle)
        s->options.on_idle(s->options.on_idle_arg);
}

/* A client that is answered often comes again at once, and waking a thread that sleeps takes longer than preparing a small batch. So the
 * thread looks out for a moment, where the device doesn't compute on this processor. */
static void stay_awake(const struct scheduler *s, unsigned seen, int64_t until_ns)
{
    while (atomic_load(&s->arrivals) == seen && clock_now_ns() < until_ns)
        sched_yield();
}

static void *engine_main(void *arg)
{
    struct scheduler *s = arg;
    int64_t quiet_since = clock_now_ns();
    pthread_mutex_lock(&s->lock);
    s->engine_self = pthread_self();
    pthread_mutex_unlock(&s->lock);
    for (;;) {
        run_jobs(s);
        pthread_mutex_lock(&s->lock);
        unsigned seen = atomic_load(&s->arrivals);
        int64_t now = clock_now_ns(), wake = INT64_MAX;
        struct engine_request *refused = s->stopping ? queue_take_all(&s->queue, false, ENGINE_DRAINING) : NULL;
        int32_t key = choose_key(s, now, &wake);
        if (refused || key >= 0) {
            struct batch *batch = &s->ring[(s->first + s->flying) % s->depth];
            struct engine_request *dropped = key >= 0 ? gather(s, key, now, batch) : NULL;
            if (key >= 0)
                stats_count_wait(&s->stats, company_begin(&s->company, key, batch->parts, batch->rows, now));
            pthread_mutex_unlock(&s->lock);
            stamp_waits(refused);
            complete_list(s, refused);
            stamp_waits(dropped);
            complete_list(s, dropped);
            if (key >= 0 && batch->parts)
                start_batch(s, batch);
            quiet_since = clock_now_ns();
        } else if (s->flying > 0) {
            pthread_mutex_unlock(&s->lock);
            if (await_oldest(s, seen))
                finish_oldest(s);
            quiet_since = clock_now_ns();
        } else if (s->jobs.head) {
            pthread_mutex_unlock(&s->lock);
        } else if (s->stopping) {
            s->gone = true; /* under the lock: who posts a job from now on sees it */
            pthread_cond_broadcast(&s->idle);
            pthread_mutex_unlock(&s->lock);
            return NULL;
        } else {
            int64_t probe_ns = quiet_since + IDLE_NS, awake_ns = s->options.device->ops->ready ? quiet_since + AWAKE_NS : now;
            if (s->options.device->ops->ready && s->options.batch_wait_us < 0 && wake - now <= HELD_NS)
                awake_ns = wake;
            if (now < awake_ns && now < wake) {
                pthread_mutex_unlock(&s->lock);
                stay_awake(s, seen, awake_ns < wake ? awake_ns : wake);
                continue;
            }
            if (now < probe_ns) {
                struct timespec t = clock_timespec(wake < probe_ns ? wake : probe_ns);
                pthread_cond_timedwait(&s->work, &s->lock, &t);
            }
            pthread_mutex_unlock(&s->lock);
            if (now >= probe_ns) {
                probe(s);
                quiet_since = clock_now_ns();
            }
        }
    }
}

static void *sweeper_main(void *arg)
{
    struct scheduler *s = arg;
    int64_t not_before = 0;
    pthread_mutex_lock(&s->lock);
    while (!s->stopping) {
        int64_t now = clock_now_ns(), next = s->queue.next_deadline_ns;
        if (next < not_before)
            next = not_before;
        if (now < next) {
            struct timespec t = clock_timespec(next);
            if (next == INT64_MAX)
                pthread_cond_wait(&s->sweep, &s->lock);
            else
                pthread_cond_timedwait(&s->sweep, &s->lock, &t);
            continue;
        }
        struct engine_request *dropped = queue_sweep(&s->queue, now);
        int64_t end = clock_now_ns(), pause = (end - now) * 9;
        not_before = end + (pause > SWEEP_NS ? pause : SWEEP_NS);
        if (dropped) {
            pthread_mutex_unlock(&s->lock);
            stamp_waits(dropped);
            complete_list(s, dropped);
            pthread_mutex_lock(&s->lock);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- for everybody ---------------------------------------------------------------------------------------- */

static enum engine_code refuse(struct scheduler *s, struct engine_request *request, struct engine_error *error)
{
    int64_t busy = s->queue.rows + s->running_rows;
    if (atomic_load(&s->failed))
        return engine_fail(error, ENGINE_DEVICE_FAILED, "the device has failed: %.400s", s->failure);
    if (s->draining)
        return engine_fail(error, ENGINE_DRAINING, "the server is shutting down");
    if (busy + request->rows > s->options.queue_rows)
        return engine_fail(error, ENGINE_QUEUE_FULL, "the queue holds %" PRId64 " rows of at most %" PRId64 ": no room for %d more now",
                           busy, s->options.queue_rows, request->rows);
    return ENGINE_OK;
}

enum engine_code scheduler_submit(struct scheduler *s, struct engine_request *request, struct engine_error *error)
{
    const struct model *model = s->options.model;
    const struct model_layer *layer = model_find_layer(model, request->layer);
    enum engine_code code = ENGINE_OK;
    if (!layer)
        return engine_fail(error, ENGINE_LAYER_NOT_FOUND, "layer %d is not held by this server", request->layer);
    bool prefill =
        request->mode == ENGINE_PREFILL || (request->mode == ENGINE_AUTO && request->rows > s->options.device->kernels->decode_rows);
    int64_t widest = batch_request_widest(request);
    request->status = ENGINE_OK;
    request->path = prefill ? ENGINE_PREFILL : ENGINE_DECODE;
    request->queue_ns = request->compute_ns = request->started_ns = 0;
    request->batch_rows = request->rows_started = request->rows_done = 0;
    atomic_store(&request->cancelled, 0);
    int32_t key = (int32_t)(layer - model->layer) * KERNEL_PATHS + (prefill ? KERNEL_PREFILL : KERNEL_DECODE);

    if (request->rows > s->options.queue_rows)
        code = engine_fail(error, ENGINE_TOO_LARGE, "%d rows are more than the queue's limit of %" PRId64, request->rows,
                           s->options.queue_rows);
    else if (widest > s->options.max_slots)
        code = engine_fail(error, ENGINE_TOO_LARGE, "a row owns %" PRId64 " routing entries, of at most %d", widest, s->options.max_slots);
    pthread_mutex_lock(&s->lock);
    if (code == ENGINE_OK)
        code = refuse(s, request, error);
    if (code != ENGINE_OK) {
        s->stats.requests_rejected++;
        pthread_mutex_unlock(&s->lock);
        return code;
    }
    int64_t deadline = s->queue.next_deadline_ns;
    request->submitted_ns = clock_now_ns();
    queue_push(&s->queue, key, request);
    company_count_arrival(&s->company, key, s->queue.list[key].requests, request->submitted_ns);
    s->open++;
    atomic_fetch_add(&s->arrivals, 1);
    if (s->queue.next_deadline_ns < deadline)
        pthread_cond_signal(&s->sweep);
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    return ENGINE_OK;
}

void scheduler_cancel(struct scheduler *s, struct engine_request *request)
{
    atomic_store(&request->cancelled, 1);
    pthread_mutex_lock(&s->lock);
    s->queue.next_deadline_ns = 0;
    pthread_cond_signal(&s->sweep);
    pthread_mutex_unlock(&s->lock);
}

void scheduler_begin_drain(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    s->draining = true;
    atomic_fetch_add(&s->arrivals, 1);
    pthread_cond_signal(&s->work); /* nobody waits for company any more */
    pthread_mutex_unlock(&s->lock);
}

bool scheduler_wait_idle(struct scheduler *s, int64_t timeout_ms)
{
    struct timespec t = clock_timespec(clock_now_ns() + (timeout_ms > 0 ? timeout_ms : 0) * 1000000);
    pthread_mutex_lock(&s->lock);
    while (s->open > 0) {
        if (pthread_cond_timedwait(&s->idle, &s->lock, &t))
            break;
    }
    bool idle = s->open == 0;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

bool scheduler_failed(const struct scheduler *s) { return atomic_load(&s->failed); }

void scheduler_post(void *scheduler, void (*fn)(void *arg), void *arg)
{
    struct scheduler *s = scheduler;
    pthread_mutex_lock(&s->lock);
    bool own = pthread_equal(pthread_self(), s->engine_self);
    while (!s->gone && !jobs_push(&s->jobs, fn, arg)) {
        if (own) {
            /* We are between two batches already. */
            pthread_mutex_unlock(&s->lock);
            run_jobs(s);
            pthread_mutex_lock(&s->lock);
        } else {
            pthread_cond_wait(&s->idle, &s->lock);
        }
    }
    bool gone = s->gone;
    atomic_fetch_add(&s->arrivals, 1);
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    if (gone)
        fn(arg);
}

void scheduler_stats(struct scheduler *s, struct engine_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    out->queued_rows = s->queue.rows;
    out->queued_requests = s->queue.requests;
    out->running_rows = s->running_rows;
    pthread_mutex_unlock(&s->lock);
}

/* ---- start and stop ---------------------------------------------------------------------------------------- */

static bool make_locks(struct scheduler *s)
{
    pthread_condattr_t attr;
    if (pthread_mutex_init(&s->lock, NULL))
        return false;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->work, &attr);
    pthread_cond_init(&s->sweep, &attr);
    pthread_cond_init(&s->idle, &attr);
    pthread_condattr_destroy(&attr);
    s->locks_made = true;
    return true;
}

enum engine_code scheduler_create(const struct scheduler_options *options, struct scheduler **out, struct engine_error *error)
{
    struct scheduler *s = calloc(1, sizeof *s);
    if (!s)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the scheduler");
    s->options = *options;
    s->depth = options->device->depth < MAX_DEPTH ? options->device->depth : MAX_DEPTH;
    jobs_init(&s->jobs);
    enum engine_code code = ENGINE_OK;
    if (!make_locks(s) || !queue_init(&s->queue, options->model->layers * KERNEL_PATHS))
        code = engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the queue");
    else if (!company_init(&s->company, s->queue.keys, KERNEL_PATHS, options->batch_wait_us == ENGINE_BATCH_WAIT_AUTO))
        code = engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the batches' habits");
    for (int i = 0; code == ENGINE_OK && i < s->depth; i++)
        code = batch_init(&s->ring[i], options->device, options->max_rows, options->max_slots, error);
    if (code == ENGINE_OK) {
        s->engine_started = !pthread_create(&s->engine, NULL, engine_main, s);
        s->sweeper_started = s->engine_started && !pthread_create(&s->sweeper, NULL, sweeper_main, s);
        if (!s->sweeper_started)
            code = engine_fail(error, ENGINE_OUT_OF_MEMORY, "the engine's threads can't be started");
    }
    if (code != ENGINE_OK) {
        scheduler_destroy(s);
        return code;
    }
    pthread_setname_np(s->engine, "engine");
    pthread_setname_np(s->sweeper, "sweeper");
    *out = s;
    return ENGINE_OK;
}

void scheduler_stop(struct scheduler *s)
{
    if (!s->locks_made)
        return;
    pthread_mutex_lock(&s->lock);
    s->draining = s->stopping = true;
    atomic_fetch_add(&s->arrivals, 1);
    pthread_cond_broadcast(&s->work);
    pthread_cond_broadcast(&s->sweep);
    pthread_mutex_unlock(&s->lock);
    if (s->sweeper_started)
        pthread_join(s->sweeper, NULL);
    if (s->engine_started)
        pthread_join(s->engine, NULL);
    s->sweeper_started = s->engine_started = false;
    s->gone = true;
}

void scheduler_destroy(struct scheduler *s)
{
    if (!s)
        return;
    scheduler_stop(s);
    for (int i = 0; i < s->depth; i++)
        batch_finish(&s->ring[i]);
    queue_finish(&s->queue);
    company_finish(&s->company);
    if (s->locks_made) {
        pthread_cond_destroy(&s->idle);
        pthread_cond_destroy(&s->sweep);
        pthread_cond_destroy(&s->work);
        pthread_mutex_destroy(&s->lock);
    }
    free(s);
}
