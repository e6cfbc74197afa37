/* The data of the store's server: values, queues, and the clients that wait for each key. No sockets here. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct slice {
    const uint8_t *bytes;
    size_t size;
};

/* Counts every byte held on behalf of clients, so that no client can exhaust the machine. */
struct budget {
    size_t used, limit;
};

static inline bool budget_take(struct budget *budget, size_t size) {
    if (size > budget->limit - budget->used) return false;
    budget->used += size;
    return true;
}

static inline void budget_give(struct budget *budget, size_t size) { budget->used -= size; }

struct entry;
struct conn;

/* One client's wait for one key. `granted`: the client was woken for a queue's item and has not acted on it yet. */
struct waiter {
    struct waiter *previous, *next; /* the others at this key, oldest first */
    struct waiter *newer, *older;   /* this client's waits at other keys */
    struct entry *entry;
    struct conn *conn;
    bool granted;
    bool in_barrier; /* counted at a barrier; taken off again if the client gives up */
};

struct item {
    struct item *next;
    size_t size;
    uint8_t bytes[];
};

/* An entry lives while it has a value, queued items, waiters or grants. */
struct entry {
    struct entry *chain; /* next in the same bucket */
    uint64_t hash;
    bool present; /* has a value, unlike a mere queue or a key that is only waited for */
    uint8_t *value;
    size_t value_size, value_room;
    struct item *first, *last;
    size_t queued;
    struct waiter *oldest, *newest;
    size_t grants;
    int64_t barrier_passed; /* the count when the last barrier was complete */
    size_t key_size;
    uint8_t key[];
};

struct table {
    struct entry **buckets;
    size_t bucket_count; /* a power of two */
    size_t entries, present;
    uint64_t seed[2]; /* random, so that no client can choose keys that collide */
    struct budget budget;
};

bool table_open(struct table *table, size_t memory_limit);
void table_close(struct table *table);

struct entry *table_find(const struct table *table, struct slice key);
struct entry *table_obtain(struct table *table, struct slice key); /* finds or creates; NULL when the budget is spent */
void table_release(struct table *table, struct entry *entry);      /* frees an entry that nothing needs any more */
struct entry *table_next(const struct table *table, struct entry *at); /* walks all entries: NULL starts and ends */

bool entry_set(struct table *table, struct entry *entry, struct slice value);
bool entry_append(struct table *table, struct entry *entry, struct slice more);
bool entry_set_number(struct table *table, struct entry *entry, int64_t number);
/* The value read as a decimal number. */
enum reading { IS_NUMBER, NOT_A_NUMBER, TOO_LARGE };
enum reading entry_number(const struct entry *entry, int64_t *number);
void entry_unset(struct table *table, struct entry *entry);

bool entry_push(struct table *table, struct entry *entry, struct slice value);
struct item *entry_pop(struct entry *entry); /* to be freed with item_free */
void item_free(struct table *table, struct item *item);

/* waits: the client's, newest first */
struct waiter *waiter_add(struct table *table, struct entry *entry, struct conn *conn, struct waiter **waits);
void waiter_unlink(struct waiter *waiter); /* out of its entry's list; a granted one is in none */
void waiter_free(struct table *table, struct waiter *waiter, struct waiter **waits);
