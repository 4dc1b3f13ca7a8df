// Which charts a page has, from what its runs have logged. Each line is a column of a table of a run.

const TITLES = { lr: "learning rate", grad_norm: "gradient norm", samples_per_s: "samples per second" };

export function chartSpecs(runs) {
  const specs = new Map();
  const several = runs.length > 1;
  const add = (id, title, unit, run, table, column, label, style = {}) => {
    if (!specs.has(id)) specs.set(id, { id, title, unit, lines: [] });
    specs.get(id).lines.push({ run, table, column, label, ...style });
  };
  for (const run of runs) {
    const of = (label) => (several ? (label ? `${run.name} ${label}` : run.name) : label);
    const columns = (table) => Object.keys(run.tables[table]?.series ?? {});
    if (columns("train").includes("loss")) add("loss", "loss", "", run, "train", "loss", of(several ? "" : "step"), { thin: true });
    if (columns("epoch").includes("loss")) add("loss", "loss", "", run, "epoch", "loss", of("epoch mean"), { bold: true });
    for (const metric of columns("eval")) {
      if (metric === "eval_loss") add("loss", "loss", "", run, "eval", metric, of("evaluation"), { dash: true });
      else add(`eval/${metric}`, metric, "", run, "eval", metric, of(""), { bold: true, dots: true });
    }
    for (const column of columns("speed")) add("speed", TITLES[column], "", run, "speed", column, of(""));
    for (const column of columns("train")) {
      if (column === "loss") continue;
      const title = TITLES[column] ?? column.replace("scalars/", "");
      if (!hasPoints(run.tables.train.series[column])) continue;
      add(`train/${column}`, title, "", run, "train", column, of(several ? "" : column.startsWith("scalars/") ? "step" : ""), { thin: column !== "lr" });
    }
    for (const column of columns("epoch")) {
      if (column.startsWith("scalars/")) add(`train/${column}`, column.slice(8), "", run, "epoch", column, of("epoch mean"), { bold: true });
    }
    for (const table of Object.keys(run.tables).filter((name) => name.startsWith("rank/")).sort(byRank)) {
      const rank = `rank ${table.slice(5)}`;
      for (const [column, id, title, unit] of [["device_bytes", "device", "memory of the device", "bytes"], ["host_bytes", "host", "host memory", "bytes"], ["cores", "cores", "cores in use", ""]]) {
        if (hasPoints(run.tables[table].series[column] ?? [])) add(`rank/${id}`, title, unit, run, table, column, of(rank));
      }
    }
  }
  return [...specs.values()];
}

const byRank = (one, other) => Number(one.slice(5)) - Number(other.slice(5));
const hasPoints = (buckets) => buckets.some((bucket) => bucket.length);
