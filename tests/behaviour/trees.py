"""What the processes of a tree have, as `/proc` says."""

import pathlib


def memory_of_tree(first):
    """What a process and all below it have resident, without pages of files.

    `smaps_rollup` counts each shared page once. On a busy machine it takes long, and counts a page twice that moves
    meanwhile. `status` is exact, and counts a shared page for each process. So the smaller sum is taken.
    """
    wave, once, each = [first], 0, 0
    while wave:
        pid = pathlib.Path(f"/proc/{wave.pop()}")
        each += sizes(pid / "status", ("RssAnon:", "RssShmem:"))
        once += sizes(pid / "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        wave += children_of(pid.name)
    return min(once, each)


def sizes(path, names):
    try:
        return sum(int(line.split()[1]) << 10 for line in path.read_text().splitlines() if line.startswith(names))
    except OSError:
        return 0


def children_of(pid):
    try:
        texts = [(thread / "children").read_text() for thread in pathlib.Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split()]
