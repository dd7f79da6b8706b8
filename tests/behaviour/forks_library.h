/* What the C library uses during a fork: files, users, handlers, modules. Included by forks.c. */
#ifndef FORKS_LIBRARY_H
#define FORKS_LIBRARY_H
#include "behaviour.h"

/* Threads open and close files while others fork, so that the C library's list of files changes all the time. */
static void *opening(void *argument) {
    uint64_t random = (uint64_t)argument;
    FILE *kept[200] = {0};
    while (!atomic_load(&stop)) {
        FILE **one = &kept[next_random(&random) % 200];
        if (*one) CHECK(fclose(*one) == 0);
        CHECK(*one = fopen("/dev/null", "w"));
        CHECK(fprintf(*one, "%d", (int)random) > 0);
    }
    for (int i = 0; i < 200; i++) if (kept[i]) fclose(kept[i]);
    return NULL;
}

static void streams(void) {
    ballast_make(&b, 3 * limit_bytes(), 15);
    ballast_start(&b);
    pthread_t threads[3];
    for (uint64_t i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, opening, (void *)(i + 7)) == 0);
    for (int round = 0; goes_on(round, 60); round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            FILE *own = tmpfile();
            CHECK(own && fprintf(own, "%d", round) > 0 && fclose(own) == 0);
            CHECK(fflush(NULL) == 0);
            _exit(0);
        }
        child_is_well(pid, "child of threads with files");
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    ballast_stop(&b);
}

/* The C library has its records of users in allocated memory, and reads them during fork. */
static void names(void) {
    CHECK(getpwuid(0) && strcmp(getpwuid(0)->pw_name, "root") == 0);
    ballast_make(&b, 3 * limit_bytes(), 16);
    /* In a process with one thread the C library does not read them. */
    ballast_start(&b);
    for (int round = 0; goes_on(round, 20); round++) {
        usleep(50000);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            CHECK(getpwuid(0) && strcmp(getpwuid(0)->pw_name, "root") == 0);
            _exit(0);
        }
        child_is_well(pid, "child that knows users");
    }
    ballast_stop(&b);
    CHECK(getpwuid(0) && strcmp(getpwuid(0)->pw_name, "root") == 0);
}

/* So many fork handlers that the C library's list of them is allocated memory, which a child reads first. */
static atomic_int handled;
static void handle(void) { atomic_fetch_add(&handled, 1); }

static void handlers(void) {
    enum { HANDLERS = 90, ROUNDS = 40 };
    for (int i = 0; i < HANDLERS; i++) CHECK(pthread_atfork(handle, handle, handle) == 0);
    ballast_make(&b, 3 * limit_bytes(), 17);
    ballast_start(&b);
    for (int round = 0; goes_on(round, ROUNDS); round++) {
        usleep(10000);
        atomic_store(&handled, 0);
        pid_t pid = fork();
        CHECK(pid >= 0);
        CHECK(atomic_load(&handled) == 2 * HANDLERS, "%d handlers ran", atomic_load(&handled));
        if (pid == 0) _exit(0);
        child_is_well(pid, "child of many handlers");
    }
    ballast_stop(&b);
}

/* Modules with thread-local storage: the loader's records of them, and the storage, lie in compressed memory. */
static const char *beside(const char *name) {
    static char path[512];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
    CHECK(length > 0);
    path[length] = 0;
    strcpy(strrchr(path, '/') + 1, name);
    return path;
}

static void *steps(void *argument) {
    uint64_t (*step)(void) = (uint64_t (*)(void))argument;
    for (uint64_t i = 1; i < 100; i++) CHECK(step() == i, "a new thread's own storage");
    /* The C library unwinds the stack, and reads the records of all modules for that. */
    pthread_exit((void *)99ul);
}

static void modules(void) {
    void *module = dlopen(beside("module.so"), RTLD_NOW | RTLD_LOCAL);
    CHECK(module, "%s", dlerror());
    uint64_t (*step)(void) = (uint64_t (*)(void))dlsym(module, "module_step");
    CHECK(step && step() == 1);
    ballast_make(&b, 3 * limit_bytes(), 18);
    for (uint64_t round = 0; round < 5; round++) {
        ballast_verify(&b, "modules");
        pid_t pid = fork();
        CHECK(pid >= 0);
        uint64_t next = step();
        CHECK(next == round + 2, "%lu steps in round %lu", next, round);
        if (pid) {
            child_is_well(pid, "child with modules");
            continue;
        }
        CHECK(dlsym(module, "module_step") == (void *)step);
        void *frames[20], *answer;
        CHECK(backtrace(frames, 20) > 1);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, steps, (void *)step) == 0);
        CHECK(pthread_join(thread, &answer) == 0 && answer == (void *)99ul);
        CHECK(dlopen(beside("module.so"), RTLD_NOW) == module && step() == next + 1);
        exit(0);
    }
    ballast_verify(&b, "modules, at last");
}
#endif
