/* What the behaviour programs share: checks, patterns that compress, and ballast for pressure.
 *
 * A program uses nothing of zfolio except the limit in its environment, which determines how much data it
 * makes. So each program also runs alone, and must pass alone (`tests/behaviour/run --native`).
 */
#ifndef BEHAVIOUR_H
#define BEHAVIOUR_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)

/* Exit status of a case that cannot run here; the runner prints the last line. */
#define SKIPPED 77

#define CHECK(condition, ...)                                                                     \
    do {                                                                                          \
        if (!(condition)) failed(__FILE__, __LINE__, #condition, " " __VA_ARGS__);                 \
    } while (0)

/* Writes to the runner's file, since a program may have closed its descriptors; otherwise to standard output. */
static void report(const char *text, int length) {
    const char *path = getenv("BEHAVIOUR_REPORT");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
    if (write(file < 0 ? 1 : file, text, length) < 0) {}
    if (file >= 0) close(file);
}

__attribute__((noreturn, format(printf, 4, 5))) static void failed(const char *file, int line, const char *what,
                                                                  const char *format, ...) {
    char text[512];
    int error = errno;
    int length = snprintf(text, sizeof text, "%s:%d: [%d] %s (%s) ", file, line, getpid(), what, strerror(error));
    va_list rest;
    va_start(rest, format);
    length += vsnprintf(text + length, sizeof text - length - 1, format, rest);
    va_end(rest);
    text[length] = '\n';
    report(text, length + 1);
    _exit(1);
}

__attribute__((unused, noreturn)) static void skip(const char *why) {
    char text[256];
    report(text, snprintf(text, sizeof text, "%s\n", why));
    _exit(SKIPPED);
}

static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static inline uint64_t next_random(uint64_t *state) { return mix((*state)++); }

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* When the case began. */
static double began;

/* Whether a case that does the same `rounds` times, since each time other threads are elsewhere, has round `round`. If
 * the runner bounds its seconds (BEHAVIOUR_SECONDS), an eighth of the rounds is done, and the others while there is
 * time. */
__attribute__((unused)) static int goes_on(int round, int rounds) {
    const char *seconds = getenv("BEHAVIOUR_SECONDS");
    return round < rounds && (!seconds || round < rounds / 8 + 1 || now() < began + atof(seconds));
}

static inline size_t limit_bytes(void) {
    const char *text = getenv("ZFOLIO_LIMIT");
    return text ? strtoull(text, NULL, 10) : 32 * MIB;
}

/* The size in a row of a file in /proc, in KiB. */
__attribute__((unused)) static size_t kib_in(const char *path, const char *row) {
    char text[4096] = "";
    int file = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0);
    close(file);
    const char *line = strstr(text, row);
    CHECK(line != NULL);
    return strtoul(line + strlen(row), NULL, 10);
}

/* A size of this process: "RssAnon:" is the anonymous memory that is resident, "VmRSS:" all that is resident. */
__attribute__((unused)) static size_t status_mib(const char *row) {
    /* /proc/self has no figures for a leader that has ended. */
    return kib_in("/proc/thread-self/status", row) >> 10;
}

/* The runner accepts so much more than the limit, as its SLACK. */
#define SLACK_MIB 24

/* Waits until less is resident than the limit and SLACK_MIB, for so many seconds at most, and then until the runner has
 * looked. On a busy machine zfolio's threads may come late. */
__attribute__((unused)) static void come_down(double seconds) {
    if (getenv("ZFOLIO_LIMIT") == NULL) return;
    size_t most = limit_bytes() / MIB + SLACK_MIB;
    for (double until = now() + seconds; status_mib("VmRSS:") >= most && now() < until;) usleep(10000);
    usleep(200000);
}

/* Whether patterns do not compress: then zfolio can hold the limit on disk only. */
static inline int is_noise(void) {
    static int known;
    if (known == 0) known = getenv("BEHAVIOUR_NOISE") ? 2 : 1;
    return known == 2;
}

/* Word `i` of a page's pattern: it depends on the page's seed (`base`), and compresses unless noise is wanted. */
static inline uint64_t pattern(uint64_t base, int i, int noise) { return noise ? mix(base + i) : base + (i & 7); }

/* Fills a page with a pattern that depends on the seed in every word. */
static inline void fill_page(void *page, uint64_t seed) {
    uint64_t *word = page, base = mix(seed) | 1;
    int noise = is_noise();
    for (int i = 0; i < 512; i++) word[i] = pattern(base, i, noise);
}

static inline int page_is(const void *page, uint64_t seed) {
    const uint64_t *word = page;
    uint64_t base = mix(seed) | 1, difference = 0;
    int noise = is_noise();
    for (int i = 0; i < 512; i++) difference |= word[i] ^ pattern(base, i, noise);
    return difference == 0;
}

static inline int page_is_zero(const void *page) {
    const uint64_t *word = page;
    uint64_t any = 0;
    for (int i = 0; i < 512; i++) any |= word[i];
    return any == 0;
}

static inline void fill(void *start, size_t bytes, uint64_t seed) {
    for (size_t at = 0; at < bytes; at += PAGE) fill_page((char *)start + at, seed + at / PAGE);
}

static inline void verify(const void *start, size_t bytes, uint64_t seed, const char *what) {
    for (size_t at = 0; at < bytes; at += PAGE)
        CHECK(page_is((const char *)start + at, seed + at / PAGE), "%s: page %zu of %zu at %p holds %#lx", what,
              at / PAGE, bytes / PAGE, (void *)((char *)start + at), *(uint64_t *)((char *)start + at));
}

static inline void *map_anonymous(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

/* Memory beyond the limit; each page has a generation of its own. */
struct ballast {
    char *start;
    size_t pages;
    uint64_t seed;
    uint32_t *generation;
    atomic_int stop;
    pthread_t thread;
};

static inline uint64_t ballast_seed(struct ballast *b, size_t page) {
    return b->seed + ((uint64_t)b->generation[page] << 32) + page;
}

/* Fills it with a pause before each MiB. */
__attribute__((unused)) static void ballast_make_slowly(struct ballast *b, size_t bytes, uint64_t seed,
                                                        unsigned microseconds) {
    b->pages = bytes / PAGE;
    b->start = map_anonymous(bytes);
    b->seed = mix(seed);
    b->generation = calloc(b->pages, sizeof *b->generation);
    atomic_store(&b->stop, 0);
    for (size_t page = 0; page < b->pages; page++) {
        if (microseconds > 0 && page % (MIB / PAGE) == 0) usleep(microseconds);
        fill_page(b->start + page * PAGE, ballast_seed(b, page));
    }
}

__attribute__((unused)) static void ballast_make(struct ballast *b, size_t bytes, uint64_t seed) {
    ballast_make_slowly(b, bytes, seed, 0);
}

__attribute__((unused)) static void ballast_verify(struct ballast *b, const char *who) {
    for (size_t page = 0; page < b->pages; page++)
        CHECK(page_is(b->start + page * PAGE, ballast_seed(b, page)), "ballast of %s: page %zu of %zu at %p", who, page,
              b->pages, (void *)(b->start + page * PAGE));
}

/* Writes a page anew, with other contents than before. */
__attribute__((unused)) static void ballast_rewrite(struct ballast *b, size_t page) {
    b->generation[page]++;
    fill_page(b->start + page * PAGE, ballast_seed(b, page));
}

/* Verifies and rewrites `count` pages, in runs at random places. */
__attribute__((unused)) static void ballast_churn(struct ballast *b, size_t count, uint64_t *random) {
    while (count > 0) {
        size_t page = next_random(random) % b->pages;
        for (size_t run = 0; run < 16 && page < b->pages && count > 0; run++, page++, count--) {
            CHECK(page_is(b->start + page * PAGE, ballast_seed(b, page)), "ballast page %zu of %zu at %p", page,
                  b->pages, (void *)(b->start + page * PAGE));
            if (next_random(random) & 1) continue;
            ballast_rewrite(b, page);
        }
    }
}

static void *ballast_life(void *argument) {
    struct ballast *b = argument;
    uint64_t random = b->seed ^ 77;
    while (!atomic_load(&b->stop)) ballast_churn(b, 256, &random);
    return NULL;
}

/* Makes pressure from another thread until ballast_stop(). */
__attribute__((unused)) static void ballast_start(struct ballast *b) {
    CHECK(pthread_create(&b->thread, NULL, ballast_life, b) == 0);
}

__attribute__((unused)) static void ballast_stop(struct ballast *b) {
    atomic_store(&b->stop, 1);
    CHECK(pthread_join(b->thread, NULL) == 0);
    ballast_verify(b, "the end");
}

/* Waits for a child that must have exited with 0. */
__attribute__((unused)) static void child_is_well(pid_t pid, const char *what) {
    int status;
    pid_t ended;
    while ((ended = waitpid(pid, &status, 0)) < 0 && errno == EINTR) {}
    CHECK(ended == pid, "%s", what);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %#x", what, status);
}

/* Instructions of one rule of a seccomp filter. */
#define RULE 6

/* Writes a rule at `at`: a call with number `call` has the answer `answer` (SECCOMP_RET_...) if argument
 * `argument` has all of `bits` set; with `bits` 0, always. */
__attribute__((unused)) static void forbid(struct sock_filter *at, unsigned call, unsigned argument, unsigned bits,
                                           unsigned answer) {
    const struct sock_filter rule[RULE] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * argument),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, bits),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, bits, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, answer),
    };
    memcpy(at, rule, sizeof rule);
}

/* Installs a filter of `length` instructions; the last one is added here, and allows everything else.
 * `flags` are those of seccomp(2). */
__attribute__((unused)) static void confine(struct sock_filter *filter, unsigned short length, unsigned flags) {
    filter[length - 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {length, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program)) skip("seccomp filters are not available here");
}

/* Becomes the program that the arguments name, with those that follow. Returns only if that fails. */
__attribute__((unused)) static int execute(int count, char **arguments) {
    CHECK(count >= 2);
    execvp(arguments[1], arguments + 1);
    perror(arguments[1]);
    return 1;
}

struct behaviour {
    const char *name;
    void (*run)(void);
};

/* Runs the case that is named, and prints its result in one line. */
__attribute__((unused)) static int choose(int count, char **arguments, const struct behaviour *cases, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (count < 2 || strcmp(arguments[1], cases[i].name) != 0) continue;
        began = now();
        cases[i].run();
        char text[128];
        report(text, snprintf(text, sizeof text, "contents as they must be, %.1f s\n", now() - began));
        return 0;
    }
    fprintf(stderr, "usage: %s CASE\n", arguments[0]);
    return 2;
}
#define CHOOSE(cases) choose(count, arguments, cases, sizeof cases / sizeof *cases)
#endif
