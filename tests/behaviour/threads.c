/* Threads that start and end, on stacks of every kind, with modules and locks. */
#include "behaviour.h"
#include <linux/futex.h>
#include <dirent.h>
#include <dlfcn.h>
#include <grp.h>
#include <sched.h>
#include <ucontext.h>

static struct ballast b;

static void *visitor(void *argument) {
    uint64_t random = (uint64_t)argument;
    char *blocks[8];
    for (int i = 0; i < 8; i++) {
        blocks[i] = malloc(70000);
        memset(blocks[i], (int)random + i, 70000);
    }
    for (int i = 0; i < 8; i++) {
        for (int at = 0; at < 70000; at += 100) CHECK(blocks[i][at] == (char)(random + i));
        if (i) free(blocks[i]);
    }
    return blocks[0];
}

static void come_and_go(void) {
    ballast_make(&b, 3 * limit_bytes(), 1);
    ballast_start(&b);
    for (uint64_t batch = 0; batch < 500 / 20; batch++) {
        pthread_t threads[20];
        for (uint64_t i = 0; i < 20; i++)
            CHECK(pthread_create(&threads[i], NULL, visitor, (void *)(batch * 20 + i)) == 0);
        for (uint64_t i = 0; i < 20; i++) {
            void *block;
            CHECK(pthread_join(threads[i], &block) == 0);
            for (int at = 0; at < 70000; at += 100) CHECK(((char *)block)[at] == (char)(batch * 20 + i));
            free(block);
        }
    }
    ballast_stop(&b);
}

/* Stacks from malloc: the thread's own storage is in compressed memory too. */
static void *deep(void *argument) {
    volatile char use[60000];
    for (size_t i = 0; i < sizeof use; i += 64) use[i] = (char)(i / 64 + (size_t)argument);
    usleep(2000);
    for (size_t i = 0; i < sizeof use; i += 64) CHECK(use[i] == (char)(i / 64 + (size_t)argument));
    return argument;
}

static void own_stacks(void) {
    ballast_make(&b, 3 * limit_bytes(), 2);
    ballast_start(&b);
    const size_t bytes = 192 * 1024;
    for (int round = 0; round < 60; round++) {
        pthread_t threads[8];
        void *stacks[8];
        for (uint64_t i = 0; i < 8; i++) {
            pthread_attr_t how;
            CHECK(posix_memalign(&stacks[i], PAGE, bytes) == 0);
            CHECK(pthread_attr_init(&how) == 0 && pthread_attr_setstack(&how, stacks[i], bytes) == 0);
            CHECK(pthread_create(&threads[i], &how, deep, (void *)i) == 0);
            pthread_attr_destroy(&how);
        }
        for (uint64_t i = 0; i < 8; i++) {
            void *answer;
            CHECK(pthread_join(threads[i], &answer) == 0 && answer == (void *)i);
            free(stacks[i]);
        }
    }
    ballast_stop(&b);
}

static ucontext_t home, tasks[64];
static void task(int number) {
    volatile uint64_t local[3000];
    for (int i = 0; i < 3000; i++) local[i] = (uint64_t)number * 10000 + i;
    for (int turn = 0; turn < 20; turn++) {
        CHECK(swapcontext(&tasks[number], &home) == 0);
        for (int i = 0; i < 3000; i++) { CHECK(local[i] == (uint64_t)number * 10000 + i + turn); local[i]++; }
    }
}

static void contexts(void) {
    ballast_make(&b, 3 * limit_bytes(), 3);
    for (int i = 0; i < 64; i++) {
        CHECK(getcontext(&tasks[i]) == 0);
        tasks[i].uc_stack.ss_sp = malloc(256 * 1024);
        tasks[i].uc_stack.ss_size = 256 * 1024;
        tasks[i].uc_link = &home;
        makecontext(&tasks[i], (void (*)(void))task, 1, i);
    }
    uint64_t random = 3;
    for (int turn = 0; turn < 21; turn++)
        for (int i = 0; i < 64; i++) {
            CHECK(swapcontext(&home, &tasks[i]) == 0);
            if (i % 8 == 0) ballast_churn(&b, 700, &random);
        }
    ballast_verify(&b, "contexts");
}

static const char *module_path(void) {
    static char path[512];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 20);
    CHECK(length > 0);
    path[length] = 0;
    strcpy(strrchr(path, '/'), "/module.so");
    return path;
}

static void modules(void) {
    ballast_make(&b, 3 * limit_bytes(), 4);
    ballast_start(&b);
    for (int round = 0; round < 60; round++) {
        void *module = dlopen(module_path(), RTLD_NOW | RTLD_LOCAL);
        CHECK(module, "%s", dlerror());
        uint64_t (*step)(void) = (uint64_t (*)(void))dlsym(module, "module_step");
        CHECK(step);
        for (uint64_t i = 1; i < 2000; i++) CHECK(step() == i);
        CHECK(dlclose(module) == 0);
        usleep(3000);
    }
    ballast_stop(&b);
}

/* Mutex and condition in compressed memory; a robust mutex whose owner ends. */
struct table {
    pthread_mutex_t mutex, robust;
    pthread_cond_t turn;
    int whose;
};

static struct table *tables;
enum { TABLES = 2000, PLAYERS = 4, ROUNDS = 8 };

static void *player(void *argument) {
    int me = (int)(size_t)argument;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < TABLES; i++) {
            struct table *t = (struct table *)((char *)tables + (size_t)i * PAGE);
            CHECK(pthread_mutex_lock(&t->mutex) == 0);
            while (t->whose % PLAYERS != me) CHECK(pthread_cond_wait(&t->turn, &t->mutex) == 0);
            t->whose++;
            CHECK(pthread_cond_broadcast(&t->turn) == 0);
            CHECK(pthread_mutex_unlock(&t->mutex) == 0);
        }
    return NULL;
}

static void locks(void) {
    ballast_make(&b, 3 * limit_bytes(), 5);
    tables = map_anonymous(TABLES * PAGE);
    for (int i = 0; i < TABLES; i++) {
        struct table *t = (struct table *)((char *)tables + (size_t)i * PAGE);
        pthread_mutex_init(&t->mutex, NULL);
        pthread_cond_init(&t->turn, NULL);
    }
    ballast_start(&b);
    pthread_t players[PLAYERS];
    for (size_t i = 0; i < PLAYERS; i++) CHECK(pthread_create(&players[i], NULL, player, (void *)i) == 0);
    for (size_t i = 0; i < PLAYERS; i++) CHECK(pthread_join(players[i], NULL) == 0);
    for (int i = 0; i < TABLES; i++)
        CHECK(((struct table *)((char *)tables + (size_t)i * PAGE))->whose == PLAYERS * ROUNDS);
    ballast_stop(&b);
}

static void *owner(void *argument) {
    struct table *t = argument;
    CHECK(pthread_mutex_lock(&t->robust) == 0);
    usleep(200);
    return NULL;
}

static void robust(void) {
    ballast_make(&b, 3 * limit_bytes(), 5);
    ballast_start(&b);
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    tables = map_anonymous(300 * 16 * PAGE);
    for (int i = 0; i < 300; i++) {
        struct table *t = (struct table *)((char *)tables + (size_t)i * 16 * PAGE);
        pthread_mutex_init(&t->robust, &how);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, owner, t) == 0 && pthread_join(thread, NULL) == 0);
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_sec += 5;
        int answer = pthread_mutex_timedlock(&t->robust, &soon);
        CHECK(answer == EOWNERDEAD, "robust mutex %d: %d", i, answer);
    }
    ballast_stop(&b);
}

/* Mutexes with priority inheritance, at which threads meet: the kernel writes to them and cannot wait for a fault. The
 * call that a thread makes at a mutex which another one has, once all other memory has been in use for a while. */
static void inherit(void) {
    enum { COUNT = 500 };
    ballast_make(&b, 3 * limit_bytes(), 5);
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    CHECK(pthread_mutexattr_setprotocol(&how, PTHREAD_PRIO_INHERIT) == 0);
    tables = map_anonymous(COUNT * 16 * PAGE);
    for (int i = 0; i < COUNT; i++)
        CHECK(pthread_mutex_init((pthread_mutex_t *)((char *)tables + (size_t)i * 16 * PAGE), &how) == 0);
    uint64_t random = 1;
    ballast_churn(&b, 3 * b.pages, &random);
    for (int i = 0; i < COUNT; i++) {
        pthread_mutex_t *mutex = (pthread_mutex_t *)((char *)tables + (size_t)i * 16 * PAGE);
        const int calls[] = {FUTEX_LOCK_PI | FUTEX_PRIVATE_FLAG, FUTEX_UNLOCK_PI | FUTEX_PRIVATE_FLAG};
        for (int call = 0; call < 2; call++)
            CHECK(syscall(SYS_futex, mutex, calls[call], 0, NULL, NULL, 0) == 0, "%d: %s", i, strerror(errno));
        CHECK(pthread_mutex_lock(mutex) == 0 && pthread_mutex_unlock(mutex) == 0);
    }
    ballast_verify(&b, "beside mutexes with priority inheritance");
}

/* A thread made by clone(2) whose id the kernel clears when it exits, also in compressed memory. */
static int child_that_waits(void *argument) {
    atomic_int *go = argument;
    while (!atomic_load(go)) usleep(1000);
    /* Not exit(), which would end all threads. */
    syscall(SYS_exit, 0);
    return 0;
}

static void cleared_words(void) {
    enum { COUNT = 40 };
    static atomic_int go;
    ballast_make(&b, 3 * limit_bytes(), 5);
    const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
                      CLONE_CHILD_CLEARTID;
    char *words = map_anonymous(COUNT * 16 * PAGE);
    for (int i = 0; i < COUNT; i++) {
        int *word = (int *)(words + (size_t)i * 16 * PAGE);
        *word = 1;
        char *stack = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        CHECK(stack != MAP_FAILED);
        CHECK(clone(child_that_waits, stack + 16 * PAGE, flags, &go, NULL, NULL, word) > 0);
    }
    ballast_verify(&b, "beside the words");
    atomic_store(&go, 1);
    for (int i = 0; i < COUNT; i++) {
        /* This may take some time, but must end. */
        int *word = (int *)(words + (size_t)i * 16 * PAGE), tries = 0;
        while (__atomic_load_n(word, __ATOMIC_ACQUIRE) && tries++ < 1000) usleep(10000);
        CHECK(*word == 0, "word %d of %d is not cleared", i, COUNT);
    }
}

/* A killed process holds two robust mutexes: one shared with other processes, and a private one in compressed
 * memory. The kernel reaches the shared one through the private one. */
static void robust_shared(void) {
    struct common { pthread_mutex_t shared; atomic_int is_held; };
    struct common *common = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(common != MAP_FAILED);
    pthread_mutexattr_t how, how_shared;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_init(&how_shared);
    pthread_mutexattr_setrobust(&how_shared, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_setpshared(&how_shared, PTHREAD_PROCESS_SHARED);
    for (int round = 0; round < 3; round++) {
        atomic_store(&common->is_held, 0);
        pthread_mutex_init(&common->shared, &how_shared);
        pid_t pid = fork();
        if (pid == 0) {
            pthread_mutex_t *own = malloc(sizeof *own);
            pthread_mutex_init(own, &how);
            CHECK(pthread_mutex_lock(&common->shared) == 0 && pthread_mutex_lock(own) == 0);
            ballast_make(&b, 4 * limit_bytes(), 6);
            ballast_verify(&b, "who is killed");
            atomic_store(&common->is_held, 1);
            for (;;) pause();
        }
        int status;
        for (pid_t ended = 0; ended == 0 && !atomic_load(&common->is_held); usleep(1000))
            CHECK((ended = waitpid(pid, &status, WNOHANG)) == 0, "it ended: status %#x", status);
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_sec += 5;
        int answer = pthread_mutex_timedlock(&common->shared, &soon);
        CHECK(answer == EOWNERDEAD, "round %d: the shared mutex answers %d", round, answer);
    }
}

/* Processes that share memory also share the locks in it. */
static void shared_locks(void) {
    struct shared { pthread_mutex_t mutex; long count; } *shared;
    ballast_make(&b, 2 * limit_bytes(), 6);
    shared = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&shared->mutex, &how);
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        if ((children[i] = fork()) != 0) continue;
        uint64_t random = i;
        for (int j = 0; j < 3000; j++) {
            pthread_mutex_lock(&shared->mutex);
            shared->count++;
            pthread_mutex_unlock(&shared->mutex);
            if (j % 100 == 0) ballast_churn(&b, 200, &random);
        }
        _exit(0);
    }
    for (int i = 0; i < 4; i++) child_is_well(children[i], "who shares a lock");
    CHECK(shared->count == 12000);
    ballast_verify(&b, "shared locks");
}

/* The main thread ends; the process ends with status 0 when the last thread does. */
static void *last(void *argument) {
    struct ballast own;
    (void)argument;
    usleep(100000);
    ballast_make(&own, 3 * limit_bytes(), 7);
    ballast_verify(&own, "the last thread");
    come_down(5);
    size_t resident = status_mib("VmRSS:");
    if (getenv("ZFOLIO_LIMIT")) CHECK(resident < limit_bytes() / MIB + SLACK_MIB, "%zu MiB resident", resident);
    ballast_verify(&own, "the last thread");
    report("the last thread is done\n", 24);
    return NULL;
}

static void leader_leaves(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, last, NULL) == 0);
    pthread_exit(NULL);
}

/* The same with pressure before the main thread ends. */
/* The last of several threads ends by itself, long after the first, with compressed memory. */
static void *ends_last(void *argument) {
    ballast_verify(&b, "a thread without a leader");
    usleep(100000);
    pthread_exit(argument);
}

static void done(void) { report("the last thread is done\n", 24); }

static void all_leave(void) {
    ballast_make(&b, 3 * limit_bytes(), 7);
    CHECK(atexit(done) == 0);
    pthread_t thread;
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&thread, NULL, ends_last, NULL) == 0);
    pthread_exit(NULL);
}

static void leader_leaves_late(void) {
    pthread_t thread;
    ballast_make(&b, 3 * limit_bytes(), 7);
    CHECK(pthread_create(&thread, NULL, last, NULL) == 0);
    pthread_exit(NULL);
}

static void *idle(void *argument) {
    struct ballast own;
    ballast_make(&own, limit_bytes() / 2, 70 + (size_t)argument);
    uint64_t random = 1;
    for (double until = now() + 1.5; now() < until;) ballast_churn(&own, 100, &random);
    return NULL;
}

/* The C library makes setuid and setgroups in every thread, by signals. */
/* Each thread of the process, including the engine's, has the user and group 65534: real, effective, saved. */
static void nobody_else(void) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        if (task->d_name[0] == '.') continue;
        char path[300], line[256];
        unsigned ids[3];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *status = fopen(path, "r");
        int found = 0;
        while (status && fgets(line, sizeof line, status)) {
            /* The kernel's workers carry requests out with the identity of the thread that sent them. */
            if (strncmp(line, "Name:\tiou-", 10) == 0) {
                found = 2;
                break;
            }
            if (sscanf(line + 4, "%u %u %u", &ids[0], &ids[1], &ids[2]) != 3) continue;
            if (strncmp(line, "Uid:", 4) != 0 && strncmp(line, "Gid:", 4) != 0) continue;
            found++;
            for (int i = 0; i < 3; i++) CHECK(ids[i] == 65534, "thread %s: %s", task->d_name, line);
        }
        CHECK(found == 2, "%s", path);
        fclose(status);
    }
    closedir(tasks);
}

static void identities(void) {
    if (geteuid() != 0) skip("root is needed to change identities");
    ballast_make(&b, 3 * limit_bytes(), 8);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, idle, (void *)i) == 0);
    gid_t groups[] = {1, 2, 3};
    for (int i = 0; i < 50; i++) {
        CHECK(setgroups(i % 3 + 1, groups) == 0);
        CHECK(setegid(i % 2 ? 1 : 0) == 0 && seteuid(i % 2 ? 65534 : 0) == 0 && seteuid(0) == 0);
        uint64_t random = i;
        ballast_churn(&b, 300, &random);
    }
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    nobody_else();
    for (size_t i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    ballast_verify(&b, "nobody");
}

/* A server that gives up root, and then forks. */
static void nobody_forks(void) {
    if (geteuid() != 0) skip("root is needed to change identities");
    ballast_make(&b, 3 * limit_bytes(), 9);
    come_down(10);
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            ballast_verify(&b, "child of nobody");
            _exit(0);
        }
        child_is_well(pid, "child of nobody");
    }
    ballast_verify(&b, "nobody");
}

/* A server that gives up root before it is large. */
static void nobody_grows(void) {
    if (geteuid() != 0) skip("root is needed to change identities");
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    ballast_make(&b, 3 * limit_bytes(), 9);
    int status = open("/proc/self/statm", O_RDONLY);
    char text[100] = "";
    CHECK(status >= 0 && read(status, text, 99) > 0);
    size_t pages = 0;
    sscanf(text, "%*u %zu", &pages);
    ballast_verify(&b, "nobody");
    /* If an unprivileged process may not have a userfaultfd, zfolio says so in one line, which the runner shows. */
    char text_of[80];
    if (pages * PAGE > limit_bytes() + 24 * MIB)
        report(text_of, snprintf(text_of, sizeof text_of, "%zu MiB resident: not held\n", pages * PAGE / MIB));
}

/* A real-time thread spins on the CPU where another thread's faults were served. That other thread, now on another
 * CPU, must make progress. */
static void stay_on(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
}

/* If the handler were stuck, the first look at a compressed page would be the last one: three in four pages are. */
enum { LOOKS = 8, ENOUGH = 3, TRIES = 30 };
static atomic_int spinning, looks, passed;

static void *spinner(void *argument) {
    struct sched_param priority = {.sched_priority = 10};
    stay_on((int)(size_t)argument - 1);
    int refused = sched_setscheduler(0, SCHED_FIFO, &priority);
    atomic_store(&spinning, 1);
    if (refused) return argument;
    /* Less than the second after which the kernel gives other threads some of the CPU anyway. */
    for (double from = now(); atomic_load(&looks) < LOOKS && now() < from + 0.7;) {}
    if (atomic_load(&looks) == LOOKS) atomic_fetch_add(&passed, 1);
    return NULL;
}

static void real_time(void) {
    cpu_set_t given;
    int cpus[2], found = 0;
    CHECK(sched_getaffinity(0, sizeof given, &given) == 0);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++) if (CPU_ISSET(cpu, &given)) cpus[found++] = cpu;
    if (found < 2) skip("two CPUs are needed");
    ballast_make(&b, 4 * limit_bytes(), 10);
    /* On a busy machine 0.7 s on the other CPU, which all other programs share, may be too short. */
    for (int try = 0; atomic_load(&passed) < ENOUGH; try++) {
        CHECK(try < TRIES, "%d of %d times all was well while a real-time thread span", atomic_load(&passed), TRIES);
        /* Its faults are served on this CPU; then it moves to the other one. */
        uint64_t random = try;
        stay_on(cpus[0]);
        ballast_churn(&b, 3000, &random);
        stay_on(cpus[1]);
        atomic_store(&spinning, 0);
        atomic_store(&looks, 0);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, spinner, (void *)(size_t)(cpus[0] + 1)) == 0);
        while (!atomic_load(&spinning)) sched_yield();
        /* Fewer faults than the handler serves before it checks where its thread runs. */
        for (int i = 0; i < LOOKS; i++, atomic_fetch_add(&looks, 1)) ballast_churn(&b, 1, &random);
        void *refused;
        CHECK(pthread_join(thread, &refused) == 0);
        if (refused) skip("SCHED_FIFO is not allowed here");
    }
    CHECK(sched_setaffinity(0, sizeof given, &given) == 0);
    ballast_verify(&b, "real time");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"come_and_go", come_and_go}, {"own_stacks", own_stacks}, {"contexts", contexts}, {"modules", modules},
        {"locks", locks}, {"robust", robust}, {"robust_shared", robust_shared}, {"inherit", inherit},
        {"cleared_words", cleared_words}, {"shared_locks", shared_locks}, {"leader_leaves", leader_leaves},
        {"leader_leaves_late", leader_leaves_late}, {"all_leave", all_leave},
        {"identities", identities}, {"nobody_forks", nobody_forks},
        {"nobody_grows", nobody_grows}, {"real_time", real_time},
    };
    return CHOOSE(cases);
}
