// What happened, newest first, each with its sentence.

import { make, fill } from "./dom.js";
import { counted, duration, number } from "./format.js";

const NAMES = {
  restart: "restart", join: "joined", leave: "left", save: "checkpoint", save_failed: "save failed", nan: "NaN", hang: "hang",
  divergence: "divergence", straggler: "straggler", failure: "failure", lost: "lost", stop: "stop", notice: "note", end: "end",
};
const SHOWN = 200;

export class MarkList {
  constructor(element) {
    this.element = element;
    this.withSaves = false;
    this.list = make("ul", { class: "marks" });
    this.count = make("span", { class: "facts" });
    const check = make("input", { type: "checkbox", onchange: () => { this.withSaves = check.checked; this.draw(this.runs); } });
    element.append(
      make("div", { class: "section-head" }, make("h2", {}, "What happened"), this.count, make("span", { class: "spacer" }), make("label", { class: "check" }, check, make("span", {}, "checkpoints"))),
      make("div", { class: "scroll" }, this.list),
    );
    this.signature = "";
  }

  draw(runs) {
    this.runs = runs;
    const marks = runs.flatMap((run) => run.marks.map((mark) => ({ run, ...mark })));
    this.element.hidden = marks.length === 0;
    const signature = `${this.withSaves} ${runs.map((run) => `${run.name} ${run.marks.length} ${run.origin}`).join(" ")}`;
    if (signature === this.signature) return;
    this.signature = signature;
    const shown = marks.filter((mark) => this.withSaves || mark.kind !== "save");
    shown.sort((one, other) => other.run.origin + other.time_s - one.run.origin - one.time_s);
    const saves = marks.filter((mark) => mark.kind === "save").length;
    this.count.textContent = `${counted(marks.length - saves, "event")}, ${counted(saves, "checkpoint")}`;
    fill(this.list, ...shown.slice(0, SHOWN).map((mark) => item(mark, runs.length > 1)));
    if (!shown.length) fill(this.list, make("li", {}, make("span", { class: "when" }, "only checkpoints so far")));
  }
}

function item(mark, several) {
  const when = new Date((mark.run.origin + mark.time_s) * 1000).toLocaleString();
  return make("li", { "data-mark": mark.kind },
    make("span", { class: "when", title: when }, `${duration(mark.time_s)} · ${number(mark.step)}`),
    make("span", { class: "kind" }, NAMES[mark.kind] ?? mark.kind),
    make("span", { class: "text" }, several ? `${mark.run.name}: ${mark.text}` : mark.text));
}
