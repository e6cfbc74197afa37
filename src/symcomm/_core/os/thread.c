#include "os/thread.h"

#include <signal.h>

int thread_start(pthread_t *thread, const char *name, size_t stack_bytes, void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error) return error;
    sigset_t all, before;
    sigfillset(&all);
    error = pthread_attr_setstacksize(&attributes, stack_bytes);
    if (!error) {
        pthread_sigmask(SIG_SETMASK, &all, &before); /* a new thread has its creator's */
        error = pthread_create(thread, &attributes, run, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    if (!error) pthread_setname_np(*thread, name);
    return error;
}
