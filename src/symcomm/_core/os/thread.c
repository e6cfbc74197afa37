#include "os/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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
        pthread_sigmask(SIG_SETMASK, &all, &before); /* a new thread inherits its creator's mask */
        error = pthread_create(thread, &attributes, run, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    if (!error) pthread_setname_np(*thread, name);
    return error;
}

void thread_prepare_timed(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void thread_wait_until(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t at) {
    struct timespec until = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
    if (at == INT64_MAX) pthread_cond_wait(condition, lock);
    else pthread_cond_timedwait(condition, lock, &until);
}

int thread_id(void) { return (int)syscall(SYS_gettid); }

/* Whether /proc belongs to a pid namespace around this process's own: then it lists one pid for each namespace. */
static bool proc_is_further_out(void) {
    char text[8192];
    const char *numbers = read_text("/proc/self/status", text, sizeof text) ? strstr(text, "\nNSpid:\t") : NULL;
    if (numbers == NULL) return false; /* an old kernel */
    numbers += strlen("\nNSpid:\t");
    return numbers[strcspn(numbers, "\t\n")] == '\t';
}

uint64_t thread_namespace(void) {
    static _Atomic uint64_t known;
    static _Atomic int of_pid;
    int pid = getpid();
    if (atomic_load(&of_pid) == pid) return atomic_load(&known);
    struct stat facts = {0};
    char link[16] = {0};
    bool ours = readlink("/proc/self", link, sizeof link - 1) > 0 && atoi(link) == pid && !proc_is_further_out() &&
                stat("/proc/self/ns/pid", &facts) == 0;
    atomic_store(&known, ours ? facts.st_ino : 0);
    atomic_store(&of_pid, pid);
    return ours ? facts.st_ino : 0;
}

/* State I: the thread waits until others of its process have dumped core. */
bool thread_is_stopped(int id) {
    char path[32], text[512];
    if (syscall(SYS_tkill, id, 0) < 0 && errno == ESRCH) return true;
    if (!thread_namespace()) return false;
    snprintf(path, sizeof path, "/proc/%d/stat", id);
    const char *name_end = read_text(path, text, sizeof text) ? strrchr(text, ')') : NULL;
    return name_end && name_end[1] && strchr("TtZXI", name_end[2]) != NULL;
}
