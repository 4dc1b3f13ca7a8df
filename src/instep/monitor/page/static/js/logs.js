// What a rank printed: the end of its log, followed while it grows; earlier pieces on request.

import { ask, fill, make } from "./dom.js";
import { bytes } from "./format.js";

const POLL_MS = 1500;
const KEPT_CHARACTERS = 1000000;

export class Logs {
  constructor(element) {
    this.element = element;
    this.text = make("pre", { class: "log", tabindex: "0", "aria-label": "log" });
    this.choice = make("select", { "aria-label": "which log", onchange: () => this.open(this.choice.value) });
    this.earlier = make("button", { class: "ghost", type: "button", onclick: () => this.more() }, "earlier");
    this.about = make("span", { class: "facts" });
    element.append(make("div", { class: "section-head" }, make("h2", {}, "Logs"), this.choice, this.about, make("span", { class: "spacer" }), this.earlier), this.text);
    this.run = this.name = null;
    setInterval(() => this.follow(), POLL_MS);
  }

  async show(run) {
    if (run === this.run) return;
    this.run = run;
    this.name = null;
    this.signature = "";
    if (!run) { this.element.hidden = true; return; }
    await this.list();
  }

  async list() {
    const run = this.run;
    const { files } = await ask("api/logs", { run }).catch(() => ({ files: [] }));
    if (run !== this.run) return;
    this.element.hidden = files.length === 0;
    const signature = files.map((file) => file.name).join(" ");
    if (signature === this.signature) return;
    this.signature = signature;
    fill(this.choice, ...files.map((file) => make("option", { value: file.name, selected: file.name === this.name }, file.name.replace("rank-", "rank ").replace(".log", ""))));
    if (files.length && !files.some((file) => file.name === this.name)) await this.open(files[0].name);
  }

  async open(name) {
    this.name = name;
    const piece = await this.piece({});
    if (!piece || name !== this.name) return;
    this.begin = piece.begin;
    this.end = piece.end;
    this.text.textContent = piece.text;
    this.showSize(piece);
    this.text.scrollTop = this.text.scrollHeight;
  }

  async follow() {
    if (!this.run || document.hidden) return;
    await this.list();
    if (!this.name || this.end === undefined) return;
    const name = this.name;
    const piece = await this.piece({ after: this.end });
    if (!piece || name !== this.name) return;
    if (piece.begin !== this.end) { await this.open(name); return; } // the file was replaced
    if (!piece.text) return;
    const atEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
    this.text.append(piece.text);
    this.end = piece.end;
    if (this.text.textContent.length > KEPT_CHARACTERS) { await this.open(name); return; }
    this.showSize(piece);
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  async more() {
    const piece = await this.piece({ before: this.begin });
    if (!piece) return;
    const height = this.text.scrollHeight;
    this.text.prepend(piece.text);
    this.begin = piece.begin;
    this.showSize(piece);
    this.text.scrollTop += this.text.scrollHeight - height;
  }

  async piece(where) {
    return ask("api/log", { run: this.run, name: this.name, ...where }).catch(() => null);
  }

  showSize(piece) {
    this.earlier.hidden = this.begin === 0;
    this.about.textContent = piece.num_bytes ? bytes(piece.num_bytes) : "nothing was printed";
  }
}
