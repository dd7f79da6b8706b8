# Hashes of hashes, a long string that grows, a regular expression over all of it.
use strict;
use warnings;

my $count = 130_000;
my %people;
for my $i (1 .. $count) {
    $people{"person $i"} = { name => "name $i" x 3, age => $i % 97, words => [ split ' ', "some words about $i" ] };
}
# In the order in which they were made, so that accesses are close together.
my $text = '';
for my $i (1 .. $count) {
    my $one = $people{"person $i"};
    $text .= "$i: $one->{name} is $one->{age}\n";
}
print length($text), ' ', unpack('%64Q*', $text), "\n";
my $found = () = $text =~ /name (\d+)name \1name \1 is 42/g;
print "$found are 42\n";
delete $people{"person $_"} for grep { $_ % 3 } 1 .. $count;
my $sum = 0;
$sum += $_->{age} + @{ $_->{words} } for @people{ map { "person $_" } grep { $_ % 3 == 0 } 1 .. $count };
print scalar(keys %people), " $sum\n";
# Without freeing at the end, which would visit the hash in a random order.
$| = 1;
print "done\n";
require POSIX;
POSIX::_exit(0);
