# A shop in memory: orders as dicts, lists, tuples and strings. Argument: the number of orders.
import random
import sys

count = int(sys.argv[1])
rng = random.Random(1)
words = "the order was placed by phone and must be delivered before noon or returned".split()
text = " ".join(rng.choices(words, k=20_000))

orders = []
for number in range(count):
    begin = rng.randrange(len(text) - 50)
    orders.append({
        "id": number,
        "customer": rng.randrange(count // 8),
        "lines": [(rng.randrange(5000), rng.random() * 100) for _ in range(3)],
        "note": text[begin:begin + 50],
    })

by_customer = {}
for order in orders:
    by_customer.setdefault(order["customer"], []).append(order)

# Most customers are seldom asked for, and a tenth of them all the time.
customers = sorted(by_customer)
total = 0.0
for _ in range(count // 2):
    orders_of = by_customer[customers[int(len(customers) * rng.random() ** 4)]]
    for order in orders_of:
        total += sum(price for _, price in order["lines"])
    orders_of[0]["asked"] = orders_of[0].get("asked", 0) + 1

# A report over everything, in another order than that of the memory.
orders.sort(key=lambda order: order["note"])
for order in orders[:: len(orders) // 1000]:
    print(order["id"], order["customer"], order["note"], order.get("asked", 0))
print(total, sum(order.get("asked", 0) * order["id"] for order in orders))
