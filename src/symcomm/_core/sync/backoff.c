#include "sync/backoff.h"

#include <sched.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "memory/life.h"
#include "os/clock.h"
#include "os/futex.h"
#include "sync/caller.h"
#include "sync/cores.h"

#define LEAST_SPIN 20
#define VAIN_NS 1000        /* if a yield returns sooner, no other thread wanted this core */
#define LONGEST_YIELD 16    /* times yield_ns: how long offering a core that others want is worth it */
#define SOON_NS 2000        /* if the answer comes this soon after we stopped looking, look longer next time */
#define REVIEW_NS 100000000 /* how often cores and ranks are counted again, at most: it takes 1 us, 20 with quotas */
#define OFFER_NS 50000      /* how often a rank that keeps its core checks whether a peer waits for that core */
#define POLLS_A_STEP 16     /* between two looks at the clock */
#define WATCH_TICKS 20000   /* how long the processor watches one word, about 10 us: others may change meanwhile */

/* --- pausing ------------------------------------------------------------------------------------------------------ */

/* umonitor and umwait: the core rests until a cache line changes. Written as bytes for assemblers that lack them. */
#if defined(__x86_64__)
static bool can_watch(void) {
    static _Atomic int known; /* 1: no, 2: yes */
    int state = atomic_load_explicit(&known, memory_order_relaxed);
    if (state == 0) {
        unsigned a = 0, b = 0, c = 0, d = 0;
        state = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 5 & 1) ? 2 : 1; /* WAITPKG */
        atomic_store_explicit(&known, state, memory_order_relaxed);
    }
    return state == 2;
}

static void watch_line(const void *word) {
    __asm__ __volatile__(".byte 0xf3, 0x0f, 0xae, 0xf0" : : "a"(word) : "memory");
}

static void watch_rest(void) {
    uint64_t until = symcomm_ticks() + WATCH_TICKS;
    unsigned state = 1; /* the lighter sleep, which ends sooner */
    __asm__ __volatile__(".byte 0xf2, 0x0f, 0xae, 0xf1"
                         :
                         : "a"((uint32_t)until), "d"((uint32_t)(until >> 32)), "c"(state)
                         : "cc", "memory");
}
#else
static bool can_watch(void) { return false; }
static void watch_line(const void *word) { (void)word; }
static void watch_rest(void) {}
#endif

static void pause_for_long(void) {
#if defined(__aarch64__)
    __asm__ __volatile__("isb" : : : "memory"); /* some ten cycles; "yield" takes none on most cores */
#else
    cpu_relax();
#endif
}

/* --- deciding ----------------------------------------------------------------------------------------------------- */

static struct life *own_life(struct group *g) { return life_of(g->life[g->rank]); }

/* Whether there are more ranks than cores; counted again now and then. */
static bool is_oversubscribed(struct group *g, int64_t now) {
    int64_t next = atomic_load_explicit(&g->next_review, memory_order_relaxed);
    if (now >= next && atomic_compare_exchange_strong(&g->next_review, &next, now + REVIEW_NS))
        atomic_store_explicit(&g->oversubscribed, !cores_suffice(own_life(g), caller_awaited() == NULL),
                              memory_order_relaxed);
    return atomic_load_explicit(&g->oversubscribed, memory_order_relaxed);
}

/* With more ranks than cores, looking pays if peers answer within a microsecond or two. If they need this very core,
 * looking only delays them, so look less next time. */
static void adapt_spin(struct group *g, bool paid) {
    int now = spins_now(g);
    int next = paid ? (now < g->spin / 2 ? now * 2 : g->spin) : now / 2 > LEAST_SPIN ? now / 2 : LEAST_SPIN;
    atomic_store_explicit(&g->spin_now, next, memory_order_relaxed);
}

void backoff_look_longer(struct group *g) { adapt_spin(g, true); }

static void note_core(struct group *g) {
    _Atomic int32_t *noted = &own_life(g)->cpu.core;
    int32_t core = sched_getcpu() + 1;
    if (caller_awaited() == NULL && atomic_load_explicit(noted, memory_order_relaxed) != core)
        atomic_store_explicit(noted, core, memory_order_relaxed);
}

/* Whether a rank was last seen on the core that runs us, and so may be waiting for it. */
static bool was_here(struct group *g, int rank) {
    return atomic_load_explicit(&life_of(g->life[rank])->cpu.core, memory_order_relaxed) == sched_getcpu() + 1;
}

/* Whether this thread runs an operation for which no thread waits yet: its callers may need the core for other work. */
static bool nobody_waits(void) {
    const _Atomic int *awaited = caller_awaited();
    return awaited && atomic_load_explicit(awaited, memory_order_relaxed) == 0;
}

void backoff_begin(struct backoff *b, const struct visit *v, int64_t deadline) {
    struct group *g = v->group;
    int64_t now = symcomm_now_ns();
    bool oversubscribed = is_oversubscribed(g, now), keeps = !oversubscribed && !nobody_waits();
    int64_t until = now + (keeps ? g->poll_ns : g->yield_ns);
    *b = (struct backoff){.visit = v, .start = now, .now = now, .keeps_core = keeps, .offer_at = now};
    b->until = deadline && deadline < until ? deadline : until;
    b->deadline = deadline;
    if (!oversubscribed) atomic_store_explicit(&g->spin_now, g->spin, memory_order_relaxed);
    note_core(g);
}

bool backoff_watch(const struct backoff *b, const void *word) {
    bool watches = b->keeps_core && can_watch();
    if (watches) watch_line(word);
    return watches;
}

/* Whether a rank, or the rank that it sleeps for in turn, sleeps for a message of this rank. The message has been sent,
 * since this rank is waiting now. */
static bool sleeps_for_my_message(const struct visit *v, int rank) {
    const struct group *g = v->group;
    for (int i = 0; i < g->world && rank >= 0 && rank < g->world; i++) {
        rank = (atomic_load_explicit(&block_of(v, rank)->p2p_awaits, memory_order_relaxed) >> 1) - 2;
        if (rank == g->rank) return true;
    }
    return false;
}

/* Whether a sleeping peer was rung and does not run yet. */
static bool is_being_woken(const struct visit *v, int rank) {
    if (rank < 0) return false;
    return atomic_load_explicit(&block_of(v, rank)->sleeping, memory_order_relaxed) == RUNG ||
           sleeps_for_my_message(v, rank);
}

/* Whether to go on offering the core instead of sleeping. That costs nothing while others use the core, and with many
 * ranks per core each waits a while for its turn. A peer that is being woken will run soon. If it found us asleep, it
 * would fall asleep before we run again, and from then on every operation would wait for a rank to be woken. Otherwise
 * the peer is computing, and a rank that waits for its core may need this one. */
static bool is_worth_offering(struct backoff *b, int missing) {
    int64_t last = b->start + LONGEST_YIELD * b->visit->group->yield_ns;
    if (b->deadline && b->deadline < last) last = b->deadline;
    if (is_being_woken(b->visit, missing)) b->until = last;
    return b->now < last && (b->now < b->until || b->now - b->start > b->yields * VAIN_NS);
}

/* Offers the core, until the threads that needed it wait for this one. Then keeps it after all. */
static bool offer(struct backoff *b, int missing) {
    const struct group *g = b->visit->group;
    sched_yield();
    b->yields++;
    b->now = symcomm_now_ns();
    if (b->now >= b->until && !is_worth_offering(b, missing)) return false;
    if (caller_awaited() && !atomic_load_explicit(&g->oversubscribed, memory_order_relaxed) && !nobody_waits())
        b->keeps_core = true, b->until = b->start + g->poll_ns;
    return true;
}

bool backoff_step(struct backoff *b, int missing, bool watched) {
    if (!b->keeps_core) return offer(b, missing);
    if (watched) watch_rest();
    else pause_for_long();
    if (!watched && ++b->looks % POLLS_A_STEP != 0) return true;
    b->now = symcomm_now_ns();
    if (b->now >= b->offer_at) {
        b->offer_at = b->now + OFFER_NS;
        if (missing >= 0 && was_here(b->visit->group, missing)) sched_yield();
    }
    return b->now < b->until;
}

static void add_one(_Atomic uint64_t *group, _Atomic uint64_t *rank) {
    atomic_fetch_add_explicit(group, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(rank, 1, memory_order_relaxed);
}

void backoff_end(struct backoff *b, bool slept) {
    struct group *g = b->visit->group;
    struct cpu_usage *mine = &own_life(g)->cpu;
    if (slept) add_one(&g->waits.slept, &mine->slept);
    else if (b->keeps_core) add_one(&g->waits.looked, &mine->looked);
    else add_one(&g->waits.yielded, &mine->yielded);
    if (atomic_load_explicit(&g->oversubscribed, memory_order_relaxed))
        adapt_spin(g, !slept && b->now - b->start < SOON_NS);
    note_core(g);
}
