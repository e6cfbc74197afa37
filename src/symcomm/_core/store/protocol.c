/* PyTorch's TCPStore protocol: a byte for the command, then its fields, in the machine's byte order. */
#include "store/server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static const uint32_t hello_magic = 0x3C85F7CE;
static const char refusal[4] = {'A', 'U', 'T', 'H'}; /* instead of a ping's nonce: prove the token first */

enum { CHECK_READY = 0, CHECK_NOT_READY = 1 };
enum { WAIT_DONE = 0, WAIT_CANCELED = 1 };
enum { CHALLENGE_NO_TOKEN = 0, CHALLENGE_ACCEPTED = 1 };

/* --- the commands' shapes ------------------------------------------------------------------------ */

typedef void handler(struct server *server, struct conn *conn, const uint8_t *fields);

static handler do_hello, do_set, do_compare_set, do_get, do_add, do_check, do_wait, do_num_keys, do_delete, do_append,
    do_multi_get, do_multi_set, do_cancel, do_ping, do_push, do_pop, do_queue_len, do_list_keys, do_barrier,
    do_challenge, do_proof;
static void settle_grants(struct server *server, struct conn *conn);

/* Fields: k key, v value (both a u64 length and bytes), 8 a 64-bit number, 4 a 32-bit number, d 32 raw bytes, n a u64
 * count of how often the fields of `each` follow. */
struct command {
    const char *name, *fields, *each;
    handler *handle;
};

enum { HELLO = 0, QUEUE_POP = 15, PLAIN_COMMANDS = 19, CHALLENGE = 0xA7, PROOF = 0xA8 };

static const struct command commands[PLAIN_COMMANDS] = {
    {"hello", "4", "", do_hello},
    {"set", "kv", "", do_set},
    {"compare_set", "kvv", "", do_compare_set},
    {"get", "k", "", do_get},
    {"add", "k8", "", do_add},
    {"check", "n", "k", do_check},
    {"wait", "n", "k", do_wait},
    {"num_keys", "", "", do_num_keys},
    {"delete_key", "k", "", do_delete},
    {"append", "kv", "", do_append},
    {"multi_get", "n", "k", do_multi_get},
    {"multi_set", "n", "kv", do_multi_set},
    {"cancel_wait", "", "", do_cancel},
    {"ping", "4", "", do_ping},
    {"queue_push", "kv", "", do_push},
    {"queue_pop", "k", "", do_pop},
    {"queue_len", "k", "", do_queue_len},
    {"list_keys", "", "", do_list_keys},
    {"barrier", "k8", "", do_barrier},
};
static const struct command challenge_command = {"token challenge", "d", "", do_challenge};
static const struct command proof_command = {"token proof", "d", "", do_proof};

static const struct command *command_of(uint8_t code) {
    if (code < PLAIN_COMMANDS) return &commands[code];
    if (code == CHALLENGE) return &challenge_command;
    if (code == PROOF) return &proof_command;
    return NULL;
}

/* --- finding a whole frame ----------------------------------------------------------------------- */

static uint64_t load_u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void open_stage(struct server *server, struct conn *conn) {
    conn->stage = STAGE_OPEN;
    server->greeting--;
    free(conn->challenge);
    conn->challenge = NULL;
}

static bool is_expected(enum stage stage, uint8_t code) {
    switch (stage) {
    case STAGE_NEW: return code == HELLO;
    case STAGE_CHALLENGE: return code == CHALLENGE;
    case STAGE_PROOF: return code == PROOF;
    default: return code != HELLO && code != PROOF;
    }
}

/* The command that `code` stands for, if it may come at this stage; NULL after refusing the connection. */
static const struct command *allow_command(struct server *server, struct conn *conn, uint8_t code) {
    const struct command *command = command_of(code);
    if (command == NULL) {
        conn_refuse(server, conn, "sent an unknown command (%u)", code);
        return NULL;
    }
    if (conn->stage == STAGE_NEW && code != HELLO) {
        conn_refuse(server, conn, "did not say hello as a store client does (first byte %u)", code);
        return NULL;
    }
    if (conn->stage == STAGE_CHALLENGE && code != CHALLENGE && server->limits.token_is_optional)
        open_stage(server, conn);
    if (is_expected(conn->stage, code)) return command;
    if (conn->stage == STAGE_CHALLENGE) {
        conn_send(server, conn, refusal, sizeof refusal);
        conn_flush(server, conn);
        conn_refuse(server, conn, "called %s without the job token (set token= or SYMCOMM_TOKEN there)", command->name);
    } else {
        conn_refuse(server, conn, "called %s out of turn", command->name);
    }
    return NULL;
}

/* Length-prefixed bytes: returns their end, or 0 after noting what is needed, or after refusing the client. */
static size_t scan_bytes(struct server *server, struct conn *conn, const uint8_t *frame, size_t size, bool is_key) {
    struct scan *scan = &conn->scan;
    scan->need = scan->at + 8;
    if (size < scan->need) return 0;
    uint64_t length = load_u64(frame + scan->at);
    uint64_t limit = is_key ? server->limits.key : server->limits.value;
    if (length > limit) {
        conn_refuse(server, conn, "sent a %s of %llu bytes in %s; the limit is %llu", is_key ? "key" : "value",
                    (unsigned long long)length, scan->command->name, (unsigned long long)limit);
        return 0;
    }
    scan->need = scan->at + 8 + (size_t)length;
    if (scan->need > server->limits.frame) {
        conn_refuse(server, conn, "sent a %s call of more than %llu bytes", scan->command->name,
                    (unsigned long long)server->limits.frame);
        return 0;
    }
    return size < scan->need ? 0 : scan->need;
}

/* Checks a frame, from where it stopped the last time: a frame that comes in pieces costs no more than one that comes
 * at once. True: the frame is whole, scan.at bytes long, and every length in it was checked. */
static bool scan_frame(struct server *server, struct conn *conn, const uint8_t *frame, size_t size) {
    struct scan *scan = &conn->scan;
    if (scan->command == NULL) {
        const struct command *command = size > 0 ? allow_command(server, conn, frame[0]) : NULL;
        if (command == NULL) return false;
        *scan = (struct scan){.command = command, .at = 1, .field = command->fields};
    }
    for (;;) {
        size_t end;
        switch (*scan->field) {
        case 0:
            if (scan->repeats == 0) return true;
            scan->repeats--;
            scan->field = scan->command->each;
            continue;
        case 'k':
        case 'v':
            end = scan_bytes(server, conn, frame, size, *scan->field == 'k');
            if (end == 0) return false;
            break;
        default: {
            size_t width = *scan->field == '4' ? 4 : *scan->field == 'd' ? SHA256_SIZE : 8;
            end = scan->need = scan->at + width;
            if (size < end) return false;
            if (*scan->field != 'n') break;
            scan->repeats = load_u64(frame + scan->at);
            if (scan->repeats > server->limits.count) {
                conn_refuse(server, conn, "sent %llu keys in one %s call; the limit is %llu",
                            (unsigned long long)scan->repeats, scan->command->name,
                            (unsigned long long)server->limits.count);
                return false;
            }
        }
        }
        scan->at = end;
        scan->field++;
    }
}

size_t protocol_consume(struct server *server, struct conn *conn, const uint8_t *bytes, size_t size) {
    size_t used = 0;
    while (!conn->doomed && !conn->blocked && size - used >= conn->scan.need && size > used) {
        const uint8_t *frame = bytes + used;
        if (!scan_frame(server, conn, frame, size - used)) break;
        const struct command *command = conn->scan.command;
        used += conn->scan.at;
        conn->scan = (struct scan){0};
        atomic_fetch_add_explicit(&server->requests, 1, memory_order_relaxed);
        if (conn->waits != NULL && frame[0] != QUEUE_POP) settle_grants(server, conn);
        command->handle(server, conn, frame + 1);
    }
    return used;
}

void protocol_describe_partial(const struct conn *conn, char *text, size_t size) {
    const struct command *command = command_of(conn->in.bytes[conn->in.start]);
    snprintf(text, size, "left in the middle of a %s call (%zu of at least %zu bytes)",
             command == NULL ? "bad" : command->name, buffer_size(&conn->in), conn->scan.need);
}

/* --- reading fields of a frame that was checked ---------------------------------------------------- */

static struct slice take_bytes(const uint8_t **fields) {
    struct slice slice = {*fields + 8, (size_t)load_u64(*fields)};
    *fields = slice.bytes + slice.size;
    return slice;
}

static uint64_t take_u64(const uint8_t **fields) {
    uint64_t value = load_u64(*fields);
    *fields += 8;
    return value;
}

static void send_byte(struct server *server, struct conn *conn, uint8_t byte) { conn_send(server, conn, &byte, 1); }

static void send_i64(struct server *server, struct conn *conn, int64_t value) {
    conn_send(server, conn, &value, sizeof value);
}

static struct slice value_of(const struct entry *entry) {
    return entry != NULL && entry->present ? (struct slice){entry->value, entry->value_size} : (struct slice){NULL, 0};
}

/* `done`: whether there was memory for a change of `entry` (NULL: not even for the entry). Refuses the client if not,
 * and returns `done`. */
static bool had_room(struct server *server, struct conn *conn, struct entry *entry, bool done) {
    if (done) return true;
    if (entry != NULL) table_release(&server->table, entry);
    conn_refuse(server, conn, "asked for more memory than the store may use (%llu bytes)",
                (unsigned long long)server->limits.memory);
    return false;
}

/* --- hello, ping and the token --------------------------------------------------------------------- */

static void do_hello(struct server *server, struct conn *conn, const uint8_t *fields) {
    uint32_t magic;
    memcpy(&magic, fields, sizeof magic);
    if (magic != hello_magic) {
        conn_refuse(server, conn, "said hello with the wrong magic number 0x%08x", magic);
        return;
    }
    if (server->token == NULL) open_stage(server, conn);
    else conn->stage = STAGE_CHALLENGE;
}

static void do_ping(struct server *server, struct conn *conn, const uint8_t *fields) {
    conn_send(server, conn, fields, 4);
}

/* Signs who the side is, and both nonces, so that no answer can be replayed or reflected. */
static void sign(const struct server *server, const char *role, const struct challenge *challenge,
                 uint8_t digest[SHA256_SIZE]) {
    uint8_t message[64 + sizeof *challenge];
    size_t size = (size_t)snprintf((char *)message, 64, "symcomm store %s", role);
    memcpy(message + size, challenge, sizeof *challenge);
    hmac_sha256(server->token, server->token_size, message, size + sizeof *challenge, digest);
}

static void do_challenge(struct server *server, struct conn *conn, const uint8_t *fields) {
    uint8_t answer[1 + SHA256_SIZE + SHA256_SIZE] = {CHALLENGE_NO_TOKEN};
    if (conn->stage == STAGE_CHALLENGE) {
        conn->challenge = malloc(sizeof *conn->challenge);
        if (conn->challenge == NULL ||
            getrandom(conn->challenge->server_nonce, SHA256_SIZE, 0) != (ssize_t)SHA256_SIZE) {
            conn_refuse(server, conn, "asked for a challenge, but there is no memory or randomness");
            return;
        }
        memcpy(conn->challenge->client_nonce, fields, SHA256_SIZE);
        answer[0] = CHALLENGE_ACCEPTED;
        memcpy(answer + 1, conn->challenge->server_nonce, SHA256_SIZE);
        sign(server, "server", conn->challenge, answer + 1 + SHA256_SIZE);
        conn->stage = STAGE_PROOF;
    }
    conn_send(server, conn, answer, sizeof answer);
}

static void do_proof(struct server *server, struct conn *conn, const uint8_t *fields) {
    uint8_t expected[SHA256_SIZE];
    sign(server, "client", conn->challenge, expected);
    if (sha256_same(expected, fields)) {
        open_stage(server, conn);
        return;
    }
    conn_send(server, conn, refusal, sizeof refusal);
    conn_flush(server, conn);
    conn_refuse(server, conn, "holds another job token");
}

/* --- waiting --------------------------------------------------------------------------------------- */

static bool is_ready(const struct entry *entry) { return entry != NULL && (entry->present || entry->queued > 0); }

/* One key of this client's wait came; the last one ends the wait. */
static void key_came(struct server *server, struct conn *conn) {
    if (--conn->awaited > 0) return;
    send_byte(server, conn, WAIT_DONE);
    conn_flush(server, conn);
}

/* A value was stored: all clients that wait for the key go on. */
static void wake_all(struct server *server, struct entry *entry) {
    for (struct waiter *waiter; (waiter = entry->oldest) != NULL;) {
        struct conn *conn = waiter->conn;
        waiter_unlink(waiter);
        waiter_free(&server->table, waiter, &conn->waits);
        key_came(server, conn);
    }
}

/* A queue has items: wakes one waiter for each item that is not promised yet. */
static void wake_for_items(struct server *server, struct entry *entry) {
    while (entry->queued > entry->grants && entry->oldest != NULL) {
        struct waiter *waiter = entry->oldest;
        waiter_unlink(waiter);
        waiter->granted = true;
        entry->grants++;
        key_came(server, waiter->conn);
    }
}

static void leave_barrier(struct server *server, struct entry *entry) {
    int64_t count;
    if (entry->present && entry_number(entry, &count) == IS_NUMBER && count > INT64_MIN)
        entry_set_number(&server->table, entry, count - 1);
}

/* Ends this client's waits, or only the promises that it was woken for. An unused promise goes to the next in line: no
 * item lies in a queue while a client waits for it. */
static void end_waits(struct server *server, struct conn *conn, bool only_granted) {
    for (struct waiter *waiter = conn->waits, *older; waiter != NULL; waiter = older) {
        older = waiter->older;
        if (only_granted && !waiter->granted) continue;
        struct entry *entry = waiter->entry;
        if (waiter->granted) entry->grants--;
        else waiter_unlink(waiter);
        if (waiter->in_barrier) leave_barrier(server, entry);
        waiter_free(&server->table, waiter, &conn->waits);
        wake_for_items(server, entry);
        table_release(&server->table, entry);
    }
    if (!only_granted) conn->awaited = 0;
}

/* Called when a client that was woken for an item does something else: it does not want the item. */
static void settle_grants(struct server *server, struct conn *conn) { end_waits(server, conn, true); }

void protocol_forget(struct server *server, struct conn *conn) { end_waits(server, conn, false); }

static bool wait_for(struct server *server, struct conn *conn, struct entry *entry) {
    bool waits = entry != NULL && waiter_add(&server->table, entry, conn, &conn->waits) != NULL;
    conn->awaited += waits;
    return had_room(server, conn, entry, waits);
}

static bool refuse_second_wait(struct server *server, struct conn *conn) {
    if (conn->awaited > 0) conn_refuse(server, conn, "started a wait before its last one had ended");
    return conn->awaited > 0;
}

static void do_wait(struct server *server, struct conn *conn, const uint8_t *fields) {
    if (refuse_second_wait(server, conn)) return;
    for (uint64_t left = take_u64(&fields); left > 0; left--) {
        struct slice key = take_bytes(&fields);
        if (is_ready(table_find(&server->table, key))) continue;
        if (!wait_for(server, conn, table_obtain(&server->table, key))) return;
    }
    if (conn->awaited == 0) send_byte(server, conn, WAIT_DONE);
}

static void do_cancel(struct server *server, struct conn *conn, const uint8_t *fields) {
    (void)fields;
    end_waits(server, conn, false);
    send_byte(server, conn, WAIT_CANCELED);
}

/* Adds to an entry's number. Refuses the client if the value is no number, or the sum would not fit. */
static bool add_to(struct server *server, struct conn *conn, struct entry *entry, int64_t amount, const char *call,
                   int64_t *sum) {
    *sum = 0;
    enum reading reading = entry != NULL && entry->present ? entry_number(entry, sum) : IS_NUMBER;
    if (reading == NOT_A_NUMBER) {
        conn_refuse(server, conn, "called %s on a key whose value is not a number", call);
        return false;
    }
    if (reading == TOO_LARGE || __builtin_add_overflow(*sum, amount, sum)) {
        conn_refuse(server, conn, "called %s where the value, or the sum, does not fit in 64 bits", call);
        return false;
    }
    return had_room(server, conn, entry, entry && entry_set_number(&server->table, entry, *sum));
}

/* The count stays under the key, as PyTorch's does; a second use of the key counts from where the first ended. */
static void do_barrier(struct server *server, struct conn *conn, const uint8_t *fields) {
    if (refuse_second_wait(server, conn)) return;
    struct slice key = take_bytes(&fields);
    int64_t world = (int64_t)take_u64(&fields), count = 0;
    struct entry *entry = table_obtain(&server->table, key);
    if (!add_to(server, conn, entry, 1, "barrier", &count)) return;
    int64_t came;
    if (entry->barrier_passed >= count) entry->barrier_passed = 0; /* a client reset the key */
    if (__builtin_sub_overflow(count, entry->barrier_passed, &came) || came >= world) {
        entry->barrier_passed = count;
        wake_all(server, entry);
        send_byte(server, conn, WAIT_DONE);
    } else if (wait_for(server, conn, entry)) {
        conn->waits->in_barrier = true;
    }
}

/* --- values ---------------------------------------------------------------------------------------- */

static bool store_value(struct server *server, struct conn *conn, struct slice key, struct slice value) {
    struct entry *entry = table_obtain(&server->table, key);
    if (!had_room(server, conn, entry, entry && entry_set(&server->table, entry, value))) return false;
    wake_all(server, entry);
    return true;
}

static void do_set(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct slice key = take_bytes(&fields);
    store_value(server, conn, key, take_bytes(&fields));
}

static void do_multi_set(struct server *server, struct conn *conn, const uint8_t *fields) {
    for (uint64_t left = take_u64(&fields); left > 0; left--) {
        struct slice key = take_bytes(&fields);
        if (!store_value(server, conn, key, take_bytes(&fields))) return;
    }
}

static void do_get(struct server *server, struct conn *conn, const uint8_t *fields) {
    conn_send_value(server, conn, value_of(table_find(&server->table, take_bytes(&fields))));
}

/* The answer may be far larger than the question, so we measure it before sending any of it. */
static void do_multi_get(struct server *server, struct conn *conn, const uint8_t *fields) {
    uint64_t count = take_u64(&fields), total = 0;
    const uint8_t *keys = fields;
    for (uint64_t left = count; left > 0; left--)
        total += 8 + value_of(table_find(&server->table, take_bytes(&keys))).size;
    if (total > server->limits.frame) {
        conn_refuse(server, conn, "asked for %llu bytes in one multi_get; the limit is %llu", (unsigned long long)total,
                    (unsigned long long)server->limits.frame);
        return;
    }
    for (uint64_t left = count; left > 0 && !conn->doomed; left--)
        conn_send_value(server, conn, value_of(table_find(&server->table, take_bytes(&fields))));
}

static void do_compare_set(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct slice key = take_bytes(&fields), expected = take_bytes(&fields), desired = take_bytes(&fields);
    struct entry *entry = table_find(&server->table, key);
    struct slice current = value_of(entry);
    bool absent = entry == NULL || !entry->present;
    bool same = current.size == expected.size &&
                (expected.size == 0 || memcmp(current.bytes, expected.bytes, expected.size) == 0);
    if (!same) {
        conn_send_value(server, conn, absent ? expected : current);
    } else if (store_value(server, conn, key, desired)) {
        conn_send_value(server, conn, desired);
    }
}

static void do_add(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct slice key = take_bytes(&fields);
    int64_t amount = (int64_t)take_u64(&fields), sum;
    struct entry *entry = table_obtain(&server->table, key);
    if (!add_to(server, conn, entry, amount, "add", &sum)) return;
    send_i64(server, conn, sum);
    wake_all(server, entry);
}

static void do_append(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct slice key = take_bytes(&fields), more = take_bytes(&fields);
    struct entry *entry = table_obtain(&server->table, key);
    if (entry != NULL && entry->value_size + more.size > server->limits.value) {
        conn_refuse(server, conn, "appended to a value until it passed the limit of %llu bytes",
                    (unsigned long long)server->limits.value);
        return;
    }
    if (!had_room(server, conn, entry, entry && entry_append(&server->table, entry, more))) return;
    wake_all(server, entry);
}

static void do_check(struct server *server, struct conn *conn, const uint8_t *fields) {
    for (uint64_t left = take_u64(&fields); left > 0; left--) {
        if (is_ready(table_find(&server->table, take_bytes(&fields)))) continue;
        send_byte(server, conn, CHECK_NOT_READY);
        return;
    }
    send_byte(server, conn, CHECK_READY);
}

static void do_num_keys(struct server *server, struct conn *conn, const uint8_t *fields) {
    (void)fields;
    send_i64(server, conn, (int64_t)server->table.present);
}

static void do_delete(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct entry *entry = table_find(&server->table, take_bytes(&fields));
    bool existed = entry != NULL && entry->present;
    if (existed) {
        entry->barrier_passed = 0;
        entry_unset(&server->table, entry);
        table_release(&server->table, entry);
    }
    send_i64(server, conn, existed);
}

static void do_list_keys(struct server *server, struct conn *conn, const uint8_t *fields) {
    (void)fields;
    send_i64(server, conn, (int64_t)server->table.present);
    for (struct entry *entry = NULL; (entry = table_next(&server->table, entry)) != NULL && !conn->doomed;)
        if (entry->present) conn_send_value(server, conn, (struct slice){entry->key, entry->key_size});
}

/* --- queues ---------------------------------------------------------------------------------------- */

static void do_push(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct slice key = take_bytes(&fields), value = take_bytes(&fields);
    struct entry *entry = table_obtain(&server->table, key);
    if (had_room(server, conn, entry, entry && entry_push(&server->table, entry, value))) wake_for_items(server, entry);
}

static void do_pop(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct entry *entry = table_find(&server->table, take_bytes(&fields));
    send_i64(server, conn, entry == NULL ? 0 : (int64_t)entry->queued);
    struct item *item = entry == NULL ? NULL : entry_pop(entry);
    if (item != NULL) {
        conn_send_value(server, conn, (struct slice){item->bytes, item->size});
        item_free(&server->table, item);
        table_release(&server->table, entry);
    }
    settle_grants(server, conn); /* after the pop: the promise was for this item */
}

static void do_queue_len(struct server *server, struct conn *conn, const uint8_t *fields) {
    struct entry *entry = table_find(&server->table, take_bytes(&fields));
    send_i64(server, conn, entry == NULL ? 0 : (int64_t)entry->queued);
}
