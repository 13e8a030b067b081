// The state of all gateway processes that share the port, as if they were one. Pure.

const MAX_REQUESTS = 256;
const MAX_SAMPLES = 600;
const BREAK_S = 3.5; // samples come once a second; after a longer time something was not seen
const LEVELS = ["good", "warn", "bad"];

const add = (into, each, names) => { for (const name of names) into[name] = (into[name] ?? 0) + each[name]; return into; };
const slower = (one, two) => (one && two ? { p50_s: Math.max(one.p50_s, two.p50_s), p95_s: Math.max(one.p95_s, two.p95_s) } : one ?? two);

// The rings of each process with what is new. `seen` has them by name; null begins anew.
export function takenUp(seen, parts, epoch) {
  const rings = new Map();
  for (const { process, requests, samples } of parts) {
    const ring = seen?.get(process) ?? { requests: [], samples: [] };
    const timed = samples.map((each) => ({ ...each, unix: each.at_s + epoch }));
    rings.set(process, { requests: [...ring.requests, ...requests].slice(-MAX_REQUESTS), samples: [...ring.samples, ...timed].slice(-MAX_SAMPLES) });
  }
  return rings;
}

// `former` are samples that this page has from gateways before the present ones.
export function joined(state, parts, rings, former) {
  const all = [...rings.values()];
  const ended = (each) => each.received_s + each.e2e_s;
  const requests = all.flatMap((each) => each.requests).sort((a, b) => ended(a) - ended(b)).slice(-MAX_REQUESTS);
  const running = parts.flatMap((each) => each.running.map((one) => runningRow(one, state.now_s)));
  const processes = parts.map(({ process, in_flight, queue, started_s }) => ({ process, in_flight, queue, started_s }));
  const health = parts.map((each) => each.health).sort((a, b) => LEVELS.indexOf(b.level) - LEVELS.indexOf(a.level))[0];
  const own = parts.length === 1 ? all[0].samples : mergedSamples(all.flatMap((each) => each.samples));
  const samples = [...former.filter((each) => !own.length || each.unix < own[0].unix - 0.5), ...own].slice(-MAX_SAMPLES);
  const whole = { ...state, requests, running, processes, health, samples };
  if (parts.length === 1) return whole;
  const sum = (read) => parts.reduce((total, each) => total + read(each), 0);
  return {
    ...whole,
    queue: sum((each) => each.queue), queue_s: sum((each) => each.queue_s), in_flight: sum((each) => each.in_flight),
    hits: parts.reduce((into, each) => add(into, each.hits, Object.keys(each.hits)), {}),
    transfers: grouped(parts.flatMap((each) => each.transfers), (each) => `${each.source} ${each.sink}`, ["num_transfers", "num_bytes", "timed_bytes", "seconds", "exposed_s"]),
    versions: grouped(parts.flatMap((each) => each.versions), (each) => each.name, ["num_requests", "ended", "failed", "late"]),
    counts: grouped(parts.flatMap((each) => each.counts), (each) => `${each.where} ${each.event} ${each.reason}`, ["number"]),
  };
}

function grouped(items, keyOf, names) {
  const found = new Map();
  for (const each of items) {
    const one = found.get(keyOf(each));
    if (one) add(one, each, names);
    else found.set(keyOf(each), { ...each });
  }
  return [...found.values()];
}

// One sample a second. Times are the slowest of all gateways, as percentiles cannot be added.
function mergedSamples(samples) {
  const found = new Map();
  for (const each of [...samples].sort((a, b) => a.at_s - b.at_s)) {
    const key = Math.floor(each.at_s);
    const one = found.get(key);
    if (!one) { found.set(key, { ...each, missed: { ...each.missed } }); continue; }
    add(one, each, ["queue", "in_flight", "ended", "good", "unbounded", "prompt_tokens", "answer_tokens", "num_stalled"]);
    add(one.missed, each.missed, Object.keys(each.missed));
    Object.assign(one, { ttft: slower(one.ttft, each.ttft), tpot: slower(one.tpot, each.tpot), waiting_s: Math.max(one.waiting_s, each.waiting_s) });
  }
  return [...found.values()];
}

// A request that runs, with the fields of one that has ended.
function runningRow(each, at) {
  const line = each.timeline;
  const first = line && each.answer_tokens ? line.route_s + line.queue_s + line.prefill_queue_s + line.prefill_compute_s : null;
  const e2e = at - each.received_s;
  const pace = first !== null && each.answer_tokens > 1 ? Math.max(e2e - first, 0) / (each.answer_tokens - 1) : null;
  return { ...each, runs: true, outcome: "running", reason: "", missed: "", ttft_s: first, tpot_s: pace, e2e_s: e2e };
}

// The samples with a break wherever some are missing, so that no line is drawn through it.
export function withBreaks(samples) {
  return samples.flatMap((each, index) => {
    const next = samples[index + 1];
    return next && next.unix - each.unix > BREAK_S ? [each, { unix: each.unix + 1, isBreak: true, missed: {} }] : [each];
  });
}

// The time that charts and marks show, in Unix seconds: all that is known of the last ten minutes.
export function spanOf(samples, events, now) {
  const end = Math.max(samples.at(-1)?.unix ?? now, now);
  const known = [end - 60, ...samples.slice(0, 1).map((each) => each.unix), ...events.map((each) => each.at - 5)];
  return { start: Math.max(end - MAX_SAMPLES, Math.min(...known)), end };
}

// The note about gateways that started within the shown time; empty without any.
export function startsIn(processes, { start, end }, clockTime) {
  const young = processes.filter((each) => each.started_s > start && each.started_s <= end);
  if (!young.length) return "";
  const names = young.map((each) => `${processes.length > 1 ? `gateway ${each.process || "0"}` : "this gateway"} started at ${clockTime(each.started_s)}`);
  const told = names.join(", ");
  return `${told[0].toUpperCase()}${told.slice(1)}. Numbers from before are gone, except those that this page has seen. Marks come from the controller.`;
}
