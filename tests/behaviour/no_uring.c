/* Executes a program that may not have an io_uring, as in most containers. */
#define _GNU_SOURCE
#include "behaviour.h"

int main(int count, char **arguments) {
    struct sock_filter filter[RULE + 1];
    forbid(filter, SYS_io_uring_setup, 0, 0, SECCOMP_RET_ERRNO | EPERM);
    confine(filter, RULE + 1, 0);
    return execute(count, arguments);
}
