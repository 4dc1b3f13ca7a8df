// The charts: uPlot, with marks on the horizontal axis, one cursor and one zoom for all of them.

import { make, fill } from "./dom.js";
import { bytes, duration, number, short } from "./format.js";
import { chartSpecs } from "./chart_specs.js";
import { markAt, markPlugin } from "./mark_lines.js";
import { flat } from "./store.js";

const COLORS = 8;
const MAX_LEGEND = 6;

export function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

export class Charts {
  constructor(element, onZoom) {
    this.element = element;
    this.onZoom = onZoom;
    this.cards = new Map();
    this.axis = "step";
    this.isLog = false;
    this.range = null;
    this.windows = new Map(); // run -> tables, finer, of the range
    this.sync = uPlot.sync("all");
    new ResizeObserver(() => this.resize()).observe(element);
  }

  draw(runs) {
    const specs = chartSpecs(runs);
    this.extent = extent(runs, this.axis);
    for (const [id, card] of this.cards) {
      if (!specs.some((spec) => spec.id === id)) { card.plot?.destroy(); card.element.remove(); this.cards.delete(id); }
    }
    specs.forEach((spec, place) => {
      const card = this.cards.get(spec.id) ?? this.newCard(spec.id);
      if (this.element.children[place] !== card.element) this.element.insertBefore(card.element, this.element.children[place] ?? null);
      this.show(card, spec, runs);
    });
  }

  newCard(id) {
    const card = { legend: make("div", { class: "legend" }), heading: make("h2"), plotElement: make("div", { class: "plot" }), tip: make("div", { class: "tip", hidden: true }), signature: "" };
    card.element = make("article", { class: "card", "data-chart": id }, make("header", {}, card.heading, card.legend), card.plotElement, card.tip);
    this.cards.set(id, card);
    this.element.append(card.element);
    return card;
  }

  show(card, spec, runs) {
    card.heading.textContent = spec.title;
    card.spec = spec;
    card.runs = runs;
    const data = this.data(spec);
    const signature = JSON.stringify([spec.lines.map((line) => [line.run.name, line.table, line.column]), this.axis, this.isLog, document.documentElement.dataset.theme]);
    if (signature !== card.signature) {
      card.plot?.destroy();
      fill(card.plotElement);
      card.plot = new uPlot(this.options(card), data, card.plotElement);
      card.signature = signature;
    } else {
      card.plot.setData(data, false);
    }
    card.plot.setScale("x", this.range ?? this.extent);
    this.legend(card, null);
  }

  data(spec) {
    const tables = spec.lines.map((line) => {
      const [xs, ys] = this.points(line);
      return this.isLog ? [xs, ys.map((y) => (y > 0 ? y : null))] : [xs, ys];
    });
    return uPlot.join(tables);
  }

  points(line) {
    const finer = this.range && this.windows.get(line.run.name)?.[line.table]?.[line.column];
    return finer ? flat(finer, this.axis) : line.run.line(line.table, line.column, this.axis);
  }

  options(card) {
    const { spec } = card;
    const value = spec.unit === "bytes" ? bytes : short;
    const axis = { stroke: css("--dim"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const many = new Set(spec.lines.map((line) => line.run.name)).size > 1;
    return {
      width: card.plotElement.clientWidth || 400,
      height: card.plotElement.clientHeight || 210,
      legend: { show: false },
      cursor: { sync: { key: "all", scales: ["x", null] }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1, range: this.isLog ? undefined : padded } },
      axes: [
        { ...axis, size: 28, space: 70, values: (_, ticks) => ticks.map((tick) => (this.axis === "time" ? duration(tick) : short(tick))) },
        { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : value(tick))) },
      ],
      series: [{}, ...spec.lines.map((line, index) => this.series(line, colorOf(card.runs, line, index, many), many))],
      plugins: [markPlugin(() => ({ runs: card.runs, axis: this.axis }))],
      hooks: {
        setCursor: [(plot) => this.legend(card, plot.cursor.idx)],
        setSelect: [(plot) => { if (plot.select.width > 4) this.zoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]); plot.setSelect({ width: 0, height: 0 }, false); }],
        ready: [(plot) => plot.over.addEventListener("dblclick", (event) => { event.stopImmediatePropagation(); this.zoom(null); })],
      },
    };
  }

  series(line, color, many) {
    return {
      label: line.label || line.column,
      stroke: color,
      width: line.bold ? 2 : line.thin ? 1.1 : 1.5,
      alpha: line.thin && !many ? 0.8 : 1,
      dash: line.dash ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: (plot, index) => line.dots && plot.data[index].filter((y) => y !== null && y !== undefined).length < 60, size: 5, fill: color },
    };
  }

  legend(card, index) {
    const { plot, spec } = card;
    const value = spec.unit === "bytes" ? bytes : number;
    const name = (line) => (card.runs.length > 1 ? `${line.run.name} ${line.label}`.trim() : line.label);
    const entries = spec.lines.slice(0, MAX_LEGEND).map((line, place) => {
      const ys = plot.data[place + 1];
      const exact = index === null || index === undefined ? line.run.tables[line.table].last?.[line.column] : nearest(ys, index);
      const text = exact === null || exact === undefined ? "–" : value(exact);
      return make("span", { title: exact === null || exact === undefined ? name(line) : `${name(line)} ${exact}`.trim() },
        swatch(plot.series[place + 1].stroke()), line.label ? `${line.label} ` : "", make("b", { "data-line": name(line), "data-value": exact === undefined ? null : String(exact) }, text));
    });
    if (spec.lines.length > MAX_LEGEND) entries.push(make("span", {}, `and ${spec.lines.length - MAX_LEGEND} more`));
    if (index !== null && index !== undefined && plot.data[0][index] !== undefined) {
      entries.push(make("span", {}, this.axis === "time" ? `at ${duration(plot.data[0][index])}` : `step ${number(plot.data[0][index])}`));
    }
    fill(card.legend, ...entries);
    const marks = index === null || index === undefined ? [] : markAt(plot, card.runs, this.axis);
    card.tip.hidden = marks.length === 0;
    fill(card.tip, ...marks.slice(0, 4).map((mark) => make("p", { "data-mark": mark.kind }, make("span", { class: "dot" }), `step ${number(mark.step)}: ${mark.text}`)));
  }

  zoom(range) {
    this.range = range ? { min: range[0], max: range[1] } : null;
    this.windows.clear();
    this.onZoom(this.range);
  }

  resize() {
    for (const { plot, plotElement } of this.cards.values()) {
      const width = plotElement.clientWidth, height = plotElement.clientHeight;
      if (plot && width && (plot.width !== width || plot.height !== height)) plot.setSize({ width, height });
    }
  }

  redraw() { for (const card of this.cards.values()) card.signature = ""; }
}

export function colorOf(runs, line, index, many) {
  const place = many ? runs.indexOf(line.run) : index;
  return css(`--c${place % COLORS}`);
}

export function swatch(color) {
  const element = make("span", { class: "swatch" });
  element.style.background = color;
  return element;
}

function nearest(ys, index) {
  for (let distance = 0; distance < ys.length; distance += 1) {
    for (const at of [index - distance, index + distance]) if (ys[at] !== null && ys[at] !== undefined) return ys[at];
  }
  return null;
}

/** Return the range of all charts, so that what lies above each other happened at the same time. */
function extent(runs, axis) {
  const ends = runs.flatMap((run) => Object.entries(run.tables).flatMap(([name, table]) => Object.keys(table.series).map((column) => run.line(name, column, axis)[0].at(-1) ?? 0)));
  return { min: 0, max: Math.max(1, ...ends) };
}

function padded(_plot, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) { const half = Math.abs(low) * 0.1 || 0.5; return [low - half, high + half]; }
  const pad = (high - low) * 0.06;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}
