// Time series over the last ten minutes, by uPlot, with marks where the pools changed.

import { byId, clockTime, colour, count, onTheme, several, stageName } from "./common.js";
import { KINDS } from "./events.js";

const WINDOW_S = 600;
const HEIGHT = 150;
export const STAGES = ["decode_steps", "decode_queue", "kv_wait", "prefill_compute", "prefill_queue", "queue", "route", "failed"];
const STAGE_COLOURS = { decode_steps: "--s-steps", decode_queue: "--s-dq", kv_wait: "--s-exposed", prefill_compute: "--s-compute", prefill_queue: "--s-pq", queue: "--s-queue", route: "--s-route", failed: "--bad" };

// The time that charts and marks show, in Unix seconds.
export function spanOf(samples, epoch) {
  const end = samples.length ? samples.at(-1).at_s + epoch : Date.now() / 1000;
  const first = samples.length ? samples[0].at_s + epoch : end;
  return { start: Math.max(end - WINDOW_S, Math.min(first, end - 60)), end };
}

export class Charts {
  constructor(events) {
    this.events = events; // returns [{ at, kind }], for the marks
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
      this.one("c-goodput", [{ label: "good", read: (x) => x.good, colour: "--s-hidden", fill: 1 }, ...missed], { stacked: true }),
      this.one("c-tokens", [{ label: "tokens", read: (x) => x.answer_tokens, colour: "--s-compute", fill: 0.14 }]),
      this.one("c-load", [{ label: "in flight", read: (x) => x.in_flight, colour: "--s-compute", fill: 0.14 }, { label: "queue", read: (x) => x.queue, colour: "--s-queue" }]),
    ];
    if (this.samples) this.show(this.samples, this.epoch);
  }

  // Stacked series are drawn from the top of the stack down, each over all below it.
  one(id, parts, { stacked = false } = {}) {
    const element = byId(id);
    const raw = { columns: [] };
    const order = stacked ? [...parts].reverse() : parts;
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const options = {
      width: Math.max(element.clientWidth, 200), height: HEIGHT, pxAlign: false, legend: { live: true },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.08] } },
      axes: [{ ...axis, space: 80, size: 28, values: (_, ticks) => ticks.map(clockTime) }, { ...axis, size: 46, space: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6], values: (_, ticks) => ticks.map(count) }],
      series: [{ label: "at", value: (_, at) => (at ? clockTime(at) : "–") },
        ...order.map((part, index) => ({ label: part.label, stroke: colour(part.colour), width: stacked ? 0.5 : 1.6, points: { show: false }, paths: stacked ? uPlot.paths.stepped({ align: 1 }) : undefined,
          fill: part.fill ? colour(part.colour) + Math.round(part.fill * 255).toString(16).padStart(2, "0") : undefined, value: (_, __, ___, at) => (at === null || at === undefined ? "–" : count(raw.columns[index]?.[at] ?? 0)) }))],
      hooks: { draw: [(plot) => this.mark(plot)], setCursor: [(plot) => { if (plot.cursor.left < 0) latest(plot); }] },
      cursor: { drag: { x: false, y: false }, sync: { key: "time" }, points: { show: !stacked } },
    };
    const plot = new uPlot(options, [[], ...parts.map(() => [])], element);
    element.setAttribute("role", "img");
    return { plot, element, order, stacked, raw };
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
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

  show(samples, epoch) {
    this.samples = samples;
    this.epoch = epoch;
    const missed = STAGES.filter((stage) => samples.some((each) => each.missed[stage]));
    if (!this.made.length || missed.join() !== this.missed.join()) { this.missed = missed; this.make(); return; }
    const times = samples.map((each) => each.at_s + epoch);
    const { start, end } = spanOf(samples, epoch);
    for (const { plot, element, order, stacked, raw } of this.made) {
      raw.columns = order.map(({ read }) => samples.map(read));
      const drawn = stacked ? raw.columns.map((_, index) => samples.map((__, at) => raw.columns.slice(index).reduce((sum, each) => sum + each[at], 0))) : raw.columns;
      const highest = drawn.reduce((most, column) => column.reduce((one, each) => Math.max(one, each), most), 1);
      plot.batch(() => { plot.setData([times, ...drawn], false); plot.setScale("x", { min: start, max: end }); plot.setScale("y", { min: 0, max: highest * 1.08 }); });
      if (plot.cursor.left < 0) latest(plot);
      element.setAttribute("aria-label", order.map(({ label }, index) => `${label}: now ${count(raw.columns[index].at(-1) ?? 0)}, highest ${count(raw.columns[index].reduce((a, b) => Math.max(a, b), 0))}`).join("; ") + `, over ${several(samples.length, "second")}`);
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
