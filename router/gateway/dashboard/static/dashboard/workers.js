// Workers with the conservation of their blocks, and gateways.

import { byId, h, keyed, setText } from "../shared/common.js";
import { byRole, isStore, seconds, several } from "../shared/text.js";
import { workerOrders } from "./orders.js";

const MOST = 200; // rows
export const BLOCKS = { owned: "in use", leased: "leased", in_flight: "in flight", cached: "cached", free: "free" };
export const ago = (value) => (value < 90 ? `${Math.round(value)} s` : value < 5400 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`);

// Connected workers, and those that only the controller knows.
export function rowsOf(state) {
  const news = new Map((state.cluster?.workers ?? []).map((each) => [each.worker_id, each]));
  const rows = state.workers.map((card) => ({ ...card, news: news.get(card.worker_id) ?? null }));
  const here = new Set(state.workers.map((each) => each.worker_id));
  for (const each of news.values()) {
    if (!here.has(each.worker_id)) rows.push({ worker_id: each.worker_id, version: each.version, role: each.role, blocks: null, running: 0, waiting: 0, max_running: 0, wait_s: null, tpot_s: null, news: each, isAway: true });
  }
  return rows.sort(byRole);
}

// What a worker does now, its kind, and the reason.
function stateOf(row, unix) {
  const { news } = row;
  if (isStore(row)) return ["keeps KV", "good", ""];
  if (!news) return ["connected", "good", ""];
  if (row.isAway && news.state === "serving") return ["serving, but not connected to this gateway", "bad", news.why ?? ""];
  const notes = [];
  if (news.is_leaving) notes.push("leaving");
  if (news.leaving_seqs) notes.push(`${several(news.leaving_seqs, "sequence")} move away`);
  if (news.failures) notes.push(several(news.failures, "failure"));
  if (news.is_crash_looping) notes.push("crash-looping");
  const kind = news.state === "serving" ? (news.failures ? "warn" : "good") : news.failures ? "bad" : "warn";
  const since = `for ${ago(Math.max(0, unix - news.since_s))}`;
  return [[`${news.state} ${since}`, ...notes].join(", "), kind, news.why ?? ""];
}

// The pool as the sum of its blocks. They are conserved if none is lost.
function sumOf(blocks) {
  if (!blocks) return "no report";
  const parts = Object.entries(BLOCKS).map(([name, label]) => `${blocks[name]} ${label}`).reverse().join(" + ");
  if (!blocks.lost) return `${blocks.total} = ${parts}`;
  return `${blocks.total} ≠ ${parts}: ${several(Math.abs(blocks.lost), "block")} ${blocks.lost > 0 ? "lost" : "too many"}`;
}

const cell = (label, ...more) => h("td", { class: "num", "data-label": label }, ...more);

function makeRow(row) {
  const bar = h("div", { class: "blocks", role: "img" }, ...Object.keys(BLOCKS).map((each) => h("i", { class: `c-${each}` })));
  const element = h("tr", {},
    h("th", { scope: "row" }, h("div"), h("div", { class: "sub" })), h("td"), h("td", { class: "wrap" }, h("div"), h("div", { class: "sub" })),
    h("td", { class: "whole" }, bar, h("div", { class: "sub sum" })), ...["Running", "Waiting", "Wait", "Per token"].map((each) => cell(each)), h("td", { class: "whole" }));
  element._row = row;
  element.lastElementChild.append(workerOrders(() => element._row), h("span", { class: "dim" }, "–"));
  return element;
}

function fillRow(element, row, state) {
  element._row = row;
  const [name, role, status, bar, running, waiting, wait, pace, orders] = element.children;
  setText(name.firstElementChild, row.worker_id);
  setText(name.lastElementChild, state.versions.length > 1 ? row.version : "");
  name.title = row.news?.kernels ? `computes with ${row.news.kernels}` : "";
  const target = row.news?.target;
  setText(role, `${row.role ?? "–"}${target && target !== row.role ? ` → ${target}` : ""}`);
  const [text, kind, why] = stateOf(row, state.epoch_s + state.now_s);
  setText(status.firstElementChild, text);
  status.firstElementChild.className = kind;
  setText(status.lastElementChild, why);
  const [blocks, note] = bar.children;
  const isOff = Boolean(row.blocks?.lost);
  const told = sumOf(row.blocks);
  Object.keys(BLOCKS).forEach((each, index) => { blocks.children[index].style.width = row.blocks?.total ? `${(100 * row.blocks[each]) / row.blocks.total}%` : "0"; });
  blocks.setAttribute("aria-label", told);
  setText(note, told);
  note.className = isOff ? "sub sum bad" : "sub sum";
  bar.classList.toggle("cut", isOff);
  setText(running, isStore(row) ? "–" : row.max_running ? `${row.running} / ${row.max_running}` : row.running);
  setText(waiting, isStore(row) ? "–" : row.waiting);
  setText(wait, seconds(row.wait_s));
  setText(pace, seconds(row.tpot_s));
  const can = state.can_order && Boolean(row.news);
  orders.children[0].hidden = !can;
  orders.children[1].hidden = can;
}

export function drawWorkers(state) {
  const wanted = byId("worker-filter").value.toLowerCase();
  const rows = rowsOf(state).filter((row) => `${row.worker_id} ${row.role} ${row.version} ${row.news?.state ?? ""} ${row.news?.target ?? ""}`.toLowerCase().includes(wanted));
  byId("worker-search").hidden = state.workers.length < 12 && !wanted;
  setText(byId("worker-count"), rows.length > MOST ? `the first ${MOST} of ${rows.length}` : "");
  keyed(byId("workers").tBodies[0], rows.slice(0, MOST), (each) => each.worker_id, makeRow, (element, row) => fillRow(element, row, state));
}

// Gateways as the controller knows them, and what each process that answers has to do.
export function drawGateways(state) {
  const known = state.cluster?.gateways ?? [];
  byId("gateway-part").hidden = known.length < 2 && known.every((each) => each.state === "serving");
  const line = (name, told, kind) => h("li", {}, h("strong", {}, name), " ", h("span", { class: kind }, told));
  byId("gateways").replaceChildren(...known.map((each) => line(each.name, `${each.state}${each.url ? ` at ${each.url}` : ""}`, each.state === "serving" ? "good" : "warn")));
  const shown = state.processes.map((each) => `process ${each.process || "0"}: ${each.in_flight} in flight, ${each.queue} in the queue`);
  setText(byId("processes"), shown.length > 1 ? `Answering now: ${shown.join("; ")}.` : "");
}
