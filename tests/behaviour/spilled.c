/* Memory of noise that is written, verified and changed on command, so that the runner can do something to the disk in
 * between. Each word of a page follows from the page's number and from how often the page was written.
 *
 * Lines on standard input, each answered by one line:
 *
 *   fill N    N pages more, or as many as there is address space for
 *   verify    all pages
 *   change N  every Nth page is written again
 *   fork      a child verifies all, changes a third, verifies again and ends
 *   rest      a child sleeps for half a second and ends
 *   stay      a child writes pages until it is killed; its PID is printed
 *   wait      for it
 *   turns N   N mappings come and go, and N children
 *   beside N  the same, while a thread verifies all pages
 *   join      for that thread
 *   end
 */
#include <semaphore.h>

#include "behaviour.h"

enum { PAGES_MAX = 1 << 18 };

static char *pages[PAGES_MAX / 256];
/* How often each page was written. */
static uint32_t rounds[PAGES_MAX];
static unsigned count;

static uint64_t *page_of(unsigned page) { return (uint64_t *)(pages[page / 256] + page % 256 * PAGE); }

static uint64_t seed_of(unsigned page) { return mix((uint64_t)page << 32 | rounds[page]); }

static void write_page(unsigned page) {
    rounds[page]++;
    uint64_t seed = seed_of(page), *words = page_of(page);
    for (int i = 0; i < 512; i++) words[i] = pattern(seed, i, 1);
}

/* The pages that have another byte than was written. */
static unsigned wrong(unsigned *first) {
    unsigned wrong = 0;
    for (unsigned page = 0; page < count; page++) {
        uint64_t seed = seed_of(page), difference = 0, *words = page_of(page);
        for (int i = 0; i < 512; i++) difference |= words[i] ^ pattern(seed, i, 1);
        if (difference && !wrong++) *first = page;
    }
    return wrong;
}

/* Whether there was memory for all of them. */
static int grow(unsigned more) {
    for (; more > 0; more--, count++) {
        if (count % 256 == 0) {
            char *made = mmap(NULL, 256 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (made == MAP_FAILED && errno == ENOMEM) return 0;
            CHECK(made != MAP_FAILED);
            pages[count / 256] = made;
        }
        write_page(count);
    }
    return 1;
}

static int in_child(void) {
    unsigned first;
    if (wrong(&first)) return 1;
    for (unsigned page = 0; page < count; page += 3) write_page(page);
    return wrong(&first) ? 2 : 0;
}

/* The thread is there from the start: to make one takes memory that may be on the disk by then. */
static sem_t may_read, has_read;
static atomic_int is_reading;
static unsigned bad_beside;

static void *read_all(void *unused) {
    for (unsigned first;;) {
        while (sem_wait(&may_read) != 0) continue;
        bad_beside = wrong(&first);
        is_reading = 0;
        sem_post(&has_read);
    }
    return unused;
}

/* What other threads do while one reads: faults on other memory, munmap, fork. */
static void turns(unsigned times) {
    for (unsigned at = 0; at < times; at++) {
        char *more = mmap(NULL, 256 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(more != MAP_FAILED);
        for (int page = 0; page < 256; page++) more[page * PAGE] = (char)page;
        for (int page = 0; page < 256; page++) CHECK(more[page * PAGE] == (char)page);
        CHECK(munmap(more, 256 * PAGE) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(0);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}

int main(void) {
    pthread_t reader;
    char line[64];
    CHECK(sem_init(&may_read, 0, 0) == 0 && sem_init(&has_read, 0, 0) == 0);
    CHECK(pthread_create(&reader, NULL, read_all, NULL) == 0);
    while (fgets(line, sizeof line, stdin)) {
        unsigned number = 0, first = 0;
        char word[16] = "";
        CHECK(sscanf(line, "%15s %u", word, &number) >= 1);
        if (!strcmp(word, "fill")) {
            int is_all = grow(number);
            printf("%s %u\n", is_all ? "filled" : "no memory after", count);
        } else if (!strcmp(word, "verify")) {
            unsigned bad = wrong(&first);
            if (bad) printf("WRONG: %u of %u pages, the first is %u\n", bad, count, first);
            else printf("verified %u\n", count);
        } else if (!strcmp(word, "change")) {
            for (unsigned page = 0; page < count; page += number) write_page(page);
            printf("changed every %u\n", number);
        } else if (!strcmp(word, "fork") || !strcmp(word, "rest") || !strcmp(word, "stay")) {
            pid_t child = fork();
            if (child < 0 && errno == ENOMEM) {
                printf("no memory for a child\n");
                fflush(stdout);
                continue;
            }
            CHECK(child >= 0);
            if (child == 0) {
                if (*word == 'f') _exit(in_child());
                if (*word == 'r') _exit(usleep(500000));
                for (uint64_t random = 1;;) write_page(next_random(&random) % count);
            }
            int status = 0;
            if (*word != 's') CHECK(waitpid(child, &status, 0) == child);
            if (WIFSIGNALED(status)) printf("child ended by signal %d\n", WTERMSIG(status));
            else if (*word != 's') printf("child ended with %d\n", WEXITSTATUS(status));
            else printf("stays %d\n", child);
        } else if (!strcmp(word, "wait")) {
            int status;
            pid_t child = wait(&status);
            printf("waited for %d\n", child);
        } else if (!strcmp(word, "turns")) {
            turns(number);
            printf("took %u turns\n", number);
        } else if (!strcmp(word, "beside")) {
            is_reading = 1;
            sem_post(&may_read);
            usleep(300000);
            turns(number);
            printf("went on while the reader %s\n", is_reading ? "waits" : "is done");
        } else if (!strcmp(word, "join")) {
            while (sem_wait(&has_read) != 0) continue;
            printf("%s %u\n", bad_beside ? "WRONG" : "right", bad_beside);
        } else {
            CHECK(!strcmp(word, "end"));
            return 0;
        }
        fflush(stdout);
    }
    return 3;
}
