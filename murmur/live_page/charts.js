// Line charts as SVG, without a library: drawn at the width they have, zoomed along x.
import { count, makeScale, smallestSpan, valueRange, xTicks } from "./scales.js";

const SVG = "http://www.w3.org/2000/svg";
const ROWS = 24, DRAG = 5;  // of a table; pixels after which a press is a drag
export const LEFT = 52, RIGHT = 14, TOP = 10;
const QUIET_MS = 300;  // after the page scrolled: the wheel still means the page

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

let scrolled = -Infinity, numbered = 0;
addEventListener("scroll", () => { scrolled = performance.now(); }, { passive: true });

// At most ROWS of a list, evenly, and the last.
export function some(list) {
  const every = Math.max(1, Math.ceil(list.length / ROWS));
  return list.filter((_, i) => (list.length - 1 - i) % every === 0);
}

// The part of the x axis that charts show together: null is all of it.
export class View {
  constructor(changed) {
    this.range = null;
    this.changed = changed;
  }

  // Show [low, high] of what is within [least, most]; all of it if that is nearly all.
  show(range, [least, most], axis) {
    if (range) {
      let [low, high] = [Math.min(...range), Math.max(...range)];
      const span = Math.max(high - low, smallestSpan(axis, most)), middle = (low + high) / 2;
      low = Math.max(least, Math.min(middle - span / 2, most - span));
      high = Math.min(most, low + span);
      range = high - low >= (most - least) * 0.999 ? null : [low, high];
    }
    if (String(range) === String(this.range)) return;
    this.range = range;
    this.changed();
  }
}

// What charts have in common: a focusable picture with a cursor, a readout, a table, zoom.
export class Plot {
  constructor(place, label, { height, bottom, view, rest = "" }) {
    this.label = label;
    this.bottom = height - bottom;
    this.height = height;
    this.view = view;
    this.rest = rest;  // of the readout, while no point is under the cursor
    this.at = null;  // index of the point under the cursor
    this.svg = svg("svg", { class: "plot", tabindex: 0, role: "img", height });
    this.readout = html("p", { class: "readout", "aria-live": "polite" }, rest);
    this.head = place.querySelector(".head") ?? place.closest(".panel").querySelector(".head");
    this.buttons = html("div", { class: "buttons" });
    this.head.append(this.buttons);
    this.table = html("div", { class: "scroll", hidden: "", tabindex: 0, role: "region", "aria-label": `Table: ${label}` });
    const button = this.addButton("Table", "aria-expanded", (open) => {
      this.table.hidden = !open;
      this.fillTable();
    });
    place.append(this.svg, this.readout, this.table);
    button.dataset.table = "";
    this.svg.addEventListener("pointermove", (event) => this.pointerMoved(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("pointerdown", (event) => this.pressed(event));
    this.svg.addEventListener("pointerup", (event) => this.released(event));
    this.svg.addEventListener("pointercancel", () => this.stopDrag());
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(place);
  }

  // A button that is on or off.
  addButton(text, state, changed) {
    const button = html("button", { type: "button", [state]: "false", "aria-label": `${text}: ${this.label}` }, text);
    button.addEventListener("click", () => {
      const on = button.getAttribute(state) !== "true";
      button.setAttribute(state, String(on));
      changed(on);
    });
    this.buttons.prepend(button);
    return button;
  }

  get width() { return Math.max(200, Math.round(this.svg.parentElement.clientWidth)); }

  x(value) { return LEFT + (value - this.xs[0]) / (this.xs[1] - this.xs[0] || 1) * (this.width - LEFT - RIGHT); }

  // The value of x under a pointer.
  under(event) {
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const share = Math.max(0, Math.min(1, (at - LEFT) / (this.width - LEFT - RIGHT)));
    return this.xs[0] + share * (this.xs[1] - this.xs[0]);
  }

  zoom(range) { if (this.whole) this.view.show(range, this.whole, this.axis); }

  pressed(event) {
    if (event.button !== 0 || !this.xs) return;
    this.drag = { from: event.clientX, x: this.under(event), moved: false };
    this.svg.setPointerCapture(event.pointerId);
  }

  pointerMoved(event) {
    if (this.drag && Math.abs(event.clientX - this.drag.from) > DRAG) this.drag.moved = true;
    if (this.drag?.moved) this.select(this.drag.x, this.under(event));
    else this.point(event);
  }

  released(event) {
    const drag = this.drag;
    this.stopDrag();
    if (drag?.moved) this.zoom([drag.x, this.under(event)]);
  }

  stopDrag() {
    this.drag = null;
    this.svg.querySelector(".selection")?.remove();
  }

  select(from, to) {
    this.svg.querySelector(".selection")?.remove();
    const [left, right] = [this.x(from), this.x(to)].sort((a, b) => a - b);
    this.svg.append(svg("rect", { class: "selection", x: left, y: TOP, width: right - left, height: this.bottom - TOP }));
  }

  // The wheel zooms around the pointer. While the page scrolls, and where there is nothing to zoom
  // out of, it is the page's.
  wheel(event) {
    const stays = event.deltaY > 0 && !this.view.range;
    if (!this.xs || stays || performance.now() - scrolled < QUIET_MS) return;
    event.preventDefault();
    this.scale(Math.exp(Math.max(-240, Math.min(240, event.deltaY)) * 0.002), this.under(event));
  }

  scale(factor, around) {
    const [low, high] = this.xs;
    this.zoom([around - (around - low) * factor, around + (high - around) * factor]);
  }

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
    if (event.ctrlKey || event.metaKey || event.altKey) return;  // the browser's own zoom
    const to = { ArrowLeft: (this.at ?? last + 1) - step, ArrowRight: (this.at ?? -1) + step, Home: 0, End: last }[event.key];
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (event.key === "Escape") this.move(null);
    if (event.key === "0") this.zoom(null);
    if (factor && this.xs) this.scale(factor, this.points?.[this.at]?.x ?? (this.xs[0] + this.xs[1]) / 2);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, to)));
  }

  move(at) {
    this.at = at;
    const point = at == null ? null : this.points?.[at];
    this.readout.textContent = point ? this.words(point) : this.rest;
    this.drawCursor();
  }

  drawCursor() {
    this.svg.querySelector(".cursor")?.remove();
    const point = this.at == null ? null : this.points?.[this.at];
    if (!point) return;
    const x = this.x(point.x);
    this.svg.append(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP - 6, y2: this.bottom }));
  }

  // Draw the x axis below the plot.
  drawAxis(parts, label) {
    const { bottom, width } = this;
    for (const [at, text] of xTicks(this.axis, ...this.xs, width / 90)) {
      const x = this.x(at);
      if (x > width - RIGHT + 1) continue;
      const anchor = x > width - 40 ? "end" : x < LEFT + 12 ? "start" : "middle";
      parts.push(svg("text", { x, y: bottom + 15, "text-anchor": anchor }, text));
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
  constructor(place, label, options) {
    super(place, label, { bottom: 34, ...options });
    this.zero = options.zero ?? false;
    this.named = options.named ?? false;  // the key names the curves; of one chart is enough
    this.log = false;
    this.addButton("Log", "aria-pressed", (on) => {
      this.log = on;
      this.draw();
    });
    this.keyOf = html("p", { class: "key" });
    this.svg.before(this.keyOf);
    this.clip = `clip${numbered += 1}`;
  }

  // data: { curves: [{ kind, name, points: [{x, low, mean, high}], dots }], before, y, axis, whole }
  // A curve of `dots` is of evaluations. `before`: figures that precede the axis, as text.
  show(data) {
    this.data = data;
    this.axis = data.axis;
    this.whole = data.whole;
    this.draw();
    this.fillTable();
  }

  words(p) {
    const interval = p.low != null && p.low !== p.high ? ` (${count(p.low)} … ${count(p.high)})` : "";
    return `${p.curve.name}, ${this.axis.name} ${this.axis.words(p.x)}: ${count(p.mean)}${interval}`;
  }

  rows() {
    const cell = (value) => (value == null ? "–" : count(value));
    const of = (curve) => some(this.points.filter((p) => p.curve === curve));
    const points = this.data.curves.flatMap(of).sort((a, b) => a.x - b.x);
    const before = this.data.before.map(({ name, mean, low, high }) => ["before training", name, cell(mean), cell(low), cell(high)]);
    return [[this.axis.name, "of", this.data.y, "low", "high"],
      [...before, ...points.map((p) => [this.axis.words(p.x), p.curve.name, cell(p.mean), cell(p.low), cell(p.high)])]];
  }

  draw() {
    const { data, height } = this;
    if (!data) return;
    const width = this.width, bottom = this.bottom, parts = [];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.xs = this.view.range ?? data.whole;
    const inside = (p) => p.x >= this.xs[0] && p.x <= this.xs[1];
    this.points = data.curves.flatMap((curve) => curve.points.filter(inside).map((p) => ({ ...p, curve })));
    this.points.sort((a, b) => a.x - b.x);
    const last = data.curves.map((curve) => curve.points.findLast(inside)?.mean);
    const ys = valueRange(this.points.flatMap((p) => [p.low, p.mean, p.high]), last, this);
    const scale = makeScale(ys, this.log);
    const outside = this.points.filter((p) => scale.at(p.mean) < 0 || scale.at(p.mean) > 1).length;
    const y = (value) => bottom - Math.max(0, Math.min(1, scale.at(value))) * (bottom - TOP);
    for (const at of this.points.length ? scale.ticks(height / 50) : []) {
      parts.push(svg("line", { class: at === 0 ? "zero-line" : "grid-line", x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }));
      parts.push(svg("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, count(at)));
    }
    if (this.points.length) this.drawAxis(parts, data.axis.name);
    const clip = svg("clipPath", { id: this.clip }, svg("rect", { x: LEFT - 5, y: 0, width: width - LEFT - RIGHT + 10, height: bottom + 2 }));
    const drawn = svg("g", { "clip-path": `url(#${this.clip})` });
    for (const curve of data.curves) drawn.append(...(curve.dots ? this.dots(curve, y) : this.line(curve, y)));
    parts.push(clip, drawn);
    if (!this.points.length) parts.push(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no points yet"));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.summary());
    this.fillKey(outside, scale.note);
    if (this.at != null) this.move(Math.min(this.at, this.points.length - 1));
  }

  line({ kind, points }, y) {
    if (!points.length) return [];
    const at = (p, value, i) => `${i ? "L" : "M"}${this.x(p.x).toFixed(1)} ${y(value).toFixed(1)}`;
    const mean = points.map((p, i) => at(p, p.mean, i));
    const upper = points.map((p, i) => at(p, p.high, i)), back = points.map((p) => at(p, p.low, 1)).reverse();
    return [
      svg("path", { class: `band ${kind}`, d: `${upper.join("")}${back.join("")}Z` }),
      svg("path", { class: `mean ${kind}`, d: mean.length > 1 ? mean.join("") : `${mean[0]}h4` }),
    ];
  }

  dots({ kind, points }, y) {
    return points.flatMap((p) => {
      const x = this.x(p.x), dot = svg("circle", { class: `dot ${kind}`, cx: x, cy: y(p.mean), r: 4 });
      return p.low == null ? [dot] : [svg("line", { class: `interval ${kind}`, x1: x, x2: x, y1: y(p.low), y2: y(p.high) }), dot];
    });
  }

  fillKey(outside, note) {
    const entry = (kind, text) => html("span", { class: kind }, text);
    const shown = this.data.curves.filter((curve) => curve.points.length);
    const named = this.named ? shown : [];
    this.keyOf.replaceChildren(
      ...named.map((curve) => entry(`of ${curve.dots ? "dots " : ""}${curve.kind}`, curve.key ?? curve.name)),
      ...this.data.before.map(({ name, mean }) => entry("words", `${name} before training: ${count(mean)}`)),
      ...(outside ? [entry("words", `${outside} ${outside > 1 ? "points lie" : "point lies"} beyond the axis`)] : []),
      ...(note ? [entry("words", note)] : []));
  }

  summary() {
    const { data } = this, parts = [`${this.label}: ${data.y} over ${this.axis.name}`];
    for (const { name, points } of data.curves) if (points.length) parts.push(`${name}, last ${count(points.at(-1).mean)}`);
    return `${parts.join("; ")}. Arrow keys read points, plus and minus zoom, 0 shows all.`;
  }
}
