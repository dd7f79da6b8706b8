"""Cycles, dicts that grow and shrink, lists of lists: work for the garbage collector."""

import gc
import hashlib


class Node:
    """One of a ring."""

    def __init__(self, number):
        self.number = number
        self.other = None
        self.notes = {'number': number, 'text': f'node {number} ' * 3, 'list': list(range(number % 8))}


def ring(count, start):
    nodes = [Node(start + i) for i in range(count)]
    for here, there in zip(nodes, nodes[1:] + nodes[:1]):
        here.other = there
    return nodes[0]


def walk(first):
    answer, node = hashlib.sha256(), first
    while True:
        answer.update(f'{node.number}{node.notes}'.encode())
        node = node.other
        if node is first:
            return answer.hexdigest()


def main():
    rings = [ring(20_000, turn * 1_000_003) for turn in range(12)]
    for turn in range(12):
        rings[turn % 12] = ring(20_000, turn)
        if turn % 8 == 7:
            print('collected', gc.collect() >= 0)
    table = {}
    for turn in range(2):
        for i in range(200_000):
            table[i * 7 + turn] = (i, str(i))
        for i in range(0, 200_000, 2):
            del table[i * 7 + turn]
    print(len(table), sum(value[0] for value in table.values()))
    matrix = [[i * j for j in range(1000)] for i in range(1000)]
    print(sum(map(sum, matrix)), sum(matrix[i][i] for i in range(1000)))
    for first in rings:
        print(walk(first))


main()
