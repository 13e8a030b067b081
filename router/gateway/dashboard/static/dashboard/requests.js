// The table of requests, and the dialog of one: its timeline, its placement and the reasons.

import { byId, h, keyed, setText, show } from "../shared/common.js";
import { clockTime, count, seconds, several, stageName } from "../shared/text.js";
import { candidates, facts, placement, waterfall } from "../shared/timeline.js";
import { hideTip } from "../shared/tips.js";

const MOST = 100;
const short = (id) => (id.length > 18 ? `${id.slice(0, 17)}…` : id);
const KIND = { finished: "", running: "good", cancelled: "dim" };

function fits(each, wanted) {
  const line = each.timeline;
  return [each.id, each.request_id, each.outcome, each.reason, each.tenant, each.version, each.missed, line?.prefill_worker, line?.decode_worker, ...each.segments.map(([lane]) => lane)].join(" ").toLowerCase().includes(wanted);
}

export function drawRequests(state) {
  const wanted = byId("request-filter").value.toLowerCase();
  const all = [...[...state.running].reverse(), ...[...state.requests].reverse()];
  const items = all.filter((each) => fits(each, wanted));
  setText(byId("request-count"), items.length > MOST ? `The latest ${MOST} of ${items.length} are listed.` : wanted || !items.length ? `${several(items.length, "request")}${wanted ? ` of ${all.length}` : " yet"}` : "");
  keyed(byId("requests").tBodies[0], items.slice(0, MOST), (each) => each.request_id, (each) => {
    const button = h("button", { type: "button", class: "link mono", title: each.id, "data-key": each.request_id, onclick: () => openRequest(row._request) }, short(each.id));
    const row = h("tr", {}, h("td", {}, button), h("td", { "data-label": "Ended" }), h("td"), ...["Prompt", "Answer", "First token", "Per token", "Queued", "Prefill", "Decode", "Stood still"].map((each) => h("td", { class: "num", "data-label": each })), h("td"), h("td", { "data-label": "Missed at" }));
    return row;
  }, (row, each) => {
    row._request = each;
    const [, ended, outcome, prompt, answer, first, pace, queued, prefill, decode, stalled, place, missed] = row.children;
    setText(ended, each.runs ? "–" : clockTime(state.epoch_s + each.received_s + each.e2e_s));
    setText(outcome, each.outcome);
    outcome.className = KIND[each.outcome] ?? "bad";
    outcome.title = each.reason;
    setText(prompt, count(each.prompt_tokens));
    setText(answer, count(each.answer_tokens));
    setText(first, seconds(each.ttft_s));
    setText(pace, seconds(each.tpot_s));
    const { queued_s, prefill_s, decode_s, stalled_s } = each.spent;
    for (const [cell, value] of [[queued, queued_s], [prefill, prefill_s], [decode, decode_s], [stalled, stalled_s]]) setText(cell, seconds(value || null));
    stalled.className = stalled_s ? "num bad" : "num";
    setText(place, each.timeline ? `${each.timeline.prefill_worker || "–"} → ${each.timeline.decode_worker || "–"}` : "–");
    setText(missed, each.missed ? stageName(each.missed) : "–");
    missed.className = each.missed ? "bad" : "dim";
  });
}

let opened = null; // draws the dialog of a request anew, while it runs
export const redrawOpened = (state) => opened?.(state);

export function openRequest(request) {
  if (document.querySelector("dialog[open]")) return;
  hideTip();
  const body = h("div", { class: "request", tabindex: 0, role: "group", "aria-label": "Timeline and placement" });
  const dialog = h("dialog", { "aria-labelledby": "request-title" },
    h("h2", { id: "request-title" }, "Request ", h("span", { class: "mono" }, request.id)),
    h("button", { class: "close", type: "button", onclick: () => dialog.close() }, "Close"), body);
  const fill = (each) => body.replaceChildren(...partsOf(each, body.clientWidth));
  opened = !request.runs ? null : (state) => {
    const own = (each) => each.request_id === request.request_id;
    const latest = state.running.find(own) ?? state.requests.find(own);
    if (latest) fill(latest);
    if (!latest?.runs) opened = null;
  };
  dialog.addEventListener("close", () => { opened = null; });
  show(dialog);
  fill(request);
}

// Every segment of every attempt, with its lane.
function rowsOf({ timeline, segments }) {
  const rows = segments.map(([lane, stage, start, end]) => [stage, start, end, lane]);
  return [["route", 0, timeline.route_s, "router"], ...rows].sort((a, b) => a[1] - b[1]);
}

function partsOf(request, space) {
  const line = request.timeline;
  const none = request.runs ? "No router has the request now." : "The router gave no timeline: the request ended before a worker took it.";
  const times = `${seconds(request.ttft_s)}, ${seconds(request.tpot_s)}, ${seconds(request.e2e_s)}`;
  return [
    line ? waterfall(rowsOf(request), request.e2e_s, space) : h("p", {}, none),
    facts([
      ["Outcome", request.reason ? `${request.outcome}: ${request.reason}` : request.outcome],
      ["Missed its bound at", request.missed ? stageName(request.missed) : request.runs ? "" : "none"],
      ["Id in the logs", request.request_id],
      ["Version", request.version],
      ["Key", request.tenant],
      ["Tokens", `${request.prompt_tokens} in the prompt, ${request.answer_tokens} in the answer${request.runs ? " so far" : ""}`],
      ["First token, per token, all", times],
    ]),
    ...(line ? [h("h3", {}, "Placement and reasons"), placement(line), candidates(line)] : []),
  ];
}
