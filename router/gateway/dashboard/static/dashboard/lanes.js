// Requests of the last seconds, one lane a worker: what each worker did when. Those that run end at
// the right edge, with an arrow. A lane of many requests is drawn as a depth: how many are in which
// stage. Arrow keys go from request to request, and from lane to lane.

import { h, redraw, roving, s } from "../shared/common.js";
import { byRole, seconds, several, stageName } from "../shared/text.js";
import { withTip } from "../shared/tips.js";
import { MAX_ROWS, STAGES, depthOf, groupsOf, highest, named, pack } from "./depth.js";
import { KINDS } from "./events.js";

const ROW = 9;
const DEPTH = 64; // the height of the deepest lane
const BIN = 3; // pixels of its columns
const MAX_LANES = 48; // the busiest
const LEFT = 96;
const LANE_STAGES = ["queue", "prefill_queue", "prefill_compute", "kv_hidden", "kv_wait", "decode_queue", "decode_steps", "stalled"];
const LABELS = { kv_hidden: "KV, hidden by prefill", kv_wait: "KV, exposed" };
const labelOf = (stage) => LABELS[stage] ?? stageName(stage);

export const laneLegend = () => LANE_STAGES.map((name) => h("span", {}, h("i", { class: `swatch c-${name}` }), labelOf(name)));

function namesOf(workers, lanes) {
  const known = [...workers].sort(byRole).map((each) => each.worker_id);
  const names = [...known, ...[...lanes.keys()].filter((each) => each !== "router" && !known.includes(each))];
  const busy = new Set([...names].sort((a, b) => (lanes.get(b)?.length ?? 0) - (lanes.get(a)?.length ?? 0)).slice(0, MAX_LANES));
  return { names: ["router", ...names.filter((each) => busy.has(each))], hidden: names.length - busy.size };
}

// A part of a lane that can be pointed at, reached by arrow keys, and opened.
function part({ key, lane, start, label, open, tip, runs }, ...drawn) {
  const group = s("g", { class: runs ? "hit runs" : "hit", role: "button", tabindex: -1, "data-key": key, "data-lane": lane, "data-start": start, "aria-label": label }, ...drawn);
  group.addEventListener("click", open);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } });
  return withTip(group, tip);
}

function groupMark({ request, segments, row }, place) {
  const { lane, y, from, scale, span, now, open } = place;
  const told = segments.map(([stage, a, b]) => `${labelOf(stage)} ${seconds(b - a)}`).join(", ");
  const top = y + row * ROW;
  const drawn = segments.filter(([, , b]) => b > from).map(([stage, a, b]) => {
    const x = LEFT + Math.max(0, a - from) * scale;
    const end = LEFT + Math.min(span, b - from) * scale;
    const hidden = stage === "kv_hidden";
    return s("rect", { x, y: top + (hidden ? ROW - 4 : 0), width: Math.max(1.5, end - x), height: hidden ? 3 : ROW - 2, class: `c-${stage}` });
  });
  const last = segments.at(-1);
  if (request.runs && last[2] >= now) drawn.push(s("path", { d: `M${LEFT + span * scale + 1} ${top}l5 3.5l-5 3.5z`, class: `c-${last[0]}` }));
  const tip = () => [h("strong", {}, request.id), ...segments.map(([stage, a, b]) => h("div", {}, `${labelOf(stage)} `, h("b", {}, seconds(b - a)))), h("div", { class: "why" }, request.runs ? "still running" : `${request.outcome}, ${several(request.answer_tokens, "token")}`)];
  return part({ key: `${lane} ${request.request_id}`, lane, start: segments[0][1], label: `${request.id} in ${lane}${request.runs ? ", running" : ""}: ${told}`, open: () => open(request), tip, runs: request.runs }, ...drawn);
}

// Steps of one stage over those below it, as the outline of an area.
function area(below, counts, { y, unit, bin }) {
  const at = (value) => (y + DEPTH - value * unit).toFixed(1);
  const edge = (heights, bins) => bins.map((each) => `L${LEFT + each * bin} ${at(heights[each])}L${LEFT + (each + 1) * bin} ${at(heights[each])}`).join("");
  const bins = counts.map((_, index) => index);
  const back = [...bins].reverse().map((each) => `L${LEFT + (each + 1) * bin} ${at(below[each])}L${LEFT + each * bin} ${at(below[each])}`).join("");
  return `M${LEFT} ${at(below[0])}${edge(below.map((one, index) => one + counts[index]), bins)}${back}z`;
}

function depthMark(lane, { y, depth, most, unit, bin, groups, now, many }) {
  const below = new Array(depth.get(STAGES[0]).length).fill(0);
  const drawn = [s("rect", { x: LEFT, y, width: below.length * bin, height: DEPTH, class: "halo" })];
  for (const [stage, counts] of depth) {
    if (counts.some(Boolean)) drawn.push(s("path", { d: area(below, counts, { y, unit, bin }), class: `c-${stage}` }));
    counts.forEach((each, index) => { below[index] += each; });
  }
  const here = groups.filter(({ request, end }) => request.runs && end >= now);
  const stages = STAGES.map((stage) => [stage, here.filter(({ segments }) => segments.at(-1)[0] === stage).length]).filter(([, number]) => number);
  const told = `${several(here.length, "request")} now, ${most} at once at most${stages.map(([stage, number]) => `, ${number} in ${labelOf(stage)}`).join("")}`;
  const tip = () => [h("strong", {}, `${lane}: ${told}`), ...named(here.map(({ request }) => request)).map((each) => h("div", { class: "why" }, each))];
  return part({ key: `${lane} depth`, lane, start: 0, label: `${lane}: ${told}`, open: () => many(lane), tip, runs: here.length > 0 }, ...drawn);
}

function ticks(parts, { span, width, scale, y }) {
  const step = (span > 20 ? 10 : span > 5 ? 5 : 1) * (width < 600 ? 2 : 1);
  for (let back = 0; back <= span; back += step) {
    const x = LEFT + (span - back) * scale;
    parts.push(s("text", { x: back ? x : width - 4, y: y + 12, "text-anchor": back ? (back === span ? "start" : "middle") : "end" }, back ? `−${back} s` : "now"));
  }
}

function marks(parts, { events, epoch, from, span, scale, y }) {
  for (const each of events) {
    const at = each.at - epoch - from;
    if (at < 0 || at > span) continue;
    const line = s("line", { x1: LEFT + at * scale, x2: LEFT + at * scale, y1: 0, y2: y - 4, class: "lane-event" });
    line.style.stroke = `var(${KINDS[each.kind]})`;
    parts.push(line);
  }
}

// Each worker has a label, and says if it is connected. `many` shows the requests of a deep lane.
export function drawLanes(container, { requests, workers, now, epoch, events, span, kept, open, many }) {
  const width = Math.max(container.clientWidth, 320);
  const from = now - span;
  const scale = (width - LEFT - 8) / span;
  const lanes = groupsOf(requests, from);
  const { names, hidden } = namesOf(workers, lanes);
  const known = new Map(workers.map((each) => [each.worker_id, each]));
  const bins = Math.max(1, Math.floor((span * scale) / BIN));
  const deep = new Map();
  for (const lane of names) {
    const groups = lanes.get(lane) ?? [];
    if (pack(groups) <= MAX_ROWS) continue;
    const depth = depthOf(groups, from, span, bins);
    deep.set(lane, { depth, most: highest(depth) });
  }
  const unit = DEPTH / Math.max(1, ...[...deep.values()].map((each) => each.most));
  redraw(container, ".hit", () => {
    const parts = [];
    const top = s("rect", { x: LEFT, y: 0, class: "unkept" });
    parts.push(top);
    let y = 4;
    for (const lane of names) {
      const groups = lanes.get(lane) ?? [];
      const found = deep.get(lane);
      const rows = groups.reduce((most, each) => Math.max(most, each.row + 1), 1);
      const worker = known.get(lane);
      const role = lane === "router" ? "queue" : worker?.label ?? "gone";
      parts.push(s("text", { x: 0, y: y + 11, class: "lane-name" }, lane.length > 14 ? `${lane.slice(0, 13)}…` : lane, s("title", {}, lane)));
      parts.push(s("text", { x: 0, y: y + 24, class: lane === "router" || worker?.isThere ? "lane-role" : "lane-role gone" }, role));
      if (found) {
        parts.push(s("text", { x: 0, y: y + 38, class: "lane-role" }, `${found.most} at once`));
        parts.push(depthMark(lane, { ...found, y, unit, bin: (span * scale) / bins, groups, now, many }));
      } else for (const group of groups) parts.push(groupMark(group, { lane, y, from, scale, span, now, open }));
      y += (found ? DEPTH : Math.max(rows * ROW, 28)) + 7;
      parts.push(s("line", { x1: 0, x2: width, y1: y - 4, y2: y - 4, class: "lane-line" }));
    }
    const unkept = kept === null ? 0 : Math.min(kept - from, span) * scale;
    if (unkept > 1) {
      top.setAttribute("width", unkept);
      top.setAttribute("height", y - 4);
      if (unkept > 130) parts.push(s("text", { x: LEFT + 8, y: 15 }, "older than what is kept"));
    }
    marks(parts, { events, epoch, from, span, scale, y });
    ticks(parts, { span, width, scale, y });
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
