"""A memory cgroup of a test, below the one that the test is in."""

import os
import pathlib
import time

from disks import Unable

ROOT = pathlib.Path("/sys/fs/cgroup")


def own_group():
    """The folder of the memory cgroup of this process, and the name of the file that has its limit."""
    lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    paths = {name: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in lines)
             for name in names.split(",")}
    if "memory" in paths:
        return ROOT / "memory" / paths["memory"], "memory.limit_in_bytes"
    # The line of version 2 names no controller.
    if "" in paths:
        return ROOT / paths[""], "memory.max"
    raise Unable("no memory cgroup is mounted")


class MemoryGroup:
    """A cgroup with a limit; gone at the end of the `with`."""

    def __init__(self, name, limit):
        self.name, self.limit, self.path = f"{name}-{os.getpid()}", limit, None

    def __enter__(self):
        above, file = own_group()
        self.path = above / self.name
        try:
            self.path.mkdir()
        except OSError as error:
            self.path = None
            raise Unable(f"no memory cgroup can be made: {error}") from None
        try:
            (self.path / file).write_text(str(self.limit))
        except OSError as error:
            self.__exit__()
            raise Unable(f"a memory cgroup of a test has no limit: {error}") from None
        return self

    def __exit__(self, *_):
        # Until the last process in it is waited for.
        for _ in range(200):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.05)

    def enter(self):
        """For a child before `exec`."""
        (self.path / "cgroup.procs").write_text("0")

    def kills(self):
        """How many processes the kernel has killed for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            if (self.path / name).exists():
                rows = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(rows["oom_kill"])
        return 0
