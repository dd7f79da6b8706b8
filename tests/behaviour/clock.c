/* A preloaded library whose clock allocates, as libfaketime's does. Who reads it while malloc itself starts allocates
 * during that start. BEHAVIOUR_CLOCK: "used" if malloc's start is to have read the clock; "first" if the clock is to be
 * read before the first block. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { KEPT = 64 };
static struct { unsigned char *at; size_t bytes; } kept[KEPT];
static int calls, inside, kept_count;

/* The compiler knows nothing of these, and leaves out no call of them. */
static void *(*volatile make)(size_t) = malloc;
static void *(*volatile make_zeros)(size_t, size_t) = calloc;
static void *(*volatile make_again)(void *, size_t) = realloc;
static void (*volatile drop)(void *) = free;

static void check(int right, const char *what) {
    if (right) return;
    fprintf(stderr, "the clock's blocks: %s\n", what);
    _exit(3);
}

static void keep(unsigned char *at, size_t bytes) {
    check(at && malloc_usable_size(at) >= bytes, "no block");
    memset(at, kept_count, bytes);
    kept[kept_count].at = at;
    kept[kept_count++].bytes = bytes;
}

static int is_whole(int number) {
    for (size_t i = 0; i < kept[number].bytes; i++)
        if (kept[number].at[i] != number) return 0;
    return 1;
}

static void allocate(size_t bytes) {
    drop(NULL);
    check(malloc_usable_size(NULL) == 0, "null has a size");
    check(dlsym(RTLD_NEXT, "no_such_function") == NULL, "a function that is not there");
    dlerror();
    keep(make(bytes), bytes);
    unsigned char *zeros = make_zeros(3, bytes);
    for (size_t i = 0; i < 3 * bytes; i++) check(zeros[i] == 0, "calloc");
    memset(zeros, 7, 3 * bytes);
    unsigned char *larger = make_again(zeros, 5 * bytes), *smaller = make_again(larger, bytes);
    check(smaller != NULL, "realloc");
    for (size_t i = 0; i < bytes; i++) check(smaller[i] == 7, "realloc");
    keep(smaller, bytes);
    void *aligned = NULL;
    check(posix_memalign(&aligned, 256, bytes) == 0 && (uintptr_t)aligned % 256 == 0, "posix_memalign");
    drop(aligned);
    check(make(SIZE_MAX / 2) == NULL && errno == ENOMEM, "a block of half of all addresses");
}

static void *thread(void *argument) {
    drop(make_again(make(10), 2000));
    return argument;
}

/* Allocates at its first calls only, and while nobody else does: later it may be called with a lock held. */
int clock_gettime(clockid_t clock, struct timespec *time) {
    if (!inside && calls < 8) {
        inside = 1;
        allocate(20 + 10 * calls);
        /* Another thread allocates, and the one that starts malloc waits for it. */
        pthread_t other;
        if (calls++ == 0)
            check(pthread_create(&other, NULL, thread, NULL) == 0 && pthread_join(other, NULL) == 0, "a thread");
        inside = 0;
    }
    return syscall(SYS_clock_gettime, clock, time);
}

__attribute__((constructor)) static void start(void) {
    drop(NULL);
    const char *asked = getenv("BEHAVIOUR_CLOCK");
    struct timespec time;
    if (asked && strcmp(asked, "first") == 0) clock_gettime(CLOCK_REALTIME, &time);
    allocate(100);
    check(!asked || strcmp(asked, "used") != 0 || calls > 0, "malloc started without the clock");
}

__attribute__((destructor)) static void end(void) {
    for (int i = 0; i < kept_count; i++) check(is_whole(i), "another one's bytes"), drop(make_again(kept[i].at, 10000));
}
