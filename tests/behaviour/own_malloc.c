/* An executable with a malloc of its own, as jemalloc or Chromium's linked in: it maps memory with its lock held.
 * Whatever is called from there must not ask it for memory: it would wait for itself.
 */
#include "behaviour.h"

static atomic_flag lock = ATOMIC_FLAG_INIT;
static atomic_int holder;
static char *at, *end;

static void take(void) {
    /* Who has the lock already would spin for ever. */
    if (atomic_load(&holder) == (int)syscall(SYS_gettid)) {
        static const char text[] = "malloc was called by who holds its lock\n";
        report(text, sizeof text - 1);
        _exit(1);
    }
    while (atomic_flag_test_and_set(&lock)) {}
    atomic_store(&holder, (int)syscall(SYS_gettid));
}

static void give(void) {
    atomic_store(&holder, 0);
    atomic_flag_clear(&lock);
}

void *malloc(size_t bytes) {
    bytes = (bytes + 31) & ~(size_t)15;
    take();
    if (!at || bytes > (size_t)(end - at)) {
        size_t region = bytes > 8 * MIB ? bytes : 8 * MIB;
        at = mmap(NULL, region, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        end = at + region;
    }
    char *block = at + 16;
    *(size_t *)at = bytes - 16;
    at += bytes;
    give();
    return block;
}

void free(void *block) {
    /* The lock is what matters. */
    take();
    give();
    (void)block;
}

void *calloc(size_t count, size_t bytes) { return malloc(count * bytes); }

void *realloc(void *block, size_t bytes) {
    void *new = malloc(bytes);
    if (block) {
        size_t old = *(size_t *)((char *)block - 16);
        memcpy(new, block, old < bytes ? old : bytes);
    }
    return new;
}

/* Many blocks, until they are three times the limit, from several threads. */
static void *life(void *argument) {
    uint64_t seed = (uintptr_t)argument;
    size_t count = 3 * limit_bytes() / 4 / (16 * PAGE);
    char **blocks = calloc(count, sizeof *blocks);
    for (size_t i = 0; i < count; i++) {
        blocks[i] = malloc(16 * PAGE);
        fill(blocks[i], 16 * PAGE, (seed << 32) + i * 16);
    }
    for (size_t i = 0; i < count; i++) {
        verify(blocks[i], 16 * PAGE, (seed << 32) + i * 16, "a block");
        free(blocks[i]);
    }
    return NULL;
}

static void blocks(void) {
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, life, (void *)i) == 0);
    for (size_t i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Children, whose engine starts while the fork's handlers run. */
static void children(void) {
    life((void *)7);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            life((void *)8);
            _exit(0);
        }
        child_is_well(pid, "a child");
    }
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"blocks", blocks}, {"children", children}};
    return CHOOSE(cases);
}
