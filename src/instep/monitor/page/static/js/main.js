// The page: which runs are shown, and everything that is drawn when something is new.

import { $, ask } from "./dom.js";
import { Charts } from "./charts.js";
import { HeatMap } from "./heatmap.js";
import { Logs } from "./logs.js";
import { MarkList } from "./mark_list.js";
import { overview } from "./overview.js";
import { drawRuns } from "./run_list.js";
import { RunData } from "./store.js";
import { Stream } from "./stream.js";
import { startTheme } from "./theme.js";

const LIST_MS = 5000;
const DRAW_MS = 250;
const EXPLAIN_MS = 10000;
const MAX_SHOWN = 8;

const runs = new Map();
const verdicts = new Map();
let selected = [];
let lines = [];
let isDue = false;
let drawnAt = -DRAW_MS; // the first curve waits for nothing
let hasCurve = false;

const charts = new Charts($("charts"), zoomed);
const heatMap = new HeatMap($("phases"));
const markList = new MarkList($("marks"));
const logs = new Logs($("logs"));
const stream = new Stream(take, (state) => {
  $("connection").dataset.state = state;
  $("connection").textContent = state === "live" ? "live" : "no connection";
});

function shown() { return selected.map((name) => runs.get(name)).filter((run) => run); }

function take(message) {
  runs.get(message.run)?.take(message);
  if (charts.range && Object.keys(message.tables ?? {}).length) fetchWindows();
  if (message.reset && Object.keys(message.phases).length) explain(message.run);
  draw();
}

function draw() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(() => {
    isDue = false;
    const current = shown();
    if (current.some((run) => Object.keys(run.tables).length)) drawnAt = performance.now();
    overview($("overview"), current, verdicts);
    charts.draw(current);
    markList.draw(current);
    heatMap.draw(current[0], current.length > 1);
    if (charts.cards.size && !hasCurve) { hasCurve = true; performance.mark("first curve"); }
  }), Math.max(0, drawnAt + DRAW_MS - performance.now()));
}

function choose(names) {
  selected = names.slice(0, MAX_SHOWN);
  for (const name of [...runs.keys()]) if (!selected.includes(name)) { runs.delete(name); stream.forget(name); }
  for (const name of selected) if (!runs.has(name)) runs.set(name, new RunData(name));
  location.hash = selected.map(encodeURIComponent).join("&");
  charts.range = null;
  charts.windows.clear();
  $("reset-zoom").hidden = true;
  $("title").textContent = selected.join(", ");
  document.title = selected.length ? `${selected.join(", ")} · instep` : "instep watch";
  stream.open(selected);
  logs.show(selected[0] ?? null);
  drawRuns($("runs"), lines, selected, choose);
  draw();
}

async function explain(name) {
  const verdict = await ask("api/explain", { run: name }).catch(() => null);
  if (verdict?.text) { verdicts.set(name, verdict.text); draw(); }
}

async function list() {
  if (document.hidden && lines.length) return;
  const answer = await ask("api/runs").catch(() => null);
  if (!answer) return;
  lines = answer.runs;
  $("empty").hidden = lines.length > 0;
  $("empty").textContent = "There is no run here yet. It appears when one starts.";
  if (!selected.length && lines.length) choose(wanted(answer));
  else drawRuns($("runs"), lines, selected, choose);
}

/** Return the runs to begin with: those in the address, those that the command named, or the newest one. */
function wanted(answer) {
  const known = new Set(answer.runs.map((line) => line.name));
  const asked = location.hash.slice(1).split("&").map(decodeURIComponent).filter((name) => known.has(name));
  if (asked.length) return asked;
  return answer.named.length ? answer.named : [answer.runs[0].name];
}

function zoomed(range) {
  $("reset-zoom").hidden = !range;
  if (range) fetchWindows();
  draw();
}

async function fetchWindows() {
  const range = charts.range;
  for (const run of shown()) {
    const [from, to] = steps(run, range);
    const finer = await ask("api/window", { run: run.name, from, to }).catch(() => null);
    if (finer && charts.range === range) charts.windows.set(run.name, finer);
  }
  draw();
}

/** Return a range of the shown axis in steps. */
function steps(run, { min, max }) {
  if (charts.axis === "step") return [min, max];
  const inside = (run.tables.train?.series.loss ?? []).filter((bucket) => bucket.length);
  const before = inside.findLast((bucket) => bucket[1] <= min) ?? inside[0] ?? [0];
  const after = inside.find((bucket) => bucket[bucket.length - 2] >= max) ?? inside.at(-1) ?? [0, 0, 0];
  return [before[0], after[after.length - 3]];
}

for (const input of document.querySelectorAll("#axis input")) {
  input.addEventListener("change", () => { charts.axis = input.value; charts.zoom(null); });
}
$("log-scale").addEventListener("change", (event) => { charts.isLog = event.target.checked; draw(); });
$("reset-zoom").addEventListener("click", () => charts.zoom(null));
$("toggle-runs").addEventListener("click", () => {
  const isOpen = $("runs").toggleAttribute("data-open");
  $("toggle-runs").setAttribute("aria-expanded", String(isOpen));
});
startTheme($("theme"), () => { charts.redraw(); draw(); });
setInterval(list, LIST_MS);
setInterval(() => { if (!document.hidden) selected.forEach(explain); }, EXPLAIN_MS);
list();
