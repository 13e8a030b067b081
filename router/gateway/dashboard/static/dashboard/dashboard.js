// The dashboard: one state, kept by a stream of events, and one function for each part of the page.

import { askKeys, byId, eachEvent, fillBar, goTo, h, headers, isShortcut, keyed, onKeys, onTheme, reasonOf, say, setState, setText, state as badge, turnTheme } from "../shared/common.js";
import { clockTime, count, isStore, percent, seconds, several, stageName } from "../shared/text.js";
import { Charts } from "./charts.js";
import { leftOut } from "./depth.js";
import { MARKED, drawEvents, drawStrip, eventsOf, rove as roveMarks } from "./events.js";
import { joined, spanOf, startsIn, takenUp } from "./joined.js";
import { drawLanes, laneLegend, rove as roveLanes } from "./lanes.js";
import { OrderForms } from "./orders.js";
import { drawRequests, openRequest, redrawOpened } from "./requests.js";
import { tilesOf } from "./tiles.js";
import { drawTransfers, noteRates } from "./transfers.js";
import { drawPlanner, drawVersions } from "./versions.js";
import { BLOCKS, drawGateways, drawWorkers, rowsOf } from "./workers.js";

const MAX_REQUESTS = 256; // kept by a gateway
const LATE_MS = 4_500; // frames come once a second, and in two while another process is stopped
const LOST_MS = 12_000; // then another connection may reach a process that answers

let now = null; // the latest state; its rings hold all that is known
let paused = false;
let stop = null; // ends the present stream
const forms = new OrderForms();
const charts = new Charts(() => marksOf(now));

// ---------------------------------------------------------------- the stream

let rings = null; // by gateway process: its requests and samples, latest last
let former = []; // samples of gateways that are gone, as this page has seen them
let heard = performance.now(); // when the last frame came, or the last connection began
let isLate = false;

function take(event, data) {
  const next = JSON.parse(data);
  heard = performance.now();
  if (event !== "tick" || !now) { rings = null; former = now?.samples ?? []; }
  else if (!("cluster" in next)) next.cluster = now.cluster;
  const parts = [{ ...next, process: next.process ?? "" }, ...next.others];
  rings = takenUp(rings, parts, next.epoch_s);
  now = joined(next, parts, rings, former);
  noteRates(now);
  if (isLate) { isLate = false; live(); }
  if (!paused && !document.hidden) draw();
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
  const span = spanOf(now.samples, marksOf(now), now.epoch_s + now.now_s);
  drawTiles();
  drawTroubles();
  charts.show(now.samples, span, now.bounds);
  drawBounds(span);
  drawStrip(byId("strip"), events, span);
  drawStages();
  drawHits();
  drawLanes(byId("lanes"), { requests: [...now.requests, ...now.running], workers: laneWorkers(), now: now.now_s, epoch: now.epoch_s, events: marksOf(now), span: Number(byId("lane-span").value), kept: now.requests.length < MAX_REQUESTS ? null : keptFrom(), open: openRequest, many: showOf });
  setText(byId("lane-count"), leftOut(now.running.length, now.in_flight));
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
  foldEmpty(events);
  redrawOpened(now);
}

// The workers with lanes; stores compute no request. A worker without a connection shows its state.
const laneWorkers = () => rowsOf(now).filter((each) => !isStore(each)).map((each) => ({ ...each, isThere: !each.isAway, label: each.isAway ? each.news.state : each.role }));

// Lists the requests of a lane that is too deep to show each of them.
function showOf(lane) {
  byId("request-filter").value = lane;
  byId("request-filter").dispatchEvent(new Event("input"));
  goTo(byId("requests-part"));
}

// A part with nothing to show is its title, and says so.
function foldEmpty(events) {
  const hasRequests = now.requests.length + now.running.length > 0;
  for (const [id, isFull, told] of [
    ["lanes-part", hasRequests, "no request yet"],
    ["requests-part", hasRequests, "none yet"],
    ["transfers-part", now.transfers.length + now.severed.length > 0, "no KV has moved between workers yet"],
    ["events-part", events.length > 0, "nothing has happened to the pools yet"],
    ["counts-part", now.counts.some((each) => each.is_trouble), "none since the start"],
  ]) {
    byId(id).classList.toggle("empty", !isFull);
    byId(id).querySelector(".none").textContent = isFull ? "" : told;
  }
}

function drawBounds(span) {
  for (const [name, bound] of Object.entries(now.bounds)) setText(byId(`bound-${name}`), bound === null ? "no bound set" : `red line: bound ${seconds(bound)}`);
  setText(byId("started"), startsIn(now.processes, span, clockTime));
}

// The time from which all requests are known.
const keptFrom = () => now.requests.reduce((first, each) => Math.min(first, each.received_s + each.e2e_s), Infinity);

function drawTiles() {
  keyed(byId("tiles"), tilesOf(now), (each) => each[0], ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}), h("dd", { class: "note" })), (element, [, value, note, kind]) => {
    setText(element.children[1], value);
    element.children[1].className = kind;
    element.dataset.kind = kind;
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
