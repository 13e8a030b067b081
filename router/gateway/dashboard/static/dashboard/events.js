// What happened to the pools: marks on a time axis, a list, and the kinds that both show.

import { byId, h, keyed, redraw, roving, s } from "../shared/common.js";
import { clockTime, withRole } from "../shared/text.js";
import { hideTip, withTip } from "../shared/tips.js";

const PATTERNS = [ // of lines of the history
  ["death", /\b(died|lost|ended|exit|killed|unreachable|cannot be reached|did not|by force|anyway|refuses|crash|is dead)/i],
  ["start", /\b(is being started|was started|was found|started again|runs again)/i],
  ["version", /\b(weight|takes over|in place of|rollout|version|aborted|finish|leaves|is over|is gone|falls asleep|wakes|of the requests|its workers)/i],
  ["flip", /\b(flip|becomes?|is now|role|prefill|decod|mixed)/i],
  ["order", /\b(stopped|drain)/i],
];
export const KINDS = { death: "--bad", flip: "--s-compute", version: "--s-steps", planner: "--s-hidden", order: "--s-queue", start: "--s-route" };
const LABELS = { death: "Deaths", flip: "Flips", version: "Versions", planner: "Planner", order: "Orders" };
export const MARKED = Object.keys(LABELS);

const kindOf = (subject, what) => (subject === "planner" ? "planner" : PATTERNS.find(([, pattern]) => pattern.test(what))?.[0] ?? "order");

export function eventsOf(cluster) {
  const steps = (cluster?.steps ?? []).map((each) => ({ key: `s${each.number}`, at: each.at_s, kind: kindOf(each.subject, each.what), subject: withRole(each.subject, each.role), text: each.what, why: each.why }));
  const decisions = (cluster?.decisions ?? []).map((each) => ({ key: `d${each.number}`, at: each.at_s, kind: "planner", subject: `planner (${each.mode})`, text: each.summary, why: each.reasons.join("; ") }));
  return [...steps, ...decisions].sort((a, b) => b.at - a.at);
}

export function badgeOf(kind) {
  const mark = h("i", { class: "swatch" });
  mark.style.background = `var(${KINDS[kind]})`;
  return h("span", { class: "kind" }, mark, kind);
}

const tellOf = (each) => [h("strong", {}, `${clockTime(each.at)} ${each.subject}`), ` ${each.text}`, each.why ? h("div", { class: "why" }, each.why) : ""];

// Marks by kind over the same time as the charts. Arrow keys go from mark to mark.
export function drawStrip(container, events, { start, end }) {
  const shown = events.filter((each) => MARKED.includes(each.kind) && each.at >= start && each.at <= end).reverse();
  const [left, row] = [80, 22];
  const width = Math.max(container.clientWidth, 240);
  const scale = (width - left - 10) / Math.max(end - start, 1);
  redraw(container, ".mark", () => {
    const parts = [];
    MARKED.forEach((kind, index) => {
      const y = index * row;
      parts.push(s("rect", { x: 0, y: y + 6, width: 9, height: 9, rx: 2, class: `k-${kind}` }), s("text", { x: 15, y: y + 15 }, LABELS[kind]), s("line", { x1: left, x2: width, y1: y + row - 0.5, y2: y + row - 0.5, class: "lane-line" }));
      for (const each of shown.filter((one) => one.kind === kind)) {
        const x = left + (each.at - start) * scale;
        const mark = s("g", { class: "mark", role: "button", tabindex: -1, "data-key": each.key, "aria-label": `${kind}, ${clockTime(each.at)}: ${each.subject} ${each.text}${each.why ? `. ${each.why}` : ""}` },
          s("rect", { x: x - 7, y: y + 1, width: 14, height: row - 3, rx: 4, class: "halo" }),
          s("rect", { x: x - 2.5, y: y + 3, width: 5, height: row - 7, rx: 2, class: `k-${kind}` }));
        const open = () => toEntry(each.key);
        mark.addEventListener("click", open);
        mark.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } });
        parts.push(withTip(mark, () => tellOf(each)));
      }
    });
    const step = [5, 10, 15, 30, 60, 120, 300].find((each) => each * scale > 84) ?? 600;
    for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
      const x = left + (at - start) * scale;
      if (x > width - 28) break;
      parts.push(s("text", { x, y: MARKED.length * row + 15, "text-anchor": x - left < 28 ? "start" : "middle" }, clockTime(at)));
    }
    container.replaceChildren(s("svg", { width, height: MARKED.length * row + 22, role: "group", "aria-label": `${shown.length} marks` }, ...parts));
  });
}

// Shows the entry of a mark in the list.
function toEntry(key) {
  byId("event-filter").value = "";
  byId("event-filter").dispatchEvent(new Event("input"));
  const entry = byId("events").querySelector(`[data-key="${key}"]`);
  if (!entry) return;
  hideTip();
  entry.scrollIntoView({ block: "center" });
  for (const each of byId("events").querySelectorAll(".told")) each.classList.remove("told");
  entry.classList.add("told");
  entry.tabIndex = -1;
  entry.focus({ preventScroll: true });
}

export function drawEvents(events) {
  const wanted = byId("event-filter").value.toLowerCase();
  const items = events.filter((each) => `${each.kind} ${each.subject} ${each.text} ${each.why}`.toLowerCase().includes(wanted)).slice(0, 150);
  byId("no-events").hidden = items.length > 0;
  keyed(byId("events"), items, (each) => each.key, (each) => h("li", { "data-key": each.key }, h("time", { class: "dim" }, clockTime(each.at)), badgeOf(each.kind), h("span", { class: "what" }, h("strong", {}, each.subject), ` ${each.text}`, each.why ? h("span", { class: "why" }, ` — ${each.why}`) : null)), () => {});
}

export const rove = (container) => roving(container, ".mark");
