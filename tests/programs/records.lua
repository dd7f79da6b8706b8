-- A table of records, made in order, half of them dropped, the rest joined into one text.
local count = 400000
local people = {}
for i = 1, count do
    people[i] = { name = "name " .. i .. " of a person", age = i % 97, words = { i, i * 7 % 1009, "w" .. i } }
end
local sum = 0
for round = 1, 3 do
    for i = 1, count do
        local one = people[i]
        one.age = (one.age + one.words[2] + round) % 1009
        sum = (sum * 31 + one.age + #one.name) % 2147483647
    end
end
print(count, sum)
for i = 1, count, 2 do people[i] = nil end
collectgarbage()
local texts = {}
for i = 2, count, 2 do texts[#texts + 1] = people[i].name .. ":" .. people[i].age end
local text = table.concat(texts, "\n")
for i = 1, #text, 101 do sum = (sum * 33 + text:byte(i)) % 2147483647 end
print(#text, sum)
io.stdout:flush()
-- Without freeing at the end, which would only be slow.
os.exit(0, false)
