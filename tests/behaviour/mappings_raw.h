/* Changes of mappings by raw system calls. Included by mappings.c. */
#ifndef MAPPINGS_RAW_H
#define MAPPINGS_RAW_H
#include "behaviour.h"

/* munmap and mmap by raw system calls, as some language run-times make them. */
static void raw_calls(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    for (int round = 0; goes_on(round, 30); round++) {
        size_t bytes = 4 * MIB;
        char *block = map_anonymous(bytes);
        fill(block, bytes, round);
        uint64_t random = round;
        ballast_churn(&b, 2000, &random);
        CHECK(syscall(SYS_munmap, block, bytes) == 0);
        char *again = (char *)syscall(SYS_mmap, block, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(again == block);
        for (size_t at = 0; at < bytes; at += PAGE)
            CHECK(page_is_zero(again + at), "round %d page %zu", round, at / PAGE);
        fill(again, bytes, round + 9000);
        ballast_churn(&b, 4000, &random);
        verify(again, bytes, round + 9000, "mapped by a raw call");
        CHECK(syscall(SYS_madvise, again, bytes, MADV_DONTNEED) == 0);
        for (size_t at = 0; at < bytes; at += PAGE)
            CHECK(page_is_zero(again + at), "round %d page %zu", round, at / PAGE);
        CHECK(syscall(SYS_munmap, again, bytes) == 0);
    }
    ballast_verify(&b, "raw calls");
}

/* madvise by a raw system call on parts of units, while another thread keeps reclaim busy. */
static void raw_drops(void) {
    struct ballast b, block;
    ballast_make(&b, 2 * limit_bytes(), 3);
    ballast_make(&block, limit_bytes(), 4);
    ballast_start(&b);
    uint64_t random = 5;
    for (int round = 0; goes_on(round, 4000); round++) {
        size_t pages = 1 + next_random(&random) % 40, from = next_random(&random) % (block.pages - pages);
        char *at = block.start + from * PAGE;
        CHECK(syscall(SYS_madvise, at, pages * PAGE, MADV_DONTNEED) == 0);
        for (size_t i = 0; i < pages; i++) CHECK(page_is_zero(at + i * PAGE), "round %d page %zu", round, from + i);
        for (size_t i = 0; i < pages; i++) ballast_rewrite(&block, from + i);
        ballast_churn(&block, 64, &random);
    }
    ballast_verify(&block, "raw drops");
    ballast_stop(&b);
}

/* MADV_FREE by a raw system call: contents that are written afterwards stay, without a fault. */
static void raw_frees(void) {
    struct ballast b, block;
    ballast_make(&b, 2 * limit_bytes(), 3);
    ballast_make(&block, limit_bytes(), 4);
    ballast_start(&b);
    uint64_t random = 5;
    for (int round = 0; goes_on(round, 4000); round++) {
        size_t pages = 1 + next_random(&random) % 40, from = next_random(&random) % (block.pages - pages);
        char *at = block.start + from * PAGE;
        for (size_t i = 0; i < pages; i++)
            CHECK(page_is(at + i * PAGE, ballast_seed(&block, from + i)), "round %d page %zu", round, from + i);
        CHECK(syscall(SYS_madvise, at, pages * PAGE, MADV_FREE) == 0);
        for (size_t i = 0; i < pages; i++) ballast_rewrite(&block, from + i);
    }
    ballast_verify(&block, "raw frees");
    ballast_stop(&b);
}

/* mremap by a raw system call, of the middle of a block, while another thread keeps reclaim busy. */
static void raw_moves(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    ballast_start(&b);
    uint64_t random = 5;
    for (int round = 0; goes_on(round, 60); round++) {
        size_t pages = 128 + next_random(&random) % 2000, from = 1 + next_random(&random) % 64,
            count = 1 + next_random(&random) % 60;
        char *block = map_anonymous(pages * PAGE), *hole = map_anonymous(pages * PAGE);
        fill(block, pages * PAGE, round);
        size_t before = 1 + next_random(&random) % 60;
        char *to = hole + before * PAGE;
        CHECK((char *)syscall(SYS_mremap, block + from * PAGE, count * PAGE, count * PAGE,
                              MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
        verify(to, count * PAGE, round + from, "moved");
        verify(block, from * PAGE, round, "before the hole");
        verify(block + (from + count) * PAGE, (pages - from - count) * PAGE, round + from + count, "behind the hole");
        fill(to, count * PAGE, round + 9000);
        size_t grown = count + next_random(&random) % 40;
        char *again = (char *)syscall(SYS_mremap, to, count * PAGE, grown * PAGE, MREMAP_MAYMOVE);
        CHECK(again != MAP_FAILED);
        verify(again, count * PAGE, round + 9000, "moved and grown");
        for (size_t i = count; i < grown; i++) CHECK(page_is_zero(again + i * PAGE));
        CHECK(syscall(SYS_munmap, again, grown * PAGE) == 0);
        CHECK(syscall(SYS_munmap, block, from * PAGE) == 0);
        CHECK(syscall(SYS_munmap, block + (from + count) * PAGE, (pages - from - count) * PAGE) == 0);
        CHECK(syscall(SYS_munmap, hole, before * PAGE) == 0);
        CHECK(syscall(SYS_munmap, hole + (before + count) * PAGE, (pages - before - count) * PAGE) == 0);
    }
    ballast_stop(&b);
}

/* A block that a raw system call has made longer moves by the C library's call, to a place of the program's choice and
 * of the kernel's. */
static void raw_grows(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    uint64_t random = 5;
    for (int round = 0; goes_on(round, 20); round++) {
        size_t pages = 300 + next_random(&random) % 400, more = 1 + next_random(&random) % 200, grown = pages + more;
        char *block = map_anonymous(grown * PAGE);
        fill(block, pages * PAGE, round);
        ballast_churn(&b, 3000, &random);
        CHECK(syscall(SYS_munmap, block + pages * PAGE, more * PAGE) == 0);
        CHECK((char *)syscall(SYS_mremap, block, pages * PAGE, grown * PAGE, 0) == block);
        fill(block + pages * PAGE, more * PAGE, round + pages);
        char *to = NULL;
        if (round & 1) to = mmap(NULL, grown * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(to != MAP_FAILED);
        int flags = MREMAP_MAYMOVE | (to ? MREMAP_FIXED : 0);
        size_t length = grown + (to ? 0 : 100);
        CHECK((block = mremap(block, grown * PAGE, length * PAGE, flags, to)) != MAP_FAILED, "round %d", round);
        verify(block, grown * PAGE, round, "grown and moved");
        CHECK(munmap(block, length * PAGE) == 0);
    }
    ballast_verify(&b, "beside blocks that grow");
}

/* mremap by a raw system call onto memory that is in use, managed and partly compressed, to and fro. */
static void raw_replaces(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    ballast_start(&b);
    size_t pages = 512, bytes = pages * PAGE;
    char *here = map_anonymous(bytes);
    fill(here, bytes, 1);
    for (int round = 1; goes_on(round, 300); round++) {
        char *used = map_anonymous(bytes);
        fill(used, bytes, round + 5000);
        CHECK((char *)syscall(SYS_mremap, here, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, used) == used);
        verify(used, bytes, round, "moved onto used memory");
        here = used;
        fill(here, bytes, round + 1);
    }
    ballast_stop(&b);
}

/* mremap by a raw system call to one of a few places, and back, with and without the old mapping left in place; and
   back by the C library from a place that it has just mapped, which it then takes for memory not managed yet. */
static void raw_returns(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    char *places = mmap(NULL, 10 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(places != MAP_FAILED);
    places = (char *)(((uintptr_t)places + (2 << 20) - 1) & ~((2ul << 20) - 1));
    uint64_t random = 5;
    for (int round = 0; goes_on(round, 300); round++) {
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (round < 150 ? 0 : MREMAP_DONTUNMAP);
        size_t pages = 1 + next_random(&random) % 64, from = next_random(&random) % (b.pages - pages);
        char *at = b.start + from * PAGE, *to = places + (round < 150 ? round % 8 << 20 : 0);
        CHECK((char *)syscall(SYS_mremap, at, pages * PAGE, pages * PAGE, flags, to) == to);
        for (size_t i = 0; i < pages; i++)
            CHECK(page_is(to + i * PAGE, ballast_seed(&b, from + i)), "round %d page %zu", round, i);
        CHECK((char *)syscall(SYS_mremap, to, pages * PAGE, pages * PAGE, flags, at) == at);
    }
    for (int round = 0; goes_on(round, 300); round++) {
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
        size_t bytes = 64 * PAGE, from = next_random(&random) % (b.pages / 64 - 1) * 64;
        char *at = b.start + from * PAGE, *to = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (round % 3) {
            CHECK((char *)mremap(at, bytes, bytes, flags, to) == to);
            CHECK((char *)syscall(SYS_mremap, to, bytes, bytes, flags, at) == at);
        } else {
            CHECK((char *)syscall(SYS_mremap, at, bytes, bytes, flags, to) == to);
            CHECK((char *)mremap(to, bytes, bytes, flags, at) == at);
        }
        ballast_churn(&b, 500, &random);
    }
    ballast_verify(&b, "returned");
}

/* Is the page mapped? */
static int is_mapped(char *at) {
    unsigned char present;
    return mincore(at, PAGE, &present) == 0;
}

/* mremap of two mappings onto memory in use, of which the second is sealed. From Linux 6.17 on the first has moved when
 * the call fails; before, nothing has. The last pages of each were never touched. */
static void half_moves(void) {
    enum { MSEAL = 462, HALF = 512, WRITTEN = HALF - 8 };
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    uint64_t random = 5;
    for (int round = 0; round < 8; round++) {
        char *from = map_anonymous(2 * HALF * PAGE), *to = map_anonymous(2 * HALF * PAGE);
        char *sealed = from + HALF * PAGE;
        fill(from, WRITTEN * PAGE, 10 * round + 1);
        fill(sealed, WRITTEN * PAGE, 10 * round + 2);
        fill(to, 2 * HALF * PAGE, 10 * round + 3);
        CHECK(madvise(sealed, HALF * PAGE, MADV_DONTDUMP) == 0);
        if (syscall(MSEAL, sealed, HALF * PAGE, 0) != 0) skip("mseal is not there (Linux 6.10)");
        ballast_churn(&b, 6000, &random);
        void *moved = mremap(from, 2 * HALF * PAGE, 2 * HALF * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
        CHECK(moved == MAP_FAILED);
        size_t gone = is_mapped(from) ? 0 : HALF, kept = is_mapped(to + gone * PAGE) ? 2 * HALF - gone : 0;
        if (gone) {
            CHECK(mmap(from, HALF * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
                       -1, 0) == from);
            fill(from + 4 * PAGE, 4 * PAGE, 10 * round + 4);
        }
        for (int turn = 0; turn < 2; turn++) {
            if (turn > 0) ballast_churn(&b, 6000, &random);
            char *first = gone ? to : from;
            verify(first, WRITTEN * PAGE, 10 * round + 1, "the first mapping");
            for (size_t i = WRITTEN; i < HALF; i++)
                CHECK(page_is_zero(first + i * PAGE), "round %d page %zu", round, i);
            verify(sealed, WRITTEN * PAGE, 10 * round + 2, "the sealed mapping");
            for (size_t i = gone; i < gone + kept; i++)
                CHECK(page_is(to + i * PAGE, 10 * round + 3 + i), "round %d page %zu of the target", round, i);
            for (size_t i = 0; gone && i < gone; i++)
                CHECK(i / 4 == 1 ? page_is(from + i * PAGE, 10 * round + i) : page_is_zero(from + i * PAGE),
                      "round %d page %zu of what is new", round, i);
        }
        if (is_mapped(to)) munmap(to, gone ? HALF * PAGE : 2 * HALF * PAGE);
        munmap(from, HALF * PAGE);
    }
    ballast_verify(&b, "half moved");
}
#endif
