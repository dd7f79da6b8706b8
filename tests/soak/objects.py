"""Objects, or a database in memory, whose contents do not compress: every byte of them is verified, and changed.

    objects.py objects|sqlite MEGABYTES
"""

import hashlib
import random
import sqlite3
import sys

BLOB_BYTES = 3000


def objects(source, count):
    """Dictionaries of lists of bytes, changed at random, and some of them dropped and made again."""
    made = {f'name {number}': [source.randbytes(BLOB_BYTES // 3) for _ in range(3)] for number in range(count)}
    names = list(made)
    digests = {name: hashlib.sha256(b''.join(parts)).digest() for name, parts in made.items()}
    for turn in range(count // 4):
        name = names[source.randrange(count)]
        if hashlib.sha256(b''.join(made[name])).digest() != digests[name]:
            sys.exit(f'turn {turn}: {name} is not what it was')
        if turn % 3 == 0:
            made[name] = [source.randbytes(len(part)) for part in made[name]]
            digests[name] = hashlib.sha256(b''.join(made[name])).digest()
    return (b''.join(made[name]) for name in names)


def sqlite(source, count):
    """A table with an index, read and updated at random."""
    base = sqlite3.connect(':memory:')
    base.execute('CREATE TABLE thing(number INTEGER PRIMARY KEY, digest BLOB, contents BLOB)')
    base.execute('CREATE INDEX by_digest ON thing(digest)')

    def row(number):
        contents = source.randbytes(BLOB_BYTES)
        return number, hashlib.sha256(contents).digest(), contents

    base.executemany('INSERT INTO thing VALUES(?, ?, ?)', map(row, range(count)))
    for turn in range(count // 4):
        number = source.randrange(count)
        (digest, contents), = base.execute('SELECT digest, contents FROM thing WHERE number = ?', (number,))
        if hashlib.sha256(contents).digest() != digest:
            sys.exit(f'turn {turn}: row {number} is not what it was')
        if turn % 3 == 0:
            base.execute('REPLACE INTO thing VALUES(?, ?, ?)', row(number))
    if base.execute('PRAGMA integrity_check').fetchall() != [('ok',)]:
        sys.exit('the database is broken')
    return (contents for contents, in base.execute('SELECT contents FROM thing ORDER BY number'))


def main():
    kind, megabytes = sys.argv[1], int(sys.argv[2])
    contents = {'objects': objects, 'sqlite': sqlite}[kind](random.Random(7), (megabytes << 20) // BLOB_BYTES)
    digest = hashlib.sha256()
    for each in contents:
        digest.update(each)
    print(digest.hexdigest())


main()
