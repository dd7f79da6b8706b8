/* A seccomp filter over all threads, also those that the program has not made. */
#include "behaviour.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

/* From here on no thread may use ioctl, by which memory comes back. */
static void enter(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    long answer = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
    if (answer) skip("seccomp filters for all threads are not to be had here");
}

/* Before there is an engine: the limit is not held, and all is well. */
static void early(void) {
    enter();
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 1);
    ballast_verify(&b, "a sandbox");
}

/* With memory that is compressed: it cannot come back. The process must end, and not wait for ever. */
static void late(void) {
    static struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 2);
    enter();
    ballast_verify(&b, "a sandbox");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"early", early}, {"late", late}};
    return CHOOSE(cases);
}
