"""A PHP server (php-fpm, two workers) and its client: two pages at once, twice, with new workers in between.

    pages.py SERVER FOLDER
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BEGIN, END, PARAMETERS, INPUT, OUTPUT = 1, 3, 4, 5, 6


def record(kind, content=b''):
    return struct.pack('>BBHHBB', 1, kind, 1, len(content), 0, 0) + content


def page(path, script):
    """The answer of the server, by the FastCGI protocol."""
    words = b''
    # Half of the records: two pages are made at a time.
    values = {'SCRIPT_FILENAME': script, 'REQUEST_METHOD': 'GET', 'SCRIPT_NAME': '/page', 'RECORDS': '110000'}
    for name, value in values.items():
        words += bytes([len(name), len(value)]) + name.encode() + value.encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        server.sendall(record(BEGIN, struct.pack('>HB5x', 1, 0)) + record(PARAMETERS, words) + record(PARAMETERS)
                       + record(INPUT))
        answer = b''
        with server.makefile('rb') as stream:
            while head := stream.read(8):
                _, kind, _, length, padding, _ = struct.unpack('>BBHHBB', head)
                content = stream.read(length + padding)[:length]
                if kind == OUTPUT:
                    answer += content
                if kind == END:
                    break
    return answer.decode().partition('\r\n\r\n')[2]


def main():
    program, folder = sys.argv[1:]
    path = f'{folder}/socket'
    with open(f'{folder}/fpm.conf', 'w', encoding='ascii') as out:
        # After each page the server replaces the worker, by a fork.
        out.write(f'[global]\nerror_log = {folder}/log\ndaemonize = no\n[www]\nuser = root\nlisten = {path}\n'
                  'pm = static\npm.max_children = 2\npm.max_requests = 1\n')
    server = subprocess.Popen([program, '-n', '-R', '-F', '-y', f'{folder}/fpm.conf'])
    while not os.path.exists(path):
        if server.poll() is not None:
            sys.exit(f'php-fpm ended with {server.returncode}')
        time.sleep(0.02)
    answers = [None] * 4

    def client(first):
        for number in range(first, len(answers), 2):
            answers[number] = page(path, f'{HERE}/records.php')

    clients = [threading.Thread(target=client, args=(first,)) for first in range(2)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    server.terminate()
    print(server.wait(), len(set(answers)), answers[0], end='')


main()
