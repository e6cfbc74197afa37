/* A plan as the executor runs it. symcomm/collectives/plan.py writes it; plan_load() checks it, once. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SHORT_BYTES 4096 /* a plan that moves more gives up the interpreter lock at once */

enum plan_op { OP_COPY, OP_REDUCE, OP_SIGNAL, OP_WAIT, OP_LOOP };
enum plan_space { SPACE_IN, SPACE_OUT, SPACE_STAGE, SPACE_PEER_IN, SPACE_PEER_OUT, SPACE_COUNT };
enum plan_need { NEED_INPUT = 1, NEED_OUTPUT = 2 };
enum { PLAN_HEAD, PLAN_STAGED, PLAN_DIRECT, PLAN_PARTS };

/* What a count may hold besides the elements: see elements_of() of collectives/select.py. */
#define COUNT_HAS_HASH ((int64_t)1 << 62)
#define COUNT_FLAGS ((int64_t)3 << 60)

#define PLAN_SIGNAL_BITS 24 /* progress = seq << 24 | signal */
#define PLAN_MIXED_SIGNAL 1 /* the extra synchronisation if some rank skipped its head */

/* The words of an encoded plan, all of 64 bits: a header, what each rank needs, steps, places. Python has the names of
 * these fields, in this order, as native.PLAN_HEADER, PLAN_STEP and PLAN_PLACE. */
/* clang-format off */
#define PLAN_HEADER_FIELDS(F) \
    F(world) F(rank) F(collective) F(dtype) F(redop) F(root) F(count) F(has_direct) F(n_head) F(n_staged) F(n_direct) \
    F(n_places) F(piece_bytes) F(algorithm) F(attach_bytes) F(attach_large) \
    F(apart)
#define PLAN_STEP_FIELDS(F) \
    F(op) F(dst) F(n_dst) F(src) F(n_src) F(nbytes) F(last) F(value) F(value_stride) F(who) F(turns) F(body)
#define PLAN_PLACE_FIELDS(F) F(space) F(index) F(offset) F(stride) F(mod) F(phase)
/* clang-format on */

#define PLAN_FIELD(NAME) int64_t NAME;
struct plan_header {
    PLAN_HEADER_FIELDS(PLAN_FIELD)
};
struct plan_step {
    PLAN_STEP_FIELDS(PLAN_FIELD)
};
struct plan_place {
    PLAN_PLACE_FIELDS(PLAN_FIELD)
};

struct plan {
    int64_t world, rank, collective, dtype, redop, root, count;
    int has_direct;
    /* Whether ranks write into each other's outputs if all are symmetric; the same on all ranks. */
    int writes_outputs;
    /* Bytes of each piece that the direct part may read by cross-memory attach if inputs are not symmetric; 0: none. */
    int64_t attach_bytes;
    int attach_large;            /* even if copies use non-temporal stores */
    int64_t n_in, n_out;         /* buffers the caller must pass */
    int64_t in_bytes, out_bytes; /* of the first of each */
    /* Bytes of each tensor of an input list, which counts as one tensor if they lie one after another; 0: never. */
    int64_t piece_bytes;
    bool apart;            /* those tensors may lie apart: the direct part reads each by itself, and stages nothing */
    int64_t algorithm;     /* a number in ALGORITHMS of plan.py, for the flight recorder */
    uint64_t copied_bytes; /* the most that a part copies into this rank's outputs; 0 if it reduces */
    uint64_t told_bytes;   /* what its count stands for, in reports */
    bool is_short;         /* SHORT_BYTES at most */
    int64_t stage_bytes;   /* how far the plan reaches into a staging half */
    int64_t n_steps[PLAN_PARTS];
    const struct plan_step *steps[PLAN_PARTS];
    const struct plan_place *places;
    const int64_t *needs; /* per rank */
    /* How many asynchronous calls of this kind must still be waited for soon, before one is left to its caller. */
    _Atomic int impatience;
    int64_t *words; /* owns the memory of everything above */
};

/* NULL, with *why set, if the words are no plan that can be run safely. */
struct plan *plan_load(const void *bytes, size_t size, const char **why);
void plan_free(struct plan *plan);
