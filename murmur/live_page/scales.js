// Numbers, times and axes: formats of at most four digits, ranges, linear and logarithmic scales.
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
const DAY = 86400;
const DIGITS = 4;

// A number in at most `digits` digits: 12.35k, 0.0123, 1.2e-5.
export function count(value, digits = DIGITS) {
  const rounded = +value.toPrecision(digits), size = Math.abs(rounded);
  if (size && (size < 0.001 || size >= 1e15)) return value.toExponential(1);
  // Up to 9999 a number of four digits needs no unit.
  const [unit, letter] = UNITS.find(([least]) => size >= least && size >= 10 ** digits) ?? [1, ""];
  return `${+(rounded / unit).toPrecision(size < 1 ? Math.min(digits, 3) : digits)}${letter}`;
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${value > 0 && value < 0.95 ? value.toFixed(1) : Math.round(value)} %`;
}

const two = (x) => String(x).padStart(2, "0");

// Seconds as 1:02:03 or 4:05.
export function clock(seconds) {
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

// Seconds since 1970 as the time of day here, with the date if asked for.
export function timeOfDay(seconds, date = false) {
  const at = new Date(seconds * 1000), day = at.toLocaleDateString("en", { month: "short", day: "numeric" });
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return date ? `${day}, ${time}` : time;
}

const midnight = (seconds) => -60 * new Date(seconds * 1000).getTimezoneOffset();

// Axes along which runs are drawn: the key of a point, its name, formats of points and of ticks.
export const AXES = {
  env_steps: { name: "environment steps", words: count },
  seconds: { name: "training time", words: clock, seconds: true },
  time: { name: "wall clock", words: (x) => timeOfDay(x, true), seconds: true, wall: true },
};

// Round numbers within a range, about `wanted` of them and at least two, each with its text.
export function xTicks(axis, low, high, wanted) {
  if (!(high > low)) return [[low, axis.words(low)]];
  const out = ticksBetween(axis, low, high, wanted);
  return out.length < 2 && wanted < 6 ? xTicks(axis, low, high, 1.5 * wanted) : out;
}

function ticksBetween(axis, low, high, wanted) {
  const step = axis.seconds ? timeStep((high - low) / wanted) : roundStep((high - low) / wanted);
  const shift = axis.wall ? midnight(low) : 0, out = [];
  for (let at = Math.ceil((low + shift) / step) * step; at <= high + shift + step * 1e-6; at += step) {
    out.push([at - shift, axis.wall ? dayOrTime(at - shift, at % DAY === 0, step) : axis.seconds ? clock(at) : count(at)]);
  }
  return out;
}

function dayOrTime(at, newDay, step) {
  if (newDay) return new Date(at * 1000).toLocaleDateString("en", { month: "short", day: "numeric" });
  return step < 60 ? timeOfDay(at) : timeOfDay(at).slice(0, 5);
}

function roundStep(raw) {
  const decade = 10 ** Math.floor(Math.log10(raw));
  return decade * [1, 2, 5, 10].find((x) => x * decade >= raw * 0.999);
}

function timeStep(raw) {
  return TIME_STEPS.find((x) => x >= raw) ?? Math.ceil(raw / 604800) * 604800;
}

// The smallest part of an axis that can be looked at: its ticks differ within four digits.
export function smallestSpan(axis, high) {
  return axis.seconds ? 2 : Math.max(2, Math.abs(high) * 0.005);
}

// The range of values that an axis shows. Where few outliers would flatten the rest, it is that of
// the rest and of what is `always` in it.
export function valueRange(values, always, { zero = false, log = false } = {}) {
  const sorted = values.filter((value) => value != null).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const part = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const inner = [part(0.02), part(0.98), ...always.filter((value) => value != null)];
  let [low, high] = [Math.min(...inner), Math.max(...inner)];
  const all = [Math.min(sorted[0], low), Math.max(sorted.at(-1), high)];
  if (log || all[1] - all[0] <= 3 * (high - low) || sorted.length < 20) [low, high] = all;
  if (log) return [low, high];
  // Ticks closer than four digits tell apart would all have the same text.
  const least = Math.max(Math.abs(low), Math.abs(high)) * 0.01, middle = (low + high) / 2;
  if (high - low < least) [low, high] = [middle - least / 2, middle + least / 2];
  const pad = (high - low) * 0.06 || 1;
  if (zero) return [Math.min(0, low), Math.max(0, high) + pad];
  return [low - pad, high + pad];
}

// A scale from values to 0 … 1. A logarithmic one of values of both signs is symmetric, and linear
// around 0.
export function makeScale([low, high], log) {
  if (!log) return { at: (value) => (value - low) / (high - low), ticks: (wanted) => linearTicks(low, high, wanted), note: "" };
  const largest = Math.max(Math.abs(low), Math.abs(high)) || 1, bend = largest / 1000;
  const [forth, note] = low > 0 ? [Math.log10, "log scale"]
    : high < 0 ? [(v) => -Math.log10(-v), "log scale of negative values"]
    : [(v) => Math.sign(v) * Math.log10(1 + Math.abs(v) / bend), `log scale, linear within ±${count(bend, 2)}`];
  let [bottom, top] = [forth(low), forth(high)];
  const pad = (top - bottom) * 0.06 || 0.1;
  [bottom, top] = [bottom - pad, top + pad];
  const at = (value) => (forth(value) - bottom) / (top - bottom);
  return { at, ticks: (wanted) => logTicks(low, high, low <= 0 && high >= 0 ? bend : 0, at, wanted), note };
}

function linearTicks(low, high, wanted) {
  const step = roundStep((high - low) / wanted), out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) out.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return out;
}

// Decades; where there are few, 2 and 5 of each too, or round numbers.
function logTicks(low, high, bend, at, wanted) {
  const size = Math.max(Math.abs(low), Math.abs(high)), least = bend || Math.min(Math.abs(low), Math.abs(high));
  for (const marks of [[1], [1, 2, 5]]) {
    const found = bend ? [0] : [];
    for (let power = Math.floor(Math.log10(least)); power <= Math.log10(size); power += 1) {
      for (const mark of marks) found.push(mark * 10 ** power, -mark * 10 ** power);
    }
    let inside = found.filter((value) => at(value) >= 0 && at(value) <= 1).sort((a, b) => a - b);
    if (marks.length === 1 && inside.length < 3) continue;
    while (inside.length > 2 * wanted) inside = inside.filter((value, i) => i % 2 === 0 || value === 0);
    if (inside.length >= 2) return inside;
  }
  return linearTicks(low, high, wanted);
}
