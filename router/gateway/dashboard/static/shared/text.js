// Values as text, and orders of names. Pure: it touches no page.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.00095) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.0995) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.round(value)} s`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

export function bytes(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size * 0.9995) return `${(value / size).toFixed(value < 99.95 * size ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export const clockTime = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hourCycle: "h23" });
export const several = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "–");
export const byName = (a, b) => a.localeCompare(b, undefined, { numeric: true });
export const stageName = (name) => name === "failed" ? "refused or failed" : name === "stalled" ? "no token comes" : name.replace(/_s$/, "").replaceAll("_", " ").replace("kv", "KV");

// What /ready says, in a line, and how bad it is. Ready with troubles is not all well.
export function readiness({ status, reason, troubles = [] }, version) {
  if (status !== "ready") return [`● Not ready: ${[reason, ...troubles].join("; ")}`, "bad"];
  return troubles.length ? [`● Ready, but: ${troubles.join("; ")}. Version ${version}`, "warn"] : [`● Ready. Version ${version}`, "good"];
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

// Names of workers say no role: roles stand beside them, and lists are by role, then by number.
const ROLE_ORDER = { prefill: 0, decode: 1, mixed: 2, drained: 3, store: 5 };
export const isStore = (each) => each.role === "store"; // it keeps KV and computes nothing
export const withRole = (name, role) => (role ? `${name} (${role})` : name);
export const byRole = (a, b) => (ROLE_ORDER[a.role] ?? 4) - (ROLE_ORDER[b.role] ?? 4) || byName(a.worker_id, b.worker_id);
