/* A seccomp filter over all threads, including those that the program did not start. */
#include "behaviour.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

/* UFFDIO_MOVE, which older headers lack. */
#define UFFDIO_MOVE_CALL 0xC028AA05

/* Forbids a call to every thread from here on. */
static void forbid_to_all(long call) {
    struct sock_filter filter[RULE + 1];
    forbid(filter, call, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    confine(filter, RULE + 1, SECCOMP_FILTER_FLAG_TSYNC);
}

/* Without ioctl no compressed memory comes back. */
static void enter(void) { forbid_to_all(SYS_ioctl); }

/* Before there is an engine: the limit is not held, and all is well. */
static void early(void) {
    enter();
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 1);
    ballast_verify(&b, "a sandbox");
}

/* The same with a sandbox like Chromium's: it refuses to open files, and answers unexpected calls by a signal. */
static void trapped(void) {
    struct sock_filter filter[3 * RULE + 1];
    forbid(filter, SYS_unshare, 0, 0, SECCOMP_RET_TRAP);
    forbid(filter + RULE, SYS_open, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    forbid(filter + 2 * RULE, SYS_openat, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    /* No file can be opened any more, so the result goes to standard output. */
    unsetenv("BEHAVIOUR_REPORT");
    confine(filter, 3 * RULE + 1, SECCOMP_FILTER_FLAG_TSYNC);
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    ballast_verify(&b, "a sandbox with traps");
}

/* The same where opening a file is answered by a signal too, which the program takes for a refusal. */
static void refuse(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -EACCES;
}

static void trapped_files(void) {
    struct sigaction action = {.sa_sigaction = refuse, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &action, NULL) == 0);
    struct sock_filter filter[2 * RULE + 1];
    forbid(filter, SYS_open, 0, 0, SECCOMP_RET_TRAP);
    forbid(filter + RULE, SYS_openat, 0, 0, SECCOMP_RET_TRAP);
    unsetenv("BEHAVIOUR_REPORT");
    confine(filter, 2 * RULE + 1, SECCOMP_FILTER_FLAG_TSYNC);
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    ballast_verify(&b, "a sandbox with traps for files");
}

/* A child of fork that can have neither userfaultfds, nor its memory as a file: its memory is there. */
static void forked(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 5);
    /* The engine starts in a thread of its own, late on a busy machine; the child is to be one of a managed process. */
    for (int turn = 0; getenv("ZFOLIO_LIMIT") && status_mib("RssAnon:") > 2 * limit_bytes() / MIB; turn++) {
        CHECK(turn < 6000);
        usleep(10000);
    }
    struct sock_filter filter[3 * RULE + 1];
    forbid(filter, SYS_unshare, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    forbid(filter + RULE, SYS_open, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    forbid(filter + 2 * RULE, SYS_openat, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    unsetenv("BEHAVIOUR_REPORT");
    confine(filter, 3 * RULE + 1, 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ballast_verify(&b, "a child in a sandbox");
        _exit(7);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "%#x", status);
    ballast_verify(&b, "its parent");
}

/* Nobody may ask what is resident (mincore): pages that are shared with a child still go out. */
static void blind(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 6);
    forbid_to_all(SYS_mincore);
    pid_t child = fork();
    CHECK(child >= 0);
    uint64_t random = child;
    ballast_churn(&b, b.pages, &random);
    ballast_verify(&b, "beside a blind engine");
    if (child == 0) _exit(0);
    child_is_well(child, "a blind child");
}

/* The same, with memory that the child does not inherit: what it maps there is new. */
static void blind_holes(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 8);
    come_down(10);
    forbid_to_all(SYS_mincore);
    size_t first = b.pages / 3 + 5, pages = 1000;
    char *hole = b.start + first * PAGE;
    CHECK(madvise(hole, pages * PAGE, MADV_DONTFORK) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(mmap(hole, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == hole);
        for (size_t page = 0; page < pages; page++)
            CHECK(page_is_zero(hole + page * PAGE), "page %zu of a new mapping", page);
        fill(hole, pages * PAGE, 9);
        for (size_t page = 0; page < b.pages; page++) {
            uint64_t seed = page - first < pages ? 9 + page - first : ballast_seed(&b, page);
            CHECK(page_is(b.start + page * PAGE, seed), "page %zu of a blind child", page);
        }
        _exit(0);
    }
    child_is_well(child, "a blind child");
    ballast_verify(&b, "beside a blind child");
}

/* With compressed memory, which cannot come back: the process must end, and not wait for ever. */
static void late(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 2);
    come_down(10);
    enter();
    ballast_verify(&b, "a sandbox");
}

/* The same with other filters. Memory has gone out and come back before, so that there are slots to copy from. Either
 * the process ends, or all is as it must be. */
static void late_filter(struct sock_filter *filter, unsigned short length, int rounds) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 2);
    come_down(10);
    uint64_t random = 1;
    ballast_churn(&b, b.pages / 2, &random);
    confine(filter, length, SECCOMP_FILTER_FLAG_TSYNC);
    for (int round = 0; round < rounds; round++) {
        ballast_churn(&b, b.pages, &random);
        char *fresh = map_anonymous(MIB);
        CHECK(page_is_zero(fresh));
        fill(fresh, MIB, round);
        verify(fresh, MIB, round, "new memory");
        /* A page that is missing where all is resident: it is zeros (UFFDIO_ZEROPAGE). */
        if (madvise(fresh, PAGE, MADV_DONTNEED) == 0) CHECK(page_is_zero(fresh));
        CHECK(munmap(fresh, MIB) == 0);
    }
    ballast_verify(&b, "a sandbox");
}

/* The line about it comes also where nobody may look into another table of files. */
static void late_files(void) {
    struct sock_filter filter[2 * RULE + 1];
    forbid(filter, SYS_pidfd_getfd, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    forbid(filter + RULE, SYS_ioctl, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    late_filter(filter, 2 * RULE + 1, 0);
}

/* And where who tries is killed, as by systemd's @system-service. */
static void late_killed(void) {
    struct sock_filter filter[2 * RULE + 1];
    forbid(filter, SYS_pidfd_getfd, 0, 0, SECCOMP_RET_KILL_PROCESS);
    forbid(filter + RULE, SYS_ioctl, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    late_filter(filter, 2 * RULE + 1, 0);
}

/* A Landlock under which no file can be read, as seen by the thread that makes the engine's: the limit is held. */
static void landlocked(void) {
    const uint64_t reads = 4; /* LANDLOCK_ACCESS_FS_READ_FILE */
    if (geteuid() != 0) skip("the engine of others than root may need a file");
    if (prctl(PR_GET_SECCOMP, 0, 0, 0, 0) != 0) skip("a filter, which may be what refuses files");
    int rules = syscall(SYS_landlock_create_ruleset, &reads, sizeof reads, 0);
    if (rules < 0) skip("no Landlock here");
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(SYS_landlock_restrict_self, rules, 0) == 0);
    CHECK(close(rules) == 0 && open("/proc/self/statm", O_RDONLY) == -1 && errno == EACCES);
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 5);
    ballast_verify(&b, "behind Landlock");
}

/* A filter that kills for calls of sockets, as systemd's ~@network-io: zfolio makes none, whatever its lines go to. */
static void killed_sockets(void) {
    const unsigned calls[] = {SYS_socket, SYS_connect, SYS_getpeername, SYS_getsockname, SYS_getsockopt, SYS_sendmsg};
    struct sock_filter filter[6 * RULE + 1];
    for (int i = 0; i < 6; i++) forbid(filter + i * RULE, calls[i], 0, 0, SECCOMP_RET_KILL_PROCESS);
    confine(filter, 6 * RULE + 1, SECCOMP_FILTER_FLAG_TSYNC);
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 4);
    ballast_verify(&b, "without sockets");
    pid_t child = fork();
    if (child == 0) {
        ballast_verify(&b, "a child without sockets");
        _exit(0);
    }
    child_is_well(child, "a child without sockets");
}

/* Pages can be moved, and no new ones can be made. */
static void late_copies(void) {
    struct sock_filter filter[RULE + 1];
    forbid(filter, SYS_ioctl, 1, UFFDIO_COPY, SECCOMP_RET_ERRNO | EPERM);
    late_filter(filter, RULE + 1, 60);
}

/* No pages of zeros. */
static void late_zeros(void) {
    struct sock_filter filter[2 * RULE + 1];
    /* UFFDIO_MOVE has the bits of UFFDIO_ZEROPAGE. */
    forbid(filter, SYS_ioctl, 1, UFFDIO_MOVE_CALL, SECCOMP_RET_ALLOW);
    forbid(filter + RULE, SYS_ioctl, 1, UFFDIO_ZEROPAGE, SECCOMP_RET_ERRNO | ENOSYS);
    late_filter(filter, 2 * RULE + 1, 60);
}

/* Pages can be copied, and not moved: nothing goes out any more, and all comes back. */
static void late_moves(void) {
    struct sock_filter filter[RULE + 1];
    forbid(filter, SYS_ioctl, 1, UFFDIO_MOVE_CALL, SECCOMP_RET_ERRNO | EPERM);
    late_filter(filter, RULE + 1, 2);
}

/* The pages of slots cannot be given back: what stays there is nobody's. */
static void late_advice(void) {
    struct sock_filter filter[RULE + 1];
    forbid(filter, SYS_madvise, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    late_filter(filter, RULE + 1, 60);
}

/* With memory on disk, and without io_uring from here on: plain calls bring it back. Run with noise. */
static void ring(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 4);
    come_down(60);
    forbid_to_all(SYS_io_uring_enter);
    ballast_verify(&b, "a sandbox without io_uring");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"early", early}, {"trapped", trapped}, {"late", late},
                                       {"late_copies", late_copies}, {"late_zeros", late_zeros},
                                       {"late_moves", late_moves}, {"late_advice", late_advice},
                                       {"late_files", late_files}, {"ring", ring},
                                       {"late_killed", late_killed},
                                       {"killed_sockets", killed_sockets}, {"landlocked", landlocked},
                                       {"trapped_files", trapped_files}, {"forked", forked},
                                       {"blind", blind}, {"blind_holes", blind_holes}};
    return CHOOSE(cases);
}
