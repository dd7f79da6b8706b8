<?php
// Arrays of arrays and objects, rounds over all of them, half of them dropped; one long text.
ini_set('memory_limit', '-1');
$count = (int)($_SERVER['RECORDS'] ?? 150000);
$people = [];
for ($i = 0; $i < $count; $i++) {
    $one = new stdClass();
    $one->name = "name $i of a person";
    $one->age = $i % 97;
    $one->words = [$i, $i * 7 % 1009, "word $i"];
    $people[] = $one;
}
$sum = 0;
for ($round = 0; $round < 3; $round++) {
    foreach ($people as $one) {
        $one->age = ($one->age + $one->words[1] + $round) % 1009;
        $sum = ($sum * 31 + $one->age + strlen($one->name)) % 2147483647;
    }
}
echo "$count $sum\n";
for ($i = 0; $i < $count; $i += 2) {
    unset($people[$i]);
}
$text = '';
foreach ($people as $one) {
    $text .= "$one->name:$one->age\n";
}
echo strlen($text), ' ', md5($text), ' ', preg_match_all('/name \d*77 of/', $text), "\n";
