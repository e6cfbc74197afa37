#include "store/table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define FIRST_BUCKETS 1024

/* --- keys --------------------------------------------------------------------------------------- */

static inline uint64_t rotate(uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

static inline void sip_round(uint64_t v[4]) {
    v[0] += v[1], v[1] = rotate(v[1], 13), v[1] ^= v[0], v[0] = rotate(v[0], 32);
    v[2] += v[3], v[3] = rotate(v[3], 16), v[3] ^= v[2];
    v[0] += v[3], v[3] = rotate(v[3], 21), v[3] ^= v[0];
    v[2] += v[1], v[1] = rotate(v[1], 17), v[1] ^= v[2], v[2] = rotate(v[2], 32);
}

/* SipHash-1-3, which has a secret key: a hostile client cannot pile its keys up in one bucket. */
static uint64_t hash_key(const uint64_t seed[2], struct slice key) {
    uint64_t v[4] = {seed[0] ^ 0x736f6d6570736575, seed[1] ^ 0x646f72616e646f6d, seed[0] ^ 0x6c7967656e657261,
                     seed[1] ^ 0x7465646279746573};
    size_t whole = key.size & ~(size_t)7;
    for (size_t i = 0; i < whole; i += 8) {
        uint64_t word;
        memcpy(&word, key.bytes + i, 8);
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    uint64_t last = (uint64_t)key.size << 56;
    memcpy(&last, key.bytes + whole, key.size - whole);
    last = (last & 0x00ffffffffffffff) | (uint64_t)key.size << 56;
    v[3] ^= last;
    sip_round(v);
    v[0] ^= last;
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++) sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

bool table_open(struct table *table, size_t memory_limit) {
    memset(table, 0, sizeof *table);
    table->budget.limit = memory_limit;
    if (getrandom(table->seed, sizeof table->seed, 0) != (ssize_t)sizeof table->seed) return false;
    table->bucket_count = FIRST_BUCKETS;
    table->buckets = calloc(table->bucket_count, sizeof *table->buckets);
    return table->buckets != NULL;
}

static struct entry **slot_of(const struct table *table, uint64_t hash) {
    return &table->buckets[hash & (table->bucket_count - 1)];
}

static struct entry *find_hashed(const struct table *table, struct slice key, uint64_t hash) {
    for (struct entry *e = *slot_of(table, hash); e != NULL; e = e->chain)
        if (e->hash == hash && e->key_size == key.size && memcmp(e->key, key.bytes, key.size) == 0) return e;
    return NULL;
}

struct entry *table_find(const struct table *table, struct slice key) {
    return find_hashed(table, key, hash_key(table->seed, key));
}

/* Failing to grow is no error; chains just get longer. */
static void grow(struct table *table) {
    size_t count = table->bucket_count * 2;
    struct entry **buckets = calloc(count, sizeof *buckets);
    if (buckets == NULL) return;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct entry *e = table->buckets[i], *next; e != NULL; e = next) {
            next = e->chain;
            e->chain = buckets[e->hash & (count - 1)];
            buckets[e->hash & (count - 1)] = e;
        }
    }
    free(table->buckets);
    table->buckets = buckets;
    table->bucket_count = count;
}

struct entry *table_obtain(struct table *table, struct slice key) {
    uint64_t hash = hash_key(table->seed, key);
    struct entry *entry = find_hashed(table, key, hash);
    if (entry != NULL) return entry;
    if (!budget_take(&table->budget, sizeof *entry + key.size)) return NULL;
    entry = calloc(1, sizeof *entry + key.size);
    if (entry == NULL) {
        budget_give(&table->budget, sizeof *entry + key.size);
        return NULL;
    }
    if (table->entries >= table->bucket_count) grow(table);
    entry->hash = hash;
    entry->key_size = key.size;
    memcpy(entry->key, key.bytes, key.size);
    entry->chain = *slot_of(table, hash);
    *slot_of(table, hash) = entry;
    table->entries++;
    return entry;
}

void table_release(struct table *table, struct entry *entry) {
    if (entry->present || entry->queued > 0 || entry->oldest != NULL || entry->grants > 0) return;
    struct entry **link = slot_of(table, entry->hash);
    while (*link != entry) link = &(*link)->chain;
    *link = entry->chain;
    table->entries--;
    budget_give(&table->budget, sizeof *entry + entry->key_size);
    free(entry);
}

struct entry *table_next(const struct table *table, struct entry *at) {
    if (at != NULL && at->chain != NULL) return at->chain;
    size_t bucket = at == NULL ? 0 : (at->hash & (table->bucket_count - 1)) + 1;
    while (bucket < table->bucket_count && table->buckets[bucket] == NULL) bucket++;
    return bucket < table->bucket_count ? table->buckets[bucket] : NULL;
}

void table_close(struct table *table) {
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct entry *e = table->buckets[i], *next; e != NULL; e = next) {
            next = e->chain;
            for (struct item *item; (item = entry_pop(e)) != NULL;) free(item);
            free(e->value);
            free(e);
        }
    }
    free(table->buckets);
    table->buckets = NULL;
}

/* --- values ------------------------------------------------------------------------------------- */

/* Makes room for `room` bytes; keeps the old bytes if `keep`. */
static bool make_room(struct table *table, struct entry *entry, size_t room, bool keep) {
    if (room <= entry->value_room && (keep || room * 2 + 64 >= entry->value_room)) return true;
    if (room > entry->value_room && !budget_take(&table->budget, room - entry->value_room)) return false;
    uint8_t *value = keep ? realloc(entry->value, room + 1) : malloc(room + 1);
    if (value == NULL) {
        if (room > entry->value_room) budget_give(&table->budget, room - entry->value_room);
        return false;
    }
    if (!keep) free(entry->value);
    if (room < entry->value_room) budget_give(&table->budget, entry->value_room - room);
    entry->value = value;
    entry->value_room = room;
    return true;
}

static void mark_present(struct table *table, struct entry *entry) {
    table->present += !entry->present;
    entry->present = true;
}

bool entry_set(struct table *table, struct entry *entry, struct slice value) {
    if (!make_room(table, entry, value.size, false)) return false;
    if (value.size > 0) memcpy(entry->value, value.bytes, value.size);
    entry->value_size = value.size;
    mark_present(table, entry);
    return true;
}

bool entry_append(struct table *table, struct entry *entry, struct slice more) {
    size_t size = entry->value_size + more.size;
    if (size > entry->value_room || entry->value == NULL) {
        size_t roomy = size + size / 2; /* appending n times costs O(n), not O(n^2) */
        if (!make_room(table, entry, roomy, true) && !make_room(table, entry, size, true)) return false;
    }
    if (more.size > 0) memcpy(entry->value + entry->value_size, more.bytes, more.size);
    entry->value_size = size;
    mark_present(table, entry);
    return true;
}

bool entry_set_number(struct table *table, struct entry *entry, int64_t number) {
    char digits[24];
    int size = snprintf(digits, sizeof digits, "%lld", (long long)number);
    return entry_set(table, entry, (struct slice){(const uint8_t *)digits, (size_t)size});
}

/* Reads leading blanks, a sign and digits; ignores the rest, as PyTorch's store does. An empty value is 0, as in our
 * other stores. */
enum reading entry_number(const struct entry *entry, int64_t *number) {
    const uint8_t *at = entry->value, *end = at + entry->value_size;
    *number = 0;
    if (entry->value_size == 0) return IS_NUMBER;
    while (at < end && (*at == ' ' || (*at >= '\t' && *at <= '\r'))) at++;
    bool negative = at < end && *at == '-';
    if (at < end && (*at == '-' || *at == '+')) at++;
    if (at == end || *at < '0' || *at > '9') return NOT_A_NUMBER;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        int64_t digit = negative ? -(*at - '0') : *at - '0';
        if (__builtin_mul_overflow(*number, 10, number) || __builtin_add_overflow(*number, digit, number))
            return TOO_LARGE;
    }
    return IS_NUMBER;
}

void entry_unset(struct table *table, struct entry *entry) {
    table->present -= entry->present;
    entry->present = false;
    budget_give(&table->budget, entry->value_room);
    free(entry->value);
    entry->value = NULL;
    entry->value_size = entry->value_room = 0;
}

/* --- queues ------------------------------------------------------------------------------------- */

bool entry_push(struct table *table, struct entry *entry, struct slice value) {
    if (!budget_take(&table->budget, sizeof(struct item) + value.size)) return false;
    struct item *item = malloc(sizeof *item + value.size);
    if (item == NULL) {
        budget_give(&table->budget, sizeof *item + value.size);
        return false;
    }
    item->next = NULL;
    item->size = value.size;
    if (value.size > 0) memcpy(item->bytes, value.bytes, value.size);
    if (entry->last != NULL) entry->last->next = item;
    else entry->first = item;
    entry->last = item;
    entry->queued++;
    return true;
}

struct item *entry_pop(struct entry *entry) {
    struct item *item = entry->first;
    if (item == NULL) return NULL;
    entry->first = item->next;
    if (entry->first == NULL) entry->last = NULL;
    entry->queued--;
    return item;
}

void item_free(struct table *table, struct item *item) {
    budget_give(&table->budget, sizeof *item + item->size);
    free(item);
}

/* --- waiters ------------------------------------------------------------------------------------ */

struct waiter *waiter_add(struct table *table, struct entry *entry, struct conn *conn, struct waiter **waits) {
    if (!budget_take(&table->budget, sizeof(struct waiter))) return NULL;
    struct waiter *waiter = calloc(1, sizeof *waiter);
    if (waiter == NULL) {
        budget_give(&table->budget, sizeof *waiter);
        return NULL;
    }
    waiter->entry = entry;
    waiter->conn = conn;
    waiter->older = *waits;
    if (*waits != NULL) (*waits)->newer = waiter;
    *waits = waiter;
    waiter->previous = entry->newest;
    if (entry->newest != NULL) entry->newest->next = waiter;
    else entry->oldest = waiter;
    entry->newest = waiter;
    return waiter;
}

void waiter_unlink(struct waiter *waiter) {
    struct entry *entry = waiter->entry;
    if (waiter->previous != NULL) waiter->previous->next = waiter->next;
    else entry->oldest = waiter->next;
    if (waiter->next != NULL) waiter->next->previous = waiter->previous;
    else entry->newest = waiter->previous;
    waiter->previous = waiter->next = NULL;
}

void waiter_free(struct table *table, struct waiter *waiter, struct waiter **waits) {
    if (waiter->newer != NULL) waiter->newer->older = waiter->older;
    else *waits = waiter->older;
    if (waiter->older != NULL) waiter->older->newer = waiter->newer;
    budget_give(&table->budget, sizeof *waiter);
    free(waiter);
}
