/* Loads a plan: one pass that refuses anything the executor could not run safely. */
#include "exec/plan.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "group/control.h"
#include "reduce/types.h"

#define HEADER_WORDS (int64_t)(sizeof(struct plan_header) / sizeof(int64_t))
#define STEP_WORDS (int64_t)(sizeof(struct plan_step) / sizeof(int64_t))
#define PLACE_WORDS (int64_t)(sizeof(struct plan_place) / sizeof(int64_t))

static int64_t farthest(const struct plan_place *at, int64_t turns, int64_t nbytes) {
    int64_t most = at->mod ? at->mod - 1 : turns - 1;
    return at->offset + (at->stride > 0 ? at->stride * most : 0) + nbytes;
}

static const char *check_place(struct plan *p, const struct plan_place *at, int64_t turns, int64_t nbytes) {
    if (at->space < 0 || at->space >= SPACE_COUNT) return "unknown space";
    if (at->index < 0 || at->index >= p->world) return "place outside the world";
    if (at->offset < 0 || at->stride < 0 || at->mod < 0 || at->phase < 0) return "negative offset";
    if (at->space == SPACE_IN && at->index >= p->n_in) p->n_in = at->index + 1;
    if (at->space == SPACE_OUT && at->index >= p->n_out) p->n_out = at->index + 1;
    if (at->space == SPACE_STAGE) {
        int64_t end = farthest(at, turns, nbytes);
        if (end > p->stage_bytes) p->stage_bytes = end;
    }
    return NULL;
}

/* Notes how far the plan reaches into my first input or output. The plan's count does not say, as it may hold a
 * hash. */
static void note_extent(struct plan *p, const struct plan_place *at, const struct plan_step *s, int64_t turns) {
    int64_t *bytes = at->space == SPACE_IN ? &p->in_bytes : &p->out_bytes;
    if ((at->space != SPACE_IN && at->space != SPACE_OUT) || at->index != 0 || turns < 1) return;
    int64_t end = at->offset + at->stride * (turns - 1) + s->last,
            before = turns > 1 ? farthest(at, turns - 1, s->nbytes) : 0;
    if (before > end) end = before;
    if (end > *bytes) *bytes = end;
}

static const char *check_move(struct plan *p, const struct plan_step *s, int64_t turns, int64_t n_places) {
    if (s->nbytes < 0 || s->last < 0 || s->last > s->nbytes) return "bad length";
    if (s->n_dst < 1 || s->n_src < 1 || s->n_dst > MAX_WORLD || s->n_src > MAX_WORLD) return "bad place count";
    if (s->op == OP_COPY && s->n_src != 1) return "copy from several places";
    if (s->dst < 0 || s->src < 0 || s->dst > n_places - s->n_dst || s->src > n_places - s->n_src)
        return "place out of range";
    const char *why = NULL;
    for (int64_t i = 0; i < s->n_dst && !why; i++) {
        const struct plan_place *at = &p->places[s->dst + i];
        why = check_place(p, at, turns, s->nbytes);
        note_extent(p, at, s, turns);
        /* Another rank's staging area may lack pages. */
        if (at->space == SPACE_STAGE && at->index != p->rank) why = "writes another rank's staging area";
        if (at->space == SPACE_PEER_IN) why = "writes another rank's input";
        if (at->space == SPACE_PEER_OUT && !(p->needs[at->index] & NEED_OUTPUT))
            why = "writes an output that nobody promised";
    }
    for (int64_t i = 0; i < s->n_src && !why; i++) {
        const struct plan_place *at = &p->places[s->src + i];
        why = check_place(p, at, turns, s->nbytes);
        note_extent(p, at, s, turns);
        int64_t need = at->space == SPACE_PEER_IN ? NEED_INPUT : at->space == SPACE_PEER_OUT ? NEED_OUTPUT : 0;
        if (!why && need && !(p->needs[at->index] & need)) why = "reads a tensor that nobody promised";
    }
    return why;
}

static uint64_t written_by(const struct plan *p, const struct plan_step *s, int64_t turns) {
    uint64_t outputs = 0;
    for (int64_t i = 0; i < s->n_dst; i++) outputs += p->places[s->dst + i].space != SPACE_STAGE;
    return outputs * (uint64_t)turns * (uint64_t)s->nbytes;
}

static const char *check_part(struct plan *p, int part, int64_t n_places) {
    const struct plan_step *steps = p->steps[part];
    uint64_t written = 0;
    int64_t left = 0, turns = 1; /* of the loop that we are in: its steps to come, its turns */
    for (int64_t i = 0; i < p->n_steps[part]; i++) {
        const struct plan_step *s = &steps[i];
        if (left == 0) turns = 1;
        const char *why = NULL;
        switch (s->op) {
        case OP_COPY:
        case OP_REDUCE:
            why = check_move(p, s, turns, n_places);
            if (!why) written += written_by(p, s, turns);
            break;
        case OP_SIGNAL:
        case OP_WAIT:
            if (s->value < 0 || s->value_stride < 0 || s->value + s->value_stride * turns >= (1 << PLAN_SIGNAL_BITS))
                why = "signal out of range";
            if (s->op == OP_WAIT && (s->who < -1 || s->who >= p->world)) why = "wait for nobody";
            break;
        case OP_LOOP:
            if (left > 0) why = "nested loop";
            else if (s->turns < 0 || s->turns >= (1 << PLAN_SIGNAL_BITS) || s->body < 0 ||
                     s->body > p->n_steps[part] - i - 1)
                why = "bad loop";
            left = s->body + 1;
            turns = s->turns;
            break;
        default: why = "unknown step";
        }
        if (why) return why;
        if (left > 0) left--;
    }
    if (written > p->copied_bytes) p->copied_bytes = written;
    return NULL;
}

static const char *check_apart(const struct plan *p) {
    if (p->piece_bytes <= 0 || !p->has_direct) return "pieces of no list";
    for (int64_t i = 0; i < p->n_steps[PLAN_DIRECT]; i++) {
        const struct plan_step *s = &p->steps[PLAN_DIRECT][i];
        if (s->op == OP_LOOP) return "loops over pieces";
        if (s->op != OP_COPY && s->op != OP_REDUCE) continue;
        for (int64_t k = 0; k < s->n_dst; k++)
            if (p->places[s->dst + k].space == SPACE_STAGE) return "stages where the places of pieces are";
        for (int64_t k = 0; k < s->n_src; k++) {
            const struct plan_place *at = &p->places[s->src + k];
            if (at->space == SPACE_PEER_IN &&
                (at->offset / p->piece_bytes >= p->world || at->offset % p->piece_bytes + s->nbytes > p->piece_bytes))
                return "reads across pieces";
        }
    }
    return NULL;
}

/* An attached plan only copies peers' inputs, a piece at a time, and the staging half has room for the pieces'
 * addresses. */
static const char *check_attached(const struct plan *p) {
    if (p->attach_bytes < 0 || !p->has_direct || p->writes_outputs)
        return "attaches without a direct part that only reads";
    if (p->stage_bytes < p->world * (int64_t)sizeof(uint64_t)) return "no room for addresses";
    for (int64_t i = 0; i < p->n_steps[PLAN_DIRECT]; i++) {
        const struct plan_step *s = &p->steps[PLAN_DIRECT][i];
        if (s->op == OP_REDUCE || s->op == OP_LOOP) return "attaches for more than a copy";
        if (s->op != OP_COPY || p->places[s->src].space != SPACE_PEER_IN) continue;
        const struct plan_place *at = &p->places[s->src];
        if (s->n_dst != 1 || at->offset / p->attach_bytes >= p->world) return "attaches for more than a piece";
        if (at->offset % p->attach_bytes + s->nbytes > p->attach_bytes) return "attaches across pieces";
    }
    return NULL;
}

static const char *check(struct plan *p, int64_t n_words) {
    const struct plan_header *h = (const struct plan_header *)p->words;
    p->world = h->world, p->rank = h->rank, p->collective = h->collective, p->dtype = h->dtype;
    p->redop = h->redop, p->root = h->root, p->count = h->count, p->has_direct = h->has_direct != 0;
    int64_t n_places = h->n_places, total = 0;
    p->piece_bytes = h->piece_bytes, p->algorithm = h->algorithm;
    p->attach_bytes = h->attach_bytes, p->attach_large = h->attach_large != 0;
    p->apart = h->apart != 0;
    if (p->world < 1 || p->world > MAX_WORLD || p->rank < 0 || p->rank >= p->world) return "bad world";
    if (p->dtype < 0 || p->dtype >= DT_COUNT || p->redop < 0 || p->redop >= RED_COUNT) return "bad type";
    int64_t elements = p->count & (p->count & COUNT_HAS_HASH ? 0xffffffff : ~COUNT_FLAGS);
    p->told_bytes = (uint64_t)elements * symcomm_itemsize[p->dtype];
    p->is_short = p->count <= SHORT_BYTES / (int64_t)symcomm_itemsize[p->dtype];
    if (n_places < 0 || n_places > n_words) return "bad place count";
    const int64_t n_steps[PLAN_PARTS] = {
        [PLAN_HEAD] = h->n_head, [PLAN_STAGED] = h->n_staged, [PLAN_DIRECT] = h->n_direct};
    for (int part = 0; part < PLAN_PARTS; part++) {
        p->n_steps[part] = n_steps[part];
        if (p->n_steps[part] < 0 || p->n_steps[part] > n_words) return "bad step count";
        total += p->n_steps[part];
    }
    if (n_words != HEADER_WORDS + p->world + total * STEP_WORDS + n_places * PLACE_WORDS) return "bad length";
    p->needs = p->words + HEADER_WORDS;
    for (int64_t r = 0; r < p->world; r++) p->writes_outputs |= p->has_direct && (p->needs[r] & NEED_OUTPUT);
    const int64_t *next = p->needs + p->world;
    p->places = (const struct plan_place *)(next + total * STEP_WORDS);
    for (int part = 0; part < PLAN_PARTS; part++) {
        p->steps[part] = (const struct plan_step *)next;
        next += p->n_steps[part] * STEP_WORDS;
    }
    bool reduces = false;
    for (int part = 0; part < PLAN_PARTS; part++) {
        const char *why = check_part(p, part, n_places);
        if (why) return why;
        for (int64_t i = 0; i < p->n_steps[part]; i++) reduces |= p->steps[part][i].op == OP_REDUCE;
    }
    if (reduces) p->copied_bytes = 0;
    const char *why = p->attach_bytes ? check_attached(p) : NULL;
    return !why && p->apart ? check_apart(p) : why;
}

struct plan *plan_load(const void *bytes, size_t size, const char **why) {
    *why = "too short";
    if (size < sizeof(struct plan_header) || size % sizeof(int64_t)) return NULL;
    struct plan *p = calloc(1, sizeof *p);
    int64_t *words = malloc(size);
    *why = "out of memory";
    if (p && words) {
        memcpy(words, bytes, size);
        p->words = words;
        *why = check(p, (int64_t)(size / sizeof(int64_t)));
        if (*why == NULL) return p;
    }
    free(words);
    free(p);
    return NULL;
}

void plan_free(struct plan *plan) {
    if (plan == NULL) return;
    free(plan->words);
    free(plan);
}
