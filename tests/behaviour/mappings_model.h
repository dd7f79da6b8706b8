/* Random changes of mappings, against a model of every page. */
#ifndef MAPPINGS_MODEL_H
#define MAPPINGS_MODEL_H
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
#endif
