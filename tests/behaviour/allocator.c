/* malloc and its family against a model: every block is filled with its own pattern. */
#include "behaviour.h"
#include <malloc.h>
#include <sys/prctl.h>

enum { SLOTS = 4096 };

struct block {
    unsigned char *at;
    size_t bytes;
    uint64_t seed;
};

static void write_block(struct block *b) {
    size_t words = b->bytes / 8;
    uint64_t base = mix(b->seed), *word = (uint64_t *)b->at;
    for (size_t i = 0; i < words; i++) word[i] = base + (i & 15);
    for (size_t i = words * 8; i < b->bytes; i++) b->at[i] = (unsigned char)base;
}

static void read_block(const struct block *b, size_t bytes) {
    size_t words = bytes / 8;
    uint64_t base = mix(b->seed), *word = (uint64_t *)b->at, wrong = 0;
    for (size_t i = 0; i < words; i++) wrong |= word[i] ^ (base + (i & 15));
    CHECK(wrong == 0, "block of %zu bytes at %p", bytes, (void *)b->at);
    if (bytes == b->bytes)
        for (size_t i = words * 8; i < bytes; i++) CHECK(b->at[i] == (unsigned char)base, "tail of %zu", bytes);
}

static size_t some_size(uint64_t *random) {
    uint64_t r = next_random(random);
    switch (r % 16) {
    case 0: return 128 * 1024 + next_random(random) % (3 * MIB);
    case 1: case 2: return 4096 + next_random(random) % 65536;
    case 3: case 4: case 5: return 512 + next_random(random) % 8192;
    default: return next_random(random) % 512;
    }
}

static size_t work(uint64_t seed, size_t most, double until) {
    struct block *blocks = calloc(SLOTS, sizeof *blocks);
    uint64_t random = seed;
    size_t held = 0, done = 0, peak = 0;
    for (; now() < until; done++) {
        struct block *b = &blocks[next_random(&random) % SLOTS];
        size_t bytes = some_size(&random);
        if (b->at) {
            read_block(b, b->bytes);
            if (next_random(&random) % 3 == 0 && held < most) {
                size_t kept = b->bytes < bytes ? b->bytes : bytes;
                b->at = realloc(b->at, bytes ? bytes : 1);
                CHECK(b->at);
                read_block(b, kept & ~7ul);
                held += bytes - b->bytes;
                b->bytes = bytes;
                b->seed = next_random(&random);
                write_block(b);
                continue;
            }
            free(b->at);
            held -= b->bytes;
            b->at = NULL;
            if (held > most / 2) continue;
        }
        if (held > most) continue;
        size_t align = 16ul << next_random(&random) % 9;
        switch (next_random(&random) % 5) {
        case 0:
            b->at = calloc(1, bytes ? bytes : 1);
            for (size_t i = 0; i < bytes; i++) CHECK(b->at[i] == 0, "calloc of %zu: byte %zu", bytes, i);
            break;
        case 1: CHECK(posix_memalign((void **)&b->at, align, bytes) == 0); break;
        case 2: b->at = aligned_alloc(align, (bytes + align - 1) & -align); break;
        default: b->at = malloc(bytes); align = 1;
        }
        CHECK(b->at || bytes == 0);
        if (!b->at) continue;
        CHECK(malloc_usable_size(b->at) >= bytes);
        b->bytes = bytes;
        b->seed = next_random(&random);
        write_block(b);
        held += bytes;
        peak = held > peak ? held : peak;
    }
    for (int i = 0; i < SLOTS; i++)
        if (blocks[i].at) read_block(&blocks[i], blocks[i].bytes), free(blocks[i].at);
    free(blocks);
    return peak;
}

static void single(void) {
    size_t peak = work(1, 5 * limit_bytes(), now() + 4);
    CHECK(peak > 2 * limit_bytes(), "only %zu bytes held", peak);
}

static void *thread(void *argument) {
    work((uint64_t)argument * 1000003, 5 * limit_bytes() / 4, now() + 4);
    return NULL;
}

static void threads(void) {
    pthread_t thread_of[4];
    for (uint64_t i = 0; i < 4; i++) CHECK(pthread_create(&thread_of[i], NULL, thread, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(thread_of[i], NULL) == 0);
}

/* One thread allocates blocks, and another frees them. */
static void *volatile parcels[1024];
static void *receive(void *argument) {
    for (int taken = 0; taken < 20000;) {
        void *parcel = __atomic_exchange_n(&parcels[taken % 1024], NULL, __ATOMIC_ACQUIRE);
        if (!parcel) { sched_yield(); continue; }
        uint64_t *words = parcel;
        for (int i = 0; i < 1500; i++) CHECK(words[i] == (uint64_t)taken + (i & 7));
        free(parcel);
        taken++;
    }
    return argument;
}

static void handed_over(void) {
    struct ballast b;
    ballast_make(&b, 3 * limit_bytes(), 5);
    ballast_start(&b);
    pthread_t receiver;
    CHECK(pthread_create(&receiver, NULL, receive, NULL) == 0);
    for (int sent = 0; sent < 20000; sent++) {
        uint64_t *words = malloc(12000);
        for (int i = 0; i < 1500; i++) words[i] = sent + (i & 7);
        while (parcels[sent % 1024]) sched_yield();
        __atomic_store_n(&parcels[sent % 1024], words, __ATOMIC_RELEASE);
    }
    CHECK(pthread_join(receiver, NULL) == 0);
    ballast_stop(&b);
}

/* Arrays that grow by an eighth, some by one page more, to a multiple of the limit in all; they shrink, are handed to a
 * child, which makes them grow further, and are freed by another thread. */
enum { ARRAYS = 5, GROW_WORDS = 3000 };
static struct array { uint64_t *at; size_t words; uint64_t seed; } arrays[ARRAYS];

static void array_resize(struct array *a, size_t words) {
    a->at = realloc(a->at, words * 8);
    CHECK(a->at && malloc_usable_size(a->at) >= words * 8);
    for (size_t i = a->words; i < words; i++) a->at[i] = a->seed + (i >> 4);
    a->words = words;
}

static void array_check(const struct array *a, size_t step) {
    for (size_t i = 0; i < a->words; i += step)
        CHECK(a->at[i] == a->seed + (i >> 4), "word %zu of %zu holds %lx", i, a->words, a->at[i]);
}

static void *array_grow(void *argument) {
    struct array *a = argument;
    uint64_t random = a->seed = 1 + (uint64_t)(a - arrays);
    size_t most = 3 * limit_bytes() / 8 / ARRAYS;
    while (a->words < most) {
        size_t more = next_random(&random) % 3 == 0 ? 512 : a->words / 8;
        array_resize(a, a->words + (more ? more : GROW_WORDS));
        array_check(a, 509);
        if (next_random(&random) % 40 == 0 && a->words > most / 4) {
            array_resize(a, next_random(&random) % 2 ? a->words / 3 : a->words - a->words / 16);
            array_check(a, 127);
        }
    }
    array_check(a, 1);
    return NULL;
}

static void *array_free(void *argument) {
    struct array *a = argument;
    array_check(a, 1);
    array_resize(a, 1000);
    array_check(a, 1);
    free(a->at);
    return NULL;
}

static void grown(void) {
    pthread_t thread_of[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) CHECK(pthread_create(&thread_of[i], NULL, array_grow, &arrays[i]) == 0);
    for (int i = 0; i < ARRAYS; i++) CHECK(pthread_join(thread_of[i], NULL) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < ARRAYS; i++) array_check(&arrays[i], 1), array_resize(&arrays[i], arrays[i].words * 5 / 4);
        for (int i = 0; i < ARRAYS; i++) array_free(&arrays[i]);
        _exit(0);
    }
    child_is_well(pid, "a child with arrays");
    for (int i = 0; i < ARRAYS; i++) CHECK(pthread_create(&thread_of[i], NULL, array_free, &arrays[i]) == 0);
    for (int i = 0; i < ARRAYS; i++) CHECK(pthread_join(thread_of[i], NULL) == 0);
    CHECK(realloc(NULL, 0) != NULL);
    /* What cannot be had leaves the block as it is. */
    uint64_t *block = realloc(malloc(MIB), 4 * MIB);
    block[7] = 77;
    CHECK(realloc(block, (size_t)1 << 60) == NULL && errno == ENOMEM && block[7] == 77);
    free(block);
}

/* Where the kernel gives huge pages to those who ask, malloc does not ask; the program still may. */
static void small_pages(void) {
    char line[256];
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    if (!file || !fgets(line, sizeof line, file)) skip("this kernel has no huge pages");
    if (strstr(line, "[always]")) skip("this kernel gives huge pages to those who do not ask");
    fclose(file);
    for (int i = 0; i < 1000; i++) memset(malloc(4000), 1, 4000);
    size_t kib = kib_in("/proc/self/smaps_rollup", "AnonHugePages:");
    CHECK(kib == 0, "%zu KiB of huge pages", kib);
    CHECK(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0, "huge pages are off for the whole process");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"single", single}, {"threads", threads}, {"handed_over", handed_over},
        {"small_pages", small_pages}, {"grown", grown}};
    return CHOOSE(cases);
}
