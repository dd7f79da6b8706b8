"""What goes wrong while programs run: each fault is a `with`, which puts everything back, and a `tick`.

Processes are found through the process id of their `zfolio run`, never by a name.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from disks import Calls, Loop
from program import members

# How long a disk fails, and how long it works in between.
FAILS_S, WORKS_S = 0.3, 2
# A file system that runs full: how large it is, and what is left of it at times.
SMALL_MIB, LEFT_MIB = 192, 16
# Largest file under RLIMIT_FSIZE: more than any program writes, less than some spill.
FILE_BYTES_MAX = 96 << 20


class Fault:
    """Nothing goes wrong."""

    name = "nothing"
    # Programs end otherwise than alone.
    kills = False

    def __init__(self, random, folder):
        self.random, self.folder, self.next = random, folder, 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def place(self, _number):
        """What the run of that number spills to; None: a directory of its own."""
        return None

    def before(self):
        """Words before `zfolio run`."""
        return []

    def tick(self, runs):
        """Called ten times a second, with the runs that are under way."""
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + (self.act(runs) or 1.0)

    def act(self, _runs):
        """Does something; returns the seconds until the next time."""

    def alive(self, runs):
        return [pid for run in runs if run.pid for pid in members(run.pid)]


class Stops(Fault):
    """Processes are stopped and go on, single ones or all of a run."""

    name = "stops"

    def act(self, runs):
        chosen = self.alive(runs)
        if not chosen:
            return 0.2
        if self.random.random() < 0.5:
            chosen = [self.random.choice(chosen)]
        send(chosen, signal.SIGSTOP)
        time.sleep(self.random.choice([0.01, 0.1, 0.5]))
        send(chosen, signal.SIGCONT)
        return self.random.random()


class Settings(Fault):
    """The limit of a run is changed while it runs."""

    name = "zfolio set"

    def act(self, runs):
        runs = [run for run in runs if run.pid and run.zfolio]
        if runs:
            run = self.random.choice(runs)
            limit = int(run.limit * self.random.uniform(0.7, 2))
            asked = [run.zfolio, "set", str(run.pid), f"limit={max(limit, 32 << 20)}"]
            # It may just have ended, or be stopped.
            subprocess.run(asked, capture_output=True, timeout=60, check=False)
        return 1 + self.random.random()


class Killed(Fault):
    """A process of some of the runs is killed, a child or the program; or all of them."""

    name = "kills"
    kills = True

    def act(self, runs):
        runs = [run for run in runs if run.pid and not run.was_killed and run.age() > run.kill_after]
        for run in runs:
            pids = members(run.pid)
            below = [pid for pid in pids if pid != run.pid]
            whole = self.random.random() < 0.4
            chosen = pids if whole else [self.random.choice(below or pids)]
            run.was_killed = f"{'all of' if whole else 'one of'} {len(pids)}"
            send(chosen, signal.SIGKILL)
        return 0.2


class NoUring(Fault):
    """No process may have an io_uring."""

    name = "no io_uring"

    def before(self):
        return [str(self.folder / "no_uring")]


class FileSize(Fault):
    """RLIMIT_FSIZE: no file grows beyond some MiB."""

    name = "RLIMIT_FSIZE"

    def before(self):
        return ["prlimit", f"--fsize={FILE_BYTES_MAX}", "--"]


class OnLoop(Fault):
    """Programs spill to a loop device."""

    megabytes, is_mounted = 512, True

    def __enter__(self):
        self.disk = Loop(self.folder, "disk", self.megabytes, self.is_mounted)
        self.disk.__enter__()
        self.used = self.disk.used_bytes() if self.is_mounted else 0
        return self

    def __exit__(self, *_):
        self.disk.close()

    def place(self, _number):
        return self.disk.place

    def left(self):
        """Bytes that nobody has given back."""
        return self.disk.used_bytes() - self.used if self.is_mounted else 0


class Fails(Fault):
    """Reads and writes of what is spilled answer EIO now and then."""

    name = "EIO now and then"

    def __enter__(self):
        self.calls = Calls(self.folder, "letters")
        return self

    def __exit__(self, *_):
        self.calls.mend()

    def before(self):
        return self.calls.before

    def act(self, _runs):
        self.calls.fail(self.random.choice("rwb"))
        time.sleep(FAILS_S)
        self.calls.mend()
        return self.random.uniform(0.5, 1.5) * WORKS_S


class Full(OnLoop):
    """A small file system that is full at times, and has room again."""

    name, megabytes = "a full disk", SMALL_MIB

    def act(self, runs):
        # A place that is full when a run begins is refused.
        if not all(run.pid and run.age() > 1 for run in runs):
            return 0.1
        ballast = pathlib.Path(self.disk.path) / "ballast"
        if ballast.exists():
            ballast.unlink()
        else:
            about = os.statvfs(self.disk.path)
            free = about.f_bavail * about.f_frsize - (LEFT_MIB << 20)
            with open(ballast, "wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(free, 1 << 20))
        return self.random.uniform(0.5, 4)

    def left(self):
        (pathlib.Path(self.disk.path) / "ballast").unlink(missing_ok=True)
        return super().left()


class Device(OnLoop):
    """The first run spills to a block device."""

    name, is_mounted = "a device", False

    def place(self, number):
        return self.disk.place if number == 0 else None


# Faults of the disk, of which a round has one, and others, of which it may have several. Those that need root say so by
# what they are made of.
DISKS = [Fault, Fault, Fails, Full, Device]
OTHERS = [Stops, Settings, Killed, NoUring, FileSize]


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
