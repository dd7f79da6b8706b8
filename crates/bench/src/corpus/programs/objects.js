// A Map of small objects with strings, beside a Float64Array of measurements.
const size = Number(process.argv.at(-1));
const half = size / 2;
const PER_ENTRY = 330; // bytes of one entry, measured with node 20

let state = 12345;
const next = () => (state = (Math.imul(state, 1103515245) + 12345) >>> 0);

const samples = new Float64Array(half / 8);
let level = 20;
for (let i = 0; i < samples.length; i++) {
  level += (next() / 4294967296 - 0.5) / 10;
  samples[i] = Math.round(level * 100) / 100;
}
const sessions = new Map();
for (let i = 0; i < half / PER_ENTRY; i++) {
  sessions.set(`session-${next().toString(16)}-${i}`, {
    user: next() % 100000,
    seen: i * 1000 + (next() % 1000),
    path: ["", "orders", String(next() % 5000)].join("/"),
    tags: [next() % 16, next() % 16],
  });
}
console.log("ready");
globalThis.kept = [samples, sessions];
process.stdin.on("end", () => process.exit(0));
process.stdin.resume();
