# Two tables of SQLite in memory, an index, joins and updates. Argument: the number of sales.
import random
import sqlite3
import sys

count = int(sys.argv[1])
rng = random.Random(2)
words = "red green blue black white small large old new round flat heavy light".split()
text = " ".join(rng.choices(words, k=20_000))


def note(length):
    begin = rng.randrange(len(text) - length)
    return text[begin:begin + length]


base = sqlite3.connect(":memory:")
base.execute("create table item (id integer primary key, name text, price real)")
base.execute("create table sale (id integer primary key, item integer, buyer integer, note text)")
items = count // 10
base.executemany("insert into item values (?, ?, ?)", (
    (i, note(20), rng.random() * 100) for i in range(items)))
base.executemany("insert into sale values (?, ?, ?, ?)", (
    (i, int(items * rng.random() ** 2), rng.randrange(count // 20), note(180))
    for i in range(count)))
base.execute("create index by_item on sale (item)")

queries = [
    "select name, count(*), sum(price) from item group by name order by 3 desc limit 50",
    "select item.name, count(*) from sale join item on item.id = sale.item"
    " where item.price < 20 group by item.name order by 2 desc, 1 limit 50",
    "select buyer, sum(price) from sale join item on item.id = sale.item"
    " group by buyer order by 2 desc, 1 limit 50",
]
for query in queries:
    for row in base.execute(query):
        print(*row)
# Points: most of them among the items that are sold often.
for _ in range(count // 20):
    item = int(items * rng.random() ** 3)
    (sales,) = base.execute("select count(*) from sale where item = ?", (item,)).fetchone()
    base.execute("update item set price = price + ? where id = ?", (sales / 100, item))
print(base.execute("select sum(price), count(*) from item").fetchone())
