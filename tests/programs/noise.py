"""Data that does not compress: a lower limit cannot be held, but all results must be right.

Every byte comes back, and the program gets on: zfolio goes over the limit instead of starving it.
"""

import hashlib
import random

BLOCKS = 1_600
BLOCK_BYTES = 64 << 10


def main():
    source = random.Random(1)
    blocks = [bytearray(source.randbytes(BLOCK_BYTES)) for _ in range(BLOCKS)]
    expected = [hashlib.sha256(block).digest() for block in blocks]
    # In an unpredictable order, with changes.
    for turn in range(2 * BLOCKS):
        index = source.randrange(BLOCKS)
        if hashlib.sha256(blocks[index]).digest() != expected[index]:
            print('turn', turn, 'block', index, 'is not what it was')
        blocks[index][turn % BLOCK_BYTES] ^= 0xFF
        expected[index] = hashlib.sha256(blocks[index]).digest()
    print(hashlib.sha256(b''.join(blocks)).hexdigest())


main()
