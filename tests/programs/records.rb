# Structures in an array, strings in a hash, rounds over all of them, half of them dropped.
Person = Struct.new(:name, :age, :words)
count = 250_000
people = Array.new(count) do |i|
  Person.new("name #{i} of a person with a long name", i % 97, [i, i * 7 % 1009, "word #{i}"])
end
sum = 0
3.times do |round|
  people.each do |one|
    one.age = (one.age + one.words[1] + round) % 1009
    sum = (sum * 31 + one.age + one.name.bytesize) % 2_147_483_647
  end
end
puts "#{count} #{sum}"
people = people.each_slice(2).map(&:first)
GC.start
text = people.map { |one| "#{one.name}:#{one.age}" }.join("\n")
puts "#{text.bytesize} #{text.sum(64)} #{text.scan(/name (\d*77) of/).size}"
$stdout.flush
exit!(0)
