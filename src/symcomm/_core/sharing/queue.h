/* A queue: messages from one writer, each for all readers that took part when it was sent. */
#pragma once

#include "sharing/region.h"

#define QUEUE_SLOTS 64
#define SLOT_BYTES 4096

/* Of message number n: slot n % QUEUE_SLOTS. The message is in it, or in a part. */
struct slot {
    _Atomic uint64_t unread; /* readers that have not taken it */
    uint32_t nbytes;
    int32_t part; /* -1: the message is in this slot */
    char data[SLOT_BYTES - 16];
};

/* These readers take no more messages. */
void queue_forget(struct region *r, uint64_t bits);
