"""Disks that fail, and what of a managed process is on them.

No device-mapper is needed. Reads and writes go wrong while the program `faulty_calls` is told so. (A loop device whose
size is lowered below a mounted file system answers with `EIO` too. But then ext4 cannot read its bitmaps either, and
Linux 6.18 stopped at a BUG in fs/ext4/mballoc.c with the file's lock held.) Bytes are changed behind the file system's
back, through /proc/PID/task/TID/fd: the file has no name, and is open in the engine's own table of files.
"""

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

SLOT = 4096


def why_not():
    """Why no disk can be made to fail here; None if it can."""
    missing = [name for name in ("losetup", "mkfs.ext4", "mount", "umount") if not has(name)]
    if os.geteuid() != 0:
        return "root is needed for loop devices"
    return f"{missing[0]} is not installed" if missing else None


def has(program):
    return any(os.access(os.path.join(folder, program), os.X_OK)
               for folder in [*os.environ.get("PATH", "").split(":"), "/sbin", "/usr/sbin"])


def sweep_killed(zfolio):
    """Has what killed runs left in /dev/shm removed. What belongs to a process that is still ending stays there."""
    subprocess.run([zfolio, "run", "--quiet", "--", "true"], check=True)
    subprocess.run([zfolio, "stat", "--all"], check=False, capture_output=True)


class Unable(Exception):
    """This machine cannot have such a disk; the text says why."""


def call(*words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if done.returncode != 0:
        raise Unable(f"{words[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


class Loop:
    """A loop device over a file of `megabytes`, with ext4 on it if it `is_mounted`; gone at the end of the `with`."""

    def __init__(self, folder, name, megabytes, is_mounted=True):
        self.image, self.path, self.device = pathlib.Path(folder) / f"{name}.image", pathlib.Path(folder) / name, None
        self.megabytes, self.is_mounted, self.mounted = megabytes, is_mounted, False

    def __enter__(self):
        try:
            with open(self.image, "wb") as image:
                image.truncate(self.megabytes << 20)
            self.device = call("losetup", "--find", "--show", self.image)
            if self.is_mounted:
                call("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", "-E", "lazy_itable_init=0", self.device)
                self.path.mkdir()
                call("mount", self.device, self.path)
                self.mounted = True
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Puts back everything that was set up so far."""
        if self.mounted:
            # Whoever was killed may still be closing its files.
            for lazily in [[]] * 100 + [["--lazy"]]:
                if subprocess.run(["umount", *lazily, str(self.path)], capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)
            self.mounted = False
        if self.device:
            subprocess.run(["losetup", "--detach", self.device], check=False, capture_output=True)
            self.device = None
        self.image.unlink(missing_ok=True)
        if self.path.is_dir():
            self.path.rmdir()

    @property
    def place(self):
        """What `--spill` gets."""
        return str(self.path if self.is_mounted else self.device)

    def used_bytes(self):
        """What the files of the file system have."""
        about = os.statvfs(self.path)
        return (about.f_blocks - about.f_bfree) * about.f_frsize


class Calls:
    """Calls that go wrong when they are told to: of all that is started with the words `before`."""

    # In place of an error: a part is moved; or a part, and next comes an answer that is none; or there is no answer
    # until it is told something else.
    PART, IMPOSSIBLE, STALL = 0, -1, -2

    def __init__(self, build, name):
        self.letters = pathlib.Path(build) / name
        self.letters.write_bytes(bytes(16))
        self.before = [str(pathlib.Path(build) / "faulty_calls"), str(self.letters)]

    def fail(self, what, how=errno.EIO):
        """From now on `r`eads, `w`rites or `b`oth go wrong; with a capital letter three of four at a place. They end
        with an error, or do a `PART`, or wait."""
        self.tell(f"{what}{how}")

    def mend(self):
        self.tell("-")

    def tell(self, text):
        # What is behind it stays.
        with open(self.letters, "r+b", buffering=0) as file:
            file.write(text.ljust(8).encode())

    def hits(self):
        """How many calls have gone wrong so far."""
        return int.from_bytes(self.letters.read_bytes()[8:], sys.byteorder)

    def wait_for(self, hits, seconds):
        """Waits until this many calls have gone wrong: on a busy machine the background thread may first write when a
        program has filled all of its memory. Returns how many have by then."""
        until = time.monotonic() + seconds
        while self.hits() < hits and time.monotonic() < until:
            time.sleep(0.01)
        return self.hits()


def files_of(pid, place):
    """The files below `place`, or the device, that a process or its engine has open: a path in /proc for each."""
    found = {}
    for link in pathlib.Path(f"/proc/{pid}/task").glob("*/fd/*"):
        try:
            name, number = os.readlink(link), os.stat(link).st_ino
        except OSError:
            continue
        if name == str(place) or name.startswith(f"{place}/"):
            found.setdefault((name, number), str(link))
    return list(found.values())


def open_files(pid):
    """What each thread of a process has open, to say why a file is missing."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            found.append(f"{task.name} {name}: {[os.readlink(link) for link in (task / 'fd').iterdir()]}")
        except OSError as error:
            found.append(f"{task.name}: {error}")
    return "; ".join(found)


class Bytes:
    """The slots of a spill file that have contents, while its process is stopped. They are read, changed, and seen by
    the process from then on."""

    def __init__(self, pid, place):
        self.pid, self.place = pid, place

    def __enter__(self):
        os.kill(self.pid, signal.SIGSTOP)
        # What is on its way arrives.
        time.sleep(0.2)
        paths = files_of(self.pid, self.place)
        if len(paths) != 1:
            raise ValueError(f"{len(paths)} files of {self.place} are open: {open_files(self.pid)}")
        path, = paths
        # A descriptor of our own: without O_DIRECT.
        self.file = os.open(path, os.O_RDWR)
        self.slots = list(self.filled())
        return self

    def __exit__(self, *_):
        os.fsync(self.file)
        os.close(self.file)
        os.kill(self.pid, signal.SIGCONT)

    def filled(self):
        """The numbers of slots that are no holes, or of a device that are not zeros."""
        end = os.lseek(self.file, 0, os.SEEK_END)
        at, is_device = 0, not os.path.isdir(self.place)
        while at < end:
            try:
                at = os.lseek(self.file, at, os.SEEK_DATA) if not is_device else at
                hole = os.lseek(self.file, at, os.SEEK_HOLE) if not is_device else end
            except OSError:
                return
            for slot in range(at // SLOT, hole // SLOT):
                if any(self.read(slot)):
                    yield slot
            at = hole

    def read(self, slot):
        return os.pread(self.file, SLOT, slot * SLOT)

    def write(self, slot, contents):
        os.pwrite(self.file, contents, slot * SLOT)

    def flip(self, seed):
        """One bit of each slot."""
        chance = random.Random(seed)
        for slot in self.slots:
            contents = bytearray(self.read(slot))
            bit = chance.randrange(8 * SLOT)
            contents[bit // 8] ^= 1 << bit % 8
            self.write(slot, contents)

    def swap(self):
        """Each slot has the contents of its neighbour."""
        for one, other in zip(self.slots[::2], self.slots[1::2]):
            first, second = self.read(one), self.read(other)
            self.write(one, second)
            self.write(other, first)

    def keep(self):
        """The contents of all slots, for `replay`."""
        return {slot: self.read(slot) for slot in self.slots}

    def replay(self, kept):
        """Slots have the contents that they had; returns how many have other ones now."""
        changed = [slot for slot in self.slots if slot in kept and self.read(slot) != kept[slot]]
        for slot in changed:
            self.write(slot, kept[slot])
        return len(changed)

    def truncate(self):
        os.ftruncate(self.file, 0)

    def punch(self):
        """Holes in place of all contents: a file that is shorter for a moment."""
        end = os.lseek(self.file, 0, os.SEEK_END)
        os.ftruncate(self.file, 0)
        os.ftruncate(self.file, end)
