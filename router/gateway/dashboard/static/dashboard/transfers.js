// KV between each pair of workers: rates, sums, and pairs that are severed.

import { byId, h } from "../shared/common.js";
import { byRole, bytes, several, seconds } from "../shared/text.js";

const RATE_S = 10;
const MAX_NAMES = 40; // of rows and of columns
const sent = new Map(); // by pair: [time, bytes] of the last seconds
const pairOf = (each) => `${each.source}\n${each.sink}`;

export function noteRates(state) {
  const seen = new Set(state.transfers.map(pairOf));
  for (const each of state.transfers) {
    const known = (sent.get(pairOf(each)) ?? []).filter(([at, total]) => at < state.now_s && at >= state.now_s - RATE_S && total <= each.num_bytes);
    sent.set(pairOf(each), [...known, [state.now_s, each.num_bytes]]);
  }
  for (const pair of sent.keys()) if (!seen.has(pair)) sent.delete(pair);
}

// Bytes a second in the last seconds; null before two samples.
function rateOf(pair) {
  const known = sent.get(pair) ?? [];
  if (known.length < 2) return null;
  const [[from, before], [to, after]] = [known[0], known.at(-1)];
  return (after - before) / (to - from);
}

export function drawTransfers(state) {
  const holder = byId("transfers");
  const pairs = [...state.severed, ...state.transfers];
  const told = state.severed.map((each) => `${each.source} → ${each.sink}`);
  const severed = byId("severed");
  severed.hidden = !told.length;
  severed.textContent = told.length ? `${several(told.length, "pair")} severed: ${told.slice(0, 8).join(", ")}${told.length > 8 ? " …" : ""}. KV goes by other workers, or is computed again.` : "";
  const roles = new Map(state.workers.map((each) => [each.worker_id, each.role]));
  const of = (end) => [...new Set(pairs.map((each) => each[end]))].slice(0, MAX_NAMES).map((name) => ({ worker_id: name, role: roles.get(name) })).sort(byRole);
  const [sources, sinks] = [of("source"), of("sink")];
  const title = ({ worker_id: name, role }) => [name, h("div", { class: "sub" }, role ?? "gone")];
  const moved = new Map(state.transfers.map((each) => [pairOf(each), each]));
  const cut = new Map(state.severed.map((each) => [pairOf(each), each]));
  const highest = Math.max(1, ...state.transfers.map((each) => rateOf(pairOf(each)) ?? 0));
  holder.replaceChildren(h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "From ↓ to →"), ...sinks.map((each) => h("th", { scope: "col", class: "cell" }, ...title(each))))),
    h("tbody", {}, ...sources.map((source) => h("tr", {}, h("th", { scope: "row" }, ...title(source)), ...sinks.map((sink) => {
      const key = pairOf({ source: source.worker_id, sink: sink.worker_id });
      return cellOf(moved.get(key), cut.get(key), highest, source.worker_id === sink.worker_id);
    }))))));
}

function cellOf(moved, severed, highest, isSelf) {
  if (!moved && !severed) return h("td", { class: "cell dim" }, isSelf ? "" : "–");
  const rate = moved ? rateOf(pairOf(moved)) : null;
  const cell = h("td", { class: `cell ${severed ? "cut" : rate ? "flows" : ""}` },
    severed ? h("strong", { class: "bad" }, `severed, tried again in ${seconds(severed.again_in_s)}`) : h("span", { class: rate ? "" : "dim" }, rate ? `${bytes(rate)}/s` : "idle"));
  if (rate && !severed) cell.style.setProperty("--share", `${Math.round(4 + (26 * rate) / highest)}%`);
  if (!moved) return cell;
  cell.append(h("div", { class: "sub" }, `${several(moved.num_transfers, "transfer")}, ${bytes(moved.num_bytes)}`));
  if (moved.seconds) cell.append(h("div", { class: "sub" }, `at ${bytes(moved.timed_bytes / moved.seconds)}/s, ${Math.round((100 * moved.exposed_s) / moved.seconds)} % exposed`));
  return cell;
}
