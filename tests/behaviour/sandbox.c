/* A seccomp filter over all threads, also those that the program has not made. */
#include "behaviour.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

static void confine(struct sock_filter *filter, unsigned short length) {
    struct sock_fprog program = {length, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    long answer = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
    if (answer) skip("seccomp filters for all threads are not to be had here");
}

/* From here on no thread may use ioctl, by which memory comes back. */
static void enter(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    confine(filter, 4);
}

/* Before there is an engine: the limit is not held, and all is well. */
static void early(void) {
    enter();
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 1);
    ballast_verify(&b, "a sandbox");
}

/* The same, by a sandbox as Chromium's: files are refused, and what it does not expect is answered by a signal. */
static void trapped(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_unshare, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 1, 2),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    /* No file can be opened any more: what there is to tell is printed. */
    unsetenv("BEHAVIOUR_REPORT");
    confine(filter, 7);
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    ballast_verify(&b, "a sandbox with traps");
}

/* With memory that is compressed: it cannot come back. The process must end, and not wait for ever. */
static void late(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 2);
    enter();
    ballast_verify(&b, "a sandbox");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"early", early}, {"trapped", trapped}, {"late", late}};
    return CHOOSE(cases);
}
