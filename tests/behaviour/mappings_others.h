/* Parts of moved or replaced memory that are not the engine's. Included by mappings.c. */
#ifndef MAPPINGS_OTHERS_H
#define MAPPINGS_OTHERS_H
#include "behaviour.h"
#include <sys/shm.h>

/* A block grows by mremap of which a part was given up: a pipe has the pages, and a child is to read zeros there. */
static void given_up_moves(void) {
    enum { PIECE = 64 };
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    uint64_t random = 1;
    size_t bytes = 4 * MIB;
    for (int round = 0; round < 4; round++) {
        char *block = map_anonymous(bytes), *given = block + MIB + 5 * PAGE;
        fill(block, bytes, 10);
        int ends[2];
        CHECK(pipe(ends) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) > 0);
        struct iovec part = {given, PIECE * PAGE};
        CHECK(vmsplice(ends[1], &part, 1, 0) == PIECE * PAGE);
        char *grown = mremap(block, bytes, 2 * bytes, MREMAP_MAYMOVE);
        CHECK(grown != MAP_FAILED);
        for (int i = 0; i < 3; i++) ballast_churn(&b, 20000, &random);
        for (size_t i = 0; i < PIECE; i++) {
            char page[PAGE];
            CHECK(read(ends[0], page, PAGE) == PAGE && page_is(page, 10 + MIB / PAGE + 5 + i), "piped page %zu", i);
        }
        verify(grown, bytes, 10, "a block that has grown");
        CHECK(close(ends[0]) == 0 && close(ends[1]) == 0 && munmap(grown, 2 * bytes) == 0);
    }
    /* From Linux 6.17 on mremap takes several mappings: one that a child is not to have, and one of a file. */
    char *block = map_anonymous(3 * MIB), *wiped = block + MIB, *of_file = block + 2 * MIB;
    int file = memfd_create("pages", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, MIB) == 0);
    for (size_t i = 0; i < MIB / PAGE; i++) {
        char page[PAGE];
        fill_page(page, 500 + i);
        CHECK(write(file, page, PAGE) == PAGE);
    }
    CHECK(mmap(of_file, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == of_file);
    CHECK(madvise(wiped, MIB, MADV_WIPEONFORK) == 0);
    fill(block, 2 * MIB, 20);
    char *to = map_anonymous(3 * MIB);
    if (mremap(block, 3 * MIB, 3 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to) {
        block = to, wiped = to + MIB, of_file = to + 2 * MIB;
        for (int i = 0; i < 3; i++) ballast_churn(&b, 20000, &random);
    }
    pid_t pid = fork();
    if (pid == 0) {
        for (size_t at = 0; at < MIB; at += PAGE) CHECK(page_is_zero(wiped + at), "page %zu", at / PAGE);
        verify(block, MIB, 20, "what a child has");
        _exit(0);
    }
    child_is_well(pid, "a child of moved memory");
    verify(block, 2 * MIB, 20, "moved memory");
    verify(of_file, MIB, 500, "pages of a file");
    ballast_verify(&b, "given up");
}

static void check_below(const char *what, int round) {
    size_t mib = status_mib("RssAnon:"), most = limit_bytes() / MIB + SLACK_MIB;
    if (getenv("ZFOLIO_LIMIT")) CHECK(mib < most, "%zu MiB are resident in round %d: %s", mib, round, what);
}

/* A block of many times the limit grows, where it is and elsewhere, and shrinks; a call that is refused changes
 * nothing. The limit is held meanwhile. */
static void grows(void) {
    size_t bytes = 5 * limit_bytes(), more = 3 * PAGE + limit_bytes() / 4, offset = 0;
    char *place = map_anonymous(2 * bytes), *block = place;
    /* There is room behind it. */
    CHECK(munmap(place + bytes, bytes) == 0);
    fill(block, bytes, 10);
    come_down(20);
    check_below("it is filled", 0);
    for (int round = 0; round < 12; round++) {
        char *behind = block + bytes;
        int has_room = round % 3 == 0;
        if (!has_room) mmap(behind, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        errno = 0;
        char *grown = mremap(block, bytes, bytes + more, 0);
        CHECK(grown == block || (grown == MAP_FAILED && errno == ENOMEM));
        CHECK(has_room || grown == MAP_FAILED, "there is no room");
        check_below("it may have grown in place", round);
        if (grown == MAP_FAILED) grown = mremap(block, bytes, bytes + more, MREMAP_MAYMOVE);
        CHECK(grown != MAP_FAILED);
        check_below("it has grown", round);
        if (!has_room) CHECK(grown != block && munmap(behind, PAGE) == 0);
        unsigned char there;
        if (grown != block) CHECK(mincore(block, PAGE, &there) == -1 && errno == ENOMEM, "the old place is free");
        block = grown;
        for (size_t at = bytes; at < bytes + more; at += PAGE) CHECK(page_is_zero(block + at), "page %zu", at / PAGE);
        /* A part of what was there and a part of what is new, some of it changed. */
        for (size_t page = 7 * round; page < bytes / PAGE; page += 97)
            CHECK(page_is(block + page * PAGE, 10 + offset + page), "round %d, page %zu", round, page);
        fill(block + bytes, more, 10 + offset + bytes / PAGE);
        CHECK(mremap(block, bytes + more, bytes + more, MREMAP_MAYMOVE) == block);
        CHECK(mremap(block, bytes + more, bytes + PAGE, MREMAP_MAYMOVE) == block);
        CHECK(mincore(block + bytes + PAGE, PAGE, &there) == -1 && errno == ENOMEM, "the end is gone");
        check_below("it has shrunk", round);
        bytes += PAGE;
        /* So that it does not begin with a whole folio. */
        if (round != 6) continue;
        CHECK(munmap(block, 5 * PAGE) == 0);
        block += 5 * PAGE;
        bytes -= 5 * PAGE;
        offset += 5;
    }
    verify(block, bytes, 10 + offset, "what has grown");
    /* A range of several mappings is refused as without zfolio, and no address space is lost. */
    CHECK(mprotect(block + bytes / PAGE / 2 * PAGE, PAGE, PROT_READ) == 0);
    size_t before = kib_in("/proc/thread-self/status", "VmSize:");
    for (int i = 0; i < 40; i++) {
        errno = 0;
        CHECK(mremap(block, bytes, bytes + more, i % 2 ? MREMAP_MAYMOVE : 0) == MAP_FAILED && errno == EFAULT);
    }
    size_t after = kib_in("/proc/thread-self/status", "VmSize:");
    CHECK(after < before + (bytes >> 11), "%zu KiB of addresses, and %zu before", after, before);
    verify(block, bytes, 10 + offset, "what could not grow");
    CHECK(mprotect(block + bytes / PAGE / 2 * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    /* What is left mapped at the old place is memory like any other. No place is asked for without MREMAP_FIXED: what
     * is in the register is left out, as by the C library until 2.38. */
    void *garbage = getenv("ZFOLIO_LIMIT") ? block + 1 : NULL;
    char *moved = mremap(block, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, garbage);
    CHECK(moved != MAP_FAILED, "%s", strerror(errno));
    verify(moved, bytes, 10 + offset, "what has moved away");
    CHECK(munmap(moved, bytes) == 0);
    fill(block, bytes, 99);
    come_down(20);
    check_below("the old place is filled", 0);
    verify(block, bytes, 99, "the old place");
}

/* Blocks of a few pages close to a mapping of a file shrink, move and grow: that mapping cannot be registered, and the
 * block is one mapping to mremap all the same. */
static void beside_a_file(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    uint64_t random = 1;
    for (int round = 0; goes_on(round, 60); round++) {
        size_t before = next_random(&random) % 5, pages = 20 + next_random(&random) % 60;
        /* A page of the file, a few of memory, the block; then a place for what moves, behind a page of the file. */
        char *place = map_anonymous(512 * PAGE), *block = place + (1 + before) * PAGE, *other = place + 256 * PAGE;
        int file = open("/proc/self/exe", O_RDONLY);
        CHECK(file >= 0);
        CHECK(mmap(place, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == place);
        CHECK(mmap(other, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == other);
        close(file);
        char *end = block + pages * PAGE;
        CHECK(munmap(end, (size_t)(other - end)) == 0);
        CHECK(munmap(other + PAGE, 255 * PAGE) == 0);
        fill(block, pages * PAGE, 40);
        ballast_churn(&b, 2000, &random);
        size_t fewer = 3 + next_random(&random) % (pages - 3), more = fewer + next_random(&random) % 40;
        CHECK(mremap(block, pages * PAGE, fewer * PAGE, MREMAP_MAYMOVE) == block);
        ballast_churn(&b, 2000, &random);
        char *to = other + (1 + next_random(&random) % 20) * PAGE;
        char *moved = mremap(block, fewer * PAGE, more * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
        CHECK(moved == to, "round %d: %zu of %zu pages, then %zu: %s", round, fewer, pages, more, strerror(errno));
        verify(moved, fewer * PAGE, 40, "what has moved");
        for (size_t page = fewer; page < more; page++) CHECK(page_is_zero(moved + page * PAGE), "page %zu", page);
        fill(moved, more * PAGE, 50);
        ballast_churn(&b, 2000, &random);
        /* New memory, a page behind the block that has moved: perhaps in the block's last folio. */
        char *beside = mmap(moved + more * PAGE + PAGE, 40 * PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK(beside != MAP_FAILED, "%s", strerror(errno));
        fill(beside, 40 * PAGE, 60);
        ballast_churn(&b, 2000, &random);
        char *last = mremap(moved, more * PAGE, 2 * more * PAGE, MREMAP_MAYMOVE);
        CHECK(last != MAP_FAILED, "round %d: %zu pages grow: %s", round, more, strerror(errno));
        verify(last, more * PAGE, 50, "what has grown");
        verify(beside, 40 * PAGE, 60, "what lay beside it");
        CHECK(munmap(last, 2 * more * PAGE) == 0 && munmap(beside, 40 * PAGE) == 0);
        CHECK(munmap(place, (1 + before) * PAGE) == 0 && munmap(other, PAGE) == 0);
    }
    ballast_verify(&b, "the rest");
}

/* shmat over managed memory; once it is detached, other memory is mapped there. */
static void shm_over(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    uint64_t random = 1;
    size_t bytes = 4 * MIB;
    for (int raw = 0; raw < 2; raw++) {
        char *block = map_anonymous(bytes);
        fill(block, bytes, 77);
        ballast_churn(&b, 30000, &random);
        int segment = shmget(IPC_PRIVATE, bytes, IPC_CREAT | 0600);
        if (segment < 0) skip("no segments of shared memory here");
        CHECK(shmat(segment, block, SHM_REMAP) == block && shmctl(segment, IPC_RMID, NULL) == 0);
        for (size_t at = 0; at < bytes; at += PAGE) CHECK(page_is_zero(block + at), "page %zu", at / PAGE);
        fill(block, bytes, 88);
        ballast_churn(&b, 30000, &random);
        verify(block, bytes, 88, "shared memory");
        CHECK(shmdt(block) == 0);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        char *again = raw ? (char *)syscall(SYS_mmap, block, bytes, PROT_READ | PROT_WRITE, flags, -1, 0)
                          : mmap(block, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        CHECK(again == block);
        char *more = map_anonymous(8 * MIB);
        fill(more, 8 * MIB, 5);
        for (size_t at = 0; at < bytes; at += PAGE) CHECK(page_is_zero(block + at), "page %zu", at / PAGE);
        fill(block, bytes, 99);
        ballast_churn(&b, 60000, &random);
        verify(block, bytes, 99, "what was mapped after shared memory");
        CHECK(munmap(block, bytes) == 0 && munmap(more, 8 * MIB) == 0);
    }
    ballast_verify(&b, "after shared memory");
}
#endif
