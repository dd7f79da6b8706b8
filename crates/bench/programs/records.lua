-- The same as records.rb, with tables in a table.
local count = tonumber(arg[1])
local state = 4711
local function random(bound)
    state = state * 16807 % 2147483647
    return state % bound
end

local records = {}
for id = 0, count - 1 do
    local name, older = "name " .. id .. " of a record", random(id + 1)
    records["record-" .. id] = { name = name, value = id % 97, older = older, numbers = { id, id * 7 % 1009 } }
end

local sum = 0
for n = 0, 2 * count - 1 do
    local one = records["record-" .. random(count)]
    one.value = (one.value + one.numbers[2] + n) % 1009
    if n % 4 == 0 then one.name = "name " .. one.numbers[1] .. ", changed by " .. n end
    local older = records["record-" .. one.older]
    older.value = (older.value + one.value) % 1009
    sum = (sum * 31 + older.value + #older.name) % 2147483647
end

for id = 0, count - 1 do
    local one = records["record-" .. id]
    sum = (sum * 31 + one.value + #one.name) % 2147483647
    if id % math.floor(count / 10) == 0 then print(one.name .. ": " .. one.value) end
end
print(count .. " records, " .. sum)
io.stdout:flush()
-- Without freeing at the end, which would only be slow.
os.exit(0, false)
