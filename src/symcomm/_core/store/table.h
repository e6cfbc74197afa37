/* What the store's server knows: values, queues and who waits for which key. No sockets here. */
#ifndef SYMCOMM_STORE_TABLE_H
#define SYMCOMM_STORE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const uint8_t *bytes;
    size_t size;
} Slice;

/* Every byte held on behalf of clients is charged here, so that no client can exhaust the machine. */
typedef struct {
    size_t used, limit;
} Budget;

static inline bool budget_take(Budget *budget, size_t size) {
    if (size > budget->limit - budget->used) return false;
    budget->used += size;
    return true;
}

static inline void budget_give(Budget *budget, size_t size) { budget->used -= size; }

typedef struct Entry Entry;
typedef struct Conn Conn;

/* One client's wait for one key. `granted`: the client was woken for a queue's item and has not acted on it yet. */
typedef struct Waiter {
    struct Waiter *previous, *next; /* the others at this key, oldest first */
    struct Waiter *newer, *older;   /* this client's waits at other keys */
    Entry *entry;
    Conn *conn;
    bool granted;
    bool in_barrier; /* counted at a barrier, to be taken off again if the client gives up */
} Waiter;

typedef struct Item {
    struct Item *next;
    size_t size;
    uint8_t bytes[];
} Item;

/* An entry lives while it has a value, queued items, waiters or grants. */
struct Entry {
    Entry *chain; /* next in the same bucket */
    uint64_t hash;
    bool present; /* has a value; a key that is only waited for or only a queue has none */
    uint8_t *value;
    size_t value_size, value_room;
    Item *first, *last;
    size_t queued;
    Waiter *oldest, *newest;
    size_t grants;
    int64_t barrier_passed; /* the count when everybody had come the last time */
    size_t key_size;
    uint8_t key[];
};

typedef struct {
    Entry **buckets;
    size_t bucket_count; /* a power of two */
    size_t entries, present;
    uint64_t seed[2]; /* random, so that nobody can choose keys that collide */
    Budget budget;
} Table;

bool table_open(Table *table, size_t memory_limit);
void table_close(Table *table);

Entry *table_find(const Table *table, Slice key);
Entry *table_obtain(Table *table, Slice key);     /* finds or creates; NULL when the budget is spent */
void table_release(Table *table, Entry *entry);   /* frees an entry that nothing needs any more */
Entry *table_next(const Table *table, Entry *at); /* walks all entries: NULL starts and ends */

bool entry_set(Table *table, Entry *entry, Slice value);
bool entry_append(Table *table, Entry *entry, Slice more);
bool entry_set_number(Table *table, Entry *entry, int64_t number);
bool entry_number(const Entry *entry, int64_t *number); /* false when the value does not start with a number */
void entry_unset(Table *table, Entry *entry);

bool entry_push(Table *table, Entry *entry, Slice value);
Item *entry_pop(Entry *entry); /* to be freed with item_free */
void item_free(Table *table, Item *item);

Waiter *waiter_add(Table *table, Entry *entry, Conn *conn, Waiter **waits); /* waits: the client's, newest first */
void waiter_unlink(Waiter *waiter); /* out of its entry's list; a granted one is in none */
void waiter_free(Table *table, Waiter *waiter, Waiter **waits);

#endif
