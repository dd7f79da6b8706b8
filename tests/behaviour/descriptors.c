/* Programs that close or replace file descriptors which they did not open. */
#include "behaviour.h"
#include <sys/resource.h>

static struct ballast b;

static void grow_and_close(void (*close_all)(void)) {
    int kept = fcntl(1, F_DUPFD_CLOEXEC, 1000);
    for (int late = 0; late < 2; late++) {
        if (!late) close_all();
        ballast_make(&b, 3 * limit_bytes(), late);
        close_all();
        uint64_t random = late;
        ballast_churn(&b, b.pages, &random);
        ballast_verify(&b, "without descriptors");
        CHECK(munmap(b.start, b.pages * PAGE) == 0);
    }
    pid_t pid = fork();
    if (pid == 0) {
        ballast_make(&b, 2 * limit_bytes(), 9);
        ballast_verify(&b, "child without descriptors");
        _exit(0);
    }
    child_is_well(pid, "child without descriptors");
    /* A new descriptor gets the lowest free number, as usual. */
    int lowest = open("/dev/null", O_RDONLY);
    CHECK(lowest == 0, "the lowest free descriptor is %d", lowest);
    (void)kept;
}

static void by_range(void) { CHECK(syscall(SYS_close_range, 0u, ~0u, 0u) == 0); }
static void by_loop(void) { for (int i = 0; i < 1100; i++) close(i); }
static void by_closefrom(void) { closefrom(0); }

static void range(void) { grow_and_close(by_range); }
static void loop(void) { grow_and_close(by_loop); }
static void from(void) { grow_and_close(by_closefrom); }

static void dup_over(void) {
    ballast_make(&b, 3 * limit_bytes(), 1);
    int null = open("/dev/null", O_RDWR);
    for (int i = 3; i < 1000; i++)
        if (i != null) CHECK(dup2(null, i) == i);
    uint64_t random = 1;
    ballast_churn(&b, b.pages, &random);
    ballast_verify(&b, "dup2 over everything");
}

/* The program closes its standard error, and a file of its data has the number: no line of zfolio's gets there. */
static void quiet(void) {
    char name[] = "/var/tmp/behaviour-quiet-XXXXXX", text[64] = "";
    int kept = fcntl(2, F_DUPFD_CLOEXEC, 100), data = mkstemp(name);
    CHECK(kept >= 0 && data >= 0 && unlink(name) == 0);
    CHECK(dup2(data, 2) == 2 && write(2, "data", 4) == 4);
    ballast_make(&b, 3 * limit_bytes(), 1);
    /* zfolio refuses this, with a line. */
    mlockall(MCL_CURRENT | MCL_FUTURE);
    ballast_verify(&b, "without standard error");
    CHECK(lseek(data, 0, SEEK_SET) == 0 && read(data, text, sizeof text - 1) == 4, "the file has: %s", text);
    CHECK(dup2(kept, 2) == 2);
}

/* No descriptor is left: the limit is not held, and everything else works. */
static void none(void) {
    struct rlimit limit = {0, 0};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    ballast_make(&b, 3 * limit_bytes(), 1);
    uint64_t random = 1;
    ballast_churn(&b, b.pages, &random);
    struct timespec moment = {0, 200000000};
    nanosleep(&moment, NULL);
    ballast_verify(&b, "no descriptors");
}

static void few(void) {
    struct rlimit limit = {4, 4};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    ballast_make(&b, 3 * limit_bytes(), 1);
    uint64_t random = 1;
    ballast_churn(&b, b.pages, &random);
    ballast_verify(&b, "few descriptors");
    /* On a busy machine reclaim may start late: the excess is what was filled before it began. */
    size_t pages = 0;
    for (double end = now() + 10; now() < end; ) {
        int file = open("/proc/self/statm", O_RDONLY);
        char text[100] = "";
        CHECK(file >= 0 && read(file, text, 99) > 0 && close(file) == 0);
        sscanf(text, "%*u %zu", &pages);
        if (!getenv("ZFOLIO_LIMIT") || pages * PAGE < limit_bytes() + 24 * MIB) return;
    }
    CHECK(0, "%zu pages resident", pages);
}

/* The reclaim thread watches, and keeps descriptors for its messages: when it opens what it works with, none is left. */
static void few_later(void) {
    map_anonymous(2 * limit_bytes());
    struct timespec moment = {0, 50000000};
    nanosleep(&moment, NULL);
    few();
}

/* A program with one thread gets the lowest free number for each file that it opens, also while its size is watched,
 * below the limit. If the watching thread opened files in the program's table, it would take a number that the program
 * has just freed; and if the program then gave that number to a pipe, that thread would read from the pipe. */
static void lowest(void) {
    ballast_make(&b, limit_bytes() / 4, 3);
    /* Enough is mapped for zfolio to watch this process. While it grows it is watched more often. */
    char *more = map_anonymous(2 * limit_bytes());
    close(0);
    for (int i = 0; i < 200000; i++) {
        int file = open("/dev/null", O_RDONLY);
        CHECK(file == 0, "the lowest free descriptor is %d", file);
        CHECK(close(file) == 0);
        if (i % 100 == 0) more[i / 100 * PAGE] = 1;
    }
    ballast_verify(&b, "lowest descriptor");
}

/* The reader of a pipe sees its end when the program closes the other side: no other process keeps it open. */
static void ends(void) {
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0);
    ballast_make(&b, 3 * limit_bytes(), 2);
    close(pipe_ends[1]);
    char byte;
    CHECK(read(pipe_ends[0], &byte, 1) == 0);
    CHECK(pipe(pipe_ends) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        ballast_verify(&b, "child");
        close(pipe_ends[0]);
        close(pipe_ends[1]);
        sleep(1);
        _exit(0);
    }
    close(pipe_ends[1]);
    CHECK(read(pipe_ends[0], &byte, 1) == 0);
    child_is_well(pid, "child");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"range", range}, {"loop", loop}, {"from", from}, {"dup_over", dup_over}, {"few", few},
        {"few_later", few_later}, {"none", none}, {"ends", ends}, {"quiet", quiet}, {"lowest", lowest},
    };
    return CHOOSE(cases);
}
