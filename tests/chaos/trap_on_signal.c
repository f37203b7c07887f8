/* SPDX-License-Identifier: Apache-2.0
 *
 * A preloaded library: on SIGUSR1 the process's GPU is lost, by a kernel that traps. The kernel runs in the same context as the
 * program's own, since both have CUDA's primary one.
 */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>

int trap_device(void); /* trap.cu */

static sem_t asked;

static void on_signal(int number)
{
    (void)number;
    sem_post(&asked);
}

static void *wait_and_trap(void *arg)
{
    (void)arg;
    while (sem_wait(&asked))
        ;
    trap_device();
    return NULL;
}

__attribute__((constructor)) static void begin(void)
{
    pthread_t thread;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sem_init(&asked, 0, 0);
    sigaction(SIGUSR1, &action, NULL);
    if (pthread_create(&thread, NULL, wait_and_trap, NULL) == 0)
        pthread_detach(thread);
}
