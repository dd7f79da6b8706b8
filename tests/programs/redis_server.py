"""redis-server: digests before and after load, a snapshot during it, and what the snapshot holds."""

import os
import socket
import subprocess
import time

from program import ZFOLIO, Failure, Need, end, figures, judge, mib, needs, read, summary, tail, where


class Redis:
    """A server on a socket in its own folder, ended by its process id."""

    KEYS = 60_000

    def __init__(self, folder, before=()):
        self.folder, self.path = folder, f'{folder}/socket'
        os.makedirs(folder, exist_ok=True)
        command = [*before, needs('redis-server'), '--port', '0', '--unixsocket', self.path, '--dir', folder,
                   '--save', '', '--appendonly', 'no', '--enable-debug-command', 'yes', '--daemonize', 'no']
        self.errors = open(f'{folder}/stderr', 'wb')
        self.log = open(f'{folder}/stdout', 'wb')
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.errors,
                                      start_new_session=True)
        self.usage, self.need = None, Need()

    def connect(self, seconds):
        """Waits until it answers."""
        until = time.monotonic() + seconds
        while True:
            try:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.settimeout(seconds)
                self.socket.connect(self.path)
                self.file = self.socket.makefile('rb')
                if self.ask('PING') == 'PONG':
                    return
            except (OSError, Failure) as error:
                if time.monotonic() > until or self.child.poll() is not None:
                    raise Failure(f'redis-server does not answer: {error}\n{tail(self.folder + "/stdout")}') from error
            time.sleep(0.05)

    @staticmethod
    def packed(words):
        parts = [f'*{len(words)}\r\n'.encode()]
        for word in words:
            data = word.encode()
            parts.append(b'$%d\r\n%s\r\n' % (len(data), data))
        return b''.join(parts)

    def answer(self):
        try:
            line = self.file.readline().decode().rstrip()
        except TimeoutError as error:
            raise Failure(f'redis-server hangs\n{where(self.child.pid)}\n{tail(self.folder + "/stderr")}') from error
        if not line:
            raise Failure(f'redis-server is gone\n{tail(self.folder + "/stdout")}\n{tail(self.folder + "/stderr")}')
        if line.startswith('-'):
            raise Failure(f'redis-server says {line}')
        if line.startswith('$'):
            return self.file.read(int(line[1:]) + 2)[:-2].decode(errors='replace') if line != '$-1' else ''
        return line[1:]

    def ask(self, *words):
        self.socket.sendall(self.packed(words))
        return self.answer()

    def info(self, name):
        for line in self.ask('INFO').splitlines():
            if line.startswith(name + ':'):
                return line.partition(':')[2]
        raise Failure(f'INFO has no {name}')

    def load(self):
        """Values that depend on the key; all begin with a "v", which the benchmark overwrites repeatedly."""
        for first in range(0, self.KEYS, 1000):
            batch = [self.packed(['SET', f'key:{i:012d}', f'value {i} ' + f'{i * i % 9973} of {i}, ' * 150])
                     for i in range(first, first + 1000)]
            self.socket.sendall(b''.join(batch))
            for _ in batch:
                self.answer()

    def benchmark(self, count, *command):
        """Starts redis-benchmark."""
        return subprocess.Popen([needs('redis-benchmark'), '-s', self.path, '-n', str(count), '-r', str(self.KEYS),
                                 '-P', '8', '-c', '20', '-q', *command],
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def finish(self, child, seconds):
        try:
            if child.wait(seconds):
                raise Failure(f'redis-benchmark ended with {child.returncode}')
        except subprocess.TimeoutExpired as error:
            child.kill()
            child.wait()
            raise Failure(f'redis-benchmark hangs\n{where(self.child.pid)}') from error

    def stop(self):
        """Shuts it down; ends a remaining process by its id."""
        try:
            self.need.look(self.child.pid)
            self.socket.sendall(self.packed(['SHUTDOWN', 'NOSAVE']))
            until = time.monotonic() + 60
            while time.monotonic() < until:
                pid, _, usage = os.wait4(self.child.pid, os.WNOHANG)
                if pid:
                    self.child.returncode, self.usage = 0, usage
                    self.need.close(usage.ru_maxrss << 10)
                    return
                time.sleep(0.02)
            raise Failure(f'redis-server does not end\n{where(self.child.pid)}')
        finally:
            self.close()

    def close(self):
        end(self.child.pid)
        if self.child.returncode is None:
            self.child.wait()
        self.errors.close()
        self.log.close()


class RedisCase:
    """redis-server: digests before and after load, a snapshot during it, and what the snapshot holds."""

    name = 'redis'
    told = ''

    def once(self, folder, before=()):
        seconds = 300
        began = time.monotonic()
        server = Redis(folder, before)
        try:
            server.connect(60)
            server.socket.settimeout(seconds)
            server.load()
            digests = [server.ask('DEBUG', 'DIGEST')]
            server.finish(server.benchmark(40_000, 'GET', 'key:__rand_int__'), seconds)
            digests.append(server.ask('DEBUG', 'DIGEST'))
            # Each of these writes changes a page, and none changes a value.
            writes = server.benchmark(40_000, 'SETRANGE', 'key:__rand_int__', '0', 'v')
            time.sleep(0.2)
            server.ask('BGSAVE')
            server.finish(writes, seconds)
            until = time.monotonic() + seconds
            while server.info('rdb_bgsave_in_progress') != '0':
                if time.monotonic() > until:
                    raise Failure(f'BGSAVE hangs\n{where(server.child.pid)}')
                time.sleep(0.05)
            if server.info('rdb_last_bgsave_status') != 'ok':
                raise Failure(f'BGSAVE failed\n{tail(folder + "/stdout")}\n{tail(folder + "/stderr")}')
            digests.append(server.ask('DEBUG', 'DIGEST'))
            server.stop()
        finally:
            server.close()
        took = time.monotonic() - began
        again = Redis(folder)
        try:
            again.connect(60)
            digests.append(again.ask('DEBUG', 'DIGEST'))
            again.stop()
        finally:
            again.close()
        return digests, took, server.need

    def test(self, shared):
        needs('redis-server'), needs('redis-benchmark')
        alone, seconds, need = self.once(f'{shared}/alone')
        if len(set(alone)) != 1:
            raise Failure(f'the digests differ without zfolio: {alone}')
        limit = need.limit(0.45)
        stats = f'{shared}/stats.json'
        before = [ZFOLIO, 'run', '--limit', str(limit), '--stats', stats, '--']
        managed, managed_seconds, _ = self.once(f'{shared}/managed', before)
        self.told = read(f'{shared}/managed/stderr')
        if managed != alone:
            raise Failure(f'digests (loaded, after reads, after writes, of the snapshot):\n  alone   {alone}\n'
                          f'  managed {managed}')
        processes, had = figures(stats)
        judge(processes, had, limit, True)
        return (f'{need} in {mib(limit)} (had {mib(had)}), {seconds:.1f} -> {managed_seconds:.1f} s '
                f'({managed_seconds / seconds:.1f}x); {summary(processes)}')
