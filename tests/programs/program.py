"""A program that runs alone, then under `zfolio run`, and the checks of the second run."""

import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ZFOLIO = os.environ.get('ZFOLIO', os.path.join(HERE, '..', '..', 'target', 'release', 'zfolio'))

LIMIT_MIN = 32 << 20
# How far a program may exceed its limit for a moment.
ALLOWANCE = 24 << 20
# A run that takes longer than this multiple of the time alone, plus a constant, hangs. Both are
# generous: other work on the machine may start between the two runs, and must not cause a failure.
SLOWER_MAX, SECONDS_MORE = 10, 60
# At least this much must not fit: a smaller excess may be gone before zfolio notices it.
PRESSED_MIN = 24 << 20
# How often the load of a case is doubled until its memory does not fit.
GROWTHS_MAX = 4
# Seconds between two looks at the processes: each look reads all of /proc.
LOOK_EVERY = 0.1


class Failure(Exception):
    """The case failed; the text is the reason."""


class Skip(Exception):
    """The case cannot run here; the text is the reason."""


def mib(count):
    return f'{count / (1 << 20):.0f}M'


def needs(program):
    """The path of a program; skips the case if it is not installed."""
    path = shutil.which(program)
    if path is None:
        raise Skip(f'{program} is not installed (make setup)')
    return path


def read(path):
    try:
        with open(path, 'rb') as file:
            return file.read().decode(errors='replace').strip().replace('\0', ' ')
    except OSError:
        return '?'


def members(session):
    """The processes of a session that a test started."""
    found = []
    for stat in glob.glob('/proc/[0-9]*/stat'):
        fields = read(stat).rpartition(')')[2].split()
        if len(fields) > 3 and fields[3] == str(session):
            found.append(int(stat.split('/')[2]))
    return found


def where(session):
    """The system call of each thread of a session, and its stack in the kernel if it can be read."""
    lines = []
    for pid in members(session):
        lines.append(f'  process {pid}: {read(f"/proc/{pid}/cmdline")[:120]}')
        for task in sorted(glob.glob(f'/proc/{pid}/task/*')):
            state = read(f'{task}/stat').rpartition(')')[2].split()[:1]
            stack = [line.split()[-1].split('+')[0] for line in read(f'{task}/stack').splitlines()[:4] if line.split()]
            lines.append(f'    {os.path.basename(task)} {read(f"{task}/comm")} {"".join(state)} '
                         f'syscall {read(f"{task}/syscall")[:60]} {" < ".join(stack)}')
    return '\n'.join(lines)


def end(session):
    """Ends all remaining processes of a test, by process id."""
    for pid in members(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


class Need:
    """The memory that a program needs: that of its largest process.

    All processes share the limit, so a program that has several is under more pressure than its share says.

    zfolio can compress private memory (`RssAnon`) only. Shared memory counts in full, and is measured apart. Pages of
    files do not count.
    """

    def __init__(self):
        # For each process: private and shared memory at each look, its most pages of files, and its peak without those.
        self.looks, self.files, self.peaks = {}, {}, {}

    def look(self, pid):
        """Records the present memory of a process, and its peak."""
        rows = dict(line.split(':', 1) for line in read(f'/proc/{pid}/status').splitlines() if ':' in line)
        if 'VmHWM' not in rows:
            return
        private, files, shared, peak = (int(rows.get(name, '0').split()[0]) << 10
                                        for name in ('RssAnon', 'RssFile', 'RssShmem', 'VmHWM'))
        self.looks.setdefault(pid, []).append((private, shared))
        self.files[pid] = max(files, self.files.get(pid, 0))
        self.peaks[pid] = max(peak - self.files[pid], private + shared, self.peaks.get(pid, 0))

    def close(self, peak):
        """After the end. `peak` is the kernel's figure for the largest process, even one that no look found."""
        most = max(self.looks.values(), key=max, default=[(0, 0)])
        self.peak = max([peak - max(self.files.values(), default=0), *self.peaks.values()])
        # Growth between two looks counts as private.
        unseen = self.peak - max(map(sum, most))
        self.looks = [(private + unseen, fixed) for private, fixed in most]
        self.private, self.fixed = max(self.looks)

    def limit(self, share, always=True):
        """A limit that leaves room for this share of the compressible memory: at every look, or at the largest one."""
        return max(fixed + int(private * share) for private, fixed in (self.looks if always else [max(self.looks)]))

    def presses(self, limit):
        """Whether this limit is accepted, and is low enough to need compression."""
        return limit >= LIMIT_MIN and self.fixed + self.private - limit >= PRESSED_MIN

    def __str__(self):
        return f'{mib(self.peak)} ({mib(self.fixed)} of it shared)'


class Ran:
    """The results of a run."""

    def __init__(self, status, output, errors, seconds, need):
        self.status, self.output, self.errors = status, output, errors
        self.seconds, self.need = seconds, need


def run(command, folder, seconds, stdin=None, environment=None):
    """Runs a command to its end, in its own session, with its files in `folder`."""
    need, looked = Need(), 0
    paths = [os.path.join(folder, name) for name in ('stdout', 'stderr')]
    began = time.monotonic()
    with open(paths[0], 'wb') as out, open(paths[1], 'wb') as err, open(stdin or os.devnull, 'rb') as given:
        child = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, cwd=folder,
                                 env=environment, start_new_session=True)
    status, usage = None, None
    try:
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            need.look(child.pid)
            if time.monotonic() - looked > LOOK_EVERY:
                for each in members(child.pid):
                    need.look(each)
                looked = time.monotonic()
            if time.monotonic() - began > seconds:
                raise Failure(f'hangs: not done after {seconds:.0f} s\n{where(child.pid)}\n{tail(paths[1])}')
            time.sleep(0.01)
    finally:
        end(child.pid)
        if status is None or not pid:
            os.waitpid(child.pid, 0)
        child.returncode = 0
    took = time.monotonic() - began
    need.close(usage.ru_maxrss << 10)
    contents = [open(path, 'rb').read() for path in paths]
    return Ran(os.waitstatus_to_exitcode(status), *contents, took, need)


def tail(path):
    return '\n'.join('  ' + line for line in read(path).splitlines()[-12:])


def figures(path):
    """The report of `zfolio run --stats`: its processes, and the peak of the largest, without pages of files."""
    with open(path, encoding='utf-8') as file:
        told = json.load(file)
    return told['processes'], max([0, *(one['resident_bytes_max'] for one in told['processes'])])


class OverLimit(Failure):
    """More was resident than the limit allows."""


class NothingToDo(Failure):
    """zfolio compressed nothing, so the run proves nothing."""


def judge(processes, peak, limit, compresses):
    """Checks the figures of a managed run: memory was compressed, and the limit was held."""
    pressed = [one for one in processes if one['figures']['engaged']]
    if not pressed or not any(one['figures']['reclaim_compressed'] for one in pressed):
        raise NothingToDo(f'zfolio had nothing to do: {len(processes)} processes, limit {mib(limit)}')
    if compresses and peak > limit + ALLOWANCE:
        raise OverLimit(f'had {mib(peak)} resident, over its limit of {mib(limit)}')
    failed = sum(one['figures']['decompress_fail'] for one in processes)
    if failed:
        raise Failure(f'{failed} units did not decompress to what was stored')


def summary(processes):
    """Faults by kind, of all processes together, and how long they took."""
    parts = []
    for kind in ('zero', 'staged', 'stored'):
        count = sum(one['faults'][kind]['count'] for one in processes)
        slowest = max(processes, key=lambda one: one['faults'][kind]['count'])['faults'][kind]
        if count:
            parts.append(f'{kind} {count} ({slowest["p50_ns"] / 1000:.0f} us)')
    stalled = sum(one['figures']['stall_ns'] for one in processes) / 1e9
    return ', '.join(parts) + f'; stalled {stalled:.1f} s'


class Case:
    """A program that ends by itself.

    `share` is how much of its private memory fits into the limit. `load` is how much the program does,
    in a unit of its own: the word {load} of its command, and an argument of `prepare`. It is doubled while
    the program needs too little for a limit to press it.
    """

    def __init__(self, name, command, files=(), stdin=None, share=0.45, compresses=True, same=True, prepare=None,
                 seconds=300, load=None):
        self.name, self.command, self.files, self.stdin = name, command, files, stdin
        self.share, self.compresses, self.same, self.prepare = share, compresses, same, prepare
        self.seconds, self.load = seconds, load
        self.told = ''

    def once(self, folder, shared, seconds, before=()):
        """Runs it, with `before` before the command; returns the run and the digests of its files."""
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        words = [word.format(folder=folder, shared=shared, load=self.load) for word in self.command]
        stdin = self.stdin and self.stdin.format(shared=shared)
        ran = run([*before, *words], folder, seconds, stdin)
        if ran.status != 0:
            raise Failure(f'status {ran.status} {"managed" if before else "alone"}\n'
                          f'{tail(folder + "/stdout")}\n{tail(folder + "/stderr")}')
        digests = {}
        for name in self.files:
            with open(os.path.join(folder, name), 'rb') as file:
                digests[name] = hashlib.sha256(file.read()).hexdigest()
        return ran, digests

    def test(self, shared):
        """Compares both runs; raises the load until memory is compressed. Returns a line of figures."""
        needs(self.command[0])
        for growths in range(GROWTHS_MAX + 1):
            if self.prepare:
                self.prepare(shared, self.load)
            alone, files = self.once(f'{shared}/alone', shared, self.seconds)
            last = self.load is None or growths == GROWTHS_MAX
            # A case that is not judged by its limit may exceed it with data that does not compress.
            limit = alone.need.limit(self.share, always=self.compresses)
            if alone.need.presses(limit):
                try:
                    return self.pressed(shared, alone, files, limit)
                except NothingToDo:
                    if last:
                        raise
            elif last:
                raise Failure(f'needs {alone.need} only: no limit would press it')
            self.load *= 2
        raise AssertionError('the last turn returns or raises')

    def pressed(self, shared, alone, files, limit):
        """`managed`, once more if it was over its limit.

        Until a program is near its limit, zfolio only looks at its size from time to time. A host that takes the CPU
        away from that look for 30 ms lets a fast program pass the limit. A defect does that each time.
        """
        try:
            return self.managed(shared, alone, files, limit)
        except OverLimit as over:
            return f'{self.managed(shared, alone, files, limit)}; the first time it {over}'

    def managed(self, shared, alone, files, limit):
        """Compares the run under a limit with the one before."""
        stats = f'{shared}/stats.json'
        before = [ZFOLIO, 'run', '--limit', str(limit), '--stats', stats, '--']
        seconds = alone.seconds * SLOWER_MAX + SECONDS_MORE
        managed, managed_files = self.once(f'{shared}/managed', shared, seconds, before)
        self.told = managed.errors.decode(errors='replace')
        if self.same and managed.output != alone.output:
            raise Failure('prints something else:\n' + difference(alone.output, managed.output))
        for name, digest in files.items():
            if managed_files[name] != digest:
                raise Failure(f'writes another {name}')
        processes, peak = figures(stats)
        judge(processes, peak, limit, self.compresses)
        ratio = managed.seconds / alone.seconds
        return (f'{alone.need} in {mib(limit)} (had {mib(peak)}), {alone.seconds:.1f} -> {managed.seconds:.1f} s '
                f'({ratio:.1f}x); {summary(processes)}')


def difference(alone, managed):
    """The first line that differs."""
    lines = [output.decode(errors='replace').splitlines() for output in (alone, managed)]
    for number, (one, other) in enumerate(zip(*lines), 1):
        if one != other:
            return f'  line {number}\n  alone   {one[:200]}\n  managed {other[:200]}'
    return f'  {len(lines[0])} lines alone, {len(lines[1])} managed'
