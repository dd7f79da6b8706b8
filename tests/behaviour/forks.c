/* Children: by fork with and without exec, with threads running, nested, by vfork, posix_spawn, system, popen. */
#include "behaviour.h"
#include <dlfcn.h>
#include <execinfo.h>
#include <pwd.h>
#include <sched.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <ucontext.h>

extern char **environ;
static struct ballast b;

/* Child and parent verify all memory, and each writes to its own copy. */
static void verified(void) {
    ballast_make(&b, 4 * limit_bytes(), 1);
    pid_t pid = fork();
    CHECK(pid >= 0);
    ballast_verify(&b, pid ? "parent" : "child");
    uint64_t random = pid ? 1 : 2;
    ballast_churn(&b, b.pages, &random);
    ballast_verify(&b, pid ? "parent, changed" : "child, changed");
    if (pid == 0) {
        char *more = malloc(limit_bytes());
        fill(more, limit_bytes() & -PAGE, 3);
        verify(more, limit_bytes() & -PAGE, 3, "new in the child");
        _exit(0);
    }
    child_is_well(pid, "child");
    ballast_verify(&b, "parent, after");
}

static void descend(int depth) {
    uint64_t random = depth;
    ballast_churn(&b, 3000, &random);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        ballast_churn(&b, 3000, &random);
        if (depth > 0) descend(depth - 1);
        ballast_verify(&b, "nested child");
        exit(0);
    }
    ballast_churn(&b, 3000, &random);
    child_is_well(pid, "nested child");
    ballast_verify(&b, "its parent");
}

static void nested(void) {
    ballast_make(&b, 3 * limit_bytes(), 2);
    descend(3);
}

static atomic_int stop;

static void *busy(void *argument) {
    struct ballast own;
    ballast_make(&own, limit_bytes() / 2, (uint64_t)argument);
    uint64_t random = (uint64_t)argument;
    while (!atomic_load(&stop)) {
        ballast_churn(&own, 64, &random);
        size_t bytes = next_random(&random) % 300000;
        char *block = malloc(bytes + 16);
        memset(block, (int)bytes, bytes + 16);
        CHECK(block[bytes / 2] == (char)bytes);
        free(block);
    }
    ballast_verify(&own, "a busy thread");
    return NULL;
}

static void under_threads(int how) {
    pthread_t threads[8];
    ballast_make(&b, limit_bytes(), 3);
    for (uint64_t i = 0; i < 8; i++) CHECK(pthread_create(&threads[i], NULL, busy, (void *)(i + 50)) == 0);
    for (int round = 0; goes_on(round, 25); round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            if (how) execl("/bin/true", "true", NULL), _exit(9);
            uint64_t random = round;
            ballast_churn(&b, 500, &random);
            if (round % 5 == 0) ballast_verify(&b, "child of threads");
            _exit(0);
        }
        child_is_well(pid, "child");
        uint64_t random = round + 99;
        ballast_churn(&b, 300, &random);
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    ballast_verify(&b, "parent");
}

static void threads(void) { under_threads(0); }
static void threads_exec(void) { under_threads(1); }

static void loop(void) {
    ballast_make(&b, 3 * limit_bytes(), 4);
    ballast_start(&b);
    char *own = malloc(2 * MIB);
    fill(own, 2 * MIB - PAGE, 5);
    for (int round = 0; goes_on(round, 200); round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            verify(own, 2 * MIB - PAGE, 5, "in the child");
            fill(own, 2 * MIB - PAGE, 6);
            verify(own, 2 * MIB - PAGE, 6, "changed in the child");
            _exit(round & 63);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == (round & 63), "%#x",
              status);
    }
    verify(own, 2 * MIB - PAGE, 5, "in the parent");
    ballast_stop(&b);
}

/* Takes memory from the system and gives it back, in blocks small and large. */
static void take_blocks(uint64_t *random, int rounds) {
    for (int round = 0; round < rounds; round++) {
        char *blocks[16];
        for (int i = 0; i < 16; i++) {
            size_t bytes = (size_t)16 << next_random(random) % 19;
            blocks[i] = malloc(bytes);
            CHECK(blocks[i]);
            blocks[i][0] = blocks[i][bytes - 1] = (char)i;
        }
        for (int i = 0; i < 16; i++) {
            CHECK(blocks[i][0] == (char)i);
            free(blocks[i]);
        }
    }
}

static void *brief(void *argument) {
    uint64_t random = (uint64_t)argument;
    take_blocks(&random, 1);
    return NULL;
}

/* Starts threads that allocate and end, one after the other. */
static void *starter(void *argument) {
    uint64_t random = (uint64_t)argument;
    while (!atomic_load(&stop)) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, brief, (void *)next_random(&random)) == 0);
        take_blocks(&random, 2);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    return NULL;
}

/* No lock of the allocator is held in a child, whatever other threads did at the moment of the fork. */
static void allocates(void) {
    pthread_t threads[6];
    for (uint64_t i = 0; i < 6; i++) CHECK(pthread_create(&threads[i], NULL, starter, (void *)(i + 7)) == 0);
    for (int round = 0; goes_on(round, 150); round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            /* A child that waits for a lock is ended. */
            alarm(30);
            uint64_t random = round;
            take_blocks(&random, 4);
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, brief, (void *)next_random(&random)) == 0);
            CHECK(pthread_join(thread, NULL) == 0);
            _exit(0);
        }
        child_is_well(pid, "a child that allocates");
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 6; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* All other ways to start a program. */
static void others(void) {
    ballast_make(&b, 3 * limit_bytes(), 6);
    ballast_start(&b);
    for (int round = 0; goes_on(round, 15); round++) {
        pid_t pid = fork();
        if (pid == 0) execlp("true", "true", NULL), _exit(9);
        child_is_well(pid, "fork and exec");
        pid = vfork();
        if (pid == 0) execlp("true", "true", NULL), _exit(9);
        child_is_well(pid, "vfork and exec");
        char *arguments[] = {strdup("true"), NULL};
        CHECK(posix_spawnp(&pid, "true", NULL, NULL, arguments, environ) == 0);
        child_is_well(pid, "posix_spawn");
        free(arguments[0]);
        CHECK(system("exit 3") == 3 << 8);
        FILE *pipe = popen("echo 42", "r");
        int answer = 0;
        CHECK(pipe && fscanf(pipe, "%d", &answer) == 1 && answer == 42);
        CHECK(pclose(pipe) == 0);
    }
    ballast_stop(&b);
}

/* fork on a stack that is compressed. */
static ucontext_t here, there;
static void on_the_other_stack(void) {
    volatile char deep[200000];
    for (size_t i = 0; i < sizeof deep; i += 64) deep[i] = (char)(i / 64);
    for (int round = 0; goes_on(round, 20); round++) {
        uint64_t random = round;
        ballast_churn(&b, 4000, &random);
        pid_t pid = fork();
        CHECK(pid >= 0);
        for (size_t i = 0; i < sizeof deep; i += 64) CHECK(deep[i] == (char)(i / 64), "stack at %zu", i);
        if (pid == 0) _exit(0);
        child_is_well(pid, "child on a compressed stack");
    }
}

static void stack(void) {
    ballast_make(&b, 3 * limit_bytes(), 7);
    CHECK(getcontext(&there) == 0);
    there.uc_stack.ss_size = 4 * MIB;
    there.uc_stack.ss_sp = malloc(4 * MIB);
    there.uc_link = &here;
    makecontext(&there, on_the_other_stack, 0);
    CHECK(swapcontext(&here, &there) == 0);
    ballast_verify(&b, "stack");
}

/* Open files still work in a child: stdio's locks and buffers lie in compressed memory. */
static void files(void) {
    ballast_make(&b, 3 * limit_bytes(), 8);
    FILE *open_files[40];
    for (int i = 0; i < 40; i++) {
        open_files[i] = tmpfile();
        CHECK(open_files[i]);
        fprintf(open_files[i], "file %d\n", i);
    }
    for (int round = 0; goes_on(round, 10); round++) {
        uint64_t random = round;
        ballast_churn(&b, 5000, &random);
        pid_t pid = fork();
        if (pid == 0) {
            int number;
            for (int i = 0; i < 40; i++) {
                rewind(open_files[i]);
                CHECK(fscanf(open_files[i], "file %d", &number) == 1 && number == i);
            }
            _exit(0);
        }
        child_is_well(pid, "files");
    }
}

/* A loop of forks while threads wait for memory all the time: every fork ends, however many folios are staged. */
static void *waiting(void *argument) {
    struct ballast own;
    uint64_t random = (uint64_t)argument;
    ballast_make(&own, limit_bytes(), random);
    while (!atomic_load(&stop)) ballast_churn(&own, 64, &random);
    ballast_verify(&own, "a waiting thread");
    return NULL;
}

static void busy_threads(void) {
    pthread_t threads[4];
    for (uint64_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, waiting, (void *)(i + 60)) == 0);
    usleep(300000);
    for (int round = 0; goes_on(round, 60); round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) _exit(0);
        child_is_well(pid, "child of waiting threads");
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

#include "forks_library.h"

/* A forked child may start threads and children, and outlive its parent. */
static void *child_thread(void *argument) {
    uint64_t random = (uint64_t)argument;
    char *own = malloc(4 * MIB);
    for (int i = 0; i < 10; i++) {
        uint64_t seed = next_random(&random);
        fill(own, 4 * MIB - PAGE, seed);
        verify(own, 4 * MIB - PAGE, seed, "thread of a child");
    }
    free(own);
    return NULL;
}

static void server(void) {
    ballast_make(&b, 2 * limit_bytes(), 9);
    pid_t workers[6];
    for (int i = 0; i < 6; i++) {
        if ((workers[i] = fork()) != 0) continue;
        pthread_t threads[4];
        for (uint64_t j = 0; j < 4; j++)
            CHECK(pthread_create(&threads[j], NULL, child_thread, (void *)(i * 10 + j)) == 0);
        for (int j = 0; j < 4; j++) CHECK(pthread_join(threads[j], NULL) == 0);
        ballast_verify(&b, "worker");
        exit(0);
    }
    for (int i = 0; i < 6; i++) child_is_well(workers[i], "worker");
    ballast_verify(&b, "server");
}

/* What a waiting thread has: blocks of 512 bytes, and between them one of that size in which the C library has its
 * thread-specific values beyond the 32nd. A child of fork clears these of the threads that it does not have. */
#define NEIGHBOURS 8192
static pthread_key_t keys[48];
struct with_values {
    char *blocks[NEIGHBOURS];
    pthread_barrier_t *ready;
};

static void *with_values(void *argument) {
    struct with_values *mine = argument;
    for (int i = 0; i < NEIGHBOURS; i++) {
        if (i == NEIGHBOURS / 2) CHECK(pthread_setspecific(keys[47], mine) == 0);
        mine->blocks[i] = malloc(512);
        memset(mine->blocks[i], i % 97 + 1, 512);
    }
    pthread_barrier_wait(mine->ready);
    pthread_barrier_wait(mine->ready);
    return NULL;
}

static void blocks_are_there(const struct with_values *threads, const char *who) {
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < NEIGHBOURS; i++)
            for (int at = 0; at < 512; at++)
                CHECK(threads[t].blocks[i][at] == i % 97 + 1, "block %d of thread %d of %s: %d", i, t, who,
                      threads[t].blocks[i][at]);
}

/* Threads with more thread-specific values than fit into their control blocks. */
static void values(void) {
    static struct ballast b;
    static struct with_values threads[4];
    pthread_barrier_t ready;
    pthread_t ids[4];
    CHECK(pthread_barrier_init(&ready, NULL, 5) == 0);
    for (int i = 0; i < 48; i++) CHECK(pthread_key_create(&keys[i], NULL) == 0);
    ballast_make(&b, 3 * limit_bytes(), 21);
    come_down(10);
    for (int t = 0; t < 4; t++) {
        threads[t].ready = &ready;
        CHECK(pthread_create(&ids[t], NULL, with_values, &threads[t]) == 0);
    }
    pthread_barrier_wait(&ready);
    uint64_t random = 5;
    for (int round = 0; round < 3; round++) {
        ballast_churn(&b, 3 * b.pages, &random);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            blocks_are_there(threads, "a child");
            _exit(0);
        }
        child_is_well(child, "a child of threads with values");
    }
    blocks_are_there(threads, "the parent");
    pthread_barrier_wait(&ready);
    for (int t = 0; t < 4; t++) CHECK(pthread_join(ids[t], NULL) == 0);
}

/* fork while other threads run on stacks from malloc, and from such a thread. */
static void *resting(void *argument) {
    volatile char use[60000];
    for (size_t i = 0; i < sizeof use; i += 64) use[i] = (char)i;
    while (!atomic_load(&stop)) usleep(20000);
    for (size_t i = 0; i < sizeof use; i += 64) CHECK(use[i] == (char)i);
    return argument;
}

static void *forking(void *argument) {
    uint64_t random = (uint64_t)argument;
    for (int i = 0; i < 10; i++) {
        ballast_churn(&b, 5000, &random);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            ballast_churn(&b, 2000, &random);
            _exit(0);
        }
        child_is_well(pid, "child of a thread on its own stack");
    }
    return argument;
}

static void own_stacks(void) {
    ballast_make(&b, 3 * limit_bytes(), 10);
    const size_t bytes = 256 * 1024;
    pthread_t threads[9];
    for (size_t i = 0; i < 9; i++) {
        pthread_attr_t how;
        void *stack;
        CHECK(posix_memalign(&stack, PAGE, bytes) == 0);
        CHECK(pthread_attr_init(&how) == 0 && pthread_attr_setstack(&how, stack, bytes) == 0);
        CHECK(pthread_create(&threads[i], &how, i == 8 ? forking : resting, NULL) == 0);
    }
    CHECK(pthread_join(threads[8], NULL) == 0);
    atomic_store(&stop, 1);
    for (size_t i = 0; i < 8; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    ballast_verify(&b, "own stacks");
}

/* Children made by other calls than fork: each has a copy of all memory, and writes to it. */
static atomic_int shared_word;

static int cloned(void *argument) {
    CHECK(*(uint64_t *)argument == 0x1234567890);
    ballast_verify(&b, "a cloned child");
    uint64_t random = 5;
    ballast_churn(&b, b.pages / 4, &random);
    ballast_verify(&b, "a cloned child, changed");
    _exit(7);
}

static int borrower(void *argument) {
    atomic_store(&shared_word, (int)(uintptr_t)argument);
    return 7;
}

static void ended_with_7(pid_t pid, const char *what) {
    int status;
    CHECK(pid > 0, "%s", what);
    CHECK(waitpid(pid, &status, __WALL) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 7, "%s: status %#x",
          what, status);
    ballast_verify(&b, what);
}

static void clones(void) {
    ballast_make(&b, 4 * limit_bytes(), 12);
    const size_t bytes = 256 * 1024;
    uint64_t *argument = malloc(sizeof *argument);
    *argument = 0x1234567890;
    char *stack = map_anonymous(bytes);
    pid_t *numbers = map_anonymous(64 * 1024), pid;
    memset(stack, 1, bytes);
    uint64_t random = 3;
    ballast_churn(&b, b.pages, &random);
    ended_with_7(clone(cloned, stack + bytes, SIGCHLD, argument), "clone");
    ballast_churn(&b, b.pages, &random);
    int flags = SIGCHLD | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID;
    pid = clone(cloned, stack + bytes, flags, argument, &numbers[0], NULL, &numbers[5000]);
    CHECK(numbers[0] == pid);
    ended_with_7(pid, "clone with words");
    for (int how = 0; how < 4; how++) {
        ballast_churn(&b, b.pages, &random);
        uint64_t about[8] = {0, 0, 0, 0, SIGCHLD, 0, 0, 0};
        switch (how) {
        case 0: pid = syscall(SYS_clone, (unsigned long)SIGCHLD, 0ul, 0ul, 0ul, 0ul); break;
        case 1: pid = syscall(SYS_clone3, about, sizeof about); break;
#ifdef SYS_fork
        case 2: pid = syscall(SYS_fork); break;
#endif
        default: pid = _Fork();
        }
        if (pid == 0) cloned(argument);
        ended_with_7(pid, how == 0 ? "SYS_clone" : how == 1 ? "SYS_clone3" : how == 2 ? "SYS_fork" : "_Fork");
    }
    /* A child that shares its parent's memory writes to it. */
    ended_with_7(clone(borrower, stack + bytes, CLONE_VM | CLONE_VFORK | SIGCHLD, (void *)99ul), "a borrower");
    CHECK(atomic_load(&shared_word) == 99);
}

static int grow(void *bytes) {
    char *block = map_anonymous((size_t)bytes);
    fill(block, (size_t)bytes, 5);
    verify(block, (size_t)bytes, 5, "in a child that shares the memory");
    return 7;
}

/* A child that shares its parent's memory passes half of the limit, and ends: the parent is held to its limit. */
static void borrower_grows(void) {
    const size_t bytes = 256 * 1024;
    char *stack = map_anonymous(bytes);
    size_t most = limit_bytes() * 3 / 4;
    ended_with_7(clone(grow, stack + bytes, CLONE_VM | CLONE_VFORK | SIGCHLD, (void *)most), "a borrower");
    ballast_make(&b, 4 * limit_bytes(), 14);
    size_t resident = status_mib("RssAnon:");
    CHECK(resident * MIB < 2 * limit_bytes(), "%zu MiB are resident", resident);
    ballast_verify(&b, "after a borrower");
}

/* Other calls through syscall() return what the kernel returns. */
static void plain_syscalls(void) {
    CHECK(syscall(SYS_getpid) == getpid());
    errno = 0;
    CHECK(syscall(SYS_close, 9999) == -1 && errno == EBADF);
    CHECK(syscall(SYS_clone3, NULL, 0ul) == -1 && errno != EBADF);
    CHECK(syscall(SYS_madvise, 1ul, PAGE, MADV_WIPEONFORK) == -1 && errno == EINVAL);
    char *at = (char *)syscall(SYS_mmap, NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0ul);
    CHECK(at != MAP_FAILED && page_is_zero(at));
    int file = open("/proc/self/exe", O_RDONLY);
    char *first = (char *)syscall(SYS_mmap, NULL, PAGE, PROT_READ, MAP_PRIVATE, file, PAGE);
    CHECK(first != MAP_FAILED && pread(file, at, PAGE, PAGE) == (ssize_t)PAGE && memcmp(at, first, PAGE) == 0);
    ballast_make(&b, 3 * limit_bytes(), 13);
    CHECK(syscall(SYS_madvise, b.start, PAGE, MADV_DONTNEED) == 0 && page_is_zero(b.start));
    fill_page(b.start, ballast_seed(&b, 0));
    ballast_verify(&b, "after calls");
}

#include "forks_short.h"

/* Children that grow and execute another program at once: threads that start then must not be reported as failed. */
static void exec_races(void) {
    for (int i = 0; i < 300; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            char *start = map_anonymous(limit_bytes());
            start[0] = 1;
            /* The start of the other threads takes about 100 us; this interrupts it at different points. */
            for (double until = now() + (i % 30) * 1e-5; now() < until;) {}
            execl("/proc/self/exe", "forks", "nothing", NULL);
            CHECK(0);
        }
        child_is_well(pid, "a child that is another program");
    }
}

static void nothing(void) { _exit(0); }

/* A program executes another one under the same limit, which executes a third. */
static void exec_chain(void) {
    const char *left = getenv("BEHAVIOUR_LEFT");
    int depth = left ? atoi(left) : 3;
    ballast_make(&b, 3 * limit_bytes(), 11);
    ballast_verify(&b, "before exec");
    if (depth == 0) return;
    char text[16];
    snprintf(text, sizeof text, "%d", depth - 1);
    setenv("BEHAVIOUR_LEFT", text, 1);
    execl("/proc/self/exe", "forks", "exec_chain", NULL);
    CHECK(0);
}

/* Maps, fills and unmaps the memory that is on disk while another thread forks. */
static void *comes_and_goes(void *argument) {
    for (uint64_t seed = 1; !stop; seed++) {
        size_t bytes = 2 * limit_bytes();
        char *at = map_anonymous(bytes);
        fill(at, bytes, seed);
        CHECK(munmap(at, bytes) == 0);
    }
    return argument;
}

static void unmapped(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, comes_and_goes, NULL) == 0);
    for (double until = now() + 4; now() < until;) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) _exit(0);
        child_is_well(pid, "child of a thread whose memory goes");
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
}

/* Puts a file of the program's under all low numbers, and closes it, while another thread forks. */
static void *puts_files(void *argument) {
    int null = fcntl(1, F_DUPFD_CLOEXEC, 1000);
    CHECK(null >= 1000);
    while (!stop) {
        for (int i = 3; i < 16; i++) CHECK(dup2(null, i) == i);
        for (int i = 3; i < 16; i++) close(i);
        usleep(2000);
    }
    return argument;
}

/* A child finds its bytes, or ends with zfolio's status: it could not read them. */
static void replaced(void) {
    ballast_make(&b, 2 * limit_bytes(), 1);
    pthread_t thread;
    int whole = 0, ended = 0;
    CHECK(pthread_create(&thread, NULL, puts_files, NULL) == 0);
    for (double until = now() + 4; now() < until;) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            ballast_verify(&b, "child whose files were replaced");
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status), "status %#x", status);
        CHECK(WEXITSTATUS(status) == 0 || (WEXITSTATUS(status) == 125 && getenv("ZFOLIO_LIMIT")), "status %#x", status);
        if (WEXITSTATUS(status) == 0) whole++;
        else ended++;
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    ballast_verify(&b, "parent");
    /* The moment in which it is too late to fork anew is short. */
    CHECK(ended <= whole, "%d children of %d had no memory", ended, whole + ended);
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"verified", verified}, {"nested", nested}, {"threads", threads}, {"threads_exec", threads_exec},
        {"loop", loop}, {"allocates", allocates}, {"others", others}, {"stack", stack}, {"files", files},
        {"server", server},
        {"own_stacks", own_stacks}, {"exec_chain", exec_chain}, {"exec_races", exec_races}, {"nothing", nothing},
        {"clones", clones}, {"borrower_grows", borrower_grows}, {"plain_syscalls", plain_syscalls},
        {"no_room", no_room}, {"wiped", wiped},
        {"not_inherited", not_inherited}, {"not_inherited_by_syscall", not_inherited_by_syscall},
        {"no_threads", no_threads}, {"no_userfaultfd", no_userfaultfd}, {"no_files", no_files},
        {"given_up", given_up}, {"given_up_spilled", given_up_spilled},
        {"few_threads", few_threads}, {"busy_threads", busy_threads}, {"streams", streams}, {"names", names},
        {"handlers", handlers}, {"modules", modules}, {"values", values},
        {"unmapped", unmapped}, {"replaced", replaced},
    };
    return CHOOSE(cases);
}
