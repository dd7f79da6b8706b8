// The same as records.rb, with objects in a Dictionary.
using System;
using System.Collections.Generic;

static class Records {
    sealed class Record {
        internal string Name;
        internal int Value, Older;
        internal int[] Numbers;
    }

    static long state = 4711;

    static int Random(int bound) {
        state = state * 16807 % 2147483647;
        return (int)(state % bound);
    }

    static void Main(string[] arguments) {
        int count = int.Parse(arguments[0]);
        var records = new Dictionary<string, Record>();
        for (int id = 0; id < count; id++) {
            records["record-" + id] = new Record {
                Name = "name " + id + " of a record",
                Value = id % 97,
                Older = Random(id + 1),
                Numbers = new[] { id, (int)(id * 7L % 1009) },
            };
        }

        long sum = 0;
        for (int n = 0; n < 2 * count; n++) {
            Record one = records["record-" + Random(count)];
            one.Value = (one.Value + one.Numbers[1] + n) % 1009;
            if (n % 4 == 0) {
                one.Name = "name " + one.Numbers[0] + ", changed by " + n;
            }
            Record older = records["record-" + one.Older];
            older.Value = (older.Value + one.Value) % 1009;
            sum = (sum * 31 + older.Value + older.Name.Length) % 2147483647;
        }

        for (int id = 0; id < count; id++) {
            Record one = records["record-" + id];
            sum = (sum * 31 + one.Value + one.Name.Length) % 2147483647;
            if (id % (count / 10) == 0) {
                Console.WriteLine(one.Name + ": " + one.Value);
            }
        }
        Console.WriteLine(count + " records, " + sum);
    }
}
