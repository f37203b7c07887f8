/* SPDX-License-Identifier: Apache-2.0
 *
 * A stream of the CPU back end: a pool of threads that take the items of a job from one counter. The owner takes part.
 *
 * A job is published by one store to `word`, which holds a generation and how many workers the job engages; workers past that
 * number never look at the job, so small jobs don't wake or wait for everybody. Who waits spins briefly, since the next step of a
 * forward pass comes within microseconds, and then sleeps. The sleeping flags and the words they guard are sequentially
 * consistent: either the sleeper sees the new word, or the waker sees the sleeper.
 */
#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#elif defined(__aarch64__)
#define relax() __asm__ volatile("yield")
#else
#define relax() ((void)0)
#endif

#define SPINS 600 /* tens of microseconds */

#define ENGAGED_BITS 16
#define MAX_THREADS ((1 << ENGAGED_BITS) - 1)

struct worker {
    struct kernel_stream *pool;
    pthread_t thread;
    int index; /* 1.. ; the owner is 0 */
};

struct kernel_stream {
    _Alignas(64) atomic_uint_fast64_t word; /* generation << ENGAGED_BITS | threads engaged */
    _Alignas(64) atomic_int next;
    _Alignas(64) atomic_int pending; /* engaged workers that have not finished */
    atomic_int sleepers;
    atomic_bool owner_sleeps, stop;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    int threads, started;
    /* The job; written before `word`. */
    int n;
    pool_fn fn;
    void *arg;
    char *scratch;
    struct worker worker[];
};

static void take_items(struct kernel_stream *p, int thread)
{
    void *scratch = p->scratch + (size_t)thread * POOL_SCRATCH_BYTES;
    for (;;) {
        int i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (i >= p->n)
            return;
        p->fn(p->arg, i, scratch);
    }
}

static uint64_t await_word(struct kernel_stream *p, uint64_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        uint64_t w = atomic_load_explicit(&p->word, memory_order_acquire);
        if (w != seen)
            return w;
        relax();
    }
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    uint64_t w;
    while ((w = atomic_load(&p->word)) == seen)
        pthread_cond_wait(&p->work, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
    return w;
}

static void publish(struct kernel_stream *p, int engaged)
{
    uint64_t generation = atomic_load_explicit(&p->word, memory_order_relaxed) >> ENGAGED_BITS;
    atomic_store(&p->word, (generation + 1) << ENGAGED_BITS | (uint64_t)engaged);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct kernel_stream *p = w->pool;
    uint64_t seen = 0;
    for (;;) {
        seen = await_word(p, seen);
        if (w->index >= (int)(seen & MAX_THREADS))
            continue;
        if (atomic_load_explicit(&p->stop, memory_order_relaxed))
            return NULL;
        take_items(p, w->index);
        if (atomic_fetch_sub(&p->pending, 1) == 1 && atomic_load(&p->owner_sleeps)) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->lock);
        }
    }
}

static void await_workers(struct kernel_stream *p)
{
    for (int i = 0; i < SPINS; i++) {
        if (!atomic_load_explicit(&p->pending, memory_order_acquire))
            return;
        relax();
    }
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->owner_sleeps, true);
    while (atomic_load(&p->pending))
        pthread_cond_wait(&p->done, &p->lock);
    atomic_store(&p->owner_sleeps, false);
    pthread_mutex_unlock(&p->lock);
}

void pool_run(struct kernel_stream *p, int n, pool_fn fn, void *arg)
{
    if (n <= 0)
        return;
    int engaged = n < p->threads ? n : p->threads;
    p->n = n;
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    if (engaged > 1) {
        atomic_store_explicit(&p->pending, engaged - 1, memory_order_relaxed);
        publish(p, engaged);
    }
    take_items(p, 0);
    if (engaged > 1)
        await_workers(p);
}

struct plain_job {
    void (*fn)(void *arg, int i);
    void *arg;
};

static void run_plain(void *arg, int i, void *scratch)
{
    const struct plain_job *job = arg;
    job->fn(job->arg, i);
}

void kernels_cpu_parallel(struct kernel_stream *stream, int n, void (*fn)(void *arg, int i), void *arg)
{
    struct plain_job job = {fn, arg};
    pool_run(stream, n, run_plain, &job);
}

int kernels_cpu_stream_threads(const struct kernel_stream *stream) { return stream->threads; }

/* The container's share of processors, rounded up; 0: unlimited or unknown. */
static int quota_cores(void)
{
    long long quota = 0, period = 0;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (f) {
        if (fscanf(f, "%lld %lld", &quota, &period) != 2)
            quota = 0;
        fclose(f);
    } else if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re"))) {
        if (fscanf(f, "%lld", &quota) != 1)
            quota = 0;
        fclose(f);
        if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re"))) {
            if (fscanf(f, "%lld", &period) != 1)
                period = 0;
            fclose(f);
        }
    }
    if (quota <= 0 || period <= 0)
        return 0;
    long long cores = (quota + period - 1) / period;
    return cores > MAX_THREADS ? 0 : (int)cores;
}

static int usable_cores(void)
{
    /* A larger mask than cpu_set_t's 1024 processors is needed on the largest hosts. */
    int cores = 0;
    for (int size = 1024; !cores && size <= 65536; size *= 4) {
        cpu_set_t *set = CPU_ALLOC((size_t)size);
        if (!set)
            break;
        if (!sched_getaffinity(0, CPU_ALLOC_SIZE((size_t)size), set))
            cores = CPU_COUNT_S(CPU_ALLOC_SIZE((size_t)size), set);
        CPU_FREE(set);
    }
    if (!cores)
        cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    int quota = quota_cores();
    if (quota && quota < cores)
        cores = quota;
    return cores < 1 ? 1 : cores;
}

struct kernel_stream *kernels_cpu_stream_create(int threads)
{
    if (threads <= 0)
        threads = usable_cores();
    if (threads > MAX_THREADS)
        return NULL;
    size_t bytes = sizeof(struct kernel_stream) + (size_t)threads * sizeof(struct worker);
    struct kernel_stream *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p)
        return NULL;
    memset(p, 0, bytes);
    p->threads = threads;
    p->scratch = aligned_alloc(4096, (size_t)threads * POOL_SCRATCH_BYTES);
    if (!p->scratch) {
        free(p);
        return NULL;
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    p->started = 1;
    for (int i = 1; i < threads; i++) {
        p->worker[i] = (struct worker){.pool = p, .index = i};
        if (pthread_create(&p->worker[i].thread, NULL, worker_main, &p->worker[i])) {
            kernels_cpu_stream_destroy(p);
            return NULL;
        }
        p->started++;
    }
    return p;
}

void kernels_cpu_stream_destroy(struct kernel_stream *p)
{
    if (!p)
        return;
    atomic_store(&p->stop, true);
    publish(p, p->threads);
    for (int i = 1; i < p->started; i++)
        pthread_join(p->worker[i].thread, NULL);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p->scratch);
    free(p);
}
