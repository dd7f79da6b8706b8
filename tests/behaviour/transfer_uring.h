/* Transfers by io_uring. Included by transfer.c. */
#ifndef TRANSFER_URING_H
#define TRANSFER_URING_H
#include "behaviour.h"

/* io_uring, without a library. */
struct ring {
    int file;
    unsigned *submit_tail, *submit_mask, *submit_array, *complete_head, *complete_tail, *complete_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *completions;
};

static void ring_make(struct ring *r) {
    struct io_uring_params about = {0};
    r->file = (int)syscall(SYS_io_uring_setup, 64, &about);
    if (r->file < 0) skip("io_uring is disabled here");
    CHECK(about.features & IORING_FEAT_SINGLE_MMAP);
    size_t bytes = about.cq_off.cqes + about.cq_entries * sizeof(struct io_uring_cqe);
    size_t other = about.sq_off.array + about.sq_entries * sizeof(unsigned);
    char *at = mmap(NULL, bytes > other ? bytes : other, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->file,
                    IORING_OFF_SQ_RING);
    CHECK(at != MAP_FAILED);
    r->entries = mmap(NULL, about.sq_entries * sizeof *r->entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      r->file, IORING_OFF_SQES);
    CHECK(r->entries != MAP_FAILED);
    r->submit_tail = (void *)(at + about.sq_off.tail);
    r->submit_mask = (void *)(at + about.sq_off.ring_mask);
    r->submit_array = (void *)(at + about.sq_off.array);
    r->complete_head = (void *)(at + about.cq_off.head);
    r->complete_tail = (void *)(at + about.cq_off.tail);
    r->complete_mask = (void *)(at + about.cq_off.ring_mask);
    r->completions = (void *)(at + about.cq_off.cqes);
}

static void ring_put(struct ring *r, int code, int file, void *at, unsigned bytes, uint64_t offset, int registered) {
    unsigned tail = *r->submit_tail, index = tail & *r->submit_mask;
    struct io_uring_sqe *entry = &r->entries[index];
    memset(entry, 0, sizeof *entry);
    entry->opcode = code;
    entry->fd = file;
    entry->addr = (uint64_t)at;
    entry->len = bytes;
    entry->off = offset;
    entry->buf_index = registered < 0 ? 0 : registered;
    r->submit_array[index] = index;
    __atomic_store_n(r->submit_tail, tail + 1, __ATOMIC_RELEASE);
}

static void ring_wait(struct ring *r, unsigned count, unsigned bytes) {
    unsigned submitted = count;
    for (unsigned done = 0; done < count;) {
        long answer = syscall(SYS_io_uring_enter, r->file, submitted, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        CHECK(answer >= 0 || errno == EINTR);
        if (answer > 0) submitted -= answer;
        while (*r->complete_head != __atomic_load_n(r->complete_tail, __ATOMIC_ACQUIRE)) {
            int result = r->completions[*r->complete_head & *r->complete_mask].res;
            CHECK(result == (int)bytes, "io_uring answers %d", result);
            __atomic_store_n(r->complete_head, *r->complete_head + 1, __ATOMIC_RELEASE);
            done++;
        }
    }
}

static void uring(void) {
    struct ring ring;
    ring_make(&ring);
    ballast_make(&b, 3 * limit_bytes(), 6);
    ballast_start(&b);
    int files[2] = {memfd_create("uring", 0), scratch(O_DIRECT)};
    unsigned bytes = 64 * PAGE;
    char *buffers[16];
    struct iovec vectors[16];
    for (int i = 0; i < 16; i++) {
        CHECK(posix_memalign((void **)&buffers[i], PAGE, bytes) == 0);
        vectors[i] = (struct iovec){buffers[i], bytes};
    }
    for (int registered = 0; registered < 2; registered++) {
        if (registered && syscall(SYS_io_uring_register, ring.file, IORING_REGISTER_BUFFERS, vectors, 16) != 0) {
            report("registered buffers are refused here\n", 36);
            break;
        }
        for (int f = 0; f < 2; f++) {
            if (files[f] < 0) continue;
            for (int round = 0; round < 25; round++) {
                for (int i = 0; i < 16; i++) {
                    fill(buffers[i], bytes, round * 5000 + i * 100);
                    ring_put(&ring, registered ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE, files[f], buffers[i], bytes,
                             (uint64_t)i * bytes, i);
                }
                ring_wait(&ring, 16, bytes);
                for (int i = 0; i < 16; i++) {
                    memset(buffers[i], 0, bytes);
                    ring_put(&ring, registered ? IORING_OP_READ_FIXED : IORING_OP_READ, files[f], buffers[i], bytes,
                             (uint64_t)(15 - i) * bytes, i);
                }
                ring_wait(&ring, 16, bytes);
                for (int i = 0; i < 16; i++)
                    verify(buffers[i], bytes, round * 5000 + (15 - i) * 100, "read by io_uring");
            }
        }
    }
    ballast_stop(&b);
}
#endif
