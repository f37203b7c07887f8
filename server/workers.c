/* SPDX-License-Identifier: Apache-2.0 */
#include "server/workers.h"

#include <pthread.h>
#include <stdlib.h>

struct workers {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct workers_job *head, **tail;
    int waiting, max_waiting, threads;
    bool stop;
    pthread_t thread[];
};

static void *workers_run(void *arg)
{
    struct workers *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->head && !w->stop)
            pthread_cond_wait(&w->wake, &w->lock);
        struct workers_job *job = w->head;
        if (!job)
            break;
        w->head = job->next;
        if (!w->head)
            w->tail = &w->head;
        w->waiting--;
        pthread_mutex_unlock(&w->lock);
        job->run(job);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

struct workers *workers_create(int threads, int max_waiting)
{
    struct workers *w = calloc(1, sizeof *w + (size_t)threads * sizeof w->thread[0]);
    if (!w)
        return NULL;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    w->tail = &w->head;
    w->max_waiting = max_waiting;
    for (; w->threads < threads; w->threads++)
        if (pthread_create(&w->thread[w->threads], NULL, workers_run, w)) {
            workers_destroy(w);
            return NULL;
        }
    return w;
}

int workers_most(const struct workers *w) { return w->max_waiting; }

void workers_destroy(struct workers *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->threads; i++)
        pthread_join(w->thread[i], NULL);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

bool workers_submit(struct workers *w, struct workers_job *job)
{
    pthread_mutex_lock(&w->lock);
    bool room = w->waiting < w->max_waiting && !w->stop;
    if (room) {
        job->next = NULL;
        *w->tail = job;
        w->tail = &job->next;
        w->waiting++;
        pthread_cond_signal(&w->wake);
    }
    pthread_mutex_unlock(&w->lock);
    return room;
}
