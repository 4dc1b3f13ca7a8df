// Where a run stands: a line of facts, a bar, the newest numbers, and what should be known first.

import { make, fill } from "./dom.js";
import { ago, bytes, duration, number, percent } from "./format.js";
import { swatch, css } from "./charts.js";

const QUIET_S = 60;

export function statusOf(line, now) {
  if (line.error && line.status === "failed") return ["failed", "bad"];
  if (line.is_complete || line.status === "complete") return ["complete", "good"];
  if (line.status === "failed") return ["failed", "bad"];
  if (line.status === "preempted") return ["preempted", "warn"];
  if (line.time_s && now - line.time_s > QUIET_S) return [`silent for ${duration(now - line.time_s)}`, "warn"];
  return [line.status ?? "", "live"];
}

export function overview(element, runs, verdicts) {
  const now = Date.now() / 1000;
  if (runs.length > 1) fill(element, comparison(runs, now));
  else fill(element, ...runs.map((run) => card(run, now, verdicts.get(run.name))));
}

/** Return several runs as a table, a row each. */
function comparison(runs, now) {
  const rows = runs.map((run) => new Map(entriesOf(run).map(([name, , text, exact]) => [name, [text, exact]])));
  const names = [...new Set(rows.flatMap((row) => [...row.keys()]))];
  const body = runs.map((run, place) => {
    const [status, tone] = statusOf(run.facts, now);
    const cells = names.map((name) => {
      const [text, exact] = rows[place].get(name) ?? ["", ""];
      return make("td", { title: String(exact), "data-tile": name, "data-value": String(exact) }, text);
    });
    const chip = make("span", { class: "chip", "data-tone": tone, title: run.facts.error ?? "" }, status);
    return make("tr", { "data-run": run.name }, make("th", { scope: "row" }, swatch(css(`--c${place % 8}`)), run.name), make("td", {}, chip), ...cells);
  });
  const head = make("tr", {}, make("th", {}, "run"), make("th", {}, ""), ...names.map((name) => make("th", { scope: "col" }, name)));
  return make("article", { class: "card" }, make("div", { class: "scroll" }, make("table", { class: "compare" }, make("thead", {}, head), make("tbody", {}, ...body))));
}

function card(run, now, verdict) {
  const { facts } = run;
  const [status, tone] = statusOf(facts, now);
  return make("article", { class: "card", "data-run": run.name },
    make("div", { class: "head" }, make("h2", {}, run.name), make("span", { class: "chip", "data-tone": tone }, status), make("span", { class: "facts" }, about(run, now))),
    facts.num_steps ? make("progress", { class: "progress", max: String(facts.num_steps), value: String(facts.step), "aria-label": "steps" }) : null,
    run.progress !== null ? make("p", { class: "sentence", "data-tone": "warn" }, `A long log: ${Math.floor(run.progress * 100)} % is read. Until then the curve is a sample of it.`) : null,
    facts.error ? make("p", { class: "sentence", "data-tone": "bad" }, facts.error) : null,
    run.damaged ? make("p", { class: "sentence", "data-tone": "warn" }, run.damaged) : null,
    verdict ? make("p", { class: "sentence verdict" }, verdict) : null,
    tiles(run));
}

function about(run, now) {
  const { facts } = run;
  const words = [];
  if (facts.task) words.push(facts.task);
  if (facts.world_size) words.push(`${facts.world_size} ${facts.world_size === 1 ? "process" : "processes"} on ${facts.device.split(":")[0]}`);
  if (facts.backend && facts.backend !== "none") words.push(facts.backend);
  if (facts.strategy && facts.strategy !== "single") words.push(facts.strategy);
  if (facts.num_parameters) words.push(`${number(facts.num_parameters)} parameters`);
  if (facts.batch_size) words.push(`batch ${number(facts.batch_size)}`);
  if (facts.versions?.torch) words.push(`torch ${facts.versions.torch}`);
  if (run.origin) words.push(`began ${ago(now - run.origin)}`);
  return words.join(" · ");
}

function entriesOf(run) {
  const { facts } = run;
  const values = facts.values ?? {};
  const entries = [["step", facts.num_steps ? `of ${number(facts.num_steps)}` : "", number(facts.step), facts.step]];
  if (facts.epoch !== undefined) entries.push(["epoch", facts.num_epochs ? `of ${facts.num_epochs}` : "", number(facts.epoch + 1), facts.epoch + 1]);
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined) entries.push([{ lr: "learning rate", grad_norm: "gradient norm" }[name] ?? name.replace("scalars/", ""), "", number(value), value]);
  }
  for (const [name, value] of Object.entries(facts.metrics ?? {})) entries.push([name, "", number(value), value]);
  if (facts.samples_per_s) entries.push(["samples/s", "", number(Math.round(facts.samples_per_s)), facts.samples_per_s]);
  if (facts.tokens_per_s) entries.push(["tokens/s", "", number(Math.round(facts.tokens_per_s)), facts.tokens_per_s]);
  const memory = Object.entries(run.tables).filter(([name]) => name.startsWith("rank/")).map(([, table]) => lastValue(table.series.device_bytes) ?? lastValue(table.series.host_bytes) ?? 0);
  if (memory.length && Math.max(...memory) > 0) entries.push([memory.length > 1 ? "most memory" : "memory", "", bytes(Math.max(...memory)), Math.max(...memory)]);
  const peaks = Object.entries(run.tables).filter(([name]) => name.startsWith("rank/")).map(([, table]) => lastValue(table.series.device_peak_bytes) ?? 0);
  if (peaks.length && Math.max(...peaks) > 0) entries.push(["peak memory", "", bytes(Math.max(...peaks)), Math.max(...peaks)]);
  if (facts.device_flops_per_s) entries.push(["FLOP/s of the device", "", percent(facts.flops_per_s / facts.device_flops_per_s), facts.flops_per_s]);
  if (facts.left_s) entries.push(["time left", "", duration(facts.left_s), facts.left_s]);
  if (facts.num_restarts) entries.push(["restarts", "", number(facts.num_restarts), facts.num_restarts]);
  return entries;
}

function tiles(run) {
  return make("dl", { class: "tiles" }, ...entriesOf(run).map(([name, of, text, exact]) =>
    make("div", { class: "tile" }, make("dt", { title: `${name} ${of}` }, `${name} ${of}`), make("dd", { title: String(exact), "data-tile": name, "data-value": String(exact) }, text))));
}

function lastValue(buckets) {
  const bucket = (buckets ?? []).findLast((one) => one.length);
  return bucket ? bucket[bucket.length - 1] : null;
}
