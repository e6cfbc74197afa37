/* The orders that the core takes for granted, tried on real cores. Each shape has an outcome that must never be seen
 * with the core's own fences, and may be seen without them. Prints "shape with|without forbidden-outcomes runs" a line.
 *
 * A batch has many instances, each in cache lines of its own. All threads start a batch together and run through it, so
 * that they meet at some instances by chance; what they saw is counted when all are done. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define INSTANCES 1024
#define MOST_THREADS 3
#define LEAST_RUNS 50000

struct instance {
    _Alignas(128) _Atomic uint32_t x;
    _Alignas(128) _Atomic uint32_t y;
    _Alignas(128) _Atomic uint32_t z;
    _Alignas(128) _Atomic uint32_t flag;
    _Alignas(128) uint32_t saw[MOST_THREADS][3];
};

typedef void part(struct instance *i, int thread);

struct shape {
    const char *name;
    int threads;
    part *with, *without;
    int (*forbidden)(const struct instance *i);
};

static uint32_t get(_Atomic uint32_t *at) { return atomic_load_explicit(at, memory_order_relaxed); }
static void put(_Atomic uint32_t *at) { atomic_store_explicit(at, 1, memory_order_relaxed); }

/* Sleeper and signaller: publish, fence, look (publish_condition against sync_wake_peers; arrive against sync_void). */
static void store_buffering(struct instance *i, int thread) {
    put(thread ? &i->y : &i->x);
    atomic_thread_fence(memory_order_seq_cst);
    i->saw[thread][0] = get(thread ? &i->x : &i->y);
}

static void store_buffering_plain(struct instance *i, int thread) {
    put(thread ? &i->y : &i->x);
    i->saw[thread][0] = get(thread ? &i->x : &i->y);
}

static int both_missed(const struct instance *i) { return !i->saw[0][0] && !i->saw[1][0]; }

/* Signal and wait: data, release; acquire, data (sync_signal against rank_satisfies). */
static void message_passing(struct instance *i, int thread) {
    if (thread == 0) {
        put(&i->x);
        atomic_store_explicit(&i->flag, 1, memory_order_release);
    } else {
        i->saw[1][0] = atomic_load_explicit(&i->flag, memory_order_acquire);
        i->saw[1][1] = get(&i->x);
    }
}

static void message_passing_plain(struct instance *i, int thread) {
    if (thread == 0) {
        put(&i->x);
        put(&i->flag);
    } else {
        i->saw[1][0] = get(&i->flag);
        i->saw[1][1] = get(&i->x);
    }
}

static int flag_without_data(const struct instance *i) { return i->saw[1][0] && !i->saw[1][1]; }

/* Failing and finishing: void, fence, scribble; read, acquire fence, look whether it is void (sync_void against
 * sync_is_void). */
static void voiding(struct instance *i, int thread) {
    if (thread == 0) {
        atomic_fetch_or(&i->flag, 1);
        atomic_thread_fence(memory_order_seq_cst);
        put(&i->x);
    } else {
        i->saw[1][1] = get(&i->x);
        atomic_thread_fence(memory_order_acquire);
        i->saw[1][0] = get(&i->flag);
    }
}

static void voiding_plain(struct instance *i, int thread) {
    if (thread == 0) {
        put(&i->flag);
        put(&i->x);
    } else {
        i->saw[1][1] = get(&i->x);
        i->saw[1][0] = get(&i->flag);
    }
}

static int data_without_void(const struct instance *i) { return i->saw[1][1] && !i->saw[1][0]; }

/* The same with a third rank between: it reads, shows what it read and signals; only then the last one reads and looks.
 * C11 promises nothing here; one copy of memory, which arm64 and x86 have, does. */
static void handed_on(struct instance *i, int thread) {
    if (thread == 0) {
        voiding(i, 0);
    } else if (thread == 1) {
        atomic_store_explicit(&i->y, get(&i->x), memory_order_relaxed);
        atomic_store_explicit(&i->z, 1, memory_order_release);
    } else {
        i->saw[2][0] = atomic_load_explicit(&i->z, memory_order_acquire);
        i->saw[2][1] = get(&i->y);
        atomic_thread_fence(memory_order_acquire);
        i->saw[2][2] = get(&i->flag);
    }
}

static void handed_on_plain(struct instance *i, int thread) {
    if (thread == 0) {
        voiding_plain(i, 0);
    } else if (thread == 1) {
        atomic_store_explicit(&i->y, get(&i->x), memory_order_relaxed);
        put(&i->z);
    } else {
        i->saw[2][0] = get(&i->z);
        i->saw[2][1] = get(&i->y);
        i->saw[2][2] = get(&i->flag);
    }
}

static int junk_without_void(const struct instance *i) { return i->saw[2][0] && i->saw[2][1] && !i->saw[2][2]; }

static const struct shape shapes[] = {
    {"store-buffering", 2, store_buffering, store_buffering_plain, both_missed},
    {"message-passing", 2, message_passing, message_passing_plain, flag_without_data},
    {"voiding", 2, voiding, voiding_plain, data_without_void},
    {"handed-on", 3, handed_on, handed_on_plain, junk_without_void},
};

/* --- running ---------------------------------------------------------------------------------------------------- */

static struct instance *instances;
static part *playing;
static int threads, cores[MOST_THREADS];
static _Atomic int arrived;
static _Atomic uint32_t batch; /* odd: running */
static _Atomic int over;

static void pause_for(uint32_t looks) {
    for (volatile uint32_t n = 0; n < looks; n = n + 1) {}
}

static void await(_Atomic uint32_t *word, uint32_t not ) {
    for (int looks = 0; atomic_load(word) == not ; looks++)
        if (looks % 1000 == 999) sched_yield();
}

/* Mixes the moments at which threads reach an instance. */
static void run_batch(int thread, uint32_t number) {
    pause_for((number * 7 + (uint32_t)thread * 13) % 61);
    for (int n = 0; n < INSTANCES; n++) playing(&instances[n], thread);
}

static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void *helper(void *argument) {
    int thread = (int)(intptr_t)argument;
    pin(cores[thread]);
    uint32_t seen = 0;
    for (;;) {
        await(&batch, seen);
        if (atomic_load(&over)) return NULL;
        seen = atomic_load(&batch);
        run_batch(thread, seen);
        atomic_fetch_add(&arrived, 1);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void play(const struct shape *s, int with, double seconds) {
    playing = with ? s->with : s->without, threads = s->threads;
    pthread_t others[MOST_THREADS];
    atomic_store(&batch, 0), atomic_store(&over, 0);
    for (int t = 1; t < threads; t++) pthread_create(&others[t], NULL, helper, (void *)(intptr_t)t);
    pin(cores[0]);
    long forbidden = 0, runs = 0;
    double began = now();
    for (; now() < began + (runs < LEAST_RUNS ? 20 : 1) * seconds;
         runs += INSTANCES) { /* where others take the cores: longer */
        memset(instances, 0, INSTANCES * sizeof *instances);
        atomic_store(&arrived, 0);
        uint32_t number = atomic_fetch_add(&batch, 1) + 1;
        run_batch(0, number);
        for (int looks = 0; atomic_load(&arrived) < threads - 1; looks++)
            if (looks % 1000 == 999) sched_yield();
        for (int n = 0; n < INSTANCES; n++) forbidden += s->forbidden(&instances[n]);
    }
    atomic_store(&over, 1);
    atomic_fetch_add(&batch, 1);
    for (int t = 1; t < threads; t++) pthread_join(others[t], NULL);
    printf("%s %s %ld %ld\n", s->name, with ? "with" : "without", forbidden, runs);
    fflush(stdout);
}

int main(int n_args, char **args) {
    double seconds = n_args > 1 ? atof(args[1]) : 0.3;
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    int found = 0;
    for (int core = 0; core < CPU_SETSIZE && found < MOST_THREADS; core++)
        if (CPU_ISSET(core, &set)) cores[found++] = core;
    instances = aligned_alloc(128, INSTANCES * sizeof *instances);
    if (instances == NULL) return 1;
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
        if (shapes[n].threads > found) {
            printf("%s skipped: %d cores\n", shapes[n].name, found);
            continue;
        }
        play(&shapes[n], 1, seconds);
        play(&shapes[n], 0, seconds / 2);
    }
    free(instances);
    return 0;
}
