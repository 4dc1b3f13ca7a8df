// Marks on the horizontal axis of every chart: a line for what changed the run, a tick for a checkpoint.

import { css } from "./charts.js";

export const COLORS = {
  restart: "--c3", join: "--c3", leave: "--c3", stop: "--c3", save: "--good", end: "--good", notice: "--dim", straggler: "--warn",
};
const NEAR_PX = 7;
const TICKS = new Set(["save", "notice", "end"]);

export function colorOfMark(kind) { return css(COLORS[kind] ?? "--bad"); }

export function markX(mark, axis) { return axis === "time" ? mark.time_s : mark.step; }

export function markPlugin(state) {
  return { hooks: { draw: [(plot) => drawMarks(plot, state())] } };
}

function drawMarks(plot, { runs, axis }) {
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales.x;
  const drawn = new Set();
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const run of runs) {
    for (const mark of run.marks) {
      const x = markX(mark, axis);
      if (x < min || x > max) continue;
      const left = Math.round(plot.valToPos(x, "x", true));
      const isTick = TICKS.has(mark.kind);
      const key = `${left} ${isTick}`;
      if (drawn.has(key)) continue; // as many as a screen has columns, however many there are
      drawn.add(key);
      ctx.strokeStyle = ctx.fillStyle = colorOfMark(mark.kind);
      ctx.globalAlpha = isTick ? 0.75 : 0.9;
      const size = 3.5 * devicePixelRatio;
      if (isTick) {
        ctx.beginPath();
        ctx.moveTo(left, bbox.top + bbox.height);
        ctx.lineTo(left - size * 0.8, bbox.top + bbox.height + size * 1.3);
        ctx.lineTo(left + size * 0.8, bbox.top + bbox.height + size * 1.3);
        ctx.fill();
      } else {
        ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(left, bbox.top);
        ctx.lineTo(left, bbox.top + bbox.height);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.fillRect(left - size, bbox.top, 2 * size, 2 * size);
      }
    }
  }
  ctx.restore();
}

/** Return the marks under the cursor of a chart. */
export function markAt(plot, runs, axis) {
  const { left } = plot.cursor;
  if (left === undefined || left < 0) return [];
  const near = [];
  for (const run of runs) {
    for (const mark of run.marks) {
      const distance = Math.abs(plot.valToPos(markX(mark, axis), "x") - left);
      if (distance <= NEAR_PX) near.push({ ...mark, distance });
    }
  }
  return near.sort((one, other) => TICKS.has(one.kind) - TICKS.has(other.kind) || one.distance - other.distance);
}
