"""What the processes of a tree have, as `/proc` says."""

import pathlib


def memory_of_tree(first):
    """What a process and all below it have resident, without pages of files, each shared page counted once."""
    wave, together = [first], 0
    while wave:
        pid = pathlib.Path(f"/proc/{wave.pop()}")
        try:
            for line in (pid / "smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    together += int(line.split()[1]) << 10
        except OSError:
            pass
        wave += children_of(pid.name)
    return together


def children_of(pid):
    try:
        texts = [(thread / "children").read_text() for thread in pathlib.Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split()]
