"""numpy: in-place operations, sorting, files read and written straight from and into arrays."""

import hashlib
import sys

import numpy

COUNT = 6 << 20


def digest(array):
    return hashlib.sha256(array).hexdigest()


def main():
    folder = sys.argv[1]
    floats = numpy.arange(COUNT, dtype=numpy.float64)
    floats *= 1.5
    floats += 2
    numpy.sqrt(floats, out=floats)
    # Rounded, so that the data compresses.
    numpy.floor(floats, out=floats)
    print('in place', digest(floats), floats.sum())
    numpy.save(f'{folder}/floats.npy', floats)
    loaded = numpy.load(f'{folder}/floats.npy')
    print('save and load', digest(loaded), bool((loaded == floats).all()))
    integers = (numpy.arange(COUNT, dtype=numpy.int64) * 2654435761) % 101
    integers.tofile(f'{folder}/integers')
    again = numpy.fromfile(f'{folder}/integers', dtype=numpy.int64)
    print('tofile and fromfile', digest(again))
    # read(2) directly into an array, at unaligned places with unaligned lengths.
    raw = numpy.zeros(COUNT * 8, dtype=numpy.uint8)
    with open(f'{folder}/integers', 'rb', buffering=0) as file:
        view, at = memoryview(raw), 0
        while at < len(view):
            at += file.readinto(view[at:at + 1_000_003])
    print('readinto', digest(raw))
    again.sort()
    print('sorted', digest(again), again[::3 << 17].tolist())
    del raw, loaded
    shaped = floats.reshape(2048, -1)
    print('transposed', digest(numpy.ascontiguousarray(shaped.T)))
    print('sums', shaped.sum(axis=0)[:4].tolist(), shaped.sum(axis=1)[:4].tolist())
    # Growing makes realloc move large blocks.
    grown = numpy.zeros(1000)
    for step in range(1, 8):
        grown.resize(1_000_000 * step)
        grown[-1000:] = step
    print('resized', digest(grown), grown.sum())
    square = numpy.arange(512 * 512, dtype=numpy.float64).reshape(512, 512) % 17
    print('product', digest(square @ square))
    print('at the end', digest(floats), digest(integers))


main()
