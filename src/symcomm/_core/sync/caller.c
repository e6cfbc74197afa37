#include "sync/caller.h"

THREAD_LOCAL struct caller *symcomm_caller;

void caller_lock(pthread_mutex_t *lock) {
    if (pthread_mutex_trylock(lock) == 0) return;
    caller_before_waiting();
    pthread_mutex_lock(lock);
}
