// The time ledger: a strip for each thread, which of its states had which share of the time.
import { LEFT, Plot, TOP, html, some, svg } from "./charts.js";
import { AXES, clock, percent } from "./scales.js";

const LEAST = 0.01;  // share of the time below which a state is folded into OTHER
const OTHER = "other";
const UNKNOWN = "a state of its own";
const SHADES = { wait: 3, update: 4, move: 2, act: 2, duty: 4 };  // of a kind, in page.css

// The class of each state's colour.
export function fills(states) {
  const seen = {};
  return Object.fromEntries(Object.entries(states).map(([name, [kind]]) => {
    seen[kind] = (seen[kind] ?? -1) + 1;
    return [name, `${kind}${seen[kind] % SHADES[kind]}`];
  }));
}

export function swatch(fill) {
  return svg("svg", { viewBox: "0 0 8 8", "aria-hidden": "true" }, svg("rect", { width: 8, height: 8, rx: 2, class: fill }));
}

export class Strip extends Plot {
  // states: name -> [kind, words]
  constructor(place, thread, states, view) {
    super(place, `Thread ${thread}`, { height: 112, bottom: 20, view });
    this.states = states;
    this.axis = AXES.seconds;
    this.legend = html("ul", { class: "legend" });
    this.svg.after(this.legend);
    this.chips = new Map();
    this.fills = { ...fills(states), [OTHER]: "other" };
  }

  // points: [{x, from, seconds: {state: seconds}, all}]
  show(points) {
    this.every = points;
    this.whole = [points[0]?.from ?? 0, points.at(-1)?.x ?? 1];
    this.draw();
    this.fillTable();
  }

  // Shares of the states in what is shown; those of less than LEAST are in `folded`.
  measure() {
    const total = {};
    for (const p of this.points) {
      for (const [state, seconds] of Object.entries(p.seconds)) total[state] = (total[state] ?? 0) + seconds;
    }
    const all = Object.values(total).reduce((a, b) => a + b, 0) || 1;
    this.share = Object.fromEntries(Object.entries(total).map(([state, seconds]) => [state, seconds / all]));
    const known = [...new Set([...Object.keys(this.states), ...Object.keys(total)])].filter((name) => total[name] > 0);
    this.names = known.filter((name) => this.share[name] >= LEAST);
    this.folded = known.filter((name) => this.share[name] < LEAST);
    if (this.folded.length) {
      this.names.push(OTHER);
      this.share[OTHER] = this.folded.reduce((sum, name) => sum + this.share[name], 0);
    }
  }

  // The share of a state, or of what is folded, at a point.
  of(p, name) {
    const seconds = name === OTHER ? this.folded.reduce((sum, of) => sum + (p.seconds[of] ?? 0), 0) : p.seconds[name] ?? 0;
    return seconds / p.all;
  }

  fillLegend() {
    for (const [name, chip] of this.chips) {
      if (this.names.includes(name)) continue;
      chip.parentElement.remove();
      this.chips.delete(name);
    }
    for (const name of this.names) {
      let chip = this.chips.get(name);
      if (!chip) {
        chip = html("button", { type: "button" }, swatch(this.fills[name] ?? "duty3"), html("span"), html("b"));
        for (const on of ["pointerenter", "focus", "click"]) chip.addEventListener(on, () => this.explain(name));
        for (const off of ["pointerleave", "blur"]) chip.addEventListener(off, () => this.explain(null));
        this.chips.set(name, chip);
        this.legend.append(html("li", {}, chip));
      }
      const [, text, share] = chip.children;
      if (share.textContent === ` ${percent(this.share[name])}`) continue;
      text.textContent = name;
      share.textContent = ` ${percent(this.share[name])}`;
      chip.setAttribute("aria-label", `${chip.textContent}: ${this.meaning(name)}`);
    }
    const last = this.chips.get(OTHER)?.parentElement;
    if (last?.nextSibling) this.legend.append(last);  // moved only where it must: it loses the focus
  }

  meaning(name) {
    if (name === OTHER) return this.folded.map((state) => `${state} ${percent(this.share[state])}`).join(", ");
    return this.states[name]?.[1] ?? UNKNOWN;
  }

  explain(name) {
    this.explained = name;
    this.readout.textContent = name ? `${name}: ${this.meaning(name)}` : this.rest;
    this.dim();
  }

  dim() {
    for (const path of this.svg.querySelectorAll("path")) {
      path.classList.toggle("faint", Boolean(this.explained) && path.dataset.state !== this.explained);
    }
  }

  words(p) {
    const shares = this.names.map((name) => [name, this.of(p, name)]).filter(([, share]) => share >= 0.005);
    shares.sort((a, b) => b[1] - a[1]);
    return `at ${clock(p.x)}: ${shares.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`;
  }

  rows() {
    const names = [...this.names.filter((name) => name !== OTHER), ...this.folded];
    return [["training time", ...names], some(this.points).map((p) =>
      [clock(p.x), ...names.map((name) => percent(this.of(p, name)))])];
  }

  draw() {
    if (!this.every) return;
    const { height, bottom, width } = this, parts = [];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.xs = this.view.range ?? this.whole;
    const [low, high] = this.xs;
    this.points = this.every.filter((p) => p.x > low && p.from < high);
    this.measure();
    const below = this.points.map(() => 0);
    for (const name of this.names) {
      const lower = [], upper = [];
      this.points.forEach((p, i) => {
        const x = [this.x(Math.max(p.from, low)).toFixed(1), this.x(Math.min(p.x, high)).toFixed(1)];
        const at = (share) => (bottom - share * (bottom - TOP)).toFixed(2);
        lower.unshift(`L${x[1]} ${at(below[i])}L${x[0]} ${at(below[i])}`);
        below[i] += this.of(p, name);
        upper.push(`${i ? "L" : "M"}${x[0]} ${at(below[i])}L${x[1]} ${at(below[i])}`);
      });
      const path = svg("path", { class: this.fills[name] ?? "duty3", d: `${upper.join("")}${lower.join("")}Z` });
      path.dataset.state = name;
      parts.push(path);
    }
    for (const [share, text] of [[0, "0"], [0.5, "50 %"], [1, "100 %"]]) {
      parts.push(svg("text", { x: LEFT - 6, y: bottom - share * (bottom - TOP) + 4, "text-anchor": "end" }, text));
    }
    this.drawAxis(parts, "");
    this.svg.replaceChildren(...parts);
    const most = this.names.map((name) => [name, this.share[name]]).sort((a, b) => b[1] - a[1]).slice(0, 3);
    const shares = most.map(([name, share]) => `${name} ${percent(share)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.label}, shares of states over time; mostly ${shares}. Arrow keys read points, plus and minus zoom, 0 shows all.`);
    this.fillLegend();
    this.dim();
    if (this.at != null) this.move(Math.min(this.at, this.points.length - 1));
  }
}
