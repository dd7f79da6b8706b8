/* Ways to end; the runner checks the exit status and the output of `zfolio run` for each. */
#include "behaviour.h"
#include <sys/resource.h>

static void on_term(int number) {
    (void)number;
    _exit(33);
}

static struct ballast b;

static void *writer(void *argument) {
    uint64_t random = 9;
    for (;;) ballast_churn(&b, 100, &random);
    return argument;
}

int main(int count, char **arguments) {
    struct rlimit none = {0, 0};
    if (count < 2) return 2;
    if (strcmp(arguments[1], "core")) setrlimit(RLIMIT_CORE, &none);
    ballast_make(&b, 3 * limit_bytes(), 1);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, writer, NULL) == 0);
    if (!strcmp(arguments[1], "status")) return atoi(arguments[2]);
    if (!strcmp(arguments[1], "_exit")) _exit(atoi(arguments[2]));
    if (!strcmp(arguments[1], "signal")) {
        int number = atoi(arguments[2]);
        if (number == SIGABRT) abort();
        if (number == SIGSEGV) *(volatile int *)NULL = 1;
        kill(getpid(), number);
    }
    if (!strcmp(arguments[1], "core")) {
        struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
        if (setrlimit(RLIMIT_CORE, &all) != 0) return 77;
        come_down(60);
        abort();
    }
    if (!strcmp(arguments[1], "term")) {
        signal(SIGTERM, on_term);
        printf("ready\n");
        fflush(stdout);
    }
    if (!strcmp(arguments[1], "epipe")) {
        signal(SIGPIPE, SIG_IGN);
        sleep(1);
        for (int i = 0; i < 100000; i++)
            if (write(1, "line\n", 5) < 0) return errno == EPIPE ? 7 : 8;
    }
    for (;;) pause();
}
