/* The life of a group: made, left, dropped, and what becomes of it in a forked child. */
#include <stdlib.h>
#include <string.h>

#include "exec/async.h"
#include "exec/cma.h"
#include "exec/plan.h"
#include "exec/refusal.h"
#include "group/group.h"
#include "memory/isolate.h"
#include "memory/life.h"
#include "os/futex.h"
#include "p2p/p2p.h"
#include "sync/fail.h"
#include "sync/wait.h"

void group_free(struct group *g) {
    blocks_free(g->blocks);
    free(g->arena);
    free(g->readable);
    free((void *)g->life);
    async_free(g);
    refusals_free(g);
    free(g);
}

static void *copy_of(const void *array, size_t n, size_t size) {
    void *copy = malloc(n * size);
    if (copy) memcpy(copy, array, n * size);
    return copy;
}

/* Lets the other ranks see that this one is there. */
static void introduce(struct group *g) {
    struct visit visit;
    visit_begin(&visit, g);
    struct control *me = block_of(&visit, g->rank);
    atomic_store(&me->progress, g->seq << PLAN_SIGNAL_BITS);
    cma_introduce(&visit);
    atomic_store(&me->state, CONTROL_IN_USE);
    visit_end(&visit);
}

struct group *group_make(const struct group_parts *p) {
    struct group *g = calloc(1, sizeof *g);
    if (g == NULL) return NULL;
    size_t n = (size_t)p->world;
    *g = (struct group){
        .rank = p->rank,
        .world = p->world,
        .stage_bytes = p->stage_bytes,
        .arena_bytes = p->arena_bytes,
        .arena = copy_of(p->arenas, n, sizeof *g->arena),
        .life = copy_of((const void *)p->lives, n, sizeof *g->life),
        .readable = calloc(n, 1),
        .blocks = blocks_make(p->rank, p->world, p->controls, p->stages),
        .own_process = p->own_process,
        .spin = p->spin,
        .poll_ns = p->poll_ns,
        .yield_ns = p->yield_ns,
        .flight = p->flight,
        .flight_group = p->flight_group,
    };
    atomic_init(&g->seq, p->operations);
    atomic_init(&g->spin_now, p->spin);
    atomic_init(&g->timeout, p->timeout);
    if (!g->arena || !g->life || !g->readable || !g->blocks || p2p_open(g, p->channels) < 0) {
        group_free(g);
        return NULL;
    }
    introduce(g);
    atomic_fetch_add(&life_of(g->life[g->rank])->cpu.joined, 1);
    atomic_store(&g->needs_core, true);
    return g;
}

static void release_core(struct group *g) {
    if (atomic_exchange(&g->needs_core, false)) atomic_fetch_add(&life_of(g->life[g->rank])->cpu.left, 1);
}

void group_stop(struct group *g) {
    struct visit visit;
    visit_begin(&visit, g);
    if (!async_idle(g)) sync_fail(&visit, STATUS_ABORTED, g->rank);
    atomic_store(&block_of(&visit, g->rank)->state, CONTROL_LEFT);
    release_core(g);
    async_stop(g);
    p2p_drop(&visit);
    visit_end(&visit);
}

void group_leave(struct group *g) {
    struct visit visit;
    if (!leave_begin(&visit, g)) return;
    release_core(g);
    async_stop(g);
    p2p_close(&visit);
    leave_end(&visit);
}

void group_forked(struct group *g) {
    leave_as_child(g);
    g->forked = true;
    atomic_store(&g->needs_core, false); /* the core is the parent's */
    atomic_store(&g->worker, NULL);
    g->flight = NULL, g->recording = NULL;
    p2p_forked(g);
}

/* Whether no peer is in the middle of a put. */
static bool is_put_over(void *context) {
    const struct visit *v = context;
    const struct group *g = v->group;
    for (int r = 0; r < g->world; r++)
        if (r != g->rank && atomic_load(&block_of(v, r)->putting) && !life_has_ended(g->life[r])) return false;
    return true;
}

bool group_await_puts(struct group *g) {
    struct visit visit;
    if (!visit_begin(&visit, g)) return true;
    atomic_thread_fence(memory_order_seq_cst);
    bool over = wait_briefly(is_put_over, &visit, g->own_process ? SOON_ENOUGH_NS : LONG_ENOUGH_NS);
    visit_end(&visit);
    return over;
}

static bool has_come(const struct control *c, uint64_t number) {
    return atomic_load_explicit(&c->announced, memory_order_relaxed) >= number ||
           atomic_load_explicit(&c->arrival[number & 1].seq, memory_order_relaxed) >= number;
}

bool group_announce(struct group *g, int looks) {
    struct visit visit;
    if (!visit_begin(&visit, g)) return false;
    uint64_t number = atomic_load(&g->seq) + 1;
    atomic_store_explicit(&block_of(&visit, g->rank)->announced, number, memory_order_relaxed);
    int here = 0; /* all ranks below have arrived */
    for (int i = 0; i < looks && here < g->world; i++) {
        while (here < g->world && (here == g->rank || has_come(block_of(&visit, here), number))) here++;
        cpu_relax();
    }
    visit_end(&visit);
    return here == g->world;
}
