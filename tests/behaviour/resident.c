/* Programs whose resident memory the runner samples from outside. */
#include "behaviour.h"

static void *fast_half(void *argument) {
    char *start = argument;
    for (int round = 0; round < 3; round++)
        for (size_t at = 0; at < 3 * limit_bytes(); at += PAGE) {
            memset(start + at, round + 1, PAGE);
            *(size_t *)(start + at) = at;
        }
    for (size_t at = 0; at < 3 * limit_bytes(); at += PAGE) CHECK(*(size_t *)(start + at) == at && start[at + 99] == 3);
    return NULL;
}

/*
 * The limit is passed slowly. A thread of zfolio watches a program below its limit. On a busy machine a
 * program that writes gigabytes per second exceeds the limit before that thread has run once; `start`
 * measures this. The other cases are about what comes after.
 */
static void settle(void) {
    size_t bytes = limit_bytes() + limit_bytes() / 4;
    char *start = map_anonymous(bytes);
    for (size_t at = 0; at < bytes; at += 1 << 20) {
        memset(start + at, 1, 1 << 20);
        usleep(2000);
    }
    for (size_t at = 0; at < bytes; at += PAGE) CHECK(start[at] == 1);
    CHECK(munmap(start, bytes) == 0);
}

/* Two threads write as fast as they can. */
static void fast(void) {
    char *start = map_anonymous(6 * limit_bytes());
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fast_half, start) == 0);
    fast_half(start + 3 * limit_bytes());
    CHECK(pthread_join(thread, NULL) == 0);
}

/* The same with many mappings that are made and unmapped. */
static void fresh(void) {
    size_t bytes = limit_bytes() / 4;
    char *kept[24] = {0};
    for (int i = 0; i < 200; i++) {
        int slot = i % 24;
        if (kept[slot]) {
            CHECK(kept[slot][bytes - 1] == (char)(i - 24));
            CHECK(munmap(kept[slot], bytes) == 0);
        }
        kept[slot] = map_anonymous(bytes);
        memset(kept[slot], i, bytes);
    }
}

/* One byte in each page, then in each unit. */
static void sparse(void) {
    size_t bytes = 6 * limit_bytes();
    char *start = map_anonymous(bytes);
    size_t strides[] = {PAGE, 16 * PAGE, 7 * PAGE};
    for (int i = 0; i < 3; i++)
        for (size_t at = 0; at < bytes; at += strides[i]) start[at] += 1;
    for (size_t at = 0; at < bytes; at += PAGE)
        CHECK(start[at] == 1 + (at % (16 * PAGE) == 0) + (at % (7 * PAGE) == 0), "byte %zu is %d", at, start[at]);
}

/* Data that does not compress: no limit can be held. */
static void noise(void) {
    size_t words = 3 * limit_bytes() / sizeof(uint64_t);
    uint64_t *start = (uint64_t *)map_anonymous(3 * limit_bytes()), random = 1;
    for (size_t at = 0; at < words; at++) start[at] = next_random(&random);
    random = 1;
    for (size_t at = 0; at < words; at++) CHECK(start[at] == next_random(&random));
}

/* Pauses between bursts. */
static void burst(void) {
    struct ballast b;
    ballast_make(&b, limit_bytes() / 2, 1);
    for (int round = 0; round < 4; round++) {
        usleep(400000);
        char *more = map_anonymous(2 * limit_bytes());
        memset(more, round + 1, 2 * limit_bytes());
        ballast_verify(&b, "idle");
        for (size_t at = 0; at < 2 * limit_bytes(); at += PAGE) CHECK(more[at] == round + 1);
        CHECK(munmap(more, 2 * limit_bytes()) == 0);
    }
}

/* Small blocks through malloc. */
static void blocks(void) {
    size_t count = 3 * limit_bytes() / 64;
    uint64_t **all = malloc(count * sizeof *all);
    for (size_t i = 0; i < count; i++) {
        all[i] = malloc(48);
        all[i][0] = i, all[i][5] = i;
    }
    for (size_t i = 0; i < count; i++) CHECK(all[i][0] == i && all[i][5] == i);
}

/* All pages populated by one call. */
static void populated(void) {
    char *start = mmap(NULL, 4 * limit_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                       -1, 0);
    CHECK(start != MAP_FAILED);
    usleep(200000);
    memset(start, 1, 4 * limit_bytes());
    usleep(200000);
    for (size_t at = 0; at < 4 * limit_bytes(); at += PAGE) CHECK(start[at] == 1);
}

/* A size of this process, as of status_mib. */
static size_t status_bytes(const char *row) { return kib_in("/proc/thread-self/status", row) << 10; }

static void file_is_right(const char *start, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE) CHECK(page_is(start + at, at), "page %zu of the file", at / PAGE);
}

/*
 * A file four times as large as the limit is mapped and read. Its pages must not push out anonymous memory; and once
 * nobody reads them, they go.
 */
static void files(void) {
    size_t bytes = 4 * limit_bytes();
    char name[] = "./resident.XXXXXX", *page = malloc(PAGE);
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0);
    for (size_t at = 0; at < bytes; at += PAGE) {
        fill_page(page, at);
        CHECK(write(file, page, PAGE) == (ssize_t)PAGE);
    }
    CHECK(fsync(file) == 0);
    char *read_only = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    CHECK(read_only != MAP_FAILED);
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 1);
    size_t most = 0;
    for (int round = 0; round < 3; round++) {
        file_is_right(read_only, bytes);
        size_t file_bytes = status_bytes("RssFile:");
        if (file_bytes > most) most = file_bytes;
        ballast_verify(&b, "file");
    }
    if (most == 0) skip("the folder is kept in memory: it has no pages of files");
    CHECK(most >= bytes / 2 || !getenv("ZFOLIO_LIMIT"), "only %zu MiB of the file were resident", most >> 20);
    if (!getenv("ZFOLIO_LIMIT")) return;
    CHECK(status_bytes("RssAnon:") >= limit_bytes() * 3 / 4, "%zu MiB anonymous", status_bytes("RssAnon:") >> 20);
    /* The engine has seen the pages come back up to three times, so it may wait for some seconds. */
    size_t share = limit_bytes() / 4 > 32 * MIB ? limit_bytes() / 4 : 32 * MIB;
    for (double until = now() + 60; status_bytes("RssFile:") > share + 16 * MIB; usleep(50000))
        CHECK(now() < until, "%zu MiB of files stay", status_bytes("RssFile:") >> 20);
    file_is_right(read_only, bytes);
    ballast_verify(&b, "end");
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "start") != 0) settle();
    const struct behaviour cases[] = {
        {"start", fast}, {"fast", fast}, {"fresh", fresh}, {"sparse", sparse}, {"burst", burst},
        {"blocks", blocks}, {"populated", populated},
        {"noise", noise}, {"files", files},
    };
    return CHOOSE(cases);
}
