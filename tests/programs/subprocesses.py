"""A large parent starts programs, and moves data through their pipes."""

import hashlib
import subprocess
import sys


def digest(data):
    return hashlib.sha256(data).hexdigest()


def main():
    kept = [b'%d bottles of beer on wall %d, ' % (i, i * i) * 20 for i in range(180_000)]
    flat = b''.join(kept[:60_000])
    for turn in range(20):
        echo = subprocess.run(['/bin/echo', str(turn)], capture_output=True, check=True)
        print('echo', echo.stdout)
    # 40 MiB into a pipe and out of it again: the kernel reads and writes managed memory.
    cat = subprocess.run(['/bin/cat'], input=flat, capture_output=True, check=True)
    print('cat', len(cat.stdout), digest(cat.stdout), cat.stdout == flat)
    shell = subprocess.run('tr a-z A-Z | wc -c', shell=True, input=flat, capture_output=True, check=True)
    print('shell', shell.stdout)
    # With preexec_fn Python forks instead of vforking.
    forked = subprocess.run(['/bin/echo', 'forked'], capture_output=True, check=True, preexec_fn=lambda: None)
    print('preexec', forked.stdout)
    code = 'data = [str(i) * 9 for i in range(1_200_000)]; print(sum(map(len, data)))'
    children = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) for _ in range(2)]
    print('python', [child.communicate()[0] for child in children], [child.returncode for child in children])
    print('kept', digest(b''.join(kept)))


main()
