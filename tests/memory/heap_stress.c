/* The shared heap alone, without Python: what it hands out never overlaps, keeps its bytes, merges again when it is
 * freed, and a forked child keeps what it was forked with. Usage: heap_stress SEED ROUNDS. Ends with 0, or says what is
 * wrong. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/heap.h"

#define BYTES ((int64_t)64 << 20)
#define BLOCKS 64
#define THREADS 4

static void check(int is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "heap_stress: %s\n", what);
    _exit(1);
}

struct block {
    unsigned char *at;
    size_t bytes;
    unsigned char mark;
};

static int holds(const struct block *b, unsigned char mark) {
    for (size_t i = 0; i < b->bytes; i += 509)
        if (b->at[i] != mark) return 0;
    return b->at[b->bytes - 1] == mark;
}

/* Takes and frees at random; every block is full of its mark until it is freed. */
static void live(struct block *blocks, unsigned *seed, int rounds) {
    for (int i = 0; i < rounds; i++) {
        struct block *b = &blocks[rand_r(seed) % BLOCKS];
        if (b->at) {
            check(holds(b, b->mark), "a block lost its bytes");
            heap_free(b->at);
            b->at = NULL;
        } else {
            b->bytes = 1 + (size_t)rand_r(seed) % (rand_r(seed) % 4 ? 40000 : 1000000);
            b->mark = (unsigned char)rand_r(seed);
            if ((b->at = heap_allocate(b->bytes)) == NULL) continue; /* full */
            check(heap_owns(b->at) && heap_owns(b->at + b->bytes - 1), "a block lies outside");
            memset(b->at, b->mark, b->bytes);
        }
        if (rand_r(seed) % 64 == 0) heap_tick();
    }
}

static void free_all(struct block *blocks) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at) {
            check(holds(&blocks[i], blocks[i].mark), "a block lost its bytes");
            heap_free(blocks[i].at);
            blocks[i].at = NULL;
        }
}

struct job {
    unsigned seed;
    int rounds;
};

static void *run(void *argument) {
    struct job *job = argument;
    struct block blocks[BLOCKS] = {0};
    live(blocks, &job->seed, job->rounds);
    free_all(blocks);
    return NULL;
}

/* The parent frees and overwrites everything; the child then reads what there was. */
static void forks(unsigned *seed) {
    struct block blocks[BLOCKS] = {0};
    int go[2];
    live(blocks, seed, BLOCKS);
    check(pipe(go) == 0, "no pipe");
    pid_t child = fork();
    check(child >= 0, "no fork");
    if (child == 0) {
        char c;
        check(read(go[0], &c, 1) == 1, "the parent is gone");
        for (int i = 0; i < BLOCKS; i++)
            if (blocks[i].at) {
                check(holds(&blocks[i], blocks[i].mark), "a child lost its bytes");
                memset(blocks[i].at, 0x5a, blocks[i].bytes);
                check(holds(&blocks[i], 0x5a), "a child cannot write");
                heap_free(blocks[i].at);
            }
        check(heap_allocate(1) == NULL, "a child has a heap");
        _exit(0);
    }
    for (int i = 0; i < BLOCKS; i += 2)
        if (blocks[i].at) {
            heap_free(blocks[i].at);
            blocks[i].at = NULL;
        }
    struct block more[BLOCKS] = {0};
    live(more, seed, 2 * BLOCKS);
    check(write(go[1], "g", 1) == 1, "no child");
    int status;
    check(waitpid(child, &status, 0) == child && status == 0, "the child found something wrong");
    close(go[0]);
    close(go[1]);
    free_all(more);
    free_all(blocks); /* what the child wrote is not here */
}

int main(int argc, char **argv) {
    check(argc == 3, "usage: heap_stress SEED ROUNDS");
    unsigned seed = (unsigned)atoi(argv[1]);
    int rounds = atoi(argv[2]), fd = memfd_create("heap_stress", 0);
    check(fd >= 0 && ftruncate(fd, BYTES) == 0, "no memory file");
    char *base = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    check(base != MAP_FAILED && heap_open(base, BYTES, fd, 0) == 0, "no heap");
    check(heap_open(base, BYTES, fd, 0) != 0, "two heaps");

    pthread_t threads[THREADS];
    struct job jobs[THREADS];
    for (int i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){seed + 1000u * (unsigned)i, rounds};
        check(pthread_create(&threads[i], NULL, run, &jobs[i]) == 0, "no thread");
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 10; i++) forks(&seed);
    for (int i = 0; i < 100 && (heap_stats().held || heap_stats().idle); i++) {
        usleep(110000);
        heap_tick();
    }
    struct heap_stats s = heap_stats();
    check(s.live == 0 && s.idle == 0 && s.held == 0, "something is in use in the end");
    check(heap_allocate((size_t)BYTES - 4096) == base + 4096, "what was freed did not merge");
    return 0;
}
