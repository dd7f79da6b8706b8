# Hashes of hashes, long strings that grow, a regular expression over all of it.
use strict;
use warnings;

my %people;
for my $i (1 .. 130_000) {
    $people{"person $i"} = { name => "name $i" x 3, age => $i % 97, words => [ split ' ', "some words about $i" ] };
}
my $text = '';
$text .= "$_: $people{$_}{name} is $people{$_}{age}\n" for sort keys %people;
print length($text), ' ', unpack('%64Q*', $text), "\n";
my $found = () = $text =~ /name (\d+)name \1name \1 is 42/g;
print "$found are 42\n";
delete $people{"person $_"} for grep { $_ % 3 } 1 .. 130_000;
my $sum = 0;
$sum += $_->{age} + @{ $_->{words} } for values %people;
print scalar(keys %people), " $sum\n";
