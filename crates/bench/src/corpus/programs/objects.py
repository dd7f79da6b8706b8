# A small order book: dicts, lists, tuples, strings and floats, as a program would hold them.
import random
import sys

SIZE = int(sys.argv[-1])
PER_ORDER = 1000  # bytes of one order and its share of a customer, measured with CPython 3.11

rng = random.Random(2)
first = ["Ada", "Ben", "Chen", "Dara", "Eve", "Femi", "Gita", "Hugo", "Ines", "Jun"]
last = ["Abe", "Brandt", "Costa", "Diaz", "Evans", "Fofana", "Garcia", "Haas", "Ito", "Jones"]
words = "the order was placed by phone and must be delivered before noon or returned".split()

customers = {}
orders = []
for number in range(SIZE // PER_ORDER):
    if number % 4 == 0:
        name = f"{rng.choice(first)} {rng.choice(last)} {number}"
        customers[name] = {"id": number, "balance": rng.random() * 1000, "orders": []}
    order = {
        "id": number,
        "customer": name,
        "lines": [(rng.randrange(5000), rng.randrange(1, 20), rng.random() * 100) for _ in range(3)],
        "note": " ".join(rng.choice(words) for _ in range(8)),
        "paid": rng.random() < 0.8,
    }
    orders.append(order)
    customers[name]["orders"].append(order)
index = {order["id"]: order for order in orders}

print("ready", flush=True)
sys.stdin.read()
