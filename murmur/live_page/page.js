// Asks the server for what is new, and shows it. Nothing is asked while the page is hidden.
import { LineChart, View, html } from "./charts.js";
import { Strip, fills, swatch } from "./ledger.js";
import { AXES } from "./scales.js";

const EVERY_MS = 2000, AT_REST_MS = 15000, AGAIN_MS = 5000;
const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const data = { points: [], evaluations: [], cursor: "", folder: "" };
const other = { name: "", points: [], evaluations: [], cursor: "" };  // a run to compare with
const view = new View(() => {
  showCharts();
  for (const strip of strips.values()) strip.draw();
});
// The ledger is over training time, whatever the axis of the curves; they are zoomed together.
const ledgerView = {
  get range() { return view.range?.map((value) => converted(value, axis().key, "seconds")) ?? null; },
  show(range) {
    const to = axis().key;
    view.show(range?.map((value) => converted(value, "seconds", to)) ?? null, wholeAxis(), axis());
  },
};
const HINT = "Drag or turn the wheel to zoom, double click to see all; arrow keys read points.";
const curve = new LineChart($("curve"), "Learning curve", { height: 320, view, rest: HINT, named: true });
const rate = new LineChart($("rate"), "Throughput", {
  height: 176, view, zero: true, rest: "Decisions of single agents a second; dips are updates or evaluations.",
});
const strips = new Map(), losses = new Map();
let state = null, timer = 0, paused = false, asking = false;

// --- what is new -------------------------------------------------------------------------------

async function ask() {
  clearTimeout(timer);
  if (asking || paused || document.hidden) return;
  asking = true;
  let pause = AGAIN_MS;
  try {
    const answer = await fetch(`state.json?since=${encodeURIComponent(data.cursor)}`);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    take(await answer.json());
    if (other.name && !state.behind) {
      await askOther();
      showCharts();
    }
    pause = state.behind ? 0 : state.live ? EVERY_MS : AT_REST_MS;
    $("gone").hidden = true;
  } catch {
    if ($("gone").hidden) {
      const time = new Date().toLocaleTimeString();
      const again = data.folder ? ` \`murmur watch ${data.folder}\` shows the run again.` : "";
      set($("gone"), `No answer since ${time}: the training, or \`murmur watch\`, has ended.${again}`);
      $("gone").hidden = false;
    }
  }
  asking = false;
  timer = setTimeout(ask, pause);
}

function take(answer) {
  state = answer;
  append(data, answer.curves);
  data.folder = answer.about.folder;
  if (!answer.behind) show();
}

// --- words and figures -------------------------------------------------------------------------

function show() {
  document.title = `${state.name}, ${state.state} – murmur`;
  set($("name"), state.name);
  set($("state"), state.state);
  $("state").dataset.state = state.state;
  set($("words"), state.words);
  $("share").hidden = state.share == null;
  if (state.share != null) $("share").value = state.share;
  define($("figures"), state.figures);
  define($("about"), state.about);
  showAlerts();
  showMetrics();
  showOthers();
  showCharts();
  showLedger();
  showFiles();
  showEpisode();
}

// Put text into an element; what stands between backticks is code, a log's name is a link.
function set(element, text) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.replaceChildren(...marked(text));
}

function marked(text) {
  return text.split("`").flatMap((part, i) => (i % 2 ? html("code", {}, part) : withLogs(part)));
}

function withLogs(text) {
  return text.split(/(logs\/[\w.-]+\.log)/).map((part, i) => (i % 2 ? logLink(part.slice(5), part) : part));
}

function logLink(name, text) {
  return html("a", { href: `log?name=${encodeURIComponent(name)}`, target: "_blank", rel: "noopener" }, text);
}

function showFiles() {
  const { report, report_command: command, logs } = state.files;
  $("report").hidden = !report;
  set($("no-report"), report ? "" : `No report yet: \`${command}\` writes one.`);
  const now = logs.join("\n");
  if ($("logs").dataset.shown === now) return;
  $("logs").dataset.shown = now;
  $("logs").replaceChildren(...logs.map((name) => html("li", {}, logLink(name, name))));
}

function define(list, items) {
  for (const entry of [...list.children]) if (!(entry.firstChild.textContent in items)) entry.remove();
  for (const [name, text] of Object.entries(items)) {
    let entry = [...list.children].find((child) => child.firstChild.textContent === name);
    if (!entry) {
      entry = html("div", text.length > 60 ? { class: "long" } : {}, html("dt", {}, name), html("dd"));
      list.append(entry);
    }
    set(entry.lastChild, text);
  }
}

let alertsShown = "";

function showAlerts() {
  const now = JSON.stringify(state.alerts);
  if (now === alertsShown) return;  // a screen reader reads what changes
  alertsShown = now;
  const lines = state.alerts.map(({ severity, what, fix }) => html("li", { class: severity },
    html("strong", {}, severity), ...withLogs(what), ...fix.split("\n").filter(Boolean).map((line) => html("span", { class: "fix" }, ...marked(line)))));
  $("alerts").replaceChildren(...(lines.length ? lines : [html("li", { class: "none" }, "Nothing to report.")]));
}

// --- charts ------------------------------------------------------------------------------------

const keyOf = (metric) => (metric === "return" ? "return" : `metrics.${metric}`);
const axis = () => ({ ...AXES[$("axis").value], key: $("axis").value });

function showMetrics() {
  const keys = new Set();
  for (const { metrics } of data.evaluations) Object.keys(metrics).forEach((name) => keys.add(keyOf(name)));
  for (const { values } of data.points) Object.keys(values).forEach((name) => keys.add(name));
  keys.delete("agent_steps_per_s");
  const order = (key) => (key === keyOf(state.metric) ? 0 : key === "return" ? 1 : key.startsWith("metrics.") ? 2 : 3);
  const sorted = [...keys].sort((a, b) => order(a) - order(b));
  const select = $("metric");
  if (sorted.join() === [...select.options].map((option) => option.value).join()) return;
  const chosen = select.dataset.chosen;
  select.replaceChildren(...sorted.map((key) => html("option", { value: key }, key.replace(/^metrics\./, "").replace(/^losses\./, "loss: "))));
  if (keys.has(chosen)) select.value = chosen;
}

// The runs that are drawn: this one and, if one is chosen, another.
function drawnRuns() {
  const own = { ...data, name: "", shift: 0 };
  if (!other.name) return [own];
  // On the wall clock the other run begins when this one does.
  const shift = axis().wall ? (firstUpdate(data.points)?.time ?? 0) - (firstUpdate(other.points)?.time ?? 0) : 0;
  return [own, { ...other, shift }];
}

// Points before the first update are of a policy that has learned nothing.
const firstUpdate = (points) => points.find((p) => p.updates > 0) ?? points[0];

// The curves of a figure, of each run: of training, and of evaluations if `metric` names them.
function curvesOf(key, metric) {
  const at = axis().key, curves = [], before = [];
  for (const run of drawnRuns()) {
    const from = firstUpdate(run.points)?.[at] ?? -Infinity;
    const x = (p) => (p[at] == null ? null : p[at] + run.shift);
    const name = (what) => (run.name ? `${run.name}, ${what.toLowerCase()}` : what);
    const points = run.points.filter((p) => p.values[key] && p[at] >= from).map((p) => {
      const [low, mean, high] = p.values[key];
      return { x: x(p), low, mean, high };
    });
    const kind = run.name ? "other-run" : "own-run";
    curves.push({ kind, points, name: name("Training"), key: run.name ? name("training") : "training (band: least to largest)" });
    if (!metric) continue;
    const evaluations = run.evaluations.filter((e) => e.metrics[metric]?.[0] != null).map((e) => {
      const [mean, low, high] = e.metrics[metric];
      return { x: x(e) ?? timeAt(run, e, at), mean, low, high, trained: e.updates == null || e.updates > 0 };
    });
    const dots = evaluations.filter((e) => e.trained && e.x != null);
    curves.push({ kind, dots: true, points: dots, name: name("Evaluation"), key: name("Evaluation (95 % interval)").replace("Evaluation", "evaluation") });
    const untrained = evaluations.filter((e) => !e.trained);
    if (untrained.length) before.push({ ...untrained.at(-1), name: name("Evaluation") });
  }
  return { curves: curves.filter((curve) => curve.points.length), before };
}

// When an evaluation was that only says after how many steps.
function timeAt(run, { env_steps: steps }, at) {
  const after = run.points.find((p) => p.env_steps >= steps) ?? run.points.at(-1);
  return after?.[at] == null ? null : after[at] + run.shift;
}

// From the first update to the last point of the runs that are drawn.
function wholeAxis() {
  const at = axis().key, ends = [];
  for (const run of drawnRuns()) {
    const first = firstUpdate(run.points)?.[at];
    if (first == null) continue;
    ends.push(first + run.shift, run.points.at(-1)[at] + run.shift);
    for (const e of run.evaluations) if (e.updates > 0 && e[at] != null) ends.push(e[at] + run.shift);
  }
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
}

function showCharts() {
  const shared = { axis: { ...axis(), ...(state.supervised && axis().key === "env_steps" ? { name: "samples" } : {}) }, whole: wholeAxis() };
  const key = $("metric").value, metric = key.replace(/^metrics\./, "");
  curve.show({ ...shared, ...curvesOf(key, metric), y: metric || "return" });
  rate.show({ ...shared, ...curvesOf("agent_steps_per_s"), y: state.supervised ? "samples/s" : "agent-steps/s" });
  const names = new Set(data.points.flatMap((p) => Object.keys(p.values)).filter((name) => name.startsWith("losses.")));
  for (const name of names) {
    if (!losses.has(name)) losses.set(name, lossPanel(name.replace("losses.", "")));
    losses.get(name).show({ ...shared, ...curvesOf(name), y: name.replace("losses.", "") });
  }
  $("unzoom").hidden = !view.range;
  set($("zoomed"), view.range ? `Shown: ${view.range.map((x) => shared.axis.words(x)).join(" … ")}` : "");
}

function lossPanel(name) {
  const title = name.replaceAll("_", " ");
  const place = html("section", { class: "panel", "aria-label": title }, html("div", { class: "head" }, html("h3", {}, title)));
  $("panels").append(place);
  return new LineChart(place, title, { height: 176, view, rest: state.readings[name] || "" });
}

function showLedger() {
  const threads = new Set(data.points.flatMap((p) => Object.keys(p.ledger)));
  for (const thread of ["learner", "inference", "grpc"]) {
    if (!threads.has(thread)) continue;
    const states = { ...state.states[thread], ...(thread === "inference" ? extra() : {}) };
    if (!strips.has(thread)) {
      const place = html("div", { class: "thread" }, html("div", { class: "head" }, html("h3", {}, `Thread ${thread}`)));
      $("ledger").append(place);
      strips.set(thread, new Strip(place, thread, states, ledgerView));
      explainStates(thread, states);
    }
    let before = 0;
    const points = [];
    for (const p of data.points) {
      const seconds = p.ledger[thread] ?? {}, all = Object.values(seconds).reduce((a, b) => a + b, 0);
      // The first record after a start also has the time before training began.
      if (all > 0 && p.seconds > before) points.push({ x: p.seconds, from: before, seconds, all });
      before = p.seconds;
    }
    strips.get(thread).show(points);
  }
}

function explainStates(thread, states) {
  const colours = fills(states);
  const entries = Object.entries(states).map(([name, [, words]]) => html("div", {},
    html("dt", {}, swatch(colours[name]), name), html("dd", {}, words)));
  $("meanings").append(html("h3", {}, `Thread ${thread}`), html("dl", { class: "meanings" }, ...entries));
}

// In the sync pipeline the inference thread learns too.
function extra() {
  const own = state.states.inference;
  return Object.fromEntries(Object.entries(state.states.learner).filter(([name]) => !(name in own)));
}

// A value of one axis as one of another, along this run's points.
function converted(value, from, to) {
  const { points } = data, i = points.findIndex((p) => p[from] >= value);
  if (i <= 0) return points.at(i)?.[to];
  const [a, b] = [points[i - 1], points[i]], share = (value - a[from]) / (b[from] - a[from] || 1);
  return a[to] + share * (b[to] - a[to]);
}

// Change the axis; what is shown stays the same part of the training.
function changeAxis(from, to) {
  if (view.range) view.range = view.range.map((value) => converted(value, from, to));
  if (view.range && !(view.range[1] > view.range[0])) view.range = null;
  showCharts();
}

// --- another run -------------------------------------------------------------------------------

function showOthers() {
  const select = $("other"), names = ["", ...state.others];
  $("compare").hidden = names.length < 2 && !other.name;
  if (other.name && !names.includes(other.name)) names.push(other.name);
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  select.replaceChildren(...names.map((name) => html("option", { value: name }, name || "no other run")));
  select.value = other.name;
}

async function askOther() {
  const { name } = other;
  let behind = Boolean(name);
  while (behind && other.name === name) {
    const answer = await fetch(`curves.json?run=${encodeURIComponent(name)}&since=${encodeURIComponent(other.cursor)}`);
    if (other.name !== name) return;
    if (!answer.ok) {
      chooseOther("");
      return;
    }
    const { curves, behind: more } = await answer.json();
    append(other, curves);
    behind = more;
  }
}

function append(run, curves) {
  run.points.splice(curves.from, Infinity, ...curves.points);
  run.evaluations.splice(curves.evaluations_from, Infinity, ...curves.evaluations);
  run.cursor = curves.cursor;
}

function chooseOther(name) {
  Object.assign(other, { name, points: [], evaluations: [], cursor: "" });
  $("other").value = name;
}

// --- the newest episode ------------------------------------------------------------------------

const film = { image: null, frames: 0, columns: 1, rate: 6, version: 0, playing: !still.matches, busy: false, timer: 0 };

function showEpisode() {
  const { recorded, shown, words, reading } = state.episode;
  // Without an episode its panel would be empty: the sentence stands below the curve.
  $("episode").hidden = !film.version;
  $("charts").classList.toggle("alone", !film.version);
  set($("no-episode"), film.version ? "" : words || "The newest evaluation episode is being drawn.");
  $("newest").hidden = !film.version || recorded === film.version || film.busy;
  const played = `Played by the evaluation of ${new Date(film.version).toLocaleTimeString()}, its first seed.`;
  set($("episode-words"), words || `${played} ${reading}`);
  if (shown && shown !== film.version) load("episode.png");
}

async function load(address) {
  if (film.busy) return;
  film.busy = true;
  try {
    const answer = await fetch(address);
    if (!answer.ok) return;
    film.image = await createImageBitmap(await answer.blob());
    for (const name of ["version", "frames", "columns", "rate"]) film[name] = Number(answer.headers.get(`X-${name}`));
    $("player").hidden = false;
    $("frame").max = film.frames - 1;
    $("frame").value = 0;
    play(film.playing);
    draw();
  } catch {
    // the next state says whether the server is gone
  } finally {
    film.busy = false;
  }
  ask();  // how to read them
}

function draw() {
  const at = Number($("frame").value), canvas = $("picture");
  if (!film.image) return;
  const rows = Math.ceil(film.frames / film.columns);
  const width = film.image.width / film.columns, height = film.image.height / rows;
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const x = (at % film.columns) * width, y = Math.floor(at / film.columns) * height;
  canvas.getContext("2d").drawImage(film.image, x, y, width, height, 0, 0, width, height);
  canvas.setAttribute("aria-label", `Picture ${at + 1} of ${film.frames} of the episode`);
}

function play(on) {
  film.playing = on;
  clearTimeout(film.timer);
  $("play").textContent = on ? "Stop" : "Play";
  if (on && !document.hidden) film.timer = setTimeout(next, 1000 / film.rate);
}

function next() {
  const at = Number($("frame").value), last = at + 1 >= film.frames;
  $("frame").value = last ? 0 : at + 1;
  draw();
  const rest = Number($("frame").value) + 1 >= film.frames ? 2000 : 1000 / film.rate;  // the end stays
  film.timer = setTimeout(next, rest);
}

// --- controls ----------------------------------------------------------------------------------

$("metric").addEventListener("change", () => {
  $("metric").dataset.chosen = $("metric").value;
  showCharts();
});
let axisBefore = $("axis").value;
$("axis").addEventListener("change", () => {
  changeAxis(axisBefore, $("axis").value);
  axisBefore = $("axis").value;
});
$("other").addEventListener("change", async () => {
  chooseOther($("other").value);
  try {
    await askOther();
  } catch {
    // the next state says whether the server is gone
  }
  view.range = null;  // the other run may be longer
  showCharts();
});
$("unzoom").addEventListener("click", () => {
  view.show(null, wholeAxis(), axis());
  $("axis").focus();
});
for (const link of document.querySelectorAll('a[href="#states"]')) {
  link.addEventListener("click", () => { $("states").open = true; });
}
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Continue" : "Pause";
  ask();
});
$("play").addEventListener("click", () => play(!film.playing));
$("frame").addEventListener("input", () => { play(false); draw(); });
$("newest").addEventListener("click", async () => {
  $("newest").hidden = true;
  $("play").focus();
  await load("episode.png?newest=1");
});
$("theme").addEventListener("change", () => colour($("theme").value));
document.addEventListener("visibilitychange", () => {
  ask();
  if (film.image) play(film.playing);
});

function colour(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").value = theme;
  try { localStorage.setItem("murmur-theme", theme); } catch { /* not kept */ }
}

let kept = "";
try { kept = localStorage.getItem("murmur-theme") ?? ""; } catch { /* as the system */ }
colour(["light", "dark"].includes(kept) ? kept : "");
ask();
