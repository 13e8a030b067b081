// Requests of the last seconds, one lane a worker: what each worker did when. Those that run end at
// the right edge, with an arrow. Arrow keys go from request to request.

import { byRole, h, redraw, roving, s, seconds, several, stageName } from "./common.js";
import { KINDS } from "./events.js";
import { stagesOf } from "./timeline.js";
import { withTip } from "./tips.js";

const ROW = 9;
const MAX_ROWS = 8; // of one worker, for requests at the same time
const MAX_LANES = 48; // the busiest
const LEFT = 96;
export const LANE_STAGES = ["queue", "prefill_queue", "prefill_compute", "kv_hidden", "kv_wait", "decode_queue", "decode_steps"];
const LABELS = { kv_hidden: "KV, hidden by prefill", kv_wait: "KV, exposed" };
const labelOf = (stage) => LABELS[stage] ?? stageName(stage);

export const laneLegend = () => LANE_STAGES.map((name) => h("span", {}, h("i", { class: `swatch c-${name}` }), labelOf(name)));

const laneOf = (name, timeline) => {
  if (name === "route" || name === "queue") return "router";
  if (name.startsWith("prefill")) return timeline.prefill_worker || "router";
  return timeline.decode_worker || timeline.prefill_worker || "router";
};

// Groups of segments: one for each request and lane.
function groupsOf(requests, from) {
  const lanes = new Map();
  for (const request of requests) {
    if (!request.timeline || request.received_s + request.e2e_s < from) continue;
    const mine = new Map();
    for (const [name, start, end] of stagesOf(request.timeline, request.e2e_s)) {
      if (name === "route" || end - start <= 0) continue;
      const lane = laneOf(name, request.timeline);
      if (!mine.has(lane)) mine.set(lane, []);
      mine.get(lane).push([name, request.received_s + start, request.received_s + end]);
    }
    for (const [lane, segments] of mine) {
      const end = Math.max(...segments.map((each) => each[2]));
      if (end <= from) continue;
      if (!lanes.has(lane)) lanes.set(lane, []);
      lanes.get(lane).push({ request, segments, start: Math.min(...segments.map((each) => each[1])), end });
    }
  }
  return lanes;
}

// Gives each group a row of its lane. Returns the number of rows.
function pack(groups) {
  const ends = [];
  for (const group of groups.sort((a, b) => a.start - b.start)) {
    let row = ends.findIndex((end) => end <= group.start);
    if (row < 0) row = ends.length < MAX_ROWS ? ends.push(0) - 1 : ends.indexOf(Math.min(...ends));
    ends[row] = group.end;
    group.row = row;
  }
  return Math.max(ends.length, 1);
}

function namesOf(workers, lanes) {
  const known = [...workers].sort(byRole).map((each) => each.worker_id);
  const names = [...known, ...[...lanes.keys()].filter((each) => each !== "router" && !known.includes(each))];
  const busy = new Set([...names].sort((a, b) => (lanes.get(b)?.length ?? 0) - (lanes.get(a)?.length ?? 0)).slice(0, MAX_LANES));
  return { names: ["router", ...names.filter((each) => busy.has(each))], hidden: names.length - busy.size };
}

function groupMark({ request, segments, row }, place) {
  const { lane, y, from, scale, span, now, open } = place;
  const told = segments.map(([stage, a, b]) => `${labelOf(stage)} ${seconds(b - a)}`).join(", ");
  const group = s("g", { class: request.runs ? "hit runs" : "hit", role: "button", tabindex: -1, "data-key": `${lane} ${request.request_id}`, "data-lane": lane, "data-start": segments[0][1], "aria-label": `${request.id} in ${lane}${request.runs ? ", running" : ""}: ${told}` });
  const top = y + row * ROW;
  for (const [stage, a, b] of segments) {
    const x = LEFT + Math.max(0, a - from) * scale;
    const end = LEFT + Math.min(span, b - from) * scale;
    if (end <= LEFT) continue;
    const hidden = stage === "kv_hidden";
    group.append(s("rect", { x, y: top + (hidden ? ROW - 4 : 0), width: Math.max(1.5, end - x), height: hidden ? 3 : ROW - 2, class: `c-${stage}` }));
  }
  if (request.runs && segments.at(-1)[2] >= now) group.append(s("path", { d: `M${LEFT + span * scale + 1} ${top}l5 3.5l-5 3.5z`, class: `c-${segments.at(-1)[0]}` }));
  group.addEventListener("click", () => open(request));
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(request); } });
  return withTip(group, () => [h("strong", {}, request.id), ...segments.map(([stage, a, b]) => h("div", {}, `${labelOf(stage)} `, h("b", {}, seconds(b - a)))), h("div", { class: "why" }, request.runs ? "still running" : `${request.outcome}, ${several(request.answer_tokens, "token")}`)]);
}

export function drawLanes(container, { requests, workers, now, epoch, events, span, kept, open }) {
  const width = Math.max(container.clientWidth, 320);
  const from = now - span;
  const scale = (width - LEFT - 8) / span;
  const lanes = groupsOf(requests, from);
  const { names, hidden } = namesOf(workers, lanes);
  const roles = new Map(workers.map((each) => [each.worker_id, each.role]));
  redraw(container, ".hit", () => {
    const parts = [];
    const top = s("rect", { x: LEFT, y: 0, class: "unkept" });
    parts.push(top);
    let y = 4;
    for (const lane of names) {
      const groups = lanes.get(lane) ?? [];
      const height = Math.max(pack(groups) * ROW, 28);
      const role = lane === "router" ? "queue" : roles.get(lane) ?? "gone";
      parts.push(s("text", { x: 0, y: y + 11, class: "lane-name" }, lane.length > 14 ? `${lane.slice(0, 13)}…` : lane, s("title", {}, lane)));
      parts.push(s("text", { x: 0, y: y + 24, class: role === "gone" ? "lane-role gone" : "lane-role" }, role));
      for (const group of groups) parts.push(groupMark(group, { lane, y, from, scale, span, now, open }));
      y += height + 7;
      parts.push(s("line", { x1: 0, x2: width, y1: y - 4, y2: y - 4, class: "lane-line" }));
    }
    const unkept = kept === null ? 0 : Math.min(kept - from, span) * scale;
    if (unkept > 1) {
      top.setAttribute("width", unkept);
      top.setAttribute("height", y - 4);
      if (unkept > 130) parts.push(s("text", { x: LEFT + 8, y: 15 }, "older than what is kept"));
    }
    for (const each of events) {
      const at = each.at - epoch - from;
      if (at < 0 || at > span) continue;
      const line = s("line", { x1: LEFT + at * scale, x2: LEFT + at * scale, y1: 0, y2: y - 4, class: "lane-event" });
      line.style.stroke = `var(${KINDS[each.kind]})`;
      parts.push(line);
    }
    const step = (span > 20 ? 10 : span > 5 ? 5 : 1) * (width < 600 ? 2 : 1);
    for (let back = 0; back <= span; back += step) {
      const x = LEFT + (span - back) * scale;
      parts.push(s("text", { x: back ? x : width - 4, y: y + 12, "text-anchor": back ? (back === span ? "start" : "middle") : "end" }, back ? `−${back} s` : "now"));
    }
    if (hidden) parts.push(s("text", { x: 0, y: y + 30 }, `and ${several(hidden, "worker")} with less to do`));
    container.replaceChildren(s("svg", { width, height: y + (hidden ? 36 : 18), role: "group", "aria-label": `Lanes of ${several(names.length - 1, "worker")}` }, ...parts));
  });
}

// Left and right: the lane's requests by time. Up and down: the nearest one of another lane.
function pick(key, current, all) {
  const start = (each) => Number(each.dataset.start);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const lane = all.filter((each) => each.dataset.lane === current.dataset.lane).sort((a, b) => start(a) - start(b));
    return lane[lane.indexOf(current) + (key === "ArrowRight" ? 1 : -1)];
  }
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const lanes = [...new Set(all.map((each) => each.dataset.lane))];
  const lane = lanes[lanes.indexOf(current.dataset.lane) + (key === "ArrowDown" ? 1 : -1)];
  const there = all.filter((each) => each.dataset.lane === lane);
  return there.sort((a, b) => Math.abs(start(a) - start(current)) - Math.abs(start(b) - start(current)))[0];
}

export const rove = (container) => roving(container, ".hit", pick);
