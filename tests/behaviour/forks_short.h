/* Forks in a process that lacks something: address space, threads, a userfaultfd. Included by forks.c. */
#ifndef FORKS_SHORT_H
#define FORKS_SHORT_H
#include "behaviour.h"

/* With little address space left fork works or fails with ENOMEM, and the parent continues. */
static void no_room(void) {
    ballast_make(&b, 4 * limit_bytes(), 14);
    int kinds[] = {RLIMIT_DATA, RLIMIT_AS};
    const char *names[] = {"VmData:", "VmSize:"};
    int worked = 0, failed_so = 0;
    for (int i = 0; i < 2; i++) {
        char text[256];
        size_t used = 0;
        FILE *status = fopen("/proc/self/status", "r");
        while (fgets(text, sizeof text, status))
            if (!strncmp(text, names[i], 7)) used = strtoull(text + 7, NULL, 10) << 10;
        fclose(status);
        CHECK(used > 4 * limit_bytes());
        for (size_t more = 0; more <= 8 * MIB; more += more < 3 * MIB ? 256 * 1024 : 1 * MIB) {
            struct rlimit limit = {used + more, RLIM_INFINITY};
            CHECK(setrlimit(kinds[i], &limit) == 0);
            pid_t pid = fork();
            if (pid == 0) {
                if (more % MIB == 0) ballast_verify(&b, "child with little room");
                _exit(0);
            }
            if (pid < 0) {
                CHECK(errno == ENOMEM);
                failed_so++;
                continue;
            }
            child_is_well(pid, "child with little room");
            worked++;
        }
        struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY};
        CHECK(setrlimit(kinds[i], &none) == 0);
        ballast_verify(&b, "parent with little room");
    }
    CHECK(worked > 0 && worked + failed_so > 30);
}

/* Memory that is to be wiped in a child reads as zeros there, whichever call requested it, also if a raw call has
 * moved it before, and if one has moved it since, to where memory was that a raw call has unmapped, and the C library's
 * call has moved it on. */
static void wiped(void) {
    for (int kind = 0; kind < 8; kind++) {
        int raw = kind & 1, is_moved = kind & 2, moves_on = kind & 4;
        size_t bytes = 3 * limit_bytes();
        char *secret = map_anonymous(bytes);
        if (is_moved) {
            fill(secret, bytes, 5);
            char *far = (char *)(1ul << 40);
            CHECK((char *)syscall(SYS_mremap, secret, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, far) == far);
            secret = far;
        }
        if (raw) CHECK(syscall(SYS_madvise, secret, bytes, MADV_WIPEONFORK) == 0);
        else CHECK(madvise(secret, bytes, MADV_WIPEONFORK) == 0);
        if (moves_on) {
            char *gone = map_anonymous(bytes), *last = map_anonymous(bytes);
            fill(gone, bytes, 7);
            CHECK(syscall(SYS_munmap, gone, bytes) == 0);
            CHECK((char *)syscall(SYS_mremap, secret, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, gone) == gone);
            CHECK((secret = mremap(gone, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, last)) == last);
        }
        fill(secret, bytes, 6);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            for (size_t at = 0; at < bytes; at += PAGE)
                CHECK(page_is_zero(secret + at), "page %zu, kind %d", at / PAGE, kind);
            _exit(0);
        }
        child_is_well(pid, "child of wiped memory");
        verify(secret, bytes, 6, "what the child has not");
        CHECK(munmap(secret, bytes) == 0);
    }
}

/* A child maps memory where it has not inherited any. The parts before and behind that lie in the same folios. The
 * advice comes by the C library's function or, in a process of its own, by syscall(2). */
static int by_syscall;

static int advise(void *at, size_t bytes, int advice) {
    return by_syscall ? (int)syscall(SYS_madvise, at, bytes, advice) : madvise(at, bytes, advice);
}

static void not_inherited(void) {
    ballast_make(&b, 2 * limit_bytes(), 4);
    size_t before = 4 * MIB + 5 * PAGE, part = 2 * MIB, all = 8 * MIB;
    char *block = map_anonymous(all), *gone = block + before;
    for (int kind = 0; kind < 4; kind++) {
        int raw = kind & 1, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        fill(block, all, 10 + kind);
        if (kind == 2) CHECK(advise(gone, part, MADV_DOFORK) == 0 && advise(gone, part, MADV_DONTFORK) == 0);
        if (kind == 0) CHECK(advise(gone, part, MADV_DONTFORK) == 0);
        uint64_t random = kind;
        ballast_churn(&b, b.pages / 2, &random);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            char *at = raw ? (char *)syscall(SYS_mmap, gone, part, PROT_READ | PROT_WRITE, flags, -1, 0)
                           : mmap(gone, part, PROT_READ | PROT_WRITE, flags, -1, 0);
            CHECK(at == gone);
            for (size_t i = 0; i < part; i += PAGE) CHECK(page_is_zero(gone + i), "kind %d page %zu", kind, i / PAGE);
            fill(gone, part, 9000);
            ballast_churn(&b, b.pages, &random);
            verify(gone, part, 9000, "what a child maps itself");
            verify(block, before, 10 + kind, "before it");
            verify(gone + part, all - before - part, 10 + kind + (before + part) / PAGE, "behind it");
            ballast_verify(&b, "child without a part");
            _exit(0);
        }
        child_is_well(pid, "child without a part");
        verify(block, all, 10 + kind, "a parent");
    }
    ballast_verify(&b, "parent");
}

static void not_inherited_by_syscall(void) {
    by_syscall = 1;
    not_inherited();
}

/* A child that cannot have an engine still has its memory, and zfolio prints that the limit is not held. */
static void child_without(const char *what) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    uint64_t random = pid ? 7 : 8;
    ballast_verify(&b, what);
    ballast_churn(&b, b.pages / 4, &random);
    ballast_verify(&b, what);
    if (pid == 0) {
        /* Its own child has the same memory. */
        pid_t next = fork();
        CHECK(next >= 0);
        ballast_verify(&b, what);
        if (next == 0) _exit(0);
        child_is_well(next, what);
        _exit(0);
    }
    child_is_well(pid, what);
    ballast_verify(&b, what);
}

static void no_threads(void) {
    ballast_make(&b, 4 * limit_bytes(), 15);
    struct sock_filter filter[RULE + 1];
    forbid(filter, SYS_clone, 0, CLONE_THREAD, SECCOMP_RET_ERRNO | EAGAIN);
    confine(filter, RULE + 1, 0);
    child_without("without threads");
}

static void no_userfaultfd(void) {
    ballast_make(&b, 4 * limit_bytes(), 16);
    struct sock_filter filter[2 * RULE + 1];
    forbid(filter, SYS_userfaultfd, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    forbid(filter + RULE, SYS_ioctl, 1, 0xaa00, SECCOMP_RET_ERRNO | EPERM); /* USERFAULTFD_IOC_NEW */
    confine(filter, 2 * RULE + 1, 0);
    child_without("without a userfaultfd");
}

/* Nothing more can be opened, also by whoever is to say so. */
static void no_files(void) {
    ballast_make(&b, 4 * limit_bytes(), 18);
    struct rlimit none = {3, 3};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    child_without("without files");
}

/* With 1: from here on the program's threads can open no file, until a call with 0. zfolio's threads can: their table
 * of files is another. */
static void without_files(int are_none) {
    static struct rlimit before;
    static int taken[64];
    if (are_none) {
        CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
        struct rlimit few = {64, before.rlim_max};
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
        for (int i = 0, file; (file = dup(1)) >= 0;) taken[i++] = file;
        return;
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    for (int i = 0; i < 64 && taken[i] > 0; i++) close(taken[i]), taken[i] = 0;
}

/* Gives root up, and with it the permission to have a userfaultfd. */
static void become_nobody(void) {
    if (geteuid() != 0) skip("root is needed to change identities");
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    int of_all = syscall(SYS_userfaultfd, O_CLOEXEC), device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (of_all >= 0 || device >= 0) skip("everybody may have a userfaultfd");
}

/* A process whose children cannot have what it needs: it is not managed from its first fork on, in whichever way its
 * memory came later, and that is said once. What cannot be had is a file, and only while it forks; or a userfaultfd. */
static void giving_up(int is_file) {
    /* With an end that is no whole folio. */
    size_t part = 2 * limit_bytes(), odd = part + 5 * PAGE;
    ballast_make(&b, part, 19);
    char *replaced = map_anonymous(part), *moved = map_anonymous(odd);
    fill(replaced, part, 20), fill(moved, odd, 21);
    come_down(10);
    if (is_file) without_files(1);
    else become_nobody();
    child_without("before it gave up");
    if (is_file) without_files(0);
    char *fresh = map_anonymous(part);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    CHECK(mmap(replaced, part, PROT_READ | PROT_WRITE, flags, -1, 0) == replaced);
    CHECK((moved = mremap(moved, odd, 2 * odd, MREMAP_MAYMOVE)) != MAP_FAILED);
    fill(fresh, part, 22), fill(replaced, part, 23), fill(moved + odd, odd, 21 + odd / PAGE);
    /* All of this was written to, and nothing goes out any more. The kernel's own figures may be some pages off. */
    size_t all = 3 * part + 2 * odd, here = kib_in("/proc/self/status", "RssAnon:");
    CHECK(here + kib_in("/proc/self/status", "VmSwap:") >= (all - MIB) >> 10, "%zu KiB of %zu", here, all >> 10);
    for (int i = 0; i < 2; i++) {
        if (is_file) without_files(1);
        child_without("after it gave up");
        pid_t pid = fork();
        CHECK(pid >= 0);
        verify(fresh, part, 22, "new memory"), verify(replaced, part, 23, "memory in the place of other");
        verify(moved, 2 * odd, 21, "memory that grew");
        if (pid == 0) _exit(0);
        child_is_well(pid, "after it gave up");
        if (is_file) without_files(0);
    }
}

static void given_up(void) { giving_up(0); }

/* With memory that does not compress: its file cannot be opened for a child. */
static void given_up_spilled(void) { giving_up(1); }

static char group[256];

static void leave_group(void) {
    char path[300];
    snprintf(path, sizeof path, "%s/../cgroup.procs", group);
    FILE *file = fopen(path, "w");
    if (file) fprintf(file, "%d", getpid()), fclose(file);
    rmdir(group);
}

/* The limit on threads and processes together. */
static void allow_tasks(int tasks) {
    char path[300];
    snprintf(path, sizeof path, "%s/pids.max", group);
    FILE *file = fopen(path, "w");
    CHECK(file && fprintf(file, "%d", tasks) > 0 && fclose(file) == 0);
}

static int tasks_now(void) {
    char path[300];
    int tasks = 0;
    snprintf(path, sizeof path, "%s/pids.current", group);
    FILE *file = fopen(path, "r");
    CHECK(file && fscanf(file, "%d", &tasks) == 1 && fclose(file) == 0);
    return tasks;
}

/* A child may get none, some or all of the threads that an engine needs. */
static void few_threads(void) {
    snprintf(group, sizeof group, "/sys/fs/cgroup/pids/zfolio-behaviour-%d", getpid());
    if (mkdir(group, 0755)) skip("no cgroup of version 1 that limits threads can be made");
    atexit(leave_group);
    char path[300];
    snprintf(path, sizeof path, "%s/cgroup.procs", group);
    FILE *file = fopen(path, "w");
    CHECK(file && fprintf(file, "%d", getpid()) > 0 && fclose(file) == 0);
    ballast_make(&b, 4 * limit_bytes(), 17);
    int refused = 0;
    for (int more = 0; more < 7; more++) {
        allow_tasks(tasks_now() + more);
        pid_t pid = fork();
        if (pid == 0) {
            ballast_verify(&b, "with few threads");
            _exit(0);
        }
        if (pid < 0) {
            CHECK(errno == EAGAIN);
            refused++;
            continue;
        }
        child_is_well(pid, "a child with few threads");
        ballast_verify(&b, "the parent of such a child");
    }
    CHECK(refused == 1);
}
#endif
