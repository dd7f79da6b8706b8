# A hash of arrays and strings: words of a text and the places where they occur. Argument: places.
use strict;
use warnings;
use integer;

my $count = $ARGV[0];
my $state = 4711;

sub random {
    my ($bound) = @_;
    $state = ($state * 1103515245 + 12345) & 0x7fffffff;
    return ($state >> 8) % $bound;
}

# The smaller of two numbers is more often small: some words are frequent.
my (%places, @text);
for my $place (0 .. $count - 1) {
    my ($one, $other) = (random($count / 6), random($count / 6));
    my $word = "word-" . ($one < $other ? $one : $other);
    push @text, $word;
    push @{ $places{$word} }, $place;
}

# Lookups, and neighbours of what they find.
my ($sum, %neighbours) = (0);
for (1 .. $count / 4) {
    my $list = $places{ $text[random($count)] };
    my $place = $list->[random(scalar @$list)];
    my $next = $text[($place + 1) % $count];
    $neighbours{$next}++;
    $sum += @{ $places{$next} };
}

my @frequent = sort { @{ $places{$b} } <=> @{ $places{$a} } || $a cmp $b } keys %places;
print "$_ ", scalar @{ $places{$_} }, " ", $neighbours{$_} // 0, "\n" for @frequent[0 .. 999];
print "$sum ", scalar keys %neighbours, "\n";
