// The timeline of one request: its stages as a waterfall, a table, and the reasons of its placement.

import { h, s } from "./common.js";
import { seconds, stageName } from "./text.js";

// Rows are [stage, start, end], with the lane where it was if that is known.
export function waterfall(stages, e2e, space = 860) {
  const total = Math.max(e2e, ...stages.map((each) => each[2]), 1e-6);
  const [left, right, row] = [stages.some((each) => each[3]) ? 190 : 112, 62, 22];
  const width = Math.max(space - left - right, 80);
  const picture = s("svg", { width: left + width + right, height: stages.length * row + 4, role: "img",
    "aria-label": stages.map(([name, from, to, lane]) => `${titleOf(name, lane)} ${seconds(to - from)}`).join(", ") });
  stages.forEach(([name, from, to, lane], index) => {
    const x = left + (from / total) * width;
    const length = Math.max(1.5, ((to - from) / total) * width);
    picture.append(
      s("text", { x: left - 8, y: index * row + 15, "text-anchor": "end" }, titleOf(name, lane)),
      s("rect", { x, y: index * row + 4, width: length, height: row - 8, rx: 2, class: `c-${name}` }),
      s("text", { x: x + length + 5, y: index * row + 15 }, seconds(to - from)));
  });
  return picture;
}

const titleOf = (name, lane) => (lane ? `${stageName(name)}, ${lane}` : stageName(name));

export function facts(pairs) {
  return h("dl", { class: "facts" }, ...pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}

// The workers that were compared when the request was placed, the chosen one first.
export function candidates(timeline) {
  const found = timeline.decision?.candidates ?? [];
  if (!found.length) return "";
  const head = ["Worker", "First token, predicted", "Its wait", "Cached tokens"];
  return h("table", { class: "small" }, h("caption", {}, "Candidates of the latest placement"),
    h("thead", {}, h("tr", {}, ...head.map((each, index) => h("th", { scope: "col", class: index ? "num" : null }, each)))),
    h("tbody", {}, ...found.map((each, index) => h("tr", {}, h("th", { scope: "row" }, each.worker_id, index ? "" : " (chosen)"),
      h("td", { class: "num" }, seconds(each.predicted_ttft_s)), h("td", { class: "num" }, seconds(each.wait_s)), h("td", { class: "num" }, String(each.num_matched_tokens))))));
}

export function placement(timeline) {
  const decision = timeline.decision ?? {};
  return facts([
    ["Prefill", timeline.prefill_worker],
    ["Decode", timeline.decode_worker],
    ["Policy", decision.policy],
    ["Why there", decision.why],
    ["Workers compared", decision.num_candidates],
    ["Cached tokens", timeline.num_cached_tokens],
    ["Prefix pulled from", decision.pulled_from ? `${decision.pulled_from}, ${decision.num_pulled_tokens} tokens` : ""],
    ["First token, predicted", decision.predicted_ttft_s === null || decision.predicted_ttft_s === undefined ? "" : seconds(decision.predicted_ttft_s)],
    ["Per token, predicted", decision.predicted_tpot_s === null || decision.predicted_tpot_s === undefined ? "" : seconds(decision.predicted_tpot_s)],
    ["KV on its way", timeline.kv_transfer_s === null ? "" : `${seconds(timeline.kv_transfer_s)}, of which ${seconds(timeline.kv_exposed_s)} not hidden by prefill`],
    ["Drafted tokens kept", timeline.num_drafted_tokens ? `${timeline.num_accepted_tokens} of ${timeline.num_drafted_tokens}` : ""],
    ["Attempts", timeline.attempts],
    ["Moves", timeline.moves ? `${timeline.moves}, the last one ${timeline.moved_why}, longest gap ${seconds(timeline.move_pull_s)}` : "none"],
  ]);
}
