// Ranks × phases: where each rank's time went. A rank that is unlike the others stands out.

import { make, fill } from "./dom.js";
import { duration, percent } from "./format.js";

const ORDER = ["startup", "data", "copy", "forward", "backward", "communication", "compile", "optimizer", "checkpoint", "evaluation", "hooks", "other"];
const MAX_ROWS = 256;
const ODD_SHARE = 0.1; // of the time, more than the median rank
const HIGHEST_ALPHA = 0.85;

export class HeatMap {
  constructor(element) {
    this.element = element;
    this.span = "recent";
    this.body = make("div", { class: "scroll" });
    this.sentence = make("p", { class: "sentence" });
    this.which = make("span", { class: "facts" });
    const choose = (value, text) => {
      const input = make("input", { type: "radio", name: "span", value, checked: value === this.span, onchange: () => { this.span = value; this.draw(this.run, this.many); } });
      return make("label", {}, input, make("span", {}, text));
    };
    const choice = make("fieldset", { class: "switch" }, make("legend", { class: "hidden" }, "Time span"), choose("recent", "last minute"), choose("whole", "whole run"));
    element.append(make("div", { class: "section-head" }, make("h2", {}, "Where the time goes"), this.which, make("span", { class: "spacer" }), choice), this.body, this.sentence);
  }

  draw(run, many) {
    this.run = run;
    this.many = many;
    const rows = Object.entries(run?.phases ?? {}).map(([rank, sums]) => row(rank, sums.host, sums[this.span]));
    this.element.hidden = rows.length === 0;
    if (!rows.length) return;
    this.which.textContent = many ? run.name : "";
    const used = new Set(rows.flatMap((one) => Object.keys(one.shares)));
    const phases = [...ORDER.filter((phase) => used.has(phase)), ...[...used].filter((phase) => !ORDER.includes(phase)).sort()];
    const medians = Object.fromEntries(phases.map((phase) => [phase, median(rows.map((one) => one.shares[phase] ?? 0))]));
    const odd = rows.length > 1 ? oddest(rows, medians) : null;
    const shown = rows.length > MAX_ROWS ? [...rows].sort((a, b) => distance(b, medians) - distance(a, medians)).slice(0, MAX_ROWS) : rows;
    const head = make("tr", {}, make("th", {}, "rank"), ...phases.map((phase) => make("th", { scope: "col" }, phase)), make("th", { scope: "col" }, "per step"));
    fill(this.body, make("table", { class: "heat" }, make("thead", {}, head), make("tbody", {}, ...shown.map((one) => line(one, phases, medians)))));
    this.sentence.textContent = rows.length === 1 ? "" : odd ?? "All ranks spend their time alike.";
    this.sentence.dataset.tone = odd ? "bad" : "";
    if (rows.length > MAX_ROWS) this.sentence.textContent += ` Shown: the ${MAX_ROWS} ranks of ${rows.length} that differ most.`;
  }
}

function row(rank, host, sums) {
  const shares = Object.fromEntries(Object.entries(sums.phases).map(([phase, seconds]) => [phase, sums.seconds > 0 ? seconds / sums.seconds : 0]));
  return { rank, host, shares, sums };
}

function line(one, phases, medians) {
  const cells = phases.map((phase) => {
    const share = one.shares[phase] ?? 0;
    const title = `rank ${one.rank}, ${phase}: ${(one.sums.phases[phase] ?? 0).toFixed(3)} s of ${one.sums.seconds.toFixed(1)} s; the median rank ${percent(medians[phase])}`;
    const cell = make("td", { title, "data-phase": phase, "data-seconds": String(one.sums.phases[phase] ?? 0), "data-odd": isOdd(phase, share, medians) }, share ? percent(share) : "");
    cell.style.background = `rgb(var(--heat) / ${(share * HIGHEST_ALPHA).toFixed(3)})`;
    return cell;
  });
  const step = one.sums.num_steps ? duration1(one.sums.seconds / one.sums.num_steps) : "–";
  return make("tr", { "data-rank": one.rank }, make("th", { scope: "row", title: one.host }, one.rank), ...cells, make("td", { class: "plain" }, step));
}

const isOdd = (phase, share, medians) => phase !== "communication" && share - medians[phase] >= ODD_SHARE;
const duration1 = (seconds) => (seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : duration(seconds));
const distance = (one, medians) => Math.max(...Object.keys(medians).map((phase) => Math.abs((one.shares[phase] ?? 0) - medians[phase])));

function oddest(rows, medians) {
  let most = null;
  for (const one of rows) {
    for (const [phase, share] of Object.entries(one.shares)) {
      if (isOdd(phase, share, medians) && (!most || share - medians[phase] > most.by)) most = { one, phase, share, by: share - medians[phase] };
    }
  }
  if (!most) return null;
  return `Rank ${most.one.rank} spends ${percent(most.share)} of its time in ${most.phase}, the median rank ${percent(medians[most.phase])}.`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
