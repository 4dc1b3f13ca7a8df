// Which charts a page has, from what its runs have logged. Each line is a column of a table of a run.

const TITLES = { lr: "learning rate", grad_norm: "gradient norm", samples_per_s: "samples per second", tokens_per_s: "tokens per second" };

const PER_RANK = [
  ["device_bytes", "device", "memory of the device", "bytes"],
  ["device_reserved_bytes", "device_reserved", "memory of the device, reserved", "bytes"],
  ["device_peak_bytes", "device_peak", "memory of the device, peak", "bytes"],
  ["host_bytes", "host", "host memory", "bytes"],
  ["utilisation", "utilisation", "device in use, share of the time", ""],
  ["power_w", "power", "power of the device, W", ""],
  ["temperature_c", "temperature", "temperature of the device, °C", ""],
  ["cores", "cores", "cores in use", ""],
  ["queue", "queue", "batches that were ready", ""],
  ["comm_bytes_per_s", "sent", "passed to collectives per second", "bytes"],
];

export function chartSpecs(runs) {
  const specs = new Map();
  const several = runs.length > 1;
  const add = (id, title, unit, run, table, column, label, style = {}) => {
    if (!specs.has(id)) specs.set(id, { id, title, unit, lines: [] });
    specs.get(id).lines.push({ run, table, column, label, ...style });
  };
  for (const run of runs) {
    const columns = (table) => Object.keys(run.tables[table]?.series ?? {});
    // Of one run, a chart has all that is a loss; of several, a chart each, in which a line is a run.
    const loss = (id, title) => (several ? [id, title] : ["loss", "loss"]);
    const label = (text) => (several ? "" : text);
    if (columns("train").includes("loss")) add("loss", "loss", "", run, "train", "loss", label("step"), { thin: true });
    if (columns("epoch").includes("loss")) add(...loss("epoch/loss", "mean loss of the epoch"), "", run, "epoch", "loss", label("epoch mean"), { bold: true });
    for (const metric of columns("eval")) {
      if (metric === "eval_loss") add(...loss("eval/eval_loss", "eval_loss"), "", run, "eval", metric, label("evaluation"), { dash: !several });
      else add(`eval/${metric}`, metric, "", run, "eval", metric, "", { bold: true, dots: true });
    }
    for (const column of columns("speed")) add(`speed/${column}`, TITLES[column], "", run, "speed", column, "");
    for (const column of columns("train")) {
      if (column === "loss") continue;
      const title = TITLES[column] ?? column.replace("scalars/", "");
      add(`train/${column}`, title, "", run, "train", column, column.startsWith("scalars/") ? label("step") : "", { thin: column !== "lr" });
    }
    for (const column of columns("epoch")) {
      if (column.startsWith("scalars/") && !several) add(`train/${column}`, column.slice(8), "", run, "epoch", column, "epoch mean", { bold: true });
    }
    for (const table of Object.keys(run.tables).filter((name) => name.startsWith("rank/")).sort(byRank)) {
      for (const [column, id, title, unit] of PER_RANK) {
        if (columns(table).includes(column)) add(`rank/${id}`, title, unit, run, table, column, `rank ${table.slice(5)}`);
      }
    }
  }
  return [...specs.values()];
}

const byRank = (one, other) => Number(one.slice(5)) - Number(other.slice(5));
