<?php
// The same as records.rb, with objects in an array.
final class Record {
    function __construct(public string $name, public int $value, public int $older, public array $numbers) {}
}
ini_set('memory_limit', '-1');
$count = (int) $argv[1];
$state = 4711;
function random(int $bound): int {
    global $state;
    $state = $state * 16807 % 2147483647;
    return $state % $bound;
}

$records = [];
for ($id = 0; $id < $count; $id++) {
    $records["record-$id"] = new Record("name $id of a record", $id % 97, random($id + 1), [$id, $id * 7 % 1009]);
}

$sum = 0;
for ($n = 0; $n < 2 * $count; $n++) {
    $one = $records['record-' . random($count)];
    $one->value = ($one->value + $one->numbers[1] + $n) % 1009;
    if ($n % 4 == 0) {
        $one->name = "name {$one->numbers[0]}, changed by $n";
    }
    $older = $records["record-$one->older"];
    $older->value = ($older->value + $one->value) % 1009;
    $sum = ($sum * 31 + $older->value + strlen($older->name)) % 2147483647;
}

for ($id = 0; $id < $count; $id++) {
    $one = $records["record-$id"];
    $sum = ($sum * 31 + $one->value + strlen($one->name)) % 2147483647;
    if ($id % intdiv($count, 10) == 0) {
        echo "$one->name: $one->value\n";
    }
}
echo "$count records, $sum\n";
