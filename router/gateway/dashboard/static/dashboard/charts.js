// Time series over the last ten minutes, by uPlot, with marks where the pools changed.

import { byId, colour, onTheme } from "../shared/common.js";
import { clockTime, count, seconds, several, stageName } from "../shared/text.js";
import { KINDS } from "./events.js";
import { withBreaks } from "./joined.js";

const HEIGHT = 150;
export const STAGES = ["decode_steps", "decode_queue", "kv_wait", "prefill_compute", "prefill_queue", "queue", "route", "failed"];
const STAGE_COLOURS = { decode_steps: "--s-steps", decode_queue: "--s-dq", kv_wait: "--s-exposed", prefill_compute: "--s-compute", prefill_queue: "--s-pq", queue: "--s-queue", route: "--s-route", failed: "--bad" };

const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
const TIMES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600];
const spread = (name) => [{ label: "p50", read: (x) => x[name]?.p50_s ?? null, colour: "--s-compute" }, { label: "p95", read: (x) => x[name]?.p95_s ?? null, colour: "--s-steps" }];
const highestOf = (column) => column.reduce((most, each) => Math.max(most, each ?? 0), 0);

export class Charts {
  // `events` returns [{ at, kind }], for the marks.
  constructor(events) {
    this.events = events;
    this.made = [];
    this.missed = []; // stages that have missed a bound: each is a series
    onTheme(() => this.make());
    new ResizeObserver(() => this.fit()).observe(byId("c-goodput"));
  }

  make() {
    for (const { plot } of this.made) plot.destroy();
    const missed = this.missed.map((stage) => ({ label: `missed at ${stageName(stage)}`, read: (x) => x.missed[stage] ?? 0, colour: STAGE_COLOURS[stage], fill: 1 }));
    missed.forEach((each) => { if (each.label.includes("failed")) each.label = "refused or failed"; });
    this.made = [
      this.one("c-goodput", [{ label: "good", read: (x) => x.good, colour: "--s-hidden", fill: 1 }, { label: "no bound set", read: (x) => x.unbounded, colour: "--s-route", fill: 1 }, ...missed], { stacked: true }),
      this.one("c-tokens", [{ label: "tokens", read: (x) => x.answer_tokens, colour: "--s-compute", fill: 0.14 }]),
      this.one("c-load", [{ label: "in flight", read: (x) => x.in_flight, colour: "--s-compute", fill: 0.14 }, { label: "queue", read: (x) => x.queue, colour: "--s-queue" }]),
      this.one("c-ttft", [...spread("ttft"), { label: "longest wait", read: (x) => x.waiting_s || null, colour: "--s-queue" }], { bound: "ttft_s" }),
      this.one("c-tpot", spread("tpot"), { bound: "tpot_s" }),
    ];
    if (this.samples) this.show(this.samples, this.span, this.bounds);
  }

  // Stacked series are drawn from the top of the stack down, each over all below it.
  // A chart of times has a bound, which is drawn as a line.
  one(id, parts, { stacked = false, bound = null } = {}) {
    const element = byId(id);
    const raw = { columns: [] };
    const order = stacked ? [...parts].reverse() : parts;
    const text = bound ? seconds : count;
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const options = {
      width: Math.max(element.clientWidth, 200), height: HEIGHT, pxAlign: false, legend: { live: true },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.08] } },
      axes: [{ ...axis, space: 80, size: 28, values: (_, ticks) => ticks.map(clockTime) }, { ...axis, size: bound ? 62 : 46, space: 28, incrs: bound ? TIMES : COUNTS, values: (_, all) => all.map(text) }],
      series: [{ label: "at", value: (_, at) => (at ? clockTime(at) : "–") },
        ...order.map((part, index) => ({ label: part.label, stroke: colour(part.colour), width: stacked ? 0.5 : 1.6, points: { show: Boolean(bound), size: 3 }, paths: stacked ? uPlot.paths.stepped({ align: 1 }) : undefined,
          fill: part.fill ? colour(part.colour) + Math.round(part.fill * 255).toString(16).padStart(2, "0") : undefined, value: (_, __, ___, at) => (at === null || at === undefined ? "–" : text(raw.columns[index]?.[at] ?? (bound ? null : 0))) }))],
      hooks: { draw: [(plot) => this.mark(plot, bound)], setCursor: [(plot) => { if (plot.cursor.left < 0) latest(plot); }] },
      cursor: { drag: { x: false, y: false }, sync: { key: "time" }, points: { show: !stacked } },
    };
    const plot = new uPlot(options, [[], ...parts.map(() => [])], element);
    element.setAttribute("role", "img");
    return { plot, element, order, stacked, raw, text, bound };
  }

  mark(plot, bound) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    const limit = bound ? this.bounds?.[bound] ?? null : null;
    if (limit !== null) {
      const y = plot.valToPos(limit, "y", true);
      ctx.strokeStyle = colour("--bad");
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { at, kind } of this.events()) {
      if (at < plot.scales.x.min || at > plot.scales.x.max) continue;
      const x = plot.valToPos(at, "x", true);
      ctx.strokeStyle = colour(KINDS[kind]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  show(samples, span, bounds) {
    Object.assign(this, { samples, span, bounds });
    const missed = STAGES.filter((stage) => samples.some((each) => each.missed[stage]));
    if (!this.made.length || missed.join() !== this.missed.join()) { this.missed = missed; this.make(); return; }
    const shown = withBreaks(samples);
    const times = shown.map((each) => each.unix);
    for (const { plot, element, order, stacked, raw, text, bound } of this.made) {
      raw.columns = order.map(({ read }) => shown.map((each) => (each.isBreak ? null : read(each))));
      const drawn = stacked ? raw.columns.map((_, index) => shown.map((each, at) => (each.isBreak ? null : raw.columns.slice(index).reduce((sum, column) => sum + column[at], 0)))) : raw.columns;
      const limit = bound ? bounds[bound] ?? 0 : 1;
      const most = drawn.reduce((one, column) => column.reduce((two, each) => Math.max(two, each ?? 0), one), limit) || 0.01;
      plot.batch(() => { plot.setData([times, ...drawn], false); plot.setScale("x", { min: span.start, max: span.end }); plot.setScale("y", { min: 0, max: most * 1.08 }); });
      if (plot.cursor.left < 0) latest(plot);
      element.setAttribute("aria-label", order.map(({ label }, index) => `${label}: now ${text(raw.columns[index].at(-1) ?? null)}, highest ${text(highestOf(raw.columns[index]))}`).join("; ") + `, over ${several(samples.length, "second")}`);
    }
  }

  fit() {
    for (const { plot, element } of this.made) plot.setSize({ width: Math.max(element.clientWidth, 200), height: HEIGHT });
  }
}

// The legend tells the latest values while no time is pointed at.
function latest(plot) {
  const last = plot.data[0].length - 1;
  if (last >= 0) plot.setLegend({ idx: last }, false);
}
