// The dashboard: one state, kept by a stream of events, and one function for each part of the page.

import { askKeys, byId, clockTime, count, eachEvent, fillBar, goTo, h, headers, isShortcut, isStore, keyed, onKeys, onTheme, percent, quantile, reasonOf, say, seconds, setState, setText, several, stageName, state as badge, turnTheme } from "./common.js";
import { Charts, spanOf } from "./charts.js";
import { MARKED, drawEvents, drawStrip, eventsOf, rove as roveMarks } from "./events.js";
import { drawLanes, laneLegend, rove as roveLanes } from "./lanes.js";
import { OrderForms } from "./orders.js";
import { drawRequests, openRequest, redrawOpened } from "./requests.js";
import { drawTransfers, noteRates } from "./transfers.js";
import { drawPlanner, drawVersions } from "./versions.js";
import { BLOCKS, drawGateways, drawWorkers } from "./workers.js";

const MAX_REQUESTS = 256;
const MAX_SAMPLES = 600;
const LATE_MS = 4_500; // frames come once a second, and in two while another process is stopped
const LOST_MS = 12_000; // then another connection may reach a process that answers

let now = null; // the latest state; its rings hold all that is known
let paused = false;
let stop = null; // ends the present stream
const forms = new OrderForms();
const charts = new Charts(() => marksOf(now));

// ---------------------------------------------------------------- the stream

let rings = new Map(); // by gateway process: its requests and samples, latest last
let heard = performance.now(); // when the last frame came, or the last connection began
let isLate = false;

function take(event, data) {
  const next = JSON.parse(data);
  heard = performance.now();
  if (event === "tick" && now) { if (!("cluster" in next)) next.cluster = now.cluster; } else rings = new Map();
  const parts = [{ ...next, process: next.process ?? "" }, ...next.others];
  for (const { process, requests, samples } of parts) {
    const ring = rings.get(process) ?? { requests: [], samples: [] };
    rings.set(process, { requests: [...ring.requests, ...requests].slice(-MAX_REQUESTS), samples: [...ring.samples, ...samples].slice(-MAX_SAMPLES) });
  }
  now = joined(next, parts);
  noteRates(now);
  if (isLate) { isLate = false; live(); }
  if (!paused && !document.hidden) draw();
}

// The state of all gateway processes that share the port, as if they were one.
function joined(state, parts) {
  const known = new Set(parts.map((each) => each.process));
  for (const process of rings.keys()) if (!known.has(process)) rings.delete(process);
  const all = [...rings.values()];
  const ended = (each) => each.received_s + each.e2e_s;
  const requests = all.flatMap((each) => each.requests).sort((a, b) => ended(a) - ended(b)).slice(-MAX_REQUESTS);
  const running = parts.flatMap((each) => each.running.map((one) => runningRow(one, state.now_s)));
  const processes = parts.map(({ process, in_flight, queue }) => ({ process, in_flight, queue }));
  if (parts.length === 1) return { ...state, requests, running, processes, samples: all[0].samples };
  const sum = (read) => parts.reduce((total, each) => total + read(each), 0);
  const add = (into, each, names) => { for (const name of names) into[name] = (into[name] ?? 0) + each[name]; return into; };
  const group = (items, keyOf, names) => {
    const found = new Map();
    for (const each of items) {
      const one = found.get(keyOf(each));
      if (!one) { found.set(keyOf(each), structuredClone(each)); continue; }
      add(one, each, names);
      if (each.missed) add(one.missed, each.missed, Object.keys(each.missed));
    }
    return [...found.values()];
  };
  return {
    ...state, requests, running, processes,
    queue: sum((each) => each.queue), queue_s: sum((each) => each.queue_s), in_flight: sum((each) => each.in_flight),
    hits: parts.reduce((into, each) => add(into, each.hits, Object.keys(each.hits)), {}),
    transfers: group(parts.flatMap((each) => each.transfers), (each) => `${each.source} ${each.sink}`, ["num_transfers", "num_bytes", "timed_bytes", "seconds", "exposed_s"]),
    versions: group(parts.flatMap((each) => each.versions), (each) => each.name, ["num_requests", "ended", "failed", "late"]),
    counts: group(parts.flatMap((each) => each.counts), (each) => `${each.where} ${each.event} ${each.reason}`, ["number"]),
    samples: group(all.flatMap((each) => each.samples).sort((a, b) => a.at_s - b.at_s), (each) => Math.floor(each.at_s), ["queue", "in_flight", "ended", "good", "prompt_tokens", "answer_tokens"]),
  };
}

// A request that runs, with the fields of one that has ended.
function runningRow(each, at) {
  const line = each.timeline;
  const first = line && each.answer_tokens ? line.route_s + line.queue_s + line.prefill_queue_s + line.prefill_compute_s : null;
  const e2e = at - each.received_s;
  const pace = first !== null && each.answer_tokens > 1 ? Math.max(e2e - first, 0) / (each.answer_tokens - 1) : null;
  return { ...each, runs: true, outcome: "running", reason: "", missed: "", ttft_s: first, tpot_s: pace, e2e_s: e2e };
}

function live() {
  setState("live", "good");
  say("");
  document.body.classList.remove("stale");
}

function lost(state, why, kind) {
  setState(state, kind);
  if (!now) { say(`${why}.`, kind); return; }
  say(`${why}. What is shown is from ${clockTime(now.epoch_s + now.now_s)}.`, kind);
  document.body.classList.add("stale");
}

// A gateway that is stopped keeps its connection and says nothing.
setInterval(() => {
  const silent = performance.now() - heard;
  if (silent < LATE_MS) return;
  isLate = true;
  lost("no news", `The gateway has said nothing for ${Math.round(silent / 1000)} s`, "bad");
  if (silent > LOST_MS) { heard = performance.now(); stop?.(); }
}, 1000);

async function follow() {
  for (let wait = 500; ; wait = Math.min(wait * 2, 5_000)) {
    const control = new AbortController();
    stop = () => control.abort();
    try {
      const response = await fetch("/dashboard/events", { headers: headers(), signal: control.signal, cache: "no-store" });
      if (response.ok) {
        heard = performance.now();
        live();
        wait = 250;
        await eachEvent(response, take);
        lost("connecting again", "The gateway has ended the stream", "warn");
      } else {
        const isKey = response.status === 401 || response.status === 403;
        lost(isKey ? "no access" : "refused", `${await reasonOf(response)}${isKey ? ". Press k, or Keys, to give keys" : ""}`, "bad");
        heard = Infinity; // the answer is no, and not silence
        if (isKey && wait === 500) askKeys();
      }
    } catch (error) {
      if (error.name !== "AbortError") lost("not connected", "The gateway does not answer", "bad");
    }
    await new Promise((done) => { const timer = setTimeout(done, wait); stop = () => { clearTimeout(timer); done(); }; });
    heard = performance.now();
  }
}

// ---------------------------------------------------------------- parts of the page

const marksOf = (state) => eventsOf(state?.cluster).filter((each) => MARKED.includes(each.kind));

function draw() {
  if (!now) return;
  const events = eventsOf(now.cluster);
  drawTiles();
  drawTroubles();
  charts.show(now.samples, now.epoch_s);
  drawStrip(byId("strip"), events, spanOf(now.samples, now.epoch_s));
  drawStages();
  drawHits();
  drawLanes(byId("lanes"), { requests: [...now.requests, ...now.running], workers: working(), now: now.now_s, epoch: now.epoch_s, events: marksOf(now), span: Number(byId("lane-span").value), kept: now.requests.length < MAX_REQUESTS ? null : keptFrom(), open: openRequest });
  drawWorkers(now);
  drawGateways(now);
  drawTransfers(now);
  drawRequests(now);
  drawEvents(events);
  drawVersions(now);
  drawPlanner(now);
  forms.show(now);
  byId("jump").lastElementChild.hidden = byId("orders").hidden;
  drawCounts();
  redrawOpened(now);
}

// The workers without the stores, which do no request.
const working = () => now.workers.filter((each) => !isStore(each));

// The time from which all requests are known.
const keptFrom = () => now.requests.reduce((first, each) => Math.min(first, each.received_s + each.e2e_s), Infinity);

function lastMinute() {
  const since = now.now_s - 60;
  return now.requests.filter((each) => each.received_s + each.e2e_s >= since && each.outcome !== "cancelled" && !each.is_background);
}

function drawTiles() {
  const ended = lastMinute();
  const samples = now.samples.slice(-60);
  const [num, good] = ["ended", "good"].map((name) => samples.reduce((sum, each) => sum + each[name], 0));
  const first = ended.map((each) => each.ttft_s).filter((each) => each !== null);
  const pace = ended.map((each) => each.tpot_s).filter((each) => each !== null);
  const bound = (value) => (value === null ? "no bound set" : `bound ${seconds(value)}`);
  const late = (values, limit) => (limit !== null && values.length && quantile(values, 0.5) > limit ? "warn" : "");
  const wanted = now.cluster ? now.cluster.versions.reduce((sum, each) => sum + each.wanted.prefill + each.wanted.decode + each.wanted.mixed, 0) : working().length;
  const share = num ? good / num : null;
  const troubles = now.cluster?.troubles.length ?? 0;
  const calm = now.cluster?.settled === false ? "pools are changing" : "as wanted";
  const noController = "no controller reports";
  const tiles = [
    ["State", now.missing ? "Not ready" : "Ready", now.missing ?? (!now.has_controller ? noController : troubles ? several(troubles, "trouble") : calm), now.missing ? "bad" : troubles || !now.has_controller ? "warn" : "good"],
    ["Goodput, 1 min", share === null ? "–" : `${Math.floor(share * 100)} %`, share === null ? "no request ended" : `${count(good)} of ${count(num)} in bounds`, share === null || share >= 0.99 ? "" : share >= 0.9 ? "warn" : "bad"],
    ["First token, p50", seconds(quantile(first, 0.5)), `p95 ${seconds(quantile(first, 0.95))}, ${bound(now.bounds.ttft_s)}`, late(first, now.bounds.ttft_s)],
    ["Per token, p50", seconds(quantile(pace, 0.5)), `p95 ${seconds(quantile(pace, 0.95))}, ${bound(now.bounds.tpot_s)}`, late(pace, now.bounds.tpot_s)],
    ["In flight", count(now.in_flight), `${count(now.samples.at(-1)?.answer_tokens ?? 0)} tokens/s`, ""],
    ["Queue", count(now.queue), now.queue ? `${seconds(now.queue_s)} to compute` : "none waits for a worker", now.queue ? "warn" : ""],
    ["Workers", `${working().length} / ${wanted}`, "connected / wanted", working().length < wanted ? "warn" : ""],
    ["Planner", now.cluster?.planner ?? "–", now.has_controller && now.cluster ? `room for ${several(now.cluster.max_workers, "worker")}` : noController, now.has_controller ? "" : "warn"],
  ];
  keyed(byId("tiles"), tiles, (each) => each[0], ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}), h("dd", { class: "note" })), (element, [, value, note, kind]) => {
    setText(element.children[1], value);
    element.children[1].className = kind;
    setText(element.children[2], note);
  });
}

function drawTroubles() {
  const told = [...(now.missing ? [`No request can be served: ${now.missing}`] : []), ...(now.has_controller || !now.cluster ? [] : ["No controller reports: nothing is started again, and orders are refused"]), ...(now.cluster?.troubles ?? [])];
  byId("troubles").hidden = !told.length;
  keyed(byId("trouble-list"), told, (each) => each, (each) => h("li", {}, each), () => {});
}

function bars(container, rows, total, empty) {
  if (!rows.length) {
    if (container.textContent !== empty) container.replaceChildren(h("p", { class: "dim" }, empty));
    return;
  }
  if (!container.firstElementChild?.classList.contains("bars")) container.replaceChildren(h("div", { class: "bars" }));
  const cells = rows.flatMap(([name, value, text, style]) => [["n", name, name], ["t", name, text], ["b", name, value / Math.max(total, 1), style ?? name]]);
  keyed(container.firstElementChild, cells, ([part, name]) => `${part} ${name}`,
    ([part, , , style]) => (part === "b" ? h("div", { class: "hbar" }, h("i", { class: `c-${style}` })) : h("span", { class: part === "t" ? "num" : "name" })),
    (element, [part, , value]) => { if (part === "b") element.firstElementChild.style.width = `${Math.min(100, value * 100)}%`; else setText(element, part === "n" ? stageName(value) : value); });
}

function drawStages() {
  const missed = {};
  let ended = 0;
  for (const sample of now.samples) {
    ended += sample.ended;
    for (const [name, number] of Object.entries(sample.missed)) missed[name] = (missed[name] ?? 0) + number;
  }
  const rows = Object.entries(missed).sort((a, b) => b[1] - a[1]).map(([name, number]) => [name, number, `${number} (${percent(number, ended)})`]);
  const { ttft_s: ttft, tpot_s: tpot } = now.bounds;
  const unset = ttft === null && tpot === null ? " No bound is set: see router.slo_ttft_s and router.slo_tpot_s." : "";
  bars(byId("stages"), rows, Math.max(...rows.map((each) => each[1]), 1), ended ? `None of ${several(ended, "request")} missed a bound in the last ten minutes.${unset}` : "No request ended in the last ten minutes.");
}

function drawHits() {
  const { prompt_tokens: total, local, peer, infinite } = now.hits;
  const text = (value) => `${count(value)} (${percent(value, total)})`;
  const rows = total ? [["cached in the same worker", local, text(local), "local"], ["pulled from another worker", peer, text(peer), "peer"], ["an infinite cache would have", infinite, text(infinite), "infinite"]] : [];
  bars(byId("hits"), rows, total, "No prompt was computed yet.");
  setText(byId("hits-total"), total ? `of ${several(total, "prompt token")}` : "");
}

function drawCounts() {
  const trouble = now.counts.filter((each) => each.is_trouble);
  byId("no-trouble").hidden = trouble.length > 0;
  byId("trouble-table").hidden = !trouble.length;
  for (const [id, items] of [["counts", trouble], ["ordinary", now.counts.filter((each) => !each.is_trouble)]]) {
    keyed(byId(id).tBodies[0], items, (each) => `${each.where} ${each.event} ${each.reason}`, (each) => h("tr", {}, h("td", {}, each.where), h("td", {}, each.event), h("td", {}, each.reason), h("td", { class: "num" })), (element, each) => setText(element.lastElementChild, count(each.number)));
  }
}

// ---------------------------------------------------------------- begin

const pause = h("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => turn() }, "Pause");
function turn() {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  if (!paused) draw();
}

const partsOf = () => [...document.querySelectorAll("main > section:not([hidden])")];

fillBar("/dashboard", badge, pause);
byId("jump").append(...partsOf().concat(byId("orders")).map((part, index) => h("a", { href: `#${part.id}`, onclick: (event) => { event.preventDefault(); goTo(part); } }, h("kbd", {}, String(index + 1)), ` ${part.dataset.title}`)));
byId("lane-legend").append(...laneLegend());
byId("block-legend").append(...Object.entries(BLOCKS).map(([name, label]) => h("span", {}, h("i", { class: `swatch c-${name}` }), label)));
roveLanes(byId("lanes"));
roveMarks(byId("strip"));
onTheme(draw);
onKeys(() => stop?.());
for (const id of ["event-filter", "request-filter", "worker-filter", "lane-span"]) byId(id).addEventListener("input", draw);
new ResizeObserver(() => draw()).observe(byId("lanes"));
document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) draw(); });
document.addEventListener("keydown", (event) => {
  if (!isShortcut(event)) return;
  const link = byId("jump").children[Number(event.key) - 1];
  if (link && !link.hidden) link.click();
  else if (event.key === "t") turnTheme();
  else if (event.key === "k") { event.preventDefault(); askKeys(); }
  else if (event.key === "p") turn();
});
follow();
