"""A managed program on a disk that fails: its data is right, or it is stopped with one line that names what failed.

The program (`spilled`) recomputes every byte of its memory when it is asked to; its exit status proves nothing.
"""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

from disks import Bytes, Calls, Loop, Unable, files_of, sweep_killed, why_not
from trees import children_of, memory_of_tree

LIMIT = 32 << 20
SLACK = 24 << 20
# Pages of noise: three times the limit.
PAGES = 24576
# An answer may wait for all of memory to come from the disk, on a busy machine.
TIMEOUT = 200
# What is left of the file below a device that has become shorter.
LEFT_BYTES = 8 << 20
LOST = "the process is stopped, so that it gets no wrong data"
STOPPED = 125
# Reads of a unit that fail before the program is stopped: TRIES_MAX in crates/pager/src/spill/retry.rs.
TRIES = 20
# What the line says of a disk that answers with errors, and of one that answers with something else than was written.
FAILED = f"the disk has failed {TRIES} times in 10 s (input/output error)"
CHANGED = "what is there is not what was written (changed or cut off)"


class Failed(Exception):
    """What is not as it must be."""


def expect(condition, text):
    if not condition:
        raise Failed(text)


def is_program(pid):
    """Whether a process executes the program that spills."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "spilled"
    return False


class Program:
    """`spilled` under `zfolio run`, with `options` besides."""

    def __init__(self, run, place, options=(), before=()):
        self.zfolio = run.options.zfolio
        self.folder = tempfile.TemporaryDirectory(dir=run.build)
        self.stats = pathlib.Path(self.folder.name) / "stats.json"
        self.errors = open(pathlib.Path(self.folder.name) / "errors", "w+")
        command = [*before, self.zfolio, "run", "--limit", str(LIMIT), "--spill", str(place), *options,
                   "--stats", str(self.stats), "--", str(run.build / "spilled")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        start_new_session=True, cwd=run.build, bufsize=0)
        self.pid, self.text, self.status = None, "", None

    def __enter__(self):
        until = time.monotonic() + TIMEOUT
        while not self.pid and self.process.poll() is None and time.monotonic() < until:
            # `faulty_calls` has a child of its own for a moment.
            self.pid = next(filter(is_program, children_of(self.process.pid)), None)
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.process.kill()
        # The engine's own descriptors are closed with its last thread.
        for pid in filter(None, [self.pid]):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()
        self.folder.cleanup()

    def send(self, line):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())

    def answer(self):
        """The next line of the program; empty if it has ended."""
        os.set_blocking(self.process.stdout.fileno(), False)
        until = time.monotonic() + TIMEOUT
        while True:
            part = self.process.stdout.read(256)
            if part:
                self.text += part.decode()
            line, end, rest = self.text.partition("\n")
            if end:
                self.text = rest
                return line
            if part == b"":
                return ""
            if time.monotonic() > until:
                raise Failed(f"the program does not answer in {TIMEOUT} s")
            time.sleep(0.01)

    def ask(self, line, answer):
        """Sends a command, which must have this answer."""
        self.send(line)
        return self.must_answer(line, answer)

    def must_answer(self, line, answer):
        """The next line of the program must be this answer to a command that was sent."""
        found = self.answer()
        expect(found.startswith(answer), f"'{line}' is answered by '{found}'; {self.said()}")
        return found

    def said(self):
        """What zfolio has printed."""
        self.errors.seek(0)
        return "; ".join(self.errors.read().split("\n"))[:600]

    def resident(self):
        lines = pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

    def holds_limit(self):
        """The limit is held, at the latest once the background thread has written what is over it."""
        until = time.monotonic() + 60
        while self.resident() > LIMIT + SLACK // 2 and time.monotonic() < until:
            time.sleep(0.1)
        now = self.resident()
        if now > LIMIT + SLACK // 2:
            raise Failed(f"{now >> 20} MiB resident, though the disk works; {self.said()}; {self.live_figures()}")
        return now

    def live_figures(self):
        """The program's figures as they are now, to say why something is not as it must be."""
        command = [self.zfolio, "stat", "--json", str(self.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        return done.stdout or done.stderr

    def live(self, name):
        return json.loads(self.live_figures())["figures"][name]

    def slots(self, disk):
        """What the disk holds. On a busy machine nothing may have been written until the limit is held."""
        self.holds_limit()
        return Bytes(self.pid, disk.place)

    def figures(self):
        """The sums over all processes of the run, after its end."""
        processes = json.loads(self.stats.read_text())["processes"]
        return {name: sum(one["figures"][name] for one in processes) for name in processes[0]["figures"]}

    def end(self):
        """Has the program end, after all of its memory was right."""
        self.ask("verify", "verified ")
        self.send("end")
        status = self.process.wait(TIMEOUT)
        expect(status == 0, f"status {status}; {self.said()}")
        return self.figures()

    def must_stop(self, place, *reasons):
        """The program is stopped at the next look at all of its memory, before it gets any wrong byte. The line names
        the place and one of the reasons."""
        self.send("verify")
        found = self.answer()
        expect(found == "", f"it goes on: '{found}'; {self.said()}")
        status, said = self.process.wait(TIMEOUT), self.said()
        lines = [line for line in said.split("; ") if line.startswith("zfolio: the unit of")]
        expect(status == STOPPED and said.count(LOST) == 1 and len(lines) == 1, f"status {status}; {said}")
        ends = tuple(f" cannot be read from '{place}': {reason}" for reason in reasons)
        expect(lines[0].endswith(ends), lines[0])
        return self.figures()


class Cases:
    """The cases; `run` counts and prints."""

    def __init__(self, run):
        self.run = run

    def all(self):
        self.case("disk fails writes", self.writes, errno.EIO)
        self.case("disk is busy for writes", self.writes, errno.EAGAIN)
        self.case("disk has no room for writes", self.writes, errno.ENOSPC)
        self.case("disk writes parts of slots only", self.writes, Calls.PART)
        self.case("disk is busy at times", self.at_times, errno.EAGAIN)
        self.case("disk moves parts", self.at_times, Calls.PART)
        self.case("disk answers what is no answer", self.impossible)
        self.case("disk that stalls", self.stalls)
        self.case("disk that stalls from the start", self.stalls_from_the_start)
        self.case("disk that stalls at the end of a budget", self.stalls_at_the_end_of_a_budget)
        self.case("disk fails reads", self.reads)
        self.case("disk reads parts of slots only", self.reads_parts)
        self.case("disk fails reads for a while", self.reads_for_a_while, errno.EIO)
        self.case("disk is busy for reads for a while", self.reads_for_a_while, errno.EAGAIN)
        self.case("disk fails reads, others go on", self.reads_beside)
        self.case("disk and little address space", self.address_space, 256, PAGES // 2)
        self.case("disk and too little address space", self.address_space, 192, PAGES)
        self.case("disk and no locked memory", self.locked_memory)
        self.case("disk and what children have done", self.children)
        if why := why_not():
            return self.run.tell("skip", "broken disks", why)
        damages = [("a flipped bit", lambda these: these.flip(1)), ("swapped slots", Bytes.swap),
                   ("a truncated file", Bytes.truncate), ("holes", Bytes.punch)]
        for name, damage in damages:
            self.case(f"disk with {name}", self.damaged, damage)
        self.case("disk with old slots", self.replayed)
        self.case("device with a flipped bit", self.device, lambda these: these.flip(2), "tampered")
        self.case("device with swapped slots", self.device, Bytes.swap, "tampered")
        self.case("device that is shorter", self.device, None, "fail")
        self.case("device for two runs", self.two_runs)
        self.case("device for several processes", self.shared_device, 1024)
        self.case("device that is too small for several processes", self.shared_device, 128)
        self.case("device of a run that was killed", self.outlived_device)
        self.case("disk that is full and has room again", self.full)
        self.case("disks with priorities", self.two_places)
        self.case("disk and a killed child", self.killed_child)
        self.case("disk and a killed program", self.killed, "program")
        self.case("disk and a killed zfolio", self.killed, "zfolio")

    def case(self, name, case, *words):
        wanted = [word for word in self.run.options.words if word not in "broken disks"]
        if wanted and not any(word in name for word in wanted):
            return
        try:
            self.run.tell("ok", name, case(*words))
        except Unable as why:
            self.run.tell("skip", name, str(why))
        except (Failed, OSError, ValueError, subprocess.SubprocessError) as error:
            self.run.tell("FAIL", name, f"{type(error).__name__}: {error}")

    def disk(self, megabytes=256, is_mounted=True):
        return Loop(self.run.build, f"disk{time.monotonic_ns()}", megabytes, is_mounted)

    def failing(self):
        """A program, and calls of it that fail; it spills to a directory."""
        calls = Calls(self.run.build, f"letters{time.monotonic_ns()}")
        return calls, Program(self.run, self.run.build, before=calls.before)

    def writes(self, how):
        """No write succeeds: what was to be written stays, over the limit, and is written once the disk works again."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES // 3}", "filled")
            calls.fail("w", how)
            program.ask(f"fill {PAGES // 3}", "filled")
            peak, hits = program.resident(), calls.wait_for(1, TIMEOUT)
            calls.mend()
            program.ask("change 5", "changed")
            program.holds_limit()
            figures = program.end()
            expect(hits > 0 and figures["reject_written_back"] > 0, f"no write has failed: {hits}, {figures}")
            expect(how != errno.EIO or figures["written_back_fail"] > 0, f"no failed write was counted: {figures}")
            expect(how != errno.ENOSPC or figures["written_back_full"] > 0, f"no full disk was counted: {figures}")
            expect(peak > LIMIT + SLACK, f"only {peak >> 20} MiB resident while nothing could be written")
            return f"{figures['reject_written_back']} units stayed, {peak >> 20} MiB resident meanwhile"

    def at_times(self, how):
        """Three of four reads and writes at a place go wrong: each is tried again, and nobody notices."""
        calls, program = self.failing()
        with program:
            calls.fail("B", how)
            program.ask(f"fill {PAGES * 5 // 12}", "filled")
            writes = calls.wait_for(1, TIMEOUT)
            program.ask("change 3", "changed")
            peak = program.resident()
            figures, hits = program.end(), calls.hits()
            expect(0 < writes < hits, f"{writes} calls went wrong at first, {hits} in all")
            expect(peak <= LIMIT + SLACK // 2, f"{peak >> 20} MiB resident")
            given_up = figures["read_back_fail"], figures["read_back_retry"]
            expect(given_up == (0, 0), f"reads were given up: {given_up}")
            return f"{hits} calls went wrong, no read, {peak >> 20} MiB resident"

    def impossible(self):
        """The kernel says that a write has done almost 2^64 bytes: it has failed, and its units stay."""
        calls, program = self.failing()
        with program:
            calls.fail("w", Calls.IMPOSSIBLE)
            program.ask(f"fill {PAGES // 2}", "filled")
            hits = calls.wait_for(2, TIMEOUT)
            calls.mend()
            program.ask("verify", "verified")
            figures = program.end()
            expect(hits > 1 and figures["written_back_fail"] > 0, f"no write has failed: {hits}, {figures}")
            return f"{figures['written_back_fail']} writes failed, no wrong byte"

    def stalls(self):
        """No write ends for four seconds, while the program wants twice its limit: it waits, with little above it."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES // 3}", "filled")
            calls.fail("w", Calls.STALL)
            program.send(f"fill {PAGES // 3}")
            expect(calls.wait_for(1, TIMEOUT) > 0, "no write began")
            time.sleep(4)
            stalled = program.resident()
            calls.mend()
            program.must_answer("fill", "filled")
            program.end()
            expect(stalled <= LIMIT + SLACK // 2, f"{stalled >> 20} MiB resident when no write had ended for 4 s")
            return f"{stalled >> 20} MiB resident when no write had ended for 4 s"

    def stalls_from_the_start(self):
        """Not even the first write ends, without which there is no file yet: after ten seconds the program has all of
        its memory. Then the disk works, and the limit is held, though the program is idle."""
        calls, program = self.failing()
        with program:
            calls.fail("w", Calls.STALL)
            program.ask(f"fill {PAGES}", "filled")
            stalled = program.resident()
            expect(stalled > PAGES << 11, f"only {stalled >> 20} MiB resident while nothing could be written")
            calls.mend()
            program.holds_limit()
            program.end()
            return f"{stalled >> 20} MiB resident when not one write had ended"

    def stalls_at_the_end_of_a_budget(self):
        """No write ends, and then the budget is less than what is under way: after ten seconds nobody waits."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES // 3}", "filled")
            program.holds_limit()
            calls.fail("w", Calls.STALL)
            program.send(f"fill {PAGES // 3}")
            expect(calls.wait_for(1, TIMEOUT) > 0, "no write began")
            command = [program.zfolio, "set", str(program.pid), "write_budget=4K"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
            expect(done.returncode == 0, done.stderr)
            program.must_answer("fill", "filled")
            stalled = program.resident()
            calls.mend()
            figures = program.end()
            expect(figures["write_budget_used_up"] > 0, "the budget was never used up")
            return f"{stalled >> 20} MiB resident when no write had ended"

    def reads(self):
        """`EIO` on read for good."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES}", "filled")
            calls.fail("r")
            figures = program.must_stop(self.run.build, FAILED)
            # Each pause before the last one was counted.
            expect(figures["read_back_fail"] > 0 and figures["read_back_retry"] >= TRIES - 1,
                   f"it was not tried often: {figures}")
            return f"stopped, {figures['read_back_fail']} units could not be read, {figures['read_back_retry']} pauses"

    def reads_parts(self):
        """The rest of a slot is never read, as if the file ended there: the slot's units are lost at once."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES // 2}", "filled")
            # On a busy machine nothing may have been written yet.
            program.holds_limit()
            calls.fail("r", Calls.PART)
            figures = program.must_stop(self.run.build, CHANGED)
            expect(figures["read_back_fail"] > 0 and figures["read_back_retry"] == 0, f"it was tried again: {figures}")
            return f"stopped, {figures['read_back_fail']} units could not be read"

    def reads_for_a_while(self, how):
        """No read succeeds, and then the disk is good again: the program notices nothing but the time."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES}", "filled")
            program.ask("verify", "verified")
            # Without this all may be in memory on a machine so busy that no write has ended for a second.
            program.holds_limit()
            before = calls.hits()
            calls.fail("r", how)
            program.send("verify")
            expect(calls.wait_for(before + 1, TIMEOUT) > before, "nothing was read")
            time.sleep(0.3)
            calls.mend()
            program.must_answer("verify", "verified")
            return self.waited(program.end())

    def reads_beside(self):
        """`EIO` on read, and one thread reads: other faults, `munmap` and `fork` go on meanwhile."""
        calls, program = self.failing()
        with program:
            program.ask(f"fill {PAGES}", "filled")
            program.ask("verify", "verified")
            # What this needs of the heap has just been used, and is not on the disk.
            program.ask("turns 2", "took")
            calls.fail("r")
            # The disk is good again only after the answer.
            program.ask("beside 8", "went on while the reader waits")
            calls.mend()
            program.ask("join", "right")
            return self.waited(program.end())

    def address_space(self, megabytes, pages):
        """`RLIMIT_AS`, most of which zfolio's own mappings take: the program gets `ENOMEM` for what is beyond it, and
        what it has is right."""
        before = ["prlimit", f"--as={megabytes << 20}", "--"]
        with Program(self.run, self.run.build, before=before) as program:
            program.send(f"fill {pages}")
            answer = program.answer()
            program.ask("verify", "verified")
            program.ask("change 3", "changed")
            is_all = answer == f"filled {pages}"
            expect(is_all or answer.startswith("no memory after"), f"'{answer}'; {program.said()}")
            if is_all:
                program.send("fork")
                forked = program.answer()
                # If all of it was just enough, there may be none for a child.
                may_fail = pages == PAGES and forked == "no memory for a child"
                expect(forked == "child ended with 0" or may_fail, f"'{forked}'; {program.said()}")
            program.holds_limit()
            figures = program.end()
            expect(figures["written_back_units"] > PAGES // 8, f"little was spilled: {figures}")
            return f"{answer} pages, all right, {figures['written_back_units']} units written"

    def locked_memory(self):
        """`RLIMIT_MEMLOCK`: no memory can be locked for the key, so nothing is spilled, and a line says why."""
        if os.geteuid() == 0 and not shutil.which("setpriv"):
            raise Unable("setpriv is needed, to give up CAP_IPC_LOCK")
        before = ["setpriv", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []
        before += ["prlimit", "--memlock=0", "--"]
        with Program(self.run, self.run.build, before=before) as program:
            program.ask(f"fill {PAGES * 5 // 12}", "filled")
            program.ask("change 3", "changed")
            program.ask("fork", "child ended with 0")
            figures = program.end()
            lines = [line for line in program.said().split("; ") if "what does not compress stays in memory" in line]
            expect(len(lines) == 1 and "locked memory" in lines[0], program.said())
            expect(figures["written_back_units"] == 0, f"something was spilled: {figures}")
            return lines[0]

    def children(self):
        """The counts of a child begin with the child: its parent's are not in them, and the sum over the processes is
        what happened."""
        counted = ["written_back_units", "written_back_clean", "read_back_units", "spill_written_bytes",
                   "spill_read_bytes", "reclaim_incompressible", "faults_stored", "faults_disk", "stall_ns",
                   "demand_kib_ms"]
        with Program(self.run, self.run.build) as program:
            program.ask(f"fill {PAGES}", "filled")
            # While the disk is slow the program goes over its limit, and little is written.
            passes, written = 0, 0
            while written <= 2 * PAGES and passes < 8:
                program.ask("change 1", "changed")
                program.holds_limit()
                passes += 1
                written = program.live("written_back_units")
            for _ in range(3):
                program.ask("rest", "child ended with 0")
            program.end()
            processes = json.loads(program.stats.read_text())["processes"]
            parent, = [one for one in processes if one["pid"] == program.pid]
            # Those whose engine has looked at its figures.
            children = [one for one in processes if one is not parent and one["figures"]["process_bytes"] > 0]
            expect(children, "no child has figures")
            most = {name: max(one["figures"][name] for one in children) for name in counted}
            expect(parent["figures"]["written_back_units"] > 2 * PAGES,
                   f"little was written: {written} units in {passes} passes, {parent['figures']}")
            # A child has little time and a third of the pages resident; its parent has written most of them often.
            many = [name for name in counted if most[name] > parent["figures"][name] // 2]
            expect(not many, f"children have counted what their parent has done: {many}, {most}")
            runs = [one["orders"]["128kB"]["swpout"] for one in [parent, *children]]
            expect(runs[0] > 2 * max(runs[1:]), f"the same of runs of slots: {runs}")
            return f"{parent['figures']['written_back_units']} units written by the parent in {passes} passes, " \
                   f"at most {most['written_back_units']} by each of {len(children)} children"

    @staticmethod
    def waited(figures):
        fails, pauses = figures["read_back_fail"], figures["read_back_retry"]
        expect(fails > 0 and pauses > 0, f"no read has failed: {figures}")
        return f"goes on, {fails} reads of units have failed, {pauses} pauses"

    def damaged(self, damage):
        """Bytes of the file are changed behind the process's back."""
        with self.disk() as disk, Program(self.run, disk.place) as program:
            program.ask(f"fill {PAGES}", "filled")
            program.ask("verify", "verified")
            with program.slots(disk) as these:
                expect(len(these.slots) > PAGES // 2, f"only {len(these.slots)} slots are in use")
                damage(these)
            figures = program.must_stop(disk.place, CHANGED)
            found = figures["read_back_tampered"] + figures["read_back_fail"]
            expect(found > 0, f"nothing is counted: {figures}")
            return f"stopped, {figures['read_back_tampered']} slots did not open, " \
                   f"{figures['read_back_fail']} units could not be read"

    def replayed(self):
        """Slots that were written again have the contents of before, which were good then."""
        with self.disk() as disk, Program(self.run, disk.place, ["--spill-limit", "112M"]) as program:
            program.ask(f"fill {PAGES}", "filled")
            with program.slots(disk) as these:
                kept = these.keep()
            for _ in range(3):
                program.ask("change 1", "changed")
            with program.slots(disk) as these:
                changed = these.replay(kept)
            expect(changed > PAGES // 4, f"only {changed} slots were written again")
            figures = program.must_stop(disk.place, CHANGED)
            expect(figures["read_back_tampered"] > 0, f"nothing is counted: {figures}")
            return f"stopped, {changed} slots were old, {figures['read_back_tampered']} did not open"

    def device(self, damage, counter):
        """A block device that is changed, or whose end is lost."""
        with self.disk(is_mounted=False) as disk, Program(self.run, disk.place) as program:
            program.ask(f"fill {PAGES}", "filled")
            if damage:
                with program.slots(disk) as these:
                    damage(these)
            else:
                program.holds_limit()
                os.truncate(disk.image, LEFT_BYTES)
            # A write beyond the end makes the file below longer again, and there are zeros before it.
            figures = program.must_stop(disk.place, *([CHANGED] if damage else [CHANGED, FAILED]))
            expect(figures[f"read_back_{counter}"] > 0, f"nothing is counted: {figures}")
            return f"stopped, {figures['read_back_tampered']} slots did not open, " \
                   f"{figures['read_back_fail']} units could not be read"

    def two_runs(self):
        """A device is one run's from its start, before anything was written: another run is refused with one line."""
        with self.disk(is_mounted=False) as disk:
            other = [self.run.options.zfolio, "run", "--spill", disk.place, "--", "true"]
            with Program(self.run, disk.place) as program:
                for command in "fill 16", f"fill {PAGES}":
                    program.ask(command, "filled")
                    done = subprocess.run(other, capture_output=True, text=True, timeout=TIMEOUT)
                    lines = done.stderr.splitlines()
                    expect(done.returncode == 2 and len(lines) == 1 and f"--spill: '{disk.place}'" in lines[0],
                           f"status {done.returncode}: {done.stderr}")
                figures = program.end()
                expect(figures["written_back_units"] > PAGES // 2, f"the first run has not spilled: {figures}")
            subprocess.run(other, check=True, capture_output=True, timeout=TIMEOUT)
            return f"refused: {lines[0]}"

    def shared_device(self, megabytes):
        """Several processes of a run, and a child of each, spill to one device: all memory is right. Where it has room
        for all, each has some of it and the limit is held, but for two seconds in all: while the device answers nothing
        for one, faults pass the limit."""
        count, pages = 3, PAGES // 2
        # What a child inherits and changes is on the device too.
        commands = f"fill {pages}", "verify", "change 3", "fork", "verify", "end"
        words = " ".join(f"'{command}'" for command in commands)
        each = f"printf '%s\\n' {words} | ./spilled || echo failed"
        program = f"for i in {' '.join(map(str, range(count)))}; do ({each}) & done; wait"
        with self.disk(megabytes, is_mounted=False) as disk, tempfile.TemporaryDirectory(dir=self.run.build) as folder:
            stats, sizes = pathlib.Path(folder) / "stats.json", []
            command = [self.run.options.zfolio, "run", "--limit", str(LIMIT), "--spill", disk.place, "--stats",
                       str(stats), "--", "sh", "-c", program]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  cwd=self.run.build) as process:
                until = time.monotonic() + TIMEOUT
                while process.poll() is None and time.monotonic() < until:
                    sizes.append(memory_of_tree(process.pid))
                    time.sleep(0.05)
                process.kill()
                said, errors = process.stdout.read(), process.stderr.read()
            peak, over_s = max(sizes), 0.05 * sum(size > LIMIT + SLACK for size in sizes)
            for answer in f"verified {pages}", "child ended with 0":
                expected = count * (2 if answer.startswith("verified") else 1)
                expect(said.count(answer) == expected, f"'{answer}': not {expected} times in: {said} {errors}")
            expect(process.returncode == 0 and "failed" not in said, f"status {process.returncode}: {said} {errors}")
            figures = [one["figures"] for one in json.loads(stats.read_text())["processes"]]
            wrote = [one["written_back_units"] for one in figures if one["written_back_units"] > 0]
            if megabytes > 2 * (2 * count * pages >> 8):
                expect(len(wrote) >= count, f"{len(wrote)} of {count} processes have written: {wrote} {errors}")
                expect(over_s <= 2, f"{peak >> 20} MiB resident at most, too many for {over_s:.1f} s: {errors}")
            return f"{len(wrote)} of {len(figures)} processes wrote {sum(wrote)} units, {peak >> 20} MiB at most"

    def outlived_device(self):
        """A child outlives its run, which was killed: nobody else gets the device before the child has ended."""
        with self.disk(is_mounted=False) as disk:
            other = [self.run.options.zfolio, "run", "--spill", disk.place, "--", "true"]
            with Program(self.run, disk.place) as program:
                program.ask(f"fill {PAGES}", "filled")
                program.holds_limit()
                child = int(program.ask("stay", "stays").split()[1])
                try:
                    time.sleep(1)
                    program.process.kill()
                    program.process.wait(TIMEOUT)
                    done = subprocess.run(other, capture_output=True, text=True, timeout=TIMEOUT)
                    expect(is_alive(child), "the child has ended")
                    expect(done.returncode == 2 and "is in use" in done.stderr, f"{done.returncode}: {done.stderr}")
                finally:
                    os.kill(child, signal.SIGKILL)
                until = time.monotonic() + TIMEOUT
                while is_alive(child) and time.monotonic() < until:
                    time.sleep(0.05)
            # Its files are closed with the last of its threads, a moment later.
            while (done := subprocess.run(other, capture_output=True, text=True)).returncode != 0:
                expect(time.monotonic() < until, f"after its end: {done.stderr}")
                time.sleep(0.1)
            return f"{disk.place} was refused to another run while the child lived"

    def full(self):
        """A full disk: the limit is passed; once there is room it is held again."""
        with self.disk(160) as disk, Program(self.run, disk.place, ["--spill-limit", "1G"]) as program:
            ballast = disk.path / "ballast"
            about = os.statvfs(disk.path)
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize - (24 << 20))
            program.ask(f"fill {PAGES}", "filled")
            peak = program.resident()
            expect(peak > LIMIT + SLACK // 2, f"only {peak >> 20} MiB resident with a full disk")
            # A slow disk has still room when all is filled.
            until = time.monotonic() + 60
            while program.live("written_back_full") == 0 and time.monotonic() < until:
                time.sleep(0.1)
            ballast.unlink()
            now = program.holds_limit()
            program.ask("change 3", "changed")
            figures = program.end()
            expect(figures["written_back_full"] > 0, f"no write had no room: {figures}")
            return f"{peak >> 20} MiB resident while it was full, {now >> 20} when there was room again"

    def two_places(self):
        """The place of the higher priority is filled first, and what it has no room for goes to the other."""
        with self.disk(64) as small, self.disk() as large:
            options, before = ["--spill", large.place], [disk.used_bytes() for disk in (small, large)]
            with Program(self.run, f"{small.place},prio=5", options) as program:
                used = lambda: [disk.used_bytes() - was for disk, was in zip((small, large), before)]
                program.ask(f"fill {PAGES // 2}", "filled")
                program.holds_limit()
                first, other = used()
                expect(first > 4 << 20 > other, f"{first >> 20} MiB on the first, {other >> 20} on the other")
                program.ask(f"fill {PAGES // 2}", "filled")
                now = program.holds_limit()
                first, other = used()
                expect(min(first, other) > 8 << 20, f"{first >> 20} MiB on the first, {other >> 20} on the other")
                program.ask("change 3", "changed")
                program.end()
            self.left(small, before[0], program)
            self.left(large, before[1], program)
            return f"{first >> 20} and {other >> 20} MiB on the disks, {now >> 20} resident"

    def killed_child(self):
        """A child is killed in the middle of writing pages; the parent's are right, and those of a next child."""
        with self.disk() as disk:
            before = disk.used_bytes()
            with Program(self.run, disk.place) as program:
                program.ask(f"fill {PAGES}", "filled")
                for _ in range(3):
                    child = int(program.ask("stay", "stays").split()[1])
                    time.sleep(0.7)
                    os.kill(child, signal.SIGKILL)
                    program.ask("wait", f"waited for {child}")
                    program.ask("change 7", "changed")
                program.ask("fork", "child ended with 0")
                program.end()
            self.left(disk, before, program)
            return "the parent's memory is right, and nothing is left"

    def killed(self, who):
        """The program, or zfolio, is killed while both sides of a fork write: nothing stays behind."""
        with self.disk() as disk:
            before = disk.used_bytes()
            with Program(self.run, disk.place) as program:
                program.ask(f"fill {PAGES}", "filled")
                child = int(program.ask("stay", "stays").split()[1])
                program.send("change 1")
                time.sleep(0.5)
                os.kill(program.pid if who == "program" else program.process.pid, signal.SIGKILL)
                status = program.process.wait(TIMEOUT)
                expect(status == -signal.SIGKILL, f"status {status}; {program.said()}")
                # What a program has started outlives it.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self.left(disk, before, program, child)
            return "nothing is left"

    def left(self, disk, before, program, *others):
        """Waits until no file, process or entry in /dev/shm is left; another run sweeps up those of a killed one."""
        pids = [program.process.pid, program.pid, *others]
        shared, until = pathlib.Path(f"/dev/shm/zfolio-{os.geteuid()}"), time.monotonic() + 20
        while True:
            sweep_killed(self.run.options.zfolio)
            alive = [pid for pid in pids if is_alive(pid)]
            files = [path.name for path in shared.glob("*") if path.name.split(".")[0] in map(str, pids)]
            bytes_more = disk.used_bytes() - before
            opened = [file for pid in alive for file in files_of(pid, disk.place)]
            if not (alive or files or opened or bytes_more > 0):
                return
            if time.monotonic() > until:
                raise Failed(f"left behind: processes {alive}, in /dev/shm {files}, {bytes_more} bytes on the disk")
            time.sleep(0.1)


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
