"""Four threads that make, pass on and check ordinary objects, 200 MiB at a time."""

import hashlib
import queue
import threading

ROUNDS = 6
OBJECTS = 14_000


def records(seed):
    """Objects that depend only on `seed`."""
    return {f'{seed}-{i}': [i, f'{seed * i} squared is {seed * i * seed * i}' * 4, bytes(400)]
            for i in range(OBJECTS)}


def digest(made):
    answer = hashlib.sha256()
    for key, (number, text, blank) in made.items():
        answer.update(f'{key} {number} {text}'.encode() + blank)
    return answer.hexdigest()


def maker(name, out):
    for turn in range(ROUNDS):
        out.put((name, turn, records(name * 100 + turn)))


def main():
    made = queue.Queue()
    threads = [threading.Thread(target=maker, args=(name, made)) for name in range(4)]
    for thread in threads:
        thread.start()
    kept = {}
    for _ in range(4 * ROUNDS):
        name, turn, objects = made.get()
        kept[name, turn] = objects
    for thread in threads:
        thread.join()
    # Short-lived threads, each on its own stack, read all of it again.
    answers = {}

    def check(key):
        answers[key] = digest(kept[key])

    for key in sorted(kept):
        thread = threading.Thread(target=check, args=(key,))
        thread.start()
        thread.join()
    for key in sorted(answers):
        print(key, answers[key])


main()
