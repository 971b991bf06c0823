// Asks the server for what is new, and shows it. Nothing is asked while the page is hidden.
import { LineChart, Strip, html } from "./charts.js";

const EVERY_MS = 2000, AT_REST_MS = 15000, AGAIN_MS = 5000;
const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const data = { points: [], evaluations: [], cursor: "", folder: "" };
const curve = new LineChart($("curve"), "Learning curve");
const rate = new LineChart($("rate"), "Throughput");
const strips = new Map();
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
  const { curves } = answer;
  data.points.splice(curves.from, Infinity, ...curves.points);
  data.evaluations.splice(curves.evaluations_from, Infinity, ...curves.evaluations);
  data.cursor = curves.cursor;
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
  showCurve();
  showRate();
  showLedger();
  showEpisode();
}

// Put text into an element; what stands between backticks is code.
function set(element, text) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.replaceChildren(...withCode(text));
}

function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? html("code", {}, part) : part));
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
    html("strong", {}, severity), what, ...(fix ? [html("span", { class: "fix" }, ...withCode(fix))] : [])));
  $("alerts").replaceChildren(...(lines.length ? lines : [html("li", { class: "none" }, "Nothing to report.")]));
}

// --- charts ------------------------------------------------------------------------------------

const keyOf = (metric) => (metric === "return" ? "return" : `metrics.${metric}`);

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

function showCurve() {
  const key = $("metric").value, metric = key.replace(/^metrics\./, "");
  const points = series(key, "env_steps");
  const evaluations = data.evaluations.filter((e) => e.metrics[metric]?.[0] != null).map((e) => {
    const [mean, low, high] = e.metrics[metric];
    return { x: e.env_steps, mean, low, high };
  });
  const x = state.supervised ? "samples" : "environment steps";
  curve.show({ points, evaluations, y: metric || "return", x });
}

function showRate() {
  const y = state.supervised ? "samples/s" : "agent-steps/s";
  rate.show({ points: series("agent_steps_per_s", "seconds"), evaluations: [], y, x: "training time", seconds: true });
}

function series(key, axis) {
  return data.points.filter((p) => p.values[key] && p[axis] != null).map((p) => {
    const [low, mean, high] = p.values[key];
    return { x: p[axis], low, mean, high };
  });
}

function showLedger() {
  const threads = new Set(data.points.flatMap((p) => Object.keys(p.ledger)));
  for (const thread of ["learner", "inference", "grpc"]) {
    if (!threads.has(thread)) continue;
    if (!strips.has(thread)) {
      const place = html("div", { class: "thread" }, html("div", { class: "head" }, html("h3", {}, `Thread ${thread}`)));
      $("ledger").append(place);
      strips.set(thread, new Strip(place, thread, { ...state.states[thread], ...(thread === "inference" ? extra() : {}) }));
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

// In the sync pipeline the inference thread learns too.
function extra() {
  const own = state.states.inference;
  return Object.fromEntries(Object.entries(state.states.learner).filter(([name]) => !(name in own)));
}

// --- the newest episode ------------------------------------------------------------------------

const film = { image: null, frames: 0, columns: 1, rate: 6, version: 0, playing: !still.matches, busy: false, timer: 0 };

function showEpisode() {
  const { recorded, shown, words, reading } = state.episode;
  $("newest").hidden = !film.version || recorded === film.version || film.busy;
  const played = `Played by the evaluation of ${new Date(film.version).toLocaleTimeString()}, its first seed.`;
  set($("episode-words"), words || (film.version ? `${played} ${reading}` : "The episode is being drawn."));
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
  showCurve();
});
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
