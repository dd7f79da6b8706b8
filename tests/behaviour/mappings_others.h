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
