// The tiles: numbers of the last minute, each with a note and how bad it is. Pure.
// What is not known is never shown as good.

import { count, isStore, quantile, seconds, several } from "../shared/text.js";

const LONG_WAIT_S = 10; // for a first token, where no bound is set

const sum = (samples, read) => samples.reduce((total, each) => total + read(each), 0);

// Requests without a bound are neither good nor bad.
export function goodputOf(samples) {
  const [ended, good, unbounded, failed] = [(x) => x.ended, (x) => x.good, (x) => x.unbounded, (x) => x.missed.failed ?? 0].map((read) => sum(samples, read));
  if (!ended) return ["–", "no request ended", ""];
  if (failed === ended) return ["0 %", `all ${several(ended, "request")} failed`, "bad"];
  if (unbounded + failed === ended && unbounded) {
    return ["–", `no bound set; ${failed ? `${count(failed)} of ${several(ended, "request")} failed` : `${several(ended, "request")} ended`}`, failed ? "bad" : ""];
  }
  const judged = ended - unbounded;
  const share = good / judged;
  return [`${Math.floor(share * 100)} %`, `${count(good)} of ${count(judged)} in bounds${unbounded ? `, ${count(unbounded)} without` : ""}`, share >= 0.99 ? "" : share >= 0.9 ? "warn" : "bad"];
}

function timeTile(name, values, bound, trouble) {
  const limit = bound === null ? "no bound set" : `bound ${seconds(bound)}`;
  const middle = quantile(values, 0.5);
  const isLate = bound !== null && middle !== null && middle > bound;
  return [name, seconds(middle), trouble || `p95 ${seconds(quantile(values, 0.95))}, ${limit}`, trouble || isLate ? "warn" : ""];
}

function workersTile(state) {
  const connected = state.workers.filter((each) => !isStore(each)).length;
  if (!state.pools) return ["Workers", `${connected} / ?`, "wanted ones are unknown", "warn"];
  const wanted = state.pools.reduce((total, each) => total + each.wanted, 0);
  return ["Workers", `${connected} / ${wanted}`, "connected / wanted", !connected && wanted ? "bad" : connected < wanted ? "warn" : ""];
}

function stateTile({ level, word, reasons }) {
  const more = reasons.length > 2 ? `, +${reasons.length - 2} more` : "";
  return ["State", word, `${reasons.slice(0, 2).join(", ")}${more}`, level];
}

export function tilesOf(state) {
  const samples = state.samples.slice(-60);
  const latest = state.samples.at(-1);
  const since = state.now_s - 60;
  const ended = state.requests.filter((each) => each.received_s + each.e2e_s >= since && each.outcome !== "cancelled" && !each.is_background);
  const times = (name) => ended.map((each) => each[name]).filter((each) => each !== null);
  const { ttft_s: first, tpot_s: pace } = state.bounds;
  const waiting = latest?.waiting_s ?? 0;
  const stalled = latest?.num_stalled ?? 0;
  const isStill = state.in_flight > 0 && latest && !latest.answer_tokens;
  const known = state.has_controller && state.cluster;
  return [
    stateTile(state.health),
    ["Goodput, 1 min", ...goodputOf(samples)],
    timeTile("First token, p50", times("ttft_s"), first, waiting > (first ?? LONG_WAIT_S) ? `one waits for ${seconds(waiting)}` : ""),
    timeTile("Per token, p50", times("tpot_s"), pace, stalled ? `${several(stalled, "answer")} ${stalled === 1 ? "stands" : "stand"} still` : ""),
    ["In flight", count(state.in_flight), `${count(latest?.answer_tokens ?? 0)} tokens/s`, isStill ? "warn" : ""],
    ["Queue", count(state.queue), state.queue ? `${seconds(state.queue_s)} to compute` : "none waits for a worker", state.queue ? "warn" : ""],
    workersTile(state),
    ["Planner", known ? state.cluster.planner : "–", known ? `room for ${several(state.cluster.max_workers, "worker")}` : "no controller reports", known ? "" : "warn"],
  ];
}
