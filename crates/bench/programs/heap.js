// Objects, strings, a Map and arrays of numbers. Argument: the number of records.
'use strict';
const count = Number(process.argv[2]);
let state = 12345;
const random = (bound) => {
  state = (Math.imul(state, 1103515245) + 12345) >>> 0;
  return Math.floor((state / 4294967296) * bound);
};
const words = 'one two three four five six seven eight nine ten eleven twelve'.split(' ');

const records = new Map();
for (let id = 0; id < count; id += 1) {
  records.set(`record-${id}`, {
    id,
    parent: random(id + 1),
    words: [words[random(12)], words[random(12)], words[random(12)]],
    text: `${words[random(12)]} ${id} ${words[random(12)]} ${random(1000)}`,
    numbers: new Float64Array(4).map(() => random(1000) / 7),
  });
}

// Chains of parents: they lead to the old records, which are used more than the new ones.
let sum = 0;
for (let n = 0; n < count / 4; n += 1) {
  let record = records.get(`record-${random(count)}`);
  while (record.parent !== record.id) {
    sum += record.numbers[record.parent % 4];
    record.numbers[0] += 0.25;
    record = records.get(`record-${record.parent}`);
  }
}

const lines = [];
for (const record of records.values()) {
  if (record.id % (count / 1000) === 0) lines.push(`${record.text} ${record.numbers[0].toFixed(3)}`);
}
console.log(lines.sort().join('\n'));
console.log(sum.toFixed(3));
