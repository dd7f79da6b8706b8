/* The mmap family against a model of every page: its contents, and whether it may be accessed. */
#include "behaviour.h"

#include "mappings_model.h"

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

/* A device is mapped over managed memory, and anonymous memory again. */
static void device_over(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 2);
    int device = open("/dev/zero", O_RDWR);
    CHECK(device >= 0);
    for (size_t from = 5; from + 64 < b.pages; from += b.pages / 7) {
        char *at = b.start + from * PAGE;
        CHECK(mmap(at, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, device, 0) == at);
        for (int i = 0; i < 64; i++) CHECK(page_is_zero(at + i * PAGE));
        fill(at, 64 * PAGE, 77);
        verify(at, 64 * PAGE, 77, "the device");
        CHECK(mmap(at, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
        for (int i = 0; i < 64; i++) CHECK(page_is_zero(at + i * PAGE));
        for (int i = 0; i < 64; i++) fill_page(at + i * PAGE, ballast_seed(&b, from + i));
    }
    ballast_verify(&b, "the device");
    /* A call that is refused changes nothing. */
    /* The second one has a driver of its own, which zfolio asks for a mapping at this very place. */
    const char *others[] = {"/dev/null", "/dev/ptmx"};
    for (int i = 0; i < 2; i++) {
        int other = open(others[i], O_RDWR);
        if (other < 0) continue;
        errno = 0;
        void *refused = mmap(b.start + 9 * PAGE, 999 * PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, other, 0);
        CHECK(refused == MAP_FAILED && errno == ENODEV, "%s: %s", others[i], strerror(errno));
        ballast_verify(&b, "a device that refuses");
    }
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

#include "mappings_others.h"
#include "mappings_raw.h"

/* munmap, and then mmap(MAP_FIXED) into the hole. */
static void refixed(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 3);
    uint64_t random = 5;
    for (int round = 0; goes_on(round, 200); round++) {
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
    come_down(60);
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
        CHECK(mremap(b.start, PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (char *)all) == MAP_FAILED);
        CHECK(mmap(b.start, half, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED);
        CHECK(madvise(b.start, all, MADV_DONTNEED) == -1 && errno == EINVAL);
    }
    ballast_verify(&b, "beyond all mappings");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"single", single}, {"threads", threads}, {"neighbours", neighbours}, {"file_over", file_over},
        {"device_over", device_over},
        {"holes", holes}, {"moves", moves}, {"shared_moves", shared_moves}, {"raw_calls", raw_calls},
        {"raw_drops", raw_drops}, {"raw_frees", raw_frees}, {"raw_moves", raw_moves}, {"raw_grows", raw_grows},
        {"raw_replaces", raw_replaces}, {"raw_returns", raw_returns},
        {"half_moves", half_moves}, {"given_up_moves", given_up_moves}, {"grows", grows}, {"shm_over", shm_over},
        {"beside_a_file", beside_a_file}, {"refixed", refixed}, {"guards", guards},
        {"noreplace", noreplace}, {"half_dropped", half_dropped}, {"read_only", read_only}, {"read_zeros", read_zeros},
        {"populate", populate}, {"pieces", pieces}, {"pieces_threads", pieces_threads},
        {"pieces_return", pieces_return}, {"small", small}, {"keys", keys}, {"beyond", beyond},
    };
    return CHOOSE(cases);
}
