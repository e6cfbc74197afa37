/* What ranks of a group tell each other, in shared memory.
 *
 * Every rank has one control block per group, in its own arena, which all peers have mapped. Only the owner writes it,
 * except the doorbells, the `sleeping` word, the abort words and what is marked below. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define CALL_BYTES 384    /* of the words that say what a rank was doing */
#define REFUSAL_BYTES 640 /* of the words that say why it refused a call */
#define REFUSED_CALL 0xff /* signature of a rank that takes the number but has refused its call */
#define VOTE_BYTES 768    /* of a rank's vote: two sets of MAX_WORLD ranks, and where its part of a new group lies */
#define MAX_WORLD 1024    /* ranks of a group; also places in a step of a plan */

#define IN_PIECES INT64_MAX

struct arrival { /* one cache line: the flag and all that others must know */
    _Atomic uint64_t seq;
    _Atomic uint64_t signature; /* collective, dtype, operation, root */
    _Atomic uint64_t count;
    /* Of my tensors in my arena; -1: not symmetric. IN_PIECES: the input is a list of symmetric tensors; their offsets
     * stand where a rank that lends ordinary tensors writes their addresses. */
    _Atomic int64_t in_offset;
    _Atomic int64_t out_offset;
    _Atomic uint64_t left; /* seq, once the owner no longer writes into peers' tensors; only set by plans that do */
    /* 1: peers can read those of my tensors that the plan needs, and I can read theirs. */
    _Atomic uint64_t attached;
    uint64_t pad;
};

/* A few words of one rank for all others. It writes them into two places by turns: if it dies while it writes, the
 * previous words remain. */
struct record {
    _Atomic uint32_t version; /* how often it was written; the last words are in place version % 2 */
    _Atomic uint32_t length[2];
};

/* Whether a rank sleeps until its condition holds. RUNG: it holds now, and the rank is being woken. */
enum sleep_state { AWAKE, ASLEEP, RUNG };

struct control {
    struct arrival arrival[2];               /* by seq % 2: a fast rank may arrive again before a slow one has looked */
    _Alignas(64) _Atomic uint64_t progress;  /* seq << PLAN_SIGNAL_BITS | signal */
    _Alignas(64) _Atomic uint64_t announced; /* the operation that the owner is about to run in its caller's thread */
    _Alignas(64) _Atomic uint32_t doorbell;  /* futex */
    _Atomic uint32_t sleeping;               /* enum sleep_state: until the condition below holds */
    _Atomic uint32_t wait_kind;
    _Atomic int32_t wait_who;
    _Atomic uint64_t wait_target;
    _Alignas(64) _Atomic uint32_t p2p_doorbell; /* futex: there is a message, room for one, or an acknowledgement */
    _Atomic uint32_t p2p_sleepers;
    /* The message that a thread of the owner sleeps for: 2 * (peer + 2) + is_send; 0: none. */
    _Atomic int32_t p2p_awaits;
    _Alignas(64) _Atomic uint32_t putting; /* threads of the owner that write into peers' windows */
    _Alignas(64) _Atomic uint64_t abort;   /* 0, or why the group failed, packed: see sync_fail() */
    _Atomic uint64_t abort_seq;
    _Atomic uint64_t voided; /* ~number of the first operation that a rank left in failure, so it only grows; 0: none */
    _Alignas(64) _Atomic uint32_t state; /* enum control_state */
    _Atomic uint8_t departed[MAX_WORLD]; /* others write these: rank r will not touch this block again */
    _Atomic uint64_t agreed; /* rank 0's, all write it: the survivors' word, see membership/shared_board.py */
    _Atomic uint64_t told;   /* rank 0's, all write it: seq << 16 | the rank that reports its long waits */
    _Atomic uint64_t token, token_address; /* a random number and where the owner has it, see exec/cma.c */
    _Atomic uint32_t refusal_length[2];
    char refusal_text[2][REFUSAL_BYTES]; /* by seq % 2, as arrivals: why the owner refused that call */
    struct record call, vote;
    char call_text[2][CALL_BYTES]; /* what this rank was doing, once something went wrong */
    char vote_text[2][VOTE_BYTES];
};

enum control_state { CONTROL_EMPTY, CONTROL_IN_USE, CONTROL_LEFT };
