// V8's heap: maps, arrays, strings; memory outside of it: buffers; and JSON there and back.
'use strict';
const { createHash } = require('crypto');
const digest = (data) => createHash('sha256').update(data).digest('hex');

const map = new Map();
for (let i = 0; i < 220000; i++) {
  map.set(`key ${i}`, { number: i, text: `value ${i} of many `.repeat(6), list: [i, i + 0.5, `${i}`] });
}
const hash = createHash('sha256');
for (const [key, value] of map) hash.update(`${key}${value.text}${value.list.join()}`);
console.log('map', map.size, hash.digest('hex'));

const buffers = [];
for (let i = 0; i < 60; i++) {
  const buffer = Buffer.alloc(1 << 20);
  for (let at = 0; at < buffer.length; at += 64) buffer.writeUInt32LE((at * (i + 1)) >>> 0, at);
  buffers.push(buffer);
}
console.log('buffers', digest(Buffer.concat(buffers)));

const doubles = new Float64Array(4 << 20).map((_, i) => i * 0.25);
console.log('doubles', digest(Buffer.from(doubles.buffer)));

const text = JSON.stringify([...map.values()].slice(0, 120000));
const back = JSON.parse(text);
console.log('json', text.length, digest(text), digest(JSON.stringify(back)) === digest(text));

// Churn: most of it is garbage at once, some of it lives on.
let kept = [];
for (let turn = 0; turn < 40; turn++) {
  const young = [];
  for (let i = 0; i < 20000; i++) young.push({ turn, i, text: `young ${turn * i}` });
  kept = kept.concat(young.filter((one) => one.i % 50 === 0));
}
console.log('kept', kept.length, digest(JSON.stringify(kept)));
for (let i = 0; i < 220000; i += 2) map.delete(`key ${i}`);
let sum = 0;
for (const value of map.values()) sum += value.number + value.text.length;
console.log('after deletes', map.size, sum, buffers.reduce((total, buffer) => total + buffer.readUInt32LE(128), 0));
