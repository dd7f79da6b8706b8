# Records in a hash: found by their keys and changed, then all of them in order. Argument: the number of records.
# records.* do the same, each in its language, and write the same.
Record = Struct.new(:name, :value, :older, :numbers)
count = ARGV[0].to_i
state = 4711
random = ->(bound) { (state = state * 16_807 % 2_147_483_647) % bound }

records = {}
count.times do |id|
  records["record-#{id}"] = Record.new("name #{id} of a record", id % 97, random.(id + 1), [id, id * 7 % 1009])
end

# In random order. Each leads to an older one, so that old records are used more than new ones.
sum = 0
(2 * count).times do |n|
  one = records["record-#{random.(count)}"]
  one.value = (one.value + one.numbers[1] + n) % 1009
  one.name = "name #{one.numbers[0]}, changed by #{n}" if n % 4 == 0
  older = records["record-#{one.older}"]
  older.value = (older.value + one.value) % 1009
  sum = (sum * 31 + older.value + older.name.size) % 2_147_483_647
end

count.times do |id|
  one = records["record-#{id}"]
  sum = (sum * 31 + one.value + one.name.size) % 2_147_483_647
  puts "#{one.name}: #{one.value}" if id % (count / 10) == 0
end
puts "#{count} records, #{sum}"
