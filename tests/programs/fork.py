"""Children of fork read and change the parent's data, while the parent changes it too."""

import hashlib
import multiprocessing
import os
import threading

LISTS = 160
WORDS = 10_000

data = {}


def make(index):
    return [f'list {index} word {i} of {WORDS}' for i in range(WORDS)]


def digest(index):
    return hashlib.sha256('\n'.join(data[index]).encode()).hexdigest()


def change(index):
    """In a child: only its own copy changes."""
    before = digest(index)
    data[index][::7] = ['changed by a child'] * len(data[index][::7])
    after = digest(index)
    return index, before, after


def plain_fork():
    """A child that checks all data, and reports through a pipe."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        answer = hashlib.sha256(''.join(digest(i) for i in sorted(data)).encode()).hexdigest()
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 64).decode()
    os.close(read_end)
    _, status = os.waitpid(child, 0)
    return answer, status


def main():
    for index in range(LISTS):
        data[index] = make(index)
    context = multiprocessing.get_context('fork')
    with context.Pool(2) as pool:
        for answer in pool.map(change, range(LISTS)):
            print(*answer)
    print('after the pool', plain_fork())
    # A thread allocates while the process forks.
    done = threading.Event()

    def churn():
        while not done.is_set():
            sum(len(text) for text in [str(i) * 3 for i in range(2000)])

    thread = threading.Thread(target=churn)
    thread.start()
    for turn in range(3):
        data[turn] = data[turn][::-1]
        print('turn', turn, plain_fork())
    done.set()
    thread.join()
    print('at the end', hashlib.sha256(''.join(digest(i) for i in range(LISTS)).encode()).hexdigest())


main()
