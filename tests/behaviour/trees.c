/* Several processes under one limit. The runner samples the sum of their memory from outside. */
#include "behaviour.h"

#define WORKERS 8

/* What the processes of a case share: who has come how far. */
static atomic_int *steps;

static size_t resident(void) {
    char text[128] = {0};
    int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0);
    close(file);
    return strtoul(strchr(text, ' '), NULL, 10) * PAGE;
}

/* Waits until the other processes have come so far. */
static void until(atomic_int *step, int value) {
    while (atomic_load(step) < value) usleep(1000);
}

/* Verifies and rewrites all of it until this process has `bytes` resident. Without a limit that is so at once. */
static void churn_until_resident(struct ballast *b, size_t bytes) {
    uint64_t random = b->seed;
    do
        ballast_churn(b, 1024, &random);
    while (resident() < bytes);
}

/* As ballast_make, but no faster than 0.3 GB/s: on a busy machine no thread of zfolio runs in time for the first burst
 * of eight programs (`resident start` measures that). */
static void make_slowly(struct ballast *b, size_t bytes, uint64_t seed) { ballast_make_slowly(b, bytes, seed, 3000); }

/* A program of its own: makes a third of the limit, and verifies it. */
static int worker(int number) {
    struct ballast b;
    uint64_t random = number;
    make_slowly(&b, limit_bytes() / 3, number);
    for (int round = 0; round < 2; round++) {
        ballast_churn(&b, b.pages, &random);
        ballast_verify(&b, "a worker");
    }
    return 0;
}

static void eight(void) {
    pid_t children[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        char number[16];
        snprintf(number, sizeof number, "%d", i + 1);
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            execl("/proc/self/exe", "trees", "worker", number, NULL);
            _exit(9);
        }
    }
    for (int i = 0; i < WORKERS; i++) child_is_well(children[i], "a worker");
}

/* A process fills four fifths of the limit, does `next`, and ends well. */
static pid_t filled(void (*next)(struct ballast *)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct ballast b;
        make_slowly(&b, limit_bytes() / 5 * 4, getpid());
        atomic_fetch_add(steps, 1);
        next(&b);
        ballast_verify(&b, "the end");
        _exit(0);
    }
    return child;
}

static void forever(struct ballast *b) {
    uint64_t random = 1;
    for (;;) ballast_churn(b, 256, &random);
}

static void idly(struct ballast *b) {
    (void)b;
    until(steps, 100);
}

static void until_three_fifths(struct ballast *b) {
    churn_until_resident(b, limit_bytes() / 5 * 3);
    atomic_store(steps, 100);
}

/* What a killed process had is the other one's. */
static void killed(void) {
    pid_t first = filled(forever);
    until(steps, 1);
    pid_t second = filled(idly);
    until(steps, 2);
    CHECK(kill(first, SIGKILL) == 0);
    CHECK(waitpid(first, NULL, 0) == first);
    pid_t third = filled(until_three_fifths);
    child_is_well(third, "the third");
    child_is_well(second, "the second");
}

/* An idle process gives way to a busy one. */
static void idle(void) {
    pid_t first = filled(idly);
    until(steps, 1);
    pid_t second = filled(until_three_fifths);
    child_is_well(second, "the busy one");
    child_is_well(first, "the idle one");
}

static void together(struct ballast *b) {
    churn_until_resident(b, limit_bytes() / 4 * 3);
    atomic_fetch_add(steps, 10);
    // Both have three quarters of the limit at once.
    while (atomic_load(steps) < 22) ballast_verify(b, "a process with a limit of its own");
}

/* With --per-process: each has the limit for itself. */
static void own(void) {
    pid_t first = filled(together), second = filled(together);
    child_is_well(first, "the first");
    child_is_well(second, "the second");
}

/* Children of `fork` verify what they have of their parent, and make as much of their own. */
static void forked(void) {
    struct ballast b;
    ballast_make(&b, limit_bytes() / 2, 1);
    pid_t children[3];
    uint64_t random = 5;
    for (int i = 0; i < 3; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            struct ballast more;
            make_slowly(&more, limit_bytes() / 2, i);
            ballast_verify(&b, "the parent, in a child");
            random = i;
            ballast_churn(&b, b.pages / 2, &random);
            ballast_verify(&more, "a child");
            ballast_verify(&b, "the parent, in a child, changed");
            _exit(0);
        }
        ballast_churn(&b, b.pages / 2, &random);
    }
    for (int i = 0; i < 3; i++) child_is_well(children[i], "a child");
    ballast_verify(&b, "the parent");
}

/* Memory that many processes share counts once: what they share and what one of them has for itself is less than the
 * limit, and is resident together. Counted for each of them, it would be three times the limit. */
static void shared(void) {
    enum { MANY = 8 };
    size_t both = limit_bytes() / 3;
    pid_t children[MANY];
    char *pages = mmap(NULL, both, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    memset(pages, 7, both);
    for (int i = 0; i < MANY; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            for (size_t at = 0; at < both; at += PAGE) CHECK(((volatile char *)pages)[at] == 7);
            atomic_fetch_add(steps, 1);
            until(steps, 100);
            _exit(0);
        }
    }
    until(steps, MANY);
    struct ballast b;
    make_slowly(&b, both, 1);
    churn_until_resident(&b, 2 * both);
    ballast_verify(&b, "beside shared memory");
    atomic_store(steps, 100);
    for (int i = 0; i < MANY; i++) child_is_well(children[i], "a child");
}

/* More processes than the ledger has slots, all idle: the one that works finds none, and has the limit for itself. */
static void full(void) {
    enum { MANY = 1040 };
    static pid_t children[MANY];
    int made = 0;
    for (; made < MANY; made++) {
        children[made] = fork();
        if (children[made] < 0) break;
        if (children[made] == 0) {
            atomic_fetch_add(steps, 1);
            pause();
            _exit(0);
        }
    }
    // Each child has looked for a slot before its `fork` returns.
    until(steps, made);
    pid_t busy = filled(until_three_fifths);
    child_is_well(busy, "the busy one");
    for (int i = 0; i < made; i++) {
        CHECK(kill(children[i], SIGKILL) == 0);
        CHECK(waitpid(children[i], NULL, 0) == children[i]);
    }
    if (made < MANY) skip("so many processes are not allowed here");
}

int main(int count, char **arguments) {
    if (count == 3 && strcmp(arguments[1], "worker") == 0) return worker(atoi(arguments[2]));
    steps = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(steps != MAP_FAILED);
    const struct behaviour cases[] = {
        {"eight", eight}, {"killed", killed}, {"idle", idle}, {"forked", forked}, {"own", own}, {"full", full},
        {"shared", shared},
    };
    return CHOOSE(cases);
}
