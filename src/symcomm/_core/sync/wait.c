#include "sync/wait.h"

#include <errno.h>
#include <stddef.h>
#include <unistd.h>

#include "observe/flight.h"
#include "os/futex.h"
#include "sync/backoff.h"
#include "sync/caller.h"
#include "sync/fail.h"

#define ASK_EVERY 16           /* slices: a signal may have come just before we slept */
#define DOZES_AFTER 20         /* slices, after which a wait that dozes takes longer ones: */
#define DOZING 5               /* times as long */
#define WORTH_NOTING_NS 100000 /* of a wait, in the flight recorder */

/* --- asking the caller -------------------------------------------------------------------------------------------- */

static bool is_interrupted(bool signalled) {
    struct caller *c = symcomm_caller;
    if (c == NULL || c->hooks == NULL || (++c->slices % ASK_EVERY != 0 && !signalled)) return false;
    return c->hooks->is_interrupted(c);
}

static void note_site(struct flight_entry *e) {
    struct caller *c = symcomm_caller;
    if (e == NULL || c == NULL || c->hooks == NULL || c->knows_site) return;
    c->knows_site = true;
    uint32_t site = c->hooks->find_site(c);
    if (site == 0) return;
    atomic_store_explicit(&e->exact_site, 1, memory_order_relaxed);
    atomic_store_explicit(&e->site, site, memory_order_release);
}

/* --- sleeping ----------------------------------------------------------------------------------------------------- */

static bool is_late(const struct wait *w) {
    if (w->kind->is_operation && has_given_up(w->visit->group)) return true;
    return w->deadline && symcomm_now_ns() >= w->deadline;
}

/* STATUS_OK: the wait goes on. */
static int why_stop(struct wait *w, int *culprit) {
    int status = w->visit ? sync_aborted(w->visit) : STATUS_OK;
    *culprit = -1;
    if (status == STATUS_OK && w->kind->check) status = w->kind->check(w);
    if (status == STATUS_OK && w->kind->find_gone) status = w->kind->find_gone(w, culprit);
    if (status != STATUS_OK || !is_late(w)) return status;
    *culprit = w->missing;
    return STATUS_TIMEOUT;
}

/* Sleeps for a slice; returns whether a signal handler raised. If no peer can die, slices are longer. */
static bool sleep_slice(struct wait *w, uint32_t seen) {
    bool alone = w->kind->find_gone == NULL;
    bool dozes = w->kind->dozes && ++w->slices > DOZES_AFTER;
    int64_t slice = SLICE_NS * (alone ? ASK_EVERY : dozes ? DOZING : 1);
    int64_t left = w->deadline ? w->deadline - symcomm_now_ns() : slice;
    if (left <= 0) return false;
    note_site(w->record);
    bool signalled = futex_wait(w->bell, seen, left < slice ? left : slice) < 0 && errno == EINTR;
    return is_interrupted(signalled || alone);
}

/* --- telling that it lasts ---------------------------------------------------------------------------------------- */

#define NEVER INT64_MAX

static _Atomic int64_t tell_after; /* ns; 0: never */

void wait_tell_after(int64_t ns) { atomic_store(&tell_after, ns); }

struct telling {
    int64_t since, next;
    bool has_told;
};

static struct telling begin_telling(void) {
    int64_t now = symcomm_now_ns(), after = atomic_load_explicit(&tell_after, memory_order_relaxed);
    bool tells = after > 0 && symcomm_caller && symcomm_caller->hooks;
    return (struct telling){.since = now, .next = tells ? now + after : NEVER};
}

static void tell(const struct wait *w, struct telling *t, int64_t now, int status) {
    struct caller *c = symcomm_caller;
    struct long_wait told = {.group = w->visit ? w->visit->group : w->tells_of,
                             .id = w,
                             .missing = w->missing,
                             .kind = w->kind->what,
                             .ns = now - t->since,
                             .status = status};
    int64_t pause = told.group ? c->hooks->tell(c, &told) : 0;
    t->has_told = told.group != NULL;
    t->next = pause > 0 ? symcomm_now_ns() + pause : NEVER;
}

/* Looks again after every reason to stop: a rank that gave up or is gone may have done its part before. */
static int sleep_until_over(struct wait *w, struct telling *t) {
    const struct wait_kind *k = w->kind;
    for (;;) {
        uint32_t seen = k->publish ? k->publish(w) : atomic_load_explicit(w->bell, memory_order_acquire);
        atomic_thread_fence(memory_order_seq_cst);
        if (k->is_over(w)) return STATUS_OK;
        int culprit, status = why_stop(w, &culprit);
        if (status) return k->is_over(w) ? STATUS_OK : k->give_up(w, status, culprit);
        if (sleep_slice(w, seen)) return k->give_up(w, STATUS_INTERRUPTED, -1);
        if (t->next != NEVER && symcomm_now_ns() >= t->next) tell(w, t, symcomm_now_ns(), WAIT_GOES_ON);
    }
}

static int go_to_sleep(struct wait *w) {
    if (w->sleepers) atomic_fetch_add(w->sleepers, 1);
    struct telling t = begin_telling();
    int status = sleep_until_over(w, &t);
    if (t.has_told) tell(w, &t, symcomm_now_ns(), status);
    if (w->sleepers) atomic_fetch_sub(w->sleepers, 1);
    if (w->kind->retract) w->kind->retract(w, status);
    return status;
}

/* --- looking ------------------------------------------------------------------------------------------------------ */

/* Looks until the wait is over (true), or there is no point in looking any more (false). */
static bool look_on(struct wait *w, struct backoff *b) {
    const void *word;
    bool watched;
    do {
        word = w->word;
        watched = word && backoff_watch(b, word);
        if (w->kind->is_over(w)) return true;
        if (sync_aborted(w->visit)) return false;
    } while (backoff_step(b, w->missing, watched && word == w->word));
    return false;
}

static void note_wait(const struct wait *w, const struct backoff *b) {
    int64_t ns = symcomm_now_ns() - b->start;
    if (w->record && ns >= WORTH_NOTING_NS)
        atomic_fetch_add_explicit(&w->record->waited, (uint32_t)(ns / 1000), memory_order_relaxed);
}

int wait_loop(struct wait *w) {
    struct backoff b;
    caller_before_waiting();
    if (w->visit == NULL) return go_to_sleep(w);
    backoff_begin(&b, w->visit, w->deadline);
    bool over = look_on(w, &b);
    int status = over ? STATUS_OK : go_to_sleep(w);
    backoff_end(&b, !over);
    if (w->kind->is_operation) note_wait(w, &b);
    return status;
}

bool wait_briefly(bool (*is_over)(void *context), void *context, int64_t most_ns) {
    if (is_over(context)) return true;
    caller_before_waiting();
    for (int64_t end = symcomm_now_ns() + most_ns; symcomm_now_ns() < end;) {
        usleep(100);
        if (is_over(context)) return true;
    }
    return false;
}
