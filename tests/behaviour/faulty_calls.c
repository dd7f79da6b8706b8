/* Executes a program whose reads and writes at an offset go wrong when it is told so. The file of the first argument is
 * looked at before each of them: it has a letter and a number.
 *
 *   r, w, b   reads go wrong; writes; both
 *   R, W, B   the same for three of four calls at a place, so that somebody who tries again gets on
 *   else      none
 *
 * The number is the error with which they end. 0: a call moves half of its bytes, and says so. -1: the same, and the
 * call after it gets an answer that no kernel gives. -2: a call is not answered until the file says something else.
 * How many have gone wrong is written to the file, as a word at its byte 8.
 *
 * Only direct transfers are hit (O_DIRECT), of files without a name and of block devices: what zfolio spills to, and
 * not the temporary files of sqlite. No io_uring is granted, whose transfers nobody sees.
 *
 * A filter has the kernel ask a supervisor about each such call (seccomp's user notification). */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
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

/* Neither an error of Linux nor a count of bytes. */
enum { IMPOSSIBLE = -5000 };

/* In place of an error: see above. */
enum { ALTERNATE = -1, STALL = -2 };

enum { HELD_MAX = 4096 };

/* What goes wrong: a letter, and an error or 0. */
struct fault {
    char letter;
    int error;
};

static struct fault told(int letters) {
    struct fault fault = {0, 0};
    char text[9] = "";
    /* The count of what went wrong is behind it. */
    if (pread(letters, text, sizeof text - 1, 0) > 0) sscanf(text, "%c%d", &fault.letter, &fault.error);
    return fault;
}

/* Whether this is the fourth call at a place. Places that share a word only make it another one of four. */
static int is_spared(uint64_t offset) {
    static unsigned char calls[1 << 16];
    return ++calls[offset / 4096 % sizeof calls] % 4 == 0;
}

/* Whether a call is to go wrong. The thread that made it waits, and its descriptor is in its own table of files. */
static int is_hit(const struct seccomp_notif *asked, struct fault fault) {
    char path[64];
    unsigned flags = 0;
    struct stat about;
    int is_read = asked->data.nr == SYS_pread64, letter = tolower(fault.letter);
    if (!(letter == 'b' || letter == (is_read ? 'r' : 'w'))) return 0;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", asked->pid, (int)asked->data.args[0]);
    if (stat(path, &about) != 0 || !((S_ISREG(about.st_mode) && about.st_nlink == 0) || S_ISBLK(about.st_mode)))
        return 0;
    snprintf(path, sizeof path, "/proc/%u/fdinfo/%d", asked->pid, (int)asked->data.args[0]);
    FILE *info = fopen(path, "re");
    int found = info && fscanf(info, "pos: %*d flags: %o", &flags) == 1;
    if (info) fclose(info);
    if (!found || !(flags & O_DIRECT)) return 0;
    return letter == fault.letter || !is_spared(asked->data.args[3]);
}

/* Moves a part of what a thread asks for, between its file and its memory. Returns how much; 0: it cannot be done. */
static ssize_t move_part(int listener, const struct seccomp_notif *asked) {
    static char bytes[1 << 20] __attribute__((aligned(4096)));
    char path[64];
    size_t part = asked->data.args[2] / 2;
    off_t place = asked->data.args[1], offset = asked->data.args[3];
    ssize_t moved = 0;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", asked->pid, (int)asked->data.args[0]);
    int file = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    snprintf(path, sizeof path, "/proc/%u/mem", asked->pid);
    int memory = open(path, O_RDWR | O_CLOEXEC);
    if (part > sizeof bytes) part = sizeof bytes;
    /* What was opened is that thread's only if it still waits: its number may be another's by now. */
    int waits = file >= 0 && memory >= 0 && ioctl(listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &asked->id) == 0;
    /* In sectors, so that a part may end within a slot; else in pages: the device may have larger sectors. */
    for (size_t unit = 512; waits && moved <= 0 && unit <= 4096; unit *= 8) {
        size_t length = part / unit * unit;
        if (length == 0) break;
        if (asked->data.nr == SYS_pread64) {
            moved = pread(file, bytes, length, offset);
            if (moved > 0 && pwrite(memory, bytes, moved, place) != moved) moved = 0;
        } else if (pread(memory, bytes, length, place) == (ssize_t)length) {
            moved = pwrite(file, bytes, length, offset);
        }
    }
    if (file >= 0) close(file);
    if (memory >= 0) close(memory);
    return moved < 0 ? 0 : moved;
}

/* Answers a thread, which may have been killed meanwhile. */
static void reply(int listener, struct seccomp_notif_resp answer) {
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
}

/* The answer after which the kernel carries out what a thread has asked for. */
static struct seccomp_notif_resp go_on(uint64_t id) {
    return (struct seccomp_notif_resp){id, 0, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE};
}

/* Counts a call that went wrong. */
static void count_hit(int letters, uint64_t *hits) {
    ++*hits;
    if (pwrite(letters, hits, sizeof *hits, 8) != sizeof *hits) _exit(1);
}

/* Answers until no process has the filter any more. */
static void supervise(int listener, int letters) {
    static uint64_t held[HELD_MAX];
    struct pollfd ready = {listener, POLLIN, 0};
    uint64_t hits = 0;
    for (int holds = 0;;) {
        int found = poll(&ready, 1, holds > 0 ? 10 : -1);
        if (found < 0 || (ready.revents & (POLLHUP | POLLERR))) break;
        if (holds > 0 && told(letters).error != STALL) {
            while (holds > 0) reply(listener, go_on(held[--holds]));
        }
        if (found == 0) continue;
        struct seccomp_notif asked;
        memset(&asked, 0, sizeof asked);
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) != 0) continue;
        struct seccomp_notif_resp answer = go_on(asked.id);
        struct fault fault = told(letters);
        if (is_hit(&asked, fault)) {
            if (fault.error == STALL && holds < HELD_MAX) {
                held[holds++] = asked.id;
                count_hit(letters, &hits);
                continue;
            }
            answer.error = fault.error > 0 ? -fault.error : 0;
            if (fault.error == ALTERNATE && hits % 2 == 1) answer.val = IMPOSSIBLE;
            else if (fault.error <= 0) answer.val = move_part(listener, &asked);
            if (answer.error || answer.val) {
                answer.flags = 0;
                count_hit(letters, &hits);
            }
        }
        reply(listener, answer);
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
    int ends[2], letters = count < 3 ? -1 : open(arguments[1], O_RDWR | O_CLOEXEC);
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
