/* Executes a program whose reads and writes at an offset fail when it is told so: the file of the first argument has a
 * letter, which is looked at before each of them. `r`: reads end with EIO; `w`: writes do; `b`: both; else none. Only
 * direct transfers are hit (O_DIRECT), of files without a name and of block devices: what zfolio spills to, and not the
 * temporary files of sqlite. No io_uring is granted, whose transfers nobody sees.
 *
 * A filter has the kernel ask a supervisor about each such call (seccomp's user notification). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    _exit(1);
}

/* Whether a call is to fail. The thread that made it waits, and its descriptor is in its own table of files. */
static int is_hit(const struct seccomp_notif *asked, int letters) {
    char letter = 0, path[64];
    unsigned flags = 0;
    struct stat about;
    int is_read = asked->data.nr == SYS_pread64;
    if (pread(letters, &letter, 1, 0) != 1 || !(letter == 'b' || letter == (is_read ? 'r' : 'w'))) return 0;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", asked->pid, (int)asked->data.args[0]);
    if (stat(path, &about) != 0 || !((S_ISREG(about.st_mode) && about.st_nlink == 0) || S_ISBLK(about.st_mode)))
        return 0;
    snprintf(path, sizeof path, "/proc/%u/fdinfo/%d", asked->pid, (int)asked->data.args[0]);
    FILE *info = fopen(path, "re");
    int found = info && fscanf(info, "pos: %*d flags: %o", &flags) == 1;
    if (info) fclose(info);
    return found && flags & O_DIRECT;
}

/* Answers until no process has the filter any more. */
static void supervise(int listener, int letters) {
    struct pollfd ready = {listener, POLLIN, 0};
    while (poll(&ready, 1, -1) > 0 && !(ready.revents & (POLLHUP | POLLERR))) {
        struct seccomp_notif asked;
        memset(&asked, 0, sizeof asked);
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0) continue;
        struct seccomp_notif_resp answer = {asked.id, 0, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE};
        if (is_hit(&asked, letters)) {
            answer.error = -EIO;
            answer.flags = 0;
        }
        /* The thread may have been killed meanwhile. */
        ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
}

static int receive_file(int from) {
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec bytes = {&byte, 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    if (recvmsg(from, &message, 0) != 1 || !CMSG_FIRSTHDR(&message)) _exit(1);
    return *(int *)CMSG_DATA(CMSG_FIRSTHDR(&message));
}

static void send_file(int to, int file) {
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec bytes = {&byte, 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    *(int *)CMSG_DATA(header) = file;
    if (sendmsg(to, &message, 0) != 1) fail("sendmsg");
}

int main(int count, char **arguments) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pread64, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pwrite64, 0, 2),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    int ends[2], letters = count < 3 ? -1 : open(arguments[1], O_RDONLY | O_CLOEXEC);
    if (letters < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("faulty_calls");
    /* Twice, so that the supervisor is no child of the program's. In a session of its own, so that it outlives all. */
    pid_t between = fork();
    if (between == 0) {
        if (fork() == 0) {
            setsid();
            for (int standard = 0; standard < 3; standard++) close(standard);
            close(ends[0]);
            supervise(receive_file(ends[1]), letters);
        }
        _exit(0);
    }
    waitpid(between, NULL, 0);
    close(ends[1]);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) fail("no_new_privs");
    int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
    if (listener < 0) fail("seccomp");
    send_file(ends[0], listener);
    close(listener);
    execvp(arguments[2], arguments + 2);
    fail(arguments[2]);
}
