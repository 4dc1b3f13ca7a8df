// What the page knows of each run, kept up to date by the messages of the server.
// See [Note: Cursors] in monitor/page/__init__.py.

export class RunData {
  constructor(name) {
    this.name = name;
    this.clear();
  }

  clear() {
    this.tables = {}; // name -> { level, series: { column: [bucket] } }; a bucket is [step, time, value, …]
    this.marks = [];
    this.phases = {};
    this.facts = this.facts ?? {};
    this.origin = 0;
    this.damaged = null;
    this.progress = null;
    this.version = (this.version ?? 0) + 1;
    this.points = new Map();
  }

  take(message) {
    if (message.reset) this.clear();
    if ("facts" in message) this.facts = message.facts;
    if ("progress" in message) this.progress = message.progress;
    if ("origin_s" in message) this.origin = message.origin_s;
    for (const [name, change] of Object.entries(message.tables ?? {})) this.replace(name, change);
    this.marks.push(...(message.marks ?? []));
    Object.assign(this.phases, message.phases ?? {});
    if (message.damaged) this.damaged = message.damaged;
    this.version += 1;
  }

  replace(name, change) {
    const table = (this.tables[name] ??= { level: change.level, series: {} });
    for (; table.level < change.level; table.level += 1) {
      for (const column of Object.keys(table.series)) table.series[column] = mergedPairs(table.series[column]);
    }
    for (const [column, buckets] of Object.entries(change.series)) {
      const own = (table.series[column] ??= []);
      own.length = Math.min(own.length, change.from);
      while (own.length < change.from) own.push([]);
      own.push(...buckets);
    }
    table.last = change.last;
    this.points.clear();
  }

  /** Return [xs, ys] of a column, with steps or seconds as x. */
  line(table, column, axis) {
    const key = `${table}\n${column}\n${axis}`;
    if (!this.points.has(key)) this.points.set(key, flat(this.tables[table]?.series[column] ?? [], axis));
    return this.points.get(key);
  }
}

export function mergedPairs(buckets) {
  const merged = [];
  for (let index = 0; index < buckets.length; index += 2) {
    merged.push(extremes([...buckets[index], ...(buckets[index + 1] ?? [])]));
  }
  return merged;
}

/** Return the points of the least and the greatest value among a bucket's, the earlier one first. */
function extremes(flatPoints) {
  let low = 0, high = 0;
  for (let at = 0; at < flatPoints.length; at += 3) {
    if (flatPoints[at + 2] < flatPoints[low + 2]) low = at;
    if (flatPoints[at + 2] > flatPoints[high + 2]) high = at;
  }
  if (!flatPoints.length) return [];
  const [first, second] = [Math.min(low, high), Math.max(low, high)];
  return first === second ? flatPoints.slice(first, first + 3) : [...flatPoints.slice(first, first + 3), ...flatPoints.slice(second, second + 3)];
}

export function flat(buckets, axis) {
  const xs = [], ys = [], offset = axis === "time" ? 1 : 0;
  for (const bucket of buckets) {
    for (let at = 0; at < bucket.length; at += 3) {
      const x = bucket[at + offset];
      if (xs.length && x <= xs[xs.length - 1]) { ys[ys.length - 1] = bucket[at + 2]; continue; }
      xs.push(x);
      ys.push(bucket[at + 2]);
    }
  }
  return [xs, ys];
}
