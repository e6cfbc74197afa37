/* Threads of the core's own. They run no Python unless they say so, and leave all signals to the interpreter. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define THREAD_STACK ((size_t)1 << 20)        /* of a thread that only runs the core */
#define THREAD_STACK_PYTHON ((size_t)8 << 20) /* of one that calls Python: as much as Python's own threads have */

/* For thread-local variables that several files use: a function asks the linker once for all of them. */
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("local-dynamic")))

/* name: at most 15 characters, for ps, top and debuggers. 0, or an errno: no thread was started. */
int thread_start(pthread_t *thread, const char *name, size_t stack_bytes, void *(*run)(void *), void *argument);

/* Makes a condition whose timed waits end by CLOCK_MONOTONIC, as all times of ours. */
void thread_prepare_timed(pthread_cond_t *condition);
/* Waits for it, until `at` (ns; INT64_MAX: for as long as it takes), with the lock held, which it gives up meanwhile.
 */
void thread_wait_until(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t at);

/* The kernel's number of this thread. */
int thread_id(void);
/* The inode of this process's pid namespace; 0 when /proc is not there, or belongs to another one. */
uint64_t thread_namespace(void);
/* Whether a thread, of any process, is stopped or gone, and so in no system call. One frozen with its control group
 * does not count as stopped. */
bool thread_is_stopped(int id);
