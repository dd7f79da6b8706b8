/* An executable with its own malloc, like one with jemalloc or Chromium: it maps memory while it holds its lock.
 * Code that runs inside that call must not allocate with it, or it would wait for itself. */
#include "behaviour.h"
#include <dlfcn.h>
#include <sched.h>

static atomic_flag lock = ATOMIC_FLAG_INIT;
static atomic_int holder;
#ifdef FIRST
/* See own_malloc_first.c. */
static char first[2 * MIB] __attribute__((aligned(16)));
static char *at = first, *end = first + sizeof first;
#else
static char *at, *end;
#endif

static void take(void) {
    /* A thread that holds the lock already would spin for ever. */
    if (atomic_load(&holder) == (int)syscall(SYS_gettid)) {
        static const char text[] = "malloc was called by who holds its lock\n";
        report(text, sizeof text - 1);
        _exit(1);
    }
    while (atomic_flag_test_and_set(&lock)) {}
    atomic_store(&holder, (int)syscall(SYS_gettid));
}

static void give(void) {
    atomic_store(&holder, 0);
    atomic_flag_clear(&lock);
}

void *malloc(size_t bytes) {
    bytes = (bytes + 31) & ~(size_t)15;
    take();
    if (!at || bytes > (size_t)(end - at)) {
        size_t region = bytes > 8 * MIB ? bytes : 8 * MIB;
        at = mmap(NULL, region, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        end = at + region;
    }
    char *block = at + 16;
    *(size_t *)at = bytes - 16;
    at += bytes;
    give();
    return block;
}

void free(void *block) {
    /* Only the lock matters for the test. */
    take();
    give();
    (void)block;
}

void *calloc(size_t count, size_t bytes) { return malloc(count * bytes); }

void *realloc(void *block, size_t bytes) {
    void *new = malloc(bytes);
    if (block) {
        size_t old = *(size_t *)((char *)block - 16);
        memcpy(new, block, old < bytes ? old : bytes);
    }
    return new;
}

/* Many blocks from several threads, until they are three times the limit. */
static void *life(void *argument) {
    uint64_t seed = (uintptr_t)argument;
    size_t count = 3 * limit_bytes() / 4 / (16 * PAGE);
    char **blocks = calloc(count, sizeof *blocks);
    for (size_t i = 0; i < count; i++) {
        blocks[i] = malloc(16 * PAGE);
        fill(blocks[i], 16 * PAGE, (seed << 32) + i * 16);
    }
    for (size_t i = 0; i < count; i++) {
        verify(blocks[i], 16 * PAGE, (seed << 32) + i * 16, "a block");
        free(blocks[i]);
    }
    return NULL;
}

static void blocks(void) {
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, life, (void *)i) == 0);
    for (size_t i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Children, whose engine starts while the fork handlers run. */
static void children(void) {
    life((void *)7);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            life((void *)8);
            _exit(0);
        }
        child_is_well(pid, "a child");
    }
}

/* The program's own list of fork handlers, as in Firefox: it also calls them around its own way to fork. */
static void (*handlers[64][3])(void);
static int registered;

int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *handle) {
    void (*three[3])(void) = {prepare, parent, child};
    if (registered < 64) memcpy(handlers[registered++], three, sizeof three);
    typedef int next_function(void (*)(void), void (*)(void), void (*)(void), void *);
    return ((next_function *)dlsym(RTLD_NEXT, "__register_atfork"))(prepare, parent, child, handle);
}

static void call_handlers(int which) {
    for (int i = 0; i < registered; i++) {
        void (*handler)(void) = handlers[which ? i : registered - 1 - i][which];
        if (handler) handler();
    }
}

static int in_child(void *seed) {
    call_handlers(2);
    life(seed);
    _exit(0);
}

static void own_handlers(void) {
    static char stack[256 << 10] __attribute__((aligned(16)));
    for (int round = 0; round < 4; round++) {
        /* Without an engine, and with one. */
        if (round == 2) life((void *)9);
        call_handlers(0);
        pid_t pid = clone(in_child, stack + sizeof stack, SIGCHLD, (void *)10);
        call_handlers(1);
        child_is_well(pid, "a child of its own way to fork");
        pid = fork();
        if (pid == 0) life((void *)11), _exit(0);
        child_is_well(pid, "a child of fork");
    }
}

/* Has zfolio manage nothing of what the process has now: memory that a child of fork was once not to have
 * (MADV_WIPEONFORK) is not managed again. All anonymous mappings are treated so, also those in which zfolio's malloc,
 * which this program does not use, has its tables. */
static void manage_nothing(void) {
    static char text[1 << 20];
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0);
    for (ssize_t more, got = 0; (more = read(file, text + got, sizeof text - 1 - got)) > 0; text[got] = 0) got += more;
    close(file);
    for (char *line = text, *next; (next = strchr(line, '\n')); line = next + 1) {
        size_t from, to;
        *next = 0;
        if (sscanf(line, "%lx-%lx rw-p 00000000 00:00", &from, &to) != 2 || !strstr(line, " 00:00 0") ||
            strchr(line, '['))
            continue;
        /* zfolio may have unmapped a mapping of its own by now, so these calls may fail. */
        madvise((void *)from, to - from, MADV_WIPEONFORK);
        madvise((void *)from, to - from, MADV_KEEPONFORK);
    }
}

/* Makes memory, which is managed, and unmaps it. What it maps last is too small to be handed over at once. */
static void come_and_go(const char *who) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 12);
    ballast_verify(&b, who);
    come_down(60);
    CHECK(!getenv("ZFOLIO_LIMIT") || status_mib("VmRSS:") < limit_bytes() / MIB + SLACK_MIB, "%s: %zu MiB", who,
          status_mib("VmRSS:"));
    ballast_verify(&b, who);
    CHECK(munmap(b.start, b.pages * PAGE) == 0);
    manage_nothing();
    size_t small = limit_bytes() / 48;
    char *last = map_anonymous(small);
    fill(last, small & -PAGE, 13);
    verify(last, small & -PAGE, 13, who);
}

/* A process forks of whose memory none is managed any more: the child is managed once it grows, and so is its own
 * child. */
static void emptied(void) {
    come_and_go("the first process");
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        come_and_go("a child");
        pid = fork();
        CHECK(pid >= 0);
        if (pid > 0) child_is_well(pid, "a child's child");
        come_and_go("the last two");
        _exit(0);
    }
    child_is_well(pid, "a child");
    come_and_go("the first process, later");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"blocks", blocks}, {"children", children}, {"own_handlers", own_handlers},
                                      {"emptied", emptied}};
    return CHOOSE(cases);
}
