/* The mmap family against a model of every page: its contents, and whether it may be accessed. */
#include "behaviour.h"

enum { ZERO, DATA, MAYBE };

struct window {
    char *start;
    size_t pages;
    uint8_t *state, *protection;
    uint64_t *seed;
    uint64_t random;
};

/* Mappings that grow, shrink and move. */
struct afloat {
    char *start;
    size_t pages, first_zero;
    uint64_t seed;
};

static void check_page(struct window *w, size_t page, const char *when) {
    char *at = w->start + page * PAGE;
    if (w->protection[page] == PROT_NONE) return;
    switch (w->state[page]) {
    case ZERO:
        CHECK(page_is_zero(at), "%s: page %zu at %p must be zeros, holds %#lx", when, page, (void *)at,
              *(uint64_t *)at);
        break;
    case DATA:
        CHECK(page_is(at, w->seed[page]), "%s: page %zu at %p lost its contents, holds %#lx", when, page, (void *)at,
              *(uint64_t *)at);
        break;
    default:
        if (page_is_zero(at)) w->state[page] = ZERO;
        else
            CHECK(page_is(at, w->seed[page]), "%s: page %zu at %p after MADV_FREE, holds %#lx", when, page,
                  (void *)at, *(uint64_t *)at);
    }
}

static void set(struct window *w, size_t from, size_t to, int state, int protection) {
    for (size_t page = from; page < to; page++) {
        if (state == MAYBE) { if (w->state[page] == DATA) w->state[page] = MAYBE; }
        else if (state >= 0) w->state[page] = state;
        if (protection >= 0) w->protection[page] = protection;
    }
}

static void write_pages(struct window *w, size_t from, size_t to) {
    for (size_t page = from; page < to; page++) {
        if (!(w->protection[page] & PROT_WRITE)) continue;
        w->seed[page] = next_random(&w->random);
        fill_page(w->start + page * PAGE, w->seed[page]);
        w->state[page] = DATA;
    }
}

static void one_change(struct window *w) {
    uint64_t *r = &w->random;
    size_t length = 1 + next_random(r) % (next_random(r) % 4 ? 40 : 1500);
    size_t from = next_random(r) % (w->pages - length), to = from + length;
    char *at = w->start + from * PAGE;
    size_t bytes = length * PAGE;
    const int anonymous = MAP_PRIVATE | MAP_ANONYMOUS;
    switch (next_random(r) % 16) {
    case 0:
        CHECK(mmap(at, bytes, PROT_READ | PROT_WRITE, anonymous | MAP_FIXED, -1, 0) == at);
        set(w, from, to, ZERO, PROT_READ | PROT_WRITE);
        break;
    case 1: {
        CHECK(munmap(at, bytes) == 0);
        /* In a program with threads another thread may have mapped the hole: then it is left alone. */
        void *again = mmap(at, bytes, PROT_READ | PROT_WRITE, anonymous | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK(again == at, "a hole was taken");
        set(w, from, to, ZERO, PROT_READ | PROT_WRITE);
        break;
    }
    case 2: case 3: {
        static const int kinds[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE};
        int protection = kinds[next_random(r) % 4];
        CHECK(mprotect(at, bytes, protection) == 0);
        set(w, from, to, -1, protection);
        break;
    }
    case 4: case 5:
        CHECK(madvise(at, bytes - (next_random(r) & 1 ? 0 : 100), MADV_DONTNEED) == 0);
        set(w, from, to, ZERO, -1);
        break;
    case 6:
        CHECK(madvise(at, bytes, MADV_FREE) == 0);
        set(w, from, to, MAYBE, -1);
        break;
    case 7: {
        /* A new mapping, so that the moved range is one mapping of the kernel, as without zfolio. */
        if (2 * length >= w->pages / 2 || length < 2) break;
        CHECK(mmap(at, bytes, PROT_READ | PROT_WRITE, anonymous | MAP_FIXED, -1, 0) == at);
        set(w, from, to, ZERO, PROT_READ | PROT_WRITE);
        for (size_t page = from; page < to; page += 3) write_pages(w, page, page + 1);
        size_t onto = next_random(r) % (w->pages - length);
        if (onto < to && onto + length > from) break;
        char *there = w->start + onto * PAGE;
        CHECK(mremap(at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there, "%zu pages", length);
        memcpy(w->state + onto, w->state + from, length);
        memcpy(w->protection + onto, w->protection + from, length);
        memcpy(w->seed + onto, w->seed + from, length * sizeof *w->seed);
        CHECK(mmap(at, bytes, PROT_READ | PROT_WRITE, anonymous | MAP_FIXED_NOREPLACE, -1, 0) == at);
        set(w, from, to, ZERO, PROT_READ | PROT_WRITE);
        break;
    }
    case 8: {
        unsigned char present[1600];
        CHECK(mincore(at, bytes, present) == 0);
        break;
    }
    case 9: case 10: case 11: case 12: write_pages(w, from, to); break;
    default:
        for (size_t page = from; page < to; page++) check_page(w, page, "a look");
    }
}

static void check_afloat(struct afloat *f) {
    for (size_t page = 0; page < f->pages; page++) {
        char *at = f->start + page * PAGE;
        if (page < f->first_zero)
            CHECK(page_is(at, f->seed + page), "moved mapping %p: page %zu of %zu holds %#lx", f->start, page,
                  f->pages, *(uint64_t *)at);
        else
            CHECK(page_is_zero(at), "grown mapping %p: page %zu of %zu holds %#lx", f->start, page, f->pages,
                  *(uint64_t *)at);
    }
}

static void float_change(struct afloat *f, uint64_t *r) {
    if (!f->start) {
        f->pages = 1 + next_random(r) % 900;
        f->start = map_anonymous(f->pages * PAGE);
        f->first_zero = next_random(r) % (f->pages + 1);
        f->seed = next_random(r);
        fill(f->start, f->first_zero * PAGE, f->seed);
        return;
    }
    switch (next_random(r) % 4) {
    case 0: case 1: {
        size_t pages = 1 + next_random(r) % 1800;
        void *at = mremap(f->start, f->pages * PAGE, pages * PAGE, MREMAP_MAYMOVE);
        CHECK(at != MAP_FAILED, "from %zu to %zu pages", f->pages, pages);
        f->start = at;
        f->pages = pages;
        if (f->first_zero > pages) f->first_zero = pages;
        check_afloat(f);
        break;
    }
    case 2: check_afloat(f); break;
    default:
        check_afloat(f);
        CHECK(munmap(f->start, f->pages * PAGE) == 0);
        f->start = NULL;
    }
}

static void work(uint64_t seed, size_t pages, double seconds) {
    struct window w = {.pages = pages, .random = seed};
    w.start = map_anonymous(pages * PAGE);
    w.state = calloc(pages, 1);
    w.protection = malloc(pages);
    w.seed = calloc(pages, sizeof *w.seed);
    set(&w, 0, pages, ZERO, PROT_READ | PROT_WRITE);
    write_pages(&w, 0, pages);
    struct afloat afloat[8] = {0};
    double until = now() + seconds;
    while (now() < until) {
        for (int i = 0; i < 8; i++) one_change(&w);
        float_change(&afloat[next_random(&w.random) % 8], &w.random);
    }
    CHECK(mprotect(w.start, pages * PAGE, PROT_READ) == 0);
    for (size_t page = 0; page < pages; page++) w.protection[page] = PROT_READ, check_page(&w, page, "the end");
    CHECK(munmap(w.start, pages * PAGE) == 0);
}

static void single(void) { work(1, 3 * limit_bytes() / PAGE, 5); }

static void *thread(void *argument) {
    /* Only one thread makes holes that others could map. */
    uint64_t random = (uint64_t)argument, seed = random << 40;
    size_t pages = limit_bytes() / PAGE;
    char *start = map_anonymous(pages * PAGE);
    uint64_t *held = calloc(pages, sizeof *held);
    for (double until = now() + 5; now() < until;) {
        size_t length = 1 + next_random(&random) % 200, from = next_random(&random) % (pages - length);
        char *at = start + from * PAGE;
        uint64_t kind = next_random(&random) % 8;
        if (kind == 0) CHECK(madvise(at, length * PAGE, MADV_DONTNEED) == 0);
        if (kind == 1)
            CHECK(mmap(at, length * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
                  == at);
        if (kind == 2)
            CHECK(mprotect(at, length * PAGE, PROT_READ) == 0
                  && mprotect(at, length * PAGE, PROT_READ | PROT_WRITE) == 0);
        for (size_t page = from; page < from + length; page++) {
            if (kind < 2) held[page] = 0;
            else if (kind < 5) fill_page(start + page * PAGE, held[page] = ++seed);
            char *there = start + page * PAGE;
            if (held[page])
                CHECK(page_is(there, held[page]), "page %zu at %p holds %#lx", page, (void *)there, *(uint64_t *)there);
            else CHECK(page_is_zero(there), "page %zu at %p is not zeros", page, (void *)there);
        }
    }
    for (size_t page = 0; page < pages; page++) {
        if (held[page]) CHECK(page_is(start + page * PAGE, held[page]), "page %zu", page);
        else CHECK(page_is_zero(start + page * PAGE), "page %zu", page);
    }
    return NULL;
}

static void threads(void) {
    pthread_t thread_of[4];
    for (uint64_t i = 0; i < 4; i++) CHECK(pthread_create(&thread_of[i], NULL, thread, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(thread_of[i], NULL) == 0);
}

/* One thread drops and verifies a range while others write to its neighbours in the same units. */
static char *shared_start;
static atomic_int stop;
static void *neighbour(void *argument) {
    size_t parity = (size_t)argument, pages = 3 * limit_bytes() / PAGE;
    uint64_t *seed = calloc(pages, sizeof *seed), random = 9 + parity;
    while (!atomic_load(&stop)) {
        size_t page = (next_random(&random) % (pages / 4)) * 4 + parity;
        char *at = shared_start + page * PAGE;
        if (seed[page]) CHECK(page_is(at, seed[page]), "page %zu holds %#lx", page, *(uint64_t *)at);
        else CHECK(page_is_zero(at), "page %zu holds %#lx", page, *(uint64_t *)at);
        if (next_random(&random) % 4 == 0) {
            CHECK(madvise(at, PAGE, MADV_DONTNEED) == 0);
            seed[page] = 0;
        } else fill_page(at, seed[page] = next_random(&random));
    }
    for (size_t page = parity; page < pages; page += 4)
        if (seed[page]) CHECK(page_is(shared_start + page * PAGE, seed[page]), "page %zu at the end", page);
    return NULL;
}

static void neighbours(void) {
    pthread_t thread_of[4];
    shared_start = map_anonymous(3 * limit_bytes());
    for (uint64_t i = 0; i < 4; i++) CHECK(pthread_create(&thread_of[i], NULL, neighbour, (void *)i) == 0);
    sleep(4);
    atomic_store(&stop, 1);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(thread_of[i], NULL) == 0);
}

/* A file is mapped over managed memory, and anonymous memory again. */
static void file_over(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 1);
    int file = memfd_create("over", 0);
    CHECK(file >= 0);
    char page[PAGE];
    for (int i = 0; i < 64; i++) {
        fill_page(page, 5000 + i);
        CHECK(write(file, page, PAGE) == PAGE);
    }
    for (size_t from = 3; from + 64 < b.pages; from += b.pages / 11) {
        char *at = b.start + from * PAGE;
        CHECK(mmap(at, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == at);
        verify(at, 64 * PAGE, 5000, "the file");
        for (int i = 0; i < 64; i++) fill_page(at + i * PAGE, ballast_seed(&b, from + i));
        if (from % 2) {
            CHECK(mmap(at, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == at);
            verify(at, 64 * PAGE, 5000, "the file, shared");
            CHECK(mmap(at, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
            for (int i = 0; i < 64; i++) CHECK(page_is_zero(at + i * PAGE));
            for (int i = 0; i < 64; i++) fill_page(at + i * PAGE, ballast_seed(&b, from + i));
        }
    }
    ballast_verify(&b, "the file");
    /* A call that is refused changes nothing. */
    errno = 0;
    CHECK(mmap(b.start, 64 * PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, 12345, 0) == MAP_FAILED && errno == EBADF);
    CHECK(madvise(b.start + 1, PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
    CHECK(munmap(b.start + 1, PAGE) == -1 && errno == EINVAL);
    CHECK(mremap(b.start, 64 * PAGE, 128 * PAGE, 0) == MAP_FAILED && errno == ENOMEM);
    ballast_verify(&b, "refused calls");
}

/* madvise and munmap of a range with a hole take effect on both sides of it. */
static void holes(void) {
    size_t pages = 3 * limit_bytes() / PAGE;
    char *start = map_anonymous(pages * PAGE);
    fill(start, pages * PAGE, 7);
    size_t hole = pages / 2 + 3;
    CHECK(munmap(start + hole * PAGE, 5 * PAGE) == 0);
    errno = 0;
    size_t from = 100, to = pages - 100;
    CHECK(madvise(start + from * PAGE, (to - from) * PAGE, MADV_DONTNEED) == -1 && errno == ENOMEM);
    for (size_t page = 0; page < pages; page++) {
        if (page >= hole && page < hole + 5) continue;
        if (page < from || page >= to) CHECK(page_is(start + page * PAGE, 7 + page), "page %zu", page);
        else CHECK(page_is_zero(start + page * PAGE), "page %zu of %zu, hole at %zu, is not zeros", page, pages, hole);
    }
    unsigned char present[16];
    CHECK(mincore(start + hole * PAGE, 5 * PAGE, present) == -1 && errno == ENOMEM);
    fill(start, hole * PAGE, 8);
    CHECK(munmap(start + from * PAGE, (to - from) * PAGE) == 0);
    verify(start, from * PAGE, 8, "before the unmapped");
}

/* mremap keeps the contents that it moves, also between the middles of units, and all others. */
static void moves(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    for (int round = 0; round < 40; round++) {
        size_t pages = 33 + 97 * round;
        char *block = map_anonymous((pages + 2) * PAGE);
        fill(block, (pages + 2) * PAGE, round);
        uint64_t random = round;
        ballast_churn(&b, 2000, &random);
        /* The middle moves elsewhere, the ends stay. */
        char *to = mremap(block + PAGE, pages * PAGE, (pages + round) * PAGE, MREMAP_MAYMOVE);
        CHECK(to != MAP_FAILED);
        verify(to, pages * PAGE, round + 1, "moved");
        for (int i = 0; i < round; i++) CHECK(page_is_zero(to + (pages + i) * PAGE));
        CHECK(page_is(block, round) || round == 0);
        CHECK(page_is(block + (pages + 1) * PAGE, round + pages + 1) || to == block + PAGE);
        char *back = mremap(to, (pages + round) * PAGE, PAGE, MREMAP_MAYMOVE);
        CHECK(back == to && page_is(back, round + 1));
        CHECK(munmap(back, PAGE) == 0);
        if (to != block + PAGE) CHECK(munmap(block, PAGE) == 0 && munmap(block + (pages + 1) * PAGE, PAGE) == 0);
    }
    ballast_verify(&b, "moves");
}

/* A shared mapping next to managed memory moves and grows as usual. */
static void shared_moves(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    for (int round = 0; round < 8; round++) {
        size_t pages = 512;
        char *shared = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(shared != MAP_FAILED);
        fill(shared, pages * PAGE, round);
        /* To addresses that were managed. */
        char *place = b.start + round * 4 * MIB + 3 * PAGE;
        CHECK(mremap(shared, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
        pid_t pid = fork();
        if (pid == 0) {
            fill(place, pages * PAGE, round + 1000);
            _exit(0);
        }
        child_is_well(pid, "who writes to shared memory");
        verify(place, pages * PAGE, round + 1000, "shared memory");
        for (size_t i = 0; i < pages; i++) fill_page(place + i * PAGE, ballast_seed(&b, (place - b.start) / PAGE + i));

    }
    ballast_verify(&b, "shared moves");
}

/* munmap and mmap by raw system calls, as some language run-times make them. */
static void raw_calls(void) {
    struct ballast b;
    ballast_make(&b, 2 * limit_bytes(), 3);
    for (int round = 0; round < 30; round++) {
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
    for (int round = 0; round < 4000; round++) {
        size_t pages = 1 + next_random(&random) % 40, from = next_random(&random) % (block.pages - pages);
        char *at = block.start + from * PAGE;
        CHECK(syscall(SYS_madvise, at, pages * PAGE, MADV_DONTNEED) == 0);
        for (size_t i = 0; i < pages; i++) CHECK(page_is_zero(at + i * PAGE), "round %d page %zu", round, from + i);
        for (size_t i = 0; i < pages; i++) {
            block.generation[from + i]++;
            fill_page(at + i * PAGE, ballast_seed(&block, from + i));
        }
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
    for (int round = 0; round < 4000; round++) {
        size_t pages = 1 + next_random(&random) % 40, from = next_random(&random) % (block.pages - pages);
        char *at = block.start + from * PAGE;
        for (size_t i = 0; i < pages; i++)
            CHECK(page_is(at + i * PAGE, ballast_seed(&block, from + i)), "round %d page %zu", round, from + i);
        CHECK(syscall(SYS_madvise, at, pages * PAGE, MADV_FREE) == 0);
        for (size_t i = 0; i < pages; i++) {
            block.generation[from + i]++;
            fill_page(at + i * PAGE, ballast_seed(&block, from + i));
        }
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
    for (int round = 0; round < 60; round++) {
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

/* mremap by a raw system call to one of a few places, and back, with and without the old mapping left in place. */
static void raw_returns(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    char *places = mmap(NULL, 10 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(places != MAP_FAILED);
    places = (char *)(((uintptr_t)places + (2 << 20) - 1) & ~((2ul << 20) - 1));
    uint64_t random = 5;
    for (int round = 0; round < 300; round++) {
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (round < 150 ? 0 : MREMAP_DONTUNMAP);
        size_t pages = 1 + next_random(&random) % 64, from = next_random(&random) % (b.pages - pages);
        char *at = b.start + from * PAGE, *to = places + (round < 150 ? round % 8 << 20 : 0);
        CHECK((char *)syscall(SYS_mremap, at, pages * PAGE, pages * PAGE, flags, to) == to);
        for (size_t i = 0; i < pages; i++)
            CHECK(page_is(to + i * PAGE, ballast_seed(&b, from + i)), "round %d page %zu", round, i);
        CHECK((char *)syscall(SYS_mremap, to, pages * PAGE, pages * PAGE, flags, at) == at);
    }
    ballast_verify(&b, "returned");
}

/* munmap, and then mmap(MAP_FIXED) into the hole. */
static void refixed(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    uint64_t random = 5;
    for (int round = 0; round < 200; round++) {
        size_t pages = 1 + next_random(&random) % 500, from = next_random(&random) % (b.pages - pages);
        char *at = b.start + from * PAGE;
        CHECK(munmap(at, pages * PAGE) == 0);
        CHECK(mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
        for (size_t i = 0; i < pages; i++) {
            CHECK(page_is_zero(at + i * PAGE), "round %d page %zu", round, from + i);
            fill_page(at + i * PAGE, ballast_seed(&b, from + i));
        }
    }
    ballast_verify(&b, "refixed");
}

/* MADV_GUARD_INSTALL drops the contents (Linux 6.13). */
static void guards(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    if (madvise(b.start, PAGE, 102) != 0) skip("MADV_GUARD_INSTALL is not there");
    CHECK(madvise(b.start, PAGE, 103) == 0 && page_is_zero(b.start));
    size_t step = 256, guarded = 63;
    for (size_t page = 1; page + guarded < b.pages; page += step)
        CHECK(madvise(b.start + page * PAGE, guarded * PAGE, 102) == 0);
    for (size_t page = 1; page + guarded < b.pages; page += step)
        CHECK(madvise(b.start + page * PAGE, guarded * PAGE, 103) == 0);
    for (size_t page = 0; page + guarded + 1 < b.pages; page++) {
        if (page == 0 || (page % step >= 1 && page % step <= guarded))
            CHECK(page_is_zero(b.start + page * PAGE), "page %zu", page);
        else CHECK(page_is(b.start + page * PAGE, ballast_seed(&b, page)), "page %zu", page);
    }
}

/* MAP_FIXED_NOREPLACE wins over MAP_FIXED. */
static void noreplace(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_FIXED_NOREPLACE;
    CHECK(mmap(b.start + 64 * PAGE, 64 * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED && errno == EEXIST);
    ballast_verify(&b, "not replaced");
}

/* madvise stops at a locked page: the range below it is dropped, the range above is not. */
static void half_dropped(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    size_t locked = b.pages / 3 + 5, from = 7;
    CHECK(mlock(b.start + locked * PAGE, PAGE) == 0);
    CHECK(madvise(b.start + from * PAGE, (b.pages - from) * PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
    for (size_t page = 0; page < b.pages; page++) {
        if (page >= from && page < locked) CHECK(page_is_zero(b.start + page * PAGE), "page %zu", page);
        else CHECK(page_is(b.start + page * PAGE, ballast_seed(&b, page)), "page %zu", page);
    }
}

/* One read-only page in each MiB keeps its unit resident, and nothing else: the limit holds. */
static void read_only(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    for (size_t page = 77; page < b.pages; page += 256) CHECK(mprotect(b.start + page * PAGE, PAGE, PROT_READ) == 0);
    uint64_t random = 5;
    double end = now() + 2;
    while (now() < end) {
        size_t page = next_random(&random) % b.pages;
        CHECK(page_is(b.start + page * PAGE, ballast_seed(&b, page)), "page %zu", page);
    }
    for (size_t page = 77; page < b.pages; page += 256)
        CHECK(mprotect(b.start + page * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    ballast_verify(&b, "read-only pages");
}

/* Zero pages that were read before the engine took over become real pages without a fault that it sees. */
static void read_zeros(void) {
    struct ballast b;
    size_t bytes = 6 * limit_bytes();
    char *start = map_anonymous(bytes);
    for (size_t at = 0; at < bytes; at += PAGE) CHECK(*(volatile char *)(start + at) == 0);
    ballast_make(&b, limit_bytes(), 3);
    for (size_t at = 0; at < bytes; at += PAGE) fill_page(start + at, at);
    for (size_t at = 0; at < bytes; at += PAGE) CHECK(page_is(start + at, at));
    ballast_verify(&b, "read zeros");
}

/* MAP_POPULATE and MADV_POPULATE_WRITE over the limit. */
/* Mappings smaller than a folio: pieces of 1 to 40 pages, many next to each other. They are unmapped in whole or in
 * part, mapped again, dropped and moved. */
struct piece {
    char *start;
    size_t pages;
    uint64_t seed;
};

static void check_piece(struct piece *p, const char *when) { verify(p->start, p->pages * PAGE, p->seed, when); }

static void piece_change(struct piece *p, struct piece *spare, uint64_t *r) {
    if (!p->start) {
        *p = (struct piece){NULL, 1 + next_random(r) % 40, next_random(r)};
        p->start = map_anonymous(p->pages * PAGE);
        for (size_t page = 0; page < p->pages; page++) CHECK(page_is_zero(p->start + page * PAGE), "a new piece");
        fill(p->start, p->pages * PAGE, p->seed);
        return;
    }
    check_piece(p, "a piece");
    size_t from = next_random(r) % p->pages, count = 1 + next_random(r) % (p->pages - from);
    char *at = p->start + from * PAGE;
    switch (next_random(r) % 6) {
    case 0:
        CHECK(munmap(p->start, p->pages * PAGE) == 0);
        p->start = NULL;
        break;
    case 1: case 2: { /* What is left above becomes a piece of its own. */
        struct piece above = {at + count * PAGE, p->pages - from - count, p->seed + from + count};
        if (above.pages && spare->start) break;
        CHECK(munmap(at, count * PAGE) == 0);
        if (above.pages) *spare = above;
        p->pages = from;
        if (!from) p->start = NULL;
        break;
    }
    case 3:
        CHECK(madvise(at, count * PAGE, MADV_DONTNEED) == 0);
        for (size_t page = 0; page < count; page++) CHECK(page_is_zero(at + page * PAGE), "dropped of a piece");
        fill(at, count * PAGE, p->seed + from);
        break;
    case 4: {
        size_t pages = 1 + next_random(r) % 60, kept = pages < p->pages ? pages : p->pages;
        /* A range of several mappings of the kernel cannot be moved in one call. */
        void *moved = mremap(p->start, p->pages * PAGE, pages * PAGE, MREMAP_MAYMOVE);
        if (moved == MAP_FAILED) {
            CHECK(errno == EFAULT);
            break;
        }
        p->start = moved;
        for (size_t page = kept; page < pages; page++) CHECK(page_is_zero(p->start + page * PAGE), "a grown piece");
        p->pages = pages;
        check_piece(&(struct piece){p->start, kept, p->seed}, "a moved piece");
        fill(p->start, pages * PAGE, p->seed);
        break;
    }
    default:
        p->seed = next_random(r);
        fill(p->start, p->pages * PAGE, p->seed);
    }
}

static void pieces_of(uint64_t seed, size_t bytes, double seconds) {
    size_t count = bytes / (20 * PAGE);
    struct piece *pieces = calloc(count, sizeof *pieces);
    uint64_t random = seed;
    for (size_t i = 0; i < count; i++) piece_change(&pieces[i], &pieces[i], &random);
    for (double until = now() + seconds; now() < until;)
        for (int i = 0; i < 64; i++)
            piece_change(&pieces[next_random(&random) % count], &pieces[next_random(&random) % count], &random);
    for (size_t i = 0; i < count; i++) if (pieces[i].start) check_piece(&pieces[i], "at the end");
}

static void pieces(void) { pieces_of(31, 3 * limit_bytes(), 4); }

static void *pieces_thread(void *argument) {
    pieces_of((uint64_t)argument, limit_bytes(), 4);
    return NULL;
}

static void pieces_threads(void) {
    pthread_t threads[4];
    for (uint64_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, pieces_thread, (void *)(i + 60)) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* A folio that lost a part is managed again once its addresses are mapped again. Otherwise every round would leave
 * more memory that is never compressed. */
static void pieces_return(void) {
    size_t bytes = 3 * limit_bytes(), step = 64 << 10;
    char *start = map_anonymous(bytes);
    for (size_t at = 0; at < bytes; at += MIB, usleep(500)) fill(start + at, MIB, 5 + at / PAGE);
    for (int round = 0; round < 4; round++) {
        size_t hole = (round % 2 ? 3 : 9) * PAGE;
        for (size_t at = 0; at < bytes; at += step) {
            CHECK(munmap(start + at + hole, 2 * PAGE) == 0);
            char *again = mmap(start + at + hole, 2 * PAGE, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
            CHECK(again == start + at + hole);
            CHECK(page_is_zero(again) && page_is_zero(again + PAGE));
            fill(again, 2 * PAGE, 5 + (again - start) / PAGE);
        }
        verify(start, bytes, 5, "with pieces that returned");
    }
}

/* Memory gets a protection key while some of it is compressed, and loses it again. */
static void keys(void) {
    int key = pkey_alloc(0, 0);
    if (key < 0) skip("this machine has no protection keys");
    size_t bytes = 3 * limit_bytes(), half = limit_bytes();
    char *start = map_anonymous(bytes);
    fill(start, bytes, 8);
    CHECK(pkey_mprotect(start, half, PROT_READ | PROT_WRITE, key) == 0);
    verify(start, bytes, 8, "with a key on a part");
    fill(start, half, 9);
    verify(start, half, 9, "written under a key");
    verify(start + half, bytes - half, 8 + half / PAGE, "beside the key");
    CHECK(pkey_mprotect(start, half, PROT_READ | PROT_WRITE, 0) == 0 && pkey_free(key) == 0);
    verify(start, half, 9, "with the key gone");
    verify(start + half, bytes - half, 8 + half / PAGE, "beside what had a key");
}

/* Only many small mappings next to each other. */
static void small(void) {
    size_t bytes = 16 << 10, count = 5 * limit_bytes() / bytes;
    char **maps = malloc(count * sizeof *maps);
    for (size_t i = 0; i < count; i++) {
        maps[i] = map_anonymous(bytes);
        fill(maps[i], bytes, 4 * i);
        if (i % 64 == 0) usleep(500);
    }
    for (size_t i = 0; i < count; i++) verify(maps[i], bytes, 4 * i, "a small mapping");
}

static void populate(void) {
    char *start = mmap(NULL, 3 * limit_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                       -1, 0);
    CHECK(start != MAP_FAILED);
    fill(start, 3 * limit_bytes(), 1);
    char *more = map_anonymous(2 * limit_bytes());
    CHECK(madvise(more, 2 * limit_bytes(), MADV_POPULATE_WRITE) == 0);
    fill(more, 2 * limit_bytes(), 2);
    verify(start, 3 * limit_bytes(), 1, "populated");
    verify(more, 2 * limit_bytes(), 2, "populated by advice");
}

/* Impossible lengths are refused quickly, and change nothing. */
static void beyond(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 21);
    const size_t all = SIZE_MAX - PAGE + 1, half = (size_t)1 << 46;
    for (int i = 0; i < 20; i++) {
        CHECK(munmap(b.start, all) == -1 && errno == EINVAL);
        CHECK(munmap(b.start, all - (size_t)b.start) == -1 && errno == EINVAL);
        CHECK(mremap(b.start, PAGE, half, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
        CHECK(mmap(b.start, half, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED);
        CHECK(madvise(b.start, all, MADV_DONTNEED) == -1 && errno == EINVAL);
    }
    ballast_verify(&b, "beyond all mappings");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"single", single}, {"threads", threads}, {"neighbours", neighbours}, {"file_over", file_over},
        {"holes", holes}, {"moves", moves}, {"shared_moves", shared_moves}, {"raw_calls", raw_calls},
        {"raw_drops", raw_drops}, {"raw_frees", raw_frees}, {"raw_moves", raw_moves}, {"raw_returns", raw_returns},
        {"refixed", refixed}, {"guards", guards},
        {"noreplace", noreplace}, {"half_dropped", half_dropped}, {"read_only", read_only}, {"read_zeros", read_zeros},
        {"populate", populate}, {"pieces", pieces}, {"pieces_threads", pieces_threads},
        {"pieces_return", pieces_return}, {"small", small}, {"keys", keys}, {"beyond", beyond},
    };
    return CHOOSE(cases);
}
