/* Counts cores and ranks, by affinity and by the quotas of control groups. Both may change at any time.
 *
 * Ranks may be bound to different cores, or be in different control groups. So each rank publishes what it may use, in
 * its arena, and reads what the others have published. */
#include "sync/cores.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "memory/life.h"
#include "module/module.h"
#include "os/text.h"

#define WORDS (MOST_CORES / 64)

/* --- ranks of this host ------------------------------------------------------------------------------------------- */

static struct life **ranks; /* of all arenas that this process has mapped, its own included */
static int n_ranks, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Counts this life's rank from now on, until the memory is unmapped. */
static bool count_rank(struct life *life) {
    pthread_mutex_lock(&lock);
    if (n_ranks == room) {
        struct life **more = realloc(ranks, sizeof(struct life *) * (size_t)(room * 2 + 16));
        if (more) ranks = more, room = room * 2 + 16;
    }
    bool fits = n_ranks < room;
    if (fits) ranks[n_ranks++] = life;
    pthread_mutex_unlock(&lock);
    return fits;
}

void cores_forget(const char *at, int64_t nbytes) {
    pthread_mutex_lock(&lock);
    for (int i = n_ranks - 1; i >= 0; i--)
        if ((const char *)ranks[i] >= at && (const char *)ranks[i] < at + nbytes) ranks[i] = ranks[--n_ranks];
    pthread_mutex_unlock(&lock);
}

static bool takes_part(const struct life *life) {
    uint32_t word = atomic_load_explicit(&life->word, memory_order_relaxed);
    uint32_t joined = atomic_load_explicit(&life->cpu.joined, memory_order_relaxed);
    /* It is in a group, or about to be. */
    bool in_a_group = joined == 0 || joined != atomic_load_explicit(&life->cpu.left, memory_order_relaxed);
    return word != 0 && !(word & LIFE_OWNER_DIED) && in_a_group;
}

/* --- quotas ------------------------------------------------------------------------------------------------------- */

struct quota { /* of one control group, whose files are read again and again */
    /* `period`: only in version 1 of control groups, where it is a file of its own. */
    char *limit, *period, *stat;
    uint64_t inode;
};

static struct quota *quotas;
static int n_quotas;
static long throttled; /* how often the tightest quota had been used up when we last looked */

/* Thousandths of a core; 0: no limit. */
static uint64_t granted(const struct quota *q) {
    char text[64], *rest;
    if (!read_text(q->limit, text, sizeof text)) return 0;
    long long limit = strtoll(text, &rest, 10);
    if (rest == text || limit <= 0) return 0; /* "max", or -1 */
    if (q->period && !read_text(q->period, rest = text, sizeof text)) return 0;
    long long period = strtoll(rest, NULL, 10);
    return period > 0 ? (uint64_t)(limit * 1000 / period) : 0;
}

static long times_used_up(const struct quota *q) {
    char text[1024];
    const char *at = read_text(q->stat, text, sizeof text) ? strstr(text, "nr_throttled ") : NULL;
    return at ? strtol(at + sizeof "nr_throttled", NULL, 10) : 0;
}

/* The tightest quota, or NULL. */
static const struct quota *find_quota(uint64_t *least) {
    const struct quota *found = NULL;
    for (int i = 0; i < n_quotas; i++) {
        uint64_t grants = granted(&quotas[i]);
        if (grants && (!found || grants < *least)) found = &quotas[i], *least = grants;
    }
    return found;
}

/* --- what a rank says, and what all said -------------------------------------------------------------------------- */

static void publish_affinity(struct cpu_usage *mine) {
    union {
        cpu_set_t set;
        uint64_t words[WORDS];
    } usable = {0};
    _Static_assert(sizeof usable.set == sizeof usable.words, "a kernel's set of cores");
    if (sched_getaffinity(0, sizeof usable.set, &usable.set) == 0)
        for (int i = 0; i < WORDS; i++) atomic_store_explicit(&mine->cores[i], usable.words[i], memory_order_relaxed);
}

/* Returns whether the quota was used up since the last call. With the lock held. */
static bool publish_quota(struct cpu_usage *mine) {
    uint64_t grants = 0;
    const struct quota *tightest = find_quota(&grants);
    long now = tightest ? times_used_up(tightest) : 0;
    bool used_up = now > throttled;
    throttled = now;
    atomic_store_explicit(&mine->quota_of, tightest ? tightest->inode : 0, memory_order_relaxed);
    atomic_store_explicit(&mine->quota, grants, memory_order_relaxed);
    return used_up;
}

void cores_publish(struct life *me) {
    publish_affinity(&me->cpu);
    pthread_mutex_lock(&lock);
    publish_quota(&me->cpu);
    pthread_mutex_unlock(&lock);
}

struct core_count {
    uint64_t cores[WORDS]; /* that any rank may use */
    int everyone;
    int inside;  /* ranks that may only use cores of mine */
    int sharing; /* ranks under my quota */
};

static void count(struct core_count *c, const struct cpu_usage *mine, const struct cpu_usage *other) {
    bool within = true;
    for (int i = 0; i < WORDS; i++) {
        uint64_t theirs = atomic_load_explicit(&other->cores[i], memory_order_relaxed);
        c->cores[i] |= theirs;
        within &= (theirs & ~atomic_load_explicit(&mine->cores[i], memory_order_relaxed)) == 0;
    }
    c->everyone++;
    c->inside += within;
    c->sharing += atomic_load_explicit(&other->quota_of, memory_order_relaxed) ==
                  atomic_load_explicit(&mine->quota_of, memory_order_relaxed);
}

bool cores_suffice(struct life *me, bool own_thread) {
    struct core_count c = {0};
    if (own_thread) publish_affinity(&me->cpu);
    pthread_mutex_lock(&lock);
    bool used_up = publish_quota(&me->cpu);
    for (int i = 0; i < n_ranks; i++)
        if (takes_part(ranks[i])) count(&c, &me->cpu, &ranks[i]->cpu);
    pthread_mutex_unlock(&lock);
    int all = 0, mine = 0;
    for (int i = 0; i < WORDS; i++) {
        all += __builtin_popcountll(c.cores[i]);
        mine += __builtin_popcountll(atomic_load_explicit(&me->cpu.cores[i], memory_order_relaxed));
    }
    uint64_t quota = atomic_load_explicit(&me->cpu.quota, memory_order_relaxed);
    if (quota && (used_up || (uint64_t)c.sharing * 1000 > quota)) return false;
    return c.everyone <= all && c.inside <= mine;
}

/* --- Python ------------------------------------------------------------------------------------------------------- */

static PyObject *add_rank(PyObject *Py_UNUSED(self), PyObject *word) {
    void *address = PyLong_AsVoidPtr(word);
    if (address == NULL) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no life is at address 0");
    if (!count_rank(life_of(address))) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static void free_quotas(struct quota *list, int n) {
    for (int i = 0; i < n; i++) free(list[i].limit), free(list[i].period), free(list[i].stat);
    free(list);
}

static PyObject *watch_quotas(PyObject *Py_UNUSED(self), PyObject *tuple) {
    Py_ssize_t n = PyTuple_Size(tuple);
    if (n < 0) return NULL;
    struct quota *list = calloc((size_t)n + 1, sizeof *list);
    if (list == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        const char *limit, *period, *stat;
        unsigned long long inode;
        if (!PyArg_ParseTuple(PyTuple_GetItem(tuple, i), "szsK", &limit, &period, &stat, &inode)) {
            free_quotas(list, (int)n);
            return NULL;
        }
        list[i] = (struct quota){strdup(limit), period ? strdup(period) : NULL, strdup(stat), inode};
        if (!list[i].limit || !list[i].stat || (period && !list[i].period)) {
            free_quotas(list, (int)n);
            return PyErr_NoMemory();
        }
    }
    pthread_mutex_lock(&lock);
    struct quota *before = quotas;
    int n_before = n_quotas;
    quotas = list, n_quotas = (int)n, throttled = 0;
    uint64_t least;
    const struct quota *tightest = find_quota(&least);
    if (tightest) throttled = times_used_up(tightest);
    pthread_mutex_unlock(&lock);
    free_quotas(before, n_before);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(add_rank, METH_O, "(life): a rank of this host whose arena is mapped; unmap() ends that."),
    METHOD(watch_quotas, METH_O,
           "(((limit, period or None, stat, inode), ...)): files of this process's control groups."),
    {NULL, NULL, 0, NULL},
};

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

int symcomm_add_cores(PyObject *module) {
    pthread_atfork(before_fork, after_fork, after_fork);
    return PyModule_AddFunctions(module, methods);
}
