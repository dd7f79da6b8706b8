/* The program's own signal handlers, and the signals that reach them. */
#include "behaviour.h"
#include <setjmp.h>
#include <sys/time.h>

static struct ballast b;
static sigjmp_buf back;
static volatile sig_atomic_t caught;
static void *volatile where;

static void jump(int number, siginfo_t *about, void *context) {
    (void)context;
    caught = number;
    where = about->si_addr;
    siglongjmp(back, 1);
}

static void take(int number) {
    struct sigaction action = {.sa_sigaction = jump, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(number, &action, NULL) == 0);
}

static void faults(void) {
    take(SIGSEGV);
    take(SIGBUS);
    ballast_make(&b, 3 * limit_bytes(), 1);
    ballast_start(&b);
    int file = memfd_create("short", 0);
    CHECK(file >= 0 && ftruncate(file, 2 * PAGE) == 0);
    for (int round = 0; round < 200; round++) {
        caught = 0;
        if (!sigsetjmp(back, 1)) *(volatile int *)NULL = 1;
        CHECK(caught == SIGSEGV && where == NULL);
        char *mapped = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
        CHECK(mapped != MAP_FAILED);
        mapped[PAGE] = 1;
        caught = 0;
        if (!sigsetjmp(back, 1)) mapped[5 * PAGE] = 1;
        CHECK(caught == SIGBUS && where == mapped + 5 * PAGE);
        CHECK(munmap(mapped, 8 * PAGE) == 0);
    }
    ballast_stop(&b);
    /* Protected memory that was compressed. */
    for (volatile size_t next = 0; next < b.pages; next += 97) {
        size_t page = next;
        char *at = b.start + page * PAGE;
        CHECK(mprotect(at, PAGE, PROT_NONE) == 0);
        caught = 0;
        if (!sigsetjmp(back, 1)) at[3] = 1;
        CHECK(caught == SIGSEGV && where == at + 3, "signal %d at %p, not %p", caught, where, at + 3);
        CHECK(mprotect(at, PAGE, PROT_READ) == 0);
        CHECK(page_is(at, ballast_seed(&b, page)), "page %zu", page);
        caught = 0;
        if (!sigsetjmp(back, 1)) at[3] = 1;
        CHECK(caught == SIGSEGV);
        CHECK(mprotect(at, PAGE, PROT_READ | PROT_WRITE) == 0);
    }
    ballast_verify(&b, "signals");
}

static volatile uint64_t ticks;
static void tick(int number) {
    (void)number;
    int kept = errno;
    size_t page = mix(ticks++) % b.pages;
    CHECK(page_is(b.start + page * PAGE, ballast_seed(&b, page)));
    errno = kept;
}

static atomic_int stop;
static void *faulting(void *argument) {
    struct ballast own;
    ballast_make(&own, limit_bytes(), 20 + (size_t)argument);
    uint64_t random = 5;
    while (!atomic_load(&stop)) {
        ballast_churn(&own, 200, &random);
        size_t bytes = 200000;
        char *block = map_anonymous(bytes);
        memset(block, 1, bytes);
        CHECK(munmap(block, bytes) == 0);
    }
    ballast_verify(&own, "a thread under signals");
    return NULL;
}

static void timers(void) {
    ballast_make(&b, 2 * limit_bytes(), 2);
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && sigaction(SIGPROF, &action, NULL) == 0);
    struct itimerval often = {{0, 1500}, {0, 1500}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0 && setitimer(ITIMER_PROF, &often, NULL) == 0);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, faulting, (void *)i) == 0);
    for (double until = now() + 3; now() < until;) usleep(1000);
    atomic_store(&stop, 1);
    for (size_t i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    struct itimerval never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && setitimer(ITIMER_PROF, &never, NULL) == 0);
    CHECK(ticks > 300, "%lu ticks", ticks);
    ballast_verify(&b, "timers");
}

/* Handlers on a stack that is compressed, also for faults. */
static volatile uint64_t depth;
static void on_stack(int number) {
    (void)number;
    volatile char use[20000];
    for (size_t i = 0; i < sizeof use; i += 64) use[i] = (char)i;
    for (size_t i = 0; i < sizeof use; i += 64) CHECK(use[i] == (char)i);
    depth++;
}

static void alternate(void) {
    ballast_make(&b, 3 * limit_bytes(), 3);
    stack_t stack = {.ss_sp = malloc(512 * 1024), .ss_size = 512 * 1024};
    CHECK(stack.ss_sp && sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = on_stack, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    struct sigaction fault = {.sa_sigaction = jump, .sa_flags = SA_ONSTACK | SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &fault, NULL) == 0);
    uint64_t random = 1;
    for (int i = 0; goes_on(i, 40); i++) {
        ballast_churn(&b, 8000, &random);
        CHECK(raise(SIGUSR1) == 0 && depth == (uint64_t)i + 1);
        ballast_churn(&b, 8000, &random);
        caught = 0;
        if (!sigsetjmp(back, 1)) *(volatile int *)NULL = 1;
        CHECK(caught == SIGSEGV);
    }
    ballast_verify(&b, "alternate stack");
}

static sigjmp_buf outside;
static void jump_out(int signal) {
    (void)signal;
    siglongjmp(outside, 1);
}

/* A handler that repeatedly leaves a madvise by a jump. */
static void jumps(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    CHECK(signal(SIGALRM, jump_out) != SIG_ERR);
    static volatile uint64_t random = 5;
    double end = now() + 3;
    if (sigsetjmp(outside, 1) == 0 || now() < end) {
        struct itimerval soon = {{0, 0}, {0, 100 + mix(random) % 200}};
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        while (now() < end) CHECK(madvise(b.start + mix(random++) % (b.pages / 2) * PAGE, PAGE, MADV_DONTNEED) == 0);
    }
    struct itimerval never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    for (size_t page = b.pages / 2 + 1; page < b.pages; page++)
        CHECK(page_is(b.start + page * PAGE, ballast_seed(&b, page)), "page %zu", page);
}

static volatile uint64_t forks;
static void fork_here(int number) {
    (void)number;
    int kept = errno, status;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(page_is(b.start, ballast_seed(&b, 0)) ? 7 : 1);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 7, "%#x", status);
    forks++;
    errno = kept;
}

/* A handler forks, whichever call that changes a mapping it has interrupted. */
static void handler_forks(void) {
    ballast_make(&b, 2 * limit_bytes(), 4);
    struct sigaction action = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    uint64_t random = 3;
    const size_t bytes = 256 * 1024;
    for (double end = now() + 4; now() < end;) {
        struct itimerval soon = {{0, 0}, {0, 50 + next_random(&random) % 500}};
        uint64_t before = forks;
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        while (forks == before) {
            char *block = map_anonymous(bytes), *other = map_anonymous(bytes);
            block[0] = other[0] = 1;
            CHECK(mremap(block, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, other) == other && other[0] == 1);
            CHECK(munmap(other, bytes) == 0);
        }
    }
    ballast_verify(&b, "a handler that forks");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"faults", faults}, {"timers", timers}, {"alternate", alternate},
                                       {"jumps", jumps}, {"handler_forks", handler_forks}};
    return CHOOSE(cases);
}
