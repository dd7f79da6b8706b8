/* The kernel reads and writes compressed memory, by every call that takes a buffer. */
#include "behaviour.h"
#include <sched.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>

static struct ballast b;
enum { CHUNK = 64 };

static int scratch(int flags) {
    static const char *const places[] = {".", "/var/tmp", "/tmp", NULL};
    for (int i = 0; places[i]; i++) {
        int file = open(places[i], O_TMPFILE | O_RDWR | flags, 0600);
        if (file >= 0) return file;
    }
    return -1;
}

/* Parts of the ballast are written to a file, and read back to other places in it. */
static void calls(void) {
    ballast_make(&b, 4 * limit_bytes(), 1);
    int file = memfd_create("calls", 0);
    CHECK(file >= 0);
    size_t bytes = CHUNK * PAGE;
    uint64_t random = 1;
    for (int round = 0; goes_on(round, 150); round++) {
        size_t from = next_random(&random) % (b.pages - CHUNK), to = next_random(&random) % (b.pages - CHUNK);
        char *source = b.start + from * PAGE, *target = b.start + to * PAGE;
        uint64_t seeds[CHUNK];
        for (int i = 0; i < CHUNK; i++) seeds[i] = ballast_seed(&b, from + i);
        struct iovec out[2] = {{source, bytes / 2}, {source + bytes / 2, bytes / 2}};
        struct iovec in[2] = {{target, bytes / 4}, {target + bytes / 4, bytes - bytes / 4}};
        switch (round % 5) {
        case 0:
            CHECK(lseek(file, 0, SEEK_SET) == 0 && write(file, source, bytes) == (ssize_t)bytes);
            CHECK(lseek(file, 0, SEEK_SET) == 0 && read(file, target, bytes) == (ssize_t)bytes);
            break;
        case 1:
            CHECK(pwrite(file, source, bytes, 0) == (ssize_t)bytes && pread(file, target, bytes, 0) == (ssize_t)bytes);
            break;
        case 2:
            CHECK(pwritev(file, out, 2, 0) == (ssize_t)bytes && preadv(file, in, 2, 0) == (ssize_t)bytes);
            break;
        case 3: {
            int copy = memfd_create("copy", 0);
            off_t start = 0;
            CHECK(pwrite(file, source, bytes, 0) == (ssize_t)bytes);
            CHECK(sendfile(copy, file, &start, bytes) == (ssize_t)bytes);
            CHECK(pread(copy, target, bytes, 0) == (ssize_t)bytes);
            close(copy);
            break;
        }
        default:
            if (llabs((long long)from - (long long)to) < CHUNK) continue;
            CHECK(process_vm_readv(getpid(), in, 2, out, 2, 0) == (ssize_t)bytes);
        }
        for (int i = 0; i < CHUNK; i++) CHECK(page_is(target + i * PAGE, seeds[i]), "round %d page %d", round, i);
        for (int i = 0; i < CHUNK; i++) fill_page(target + i * PAGE, ballast_seed(&b, to + i));
    }
    ballast_verify(&b, "system calls");
}

static void *read_pipe(void *argument) {
    int *ends = argument;
    char *into = malloc(MIB);
    uint64_t seed = 0;
    for (size_t have = 0;;) {
        ssize_t got = read(ends[0], into + have, MIB - have);
        CHECK(got >= 0);
        if (got == 0) break;
        have += got;
        size_t whole = have & -PAGE;
        verify(into, whole, seed, "through a pipe");
        seed += whole / PAGE;
        memmove(into, into + whole, have - whole);
        have -= whole;
    }
    return (void *)seed;
}

static void pipes(int vmspliced, int family) {
    ballast_make(&b, 2 * limit_bytes(), 2);
    ballast_start(&b);
    char *data = map_anonymous(2 * limit_bytes());
    size_t pages = 2 * limit_bytes() / PAGE;
    fill(data, pages * PAGE, 0);
    int ends[2];
    if (family) CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    else CHECK(pipe(ends) == 0);
    pthread_t reader;
    CHECK(pthread_create(&reader, NULL, read_pipe, ends) == 0);
    for (size_t at = 0; at < pages * PAGE;) {
        struct iovec piece = {data + at, pages * PAGE - at < 16 * PAGE ? pages * PAGE - at : 16 * PAGE};
        ssize_t gone = vmspliced ? vmsplice(ends[1], &piece, 1, 0) : write(ends[1], piece.iov_base, piece.iov_len);
        CHECK(gone > 0);
        at += gone;
    }
    close(ends[1]);
    void *read_pages;
    CHECK(pthread_join(reader, &read_pages) == 0 && (size_t)read_pages == pages);
    verify(data, pages * PAGE, 0, "written to a pipe");
    ballast_stop(&b);
}

static void pipe_write(void) { pipes(0, 0); }
static void socket_write(void) { pipes(0, 1); }
static void pipe_splice(void) { pipes(1, 0); }

/* Pages are in a pipe while the process is under pressure. */
static void splice_kept(void) {
    ballast_make(&b, 3 * limit_bytes(), 3);
    char *data = map_anonymous(64 * 16 * PAGE), *into = map_anonymous(16 * PAGE);
    fill(data, 64 * 16 * PAGE, 0);
    uint64_t random = 3;
    for (int i = 0; i < 64; i++) {
        int ends[2];
        struct iovec piece = {data + i * 16 * PAGE, 16 * PAGE};
        CHECK(pipe(ends) == 0 && vmsplice(ends[1], &piece, 1, 0) == (ssize_t)(16 * PAGE));
        ballast_churn(&b, 12000, &random);
        for (size_t have = 0; have < 16 * PAGE;) {
            ssize_t got = read(ends[0], into + have, 16 * PAGE - have);
            CHECK(got > 0);
            have += got;
        }
        verify(into, 16 * PAGE, i * 16, "kept in a pipe");
        close(ends[0]), close(ends[1]);
    }
    ballast_verify(&b, "splice");
}

/* MSG_ZEROCOPY: the socket sends from the program's pages until it reports that it is done. */
static void zerocopy(void) {
    ballast_make(&b, 3 * limit_bytes(), 4);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (listener < 0 || bind(listener, (void *)&address, length) != 0) skip("no loopback network");
    CHECK(listen(listener, 1) == 0 && getsockname(listener, (void *)&address, &length) == 0);
    int out = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(out, (void *)&address, length) != 0) skip("no loopback network");
    int in = accept(listener, NULL, NULL);
    CHECK(in >= 0);
    if (setsockopt(out, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) != 0) skip("SO_ZEROCOPY is refused");
    size_t bytes = 16 * PAGE;
    char *data = map_anonymous(200 * bytes), *into = map_anonymous(bytes);
    fill(data, 200 * bytes, 0);
    uint64_t random = 4;
    for (int i = 0; i < 60; i++) {
        ssize_t sent = send(out, data + i * bytes, bytes, MSG_ZEROCOPY);
        CHECK(sent > 0);
        ballast_churn(&b, 8000, &random);
        for (ssize_t have = 0; have < sent;) {
            ssize_t got = recv(in, into + have, sent - have, 0);
            CHECK(got > 0);
            have += got;
        }
        verify(into, sent & -PAGE, i * 16, "sent without a copy");
    }
    ballast_verify(&b, "zerocopy");
}

static void direct(void) {
    ballast_make(&b, 3 * limit_bytes(), 5);
    int file = scratch(O_DIRECT);
    if (file < 0) skip("no file system here has O_DIRECT");
    ballast_start(&b);
    size_t bytes = 256 * PAGE, blocks = 24;
    char *buffers[24];
    for (size_t i = 0; i < blocks; i++) {
        CHECK(posix_memalign((void **)&buffers[i], PAGE, bytes) == 0);
        fill(buffers[i], bytes, i * 1000);
    }
    for (int round = 0; round < 6; round++) {
        for (size_t i = 0; i < blocks; i++) CHECK(pwrite(file, buffers[i], bytes, i * bytes) == (ssize_t)bytes);
        for (size_t i = 0; i < blocks; i++) memset(buffers[i], round, bytes);
        for (size_t i = 0; i < blocks; i++) {
            size_t other = (i + round) % blocks;
            CHECK(pread(file, buffers[i], bytes, other * bytes) == (ssize_t)bytes);
            verify(buffers[i], bytes, ((other + blocks - 0) % blocks) * 1000, "read directly");
        }
        for (size_t i = 0; i < blocks; i++) fill(buffers[i], bytes, i * 1000);
    }
    ballast_stop(&b);
}

/* Two threads read and write files with O_DIRECT, each with memory of 1.5 times the limit, while a third one uses
 * ballast. Buffers are compressed between two transfers, and next to running ones. Nobody may move the pages that
 * the device uses during a transfer. A transfer may begin inside a page whose beginning the program writes at the
 * same time. */
struct half {
    int file;
    size_t pages, sector;
    char *start;
    /* The contents of each page in memory, and of each page of the file. */
    uint64_t *here, *there;
    uint64_t random;
    size_t out, beside;
    /* The page whose first word is a counter, and whether a thread uses it. */
    _Atomic(uint64_t *) word;
    atomic_int counting, stop;
    atomic_ulong counted;
    pthread_t thread, counter;
};

static void *count_beside(void *argument) {
    struct half *h = argument;
    while (!atomic_load(&h->stop)) {
        atomic_store(&h->counting, 1);
        uint64_t *word = atomic_load(&h->word);
        if (word) (*(volatile uint64_t *)word)++, atomic_fetch_add(&h->counted, 1);
        atomic_store(&h->counting, 0);
        if (!word) sched_yield();
    }
    return NULL;
}

static size_t not_resident(char *at, size_t pages) {
    unsigned char present[64];
    size_t out = 0;
    CHECK(mincore(at, pages * PAGE, present) == 0);
    for (size_t i = 0; i < pages; i++) out += !(present[i] & 1);
    return out;
}

/* Reads `pages` pages without their first `sector` bytes, while the first word is counted up. */
static void read_beside(struct half *h, size_t at, size_t from, size_t pages) {
    char *page = h->start + at * PAGE;
    size_t bytes = pages * PAGE - h->sector;
    uint64_t *word = (uint64_t *)page, before = *word;
    atomic_store(&h->counted, 0);
    if (h->sector) atomic_store(&h->word, word);
    CHECK(pread(h->file, page + h->sector, bytes, from * PAGE + h->sector) == (ssize_t)bytes);
    atomic_store(&h->word, NULL);
    while (atomic_load(&h->counting)) sched_yield();
    if (h->sector) {
        CHECK(*word == before + atomic_load(&h->counted), "page %zu: %lu counted", at, atomic_load(&h->counted));
        h->beside += atomic_load(&h->counted);
        uint64_t both[512];
        fill_page(both, h->here[at]);
        CHECK(memcmp(both + 1, word + 1, h->sector - 8) == 0, "page %zu: what lies beside what was read", at);
        fill_page(both, h->there[from]);
        memcpy(page, both, h->sector);
    }
    for (size_t i = 0; i < pages; i++) {
        h->here[at + i] = h->there[from + i];
        CHECK(page_is(page + i * PAGE, h->here[at + i]), "page %zu of %zu read directly", at + i, h->pages);
    }
}

/* Whole pages, from all over the memory to one place of the file, or back. */
static void scattered(struct half *h, int into, size_t at, size_t place, size_t pages) {
    struct iovec parts[64];
    for (size_t i = 0; i < pages; i++) parts[i] = (struct iovec){h->start + (at + i * 171) % h->pages * PAGE, PAGE};
    ssize_t moved = into ? preadv(h->file, parts, pages, place * PAGE) : pwritev(h->file, parts, pages, place * PAGE);
    CHECK(moved == (ssize_t)(pages * PAGE));
    for (size_t i = 0; i < pages; i++) {
        size_t page = (at + i * 171) % h->pages;
        if (into) h->here[page] = h->there[place + i];
        else h->there[place + i] = h->here[page];
        CHECK(page_is(h->start + page * PAGE, h->here[page]), "page %zu of %zu, %d", page, h->pages, into);
    }
}

static void *half_life(void *argument) {
    struct half *h = argument;
    for (int round = 0; goes_on(round, 400); round++) {
        size_t pages = 1 + next_random(&h->random) % 64;
        size_t at = next_random(&h->random) % (h->pages - pages), place = next_random(&h->random) % (h->pages - pages);
        char *start = h->start + at * PAGE;
        h->out += not_resident(start, pages);
        switch (round % 4) {
        case 0:
            CHECK(pwrite(h->file, start, pages * PAGE, place * PAGE) == (ssize_t)(pages * PAGE));
            for (size_t i = 0; i < pages; i++) h->there[place + i] = h->here[at + i];
            break;
        case 1:
            read_beside(h, at, place, pages);
            break;
        case 2:
            for (size_t i = 0; i < pages; i++) fill_page(start + i * PAGE, h->here[at + i] = mix(h->random + i));
            scattered(h, 0, at, place, 1 + pages / 4);
            break;
        default:
            scattered(h, 1, at, place, 1 + pages / 4);
        }
    }
    return NULL;
}

static void half_make(struct half *h, int number) {
    *h = (struct half){.file = scratch(O_DIRECT), .pages = limit_bytes() * 3 / 2 / PAGE, .random = mix(number)};
    if (h->file < 0) skip("no file system here has O_DIRECT");
    h->start = map_anonymous(h->pages * PAGE);
    h->here = calloc(h->pages, sizeof *h->here);
    h->there = calloc(h->pages, sizeof *h->there);
    for (size_t page = 0; page < h->pages; page++)
        fill_page(h->start + page * PAGE, h->here[page] = h->there[page] = h->random + page);
    for (size_t page = 0; page < h->pages; page += 64) {
        size_t bytes = (h->pages - page < 64 ? h->pages - page : 64) * PAGE;
        CHECK(pwrite(h->file, h->start + page * PAGE, bytes, page * PAGE) == (ssize_t)bytes);
    }
    /* A device with larger blocks refuses transfers that begin inside a page. */
    ssize_t part = pread(h->file, h->start + 512, PAGE - 512, 512);
    h->sector = part == (ssize_t)(PAGE - 512) ? 512 : 0;
    CHECK(h->sector || errno == EINVAL);
}

static void half_check(struct half *h) {
    char *page = h->start;
    for (size_t i = 0; i < h->pages; i++)
        CHECK(page_is(page + i * PAGE, h->here[i]), "page %zu of %zu at the end", i, h->pages);
    for (size_t i = 0; i < h->pages; i += 64) {
        size_t pages = h->pages - i < 64 ? h->pages - i : 64;
        CHECK(pread(h->file, page, pages * PAGE, i * PAGE) == (ssize_t)(pages * PAGE));
        for (size_t j = 0; j < pages; j++)
            CHECK(page_is(page + j * PAGE, h->there[i + j]), "page %zu of the file", i + j);
    }
}

static void direct_threads(void) {
    static struct half halves[2];
    ballast_make(&b, limit_bytes(), 9);
    for (int i = 0; i < 2; i++) half_make(&halves[i], i);
    ballast_start(&b);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&halves[i].counter, NULL, count_beside, &halves[i]) == 0);
        CHECK(pthread_create(&halves[i].thread, NULL, half_life, &halves[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(halves[i].thread, NULL) == 0);
        atomic_store(&halves[i].stop, 1);
        CHECK(pthread_join(halves[i].counter, NULL) == 0);
        half_check(&halves[i]);
    }
    ballast_stop(&b);
    size_t out = halves[0].out + halves[1].out;
    CHECK(!getenv("ZFOLIO_LIMIT") || out > 1000, "only %zu pages were out before their transfer", out);
    char text[120];
    report(text, snprintf(text, sizeof text, "%zu pages were out before their transfer, %zu writes beside one\n", out,
                          halves[0].beside + halves[1].beside));
}

#include "transfer_uring.h"

/* Another process reads and writes this one's memory, as a debugger does. */
static void outside(void) {
    ballast_make(&b, 3 * limit_bytes(), 7);
    int go[2];
    CHECK(pipe(go) == 0);
    pid_t observer = fork();
    if (observer == 0) {
        char byte, path[64], *page = malloc(PAGE);
        CHECK(read(go[0], &byte, 1) == 1);
        pid_t parent = getppid();
        snprintf(path, sizeof path, "/proc/%d/mem", parent);
        int memory = open(path, O_RDWR);
        CHECK(memory >= 0);
        int refused = 0;
        for (size_t at = 0; at < b.pages; at += 13) {
            struct iovec mine = {page, PAGE}, theirs = {b.start + at * PAGE, PAGE};
            CHECK(process_vm_readv(parent, &mine, 1, &theirs, 1, 0) == (ssize_t)PAGE, "page %zu", at);
            CHECK(page_is(page, ballast_seed(&b, at)), "page %zu by process_vm_readv", at);
        }
        for (size_t at = 5; at < b.pages; at += 13) {
            ssize_t got = pread(memory, page, PAGE, (off_t)(b.start + at * PAGE));
            if (got != (ssize_t)PAGE) {
                CHECK(getenv("ZFOLIO_LIMIT") && got == -1 && errno == EIO);
                refused++;
                continue;
            }
            CHECK(page_is(page, ballast_seed(&b, at)), "page %zu by /proc/PID/mem", at);
        }
        /* The kernel (6.18) does not wait for a userfaultfd in /proc/PID/mem: it returns EIO, never wrong data. */
        char text[100];
        if (refused)
            report(text, snprintf(text, sizeof text, "/proc/PID/mem: EIO for %d of %zu reads\n", refused,
                                  b.pages / 13));
        _exit(0);
    }
    if (write(go[1], "x", 1) != 1) CHECK(0);
    child_is_well(observer, "who looks from outside");
    ballast_verify(&b, "looked at");
}

static void locked(void) {
    ballast_make(&b, 3 * limit_bytes(), 8);
    size_t bytes = 32 * PAGE;
    for (int i = 0; i < 8; i++) {
        char *at = b.start + (i * 301 + 7) * PAGE;
        if (mlock(at, bytes) != 0) skip("mlock is not allowed here");
        unsigned char present[32];
        uint64_t random = i;
        ballast_churn(&b, 4000, &random);
        CHECK(mincore(at, bytes, present) == 0);
        for (int page = 0; page < 32; page++) CHECK(present[page] & 1, "locked page %d is not resident", page);
        if (i & 1) CHECK(munlock(at, bytes) == 0);
    }
    ballast_verify(&b, "locked");
    errno = 0;
    int answer = mlockall(MCL_CURRENT | MCL_FUTURE);
    if (getenv("ZFOLIO_LIMIT")) CHECK(answer == -1 && errno == ENOMEM, "mlockall: %d", answer);
    CHECK(munlockall() == 0);
}

/* Processes that end while their threads write into pipes and sockets: the data that arrives must be right, up to
 * some byte. The last page that arrives is not one of zeros: a killed thread would copy those if nobody kept the
 * userfaultfd open until it has ended. */
enum { CUT = 8, CUT_PAGES = 256, CUT_ROUNDS = 40 };
static struct cut { int in, out; size_t first; } cuts[CUT];

static void *cut_writer(void *argument) {
    struct cut *c = argument;
    for (size_t page = c->first;; page = (page + CUT_PAGES) % (b.pages - CUT_PAGES)) {
        char *at = b.start + page * PAGE;
        for (size_t left = CUT_PAGES * PAGE; left > 0;) {
            ssize_t n = write(c->out, at, left);
            if (n <= 0) return NULL;
            at += n;
            left -= n;
        }
    }
}

static void *cut_reader(void *argument) {
    struct cut *c = argument;
    static char buffers[CUT][CUT_PAGES * PAGE];
    char *buffer = buffers[c - cuts];
    size_t page = c->first, have = 0;
    for (ssize_t n = 1; n > 0;) {
        n = read(c->in, buffer + have, CUT_PAGES * PAGE - have);
        if (n > 0) have += n;
        if (n > 0 && have < CUT_PAGES * PAGE) continue;
        for (size_t i = 0; (i + 1) * PAGE <= have; i++) {
            const char *at = buffer + i * PAGE;
            CHECK(page_is(at, ballast_seed(&b, page + i)), "page %zu of %zu of the last write is %s", i, have / PAGE,
                  page_is_zero(at) ? "zeros" : "wrong");
        }
        page = (page + CUT_PAGES) % (b.pages - CUT_PAGES);
        have = 0;
    }
    return NULL;
}

static void cut_off(void) {
    ballast_make(&b, 4 * limit_bytes(), 9);
    uint64_t random = 11;
    for (int round = 0; round < CUT_ROUNDS; round++) {
        for (struct cut *c = cuts; c < cuts + CUT; c++) {
            int ends[2];
            if ((c - cuts) % 2) {
                CHECK(pipe(ends) == 0);
                fcntl(ends[1], F_SETPIPE_SZ, 1 << 20);
            } else {
                int bytes = 8 << 20;
                CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
                setsockopt(ends[1], SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
            }
            *c = (struct cut){ends[0], ends[1], next_random(&random) % (b.pages - CUT_PAGES)};
        }
        unsigned soon = next_random(&random) % 20000;
        pid_t pid = fork();
        CHECK(pid >= 0);
        pthread_t threads[CUT];
        if (pid == 0) {
            for (int i = 0; i < CUT; i++) CHECK(pthread_create(&threads[i], NULL, cut_writer, &cuts[i]) == 0);
            usleep(soon);
            if (round % 2) kill(getpid(), SIGKILL);
            _exit(0);
        }
        for (int i = 0; i < CUT; i++) {
            close(cuts[i].out);
            CHECK(pthread_create(&threads[i], NULL, cut_reader, &cuts[i]) == 0);
        }
        for (int i = 0; i < CUT; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
            close(cuts[i].in);
        }
        CHECK(waitpid(pid, NULL, 0) == pid);
    }
    ballast_verify(&b, "cut off");
}

/* A call that pins 4 MiB which are compressed, with no more than that left of the limit: it gets them, and the limit is
 * passed meanwhile. */
static void pins(void) {
    struct ballast b;
    size_t bytes = 4 * MIB, other = limit_bytes() * 3 / 4;
    char *shared = mmap(NULL, other, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED && copy != MAP_FAILED);
    ballast_make(&b, 2 * limit_bytes(), 3);
    uint64_t random = 1;
    for (size_t at = 0; at < other; at += PAGE) {
        shared[at] = 1;
        if (at % MIB == 0) ballast_churn(&b, 500, &random);
    }
    for (int round = 0; round < 8; round++) {
        size_t from = next_random(&random) % (b.pages - bytes / PAGE);
        struct iovec to = {copy, bytes}, own = {b.start + from * PAGE, bytes};
        ssize_t got = process_vm_readv(getpid(), &to, 1, &own, 1, 0);
        if (got < 0 && (errno == EPERM || errno == ENOSYS)) skip("process_vm_readv is not allowed here");
        CHECK(got == (ssize_t)bytes, "%zd", got);
        for (size_t i = 0; i < bytes / PAGE; i++)
            CHECK(page_is(copy + i * PAGE, ballast_seed(&b, from + i)), "round %d page %zu", round, i);
    }
    ballast_verify(&b, "pinned");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {
        {"calls", calls}, {"pipe_write", pipe_write}, {"socket_write", socket_write}, {"pipe_splice", pipe_splice},
        {"splice_kept", splice_kept}, {"zerocopy", zerocopy}, {"direct", direct},
        {"direct_threads", direct_threads}, {"uring", uring},
        {"outside", outside}, {"locked", locked}, {"cut_off", cut_off}, {"pins", pins},
    };
    return CHOOSE(cases);
}
