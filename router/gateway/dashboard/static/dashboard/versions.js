// Versions with their shares of requests, the one that takes over, and what the planner thinks.

import { byId, h, keyed, setText } from "../shared/common.js";
import { count, percent, several } from "../shared/text.js";
import { ago } from "./workers.js";

// From this gateway's own sessions: the controller's report may be older than its death.
const sizes = (pools) => pools.filter((each) => each.wanted || each.serving).map((each) => `${each.role} ${each.serving} / ${each.wanted}`).join(", ") || "none";

function rowsOf(state) {
  const cards = new Map(state.versions.map((each) => [each.name, each]));
  const news = new Map((state.cluster?.versions ?? []).map((each) => [each.name, each]));
  const names = [...new Set([...news.keys(), ...cards.keys()])];
  const line = (name) => news.get(name)?.line ?? "";
  const weight = (name) => cards.get(name)?.weight ?? news.get(name)?.weight ?? 0;
  const total = (own) => names.filter((name) => line(name) === own).reduce((sum, name) => sum + weight(name), 0);
  return names.map((name) => ({ name, card: cards.get(name), news: news.get(name), total: total(line(name)) })); // of its model
}

function statusOf({ card, news, name }, state) {
  if (news?.is_asleep) return ["sleeps until a request comes", ""];
  if (card?.missing) return [`cannot serve: ${card.missing}`, "bad"];
  if (news?.is_leaving ?? card?.is_leaving) return ["leaves after its last request", "warn"];
  if (state.cluster?.taking_over === name) return ["takes over", "warn"];
  if (!card) return ["is being started", "warn"];
  return [news?.is_current ? "current" : "serves", "good"];
}

export function drawVersions(state) {
  keyed(byId("versions").tBodies[0], rowsOf(state), (each) => each.name,
    () => h("tr", {}, h("th", { scope: "row" }), h("td"), h("td", { class: "wrap" }), h("td", { class: "whole" }, h("div", { class: "hbar" }, h("i", { class: "c-owned" })), h("div", { class: "sub" })), h("td", { class: "whole" }), ...["Running", "Ended", "Failed", "Late"].map((each) => h("td", { class: "num", "data-label": each }))),
    (element, row) => {
      const { card, news, total } = row;
      const [name, model, status, share, workers, running, ended, failed, late] = element.children;
      const weight = card?.weight ?? news?.weight ?? 0;
      const [text, kind] = statusOf(row, state);
      setText(name, row.name);
      setText(model, news?.model_name ?? card?.models.join(", ") ?? "");
      setText(status, text);
      status.className = `wrap ${kind}`;
      share.firstElementChild.firstElementChild.style.width = total ? `${(100 * weight) / total}%` : "0";
      setText(share.lastElementChild, `${percent(weight, total)} (weight ${weight})`);
      const pools = state.pools?.filter((each) => each.version === row.name);
      setText(workers, pools ? sizes(pools) : "–");
      workers.className = pools?.some((each) => each.wanted && !each.serving) ? "whole bad" : "whole";
      setText(running, card ? count(card.num_requests) : "–");
      setText(ended, card ? count(card.ended) : "–");
      setText(failed, card ? count(card.failed) : "–");
      failed.className = card?.failed ? "num bad" : "num";
      setText(late, card ? count(card.late) : "–");
      late.className = card?.late ? "num warn" : "num";
    });
  drawCanary(state);
}

function drawCanary(state) {
  const holder = byId("canary");
  const canary = state.cluster?.canary;
  const to = state.cluster?.taking_over;
  holder.hidden = !to;
  if (!to) return;
  if (!canary) { holder.replaceChildren(h("p", {}, h("strong", {}, to), " takes over. The other versions leave, or give their workers back.")); return; }
  const held = canary.since_s ? Math.max(0, state.epoch_s + state.now_s - canary.since_s) : 0;
  const later = canary.shares.filter((each) => each !== canary.weight);
  const isHeld = canary.shares.includes(canary.weight);
  const kind = canary.verdict === "good so far" ? "good" : "warn";
  const row = (name, counts) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "num" }, count(counts.ended)), h("td", { class: "num" }, `${count(counts.failed)} (${percent(counts.failed, counts.ended)})`), h("td", { class: "num" }, `${count(counts.late)} (${percent(counts.late, counts.ended)})`));
  const progress = h("div", { class: "hbar" }, h("i", { class: "c-decode_steps" }));
  progress.firstElementChild.style.width = isHeld && canary.hold_s ? `${Math.min(100, (100 * held) / canary.hold_s)}%` : "0";
  holder.replaceChildren(
    h("p", {}, h("strong", {}, canary.name), " takes over: ", h("strong", { class: kind }, canary.verdict), `. It has ${canary.weight} % of the new requests`,
      isHeld ? ` for ${ago(held)} of ${ago(canary.hold_s)}` : "", later.length ? `, then ${later.map((each) => `${each} %`).join(", ")}, then all.` : "."),
    ...(isHeld ? [progress] : []),
    h("p", { class: "dim" }, `Requests that ended in this step; it is judged from ${canary.min_requests} on:`),
    h("table", { class: "small" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Served by"), ...["Ended", "Failed", "Late"].map((each) => h("th", { scope: "col", class: "num" }, each)))),
      h("tbody", {}, row(canary.name, canary.own), row("other versions", canary.others))));
}

export function drawPlanner(state) {
  const cluster = state.cluster;
  const told = { off: "The planner is off: pools change by orders only.", "dry-run": "The planner only tells what it would do.", on: "The planner sets the pools from the load." };
  setText(byId("planner-mode"), told[cluster?.planner] ?? "No controller has reported yet.");
  setText(byId("planner-count"), cluster?.decisions.length ? `${several(cluster.decisions.length, "decision")}, listed in the events` : "");
  const last = cluster?.decisions.at(-1);
  const list = (lines) => h("ul", {}, ...lines.map((each) => h("li", {}, each)));
  const now = cluster?.planner_reasons ?? [];
  const parts = [
    ...(now.length ? [["It sees now", now]] : []),
    ...(last ? [[`Its last decision, ${ago(Math.max(0, state.epoch_s + state.now_s - last.at_s))} ago: ${last.summary}`, last.reasons]] : []),
  ];
  const holder = byId("planner-reasons");
  const shape = JSON.stringify(parts);
  if (holder._shape === shape) return;
  holder._shape = shape;
  holder.replaceChildren(...parts.map(([title, lines]) => h("div", {}, h("h4", {}, title), list(lines))));
}
