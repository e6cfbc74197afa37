#include "memory/heap_forks.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#define FORKS 512 /* children that may live at once; memory in use at a fork beyond that is never reused */

static struct pollfd children[FORKS]; /* our ends */
static uint32_t numbers[FORKS];
static int living;
static uint32_t count, unknown; /* unknown: the last fork whose child we cannot watch */
static int ends[2];

void heap_forks_before(void) {
    if (pipe2(ends, O_CLOEXEC) < 0) ends[0] = ends[1] = -1;
}

void heap_forks_in_parent(void) {
    count++;
    if (ends[0] >= 0) close(ends[1]);
    if (ends[0] < 0 || living == FORKS) {
        if (ends[0] >= 0) close(ends[0]);
        unknown = count;
        return;
    }
    children[living] = (struct pollfd){.fd = ends[0]};
    numbers[living++] = count;
}

/* The child keeps its end open for as long as it lives. */
void heap_forks_in_child(void) {
    for (int i = 0; i < living; i++) close(children[i].fd);
    if (ends[0] >= 0) close(ends[0]);
    living = 0;
    count = unknown = 0;
}

uint32_t heap_forks_count(void) { return count; }

uint32_t heap_forks_newest(void) {
    uint32_t last = living ? numbers[living - 1] : 0;
    return last > unknown ? last : unknown;
}

void heap_forks_look(void) {
    if (living == 0 || poll(children, (nfds_t)living, 0) <= 0) return;
    int left = 0;
    for (int i = 0; i < living; i++) {
        if (children[i].revents) {
            close(children[i].fd);
        } else {
            children[left] = children[i];
            numbers[left++] = numbers[i];
        }
    }
    living = left;
}
