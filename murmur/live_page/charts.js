// Line charts and stacked strips as SVG, without a library: drawn at the width they have.
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 300, STRIP = 116, LEFT = 56, RIGHT = 14, TOP = 12, ROWS = 24;

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function count(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${+(value / unit).toPrecision(3)}${letter}`;
  }
  return `${+value.toPrecision(3)}`;
}

export function clock(seconds) {
  const s = Math.round(seconds), two = (x) => String(x).padStart(2, "0");
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

// Round numbers, about `wanted` of them; of seconds multiples of a minute or an hour.
function ticks(low, high, wanted, seconds) {
  if (!(high > low)) return [low];
  const raw = (high - low) / wanted;
  let step = 10 ** Math.floor(Math.log10(raw));
  step *= [1, 2, 5, 10].find((x) => x * step >= raw);
  if (seconds) step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400].find((x) => x >= raw) ?? step;
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) out.push(at);
  return out;
}

// The axis for some values. Where few outliers would flatten the rest, it is that of the rest and of
// what is `always` in it.
function range(values, always) {
  const sorted = values.filter((value) => value != null).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const part = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const inner = [part(0.02), part(0.98), ...always.filter((value) => value != null)];
  let [low, high] = [Math.min(...inner), Math.max(...inner)];
  const all = [Math.min(sorted[0], low), Math.max(sorted.at(-1), high)];
  if (all[1] - all[0] <= 3 * (high - low) || sorted.length < 20) [low, high] = all;
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - pad, high + pad];
}

// At most ROWS of a list, evenly, and the last.
function some(list) {
  const every = Math.max(1, Math.ceil(list.length / ROWS));
  return list.filter((_, i) => (list.length - 1 - i) % every === 0);
}

// What charts have in common: a focusable picture with a cursor, a readout, a table.
class Plot {
  constructor(place, label, height, bottom) {
    this.label = label;
    this.bottom = height - bottom;
    this.height = height;
    this.at = null;  // index of the point under the cursor
    this.svg = svg("svg", { class: "plot", tabindex: 0, role: "img", height });
    this.readout = html("p", { class: "readout", "aria-live": "polite" });
    this.button = html("button", { type: "button", "aria-expanded": "false" }, "Table");
    this.button.setAttribute("aria-label", `Table: ${label}`);
    this.table = html("div", { class: "scroll", hidden: "", tabindex: 0, role: "region", "aria-label": `Table: ${label}` });
    const head = place.querySelector(".head") ?? place.closest(".panel").querySelector(".head");
    head.append(this.button);
    place.append(this.svg, this.readout, this.table);
    this.button.addEventListener("click", () => {
      this.table.hidden = !this.table.hidden;
      this.button.setAttribute("aria-expanded", String(!this.table.hidden));
      this.fillTable();
    });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(place);
  }

  get width() { return Math.max(200, Math.round(this.svg.parentElement.clientWidth)); }

  x(value) { return LEFT + (value - this.xs[0]) / (this.xs[1] - this.xs[0] || 1) * (this.width - LEFT - RIGHT); }

  point(event) {
    if (!this.points?.length) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    let best = 0;
    this.points.forEach((p, i) => {
      if (Math.abs(this.x(p.x) - at) < Math.abs(this.x(this.points[best].x) - at)) best = i;
    });
    this.move(best);
  }

  key(event) {
    const last = (this.points?.length ?? 0) - 1, step = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: (this.at ?? last + 1) - step, ArrowRight: (this.at ?? -1) + step, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.move(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, to)));
  }

  move(at) {
    this.at = at;
    this.readout.textContent = at == null || !this.points[at] ? "" : this.words(this.points[at]);
    this.drawCursor();
  }

  drawCursor() {
    this.svg.querySelector(".cursor")?.remove();
    const point = this.at == null ? null : this.points?.[this.at];
    if (!point) return;
    const x = this.x(point.x);
    this.svg.append(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP - 6, y2: this.bottom }));
  }

  axis(parts, label, format, seconds) {
    const bottom = this.bottom, width = this.width;
    for (const at of ticks(...this.xs, width / 80, seconds)) {
      const x = this.x(at);
      if (x > width - RIGHT + 1) continue;
      const anchor = x > width - 40 ? "end" : x < LEFT + 12 ? "start" : "middle";
      parts.push(svg("text", { x, y: bottom + 15, "text-anchor": anchor }, format(at)));
    }
    if (label) parts.push(svg("text", { x: (LEFT + width - RIGHT) / 2, y: this.height - 4, "text-anchor": "middle" }, label));
  }

  fillTable() {
    if (this.table.hidden || !this.points) return;
    const [head, rows] = this.rows();
    const line = (cells, kind) => html("tr", {}, ...cells.map((text) => html(kind, {}, text)));
    this.table.replaceChildren(html("table", {}, line(head, "th"), ...rows.map((row) => line(row, "td"))));
  }
}

export class LineChart extends Plot {
  constructor(place, label) {
    super(place, label, HEIGHT, 34);
    this.keyOf = html("p", { class: "key" });
    place.prepend(this.keyOf);
  }

  // data: { points: [{x, low, mean, high}], evaluations: [{x, mean, low, high}], y, x, seconds }
  show(data) {
    this.data = data;
    const evaluated = data.evaluations.map((p) => ({ ...p, evaluated: true }));
    this.points = [...data.points, ...evaluated].sort((a, b) => a.x - b.x);
    this.draw();
    this.fillTable();
  }

  words(p) {
    const format = this.data.seconds ? clock : count;
    const interval = p.low != null && p.low !== p.high ? ` (${count(p.low)} … ${count(p.high)})` : "";
    return `${p.evaluated ? "Evaluation" : "Training"}, ${this.data.x} ${format(p.x)}: ${count(p.mean)}${interval}`;
  }

  rows() {
    const format = this.data.seconds ? clock : count;
    const cell = (value) => (value == null ? "–" : count(value));
    const points = [...some(this.data.points), ...some(this.points.filter((p) => p.evaluated))].sort((a, b) => a.x - b.x);
    return [[this.data.x, "of", this.data.y, "low", "high"], points.map((p) =>
      [format(p.x), p.evaluated ? "evaluation" : "training", cell(p.mean), cell(p.low), cell(p.high)])];
  }

  draw() {
    const { data, points, height } = this;
    if (!data) return;
    const width = this.width, bottom = this.bottom, parts = [];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.xs = [points[0]?.x ?? 0, points.at(-1)?.x ?? 1];
    const last = [data.points.at(-1)?.mean, data.evaluations.at(-1)?.mean];
    const ys = range(points.flatMap((p) => [p.low, p.mean, p.high]), last);
    const outside = points.filter((p) => p.mean < ys[0] || p.mean > ys[1]).length;
    const y = (value) => bottom - (Math.max(ys[0], Math.min(ys[1], value)) - ys[0]) / (ys[1] - ys[0]) * (bottom - TOP);
    for (const at of ticks(...ys, 4)) {
      parts.push(svg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }));
      parts.push(svg("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, count(at)));
    }
    this.axis(parts, data.x, data.seconds ? clock : count, data.seconds);
    const line = data.points.map((p, i) => `${i ? "L" : "M"}${this.x(p.x).toFixed(1)} ${y(p.mean).toFixed(1)}`);
    const back = data.points.map((p) => `L${this.x(p.x).toFixed(1)} ${y(p.low).toFixed(1)}`).reverse();
    if (line.length) {
      const upper = data.points.map((p, i) => `${i ? "L" : "M"}${this.x(p.x).toFixed(1)} ${y(p.high).toFixed(1)}`);
      parts.push(svg("path", { class: "band", d: `${upper.join("")}${back.join("")}Z` }));
      parts.push(svg("path", { class: "mean", d: line.length > 1 ? line.join("") : `${line[0]}h4` }));
    }
    for (const p of data.evaluations) {
      const x = this.x(p.x);
      if (p.low != null) parts.push(svg("line", { class: "interval", x1: x, x2: x, y1: y(p.low), y2: y(p.high) }));
      parts.push(svg("circle", { class: "dot", cx: x, cy: y(p.mean), r: 4 }));
    }
    if (!points.length) parts.push(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no points yet"));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.summary());
    const entry = (kind, text) => html("span", { class: kind }, text);
    this.keyOf.replaceChildren(
      ...(data.points.length ? [entry("of-training", `${data.seconds ? "mean" : "training"} (band: least to largest)`)] : []),
      ...(data.evaluations.length ? [entry("of-evaluation", "evaluation (95 % interval)")] : []),
      ...(outside ? [entry("of-outside", `${outside} ${outside > 1 ? "points lie" : "point lies"} beyond the axis`)] : []));
    this.drawCursor();
  }

  summary() {
    const { data } = this, last = data.points.at(-1), evaluated = data.evaluations.at(-1);
    const parts = [`${this.label}: ${data.y} over ${data.x}`];
    if (last) parts.push(`last ${count(last.mean)}`);
    if (evaluated) parts.push(`last evaluation ${count(evaluated.mean)}`);
    return `${parts.join(", ")}. Arrow keys read points.`;
  }
}

export class Strip extends Plot {
  // states: name -> [kind, words]
  constructor(place, thread, states) {
    super(place, `Thread ${thread}`, STRIP, 20);
    this.states = states;
    this.legend = html("ul", { class: "legend" });
    this.svg.after(this.legend);
    this.buttons = new Map();
    const seen = {};
    this.fills = Object.fromEntries(Object.entries(states).map(([name, [kind]]) => {
      seen[kind] = (seen[kind] ?? -1) + 1;
      return [name, `${kind}${seen[kind] % { wait: 3, update: 4, move: 2, act: 2, duty: 4 }[kind]}`];
    }));
  }

  // points: [{x, from, shares: {state: share}}]
  show(points) {
    this.points = points;
    const total = {};
    let all = 0;
    for (const p of points) {
      for (const [state, seconds] of Object.entries(p.seconds)) total[state] = (total[state] ?? 0) + seconds;
    }
    for (const seconds of Object.values(total)) all += seconds;
    this.total = Object.fromEntries(Object.entries(total).map(([state, seconds]) => [state, seconds / (all || 1)]));
    this.names = [...new Set([...Object.keys(this.states), ...Object.keys(total)])].filter((name) => total[name] > 0);
    this.draw();
    this.fillLegend();
    this.fillTable();
  }

  fill(name) { return this.fills[name] ?? "duty3"; }

  fillLegend() {
    for (const name of this.names) {
      let button = this.buttons.get(name);
      if (!button) {
        const swatch = svg("svg", { viewBox: "0 0 8 8", "aria-hidden": "true" }, svg("rect", { width: 8, height: 8, rx: 2, class: this.fill(name) }));
        button = html("button", { type: "button" }, swatch, html("span"));
        for (const on of ["pointerenter", "focus", "click"]) button.addEventListener(on, () => this.explain(name));
        for (const off of ["pointerleave", "blur"]) button.addEventListener(off, () => this.explain(null));
        this.buttons.set(name, button);
        this.legend.append(html("li", {}, button));
      }
      const words = this.states[name]?.[1] ?? "a state of its own";
      const text = `${name} ${percent(this.total[name])}`;
      if (button.lastChild.textContent !== text) {
        button.lastChild.textContent = text;
        button.setAttribute("aria-label", `${text}: ${words}`);
      }
    }
  }

  explain(name) {
    this.explained = name;
    this.readout.textContent = name ? `${name}: ${this.states[name]?.[1] ?? "a state of its own"}` : "";
    this.dim();
  }

  dim() {
    for (const path of this.svg.querySelectorAll("path")) {
      path.classList.toggle("faint", Boolean(this.explained) && path.dataset.state !== this.explained);
    }
  }

  words(p) {
    const shares = this.names.map((name) => [name, p.seconds[name] / p.all || 0]).filter(([, share]) => share >= 0.005);
    shares.sort((a, b) => b[1] - a[1]);
    return `at ${clock(p.x)}: ${shares.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`;
  }

  rows() {
    return [["training time", ...this.names], some(this.points).map((p) =>
      [clock(p.x), ...this.names.map((name) => percent(p.seconds[name] / p.all || 0))])];
  }

  draw() {
    const { points, height } = this;
    if (!points) return;
    const width = this.width, bottom = this.bottom, parts = [];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.xs = [points[0]?.from ?? 0, points.at(-1)?.x ?? 1];
    const below = points.map(() => 0);
    for (const name of this.names) {
      const lower = [], upper = [];
      points.forEach((p, i) => {
        const x = [this.x(p.from).toFixed(1), this.x(p.x).toFixed(1)];
        const at = (share) => (bottom - share * (bottom - TOP)).toFixed(2);
        lower.unshift(`L${x[1]} ${at(below[i])}L${x[0]} ${at(below[i])}`);
        below[i] += p.seconds[name] / p.all || 0;
        upper.push(`${i ? "L" : "M"}${x[0]} ${at(below[i])}L${x[1]} ${at(below[i])}`);
      });
      const path = svg("path", { class: this.fill(name), d: `${upper.join("")}${lower.join("")}Z` });
      path.dataset.state = name;
      parts.push(path);
    }
    for (const [share, text] of [[0, "0"], [0.5, "50 %"], [1, "100 %"]]) {
      parts.push(svg("text", { x: LEFT - 6, y: bottom - share * (bottom - TOP) + 4, "text-anchor": "end" }, text));
    }
    this.axis(parts, "", clock, true);
    this.svg.replaceChildren(...parts);
    const most = this.names.map((name) => [name, this.total[name]]).sort((a, b) => b[1] - a[1]).slice(0, 3);
    const shares = most.map(([name, share]) => `${name} ${percent(share)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.label}, shares of states over time; mostly ${shares}. Arrow keys read points.`);
    this.dim();
    this.drawCursor();
  }
}

function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${value > 0 && value < 0.95 ? value.toFixed(1) : Math.round(value)} %`;
}
