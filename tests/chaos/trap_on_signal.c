/* SPDX-License-Identifier: Apache-2.0
 *
 * A preloaded library: on SIGUSR1 the process's GPU is lost by a kernel that traps, on SIGUSR2 by one that keeps it for a minute. The
 * kernels run in the same context as the program's own, since both have CUDA's primary one.
 */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>

int trap_device(void); /* trap.cu */
int spin_device(double seconds);

static sem_t asked;
static volatile sig_atomic_t number_asked;

static void on_signal(int number)
{
    number_asked = number;
    sem_post(&asked);
}

static void *wait_and_lose(void *arg)
{
    (void)arg;
    while (sem_wait(&asked))
        ;
    if (number_asked == SIGUSR1)
        trap_device();
    else
        spin_device(60);
    return NULL;
}

__attribute__((constructor)) static void begin(void)
{
    pthread_t thread;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sem_init(&asked, 0, 0);
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    if (pthread_create(&thread, NULL, wait_and_lose, NULL) == 0)
        pthread_detach(thread);
}
