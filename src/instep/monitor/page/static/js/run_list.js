// All runs of the folder: one is shown by a click on its name, several by their boxes.

import { make, fill } from "./dom.js";
import { ago, number } from "./format.js";
import { statusOf } from "./overview.js";

export function drawRuns(element, lines, selected, choose) {
  const now = Date.now() / 1000;
  fill(element,
    make("h2", {}, "Runs", make("span", {}, `${lines.length}`)),
    ...lines.map((line) => {
      const isChosen = selected.includes(line.name);
      const box = make("input", { type: "checkbox", checked: isChosen, "aria-label": `compare ${line.name}`,
        onclick: (event) => event.stopPropagation(),
        onchange: () => choose(box.checked ? [...selected, line.name] : selected.filter((name) => name !== line.name)) });
      return make("div", { class: "run", "data-name": line.name, "data-selected": isChosen, onclick: () => choose([line.name]) },
        box, make("span", { class: "name" }, line.name), make("span", { class: "about" }, ...about(line, now)));
    }));
}

function about(line, now) {
  if (line.step === undefined && !line.begun_s) return [line.error || "no events yet"];
  const [status, tone] = statusOf(line, now);
  const words = [make("span", { class: "chip", "data-tone": tone }, status)];
  if (line.step !== undefined) words.push(line.num_steps ? `${number(line.step)}/${number(line.num_steps)}` : number(line.step));
  if (line.loss !== undefined) words.push(`loss ${number(line.loss)}`);
  if (line.time_s) words.push(ago(now - line.time_s));
  return words.map((word) => (typeof word === "string" ? make("span", {}, word) : word));
}
