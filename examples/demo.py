#!/usr/bin/env python3
"""A customer database of about 1 GiB of ordinary Python objects, built and then queried.

It knows nothing of zfolio. Run it alone and it needs 1 GiB:

    /usr/bin/time -v python3 examples/demo.py

Run it in a quarter of that, with the same answers:

    zfolio run --limit 256M -- python3 examples/demo.py

The records come from arithmetic, so every answer is known before the program starts: the ones
below were computed by `--answers`, which makes the same records one at a time and keeps none.
"""

import argparse
import gc
import hashlib
import heapq
import os
import resource
import sys
import time

CUSTOMERS = 640_000
LOOKUPS = 20_000

# What `--answers` prints for CUSTOMERS.
ANSWERS = {
    'balances by city': '8f917c4fd90d9b93',
    'revenue by item': '532e87a86b79ecc5',
    'all e-mail addresses': 'f6e1dfbd45aff1ef',
    'parcels in notes': 143880,
    'ten oldest': [548, 650, 716, 860, 869, 894, 928, 1003, 1014, 1104],
    'spent by those looked up': 3373745037,
    'balances after the raise': 320187928478,
}

FIRST = """Ada Alan Barbara Blaise Carl Donald Edith Emmy Ernst Evelyn Frances Fred Grace Hedy Ivan
Jean John Joan Karen Katherine Ken Leslie Lynn Margaret Marie Niklaus Noether Olga Peter Radia
Rosalind Sofia Steve Tim Ursula Vint Wanda Xavier Yuri Zoe""".split()
LAST = """Abel Bauer Clarke Dijkstra Euler Fischer Gauss Hamilton Ivanov Jacobi Keller Lovelace
Meyer Newton Olsen Perlman Quine Ritchie Schmidt Turing Ullman Voigt Weber Xu Young Zuse""".split()
CITIES = """Aachen Bergen Cork Delft Espoo Faro Ghent Hamburg Izmir Jena Krakow Lyon Malmo Nantes
Oslo Porto Quimper Riga Seville Turin Uppsala Vienna Warsaw York Zurich""".split()
WORDS = """about account again always asked before below call called card cheaper colour could
customer deliver delivered discount early every exchange first found from gift good green happy has
house in invoice is large late leave letter like more neighbour never next not of on once order out
paid parcel perhaps phone prefers price quality quick really red repair reply returned said second
sent shop should size small soon street thanks that the them time to twice under very waits was
week when which will with without would write wrong year yellow""".split()


def scramble(number):
    """A number that looks random and depends on `number` only (the finaliser of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def customer(number):
    """The record of customer `number`."""
    dice = scramble(number)
    first = FIRST[dice % len(FIRST)]
    last = LAST[(dice >> 8) % len(LAST)]
    orders = []
    for _ in range(1 + (dice >> 16) % 4):
        dice = (dice * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        item = (dice >> 33) % 5000
        order = {
            "item": f"item-{item:05}",
            "count": 1 + (dice >> 50) % 6,
            "cents": 199 + item * 37 % 40_000,
            "day": 738_000 + (dice >> 40) % 1500,
        }
        orders.append(order)
    note = []
    for _ in range(14 + (dice >> 20) % 16):
        dice = (dice * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        note.append(WORDS[(dice >> 33) % len(WORDS)])
    return {
        "number": number,
        "name": f"{first} {last}",
        "email": f"{first}.{last}.{number}@example.org".lower(),
        "city": CITIES[(dice >> 40) % len(CITIES)],
        "born": 1930 + (dice >> 45) % 80,
        "balance": (dice >> 24) % 2_000_000 - 500_000,
        "orders": orders,
        "note": " ".join(note),
    }


def looked_up(customers):
    """The numbers of the customers that are looked up one by one, all over the place."""
    for lookup in range(LOOKUPS):
        yield scramble(lookup + 1_000_000_007) % customers


def raised(record):
    """The balance after everybody in Oslo got ten euros."""
    return record["balance"] + 1000 if record["city"] == "Oslo" else record["balance"]


def answers_without_keeping(customers):
    """Every answer, from one record at a time."""
    balances, revenue, emails, words, oldest, total = {}, {}, hashlib.sha256(), 0, [], 0
    for number in range(customers):
        record = customer(number)
        balances[record["city"]] = balances.get(record["city"], 0) + record["balance"]
        for order in record["orders"]:
            revenue[order["item"]] = revenue.get(order["item"], 0) + order["count"] * order["cents"]
        emails.update(record["email"].encode())
        words += record["note"].count(" parcel")
        total += raised(record)
        heapq.heappush(oldest, (-record["born"], -number))
        if len(oldest) > 10:
            heapq.heappop(oldest)
    spent = sum(
        order["count"] * order["cents"]
        for number in looked_up(customers)
        for order in customer(number)["orders"]
    )
    return {
        "balances by city": digest(balances),
        "revenue by item": digest(revenue),
        "all e-mail addresses": emails.hexdigest()[:16],
        "parcels in notes": words,
        "ten oldest": sorted(-number for _, number in oldest),
        "spent by those looked up": spent,
        "balances after the raise": total,
    }


def digest(totals):
    """A short name for a dictionary of totals."""
    return hashlib.sha256(repr(sorted(totals.items())).encode()).hexdigest()[:16]


class Progress:
    """How far a step is: a line that is rewritten on a terminal, elsewhere one every few seconds."""

    def __init__(self):
        self.start = time.monotonic()
        self.live = sys.stdout.isatty()
        self.every = 0.25 if self.live else 2.5
        self.begin("start", 1)

    def begin(self, step, total):
        """A step that goes through `total` things."""
        self.step, self.total, self.count = step, total, 0
        self.step_start = self.told = time.monotonic()

    def each(self, things):
        """The same things, one by one, and the progress on the way."""
        for thing in things:
            if self.count % 64 == 0 and time.monotonic() - self.told > self.every:
                self.told = time.monotonic()
                self.say(f"{100 * self.count // self.total:3} %", end="" if self.live else "\n")
            self.count += 1
            yield thing

    def done(self, told):
        """The step is over."""
        self.say(str(told), end="\n")

    def say(self, told, end):
        seconds = time.monotonic() - self.step_start
        with open("/proc/self/statm") as file:
            resident_mib = int(file.read().split()[1]) * resource.getpagesize() >> 20
        line = f"  {self.step:26} {seconds:6.1f} s {resident_mib:5} MiB resident   {told}"
        print(f"\r{line}\033[K" if self.live else line, end=end, flush=True)


def build(customers, progress):
    """The database: records by number, and two indexes."""
    # As many programs do that load much: nothing here is garbage, so don't look for it.
    gc.disable()
    records, by_email, by_city = [], {}, {}
    progress.begin("building", customers)
    for number in progress.each(range(customers)):
        record = customer(number)
        records.append(record)
        by_email[record["email"]] = record
        by_city.setdefault(record["city"], []).append(record)
    gc.freeze()
    gc.enable()
    progress.done(f"{customers} customers")
    return records, by_email, by_city


def query(records, by_email, by_city, progress):
    """Asks everything; the answers by name."""
    found = {}

    def ask(name, total=len(records)):
        progress.begin(name, total)

    def answer(value):
        found[progress.step] = value
        progress.done(value)

    ask("balances by city")
    balances = {}
    for city, residents in by_city.items():
        balances[city] = sum(record["balance"] for record in progress.each(residents))
    answer(digest(balances))

    ask("revenue by item")
    revenue = {}
    for record in progress.each(records):
        for order in record["orders"]:
            revenue[order["item"]] = revenue.get(order["item"], 0) + order["count"] * order["cents"]
    answer(digest(revenue))

    ask("all e-mail addresses")
    emails = hashlib.sha256()
    for email in progress.each(by_email):
        emails.update(email.encode())
    answer(emails.hexdigest()[:16])

    ask("parcels in notes")
    answer(sum(record["note"].count(" parcel") for record in progress.each(records)))

    ask("ten oldest")
    oldest = heapq.nsmallest(10, progress.each(records), key=lambda record: (record["born"], record["number"]))
    answer(sorted(record["number"] for record in oldest))

    ask("spent by those looked up", LOOKUPS)
    spent = 0
    for number in progress.each(looked_up(len(records))):
        record = by_email[records[number]["email"]]
        spent += sum(order["count"] * order["cents"] for order in record["orders"])
    answer(spent)

    ask("balances after the raise", len(by_city["Oslo"]) + len(records))
    for record in progress.each(by_city["Oslo"]):
        record["balance"] += 1000
    answer(sum(record["balance"] for record in progress.each(records)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--customers", type=int, default=CUSTOMERS, metavar="N",
                        help="records to build, at least 10000; each needs about 1.6 KiB")
    parser.add_argument("--answers", action="store_true",
                        help="print the right answers, computed without keeping a record")
    arguments = parser.parse_args()
    if arguments.customers < 10_000:
        parser.error(f"--customers: {arguments.customers} given; accepted: 10000 or more")
    if arguments.answers:
        for name, value in answers_without_keeping(arguments.customers).items():
            print(f"    {name!r}: {value!r},")
        return 0

    progress = Progress()
    found = query(*build(arguments.customers, progress), progress)
    seconds = time.monotonic() - progress.start
    known = ANSWERS
    if arguments.customers != CUSTOMERS:
        print("  (the right answers for so many customers are computed now)", flush=True)
        known = answers_without_keeping(arguments.customers)
    wrong = [name for name in known if found[name] != known[name]]
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    for name in wrong:
        print(f"WRONG: {name}: {found[name]}, but right is {known[name]}")
    right = len(known) - len(wrong)
    print(f"  {right} of {len(known)} answers right, {seconds:.1f} s, peak {peak_mib} MiB resident")
    return 1 if wrong else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not sys.exit: freeing millions of objects one by one, at the end, is not what is shown here.
    os._exit(status)
