/* The words by which a rank that refuses its call tells the others why.
 *
 * They lie beside the arrival of the operation's number: no rank comes to the second operation after this one before
 * all have left this one. A rank that finds them copies them during the operation, since its caller may ask much later
 * (asynchronous calls), or never. So it keeps the last few. */
#include "exec/refusal.h"

#include <pthread.h>
#include <stdlib.h>

#include "group/group_module.h"
#include "memory/shared_bytes.h"

#define KEPT 16

struct refusal {
    uint64_t seq;
    int rank;
    uint32_t length;
    char words[REFUSAL_BYTES];
};

struct refusals {
    pthread_mutex_t lock; /* not the group's, which is held for as long as an operation takes */
    uint64_t told;
    struct refusal last[KEPT];
};

void refusal_publish(const struct visit *v, uint64_t seq, const char *words, size_t n) {
    struct control *me = block_of(v, v->group->rank);
    if (n > REFUSAL_BYTES) n = REFUSAL_BYTES;
    shared_store(me->refusal_text[seq & 1], words, n);
    atomic_store_explicit(&me->refusal_length[seq & 1], (uint32_t)n, memory_order_relaxed);
}

/* The group's refusals, which live as long as it does. With the group's lock held. */
static struct refusals *kept(struct group *g) {
    struct refusals *all = atomic_load(&g->refusals);
    if (all == NULL && (all = calloc(1, sizeof *all)) != NULL) {
        pthread_mutex_init(&all->lock, NULL);
        atomic_store(&g->refusals, all);
    }
    return all;
}

void refusal_keep(const struct visit *v, uint64_t seq, int rank) {
    struct control *from = block_of(v, rank);
    struct refusals *all = kept(v->group);
    uint32_t n = atomic_load_explicit(&from->refusal_length[seq & 1], memory_order_relaxed);
    if (all == NULL || n > REFUSAL_BYTES) return;
    pthread_mutex_lock(&all->lock);
    if (all->told == 0 || all->last[(all->told - 1) % KEPT].seq != seq) { /* a wait may find it twice */
        struct refusal *r = &all->last[all->told++ % KEPT];
        r->seq = seq, r->rank = rank, r->length = n;
        shared_load(r->words, from->refusal_text[seq & 1], n);
    }
    pthread_mutex_unlock(&all->lock);
}

void refusals_free(struct group *g) {
    struct refusals *all = atomic_load(&g->refusals);
    if (all) pthread_mutex_destroy(&all->lock);
    free(all);
}

/* refusal(seq) -> (rank, words) of the refusal that ended operation `seq`, or None: too many came since. */
static PyObject *refusal(PyObject *self, PyObject *number) {
    uint64_t seq = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    seq += (uint64_t)atomic_load(&group_of(self)->unnumbered);
    struct refusals *all = atomic_load(&group_of(self)->refusals);
    struct refusal found = {.seq = 0}; /* operations are counted from 1 */
    if (all) {
        pthread_mutex_lock(&all->lock);
        for (int i = 0; i < KEPT; i++)
            if (all->last[i].seq == seq) found = all->last[i];
        pthread_mutex_unlock(&all->lock);
    }
    if (found.seq == 0 || found.seq != seq) Py_RETURN_NONE;
    return Py_BuildValue("iy#", found.rank, found.words, (Py_ssize_t)found.length);
}

PyMethodDef group_refusal_methods[] = {
    METHOD(refusal, METH_O, "(number) -> (rank, why it refused it), or None"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(REFUSAL_BYTES),
    CONSTANT(REFUSED_CALL),
    {NULL, 0},
};

int symcomm_add_refusal(PyObject *module) { return symcomm_add_part(module, NULL, constants); }
