#include "os/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "os/text.h"

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

int thread_id(void) { return (int)syscall(SYS_gettid); }

bool thread_stands_still(int id) {
    char path[32], text[512];
    if (syscall(SYS_tkill, id, 0) < 0 && errno == ESRCH) return true;
    snprintf(path, sizeof path, "/proc/%d/stat", id);
    const char *name_end = read_text(path, text, sizeof text) ? strrchr(text, ')') : NULL;
    return name_end && name_end[1] && strchr("TtZX", name_end[2]) != NULL;
}
