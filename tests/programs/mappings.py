"""mmap, mremap, madvise and munmap of large mappings at arbitrary places."""

import ctypes
import hashlib

PAGE = 4096
PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS = 3, 0x22
MREMAP_MAYMOVE, MADV_DONTNEED = 1, 4

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def check(answer, what):
    if answer in (None, -1, 2 ** 64 - 1):
        print(what, 'failed with errno', ctypes.get_errno())
        raise SystemExit(1)
    return answer


def fill(start, pages, seed):
    for page in range(pages):
        ctypes.memmove(start + page * PAGE, b'%d page %d;' % (seed, page) * 300, 2000)


def digest(start, pages):
    return hashlib.sha256(ctypes.string_at(start, pages * PAGE)).hexdigest()


def main():
    ballast = bytearray(b'ballast that is in the way; ' * (96 << 20 >> 5))
    before = hashlib.sha256(ballast).hexdigest()
    kept = []
    # Lengths around multiples of 64 KiB, 16 pages.
    for turn, pages in enumerate([33, 48, 2048, 2049, 2063, 1000, 1601]):
        start = check(libc.mmap(None, pages * PAGE, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0), 'mmap')
        fill(start, pages, turn)
        kept.append([start, pages])
    for turn in range(3):
        for number, place in enumerate(kept):
            start, pages = place
            print(turn, number, pages, digest(start, pages))
            more = pages + 500 * (turn + 1) + number
            start = check(libc.mremap(start, pages * PAGE, more * PAGE, MREMAP_MAYMOVE), 'mremap, larger')
            fill(start + pages * PAGE, more - pages, turn)
            check(libc.madvise(start + 7 * PAGE, 21 * PAGE, MADV_DONTNEED), 'madvise')
            check(libc.munmap(start + (more - 9) * PAGE, 9 * PAGE), 'munmap of the end')
            less = more - 9 - 13
            start = check(libc.mremap(start, (more - 9) * PAGE, less * PAGE, MREMAP_MAYMOVE), 'mremap, smaller')
            place[:] = start, less
    for start, pages in kept:
        print(pages, digest(start, pages))
        check(libc.munmap(start, pages * PAGE), 'munmap')
    print('ballast', hashlib.sha256(ballast).hexdigest() == before)


main()
