// Numbers as a person reads them. The exact ones are in the elements' titles.

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // nan, inf: JSON has no number for them
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return trim(value);
}

const trim = (value) => String(Number(value.toPrecision(4)));

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const total = Math.round(seconds);
  if (seconds < 10) return `${Number(seconds.toFixed(1))}s`;
  if (total < 60) return `${total}s`;
  if (total < 3600) return `${Math.floor(total / 60)}m${String(total % 60).padStart(2, "0")}s`;
  if (total < 86400) return `${Math.floor(total / 3600)}h${String(Math.floor(total % 3600 / 60)).padStart(2, "0")}m`;
  return `${Math.floor(total / 86400)}d${String(Math.floor(total % 86400 / 3600)).padStart(2, "0")}h`;
}

export function counted(count, noun) { return `${count} ${noun}${count === 1 ? "" : "s"}`; }

export function ago(seconds) { return seconds < 2 ? "now" : `${duration(seconds)} ago`; }

export function percent(share) { return share >= 0.0995 || share === 0 ? `${Math.round(share * 100)} %` : `${(share * 100).toFixed(1)} %`; }
